"""The benchmark: a row for each method, with its true cost, and the costs that papers give."""

from types import SimpleNamespace

import pytest
import torch

from tests import bench
from tests.lib.plot import as_table
from tests.unit.conftest import FIVE
from train import METHODS
from vit import SIZES


def giga_macs(function, *args):
    """Return the multiply-accumulates of a call, in billions."""
    with torch.no_grad():
        return bench.count_flops(lambda: function(*args)) / 2e9


def test_a_row_for_every_method(capsys):
    """Without a GPU, models and images are small by default. What is measured is said first."""
    others = [f"{name}:batch_size=2" for name in FIVE[1:]]
    rows = bench.main(["--warmup", "0", "--steps", "2", "--method", "mae:amp=bf16", *others])
    assert [row["method"].split(":")[0] for row in rows] == [*FIVE]
    assert [row["batch"] for row in rows] == [64, 2, 2, 2, 2]
    said = capsys.readouterr().out
    assert as_table(rows) in said and said.splitlines()[1].endswith(
        "0 + 2 steps for each method: --size micro --batch_size 64")
    minr = METHODS["minr"](32, 4, 3, **SIZES["micro"], **METHODS["minr"].low_res_config)
    macs = giga_macs(minr, torch.zeros(1, 3, 32, 32))
    assert float(rows[3]["GMAC/img"]) == pytest.approx(macs, rel=1e-3)


def test_times_are_relative_within_a_turn(monkeypatch):
    """What slows the machine for some turns does not change the ratio of two methods, img/s agree
    with it, and both are per image."""
    clock = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def case(spec, B, durations):
        steps = iter(durations)

        def step():
            clock[0] += next(steps)
            return 1.0
        return SimpleNamespace(
            spec=spec, batch_size=B, step=step, memory=lambda: 8 * B, img_size=(8, 8), flops=24e12,
            macs=1, device=torch.device("cpu"), run=SimpleNamespace(compile=False),
            here=SimpleNamespace(dtype=None))
    first, second = bench.measure([case("a", 4, [9, 2, 20, 2]), case("b", 3, [9, 3, 30, 30])], 3, 1)
    assert (first["img/s"], first["ms/step"], first["time"], first["TFLOP/s"]) == (
        "2", "2000", 1, "12")
    assert (second["img/s"], second["ms/step"], second["time"], second["memory"]) == (
        "1", "3000", 2, 0.75)


def test_cost_at_vit_b():
    """A step of HyperMAE costs about two thirds of MAE's. (Table 1 has 6.42 and 9.78 GMAC, with
    work that the releases could skip.)"""
    with torch.device("meta"):                             # values do not matter here
        images = torch.zeros(1, 3, 224, 224)
        mae, hypermae = (giga_macs(METHODS[name](), images) for name in ("mae", "hypermae"))
    assert (mae, hypermae) == pytest.approx((9.78, 6.42), rel=0.02)
