"""tests/why.py: each variation is short, names a line of the code, and does what it says."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import nn

import finetune
import train
from tests import compare, why
from tests.unit.conftest import FIVE, ROOT, TINY, same
from vit import InputError, gather_patches


@pytest.fixture(autouse=True)
def methods(monkeypatch):
    """The variations' classes are methods."""
    for name, cls in why.CLASSES.items():
        monkeypatch.setitem(train.METHODS, name, cls)
    monkeypatch.setattr(compare, "source_of", cache(compare.source_of))            # it is slow


def make(name, **more):
    """Return a tiny model and its random images (2,3,16,16)."""
    cls = {**train.METHODS, **why.CLASSES}[name]
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=4, dim=16, depth=2, heads=2)
    return cls(**{**cls.small_config, **sizes, **more}).eval(), torch.rand(2, 3, 16, 16)


@pytest.mark.parametrize("name", why.VARIATIONS)
def test_line(name):
    """The line occurs once in its file, and a class has at most eight lines."""
    found = why.VARIATIONS[name]
    assert (ROOT / found.file).read_text().count(found.line) == 1
    assert "?" in found.question and found.paper.endswith((".", ")."))
    cls = why.CLASSES.get(name.split(":")[0])
    if cls:
        code = inspect.getsource(cls)
        code = code[re.search("^class ", code, re.M).start():]
        assert len([line for line in code.splitlines() if line.strip()]) <= 8


def test_order():
    """The list is in the order of the code."""
    assert [*dict.fromkeys(map(why.method_of, why.VARIATIONS))] == [*FIVE]
    for name in FIVE:
        code = (ROOT / f"{name}.py").read_text()
        places = [code.index(x.line) for x in why.VARIATIONS.values() if x.file == f"{name}.py"]
        assert places == sorted(places)


@cache
def trained(spec, folder):
    """Return the state dict after the few steps of a tiny run that tests.compare would start, and
    the row of its log."""
    with patch.object(compare, "source_of", str):          # which is slow, and not needed here
        args = compare.plan([spec, "--data", folder, *TINY, "--epochs", "1", "--eval_images", "1",
                             "--dim", "24"])               # for width 16, lr is 0.004 anyway
    for command in compare.pretraining(spec, args, 0, "runs", compare.slug):
        row = train.main(shlex.split(command.partition("train.py ")[2]) + ["--overwrite"])
    return train.read_checkpoint(f"runs/{compare.slug(spec)}")["model"], row


@pytest.mark.parametrize("name", why.VARIATIONS)
def test_training(name, folder, tmp_path_factory, monkeypatch):
    """It trains, and its weights or its loss differ from the reference's."""
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    (mine, row), (weights, reference) = (
        trained(spec, str(folder)) for spec in (name, why.VARIATIONS[name].reference))
    assert torch.tensor(row["loss"]).isfinite() and row["loss"] != reference["loss"]
    assert not same(mine, weights)


def test_sources(monkeypatch):
    """New code in one class is another run of this variation alone; a new question is none."""
    def sources():
        return [compare.source_of.__wrapped__(x) for x in ("mae", "mae.relu", "mae.l1", "mae:crop=1")]
    getsource, old = inspect.getsource, sources()
    assert len({*old}) == 3 and old[0] == old[3]
    monkeypatch.setattr(inspect, "getsource", lambda x: getsource(x).replace("squared error", "L2"))
    assert sources() == old
    monkeypatch.setattr(inspect, "getsource", lambda x: getsource(x).replace(".abs()", ".sign()"))
    assert [a == b for a, b in zip(sources(), old)] == [True, True, False, True]


def test_mae_without(monkeypatch):
    """What some variations of MAE promise, for two images with 4 of 16 patches visible."""
    noise, images = torch.rand(2, 16), make("mae")[1]
    ids_keep, ids_mask, mask = make("mae")[0].encoder.mask(images, noise, 0.75)

    model, _ = make("mae.no_decoder_positions")
    pred = model.decode(model.encode(images, ids_keep), ids_keep, ids_mask)
    assert torch.allclose(pred, pred[:, :1].expand_as(pred), atol=1e-5)
    model, _ = make("mae.no_visible_positions")
    latent = model.encode(images, ids_keep)
    changed = model.add_mask_tokens(latent, ids_keep, ids_mask) - make("mae")[0].add_mask_tokens(
        latent, ids_keep, ids_mask)                                    # (B, 1+L, E)
    assert torch.allclose(changed[:, 1:5], -model.decoder_pos_embed[0, 1:][ids_keep], atol=1e-6)
    assert not changed[:, 0].any() and not changed[:, 5:].any()
    model, _ = make("mae.drop_path")
    assert [block.drop_path.p for block in model.encoder.blocks] == [0, 0.1]
    assert {block.drop_path.p for block in model.decoder_blocks} == {0}
    model, _ = make("mae.no_class_token")
    tokens = model.encoder(images)
    model.encoder.cls_token.data.fill_(9)
    assert not tokens[:, 0].any() and torch.equal(model.encoder(images), tokens)
    model, _ = make("mae.post_norm")
    for tokens in model.encoder.feature_maps(model.encoder.embed(images))[1:]:
        assert torch.allclose(tokens.var(2, correction=0), torch.ones(2, 17), atol=1e-3)
    model, _ = make("mae.relu")
    mlp, x = model.decoder_blocks[0].mlp, torch.randn(3, 64)
    assert torch.equal(mlp(x), mlp.fc2(mlp.fc1(x).relu()))
    masked = model.encoder.pixels_of(mask).bool()
    for name in ("mae.masked_pixels", "mae.mask_tokens_in_encoder"):
        model, _ = make(name)
        latent = model.encode(images, ids_keep)                        # masked pixels do not matter
        assert torch.equal(model.encode(images.masked_fill(masked, 7), ids_keep), latent)
        assert torch.equal(model.encoder(images.masked_fill(masked, 0)), latent) is (
            name == "mae.masked_pixels")
    embedded, tokens = model.encoder.embed(images), torch.full((1, 1, 16), 3.0)
    monkeypatch.setattr(model.encoder, "encode", lambda tokens: tokens)
    model.encoder_mask_token.data = tokens
    seen = model.encode(images, ids_keep)
    assert torch.equal(gather_patches(seen, ids_keep), gather_patches(embedded, ids_keep))
    assert torch.equal(gather_patches(seen, ids_mask),
                       tokens + model.encoder.pos_embed[0, 1:][ids_mask])
    model, _ = make("mae.mean_colours")
    target = model.target(images, ids_mask).unflatten(2, (16, 3))      # (B, M, p*p, C)
    assert torch.allclose(target[0, 0, 5], make("mae")[0].target(images, ids_mask)[0, 0].view(
        16, 3).mean(0)) and torch.equal(target[:, :, 0], target[:, :, 9])
    model, _ = make("mae.one_mask")
    assert torch.equal(*model.draw_batch([images], None, noise)[1])
    model, _ = make("mae.fixed_masks")
    whole = (255 * torch.rand(2, 3, 16, 16)).round()
    (_, first), (_, again) = (model.draw_batch([x], None, torch.rand(2, 16))
                              for x in (whole, whole.flip(3) + 1e-4))
    assert torch.equal(first, again) and not torch.equal(*first)
    model, _ = make("mae.all_patches")
    (loss, _), (masked, _) = (x.forward(images, noise) for x in (model, make("mae")[0]))
    pred = model.decode(model.encode(images, ids_keep), ids_keep, ids_mask, visible_too=True)
    visible = (pred[:, :4] - model.target(images, ids_keep)).square().mean()
    assert loss.item() == pytest.approx((0.75 * masked + 0.25 * visible).item())


def test_others_without():
    """What some variations of the other methods promise."""
    w = make("crossmae.one_mix")[0].map_weights()                      # (decoder depth, n)
    assert w.shape == (4, 3) and torch.equal(w[0], w[3]) and w[0, 0] != w[0, 1]
    assert make("crossmae.equal_weights")[0].map_weights().unique().item() == pytest.approx(1 / 3)
    for name, shared in (("minr", False), ("minr.no_weight_norm", True)):
        model, images = make(name)
        W, _ = model.modulate(torch.randn(2, 16, 16))[1]
        assert torch.allclose(W.norm(dim=1), torch.ones(2, 64), atol=1e-4) is not shared
    for name, size in (("minr.raw_coordinates", 64), ("hypermae.raw_coordinates", 64)):
        model, _ = make(name)
        first = torch.eye(size)                            # a layer that shows its input
        coords = torch.tensor([[0.5, -0.25]])
        if name[0] == "m":
            seen = model.decode(coords, [(first, torch.zeros(size))]) - 0.5
        else:
            model.paco_mlp, model.modulated_layer = nn.ModuleList([nn.Identity()]), 0
            seen = model.decode(coords, first) - 0.5
        assert seen.flatten().tolist() == [0.5] * 32 + [-0.25] * 32
    model, images = make("imae.one_linear_layer")
    assert torch.equal(*model.encode(images, torch.arange(4).expand(2, 4)))


def test_altered_encoders(folder, tmp_path, monkeypatch, refused, spy):
    """finetune.py classifies with the encoder as it was pretrained, but refuses it alone. Other
    programs know the variation as well."""
    monkeypatch.chdir(tmp_path)
    words = ["--data", str(folder), "--epochs", "1", *TINY[:10], "--workers", "0"]
    why.main(["train.py", "--method", "mae.relu", *words, "--name", "a"])
    knn = ["--checkpoint", "runs/a", "--mode", "knn"]
    refused(finetune.main, knn, "encoder.Relu: the file has (0,), the model nothing")
    seen = spy(finetune, "knn", lambda model, *_: model.encoder.blocks[0].mlp)
    why.main(["finetune.py", *knn])
    assert type(seen[0]) is why.Relu.MLP and why.classifier([]) is finetune.Classifier
    rows = why.main(["-m", "tests.evaluate", "runs/a", "--mask_ratios", "0.5", "--workers", "0"])
    assert rows[0]["psnr_masked"] > 0
    why.main(["tests.tour", "mae.relu", "--out", "tour.html"])
    assert "F.relu" in (tmp_path / "tour.html").read_text()


def wrong_numbers():
    """Return the numbers in WHY.md's and README.md's sentences that differ from the log: links such
    as [-2.9 dB](#mae.l1), [+0.1 points in 20-NN](...) and [**-3.1 points fine-tuned**](...), bold
    if clear."""
    numbers, found, wrong = why.recorded(), {compare.slug(x): x for x in why.VARIATIONS}, []
    columns = {"dB": "pixels", "points in 20-NN": "20-NN", "points fine-tuned": "fine-tuned"}
    text = "".join((ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
                   for page in ("tests/docs/WHY.md", "README.md"))
    cited = re.findall(
        r"\[(\**)([+-][\d.]+) ([\w -]+?)\**\]\((?:tests/docs/WHY.md)?#(.*?)\)", text)
    for bold, number, unit, anchor in cited:
        minus = why.differences(numbers, why.VARIATIONS[found[anchor]])
        if minus.get(columns[unit]) != f"{bold}{number}{bold}":
            wrong.append((anchor, unit, number))
    assert len(cited) > 5
    return wrong


def test_page(monkeypatch, tmp_path):
    """WHY.md's tables, its sentences' numbers and why.svg are those of the log; with another log,
    each of them is wrong. Links to lines lead to them."""
    page, svg = why.PAGE.read_text(encoding="utf-8"), (ROOT / ".github/why.svg").read_text()
    monkeypatch.setattr(why, "PAGE", tmp_path / "WHY.md")
    monkeypatch.setattr(why, "ROOT", tmp_path)
    (tmp_path / ".github").mkdir()
    for file in {found.file for found in why.VARIATIONS.values()}:
        (tmp_path / file).symlink_to(ROOT / file)

    def written():
        why.PAGE.write_text(page, encoding="utf-8")
        why.write_page()
        return why.PAGE.read_text(encoding="utf-8"), (tmp_path / ".github/why.svg").read_text()
    assert written() == (page, svg), "run `python -m tests.why --page`"
    assert wrong_numbers() == []
    for name, file, line in re.findall(r"\[(\w+)\]\(../../(\w+.py)#L(\d+)\)", page):
        assert f"def {name}(" in (ROOT / file).read_text().splitlines()[int(line) - 1]
    lines = why.LOG.read_text().splitlines()
    changed = [line.replace('psnr_masked":1', 'psnr_masked":2') if '"encoder":"mae.no_decoder' in line
               and '"seed":1' in line else line for line in lines]
    monkeypatch.setattr(why, "LOG", tmp_path / "log.jsonl")
    why.LOG.write_text("\n".join(changed))
    assert written()[0] != page and written()[1] != svg
    assert {anchor for anchor, *_ in wrong_numbers()} == {"mae.no_decoder_positions"}


def test_other_programs(folder, tmp_path):
    """`python -m tests.why` runs another program once, and ends without an error."""
    for program in (f"train.py --method mae.l1 --data {folder} --epochs 0 --workers 0 --name l1",
                    "tests.tour mae.l1 --checkpoint runs/l1"):
        subprocess.run([sys.executable, "-m", "tests.why", *program.split()], cwd=tmp_path,
                       check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    page = (tmp_path / "tour_mae.l1.html").read_text(encoding="utf-8")
    assert "mask most of an image" in page and "Why is this line here?" not in page   # mae.py's head


def test_changed_lines(monkeypatch, tmp_path):
    """A line that a student has changed or removed has no answer in the tour, but others do."""
    for file in {found.file for found in why.VARIATIONS.values()}:
        code = (ROOT / file).read_text(encoding="utf-8")
        (tmp_path / file).write_text(code.replace(".square().mean()", ".abs().mean()"), "utf-8")
    monkeypatch.setattr(why, "ROOT", tmp_path)
    left = {found.spec for line in why.at_lines.__wrapped__().values() for _, found, _ in line}
    assert "mae.l1" not in left and "mae.all_patches" in left


def test_class_token_learns():
    """Although nothing is predicted from it, the class token has a gradient."""
    model, images = make("mae")
    model(images)[0].backward()
    assert model.encoder.cls_token.grad.abs().max() > 1e-6


def test_main(monkeypatch, tmp_path, capsys, refused):
    """A name is described, trained and compared with its reference, seed by seed, each spec once;
    then come recorded scores."""
    ran = []

    def run(command, title, *_):
        ran.append((title, command))
        return {"top1": 40.0 + len(title)} if "--mode" in command or "--labels" in command else {}
    monkeypatch.setattr(compare, "run", run)
    monkeypatch.chdir(tmp_path)
    words = ["mae.l1", "crossmae.no_rate_factor:prediction_ratio=0.25", "mae:crop=1",
             "crossmae:prediction_ratio=0.25", "--seeds", "1", "0", "--out"]
    monkeypatch.setattr(why, "LOG", tmp_path / "log.jsonl")
    assert why.main([*words, str(why.LOG)]) == 0
    said = capsys.readouterr().out
    code = (ROOT / "mae.py").read_text().splitlines()
    number = 1 + [why.VARIATIONS["mae.l1"].line in line for line in code].index(True)
    assert f"mae.l1\n  mae.py, line {number}: loss = (pred - target)" in said and "Sec. 3" in said
    assert "shapes, ViT-micro, 10 epochs, 10000 images" in said and "needs three seeds" in said
    trained = [title for title, command in ran if " train.py --" in command]
    specs = ["mae", "mae.l1", "mae:crop=1", "crossmae:prediction_ratio=0.25", words[1], "crossmae"]
    assert trained == [f"{spec}, seed {seed}" for seed in (1, 0) for spec in specs]
    assert [command.split()[1:4] for title, command in ran if title == "mae.l1, seed 1"] == [
        ["-m", "tests.why", x] for x in ("train.py", "-m", "finetune.py", "finetune.py")]
    assert why.main([*words, "out.jsonl"]) == 0
    assert "Recorded in tests/logs/why.jsonl:\nshapes, ViT" in capsys.readouterr().out
    ran.clear()
    assert why.main([]) == 0 and not ran
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in why.VARIATIONS)
    why.main("--help")
    assert "python -m tests.why mae.no_decoder_positions" in capsys.readouterr().out
    refused(why.main, ["--seeds", "0"], "put a variation before --seeds 0")
    refused(why.main, ["mae.l1", "--seed", "0"], "--seed: use --seeds")
    refused(why.main, ["mae:l1"], "no variation is named mae:l1, but mae.l1 may be")
