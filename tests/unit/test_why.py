"""tests/why.py: each variation is small, names a line of the code, and changes the training."""

import inspect
import re
from functools import cache

import pytest
import torch

import finetune
import train
from tests import compare, why
from tests.unit.conftest import ROOT, TINY, same
from vit import InputError

TINY = [*TINY[:-4], "--warmup_epochs", "0.5", "--workers", "0", "--epochs", "1"]


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    """Programs know the variations' classes."""
    for name, cls in why.CLASSES.items():
        monkeypatch.setitem(train.METHODS, name, cls)


def model_of(name, **more):
    """Return a tiny model of a class, with the same weights each time."""
    torch.manual_seed(0)
    cls = train.METHODS[name]
    sizes = dict(img_size=16, patch_size=4, dim=16, depth=2, heads=2)
    return cls(**{**sizes, **cls.small_config, **more})


@pytest.mark.parametrize("name", why.VARIATIONS)
def test_line(name):
    """The line occurs once in its file. A class is at most eight lines. Texts end in a full stop or
    a question mark."""
    found = why.VARIATIONS[name]
    assert (ROOT / found.file).read_text().count(found.line) == 1
    assert "?" in found.question and found.paper.endswith(".")
    cls = why.CLASSES.get(name.split(":")[0])
    if cls:
        code = inspect.getsource(cls)
        code = code[re.search("^class ", code, re.M).start():]
        assert len([line for line in code.splitlines() if line.strip()]) <= 8
