"""What MINR is about: weights that a transformer writes, and a function that paints at any size."""

import pytest
import torch
import torch.nn.functional as F

import minr
from minr import MINR, fourier_features, grid_coords
from tests.conftest import ROOT
from tests.golden import load, replay
from tests.test_methods import build, images_and_noise


def tokens_of(model, images, noise):
    ids_keep, _, mask = model.encoder.mask(images, noise, model.mask_ratio)
    return model.hyper(images, ids_keep, mask)


@pytest.mark.parametrize("kind", ["ginr", "transinr"])
def test_render_is_the_reconstruction(kind):
    """At its own size exactly, at three times it in the middle of each pixel, at any other too."""
    model, (images, noise) = build("minr", hypernetwork=kind), images_and_noise()
    native = model.render(images, (16, 24), noise)
    painted, mask = model.reconstruct(images, noise)
    hidden = model.encoder.pixels_of(mask).bool().expand_as(images)
    assert torch.equal(painted[hidden], native[hidden])
    assert torch.equal(painted[~hidden], images[~hidden])
    larger = model.render(images, (48, 72), noise)
    assert torch.allclose(larger[:, :, 1::3, 1::3], native, atol=1e-5)
    assert model.render(images, 7, noise).shape == (3, 3, 7, 7)
    assert model.render(images, (5, 9), mask_ratio=0.5).shape == (3, 3, 5, 9)
    assert model.render(images, (70, 70), noise).isfinite().all()      # more than one portion


def test_each_layer_is_the_images_own_or_shared():
    model, (images, noise) = build("minr"), images_and_noise()
    shapes = [tuple(W.shape) for W, _ in model.modulate(tokens_of(model, images, noise))]
    assert shapes == [(8, 8), (3, 8, 8), (8, 8), (8, 3)]   # GINR: only the second (Sec. 3.2)
    model = build("minr", hypernetwork="transinr")
    shapes = [tuple(W.shape) for W, _ in model.modulate(tokens_of(model, images, noise))]
    assert shapes == [(3, 8, 8), (3, 8, 8), (3, 8, 8), (3, 8, 3)]
    assert list(model.groups.values()) == [4, 4, 4, 3] and len(model.weight_tokens) == 15


def test_modulation_written_out():
    """GINR: a product of factors. TransINR: output j is modulated by token j mod g. All columns
    have norm 1."""
    for kind in ("ginr", "transinr"):
        model, (images, noise) = build("minr", hypernetwork=kind), images_and_noise()
        tokens = tokens_of(model, images, noise)
        layers = model.modulate(tokens)
        assert all(torch.allclose(W.norm(dim=-2), torch.ones(())) for W, _ in layers)
        own = tokens if kind == "ginr" else tokens[:, 4:8]             # of layer 1
        own = model.to_weights["1"](own)                               # (B, 4, 8)
        wanted = torch.stack([
            own[b].T @ model.weights[1] if kind == "ginr" else
            torch.stack([own[b, j % 4] * model.weights[1][:, j] for j in range(8)], dim=1)
            for b in range(3)])
        assert torch.allclose(layers[1][0], F.normalize(wanted, dim=1), atol=1e-6)


def test_inr_is_a_function_of_coordinates_and_layers():
    model, (images, noise) = build("minr"), images_and_noise()
    layers = model.modulate(tokens_of(model, images, noise))
    coords = torch.rand(5, 2) * 2 - 1
    pixels = model.inr(coords, layers)
    for b in range(3):                                     # written out for one image
        x = fourier_features(coords, 4, 4.0)
        for i, (W, bias) in enumerate(layers):
            x = x @ (W[b] if W.ndim == 3 else W) + bias
            x = F.relu(x) if i < 3 else x + 0.5
        assert torch.allclose(pixels[b], x, atol=1e-6)
    own_points = coords.expand(3, -1, -1).clone()
    assert torch.allclose(model.inr(own_points, layers), pixels, atol=1e-6)


def test_fourier_features():
    """One periods an image to sigma, row before column, cosines before sines."""
    coords = grid_coords((4, 6))
    assert coords.shape == (24, 2) and coords[1, 1] > coords[0, 1] and coords[6, 0] > coords[0, 0]
    assert torch.allclose(coords[::6, 0], torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    x = fourier_features(coords, 4, 8.0)
    wanted = [f(torch.pi * coords[:, axis] * w) for f in (torch.cos, torch.sin)
              for axis in (0, 1) for w in (1, 8)]
    assert torch.allclose(x, torch.stack(wanted, dim=1), atol=1e-5)


def test_what_the_hypernetwork_reads():
    """All patch tokens, hidden ones of zeros; or only the visible ones."""
    for visible_only, n in ((False, 1 + 24 + 4), (True, 1 + 6 + 4)):
        model, (images, noise) = build("minr", encode_visible_only=visible_only), images_and_noise()
        seen, first = [], model.encoder.blocks[0]
        first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        mask = model.encoder.mask(images, noise, 0.75)[2]
        tokens_of(model, images, noise)
        assert seen[0].shape == (3, n, 16)
        if not visible_only:
            zeroed = model.encoder.embed(torch.zeros_like(images))[mask.bool()]
            assert torch.allclose(seen[0][:, 1:25][mask.bool()], zeroed)


def test_bfloat16_keeps_high_frequencies(monkeypatch):
    """Phases reach pi sigma: in bfloat16 they would be noise; here only the rest is in it."""
    coords = grid_coords((182, 182))
    exact = fourier_features(coords, 16, 1024.0)
    rounded = fourier_features(coords.bfloat16(), 16, 1024.0)          # coordinates lose it already
    assert (exact - rounded).abs().max() > 1
    frequencies = torch.linspace(0, torch.tensor(1024.0).log(), 8).exp().bfloat16()
    phase = (coords.bfloat16()[..., None] * frequencies).flatten(-2) * torch.pi
    assert (exact[:, :16] - phase.float().cos()).abs().max() > 1
    model, (images, noise) = build("minr", ff_dim=16, ff_sigma=1024.0), images_and_noise()
    whole = model.predict(images, noise)

    def off(images):
        return (model.predict(images, noise).float() - whole).abs().max()
    seen, relu = [], F.relu
    monkeypatch.setattr(F, "relu", lambda x: (seen.append(x.dtype), relu(x))[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert off(images) < 0.05
    assert seen == [torch.bfloat16] * 3                    # biases promote no hidden layer to float32
    assert model.inr(coords, model.modulate(tokens_of(model, images, noise))).dtype == torch.float32
    model.bfloat16()
    assert off(images.bfloat16()) < 0.05
    monkeypatch.setattr(minr, "fourier_features", lambda coords, dim, sigma: fourier_features(
        coords.bfloat16(), dim, sigma))                    # 24 columns are already too fine for it
    assert off(images.bfloat16()) > 0.2


def test_a_step_paints_a_share_of_the_pixels(monkeypatch):
    model, (images, noise) = build("minr", pixel_fraction=0.3), images_and_noise()
    inr, seen = model.inr, []
    monkeypatch.setattr(model, "inr", lambda c, layers: (seen.append(c), inr(c, layers))[1])
    whole = [model(images, noise)[0] for _ in range(200)]
    assert all(c.shape == (116, 2) for c in seen)          # 0.3 * 384, rounded up
    assert len({tuple(c) for c in seen[0].tolist()}) == 116
    full = model.eval()(images, noise)[0]                  # evaluation paints all
    assert seen[-1].shape == (384, 2)
    assert torch.allclose(torch.stack(whole).mean(), full, rtol=0.02)


def test_jitter_stays_within_the_pixel(monkeypatch):
    model, (images, noise) = build("minr", coord_jitter=True), images_and_noise()
    inr, seen = model.inr, []
    monkeypatch.setattr(model, "inr", lambda c, layers: (seen.append(c), inr(c, layers))[1])
    model(images, noise)
    model.eval()(images, noise)
    moved = (seen[0] - seen[1]).abs()
    assert (moved <= torch.tensor([1 / 16, 1 / 24]) + 1e-6).all() and moved.max() > 0.05
    assert torch.equal(seen[1], grid_coords((16, 24)))


@pytest.mark.parametrize("options, words", [
    (dict(hypernetwork="inr"), "hypernetwork inr"), (dict(loss_on="some"), "loss_on some"),
    (dict(pixel_fraction=0.0), "pixel_fraction 0.0"), (dict(ff_dim=3), "ff_dim 3"),
    (dict(modulated_layers=(4,)), "from 0 to 3"), (dict(modulated_layers=()), "modulated_layers"),
    (dict(modulated_layers=(1.0,)), "modulated_layers"),
    (dict(hypernetwork="transinr", groups=3), "groups 3 do not divide the 8 outputs of layer 0"),
    (dict(groups=0), "groups 0")])
def test_impossible_options(options, words):
    with pytest.raises(ValueError, match=words):
        build("minr", **options)


@pytest.mark.parametrize("name, config", [
    ("ginr", dict(modulated_layer_idxs=[0, 3], n_weight_groups=[5])), ("ginr", {}),
    ("transinr", dict(n_weight_groups=[4])), ("transinr", dict(modulated_layer_idxs=[2, 4])),
    ("transinr", dict(n_layer=3, hidden_dim=[16]))])
def test_replay_takes_other_fixtures(name, config):
    fixture = load(ROOT / f"tests/golden/minr_{name}.pt")
    config = {**fixture["config"], **config}
    modulated, l, h = config["modulated_layer_idxs"], config["n_layer"], config["hidden_dim"][0]
    widths, state, g = [32, *[h] * (l - 1), 3], {}, torch.Generator().manual_seed(0)
    total = 0
    for i in range(l):
        a, b = widths[i], widths[i + 1]
        state[f"hyponet.params_dict.linear_wb{i}"] = torch.randn(a + 1, b, generator=g)
        if modulated is None or i in modulated:
            groups = min(config["n_weight_groups"][0], b)
            total += groups
            key = f"group_modulation_postfc.linear_wb{i}"
            state |= {f"{key}.0.weight": torch.ones(32), f"{key}.0.bias": torch.zeros(32),
                      f"{key}.1.weight": torch.randn(a, 32, generator=g),
                      f"{key}.1.bias": torch.zeros(a)}
            if name == "ginr":
                state[f"shared_factor.linear_wb{i}"] = torch.randn(1, groups, b, generator=g)
    ours = replay(dict(
        method="minr", config=config, state_dict=state, coords=torch.rand(2, 5, 7, 2) * 2 - 1,
        weight_tokens=torch.randn(2, total, 32, generator=g), target=torch.rand(2, 5, 7, 3)))
    assert ours["pred"].shape == (2, 5, 7, 3)
    assert ours["grads"].keys() == {*state, "weight_tokens"}
    assert all(v.shape == state[k].shape for k, v in ours["grads"].items() if k in state)
    dead = f"hyponet.params_dict.linear_wb{modulated[0]}" if name == "ginr" else None
    assert not dead or not ours["grads"][dead][:-1].any() and ours["grads"][dead][-1].any()


@pytest.mark.parametrize("kind, groups, sigma", [("ginr", 256, 128.0), ("transinr", 64, 1024.0)])
def test_defaults(kind, groups, sigma):
    """A 14 x 14 grid of 13-pixel patches, 6 blocks of width 768, 5 layers of 256; and what the
    release gives each hypernetwork."""
    model = MINR(hypernetwork=kind)
    assert model.groups == ({1: 256} if kind == "ginr" else {**dict.fromkeys(range(4), 64), 4: 3})
    assert model.ff_sigma == sigma and model.groups[1] == groups
    assert MINR(16, 4, 3, 16, 1, 1, hypernetwork=kind, groups=8, ff_sigma=2.0).groups[1] == 8
    assert model.encoder.grid == (14, 14) and model.encoder.img_size == (182, 182)
    assert len(model.encoder.blocks) == 6 and model.encoder.dim == 768
    assert [tuple(W.shape) for W in model.weights] == [(256, 256)] * 4 + [(256, 3)]
    recipe = MINR.recipe
    assert (recipe["optimizer"], recipe["lr"], recipe["schedule"]) == ("adam", 1e-4, "constant")
    assert recipe["batch_size"] == 32 and MINR.mean == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("size", [0, -3, 2.5, (4, 0)])
def test_impossible_size(size):
    with pytest.raises(ValueError, match="is not a size in pixels"):
        build("minr").render(images_and_noise()[0], size)


def test_figure():
    """Four times the size, beside bicubic upscaling of the same mask's native rendering."""
    model, (images, _) = build("minr"), images_and_noise()
    rendered = model.figures(images)["rendered"]
    assert rendered.shape == (3, 2, 3, 64, 96)
    noise = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0)).flatten(1)
    assert torch.allclose(rendered[:, 0], model.render(images, (64, 96), noise), atol=1e-6)
    native = model.render(images, (16, 24), noise)
    smooth = F.interpolate(rendered[:, 1], (16, 24), mode="area")
    assert (smooth - native).abs().mean() < 0.1 * native.std()
