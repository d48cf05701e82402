"""What CrossMAE is about: patches that do not depend on one another, mixed feature maps, and what
MAE's mask tokens attend to."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from crossmae import CrossBlock, decoder_attention
from tests.test_methods import build, images_and_noise
from vit import denormalize, mask_noise, normalize_patches


def ids_of(model, images, noise):
    """Return ids_keep, ids_mask and the patches that the loss compares."""
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
    with patch.object(model.encoder, "targets", wraps=model.encoder.targets) as targets:
        model(images, noise)
    return ids_keep, ids_mask, targets.call_args[0][1]


@pytest.mark.parametrize("side, mask_ratio, prediction_ratio, visible, predicted", [
    (4, 0.75, 0.75, 4, 12), (14, 0.75, 0.25, 49, 49), (6, 0.6, 0.1, 14, 4), (14, 0.9, 0.3, 19, 60),
    (8, 0.75, 0.15, 16, 10), (8, 0.5, 0.001, 32, 1)])      # 10, not 9, as in the release
def test_counts(side, mask_ratio, prediction_ratio, visible, predicted):
    """The numbers of visible and of unpredicted patches are rounded down. All other patches are
    predicted, each once."""
    model = build("crossmae", img_size=side, patch_size=1, mask_ratio=mask_ratio,
                  prediction_ratio=prediction_ratio)
    ids_keep, ids_mask, ids = ids_of(model, torch.zeros(2, 3, side, side), torch.rand(2, side ** 2))
    assert (ids_keep.shape[1], ids.shape[1]) == (visible, predicted)
    assert model.lr_scale == prediction_ratio / mask_ratio
    for chosen, masked in zip(ids.tolist(), ids_mask.tolist()):
        assert {*chosen} <= {*masked} and len({*chosen}) == predicted


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
    for ratio in (None, 0.5):
        a, b = (m.reconstruct(images, noise, ratio)[0] for m in (model, full))
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["random", "grid"])
def test_predicted_patches_are_a_uniform_choice(kind):
    """Every masked patch is as likely to be predicted as any other."""
    model, L, B = build("crossmae", img_size=8, patch_size=1, prediction_ratio=0.25), 64, 3000
    noise = mask_noise(kind, B, (8, 8), generator=torch.Generator().manual_seed(0))
    _, ids_mask, ids = ids_of(model, torch.zeros(B, 3, 8, 8), noise)
    predicted = torch.zeros(B, L).scatter(1, ids, 1).sum(0)
    masked = torch.zeros(B, L).scatter(1, ids_mask, 1).sum(0)
    fraction = predicted[masked > 0] / masked[masked > 0]
    assert (fraction - 1 / 3).abs().max() < 0.05


def test_a_block_with_self_attention():
    """Queries attend to one another first, then to the encoder's tokens (A.4)."""
    torch.manual_seed(0)
    block, y = CrossBlock(12, 6, 2, True), torch.randn(2, 4, 6)
    x = torch.randn(2, 3, 12, requires_grad=True)
    wanted = x + block.self_attn(block.norm0(x))
    wanted = wanted + block.cross_attn(block.norm1(wanted), y)
    wanted = wanted + block.mlp(block.norm2(wanted))
    results = block(x, y), wanted
    assert torch.allclose(*results, atol=1e-6)
    grads = [torch.autograd.grad(result.square().sum(), x)[0] for result in results]
    assert torch.allclose(*grads, atol=1e-5)


@pytest.mark.parametrize("options, used", [                # indices of feature maps, 0: the input
    ({}, [0, 1, 2, 3]), (dict(include_input=False), [1, 2, 3]),
    (dict(feature_maps=(2, 0), project_maps=True), [0, 1, 3]),
    (dict(softmax_weights=True), [0, 1, 2, 3]),
    (dict(feature_maps=(2,), include_input=False), [3])])
def test_mixed_maps(options, used):
    """The options choose which maps are mixed. (tests/references.py checks how.)"""
    assert [*build("crossmae", depth=3, **options).map_ids] == used


@pytest.mark.parametrize("options, n", [
    (dict(depth=1), 2), (dict(depth=3), 4), (dict(depth=3, include_input=False), 3)])
def test_initial_weights_are_those_of_the_paper(options, n):
    """Mixing weights are drawn from N(0, 1/n), where n is the number of maps (Sec. 3.4)."""
    W = build("crossmae", decoder_depth=150, **options).map_weights()
    assert W.shape == (150, n)
    assert abs(W.std() * n ** 0.5 - 1) < 0.1 and abs(W.mean()) < 0.1


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=False), dict(feature_maps="last"),
                                     dict(self_attention=True, decoder_depth=3, mask_ratio=0.8)])
def test_contributions_add_up(options):
    """The contributions of mask token and positions and of each block sum to the prediction, and
    their images sum to the reconstruction (Appendix D)."""
    model, (images, noise) = build("crossmae", **options), images_and_noise()
    nn.init.normal_(model.decoder_norm.bias)
    nn.init.normal_(model.decoder_norm.weight)
    parts, ids_keep, ids_mask = model.contributions(images, noise)
    assert len(parts) == 1 + len(model.decoder_blocks)
    whole = model.decode(model.encode(images, ids_keep), ids_mask)
    assert torch.allclose(parts.sum(0), whole, atol=1e-5)
    assert all(part.abs().mean() > 1e-4 for part in parts)
    cells = model.figures(images)["contributions"][1]
    assert cells.shape == (3, 2 + len(parts), 3, 16, 24)
    noise = model.encoder.fixed_noise(images)
    decoded, mask = model.reconstruct(images, noise)
    visible = (model.encoder.pixels_of(mask) == 0).expand_as(images)
    assert torch.equal(cells[:, 0], images * visible)      # grey is 0
    parts, _, ids = model.contributions(images, noise)
    _, mean, std = normalize_patches(model.encoder.targets(images, ids))
    if not model.norm_pix_loss:
        mean, std = 0, 1
    for j, cell in enumerate(cells[:, 1:-1].unbind(1)):    # the mean is added once
        wanted = parts[j] * std + (j == 0) * mean
        assert torch.allclose(model.encoder.targets(cell, ids), wanted, atol=1e-5)
        assert not cell[visible].any()                     # only masked patches are shown
    wanted = model.encoder.copy_visible(decoded, images, mask)
    assert torch.allclose(cells[:, -1], wanted, atol=1e-4)


def test_figure_of_the_mixing_weights():
    """Rows are decoder blocks, columns are maps, and grey is 0 (Figure 5c)."""
    model, (images, _) = build("crossmae", decoder_depth=4), images_and_noise()
    cells, W = model.figures(images)["map_weights"][1], model.map_weights()
    assert cells.shape == (1, 1, 3, 4, 3)
    wanted = (0.5 + 0.5 * W / W.abs().max()).expand(3, -1, -1)
    assert torch.allclose(denormalize(cells[0], model)[0], wanted, atol=1e-6)
    assert "map_weights" not in build("crossmae", feature_maps="last").figures(images)


def test_decoder_attention():
    """The numbers of CrossMAE's Table 6 equal those computed head by head, over two batches. A mask
    token's attention sums to the number of heads."""
    mae, images = build("mae", decoder_depth=3, mask_ratio=0.8), images_and_noise(150)[0]
    (title, rows), = decoder_attention(mae, images).items()
    assert [row["block"] for row in rows] == [0, 1, 2, "sum"] and title.endswith("; 150 images")
    ids_keep, ids_mask, _ = mae.encoder.mask(images, mae.encoder.fixed_noise(images), 0.8)
    x, sums = mae.add_mask_tokens(mae.encode(images, ids_keep), ids_keep, ids_mask), [0, 0]
    for block, row in zip(mae.decoder_blocks, rows):
        q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=2)       # (150, 25, 16) each
        visible = masked = 0                               # 5 and 20 tokens; two heads of width 8
        for q_i, k_i in zip(q.chunk(2, dim=2), k.chunk(2, dim=2)):
            attention = (q_i @ k_i.transpose(1, 2) / 8 ** 0.5).softmax(dim=2)
            visible += attention[:, 5:, :5].mean().item()
            masked += attention[:, 5:, 5:].mean().item()
        assert 5 * visible + 20 * masked == pytest.approx(2)
        assert (row["visible"], row["masked"]) == pytest.approx((visible, masked), abs=1e-6)
        assert row["share of visible"] == pytest.approx(5 * visible / 2, abs=1e-6)
        sums = sums[0] + visible, sums[1] + masked
        x = block(x)
    assert (rows[3]["visible"], rows[3]["masked"]) == pytest.approx(sums, abs=1e-6)
    assert rows[3]["share of visible"] == pytest.approx(5 * sums[0] / 6, abs=1e-6)

    for block in mae.decoder_blocks:
        nn.init.zeros_(block.attn.qkv.weight)
    (rows,) = decoder_attention(mae, images).values()
    assert rows[3]["share of visible"] == pytest.approx(5 / 25)
