import pytest
import torch

from mae import MAE
from tests.conftest import ROOT
from tests.golden import load, replay
from vit import normalize_patches, patchify, unpatchify

EXPECTED = ("loss", "pred", "grads", "latent", "mask", "ids_keep", "logits")


def mae(**kwargs):
    torch.manual_seed(0)
    return MAE(**{**dict(img_size=(16, 24), patch_size=4, in_chans=3, dim=16, depth=2,
               heads=2, decoder_dim=16, decoder_depth=1, decoder_heads=2), **kwargs})


def images_and_noise(B=2, C=3, L=24):
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, C, 16, 24, generator=g), torch.rand(B, L, generator=g)


def test_golden():
    fixture = load(ROOT / "tests/golden/mae.pt")
    ours = replay({k: v for k, v in fixture.items() if k not in EXPECTED})
    assert torch.allclose(ours["loss"], fixture["loss"], rtol=0, atol=2e-6)
    assert torch.allclose(ours["pred"], fixture["pred"], rtol=0, atol=1e-5)
    assert ours["grads"].keys() >= fixture["grads"].keys() and len(fixture["grads"]) > 2
    for name, grad in fixture["grads"].items():
        assert torch.allclose(ours["grads"][name], grad, rtol=0, atol=1e-5), name


def test_golden_can_fail():
    """The tolerance tells another epsilon apart."""
    fixture = load(ROOT / "tests/golden/mae.pt")
    fixture["config"]["norm_eps"] = 1e-3
    assert not torch.allclose(replay(fixture)["pred"], fixture["pred"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("config",
    [ dict(norm_pix_loss=False,
    mask_ratio=0.5),
    dict(mlp_ratio=2.0),
    dict(img_size=48,
    patch_size=16,
     in_chans=1)])
def test_replay_takes_other_fixtures(config):
    fixture = {"method": "mae", "config": {
        **load(ROOT / "tests/golden/mae.pt")["config"], **config}}
    config = fixture["config"]
    L = (config["img_size"] // config["patch_size"]) ** 2
    model = MAE(config["img_size"], config["patch_size"], config["in_chans"],
                32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4)
    state = {k.removeprefix("encoder."): v for k, v in model.state_dict().items()}
    if config["mlp_ratio"] != 4:
        state = {k: v[:v.shape[0] // 2] if "fc1" in k else v[:, :v.shape[1] // 2]
            if "fc2.weight" in k else v for k, v in state.items()}
    ours = replay({**fixture,
    "state_dict": state,
    "noise": torch.rand(2,
    L),
    "grad_names": ["cls_token"],
    "images": torch.randn(2,
    config["in_chans"],
     *[config["img_size"]] * 2)})
    assert ours["pred"].shape == (2, L, config["patch_size"] ** 2 * config["in_chans"])
    assert list(ours["grads"]) == ["cls_token"] and ours["loss"].ndim == 0


@pytest.mark.parametrize(
    "options", [
        {}, dict(
            inter_block_attention=True), dict(
                norm_pix_loss=False), dict(
                    in_chans=1), dict(
                        in_chans=5, patch_size=(
                            4, 8), mask_ratio=0.5)])
def test_every_trainable_parameter_gets_a_gradient(options):
    model = mae(**options)
    images = torch.randn(3, options.get("in_chans", 3), 16, 24)
    loss, metrics = model(images)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.ndim == 0 and not metrics["loss"].requires_grad
    dead = [
    n for n,
    p in model.named_parameters() if p.requires_grad and (
        p.grad is None or not p.grad.any())]
    assert dead == []
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == [
                                                 "decoder_pos_embed", "encoder.pos_embed"]


@pytest.mark.parametrize("options", [{}, dict(inter_block_attention=True)])
def test_no_leak_from_hidden_pixels(options):
    model, (images, noise) = mae(**options), images_and_noise()
    _, ids_mask, mask = model.encoder.mask(images, noise, 0.75)
    hidden = unpatchify(mask[..., None].expand(-1, -1, 48), 4, (4, 6))
    other = images + hidden * torch.randn(images.shape)
    assert torch.equal(model.predict(images, noise), model.predict(other, noise))
    visible = images + (1 - hidden)
    assert not torch.allclose(model.predict(images, noise), model.predict(visible, noise))


def test_loss_is_the_mean_over_hidden_patches():
    for norm_pix_loss in (True, False):
        model, (images, noise) = mae(norm_pix_loss=norm_pix_loss), images_and_noise()
        target = patchify(images, 4)
        target = normalize_patches(target)[0] if norm_pix_loss else target
        mask = model.encoder.mask(images, noise, 0.75)[2]
        error = (model.predict(images, noise) - target).square().mean(-1)  # (B, L)
        wanted = (error * mask).sum() / mask.sum()
        assert torch.allclose(model(images, noise)[0], wanted, atol=1e-5)


def test_order_of_the_noise_does_not_matter():
    """Only who is visible does: tokens stay in noise order, and attention cannot see it."""
    model, (images, noise) = mae(), images_and_noise()
    mask = model.encoder.mask(images, noise, 0.75)[2]
    assert torch.allclose(model(images, noise)[0], model(images, mask)[0], atol=1e-6)
    assert torch.allclose(model.predict(images, noise), model.predict(images, mask), atol=1e-5)


def test_own_mask_and_reconstruct():
    model, (images, _) = mae(norm_pix_loss=False), images_and_noise()
    own = torch.ones(2, 24)
    own[0, :6], own[1, 6:12] = 0, 0
    painted, mask = model.reconstruct(images, own)
    assert torch.equal(mask, own) and painted.shape == images.shape
    hidden = unpatchify(mask[..., None].expand(-1, -1, 48), 4, (4, 6)).bool()
    assert torch.equal(painted[~hidden], images[~hidden])              # visible pixels are copied
    wanted = unpatchify(model.predict(images, own), 4, (4, 6))
    assert torch.allclose(painted[hidden], wanted[hidden], atol=1e-6)
    own[0, 6] = 0
    with pytest.raises(ValueError, match="shows 7 of 24 patches, mask_ratio 0.75 shows 6"):
        model.reconstruct(images, own)
    assert model.reconstruct(images, mask_ratio=0.5)[1].sum(1).tolist() == [12, 12]
    with pytest.raises(ValueError, match="mask_ratio 0.0 shows"):
        model.reconstruct(images, mask_ratio=0.0)


def test_normalised_predictions_get_statistics_back():
    model, (images, noise) = mae(), images_and_noise()
    flatter, mask = model.reconstruct(images, noise)
    _, mean, std = normalize_patches(patchify(images, 4))
    wanted = model.predict(images, noise) * std + mean
    hidden = mask.bool()
    assert torch.allclose(patchify(flatter, 4)[hidden], wanted[hidden], atol=1e-5)

    honest = model.reconstruct(images, noise, leak_free=True)[0]
    brighter = images.clone()                              # the truth does not matter now
    brighter[unpatchify(mask[..., None].expand(-1, -1, 48), 4,
                        (4, 6)).bool().expand_as(images)] += 3
    assert torch.equal(patchify(model.reconstruct(brighter, noise, leak_free=True)[0], 4)[hidden],
                       patchify(honest, 4)[hidden])
    assert not torch.allclose(honest, flatter)


@pytest.mark.parametrize(
    "option", [
        dict(
            norm_pix_loss=False), dict(
                mask_ratio=0.5), dict(
                    decoder_dim=32), dict(
                        decoder_depth=2), dict(
                            decoder_heads=4), dict(
                                inter_block_attention=True)])
def test_each_option_changes_what_it_names(option):
    images, noise = images_and_noise()
    assert not torch.allclose(mae()(images, noise)[0], mae(**option)(images, noise)[0], atol=1e-7)


def test_inter_block_attention_mixes_all_maps():
    model, (images, noise) = mae(inter_block_attention=True), images_and_noise()
    ids_keep = model.encoder.mask(images, noise, 0.75)[0]
    maps = model.encoder.layers(model.encoder.embed(images, ids_keep))
    mixed = sum(w * m for w, m in zip(model.map_weights, maps))
    assert torch.allclose(model.encode(images, ids_keep), model.encoder.norm(mixed), atol=1e-5)
    with torch.no_grad():                                  # the last map alone is plain MAE
        model.map_weights.copy_(torch.tensor([0.0, 0.0, 1.0]))
    assert torch.allclose(model(images, noise)[0], mae()(images, noise)[0], atol=1e-6)


def test_one_batch_overfits():
    model, (images, noise) = mae(dim=32, decoder_dim=32), images_and_noise()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(500):
        loss = model(images, noise)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_bare_call_draws_a_new_mask():
    model, (images, _) = mae(), images_and_noise()
    assert model(images)[0] != model(images)[0]


def test_loss_is_float32_under_autocast():
    model, (images, noise) = mae(), images_and_noise()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images, noise)[0]
    assert loss.dtype == torch.float32 and abs(loss - model(images, noise)[0]) < 0.02


def test_impossible_mask_ratio():
    with pytest.raises(ValueError, match="mask_ratio 1.0 shows 0 of 24 patches"):
        mae(mask_ratio=1.0)
