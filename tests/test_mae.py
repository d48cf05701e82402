import pytest
import torch

from mae import MAE
from tests.conftest import ROOT
from tests.golden import load, replay
from tests.test_methods import build, images_and_noise


@pytest.mark.parametrize("config", [dict(norm_pix_loss=False, mask_ratio=0.5), dict(mlp_ratio=2.0),
                                    dict(img_size=48, patch_size=16, in_chans=1)])
def test_replay_takes_other_fixtures(config):
    config = {**load(ROOT / "tests/golden/mae.pt")["config"], **config}
    side, L = config["img_size"], (config["img_size"] // config["patch_size"]) ** 2
    model = MAE(side, config["patch_size"], config["in_chans"], 32, 3, 4, decoder_dim=24,
                decoder_depth=2, decoder_heads=4)
    state = {k.removeprefix("encoder."): v for k, v in model.state_dict().items()}
    if config["mlp_ratio"] != 4:
        state = {k: v[:len(v) // 2] if "fc1" in k else
                 v[:, :v.shape[1] // 2] if "fc2.weight" in k else v for k, v in state.items()}
    ours = replay(dict(method="mae", config=config, state_dict=state, noise=torch.rand(2, L),
                       images=torch.randn(2, config["in_chans"], side, side),
                       grad_names=["cls_token"]))
    assert ours["pred"].shape == (2, L, config["patch_size"] ** 2 * config["in_chans"])
    assert list(ours["grads"]) == ["cls_token"] and ours["loss"].ndim == 0


def test_inter_block_attention_mixes_all_maps():
    model, (images, noise) = build("mae", inter_block_attention=True), images_and_noise()
    ids_keep = model.encoder.mask(images, noise, 0.75)[0]
    maps = model.encoder.layers(model.encoder.embed(images, ids_keep))
    mixed = sum(w * m for w, m in zip(model.map_weights, maps))
    assert torch.allclose(model.encode(images, ids_keep), model.encoder.norm(mixed), atol=1e-5)
    with torch.no_grad():                                  # the last map alone is plain MAE
        model.map_weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
    assert torch.allclose(model(images, noise)[0], build("mae")(images, noise)[0], atol=1e-6)


def test_attention_of_an_mae():
    """Written out for one block; attention of a row sums to the number of heads (Table 6); uniform
    attention gives the share of the visible tokens."""
    mae, (images, _) = build("mae", decoder_depth=3), images_and_noise()
    noise = mae.encoder.fixed_noise(images)
    (rows,) = mae.measures(None, images).values()
    assert [row["block"] for row in rows] == [0, 1, 2, "sum"]
    for row in rows[:3]:                                   # 7 visible with [CLS], 18 hidden
        assert 7 * row["visible"] + 18 * row["hidden"] == pytest.approx(2, abs=1e-5)
        assert 0.5 * 7 * row["visible"] == pytest.approx(row["share of visible"], abs=1e-6)
    assert rows[3]["visible"] == pytest.approx(sum(row["visible"] for row in rows[:3]))

    ids_keep, ids_mask, _ = mae.encoder.mask(images, noise, 0.75)
    x = mae.decoder_embed(mae.encode(images, ids_keep))
    pos = mae.decoder_pos_embed[0]
    x = torch.cat([x + pos[torch.cat([torch.zeros(3, 1).long(), ids_keep + 1], 1)],
                   mae.mask_token + pos[ids_mask + 1]], dim=1)
    attn, heads = mae.decoder_blocks[0].attn, []
    q, k, _ = attn.qkv(mae.decoder_blocks[0].norm1(x)).chunk(3, dim=-1)
    for q, k in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1)):
        heads.append((q @ k.transpose(1, 2) / 8 ** 0.5).softmax(-1))
    wanted = sum(head[:, 7:, :7].mean() for head in heads)
    assert rows[0]["visible"] == pytest.approx(wanted.item(), abs=1e-6)

    for block in mae.decoder_blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
    (rows,) = mae.measures(None, images).values()
    assert rows[3]["share of visible"] == pytest.approx(7 / 25)
