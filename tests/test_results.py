"""tests/results.py: its commands run on a tiny folder; its tables and sentences are recomputed."""

import io
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import finetune
import train
from tests import analyses, results
from tests.conftest import ROOT, write_pictures

FILES = "README.md tests/RESULTS.md .github/results.svg .github/recipe.svg".split()
README, RESULTS, *_ = ((ROOT / file).read_text("utf-8") for file in FILES)
LINES, CODES = results.read_lines(ROOT / results.OUT), {v: k for k, v in results.NAMES.items()}
ROWS = {table: re.findall(r"^\| ([^|]+) \| (.*) \|$", RESULTS.split(f"<!-- {table} -->")[1].split(
    "<!-- /")[0], re.M) for table in dict.fromkeys(line["table"] for line in LINES)}


def test_continues_where_it_stopped(monkeypatch, tmp_path):
    """Only results without a line are computed, after their encoder if that is gone."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        write_pictures(Path("tiny", part), "ab", 16, side=(16, 24))
    real, done, out = results.run, [], Path("out.jsonl")

    def process(words, **options):
        with redirect_stdout(io.StringIO()) as printed:
            if words[1] == "-m":
                analyses.main([*words[3:], "--workers", "0"])
            else:
                {"train.py": train, "finetune.py": finetune}[words[1]].main(words[2:])
        return SimpleNamespace(stdout=printed.getvalue())

    def run(command):
        done.append(command)
        return {"top1": 50.0} if "--labels" in command else real(command)
    monkeypatch.setattr(results, "run", run)
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(
        run=process, PIPE=None, getoutput=lambda command: "an answer"))
    words = "--data tiny --epochs 1 --batch_size 16 --only mae --seeds 3 --out out.jsonl".split()
    results.main(words)
    results.main(words)
    lines, runs = results.read_lines(out), done[0].split()[-3]
    assert [line["column"] for line in lines] == ["PSNR", "20-NN", *results.TUNED]
    assert len(done) == 7 and all(command.startswith(line["command"].replace("{runs}", runs))
                                  for line, command in zip(lines, done[1:]))
    psnr, numbers = results.read_lines(Path(runs, "mae/log.jsonl"))[-1], lines[0]["numbers"]
    assert abs(numbers[results.PIXELS] - psnr["psnr_masked"]) < 1e-3 and len(numbers) == 8
    shutil.rmtree("runs")
    out.write_text("\n".join(out.read_text().split("\n")[:-2] + [""]))
    results.main(words)
    assert done[7:] == [done[0], done[6]] and len(results.read_lines(out)) == 6


def test_the_commands():
    """Today's commands are those of the results, except for superfluous flags."""
    for line in LINES:
        data, size, epochs, more = re.split(r", ViT-|, | epochs ?", line["table"])
        args = SimpleNamespace(data=data, size=size, epochs=int(epochs), pretraining=more.split())
        today = dict(results.commands(args, line["encoder"], line["seed"]))[line["column"]]
        assert {*line["command"].split()} - {*today.split()} <= {"--mode", "finetune", "--no-norm"}
    teacher, own, longer = (command for name in ("imae_alone", "crossmae_25_long")
                            for column, command in results.commands(args, name, 5) if not column)
    assert "--name mae" in teacher and "--teacher {runs}/mae/last.pt --distill_weight 0" in own
    assert "--epochs 50 --seed 5" in teacher and "--epochs 80 --seed 5" in longer


def test_every_cell():
    """Means, standard deviations, differences and bold cells are right in the first two tables."""
    shown = [(table, CODES[name], *pair) for table, rows in ROWS.items() for name, cells in rows if
             name in CODES for pair in zip(["PSNR", *results.TOP1], cells.split(" | ")) if pair[1]]
    for table, code, column, cell in shown:
        key, digits, floor = ("top1", 1, 0.5) if column != "PSNR" else (results.PIXELS, 2, 0.02)
        runs, mae = ([(line["seed"], line["numbers"][key]) for line in LINES if (
            line["table"], line["encoder"], line["column"]) == (table, name, column)]
            for name in (code, "mae"))
        minus = [x - y for seed, x in runs for other, y in mae if seed == other]
        values = np.array([x for _, x in runs] if "±" in cell else minus)
        for known, number in zip((values.mean(), values.std(ddof=1)), cell.strip("*").split(" ± ")):
            assert abs(known - float(number)) < 0.501 * 0.1 ** digits, (table, code, column)
        assert ("**" in cell) == (abs(np.mean(minus)) > max(2 * np.std(minus, ddof=1), floor))
    assert len(shown) > 200 and results.cost("ginr", "micro") == "2.03"    # as counted elsewhere
    two_seeds = results.Numbers(table, [dict(line, seed=line["seed"] % 2) for line in LINES])
    assert two_seeds.minus("crossmae", "mae", results.PIXELS) == ""


def test_sentences():
    """Each number is in a row of a method that its paragraph names. Unclear ones are called so."""
    runs = results.read_numbers(ROOT / results.OUT)[0].found
    moved = (max(map(np.ptp, runs["ginr", key].values())) for key in (results.PIXELS, "20-NN"))
    micro, tiny = map(list, ROWS.values())
    micro.append(("MINR, trained again", "{:.2f} {:.1f}".format(*moved)))
    sections = re.split("\n## ", re.sub(r"(?s)<!-- (.*?) -->.*?<!-- /\1 -->", "", RESULTS))
    for rows, text in ((micro + tiny, README.split("<!-- /results -->")[1].split("\n[")[0]),
                       (micro, sections[2]), (tiny, sections[3])):
        for paragraph in re.split(r"\n\n|\n(?=\d\. )", text):
            cells = " ".join(re.sub(" ± [0-9.]+", "", cells) for name, cells in rows
                             if re.match(r"[\w-]+", name)[0] in paragraph.replace("From", "from"))
            for sentence in re.split(r"(?<=[.;:])\s", paragraph):
                for number in re.findall(r"\d+\.\d+", sentence):
                    found = re.findall(rf"(\*?)([+-]?)(?<![\d.]){number}(?!\d)", cells)
                    assert found and ("not clear" in sentence or any(
                        bold or not sign for bold, sign in found)), (number, sentence)
    for row in re.findall(r"^\| [\w-]*M\w+ \|.*", sections[4], re.M):
        for cell, rows in zip(row.split("|")[-3:], (micro, tiny)):
            known = " ".join(map(" ".join, rows)).replace(",", "").split()
            assert {*re.findall(r"[*+-]+\d[.\d*]+", cell)} <= {*known}, row


def test_all_is_up_to_date(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("tests", ".github"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for log in ROOT.glob("tests/recipe_*.jsonl"):
        assert f" {results.read_lines(log)[-1]['top1']:.1f}%" in README, log
    results.write_tables(tmp_path / "tests")
    for file in FILES:
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes(), f"{file}: use --tables"
