"""What is special to HyperMAE: coordinates, and blocks that encoder and Feat2W share.
(tests/lib/references.py checks the modulated MLP.)"""

import pytest
import torch

import hypermae
from hypermae import HyperMAE
from tests.unit.test_methods import build, images_and_noise


@pytest.mark.parametrize("loss_on", ["masked", "all"])
def test_coordinates(loss_on, spy):
    """Coordinates are row and column of the predicted patches, in a grid of 4 x 6. They are float32
    even under autocast: at 1,024 periods per image, bfloat16 would make them noise."""
    seen = spy(HyperMAE, "decode", lambda self, coords, M: coords)
    dtypes = spy(hypermae, "fourier_features", lambda coords, dim, sigma: coords.dtype)
    model, (images, noise) = build("hypermae", loss_on=loss_on), images_and_noise()
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, 0.75)
    every = torch.cat([ids_keep, ids_mask], dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(images, noise)
        model.reconstruct(images, noise)
    assert {*dtypes} == {torch.float32}
    for coords, ids in zip(seen, (ids_mask if loss_on == "masked" else every, every)):
        wanted = torch.stack([(2 * (ids // 6) + 1) / 4 - 1, (2 * (ids % 6) + 1) / 6 - 1], dim=2)
        assert torch.allclose(coords, wanted)


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
