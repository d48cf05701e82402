"""Patches, positions, masks, the transformer, and released names."""

import pytest
import torch

from imae import IMAE
from mae import MAE
from minr import MINR
from tests.lib.masks import fixed_noise
from tests.lib.models import to_released
from tests.unit.conftest import ROOT, same
from tests.unit.golden import load
from vit import (SIZES, Block, InputError, ViT, denormalize, from_released, mask_noise, masking,
                 normalize, pair, per_channel, resize_pos_embed, sizes_of, transfer, visible_count)


def test_normalize_and_back():
    """Normalisation is by channel, with constants on the images' device."""
    raw = torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8)
    images = normalize(raw, MAE)
    assert torch.allclose(denormalize(images, MAE), raw / 255, atol=1e-6)
    assert images[0, 1, 2, 3] == pytest.approx((raw[0, 1, 2, 3] / 255 - 0.456) / 0.224)
    floats = raw.float()                                   # stays as it is
    assert all(torch.equal(normalize(floats, MAE), images) for _ in range(2))
    assert denormalize(images * 100, MAE).aminmax() == (0, 1)
    assert torch.equal(normalize(raw, MINR), raw / 255)
    assert per_channel(MAE.mean, torch.device("meta")).is_meta


def test_resized_positions():
    """Resizing is bicubic: a cubic (a = -0.75) weighs four neighbours in each direction."""
    table = torch.zeros(1, 1 + 20, 1)                      # a grid of 5 x 4
    table[0, 0], table[0, 1 + 4 * 1 + 2] = 7, 1            # class token; row 1, column 2

    def cubic(x, a=-0.75):
        x = abs(x)
        return ((a + 2) * x ** 3 - (a + 3) * x ** 2 + 1 if x < 1 else
                a * (x ** 3 - 5 * x ** 2 + 8 * x - 4) if x < 2 else 0)
    rows = torch.tensor([cubic((i + 0.5) / 2 - 0.5 - 1) for i in range(10)])
    columns = torch.tensor([cubic((i + 0.5) / 3 - 0.5 - 2) for i in range(12)])
    cls, *resized = resize_pos_embed(table, (5, 4), (10, 12))[0, :, 0]
    assert cls == 7
    assert torch.allclose(torch.stack(resized), torch.outer(rows, columns).flatten(), atol=1e-6)


def test_visible_patches():
    """The number of visible patches is rounded down. Ties become visible in raster order."""
    for L, ratio, K in ((196, 0.75, 49), (196, 0.6, 78), (225, 0.8, 44), (4, 0.5, 2)):
        assert visible_count(L, ratio) == K
    for ratio in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"mask_ratio {ratio} must be above 0 and below 1"):
            visible_count(196, ratio)
    assert masking(torch.zeros(1, 999), 499)[0][0].tolist() == [*range(499)]


def test_patterns_of_noise():
    """"grid" keeps one of every four patches, "block" masks regions. All draws are from the
    generator."""
    mask = masking(mask_noise("grid", 3, (8, 6)), 12)[2].view(3, 8, 6)
    assert not mask[:, ::2, ::2].any() and mask.sum() == 3 * 36
    alike = {}
    for kind in ("random", "grid", "block"):
        a, b, c = (mask_noise(kind, 200, (14, 14), generator=torch.Generator().manual_seed(seed))
                   for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)
        mask = masking(a, 78)[2].view(200, 14, 14)
        assert (mask.sum((1, 2)) == 196 - 78).all()
        alike[kind] = (mask[:, 1:] == mask[:, :-1]).float().mean()     # of neighbours
    assert alike["block"] > 0.85 > 0.55 > alike["random"]
    noise, again = (fixed_noise(vit(), torch.zeros(3, 5, 8, 12)) for _ in range(2))
    assert torch.equal(noise, again) and len(noise.unique(dim=0)) == 3     # one for each image


@pytest.mark.parametrize("area, aspect, y, x, rows, columns", [  # draws; on a grid of 20 x 20
    (0.5, 0.5, 0.5, 0.5, (5, 15), (5, 15)),                # a quarter of the image, in its middle
    (0.0, 1.0, 0.5, 0.5, (8, 12), (4, 16)),                # area 0.1, height / width 0.3
    (1.0, 0.0, 0.5, 0.25, (0, 20), (2, 8))])               # area 0.4, width / height 0.3, clipped
def test_a_block_is_where_it_was_drawn(area, aspect, y, x, rows, columns, monkeypatch):
    draws = torch.tensor([area, aspect, y, x]).view(4, 1, 1, 1)
    monkeypatch.setattr(torch, "rand", lambda *size, **_: (
        draws.expand(size) if len(size) == 4 else torch.zeros(size)))
    inside = torch.zeros(20, 20, dtype=torch.bool)
    inside[slice(*rows), slice(*columns)] = True
    assert torch.equal(mask_noise("block", 1, (20, 20)).view(20, 20) > 0, inside)


def vit(**options):
    return ViT(**{**dict(img_size=(8, 12), patch_size=(2, 4), in_chans=5, dim=16, depth=2, heads=2),
                  **options})


def test_drop_path():
    """Drop path skips layers, only in training."""
    torch.manual_seed(0)
    block, x = Block(16, 2, drop_path=0.5), torch.randn(64, 3, 16)
    unchanged = (block(x) == x).all(-1).all(-1).float().mean()
    assert 0.1 < unchanged < 0.4                           # both branches: a quarter
    assert torch.equal(block.eval()(x), block(x)) and not torch.equal(block(x), x)
    assert [b.drop_path.p for b in vit(depth=3, drop_path=0.2).blocks] == pytest.approx(
        [0, 0.1, 0.2])


def test_what_does_not_fit():
    for call, words in (
            (lambda: vit(dim=18), "dim 18 must be a positive multiple of 4"),
            (lambda: vit()(torch.randn(2, 3, 8, 12)), r"images are \(3, 8, 12\), but"),
            *((lambda size=size: pair(size), "is not a size in pixels")
              for size in (0, -3, 2.5, (4, 0), (1, 2, 3), "32"))):
        with pytest.raises(ValueError, match=words):
            call()
    for noise in (torch.rand(2, 9), torch.rand(1, 12)):
        with pytest.raises(ValueError, match=r"have \(2, 12\)"):
            vit().mask(torch.randn(2, 5, 8, 12), noise, 0.5)
    for n in (0, 13, 24):                                  # masked: none, different numbers, all
        with pytest.raises(ValueError, match="equally many visible patches: .* of 12"):
            vit().mask(torch.randn(2, 5, 8, 12), torch.arange(24).view(2, 12) < n, None)


def test_published_sizes():
    with torch.device("meta"):
        models = {name: ViT(**SIZES[name]) for name in ("tiny", "small", "base")}
    millions = {name: sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
                for name, model in models.items()}
    assert millions == pytest.approx({"tiny": 5.5, "small": 21.7, "base": 85.8}, rel=0.01)


# ------------------------------------------------------------------------------- released names
def mae():
    return MAE(32, 8, 3, 32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4)


@pytest.fixture
def state():
    """Return the state dict of a released MAE with the sizes in mae()."""
    return load(ROOT / "tests/unit/golden/mae.pt")["state_dict"]


def test_released_names_both_ways(state):
    """Names and values are as before, also with the outer "model" and the prefixes of wrappers."""
    for prefix in ("", "module.", "_orig_mod.", "_orig_mod.module."):
        model, theirs = mae(), {prefix + name: value for name, value in state.items()}
        assert transfer(model, from_released(theirs), (4, 4)) == ([], [])
        assert same(to_released(model), state)


def loads(model, theirs, missing, unused):
    """Check that all is loaded except `missing`, which stays as it was, and `unused`."""
    kept = {k: v.clone() for k, v in model.state_dict().items() if k in missing}
    assert transfer(model, theirs, model.encoder.grid) == (sorted(missing), sorted(unused))
    loaded = {k: v for k, v in theirs.items() if k not in unused}
    assert same(model.state_dict(), {**loaded, **kept})


@pytest.mark.parametrize("lost, added", [
    (("decoder", "mask_token"), {"head.weight": torch.zeros(7, 32)}),  # as in timm's files
    ((), {"decoder_pred.bias": torch.zeros(5)}), ((), {"decoder_other": torch.zeros(2)})])
def test_another_decoder_is_not_loaded(lost, added, state):
    """Nothing of another decoder is loaded, even if only one shape or name differs."""
    model, kept = mae(), {k: v for k, v in state.items() if not k.startswith(lost or "-")}
    theirs = from_released({**kept, **added})
    loads(model, theirs, *([k for k in names if not k.startswith("encoder.")]
                           for names in (model.state_dict(), theirs)))


def test_transfer_of_a_teacher():
    """A teacher is loaded into a model that has one of the same shapes. Otherwise, what is not
    loaded is named. Either way, the decoder is loaded."""
    def model(depth):
        teacher = dict(dim=8, depth=depth, heads=2) if depth else None
        return IMAE(8, 4, 3, 16, 1, 2, teacher, decoder_dim=8, decoder_depth=1, decoder_heads=2)

    none, one, two = (model(depth).state_dict() for depth in range(3))
    names, others = ([k for k in x if k.startswith("teacher.")] for x in (one, two))
    loads(model(1), one, [], [])
    loads(model(0), one, [], names)
    loads(model(1), none, names, [])
    loads(model(2), one, others, names)


def test_transfer_says_what_does_not_fit(state):
    """An error lists what does not fit, and nothing changes. Only the final norm may be missing."""
    model = mae()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    del state["norm.bias"], state["blocks.1.norm1.weight"]
    state.update({"blocks.2.ls1.gamma": torch.zeros(32), "cls_token": torch.zeros(1, 1, 8)})
    with pytest.raises(ValueError, match="blocks.1.norm1.weight.*ls1.gamma.*cls_token") as error:
        transfer(model, from_released(state), (4, 4))
    assert "norm.bias" not in str(error.value) and same(model.state_dict(), before)


def test_transfer_interpolates_positions():
    """Positions of encoder and decoder come from any other grid, even one with the same number of
    patches."""
    one, other = (MAE(size, 4, 3, 16, 1, 2, decoder_dim=16, decoder_heads=2)
                  for size in ((8, 32), (32, 8)))
    wanted = resize_pos_embed(one.encoder.pos_embed, (2, 8), (8, 2))
    assert transfer(other, one.state_dict(), one.encoder.grid) == ([], [])
    assert torch.equal(other.encoder.pos_embed, wanted)
    assert torch.equal(other.decoder_pos_embed, wanted)


def test_sizes_of():
    """Shapes tell all sizes except the number of heads, which SIZES has for a width and depth."""
    def shapes(dim, depth, **_):
        blocks = {f"encoder.blocks.{i}.norm1.bias": torch.zeros(1) for i in range(depth)}
        return {"encoder.patch_embed.weight": torch.zeros(dim, 3 * 8 * 8),
                "encoder.pos_embed": torch.zeros(1, 1 + 25, 1), **blocks}
    common = dict(img_size=(40, 40), patch_size=(8, 8), in_chans=3)
    for size in SIZES.values():
        assert sizes_of(shapes(**size), "x") == {**common, **size}
    with pytest.raises(ValueError, match="cannot tell the number of heads from x: pass --heads"):
        sizes_of(shapes(64, 3), "x")
    assert sizes_of(shapes(**SIZES["tiny"]), "x", 6)["heads"] == 6     # --heads wins
    assert sizes_of(shapes(64, 3), "x", 8) == dict(common, dim=64, depth=3, heads=8)
    for count in (25, 1 + 16 * 8):                         # no class token; not a square grid
        with pytest.raises(InputError, match=f"x has {count} positions, which are not those of a "):
            sizes_of({**shapes(64, 3), "encoder.pos_embed": torch.zeros(1, count, 1)}, "x", 8)
