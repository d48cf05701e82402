"""The trained models in tests/models/ show whether a change of the code breaks old checkpoints."""

import re

import pytest
import torch

import train
from tests import evaluate
from tests.lib.models import load_encoder
from tests.unit.conftest import FIVE, ROOT
from train import METHODS
from vit import SIZES

MODELS = ROOT / "tests/models"
PSNR = dict(mae=17.451, crossmae=17.337, hypermae=16.631, minr=16.233, imae=16.688, tiny=18.170)


def test_the_page_has_all_models():
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \|", (MODELS / "README.md").read_text(), re.MULTILINE)
    assert rows == [*FIVE, "tiny"] == [*PSNR]


@pytest.mark.parametrize("name", PSNR)
def test_trained_model(name, monkeypatch):
    """A file is small, has today's defaults and finite weights in half precision. On shapes, which
    it has not seen in training, its PSNR is what it was."""
    path = MODELS / f"{name}.pt"
    content, size = train.read_checkpoint(path), SIZES["tiny" if name == "tiny" else "micro"]
    defaults = METHODS[content["method"]].small_config
    assert content["config"].items() >= {**defaults, **size}.items()
    assert path.stat().st_size < (12e6 if name == "tiny" else 1.2e6)
    assert all(x.dtype == torch.float16 and x.isfinite().all() for x in content["model"].values())
    monkeypatch.setattr(evaluate, "save_picture", lambda *_: None)     # writes no files
    row, = evaluate.main([str(path), *"--mask_ratios 0.75 --data shapes --eval_images 20".split()])
    assert row["psnr_masked"] == pytest.approx(PSNR[name], abs=0.02)


def test_an_encoder_keeps_its_mean_and_std(tmp_path):
    """They are the file's own, not ImageNet's, and normalize needs them."""
    own = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    torch.save({**train.read_checkpoint(MODELS / "mae.pt"), **own}, tmp_path / "own.pt")
    encoder = load_encoder(tmp_path / "own.pt")
    assert {"mean": encoder.mean, "std": encoder.std} == own
    assert load_encoder(MODELS / "minr.pt").mean == (0, 0, 0)          # its class's
