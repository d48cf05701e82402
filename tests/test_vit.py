"""Patches, positions, masks, the transformer, and released names."""

import math

import pytest
import torch
import torch.nn.functional as F

from mae import MAE
from tests.conftest import ROOT
from tests.golden import load
from vit import (SIZES, Block, ViT, denormalize, from_released, gather_patches, mask_noise, masking,
                 normalize, pair, patchify, resize_pos_embed, sincos_pos_embed, to_released,
                 transfer, unpatchify, visible_count)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size, patch_size, grid", [
    ((8, 8), 4, (2, 2)), ((6, 12), 3, (2, 4)), ((8, 12), (2, 4), (4, 3))])
def test_patchify_and_back(channels, size, patch_size, grid):
    images = torch.randn(2, channels, *size)
    patches = patchify(images, patch_size)
    assert patches.shape[1] == math.prod(grid)
    assert torch.equal(unpatchify(patches, patch_size, grid), images)
    with pytest.raises(ValueError, match="9x8 .* patch_size 4x4"):
        patchify(torch.zeros(1, 3, 9, 8), 4)
    with pytest.raises(ValueError, match=r"\(1, 4, 48\) do not fit \(2, 3\)"):
        unpatchify(torch.zeros(1, 4, 48), 4, (2, 3))


def test_normalize_and_back():
    """Images, by channel."""
    raw = torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8)
    images = normalize(raw, MAE)
    assert torch.allclose(denormalize(images, MAE), raw / 255, atol=1e-6)
    assert images[0, 1, 2, 3] == pytest.approx((raw[0, 1, 2, 3] / 255 - 0.456) / 0.224)
    assert torch.equal(normalize(raw.float(), MAE), images)
    assert denormalize(images * 100, MAE).aminmax() == (0, 1)


def test_resized_positions():
    """Bicubic: a cubic's weights (a = -0.75) of the four neighbours, clamped at the border."""
    table = sincos_pos_embed(16, (4, 4))
    assert torch.allclose(resize_pos_embed(table, (4, 4), (4, 4)), table, atol=1e-6)
    resized = resize_pos_embed(table, (4, 4), (6, 3))
    assert resized.shape == (1, 19, 16) and torch.equal(resized[:, 0], table[:, 0])
    row = resized[0, 1:].view(6, 3, 16)
    assert torch.allclose(row[:, 0, :8], row[:1, 0, :8].expand(6, -1), atol=1e-5)  # same column
    spike = torch.tensor([0, 0, 1.0, 0, 0, 0]).view(1, 6, 1)           # [CLS] and a row of five
    halves = resize_pos_embed(spike, (1, 5), (1, 10))[0, 1:, 0]        # at distances 0.25, 0.75 ...

    def cubic(x, a=-0.75):
        x = abs(x)
        return ((a + 2) * x ** 3 - (a + 3) * x ** 2 + 1 if x < 1 else
                a * (x ** 3 - 5 * x ** 2 + 8 * x - 4) if x < 2 else 0)
    wanted = [cubic((i + 0.5) / 2 - 0.5 - 1) for i in range(10)]
    assert halves.tolist() == pytest.approx(wanted, abs=1e-6)


def test_visible_patches():
    """How many, and, of equal noise, the first ones."""
    for L, ratio, K in ((196, 0.75, 49), (196, 0.6, 78), (225, 0.8, 44), (4, 0.5, 2)):
        assert visible_count(L, ratio) == K
    for ratio in (-0.1, 0.0, 1.0, 75.0):
        with pytest.raises(ValueError, match=f"mask_ratio {ratio} is not between 0 and 1"):
            visible_count(196, ratio)
    assert masking(torch.zeros(1, 999), 0.5)[0][0].tolist() == [*range(499)]


def test_patterns_of_noise():
    """"grid" keeps one of every four patches, "block" hides regions; a generator is all there is to
    it."""
    mask = masking(mask_noise("grid", 3, (8, 6)), 0.75)[2].view(3, 8, 6)
    assert not mask[:, ::2, ::2].any() and mask.sum() == 3 * 36
    alike = {}
    for kind in ("random", "grid", "block"):
        a, b, c = (mask_noise(kind, 200, (14, 14), generator=torch.Generator().manual_seed(seed))
                   for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)
        mask = masking(a, 0.6)[2].view(200, 14, 14)
        assert (mask.sum((1, 2)) == 196 - 78).all()
        alike[kind] = (mask[:, 1:] == mask[:, :-1]).float().mean()     # of neighbours
    assert alike["block"] > 0.85 > 0.55 > alike["random"]
    with pytest.raises(ValueError, match="'stripes' is not one of random, grid, block"):
        mask_noise("stripes", 1, (4, 4))


def test_area_of_block_masks():
    """The rectangle that is hidden first covers 10 to 40% of the image, of any aspect from 0.3 to
    its inverse, where no border cuts it."""
    noise = mask_noise("block", 400, (40, 40), generator=torch.Generator().manual_seed(0))
    first = noise.view(400, 40, 40).floor()
    first = first == first.amax((1, 2), keepdim=True)
    rows, cols = first.any(2), first.any(1)                # (B, h), (B, w)
    whole = ~(rows[:, 0] | rows[:, -1] | cols[:, 0] | cols[:, -1])
    area = first.float().mean((1, 2))[whole]
    aspect = (rows.sum(1) / cols.sum(1))[whole].log()
    assert 0.08 < area.min() < 0.13 and 0.3 < area.max() < 0.43 and len(area) > 50
    assert -1.3 < aspect.min() < -0.9 and 0.9 < aspect.max() < 1.3     # log 0.3 is -1.2


def vit(**options):
    return ViT(**{**dict(img_size=(8, 12), patch_size=(2, 4), in_chans=5, dim=16, depth=2, heads=2),
                  **options})


def test_embedding_is_the_convolution_and_visible_only_is_the_same():
    model, images = vit(), torch.randn(3, 5, 8, 12)
    proj = model.patch_embed["proj"]
    wanted = F.conv2d(images, proj.weight, proj.bias, stride=(2, 4)).flatten(2).transpose(1, 2)
    tokens = model.embed(images)
    assert torch.allclose(tokens, wanted + model.pos_embed[:, 1:], atol=1e-5)
    ids = torch.rand(3, 12).argsort(1)[:, :5]
    assert torch.allclose(model.embed(images, ids), gather_patches(tokens, ids), atol=1e-6)


def test_features():
    """The last block's output through the norm, if there is one; the same in training."""
    images = torch.randn(2, 5, 8, 12)
    for model in (vit().train(), vit(norm=False).train()):
        maps = model.layers(model.embed(images))
        assert len(maps) == 3 and maps[0].shape == (2, 13, 16)
        assert torch.equal(model(images), model.norm(maps[-1]))
    assert not [name for name in model.state_dict() if name.startswith("norm")]


def test_drop_path():
    """It skips, only in training."""
    torch.manual_seed(0)
    block, x = Block(16, 2, drop_path=0.5), torch.randn(64, 3, 16)
    unchanged = (block(x) == x).all(-1).all(-1).float().mean()
    assert 0.1 < unchanged < 0.4                           # both branches: a quarter
    assert torch.equal(block.eval()(x), block(x)) and not torch.equal(block(x), x)
    assert [b.drop_path.p for b in vit(depth=3, drop_path=0.2).blocks] == pytest.approx(
        [0, 0.1, 0.2])


def test_initialisation():
    model = ViT(32, 4, 3, 64, 1, 4)
    for weight, fans in ((model.blocks[0].attn.qkv.weight, 64 + 192),  # as one matrix
                         (model.patch_embed["proj"].weight, 48 + 64)):
        limit = math.sqrt(6 / fans)
        assert limit * 0.98 < weight.abs().max() <= limit
    assert not model.blocks[0].attn.qkv.bias.any() and model.patch_embed["proj"].bias.any()
    assert 0.01 < model.cls_token.std() < 0.03


@pytest.mark.parametrize("options, words", [
    (dict(dim=18), "dim 18 is not a multiple of 4"),
    (dict(img_size=(8, 13)), "img_size 8x13 is not a multiple of patch_size 2x4.* 8x12 and 8x16")])
def test_what_does_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        vit(**options)
    with pytest.raises(ValueError, match=r"\(2, 3, 8, 12\) for a model of \(5, 8, 12\)"):
        vit()(torch.randn(2, 3, 8, 12))
    with pytest.raises(ValueError, match=r"noise of shape \(2, 9\) for 2 images of 12 patches"):
        vit().mask(torch.randn(2, 5, 8, 12), torch.rand(2, 9), 0.5)
    for size in (0, -3, 2.5, (4, 0), (1, 2, 3), "32"):
        with pytest.raises(ValueError, match="is not a size in pixels"):
            pair(size)


def test_published_sizes():
    millions = {name: sum(p.numel() for p in ViT(**SIZES[name]).parameters() if p.requires_grad)
                / 1e6 for name in ("tiny", "small", "base")}
    assert millions == pytest.approx({"tiny": 5.5, "small": 21.7, "base": 85.8}, rel=0.01)


# ------------------------------------------------------------------------------- released names

def mae(img_size=32):
    return MAE(img_size, 8, 3, 32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4)


@pytest.fixture
def state():
    """The released-format MAE of the fixture: as mae() has it."""
    return load(ROOT / "tests/golden/mae.pt")["state_dict"]


def test_released_names_both_ways(state):
    model = mae()
    assert transfer(model, from_released({"model": state})) == []      # with its outer "model"
    back = to_released(model)
    assert back.keys() == state.keys() and all(torch.equal(back[k], state[k]) for k in state)


def test_transfer_of_an_encoder_alone(state):
    """As timm's: with a head, without a decoder. A norm that one of both lacks is reported."""
    model = mae()
    fresh = model.decoder_pred.weight.clone()
    encoder = {k: v for k, v in state.items() if not k.startswith(("decoder", "mask_token"))}
    notes = transfer(model, from_released({**encoder, "head.weight": torch.zeros(7, 32)}))
    assert torch.equal(model.encoder.cls_token, state["cls_token"])
    assert torch.equal(model.decoder_pred.weight, fresh)
    assert [note.split(":")[0] for note in notes] == ["fresh", "not taken over"]
    assert "decoder_pred" in notes[0] and "head" in notes[1]
    model = torch.nn.Module()
    model.encoder = ViT(32, 8, 3, 32, 3, 4, norm=False)
    (note,) = [n for n in transfer(model, from_released(state)) if "norm" in n and "expected" in n]
    assert note.startswith("not taken over: encoder.norm (expected: mean pooling has its own norm")
    del state["norm.weight"], state["norm.bias"]
    assert "fresh: encoder.norm (expected" in " ".join(transfer(mae(), from_released(state)))


def test_another_decoder_is_left_alone(state):
    """All of it, even if only one shape or name differs."""
    for change in ({"decoder_pred.bias": torch.zeros(5)}, {"decoder_junk": torch.zeros(2)}):
        model = mae()
        fresh = {k: v.clone() for k, v in model.state_dict().items() if "encoder." not in k}
        notes = transfer(model, from_released({**state, **change}))
        assert torch.equal(model.encoder.cls_token, state["cls_token"])
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in fresh.items())
        assert [note.split(":")[0] for note in notes] == ["fresh", "not taken over"]


@pytest.mark.parametrize("damage, lost, parts", [
    ({"blocks.2.ls1.gamma": torch.zeros(32), "gamma": torch.zeros(3),
      "cls_token": torch.zeros(1, 1, 8)}, "blocks.1.norm1.weight",
     ["encoder.blocks.1.norm1.weight is missing", "encoder.blocks.2.ls1.gamma is left over",
      "gamma is left over", "encoder.cls_token is (1, 1, 8), here (1, 1, 32)"]),
    ({f"blocks.2.more{i}": torch.zeros(2) for i in range(9)}, "cls_token", ["and 6 more"]),
    ({"blocks.7.norm1.weight": torch.zeros(32)}, "cls_token",          # sizes alone are said
     ["the file: width 32, depth 4, patch 8x8, channels 3; here width 32, depth 3, patch 8x8"]),
    ({"patch_embed.proj.weight": torch.zeros(768, 3, 16, 16)}, "norm.bias",
     ["the file: width 768, depth 3, patch 16x16"])])
def test_transfer_says_what_does_not_fit(damage, lost, parts, state):
    model = mae()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    del state[lost]
    with pytest.raises(ValueError) as error:
        transfer(model, from_released({**state, **damage}))
    assert all(part in str(error.value) for part in parts) and len(str(error.value)) < 250
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())   # as it was


def test_transfer_interpolates_positions(state):
    model = mae(48)
    notes = transfer(model, from_released(state))
    assert "interpolated from (4, 4) to (6, 6) patches: encoder.pos_embed" in notes
    wanted = resize_pos_embed(state["pos_embed"], (4, 4), (6, 6))
    assert torch.equal(model.encoder.pos_embed, wanted)
    one, other = (MAE(size, 4, 3, 16, 1, 2, decoder_dim=16, decoder_heads=2)
                  for size in ((8, 32), (16, 16)))
    assert transfer(other, one.state_dict(), one.encoder.grid) == [    # as many patches, and with
        f"interpolated from (2, 8) to (4, 4) patches: {name}"          # the decoder
        for name in ("decoder_pos_embed", "encoder.pos_embed")]
