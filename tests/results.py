"""Train and evaluate every method with the same budget, using the commands a user would type:

    python -m tests.results --data cifar10                     # continues where it stopped
    python -m tests.results --data cifar10 --size tiny --epochs 50 --batch_size 512

Each result is a line of tests/results.jsonl, from which tests/tables.py makes tables and verdicts.
To repeat an encoder, delete its lines and its folders in runs/results/. A seed controls all
randomness: pretraining, the teacher, the label subset and fine-tuning. Other learning rates are
tried on seed 0 only. No encoder is trained on --other. Flags that are not listed below go
to pretraining. Several commands can run at once, each with its own --seeds or --only, and --out.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

PRETRAINED = {  # name: --method and its flags; untrained encoders get 0 epochs
    "untrained": "mae", "mae": "mae", "mae_4": "mae --decoder_depth 4",
    "crossmae": "crossmae", "crossmae_2": "crossmae --decoder_depth 2",
    "crossmae_25": "crossmae --prediction_ratio 0.25",
    "crossmae_25_long": "crossmae --prediction_ratio 0.25",
    "crossmae_25_rate": "crossmae --prediction_ratio 0.25 --lr 2e-3",
    "crossmae_last": "crossmae --feature_maps last", "hypermae": "hypermae",
    "untrained_ginr": "minr", "ginr": "minr", "ginr_visible": "minr --encode_visible_only",
    "untrained_transinr": "minr --hypernetwork transinr",
    "transinr": "minr --hypernetwork transinr",
    "imae": "imae --teacher {runs}/mae/last.pt",
    "imae_alone": "imae --teacher {runs}/mae/last.pt --distill_weight 0"}
LONGER = {"crossmae_25_long": 1.6}     # factor of --epochs: MAE's multiply-adds on ViT-micro
RATES = ("5e-4", "1e-3", "2e-3", "4e-3")
SWEEP = {  # name: the same; only pretraining, only seed 0
    f"{name}_{rate}": f"{PRETRAINED[name]} --lr {rate}"
    for name in ("mae", "crossmae", "hypermae", "ginr", "transinr", "imae") for rate in RATES}
SWEEP |= {f"{name}_clip": f"{SWEEP[name]} --clip_grad 1" for name in SWEEP if "ginr_" in name}
SOURCES = {  # name: flags of finetune.py, unless it just reads the encoder of that name
    "untrained_joined": "--checkpoint {runs}/untrained/last.pt --pool joined",
    "mae_joined": "--checkpoint {runs}/mae/last.pt --pool joined",
    "untrained_ginr_mean": "--checkpoint {runs}/untrained_ginr/last.pt --pool extra",
    "ginr_mean": "--checkpoint {runs}/ginr/last.pt --pool extra",
    "ginr_patches": "--checkpoint {runs}/ginr/last.pt --pool mean",
    "transinr_mean": "--checkpoint {runs}/transinr/last.pt --pool extra",
    "transinr_patches": "--checkpoint {runs}/transinr/last.pt --pool mean",
    "scratch": "--mode scratch --size {size}",
    "scratch_ginr": "--mode scratch --checkpoint {runs}/ginr/last.pt"}
CHOOSERS = ("mae", "crossmae", "crossmae_25", "hypermae", "ginr_mean", "imae")   # of a final norm
NORM = {  # name: the frozen encoder, trained once, with and without a LayerNorm at its end
    f"{name}_{part}": f"{SOURCES.get(name, f'--checkpoint {{runs}}/{name}/last.pt')} {flag}"
    for name in (*CHOOSERS, "untrained", "untrained_joined", "mae_joined", "mae_4", "ginr")
    for part, flag in (("norm", "--norm"), ("raw", "--no-norm"))}
SCRATCH = {f"scratch_{rate}": f"{SOURCES['scratch']} --lr {rate}" for rate in RATES}
SOURCES |= NORM | SCRATCH
HELD_OUT = {  # name: columns that decide a choice, measured on held-out training images
    **dict.fromkeys([*(f"{name}_{part}" for name in CHOOSERS for part in ("norm", "raw")),
                     "ginr", "ginr_mean", "ginr_patches", "transinr", "transinr_mean",
                     "transinr_patches"], ["20-NN"]),
    **dict.fromkeys(SCRATCH, ["1%", "10%", "100%"])}       # only seed 0
TUNED = {  # column: flags, and the number of epochs as a multiple of --finetune_epochs
    "linear": ("--mode linear", 2), "1%": ("--labels 0.01 --batch_size 24", 6),
    "10%": ("--labels 0.1", 4), "100%": ("--mode finetune", 1)}
CONDITIONS = ("random 0.5", "random 0.75", "random 0.9", "grid 0.75", "block 0.75")
ALPHAS = ("alpha 0.2", "alpha 0.4", "alpha 0.45")          # weights of the subordinate image


def commands(args, name, seed):
    """Yield (encoder, column, command) for everything that `name` needs: pretraining, first of any
    teacher, then evaluation. run_all replaces {runs} in a command with the runs folder."""
    pretrained = {**PRETRAINED, **SWEEP}
    teachers = re.findall(r"{runs}/(\w+)/", {**pretrained, **SOURCES}[name])
    for encoder in teachers + [name] * (name in pretrained):
        flags = " ".join([pretrained[encoder], *args.pretraining])
        epochs = round(args.epochs * LONGER.get(encoder, 1))
        if encoder.startswith("untrained"):
            epochs = 0
        yield encoder, "pretraining", (
            f"python train.py --method {flags} --data {args.data} --size {args.size} --epochs "
            f"{epochs} --seed {seed} --runs {{runs}} --name {encoder}")
    if name in SWEEP:
        return
    source = SOURCES.get(name, f"--checkpoint {{runs}}/{name}/last.pt")
    source = source.replace("{size}", args.size)
    if name in PRETRAINED and "PSNR" in args.columns:
        for data in (args.data, args.other):
            yield name, f"PSNR on {data}", (
                f"python train.py --eval {{runs}}/{name}/last.pt --data {data} --mask_ratios 0.5 "
                f"0.75 0.9 --masks random grid block")
    columns = ["20-NN", *TUNED]
    if name in NORM:
        columns = ["20-NN", "linear"]                      # fine-tuning has a norm of its own
    elif source.startswith("--mode scratch"):
        columns = [] if name in SCRATCH else ["1%", "10%", "100%"]     # no features to probe
    for column in columns:
        if column in args.columns:
            yield name, *evaluation(args, name, seed, source, column, args.data, "")
    for column in HELD_OUT.get(name, ()):
        if "held out" in args.columns and (name not in SCRATCH or seed == 0):
            yield name, *evaluation(args, name, seed, source, column, args.held_out, "_held_out")


def evaluation(args, name, seed, source, column, data, suffix):
    """Return a column's label and its command on `data`; `source` has the flags that name the
    encoder. Label and name of the run contain `suffix`, which marks held-out images."""
    label = f"{column}{suffix.replace('_', ' ')}"
    if column == "20-NN":
        return label, f"python finetune.py --mode knn {source} --data {data} --seed {seed}"
    flags, factor = TUNED[column]
    epochs = factor * args.finetune_epochs
    flags = flags.replace("--mode finetune", "") if "--mode scratch" in source else flags
    command = (f"python finetune.py {source} {flags} --data {data} --epochs {epochs} --eval_every "
               f"{epochs} --seed {seed} --runs {{runs}} --name "
               f"{name}_{column.strip('%')}_{epochs}{suffix}")
    return f"{label} ({epochs} epochs)", " ".join(command.split())


def hold_out(data, folder):
    """Link the training images of the folder `data` into another folder. There every tenth image of
    each class is for validation."""
    for images in sorted(Path(data, "train").iterdir()):
        for i, file in enumerate(sorted(images.iterdir())):
            link = Path(folder, "train" if i % 10 else "val", images.name, file.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


def read_lines(path):
    """Return the dicts in a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def printed_numbers(lines):
    """Return the numbers that --eval prints and the tables need: {"random 0.75": {"masked": PSNR,
    "decoded": PSNR}, "alpha 0.2": {"branch dominant": R^2, ...}, "block sum": {"visible":
    attention, ...}, ...}."""
    found, heads = {}, []
    for line in lines:
        words = re.split("  +", line.strip())
        if words[0] in ("checkpoint", "alpha", "block"):   # a table begins
            heads = words
        elif len(words) == len(heads):                     # a row of it
            row = dict(zip(heads, words))
            if heads[0] == "checkpoint":
                label = f"{row['mask']} {float(row['mask_ratio']):g}"
                row = {part: row[f"psnr_{part}"] for part in ("masked", "decoded")}
            else:
                value = row.pop(heads[0])
                label = f"{heads[0]} {value if value == 'sum' else f'{float(value):g}'}"
            if label in (*CONDITIONS, *ALPHAS, "block sum"):
                found[label] = {name: float(word) for name, word in row.items()}
    return found


def run(command):
    """Run a command, resuming what an earlier call began, and return its numbers in a dict. Raises
    SystemExit if its folder already belongs to another command."""
    print(f"\n{command}", flush=True)
    words = [sys.executable, *command.split()[1:]]
    found = re.search(r"--runs (\S+) --name (\S+)", command)
    folder = Path(*found.groups()) if found else None
    if folder:
        words.append("--resume")
        folder.mkdir(parents=True, exist_ok=True)
        begun = folder / "command.txt"
        if begun.exists() and begun.read_text() != command:
            raise SystemExit(f"{folder} belongs to another command: {begun.read_text()}")
        begun.write_text(command)
    printed = subprocess.run(words, text=True, stdout=subprocess.PIPE, check=True).stdout
    print(printed, flush=True)
    if " --eval " in command:
        return printed_numbers(printed.splitlines())
    if not folder:
        return {"top1": float(re.search(r"top1 ([\d.]+)", printed)[1])}
    rows = read_lines(folder / "log.jsonl")
    if "top1" in rows[-1]:
        return {"top1": rows[-1]["top1"]}
    return {"psnr_masked": round(rows[-1]["psnr_masked"], 3),
            "lr": max(row.get("lr", 0) for row in rows)}


def run_all(args, table):
    """Run every command whose result has no line in --out yet. Encoders that an evaluation needs
    are trained again if their checkpoints are gone."""
    cpu = subprocess.getoutput("grep -m1 'model name' /proc/cpuinfo").split(": ")[-1]
    threads = f", {torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else ""
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu + threads

    def done():
        return {(record["encoder"], record["column"], record["seed"])
                for record in read_lines(args.out) if record["table"] == table}

    for seed in args.seeds:
        runs = "/".join(["runs/results", re.sub(r"[^\w.]+", "-", table), str(seed)])
        for name in args.only:
            if name in SWEEP and seed != 0:
                continue
            asked = [*commands(args, name, seed)]
            missing = {(encoder, column, seed) for encoder, column, _ in asked} - done()
            for encoder, column, command in asked if missing else ():
                if column != "pretraining" and (encoder, column, seed) not in missing:
                    continue
                commit = subprocess.getoutput("git rev-parse --short HEAD")
                numbers = run(command.replace("{runs}", runs))         # a finished run ends at once
                if (encoder, column, seed) not in done():
                    made = (f"{time.strftime('%Y-%m-%d')}, commit {commit}, torch "
                            f"{torch.__version__.split('+')[0]}, {machine}")
                    line = dict(table=table, encoder=encoder, column=column, seed=seed,
                                command=command, made=made, numbers=numbers)
                    with args.out.open("a") as file:
                        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser("tests.results", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    names, option = [*PRETRAINED, *SOURCES, *SWEEP], parser.add_argument
    columns = ["20-NN", "PSNR", *TUNED, "held out"]
    for name, default in dict(data="cifar10", other="shapes", held_out="data/held_out",
                              size="micro", epochs=10, finetune_epochs=3).items():
        option(f"--{name}", default=default, type=type(default), help=f"({default})")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    option("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    option("--columns", nargs="*", choices=columns, default=columns,
           help=", ".join(columns).replace("%", "%%"))
    option("--out", type=Path, default=Path("tests/results.jsonl"), help="(tests/results.jsonl)")
    args, args.pretraining = parser.parse_known_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.touch()
    if not Path(args.data, "train").is_dir():              # a download has no files to link
        args.columns = [column for column in args.columns if column != "held out"]
    elif "held out" in args.columns and not Path(args.held_out).exists():
        hold_out(args.data, args.held_out)
    run_all(args, " ".join([f"{args.data}, ViT-{args.size}, {args.epochs} epochs",
                            *args.pretraining]))


if __name__ == "__main__":
    main()
