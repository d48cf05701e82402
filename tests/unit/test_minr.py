"""What MINR is about: weights that a transformer predicts, and a function rendered at any size."""

import pytest
import torch
import torch.nn.functional as F

import minr
from minr import MINR, fourier_features, grid_coords
from tests.unit.test_methods import build, images_and_noise


@pytest.mark.parametrize("kind", ["ginr", "transinr"])
def test_render_is_the_reconstruction(kind):
    """Rendering equals the reconstruction at the model's size, at any mask ratio, and in the middle
    of each pixel at three times the size. Other sizes work."""
    model, (images, noise) = build("minr", hypernetwork=kind), images_and_noise()
    native = model.render(images, (16, 24), noise)
    assert torch.equal(native, model.reconstruct(images, noise)[0])
    larger = model.render(images, (48, 72), noise)
    assert torch.allclose(larger[:, :, 1::3, 1::3], native, atol=1e-5)
    other = model.render(images, (16, 24), noise, 0.5)
    assert torch.equal(other, model.reconstruct(images, noise, 0.5)[0])
    assert model.render(images, (5, 9), mask_ratio=0.5).shape == (3, 3, 5, 9)
    assert model.render(images, 70, noise).isfinite().all()            # more than 4,096 pixels


@pytest.mark.parametrize("visible_only", [False, True])
def test_what_the_hypernetwork_reads(visible_only):
    """The encoder gets all patches, with masked ones set to zero, or only the visible ones."""
    model, (images, noise) = build("minr", encode_visible_only=visible_only), images_and_noise()
    ids_keep, _, mask = model.encoder.mask(images, noise, 0.75)
    zeroed = images * (1 - model.encoder.pixels_of(mask))
    tokens = model.encoder.embed(images, ids_keep) if visible_only else model.encoder.embed(zeroed)
    e = model.encoder
    x = torch.cat([(e.cls_token + e.pos_embed[:, :1]).expand(3, -1, -1), tokens,
                   e.extra_tokens.expand(3, -1, -1)], dim=1)
    for block in model.encoder.blocks:
        x = block(x)
    assert torch.allclose(model.encode(images, ids_keep, mask), x[:, -4:], atol=1e-6)


def test_bfloat16_keeps_high_frequencies(monkeypatch, spy):
    """Phases reach pi sigma and would be noise in bfloat16. All hidden layers use bfloat16."""
    model, (images, noise) = build("minr", ff_dim=16, ff_sigma=1024.0), images_and_noise()
    whole, seen = model.reconstruct(images, noise)[0], spy(F, "relu", lambda x: x.dtype)

    def off(images):
        return (model.reconstruct(images, noise)[0].float() - whole).abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert off(images) < 0.05
        ids_keep, _, mask = model.encoder.mask(images, noise, 0.75)
        layers = model.modulate(model.encode(images, ids_keep, mask))
        assert model.decode(torch.zeros(4, 2), layers).dtype == torch.float32   # of colours
    assert {*seen} == {torch.bfloat16}                     # biases promote no hidden layer
    model.bfloat16()
    assert off(images.bfloat16()) < 0.05
    monkeypatch.setattr(minr, "fourier_features", lambda coords, dim, sigma: fourier_features(
        coords.bfloat16(), dim, sigma))                    # which is too coarse for 24 columns
    assert off(images.bfloat16()) > 0.2


def test_pixels_of_a_training_step(spy):
    """pixel_fraction renders this fraction of the pixels, none twice. coord_jitter moves each
    coordinate within its pixel. In evaluation, all pixels are rendered, in their middle."""
    seen = spy(MINR, "decode", lambda self, coords, layers: coords)
    images, noise = images_and_noise()
    for fraction, count in ((0.25, 96), (0.3, 116)):       # of 384, rounded up
        model = build("minr", pixel_fraction=fraction, coord_jitter=True)
        model(images, noise)
        assert seen[-1].shape == (count, 2) and len({*map(tuple, seen[-1].tolist())}) == count
    model.eval()(images, noise)
    build("minr", coord_jitter=True)(images, noise)
    moved = (seen[-1] - seen[-2]) * torch.tensor([16, 24])  # in half pixels
    assert (moved.abs() <= 1 + 1e-5).all() and (moved.std(0) - 3 ** -0.5).abs().max() < 0.1
    assert moved.mean(0).abs().max() < 0.15 and moved.T.corrcoef()[0, 1].abs() < 0.25
    assert torch.equal(seen[-2], grid_coords((16, 24)))


@pytest.mark.parametrize("loss_on", ["all", "masked"])
def test_loss_of_some_pixels(loss_on):
    """The mean loss over draws of pixels is that of all pixels. (For parts of a batch see
    test_methods.py.)"""
    model = build("minr", pixel_fraction=0.3, loss_on=loss_on)
    images, noise = images_and_noise(6)
    with torch.no_grad():
        losses = torch.stack([model(images, noise)[0] for _ in range(100)])
        assert torch.allclose(losses.mean(), model.eval()(images, noise)[0], rtol=0.02)


@pytest.mark.parametrize("kind, groups, sigma", [("ginr", 256, 128.0), ("transinr", 64, 1024.0)])
def test_defaults(kind, groups, sigma):
    """By default, MINR has a 14 x 14 grid of 13-pixel patches, 6 blocks of width 768, 5 layers of
    width 256, and the release's values for each hypernetwork."""
    with torch.device("meta"):                             # weights do not matter here
        model = MINR(hypernetwork=kind)
    tokens = {1: 256} if kind == "ginr" else {**dict.fromkeys(range(4), 64), 4: 3}
    assert model.tokens_per_layer == tokens
    assert model.ff_sigma == sigma and model.tokens_per_layer[1] == groups
    own = MINR(16, 4, 3, 16, 1, 1, hypernetwork=kind, groups=8, ff_sigma=2.0)
    assert own.tokens_per_layer[1] == 8
    assert model.encoder.grid == (14, 14) and model.encoder.img_size == (182, 182)
    assert len(model.encoder.blocks) == 6 and model.encoder.dim == 768
    assert [tuple(W.shape) for W in model.weights] == [(256, 256)] * 4 + [(256, 3)]
    assert MINR.mean == (0.0, 0.0, 0.0) and MINR.std == (1.0, 1.0, 1.0)
    assert (model.out_bias, model.ff_dim, model.loss_on) == (0.5, 128, "all")


def test_initial_weights():
    """GINR's shared factor is N(0, 1/(g a)), others are uniform up to 1/sqrt(outputs) (item 8)."""
    model = MINR(16, 4, 3, 16, 1, 1, modulated_layers=(0,), groups=64, ff_dim=32)
    assert model.weights[0].shape == (64, 256) and model.weights[-1].shape == (256, 3)
    assert model.weights[0].std().item() == pytest.approx((64 * 64) ** -0.5, rel=0.05)
    assert model.weights[-1].abs().max().item() == pytest.approx(3 ** -0.5, rel=0.05)
