"""What is special to HyperMAE: coordinates, and blocks that encoder and Feat2W share.
(tests/lib/references.py checks the modulated MLP.)"""

import torch

import hypermae
from tests.unit.test_methods import build, images_and_noise


def test_coordinates_stay_float32(spy):
    """At 1,024 periods per image, bfloat16 would make them noise, also under autocast."""
    seen = spy(hypermae, "fourier_features", lambda coords, dim, sigma: coords.dtype)
    model, (images, noise) = build("hypermae"), images_and_noise()
    with torch.autocast("cpu", torch.bfloat16):
        model(images, noise)
        model.reconstruct(images, noise)
    assert seen == [torch.float32] * 2


def test_shared_blocks():
    """The encoder keeps its blocks, and Feat2W has the others. Weight tokens enter at the first
    shared block, where visible tokens attend to them."""
    for shared in (0, 1, 2):
        model = build("hypermae", shared_blocks=shared, depth=4)
        images, noise = images_and_noise()
        assert (len(model.encoder.blocks), len(model.feat2w_blocks)) == (4, 2 - shared)
        ids_keep = model.encoder.mask(images, noise, 0.75)[0]
        x = model.encoder.feature_maps(model.encoder.embed(images, ids_keep))[4 - shared]
        x = torch.cat([x, model.weight_tokens.expand(3, -1, -1)], dim=1)
        for block in [*model.encoder.blocks[4 - shared:], *model.feat2w_blocks]:
            x = block(x)
        M = model.T @ model.proj(x[:, -3:])
        assert torch.allclose(model.encode(images, ids_keep), M, atol=1e-6)
