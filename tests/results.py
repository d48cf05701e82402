"""Every method on one budget, by the commands a user would type, and tables of what comes out:

    python -m tests.results --data cifar10                     # goes on where it stopped
    python -m tests.results --data cifar10 --size tiny --epochs 200 --batch_size 512
    python -m tests.results --table                            # only prints what there is

Each result is a line of tests/results.jsonl, from which the tables are made. A command that has one
is not run again (to repeat it, delete the line and the run's folder in runs/results/). In order:

  1. pretraining, seed 0 (untrained: MAE, --epochs 0); then of each 20 nearest neighbours and the
     PSNR on --other data, never trained on, and on its own
  2. fine-tuning, from scratch too: 10% and 1% of the labels, seeds 0 to 2; linear probe; all labels

All labels take --finetune_epochs, 10% of them four times as many, 1% six times (batches of 24), the
linear probe twice; only the last epoch is validated. Options not listed below go to pretraining.
Several of these can run at a time, each with its own --only; imae needs the finished mae.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import torch

PRETRAINED = {  # name: --method and its arguments
    "untrained": "mae", "mae": "mae", "crossmae": "crossmae",
    "crossmae_25": "crossmae --prediction_ratio 0.25",
    "crossmae_last": "crossmae --feature_maps last", "hypermae": "hypermae", "ginr": "minr",
    "transinr": "minr --hypernetwork transinr", "imae": "imae --teacher {runs}/mae/last.pt"}
TUNED = {  # name: arguments, and epochs in --finetune_epochs
    "linear": (" --mode linear", 2), "1%": (" --labels 0.01 --batch_size 24", 6),
    "10%": (" --labels 0.1", 4), "100%": ("", 1)}


def jobs(args, setup):
    """(table, encoder, column, seed, command) of all there is to do, in order."""
    names, runs = [name for name in PRETRAINED if name in args.only], f"runs/results/{setup}"
    device = f" --device {args.device}" if args.device else ""
    several = f"torchrun --standalone --nproc_per_node {args.processes}"
    start = several if args.processes > 1 else "python"
    tuned = {name: f"--checkpoint {runs}/{name}/last.pt" for name in names}
    if "scratch" in args.only:
        tuned["scratch"] = f"--mode scratch --size {args.size}"
    for name in names:
        method = " ".join([PRETRAINED[name].format(runs=runs), *args.pretraining])
        yield setup, name, "epochs", 0, (
            f"{start} train.py --method {method} --data {args.data} --size {args.size} --epochs "
            f"{0 if name == 'untrained' else args.epochs} --runs {runs} --name {name}{device}")
    for name in names:
        yield setup, name, "20-NN", 0, (
            f"{start} finetune.py --mode knn {tuned[name]} --data {args.data}{device}")
        for title, data in ((f"{setup} on {args.other}", args.other), (setup, args.data)):
            yield title, name, "PSNR", 0, (f"python train.py --eval {runs}/{name}/last.pt --data "
                                           f"{data} --mask_ratios 0.5 0.75 0.9{device}")
    few = [(share, seed) for seed in range(3) for share in ("10%", "1%")]
    for kind, seed in [*few, ("linear", 0), ("100%", 0)]:
        own, epochs = TUNED[kind][0], TUNED[kind][1] * args.finetune_epochs
        for name, source in tuned.items():
            if (name, kind) != ("scratch", "linear"):
                yield setup, name, f"{kind} ({epochs} epochs)", seed, (
                    f"{start} finetune.py {source}{own} --data {args.data} --epochs {epochs} "
                    f"--eval_every {epochs} --seed {seed} --runs {runs} --name "
                    f"{name}_{kind.strip('%')}_{epochs}_{seed}{device}")


def run(command):
    """Run it, resuming what was begun; its numbers, of log.jsonl or printed, as a dict."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    fits = re.search(r"--runs (\S+) --name (\S+)", command)
    done = subprocess.run([*command.split(), *["--resume"] * bool(fits)], check=True, text=True,
                          stdout=subprocess.PIPE, env={**os.environ, "PATH": path})
    print(done.stdout, flush=True)
    if fits:
        return json.loads(Path(*fits.groups(), "log.jsonl").read_text().splitlines()[-1])
    rows = re.findall(r"^ *\S+/last.pt +([-\d. ]+)$", done.stdout, re.MULTILINE)
    if rows:                                               # the table that --eval prints
        names = ("mask_ratio", "psnr_hidden", "psnr_image", "psnr_decoded")
        rows = [dict(zip(names, map(float, row.split()))) for row in rows]
        return {"psnr": rows, "printed": done.stdout.splitlines()}
    return {"top1": float(re.search(r"top1 ([\d.]+)", done.stdout)[1])}


def text(values):
    """A cell of one value or none or, of several seeds, mean ± deviation."""
    if len(values) > 1:
        return f"{mean(values):.1f} ± {stdev(values):.1f}"
    return "".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in values)


def as_markdown(results):
    """A table's lines, a row an encoder. PSNR in dB: hidden pixels / all as decoded."""
    cells, order = defaultdict(dict), ["epochs", "PSNR", "20-NN", *TUNED]
    for r in results:                                      # {(encoder, column): {seed: value}}
        for row in r["numbers"].get("psnr", []):
            pair = f"{row['psnr_hidden']:.2f} / {row['psnr_decoded']:.2f}"
            cells[r["encoder"], f"PSNR at {row['mask_ratio']}"][r["seed"]] = pair
        if r["column"] != "PSNR":
            name = "epoch" if r["column"] == "epochs" else "top1"
            cells[r["encoder"], r["column"]][r["seed"]] = r["numbers"][name]
    columns = sorted({c for _, c in cells}, key=lambda c: (order.index(c.split()[0]), c))
    yield f"| encoder | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|"
    for encoder in [*PRETRAINED, "scratch"]:
        row = [text([*cells.get((encoder, column), {}).values()]) for column in columns]
        if any(row):
            yield f"| {encoder} | {' | '.join(row)} |"


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names, option = [*PRETRAINED, "scratch"], parser.add_argument
    for name, default in dict(data="cifar10", other="shapes", size="micro", epochs=10,
                              finetune_epochs=5, processes=1, device="").items():
        option(f"--{name}", default=default, type=type(default), help=f"({default})")
    option("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    option("--out", type=Path, default=Path("tests/results.jsonl"))
    option("--table", action="store_true")
    args, args.pretraining = parser.parse_known_args(argv)
    words = (Path(args.data).name, args.size, str(args.epochs), *args.pretraining)
    setup = "_".join(word.strip("-") for word in words)
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    cuda = torch.cuda.is_available() and args.device != "cpu"
    where = torch.cuda.get_device_name() if cuda else f"{cpu}, threads: {torch.get_num_threads()}"
    args.out.touch()
    for title, encoder, column, seed, command in [] if args.table else jobs(args, setup):
        if json.dumps(command) in args.out.read_text():    # with its quotes: no part of another
            continue
        print(f"\n{command}", flush=True)
        record = dict(
            table=title, encoder=encoder, column=column, seed=seed, command=command,
            commit=subprocess.getoutput("git rev-parse --short HEAD"),
            date=time.strftime("%Y-%m-%d"), machine=where, torch=torch.__version__,
            numbers=run(command))
        args.out.open("a").write(json.dumps(record) + "\n")
    results = [json.loads(line) for line in args.out.read_text().splitlines()]
    for title in dict.fromkeys(r["table"] for r in results):
        own = [r for r in results if r["table"] == title]
        facts = "; ".join(sorted({f"{r['machine']}, {r['date']}, {r['commit']}" for r in own}))
        print(f"\n{title} ({facts})\n", *as_markdown(own), sep="\n")


if __name__ == "__main__":
    main()
