"""tests/results.py on a tiny folder of images, and tests/tables.py on numbers made by hand."""

import io
import json
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
        return SimpleNamespace(stdout=out.getvalue())
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
    assert [line["command"] for line in lines()] == commands and len({*commands}) == 8
    for command in commands:
        assert command.split()[0] in ("python", "torchrun")
        assert not any(word.startswith("/") for word in command.split())
    numbers = lines()[2]["numbers"]
    assert len(numbers["psnr"]) == 9 and lines()[0]["numbers"]["train_minutes"] == 0

    results.main(WORDS)                                    # nothing is left to do
    assert len(commands) == 8
    checkpoint = Path(commands[1].split("--checkpoint ")[1].split()[0])
    checkpoint.unlink()
    results.main(WORDS)                                    # and nothing needs the checkpoint
    assert len(commands) == 8
    Path("out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()[:-1]))
    results.run = lambda command: commands.append(command) or TUNED
    results.main(WORDS)
    assert commands[8:] == [commands[0], commands[7]]      # trained again, for what is missing

    results.main(["--table", "--out", "out.jsonl"])        # from the file alone
    printed = capsys.readouterr().out
    hidden = numbers["psnr"][1]["psnr_hidden"]
    assert "### PSNR on data/tiny (data/tiny, ViT-micro, 1 epochs of pretraining --batch" in printed
    assert "mean over 8 validation images" in printed and f"{hidden:.2f} (1) / " in printed
    assert "| 50.0 (1) | 50.0 (1) | 50.0 (1) | 50.0 (1) | 0.0 |" in printed


def test_commands_in_the_file():
    for line in (ROOT / "tests/results.jsonl").read_text().splitlines():
        words = json.loads(line)["command"].split()
        assert words[0] in ("python", "torchrun")
        assert not any(word.startswith(("/", "~")) for word in words)


def test_printed_results_are_up_to_date():
    lines = (ROOT / "tests/results.jsonl").read_text().splitlines()
    text = tables.report(lines)
    assert (ROOT / "tests/RESULTS.md").read_text() == text, (
        "python -m tests.results --table > tests/RESULTS.md")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark, table in ("results", tables.summary(lines)), ("claims", tables.verdicts(lines)):
        assert f"<!-- {mark} -->\n{table}<!-- /{mark} -->" in readme, f"put there:\n{table}"


@pytest.mark.parametrize("differences, verdict", [
    ([1.0, 1.2, 0.8], "holds"), ([-1.0, -1.2, -0.8], "fails"),
    ([3.0, 3.0, -0.1], "cannot be told"),                  # by the sign
    ([0.1, 1.0, 2.0], "cannot be told"),                   # by the deviation
    ([1.0, 2.0, 3.0], "cannot be told"),                   # 2 is not more than 2 x 1
    ([0.0, 0.0, 0.0], "cannot be told"), ([5.0, 5.0], "seeds 0, 1 of 3 so far"),
    ([5.0], "seeds 0 of 3 so far"), ([], "seeds none of 3 so far")])
def test_the_rule(differences, verdict):
    assert tables.verdict(dict(enumerate(differences))) == verdict


@pytest.mark.parametrize("values, text", [
    ([], ""), ([61.08], "61.1 (1)"), ([60.0, 61.0], "60.5 ± 0.7 (2)"),
    ([60.0, 61.0, 62.0], "61.0 ± 1.0")])
def test_a_cell(values, text):
    assert tables.cell(dict(enumerate(values)), 1) == text


def line(encoder, column, seed, commit="abc", **numbers):
    return json.dumps(dict(table="cifar10, ViT-tiny, 9 epochs", encoder=encoder, column=column,
                           seed=seed, command="", commit=commit, date="2026-11-22", torch="2",
                           machine="CPU", numbers=numbers))


def test_a_claim_is_paired_by_seed_and_the_last_line_counts():
    file = [line("mae", "1% (18 epochs)", 0, commit="f00d", top1=0)]
    file += [line("mae", "1% (18 epochs)", seed, top1=40 + seed) for seed in (2, 0, 1)]
    file += [line("scratch", "1% (18 epochs)", seed, top1=30 + 1.1 * seed) for seed in range(3)]
    text, short = tables.report(file), tables.verdicts(file)
    assert ("| MAE: pretraining helps | MAE above from scratch | 1% |  |  | 10%, 100% |\n"
            "| MAE: pretraining helps | MAE above untrained |  |  |  | 1%, 10%, 100% |") in short
    assert "| holds | fails | cannot be told | not three seeds yet |\n" in short
    assert ("| pretraining helps | MAE above from scratch | 1% (18 epochs) | ours | +10.00, +9.90, "
            "+9.80 | +9.90 ± 0.10 | holds |") in text
    assert "| MAE |  |  | 41.0 ± 1.0 |  |  |  |" in text and "f00d" not in text
    with pytest.raises(ValueError, match="1% .18 epochs. and 1% .9 epochs. in one file"):
        tables.report([*file, line("mae", "1% (9 epochs)", 0, top1=40)])


def test_what_is_read_of_psnr_and_measures():
    def row(mask, ratio, hidden):
        return dict(mask=mask, mask_ratio=ratio, psnr_hidden=hidden, psnr_decoded=hidden - 1)
    rows = [row("random", 0.5, 20.0), row("random", 0.75, 18.5), row("random", 0.9, 16.0),
            row("grid", 0.75, 19.0)]
    printed = ["PSNR in dB, mean over 7 images", "  mix  psnr  branch dominant  control dominant",
               "0.200  9.00           -0.010             0.400", "see     runs/unmix.png",
               "block  visible  share of visible", "    0    0.030             0.252",
               "  sum    0.055             0.252"]
    record = json.loads(line("imae", "PSNR on cifar10", 0, psnr=rows, printed=printed))
    found = tables.quantities(record)
    assert found["own random 0.75 decoded"] == 17.5 and found["change under grid"] == 0.5
    assert found["fall from 0.5 to 0.75"] == 1.5 and found["fall from 0.75 to 0.9"] == 2.5
    assert found["mix 0.2 branch dominant"] == -0.01 and found["mix 0.2 control dominant"] == 0.4
    assert found["block sum visible"] == 0.055 and "block see visible" not in found
    record["column"] = "PSNR on shapes"
    assert "other grid 0.75 hidden" in tables.quantities(record)
    assert "change under grid" not in tables.quantities(record)


def test_claims_name_what_there_is():
    columns = {*tables.CLASSES, *tables.ROBUST, tables.HIDDEN, tables.DECODED, tables.ELSEWHERE}
    columns |= {f"block sum {part}" for part in tables.ATTENTION} | {0.5}
    columns |= {f"mix {mix} {source}" for mix in (0.2, 0.4) for source in tables.R2}
    assert {*tables.NAMES} == {*results.PRETRAINED, "scratch"}
    for entries in tables.CLAIMS.values():
        for _, _, first, second, asked in entries:
            assert {first, second} <= {*tables.NAMES}
            for column in asked:
                assert {*([column] if isinstance(column, str) else column)} <= columns
