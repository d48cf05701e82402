"""What CrossMAE is about: patches that do not depend on one another, and mixed feature maps."""

import pytest
import torch

from tests.test_methods import build, images_and_noise
from vit import mask_noise


def ids_of(model, images, noise):
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
    seen, targets = [], model.encoder.targets

    def remember(images, ids, *rest):                      # the patches that the loss compares
        seen.append(ids)
        return targets(images, ids, *rest)
    model.encoder.targets = remember
    model(images, noise)
    model.encoder.targets = targets
    return ids_keep, ids_mask, seen[0]


@pytest.mark.parametrize("side, mask_ratio, prediction_ratio, visible, predicted", [
    (4, 0.75, 0.75, 4, 12), (14, 0.75, 0.25, 49, 49), (6, 0.6, 0.1, 14, 4), (14, 0.9, 0.3, 19, 60),
    (8, 0.75, 0.15, 16, 10), (8, 0.5, 0.001, 32, 1)])      # 10, not 9, as released
def test_counts(side, mask_ratio, prediction_ratio, visible, predicted):
    """Visible and skipped patches are truncated, the rest is predicted; none twice."""
    model = build("crossmae", img_size=side, patch_size=1, mask_ratio=mask_ratio,
                  prediction_ratio=prediction_ratio)
    ids_keep, ids_mask, ids = ids_of(model, torch.zeros(2, 3, side, side), torch.rand(2, side ** 2))
    assert (ids_keep.shape[1], ids.shape[1]) == (visible, predicted)
    assert model.lr_scale == prediction_ratio / mask_ratio
    for chosen, hidden in zip(ids.tolist(), ids_mask.tolist()):
        assert {*chosen} <= {*hidden} and len({*chosen}) == predicted


def test_a_prediction_does_not_depend_on_the_others():
    images, noise = images_and_noise()
    for self_attention in (False, True):
        model = build("crossmae", self_attention=self_attention)
        ids_keep, ids_mask, _ = ids_of(model, images, noise)
        features = model.encode(images, ids_keep)
        whole = model.decode(features, ids_mask)
        few = model.decode(features, ids_mask[:, 3:7])
        assert torch.allclose(few, whole[:, 3:7], atol=1e-5) != self_attention


def test_partial_loss_is_unbiased():
    """Its mean over draws that predict each hidden patch equally often is the loss of all of them
    (Sec. 3.3). Reconstruction is of all, in one pass (Figure 2)."""
    model, (images, noise) = build("crossmae", prediction_ratio=0.25), images_and_noise()
    full = build("crossmae")
    full.load_state_dict(model.state_dict())
    mask = model.encoder.mask(images, noise, 0.75)[2]
    losses = []
    for turn in range(18):                                 # each patch is predicted equally often
        rank = ((mask.cumsum(1) + turn) % 18) / 18 * mask
        losses.append(model(images, mask + rank)[0])
    assert torch.allclose(torch.stack(losses).mean(), full(images, noise)[0], atol=1e-5)
    assert torch.stack(losses).std() > 1e-3
    for ratio in (None, 0.5):
        a, b = (m.reconstruct(images, noise, ratio)[0] for m in (model, full))
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_predicted_patches_are_a_uniform_choice(kind):
    """Every hidden patch is as likely to be predicted as any other."""
    model, L, B = build("crossmae", img_size=8, patch_size=1, prediction_ratio=0.25), 64, 3000
    noise = mask_noise(kind, B, (8, 8), generator=torch.Generator().manual_seed(0))
    _, ids_mask, ids = ids_of(model, torch.zeros(B, 3, 8, 8), noise)
    predicted = torch.zeros(B, L).scatter(1, ids, 1).sum(0)
    hidden = torch.zeros(B, L).scatter(1, ids_mask, 1).sum(0)
    share = predicted[hidden > 0] / hidden[hidden > 0]
    assert (share - 1 / 3).abs().max() < 0.05


@pytest.mark.parametrize("options, map_ids", [
    ({}, [0, 1, 2]), (dict(include_input=False), [1, 2]), (dict(feature_maps=(1,)), [0, 2]),
    (dict(feature_maps=1), [0, 2]), (dict(feature_maps=(1,), include_input=False), [2])])
def test_which_maps_are_mixed(options, map_ids):
    """By their places in ViT.layers, 0 the input. How they are mixed: tests/references.py."""
    assert build("crossmae", **options).map_ids == map_ids


def test_last_map_alone():
    model = build("crossmae", feature_maps="last")
    assert isinstance(model.encoder.norm, torch.nn.LayerNorm) and not hasattr(model, "wfm")


@pytest.mark.parametrize("options, n", [
    (dict(depth=1), 2), (dict(depth=3), 4), (dict(depth=3, include_input=False), 3)])
def test_initial_weights_are_those_of_the_paper(options, n):
    """N(0, 1/n), n the number of maps (Sec. 3.4): of 300 decoder blocks. MAE's: test_mae.py."""
    W = build("crossmae", decoder_depth=300, **options).map_weights()
    assert W.shape == (300, n)
    assert abs(W.std() * n ** 0.5 - 1) < 0.1 and abs(W.mean()) < 0.1


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=False), dict(feature_maps="last"),
                                     dict(self_attention=True, decoder_depth=3)])
def test_contributions_add_up(options):
    """Appendix D: mask token and positions, then each block, sum to the prediction, and their
    images to the reconstruction."""
    model, (images, noise) = build("crossmae", **options), images_and_noise()
    torch.nn.init.normal_(model.decoder_norm.bias)
    torch.nn.init.normal_(model.decoder_norm.weight)
    parts, ids_keep, ids_mask = model.contributions(images, noise)
    assert len(parts) == 1 + len(model.decoder_blocks)
    whole = model.decode(model.encode(images, ids_keep), ids_mask)
    assert torch.allclose(parts.sum(0), whole, atol=1e-5)
    assert all(part.abs().mean() > 1e-4 for part in parts)
    figures = {name: cells for name, (_, cells) in model.figures(images).items()}
    assert ("map_weights" in figures) == (options != dict(feature_maps="last"))
    cells = figures["contributions"]
    assert cells.shape == (3, 2 + len(parts), 3, 16, 24)
    visible, last = cells[:, 0] != 0, cells[:, -1]
    assert torch.equal(last[visible], images[visible])
    assert torch.allclose(cells[:, 1:-1].sum(1)[~visible], last[~visible], atol=1e-4)
    decoded, mask = model.reconstruct(images, model.encoder.fixed_noise(images))
    wanted = model.encoder.copy_visible(decoded, images, mask)
    assert torch.allclose(last, wanted, atol=1e-4)
