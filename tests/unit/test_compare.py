"""tests/compare.py: which commands it runs, how it goes on, the numbers that it reads, its rule."""

import importlib
import re
import shlex
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

import finetune
from tests import compare, evaluate
from tests.lib.plot import as_table
from tests.unit.conftest import HERE, ROOT, parsed
from vit import InputError

ARGS = SimpleNamespace(data="shapes", size="tiny", epochs=7, columns=[*compare.COLUMNS],
                       train_images=90, pretraining=["--batch_size", "8", "--mask_ratio", "0.6"])


@pytest.mark.parametrize("spec", ["crossmae:prediction_ratio=0.25:epochs=9:compile",
                                  "imae:teacher={mae:mask_ratio=0.5}"])
def test_commands(spec, monkeypatch):
    """They parse. A spec's own flags come last, so they win. All are for one seed, and use only
    checkpoints that earlier ones have made. Without pixels, features alone are compared."""
    made, columns = {}, {}
    monkeypatch.setattr(compare, "source_of", cache(compare.source_of))            # it is slow
    for column, command in compare.chain(spec, ARGS, 5, "R"):
        _, script, *words = command.split()
        run = parsed(script, words)
        assert {*re.findall(r"R/(\S+)/last.pt", command)} <= {*made}
        assert run.data == "shapes" and (column == "pixels" or run.seed == 5)
        assert column == "pixels" or run.train_images == 90
        if column is None:
            made[run.name] = run
            assert (run.size, run.batch_size, run.runs) == ("tiny", 8, "R")
        else:
            columns[column] = run
    assert [*columns] == [*compare.COLUMNS]
    first, *_, last = *made.values(), *made.values()
    assert last.method == spec.split(":")[0] and last.epochs == (9 if "epochs" in spec else 7)
    if "teacher" in spec:
        assert (first.method, first.mask_ratio) == ("mae", 0.5)
        assert last.teacher == f"R/{first.name}/last.pt"
    assert {key: (run.mode, run.labels) for key, run in columns.items() if key != "pixels"} == {
        "20-NN": ("knn", 1), "linear": ("linear", 1), "1%": ("finetune", 0.01),
        "10%": ("finetune", 0.1), "100%": ("finetune", 1), "10%x20": ("finetune", 0.1)}
    assert columns["10%x20"].epochs == 20
    monkeypatch.setattr(compare.method_of(spec), "reconstruct", None)
    assert "pixels" not in dict(compare.chain(spec, ARGS, 5, "R"))


def test_lengths(folder, capsys):
    """The epochs that are said first are those of finetune.py."""
    columns = ["pixels", "20-NN", "linear", "10%", "100%", "10%x20"]
    compare.say_lengths(SimpleNamespace(data=str(folder), size="micro", epochs=3, train_images=None,
                                        columns=columns))
    said = capsys.readouterr().out
    assert said.startswith("each method and seed: pretraining 3 epochs of 40 images, linear ")
    assert said.endswith(", 10%x20 20 of 4\n")
    for mode, labels, column in (("linear", 1, "linear"), ("finetune", 0.1, "10%"),
                                 ("finetune", 1, "100%")):
        flags = parsed("finetune.py", ["--mode", mode, "--labels", f"{labels}", "--data",
                                       str(folder), "--checkpoint", "tests/models/mae.pt"])
        flags.checkpoint = ROOT / flags.checkpoint
        run, *_ = finetune.prepare(flags, HERE, finetune.Classifier)
        assert f"{column} {run.epochs} of {run.images}" in said


def test_changed_code_is_another_run(monkeypatch, tmp_path):
    """Code of the class, of its parents and of vit.py counts, but no comments or docstrings."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compare.vit, "__file__", str(tmp_path / "vit.py"))
    files = {"vit": "x = 1", "parent_of": "class Parent:\n    a = 1", "imae": "c = 1",
             "mine": "from parent_of import Parent\nclass Mine(Parent):\n    b = 1"}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setitem(compare.METHODS, "mine", importlib.import_module("mine").Mine)
    first = compare.source_of("mine:teacher={imae}")
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(f'"""About it."""\n{text}  # a comment')
        assert compare.source_of("mine:teacher={imae}") == first
        (tmp_path / f"{name}.py").write_text(text.replace("1", "2"))
        assert compare.source_of("mine:teacher={imae}") != first
        (tmp_path / f"{name}.py").write_text(text)


def test_goes_on_where_it_stopped(monkeypatch, tmp_path):
    """Only results without a line are computed, after their encoder. A failed command is named, and
    what needs it does not run."""
    done, out, bad = [], tmp_path / "new/x.jsonl", set()

    def run(command, *_):
        if command in bad:
            raise compare.Failed(f"{command} failed")
        done.append(command)
        return {"top1": 50.0}
    monkeypatch.setattr(compare, "run", run)

    def run_all(source="0", jobs=1):
        done.clear()
        chains = [(dict(table="t", encoder=name, seed=0, source=source), [
            (None, f"{name}: train"), ("linear", f"{name}: linear"), ("10%", f"{name}: 10%")])
            for name in "ab"]
        failed = compare.run_all(chains, out, jobs)
        return failed, sorted(done), [(x["encoder"], x["column"]) for x in compare.read_lines(out)]
    bad |= {"a: train", "b: linear"}
    assert run_all() == (["a: train failed", "b: linear failed"], ["b: 10%", "b: train"],
                         [("b", "10%")])
    bad.clear()
    failed, ran, lines = run_all(jobs=2)
    assert not failed and "b: 10%" not in ran and len(ran) == 5 and len(lines) == 4
    assert run_all() == ([], [], lines)
    assert len(run_all(source="1")[1]) == 6                # other code
    line = compare.read_lines(out)[-1]
    assert line["numbers"] == {"top1": 50} and "torch" in line["made"] and line["command"]


def test_jobs_side_by_side(monkeypatch, tmp_path):
    """Two that need a teacher do not train it at once."""
    running, done = [], []

    def run(command, *_):
        assert command not in running
        running.append(command)
        time.sleep(0.1)
        running.remove(command)
        done.append(command)
        return {"top1": 1.0}
    monkeypatch.setattr(compare, "run", run)
    chains = [(dict(encoder=name, seed=0), [(None, "teacher"), ("10%", name)]) for name in "ab"]
    assert not compare.run_all(chains, tmp_path / "x", 2) and len(done) == 4


def test_a_command_in_a_process(monkeypatch, tmp_path, capfd):
    """What it prints is shown with a title. A run that has begun is resumed. If a command fails,
    the error has its exit code and its last line."""
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("import sys; print(sys.argv[1:], '\\r'); sys.exit('no luck: é')")
    with pytest.raises(compare.Failed) as error:
        compare.run("python run.py 'a b'", "mae, seed 0")
    assert str(error.value).splitlines() == [
        "mae, seed 0: failed with exit code 1", "  python run.py 'a b'", "  no luck: é"]
    assert "mae, seed 0: ['a b']" in capfd.readouterr().out
    command = "python -c 'import sys; print(sys.argv[1:])' --runs R --name a"
    Path("R/a").mkdir(parents=True)
    Path("R/a/log.jsonl").write_text('{"top1": 1.0}\n{"top1": 2.0}\n')
    assert compare.run(command) == {"top1": 2.0}           # the last row of its log
    assert "['--runs', 'R', '--name', 'a', '--resume']" in capfd.readouterr().out
    Path("R/a").rename("R/b")
    with pytest.raises(FileNotFoundError):
        compare.run(command)
    assert "--name', 'a']" in capfd.readouterr().out


def test_numbers_that_are_printed(pretrain):
    """PSNR and accuracies."""
    def numbers(text):
        return compare.run(shlex.join(["python", "-c", f"print({text!r})"]))
    pretrain("--epochs", "0")
    rows = evaluate.main(["runs/mae", "--mask_ratios", "0.75", "0.5", "--workers", "0"])
    assert numbers(as_table(rows)) == pytest.approx({
        f"random {row['mask_ratio']:.3f} {key}": row[key] for row in rows
        for key in row if key.startswith("psnr")}, abs=1e-3)
    assert numbers("top1 12.50, top5 50.00, on 4 images") == {"top1": 12.5}


def test_jobs_share_gpus(monkeypatch):
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compare.torch.cuda, "device_count", lambda: 2)
    for visible, gpus in ("", "010"), ("4,7", "474"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "".join(x["CUDA_VISIBLE_DEVICES"] for x in compare.environments(3)) == gpus


SCORES = {"mae": (40.0, 41.0, 42.0), "mae:mask_ratio=0.5": (43.0, 43.5, 44.9),  # +3.0, 2.5, 2.9
          "hypermae": (40.4, 41.4, 42.4), "minr": (41.5, 41.0, 43.5)}          # +0.4; 1.5, 0, 1.5


def test_the_rule():
    """Differences are between runs of one seed; clear, if above twice their std and the floor."""
    numbers = compare.Numbers("x, ViT-micro, 10 epochs", [
        dict(encoder=encoder, column="20-NN", seed=seed, numbers={"top1": score})
        for encoder, values in SCORES.items() for seed, score in enumerate(values)])
    rows = [[*row.values()] for row in compare.table_of(numbers, [*SCORES], "20-NN")]
    assert rows == [
        ["mae", "41.0 ± 1.0", "", "", ""],
        ["mae:mask_ratio=0.5", "43.8 ± 1.0", "+3.0  +2.5  +2.9", "+2.8", "clear"],
        ["hypermae", "41.4 ± 1.0", "+0.4  +0.4  +0.4", "+0.4", "not clear"],       # below 0.5
        ["minr", "42.0 ± 1.3", "+1.5  +0.0  +1.5", "+1.0", "not clear"]]           # std 0.87
    assert numbers.minus("mae:mask_ratio=0.5", "mae", "20-NN") == "**+2.8**"
    assert numbers.minus("minr", "mae", "20-NN") == "+1.0"
    numbers.found["mae:mask_ratio=0.5", "20-NN"][0].append(46.0)       # a repeat: four pairs
    assert numbers.differences("mae:mask_ratio=0.5", "mae", "20-NN")[0] == [3, 6]
    del numbers.found["minr", "20-NN"][2]
    assert numbers.minus("minr", "mae", "20-NN") == ""
    assert compare.table_of(numbers, [*SCORES], "20-NN")[3]["by the rule"] == "needs three seeds"
    assert compare.is_clear([0.021] * 3, compare.PIXELS) and not compare.is_clear(
        [0.019] * 3, compare.PIXELS)
    assert not compare.is_clear([17.275 - 17.285, 17.203 - 17.223, 17.176 - 17.206], compare.PIXELS)


def test_main(monkeypatch, tmp_path, capsys):
    """It prints a table for each column that is measured, and draws it. Lines of other settings, of
    other seeds and of older code do not count."""
    def run(command, *_):
        method, seed = re.search(r"--method (\w+)", command), re.search(r"/(\d)/", command)
        if method:
            return {}
        if "pool" in command or "crossmae" in command and seed[1] == "2":
            raise compare.Failed("out of memory")
        return {"top1": 40 + 5 * ("crossmae" in command) + int(seed[1])}
    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(compare, "source_of", cache(compare.source_of))
    out = tmp_path / "x.jsonl"
    words = ["mae", "crossmae", "--out", str(out), "--columns", "20-NN", "--epochs", "3"]
    assert compare.main([*words, "--seeds", "0", "1", "3"]) == 0
    said = capsys.readouterr().out
    assert "shapes, ViT-micro, 3 epochs\n" in said and "42.3" not in said
    assert re.search(r"crossmae +46\.3 ± 1\.5 +\+5\.0  \+5\.0  \+5\.0 +\+5\.0 +clear", said)
    out.write_text(out.read_text() + out.read_text().replace('"top1":4', '"top1":9').replace(
        '"source":"', '"source":"x'))
    assert compare.main([*words, "--seeds", "0", "1", "2"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"mae +41\.0 ± 1\.0", said) and said.endswith("out of memory\n")
    assert "needs three seeds" in said
    svg = out.with_suffix(".svg").read_text()
    assert svg.count('dot"') == 5 and ">crossmae</text>" in svg
    with pytest.raises(InputError, match="nir is not in METHODS of train.py: mae, "):
        compare.main(["mae", "nir"])
