"""Tables and verdicts from the lines of tests/results.jsonl alone:

    python -m tests.tables                                     # tests/RESULTS.md, README's tables

writes what `python -m tests.results --table` prints, and the short tables of the README. Of a
result that was repeated the last line counts.

A quantity is an encoder's column: "20-NN", "linear", "1%", "10%", "100%" (top-1 in %); "minutes";
"own random 0.75 hidden" and alike (PSNR in dB: own or other data, mask, mask ratio, hidden or
decoded); "fall from 0.5 to 0.75" (PSNR of hidden pixels, own data), "change under grid" (from
random masks, without its sign, at 0.75); and what --eval measures besides: "mix 0.2 branch
dominant" (R^2, i-MAE), "block sum visible" (attention, MAE).
"""

import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from tests.results import PRETRAINED, TUNED, read_lines

INTRO = """# Results

Written by `python -m tests.tables`: every number measured here and every verdict is computed from
`tests/results.jsonl`, which has the command, commit, date and machine of each. The papers' numbers
are typed, in `tests/tables.py`.

**Run:** two budgets, each with tables of its own, the first on a CPU, the second on a GPU:

    python -m tests.results --data data/cifar10
    python -m tests.results --data data/cifar10 --size tiny --epochs 50 --batch_size 512

In each, every method gets the same encoder, data and number of epochs, and its own small settings
(`small` in its file: decoder and rate differ, MINR has another optimizer, i-MAE no augmentation).
These were chosen for ViT-micro, whose batches are of 64: ViT-tiny has the same rates with batches
of 512, and makes 4,850 steps, ViT-micro 7,810; HyperMAE's decoder grows with it, MAE's does not.
i-MAE's teacher, the MAE of the same seed, has its own epochs besides. One seed stands for all that
is drawn: pretraining, its teacher, the choice of labels and fine-tuning. Only what an evaluation
draws, images and masks, is the same for all seeds. The CPU computes in float32, the GPU in bf16
(autocast). The GPU was lent for half an hour, in which 16 runs at a time shared it: enough for the
cells that are filled. Claims on others are left out there.

**Cells:** mean ± sample deviation of three seeds, or of those that follow; blank: not measured.
Cells of different seeds do not compare; A - B, below, is of the seeds that both have.

**Data:** `data/cifar10` is CIFAR-10 with each image saved as a JPEG of quality 75, in class folders
in `train/` (50,000) and `val/` (10,000). This copy is not in the repository: with another encoder's
JPEGs numbers move a little. The download `--data cifar10` has the images without loss, and would
get tables of its own. `shapes` are drawn by train.py; no encoder here was trained on them.

**Encoders:** *untrained* is an MAE after no epoch, fine-tuned as the others; *from scratch* has the
settings of `finetune.py --mode scratch` (no layer-wise decay), and no more epochs than the others
are fine-tuned. CrossMAE *.75* and *.25* are the shares of patches that it predicts; *at MAE's
rate*: by default .25 has a third of MAE's learning rate, MINR twice MAE's; *last map alone*:
without inter-block attention; *2 decoder blocks*: as many as MAE, by default it has 4. GINR and
TransINR are MINR's two hypernetworks. *Loss on hidden pixels only*: by default MINR's covers all
(here a step renders a quarter of an image's pixels, of which some three quarters are hidden).

**PSNR** says how close predicted pixels are to the true ones, in dB: 10 more are a tenth of the
squared error. *Hidden* is over hidden pixels; *decoded* over the whole image as decoded, nothing
copied. Only MINR's loss covers visible patches, unless it is on hidden pixels only. CrossMAE and
HyperMAE decode them as they decode hidden ones; MAE and i-MAE at the visible tokens' places, whose
outputs the loss leaves out. `shapes` changed at commit 948a318: results on those of before are left
out.

**20-NN**: an image gets the class that its 20 nearest training images vote for, by frozen features.
**Linear probe**: a linear layer is trained on frozen features. **1%, 10%, 100%**: the whole encoder
is fine-tuned with that share of each class's labels.

**To repeat a result**, run the command of its encoder's pretraining (for i-MAE, MAE's first), then
its own, each at its own commit. All of an encoder and seed, at the newest commit: in a fresh clone,
one of the two commands above with `--seeds 1 --only mae --out again.jsonl`. Without `--out` no
command runs again that has its line in the file. Half of seed 0 of ViT-micro, most of its
fine-tuning, is from before commit f4c4c4c: its commands have changed since. Of lines of the same
encoder, column and seed the tables take the last.
"""

RULE = """A claim says that A is above B. Its differences A - B are paired: both of one seed. This
rule was written when seed 0 of ViT-micro was known, which is one of the three (and its encoders,
fine-tuned with other choices of 1% and 10% of the labels), but before any result of seeds 1 and 2,
and of ViT-tiny. The claims on CrossMAE with 2 decoder blocks, on GINR at MAE's rate and on GINR
with its loss on hidden pixels were added later: what each is compared with was known, its own
results were not (claims and results were committed together, so that git does not show the order).
Two were added when their numbers were known: that MINR's pretraining helps at its own rate, and
that at MAE's rate it is above untrained:

- with fewer than three seeds there is no verdict;
- the claim **holds** if the differences of all seeds are above 0, and **fails** if all are below 0,
  and their mean is in both cases more than twice their sample deviation from 0;
- else it **cannot be told** at this size: neither was shown, which does not show that A and B are
  equal.

Where there is no effect at all, some 7 of 100 rows get a verdict by chance; rows that share an
encoder are not independent. "As good as" and "loses nothing" ask for less than A above B: only
*fails* speaks against them. Of falls and changes, above means worse. Three seeds of a small model
on small images are not the paper's experiment. That A is above C, and of B it cannot be told, does
not show that A is above B: that takes a row of its own. A row that starts with "why" puts an
explanation of a verdict to the test: *holds* supports it, *fails* refutes it. No verdict is
explained without such a row.
"""

NAMES = {
    "untrained": "untrained", "mae": "MAE", "crossmae": "CrossMAE .75",
    "crossmae_last": "CrossMAE .75, last map alone",
    "crossmae_2": "CrossMAE .75, 2 decoder blocks", "crossmae_25": "CrossMAE .25",
    "crossmae_25_rate": "CrossMAE .25 at MAE's rate", "hypermae": "HyperMAE", "ginr": "MINR, GINR",
    "ginr_rate": "GINR at MAE's rate", "ginr_hidden": "GINR, loss on hidden pixels only",
    "ginr_visible": "GINR, only visible patches encoded", "transinr": "MINR, TransINR",
    "imae": "i-MAE", "imae_alone": "i-MAE without distillation", "scratch": "from scratch"}

IN_README = ("untrained", "mae", "crossmae", "crossmae_25", "hypermae", "ginr", "transinr", "imae",
             "scratch")
SEEDS = 3                                                  # that a verdict needs
NO_NUMBER = "none"                                         # of the paper's
SHARES = ("1%", "10%", "100%")
TOP1 = ("20-NN", "linear", *SHARES)                        # the columns of top-1
HIDDEN, DECODED = "own random 0.75 hidden", "own random 0.75 decoded"
ELSEWHERE = "other random 0.75 decoded"
SHORT = {HIDDEN: "PSNR hidden", DECODED: "PSNR decoded", ELSEWHERE: "PSNR decoded, shapes"}
ROBUST = ("fall from 0.5 to 0.75", "fall from 0.75 to 0.9", "change under grid",
          "change under block")
MASKS = (("random", 0.5), ("random", 0.75), ("random", 0.9), ("grid", 0.75), ("block", 0.75))
ATTENTION = ("visible", "hidden", "share of visible")
R2 = [f"{source} {image}" for image in ("subordinate", "dominant")
      for source in ("branch", "mixed", "control")]

PAPERS = {  # what their numbers below are
    "MAE": "The paper's top-1 is that of ViT-B, trained on all of ImageNet; its text was not at "
           "hand.",
    "CrossMAE": "The paper's top-1 is that of ViT-B, fine-tuned on all of ImageNet; of linear "
                "probes it has 65.4, 65.1 (Table 12: CrossMAE, MAE). CrossMAE has 4 decoder blocks "
                "here, MAE 2.",
    "HyperMAE": "The paper's top-1 is that of ViT-B, fine-tuned on all of ImageNet; on Places365 "
                "it has 58.89, 58.72, on iNaturalist2021 71.53, 73.81.",
    "MINR": "The paper, of which only a summary was at hand, compares PSNR with MAE's alone. Its "
            "pairs out of domain are trained on Imagenette, Indoor67, Imagenette and evaluated on "
            "CelebA, Imagenette, Indoor67.",
    "i-MAE": "Only the paper's supplement was at hand, which has no number for these claims."}

CLAIMS = {  # method: (claim, the paper's numbers of A and B, A, B, columns). A column is one of
    # both, or (A's, B's); B's may be a number.
    "MAE": [
        ("pretraining helps", "83.6, 82.3 (Table 3, from memory)", "mae", "scratch", SHARES),
        ("pretraining helps", NO_NUMBER, "mae", "untrained", SHARES)],
    "CrossMAE": [
        ("predicting .25 loses nothing", "83.5, 83.7 (Table 1)", "crossmae_25", "crossmae",
         TOP1),
        ("predicting .25 loses nothing", NO_NUMBER, "crossmae_25_rate", "crossmae", TOP1),
        ("as good as MAE", "83.5, 83.3 (Table 1)", "crossmae_25", "mae", TOP1),
        ("as good as MAE", NO_NUMBER, "crossmae_25_rate", "mae", TOP1),
        ("why .25 loses (where it does): its learning rate is a third", NO_NUMBER,
         "crossmae_25_rate", "crossmae_25", TOP1),
        ("as good as MAE", "83.7, 83.3 (Table 1)", "crossmae", "mae", TOP1),
        ("PSNR is below MAE's", "20.11, 20.05 (Table 13)", "mae", "crossmae", [HIDDEN]),
        ("PSNR is below MAE's", NO_NUMBER, "mae", "crossmae_2", [HIDDEN]),
        ("why .75 is above MAE, where it is: 4 decoder blocks, MAE has 2", NO_NUMBER, "crossmae",
         "crossmae_2", [*TOP1, HIDDEN]),
        ("PSNR is below MAE's", "20.11, 19.97 (Table 13)", "mae", "crossmae_25", [HIDDEN]),
        ("PSNR is below MAE's", NO_NUMBER, "mae", "crossmae_25_rate", [HIDDEN]),
        ("MAE's hidden tokens look at visible ones more than at hidden ones, per token",
         "1.418, 0.388 (Table 6)", "mae", "mae", [("block sum visible", "block sum hidden")]),
        ("MAE's hidden tokens look at visible ones more than at hidden ones, in sum: above half",
         "none; by Table 6 0.55: 50 x 1.418, 147 x 0.388",
         "mae", "mae", [("block sum share of visible", 0.5)]),
        ("inter-block attention helps", "83.3, 82.9 (Table 3d)", "crossmae", "crossmae_last",
         TOP1)],
    "HyperMAE": [("as good as MAE", "82.35, 82.40 (Table 1)", "hypermae", "mae", TOP1)],
    "MINR": [
        ("pretraining helps", NO_NUMBER, "ginr", "scratch", SHARES),
        ("pretraining helps", NO_NUMBER, "ginr", "untrained", SHARES),
        ("pretraining helps", NO_NUMBER, "ginr_rate", "scratch", SHARES),
        ("pretraining helps", NO_NUMBER, "ginr_rate", "untrained", SHARES),
        ("why it is not seen to help: its learning rate is twice MAE's", NO_NUMBER,
         "ginr_rate", "ginr", TOP1),
        ("better than MAE", "up to 6.4 dB", "ginr", "mae", [DECODED]),
        ("better than MAE", NO_NUMBER, "ginr", "mae", [HIDDEN]),
        ("better than MAE", NO_NUMBER, "ginr_rate", "mae", [DECODED, HIDDEN]),
        ("better than MAE", NO_NUMBER, "ginr_hidden", "mae", [HIDDEN]),
        ("why its PSNR of hidden pixels is below MAE's: its learning rate is twice MAE's",
         NO_NUMBER, "ginr_rate", "ginr", [HIDDEN]),
        ("why its PSNR of hidden pixels is below MAE's: its loss covers all pixels", NO_NUMBER,
         "ginr_hidden", "ginr", [HIDDEN]),
        ("better than CrossMAE", NO_NUMBER, "ginr", "crossmae", [DECODED, HIDDEN]),
        *[("robust to other ratios and patterns", NO_NUMBER, other, "ginr", ROBUST)
          for other in ("mae", "crossmae", "hypermae", "imae")],
        ("why it falls so far to 0.9: zeros for hidden patches", NO_NUMBER, "ginr", "ginr_visible",
         ["fall from 0.75 to 0.9"]),
        ("GINR is better out of domain", "18.041, 17.361; 19.509, 18.992; 18.045, 17.920 (Table 2)",
         "ginr", "transinr", [ELSEWHERE]),
        ("GINR is better out of domain", NO_NUMBER, "ginr_visible", "transinr", [ELSEWHERE]),
        ("TransINR is better in domain", "21.865, 21.680 (CelebA)", "transinr", "ginr", [DECODED]),
        ("TransINR is better in domain", NO_NUMBER, "transinr", "ginr_visible", [DECODED])],
    "i-MAE": [
        ("training on mixtures makes them separable: branch above control", NO_NUMBER, "imae",
         "imae", [(f"mix {mix} branch {image}", f"mix {mix} control {image}")
          for mix in (0.2, 0.4) for image in ("dominant", "subordinate")]),
        ("distillation helps", NO_NUMBER, "imae", "imae_alone", TOP1)],
}


def measured(printed):
    """{"mix 0.2 branch dominant": number, ...} of the lines of --eval: its tables below PSNR's."""
    found, heads = {}, []
    for line in printed:
        words = re.split("  +", line.strip())
        if words[0] in ("mix", "block"):                   # a table begins
            heads = words
        elif len(words) != len(heads):                     # it has ended
            heads = []
        else:
            label = words[0] if words[0] == "sum" else f"{float(words[0]):g}"
            for head, word in zip(heads[1:], words[1:]):
                found[f"{heads[0]} {label} {head}"] = float(word)
    return found


def quantities(record):
    """{column: number} of a line, see above."""
    column, numbers = record["column"], record["numbers"]
    if column == "pretraining":
        return {"minutes": numbers["train_minutes"]} if "train_minutes" in numbers else {}
    if not column.startswith("PSNR on "):
        return {column.split(" (")[0]: numbers["top1"]}
    own = column == f"PSNR on {record['table'].split(', ')[0]}"
    psnr = {(row["mask"], row["mask_ratio"]): row for row in numbers["psnr"]}
    found = {f"{'own' if own else 'other'} {mask} {ratio} {part}": row[f"psnr_{part}"]
             for (mask, ratio), row in psnr.items() for part in ("hidden", "decoded")}
    if own:
        hidden = {key: row["psnr_masked"] for key, row in psnr.items()}
        for low, high in ((0.5, 0.75), (0.75, 0.9)):
            found[f"fall from {low} to {high}"] = hidden["random", low] - hidden["random", high]
        for mask in {"grid", "block"} & {mask for mask, _ in psnr}:
            change = hidden["random", 0.75] - hidden[mask, 0.75]
            found[f"change under {mask}"] = abs(change)
        found |= measured(numbers["printed"])
    return found


class Setup:
    """The results of one table: data, encoder size and epochs of pretraining.

    records: its lines, as dicts; numbers: {(encoder, column): {seed: number}}
    title; budget: "ViT-micro, 10 epochs"
    names: {"1%": "1% (18 epochs)", "own": "data/cifar10", ...}, what columns are called; two names
        for one column would mix: ValueError
    """

    def __init__(self, records):
        table = records[0]["table"]
        self.title = table.replace(" epochs", " epochs of pretraining", 1)
        self.budget = re.search(r"ViT-\w+, \d+ epochs", table)[0]
        self.records, self.numbers, self.names = records, defaultdict(dict), {}
        for record in sorted(records, key=lambda record: record["seed"]):
            for column, number in quantities(record).items():
                self.numbers[record["encoder"], column][record["seed"]] = number
            name, label = record["column"].split(" (")[0], record["column"]
            if label.startswith("PSNR on "):
                label = label.removeprefix("PSNR on ")
                name = "own" if label == table.split(", ")[0] else "other"
            if self.names.setdefault(name, label) != label:
                raise ValueError(f"{table}: {self.names[name]} and {label} in one file")

    def cell(self, encoder, column):
        values = self.numbers[encoder, column]
        if column == "minutes":
            return f"{min(values.values()):.0f}" if values else ""
        return cell(values, digits(column))

    def row(self, encoder, columns):
        """Cells of an encoder; a column may be a pair, which share one."""
        pairs = [[column] if isinstance(column, str) else column for column in columns]
        cells = [[self.cell(encoder, column) for column in pair] for pair in pairs]
        return [" / ".join(filter(None, parts)) for parts in cells]

    def rows(self, columns, encoders=NAMES):
        """A row for each of the encoders that has any of the columns."""
        rows = [[NAMES[encoder], *self.row(encoder, columns)] for encoder in encoders]
        return [row for row in rows if any(row[1:])]

    def mixes_or_blocks(self, start):
        """What the columns of all encoders that begin so go on with: mixes or blocks."""
        return sorted({column.split()[1] for (_, column), values in self.numbers.items()
                       if values and column.startswith(start)})

    def section(self, title, text, used, heads, rows):
        """A table with its title, and where its numbers, of the records `used`, are from."""
        if not rows:
            return ""
        sources = {}                                       # {where and when: [seed, ...]}
        for seed in sorted({record["seed"] for record in used}):
            machines, versions, commits, days = (
                ", ".join(sorted({record[key] for record in used if record["seed"] == seed}))
                for key in ("machine", "torch", "commit", "date"))
            source = f"{machines}; torch {versions}; commit {commits}; {days}"
            sources.setdefault(source, []).append(str(seed))
        for source, seeds in sources.items():
            text += f" Seed {', '.join(seeds)}: {source}."
        return f"### {title} ({self.title})\n\n{text}\n\n{markdown(heads, rows)}"


def digits(column):
    """How many are printed behind the point."""
    if column in TOP1:
        return 1
    return 3 if column.startswith(("mix", "block")) else 2


def cell(numbers, places, sign=""):
    """Mean ± sample deviation of {seed: number}, and which seeds, unless they are three."""
    values = [*numbers.values()]
    if not values:
        return ""
    text = f"{mean(values):{sign}.{places}f}"
    if len(values) > 1:
        text += f" ± {stdev(values):.{places}f}"
    seeds = f"seed{'s' * (len(values) > 1)} {', '.join(map(str, numbers))}"
    return text if len(values) == SEEDS else f"{text} ({seeds})"


def markdown(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def verdict(differences):
    """By RULE, of {seed: A - B}. A mean so far from 0 implies one sign of three seeds."""
    values = [*differences.values()]
    if len(values) < SEEDS:
        return f"{len(values)} of {SEEDS} seeds so far"
    if abs(mean(values)) <= 2 * stdev(values):
        return "cannot be told"
    return "holds" if mean(values) > 0 else "fails"


def classification(setup):
    return setup.section(
        "Classification", "Top-1 in %, with the epochs of training in brackets, and minutes of "
        "pretraining: the fewest of the seeds that recorded them, while other runs shared the "
        "machine, so not to compare methods by. A network from scratch has no features to probe.",
        [record for record in setup.records if not record["column"].startswith("PSNR")],
        ["encoder", *(setup.names.get(column, column) for column in TOP1), "minutes"],
        setup.rows([*TOP1, "minutes"]))


def psnr(setup, place):
    """On "own" or "other" data."""
    name = setup.names.get(place)
    used = [record for record in setup.records if record["column"] == f"PSNR on {name}"]
    images = sorted({int(re.search(r"mean over (\d+)", record["numbers"]["printed"][0])[1])
                     for record in used})
    columns = [(f"{place} {mask} {ratio} hidden", f"{place} {mask} {ratio} decoded")
               for mask, ratio in MASKS]
    return setup.section(
        f"PSNR on {name}", f"In dB, hidden / decoded, by mask and mask ratio; mean over "
        f"{', '.join(map(str, images))} validation images.", used,
        ["encoder", *(f"{mask}, {ratio}" for mask, ratio in MASKS)], setup.rows(columns))


def measures(setup):
    """What is made of PSNR on own data, and printed besides."""
    name = setup.names.get("own")
    used = [record for record in setup.records if record["column"] == f"PSNR on {name}"]
    of_imae = [record for record in used if record["encoder"] in ("imae", "imae_alone")]
    of_mae = [record for record in used if record["encoder"] == "mae"]
    yield setup.section(
        "Robustness", "What the PSNR of hidden pixels loses from one mask ratio to the next, and "
        f"how far it moves, up or down, from random masks to others at 0.75; in dB, on {name}. "
        "Small is not good by itself: untrained, with nothing to lose, is the most robust.",
        used, ["encoder", *ROBUST], setup.rows(ROBUST))
    yield setup.section(
        "Separability", "R^2 (1 is best) of linear maps to the teacher's latent of one of two "
        "images, unmixed, by the weight (mix) of the subordinate one. They start from the latent "
        "of that image's branch; from i-MAE's latent before its branches (mixed); or from the "
        "latent of the mixture that the teacher itself has, a plain MAE that was trained on no "
        "mixture (control). The less is mixed in, the nearer the control's latent is to that of "
        "the dominant image, which is the teacher's own, too: at low weights the control must win "
        f"there. Images of {name}.", of_imae, ["encoder", "mix", *R2],
        [[NAMES[encoder], mix, *setup.row(encoder, [f"mix {mix} {source}" for source in R2])]
         for encoder in ("imae", "imae_alone") for mix in setup.mixes_or_blocks("mix")])
    yield setup.section(
        "Attention", "How much the hidden tokens of an MAE attend to one visible and to one hidden "
        "token in each decoder block (mean over tokens, summed over heads), and the share of it "
        "that all visible tokens get together, a quarter of all by number (class token included); "
        "of the sum, the mean over blocks. "
        f"Images of {name}.", of_mae, ["encoder", "block", *ATTENTION],
        [[NAMES["mae"], block, *setup.row("mae", [f"block {block} {part}" for part in ATTENTION])]
         for block in setup.mixes_or_blocks("block")])


def describe(setup, column):
    """A column in words."""
    place, *rest = column.split()
    if place in ("own", "other"):
        mask, ratio, part = rest
        return f"PSNR, {part}, {mask} {ratio}, {setup.names.get(place, place)}"
    title = {"mix": "R^2, ", "block": "attention, "}.get(place, "")
    return title + setup.names.get(column, column)


def commands(encoders, column):
    """What trains the encoders, and measures the column."""
    made = {name: f"--method {words}".format(runs="runs") for name, words in PRETRAINED.items()}
    made |= {"untrained": "--epochs 0", "scratch": "--mode scratch"}
    measure = "finetune.py --mode knn" if column == "20-NN" else "train.py --eval"
    if column in TUNED:
        measure = f"finetune.py {TUNED[column][0]}".removesuffix(" --mode finetune")
    words = dict.fromkeys([made[encoder] for encoder in encoders] + [measure])
    return ", ".join(f"`{part}`" for part in words)


def compared(setup, method):
    """(claim, the paper's numbers, A above B, their encoders, A's column, B's column or a number,
    {seed: A - B}) for each column of each claim of a method, if there are any seeds."""
    for claim, paper, first, second, columns in CLAIMS[method]:
        what = f"{NAMES[first]} above {NAMES[second]}" if first != second else NAMES[first]
        for column in columns:
            a, b = (column, column) if isinstance(column, str) else column
            above = setup.numbers[first, a]
            below = setup.numbers[second, b] if isinstance(b, str) else dict.fromkeys(above, b)
            differences = {seed: above[seed] - below[seed] for seed in above if seed in below}
            if differences:
                yield claim, paper, what, [first, second], a, b, differences


def claims(setup, method):
    """A table with a row for each column of each claim of a method, if there are any."""
    rows = []
    for claim, paper, what, encoders, a, b, differences in compared(setup, method):
        places = digits(a) + 1
        where = describe(setup, a) if a == b else f"{describe(setup, a)} above {b}"
        of_all_labels = a not in TOP1 or a == "100%"       # as the paper's top-1
        rows.append([claim, what, where, paper if of_all_labels else NO_NUMBER,
                     ", ".join(f"{d:+.{places}f}" for d in differences.values()),
                     cell(differences, places, "+"), verdict(differences), commands(encoders, a)])
    heads = ["claim", "A above B", "in", "paper: A, B", "A - B, seed by seed", "mean ± deviation",
             "verdict", "of the commands"]
    title = f"### Claims: {method} ({setup.title})"
    return f"{title}\n\n{PAPERS[method]}\n\n{markdown(heads, rows)}" if rows else ""


def read_setups(records):
    """A Setup for each table in the records of a results.jsonl."""
    last = {tuple(record[key] for key in ("table", "encoder", "column", "seed")): record
            for record in records}
    tables = defaultdict(list)
    for record in last.values():
        tables[record["table"]].append(record)
    return [*map(Setup, tables.values())]


def summary(setups):
    """The README's tables of results."""
    columns = [(HIDDEN, DECODED), "20-NN", *SHARES]
    return "\n".join(markdown([setup.budget, "PSNR, hidden / decoded", *columns[1:]],
                              setup.rows(columns, IN_README)) for setup in setups)


def verdicts(setups):
    """The README's table of claims, without numbers: a row for each claim and pair of encoders, a
    column for each setup, in whose cells are the columns with each verdict."""
    found = {}                     # {(claim, A above B): for each setup {verdict: [column, ...]}}
    for method in CLAIMS:
        for i, setup in enumerate(setups):
            for claim, _, what, _, column, _, differences in compared(setup, method):
                column = SHORT.get(column, column.removeprefix("mix ").removeprefix("block sum "))
                row = found.setdefault((f"{method}: {claim}", what), [{} for _ in setups])
                row[i].setdefault(verdict(differences), []).append(column)
    rows = []
    for claim, row in found.items():
        texts = [[f"**{said}** {', '.join(columns)}" for said, columns in cell.items()]
                 for cell in row]
        rows.append([*claim, *map("; ".join, texts)])
    return markdown(["claim", "A above B", *(setup.budget for setup in setups)], rows)


def report(records):
    """All of it, of the records of a results.jsonl, as one text."""
    setups = read_setups(records)
    parts = [INTRO, f"## The rule\n\n{RULE}"]
    for setup in setups:
        parts += [f"## {setup.title}\n", classification(setup), psnr(setup, "own"),
                  psnr(setup, "other"), *measures(setup)]
        parts += [claims(setup, method) for method in CLAIMS]
    return "\n".join(filter(None, parts))


def main(folder=Path("tests")):
    """Write RESULTS.md and, between their marks, the README's tables."""
    records = read_lines(folder / "results.jsonl")
    (folder / "RESULTS.md").write_text(report(records), encoding="utf-8")
    readme = folder.parent / "README.md"
    text, setups = readme.read_text(encoding="utf-8"), read_setups(records)
    for mark, table in ("results", summary(setups)), ("claims", verdicts(setups)):
        start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
        assert start in text and end in text
        before, _, rest = text.partition(start)
        text = before + start + table + end + rest.partition(end)[2]
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
