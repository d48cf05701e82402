"""The trained models in tests/models/ show whether a change of the code breaks old checkpoints."""

import re

import pytest
import torch

import finetune
import train
from tests.unit.conftest import FIVE, ROOT
from train import METHODS
from vit import SIZES

MODELS = ROOT / "tests/models"
ROWS = re.findall(r"^\| (\w+) \|.*\| ([\d.]+) \| ([\d.]+), ([\d.]+) \|$",
                  (MODELS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_all_methods_are_there():
    """They were trained with today's defaults."""
    assert [name for name, *_ in ROWS] == [*FIVE, "tiny"]
    for name, *_ in ROWS:
        content = train.read_checkpoint(MODELS / f"{name}.pt")
        cls, size = METHODS[content["method"]], SIZES["tiny" if name == "tiny" else "micro"]
        assert content["config"].items() >= {**cls.low_res_config, **size}.items()
        assert (MODELS / f"{name}.pt").stat().st_size < (12e6 if name == "tiny" else 1.2e6)


@pytest.mark.parametrize("name, psnr, top1, top5", ROWS)
def test_numbers(name, psnr, top1, top5, tmp_path, monkeypatch):
    """PSNR and 20-NN are as in tests/models/README.md. Weights are in half precision and finite."""
    for value in train.read_checkpoint(MODELS / f"{name}.pt")["model"].values():
        assert value.dtype == torch.float16 and value.isfinite().all()
    monkeypatch.setattr(train, "save_picture", lambda *_: None)        # writes no files
    shown = ["--data", "shapes", "--eval_images", "100", "--workers", "0"]
    row, = train.main(["--eval", str(MODELS / f"{name}.pt"), "--mask_ratios", "0.75", *shown])
    assert row["psnr_masked"] == pytest.approx(float(psnr), abs=0.02)
    row = finetune.main(["--checkpoint", str(MODELS / f"{name}.pt"), "--mode", "knn",
                         "--train_images", "500", *shown])
    assert (row["top1"], row["top5"]) == pytest.approx((float(top1), float(top5)), abs=2)
