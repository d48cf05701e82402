"""Compute the numbers in tests/RESULTS.md, README.md and .github/results.svg from the lines of
tests/results.jsonl:

    python -m tests.tables                       # writes the text between marks, and the figure
    python -m tests.tables FILE.jsonl            # prints the tables of another file

The names of encoders are in RESULTS.md. tests/sentences.txt has the sentences, and the comparisons
for questions and claims. They name columns (those of the tables in RESULTS.md are in TABLES):
    "1%": top-1 in %    "random 0.75 masked", "other random 0.75 decoded": PSNR in dB
    "alpha 0.2 branch subordinate": R^2, i-MAE    "block sum visible": attention, MAE
"""

import argparse
import functools
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import torch

from finetune import default_pool
from tests.bench import count_flops
from tests.results import ALPHAS, CONDITIONS, LONGER, NORM, PRETRAINED, RATES, SWEEP, read_lines
from train import METHODS, add_method_arguments
from vit import SIZES

TEXT = Path(__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
NAMES = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", TEXT, re.M))      # "ginr": "MINR, GINR"
NAMES |= {f"scratch_{rate}": f"from scratch, lr {float(rate):g}" for rate in RATES}
CODES = {name: code for code, name in NAMES.items()} | {"no pretraining": "none"}
SHOWN = {  # encoder: its names in the README's table and in the figure
    "none": ("no pretraining", ""), "mae": ("MAE", "MAE"),
    "crossmae": ("CrossMAE, predicts all masked patches", "CrossMAE, all"),
    "crossmae_25": ("CrossMAE, predicts a third of them", "CrossMAE, a third"),
    "hypermae": ("HyperMAE", "HyperMAE"), "ginr": ("MINR", "MINR"),
    "imae": ("i-MAE, with this MAE as its teacher", "i-MAE")}
MEANS = {"ginr": "ginr_mean"}            # for accuracy, all are read as the mean of tokens
ENDS = ("with norm", "without norm")     # how frozen features end
NORMED = ("untrained", "untrained_joined", "mae", "mae_joined", "mae_4", "crossmae_last", "imae",
          "imae_alone")                  # end in a norm in pretraining; the others do not
TOP1 = ("20-NN", "linear", "1%", "10%", "100%")
PIXELS = "random 0.75 masked"
TABLES = {"Classification": TOP1, "Learning rates": [f"lr {float(rate):g}" for rate in RATES],
          "Frozen features with and without a final norm": [
              f"{column} {end}" for column in ("20-NN held out", *TOP1[:2]) for end in ENDS],
          "Choices on held-out training images": [
              f"{column} held out" for column in TOP1 if column != "linear"],
          "PSNR on own data": [f"{name} {part}" for part in ("masked", "decoded")
                               for name in CONDITIONS],
          "Separability": [f"{alpha} {source} {image}" for image in ("subordinate", "dominant")
                           for alpha in ALPHAS for source in ("branch", "mixed", "control")]}
SEEDS = 3                                                  # the number that a verdict needs
NUMBER = r"{(?:(if|unless) )?(ViT\S+) \| (.*?) \| (.*?)}"   # a number or condition in a sentence
MARKS = {"supported": "✓", "contradicted": "✗", "inconclusive": "?"}


class Setup:
    """The results of one table: numbers, {(encoder, column): {seed: number}}, and labels of the
    columns, {"1%": "1% (18 epochs)", ...}. Raises ValueError if a column has two labels."""

    def __init__(self, table, records):
        self.data, self.model, self.size = re.match(r"(.*), (ViT-(\w+))", table).groups()
        self.title = table.replace(" --batch_size", ", batch size")
        self.budget = re.search(r"ViT-\w+, \d+ epochs", table)[0]
        self.made = sorted({record["made"] for record in records})
        self.numbers, self.labels = defaultdict(dict), {}
        for record in sorted(records, key=lambda record: record["seed"]):
            encoder, label, numbers = (record[key] for key in ("encoder", "column", "numbers"))
            column, found = label.split(" (")[0], {}
            if label == "pretraining":
                if record["seed"] == 0 and (encoder in SWEEP or f"{encoder}_{RATES[0]}" in SWEEP):
                    encoder = re.sub(r"_\de-\d", "", encoder)          # mae_4e-3, ginr_4e-3_clip
                    found[f"lr {numbers['lr']:g}"] = numbers["psnr_masked"]
            elif label.startswith("PSNR on "):
                column = "" if label == f"PSNR on {self.data}" else "other "
                found = {f"{column}{name} {part}": number for name, row in numbers.items()
                         for part, number in row.items()}
            elif encoder in NORM:                          # mae_norm, mae_raw
                encoder, end = encoder.rsplit("_", 1)
                found[f"{column} {ENDS[end == 'raw']}"] = numbers["top1"]
            else:
                found[column] = numbers["top1"]
            if self.labels.setdefault(column, label) != label:
                raise ValueError(f"{table}: {self.labels[column]} and {label} in one file")
            for name, number in found.items():
                self.numbers[encoder, name][record["seed"]] = number
        self.read_without_norm()
        self.add_no_pretraining()

    def read_without_norm(self):
        """If MAE's 20-NN is measured without a final norm, use only such 20-NN for the encoders in
        NORMED, as chosen on held-out images (RESULTS.md); blank where it is not measured."""
        for name in NORMED if self.numbers["mae", "20-NN without norm"] else ():
            self.numbers[name, "20-NN"] = self.numbers[name, "20-NN without norm"]

    def add_no_pretraining(self):
        """Add the encoder "none": "untrained" or, where encoders are fine-tuned, the better of
        "untrained" and "scratch", if both are measured with all seeds."""
        for column in {column for _, column in self.numbers}:
            found = [self.numbers["untrained", column]]
            if column in TOP1[2:]:
                found.append(self.numbers["scratch", column])
            if all(len(numbers) == SEEDS for numbers in found):
                self.numbers["none", column] = max(found, key=lambda row: mean(row.values()))

    def row(self, encoder, columns):
        return [cell(self.numbers[encoder, column], precision(column)[0]) for column in columns]

    def judge(self, comparison, columns):
        """Return {column: (verdict, "+0.8 ± 0.2")} for the comparison "A > B" in columns, e.g.
        "1%, 10%". Columns that are not measured are left out. "MAE: visible > MAE: masked"
        compares parts of a column."""
        found = {}
        sides = [side.split(": ") for side in comparison.split(" > ")]
        for column in columns.split(", "):
            a, b = (self.numbers[CODES[name], " ".join([column, *part])] for name, *part in sides)
            differences = {seed: a[seed] - b[seed] for seed in a if seed in b}
            places, floor = precision(column)
            if differences:
                found[column] = verdict(differences, floor), cell(differences, places, "+")
        return found


def read_setups(records):
    """Return a Setup for each table. If a result has several lines, the last one counts."""
    found = defaultdict(list)
    for record in records:
        found[record["table"]].append(record)
    return [Setup(table, lines) for table, lines in found.items()]


def precision(column):
    """Return the number of decimals to print, and the floor that a mean difference must exceed."""
    if column.split(" ")[0] in TOP1:
        return 1, 0.5                                      # in %
    if re.match(r"alpha|block (\d|sum)( |$)", column):     # R^2, attention
        return 3, 0.005
    return 2, 0.02                                         # PSNR in dB


def cell(values, places, sign=""):
    """Return mean ± sample standard deviation of {seed: number}. Names the seeds if not three."""
    if not values:
        return ""
    text = f"{mean(values.values()):{sign}.{places}f}"
    if len(values) > 1:
        text += f" ± {stdev(values.values()):.{places}f}"
    return text if len(values) == SEEDS else f"{text} (seed {', '.join(map(str, values))})"


def verdict(differences, floor):
    """Judge {seed: A - B} by the rule in RESULTS.md."""
    values = [*differences.values()]
    if len(values) < SEEDS:
        return f"{len(values)} of {SEEDS} seeds so far"
    if abs(mean(values)) <= max(2 * stdev(values), floor):
        return "inconclusive"
    return "supported" if mean(values) > 0 else "contradicted"


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ------------------------------------------------------------------ numbers from the classes
@functools.cache
def build(name, size):
    """Return the model of an encoder in PRETRAINED, for CIFAR-10, with a random teacher."""
    method, *flags = PRETRAINED[name].split()
    parser = argparse.ArgumentParser()
    add_method_arguments(parser, METHODS[method])
    given = {k: v for k, v in vars(parser.parse_known_args(flags)[0]).items() if v is not None}
    if "--teacher" in flags:
        given["teacher"] = SIZES[size]
    return METHODS[method](32, 4, 3, **SIZES[size], **{**METHODS[method].low_res_config, **given})


@functools.cache
def multiply_adds(name, size):
    """Return the multiply-adds of a forward pass in pretraining, per image, in millions."""
    with torch.no_grad():
        return count_flops(lambda: build(name, size)(torch.zeros(1, 3, 32, 32))) / 2e6


def relative_cost(name, size):
    """Return the multiply-adds of an encoder's pretraining, relative to MAE's."""
    if name not in PRETRAINED:
        return ""
    ratio = multiply_adds(name, size) / multiply_adds("mae", size)
    return f"{LONGER.get(name, 1) * ratio:.2f}"


def costs(name, size):
    """Return the multiply-adds of a forward pass, in millions, and the number of parameters of the
    encoder and of the rest, in thousands. An untrained encoder has no multiply-adds."""
    counts = defaultdict(int)
    for part, p in build(name, size).named_parameters():
        counts[part.startswith("encoder.")] += p.numel() * p.requires_grad / 1e3
    macs = "" if name.startswith("untrained") else f"{multiply_adds(name, size):.1f}"
    return [macs, f"{counts[True]:,.0f}", f"{counts[False]:.0f}"]


def readout(name, size):
    """Return which tokens of an encoder finetune.py reads, and the number of features."""
    weights, dim = "inr" in name and "patches" not in name, SIZES[size]["dim"]
    encoder = build("mae" if not weights else re.search("transinr|ginr", name)[0], size).encoder
    n = len(encoder.extra_tokens) if weights else encoder.num_patches
    by_default = weights and not name.endswith("_mean") and default_pool(n, dim) == "joined"
    kind, joined = "weight tokens" if weights else "patch tokens", by_default or "_joined" in name
    return [f"{kind} joined ({n * dim:,})" if joined else f"{kind}, mean ({dim})"]


# ------------------------------------------------------------------ tables and sentences
EXTRA = {  # more columns for TABLES
    "Classification": (["readout"], readout), "PSNR on own data": (
        ["multiply-adds, millions", "encoder, thousands", "decoder, thousands"], costs)}


def tables(setup):
    """Return all tables of a setup."""
    text = f"## {setup.title}\n"
    for title, columns in TABLES.items():
        columns = [c for c in columns if any(setup.numbers[name, c] for name in NAMES)]
        rows, (more, details) = [], EXTRA.get(title, ([], lambda name, size: []))
        for name in NAMES:
            row = setup.row(name, columns)
            if title == "Learning rates":
                row = [part.replace(" (seed 0)", "") for part in row]
                tried = [*map(float, filter(None, row))]
                if len(tried) < 2 and not name.endswith("_clip"):
                    continue
                row = [f"**{part}**" if part and float(part) == max(tried) > min(tried) else part
                       for part in row]
            if any(row):
                rows.append([NAMES[name], *details(name, setup.size), *row])
        if rows:
            heads = ["encoder", *more, *(setup.labels.get(c, c) for c in columns)]
            title = title.replace("own data", setup.data)
            text += f"\n### {title}\n\n{markdown(heads, rows)}"
    return f"{text}\nMade: {'; '.join(setup.made)}.\n"


def read_sections():
    """Return tests/sentences.txt as {title: [(kind, [alternatives]), ...]}."""
    sections = {}
    for line in Path(__file__).with_name("sentences.txt").read_text("utf-8").splitlines():
        kind, _, words = line.partition(": ")
        if line.startswith("## "):
            sections[line.removeprefix("## ")] = parts = []
        elif kind == "or":
            parts[-1][1].append(words)
        elif sections and line:
            parts.append((kind, [words]))
    return sections


def say(alternatives, setups):
    """Return the first sentence whose conditions all hold and whose numbers are all clear, with
    its numbers filled in; "" if none is."""
    by_model = {setup.model: setup for setup in setups}

    def number(found):
        condition, model, comparison, columns = found.groups()
        judged = by_model[model].judge(comparison, columns) if model in by_model else {}
        said = [judged.get(column, [""])[0] for column in columns.split(", ")]
        supported = [verdict == "supported" for verdict in said]
        clear = [verdict in MARKS for verdict in said]
        if not (all(clear) and not any(supported) if condition == "unless" else all(supported)):
            raise LookupError
        if condition:
            return ""
        means = sorted((text[1:].split(" ")[0] for _, text in judged.values()), key=float)
        return means[0] if len(means) == 1 else f"{means[0]} to {means[-1]}"

    for template in alternatives:
        try:
            return re.sub(NUMBER, number, template)
        except LookupError:
            pass
    return ""


def compare(spec, setups):
    """Return a table of differences A - B, with unclear ones in parentheses, for "A > B; C > D |
    columns"."""
    comparisons, columns = spec.split(" | ")
    rows = []
    for comparison in comparisons.split("; "):
        for setup in setups:
            judged, row = setup.judge(comparison, columns), []
            for column in columns.split(", "):
                said, text = judged.get(column, ("", ""))
                if text and said not in ("supported", "contradicted"):
                    text = f"({text.replace(' (', ', ').replace(')', '')})"
                row.append(text)
            if any(row):
                rows.append([comparison.replace(" > ", " - "), setup.model, *row])
    return markdown(["A - B", "encoder", *columns.split(", ")], rows) if rows else ""


def values(spec, setups):
    """Return a table of numbers, for "model | encoders | columns"."""
    model, encoders, columns = spec.split(" | ")
    rows = [[name, *setup.row(CODES[name], columns.split(", "))] for setup in setups
            if setup.model == model for name in encoders.split("; ")]
    return markdown([model, *columns.split(", ")], rows)


def questions(setups):
    """Return the questions: each with its answer, tables and caveats."""
    makers, text = {"table": compare, "values": values}, ""
    for title, parts in read_sections().items():
        if title.endswith("?"):
            text += f"### {title}\n\n"
            for kind, words in parts:
                if kind in makers:
                    text += makers[kind](words[0], setups) + "\n"
                elif kind in ("answer", "caveat"):
                    text += say(words, setups) + ("\n\n" if kind == "answer" else " ")
            text = text.rstrip() + "\n\n"
    return text


def claims(setups):
    """Return a table of claims, with verdicts and differences."""
    rows = []
    for method, parts in read_sections().items():
        for claim, source, comparison, columns in (
                words[0].split(" | ") for kind, words in parts if kind == "claim"):
            judged = [setup.judge(comparison, columns) for setup in setups]
            rows.append([method, claim, source, comparison.replace(" > ", " - "), *(
                "; ".join(f"{MARKS.get(said, said)} {difference} ({column})"
                          for column, (said, difference) in found.items()) for found in judged)])
    heads = ["paper", "claim", "source", "A - B", *(setup.budget for setup in setups)]
    return markdown(heads, rows)


def short_sentences(setups):
    """Return the sentences for the README, at most six."""
    said = [say(words, setups) for parts in read_sections().values() for kind, words in parts
            if kind == "short"]
    return "".join(f"{i}. {text}\n" for i, text in enumerate([*filter(None, said)][:6], start=1))


def say_all(kind, setups):
    """Return all sentences of one kind, in one paragraph."""
    return " ".join(filter(None, (say(words, setups) for parts in read_sections().values()
                                  for name, words in parts if name == kind))) + "\n"


def summary(setups):
    """Return the README's table of results: four columns for each setup."""
    heads, rows = [""], [[label] for label, _ in SHOWN.values()]
    for setup in setups:
        heads += [f"{setup.model}: pixels, dB", "20-NN, %", "fine-tuned, %", "cost"]
        for row, name in zip(rows, SHOWN):
            pixels, = setup.row(name, [PIXELS])
            cost = relative_cost(name, setup.size) if pixels else ""
            row += [pixels, *setup.row(MEANS.get(name, name), ["20-NN", "100%"]), cost]
    return markdown(heads, [row for row in rows if any(row[1:])])


# ------------------------------------------------------------------ the figure
WIDTH, HEIGHT = 415, 380                                   # the size of a panel
LEFT, RIGHT, TOP, BOTTOM = 58, 403, 34, 326                # the part of it with dots
STYLE = """
  text { font: 13px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .back { fill: #ffffff } .grid { stroke: #e4e8ec } .leader { stroke: #818b98 }
  .axis { fill: #59636e } .title { font-weight: 600 } .seed { opacity: .45 }
  .mae { fill: #0969da } .crossmae { fill: #1a7f37 } .crossmae_25 { fill: #4fb3a5 }
  .hypermae { fill: #cf222e } .ginr { fill: #d18616 } .imae { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .axis { fill: #9198a1 }
    .back { fill: #0d1117 } .grid { stroke: #262c36 } .leader { stroke: #7d8590 }
    .mae { fill: #4493f8 } .crossmae { fill: #3fb950 } .crossmae_25 { fill: #7fd8cb }
    .hypermae { fill: #ff7b72 } .ginr { fill: #e3b341 } .imae { fill: #bc8cff }
  }
"""


def ticks(low, high):
    """Return four to eight round numbers between low and high."""
    step = next(step for step in (.1, .2, .25, .5, 1, 2, 5, 10) if (high - low) / step < 8)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def free_place(width, x, y, taken):
    """Return the box (left, top, right, bottom) for a label: the nearest one to the point x, y that
    lies inside the panel and overlaps none of the boxes `taken`."""
    for distance in range(9, 80, 5):
        for dx, dy in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1)):
            left, top = x + dx * distance + (dx - 1) / 2 * width, y + dy * distance + (dy - 1) * 8
            box = (left, top, left + width, top + 16)
            if left > LEFT and box[2] < WIDTH - 2 and TOP < top and box[3] < BOTTOM and not any(
                    box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3]
                    for b in taken):
                return box
    raise ValueError(f"no place for a label near {x:.0f}, {y:.0f}")


def panel(setup, shift):
    """Return the SVG lines of a setup: small dots for seeds, large ones with names for means."""
    points = {}
    for name in SHOWN:
        psnr, knn = setup.numbers[name, PIXELS], setup.numbers[MEANS.get(name, name), "20-NN"]
        if name != "none" and psnr and knn:
            points[name] = {seed: (psnr[seed], knn[seed]) for seed in knn if seed in psnr}
    xs, ys = zip(*(point for seeds in points.values() for point in seeds.values()))
    (x0, x1), (y0, y1) = ((min(v) - .1 * (max(v) - min(v)), max(v) + .1 * (max(v) - min(v)))
                          for v in (xs, ys))

    def place(point):
        return (LEFT + (point[0] - x0) / (x1 - x0) * (RIGHT - LEFT),
                BOTTOM - (point[1] - y0) / (y1 - y0) * (BOTTOM - TOP))

    lines = [f'<g transform="translate({shift} 0)">',
             f'<text class="title" x="{LEFT}" y="22">{setup.budget}</text>']
    for value in ticks(x0, x1):
        x, _ = place((value, y0))
        lines += [f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>',
                  f'<text class="axis x" x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle">'
                  f'{value:g}</text>']
    for value in ticks(y0, y1):
        _, y = place((x0, value))
        lines += [f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
                  f'<text class="axis y" x="{LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">'
                  f'{value:g}</text>']
    lines += [f'<text class="axis" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" '
              f'text-anchor="middle">PSNR of masked pixels, dB (right is better)</text>',
              f'<text class="axis" transform="translate(16 {(TOP + BOTTOM) / 2}) rotate(-90)" '
              f'text-anchor="middle">20-NN accuracy, % (up is better)</text>']
    centres, taken = {}, []
    for name, seeds in points.items():
        centres[name] = place([mean(values) for values in zip(*seeds.values())])
        dots = {**{seed: place(point) for seed, point in seeds.items()}, "mean": centres[name]}
        for seed, (x, y) in dots.items():
            kind, radius = ("", 7) if seed == "mean" else (" seed", 3.5)
            lines.append(f'<circle class="{name}{kind}" data-seed="{seed}" cx="{x:.2f}" '
                         f'cy="{y:.2f}" r="{radius}"/>')
            taken.append((x - radius, y - radius, x + radius, y + radius))
    for name, (x, y) in centres.items():
        label = SHOWN[name][1]
        left, top, right, bottom = free_place(7.2 * len(label), x, y, taken)
        taken.append((left, top, right, bottom))
        near_x, near_y = min(max(x, left), right), min(max(y, top), bottom)
        if math.dist((x, y), (near_x, near_y)) > 12:
            lines.append(f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{near_x:.1f}" '
                         f'y2="{near_y:.1f}"/>')
        anchor, at = ("end", right) if right < x else ("start", left) if left > x else (
            "middle", (left + right) / 2)
        lines.append(f'<text class="name" x="{at:.1f}" y="{top + 12.5:.1f}" '
                     f'text-anchor="{anchor}">{label}</text>')
    return [*lines, "</g>"]


def figure(setups):
    """Return the figure as SVG: a panel for each setup."""
    size = f"{WIDTH * len(setups)} {HEIGHT}"
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
             f'width="{WIDTH * len(setups)}" height="{HEIGHT}">', f"<style>{STYLE}</style>",
             '<rect class="back" width="100%" height="100%" rx="6"/>']
    for i, setup in enumerate(setups):
        lines += panel(setup, i * WIDTH)
    return "\n".join([*lines, "</svg>"]) + "\n"


def fill(path, **parts):
    """Write each part between its marks, <!-- name --> and <!-- /name -->, if the file has them."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = re.sub(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)",
                      lambda found: found[1] + part + found[2], text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def main(folder=Path("tests")):
    """Write the parts of RESULTS.md and README.md, and the figure. Their sentences, questions and
    claims compare the first table of each model."""
    setups = read_setups(read_lines(folder / "results.jsonl"))
    compared = sorted({s.model: s for s in reversed(setups)}.values(), key=setups.index)
    caption = say_all("caption", compared)
    fill(folder / "RESULTS.md", caption=caption, questions=questions(compared),
         claims=claims(compared), tables="\n".join(map(tables, setups)))
    fill(folder.parent / "README.md", caption=caption, results=summary(compared),
         findings=short_sentences(compared), start=say_all("start", compared))
    picture = folder.parent / ".github/results.svg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(figure(compared), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*map(tables, read_setups(read_lines(Path(sys.argv[1])))), sep="\n")
    else:
        main()
