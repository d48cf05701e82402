import math

import pytest
import torch
import torch.nn.functional as F

from mae import MAE
from tests.golden import load
from tests.conftest import ROOT
from vit import (SIZES, ViT, Block, check_mask, from_released, mask_noise, masking,
                 normalize_patches, patchify, resize_pos_embed, sincos_pos_embed, to_released,
                 transfer, unpatchify, visible_count)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize(
    "size, patch_size, grid", [((8, 8), 4, (2, 2)), ((6, 12), 3, (2, 4)), ((8, 12), (2, 4), (4, 3))]
)
def test_patchify_and_back(channels, size, patch_size, grid):
    images = torch.randn(2, channels, *size)
    patches = patchify(images, patch_size)
    assert patches.shape[1] == math.prod(grid)
    assert torch.equal(unpatchify(patches, patch_size, grid), images)


def test_patchify_order():
    # value: 24 channel + 6 row + column
    images = torch.arange(2 * 4 * 6).view(1, 2, 4, 6)
    patches = patchify(images, 2)
    # second patch of the first row
    assert patches[0, 1].tolist() == [2, 26, 3, 27, 8, 32, 9, 33]
    # fourth: start of the second row
    assert patches[0, 3, 0] == 12


def test_patchify_errors():
    with pytest.raises(ValueError, match="9x8 .* patch_size 4x4"):
        patchify(torch.zeros(1, 3, 9, 8), 4)
    with pytest.raises(ValueError, match=r"\(1, 4, 48\) do not fit \(2, 3\)"):
        unpatchify(torch.zeros(1, 4, 48), 4, (2, 3))


def test_sincos_against_the_formula():
    table = sincos_pos_embed(16, (3, 5))
    assert table.shape == (1, 16, 16) and not table[0, 0].any()
    for row, col in [(0, 0), (1, 3), (2, 4)]:
        angles = [position / 10000 ** (i / 4) for position in (col, row) for i in range(4)]
        col_angles, row_angles = angles[:4], angles[4:]
        wanted = [
            f(a) for part in (col_angles, row_angles) for f in (math.sin, math.cos) for a in part
        ]
        assert torch.allclose(table[0, 1 + row * 5 + col], torch.tensor(wanted), atol=1e-6)
    with pytest.raises(ValueError, match="18 is not a multiple of 4"):
        sincos_pos_embed(18, (2, 2))


def test_resized_positions():
    table = sincos_pos_embed(16, (4, 4))
    assert torch.allclose(resize_pos_embed(table, (4, 4), (4, 4)), table, atol=1e-6)
    resized = resize_pos_embed(table, (4, 4), (6, 3))
    assert resized.shape == (1, 19, 16) and torch.equal(resized[:, 0], table[:, 0])
    row = resized[0, 1:].view(6, 3, 16)
    assert torch.allclose(row[:, 0, :8], row[:1, 0, :8].expand(6, -1), atol=1e-5)  # same column


@pytest.mark.parametrize(
    "L, ratio, K", [(196, 0.75, 49), (196, 0.6, 78), (225, 0.8, 44), (4, 0.5, 2)]
)
def test_masking_counts_and_order(L, ratio, K):
    noise = torch.rand(3, L)
    ids_keep, ids_mask, mask = masking(noise, ratio)
    assert ids_keep.shape == (3, K) and ids_mask.shape == (3, L - K)
    assert (mask.sum(1) == L - K).all() and set(mask.unique().tolist()) == {0, 1}
    order = noise.argsort(dim=1)
    assert torch.equal(torch.cat([ids_keep, ids_mask], 1), order)
    assert not mask.gather(1, ids_keep).any() and mask.gather(1, ids_mask).all()


def test_masking_keeps_exactly_k_when_noise_ties():
    ids_keep, _, mask = masking(torch.zeros(2, 16), 0.75)
    assert ids_keep.tolist() == [[0, 1, 2, 3]] * 2 and (mask.sum(1) == 12).all()


@pytest.mark.parametrize("ratio", [-0.1, 0.0, 1.0, 1.5, 0.99])
def test_impossible_ratios(ratio):
    with pytest.raises(ValueError, match=f"mask_ratio {ratio} shows .* of 16 patches"):
        visible_count(16, ratio)


def test_grid_mask_keeps_one_of_every_four():
    mask = masking(mask_noise("grid", 3, (8, 6)), 0.75)[2].view(3, 8, 6)
    assert not mask[:, ::2, ::2].any() and mask.sum() == 3 * 36


def test_block_mask_hides_regions():
    def neighbours_alike(kind):
        g = torch.Generator().manual_seed(0)
        mask = masking(mask_noise(kind, 200, (14, 14), generator=g), 0.6)[2].view(200, 14, 14)
        assert (mask.sum((1, 2)) == 196 - 78).all()
        return (mask[:, 1:] == mask[:, :-1]).float().mean()

    assert neighbours_alike("block") > 0.85 > 0.55 > neighbours_alike("random")


def test_noise_is_the_generators():
    for kind in ("random", "grid", "block"):
        a, b, c = (
            mask_noise(kind, 2, (4, 4), generator=torch.Generator().manual_seed(s))
            for s in (1, 1, 2)
        )
        assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(ValueError, match="'stripes' is not one of random, grid, block"):
        mask_noise("stripes", 1, (4, 4))


def test_own_masks_are_counted():
    mask = torch.ones(2, 16)
    mask[:, :4] = 0
    check_mask(mask, 0.75)
    check_mask(torch.rand(2, 16), 0.5)  # noise is not a mask
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="shows 5 of 16 patches, mask_ratio 0.75 shows 4"):
        check_mask(mask, 0.75)


def test_normalized_patches():
    patches = 3 + 5 * torch.randn(2, 4, 48)
    normal, mean, std = normalize_patches(patches)
    assert torch.allclose(normal.mean(-1), torch.zeros(2, 4), atol=1e-5)
    assert torch.allclose(normal.var(-1, unbiased=True), torch.ones(2, 4), atol=1e-5)
    assert torch.allclose(normal * std + mean, patches, atol=1e-5)
    assert not normalize_patches(torch.ones(1, 1, 48))[0].any()  # a flat patch stays finite


def vit(**kwargs):
    return ViT(
        **{**dict(img_size=(8, 12), patch_size=(2, 4), in_chans=5, dim=16, depth=2, heads=2),
           **kwargs}
    )


def test_embedding_is_the_convolution_and_visible_only_is_the_same():
    model, images = vit(), torch.randn(3, 5, 8, 12)
    proj = model.patch_embed["proj"]
    wanted = F.conv2d(images, proj.weight, proj.bias, stride=(2, 4)).flatten(2).transpose(1, 2)
    tokens = model.embed(images)
    assert torch.allclose(tokens, wanted + model.pos_embed[:, 1:], atol=1e-5)
    ids = torch.rand(3, 12).argsort(1)[:, :5]
    assert torch.allclose(
        model.embed(images, ids), tokens.gather(1, ids[..., None].expand(-1, -1, 16)), atol=1e-6
    )


def test_layers_and_norm():
    model, images = vit(), torch.randn(2, 5, 8, 12)
    maps = model.layers(model.embed(images))
    assert len(maps) == 3 and maps[0].shape == (2, 13, 16)
    assert torch.equal(model(images), model.norm(maps[-1]))
    plain = vit(norm=False)
    assert torch.equal(plain(images), plain.layers(plain.embed(images))[-1])
    assert not [name for name in plain.state_dict() if name.startswith("norm")]


def test_features_are_deterministic_even_while_training():
    model, images = vit().train(), torch.randn(2, 5, 8, 12)
    assert torch.equal(model(images), model(images))


def test_drop_path_skips_only_in_training():
    torch.manual_seed(0)
    block, x = Block(16, 2, drop_path=0.5), torch.randn(64, 3, 16)
    unchanged = (block(x) == x).all(-1).all(-1).float().mean()
    assert 0.1 < unchanged < 0.4  # both branches: a quarter
    assert torch.equal(block.eval()(x), Block.forward(block, x)) and not torch.equal(block(x), x)
    assert [b.drop_path.p for b in vit(depth=3, drop_path=0.2).blocks] == pytest.approx(
        [0, 0.1, 0.2]
    )


def test_initialisation():
    model = ViT(32, 4, 3, 64, 1, 4)

    def bound(fan_in, fan_out):
        return math.sqrt(6 / (fan_in + fan_out))

    for weight, limit in [
        (model.blocks[0].attn.qkv.weight, bound(64, 192)),  # as one matrix
        (model.patch_embed["proj"].weight, bound(48, 64)),
    ]:
        assert limit * 0.98 < weight.abs().max() <= limit
    assert not model.blocks[0].attn.qkv.bias.any() and model.patch_embed["proj"].bias.any()
    assert 0.01 < model.cls_token.std() < 0.03


@pytest.mark.parametrize(
    "kwargs, words",
    [(dict(img_size=182), "img_size 182 is not a multiple of patch_size"),
     (dict(img_size=(8, 13)), r"img_size \(8, 13\) is not a multiple of patch_size \(2, 4\)"),
     (dict(heads=3), "width 16 is not a multiple of 3 heads"),
     (dict(dim=18), "18 is not a multiple of 4")],
)
def test_impossible_sizes(kwargs, words):
    with pytest.raises(ValueError, match=words):
        vit(**kwargs)


def test_wrong_inputs():
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 12\) for a model of \(5, 8, 12\)"):
        vit()(torch.randn(2, 3, 8, 12))
    with pytest.raises(ValueError, match=r"noise of shape \(2, 9\) for 2 images of 12 patches"):
        vit().mask(torch.randn(2, 5, 8, 12), torch.rand(2, 9), 0.5)


def test_published_sizes():
    millions = {
        name: sum(p.numel() for p in ViT(**size, norm=True).parameters() if p.requires_grad) / 1e6
        for name, size in SIZES.items()
        if name in ("tiny", "small", "base")
    }
    assert millions == pytest.approx({"tiny": 5.5, "small": 21.7, "base": 85.8}, rel=0.01)


# ------------------------------------------------------------------------------- released names


def released():
    """The released-format MAE of the fixture, and a model of ours of its sizes."""
    fixture = load(ROOT / "tests/golden/mae.pt")
    return fixture["state_dict"], MAE(
        32, 8, 3, 32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4
    )


def test_released_names_both_ways():
    state, model = released()
    assert transfer(model, from_released({"model": state})) == []  # with its outer "model"
    back = to_released(model)
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)


def test_transfer_of_an_encoder_alone():
    state, model = released()
    fresh = model.decoder_pred.weight.clone()
    encoder = {k: v for k, v in state.items() if not k.startswith(("decoder", "mask_token"))}
    notes = transfer(
        model, from_released({**encoder, "head.weight": torch.zeros(7, 32)})
    )  # as timm's
    assert torch.equal(model.encoder.cls_token, state["cls_token"])
    assert torch.equal(model.decoder_pred.weight, fresh)
    assert [note.split(":")[0] for note in notes] == ["fresh", "not taken over"]
    assert "decoder_pred" in notes[0] and "head" in notes[1]


def test_transfer_reports_a_norm():
    state, _ = released()
    encoder = ViT(32, 8, 3, 32, 3, 4, norm=False)
    model = torch.nn.ModuleDict({"encoder": encoder})
    model.encoder = encoder
    notes = transfer(model, from_released(state))
    assert "not taken over: encoder.norm.weight" in notes


def test_transfer_lists_every_key_that_does_not_fit():
    state, model = released()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    del state["blocks.1.norm1.weight"]
    state["blocks.7.norm1.weight"] = torch.zeros(32)
    state["gamma"] = torch.zeros(3)
    state["cls_token"] = torch.zeros(1, 1, 8)
    with pytest.raises(ValueError) as error:
        transfer(model, from_released(state))
    for part in ("encoder.blocks.1.norm1.weight is missing",
                 "encoder.blocks.7.norm1.weight is left over", "gamma is left over",
                 "encoder.cls_token is (1, 1, 8), here (1, 1, 32)"):
        assert part in str(error.value)
    assert all(
        torch.equal(v, before[k]) for k, v in model.state_dict().items()
    )  # and changes nothing


def test_a_damaged_decoder_is_not_another_decoder():
    state, model = released()
    del state["decoder_pred.bias"]
    state["decoder_junk"] = torch.zeros(2)
    with pytest.raises(ValueError) as error:
        transfer(model, from_released(state))
    for part in ("decoder_pred.bias is missing", "decoder_junk is left over"):
        assert part in str(error.value)


def test_as_many_patches_on_another_grid_are_interpolated():
    one, other = (
        MAE(size, 4, 3, 16, 1, 2, decoder_dim=16, decoder_heads=2) for size in ((8, 32), (16, 16))
    )
    notes = transfer(other, one.state_dict(), one.encoder.grid)
    assert notes == [
        f"interpolated from (2, 8) to (4, 4) patches: {name}"
        for name in ("decoder_pos_embed", "encoder.pos_embed")
    ]  # and the decoder comes along


def test_transfer_interpolates_positions():
    state, _ = released()
    model = MAE(48, 8, 3, 32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4)
    notes = transfer(model, from_released(state))
    assert "interpolated from (4, 4) to (6, 6) patches: encoder.pos_embed" in notes
    assert torch.equal(
        model.encoder.pos_embed, resize_pos_embed(state["pos_embed"], (4, 4), (6, 6))
    )
