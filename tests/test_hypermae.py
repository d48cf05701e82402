"""What HyperMAE is about: a matrix that is a layer of an MLP, and an INR without a memory."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import hypermae
import minr
from hypermae import HyperMAE, fourier_features, grid_coords
from tests.conftest import ROOT
from tests.golden import HYPERMAE_NAMES, load, replay
from tests.test_methods import build, images_and_noise


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("mod", [0, 1, 2])
def test_modulated_layer(mod, relu):
    """The l layers, M among them, written out; ReLU where paper and release have it."""
    model = build("hypermae", modulated_layer=mod, relu_around_m=relu)
    coords, M = torch.rand(2, 5, 2), torch.randn(2, 12 if mod else 16, 12)
    layers = [*model.paco_mlp]
    z = fourier_features(coords, 8, 4.0)        # (2, 5, 16)
    for i in range(4):
        z = z @ M if i == mod else layers.pop(0)(z)
        plain = i == 3 or not relu and (i == mod or i + 1 == mod)
        z = z if plain else F.relu(z)
    assert layers == [] and torch.allclose(model.inr(coords, M), z + 0.5, atol=1e-6)


def test_inr_is_a_function_of_coordinates_and_m():
    """Any points, in any order, and each image by its own M."""
    model, (images, noise) = build("hypermae"), images_and_noise()
    M = model.feat2w(images, model.encoder.mask(images, noise, 0.75)[0])
    assert M.shape == (3, 12, 12)
    coords = torch.rand(3, 7, 2) * 2 - 1
    pixels, order = model.inr(coords, M), torch.randperm(7)
    assert torch.allclose(model.inr(coords[:, order], M), pixels[:, order], atol=1e-6)
    assert torch.allclose(model.inr(coords[1:2], M[1:2]), pixels[1:2], atol=1e-6)
    assert not torch.allclose(model.inr(coords, M.roll(1, 0)), pixels)


def test_coordinates_are_centres_in_raster_order():
    coords = grid_coords((4, 6)).view(4, 6, 2)
    assert torch.allclose(coords[:, 0, 0], torch.tensor([-0.75, -0.25, 0.25, 0.75]))
    assert torch.allclose(coords[0, :, 1], torch.tensor([-5, -3, -1, 1, 3, 5]) / 6)


def test_minr_has_the_same_coordinates_and_features():
    """Both files write them out: a change of one must be one of the other."""
    for name in ("grid_coords", "fourier_features"):
        ours, theirs = (inspect.getsource(getattr(module, name)) for module in (hypermae, minr))
        assert ours.replace("minr.py", "hypermae.py") == theirs


def test_shared_blocks():
    """The encoder keeps its blocks, Feat2W has the rest; weight tokens enter at the first shared
    one, and visible tokens see them there."""
    for shared in (0, 1, 2):
        model, (images, noise) = build("hypermae", shared_blocks=shared), images_and_noise()
        assert (len(model.encoder.blocks), len(model.feat2w_blocks)) == (2, 2 - shared)
        ids_keep = model.encoder.mask(images, noise, 0.75)[0]
        x = model.encoder.layers(model.encoder.embed(images, ids_keep))[2 - shared]
        x = torch.cat([x, model.weight_tokens.expand(3, -1, -1)], dim=1)
        for block in [*model.encoder.blocks[2 - shared:], *model.feat2w_blocks]:
            x = block(x)
        M = model.T @ model.proj(x[:, -3:])
        assert torch.allclose(model.feat2w(images, ids_keep), M, atol=1e-6)


def test_only_what_the_loss_needs_is_decoded(monkeypatch):
    for loss_on, N in (("masked", 18), ("all", 24)):
        model, (images, noise) = build("hypermae", loss_on=loss_on), images_and_noise()
        inr, seen = model.inr, []
        monkeypatch.setattr(model, "inr", lambda c, M: (seen.append(c.shape), inr(c, M))[1])
        model(images, noise)
        assert seen == [(3, N, 2)]


def test_loss_on_all_patches():
    model = build("hypermae", loss_on="all", norm_pix_loss=False)
    images, noise = images_and_noise()
    ids = torch.arange(24).expand(3, -1)
    wanted = (model.predict(images, noise) - model.encoder.targets(images, ids)).square().mean()
    assert torch.allclose(model(images, noise)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("options, words", [
    (dict(modulated_layer=3), "modulated_layer 3"), (dict(modulated_layer=-1), "layer -1"),
    (dict(shared_blocks=3), "shared_blocks 3"), (dict(feat2w_depth=0), "feat2w_depth 0"),
    (dict(pe_dim=7), "pe_dim 7"), (dict(pe_sigma=float("nan")), "pe_sigma nan"),
    (dict(n_weight_tokens=0), "n_weight_tokens 0"), (dict(loss_on="some"), "loss_on some")])
def test_impossible_options(options, words):
    with pytest.raises(ValueError, match=words):
        build("hypermae", **options)


@pytest.mark.parametrize("config", [
    dict(pre_mod_depth=2), dict(pre_mod_depth=2, post_mod_depth=1), dict(norm_pix_loss=True),
    dict(feat2W_depth=1), dict(n_weight_tokens=7), dict(mask_ratio=0.5, img_size=24)])
def test_replay_takes_other_fixtures(config):
    config = {**load(ROOT / "tests/golden/hypermae.pt")["config"], **config}
    pre, l = config["pre_mod_depth"], config["pre_mod_depth"] + 1 + config["post_mod_depth"]
    model = HyperMAE(config["img_size"], 8, 3, 32, 2, 4, n_weight_tokens=config["n_weight_tokens"],
                     feat2w_depth=config["feat2W_depth"], mlp_depth=l, modulated_layer=pre,
                     hidden_dim=32, pe_dim=16)
    state = {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}   # dead, as released
    for name, value in model.state_dict().items():
        first, *rest = name.removeprefix("encoder.").split(".", 1)
        state[".".join([HYPERMAE_NAMES.get(first, first), *rest])] = value
    L = (config["img_size"] // 8) ** 2
    ours = replay(dict(method="hypermae", config=config, state_dict=state, noise=torch.rand(2, L),
                       images=torch.randn(2, 3, *[config["img_size"]] * 2),
                       grad_names=["transformation_matrix", "pacomlp.mlp.0.weight", "norm.weight"]))
    assert ours["pred"].shape == (2, L, 192) and ours["grads"]["transformation_matrix"].any()
    assert not ours["grads"]["norm.weight"].any()


def test_defaults_are_those_of_table_3():
    model = HyperMAE(dim=16, depth=1, heads=1)
    assert model.weight_tokens.shape == (16, 16) and len(model.feat2w_blocks) == 4
    assert len(model.paco_mlp) == 5 and model.modulated_layer == 1
    assert model.paco_mlp[1].weight.shape == (256, 256) and model.T.shape == (256, 16)
    assert model.loss_on == "masked" and model.mask_ratio == 0.75
