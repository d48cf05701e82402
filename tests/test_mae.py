import pytest
import torch

from mae import MAE
from tests.test_methods import build, images_and_noise


def test_inter_block_attention_mixes_all_maps():
    model, (images, noise) = build("mae", inter_block_attention=True), images_and_noise()
    ids_keep = model.encoder.mask(images, noise, 0.75)[0]
    maps = model.encoder.layers(model.encoder.embed(images, ids_keep))
    mixed = sum(w * m for w, m in zip(model.map_weights, maps))
    assert torch.allclose(model.encode(images, ids_keep), model.encoder.norm(mixed), atol=1e-5)
    with torch.no_grad():                                  # the last map alone is plain MAE
        model.map_weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
    assert torch.allclose(model(images, noise)[0], build("mae")(images, noise)[0], atol=1e-6)


def test_initial_weights_of_the_mix():
    """N(0, 1/n) of n maps (CrossMAE Sec. 3.4): of 300 models with two, and of 200 with five."""
    for depth, count in ((1, 300), (4, 200)):
        n, weights = depth + 1, []
        for seed in range(count):
            torch.manual_seed(seed)
            weights.append(MAE(4, 2, 1, 4, depth, 1, decoder_dim=4, decoder_depth=0,
                               decoder_heads=1, inter_block_attention=True).map_weights)
        scaled = torch.cat(weights).detach() * n ** 0.5
        assert abs(scaled.std() - 1) < 0.08 and abs(scaled.mean()) < 0.1
        assert 0.63 < (scaled.abs() < 1).float().mean() < 0.73         # normal: 0.68


def test_attention_of_an_mae():
    """Written out for one block, over two batches; attention of a row sums to the number of heads
    (CrossMAE Table 6); uniform attention gives the share of the visible tokens."""
    mae, images = build("mae", decoder_depth=3), images_and_noise(150)[0]
    (rows,) = mae.measures(None, images).values()
    assert [row["block"] for row in rows] == [0, 1, 2, "sum"]
    for row in rows[:3]:                                   # 7 visible with [CLS], 18 hidden
        assert 7 * row["visible"] + 18 * row["hidden"] == pytest.approx(2, abs=1e-5)
        assert 0.5 * 7 * row["visible"] == pytest.approx(row["share of visible"], abs=1e-6)
    assert rows[3]["visible"] == pytest.approx(sum(row["visible"] for row in rows[:3]))

    ids_keep, ids_mask, _ = mae.encoder.mask(images, mae.encoder.fixed_noise(images), 0.75)
    ids = torch.cat([torch.zeros(150, 1).long(), ids_keep + 1, ids_mask + 1], dim=1)
    x = mae.decoder_embed(mae.encode(images, ids_keep))
    x = torch.cat([x, mae.mask_token.expand(150, 18, -1)], dim=1) + mae.decoder_pos_embed[0][ids]
    block = mae.decoder_blocks[0]
    q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=-1)
    heads = [(q @ k.transpose(1, 2) / 8 ** 0.5).softmax(-1)
             for q, k in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1))]
    wanted = sum(head[:, 7:, :7].mean() for head in heads)
    assert rows[0]["visible"] == pytest.approx(wanted.item(), abs=1e-6)

    for block in mae.decoder_blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    (rows,) = mae.measures(None, images).values()
    assert rows[3]["share of visible"] == pytest.approx(7 / 25)
