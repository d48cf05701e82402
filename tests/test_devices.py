"""What a GPU would find wrong, without one: see pretend.py."""

import pytest
import torch

import train
from tests import pretend
from tests.test_methods import BASE, flags

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def test_the_pretended_gpu_is_one(monkeypatch):
    with pretend.gpu(monkeypatch) as waits:
        x = torch.arange(6.0, device="cuda").view(2, 3)
        assert x.is_cuda and (2 * x + torch.tensor(1.0)).device == pretend.DEVICE
        for wrong in (lambda: x + torch.ones(2, 3), lambda: torch.ones(2, 3)[x.long()],
                      lambda: torch.rand(2, device="cuda", generator=torch.Generator())):
            with pytest.raises(RuntimeError, match="device|cpu"):
                wrong()
        assert not waits and x.sum().item() == 15 and len(waits) == 1
        assert not x.cpu().is_cuda and len(waits) == 2


@pytest.mark.parametrize("name, words", [
    ("mae", []), ("mae", ["--amp", "fp16", "--norm_pix_loss", "--accum", "2", "--clip_grad", "1"]),
    ("crossmae", ["--prediction_ratio", "0.25", "--mask", "block"]), ("hypermae", []), ("minr", []),
    ("minr", ["--hypernetwork", "transinr", "--pixel_fraction", "0.3", "--mask", "grid"]),
    ("imae", ["--teacher", "runs/teacher/last.pt", "--same_class", "0.5"])])
def test_training_on_a_gpu(name, words, pretrain, monkeypatch):
    """Also resumed. No step waits for the GPU, but for fp16's scaler, which is torch's."""
    if name == "imae":
        pretrain(name="teacher")
    words = ["--method", name, *words, "--device", "cuda"]
    with pretend.gpu(monkeypatch) as waits:
        pretrain(*words, name=name, own=flags(BASE[name]))
        pretrain(*words, "--epochs", "3", "--resume", name=name, own=flags(BASE[name]))
    steps = [names for names in waits if "train_step" in names]
    assert waits and all(names[0] == "train_step" for names in steps) and (
        bool(steps) == ("fp16" in words))


def test_streaming_to_a_gpu(pretrain, monkeypatch):
    """Pictures larger than asked for; images and partners."""
    with pretend.gpu(monkeypatch) as waits:
        pretrain("--method", "imae", "--img_size", "8", "--device", "cuda")
    assert waits and not [names for names in waits if "train_step" in names]


@pytest.mark.parametrize("words", [
    ["--drop_path", "0.1"], ["--mixup", "0.8", "--cutmix", "1", "--randaug", "9", "--erasing", "1"],
    ["--mix_ratio", "0.3"], ["--mode", "linear"], ["--mode", "knn", "--k", "3"],
    ["--pool", "token"]])
def test_finetuning_on_a_gpu(words, tune, monkeypatch):
    with pretend.gpu(monkeypatch) as waits:
        row = tune(*words, "--device", "cuda")[1]
    assert row["top1"] > 0 and not [names for names in waits if "train_step" in names]


def test_evaluating_on_a_gpu(pretrain, monkeypatch):
    """The figures and measures of all methods; the same numbers as on the CPU."""
    for name in train.METHODS:
        words = ["--teacher", "runs/mae/last.pt"] if name == "imae" else []
        pretrain("--method", name, *words, name=name, own=flags(BASE[name]))
    words = ["--mask_ratios", "0.75", "--eval", *(f"runs/{name}/last.pt" for name in train.METHODS)]
    rows = train.main(words)
    with pretend.gpu(monkeypatch):
        for row, other in zip(rows, train.main([*words, "--device", "cuda"]), strict=True):
            numbers = [[v for v in r.values() if isinstance(v, float)] for r in (row, other)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
