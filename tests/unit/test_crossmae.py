"""What CrossMAE is about: patches that do not depend on one another, and mixed feature maps."""

from unittest.mock import patch

import pytest
import torch

from crossmae import CrossBlock, CrossMAE
from tests.unit.test_methods import build, images_and_noise
from vit import gather_patches


def ids_of(model, images, noise):
    """Return ids_keep, ids_mask and the patches that the loss compares."""
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
    with patch("crossmae.gather_patches", wraps=gather_patches) as target:
        model(images, noise)
    return ids_keep, ids_mask, target.call_args[0][1]


@pytest.mark.parametrize("side, mask_ratio, prediction_ratio, visible, predicted", [
    (4, 0.75, 0.75, 4, 12), (14, 0.75, 0.25, 49, 49), (6, 0.6, 0.1, 14, 4), (14, 0.9, 0.3, 19, 60),
    (8, 0.75, 0.15, 16, 10), (8, 0.5, 1e-17, 32, 1)])      # 10, not 9, as in the release
def test_counts(side, mask_ratio, prediction_ratio, visible, predicted):
    """The numbers of visible and of skipped patches are rounded down. All other patches are
    predicted, each once."""
    model = build("crossmae", img_size=side, patch_size=1, mask_ratio=mask_ratio,
                  prediction_ratio=prediction_ratio)
    ids_keep, ids_mask, ids = ids_of(model, torch.zeros(2, 3, side, side), torch.rand(2, side ** 2))
    assert (ids_keep.shape[1], ids.shape[1]) == (visible, predicted)
    assert CrossMAE.lr_scale(mask_ratio, prediction_ratio) == prediction_ratio / mask_ratio
    for chosen, masked in zip(ids.tolist(), ids_mask.tolist()):
        assert {*chosen} <= {*masked} and len({*chosen}) == predicted


def test_partial_loss_is_unbiased():
    """The mean partial loss over draws that predict each masked patch equally often is the full
    loss (Sec. 3.3). Reconstruction always predicts all masked patches (Figure 2)."""
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
    few = mask.bool() & (mask.cumsum(1) <= 3)              # fewer patches than are skipped
    assert model.skipped == 12 and model(images, few)[0].isfinite()
    for ratio in (None, 0.5):
        a, b = (m.reconstruct(images, noise, ratio)[0] for m in (model, full))
        assert torch.equal(a, b)


def test_a_block_with_self_attention():
    """Queries attend to one another first, then to the encoder's tokens (A.4)."""
    torch.manual_seed(0)
    block, x, y = CrossBlock(12, 6, 2, True), torch.randn(2, 3, 12), torch.randn(2, 4, 6)
    wanted = x + block.self_attn(block.norm0(x))
    wanted = wanted + block.cross_attn(block.norm1(wanted), y)
    wanted = wanted + block.mlp(block.norm2(wanted))
    assert torch.allclose(block(x, y), wanted, atol=1e-6)


@pytest.mark.parametrize("options, used", [                # indices of feature maps, 0: the input
    ({}, [0, 1, 2, 3]), (dict(include_input=False), [1, 2, 3]),
    (dict(feature_maps=(2, 0)), [0, 1, 3]), (dict(feature_maps=(2,), include_input=False), [3])])
def test_mixed_maps(options, used):
    """The options choose which maps are mixed. (tests/lib/references.py checks how.) The weights
    are drawn from N(0, 1/n), where n is the number of maps (Sec. 3.4)."""
    model, n = build("crossmae", depth=3, decoder_depth=150, **options), len(used)
    W = model.map_weights()
    assert [*model.map_ids] == used and W.shape == (150, n)
    assert abs(W.std() * n ** 0.5 - 1) < 0.15 and abs(W.mean()) < 0.15
