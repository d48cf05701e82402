"""Compare our five methods, for the tables and pictures of README.md and RESULTS.md:

    python -m tests.results --out again.jsonl                  # continues where it stopped
    python -m tests.results --out again.jsonl --size tiny --epochs 50 --batch_size 512
    python -m tests.results --tables                           # writes the tables and pictures

tests/compare.py runs the commands; this file has our list of them. Each result is a line of --out.
If it has several lines, all of them count. A seed controls all randomness: pretraining, the
teacher, the label subset and fine-tuning. Flags that are not listed below go to pretraining. With
another --out, --tables only prints its tables. Otherwise, it writes the tables in the pages, and
results.svg, pays.svg and, from copies of log.jsonl named tests/logs/recipe_NAME.jsonl, recipe.svg.
"""

import argparse
import ast
import functools
import re
import sys
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

from finetune import Classifier
from tests.bench import flops_of_step
from tests.compare import PIXELS, pretraining, read_lines, read_numbers, run_all, slug
from tests.lib.plot import draw
from train import METHODS
from vit import SIZES

OUT = Path("tests/logs/results.jsonl")
ENCODERS = {  # name: method and flags, as for tests.compare
    "untrained": "mae:epochs=0", "mae": "mae", "mae_4": "mae:decoder_depth=4",
    "crossmae": "crossmae", "crossmae_2": "crossmae:decoder_depth=2",
    "crossmae_25": "crossmae:prediction_ratio=0.25",
    "crossmae_25_rate": "crossmae:prediction_ratio=0.25:lr=2e-3",
    "crossmae_25_long": "crossmae:prediction_ratio=0.25:epochs=16",    # MAE's multiply-adds
    "hypermae": "hypermae", "ginr": "minr", "imae": "imae:teacher={mae}",
    "imae_alone": "imae:teacher={mae}:distill_weight=0"}
FEATURES = {  # name: whose checkpoint, and --pool; the others have their own, and "mean"
    "mae_joined": ("mae", "joined"), "ginr": ("ginr", "joined"), "ginr_mean": ("ginr", "extra")}
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
# ... and for where pretraining pays: encoder: (flags, {fraction of labels: epochs})
BETTER = (f"{ALIKE} --crop 0.85 --optimizer adamw --lr 2e-3 --weight_decay 0.05 --smoothing 0.1 "
          f"--drop_path 0 --pool mean --amp bf16")
PAYS = {
    "pretrained": (f"--checkpoint tests/models/mae.pt --layer_decay 0.9 {BETTER}",
                   {1: (3, 10), 0.1: (12, 40), 0.01: (20, 100)}),
    "not_pretrained": (f"--mode scratch --layer_decay 1 {BETTER}",
                       {1: (3, 10, 17), 0.1: (12, 40, 114), 0.01: (20, 100, 750)})}
STARTS = {"pretrained": "after pretraining", "not_pretrained": "from scratch"}
MASKS = "--mask_ratios 0.5 0.75 0.9 --masks random grid block"


def commands(args, name, seed, runs):
    """Yield (column, command) for everything that an encoder needs. Commands of pretraining, its
    own and that of a teacher, come first; their column is None."""
    words = f"--data {args.data} --seed {seed}"
    if name in PAYS:
        flags, epochs_for = PAYS[name]
        for labels, choices in epochs_for.items():
            batch_size = 32 if labels == 0.01 else 64      # 32: about a tenth of 500 images
            for epochs in choices:
                yield f"{labels:.0%}, {epochs} epochs", (
                    f"python finetune.py {flags} --labels {labels} --batch_size {batch_size} "
                    f"--epochs {epochs} --warmup_epochs {epochs / 10} {words} --eval_every 1000 "
                    f"--runs {runs} --name {name}_{labels}_{epochs}")
        return
    encoder, pool = FEATURES.get(name, (name, "mean"))
    source = f"--mode scratch --size {args.size} --layer_decay 1 --pool mean"
    if name != "scratch":
        file = f"{runs}/{slug(ENCODERS[encoder])}/last.pt"
        source = f"--checkpoint {file} --pool {pool}"
        for command in pretraining(ENCODERS[encoder], args, seed, runs):
            yield None, command
    if name in ENCODERS:
        analyses = f" && python -m tests.analyses {file} --data {args.data}"
        yield "PSNR", (f"python train.py --eval {file} --data {args.data} {MASKS}"
                       f"{analyses * (name in ('mae', 'imae', 'imae_alone'))}")
    if name == "imae_alone":                               # only for its measure of two images
        return
    if name != "scratch":                                  # it has no features to probe
        yield "20-NN", f"python finetune.py --mode knn --k 20 {source} {words}"
    for column, flags in TUNED.items():
        if (name, column) != ("scratch", "linear"):
            yield column, (f"python finetune.py {flags} {source} {words} --eval_every 100 --runs "
                           f"{runs} --name {name}_{column.strip('%')}")


# ------------------------------------------------------------------ tables
NAMES = {  # encoder: its name in the tables
    "untrained": "untrained", "scratch": "from scratch", "mae": "MAE",
    "mae_4": "MAE, 4 decoder blocks", "mae_joined": "MAE, joined", "crossmae": "CrossMAE, all",
    "crossmae_2": "CrossMAE, all, 2 decoder blocks", "crossmae_25": "CrossMAE, a third",
    "crossmae_25_rate": "CrossMAE, a third, MAE's learning rate",
    "crossmae_25_long": "CrossMAE, a third, 16 epochs", "hypermae": "HyperMAE",
    "ginr": "MINR, joined", "ginr_mean": "MINR, mean", "imae": "i-MAE"}
FIRST = ("untrained", "scratch", "mae", "crossmae", "crossmae_25", "hypermae", "ginr", "imae")
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


def options_of(encoder):
    """Return an encoder's method, and its flags {name: text}."""
    method, *options = ENCODERS[encoder].split(":")
    return method, dict(option.split("=") for option in options)


@functools.cache
def multiply_adds(encoder, size):
    """Return the multiply-adds of a training step, forward and backward, per image."""
    method, flags = options_of(encoder)
    given = {**SIZES[size], **METHODS[method].low_res_config}
    for name in flags.keys() - {"lr", "epochs"}:           # a teacher is frozen: forward only
        given[name] = SIZES[size] if name == "teacher" else ast.literal_eval(flags[name])
    model, B = METHODS[method](32, 4, 3, **given), BATCHES[size]
    return flops_of_step(lambda B: model(torch.zeros(B, 3, 32, 32))[0], B) / 2 / B


def cost(encoder, size):
    """Return the multiply-adds of pretraining relative to MAE's (with those of its teacher's)."""
    if encoder not in ENCODERS or encoder == "untrained" or size not in BATCHES:
        return ""
    _, flags = options_of(encoder)
    longer = int(flags.get("epochs", 10)) / 10
    ratio = longer * multiply_adds(encoder, size) / multiply_adds("mae", size)
    return f"{ratio:.2f}" + f" ({ratio + 1:.2f})" * ("teacher" in flags)


@functools.cache
def pretraining_cost(size="micro", epochs=10):
    """Return the multiply-adds of pretraining an MAE, in epochs with all labels."""
    model, label = Classifier(32, 4, 3, **SIZES[size], classes=10), torch.zeros(1).long()
    step = flops_of_step(lambda B: model(torch.zeros(B, 3, 32, 32), label.expand(B))[0], 1) / 2
    return epochs * multiply_adds("mae", size) / step


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *(row for row in rows if any(row[1:]))]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    return text.replace(" ± ", "\u00a0±\u00a0")            # these stay on one line


def results(every, encoders, columns):
    """Return a table of results, side by side for `every`. Bold: clearly different from MAE."""
    heads, rows = [""], [[NAMES[encoder]] for encoder in encoders]
    for numbers in every:
        heads += [*columns.values(), "cost"]
        for row, encoder in zip(rows, encoders):
            for column in columns:
                bold = "**" if numbers.minus(encoder, "mae", column).endswith("**") else ""
                row.append(f"{bold}{numbers.cell(encoder, column)}{bold}")
            row.append(cost(encoder, numbers.size) if row[-len(columns)] else "")
    return markdown(heads, rows)


def compared(every):
    """Return the README's table: MAE's numbers, and the others' differences from them."""
    names = {**NAMES, "ginr": "MINR"}
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
    """Return the table of accuracies and their costs; "" if there are none."""
    rows = [[f"{labels:.0%}", STARTS[name], f"{epochs}", f"{cost:.1f}", numbers.cell(name, column)]
            for labels in PAYS["pretrained"][1]
            for cost, epochs, name, column in runs_by_cost(numbers, labels)]
    heads = ["labels", "training", "epochs", "cost", "accuracy, %"]
    return markdown(heads, rows) if rows else ""


def tables(numbers):
    """Return two tables: results, and the differences in MORE."""
    columns, more = {PIXELS: "pixels, dB", **TOP1}, []
    for name, (a, b, columns_a, *columns_b) in MORE.items():
        found = [numbers.minus(a, b, *pair) for pair in zip(columns_a, *columns_b)]
        more.append([name, ", ".join(filter(None, found))])
    return "\n".join([results([numbers], NAMES, columns),
                      markdown(["more differences", "A - B"], more)])


# ------------------------------------------------------------------ pictures
def dots_of(numbers):
    """Return the series of a panel, two for each method: a dot for each run of 20-NN, at the mean
    PSNR of the runs with its seed, and the means of the two cells in the table."""
    for encoder in FIRST[2:]:
        psnr, knn = (numbers.found[encoder, column] for column in (PIXELS, "20-NN"))
        points = [(mean(psnr[seed]), top1) for seed in sorted(psnr.keys() & knn.keys())
                  for top1 in knn[seed]]
        if points:
            center = tuple(mean(numbers.values(encoder, column)) for column in (PIXELS, "20-NN"))
            yield from ((NAMES[encoder], "dot", points), (NAMES[encoder], "mean", [center]))


def pays_curves(numbers, labels):
    """Return the series of a panel: accuracy ± std against cost, for this fraction of labels."""
    runs = runs_by_cost(numbers, labels)
    for name, label in STARTS.items():
        values = [(cost, numbers.values(name, column)) for cost, _, its, column in runs
                  if its == name]
        yield label, "line", [(cost, mean(found), *map(stdev, [found][:len(found) > 1]))
                              for cost, found in values]


PRETRAINED = {"after_pretraining": 100, "from_scratch": 0}             # logs: epochs without labels


def recipe_curves(folder, by_cost=False):
    """Return the series of a panel: accuracy by epochs with labels, or by multiply-adds in such
    epochs, those of pretraining included, from each log named recipe_NAME.jsonl."""
    for log in sorted(folder.glob("recipe_*.jsonl")):
        start = next((x for x in PRETRAINED if log.stem.startswith(f"recipe_{x}")), None)
        if start:
            before = pretraining_cost("tiny", PRETRAINED[start]) if by_cost else 0
            rows = [row for row in read_lines(log) if "top1" in row]
            label = f"{start.replace('_', ' ')}, {rows[-1]['epoch']} epochs"
            yield label, "line", [(before + row["epoch"], row["top1"]) for row in rows]


def fill(path, parts):
    """Write each part between its marks, <!-- name --> and <!-- /name -->."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        text, n = re.subn(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)",
                          lambda found: found[1] + part + found[2], text, flags=re.DOTALL)
        assert n == 1, f"{path} lacks <!-- {name} --> or <!-- /{name} -->"
    path.write_text(text, encoding="utf-8")


def write_tables(folder):
    """Write the tables between marks in README.md and RESULTS.md, and the pictures."""
    pictures, text = folder.parent / ".github", (folder / "docs/RESULTS.md").read_text("utf-8")
    every = [numbers for numbers in read_numbers(folder / "logs" / OUT.name)
             if f"<!-- {numbers.table} -->" in text]
    micro = next(numbers for numbers in every if numbers.size == "micro")
    fill(folder / "docs/RESULTS.md", {"pays": pays_table(micro), **{
        numbers.table: tables(numbers) for numbers in every}})
    fill(folder.parent / "README.md", {"results": compared(every)})
    draw(pictures / "results.svg", [
        dict(title=f"20-NN accuracy, %: ViT-{numbers.size}", x="PSNR of masked pixels, dB",
             series=[*dots_of(numbers)]) for numbers in every], alike="scale")
    draw(pictures / "pays.svg", [
        dict(title=f"{labels:.0%} of labels", series=[*pays_curves(micro, labels)],
             x="test accuracy, %, by cost in epochs with all labels")
        for labels in PAYS["pretrained"][1]], alike="y")
    draw(pictures / "recipe.svg", [
        dict(title=title, x=x, series=[*recipe_curves(folder / "logs", by_cost)])
        for title, x, by_cost in (
            ("test accuracy, %", "epochs with labels", False),
            ("the same, by cost", "cost, in epochs with labels", True))], alike="y")


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names, option = [*{**ENCODERS, **FEATURES}, "scratch"], parser.add_argument
    for name, default in dict(data="cifar10", size="micro", epochs=10, out=OUT).items():
        option(f"--{name}", default=default, type=type(default), help=f"({default})")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    option("--only", nargs="+", choices=[*names, *PAYS], default=names, metavar="NAME",
           help=f"{', '.join(names)}; also {', '.join(PAYS)} (where pretraining pays)")
    option("--jobs", type=int, default=1, metavar="N", help="commands at a time (1)")
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
        table = " ".join([f"{args.data}, ViT-{args.size}, {args.epochs} epochs", *args.pretraining])
        failed = run_all([
            (dict(table=table, encoder=name, seed=seed),
             [*commands(args, name, seed, f"runs/results/{slug(table)}/{seed}")])
            for seed, name in product(args.seeds, args.only)], args.out, args.jobs)
        if failed:
            sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
