"""A tiny data set, and commands that train on it in a folder of their own."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import finetune
import train

ROOT = Path(__file__).parent.parent
TINY = ["--dim", "16", "--depth", "2", "--heads", "2", "--patch_size", "4", "--batch_size", "8",
        "--epochs", "2", "--warmup_epochs", "1", "--workers", "0"]
DECODER = ["--decoder_dim", "16", "--decoder_depth", "1", "--decoder_heads", "2"]

torch.set_num_threads(1)


def write_pictures(root, classes, n, side=16, seed=0):
    """n PNG files a class: a random ramp, more red, green or blue from class to class."""
    rng = np.random.default_rng(seed)
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            x = rng.integers(0, 60, (side, side, 3)) + np.linspace(0, 60, side)[:, None]
            x[..., (2 * c) % 3] += 120
            Image.fromarray(x.astype("uint8")).save(root / name / f"{i}.png")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """40 + 11 pictures of 16x16 in two classes, as train/ and val/."""
    root = tmp_path_factory.mktemp("data")
    write_pictures(root / "train", "ab", 20, seed=1)
    write_pictures(root / "val", "ab", 6, seed=2)
    (root / "val/b/5.png").unlink()  # an odd number
    return root


@pytest.fixture
def pretrain(folder, tmp_path, monkeypatch):
    """pretrain("--flag", "value", name="x") runs train.py in tmp_path -> its last.pt."""
    monkeypatch.chdir(tmp_path)

    def run(*words, name="mae", own=DECODER):
        train.main(["--data", str(folder), "--name", name, *TINY, *own, *words])
        return train.read(Path("runs", name, "last.pt"))

    return run


@pytest.fixture
def tune(folder, pretrain):
    """tune("--flag", "value", name="y") runs finetune.py on the run "mae"; its last.pt and row."""
    pretrain()

    def run(*words, name="tuned"):
        row = finetune.main(
            ["--data", str(folder), "--name", name, "--checkpoint", "runs/mae/last.pt", *TINY[8:],
             *words]
        )
        path = Path("runs", name, "last.pt")
        return train.read(path) if path.exists() else None, row

    return run


@pytest.fixture
def refused(capsys):
    """refused(main, words, "part", ...) expects exit code 2 and one line that holds the parts."""

    def run(main, words, *parts):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and len(lines) == 1, lines
        for part in parts:
            assert part in lines[0]

    return run


def shell(*words, processes=0, cwd, check=True):
    """Run a script of the project in a process of its own, or in several under torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(launch if processes else []), str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not check or done.returncode == 0, done.stderr[-3000:]
    return done


@contextmanager
def stopping_after_two(monkeypatch):
    """Stop the run inside, as Ctrl-C does, once it has saved its second epoch."""
    save = train.save

    def save_and_stop(path, content):
        save(path, content)
        if content["epoch"] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "save", save_and_stop)
        yield


def same(a, b, **tolerance):
    """Whether two state dicts are equal, to the bit or within a tolerance."""
    return a.keys() == b.keys() and all(
        torch.allclose(a[k], b[k], **tolerance) if tolerance else torch.equal(a[k], b[k]) for k in a
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left out unless asked for with -m slow")


def pytest_collection_modifyitems(config, items):
    if "slow" in config.getoption("-m"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
