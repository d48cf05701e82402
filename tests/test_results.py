"""tests/results.py on a tiny folder of images, and tests/tables.py on numbers made by hand."""

import io
import json
import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

import finetune
import train
from tests import results, tables
from tests.conftest import ROOT, write_pictures

WORDS = ["--data", "data/tiny", "--other", "shapes", "--epochs", "1", "--device", "cpu",
         "--batch_size", "16", "--only", "untrained", "--seeds", "3", "--out", "out.jsonl"]
TUNED = dict(top1=50.0, train_minutes=0.5)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """The commands that have been run, in a folder with tiny data: pretraining in a process of its
    own, nearest neighbours and PSNR in this one, which has imported torch. Fine-tuning and PSNR on
    other data are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").symlink_to(ROOT / "train.py")
    for split, n in (("train", 16), ("val", 4)):
        write_pictures(Path("data/tiny", split), "ab", n)
    real, done = results.run, []

    def process(words, **options):
        if "--epochs" in words:
            return subprocess.run(words, **options)
        with redirect_stdout(io.StringIO()) as out:
            {"train.py": train, "finetune.py": finetune}[words[1]].main(words[2:])
        return SimpleNamespace(stdout=out.getvalue(), returncode=0)
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(
        run=process, PIPE=subprocess.PIPE, getoutput=subprocess.getoutput))

    def run(command):
        done.append(command)
        if "--data shapes" in command:
            return dict(psnr=lines()[-1]["numbers"]["psnr"], printed=["mean over 8 of shapes"])
        return TUNED if "--eval_every" in command else real(command)
    monkeypatch.setattr(results, "run", run)
    return done


def lines():
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def test_goes_on_where_it_stopped(commands, capsys):
    real = results.run

    def stop_at_linear(command):
        if "linear" in command:
            raise KeyboardInterrupt
        return real(command)
    results.run = stop_at_linear                           # monkeypatch puts the first one back
    with pytest.raises(KeyboardInterrupt):
        results.main(WORDS)
    assert [line["column"] for line in lines()] == [
        "pretraining", "20-NN", "PSNR on data/tiny", "PSNR on shapes"]
    results.run = real
    results.main(WORDS)
    assert commands.pop(4) == commands[0]                  # which was finished
    assert [line["command"] for line in lines()] == commands and len({*commands}) == 8
    numbers = lines()[2]["numbers"]
    rows = train.main(commands[2].split()[2:])             # what the command itself returns
    assert len(rows) == len(numbers["psnr"]) == 9
    for row, read in zip(rows, numbers["psnr"]):
        assert read == {key: pytest.approx(row[key], abs=1e-3) for key in read}
    assert lines()[0]["numbers"]["train_minutes"] == 0

    Path(commands[1].split("--checkpoint ")[1].split()[0]).unlink()
    results.main(WORDS)                                    # nothing is left that would need it
    assert len(commands) == 8
    Path("out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()[:-1]))
    results.run = lambda command: commands.append(command) or TUNED
    results.main(WORDS)
    assert commands[8:] == [commands[0], commands[7]]      # trained again, for what is missing

    results.main(["--table", "--out", "out.jsonl"])        # from the file alone
    printed = capsys.readouterr().out
    hidden = numbers["psnr"][1]["psnr_masked"]
    assert "### PSNR on data/tiny (data/tiny, ViT-micro, 1 epochs of pretraining --batch" in printed
    assert "mean over 8 validation images" in printed and f"{hidden:.2f} (seed 3) / " in printed
    assert "| 50.0 (seed 3) | 50.0 (seed 3) | 0 |" in printed


def test_the_commands_of_all_encoders(monkeypatch, tmp_path):
    """Of two seeds: a student's teacher is trained first, with that seed. What is begun goes on."""
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(results, "run", lambda command: asked.append(command) or TUNED)
    results.main("--data ten --epochs 4 --finetune_epochs 2 --processes 2 --only imae scratch "
                 "--seeds 5 6 --mask_ratio 0.5 --out new/out.jsonl".split())
    runs, start = "runs/results/ten-ViT-micro-4-epochs-mask_ratio-0.5/5", (
        "torchrun --standalone --nproc_per_node 2 ")
    one = f"--data ten --size micro --epochs 4 --seed 5 --runs {runs} --name "
    psnr = "--mask_ratios 0.5 0.75 0.9 --masks random grid block"
    last, tail = f"--checkpoint {runs}/imae/last.pt", f"--seed 5 --runs {runs} --name "
    wanted = [
        f"{start}train.py --method mae --mask_ratio 0.5 {one}mae",
        f"{start}train.py --method imae --teacher {runs}/mae/last.pt --mask_ratio 0.5 {one}imae",
        f"{start}finetune.py --mode knn {last} --data ten --seed 5",
        f"python train.py --eval {runs}/imae/last.pt --data ten {psnr}",
        f"python train.py --eval {runs}/imae/last.pt --data shapes {psnr}"]
    for source, name in ((last, "imae"), ("--mode scratch --size micro", "scratch")):
        for words, epochs, column in (("--mode linear", 4, "linear"), (
                "--labels 0.01 --batch_size 24", 12, "1"), ("--labels 0.1", 8, "10"),
                ("--mode finetune" * (name == "imae"), 2, "100")):
            if (name, column) != ("scratch", "linear"):
                command = (f"{start}finetune.py {source} {words} --data ten --epochs {epochs} "
                           f"--eval_every {epochs} {tail}{name}_{column}_{epochs}")
                wanted.append(" ".join(command.split()))
    assert asked[:12] == wanted
    assert asked[12:] == [c.replace("--seed 5", "--seed 6").replace(f"{runs}", f"{runs[:-1]}6")
                          for c in wanted]
    out = Path("new/out.jsonl")
    out.write_text("".join(out.read_text().splitlines(keepends=True)[1:-1]))
    results.main("--data ten --epochs 4 --finetune_epochs 2 --processes 2 --only imae scratch "
                 "--seeds 5 6 --mask_ratio 0.5 --out new/out.jsonl".split())
    assert asked[24:] == [wanted[0], wanted[1], asked[23]]             # the teacher, at least
    with out.open("a") as file:
        file.write('{"table": ')
    with pytest.raises(SystemExit, match="new/out.jsonl, line 25, is not whole"):
        results.main(["--table", "--out", "new/out.jsonl"])


def test_what_a_command_gives(monkeypatch, tmp_path, refused):
    """The last row of its log, and the time of all of them. It resumes, but not another command's
    run, and ends with what fails."""
    monkeypatch.chdir(tmp_path)
    words, code = [], 0

    def process(command, **options):
        words.append(command)
        Path("runs/a/log.jsonl").write_text('{"train_s": 60, "top1": 1}\n'
                                            '{"train_s": 30, "top1": 2}\n')
        return SimpleNamespace(stdout="top1 3.25, top5 9", returncode=code)
    monkeypatch.setattr(results, "subprocess", SimpleNamespace(run=process, PIPE=None))
    command = "python train.py --runs runs --name a"
    for _ in range(2):
        assert results.run(command) == {"train_s": 30, "top1": 2, "train_minutes": 1.5}
        assert words[-1] == [*command.split(), "--resume"]
    assert results.run("python finetune.py --mode knn") == {"top1": 3.25}
    assert "--resume" not in words[-1]
    with pytest.raises(SystemExit, match="runs/a is of another command: python train.py --runs"):
        results.run("python train.py --lr 1 --runs runs --name a")
    code = 3
    with pytest.raises(SystemExit, match="exit code 3 of python train.py"):
        results.run(command)
    refused(results.main, ["--table", "--out", "gone.jsonl"], "gone.jsonl has no results")
    Path("empty.jsonl").touch()
    refused(results.main, ["--table", "--out", "empty.jsonl"], "empty.jsonl has no results")


def test_commands_in_the_file():
    for record in results.read_lines(ROOT / "tests/results.jsonl"):
        words = record["command"].split()
        assert words[0] in ("python", "torchrun")
        assert not any(word.startswith(("/", "~")) for word in words)


def test_printed_results_are_up_to_date(tmp_path):
    names = ("README.md", "tests/results.jsonl", "tests/RESULTS.md")
    (tmp_path / "tests").mkdir()
    for name in names:
        shutil.copy(ROOT / name, tmp_path / name)
    tables.main(tmp_path / "tests")
    for name in names:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), (
            f"{name}: python -m tests.tables")


@pytest.mark.parametrize("differences, verdict", [
    ([1.0, 1.2, 0.8], "holds"), ([-1.0, -1.2, -0.8], "fails"),
    ([3.0, 3.0, -0.1], "cannot be told"), ([0.1, 1.0, 2.0], "cannot be told"),
    ([1.0, 2.0, 3.0], "cannot be told"),                   # 2 is not more than 2 x 1
    ([0.0, 0.0, 0.0], "cannot be told"), ([5.0, 5.0], "2 of 3 seeds so far"),
    ([], "0 of 3 seeds so far")])
def test_the_rule(differences, verdict):
    assert tables.verdict(dict(enumerate(differences))) == verdict


@pytest.mark.parametrize("values, text", [
    ([], ""), ([61.08], "61.1 (seed 0)"), ([60.0, 61.0], "60.5 ± 0.7 (seeds 0, 1)"),
    ([60.0, 61.0, 62.0], "61.0 ± 1.0")])
def test_a_cell(values, text):
    assert tables.cell(dict(enumerate(values)), 1) == text


def line(encoder, column, seed, commit="abc", table="cifar10, ViT-tiny, 9 epochs", **numbers):
    return dict(table=table, encoder=encoder, column=column, seed=seed, command="", commit=commit,
                date="2026-11-22", torch="2", machine="CPU", numbers=numbers)


def test_a_claim_is_paired_by_seed_and_the_last_line_counts():
    file = [line("mae", "1% (18 epochs)", 0, commit="f00d", top1=0)]
    file += [line("mae", "1% (18 epochs)", seed, top1=40 + seed) for seed in (2, 0, 1)]
    file += [line("scratch", "1% (18 epochs)", seed, top1=30 + 1.1 * seed) for seed in range(3)]
    file += [line("mae", "pretraining", seed, train_minutes=m) for seed, m in enumerate((9, 6, 7))]
    file += [line("mae", "20-NN", seed, top1=1.0) for seed in range(4)]
    file += [line("mae", "20-NN", 0, table="shapes, ViT-tiny, 9 epochs", top1=77.0)]
    text = tables.report(file)
    assert ("| pretraining helps | MAE above from scratch | 1% (18 epochs) | none | +10.00, +9.90, "
            "+9.80 | +9.90 ± 0.10 | holds |") in text
    four = "1.0 ± 0.0 (seeds 0, 1, 2, 3)"
    assert f"| MAE | {four} |  | 41.0 ± 1.0 |  |  | 6 |" in text and "f00d" not in text
    assert text.index(four) < text.index("(shapes, ViT-tiny") < text.index("77.0 (seed 0)")
    assert " Seed 0, 1, 2, 3: CPU; torch 2; commit abc; 2026-11-22." in text
    with pytest.raises(ValueError, match="1% .18 epochs. and 1% .9 epochs. in one file"):
        tables.report([*file, line("mae", "1% (9 epochs)", 0, top1=40)])


def test_what_is_read_of_psnr_and_measures():
    def row(mask, ratio, hidden):
        return dict(mask=mask, mask_ratio=ratio, psnr_masked=hidden, psnr_decoded=hidden - 1)
    rows = [row("random", 0.5, 20.0), row("random", 0.75, 18.5), row("random", 0.9, 16.0),
            row("grid", 0.75, 19.0)]
    printed = ["PSNR in dB, mean over 7 images", "  mix  psnr  branch dominant  control dominant",
               "0.200  9.00           -0.010             0.400", "see     runs/unmix.png",
               "block  visible  share of visible", "    0    0.030             0.252",
               "  sum    0.055             0.252"]
    record = line("imae", "PSNR on cifar10", 0, psnr=rows, printed=printed)
    found = tables.quantities(record)
    assert found["own random 0.75 decoded"] == 17.5 and found["change under grid"] == 0.5
    assert found["fall from 0.5 to 0.75"] == 1.5 and found["fall from 0.75 to 0.9"] == 2.5
    assert found["mix 0.2 branch dominant"] == -0.01 and found["mix 0.2 control dominant"] == 0.4
    assert found["block sum visible"] == 0.055 and "block see visible" not in found
    record["column"] = "PSNR on shapes"
    assert "other grid 0.75 hidden" in tables.quantities(record)
    assert "change under grid" not in tables.quantities(record)


def test_claims_name_what_there_is():
    """For each claim's encoders there are numbers in its columns: in the file or, of masks and of
    linear maps, in what --eval prints of each model. Accuracy is taken to be there of all
    pretrained encoders."""
    assert {*tables.NAMES} == {*results.PRETRAINED, "scratch"} and {*tables.PAPERS} == {
        *tables.CLAIMS}
    setup = tables.read_setups(results.read_lines(ROOT / "tests/results.jsonl"))[0]
    there = {key for key, values in setup.numbers.items() if values}
    there |= {(name, column) for name in results.PRETRAINED
              for column in (*tables.ROBUST, *tables.TOP1)}
    there |= {("imae", f"mix {mix} {source}") for mix in (0.2, 0.4) for source in tables.R2}
    for _, _, first, second, columns in sum(tables.CLAIMS.values(), []):
        for column in columns:
            a, b = (column, column) if isinstance(column, str) else column
            assert (first, a) in there and ((second, b) in there or b == 0.5)


def test_the_tables_of_the_readme(monkeypatch):
    """A column for each budget, and a table; of methods, not of their variants."""
    monkeypatch.setattr(tables, "CLAIMS", {"MAE": [
        ("helps", "none", "mae", "scratch", tables.SHARES),
        ("rises", "none", "imae", "mae", ["1%"])]})
    small, large = "cifar10, ViT-micro, 9 epochs", "cifar10, ViT-tiny, 50 epochs --batch_size 512"
    file = [line(name, f"{share} (2 epochs)", seed, table=small, top1=n * way)
            for share, way, seeds in (("1%", 1, 3), ("10%", -1, 3), ("100%", 1, 2))
            for seed in range(seeds) for name, n in (("mae", 5 + 0.1 * seed), ("scratch", 7))]
    file += [line("mae", "10% (2 epochs)", seed, table=large, top1=10 * seed) for seed in range(3)]
    file += [line(name, "10% (2 epochs)", seed, table=large, top1=9)
             for name in ("scratch", "crossmae_last") for seed in range(3)]
    setups = tables.read_setups(file)
    assert tables.verdicts(setups) == (
        "| claim | A above B | ViT-micro, 9 epochs | ViT-tiny, 50 epochs |\n"
        "| --- | --- | --- | --- |\n| MAE: helps | MAE above from scratch | **fails** 1%; "
        "**holds** 10%; **2 of 3 seeds so far** 100% | **cannot be told** 10% |\n")
    heads = "| PSNR, hidden / decoded | 20-NN | 1% | 10% | 100% |\n"
    assert tables.summary(setups) == (
        f"| ViT-micro, 9 epochs {heads}{'| --- ' * 6}|\n"
        "| MAE |  |  | 5.1 ± 0.1 | -5.1 ± 0.1 | 5.0 ± 0.1 (seeds 0, 1) |\n"
        "| from scratch |  |  | 7.0 ± 0.0 | -7.0 ± 0.0 | 7.0 ± 0.0 (seeds 0, 1) |\n\n"
        f"| ViT-tiny, 50 epochs {heads}{'| --- ' * 6}|\n| MAE |  |  |  | 10.0 ± 10.0 |  |\n"
        "| from scratch |  |  |  | 9.0 ± 0.0 |  |\n")
    assert "above MAE" not in tables.report(file) and "### Claims: MAE" in tables.report(file)
