"""Every method on one budget, by the commands a user would type, and tables of what comes out:

    python -m tests.results --data cifar10                     # goes on where it stopped
    python -m tests.results --data cifar10 --size tiny --epochs 100 --batch_size 512
    python -m tests.results --table > tests/RESULTS.md         # only prints what there is

Each result is a line of tests/results.jsonl, of which tests/tables.py makes tables and verdicts. A
command that has one is not run again (to repeat it, delete the line and the run's folder in
runs/results/). One seed stands for all that is drawn: pretraining, its teacher, the choice of
labels and fine-tuning. Of each seed and encoder, in this order: pretraining (untrained: MAE,
--epochs 0); 20 nearest neighbours; PSNR on its own and on --other data, which it never saw; linear
probe; fine-tuning with 1%, 10% and all of the labels, and the same from scratch.

All labels take --finetune_epochs, 10% of them four times as many, 1% six times (batches of 24), the
linear probe twice; only the last epoch is validated. Options not listed below go to pretraining.
Several of these can run at a time, each with its own --only or --seeds and --out.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

PRETRAINED = {  # name: --method and its arguments
    "untrained": "mae", "mae": "mae",
    "crossmae": "crossmae", "crossmae_25": "crossmae --prediction_ratio 0.25",
    "crossmae_25_rate": "crossmae --prediction_ratio 0.25 --lr 2e-3",
    "crossmae_last": "crossmae --feature_maps last", "hypermae": "hypermae", "ginr": "minr",
    "ginr_visible": "minr --encode_visible_only", "transinr": "minr --hypernetwork transinr",
    "imae": "imae --teacher {runs}/mae/last.pt",
    "imae_alone": "imae --teacher {runs}/mae/last.pt --distill_weight 0"}
TUNED = {  # column: arguments, and epochs in --finetune_epochs
    "linear": ("--mode linear", 2), "1%": ("--labels 0.01 --batch_size 24", 6),
    "10%": ("--labels 0.1", 4), "100%": ("--mode finetune", 1)}


def pretraining(args, runs, name, seed):
    """The command that pretrains the encoder `name` in the folder `runs`."""
    method = " ".join([PRETRAINED[name].format(runs=runs), *args.pretraining])
    epochs = 0 if name == "untrained" else args.epochs
    return (f"{args.start} train.py --method {method} --data {args.data} --size {args.size} "
            f"--epochs {epochs} --seed {seed} --runs {runs} --name {name}{args.on_device}")


def evaluations(args, runs, name, seed):
    """(column, command) for all that is asked of an encoder, or of the network from scratch."""
    if name == "scratch":
        source = f"--mode scratch --size {args.size}"
    else:
        source = f"--checkpoint {runs}/{name}/last.pt"
        yield "20-NN", (f"{args.start} finetune.py --mode knn {source} --data {args.data} "
                        f"--seed {seed}{args.on_device}")
        for data in (args.data, args.other):
            yield f"PSNR on {data}", (
                f"python train.py --eval {runs}/{name}/last.pt --data {data} --mask_ratios 0.5 "
                f"0.75 0.9 --masks random grid block{args.on_device}")
    for column, (words, factor) in TUNED.items():
        epochs = factor * args.finetune_epochs
        if name == "scratch":
            words = words.replace("--mode finetune", "")
        if (name, column) != ("scratch", "linear"):
            command = (f"{args.start} finetune.py {source} {words} --data {args.data} --epochs "
                       f"{epochs} --eval_every {epochs} --seed {seed} --runs {runs} --name "
                       f"{name}_{column.strip('%')}_{epochs}{args.on_device}")
            yield f"{column} ({epochs} epochs)", " ".join(command.split())


def run(command):
    """Run it, resuming what was begun; its numbers, of log.jsonl or printed, as a dict."""
    print(f"\n{command}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    log = re.search(r"--runs (\S+) --name (\S+)", command)
    words = command.split() + ["--resume"] * bool(log)
    done = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE,
                          env={**os.environ, "PATH": path})
    print(done.stdout, flush=True)
    if log:
        rows = Path(*log.groups(), "log.jsonl").read_text().splitlines()
        rows = [json.loads(row) for row in rows]
        seconds = sum(row.get("train_s", 0) for row in rows)
        return {**rows[-1], "train_minutes": round(seconds / 60, 2)}
    rows = re.findall(r"^ *\S+/last.pt +(random|grid|block) +([-\d. ]+)$", done.stdout, re.M)
    if rows:                                               # the table that --eval prints
        names = ("mask_ratio", "psnr_hidden", "psnr_image", "psnr_decoded")
        rows = [{"mask": mask, **dict(zip(names, map(float, row.split())))} for mask, row in rows]
        return {"psnr": rows, "printed": done.stdout.splitlines()}
    return {"top1": float(re.search(r"top1 ([\d.]+)", done.stdout)[1])}


def run_all(args, title, setup):
    """Run what has no line in --out yet. An encoder whose checkpoint is gone is trained again."""
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    cuda = torch.cuda.is_available() and args.device != "cpu"
    where = torch.cuda.get_device_name() if cuda else f"{cpu}, threads: {torch.get_num_threads()}"
    commit = subprocess.getoutput("git rev-parse --short HEAD")

    def record(encoder, column, seed, command):
        numbers = run(command)
        if json.dumps(command) not in args.out.read_text():
            line = dict(table=title, encoder=encoder, column=column, seed=seed, command=command,
                        commit=commit, date=time.strftime("%Y-%m-%d"), machine=where,
                        torch=torch.__version__, numbers=numbers)
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for seed in args.seeds:
        runs = f"runs/results/{setup}/{seed}"
        for name in args.only:
            done = args.out.read_text()
            missing = [(column, command) for column, command in evaluations(args, runs, name, seed)
                       if json.dumps(command) not in done]     # with its quotes: no part of another
            needed = [name] if name in PRETRAINED else []
            if "{runs}/mae" in PRETRAINED.get(name, ""):
                needed.insert(0, "mae")
            for encoder in needed:
                command = pretraining(args, runs, encoder, seed)
                gone = missing and not Path(runs, encoder, "last.pt").exists()
                if gone or json.dumps(command) not in done:
                    record(encoder, "pretraining", seed, command)
            for column, command in missing:
                record(name, column, seed, command)


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", allow_abbrev=False, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names, option = [*PRETRAINED, "scratch"], parser.add_argument
    for name, default in dict(data="cifar10", other="shapes", size="micro", epochs=10,
                              finetune_epochs=3, processes=1, device="").items():
        option(f"--{name}", default=default, type=type(default), help=f"({default})")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    option("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    option("--out", type=Path, default=Path("tests/results.jsonl"))
    option("--table", action="store_true")
    args, args.pretraining = parser.parse_known_args(argv)
    args.start = (f"torchrun --standalone --nproc_per_node {args.processes}"
                  if args.processes > 1 else "python")
    args.on_device = f" --device {args.device}" if args.device else ""
    title = " ".join([f"{args.data}, ViT-{args.size}, {args.epochs} epochs", *args.pretraining])
    args.out.touch()
    if args.table:
        from tests.tables import report                    # which reads PRETRAINED and TUNED here
        print(report(args.out.read_text().splitlines()), end="")
    else:
        run_all(args, title, re.sub(r"[^\w.]+", "-", title))


if __name__ == "__main__":
    main()
