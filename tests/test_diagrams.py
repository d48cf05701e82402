"""The committed diagrams are up to date and well-formed, and agree with the code."""

import re
from xml.etree import ElementTree

import pytest

from tests.conftest import ROOT
from tests.diagrams import METHODS, draw
from tests.tour import letters
from train import METHODS as CLASSES

OPTIONS = dict(mae={}, crossmae=dict(prediction_ratio=0.25), hypermae=dict(n_weight_tokens=3),
               minr=dict(groups=3), imae={})
DRAWN = dict(mae=dict(a="3 * K", m="M"), crossmae=dict(a="3 * K", m="P"),      # numbers of tokens
             hypermae=dict(a="2 * K", l="n", w="n"), minr=dict(a="K", z="L - K", l="G", w="G"),
             imae=dict(a="4 * K", b="4 * K", x="2 * K", m="2 * M"))


@pytest.mark.parametrize("file", ["all", *METHODS])
def test_committed(file):
    """Drawing again gives the same file. It is well-formed, and its ids are its own."""
    svg = (ROOT / f".github/diagram_{file}.svg").read_text(encoding="utf-8")
    assert svg == draw(file), "run python -m tests.diagrams"
    ids = [part.get("id") for part in ElementTree.fromstring(svg).iter() if part.get("id")]
    assert len(ids) == len({*ids}) and all(name.startswith(f"{file}-") for name in ids)
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', svg)} <= {*ids}


@pytest.mark.parametrize("name", METHODS)
def test_as_in_the_code(name):
    """A diagram's names and shapes are in the method's file. Its numbers are the model's."""
    svg, source, cls = draw(name), (ROOT / f"{name}.py").read_text(), CLASSES[name]
    code = " ".join(re.findall(r'class="code"[^>]*>(.*?)<', svg))
    assert {*re.findall(r"[A-Za-z_]\w*", code)} - {*re.findall(r"\w+", source)} == set()
    assert all(shape in source.replace(" ", "") for shape in re.findall(r"\([^()]*,.*?\)", code))
    sizes = letters(cls(16, 4, 3, 16, 4, 2, **{**cls.low_res_config, **OPTIONS[name]}))
    assert "K = 4" in svg and all(sizes[x] == int(n) for x, n in re.findall(r"(\w) = (\d+)", svg))
    for token, number in DRAWN[name].items():              # one more is in the legend
        assert svg.count(f'href="#{name}-{token}" x=') - 1 == eval(number, sizes)
