"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

How a model is trained: see `pretrain`, `fit`, `train_epoch` and `train_step`. Each step is seeded
by (seed, epoch, step) and draws crops and masks for the whole batch, of which each process takes
its part: N processes pretrain as one does, and a resumed run goes on as if it had not stopped.
"""

import argparse
import json
import math
import os
import signal
import sys
import zlib
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tqdm import tqdm

from crossmae import CrossBlock, CrossMAE
from hypermae import HyperMAE
from imae import IMAE, check_same_class, draw_partners, teacher_of
from mae import MAE
from minr import MINR
from vit import (IMAGENET_MEAN, IMAGENET_STD, SIZES, Block, denormalize, from_released, grid_of,
                 mask_noise, normalize, pair, sizes_of, transfer)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}
LAYOUT = dict(usage=argparse.SUPPRESS, allow_abbrev=False, add_help=False,     # errors of one line
              formatter_class=argparse.RawDescriptionHelpFormatter)


def number(kind, low=-math.inf, high=math.inf):
    """An argparse type: a finite int or float from low to high."""
    def parse(text):
        if not low <= kind(text) <= high or abs(kind(text)) == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return kind(text)
    parse.__name__ = kind.__name__                         # for argparse's own message
    return parse


def numbers(text):
    """An argparse type: `all` -> "all", `3` -> 3, `0,5,11` -> (0, 5, 11)."""
    if text.isidentifier():
        return text
    values = tuple(int(n) if n.isdigit() else float(n) for n in text.split(","))
    return values if len(values) > 1 else values[0]


def add_options(parser):
    """The options of both scripts, without those of the recipes."""
    parser.add_argument("-h", "--help", action="help", help="show this and exit")
    option = parser.add_argument_group("pictures and encoder").add_argument
    option("--data", help="shapes, cifar10, cifar100, a folder (the checkpoint's or shapes)")
    option("--img_size", type=numbers, help="a side or H,W in pixels (224; small ones keep theirs)")
    option("--workers", type=number(int, 0), default=min(8, os.cpu_count()), help="(at most 8)")
    option("--eval_images", type=number(int, 1), metavar="N", help="to validate on (1000; all)")
    option("--size", choices=SIZES, help="(micro)")
    for part in ("dim", "depth", "heads"):
        option(f"--{part}", type=number(int, 1), metavar="N", help="instead of --size's")
    option("--patch_size", type=numbers, help="or H,W (16; an eighth of small pictures)")
    option = parser.add_argument_group("run").add_argument
    option("--runs", default="runs", help="the folder of all runs (runs)")
    option("--name", help="of this run's folder (method_data, checkpoint_mode)")
    option("--eval_every", type=number(int, 1), metavar="N", help="epochs between checkpoints")
    option("--device", choices=("cuda", "mps", "cpu"), help="(the best there is)")
    option("--amp", choices=("auto", "bf16", "fp16", "fp32"), default="auto", help="(auto)")
    option("--accum", type=number(int, 1), default=1, metavar="N", help="split a batch (1)")
    option("--clip_grad", type=number(float, 0), default=0.0, help="largest norm (0: no limit)")
    option("--compile", action="store_true", help="torch.compile the model")
    option("--grad_checkpointing", action="store_true", help="keep less for the backward pass")
    option("--seed", type=int, default=0, help="(0)")
    option = parser.add_mutually_exclusive_group().add_argument
    option("--resume", action="store_true", help="go on from the run's last.pt, if it has one")
    option("--overwrite", action="store_true", help="replace the run of that name")


SHARED = dict(lr=None, blr=None, min_lr=0.0, momentum=0.9)             # where a recipe is silent
ZERO = ("epochs", "warmup_epochs", "randaug", "modulated_layer")         # may be 0
CHOICES = dict(optimizer=("adamw", "adam", "sgd"), schedule=("cosine", "constant"))
LIMITS = dict(crop=1, momentum=1, smoothing=1, drop_path=1, erasing=1, mix_ratio=1, layer_decay=1,
              mix=1, randaug=30)


def add_flags(parser, title, values, annotations={}):
    """A flag for each {name: default}, of the type of its annotation or default, None if absent."""
    option = parser.add_argument_group(title).add_argument
    for name, default in values.items():
        low = 0 if default == 0 or name in ZERO else 1
        high = LIMITS.get(name, math.inf)
        how = {int: dict(type=number(int, low, high)), float: dict(type=number(float, 0, high)),
               bool: dict(action=argparse.BooleanOptionalAction)}
        kind = annotations.get(name, float if default is None else type(default))
        how = how.get(kind, dict(type=numbers, choices=CHOICES.get(name)))
        option(f"--{name}", help=f"({default})", **how)


def knobs(cls):
    """A method's own flags: its constructor's keyword-only arguments, {name: default}."""
    return cls.__init__.__kwdefaults__ or {}


def fill(args, recipe, small, img_size):
    """Set each option that is None from the recipe or, for pictures up to 64 pixels and the micro
    encoder, from `small`. An lr that is still None follows from blr and the batch size."""
    micro = (args.dim or SIZES[args.size or "micro"]["dim"]) <= SIZES["micro"]["dim"]
    recipe = {**SHARED, **recipe, **(small if micro or max(img_size) <= 64 else {})}
    for name, value in recipe.items():
        if getattr(args, name) is None and not (name == "lr" and args.blr is not None):
            setattr(args, name, value)
    if args.lr is None:
        args.lr = args.blr * args.batch_size / 256
    if not isinstance(args.betas, tuple) or len(args.betas) != 2 or max(args.betas) >= 1:
        raise ValueError(f"--betas {args.betas} are not two numbers below 1, as in 0.9,0.95")
    if 0 < args.epochs < args.warmup_epochs:
        raise ValueError(f"--warmup_epochs {args.warmup_epochs} exceeds --epochs {args.epochs}")


SHAPES = {  # m, q, k of the outline at angle a, (|cos ma/4|^k + |sin ma/4|^k) ^ -1/q (Gielis)
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}


def draw_shapes(n, img_size, seed):
    """n pictures (n,3,H,W), uint8, of a shape on a ground of another colour, and labels (n,)."""
    g, (H, W), pictures = torch.Generator().manual_seed(seed), img_size, []
    axes = torch.meshgrid(torch.linspace(-1, 1, H), torch.linspace(-1, 1, W), indexing="ij")
    labels = torch.arange(n) % len(SHAPES)
    for label in labels.split(500):
        u = torch.rand(11, len(label), 1, 1, generator=g)              # (b, 1, 1) each
        y, x = axes[0] + 0.6 * u[0] - 0.3, axes[1] + 0.6 * u[1] - 0.3  # (b, H, W) each
        m, q, k = torch.tensor([*SHAPES.values()])[label].T[..., None, None]       # (b, 1, 1) each
        angle = m * (torch.atan2(y, x) + 7 * u[2]) / 4
        edge = (2 ** (k / 2 - 1) * (angle.cos().abs() ** k + angle.sin().abs() ** k)) ** (-1 / q)
        inside = ((0.56 + 0.3 * u[3]) * edge - torch.hypot(x, y)) * min(H, W) / 2
        inside = (inside + 0.5).clamp(0, 1)[:, None]                   # (b, 1, H, W) soft edge
        ground, light = u[4:7].transpose(0, 1), 7 * u[7]               # (b, 3, 1, 1), (b, 1, 1)
        colour = (ground + 0.35 + 0.3 * u[8:11].transpose(0, 1)) % 1   # far in every channel
        shade = 0.12 * (x * light.cos() + y * light.sin())[:, None]    # (b, 1, H, W)
        picture = inside * (colour - shade) + (1 - inside) * (ground + shade)
        pictures.append((picture.clamp(0, 1) * 255).round().byte())    # (b, 3, H, W)
    return torch.cat(pictures), labels


def read_picture(file):
    """An upright RGB picture (3,H,W), uint8, white where it is transparent; JPEGs are read fast."""
    data = torchvision.io.read_file(file)
    if data[:2].tolist() == [0xFF, 0xD8]:                  # as every JPEG starts
        return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
    picture = ImageOps.exif_transpose(Image.open(file))
    if picture.mode.startswith("I"):                       # convert would cut off what is above 255
        picture = picture.point(lambda value: value / 256).convert("L")
    if "A" in picture.mode or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return v2.functional.pil_to_tensor(picture.convert("RGB"))


class Split(Dataset):
    """Training or validation pictures: uint8 (N,C,H,W), in memory, or N file names; labels (N,), -1
    for none; names of the classes. What has a `transform`, as files do, is loaded by workers."""

    def __init__(self, pictures, labels, classes, transform=None):
        self.pictures, self.labels = pictures, torch.as_tensor(labels)
        self.classes, self.transform = classes, transform
        self.unreadable = torch.zeros(len(pictures), dtype=torch.bool).share_memory_()

    def __getitem__(self, key):
        """Picture i, transformed with draws from (seed, i), and its label. A file that cannot be
        read is named once, and the next that can stands in for it."""
        (seed, i), n = key, len(self.labels)
        picture = self.pictures[i]
        while isinstance(picture, str):
            try:
                picture = read_picture(picture)
            except Exception as error:                     # a broken file can raise anything
                if not self.unreadable[i]:                 # and no worker has said so
                    tqdm.write(f"{picture} is replaced by the next one: {error}", file=sys.stderr)
                self.unreadable[i] = True
                if self.unreadable.all():
                    raise ValueError(f"none of {n} pictures can be read") from None
                i = (i + 1) % n
                picture = self.pictures[i]
        torch.default_generator.manual_seed(hash((seed, i)))           # not every device's
        return (self.transform(picture) if self.transform else picture), self.labels[i]


def list_folder(root):
    """(files, labels, classes) of train and val: class folders in train/ and val/, or any pictures,
    of which the 5% with the lowest hash of their name are held out."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    pictures = {f for f in files if f.lower().endswith(torchvision.datasets.folder.IMG_EXTENSIONS)}
    others = Counter(Path(file).suffix for file in set(files) - pictures)
    if others:
        print("note    files that are not read:", *(f"{n} {end}" for end, n in others.items()))
    if (root / "train").is_dir():
        train, val = (torchvision.datasets.ImageFolder(root / part) for part in ("train", "val"))
        if train.classes != val.classes:
            raise ValueError(f"--data {root}: the classes of train/ and val/ differ")
        return [([file for file, _ in s.samples], s.targets, s.classes) for s in (train, val)]
    codes = {f: zlib.crc32(os.path.relpath(f, root).encode()) for f in sorted(pictures)}
    if len(codes) < 2:
        raise ValueError(f"--data {root} is not shapes, cifar10, cifar100 or a folder of two or "
                         f"more pictures")
    limit = max(0.05 * 2 ** 32, min(codes.values()))       # whatever other files there are
    limit = min(limit, max(codes.values()) - 1)            # one at least is left to train on
    train = [file for file, code in codes.items() if code > limit]
    val = [file for file, code in codes.items() if code <= limit]
    return [(part, [-1] * len(part), []) for part in (train, val)]


def open_data(name, img_size, args):
    """The train and val Split of --data, and their (H, W). A folder's pictures are kept on the
    device if none of 50 is larger and they take less than 4 GiB; else they are read each time."""
    if name == "shapes":
        img_size = pair(img_size or 32)
        splits = [Split(*draw_shapes(n, img_size, seed=n), [*SHAPES]) for n in (10_000, 1_000)]
    elif name in ("cifar10", "cifar100"):
        img_size, kind = pair(img_size or 32), getattr(torchvision.datasets, name.upper())
        print(f"note    {name} is read from data/, or downloaded to it once a machine", flush=True)
        if args.local_rank > 0:
            dist.barrier()
        sets = [kind("data", train=train, download=True) for train in (True, False)]
        if args.local_rank == 0 and args.world > 1:
            dist.barrier()
        splits = [Split(torch.tensor(s.data).movedim(3, 1), s.targets, s.classes) for s in sets]
    else:
        splits = [Split(*part) for part in list_folder(Path(name))]
        n = len(splits[0].labels)
        sizes = [splits[0][0, i][0].shape for i in range(0, n, math.ceil(n / 50))]
        _, high, wide = map(max, zip(*sizes))
        H, W = img_size = pair(img_size or ((high, wide) if max(high, wide) < 224 else 224))
        in_memory = high <= H and wide <= W and 3 * n * H * W < 2 ** 32

        def middle(picture):                               # or 7/8 of it, in the shape of img_size
            (h, w), share = picture.shape[1:], 1 if in_memory else 7 / 8
            scale = share * min(h / H, w / W)
            crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
            return v2.functional.resize(crop(picture), img_size, v2.InterpolationMode.BICUBIC)
        for split in splits:
            split.transform = middle
            if in_memory:
                loaded = load_pictures(split, torch.arange(len(split.labels)).split(1000), args)
                pictures, labels = zip(*tqdm(loaded, "reading", leave=False, disable=None))
                split.pictures, split.labels = torch.cat(pictures), torch.cat(labels).cpu()
                split.transform = None
    for split in splits:
        if split.transform is None:
            split.pictures = split.pictures.to(args.device).contiguous()
    return *splits, img_size


def load_pictures(split, batches, args, seed=0):
    """Pictures (b,C,H,W), uint8, and labels (b,), on the device, for each of `batches`, indices
    (b,): from memory, or transformed by workers, each of which loads pieces of a batch."""
    if split.transform is None:
        for ids in batches:
            yield split.pictures[ids.to(args.device)], split.labels[ids].to(args.device)
        return
    keys = [[(seed, i) for i in piece.tolist()] for ids in batches for piece in ids.split(64)]
    pieces = iter(DataLoader(split, batch_sampler=keys, num_workers=args.workers,
                             multiprocessing_context="fork" if args.workers else None,
                             pin_memory=args.device.type == "cuda"))
    for ids in batches:
        parts = [next(pieces) for _ in ids.split(64)]
        yield [torch.cat([x.to(args.device, non_blocking=True) for x in part])
               for part in zip(*parts)]


def crop_transform(img_size, args, *more):
    """Random resized crop and flip of a picture (C,h,w), by torchvision, and then `more`."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if args.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (args.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * args.flip), *more])


def crop_batch(pictures, img_size, args):
    """The same for this process's pictures (b,C,H,W) in memory, each cropped differently, where
    torchvision crops all alike: float, bilinear; a crop's side is at most the picture's."""
    draws = own(torch.rand(args.batch_size, 5, device=pictures.device), args)
    area, ratio, y, x, coin = draws.unbind(1)                          # (b,) each
    area = args.crop + (1 - args.crop) * area
    ratio = ((2 * ratio - 1) * math.log(4 / 3) * (args.crop < 1) / 2).exp()
    h, w = (area.sqrt() / ratio).clamp(max=1), (area.sqrt() * ratio).clamp(max=1)
    y, x, zero = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w), torch.zeros_like(h)
    w_flipped = torch.where(coin < 0.5 * args.flip, -w, w)
    theta = torch.stack([w_flipped, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *img_size), align_corners=False)
    return F.grid_sample(pictures.float(), points, padding_mode="reflection", align_corners=False)


def val_batches(split, args, img_size, most=None):
    """Batches (indices, pictures, labels) of this process's share of `most`, always the same."""
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(0))
    share = order[:most].tensor_split(args.world)[args.rank]
    batches = share.split(250) if len(share) else ()
    for ids, (pictures, labels) in zip(batches, load_pictures(split, batches, args)):
        yield ids, v2.functional.resize(pictures, img_size), labels


def start_processes(args):
    """Set args.rank, world, local_rank, device and dtype; under torchrun, join the others."""
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    best = ("cuda" if torch.cuda.is_available() else
            "mps" if torch.backends.mps.is_available() else "cpu")
    name, amp = args.device or best, args.amp
    if name not in (best, "cpu"):
        raise ValueError(f"--device {name} is not there: {best} is")
    cuda = name == "cuda"
    args.device = torch.device(f"cuda:{args.local_rank}" if cuda else name)
    if cuda:
        torch.cuda.set_device(args.device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
        if amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    args.dtype = dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)
    if args.rank > 0:
        sys.stdout = open(os.devnull, "w")                 # one process speaks
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # Keeps restarted processes from the keys of killed ones. Each machine counts its restarts.
        if args.world == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=args.rank,
                                world_size=args.world, device_id=args.device if cuda else None)


def own(batch, args):
    """This process's part of a tensor of the whole batch."""
    return batch.chunk(args.world)[args.rank]


def mean_over_processes(sums, count, args):
    """{name: sum / count}, where sums (0-dim tensors) and count are summed over the processes."""
    total = torch.tensor([*map(float, sums.values()), count], dtype=torch.float64)
    if args.world > 1:
        total = total.to(args.device)
        dist.all_reduce(total)
    *total, count = total.tolist()
    return {name: value / count for name, value in zip(sums, total)}


def save(path, content):
    """Write a checkpoint. It is always whole: the old one or, moved into its place, the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:               # torch's writer has the latter
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written, and is as it was before: {error}") from None


def read(path, heads=None):
    """A checkpoint, without running code in it: a dict of method (None: a released file), config
    (the constructor's arguments), model (the state dict), mean, std, flags and more."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # the releases' flags
            content = torch.load(path, map_location="cpu", weights_only=True)
        state = content.get("model", content)
        assert state and all(torch.is_tensor(value) for value in state.values())
    except Exception as error:                             # a broken file can raise anything
        why = "it would run code" if "GLOBAL" in str(error) else "it is damaged or of another kind"
        raise ValueError(f"{path} is not a checkpoint that can be read: {why}") from None
    if "method" not in content:
        state = from_released(state)
        content = dict(method=None, config=sizes_of(state, path, heads), model=state, flags={},
                       mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return content


def load(path, methods=METHODS):
    """The model in a checkpoint of train.py, or of another {method: class}, in eval mode."""
    content = read(path)
    if content["method"] not in methods:
        raise ValueError(f"{path} is of method {content['method']}, not {', '.join(methods)}")
    model = methods[content["method"]](**content["config"])
    model.load_state_dict(content["model"])
    return model.eval()


def initialize(model, path):
    """Start `model` from the encoder in any checkpoint: notes and ValueError of vit.transfer."""
    content = read(path, model.encoder.blocks[0].attn.heads)
    state, grid = content["model"], grid_of(**content["config"]) if content["method"] else None
    try:
        return transfer(model, model.from_mae(state) if hasattr(model, "from_mae") else state, grid)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from None


def name_run(args, name):
    """Set args.name, if it is None. ValueError if it holds a run that is not to be touched."""
    args.name = args.name or name.replace(" ", "_")
    if Path(args.runs, args.name, "last.pt").exists() and not (args.resume or args.overwrite):
        raise ValueError(f"{Path(args.runs, args.name)} holds a run: --resume goes on with it, "
                         f"--overwrite replaces it, --name NAME starts another")


def make_optimizer(args, groups):
    """The recipe's optimiser, fused but on MPS."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD)[args.optimizer]
    more = dict(momentum=args.momentum) if args.optimizer == "sgd" else dict(betas=args.betas)
    return kind(groups, lr=args.lr, fused=args.device.type != "mps", **more)


def learning_rate(t, args):
    """The rate at epoch t, say 3.7: a linear warm-up, then constant or half a cosine to min_lr."""
    if t < args.warmup_epochs:
        return args.lr * t / args.warmup_epochs
    if args.schedule == "constant":
        return args.lr
    t = (t - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def wrap(model, args):
    """The model as the loop calls it: with --grad_checkpointing, on all processes, compiled."""
    if args.grad_checkpointing:
        for module in model.modules():
            if isinstance(module, (Block, CrossBlock)):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if args.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        torch._dynamo.config.optimize_ddp = not args.grad_checkpointing    # not both in torch 2.6
        model = torch.compile(model, dynamic=False)
    return model


def train_step(net, optimizer, scaler, inputs, args):
    """A step on `inputs`, the arguments of net, in --accum pieces. Nothing waits for the device."""
    metrics, seed = Counter(), torch.initial_seed() + 1
    for i in range(args.accum):
        piece = [x.chunk(args.accum)[i] if x.ndim else x for x in inputs]
        torch.manual_seed(seed)                            # its own draws: the same in each piece
        exchange = args.world == 1 or i + 1 == args.accum  # of gradients, after the last piece
        with nullcontext() if exchange else net.no_sync():
            with torch.autocast(args.device.type, args.dtype, args.dtype is not torch.float32):
                output = net(*piece)
            if not isinstance(output, tuple) or not isinstance(output[-1], dict):
                raise ValueError(f"forward must return (loss, {{name: value}}), not {type(output)}")
            loss, values = output
            scaler.scale(loss / args.accum).backward()
        for name, value in {"loss": loss.detach(), **values}.items():
            metrics[name] += value / args.accum
    if args.clip_grad:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return metrics


def train_epoch(epoch, net, optimizer, scaler, train, prepare, args):
    """Train for an epoch: its line of the log. SystemExit once loss or weights are not finite."""
    began, waited, totals, seed = perf_counter(), 0, Counter(), hash((args.seed, epoch))
    torch.manual_seed(seed)
    steps = len(train.labels) // args.batch_size
    rows = torch.randperm(len(train.labels))[:steps * args.batch_size, None]         # (n, 1)
    if hasattr(args, "same_class"):                        # (n, 2): images and their partners
        mates = draw_partners(rows[:, 0], train.labels, args.same_class, torch.default_generator)
        rows = torch.stack([rows[:, 0], mates], dim=1)
    batches = [own(batch, args).T.flatten() for batch in rows.split(args.batch_size)]
    stream = load_pictures(train, batches, args, seed)
    rates = [learning_rate(epoch + i / steps, args) for i in range(steps)]
    bar = tqdm(rates, f"epoch {epoch + 1}/{args.epochs}", unit="img", unit_scale=args.batch_size,
               leave=False, disable=args.rank > 0 or None)
    for step, rate in enumerate(bar, start=1):
        asked = perf_counter()
        pictures, labels = next(stream)
        waited += perf_counter() - asked
        torch.manual_seed(hash((args.seed, epoch, step)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        metrics = train_step(net, optimizer, scaler, prepare(pictures, labels), args)
        totals.update(metrics)
        if step % 20 == 0 or step == steps:                # only here the host waits for the device
            check = [totals["loss"], *(net.parameters() if step == steps else ())]
            if not all(x.isfinite().all() for x in check):
                raise SystemExit(f"loss or weights are not finite at epoch {epoch + 1}, step "
                                 f"{step}, lr {rate:.1e}: --resume with a lower --lr, --clip_grad")
            bar.set_postfix_str(f"loss {metrics['loss']:.4f}, lr {rate:.1e}")
    means, seconds = mean_over_processes(totals, steps, args), perf_counter() - began
    return {"epoch": epoch + 1, "lr": max(rates), **means, "wait": round(waited / seconds, 3),
            "img_s": round(steps * args.batch_size / seconds, 1), "train_s": round(seconds, 2)}


def fit(args, model, groups, train, val, prepare, evaluate, **content):
    """Train for --epochs; the last line of log.jsonl. prepare(pictures, labels) makes the model's
    arguments, evaluate() {name: value} and recon.png's columns or None; last.pt gets `content`."""
    n, steps = len(train.labels), len(train.labels) // args.batch_size
    if not steps:
        raise ValueError(f"--batch_size {args.batch_size} is more than the {n} training pictures")
    if args.batch_size % (args.world * args.accum):
        raise ValueError(f"--batch_size {args.batch_size} is not divisible by {args.world} "
                         f"processes x --accum {args.accum}")
    optimizer, history = make_optimizer(args, groups), []
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype is torch.float16)
    last = Path(args.runs, args.name, "last.pt")
    last.parent.mkdir(parents=True, exist_ok=True)
    if args.resume and last.exists():
        saved = read(last)
        was = {**saved["flags"], **saved["config"], "method": saved["method"]}
        now = {"method": content["method"], **content["config"], "optimizer": args.optimizer}
        for name, value in now.items():
            if was.get(name) != value:
                raise ValueError(f"{last} cannot be resumed: {name} {was.get(name)}, not {value}")
        settings = optimizer.state_dict()["param_groups"]  # this run's, not the saved ones
        optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
        scaler.load_state_dict(saved["scaler"] or scaler.state_dict())
        model.load_state_dict(saved["model"])
        history = saved["history"]
        print(f"resumed after epoch {saved['epoch']}")
    elif args.rank == 0:
        last.unlink(missing_ok=True)                       # or --resume would go on with it
    if args.rank == 0:                                     # cut back to what last.pt holds
        last.with_name("log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in history))
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"data    {args.data}: {n} train, {len(val.labels)} val; {model.encoder.img_size} px in "
          f"{'%dx%d' % model.encoder.grid} patches, {'files' if train.transform else 'in memory'}\n"
          f"model   {type(model).__name__}: {size:.2f} M parameters, {args.world} x {args.device}, "
          f"{args.dtype}\ntrain   {args.epochs} epochs of {steps} steps of {args.batch_size}, "
          f"{args.optimizer}, lr {args.lr:.3g}")
    if 0 < args.epochs * steps < 500:
        print(f"note    {args.epochs * steps} steps are few: try a smaller --batch_size, "
              f"more --epochs or, in train.py, --init")
    net, done = wrap(model, args), history[-1]["epoch"] if history else 0
    for epoch in range(done, args.epochs if history else max(1, args.epochs)):
        row = {"epoch": 0}                                 # of 0 epochs: the untrained model
        if args.epochs > 0:
            row = train_epoch(epoch, net.train(), optimizer, scaler, train, prepare, args)
        if row["epoch"] % args.eval_every and row["epoch"] < args.epochs:
            continue
        began = perf_counter()
        scores, columns = evaluate()
        row.update(scores, eval_s=round(perf_counter() - began, 2))
        history.append(row)
        if args.rank > 0:
            continue
        began = perf_counter()
        save(last, dict(
            content, model=model.state_dict(), optimizer=optimizer.state_dict(), flags=vars(args),
            scaler=scaler.state_dict(), epoch=row["epoch"], history=history, classes=train.classes,
            mean=model.mean, std=model.std, torch=str(torch.__version__)))
        row["save_s"] = round(perf_counter() - began, 2)
        last.with_name("log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in history))
        if columns:
            save_picture(columns, last.with_name("recon.png"))
        if args.epochs > 0:
            name, score = next(iter(scores.items()))
            print(f"epoch {row['epoch']}: loss {row['loss']:.4f}, {name} {score:.2f}, "
                  f"{row['img_s']:.0f} img/s, wait {row['wait']:.1%}", flush=True)
    print(f"see     {last.with_name('log.jsonl')} and {last}")
    return history[-1]


@torch.no_grad()
def evaluate_psnr(model, val, args, mask, mask_ratio=None):
    """Mean PSNR in dB of hidden pixels, of the image with visible pixels copied, and as decoded,
    under masks that depend on the picture alone. Columns of 8: truth, masked, decoded, copied."""
    count, columns, encoder = 0, None, model.eval().encoder
    sums = dict.fromkeys(("psnr_hidden", "psnr_image", "psnr_decoded"), 0)   # of none, too
    for ids, pictures, _ in val_batches(val, args, encoder.img_size, args.eval_images):
        seeds = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in seeds])
        decoded, hidden = model.reconstruct(normalize(pictures, model), noise.to(args.device),
                                            mask_ratio, args.leak_free)
        truth, decoded = pictures / 255, denormalize(decoded, model)   # (b, 3, H, W)
        hidden = encoder.pixels_of(hidden)                             # (b, 1, H, W)
        both, masked = (torch.where(hidden > 0, x, truth) for x in (decoded, 0.5))
        image, whole = ((x - truth).square().mean((1, 2, 3)) for x in (both, decoded))  # (b,)
        errors = {"hidden": image / hidden.mean((1, 2, 3)), "image": image, "decoded": whole}
        for name, error in errors.items():
            sums[f"psnr_{name}"] += -10 * error.clamp(min=1e-10).log10().sum()
        count += len(ids)
        columns = columns or [x[:8] for x in (truth, masked, decoded, both)]
    return mean_over_processes(sums, count, args), columns


def save_picture(columns, path):
    """Write columns [(rows,C,H,W)], 0 ... 1, as a picture; small ones enlarged to 128 pixels."""
    H, W = columns[0].shape[2:]
    size = [n * max(1, 128 // max(H, W)) for n in (H, W)]
    cells = torch.stack([F.interpolate(x, size) for x in columns], dim=1).flatten(0, 1)
    torchvision.utils.save_image(cells, path, nrow=len(columns), pad_value=1)


def as_table(rows):
    """Rows, dicts of the same keys, as a text of aligned columns."""
    rows = [rows[0].keys(), *(row.values() for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


@torch.no_grad()
def compare(args):
    """--eval: rows of PSNR of checkpoints, and each method's own measures and figures."""
    rows, columns, notes = [], [], []
    for path in args.eval:
        content = read(path)
        if content["method"] == "classifier":
            print(f"note    {path} is passed over: it is of finetune.py")
            continue
        model, args.data = load(path).to(args.device), args.data or content["flags"]["data"]
        train, val, size = open_data(args.data, model.encoder.img_size, args)
        for mask in args.masks or [args.mask]:
            for ratio in args.mask_ratios:
                scores, _ = evaluate_psnr(model, val, args, mask, ratio)
                rows.append({"checkpoint": path, "mask": mask, "mask_ratio": ratio, **scores})
        original, masked, _, both = evaluate_psnr(model, val, args, mask)[1]
        columns += [both] if columns else [original, masked, both]
        batches = [val_batches(s, args, size, args.eval_images) for s in (train, val)]
        images = [normalize(torch.cat([x for _, x, _ in batch]), model) for batch in batches]
        for title, table in model.measures(*images).items() if hasattr(model, "measures") else ():
            notes += [f"{path}: {title}", as_table(table)]
        figures = model.figures(images[1][:8]) if hasattr(model, "figures") else {}
        for name, cells in figures.items():
            notes.append(f"see     {Path(path).with_name(name)}.png")
            save_picture(denormalize(cells, model).unbind(1), Path(path).with_name(f"{name}.png"))
    if not rows:
        raise ValueError(f"--eval {' '.join(args.eval)}: none is a checkpoint of train.py")
    picture = Path(rows[0]["checkpoint"]).with_name("eval.png")
    save_picture(columns, picture)
    print(f"PSNR in dB, mean over {min(args.eval_images, len(val.labels))} pictures of {args.data}",
          as_table(rows), *notes, f"see     {picture}: original, masked, each checkpoint", sep="\n")
    return rows


def vit_config(args, img_size):
    """The encoder's constructor arguments: --size, with --dim, --depth, --heads for its own."""
    patch = tuple(16 if n >= 128 else min(                 # the divisor nearest to an eighth
        range(1, n + 1), key=lambda d: (n % d > 0, abs(d - n / 8))) for n in img_size)
    size = {k: getattr(args, k) or v for k, v in SIZES[args.size or "micro"].items()}
    return dict(img_size=img_size, patch_size=pair(args.patch_size or patch), in_chans=3, **size)


def pretrain(args):
    """A parsed command line of train.py, from data to the last epoch."""
    cls, given_lr, args.data = METHODS[args.method], args.lr, args.data or "shapes"
    name_run(args, f"{args.method}_{Path(args.data).resolve().name}")
    train, val, img_size = open_data(args.data, args.img_size, args)
    fill(args, {**knobs(cls), **cls.recipe}, cls.small, img_size)
    config = {**vit_config(args, img_size), **{name: getattr(args, name) for name in knobs(cls)}}
    pairs, streamed, teacher = hasattr(cls, "pairs"), train.transform is not None, None
    if pairs:                                              # it learns from pairs of images
        check_same_class(train.labels, train.classes, args.same_class)
        print(f"teacher {args.teacher or 'none, so no distillation: --teacher FILE takes an MAE'}")
        if args.teacher:
            config["teacher"], teacher = teacher_of(read(args.teacher), config)
    torch.manual_seed(args.seed)
    model = cls(**config).to(args.device)
    if teacher:
        model.teacher.load_state_dict(teacher)
    if args.init:
        print(*initialize(model, args.init), sep="\n")
    if given_lr is None:
        args.lr *= model.lr_scale                          # CrossMAE A.6
    if streamed:
        train.transform = crop_transform(img_size, args)

    def prepare(pictures, labels):
        """The model's arguments: images, noise and, of pairs, partners and mixing weight."""
        parts = pictures.chunk(2 if pairs else 1)
        crops = parts if streamed else [crop_batch(x, img_size, args) for x in parts]
        images, *partners = (normalize(x, model) for x in crops)
        noise = own(mask_noise(args.mask, args.batch_size, model.encoder.grid, args.device), args)
        return (images, noise, *partners, model.draw_mix(args.device)) if pairs else (images, noise)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim > 1], weight_decay=args.weight_decay),
              dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]
    row = fit(args, model, groups, train, val, prepare, partial(evaluate_psnr, model, val, args, args.mask),
              method=args.method, config=config)
    folder, script = Path(args.runs, args.name), "finetune.py --checkpoint"
    print(f"see     {folder / 'recon.png'}: original, masked, decoded, visible pixels copied\n"
          f"next    python {script if train.classes else 'train.py --eval'} {folder / 'last.pt'}")
    return row


def run(parser, work, argv):
    """work(args) of the words `argv` (None: the command line). A wrong input ends in one line."""
    def stop(*_, parent=os.getpid()):                      # at once: as a DataLoader ends, it would
        if os.getpid() == parent:                          # lose an exception; workers are silent
            os.write(2, b"\nstopped: with --resume it goes on from last.pt, if there is one\n")
        os._exit(130)
    args = parser.parse_args(argv)
    if argv is None:
        signal.signal(signal.SIGINT, stop)                 # Ctrl-C
    try:
        patch = 1 if args.patch_size is None else args.patch_size
        grid_of(patch if args.img_size is None else args.img_size, patch)      # before any data
        start_processes(args)
        row = work(args)
        sys.stdout.flush()
    except BrokenPipeError:                                # as by `| head`
        os._exit(1)
    except torch.OutOfMemoryError:
        parser.exit(1, "out of memory: try --accum, --grad_checkpointing, a lower --batch_size\n")
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return row


def main(argv=None):
    """`python train.py` with the words `argv`; returns the last line of log.jsonl, a dict."""
    parser = argparse.ArgumentParser("train.py", **LAYOUT)
    parser.add_argument("--method", choices=METHODS, default="mae")
    cls = METHODS[parser.parse_known_args(argv)[0].method]             # whose flags follow
    parser.description = f"{cls.__name__}: {cls.__doc__}\n  up to 64 pixels or micro: {cls.small}"
    add_options(parser)
    add_flags(parser, "recipe (blr: lr for a batch of 256)", {**SHARED, **cls.recipe})
    add_flags(parser, f"arguments of {cls.__name__}", knobs(cls), cls.__init__.__annotations__)
    parser.set_defaults(eval_images=1000, eval_every=1)
    option = parser.add_argument_group("pretraining and evaluation").add_argument
    option("--init", metavar="FILE", help="start from the encoder of a checkpoint")
    option("--mask", choices=("random", "grid", "block"), default="random", help="pattern (random)")
    if hasattr(cls, "pairs"):
        option("--teacher", metavar="FILE", help="checkpoint of an MAE to distill")
        option("--same_class", type=number(float, 0, 1), help="share of pairs of one class")
    option("--eval", nargs="+", metavar="FILE", help="measure checkpoints instead of training")
    option("--mask_ratios", nargs="+", type=number(float), default=[0.5, 0.75, 0.9], metavar="R")
    option("--masks", nargs="+", choices=("random", "grid", "block"),
           help="patterns that --eval measures (that of --mask)")
    option("--leak_free", action="store_true", help="norm_pix_loss without the true statistics")
    return run(parser, lambda args: compare(args) if args.eval else pretrain(args), argv)


if __name__ == "__main__":
    main()
