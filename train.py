"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

Start at the top. `pretrain` claims a run's folder, opens the data and chooses all settings, and
`fit` trains: its two loops, over epochs and over steps, fit on one page. The other sections are:
settings, evaluation, data, checkpoints, processes, command line.

Three records describe a run: `flags` is the command line with DEFAULTS, `run` holds every setting,
which `settle` chooses and nothing can change, and `here` is this process and its device.

Each step is seeded from (seed, epoch, step). Each process draws random numbers for the whole batch
and keeps its part, so N processes pretrain like one. Random crops of image files are seeded from
(seed, epoch, image). Resuming needs no saved random state. finetune.py uses the same loop.

A method is a class like those in METHODS. tests/docs/FORKS.md lists what it must have.
"""

import argparse
import ast
import inspect
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import warnings
import zlib
from collections import namedtuple
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
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
from torchvision.datasets.folder import IMG_EXTENSIONS, ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from crossmae import CrossBlock, CrossMAE
from hypermae import HyperMAE
from imae import IMAE, teacher_state
from mae import MAE
from minr import MINR
from vit import (SIZES, Block, InputError, Method, ViT, count_extra_tokens, denormalize,
                 from_released, grid_of, mask_noise, normalize, pair, require, sizes_of, transfer)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}
OPTIMIZERS = {  # functions of the parameter groups and a run's settings
    "adamw": lambda groups, run: torch.optim.AdamW(groups, run.lr, run.betas, fused=True),
    "adam": lambda groups, run: torch.optim.Adam(groups, run.lr, run.betas, fused=True),
    "sgd": lambda groups, run: torch.optim.SGD(groups, run.lr, momentum=0.9, fused=True)}
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
        data, val, img_size = open_data(flags.data, here, size, train_images=flags.train_images)
        run, model = build(flags, here, img_size, len(data.labels), start, fixed, folder)
        if flags.init:
            initialize(model, start)
        if flags.teacher:                                  # replaces one in the --init file
            model.teacher.load_state_dict(teacher_state(teacher, run.config))
            print(f"teacher {flags.teacher}")
        transform = None if data.in_memory else crop_transform(img_size, run)
        return fit(run, here, model, data, val, transform)


def build(flags, here, img_size, images, start=NO_CHECKPOINT, fixed={}, folder=None):
    """Choose the settings of a run of --method, build its model, and return both. Defaults are the
    sizes of the checkpoint `start` and, if it is of the same method, its other arguments."""
    cls, config = METHODS[flags.method], start["config"]
    own, _ = arguments_of(cls)
    low_res = {name: cls.low_res_config[name] for name in own if name in cls.low_res_config}
    init = config if start["method"] == flags.method else {}
    sizes = encoder_sizes(flags, img_size, {**config, "in_chans": len(cls.mean)})
    run = settle(flags, sizes, cls.recipe, {**low_res, **cls.low_res_recipe}, images, cls.lr_scale,
                 own=own, init=init, fixed=fixed, folder=folder)
    torch.manual_seed(run.seed)
    return run, cls(**run.config).to(here.device)


def fit(run, here, model, data, val, transform=None):
    """Train `model`, a vit.Method, for --epochs epochs, or the rest of them with --resume. Returns
    the last row of log.jsonl. Workers apply `transform` to each image, e.g. crop_transform's.
    Without one, images must be in memory, and crop_batch crops them."""
    n, img_size, grid = len(data.labels), model.encoder.img_size, model.encoder.grid
    require(run.batch_size <= n and run.batch_size % (here.world * run.accum) == 0,
            f"--batch_size {run.batch_size} must be at most {n} (training images) and "
            f"divisible by {here.world} processes x --accum {run.accum}")
    own_batch = run.batch_size // here.world               # this process's part
    steps = n // run.batch_size if run.epochs else 0       # epoch 0 only evaluates and saves
    optimizer = OPTIMIZERS[run.optimizer](model.parameter_groups(run), run)
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype is torch.float16)
    describe(run, here, model, data, val, steps)
    history = resume(run, model, data, optimizer, scaler) if run.resume else []
    net, saved_at = wrap(model, run, here), time.perf_counter()
    lr, first = 0.0, history[-1]["epoch"] + 1 if history else min(1, run.epochs)
    epochs = range(first, run.epochs + 1)
    keys = draw_keys(run, here, model, data.labels, epochs)
    batches = load_images(data, keys, own_batch * model.crops, here, transform)
    for epoch in epochs:
        net.train()
        sums, waited, began = {}, 0.0, time.perf_counter()
        bar = here.progress(range(1, steps + 1), f"epoch {epoch}/{run.epochs}",
                            unit="img", unit_scale=run.batch_size)
        for step in bar:
            start = time.perf_counter()
            images, labels = next(batches)
            waited += time.perf_counter() - start

            lr = learning_rate(epoch - 1 + (step - 1) / steps, run)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)         # finetune: layer decay
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

            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
            if step % 20 == 0 or step == steps:
                loss = metrics["loss"].item()              # the only host-device sync
                # in fp16, the scaler skips steps that overflow and halves its scale, at worst to 1
                require(math.isfinite(loss) or scaler.get_scale() > 1, f"the loss is {loss} at "
                        f"epoch {epoch}, step {step}: use --clip_grad or a lower --lr")
                bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}", refresh=False)
        seconds = time.perf_counter() - began
        row = {"epoch": epoch, "lr": lr, **here.mean_over_processes(sums, steps),
               "wait": round(waited / seconds, 3),
               "img_s": round(steps * run.batch_size / seconds, 1)}
        history.append(row)
        validate = epoch % run.eval_every == 0 or epoch == run.epochs
        keep, columns = run.keep_every and epoch % run.keep_every == 0, None
        if validate:
            scores, columns = evaluate_psnr(model, val, here, run.mask, most=run.eval_images)
            row.update(scores, **model.scores(data, val, here, run))
        if validate or keep or time.perf_counter() - saved_at > 60:
            save_run(run, here, model, data, optimizer, scaler, history, columns)
            saved_at = time.perf_counter()
        shown = ("loss", "psnr_masked", "top1", "img_s", "wait")
        print(f"epoch {epoch}:", ", ".join(f"{x} {row[x]:.4g}" for x in shown if x in row))
    if here.rank == 0:
        with suppress(ImportError, InputError):            # a copy without tests/; an empty log
            from tests.curves import draw_run              # only here: tests import train
            draw_run(run.folder)
    print("see    ", *sorted(run.folder.glob("*.*")))
    return history[-1]


def train_step(run, here, model, net, optimizer, scaler, batch, seed):
    """Take an optimizer step, in --accum pieces, with `batch` from model.draw_batch. `net` is the
    model as returned by wrap. Returns metrics {name: value} on the device. Never synchronises host
    and device."""
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
    """Yield, for each step of `epochs` (1, 2, ...), the keys (b,2) of this process's images. A key
    is a crop seed and an image's index. If a step needs several crops, those of the first come
    first, and each has its own seed."""
    for epoch in epochs:
        seed = hash((run.seed, epoch - 1))
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=g)
        order = order[:len(labels) - len(labels) % run.batch_size]
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
    if run.grad_checkpointing:
        for module in model.modules():
            if isinstance(module, (Block, CrossBlock)):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if here.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if run.compile:
        torch._dynamo.config.optimize_ddp = not run.grad_checkpointing
        # CUDA graphs save small models the time of launching kernels. But they reuse memory, where
        # a second piece of --accum would overwrite the first one's gradients
        graphs = here.device.type == "cuda" and here.world == 1 and run.accum == 1
        model = torch.compile(model, dynamic=False, mode="reduce-overhead" if graphs else None)
    return model


def describe(run, here, model, data, val, steps):
    """Print what is trained, on what data, and where settings of recipe and method come from."""
    encoder = model.encoder
    size = sum(p.numel() for p in model.parameters()) / 1e6
    labels = val.labels[random_order(len(val.labels))[:run.eval_images]]
    share = 100 * labels.unique(return_counts=True)[1].max() / len(labels)
    print(f"data    {run.data}: {run.images} train, {len(labels)} val"
          f"{f' (largest class {share:.1f} %)' if val.classes else ''}, {encoder.img_size} "
          f"pixels in patches of {encoder.patch_size}, "
          f"in {'memory' if data.in_memory else 'files'}")
    print(f"model   {type(model).__name__}: {size:.2f} M parameters, {here.world} x {here.device}, "
          f"{here.dtype}, {steps} steps per epoch")
    for source in dict.fromkeys(run.origin.values()):
        names = [name for name in run.origin if run.origin[name] == source
                 and (name != "blr" or run.origin["lr"] == "derived")]         # otherwise unused
        print(f"{source:8}" + ", ".join(f"{name} {getattr(run, name)}" for name in names))


# --------------------------------------------------------------------------------------- settings
def settle(flags, sizes, recipe, low_res, images, lr_scale=1.0, width_power=0.5, own={}, init={},
           fixed={}, least_eval_every=1, **facts):
    """Return all settings of a run, in a record that nothing can change. `run.config` holds the
    constructor's arguments: sizes, own and fixed. Settings of the recipe and of the method (`own`)
    come from the last layer that has them, which `run.origin` names. The low_res layer's lr is for
    micro: for other encoders, it is divided by (width / 64) ** width_power."""
    relative_width = sizes["dim"] / SIZES["micro"]["dim"]
    if max(sizes["img_size"]) >= 128 and relative_width > 1:
        low_res = {}
    if "lr" in low_res:
        low_res = {**low_res, "lr": low_res["lr"] / relative_width ** width_power}
    chosen = {name: value for name, value in vars(flags).items() if value is not None}
    layers = {"default": own,              # arguments of the method
              "recipe": recipe,            # how to train
              "low_res": low_res,          # for small images, or an encoder no wider than micro
              "init": {name: init[name] for name in own if name in init},      # of the --init file
              "flags": chosen}
    values = {**vars(flags), "min_lr": 0.0}
    for layer in layers.values():
        values.update(layer)
    config = {**sizes, **{name: values[name] for name in own}, **fixed}
    if recipe:                                             # not for nearest neighbours
        scale = lr_scale(**config) if callable(lr_scale) else lr_scale         # CrossMAE A.6
        layers["derived"] = derive({**recipe, **low_res}, chosen, images, scale, least_eval_every)
        values.update(layers["derived"])
    origin = {name: source for source, layer in layers.items() for name in layer
              if name in {*own, *recipe, "lr", "min_lr"}}
    values.update(**sizes, **facts, images=images, config=config, origin=origin)
    return namedtuple("Settings", values)(**values)


def derive(recipe, chosen, images, lr_scale, least_eval_every):
    """Return the settings that depend on others, except for those that flags have `chosen`:
        batch_size: the recipe's or, if lower, the largest power of two up to a tenth of the images
        lr: the recipe's or, without one or with --blr, blr * batch_size / 256 (MAE A.1) for the
            recipe's batch and larger ones. For smaller ones, it falls with the batch's fourth root
            down to the default batch, and below in proportion. With SGD, always in proportion
        warmup_epochs: shorter with fewer epochs than in the recipe, in proportion
        eval_every: so that a run has fewer than 100 validations
    """
    values, full = {**recipe, **chosen}, recipe["batch_size"]
    default = full
    if full > images / 10:
        default = min(images, 2 ** max(1, int(math.log2(images / 10))))
    lr = recipe.get("lr")
    if not lr or "blr" in chosen:
        batch = chosen.get("batch_size", default)
        clamped = min(max(batch, default), full)
        lr = values["blr"] * full / 256                    # at the recipe's batch
        lr *= (clamped / full) ** (1 if values["optimizer"] == "sgd" else 1 / 4)
        lr *= batch / clamped                              # 1 from the default to the recipe's
    warmup_epochs = recipe["warmup_epochs"] * min(1, values["epochs"] / recipe["epochs"])
    derived = dict(batch_size=default, lr=lr * lr_scale, warmup_epochs=warmup_epochs,
                   eval_every=max(1, values["epochs"] // 50, least_eval_every))
    return {name: value for name, value in derived.items()
            if name not in chosen and value != recipe.get(name)}


def encoder_sizes(flags, img_size, saved):
    """Return the encoder's constructor arguments. Each comes from the last of these that sets it:
    the defaults, `saved` (a checkpoint's config or {}), --size, its own flag."""
    patch_size = tuple(16 if side >= 128 else max(4, side // 8) for side in img_size)
    defaults = dict(patch_size=patch_size, in_chans=3, **SIZES["micro"])
    config = {**defaults, **saved, **SIZES.get(flags.size, {})}
    return {"img_size": img_size, **{x: getattr(flags, x, None) or config[x] for x in defaults}}


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_psnr(model, val, here, mask="random", mask_ratio=None, most=None):
    """Return the mean PSNRs in dB of masked pixels, of the image with visible pixels copied in, and
    of the raw reconstruction, all leak-free (see MAE.reconstruct), and columns {title: up to 8
    images} for recon.png. Masks follow the pattern `mask` and depend only on the image's index."""
    if model.reconstruct is None:                          # a method that predicts no pixels
        return {}, None
    columns, encoder, n = None, model.eval().encoder, 0
    sums = {"psnr_masked": 0, "psnr_image": 0, "psnr_decoded": 0}      # zeros without images
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
        completed = torch.where(is_masked > 0, decoded, truth)
        image_error = (completed - truth).square().mean((1, 2, 3))        # (b,) 0 where visible
        decoded_error = (decoded - truth).square().mean((1, 2, 3))     # (b,)
        errors = {"psnr_masked": image_error / is_masked.mean((1, 2, 3)),
                  "psnr_image": image_error, "psnr_decoded": decoded_error}
        for name, error in errors.items():
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        n += len(images)
        if columns is None:
            truth, is_masked, shown = truth[:8], is_masked[:8] > 0, denormalize(shown, model)
            columns = {"original": truth, "masked": torch.where(is_masked, 0.5, truth),
                       "decoded": shown, "completed": torch.where(is_masked, shown, truth)}
    return here.mean_over_processes(sums, n), columns


# ------------------------------------------------------------------------------------------- data
MEMORY = 4 * 1024 ** 3                                     # bytes that a part may take in memory
CHUNK = 64   # images that a worker reads at once: 16 workers with 4,096 each would take 9.9 GB
SHAPES = {  # m, q, k of Gielis's superformula, the outline's radius `edge` in draw_shapes
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}


class ImageDataset:
    """Images, their labels (N,), -1 if unlabelled, and class names. `images` is a uint8 tensor
    (N,C,H,W) or a list of N files."""

    def __init__(self, images, labels, classes):
        if isinstance(images, list):       # reference counts would copy all strings to each worker
            images = np.array([*map(os.fsencode, images)])
        self.images, self.labels, self.classes = images, torch.as_tensor(labels), classes
        self.in_memory = torch.is_tensor(images)

    def select(self, ids):
        """Return the data set of the images with indices ids (n,)."""
        images = self.images[ids if self.in_memory else ids.numpy()]
        return ImageDataset(images, self.labels[ids], self.classes)


class Transformed(Dataset):
    """The images of `data`, an ImageDataset, each read if it is a file, and transformed. A warning
    names an unreadable file; another image and its label replace it."""

    def __init__(self, data, transform):
        self.images, self.labels, self.transform = data.images, data.labels, transform
        if data.in_memory:
            self.images = data.images.cpu()

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
                warnings.warn(f"{error}; another image replaces it")
                i = torch.randint(len(self.images), ()).item()
        raise InputError("cannot read ten images in a row: see the warnings")


def open_data(name, here, img_size=None, parts=("train", "val"), train_images=None):
    """Return an ImageDataset for each of the `parts` of --data, and the image size (H, W). Images
    in memory are on the device and at most that large. The default size is that of the images."""
    found = [ImageDataset(*part) for part in find_images(name, parts, here, img_size)]
    first, last = found[0], found[-1]
    require(first.classes == last.classes, f"--data {name}: classes differ between train and val, "
            f"e.g. {sorted({*first.classes} ^ {*last.classes})[:5]}")
    sizes = [] if first.in_memory else sizes_of_files(first.images)
    default = tuple(first.images.shape[2:]) if first.in_memory else default_size(sizes)
    img_size, opened = img_size or default, []
    if train_images:                                       # before files are read into memory
        found[0] = first.select(random_order(len(first.labels))[:train_images])
    for data in found:
        images, labels = data.images, data.labels
        size_in_memory = 3 * len(labels) * math.prod(img_size)         # in bytes
        if not data.in_memory and size_in_memory <= MEMORY and stay_whole(sizes, img_size):
            keys = keys_of(torch.arange(len(labels))).split(CHUNK)
            loaded = load_images(data, keys, CHUNK, here, partial(center_crop, img_size=img_size))
            loaded = here.progress(loaded, "reading", total=len(keys))
            images, labels = map(torch.cat, zip(*loaded))
        elif data.in_memory and any(a > b for a, b in zip(images.shape[2:], img_size)):
            images = v2.functional.resize(images, img_size)            # antialiased
        if torch.is_tensor(images):
            images, labels = images.to(here.device).contiguous(), labels.cpu()
        opened.append(ImageDataset(images, labels, data.classes))
    return *opened, img_size


def find_images(name, parts, here, img_size):
    """Return (images, labels, classes) for each of the `parts` of --data, "train" and "val"."""
    root = Path(name)
    if name == "shapes":
        counts = {"train": 10_000, "val": 1_000}           # also the seeds
        return [(*draw_shapes(counts[part], img_size or (32, 32), seed=counts[part]), [*SHAPES])
                for part in parts]
    if name in ("cifar10", "cifar100"):
        kind = getattr(torchvision.datasets, name.upper())
        for turn in range(here.world):                     # the first process on a disk downloads
            if turn == here.rank:
                sets = [kind("data", train=part == "train", download=True) for part in parts]
            here.gather(turn)                              # wait for it
        return [(torch.tensor(x.data).movedim(3, 1), x.targets, x.classes) for x in sets]
    if root.suffix == ".pt":
        return open_tensors(root, parts)
    require(root.is_dir(), f"--data {name} is no folder, .pt file, shapes, cifar10 or cifar100")
    if (root / "train").is_dir() or (root / "val").is_dir():
        valid = partial(is_photo, root=root)
        folders = [ImageFolder(root / part, is_valid_file=valid) for part in parts]
        return [([file for file, _ in x.samples], x.targets, x.classes) for x in folders]
    return list_photos(root, parts)


def open_tensors(file, parts):
    """Return (images, labels, classes) for each of the `parts` of a .pt file: a dict, whose values
    are uint8 images (N,C,H,W), alone or with labels (N,) and class names."""
    try:
        content, found = torch.load(file, weights_only=True), []
        for part in parts:
            images, labels, classes = content[part], None, []
            if not torch.is_tensor(images):
                images, labels, classes = images
            labels = torch.full(images.shape[:1], -1) if labels is None else labels
            found.append((images, labels, [str(name) for name in classes]))
    except Exception as error:                             # a wrong file can raise anything
        raise InputError(f"--data {file} must be a dict of tensors with {' and '.join(parts)}: see "
                         f"tests/docs/HOWTO.md") from error
    for images, labels, classes in found:
        what = f"{images.dtype} {tuple(images.shape)} and {labels.dtype} {tuple(labels.shape)}"
        require(images.ndim == 4 and images.dtype is torch.uint8 and len(images) > 0
                and labels.shape == images.shape[:1] and not labels.is_floating_point(),
                f"--data {file} needs uint8 images (N,C,H,W) and N integer labels, not {what}")
        require(not classes or 0 <= labels.min() and labels.max() < len(classes), f"--data {file}: "
                f"labels must be from 0 to {len(classes) - 1}, for {len(classes)} class names")
    return [(images, labels.long(), classes) for images, labels, classes in found]


def is_photo(file, root):
    """Return whether a file below root is an image and not hidden, as a Mac's ._photo.jpg is."""
    return file.lower().endswith(IMG_EXTENSIONS) and os.sep + "." not in file[len(str(root)):]


def list_photos(root, parts):
    """Return (files, labels, classes) for each of the `parts` of a folder without labels: "train",
    "val" or "all". Reads subfolders, also links. A hash of each file's name holds out 5% as val."""
    files = []
    for folder, folders, names in os.walk(root, followlinks=True):
        require("train" not in folders, f"--data {root}: pass {folder}, which has train/")
        folders[:] = [x for x in folders if not x.startswith(".")]     # e.g. .ipynb_checkpoints
        for name in names:
            if is_photo(os.path.join(folder, name), root):
                files.append(os.path.join(folder, name))
    require(len(files) > 1, f"--data {root} has {len(files)} images ({' '.join(IMG_EXTENSIONS)}): "
                            f"at least two are needed")
    names = [file[len(str(root)) + 1:].replace(os.sep, "/") for file in files]
    codes = [zlib.crc32(os.fsencode(name)) for name in names]
    # a fixed threshold, so that new files do not move old ones; at least one image in each part
    limit = min(max(0.05 * 2 ** 32, min(codes)), max(codes) - 1)
    found = {"train": [], "val": [], "all": files}
    for file, code in sorted(zip(files, codes)):
        found["train" if code > limit else "val"].append(file)
    return [(found[part], [-1] * len(found[part]), []) for part in parts]


def sizes_of_files(files):
    """Return the sizes (h, w) of 50 of the image files, without those that cannot be read."""
    sizes = []
    for file in files[::math.ceil(len(files) / 50)]:
        with suppress(InputError):
            sizes.append(read_image(os.fsdecode(file)).shape[1:])
    require(sizes, f"cannot read {os.fsdecode(files[0])}, nor any other of up to 50 images")
    return sizes


def default_size(sizes):
    """Return the image size (H, W) for files of these sizes: the largest height and width, rounded
    down to a multiple of 16 (of 8 below 128 pixels) or, if one reaches 224, (224, 224)."""
    largest = [*map(max, zip(*sizes))]
    if max(largest) >= 224:
        return (224, 224)
    return tuple(max(8, side - side % (16 if side >= 128 else 8)) for side in largest)


def stay_whole(sizes, img_size):
    """Return whether files of these sizes need no crop: all are below 224 pixels, have the image
    size's aspect ratio and, rounded down as above, are not larger."""
    (H, W), (h, w) = img_size, default_size(sizes)
    return h <= H and w <= W and max(map(max, sizes)) < 224 and all(
        h * W == w * H for h, w in sizes)


def keys_of(ids, seed=0):
    """Return keys (n,2), the arguments of ImageDataset[...], for the indices ids (n,)."""
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
    loaded = iter(DataLoader(Transformed(data, transform), batch_sampler=chunks,
                             num_workers=workers, pin_memory=cuda))
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
    """Return a transform for an image (C,h,w): random resized crop and flip, then others."""
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
        image = ImageOps.exif_transpose(Image.open(file))
        require(image.mode != "F", "floating-point images are not supported")
        if image.mode.startswith("I"):                     # 16 bits; convert("RGB") would clip them
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
    a new folder is removed. Raises InputError if it exists, without --resume or --overwrite."""
    folder, created = Path(flags.runs, flags.name or name), False
    if here.rank == 0:
        with suppress(FileExistsError):                    # of two started at once, one goes on
            folder.mkdir(parents=True)
            created = True
    require(any(here.gather(created)) or flags.resume or flags.overwrite, f"{folder} exists: "
            f"--resume continues this run, --overwrite replaces it, --name NAME starts another one")
    try:
        yield folder
    finally:
        if created:
            (folder / "last.pt.tmp").unlink(missing_ok=True)
            with suppress(OSError):                        # if it has files, it stays
                folder.rmdir()


def name_of(path):
    """Return what runs are named after: a last.pt's folder, otherwise the file or folder."""
    path = Path(path).absolute()
    return path.parent.name if path.name == "last.pt" else re.sub(r"\.pth?$", "", path.name)


def save_run(run, here, model, data, optimizer, scaler, history, columns):
    """Write last.pt, from which --resume continues, its copy for --keep_every, log.jsonl and any
    new recon.png. A killed run leaves a whole last.pt, the old one or the new one."""
    folder, epoch = run.folder, history[-1]["epoch"]
    if here.rank > 0:
        return
    require(all(x.isfinite().all() for x in model.state_dict().values()), f"weights are not finite "
            f"after epoch {epoch}: use --clip_grad or a lower --lr")
    torch.save(dict(method=run.method, config=run.config, classes=data.classes,
                    mean=model.mean, std=model.std, flags=dict(run._asdict(), folder=str(folder)),
                    model=model.state_dict(), optimizer=optimizer.state_dict(),
                    scaler=scaler.state_dict(), epoch=epoch, history=history),
               folder / "last.pt.tmp")
    if run.keep_every and epoch % run.keep_every == 0:
        shutil.copyfile(folder / "last.pt.tmp", folder / f"epoch_{epoch}.pt")
    os.replace(folder / "last.pt.tmp", folder / "last.pt")
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
    if columns:                                            # a row for each image
        images = torch.stack([*columns.values()], dim=1).flatten(0, 1)
        images = images[:, :3 if images.shape[1] >= 3 else 1]
        images = F.interpolate(images, scale_factor=max(1, 96 // max(images.shape[2:])))
        torchvision.utils.save_image(images, folder / "recon.png", nrow=len(columns))


def resume(run, model, data, optimizer, scaler):
    """Load the run's last.pt, and return the rows of its log, or [] if there is none. Raises
    InputError if model, number of images, class names, seed or optimizer differ."""
    path = run.folder / "last.pt"
    if not path.exists():
        print(f"note    nothing to resume: {path} does not exist, so a new run starts")
        return []
    last = read_checkpoint(path)
    old = {**last["flags"], **last["config"], "class names": last["classes"]}
    new = {name: getattr(run, name) for name in ("method", "images", "seed", "optimizer")}
    new.update({"class names": data.classes, **run.config})
    differ = [f"{name} was {old.get(name)}, is {new.get(name)}"
              for name in {**last["config"], **new} if old.get(name) != new.get(name)]
    require(not differ, f"cannot resume: {'; '.join(differ)}. The run's command was: "
                        f"{old['command']}")
    model.load_state_dict(last["model"])
    settings = optimizer.state_dict()["param_groups"]      # keep this command's weight decay
    optimizer.load_state_dict({**last["optimizer"], "param_groups": settings})
    if last["scaler"]:                                     # empty unless the run used fp16
        scaler.load_state_dict(last["scaler"])
    print(f"resumed after epoch {last['epoch']} of {run.epochs}")
    return last["history"]


def read_checkpoint(path, heads=None, part="encoder"):
    """Load a checkpoint, or a folder's last.pt, without executing any code in the file. Returns a
    dict with path, method (None for a released file), config (constructor arguments), model (state
    dict), mean, std, flags and more. A `part` such as a momentum teacher can be the encoder."""
    path = Path(path, "last.pt") if Path(path).is_dir() else Path(path)
    require(path.exists(), f"checkpoint {path} does not exist: train.py writes runs/NAME/last.pt")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # in released files
            content = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:                             # a broken file can raise anything
        raise InputError(f"{path} is damaged, or no checkpoint of tensors and numbers") from error
    if "method" not in content:
        state = from_released(content.get("model", content))
        content = dict(method=None, config=sizes_of(state, path, heads), model=state)
        print(f"note    {path} names no method: assuming {content['config']['heads']} heads "
              f"(--heads), and ImageNet's mean and std")
    cls, config = METHODS.get(content["method"], MAE), {"in_chans": 3, **content["config"]}
    config.update({name: pair(config[name]) for name in ("img_size", "patch_size")})
    if part != "encoder":
        content["model"] = {name.replace(part, "encoder", 1): value for name, value
                            in content["model"].items() if name.startswith(f"{part}.")}
        require(content["model"], f"--part {part}: {path} has no such part")
    return {**NO_CHECKPOINT, "mean": cls.mean, "std": cls.std, **content, "config": config,
            "path": str(path)}


def load_model(source, methods=METHODS):
    """Return a checkpoint's model in eval mode, with the class_names of its training data. `source`
    is a path or what read_checkpoint returns. Raises InputError if its method is unknown."""
    content = source if isinstance(source, dict) else read_checkpoint(source)
    require(content["method"] in methods, f"{content['path']} has the method {content['method']}, "
            f"not {', '.join(methods)}; a method of your own must be in METHODS of train.py")
    model = methods[content["method"]](**content["config"])
    model.load_state_dict(content["model"])
    model.class_names = content.get("classes", [])
    return model.eval()


def load_encoder(path, heads=None):
    """Return a checkpoint's encoder in eval mode, a vit.ViT. Its mean and std are those of its
    input, for vit.normalize. For `heads`, see vit.sizes_of."""
    content = read_checkpoint(path, heads)
    state = {name.removeprefix("encoder."): value for name, value in content["model"].items()
             if name.startswith("encoder.")}
    sizes = {name: content["config"][name]
             for name in ("img_size", "patch_size", "in_chans", "dim", "depth", "heads")}
    encoder = ViT(**sizes, norm="norm.weight" in state,
                  extra_tokens=count_extra_tokens(content["model"]))
    encoder.load_state_dict(state)
    encoder.mean, encoder.std = content["mean"], content["std"]
    return encoder.eval()


def initialize(model, start):
    """Initialise `model` from the checkpoint `start`: the encoder, and the decoder or head if it
    matches. Prints what is newly initialised and what is not loaded."""
    state = model.from_mae(start["model"]) if hasattr(model, "from_mae") else start["model"]
    missing, unused = transfer(model, state, grid_of(**start["config"]))
    for text, names in (("not in the file, newly initialised", missing), ("not loaded", unused)):
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
        all_sums = self.gather({name: float(value) for name, value in sums.items()})
        n = sum(self.gather(n))
        return {name: sum(each[name] for each in all_sums) / n for name in sums}

    def progress(self, items, title, **options):
        """Return a progress bar over `items`. In a log file, it writes a line per minute."""
        pause = 0.1 if sys.stderr.isatty() else 60
        return tqdm(items, title, leave=False, mininterval=pause, delay=pause,
                    disable=self.rank > 0, **options)


def start_processes(flags):
    """Return this process's Process. Under torchrun, joins the process group."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank, local_rank = (int(os.environ[x]) if world > 1 else 0 for x in ("RANK", "LOCAL_RANK"))
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
    # despite its name, this is also for CPUs: there, fused attention is slower in bf16
    torch.backends.cuda.enable_flash_sdp(cuda or dtype is not torch.bfloat16)
    if world > 1:
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


def literal(text):
    """Parse numbers and tuples as Python does, e.g. `3`, `0.5` and `0,5,11`; others are words."""
    with suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def word_or_numbers(text):
    """Parse `all` as "all", `11` as (11,), `0,5,11` as (0, 5, 11) and `0.9,0.95` as (0.9, 0.95)."""
    value = literal(text)
    return value if isinstance(value, (str, tuple)) else (value,)


def size_in_pixels(text):
    """Parse `32` as (32, 32) and `32,48` as (32, 48)."""
    return pair(literal(text))




def betas(text):
    """Parse `0.9,0.95` as (0.9, 0.95): two numbers from 0 to 1."""
    first, second = map(fraction, text.split(","))
    return first, second


PARSERS = {tuple: word_or_numbers, list: word_or_numbers, type(None): literal}     # of types
count, not_negative = in_range(int, 1), in_range(float, 0)
fraction, path = in_range(float, 0, 1), os.path.expanduser         # notebooks do not expand ~

# flags, {name: (type or choices, help)}
DATA = {
    "data": (path, "shapes, cifar10, cifar100, folder, .pt file; default: checkpoint's or shapes"),
    "eval_images": (count, "validate on at most X images; default: 1000 or, in finetune.py, all"),
    "workers": (in_range(int, 0), "processes that read image files; default: a share of the cores"),
    "device": (("cuda", "mps", "cpu"), "default: the first of these that is available"),
    "amp": (("auto", "bf16", "fp16", "fp32"), "precision; auto: bf16 or fp16 on CUDA, else fp32")}
ENCODER = {
    "seed": (in_range(int, 0, 2 ** 63 - 1), "seed for weights, crops, masks, order and --labels"),
    "train_images": (count, "train on only X images; default: all"),
    "img_size": (size_in_pixels, "side or height,width; default: the checkpoint's or the images'"),
    "patch_size": (size_in_pixels, "default: the checkpoint's, 16 or, below 128 pixels, side / 8"),
    "size": (tuple(SIZES), "size of the encoder; default: the checkpoint's, else micro"),
    "dim": (count, "width of the encoder; default: set by --size"),
    "depth": (count, "number of encoder blocks; default: set by --size"),
    "heads": (count, "number of attention heads in the encoder; default: set by --size")}
RUN = {
    "runs": (path, "folder for all runs"),
    "name": (path, "name of the run; default: made from method or checkpoint, mode and data"),
    "eval_every": (count, "validate and save every X epochs; default: 1, or epochs / 50 if more"),
    "keep_every": (count, "keep last.pt as epoch_X.pt every X epochs; default: only last.pt"),
    "accum": (count, "number of pieces to split each batch into, to save memory"),
    "clip_grad": (not_negative, "maximum norm of the gradient; default: none"),
    "compile": (bool, "compile the model with torch.compile"),
    "grad_checkpointing": (bool, "recompute activations to save memory"),
    "resume": (bool, "continue the run from its last.pt: repeat its command and add this flag"),
    "overwrite": (bool, "replace any existing run of the same name")}
RECIPE = {
    "batch_size": (count, "images per step, in all processes; default: lower if images are few"),
    "optimizer": (tuple(OPTIMIZERS), "which optimizer to use"),
    "lr": (not_negative, "learning rate; default: blr * batch_size / 256, or more for few images "
           "(see derive in train.py); low_res: for width 64, and for any batch"),
    "blr": (not_negative, "learning rate per 256 images of the recipe's batch, see lr"),
    "min_lr": (not_negative, "final learning rate of the cosine schedule; default: 0"),
    "betas": (betas, "betas of Adam and AdamW, e.g. 0.9,0.95"),
    "weight_decay": (not_negative, "weight decay; biases and norms are exempt"),
    "epochs": (in_range(int, 0), "passes over the training images"),
    "warmup_epochs": (not_negative, "epochs of linear warmup; default: less with fewer --epochs"),
    "crop": (fraction, "minimum area of the random crop, as a fraction of the image; 1: no crop"),
    "flip": (bool, "random horizontal flip")}
PRETRAINING = {
    "init": (path, "checkpoint that initialises the encoder and, if it fits, the decoder"),
    "mask": (("random", "grid", "block"), "pattern of the masks")}
PAIRS = {
    "teacher": (path, "MAE checkpoint to distill from; default: none"),
    "same_class": (fraction, "fraction of pairs within one class; default: random pairs")}
# no workers outside Linux: starting them is slow there
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
DEFAULTS = dict(  # of flags that have one default for all runs; None where a mode has no such flag
    workers=min(16, math.ceil(CORES / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))), amp="auto",
    seed=0, runs="runs", accum=1, compile=False, grad_checkpointing=False, resume=False,
    overwrite=False, mask="random", teacher=None, same_class=None)


def new_parser(script, usage, words):
    """Return a parser, to which more flags are added once --method or --mode is known."""
    parser = argparse.ArgumentParser(
        script, f"python {script} {usage} [--flag X ...]", allow_abbrev=False, add_help=False,
        description="Defaults are in parentheses. low_res: those for images below 128 pixels and "
                    "for any encoder no wider than micro.")
    parser.set_defaults(**DEFAULTS, command=shlex.join(["python", script, *words]))
    return parser


def add_flags(parser, title, flags, defaults=DEFAULTS, low_res={}):
    """Add flags {name: (type or choices, help)}; the help shows `defaults` and `low_res`."""
    option = parser.add_argument_group(title).add_argument
    for name, (kind, text) in flags.items():
        values = [str(defaults[name])] if defaults.get(name) is not None else []
        if low_res.get(name, defaults.get(name)) != defaults.get(name):
            values.append(f"low_res: {low_res[name]}")
        text += f" ({'; '.join(values)})" if values else ""
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
    own, flags = {}, {}
    for part in reversed(cls.__mro__[:cls.__mro__.index(Method)]):
        if "__init__" not in vars(part):
            continue
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
    return own, {name: flags[name] for name in own}


def words_of(argv):
    """Return the words of argv, a list or a string; by default, those typed after the script."""
    argv = sys.argv[1:] if argv is None else argv
    return shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]


def shell(main, **options):
    """Run main(**options) for a script. Invalid input ends it with one line and exit code 2."""
    sys.stdout.reconfigure(line_buffering=True)            # a log file shows each epoch at once
    try:
        main(**options)
    except (InputError, OSError) as error:
        cause = str(error).strip().splitlines()[-1]        # a worker's traceback comes first
        print(f"{Path(sys.argv[0]).name}: error: {cause}", file=sys.stderr)
        sys.exit(2)
    if dist.is_initialized():
        dist.destroy_process_group()


def main(argv=None):
    """Run `python train.py` with the arguments `argv` (see words_of), also from a notebook. Returns
    the last row of log.jsonl, a dict."""
    words = words_of(argv)
    parser = new_parser("train.py", f"--method {'|'.join(METHODS)}", words)
    parser.add_argument("--method", choices=METHODS, default="mae", help="(mae)")
    name = parser.parse_known_args(words)[0].method        # it decides which other flags exist
    cls = METHODS[name]
    require(issubclass(cls, Method), f"--method {name}: class {cls.__name__} must inherit from "
            f"vit.Method instead of nn.Module: see tests/docs/FORKS.md")
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    parser.set_defaults(data="shapes", eval_images=1000)
    add_flags(parser, "data and device", DATA)
    add_flags(parser, "training images and encoder", ENCODER)
    add_flags(parser, "run", RUN)
    add_flags(parser, "recipe", RECIPE, {**DEFAULTS, **cls.recipe}, cls.low_res_recipe)
    own, flags = arguments_of(cls)
    add_flags(parser, f"arguments of {cls.__name__}", flags, own, cls.low_res_config)
    pairs = PAIRS if issubclass(cls, IMAE) else {}
    add_flags(parser, "pretraining", {**PRETRAINING, **pairs})
    return pretrain(parser.parse_args(words))


if __name__ == "__main__":
    shell(main)
