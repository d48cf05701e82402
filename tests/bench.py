"""Measure speed and memory of training steps:

    python -m tests.bench --method mae crossmae:prediction_ratio=0.25 hypermae --size base

A method may have its own flags of train.py after colons: mae:amp=bf16:compile. Flags that are not
listed below are for all methods. The methods take turns, for --steps training steps each
(train.train_step: forward, backward, optimizer) on a synthetic batch. Without a GPU, the defaults
are ViT-micro and 32 pixels. The columns:

    img/s, ms/step   of the first row's median step; those of the others follow from their `time`.
                     Each step is waited for, as in training every 20th: there, small models, whose
                     time goes into launching kernels, are faster on a GPU
    GiB              peak memory: weights, optimizer and batch, and what a step allocates
    GMAC/img         multiply-accumulates of a forward pass, by torch's FLOP counter
    TFLOP/s          of forward and backward passes, counted
    MFU %            TFLOP/s in 16 bits, relative to the device's peak, if known. A few % mean that
                     launching kernels takes the time: try a higher --batch_size
    time, memory     time per image and total memory, relative to the first row of that image size.
                     The time is the median over turns: what slows the machine slows a whole turn
"""

import argparse
import itertools
import math
import os
import re
import statistics
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torchvision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import train
from tests.lib.plot import as_table
from train import METHODS, OPTIMIZERS, count, in_range, size_in_pixels
from vit import SIZES

PEAKS = {  # 10^12 FLOP/s, dense, in bf16 and fp16, from the data sheets
    "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "A40": 150, "A10": 125,
    "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65}


def count_flops(function):
    """Count the FLOPs of a call, with plain attention, which torch counts on every device."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def flops_of_step(loss_of, B):
    """Return the FLOPs of a training step with B images. Some of its work is done once per batch.
    loss_of(n): returns the loss of n images."""
    one, two = (count_flops(lambda: loss_of(n).backward()) for n in (1, 2))
    return one + (B - 1) * (two - one)


def allocated_by(function, device):
    """Return the peak memory in bytes that a call allocates."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    os.environ["KINETO_LOG_LEVEL"] = "6"                   # or the profiler prints what it does
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(sizes), default=0)


def attention(B, heads, N, D, args):
    """Return the name of the kernel that torch uses for the attention of N tokens."""
    if args.device.type != "cuda":
        return args.device.type.upper()
    q = torch.empty(B, heads, N, D // heads, dtype=args.dtype, device=args.device).requires_grad_()
    return SDPBackend(torch._fused_sdp_choice(q, q, q)).name


class Case:
    """A model as train.py builds it, its optimizer and a batch. `step()` takes a training step."""

    def __init__(self, spec, args, img_size):
        name, *options = spec.split(":")
        words = ["--method", name, *args.words]
        words += [word for option in options for word in f"--{option}".split("=", 1)]
        with patch.object(train, "pretrain", lambda flags: flags):     # only parses
            flags = train.main(words)
        self.here = train.start_processes(flags)
        self.run, self.model = train.build(flags, self.here, img_size, images=10 ** 6)
        self.spec, self.img_size, self.batch_size = spec, img_size, self.run.batch_size
        self.device = self.here.device
        seen, attn = [], self.model.encoder.blocks[0].attn
        hook = attn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        with torch.no_grad():
            self.macs = count_flops(lambda: self.model(*self.batch(1))) / 2
        hook.remove()
        self.attention = attention(self.batch_size, attn.heads, *seen[0][1:], self.here)
        self.flops = flops_of_step(lambda B: self.model(*self.batch(B))[0], self.batch_size)
        self.model.zero_grad()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[self.run.optimizer]([dict(params=trained)], self.run)
        half = self.here.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        self.net = train.wrap(self.model, self.run, self.here)
        self.inputs = self.batch(self.batch_size)
        self.task = SimpleNamespace(run=self.run, here=self.here, pieces_draw_alike=True,
                                    model_inputs=lambda *piece: piece)     # already normalised

    def batch(self, B):
        """Return the model's arguments for B images."""
        encoder, g = self.model.encoder, torch.Generator().manual_seed(0)
        images = torch.randn(B, encoder.in_chans, *encoder.img_size, generator=g).to(self.device)
        noise = torch.rand(B, encoder.num_patches, generator=g).to(self.device)
        more = {None: (), "views": (images.flip(3),),
                "images": (images.roll(1, 0), torch.tensor(0.3, device=self.device))}
        return images, noise, *more[getattr(self.model, "pairs", None)]

    def step(self):
        """Take a step, wait until it has ended, and return its loss."""
        metrics = train.train_step(self.net, self.optimizer, self.scaler, self.inputs, 0, self.task)
        if hasattr(self.model, "after_step"):
            self.model.after_step(0.5)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return metrics["loss"].item()

    def memory(self):
        """Return the peak memory in bytes: what is kept between steps, and what a step allocates.
        """
        state = [v for s in self.optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        kept = {t.data_ptr(): t.nbytes for t in (*self.model.parameters(), *state, *self.inputs)}
        return sum(kept.values()) + allocated_by(self.step, self.device)


def measure(cases, steps, warmup):
    """Return a row for each case, as a dict. Its time and memory are relative to the first case."""
    if any(case.run.compile for case in cases):            # by default, at most 8 graphs compile
        torch._dynamo.config.cache_size_limit = 8 + 8 * len(cases)
    for case in cases:
        for _ in range(warmup):
            case.step()
    memory = [case.memory() for case in cases]
    seconds, losses = [[] for _ in cases], [0.0] * len(cases)
    for i in tqdm(range(steps), str(cases[0].img_size), leave=False, disable=None):
        for k in range(len(cases))[::1 if i % 2 else -1]:  # no case is always the first
            began = time.perf_counter()
            losses[k] = cases[k].step()
            seconds[k].append(time.perf_counter() - began)
    device = cases[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((peak for key, peak in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
    rows = []
    for case, most, times, loss in zip(cases, memory, seconds, losses):
        if not math.isfinite(loss):
            raise ValueError(f"{case.spec}: the loss is {loss}")
        B, first = case.batch_size, statistics.median(seconds[0]) / cases[0].batch_size
        time_per_image = statistics.median(
            a / b * cases[0].batch_size / B for a, b in zip(times, seconds[0]))
        step = first * time_per_image * B
        tera = case.flops / step / 1e12
        row = {"method": case.spec, "image": "x".join(map(str, case.img_size)), "batch": B,
               "img/s": f"{B / step:.4g}", "ms/step": f"{1e3 * step:.4g}",
               "GiB": f"{most / 2 ** 30:.3g}", "GMAC/img": f"{case.macs / 1e9:.4g}",
               "TFLOP/s": f"{tera:.3g}"}
        if peak and case.here.dtype is not torch.float32:
            row["MFU %"] = f"{100 * tera / peak:.3g}"
        rows.append({**row, "time": time_per_image, "memory": most / memory[0]})
    return rows


def main(argv=None):
    """Run `python -m tests.bench` with the arguments `argv`: print the rows and return them."""
    parser = argparse.ArgumentParser("tests.bench", usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--method", nargs="+", help="(all)")
    option("--size", choices=SIZES, help="(micro; with a GPU base)")
    option("--img_size", nargs="+", type=size_in_pixels, help="a side or H,W (32; with a GPU 224)")
    option("--batch_size", type=count, help="(64; with a GPU 16)")
    option("--steps", type=count, default=20, help="number of measured steps (20)")
    option("--warmup", type=in_range(int, 0), default=3, help="number of warmup steps (3)")
    args, more = parser.parse_known_args(argv)
    print(" ".join(["tests.bench", *(argv or sys.argv[1:])]))
    on_gpu = torch.cuda.is_available() and "cpu" not in more
    args.img_size = args.img_size or [(224, 224) if on_gpu else (32, 32)]
    args.words = ["--size", args.size or ("base" if on_gpu else "micro"), "--batch_size",
                  str(args.batch_size or (16 if on_gpu else 64)), *more]
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, "
          f"{torch.get_num_threads()} threads; {args.warmup} + {args.steps} steps for each method: "
          f"{' '.join(args.words)}", flush=True)
    rows = []
    for img_size in args.img_size:
        cases = [Case(spec, args, img_size) for spec in args.method or METHODS]
        print(f"{cases[0].device}, {cases[0].here.dtype}, attention: {cases[0].attention}")
        rows += measure(cases, args.steps, args.warmup)
        del cases                                          # before the next ones are built
    print(as_table(rows))
    return rows


if __name__ == "__main__":
    main()
