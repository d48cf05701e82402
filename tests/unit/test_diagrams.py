"""The committed diagrams are up to date and well-formed, and agree with the code."""

import re
from base64 import b64decode
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.unit.conftest import ROOT
from tests.diagrams import KEY, METHODS, draw, hero
from tests.tour import letters
from train import METHODS as CLASSES

OPTIONS = dict(mae={}, crossmae=dict(prediction_ratio=0.25), hypermae=dict(n_weight_tokens=3),
               minr=dict(groups=3), imae={})
DRAWN = dict(mae=dict(a="3 * K", m="M", C="1", c="2"),                 # numbers of tokens
             crossmae=dict(a="3 * K", m="P", C="1", c="2"),
             hypermae=dict(a="2 * K", l="n", w="n", C="1", c="1"),
             minr=dict(a="K", z="L - K", l="G", w="G", C="1"),
             imae=dict(a="4 * K", b="4 * K", x="2 * K", m="2 * M", C="3", c="7"))


@pytest.mark.parametrize("file", ["all", *METHODS])
def test_committed(file):
    """Drawing again gives the same file."""
    svg = (ROOT / f".github/diagram_{file}.svg").read_text(encoding="utf-8")
    assert svg == draw(file), "run python -m tests.diagrams"
    ids = [part.get("id") for part in ElementTree.fromstring(svg).iter() if part.get("id")]
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', svg)} <= {*ids}


def test_hero():
    """The committed first picture has the code of MAE.forward, as it is now, and the model's
    numbers and pixels. On other CPUs, these may differ a little."""
    files = [(ROOT / ".github/hero.svg").read_text(encoding="utf-8"), hero()]
    pictures = [[np.asarray(Image.open(BytesIO(b64decode(data)))).astype(float)
                 for data in re.findall(r'base64,(.*?)"', svg)] for svg in files]
    assert all(abs(old - new).mean() < 1 for old, new in zip(*pictures, strict=True))
    losses = [float(re.search(r'class="loss".*?>(.*?)<', svg)[1]) for svg in files]
    assert losses[0] == pytest.approx(losses[1], abs=0.011)
    old, new = (re.sub(r'base64,.*?"|(?<=class="loss").*?<', "", svg) for svg in files)
    assert old == new, "run python -m tests.diagrams"


@pytest.mark.parametrize("name", METHODS)
def test_as_in_the_code(name):
    """A diagram's names and shapes are in the method's file, and a note explains the letters of its
    shapes and no others. Its numbers are the model's."""
    svg, source, cls = draw(name), (ROOT / f"{name}.py").read_text(encoding="utf-8"), CLASSES[name]
    code = " ".join(re.findall(r'class="code"[^>]*>(.*?)<', svg))
    assert {*re.findall(r"[A-Za-z_]\w*", code)} - {*re.findall(r"\w+", source)} == set()
    shapes = re.findall(r"\([^()]*,.*?\)", code)
    assert all(shape in source.replace(" ", "") or f"(B,{shape[1:]}" in source for shape in shapes)
    note = re.search(r">(B images .*?)<", svg)[1]
    assert sorted({*re.findall("[A-Za-z]", " ".join(shapes))}) == sorted(
        {*re.findall(r"\b[A-Za-z]\b", note)})
    sizes = letters(cls(16, 4, 3, 16, 4, 2, **{**cls.low_res_config, **OPTIONS[name]}))
    assert all(sizes[x] == int(n) for x, n in re.findall(r"(\w) = (\d+)", note))
    for token, number in DRAWN[name].items():
        drawn = svg.count(f'href="#{name}-{token}" x=') - (token in KEY)       # one in the legend
        assert drawn == eval(number, sizes), token
