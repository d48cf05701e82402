"""The trained models in tests/models/ show whether a change of the code breaks old checkpoints."""

import re

import pytest
import torch

import finetune
import train
from tests import evaluate
from tests.unit.conftest import FIVE, ROOT
from train import METHODS
from vit import SIZES

MODELS = ROOT / "tests/models"
ROWS = re.findall(r"^\| (\w+) \|.*\| ([\d.]+) \| ([\d.]+), ([\d.]+) \|$",
                  (MODELS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_all_methods_are_there():
    assert [name for name, *_ in ROWS] == [*FIVE, "tiny"]


@pytest.mark.parametrize("name, psnr, top1, top5", ROWS)
def test_trained_model(name, psnr, top1, top5, monkeypatch):
    """A file is small, has today's defaults and finite weights in half precision. PSNR and 20-NN
    are as in tests/models/README.md."""
    path = MODELS / f"{name}.pt"
    content, size = train.read_checkpoint(path), SIZES["tiny" if name == "tiny" else "micro"]
    defaults = METHODS[content["method"]].low_res_config
    assert content["config"].items() >= {**defaults, **size}.items()
    assert path.stat().st_size < (12e6 if name == "tiny" else 1.2e6)
    assert all(x.dtype == torch.float16 and x.isfinite().all() for x in content["model"].values())
    monkeypatch.setattr(evaluate, "save_picture", lambda *_: None)     # writes no files
    shown = ["--data", "shapes", "--eval_images", "100", "--workers", "0"]
    row, = evaluate.main([str(path), "--mask_ratios", "0.75", *shown])
    assert row["psnr_masked"] == pytest.approx(float(psnr), abs=0.02)
    row = finetune.main(["--checkpoint", str(path), "--mode", "knn", "--train_images", "500",
                         *shown])
    assert (row["top1"], row["top5"]) == pytest.approx((float(top1), float(top5)), abs=2)
