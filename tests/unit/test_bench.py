"""The benchmark: a row for each method, with its true cost, and the costs that papers give."""

import pytest
import torch

from tests import bench
from tests.lib.plot import as_table
from tests.unit.conftest import FIVE
from train import METHODS
from vit import SIZES


def giga_macs(function, *args):
    """Return the multiply-accumulates of a call, in billions."""
    return bench.count_macs(lambda: function(*args)) / 1e9


def test_a_row_for_every_method(capsys, monkeypatch):
    """Without a GPU, models and images are small by default. What is measured is said first. Times
    are medians over turns, in which all methods take one step, and relative times are per image."""
    turns, timeit = [], bench.Timer.timeit
    monkeypatch.setattr(bench.Timer, "timeit",
                        lambda timer, number: turns.append(timeit(timer, number)) or turns[-1])
    others = [f"{name}:amp=bf16:batch_size=2" for name in FIVE[1:]]
    rows = bench.main(["--warmup", "0", "--steps", "3", "--method", "mae", *others])
    assert [row["method"].split(":")[0] for row in rows] == [*FIVE]
    assert [row["batch"] for row in rows] == [64, 2, 2, 2, 2] and len(turns) == 15
    medians = [sorted(turn.median for turn in turns[i::5])[1] for i in range(5)]
    assert [float(row["ms/step"]) for row in rows] == pytest.approx(
        [1e3 * x for x in medians], rel=1e-3)
    assert [row["time"] for row in rows] == pytest.approx(
        [1, *(x / 2 / (medians[0] / 64) for x in medians[1:])])
    said = capsys.readouterr().out
    assert as_table(rows) in said and said.splitlines()[1].endswith(
        "0 + 3 steps for each method: --size micro --batch_size 64")
    minr = METHODS["minr"](32, 4, 3, **SIZES["micro"], **METHODS["minr"].small_config)
    macs = giga_macs(minr, torch.zeros(1, 3, 32, 32))
    assert float(rows[3]["GMAC/img"]) == pytest.approx(macs, rel=1e-3)


def test_a_step_is_the_loops(monkeypatch):
    """A measured step calls what train.fit calls in a step."""
    called = []
    for name in ("draw_batch", "before_step", "after_step"):
        method = getattr(METHODS["mae"], name)
        monkeypatch.setattr(METHODS["mae"], name, lambda *inputs, name=name, method=method: (
            called.append(name), method(*inputs))[1])
    bench.main("--warmup 0 --steps 2 --method mae --batch_size 2".split())
    steps = ["before_step", "draw_batch", "after_step"]
    assert called[1:] == steps * (len(called) // 3) and len(called) > 3        # torch also warms up


def test_cost_at_vit_b():
    """A step of HyperMAE costs about two thirds of MAE's. (Table 1 has 6.42 and 9.78 GMAC, with
    work that the releases could skip.)"""
    with torch.device("meta"):                             # values do not matter here
        images = torch.zeros(1, 3, 224, 224)
        mae, hypermae = (giga_macs(METHODS[name](), images) for name in ("mae", "hypermae"))
    assert (mae, hypermae) == pytest.approx((9.78, 6.42), rel=0.02)
