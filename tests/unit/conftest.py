"""A tiny data set, and commands that train on it in a temporary folder."""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections import namedtuple
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import RLock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

import finetune
import train
from tests import evaluate
from vit import InputError, pair

ROOT = Path(__file__).parent.parent.parent
FIVE = ("mae", "crossmae", "hypermae", "minr", "imae")     # METHODS may also have your own
TINY = ["--dim", "16", "--depth", "2", "--heads", "2", "--patch_size", "4", "--batch_size", "8",
        "--epochs", "2", "--warmup_epochs", "0.5", "--workers", "0"]
DECODER = ["--decoder_dim", "16", "--decoder_depth", "1", "--decoder_heads", "2"]

torch.set_num_threads(1)
tqdm.set_lock(RLock())                                     # not one that a killed process can keep
tqdm.monitor_interval = 0                                  # no monitor thread: a fork would lose it
HERE = train.Process(0, 1, torch.device("cpu"), torch.float32, workers=0)


def settings(**more):
    """Return the settings of an MAE's run by the paper's recipe, without random crops and flips,
    with `more` added or replaced."""
    flags = parsed("train.py", "--crop 1 --no-flip --batch_size 64".split())
    run = train.settle(flags, dict(img_size=(224, 224), dim=768), train.MAE.recipe, {}, 10 ** 6, 0)
    values = {**run._asdict(), **more}
    return namedtuple("Settings", values)(**values)


def parsed(script, words):
    """Return the flags of `python train.py ...` or finetune.py: nothing runs."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((train, "pretrain"), (evaluate, "compare"),
                              (finetune, "finetune nearest_neighbours evaluate_checkpoint")):
            for name in names.split():
                patch.setattr(module, name, lambda flags, *_: seen.append(flags))
        if script == "-m":                                 # tests.evaluate
            evaluate.main(words[1:])
        else:
            {"train.py": train, "finetune.py": finetune}[script].main(words)
    return seen[0]


def write_pictures(root, classes, n, side=16, seed=0):
    """Write n PNG files of `side` pixels, an int or (H, W), per class. Each is a random ramp with
    more red, green or blue, by class."""
    rng, (H, W) = np.random.default_rng(seed), pair(side)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            x = rng.integers(0, 60, (H, W, 3)) + np.linspace(0, 60, W)[:, None]
            x[..., (2 * c) % 3] += 120
            Image.fromarray(x.astype("uint8")).save(root / name / f"{i}.png")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of 40 + 11 images of 16x16 pixels in two classes, as train/ and val/."""
    root = tmp_path_factory.mktemp("data")
    write_pictures(root / "train", "ab", 20, seed=1)
    write_pictures(root / "val", "ab", 6, seed=2)
    (root / "val/b/5.png").unlink()                        # an odd number
    return root


@pytest.fixture
def pretrain(folder, tmp_path, monkeypatch):
    """pretrain("--flag", "value", name="x") runs train.py in tmp_path and returns its last.pt."""
    monkeypatch.chdir(tmp_path)

    def run(*words, name="mae", own=DECODER):
        train.main(["--data", str(folder), "--name", name, *TINY, *own, *words])
        return train.read_checkpoint(Path("runs", name, "last.pt"))
    return run


@pytest.fixture
def tune(folder, pretrain):
    """tune("--flag", "value", name="y") runs finetune.py on the run "mae" and returns its last.pt
    and row."""
    pretrain("--epochs", "1")

    def run(*words, name="tuned"):
        training = [] if "knn" in words else [*TINY[8:], "--name", name]
        row = finetune.main(["--data", str(folder), "--checkpoint", "runs/mae/last.pt", "--workers",
                             "0", *training, *words])
        path = Path("runs", name, "last.pt")
        return train.read_checkpoint(path) if path.exists() else None, row
    return run


@pytest.fixture
def refused(capsys):
    """refused(main, words, "part", ...) expects an InputError of one line with these parts. Returns
    what is printed."""
    def run(main, words, *parts):
        capsys.readouterr()
        with pytest.raises((InputError, SystemExit)) as stop:
            main(words)
        out, err = capsys.readouterr()
        # argparse has printed its line; of a worker's traceback, shell prints the last line
        line = (err if stop.value.args == (2,) else str(stop.value)).strip().splitlines()[-1]
        assert [part for part in parts if part not in line] == [], line
        return out + err
    return run


@pytest.fixture
def spy(monkeypatch):
    """spy(owner, "name", what) returns a list, to which each call of owner.name adds what(its
    arguments)."""
    def watch(owner, name, what):
        seen, function = [], getattr(owner, name)

        def watched(*inputs, **more):
            seen.append(what(*inputs, **more))
            return function(*inputs, **more)
        monkeypatch.setattr(owner, name, watched)
        return seen
    return watch


def fork(work, *inputs):
    """Start a process that does work(*inputs) and prints to the files out and err. Forking saves
    the seconds that importing torch takes. The process leads a process group."""
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork processes")

    def body():
        gc.freeze()                                        # collecting would copy all its memory
        os.setsid()
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), fd)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        faulthandler.enable(sys.stderr)                    # for SIGABRT, see `ended`
        work(*inputs)
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    return process


def script(file, *words):
    """Do what `python train.py ...` does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)          # not torchrun's, inherited by forking
    sys.argv = [file, *map(str, words)]
    runpy.run_path(str(ROOT / file), run_name="__main__")


def torchrun(work, *words, processes=2):
    """Let torchrun's own agent fork processes that do work(*words). They meet on the loopback
    interface, so that nothing waits for a name server."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"            # only in this process: it is a fork
    config = LaunchConfig(1, 1, processes, run_id="test", rdzv_backend="c10d", max_restarts=0,
                          rdzv_endpoint="localhost:0", start_method="fork", local_addr="localhost")
    elastic_launch(config, work)(*words)


def ended(process, seconds=120):
    """Wait for a process, kill what is left of its group, and return its exit code and the lines
    that it has written to stderr: after `seconds`, they end with where each process hangs."""
    process.join(seconds)
    code = process.exitcode
    with suppress(ProcessLookupError):                     # e.g. a worker whose parent has died
        if code is None:
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(1)                                  # the stacks are written
        os.killpg(process.pid, signal.SIGKILL)
    return code, Path("err").read_text().strip().splitlines()


def together(*words, processes=2, work=script):
    """Return what `python train.py ...` prints if several processes run it under torchrun."""
    code, lines = ended(fork(partial(torchrun, processes=processes), work, *words))
    assert code == 0, lines
    return Path("out").read_text()


@contextmanager
def stopping_after_two(monkeypatch):
    """Stop the run inside once it has saved its second epoch."""
    save = train.save_run
    def save_and_stop(*inputs):
        save(*inputs)
        *_, history, _ = inputs
        if history[-1]["epoch"] == 2:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "save_run", save_and_stop)
        yield


def same(a, b, **tolerance):
    """Return whether two state dicts are equal, to the bit or within a tolerance."""
    equal = partial(torch.allclose, **tolerance) if tolerance else torch.equal
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and equal(a[k], b[k]) for k in a)


def pytest_configure(config):
    """Hide GPUs from all tests but test_devices.py: GPUs add in another order and in bf16, and a
    forked process cannot use autograd where torch sees one. (Workers of xdist have no sys.argv.)"""
    config.addinivalue_line("filterwarnings", "ignore:The image decoding:DeprecationWarning")
    if not any("test_devices" in word for word in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.ones(1, requires_grad=True).backward()           # a first backward pass that follows an
    config.has_gpu = torch.cuda.is_available()             # export starts threads; then forks fail
    for backend in (torch.cuda, torch.backends.mps):
        backend.is_available = lambda: False
