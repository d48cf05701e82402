"""The committed diagrams say what the code does, and are well-formed."""

import re
from html import unescape
from xml.etree import ElementTree

import pytest
import torch

from tests.unit.conftest import FIVE, ROOT
from tests.lib.models import load_model
from train import read_image
from vit import mask_noise, normalize


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/*.svg")), ids=lambda path: path.stem)
def test_well_formed(path):
    """What a picture refers to is in it."""
    svg = path.read_text(encoding="utf-8")
    ids = [part.get("id") for part in ElementTree.fromstring(svg).iter() if part.get("id")]
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', svg)} <= {*ids} and len({*ids}) == len(ids)


def test_hero():
    """The first picture has code of MAE.forward, all of its predictions and the model's loss."""
    svg = (ROOT / ".github/hero.svg").read_text(encoding="utf-8")
    lines = re.findall(r'class="line".*?>(.*?)</text>', svg)
    code = re.sub(r"\s+", "", unescape("".join(lines)))
    statements = re.split(r"(?=ids_keep,ids_mask,_=|latent=|pred=|target=|loss=)", code)[1:]
    source = re.sub(r"#.*|\s+", "", (ROOT / "mae.py").read_text(encoding="utf-8"))
    assert len(statements) == 5 and all(statement in source for statement in statements)
    model = load_model(ROOT / "tests/models/mae.pt")
    image = read_image(ROOT / "tests/models/images/val/automobile/0917.jpg")[None]
    noise = mask_noise("random", 1, model.encoder.grid, generator=torch.Generator().manual_seed(0))
    loss = model(normalize(image, model), noise)[0].item()
    assert float(re.search(r'loss".*?>(.*?)<', svg)[1]) == pytest.approx(loss, abs=0.011)


@pytest.mark.parametrize("name", FIVE)
def test_as_in_the_code(name):
    """A diagram's names and shapes are in the method's file. A note explains the letters of its
    shapes and no others."""
    svg = (ROOT / f".github/diagram_{name}.svg").read_text(encoding="utf-8")
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    code = " ".join(re.findall(r'class="code"[^>]*>(.*?)<', svg))
    assert len(code) > 100 and {*re.findall(r"[A-Za-z_]\w*", code)} <= {*re.findall(r"\w+", source)}
    shapes = re.findall(r"\([^()]*,.*?\)", code)
    assert all(shape in source.replace(" ", "") or f"(B,{shape[1:]}" in source for shape in shapes)
    note = re.search(r">(B images .*?)<", svg)[1]
    assert sorted({*re.findall("[A-Za-z]", " ".join(shapes))}) == sorted(
        {*re.findall(r"\b[A-Za-z]\b", note)})
