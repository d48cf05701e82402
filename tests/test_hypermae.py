"""What is special to HyperMAE: MINR's coordinates and features, and blocks that encoder and Feat2W
share. Its MLP, of which a matrix is a layer: tests/references.py."""

import torch

import hypermae
import minr
from tests.test_methods import build, images_and_noise


def test_minr_has_the_same_coordinates_and_features():
    """Both files write them out: a change of one must be one of the other."""
    coords = hypermae.grid_coords((5, 7))
    assert torch.equal(coords, minr.grid_coords((5, 7)))
    assert torch.allclose(coords.view(5, 7, 2)[3, 4], torch.tensor([0.4, 2 / 7]))
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
