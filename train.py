"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

From top to bottom: options, data, processes, optimiser, checkpoints, the loop, evaluation, main.
Randomness is a function of (seed, epoch, step) and is drawn for the whole global batch, of which
each process takes its rows: N processes are one, and a resumed run is the uninterrupted one.
"""

import argparse
import difflib
import inspect
import json
import math
import os
import re
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from tqdm import tqdm

from mae import MAE
from vit import (DECODER_NAMES, SIZES, from_released, mask_noise, pair, resize_pos_embed,
                 unpatchify)

METHODS = {"mae": MAE}


# ---------------------------------------------------------------------------------------- options

class Parser(argparse.ArgumentParser):
    """argparse with one-line errors (exit code 2) that name an unknown flag's owner or neighbour."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(str(message).split())}\n")

    def parse_args(self, argv=None):
        args, rest = self.parse_known_args(argv)
        for word in rest:
            flag = word.split("=")[0].removeprefix("--").removeprefix("no-")
            owners = [f"--method {name}" for name, cls in METHODS.items() if flag in knobs(cls)]
            near = difflib.get_close_matches(flag, [action.dest for action in self._actions], 1)
            self.error(f"unknown argument {word}" + (
                f": it belongs to {' and '.join(owners)}" if owners and word.startswith("--") else
                f": did you mean --{near[0]}?" if near else ""))
        for name, least in LEAST.items():
            if getattr(args, name, None) is not None and getattr(args, name) < least:
                self.error(f"--{name} {getattr(args, name)} is less than {least}")
        return args


LEAST = dict(epochs=0, batch_size=1, accum=1, warmup_epochs=0, blr=0, lr=0, min_lr=0, crop=0.01,
             weight_decay=0, clip_grad=0, workers=0, eval_images=1, dim=1, depth=1, heads=1)


def knobs(cls):
    """{name: default} of a class's keyword-only constructor arguments: a method's flags."""
    return {name: p.default for name, p in inspect.signature(cls).parameters.items()
            if p.kind is p.KEYWORD_ONLY}


def size(text):
    """An int, or a height and a width as in 32,48."""
    numbers = tuple(int(n) for n in text.split(","))
    if len(numbers) > 2 or min(numbers) < 1:
        raise ValueError
    return numbers[0] if len(numbers) == 1 else numbers


def add_values(parser, values, doc=""):
    """A flag for each {name: default}, parsed like the default and absent from the result unless
    given; `doc` has its words in a line `name: words`."""
    for name, default in values.items():
        words = re.search(rf"^ *{name}: (.+)", doc, re.M)
        how = dict(default=argparse.SUPPRESS, help=f"{words[1] if words else ''} ({default})".strip())
        if isinstance(default, bool):
            how["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, (int, float)):
            how["type"] = type(default)
        else:                                              # a word, or a list of numbers: 0,5,11
            how["type"] = lambda text: text if text.isidentifier() else tuple(
                float(n) if "." in n else int(n) for n in text.split(","))
        parser.add_argument(f"--{name}", **how)


RECIPE = """
    optimizer: adamw, adam or sgd
    schedule: cosine or constant
    blr: learning rate at a batch of 256
    lr: learning rate whatever the batch
    betas: of adam and adamw
    momentum: of sgd
    weight_decay: on parameters of two and more dimensions
    batch_size: over all processes together
    epochs: passes over the training set; 0 writes the untrained model
    warmup_epochs: epochs of linear warm-up
    crop: least share of its area that a random resized crop keeps; 1: no crop
    flip: flip left and right at random
"""


def add_options(parser, recipe):
    """The options that train.py and finetune.py share."""
    option = parser.add_argument
    option("--data", default="shapes", help="shapes, cifar10, cifar100, or a folder: train/ and "
           "val/ with class folders, or any pictures (5%% of them become val)")
    option("--size", choices=SIZES, default="micro", help="of the encoder")
    for name in ("dim", "depth", "heads"):
        option(f"--{name}", type=int, help="instead of the size's")
    option("--img_size", type=size, help="pixels, or H,W (small pictures: their own; else 224)")
    option("--patch_size", type=size, help="pixels, or H,W (small: an eighth of img_size; else 16)")
    option("--name", help="of the run's folder")
    option("--runs", default="runs", help="folder of all runs")
    option("--resume", action="store_true", help="go on from the run's last.pt, if it has one")
    option("--overwrite", action="store_true", help="replace the run of that name")
    add_values(parser, {"lr": 0.0, **recipe}, RECIPE)
    option("--min_lr", type=float, default=0.0, help="where the cosine ends")
    option("--clip_grad", type=float, default=0.0, help="largest norm of the gradient; 0: any")
    option("--accum", type=int, default=1, help="pieces in which a batch is computed")
    option("--seed", type=int, default=0)
    option("--device", help="cuda, mps or cpu (the best there is)")
    option("--amp", choices=("auto", "bf16", "fp16", "fp32"), default="auto",
           help="auto: bf16 on a GPU that has it, fp16 on one that has not, fp32 on a CPU")
    option("--compile", action="store_true", help="torch.compile the model")
    option("--workers", type=int, default=min(8, os.cpu_count()), help="to decode, a process")
    option("--eval_images", type=int, default=1000, help="validation pictures used, at most")


def settle(args, values):
    """Fill in what was not given from `values`; a given --blr sets aside an absolute lr."""
    if hasattr(args, "blr"):
        values = {**values, "lr": None}
    for name, value in {"lr": None, **values}.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    if args.optimizer not in ("adamw", "adam", "sgd") or args.schedule not in ("cosine", "constant"):
        raise ValueError(f"--optimizer {args.optimizer} is not adamw, adam or sgd, or --schedule "
                         f"{args.schedule} not cosine or constant")
    if args.epochs and args.warmup_epochs >= args.epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} is not less than --epochs {args.epochs}")


# ------------------------------------------------------------------------------------------- data

class Split(NamedTuple):
    """One split: pictures, uint8 (N,C,H,W) on the device or file names; labels (N,), -1 if none."""
    pictures: object
    labels: torch.Tensor
    classes: list


SHAPES = {  # radius of the outline at the angle a
    "disc": lambda a: 0.85 + 0 * a,
    "ellipse": lambda a: 0.5 / torch.hypot(0.5 * a.cos(), a.sin()),
    "square": lambda a: 0.75 / torch.maximum(a.cos().abs(), a.sin().abs()),
    "bar": lambda a: torch.minimum(1 / a.cos().abs(), 0.3 / a.sin().abs()),
    "cross": lambda a: torch.minimum(1 / torch.maximum(a.cos().abs(), a.sin().abs()),
                                     0.3 / torch.minimum(a.cos().abs(), a.sin().abs())),
    "triangle": lambda a: 0.5 / torch.remainder(a, 2 * math.pi / 3).sub(math.pi / 3).cos(),
    "half disc": lambda a: torch.where(a > 0, 1.0, (0.1 / -a.sin()).clamp(max=1)),
    "wedge": lambda a: torch.where(a.abs() > 0.7, 1.0, 0.1),
    "star": lambda a: 1.1 / (1 + 1.2 * (2.5 * a).sin().abs()),
    "flower": lambda a: 0.7 + 0.3 * (4 * a).cos(),
    "heart": lambda a: 1 - 0.75 * (a - math.pi / 2).abs().sub(math.pi).abs().div(math.pi).sqrt(),
    "propeller": lambda a: 0.55 + 0.45 * (2 * a).cos(),
}


def draw_shapes(n, img_size, seed):
    """The embedded data: n pictures (n,3,H,W) and labels (n,) of a shape, rotated and softly shaded,
    on a shaded ground of another colour."""
    g, (H, W) = torch.Generator().manual_seed(seed), img_size
    axes = torch.meshgrid(torch.linspace(-1, 1, H), torch.linspace(-1, 1, W), indexing="ij")
    labels, pictures = torch.arange(n) % len(SHAPES), []
    for label in labels.split(500):
        def uniform(low, high, *shape):
            return low + (high - low) * torch.rand(len(label), *shape, 1, 1, generator=g)
        y, x = (axis - uniform(-0.3, 0.3) for axis in axes)                # (b, H, W) each
        angle = torch.remainder(torch.atan2(y, x) + uniform(0, 7), 2 * math.pi) - math.pi
        edge = torch.stack([list(SHAPES.values())[i](a) for i, a in zip(label, angle)])
        inside = (uniform(0.5, 0.8) * edge - torch.hypot(x, y)) * min(H, W) / 2
        inside = (inside + 0.5).clamp(0, 1)[:, None]                       # (b, 1, H, W) soft edge
        ground, light = uniform(0, 1, 3), uniform(0, 7)
        paint = (ground + uniform(0.35, 0.65, 3)) % 1                      # far in every channel
        shade = 0.12 * (x * light.cos() + y * light.sin())[:, None]        # (b, 1, H, W)
        picture = inside * (paint - shade) + (1 - inside) * (ground + shade)
        pictures.append((picture.clamp(0, 1) * 255).round().byte())        # (b, 3, H, W)
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
            raise ValueError(f"--data {root} needs train/ and val/ with class folders: {error}")
        if parts[0].classes != parts[1].classes:
            raise ValueError(f"--data {root}: the classes of train/ and val/ differ")
        return [([path for path, _ in part.samples], part.targets, part.classes) for part in parts]
    endings = torchvision.datasets.folder.IMG_EXTENSIONS
    files = sorted(str(path) for path in root.rglob("*") if path.suffix.lower() in endings)
    if len(files) < 2:
        raise ValueError(f"--data {root} has {len(files)} pictures, at least 2 are needed")
    code = {file: zlib.crc32(os.path.relpath(file, root).encode()) for file in files}
    val = [file for file in files if code[file] % 20 == 0] or [min(files, key=code.get)]
    print(f"{root} has no train/ and val/: {len(val)} of its {len(files)} pictures are held out")
    return [(part, [-1] * len(part), []) for part in (sorted({*files} - {*val}), val)]


def read_picture(path):
    """The file as an upright RGB picture."""
    with Image.open(path) as picture:
        return ImageOps.exif_transpose(picture).convert("RGB")


def cover(picture, img_size, border=0.0):
    """A PIL picture resized to cover (H, W), less a share `border` of each side, cut to its middle."""
    return ImageOps.fit(picture, img_size[::-1], Image.BICUBIC, bleed=border)


def open_data(name, img_size=None, device="cpu", memory=2 ** 32):
    """The train and val Split of `--data name`, and their (H, W). Pictures not larger than that and
    of less than `memory` bytes in all are kept on the device, others stay files to be streamed."""
    if name == "shapes":
        img_size = pair(img_size or 32)
        parts = [(*draw_shapes(n, img_size, seed=n), list(SHAPES)) for n in (10_000, 1_000)]
    elif name in ("cifar10", "cifar100"):
        img_size, kind = pair(img_size or 32), getattr(torchvision.datasets, name.upper())
        try:
            parts = [kind("data", train=train, download=True) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            raise ValueError(f"--data {name} cannot be downloaded, give a folder instead: {error}")
        parts = [(torch.from_numpy(part.data).permute(0, 3, 1, 2), part.targets, part.classes)
                 for part in parts]
        parts = [(v2.functional.resize(part[0], img_size, antialias=True), *part[1:])
                 for part in parts]
    else:
        parts = list_folder(Path(name))
        W, H = read_picture(parts[0][0][0]).size
        img_size = pair(img_size or ((H, W) if max(H, W) < 224 else 224))
        total = 3 * math.prod(img_size) * sum(len(files) for files, *_ in parts)
        if H <= img_size[0] and W <= img_size[1] and total < memory:
            def decode(path):
                return v2.functional.pil_to_tensor(cover(read_picture(path), img_size))
            with ThreadPoolExecutor() as pool:
                parts = [(torch.stack([*pool.map(decode, tqdm(part[0], "reading", leave=False))]),
                          *part[1:]) for part in parts]
    return *(Split(x.contiguous().to(device) if torch.is_tensor(x) else x, torch.as_tensor(labels),
                   classes) for x, labels, classes in parts), img_size


def seed_of(*numbers):
    """One seed from several whole numbers."""
    return hash(numbers) % 2 ** 63


class Samples:
    """Pictures for DataLoader's workers. Their transform depends on the key (..., index) alone."""

    def __init__(self, pictures, transform):
        self.pictures, self.transform = pictures, transform

    def __getitem__(self, key):
        picture = self.pictures[key[-1]]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(*key))
            return self.transform(read_picture(picture) if isinstance(picture, str) else picture)


class Feed:
    """Batches of a split, by their indices: out of memory, or with a `transform` (files: always)
    through workers that start once, prefetch and pin."""

    def __init__(self, split, args, procs, transform=None):
        self.split, self.device, self.keys, self.loader = split, procs.device, [], None
        if transform:
            pictures = split.pictures.cpu() if torch.is_tensor(split.pictures) else split.pictures
            self.loader = DataLoader(
                Samples(pictures, transform), batch_sampler=self.keys, num_workers=args.workers,
                persistent_workers=args.workers > 0, pin_memory=procs.device.type == "cuda")

    def __call__(self, ids, *seeds):
        """For each (b,) of ids: itself, pictures (b,C,H,W) uint8 and labels (b,) on the device."""
        self.keys[:] = [[(*seeds, i) for i in batch.tolist()] for batch in ids]
        stream = self.loader or (self.split.pictures[batch.to(self.device)] for batch in ids)
        for batch, pictures in zip(ids, stream):
            yield (batch, pictures.to(self.device, non_blocking=True),
                   self.split.labels[batch].to(self.device, non_blocking=True))


def train_ids(n, args, procs, epoch):
    """The indices of this process's pieces of an epoch's batches, (steps * accum, b)."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(args.seed, epoch)))
    steps = n // args.batch_size
    pieces = order[:steps * args.batch_size].view(steps * args.accum, procs.world, -1)
    return pieces[:, procs.rank]


def val_feed(split, args, procs, img_size, batch_size=250):
    """At most --eval_images pictures, evenly spread, each on one process: what a Feed yields."""
    ids = torch.linspace(0, len(split.labels) - 1, min(len(split.labels), args.eval_images)).long()
    resize = v2.Compose([partial(cover, img_size=img_size, border=1 / 16), v2.PILToTensor()])
    feed = Feed(split, args, procs, None if torch.is_tensor(split.pictures) else resize)
    return feed(ids[procs.rank::procs.world].split(batch_size))


def crop_and_flip(pictures, rows, args, generator):
    """Random resized crop and flip of pictures (b,C,H,W) uint8, each its own, on their device ->
    float. Drawn for the global batch, of which these are the `rows`.

    As torchvision's RandomResizedCrop (whose v2 draws one crop for a whole batch), but bilinear,
    and a side that would leave the picture is cut to it where torchvision draws again."""
    draws = torch.rand(5, args.batch_size, device=pictures.device, generator=generator)
    area, ratio, y, x, coin = draws[:, rows]                               # (b,) each
    area = args.crop + (1 - args.crop) * area
    ratio = ((2 * ratio - 1) * math.log(4 / 3) / 2).exp() if args.crop < 1 else torch.ones_like(area)
    h, w = (area.sqrt() / ratio).clamp(max=1), (area.sqrt() * ratio).clamp(max=1)
    side = torch.where(coin < 0.5, -1, 1) if args.flip else 1
    y, x, zero = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w), torch.zeros_like(h)
    theta = torch.stack([w * side, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *pictures.shape[2:]), align_corners=False)
    return F.grid_sample(pictures.float(), points, padding_mode="border", align_corners=False)


def normalize(pictures, model):
    """Pictures 0 ... 255 as the model's input."""
    mean, std = (torch.tensor(v, device=pictures.device).view(-1, 1, 1) for v in (model.mean, model.std))
    return (pictures / 255 - mean) / std


# -------------------------------------------------------------------------------------- processes

def start_processes(device=None):
    """rank, world and device of this process. Under torchrun, which sets RANK, it joins the others."""
    rank, world, local = (int(os.environ.get(name, default)) for name, default in
                          (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.mps.is_available() else "cpu"
    try:
        device = torch.device(device or best)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):                 # an unknown word; a torch without CUDA
        raise ValueError(f"--device {device} is not there: {best} is") from None
    if device.type == "cuda":
        device = torch.device("cuda", local) if world > 1 else device
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return SimpleNamespace(rank=rank, world=world, device=device)


def mean_over_processes(sums, count, procs):
    """{name: sum / count}; sums (0-dim tensors) and count are those of all processes together."""
    total = torch.stack([*sums.values(), torch.tensor(count, device=procs.device)]).cpu().double()
    if procs.world > 1:
        dist.all_reduce(total := total.to(procs.device))
    *total, count = total.tolist()
    return {name: value / count for name, value in zip(sums, total)}


# -------------------------------------------------------------------------------------- optimiser

def weight_decay_groups(model, weight_decay):
    """Trainable parameters of two and more dimensions with weight decay, biases and norms without."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in parameters if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in parameters if p.ndim <= 1], weight_decay=0.0)]


def make_optimizer(args, groups, procs):
    """The recipe's optimiser, fused where torch has it."""
    if args.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum)
    kind = torch.optim.AdamW if args.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=args.lr, betas=args.betas, fused=procs.device.type != "mps")


def learning_rate(t, lr, epochs, warmup_epochs=0, schedule="cosine", min_lr=0.0):
    """The rate t epochs in (a fraction): linear from 0 to lr, then half a cosine to min_lr, or lr."""
    if t < warmup_epochs:
        return lr * t / warmup_epochs
    if schedule == "constant":
        return lr
    t = (t - warmup_epochs) / (epochs - warmup_epochs)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * t))


# ------------------------------------------------------------------------------------ checkpoints

def save(path, content):
    """Write a checkpoint under a temporary name, then move it there: `path` is always whole."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path):
    """A checkpoint, this project's or a released one: a dict. ValueError if it cannot be read."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):       # where releases keep flags
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:                             # a broken file can raise anything
        raise ValueError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}")
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    return content


def load(path, classes=METHODS):
    """The model in a checkpoint of this project, in eval mode. For released ones see initialize."""
    content = read(path)
    if content.get("method") not in classes:
        raise ValueError(f"{path} is of method {content.get('method')}, not of {', '.join(classes)}")
    model = classes[content["method"]](**content["config"])
    model.load_state_dict(content["model"])
    return model.eval()


def initialize(model, path):
    """Start `model` from the encoder in a checkpoint, this project's or a released one, and from
    the rest of it if all of that fits. Returns lines that say what was not taken over; ValueError
    lists every key that does not fit."""
    content, own, notes = read(path), model.state_dict(), []
    ours = "method" in content
    state = content["model"] if ours else from_released(content)
    head = {k: v.shape for k, v in state.items()
            if not k.startswith("encoder.") and (ours or k.startswith(DECODER_NAMES))}
    own_head = {k: v.shape for k, v in own.items() if not k.startswith("encoder.")}
    if head != own_head:
        state = {k: v for k, v in state.items() if k not in head}
        own = {k: v for k, v in own.items() if k not in own_head}
        for verb, keys in (("not taken over", head), ("starts fresh", own_head)):
            notes += [f"{verb}: {', '.join(dict.fromkeys(k.split('.')[0] for k in keys))}"] * bool(keys)

    name = "encoder.pos_embed"
    if name in state and state[name].shape[1] != own[name].shape[1]:
        sizes = zip(*(pair(content["config"][k]) for k in ("img_size", "patch_size"))) if ours else ()
        grid = tuple(n // p for n, p in sizes) or (math.isqrt(state[name].shape[1] - 1),) * 2
        if math.prod(grid) == state[name].shape[1] - 1:    # released grids are square
            state[name] = resize_pos_embed(state[name], grid, model.encoder.grid)
            notes.append(f"position embeddings interpolated: {grid} -> {model.encoder.grid} patches")

    errors = [f"{k} is {tuple(state[k].shape)}, here {tuple(own[k].shape)}" for k in own
              if k in state and state[k].shape != own[k].shape]
    for k in own.keys() ^ state.keys():
        if k.startswith("encoder.norm."):                  # only some methods have a final norm
            notes.append(f"{'starts fresh' if k in own else 'not taken over'}: {k}")
        else:
            errors.append(f"{k} is {'missing' if k in own else 'left over'}")
    if errors:
        raise ValueError(f"{path} does not fit: {'; '.join(sorted(errors))}")
    model.load_state_dict({k: v for k, v in state.items() if k in own}, strict=False)
    return sorted(notes)


# --------------------------------------------------------------------------------------- the loop

def amp_dtype(amp, device):
    """autocast's dtype: as asked; or bf16 where a GPU has it, fp16 where not, float32 elsewhere."""
    if amp == "auto" and device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16
    return dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)


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


def fit(args, procs, model, optimizer, feed, prepare, evaluate, **content):
    """Train for --epochs; returns the last line of log.jsonl, a dict.

    `feed` has the training split; prepare(rows, pictures, labels, generator) makes the model's
    arguments of a piece, the `rows` of the global batch; evaluate() -> {name: value} runs after
    each epoch. Then log.jsonl and last.pt are written: `content`, weights, optimiser, flags."""
    folder, device, n = Path(args.runs, args.name), procs.device, len(feed.split.labels)
    if args.batch_size % (procs.world * args.accum):
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {procs.world} "
                         f"processes x --accum {args.accum}")
    if n < args.batch_size:
        raise ValueError(f"--batch_size {args.batch_size} is more than the {n} training pictures")
    dtype, steps = amp_dtype(args.amp, device), n // args.batch_size
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    done, history = 0, []
    if args.resume and (folder / "last.pt").is_file():
        saved = read(folder / "last.pt")
        for name in ("method", "config"):
            if saved.get(name) != content[name]:
                raise ValueError(f"{folder} cannot go on: its {name} is {saved.get(name)}, "
                                 f"not {content[name]}")
        for part, key in ((model, "model"), (optimizer, "optimizer"), (scaler, "scaler")):
            part.load_state_dict(saved[key])
        done = saved["epoch"]
        history = [json.loads(line) for line in open(folder / "log.jsonl")]
        history = [row for row in history if row["epoch"] <= done]
    elif (folder / "last.pt").exists() and not args.overwrite:
        raise ValueError(f"{folder} holds a run: --resume goes on with it, --overwrite replaces it, "
                         f"--name NAME starts another")

    def write(row):
        history.append(row)
        if procs.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
            save(folder / "last.pt", dict(
                content, model=model.state_dict(), optimizer=optimizer.state_dict(),
                scaler=scaler.state_dict(), epoch=row["epoch"], seed=args.seed, flags=vars(args),
                mean=model.mean, std=model.std, classes=feed.split.classes,
                torch=str(torch.__version__)))
            print(", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)

    net = torch.compile(model) if args.compile else model
    if procs.world > 1:
        net = DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
    generator = torch.Generator(device)
    pieces_of = torch.arange(args.batch_size).view(args.accum, procs.world, -1)[:, procs.rank]

    def pieces(epoch):                                     # draws are for the global batch of a step
        for i, (_, pictures, labels) in enumerate(feed(train_ids(n, args, procs, epoch), args.seed, epoch)):
            generator.manual_seed(seed_of(args.seed, epoch, i // args.accum))
            yield prepare(pieces_of[i % args.accum].to(device), pictures, labels, generator)

    if args.epochs == 0:
        write({"epoch": 0, **evaluate()})
    for epoch in range(done, args.epochs):
        torch.manual_seed(seed_of(args.seed, epoch))       # for what a model draws itself: drop path
        model.train()
        totals, batches, began = {}, pieces(epoch), time.time()
        bar = tqdm(range(steps), f"epoch {epoch + 1}/{args.epochs}", leave=False,
                   disable=procs.rank > 0)
        for step in bar:
            lr = learning_rate(epoch + step / steps, args.lr, args.epochs, args.warmup_epochs,
                               args.schedule, args.min_lr)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            metrics = train_step(net, optimizer, scaler, batches, args, dtype)
            totals = {name: totals.get(name, 0) + value for name, value in metrics.items()}
            if step % 20 == 0:                             # the only time the device is waited for
                loss, speed = metrics["loss"].item() / args.accum, (step + 1) / (time.time() - began)
                bar.set_postfix_str(f"loss {loss:.4f}, {speed * args.batch_size:.0f} img/s, lr {lr:.1e}")
        means = mean_over_processes(totals, steps * args.accum, procs)
        speed = steps * args.batch_size / (time.time() - began)
        if not math.isfinite(means["loss"]):
            raise SystemExit(f"epoch {epoch + 1} has loss {means['loss']} at lr {lr:.1e}: go on with "
                             f"--resume and a lower --blr, --clip_grad 1 or --amp fp32")
        for buffer in model.buffers() if procs.world > 1 else ():          # BatchNorm's statistics
            if buffer.is_floating_point():
                dist.all_reduce(buffer.div_(procs.world))
        write({"epoch": epoch + 1, "lr": lr, **means, **evaluate(), "img_s": round(speed, 1)})
    return history[-1]


# ------------------------------------------------------------------------------------- evaluation

def eval_noise(kind, ids, grid):
    """Noise (b,L) of the pictures `ids`: the same for every method, run, machine and batch size."""
    g = torch.Generator()
    return torch.cat([mask_noise(kind, 1, grid, generator=g.manual_seed(seed_of(7, int(i))))
                      for i in ids])


@torch.no_grad()
def evaluate_psnr(model, val, args, procs, picture=None):
    """Mean PSNR (dB, pixels 0 ... 1) of reconstructions over val: of the hidden pixels, of the whole
    image with the visible pixels copied, and of the hidden pixels filled with the visible ones'
    mean colour, to compare. Writes 8 rows (original, masked, reconstruction) to `picture`."""
    model.eval()
    encoder, count = model.encoder, 0
    sums = {name: torch.zeros((), device=procs.device) for name in
            ("psnr_hidden", "psnr_image", "psnr_mean_colour")}
    for ids, pictures, _ in val_feed(val, args, procs, encoder.img_size):
        noise = eval_noise(args.mask, ids, encoder.grid).to(procs.device)
        images = normalize(pictures, model)
        painted, mask = model.reconstruct(images, noise)
        zero, one = (normalize(torch.full_like(pictures[:1], v), model) for v in (0, 255))
        truth, painted = pictures / 255, ((painted - zero) / (one - zero)).clamp(0, 1)
        hidden = mask[..., None].expand(-1, -1, math.prod(encoder.patch_size))
        hidden = unpatchify(hidden, encoder.patch_size, encoder.grid)      # (b, 1, H, W)
        share = hidden.mean((1, 2, 3))                                     # (b,)
        colour = (truth * (1 - hidden)).mean((2, 3)) / (1 - share[:, None])
        fill = (truth - colour[..., None, None]) * hidden                  # (b, C, H, W)
        wrong = (truth - painted).square().mean((1, 2, 3))                 # (b,) hidden ones only
        for name, error in (("psnr_hidden", wrong / share), ("psnr_image", wrong),
                            ("psnr_mean_colour", fill.square().mean((1, 2, 3)) / share)):
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        if picture and procs.rank == 0 and count == 0:
            picture.parent.mkdir(parents=True, exist_ok=True)
            rows = torch.stack([truth, truth * (1 - hidden) + hidden / 2, painted], dim=1)[:8]
            zoom = max(1, 128 // max(encoder.img_size))
            rows = rows.flatten(0, 1).repeat_interleave(zoom, 2).repeat_interleave(zoom, 3)
            torchvision.utils.save_image(rows, picture, nrow=3, pad_value=1)
        count += len(ids)
    return mean_over_processes(sums, float(count), procs)


# ------------------------------------------------------------------------------------------- main

def parse(argv):
    """The parser, the method's class and the flags of a command line."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", default="mae")
    method = first.parse_known_args(argv)[0].method
    parser = Parser("train.py", allow_abbrev=False, description="Pretrain a masked autoencoder.")
    if method not in METHODS:
        parser.error(f"--method {method} is not one of {', '.join(METHODS)}")
    cls = METHODS[method]
    parser.add_argument("--method", choices=METHODS, default="mae")
    add_options(parser, cls.recipe)
    parser.add_argument("--mask", choices=("random", "grid", "block"), default="random")
    parser.add_argument("--init", help="start from the encoder of this checkpoint")
    add_values(parser.add_argument_group(f"of {method}"), knobs(cls), cls.__doc__)
    return parser, cls, parser.parse_args(argv)


def describe(args, procs, train, val, model, lines=()):
    """Say what is about to run: data, model, batch, rate, steps, device, and `lines`."""
    if procs.rank > 0:
        return
    count = {name: sum(p.numel() for p in part.parameters()) / 1e6
             for name, part in (("all", model), ("encoder", model.encoder))}
    steps, encoder = len(train.labels) // args.batch_size, model.encoder
    where = "on the device" if torch.is_tensor(train.pictures) else f"{args.workers} workers"
    print(f"data      {args.data}: {len(train.labels)} train, {len(val.labels)} val, "
          f"{len(train.classes)} classes, {where}",
          f"model     {type(model).__name__}: encoder {count['encoder']:.2f} M parameters, the rest "
          f"{count['all'] - count['encoder']:.2f} M; {encoder.img_size} pixels, {encoder.grid} patches",
          f"batch     {args.batch_size} = {procs.world} processes x {args.accum} pieces x "
          f"{args.batch_size // procs.world // args.accum}",
          f"schedule  lr {args.lr:.3g}, {args.schedule}; {args.epochs} epochs x {steps} steps",
          f"device    {procs.device}, {str(amp_dtype(args.amp, procs.device)).removeprefix('torch.')}",
          *lines, sep="\n", flush=True)


def vit_config(args, img_size):
    """The encoder's constructor arguments."""
    sizes = {k: v if getattr(args, k) is None else getattr(args, k) for k, v in SIZES[args.size].items()}
    patch_size = tuple(16 if n >= 128 else max(n // 8, 1) for n in img_size)
    return dict(img_size=img_size, patch_size=args.patch_size or patch_size, in_chans=3, **sizes)


def run(cls, args):
    recipe = {**cls.recipe, **(cls.small if args.size in ("micro", "tiny") else {})}
    taken = [f"{k} {v}" for k, v in recipe.items() if not hasattr(args, k)]
    settle(args, {**knobs(cls), **recipe})
    procs = start_processes(args.device)
    train, val, img_size = open_data(args.data, args.img_size, procs.device)
    torch.manual_seed(args.seed)
    config = {**vit_config(args, img_size), **{name: getattr(args, name) for name in knobs(cls)}}
    model = cls(**config).to(procs.device)
    if args.lr is None:
        args.lr = args.blr * args.batch_size / 256 * model.lr_scale
    args.name = args.name or args.method
    notes = initialize(model, args.init) if args.init else []
    picture = Path(args.runs, args.name, "recon.png")
    describe(args, procs, train, val, model, [*notes, f"recipe    {', '.join(taken)}"])

    transform = v2.Compose([
        v2.RandomResizedCrop(img_size, scale=(args.crop, 1), interpolation=Image.BICUBIC)
        if args.crop < 1 else partial(cover, img_size=img_size),
        v2.RandomHorizontalFlip(0.5 * args.flip), v2.PILToTensor()])
    feed = Feed(train, args, procs, None if torch.is_tensor(train.pictures) else transform)

    def prepare(rows, pictures, labels, generator):
        noise = mask_noise(args.mask, args.batch_size, model.encoder.grid, procs.device, generator)
        if torch.is_tensor(train.pictures):
            pictures = crop_and_flip(pictures, rows, args, generator)
        return normalize(pictures, model), noise[rows]

    def evaluate():
        return evaluate_psnr(model, val, args, procs, picture)

    optimizer = make_optimizer(args, weight_decay_groups(model, args.weight_decay), procs)
    row = fit(args, procs, model, optimizer, feed, prepare, evaluate, method=args.method, config=config)
    if procs.rank == 0:
        print(f"\nsee   {picture}  (original, masked, reconstruction)")
        if getattr(model, "norm_pix_loss", False):
            print("      each hidden patch has the true one's mean and variance: norm_pix_loss predicts neither")
        print(f"log   {picture.with_name('log.jsonl')}\nmodel {picture.with_name('last.pt')}\n"
              f"next  python finetune.py --checkpoint {picture.with_name('last.pt')} --data {args.data}")
    return row


def main(argv=None):
    """Run a command line; returns the last line of log.jsonl. SystemExit(2) if it makes no sense."""
    parser, cls, args = parse(argv)
    try:
        return run(cls, args)
    except ValueError as error:
        parser.error(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
