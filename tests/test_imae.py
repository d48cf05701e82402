"""What i-MAE is about: which branch paints which image, the teacher, and linear separability."""

import math
from fractions import Fraction

import pytest
import torch

import train
from imae import (IMAE, MIXES, check_same_class, draw_partners, ridge_r2,
                  teacher_of)
from mae import MAE
from tests.conftest import DECODER as DECODER_WORDS
from tests.conftest import ROOT, TINY, same, stopping_after_two, together
from tests.golden import load, replay
from tests.test_methods import DECODER, SMALL, build, images_and_noise
from vit import denormalize

TEACHER = dict(dim=12, depth=1, heads=2)


def pair_and_noise(B=3):
    images, noise = images_and_noise(B)
    return images, torch.randn(images.shape, generator=torch.Generator().manual_seed(2)), noise


def test_branch_one_is_the_image_of_the_smaller_weight():
    """Below and at 0.5 the first image is the subordinate one, above it the second."""
    model, (x1, x2, _) = build("imae"), pair_and_noise()
    mixture, (weak, strong) = model.mixture(x1, x2, torch.tensor([0.3, 0.5, 0.51]))
    for i, (a, first) in enumerate([(0.3, True), (0.5, True), (0.51, False)]):
        assert torch.allclose(mixture[i], a * x1[i] + (1 - a) * x2[i])
        assert torch.equal(weak[i], x1[i] if first else x2[i])
        assert torch.equal(strong[i], x2[i] if first else x1[i])
    assert torch.equal(model.mixture(x1, x2, 0.5)[1][0], x1)


@pytest.mark.parametrize("a", [0.2, 0.5, 0.7])
@pytest.mark.parametrize("options", [
    {}, dict(branches=1), dict(norm_pix_loss=True), dict(teacher=TEACHER, distill_weight=0.7),
    dict(teacher=TEACHER, branches=1)])
def test_loss_written_out(options, a):
    model, (x1, x2, noise) = build("imae", **options), pair_and_noise()
    loss, parts = model(x1, noise, x2, a)
    weak, strong = (x1, x2) if a <= 0.5 else (x2, x1)
    ids_keep, ids_mask, mask = model.encoder.mask(x1, noise, 0.75)
    mixture, total, n = a * x1 + (1 - a) * x2, 0, len(model.decoder_embed)
    preds = model.run(x1, x2, a, noise, 0.75)[0]
    for image, pred, name, z in zip((weak, strong), preds, ("subordinate", "dominant"),
                                    model.encode(mixture, ids_keep)):
        ids = torch.arange(24).expand(3, -1)
        error = (pred - model.encoder.targets(image, ids, model.norm_pix_loss)).square().mean(2)
        wanted = (error * mask).sum() / mask.sum()
        assert torch.allclose(parts[name], wanted, atol=1e-5)
        total = total + wanted
        if model.teacher:                                  # what it sees is not mixed
            w = model.teacher["decoder_embed"](model.teacher["encoder"](image, ids_keep))
            total = total + model.distill_weight * (z - w).square().mean()
    assert torch.allclose(loss, total, atol=1e-5) and len(preds) == n
    assert (parts["distill"] > 0) == (model.teacher is not None)


def test_nothing_but_the_loss_reaches_the_student():
    """A teacher with weight 0 changes neither loss nor gradient, and never learns itself."""
    plain, (x1, x2, noise) = build("imae"), pair_and_noise()
    idle = build("imae", teacher=TEACHER, distill_weight=0.0)
    taught = build("imae", teacher=TEACHER)
    for model in (plain, idle, taught):
        model(x1, noise, x2, 0.3)[0].backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), idle.named_parameters()):
        assert torch.equal(a, b) and (a.grad is None or torch.equal(a.grad, b.grad)), name
    assert not torch.equal(plain.encoder.cls_token.grad, taught.encoder.cls_token.grad)
    assert all(p.grad is None and not p.requires_grad for p in taught.teacher.parameters())
    assert torch.equal(idle.predict(x1, noise), plain.predict(x1, noise))


def test_hidden_pixels_of_neither_image_leak():
    model, (x1, x2, noise) = build("imae"), pair_and_noise()
    hidden = model.encoder.pixels_of(model.encoder.mask(x1, noise, 0.75)[2])
    preds = model.run(x1, x2, 0.3, noise, 0.75)[0]
    other = model.run(x1 + hidden, x2 - 2 * hidden, 0.3, noise, 0.75)[0]
    assert all(torch.equal(a, b) for a, b in zip(preds, other))


def test_bare_call():
    """Partners are the images before, the weight is drawn from Beta(b, b)."""
    model, (images, noise) = build("imae", beta=3.0), images_and_noise()
    torch.manual_seed(5)
    loss = model(images, noise)[0]
    torch.manual_seed(5)
    mix = torch.distributions.Beta(3.0, 3.0).sample()
    assert torch.equal(loss, model(images, noise, images.roll(1, 0), mix)[0])
    assert {*model(images)[1]} == {"loss", "subordinate", "dominant", "distill"}


def test_starts_from_an_mae():
    """Its decoder embedding starts both branches, as the released script does; the rest by name."""
    mae = MAE(**SMALL, **DECODER)
    for branches in (1, 2):
        model = build("imae", branches=branches)
        state = model.from_mae(mae.state_dict())
        assert state.keys() == model.state_dict().keys()
        model.load_state_dict(state)
        for branch in model.decoder_embed:
            assert torch.equal(branch.weight, mae.decoder_embed.weight)
            assert torch.equal(branch.bias, mae.decoder_embed.bias)
        images, noise = images_and_noise()
        model.norm_pix_loss = mae.norm_pix_loss            # unmixed it is that MAE
        assert torch.allclose(model.reconstruct(images, noise)[0],
                              mae.reconstruct(images, noise)[0], atol=1e-5)


def test_unmix_and_reconstruct():
    model, (x1, x2, noise) = build("imae"), pair_and_noise()
    (weak, strong), mask = model.unmix(x1, x2, 0.3, noise)
    hidden = model.encoder.pixels_of(mask).bool().expand_as(x1)
    assert weak.shape == strong.shape == x1.shape and not torch.allclose(weak, strong)
    assert not torch.allclose(weak[~hidden], x1[~hidden])  # visible patches are predicted too
    painted = model.reconstruct(x1, noise)[0]
    assert torch.equal(painted[hidden], model.unmix(x1, x2, 1.0, noise)[0][1][hidden])
    assert torch.equal(painted[~hidden], x1[~hidden])
    assert len(build("imae", branches=1).unmix(x1, x2, 0.3, noise)[0]) == 1


def test_leak_free_pictures_know_only_the_mixture():
    """Two pairs with the same mixture are painted alike, whatever they are made of."""
    model, (x1, x2, noise) = build("imae", norm_pix_loss=True), pair_and_noise()
    other = x1 + 0.5, x2 - 0.5
    a, b = (model.unmix(*pair, 0.5, noise, leak_free=True)[0] for pair in ((x1, x2), other))
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(a, b))
    a, b = (model.unmix(*pair, 0.5, noise)[0] for pair in ((x1, x2), other))
    assert not any(torch.allclose(p, q, atol=0.1) for p, q in zip(a, b))


def test_ridge_r2():
    g = torch.Generator().manual_seed(0)
    x, A, noise = (torch.randn(*s, generator=g) for s in ((600, 2, 5), (5, 3), (600, 2, 3)))
    linear, other = x @ A + 3, noise + torch.tensor([[[5.0], [-5.0]]])  # a token's mean is no merit
    fit, val = slice(0, 500), slice(500, 600)
    assert ridge_r2(x[fit], linear[fit], x[val], linear[val]) > 0.999
    assert abs(ridge_r2(x[fit], other[fit], x[val], other[val])) < 0.1
    half = x @ A / (x @ A).std() + noise                   # half of the variance is explained
    assert abs(ridge_r2(x[fit], half[fit], x[val], half[val]) - 0.5) < 0.12


@pytest.mark.parametrize("branches", [1, 2])
def test_measures(branches):
    """A row a weight, R^2 for each branch where there is a teacher."""
    images = images_and_noise(18)[0]
    model = build("imae", branches=branches, teacher=TEACHER)
    (rows,) = model.measures(images[:8], images[8:]).values()
    names = ("subordinate", "dominant")[:branches]
    assert [row["mix"] for row in rows] == [*MIXES] and all([*row] == [
        "mix", "psnr", *(f"{s} {n}" for s in ("branch", "mixed") for n in names)] for row in rows)
    (plain,) = build("imae", branches=branches).measures(images[:8], images[8:]).values()
    assert [*plain[0]] == ["mix", "psnr"]
    assert model.measures(images[:8], images[8:17]) == {}


def test_measures_find_what_is_there():
    """Branches that are linear in the teacher's latents score 1, noise scores 0; PSNR by hand."""
    g = torch.Generator().manual_seed(4)
    images = torch.randn(300, 3, 16, 24, generator=g)
    model = build("imae", teacher=TEACHER)
    teach, asked = model.teach, []
    mixture = model.mixture

    def remember(images, partners, mix):
        asked[:] = images, partners
        return mixture(images, partners, mix)

    class Oracle(torch.nn.Module):
        def __init__(self, which):
            super().__init__()
            self.which = which

        def forward(self, mixed):
            ids_keep = model.encoder.mask(asked[0], model.one_mask(asked[0]), 0.75)[0]
            return 2 * teach(asked[self.which], ids_keep) + 1
    own = model.decoder_embed
    model.mixture, model.decoder_embed = remember, torch.nn.ModuleList([Oracle(0), Oracle(1)])
    row = [*model.measures(images[:200], images[200:]).values()][0][3]
    assert row["branch subordinate"] > 0.99 and row["branch dominant"] > 0.99
    assert row["mixed subordinate"] < row["mixed dominant"] < 0.95
    model.mixture, model.decoder_embed = mixture, own
    noise = torch.randn(300, 7, 16, generator=g)
    w = teach(images, model.encoder.mask(images, model.one_mask(images), 0.75)[0])
    assert abs(ridge_r2(noise[:200], w[:200], noise[200:], w[200:])) < 0.1

    val = images[200:]
    painted, mask = model.unmix(val, val.roll(1, 0), 0.2, model.one_mask(val))
    hidden = model.encoder.pixels_of(mask).expand_as(val).bool()
    error = (denormalize(painted[0], model) - denormalize(val, model)).square()
    wanted = torch.stack([-10 * e[h].mean().log10() for e, h in zip(error, hidden)]).mean()
    assert abs([*model.measures(val[:2], val).values()][0][3]["psnr"] - wanted) < 1e-3


def test_figure():
    """A row a weight; mixture, masked, prediction, with visible patches, the two targets."""
    model, (images, _) = build("imae"), images_and_noise()
    rows = model.figures(images)["unmix"]
    assert rows.shape == (len(MIXES), 6, 3, 16, 24)
    assert torch.allclose(rows[0, 0], 0.05 * images[0] + 0.95 * images[1], atol=1e-6)
    assert torch.equal(rows[3, 4], images[0]) and torch.equal(rows[3, 5], images[1])
    assert torch.allclose(rows[3, 0], 0.2 * images[0] + 0.8 * images[1], atol=1e-6)
    hidden = rows[0, 1] == 0
    assert torch.equal(rows[0, 3][~hidden], rows[0, 0][~hidden])
    assert torch.equal(rows[0, 3][hidden], rows[0, 2][hidden])


def test_wrong_inputs():
    model, (images, noise) = build("imae"), images_and_noise()
    with pytest.raises(ValueError, match="partners of shape"):
        model(images, noise, images[:1], 0.3)
    assert model.figures(images[:1]) == {}


@pytest.mark.parametrize("options, words", [
    (dict(branches=3), "branches 3"), (dict(beta=0.0), "beta 0.0"),
    (dict(distill_weight=1.0), "distill_weight 1.0 needs a teacher"),
    (dict(distill_weight=-1.0, teacher=TEACHER), "distill_weight -1.0")])
def test_impossible_options(options, words):
    with pytest.raises(ValueError, match=words):
        build("imae", **options)


@pytest.mark.parametrize("config", [dict(lam=0.5), dict(lam=0.8), dict(distill=False),
                                    dict(norm_pix_loss=True)])
def test_replay_takes_other_fixtures(config):
    """Another weight exchanges the images; without distillation only the pixels count."""
    fixture = load(ROOT / "tests/golden/imae.pt")
    base = replay(fixture)
    ours = replay({**fixture, "config": {**fixture["config"], **config}})
    assert len(ours["pred"]) == 2 and ours["pred"][0].shape == (2, 16, 192)
    if "distill" in config:
        del fixture["teacher_latent_x1"], fixture["teacher_latent_x2"]
        ours = replay({**fixture, "config": {**fixture["config"], **config}})
        assert torch.allclose(ours["loss"], fixture["loss_without_distill"], atol=2e-6)
    assert torch.equal(ours["loss"], base["loss"]) == ("norm_pix_loss" in config)
    if "distill" in config:
        return
    swapped = replay({**fixture, "config": {**fixture["config"], "lam": 0.7}, "x1": fixture["x2"],
                      "x2": fixture["x1"], "teacher_latent_x1": fixture["teacher_latent_x2"],
                      "teacher_latent_x2": fixture["teacher_latent_x1"]})
    assert torch.allclose(swapped["loss"], base["loss"], atol=1e-6)


def test_defaults_are_the_papers():
    assert IMAE.pairs and IMAE.recipe["blr"] == 1e-3 and IMAE.small["crop"] == 1.0
    model = IMAE(32, 2, dim=8, depth=1, heads=1)           # CIFAR, patches of 2
    assert model.encoder.num_patches == 256 and not model.norm_pix_loss and model.beta == 1.0


# --------------------------------------------------------------------- pairs in the training loop

def labels_of(*sizes):
    """Labels of classes of these sizes, well mixed."""
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("r", [0.0, 0.25, 0.5, 1.0, 0.3, 0.7])
def test_share_of_one_class_is_exact(r):
    """The k-th pair is of one class iff floor((k+1) r) > floor(k r): in every stretch of the order,
    and every possible partner comes up."""
    labels, seen = labels_of(5, 3, 2), {}
    for epoch in range(300):
        g = torch.Generator().manual_seed(epoch)
        order = torch.randperm(10, generator=g)
        partners = draw_partners(order, labels, r, g)
        same = labels[order] == labels[partners]
        share = Fraction(str(r))
        assert same.tolist() == [math.floor((k + 1) * share) > math.floor(k * share)
                                 for k in range(10)]
        assert (order != partners).all()
        for a, b in zip(order.tolist(), partners.tolist()):
            seen.setdefault(a, set()).add(b)
    for a in range(10):
        mates = {b for b in range(10) if b != a and labels[b] == labels[a]}
        others = {b for b in range(10) if labels[b] != labels[a]}
        assert seen[a] == (mates if r > 0 else set()) | (others if r < 1 else set())


def test_random_partners_are_any_other_picture():
    g = torch.Generator().manual_seed(0)
    order = torch.arange(4).repeat(3000)
    partners = draw_partners(order, labels_of(4), None, g)
    count = torch.zeros(4, 4).index_put((order, partners), torch.ones(()), accumulate=True)
    assert (count.diag() == 0).all() and (count[count > 0] - 1000).abs().max() < 120


def test_classes_without_partners():
    """A share above 0 needs two pictures a class, one below 1 two classes; both need labels."""
    two, few, one = labels_of(9, 9), labels_of(9, 1), labels_of(9)
    for labels, classes, r in ((two, "ab", 0.5), (two, None, None), (few, "ab", 0.0), (one, "a", 1)):
        check_same_class(labels, classes, r)
    for labels, classes, r in ((few, "ab", 0.1), (one, "a", 0.5), (one, None, 0.5), (one, [], 1)):
        with pytest.raises(ValueError, match=f"--same_class {r} needs class folders"):
            check_same_class(labels, classes, r)


@pytest.mark.parametrize("method", ["mae", None])
@pytest.mark.parametrize("img_size, patch_size", [((16, 24), (4, 4)), ((16, 24), 4)])
def test_teacher_of_a_checkpoint(method, img_size, patch_size):
    """Its sizes and its encoder's and decoder embedding's weights; what does not fit, in numbers."""
    mae = MAE(**{**SMALL, **DECODER, "dim": 12})
    checkpoint = dict(method=method, model=mae.state_dict(), config={**SMALL, "dim": 12})
    config = {**SMALL, "img_size": img_size, "patch_size": patch_size, **DECODER}
    teacher, state = teacher_of(checkpoint, config)
    assert teacher == dict(dim=12, depth=2, heads=2)
    model = build("imae", teacher=teacher)
    model.teacher.load_state_dict(state)
    images, noise = images_and_noise()
    ids_keep = model.encoder.mask(images, noise, 0.75)[0]
    wanted = mae.decoder_embed(mae.encode(images, ids_keep))
    assert torch.equal(model.teach(images, ids_keep), wanted)
    for other, words in ((dict(decoder_dim=24), "decoder_dim 16, this model 24"),
                         (dict(img_size=24), r"img_size \(16, 24\), this model 24"),
                         (dict(patch_size=(4, 8)), r"patch_size 4, this model \(4, 8\)")):
        with pytest.raises(ValueError, match="the teacher has " + words):
            teacher_of(checkpoint, {**config, **other})


@pytest.mark.parametrize("name, options", [
    ("mae", dict(inter_block_attention=True)), ("crossmae", {}), ("imae", {}), ("hypermae", {})])
def test_other_models_are_no_teachers(name, options):
    model = build(name, **options)
    with pytest.raises(ValueError, match="not an MAE with its decoder embedding"):
        teacher_of(dict(method=name, config=SMALL, model=model.state_dict()), {**SMALL, **DECODER})


def pairs_seen(monkeypatch, pretrain, *words):
    """All (images, partners, mix) on which a run trained, and its checkpoint."""
    seen, forward = [], IMAE.forward

    def remember(self, images, noise, partners, mix):
        seen.append((images, partners, mix))
        return forward(self, images, noise, partners, mix)
    with monkeypatch.context() as patch:
        patch.setattr(IMAE, "forward", remember)
        content = pretrain("--method", "imae", *words)
    return seen, content


def colour(images):
    """The class of conftest's pictures: whether red or blue is stronger."""
    return images[:, ::2].mean((2, 3)).argmax(1)


@pytest.mark.parametrize("size", ["16", "8"])              # in memory; larger pictures stream
def test_pairs_of_a_run(size, pretrain, monkeypatch):
    words = ["--img_size", size, "--patch_size", "4", "--same_class", "0.25"]
    seen, _ = pairs_seen(monkeypatch, pretrain, *words)
    same = torch.cat([colour(images) == colour(partners) for images, partners, _ in seen])
    assert same.view(2, -1).sum(1).tolist() == [10, 10]    # of 40 pictures, each epoch
    mixes = torch.stack([mix for *_, mix in seen])
    assert len(mixes.unique()) == 10 and ((mixes > 0) & (mixes < 1)).all()
    fixed, _ = pairs_seen(monkeypatch, pretrain, *words, "--overwrite", "--mix", "0.3")
    assert {mix.item() for *_, mix in fixed} == {torch.tensor(0.3).item()}
    again, _ = pairs_seen(monkeypatch, pretrain, *words, "--overwrite")
    assert all(torch.equal(a, b) for x, y in zip(seen, again) for a, b in zip(x, y))


def test_two_processes_see_the_same_pairs(pretrain, folder):
    words = ["--method", "imae", "--optimizer", "sgd", "--lr", "0.1", "--same_class", "0.5"]
    one = pretrain(*words, "--accum", "2", name="one")
    together("train.py", "--data", folder, *TINY, *DECODER_WORDS, *words, "--name", "two")
    two = train.read("runs/two/last.pt")
    assert same(one["model"], two["model"], atol=1e-6)


def test_teacher_from_a_checkpoint(pretrain, tmp_path, capsys):
    """Our own MAE's or a released one; it stays as it is, and is in the student's checkpoint."""
    mae = pretrain("--dim", "64")                          # of a width that tells the heads
    released = {k.removeprefix("encoder."): v for k, v in mae["model"].items()}
    torch.save({"model": released}, tmp_path / "released.pth")
    for name, file in (("own", "runs/mae/last.pt"), ("released", tmp_path / "released.pth")):
        pretrain("--method", "imae", "--teacher", str(file), name=name)
        said = capsys.readouterr().out
        assert "no distillation" not in said
        model = train.load(f"runs/{name}/last.pt")
        for k, v in model.teacher.state_dict().items():
            assert torch.equal(v, mae["model"][k])
        assert model.distill_weight == 1.0
    pretrain("--method", "imae", name="alone")
    assert "no distillation: --teacher FILE" in capsys.readouterr().out
    start = pretrain("--method", "imae", "--init", "runs/mae/last.pt", "--epochs", "0", "--dim",
                     "64", "--teacher", "runs/mae/last.pt", name="init")["model"]
    for branch in ("decoder_embed.0.", "decoder_embed.1.", "teacher.decoder_embed."):
        assert torch.equal(start[branch + "weight"], mae["model"]["decoder_embed.weight"])


def test_resuming_with_a_teacher(pretrain, monkeypatch):
    """The uninterrupted run: the same pairs, weights and latents."""
    pretrain()
    words = ["--method", "imae", "--teacher", "runs/mae/last.pt", "--same_class", "0.5", "--epochs",
             "3"]
    whole = pretrain(*words, name="whole")
    with stopping_after_two(monkeypatch):
        pretrain(*words, name="part")
    part = pretrain(*words, "--resume", name="part")
    assert same(whole["model"], part["model"]) and len(part["history"]) == 3
