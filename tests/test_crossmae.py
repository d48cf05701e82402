"""What CrossMAE is about: patches that do not depend on one another, and mixed feature maps."""

import pytest
import torch

import train
from crossmae import CrossMAE
from tests.conftest import ROOT
from tests.golden import load, replay
from tests.test_methods import build, images_and_noise
from vit import from_released, mask_noise, to_released


def ids_of(model, images, noise):
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
    return ids_keep, ids_mask, model.subset(noise, ids_keep, ids_mask)


@pytest.mark.parametrize("ratios", [(0.75, 0.15), (0.75, 0.25), (0.75, 0.75), (0.6, 0.1),
                                    (0.9, 0.3), (0.5, 0.001)])
@pytest.mark.parametrize("side", [4, 6, 8, 14])
def test_counts(ratios, side):
    """Visible and skipped patches are truncated, the rest is predicted; none twice."""
    mask_ratio, prediction_ratio = ratios
    model = CrossMAE(side, 1, 1, 8, 1, 1, mask_ratio=mask_ratio, prediction_ratio=prediction_ratio,
                     decoder_dim=8, decoder_depth=1, decoder_heads=1)
    L = side * side
    ids_keep, ids_mask, ids = ids_of(model, torch.zeros(2, 1, side, side), torch.rand(2, L))
    assert ids_keep.shape[1] == int(L * (1 - mask_ratio))
    assert ids.shape[1] == L - ids_keep.shape[1] - int(L * (mask_ratio - prediction_ratio))
    for row in range(2):
        assert {*ids[row].tolist()} <= {*ids_mask[row].tolist()}
        assert len({*ids[row].tolist()}) == ids.shape[1]
    assert model.lr_scale == prediction_ratio / mask_ratio


def test_count_of_the_release():
    """10 of 64 at 0.15, not 9."""
    model = build("crossmae", img_size=16, patch_size=2, prediction_ratio=0.15)
    assert ids_of(model, torch.zeros(1, 3, 16, 16), torch.rand(1, 64))[2].shape == (1, 10)


def test_a_prediction_does_not_depend_on_the_others():
    images, noise = images_and_noise()
    for self_attention in (False, True):
        model = build("crossmae", self_attention=self_attention)
        ids_keep, ids_mask, _ = ids_of(model, images, noise)
        features = model.encode(images, ids_keep)
        whole = model.decode(features, ids_mask)
        few = model.decode(features, ids_mask[:, 3:7])
        assert torch.allclose(few, whole[:, 3:7], atol=1e-5) != self_attention


def test_partial_loss_is_unbiased():
    """Its mean over draws that predict each hidden patch equally often is the loss of all of them
    (Sec. 3.3). Reconstruction is of all, in one pass (Figure 2)."""
    model, (images, noise) = build("crossmae", prediction_ratio=0.25), images_and_noise()
    full = build("crossmae")
    full.load_state_dict(model.state_dict())
    mask = model.encoder.mask(images, noise, 0.75)[2]
    losses = []
    for turn in range(18):                                 # each patch is predicted equally often
        rank = ((mask.cumsum(1) + turn) % 18) / 18 * mask
        losses.append(model(images, mask + rank)[0])
    assert torch.allclose(torch.stack(losses).mean(), full(images, noise)[0], atol=1e-5)
    assert torch.stack(losses).std() > 1e-3
    for ratio in (None, 0.5):
        a, b = (m.reconstruct(images, noise, ratio)[0] for m in (model, full))
        assert torch.equal(a, b)
    ids = ids_of(model, images, mask)[2]                   # an own mask: the last in raster order
    assert torch.equal(ids, torch.stack([m.nonzero()[-6:, 0] for m in mask]))


@pytest.mark.parametrize("kind, side, ratios", [
    ("random", 7, (0.75, 0.25)), ("grid", 7, (0.75, 0.25)), ("grid", 8, (0.9, 0.3)),
    ("block", 8, (0.6, 0.25))])
def test_subset_is_uniform_under_every_mask(kind, side, ratios):
    """Every hidden patch is as likely to be predicted as any other, also where the pattern's groups
    (whole numbers of noise) are cut between visible and hidden."""
    model, L, B = build("crossmae", img_size=side, patch_size=1, mask_ratio=ratios[0],
                        prediction_ratio=ratios[1]), side * side, 5000
    noise = mask_noise(kind, B, (side, side), generator=torch.Generator().manual_seed(0))
    ids_keep, ids_mask, ids = ids_of(model, torch.zeros(B, 3, side, side), noise)
    predicted = torch.zeros(B, L).scatter(1, ids, 1).gather(1, ids_mask)     # (B, L-K), 0 or 1
    group, last = noise.gather(1, ids_mask).floor(), noise.gather(1, ids_keep[:, -1:]).floor()
    share = ids.shape[1] / ids_mask.shape[1]
    for part in (group == last, group != last):
        assert not part.any() or abs(predicted[part].mean() - share) < 0.02


@pytest.mark.parametrize("options, map_ids", [
    ({}, [0, 1, 2]), (dict(include_input=False), [1, 2]), (dict(feature_maps=(1,)), [0, 2]),
    (dict(feature_maps=1), [0, 2]), (dict(feature_maps=(1,), include_input=False), [2]),
    (dict(softmax_weights=True), [0, 1, 2]), (dict(project_maps=True), [0, 1, 2])])
def test_inter_block_attention(options, map_ids):
    """Equation 1, written out, one norm a block; the class token is among the keys."""
    model, (images, noise) = build("crossmae", **options), images_and_noise()
    ids_keep = ids_of(model, images, noise)[0]
    maps = model.encoder.layers(model.encoder.embed(images, ids_keep))
    maps = [maps[i] for i in map_ids]
    if "project_maps" in options:
        maps = [proj(f) for proj, f in zip(model.map_proj, maps, strict=True)]
    features = model.encode(images, ids_keep)
    assert len(features) == 2 and model.wfm["linear"].weight.shape == (2, len(map_ids))
    for j, y in enumerate(features):
        w = model.wfm["linear"].weight[j]
        w = w.softmax(0) if options.get("softmax_weights") else w
        mix = sum(w_k * f_k for w_k, f_k in zip(w, maps))
        assert torch.allclose(y, model.dec_norms[j](mix), atol=1e-5)
        assert y.shape == (3, 1 + 6, 16)


def test_last_map_alone():
    model, (images, noise) = build("crossmae", feature_maps="last"), images_and_noise()
    ids_keep = ids_of(model, images, noise)[0]
    a, b = model.encode(images, ids_keep)
    assert torch.equal(a, model.encoder(images, ids_keep)) and torch.equal(a, b)
    assert not hasattr(model, "wfm") and isinstance(model.encoder.norm, torch.nn.LayerNorm)


def test_initial_weights_are_those_of_the_paper():
    torch.manual_seed(0)
    model = CrossMAE(8, 4, 3, 8, 12, 1, decoder_dim=8, decoder_depth=200, decoder_heads=1)
    assert abs(model.wfm["linear"].weight.std() * 13 ** 0.5 - 1) < 0.05
    assert abs(model.wfm["linear"].weight.mean()) < 0.02


@pytest.mark.parametrize("options, words", [
    (dict(prediction_ratio=0.8), "prediction_ratio 0.8"), (dict(prediction_ratio=0), "ratio 0 "),
    (dict(feature_maps="first"), "feature_maps first"), (dict(feature_maps=(0,)), "the last"),
    (dict(feature_maps=(1, 1)), "different"), (dict(feature_maps=(1, 2)), "from 0 to 1"),
    (dict(feature_maps="last", include_input=True), "include_input"),
    (dict(feature_maps="last", softmax_weights=True), "softmax_weights"),
    (dict(feature_maps="last", project_maps=True), "project_maps"),
    (dict(feature_maps=(1.0,)), "different blocks"), (dict(prediction_ratio=1e-17), "1e-17"),
    (dict(feature_maps=(1,), include_input=False, softmax_weights=True), "one map"),
    (dict(decoder_heads=0), "0 heads"), (dict(mask_ratio=0.5), "give both"),
    (dict(decoder_heads=3), "width 16 is not a multiple of 3"), (dict(decoder_depth=0), "depth 0")])
def test_impossible_options(options, words):
    with pytest.raises(ValueError, match=words):
        build("crossmae", **options)


@pytest.mark.parametrize("config", [
    dict(use_fm=[0, 2]), dict(use_fm=[-2, -1], use_input=False), dict(use_fm=[0, 1]),
    dict(weight_fm=False), dict(self_attn=True), dict(kept_mask_ratio=0.15), dict(mask_ratio=0.5),
    dict(norm_pix_loss=False, mlp_ratio=2.0), dict(img_size=24, patch_size=8)])
def test_replay_takes_other_fixtures(config):
    """A state dict as such a fixture has it goes in; the right numbers of everything come out."""
    config = {**load(ROOT / "tests/golden/crossmae.pt")["config"], **config}
    depth, maps = config["depth"], config["use_fm"]
    n = (depth if maps == [-1] else len(maps)) + config["use_input"]
    L, p = (config["img_size"] // config["patch_size"]) ** 2, config["patch_size"]
    model = CrossMAE(config["img_size"], p, 3, 32, depth, 4, decoder_dim=24, decoder_depth=2,
                     decoder_heads=4, self_attention=config["self_attn"],
                     feature_maps="all" if config["weight_fm"] else "last")
    state = to_released(model)
    if config["mlp_ratio"] != 4:
        state = {k: v[:len(v) // 2] if "fc1" in k else
                 v[:, :v.shape[1] // 2] if "fc2.weight" in k else v for k, v in state.items()}
    if config["weight_fm"]:
        state["wfm.linear.weight"] = torch.randn(2, n)
    last = "blocks.2.attn.proj.bias"
    ours = replay(dict(method="crossmae", config=config, state_dict=state, noise=torch.rand(2, L),
                       images=torch.randn(2, 3, *[config["img_size"]] * 2),
                       grad_names=["decoder_pred.bias", last]))
    visible = int(L * (1 - config["mask_ratio"]))
    predicted = L - visible - int(L * (config["mask_ratio"] - config["kept_mask_ratio"]))
    assert ours["pred"].shape == (2, predicted, 3 * p * p) and ours["loss"].isfinite()
    assert ours["grads"][last].any() == (2 in [i % 3 for i in maps] or not config["weight_fm"])


def test_names_are_the_released_ones():
    """So that CrossMAE's checkpoints load by name, and ours there."""
    released = load(ROOT / "tests/golden/crossmae.pt")["state_dict"]
    model = CrossMAE(32, 4, 3, 32, 3, 4, decoder_dim=24, decoder_depth=2, decoder_heads=4)
    assert to_released(model).keys() == released.keys()
    model.load_state_dict(from_released(released))
    assert all(torch.equal(v, released[k]) for k, v in to_released(model).items())


def test_defaults_are_the_papers():
    model = CrossMAE(dim=8, depth=1, heads=1)
    assert len(model.decoder_blocks) == 12 and model.mask_token.shape[2] == 512
    assert model.decoder_blocks[0].cross_attn.heads == 16 and model.prediction_ratio == 0.75


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=False), dict(feature_maps="last"),
                                     dict(self_attention=True, decoder_depth=3)])
def test_contributions_add_up(options):
    """Appendix D: mask token and positions, then each block, sum to the prediction."""
    model, (images, noise) = build("crossmae", **options), images_and_noise()
    torch.nn.init.normal_(model.decoder_norm.bias)
    torch.nn.init.normal_(model.decoder_norm.weight)
    parts, ids_keep, ids_mask, _ = model.contributions(images, noise)
    assert len(parts) == 1 + len(model.decoder_blocks)
    whole = model.decode(model.encode(images, ids_keep), ids_mask)
    assert torch.allclose(parts.sum(0), whole, atol=1e-5)
    assert all(part.abs().mean() > 1e-4 for part in parts)
    figures = model.figures(images)
    assert figures["contributions"].shape == (3, 2 + len(parts), 3, 16, 24)
    last = figures["contributions"][:, -1]
    visible = figures["contributions"][:, 0] != 0
    assert torch.equal(last[visible], images[visible])
    assert ("map_weights" in figures) == (options != dict(feature_maps="last"))


def test_the_pictures_end_in_the_reconstruction():
    for norm_pix_loss in (True, False):
        model, (images, _) = build("crossmae", norm_pix_loss=norm_pix_loss), images_and_noise()
        cells = model.figures(images)["contributions"]
        last, hidden = cells[:, -1], cells[:, 1] != 0
        assert torch.allclose(cells[:, 1:-1].sum(1)[hidden], last[hidden], atol=1e-5)
        noise = mask_noise("random", 3, (4, 6), generator=torch.Generator().manual_seed(0))
        assert torch.allclose(last, model.reconstruct(images, noise)[0], atol=1e-5)


def test_heat_map():
    """Largest weight white or black, 0 grey, a row a decoder block."""
    model, (images, _) = build("crossmae"), images_and_noise()
    with torch.no_grad():
        model.wfm["linear"].weight.copy_(torch.tensor([[0.0, 1.0, -2.0], [2.0, 0.5, 0.0]]))
    heat = model.figures(images)["map_weights"]
    seen = train.denormalize(heat[0], model)[0]
    wanted = torch.tensor([[0.5, 0.75, 0.0], [1.0, 0.625, 0.5]])
    assert heat.shape == (1, 1, 3, 2, 3) and torch.allclose(seen[0], wanted, atol=1e-6)
