"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

Start at the top. `pretrain` opens a run's folder and its data, `settle` picks every setting, and
`fit` trains: its two loops, over epochs and over steps, stand on one page. The other sections are:
settling, evaluation, data, checkpoints, processes, command line.

Three read-only records describe a run: `flags` is the command line (None: not given), `run` has
every setting, which `settle` makes from the flags, the checkpoint and the recipe, and `here` is
this process and its device.

Each step is seeded from (seed, epoch, step). Each process draws random numbers for the whole batch
and keeps its part, so N processes pretrain like one. Random crops of image files are seeded from
(seed, epoch, image). Resuming needs no saved random state. finetune.py uses the same loop.

A method is a class like those in METHODS. tests/docs/FORKS.md lists what it must have.
"""

import argparse
import inspect
import json
import math
import os
import re
import shlex
import signal
import sys
import time
import zipfile
import zlib
from collections import namedtuple
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from glob import glob
from itertools import islice, product, tee
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageOps, PngImagePlugin
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from tqdm import tqdm

from crossmae import CrossBlock, CrossMAE
from hypermae import HyperMAE
from imae import IMAE, check_same_class, draw_partners, teacher_of
from mae import MAE
from minr import MINR
from vit import (SIZES, Block, InputError, ViT, count_extra_tokens, denormalize, from_released,
                 grid_of, mask_noise, normalize, pair, require, sizes_of, transfer, visible_count)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}


# --------------------------------------------------------------------------------------- training
def pretrain(flags):
    """Train the model of --method on --data, and return the last row of log.jsonl."""
    here, cls, data = start_processes(flags), METHODS[flags.method], flags.data or "shapes"
    with open_run(flags, here, f"{flags.method}_{name_of(data)}") as (folder, saved):
        source = saved or {"config": {}}                   # sizes, and any weights, are from here
        if flags.init and not saved:
            source = read_checkpoint(flags.init, flags.heads)
        train, val, img_size = open_data(
            data, here, flags.img_size or source["config"].get("img_size"),
            patch_size=flags.patch_size, train_images=flags.train_images)
        sizes = encoder_sizes(flags, img_size, {"in_chans": len(cls.mean), **source["config"]})
        fixed, teacher = find_teacher(flags, cls, saved)
        run = settle(
            flags, sizes, cls.recipe, {**cls.low_res_recipe, **cls.low_res_config},
            len(train.labels), cls.lr_scale, own=method_arguments(cls), fixed=fixed,
            method=flags.method, data=data, images=train.known_by, folder=folder,
            pairs=getattr(cls, "pairs", None), processes=f"{here.world} x {here.device}")
        torch.manual_seed(run.seed)
        model = cls(**run.config).to(here.device)
        visible_count(model.encoder.num_patches, model.mask_ratio)     # checks the mask ratio
        if flags.init and not saved:
            initialize(model, source, flags.init)
        if teacher:                                        # replaces one in the --init file
            model.teacher.load_state_dict(teacher_of(teacher, run.config)[1])
            print(f"teacher {flags.teacher}")
        return fit(Pretraining(run, here, model, train, val), saved)


class Pretraining:
    """What `fit` has to know about pretraining; finetune.Finetuning is its sibling."""

    same_draws = True                      # all pieces of a batch draw the same (MINR's pixels)

    def __init__(self, run, here, model, train, val):
        self.run, self.here, self.model, self.train, self.val = run, here, model, train, val
        if run.pairs == "images":
            check_same_class(train.labels, train.classes, run.same_class)
        if not train.in_memory:                            # instead of open_data's centre crop
            train.transform, train.replaces = crop_transform(model.encoder.img_size, run), True

    def groups(self):
        """Return the parameter groups of the optimizer, each a dict."""
        return decay_groups(self.model, self.run.weight_decay)

    def draw(self, images, labels):
        """Return this process's part of a step: images, noise, for pairs also partners, alpha."""
        run, here = self.run, self.here
        halves = images.chunk(2 if run.pairs else 1)       # with pairs, partners come last
        if self.train.in_memory:
            halves = [crop_batch(x, self.model.encoder.img_size, run, here) for x in halves]
        # noise decides the mask: in each image, the patches with the lowest noise stay visible
        noise = mask_noise(run.mask, run.batch_size, self.model.encoder.grid, here.device)
        alpha = [self.model.draw_alpha(here.device)] if run.pairs == "images" else []
        return [halves[0], local_part(noise, here), *halves[1:], *alpha]

    def inputs(self, *piece):
        """Return the model's arguments for a piece of the batch: its images are normalised."""
        return [normalize(x, self.model) if x.ndim == 4 else x for x in piece]

    def evaluate(self):
        """Return scores {name: value} and the columns of recon.png, or None for no picture."""
        return evaluate_psnr(self.model, self.val, self.here, self.run.mask,
                             most=self.run.eval_images, leak_free=self.run.leak_free)


def fit(task, saved):
    """Train for --epochs epochs and return the last row of log.jsonl. `task` is a Pretraining or a
    Finetuning. `saved` is the last.pt to resume from, or {}."""
    run, here, model, train = task.run, task.here, task.model, task.train
    n, pieces = len(train.labels), here.world * run.accum
    require(run.batch_size <= n and run.batch_size % pieces == 0,
            f"--batch_size {run.batch_size} must be at most {n} (training images) and "
            f"divisible by {here.world} processes x --accum {run.accum}")
    steps = n // run.batch_size
    optimizer = make_optimizer(run, here, task.groups())
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype is torch.float16)
    content = describe(task)
    history = resume(saved, model, optimizer, scaler, content) if saved else []
    net, saved_at = wrap(model, run, here), time.perf_counter()
    first = history[-1]["epoch"] if history else 0
    if here.rank == 0:
        begin_files(run.folder, history)

    batches = load_images(train, draw_keys(train, range(first, run.epochs), run, here), here)
    # epoch 0 only evaluates: without training, the initial model is saved
    for epoch in range(first + 1 if run.epochs or history else 0, run.epochs + 1):
        meter = Meter(task, epoch, steps, scaler)
        net.train()
        for step, (images, labels) in enumerate(meter.bar(batches), start=1):
            lr = learning_rate(epoch - 1 + (step - 1) / steps, run)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_factor", 1.0)         # finetune: layer decay
            seed = hash((run.seed, epoch - 1, step))       # equal in all processes, unlike of str
            torch.manual_seed(seed)                        # seeds crops, masks and mixing
            batch = task.draw(images, labels)
            metrics = train_step(net, optimizer, scaler, batch, seed + 1, task)
            if hasattr(model, "after_step"):               # a momentum teacher, for example
                model.after_step((epoch - 1 + step / steps) / run.epochs)
            meter.add(metrics, step, lr)
        check_unreadable(train, here)
        due = epoch % run.eval_every == 0 or epoch == run.epochs
        scores, columns = task.evaluate() if due else ({}, None)
        history.append({"epoch": epoch, **meter.row(), **scores})
        if here.rank == 0 and (due or time.perf_counter() - saved_at > 60):
            save_run(run.folder, content, model, optimizer, scaler, history, columns)
            saved_at = time.perf_counter()
        shown = [f"{name} {history[-1][name]:.4g}" for name in
                 ("loss", "psnr_masked", "top1", "img_s", "wait") if name in history[-1]]
        print(f"epoch {epoch}:", ", ".join(shown))
    if here.rank == 0:                                     # unless a copy lacks tests/
        with side_product(run.folder / "curves.svg"), suppress(ImportError, InputError):
            from tests.curves import draw_run              # only here: tests import train
            draw_run(run.folder)
    print("see    ", *sorted(run.folder.glob("*.*")))
    return history[-1]


def train_step(net, optimizer, scaler, batch, seed, task):
    """Take one optimizer step, in --accum pieces. `batch` is this process's part, from task.draw.
    Returns metrics {name: value} on the device. Never synchronises host and device."""
    run, here, metrics = task.run, task.here, {}
    for i in range(run.accum):
        # i-MAE's alpha, a scalar, goes to every piece
        piece = [x.chunk(run.accum)[i] if x.ndim else x for x in batch]
        # MINR's pixels are the same in all pieces and processes; drop path and mixing differ
        torch.manual_seed(seed if task.same_draws else seed + here.rank * run.accum + i)
        inputs = task.inputs(*piece)                       # a piece at a time: floats are large
        sync_gradients = here.world == 1 or i + 1 == run.accum         # at the last piece
        with nullcontext() if sync_gradients else net.no_sync():
            with autocast(here):
                loss, values = net(*inputs)
            scaler.scale(loss / run.accum).backward()
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0) + value / run.accum
    if run.clip_grad:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), run.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return metrics


class Meter:
    """Progress bar, mean metrics and speed of an epoch, and the rows of steps.jsonl."""

    def __init__(self, task, epoch, steps, scaler):
        self.run, self.here, self.scaler = task.run, task.here, scaler
        self.epoch, self.steps, self.totals, self.lr = epoch, steps, {}, 0.0
        self.waited, self.began = 0.0, time.perf_counter()

    def bar(self, batches):
        """Yield the epoch's batches, none in epoch 0, and measure how long each takes to arrive."""
        if self.epoch == 0:
            return
        self.tqdm = progress(islice(batches, self.steps), f"epoch {self.epoch}/{self.run.epochs}",
                             self.steps, self.here, unit="img", unit_scale=self.run.batch_size)
        asked = time.perf_counter()
        for batch in self.tqdm:
            self.waited += time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()

    def add(self, metrics, step, lr):
        """Add up a step's metrics. Every 20 steps, log the loss: the only host-device sync."""
        self.lr = lr
        for name, value in metrics.items():
            self.totals[name] = self.totals.get(name, 0) + value
        if step % 20 == 0 or step == self.steps:
            loss = metrics["loss"].item()
            # in fp16, the scaler skips steps that overflow, and halves its scale, down to 1
            require(math.isfinite(loss) or self.scaler.get_scale() > 1, f"the loss is {loss} at "
                    f"epoch {self.epoch}, step {step}: use --clip_grad or a lower --lr")
            self.tqdm.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}", refresh=False)
            if self.here.rank == 0:
                row = {"epoch": self.epoch, "step": step, "loss": loss, "lr": lr}
                with side_product(self.run.folder / "steps.jsonl"):
                    write_rows(self.run.folder / "steps.jsonl", [row], "a")

    def row(self):
        """Return the epoch's values for the log."""
        if self.epoch == 0:
            return {}
        means = mean_over_processes(self.totals, self.steps, self.here)
        seconds = time.perf_counter() - self.began
        return {"lr": self.lr, **means, "wait": round(self.waited / seconds, 3),
                "img_s": round(self.steps * self.run.batch_size / seconds, 1)}


def draw_keys(train, epochs, run, here):
    """Yield, for each step of `epochs`, the keys (b,2) of this process's images. A key is a crop
    seed and an image's index. With pairs, a step's images come first, then their partners."""
    n = len(train.labels)
    for epoch in epochs:
        seed = hash((run.seed, epoch))
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=g)[:n - n % run.batch_size]
        keys = [keys_of(order, seed)]
        if run.pairs:
            partners = order if run.pairs == "views" else draw_partners(
                order, train.labels, run.same_class, g)
            keys.append(keys_of(partners, seed ^ 1))       # their crops differ
        for step in zip(*(x.split(run.batch_size) for x in keys)):
            yield torch.cat([local_part(x, here) for x in step])


def learning_rate(t, run):
    """Return the learning rate at time t in epochs, e.g. 3.7. It grows linearly from 0 to lr over
    warmup_epochs, as in the release. Then it is constant or falls to min_lr along half a cosine."""
    if t < run.warmup_epochs:
        return run.lr * t / run.warmup_epochs
    if run.schedule == "constant":
        return run.lr
    t = (t - run.warmup_epochs) / (run.epochs - run.warmup_epochs)
    return run.min_lr + (run.lr - run.min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def decay_groups(model, weight_decay):
    """Return two parameter groups, with and without weight decay: biases and norms are exempt."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in trained if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]


def make_optimizer(run, here, groups):
    """Return the recipe's optimizer, fused where torch can: not on MPS in torch 2.6."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD)[run.optimizer]
    more = dict(momentum=0.9) if run.optimizer == "sgd" else dict(betas=run.betas)
    return kind(groups, lr=run.lr, fused=here.device.type != "mps", **more)


def wrap(model, run, here):
    """Add gradient checkpointing, DistributedDataParallel and torch.compile, as requested."""
    if run.grad_checkpointing:
        for module in model.modules():
            if isinstance(module, (Block, CrossBlock)):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if here.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if run.compile:
        try:                                               # something small: is a compiler there?
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=here.device))
        except Exception as error:                         # its last line is advice
            cause = [x for x in str(error).splitlines() if "ompiler" in x] or [last_line(error)]
            raise InputError(f"--compile: torch.compile fails here ({cause[0]}): install a C++ "
                             f"compiler such as g++, or drop --compile") from None
        # torch 2.6 cannot cut a checkpointed graph at DDP's buckets; 2.14 can
        torch._dynamo.config.optimize_ddp = not run.grad_checkpointing or TORCH >= (2, 14)
        model = torch.compile(model, dynamic=False)
    return model


def describe(task):
    """Print what is trained, on what data and how. Returns what each last.pt says of the run."""
    run, here, model, train = task.run, task.here, task.model, task.train
    n, n_val, encoder = len(train.labels), len(task.val.labels[:run.eval_images]), model.encoder
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"data    {run.data}: {n} train, {n_val} val, {encoder.img_size} pixels in patches of "
          f"{encoder.patch_size}, {'in memory' if train.in_memory else 'in files'}")
    print(f"model   {type(model).__name__}: {size:.2f} M parameters, {run.processes}, {here.dtype}")
    print(f"train   {run.epochs} epochs ({run.warmup_epochs:g} warmup), {n // run.batch_size} "
          f"steps per epoch, batch size {run.batch_size}, {run.optimizer}, lr {run.lr:.3g}")
    if run.low_res:
        print(f"low_res {', '.join(run.low_res)} (fixed for small images or encoders)")
    settings = {name: value for name, value in run._asdict().items()
                if name not in ("config", "folder", "low_res")}
    return dict(method=run.method, config=dict(run.config), classes=train.classes, mean=model.mean,
                std=model.std, flags=settings, source=source_of(type(model)))


# --------------------------------------------------------------------------------------- settling
def settle(flags, sizes, recipe, low_res, n, lr_scale=1.0, least_eval_every=1, own={}, fixed={},
           **facts):
    """Return all settings of a run, in a record that nothing can change. n is the number of
    training images. `run.config` has the constructor's arguments: sizes, own and fixed.

    A setting comes from the first of these that has it: its flag; `low_res`, if is_low_res(sizes);
    `recipe`, how to train; `own`, a method's own arguments. A flag with one default for all runs
    has that from parsing (DEFAULTS), and encoder_sizes has chosen the sizes. The rest depends on
    other settings:
        batch_size: at most a tenth of the n images; then it is a power of two
        warmup_epochs: shorter with fewer epochs than in the recipe, in proportion
        lr: the recipe's lr or, without one or with --blr, blr * batch_size / 256 (MAE A.1), times
            lr_scale (CrossMAE A.6), a number or a function of the constructor's arguments
        eval_every: so that a run has fewer than 100 validations
    """
    given = {name: value for name, value in flags._asdict().items() if value is not None}
    small = low_res if is_low_res(sizes) else {}
    base = {**own, **recipe, **small}
    values = {"min_lr": 0.0, **base, **given, **sizes, **facts}
    config = {**sizes, **{name: values[name] for name in own}, **fixed}
    if recipe and "batch_size" not in given and base["batch_size"] > n / 10:
        values["batch_size"] = min(n, 2 ** max(1, int(math.log2(n / 10))))
        print(f"note    the batch size is {values['batch_size']}, because training images are few: "
              f"{n}")
    if recipe:
        if "warmup_epochs" not in given:
            values["warmup_epochs"] *= min(1, values["epochs"] / base["epochs"])
        values["warmup_epochs"] = min(values["warmup_epochs"], values["epochs"])
        if "lr" not in given:
            if "blr" in given or "lr" not in base:
                values["lr"] = values["blr"] * values["batch_size"] / 256
            values["lr"] *= lr_scale(**config) if callable(lr_scale) else lr_scale
        values.setdefault("eval_every", max(1, values["epochs"] // 50, least_eval_every))
    values["low_res"] = tuple(f"{name} {values[name]}" for name in small if name not in given)
    return frozen(**{**flags._asdict(), **values, "config": MappingProxyType(config)})


def frozen(**values):
    """Return a record with these values as attributes, which cannot be set again."""
    return namedtuple("Settings", values)(**values)


def encoder_sizes(flags, img_size, source):
    """Return the encoder's constructor arguments. Each comes from the last of these that sets it:
    the defaults, `source` (a checkpoint's config or {}), --size, its own flag."""
    patch_size = tuple(16 if side >= 128 else max(4, side // 8) for side in img_size)
    defaults = dict(patch_size=patch_size, in_chans=3, **SIZES["micro"])
    given = {name: value for name, value in flags._asdict().items() if value is not None}
    config = {**defaults, **source, **SIZES.get(flags.size, {}), **given, "img_size": img_size}
    return {name: config[name] for name in ("img_size", *defaults)}


def is_low_res(sizes):
    """Return whether images are at most 64 pixels large, or the encoder is no wider than micro."""
    return max(sizes["img_size"]) <= 64 or sizes["dim"] <= SIZES["micro"]["dim"]


def method_arguments(cls):
    """Return a method's own flags, {name: default}: its constructor's keyword-only arguments."""
    return cls.__init__.__kwdefaults__ or {}


def find_teacher(flags, cls, saved):
    """Return the constructor argument `teacher` in a dict, and --teacher's checkpoint, or {} and
    None. A resumed run has both in its last.pt."""
    if "teacher" in saved.get("config", {}):
        return {"teacher": saved["config"]["teacher"]}, None
    if flags.teacher and not saved:
        teacher = read_checkpoint(flags.teacher, flags.heads)
        return {"teacher": {x: teacher["config"][x] for x in ("dim", "depth", "heads")}}, teacher
    if getattr(cls, "pairs", None) == "images":
        print("note    no --teacher, an MAE's checkpoint: training without distillation")
    return {}, None


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_psnr(model, val, here, mask="random", mask_ratio=None, most=None, leak_free=False):
    """Return the mean PSNRs in dB of the masked pixels, of the image with visible pixels copied in
    ("completed") and of the raw reconstruction ("decoded"), and columns {title: up to 8 images} for
    save_picture. Masks follow the pattern `mask` and depend only on the image's index."""
    if getattr(model, "reconstruct", None) is None:        # a method that predicts no pixels
        return {}, None
    columns, encoder, n = None, model.eval().encoder, 0
    sums = {"psnr_masked": 0, "psnr_image": 0, "psnr_decoded": 0}      # zeros without images
    for ids, images, _ in val_batches(val, here, encoder.img_size, most):
        # 7 is arbitrary, but fixed: masks must not depend on --seed
        generators = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in generators])
        with autocast(here):
            decoded, patches = model.reconstruct(normalize(images, model), noise.to(here.device),
                                                 mask_ratio, leak_free)
        truth, decoded = images / 255, denormalize(decoded, model)     # (b, C, H, W)
        is_masked = encoder.pixels_of(patches.float())                 # (b, 1, H, W)
        copied = torch.where(is_masked > 0, decoded, truth)
        grey = torch.where(is_masked > 0, 0.5, truth)
        image_error = (copied - truth).square().mean((1, 2, 3))        # (b,) 0 where visible
        decoded_error = (decoded - truth).square().mean((1, 2, 3))     # (b,)
        errors = {"psnr_masked": image_error / is_masked.mean((1, 2, 3)),
                  "psnr_image": image_error, "psnr_decoded": decoded_error}
        for name, error in errors.items():
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        n += len(images)
        columns = columns or {"original": truth[:8], "masked": grey[:8], "decoded": decoded[:8],
                              "completed": copied[:8]}
    return mean_over_processes(sums, n, here), columns


def compare(flags):
    """Run --eval: print a PSNR row for each checkpoint, mask and ratio, and return the rows.
    Saves a picture for the first mask and ratio. tests/analyses.py has the papers' analyses."""
    require(os.environ.get("WORLD_SIZE") in (None, "", "1"),
            "--eval runs in one process: drop torchrun")
    here, data, problem = start_processes(flags), flags.data, ""
    rows, columns, paths = [], {}, []
    for word in flags.eval:                                # Windows shells do not expand runs/*
        paths += [word] if Path(word).exists() else sorted(glob(word)) or [word]
    for path in paths:
        content = read_checkpoint(path)
        try:
            model = load_model(content, norm_pix_loss=flags.norm_pix_loss).to(here.device)
            require(getattr(model, "reconstruct", None), f"{path}: its method predicts no pixels")
        except InputError as error:
            problem = str(error)
            print(f"note    skipped: {problem}")
            continue
        sizes = f"--img_size {model.encoder.img_size} and --patch_size {model.encoder.patch_size}"
        own_data = content["flags"].get("data")
        if not rows:                                       # all get the first one's data and size
            first, first_sizes, data = path, sizes, data or own_data
            require(data, f"{path} does not say what it was trained on: pass --data")
            val, _ = open_data(data, here, model.encoder.img_size, parts=["val"])
        require(sizes == first_sizes, f"{path} has {sizes}, but {first} has {first_sizes}: "
                                      f"evaluate them separately")
        if own_data not in (data, None):
            print(f"note    {path} was trained on {own_data} and is evaluated on {data}")
        for mask, ratio in product(flags.masks, flags.mask_ratios):
            scores, images = evaluate_psnr(model, val, here, mask, ratio, flags.eval_images,
                                           flags.leak_free)
            rows.append(dict(checkpoint=content["path"], mask=mask, mask_ratio=ratio, **scores))
            if (mask, ratio) == (flags.masks[0], flags.mask_ratios[0]):
                columns = columns or {name: images[name] for name in ("original", "masked")}
                title = f"{name_of(content['path'])}\n{scores['psnr_masked']:.2f} dB"
                while title in columns:                    # two files of the same name
                    title += "'"
                columns[title] = images["completed"]
    require(rows, f"--eval found no checkpoint that predicts pixels; {problem}")
    print(f"PSNR in dB, mean over {len(val.labels[:flags.eval_images])} images of {data}")
    print(as_table(rows))
    names = dict.fromkeys(name_of(row["checkpoint"]) for row in rows)
    picture = Path(rows[0]["checkpoint"]).with_name(f"{'_'.join(['eval', *names])[:80]}.png")
    for path in (picture, Path(picture.name)):             # a model's folder may be read-only
        with side_product(path):
            save_picture(columns, path)
            print(f"see     {path}")
            break
    return rows


def save_picture(columns, path):
    """Write columns {title: images (rows,C,H,W) in [0, 1]} as a picture. Enlarges small images. The
    background is transparent, for light and dark pages."""
    images = [x[:, :3] if x.shape[1] >= 3 else x[:, :1] for x in columns.values()]
    H, W = images[0].shape[2:]
    size = [n * max(1, 96 // max(H, W)) for n in (H, W)]
    letters = max(4, size[1] // 6)                         # per line: each is 6 pixels wide
    titles = ["\n".join(line[i:i + letters] for line in title.splitlines()
                        for i in range(0, len(line), letters)) for title in columns]
    top = max(30, 15 * max(title.count("\n") + 1 for title in titles))
    cells = torch.stack([F.interpolate(x, size) for x in images], dim=1).flatten(0, 1)
    cells = torch.cat([cells.expand(-1, 3, -1, -1), torch.ones_like(cells[:, :1])], dim=1)  # RGBA
    grid = torchvision.utils.make_grid(cells, nrow=len(images))
    picture = v2.functional.to_pil_image(F.pad(grid, (0, 0, top, 0)).clamp(0, 1))
    for i, title in enumerate(titles):
        ImageDraw.Draw(picture).text((2 + i * (size[1] + 2), 2), title, fill="#777")
    picture.save(path)


def as_table(rows):
    """Format rows, dicts with the same keys, as aligned columns."""
    rows = [rows[0].keys(), *(row.values() for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


# ------------------------------------------------------------------------------------------- data
class ImageDataset(Dataset):
    """Images, labels (N,), -1 if unlabelled, and class names. `images` is a uint8 tensor (N,C,H,W)
    or a list of N files. With a `transform`, which files need, workers load images one by one.

    A file that cannot be read is an error. If `replaces` is set, as in training, another image is
    shown instead, and load_images adds the reason to `unreadable`: see check_unreadable."""

    def __init__(self, images, labels, classes, transform=None):
        self.in_memory = torch.is_tensor(images)
        # Bytes in one array: with a list, reference counts would copy all strings into every worker
        self.images = images if self.in_memory else np.array([*map(os.fsencode, images)])
        self.labels, self.classes, self.transform = torch.as_tensor(labels), classes, transform
        self.replaces, self.unreadable, self.told, self.known_by = False, set(), set(), ""

    def __getitem__(self, key):
        """Return image i, its label, and "" for key = (seed, i). The seed is for random transforms.
        If image k is shown instead, returns image k, its label, and what is wrong with file i."""
        (seed, i), k, problem = key, key[1], ""
        g = torch.Generator().manual_seed(i)               # the same images for all seeds
        for _ in range(100):
            try:
                image = self.images[k]
                image = image if self.in_memory else read_image(os.fsdecode(image))
                break
            except InputError as error:
                require(self.replaces, str(error))
                problem, k = problem or str(error), torch.randint(len(self.images), (), generator=g)
        else:
            raise InputError(problem)
        # torch.manual_seed would also seed GPUs, which takes 100 times as long
        torch.default_generator.manual_seed(hash((seed, i)))
        return self.transform(image), self.labels[k].item(), problem

    def select(self, ids):
        """Keep only the images with indices ids (n,)."""
        self.labels = self.labels[ids]
        self.images = self.images[ids] if self.in_memory else self.images[ids.numpy()]


def check_unreadable(dataset, here):
    """Raise InputError if more than a tenth of a dataset's files could not be read since the last
    call, by all processes together. Print the number of those not yet told, and the first ten."""
    found, n = set().union(*gather(dataset.unreadable, here)), len(dataset.labels)
    dataset.unreadable.clear()
    require(len(found) <= n / 10, f"{len(found)} of {n} image files, more than a tenth, cannot be "
                                  f"read: {min(found, default='')}")
    new = sorted(found - dataset.told)
    dataset.told.update(new)
    if new:
        print(f"note    {len(new)} of {n} image files cannot be read; others replace them:",
              *new[:10], sep="\n        ")


def open_data(name, here, img_size=None, parts=("train", "val"), patch_size=None,
              train_images=None):
    """Return an ImageDataset for each of the `parts` of --data, and the image size (H, W). Images
    in memory are on the device. --resume recognises the data by `known_by`."""
    root, known_by, small = Path(name).absolute(), name, True
    if name == "shapes":
        counts = {"train": 10_000, "val": 1_000}           # also the seeds
        found = [(*draw_shapes(counts[part], img_size or (32, 32), seed=counts[part]), [*SHAPES])
                 for part in parts]
    elif name in ("cifar10", "cifar100"):
        found = open_cifar(name, here, parts)
    elif root.suffix == ".pt" and root.is_file():
        found = open_tensors(name, parts)
        known_by = f"{zlib.crc32(found[0][0].contiguous().numpy()):08x} (checksum)"
    else:
        problem = "is a file: pass its folder" if root.exists() else "does not exist: pass a folder"
        require(root.is_dir(), f"--data {name} {problem}, a .pt file, shapes, cifar10 or cifar100")
        found = list_folder(root, parts)
        names = [file[len(str(root)):] for files, *_ in found for file in files]
        checksum = zlib.crc32(os.fsencode("\n".join(names)))
        known_by = f"{len(names)} images, names {checksum:08x} (checksum)"
        img_size, small = sizes_of_files(found[0][0], img_size, patch_size)
        if not FAST_JPEG:
            print("note    this torchvision decodes no JPEGs: PIL does, at half the speed")
    datasets = []
    for part, (images, labels, classes) in zip(parts, found):
        data, size = ImageDataset(images, labels, classes), img_size or tuple(images.shape[2:])
        if part == "train" and train_images is not None:   # before the images are read
            data.select(random_order(len(labels))[:train_images])
        if not data.in_memory:
            data.transform = partial(center_crop, img_size=size)
            if small and 3 * len(data.labels) * size[0] * size[1] <= MEMORY:
                data = read_into_memory(data, size, here, replaces=part == "train")
        elif any(own > side for own, side in zip(images.shape[2:], size)):
            data.images = v2.functional.resize(data.images, size)      # antialiased
        if data.in_memory:
            data.images = data.images.to(here.device).contiguous()
        data.known_by = known_by
        datasets.append(data)
    return *datasets, size


def open_cifar(name, here, parts):
    """Return (images, labels, classes) for each of the `parts` of CIFAR. Processes take turns: the
    first one on a disk downloads."""
    kind = getattr(torchvision.datasets, name.upper())
    for turn in range(here.world):
        if turn == here.rank:
            try:
                sets = [kind("data", train=part == "train", download=True) for part in parts]
            except (OSError, RuntimeError) as error:
                raise InputError(f"--data {name}: cannot download {kind.url} to data/ ({error}). "
                                 "Without internet, pass a folder of images")
        gather(turn, here)                                 # wait for it
    return [(torch.tensor(s.data).movedim(3, 1), s.targets, s.classes) for s in sets]


def open_tensors(file, parts):
    """Return (images, labels, classes) for each of the `parts` of a .pt file: a dict, whose values
    are uint8 images (N,C,H,W), alone or with labels (N,) and class names."""
    found = []
    try:
        content = torch.load(file, weights_only=True)
        for part in parts:
            value = content[part]
            images, labels, names = (value, None, []) if torch.is_tensor(value) else value
            if isinstance(names, dict):                    # its keys must be the labels
                names = [names[i] for i in range(len(names))]
            labels = torch.full((len(images),), -1) if labels is None else torch.as_tensor(labels)
            found.append((images, labels, [*map(str, names)]))
    except Exception as error:                             # a wrong file can raise anything
        raise InputError(f"--data {file} must be a dict of tensors with {' and '.join(parts)}, see "
                         f"tests/docs/FORKS.md: {last_line(error)}")
    for part, (images, labels, names) in zip(parts, found):
        where, n = f"--data {file}, {part}", len(images)
        require(images.ndim == 4 and images.dtype is torch.uint8 and n, f"{where}: images must be "
                f"a uint8 tensor (N,C,H,W), not {images.dtype} {tuple(images.shape)}")
        require(labels.shape == (n,) and not labels.is_floating_point(), f"{where}: labels must be "
                f"{n} integers, not {labels.dtype} {tuple(labels.shape)}")
        low, high = labels.min().item(), labels.max().item()
        unlabelled = low == high == -1 and not names
        require(unlabelled or 0 <= low and high < len(names), f"{where}: labels are from "
                f"{low} to {high}, but must be from 0 to {len(names) - 1}, for {len(names)} names")
    require(found[0][2] == found[-1][2], f"--data {file}: the parts have different class names")
    return [(images, labels.long(), names) for images, labels, names in found]


def read_into_memory(dataset, size, here, replaces):
    """Return a dataset of files as one with images of this size in memory."""
    dataset.replaces, n = replaces, len(dataset.labels)
    images, labels = torch.empty(n, 3, *size, dtype=torch.uint8), torch.empty_like(dataset.labels)
    keys = keys_of(torch.arange(n)).split(PIECE)
    loaded = progress(load_images(dataset, keys, here), "reading", len(keys), here)
    for rows, (part, part_labels) in zip(keys, loaded):
        images[rows[:, 1]], labels[rows[:, 1]] = part.cpu(), part_labels.cpu()
    check_unreadable(dataset, here)
    return ImageDataset(images, labels, dataset.classes)


def sizes_of_files(files, img_size, patch_size):
    """Return the image size (H, W), and whether images are small: below 224 pixels and, rounded
    down, at most img_size. The default img_size is that of the largest of 50 images, at most 224,
    rounded down to a multiple of patch_size or, by default, of 16 (below 128 pixels, 8)."""
    some, shapes, more = files[::math.ceil(len(files) / 50)], [], 0
    for file in some:
        with suppress(InputError):
            shapes.append(read_image(file).shape[1:])
            if file.lower().endswith((".tif", ".tiff", ".webp", ".png")):
                with Image.open(file) as image:
                    bands = len(image.getbands()) if image.format == "TIFF" else 3
                    more += bands > 3 or getattr(image, "n_frames", 1) > 1
    require(shapes, f"none of {len(some)} images can be read, e.g. {some[0]}")
    if more:
        print(f"note    {more} of {len(some)} images looked at have more than one page or, in a "
              f"TIFF, more than three bands: the others are not read")
    largest = [max(sides) for sides in zip(*shapes)]
    sides = largest if max(largest) < 224 else (224, 224)
    units = patch_size or [16 if side >= 128 else 8 for side in sides]
    own = tuple(max(unit, side - side % unit) for side, unit in zip(sides, units))
    H, W = img_size or own
    return (H, W), max(largest) < 224 and own[0] <= H and own[1] <= W


PART = re.compile(r"([^\W_]+[\W_]+)?(train|val|test|dev|eval|holdout|fold)(val|ing|id|idation|"
                  r"uation)?([\W_]*(images?|imgs?|set|data))?[\W_]*\d*", re.IGNORECASE)


def list_folder(root, parts):
    """Return (files, labels, classes) for each of the `parts`. The files are in train/ and val/,
    with or without class folders, or in a plain folder, of which a hash selects 5% for val."""
    found = {}
    if (root / "train").is_dir() or (root / "val").is_dir():
        for part in parts:
            require((root / part).is_dir(), f"--data {root} has no {part}/: add it or, to pretrain "
                                            f"without labels, pass a plain folder of images")
            start, files = len(str(root / part)) + 1, find_images(root / part, has_classes=True)
            require(files, f"{root / part} has no images ({' '.join(IMG_EXTENSIONS)})")
            labelled = [file for file in files if os.sep in file[start:]]
            if 0 < len(labelled) < len(files):
                left_out = len(files) - len(labelled)
                print(f"note    {left_out} images of {part}/ are in no class folder and left out")
            names = [file[start:].split(os.sep)[0] for file in labelled]
            classes = {name: i for i, name in enumerate(sorted({*names}))}
            labels = [classes[name] for name in names] or [-1] * len(files)
            found[part] = labelled or files, labels, [*classes]
        differ = sorted({*found[parts[0]][2]} ^ {*found[parts[-1]][2]})
        hint = ". In Tiny-ImageNet, val_annotations.txt has them" * ("images" in differ)
        require(not differ, f"--data {root}: train/ and val/ must have the same class folders, but "
                            f"{len(differ)} differ: {', '.join(differ[:5])}{hint}")
        return [found[part] for part in parts]
    files = find_images(root)
    require(len(files) > 1, f"--data {root} has {len(files)} images ({' '.join(IMG_EXTENSIONS)}): "
                            f"at least two are needed")
    names = [file[len(str(root)) + 1:].replace(os.sep, "/") for file in files]
    codes = [zlib.crc32(os.fsencode(name)) for name in names]
    # a fixed threshold, so that new files do not move old ones; at least one image in each part
    limit = min(max(0.05 * 2 ** 32, min(codes)), max(codes) - 1)
    found["train"] = [file for file, code in zip(files, codes) if code > limit]
    found["val"] = [file for file, code in zip(files, codes) if code <= limit]
    return [(found[part], [-1] * len(found[part]), []) for part in parts]


def find_images(root, has_classes=False):
    """Return the sorted image files in a folder and its subfolders. Follows links, but reads each
    folder once. Skips hidden names, __MACOSX and runs. Raises OSError if a folder cannot be listed
    and, unless its subfolders are classes, InputError if they look like parts of a data set."""
    def fail(error):
        raise error
    files, others = [], []
    seen = {*map(os.path.realpath, root.parents)}          # a link to a parent would lead back here
    for folder, folders, names in os.walk(root, followlinks=True, onerror=fail):
        folders[:] = sorted(x for x in folders if not x.startswith(".") and x != "__MACOSX")
        guessed = [x for x in folders if PART.fullmatch(x) and not has_classes]
        require(len(guessed) < 2 and not any(x.lower().startswith("train") for x in guessed),
                f"--data {root}: {folder} has parts, {' and '.join(guessed)}. Call them train/ and "
                f"val/ and pass --data {folder} or, to pretrain, pass the folder of one of them")
        if os.path.realpath(folder) in seen or {"last.pt", "replaced.pt"} & {*names}:
            folders.clear()                                # os.walk goes no deeper
            continue
        seen.add(os.path.realpath(folder))
        names = [name for name in names if not name.startswith(".")]
        images = [name for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        files += [os.path.join(folder, name) for name in images]
        others += [os.path.splitext(name)[1].lower() for name in {*names} - {*images}]
    if others:
        print(f"note    other files in {root} are not read: {len(others)} "
              f"({' '.join(sorted({*others})[:9])}). Save photos as .jpg or .png")
    return sorted(files)


MEMORY = 4 * 1024 ** 3                                     # bytes that a part may take in memory
PIECE = 64  # images that a worker reads at once: whole batches of 4,096 would take 9.9 GB


def keys_of(ids, seed=0):
    """Return keys (n,2), the arguments of ImageDataset[...], for the indices ids (n,)."""
    return torch.stack([torch.full_like(ids, seed), ids], dim=1)


def load_images(dataset, batches, here):
    """Yield uint8 images (b,C,H,W) and labels (b,) on the device, for each tensor of keys (b,2) in
    `batches`. Images come from memory or, with a transform, from workers that read ahead. Raises
    InputError as soon as more than a tenth of the files cannot be read."""
    cuda = here.device.type == "cuda"
    to_device = dict(device=here.device, non_blocking=cuda)
    if dataset.transform is None:
        for keys in batches:
            ids = keys[:, 1]
            yield dataset.images[ids.to(**to_device)], dataset.labels[ids].to(**to_device)
        return
    n = sum(map(len, batches)) if isinstance(batches, (list, tuple)) else len(dataset.labels)
    batches, again = tee(batches)                          # one for the workers, one for this loop
    pieces = (piece.tolist() for keys in batches for piece in keys.split(PIECE))
    workers = min(here.workers, math.ceil(n / PIECE))
    fork = sys.platform == "linux" and workers > 0         # elsewhere the system's default
    loaded = iter(DataLoader(dataset, batch_sampler=pieces, num_workers=workers, pin_memory=cuda,
                             multiprocessing_context="fork" if fork else None))
    for keys in again:
        images, labels, problems = zip(*(next(loaded) for _ in keys.split(PIECE)))
        dataset.unreadable.update(*problems)
        dataset.unreadable.discard("")
        example = min(dataset.unreadable, default="")
        require(len(dataset.unreadable) <= len(dataset.labels) / 10, f"more than a tenth of "
                f"{len(dataset.labels)} image files cannot be read, e.g.: {example}")
        yield [torch.cat([x.to(**to_device) for x in part]) for part in (images, labels)]


def random_order(n):
    """Return the indices 0, ..., n-1 in a random order, which is always the same."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def val_batches(dataset, here, img_size, most=None):
    """Yield this process's batches (indices, images, labels), at most 100 images each, from a fixed
    choice of at most `most` images."""
    own = random_order(len(dataset.labels))[:most].tensor_split(here.world)[here.rank]
    batches = own.split(100) if len(own) else ()
    loaded = load_images(dataset, [keys_of(ids) for ids in batches], here)
    bar = progress(zip(batches, loaded), "evaluating", len(batches), here)
    for ids, (images, labels) in bar:
        yield ids, v2.functional.resize(images, img_size), labels


def crop_batch(images, img_size, run, here):
    """Crop, resize and flip this process's in-memory images (b,C,H,W), each differently. Returns
    floats. Unlike crop_transform, interpolates bilinearly, clips crops to the image and, as in
    validation, stretches images to the aspect ratio of img_size."""
    draws = local_part(torch.rand(run.batch_size, 5, device=images.device), here)
    area, stretch, y, x, coin = draws.unbind(1)                        # (b,) each, in [0, 1)
    area = run.crop + (1 - run.crop) * area              # as a fraction of the image area
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


def crop_transform(img_size, run, *more):
    """Return a transform for an image (C,h,w): random resized crop and flip, then `more`."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if run.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (run.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * run.flip), *more])


def center_crop(image, img_size, fraction=None):
    """Crop the centre of an image (C,h,w) and resize it to img_size. The crop has img_size's aspect
    ratio, and `fraction` of the largest possible sides: by default 7/8 if a side has 224 pixels or
    more, as in MAE's release (224 of 256 pixels), otherwise 1."""
    (h, w), (H, W) = image.shape[1:], img_size
    fraction = fraction or (7 / 8 if max(h, w) >= 224 else 1)
    scale = fraction * min(h / H, w / W)
    crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
    return v2.functional.resize(crop(image), img_size, v2.InterpolationMode.BICUBIC)


def read_image(file):
    """Read an image file as RGB (3,H,W), uint8, rotated upright. Transparent images get a white
    background. JPEGs take a path that is twice as fast. Raises InputError if reading fails."""
    try:
        data = Path(file).read_bytes()
        if data[:2] == b"\xff\xd8" and FAST_JPEG:
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
        # only these formats: PIL would start Ghostscript for an EPS file, whatever its name
        formats = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
        with Image.open(file, formats=formats) as image:
            image.load()
            is_tiff = image.format == "TIFF"
        with suppress(Exception):                          # a broken EXIF field loses no image
            image = ImageOps.exif_transpose(image)
        require(image.mode != "F", "floating-point images are not supported")
        if image.mode.startswith("I"):                     # 16 bits; convert("RGB") would clip them
            image = image.convert("I")
            low, high = image.getextrema()
            require(0 <= low and high < 2 ** 16, f"values from {low} to {high} do not fit 16 bits")
            image = image.point(lambda value: value / 256).convert("L")
        # a TIFF's fourth band may be infrared, although it is marked as transparency
        if ("A" in image.mode or "transparency" in image.info) and not is_tiff:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return v2.functional.pil_to_tensor(image.convert("RGB"))
    except Exception as error:                             # a broken file can raise anything
        # torchvision's messages begin with a path of its build
        reason = re.sub(r".*\.cpp:\d+,? *", "", last_line(error))
        if not str(file).lower().endswith(IMG_EXTENSIONS):
            reason = "save it as .jpg or .png, because this type is not read"
        raise InputError(f"cannot read {file}: {reason}") from None


FAST_JPEG = hasattr(torchvision.io, "decode_image")        # torchvision plans to remove it
# also read PNGs whose texts or colour profile are long
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2 ** 30

SHAPES = {  # m, q, k of Gielis's superformula, the outline's radius `edge` in draw_shapes
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}


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
        colour = (ground + 0.35 + 0.3 * u[8:11].transpose(0, 1)) % 1  # 0.35 or more apart
        shade = 0.12 * (x * light.cos() + y * light.sin()).unsqueeze(1)  # (b, 1, H, W)
        image = inside * (colour - shade) + (1 - inside) * (ground + shade)
        images.append((image.clamp(0, 1) * 255).round().byte())        # (b, 3, H, W)
    return torch.cat(images), labels


# ------------------------------------------------------------------------------------ checkpoints
@contextmanager
def open_run(flags, here, name):
    """Create a run's folder, --name or `name`. Yields it and, for --resume, its last.pt, or {}.
    Raises InputError if it exists, without --resume or --overwrite. Removes it if left empty."""
    folder = Path(flags.runs, flags.name or name.replace(" ", "_"))
    last, replaced, created = folder / "last.pt", folder / "replaced.pt", False
    if here.rank == 0:
        with suppress(FileExistsError):                    # if runs start at once, one makes it
            folder.mkdir(parents=True)
            created = True
    try:
        for _ in range(5):                                 # a shared disk may show a file later
            created_by, found = zip(*gather((created, last.exists()), here))
            if all(found) or not any(found):
                break
            time.sleep(1)
        require(any(created_by) or flags.resume or flags.overwrite, f"{folder} exists: --resume "
                f"continues this run, --overwrite replaces it, --name NAME starts another one")
        require(all(found) or not any(found), f"not all processes find {last}: --runs must be on a "
                                              f"shared disk")
        for flag in ("init", "teacher", "checkpoint"):
            old = checkpoint_file(getattr(flags, flag) or "")
            require(not flags.overwrite or not any(
                x.exists() and old.exists() and x.samefile(old) for x in (last, replaced)),
                f"--overwrite would replace {old}, which --{flag} reads: use --name NAME")
        if flags.resume and not found[0]:
            print(f"note    nothing to resume: {last} does not exist, so a new run starts")
        yield folder, read_checkpoint(last) if flags.resume and found[0] else {}
    finally:
        if created and not last.exists():
            (folder / "steps.jsonl").unlink(missing_ok=True)
            with suppress(OSError):                        # only an empty folder
                folder.rmdir()


def begin_files(folder, history):
    """Cut a resumed run's logs back to its last.pt, because steps after it come again. For a new
    run, move an old last.pt to replaced.pt, so that no later --resume continues the old run."""
    steps, last = folder / "steps.jsonl", folder / "last.pt"
    if history:
        write_rows(folder / "log.jsonl", history)
        rows = []
        for line in steps.read_text().splitlines() if steps.exists() else ():
            with suppress(ValueError):                     # a killed run may end within a row
                rows.append(json.loads(line))
        write_rows(steps, [row for row in rows if row["epoch"] <= history[-1]["epoch"]])
        return
    steps.unlink(missing_ok=True)
    if last.exists():
        os.replace(last, folder / "replaced.pt")
        print(f"note    {folder / 'replaced.pt'} keeps the old run until the new one is saved")


def name_of(path):
    """Return what runs are named after: a last.pt's folder, otherwise the file or folder."""
    path = Path(path).absolute()
    return path.parent.name if path.name == "last.pt" else re.sub(r"\.pth?$", "", path.name)


def save_run(folder, content, model, optimizer, scaler, history, columns):
    """Write last.pt, log.jsonl and any new recon.png. --resume continues from last.pt."""
    weights, epoch = model.state_dict(), history[-1]["epoch"]
    require(all(x.isfinite().all() for x in weights.values()), f"weights are not finite after "
            f"epoch {epoch}: use --clip_grad or a lower --lr")
    save(folder / "last.pt", dict(
        content, model=weights, optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        epoch=epoch, history=history, torch=str(torch.__version__)))
    (folder / "replaced.pt").unlink(missing_ok=True)
    with side_product(folder / "log.jsonl"):
        write_rows(folder / "log.jsonl", history)
    if columns:
        with side_product(folder / "recon.png"):
            save_picture(columns, folder / "recon.png")


@contextmanager
def side_product(path):
    """Turn an OSError while `path` is written into a note, so that the run goes on."""
    try:
        yield
    except OSError as error:
        print(f"note    cannot write {path}: {error.strerror or error}")


def write_rows(path, rows, mode="w"):
    """Write rows (dicts) as lines of JSON, or append them with mode "a"."""
    with open(path, mode, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def save(path, content):
    """Write a checkpoint atomically: `path` is always either the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except RuntimeError as error:                          # raised on the OSError of a full disk
        raise error.__context__ or error from None
    finally:
        temporary.unlink(missing_ok=True)                  # if it was not renamed


def checkpoint_file(path):
    """Return the path of a checkpoint, which for a folder is its last.pt."""
    return Path(path, "last.pt") if Path(path).is_dir() else Path(path)


def read_checkpoint(path, heads=None, part="encoder"):
    """Load a checkpoint, or a folder's last.pt, without executing any code in the file. Returns a
    dict with path, method (None for a released file), config (constructor arguments), model (state
    dict), mean, std, flags and more. With another `part`, e.g. a momentum teacher, that ViT is the
    encoder, and the rest is left out. Tensors are read from the disk when they are used."""
    path = checkpoint_file(path)
    require(path.exists(), f"checkpoint {path} does not exist: train.py writes runs/NAME/last.pt")
    try:
        # Windows could not replace a file that is mapped into memory
        mmap = zipfile.is_zipfile(path) and sys.platform != "win32"
        with torch.serialization.safe_globals([argparse.Namespace]):   # in released files
            content = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=mmap))
    except Exception as error:                             # a broken file can raise anything
        raise InputError(f"{path} is damaged or no checkpoint: {last_line(error)}") from None
    if "method" not in content:
        state = from_released(content.get("model", content))
        content = dict(method=None, config=sizes_of(state, path, heads), model=state)
        print(f"note    {path} names no method: assuming {content['config']['heads']} heads "
              f"(--heads), and ImageNet's mean and std")
    cls, config = METHODS.get(content["method"], MAE), {"in_chans": 3, **content.get("config", {})}
    require({"img_size", "patch_size", "dim", "depth", "heads"} <= {*config} and isinstance(
        content.get("model"), dict), f"{path} lacks its model or config, or a size in the latter")
    config.update({name: pair(config[name]) for name in ("img_size", "patch_size")})
    if part != "encoder":
        content["model"] = {name.replace(part, "encoder", 1): value for name, value
                            in content["model"].items() if name.startswith(f"{part}.")}
        require(content["model"], f"--part {part}: {path} has no such part")
    return {"flags": {}, "mean": cls.mean, "std": cls.std, **content, "config": config,
            "path": str(path)}


def load_model(source, methods=METHODS, norm_pix_loss=None):
    """Return a checkpoint's model in eval mode, with the class_names of its training data. `source`
    is a path or what read_checkpoint returns. norm_pix_loss says whether a released file's targets
    were normalised; by default, its name does. Raises InputError if its method is unknown."""
    content = source if isinstance(source, dict) else read_checkpoint(source)
    if content["method"] is None:
        content = with_decoder(content, norm_pix_loss)
    cls = methods.get(content["method"])
    advice = "add it to METHODS in train.py"
    if content["method"] == "classifier":
        advice = "it is for finetune.py --mode eval"
    require(cls, f"{content['path']} has the method {content['method']}, which is not among "
                 f"{', '.join(methods)}: {advice}")
    if content.get("source", source_of(cls)) != source_of(cls):
        print(f"note    {content['path']} was trained with another version of {cls.__name__}")
    try:
        model = cls(**content["config"])
        model.load_state_dict(content["model"])
    except (TypeError, RuntimeError) as error:
        raise InputError(f"{content['path']} does not fit {cls.__name__} as it is now: "
                         f"{last_line(error)}") from None
    model.class_names = content.get("classes", [])
    return model.eval()


def with_decoder(content, norm_pix_loss=None):
    """Return a released checkpoint with its method, MAE or CrossMAE, and all constructor arguments.
    The file does not have the number of the decoder's heads, which is 16 in all released models."""
    state, path = content["model"], content["path"]
    require("decoder_pred.weight" in state, f"{path} has no decoder: use it only for features")
    depth = len({name.split(".")[1] for name in state if name.startswith("decoder_blocks.")})
    is_cross = any("cross_attn" in name for name in state)
    if norm_pix_loss is None:                              # see tests/docs/REFERENCE.md
        norm_pix_loss = is_cross or "full" in Path(path).name
        require(norm_pix_loss or "visualize" in Path(path).name, f"{path}: were its targets "
                f"normalised? Pass --norm_pix_loss or --no-norm_pix_loss")
    config = {name: value for name, value in content["config"].items() if name != "extra_tokens"}
    config.update(norm_pix_loss=norm_pix_loss, decoder_dim=state["decoder_pos_embed"].shape[2],
                  decoder_depth=depth, decoder_heads=16)
    if is_cross:
        maps = state["wfm.linear.weight"].shape[1] if "wfm.linear.weight" in state else 0
        config.update(feature_maps="all" if maps else "last", include_input=maps > config["depth"],
                      self_attention=any("self_attn" in name for name in state))
    return {**content, "method": "crossmae" if is_cross else "mae", "config": config}


def load_encoder(path, part="encoder", heads=None):
    """Return a checkpoint's encoder in eval mode, a vit.ViT. Its mean and std are those of its
    input, for vit.normalize. For `part`, see read_checkpoint."""
    content = read_checkpoint(path, heads, part)
    state = {name.removeprefix("encoder."): value for name, value in content["model"].items()
             if name.startswith("encoder.")}
    sizes = {name: content["config"][name]
             for name in ("img_size", "patch_size", "in_chans", "dim", "depth", "heads")}
    encoder = ViT(**sizes, norm="norm.weight" in state,
                  extra_tokens=count_extra_tokens(content["model"]))
    encoder.load_state_dict(state)
    encoder.mean, encoder.std = content["mean"], content["std"]
    return encoder.eval()


def source_of(cls):
    """Return the text of the file that defines a class, or "" for a class from a notebook."""
    with suppress(OSError, TypeError):
        return Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    return ""


def initialize(model, content, path):
    """Initialise `model` from `content`, a checkpoint read from `path`: the encoder, and the
    decoder or head if it matches. Prints what is newly initialised and what is not loaded."""
    encoder, config = model.encoder, content["config"]
    require((encoder.dim, len(encoder.blocks)) == (config["dim"], config["depth"]),
            f"{path} has an encoder of width {config['dim']} and depth {config['depth']}, not "
            f"{encoder.dim} and {len(encoder.blocks)}: leave out --size, --dim and --depth")
    state = model.from_mae(content["model"]) if hasattr(model, "from_mae") else content["model"]
    missing, unused = transfer(model, state, grid_of(**content["config"]))
    for text, names in (("not in the file, newly initialised", missing), ("not loaded", unused)):
        parts = {".".join(k.split(".")[:2 if k.startswith("encoder.") else 1]) for k in names}
        if parts:                                          # e.g. encoder.norm, decoder_blocks, head
            print(f"{text}: {', '.join(sorted(parts))}")
    if tuple(content["mean"]) != tuple(model.mean):        # MINR's input is not normalised
        print(f"note    {path} was trained with another mean and std of images")


def resume(saved, model, optimizer, scaler, content):
    """Load `saved`, the last.pt of this run, and return the rows of its log. Prints which flags
    have changed. Raises InputError if model, data, seed or optimizer are not those of `content`."""
    kept = ("images", "train_images", "labels", "seed", "optimizer")
    old, new = ({"method": x["method"], **x["config"], **{k: x["flags"].get(k) for k in kept}}
                for x in (saved, content))
    differ = [f"{name} was {old.get(name)}, is {new.get(name)}" for name in {**old, **new}
              if old.get(name) != new.get(name)]
    require(not differ, f"cannot resume: {'; '.join(differ)}. The run's command was "
                        f"{saved['flags'].get('command')}")
    model.load_state_dict(saved["model"])
    settings = optimizer.state_dict()["param_groups"]      # keep this command's weight decay
    optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
    if saved["scaler"]:                                    # empty unless the run used fp16
        scaler.load_state_dict(saved["scaler"])
    for name, value in saved["flags"].items():
        now = content["flags"].get(name, value)
        if str(now) != str(value) and name not in ("resume", "overwrite", "command"):
            print(f"note    {name} changed from {value} to {now}")
    print(f"resumed after epoch {saved['epoch']} of {content['flags']['epochs']}")
    return saved["history"]


# -------------------------------------------------------------------------------------- processes
TORCH = tuple(int(x) for x in re.findall(r"\d+", torch.__version__)[:2])
Process = namedtuple("Process", "rank world device dtype workers")


def start_processes(flags):
    """Return this process's Process. Under torchrun, joins the process group."""
    env, world = os.environ, int(os.environ.get("WORLD_SIZE") or 1)
    missing = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - {*env} if world > 1 else ()
    require(not missing, f"WORLD_SIZE is {world}, but {', '.join(sorted(missing))} not set: use "
                         f"torchrun or, to train in one process, unset WORLD_SIZE")
    rank, local_rank = (int(env[x]) if world > 1 else 0 for x in ("RANK", "LOCAL_RANK"))
    if rank > 0:
        sys.stdout = Output(None)                          # only rank 0 prints
    there = {"cuda": torch.cuda.is_available() and local_rank < torch.cuda.device_count(),
             "mps": torch.backends.mps.is_available() and world == 1, "cpu": True}
    kind, amp = flags.device or next(name for name in there if there[name]), flags.amp
    require(there[kind], f"--device {kind} is not available to process {rank}: use "
                         f"{' or '.join(name for name in there if there[name])}")
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


def autocast(here):
    """Return the mixed-precision context set by --amp; it does nothing in float32."""
    return torch.autocast(here.device.type, here.dtype, enabled=here.dtype is not torch.float32)


def local_part(batch, here):
    """Return this process's part of `batch`, a tensor for the whole batch."""
    return batch.chunk(here.world)[here.rank]


def gather(value, here):
    """Return a list of the values that all processes have."""
    values = [value] * here.world
    if here.world > 1:
        dist.all_gather_object(values, value)
    return values


def mean_over_processes(sums, n, here):
    """Return {name: sum / n}, with the sums and the counts n added up over all processes."""
    *totals, n = map(sum, zip(*gather([*map(float, sums.values()), n], here)))
    return {name: value / n for name, value in zip(sums, totals)}


def progress(items, title, total, here, **more):
    """Return a progress bar over `items`. In a log file, it writes a line per minute."""
    live = "ipykernel" in sys.modules or sys.stderr and sys.stderr.isatty()
    pause = 0.1 if live else 60
    return tqdm(items, title, total, leave=False, mininterval=pause, delay=pause,
                disable=here.rank > 0 or not sys.stderr, **more)


class Output:
    """Standard output that never ends a run: it escapes letters that the stream lacks, and goes on
    if the stream is closed or missing."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with suppress(AttributeError, OSError, ValueError):
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self.stream.flush()

    def flush(self):
        pass                                               # written at once, see above

    def __getattr__(self, name):
        return getattr(self.stream, name)                  # isatty, for example


# ------------------------------------------------------------------------------- the command line
def in_range(kind, low, high=math.inf):
    """Return an argparse type: an int or float from low to high."""
    def number(text):                                      # argparse's errors show this name
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} must be between {low} and {high}")
        return value
    return number


def numbers(kind, n=None):
    """Return an argparse type that turns `0,5,11` into (0, 5, 11), or refuses it unless n is 3."""
    def values(text):
        found = tuple(kind(part) for part in text.split(","))
        if len(found) != (n or len(found)):
            raise argparse.ArgumentTypeError(f"{text} must be {n} numbers")
        return found
    return values


def word_or_integers(text):
    """Parse `all` as "all" and `0,5,11` as (0, 5, 11)."""
    return text if text.isidentifier() else numbers(int)(text)


def size_in_pixels(text):
    """Parse `32` as (32, 32) and `32,48` as (32, 48)."""
    sides = numbers(count)(text)
    return pair(sides[0] if len(sides) == 1 else sides)


count, not_negative = in_range(int, 1), in_range(float, 0)
fraction = in_range(float, 0, 1)


def expanded(text):
    """Parse a path: notebooks do not expand ~, and an empty one is a variable that is not set."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("the path is empty or has a null byte")
    return os.path.expanduser(text)


# flags, {name: (type or choices, help)}
DATA = {
    "data": (expanded, "shapes, cifar10, cifar100, a folder or a .pt file; default: shapes or, "
                       "with --eval and in finetune.py, the checkpoint's data"),
    "eval_images": (count, "validate on at most X images; default: 1000 or, in finetune.py, all"),
    "workers": (in_range(int, 0), "processes that read image files; default: a share of the cores"),
    "device": (("cuda", "mps", "cpu"), "default: the first of these that is available"),
    "amp": (("auto", "bf16", "fp16", "fp32"), "precision; auto: bf16 or fp16 on CUDA, else fp32")}
ENCODER = {
    "seed": (in_range(int, 0, 2 ** 63 - 1), "seed for weights, crops, masks and image order"),
    "train_images": (count, "train on only X images; default: all"),
    "img_size": (size_in_pixels, "side or height,width in pixels; default: the checkpoint's, "
                                 "else the images' (if these are files, at most 224)"),
    "patch_size": (size_in_pixels, "side or height,width; default: the checkpoint's, else 16 or, "
                                   "below 128 pixels, side / 8 but at least 4"),
    "size": (tuple(SIZES), "size of the encoder; default: the checkpoint's, else micro"),
    "dim": (count, "width of the encoder; default: set by --size"),
    "depth": (count, "number of encoder blocks; default: set by --size"),
    "heads": (count, "number of attention heads in the encoder; default: set by --size")}
RUN = {
    "runs": (expanded, "folder for all runs"),
    "name": (expanded, "name of the run; default: made from method or checkpoint, mode and data"),
    "eval_every": (count, "validate every X epochs; default: 1, or epochs / 50 if more. Runs are "
                          "saved then, and once a minute"),
    "accum": (count, "number of pieces to split each batch into, to save memory"),
    "clip_grad": (not_negative, "maximum norm of the gradient; default: none"),
    "compile": (bool, "compile the model with torch.compile"),
    "grad_checkpointing": (bool, "recompute activations to save memory"),
    "resume": (bool, "continue the run from its last.pt: repeat its command and add this flag"),
    "overwrite": (bool, "replace any existing run of the same name")}
RECIPE = {
    "batch_size": (count, "images per step, in all processes; default: lower if images are few"),
    "optimizer": (("adamw", "adam", "sgd"), "which optimizer to use"),
    "lr": (not_negative, "learning rate; default: blr * batch_size / 256"),
    "blr": (not_negative, "learning rate for a batch of 256"),
    "min_lr": (not_negative, "final learning rate of the cosine schedule; default: 0"),
    "betas": (numbers(fraction, 2), "betas of Adam and AdamW, e.g. 0.9,0.95"),
    "weight_decay": (not_negative, "weight decay; biases and norms are exempt"),
    "epochs": (in_range(int, 0), "passes over the training images"),
    "warmup_epochs": (not_negative, "epochs of linear warmup; default: less with fewer --epochs"),
    "crop": (fraction, "minimum area of the random crop, as a fraction of the image; 1: no crop"),
    "flip": (bool, "random horizontal flip")}
PRETRAINING = {
    "init": (expanded, "checkpoint that initialises the encoder and, if it fits, the decoder"),
    "mask": (("random", "grid", "block"), "pattern of the masks"),
    "leak_free": (bool, "with norm_pix_loss, validate without the true patches' mean and variance")}
PAIRS = {
    "teacher": (expanded, "MAE checkpoint to distill from; default: none"),
    "same_class": (fraction, "fraction of pairs within one class; default: random pairs")}
# no workers outside Linux: starting them is slow there
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
DEFAULTS = dict(  # of flags that have one default for all runs; None where a mode has no such flag
    workers=min(16, math.ceil(CORES / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))),
    amp="auto", seed=0, runs="runs", accum=1, compile=False, grad_checkpointing=False, resume=False,
    overwrite=False, mask="random", leak_free=False, size=None, heads=None, init=None, teacher=None,
    checkpoint=None, same_class=None, clip_grad=None)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are InputErrors."""

    def error(self, message):
        raise InputError(message + " (see --help)" * message.startswith("unrecognized"))


def new_parser(script, about):
    """Return a parser without flags. Which flags it gets depends on --method, --eval or --mode."""
    about += ("\n\nDefaults are in parentheses. low_res: those for images of up to 64 pixels, and "
              "for any\nencoder no wider than micro, for which they were chosen.")
    parser = Parser(script, usage=argparse.SUPPRESS, allow_abbrev=False, add_help=False,
                    description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**DEFAULTS)
    return parser


def add_flags(parser, title, flags, defaults=DEFAULTS, low_res={}):
    """Add flags {name: (type or choices, help)}; the help shows `defaults` and `low_res`."""
    option = parser.add_argument_group(title).add_argument
    for name, (kind, text) in flags.items():
        values = [str(defaults[name])] if defaults.get(name) is not None else []
        if low_res.get(name, defaults.get(name)) != defaults.get(name):
            values.append(f"low_res: {low_res[name]}")
        text += f" ({'; '.join(values)})" if values else ""
        more = dict(type=kind, metavar="X")
        if kind is bool:
            more = dict(action=argparse.BooleanOptionalAction)
        elif isinstance(kind, tuple):
            more = dict(choices=kind)
        option(f"--{name}", help=text.replace("%", "%%"), **more)


def add_method_arguments(parser, cls):
    """Add a flag for each keyword-only argument of a method's constructor. Its type comes from the
    argument's annotation or default, and its help text from the entry under `Args:`."""
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", inspect.getdoc(cls) or "", re.M))
    types = {int: in_range(int, 0), tuple: numbers(int), str: word_or_integers}
    flags, own = {}, method_arguments(cls)
    for name, default in own.items():
        kind = cls.__init__.__annotations__.get(name, type(default))
        flags[name] = types.get(kind, kind), texts.get(name, "")
    add_flags(parser, f"arguments of {cls.__name__}", flags, own, cls.low_res_config)


def words_of(argv):
    """Return the words of argv, a list or a string, or by default those of the shell."""
    if argv is None:                                       # a bare main() in a notebook has none
        return [] if "ipykernel" in sys.argv[0] else sys.argv[1:]
    return shlex.split(argv) if isinstance(argv, str) else [str(word) for word in argv]


def run_cli(parser, work, words):
    """Parse `words` and return work(flags). Raises InputError, of one line, also for OSErrors."""
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    command = shlex.join(["python", parser.prog, *words])
    flags = frozen(**vars(parser.parse_args(words)), command=command)
    problem = ""
    try:
        with redirect_stdout(Output(sys.stdout)):
            row = work(flags)
    except (InputError, OSError) as error:
        problem = last_line(error)
    require(not problem, problem)      # not in `except`: there, the error's frames keep workers
    # otherwise, gloo's thread aborts one run in some twenty at its very end; but on CPUs, torch 2.6
    # can hang here
    if dist.is_initialized() and (torch.cuda.is_available() or TORCH >= (2, 14)):
        dist.destroy_process_group()
    return row


def last_line(error):
    """Return what an error says in its last line: a worker's error begins with a traceback."""
    text = str(error).strip() or repr(error)
    if "Weights only load failed" in text:                 # from torch.load, with long advice
        return "it is another file, or holds objects that are not loaded, e.g. code or NumPy arrays"
    return re.sub(r"^(\w+\.)*\w*Error: ", "", text.splitlines()[-1])


def shell(main):
    """Run main() as a command of the shell. Invalid input ends it with one line and exit code 2,
    SIGTERM (e.g. from Slurm) like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {last_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; to go on with a run, repeat its command with --resume", file=sys.stderr)
        sys.exit(130)


def main(argv=None):
    """Run `python train.py` with the arguments `argv` (see words_of), also from a notebook. Returns
    the last row of log.jsonl (a dict) or, with --eval, the list of PSNR rows."""
    words = words_of(argv)
    parser = new_parser("train.py", f"usage: python train.py --method {'|'.join(METHODS)} [--flag "
                        f"value ...]\n       python train.py --eval FILE ... [--flag value ...]")
    option = parser.add_argument
    option("--method", choices=METHODS, default="mae", metavar="NAME", help="method to train (mae)")
    option("--eval", nargs="+", metavar="FILE", type=expanded, help="instead of training, evaluate "
           "checkpoints with the same image and patch size; for its flags see --eval FILE --help")
    known = parser.parse_known_args(words)[0]               # these decide which other flags exist
    cls = METHODS[known.method]
    parser.set_defaults(eval_images=1000)
    add_flags(parser, "data and device", DATA)
    if known.eval:
        option("--mask_ratios", nargs="+", type=fraction, default=(0.75, 0.5, 0.9), metavar="X",
               help="mask ratios; the picture shows the first one (0.75 0.5 0.9)")
        option("--masks", nargs="+", choices=PRETRAINING["mask"][0], default=["random"],
               help="patterns of the masks; the picture shows the first one (random)")
        add_flags(parser, "reconstruction", {"leak_free": PRETRAINING["leak_free"]})
        option("--norm_pix_loss", action=argparse.BooleanOptionalAction, help="whether a released "
               "file's targets were normalised; default: its name says so")
        return run_cli(parser, compare, words)
    add_flags(parser, "training images and encoder", ENCODER)
    add_flags(parser, "run", RUN)
    add_flags(parser, "recipe", RECIPE, {**DEFAULTS, **cls.recipe}, cls.low_res_recipe)
    add_method_arguments(parser, cls)
    pairs = PAIRS if getattr(cls, "pairs", None) == "images" else {}
    add_flags(parser, "pretraining", {**PRETRAINING, **pairs})
    return run_cli(parser, pretrain, words)


if __name__ == "__main__":
    shell(main)
