"""tests/results.py: its commands on a tiny folder; its tables and their sentences, recomputed."""

import io
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
from tests import results
from tests.conftest import ROOT, write_pictures

FILES = "README.md tests/results.jsonl tests/RESULTS.md .github/results.svg".split()
README, RESULTS = ((ROOT / FILES[i]).read_text("utf-8") for i in (0, 2))
LINES, CODES = results.read_lines(ROOT / FILES[1]), {v: k for k, v in results.NAMES.items()}
ROWS = {table: re.findall(r"^\| ([^|]+) \| (.*) \|$", RESULTS.split(f"<!-- {table} -->")[1].split(
    "<!-- /")[0], re.M) for table in dict.fromkeys(line["table"] for line in LINES)}


def test_continues_where_it_stopped(monkeypatch, tmp_path):
    """With tiny images. What has a line is not run again. What lost its line is, and its encoder is
    trained again if it is gone."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        write_pictures(Path("tiny", part), "ab", 16, side=(16, 24))
    real, done, out = results.run, [], Path("out.jsonl")

    def process(words, **options):
        with redirect_stdout(io.StringIO()) as printed:
            {"train.py": train, "finetune.py": finetune}[words[1]].main(words[2:])
        return SimpleNamespace(stdout=printed.getvalue())

    def run(command):
        done.append(command)
        return {"top1": 50.0} if "--labels" in command else real(command)
    monkeypatch.setattr(results, "run", run)
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(
        run=process, PIPE=None, getoutput=subprocess.getoutput))
    words = "--data tiny --epochs 1 --batch_size 16 --only mae --seeds 3 --out out.jsonl".split()
    for _ in range(2):
        results.main(words)
    lines, runs = results.read_lines(out), done[0].split()[-3]
    assert [line["column"] for line in lines] == ["PSNR", "20-NN", *results.TUNED]
    assert len(done) == 7 and all(command.startswith(line["command"].replace("{runs}", runs))
                                  for line, command in zip(lines, done[1:]))
    psnr = results.read_lines(Path(runs, "mae/log.jsonl"))[-1]["psnr_masked"]
    assert lines[0]["numbers"][results.PIXELS] == pytest.approx(psnr, abs=1e-3)
    assert {"grid 0.750 psnr_decoded", "block sum visible"} < {*lines[0]["numbers"]}
    shutil.rmtree("runs")
    out.write_text("".join(f"{line}\n" for line in out.read_text().splitlines()[:-1]))
    results.main(words)
    assert done[7:] == [done[0], done[6]] and len(results.read_lines(out)) == 6


def test_the_commands():
    """Today's commands are those of the results, except for superfluous flags."""
    for line in LINES:
        data, size, epochs, more = re.split(r", ViT-|, | epochs ?", line["table"])
        args = SimpleNamespace(data=data, size=size, epochs=int(epochs), pretraining=more.split())
        today = dict(results.commands(args, line["encoder"], line["seed"]))[line["column"]]
        assert {*line["command"].split()} - {*today.split()} <= {"--mode", "finetune", "--no-norm"}
    teacher, own, _ = (command for _, command in results.commands(args, "imae_alone", 5))
    assert "--name mae" in teacher and "--teacher {runs}/mae/last.pt --distill_weight 0" in own


def test_every_cell():
    """Means, deviations, differences and marks of the first two tables of each encoder."""
    shown = [(table, CODES[name], *pair) for table, rows in ROWS.items() for name, cells in rows if
             name in CODES for pair in zip(["PSNR", *results.TOP1], cells.split(" | ")) if pair[1]]
    for table, code, column, cell in shown:
        key, digits, floor = ("top1", 1, 0.5) if column != "PSNR" else (results.PIXELS, 2, 0.02)
        runs, mae = ([(line["seed"], line["numbers"][key]) for line in LINES if (
            line["table"], line["encoder"], line["column"]) == (table, name, column)]
            for name in (code, "mae"))
        minus = [x - y for seed, x in runs for other, y in mae if seed == other]
        values = np.array([x for _, x in runs] if "±" in cell else minus)
        known = [values.mean(), values.std(ddof=1)][:1 + cell.count("±")]
        numbers = [float(x) for x in cell.strip("*").split(" ± ")]
        assert np.allclose(known, numbers, rtol=0, atol=0.501 * 0.1 ** digits), (code, column)
        assert ("**" in cell) == (abs(np.mean(minus)) > max(2 * np.std(minus, ddof=1), floor))
    assert len(shown) > 200 and results.cost("ginr", "micro") == "2.03"    # as counted elsewhere
    lines = [dict(encoder=code, seed=seed, column="1%", numbers={"top1": x}) for code, numbers in (
        ("a", (1, 2, 3)), ("b", (0, 0, 0)), ("c", (9, 9))) for seed, x in enumerate(numbers)]
    few = results.Numbers("ten, ViT-tiny, 9 epochs", lines)
    assert [few.minus(code, "b", "1%") for code in "abc"] == ["+2.0", "+0.0", ""]


def test_sentences():
    """Each number in a sentence stands in a row of a method that its paragraph names. A difference
    that is not bold is called "not clear". Claims quote differences as they stand."""
    runs = results.read_numbers(ROOT / FILES[1])[0].found
    moved = [max(map(np.ptp, runs["ginr", key].values())) for key in (results.PIXELS, "20-NN")]
    micro, tiny = ROWS.values()
    micro = [*micro, ("MINR, trained again", "{:.2f} {:.1f}".format(*moved))]
    sections = re.split("\n## ", re.sub(r"(?s)<!-- (.*?) -->.*?<!-- /\1 -->", "", RESULTS))
    for rows, text in ((micro + tiny, README.split("<!-- /results -->")[1].split("\n## ")[0]),
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
            quoted, known = (re.findall(r"[*+-]+\d[^ ,|]+", text) for text in (
                cell, " ".join(cells for _, cells in rows)))
            assert {*quoted} <= {*known}, row


def test_all_is_up_to_date(tmp_path):
    for file in FILES:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "tests/recipe_from_scratch.jsonl").write_text(
        '{"epoch":1,"top1":30.5}\n{"epoch":2,"loss":1}\n{"epoch":3,"top1":50.0}\n')
    results.write_tables(tmp_path / "tests")
    for file in FILES:
        assert (tmp_path / file).read_bytes() == (ROOT / file).read_bytes(), f"{file}: use --tables"
    assert ">from scratch<" in (tmp_path / ".github/recipe.svg").read_text()
