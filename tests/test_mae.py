"""What MAE is about: a decoder whose mask tokens take the places of masked patches."""

import pytest
import torch
from torch import nn

from crossmae import decoder_attention
from tests.test_methods import build, images_and_noise
from vit import unpatchify


def test_the_order_of_tokens_does_not_matter():
    """As in paper and release, the decoder's tokens are restored to raster order here, and all
    patches predicted: the images and the loss are the same (items 1 and 2)."""
    model, (images, noise) = build("mae", norm_pix_loss=False), images_and_noise()
    ids_keep, ids_mask, mask = model.encoder.mask(images, noise, 0.75)
    latent = model.decoder_embed(model.encoder(images, ids_keep))      # (3, 7, E)
    tokens = model.mask_token.repeat(3, 24, 1)
    for b in range(3):
        tokens[b, ids_keep[b]] = latent[b, 1:]
    x = torch.cat([latent[:, :1], tokens], dim=1) + model.decoder_pos_embed
    for block in model.decoder_blocks:
        x = block(x)
    wanted = unpatchify(model.decoder_pred(model.decoder_norm(x))[:, 1:], 4, (4, 6))
    decoded, _ = model.reconstruct(images, noise)
    assert torch.allclose(decoded, wanted, atol=1e-5)
    masked = model.encoder.pixels_of(mask).bool().expand_as(images)
    loss = (wanted - images)[masked].square().mean()
    assert torch.allclose(model(images, noise)[0], loss, atol=1e-6)


def test_decoder_attention():
    """CrossMAE Table 6, written out head by head, for two batches. A mask token's attention sums to
    the number of heads; if it is uniform, visible tokens get their fraction."""
    mae, images = build("mae", decoder_depth=3), images_and_noise(150)[0]
    (rows,) = decoder_attention(mae, images).values()
    assert [row["block"] for row in rows] == [0, 1, 2, "sum"]
    ids_keep, ids_mask, _ = mae.encoder.mask(images, mae.encoder.fixed_noise(images), 0.75)
    x, sums = mae.add_mask_tokens(mae.encode(images, ids_keep), ids_keep, ids_mask), [0, 0]
    for block, row in zip(mae.decoder_blocks, rows):
        q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=2)       # (150, 25, 16) each
        visible = masked = 0                               # 7 and 18 tokens; two heads of width 8
        for q_i, k_i in zip(q.chunk(2, dim=2), k.chunk(2, dim=2)):
            attention = (q_i @ k_i.transpose(1, 2) / 8 ** 0.5).softmax(dim=2)
            visible += attention[:, 7:, :7].mean().item()
            masked += attention[:, 7:, 7:].mean().item()
        assert 7 * visible + 18 * masked == pytest.approx(2)
        assert (row["visible"], row["masked"]) == pytest.approx((visible, masked), abs=1e-6)
        assert row["share of visible"] == pytest.approx(7 * visible / 2, abs=1e-6)
        sums = sums[0] + visible, sums[1] + masked
        x = block(x)
    assert (rows[3]["visible"], rows[3]["masked"]) == pytest.approx(sums, abs=1e-6)
    assert rows[3]["share of visible"] == pytest.approx(7 * sums[0] / 6, abs=1e-6)

    for block in mae.decoder_blocks:
        nn.init.zeros_(block.attn.qkv.weight)
    (rows,) = decoder_attention(mae, images).values()
    assert rows[3]["share of visible"] == pytest.approx(7 / 25)
