"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

Start at the top. `pretrain` opens the data, builds the model, and hands both to `fit`. For each
epoch, `fit` calls `train_epoch`, which calls `train_step` for each batch: forward, backward,
optimizer step. The other sections are: model and recipe, evaluation, data, checkpoints, processes,
command line. `args` holds all settings: flags (from the recipe if not given), rank, world, device.

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
import zlib
from contextlib import nullcontext, suppress
from functools import partial
from glob import glob
from itertools import islice, product, tee
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageDraw, ImageOps
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
from vit import (SIZES, Block, InputError, denormalize, from_released, grid_of, mask_noise,
                 normalize, pair, require, sizes_of, transfer, visible_count)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}


# --------------------------------------------------------------------------------------- training
def pretrain(args):
    """Train the model of --method on --data, and return the last row of log.jsonl."""
    cls = METHODS[args.method]
    args.data = args.data or "shapes"
    saved = open_run(args, f"{args.method}_{name_of(args.data)}")
    source = saved or {"config": {}}                       # sizes, and any weights, are from here
    if args.init and not saved:
        source = read_checkpoint(args.init, args.heads)
    img_size = args.img_size or source["config"].get("img_size")
    train, val, img_size = open_data(args.data, img_size, args)
    config = vit_config(args, img_size, {"in_chans": len(cls.mean), **source["config"]})
    model, config = build_model(args, config, source, resumed=bool(saved))
    del source                                             # its weights are in the model now
    apply_recipe(args, cls.recipe, cls.low_res_recipe, config, len(train.labels), model.lr_scale)
    # True: each image has a partner (i-MAE). "views": its partner is another crop of it (FORKS.md)
    args.pairs = getattr(cls, "pairs", False)
    args.same_draws = True                                 # MINR's random pixels: see train_step
    if args.pairs is True:
        check_same_class(train.labels, train.classes, args.same_class)
    if not train.in_memory:                                # random crops, not centre crops
        train.transform = crop_transform(img_size, args)

    def make_inputs(images, labels):
        """Return the model's arguments: images, noise and, for pairs, partners and alpha."""
        halves = images.chunk(2 if args.pairs else 1)      # with pairs, partners come last
        crops = [crop_batch(x, img_size, args) for x in halves] if train.in_memory else halves
        images, *partners = [normalize(x, model) for x in crops]
        # noise decides the mask: in each image, the patches with the lowest noise stay visible
        noise = mask_noise(args.mask, args.batch_size, model.encoder.grid, args.device)
        alpha = [model.draw_alpha(args.device)] if args.pairs is True else []
        return images, local_part(noise, args), *partners, *alpha

    evaluate = partial(evaluate_psnr, model, val, args, args.mask)
    return fit(args, model, decay_groups(model, args.weight_decay), train, val, make_inputs,
               evaluate, saved, method=args.method, config=config)


def fit(args, model, groups, train, val, make_inputs, evaluate, saved, **content):
    """Train for --epochs epochs and return the last row of log.jsonl. make_inputs(images, labels)
    returns the model's arguments. evaluate() returns scores {name: value} and the columns of
    recon.png, or None for no picture. `saved` is the last.pt to resume from, or {}. `content` is
    added to every last.pt."""
    n, pieces = len(train.labels), args.world * args.accum
    require(args.batch_size <= n and args.batch_size % pieces == 0,
            f"--batch_size {args.batch_size} must be at most {n} (training images) and "
            f"divisible by {args.world} processes x --accum {args.accum}")
    args.eval_every = args.eval_every or max(1, args.epochs // 50)
    optimizer = make_optimizer(args, groups)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype is torch.float16)
    content.update(classes=train.classes, mean=model.mean, std=model.std, flags=vars(args))
    history = resume(saved, model, optimizer, scaler, content) if saved else []
    describe(args, model, train, val)
    net, folder = wrap(model, args), Path(args.runs, args.name)
    if args.rank == 0 and history:                         # a killed run may lack its last row
        write_log(history, folder)
    elif args.rank == 0:                                   # no --resume may continue an old run
        (folder / "last.pt").unlink(missing_ok=True)

    if args.epochs == 0 and not history:                   # no training: save the initial model
        scores, columns = evaluate()
        history.append({"epoch": 0, **scores})
        print("epoch 0:", ", ".join(f"{name} {value:.4g}" for name, value in scores.items()))
        if args.rank == 0:
            save_run(folder, model, optimizer, scaler, history, content, columns)
    epochs = range(history[-1]["epoch"] if history else 0, args.epochs)
    batches = load_images(train, draw_keys(train, epochs, args), args)
    saved_at = perf_counter()
    for epoch in epochs:
        row = train_epoch(epoch, model, net.train(), optimizer, scaler, batches,
                          n // args.batch_size, make_inputs, args)
        due = (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs
        scores, columns = evaluate() if due else ({}, None)
        history.append({"epoch": epoch + 1, **row, **scores})
        if epoch == epochs.start:
            report_unreadable(train, args)
        if args.rank == 0 and (due or perf_counter() - saved_at > 60):
            save_run(folder, model, optimizer, scaler, history, content, columns)
            saved_at = perf_counter()
        shown = [f"{name} {history[-1][name]:.4g}" for name in
                 ("loss", "psnr_masked", "top1", "img_s", "wait") if name in history[-1]]
        print(f"epoch {epoch + 1}:", ", ".join(shown), flush=True)
    print("see    ", *sorted(folder.glob("*.*")))
    return history[-1]


def train_epoch(epoch, model, net, optimizer, scaler, batches, steps, make_inputs, args):
    """Train for one epoch, on the next `steps` batches, and return its values for the log. `net` is
    the model as returned by `wrap`."""
    totals, waited = {}, 0.0
    pause = 0.1 if sys.stderr.isatty() else 60             # a log file gets a line each minute
    bar = tqdm(islice(batches, steps), f"epoch {epoch + 1}/{args.epochs}", steps, unit="img",
               unit_scale=args.batch_size, leave=False, mininterval=pause, delay=pause,
               disable=args.rank > 0)
    began = asked = perf_counter()                         # asked: when a batch was last requested
    for step, (images, labels) in enumerate(bar, start=1):
        waited += perf_counter() - asked
        lr = learning_rate(epoch + (step - 1) / steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)             # finetune: layer decay
        step_seed = hash((args.seed, epoch, step))         # integers hash the same everywhere
        torch.manual_seed(step_seed)                       # seeds crops, masks and mixing
        inputs = make_inputs(images, labels)
        metrics = train_step(net, optimizer, scaler, inputs, step_seed + 1, args)
        if hasattr(model, "after_step"):                   # a momentum teacher, for example
            model.after_step((epoch + step / steps) / args.epochs)
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0) + value
        if step % 20 == 0 or step == steps:                # the loop's only host-device sync
            loss = metrics["loss"].item()
            # In fp16, some steps overflow: the scaler skips them and halves its scale. If the scale
            # is down to 1, the loss itself is wrong.
            require(math.isfinite(loss) or scaler.get_scale() > 1, f"the loss is {loss} at epoch "
                    f"{epoch + 1}, step {step}: use --clip_grad or a lower --lr")
            bar.set_postfix_str(f"loss {loss:.4f}, lr {lr:.1e}", refresh=False)
        asked = perf_counter()
    means = mean_over_processes(totals, steps, args)
    seconds = perf_counter() - began
    return {"lr": lr, **means, "wait": round(waited / seconds, 3),
            "img_s": round(steps * args.batch_size / seconds, 1)}


def train_step(net, optimizer, scaler, inputs, seed, args):
    """Take one optimizer step, in --accum pieces. `inputs` are this process's arguments for net.
    Returns metrics {name: value} on the device. Never synchronises host and device."""
    metrics = {}
    for i in range(args.accum):
        # i-MAE's alpha, a scalar, goes to every piece
        piece = [x.chunk(args.accum)[i] if x.ndim else x for x in inputs]
        # Seed the draws inside the model. In pretraining, all pieces and processes draw the same
        # numbers (MINR's pixels); in fine-tuning, each piece draws its own (drop path).
        torch.manual_seed(seed if args.same_draws else seed + args.rank * args.accum + i)
        sync_gradients = args.world == 1 or i + 1 == args.accum        # at the last piece
        with nullcontext() if sync_gradients else net.no_sync():
            with autocast(args):
                loss, values = net(*piece)
            scaler.scale(loss / args.accum).backward()
        for name, value in values.items():
            metrics[name] = metrics.get(name, 0) + value / args.accum
    if args.clip_grad:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip_grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return metrics


def draw_keys(train, epochs, args):
    """Yield, for each step of `epochs`, the keys (b,2) of this process's images. A key is a crop
    seed and an image's index. With pairs, a step's images come first, then their partners."""
    n = len(train.labels)
    for epoch in epochs:
        seed = hash((args.seed, epoch))
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=g)[:n - n % args.batch_size]
        keys = [keys_of(order, seed)]
        if args.pairs:
            partners = order if args.pairs == "views" else draw_partners(
                order, train.labels, args.same_class, g)
            keys.append(keys_of(partners, seed ^ 1))       # their crops differ
        for step in zip(*(x.split(args.batch_size) for x in keys)):
            yield torch.cat([local_part(x, args) for x in step])


def learning_rate(t, args):
    """Return the learning rate at time t in epochs, e.g. 3.7. It grows linearly from 0 to lr over
    warmup_epochs, as in the release. Then it is constant or falls to min_lr along half a cosine."""
    if t < args.warmup_epochs:
        return args.lr * t / args.warmup_epochs
    if args.schedule == "constant":
        return args.lr
    t = (t - args.warmup_epochs) / (args.epochs - args.warmup_epochs)
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * t))


def decay_groups(model, weight_decay):
    """Return two parameter groups, with and without weight decay: biases and norms are exempt."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [dict(params=[p for p in trained if p.ndim > 1], weight_decay=weight_decay),
            dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]


def make_optimizer(args, groups):
    """Return the recipe's optimizer, fused except on MPS."""
    kind = dict(adamw=torch.optim.AdamW, adam=torch.optim.Adam, sgd=torch.optim.SGD)[args.optimizer]
    more = dict(momentum=0.9) if args.optimizer == "sgd" else dict(betas=args.betas)
    return kind(groups, lr=args.lr, fused=args.device.type != "mps", **more)


def wrap(model, args):
    """Prepare the model for training: gradient checkpointing, DistributedDataParallel and
    torch.compile, as requested."""
    if args.grad_checkpointing:
        for module in model.modules():
            if isinstance(module, (Block, CrossBlock)):
                module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if args.world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.compile:
        # torch 2.6 cannot combine optimize_ddp with checkpointing
        torch._dynamo.config.optimize_ddp = not args.grad_checkpointing
        model = torch.compile(model, dynamic=False)
    return model


def describe(args, model, train, val):
    """Print what is trained, on what data and how."""
    n, n_val, encoder = len(train.labels), len(val.labels[:args.eval_images]), model.encoder
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"data    {args.data}: {n} train, {n_val} val, {encoder.img_size} pixels in patches of "
          f"{encoder.patch_size}, {'in memory' if train.in_memory else 'in files'}")
    print(f"model   {type(model).__name__}: {size:.2f} M parameters, {args.world} x {args.device}, "
          f"{args.dtype}")
    print(f"train   {args.epochs} epochs ({args.warmup_epochs:g} warmup), {n // args.batch_size} "
          f"steps per epoch, batch size {args.batch_size}, {args.optimizer}, lr {args.lr:.3g}")


# --------------------------------------------------------------------------- the model, the recipe
def build_model(args, config, source, resumed):
    """Return the model of --method, and its constructor arguments: the encoder's (`config`) and the
    method's own. Weights are random or from `source`, the --init file. When a run is resumed,
    `source` is its last.pt. A teacher's sizes come from it; `resume` later loads all weights."""
    cls, teacher = METHODS[args.method], {}
    own = method_arguments(cls)
    fill_in(args, {**own, **cls.low_res_config} if is_low_res(config) else own)
    config = {**config, **{name: getattr(args, name) for name in own}}
    if resumed and "teacher" in source["config"]:
        config["teacher"] = source["config"]["teacher"]
    elif getattr(args, "teacher", None) and not resumed:
        config["teacher"], teacher = teacher_of(read_checkpoint(args.teacher, args.heads), config)
    elif hasattr(args, "teacher"):                         # i-MAE's flag
        print("note    no --teacher, an MAE's checkpoint: training without distillation")
    torch.manual_seed(args.seed)
    model = cls(**config).to(args.device)
    visible_count(model.encoder.num_patches, model.mask_ratio)         # checks the mask ratio
    if args.init and not resumed:
        initialize(model, source, args.init)
    if teacher:                                            # overrides one in the --init file
        model.teacher.load_state_dict(teacher)
        print(f"teacher {args.teacher}")
    return model, config


def vit_config(args, img_size, source):
    """Return the encoder's constructor arguments. Each comes from the last of these that sets it:
    the defaults, `source` (a checkpoint's config or {}), --size, its own flag."""
    patch_size = tuple(16 if side >= 128 else max(4, side // 8) for side in img_size)
    defaults = dict(patch_size=patch_size, in_chans=3, **SIZES["micro"])
    flags = {name: value for name, value in vars(args).items() if value is not None}
    config = {**defaults, **source, **SIZES.get(args.size, {}), **flags, "img_size": img_size}
    return {name: config[name] for name in ("img_size", *defaults)}


def is_low_res(config):
    """Return whether the low-resolution settings apply: to images of up to 64 pixels, or to an
    encoder no wider than micro."""
    return max(config["img_size"]) <= 64 or config["dim"] <= SIZES["micro"]["dim"]


def method_arguments(cls):
    """Return a method's own flags, {name: default}: its constructor's keyword-only arguments."""
    return cls.__init__.__kwdefaults__ or {}


def fill_in(args, defaults):
    """Fill in the flags that were not given, using `defaults` {name: value}."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def apply_recipe(args, recipe, low_res, config, n, lr_scale=1.0):
    """Set the training flags that were not given, from `recipe`. If is_low_res(config), `low_res`
    overrides it. Three defaults are adapted. A batch larger than a tenth of the n training images
    becomes the largest power of two below. Fewer --epochs shorten the warmup in proportion. The
    learning rate is lr_scale (CrossMAE A.6) times lr or, without an lr, times blr * batch_size /
    256 (MAE A.1)."""
    recipe = {"min_lr": 0.0, **recipe, **(low_res if is_low_res(config) else {})}
    lr = None if args.blr is not None else recipe.get("lr")            # --blr replaces any lr
    if args.batch_size is None and recipe["batch_size"] > n / 10:
        recipe["batch_size"] = 2 ** max(1, int(math.log2(n / 10)))
        print(f"note    the batch size is {recipe['batch_size']}, because {n} images are few")
    if args.epochs is not None:
        recipe["warmup_epochs"] *= min(1, args.epochs / recipe["epochs"])
    fill_in(args, {name: value for name, value in recipe.items() if name != "lr"})
    args.warmup_epochs = min(args.warmup_epochs, args.epochs)
    if args.lr is None:
        args.lr = lr_scale * (args.blr * args.batch_size / 256 if lr is None else lr)


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_psnr(model, val, args, mask, mask_ratio=None):
    """Return three mean PSNRs in dB: of the masked pixels, of the image with visible pixels copied
    in, and of the raw reconstruction. Masks follow the pattern `mask` and depend only on the
    image's index. Also returns columns {title: up to 8 images}: original, masked, decoded (the raw
    reconstruction), and completed (with visible pixels copied in)."""
    if getattr(model, "reconstruct", None) is None:        # a method that predicts no pixels
        return {}, None
    columns, encoder, n = None, model.eval().encoder, 0
    # a process without images reports zeros
    sums = dict.fromkeys(("psnr_masked", "psnr_image", "psnr_decoded"), 0)
    for ids, images, _ in val_batches(val, args, encoder.img_size, args.eval_images):
        # 7 is arbitrary, but fixed: masks must not depend on --seed
        generators = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in generators])
        with autocast(args):
            decoded, patches = model.reconstruct(normalize(images, model), noise.to(args.device),
                                                 mask_ratio, args.leak_free)
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
    return mean_over_processes(sums, n, args), columns


@torch.no_grad()
def compare(args):
    """Run --eval: print a PSNR row for each checkpoint, mask and ratio, and return the rows.
    Saves a picture for the first mask and ratio. tests/analyses.py has the papers' analyses."""
    require(args.world == 1, f"--eval runs in one process, not in {args.world}")
    rows, names, columns, paths = [], [], {}, []
    for word in args.eval:                                 # Windows shells do not expand runs/*
        paths += [word] if Path(word).exists() else sorted(glob(word)) or [word]
    for path in paths:
        path = os.path.join(path, "last.pt") if Path(path).is_dir() else path
        content = read_checkpoint(path)
        if getattr(METHODS.get(content["method"]), "reconstruct", None) is None:
            print(f"note    skipping {path}, a {content['method']}: it predicts no pixels")
            continue
        model = load_model(path).to(args.device)
        sizes = f"--img_size {model.encoder.img_size} and --patch_size {model.encoder.patch_size}"
        own_data = content["flags"].get("data", "shapes")
        if not rows:                                       # all get the first one's data and size
            first, first_sizes, args.data = path, sizes, args.data or own_data
            val, _ = open_data(args.data, model.encoder.img_size, args, parts=["val"])
        require(sizes == first_sizes, f"{path} has {sizes}, but {first} has {first_sizes}: "
                                      f"evaluate them separately")
        if own_data != args.data:
            print(f"note    {path} was trained on {own_data} and is evaluated on {args.data}")
        names.append(name_of(path))
        for mask, ratio in product(args.masks, args.mask_ratios):
            scores, images = evaluate_psnr(model, val, args, mask, ratio)
            rows.append({"checkpoint": path, "mask": mask, "mask_ratio": ratio, **scores})
            if (mask, ratio) == (args.masks[0], args.mask_ratios[0]):
                columns = columns or {name: images[name] for name in ("original", "masked")}
                title = f"{names[-1]}\n{scores['psnr_masked']:.2f} dB"
                columns[title] = images["completed"]
    require(rows, f"--eval {' '.join(args.eval)}: no checkpoint predicts pixels")
    picture = Path(rows[0]["checkpoint"]).with_name(f"{'_'.join(['eval', *names])[:200]}.png")
    save_picture(columns, picture)
    print(f"PSNR in dB, mean over {len(val.labels[:args.eval_images])} images of {args.data}")
    print(as_table(rows))
    print(f"see     {picture}")
    return rows


def save_picture(columns, path):
    """Write columns {title: images (rows,C,H,W) in [0, 1]} as a picture, with titles at the top.
    Enlarges small images to at most 96 pixels. Shows three channels, or one if they have fewer."""
    images = [x[:, :3] if x.shape[1] >= 3 else x[:, :1] for x in columns.values()]
    H, W = images[0].shape[2:]
    size = [n * max(1, 96 // max(H, W)) for n in (H, W)]
    cells = torch.stack([F.interpolate(x, size) for x in images], dim=1).flatten(0, 1)
    grid = torchvision.utils.make_grid(cells, nrow=len(images), pad_value=1)
    picture = v2.functional.to_pil_image(F.pad(grid, (0, 0, 30, 0), value=1).clamp(0, 1))
    for i, title in enumerate(columns):
        title = "\n".join(line[:size[1] // 6] for line in title.splitlines())    # 6 pixels each
        ImageDraw.Draw(picture).text((2 + i * (size[1] + 2), 2), title, fill="black")
    picture.save(path)


def as_table(rows):
    """Format rows, dicts with the same keys, as aligned columns."""
    rows = [rows[0].keys(), *(row.values() for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


# ------------------------------------------------------------------------------------------- data
class ImageDataset(Dataset):
    """Training or validation images, class names, and labels (N,), where -1 means unlabelled.
    `images` is a uint8 tensor (N,C,H,W) or a list of N file names. Files need a `transform`. With
    it, workers load images one by one. Without it, crop_batch crops whole batches for training."""

    def __init__(self, images, labels, classes):
        self.in_memory = torch.is_tensor(images)
        # An array of bytes: counting references would copy a list of strings into every worker.
        self.images = images if self.in_memory else np.array([*map(os.fsencode, images)])
        self.labels, self.classes, self.transform = torch.as_tensor(labels), classes, None
        self.unreadable, self.reported = torch.zeros(len(images), dtype=torch.bool), 0
        self.unreadable.share_memory_()                    # workers write to it

    def __getitem__(self, key):
        """Return image i and its label for key = (seed, i). The seed is for random transforms. An
        image that cannot be read is replaced by another one, the same for all seeds. But with seed
        0 (validation), it is replaced by a black image, which val_batches leaves out."""
        seed, i = key
        image, g = self.read(i), torch.Generator().manual_seed(i)
        if image is None and seed != 0:
            for i in torch.randint(len(self.images), (100,), generator=g).tolist():
                image = self.read(i)
                if image is not None:
                    break
        if image is None:
            image = torch.zeros(3, 8, 8, dtype=torch.uint8)
        # torch.manual_seed would also seed GPUs, which takes 100 times as long
        torch.default_generator.manual_seed(hash(tuple(key)))
        return self.transform(image), self.labels[i].item()

    def read(self, i):
        """Return image i, or None if its file cannot be read. Reports the first ten such files."""
        if self.in_memory:
            return self.images[i]
        file = os.fsdecode(self.images[i])
        try:
            return read_image(file)
        except Exception as error:                         # a broken file can raise anything
            if not self.unreadable[i] and self.unreadable.sum() < 10:
                tqdm.write(f"cannot read {file}: {error}", file=sys.stderr)
            self.unreadable[i] = True
            return None

    def select(self, ids):
        """Keep only the images with indices ids (n,)."""
        self.labels, self.unreadable = self.labels[ids], self.unreadable[ids].share_memory_()
        self.images = self.images[ids] if self.in_memory else self.images[ids.numpy()]


def report_unreadable(dataset, args):
    """Print the number of a dataset's unreadable files if it has grown. Raises InputError if it
    exceeds a tenth of the files."""
    flags = dataset.unreadable.int().to(args.device)
    if args.world > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)          # each process has read some of the files
    count, text = flags.sum().item(), f"of {len(flags)} image files cannot be read"
    require(count <= len(flags) / 10, f"{count} {text}, more than a tenth")
    if count > dataset.reported:
        print(f"note    {count} {text}")
        dataset.reported = count


def open_data(name, img_size, args, parts=("train", "val")):
    """Return an ImageDataset for each of the `parts` of --data, and the image size (H, W). Images
    in memory are moved to the device. Sets args.images, by which --resume recognises the data."""
    size, args.images = img_size or (32, 32), name
    if name == "shapes":
        counts = [{"train": 10_000, "val": 1_000}[part] for part in parts]       # also the seeds
        datasets = [ImageDataset(*draw_shapes(n, size, seed=n), [*SHAPES]) for n in counts]
    elif name in ("cifar10", "cifar100"):
        kind = getattr(torchvision.datasets, name.upper())
        if args.local_rank > 0:                            # one process of each machine downloads,
            dist.barrier()                                 # and then the others find the files
        try:
            sets = [kind("data", train=part == "train", download=True) for part in parts]
        except (OSError, RuntimeError) as error:
            raise InputError(f"--data {name}: cannot download {kind.url} to data/ ({error}). "
                             "Without internet, pass a folder of images")
        if args.local_rank == 0 and args.world > 1:
            dist.barrier()
        datasets = [ImageDataset(torch.tensor(s.data).movedim(3, 1), s.targets, s.classes)
                    for s in sets]
    elif name.endswith(".pt"):                             # your own tensors: tests/docs/FORKS.md
        content = torch.load(name, weights_only=True)
        require(isinstance(content, dict) and {*parts} <= {*content},
                f"--data {name} must be a dict with train and val (tests/docs/FORKS.md)")
        datasets = [ImageDataset(*content[part]) for part in parts]
        require(all(dataset.images.dtype is torch.uint8 for dataset in datasets),
                f"--data {name}: images must be uint8 (N,C,H,W)")
        size = img_size or tuple(datasets[0].images.shape[2:])
        args.images = f"{zlib.crc32(datasets[0].images.contiguous().numpy()):08x} (checksum)"
    else:
        require(Path(name).is_dir(), f"--data {name} is not shapes, cifar10, cifar100, a .pt file "
                                     f"or a folder")
        datasets, size = open_folder(Path(name).absolute(), img_size, args, parts)
    if args.train_images is not None and "train" in parts:
        order = torch.randperm(len(datasets[0].labels), generator=torch.Generator().manual_seed(0))
        datasets[0].select(order[:args.train_images])
    for dataset in datasets:
        if dataset.in_memory:
            if any(own > side for own, side in zip(dataset.images.shape[2:], size)):
                dataset.images = v2.functional.resize(dataset.images, size)    # antialiased
            dataset.images = dataset.images.to(args.device).contiguous()
    return *datasets, size


def open_folder(root, img_size, args, parts):
    """Return the ImageDatasets of a folder, and the image size (H, W).

    Images are kept in memory if they are small and few. Small: in 50 samples, all sides are shorter
    than 224 pixels and, rounded down as below, at most img_size. Few: the images of a part take at
    most MEMORY bytes in each process. Otherwise, files are read again in every epoch."""
    found = list_folder(root, parts)
    names = "\n".join(file[len(str(root)):] for files, _, _ in found for file in files)
    n = sum(len(files) for files, _, _ in found)
    args.images = f"{n} images, names {zlib.crc32(os.fsencode(names)):08x} (checksum)"
    datasets = [ImageDataset(*part) for part in found]
    first = datasets[0]
    ids = range(0, len(first.labels), math.ceil(len(first.labels) / 50))
    samples = [image for image in map(first.read, ids) if image is not None]
    require(samples, f"--data {root}: none of {len(ids)} images can be read")
    high, wide = (max(x.shape[axis] for x in samples) for axis in (1, 2))
    bright = max(x.max().item() for x in samples)
    if bright < 32:
        print(f"note    images are nearly black (at most {bright}): 12-bit values in 16-bit files?")
    # The images' own size, or 224 x 224. It is rounded down to a multiple of --patch_size or, if
    # that is not given, of 16 (8 below 128 pixels).
    sides = (high, wide) if max(high, wide) < 224 else (224, 224)
    units = args.patch_size or [16 if side >= 128 else 8 for side in sides]
    own = tuple(max(unit, side - side % unit) for side, unit in zip(sides, units))
    H, W = img_size or own
    small = max(high, wide) < 224 and own[0] <= H and own[1] <= W
    for i, dataset in enumerate(datasets):
        dataset.transform = partial(center_crop, img_size=(H, W))
        if small and 3 * len(dataset.labels) * H * W <= MEMORY:
            keys = keys_of(torch.arange(len(dataset.labels))).split(PIECE)
            images = torch.cat([x.cpu() for x, _ in load_images(dataset, keys, args)])
            report_unreadable(dataset, args)
            good = ~dataset.unreadable
            datasets[i] = ImageDataset(images[good], dataset.labels[good], dataset.classes)
    return datasets, (H, W)


def list_folder(root, parts):
    """Return (files, labels, classes) for each of the `parts`. The files are in class folders in
    train/ and val/, or in a plain folder, where a hash of the name selects about 5% for val."""
    found = {}
    if (root / "train").is_dir() or (root / "val").is_dir():
        for part in parts:
            require((root / part).is_dir(), f"--data {root} has no {part}/: add it or, to pretrain "
                                            f"without labels, pass a plain folder of images")
            start = len(str(root / part)) + 1
            files = [file for file in find_images(root / part) if os.sep in file[start:]]
            names = [file[start:].split(os.sep)[0] for file in files]
            classes = {name: i for i, name in enumerate(sorted({*names}))}
            found[part] = files, [classes[name] for name in names], [*classes]
        first, last = (set(found[part][2]) for part in (parts[0], parts[-1]))
        differ = ", ".join(sorted(first ^ last)) or "none"
        require(first and first == last, f"--data {root}: train/ and val/ need the same class "
                                         f"folders, with images in each; different: {differ}")
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


def find_images(root):
    """Return the sorted image files in a folder and its subfolders. Follows links, but reads each
    folder once. Skips names that begin with a dot, and __MACOSX. Prints the number of files of
    other types. Raises InputError if a folder has two or more of train/, val/, valid/ and test/."""
    files, others = [], []
    seen = {*map(os.path.realpath, root.parents)}          # a link to a parent would lead back here
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(x for x in folders if not x.startswith(".") and x != "__MACOSX")
        parts = [x for x in folders if x.lower() in ("train", "val", "valid", "test")]
        require(len(parts) < 2, f"--data {root}: did you mean --data {folder}, with subfolders "
                                f"train/ and val/? It has {' and '.join(parts)}")
        if os.path.realpath(folder) in seen:
            folders.clear()                                # os.walk goes no deeper
            continue
        seen.add(os.path.realpath(folder))
        names = [name for name in names if not name.startswith(".")]
        images = [name for name in names if name.lower().endswith(IMG_EXTENSIONS)]
        files += [os.path.join(folder, name) for name in images]
        others += [os.path.splitext(name)[1].lower() for name in {*names} - {*images}]
    if others:
        types = " ".join(sorted({*others})[:9])
        print(f"note    {len(others)} files in {root} are of other types and not read: {types}")
    return sorted(files)


MEMORY = 4 * 1024 ** 3                                     # bytes, see open_folder
PIECE = 64  # images that a worker reads at once: whole batches of 4,096 would take 9.9 GB


def keys_of(ids, seed=0):
    """Return keys (n,2), the arguments of ImageDataset[...], for the indices ids (n,)."""
    return torch.stack([torch.full_like(ids, seed), ids], dim=1)


def load_images(dataset, batches, args):
    """Yield uint8 images (b,C,H,W) and labels (b,) on the device, for each tensor of keys (b,2) in
    `batches`. Images come from memory or, with a transform, from workers that read ahead."""
    cuda = args.device.type == "cuda"
    to_device = dict(device=args.device, non_blocking=cuda)
    if dataset.transform is None:
        for keys in batches:
            ids = keys[:, 1]
            yield dataset.images[ids.to(**to_device)], dataset.labels[ids].to(**to_device)
        return
    batches, again = tee(batches)                          # one for the workers, one for this loop
    pieces = (piece.tolist() for keys in batches for piece in keys.split(PIECE))
    workers = min(args.workers, math.ceil(len(dataset.labels) / PIECE))
    fork = sys.platform == "linux" and workers > 0         # elsewhere the system's default
    loaded = iter(DataLoader(dataset, batch_sampler=pieces, num_workers=workers, pin_memory=cuda,
                             multiprocessing_context="fork" if fork else None))
    for keys in again:
        parts = [next(loaded) for _ in keys.split(PIECE)]
        yield [torch.cat([x.to(**to_device) for x in part]) for part in zip(*parts)]


def val_batches(dataset, args, img_size, most=None):
    """Yield this process's batches (indices, images, labels), of at most 100 images each. They are
    from a fixed random subset of at most `most` images. Unreadable images are left out, and their
    number is printed at the end."""
    order = torch.randperm(len(dataset.labels), generator=torch.Generator().manual_seed(0))
    own = order[:most].tensor_split(args.world)[args.rank]
    batches = own.split(100) if len(own) else ()
    loaded = load_images(dataset, [keys_of(ids) for ids in batches], args)
    for ids, (images, labels) in zip(batches, loaded):
        good = ~dataset.unreadable[ids]
        ids, images, labels = ids[good], images[good], labels[good]
        if len(ids):
            yield ids, v2.functional.resize(images, img_size), labels
    report_unreadable(dataset, args)


def crop_batch(images, img_size, args):
    """Crop, resize and flip this process's in-memory images (b,C,H,W), each independently.
    Interpolates bilinearly (crop_transform: bicubically) and returns floats. Crops that exceed the
    image are clipped. As in validation, images are stretched to the aspect ratio of img_size."""
    draws = local_part(torch.rand(args.batch_size, 5, device=images.device), args)
    area, stretch, y, x, coin = draws.unbind(1)                        # (b,) each, in [0, 1)
    area = args.crop + (1 - args.crop) * area              # as a fraction of the image area
    # square root of the aspect ratio w / h, drawn from 3/4 to 4/3; 1 without a crop
    stretch = ((2 * stretch - 1) * math.log(4 / 3) * (args.crop < 1) / 2).exp()
    h, w = (area.sqrt() / stretch).clamp(max=1), (area.sqrt() * stretch).clamp(max=1)
    y, x = (2 * y - 1) * (1 - h), (2 * x - 1) * (1 - w)    # the crop's centre, in [-1, 1]
    w_flipped, zero = torch.where(coin < 0.5 * args.flip, -w, w), torch.zeros_like(h)
    theta = torch.stack([w_flipped, zero, x, zero, h, y], dim=1).view(-1, 2, 3)
    points = F.affine_grid(theta, (len(theta), 1, *img_size), align_corners=False)
    H, W = images.shape[2:]
    for axis, side in ((0, W), (1, H)):        # like padding_mode "border", which MPS may lack
        points[..., axis].clamp_(1 / side - 1, 1 - 1 / side)
    return F.grid_sample(images.float(), points, align_corners=False)  # (b, C, h', w')


def crop_transform(img_size, args, *more):
    """Return a transform for an image (C,h,w): torchvision's random resized crop and flip, then
    `more`. Images in memory use it only with `more`; otherwise crop_batch crops them."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if args.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (args.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * args.flip), *more])


def center_crop(image, img_size, fraction=None):
    """Crop the centre of an image (C,h,w) and resize it to img_size. The crop has the aspect ratio
    of img_size. Its sides are `fraction` times the largest possible ones. By default, `fraction` is
    7/8 if a side has 224 pixels or more, as in MAE (224 of 256 pixels), and 1 otherwise."""
    (h, w), (H, W) = image.shape[1:], img_size
    fraction = fraction or (7 / 8 if max(h, w) >= 224 else 1)
    scale = fraction * min(h / H, w / W)
    crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
    return v2.functional.resize(crop(image), img_size, v2.InterpolationMode.BICUBIC)


def read_image(file):
    """Read an image file as RGB (3,H,W), uint8, rotated upright. Transparent images get a white
    background. JPEGs take a path that is twice as fast."""
    data = Path(file).read_bytes()
    # only these formats: PIL would start Ghostscript for an EPS file, whatever its name
    formats = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
    try:
        if data[:2] == b"\xff\xd8" and hasattr(torchvision.io, "decode_image"):    # a JPEG
            data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
        with Image.open(file, formats=formats) as image:
            image.load()
    except Exception:
        raise InputError(f"cannot read {file}: save it as .jpg or .png") from None
    with suppress(Exception):                              # a broken EXIF field loses no image
        image = ImageOps.exif_transpose(image)
    require(image.mode != "F", "floating-point images are not supported")
    if image.mode.startswith("I"):                         # 16 bits; convert("RGB") would clip them
        image = image.convert("I")
        low, high = image.getextrema()
        require(0 <= low and high < 2 ** 16, f"values from {low} to {high} do not fit 16 bits")
        image = image.point(lambda value: value / 256).convert("L")
    if "A" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return v2.functional.pil_to_tensor(image.convert("RGB"))


# m, q, k: at angle a, the outline has radius (2^(k/2-1) (|cos ma/4|^k + |sin ma/4|^k)) ^ -1/q
SHAPES = {  # (Gielis's superformula; the factor 2^(k/2-1) makes the largest radius 1)
    "disc": (0, 1, 2), "lens": (2, 3, 5), "triangle": (3, 5, 9), "square": (4, 12, 15),
    "pentagon": (5, 9, 8), "cross": (4, 3, 7), "star": (5, 4, 8), "propeller": (3, 2, 6)}


def draw_shapes(n, img_size, seed):
    """Draw n images (n,3,H,W), uint8, each with a shape on a background of another colour. Returns
    the images and their labels (n,)."""
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
        colour = (ground + 0.35 + 0.3 * u[8:11].transpose(0, 1)) % 1  # far from ground by channel
        shade = 0.12 * (x * light.cos() + y * light.sin()).unsqueeze(1)  # (b, 1, H, W)
        image = inside * (colour - shade) + (1 - inside) * (ground + shade)
        images.append((image.clamp(0, 1) * 255).round().byte())        # (b, 3, H, W)
    return torch.cat(images), labels


# ------------------------------------------------------------------------------------ checkpoints
def open_run(args, name):
    """Create the folder of this run, named `name` unless --name is given. Returns its last.pt if
    --resume finds one, otherwise {}. Without --resume or --overwrite, raises InputError if the
    folder exists. run_cli removes the folder if nothing is saved in it."""
    args.name = args.name or name.replace(" ", "_")
    folder = Path(args.runs, args.name)
    if args.rank == 0:
        with suppress(FileExistsError):                    # of runs that start at once, one gets it
            folder.mkdir(parents=True)
            args.created = True
    last = folder / "last.pt"
    share = mean_over_processes({"created": args.created, "found": last.exists()}, 1, args)
    require(share["created"] or args.resume or args.overwrite, f"{folder} exists: --resume "
            f"continues this run, --overwrite replaces it, --name NAME starts another one")
    require(share["found"] in (0, 1), f"not all processes find {last}: --runs must be on a shared "
                                      f"disk")
    if args.resume and not share["found"]:
        print(f"note    nothing to resume: {last} does not exist, so a new run starts")
    return read_checkpoint(last) if args.resume and share["found"] else {}


def name_of(path):
    """Return what runs call data or a checkpoint: a last.pt by its folder, others by their name."""
    path = Path(path).absolute()
    return path.parent.name if path.name == "last.pt" else re.sub(r"\.pth?$", "", path.name)


def save_run(folder, model, optimizer, scaler, history, content, columns):
    """Write last.pt, log.jsonl and any new recon.png. --resume continues from last.pt."""
    weights, epoch = model.state_dict(), history[-1]["epoch"]
    require(all(x.isfinite().all() for x in weights.values()), f"weights are not finite after "
            f"epoch {epoch}: use --clip_grad or a lower --lr")
    save(folder / "last.pt", dict(
        content, model=weights, optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
        epoch=epoch, history=history, torch=str(torch.__version__)))
    write_log(history, folder)
    if columns:
        save_picture(columns, folder / "recon.png")


def write_log(history, folder):
    """Write log.jsonl, with a row for each epoch."""
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))


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


def read_checkpoint(path, heads=None):
    """Load a checkpoint, or a folder's last.pt, without executing any code in the file. Returns a
    dict with method (None for a released file), config (constructor arguments), model (state dict),
    mean, std, flags and more."""
    path = Path(path, "last.pt") if Path(path).is_dir() else Path(path)
    require(path.exists(), f"checkpoint {path} does not exist: train.py writes runs/NAME/last.pt")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # in released files
            content = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:                             # a broken file can raise anything
        raise InputError(f"{path} is damaged or no checkpoint ({type(error).__name__})") from None
    if "method" not in content:
        state = from_released(content.get("model", content))
        content = dict(method=None, config=sizes_of(state, path, heads), model=state)
        print(f"note    {path} names no method: assuming {content['config']['heads']} heads "
              f"(--heads), and ImageNet's mean and std")
    cls, config = METHODS.get(content["method"], MAE), {"in_chans": 3, **content["config"]}
    config.update({name: pair(config[name]) for name in ("img_size", "patch_size")})
    return {"flags": {}, "mean": cls.mean, "std": cls.std, **content, "config": config}


def with_decoder(content, path, norm_pix_loss):
    """Return method and constructor arguments of a released MAE or CrossMAE with a decoder."""
    config, state = dict(content["config"]), content["model"]
    require("decoder_pred.weight" in state, f"{path} has no decoder: it predicts no pixels")
    blocks = {name.split(".")[1] for name in state if name.startswith("decoder_blocks.")}
    config.pop("extra_tokens")
    crossed, name = "decoder_embed.weight" not in state, Path(path).name
    if crossed or "full" in name:
        norm_pix_loss = True
    elif "visualize" in name:
        norm_pix_loss = False
    require(norm_pix_loss is not None, f"{path} does not tell whether its targets were normalised: "
                                       f"pass --norm_pix_loss or --no-norm_pix_loss")
    return "crossmae" if crossed else "mae", dict(
        config, norm_pix_loss=norm_pix_loss, decoder_dim=state["mask_token"].shape[2],
        decoder_depth=len(blocks), decoder_heads=16)


def load_model(path, methods=METHODS, norm_pix_loss=None):
    """Return a checkpoint's model in eval mode. Its class_names are those of its training data."""
    content = read_checkpoint(path)
    if content["method"] is None:
        content["method"], content["config"] = with_decoder(content, path, norm_pix_loss)
    require(content["method"] in methods, f"{path}: method {content['method']} is unknown")
    model = methods[content["method"]](**content["config"])
    model.load_state_dict(content["model"])
    model.class_names = content.get("classes", [])
    return model.eval()


def initialize(model, content, path):
    """Initialise `model` from `content`, a checkpoint read from `path`: the encoder, and the
    decoder or head if it matches. Prints what is newly initialised and what is not loaded."""
    state = model.from_mae(content["model"]) if hasattr(model, "from_mae") else content["model"]
    missing, unused = transfer(model, state, grid_of(**content["config"]))
    for text, names in (("not in the file, newly initialised", missing),
                        ("in the file, not loaded", unused)):
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
        if now != value and name not in ("resume", "overwrite", "command", "created"):
            print(f"note    {name} changed from {value} to {now}")
    print(f"resumed after epoch {saved['epoch']} of {content['flags']['epochs']}")
    history = saved["history"]
    saved.clear()                                          # frees its weights
    return history


# -------------------------------------------------------------------------------------- processes
def start_processes(args):
    """Set args.rank, world, local_rank, device, dtype. Under torchrun, join the process group."""
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.rank > 0:
        sys.stdout = open(os.devnull, "w")                 # only rank 0 prints
    if args.device is None:
        mps = torch.backends.mps.is_available() and args.world == 1
        args.device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    cuda, amp = args.device == "cuda", args.amp
    args.device = torch.device(f"cuda:{args.local_rank}" if cuda else args.device)
    if cuda:
        torch.cuda.set_device(args.device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
        if amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    args.dtype = dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)
    # despite its name, this is also for CPUs: there, fused attention is slower in bf16
    torch.backends.cuda.enable_flash_sdp(cuda or args.dtype is not torch.bfloat16)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=args.device if cuda else None)


def autocast(args):
    """Return the mixed-precision context set by --amp; it does nothing in float32."""
    return torch.autocast(args.device.type, args.dtype, enabled=args.dtype is not torch.float32)


def local_part(batch, args):
    """Return this process's part of `batch`, a tensor for the whole batch."""
    return batch.chunk(args.world)[args.rank]


def mean_over_processes(sums, n, args):
    """Return {name: sum / n}, with the sums and the counts n added up over all processes."""
    total = torch.tensor([*map(float, sums.values()), n], dtype=torch.float64)
    if args.world > 1:
        total = total.to(args.device)                      # cuda or cpu: mps has no float64
        dist.all_reduce(total)
    *totals, n = total.tolist()
    require(n > 0, "there are no images, or none can be read")
    return {name: value / n for name, value in zip(sums, totals)}


# ------------------------------------------------------------------------------- the command line
def in_range(kind, low, high=math.inf):
    """Return an argparse type: an int or float from low to high."""
    def number(text):                                      # argparse's errors show this name
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value
    return number


def numbers(kind):
    """Return an argparse type that turns `0,5,11` into (0, 5, 11)."""
    return lambda text: tuple(kind(part) for part in text.split(","))


def word_or_integers(text):
    """Parse `all` as "all" and `0,5,11` as (0, 5, 11)."""
    return text if text.isidentifier() else numbers(int)(text)


def size_in_pixels(text):
    """Parse `32` as (32, 32) and `32,48` as (32, 48)."""
    sides = numbers(count)(text)
    return pair(sides[0] if len(sides) == 1 else sides)


count, not_negative = in_range(int, 1), in_range(float, 0)
fraction = in_range(float, 0, 1)

# flags, {name: (type or choices, help)}
DATA = {
    "data": (str, "shapes, cifar10, cifar100, a folder or a .pt file; default: shapes or, with "
                  "--eval and in finetune.py, the checkpoint's data"),
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
    "runs": (str, "folder for all runs"),
    "name": (str, "name of the run; default: made from method or checkpoint, mode and data"),
    "eval_every": (count, "validate and save every X epochs; default: 1, or epochs / 50 if more"),
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
    "betas": (numbers(fraction), "betas of Adam and AdamW, e.g. 0.9,0.95"),
    "weight_decay": (not_negative, "weight decay; biases and norms are exempt"),
    "epochs": (in_range(int, 0), "passes over the training images"),
    "warmup_epochs": (not_negative, "epochs of linear warmup; default: less with fewer --epochs"),
    "crop": (fraction, "minimum area of the random crop, as a fraction of the image; 1: no crop"),
    "flip": (bool, "random horizontal flip")}
PRETRAINING = {
    "init": (str, "checkpoint that initialises the encoder and, if it fits, the decoder"),
    "mask": (("random", "grid", "block"), "pattern of the masks"),
    "leak_free": (bool, "with norm_pix_loss, validate without the true patches' mean and variance")}
PAIRS = {
    "teacher": (str, "MAE checkpoint to distill from; default: none"),
    "same_class": (fraction, "fraction of pairs within one class; default: random pairs")}
# none outside Linux, where starting workers is slow
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
DEFAULTS = dict(workers=min(16, math.ceil(CORES / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))),
                amp="auto", seed=0, runs="runs", accum=1, compile=False, grad_checkpointing=False,
                resume=False, overwrite=False, mask="random", leak_free=False,
                train_images=None, patch_size=None)        # open_data reads these in every mode


def new_parser(script, about):
    """Return a parser without flags. Which flags it gets depends on --method, --eval or --mode."""
    about += ("\n\nDefaults are in parentheses. low_res: those for images of up to 64 pixels, and "
              "for any\nencoder no wider than micro, for which they were chosen.")
    return argparse.ArgumentParser(script, usage=argparse.SUPPRESS, allow_abbrev=False,
                                   add_help=False, description=about,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)


def add_flags(parser, title, flags, defaults=DEFAULTS, low_res={}):
    """Add flags {name: (type or choices, help)}. Flags that are not given stay None until fill_in
    sets them. The help shows the default and, if it differs, the default in `low_res`."""
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


def run_cli(parser, work, argv):
    """Parse `argv`, by default the command line, and return work(args). On invalid input, exits
    with a one-line error message."""
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", parser.prog, *(sys.argv[1:] if argv is None else argv)])
    fill_in(args, {**DEFAULTS, "created": False})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))            # so that `finally` runs
    try:
        start_processes(args)
        row = work(args)
    except (InputError, OSError) as error:                 # OSError: a full disk, for example
        # only the last line: a worker's error begins with a traceback
        parser.error((str(error).strip() or repr(error)).splitlines()[-1])
    except KeyboardInterrupt:
        parser.exit(130, "stopped; to continue a training run, repeat its command with --resume\n")
    finally:
        # a run that has saved nothing leaves nothing: rmdir removes only empty folders
        if args.created:
            with suppress(OSError):
                Path(args.runs, args.name).rmdir()
    if dist.is_initialized() and args.device.type == "cuda":           # not needed on CPUs,
        dist.destroy_process_group()                       # where torch 2.6 can hang here
    return row


def main(argv=None):
    """Run `python train.py` with the arguments `argv`. Returns the last row of log.jsonl (a dict)
    or, with --eval, the list of PSNR rows."""
    parser = new_parser("train.py", f"usage: python train.py --method {'|'.join(METHODS)} [--flag "
                        f"value ...]\n       python train.py --eval FILE ... [--flag value ...]")
    option = parser.add_argument
    option("--method", choices=METHODS, default="mae", metavar="NAME", help="method to train (mae)")
    option("--eval", nargs="+", metavar="FILE", help="instead of training, evaluate checkpoints "
           "with the same image and patch size; for its flags see --eval FILE --help")
    known = parser.parse_known_args(argv)[0]               # these decide which other flags exist
    cls = METHODS[known.method]
    parser.set_defaults(eval_images=1000)
    add_flags(parser, "data and device", DATA)
    if known.eval:
        option("--mask_ratios", nargs="+", type=fraction, default=(0.75, 0.5, 0.9), metavar="X",
               help="mask ratios; the picture shows the first one (0.75 0.5 0.9)")
        option("--masks", nargs="+", choices=PRETRAINING["mask"][0], default=["random"],
               help="patterns of the masks; the picture shows the first one (random)")
        add_flags(parser, "reconstruction", {"leak_free": PRETRAINING["leak_free"]})
        return run_cli(parser, compare, argv)
    add_flags(parser, "training images and encoder", ENCODER)
    add_flags(parser, "run", RUN)
    add_flags(parser, "recipe", RECIPE, {**DEFAULTS, **cls.recipe}, cls.low_res_recipe)
    add_method_arguments(parser, cls)
    pairs = PAIRS if getattr(cls, "pairs", False) is True else {}
    add_flags(parser, "pretraining", {**PRETRAINING, **pairs})
    return run_cli(parser, pretrain, argv)


if __name__ == "__main__":
    main()
