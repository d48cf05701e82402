"""What only a GPU finds."""

import inspect
import re
import warnings

import pytest
import torch

from mae import MAE
from tests import analyses, bench, evaluate
from tests.unit.test_methods import BASE, flags
from train import METHODS


@pytest.fixture(autouse=True)
def waits(pytestconfig, monkeypatch):
    """Yield a list of the functions that were running when torch warned of a wait for the GPU."""
    if not pytestconfig.has_gpu:
        pytest.skip("no GPU is available")

    def note(message, *_):
        waits.extend(f.function for f in inspect.stack(0) if "synchroniz" in str(message))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        waits, warnings.showwarning = [], note
        torch.cuda.set_sync_debug_mode("warn")
        yield waits
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("words", [
    "mae", "mae --amp fp16 --norm_pix_loss --accum 2 --clip_grad 1", "hypermae", "minr",
    "minr --hypernetwork transinr --pixel_fraction 0.3 --mask grid",
    "crossmae --prediction_ratio 0.25 --mask block",
    "imae --teacher runs/mae --same_class 0.5 --img_size 8,12"])
def test_training(words, pretrain, waits):
    """Methods train and resume, with images in memory or in files (those larger than --img_size).
    No step waits for the GPU."""
    pretrain("--img_size", "8,12")
    for more in ("", " --epochs 3 --resume"):
        pretrain("--method", *(words + more).split(), name="gpu", own=flags(BASE[words.split()[0]]))
    assert waits and not {"train_step", "draw_batch", "model_inputs"} & {*waits}


@pytest.mark.parametrize("words", [
    "--drop_path 0.1", "--mixup 0.8 --cutmix 1 --randaug 9 --erasing 1", "--mix_ratio 0.3",
    "--mode linear", "--mode knn --k 3", "--pool token"])
def test_finetuning(words, tune, waits):
    assert tune(*words.split())[1]["top1"] > 0
    assert waits and not {"train_step", "draw_batch", "model_inputs"} & {*waits}


class Faded(MAE):
    """A method with after_step, which changes weights in place, as a momentum teacher does."""

    @torch.no_grad()
    def after_step(self, progress):
        self.mask_token.mul_(0.9)


@pytest.mark.parametrize("name", [*METHODS, "faded", "finetune"])
def test_cuda_graphs(name, pretrain, tune, monkeypatch):
    """Losses of 50 steps are those without CUDA graphs."""
    monkeypatch.setitem(METHODS, "faded", Faded)
    histories, compile_as = [], torch.compile
    for mode in ("reduce-overhead", None):
        modes = []

        def compiled(model, **more):
            modes.append(more["mode"])
            return compile_as(model, **{**more, "mode": mode})
        monkeypatch.setattr(torch, "compile", compiled)
        words = ["--compile", "--epochs", "10", "--lr", "1e-3"]
        if name == "finetune":
            content, _ = tune(*words, "--drop_path", "0.5", name=f"{mode}")
        else:
            content = pretrain(*words, "--method", name, name=f"{mode}", own=flags(BASE[name]))
        histories.append([row["loss"] for row in content["history"]])
        assert modes == ["reduce-overhead"]
    assert histories[0] == pytest.approx(histories[1], rel=1e-4)


def test_evaluating(pretrain, capsys):
    """tests.evaluate and tests.analyses print the same numbers as on the CPU."""
    for name in METHODS:
        teacher = ["--teacher", "runs/mae"] if name == "imae" else []
        pretrain("--method", name, *teacher, name=name, own=flags(BASE[name]))
    words = [*(f"runs/{name}/last.pt" for name in METHODS), "--mask_ratios", "0.75", "--device"]
    numbers = [[value for row in evaluate.main([*words, device]) for value in row.values()
                if isinstance(value, float)] for device in ("cpu", "cuda")]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-2)
    capsys.readouterr()
    for device in ("cpu", "cuda"):
        analyses.main(["--device", device, *(f"runs/{name}" for name in METHODS)])
        numbers.append([float(x) for x in re.findall(r" (-?\d+\.\d+)", capsys.readouterr().out)])
    assert len(numbers[2]) > 50 and numbers[2] == pytest.approx(numbers[3], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize("words", [name + more for name in METHODS for more in ("", " --compile")])
def test_vit_b(words, monkeypatch, capsys):
    """In 20 steps in bf16 on one batch, the loss falls. Attention has a fused kernel."""
    losses, step = [], bench.Case.step
    monkeypatch.setattr(bench.Case, "step", lambda case: losses.append(step(case)) or losses[-1])
    bench.main(["--batch_size", "32", "--amp", "bf16", "--method", *words.split()])
    assert losses[-1] < losses[0] and "attention: MATH" not in capsys.readouterr().out
