"""Measure speed and memory of training steps:

    python -m tests.bench --method mae crossmae:prediction_ratio=0.25 hypermae --size base

A method may have its own flags of train.py after colons: mae:amp=bf16:compile. All other flags of
train.py apply to all methods. The methods take turns, for --steps training steps each (their
draw_batch, forward, backward, optimizer) on a batch of random images. Without a GPU, the defaults
are ViT-micro and 32 pixels. The columns:

    img/s, ms/step   of the median step. Each step is waited for, as in training every 20th: there,
                     small models, whose time goes into launching kernels, are faster on a GPU
    GiB              peak memory; only on a GPU
    GMAC/img         multiply-accumulates of a forward pass, by torch's FLOP counter
    time             time per image, relative to the first row of that image size
"""

import argparse
import statistics
import sys
from unittest.mock import patch

import torch
import torchvision
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import train
from tests.lib.plot import as_table
from train import METHODS, OPTIMIZERS, count, in_range, size_in_pixels
from vit import SIZES, mask_noise


def count_macs(function):
    """Count the multiply-accumulates of a call, with plain attention, which torch counts on every
    device."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return counter.get_total_flops() / 2


class Case:
    """A model as train.py builds it, its optimizer and a batch. `step()` takes a training step."""

    def __init__(self, spec, args, img_size):
        others = torch.cuda.memory_allocated()             # of earlier cases; 0 without a GPU
        name, *options = spec.split(":")
        words = ["--method", name, *args.words]
        words += [word for option in options for word in f"--{option}".split("=", 1)]
        with patch.object(train, "pretrain", lambda flags: flags):     # only parses
            flags = train.main(words)
        self.here = train.start_processes(flags)
        self.spec = spec
        size = flags.img_size or img_size                  # its own, e.g. mae:img_size=64
        self.run, self.model = train.build(flags, self.here, size, images=10 ** 6)
        one_image = self.model.model_inputs(*self.model.draw_batch(*self.drawn(1)))
        self.macs = count_macs(lambda: self.model(*one_image))
        self.net = train.wrap(self.model, self.run, self.here)
        groups, half = self.model.parameter_groups(self.run), self.here.dtype is torch.float16
        self.optimizer = OPTIMIZERS[self.run.optimizer](groups, self.run)
        self.scaler = torch.amp.GradScaler(self.here.device.type, enabled=half)
        self.inputs = self.drawn(self.run.batch_size)
        self.timer, self.memory = Timer("step()", globals=dict(step=self.step)), ""
        if self.here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.memory = f"{(torch.cuda.max_memory_allocated() - others) / 2 ** 30:.3g}"

    def drawn(self, B):
        """Return draw_batch's arguments: the crops, labels and noise of B random images."""
        encoder, g = self.model.encoder, torch.Generator().manual_seed(0)
        images = torch.randint(256, (B, encoder.in_chans, *encoder.img_size), generator=g)
        noise = mask_noise(self.run.mask, B, encoder.grid, generator=g)
        images, labels, noise = (x.to(self.here.device) for x in (
            images.float(), torch.zeros(B, dtype=torch.long), noise))
        return [images] * self.model.crops, labels, noise

    def step(self):
        """Take a training step as train.fit does, without cropping, and return its loss."""
        self.model.before_step(0.5, self.optimizer)
        batch = self.model.draw_batch(*self.inputs)
        metrics = train.train_step(self.run, self.here, self.model, self.net, self.optimizer,
                                   self.scaler, batch, 0)
        self.model.after_step(0.5)
        return metrics["loss"]


def measure(cases, steps, warmup):
    """Return a row for each case, as a dict. Its time is relative to the first case."""
    if any(case.run.compile for case in cases):            # by default, at most 8 graphs compile
        torch._dynamo.config.cache_size_limit = 8 + 8 * len(cases)
    for case in cases:
        for _ in range(warmup):
            case.step()
    turns = [[case.timer.timeit(1).median for case in cases]
             for _ in tqdm(range(steps), "steps", leave=False, disable=None)]
    rows = []
    for case, seconds in zip(cases, map(statistics.median, zip(*turns))):
        B = case.run.batch_size
        rows.append({"method": case.spec, "image": "x".join(map(str, case.model.encoder.img_size)),
                     "batch": B, "img/s": f"{B / seconds:.4g}", "ms/step": f"{1e3 * seconds:.4g}",
                     "GiB": case.memory, "GMAC/img": f"{case.macs / 1e9:.4g}",
                     "time": seconds / B})
    return [{**row, "time": row["time"] / rows[0]["time"]} for row in rows]


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
        print(f"{cases[0].here.device}, {cases[0].here.dtype}")
        rows += measure(cases, args.steps, args.warmup)
        del cases                                          # before the next ones are built
    print(as_table(rows))
    return rows


if __name__ == "__main__":
    main()
