"""The committed diagrams are up to date and well-formed, and agree with the code."""

import re
from base64 import b64decode
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import ROOT
from tests.diagrams import METHODS, draw, hero, run_forward
from tests.tour import letters
from train import METHODS as CLASSES
from vit import denormalize

OPTIONS = dict(mae={}, crossmae=dict(prediction_ratio=0.25), hypermae=dict(n_weight_tokens=3),
               minr=dict(groups=3), imae={})
DRAWN = dict(mae=dict(a="3 * K", m="M"), crossmae=dict(a="3 * K", m="P"),      # numbers of tokens
             hypermae=dict(a="2 * K", l="n", w="n"), minr=dict(a="K", z="L - K", l="G", w="G"),
             imae=dict(a="4 * K", b="4 * K", x="2 * K", m="2 * M"))


def parts_of(svg, prefix):
    """Return the elements of an SVG. It is well-formed, and its ids are its own."""
    parts = [*ElementTree.fromstring(svg).iter()]
    ids = [part.get("id") for part in parts if part.get("id")]
    assert len(ids) == len({*ids}) and all(name.startswith(f"{prefix}-") for name in ids)
    assert {*re.findall(r'(?:url\(|href=")#([\w-]+)', svg)} <= {*ids}
    return parts


@pytest.mark.parametrize("file", ["all", *METHODS])
def test_committed(file):
    """Drawing again gives the same file."""
    svg = (ROOT / f".github/diagram_{file}.svg").read_text(encoding="utf-8")
    assert svg == draw(file), "run python -m tests.diagrams"
    parts_of(svg, file)


def test_hero():
    """The committed first picture has the code of MAE.forward, as it is now, and the model's
    numbers and pixels. On other CPUs, these may differ a little."""
    svg, now = (ROOT / ".github/hero.svg").read_text(encoding="utf-8"), hero()
    parts, pixels = parts_of(svg, "hero"), []
    said = {cls: [x.text for x in parts if x.get("class") == cls] for cls in
            ("line", "say", "loss")}
    forward = (ROOT / "mae.py").read_text(encoding="utf-8").split("    def forward(")[1]
    code = re.sub(r"#.*|\s", "", forward.split('"""')[2].split("return")[0])
    assert re.sub(r"\s", "", "".join(said["line"])) == code, "run python -m tests.diagrams"

    names = run_forward()
    model, images, noise = names["self"], names["images"], names["noise"]
    with torch.no_grad():
        assert float(*said["loss"]) == pytest.approx(model(images, noise)[0].item(), abs=0.006)
    numbers = re.findall(r"\d+", " ".join(said["say"]))
    assert numbers == [str(letters(model)[x]) for x in "LM"]

    pictures = [[b64decode(data) for data in re.findall(r'base64,(.*?)"', x)] for x in (svg, now)]
    for old, new in zip(*pictures, strict=True):
        pixels.append(np.asarray(Image.open(BytesIO(old))).astype(float))
        assert np.abs(pixels[-1] - np.asarray(Image.open(BytesIO(new)))).mean() < 1
    changing = r'base64,.*?"|(?<=class="loss").*?<'
    assert re.sub(changing, "", svg) == re.sub(changing, "", now), "run python -m tests.diagrams"
    decoded, mask = model.reconstruct(images, noise)
    completed = denormalize(model.encoder.copy_visible(decoded, images, mask), model)[0]
    drawn = pixels[5][3::6, 3::6, :3] / 255                # the sixth picture; pixels are 6 wide
    assert np.abs(drawn - completed.permute(1, 2, 0).numpy()).mean() < 0.01


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
