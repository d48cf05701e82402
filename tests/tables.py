"""The numbers of tests/RESULTS.md and README.md, computed from the lines of tests/results.jsonl:

    python -m tests.tables                       # writes them between their marks
    python -m tests.tables FILE.jsonl            # prints the tables of another file

The words are in RESULTS.md: names of encoders, claims, and sentences with columns to be looked up,
such as "1%" (top-1 in %), "random 0.75 masked" or "other random 0.75 decoded" (PSNR in dB), "alpha
0.2 branch subordinate" (R^2, i-MAE), "block sum visible" (attention, MAE).
"""

import argparse
import re
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev

from finetune import default_pool
from tests.results import ALPHAS, CONDITIONS, PRETRAINED, RATES, SWEEP, read_lines
from train import METHODS, add_method_arguments
from vit import SIZES

TEXT = Path(__file__).with_name("RESULTS.md").read_text(encoding="utf-8")
NAMES = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", TEXT, re.M))      # "ginr": "MINR, GINR"
CODES = {name: code for code, name in NAMES.items()}
IN_README = ("untrained", "mae", "mae_4", "mae_joined", "crossmae", "crossmae_25", "hypermae",
             "ginr", "ginr_mean", "transinr", "imae", "scratch")
TOP1 = ("20-NN", "linear", "1%", "10%", "100%")
TABLES = {"Classification": TOP1, "Choices on held-out training images":
          [f"{column} held out" for column in TOP1 if column != "linear"], "Learning rates": [f"lr {float(rate):g}" for rate in RATES]}
for data, where in ("", "own data"), ("other ", "other data"):
    for part, pixels in ("masked", "masked pixels"), ("decoded", "the decoded image"):
        TABLES[f"PSNR of {pixels} on {where}"] = [f"{data}{name} {part}" for name in CONDITIONS]
for image in "subordinate", "dominant":
    TABLES[f"Separability of the {image} image"] = [
        f"{alpha} {source} {image}" for alpha in ALPHAS for source in ("branch", "control")]
TABLES["Attention"] = [f"block {block} {part}" for block in (0, 1, 2, 3, "sum")
                       for part in ("visible", "masked", "share of visible")]
SEEDS = 3                                                  # that a verdict needs


class Setup:
    """The results of one table: numbers, {(encoder, column): {seed: number}}, and labels of the
    columns, {"1%": "1% (18 epochs)", ...}. Two labels for one column are a ValueError."""

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
            else:
                found[column] = numbers["top1"]
            if self.labels.setdefault(column, label) != label:
                raise ValueError(f"{table}: {self.labels[column]} and {label} in one file")
            for name, number in found.items():
                self.numbers[encoder, name][record["seed"]] = number

    def row(self, encoder, columns):
        return [cell(self.numbers[encoder, column], precision(column)[0]) for column in columns]

    def judge(self, comparison, columns):
        """Return {verdict: ["+0.8 ± 0.2 (1%)", ...]} for the comparison "A > B" in columns as in
        "1%, 10%". "MAE: visible > MAE: masked" compares parts of a column."""
        found = defaultdict(list)
        sides = [side.split(": ") for side in comparison.split(" > ")]
        for column in columns.split(", "):
            a, b = (self.numbers[CODES[name], " ".join([column, *part])] for name, *part in sides)
            differences = {seed: a[seed] - b[seed] for seed in a if seed in b}
            places, floor = precision(column)
            if differences:
                text = f"{cell(differences, places, '+')} ({column})"
                found[verdict(differences, floor)].append(text)
        return found


def read_setups(records):
    """Return a Setup for each table. If a result has several lines, the last one counts."""
    found = defaultdict(list)
    for record in records:
        found[record["table"]].append(record)
    return [Setup(table, lines) for table, lines in found.items()]


def precision(column):
    """Return how many decimals to print, and the floor that a mean difference must exceed."""
    if column.removesuffix(" held out") in TOP1:
        return 1, 0.5                                      # in %
    if re.match(r"alpha|block (\d|sum)( |$)", column):     # R^2, attention
        return 3, 0.005
    return 2, 0.02                                         # PSNR in dB


def cell(values, places, sign=""):
    """Return mean ± sample standard deviation of {seed: number}, and the seeds unless three."""
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


def build(name, size):
    """Return the model of an encoder in PRETRAINED, for CIFAR-10."""
    method, *flags = PRETRAINED[name].split()
    parser = argparse.ArgumentParser()
    add_method_arguments(parser, METHODS[method])
    given = {k: v for k, v in vars(parser.parse_known_args(flags)[0]).items() if v is not None}
    return METHODS[method](32, 4, 3, **SIZES[size], **{**METHODS[method].small_model, **given})


def decoder(name, size):
    """Return the number of parameters outside the encoder, in thousands."""
    n = sum(p.numel() for part, p in build(name, size).named_parameters()
            if p.requires_grad and not part.startswith("encoder."))
    return f"{n / 1e3:.0f}"


def readout(name, size):
    """Return which tokens of an encoder finetune.py reads, and how many features that makes."""
    weights, dim = "inr" in name and "patches" not in name, SIZES[size]["dim"]
    encoder = build("mae" if not weights else re.search("transinr|ginr", name)[0], size).encoder
    n = len(encoder.extra_tokens) if weights else encoder.num_patches
    by_default = weights and not name.endswith("_mean") and default_pool(n, dim) == "joined"
    kind, joined = "weight tokens" if weights else "patch tokens", by_default or "_joined" in name
    return f"{kind} joined ({n * dim:,})" if joined else f"{kind}, mean ({dim})"


EXTRA = {"Classification": ("readout", readout), "PSNR of masked pixels on own data": (
    "decoder parameters, thousands", decoder)}             # more columns of TABLES


def tables(setup):
    """Return all tables of a setup."""
    text = f"## {setup.title}\n\nMade: {'; '.join(setup.made)}.\n"
    other = setup.labels.get("other ", "").removeprefix("PSNR on ")
    for title, columns in TABLES.items():
        columns = [c for c in columns if any(setup.numbers[name, c] for name in NAMES)]
        rows, more = [], [EXTRA[title]] if title in EXTRA else []
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
                rows.append([NAMES[name], *(detail(name, setup.size) for _, detail in more), *row])
        if rows:
            heads = [*(head for head, _ in more), *(setup.labels.get(c, c) for c in columns)]
            title = title.replace("own data", setup.data).replace("other data", other)
            text += f"\n### {title}\n\n{markdown(['encoder', *heads], rows)}"
    return text


def claims(setups):
    """Return the table of claims with a column of verdicts for each setup."""
    rows = []
    for line in re.findall(r"^\| .* > .* \|$", TEXT, re.M):
        row = line.strip("| ").split(" | ")[:4]            # claim, source, comparison, columns
        for setup in setups:
            judged = setup.judge(*row[2:4]).items()
            row.append("; ".join(f"**{said}** {', '.join(texts)}" for said, texts in judged))
        rows.append(row)
    heads = ["claim", "source", "comparison", "columns", *(setup.budget for setup in setups)]
    return markdown(heads, rows)


def findings(setups):
    """Return the sentences with numbers for {model | A > B | columns}: by how much A is better.
    {model | A ? B | columns} lists those that are not inconclusive. A sentence is left out if its
    numbers are missing or a verdict on A > B is not supported."""
    by_model, sentences = {setup.model: setup for setup in setups}, []

    def numbers(found):
        model, comparison, columns = found[1].split(" | ")
        judged = by_model[model].judge(comparison.replace("?", ">"), columns)
        texts = [text.replace("(other ", "(")              # the sentence says that it is other data
                 for text in judged["supported"] + judged["contradicted"]]
        known = texts + judged["inconclusive"] if "?" in comparison else judged["supported"]
        if len(known) <= columns.count(", "):              # not in every column
            raise LookupError
        if "?" not in comparison:
            texts = [text[1:].split(" (")[0] for text in texts]        # without sign and column
            if len(texts) > 3:
                texts = sorted((text.split(" ")[0] for text in texts), key=float)
                return f"{texts[0]} to {texts[-1]}"
        return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]])) or "none"

    for sentence in re.search(r"<!-- sentences\n(.*?)-->", TEXT, re.DOTALL)[1].splitlines():
        with suppress(LookupError):
            sentences.append(re.sub(r"{(.*?)}", numbers, sentence))
    return sentences


def numbered(texts):
    return "".join(f"{i}. {text}\n" for i, text in enumerate(texts, start=1))


def summary(setups):
    """Return the README's table of results: what is read, and three columns for each setup."""
    columns = ("random 0.75 masked", "20-NN", "100%")
    heads = ["", f"features ({setups[0].model})"]
    for setup in setups:
        heads += [f"{setup.budget}: PSNR", *columns[1:]]
    rows = [[NAMES[name], readout(name, setups[0].size),
             *(part for setup in setups for part in setup.row(name, columns))]
            for name in IN_README]
    return markdown(heads, [row for row in rows if any(row[2:])])


def fill(path, **parts):
    """Write each part between its marks, <!-- name --> and <!-- /name -->, if the file has them."""
    text = path.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = re.sub(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)",
                      lambda found: found[1] + part + found[2], text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def main(folder=Path("tests")):
    """Write the parts of RESULTS.md and README.md, which has the first sentence of each finding.
    They compare the first table of each model."""
    setups = read_setups(read_lines(folder / "results.jsonl"))
    compared = sorted({s.model: s for s in reversed(setups)}.values(), key=setups.index)
    said = findings(compared)
    first_sentences = [re.sub(r"(?<=[\w)])\. [A-Z].*", ".", text) for text in said]
    fill(folder / "RESULTS.md", findings=numbered(said), claims=claims(compared),
         tables="\n".join(map(tables, setups)))
    fill(folder.parent / "README.md", results=summary(compared), findings=numbered(first_sentences))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*map(tables, read_setups(read_lines(Path(sys.argv[1])))), sep="\n")
    else:
        main()
