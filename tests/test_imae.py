"""What i-MAE is about: which branch predicts which image, the teacher, separability, pairs."""

import math
from fractions import Fraction

import pytest
import torch

import train
from imae import IMAE, ALPHAS, check_same_class, draw_partners, ridge_r2
from mae import MAE
from tests.conftest import DECODER as DECODER_WORDS
from tests.conftest import ROOT, TINY, same, stopping_after_two, together
from tests.golden import load, replay
from tests.test_methods import DECODER, SMALL, TEACHER, build, images_and_noise
from vit import denormalize, normalize_patches, patchify


def pair_and_noise(B=3):
    images, noise = images_and_noise(B)
    return images, torch.randn(images.shape, generator=torch.Generator().manual_seed(2)), noise


@pytest.mark.parametrize("options", [{}, dict(branches=1), dict(norm_pix_loss=True)])
def test_the_loss_is_of_what_unmix_decodes(options):
    """Each branch's part. What is mixed, and the whole loss: tests/references.py."""
    model, (x1, x2, noise) = build("imae", **options), pair_and_noise()
    hidden = model.encoder.mask(x1, noise, 0.75)[2].bool()
    for a in (0.2, 0.5, 0.51, torch.tensor([0.2, 0.5, 0.7])):
        (_, parts), (decoded, _) = model(x1, noise, x2, a), model.unmix(x1, x2, a, noise)
        assert len(decoded) == options.get("branches", 2)
        _, images = model.mixture(x1, x2, a)
        for image, image_decoded, name in zip(images, decoded, ("subordinate", "dominant")):
            pred, target = patchify(image_decoded, 4), patchify(image, 4)
            if model.norm_pix_loss:                        # in the space of the loss
                target, mean, std = normalize_patches(target)
                pred = (pred - mean) / std
            wanted = (pred - target)[hidden].square().mean()
            assert torch.allclose(parts[name], wanted, atol=1e-5)


def test_bare_call():
    """Partners are the images before, the weight is drawn from Beta(b, b)."""
    model, (images, noise), losses = build("imae", beta=3.0), images_and_noise(), []
    for rest in (lambda: (), lambda: (images.roll(1, 0), torch.distributions.Beta(3, 3).sample())):
        torch.manual_seed(5)
        losses.append(model(images, noise, *rest())[0])
    assert torch.equal(*losses)
    assert {*model(images)[1]} == {"loss", "subordinate", "dominant", "distill"}


@pytest.mark.parametrize("branches", [1, 2])
def test_starts_from_an_mae(branches):
    """Its decoder embedding starts all branches, as the released script does: unmixed it is it."""
    mae, model = MAE(**SMALL, **DECODER), build("imae", branches=branches, norm_pix_loss=True)
    model.load_state_dict(model.from_mae(mae.state_dict()))
    assert all(torch.equal(F.weight, mae.decoder_embed.weight) for F in model.decoder_embed)
    images, noise = images_and_noise()
    assert torch.allclose(model.reconstruct(images, noise)[0], mae.reconstruct(images, noise)[0],
                          atol=1e-5)


def test_unmix():
    """Both images, every patch predicted; the hidden pixels of neither are seen."""
    model, (x1, x2, noise) = build("imae"), pair_and_noise()
    (weak, strong), mask = model.unmix(x1, x2, 0.3, noise)
    hidden = model.encoder.pixels_of(mask)
    assert weak.shape == strong.shape == x1.shape and not torch.allclose(weak, strong)
    assert not torch.allclose(weak * (1 - hidden), x1 * (1 - hidden))
    others = model.unmix(x1 + hidden, x2 - 2 * hidden, 0.3, noise)[0]
    assert torch.equal(weak, others[0]) and torch.equal(strong, others[1])
    unmixed = model.unmix(x1, x2, 1.0, noise)[0]           # what reconstruct gives
    assert torch.equal(unmixed[1], model.reconstruct(x1, noise)[0])
    assert len(build("imae", branches=1).unmix(x1, x2, 0.3, noise)[0]) == 1
    with pytest.raises(ValueError, match="^partners .* for images "):
        model.unmix(x1, x2[:1], 0.3)


def test_leak_free_images_know_only_the_mixture():
    """Two pairs with the same mixture look alike, whatever they are made of."""
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
@pytest.mark.parametrize("teacher", [None, TEACHER])
def test_measures(branches, teacher):
    """A row a weight, R^2 for each branch where there is a teacher."""
    images, model = images_and_noise(18)[0], build("imae", branches=branches, teacher=teacher)
    (rows,) = model.measures(images[:8], images[8:]).values()
    names = ("subordinate", "dominant")[:branches]
    names = [f"{where} {name}" for where in ("branch", "mixed", "control") for name in names]
    assert [row["mix"] for row in rows] == [*ALPHAS] == [i / 20 for i in range(1, 10)]
    assert all([*row] == ["mix", "psnr", *(names if teacher else [])] for row in rows)
    assert model.measures(images[:8], images[8:17]) == {}


def test_measures_find_what_is_there():
    """Of a mixture that is nearly the dominant image, that one's latent; PSNR by hand."""
    images = torch.randn(300, 3, 16, 24, generator=torch.Generator().manual_seed(4))
    model, val = build("imae", teacher=TEACHER), images[200:]
    decoded, mask = model.unmix(val, val.roll(1, 0), 0.2, model.same_noise(val))
    hidden = model.encoder.pixels_of(mask).expand_as(val).bool()
    error = (denormalize(decoded[0], model) - denormalize(val, model)).square()
    wanted = torch.stack([-10 * e[h].mean().log10() for e, h in zip(error, hidden)]).mean()
    assert abs([*model.measures(val[:2], val).values()][0][3]["psnr"] - wanted) < 1e-3

    # images of noise: an untrained encoder's latent tells more of the dominant one, but not all
    model = build("imae", teacher=TEACHER)
    row = [*model.measures(images[:200], val).values()][0][3]
    assert row["mixed subordinate"] < row["mixed dominant"] < 0.95
    model.teacher["encoder"], model.teacher["decoder_embed"] = model.encoder, model.decoder_embed[0]
    row = [*model.measures(images[:200], val).values()][0][0]          # 0.95 of the dominant one
    assert row["branch dominant"] > 0.9 > 0.3 > row["branch subordinate"]


def test_figure():
    """A row a weight; mixture, masked, prediction, with visible patches, the two targets."""
    model, (images, _) = build("imae"), images_and_noise()
    _, rows = model.figures(images)["unmix"]
    assert rows.shape == (len(ALPHAS), 6, 3, 16, 24)
    assert torch.allclose(rows[0, 0], 0.05 * images[0] + 0.95 * images[1], atol=1e-6)
    assert torch.equal(rows[3, 4], images[0]) and torch.equal(rows[3, 5], images[1])
    assert torch.allclose(rows[3, 0], 0.2 * images[0] + 0.8 * images[1], atol=1e-6)
    hidden = rows[0, 1] == 0
    assert torch.equal(rows[0, 3][~hidden], rows[0, 0][~hidden])
    assert torch.equal(rows[0, 3][hidden], rows[0, 2][hidden])
    assert model.figures(images[:1]) == {}


@pytest.mark.parametrize("config", [dict(lam=0.5), dict(lam=0.8), dict(distill=False),
                                    dict(norm_pix_loss=True)])
def test_replay_takes_other_fixtures(config):
    """Another weight exchanges the images; without distillation only the pixels count."""
    fixture = load(ROOT / "tests/golden/imae.pt")
    base, other = replay(fixture), {**fixture, "config": {**fixture["config"], **config}}
    if "distill" in config:
        del other["teacher_latent_x1"], other["teacher_latent_x2"]
    ours = replay(other)
    assert len(ours["pred"]) == 2 and ours["pred"][0].shape == (2, 16, 192)
    assert torch.equal(ours["loss"], base["loss"]) == ("norm_pix_loss" in config)
    if "distill" in config:
        assert torch.allclose(ours["loss"], fixture["loss_without_distill"], atol=2e-6)
    swapped = {name: fixture[name.translate({49: 50, 50: 49})]         # x1 for x2
               for name in ("x1", "x2", "teacher_latent_x1", "teacher_latent_x2")}
    swapped = replay({**fixture, **swapped, "config": {**fixture["config"], "lam": 0.7}})
    assert torch.allclose(swapped["loss"], base["loss"], atol=1e-6)


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


def test_random_partners_are_any_other_image():
    order = torch.arange(4).repeat(3000)
    partners = draw_partners(order, labels_of(4), None, torch.Generator().manual_seed(0))
    count = torch.zeros(4, 4).index_put((order, partners), torch.ones(()), accumulate=True)
    assert (count.diag() == 0).all() and (count[count > 0] - 1000).abs().max() < 120


def test_classes_without_partners():
    """A share above 0 needs two images a class, one below 1 two classes; both need labels."""
    two, few, one = labels_of(9, 9), labels_of(9, 1), labels_of(9)
    for labels, classes, r in ((two, "ab", 0.5), (two, None, None), (few, "ab", 0), (one, "a", 1)):
        check_same_class(labels, classes, r)
    for labels, classes, r in ((few, "ab", 0.1), (one, "a", 0.5), (one, None, 0.5), (one, [], 1)):
        with pytest.raises(ValueError, match=f"--same_class {r} needs class folders"):
            check_same_class(labels, classes, r)


def pairs_seen(monkeypatch, pretrain, *words):
    """All (images, partners, mix) on which a run trained."""
    seen, forward = [], IMAE.forward

    def remember(self, images, noise, partners, mix):
        seen.append((images, partners, mix))
        return forward(self, images, noise, partners, mix)
    with monkeypatch.context() as patch:
        patch.setattr(IMAE, "forward", remember)
        pretrain("--method", "imae", *words)
    return seen


def colour(images):
    """The class of conftest's images: whether red or blue is stronger."""
    return images[:, ::2].mean((2, 3)).argmax(1)


@pytest.mark.parametrize("size", ["16", "8"])              # in memory; larger images stream
def test_pairs_of_a_run(size, pretrain, monkeypatch):
    words = ["--img_size", size, "--patch_size", "4", "--same_class", "0.25"]
    seen = pairs_seen(monkeypatch, pretrain, *words)
    same = torch.cat([colour(images) == colour(partners) for images, partners, _ in seen])
    assert same.view(2, -1).sum(1).tolist() == [10, 10]    # of 40 images, each epoch
    mixes = torch.stack([mix for *_, mix in seen])
    assert len(mixes.unique()) == 10 and ((mixes > 0) & (mixes < 1)).all()
    fixed = pairs_seen(monkeypatch, pretrain, *words, "--overwrite", "--mix", "0.3")
    assert {mix.item() for *_, mix in fixed} == {torch.tensor(0.3).item()}
    again = pairs_seen(monkeypatch, pretrain, *words, "--overwrite")
    assert all(torch.equal(a, b) for x, y in zip(seen, again) for a, b in zip(x, y))


def test_teacher_from_a_checkpoint(pretrain, tmp_path, capsys):
    """Our own MAE's or a released one; it stays as it is, and is in the student's checkpoint. An
    MAE also starts the branches, with --init."""
    mae = pretrain("--dim", "64")                          # of a width that tells the heads
    torch.save({"model": {k.removeprefix("encoder."): v for k, v in mae["model"].items()}},
               tmp_path / "released.pth")
    for file in ("runs/mae/last.pt", "released.pth"):
        pretrain("--method", "imae", "--teacher", file, "--overwrite", name="student")
        model = train.load("runs/student/last.pt")
        assert "no distillation" not in capsys.readouterr().out and model.distill_weight == 1.0
        assert all(torch.equal(v, mae["model"][k]) for k, v in model.teacher.state_dict().items())
    pretrain("--method", "imae", "--teacher", "runs/mae/last.pt", "--resume", name="student")
    assert "teacher was released.pth and stays so: the weights are in" in capsys.readouterr().out
    start = pretrain("--method", "imae", "--init", "runs/mae/last.pt", "--epochs", "0", "--dim",
                     "64", name="init")["model"]
    assert "no distillation: --teacher" in capsys.readouterr().out
    for i in range(2):
        assert torch.equal(start[f"decoder_embed.{i}.weight"], mae["model"]["decoder_embed.weight"])


def test_resumed_or_in_two_processes_it_is_one_run(pretrain, folder, monkeypatch):
    """The same pairs, weights and latents."""
    pretrain()
    words = ["--method", "imae", "--teacher", "runs/mae/last.pt", "--same_class", "0.5", "--epochs",
             "3", "--optimizer", "sgd", "--lr", "0.1", "--accum", "2"]
    whole = pretrain(*words, name="whole")
    with stopping_after_two(monkeypatch):
        pretrain(*words, name="part")
    part = pretrain(*words, "--resume", name="part")
    assert same(whole["model"], part["model"]) and len(part["history"]) == 3
    together("train.py", "--data", folder, *TINY, *DECODER_WORDS, *words[:-2], "--name", "two")
    assert same(whole["model"], train.read("runs/two/last.pt")["model"], atol=1e-6)
