import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import time
import weakref
import zlib
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torchvision.transforms import v2

import finetune
import train
from mae import MAE
from tests.conftest import (DECODER, ROOT, TINY, ended, fork, same, script, settings, together,
                            torchrun, write_pictures)
from tests.golden import load
from tests.test_methods import BASE, flags
from vit import InputError, denormalize, from_released, pair, patchify


def log(name="mae"):
    return [json.loads(line) for line in open(f"runs/{name}/log.jsonl")]


# ------------------------------------------------------------------------------------------- data
def test_shapes(monkeypatch):
    (images, labels), again = (train.draw_shapes(40, (24, 32), 3) for _ in range(2))
    assert images.shape == (40, 3, 24, 32) and images.dtype == torch.uint8
    assert torch.equal(images, again[0]) and len(labels.bincount().unique()) == 1
    assert not torch.equal(images, train.draw_shapes(40, (24, 32), 4)[0])
    part, val, size = train.open_data("shapes", None, settings())
    assert size == (32, 32) and len(part.labels) == 10_000 and len(val.labels) == 1_000
    monkeypatch.setattr(train, "SHAPES", {"nothing": (0, 1, 40), "disc": (0, 1, 2)})
    images, labels = train.draw_shapes(40, (24, 32), 3)    # "nothing": only a background
    assert torch.equal(images.float().std((2, 3)).mean(1) > 30, labels == 1)
    assert not torch.equal(part.images[:1000], val.images) and len(part.classes) > 4


def test_class_folders_in_memory(folder):
    part, val, size = train.open_data(str(folder), None, settings())
    assert part.images.shape == (40, 3, 16, 16) and val.images.shape == (11, 3, 16, 16)
    assert part.images.dtype == torch.uint8 and size == (16, 16) and part.classes == ["a", "b"]
    assert part.labels.tolist() == [0] * 20 + [1] * 20
    red, blue = (x.float().mean((0, 2, 3)) for x in part.images.split(20))
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50
    a, b = (train.open_data(str(folder), (24, 32), settings(workers=n))[0].images for n in (0, 2))
    assert a.shape == (40, 3, 24, 32) and a.is_contiguous() and torch.equal(a, b)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 3])
def test_memory_of_a_folder(folder, monkeypatch, processes):
    """Images stay in memory if train and val fit together, once for each process of a machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    for limit, in_memory in ((0, True), (-1, False)):
        monkeypatch.setattr(train, "MEMORY", processes * (40 + 11) * 3 * 16 * 16 + limit)
        for part in train.open_data(str(folder), None, settings())[:2]:
            assert torch.is_tensor(part.images) == in_memory


def test_train_images(folder):
    """--train_images keeps a fixed random part, in memory or as files; all validation images stay.
    """
    for side in (16, 8):
        args = settings(train_images=10)
        (part, val, _), (again, *_) = (
            train.open_data(str(folder), (side, side), args) for _ in range(2))
        assert len(part.images) == len(part.broken) == 10 and len(val.labels) == 11
        assert part.broken.is_shared()                     # workers report each broken file once
        images = torch.stack([part.read(i)[0] for i in range(10)])
        assert torch.equal(images, torch.stack([again.read(i)[0] for i in range(10)]))
        assert len(images.unique(dim=0)) == 10 and len(part.labels.unique()) == 2
        assert torch.equal(images.float().mean((2, 3)).argmax(1), 2 * part.labels)  # red or blue


def test_flat_folder_holds_out_by_name(tmp_path):
    """About 5% of the images are held out, at least one. More images or another place do not
    change which. Links are followed, and names may be in capitals."""
    def names(root):
        return [{str(Path(file).relative_to(root)) for file in files}
                for files, *_ in train.list_folder(root)]
    root, moved = tmp_path / "one", tmp_path / "two"
    write_pictures(root, "x", 2, side=1)
    assert [len(part) for part in names(root)] == [1, 1]
    write_pictures(root, "x", 300, side=1)
    (part, val), (split, *_) = names(root), train.open_data(str(root), None, settings())
    assert len(part) + len(val) == 300 and 5 <= len(val) <= 30 and not part & val
    assert split.classes == [] and set(split.labels.tolist()) == {-1}
    assert all(files == sorted(files) for files, *_ in train.list_folder(root))
    write_pictures(root, "y", 300, side=1)
    assert part < names(root)[0] and val < names(root)[1]
    part, val = names(root)
    root.rename(moved)
    assert names(moved) == [part, val]
    (tmp_path / "low").mkdir()                             # two of the 5%: one is trained on
    low = [f"{i}.png" for i in range(99) if zlib.crc32(b"%d.png" % i) < 2 ** 27][:2]
    for name in low:
        (tmp_path / "low" / name).touch()
    assert [len(part) for part in names(tmp_path / "low")] == [1, 1]
    (moved / "x").rename(tmp_path / "x")
    (moved / "x").symlink_to(tmp_path / "x")
    assert names(moved) == [part, val]
    (moved / "A.JPG").touch()
    assert sum(map(len, names(moved))) == 601


def test_links_to_folders(tmp_path):
    """No image is found twice, even if a link leads back to a folder that holds it, or to a folder
    that is found anyway. Other links are followed, also from class to class."""
    for root, part in (("flat", ""), ("classes", "train"), ("classes", "val")):
        write_pictures(tmp_path / root / part, "ab", 5, side=1)
        (tmp_path / root / part / "a/loop").symlink_to(tmp_path / root)
        (tmp_path / root / part / "a/other").symlink_to("../b")
    (train_files, *_), (val_files, *_) = train.list_folder(tmp_path / "flat")
    assert len({*map(os.path.realpath, train_files + val_files)}) == 10
    assert len(train_files + val_files) == 10
    for files, labels, classes in train.list_folder(tmp_path / "classes"):
        assert len({*files}) == 15 and labels == [0] * 10 + [1] * 5 and classes == ["a", "b"]


def test_the_size_is_of_a_sample(tmp_path):
    """Not only the first files set the size. Large images are read from files, at 224 pixels."""
    write_pictures(tmp_path, "a", 60, side=8)
    write_pictures(tmp_path, "b", 9, side=(40, 24))
    split, _, size = train.open_data(str(tmp_path), None, settings())
    assert size == (40, 24) and torch.is_tensor(split.images)
    assert train.open_data(str(tmp_path), None, settings(patch_size=(7, 5)))[2] == (35, 20)
    write_pictures(tmp_path, "c", 3, side=240)
    split, _, size = train.open_data(str(tmp_path), None, settings())
    assert size == (224, 224) and isinstance(split.images[0], str)


@pytest.mark.parametrize("bright", [31, 32])
def test_images_that_are_nearly_black(tmp_path, capsys, bright):
    """A note reports nearly black images, e.g. 12-bit values in 16-bit files."""
    for i in range(2):
        Image.fromarray(np.full((8, 8), 256 * bright, "uint16")).save(tmp_path / f"{i}.png")
    train.open_data(str(tmp_path), None, settings())
    assert ("nearly black" in capsys.readouterr().out) == (bright == 31)


@pytest.mark.parametrize("sides, size, patch_size", [
    ((223, 223), (208, 208), (16, 16)), ((223, 224), (224, 224), (16, 16)),
    ((128, 127), (128, 120), (16, 15)), ((97, 97), (96, 96), (12, 12)),
    ((50, 70), (48, 64), (6, 8)), ((33, 33), (32, 32), (4, 4)), ((427, 640), (224, 224), (16, 16))])
def test_images_of_any_size(tmp_path, sides, size, patch_size):
    """Without flags for sizes, the image size is a multiple of the patch size."""
    for i in range(2):
        Image.new("RGB", sides[::-1]).save(tmp_path / f"{i}.png")
    args = settings(size=None, dim=None, depth=None, heads=None)
    assert train.open_data(str(tmp_path), None, args)[2] == size
    assert train.vit_config(args, size, {})["patch_size"] == patch_size


def test_files(tmp_path, spy):
    """Images that are read from files, in pieces, are the same with and without workers."""
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 100, side=(12, 24))
    split, val, size = train.open_data(str(tmp_path), (8, 16), settings())
    assert size == (8, 16) and isinstance(split.images[0], str)
    assert isinstance(train.open_data(str(tmp_path), (16, 16), settings())[0].images[0], str)
    middle = train.read_image(val.images[3])[:, 1:11, 2:23]            # 7/8 of each side
    assert torch.equal(val[0, 3][0], v2.functional.resize(middle, (8, 16), Image.BICUBIC))
    ForkingPickler.dumps(split)                            # for workers that are spawned
    split.transform = train.crop_transform(size, settings(crop=0.5, flip=True))
    ForkingPickler.dumps(split)
    batches = torch.randperm(200).split(150)

    asked = spy(train, "DataLoader", lambda *_, num_workers, **__: num_workers)

    def draw(workers, seed, some=slice(None)):
        keys = [train.keys_of(ids, seed) for ids in batches[some]]
        return [*train.load_images(split, keys, settings(workers=workers))]
    (first, labels), (rest, _) = draw(0, seed=1)
    assert first.shape == (150, 3, 8, 16) and rest.shape == (50, 3, 8, 16)
    assert first.dtype == torch.uint8 and torch.equal(labels, split.labels[batches[0]])
    assert torch.equal(first[149], split[1, batches[0][149].item()][0])
    (other, _), (second, _) = draw(0, seed=2)
    assert not torch.equal(first, other)
    assert torch.equal(draw(2, seed=1)[0][0], first)
    assert torch.equal(draw(2, seed=2, some=slice(1, 2))[0][0], second)  # 50 images: one worker
    assert not multiprocessing.active_children() and asked == [0, 0, 2, 1]


def test_workers_live_across_epochs(pretrain, spy):
    """The same workers read the training images of all epochs. Without them the run is the same."""
    read = spy(train, "DataLoader", lambda data, *_, **__: len(data.images))
    runs = [pretrain("--img_size", "8", "--workers", n, "--epochs", "3", name=n) for n in "01"]
    assert read == 2 * [40, 11, 11, 11] and same(*(run["model"] for run in runs))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("crop, low, high", [(0.2, 3 / 4, 4 / 3), (1, 1, 1)])
def test_crops_of_images_that_are_not_square(crop, low, high):
    """Crops are stretched by 3/4 to 4/3, whole images are not. The stretch is measured on ramps."""
    x, y = torch.arange(192).expand(64, 192), torch.arange(64)[:, None].expand(64, 192)
    transform = train.crop_transform((16, 48), settings(crop=crop))
    crops = [transform(torch.stack([x, y]).byte()).float() for _ in range(100)]    # (2, 16, 48)
    stretch = torch.stack([(c[0, 8, 40] - c[0, 8, 8]) / (c[1, 13, 24] - c[1, 3, 24]) * 10 / 32
                           for c in crops])
    assert 0.9 * low < stretch.min() < 1.1 * low and 0.9 * high < stretch.max() < 1.1 * high


def test_whole_images():
    """crop_transform without a crop resizes, and center_crop adds no border."""
    image = torch.randint(0, 256, (3, 24, 48), dtype=torch.uint8)
    whole = train.crop_transform((8, 16), settings())(image)
    assert torch.equal(whole, v2.functional.resize(image, (8, 16), Image.BICUBIC))
    white = torch.full((3, 12, 24), 255, dtype=torch.uint8)
    assert train.center_crop(white, (8, 8), 1).min() == 255
    middle = v2.functional.resize(image[:, :, 12:36], (8, 8), Image.BICUBIC)
    assert torch.equal(train.center_crop(image, (8, 8), 1), middle)    # not distorted
    assert train.center_crop(image[:, :, :1], (8, 32), 7 / 8).shape == (3, 8, 32)


def test_copies_block_except_on_cuda(folder, spy):
    """Copies that did not block have been seen to give garbage on MPS."""
    copies = spy(torch.Tensor, "to", lambda *_, non_blocking=False, **__: non_blocking)
    split, *_ = train.open_data(str(folder), (8, 8), settings())
    keys = train.keys_of(torch.arange(8))
    [*train.load_images(split, keys.split(4), settings(device=torch.device("meta")))]
    train.METHODS["imae"].draw_alpha(SimpleNamespace(beta=1.0, alpha=None), "meta")
    assert copies and not any(copies)


def test_decoders(tmp_path, monkeypatch):
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
              ("32.tif", Image.fromarray(deep.astype("int32")), high, {}),
              ("x.bmp", image, image, {}), ("x.webp", image, image, dict(lossless=True))]
    for name, saved, wanted, more in cases:
        saved.save(tmp_path / name, **more)
        wanted = (wanted or ImageOps.exif_transpose(Image.open(tmp_path / name))).convert("RGB")
        got = train.read_image(str(tmp_path / name))
        assert got.dtype == torch.uint8, name
        assert torch.equal(got, v2.functional.pil_to_tensor(wanted)), name
    fast = train.read_image(str(tmp_path / "RGB.jpg"))
    monkeypatch.delattr(torchvision.io, "decode_image", raising=False)     # as in a later release
    assert torch.equal(fast, train.read_image(str(tmp_path / "RGB.jpg")))


class Cifar:
    """Replaces torchvision's class. A download fails while another one uses the same folder."""
    classes = ["a", "b"]

    def __init__(self, root, train=True, download=False):
        if download and not Path(root).is_dir():
            time.sleep(0.5)
            Path(root).mkdir()
        assert Path(root).is_dir()
        n = 16 if train else 4
        self.data = np.random.default_rng(n).integers(0, 256, (n, 32, 32, 3), "uint8")
        self.targets = [0, 1] * (len(self.data) // 2)


def on_nodes(shared, *words):
    """Do as script, as on two nodes of two processes each. They share a working folder or not."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    if not shared:
        Path(f"node{rank // 2}").mkdir(exist_ok=True)
        os.chdir(f"node{rank // 2}")
    script(*words)


@pytest.mark.parametrize("shared", [True, False])
def test_cifar_is_downloaded_once_on_each_disk(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Cifar)
    monkeypatch.chdir(tmp_path)
    together(shared, "train.py", "--data", "cifar10", *TINY, *DECODER, "--epochs", "0", processes=4,
             work=on_nodes)
    assert train.read_checkpoint(next(Path().rglob("last.pt")))["config"]["img_size"] == (32, 32)
    assert [str(path) for path in sorted(Path().rglob("data"))] == (
        ["data"] if shared else ["node0/data", "node1/data"])


def test_machines_whose_images_differ(tmp_path, monkeypatch):
    """All processes stop if a single name differs: indices would mean other images."""
    monkeypatch.chdir(tmp_path)
    for node, name in (("node0", "0.png"), ("node1", "00.png")):
        write_pictures(Path(node, "data"), "x", 9)
        Path(node, "data/x/0.png").rename(Path(node, "data/x", name))
    process = fork(partial(torchrun, processes=4), on_nodes, False, "train.py", "--data", "data",
                   *TINY, *DECODER)
    code, lines = ended(process)
    assert code != 0 and any("the same images in --data data" in line for line in lines), lines
    assert not [*Path().rglob("runs")]


def test_cifar(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", lambda _: 1 / 0)
    refused(train.main, ["--data", "cifar10"], torchvision.datasets.CIFAR10.url,
            "(division by zero). Copy it to data/, or pass a folder", "--data data/cifar10")
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Cifar)
    images = train.open_data("cifar10", None, settings())[0].images
    assert images.is_contiguous()
    assert torch.equal(images[5, :, 7, 9], torch.tensor(Cifar("data").data[5, 7, 9]))
    train.main(["--data", "cifar10", *TINY, *DECODER, "--img_size", "48,32", "--name", "larger"])
    assert train.read_checkpoint("runs/larger")["config"]["img_size"] == (48, 32)
    some, again = (train.open_data("cifar10", None, settings(train_images=9))[0].images
                   for _ in range(2))
    assert len(some) == 9 and torch.equal(some, again)


# -------------------------------------------------------------------------------------- processes
@pytest.mark.parametrize("gpus, mps, processes, wanted", [
    (0, True, 1, "mps"), (0, True, 2, "cpu"), (1, False, 1, "cuda:1"), (2, True, 2, "cuda:1"),
    (0, False, 1, "cpu")])
def test_devices(monkeypatch, gpus, mps, processes, wanted):
    """Local rank 1 gets the right device. More processes than GPUs on a machine are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    args = settings(device=None, world=processes, local_rank=1)
    assert str(train.choose_device(args)) == wanted
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(gpus + 1))
    if gpus:
        with pytest.raises(InputError, match=f"finds {gpus} GPUs for {gpus + 1} processes"):
            train.choose_device(args)
    args.device = "cpu"                                    # asked for
    assert str(train.choose_device(args)) == "cpu"


def test_attention_on_a_cpu(pretrain):
    """Fused attention is on in float32, but off in bf16, where it was slower."""
    for amp in ("bf16", "fp32"):
        pretrain("--epochs", "0", "--amp", amp, name=amp)
        assert torch.backends.cuda.flash_sdp_enabled() == (amp == "fp32")


@pytest.mark.parametrize("cores, processes, platform, wanted", [
    (6, None, "linux", 6), (20, None, "linux", 16), (16, "4", "linux", 4), (6, None, "darwin", 0)])
def test_default_workers(monkeypatch, cores, processes, platform, wanted):
    """The cores that this process may use are shared by the processes of its machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(cores)}, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    parser = argparse.ArgumentParser(**train.LAYOUT)
    train.add_options(parser)
    assert parser.parse_args([]).workers == wanted


# -------------------------------------------------------------------------------- crops of a batch
def crop(images, crop=1.0, flip=False, seed=0, **more):
    torch.manual_seed(seed)
    args = settings(crop=crop, flip=flip, batch_size=len(images) * more.get("world", 1), **more)
    return train.crop_batch(images, images.shape[2:], args)


def test_crops_on_the_device():
    images = torch.randint(0, 256, (64, 3, 12, 16), dtype=torch.uint8)
    whole, flipped = crop(images), crop(images, flip=True)
    assert torch.allclose(whole, images.float(), atol=1e-3)            # no crop, no flip
    mirrored = (flipped - whole.flip(3)).abs().amax((1, 2, 3)) < 1e-3
    untouched = (flipped - whole).abs().amax((1, 2, 3)) < 1e-3
    assert 15 < mirrored.sum() < 49 and (mirrored | untouched).all()
    half = crop(images[32:], 0.2, True, world=2, rank=1)   # the second of two processes
    assert torch.equal(half, crop(images, 0.2, True)[32:])


def test_crops_reflect_at_the_border(spy):
    """Clamped points do the same as padding by reflection, a mode that MPS may lack."""
    asked = spy(F, "affine_grid", lambda theta, size, **_: (theta, size))
    images = torch.randint(0, 256, (64, 3, 12, 16), dtype=torch.uint8)
    for least in (1.0, 0.2):
        ours, points = crop(images, least, True), F.affine_grid(*asked[-1], align_corners=False)
        wanted = F.grid_sample(images.float(), points, padding_mode="reflection",
                               align_corners=False)
        assert torch.allclose(ours, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("flip", [False, True])
def test_crop_statistics_match_torchvision(flip):
    """Zoom, aspect and place of crops, measured on ramps, match. With flip, half are mirrored."""
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


# --------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_learning_rate(pretrain, spy, monkeypatch, schedule):
    """Each step has the learning rate computed by hand. The log has the highest of each epoch."""
    monkeypatch.setitem(MAE.recipe, "schedule", schedule)
    rates = spy(torch.optim.AdamW, "step", lambda optimizer: optimizer.param_groups[0]["lr"])
    pretrain("--blr", "0.096", "--epochs", "3", "--min_lr", "1e-5")
    highest, lowest = 0.096 * 8 / 256, 1e-5
    wanted = [highest * i / 5 for i in range(5)]           # an epoch of warmup, then two
    for i in range(10):
        share = math.cos(math.pi / 2 * i / 10) ** 2 if schedule == "cosine" else 1
        wanted.append(lowest + (highest - lowest) * share)
    assert rates == pytest.approx(wanted, rel=1e-9)
    assert [row["lr"] for row in log()] == pytest.approx([wanted[4], wanted[5], wanted[10]])


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


def test_speed(pretrain, monkeypatch, capsys):
    """Here a clock advances a second with each look at it, so a batch takes a second to arrive."""
    monkeypatch.setattr(train, "perf_counter", itertools.count().__next__)
    _, row = pretrain("--epochs", "2")["history"]          # 40 images in 5 steps
    assert row["img_s"] == round(40 / row["train_s"], 1)
    assert row["wait"] == round(5 / row["train_s"], 3)
    assert row["between_s"] == 3                           # the evaluation takes 1 of them
    assert f"between epochs {3 / (3 + row['train_s']):.1%}" in capsys.readouterr().out


def keys(n, epoch, seed=0, **more):
    """Return the keys (steps * b, 2) of an epoch on n images."""
    args = settings(**{"seed": seed, "batch_size": 4, "pairs": False, "same_class": None, **more})
    split = train.ImageDataset([""] * n, [0] * n, [])
    return torch.cat([*train.draw_keys(split, [epoch], args)])


def test_every_image_has_its_turn():
    """The images that fill no batch are others in each epoch."""
    seen = [keys(10, epoch)[:, 1].tolist() for epoch in range(9)]
    assert all(len({*ids}) == 8 for ids in seen) and {*sum(seen, [])} == {*range(10)}


def test_images_are_shuffled(folder):
    """Training images are shuffled anew for each epoch and seed, validation images always alike."""
    orders = [keys(40, *which)[:, 1] for which in ((0, 0), (1, 0), (0, 1))]
    assert len(torch.stack([torch.arange(40), *orders]).unique(dim=0)) == 4
    val = train.open_data(str(folder), None, settings())[1]
    a, b = (next(train.val_batches(val, settings(), (16, 16), 6))[0] for _ in range(2))
    assert torch.equal(a, b) and len(a) == 6 and min(a) < 6 <= max(a)  # of both classes


def test_crops_of_partners():
    """Images and their partners are cropped with different seeds, in each epoch with new ones."""
    seeds = [x for epoch in (0, 1)
             for x in keys(8, epoch, batch_size=8, pairs=True)[:, 0].chunk(2)]
    assert [len(x.unique()) for x in seeds] == [1] * 4 and len(torch.cat(seeds).unique()) == 4


@pytest.mark.parametrize("words", ["", "--amp fp16", "--accum 2"])
def test_clipping(pretrain, words):
    """A step of SGD with learning rate 1 is as long as the clipped gradient."""
    words = [*words.split(), "--optimizer", "sgd", "--lr", "1", "--warmup_epochs", "0",
             "--weight_decay", "0", "--clip_grad", "0.01", "--batch_size", "40", "--epochs"]
    start, end = (pretrain(*words, n, name=n)["model"] for n in ("0", "1"))
    step = torch.cat([(end[name] - start[name]).flatten() for name in start])
    assert step.norm() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("same_draws", [True, False])
def test_random_numbers_of_pieces_and_processes(same_draws, spy):
    """In pretraining, pieces and processes draw the same numbers. Otherwise, each draws its own."""
    seeds, weight = spy(torch, "manual_seed", lambda seed: seed), torch.zeros(1, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], 1), torch.amp.GradScaler(enabled=False)
    for seed in (5, 10):
        for rank in range(2):
            args = settings(accum=2, clip_grad=0, rank=rank, same_draws=same_draws)
            train.train_step(lambda x: (weight.sum(), {}), optimizer, scaler, [torch.zeros(4)],
                             seed, args)
    assert len(seeds) == 8 and len({*seeds}) == (2 if same_draws else 8)


def test_weight_decay_is_not_of_biases_and_norms(pretrain):
    run = pretrain("--weight_decay", "0.5", "--epochs", "0")
    decays = [group["weight_decay"] for group in run["optimizer"]["param_groups"]]
    model = train.load_model("runs/mae")
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    groups = [[trained.pop(p) for p in group["params"]] for group in train.decay_groups(model, 1)]
    assert decays == [0.5, 0] and not trained              # each is in one of the groups
    exempt = "bias", "norm.weight", "norm1.weight", "norm2.weight"
    assert [{name.endswith(exempt) for name in names} for names in groups] == [{False}, {True}]


# ---------------------------------------------------------------------------- recipes, flags, help
@pytest.fixture
def dry(monkeypatch, tmp_path):
    """dry(main, words, side) stops before training on n images of this size, and returns the
    args."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def run(main, words, side, n=50_000):
        split = train.ImageDataset(torch.zeros(n, 3, 1, 1), [0] * n, ["a", "b"])
        for module in (train, finetune):
            monkeypatch.setattr(module, "open_data", lambda *_: (split, split, pair(side)))
            monkeypatch.setattr(module, "fit", lambda args, *_, **__: seen.append(vars(args)) or {})
        main(words.split())
        return seen.pop()
    return run


@pytest.mark.parametrize("words, side, wanted", [
    ("--size micro", 224, dict(lr=2e-3, decoder_dim=64, warmup_epochs=1, batch_size=64)),
    ("--size tiny", 64, dict(lr=2e-3, decoder_dim=64, epochs=10, eval_images=1000)),
    ("--size tiny", 224, dict(lr=1.5e-4 * 4096 / 256, decoder_dim=512, epochs=800)),
    ("--size tiny", (64, 224), dict(decoder_dim=512, epochs=800)),
    ("--method imae", 32, dict(crop=1.0, flip=False)),     # as on CIFAR (Table 1)
    ("--size micro --lr 0.32 --decoder_dim 32", 32, dict(lr=0.32, decoder_dim=32)),
    ("--method crossmae --prediction_ratio .25", 32, dict(lr=2e-3 / 3, decoder_depth=4)),
    ("--method crossmae --prediction_ratio .25 --lr 1e-3", 32, dict(lr=1e-3, decoder_depth=4))])
def test_small_images_and_encoders(dry, words, side, wanted):
    """Small images and encoders have a recipe of their own. Others have the paper's."""
    found = dry(train.main, words, side)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("words, n, batch_size", [
    ("", 50_000, 64), ("", 640, 64), ("", 639, 32), ("", 120, 8), ("", 9, 2),
    ("--batch_size 64", 120, 64)])
def test_the_default_batch_leaves_ten_steps(dry, words, n, batch_size, capsys):
    for main, more in ((train.main, ""), (finetune.main, " --mode scratch")):
        found, usual = dry(main, f"{words}{more} --blr 0.1", 32, n), 128 if more else 64
        largest = usual if n == 50_000 else batch_size
        assert found["batch_size"] == largest and found["lr"] == 0.1 * largest / 256
        said = f"note    batch size {largest} instead of {usual}: only {n} training images"
        assert (said in capsys.readouterr().out) == (largest < usual and not words)


def test_a_short_run(dry):
    """A short run scales the recipe's warmup to its epochs, but not a warmup that was given."""
    for words, side, epochs, wanted in (
            ("--size tiny", 224, (10, 60, 79, 80, 400, 800, 1600), (0.5, 3, 3.95, 4, 20, 40, 40)),
            ("", 32, (0, 1, 2, 3, 10, 60, 80), (0, 0.1, 0.2, 0.3, 1, 1, 1))):
        found = [dry(train.main, f"{words} --epochs {n}", side)["warmup_epochs"] for n in epochs]
        assert found == pytest.approx(wanted)
    assert dry(train.main, "--epochs 3 --warmup_epochs 2.5", 32)["warmup_epochs"] == 2.5


@pytest.mark.parametrize("main, words", [(train.main, ""), (finetune.main, "--mode scratch")])
def test_a_run_is_evaluated_at_most_99_times(dry, main, words):
    """The default is at most 99 evaluations; --eval_every overrides it."""
    for more, wanted in (("0", 1), ("99", 1), ("100", 2), ("800", 16), ("800 --eval_every 7", 7)):
        assert dry(main, f"{words} --epochs {more}", 32)["eval_every"] == wanted


@pytest.mark.parametrize("main, words", [
    *((train.main, f"--method {name}") for name in train.METHODS),
    (finetune.main, "--mode scratch"), (finetune.main, "--mode linear")])
def test_help(main, words, dry, capsys):
    """Each flag's help has a text and the default: for large images and, if that differs, for
    low-resolution ones."""
    with pytest.raises(SystemExit, match="0"):
        main([*words.split(), "--help"])
    _, *entries = re.split(r"\n  (?=-)", capsys.readouterr().out)
    shown = {re.search(r"--(\w+)", entry)[1]: " ".join(entry.split()) for entry in entries}
    assert len(shown) > 30 and all(len(text.split()) > 3 for text in shown.values())
    if "linear" in words:                                  # it needs a checkpoint
        return
    large, low_res = dry(main, f"{words} --size tiny", 224), dry(main, words, 32)
    cls = train.METHODS.get(words.split()[1], finetune.Classifier)
    assert {*getattr(cls, "low_res_recipe", ())} <= {*getattr(cls, "recipe", ()), *train.SHARED}
    for name in {**getattr(cls, "recipe", finetune.FINETUNE), **train.method_arguments(cls)}:
        if large.get(name) is not None and name not in ("lr", "schedule"):  # no flag for it
            values = [str(x[name]).strip("()").replace(" ", "") for x in (large, low_res)]
            assert f"({'; low_res: '.join(dict.fromkeys(values))})" in shown[name]


FLAGS = """--blr 1e-2 | --lr 1e-2 | --betas 0.9,0.999 | --weight_decay 0.5 | --warmup_epochs 0 |
--crop 1 | --no-flip | --min_lr 1e-3 | --clip_grad 0.01 | --seed 1 | --mask grid | --mask block |
--epochs 3 | --optimizer adam --weight_decay 0.5 | --optimizer sgd | --train_images 16 |
--mask_ratio 0.5 | --norm_pix_loss | --decoder_depth 2 | --dim 32 | --depth 1 | --heads 1 |
--batch_size 16 |
--img_size 32 | --img_size 32,16 | --patch_size 8 | --amp bf16 | --accum 2 --amp bf16 |
--epochs 0 | --epochs 0 --seed 1"""


def test_flags_do_something(pretrain, monkeypatch):
    monkeypatch.setattr(train, "save_picture", lambda *_: None)
    words = [words.split() for words in ["", *FLAGS.split("|")]]
    runs = [pretrain("--train_images", "24", "--eval_images", "1", "--eval_every", "9", *more,
                     name=f"{i}") for i, more in enumerate(words)]
    for i in range(len(runs)):
        for k in range(i):
            assert not same(runs[i]["model"], runs[k]["model"]), f"{words[i]} does as {words[k]}"


def test_what_changes_nothing(pretrain):
    """The same seed, checkpointing, a size whose parts are all given, and the number of evaluations
    change nothing. (For --accum see test_methods.py.)"""
    plain = pretrain(name="plain")["model"]
    for words in ("", "--grad_checkpointing", "--size tiny", "--eval_every 2", "--eval_images 1"):
        assert same(plain, pretrain(*words.split(), "--overwrite")["model"]), words


def test_a_run_leaves_everything(pretrain, capsys):
    content = pretrain("--img_size", "16,24", "--eval_images", "9", "--warmup_epochs", "0.5")
    said, rows = capsys.readouterr().out, log()
    assert {p.name for p in Path("runs/mae").iterdir()} == {"last.pt", "log.jsonl", "recon.png"}
    assert Image.open("runs/mae/recon.png").size == (4 * 122 + 2, 8 * 82 + 2)
    train.save_picture([torch.rand(2, 3, 129, 8)], "large.png")        # is not enlarged
    assert Image.open("large.png").size == (8 + 4, 2 * 131 + 2)
    assert "40 train, 9 val, in memory; 16x24 px in 4x6 patches of 4x4 px" in said
    assert "2 epochs (0.5 warmup), 5 steps per epoch, batch size 8, adamw, lr 0.002" in said
    assert [row["epoch"] for row in rows] == [1, 2] and content["history"] == rows
    assert content["method"] == "mae" and content["epoch"] == 2 and content["classes"] == ["a", "b"]
    assert content["flags"]["batch_size"] == 8 and content["flags"]["seed"] == 0
    assert content["torch"] == torch.__version__ and content["mean"] == MAE.mean
    assert same(content["model"], train.read_checkpoint("runs/mae", mmap=True)["model"])


def test_evaluating_now_and_then(pretrain, monkeypatch):
    """With --eval_every 2, each second epoch and the last one are scored, also in a resumed run.
    Each epoch has a row."""
    monkeypatch.setattr(train, "save_picture", lambda *_: None)
    monkeypatch.setitem(MAE.recipe, "schedule", "constant")

    def epochs():
        rows = log("less")
        assert [row["epoch"] for row in rows] == [*range(1, len(rows) + 1)]
        assert all(row.keys() >= {"loss", "lr", "img_s", "train_s"} for row in rows)
        return [row["epoch"] for row in rows if "psnr_masked" in row]
    words = ["--eval_every", "2", "--epochs"]
    pretrain(*words, "3", name="less")
    assert epochs() == [2, 3]
    more = pretrain(*words, "7", "--resume", name="less")
    assert epochs() == [2, 3, 4, 6, 7]
    straight = pretrain("--epochs", "7", name="straight")
    assert same(more["model"], straight["model"])
    first, *_, last = straight["history"]                  # the model has learned something
    assert last["loss"] < 0.9 * first["loss"] and last["psnr_masked"] > first["psnr_masked"] + 0.5


def eager(*words):
    torch.compile = partial(torch.compile, backend="aot_eager")        # only in this process
    script(*words)


@pytest.mark.parametrize("processes, method, more", [
    (3, "mae", []), *((2, name, []) for name in train.METHODS if name not in ("mae", "imae")),
    (2, "imae", ["--compile"])])                           # without it: test_imae.py
def test_several_processes_are_one(pretrain, folder, processes, method, more):
    """Processes divide the same images, crops and masks, and end with the same weights. The
    optimizer is SGD because Adam turns rounding errors into full steps where a gradient is zero,
    e.g. of a key's bias. A batch of 12 does not divide the 40 images. Validation has 11."""
    words = ["--optimizer", "sgd", "--lr", "0.1", "--accum", "2", "--batch_size", "12",
             "--img_size", "16,24", "--method", method, *flags(BASE[method])]
    words += ["--pixel_fraction", "0.5"] if method == "minr" else []
    if processes == 3:                                     # one gets no image to validate on
        words += ["--eval_images", "2", "--img_size", "8,12"]          # in files
    one = pretrain(*words, name="one", own=[])
    said = together("train.py", "--data", folder, "--name", "two", *TINY, *words, *more,
                    processes=processes, work=eager)
    two = train.read_checkpoint("runs/two")
    assert same(one["model"], two["model"], atol=1e-6)
    assert said.count("epoch 2:") == 1                     # only one process prints
    assert "Warning" not in Path("err").read_text()
    for a, b in zip(one["history"], two["history"]):       # 11 images, none twice
        for name in ("loss", "psnr_masked", "psnr_image", "psnr_decoded"):
            assert a[name] == pytest.approx(b[name], rel=1e-4)


def test_resume_and_overwrite(pretrain, folder, monkeypatch, capsys, refused):
    """A run changes only as it was asked to. A resumed run has the settings given now."""
    first = pretrain("--resume")                           # nothing to resume: a new run
    for words in ([], ["--epochs", "0"]):                  # nothing to do, nothing lost
        with open("runs/mae/log.jsonl", "a") as file:
            file.write('{"epoch": 3}')                     # newer than last.pt: dropped
        again = pretrain("--resume", *words)
        assert same(first["model"], again["model"]) and len(again["history"]) == len(log()) == 2
    capsys.readouterr()
    moved = shutil.copytree(folder, Path("moved", folder.name))
    other = pretrain("--resume", "--epochs", "3", "--weight_decay", "0.9", "--betas", "0.5,0.6",
                     "--data", str(moved))
    said = capsys.readouterr().out
    assert "resumed after epoch 2 of 3\n" in said and other["epoch"] == 3
    assert {*re.findall(r"note +(\w+ changed .*)", said)} == {
        "epochs changed from 2 to 3", "weight_decay changed from 0.05 to 0.9",
        "betas changed from (0.9, 0.95) to (0.5, 0.6)", f"data changed from {folder} to {moved}"}
    group = other["optimizer"]["param_groups"][0]
    assert group["weight_decay"] == 0.9 and tuple(group["betas"]) == (0.5, 0.6)
    file = next(moved.rglob("*.png"))
    file.rename(file.with_name("new.png"))
    refused(lambda words: pretrain("--resume", *words), ["--data", moved], "files was ", ", is ")
    pretrain("--epochs", "0", name="late")                 # written untrained, then trained
    late = pretrain("--resume", name="late")
    assert same(first["model"], late["model"])
    assert [row["epoch"] for row in late["history"]] == [0, 1, 2]
    assert not same(first["model"], pretrain("--overwrite", "--seed", "1")["model"])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr(MAE, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pretrain("--overwrite")
    assert capsys.readouterr().err.startswith("stopped; to continue a training run")
    assert not Path("runs/mae/last.pt").exists()           # the old one is gone
    refused(lambda words: pretrain(*words), [], "runs/mae already holds a run")  # it has begun
    Path("runs/copy").mkdir()
    Path("runs/copy/last.pt").touch()                      # of a run that was elsewhere
    refused(lambda words: pretrain(name="copy"), [], "runs/copy already holds a run")
    assert same(first["model"], pretrain("--resume")["model"])         # as a requeued job does
    assert "nothing to resume: runs/mae/last.pt does not exist" in capsys.readouterr().out


def test_of_runs_that_start_at_once_one_has_the_name(pretrain, monkeypatch, refused):
    """The run that does not get the name stops before it trains or writes a file."""
    opened, winner = train.open_data, []

    def open_data(*inputs):
        monkeypatch.setattr(train, "open_data", opened)
        winner.append(pretrain("--seed", "1"))
        return opened(*inputs)
    monkeypatch.setattr(train, "open_data", open_data)
    refused(lambda words: pretrain(*words), [], "runs/mae already holds a run: --resume continues")
    assert same(winner[0]["model"], train.read_checkpoint("runs/mae")["model"])
    assert log() == winner[0]["history"]


# ------------------------------------------------------------------------------------- checkpoints
def test_init_from_a_released_checkpoint(pretrain, folder, tmp_path, capsys):
    state = load(ROOT / "tests/golden/mae.pt")["state_dict"]
    torch.save({"model": state, "args": argparse.Namespace(lr=1)}, tmp_path / "mae.pth")
    words = ["--img_size", "32", "--patch_size", "8", "--dim", "32", "--depth", "3", "--heads", "4",
             "--epochs", "0", "--init", "mae.pth"]
    content = pretrain(*words, name="other")               # another decoder: encoder only
    assert torch.equal(content["model"]["encoder.cls_token"], state["cls_token"])
    said = capsys.readouterr().out
    assert "mae.pth names no method: assuming 4 heads (--heads), and ImageNet's mean and" in said
    assert "newly initialised: decoder_blocks" in said and "not loaded: decoder_blocks" in said
    words += ["--decoder_dim", "24", "--decoder_depth", "2", "--decoder_heads", "4"]
    content = pretrain(*words, name="whole")
    assert same(content["model"], from_released(state))
    train.main(["--data", str(folder), "--init", "runs/whole", "--name", "sizes", "--workers", "0",
                "--epochs", "0"])                          # sizes are the file's: not 16 pixels
    sizes = train.read_checkpoint("runs/sizes/last.pt")["config"]
    assert (sizes["depth"], sizes["patch_size"], sizes["img_size"]) == (3, (8, 8), (32, 32))


def test_weights_that_were_read_do_not_stay_in_memory(tune, monkeypatch):
    """A checkpoint's weights and optimizer state would take several GB in each process."""
    refs, left, read = [], [], train.read_checkpoint

    def spy(*inputs):
        content = read(*inputs)
        refs.extend(weakref.ref(x) for x in content["model"].values())
        return content

    def step(*_):
        left.append(sum(ref() is not None for ref in refs))
        raise KeyboardInterrupt
    monkeypatch.setattr(finetune, "read_checkpoint", spy)
    monkeypatch.setattr(train, "train_step", step)
    with pytest.raises(SystemExit, match="130"):
        tune()
    assert left == [0] and len(refs) > 20


@pytest.mark.parametrize("method", train.METHODS)
def test_checkpoints_of_ones_own_loop(pretrain, folder, method):
    """Method, config and weights are enough for load_model, --eval, --init and finetune.py to find
    the weights and how images are normalised. A folder can replace its last.pt."""
    words = ["--method", method, "--patch_size", "4,8", "--img_size", "16,24", "--epochs", "0",
             *flags(BASE[method])]
    if method == "imae":
        pretrain(*words[2:], name="mae")
        words += ["--teacher", "runs/mae"]
    content, cls = pretrain(*words, name="old", own=[]), train.METHODS[method]
    Path("runs/own").mkdir()
    torch.save({name: content[name] for name in ("method", "config", "model")}, "runs/own/last.pt")
    assert same(train.load_model("runs/own").state_dict(), content["model"])
    evaluated, = train.main(["--data", str(folder), "--workers", "0", "--mask_ratios", "0.75",
                             "--eval", "runs/own"])
    assert evaluated["psnr_masked"] == pytest.approx(log("old")[0]["psnr_masked"], abs=1e-4)
    started = pretrain(*words, "--init", "runs/own", name="started", own=[])
    finetune.main(["--data", str(folder), "--checkpoint", "runs/own", "--name", "tuned",
                   "--batch_size", "8", "--epochs", "0", "--workers", "0"])
    tuned = train.read_checkpoint("runs/tuned")
    assert (tuned["mean"], tuned["std"]) == (cls.mean, cls.std)
    for name, value in content["model"].items():
        assert torch.equal(started["model"][name], value), name
        if name.startswith("encoder.") and not name.startswith("encoder.norm"):
            assert torch.equal(tuned["model"][name], value), name


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, spy):
    """Otherwise, a power failure could leave neither of the two."""
    calls, path = [], tmp_path / "last.pt"
    for name in ("fsync", "replace"):
        spy(os, name, lambda *_, name=name: calls.append(
            (name, (tmp_path / "last.pt.tmp").stat().st_size)))
    train.save(path, {"x": torch.zeros(9)})
    assert calls == [(name, path.stat().st_size) for name in ("fsync", "replace")]


# ------------------------------------------------------------------------------------- evaluation
@pytest.mark.parametrize("name, error", [("forward", TypeError), ("reconstruct", ValueError)])
def test_a_bug_has_its_traceback(pretrain, monkeypatch, name, error):
    """A bug in training or validation keeps its traceback. Only invalid input ends in one line."""
    def bug(*_):
        raise error("one's own")
    monkeypatch.setattr(MAE, name, bug)
    with pytest.raises(error):
        pretrain()


@pytest.mark.parametrize("side, batch_size, accum, wanted", [
    (32, 2, 1, 250), (64, 2, 1, 250), (224, 2, 1, 20), (224, 100, 2, 50), (224, 4096, 1, 250)])
def test_batches_to_validate_on(side, batch_size, accum, wanted):
    """Validation batches are as large as those in training, but not tiny."""
    data = train.ImageDataset(torch.zeros(600, 3, 1, 1), [0] * 600, [])
    args = settings(batch_size=2 * batch_size, accum=accum, world=2)
    assert len(next(train.val_batches(data, args, (side, side)))[0]) == wanted


def test_validation_is_as_training(pretrain, tune, spy):
    """Validation also runs in mixed precision, but in eval mode."""
    for cls, name, run in ((MAE, "reconstruct", pretrain), (finetune.Classifier, "logits", tune)):
        seen = spy(cls, name, lambda self, images, *_: (
            torch.is_autocast_enabled("cpu"), len(images), self.training))
        modes = spy(cls, "forward", lambda self, *_: self.training)
        run("--accum", "2", "--amp", "bf16", name=name)    # TINY: 2 epochs, --batch_size 8
        assert {*seen} - {(True, 4, True)} == {(True, 11, False)}
        assert modes == [True] * 20                        # also after the first validation


@pytest.mark.parametrize("method", train.METHODS)
def test_psnr_by_hand(pretrain, folder, spy, method):
    """PSNR and recon.png show what reconstruct returns for fixed noise, which depends only on the
    image: not on the seed or on the number of images."""
    seen = spy(train.METHODS[method], "reconstruct", lambda self, *inputs: inputs[:2])
    drawn = spy(train, "save_picture", lambda columns, path: columns)
    words = ["--method", method, "--epochs", "0", "--img_size", "16,24"]
    pretrain(*words, name="all", own=[])
    images, noise = (torch.cat(parts) for parts in zip(*seen))
    truth = train.open_data(str(folder), (16, 24), settings())[1].images / 255
    found = [(x - truth).abs().amax((1, 2, 3)).argmin().item()
             for x in denormalize(images, train.load_model("runs/all"))]
    assert sorted(found) == [*range(11)]                   # each validation image once
    assert len(noise.unique(dim=0)) == 11
    seen.clear()
    pretrain(*words, "--seed", "1", "--eval_images", "4", name="few", own=[])
    (few, noise_of_few), = seen
    assert len(few) == 4
    for x, n in zip(few, noise_of_few):
        assert torch.equal(n, noise[(images == x).all((1, 2, 3))].squeeze(0))
    for name, images, noise in (("all", images, noise), ("few", few, noise_of_few)):
        model, (row,) = train.load_model(f"runs/{name}"), log(name)
        with torch.no_grad():
            decoded, mask = model.reconstruct(images, noise)
        copied = model.encoder.copy_visible(decoded, images, mask)
        truth, decoded, copied = (denormalize(x, model) for x in (images, decoded, copied))
        grey = torch.where(model.encoder.pixels_of(mask) > 0, 0.5, truth)
        for column, wanted in zip(drawn.pop(0), (truth, grey, decoded, copied), strict=True):
            assert torch.allclose(column, wanted[:8], atol=1e-5)
        truth, decoded, copied = (patchify(x, 4) for x in (truth, decoded, copied))  # (B, 24, 48)
        masked = [(x - y)[m > 0].square().mean() for x, y, m in zip(copied, truth, mask)]
        for kind, errors in (("masked", masked), ("image", (copied - truth).square().mean((1, 2))),
                             ("decoded", (decoded - truth).square().mean((1, 2)))):
            wanted = sum(-10 * math.log10(error) for error in errors) / len(images)
            assert row[f"psnr_{kind}"] == pytest.approx(wanted, abs=1e-3), kind


def cells(path, column):
    """Return a column of a picture of 130 x 130 cells, each with its border."""
    return np.asarray(Image.open(path))[:, 130 * column:130 * (column + 1)]


def test_eval_of_several_checkpoints(pretrain, folder, refused, capsys):
    """Each checkpoint has a row for each mask ratio, with the numbers from training, and a column
    of the picture. Classifiers are skipped."""
    runs = {"mae": pretrain(), "half": pretrain("--decoder_depth", "2", name="half")}
    finetune.main("--checkpoint runs/mae/last.pt --epochs 0 --name tuned --workers 0".split())
    words = ["--workers", "0", "--mask_ratios", "0.5", "0.75", "--eval"]
    rows = train.main([*words, *(f"runs/{name}/last.pt" for name in ("mae", "tuned", "half"))])
    said = capsys.readouterr().out
    assert "skipping runs/tuned/last.pt" in said and "mean over 11 images of" in said
    assert [(Path(row["checkpoint"]).parent.name, row["mask_ratio"]) for row in rows] == [
        ("mae", 0.5), ("mae", 0.75), ("half", 0.5), ("half", 0.75)]
    for name, row in (("mae", rows[1]), ("half", rows[3])):
        for key in ("psnr_masked", "psnr_image", "psnr_decoded"):
            assert row[key] == pytest.approx(runs[name]["history"][-1][key], abs=1e-4)
    for name, column, wanted in (("mae", 0, 0), ("mae", 1, 1), ("mae", 2, 3), ("half", 3, 3)):
        picture = cells(f"runs/{name}/recon.png", wanted)
        assert np.array_equal(cells("runs/mae/eval_mae_half.png", column), picture)
    for name, more in (("drawn", "--data shapes --train_images 40"), ("large", "--img_size 32"),
                       ("coarse", "--patch_size 8")):
        pretrain(*more.split(), "--epochs", "0", "--eval_images", "1", name=name)
    for name, sizes in (("large", "((32, 32), (4, 4))"), ("coarse", "((16, 16), (8, 8))")):
        refused(train.main, [*words, "runs/mae/last.pt", f"runs/{name}/last.pt"],
                f"runs/{name}/last.pt has image and patch sizes {sizes}, but the checkpoints")
    capsys.readouterr()
    train.main([*words, "runs/large/last.pt", "runs/drawn/last.pt", "--eval_images", "1"])
    assert f"drawn/last.pt was trained on shapes, and is evaluated on {folder}" in (
        capsys.readouterr().out)
    refused(train.main, ["--eval", "runs/tuned/last.pt"], "no checkpoint from train.py")


def test_masks_of_an_evaluation(pretrain):
    """Each pattern and ratio has its own score. After training, a run is scored under its own
    pattern, and on whole images, even in files. The picture has the first pattern."""
    row = pretrain("--mask", "grid", "--img_size", "12")["history"][-1]
    words = ["--workers", "0", "--mask_ratios", "0.5", "0.75", "--eval", "runs/mae/last.pt"]
    rows = train.main([*words, "--masks", "random", "grid", "block"])
    scores = {(row["mask"], row["mask_ratio"]): row["psnr_masked"] for row in rows}
    assert len(rows) == len({*scores.values()}) == 6
    assert scores["grid", 0.75] == pytest.approx(row["psnr_masked"], abs=1e-4)
    pictures = []
    for mask in ("block", "random"):
        again = train.main([*words, "--masks", mask, "grid"])
        assert [row["psnr_masked"] for row in again[:2]] == [scores[mask, 0.5], scores[mask, 0.75]]
        pictures.append(Path("runs/mae/eval_mae.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_eval_of_normalised_patches(pretrain):
    """With --leak_free, the true mean and variance of a patch are not used."""
    pretrain("--norm_pix_loss")
    pretrain("--norm_pix_loss", name="[m]ae")              # a name, not a pattern
    words = ["--eval", "runs/[m]ae/last.pt", "--mask_ratios", "0.75", "--workers", "0"]
    (flattered,), (honest,) = train.main(words), train.main([*words, "--leak_free"])
    assert honest["psnr_masked"] < flattered["psnr_masked"]
    assert honest["checkpoint"] == "runs/[m]ae/last.pt"


def test_eval_shows_what_is_special_to_a_method(pretrain, folder, spy, capsys):
    """--eval prints i-MAE's separability and MAE's attention, and writes the methods' pictures of
    validation images. A pattern that the shell has left is expanded."""
    shown = spy(train.METHODS["minr"], "figures", lambda self, images: images)
    pretrain()
    for name, more in (("crossmae", []), ("minr", []), ("imae", ["--teacher", "runs/mae"])):
        pretrain("--method", name, *more, name=name, own=flags(BASE[name]))
    capsys.readouterr()
    rows = train.main(["--workers", "0", "--mask_ratios", "0.75", "--eval", "runs/[cm]*/last.pt",
                       "runs/imae/last.pt"])
    assert [Path(row["checkpoint"]).parent.name for row in rows] == [
        "crossmae", "mae", "minr", "imae"]
    said = capsys.readouterr().out
    assert "share of visible" in said and "visible tokens; 11 images" in said
    assert "11 mixtures of two" in said and "fitted on 40 training images" in said
    words = ["--workers", "0", "--mask_ratios", "0.75", "--eval_images", "10", "--eval"]
    train.main([*words, "runs/imae"])                      # of fewer images, there are no measures
    few = capsys.readouterr().out
    assert "10 mixtures of two" in few and "fitted on 10 training images" in few
    val = train.open_data(str(folder), None, settings())[1].images / 255
    assert len(shown[0]) == 8 and all((x == val).all((1, 2, 3)).any() for x in shown[0])
    for name in ("crossmae/contributions", "crossmae/map_weights", "minr/rendered", "imae/unmix"):
        assert Image.open(f"runs/{name}.png").width > 100 and f"runs/{name}.png" in said
