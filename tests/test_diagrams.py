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
from tests.diagrams import KEY, METHODS, draw, hero, run_forward
from tests.tour import letters
from train import METHODS as CLASSES
from vit import denormalize

OPTIONS = dict(mae={}, crossmae=dict(prediction_ratio=0.25), hypermae=dict(n_weight_tokens=3),
               minr=dict(groups=3), imae={})
DRAWN = dict(mae=dict(a="3 * K", m="M", C="1", c="2"),                 # numbers of tokens
             crossmae=dict(a="3 * K", m="P", C="1", c="2"),
             hypermae=dict(a="2 * K", l="n", w="n", C="1", c="1"),
             minr=dict(a="K", z="L - K", l="G", w="G", C="1"),
             imae=dict(a="4 * K", b="4 * K", x="2 * K", m="2 * M", C="3", c="7"))


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


@pytest.mark.parametrize("file", ["all", *METHODS])
def test_words(file):
    """Labels do not overlap, and none is smaller than 12 pixels in a picture 830 pixels wide."""
    svg = ElementTree.fromstring(draw(file))
    assert svg.get("viewBox").startswith("0 0 830 ")
    assert min(int(part.get("font-size", 12)) for part in svg.iter()) == 12
    for group in svg.iter():
        boxes = []
        for text in group.findall("{*}text[@class][@x]"):
            if text.get("class") in ("code", "soft") and not text.get("text-anchor"):
                size = len(text.text) * (7.3 if text.get("class") == "code" else 5.5)
                x, y = float(text.get("x")), float(text.get("y"))
                assert all(abs(y - Y) > 8 or abs(x - X) >= (size + other) / 2
                           for X, Y, other in boxes), text.text
                boxes.append((x, y, size))
