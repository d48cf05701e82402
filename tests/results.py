"""Every method on one budget, by the commands a user would type:

    python -m tests.results --data cifar10                     # goes on where it stopped
    python -m tests.results --data cifar10 --size tiny --epochs 50 --batch_size 512
    python -m tests.results --table                            # only prints what there is

Each result is a line of tests/results.jsonl, of which tests/tables.py makes tables and verdicts. A
command that has one is not run again (to repeat an encoder, delete its lines and its folders in
runs/results/). One seed stands for all that is drawn: pretraining, its teacher, the choice of
labels and fine-tuning. Of each seed and encoder, in this order: pretraining (untrained: MAE,
--epochs 0); 20 nearest neighbours; PSNR on its own and on --other data, which it never saw; linear
probe; fine-tuning with 1%, 10% and all of the labels, also from scratch.

All labels take --finetune_epochs, 10% of them four times as many, 1% six times (batches of 24), the
linear probe twice; only the last epoch is validated. Options not listed below go to pretraining.
Several of these can run at a time, each with its own --seeds and --out.
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
    "crossmae_last": "crossmae --feature_maps last",
    "crossmae_2": "crossmae --decoder_depth 2", "hypermae": "hypermae", "ginr": "minr",
    "ginr_rate": "minr --lr 2e-3", "ginr_hidden": "minr --loss_on masked",
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


def read_lines(path):
    """The dicts of a .jsonl file. SystemExit names a line that is not whole."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise SystemExit(f"{path}, line {number}, is not whole: delete it") from None
    return records


def run(command):
    """Run it, resuming what was begun; its numbers, of log.jsonl or printed, as a dict. SystemExit
    if it fails, or if its folder is of another command."""
    print(f"\n{command}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = re.search(r"--runs (\S+) --name (\S+)", command)
    folder = Path(*found.groups()) if found else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        begun = folder / "command.txt"
        if begun.exists() and begun.read_text() != command:
            raise SystemExit(f"{folder} is of another command: {begun.read_text()}")
        begun.write_text(command)
    words = command.split() + ["--resume"] * bool(folder)
    done = subprocess.run(words, text=True, stdout=subprocess.PIPE,
                          env={**os.environ, "PATH": path})
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode} of {command}")
    if folder:
        rows = read_lines(folder / "log.jsonl")
        seconds = sum(row.get("train_s", 0) for row in rows)
        return {**rows[-1], "train_minutes": round(seconds / 60, 2)}
    found = re.findall(r"^ *\S+/last.pt +(random|grid|block) +([-\d. ]+)$", done.stdout, re.M)
    if found:                                              # the table that --eval prints
        names = ("mask_ratio", "psnr_masked", "psnr_image", "psnr_decoded")
        psnr = [{"mask": mask, **dict(zip(names, map(float, row.split())))} for mask, row in found]
        return {"psnr": psnr, "printed": done.stdout.splitlines()}
    return {"top1": float(re.search(r"top1 ([\d.]+)", done.stdout)[1])}


def run_all(args, title, folder):
    """Run what has no line in --out yet. For an evaluation its encoder is trained again, if it is
    gone."""
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    cuda = torch.cuda.is_available() and args.device != "cpu"
    where = torch.cuda.get_device_name() if cuda else f"{cpu}, threads: {torch.get_num_threads()}"

    def done():
        return {record["command"] for record in read_lines(args.out)}

    def run_and_append(encoder, column, seed, command):
        commit = subprocess.getoutput("git rev-parse --short HEAD")
        numbers = run(command)
        if command not in done():
            line = dict(table=title, encoder=encoder, column=column, seed=seed, command=command,
                        commit=commit, date=time.strftime("%Y-%m-%d"), machine=where,
                        torch=torch.__version__, numbers=numbers)
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for seed in args.seeds:
        runs = f"runs/results/{folder}/{seed}"
        for name in args.only:
            needed = [name] if name in PRETRAINED else []  # encoders
            if "{runs}/mae" in PRETRAINED.get(name, ""):
                needed.insert(0, "mae")                    # the teacher first
            commands = [(encoder, "pretraining", pretraining(args, runs, encoder, seed))
                        for encoder in needed]
            commands += [(name, column, command)
                         for column, command in evaluations(args, runs, name, seed)]
            missing = [command for *_, command in commands if command not in done()]
            if not missing:
                continue
            for encoder, column, command in commands:
                if column == "pretraining" or command in missing:      # a finished one ends at once
                    run_and_append(encoder, column, seed, command)


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
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
    if args.table and not (args.out.is_file() and read_lines(args.out)):
        parser.error(f"{args.out} has no results to make tables of")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    if args.table:
        from tests.tables import report                    # which reads PRETRAINED and TUNED here
        print(report(read_lines(args.out)), end="")
    else:
        run_all(args, title, re.sub(r"[^\w.]+", "-", title))


if __name__ == "__main__":
    main()
