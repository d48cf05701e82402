"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

Start at the top. `pretrain` claims a run's folder, opens the data and chooses all settings, and
`fit` trains, in two loops over epochs and steps. The other sections are:
settings, evaluation, data, checkpoints, processes, command line. finetune.py uses the same loop.

`flags` is the command line with DEFAULTS; `run`, which is read-only, holds every setting, as chosen
by `settle`; `here` is this process and its device. A method is a vit.Method (tests/docs/FORKS.md).

Each step is seeded from (seed, epoch, step), and an image file's crop from (seed, epoch, image), so
resuming needs no saved random state. Each process draws random numbers for the whole batch and
keeps its part, so N processes pretrain like one.
"""

import argparse
import difflib
import inspect
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter, namedtuple
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageOps
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from tqdm import tqdm

from crossmae import CrossBlock, CrossMAE
from hypermae import HyperMAE
from imae import IMAE, teacher_state
from mae import MAE
from minr import MINR
from vit import (SIZES, Block, InputError, Method, denormalize, from_released, grid_of, mask_noise,
                 normalize, pair, require, sizes_of, transfer)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}
OPTIMIZERS = {  # functions of the parameter groups and a run's settings
    "adamw": lambda groups, run: torch.optim.AdamW(groups, run.lr, run.betas, fused=True),
    "adam": lambda groups, run: torch.optim.Adam(groups, run.lr, run.betas, fused=True),
    "sgd": lambda groups, run: torch.optim.SGD(groups, run.lr, momentum=0.9, fused=True)}
SHOWN = ("loss", "psnr_masked", "psnr_mean_colour", "top1", "largest_class", "img_s")
NO_CHECKPOINT = dict(method=None, config={}, flags={}, model={}, mean=MAE.mean, std=MAE.std)


# --------------------------------------------------------------------------------------- training
def pretrain(flags):
    """Train the model of --method on --data, and return the last row of log.jsonl."""
    here, start, fixed = start_processes(flags), NO_CHECKPOINT, {}
    with open_run(flags, here, f"{flags.method}_{name_of(flags.data)}") as folder:
        if flags.init:
            start = read_checkpoint(flags.init, flags.heads)
        if flags.teacher:
            teacher = read_checkpoint(flags.teacher)       # --heads is for the encoder
            fixed["teacher"] = {x: teacher["config"][x] for x in ("dim", "depth", "heads")}
        size = flags.img_size or start["config"].get("img_size")
        data, val, size = open_data(flags.data, here, size, train_images=flags.train_images)
        images = len(data.labels), len(val.labels[:flags.eval_images])
        run, model = build(flags, here, size, *images, start, fixed, folder)
        if flags.init:
            initialize(model, start)
        if flags.teacher:                                  # replaces one in the --init file
            model.teacher.load_state_dict(teacher_state(teacher, run.config))
        transform = None if data.in_memory else crop_transform(size, run)
        return fit(run, here, model, data, val, transform)


def build(flags, here, img_size, images, val_images=0, start=NO_CHECKPOINT, fixed={}, folder=None):
    """Return the settings of a run of --method, and its model. Defaults are the sizes of the
    checkpoint `start` and, if it is of the same method, its other arguments."""
    cls, config = METHODS[flags.method], start["config"]
    own, _ = arguments_of(cls)
    small = {name: cls.small_config[name] for name in own if name in cls.small_config}
    init = config if start["method"] == flags.method else {}
    sizes = encoder_sizes(flags, img_size, {**config, "in_chans": len(cls.mean)})
    run = settle(flags, sizes, cls.recipe, {**small, **cls.small_recipe}, images, val_images,
                 cls.lr_scale, own=own, init=init, fixed=fixed, folder=folder)
    torch.manual_seed(run.seed)
    return run, cls(**run.config).to(here.device)


def fit(run, here, model, data, val, transform=None):
    """Train `model`, a vit.Method, for the rest of --epochs, and return the last row of log.jsonl.
    Workers apply `transform` to images; without one, they must be in memory, see crop_batch."""
    n, img_size, grid = len(data.labels), model.encoder.img_size, model.encoder.grid
    require(run.batch_size <= n and run.batch_size % (here.world * run.accum) == 0,
            f"--batch_size {run.batch_size} must be at most {n} (training images) and "
            f"divisible by {here.world} processes x --accum {run.accum}")
    own_batch = run.batch_size // here.world               # this process's part
    steps = n // run.batch_size if run.epochs else 0       # epoch 0 only evaluates and saves
    optimizer = OPTIMIZERS[run.optimizer](model.parameter_groups(run), run)
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype is torch.float16)
    describe(run, here, model, data, val, steps)
    history = resume(run, here, model, data, optimizer, scaler)
    if history:                                            # a full disk may have kept them out
        _, columns = evaluate_psnr(model, val, here, run.mask, most=8 * here.world)
        write_log(run, here, history, columns)
    net, began = wrap(model, run, here), time.perf_counter()
    lr, first, saved_at = 0.0, history[-1]["epoch"] + 1 if history else min(1, run.epochs), began
    epochs = range(first, run.epochs + 1)
    keys = draw_keys(run, here, model, data.labels, epochs)
    batches = load_images(data, keys, own_batch * model.crops, here, transform)
    bar = here.progress(None, "training", total=steps * run.epochs, initial=steps * (first - 1),
                        unit="img", unit_scale=run.batch_size)
    for epoch in epochs:
        net.train()
        sums, epoch_began = {}, time.perf_counter()
        for step in range(1, steps + 1):
            images, labels = next(batches)
            lr = learning_rate(epoch - 1 + (step - 1) / steps, run)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)         # finetune: layer decay
            model.before_step((epoch - 1 + (step - 1) / steps) / run.epochs, optimizer)
            seed = hash((run.seed, epoch - 1, step))       # the same in all processes
            torch.manual_seed(seed)                        # for crops, masks and i-MAE's alpha
            crops = images.split(own_batch)
            if transform is None:
                crops = [crop_batch(x, img_size, run, here) for x in crops]
            # noise decides the mask: in each image, the patches with the lowest noise stay visible
            noise = here.part(mask_noise(run.mask, run.batch_size, grid, here.device))
            batch = model.draw_batch(crops, labels[:own_batch], noise)
            metrics = train_step(run, here, model, net, optimizer, scaler, batch, seed + 1)
            model.after_step((epoch - 1 + step / steps) / run.epochs)

            bar.update()
            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
            if step % 20 == 0 or step == steps:
                loss = metrics["loss"].item()              # the only host-device sync
                # in fp16, the scaler skips steps that overflow and halves its scale, at worst to 1
                require(math.isfinite(loss) or scaler.get_scale() > 1, f"the loss is {loss} at "
                        f"epoch {epoch}, step {step}: use --clip_grad or a lower --lr")
                bar.set_postfix_str(f"epoch {epoch}, loss {loss:.4f}, lr {lr:.1e}", refresh=False)
        row = {"epoch": epoch, "lr": lr, **here.mean_over_processes(sums, steps),
               "img_s": round(steps * run.batch_size / (time.perf_counter() - epoch_began), 1)}
        history.append(row)
        validate, columns = epoch % run.eval_every == 0 or epoch == run.epochs, None
        if validate:
            scores, columns = evaluate_psnr(model, val, here, run.mask, most=run.eval_images)
            row.update(scores, **model.scores(data, val, here, run))
        keep = run.keep_every and epoch % run.keep_every == 0
        if validate or keep or time.perf_counter() - saved_at > 60:
            save_run(run, here, model, data, optimizer, scaler, history, columns)
            saved_at = time.perf_counter()
            said = [f"{name} {row[name]:.4g}" for name in SHOWN if name in row]
            bar.write(f"epoch {epoch}: {', '.join(said)}")
    bar.close()
    print(f"done    in {(time.perf_counter() - began) / 60:.1f} minutes")
    broken = sum(torch.stack(here.gather(x.broken)).any(0).sum().item() for x in (data, val))
    if broken:
        print(f"note    {broken} image files cannot be read, and others replaced them: see above")
    if here.rank == 0:
        with suppress(ImportError, InputError):            # a copy without tests/; an empty log
            from tests.curves import conclude              # only here: tests import train
            conclude(run, data.classes if data.classes == val.classes else ())
    return history[-1]


def train_step(run, here, model, net, optimizer, scaler, batch, seed):
    """Take an optimizer step, in --accum pieces, with `batch` from model.draw_batch and `net` from
    wrap. Returns metrics {name: value} on the device, without waiting for it."""
    metrics = {}
    for i in range(run.accum):
        piece = [x.chunk(run.accum)[i] if x.ndim else x for x in batch]    # a scalar: i-MAE's alpha
        # what forward draws differs between pieces and processes, except MINR's pixels
        torch.manual_seed(seed if model.draws_alike else seed + here.rank * run.accum + i)
        inputs = model.model_inputs(*piece)                # a piece at a time saves memory
        sync_gradients = here.world == 1 or i + 1 == run.accum         # at the last piece
        with nullcontext() if sync_gradients else net.no_sync():
            with here.autocast():
                loss, values = net(*inputs)
            scaler.scale(loss / run.accum).backward()
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0) + value / run.accum
    scaler.unscale_(optimizer)                             # only fp16 has a scale
    if run.clip_grad:
        torch.nn.utils.clip_grad_norm_(net.parameters(), run.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return metrics


def draw_keys(run, here, model, labels, epochs):
    """Yield the keys (b,2) of this process's images for each step of `epochs` (1, 2, ...). A key is
    a crop seed, which differs between the crops of an image, and an image's index."""
    n = len(labels)
    for epoch in epochs:
        seed = hash((run.seed, epoch - 1))
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=g)[:n - n % run.batch_size]
        crops = model.draw_images(order, labels, run, g)
        keys = [keys_of(ids, seed ^ i).split(run.batch_size) for i, ids in enumerate(crops)]
        for step in zip(*keys):
            yield torch.cat([here.part(x) for x in step])


def learning_rate(t, run):
    """Return the learning rate at time t in epochs, e.g. 3.7. It grows linearly from 0 to lr over
    warmup_epochs, as in the release. Then it is constant or falls to min_lr along half a cosine."""
    if t < run.warmup_epochs:
        return run.lr * t / run.warmup_epochs
    if run.schedule == "constant":
        return run.lr
    t = (t - run.warmup_epochs) / (run.epochs - run.warmup_epochs)
    return run.min_lr + (run.lr - run.min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def wrap(model, run, here):
    """Add gradient checkpointing, DistributedDataParallel and torch.compile, as requested."""
    dynamic = model.sizes_vary                             # code for one size is faster
    if run.grad_checkpointing:
        for module in model.modules():
            if isinstance(module, (Block, CrossBlock)):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if here.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if run.compile:
        torch._dynamo.config.optimize_ddp = not run.grad_checkpointing     # not both
        # CUDA graphs save small models the time of launching kernels. But they reuse memory, where
        # a second piece of --accum would overwrite the first one's gradients
        graphs = here.device.type == "cuda" and here.world == run.accum == 1 and not dynamic
        model = torch.compile(model, dynamic=dynamic, mode="reduce-overhead" if graphs else None)
    return model


def describe(run, here, model, data, val, steps):
    """Print what is trained, on what data, and where settings of recipe and method come from."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    names = [*data.classes[:5], "..."][:len(data.classes)]
    print(f"data    {run.data}: {run.images} train, {len(val.labels[:run.eval_images])} val in "
          f"{'memory' if data.in_memory else 'files'}, size {run.img_size}, patch {run.patch_size}"
          + f", {len(data.classes)} classes: {', '.join(names)}" * bool(names))
    print(f"model   {type(model).__name__}: {size:.2f} M parameters, {here.world} x {here.device}, "
          f"{here.dtype}, {steps} steps per epoch")
    for source in dict.fromkeys(run.origin.values()):
        names = [name for name in run.origin if run.origin[name] == source
                 and (name != "blr" or run.origin["lr"] == "derived")]         # otherwise unused
        print(f"{source:8}" + ", ".join(f"{name} {getattr(run, name)}" for name in names))


# --------------------------------------------------------------------------------------- settings
def settle(flags, sizes, paper, small, images, val_images, lr_scale=1.0, own={}, init={}, fixed={},
           **facts):
    """Return all settings of a run, in a record that nothing can change. Those of the recipe and of
    the method (`own`) come from the last layer that has them, which run.origin names. run.config
    holds the constructor's arguments: sizes, own and fixed. The recipe `small` replaces parts of
    `paper`, by default for encoders narrower than base."""
    chosen = {name: value for name, value in vars(flags).items() if value is not None}
    by_default = "paper" if sizes["dim"] >= SIZES["base"]["dim"] else "small"
    small = {} if chosen.get("recipe", by_default) == "paper" else small
    if "width_power" in small:                             # its lr is for the width of micro
        factor = (sizes["dim"] / SIZES["micro"]["dim"]) ** small["width_power"]
        small = {**small, "lr": small["lr"] / factor}
    layers = {"default": own, "paper": paper, "small": small,
              "init": {name: init[name] for name in own if name in init},      # of the --init file
              "flags": chosen}
    values = {**vars(flags), **DEFAULTS, "min_lr": 0.0}
    for layer in layers.values():
        values.update(layer)
    config = {**sizes, **{name: values[name] for name in own}, **fixed}
    if paper:                                              # not for nearest neighbours
        scale = lr_scale(**config) if callable(lr_scale) else lr_scale         # CrossMAE A.6
        layers["derived"] = derive({**paper, **small}, chosen, images, val_images, scale)
        values.update(layers["derived"])
        for low, high in (("warmup_epochs", "epochs"), ("min_lr", "lr")):
            require(values[low] < values[high] or values[high] == 0,
                    f"--{low} {values[low]} must be below --{high} {values[high]}")
    origin = {name: source for source, layer in layers.items() for name in layer
              if name in {*own, *paper, *small, "lr", "min_lr"} - RULES}
    values.update(**sizes, **facts, images=images, config=config, origin=origin)
    return namedtuple("Settings", values)(**values)


def derive(recipe, chosen, images, val_images, lr_scale):
    """Return the settings that depend on others, without those in `chosen` (tests/docs/RECIPE.md):
        batch_size: the recipe's or, if lower, the largest power of two up to a tenth of the images
        epochs: the recipe's, times for_images / images if there are fewer, at most up_to times
        warmup_epochs: the recipe's fraction of its epochs; a higher --epochs does not raise it
        lr: the recipe's or, without one or with --blr, blr * batch_size / 256 (MAE A.1) from the
            recipe's batch on; below, Adam's falls with the fourth root, down to the default batch
        eval_every: at most 100 validations a run, as a rule on no more images than it trains on
    """
    full, more = recipe["batch_size"], recipe.get("for_images", images) / images
    more = min(max(more, 1), recipe.get("up_to", 50))
    epochs = round(recipe["epochs"] * more)
    run_epochs, default = chosen.get("epochs", epochs), full
    if full > images / 10:
        default = min(images, 2 ** max(1, int(math.log2(images / 10))))
    lr = recipe.get("lr")
    if not lr or "blr" in chosen:
        values, batch = {**recipe, **chosen}, chosen.get("batch_size", default)
        clamped = min(max(batch, default), full)
        lr = values["blr"] * full / 256                    # at the recipe's batch
        lr *= (clamped / full) ** (1 if values["optimizer"] == "sgd" else 1 / 4)
        lr *= batch / clamped              # below the default and above the recipe's batch
    warmup_epochs = recipe["warmup_epochs"] * more * min(1, run_epochs / epochs)
    derived = dict(batch_size=default, lr=lr * lr_scale, epochs=epochs, warmup_epochs=warmup_epochs,
                   eval_every=max(1, run_epochs // 50, math.ceil(val_images / images)))
    return {name: value for name, value in derived.items()
            if name not in chosen and value != recipe.get(name)}


def encoder_sizes(flags, img_size, saved):
    """Return the encoder's constructor arguments. Of these sources, later ones win: the defaults,
    `saved` (a checkpoint's config or {}), --size, and flags for one argument, e.g. --dim."""
    patch_size = []
    for side in img_size:                                  # the patch is the next lower divisor
        most = 16 if side >= 128 else min(side, max(4, side // 8))
        fitting = (p for p in range(most, max(1, (most - 1) // 4), -1) if side % p == 0)
        patch_size.append(next(fitting, most))
    defaults = dict(patch_size=tuple(patch_size), in_chans=3, **SIZES["micro"])
    config = {**defaults, **saved, **SIZES.get(flags.size, {})}
    return {"img_size": img_size, **{x: getattr(flags, x, None) or config[x] for x in defaults}}


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_psnr(model, val, here, mask="random", mask_ratio=None, most=None):
    """Return the mean PSNRs in dB of masked pixels, of the image with visible pixels copied in, of
    the raw reconstruction, all leak-free, and of masked pixels filled with the visible ones' mean
    colour; and columns {title: up to 8 images} for recon.png. Masks depend on an image's index."""
    if model.reconstruct is None:                          # a method that predicts no pixels
        return {}, None
    columns, encoder, n = None, model.eval().encoder, 0
    sums = dict.fromkeys(("psnr_masked", "psnr_image", "psnr_decoded", "psnr_mean_colour"), 0)
    for ids, images, _ in val_batches(val, here, encoder.img_size, most):
        # 7 is arbitrary, but fixed: masks must not depend on --seed
        generators = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in generators])
        inputs, noise = normalize(images, model), noise.to(here.device)
        with here.autocast():
            decoded, masked = model.reconstruct(inputs, noise, mask_ratio, leak_free=True)
            if columns is None:            # pictures use the true patches' mean and variance
                shown, _ = model.reconstruct(inputs[:8], noise[:8], mask_ratio)
        truth, decoded = images / 255, denormalize(decoded, model)     # (b, C, H, W)
        is_masked = encoder.pixels_of(masked.float())                  # (b, 1, H, W)
        visible, share = 1 - is_masked, is_masked.mean((1, 2, 3))      # (b, 1, H, W), (b,)
        colour = (truth * visible).mean((2, 3), True) / visible.mean((2, 3), True)  # (b, C, 1, 1)
        images = (torch.where(is_masked > 0, decoded, truth), decoded,
                  torch.where(is_masked > 0, colour, truth))           # (b, C, H, W) each
        image, raw, filled = ((x - truth).square().mean((1, 2, 3)) for x in images)    # (b,) each
        for name, error in zip(sums, (image / share, image, raw, filled / share)):
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        n += len(ids)
        if columns is None:
            truth, is_masked, shown = truth[:8], is_masked[:8] > 0, denormalize(shown, model)
            columns = {"original": truth, "masked": torch.where(is_masked, 0.5, truth),
                       "decoded": shown, "completed": torch.where(is_masked, shown, truth)}
    return here.mean_over_processes(sums, n), columns


# ------------------------------------------------------------------------------------------- data
MEMORY = 4 * 1024 ** 3                                     # bytes that a part may take in memory
CHUNK = 64   # images that a worker reads at once: 16 workers with 4,096 each would take 9.9 GB
IMG_EXTENSIONS += (".jfif",)                               # JPEG files from browsers on Windows
HIDDEN = (".", "__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini")   # begin names of no photos
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "PPM")    # PIL's others may run other programs
SHAPES = {  # m, q, k of Gielis's superformula, the outline's radius `edge` in draw_shapes
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}


class ImageDataset(namedtuple("ImageDataset", "images labels classes")):
    """Images, their labels (N,), -1 if unlabelled, and class names. `images` is a uint8 tensor
    (N,C,H,W) or, for files, an array of N names: bytes, as each worker would copy a list."""

    @property
    def in_memory(self):
        return torch.is_tensor(self.images)

    @cached_property
    def broken(self):
        """Flags (N,), in memory that workers share, of the files that could not be read so far."""
        return torch.zeros(len(self.labels), dtype=torch.bool).share_memory_()

    def select(self, ids):
        """Return the data set of the images with indices ids (n,)."""
        images = self.images[ids if self.in_memory else ids.numpy()]
        return self._replace(images=images, labels=self.labels[ids])


class Transformed(Dataset):
    """The images of an ImageDataset, each read if it is a file, and transformed. Another image and
    its label replace an unreadable file, which a warning names: once, not in each epoch."""

    def __init__(self, data, transform):
        self.labels, self.broken, self.transform = data.labels, data.broken, transform
        self.images = data.images.cpu() if data.in_memory else data.images

    def __getitem__(self, key):
        """Return image i and its label for key = (seed, i). The seed is for random transforms."""
        seed, i = key
        # torch.manual_seed would also seed GPUs, which takes 100 times as long
        torch.default_generator.manual_seed(hash((seed, i)))
        for _ in range(10):
            image = self.images[i]
            try:
                image = image if torch.is_tensor(image) else read_image(os.fsdecode(image))
                return self.transform(image), self.labels[i].item()
            except InputError as error:
                if not self.broken[i]:
                    self.broken[i] = True
                    warnings.warn(f"{error}; another image replaces it")
                i = torch.randint(len(self.images), ()).item()
        raise InputError("cannot read ten images in a row: see the warnings")


def open_data(name, here, img_size=None, parts=("train", "val"), train_images=None):
    """Return an ImageDataset for each of the `parts` of --data, and the image size (H, W), by
    default set by the images. Images in memory are on the device and at most that large."""
    found, opened = find_images(name, parts, here, img_size), []
    first = found[0]
    sizes = [] if first.in_memory else sizes_of_files(first.images)
    img_size = img_size or (default_size(sizes) if sizes else tuple(first.images.shape[2:]))
    if train_images:                                       # before files are read into memory
        found[0] = first.select(random_order(len(first.labels))[:train_images])
    for data in found:
        images, labels, size = data.images, data.labels, 3 * len(data.labels) * math.prod(img_size)
        if not data.in_memory and size <= MEMORY and {*sizes} == {img_size}:       # need no crop
            keys = keys_of(torch.arange(len(labels))).split(CHUNK)
            loaded = load_images(data, keys, CHUNK, here, partial(center_crop, img_size=img_size))
            loaded = here.progress(loaded, "reading", total=len(keys))
            images, labels = map(torch.cat, zip(*loaded))
        elif data.in_memory and any(a > b for a, b in zip(images.shape[2:], img_size)):
            images = v2.functional.resize(images, img_size)            # antialiased
        if torch.is_tensor(images):
            images, labels = images.to(here.device).contiguous(), labels.cpu()
        opened.append(ImageDataset(images, labels, data.classes))
        opened[-1].broken = data.broken                    # which fit counts at its end
    return *opened, img_size


def find_images(name, parts, here, img_size):
    """Return an ImageDataset for each of the `parts` of --data: "train", "val", "all"."""
    root = Path(name)
    if name == "shapes":
        counts = {"train": 10_000, "val": 1_000}           # also the seeds
        found = [(*draw_shapes(counts[part], img_size or (32, 32), seed=counts[part]), [*SHAPES])
                 for part in parts]
    elif name in ("cifar10", "cifar100"):
        kind = getattr(torchvision.datasets, name.upper())
        for turn in range(here.world):                     # the first process on a disk downloads
            if turn == here.rank:
                try:
                    sets = [kind("data", train=part == "train", download=True) for part in parts]
                except OSError as error:
                    raise InputError(f"cannot download {kind.url}: {error}. Without a network, put "
                                     f"this file into the folder `data` here") from error
            here.gather(turn)                              # wait for it
        found = [(torch.tensor(x.data).movedim(3, 1), x.targets, x.classes) for x in sets]
    elif root.suffix == ".pt":
        found = open_tensors(root, parts)
    else:
        require(root.is_dir(), f"--data {name} is no folder, .pt file, shapes, cifar10 or cifar100")
        folders = {part: root / part for part in ("train", "val") if (root / part).is_dir()}
        if [*folders] == ["train"]:
            folders |= {"val": root / x for x in ("validation", "valid") if (root / x).is_dir()}
        if folders and not {*parts} <= {*folders}:
            seen = ", ".join(sorted(f"{x.name}/" for x in root.iterdir() if x.is_dir())[:5])
            raise InputError(f"--data {root} has no {' '.join({*parts} - {*folders})}/, but {seen}:"
                             f" rename a folder, split one (\"folds\" in tests/docs/HOWTO.md) or,"
                             f" to pretrain, pass one, --data {[*folders.values()][0]}")
        found = [list_part(folders[x]) for x in parts] if folders else list_photos(root, parts)
    return [ImageDataset(x if torch.is_tensor(x) else np.array([*map(os.fsencode, x)]),
                         torch.as_tensor(labels), classes) for x, labels, classes in found]


def open_tensors(file, parts):
    """Return (images, labels, classes) for each of the `parts` of a .pt file: a dict, whose values
    are uint8 images (N,C,H,W), alone or with labels (N,) and class names."""
    try:
        content = torch.load(file, weights_only=True)
        found = [content[part] for part in parts]
        found = [(x, [-1] * len(x), []) if torch.is_tensor(x) else x for x in found]
        found = [(torch.as_tensor(images), torch.as_tensor(labels), [*map(str, names)])
                 for images, labels, names in found]
    except Exception as error:                             # a wrong file can raise anything
        raise InputError(f'--data {file} must be {{"train": (images, labels, class names), "val": '
                         f'...}} with tensors: see tests/docs/HOWTO.md') from error
    for images, labels, classes in found:
        what = f"{images.dtype} {tuple(images.shape)} and {labels.dtype} {tuple(labels.shape)}"
        hint = " (use images.movedim(3, 1))" if images.ndim == 4 and images.shape[3] < 5 else ""
        require(images.ndim == 4 and images.dtype is torch.uint8 and len(images) > 0 and not hint
                and labels.shape == images.shape[:1] and not labels.is_floating_point(),
                f"--data {file} needs uint8 images (N,C,H,W), N integer labels; not {what}{hint}")
        require(not classes or 0 <= labels.min() and labels.max() < len(classes), f"--data {file}: "
                f"labels must be from 0 to {len(classes) - 1}, for {len(classes)} class names")
    return [(images, labels.long(), classes) for images, labels, classes in found]


def photos_in(root, least=1):
    """Return the image files below a folder, also through links, as tuples of names below it, e.g.
    ("cat", "1.png"), without HIDDEN ones and runs. A note counts other files."""
    photos, others, walked, seen = [], Counter(), [], set()
    for folder, inner, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        # links in a circle; a run, with its recon.png
        if real in seen or {"last.pt", "log.jsonl"} <= {*files}:
            inner.clear()
        else:
            walked.append((folder, files))
        seen.add(real)
    for folder, files in sorted(walked):
        above = Path(folder).relative_to(root).parts
        for name in [(*above, file) for file in sorted(files)]:
            if not any(x.startswith(HIDDEN) for x in name):
                if name[-1].lower().endswith(IMG_EXTENSIONS):
                    photos.append(name)
                else:
                    others[Path(name[-1]).suffix.lower() or "without ending"] += 1
    if others:
        print(f"note    {root}: {others.total()} files are left out because of their endings, e.g. "
              f"{', '.join(f'{n} {kind}' for kind, n in others.most_common(3))}")
    require(len(photos) >= least, f"--data {root} has {len(photos)} images "
                                  f"({' '.join(IMG_EXTENSIONS)}): at least {least} must be there")
    return photos


def list_part(folder):
    """Return (files, labels, classes) of train/ or val/. Folders with images are the classes, and
    images beside them are left out. Without such folders, images are unlabelled."""
    found = photos_in(folder)
    names = sorted((x for x in found if len(x) > 1), key=lambda x: x[0]) or found
    if len(names) < len(found):
        print(f"note    {folder}: {len(found) - len(names)} images beside its folders are left out")
    classes = sorted({x[0] for x in names if len(x) > 1})
    index = {name: i for i, name in enumerate(classes)}
    return [os.path.join(folder, *x) for x in names], [index.get(x[0], -1) for x in names], classes


def list_photos(root, parts):
    """Return (files, labels, classes) for each of the `parts` of a folder without labels: "train",
    "val" or "all". A hash of each file's name holds out 5% as val."""
    names = photos_in(root, least=2)                       # one for training, one for validation
    inside = ["/".join(x) for x in names if {"train", "training"} & {*map(str.lower, x[:-1])}]
    require(not inside, f"--data {root}: pass the folder that has train/ (in lower case), or the "
                        f"one with only training images, see {inside[:1]}")
    files = [os.path.join(root, *name) for name in names]
    codes = [zlib.crc32(os.fsencode("/".join(name))) for name in names]
    # a fixed threshold, so that new files do not move old ones; at least one image in each part
    limit = min(max(0.05 * 2 ** 32, min(codes)), max(codes) - 1)
    parts_of = {"train": [], "val": [], "all": files}
    for file, code in sorted(zip(files, codes)):
        parts_of["train" if code > limit else "val"].append(file)
    return [(parts_of[part], [-1] * len(parts_of[part]), []) for part in parts]


def sizes_of_files(files):
    """Return the sizes (h, w) of 50 of the image files, without those that cannot be read."""
    images = []
    for file in files[::math.ceil(len(files) / 50)]:
        with suppress(InputError):
            images.append(read_image(os.fsdecode(file)))
    images = images or [read_image(os.fsdecode(files[0]))]             # raises, and says why
    if all(image.max() - image.min() < 32 for image in images):        # uint8
        print("note    images have hardly any contrast: see \"16 bits\" in tests/docs/HOWTO.md")
    return [tuple(image.shape[1:]) for image in images]


def default_size(sizes):
    """Return the image size (H, W) for files of these sizes: the largest height and width, rounded
    down to a multiple of 16 (of 8 below 128 pixels) or, if one reaches 224, (224, 224)."""
    largest = [*map(max, zip(*sizes))]
    if max(largest) >= 224:
        return (224, 224)
    return tuple(max(8, side - side % (16 if side >= 128 else 8)) for side in largest)


def keys_of(ids, seed=0):
    """Return keys (n,2), the arguments of Transformed[...], for the indices ids (n,)."""
    return torch.stack([torch.full_like(ids, seed), ids], dim=1)


def load_images(data, batches, batch_size, here, transform=None):
    """Yield uint8 images (b,C,H,W) and labels (b,) on the device for each of `batches`: tensors of
    keys (b,2), of length batch_size except for the last. Images come from memory or, with a
    `transform`, from workers that read ahead."""
    cuda = here.device.type == "cuda"
    to_device = dict(device=here.device, non_blocking=cuda)
    if transform is None:
        for keys in batches:
            ids = keys[:, 1]
            yield data.images[ids.to(**to_device)], data.labels[ids].to(**to_device)
        return
    chunks = (chunk.tolist() for keys in batches for chunk in keys.split(CHUNK))
    workers = min(here.workers, len(data.labels) // CHUNK)
    # forked, whatever Python's default is: others forget what a script has replaced in this module
    context = "fork" if workers and sys.platform == "linux" else None
    loaded = iter(DataLoader(Transformed(data, transform), batch_sampler=chunks, pin_memory=cuda,
                             num_workers=workers, multiprocessing_context=context))
    for chunk in loaded:
        rest = islice(loaded, math.ceil(batch_size / CHUNK) - 1)
        images, labels = zip(chunk, *rest)
        yield [torch.cat([x.to(**to_device) for x in part]) for part in (images, labels)]


def random_order(n):
    """Return the indices 0, ..., n-1 in a random order, which is always the same."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def val_batches(data, here, img_size, most=None):
    """Yield this process's batches (indices, images, labels), at most 100 images each, from a fixed
    choice of at most `most` images."""
    ids = random_order(len(data.labels))[:most].tensor_split(here.world)[here.rank]
    batches = ids.split(100) if len(ids) else ()
    transform = None if data.in_memory else partial(center_crop, img_size=img_size)
    loaded = load_images(data, [keys_of(ids) for ids in batches], 100, here, transform)
    for ids in here.progress(batches, "evaluating"):
        images, labels = next(loaded)
        yield ids, v2.functional.resize(images, img_size), labels


def crop_batch(images, img_size, run, here):
    """Crop, resize and flip this process's in-memory images (b,C,H,W), each differently, to floats.
    Unlike crop_transform, stretches images to the aspect ratio of img_size, as in validation."""
    draws = here.part(torch.rand(run.batch_size, 5, device=images.device))
    area, stretch, y, x, coin = draws.unbind(1)                        # (b,) each, in [0, 1)
    area = run.crop + (1 - run.crop) * area                # as a fraction of the image area
    # square root of the aspect ratio w / h, drawn from 3/4 to 4/3; 1 without a crop
    stretch = ((2 * stretch - 1) * math.log(4 / 3) * (run.crop < 1) / 2).exp()
    h, w = (area.sqrt() / stretch).clamp(max=1), (area.sqrt() * stretch).clamp(max=1)
    y, x = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w)    # the crop's centre, in [-1, 1]
    w_flipped, zero = torch.where(coin < 0.5 * run.flip, -w, w), torch.zeros_like(h)
    theta = torch.stack([w_flipped, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *img_size), align_corners=False)
    H, W = images.shape[2:]
    for axis, side in ((0, W), (1, H)):        # like padding_mode "border", which MPS may lack
        points[..., axis].clamp_(1 / side - 1, 1 - 1 / side)
    return F.grid_sample(images.float(), points, align_corners=False)  # (b, C, h', w')


def crop_transform(img_size, run, *augmentations):
    """Return a transform for an image (C,h,w): random resized crop, flip, then `augmentations`."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if run.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (run.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * run.flip), *augmentations])


def center_crop(image, img_size, fraction=None):
    """Crop the centre of an image (C,h,w) in img_size's aspect ratio, and resize it. `fraction` of
    the sides is kept: by default 7/8 from >= 224 to <= 224 pixels (MAE's release), or 1."""
    (h, w), (H, W) = image.shape[1:], img_size
    fraction = fraction or (7 / 8 if max(h, w) >= 224 >= max(img_size) else 1)
    scale = fraction * min(h / H, w / W)
    crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
    return v2.functional.resize(crop(image), img_size, v2.InterpolationMode.BICUBIC)


def read_image(file):
    """Read an image file as RGB (3,H,W), uint8, rotated upright. Transparent images get a white
    background. JPEGs take a path that is twice as fast. Raises InputError if reading fails."""
    try:
        data = Path(file).read_bytes()
        if data[:2] == b"\xff\xd8" and hasattr(torchvision.io, "decode_image"):   # it may go
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
        image = ImageOps.exif_transpose(Image.open(file, formats=FORMATS))
        require(image.mode not in ("I", "F"), "32-bit images are not supported")
        if image.mode.startswith("I;16"):                  # convert("RGB") would clip 16 bits
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if "A" in image.mode or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return v2.functional.pil_to_tensor(image.convert("RGB"))
    except Exception as error:                             # a broken file can raise anything
        raise InputError(f"cannot read {file}: {error}") from error


def draw_shapes(n, img_size, seed):
    """Draw n images (n,3,H,W), uint8, of coloured shapes. Returns them and their labels (n,)."""
    g, (H, W), images = torch.Generator().manual_seed(seed), img_size, []
    rows, columns = torch.linspace(-1, 1, H)[:, None], torch.linspace(-1, 1, W)    # (H, 1), (W,)
    labels = torch.arange(n) % len(SHAPES)
    for label in labels.split(500):
        b = len(label)
        u = torch.rand(11, b, 1, 1, generator=g)                       # (b, 1, 1) each
        y, x = rows + 0.6 * u[0] - 0.3, columns + 0.6 * u[1] - 0.3     # (b, H, 1), (b, 1, W)
        outline = torch.tensor([*SHAPES.values()])[label]              # (b, 3)
        m, q, k = outline.T.reshape(3, b, 1, 1)                        # (b, 1, 1) each
        angle = m * (torch.atan2(y, x) + 7 * u[2]) / 4                 # (b, H, W)
        edge = (2 ** (k / 2 - 1) * (angle.cos().abs() ** k + angle.sin().abs() ** k)) ** (-1 / q)
        inside = ((0.56 + 0.3 * u[3]) * edge - torch.hypot(x, y)) * min(H, W) / 2
        inside = (inside + 0.5).clamp(0, 1).unsqueeze(1)               # (b, 1, H, W) soft edge
        ground, light = u[4:7].transpose(0, 1), 7 * u[7]               # (b, 3, 1, 1), (b, 1, 1)
        colour = (ground + 0.35 + 0.3 * u[8:11].transpose(0, 1)) % 1   # 0.35 or more apart
        shade = 0.12 * (x * light.cos() + y * light.sin()).unsqueeze(1)  # (b, 1, H, W)
        image = inside * (colour - shade) + (1 - inside) * (ground + shade)
        images.append((image.clamp(0, 1) * 255).round().byte())        # (b, 3, H, W)
    return torch.cat(images), labels


# ------------------------------------------------------------------------------------ checkpoints
@contextmanager
def open_run(flags, here, name):
    """Claim a run's folder, --name or `name`, and yield it. If the run fails before its first save,
    a new folder is removed. Raises InputError if it exists, without --resume or --overwrite, or if
    --overwrite would remove a file that the run starts from."""
    require(not (flags.resume and flags.overwrite), "--resume and --overwrite exclude each other")
    folder, created = Path(flags.runs, flags.name or name), False
    if here.rank == 0:
        with suppress(FileExistsError):                    # of two started at once, one goes on
            folder.mkdir(parents=True)
            created = True
        tempfile.TemporaryFile(dir=folder).close()         # fails now, not after the first epoch
    starts = filter(None, map(vars(flags).get, ("init", "checkpoint", "teacher", "data")))
    for path in [Path(x, part) for x in starts for part in ("", "last.pt")]:   # may be links
        require(not flags.overwrite or path.resolve().parent != folder.resolve(), f"--overwrite "
                f"would remove {path}, which this run reads: use another --name")
    require(any(here.gather(created)) or flags.resume or flags.overwrite, f"{folder} exists: "
            f"--resume continues this run, --overwrite replaces it, --name NAME starts another one")
    try:
        yield folder
    finally:
        if here.rank == 0:
            with suppress(OSError):                        # if it has files, it stays
                folder.rmdir()


def name_of(path):
    """Return what runs are named after: the folder of a last.pt, or any other file or folder."""
    path = Path(path).absolute()
    return path.parent.name if path.name == "last.pt" else re.sub(r"\.pth?$", "", path.name)


def save_run(run, here, model, data, optimizer, scaler, history, columns):
    """Write any copy for --keep_every, last.pt, from which --resume continues, log.jsonl and any
    new recon.png."""
    epoch = history[-1]["epoch"]
    if here.rank > 0:
        return
    require(all(x.isfinite().all() for x in model.state_dict().values()), f"weights are not finite "
            f"after epoch {epoch}: use --clip_grad or a lower --lr")
    save = partial(torch.save, dict(
        method=run.method, config=run.config, classes=data.classes, mean=model.mean, std=model.std,
        flags=dict(run._asdict(), folder=str(run.folder)), model=model.state_dict(),
        optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), epoch=epoch,
        history=history))
    if run.keep_every and epoch % run.keep_every == 0:     # first: a kill must not skip it
        write_file(run.folder / f"epoch_{epoch}.pt", save)
    write_file(run.folder / "last.pt", save)
    write_log(run, here, history, columns)


def write_log(run, here, history, columns):
    """Write log.jsonl and any new recon.png."""
    if here.rank > 0:
        return
    log = "".join(json.dumps(row) + "\n" for row in history)
    write_file(run.folder / "log.jsonl", lambda new: new.write_text(log))
    if columns:
        with suppress(ImportError):                        # a copy without tests/
            from tests.lib.pictures import save_picture
            write_file(run.folder / "recon.png", partial(save_picture, columns))


def write_file(path, write):
    """Let write(new) write a file beside `path`, and move it there: a killed run or a full disk
    leaves a whole file at `path`, the old one or the new one. An OSError names it."""
    new = path.with_stem(f"{path.stem}.tmp")               # PIL needs the ending
    try:
        write(new)
        os.replace(new, path)
    except (OSError, RuntimeError) as error:               # torch's writer raises the latter
        raise OSError(f"cannot write {path} (is the disk full?): {error}") from error
    finally:
        new.unlink(missing_ok=True)


def resume(run, here, model, data, optimizer, scaler):
    """Return the rows of the run's log so far. With --resume, loads last.pt; with --overwrite,
    removes an old run's files. Raises InputError if model, number of images, class names, seed,
    optimizer or teacher differ."""
    path, history = run.folder / "last.pt", []
    if run.overwrite and here.rank == 0:                   # all files have been read, also --init's
        for old in run.folder.iterdir():
            if old.suffix in (".pt", ".jsonl", ".svg", ".png"):
                old.unlink()
    if run.resume and not path.exists():
        print(f"note    nothing to resume: {path} does not exist, so a new run starts")
    elif run.resume:
        last = read_checkpoint(path)
        another = f"For a new run from it, pass --init (finetune.py: --checkpoint) {path}"
        require("optimizer" in last, f"cannot resume: {path} has only weights. {another}")
        old = {**last["flags"], **last["config"], "class names": last["classes"]}
        new = {name: getattr(run, name) for name in ("method", "images", "seed", "optimizer")}
        new |= {"class names": data.classes, **run.config}
        differ = [f"{name} was {old.get(name)}, is {new.get(name)}"
                  for name in {**last["config"], **new} if old.get(name) != new.get(name)]
        if run.teacher and not differ:                     # the file's weights are in the model
            taught = model.teacher.state_dict().items()
            if not all(x.cpu().equal(last["model"][f"teacher.{name}"]) for name, x in taught):
                differ = [f"--teacher was {last['flags']['teacher']}, with other weights"]
        require(not differ, f"cannot resume: {'; '.join(differ)}. The run's command was: "
                            f"{old['command']}. {another}")
        model.load_state_dict(last["model"])
        settings = optimizer.state_dict()["param_groups"]  # keep this command's weight decay
        optimizer.load_state_dict({**last["optimizer"], "param_groups": settings})
        if last["scaler"]:                                 # empty unless the run used fp16
            scaler.load_state_dict(last["scaler"])
        for name in ("init", "checkpoint"):
            given = run._asdict().get(name)
            if given not in (None, last["flags"].get(name)):
                print(f"note    --{name} {given} is not used: this run continues from {path}")
        history = last["history"]
        print(f"resumed after epoch {last['epoch']} of {run.epochs}")
    epochs = here.gather(history[-1]["epoch"] if history else 0)
    require(len({*epochs}) == 1, f"processes would go on after different epochs, {epochs}: do all "
                                 f"see the same {run.folder}?")
    return history


def read_checkpoint(path, heads=None, part="encoder"):
    """Load a checkpoint, or a folder's last.pt, without executing code in it. Returns a dict: path,
    model (state dict), config (constructor arguments), method (None if released), mean, ... Another
    `part`, e.g. a teacher, can be the encoder: then model has nothing else."""
    path = Path(path, "last.pt") if Path(path).is_dir() else Path(path)
    require(path.exists(), f"checkpoint {path} does not exist (released files: see REFERENCE.md)")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # in released files
            content = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:                             # a broken file can raise anything
        causes = re.findall(r"Unsupported .*?(?= was not|$)", str(error), re.M)
        causes += str(error).splitlines()                  # the first one is what torch refused
        raise InputError(f"{path} is damaged, or not only tensors and numbers (see tests/docs/"
                         f"REFERENCE.md): {' '.join(causes[:1])}") from error
    if "method" not in content:
        state = from_released(content.get("model", content.get("state_dict", content)))
        content = dict(method=None, config=sizes_of(state, path, heads), model=state)
        print(f"note    {path} names no method: assuming {content['config']['heads']} heads "
              f"(--heads), and ImageNet's mean and std")
    else:                                                  # one's own loop may save a wrapped model
        content["model"] = {re.sub(r"^(_orig_mod\.|module\.)+", "", name): x
                            for name, x in content["model"].items()}
    cls, config = METHODS.get(content["method"], MAE), {"in_chans": 3, **content["config"]}
    config.update({name: pair(config[name]) for name in ("img_size", "patch_size")})
    if part != "encoder":
        state, sizes = content["model"], config.get(part)
        prefix = f"{part}.encoder."                        # as in i-MAE
        if not any(name.startswith(prefix) for name in state):
            prefix = f"{part}."
        content["model"] = {name.replace(prefix, "encoder.", 1): x for name, x in state.items()
                            if name.startswith(prefix)}
        require(content["model"], f"--part {part}: {path} has only "
                                  f"{', '.join(dict.fromkeys(x.split('.')[0] for x in state))}")
        config.update(sizes if isinstance(sizes, dict) else {})        # i-MAE's teacher's
    return {**NO_CHECKPOINT, "mean": cls.mean, "std": cls.std, **content, "config": config,
            "path": str(path)}


def model_of(content, cls):
    """Return the model of a checkpoint, a `cls`. Raises InputError if `cls` lacks an argument or a
    parameter that the file has, as the file of a Classifier's subclass may."""
    spec = inspect.getfullargspec(cls.__init__)
    more = [] if spec.varkw else content["config"].keys() - {*spec.args, *spec.kwonlyargs}
    model = None if more else cls(**content["config"])
    more = sorted(more or content["model"].keys() - model.state_dict().keys())
    require(not more, f"{content['path']} has {', '.join(more[:3])}, which class {cls.__name__} "
                      f"lacks: use the file's own class (its script, or in load_model)")
    model.load_state_dict(content["model"])
    return model


def initialize(model, start):
    """Initialise `model` from the checkpoint `start`: the encoder, and the decoder or head if it
    matches. Prints what is newly initialised and what is not loaded."""
    ours, theirs = model.encoder.blocks[0].attn.heads, start["config"]["heads"]
    require(ours == theirs, f"{start['path']} has {theirs} heads, not --heads {ours}")
    state = model.from_mae(start["model"]) if hasattr(model, "from_mae") else start["model"]
    missing, unused = transfer(model, state, grid_of(**start["config"]))
    for text, names in (("new, with random weights", missing), ("left out of the file", unused)):
        parts = {re.match(r"(encoder\.)?\w+", name)[0] for name in names}
        if parts:                                          # e.g. encoder.norm, decoder_blocks, head
            print(f"{text}: {', '.join(sorted(parts))}")


# -------------------------------------------------------------------------------------- processes
class Process(namedtuple("Process", "rank world device dtype workers")):
    """This process, one of `world`: its device, precision, and number of workers."""

    def autocast(self):
        """Return the mixed-precision context set by --amp; it does nothing in float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    def part(self, batch):
        """Return this process's part of `batch`, a tensor for the whole batch."""
        return batch.chunk(self.world)[self.rank]

    def gather(self, value):
        """Return a list of each process's value."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def mean_over_processes(self, sums, n):
        """Return {name: sum / n}, with the sums and the counts n added up over all processes."""
        every = self.gather({"n": n, **{name: float(value) for name, value in sums.items()}})
        return {name: sum(x[name] for x in every) / sum(x["n"] for x in every) for name in sums}

    def progress(self, items, title, **options):
        """Return a progress bar over `items`, which is only visible in a terminal."""
        isatty = getattr(sys.stderr, "isatty", bool)       # stderr may be None
        terminal = sys.stderr is sys.__stderr__ and isatty()           # not IDLE's
        return tqdm(items, title, leave=False, disable=self.rank > 0 or not terminal, **options)


@contextmanager
def settings_restored():
    """Restore what a run changes in its process, e.g. for a notebook's next cell: random numbers,
    output, precision and attention."""
    with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stdout), ExitStack() as end:
        end.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        end.callback(torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.flash_sdp_enabled())
        yield


def start_processes(flags):
    """Return this process's Process. Under torchrun, joins the process group."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    given = os.environ if world > 1 else {}                # without torchrun, one GPU per machine
    rank, local_rank = (int(given.get(x, 0)) for x in ("RANK", "LOCAL_RANK"))
    if rank > 0:
        sys.stdout = open(os.devnull, "w")                 # only rank 0 prints
    exists = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    kind, amp = flags.device or next(name for name in exists if exists[name]), flags.amp
    require(exists[kind], f"--device {kind} is not available here")
    cuda = kind == "cuda"
    device = torch.device(f"cuda:{local_rank}" if cuda else kind)
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
        if amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    dtype = dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)
    known = getattr(torch.cpu, "get_capabilities", dict)()             # not in PyTorch 2.9
    if kind == "cpu" and amp == "bf16" and not known.get("avx512_bf16", True):
        print("note    --amp bf16 is slower than float32 here: this CPU has no bf16 instructions")
    # despite its name, this is also for CPUs: there, fused attention is slower in bf16
    torch.backends.cuda.enable_flash_sdp(cuda or dtype is not torch.bfloat16)
    if world > 1 and not dist.is_initialized():            # as after an earlier run of a script
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return Process(rank, world, device, dtype, flags.workers)


# ------------------------------------------------------------------------------- the command line
def in_range(kind, low, high=math.inf):
    """Return an argparse type: an int or float from low to high."""
    def number(text):                                      # argparse's errors show this name
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} must be between {low} and {high}")
        return value
    return number


def word_or_numbers(text):
    """Parse `all` as "all", `0,5,11` as (0, 5, 11) and `0.5` as (0.5,)."""
    with suppress(ValueError):
        return tuple(int(x) if re.fullmatch(r"-?\d+", x) else float(x) for x in text.split(","))
    return text


def size_in_pixels(text):
    """Parse `32` as (32, 32), and `32,48` or `32x48` as (32, 48)."""
    sides = word_or_numbers(text.replace("x", ","))
    return pair(sides[0] if len(sides) == 1 else sides)


def betas(text):
    """Parse `0.9,0.95` as (0.9, 0.95): two numbers from 0 to 1."""
    first, second = map(fraction, text.split(","))
    return first, second


count, not_negative = in_range(int, 1), in_range(float, 0)
fraction, path = in_range(float, 0, 1), os.path.expanduser         # notebooks do not expand ~
MEANT = {"--learning_rate": "--lr", "--output_dir": "--runs", "--input_size": "--img_size",
         "--gpu": "--device", "--checkpoint": "--init"}
PARSERS = {tuple: word_or_numbers, list: word_or_numbers, type(None): str}         # of arguments

# flags, {name: (type or choices, help)}
DATA = {
    "data": (path, "shapes, cifar10, cifar100, folder, .pt file; default: checkpoint's or shapes"),
    "eval_images": (count, "validate on at most X images; default: 1000 or, in finetune.py, all"),
    "workers": (in_range(int, 0), "processes that read image files; default: a share of the cores"),
    "device": (("cuda", "mps", "cpu"), "default: the first of these that is available; for the "
               "second GPU, set CUDA_VISIBLE_DEVICES=1"),
    "amp": (("auto", "bf16", "fp16", "fp32"), "precision; auto: bf16 or fp16 on CUDA, else fp32")}
ENCODER = {
    "seed": (in_range(int, 0, 2 ** 63 - 1), "seed for weights, crops, masks, order and --labels"),
    "train_images": (count, "train on only X images; default: all"),
    "img_size": (size_in_pixels, "side or height,width; default: the checkpoint's or the images'"),
    "patch_size": (size_in_pixels, "default: the checkpoint's or, about, 16 or side / 8 if lower"),
    "size": (tuple(SIZES), "size of the encoder; default: the checkpoint's, else micro"),
    "dim": (count, "width of the encoder; default: set by --size"),
    "depth": (count, "number of encoder blocks; default: set by --size"),
    "heads": (count, "number of attention heads in the encoder; default: set by --size")}
RUN = {
    "runs": (path, "folder for all runs"),
    "name": (path, "name of the run; default: made from method or checkpoint, mode and data"),
    "eval_every": (count, "validate and save every X epochs; default: at most 100 times"),
    "keep_every": (count, "keep last.pt as epoch_X.pt every X epochs; default: only last.pt"),
    "accum": (count, "number of pieces to split each batch into, to save memory"),
    "clip_grad": (not_negative, "maximum norm of the gradient; default: none"),
    "grad_checkpointing": (bool, "recompute each block's activations, to save memory"),
    "compile": (bool, "compile the model with torch.compile"),
    "resume": (bool, "continue the run from its last.pt: repeat its command and add this flag"),
    "overwrite": (bool, "replace any existing run of the same name")}
RECIPE = {
    "recipe": (("paper", "small"), "paper: default for base and wider encoders; small: ours"),
    "batch_size": (count, "images per step, in all processes; default: lower if images are few"),
    "optimizer": (tuple(OPTIMIZERS), "which optimizer to use"),
    "lr": (not_negative, "learning rate; default: from blr, see derive; small: for width 64"),
    "blr": (not_negative, "learning rate per 256 images of the recipe's batch, see lr"),
    "min_lr": (not_negative, "final learning rate of the cosine schedule; default: 0"),
    "betas": (betas, "betas of Adam and AdamW, e.g. 0.9,0.95"),
    "weight_decay": (not_negative, "weight decay; biases and norms are exempt"),
    "epochs": (in_range(int, 0), "passes over the images; small: more if fewer than 10,000"),
    "warmup_epochs": (not_negative, "epochs of linear warmup; default: less with fewer --epochs"),
    "crop": (fraction, "minimum area of the random crop, as a fraction of the image; 1: no crop"),
    "flip": (bool, "random horizontal flip")}
RULES = {"width_power", "for_images", "up_to"}             # of recipes, see settle and derive
IN_RECIPE = {*RECIPE, *RULES, "schedule", "mask", "clip_grad"} - {"recipe"}
PRETRAINING = {
    "init": (path, "checkpoint that initialises the encoder and, if it fits, the decoder"),
    "mask": (("random", "grid", "block"), "pattern of the masks")}
PAIRS = {
    "teacher": (path, "MAE checkpoint to distill from; default: none"),
    "same_class": (fraction, "fraction of pairs within one class; default: random pairs")}
# no workers outside Linux: starting them is slow there
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
DEFAULTS = dict(  # of flags that have one default for all runs, also of flags that a mode lacks
    workers=min(16, math.ceil(CORES / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))), amp="auto",
    seed=0, runs="runs", accum=1, grad_checkpointing=False, compile=False, resume=False,
    overwrite=False, mask="random", teacher=None, same_class=None)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors end with the help of the flags that are meant."""

    def error(self, message):
        known = self._option_string_actions
        for word in re.findall(r"(?<!\S)[-–—]+[\w-]{3,}", message):  # dashes: from a pasted text
            name = "--" + word.strip("-–—").replace("-", "_")
            for near in difflib.get_close_matches(MEANT.get(name, name), known, 1, 0.7):
                message += f"; see {near}: {known[near].help.replace('%%', '%')}"
        if re.match("unrecognized arguments: [^-–—]", message):        # e.g. --flip False
            message += ("; flags like --resume, --flip and --no-flip take no value, others one: "
                        "--img_size 48,64")
        super().error(message)


def new_parser(script, usage, words):
    """Return a parser, to which more flags are added once --method or --mode is known."""
    parser = Parser(
        script, f"python {script} {usage} [--flag X ...]", allow_abbrev=False, add_help=False,
        description="Defaults are in parentheses. small: those of --recipe small.")
    parser.set_defaults(**DEFAULTS, command=shlex.join(["python", script, *words]))
    return parser


def add_flags(parser, title, flags, defaults=DEFAULTS, small={}):
    """Add flags {name: (type or choices, help)}; the help shows `defaults` and `small`."""
    option = parser.add_argument_group(title).add_argument
    for name, (kind, text) in flags.items():
        values = [str(defaults[name])] if defaults.get(name) is not None else []
        if small.get(name, defaults.get(name)) != defaults.get(name):
            values.append(f"small: {small[name]}")
        text = f"{text.removesuffix('; default: none')} ({'; '.join(values)})" if values else text
        parsing = dict(type=kind, metavar="X")
        if kind is bool:
            parsing = dict(action=argparse.BooleanOptionalAction)
        elif isinstance(kind, tuple):
            parsing = dict(choices=kind)
        option(f"--{name}", help=text.replace("%", "%%"), **parsing)


def arguments_of(cls):
    """Return a model's own arguments, as {name: default} and as flags {name: (type, help)}: those
    that its constructor takes by keyword only, and its parents' if it passes on **kwargs. The type
    is that of the annotation or default, and the help is the entry under `Args:`."""
    own, flags, parents = {}, {}, cls.__mro__[:cls.__mro__.index(Method)]
    for part in (x for x in reversed(parents) if "__init__" in vars(x)):
        spec, hints = inspect.getfullargspec(part.__init__), get_type_hints(part.__init__)
        doc = inspect.getdoc(part) or ""
        texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", doc, re.M))
        own = own if spec.varkw else {}
        for name, default in (spec.kwonlydefaults or {}).items():
            kind = hints.get(name, type(default))
            if type(None) in get_args(kind):               # x | None
                kind = next(x for x in get_args(kind) if x is not type(None))
            kind = get_origin(kind) or kind                # tuple[int, ...] is parsed as a tuple
            if kind is int and not (default or 0) < 0:
                kind = in_range(int, 0)
            own[name], flags[name] = default, (PARSERS.get(kind, kind), texts.get(name, ""))
    own = {name: default for name, default in own.items() if name not in cls.unused}
    return own, {name: flags[name] for name in own}


def words_of(argv):
    """Return argv, a list or a string, as a list of words; by default, sys.argv[1:] or, in a
    notebook, where these are the kernel's, none."""
    if argv is None:
        argv = [] if "kernel_launcher" in sys.argv[0] else sys.argv[1:]
    if isinstance(argv, str) and sys.platform == "win32":  # a backslash escapes nothing: C:\photos
        return [word.replace("\0", "\\") for word in shlex.split(argv.replace("\\", "\0"))]
    return shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]


def shell(main, **options):
    """Run main(**options) for a script. Invalid input ends it with one line and exit code 2."""
    with suppress(AttributeError):                         # of IDLE's or a notebook's stdout
        # a log file shows each epoch at once, on Windows with any names of classes
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        main(**options)
    except (InputError, OSError) as error:
        cause = str(error).strip().splitlines()[-1]        # a worker's traceback comes first
        print(f"{Path(sys.argv[0]).name}: error: {cause}", file=sys.stderr)
        sys.exit(2)
    if dist.is_initialized():
        dist.destroy_process_group()


@settings_restored()
def main(argv=None):
    """Run `python train.py` with the arguments `argv` (see words_of), also from a notebook. Returns
    the last row of log.jsonl, a dict."""
    words = words_of(argv)
    parser = new_parser("train.py", f"--method {'|'.join(METHODS)}", words)
    parser.add_argument("--method", choices=METHODS, default="mae", help="(mae)")
    cls = METHODS[parser.parse_known_args(words)[0].method]            # decides on other flags
    require(issubclass(cls, Method), f"class {cls.__name__} must inherit from vit.Method, not from "
                                     f"nn.Module: see tests/docs/FORKS.md")
    recipe = {**cls.recipe, **cls.small_recipe}
    wrong = ", ".join(sorted(recipe.keys() - IN_RECIPE))
    require(not wrong, f"a recipe of class {cls.__name__} sets {wrong}, but it can set only "
                       f"{', '.join(sorted(IN_RECIPE))}")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.set_defaults(data="shapes", eval_images=1000)
    parser.set_defaults(**dict.fromkeys(DEFAULTS.keys() & recipe))     # the recipe's, see settle
    add = partial(add_flags, parser, defaults={**DEFAULTS, **cls.recipe}, small=cls.small_recipe)
    add("data and device", DATA)
    add("training images and encoder", ENCODER)
    add("run", RUN)
    add("recipe", RECIPE)
    own, flags = arguments_of(cls)
    add_flags(parser, f"arguments of {cls.__name__}", flags, own, cls.small_config)
    flags = PRETRAINING | (PAIRS if issubclass(cls, IMAE) else {})
    add("pretraining", {name: flags[name] for name in flags if name not in cls.unused})
    return pretrain(parser.parse_args(words))


if __name__ == "__main__":
    shell(main)
