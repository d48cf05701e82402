"""Pictures of points and lines (tests/lib/plot.py), and the curves of runs (tests/curves.py)."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tests import curves
from tests.lib.plot import draw
from vit import InputError


def parts_of(path):
    """Return [(words, x, y)] of a picture's texts, and [(class, x, y)] of its marks."""
    svg = path.read_text(encoding="utf-8")
    ElementTree.fromstring(svg)                            # it is well-formed
    texts, marks = (re.findall(pattern, svg) for pattern in (
        r'<text .*?x="(.*?)" y="(.*?)".*?>(.*?)</text>',
        r'"mark (.*?)" .*?translate\((.*?) (.*?)\) scale\((.*?)\)'))
    return [(words, float(x), float(y)) for x, y, words in texts], [
        (f"{kind}{size}", float(x), float(y)) for kind, x, y, size in marks]


def test_points_are_where_the_axes_say(tmp_path):
    """Larger is right and up. Panels side by side share the name of x."""
    panel = dict(title="a < b", x="time", series=[
        ("one", "dot", [(10, 0.4), (30, 0.8)]), ("two", "line", [(10, 0.6), (20, 0.4)]),
        ("one", "mean", [(20, 0.6)])])
    draw(tmp_path / "x.svg", [panel])
    texts, marks = parts_of(tmp_path / "x.svg")
    x_of = {words: x for words, x, _ in texts}             # the numbers at the axes
    y_of = {words: y - 6 for words, _, y in texts}
    assert marks[2:] == [(kind, pytest.approx(x_of[x], abs=0.1), pytest.approx(y_of[y], abs=0.1))
                         for kind, x, y in (("c0 dot4", "10", "0.4"), ("c0 dot4", "30", "0.8"),
                                            ("c1 3.5", "10", "0.6"), ("c1 3.5", "20", "0.4"),
                                            ("c0 8", "20", "0.6"))]
    assert x_of["10"] < x_of["30"] and y_of["0.4"] > y_of["0.8"] and "a &lt; b" in x_of
    draw(tmp_path / "x.svg", [panel, dict(panel, x="time")])
    assert [words for words, *_ in parts_of(tmp_path / "x.svg")[0]].count("time") == 1


def test_curves_of_runs(tmp_path, monkeypatch, capsys):
    """A line goes through the rows that have a number. What a run lacks gets no line, and two runs
    with one name are told apart."""
    monkeypatch.chdir(tmp_path)
    logs = {"a/x": [dict(epoch=i, loss=1 / i, **({"psnr_masked": 10 + i} if i % 2 else {}))
                    for i in range(1, 6)],
            "b/x": [dict(epoch=0, top1=12.5), dict(epoch=1, loss=float("nan"), top1=50.0),
                    dict(epoch=2, loss=2.0, top1=60.0)]}
    for name, rows in logs.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loss, psnr, top1 = curves.panels_of(["a/x", "b/x/log.jsonl"])
    assert loss["series"] == [("a/x", "line", [(i, 1 / i) for i in range(1, 6)]),
                              ("b/x", "line", [(2, 2.0)])]
    assert psnr["series"] == [("a/x", "line", [(1, 11), (3, 13), (5, 15)])]
    assert top1["series"] == [("b/x", "line", [(0, 12.5), (1, 50), (2, 60)])]
    assert curves.panels_of(["a/x"])[0]["series"][0][0] == "x"
    assert str(curves.main(["a/x"])) == "a/x/curves.svg" and "see " in capsys.readouterr().out
    assert str(curves.main(["a/x", "b/x"])) == "curves.svg"
    assert len(parts_of(tmp_path / "curves.svg")[1]) == 2 + (5 + 1) + 3 + 3
    (tmp_path / "bad.jsonl").write_text("no log")
    for words, part in (("c", "c does not exist"), ("bad.jsonl", "is no log of train.py"),
                        ("a/x --out x.png", "--out x.png must end with .svg")):
        with pytest.raises(InputError, match=part):
            curves.main(words.split())
    assert not Path("x.png").exists()


ROWS = [  # the last row of a log, what stands beside its score, whether it has learned something
    (dict(psnr_masked=19.09, psnr_mean_colour=13.31), "19.09 dB; mean colour: 13.31 dB", True),
    (dict(psnr_masked=14.28, psnr_mean_colour=14.3), "14.28 dB; mean colour: 14.30 dB", False),
    (dict(top1=30.0, standard_error=2.0, largest_class=12.5), "30.0 +- 2.0 %", True),
    (dict(top1=16.0, standard_error=2.0, largest_class=12.5), "largest class: 12.5 %", False)]


@pytest.mark.parametrize("row, part, learned", ROWS)
def test_the_end_of_a_run(tmp_path, capsys, row, part, learned):
    """A run ends with its score beside that of having learned nothing, which curves.svg also shows,
    with its files and what to do next. Who has learned nothing is told what helps."""
    (tmp_path / "log.jsonl").write_text(json.dumps(dict(epoch=9, loss=1.0, **row)) + "\n")
    curves.conclude(SimpleNamespace(method="mae", folder=tmp_path, config={}), ["a", "b"])
    said = capsys.readouterr().out
    assert part in said and ("--epochs" in said) != learned and "curves.svg" in said
    assert (f"finetune.py --checkpoint {tmp_path}\n" in said) == ("psnr_masked" in row)
    run = SimpleNamespace(method="mae", folder=tmp_path, config={"norm_pix_loss": True})
    curves.conclude(run, [])                               # unlabelled images, normalised targets
    said = capsys.readouterr().out
    assert ("--epochs" in said) == (not learned and "top1" in row)
    assert ("--data LABELS" in said) == ("psnr_masked" in row)
    words = {words for words, *_ in parts_of(tmp_path / "curves.svg")[0]}
    assert words & {"mean colour", "largest class"}


@pytest.mark.parametrize("system, quoted", [("linux", "'my photos'"), ("win32", '"my photos"')])
def test_the_next_command_can_be_pasted(tmp_path, monkeypatch, capsys, system, quoted):
    """A folder's name with a space is quoted as the system's shell needs it."""
    monkeypatch.chdir(tmp_path)
    Path("my photos").mkdir()
    Path("my photos/log.jsonl").write_text(json.dumps(dict(epoch=1, loss=1.0)) + "\n")
    monkeypatch.setattr(sys, "platform", system)
    run = SimpleNamespace(method="mae.l1", folder=Path("my photos"), config={})
    curves.conclude(run, [])                               # tests.why knows mae.l1
    assert "next    python -m tests.why finetune.py" in capsys.readouterr().out
    run.method = "mae"
    curves.conclude(run, [])
    assert f"python finetune.py --checkpoint {quoted} --data LABELS\n" in capsys.readouterr().out
