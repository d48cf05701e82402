import argparse
import io
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps
from torch.multiprocessing.reductions import StorageWeakRef
from torchvision.transforms import v2

import finetune
import mae
import train
from mae import MAE
from tests.conftest import (DECODER, ROOT, TINY, ended, fork, same, script, settings, shell,
                            together, write_pictures)
from tests.golden import load
from tests.test_methods import BASE, flags
from vit import denormalize, from_released, patchify


def log(name="mae"):
    return [json.loads(line) for line in open(f"runs/{name}/log.jsonl")]


def test_shapes():
    (pictures, labels), again = (train.draw_shapes(40, (24, 32), 3) for _ in range(2))
    assert pictures.shape == (40, 3, 24, 32) and pictures.dtype == torch.uint8
    assert torch.equal(pictures, again[0]) and len(labels.bincount().unique()) == 1
    assert not torch.equal(pictures, train.draw_shapes(40, (24, 32), 4)[0])
    part, val, size = train.open_data("shapes", None, settings())
    assert size == (32, 32) and len(part.labels) == 10_000 and len(val.labels) == 1_000
    assert not torch.equal(part.images[:1000], val.images) and len(part.classes) > 4


def test_class_folders_in_memory(folder, spy):
    """Each class folder is listed once."""
    listed = spy(os, "scandir", str)
    part, val, size = train.open_data(str(folder), None, settings())
    folders = [str(folder / part / name) for part in ("train", "val") for name in "ab"]
    assert [listed.count(path) for path in folders] == [1, 1, 1, 1]
    assert part.images.shape == (40, 3, 16, 16) and val.images.shape == (11, 3, 16, 16)
    assert part.images.dtype == torch.uint8 and size == (16, 16) and part.classes == ["a", "b"]
    assert part.labels.tolist() == [0] * 20 + [1] * 20
    red, blue = (x.float().mean((0, 2, 3)) for x in part.images.split(20))
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50
    a, b = (train.open_data(str(folder), (24, 32), settings(workers=n))[0].images for n in (0, 2))
    assert a.shape == (40, 3, 24, 32) and torch.equal(a, b)
    assert not multiprocessing.active_children()


def test_flat_folder_holds_out_by_name(tmp_path):
    """5%, at least one; more pictures move none."""
    def names():
        return [set(files) for files, *_ in train.list_folder(tmp_path)]
    write_pictures(tmp_path, "x", 2, side=1)
    assert [len(part) for part in names()] == [1, 1]
    write_pictures(tmp_path, "x", 300, side=1)
    (part, val), (split, *_) = names(), train.open_data(str(tmp_path), None, settings())
    assert len(part) + len(val) == 300 and 5 <= len(val) <= 30 and not part & val
    assert split.classes == [] and set(split.labels.tolist()) == {-1}
    write_pictures(tmp_path, "y", 300, side=1)
    assert part < names()[0] and val < names()[1]
    (tmp_path / "low").mkdir()                             # two of the 5%: one is trained on
    low = [f"{i}.png" for i in range(99) if zlib.crc32(b"%d.png" % i) < 2 ** 27][:2]
    for name in low:
        (tmp_path / "low" / name).touch()
    assert [len(part) for part, *_ in train.list_folder(tmp_path / "low")] == [1, 1]


def test_names_in_any_encoding(tmp_path, monkeypatch):
    """Bytes that are not UTF-8, as of an old archive; and a console that has no letter of them."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "画像"
    write_pictures(folder, "x", 40)
    try:
        (folder / "x/0.png").rename(folder / os.fsdecode(b"caf\xe9.png"))
    except OSError:                                        # not on every system
        pytest.skip("this system's names are Unicode")
    console = io.TextIOWrapper(io.BytesIO(), "cp1252")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", str(folder), *TINY, *DECODER])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    train.main()
    console.flush()
    assert rb"mae_\u753b\u50cf" in console.buffer.getvalue()


def test_the_size_is_of_a_sample(tmp_path):
    """Not of the first file. What is larger is streamed, and 224 pixels are enough."""
    write_pictures(tmp_path, "a", 3, side=8)
    write_pictures(tmp_path, "b", 3, side=40)
    split, _, size = train.open_data(str(tmp_path), None, settings())
    assert size == (40, 40) and torch.is_tensor(split.images)
    write_pictures(tmp_path, "c", 3, side=240)
    split, _, size = train.open_data(str(tmp_path), None, settings())
    assert size == (224, 224) and isinstance(split.images[0], str)


def test_streamed_pictures(tmp_path):
    """In pieces, put together; the same whoever draws them."""
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 200, side=12)
    split, _, size = train.open_data(str(tmp_path), (8, 8), settings())
    assert size == (8, 8) and isinstance(split.images[0], str)
    split.transform = train.crop_transform(size, settings(crop=0.5, flip=True))
    batches = torch.randperm(400).split(300)

    def draw(workers, seed):
        return [*train.load_images(split, batches, settings(workers=workers), seed)]
    (first, labels), (rest, _) = draw(0, seed=1)
    assert first.shape == (300, 3, 8, 8) and rest.shape == (100, 3, 8, 8)
    assert first.dtype == torch.uint8 and torch.equal(labels, split.labels[batches[0]])
    assert torch.equal(first[299], split[1, batches[0][299].item()][0])
    crop = train.crop_transform((8, 8), settings())        # the whole, bicubic
    image = train.read_image(split.images[0])
    assert torch.equal(crop(image), v2.functional.resize(image, (8, 8), Image.BICUBIC))
    val = train.open_data(str(tmp_path), (8, 8), settings())[1]        # of 12 pixels, 7/8
    middle = train.read_image(val.images[3])[:, 1:11, 1:11]
    assert torch.equal(val[0, 3][0], v2.functional.resize(middle, (8, 8), Image.BICUBIC))
    second = draw(0, seed=2)[0][0]
    assert not torch.equal(first, second)
    assert torch.equal(draw(2, seed=1)[0][0], first) and torch.equal(draw(2, seed=2)[0][0], second)
    assert not multiprocessing.active_children()


def test_no_test_file_needs_unix(monkeypatch):
    """To be imported, without what Windows lacks."""
    for name in ("resource", "fcntl"):
        monkeypatch.setitem(sys.modules, name, None)
    for owner, name in ((os, "fork"), (os, "setsid"), (os, "getuid"), (os, "killpg"),
                        (signal, "SIGKILL")):
        monkeypatch.delattr(owner, name)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        runpy.run_path(str(file), run_name="imported")
    with pytest.raises(pytest.skip.Exception):
        fork(print)


def test_workers_that_are_spawned(folder, pretrain, monkeypatch):
    """As on Windows and macOS, for a folder that is kept in memory and one that is streamed."""
    plain = pretrain("--epochs", "1")["model"]
    split, *_ = train.open_data(str(folder), (8, 8), settings())
    split.transform = train.crop_transform((8, 8), settings(crop=0.5))
    load = partial(train.load_images, split, [torch.arange(20)])
    (images, _), = load(settings())
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "fork")
    try:
        multiprocessing.set_start_method("spawn", force=True)
        assert same(plain, pretrain("--epochs", "1", "--workers", "1", "--overwrite")["model"])
        assert torch.equal(images, next(load(settings(workers=1)))[0])
    finally:
        multiprocessing.set_start_method(None, force=True)


@pytest.mark.parametrize("high, wide, size, patch", [
    (150, 150, "144x144", "16x16"), (97, 97, "96x96", "12x12"), (50, 70, "48x64", "6x8"),
    (33, 33, "32x32", "4x4"), (427, 640, "224x224", "16x16")])
def test_images_of_any_size(tmp_path, monkeypatch, capsys, high, wide, size, patch):
    """Train without a flag on sizes. The recipe's batch is no larger than the data."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for i in range(9):
        Image.effect_noise((wide, high), 50).save(f"data/{i}.png")
    train.main("--data data --dim 8 --depth 1 --heads 1 --epochs 1 --workers 0 --decoder_dim 8 "
               "--decoder_depth 1 --decoder_heads 1".split())
    said = capsys.readouterr().out
    assert f"{size} px in " in said and f"patches of {patch} px" in said
    assert f"of up to {high}x{wide} px are used at {size} px" in said
    assert "8 training images: --batch_size 8, not 64" in said


@pytest.mark.parametrize("gpus, mps, processes, wanted", [
    (0, True, 1, "mps"), (0, True, 2, "cpu"), (1, False, 1, "cuda:1"), (1, True, 2, "cpu"),
    (2, False, 2, "cuda:1"), (0, False, 1, "cpu")])
def test_devices(monkeypatch, capsys, gpus, mps, processes, wanted):
    """Of local rank 1. Several processes without a GPU each compute on the CPU, and say so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    args = settings(device=None, world=processes, local_rank=1)
    assert str(train.choose_device(args, processes)) == wanted
    said = "all processes compute on the CPU" in capsys.readouterr().out
    assert said == (processes > 1 and wanted == "cpu")


def test_copies_are_waited_for(folder, spy):
    """On other devices than CUDA: MPS has been seen to give garbage."""
    copies = spy(torch.Tensor, "to", lambda *_, non_blocking=False, **__: non_blocking)
    split, *_ = train.open_data(str(folder), (8, 8), settings())
    [*train.load_images(split, torch.arange(8).split(4), settings(device=torch.device("meta")))]
    train.METHODS["imae"].draw_alpha(SimpleNamespace(beta=1.0, mix=None), "meta")
    assert copies and not any(copies)


def test_decoders(tmp_path):
    """JPEGs to the last bit as PIL decodes them, what is transparent white, 16 bits scaled."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (5, 7, 3), "uint8")).resize((70, 50))
    deep = rng.integers(0, 65536, (5, 7), "uint16")
    clear = picture.convert("RGBA")
    clear.putalpha(Image.new("L", picture.size, 0))
    palette = picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    white = Image.new("RGB", picture.size, "white")
    cases = [(f"{kind}.jpg", picture.convert(kind), None, {}) for kind in ("RGB", "L", "CMYK")]
    cases += [(f"{mode} 狮.png", picture.convert(mode), None, {}) for mode in ("L", "LA", "RGBA")]
    for turn in range(1, 9):
        exif = picture.getexif()
        exif[0x0112] = turn
        cases += [(f"{turn}.{end}", picture, None, dict(exif=exif)) for end in ("jpg", "png")]
    cases += [("point.jpg", picture.resize((1, 1)), None, {}), ("a.png", clear, white, {}),
              ("p.png", palette, palette.convert("RGB"), {}),
              ("t.png", palette, white, dict(transparency=bytes(4))),
              ("16.png", Image.fromarray(deep), Image.fromarray((deep >> 8).astype("uint8")), {}),
              ("x.bmp", picture, picture, {}), ("x.webp", picture, picture, dict(lossless=True))]
    for name, image, wanted, more in cases:
        image.save(tmp_path / name, **more)
        wanted = (wanted or ImageOps.exif_transpose(Image.open(tmp_path / name))).convert("RGB")
        got = train.read_image(str(tmp_path / name))
        assert got.dtype == torch.uint8, name
        assert torch.equal(got, v2.functional.pil_to_tensor(wanted)), name


def test_cifar_is_downloaded_by_one_process(tmp_path, monkeypatch):
    """For both; its files are then read by both. --eval takes its pictures at the model's size."""
    class Stub:
        classes = ["a", "b"]

        def __init__(self, root, train=True, download=False):
            if download and not Path(root, "stub").is_dir():
                time.sleep(0.5)
                Path(root, "stub").mkdir(parents=True)     # fails if two do it at a time
            assert Path(root, "stub").is_dir()
            self.data = np.full((16 if train else 4, 32, 32, 3), 128, "uint8")
            self.targets = [0, 1] * (len(self.data) // 2)
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stub)
    monkeypatch.chdir(tmp_path)
    together("train.py", "--data", "cifar10", *TINY, *DECODER, "--img_size", "16")
    train.main(["--eval", "runs/mae_cifar10/last.pt", "--workers", "0"])


def crop(pictures, crop=1.0, flip=False, seed=0, **more):
    torch.manual_seed(seed)
    args = settings(crop=crop, flip=flip, batch_size=len(pictures) * more.get("world", 1), **more)
    return train.crop_batch(pictures, pictures.shape[2:], args)


def test_crops_on_the_device():
    pictures = torch.randint(0, 256, (64, 3, 12, 16), dtype=torch.uint8)
    whole, flipped = crop(pictures), crop(pictures, flip=True)
    assert torch.allclose(whole, pictures.float(), atol=1e-3)          # no crop, no flip
    mirrored = (flipped - whole.flip(3)).abs().amax((1, 2, 3)) < 1e-3
    untouched = (flipped - whole).abs().amax((1, 2, 3)) < 1e-3
    assert 15 < mirrored.sum() < 49 and (mirrored | untouched).all()
    ramp = torch.arange(16.0).expand(64, 3, 12, 16).mul(10).byte()     # its slope is the zoom
    zoomed = crop(ramp, crop=0.2)
    slopes = (zoomed[..., 9] - zoomed[..., 6])[:, 0, 5] / 30
    assert slopes.unique().numel() > 50                    # each picture its own crop
    assert 0.3 < slopes.min() and slopes.max() <= 1.001    # width: sqrt(.2 * 3/4) ... 1
    half = crop(pictures[32:], 0.2, True, world=2, rank=1)             # of two processes
    assert torch.equal(half, crop(pictures, 0.2, True)[32:])


@pytest.mark.parametrize("flip", [False, True])
def test_crop_statistics_match_torchvision(flip):
    """Zoom, aspect and place of crops of ramps; of files by torchvision itself, in the same shape.
    Half of them are mirrored."""
    ramp = torch.linspace(0, 255, 32).expand(3, 32, 32).byte()
    ramp = torch.stack([ramp[0], ramp[0].T, ramp[0]])      # from the left, from above
    transform = train.crop_transform((32, 32), settings(crop=0.2, flip=flip))
    theirs = v2.RandomResizedCrop(32, (0.2, 1))
    ours = crop(ramp.expand(2000, -1, -1, -1), crop=0.2, flip=flip)
    streamed, theirs = (torch.stack([f(ramp) for _ in range(2000)]) for f in (transform, theirs))
    for of in (lambda x: (x[:, 0, 16, 24] - x[:, 0, 16, 8]).abs(), lambda x: x[:, 0, 16, 16]):
        for statistic in (torch.mean, torch.std):
            wanted = statistic(of(theirs.float()))
            assert abs(statistic(of(ours)) - wanted) < 4   # of about 95 and 20
            assert abs(statistic(of(streamed.float())) - wanted) < 4

    def slopes(x):                                         # from the left, from above
        x = x.float()
        return x[:, 0, 16, 24] - x[:, 0, 16, 8], x[:, 1, 24, 16] - x[:, 1, 8, 16]

    def spread(x):                                         # of the logarithm of the aspect
        across, down = slopes(x)
        return (across / down).abs().log().quantile(torch.tensor([0.25, 0.75])).diff()
    for x in (ours, streamed):
        assert abs(spread(x) / spread(theirs) - 1) < 0.1
        assert abs((slopes(x)[0] < 0).float().mean() - 0.5 * flip) < 0.05


def test_learning_rate(pretrain, spy):
    """train.learning_rate's in each step; in the log, the highest of each epoch."""
    rates = spy(torch.optim.AdamW, "step", lambda optimizer: optimizer.param_groups[0]["lr"])
    pretrain("--blr", "0.096", "--epochs", "3", "--min_lr", "1e-5")    # 0.096 * 8 / 256 = 0.003
    args = SimpleNamespace(lr=3e-3, min_lr=1e-5, warmup_epochs=1, epochs=3, schedule="cosine")
    assert rates == pytest.approx([train.learning_rate(i / 5, args) for i in range(15)], rel=1e-9)
    assert [row["lr"] for row in log()] == [max(rates[i:i + 5]) for i in (0, 5, 10)]


@pytest.mark.parametrize("words", ["", "--img_size 8"])
def test_each_epoch_draws_anew(tmp_path, pretrain, spy, words):
    """And each step, and each seed: masks, and crops of images that are all alike, in memory and
    streamed."""
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        for i in range(16):
            Image.linear_gradient("L").resize((16, 16)).save(tmp_path / part / f"a/{i}.png")
    seen = spy(MAE, "forward", lambda self, images, noise: (images.sum((1, 2, 3)), noise[:, 0]))
    for seed in "01":
        pretrain("--data", str(tmp_path), "--seed", seed, *words.split(), name=seed)
    for draws in zip(*seen):                               # of two runs, two epochs, two steps
        assert len(torch.stack(draws).sort(1)[0].unique(dim=0)) == 8
        assert len(draws[0].unique()) == 8


def test_images_are_shuffled(pretrain, spy):
    """Those of sorted classes, in training anew in each epoch, and in validation."""
    seen = spy(train, "load_images", lambda data, batches, *_: batches[0].tolist())
    pretrain("--batch_size", "20", "--eval_images", "6")
    _, _, first, val, second, again = seen[:6]             # read, train, validate, twice
    pretrain("--eval_images", "6", "--seed", "1", "--epochs", "1", name="other")
    assert first != second and val == again == seen[-1] and len(val) == 6
    assert all(min(ids) < half <= max(ids) for ids, half in ((first, 20), (second, 20), (val, 6)))


@pytest.mark.parametrize("amp", ["fp32", "fp16"])
def test_clipping(pretrain, amp):
    """A step of SGD at rate 1 is as long as the clipped gradient, however the loss is scaled."""
    words = ["--optimizer", "sgd", "--lr", "1", "--warmup_epochs", "0", "--weight_decay", "0",
             "--clip_grad", "0.01", "--batch_size", "40", "--amp", amp, "--epochs"]
    start, end = (pretrain(*words, n, name=n)["model"] for n in ("0", "1"))
    step = torch.cat([(end[name] - start[name]).flatten() for name in start])
    assert step.norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("own_draws", [False, True])
def test_random_numbers_of_pieces_and_processes(own_draws):
    """Are one model's; in fine-tuning, as of drop path, each has its own."""
    draws, weight = [], torch.zeros(1, requires_grad=True)
    for rank in range(2):
        torch.manual_seed(5)
        args = settings(accum=2, clip_grad=0, rank=rank, own_draws=own_draws)
        net = lambda x: (draws.append(torch.rand(1).item()), (weight.sum(), {}))[1]
        train.train_step(net, torch.optim.SGD([weight], 1), torch.amp.GradScaler(enabled=False),
                         [torch.zeros(4)], args)
    assert len(draws) == 4 and len({*draws}) == (4 if own_draws else 1)


def test_weight_decay_is_not_of_biases_and_norms(pretrain):
    """One step with and without it: what differs shrank by lr times the decay."""
    words = ["--optimizer", "sgd", "--lr", "0.1", "--warmup_epochs", "0", "--epochs"]
    start = pretrain(*words, "0", name="start")["model"]
    words += ["1", "--batch_size", "40", "--weight_decay"]
    plain, decayed = (pretrain(*words, x, name=x)["model"] for x in ("0", "0.5"))
    trained = {name for name, p in train.load("runs/start/last.pt").named_parameters()
               if p.requires_grad}
    for name, p in start.items():
        factor = 0.05 if name in trained and p.ndim > 1 else 0
        assert torch.allclose(plain[name] - decayed[name], factor * p, atol=1e-6), name
        assert (p.ndim < 2) == name.endswith(("bias", "norm.weight", "norm1.weight",
                                              "norm2.weight")), name


RECIPES = [  # words, and the flags that follow
    ("--size micro --img_size 224", dict(lr=2e-3, decoder_dim=64, warmup_epochs=1)),
    ("--size tiny --img_size 64", dict(lr=2e-3, decoder_dim=64)),
    ("--size tiny --img_size 224", dict(lr=1.5e-4 * 8 / 256, decoder_dim=512, epochs=0)),
    ("--size micro --lr 0.32 --decoder_dim 32", dict(lr=0.32, decoder_dim=32)),
    ("--method crossmae --prediction_ratio .25", dict(lr=2e-3 / 3, decoder_depth=4)),
    ("--method crossmae --prediction_ratio .25 --lr 1e-3", dict(lr=1e-3, decoder_depth=4))]


@pytest.mark.parametrize("words, wanted", RECIPES, ids=[words for words, _ in RECIPES])
def test_small_pictures_and_encoders(folder, tmp_path, monkeypatch, words, wanted):
    """Have a recipe of their own, others the paper's."""
    monkeypatch.chdir(tmp_path)
    train.main(["--data", str(folder), "--name", "x", "--epochs", "0", "--batch_size", "8",
                "--eval_images", "1", "--workers", "0", *words.split()])
    flags = train.read("runs/x/last.pt")["flags"]
    assert {name: flags[name] for name in wanted} == pytest.approx(wanted)


@pytest.fixture
def dry(monkeypatch, tmp_path):
    """dry(main, words, side) goes as far as to training on 20,000 images of this size: its args."""
    monkeypatch.chdir(tmp_path)
    split, seen = train.ImageDataset(torch.zeros(20_000, 3, 1, 1), [0] * 20_000, ["a"]), []

    def run(main, words, side):
        for module in (train, finetune):
            monkeypatch.setattr(module, "open_data", lambda *_: (split, split, (side, side)))
            monkeypatch.setattr(module, "fit", lambda args, *_, **__: seen.append(vars(args)) or {})
        main(words.split())
        return seen.pop()
    return run


@pytest.mark.parametrize("main, words", [
    *((train.main, f"--method {name}") for name in train.METHODS),
    (finetune.main, "--mode scratch"), (finetune.main, "--mode linear")])
def test_help(main, words, dry, capsys):
    """A text for each option, and the value that a run without it has: of large images and, if
    that differs, of small ones."""
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    usage, *entries = re.split(r"\n  (?=-)", capsys.readouterr().out)
    shown = {}
    for entry in entries:
        name, text = re.fullmatch(r"(?:-h, )?--(\w+)(?:, --no-\w+| [A-Z]+| \S+ \[.*\])? (.*)",
                                  " ".join(entry.split("\n\n")[0].split())).groups()
        shown[name] = text.replace("small images: ", "").rpartition("(")[2].rstrip(")").split("; ")
        assert len(text) > 4, entry
    assert usage.startswith("usage: python ") and len(shown) > 30
    assert words != "--method mae" or "CrossMAE Table 7" in " ".join(entries)
    if "linear" in words:                                  # it needs a checkpoint
        return
    large, small = dry(main, f"{words} --size tiny", 224), dry(main, words, 32)
    cls = train.METHODS.get(words.split()[1], finetune.Classifier)
    for name in {**getattr(cls, "recipe", finetune.FINETUNE), **train.method_arguments(cls)}:
        if name in large and large[name] is not None and name != "lr":
            values = [str(x[name]).strip("()").replace(" ", "") for x in (large, small)]
            assert shown[name] == [*dict.fromkeys(values)], name


def test_a_short_run(dry, capsys):
    """Has a part of the recipe's warm-up, but all of one that was given."""
    words = "--size tiny --epochs 10"
    assert dry(train.main, words, 224)["warmup_epochs"] == 0.5
    assert "10 of the recipe's 800 epochs: --warmup_epochs 0.5, not 40" in capsys.readouterr().out
    assert dry(train.main, words + " --warmup_epochs 2.5", 224)["warmup_epochs"] == 2.5


def test_progress_without_a_terminal(pretrain, monkeypatch, capfd):
    """A line about once a minute: share of the epoch, rate, loss, time left."""
    pretrain("--batch_size", "1")
    assert "%|" not in "".join(capfd.readouterr())
    monkeypatch.setattr(train, "MINUTE", 0)
    pretrain("--batch_size", "1", "--overwrite")
    lines = [line for line in capfd.readouterr().out.splitlines() if "%|" in line]
    assert len(lines) == 4                                 # 40 steps, of which every 20th
    assert re.search(r"<\d\d:\d\d, .*img/s, loss \d.*, lr \d", lines[-1]), lines


def test_a_run_leaves_everything(pretrain, capsys):
    content = pretrain()
    said, rows = capsys.readouterr().out, log()
    assert {p.name for p in Path("runs/mae").iterdir()} == {"last.pt", "log.jsonl", "recon.png"}
    assert [row["epoch"] for row in rows] == [1, 2] and len(said.splitlines()) < 12
    assert rows[0].keys() >= {"loss", "lr", "psnr_masked", "psnr_image", "psnr_decoded", "img_s",
                              "wait", "train_s", "eval_s", "save_s"}
    for part in ("runs/mae/recon.png", 'next    python finetune.py --checkpoint "runs/mae/last.pt"',
                 "lr 0.002", "2 epochs (1 of warm-up) of 5 steps", "4x4 patches of 4x4 px",
                 "M parameters", "40 train, 11 val"):
        assert part in said
    for row in rows:                                       # what a person reads of it
        found = re.search(rf"epoch {row['epoch']}: loss (.*), psnr_masked (.*), (.*) img/s, "
                          r"wait (.*)%", said)
        values = [row["loss"], row["psnr_masked"], row["img_s"], 100 * row["wait"]]
        assert [float(x) for x in found.groups()] == pytest.approx(values, abs=0.6)
    assert content["method"] == "mae" and content["epoch"] == 2 and content["classes"] == ["a", "b"]
    assert content["flags"]["batch_size"] == 8 and content["flags"]["seed"] == 0
    assert content["torch"] == torch.__version__ and content["mean"] == MAE.mean
    assert Image.open("runs/mae/recon.png").size == (4 * 130 + 2, 8 * 130 + 2)


def test_names_of_runs(tmp_path, folder, monkeypatch, refused):
    """Of method and data; those of embedded data are found before any are drawn."""
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "--epochs", "0", "--data"]
    write_pictures(Path("one/my pictures"), "x", 20)
    train.main([*words, "one/my pictures/"])
    train.main([*words, str(folder), "--method", "crossmae"])
    assert {*os.listdir("runs")} == {"mae_my_pictures", f"crossmae_{folder.name}"}
    Path("runs/mae_my_pictures").rename("runs/mae_shapes")
    refused(train.main, [], "runs/mae_shapes holds a run")


def test_what_is_said(pretrain, tmp_path, capsys):
    """Files that are not read, few steps, and what an unlabelled run is good for."""
    write_pictures(tmp_path / "flat", "x", 60)
    for name in ("a.heic", "b.heic", "c.gif"):
        (tmp_path / "flat" / name).write_bytes(b"")
    assert pretrain("--data", "flat")["classes"] == []
    said = capsys.readouterr().out
    assert said.count("2 .heic") == 1 == said.count("1 .gif")
    assert "note    x in flat are not taken for classes" in said
    assert all(word in said for word in ("steps are few", "--batch_size", "--epochs", "--init"))
    assert 'python train.py --eval "runs/mae/last.pt"' in said
    pretrain("--batch_size", "1", "--epochs", "13", "--depth", "1", name="more")
    assert "steps are few" not in capsys.readouterr().out


FLAGS = """--blr 1e-2 | --lr 1e-2 | --betas 0.9,0.999 | --weight_decay 0.5 | --warmup_epochs 0 |
--crop 1 | --no-flip | --min_lr 1e-3 | --clip_grad 0.01 | --seed 1 | --mask grid | --mask block |
--epochs 3 | --optimizer adam --weight_decay 0.5 | --optimizer sgd |
--optimizer sgd --momentum 0.5 | --schedule constant | --mask_ratio 0.5 | --norm_pix_loss |
--decoder_depth 2 | --inter_block_attention | --dim 32 | --depth 1 | --heads 1 | --batch_size 16 |
--img_size 32 | --img_size 32,16 | --patch_size 8 | --amp bf16 | --accum 2 --amp bf16"""


def test_flags_do_something(pretrain):
    runs = {words.strip(): pretrain(*words.split(), name=f"{i}")["model"]
            for i, words in enumerate(["", *FLAGS.split("|")])}
    names = [*runs]
    for i, name in enumerate(names):
        for other in names[:i]:
            assert not same(runs[name], runs[other]), f"'{name}' does as '{other}'"


def test_what_changes_nothing(pretrain):
    """The same seed; checkpointing, but memory (tests/test_bench.py); a size of which all parts are
    given; how often it is evaluated."""
    plain = pretrain(name="plain")["model"]
    for words in ("", "--grad_checkpointing", "--size tiny", "--eval_every 2", "--eval_images 1"):
        assert same(plain, pretrain(*words.split(), "--overwrite")["model"]), words


def test_evaluating_now_and_then(pretrain, capsys):
    """Scores and checkpoints every second epoch, and at the end; also of a resumed run. A row for
    each epoch."""
    def epochs(name="mae"):
        rows = log(name)
        assert [row["epoch"] for row in rows] == [*range(1, len(rows) + 1)]
        assert all(row.keys() >= {"loss", "lr", "img_s", "train_s"} for row in rows)
        return [row["epoch"] for row in rows if "psnr_masked" in row]
    words = ["--eval_every", "2", "--epochs"]
    pretrain(*words, "5")
    assert epochs() == [2, 4, 5] and capsys.readouterr().out.count(" img/s") == 5
    pretrain("--schedule", "constant", *words, "3", name="less")
    more = pretrain("--schedule", "constant", *words, "20", "--resume", name="less")
    assert epochs("less") == [2, 3, *range(4, 21, 2)]
    straight = pretrain("--schedule", "constant", "--epochs", "20", name="straight")
    assert same(more["model"], straight["model"])
    first, *_, last = straight["history"]                  # which has learnt something
    assert last["loss"] < 0.9 * first["loss"] and last["psnr_masked"] > first["psnr_masked"] + 0.5


def eager(*words):
    torch.compile = partial(torch.compile, backend="aot_eager")        # of this process alone
    script(*words)


@pytest.mark.parametrize("processes, method, more", [
    (3, "mae", []), (2, "mae", ["--compile"]), *((2, name, []) for name in train.METHODS),
    *(pytest.param(2, name, ["--compile"], marks=pytest.mark.slow)
      for name in train.METHODS if name != "mae")])
def test_several_processes_are_one(pretrain, folder, processes, method, more):
    """The same weights after all steps: the same pictures, crops and masks, divided. By SGD: Adam
    makes steps of full size of rounding errors where a gradient is zero, as of a key's bias. A
    batch of 12 does not divide the 40 pictures, nor do the processes the 11 to validate on."""
    words = ["--optimizer", "sgd", "--lr", "0.1", "--accum", "2", "--batch_size", "12",
             "--method", method, *flags(BASE[method])]
    words += ["--pixel_fraction", "0.5"] if method == "minr" else []
    one = pretrain(*words, name="one", own=[])
    words = ["--data", str(folder), "--name", "two", *TINY, *words, *more]
    if (processes, method, more) == (2, "mae", []):        # with the real torchrun
        done = shell("train.py", *words, processes=2)
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
        said = done.stdout
    else:
        said = together("train.py", *words, processes=processes, work=eager)
    two = train.read("runs/two/last.pt")
    assert same(one["model"], two["model"], atol=1e-6)
    assert said.count("epoch 2:") == 1                     # one process speaks
    for a, b in zip(one["history"], two["history"]):       # 11 pictures, none twice
        for name in ("loss", "psnr_masked", "psnr_image", "psnr_decoded"):
            assert a[name] == pytest.approx(b[name], rel=1e-4)


def test_a_process_without_a_validation_picture(tmp_path, monkeypatch):
    write_pictures(tmp_path / "flat", "x", 10)             # of which one is held out
    monkeypatch.chdir(tmp_path)
    together("train.py", "--data", "flat", "--name", "x", *TINY, *DECODER)
    assert Path("runs/x/recon.png").exists()


def test_resume_and_overwrite(pretrain, monkeypatch, capsys):
    """Only what was asked for happens to a run; settings of a resumed one are those given now."""
    first = pretrain("--resume")
    assert "there is no runs/mae/last.pt to resume: the run starts" in capsys.readouterr().out
    for words in ([], ["--epochs", "0"]):                  # nothing to do, nothing lost
        again = pretrain("--resume", *words)
        assert same(first["model"], again["model"]) and len(again["history"]) == 2
    capsys.readouterr()
    other = pretrain("--resume", "--epochs", "3", "--weight_decay", "0.9", "--betas", "0.5,0.6")
    said = capsys.readouterr().out
    assert "resumed after epoch 2" in said and other["epoch"] == 3
    assert {*re.findall(r"note +(\w+ was .*)", said)} == {
        "epochs was 2, is 3", "weight_decay was 0.05, is 0.9",
        "betas was (0.9, 0.95), is (0.5, 0.6)"}
    group = other["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.9 and tuple(group["betas"]) == (0.5, 0.6)
    assert not same(first["model"], pretrain("--overwrite", "--seed", "1")["model"])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MAE, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pretrain("--overwrite")
    assert not Path("runs/mae/last.pt").exists()           # nor does the old one stay


@pytest.mark.parametrize("main, words", [
    (train.main, "--resume --name mae --epochs 3"), (train.main, "--init runs/mae/last.pt"),
    (train.main, "--method imae --teacher runs/mae/last.pt"),
    (finetune.main, "--checkpoint runs/mae/last.pt")])
def test_nothing_of_a_checkpoint_stays_in_memory(pretrain, folder, monkeypatch, main, words):
    """While a run trains that started from it, but what its optimizer has resumed."""
    pretrain()
    storages, read = [], train.read

    def spy(*inputs):
        content = read(*inputs)
        state = content.get("optimizer", {"state": {}})["state"].values()
        for x in [*content["model"].values(), *(x for part in state for x in part.values())]:
            storages.append((x.data_ptr(), StorageWeakRef(x.untyped_storage())))
        return content

    def step(net, optimizer, *rest):
        own = {x.data_ptr() for part in optimizer.state.values() for x in part.values()}
        left = [ref for at, ref in storages if at not in own and not ref.expired()]
        raise KeyboardInterrupt(f"{len(left)} of {len(storages)}")
    for module in (train, finetune):
        monkeypatch.setattr(module, "read", spy)
    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(KeyboardInterrupt, match=r"^0 of \d\d+"):
        main(["--data", str(folder), *TINY, *DECODER[:6 * (main is train.main)], *words.split()])


def test_init_from_a_released_checkpoint(pretrain, folder, tmp_path, capsys):
    state = load(ROOT / "tests/golden/mae.pt")["state_dict"]
    torch.save({"model": state, "args": argparse.Namespace(lr=1)}, tmp_path / "mae.pth")
    words = ["--img_size", "32", "--patch_size", "8", "--dim", "32", "--depth", "3", "--heads", "4",
             "--epochs", "0", "--init", "mae.pth"]
    content = pretrain(*words, name="other")               # another decoder: encoder only
    assert torch.equal(content["model"]["encoder.cls_token"], state["cls_token"])
    assert "fresh: decoder_blocks" in capsys.readouterr().out
    words += ["--decoder_dim", "24", "--decoder_depth", "2", "--decoder_heads", "4"]
    content = pretrain(*words, name="whole")
    assert same(content["model"], from_released(state))
    again = pretrain(*words, "--init", "runs/whole/last.pt", name="again")     # or one of its own
    assert same(content["model"], again["model"])
    train.main(["--data", str(folder), "--init", "runs/whole/last.pt", "--name", "sizes",
                "--img_size", "32", "--workers", "0", "--epochs", "0"])  # its sizes are taken over
    assert train.read("runs/sizes/last.pt")["config"]["depth"] == 3


def into_a_closed_pipe(*words):
    end, start = os.pipe()
    os.close(end)
    sys.stdout = os.fdopen(start, "w")
    script("train.py", *words)


def test_a_closed_pipe(tmp_path, folder, monkeypatch):
    """As `| head -1` leaves it: without a traceback."""
    monkeypatch.chdir(tmp_path)
    code, lines = ended(fork(into_a_closed_pipe, "--data", folder, *TINY, *DECODER))
    assert code != 0 and lines == []


def test_a_method_of_your_own(pretrain, folder, refused, monkeypatch):
    class Own(MAE):
        """
        own_flag: a number that does nothing
        """
        small = dict(lr=2e-3)
        def __init__(self, *, mask_ratio=0.75, own_flag=1, **sizes):
            super().__init__(mask_ratio=mask_ratio, decoder_dim=16, decoder_heads=2, **sizes)

        def forward(self, *inputs):
            loss, metrics = super().forward(*inputs)
            return loss, {**metrics, "twice": 2 * loss.detach()}
    monkeypatch.setitem(train.METHODS, "own", Own)
    pretrain("--method", "own", "--own_flag", "2", name="own", own=[])
    (row, *_) = log("own")
    assert row["twice"] == pytest.approx(2 * row["loss"])
    assert train.read("runs/own/last.pt")["config"]["own_flag"] == 2
    words = ["--method", "own", "--data", folder, *TINY, "--name"]
    refused(train.main, [*words, "own", "--own_flag", "3", "--resume"], "own_flag was 2, is 3")
    monkeypatch.setattr(Own, "forward", lambda *inputs: MAE.forward(*inputs)[0])
    with pytest.raises(TypeError, match=r"forward must return \(loss, {"):
        train.main([*map(str, words), "x"])


def value_error(*_, **__):
    raise ValueError("one's own")


@pytest.mark.parametrize("owner, name, bug, error", [
    (MAE, "forward", lambda self, *_: self.nothing, AttributeError),
    (MAE, "forward", value_error, ValueError), (mae, "ViT", value_error, ValueError),
    (MAE, "forward", lambda *_: [a for a, b in [(1, 2, 3)]], ValueError),
    (MAE, "forward", lambda self, x, noise: self.encoder(x[:, :1]), ValueError),
    (MAE, "reconstruct", lambda *_: None, TypeError)])
def test_a_bug_has_its_traceback(pretrain, monkeypatch, owner, name, bug, error):
    """In forward, in the constructor, in validation; only a wrong input is one line."""
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(error):
        pretrain()


def test_validation_is_as_training(pretrain, tune, spy):
    """In mixed precision, in batches no larger than a piece."""
    for cls, name, run in ((MAE, "reconstruct", pretrain), (finetune.Classifier, "logits", tune)):
        seen = spy(cls, name, lambda self, images, *_: (
            torch.is_autocast_enabled("cpu"), len(images)))
        run("--accum", "2", "--amp", "bf16", "--epochs", "0", name=name)   # TINY: --batch_size 8
        assert {*seen} == {(True, 4), (True, 3)} and len(seen) == 3


@pytest.mark.parametrize("method", train.METHODS)
def test_psnr_by_hand(pretrain, folder, spy, method):
    """Of what reconstruct returns for the noise that the run gave it, which depends on the picture
    alone, not on the seed or on how many there are."""
    seen = spy(train.METHODS[method], "reconstruct", lambda self, *inputs: inputs[:2])
    words = ["--method", method, "--epochs", "0"]
    row = pretrain(*words, own=[])["history"][0]
    images, noise = (torch.cat(parts) for parts in zip(*seen))         # of batches of 8
    model = train.load("runs/mae/last.pt")
    truth = patchify(denormalize(images, model), 4)        # (11, 16, 48)
    with torch.no_grad():
        decoded, mask = model.reconstruct(images, noise)
    copied = model.encoder.copy_visible(decoded, images, mask)
    copied, decoded = (patchify(denormalize(x, model), 4) for x in (copied, decoded))
    hidden = [(x - y)[m > 0].square().mean() for x, y, m in zip(copied, truth, mask)]
    for name, errors in (("hidden", hidden), ("image", (copied - truth).square().mean((1, 2))),
                         ("decoded", (decoded - truth).square().mean((1, 2)))):
        wanted = sum(-10 * math.log10(error) for error in errors) / 11
        assert row[f"psnr_{name}"] == pytest.approx(wanted, abs=1e-3), name
    pictures = train.open_data(str(folder), None, settings())[1].images / 255
    found = [(x - pictures).abs().amax((1, 2, 3)).argmin() for x in denormalize(images, model)]
    assert sorted(found) == [*range(11)]                   # each validation picture once
    seen.clear()
    pretrain(*words, "--seed", "1", "--eval_images", "4", name="b", own=[])
    few, noise_of_few = seen[0]
    assert len(few) == 4 and len(noise.unique(dim=0)) == 11
    for x, n in zip(few, noise_of_few):
        assert torch.equal(n, noise[(images == x).all((1, 2, 3))].squeeze(0))


def cells(path, column):
    """A column of a picture of 130 x 130 cells, each with its border."""
    return np.asarray(Image.open(path))[:, 130 * column:130 * (column + 1)]


def test_eval_of_several_checkpoints(pretrain, folder, refused, capsys):
    """A row a checkpoint and mask ratio, the same numbers as after training, nothing else touched;
    recon.png's pictures with a column a checkpoint. Fine-tuned ones are passed over."""
    runs = {"mae": pretrain(), "half": pretrain("--decoder_depth", "2", name="half")}
    before = {name: Path(f"runs/{name}/last.pt").read_bytes() for name in runs}
    finetune.main("--checkpoint runs/mae/last.pt --epochs 0 --name tuned --workers 0".split())
    capsys.readouterr()
    words = ["--workers", "0", "--mask_ratios", "0.5", "0.75", "--eval"]
    rows = train.main([*words, *(f"runs/{name}/last.pt" for name in ("mae", "tuned", "half"))])
    note, title, *table = capsys.readouterr().out.splitlines()
    assert "runs/tuned/last.pt is passed over" in note and "mean over 11 images" in title
    assert len({len(line) for line in table[:5]}) == 1     # aligned
    assert [(Path(row["checkpoint"]).parent.name, row["mask_ratio"]) for row in rows] == [
        ("mae", 0.5), ("mae", 0.75), ("half", 0.5), ("half", 0.75)]
    for name, row in (("mae", rows[1]), ("half", rows[3])):
        for key in ("psnr_masked", "psnr_image", "psnr_decoded"):
            assert row[key] == pytest.approx(runs[name]["history"][-1][key], abs=1e-4)
            assert f"{row[key]:.3f}" in table[1 + rows.index(row)]
        assert Path(f"runs/{name}/last.pt").read_bytes() == before[name]
    for name, column, wanted in (("mae", 0, 0), ("mae", 1, 1), ("mae", 2, 3), ("half", 3, 3)):
        picture = cells(f"runs/{name}/recon.png", wanted)
        assert np.array_equal(cells("runs/mae/eval.png", column), picture)
    grid, = train.main([*words[:2], "--eval", "runs/mae/last.pt", "--mask_ratios", "0.75",
                        "--mask", "grid"])
    assert grid["psnr_masked"] != rows[1]["psnr_masked"]
    pretrain("--data", "shapes", "--epochs", "0", name="drawn")
    capsys.readouterr()
    files = ["runs/mae/last.pt", "runs/drawn/last.pt"]
    for data, said in (([], 1), (["--data", folder], 0)):  # another set is named, unless asked for
        train.main([*words[:2], *map(str, data), "--mask_ratios", "0.75", "--eval", *files])
        note = f"drawn/last.pt was trained on shapes, and is evaluated on {folder}"
        assert capsys.readouterr().out.count(note) == said
    refused(train.main, ["--eval", "runs/tuned/last.pt"], "none is a checkpoint of train.py")


def test_eval_of_normalised_patches(pretrain):
    """The true statistics are not used with --leak_free."""
    pretrain("--norm_pix_loss")
    pretrain("--norm_pix_loss", name="[m]ae")              # a name, not a pattern
    words = ["--eval", "runs/[m]ae/last.pt", "--mask_ratios", "0.75", "--workers", "0"]
    (flattered,), (honest,) = train.main(words), train.main([*words, "--leak_free"])
    assert honest["psnr_masked"] < flattered["psnr_masked"]
    assert honest["checkpoint"] == "runs/[m]ae/last.pt"


def test_eval_shows_what_is_special_to_a_method(pretrain, capsys, monkeypatch):
    """i-MAE's separability and mixtures, CrossMAE's and MINR's pictures, MAE's attention; of few
    images, as they are all in memory. A pattern that the shell has left is filled in."""
    pretrain()
    for name, own in (("crossmae", DECODER), ("minr", flags(BASE["minr"])), ("imae", [
            *DECODER, "--teacher", "runs/mae/last.pt"])):
        pretrain("--method", name, name=name, own=own)
    capsys.readouterr()
    loaded, batches = [], train.val_batches
    monkeypatch.setattr(train, "val_batches", lambda data, args, size, most: (
        loaded.append(most), batches(data, args, size, most))[1])
    rows = train.main(["--workers", "0", "--mask_ratios", "0.75", "--eval_images", "5000",
                       "--eval", "runs/[cm]*/last.pt", "runs/imae/last.pt"])
    most = {"mae": 1000, "crossmae": 8, "minr": 8, "imae": 1000}       # images in memory
    assert [row["checkpoint"] for row in rows] == [
        os.path.join("runs", name, "last.pt") for name in ("crossmae", "mae", "minr")] + [
        "runs/imae/last.pt"]
    assert loaded == [n for row in rows
                      for n in (5000, 5000, *[most[Path(row["checkpoint"]).parent.name]] * 2)]
    said = capsys.readouterr().out
    assert len(rows) == 4 and "share of visible" in said and "subordinate" in said
    for name, columns in (("crossmae/contributions", 4), ("minr/rendered", 2), ("imae/unmix", 6)):
        file = f"runs/{name}.png"
        assert Image.open(file).width == columns * 130 + 2 and file in said
    assert Path("runs/crossmae/map_weights.png").exists()
