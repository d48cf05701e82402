"""MAE's attention. Its loss and predictions: test_methods.py."""

import pytest
from torch import nn

from crossmae import decoder_attention
from tests.test_methods import build, images_and_noise


def test_decoder_attention():
    """CrossMAE Table 6, written out head by head, for two batches. A mask token's attention sums to
    the number of heads; if it is uniform, visible tokens get their fraction."""
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
