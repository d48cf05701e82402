"""tests/results.py: its commands, which of them it runs, the numbers that it reads, its tables."""

import json
import re
import shutil
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import pytest

import finetune
import train
from tests import results
from tests.unit.conftest import ROOT, parsed


@pytest.mark.parametrize("name", [*results.PRETRAINED, *results.SOURCES, *results.PAYS])
def test_commands(name):
    """The commands parse, and use only checkpoints that earlier ones have made."""
    args = SimpleNamespace(data="shapes", size="tiny", epochs=50, pretraining=["--batch_size", "8"])
    made = set()
    for column, command in results.commands(args, name, seed=5):
        assert {*re.findall(r"{runs}/(\w+)/last.pt", command)} <= made
        for _, script, *words in map(str.split, command.split(" && ")):
            if script != "-m":
                run = parsed(script, words)
                made.add(getattr(run, "name", None))
                assert getattr(run, "seed", 5) == 5 and run.data == "shapes"
                epochs = {"crossmae_25_long": 80, "untrained": 0}.get(name, 50)
                assert column or run.epochs == epochs
    assert name in made or name not in results.PRETRAINED


@pytest.mark.parametrize("name", ["mae", "ginr", "scratch", *results.PAYS])
def test_settings_are_in_the_commands(name):
    """Other defaults of finetune.py would not change the tables."""
    args = SimpleNamespace(data="shapes", size="micro", epochs=10, pretraining=[])
    for column, command in results.commands(args, name, seed=0):
        if "finetune.py" in command:
            run = vars(parsed("finetune.py", command.split()[2:]))
            recipe = finetune.RECIPES.get(run["mode"], [{}])[0]
            flags = {*recipe, "lr", "min_lr"} & run.keys() - {"blr"} if recipe else {"k"}
            assert not [flag for flag in {*flags, "pool"} if run[flag] is None]
            if name not in results.PAYS:
                assert run.get("batch_size") == {"20-NN": None, "1%": 24}.get(column, 128)
                assert run.get("layer_decay") == {"finetune": 0.75, "scratch": 1}.get(run["mode"])


def test_continues_where_it_stopped(monkeypatch, tmp_path):
    """Only results without a line are computed, after their encoder."""
    done, out = [], tmp_path / "out.jsonl"
    monkeypatch.setattr(results, "run", lambda command: done.append(command) or {"top1": 50.0})
    words = ["--data", "tiny", "--only", "mae", "--seeds", "3", "--out", str(out)]
    for _ in range(2):
        results.main(words)
    lines = results.read_lines(out)
    assert [line["column"] for line in lines] == ["PSNR", "20-NN", *results.TUNED]
    assert len(done) == 7 and all("/3/mae" in command for command in done[1:])
    out.write_text("\n".join(out.read_text().split("\n")[:-2] + [""]))
    results.main(words)
    assert done[7:] == [done[0], done[6]] and results.read_lines(out)[-1]["numbers"]["top1"] == 50


def test_numbers_of_commands(pretrain, monkeypatch):
    """They are read from the log of a run, and from what evaluations print."""
    last, printed = pretrain()["history"][-1], []
    process = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=printed[0]), PIPE=None)
    monkeypatch.setattr(results, "subprocess", process)
    rows = train.main(["--eval", "runs/mae", *results.MASKS.split(), "--workers", "0"])
    printed.append(train.as_table(rows))
    numbers = results.run("python train.py --eval runs/mae")
    assert numbers[results.PIXELS] == pytest.approx(last["psnr_masked"], abs=1e-3)
    assert len(numbers) == 6
    printed[0] = "top1 12.50, top5 50.00, on 4 images"
    assert results.run("python finetune.py --mode knn") == {"top1": 12.5}
    Path("runs/mae/log.jsonl").write_text('{"top1": 1.0}\n{"top1": 2.0}\n')
    assert results.run("python finetune.py --runs runs --name mae") == {"top1": 2.0}


def test_cells_and_differences():
    """Differences are between runs of one seed, and bold if above two deviations and the floor."""
    scores = {"mae": (40.0, 41.0, 42.0), "crossmae": (43.0, 43.5, 44.9), "imae": (40.1, 40.9, 42.0)}
    numbers = results.Numbers("x, ViT-micro, 10 epochs", [
        dict(encoder=encoder, column="20-NN", seed=seed, numbers={"top1": score})
        for encoder, values in scores.items() for seed, score in enumerate(values)])
    for encoder, values in scores.items():
        assert numbers.cell(encoder, "20-NN") == f"{mean(values):.1f} ± {stdev(values):.1f}"
    assert numbers.minus("crossmae", "mae", "20-NN") == "**+2.8**"
    assert numbers.minus("imae", "mae", "20-NN") == "+0.0"
    del numbers.found["imae", "20-NN"][2]
    assert numbers.minus("imae", "mae", "20-NN") == ""     # fewer than three seeds


def test_picture():
    """Each run of 20-NN is a small dot, a cell's means are a large one, and no label covers any."""
    for numbers in results.read_numbers(ROOT / results.OUT):
        series, columns = [*results.dots_of(numbers)], (results.PIXELS, "20-NN")
        for encoder, _, points, center in series:
            assert sorted(y for _, y in points) == sorted(numbers.values(encoder, "20-NN"))
            for value, column in zip(center, columns):
                places = results.precision(column)[0]
                assert numbers.cell(encoder, column).startswith(f"{value:.{places}f} ")
        svg = results.panel("", "", "", series)
        dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="(\d)"', svg)
        assert len(dots) == sum(len(points) + 1 for _, _, points, _ in series)
        for _, label, *_ in series:
            x, y = map(float, re.search(rf'x="(\S+)" y="(\S+)" [^>]*>{label}<', svg).groups())
            for cx, cy, r in (map(float, dot) for dot in dots):
                assert abs(cx - x) > r + 3.5 * len(label) or not -r < y - cy + 3 < r + 15


def test_curves():
    """recipe.svg has a dot for each epoch of each log in which the panel's column was measured."""
    curves = [series for column in results.RECIPE
              for series in results.curves_of(ROOT / "tests/logs", column)]
    svg = (ROOT / ".github/recipe.svg").read_text(encoding="utf-8")
    assert svg.count("<circle") == sum(len(points) for _, _, points, _ in curves) > 0
    assert all(f">{name}</text>" in svg for _, name, _, _ in curves)


def test_the_study_of_pretraining_is_for_micro(tmp_path, capsys):
    """Its commands name ViT-micro's checkpoint. Its numbers are printed as a table of their own."""
    out = tmp_path / "x.jsonl"
    with pytest.raises(SystemExit):
        results.main(["--size", "tiny", "--only", "pretrained", "--out", str(out)])
    assert "--size tiny" in capsys.readouterr().err and not out.exists()
    line = dict(table="d, ViT-micro, 10 epochs", encoder="pretrained", column="10%, 40 epochs",
                seed=0, numbers={"top1": 63.0})
    out.write_text(json.dumps(line), encoding="utf-8")
    results.main(["--tables", "--out", str(out)])
    assert "| 10% | after pretraining | 40 | 11.4 | 63.0 |" in capsys.readouterr().out


def test_cost_of_pretraining():
    """RESULTS.md and RECIPE.md say what pretraining costs."""
    for page, words in (("RESULTS", "as many multiply-adds as {:.1f} of these epochs"),
                        ("RECIPE", "Pretraining costs {:.1f}.")):
        text = (ROOT / f"tests/docs/{page}.md").read_text(encoding="utf-8")
        assert words.format(results.pretraining_cost()) in " ".join(text.split())


def test_tables_are_up_to_date(tmp_path):
    pages = ["README.md", "tests/docs/RESULTS.md", "tests/docs/RECIPE.md"]
    for name in (*pages, "tests/logs/results.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".github").mkdir()
    results.write_tables(tmp_path / "tests")
    for name in (*pages, ".github/results.svg", ".github/pays.svg"):
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name
