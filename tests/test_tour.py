"""Shape comments are true: everything runs with sizes that are all different, and each comment such
as `# (B, 1+K, D)` is compared with the tensors that its line makes. Tests of the tour follow."""

import ast
import importlib
import itertools
import math
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torchvision
from torchvision.io import decode_image

import finetune
import train
import vit
from crossmae import CrossMAE
from hypermae import HyperMAE
from imae import IMAE
from mae import MAE
from minr import MINR
from tests import analyses, tour
from tests.conftest import ROOT, settings
from tests.tour import TINY, flatten, letters, main, trace
from tests.trace import learned
from train import center_crop, read_image
from vit import denormalize, mask_noise, pair, patchify, to_released, transfer

FILES = [str(ROOT / f"{name}.py")
         for name in "vit mae crossmae hypermae minr imae finetune tests/analyses".split()]
SIZES = dict(img_size=(55, 91), patch_size=(5, 7), in_chans=3, dim=76, depth=5, heads=4)
B, L, RATIO = 10, 143, dict(mask_ratio=0.78)
DECODER = dict(RATIO, decoder_dim=92, decoder_depth=6, decoder_heads=4)
CROSS = dict(DECODER, decoder_depth=9, prediction_ratio=0.5)
HYPER = dict(RATIO, n_weight_tokens=14, feat2w_depth=2, mlp_depth=4, hidden_dim=37, pe_dim=22)
RENDER = dict(RATIO, hidden_dim=74, groups=37, ff_dim=34, mlp_depth=4)
CASES = [
    (MAE, [DECODER, dict(DECODER, norm_pix_loss=False)]),
    (CrossMAE, [CROSS, dict(CROSS, feature_maps="last"), dict(CROSS, project_maps=True),
                dict(CROSS, feature_maps=(0, 2, 4), softmax_weights=True, self_attention=True)]),
    (HyperMAE, [HYPER, dict(HYPER, shared_blocks=1), dict(HYPER, loss_on="all"),
                dict(HYPER, modulated_layer=0, relu_around_m=True)]),
    (MINR, [dict(RENDER, modulated_layers=(0, 3)), dict(RENDER, hypernetwork="transinr"),
            dict(RENDER, encode_visible_only=True, loss_on="masked"),
            dict(RENDER, pixel_fraction=0.3, coord_jitter=True)]),
    (IMAE, [dict(DECODER, norm_pix_loss=True, teacher=dict(dim=116, depth=1, heads=2)), DECODER])]
POOLS = [dict(pool="mean"), dict(pool="token"), dict(pool="joined", dim=8, heads=2),
         dict(pool="extra", extra_tokens=6), dict(pool="joined", extra_tokens=6),
         dict(probe=True, norm=True)]

LETTERS = {  # what a letter is inside a function, as code; x is its argument
    "normalize_patches": dict(L="patches.shape[1]", N="patches.shape[2]"),
    "unpatchify": dict(C="patches.shape[2] // math.prod(pair(patch_size))"),
    "resize_pos_embed": dict(D="pos_embed.shape[2]", h="grid[0]", w="grid[1]",
                             L_new="math.prod(new_grid)"),
    "Attention.forward": dict(N="x.shape[1]", D="x.shape[2]", heads="self.heads"),
    "Block.forward": dict(N="x.shape[1]", D="x.shape[2]"),
    "ViT.embed": dict(K="self.num_patches if ids_keep is None else ids_keep.shape[1]",
                      D="self.dim"),
    "ViT.add_learned_tokens": dict(K="tokens.shape[1]", D="self.dim"),
    "ViT.encode": dict(K="tokens.shape[1]", D="self.dim"),
    "ViT.targets": dict(P="ids.shape[1]"),
    "ViT.paste_patches": dict(P="ids.shape[1]"),
    "CrossAttention.forward": dict(P="x.shape[1]", heads="self.heads"),
    "CrossBlock.forward": dict(P="x.shape[1]"),
    "CrossMAE.decode": dict(P="ids.shape[1]"),
    "decoder_attention": dict(heads="mae.decoder_blocks[0].attn.heads"),
    "HyperMAE.decode": dict(P="coords.shape[1]"),
    "MINR.modulate": dict(a="74 if i else 68", b="len(bias)", g="counts[i]"),  # as in RENDER
    "MINR.decode": dict(N="coords.shape[-2]", a_0="2 * self.ff_dim", b_i="len(bias)"),
    "MINR.forward": dict(N="len(coords)"),
    "MINR.render_masked": dict(N="len(coords)", H_new="size[0]", W_new="size[1]"),
    "IMAE.teach": dict(D_m="self.teacher['encoder'].dim"),
    "ridge_r2": dict(N="len(x_val)", T="x.shape[1]", a="x.shape[2]", b="y.shape[2]"),
    "evaluate": dict(b="len(images)"),
    "knn": dict(N="len(train.labels)"),
    "knn.embed": dict(b="len(images)"),
    "knn.score": dict(b="len(images)", k="args.k")}
# the same everywhere (see the top of vit.py), so that their lines need no comment
NAMES = dict(images="(B, C, H, W)", partners="(B, C, H, W)", noise="(B, L)", mask="(B, L)",
             ids_keep="(B, K)", ids_mask="(B, M)")
NOT_SHAPES = {"Sec. 3.4, A.5", "8, 8"}


class Sizes(dict):
    """The size of each letter at a step of a call: the model's, or the function's own."""

    def __init__(self, call, step, sizes):
        super().__init__(sizes)
        self.code = LETTERS.get(step.statement.function, {})
        self.names = {**step.names, **call.inputs}
        self.update({name: x for name, x in self.names.items() if isinstance(x, int)})

    def __getitem__(self, letter):
        if letter in self.code:
            return eval(self.code[letter], globals(), self.names)
        return super().__getitem__(letter)


def shapes_in(comment):
    """Return the shapes in a comment, [[(axes, each)]]: a list for each alternative ("or"), with a
    shape for each value; `each` is true if one shape is for all values."""
    found, end = [], 0
    for group in re.finditer(r"(?<!\w)\(([^()]*,[^()]*)\)( each)?", comment):   # not in N(0, 1)
        if group[1] not in NOT_SHAPES:
            if not found or re.search(r"\b(or|then)\b|;", comment[end:group.start()]):
                found.append([])
            axes = [axis.strip().split(" or ") for axis in group[1].split(",") if axis.strip()]
            found[-1:] = [found[-1] + [(version, bool(group[2]))]
                          for version in itertools.product(*axes)]
            end = group.end()
    return found


def number(axis, sizes):
    """Return the size of an axis, e.g. "1+K" or "2 dim", or None if a letter is unknown. The
    methods' files write p*p for p*q."""
    code = axis.replace("'", "_new").replace("p*p", "p*q").replace(" depth", "_depth")
    try:
        return eval(re.sub(r"(\d) ?(?=[A-Za-z])", r"\1*", code), {"__builtins__": {}}, sizes)
    except (NameError, KeyError, SyntaxError):
        return None


def fits(made, shapes, sizes):
    """Return whether the tensors have these shapes."""
    if len(shapes) == 1 and shapes[0][1] and len(made) > 1:            # each
        shapes = shapes * len(made)
    for tensor, (axes, _) in zip(made, shapes):
        shape = tuple(tensor.shape)
        if axes[0] == "...":
            shape, axes = shape[1 - len(axes):], axes[1:]
        if shape != tuple(number(axis, sizes) for axis in axes):
            return False
    return len(made) == len(shapes)


def runs():
    """Yield (work, model, sizes, whether it makes a loss, features or a reconstruction)."""
    images, noise = torch.rand(B, 3, 55, 91), torch.rand(B, L)
    for cls, cases in CASES:
        for options in cases:
            model, sizes = cls(**SIZES, **options), dict(B=B, **options)
            yield lambda: cls(**SIZES, **options), model, sizes, False
            yield lambda: model(images), model, sizes, True
            yield lambda: model.reconstruct(images, noise), model, sizes, True
        model, sizes = cls(**SIZES, **cases[0]), dict(B=B, **cases[0])
        if cls is MAE:
            yield lambda: model.reconstruct(images, noise, leak_free=True), model, sizes, True
            yield lambda: analyses.decoder_attention(model, images), model, sizes, False
        elif cls is IMAE:
            yield lambda: model.unmix(images, images, torch.rand(B), noise), model, sizes, True
            yield lambda: analyses.latents(model, images, 0.3, "ab"), model, sizes, False
            yield lambda: analyses.subordinate_psnr(model, images, 0.3), model, sizes, False
        elif cls is not HyperMAE:
            yield lambda: analyses.analyse(model, None, images[:4]), model, dict(sizes, B=4), False
    x, y = torch.rand(8, 4, 9), torch.rand(8, 4, 6)
    yield lambda: analyses.ridge_r2(x, y, x[:7], y[:7]), model, sizes, False
    for kind in ("grid", "block"):
        yield lambda: mask_noise(kind, B, (11, 13)), model, sizes, True
    yield lambda: to_released(model), model, sizes, False
    small = MAE(**{**SIZES, "img_size": (10, 21)}, **DECODER).state_dict()
    yield lambda: transfer(model, small, (2, 3)), model, sizes, False
    for options in POOLS:
        model = finetune.Classifier(**{**SIZES, **options}, classes=12)
        sizes = dict(B=B, classes=12, width=76)
        yield lambda: model(images, torch.arange(B)), model, sizes, True
    args = settings(k=4, eval_images=None)
    data = train.ImageDataset((255 * images).byte(), torch.arange(B), [*"abcdefghijkl"])
    yield lambda: finetune.evaluate(finetune.knn(model, data, args, (55, 91)), data, args,
                                    (55, 91)), model, sizes, False


def tensors_of(step):
    """Return [(name, tensor)] for tensors of two or more axes that a line assigns or returns."""
    names, values = step.statement.targets, step.values
    if isinstance(step.statement.node, ast.Return) and not step.statement.only_names:
        values = values[0] if isinstance(values[0], tuple) else values
        names = [""] * len(values)
    elif not isinstance(step.statement.node, (ast.Assign, ast.AugAssign)):
        return []
    return [(name, x) for name, x in zip(names, values)
            if isinstance(x, torch.Tensor) and x.ndim > 1]


@pytest.fixture(scope="module")
def found():
    """Return what was seen: `right`, {(line, alternative)} of true comments; `wrong` and `bare`,
    {line: in words} of wrong comments and missing ones. A line is, e.g., "mae.py:95"."""
    right, wrong, bare = set(), {}, {}
    for work, model, sizes, is_path in runs():
        own = [n for letter, n in letters(model).items() if letter != "P"]
        assert len({*own}) == len(own), own                # or a comment could be right by chance
        with torch.no_grad():
            calls = trace(work, FILES)
        for call in flatten(calls):
            before = call.inputs
            for step in call.steps:
                s, known = step.statement, Sizes(call, step, {**letters(model), **sizes})
                file, comments = Path(s.path).name, {**s.above, **s.comments}
                for i, text in comments.items():
                    made = [step.parts[i]] if i in step.parts else sum(step.made, [])
                    fitting = {(f"{file}:{i}", j) for j, shapes in enumerate(shapes_in(text))
                               if fits(made, shapes, known)}
                    right |= fitting
                    if shapes_in(text) and not fitting:
                        wrong[f"{file}:{i}"] = f"{text} is {[tuple(x.shape) for x in made]}"
                needs_one = is_path and len(call.steps) > 1 and not any(
                    shapes_in(text) for text in comments.values())
                for name, x in tensors_of(step) if needs_one else ():
                    line, shape = f"{file}:{s.first}", tuple(x.shape)
                    if name in NAMES and not fits([x], shapes_in(NAMES[name])[0], known):
                        wrong[line] = f"{name} is {shape}, not {NAMES[name]}"
                    elif name not in NAMES and getattr(before.get(name), "shape", 0) != shape:
                        bare[line] = f"{name or 'what it returns'} is {shape}"
                before = step.names
    return SimpleNamespace(right=right, wrong=wrong, bare=bare)


def none(lines):
    if lines:
        pytest.fail("\n".join(f"{line}  {text}" for line, text in lines.items()), pytrace=False)


def test_shape_comments_are_true(found):
    none(found.wrong)


def test_lines_that_make_tensors_have_shape_comments(found):
    """Lines need a comment on the way from images to a loss, features or a reconstruction, except
    for NAMES, for a name whose shape stays the same, and in functions of one line."""
    none(found.bare)


def test_every_shape_comment_is_tested(found):
    """Each shape in a comment is that of a tensor in one of the runs."""
    comments = {f"{Path(path).name}:{i}": text for path in FILES
                for i, line in enumerate(Path(path).read_text().splitlines(), start=1)
                for text in re.findall(r"(?<=\s)# .*", line)}
    stale = {line: f"{text}: shape {j + 1} never occurs" for line, text in comments.items()
             for j in range(len(shapes_in(text))) if (line, j) not in found.right}
    none(stale)


# ---------------------------------------------------------------------------------------- the page
class Reader(HTMLParser):
    """Reads a page into `text`, and `rows`, {(file, line): what the line made}. Asserts that tags
    are closed in order, that links lead somewhere, and that nothing is loaded from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(page)
        ids = re.findall(r' id="(.*?)"', page)
        assert self.open == [] and "<script" not in page and len(ids) == len({*ids})
        assert {*re.findall(r'(?:href="#|popovertarget=")(.*?)"', page)} <= {*ids}
        rows = r'title="([\w.]+)"> *(\d+)</i> .*?</pre><div class="made">(.*?)<div>'
        self.rows = {(file, int(i)): re.sub("<.*?>", "", made)
                     for file, i, made in re.findall(rows, page)}

    def handle_starttag(self, tag, attributes):
        self.open += [tag] * (tag not in ("meta", "img", "br"))
        given = dict(attributes)
        assert given.get("href", "#")[0] == "#" and given.get("src", "data:").startswith("data:")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return {name: page} for the methods and a training step."""
    folder = tmp_path_factory.mktemp("pages")
    for name in [*train.METHODS, "train"]:
        main([name, "--out", str(folder / name)])
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("name", train.METHODS)
def test_page(name, pages):
    """The page is well-formed and small. It has the lines of forward with the shapes that they
    make (CrossMAE's page leaves patches out), each picture once, and links from the diagram and
    from the paper's order to lines."""
    page, reader = pages[name], Reader(pages[name])
    assert len(page) < 1e6 and "def require" not in reader.text        # it makes no tensors
    model = train.load_model(ROOT / f"tests/models/{name}.pt")
    with torch.no_grad():
        call, = trace(lambda: model(torch.rand(1, 3, 32, 32)), FILES)
    for step in call.steps:
        s, made = step.statement, [x for x in sum(step.made, []) if x.ndim]
        if made and not s.only_names and not isinstance(s.node, ast.For) and name != "crossmae":
            assert str(tuple(made[0].shape)) in reader.rows[f"{name}.py", s.last]
    shown = re.findall(r'src="(.*?)"', page.split('<div class="call">', 1)[1])
    assert len(shown) == len({*shown}) > 8
    source = (ROOT / f"{name}.py").read_text().splitlines()
    for line, code in re.findall(rf'<a href="#{name}.py-(\d+)"><text.*?>(\w+)', page):
        assert re.search(rf"\b{code}\b", source[int(line) - 1])
    assert len(re.findall('href="#[^>]*><text', page)) >= 10
    assert len(re.findall('href="#[^>]*>\\w+.py', page)) >= 4 or name == "minr"


def test_first_pictures(pages):
    """i-MAE's page begins with both images and their mixture, CrossMAE's with the weights of its
    feature maps; it leaves patches out. Each shows the attention of one patch."""
    for name, captions in dict(imae=("x_1", "x_2", "0.3 x_1 + 0.7 x_2", "masked"),
                               crossmae=("in the loss: 16 of 48 masked patches",),
                               mae=("decode, last block: attention of the blue patch",),
                               minr=("encode, last block: attention of the last token",)).items():
        top = pages[name].split('<div class="call">')[0]
        shown = re.findall(r"<figcaption>(.*?)</figcaption>", top)
        assert all(any(x.startswith(caption) for x in shown) for caption in captions)
    weights = train.load_model(ROOT / "tests/models/crossmae.pt").map_weights()
    table = re.search(r'class="numbers">(.*?)</table>', pages["crossmae"])[1]
    assert table.count("<td") == 20 and f">{weights[0, 0]:.2f}<" in table
    text = {name: Reader(page).text for name, page in pages.items()}
    assert "P = 16" in text["crossmae"] and "g_i = [0, 16, 0, 0, 0]" in text["minr"]
    assert "M = 48" not in text["hypermae"]                # there, M is a matrix


def test_training_step(pages):
    """The page opens at train_step. After the step, the loss of the same batch is lower."""
    reader = Reader(pages["train"])
    order = [x for x in re.findall(r"def (\w+)", reader.text) if x.startswith("train")]
    assert order == ["train_step", "train_epoch"] and "attention of the blue" in reader.text
    assert reader.text.count("norms of gradients: mask_token ") == 1
    after = re.search(r"norms of changes: mask_token [\d.]+, .* masks is ([\d.]+)", reader.text)
    lines = enumerate((ROOT / "mae.py").read_text().splitlines(), start=1)
    before, = [reader.rows["mae.py", i].split()[-1] for i, line in lines if " loss = " in line]
    assert 0 < float(after[1]) < float(before)


def test_attention():
    """The attention of one patch is the mean over heads, at the patches' places; others are grey.
    Without ids_keep among the arguments, tokens are in raster order."""
    encoder = MAE(**TINY, **MAE.low_res_config).encoder
    ids_keep, ids_mask, _ = encoder.mask(torch.rand(1, 3, 32, 48), torch.rand(1, 96), 0.75)
    q, k, order = *torch.randn(2, 1, 4, 97, 20), torch.cat([ids_keep, ids_mask], dim=1)[0]
    ids = dict(ids_keep=ids_keep, ids_mask=ids_mask)
    weights = torch.einsum("bhic,bhjc->bhij", q, k).div(20 ** 0.5).softmax(3)[0].mean(0)
    call, shown, center = SimpleNamespace(inputs=dict(x=q)), [], 4 * 12 + 6
    with patch.object(tour, "png", lambda x, *_: shown.append(x)):
        tour.attention(call, dict(q=q, k=k), ids, encoder)
        tour.attention(call, dict(ids, q=q, k=k), {}, encoder)
        few = dict(q=q[:, :, :25], k=k[:, :, :25])
        tour.attention(call, dict(ids, **few), ids, encoder)
        assert tour.attention(call, few, {}, encoder) == ""            # places are unknown
    i = (order == center).nonzero().item()
    raster = torch.arange(96)
    for picture, row, places in ((shown[0], 1 + i, order), (shown[1], 1 + center, raster)):
        expected = tour.heat(torch.zeros(1, 96).index_copy(1, places, weights[row:row + 1, 1:]))
        expected[:, 0, center] = torch.tensor([0, 0.3, 1])
        assert torch.allclose(picture, expected.view(3, 8, 12), atol=1e-4)
    assert (shown[2] == tour.GREY).all(0).sum() == 72


def test_pictures():
    """Patches are shown at their places, large matrices in part, small ones as numbers, and images
    in their first three channels or in grey."""
    model, images, shown = MAE(**TINY, **MAE.low_res_config), torch.rand(1, 3, 32, 48), []
    ids_keep, ids_mask, _ = model.encoder.mask(images, torch.rand(1, 96), 0.75)
    with patch.object(tour, "png", lambda x, *_: shown.append(x) or ""):
        patches = patchify(images, 4)[0, ids_mask[0]][None]
        tour.picture("", patches, "(B, M, p*p*C)", dict(ids_mask=ids_mask), model)
        tour.picture("order", torch.randperm(96)[None], "(B, L)", {}, model)       # all: no picture
        tour.picture("", torch.randn(1, 300, 301), "", {}, model)
    masked = model.encoder.pixels_of(torch.ones(1, 96).scatter(1, ids_keep, 0))[0, 0] > 0
    assert torch.allclose(shown[0][:, masked], denormalize(images, model)[0][:, masked])
    assert (shown[0][:, ~masked] == tour.GREY).all() and shown[1].shape == (3, 60, 101)
    assert len(shown) == 2 and ">-7.00</td>" in tour.picture(
        "", torch.full((3, 4), -7.0), "", {}, model)
    assert tour.png(images[0, :2], 32) == tour.png(images[0, :1].expand(3, -1, -1), 32)
    assert tour.png(torch.cat([images[0], images[0]]), 32) == tour.png(images[0], 32)


def test_norms():
    """The page of a training step shows the norms of a part's gradients and of its change."""
    torch.manual_seed(0)
    model, weights, norms = MAE(**TINY, **MAE.low_res_config), {}, []
    model(torch.rand(1, 3, 32, 48))[0].backward()
    for code, name in ("loss.backward()", "gradients"), ("optimizer.step()", "changes"):
        text = learned(code, dict(loss=0, net=model), weights)
        norms.append(float(re.match(f"norms of {name}: .*encoder ([\\d.e-]+)", text)[1]))
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    whole = torch.cat([p.grad.flatten() for p in model.encoder.parameters() if p.requires_grad])
    assert norms == pytest.approx([whole.norm().item(), whole.norm().item() / 2], 0.06)
    assert learned("x = model(y)", dict(net=model), weights) == ""


def test_comments():
    """A comment's shapes are split from its words. Runs of a line are told apart."""
    for comment in ("(N, b_i), then (B, N, b_i)", "(..., dim)", "scalar", "(C, 1) or (B, C, 1)"):
        assert tour.split_comment(f"# {comment}; item 1") == (comment, "item 1")
    assert tour.split_comment("# by its mean (Sec. 3)") == ("", "by its mean (Sec. 3)")
    ran = [SimpleNamespace(statement=SimpleNamespace(targets=["x"]), made=[[torch.ones(2)]])] * 2
    assert [name for name, _ in tour.made_by(ran)] == ["x, run 1 of 2", "x, run 2 of 2"]


FORK = '''"""A fork.

Pixels are by default normalised (Sec. 9).
"""
import torch
from mae import MAE

class Flipped(MAE):
    """A fork.

    Args:
        option: what it is for (Table 10, 2b)
    """
    mean, std, pairs = (0.5,), (0.5,), "views"
    reconstruct = property()                               # raises AttributeError: there is none

    def forward(self, images, noise=None, views=None):
        """Docstring (A.1)."""
        # a comment (Sec. 3.2)
        # in two lines
        views = views + 0                                  # (B, C, H, W); eq. 1, ViT eq. 7
        result = super().forward(images, noise)
        self.encoder(views)
        return result

    def decode(self, latent, ids_keep, ids_mask, P):
        x = latent.flip(1) if P < 1e9 else "&<b>"          # (B, 1+K, D) <i> "other" & way
        return super().decode(x, ids_keep, ids_mask, P)
'''


def test_own_method(tmp_path, monkeypatch):
    """Your own method, in its own file, needs nothing in tour.py, no `reconstruct` and no three
    channels; `views` get another crop. What looks like HTML in its code does not become HTML. The
    paper's order has its references, but none of other papers."""
    (tmp_path / "flipped.py").write_text(FORK)
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("flipped").Flipped
    monkeypatch.setitem(train.METHODS, "flipped", cls)
    out = tmp_path / "a.html"
    main(["flipped", "--out", str(out)])
    reader = Reader(out.read_text())
    assert 'x = latent.flip(1) if P < 1e9 else "&<b>"' in reader.text
    assert reader.rows["flipped.py", 27].strip() == "(B, 1+K, D) (1, 25, 80)"
    assert '<i> "other" & way' in reader.text and "mae.py, MAE.decode" in reader.text
    assert "<svg" not in out.read_text()                   # MAE's diagram would be wrong
    assert "views (1, 1, 32, 48)" in reader.text and "its second view" in reader.text
    assert "a comment (Sec. 3.2) in two lines<br>eq. 1" in out.read_text()
    figure = re.search('"encode, last block.*?base64,(.*?)"', out.read_text())[1]     # not of views
    assert (decode_image(torch.frombuffer(bytearray(b64decode(figure)), dtype=torch.uint8)) == 204
            ).all(0).float().mean() == 0.75                # grey
    assert "normalised (here: not)" in reader.text and "norm_pix_loss = False" in reader.text
    assert [(reference, code) for reference, _, _, code in tour.paper_order(cls)] == [
        ("Sec. 3.2", "views = views + 0"), ("Appendix A.1", "Flipped.forward"),
        ("eq. 1", "views = views + 0"), ("Table 2b", "option"), ("Table 10", "option")]


def test_trained_model_and_own_image(tmp_path, monkeypatch, refused):
    """The page shows the given checkpoint and image. Invalid input ends in one line."""
    monkeypatch.chdir(tmp_path)
    config = dict(SIZES, **DECODER)
    Path("runs/new").mkdir(parents=True)
    torch.save(dict(method="mae", config=config, model=MAE(**config).state_dict()),
               "runs/new/last.pt")
    torchvision.utils.save_image(torch.rand(3, 100, 182), "a.png")
    seen = []
    with patch.object(tour, "strip_of", lambda model, inputs, _: seen.append(inputs[0]) or ""):
        main(["mae", "--checkpoint", "runs/new", "--image", "a.png"])
    image = 255 * denormalize(seen[0], MAE)[0]
    assert (image - center_crop(read_image("a.png"), (55, 91), 1).float()).abs().max() <= 1
    text = " ".join(Reader(Path("tour_mae.html").read_text()).text.split())
    assert "from runs/new, in evaluation mode, on a.png" in text and "norm_pix_loss=True" in text
    assert "L = 143p = 5D = 76K = 31M = 112E = 92" in text
    refused(main, ["mea"], "'mea'", "imae")
    refused(main, ["crossmae", "--checkpoint", "runs/new"], "is not of method crossmae")
    refused(main, ["mae", "--checkpoint", "none.pt"], "none.pt")
    refused(main, ["train", "--image", "a.png"], "train takes no --checkpoint and no --image")
    Path("text").write_text("no image")
    for file in ("text", "none.png"):
        refused(main, ["mae", "--image", file], f"--image {file}: give another image file")
    for method, most in (("mae", 1), ("imae", 2)):
        refused(main, [method, "--image", *["a.png"] * (most + 1)], f"takes at most {most}")


def test_screenshots():
    r"""They are as wide as the README shows them, so that the text is sharp. To make them:

        python -m tests.tour mae
        sed 's/<details open>/<details>/g
             s|</style>|body > :not(.call), .title { display: none } body { padding: 0 12px } &|' \
            tour_mae.html > rows.html
        chromium --headless --no-sandbox --hide-scrollbars --window-size=830,488 \
            --screenshot=.github/tour.png "file://$PWD/rows.html"

    With --blink-settings=preferredColorScheme=0, the page is dark: .github/tour_dark.png.
    """
    pixels = []
    for name in ("tour", "tour_dark"):
        picture = torchvision.io.read_image(str(ROOT / f".github/{name}.png"))
        assert picture.shape[1] <= 500 and picture.shape[2] == 830
        pixels.append(picture[0, -2, 2])
    assert pixels[0] > 200 > 60 > pixels[1]
