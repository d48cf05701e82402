"""What HyperMAE is about: a matrix that is a layer of an MLP, and an INR without a memory."""

import pytest
import torch
import torch.nn.functional as F

import hypermae
import minr
from hypermae import fourier_features
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
    assert layers == [] and torch.allclose(model.decode(coords, M), z + 0.5, atol=1e-6)


def test_minr_has_the_same_coordinates_and_features():
    """Both files write them out: a change of one must be one of the other."""
    coords = hypermae.grid_coords((5, 7))
    assert torch.equal(coords, minr.grid_coords((5, 7)))
    for dim, sigma in ((4, 8.0), (10, 300.0)):
        ours, theirs = (module.fourier_features(coords, dim, sigma) for module in (hypermae, minr))
        assert ours.shape == (35, 2 * dim) and torch.allclose(ours, theirs, atol=1e-6)


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
        assert torch.allclose(model.encode(images, ids_keep), M, atol=1e-6)


def test_loss_on_all_patches():
    model = build("hypermae", loss_on="all", norm_pix_loss=False)
    images, noise = images_and_noise()
    decoded, _ = model.reconstruct(images, noise)
    wanted = (decoded - images).square().mean()
    assert torch.allclose(model(images, noise)[0], wanted, atol=1e-5)
