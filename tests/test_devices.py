"""What a GPU would find wrong: the one that is there, or a pretended one, see pretend.py."""

import math
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import train
from tests import bench, pretend
from tests.conftest import GPU
from tests.test_methods import BASE, flags
from train import METHODS


@contextmanager
def real_gpu(monkeypatch):
    """As pretend.gpu, of one that is there: torch warns of waits."""
    with monkeypatch.context() as patch, warnings.catch_warnings():
        patch.setattr(torch.cuda, "is_available", lambda: True)
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: "synchroniz" in str(message) and pretend.wait()
        pretend.WAITS.clear()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield pretend.WAITS
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def gpu(monkeypatch):
    """The functions that were running where something waited for the GPU."""
    with (real_gpu if GPU else pretend.gpu)(monkeypatch) as waits:
        yield waits


def test_the_pretended_gpu_is_one(monkeypatch):
    with pretend.gpu(monkeypatch) as waits:
        x = torch.arange(6.0, device="cuda").view(2, 3)
        assert x.is_cuda and (2 * x + torch.tensor(1.0)).device == pretend.DEVICE
        for wrong in (lambda: x + torch.ones(2, 3), lambda: torch.ones(2, 3)[x.long()]):
            with pytest.raises(RuntimeError, match="tensors on cuda:0 and cpu"):
                wrong()
        assert not waits and x.sum().item() == 15 and len(waits) == 1
        assert not x.cpu().is_cuda and len(waits) == 2


@pytest.mark.parametrize("name, words", [
    ("mae", []), ("mae", ["--amp", "fp16", "--norm_pix_loss", "--accum", "2", "--clip_grad", "1"]),
    ("crossmae", ["--prediction_ratio", "0.25", "--mask", "block"]), ("hypermae", []), ("minr", []),
    ("minr", ["--hypernetwork", "transinr", "--pixel_fraction", "0.3", "--mask", "grid"]),
    ("imae", ["--teacher", "runs/teacher/last.pt", "--same_class", "0.5", "--img_size", "8"])])
def test_training_on_a_gpu(name, words, pretrain, gpu):
    """Also resumed, and streamed (pictures larger than asked for). No step waits for the GPU."""
    if name == "imae":
        pretrain("--img_size", "8", name="teacher")
    words = ["--method", name, *words, "--device", "cuda"]
    pretrain(*words, name=name, own=flags(BASE[name]))
    pretrain(*words, "--epochs", "3", "--resume", name=name, own=flags(BASE[name]))
    assert gpu and not [names for names in gpu if "train_step" in names]


@pytest.mark.parametrize("words", [
    ["--drop_path", "0.1"], ["--mixup", "0.8", "--cutmix", "1", "--randaug", "9", "--erasing", "1"],
    ["--mix_ratio", "0.3"], ["--mode", "linear"], ["--mode", "knn", "--k", "3"],
    ["--pool", "token"]])
def test_finetuning_on_a_gpu(words, tune, gpu):
    assert tune(*words, "--device", "cuda")[1]["top1"] > 0
    assert gpu and not [names for names in gpu if "train_step" in names]


def test_evaluating_on_a_gpu(pretrain, gpu):
    """The figures and measures of all methods; the same numbers as on the CPU."""
    for name in METHODS:
        words = ["--teacher", "runs/mae/last.pt"] if name == "imae" else []
        pretrain("--method", name, *words, name=name, own=flags(BASE[name]))
    words = ["--mask_ratios", "0.75", "--eval", *(f"runs/{name}/last.pt" for name in METHODS)]
    tables = [train.main([*words, "--device", device]) for device in ("cpu", "cuda")]
    for rows in zip(*tables, strict=True):
        numbers = [[v for v in row.values() if isinstance(v, float)] for row in rows]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-2 if GPU else 1e-5)


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
@pytest.mark.parametrize("name", METHODS)
def test_vit_b_on_a_gpu(name, compiled, gpu):
    """20 steps in bf16 on one batch; what attention takes is never the plain one."""
    args = SimpleNamespace(size="base", dim=None, depth=None, heads=None, patch_size=None,
                           batch_size=32, amp="bf16", compile=compiled, grad_checkpointing=False,
                           device="cuda")
    case = bench.Case(name, args, (224, 224))
    losses = [case.step() for _ in range(20)]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert case.attention in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
