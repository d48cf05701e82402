"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

From top to bottom: options, data, processes, checkpoints, the loop, evaluation, main. To see how a
model is trained, read `run`, then `fit`; the rest are their helpers. Whatever is random is drawn
from (seed, epoch, step) for the whole batch, of which each process takes its rows: so N processes
compute what one does, and a resumed run what an uninterrupted one would have.
"""

import argparse
import difflib
import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import time
import zipfile
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from tqdm import tqdm
from tqdm.contrib.concurrent import thread_map

from crossmae import CrossBlock, CrossMAE
from hypermae import HyperMAE
from imae import IMAE, draw_partners
from mae import MAE
from minr import MINR
from vit import (IMAGENET_MEAN, IMAGENET_STD, SIZES, Block, from_released, grid_of, mask_noise,
                 pair, transfer)

# Every method has these, and the constructor's first six arguments of mae.MAE. What only some have
# is asked for: norm_pix_loss, pairs (of images, to train on), render, figures, measures, from_mae.
FACE = ("recipe", "small", "mean", "std", "lr_scale", "encoder", "mask_ratio", "reconstruct")
METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}


# ---------------------------------------------------------------------------------------- options

LEAST = dict(epochs=0, batch_size=1, accum=1, warmup_epochs=0, blr=0, lr=0, min_lr=0, crop=0.01,
             weight_decay=0, clip_grad=0, workers=0, eval_images=1, dim=1, depth=1, heads=1, k=1,
             mixup=0, cutmix=0, randaug=0, decoder_dim=1, decoder_depth=1, decoder_heads=1)
SHARES = ("crop", "erasing", "mix_ratio", "smoothing", "drop_path", "layer_decay", "same_class",
          "mix", "momentum")                               # from 0 to 1
PAIR_FLAGS = ("teacher", "same_class", "mix")              # of methods that learn from pairs
CHOICES = dict(optimizer=("adamw", "adam", "sgd"), schedule=("cosine", "constant"))
RECIPE = """
    optimizer: adamw, adam or sgd
    schedule: cosine or constant
    lr: learning rate
    blr: learning rate for a batch of 256, instead of lr
    betas: of adam and adamw
    momentum: of sgd
    weight_decay: on parameters of two and more dimensions
    batch_size: of all processes together
    epochs: passes over the training set; 0 writes the untrained model
    warmup_epochs: epochs of linear warm-up
    crop: least share of the area that a random resized crop keeps; 1: no crop
    flip: flip left and right at random
"""


def knobs(cls):
    """{name: default} of a class's keyword-only constructor arguments: a method's own flags."""
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()
            if p.kind is p.KEYWORD_ONLY}


def numbers(text):
    """A word, or a tuple of numbers as in 0,5,11."""
    return text if text.isidentifier() else tuple(
        int(n) if n.isdigit() else float(n) for n in text.split(","))


def pixels(text):
    """An int, or an (H, W) pair as in 32,48."""
    sides = tuple(int(n) for n in text.split(","))
    if len(sides) > 2 or min(sides) < 1:
        raise ValueError
    return sides if len(sides) == 2 else sides[0]


class Parser(argparse.ArgumentParser):
    """argparse that starts with the options on which others depend, --method or --mode and the
    encoder's size. Its errors are one line and name an unknown flag's method or neighbour."""

    def __init__(self, prog, about, name, choices):
        super().__init__(prog, description=about, add_help=False, allow_abbrev=False)
        self.add_argument(f"--{name}", choices=choices, default=next(iter(choices)))
        self.add_argument("--size", choices=SIZES, help="of the encoder (micro)")
        for part in ("dim", "depth", "heads"):
            self.add_argument(f"--{part}", type=int, help="of the encoder, instead of the size's")

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(str(message).split())}\n")

    def add_data_options(self):
        """The options of everything that looks at pictures."""
        option = self.add_argument
        option("-h", "--help", action="help", help="show this and exit")
        option("--data", help="shapes, cifar10, cifar100, or a folder: train/ and val/ with class "
               "folders, or any pictures, of which 5%% are held out (the checkpoint's, or shapes)")
        option("--device", help="cuda, mps or cpu (the best there is)")
        option("--workers", type=int, default=min(8, os.cpu_count()),
               help="processes that decode pictures for each training process")
        option("--eval_images", type=int, default=1000, help="validation pictures used, at most")

    def add_options(self, values, doc, kinds):
        """The options that train.py and finetune.py share, and a flag for each {name: default} of
        `values`: parsed like the default or by its type in `kinds`, described by a line `name:
        words` of `doc`, and absent from the result unless given."""
        self.add_data_options()
        option = self.add_argument
        option("--img_size", type=pixels, help="or H,W (224; small pictures keep theirs)")
        option("--patch_size", type=pixels, help="or H,W (16; of small pictures an eighth)")
        option("--name", help="of the run's folder")
        option("--runs", default="runs", help="folder of all runs")
        option("--resume", action="store_true", help="go on from the run's last.pt, if it has one")
        option("--overwrite", action="store_true", help="replace the run of that name")
        option("--min_lr", type=float, default=0.0, help="where the cosine ends")
        option("--clip_grad", type=float, default=0.0, help="largest norm of the gradient; 0: any")
        option("--accum", type=int, default=1, help="pieces into which a batch is split")
        option("--seed", type=int, default=0)
        option("--amp", choices=("auto", "bf16", "fp16", "fp32"), default="auto",
               help="auto: bf16 on a GPU that has it, fp16 on one that has not, fp32 on a CPU")
        option("--compile", action="store_true", help="torch.compile the model")
        option("--grad_checkpointing", action="store_true",
               help="compute the inside of blocks again in the backward pass instead of keeping it")
        if "lr" not in values:
            option("--lr", type=float, default=argparse.SUPPRESS, help="learning rate")
        for name, default in {"momentum": 0.9, **values}.items():
            words = re.search(rf"^ *{name}: (.+)", doc, re.M)
            if not words:
                self.error(f"--{name}: there is no line `{name}: words` in the class's docstring")
            kind = kinds.get(name, type(default))
            how = (dict(action=argparse.BooleanOptionalAction) if kind is bool else
                   dict(type=kind if kind in (int, float) else numbers))
            option(f"--{name}", default=argparse.SUPPRESS, **how,
                   help=(words[1] + f" ({default})" * (default is not None)).replace("%", "%%"))

    def run(self, run, argv):
        """run(args) of the words `argv`; what makes no sense, a ValueError, ends in one line."""
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            flag = word.split("=")[0].removeprefix("--").removeprefix("no-")
            owners = [f"--method {name}" for name, cls in METHODS.items()
                      if flag in knobs(cls) or flag in PAIR_FLAGS and hasattr(cls, "pairs")]
            near = difflib.get_close_matches(flag, [action.dest for action in self._actions], 1)
            self.error(f"unknown argument {word}" + (
                f": it belongs to {' and '.join(owners)}" if owners else
                f": did you mean --{near[0]}?" if near else ""))
        for number in (signal.SIGINT, signal.SIGTERM) if argv is None else ():
            signal.signal(number, partial(stop, args, os.getpid()))
        try:
            for name, value in vars(args).items():
                for x in value if isinstance(value, (tuple, list)) else [value]:
                    if isinstance(x, float) and not math.isfinite(x):
                        raise ValueError(f"--{name} {x} is not a finite number")
                if name in LEAST and value is not None and not value >= LEAST[name]:
                    raise ValueError(f"--{name} {value} is less than {LEAST[name]}")
                if name in SHARES and value is not None and not 0 <= value <= 1:
                    raise ValueError(f"--{name} {value} is not between 0 and 1")
                if name in CHOICES and value not in CHOICES[name]:
                    raise ValueError(f"--{name} {value} is not one of {' '.join(CHOICES[name])}")
            row = run(args)
        except ValueError as error:
            self.error(error)
        if dist.is_initialized():
            dist.destroy_process_group()
        return row


def stop(args, script, number, _):
    """What the process `script` does on a signal: end at once, and say how to go on. (An exception
    would get lost where it meets the end of a DataLoader.)"""
    if os.getpid() == script:                              # not a worker that it has forked
        for worker in multiprocessing.active_children():
            worker.kill()
        last = hasattr(args, "runs") and Path(args.runs, args.name or "", "last.pt")
        line = (f"the same command with --resume goes on from {last}" if last and last.is_file()
                else "there is no checkpoint to --resume from")
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"\nstopped: {line}\n".encode())
    os._exit(128 + number)


def settle(args, values):
    """Fill in what was not given from `values`, where lr sets blr aside. Returns the line that says
    what was filled in."""
    given = {*vars(args)}
    if {"lr", "blr"} <= given:
        raise ValueError(f"--lr {args.lr} and --blr {args.blr} exclude each other")
    unused = {"lr", "blr"} if {"lr", "blr"} & given else {"blr"} if "lr" in values else set()
    values = {name: value for name, value in values.items() if name not in given | unused}
    vars(args).update({"lr": None, "momentum": 0.9, **values, **vars(args)})
    if not (isinstance(args.betas, tuple) and len(args.betas) == 2
            and all(0 <= beta < 1 for beta in args.betas)):
        raise ValueError(f"--betas {args.betas} are not two numbers from 0 to below 1, as in "
                         f"0.9,0.95")
    idle = "betas" if args.optimizer == "sgd" else "momentum"
    if idle in given:
        raise ValueError(f"--{idle} is nothing to --optimizer {args.optimizer}")
    if args.img_size and args.patch_size:                  # before data are made of that size
        grid_of(pair(args.img_size), pair(args.patch_size))
    if 0 < args.epochs < args.warmup_epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} exceeds --epochs {args.epochs}")
    return "recipe  " + ", ".join(f"{name} {value}" for name, value in values.items()
                                  if value is not None)


# ------------------------------------------------------------------------------------------- data

@dataclass
class Split:
    """Pictures, uint8 (N,C,H,W) on the device or file names, labels (N,), -1 for none, and indices
    of the unreadable pictures met so far, for each of which another one stands in."""
    pictures: object
    labels: torch.Tensor
    classes: list
    replaced: set = field(default_factory=set)

    @property
    def in_memory(self):
        return torch.is_tensor(self.pictures)


SHAPES = {  # radius of the outline at the angle a
    "disc": lambda a: torch.full_like(a, 0.85),
    "ellipse": lambda a: 0.5 / torch.hypot(0.5 * a.cos(), a.sin()),
    "square": lambda a: 0.75 / torch.maximum(a.cos().abs(), a.sin().abs()),
    "bar": lambda a: torch.minimum(1 / a.cos().abs(), 0.3 / a.sin().abs()),
    "triangle": lambda a: 0.5 / (torch.remainder(a, 2 * math.pi / 3) - math.pi / 3).cos(),
    "half disc": lambda a: torch.where(a > 0, 1, (0.1 / -a.sin()).clamp(max=1)),
    "wedge": lambda a: torch.where(a.abs() > 0.7, 1.0, 0.1),
    "star": lambda a: 1.1 / (1 + 1.2 * (2.5 * a).sin().abs()),
    "flower": lambda a: 0.7 + 0.3 * (4 * a).cos(),
    "propeller": lambda a: 0.55 + 0.45 * (2 * a).cos(),
}


def draw_shapes(n, img_size, seed):
    """The embedded data: n pictures (n,3,H,W), uint8, and labels (n,), each of one shape, turned
    and softly shaded, on a shaded ground of another colour."""
    g, (H, W), pictures = torch.Generator().manual_seed(seed), img_size, []
    axes = torch.meshgrid(torch.linspace(-1, 1, H), torch.linspace(-1, 1, W), indexing="ij")
    labels = torch.arange(n) % len(SHAPES)
    for label in labels.split(500):
        def uniform(low, high, *shape):
            return low + (high - low) * torch.rand(len(label), *shape, 1, 1, generator=g)
        y, x = (axis - uniform(-0.3, 0.3) for axis in axes)            # (b, H, W) each
        angle = torch.remainder(torch.atan2(y, x) + uniform(0, 7), 2 * math.pi) - math.pi
        edge = torch.stack([list(SHAPES.values())[i](a) for i, a in zip(label, angle)])
        inside = (uniform(0.5, 0.8) * edge - torch.hypot(x, y)) * min(H, W) / 2
        inside = (inside + 0.5).clamp(0, 1)[:, None]                   # (b, 1, H, W) soft edge
        ground, light = uniform(0, 1, 3), uniform(0, 7)
        paint = (ground + uniform(0.35, 0.65, 3)) % 1                  # far in every channel
        shade = 0.12 * (x * light.cos() + y * light.sin())[:, None]    # (b, 1, H, W)
        picture = inside * (paint - shade) + (1 - inside) * (ground + shade)
        pictures.append((picture.clamp(0, 1) * 255).round().byte())    # (b, 3, H, W)
    return torch.cat(pictures), labels


def list_folder(root):
    """(files, labels, classes) of train and of val: class folders in train/ and val/, or any
    pictures, of which a hash of the name holds out 5% for val."""
    if not root.is_dir():
        raise ValueError(f"--data {root} is not shapes, cifar10, cifar100 or a folder")
    if (root / "train").is_dir():
        try:
            parts = [torchvision.datasets.ImageFolder(root / part) for part in ("train", "val")]
        except FileNotFoundError as error:                 # no val/, no class folder, an empty one
            raise ValueError(f"--data {root} needs class folders in train/ and val/: {error}")
        if parts[0].classes != parts[1].classes:
            raise ValueError(f"--data {root}: the classes of train/ and val/ differ")
        return [([file for file, _ in part.samples], part.targets, part.classes) for part in parts]
    endings = torchvision.datasets.folder.IMG_EXTENSIONS
    files = sorted(str(file) for file in root.rglob("*") if file.suffix.lower() in endings)
    if len(files) < 2:
        raise ValueError(f"--data {root} has {len(files)} pictures, at least 2 are needed")
    code = {file: zlib.crc32(os.path.relpath(file, root).encode()) for file in files}
    val = [file for file in files if code[file] % 20 == 0] or [min(files, key=code.get)]
    return [(part, [-1] * len(part), []) for part in (sorted({*files} - {*val}), val)]


def read_picture(file):
    """The file as an upright RGB picture: 16 bits become 8, what is transparent white. ValueError
    if it is not one."""
    try:
        with Image.open(file) as picture:
            ImageOps.exif_transpose(picture, in_place=True)
            if picture.mode.startswith("I"):               # convert would cut off what is above 255
                picture = picture.point(lambda value: value / 256).convert("L")
            if "A" in picture.mode or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            picture.load()
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except Exception as error:                             # a broken file can raise anything
        raise ValueError(f"{file} cannot be read as a picture: {error}") from None


def read_or_next(files, i):
    """The first picture from the i-th on, in a circle, that can be read, its index, and why it is
    not the i-th."""
    why = ""
    for j in [*range(i, len(files)), *range(i)]:
        try:
            return read_picture(files[j]), j, why
        except ValueError as error:
            why = why or f"{error}; another picture replaces it"
    raise ValueError(f"none of {len(files)} pictures can be read: {why}")


def cover(picture, img_size, border=0.0):
    """The middle of a PIL picture, less a share `border` of each side, in the size (H, W)."""
    return ImageOps.fit(picture, img_size[::-1], Image.BICUBIC, bleed=border)


def read_all(files, labels, classes, img_size):
    """The fields of a Split of files, with the middles of the pictures in the size (H, W)."""
    def read_one(i):
        picture, *rest = read_or_next(files, i)
        return v2.functional.pil_to_tensor(cover(picture, img_size)), *rest
    pictures, used, why = zip(*thread_map(read_one, range(len(files)), desc="reading", leave=False,
                                          disable=None))
    first = os.environ.get("RANK", "0") == "0"             # all processes read the same
    note_replaced(range(len(files)), why, replaced := set(), say=first)
    return torch.stack(pictures), torch.tensor(labels)[[*used]], classes, replaced


def note_replaced(ids, why, replaced, say=True):
    """Add to the set `replaced` those of ids that have a `why`, and say it once."""
    for i, error in zip(ids, why):
        if error and i not in replaced:
            replaced.add(i)
            if say:
                tqdm.write(error)


def open_data(name, img_size=None, device="cpu", memory=2 ** 32):
    """The train and val Split of `--data name`, and their (H, W). A folder's pictures, if a sample
    of 50 is not larger than that and all take less than `memory` bytes, are kept on the device like
    those of the named data sets, else stay files to be streamed."""
    if name == "shapes":
        img_size = pair(img_size or 32)
        parts = [(*draw_shapes(n, img_size, seed=n), list(SHAPES)) for n in (10_000, 1_000)]
    elif name in ("cifar10", "cifar100"):
        img_size, kind = pair(img_size or 32), getattr(torchvision.datasets, name.upper())
        try:
            if os.environ.get("LOCAL_RANK", "0") == "0":   # a machine's first process
                kind("data", download=True)
            if dist.is_initialized():
                dist.barrier()
            sets = [kind("data", train=train) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            raise ValueError(f"--data {name} cannot be downloaded, give a folder instead: {error}")
        parts = [(torch.from_numpy(s.data).permute(0, 3, 1, 2), s.targets, s.classes) for s in sets]
    else:
        parts = list_folder(Path(name))
        files = parts[0][0]
        sample = range(0, len(files), math.ceil(len(files) / 50))
        try:
            W, H = map(max, zip(*(read_or_next(files, i)[0].size for i in sample)))
        except ValueError as error:
            raise ValueError(f"--data {name}: {error}") from None
        img_size = pair(img_size or ((H, W) if max(H, W) < 224 else 224))
        total = 3 * math.prod(img_size) * sum(len(files) for files, *_ in parts)
        if H <= img_size[0] and W <= img_size[1] and total < memory:
            parts = [read_all(*part, img_size) for part in parts]
    return *(Split(x.contiguous().to(device) if torch.is_tensor(x) else x, torch.as_tensor(labels),
                   *rest) for x, labels, *rest in parts), img_size


def seed_of(*numbers):
    """One seed from several ints. (Their hash, unlike that of strings, is the same everywhere.)"""
    return hash(numbers) % 2 ** 63


class Samples:
    """What read_or_next gives, for DataLoader's workers, with the picture transformed. The
    transform draws from a seed, the key (..., index)."""

    def __init__(self, pictures, transform):
        self.pictures, self.transform = pictures, transform

    def __getitem__(self, key):
        *_, i = key
        picture, *rest = ((self.pictures[i], i, "") if torch.is_tensor(self.pictures) else
                          read_or_next(self.pictures, i))
        with torch.random.fork_rng(devices=[]):            # changes nothing outside
            torch.default_generator.manual_seed(seed_of(*key))
            return self.transform(picture), *rest


class Feed:
    """Batches of a split by their indices: out of memory, or with a `transform` (for files: always)
    through workers that prefetch, pin and last as long as the Feed. It counts the seconds that the
    loop `waited` for pictures, and those that `replaced` unreadable ones."""

    def __init__(self, split, args, procs, transform=None):
        self.split, self.device, self.keys, self.loader = split, procs.device, [], None
        self.waited = self.replaced = 0
        if transform:
            pictures = split.pictures.cpu() if split.in_memory else split.pictures
            self.loader = DataLoader(                      # that asks for new keys in each __call__
                Samples(pictures, transform), batch_sampler=self.keys, num_workers=args.workers,
                generator=torch.Generator(),               # or it would draw from torch's own
                persistent_workers=args.workers > 0, pin_memory=procs.device.type == "cuda")

    def __call__(self, ids, *seeds):
        """Pictures (b,C,H,W), uint8, and labels (b,) on the device for each (b,) of ids."""
        self.keys[:] = [[(*seeds, i) for i in batch.tolist()] for batch in ids]
        split, replaced = self.split, self.split.replaced
        stream = iter(self.loader or (
            (split.pictures[batch.to(self.device, non_blocking=True)], batch, ()) for batch in ids))
        for batch in ids:
            began = time.perf_counter()
            pictures, used, why = next(stream)
            self.waited += time.perf_counter() - began
            note_replaced(batch.tolist(), why, replaced)
            self.replaced += sum(i in replaced for i in batch.tolist())
            yield (pictures.to(self.device, non_blocking=True),
                   split.labels[used].to(self.device, non_blocking=True))


def crop_transform(img_size, args, *more):
    """Random resized crop and flip of pictures one by one, by torchvision, and then `more`."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if args.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (args.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * args.flip), *more, v2.PILToTensor()])


def crop_batch(pictures, rows, img_size, args, generator):
    """The same for pictures (b,C,H,W), uint8, on their device -> float, each with draws of its own,
    where torchvision draws once a batch; `rows` (b,) are their places in the global batch.

    Bilinear; a side that would leave the picture is cut to it, where torchvision draws again."""
    draws = torch.rand(5, args.batch_size, device=pictures.device, generator=generator)
    area, ratio, y, x, coin = draws[:, rows]                           # (b,) each
    area = args.crop + (1 - args.crop) * area
    ratio = ((2 * ratio - 1) * math.log(4 / 3) * (args.crop < 1) / 2).exp()
    h, w = (area.sqrt() / ratio).clamp(max=1), (area.sqrt() * ratio).clamp(max=1)
    y, x, zero = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w), torch.zeros_like(h)
    w_flipped = torch.where(coin < 0.5 * args.flip, -w, w)
    theta = torch.stack([w_flipped, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *img_size), align_corners=False)
    return F.grid_sample(pictures.float(), points, padding_mode="reflection", align_corners=False)


def val_batches(split, args, procs, img_size, most, batch_size=250):
    """Batches (indices (b,), pictures, labels) of at most `most` pictures, evenly spread, shuffled,
    divided among the processes. Of a streamed picture the middle, as torchvision's 224 of 256."""
    n = len(split.labels)
    ids = torch.linspace(0, n - 1, min(n, most), dtype=torch.float64).long()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    ids = [batch for batch in ids[procs.rank::procs.world].split(batch_size) if len(batch)]
    middle = v2.Compose([partial(cover, img_size=img_size, border=1 / 16), v2.PILToTensor()])
    feed = Feed(split, args, procs, None if split.in_memory else middle)
    return ((batch, v2.functional.resize(pictures, img_size), labels)
            for batch, (pictures, labels) in zip(ids, feed(ids, 0)))


def normalize(pictures, model):
    """Pictures (b,C,H,W), 0 ... 255, as the model's input."""
    channels = zip(pictures.unbind(1), model.mean, model.std)          # numbers: nothing is copied
    return torch.stack([(x / 255 - mean) / std for x, mean, std in channels], dim=1)


def denormalize(images, model):
    """normalize's inverse, as 0 ... 1."""
    mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1)
                 for v in (model.mean, model.std))
    return (images.float() * std + mean).clamp(0, 1)


# -------------------------------------------------------------------------------------- processes

def start_processes(name=None):
    """rank, world and device of this process, which joins the others under torchrun (RANK)."""
    rank, world, local = (int(os.environ.get(key, default)) for key, default in
                          (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    best = ("cuda" if torch.cuda.is_available() else
            "mps" if torch.backends.mps.is_available() and world == 1 else "cpu")
    try:
        device = torch.device(name or best)
        if device.type == "cuda":
            device = torch.device("cuda", local if world > 1 else device.index or 0)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):                 # an unknown word; a torch without CUDA
        raise ValueError(f"--device {name} is not there: {best} is") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # Restarted by torchrun, processes meet the keys of those that were killed: a prefix keeps
        # them apart. On one machine only, as several count their restarts by themselves.
        if world == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank,
                                world_size=world)
    return SimpleNamespace(rank=rank, world=world, device=device)


def mean_over_processes(sums, count, procs):
    """{name: sum / count}, where sums (0-dim tensors) and count are summed over the processes."""
    total = torch.tensor([*map(float, sums.values()), float(count)], dtype=torch.float64)
    if procs.world > 1:
        dist.all_reduce(total := total.to(procs.device))
    *total, count = total.tolist()
    return {name: value / count if count else math.nan for name, value in zip(sums, total)}


# ------------------------------------------------------------------------------------ checkpoints

@contextmanager
def replacing(path):
    """A file to be written in the place of `path`, which is always whole: the old or the new one.
    ValueError if it cannot be written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:               # torch's writer has the latter
        raise ValueError(f"{path} cannot be written, and is as it was before: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def save(path, content):
    """Write a checkpoint."""
    with replacing(path) as file:
        torch.save(content, file)


def read(path):
    """A checkpoint, a dict; of a released one {"model": in our names}. ValueError if it cannot be
    read."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        if zipfile.is_zipfile(path) and zipfile.ZipFile(path).testzip():   # compares checksums
            raise ValueError("its checksums are wrong")
        with torch.serialization.safe_globals([argparse.Namespace]):   # the releases' flags
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                             # a broken file can raise anything
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = (f"it would run code ({code[1]}), which is refused" if code else
               "its checksums are wrong: it is damaged" if "checksums" in str(error) else
               "it is damaged, another kind of file, or a pickle, which could run code")
        raise ValueError(f"{path} is not a checkpoint that can be read: {why}") from None
    state = content.get("model", content) if isinstance(content, dict) else None
    if not state or not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise ValueError(f"{path} is not a checkpoint: there is no state dict in it")
    if "method" in content and not all(isinstance(content.get(k), dict) for k in (
            "config", "flags", "model")):
        raise ValueError(f"{path} is not a whole checkpoint: it lacks config, flags or model")
    if not all(value.isfinite().all() for value in state.values()):
        raise ValueError(f"{path} holds weights that are not finite")
    return content if "method" in content else {"model": from_released(state)}


@contextmanager
def naming(path):
    """What goes wrong inside, as when a state dict does not fit, is a ValueError with the path."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not fit: {error}") from None


def load(path, classes=METHODS):
    """The model in a checkpoint of train.py, in eval mode; with classes={"classifier": Classifier}
    in one of finetune.py. For released ones see initialize."""
    content = read(path)
    if content.get("method") not in classes:
        raise ValueError(f"{path} is of method {content.get('method')}, not {', '.join(classes)}")
    with naming(path):
        model = classes[content["method"]](**content["config"])
        model.load_state_dict(content["model"])
    return model.eval()


def read_sizes(path, heads=None):
    """What a checkpoint says of its encoder: sizes, mean, std and norm, whether it has a final one;
    and the data it was trained on, if known. Released ones: ImageNet's mean and std."""
    content = read(path)
    state, config, data = content["model"], content.get("config"), None
    mean, std = content.get("mean", IMAGENET_MEAN), content.get("std", IMAGENET_STD)
    if config:
        data = content["flags"].get("data")
    else:                                                  # a released one: read it off the shapes
        try:
            dim, in_chans, *patch_size = state["encoder.patch_embed.proj.weight"].shape
            side = round((state["encoder.pos_embed"].shape[1] - 1) ** 0.5)
        except KeyError as error:
            raise ValueError(f"{path} is not a ViT's checkpoint: it has no {error}") from None
        heads = heads or next((s["heads"] for s in SIZES.values() if s["dim"] == dim), None)
        if not heads:
            raise ValueError(f"{path} does not say its number of heads: give --heads (finetune.py "
                             f"has it), as no size here is {dim} wide")
        depth = len({k.split(".")[2] for k in state if k.startswith("encoder.blocks.")})
        config = dict(img_size=tuple(side * p for p in patch_size), patch_size=tuple(patch_size),
                      in_chans=in_chans, dim=dim, depth=depth, heads=heads)
    names = ("img_size", "patch_size", "in_chans", "dim", "depth", "heads")
    norm = "encoder.norm.weight" in state
    return dict({name: config[name] for name in names}, mean=mean, std=std, norm=norm), data


def read_teacher(path, config):
    """A checkpoint's MAE as the teacher of a model of `config`: its {dim, depth, heads} and its
    weights. ValueError if it is none, or of other patches or another decoder width."""
    content, (sizes, _) = read(path), read_sizes(path)
    state = content["model"]
    if content.get("method", "mae") != "mae" or "map_weights" in state or not state.keys() >= {
            "decoder_embed.weight", "encoder.norm.weight"}:
        raise ValueError(f"--teacher {path} is not an MAE with its decoder embedding, or is one "
                         f"with inter-block attention")
    for name, value in {**sizes, "decoder_dim": len(state["decoder_embed.weight"])}.items():
        if name in ("img_size", "patch_size", "decoder_dim") and value != config[name]:
            raise ValueError(f"--teacher {path} has {name} {value}, this model {config[name]}")
    return ({name: sizes[name] for name in ("dim", "depth", "heads")},
            {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder_embed."))})


def initialize(model, path):
    """Start `model` from the encoder in a checkpoint, this project's or a released one: the notes
    and the ValueError of vit.transfer."""
    content = read(path)
    with naming(path):
        return transfer(model, getattr(model, "from_mae", dict)(content["model"]),
                        grid_of(**content["config"]) if "config" in content else None)


# --------------------------------------------------------------------------------------- the loop

def weight_decay_groups(model, weight_decay):
    """Trainable parameters, those of two and more dimensions with weight decay, others without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in parameters if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0)]


def make_optimizer(args, groups, procs):
    """The recipe's optimiser, fused where torch has it."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD)[args.optimizer]
    own = dict(momentum=args.momentum) if kind is torch.optim.SGD else dict(betas=args.betas)
    return kind(groups, lr=args.lr, fused=procs.device.type != "mps", **own)


def learning_rate(t, lr, epochs, warmup_epochs=0, schedule="cosine", min_lr=0.0):
    """The rate t epochs in, a fraction: up to lr on a line, then to min_lr on half a cosine."""
    if t < warmup_epochs:
        return lr * t / warmup_epochs
    if schedule == "constant":
        return lr
    t = (t - warmup_epochs) / (epochs - warmup_epochs)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def amp_dtype(amp, device):
    """autocast's dtype: as asked; or bf16 where a GPU has it, fp16 where not, float32 elsewhere."""
    if amp == "auto" and device.type == "cuda":
        amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)


def wrap(model, args, procs):
    """The model as the loop calls it: with --grad_checkpointing, on all processes, compiled."""
    for module in model.modules() if args.grad_checkpointing else ():
        if isinstance(module, (Block, CrossBlock)):        # keeps what goes in, not what is inside
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if procs.world > 1:
        options = inspect.signature(DistributedDataParallel).parameters    # renamed in torch 2.13
        buffers = {"forward_sync_buffers", "broadcast_buffers"} & options.keys()
        model = DistributedDataParallel(model, gradient_as_bucket_view=True,
                                        **{max(buffers): False})
    if not args.compile:
        return model
    torch._dynamo.config.optimize_ddp = not args.grad_checkpointing        # not both in torch 2.6
    return torch.compile(model)


def train_step(net, optimizer, scaler, pieces, args, dtype):
    """One step of the optimiser on the next --accum `pieces`, arguments of net. The sums of their
    metrics, on the device: nothing here waits for it."""
    totals = {}
    for i in range(args.accum):
        inputs = next(pieces)
        with net.no_sync() if i < args.accum - 1 and hasattr(net, "no_sync") else nullcontext():
            with torch.autocast(inputs[0].device.type, dtype, enabled=dtype is not torch.float32):
                loss, metrics = net(*inputs)
            scaler.scale(loss / args.accum).backward()
        totals = {name: totals.get(name, 0) + value for name, value in metrics.items()}
    if args.clip_grad:
        scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, args.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return totals


def draw_pieces(args, procs, feed, prepare, epoch, pairs=False):
    """What `prepare` makes of each piece of this process's share of each batch of an epoch, with
    partners for `pairs`. Everything is drawn for the global batch, of which a piece is `rows`."""
    g, generator = torch.Generator(), torch.Generator(procs.device)
    rows = torch.arange(args.batch_size).view(args.accum, procs.world, -1)[:, procs.rank]
    order = torch.randperm(len(feed.split.labels), generator=g.manual_seed(
        seed_of(args.seed, epoch)))
    order = order[:len(order) // args.batch_size * args.batch_size]    # of whole batches
    ids = order.view(-1, args.batch_size)[:, rows]                     # (steps, accum, b)
    if pairs:
        partners = draw_partners(order, feed.split.labels, args.same_class, g)
        ids = torch.cat([ids, partners.view(-1, args.batch_size)[:, rows]], dim=2)     # (..., 2b)
    rows = rows.to(procs.device, non_blocking=True)                    # (accum, b)
    for i, (pictures, labels) in enumerate(feed(ids.flatten(0, 1), args.seed, epoch)):
        step, piece = divmod(i, args.accum)
        generator.manual_seed(seed_of(args.seed, epoch, step))
        yield prepare(rows[piece], pictures, labels, generator)


def name_run(args, name):
    """Settle on args.name, or this one. ValueError if it holds a run that is not to be touched."""
    args.name = args.name or name
    folder = Path(args.runs, args.name)
    if Path(args.name).name != args.name or args.name == "..":
        raise ValueError(f"--name {args.name} is not the name of a folder: --runs says where it is")
    if args.resume and args.overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    if (folder / "last.pt").exists() and not (args.resume or args.overwrite):
        raise ValueError(f"{folder} holds a run: --resume goes on with it, --overwrite replaces "
                         f"it, --name NAME starts another")


def open_run(args, procs, content, model, optimizer, scaler):
    """The run's folder, and the lines of its log.jsonl if it goes on: then model, optimizer and
    scaler are as its last.pt has them. ValueError if it is another run's, or cannot be written."""
    folder = Path(args.runs, args.name)
    last, history = folder / "last.pt", []
    if args.resume and last.exists():
        saved = read(last)
        if not saved.keys() >= {"method", "optimizer", "scaler", "epoch", "history"}:
            raise ValueError(f"{last} is not a checkpoint of a run: --overwrite replaces it")
        flags, history = saved["flags"], saved["history"]
        was, now = ({**knobs(type(model)), **c["config"], "method": c["method"], "optimizer": kind}
                    for c, kind in ((saved, flags.get("optimizer")), (content, args.optimizer)))
        other = [f"{name} {was.get(name)}, not {now.get(name)}" for name in {**was, **now}
                 if was.get(name) != now.get(name)]
        if other:
            raise ValueError(f"{folder} cannot be resumed: it has {'; '.join(other)}: --name NAME "
                             f"starts another")
        if saved["epoch"] and not saved["optimizer"].get("state") and args.optimizer != "sgd":
            raise ValueError(f"{last} has lost its optimiser's state: --init {last} starts anew")
        groups = optimizer.state_dict()["param_groups"]    # with the settings asked for now
        with naming(last):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
            if saved["scaler"]:
                scaler.load_state_dict(saved["scaler"])
        changed = [f"--{name} {value} was {flags.get(name)}" for name, value in vars(args).items()
                   if value != flags.get(name) and name not in ("resume", "overwrite")]
        if procs.rank == 0:
            print("resumed", f"after epoch {saved['epoch']}", *changed, sep="; ")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}") from None
    if args.overwrite and procs.rank == 0:                 # or --resume would find the old run
        last.unlink(missing_ok=True)
    return folder, history


def fit(args, procs, model, groups, feed, prepare, evaluate, **content):
    """Train for --epochs; returns the last line of log.jsonl, a dict.

    `feed` has the training split; prepare(rows, pictures, labels, generator) makes the model's
    arguments of a piece, the `rows` of the global batch, followed by their partners where the model
    learns from pairs; evaluate() -> {name: value} runs after each epoch. Then log.jsonl is written
    and last.pt: `content`, weights, optimiser and flags."""
    device, n = procs.device, len(feed.split.labels)
    if args.batch_size % (procs.world * args.accum):
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {procs.world} "
                         f"processes x --accum {args.accum}")
    if n < args.batch_size:
        raise ValueError(f"--batch_size {args.batch_size} is more than the {n} training pictures")
    if args.schedule == "cosine" and args.min_lr > args.lr:
        raise ValueError(f"--min_lr {args.min_lr} is above the learning rate {args.lr:.3g}")
    dtype, steps = amp_dtype(args.amp, device), n // args.batch_size
    optimizer = make_optimizer(args, groups, procs)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    folder, history = open_run(args, procs, content, model, optimizer, scaler)
    last, done = folder / "last.pt", history[-1]["epoch"] if history else 0
    if mean_over_processes({"epoch": done}, 1, procs)["epoch"] != done:
        raise ValueError(f"--runs {args.runs} is not one folder for all processes: some find a run "
                         f"to --resume after epoch {done}, others not")
    finite, misses = "none", 0                             # the last finite loss, others after it

    def give_up(what):
        raise SystemExit(f"{what}; the last finite loss is {finite}. Go on from "
                         f"{last if history else 'the start'} with --resume and a lower --lr, "
                         f"--clip_grad 1 or --amp fp32")

    def write(row):
        history.append(row)
        if procs.rank == 0:                                # the log first: killed between the two,
            with replacing(folder / "log.jsonl") as file:              # the epoch is done again
                file.write("".join(json.dumps(row) + "\n" for row in history).encode())
            save(last, dict(
                content, model=model.state_dict(), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), epoch=row["epoch"], history=history, seed=args.seed,
                flags=vars(args), mean=model.mean, std=model.std, classes=feed.split.classes,
                torch=str(torch.__version__)))
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)

    net = wrap(model, args, procs)
    if history and done >= args.epochs and procs.rank == 0:
        print(f"nothing is left of --epochs {args.epochs}")
    if not (args.epochs or history):
        write({"epoch": 0, **evaluate()})
    for epoch in range(done, args.epochs):
        def rate(step):
            return learning_rate(epoch + step / steps, args.lr, args.epochs, args.warmup_epochs,
                                 args.schedule, args.min_lr)
        torch.manual_seed(seed_of(args.seed, epoch, procs.rank, 1))        # for drop path
        model.train()
        totals, count, losses, feed.waited, feed.replaced = {}, 0, [], 0, 0
        pieces = draw_pieces(args, procs, feed, prepare, epoch, hasattr(model, "pairs"))
        began = time.perf_counter()
        bar = tqdm(range(steps), f"epoch {epoch + 1}/{args.epochs}", unit="img", leave=False,
                   unit_scale=args.batch_size, disable=procs.rank > 0 or None)
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = rate(step) * group.get("lr_scale", 1.0)
            metrics = train_step(net, optimizer, scaler, pieces, args, dtype)
            losses.append(metrics["loss"] / args.accum)
            good = losses[-1].isfinite()                   # if not, fp16's scaler skips the step
            count = count + good * args.accum              # pieces
            totals = {name: totals.get(name, 0) + torch.where(good, value, 0)
                      for name, value in metrics.items()}
            if step % 20 == 0 or step + 1 == steps:        # the only times the device is waited for
                for i, value in enumerate(torch.stack(losses).tolist(), step + 1 - len(losses)):
                    finite, misses = (value, 0) if math.isfinite(value) else (finite, misses + 1)
                    if misses > (20 if scaler.is_enabled() else 0):    # until its scale fits
                        give_up(f"the loss is {value} at epoch {epoch + 1}, step {i + 1} of "
                                f"{steps}, lr {rate(i):.1e}")
                losses = []
                bar.set_postfix_str(f"loss {value:.4f}, lr {rate(step):.1e}")
        if not all(p.isfinite().all() for p in model.parameters()):
            give_up(f"weights are not finite after epoch {epoch + 1}, lr {rate(step):.1e}")
        means = mean_over_processes(totals, count, procs)
        replaced = mean_over_processes({"replaced": feed.replaced * procs.world}, 1, procs)
        seconds = time.perf_counter() - began
        speed = {"img_s": round(steps * args.batch_size / seconds, 1),
                 "wait": round(feed.waited / seconds, 3)}
        for name, buffer in model.named_buffers() if procs.world > 1 else ():
            if name.endswith(("running_mean", "running_var")):             # BatchNorm's
                dist.all_reduce(buffer.div_(procs.world))
        write({"epoch": epoch + 1, "lr": rate(step), **means, **evaluate(), **speed, **replaced})
    return history[-1]


# ------------------------------------------------------------------------------------- evaluation

def eval_noise(kind, ids, grid):
    """Noise (b,L) of the pictures `ids`: the same for every method, run, machine and batch size."""
    g = torch.Generator()
    return torch.cat([mask_noise(kind, 1, grid, generator=g.manual_seed(seed_of(7, i)))
                      for i in ids.tolist()])


def repaint(model, pictures, ids, kind="random", mask_ratio=None, leak_free=False):
    """Of pictures (b,C,H,W), uint8: themselves in 0 ... 1, their reconstruction, where they are
    hidden (b,1,H,W) and, from methods that render, the rendered picture."""
    noise = eval_noise(kind, ids, model.encoder.grid).to(pictures.device)
    images, size = normalize(pictures, model), model.encoder.img_size
    painted, mask = model.reconstruct(images, noise, mask_ratio, leak_free)
    whole = [model.render(images, size, noise, mask_ratio)] if hasattr(model, "render") else []
    return pictures / 255, denormalize(painted, model), model.encoder.pixels_of(mask), *(
        denormalize(x, model) for x in whole)


def save_picture(columns, path):
    """Write columns [(rows,C,H,W)], 0 ... 1, as a picture; small ones enlarged to 128 pixels."""
    zoom = max(1, 128 // max(columns[0].shape[2:]))
    cells = torch.stack([F.interpolate(x, columns[0].shape[2:]) for x in columns], dim=1)
    cells = cells.flatten(0, 1).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
    with replacing(path) as file:
        torchvision.utils.save_image(cells, file, "png", nrow=len(columns), pad_value=1)


def shade(pictures, hidden):
    """Pictures (b,C,H,W) in 0 ... 1 with what is hidden in grey."""
    return pictures * (1 - hidden) + hidden / 2


@torch.no_grad()
def evaluate_psnr(model, val, args, procs, picture=None, **how):
    """Mean PSNR over the pictures of val, in dB, pixels in 0 ... 1: of the hidden pixels, of the
    whole image (visible pixels copied), to compare, of hidden pixels that are filled with the
    visible ones' mean colour, and, by methods that render, of the whole image rendered. `picture`
    gets 8 rows: original, masked, what was predicted, both; `how`: repaint's last arguments."""
    model.eval()
    names = ["hidden", "image", "mean_colour", *["rendered"] * hasattr(model, "render")]
    sums, count = {f"psnr_{name}": 0.0 for name in names}, 0
    for ids, pictures, _ in val_batches(val, args, procs, model.encoder.img_size, args.eval_images):
        truth, painted, hidden, *rendered = repaint(model, pictures, ids, **how)
        share = hidden.mean((1, 2, 3))                                 # (b,)
        colour = (truth * (1 - hidden)).sum((2, 3), True) / (1 - hidden).sum((2, 3), True)
        off, fill = truth - painted, (truth - colour) * hidden         # in the order of names:
        errors = [(off, share), (off, 1), (fill, share), *((truth - x, 1) for x in rendered)]
        for name, (error, part) in zip(sums, errors):
            error = error.square().mean((1, 2, 3)) / part              # (b,) of the pixels in part
            sums[name] -= 10 * error.clamp(min=1e-10).log10().sum().item()
        if picture and procs.rank == 0 and count == 0:
            columns = truth, shade(truth, hidden), shade(painted, 1 - hidden), painted
            save_picture([x[:8] for x in columns], picture)
        count += len(ids)
    return mean_over_processes(sums, count, procs)


def as_table(rows):
    """Rows, dicts, as a text of aligned columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    rows = [[*names], *([row.get(name, "") for name in names] for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


@torch.no_grad()
def compare(args):
    """`--eval FILE ...`: PSNR of checkpoints at several mask ratios, on the same pictures under the
    same masks, and what each method measures and draws of itself (under a random mask of its own,
    with true means and variances for norm_pix_loss); returns the rows of the table."""
    for name in ("size", "dim", "depth", "heads"):
        if getattr(args, name):
            raise ValueError(f"--{name} does not go with --eval: the checkpoint decides")
    procs, rows, columns, notes = start_processes(args.device), [], [], []
    shown = None                                           # the mask ratio of the picture
    alone = SimpleNamespace(rank=0, world=1, device=procs.device)
    for path in args.eval:
        model, content = load(path).to(procs.device), read(path)
        args.data = args.data or content["flags"].get("data", "shapes")
        img_size, how = model.encoder.img_size, dict(kind=args.mask, leak_free=args.leak_free)
        train, val, _ = open_data(args.data, img_size, procs.device)
        for ratio in args.mask_ratios:
            psnr = evaluate_psnr(model, val, args, procs, mask_ratio=ratio, **how)
            rows.append({"checkpoint": path, "method": content["method"],
                         "M parameters": millions(model), "mask_ratio": ratio, **psnr})
        if len(args.mask_ratios) > 1:
            first, last = rows[-len(args.mask_ratios)], rows[-1]
            notes.append(f"{path}: {last['psnr_hidden'] - first['psnr_hidden']:+.2f} dB for hidden "
                         f"pixels from {first['mask_ratio']} to {last['mask_ratio']}")
        if getattr(model, "norm_pix_loss", False) and not args.leak_free:
            notes.append(f"{path}: with norm_pix_loss, true mean and variance of hidden patches")
        if procs.rank > 0:                                 # pictures and measures are the first's
            continue
        ids, pictures, _ = next(iter(val_batches(val, args, alone, img_size, 8)))
        shown = shown or model.mask_ratio
        truth, painted, hidden, *_ = repaint(model, pictures, ids, mask_ratio=shown, **how)
        columns += [*([] if columns else [truth, shade(truth, hidden)]), painted]
        images = normalize(pictures, model)
        for name, cells in model.figures(images).items() if hasattr(model, "figures") else ():
            file = Path(path).with_name(f"{name}.png")
            save_picture(denormalize(cells, model).unbind(1), file)
            notes.append(f"see     {file}")
        if hasattr(model, "measures"):
            parts = [torch.cat([normalize(x, model) for _, x, _ in val_batches(
                part, args, alone, img_size, args.eval_images)]) for part in (train, val)]
            for title, table in model.measures(*parts).items():
                notes += [f"{path}: {title}", as_table(table)]
    if procs.rank == 0:
        print(f"PSNR, dB, mean over {min(args.eval_images, len(val.labels))} of {args.data}")
        print(as_table(rows), *notes, sep="\n")
        save_picture(columns, picture := Path(args.eval[0]).with_name("eval.png"))
        print(f"see     {picture}: original, masked ({shown}), then a column a checkpoint")
    return rows


# ------------------------------------------------------------------------------------------- main

def vit_config(args, img_size):
    """The encoder's constructor arguments: --size, or what is given instead of its parts."""
    size = SIZES[args.size or "micro"].items()
    parts = {name: getattr(args, name) or value for name, value in size}
    patch_size = tuple(16 if n >= 128 else min((d for d in range(1, n + 1) if n % d == 0),
                                               key=lambda d: abs(d - n / 8)) for n in img_size)
    patch_size = pair(args.patch_size or patch_size)
    return dict(img_size=img_size, patch_size=patch_size, in_chans=3, **parts)


def millions(model):
    """Millions of parameters, those of a frozen teacher aside."""
    return sum(p.numel() for name, p in model.named_parameters()
               if not name.startswith("teacher.")) / 1e6


def describe(args, procs, train, val, model, *lines):
    """Print what is about to run, and `lines`."""
    if procs.rank > 0:
        return
    encoder, n = model.encoder, len(train.labels)
    where = "on the device" if train.in_memory else f"{args.workers} workers"
    where += "" if train.classes else "; no train/ folder, so val is held out by name"
    print(f"data    {args.data}: {n} train, {len(val.labels)} val, {where}")
    print(f"model   {type(model).__name__}: {millions(encoder):.2f} M parameters in the encoder "
          f"({encoder.dim} wide, {len(encoder.blocks)} blocks, {encoder.blocks[0].attn.heads} "
          f"heads), {millions(model) - millions(encoder):.2f} M in the rest")
    print(f"image   {encoder.img_size} pixels: {encoder.grid} patches of {encoder.patch_size}")
    if args.epochs > 0:
        print(f"batch   {args.batch_size}: {procs.world} processes x {args.accum} pieces x "
              f"{args.batch_size // procs.world // args.accum}\n"
              f"steps   {args.epochs} epochs x {n // args.batch_size}, lr {args.lr:.3g}, "
              f"{args.schedule}")
    print(f"device  {procs.device}, {amp_dtype(args.amp, procs.device)}", *lines, sep="\n")


def run(args, values):
    """A parsed command line of train.py, from data to the last epoch; `values` are of what is not
    given: the method's arguments and recipe."""
    if getattr(args, "mix", None) is not None and hasattr(args, "beta"):
        raise ValueError(f"--mix {args.mix} and --beta {args.beta} exclude each other")
    cls, taken = METHODS[args.method], settle(args, values)
    args.data = args.data or "shapes"
    name_run(args, args.method)
    procs = start_processes(args.device)
    train, val, img_size = open_data(args.data, args.img_size, procs.device)
    torch.manual_seed(args.seed)
    config = {**vit_config(args, img_size), **{name: getattr(args, name) for name in knobs(cls)}}
    pairs, notes, weights = hasattr(cls, "pairs"), [], {}
    if pairs:
        r, sizes = args.same_class, train.labels.unique(return_counts=True)[1]
        if r is not None and (not train.classes or r > 0 and sizes.min() < 2
                              or r < 1 and len(sizes) < 2):
            raise ValueError(f"--same_class {r} needs class folders, of two and more pictures each "
                             f"for a share above 0, two and more for one below 1")
        if args.teacher:
            config["teacher"], weights = read_teacher(args.teacher, config)
        teacher = (f"{args.teacher}: {config['teacher']}" if args.teacher else
                   "none, so no distillation: --teacher FILE takes an MAE")
        share, mix = ("any" if x is None else x for x in (r, args.mix))
        notes = [f"teacher {teacher}",
                 f"pairs   share of one class: {share}, weight of the first image: {mix}"]
    model = cls(**config)
    if lacks := [name for name in FACE if not hasattr(model, name)]:
        raise ValueError(f"{cls.__name__} lacks {', '.join(lacks)}, which every method has")
    if weights:
        with naming(args.teacher):
            model.teacher.load_state_dict(weights)
    model.to(procs.device)
    if args.lr is None:
        args.lr = args.blr * args.batch_size / 256 * model.lr_scale
    notes += initialize(model, args.init) if args.init else []
    describe(args, procs, train, val, model, taken, *notes)
    folder = Path(args.runs, args.name)

    def prepare(rows, pictures, labels, generator):
        torch.manual_seed(generator.initial_seed())        # for what the model draws by itself
        noise = mask_noise(args.mask, args.batch_size, model.encoder.grid, procs.device, generator)
        parts = pictures.chunk(1 + pairs)                  # images and partners
        if train.in_memory:
            parts = [crop_batch(part, rows, img_size, args, generator) for part in parts]
        images, *partners = (normalize(part, model) for part in parts)
        if not pairs:
            return images, noise[rows]
        mix = torch.distributions.Beta(model.beta, model.beta).sample()
        mix = mix if args.mix is None else torch.tensor(args.mix)      # of all images of a step
        return images, noise[rows], *partners, mix.to(procs.device, non_blocking=True)

    feed = Feed(train, args, procs, None if train.in_memory else crop_transform(img_size, args))
    row = fit(args, procs, model, weight_decay_groups(model, args.weight_decay), feed, prepare,
              lambda: evaluate_psnr(model, val, args, procs, folder / "recon.png"),
              method=args.method, config=config)
    if procs.rank == 0:
        print(f"see     {folder / 'recon.png'}: original, masked, what was predicted, both")
        if getattr(model, "norm_pix_loss", False):
            print("        norm_pix_loss: each hidden patch was given its true mean and variance; "
                  "reconstruct(..., leak_free=True) does without")
        print(f"log     {folder / 'log.jsonl'}")
        if train.classes:
            print(f"next    python finetune.py --checkpoint {folder / 'last.pt'}")
    return row


def main(argv=None):
    """`python train.py` with the words `argv`; returns the last line of log.jsonl, a dict."""
    parser = Parser("train.py", "Pretrain a masked autoencoder.", "method", METHODS)
    option = parser.add_argument
    option("--eval", nargs="+", metavar="FILE", help="measure checkpoints instead of training")
    option("--mask", choices=("random", "grid", "block"), default="random", help="pattern (random)")
    args = parser.parse_known_args(argv)[0]
    if args.eval:
        option("--mask_ratios", nargs="+", type=float, default=[0.5, 0.6, 0.7, 0.75, 0.8, 0.9],
               help="at which PSNR is taken (0.5 0.6 0.7 0.75 0.8 0.9)")
        option("--leak_free", action="store_true", help="norm_pix_loss without the true statistics")
        parser.add_data_options()
        return parser.run(compare, argv)
    cls, dim = METHODS[args.method], args.dim or SIZES[args.size or "micro"]["dim"]
    values = {**knobs(cls), **cls.recipe, **(cls.small if dim <= SIZES["tiny"]["dim"] else {})}
    parser.add_options(values, RECIPE + cls.__doc__, cls.__init__.__annotations__)
    option("--init", metavar="FILE", help="start from the encoder of a checkpoint")
    if hasattr(cls, "pairs"):
        option("--teacher", metavar="FILE", help="checkpoint of an MAE to distill")
        option("--same_class", type=float,
               help="share of the pairs that are of one class, the others are not (any pairs)")
        option("--mix", type=float, help="weight of the first image (drawn from Beta(b, b))")
    return parser.run(partial(run, values=values), argv)


if __name__ == "__main__":
    main()
