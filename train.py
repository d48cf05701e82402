"""Pretrain a masked autoencoder: `python train.py --method mae`, or the same under torchrun.

Read it from the top. `pretrain` opens the data, builds the model, and hands both to `fit`. `fit`
calls `train_epoch` for each epoch, and that calls `train_step`: forward, backward, optimizer step.
Then come helpers, model and recipe, evaluation, data, checkpoints, processes, the command line.

Each step is seeded from (seed, epoch, step). Each process draws random numbers for the whole batch
and keeps its part, so N processes pretrain like one. Random crops of image files are seeded from
(seed, epoch, image). Resuming needs no saved random state. finetune.py uses the same loop.

A method is a class like those in METHODS. "Forks" in tests/REFERENCE.md lists what it must have.
"""

import argparse
import inspect
import json
import math
import os
import re
import shlex
import sys
import zlib
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from glob import glob
from itertools import chain, islice, tee
from pathlib import Path
from time import perf_counter, sleep

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
from imae import IMAE, check_same_class, draw_partners, teacher_of
from mae import MAE
from minr import MINR
from vit import (SIZES, Block, InputError, denormalize, from_released, grid_of, mask_noise,
                 normalize, pair, require, sizes_of, transfer, visible_count)

METHODS = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE}


# --------------------------------------------------------------------------------------- training
def pretrain(args):
    """Train the model of --method on --data, and return the last row of log.jsonl. `args` holds the
    flags and the command. start_processes adds rank, world, local_rank, device and dtype; this
    function adds pairs and same_draws; open_folder adds files; apply_recipe sets other flags."""
    args.data = args.data or "shapes"
    name_run(args, f"{args.method}_{Path(args.data).resolve().name}")
    init = read_checkpoint(args.init, args.heads) if args.init else {"config": {}}
    img_size = args.img_size or init["config"].get("img_size")
    train, val, img_size = open_data(args.data, img_size, args)
    model, config = build_model(args, train, img_size, init)
    del init                                               # its weights are in the model now
    args.pairs = model.pairs                               # i-MAE learns from pairs of images
    args.same_draws = True                                 # MINR's random pixels: see train_step
    if not train.in_memory:                                # random crops, not centre crops
        train.transform = crop_transform(img_size, args)

    def make_inputs(images, labels):
        """Return the model's arguments: images, noise and, for pairs, partners and alpha."""
        parts = images.chunk(2 if args.pairs else 1)
        crops = [crop_batch(x, img_size, args) for x in parts] if train.in_memory else parts
        images, *partners = [normalize(x, model) for x in crops]
        # noise decides the mask: in each image, the patches with the lowest noise stay visible
        noise = mask_noise(args.mask, args.batch_size, model.encoder.grid, args.device)
        alpha = [model.draw_alpha(args.device)] if args.pairs else []
        return images, local_part(noise, args), *partners, *alpha

    args.eval_every = args.eval_every or max(1, args.epochs // 50)
    evaluate = partial(evaluate_psnr, model, val, args, args.mask)
    row = fit(args, model, decay_groups(model, args.weight_decay), train, val, make_inputs,
              evaluate, method=args.method, config=config)
    folder = Path(args.runs, args.name)
    script = "finetune.py --checkpoint" if train.classes else "train.py --eval"
    print(f"see     {folder / 'recon.png'}: original, masked, decoded, decoded with visible pixels")
    print(f'next    python {script} "{folder / "last.pt"}"')
    return row


def fit(args, model, groups, train, val, make_inputs, evaluate, **content):
    """Train for --epochs epochs and return the last row of log.jsonl. make_inputs(images, labels)
    returns the model's arguments. evaluate() returns scores {name: value} and the columns of
    recon.png, or None. `content` is saved in last.pt."""
    n, pieces = len(train.labels), args.world * args.accum
    require(args.batch_size <= n, f"--batch_size {args.batch_size} exceeds the {n} training images")
    require(args.batch_size % pieces == 0, f"--batch_size {args.batch_size} is not divisible by "
                                           f"{args.world} processes x --accum {args.accum}")
    optimizer = make_optimizer(args, groups)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype is torch.float16)
    folder = Path(args.runs, args.name)
    folder.mkdir(parents=True, exist_ok=True)
    last, log = folder / "last.pt", folder / "log.jsonl"
    history = resume(last, model, optimizer, scaler, content, args)
    start = history[-1]["epoch"] if history else 0
    describe(args, model, train, val)
    net = wrap(model, args)

    def write_log():
        if args.rank == 0:
            log.write_text("".join(json.dumps(row) + "\n" for row in history))

    def evaluate_and_save(row):
        """Evaluate, add the scores to this epoch's row, and write last.pt and recon.png."""
        began = perf_counter()
        scores, columns = evaluate()
        row.update(scores, eval_s=round(perf_counter() - began, 2))
        if args.rank == 0:
            save(last, dict(content, model=model.state_dict(), optimizer=optimizer.state_dict(),
                            scaler=scaler.state_dict(), epoch=row["epoch"], history=history,
                            flags=vars(args), classes=train.classes, mean=model.mean,
                            std=model.std, torch=str(torch.__version__)))
            if columns:
                save_picture(columns, folder / "recon.png")

    if args.epochs == 0 and not history:                   # no training: save the initial model
        history.append({"epoch": 0})
        evaluate_and_save(history[0])
    write_log()                                            # drop rows that are newer than last.pt
    batches = load_images(train, draw_keys(train, range(start, args.epochs), args), args)
    ended = perf_counter()
    for epoch in range(start, args.epochs):
        between = perf_counter() - ended                   # spent on validating and saving
        row = train_epoch(epoch, net.train(), optimizer, scaler, batches, n // args.batch_size,
                          make_inputs, args)
        row["between_s"], ended = round(between, 2), perf_counter()
        history.append(row)
        if (epoch + 1) % args.eval_every == 0 or epoch + 1 == args.epochs:
            evaluate_and_save(row)
        write_log()
        shown = [f"{name} {row[name]:.2f}" for name in ("psnr_masked", "top1") if name in row]
        print(f"epoch {epoch + 1}:", ", ".join([f"loss {row['loss']:.4f}", *shown,
              f"{row['img_s']:.0f} img/s", f"wait {row['wait']:.1%}",
              f"between epochs {between / (between + row['train_s']):.1%}"]), flush=True)
    print(f"see     {log} and {last}")
    return history[-1]


def train_epoch(epoch, net, optimizer, scaler, batches, steps, make_inputs, args):
    """Train for an epoch, on the next `steps` batches, and return its row for the log."""
    totals = {}
    pause = 0.1 if sys.stderr.isatty() else 60             # in a log file, a line each minute
    bar = tqdm(islice(batches, steps), f"epoch {epoch + 1}/{args.epochs}", steps, unit="img",
               unit_scale=args.batch_size, leave=False, mininterval=pause, delay=pause,
               disable=args.rank > 0)
    began = asked = perf_counter()                         # asked: when a batch was last requested
    waited = 0.0
    for step, (images, labels) in enumerate(bar, start=1):
        waited += perf_counter() - asked
        lr = learning_rate(epoch + (step - 1) / steps, args)
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)             # finetune: layer decay
        step_seed = hash((args.seed, epoch, step))
        torch.manual_seed(step_seed)                       # seeds crops, masks and mixing
        inputs = make_inputs(images, labels)
        metrics = train_step(net, optimizer, scaler, inputs, step_seed + 1, args)
        for name, value in metrics.items():
            totals[name] = totals.get(name, 0) + value
        if step % 20 == 0 or step == steps:                # the loop's only host-device sync
            check_finite(metrics["loss"], [*net.parameters()] if step == steps else [], scaler,
                         f"epoch {epoch + 1}, step {step}, lr {lr:.1e}")
            bar.set_postfix_str(f"loss {metrics['loss']:.4f}, lr {lr:.1e}", refresh=False)
        asked = perf_counter()
    means = mean_over_processes(totals, steps * args.world, args)
    seconds = perf_counter() - began
    highest = max(learning_rate(epoch + i / steps, args) for i in range(steps))
    return {"epoch": epoch + 1, "lr": highest, **means, "wait": round(waited / seconds, 3),
            "img_s": round(steps * args.batch_size / seconds, 1), "train_s": round(seconds, 2)}


def train_step(net, optimizer, scaler, inputs, seed, args):
    """Take one optimizer step on the batch `inputs`, the arguments of net, in --accum pieces.
    Returns metrics {name: value} on the device. Never synchronises host and device."""
    metrics = {}
    for i in range(args.accum):
        piece = [x.chunk(args.accum)[i] if x.ndim else x for x in inputs]  # 0-dim: i-MAE's alpha
        # Seed the draws inside the model. In pretraining, all pieces and processes draw the same
        # numbers (MINR's pixels); in fine-tuning, each piece draws its own (drop path).
        torch.manual_seed(seed if args.same_draws else seed + args.rank * args.accum + i)
        sync_gradients = args.world == 1 or i + 1 == args.accum        # DDP: last piece only
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


def check_finite(loss, weights, scaler, place):
    """Exit if the loss or a weight is not finite. In fp16 the scaler skips each step that
    overflows and lowers its scale. So the loss is checked only once the scale has fallen to 1."""
    values = [loss, *weights] if scaler.get_scale() <= 1 else weights  # scale 1 without fp16
    if not all(x.isfinite().all() for x in values):
        raise SystemExit(f"loss or weights are not finite at {place}: use --clip_grad or a lower "
                         f"--lr, and --resume if last.pt exists")


def draw_keys(train, epochs, args):
    """Yield the keys (b,2) of this process's images for each step of all epochs: the seed of the
    image's crop, and its index. For pairs, all images come first, then their partners."""
    n = len(train.labels)
    for epoch in epochs:
        seed = hash((args.seed, epoch))                    # integers hash the same everywhere
        g = torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=g)[:n - n % args.batch_size]
        keys = [keys_of(order, seed)]
        if args.pairs:
            partners = draw_partners(order, train.labels, args.same_class, g)
            keys.append(keys_of(partners, seed ^ 1))       # their crops differ
        for step in zip(*(x.split(args.batch_size) for x in keys)):
            yield torch.cat([local_part(x, args) for x in step])


def learning_rate(t, args):
    """Return the learning rate at a fractional epoch t, e.g. 3.7. It grows linearly from 0
    at the first step to lr after warmup_epochs, as in the release. It then stays constant, or falls
    to min_lr along half a cosine until args.epochs."""
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
    n, n_val = len(train.labels), len(val.labels[:args.eval_images])
    steps, encoder = n // args.batch_size, model.encoder
    (H, W), (h, w), (p, q) = encoder.img_size, encoder.grid, encoder.patch_size
    size = sum(p.numel() for p in model.parameters()) / 1e6
    where = "in memory" if train.in_memory else "read from files"
    print(f"data    {args.data}: {n} train, {n_val} val, {where}; {H}x{W} px in {h}x{w} "
          f"patches of {p}x{q} px")
    print(f"model   {type(model).__name__}: {size:.2f} M parameters, {args.world} x {args.device}, "
          f"{args.dtype}")
    print(f"train   {args.epochs} epochs ({args.warmup_epochs:g} warmup), {steps} steps per epoch, "
          f"batch size {args.batch_size}, {args.optimizer}, lr {args.lr:.3g}")


# --------------------------------------------------------------------------- the model, the recipe
def build_model(args, train, img_size, init):
    """Build the model of --method, with random weights or those of --init. Return it and its
    constructor arguments. `init` is the --init checkpoint as read."""
    cls, lr_given = METHODS[args.method], args.lr is not None
    config = vit_config(args, img_size, init["config"])
    apply_recipe(args, {**method_arguments(cls), **cls.recipe},
                 {**cls.low_res_recipe, **cls.low_res_config}, config, len(train.labels))
    config.update({name: getattr(args, name) for name in method_arguments(cls)})
    if cls.pairs:
        check_same_class(train.labels, train.classes, args.same_class)
        print(f"teacher {args.teacher or 'none, so no distillation (pass an MAE with --teacher)'}")
        if args.teacher:
            teacher = read_checkpoint(args.teacher, args.heads)
            config["teacher"], teacher_state = teacher_of(teacher, config)
    torch.manual_seed(args.seed)
    model = cls(**config).to(args.device)
    visible_count(model.encoder.num_patches, model.mask_ratio)         # checks the mask ratio
    if args.init:
        initialize(model, init, args.init)
    if config.get("teacher"):                              # --teacher wins over one in --init
        model.teacher.load_state_dict(teacher_state)
    if not lr_given:
        args.lr *= model.lr_scale                          # CrossMAE A.6: prediction / mask ratio
    return model, config


def vit_config(args, img_size, source):
    """Return the encoder's constructor arguments. Each comes from the first of these that sets it:
    its own flag, --size, `source` (a checkpoint's config or {}), the default."""
    patch_size = tuple(16 if side >= 128 else max(4, side // 8) for side in img_size)
    config = dict(img_size=img_size, patch_size=patch_size, in_chans=3,
                  **SIZES[args.size or "micro"])
    for name in ("patch_size", "dim", "depth", "heads"):
        if getattr(args, name) is not None:
            config[name] = getattr(args, name)
        elif name in source and (args.size is None or name == "patch_size"):
            config[name] = source[name]
    return config


def is_low_res(config):
    """Return whether the low-resolution settings apply: to images of up to 64 pixels, or to an
    encoder no wider than micro."""
    return max(config["img_size"]) <= 64 or config["dim"] <= SIZES["micro"]["dim"]


def method_arguments(cls):
    """Return a method's own flags, {name: default}: its constructor's keyword-only arguments."""
    return cls.__init__.__kwdefaults__ or {}


def apply_recipe(args, recipe, low_res, config, n):
    """Fill in each flag that was not given, from `recipe` or, if is_low_res(config), from `low_res`
    and then `recipe`. `config` holds the encoder's sizes. The default batch size is at most a tenth
    of n, the number of training images."""
    recipe = {**SHARED, **recipe, **(low_res if is_low_res(config) else {})}
    given = [name for name in recipe if getattr(args, name, None) is not None]
    for name, value in recipe.items():
        if name not in given:
            setattr(args, name, value)
    if "batch_size" not in given and args.batch_size > n / 10:
        usual, args.batch_size = args.batch_size, 2 ** max(1, int(math.log2(n / 10)))
        print(f"note    batch size {args.batch_size} instead of {usual}: only {n} training images")
    if "lr" not in given and ("blr" in given or args.lr is None):
        args.lr = args.blr * args.batch_size / 256         # MAE A.1: linear scaling
    if "warmup_epochs" not in given:                       # shortened like the run
        args.warmup_epochs *= min(1, args.epochs / recipe["epochs"])
    require(args.warmup_epochs <= args.epochs or args.epochs == 0,
            f"--warmup_epochs {args.warmup_epochs} exceeds --epochs {args.epochs}")


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate_psnr(model, val, args, mask, mask_ratio=None):
    """Return the mean PSNR in dB over masked pixels, over the image with visible pixels copied in,
    and over the raw reconstruction. Masks follow the pattern `mask` and depend only on the image's
    index. Also returns four columns of up to 8 images: original, masked, raw reconstruction, and
    reconstruction with visible pixels copied in."""
    columns, encoder = None, model.eval().encoder
    # a process without images reports zeros
    sums = dict.fromkeys(("psnr_masked", "psnr_image", "psnr_decoded"), 0)
    for ids, images, _ in val_batches(val, args, encoder.img_size, args.eval_images):
        # 7 is arbitrary, but fixed: masks must not depend on --seed
        generators = [torch.Generator().manual_seed(hash((7, i))) for i in ids.tolist()]
        noise = torch.cat([mask_noise(mask, 1, encoder.grid, generator=g) for g in generators])
        with autocast(args):
            decoded, patches = model.reconstruct(normalize(images, model), noise.to(args.device),
                                                 mask_ratio, args.leak_free)
        truth, decoded = images / 255, denormalize(decoded, model)     # (b, 3, H, W)
        is_masked = encoder.pixels_of(patches.float())                 # (b, 1, H, W)
        copied = torch.where(is_masked > 0, decoded, truth)
        grey = torch.where(is_masked > 0, 0.5, truth)
        image_error = (copied - truth).square().mean((1, 2, 3))        # (b,) 0 where visible
        decoded_error = (decoded - truth).square().mean((1, 2, 3))     # (b,)
        errors = {"psnr_masked": image_error / is_masked.mean((1, 2, 3)),
                  "psnr_image": image_error, "psnr_decoded": decoded_error}
        for name, error in errors.items():
            sums[name] += -10 * error.clamp(min=1e-10).log10().sum()
        columns = columns or [x[:8] for x in (truth, grey, decoded, copied)]
    return mean_over_processes(sums, len(val.labels[:args.eval_images]), args), columns


@torch.no_grad()
def compare(args):
    """Run --eval: print the checkpoints' PSNR, and write one picture of all reconstructions, named
    after the runs."""
    require(args.world == 1, f"--eval runs in one process, not in {args.world}")
    paths, names, rows, columns = [], [], [], []
    for word in args.eval:                                 # Windows shells do not expand runs/*
        paths += [word] if Path(word).exists() else sorted(glob(word)) or [word]
    for path in paths:
        path = os.path.join(path, "last.pt") if Path(path).is_dir() else path
        content = read_checkpoint(path)
        if content["method"] == "classifier":
            print(f"note    skipping {path}, a classifier: use finetune.py --mode eval")
            continue
        model = load_model(path).to(args.device)
        args.data = data_of(content, path, args)
        args.batch_size = args.batch_size or content["flags"].get("batch_size", 64)
        trained_on = content["flags"].get("data", args.data)
        if trained_on != args.data:
            print(f"note    {path} was trained on {trained_on}, and is evaluated on {args.data}")
        sizes = model.encoder.img_size, model.encoder.patch_size
        if not rows:
            first, (_, val, _) = sizes, open_data(args.data, sizes[0], args)
        require(sizes == first, f"{path} has image and patch sizes {sizes}, but the checkpoints "
                                f"before it have {first}: evaluate them separately")
        for mask in args.masks:
            for ratio in args.mask_ratios:
                scores, _ = evaluate_psnr(model, val, args, mask, ratio)
                rows.append({"checkpoint": path, "mask": mask, "mask_ratio": ratio, **scores})
        original, grey, _, copied = evaluate_psnr(model, val, args, args.masks[0])[1]
        columns += [copied] if columns else [original, grey, copied]
        names.append(run_of(path))
    require(rows, f"--eval {' '.join(args.eval)}: no checkpoint from train.py")
    picture = Path(rows[0]["checkpoint"]).with_name(f"{'_'.join(['eval', *names])[:200]}.png")
    save_picture(columns, picture)
    print(f"PSNR in dB, mean over {min(args.eval_images, len(val.labels))} images of {args.data}",
          as_table(rows), sep="\n")
    print(f"see     {picture}: original, masked, {', '.join(names)}")
    return rows


def save_picture(columns, path):
    """Write columns [(rows,C,H,W)] in [0, 1] as a picture. Enlarges small images up to 128 px."""
    H, W = columns[0].shape[2:]
    size = [n * max(1, 128 // max(H, W)) for n in (H, W)]
    cells = torch.stack([F.interpolate(x, size) for x in columns], dim=1).flatten(0, 1)
    torchvision.utils.save_image(cells, path, nrow=len(columns), pad_value=1)


def as_table(rows):
    """Format rows, dicts with the same keys, as aligned columns."""
    rows = [rows[0].keys(), *(row.values() for row in rows)]
    rows = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


# ------------------------------------------------------------------------------------------- data
class ImageDataset(Dataset):
    """Training or validation images, class names, and labels (N,), where -1 means unlabelled.
    `images` is a uint8 tensor (N,C,H,W) or a list of N file names. With a `transform`, which files
    always have, workers load images one by one. Without it, crop_batch crops a whole batch."""

    def __init__(self, images, labels, classes, transform=None):
        self.images, self.labels = images, torch.as_tensor(labels)
        self.classes, self.transform = classes, transform
        self.broken = torch.zeros(len(images), dtype=torch.bool).share_memory_()

    @property
    def in_memory(self):
        """Whether `images` is a tensor, not a list of files."""
        return torch.is_tensor(self.images)

    def __getitem__(self, key):
        """Return image i and its label, for key = (seed, i), which seeds random transforms."""
        image, label = self.read(key[1])
        # torch.manual_seed would also seed GPUs, which takes 100 times as long
        torch.default_generator.manual_seed(hash(key))
        return (self.transform(image) if self.transform else image), label

    def read(self, i):
        """Read image i and its label. A file that cannot be read is reported once. The next
        readable file is used in its place."""
        if self.in_memory:
            return self.images[i], self.labels[i]
        n = len(self.images)
        for j in range(min(n, 100)):
            k = (i + j) % n
            try:
                return read_image(self.images[k]), self.labels[k]
            except Exception as error:                     # a broken file can raise anything
                if not self.broken[k]:
                    tqdm.write(f"{self.images[k]} is replaced by the next file: {error}",
                               file=sys.stderr)
                self.broken[k] = True
        raise InputError(f"none of {min(n, 100)} images can be read")

    def select(self, ids):
        """Keep only the images with indices ids (n,)."""
        self.labels, self.broken = self.labels[ids], self.broken[ids].share_memory_()
        self.images = self.images[ids] if self.in_memory else [self.images[i] for i in ids.tolist()]


def open_data(name, img_size, args):
    """Return the train and val ImageDatasets for --data, and the image size (H, W). Images that are
    kept in memory are on the device."""
    if name == "shapes":
        size = img_size or (32, 32)
        datasets = [ImageDataset(*draw_shapes(n, size, seed=n), [*SHAPES])     # n is also the seed
                    for n in (10_000, 1_000)]
    elif name in ("cifar10", "cifar100"):
        size, kind = img_size or (32, 32), getattr(torchvision.datasets, name.upper())
        # rank 0 downloads first, then one process on each other machine (it may have its own disk)
        turn = 0 if args.rank == 0 else 1 if args.local_rank == 0 else 2
        for i in range(3):
            if i == turn:
                try:
                    sets = [kind("data", train=train, download=True) for train in (True, False)]
                except Exception as error:                 # a damaged file can raise anything
                    raise InputError(f"--data {name}: cannot download {kind.url} ({error}). Copy "
                                     f"it to data/, or pass a folder with class folders in train/ "
                                     f"and val/, e.g. --data data/{name}") from None
            if args.world > 1:
                dist.barrier()
        datasets = [ImageDataset(torch.tensor(s.data).movedim(3, 1), s.targets, s.classes)
                    for s in sets]
    else:
        require(Path(name).is_dir(), f"--data {name} is not shapes, cifar10, cifar100 or a folder")
        datasets, size = open_folder(Path(name), img_size, args)
    if args.train_images is not None:
        order = torch.randperm(len(datasets[0].labels), generator=torch.Generator().manual_seed(0))
        datasets[0].select(order[:args.train_images])
    for dataset in datasets:
        if dataset.in_memory:
            dataset.images = dataset.images.to(args.device).contiguous()
    return *datasets, size


def open_folder(root, img_size, args):
    """Return a folder's train and val ImageDatasets, and the image size (H, W).

    Images are kept in memory if they are small and few. Small: none of 50 samples exceeds img_size
    or, without img_size, 223 pixels. Few: all images, with a copy for each process on this
    machine, take at most MEMORY bytes. Otherwise files are read again in every epoch."""
    parts = list_folder(root)
    names = [file[len(str(root)):] for files, _, _ in parts for file in files]
    checksum = zlib.crc32(os.fsencode("\n".join(names)))
    args.files = f"{len(names)} images (checksum {checksum:08x} of names)"
    require_same(args.files, f"not all processes find the same images in --data {root}", args)
    train, val = [ImageDataset(*part) for part in parts]
    n = len(train.labels)
    samples = (train.read(i)[0] for i in range(0, n, math.ceil(n / 50)))
    high, wide, bright = map(max, zip(*((*x.shape[1:], x.max().item()) for x in samples)))
    if bright < 32:
        print(f"note    images are nearly black (at most {bright}): 12 bits in 16-bit files?")
    val.read(0)                                            # InputError if no val file can be read
    if img_size is not None:
        H, W = img_size
        fits = high <= H and wide <= W
    else:                                                  # the images' own size, or 224 x 224
        fits = max(high, wide) < 224
        sides = (high, wide) if fits else (224, 224)
        # round down to a multiple of --patch_size or, if not given, of 16 (8 below 128 pixels)
        units = args.patch_size or [16 if side >= 128 else 8 for side in sides]
        H, W = (max(unit, side - side % unit) for side, unit in zip(sides, units))
    copies = int(os.environ.get("LOCAL_WORLD_SIZE", 1))    # one per process (GPU: in GPU memory)
    in_memory = fits and 3 * (n + len(val.labels)) * H * W * copies <= MEMORY
    for dataset in (train, val):         # files: the central 7/8, as in MAE (224 of 256 pixels)
        fraction = 1 if in_memory else 7 / 8
        dataset.transform = partial(center_crop, img_size=(H, W), fraction=fraction)
        if in_memory:
            batches = torch.arange(len(dataset.labels)).split(WORKER_BATCH)
            loaded = tqdm(load_images(dataset, map(keys_of, batches), args), "reading",
                          len(batches), leave=False, disable=None)
            images = torch.empty(len(dataset.labels), 3, H, W, dtype=torch.uint8)
            for (part, labels), ids in zip(loaded, batches):
                images[ids], dataset.labels[ids] = part.cpu(), labels.cpu()    # replacements' own
            dataset.images, dataset.transform = images, None
    return (train, val), (H, W)


def list_folder(root):
    """Return (files, labels, classes) for train and val: from class folders in train/ and val/, or
    from a plain folder, where a hash of the file name selects about 5% of the images for val."""
    if (root / "train").is_dir():
        require((root / "val").is_dir(), f"--data {root} has train/ but no val/: add val/. "
                                         f"Without labels, train.py takes --data {root / 'train'}")
        train, val = class_folders(root / "train"), class_folders(root / "val")
        different = sorted({*train[2]} ^ {*val[2]})
        require(not different, f"--data {root}: only one of train/ and val/ has images of the "
                               f"class {', '.join(different[:1])}")
        require(train[2], f"--data {root}: train/ and val/ need class folders with images")
        return [train, val]
    files = find_images(root)
    require(len(files) > 1, f"--data {root} has {len(files)} images ({' '.join(IMG_EXTENSIONS)}): "
                            f"at least two are needed")
    names = [Path(file).relative_to(root).as_posix() for file in files]
    codes = [zlib.crc32(os.fsencode(name)) for name in names]
    # a fixed threshold, so that new files do not move old ones; at least one image in each part
    limit = min(max(0.05 * 2 ** 32, min(codes)), max(codes) - 1)
    train = [file for file, code in zip(files, codes) if code > limit]
    val = [file for file, code in zip(files, codes) if code <= limit]
    return [(part, [-1] * len(part), []) for part in (train, val)]


def class_folders(root):
    """Return (files, labels, classes) for the class folders in `root` that have images."""
    found = {name: find_images(root / name) for name in sorted(os.listdir(root))}
    classes = [name for name, files in found.items() if files]
    files = [(file, label) for label, name in enumerate(classes) for file in found[name]]
    return [file for file, _ in files], [label for _, label in files], classes


def find_images(root):
    """Return the sorted names of the image files in a folder, its subfolders and links to folders.
    No folder is read twice. Folders that hold `root` are skipped: a link may lead back to them."""
    files, seen = [], {*map(os.path.realpath, Path(root).absolute().parents)}
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()                                     # the same order on all machines
        if os.path.realpath(folder) in seen:
            folders.clear()                                # os.walk goes no deeper
            continue
        seen.add(os.path.realpath(folder))
        files += [os.path.join(folder, name) for name in names
                  if name.lower().endswith(IMG_EXTENSIONS)]
    return sorted(files)


MEMORY = 4 * 1024 ** 3                                     # bytes, see open_folder
WORKER_BATCH = 64  # images: 4,096 would delay an epoch by 12 s and take 9.9 GB


def keys_of(ids, seed=0):
    """Return keys (n,2), the arguments of ImageDataset[...], for the indices ids (n,)."""
    return torch.stack([torch.full_like(ids, seed), ids], dim=1)


def load_images(dataset, batches, args):
    """Yield images (b,C,H,W), uint8, and labels (b,), on the device, for each tensor of keys (b,2)
    in `batches`. Images come from memory or, with a transform, from workers, which read ahead."""
    to_device = dict(device=args.device, non_blocking=args.device.type == "cuda")
    if dataset.transform is None:
        for keys in batches:
            ids = keys[:, 1]
            yield dataset.images[ids.to(**to_device)], dataset.labels[ids].to(**to_device)
        return
    batches, again = tee(batches)
    worker_batches = ([(seed, i) for seed, i in part.tolist()]
                      for keys in batches for part in keys.split(WORKER_BATCH))
    first = [*islice(worker_batches, args.workers)]        # no more workers than batches
    fork = sys.platform == "linux" and first               # elsewhere the system's default
    loaded = iter(DataLoader(dataset, batch_sampler=chain(first, worker_batches),
                             num_workers=len(first), pin_memory=args.device.type == "cuda",
                             multiprocessing_context="fork" if fork else None))
    for keys in again:
        parts = [next(loaded) for _ in keys.split(WORKER_BATCH)]
        yield [torch.cat([x.to(**to_device) for x in part]) for part in zip(*parts)]


def val_batches(dataset, args, img_size, most=None):
    """Yield this process's batches (indices, images, labels) from a fixed random subset of at most
    `most` images. A batch has as many images as an accumulation piece or, if that is more, as
    fit in a million pixels, but at most 250."""
    order = torch.randperm(len(dataset.labels), generator=torch.Generator().manual_seed(0))
    own = order[:most].tensor_split(args.world)[args.rank]
    H, W = img_size
    size = max(1, args.batch_size // (args.world * args.accum), 2 ** 20 // (H * W))
    batches = own.split(min(250, size)) if len(own) else ()
    loaded = load_images(dataset, [keys_of(ids) for ids in batches], args)
    for ids, (images, labels) in zip(batches, loaded):
        yield ids, v2.functional.resize(images, img_size), labels


def crop_batch(images, img_size, args):
    """Crop, resize and flip this process's in-memory images (b,C,H,W) like crop_transform, but
    with bilinear interpolation. Each image gets its own crop; torchvision would draw one for the
    whole batch. Returns floats. Crops taller or wider than the image are clipped to it. As in
    validation, images are stretched if img_size has another aspect ratio."""
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
    """Return a transform of an image (C,h,w): torchvision's random resized crop and flip, then
    `more`. Images in memory use it only with `more`; otherwise crop_batch crops them."""
    a = img_size[1] / img_size[0]
    ratio = (a * 3 / 4, a * 4 / 3) if args.crop < 1 else (a, a)
    crop = v2.RandomResizedCrop(img_size, (args.crop, 1), ratio, v2.InterpolationMode.BICUBIC)
    return v2.Compose([crop, v2.RandomHorizontalFlip(0.5 * args.flip), *more])


def center_crop(image, img_size, fraction):
    """Crop the centre of an image (C,h,w) and resize it to img_size. The crop is the largest one
    with the aspect ratio of img_size, its sides multiplied by `fraction`."""
    (h, w), (H, W) = image.shape[1:], img_size
    scale = fraction * min(h / H, w / W)
    crop = v2.CenterCrop((max(1, round(H * scale)), max(1, round(W * scale))))
    return v2.functional.resize(crop(image), img_size, v2.InterpolationMode.BICUBIC)


def read_image(file):
    """Read an image file as RGB (3,H,W), uint8, rotated upright, with transparent pixels on a white
    background. JPEGs take a fast path, as long as torchvision has it."""
    data = Path(file).read_bytes()
    if data[:2] == b"\xff\xd8" and hasattr(torchvision.io, "decode_image"):    # a JPEG
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return torchvision.io.decode_image(data, "RGB", apply_exif_orientation=True)
    with Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened)
    require(image.mode != "F", "floating-point images are not supported")
    if image.mode.startswith("I"):                         # convert() would clip values above 255
        image = image.convert("I")                         # 16 bits, in either byte order
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
    """Draw n images (n,3,H,W), uint8, each with a shape on a background of another colour, and
    return them with their labels (n,)."""
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
def name_run(args, name):
    """Name the run `name` unless --name is given. Raises InputError if that run exists and neither
    --resume nor --overwrite is given."""
    args.name = args.name or name.replace(" ", "_")
    folder = Path(args.runs, args.name)
    exists = (folder / "log.jsonl").exists() or (folder / "last.pt").exists()
    require(args.resume or args.overwrite or not exists,
            f"{folder} already holds a run: --resume continues it, --overwrite replaces it, --name "
            f"NAME starts a new one")


def run_of(path):
    """Return the name of a checkpoint's run or, if the file is not a last.pt, the file's name."""
    path = Path(path).absolute()
    return path.parent.name if path.name == "last.pt" else re.sub(r"\.pth?$", "", path.name)


def save(path, content):
    """Write a checkpoint atomically: `path` holds either the complete old file or the complete new
    one, even after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:    # opened here: torch.save(path) would hide a full disk
        try:
            torch.save(content, file)
        except RuntimeError as error:                      # raised on the OSError of a full disk
            raise error.__context__ or error from None
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_checkpoint(path, heads=None, mmap=False):
    """Load a checkpoint, or the last.pt of a folder, without executing code from it. Returns a dict
    with method (None for a released file), config (constructor arguments), model (state dict),
    mean, std, flags and more. With mmap, all processes of a machine share its memory."""
    path = Path(path, "last.pt") if Path(path).is_dir() else Path(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):   # in released files
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        state = dict(content.get("model", content))
    except Exception as error:                             # a broken file can raise anything
        why = " ".join(f"{type(error).__name__} {error}".split()).split(". ")[0][:150]
        raise InputError(f"cannot read checkpoint {path}: {why}") from None
    if "method" not in content:
        state = from_released(state)
        content = dict(method=None, config=sizes_of(state, path, heads), model=state)
        print(f"note    {path} names no method: assuming {content['config']['heads']} heads "
              f"(--heads), and ImageNet's mean and std")
    cls = METHODS.get(content["method"], MAE)
    sizes = {name: p.default for name, p in inspect.signature(cls).parameters.items()
             if p.kind is p.POSITIONAL_OR_KEYWORD}         # your own loop's file may leave them out
    config = {**sizes, **content["config"]}
    config.update({name: pair(config[name]) for name in ("img_size", "patch_size")})
    return {"flags": {}, "mean": cls.mean, "std": cls.std, **content, "config": config}


def data_of(content, path, args):
    """Return --data or, if it is not given, the data that the checkpoint `path` was trained on."""
    data = args.data or content["flags"].get("data")
    require(data, f"{path} does not say which data it was trained on: pass --data")
    return data


def load_model(path, methods=METHODS):
    """Return a checkpoint's model in eval mode, with the class_names of its data. Raises
    InputError if the checkpoint's method is not in `methods`, {method: class}."""
    content = read_checkpoint(path)
    method = content["method"]
    require(method in methods, f"{path} has method {method}, which is none of "
                               f"{', '.join(methods)}: use load_model(path, {{method: class}})")
    model = methods[method](**content["config"])
    model.load_state_dict(content["model"])
    model.class_names = content.get("classes", [])
    return model.eval()


def initialize(model, content, path):
    """Initialise `model` from `content`, a checkpoint read from `path`: the encoder, and the
    decoder or head if it matches. Prints what is newly initialised and what is not loaded."""
    state = content["model"]
    if hasattr(model, "from_mae"):
        state = model.from_mae(state)
    try:
        missing, unused = transfer(model, state, grid_of(**content["config"]))
    except InputError as error:
        raise InputError(f"{path} does not fit: {error}") from None
    for text, names in (("not in the file, newly initialised", missing),
                        ("in the file, not loaded", unused)):
        parts = {".".join(k.split(".")[:2 if k.startswith("encoder.") else 1]) for k in names}
        if parts:                                          # e.g. encoder.norm, decoder_blocks, head
            print(f"{text}: {', '.join(sorted(parts))}")
    for name in ("mean", "std"):
        was, now = tuple(content[name]), tuple(getattr(model, name))
        if was != now:                                     # MINR's input is not normalised
            print(f"note    {path} was trained on images normalised with {name} {was}, not {now}")


def resume(last, model, optimizer, scaler, content, args):
    """Load `last`, the last.pt of this run, and return the rows of its log. Prints which flags have
    changed. Raises InputError if model, optimizer, data or seed have changed. If no run is
    resumed, takes the run's name by creating log.jsonl, deletes any last.pt, and returns []."""
    saved = None
    if args.resume and last.exists():                      # mmap: weights are copied to the GPU
        saved = read_checkpoint(last, mmap=args.device.type == "cuda")
    require_same(saved and saved["epoch"], f"not all processes find the same {last} to resume: "
                                           f"--runs must be on a shared disk", args)
    if not saved:
        if args.resume:
            print(f"note    nothing to resume: {last} does not exist, so a new run starts")
        if args.rank == 0:                                 # now all processes are past name_run
            try:                                           # of runs that start at once, one gets it
                last.with_name("log.jsonl").touch(exist_ok=args.resume or args.overwrite)
            except FileExistsError:
                name_run(args, args.name)                  # raises InputError
            last.unlink(missing_ok=True)                   # so that no later --resume continues it
        return []
    flags = saved["flags"]
    # only the name of the data: their folder may have moved
    was = {"method": saved["method"], "data": Path(flags.get("data", "")).name, **saved["config"]}
    now = {"method": content["method"], "data": Path(args.data).name, **content["config"]}
    for name in ("files", "seed", "train_images", "labels", "optimizer"):
        now[name] = getattr(args, name, None)
        was[name] = flags.get(name, now[name])
    differ = [f"{name} was {was.get(name)}, is {now.get(name)}" for name in {**was, **now}
              if was.get(name) != now.get(name)]
    require(not differ, f"{last} cannot be resumed: {'; '.join(differ[:3])}. Its command was "
                        f"{flags.get('command')}")
    model.load_state_dict(saved["model"])
    settings = optimizer.state_dict()["param_groups"]      # this command's weight decay and betas
    optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
    if saved["scaler"]:                                    # empty unless the run used fp16
        scaler.load_state_dict(saved["scaler"])
    for name, value in vars(args).items():
        if flags.get(name, value) == value or name in ("resume", "overwrite", "command"):
            continue
        if name in ("init", "checkpoint", "teacher"):
            print(f"note    {name} {flags[name]} is kept: its weights are in {last}")
            setattr(args, name, flags[name])
        else:
            print(f"note    {name} changed from {flags[name]} to {value}")
    print(f"resumed after epoch {saved['epoch']} of {args.epochs}")
    return saved["history"]


# -------------------------------------------------------------------------------------- processes
def start_processes(args):
    """Set args.rank, world, local_rank, device, dtype. Under torchrun, join the process group."""
    args.rank = int(os.environ.get("RANK", 0))
    args.world = int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.rank > 0:
        sys.stdout = open(os.devnull, "w")                 # only rank 0 prints
    args.device = choose_device(args)
    cuda, amp = args.device.type == "cuda", args.amp
    if cuda:
        torch.cuda.set_device(args.device)
        torch.set_float32_matmul_precision("high")         # TF32 where float32 remains
        if amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    args.dtype = dict(bf16=torch.bfloat16, fp16=torch.float16).get(amp, torch.float32)
    if "RANK" in os.environ:
        store = next(dist.rendezvous("env://"))[0]
        # `torchrun --max_restarts 1` would hang on keys left by killed processes, so each attempt
        # gets its own. This works on one machine only: each machine counts its own restarts.
        if args.world == int(os.environ.get("LOCAL_WORLD_SIZE", 0)):
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=args.rank,
                                world_size=args.world, device_id=args.device if cuda else None,
                                timeout=timedelta(hours=1))            # a slow disk may need it


def choose_device(args):
    """Return the torch.device of this process: --device, else its GPU, else MPS for a single
    process, else the CPU."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "mps" if
                           torch.backends.mps.is_available() and args.world == 1 else "cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    require(name != "cuda" or processes <= gpus,
            f"--device cuda: PyTorch finds {gpus} GPUs for {processes} processes, and each needs "
            f"one: pass --device cpu, or start fewer processes")
    return torch.device(f"cuda:{args.local_rank}" if name == "cuda" else name)


def autocast(args):
    """Return the mixed-precision context set by --amp; it does nothing in float32. Also turns fused
    attention off for bf16 on CPUs, where it was slower, and otherwise on."""
    slow = args.device.type == "cpu" and args.dtype is torch.bfloat16
    torch.backends.cuda.enable_flash_sdp(not slow)         # also sets CPUs, despite its name
    return torch.autocast(args.device.type, args.dtype, enabled=args.dtype is not torch.float32)


def local_part(batch, args):
    """Return this process's part of a tensor of the whole batch."""
    return batch.chunk(args.world)[args.rank]


def require_same(value, message, args):
    """Raise InputError with the message unless all processes have the same value."""
    values = [value] * args.world
    if args.world > 1:
        dist.all_gather_object(values, value)
    require(values.count(value) == args.world, message)


def mean_over_processes(sums, n, args):
    """Return {name: sum / n}, where each sum (a number or 0-dim tensor) is first added up over all
    processes, and n is the count over all processes."""
    total = torch.tensor([*map(float, sums.values())], dtype=torch.float64)
    if args.world > 1:
        total = total.to(args.device)                      # cuda or cpu: mps has no float64
        dist.all_reduce(total)
    return {name: value / n for name, value in zip(sums, total.tolist())}


# ------------------------------------------------------------------------------- the command line
LOW_RES_HELP = ('"low_res" values are for images of up to 64 pixels, and for any encoder no '
                "wider than micro.\nTheir learning rates were chosen for micro.")
LAYOUT = dict(usage=argparse.SUPPRESS, allow_abbrev=False, add_help=False,  # no usage in errors
              formatter_class=argparse.RawDescriptionHelpFormatter)
SHARED = dict(lr=None, blr=None, min_lr=0.0)               # unless a recipe sets them


def number(kind, low=-math.inf, high=math.inf):
    """Return an argparse type: a finite int or float from low to high."""
    def parse(text):
        value = kind(text)
        if not low <= value <= high or math.isinf(value):
            limits = f"from {low} to {high}" if high < math.inf else f"finite and at least {low}"
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value
    parse.__name__ = kind.__name__                         # argparse's own errors show this name
    return parse


def numbers(kind, count=None):
    """Return an argparse type that turns `0,5,11` into (0, 5, 11). With `count`, the text must have
    that many numbers."""
    def parse(text):
        values = tuple(kind(part) for part in text.split(","))
        if count and len(values) != count:
            raise argparse.ArgumentTypeError(f"{text} must be {count} numbers")
        return values
    parse.__name__ = f"{kind.__name__} list"
    return parse


def word_or_integers(text):
    """Parse `all` as "all" and `0,5,11` as (0, 5, 11)."""
    return text if text.isidentifier() else numbers(int)(text)


def size_in_pixels(text):
    """Parse `32` as (32, 32) and `32,48` as (32, 48)."""
    sides = numbers(number(int, 1))(text)
    return pair(sides[0] if len(sides) == 1 else sides)


size_in_pixels.__name__ = "N or H,W"                       # argparse's own errors show this name


def add_options(parser, encoder=True, training=True):
    """Add the flags that both scripts share, except for the recipe. Without `encoder`, leaves out
    flags for training images and encoder; without `training`, flags for a training run."""
    count = number(int, 1)
    # this process's share of the CPU cores; none outside Linux, where workers start slowly
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
    workers = min(16, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    parser.set_defaults(train_images=None, img_size=None, patch_size=None, accum=1)  # if not added
    parser.add_argument("-h", "--help", action="help", help="show this help and exit")
    option = parser.add_argument_group("data and device").add_argument
    option("--data", help="shapes, cifar10, cifar100 or a folder (shapes; for finetune.py "
           "and --eval, the checkpoint's data)")
    option("--eval_images", type=count, metavar="N",
           help="validate on at most N images (train.py: 1000; finetune.py: all)")
    option("--workers", type=number(int, 0), default=workers, metavar="N",
           help="data loading workers (CPU cores / processes, at most 16; 0 outside Linux)")
    option("--device", choices=("cuda", "mps", "cpu"), help="device (cuda, else mps, else cpu)")
    option("--amp", choices=("auto", "bf16", "fp16", "fp32"), default="auto",
           help="mixed precision (auto: bf16 on CUDA, or fp16 if the GPU lacks it; fp32 elsewhere)")
    if not training:
        option("--batch_size", type=count, metavar="N", help="total batch size over all processes")
    if not encoder:
        return
    option = parser.add_argument_group("training images and encoder").add_argument
    option("--seed", type=number(int, 0, 2 ** 63 - 1), default=0, metavar="N", help="seed (0)")
    option("--train_images", type=count, metavar="N", help="train on N images only (all)")
    option("--img_size", type=size_in_pixels, metavar="N", help="side, or height,width, in "
           "pixels (from the checkpoint, else the images' own size, at most 224)")
    option("--patch_size", type=size_in_pixels, metavar="N", help="side, or height,width, in "
           "pixels (from the checkpoint, else 16; below 128 pixels, image side / 8, at least 4)")
    option("--size", choices=SIZES, metavar="NAME", help=f"encoder size: {', '.join(SIZES)} "
           f"(default: the checkpoint's, otherwise micro)")
    for name, text in dict(dim="width", depth="blocks", heads="attention heads").items():
        option(f"--{name}", type=count, metavar="N", help=f"{text} of the encoder (set by --size)")
    if not training:
        return
    option = parser.add_argument_group("run").add_argument
    option("--runs", default="runs", metavar="FOLDER", help="folder for all runs (runs)")
    option("--name", help="name of the run's folder (train.py: method_data; finetune.py: "
           "checkpoint_mode or scratch, then data other than the checkpoint's, and --labels)")
    option("--eval_every", type=count, metavar="N", help="validate and write last.pt every N "
           "epochs (a fiftieth of all epochs, at least 1; finetune.py: more with few labels)")
    option("--accum", type=count, default=1, metavar="N", help="split each batch into N pieces (1)")
    option("--clip_grad", type=number(float, 0), default=0.0, metavar="X",
           help="clip the gradient norm to X (0: off)")
    option("--compile", action="store_true", help="torch.compile the model")
    option("--grad_checkpointing", action="store_true", help="recompute activations to save memory")
    option = parser.add_mutually_exclusive_group().add_argument
    option("--resume", action="store_true", help="continue the run from its last.pt: repeat its "
           "command and add this flag")
    option("--overwrite", action="store_true", help="replace an existing run of that name")


def flag_adder(parser, title, defaults, low_res):
    """Return a function that adds a flag. The flag's help shows its defaults, from `defaults` and
    `low_res`. A flag that is not given stays None until apply_recipe sets it."""
    option = parser.add_argument_group(title).add_argument

    def add(name, text, **kwargs):
        default, values = defaults.get(name), []
        if default is not None:
            values.append(str(default).strip("()").replace(" ", ""))
        if low_res.get(name, default) != default:
            values.append(f"low_res: {low_res[name]}")
        value = f" ({'; '.join(values)})" if values else ""
        option(f"--{name}", help=(text + value).replace("%", "%%"), **kwargs)
    return add


def add_recipe(parser, title, recipe, low_res):
    """Add the recipe flags that both scripts share. Returns a function that adds more flags."""
    add = flag_adder(parser, title, {**SHARED, **recipe}, low_res)
    fraction, positive = number(float, 0, 1), number(float, 0)
    add("batch_size", "total batch size, over all processes and --accum pieces; by default at most "
        "a tenth of the training images", type=number(int, 1), metavar="N")
    add("optimizer", "adamw, adam or sgd", choices=("adamw", "adam", "sgd"), metavar="X")
    add("lr", "learning rate for any batch size; if not set, blr * batch_size / 256 is used",
        type=positive, metavar="X")
    add("blr", "learning rate for a batch of 256", type=positive, metavar="X")
    add("min_lr", "final learning rate of the cosine schedule", type=positive, metavar="X")
    add("betas", "betas of Adam and AdamW, e.g. 0.9,0.95", metavar="X",
        type=numbers(number(float, 0, 0.999999), count=2))
    add("weight_decay", "weight decay; biases and norms are exempt", type=positive, metavar="X")
    add("epochs", "passes over the training images", type=number(int, 0), metavar="N")
    add("warmup_epochs", "epochs of linear learning rate warmup; shortened in proportion if "
        "--epochs is below its default", type=positive, metavar="X")
    add("crop", "minimum area of the random resized crop, as a fraction of the image; 1: no crop",
        type=fraction, metavar="X")
    add("flip", "random horizontal flip", action=argparse.BooleanOptionalAction)
    return add


def add_method_arguments(parser, cls):
    """Add a flag for each keyword-only argument of a method's constructor, typed by its annotation
    or default. Its help text is the argument's entry under `Args:`."""
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", inspect.getdoc(cls) or "", re.M))
    add = flag_adder(parser, f"arguments of {cls.__name__}", method_arguments(cls),
                     cls.low_res_config)
    for name, default in method_arguments(cls).items():
        kind = cls.__init__.__annotations__.get(name, type(default))
        if kind is bool:
            kwargs = dict(action=argparse.BooleanOptionalAction)
        else:
            size = default and name.endswith(("dim", "depth", "heads"))        # must be >= 1
            types = {int: number(int, 1 if size else 0), float: number(float), tuple: numbers(int)}
            kwargs = dict(type=types.get(kind, word_or_integers), metavar="X")
        add(name, texts.get(name, ""), **kwargs)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that, under torchrun, does not repeat the error of another process."""

    def error(self, message):
        if message.startswith("unrecognized"):
            message += " (add --help to this command to see the flags of its method or mode)"
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:       # if local rank 0 fails too,
            sleep(5)                                       # torchrun ends this process first
        super().error(message)


def run_cli(parser, work, argv):
    """Parse `argv`, by default the command line, and return work(args). Invalid input ends with a
    one-line error message, a bug with its traceback."""
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", parser.prog, *(sys.argv[1:] if argv is None else argv)])
    try:
        start_processes(args)
        row = work(args)
    except (InputError, OSError) as error:                 # OSError: a full disk, for example
        # only the last line: a worker's error starts with a traceback
        parser.error((str(error).strip() or repr(error)).splitlines()[-1])
    except KeyboardInterrupt:
        parser.exit(130, "stopped; to continue a training run, repeat its command with --resume\n")
    if dist.is_initialized() and args.device.type == "cuda":           # not needed on CPUs,
        dist.destroy_process_group()                       # where torch 2.6 can hang here
    return row


def main(argv=None):
    """Run `python train.py` with the arguments `argv`. Returns the last row of log.jsonl, a dict,
    or, with --eval, the list of PSNR rows."""
    parser = Parser("train.py", **LAYOUT)
    option = parser.add_mutually_exclusive_group().add_argument
    option("--method", choices=METHODS, default="mae", metavar="NAME", help="method to train (mae)")
    option("--eval", nargs="+", metavar="FILE", help="instead of training, evaluate "
           "checkpoints with the same image and patch size; for its flags see --eval FILE --help")
    known = parser.parse_known_args(argv)[0]               # these decide which other flags exist
    cls, training = METHODS[known.method], not known.eval
    about = (f"Pretrain {cls.__name__}. Methods: {', '.join(METHODS)}." if training
             else "Evaluate checkpoints of train.py.")
    parser.description = (
        f"usage: python train.py --method {known.method} [--flag value ...]\n"
        f"       torchrun --nproc_per_node 8 train.py --method {known.method} [--flag value ...]\n"
        f"       python train.py --eval FILE ... [--flag value ...]\n\n{about}\n"
        f"Defaults are in parentheses.\n{LOW_RES_HELP if training else ''}")
    add_options(parser, training, training)
    parser.set_defaults(eval_images=1000)
    masks = ("random", "grid", "block")
    if training:
        add_recipe(parser, "recipe", cls.recipe, cls.low_res_recipe)
        add_method_arguments(parser, cls)
        option = parser.add_argument_group("pretraining").add_argument
        option("--init", metavar="FILE", help="checkpoint that initialises the encoder "
               "and, if it matches, the decoder; also sets --size, --patch_size and --img_size")
        option("--mask", choices=masks, default="random", help="mask pattern (random)")
        if cls.pairs:
            option("--teacher", metavar="FILE", help="checkpoint of an MAE to distill (none)")
            option("--same_class", type=number(float, 0, 1), metavar="X",
                   help="fraction of pairs from the same class (not given: random pairs)")
    option = parser.add_argument_group("evaluation").add_argument
    if not training:
        option("--mask_ratios", nargs="+", type=number(float, 0, 1), default=(0.5, 0.75, 0.9),
               metavar="X", help="mask ratios (0.5 0.75 0.9)")
        option("--masks", nargs="+", choices=masks, default=["random"],
               help="mask patterns; the picture shows the first one (random)")
    option("--leak_free", action="store_true", help="with norm_pix_loss: reconstruct without the "
           "true mean and variance of masked patches")
    return run_cli(parser, pretrain if training else compare, argv)


if __name__ == "__main__":
    main()
