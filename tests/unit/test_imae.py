"""What i-MAE is about: which branch predicts which image, the teacher, pairs."""

import math
import shutil
from fractions import Fraction

import pytest
import torch

import imae
import train
from imae import IMAE, check_same_class, draw_partners
from mae import MAE
from tests.lib.models import load_model, to_released
from tests.unit.conftest import DECODER as DECODER_WORDS
from tests.unit.conftest import TINY, same, stopping_after_two, together
from tests.unit.golden import in_loss_space
from tests.unit.test_methods import DECODER, SMALL, build, images_and_noise


def pair_and_noise(B=3):
    images, noise = images_and_noise(B)
    return images, torch.randn(images.shape, generator=torch.Generator().manual_seed(2)), noise


@pytest.mark.parametrize("options", [{}, dict(branches=1), dict(norm_pix_loss=True)])
def test_unmix_decodes_what_the_loss_compares(options):
    """For each branch, unmix returns the image that the loss compares with the original: with one
    branch, the one of less weight."""
    model, (x, y, noise) = build("imae", **options), pair_and_noise()
    for alpha in (0.2, 0.51, torch.tensor([0.2, 0.5, 0.7])):
        _, parts = model(x, noise, y, alpha)
        decoded, mask = model.unmix(x, y, alpha, noise)
        less = (torch.as_tensor(alpha).expand(3) <= 0.5).view(3, 1, 1, 1)
        images = torch.where(less, x, y), torch.where(less, y, x)
        assert len(decoded) == options.get("branches", 2)
        for name, image, image_decoded in zip(("subordinate", "dominant"), images, decoded):
            target, pred = in_loss_space(model, image, image_decoded)
            wanted = (pred - target)[mask.bool()].square().mean()
            assert torch.allclose(parts[name], wanted, atol=1e-5)


def test_bare_call():
    """By default, each partner is the image before, and alpha is drawn from Beta(beta, beta)."""
    model, (images, noise), losses = build("imae", beta=3.0), images_and_noise(), []
    for rest in (lambda: (), lambda: (images.roll(1, 0), torch.distributions.Beta(3, 3).sample())):
        torch.manual_seed(5)
        losses.append(model(images, noise, *rest())[0])
    assert torch.equal(*losses)


@pytest.mark.parametrize("branches", [1, 2])
def test_starts_from_an_mae(branches):
    """An MAE's decoder embedding becomes that of all branches (item 6), so that both models predict
    the same for unmixed images. By default, all decoder sizes are MAE's."""
    mae, model = MAE(**SMALL, **DECODER), build("imae", branches=branches, norm_pix_loss=True)
    ours, theirs = IMAE.__init__.__kwdefaults__, MAE.__init__.__kwdefaults__
    assert all(ours[key] == theirs[key] for key in DECODER)
    model.load_state_dict(model.from_mae(mae.state_dict()))
    assert all(torch.equal(F.weight, mae.decoder_embed.weight) for F in model.decoder_embed)
    images, noise = images_and_noise()
    assert torch.allclose(model.reconstruct(images, noise)[0], mae.reconstruct(images, noise)[0],
                          atol=1e-5)


def test_leak_free_images_know_only_the_mixture():
    """With leak_free, two pairs of images with the same mixture give the same predictions."""
    model, (x, y, noise) = build("imae", norm_pix_loss=True), pair_and_noise()
    for leak_free in (True, False):
        a, b = (model.unmix(*pair, 0.5, noise, leak_free=leak_free)[0]
                for pair in ((x, y), (x + 0.5, y - 0.5)))
        assert all(torch.allclose(p, q, atol=1e-3) == leak_free for p, q in zip(a, b))


# --------------------------------------------------------------------- pairs in the training loop
def labels_of(*sizes):
    """Return labels of classes of these sizes, shuffled."""
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("r", [0.0, 0.25, 0.5, 1.0, 0.3, 0.7])
def test_fraction_of_one_class_is_exact(r):
    """The k-th pair is of one class iff floor((k+1) r) > floor(k r), without rounding errors; and
    every possible partner is drawn."""
    labels, seen, exact = labels_of(5, 3, 2), {a: set() for a in range(10)}, Fraction(str(r))
    wanted = [math.floor((k + 1) * exact) > math.floor(k * exact) for k in range(100)]
    for epoch in range(30):
        g = torch.Generator().manual_seed(epoch)
        order = torch.cat([torch.randperm(10, generator=g) for _ in range(10)])
        partners = draw_partners(order, labels, r, g)
        assert (labels[order] == labels[partners]).tolist() == wanted
        for a, b in zip(order.tolist(), partners.tolist()):
            seen[a].add(b)
    for a in range(10):
        mates = {b for b in range(10) if b != a and labels[b] == labels[a]}
        others = {b for b in range(10) if labels[b] != labels[a]}
        assert seen[a] == (mates if r > 0 else set()) | (others if r < 1 else set())


def test_random_partners_are_any_other_image():
    order = torch.arange(4).repeat(3000)
    partners, again = (draw_partners(order, labels_of(4), None, torch.Generator().manual_seed(0))
                       for _ in range(2))
    assert torch.equal(partners, again)
    count = torch.zeros(4, 4).index_put((order, partners), torch.ones(()), accumulate=True)
    assert (count.diag() == 0).all() and (count[count > 0] - 1000).abs().max() < 120


def test_classes_without_partners():
    """A fraction above 0 needs two images in each class. One below 1 needs two classes."""
    two, few, one = labels_of(9, 2), labels_of(9, 1), labels_of(9)
    for labels, r in ((two, 0.5), (one - 1, None), (few, 0), (one, 1)):
        check_same_class(labels, r)
    for labels, r in ((few, 0.1), (one, 0.5), (one - 1, 1)):           # -1: without labels
        with pytest.raises(ValueError, match=f"--same_class {r} needs class folders"):
            check_same_class(labels, r)


def colour(images):
    """Return the class of conftest's images: whether red or blue is stronger."""
    return images[:, ::2].mean((2, 3)).argmax(1)


@pytest.mark.parametrize("size, weight", [("16", 0.0), ("8", 1.0)])    # in memory, in files
def test_pairs_of_a_run(size, weight, pretrain, spy):
    seen = spy(IMAE, "forward", lambda self, images, noise, *rest: (images, *rest))
    words = ["--method", "imae", "--img_size", size, "--patch_size", "4", "--same_class", "0.25"]
    pretrain(*words)
    same = torch.cat([colour(images) == colour(partners) for images, partners, _ in seen])
    assert same.view(2, -1).sum(1).tolist() == [10, 10]    # of 40 images, each epoch
    alphas = torch.stack([alpha for *_, alpha in seen])
    assert len(alphas.unique()) == 10 and ((alphas > 0) & (alphas < 1)).all()
    pretrain(*words, "--overwrite", "--alpha", str(weight))
    assert {alpha.item() for *_, alpha in seen[10:]} == {weight}


def test_teacher_from_a_checkpoint(pretrain, tmp_path):
    """The teacher is an MAE of ours or a released one. It does not change, and is saved in the
    student's checkpoint. With --init, an MAE also initialises the branches."""
    micro = ["--dim", "64", "--depth", "4"]                # sizes that tell the number of heads
    mae = pretrain(*micro, "--epochs", "0")
    torch.save({"model": to_released(load_model("runs/mae/last.pt"))}, tmp_path / "mae.pth")
    for name in ("img_size", "patch_size", "in_chans", "decoder_dim"):
        with pytest.raises(ValueError, match=f"the teacher has {name} .*, this model 99"):
            imae.teacher_state(mae, {**mae["config"], name: 99})
    for file in ("runs/mae/last.pt", "mae.pth"):           # --heads is the student's
        pretrain(*"--method imae --overwrite --heads 1 --teacher".split(), file, name="student")
        model = load_model("runs/student/last.pt")
        assert model.distill_weight == 1.0
        assert model.teacher["encoder"].blocks[0].attn.heads == 2
        teacher = model.teacher.state_dict()
        assert same(teacher, {name: mae["model"][name] for name in teacher})
        part = train.read_checkpoint("runs/student", part="teacher")   # for finetune.py --part
        assert part["config"]["heads"] == 2 and same(part["model"], {
            name: x for name, x in mae["model"].items() if name.startswith("encoder.")})
    other = pretrain("--seed", "1", *micro, "--epochs", "0", name="other")["model"]
    words = ["--method", "imae", "--epochs", "0", "--init"]
    both = pretrain(*words, "runs/student", "--heads", "1", "--teacher", "runs/other",
                    name="both")["model"]
    assert all(torch.equal(both[f"teacher.{name}"], other[name]) for name in teacher)
    start = pretrain(*words, "runs/mae/last.pt", *micro, name="init")["model"]
    for i in range(2):
        assert torch.equal(start[f"decoder_embed.{i}.weight"], mae["model"]["decoder_embed.weight"])


def test_a_resumed_run_is_one_run(pretrain, folder, monkeypatch):
    """A run that is resumed, in one process or in two, uses the same pairs, alphas and teacher."""
    pretrain()
    words = ["--method", "imae", "--teacher", "runs/mae/last.pt", "--init", "runs/mae",
             "--optimizer", "sgd", "--same_class", "0.5", "--epochs", "3", "--lr", "0.1", "--accum",
             "2"]
    whole = pretrain(*words, name="whole")
    with stopping_after_two(monkeypatch):
        pretrain(*words, name="part")
    shutil.copytree("runs/part", "runs/two")
    part = pretrain(*words, "--resume", name="part")
    said = together("train.py", "--data", folder, *TINY, *DECODER_WORDS, *words[:-2], "--resume",
                    "--name", "two")
    assert "resumed after epoch 2 of 3" in said
    with pytest.raises(ValueError, match="teacher was {.*}, is None"):
        pretrain(*words[:2], *words[4:], "--resume", name="part")
    assert same(whole["model"], part["model"]) and len(part["history"]) == 3
    assert same(whole["model"], train.read_checkpoint("runs/two/last.pt")["model"], atol=1e-6)
