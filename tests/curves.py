"""Draw loss, PSNR and accuracy of runs by epoch, side by side:

    python -m tests.curves runs/mae_shapes runs/crossmae_shapes

A run is its folder or a .jsonl file. The curves of one run are saved as curves.svg in its folder,
those of several in the current folder. Pretraining and fine-tuning can be in one picture.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.lib.plot import draw
from train import shell, write_file
from vit import InputError, require

COLUMNS = {"loss": "loss", "psnr_masked": "masked PSNR, dB", "top1": "accuracy, %"}
NOTHING = {"psnr_masked": ("mean colour", "psnr_mean_colour"),         # of having learned nothing
           "top1": ("largest class", "largest_class")}


def read_rows(run):
    """Return the rows of a run's log.jsonl."""
    path = Path(run, "log.jsonl") if Path(run).is_dir() else Path(run)
    require(path.exists(), f"{path} does not exist")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if "epoch" in row]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is no log of train.py or finetune.py: {error}") from None


def name_runs(runs):
    """Return a short name for each run: its folder or file or, if two are equal, its path."""
    paths = [Path(run).parent if Path(run).name == "log.jsonl" else Path(run) for run in runs]
    names = [path.absolute().name.removesuffix(".jsonl") for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]


def panels_of(runs):
    """Return a panel for each of COLUMNS that a run has. Rows without a number are left out, so a
    line joins the others. The first run also shows the scores of NOTHING."""
    logs, panels = [*zip(name_runs(runs), map(read_rows, runs))], []
    for column, title in COLUMNS.items():
        every = [(name, column, rows) for name, rows in logs]
        if column in NOTHING:
            every.append((*NOTHING[column], logs[0][1]))
        series = [(name, "line" if key == column else "thin", [
            (row["epoch"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))])
            for name, key, rows in every]
        series = [each for each in series if each[2]]
        panels += [dict(title=title, x="epoch", series=series)] * bool(series)
    require(panels, f"{' '.join(map(str, runs))}: no row has {', '.join(COLUMNS)}")
    return panels


def conclude(run, classes):
    """At the end of a run with these settings and class names, draw its curves.svg, and print its
    last scores beside those of having learned nothing, its files, and the next command."""
    write_file(run.folder / "curves.svg", partial(draw, panels=panels_of([run.folder])))
    last, note = read_rows(run.folder)[-1], ""
    if "largest_class" in last:
        top1, error, nothing = (last[x] for x in ("top1", "standard_error", "largest_class"))
        print(f"scores  top1 {top1:.1f} +- {error:.1f} % (standard error); largest class: "
              f"{nothing:.1f} %")
        if top1 <= nothing + 2 * error:
            note = ("always naming the largest class. What may help: more labels, --epochs or "
                    "validation images")
    elif "psnr_masked" in last:
        print(f"scores  psnr_masked {last['psnr_masked']:.2f} dB; mean colour: "
              f"{last['psnr_mean_colour']:.2f} dB")
        # normalised patches get the visible pixels' mean and variance, which lowers their PSNR
        if not run.config.get("norm_pix_loss") and (
                last["psnr_masked"] <= last["psnr_mean_colour"] + 0.5):
            note = "the mean colour. What may help: more --epochs, or a trained model (--init)"
    if note and last["epoch"] > 0:
        print(f"note    this is not clearly better than {note}")
    print("see    ", *sorted(run.folder.glob("*.*")))
    join = subprocess.list2cmdline if sys.platform == "win32" else shlex.join  # to be pasted
    program = ["-m", "tests.why"] * ("." in str(run.method)) + ["finetune.py"]     # e.g. mae.l1
    command = join(["python", *program, "--checkpoint", str(run.folder)])
    command += " --data LABELS" * (len(classes) < 2)
    print("next   ", "tests/docs/HOWTO.md: How do I classify my photos?" if "largest_class" in last
          else command)


def main(argv=None):
    """Run `python -m tests.curves` with the arguments `argv`. Returns the path of the picture."""
    parser = argparse.ArgumentParser("tests.curves", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder or a .jsonl file")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(curves.svg, see above)")
    args = parser.parse_args(argv)
    folder = Path(args.runs[0]) if len(args.runs) == 1 and Path(args.runs[0]).is_dir() else Path()
    out = args.out or folder / "curves.svg"
    require(out.suffix == ".svg", f"--out {out} must end with .svg, which browsers open and print")
    draw(out, panels_of(args.runs))
    print(f"see     {out}")
    return out


if __name__ == "__main__":
    shell(main)
