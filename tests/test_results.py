"""tests/results.py on a tiny folder of images, and tests/tables.py on numbers made by hand."""

import io
import json
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import finetune
import train
from tests import results, tables
from tests.conftest import ROOT, write_pictures

WORDS = ["--data", "data/tiny", "--other", "data/more", "--epochs", "1", "--batch_size", "16",
         "--only", "untrained", "--seeds", "3", "--out", "out.jsonl"]
FOLDER = "runs/results/data-tiny-ViT-micro-1-epochs-batch_size-16/3"
LINES = results.read_lines(ROOT / "tests/results.jsonl")
_, SENTENCES = (ROOT / "tests/sentences.txt").read_text(encoding="utf-8").split("\n## ", 1)


def test_continues_where_it_stopped(monkeypatch, tmp_path):
    """In a folder with tiny images, and in this process, which has imported torch. Fine-tuning is
    left out."""
    monkeypatch.chdir(tmp_path)
    for folder in ("data/tiny/train", "data/tiny/val", "data/more/train", "data/more/val"):
        write_pictures(Path(folder), "ab", 16, side=(16, 24))
    real, done, out, stop = results.run, [], Path("out.jsonl"), True

    def process(words, **options):
        with redirect_stdout(io.StringIO()) as printed:
            {"train.py": train, "finetune.py": finetune}[words[1]].main(words[2:])
        return SimpleNamespace(stdout=printed.getvalue())

    def run(command):
        if stop and "linear" in command:
            raise KeyboardInterrupt
        done.append(command)
        return {"top1": 50.0} if "--eval_every" in command else real(command)
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(
        run=process, PIPE=None, getoutput=subprocess.getoutput))
    monkeypatch.setattr(results, "run", run)
    other = dict(table="other", encoder="untrained", column="20-NN", seed=3)
    out.write_text(json.dumps(other) + "\n")
    with pytest.raises(KeyboardInterrupt):
        results.main(WORDS)
    assert [line["column"] for line in results.read_lines(out)[1:]] == [
        "pretraining", "PSNR on data/tiny", "PSNR on data/more", "20-NN"]
    stop = False
    results.main(WORDS)
    assert done.pop(4) == done[0]                          # which had been finished
    lines = results.read_lines(out)[1:]
    assert [line["command"].replace("{runs}", FOLDER) for line in lines] == done
    assert len({*done}) == 8
    held_out = [sorted(file.stem for file in Path("data/held_out", part, "b").iterdir())
                for part in ("val", "train")]
    files = sorted(file.stem for file in Path("data/tiny/train/b").iterdir())
    assert held_out[0] == files[::10] and sorted(sum(held_out, [])) == files
    rows = train.main(done[1].split()[2:])                 # what the command itself returns
    psnr, numbers = {f"{row['mask']} {row['mask_ratio']}": row for row in rows}, lines[1]["numbers"]
    assert numbers.keys() == {*results.CONDITIONS, "block sum"}
    assert 0 < numbers["block sum"]["share of visible"] < 1
    for label in results.CONDITIONS:
        for part in ("masked", "decoded"):
            assert numbers[label][part] == pytest.approx(psnr[label][f"psnr_{part}"], abs=1e-3)

    Path(FOLDER, "untrained", "last.pt").unlink()
    results.main(WORDS)                                    # nothing is left that would need it
    assert len(done) == 8
    out.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    results.main(WORDS)
    assert done[8:] == [done[0], done[7]]                  # trained again, for what is missing


def test_the_commands(monkeypatch, tmp_path):
    """Today's commands are those of the results, except for the oldest ones. A teacher is trained
    first, with the same seed; other learning rates are tried on seed 0."""
    for line in LINES:
        if "29b0be4" not in line["made"] and "dba370e" not in line["made"]:
            data, size, epochs, more = re.match(
                r"(.*), ViT-(\w+), (\d+) epochs ?(.*)", line["table"]).groups()
            args = SimpleNamespace(data=data, other="shapes", held_out="data/held_out", size=size,
                                   epochs=int(epochs), pretraining=more.split(), finetune_epochs=3,
                                   columns=["20-NN", "PSNR", *results.TUNED, "held out"])
            encoder = line["encoder"]
            assert (encoder, line["column"], line["command"]) in [
                *results.commands(args, encoder, line["seed"])]
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(results, "run", lambda command: asked.append(command) or {"top1": 1.0})
    results.main("--data ten --epochs 4 --only imae scratch_ginr ginr_2e-3_clip --columns 20-NN "
                 "linear 100% --seeds 0 6 --mask_ratio 0.5 --out new/out.jsonl".split())
    first = ["mae", "imae", "0", "imae_linear_6", "imae_100_3", "ginr", "scratch_ginr_100_3"]
    assert [command.split()[-1] for command in asked] == [
        *first, "ginr_2e-3_clip", *first[:2], "6", *first[3:]]
    runs = "runs/results/ten-ViT-micro-4-epochs-mask_ratio-0.5/0"
    assert asked[1] == (
        f"python train.py --method imae --teacher {runs}/mae/last.pt --mask_ratio 0.5 --data ten "
        f"--size micro --epochs 4 --seed 0 --runs {runs} --name imae")


def test_what_a_command_gives(monkeypatch, tmp_path):
    """The numbers are those of the log or those printed. A run is resumed, unless its folder
    belongs to another command."""
    monkeypatch.chdir(tmp_path)
    words, log = [], [{"lr": 0.5, "psnr_masked": 1.0}, {"lr": 0.1, "psnr_masked": 2.0004}]
    r2 = [{"alpha": alpha, "psnr": 9.0, "branch dominant": -0.25} for alpha in (0.4, 0.35)]
    printed = f"a/last.pt: 7 mixtures\n{train.as_table(r2)}\nsee     a/eval.png: original"

    def process(command, check, **options):
        words.append(command[1:])
        assert check                                       # a failure stops everything
        if "--runs" in command:
            Path("runs/a/log.jsonl").write_text("\n".join(map(json.dumps, log)))
        return SimpleNamespace(stdout=printed if "--eval" in command else "top1 3.25, top5 9")
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(run=process, PIPE=None))
    command = "python train.py --runs runs --name a"
    for _ in range(2):
        assert results.run(command) == {"psnr_masked": 2.0, "lr": 0.5}
        assert words[-1] == [*command.split()[1:], "--resume"]
    with pytest.raises(SystemExit, match="runs/a belongs to another command: python train.py --ru"):
        results.run("python train.py --lr 1 --runs runs --name a")
    log[-1]["top1"] = 50.0
    assert results.run(command) == {"top1": 50.0}
    assert results.run("python finetune.py --mode knn") == {"top1": 3.25}
    assert "--resume" not in words[-1]
    assert results.run("python train.py --eval a/last.pt") == {
        "alpha 0.4": {"psnr": 9.0, "branch dominant": -0.25}}


def test_lines_and_claims_fit_together():
    """Each result has one line, of an encoder that tests/results.py trains. Claims and sentences
    name encoders and columns that exist."""
    names = {*results.PRETRAINED, *results.SOURCES}
    keys = [tuple(line[key] for key in ("table", "encoder", "column", "seed")) for line in LINES]
    assert len(keys) == len({*keys}) and {key[1] for key in keys} <= names | {*results.SWEEP}
    assert {*tables.NAMES} == names - {*results.NORM} | {"ginr_clip"}
    known = sum(map(list, tables.TABLES.values()), ["block sum visible", "block sum masked"])
    known += [f"other {name} {part}" for name in results.CONDITIONS
              for part in ("masked", "decoded")]
    asked = re.findall(r"{.*? \| (.*?) \| (.*?)}", SENTENCES)
    for kind, spec in re.findall("^(table|claim): (.*)", SENTENCES, re.M):
        asked += [(part, spec.split(" | ")[-1]) for part in spec.split(" | ")[-2].split("; ")]
    for comparison, columns in asked:
        for side in comparison.split(" > "):
            name, _, part = side.partition(": ")
            assert name in tables.CODES
            for column in columns.split(", "):
                assert f"{column} {part}".strip() in known or part in tables.ENDS
    assert len(asked) > 80


def test_results_are_up_to_date(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / ".github").mkdir()
    names = ("README.md", "tests/results.jsonl", "tests/RESULTS.md", ".github/results.svg")
    for name in names:
        shutil.copy(ROOT / name, tmp_path / name)
    tables.main(tmp_path / "tests")
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), (
            f"{name}: python -m tests.tables")


def test_runs_of_ones_own(tmp_path):
    """A table of one's own, of other data but the same model, is added and changes no other."""
    (tmp_path / "tests").mkdir()
    for name in ("README.md", "tests/results.jsonl", "tests/RESULTS.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    own = line("mae", "20-NN", 0, table="cifar10, ViT-micro, 10 epochs", top1=77.7)
    with (tmp_path / "tests/results.jsonl").open("a") as file:
        file.write(json.dumps(own) + "\n")
    tables.main(tmp_path / "tests")
    assert (tmp_path / "README.md").read_bytes() == (ROOT / "README.md").read_bytes()
    before, after = ((place / "tests/RESULTS.md").read_text() for place in (ROOT, tmp_path))
    assert after.startswith(before.split("<!-- /tables -->")[0]) and after.count("77.7") == 1


@pytest.mark.parametrize("differences, column, verdict", [
    ([1.0, 1.2, 0.8], "1%", "supported"), ([-1.0, -1.2, -0.8], "1%", "contradicted"),
    ([3.0, 3.0, -0.1], "1%", "inconclusive"), ([1.0, 2.0, 3.0], "1%", "inconclusive"),  # 2 = 2 x 1
    ([0.5] * 3, "linear", "inconclusive"), ([-0.4, -0.4, -0.41], "20-NN", "inconclusive"),
    ([0.01] * 3, "block 0.75 masked", "inconclusive"), ([0.03] * 3, "lr 0.002", "supported"),
    ([0.01] * 3, "block 0 masked", "supported"), ([0.004] * 3, "alpha 0.2", "inconclusive"),
    ([5.0, 5.0], "1%", "2 of 3 seeds so far"), ([], "1%", "0 of 3 seeds so far")])
def test_the_rule(differences, column, verdict):
    floor = tables.precision(column)[1]
    assert tables.verdict(dict(enumerate(differences)), floor) == verdict


@pytest.mark.parametrize("values, text", [
    ([], ""), ([61.08], "61.1 (seed 0)"), ([60.0, 61.0], "60.5 ± 0.7 (seed 0, 1)"),
    ([60.0, 61.0, 62.0], "61.0 ± 1.0")])
def test_a_cell(values, text):
    assert tables.cell(dict(enumerate(values)), 1) == text


def line(encoder, column, seed, table="cifar10, ViT-tiny, 9 epochs", **numbers):
    return dict(table=table, encoder=encoder, column=column, seed=seed, made="then and there",
                numbers=numbers)


def test_what_is_made_of_the_lines():
    """Differences are paired by seed, and the last line of a result counts."""
    lines = [line("mae", "1% (18 epochs)", seed, top1=top1)
             for seed, top1 in ((0, 0), (2, 42), (0, 40), (1, 41))]
    lines += [line("scratch", "1% (18 epochs)", seed, top1=30 + 1.1 * seed) for seed in range(3)]
    lines += [line("mae", "1% (9 epochs)", 0, table="ten, ViT-micro, 2 epochs", top1=77.0)]
    lines += [line(name, "20-NN", 0, top1=5.0) for name in ("mae_joined", "hypermae", "ginr_mean")]
    psnr = {"random 0.75": dict(masked=16.0, decoded=15.0), "block sum": dict(visible=0.5)}
    lines += [line("ginr", f"PSNR on {data}", 0, **psnr) for data in ("cifar10", "shapes")]
    lines += [line(f"mae{rate}", "pretraining", seed, lr=float(rate[1:] or 2e-3), psnr_masked=psnr)
              for rate, seed, psnr in (("", 0, 9.5), ("", 1, 99.0), ("_4e-3", 0, 18.2))]
    lines += [line("hypermae", "pretraining", 0, lr=2e-3, psnr_masked=17.0)]
    lines += [line(f"mae_{end}", "20-NN", 0, top1=top1) for end, top1 in (("norm", 6), ("raw", 7))]
    tiny, micro = tables.read_setups(lines)
    assert tiny.judge("MAE > from scratch", "1%") == {"1%": ("supported", "+9.9 ± 0.1")}
    assert tiny.judge("MAE: with norm > MAE: without norm", "20-NN") == {
        "20-NN": ("1 of 3 seeds so far", "-1.0 (seed 0)")}
    assert tiny.judge("MAE, joined > from scratch", "20-NN, 1%") == {}
    text = tables.tables(tiny)
    assert "| encoder | readout | 20-NN | 1% (18 epochs) |" in text
    for row in ("MAE | patch tokens, mean (192) | 7.0 (seed 0) | 41.0 ± 1.0 |",
                "HyperMAE | patch tokens, mean (192) | 5.0 (seed 0) |",
                "MINR, GINR, mean | weight tokens, mean (192) | 5.0 (seed 0) |"):
        assert f"| {row}" in text
    rates = text.split("### Learning rates\n")[1].split("###")[0].splitlines()
    assert rates[1] == "| encoder | lr 0.002 | lr 0.004 |" and "77" not in text
    assert rates[3:-1] == ["| MAE | 9.50 | **18.20** |"]     # HyperMAE has only one
    assert re.search(r"PSNR on cifar10\n(.*\n)*\| MINR, GINR \| [\d.]+ \| [\d,]+ \| 26 \| 16.00 ",
                     text)
    assert tiny.numbers["ginr", "other random 0.75 decoded"] == {0: 15.0}
    assert tables.summary([tiny]).splitlines()[-1] == (
        "| MINR | 16.00 (seed 0) | 5.0 (seed 0) |  | 4.67 |")
    with pytest.raises(ValueError, match="1% .18 epochs. and 1% .9 epochs. in one file"):
        tables.read_setups([*lines, line("mae", "1% (9 epochs)", 0, top1=40)])


@pytest.mark.parametrize("name, size, thousands, tokens", [
    ("mae", "tiny", 116, "patch tokens, mean (192)"),
    ("mae_4", "micro", 207, "patch tokens, mean (64)"),
    ("mae_joined", "tiny", None, "patch tokens joined (12,288)"),
    ("hypermae", "tiny", 984, "patch tokens, mean (192)"),
    ("ginr_patches", "micro", None, "patch tokens, mean (64)"),
    ("ginr", "tiny", 26, "weight tokens joined (3,072)"),
    ("transinr", "micro", 38, "weight tokens joined (4,288)"),           # 4 x 16 + 3
    ("transinr", "tiny", 81, "weight tokens, mean (192)")])
def test_what_is_computed_from_the_classes(name, size, thousands, tokens):
    assert thousands is None or tables.costs(name, size)[2] == str(thousands)
    assert tables.readout(name, size) == [tokens]


def test_multiply_adds():
    """As counted layer by layer: of MAE's encoder with K = 16 visible patches and its decoder."""
    def block(n, dim):                                     # 12 dim^2 for each token, and attention
        return n * 12 * dim ** 2 + 2 * n * n * dim

    mae = (16 * 48 * 64 + 4 * block(17, 64)) + 17 * 64 * 64 + 2 * block(65, 64) + 48 * 64 * 48
    assert tables.multiply_adds("mae", "micro") == pytest.approx(mae / 1e6, rel=0.01)
    assert tables.relative_cost("mae", "micro") == "1.00"
    long, short = (float(tables.relative_cost(f"crossmae_25{x}", "micro")) for x in ("_long", ""))
    assert long == pytest.approx(1.6 * short, rel=0.01) == pytest.approx(1, rel=0.02)


def values(model, encoder, column):
    """Return the numbers (3,) of seeds 0, 1 and 2, without tests/tables.py; NaN if missing. On
    ViT-micro, 20-NN is that of features without a norm."""
    if (model, column) == ("ViT-micro", "20-NN") and re.match(
            "(mae(_joined|_4)?|untrained(_joined)?|crossmae_last|imae(_alone)?)$", encoder):
        encoder += "_raw"
    found = dict.fromkeys(range(3), np.nan)
    for line in LINES:
        if line["table"].startswith(f"data/cifar10, {model}") and line["encoder"] == encoder:
            if line["column"].split(" (")[0] == column:
                found[line["seed"]] = line["numbers"]["top1"]
            elif line["column"].startswith("PSNR on "):
                other = "" if line["column"] == "PSNR on data/cifar10" else "other "
                for name, row in line["numbers"].items():
                    found |= {line["seed"]: row[p] for p in row if f"{other}{name} {p}" == column}
    return np.array([*found.values()])


def test_what_is_said_without_numbers():
    """In the sentences, and in RESULTS.md on readouts, learning rates and claims without a row."""
    micro = tables.read_setups(LINES)[0]
    for name in ("MINR, GINR", "MINR, TransINR"):
        judged = [micro.judge(f"{better} > {name}, patches", "20-NN held out")["20-NN held out"][0]
                  for better in (name, f"{name}, mean")]
        assert judged == ["supported", "inconclusive"]
    accuracy = ", ".join(tables.TOP1)
    inconclusive = {
        "MAE: masked > MINR, GINR: masked": "random 0.9",
        "MAE: decoded > MINR, GINR: decoded": "random 0.9",
        "CrossMAE .75 > CrossMAE .75, last map only": accuracy,
        "CrossMAE .25, MAE's learning rate > CrossMAE .25": accuracy,
        "i-MAE > i-MAE without distillation": accuracy}
    for comparison, columns in inconclusive.items():
        assert {said for said, _ in micro.judge(comparison, columns).values()} == {"inconclusive"}
    for part in ("masked", "decoded"):                     # worse with all seeds
        mae, ginr = (micro.numbers[name, f"random 0.9 {part}"] for name in ("mae", "ginr"))
        assert all(ginr[seed] < mae[seed] for seed in range(3))
    best = {"crossmae": 4e-3, "mae": 4e-3, "imae": 2e-3, "transinr": 4e-3, "ginr": 4e-3,
            "hypermae": 2e-3}
    default = dict.fromkeys(best, 2e-3) | {"ginr": 4e-3, "transinr": 4e-3}

    def psnr(name, rate):
        return micro.numbers[name, f"lr {rate}"].get(0, 0)
    for name in best:
        assert best[name] == max((1e-3, 2e-3, 4e-3), key=lambda rate: psnr(name, rate))
        assert psnr(name, best[name]) - psnr(name, default[name]) < 0.1
    held_out = {rate: np.mean([micro.numbers[f"scratch_{rate}", f"{labels}% held out"][0]
                               for labels in (1, 10, 100)]) for rate in results.RATES}
    assert float(max(held_out, key=held_out.get)) == finetune.RECIPES["scratch"][1]["lr"] == 2e-3
    with_norm, without = (np.mean([values("ViT-micro", f"{name}_{end}", "20-NN held out")
                                   for name in results.CHOOSERS]) for end in ("norm", "raw"))
    assert without > with_norm
    for chosen in (best, default):                         # the methods keep their order
        numbers = [psnr(name, chosen[name]) for name in best]
        assert numbers[:3] == sorted(numbers, reverse=True)[:3]
        assert max(numbers[3:]) - min(numbers[3:]) < 0.05


MADE = re.findall(r"^(?:short|or|answer|caveat|caption|start): (.*{ViT.*)", SENTENCES, re.M)


def differences(model, sides, column):
    """Return A - B (3,) for "A > B", without tests/tables.py."""
    found = []
    for name, *part in (side.split(": ") for side in sides.split(" > ")):
        end = {"with norm": "_norm", "without norm": "_raw"}.get(*part) if part else ""
        if name == "no pretraining":
            both = [values(model, code, column) for code in ("untrained", "scratch")]
            found.append(max(both, key=lambda numbers: numbers.mean()))
        elif end is None:
            found.append(values(model, tables.CODES[name], f"{column} {part[0]}"))
        else:
            found.append(values(model, tables.CODES[name] + end, column))
    return found[0] - found[1]


@pytest.mark.parametrize("template", MADE)
def test_the_numbers_of_a_sentence(template):
    """They are computed once more. A sentence is said only if all of its numbers are clear and all
    of its conditions hold."""
    holds = []

    def number(found):
        condition, model, sides, columns = found.groups()
        means, clear, better = [], [], []
        for column in columns.split(", "):
            known = differences(model, sides, column)
            mean, std = known.mean(), known.std(ddof=1)
            places, floor = ((1, 0.5) if column in ("20-NN", "linear", "1%", "10%", "100%") else
                             (3, 0.005) if column.startswith("alpha") else (2, 0.02))
            means.append(f"{mean:.{places}f}")
            clear.append(not np.isnan(mean))
            better.append(bool(mean > max(floor, 2 * std)))
        holds.append(all(clear) and not any(better) if condition == "unless" else all(better))
        means.sort(key=float)
        return "" if condition else means[0] if len(means) == 1 else f"{means[0]} to {means[-1]}"

    sentence = re.sub(tables.NUMBER, number, template)
    said = (ROOT / "README.md").read_text("utf-8") + tables.TEXT
    assert all(holds) or sentence not in said
    alternatives = SENTENCES[:SENTENCES.index(template)].rsplit("\n", 1)[1]
    if all(holds) and not alternatives.startswith("or: "):
        assert sentence in said


def test_short_sentences_and_the_figure():
    """At most six sentences in the README, of at most 30 words and two numbers; one dot for each
    method and seed, where results.jsonl says."""
    readme = (ROOT / "README.md").read_text("utf-8")
    intro = readme.split("## Compare\n")[1].split("<!--")[0]
    told = readme.split("<!-- findings -->")[1].split("<!-- /")[0]
    sentences = re.findall(r"^\d\. (.*)", told, re.M)
    assert 0 < len(sentences) <= 6 and len(intro.split()) <= 90
    for sentence in sentences:
        assert len(sentence.split()) <= 30, sentence
        assert len(re.findall(r"\d+\.\d+(?= (?:points|dB)| to |,)", sentence)) <= 2, sentence
    picture = (ROOT / ".github/results.svg").read_text("utf-8")
    for model, panel in zip(("ViT-micro", "ViT-tiny"), picture.split("<g ")[1:]):
        dots = re.findall(r'class="(\w+) seed" data-seed="(\d)" cx="(.*?)" cy="(.*?)"', panel)
        points = [(values(model, name, "random 0.75 masked")[int(seed)],
                   values(model, tables.MEANS.get(name, name), "20-NN")[int(seed)])
                  for name, seed, _, _ in dots]
        assert len(dots) > 10 and len(dots) == len({dot[:2] for dot in dots})
        for axis in (0, 1):
            shown, true = (np.array([float(x[i]) for x in them])
                           for i, them in ((2 + axis, dots), (axis, points)))
            assert np.abs(np.polyval(np.polyfit(true, shown, 1), true) - shown).max() < 0.02
            assert (np.corrcoef(true, shown)[0, 1] > 0) == (axis == 0)
