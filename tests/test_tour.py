"""Shape comments are true: everything runs with sizes that are all different, and each comment such
as `# (B, 1+K, D)` is compared with the tensors that its line makes. Then the tour itself."""

import ast
import importlib
import itertools
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision

import finetune
import train
from crossmae import CrossMAE, decoder_attention
from hypermae import HyperMAE
from imae import IMAE, ridge_r2
from mae import MAE
from minr import MINR
from tests.conftest import ROOT, settings
from tests.tour import TINY, attention_maps, flatten, letters, main, trace
from train import center_crop, read_image
from vit import mask_noise, pair, to_released, transfer

FILES = [str(ROOT / f"{name}.py")
         for name in "vit mae crossmae hypermae minr imae finetune".split()]
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
    "decoder_attention": dict(heads="mae.decoder_blocks[0].attn.heads", B="len(part)"),
    "HyperMAE.decode": dict(P="coords.shape[1]"),
    "MINR.modulate": dict(a="74 if i else 68", b="len(bias)", g="self.groups[i]"),  # as in RENDER
    "MINR.decode": dict(N="coords.shape[-2]", a_0="2 * self.ff_dim", b_i="len(bias)"),
    "MINR.forward": dict(N="len(coords)"),
    "MINR.render_masked": dict(N="len(coords)", H_new="size[0]", W_new="size[1]"),
    "MINR.figures": dict(rows="len(images)"),
    "IMAE.teach": dict(D="self.teacher['encoder'].dim"),   # the teacher's
    "IMAE.latents": dict(b="len(x)"),
    "IMAE.subordinate_psnr": dict(b="len(x)"),
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
    shape for each value; `each` if one shape is for all values."""
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
    """Evaluate an axis, e.g. "1+K" or "2 dim"; None if a letter is not known. In the files of
    methods, p*p is p*q."""
    code = axis.replace("'", "_new").replace("p*p", "p*q").replace(" depth", "_depth")
    try:
        return eval(re.sub(r"(\d) ?(?=[A-Za-z])", r"\1*", code), {"__builtins__": {}}, sizes)
    except (NameError, KeyError, SyntaxError):
        return None


def fits(made, shapes, sizes):
    """Whether the tensors have these shapes."""
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
            yield lambda: decoder_attention(model, images), model, sizes, False
        elif cls is IMAE:
            yield lambda: model.unmix(images, images, torch.rand(B), noise), model, sizes, True
            yield lambda: model.latents(images, 0.3, ("a", "b")), model, sizes, False
            yield lambda: model.subordinate_psnr(images, 0.3), model, sizes, False
        elif cls is not HyperMAE:
            yield lambda: model.figures(images[:4]), model, dict(sizes, B=4), False
    x, y = torch.rand(8, 4, 9), torch.rand(8, 4, 6)
    yield lambda: ridge_r2(x, y, x[:7], y[:7]), model, sizes, False
    for kind in ("grid", "block"):
        yield lambda: mask_noise(kind, B, (11, 13)), model, sizes, True
    patches, ids = torch.rand(B, 9, 105), torch.rand(B, L).argsort(dim=1)
    yield lambda: model.encoder.paste_patches(images, patches, ids[:, :9], ids[:, :31], True
                                              ), model, sizes, True
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
    """Return [(name, tensor)] of those with two or more axes that a line assigns or returns."""
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
    """What was seen: `right`, {(line, alternative)} of comments; `wrong` comments and `bare` lines,
    which need one, {line: in words}. A line is, for example, "mae.py:95"."""
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
    """On the way from images to a loss, features or a reconstruction. None is needed for NAMES, for
    a name whose shape stays the same, and in functions of one line."""
    none(found.bare)


def test_every_shape_comment_is_tested(found):
    """Each shape in a comment is that of a tensor in one of the runs."""
    comments = {f"{Path(path).name}:{i}": text for path in FILES
                for i, line in enumerate(Path(path).read_text().splitlines(), start=1)
                for text in re.findall(r"(?<=\s)# .*", line)}
    stale = {line: f"{text}: shape {j + 1} never occurs" for line, text in comments.items()
             for j in range(len(shapes_in(text))) if (line, j) not in found.right}
    none(stale)


# ---------------------------------------------------------------------------------------- the tour
NUMBERED = re.compile(r"^ *(?:(\w+):)?(\d+)  +(.*?)(?:  .*)?$", re.M)    # file, line, code


@pytest.mark.parametrize("name", train.METHODS)
def test_tour(name, tmp_path, monkeypatch, capsys):
    """Each line is shown once, as in the file, and fits a terminal; the picture has a column for
    each title."""
    monkeypatch.chdir(tmp_path)
    main([name])
    text = capsys.readouterr().out
    shown = NUMBERED.findall(text)
    assert len(shown) > 10 and len({place[:2] for place in shown}) == len(shown)
    own = Path(sys.modules[train.METHODS[name].__module__].__file__)
    for file, i, code in shown:
        path = ROOT / f"{file}.py" if file else own
        line = path.read_text().splitlines()[int(i) - 1].split("  #")[0].strip()
        assert code[:60].startswith(line[:60]) or line.startswith(code[:60])
    assert max(map(len, text.splitlines())) <= 100
    titles = re.findall(r"\d+\s[^;]+", text[text.index("see tour_"):])
    _, _, width = torchvision.io.decode_image(f"tour_{name}.png").shape
    assert width == 8 + len(titles) * (3 * 48 + 8) and "original" in titles[-1]


def test_order_and_shapes(tmp_path, capsys):
    """A call comes before what is inside it, and its result after; a loop says how often."""
    main(["mae", "--out", str(tmp_path / "a.png")])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("here B = 1, C = 3, H = 32, W = 48, L = 96,", "K = 24, M = 72",
                 "latent = self.encode(images, ids_keep) --- encode", "return self.encoder(",
                 "patches = patchify(images, self.patch_size) (1, 96, 48) # (B, L, p*q*C)",
                 "for block in self.blocks: x 4", "q, k, v = ",
                 "-> latent (1, 25, 80) # (B, 1+K, D)", "pred = self.decode(", "--- decode",
                 "self.mask_token + pos[ids_mask]], dim=1) (1, 72, 64) # (B, M, E) masked patches",
                 "-> x (1, 97, 64) # (B, 1+L, E)", "for block in self.decoder_blocks: x 2",
                 "-> pred (1, 72, 48) # (B, M, p*p*C)", "loss ="):
        assert part in text
        text = text[text.index(part) + len(part):]


def test_attention_maps():
    """The attention of the class token to visible patches in the encoder, and of mask tokens to all
    patches in the decoder, is at the patches' places; other places are grey."""
    model, images = MAE(**TINY, **MAE.small_model), torch.rand(1, 3, 32, 48)
    ids_keep, ids_mask, _ = model.encoder.mask(images, torch.rand(1, 96), 0.75)
    ids = torch.cat([ids_keep, ids_mask], dim=1)[0]
    with torch.no_grad():
        calls = trace(lambda: model.decode(model.encode(images, ids_keep), ids_keep, ids_mask, 72),
                      FILES)
        maps = attention_maps(model, calls, ids_keep[0], ids_mask[0])
        x = model.encoder.layers(model.encoder.embed(images, ids_keep))[-2]
        y = model.add_mask_tokens(model.encode(images, ids_keep), ids_keep, ids_mask)
        y = model.decoder_blocks[0](y)
    for image, block, x, queries in zip(
            maps.values(), (model.encoder.blocks[3], model.decoder_blocks[1]), (x, y),
            (slice(1), slice(25, None))):
        q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(2, (3, block.attn.heads, -1)).unbind(2)
        scores = torch.einsum("bihc,bjhc->bhij", q, k) / q.shape[3] ** 0.5
        weights = scores.softmax(dim=3).mean(1)[0, queries].mean(0)[1:]
        expected = torch.full((96,), 0.85)
        expected[ids[:len(weights)]] = (weights - weights.min()) / (weights.max() - weights.min())
        assert torch.allclose(image[0, 0].flatten(), expected, atol=1e-4)
    assert [*maps] == ["attention of the class token in encoder.blocks.3.attn",
                       "attention of the mask tokens in decoder_blocks.1.attn"]


FORK = """
import torch
from mae import MAE

class Flipped(MAE):
    def decode(self, latent, ids_keep, ids_mask, P):
        x = latent.flip(1)                                 # (B, 1+K, D) the other way round
        return super().decode(x, ids_keep, ids_mask, P)
"""


def test_own_method(tmp_path, monkeypatch, capsys):
    """A method of one's own, in a file of its own, needs nothing in tour.py."""
    (tmp_path / "flipped.py").write_text(FORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(train.METHODS, "flipped", importlib.import_module("flipped").Flipped)
    main(["flipped", "--out", str(tmp_path / "a.png")])
    text = capsys.readouterr().out
    assert re.search(r"^ *7 +x = latent.flip\(1\) +\(1, 25, 80\) +# \(B, 1\+K, D\) the", text, re.M)
    assert re.search(r"^ *mae:97 +pred = self.decode\(", text, re.M)


def test_trained_model_and_own_image(tmp_path, capsys, refused):
    """A checkpoint and an image file are what is toured; wrong words end in one line."""
    config = dict(SIZES, **DECODER)
    torch.save(dict(method="mae", config=config, model=MAE(**config).state_dict()),
               tmp_path / "last.pt")
    image, out = tmp_path / "a.png", str(tmp_path / "out.png")
    torchvision.io.write_png((255 * torch.rand(3, 100, 182)).byte(), str(image))
    main(["mae", "--checkpoint", str(tmp_path), "--image", str(image), "--out", out])
    assert "L = 143, p = 5, D = 76, K = 31, M = 112, E = 92" in capsys.readouterr().out
    shown = torchvision.io.decode_image(out)[:, 8:8 + 55, 8:8 + 91]
    assert (shown - center_crop(read_image(str(image)), (55, 91), 1).float()).abs().max() <= 1
    (tmp_path / "text").write_text("no image")
    refused(main, ["mea"], "'mea'", "imae")
    refused(main, ["crossmae", "--checkpoint", tmp_path], "is not of method crossmae")
    refused(main, ["mae", "--checkpoint", tmp_path / "none.pt"], "none.pt")
    refused(main, ["mae", "--image", tmp_path / "text"], "text")
    refused(main, ["mae", "--image", tmp_path / "none.jpg"], "no such file")
    refused(main, ["mae", "--image", image, image], "mae takes one image")
