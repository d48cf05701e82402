"""The training loop: data, crops, recipes, resumed runs, processes, checkpoints, scores."""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from PIL import Image, ImageOps
from torchvision.transforms import v2

import finetune
import train
from mae import MAE
from tests import evaluate
from tests.lib.masks import copy_visible
from tests.lib.models import load_model
from tests.lib.pictures import save_picture
from tests.unit.conftest import (DECODER, HERE, ROOT, TINY, ended, fork, parsed, same, settings,
                                 stopping_after_two, together, write_pictures)
from tests.unit.golden import load
from tests.unit.test_methods import BASE, build, flags, images_and_noise
from vit import InputError, Method, denormalize, from_released, pair, patchify


def log(name="mae"):
    return [json.loads(line) for line in open(f"runs/{name}/log.jsonl")]


# ------------------------------------------------------------------------------------------- data
def test_memory_of_a_folder(folder, monkeypatch):
    """Images of the image size stay in memory if they fit, train and val each. So val is the same
    without train."""
    assert not train.open_data(str(folder), HERE, (16, 24))[0].in_memory       # cropped anew
    for limit, in_memory in ((40, [True, True]), (39, [False, True]), (10, [False, False])):
        monkeypatch.setattr(train, "MEMORY", limit * 3 * 16 * 16)
        parts = train.open_data(str(folder), HERE)[:2]
        assert [part.in_memory for part in parts] == in_memory
        val, _ = train.open_data(str(folder), HERE, (16, 16), parts=["val"])
        assert val.in_memory == in_memory[1]


@pytest.mark.parametrize("side", [16, 8])                  # in memory; in files
def test_train_images(folder, spy, side):
    """--train_images keeps a fixed random part, and reads no more than it needs. Workers read the
    same. All validation images stay."""
    read = spy(train, "read_image", lambda file: file)
    part, val, _ = train.open_data(str(folder), HERE, (side, side), train_images=10)
    assert len(read) == 40 + (10 + 11) * part.in_memory    # all training images for their size
    again, *_ = train.open_data(
        str(folder), HERE._replace(workers=2), (side, side), train_images=10)
    assert len(val.labels) == 11 and len(part.labels.unique()) == len(part.classes) == 2
    images, again = (torch.stack([split[0, i][0] for i in range(10)]) for split in (
        train.Transformed(data, lambda image: image) for data in (part, again)))
    assert torch.equal(images, again)
    assert len(images.unique(dim=0)) == len(part.images) == 10
    assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 * part.labels)     # red or blue


def test_tensors(pretrain):
    """--data FILE.pt takes uint8 images (N,C,H,W) of any memory layout, and class names that are
    numbers."""
    images = torch.randint(0, 256, (20, 16, 24, 3), dtype=torch.uint8).movedim(3, 1)
    parts = {name: (images, torch.arange(20) % 2, [0, 1]) for name in ("train", "val")}
    torch.save(parts, "own.pt")
    content = pretrain("--data", "own.pt", "--epochs", "1")
    assert content["config"]["img_size"] == (16, 24) and content["classes"] == ["0", "1"]
    assert train.open_data("own.pt", HERE, (8, 9))[0].images.shape == (20, 3, 8, 9)


def names(root):
    """Return the sets of names of a folder's images for training and for validation."""
    return [{str(Path(file).relative_to(root)) for file in files}
            for files, *_ in train.list_photos(root, ("train", "val"))]


def test_flat_folder_holds_out_by_name(tmp_path):
    """About 5% of the images are held out, at least one. More images or another place do not
    change which."""
    root, moved = tmp_path / "one", tmp_path / "two"
    write_pictures(root, "x", 2, side=1)
    assert [len(part) for part in names(root)] == [1, 1]
    write_pictures(root, "x", 300, side=1)
    part, val = names(root)
    assert len(part) + len(val) == 300 and 5 <= len(val) <= 30 and not part & val
    write_pictures(root, "y", 300, side=1)
    assert part < names(root)[0] and val < names(root)[1]
    part, val = names(root)
    root.rename(moved)
    assert names(moved) == [part, val]
    write_pictures(tmp_path / "alike", map(str, range(300)), 1, side=1)
    assert 5 <= len(names(tmp_path / "alike")[1]) <= 30    # the hash is of the folder's name, too


def test_what_is_an_image(tmp_path, capsys):
    """Links are followed. What Macs, notebooks and network disks leave is no photo and no class.
    Files of other endings are counted."""
    root = tmp_path / "data/train"
    write_pictures(root, "ab", 3, side=1)
    write_pictures(tmp_path / "other", "c", 3, side=1)
    (root / "c").symlink_to(tmp_path / "other/c")
    (root / "c/again").symlink_to(root)                    # a circle
    for name in ("._0.png", ".ipynb_checkpoints/1.png", "A.JPG", "a.heic", "c.gif", ".DS_Store",
                 "b.JFIF", "d.gif", "README", "Thumbs.db",
                 "@eaDir/0.png/SYNOFILE_THUMB_M.png", "../.ipynb_checkpoints/0.png", "../@eaDir/x"):
        (root / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "b" / name).touch()
    found = [os.path.realpath(name) for part in names(root) for name in map(root.joinpath, part)]
    assert len(found) == len({*found}) == 11 and str(root / "b/A.JPG") in found
    said = "4 files are left out because of their endings, e.g. 2 .gif, 1 without ending, 1 .heic\n"
    assert capsys.readouterr().out == f"note    {root}: {said}"
    data, = train.find_images(tmp_path / "data", ["train"], HERE, None)
    files = [file for file in map(os.fsdecode, data.images) if "/b/" in file]
    assert [os.path.basename(file) for file in files] == [
        "0.png", "1.png", "2.png", "A.JPG", "b.JFIF"] and data.classes == [*"abc"]
    (root / "loose.png").touch()
    train.find_images(tmp_path / "data", ["train"], HERE, None)
    assert f"note    {root}: 1 images beside its folders are left out" in capsys.readouterr().out


def test_the_size_is_of_a_sample(tmp_path):
    """Not only the first files set the size. Images of one size are kept in memory, others and
    large ones are read from files, large ones at 224 pixels."""
    for name, n, side, wanted in (("a", 60, 8, (8, 8)), ("b", 9, (40, 24), (40, 24)),
                                  ("c", 3, 240, (224, 224))):
        write_pictures(tmp_path, name, n, side=side)
        split, _, size = train.open_data(str(tmp_path), HERE)
        assert size == wanted and split.in_memory == (name == "a")
    for i in range(200):                                   # a size that no patch size divides
        Image.new("RGB", (70, 50)).save(tmp_path / f"{i}.png")
    size = train.open_data(str(tmp_path), HERE)[2]
    sizes = train.encoder_sizes(parsed("train.py", []), size, {})
    assert (size, sizes["patch_size"]) == ((48, 64), (6, 8))


def test_default_patches():
    """The default patch divides the image: it is the largest that does, up to a usual one and down
    to a quarter of it. Sides that are prime, for example, get one line."""
    flags = parsed("train.py", ["--img_size", "127x32"])

    def sizes(side):
        return train.encoder_sizes(flags, (side, 32), {})
    for side, wanted in {1: 1, 3: 3, 8: 4, 28: 4, 32: 4, 50: 5, 60: 6, 64: 8, 84: 7, 96: 12, 100: 10,
                         127: 15, 128: 16, 148: 4, 182: 14, 200: 10, 224: 16, 448: 16}.items():
        assert sizes(side)["patch_size"][0] == wanted and (side == 127) == bool(side % wanted)
    with pytest.raises(InputError, match="img_size 127x32 must be a multiple of patch_size 15x4"):
        train.MAE(**sizes(flags.img_size[0]))


def test_files(tmp_path):
    """Images that are read from files, in pieces, are the same with and without workers."""
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 100, side=(12, 24))
    split, val, size = train.open_data(str(tmp_path), HERE, (8, 16))
    assert size == (8, 16) and split.images.dtype.kind == "S"          # an array, not a list
    whole = train.read_image(os.fsdecode(val.images[3]))
    whole = v2.functional.resize(whole, (8, 16), Image.BICUBIC)
    ids, images, _ = map(torch.cat, zip(*train.val_batches(val, HERE, size)))
    assert len(images) == 200 and torch.equal(images[ids.tolist().index(3)], whole)
    transform = train.crop_transform(size, settings(crop=0.5, flip=True))
    pickle.dumps(train.Transformed(split, transform))      # for spawned workers
    order = torch.randperm(200)

    def draw(workers):
        keys, here = train.keys_of(order, 1).split(150), HERE._replace(workers=workers)
        return [*train.load_images(split, keys, 150, here, transform)]
    (first, labels), (rest, _) = draw(workers=0)
    assert first.shape == (150, 3, 8, 16) and rest.shape == (50, 3, 8, 16)
    assert first.dtype == torch.uint8 and torch.equal(labels, split.labels[order[:150]])
    assert torch.equal(first[149], train.Transformed(split, transform)[1, order[149].item()][0])
    (again, _), (more, _) = draw(workers=2)
    assert torch.equal(again, first) and torch.equal(more, rest)
    assert not multiprocessing.active_children()


def test_workers_are_forked(tmp_path, monkeypatch):
    """On Linux, workers know what a script has replaced, also with Python 3.14's default."""
    if sys.platform != "linux":
        pytest.skip("elsewhere, processes are not forked")
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 100, side=16)
    split = train.open_data(str(tmp_path), HERE, (8, 8))[0]
    grey = torch.full((3, 16, 16), 77, dtype=torch.uint8)
    monkeypatch.setattr(train, "read_image", lambda file: grey)
    transform, keys = train.crop_transform((8, 8), settings()), [train.keys_of(torch.arange(200))]
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        (images, _), = train.load_images(split, keys, 200, HERE._replace(workers=2), transform)
    finally:
        multiprocessing.set_start_method(None, force=True)
    assert (images == 77).all()


def test_workers_live_across_epochs(pretrain, spy, monkeypatch):
    """The same workers read the training images of all epochs, no more of them than there are
    whole pieces to read. Without them, the run is the same."""
    read = spy(train, "DataLoader", lambda data, num_workers, **_: (len(data.images), num_workers))
    monkeypatch.setattr(train, "CHUNK", 16)
    runs = [pretrain("--img_size", "8", "--workers", n, name=n) for n in "03"]
    assert read == [(40, 0), *2 * [(11, 0)], (40, 2), *2 * [(11, 0)]]
    assert same(*(run["model"] for run in runs))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("crop, low, high", [(0.2, 3 / 4, 4 / 3), (1, 1, 1)])
def test_crops_of_images_that_are_not_square(crop, low, high):
    """Random crops are stretched by 3/4 to 4/3; others not. The stretch is measured on ramps."""
    x, y = torch.arange(192).expand(64, 192), torch.arange(64)[:, None].expand(64, 192)
    transform = train.crop_transform((16, 48), settings(crop=crop))
    crops = [transform(torch.stack([x, y]).byte()).float() for _ in range(100)]    # (2, 16, 48)
    stretch = torch.stack([(c[0, 8, 40] - c[0, 8, 8]) / (c[1, 13, 24] - c[1, 3, 24]) * 10 / 32
                           for c in crops])
    assert 0.9 * low < stretch.min() < 1.1 * low and 0.9 * high < stretch.max() < 1.1 * high


@pytest.mark.parametrize("side, part, size", [
    (200, slice(0, 200), 8), (224, slice(14, 210), 8), (224, slice(0, 224), 225)])
def test_crops_of_validation(side, part, size):
    """Small images are validated whole, large ones on the central 7/8, unless the model's images
    are larger than 224 pixels. None is distorted."""
    image = torch.randint(0, 256, (3, side, side + 20), dtype=torch.uint8)
    middle = v2.functional.resize(image[:, :, 10:-10][:, part, part], (size, size), Image.BICUBIC)
    assert torch.equal(train.center_crop(image, (size, size)), middle)


def test_images_are_seen_alike(tmp_path, pretrain, spy, monkeypatch):
    """Colours of training images do not depend on where images are kept."""
    image = np.zeros((30, 60, 3), "uint8")
    image[:, :15, 0], image[:, 15:45, 1], image[:, 45:, 2] = 255, 255, 255     # red, green, blue
    for i in range(200):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    seen = spy(MAE, "model_inputs", lambda self, images, *_: images.float().mean((0, 2, 3)))
    for memory in (train.MEMORY, 0):
        monkeypatch.setattr(train, "MEMORY", memory)
        pretrain("--data", tmp_path, "--img_size", "30,60", "--patch_size", "10", "--batch_size",
                 "150", "--epochs", "1", "--warmup_epochs", "0", name=str(memory))
    kept, read = seen
    assert torch.allclose(kept, read, atol=10) and kept.min() > 20


def test_decoders(tmp_path):
    """JPEGs equal PIL's to the bit, transparency becomes white, 16 bits are scaled to 8. Names need
    not be UTF-8."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (5, 7, 3), "uint8")).resize((70, 50))
    deep = rng.integers(0, 65536, (5, 7), "uint16")
    high = Image.fromarray((deep >> 8).astype("uint8"))
    swapped = Image.frombytes("I;16B", (7, 5), deep.astype(">u2").tobytes())
    clear = image.convert("RGBA")
    clear.putalpha(Image.new("L", image.size, 0))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    white = Image.new("RGB", image.size, "white")
    cases = [(f"{kind}.jpg", image.convert(kind), None, {}) for kind in ("RGB", "L", "CMYK")]
    cases += [(f"{mode} 狮.png", image.convert(mode), None, {}) for mode in ("L", "LA", "RGBA")]
    cases += [(f"caf\udce9.{end}", image, None, {}) for end in ("jpg", "png")
              if sys.platform == "linux"]
    for turn in range(1, 9):
        exif = image.getexif()
        exif[0x0112] = turn
        cases += [(f"{turn}.{end}", image, None, dict(exif=exif)) for end in ("jpg", "png")]
    cases += [("point.jpg", image.resize((1, 1)), None, {}), ("a.png", clear, white, {}),
              ("p.png", palette, palette.convert("RGB"), {}),
              ("t.png", palette, white, dict(transparency=bytes(4))),
              ("16.png", Image.fromarray(deep), high, {}), ("16.tif", swapped, high, {}),
              ("x.bmp", image, image, {}), ("x.webp", image, image, dict(lossless=True))]
    for name, saved, wanted, more in cases:
        saved.save(tmp_path / name, **more)
        wanted = (wanted or ImageOps.exif_transpose(Image.open(tmp_path / name))).convert("RGB")
        got = train.read_image(str(tmp_path / name))
        assert got.dtype == torch.uint8, name
        assert torch.equal(got, v2.functional.pil_to_tensor(wanted)), name


class Cifar:
    """Replaces torchvision's class. A download fails while another one uses the same folder."""
    classes = ["a", "b"]

    def __init__(self, root, train=True, download=False):
        if download and not Path(root).is_dir():
            time.sleep(0.2)
            Path(root).mkdir()
        self.data = np.random.default_rng(train).integers(0, 256, (16, 32, 32, 3), "uint8")
        self.targets = [0, 1] * 8


def test_cifar(tmp_path, monkeypatch):
    """Two processes download once. Images have their channels first, and any size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Cifar)
    together("train.py", "--data", "cifar10", *TINY, *DECODER, "--img_size", "48,32", "--epochs", 1)
    assert train.read_checkpoint("runs/mae_cifar10")["config"]["img_size"] == (48, 32)
    images = train.open_data("cifar10", HERE)[0].images
    assert torch.equal(images[5, :, 7, 9], torch.tensor(Cifar("data").data[5, 7, 9]))


# -------------------------------------------------------------------------------- crops of a batch
def crop(images, crop=1.0, flip=False):
    torch.manual_seed(0)
    run = settings(crop=crop, flip=flip, batch_size=len(images))
    return train.crop_batch(images, images.shape[2:], run, HERE)


def test_crops_on_the_device():
    images = torch.randint(0, 256, (64, 3, 12, 16), dtype=torch.uint8)
    whole, flipped = crop(images), crop(images, flip=True)
    assert torch.allclose(whole, images.float(), atol=1e-3)            # no crop, no flip
    mirrored = (flipped - whole.flip(3)).abs().amax((1, 2, 3)) < 1e-3
    untouched = (flipped - whole).abs().amax((1, 2, 3)) < 1e-3
    assert 15 < mirrored.sum() < 49 and (mirrored | untouched).all()


def test_crop_statistics_match_torchvision():
    """Zoom, aspect and place of crops, measured on ramps, match. Half are mirrored."""
    ramp = torch.linspace(0, 255, 32).expand(32, 32).byte()
    ramp = torch.stack([ramp, ramp.T, ramp])               # from the left, from above
    transform = train.crop_transform((32, 32), settings(crop=0.2, flip=True))
    theirs = v2.RandomResizedCrop(32, (0.2, 1))
    ours = crop(ramp.expand(2000, -1, -1, -1), crop=0.2, flip=True)
    streamed, theirs = (torch.stack([f(ramp) for _ in range(2000)]) for f in (transform, theirs))

    def slopes(x):                                         # from the left, from above
        return x[:, 0, 16, 24] - x[:, 0, 16, 8], x[:, 1, 24, 16] - x[:, 1, 8, 16]

    def statistics(x):                                     # zoom, place, aspect
        across, down = (slope.abs() for slope in slopes(x.float()))
        aspect = (across / down).log().quantile(torch.tensor([0.25, 0.75])).diff()
        place = x[:, 0, 16, 16].float()
        return [across.mean(), across.std(), place.mean(), place.std(), 100 * aspect]
    for x in (ours, streamed):
        assert all((a - b).abs() < 4 for a, b in zip(statistics(x), statistics(theirs)))
        assert abs((slopes(x.float())[0] < 0).float().mean() - 0.5) < 0.05
    for x, slope in zip((ours[:, 0, 16], ours[:, 1, :, 16]), slopes(ours)):        # (2000, 32)
        assert (x[:, 0] - x[:, 16] + slope).abs().max() < 10           # no crop ends outside


# --------------------------------------------------------------------------------------- training
def test_learning_rate(pretrain, spy):
    """Each step has the learning rate computed by hand. The log has the last one of each epoch.
    (tests/lib/references.py has the constant schedule.)"""
    rates = spy(torch.optim.AdamW, "step", lambda optimizer: optimizer.param_groups[0]["lr"])
    pretrain("--blr", "0.096", "--epochs", "3", "--warmup_epochs", "1", "--min_lr", "1e-5")
    highest, lowest = 0.096 * 64 / 256 * (8 / 64) ** 0.25, 1e-5        # 40 images are few
    wanted = [highest * i / 5 for i in range(5)]           # an epoch of warmup, then two
    wanted += [lowest + (highest - lowest) * math.cos(math.pi / 2 * i / 10) ** 2 for i in range(10)]
    assert rates == pytest.approx(wanted, rel=1e-9)
    assert [row["lr"] for row in log()] == pytest.approx(wanted[4::5])


@pytest.mark.parametrize("words", ["", "--img_size 8"])
def test_each_epoch_draws_anew(tmp_path, pretrain, spy, words):
    """Each epoch, step and seed has its own masks and crops, of images in memory and in files. All
    images are alike here."""
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


def test_saving_is_not_evaluating(pretrain, spy, monkeypatch):
    """last.pt is written with every evaluation and by each epoch that ends a minute after the last
    writing. Here each look at the clock takes 15 seconds, three looks an epoch."""
    clock = SimpleNamespace(perf_counter=itertools.count(1, 15).__next__)
    monkeypatch.setattr(train, "time", clock)
    written = spy(train, "save_run", lambda *inputs: inputs[-2][-1]["epoch"])
    pretrain("--epochs", "6", "--eval_every", "4")
    assert written == [2, 4, 6]
    assert [row["epoch"] for row in log() if "psnr_masked" in row] == [4, 6]
    assert log()[0]["img_s"] == 2.7                        # five steps of 8 images in 15 seconds


def keys(n, epoch, seed=0, model=Method(), batch_size=4):
    """Return the keys (steps * b, 2) of an epoch on n images."""
    run = settings(seed=seed, batch_size=batch_size, same_class=None)
    return torch.cat([*train.draw_keys(run, HERE, model, torch.zeros(n), [epoch])])


def test_order_of_images(folder):
    """Training images are shuffled for each epoch and seed; those that fill no batch are others in
    each epoch. Validation images have one order."""
    orders = [keys(10, *which)[:, 1] for which in [(i, 0) for i in range(9)] + [(0, 1)]]
    assert all(len({*ids.tolist()}) == 8 for ids in orders) and {*torch.cat(orders).tolist()} == {
        *range(10)}
    assert len(torch.stack(orders).unique(dim=0)) == 10
    val = train.open_data(str(folder), HERE)[1]
    a, b = (next(train.val_batches(val, HERE, (16, 16), 6))[0] for _ in range(2))
    assert torch.equal(a, b) and len(a) == 6 and min(a) < 6 <= max(a)  # of both classes
    # images and their partners are cropped with different seeds, in each epoch with new ones
    seeds = [x for epoch in (0, 1)
             for x in keys(8, epoch, model=build("imae"), batch_size=8)[:, 0].chunk(2)]
    assert [len(x.unique()) for x in seeds] == [1] * 4 and len(torch.cat(seeds).unique()) == 4
    views = Method()
    views.crops = 2
    assert torch.equal(*keys(8, 0, model=views, batch_size=8)[:, 1].chunk(2))


@pytest.mark.parametrize("words", ["", "--amp fp16", "--accum 2"])
def test_clipping(pretrain, words):
    """A step of SGD with learning rate 1 is as long as the clipped gradient."""
    words = [*words.split(), "--optimizer", "sgd", "--lr", "1", "--warmup_epochs", "0",
             "--weight_decay", "0", "--clip_grad", "0.01", "--batch_size", "40", "--epochs"]
    start, end = (pretrain(*words, n, name=n)["model"] for n in ("0", "1"))
    step = torch.cat([(end[name] - start[name]).flatten() for name in start])
    assert step.norm() == pytest.approx(0.01, rel=1e-3)


def test_random_numbers_of_pieces_and_processes(spy):
    """In forward, pieces and processes draw numbers of their own, e.g. for drop path; not MINR's
    pixels."""
    drawn, weight = [], torch.zeros(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], 1), torch.amp.GradScaler(enabled=False)

    def forward(images):
        drawn.append(torch.rand(()).item())
        return weight.sum(), {}
    for model, different in ((build("mae"), 4), (build("minr"), 1)):
        for rank in range(2):
            train.train_step(settings(accum=2), HERE._replace(rank=rank), model, forward, optimizer,
                             scaler, [torch.zeros(4)], 5)
        assert len(drawn) == 4 and len({*drawn}) == different
        drawn.clear()


def test_weight_decay_is_not_of_biases_and_norms(pretrain):
    run = pretrain("--weight_decay", "0.5", "--epochs", "0")
    decays = [group["weight_decay"] for group in run["optimizer"]["param_groups"]]
    model = load_model("runs/mae")
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    groups = model.parameter_groups(settings())
    groups = [[trained.pop(p) for p in group["params"]] for group in groups]
    assert decays == [0.5, 0] and not trained              # each is in one of the groups
    exempt = "bias", "norm.weight", "norm1.weight", "norm2.weight"
    assert [{name.endswith(exempt) for name in names} for names in groups] == [{False}, {True}]


# ---------------------------------------------------------------------------- recipes, flags, help
@pytest.mark.parametrize("words, side, n, wanted", [
    ("", 32, 50_000, dict(lr=2e-3, batch_size=64, eval_every=1, eval_images=1000)),
    ("", 32, 639, dict(batch_size=32, lr=2e-3)),           # ten steps, or few images
    ("", 32, 1, dict(batch_size=1)),
    ("--size tiny --heads 4", 32, 50_000, dict(dim=192, depth=12, heads=4)),
    ("--size micro", 224, 50_000, dict(lr=2e-3, decoder_dim=64, warmup_epochs=1, batch_size=64)),
    ("--dim 764 --heads 4", 224, 50_000, dict(lr=2e-3 / (764 / 64) ** 0.5, decoder_dim=64)),
    ("--size base", 32, 50_000, dict(lr=1.5e-4 * 4096 / 256, decoder_dim=512, epochs=800)),
    ("--size base --recipe small", 224, 50_000, dict(decoder_dim=64, epochs=10, recipe="small")),
    ("--recipe paper", 32, 200, dict(decoder_dim=512, epochs=800, warmup_epochs=40)),
    ("", 32, 200, dict(epochs=500, warmup_epochs=50, batch_size=16, eval_every=10)),
    ("", 32, 20, dict(epochs=500, warmup_epochs=50, eval_every=10)),   # not more than 50 times 10
    ("", 32, 1_000, dict(epochs=100, warmup_epochs=10, eval_every=2)),
    ("", 32, 9_999, dict(epochs=10)), ("", 32, 10_000, dict(epochs=10, warmup_epochs=1)),
    ("--epochs 50", 32, 200, dict(warmup_epochs=5, eval_every=1)),     # a tenth, as by default
    ("--epochs 500", 32, 200, dict(warmup_epochs=50)),
    ("--mode scratch", 32, 200, dict(epochs=500, warmup_epochs=50)),
    ("--method imae", 32, 50_000, dict(crop=1.0, flip=False)),         # as on CIFAR (Table 1)
    ("--lr 0.32 --decoder_dim 32", 32, 50_000, dict(lr=0.32, decoder_dim=32)),
    ("--method crossmae --prediction_ratio .25 --lr 0.32", 32, 50_000, dict(lr=0.32)),
    ("--method crossmae --prediction_ratio .25", 32, 50_000, dict(lr=2e-3 / 3, decoder_depth=4)),
    ("--epochs 10 --size base", 224, 50_000, dict(warmup_epochs=0.5)),  # 40 of 800
    ("--epochs 0", 32, 50_000, dict(warmup_epochs=0)),
    (f"--mode scratch --size small --checkpoint {ROOT}/tests/models/tiny.pt --heads 2", 32, 50_000,
     dict(dim=384, depth=12, heads=2)),
    ("--epochs 800", 32, 50_000, dict(warmup_epochs=1, eval_every=16)),
    ("--mode scratch", 224, 50_000, dict(lr=2e-3, randaug=0, layer_decay=1.0, batch_size=64)),
    ("--mode scratch --blr 0.1", 32, 639, dict(batch_size=32, lr=0.1 * 64 / 256 * 0.5 ** 0.25)),
    ("--size base", 160, 200, dict(batch_size=16, lr=1.5e-4 * 4096 / 256 * (16 / 4096) ** 0.25)),
    ("--mode scratch --size tiny", 32, 50_000, dict(lr=2e-3 / 3 ** 1.5)),          # thrice as wide
    ("--mode scratch --dim 16", 32, 50_000, dict(lr=2e-3 * 4 ** 1.5)),             # a quarter
    ("--mode scratch --size base", 32, 50_000, dict(lr=1e-3 * 1024 / 256, randaug=27, mixup=0.8)),
    (f"--checkpoint {ROOT}/tests/models/tiny.pt --mode linear --recipe paper", 160, 10_000,
     dict(optimizer="sgd", batch_size=512, lr=0.1 * 512 / 256)),
    (f"--checkpoint {ROOT}/tests/models/tiny.pt --mode linear", 160, 200, dict(epochs=500)),
    *[(f"--checkpoint {ROOT}/tests/models/mae.pt --mode finetune", 32, n, dict(epochs=epochs))
      for n, epochs in ((60, 100), (999, 100), (1001, 100), (5_000, 20), (10_001, 10))],
    (f"--checkpoint {ROOT}/tests/models/tiny.pt --mode finetune", 32, 50_000,
     dict(lr=2e-3, batch_size=64, layer_decay=0.9, crop=0.85, smoothing=0.1))])
def test_settings(monkeypatch, tmp_path, words, side, n, wanted):
    """n images of this size and these flags settle a run: encoders narrower than base have a recipe
    of their own, others the paper's. Nothing can change it afterwards."""
    monkeypatch.chdir(tmp_path)
    labels, settle = torch.zeros(n, dtype=torch.long), train.settle
    split = train.ImageDataset(torch.zeros(n, 3, 1, 1), labels, ["a", "b"])

    def stop(*inputs, **more):
        raise StopIteration(settle(*inputs, **more))       # a model would take time
    monkeypatch.setattr(train, "open_data", lambda *_, **__: (split, split, pair(side)))
    monkeypatch.setattr(train, "settle", stop)
    with pytest.raises(StopIteration) as settled:
        (finetune.main if "--mode" in words else train.main)(words)
    run = settled.value.value
    assert {name: getattr(run, name) for name in wanted} == pytest.approx(wanted)
    with pytest.raises(AttributeError):
        run.lr = 1


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_cliff_in_the_learning_rate(optimizer):
    """Half or twice the batch, or one image more, changes lr by at most a factor of two, and typing
    the default batch changes nothing. With many images, lr is the papers': blr * batch / 256."""
    recipe = {**MAE.recipe, "optimizer": optimizer, "blr": 0.5}

    def settled(images, batch_size=None):
        flags = argparse.Namespace(batch_size=batch_size)
        return train.settle(flags, dict(img_size=(160, 160), dim=192), recipe, {}, images, 0)
    counts = [100, 159, 160, 1_000, 5_119, 5_120, 40_959, 40_960, 100_000, 1_281_167]
    sizes = [None, *(2 ** i for i in range(3, 14))]
    rates = {(n, b): settled(n, b).lr for n in counts for b in sizes}
    for n in counts:
        assert rates[n, None] == settled(n, settled(n).batch_size).lr
        for b in sizes[1:-1]:
            assert 1 < rates[n, 2 * b] / rates[n, b] <= 2
    for n in (159, 5_119, 40_959):
        for b in sizes:
            assert 0.5 <= rates[n + 1, b] / rates[n, b] <= 2
    for b in sizes[1:]:
        assert rates[40_960, b] == pytest.approx(0.5 * b / 256)


def test_where_settings_come_from(pretrain, capsys, monkeypatch):
    """A line for each source says what it has set."""
    monkeypatch.setitem(train.MAE.recipe, "min_lr", 1e-6)
    pretrain("--blr", "0.1", "--mask_ratio", "0.5", "--epochs", "0")
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["small"] == "norm_pix_loss False"          # all else is in conftest's flags
    assert said["data"].endswith(", 2 classes: a, b")
    assert said["flags"].startswith("mask_ratio 0.5, decoder_dim 16, ")
    assert said["derived"] == f"lr {0.1 * 64 / 256 * (8 / 64) ** 0.25}"
    assert "blr 0.1" in said["flags"] and said["paper"].endswith("min_lr 1e-06")
    pretrain("--epochs", "0", "--overwrite")               # lr is fixed, so blr is unused
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["small"].endswith(", lr 0.004") and "blr" not in said["paper"]  # width 16, not 64


@pytest.mark.parametrize("main, words", [
    *((train.main, f"--method {name}") for name in train.METHODS), (evaluate.main, "x"),
    *((finetune.main, f"--mode {mode}") for mode in (*finetune.RECIPES, "knn", "eval"))])
def test_help(main, words, capsys):
    """Help shows the defaults of the method's recipe."""
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    said = " ".join(capsys.readouterr().out.split())
    cls = train.METHODS.get(words.split()[-1])
    assert not cls or f"small: {cls.small_recipe['batch_size']}" in said
    for name, value in {**cls.recipe, **cls.__init__.__kwdefaults__}.items() if cls else ():
        if value is not None and name != "schedule":       # no flag for it
            assert re.search(rf"--{name}\b.*?\({re.escape(str(value))}", said), name


def test_flags_of_a_fork(monkeypatch):
    """Flags have the types of annotations and defaults as people write them. A class has its
    parents' flags, unless its constructor does not pass on **kwargs; the same names are its own.
    A class without vit.Method is told to inherit it."""
    class Fork(MAE):
        """A fork.

        Args:
            layer: which one
        """
        def __init__(self, *args, features="dino", blocks: tuple = "all",
                     sigma: float | None = None, scales=[1, 2], layer=-1, rate: "float" = 1, sides: list[int] = (), word=None,
                     decoder_depth=3, **kwargs):
            super().__init__(*args, decoder_depth=decoder_depth, **kwargs)

    class Alone(Fork):
        def __init__(self, *sizes, factor: Optional[int] = None):
            super().__init__(*sizes)
    monkeypatch.setitem(train.METHODS, "fork", Fork)
    monkeypatch.setitem(train.METHODS, "alone", Alone)
    monkeypatch.setitem(train.METHODS, "bare", torch.nn.Module)
    found = vars(parsed("train.py", "--method fork --features dino-v2/x.pt --blocks 3,5 --sigma 2 "
                        "--scales 3 --layer -2 --rate 0.5 --sides 4,6 --word a --decoder_dim 8"))
    wanted = dict(features="dino-v2/x.pt", blocks=(3, 5), sigma=2.0, scales=(3,), layer=-2,
                  rate=0.5, sides=(4, 6), word="a", decoder_dim=8)
    assert {name: found[name] for name in wanted} == wanted
    own, flags = train.arguments_of(Fork)
    assert own["decoder_depth"] == 3 and {*MAE.__init__.__kwdefaults__} < {*own}
    assert flags["layer"][1] == "which one" and "Table 1b" in flags["decoder_dim"][1]
    assert train.arguments_of(Alone)[0] == {"factor": None}
    assert parsed("train.py", "--method alone --factor 3").factor == 3
    with pytest.raises(InputError, match="class Module must inherit from vit.Method"):
        train.main("--method bare")


def test_recipe_of_a_fork(monkeypatch, capsys, refused):
    """A recipe can also set the masks and --clip_grad, which --help shows. A flag still wins."""
    class Fork(MAE):
        recipe = dict(MAE.recipe, clip_grad=3.0, weight_decay=0.4)
        small_recipe = dict(MAE.small_recipe, mask="block")
        unused = ("norm_pix_loss",)
    monkeypatch.setitem(train.METHODS, "fork", Fork)

    def settled(words):
        flags = parsed("train.py", f"--method fork {words}")
        return train.build(flags, HERE, (16, 16), 1000)[0]
    run = settled("")
    assert (run.mask, run.clip_grad, run.weight_decay) == ("block", 3.0, 0.4)
    assert (run.origin["mask"], run.origin["clip_grad"]) == ("small", "paper")
    assert settled("--recipe paper").mask == "random" and settled("--mask grid").mask == "grid"
    assert settled("--clip_grad 0").clip_grad == 0
    with pytest.raises(SystemExit):
        train.main("--method fork --help")
    said = " ".join(capsys.readouterr().out.split())
    assert "norm of the gradient (3.0)" in said and "masks (random; small: block)" in said
    assert "norm_pix_loss" not in said
    refused(train.main, "--method fork --norm_pix_loss", "unrecognized arguments: --norm_pix_loss")
    Fork.recipe = dict(MAE.recipe, weight_decy=3)
    refused(train.main, "--method fork", "recipe of class Fork sets weight_decy", "weight_decay")


def test_paths(monkeypatch):
    """A notebook does not expand ~, and its words need not be strings."""
    monkeypatch.setenv("HOME", "/home/a")
    flags = parsed("train.py", ["--data", Path("~/x"), "--runs", "~/y"])
    assert (flags.data, flags.runs) == ("/home/a/x", "/home/a/y")
    monkeypatch.setattr(sys, "platform", "win32")          # where a backslash is no escape
    assert train.words_of(r"""--data C:\Users\ann --runs "D:\my runs\\x" --name 'a "b" \c' """) == [
        "--data", r"C:\Users\ann", "--runs", r"D:\my runs\\x", "--name", r'a "b" \c']
    monkeypatch.setattr(sys, "argv", ["/ipykernel_launcher.py", "-f", "kernel.json"])
    assert train.words_of(None) == []


def test_wrapped_models(tmp_path):
    """A checkpoint of one's own loop may have a compiled or distributed model's names."""
    for prefix in ("module.", "_orig_mod.", "_orig_mod.module."):
        own = train.read_checkpoint(ROOT / "tests/models/mae.pt")
        wrapped = {prefix + name: x for name, x in own["model"].items()}
        torch.save({**own, "model": wrapped}, tmp_path / "own.pt")
        assert same(train.read_checkpoint(tmp_path / "own.pt")["model"], own["model"])


def test_next_command(folder, tmp_path, monkeypatch, capsys):
    """Images in val/ without classes cannot be used for fine-tuning."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "photos")
    for file in [*Path("photos/val").glob("*/*")]:
        file.rename(f"photos/val/{file.parent.name}_{file.name}")
    train.main(["--data", "photos", *TINY, "--epochs", "0"])
    assert "next    python finetune.py --checkpoint runs/mae_photos --data LABELS" in (
        capsys.readouterr().out)


def test_flags_do_something(pretrain):
    """(Other flags have tests of their own.)"""
    words = ["", "--crop 1", "--no-flip", "--mask grid", "--mask block", "--optimizer adam",
             "--norm_pix_loss", "--epochs 0", "--epochs 0 --seed 1"]
    runs = [pretrain("--eval_images", "1", "--eval_every", "9", *more.split(), name=f"{i}")["model"]
            for i, more in enumerate(words)]
    for (some, a), (others, b) in itertools.combinations(zip(words, runs), 2):
        assert not same(a, b), f"'{some}' does as '{others}'"


@pytest.mark.parametrize("channels, shown", [(2, [0]), (4, [0, 1, 2])])
def test_pictures(tmp_path, channels, shown):
    """Pictures have the first three channels or the first one, below the columns' titles."""
    columns = {name: torch.rand(2, channels, 129, 40) for name in ("one", "two")}
    save_picture(columns, tmp_path / "x.png")
    picture = v2.functional.pil_to_tensor(Image.open(tmp_path / "x.png"))
    cell = picture[:, 26:155, 44:84]                       # the first row of the second column
    assert torch.equal(cell[:3], columns["two"][0, shown].expand(3, -1, -1).mul(255).byte())
    assert (cell[3] == 255).all() and not picture[3, 0].any()          # on a transparent ground


def compiled(checkpointing):
    """Compile an i-MAE in DDP, with buckets of some kB, at which torch.compile cuts the graph,
    except with --grad_checkpointing."""
    def backend(graph, _):
        parts.append(graph)
        return graph.forward
    parts, torch.compile = [], partial(torch.compile, backend=backend)     # only in this process
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4_000
    torch.nn.parallel.DistributedDataParallel = partial(
        torch.nn.parallel.DistributedDataParallel, bucket_cap_mb=0.004)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = build("imae", decoder_depth=1)
    images, noise = images_and_noise()
    run = settings(compile=True, grad_checkpointing=checkpointing)
    net = train.wrap(model, run, HERE._replace(world=2))
    with net.no_sync():                                    # for --accum
        assert torch.allclose(net(images, noise, images.flip(0), 0.3)[0],
                              model(images, noise, images.flip(0), 0.3)[0], atol=1e-6)
    assert len(parts) == 1 if checkpointing else len(parts) > 4


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiling_in_several_processes(tmp_path, monkeypatch, checkpointing):
    monkeypatch.chdir(tmp_path)
    code, lines = ended(fork(compiled, checkpointing))
    assert code == 0 and "Warning" not in str(lines), lines


def two_steps(folder):
    """Pretrain on files, fine-tune, and classify by neighbours in one process, as scripts do. Each
    leaves the process's settings as they were."""
    os.environ.pop("LOCAL_RANK")                           # as without torchrun
    def state():
        return (torch.get_float32_matmul_precision(), torch.backends.cuda.flash_sdp_enabled(),
                torch.get_rng_state().tolist(), sys.stdout)
    torch.set_float32_matmul_precision("high")
    before, words = state(), ["--data", folder, "--checkpoint", "runs/mae", "--workers", "0"]
    train.main(["--data", folder, "--name", "mae", *TINY, *DECODER, "--img_size", "8"])
    for more in (TINY[8:], ["--mode", "knn", "--amp", "bf16"]):
        finetune.main([*words, *more])
        assert state() == before
    print("process", os.environ["RANK"])


def test_two_steps_of_several_processes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = together(folder, work=two_steps)
    assert "process 0" in said and "process 1" in said and said.count("top1") == 4, said


def patched(_, *words):
    """Do as `python train.py ...` with what a test has patched."""
    train.main(words)


@pytest.mark.parametrize("processes, method", [            # i-MAE: see test_imae.py
    (3, "mae"), (2, "crossmae"), (2, "hypermae"), (2, "minr")])
def test_several_processes_are_one(pretrain, folder, monkeypatch, processes, method):
    """Processes divide the same images, crops and masks, and end with the same weights. The
    optimizer is SGD because Adam turns rounding errors into full steps where a gradient is zero,
    e.g. of a key's bias. A batch of 12 does not divide the 40 images. Validation has 11. Images
    that just fit into memory stay there, however many processes there are."""
    words = ["--optimizer", "sgd", "--blr", 0.1 * 256 / 12, "--accum", "2", "--batch_size", "12",
             "--method", method, *flags(BASE[method])]
    words += ["--pixel_fraction", "0.5"] if method == "minr" else []
    if processes == 3:                                     # one gets no image to validate on
        words += ["--eval_images", "2", "--img_size", "8,12"]          # in files
    monkeypatch.setattr(train, "MEMORY", 40 * 3 * 16 * 16)
    one = pretrain(*words, name="one", own=[])
    said = together("train.py", "--data", folder, "--name", "two", *TINY, *words,
                    processes=processes, work=patched)
    two = train.read_checkpoint("runs/two")
    assert ("in memory" in said) == (processes == 2)
    assert same(one["model"], two["model"], atol=1e-6)
    assert said.count("epoch 2:") == 1                     # only one process prints
    assert "Warning" not in Path("err").read_text()
    for a, b in zip(one["history"], two["history"]):       # 11 images, none twice
        for name in ("lr", "loss", "psnr_masked", "psnr_image", "psnr_decoded"):
            assert a[name] == pytest.approx(b[name], rel=1e-4)


def test_resuming(pretrain, folder, capsys):
    """A resumed run has the settings given now, and the log and weights of one that never stopped,
    wherever its data is."""
    first = pretrain("--resume")
    assert "nothing to resume" in capsys.readouterr().out
    assert {path.name for path in Path("runs/mae").iterdir()} == {
        "curves.svg", "last.pt", "log.jsonl", "recon.png"}
    assert first["mean"] == MAE.mean and first["classes"] == ["a", "b"]
    assert first["flags"]["command"].startswith(f"python train.py --data {folder} ")
    for words in ([], ["--epochs", "0"]):                  # nothing to do, nothing lost
        again = pretrain("--resume", *words)
        assert same(first["model"], again["model"]) and again["history"] == log()
    moved = shutil.copytree(folder, Path("moved", "other"))
    capsys.readouterr()
    other = pretrain("--resume", "--epochs", "3", "--weight_decay", "0.9", "--betas", "0.5,0.6",
                     "--data", str(moved))
    said = capsys.readouterr().out
    assert "resumed after epoch 2 of 3\n" in said and other["epoch"] == 3
    group = other["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.9 and tuple(group["betas"]) == (0.5, 0.6)


def test_before_step(pretrain, monkeypatch):
    """A method's own schedule, e.g. of the weight decay, goes on in a resumed run."""
    seen = []

    class Fork(MAE):
        def before_step(self, progress, optimizer):
            seen.append(progress)
            optimizer.param_groups[0]["weight_decay"] = 5 * progress
    monkeypatch.setitem(train.METHODS, "fork", Fork)
    words = ["--method", "fork", "--epochs", "3", "--lr", "0.1"]
    whole = pretrain(*words, name="whole")
    assert seen == pytest.approx([i / 15 for i in range(15)])          # before the first step: 0
    with stopping_after_two(monkeypatch):
        pretrain(*words, name="part")
    part = pretrain(*words, "--resume", name="part")
    assert same(whole["model"], part["model"])
    assert part["optimizer"]["param_groups"][0]["weight_decay"] == seen[-1] * 5
    assert not same(whole["model"], pretrain(*words[2:], name="constant")["model"])


def test_resuming_what_was_not_trained(pretrain):
    pretrain("--epochs", "0", name="a")
    pretrain("--epochs", "2", "--resume", name="a")
    assert [row["epoch"] for row in log("a")] == [0, 1, 2]
    assert same(train.read_checkpoint("runs/a")["model"], pretrain(name="b")["model"])


def test_keeping_checkpoints(pretrain, monkeypatch):
    """--keep_every keeps last.pt as it was, also of epochs without a score. A run that is killed
    while it writes the copy makes it when it resumes, and --overwrite removes copies."""
    words, write = ["--epochs", "5", "--keep_every", "2", "--eval_every", "5"], train.write_file
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        def stop(path, save):
            write(path, raises if path.name == "epoch_4.pt" else save)
        def raises(_):
            raise KeyboardInterrupt
        patch.setattr(train, "write_file", stop)
        pretrain(*words)
    pretrain(*words, "--resume")
    files = sorted(path.name for path in Path("runs/mae").glob("*.pt"))
    assert files == ["epoch_2.pt", "epoch_4.pt", "last.pt"]
    kept = train.read_checkpoint("runs/mae/epoch_2.pt")
    assert kept["epoch"] == 2 and len(kept["history"]) == 2 and load_model("runs/mae/epoch_4.pt")
    pretrain("--overwrite")
    assert [path.name for path in Path("runs/mae").glob("*.pt")] == ["last.pt"]


def test_overwriting(pretrain, monkeypatch):
    """--overwrite starts anew and removes the old run's files: a run that is killed before its first
    save cannot be resumed as the old one."""
    pretrain()
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(MAE, "forward", None)
        pretrain("--overwrite", "--lr", "1e-4")
    assert not Path("runs/mae").exists()
    first = pretrain()
    pretrain(name="other")
    second = pretrain("--overwrite", "--init", "runs/other", "--epochs", "0")
    assert same(first["model"], second["model"]) and second["epoch"] == 0
    assert [path.name for path in Path("runs/mae").glob("*.pt")] == ["last.pt"]


# ------------------------------------------------------------------------------------- checkpoints
def test_init_from_a_released_checkpoint(pretrain, folder, capsys):
    """The file gives the sizes. Of another decoder, only the encoder is loaded."""
    state = load(ROOT / "tests/unit/golden/mae.pt")["state_dict"]
    Path("data").symlink_to(folder)
    torch.save({"model": state, "args": argparse.Namespace(lr=1)}, "mae.pth")
    words = "--data data --workers 0 --epochs 0 --heads 4 --init mae.pth --decoder_depth 2"
    train.main(f"{words} --name other")
    content = train.read_checkpoint("runs/other")
    assert torch.equal(content["model"]["encoder.cls_token"], state["cls_token"])
    assert (content["config"]["depth"], content["config"]["img_size"]) == (3, (32, 32))
    said = capsys.readouterr().out
    assert "random weights: decoder_blocks" in said
    assert "left out of the file: decoder_blocks" in said
    train.main(f"{words} --decoder_dim 24 --decoder_heads 4 --name whole")
    assert same(train.read_checkpoint("runs/whole")["model"], from_released(state))


def test_init_keeps_what_the_file_knows(pretrain):
    """With the same method, --init keeps the file's targets and decoder, unless a flag changes
    them. Another method keeps only the encoder's size."""
    own = "--norm_pix_loss --decoder_dim 8 --decoder_depth 3 --decoder_heads 2".split()
    first = pretrain("--mask_ratio", "0.5", own=own)
    words = ["--init", "runs/mae", "--epochs", "0"]
    again = pretrain(*words, "--mask_ratio", "0.6", own=[], name="again")
    assert again["config"] == {**first["config"], "mask_ratio": 0.6}
    assert same(first["model"], again["model"])
    other = pretrain(*words, "--method", "crossmae", own=[], name="other")["config"]
    assert (other["norm_pix_loss"], other["decoder_dim"], other["mask_ratio"]) == (False, 64, 0.75)


# ------------------------------------------------------------------------------------- evaluation
def test_validation_is_as_training(pretrain, tune, spy):
    """Validation also runs in mixed precision, but in eval mode. In training, each piece of --accum
    is normalised by itself."""
    pieces = spy(MAE, "model_inputs", lambda self, *piece: (len(piece[0]), self.training))
    for cls, name, run in ((MAE, "reconstruct", pretrain), (finetune.Classifier, "logits", tune)):
        seen = spy(cls, name, lambda self, images, *_, **__: (
            torch.is_autocast_enabled("cpu"), len(images), self.training))
        modes = spy(cls, "forward", lambda self, *_: self.training)
        run("--accum", "2", "--amp", "bf16", name=name)    # TINY: 2 epochs, --batch_size 8
        assert {*seen} - {(True, 4, True), (True, 8, False)} == {(True, 11, False)}
        assert modes == [True] * 20                        # also after the first validation
    assert {*pieces} == {(4, True)}


@pytest.mark.parametrize("method", ["mae", "minr"])        # one normalises images, one does not
def test_psnr_by_hand(pretrain, folder, spy, method):
    """PSNR and recon.png show what reconstruct returns for fixed noise, which depends only on the
    image: not on the seed or on the number of images."""
    seen = spy(train.METHODS[method], "reconstruct",
               lambda self, *inputs, leak_free=False: leak_free and inputs[:2])
    drawn = spy(train, "save_run", lambda *inputs: inputs[-1])
    words = ["--method", method, "--epochs", "0", "--img_size", "16,24"]
    pretrain(*words, name="all", own=[])
    images, noise = (torch.cat(parts) for parts in zip(*filter(None, seen)))
    val = train.open_data(str(folder), HERE, (16, 24))[1]
    truth = torch.cat([x for _, x, _ in train.val_batches(val, HERE, (16, 24))]) / 255
    found = [(x - truth).abs().amax((1, 2, 3)).argmin().item()
             for x in denormalize(images, load_model("runs/all"))]
    assert sorted(found) == [*range(11)]                   # each validation image once
    assert len(noise.unique(dim=0)) == 11
    seen.clear()
    pretrain(*words, "--seed", "1", "--eval_images", "4", name="few", own=[])
    (few, noise_of_few), = filter(None, seen)
    assert len(few) == 4
    for x, n in zip(few, noise_of_few):
        assert torch.equal(n, noise[(images == x).all((1, 2, 3))].squeeze(0))
    model, (row,) = load_model("runs/all"), log("all")
    with torch.no_grad():
        decoded, mask = model.reconstruct(images, noise)
    copied = copy_visible(model.encoder, decoded, images, mask)
    truth, decoded, copied = (denormalize(x, model) for x in (images, decoded, copied))
    grey = torch.where(model.encoder.pixels_of(mask) > 0, 0.5, truth)
    columns = dict(original=truth, masked=grey, decoded=decoded, completed=copied)
    assert drawn[0].keys() == columns.keys()
    assert all(torch.allclose(x, columns[name][:8], atol=1e-5) for name, x in drawn[0].items())
    truth, decoded, copied = (patchify(x, 4) for x in (truth, decoded, copied))      # (B, 24, 48)
    masked = [(x - y)[m > 0].square().mean() for x, y, m in zip(copied, truth, mask)]
    for kind, errors in (("masked", masked), ("image", (copied - truth).square().mean((1, 2))),
                         ("decoded", (decoded - truth).square().mean((1, 2)))):
        wanted = sum(-10 * math.log10(error) for error in errors) / len(images)
        assert row[f"psnr_{kind}"] == pytest.approx(wanted, abs=1e-3), kind


def test_eval_of_several_checkpoints(pretrain, folder, capsys, spy):
    """Each checkpoint has a row for each mask ratio, whatever ratio it was trained at, and a column
    of the picture, even if two have one name. Numbers and images are those from training. Only val/
    is read. Classifiers are skipped."""
    drawn = spy(evaluate, "save_picture", lambda columns, path: columns)
    saved = spy(train, "save_run", lambda *inputs: inputs[-1])
    runs = {"mae": pretrain("--mask_ratio", "0.5"), "half": pretrain(name="half")}
    finetune.main("--checkpoint runs/mae/last.pt --epochs 0 --name tuned --workers 0")
    shutil.copytree(folder / "val", "only/val")
    words = ["--workers", "0", "--mask_ratios", "0.75", "0.5", "--data", "only"]
    capsys.readouterr()
    rows = evaluate.main(["runs/mae", "runs/tuned", "runs/half/last.pt", "runs/half", *words])
    said = capsys.readouterr().out
    assert "skipped: runs/tuned" in said and "mean over 11 images of only" in said
    assert f"runs/half/last.pt was trained on {folder} and is evaluated on only" in said
    assert [(Path(row["checkpoint"]).parent.name, row["mask_ratio"]) for row in rows] == [
        ("mae", 0.75), ("mae", 0.5), *[("half", 0.75), ("half", 0.5)] * 2]
    for name, row in (("mae", rows[1]), ("half", rows[2])):
        for key in ("psnr_masked", "psnr_image", "psnr_decoded"):
            assert row[key] == pytest.approx(runs[name]["history"][-1][key], abs=1e-4)
    recon, (original, masked, _, half, again) = saved[-2], drawn[-1].values()
    assert torch.equal(original, recon["original"]) and torch.equal(masked, recon["masked"])
    assert torch.equal(half, recon["completed"]) and torch.equal(half, again)


def test_the_score_of_having_learned_nothing(pretrain, folder):
    """In plain loops: masked patches get the visible ones' mean colour."""
    row, scores = pretrain("--epochs", "0")["history"][-1], []
    val = train.open_data(str(folder), HERE)[1]
    for i, image in enumerate(val.images / 255):           # (3, 16, 16)
        noise = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(hash((7, i))))
        masked = (noise.flatten().argsort().argsort() >= 4).view(4, 4)
        masked = masked.repeat_interleave(4, 0).repeat_interleave(4, 1)        # (16, 16)
        colour = image[:, ~masked].mean(1, keepdim=True)   # (3, 1)
        scores.append(-10 * (image[:, masked] - colour).square().mean().log10().item())
    assert row["psnr_mean_colour"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)


def test_masks_of_an_evaluation(pretrain, spy):
    """Each pattern and ratio has its own score. After training, a run is scored under its own
    pattern, and on whole images, even in files."""
    row = pretrain("--mask", "grid", "--img_size", "12")["history"][-1]
    words = ["runs/mae/last.pt", "--workers", "0", "--mask_ratios", "0.5", "0.75"]
    drawn = spy(evaluate, "save_picture", lambda columns, path: columns)
    rows = evaluate.main([*words, "--masks", "random", "grid", "block"])
    *_, masked, completed = drawn[0].values()              # one checkpoint, so one column
    assert len(drawn[0]) == 3 and torch.equal(masked[masked != 0.5], completed[masked != 0.5])
    scores = {(row["mask"], row["mask_ratio"]): row["psnr_masked"] for row in rows}
    assert len(rows) == len({*scores.values()}) == 6
    assert scores["grid", 0.75] == pytest.approx(row["psnr_masked"], abs=1e-4)
    again = evaluate.main([*words, "--masks", "block"])
    assert [row["psnr_masked"] for row in again] == [scores["block", 0.5], scores["block", 0.75]]


def test_eval_of_normalised_patches(pretrain, spy):
    """Scores never use the true mean and variance of a patch; pictures do."""
    images = spy(MAE, "reconstruct", lambda self, x, *_, leak_free=False: (leak_free, len(x)))
    logged = pretrain("--norm_pix_loss")["history"][-1]["psnr_masked"]
    (row,) = evaluate.main("runs/mae/last.pt --mask_ratios 0.75 --workers 0")
    assert row["psnr_masked"] == logged and images == [(True, 11), (False, 8)] * 3


def test_eval_on_another_folder(pretrain, tmp_path, capsys):
    """All images of another folder count; of a run's own folder, those that it held out."""
    for name, n in (("own", 60), ("new", 30)):
        write_pictures(tmp_path / name, "x", n)
    pretrain("--data", tmp_path / "own")
    held_out = len(train.open_data(str(tmp_path / "own"), HERE)[1].labels)
    for data, n in (("own", held_out), ("new", 30)):
        evaluate.main(["runs/mae", "--data", tmp_path / data, "--workers", "0"])
        assert f"mean over {n} images" in capsys.readouterr().out
