"""Compare methods over seeds, with the commands a user types:

    python -m tests.compare mae yours --data cifar10 --seeds 0 1 2

Each method, with its own flags after colons (mae:mask_ratio=0.5), is pretrained with each seed and
evaluated. The tables show mean ± standard deviation, the differences from the first method seed by
seed, and whether they are clear by the rule in tests/docs/RESULTS.md. Other flags go to
pretraining. In imae:teacher={mae}, {mae} is the checkpoint of the method mae with the same seed.

Each result is a line of --out. Repeat a command to continue where it stopped. If a method's file or
vit.py has changed since, the method is trained again.
"""

import argparse
import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from statistics import mean, stdev
from threading import Event, Lock
from unittest.mock import patch

import torch
import torchvision

import finetune
import train
import vit
from tests.lib.plot import as_table, draw
from train import METHODS, count, in_range
from vit import SIZES, InputError, require

DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef     # what can have a docstring
PIXELS = "random 0.750 psnr_masked"                        # a number from tests.evaluate
COLUMNS = {  # column: what evaluates it
    "pixels": "-m tests.evaluate {file} --mask_ratios 0.75",
    "20-NN": "finetune.py --mode knn --checkpoint {file} --seed {seed}",
    "linear": "finetune.py --mode linear --checkpoint {file} --seed {seed}",
    **{f"{labels:.0%}": f"finetune.py --labels {labels} --checkpoint {{file}} --seed {{seed}}"
       for labels in (0.01, 0.1, 1)},
    "10%x20": "finetune.py --labels 0.1 --epochs 20 --checkpoint {file} --seed {seed}"}
TITLES = {PIXELS: "PSNR of masked pixels, dB", "20-NN": "20-NN accuracy, %",
          "linear": "linear accuracy, %", "1%": "fine-tuned, 1% of labels, %",
          "10%": "fine-tuned, 10% of labels, %", "100%": "fine-tuned, all labels, %",
          "10%x20": "fine-tuned for 20 epochs, 10% of labels, %"}


# ------------------------------------------------------------------------------------ what to run
def method_of(spec):
    """Return the class of a spec such as "mae:mask_ratio=0.5"."""
    name = spec.split(":")[0]
    require(name in METHODS, f"{name} is not in METHODS of train.py: {', '.join(METHODS)}")
    return METHODS[name]


def source_of(spec):
    """Return a number for the code, without comments and docstrings, of vit.py, of a spec's class
    and of this class's parents. Those in braces count as well. Of a file in tests/, only these
    classes count, without their decorators."""
    classes = [cls for each in (spec, *re.findall(r"{(.*?)}", spec))
               for cls in method_of(each).__mro__]
    modules = {"vit", *(cls.__module__ for cls in classes)}
    files = [Path(vit.__file__).with_name(f"{name}.py") for name in sorted(modules)]
    trees = [ast.parse(file.read_bytes()) for file in files if file.exists()]
    for cls in classes:
        if cls.__module__.startswith("tests."):
            trees.append(ast.parse(inspect.getsource(cls)))
            trees[-1].body[0].decorator_list.clear()
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            del node.body[0]
    return f"{zlib.crc32(''.join(map(ast.unparse, trees)).encode()):08x}"


def python(spec):
    """Return how a spec's commands begin: with `python`, and with `-m MODULE` if a module in tests/
    defines the method."""
    module = method_of(spec).__module__
    return ["python", *["-m", module] * module.startswith("tests.")]


def train_images(args):
    return ["--train_images", f"{args.train_images}"] * bool(args.train_images)


def slug(words):
    return re.sub(r"[^\w.]+", "-", words).strip("-")


def pretraining(spec, args, seed, runs, name_of=slug):
    """Yield the commands that pretrain a spec, those in its braces first."""
    for inner in re.findall(r"{(.*?)}", spec):
        yield from pretraining(inner, args, seed, runs, name_of)
    given = re.sub(r"{(.*?)}", lambda found: f"{runs}/{name_of(found[1])}/last.pt", spec)
    method, *options = given.split(":")
    flags = [word for option in options for word in f"--{option}".split("=", 1)]
    yield shlex.join([*python(spec), "train.py", "--method", method, "--data", args.data, "--size",
                      args.size, "--epochs", f"{args.epochs}", "--seed", f"{seed}",
                      *train_images(args), *args.pretraining, *flags, "--runs", runs, "--name",
                      name_of(spec)])


def chain(spec, args, seed, runs):
    """Yield (column, command) for all that a spec needs; pretraining has the column None."""
    def name_of(spec):                                     # changed code is another run
        return f"{slug(spec)}_{source_of(spec)}"
    for command in pretraining(spec, args, seed, runs, name_of):
        yield None, command
    for column in args.columns:
        if column != "pixels" or method_of(spec).reconstruct:
            command = COLUMNS[column].format(file=f"{runs}/{name_of(spec)}/last.pt", seed=seed)
            run = ["--eval_every", "1000", "--runs", runs, "--name",
                   f"{name_of(spec)}_{column.strip('%')}"]
            yield column, shlex.join([*python(spec), *command.split(), "--data", args.data,
                                      *train_images(args) * (column != "pixels"),
                                      *run * (column not in ("pixels", "20-NN"))])


# ---------------------------------------------------------------------------------------- running
RUNNING = []                                               # processes


class Failed(Exception):
    """Names a command that failed, and its last line."""


def read_lines(path):
    """Return the dicts in a .jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers_in(text):
    """Return the numbers in a table from tests.evaluate: {"random 0.750 psnr_masked": dB, ...}."""
    found, heads = {}, []
    for words in map(str.split, text.splitlines()):
        if words[:1] == ["checkpoint"]:                    # the table begins
            heads = words
        elif len(words) == len(heads):                     # a row of it
            for head, word in zip(heads[3:], words[3:]):
                found[f"{words[1]} {words[2]} {head}"] = float(word)
    return found


def run(command, title="", environment={}):
    """Run a command, resuming what an earlier call began. Returns its numbers, if any."""
    print(f"\n{title}: {command}", flush=True)
    folder, printed = re.search(r"--runs (\S+) --name (\S+)", command), ""
    begun = folder and Path(*folder.groups()).exists()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(command)[1:], *["--resume"] * bool(begun)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment})
    RUNNING.append(process)
    for line in filter(str.strip, process.stdout):
        print(f"{title}: {line}", end="", flush=True)
        printed += line
    RUNNING.remove(process)
    if process.wait():
        raise Failed(f"{title}: failed with exit code {process.returncode}\n  {command}\n  "
                     f"{(printed.strip().splitlines() or ['(it printed nothing)'])[-1]}")
    if folder:
        last = read_lines(Path(*folder.groups(), "log.jsonl"))[-1]
        return {"top1": last["top1"]} if "top1" in last else {}
    accuracy = re.search(r"top1 ([\d.]+)", printed)
    return {"top1": float(accuracy[1])} if accuracy else numbers_in(printed)


def environments(jobs):
    """Return the environment of each job: its GPU, or its part of the cores."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
        map(str, range(torch.cuda.device_count())))
    if torch.cuda.is_available() and gpus:
        gpus = gpus.split(",")
        return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(jobs)]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return [{"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}] * jobs


def run_all(chains, out, jobs=1):
    """Run chains of commands, `jobs` at a time, and add each result to the file `out`. A chain is
    (keys, [(column, command), ...]). The keys, e.g. encoder and seed, are in each of its lines. A
    result that has such a line is not computed again; if all have, nothing runs. If a command
    fails, the others continue. Returns what failed, in words."""
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    commit = subprocess.getoutput("git rev-parse --short HEAD")
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    made = f"commit {commit}, torch {torch.__version__.split('+')[0]}, {machine}"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()
    lines, failed, free, stopped = read_lines(out), [], SimpleQueue(), Event()
    locks = {command: Lock() for _, commands in chains for _, command in commands}
    for environment in environments(jobs):
        free.put(environment)

    def work(keys, commands):
        done = {line["column"] for line in lines if keys.items() <= line.items()}
        asked = [(column, command) for column, command in commands if column not in done]
        environment, title = free.get(), f"{keys['encoder']}, seed {keys['seed']}"
        for column, command in asked if any(column for column, _ in asked) else ():
            if stopped.is_set():
                break
            try:
                with locks[command]:                       # two may need one teacher
                    numbers = run(command, title, environment)
            except Failed as error:
                failed.append(str(error))
                if column is None:                         # without it, the others fail as well
                    break
            else:
                line = dict(keys, column=column, command=re.sub(" --eval_every.*", "", command),
                            made=f"{time.strftime('%Y-%m-%d')}, {made}", numbers=numbers)
                with out.open("a", encoding="utf-8") as file:
                    file.write((json.dumps(line, separators=(",", ":")) + "\n") * bool(column))
        free.put(environment)

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in [pool.submit(work, *each) for each in chains]:
            future.result()
    finally:                                               # after Ctrl-C, nothing goes on
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [*RUNNING]:
            process.terminate()
    return failed


# --------------------------------------------------------------------------- numbers and the rule
class Numbers:
    """All numbers of one table: found[encoder, column] is {seed: [number of each run]}."""

    def __init__(self, table, lines):
        self.table, self.size = table, re.search(r"ViT-(\w+)", table)[1]
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

    def differences(self, a, b, column):
        """Return A - B for each run of A and each run of B with the same seed, {seed: [...]}."""
        a, b = self.found[a, column], self.found[b, column]
        return {seed: [x - y for x in a[seed] for y in b[seed]] for seed in sorted(a.keys() & b)}

    def minus(self, a, b, column):
        """Return the mean of these differences, bold if it is clear by the rule in RESULTS.md; ""
        with fewer than three seeds."""
        by_seed, places = self.differences(a, b, column), precision(column)[0]
        if len(by_seed) < 3:
            return ""
        values = sum(by_seed.values(), [])
        text = f"{mean(values):+.{places}f}"
        return f"**{text}**" if is_clear(values, column) else text


def is_clear(values, column):
    """Return whether the mean of differences is clear: the rule of RESULTS.md."""
    limit = max(2 * stdev(values), precision(column)[1])
    return abs(mean(values)) > limit + 1e-9                # not through rounding


def precision(column):
    """Return the number of decimals to print, and the floor that a mean difference must exceed."""
    return (2, 0.02) if "psnr" in column else (1, 0.5)     # in dB; in points of accuracy


def read_numbers(path):
    """Return the Numbers of each table in a .jsonl file."""
    found = defaultdict(list)
    for line in read_lines(path):
        found[line["table"]].append(line)
    return [Numbers(table, lines) for table, lines in found.items()]


# --------------------------------------------------------------------------------- the comparison
def table_of(numbers, specs, column):
    """Return a row (dict) for each spec: its mean ± std in a column, and how it differs from the
    first one."""
    rows, places = [], precision(column)[0]
    for spec in specs:
        by_seed = numbers.differences(spec, specs[0], column) if spec != specs[0] else {}
        values = sum(by_seed.values(), [])
        verdict = "" if spec == specs[0] else "needs three seeds"
        if len(by_seed) >= 3:
            verdict = "clear" if is_clear(values, column) else "not clear"
        rows.append({
            TITLES[column]: spec, "mean ± std": numbers.cell(spec, column),
            f"minus {specs[0]}, by seed": "  ".join(f"{x:+.{places}f}" for x in values),
            "mean": f"{mean(values):+.{places}f}" if values else "", "by the rule": verdict})
    return rows


def picture(path, numbers, specs, columns):
    """Draw a panel for each column: small dots are runs, large ones means."""
    panels = []
    for column in columns:
        found = [(i, spec, numbers.values(spec, column)) for i, spec in enumerate(specs)]
        series = [each for i, spec, values in found if values for each in (
            (spec, "dot", [(i, value) for value in values]), (spec, "mean", [(i, mean(values))]))]
        panels.append(dict(title=TITLES[column], x="", series=series))
    draw(path, panels, per_row=2)


def plan(argv=None):
    """Return the settings of `python -m tests.compare` with the arguments `argv`."""
    parser = argparse.ArgumentParser("tests.compare", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("methods", nargs="+", metavar="NAME[:FLAG=VALUE]", help="the first is the reference")
    option("--data", default="shapes", help="as in train.py (shapes)")
    option("--size", choices=SIZES, default="micro", help="(micro)")
    option("--epochs", type=count, default=10, help="of pretraining (10)")
    option("--train_images", type=count, metavar="N", help="pretrain on only N images, which are "
           "also those that 20-NN, linear and fine-tuning choose from (all)")
    option("--seeds", nargs="+", type=in_range(int, 0), default=[0, 1, 2], metavar="N",
           help="(0 1 2)")
    option("--columns", nargs="+", choices=COLUMNS, metavar="NAME",
           default=["pixels", "20-NN", "linear", "10%"],
           help=f"{', '.join(COLUMNS)} (pixels 20-NN linear 10%)".replace("%", "%%"))
    option("--jobs", type=count, default=1, help="commands at a time, on GPUs or cores (1)")
    option("--out", type=Path, default=Path("runs/compare.jsonl"), help="(runs/compare.jsonl)")
    args, args.pretraining = parser.parse_known_args(argv)
    require("--seed" not in args.pretraining, "--seed: use --seeds, e.g. --seeds 0 1 2")
    images = f", {args.train_images} images" if args.train_images else ""
    args.table = " ".join([f"{args.data}, ViT-{args.size}, {args.epochs} epochs{images}",
                           *args.pretraining])
    args.sources = {spec: source_of(spec) for spec in args.methods}
    with patch.object(train, "pretrain", lambda flags: None):          # a wrong flag ends this here
        for spec in args.methods:
            *_, command = pretraining(spec, args, 0, "runs", slug)
            train.main(shlex.split(command.partition("train.py ")[2]))
    if args.data in ("cifar10", "cifar100"):               # downloaded once, not by several --jobs
        getattr(torchvision.datasets, args.data.upper())("data", download=True)
    return args


def say_lengths(args):
    """Print how many epochs each training of a plan has."""
    here = train.Process(0, 1, torch.device("cpu"), torch.float32, workers=0)
    found, = train.find_images(args.data, ["train"], here, None)
    n = min(len(found.labels), args.train_images or len(found.labels))
    narrow = SIZES[args.size]["dim"] < SIZES["base"]["dim"]            # as in train.settle
    said = [f"pretraining {args.epochs} epochs of {n} images"]
    for column in args.columns:
        if column not in ("pixels", "20-NN"):
            share, _, typed = column.partition("%x")
            labels = n if column == "linear" else round(n * float(share.strip("%")) / 100)
            paper, ours = finetune.RECIPES["linear" if column == "linear" else "finetune"]
            recipe = {**paper, **ours} if narrow else paper
            derived = train.derive(recipe, {}, labels, labels, 1)
            epochs = typed or {**recipe, **derived}["epochs"]
            said.append(f"{column} {epochs} of {labels}")
    print(f"each method and seed: {', '.join(said)}", flush=True)


def chains_of(args):
    """Return what run_all needs for a plan: all methods with the first seed, then the next one."""
    return [(dict(table=args.table, encoder=spec, seed=seed, source=args.sources[spec]),
             [*chain(spec, args, seed, f"runs/compare/{slug(args.table)}/{seed}")])
            for seed, spec in product(args.seeds, args.methods)]


def numbers_of(args):
    """Return the Numbers that are measured for a plan, with the code as it is now."""
    return Numbers(args.table, [
        line for line in read_lines(args.out) if line["table"] == args.table and line["seed"] in
        args.seeds and line.get("source") == args.sources.get(line["encoder"], "")])


def show(numbers, specs, columns):
    """Print a table for each of the columns that is measured, and return these columns."""
    print(f"\n{numbers.table}")
    columns = [PIXELS if column == "pixels" else column for column in columns]
    measured = [x for x in columns if any(numbers.values(spec, x) for spec in specs)]
    for column in measured:
        print(f"\n{as_table(table_of(numbers, specs, column))}")
    return measured


def main(argv=None):
    """Run `python -m tests.compare` with the arguments `argv`. Returns the number of commands that
    failed."""
    args = plan(argv)
    say_lengths(args)
    failed = run_all(chains_of(args), args.out, args.jobs)
    numbers = numbers_of(args)
    measured = show(numbers, args.methods, args.columns)
    if measured:
        picture(args.out.with_suffix(".svg"), numbers, args.methods, measured)
        print(f"\nsee     {args.out} {args.out.with_suffix('.svg')}")
    if failed:
        print("", *failed, sep="\n")
    return len(failed)


def end(name, main):
    """Run main() for a program of this name, and exit with 1 if a command failed."""
    try:
        sys.exit(min(1, main()))
    except (InputError, OSError) as error:
        sys.exit(f"{name}: error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; repeat the command to continue")


if __name__ == "__main__":
    end("tests.compare", main)
