"""Shape comments are true: everything runs with sizes that are all different, and each comment such
as `# (B, 1+K, D)` is compared with the tensors that its line makes. Tests of the tour follow."""

import ast
import html
import importlib
import itertools
import math                                                # for LETTERS
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torchvision

import finetune
import train
from crossmae import CrossMAE
from hypermae import HyperMAE
from imae import IMAE
from mae import MAE
from minr import MINR
from tests import analyses, compare, tour
from tests.lib.models import load_model
from tests.unit.conftest import FIVE, HERE, ROOT
from tests.tour import TINY, flatten, letters, main, trace
from train import center_crop, read_image
from vit import denormalize, mask_noise, pair, patchify, transfer

FILES = [str(ROOT / f"{name}.py")
         for name in "vit mae crossmae hypermae minr imae finetune tests/analyses".split()]
SIZES = dict(img_size=(55, 91), patch_size=(5, 7), in_chans=3, dim=76, depth=3, heads=4)
B, L, RATIO = 6, 143, dict(mask_ratio=0.78)
DECODER = dict(RATIO, decoder_dim=92, decoder_depth=2, decoder_heads=4)
CROSS = dict(DECODER, decoder_depth=8, prediction_ratio=0.5)
HYPER = dict(RATIO, n_weight_tokens=14, feat2w_depth=2, mlp_depth=4, hidden_dim=37, pe_dim=22)
RENDER = dict(RATIO, hidden_dim=74, groups=37, ff_dim=34, mlp_depth=4)
CASES = [
    (MAE, [DECODER, dict(DECODER, norm_pix_loss=False)]),
    (CrossMAE, [CROSS, dict(CROSS, feature_maps="last"), dict(CROSS, project_maps=True),
                dict(CROSS, feature_maps=(0, 2), include_input=False, softmax_weights=True,
                     self_attention=True)]),
    (HyperMAE, [HYPER, dict(HYPER, shared_blocks=1),
                dict(HYPER, loss_on="all", modulated_layer=2),
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
    "knn": dict(N="len(data.labels)"),
    "knn.embed": dict(b="len(images)"),
    "knn.score": dict(b="len(images)", k="k")}
NOT_SHAPES = {"Sec. 3.4, A.5", "8, 8"}


def sizes_at(step, call, model_sizes):
    """Return the size of each letter at a step of a call: the model's, or the function's own."""
    names = {**step.names, **call.inputs}
    sizes = {**model_sizes, **{name: x for name, x in names.items() if isinstance(x, int)}}
    for letter, code in LETTERS.get(step.statement.function, {}).items():
        sizes.pop(letter, None)
        with suppress(Exception):                          # e.g. x, which a later line makes
            sizes[letter] = eval(code, globals(), names)
    return sizes


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
    with suppress(NameError, SyntaxError):
        return eval(re.sub(r"(\d) ?(?=[A-Za-z])", r"\1*", code), {"__builtins__": {}}, sizes)


def fits(made, shapes, sizes):
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
    """Yield (work, model, sizes)."""
    images, noise = torch.rand(B, 3, 55, 91), torch.rand(B, L)
    for cls, cases in CASES:
        for options in cases:
            model, sizes = cls(**SIZES, **options), dict(B=B, **options)
            yield lambda: cls(**SIZES, **options), model, sizes
            yield lambda: model(images), model, sizes
            yield lambda: model.reconstruct(images, noise), model, sizes
        model, sizes = cls(**SIZES, **cases[0]), dict(B=B, **cases[0])
        if cls is MAE:
            own = noise.argsort(1).argsort(1) >= 31                     # a mask with K = 31
            yield lambda: model.encoder.mask(images, own, None), model, sizes
            yield lambda: model.reconstruct(images, noise, leak_free=True), model, sizes
            yield lambda: analyses.decoder_attention(model, images), model, sizes
        elif cls is IMAE:
            yield lambda: model.unmix(images, images, torch.rand(B), noise), model, sizes
            yield lambda: analyses.latents(model, images, 0.3, "ab"), model, sizes
            yield lambda: analyses.unmixed_psnr(model, images, 0.3), model, sizes
        elif cls is not HyperMAE:
            yield lambda: analyses.analyse(model, None, images[:2]), model, dict(sizes, B=2)
    x, y = torch.rand(8, 4, 9), torch.rand(8, 4, 6)
    yield lambda: analyses.ridge_r2(x, y, x[:7], y[:7]), model, sizes
    yield lambda: denormalize(images, model), model, sizes
    for kind in ("grid", "block"):
        yield lambda: mask_noise(kind, B, (11, 13)), model, sizes
    small = MAE(**{**SIZES, "img_size": (10, 21)}, **DECODER).state_dict()
    yield lambda: transfer(model, small, (2, 3)), model, sizes
    for options in POOLS:
        model = finetune.Classifier(**{**SIZES, **options}, classes=12)
        sizes = dict(B=B, classes=12, width=76)
        yield lambda: model(images, torch.arange(B)), model, sizes
    data = train.ImageDataset((255 * images).byte(), torch.arange(B), [*"abcdefghijkl"])
    yield lambda: finetune.evaluate(finetune.knn(model, data, 4, HERE), data, HERE,
                                    (55, 91)), model, sizes


def test_shape_comments_are_true():
    """Each shape in a comment is that of a tensor in one of the runs, and of those in its line
    whenever the line runs. `right` has {(line, alternative)}, `wrong` {line: in words}, where a
    line is, e.g., "mae.py:95"."""
    right, wrong = set(), {}
    for work, model, sizes in runs():
        own = [n for letter, n in letters(model).items() if letter != "P"]
        assert len({*own}) == len(own), own                # or a comment could be right by chance
        with torch.no_grad():
            calls = trace(work, FILES)
        for call in flatten(calls):
            for step in call.steps:
                s, known = step.statement, sizes_at(step, call, {**letters(model), **sizes})
                file, comments = Path(s.path).name, {**s.above, **s.comments}
                for i, text in comments.items():
                    made = [step.parts[i]] if i in step.parts else sum(step.made, [])
                    fitting = {(f"{file}:{i}", j) for j, shapes in enumerate(shapes_in(text))
                               if fits(made, shapes, known)}
                    right |= fitting
                    if shapes_in(text) and not fitting:
                        wrong[f"{file}:{i}"] = f"{text} is {[tuple(x.shape) for x in made]}"
    comments = {f"{Path(path).name}:{i}": text for path in FILES
                for i, line in enumerate(Path(path).read_text().splitlines(), start=1)
                for text in re.findall(r"(?<=\s)# .*", line)}
    wrong |= {line: f"{text}: shape {j + 1} never occurs" for line, text in comments.items()
              for j in range(len(shapes_in(text))) if (line, j) not in right and line not in wrong}
    if wrong:
        pytest.fail("\n".join(f"{line}  {text}" for line, text in wrong.items()), pytrace=False)


# ---------------------------------------------------------------------------------------- the page
def read_page(path):
    """Return a page's text, and {(file, line): what the line made}. Its tags are closed, its links
    lead somewhere, and it loads nothing."""
    page = path.read_text(encoding="utf-8")
    ids = re.findall(r' id="(.*?)"', page)
    assert len(ids) == len({*ids}) and "<script" not in page and not re.search('href="[^#]', page)
    assert {*re.findall(r'(?:href="#|popovertarget=")(.*?)"', page)} <= {*ids}
    assert all(source.startswith("data:") for source in re.findall(' src="(.*?)"', page))
    for tag in ("div", "pre", "details", "table", "figure"):
        assert len(re.findall(rf"<{tag}\b", page)) == page.count(f"</{tag}>"), tag
    rows = r'title="([\w.]+)"> *(\d+)</i> .*?</pre><div class="made">(.*?)<div>'
    made = {(file, int(i)): re.sub("<.*?>", "", x) for file, i, x in re.findall(rows, page)}
    return html.unescape(re.sub("<.*?>", "", page)), made


@pytest.mark.parametrize("name", FIVE)
def test_page(name, tmp_path):
    """A page has the lines of forward with the shapes that they make (CrossMAE's leaves patches
    out). Links from the diagram and from the paper's order lead to the right lines."""
    main([name, "--out", str(tmp_path / "x.html")])
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    text, rows = read_page(tmp_path / "x.html")
    assert len(page) < 1e6 and "last block: attention of the" in text
    model = load_model(ROOT / f"tests/models/{name}.pt")
    with torch.no_grad():
        call, = trace(lambda: model(torch.rand(1, 3, 32, 32)), FILES)
    for step in call.steps:
        s, made = step.statement, [x for x in sum(step.made, []) if x.ndim]
        if made and not s.only_names and not isinstance(s.node, ast.For) and name != "crossmae":
            assert str(tuple(made[0].shape)) in rows[f"{name}.py", s.last]
    source = (ROOT / f"{name}.py").read_text().splitlines()
    links = re.findall(rf'<a href="#{name}.py-(\d+)"><text.*?>(\w+)', page)
    assert len(links) > 5 and all(re.search(rf"\b{x}\b", source[int(i) - 1]) for i, x in links)


def test_why(tmp_path, monkeypatch):
    """A line with a variation in tests.why has a button, which shows the question, the paper's
    answer and what was measured. Without tests.why, as in handouts, there are none."""
    main(["mae", "--out", str(tmp_path / "x.html")])
    page = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert re.search(r'="why-mae.l1">why\?</button> </div><pre><span[^>]*><i[^>]*> *\d+</i> +loss = ',
                     page)
    answer = html.unescape(re.search(r'<div popover id="why-mae.l1">(.*?)</div>', page)[1])
    assert answer.startswith("<b>Why the squared error") and "the mean squared error." in answer
    measured, = re.findall(r"python -m tests.why mae.l1: pixels ([+-][\d.]+) dB, 20-NN", answer)
    log = compare.read_lines(ROOT / "tests/logs/why.jsonl")
    a, b = ([x["numbers"][compare.PIXELS] for x in log if x["column"] == "pixels"
             and x["encoder"] == spec] for spec in ("mae.l1", "mae"))
    assert float(measured) == pytest.approx(sum(a) / len(a) - sum(b) / len(b), abs=0.0051)
    monkeypatch.setattr(tour, "at_lines", dict)
    main(["mae", "--out", str(tmp_path / "x.html")])
    assert 'popovertarget="why-' not in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_pictures():
    """Patches are at their places. So are the weights with which the central one attends to all,
    averaged over heads."""
    model, images, shown = MAE(**TINY, **MAE.small_config), torch.rand(1, 3, 32, 48), []
    ids_keep, ids_mask, mask = model.encoder.mask(images, torch.rand(1, 96), 0.75)
    ids, order = dict(ids_keep=ids_keep, ids_mask=ids_mask), torch.cat([ids_keep, ids_mask], dim=1)
    q, k = torch.randn(2, 1, 4, 97, 20)
    with patch.object(tour, "png", lambda x, *_: shown.append(x)):
        patches = patchify(images, 4)[:, ids_mask[0]]
        tour.picture("", patches, "(B, M, p*p*C)", dict(ids_mask=ids_mask), model)
        tour.attention(SimpleNamespace(inputs=dict(x=q)), dict(q=q, k=k), ids, model.encoder)
    masked = model.encoder.pixels_of(mask)[0] > 0
    wanted = torch.where(masked, denormalize(images, model)[0], tour.GREY)
    assert torch.allclose(shown[0], wanted)
    center = 4 * 12 + 6
    i = order[0].tolist().index(center)
    weights = (q @ k.mT / 20 ** 0.5).softmax(dim=3)[0].mean(0)[1 + i, None, 1:]
    wanted = tour.heat(torch.zeros(1, 96).scatter(1, order, weights))
    wanted[:, 0, center] = torch.tensor([0, 0.3, 1])
    assert torch.allclose(shown[1], wanted.view(3, 8, 12), atol=1e-4)
    blue, white, orange = tour.heat(torch.tensor([[-2.0, 0, 2]]), 1)[:, 0].T
    assert blue.argmax() == 2 and orange.argmax() == 0 and (white == 1).all()


FORK = '''"""A fork."""
import torch
from mae import MAE

class Flipped(MAE):
    """A fork."""
    mean, std, crops = (0.5,), (0.5,), 2
    reconstruct = None

    def forward(self, images, noise=None, views=None):
        """Docstring (A.1)."""
        # a comment (Sec. 3.2)
        views = views + 0                                  # (B, C, H, W); eq. 1, ViT eq. 7
        return super().forward(images, noise)

    def decode(self, latent, ids_keep, ids_mask, visible_too=False):
        x = latent.flip(1) if not 3 < 2 else "&<b>"          # (B, 1+K, D) <i> "other" & way
        return super().decode(x, ids_keep, ids_mask, visible_too)
'''


def test_own_method(tmp_path, monkeypatch):
    """Your own method, in its own file, needs nothing in tour.py, no `reconstruct` and no three
    channels; `views` get another crop. What looks like HTML in its code does not become HTML."""
    (tmp_path / "flipped.py").write_text(FORK)
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("flipped").Flipped
    monkeypatch.setitem(train.METHODS, "flipped", cls)
    main(["flipped", "--out", str(tmp_path / "a.html")])
    text, rows = read_page(tmp_path / "a.html")
    assert 'x = latent.flip(1) if not 3 < 2 else "&<b>"' in text and '<i> "other" & way' in text
    assert rows["flipped.py", 17].strip() == "(B, 1+K, D) (1, 25, 80)"
    assert "mae.py, MAE.decode" in text and "views (1, 1, 32, 48)" in text
    assert "<svg" not in (tmp_path / "a.html").read_text()             # MAE's would be wrong
    assert [(reference, code) for reference, _, _, code in tour.paper_order(cls)] == [
        ("Sec. 3.2", "views = views + 0"), ("Appendix A.1", "Flipped.forward"),
        ("eq. 1", "views = views + 0")]                    # ViT's is another paper's


@pytest.mark.parametrize("case", ["own ids", "no masks", "own masks", "a number"])
def test_what_draw_batch_returns(case, tmp_path, monkeypatch):
    """The strip shows masks that are noise, and other arguments only if they are images."""
    class Fork(MAE):
        def draw_batch(self, crops, labels, noise):
            if case == "own ids":                          # as in I-JEPA: the visible patches
                return [crops[0], noise.argsort(1)[:, :5]]
            return [crops[0], noise, torch.ones(1)]

        def forward(self, images, noise=None, more=None):
            if case == "own ids":
                return self.encode(images, noise).square().mean(), {}
            return super().forward(images, noise)
    Fork.reconstruct = MAE.reconstruct if case in ("a number", "own masks") else None
    Fork.unused = ("mask", "mask_ratio") if case == "own masks" else ("mask",)
    Fork.__module__, Fork.__doc__ = "mae", "Fork."
    monkeypatch.setitem(train.METHODS, "fork", Fork)
    if case == "no masks":
        init = Fork.__init__
        monkeypatch.setattr(Fork, "__init__", lambda self, *args, **more: (
            init(self, *args, **more), delattr(self, "mask_ratio"))[0])
        monkeypatch.setattr(Fork, "forward", lambda self, images, noise=None, more=None: (
            self.encoder(images).mean(), {}))
    main(["fork", "--out", str(tmp_path / "a.html")])
    text = (tmp_path / "a.html").read_text()
    assert "second view" not in text
    assert ("<figcaption>masked" in text) == (case == "a number")
    assert ("<b>K</b> = " in text) == (case in ("own ids", "a number"))


def test_trained_model_and_own_image(tmp_path, monkeypatch, refused):
    """The page shows the given checkpoint and image."""
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
    assert "L = 143" in read_page(Path("tour_mae.html"))[0]
    refused(main, ["crossmae", "--checkpoint", "runs/new"], "is not of method crossmae")
    refused(main, ["mae", "--image", "none.png"], "none.png")
