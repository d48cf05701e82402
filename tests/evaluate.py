"""Compare what pretrained models predict for the same masked images:

    python -m tests.evaluate runs/mae_shapes runs/minr_shapes [--mask_ratios 0.75 0.5]

This prints a row of PSNRs for each checkpoint, mask and ratio, and saves a picture for the first
mask and ratio. The column psnr_mean_colour is what a model reaches that has learned nothing. Of a
folder of unlabelled images on which a checkpoint was trained, only the images that it held out
count. Where predictions are normalised, the picture (but no PSNR) uses each true patch's mean and
variance. All checkpoints need the same image and patch size.
"""

import argparse
from itertools import product
from pathlib import Path
from textwrap import fill

from tests.lib.pictures import save_picture
from tests.lib.plot import as_table
from tests.lib.models import NORM_PIX_LOSS, load_any
from train import (DATA, DEFAULTS, PRETRAINING, add_flags, evaluate_psnr, fraction, name_of,
                   open_data, path, read_checkpoint, settings_restored, shell, start_processes,
                   words_of)
from vit import InputError, require


def compare(args):
    """Print a PSNR row for each checkpoint, mask and ratio, save a picture, and return the rows."""
    here, data, problem = start_processes(args), args.data, ""
    rows, columns = [], {}
    contents = [read_checkpoint(file) for file in args.checkpoints]
    for file, content in zip(args.checkpoints, contents):
        try:
            model = load_any(content, norm_pix_loss=args.norm_pix_loss).to(here.device)
            require(model.reconstruct, f"{file}: its method predicts no pixels")
        except InputError as error:
            problem = str(error)
            print(f"note    skipped: {problem}")
            continue
        sizes = f"--img_size {model.encoder.img_size} and --patch_size {model.encoder.patch_size}"
        own_data = content["flags"].get("data")
        if not rows:                                       # all get the first one's data and size
            first, first_sizes, data = file, sizes, data or own_data
            require(data, f"{file} does not say what it was trained on: pass --data")
            val, _ = open_data(data, here, model.encoder.img_size, parts=[part_of(data, contents)])
        require(sizes == first_sizes, f"{file} has {sizes}, but {first} has {first_sizes}: "
                                      f"evaluate them separately")
        if own_data not in (data, None):
            print(f"note    {file} was trained on {own_data} and is evaluated on {data}")
        for mask, ratio in product(args.masks, args.mask_ratios):
            scores, images = evaluate_psnr(model, val, here, mask, ratio, args.eval_images)
            rows.append(dict(checkpoint=content["path"], mask=mask, mask_ratio=ratio, **scores))
            if (mask, ratio) == (args.masks[0], args.mask_ratios[0]):
                columns = columns or {name: images[name] for name in ("original", "masked")}
                name, width = name_of(content["path"]), max(128, model.encoder.img_size[1]) // 9
                if name == type(model).__name__.lower():   # e.g. mae.pt
                    name = type(model).__name__
                title = f"{fill(name, width)}\n{scores['psnr_masked']:.2f} dB"
                while title in columns:                    # two files of the same name
                    title += "'"
                columns[title] = images["completed"]
    require(rows, f"no checkpoint predicts pixels; {problem}")
    print(f"PSNR in dB, mean over {len(val.labels[:args.eval_images])} images of {data}")
    print(as_table(rows))
    names = dict.fromkeys(name_of(row["checkpoint"]) for row in rows)
    picture = Path(rows[0]["checkpoint"]).with_name(f"{'_'.join(['eval', *names])[:80]}.png")
    save_picture(columns, picture)
    print(f"see     {picture}")
    return rows


def part_of(data, contents):
    """Return "all", for a folder of unlabelled images on which no checkpoint was trained, or "val".
    If a checkpoint's own folder is not found, one of the same name is taken for it."""
    folder = Path(data)
    for own in [Path(x["flags"]["data"]) for x in contents if "data" in x["flags"]]:
        same_name = not own.exists() and own.name == folder.name
        if own.resolve() == folder.resolve() or same_name:
            return "val"
    labelled = any((folder / part).is_dir() for part in ("train", "val"))
    return "all" if folder.is_dir() and not labelled else "val"


@settings_restored()
def main(argv=None):
    """Run `python -m tests.evaluate` with the arguments `argv`. Returns the rows."""
    parser = argparse.ArgumentParser("tests.evaluate", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    parser.set_defaults(**{**DEFAULTS, "eval_images": 1000})
    option("checkpoints", nargs="+", type=path, metavar="FILE", help="from train.py, or released")
    option("--mask_ratios", nargs="+", type=fraction, default=(0.75, 0.5, 0.9), metavar="X",
           help="mask ratios; the picture shows the first one (0.75 0.5 0.9)")
    option("--masks", nargs="+", choices=PRETRAINING["mask"][0], default=["random"],
           help="patterns of the masks; the picture shows the first one (random)")
    option("--norm_pix_loss", **NORM_PIX_LOSS)
    add_flags(parser, "data and device", DATA)
    return compare(parser.parse_args(words_of(argv)))


if __name__ == "__main__":
    shell(main)
