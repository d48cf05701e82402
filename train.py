"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

From the command line to a step of the optimizer:

    main         parses the command line and calls pretrain or, with --eval, compare
    pretrain     opens the data, builds the model, and hands both to fit
    fit          starts or resumes a run, calls train_epoch for each epoch, and writes its files
    train_epoch  shuffles and loads the images, and hands the inputs of each step to train_step
    train_step   forward, backward and the optimizer's step

Crops and masks are drawn from (seed, epoch, step) for the whole batch, of which each process takes
its part, and the crops of files from (seed, epoch, image): N processes pretrain as one does, and a
resumed run goes on as if it had not stopped. finetune.py uses the same data, processes and loop.

A method is a class as those in METHODS: the README lists what it has ("A method of your own").
"""

import argparse
import difflib
import inspect
import json
import math
import os
import re
import signal
import sys
import zlib
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from glob import glob
from itertools import islice
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
from vit import (IMAGENET_MEAN, IMAGENET_STD, SIZES, Block, InputError, denormalize, from_released,
                 grid_of, mask_noise, normalize, pair, sizes_of, transfer)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}


# ------------------------------------------------------------------------------ the command line
LAYOUT = dict(usage=argparse.SUPPRESS, allow_abbrev=False, add_help=False,  # no usage in errors
              formatter_class=argparse.RawDescriptionHelpFormatter)

SHARED = dict(lr=None, blr=None, min_lr=0.0, momentum=0.9)             # what a recipe does not set
KINDS = dict(warmup_epochs=float)                                      # 0.5: half an epoch
CHOICES = dict(optimizer=("adamw", "adam", "sgd"), schedule=("cosine", "constant"))
LIMITS = {  # the lowest and highest value of a flag; models check their other arguments
    **dict.fromkeys(("batch_size", "decoder_dim", "decoder_heads", "decoder_depth"), (1, math.inf)),
    **dict.fromkeys(("epochs", "warmup_epochs", "lr", "blr", "min_lr", "weight_decay", "mixup",
                     "cutmix"), (0, math.inf)),
    **dict.fromkeys(("crop", "momentum", "mix_ratio", "erasing", "smoothing", "drop_path",
                     "layer_decay", "mask_ratio", "prediction_ratio", "mix"), (0, 1)),
    "randaug": (0, 30)}
HELP = dict(  # of the flags of a recipe
    optimizer="adamw, adam or sgd", lr="learning rate; unless given, blr * batch_size / 256",
    blr="learning rate for a batch of 256", min_lr="learning rate at the end of the cosine",
    momentum="of SGD", betas="of Adam and AdamW, as in 0.9,0.95",
    weight_decay="of weights; biases and norms have none",
    schedule="of the learning rate after the warm-up: cosine or constant",
    batch_size="images in a step, over all processes and pieces", epochs="passes over the images",
    warmup_epochs="epochs in which the learning rate rises from 0",
    crop="smallest area of the random resized crop, as a share of the image; 1: no crop",
    flip="mirror half of the images", randaug="magnitude of RandAugment, 0 to 30; 0: none",
    erasing="probability that a rectangle of an image is erased",
    mixup="alpha of MixUp; 0: none", cutmix="alpha of CutMix; 0: none",
    mix_ratio="weight of an image when each is mixed with another one; 0: no such mixing",
    smoothing="label smoothing", drop_path="stochastic depth of the last block",
    layer_decay="factor of the learning rate from each layer to the one before")


def bounded_number(kind, low=-math.inf, high=math.inf):
    """An argparse type: a finite int or float from low to high."""
    def parse(text):
        if not low <= kind(text) <= high or abs(kind(text)) == math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} to {high}")
        return kind(text)
    parse.__name__ = kind.__name__                         # for argparse's own message
    return parse


def parse_list(text):
    """An argparse type: `all` -> "all", `3` -> 3, `0,5,11` -> (0, 5, 11)."""
    if text.isidentifier():
        return text
    try:
        values = tuple(int(n) if n.isdigit() else float(n) for n in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a word, a number or a list as in 0,5,11")
    return values if len(values) > 1 else values[0]


def add_options(parser):
    """The options of both scripts, without those of the recipes."""
    parser.add_argument("-h", "--help", action="help", help="show this and exit")
    option = parser.add_argument_group("data and encoder").add_argument
    option("--data", help="shapes, cifar10, cifar100, a folder (the checkpoint's, else shapes)")
    option("--img_size", type=parse_list, metavar="N", help="a side or H,W in pixels (train.py: "
           "that of the images, at most 224; finetune.py: the checkpoint's)")
    option("--workers", type=bounded_number(int, 0), default=min(8, os.cpu_count()), metavar="N",
           help="processes that load images (a CPU core each, at most 8)")
    option("--eval_images", type=bounded_number(int, 1), metavar="N",
           help="validate on at most N images (train.py: 1000; finetune.py: all)")
    option("--size", choices=SIZES, help="of the encoder (the checkpoint's, else micro)")
    for name, text in dict(dim="width", depth="blocks", heads="attention heads").items():
        option(f"--{name}", type=bounded_number(int, 1), metavar="N",
               help=f"{text} of the encoder (that of --size)")
    option("--patch_size", type=parse_list, metavar="N", help="a side or H,W in pixels (16; below "
           "128 pixels an eighth of the image, at least 4)")
    option = parser.add_argument_group("run").add_argument
    option("--runs", default="runs", metavar="FOLDER", help="the folder of all runs (runs)")
    option("--name", help="of this run's folder (train.py: method_data; finetune.py: "
                          "checkpoint_mode and --labels or --data, where given)")
    option("--eval_every", type=bounded_number(int, 1), metavar="N", help="validate and write "
           "last.pt every N epochs (train.py: 1; finetune.py: more with few labels)")
    option("--device", choices=("cuda", "mps", "cpu"), help="(cuda, else mps, else cpu)")
    option("--amp", choices=("auto", "bf16", "fp16", "fp32"), default="auto",
           help="mixed precision (auto: on CUDA bf16, or fp16 if it lacks that; elsewhere fp32)")
    option("--accum", type=bounded_number(int, 1), default=1, metavar="N",
           help="gradient accumulation steps: compute a batch in N pieces (1)")
    option("--clip_grad", type=bounded_number(float, 0), default=0.0, metavar="X",
           help="clip the norm of the gradients (0: do not)")
    option("--compile", action="store_true", help="torch.compile the model")
    option("--grad_checkpointing", action="store_true", help="recompute activations to save memory")
    option("--seed", type=bounded_number(int, 0, 2 ** 63 - 1), default=0, metavar="N",
           help="of all random numbers (0)")
    option = parser.add_mutually_exclusive_group().add_argument
    option("--resume", action="store_true", help="continue from the run's last.pt")
    option("--overwrite", action="store_true", help="replace the run of that name")


def add_flags(parser, title, defaults, small, texts, annotations={}):
    """A flag for each {name: default}, of the type of its annotation or default. A flag that is not
    given is None; its help says which value is used then."""
    option = parser.add_argument_group(title).add_argument
    for name, default in defaults.items():
        kind = annotations.get(name, float if default is None else type(default))
        if kind is bool:
            kwargs = dict(action=argparse.BooleanOptionalAction)
        elif kind in (int, float):
            kwargs = dict(type=bounded_number(kind, *LIMITS.get(name, ())), metavar="X")
        else:
            kwargs = dict(type=parse_list, choices=CHOICES.get(name), metavar="X")
        values = [] if default is None else [str(default).strip("()").replace(" ", "")]
        if small.get(name, default) != default:
            values.append(f"small images: {small[name]}")
        value = f" ({'; '.join(values)})" if values else ""
        option(f"--{name}", help=(texts.get(name, "") + value).replace("%", "%%"), **kwargs)


def method_arguments(cls):
    """A method's own flags: its constructor's keyword-only arguments, {name: default}."""
    return cls.__init__.__kwdefaults__ or {}


def apply_recipe(args, recipe, small, config, n):
    """Set each option that was not given: from the recipe or, for images up to 64 pixels and for
    the micro encoder, from `small`. `config` has the encoder's sizes, n is how many images there
    are to train on."""
    if config["dim"] <= SIZES["micro"]["dim"] or max(config["img_size"]) <= 64:
        recipe = {**recipe, **small}
    recipe = {**SHARED, **recipe}
    for name in recipe:
        if not hasattr(args, name):
            raise TypeError(f"the method's small has {name}, which is not a keyword-only argument "
                            f"of its constructor: list a parent's arguments again")
    given = [name for name in recipe if getattr(args, name) is not None]
    for name, value in recipe.items():
        if name not in given:
            setattr(args, name, value)
    if "batch_size" not in given and args.batch_size > n:
        args.batch_size = 2 ** int(math.log2(n))
        print(f"note    {n} training images: --batch_size {args.batch_size}, "
              f"not {recipe['batch_size']}")
    if "lr" not in given and ("blr" in given or args.lr is None):
        args.lr = args.blr * args.batch_size / 256         # for CrossMAE see lr_scale in pretrain
    pair_given = isinstance(args.betas, tuple) and len(args.betas) == 2
    if not pair_given or not all(0 <= beta < 1 for beta in args.betas):
        raise InputError(f"--betas {args.betas} are not two numbers from 0 to below 1, as in "
                         f"0.9,0.95")
    if args.warmup_epochs > args.epochs > 0:
        if "warmup_epochs" in given:
            raise InputError(f"--warmup_epochs {args.warmup_epochs} exceeds --epochs {args.epochs}")
        args.warmup_epochs *= args.epochs / recipe["epochs"]           # in proportion
        print(f"note    {args.epochs} of the recipe's {recipe['epochs']} epochs: --warmup_epochs "
              f"{args.warmup_epochs:g}, not {recipe['warmup_epochs']}")


# --------------------------------------------------------------------------------------- the data
SHAPES = {  # m, q, k of the outline at angle a, (|cos ma/4|^k + |sin ma/4|^k) ^ -1/q (Gielis)
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}
MINUTE = 60  # seconds between two lines of progress where there is no terminal
PIECE = 64  # images that a worker loads at a time, so that several workers share each batch


def draw_shapes(n, img_size, seed):
    """n images (n,3,H,W), uint8, of a shape on a ground of another colour, and labels (n,)."""
    g, (H, W), images = torch.Generator().manual_seed(seed), img_size, []
    rows, columns = torch.meshgrid(torch.linspace(-1, 1, H), torch.linspace(-1, 1, W),
                                   indexing="ij")                      # (H, W) each
    labels = torch.arange(n) % len(SHAPES)
    for label in labels.split(500):
        b = len(label)
        u = torch.rand(11, b, 1, 1, generator=g)                       # (b, 1, 1) each
        y, x = rows + 0.6 * u[0] - 0.3, columns + 0.6 * u[1] - 0.3     # (b, H, W) each
        outline = torch.tensor([*SHAPES.values()])[label]              # (b, 3)
        m, q, k = outline.T.reshape(3, b, 1, 1)                        # (b, 1, 1) each
        angle = m * (torch.atan2(y, x) + 7 * u[2]) / 4                 # (b, H, W)
        edge = (2 ** (k / 2 - 1) * (angle.cos().abs() ** k + angle.sin().abs() ** k)) ** (-1 / q)
        inside = ((0.56 + 0.3 * u[3]) * edge - torch.hypot(x, y)) * min(H, W) / 2
        inside = (inside + 0.5).clamp(0, 1).unsqueeze(1)               # (b, 1, H, W) soft edge
        ground, light = u[4:7].transpose(0, 1), 7 * u[7]               # (b, 3, 1, 1), (b, 1, 1)
        colour = (ground + 0.35 + 0.3 * u[8:11].transpose(0, 1)) % 1   # far in every channel
        shade = 0.12 * (x * light.cos() + y * light.sin()).unsqueeze(1)  # (b, 1, H, W)
        image = inside * (colour - shade) + (1 - inside) * (ground + shade)
        images.append((image.clamp(0, 1) * 255).round().byte())        # (b, 3, H, W)
    return torch.cat(images), labels


def read_image(file):
    """An upright RGB image (3,H,W), uint8, white where it is transparent; JPEGs are read fast."""
    data = torchvision.io.read_file(file)
    if data[:2].tolist() == [0xFF, 0xD8]:                  # as every JPEG starts
        return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
    image = ImageOps.exif_transpose(Image.open(file))
    if image.mode == "F":                                  # of any range
        raise ValueError("its pixels are floating-point numbers")
    if image.mode.startswith("I"):                         # convert would cut off what is above 255
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return v2.functional.pil_to_tensor(image.convert("RGB"))


class ImageDataset(Dataset):
    """Training or validation images: uint8 (N,C,H,W), in memory, or N file names; labels (N,), -1
    for none; names of the classes. Files have a `transform` and are loaded by workers."""

    def __init__(self, images, labels, classes, transform=None):
        self.images, self.labels = images, torch.as_tensor(labels)
        self.classes, self.transform = classes, transform
        self.unreadable = torch.zeros(len(images), dtype=torch.bool).share_memory_()

    def __getitem__(self, key):
        """Image i, transformed with draws from (seed, i), and its label. A file that cannot be
        read is named once, and the next that can stands in for it."""
        (seed, i), n = key, len(self.labels)
        image = self.images[i]
        while isinstance(image, str):
            try:
                image = read_image(image)
            except Exception as error:                     # a broken file can raise anything
                if not self.unreadable[i]:                 # and so not reported yet
                    tqdm.write(f"{image} is replaced by the next one: {error}", file=sys.stderr)
                self.unreadable[i] = True
                if self.unreadable.all():
                    raise InputError(f"none of {n} images can be read") from None
                i = (i + 1) % n
                image = self.images[i]
        # torch.manual_seed would seed CUDA too, which a forked worker must not touch
        torch.default_generator.manual_seed(hash((seed, i)))
        return (self.transform(image) if self.transform else image), self.labels[i]


def list_folder(root):
    """(files, labels, classes) of train and val: class folders in train/ and val/, or any images,
    of which about 5% are held out, chosen by a hash of the name."""
    if not root.is_dir():
        raise InputError(f"--data {root} is not shapes, cifar10, cifar100 or a folder")
    others, parts = Counter(), []

    def is_image(file):
        if file.lower().endswith(torchvision.datasets.folder.IMG_EXTENSIONS):
            return True
        others[Path(file).suffix or Path(file).name] += 1
        return False

    if (root / "train").is_dir():
        for part in ("train", "val"):
            if not (root / part).is_dir():
                raise InputError(f"--data {root} has train/, but no {part}/ to validate on")
            try:
                found = torchvision.datasets.ImageFolder(root / part, is_valid_file=is_image)
            except FileNotFoundError as error:
                raise InputError(f"--data {root}: {part}/ needs a folder of images for each class "
                                 f"({' '.join(str(error).split())})") from None
            parts.append(([file for file, _ in found.samples], found.targets, found.classes))
        different = sorted({*parts[0][2]} ^ {*parts[1][2]})
        if different:
            raise InputError(f"--data {root}: only one of train/ and val/ has the class "
                             f"{different[0]}")
    else:
        files = sorted(os.path.join(folder, name)
                       for folder, _, names in os.walk(root, followlinks=True)
                       for name in names if is_image(name))
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        if len(files) < 2:
            raise InputError(f"--data {root} has {len(files)} images: two at least are needed")
        if folders:
            print(f"note    {', '.join(folders[:3])} in {root} are not taken for classes: those "
                  f"are folders in train/ and val/")
        names = [Path(file).relative_to(root).as_posix() for file in files]
        codes = [zlib.crc32(os.fsencode(name)) for name in names]
        # a fixed limit, so that more files change nothing for these; one at least on each side
        limit = min(max(0.05 * 2 ** 32, min(codes)), max(codes) - 1)
        train = [file for file, code in zip(files, codes) if code > limit]
        val = [file for file, code in zip(files, codes) if code <= limit]
        parts = [(part, [-1] * len(part), []) for part in (train, val)]
    if others:
        print("note    files that are not read:", *(f"{n} {end}" for end, n in others.items()))
    return parts


def center_crop(image, img_size, share):
    """The middle of an image (C,h,w), in the shape of img_size and `share` of it, resized."""
    (h, w), (H, W) = image.shape[1:], img_size
    scale = share * min(h / H, w / W)
    crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
    return v2.functional.resize(crop(image), img_size, v2.InterpolationMode.BICUBIC)


def open_folder(root, img_size, args):
    """The train and val ImageDataset of a folder, and their (H, W). Images are kept in memory if
    they take less than 4 GiB, and either have the size that their folder asks for or none of a
    sample of 50 is larger than img_size. Otherwise they are read from their files each time."""
    train, val = [ImageDataset(*part) for part in list_folder(root)]
    n = len(train.labels)
    sample = [train[0, i][0] for i in range(0, n, math.ceil(n / 50))]  # (3, h, w) each
    val[0, 0]                                              # InputError if none can be read
    high, wide = max(x.shape[1] for x in sample), max(x.shape[2] for x in sample)
    if img_size is not None:
        H, W = img_size
        fits = high <= H and wide <= W
    else:                                                  # the images' own size, or 224 x 224
        fits = max(high, wide) < 224
        sides = (high, wide) if fits else (224, 224)
        # rounded down to a multiple of the patch or, if that is not given, of 16; of 8 below 128
        units = args.patch_size or [16 if side >= 128 else 8 for side in sides]
        H, W = (max(unit, side - side % unit) for side, unit in zip(sides, units))
        if (high, wide) != (H, W):
            print(f"note    images of up to {high}x{wide} px are used at {H}x{W} px (--img_size)")
    in_memory = fits and 3 * n * H * W < 4 * 1024 ** 3
    for dataset in (train, val):                           # of files 7/8, as MAE: 224 of 256 pixels
        dataset.transform = partial(center_crop, img_size=(H, W), share=1 if in_memory else 7 / 8)
        if in_memory:
            batches = torch.arange(len(dataset.labels)).split(1000)
            loaded = tqdm(load_images(dataset, batches, args), "reading", len(batches),
                          leave=False, disable=None)
            images, labels = zip(*loaded)
            dataset.images, dataset.labels = torch.cat(images), torch.cat(labels).cpu()
            dataset.transform = None
    return (train, val), (H, W)


def open_data(name, img_size, args):
    """The train and val ImageDataset of --data, and their (H, W). What is kept in memory is on the
    device."""
    if name == "shapes":
        size = img_size or (32, 32)
        datasets = [ImageDataset(*draw_shapes(n, size, seed=n), [*SHAPES]) for n in (10_000, 1_000)]
    elif name in ("cifar10", "cifar100"):
        size, kind = img_size or (32, 32), getattr(torchvision.datasets, name.upper())
        print(f"note    {name} is read from data/, or else downloaded to it", flush=True)
        if args.local_rank > 0:
            dist.barrier()                                 # wait for this machine's first process
        try:
            sets = [kind("data", train=train, download=True) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            raise InputError(f"--data {name} is not in data/ and cannot be downloaded from "
                             f"{kind.url}: {error}") from None
        if args.local_rank == 0 and args.world > 1:
            dist.barrier()
        datasets = [ImageDataset(torch.tensor(s.data).movedim(3, 1), s.targets, s.classes)
                    for s in sets]
    else:
        with reporting(f"--data {name}"):
            datasets, size = open_folder(Path(name), img_size, args)
    for dataset in datasets:
        if dataset.transform is None:
            dataset.images = dataset.images.to(args.device).contiguous()
    return *datasets, size


def load_images(dataset, batches, args, seed=0):
    """Images (b,C,H,W), uint8, and labels (b,), on the device, for each of `batches`, indices
    (b,): from memory, or transformed by workers, each of which loads pieces of a batch."""
    cuda = args.device.type == "cuda"                      # elsewhere each copy is waited for
    if dataset.transform is None:
        for ids in batches:
            yield (dataset.images[ids.to(args.device, non_blocking=cuda)],
                   dataset.labels[ids].to(args.device, non_blocking=cuda))
        return
    # what a worker gets at a time: a list of arguments for ImageDataset.__getitem__
    keys = [[(seed, i) for i in piece.tolist()] for ids in batches for piece in ids.split(PIECE)]
    workers = min(args.workers, len(keys))
    fork = sys.platform == "linux" and workers > 0         # elsewhere the system's default
    pieces = iter(DataLoader(dataset, batch_sampler=keys, num_workers=workers, pin_memory=cuda,
                             multiprocessing_context="fork" if fork else None))
    for ids in batches:
        images, labels = zip(*islice(pieces, math.ceil(len(ids) / PIECE)))
        yield (torch.cat([x.to(args.device, non_blocking=cuda) for x in images]),
               torch.cat([x.to(args.device, non_blocking=cuda) for x in labels]))


def crop_transform(img_size, args, *more):
    """Random resized crop and flip of an image (C,h,w), by torchvision, and then `more`."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if args.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (args.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * args.flip), *more])


def crop_batch(images, img_size, args):
    """As crop_transform, for this process's images (b,C,H,W) in memory, each cropped by itself
    (torchvision would use one crop for the whole batch): float, bilinear. A crop that would be
    higher or wider than the image is cut to it."""
    draws = local_part(torch.rand(args.batch_size, 5, device=images.device), args)
    area, ratio, y, x, coin = draws.unbind(1)                          # (b,) each, 0 ... 1
    area = args.crop + (1 - args.crop) * area                          # share of the image's
    ratio = ((2 * ratio - 1) * math.log(4 / 3) * (args.crop < 1) / 2).exp()  # root of w / h
    h, w = (area.sqrt() / ratio).clamp(max=1), (area.sqrt() * ratio).clamp(max=1)
    y, x, zero = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w), torch.zeros_like(h)  # the centre
    w_flipped = torch.where(coin < 0.5 * args.flip, -w, w)
    theta = torch.stack([w_flipped, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *img_size), align_corners=False)
    return F.grid_sample(images.float(), points, padding_mode="reflection", align_corners=False)


def val_batches(dataset, args, img_size, most=None):
    """Batches (indices, images, labels) of this process's share of `most` images, always the same
    ones; a batch has at most the size of a piece in training, and 250."""
    order = torch.randperm(len(dataset.labels), generator=torch.Generator().manual_seed(0))
    share = order[:most].tensor_split(args.world)[args.rank]
    size = max(1, args.batch_size // (args.world * args.accum))
    batches = share.split(min(250, size)) if len(share) else ()
    for ids, (images, labels) in zip(batches, load_images(dataset, batches, args)):
        yield ids, v2.functional.resize(images, img_size), labels


# ---------------------------------------------------------------------------------- the processes
def start_processes(args):
    """Set args.rank, world, local_rank, device and dtype; under torchrun, join the others."""
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.rank > 0:
        sys.stdout = open(os.devnull, "w")                 # only rank 0 prints
    args.device = choose_device(args, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    cuda, amp = args.device.type == "cuda", args.amp
    if cuda:
        torch.cuda.set_device(args.device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
        if amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    args.dtype = dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # After a restart by torchrun, keys of the killed processes must not be found again. Only on
        # one machine: each counts its own restarts.
        if args.world == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=args.rank,
                                world_size=args.world, device_id=args.device if cuda else None)


def choose_device(args, processes):
    """The torch.device of this process, one of `processes` on the machine: --device, else cuda if
    each has a GPU, else mps for a single process, else cpu."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cuda": gpus >= processes, "cpu": True,
             "mps": torch.backends.mps.is_available() and args.world == 1}
    name = args.device or next(name for name in ("cuda", "mps", "cpu") if there[name])
    if not there[name]:
        raise InputError(f"--device {name} is not there for {processes} processes on a machine "
                         f"with {gpus} CUDA GPUs: give --device cpu or fewer processes")
    if name == "cpu" and args.world > 1 and args.device is None:
        print(f"note    {processes} processes and {gpus} CUDA GPUs on this machine: all processes "
              f"compute on the CPU")
    return torch.device(f"cuda:{args.local_rank}" if name == "cuda" else name)


def autocast(args):
    """Mixed precision as --amp says; nothing in float32."""
    return torch.autocast(args.device.type, args.dtype, enabled=args.dtype is not torch.float32)


def local_part(batch, args):
    """This process's part of a tensor of the whole batch."""
    return batch.chunk(args.world)[args.rank]


def mean_over_processes(sums, n, args):
    """{name: sum / n}: sums (0-dim tensors) are added over the processes, n is of all together."""
    total = torch.tensor([*map(float, sums.values())], dtype=torch.float64)
    if args.world > 1:
        total = total.to(args.device)                      # cuda or cpu: mps has no float64
        dist.all_reduce(total)
    return {name: value / n for name, value in zip(sums, total.tolist())}


# ---------------------------------------------------------------------------------------- files
@contextmanager
def reporting(what):
    """An OSError inside becomes an InputError, which starts with `what`."""
    try:
        yield
    except BrokenPipeError:                                # of what is printed inside
        raise
    except OSError as error:
        raise InputError(f"{what}: {error}") from None


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
        raise InputError(f"{path} cannot be written, and is as it was before: {error}") from None


def read(path, heads=None):
    """A checkpoint, without running code in it: a dict of method (None: a released file), config
    (the constructor's arguments), model (the state dict), mean, std, flags and more."""
    if not Path(path).is_file():
        raise InputError(f"there is no checkpoint {path}")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # the releases' flags
            content = torch.load(path, map_location="cpu", weights_only=True)
        state = content.get("model", content)
        assert state and all(torch.is_tensor(value) for value in state.values())
    except Exception as error:                             # a broken file can raise anything
        why = "it would run code" if "GLOBAL" in str(error) else "it is damaged or of another kind"
        raise InputError(f"{path} is not a checkpoint that can be read: {why}") from None
    if "method" not in content:
        state = from_released(state)
        content = dict(method=None, config=sizes_of(state, path, heads), model=state, flags={},
                       mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if content["method"] == "minr" and "weight_tokens" in state:       # as they were once called
        state["encoder.extra_tokens"] = state.pop("weight_tokens")
        content.pop("optimizer", None)                     # its moments are in another order
    return content


def load(path, methods=METHODS):
    """The model in a checkpoint of train.py, or of another {method: class}, in eval mode."""
    content = read(path)
    if content["method"] not in methods:
        raise InputError(f"{path} is of method {content['method']}, not {', '.join(methods)}")
    model = methods[content["method"]](**content["config"])
    model.load_state_dict(content["model"])
    return model.eval()


def initialize(model, content, path):
    """Start `model` from the encoder in a checkpoint's content, as read from `path`. Prints what
    was not taken over."""
    state, grid = content["model"], grid_of(**content["config"]) if content["method"] else None
    if hasattr(model, "from_mae"):
        state = model.from_mae(state)
    try:
        notes = transfer(model, state, grid)
    except InputError as error:
        raise InputError(f"{path} does not fit: {error}") from None
    for note in notes:
        print(note)


def name_run(args, name):
    """Set args.name, if it is None. InputError if it holds a run that is not to be touched."""
    args.name = args.name or name.replace(" ", "_")
    if Path(args.runs, args.name, "last.pt").exists() and not (args.resume or args.overwrite):
        raise InputError(f"{Path(args.runs, args.name)} holds a run: --resume continues it, "
                         f"--overwrite replaces it, --name NAME starts another")


def resume(last, model, optimizer, scaler, content, args):
    """Load last.pt, the checkpoint of this run, and return the rows of its log. Says which flags
    differ. InputError if it is of another model or optimizer."""
    saved = read(last)
    flags, config = saved["flags"], saved["config"]
    if "optimizer" not in saved:
        raise InputError(f"{last} is of an older version of this code and cannot be resumed: "
                         f"--overwrite replaces it, --name NAME starts another run")
    was = {**config, "method": saved["method"], "optimizer": flags.get("optimizer")}
    now = {**content["config"], "method": content["method"], "optimizer": args.optimizer}
    for name in ["method", *sorted(was.keys() | now.keys())]:
        if was.get(name) != now.get(name):
            before = flags.get(name) or was.get(name)      # for --teacher its file
            raise InputError(f"{last} cannot be resumed: {name} was {before}, is {now.get(name)}. "
                             f"Give the same flags as before (--data {flags.get('data')}), or "
                             f"another --name")
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError:
        raise InputError(f"{last} cannot be resumed: its weights have other names or shapes than "
                         f"those of {type(model).__name__} have now: give another --name") from None
    settings = optimizer.state_dict()["param_groups"]      # this run's, not the saved ones
    optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
    scaler.load_state_dict(saved["scaler"] or scaler.state_dict())
    for name, value in vars(args).items():
        unimportant = name in ("resume", "overwrite", "rank", "local_rank", "workers", "runs")
        if flags.get(name, value) != value and name in ("init", "checkpoint", "teacher"):
            print(f"note    {name} was {flags[name]} and stays so: the weights are in {last}")
        elif flags.get(name, value) != value and not unimportant:
            print(f"note    {name} was {flags[name]}, is {value}")
    print(f"resumed after epoch {saved['epoch']}")
    return saved["history"]


# ------------------------------------------------------------------------------------- training
def make_optimizer(args, groups):
    """The recipe's optimizer, fused except on MPS."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD)[args.optimizer]
    more = dict(momentum=args.momentum) if args.optimizer == "sgd" else dict(betas=args.betas)
    return kind(groups, lr=args.lr, fused=args.device.type != "mps", **more)


def learning_rate(t, args):
    """The rate at epoch t, say 3.7: a linear warm-up from 0 to lr in warmup_epochs, if there are
    any, then the schedule until epochs: constant, or half a cosine from lr to min_lr."""
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
    """A step on `inputs`, the arguments of net, in --accum pieces. Returns its metrics, {name:
    value}, on the device. No host-device synchronisation."""
    metrics, seed = Counter(), torch.initial_seed() + 1
    for i in range(args.accum):
        piece = [x.chunk(args.accum)[i] if x.ndim else x for x in inputs]  # i-MAE's mix: a number
        # reseed: all pieces and processes share the model's random numbers; in fine-tuning, where
        # these are drop path's, each has its own
        piece_seed = seed + args.rank * args.accum + i if args.own_draws else seed
        torch.manual_seed(piece_seed)
        sync_gradients = args.world == 1 or i + 1 == args.accum        # once, after the last piece
        with nullcontext() if sync_gradients else net.no_sync():
            with autocast(args):
                output = net(*piece)
            if not (isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict)):
                raise TypeError(f"forward must return (loss, {{name: value}}), not {output}")
            loss, values = output
            scaler.scale(loss / args.accum).backward()
        for name, value in {**values, "loss": loss.detach()}.items():
            metrics[name] += value / args.accum
    if args.clip_grad:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return metrics


def train_epoch(epoch, net, optimizer, scaler, train, make_inputs, args):
    """Train for an epoch and return its row of the log. SystemExit once loss or weights are not
    finite."""
    began, waited, totals = perf_counter(), 0, Counter()
    epoch_seed = hash((args.seed, epoch))                  # of integers: the same everywhere
    torch.manual_seed(epoch_seed)
    steps = len(train.labels) // args.batch_size
    order = torch.randperm(len(train.labels))[:steps * args.batch_size]
    batches = [local_part(ids, args) for ids in order.split(args.batch_size)]
    if args.pairs:                                         # each batch, and then its partners
        partners = draw_partners(order, train.labels, args.same_class, torch.default_generator)
        parts = [local_part(ids, args) for ids in partners.split(args.batch_size)]
        batches = [torch.cat(both) for both in zip(batches, parts)]
    stream = load_images(train, batches, args, epoch_seed)
    rates = [learning_rate(epoch + i / steps, args) for i in range(steps)]
    terminal, told = sys.stderr.isatty(), began            # without one, a line a minute
    bar = tqdm(rates, f"epoch {epoch + 1}/{args.epochs}", unit="img", unit_scale=args.batch_size,
               leave=False, disable=args.rank > 0, ascii=not terminal,
               file=sys.stderr if terminal else open(os.devnull, "w"))
    for step, rate in enumerate(bar, start=1):
        asked = perf_counter()
        images, labels = next(stream)
        waited += perf_counter() - asked
        torch.manual_seed(hash((args.seed, epoch, step)))
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        metrics = train_step(net, optimizer, scaler, make_inputs(images, labels), args)
        totals.update(metrics)                             # a Counter adds
        if step % 20 == 0 or step == steps:                # only here the host waits for the device
            check = [totals["loss"], *(net.parameters() if step == steps else ())]
            if not all(x.isfinite().all() for x in check):
                raise SystemExit(f"loss or weights are not finite at epoch {epoch + 1}, step "
                                 f"{step}, lr {rate:.1e}: --resume with a lower --lr, --clip_grad")
            bar.set_postfix_str(f"loss {metrics['loss']:.4f}, lr {rate:.1e}")
            if not terminal and perf_counter() - told > MINUTE:
                told = perf_counter()
                print(bar, flush=True)
    means = mean_over_processes(totals, steps * args.world, args)
    seconds = perf_counter() - began
    return {"epoch": epoch + 1, "lr": max(rates), **means, "wait": round(waited / seconds, 3),
            "img_s": round(steps * args.batch_size / seconds, 1), "train_s": round(seconds, 2)}


def fit(args, model, groups, train, val, make_inputs, evaluate, **content):
    """Train for --epochs; the last row of log.jsonl. make_inputs(images, labels) gives the model's
    arguments, evaluate() {name: value} and recon.png's columns or None; last.pt gets `content`."""
    if args.batch_size > len(train.labels):
        raise InputError(f"--batch_size {args.batch_size} is more than the {len(train.labels)} "
                         f"training images")
    if args.batch_size % (args.world * args.accum):
        raise InputError(f"--batch_size {args.batch_size} is not divisible by {args.world} "
                         f"processes x --accum {args.accum}")
    optimizer, history = make_optimizer(args, groups), []
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype is torch.float16)
    last = Path(args.runs, args.name, "last.pt")
    log = last.with_name("log.jsonl")
    with reporting(f"{last.parent} cannot be written"):
        last.parent.mkdir(parents=True, exist_ok=True)
    if args.resume and last.exists():
        history = resume(last, model, optimizer, scaler, content, args)
    elif args.resume:
        print(f"note    there is no {last} to resume: the run starts")
    elif args.rank == 0:
        last.unlink(missing_ok=True)                       # so that --resume does not continue it
    describe(args, model, train, val)
    net = wrap(model, args)

    def write_log(mode, rows):
        with reporting(f"{log} cannot be written"), open(log, mode) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def end_epoch(row, scored):
        """Write the row of an epoch. If it is `scored`, evaluate, write last.pt, and return the
        score as a text."""
        history.append(row)
        score, began = "", perf_counter()
        if scored:
            if args.world > 1:
                for buffer in model.buffers():             # a BatchNorm's differ after a step
                    dist.broadcast(buffer, 0)
            scores, columns = evaluate()
            row.update(scores, eval_s=round(perf_counter() - began, 2))
            name, value = next(iter(scores.items()))
            score = f", {name} {value:.2f}"
        if scored and args.rank == 0:
            began = perf_counter()
            save(last, dict(content, model=model.state_dict(), optimizer=optimizer.state_dict(),
                            flags=vars(args), scaler=scaler.state_dict(), epoch=row["epoch"],
                            history=history, classes=train.classes, mean=model.mean, std=model.std,
                            torch=str(torch.__version__)))
            row["save_s"] = round(perf_counter() - began, 2)
            if columns:
                save_picture(columns, last.with_name("recon.png"))
        if args.rank == 0:
            write_log("a", [row])
        return score

    if args.rank == 0:
        write_log("w", history)                            # cut back to what last.pt holds
    if args.epochs == 0 and not history:
        print("untrained" + end_epoch({"epoch": 0}, scored=True))
    done = history[-1]["epoch"] if history else 0
    if 0 < args.epochs <= done:
        print(f"note    {done} epochs are done: for more, give a higher --epochs")
    for epoch in range(done, args.epochs):
        row = train_epoch(epoch, net.train(), optimizer, scaler, train, make_inputs, args)
        score = end_epoch(row, (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs)
        print(f"epoch {epoch + 1}: loss {row['loss']:.4f}{score}, {row['img_s']:.0f} img/s, "
              f"wait {row['wait']:.1%}", flush=True)
    print(f"see     {log} and {last}")
    return history[-1]


def describe(args, model, train, val):
    """Print what is trained, on what and how."""
    n, steps, encoder = len(train.labels), len(train.labels) // args.batch_size, model.encoder
    (H, W), (h, w), (p, q) = encoder.img_size, encoder.grid, encoder.patch_size
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"data    {args.data}: {n} train, {len(val.labels)} val, "
          f"{'files' if train.transform else 'in memory'}; {H}x{W} px in {h}x{w} patches of "
          f"{p}x{q} px\nmodel   {type(model).__name__}: {size:.2f} M parameters, {args.world} x "
          f"{args.device}, {args.dtype}\ntrain   {args.epochs} epochs ({args.warmup_epochs:g} of "
          f"warm-up) of {steps} steps of {args.batch_size}, {args.optimizer}, lr {args.lr:.3g}")
    if h * w > 1024:
        print(f"note    {h * w} patches an image are slow: try a smaller --img_size or, without "
              f"--init, a larger --patch_size")
    if 0 < args.epochs * steps < 500:
        print(f"note    {args.epochs * steps} steps are few: try a smaller --batch_size, "
              f"more --epochs or, in train.py, --init")


# ------------------------------------------------------------------------------------ evaluation
@torch.no_grad()
def evaluate_psnr(model, val, args, mask, mask_ratio=None):
    """Mean PSNR in dB of hidden pixels, of the image with visible pixels copied, and as decoded,
    under masks of the pattern `mask` that depend on the image's index alone. And columns of up to 8
    images: original, masked, decoded, visible pixels copied."""
    columns, encoder = None, model.eval().encoder
    # a process without images reports zeros
    sums = dict.fromkeys(("psnr_hidden", "psnr_image", "psnr_decoded"), 0)
    for ids, images, _ in val_batches(val, args, encoder.img_size, args.eval_images):
        generators = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in generators])
        with autocast(args):
            decoded, hidden = model.reconstruct(normalize(images, model), noise.to(args.device),
                                                mask_ratio, args.leak_free)
        truth, decoded = images / 255, denormalize(decoded, model)     # (b, 3, H, W)
        hidden = encoder.pixels_of(hidden)                             # (b, 1, H, W)
        copied = torch.where(hidden > 0, decoded, truth)
        masked = torch.where(hidden > 0, 0.5, truth)
        image_error = (copied - truth).square().mean((1, 2, 3))        # (b,) 0 where visible
        decoded_error = (decoded - truth).square().mean((1, 2, 3))     # (b,)
        errors = {"psnr_hidden": image_error / hidden.mean((1, 2, 3)), "psnr_image": image_error,
                  "psnr_decoded": decoded_error}
        for name, error in errors.items():
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        columns = columns or [x[:8] for x in (truth, masked, decoded, copied)]
    return mean_over_processes(sums, len(val.labels[:args.eval_images]), args), columns


def save_picture(columns, path):
    """Write columns [(rows,C,H,W)], 0 ... 1, as a picture; small ones enlarged to 128 pixels."""
    H, W = columns[0].shape[2:]
    size = [n * max(1, 128 // max(H, W)) for n in (H, W)]
    cells = torch.stack([F.interpolate(x, size) for x in columns], dim=1).flatten(0, 1)
    with reporting(f"{path} cannot be written"):
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
    if args.world > 1:
        raise InputError(f"--eval runs in one process, not in {args.world}: python train.py --eval")
    rows, columns, notes, opened_size = [], [], [], None
    masks, data_given = args.masks or [args.mask], args.data is not None
    paths = []
    for word in args.eval:                                 # Windows' shells do not fill in runs/*
        paths += [word] if Path(word).exists() else sorted(glob(word)) or [word]
    for path in paths:
        content = read(path)
        if content["method"] == "classifier":
            print(f"note    {path} is passed over: finetune.py --mode eval evaluates it")
            continue
        model = load(path).to(args.device)
        trained_on = content["flags"]["data"]
        args.data = args.data or trained_on
        if trained_on != args.data and not data_given:
            print(f"note    {path} was trained on {trained_on}, and is evaluated on {args.data}")
        args.batch_size = args.batch_size or content["flags"]["batch_size"]
        if opened_size != model.encoder.img_size:
            train, val, opened_size = open_data(args.data, model.encoder.img_size, args)
        if rows and model.encoder.grid != grid:
            print(f"note    {path} has other patches than the one before: PSNR does not compare")
        grid = model.encoder.grid
        for mask in masks:
            for ratio in args.mask_ratios:
                scores, _ = evaluate_psnr(model, val, args, mask, ratio)
                rows.append({"checkpoint": path, "mask": mask, "mask_ratio": ratio, **scores})
        original, masked, _, copied = evaluate_psnr(model, val, args, masks[0])[1]
        columns += [copied] if columns else [original, masked, copied]
        # all in memory: for measures at most 1,000 images, for figures 8
        most = min(args.eval_images, 1000) if hasattr(model, "measures") else 8
        batches = [val_batches(x, args, opened_size, most) for x in (train, val)]
        images = [normalize(torch.cat([x for _, x, _ in batch]), model) for batch in batches]
        for title, table in model.measures(*images).items() if hasattr(model, "measures") else ():
            notes += [f"{path}: {title}", as_table(table)]
        figures = model.figures(images[1][:8]) if hasattr(model, "figures") else {}
        for name, (caption, cells) in figures.items():
            picture = Path(path).with_name(f"{name}.png")
            notes.append(f"see     {picture}: {caption}")
            save_picture(denormalize(cells, model).unbind(1), picture)
    if not rows:
        raise InputError(f"--eval {' '.join(args.eval)}: none is a checkpoint of train.py")
    picture = Path(rows[0]["checkpoint"]).with_name("eval.png")
    save_picture(columns, picture)
    print(f"PSNR in dB, mean over {min(args.eval_images, len(val.labels))} images of {args.data}",
          as_table(rows), *notes, f"see     {picture}: original, masked, each checkpoint", sep="\n")
    return rows


# -------------------------------------------------------------------------------- the whole program
def vit_config(args, img_size, source):
    """The encoder's constructor arguments: each from its own flag, else from --size, else from
    `source`, the config of a checkpoint or {}, else the default."""
    patch_size = tuple(16 if side >= 128 else max(4, side // 8) for side in img_size)
    config = dict(img_size=img_size, patch_size=patch_size, in_chans=3,
                  **SIZES[args.size or "micro"])
    for name in ("patch_size", "dim", "depth", "heads"):
        if getattr(args, name) is not None:
            config[name] = getattr(args, name)
        elif name in source and (args.size is None or name == "patch_size"):
            config[name] = source[name]
    return config


def pretrain(args):
    """A parsed command line of train.py, from data to the last epoch."""
    cls, args.data = METHODS[args.method], args.data or "shapes"
    name_run(args, f"{args.method}_{Path(args.data).resolve().name}")
    init = read(args.init, args.heads) if args.init else {"config": {}}
    train, val, img_size = open_data(args.data, args.img_size, args)
    config = vit_config(args, img_size, init["config"])
    lr_given = args.lr is not None
    apply_recipe(args, {**method_arguments(cls), **cls.recipe}, cls.small, config,
                 len(train.labels))
    config.update({name: getattr(args, name) for name in method_arguments(cls)})
    teacher = None
    if args.pairs:                                         # the model learns from pairs of images
        check_same_class(train.labels, train.classes, args.same_class)
        print(f"teacher {args.teacher or 'none, so no distillation: --teacher FILE takes an MAE'}")
        if args.teacher:
            config["teacher"], teacher = teacher_of(read(args.teacher), config)
    torch.manual_seed(args.seed)
    model = cls(**config).to(args.device)
    if teacher:
        model.teacher.load_state_dict(teacher)
    if args.init:
        initialize(model, init, args.init)
    del init, teacher                                      # their weights are in the model now
    if not lr_given:
        args.lr *= model.lr_scale                          # CrossMAE A.6: prediction / mask ratio
    if train.transform:                                    # files, which workers crop
        train.transform = crop_transform(img_size, args)

    def make_inputs(images, labels):
        """The model's arguments: images, noise and, of pairs, partners and mixing weight."""
        parts = images.chunk(2 if args.pairs else 1)
        crops = parts if train.transform else [crop_batch(x, img_size, args) for x in parts]
        images, *partners = [normalize(x, model) for x in crops]
        noise = mask_noise(args.mask, args.batch_size, model.encoder.grid, args.device)
        mix = [model.draw_mix(args.device)] if args.pairs else []
        return images, local_part(noise, args), *partners, *mix
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim > 1], weight_decay=args.weight_decay),
              dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]
    evaluate = partial(evaluate_psnr, model, val, args, args.mask)
    row = fit(args, model, groups, train, val, make_inputs, evaluate,
              method=args.method, config=config)
    folder = Path(args.runs, args.name)
    script = "finetune.py --checkpoint" if train.classes else "train.py --eval"
    print(f"see     {folder / 'recon.png'}: original, masked, decoded, visible pixels copied")
    print(f'next    python {script} "{folder / "last.pt"}"')
    return row


def run_cli(parser, work, argv):
    """work(args) of the words `argv` (None: the command line). A wrong input (InputError) ends in
    one line; a bug in code has its traceback."""
    parent = os.getpid()

    def interrupt(*_):
        """Exit at once: an exception would be lost while a DataLoader ends. Workers are silent."""
        if os.getpid() == parent:
            os.write(2, b"\nInterrupted. --resume continues from last.pt, if an epoch is saved.\n")
        os._exit(130)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1)
        parser.error(f"unrecognized: {' '.join(unknown)}"
                     + (f"; did you mean {near[0]}?" if near else ""))
    if argv is None:
        signal.signal(signal.SIGINT, interrupt)            # Ctrl-C
        if hasattr(sys.stdout, "reconfigure"):             # not in a notebook
            sys.stdout.reconfigure(errors="backslashreplace")          # names of other alphabets
    try:
        for name in ("img_size", "patch_size"):
            if getattr(args, name) is not None:
                setattr(args, name, pair(getattr(args, name)))         # (H, W)
        if args.img_size and args.patch_size:
            grid_of(args.img_size, args.patch_size)        # before any data are made
        start_processes(args)
        row = work(args)
        sys.stdout.flush()
    except BrokenPipeError:                                # as by `| head`
        os._exit(1)
    except torch.OutOfMemoryError:
        parser.exit(1, "out of memory: try --accum, --grad_checkpointing, a lower --batch_size\n")
    except InputError as error:
        parser.error(str(error).strip().splitlines()[-1])  # of a worker's, without its traceback
    if dist.is_initialized():
        dist.destroy_process_group()
    return row


def main(argv=None):
    """`python train.py` with the words `argv`; returns the last row of log.jsonl, a dict."""
    parser = argparse.ArgumentParser("train.py", **LAYOUT)
    parser.add_argument("--method", choices=METHODS, default="mae", help="(mae)", metavar="NAME")
    method = parser.parse_known_args(argv)[0].method       # it decides which other flags there are
    cls = METHODS[method]
    parser.description = (
        f"usage: python train.py --method {method} [--flag value ...]\n"
        f"       torchrun --nproc_per_node 8 train.py --method {method} [--flag value ...]\n\n"
        f"Pretrain {cls.__name__}. Methods: {', '.join(METHODS)}. In parentheses: the value\n"
        f"without the flag; small images are those up to 64 pixels, and any for --size micro.")
    add_options(parser)
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", inspect.getdoc(cls) or "", re.M))
    add_flags(parser, "recipe", {**SHARED, **cls.recipe}, cls.small, HELP, KINDS)
    add_flags(parser, f"arguments of {cls.__name__}", method_arguments(cls), cls.small, texts,
              cls.__init__.__annotations__)
    parser.set_defaults(eval_images=1000, eval_every=1, pairs=hasattr(cls, "pairs"),
                        own_draws=False)
    option = parser.add_argument_group("pretraining").add_argument
    option("--init", metavar="FILE", help="start from the encoder of a checkpoint, of its size and "
           "patch size, and from its decoder if that is the same")
    masks = ("random", "grid", "block")
    option("--mask", choices=masks, default="random", help="pattern of the hidden patches (random)")
    if hasattr(cls, "pairs"):
        option("--teacher", metavar="FILE", help="checkpoint of an MAE to distill (none)")
        option("--same_class", type=bounded_number(float, 0, 1), metavar="X", help="share of the "
               "pairs that are of one class (none given: partners are any images)")
    option = parser.add_argument_group("evaluation").add_argument
    option("--eval", nargs="+", metavar="FILE", help="evaluate checkpoints instead of training")
    option("--mask_ratios", nargs="+", type=bounded_number(float, 0, 1), metavar="X",
           default=[0.5, 0.75, 0.9], help="mask ratios that --eval measures (0.5 0.75 0.9)")
    option("--masks", nargs="+", choices=masks, help="patterns to measure (that of --mask)")
    option("--leak_free", action="store_true", help="of models with norm_pix_loss: do not use the "
           "mean and variance of hidden patches")
    return run_cli(parser, lambda args: compare(args) if args.eval else pretrain(args), argv)


if __name__ == "__main__":
    main()
