"""Pretrain and evaluate every method for the same number of epochs, with the commands a user types:

    python -m tests.results --out again.jsonl                  # continues where it stopped
    python -m tests.results --out again.jsonl --size tiny --epochs 50 --batch_size 512
    python -m tests.results --tables                           # writes the tables and pictures

Each result is a line of --out. If it has several lines, all of them count. A seed controls all
randomness: pretraining, the teacher, the label subset and fine-tuning. Several commands can run at
once, each with its own --seeds or --only, and --out. Flags that are not listed below go to
pretraining. With another --out, --tables only prints its tables. Otherwise, it writes the tables in
README.md, RESULTS.md and RECIPE.md. It also draws results.svg, pays.svg and, from copies of
log.jsonl named tests/logs/recipe_NAME.jsonl, recipe.svg.
"""

import argparse
import functools
import itertools
import json
import math
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import torch

from finetune import Classifier
from tests.bench import count_flops
from train import METHODS
from vit import SIZES

OUT = Path("tests/logs/results.jsonl")
THIRD, TEACHER = {"prediction_ratio": 0.25}, {"teacher": "{runs}/mae/last.pt"}
PRETRAINED = {  # encoder: --method and more flags of train.py; "untrained" gets 0 epochs
    "untrained": ("mae", {}), "mae": ("mae", {}), "mae_4": ("mae", {"decoder_depth": 4}),
    "crossmae": ("crossmae", {}), "crossmae_2": ("crossmae", {"decoder_depth": 2}),
    "crossmae_25": ("crossmae", THIRD), "crossmae_25_rate": ("crossmae", {**THIRD, "lr": "2e-3"}),
    "crossmae_25_long": ("crossmae", THIRD), "hypermae": ("hypermae", {}), "ginr": ("minr", {}),
    "imae": ("imae", TEACHER), "imae_alone": ("imae", {**TEACHER, "distill_weight": 0})}
LONGER = {"crossmae_25_long": 1.6}     # factor of --epochs: MAE's multiply-adds on ViT-micro
SOURCES = {  # encoder: finetune.py's flags instead of --checkpoint with that encoder's file
    "mae_joined": "--checkpoint {runs}/mae/last.pt --pool joined",
    "ginr": "--checkpoint {runs}/ginr/last.pt --pool joined",
    "ginr_mean": "--checkpoint {runs}/ginr/last.pt --pool extra",
    "scratch": "--mode scratch --size {size} --layer_decay 1 --pool mean"}
# finetune.py's settings are given in full, so that its defaults can change: for the tables, ...
ALIKE = ("--min_lr 0 --betas 0.9,0.999 --flip --randaug 0 --erasing 0 --mixup 0 --cutmix 0 "
         "--mix_ratio 0")
FINETUNE = (f"--mode finetune {ALIKE} --batch_size 128 --crop 0.5 --optimizer adamw --lr 2e-3 "
            f"--weight_decay 0.05 --layer_decay 0.75 --smoothing 0.1 --drop_path 0")
TUNED = {  # column: flags of finetune.py
    "linear": f"--mode linear {ALIKE} --batch_size 128 --crop 0.5 --optimizer sgd --lr 0.05 "
              f"--weight_decay 0 --smoothing 0 --epochs 6 --warmup_epochs 0.6",
    "1%": f"{FINETUNE} --labels 0.01 --batch_size 24 --epochs 18 --warmup_epochs 1",
    "10%": f"{FINETUNE} --labels 0.1 --epochs 12 --warmup_epochs 1",
    "100%": f"{FINETUNE} --epochs 3 --warmup_epochs 0.3"}
# ... and for RECIPE.md, where pretraining pays: encoder: (flags, {fraction of labels: epochs})
BETTER = (f"{ALIKE} --crop 0.85 --optimizer adamw --lr 2e-3 --weight_decay 0.05 --smoothing 0.1 "
          f"--drop_path 0 --pool mean --amp bf16")
PAYS = {
    "pretrained": (f"--checkpoint tests/models/mae.pt --layer_decay 0.9 {BETTER}",
                   {1: (3, 10), 0.1: (12, 40), 0.01: (20, 100)}),
    "not_pretrained": (f"--mode scratch --layer_decay 1 {BETTER}",
                       {1: (3, 10, 17), 0.1: (12, 40, 114), 0.01: (20, 100, 750)})}
STARTS = {"not_pretrained": "from scratch", "pretrained": "after pretraining"}
MASKS = "--mask_ratios 0.5 0.75 0.9 --masks random grid block"
PRINTED = re.compile(  # the numbers from --eval and tests.analyses that the tables need
    r"random 0\.750 psnr_masked|(random 0\.\d+|(grid|block) 0\.750) psnr_decoded|"
    r"block sum (visible|masked)|alpha 0\.(200|400|450) (branch|control) subordinate")


def commands(args, name, seed):
    """Yield (column, command) for everything that an encoder needs. Commands of pretraining, its
    own and that of a teacher, come first; their column is None. {runs} is the runs folder."""
    if name in PAYS:
        flags, epochs_for = PAYS[name]
        for labels, choices in epochs_for.items():
            batch_size = 32 if labels == 0.01 else 64      # 32: about a tenth of 500 images
            for epochs in choices:
                yield f"{labels:.0%}, {epochs} epochs", (
                    f"python finetune.py {flags} --labels {labels} --batch_size {batch_size} "
                    f"--epochs {epochs} --warmup_epochs {epochs / 10} --data {args.data} "
                    f"--seed {seed} --eval_every 1000 --runs {{runs}} "
                    f"--name {name}_{labels}_{epochs}")
        return
    source = SOURCES.get(name, f"--checkpoint {{runs}}/{name}/last.pt --pool mean")
    for encoder in re.findall(r"{runs}/(\w+)/", f"{PRETRAINED.get(name)} {source}"):
        epochs = round(args.epochs * LONGER.get(encoder, 1)) if encoder != "untrained" else 0
        method, flags = PRETRAINED[encoder]
        flags = " ".join([method, *(f"--{k} {v}" for k, v in flags.items()), *args.pretraining])
        yield None, (f"python train.py --method {flags} --data {args.data} --size {args.size} "
                     f"--epochs {epochs} --seed {seed} --runs {{runs}} --name {encoder}")
    if name in PRETRAINED:
        file = f"{{runs}}/{name}/last.pt --data {args.data}"
        analyses = f" && python -m tests.analyses {file}" * (name in ("mae", "imae", "imae_alone"))
        yield "PSNR", f"python train.py --eval {file} {MASKS}{analyses}"
    if name == "imae_alone":                               # only for its measure of two images
        return
    source, words = source.replace("{size}", args.size), f"--data {args.data} --seed {seed}"
    if name != "scratch":                                  # it has no features to probe
        yield "20-NN", f"python finetune.py --mode knn --k 20 {source} {words}"
    for column, flags in TUNED.items():
        if (name, column) != ("scratch", "linear"):
            yield column, (f"python finetune.py {flags} {source} {words} --eval_every 100 --runs "
                           f"{{runs}} --name {name}_{column.strip('%')}")


def read_lines(path):
    """Return the dicts in a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def printed_numbers(text):
    """Return the numbers of PRINTED in the printed tables, named after row and column:
    {"random 0.750 psnr_masked": dB, "alpha 0.200 branch subordinate": R^2, ...}."""
    found, heads = {}, []
    for words in (re.split("  +", line.strip()) for line in text.splitlines()):
        if words[0] in ("checkpoint", "alpha", "block"):   # a table begins
            heads = words
        elif len(words) == len(heads):                     # a row of it
            row = words[1:3] if heads[0] == "checkpoint" else [heads[0], words[0]]
            found |= {" ".join([*row, head]): word for head, word in zip(heads, words)}
    return {name: float(word) for name, word in found.items() if PRINTED.fullmatch(name)}


def run(command):
    """Run a command, or several joined by "&&", resuming what an earlier call began. Returns its
    numbers, if any."""
    print(f"\n{command}", flush=True)
    folder = re.search(r"--runs (\S+) --name (\S+)", command)
    printed = ""
    for part in command.split(" && "):
        words = [sys.executable, *part.split()[1:], *["--resume"] * bool(folder)]
        printed += subprocess.run(words, text=True, stdout=subprocess.PIPE, check=True).stdout
    print(printed, flush=True)
    if folder:
        last = read_lines(Path(*folder.groups(), "log.jsonl"))[-1]
        return {"top1": last["top1"]} if "top1" in last else {}
    if " --eval " in command:
        return printed_numbers(printed)
    return {"top1": float(re.search(r"top1 ([\d.]+)", printed)[1])}


def run_all(args, table):
    """Run every command whose result has no line in --out yet. Encoders that a missing result needs
    are trained again if their checkpoints are gone."""
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    commit = subprocess.getoutput("git rev-parse --short HEAD")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    made = f"commit {commit}, torch {torch.__version__.split('+')[0]}, {machine}"
    for seed, name in itertools.product(args.seeds, args.only):
        runs = "/".join(["runs/results", re.sub(r"[^\w.]+", "-", table), str(seed)])
        done = {line["column"] for line in read_lines(args.out) if
                (line["table"], line["encoder"], line["seed"]) == (table, name, seed)}
        asked = [pair for pair in commands(args, name, seed) if pair[0] not in done]
        for column, command in asked if any(column for column, _ in asked) else ():
            numbers = run(command.replace("{runs}", runs))             # a finished run ends at once
            if column:
                line = dict(table=table, encoder=name, column=column, seed=seed,
                            command=re.sub(" --eval_every.*", "", command),
                            made=f"{time.strftime('%Y-%m-%d')}, {made}", numbers=numbers)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, separators=(",", ":")) + "\n")


# ------------------------------------------------------------------ tables
NAMES = {  # encoder: its name in the tables
    "untrained": "untrained", "scratch": "from scratch", "mae": "MAE",
    "mae_4": "MAE, 4 decoder blocks", "mae_joined": "MAE, joined", "crossmae": "CrossMAE, all",
    "crossmae_2": "CrossMAE, all, 2 decoder blocks", "crossmae_25": "CrossMAE, a third",
    "crossmae_25_rate": "CrossMAE, a third, MAE's learning rate",
    "crossmae_25_long": "CrossMAE, a third, 16 epochs", "hypermae": "HyperMAE",
    "ginr": "MINR, joined", "ginr_mean": "MINR, mean", "imae": "i-MAE"}
FIRST = ("untrained", "scratch", "mae", "crossmae", "crossmae_25", "hypermae", "ginr", "imae")
PIXELS = "random 0.750 psnr_masked"
TOP1 = {"20-NN": "20-NN, %", "linear": "linear, %", "1%": "1% of labels", "10%": "10%",
        "100%": "100%"}
BATCHES = {"micro": 64, "tiny": 512}                       # images in a training step
BRANCH, CONTROL = ([f"alpha {alpha} {source} subordinate" for alpha in ("0.200", "0.400", "0.450")]
                   for source in ("branch", "control"))
MORE = {  # differences A - B: A, B, columns of A, and those of B if they differ
    "MINR - MAE: PSNR of the whole image; random masks of 50, 75 and 90%, grid, block": (
        "ginr", "mae", [f"{mask} psnr_decoded" for mask in (
            "random 0.500", "random 0.750", "random 0.900", "grid 0.750", "block 0.750")]),
    "i-MAE's branch - MAE's latent of the mixture: R^2; weights of 20, 40 and 45%": (
        "imae", "imae", BRANCH, CONTROL),
    "i-MAE's branch without distillation - the same: R^2": (
        "imae_alone", "imae_alone", BRANCH, CONTROL),
    "visible - masked: attention of MAE's mask tokens": (
        "mae", "mae", ["block sum visible"], ["block sum masked"])}


class Numbers:
    """All numbers of one table: found[encoder, column] is {seed: [number of each run]}."""

    def __init__(self, table, lines):
        self.table, self.title = table, re.search(r"ViT-\w+, \d+ epochs", table)[0]
        self.size = re.search(r"ViT-(\w+)", table)[1]
        self.found = defaultdict(lambda: defaultdict(list))
        for line in lines:
            for name, number in line["numbers"].items():
                column = line["column"] if name == "top1" else name
                self.found[line["encoder"], column][line["seed"]].append(number)

    def values(self, encoder, column):
        """Return the numbers of all runs, with all seeds."""
        return sum(self.found[encoder, column].values(), [])

    def cell(self, encoder, column):
        """Return mean ± sample standard deviation over all runs; "" if there are none."""
        values, places = self.values(encoder, column), precision(column)[0]
        spread = f" ± {stdev(values):.{places}f}" if len(values) > 1 else ""
        return f"{mean(values):.{places}f}{spread}" if values else ""

    def minus(self, a, b, column, column_b=None):
        """Return the mean of A - B over each run of A and each run of B with the same seed, bold if
        it is clear by the rule in RESULTS.md; "" with fewer than three seeds."""
        a, b = self.found[a, column], self.found[b, column_b or column]
        seeds, (places, floor) = a.keys() & b.keys(), precision(column)
        if len(seeds) < 3:
            return ""
        values = [x - y for seed in seeds for x in a[seed] for y in b[seed]]
        text = f"{mean(values):+.{places}f}"
        return f"**{text}**" if abs(mean(values)) > max(2 * stdev(values), floor) else text


def read_numbers(path):
    """Return the Numbers of each table in a .jsonl file."""
    found = defaultdict(list)
    for line in read_lines(path):
        found[line["table"]].append(line)
    return [Numbers(table, lines) for table, lines in found.items()]


def precision(column):
    """Return the number of decimals to print, and the floor that a mean difference must exceed."""
    if column.split(",")[0] in TOP1:
        return 1, 0.5                                      # points of accuracy
    return (3, 0.005) if re.match("alpha|block sum", column) else (2, 0.02)    # R^2, attention; dB


@functools.cache
def multiply_adds(encoder, size):
    """Return the multiply-adds of a training step, forward and backward, per image."""
    method, flags = PRETRAINED[encoder]
    given = {**SIZES[size], **METHODS[method].low_res_config, **flags}
    given.pop("lr", None)
    if "teacher" in flags:                                 # frozen: it has no backward pass
        given["teacher"] = SIZES[size]
    model = METHODS[method](32, 4, 3, **given)
    one, two = (count_flops(lambda: model(torch.zeros(B, 3, 32, 32))[0].backward()) / 2
                for B in (1, 2))
    return two - one + (2 * one - two) / BATCHES[size]     # some work is done once per batch


def cost(encoder, size):
    """Return the multiply-adds of pretraining relative to MAE's (with those of its teacher's)."""
    if encoder not in PRETRAINED or encoder == "untrained" or size not in BATCHES:
        return ""
    ratio = LONGER.get(encoder, 1) * multiply_adds(encoder, size) / multiply_adds("mae", size)
    return f"{ratio:.2f}" + f" ({ratio + 1:.2f})" * ("teacher" in PRETRAINED[encoder][1])


@functools.cache
def pretraining_cost():
    """Return the multiply-adds of pretraining mae.pt for 10 epochs, in epochs with all labels."""
    model = Classifier(32, 4, 3, **SIZES["micro"], classes=10)
    image, label = torch.zeros(1, 3, 32, 32), torch.zeros(1).long()
    step = count_flops(lambda: model(image, label)[0].backward()) / 2
    return 10 * multiply_adds("mae", "micro") / step


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *(row for row in rows if any(row[1:]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def results(every, encoders, columns):
    """Return a table of results, side by side for `every`. Bold: clearly different from MAE."""
    heads, rows = [""], [[NAMES[encoder]] for encoder in encoders]
    for numbers in every:
        heads += [f"{numbers.title}: {columns[PIXELS]}", *[*columns.values()][1:], "cost"]
        for row, encoder in zip(rows, encoders):
            for column in columns:
                bold = "**" if numbers.minus(encoder, "mae", column).endswith("**") else ""
                row.append(f"{bold}{numbers.cell(encoder, column)}{bold}")
            row.append(cost(encoder, numbers.size) if row[-len(columns)] else "")
    return markdown(heads, rows)


def compared(every):
    """Return the README's table: MAE's numbers, and the others' differences from them."""
    names = {**NAMES, "mae": "MAE itself", "crossmae": "CrossMAE, all masked patches",
             "crossmae_25": "CrossMAE, a third of them", "ginr": "MINR"}
    heads, rows = ["difference from MAE"], [[names[encoder]] for encoder in FIRST[2:]]
    for numbers in every:
        heads += [f"{numbers.size}: pixels, dB", "fine-tuned, %"]
        for row, encoder in zip(rows, FIRST[2:]):
            for column in (PIXELS, "100%"):
                text = numbers.minus(encoder, "mae", column)
                if encoder == "mae":
                    text = numbers.cell("mae", column).split(" ")[0]
                # MINR's features are longer, so its accuracy cannot be compared
                row.append("" if (encoder, column) == ("ginr", "100%") else text)
    return markdown(heads, rows)


def runs_by_cost(numbers, labels):
    """Return (cost, epochs, name in PAYS, column) of all runs with this fraction of the labels. The
    cost is in epochs with all labels."""
    before = {"not_pretrained": 0, "pretrained": pretraining_cost()}
    runs = [(before[name] + labels * epochs, epochs, name, f"{labels:.0%}, {epochs} epochs")
            for name in PAYS for epochs in PAYS[name][1][labels]]
    return sorted(run for run in runs if numbers.values(*run[2:]))


def pays_table(numbers):
    """Return RECIPE.md's table of accuracies and their costs; "" if there are none."""
    rows = [[f"{labels:.0%}", STARTS[name], f"{epochs}", f"{cost:.1f}", numbers.cell(name, column)]
            for labels in PAYS["pretrained"][1]
            for cost, epochs, name, column in runs_by_cost(numbers, labels)]
    heads = ["labels", "training", "epochs", "cost", "accuracy, %"]
    return markdown(heads, rows) if rows else ""


def tables(numbers):
    """Return three tables: results, their differences from MAE, and the differences in MORE."""
    columns, more = {PIXELS: "pixels, dB", **TOP1}, []
    minus = [[name, *(numbers.minus(encoder, "mae", column) for column in columns)]
             for encoder, name in NAMES.items() if encoder != "mae"]
    for name, (a, b, columns_a, *columns_b) in MORE.items():
        found = [numbers.minus(a, b, *pair) for pair in zip(columns_a, *columns_b)]
        more.append([name, ", ".join(filter(None, found))])
    return "\n".join([results([numbers], NAMES, columns), markdown(["minus MAE", *columns.values()],
                      minus), markdown(["more differences", numbers.title], more)])


# ------------------------------------------------------------------ pictures
WIDTH, HEIGHT = 415, 380                                   # the size of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 403, 34, 326                # the part of it with dots
STYLE = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .back { fill: #ffffff } .grid { stroke: #d0d7de } .dot { opacity: .6 }
  circle { fill: currentColor } polyline { stroke: currentColor; stroke-width: 2; fill: none }
  .mae { color: #0969da } .crossmae { color: #1a7f37 } .crossmae_25 { color: #4fb3a5 }
  .hypermae { color: #cf222e } .ginr { color: #d18616 } .imae { color: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .back { fill: #0d1117 } .grid { stroke: #30363d } .dot { opacity: .8 }
    .mae { color: #58a6ff } .crossmae { color: #3fb950 } .crossmae_25 { color: #76e3d4 }
    .hypermae { color: #ff7b72 } .ginr { color: #f0a848 } .imae { color: #bc8cff } }
"""


def scale(values, start, stop):
    """Return a function that places a value between start and stop, and round values to mark."""
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 1
    low, high = low - margin, high + margin
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if (high - low) / step < 8)
    ticks = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return lambda value: start + (value - low) / (high - low) * (stop - start), ticks


def place(label, x, y, taken):
    """Return the box (left, top, right, bottom) for a label: the nearest to (x, y) that is inside a
    panel and overlaps no box in `taken`."""
    w, h, near = 3.5 * len(label), 8, []                   # half of its width and of its height
    for dx, dy in itertools.product(range(-120, 121, 5), range(-60, 61, 5)):
        box = x + dx - w, y + dy - h, x + dx + w, y + dy + h
        inside = LEFT < box[0] and box[2] < RIGHT + 8 and TOP < box[1] and box[3] < BOTTOM
        if inside and not any(box[0] < right and left < box[2] and box[1] < bottom and top < box[3]
                              for left, top, right, bottom in taken):
            gap = math.hypot(max(0, abs(dx) - w), max(0, abs(dy) - h))
            near.append((gap, abs(dx), dy, box))
    return min(near)[-1]


def panel(title, x_name, y_name, series, shift=0):
    """Return a panel as SVG. Each series is (class, label, points, center). Each point gets a small
    dot. The center gets a large one; if it is None, a line joins the points. The label is near the
    center or the last point."""
    def text(x, y, words, anchor="middle", more=""):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>'

    (x_of, x_ticks), (y_of, y_ticks) = (
        scale([point[i] for _, _, points, _ in series for point in points], *ends)
        for i, ends in enumerate(((LEFT, RIGHT), (BOTTOM, TOP))))
    lines = [f'<g transform="translate({shift})">', text(LEFT, 22, title, "start"),
             text((LEFT + RIGHT) / 2, BOTTOM + 42, x_name),
             text(-(TOP + BOTTOM) / 2, 16, y_name, more='transform="rotate(-90)"')]
    for x in x_ticks:
        lines += [f'<path class="grid" d="M{x_of(x):.1f} {TOP}V{BOTTOM}"/>',
                  text(x_of(x), BOTTOM + 18, f"{x:g}")]
    for y in y_ticks:
        lines += [f'<path class="grid" d="M{LEFT} {y_of(y):.1f}H{RIGHT}"/>',
                  text(LEFT - 8, y_of(y) + 4.5, f"{y:g}", "end")]
    taken, ends = [], []                                   # boxes: dots, points of lines, labels
    for kind, label, points, center in series:
        places = [(x_of(x), y_of(y), 3) for x, y in points]
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in places)
        if center:
            places.append((x_of(center[0]), y_of(center[1]), 7))
        else:
            lines.append(f'<polyline class="{kind}" points="{path}"/>')
            for (x, y, _), (u, v, _) in itertools.pairwise(places):
                between = [(x + i / 50 * (u - x), y + i / 50 * (v - y)) for i in range(50)]
                taken += [(*point, *point) for point in between]       # no label on the line
        lines += [f'<circle class="{kind}{" dot" * (r == 3)}" cx="{x:.2f}" cy="{y:.2f}" r="{r}"/>'
                  for x, y, r in places]
        taken += [(x - r - 3, y - r - 2, x + r + 3, y + r + 2) for x, y, r in places]
        ends.append((label, *places[-1][:2]))
    for end in ends:
        taken.append(place(*end, taken))
        left, top, right, _ = taken[-1]
        lines.append(text((left + right) / 2, top + 12.5, end[0]))
    return "\n".join([*lines, "</g>"])


def dots_of(numbers):
    """Return the series of a panel, one for each method: a point for each run of 20-NN, at the mean
    PSNR of the runs with its seed, and the means of the two cells in the table."""
    for encoder in FIRST[2:]:
        psnr, knn = (numbers.found[encoder, column] for column in (PIXELS, "20-NN"))
        points = [(mean(psnr[seed]), top1) for seed in sorted(psnr.keys() & knn.keys())
                  for top1 in knn[seed]]
        if points:
            center = [mean(numbers.values(encoder, column)) for column in (PIXELS, "20-NN")]
            yield encoder, NAMES[encoder], points, center


def pays_curves(numbers, labels):
    """Return the series of a panel: for this fraction of the labels, mean accuracy against cost."""
    runs = runs_by_cost(numbers, labels)[::-1]             # panel names a line at its last point
    for name, kind in (("pretrained", "mae"), ("not_pretrained", "crossmae")):
        points = [(cost, mean(numbers.values(name, column)))
                  for cost, _, other, column in runs if other == name]
        yield kind, STARTS[name], points, None


RECIPE = {  # column of the logs: title of a panel, names of its axes
    "psnr_masked": ("ViT-tiny, CIFAR-10: pretraining", "epochs", "PSNR of masked pixels, dB"),
    "top1": ("ViT-tiny, CIFAR-10: classification", "epochs with labels", "test accuracy, %")}


def curves_of(folder, column):
    """Return the series of a panel: a line for each recipe_NAME.jsonl that has this column."""
    for kind, log in zip(FIRST[2:], sorted(folder.glob("recipe_*.jsonl"))):
        points = [(row["epoch"], row[column]) for row in read_lines(log) if column in row]
        if points:
            yield kind, log.stem.partition("_")[2].replace("_", " "), points, None


def draw(path, panels):
    """Write a picture of panels side by side."""
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    path.write_text("\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>",
        f'<rect class="back" {size} rx="6"/>', *panels, "</svg>\n"]), encoding="utf-8")


def fill(path, parts):
    """Write each part between its marks, <!-- name --> and <!-- /name -->."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        text, n = re.subn(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)",
                          lambda found: found[1] + part + found[2], text, flags=re.DOTALL)
        assert n == 1, f"{path} lacks <!-- {name} --> or <!-- /{name} -->"
    path.write_text(text, encoding="utf-8")


def write_tables(folder):
    """Write the tables between marks in README.md, RESULTS.md and RECIPE.md, and the pictures."""
    pictures, text = folder.parent / ".github", (folder / "docs/RESULTS.md").read_text("utf-8")
    every = [numbers for numbers in read_numbers(folder / "logs" / OUT.name)
             if f"<!-- {numbers.table} -->" in text]
    fill(folder / "docs/RESULTS.md", {numbers.table: tables(numbers) for numbers in every})
    fill(folder.parent / "README.md", {"results": compared(every)})
    micro = next(numbers for numbers in every if numbers.size == "micro")
    fill(folder / "docs/RECIPE.md", {"pays": pays_table(micro)})
    draw(pictures / "pays.svg", [
        panel(f"ViT-micro, CIFAR-10, {labels:.0%} of the labels", "cost: multiply-adds, in epochs "
              "with all labels", "test accuracy, %", [*pays_curves(micro, labels)], shift=i * WIDTH)
        for i, labels in enumerate(PAYS["pretrained"][1])])
    draw(pictures / "results.svg", [
        panel(numbers.title, "PSNR of masked pixels, dB (right is better)",
              "20-NN accuracy, % (up is better)", [*dots_of(numbers)], shift=i * WIDTH)
        for i, numbers in enumerate(every)])
    curves = {column: [*curves_of(folder / "logs", column)] for column in RECIPE}
    measured = [column for column in RECIPE if curves[column]]
    draw(pictures / "recipe.svg", [panel(*RECIPE[column], curves[column], shift=i * WIDTH)
                                   for i, column in enumerate(measured)])


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names, option = [*PRETRAINED, *SOURCES], parser.add_argument
    for name, default in dict(data="cifar10", size="micro", epochs=10).items():
        option(f"--{name}", default=default, type=type(default), help=f"({default})")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    option("--only", nargs="+", choices=[*names, *PAYS], default=names, metavar="NAME",
           help=f"{', '.join(names)}; also {', '.join(PAYS)} (where pretraining pays)")
    option("--out", type=Path, default=OUT, help=f"({OUT})")
    option("--tables", action="store_true")
    args, args.pretraining = parser.parse_known_args(argv)
    if args.size != "micro" and set(args.only) & set(PAYS):
        parser.error(f"--size {args.size}: {' and '.join(PAYS)} are for micro, the size of mae.pt")
    if args.tables and args.out == OUT:
        write_tables(OUT.parent.parent)
    elif args.tables:
        for numbers in read_numbers(args.out):
            print(tables(numbers), pays_table(numbers), sep="\n")
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.touch()
        run_all(args, " ".join([f"{args.data}, ViT-{args.size}, {args.epochs} epochs",
                                *args.pretraining]))


if __name__ == "__main__":
    main()
