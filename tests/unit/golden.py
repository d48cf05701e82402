"""Recompute the released code's reference numbers, in tests/unit/golden/*.pt, with our classes.

`replay(fixture)` builds the model from `config` and `state_dict`, runs it on the fixture's inputs
and returns this project's own loss, predictions and gradients. It never reads an expected value.
Released names are mapped to ours by vit.from_released, and here for methods without public
checkpoints."""

import inspect
import re

import torch
import torch.nn.functional as F
from torch import nn

from crossmae import CrossMAE
from finetune import Classifier
from hypermae import HyperMAE
from imae import IMAE
from mae import MAE
from minr import MINR
from vit import from_released, gather_patches, normalize_patches, patchify

CLASSES = {"mae": MAE, "crossmae": CrossMAE, "hypermae": HyperMAE, "minr": MINR, "imae": IMAE,
           "finetune": Classifier}
ARGUMENTS = dict(  # our argument = its name in a fixture's config, where this is another one
    dim="embed_dim", heads="num_heads", classes="num_classes", decoder_dim="decoder_embed_dim",
    decoder_heads="decoder_num_heads", prediction_ratio="kept_mask_ratio",
    feat2w_depth="feat2W_depth", modulated_layer="pre_mod_depth")
RENAMED = [  # released names, by pattern, and ours
    ("feat2W_blocks", "feat2w_blocks"), ("linear_proj_pacomlp_dim", "proj"),         # HyperMAE
    ("transformation_matrix", "T"), ("pacomlp.mlp", "paco_mlp"),
    ("decoder_embed([12])", lambda found: f"decoder_embed.{int(found[1]) - 1}"),     # i-MAE
    (r"group_modulation_postfc.linear_wb(\d)", r"to_columns.\1"),                    # MINR
    (r"shared_factor.linear_wb(\d)", r"weights.\1")]


def load(path):
    """Return a fixture: a dict of tensors, numbers and strings."""
    return torch.load(path, weights_only=True)


def our_names(state):
    """Turn a released state dict, or gradients with its names, into those of our parameters."""
    ours = {}
    for name, x in state.items():
        if name.startswith("hyponet.params_dict"):         # MINR: weights, and biases below them
            ours.update({f"weights.{name[-1]}": x[:-1], f"biases.{name[-1]}": x[-1]})
    for name, x in state.items():                          # GINR's factors replace such weights
        for theirs, own in RENAMED:
            name = re.sub(f"^{theirs}", own, name)
        if not name.startswith("hyponet"):
            ours[name] = x[0] if name.startswith("weights.") else x
    return from_released(ours)


def build(fixture, **more):
    """Return the model of a fixture, with its weights, and with `more` arguments added or replaced.
    If a weight were missing, the numbers would differ."""
    cls, config = CLASSES[fixture["method"]], fixture["config"]
    theirs = {name: ARGUMENTS.get(name, name) for name in inspect.signature(cls).parameters}
    known = {ours: config[name] for ours, name in theirs.items() if name in config}
    model = cls(**{**known, **more})
    state, names = our_names(fixture["state_dict"]), model.state_dict().keys()
    model.load_state_dict({name: state[name] for name in names & state.keys()}, strict=False)
    return model.eval()


def in_loss_space(model, images, decoded):
    """Return the patches (B,L,N) of images and of decoded images, as the loss compares them."""
    target, pred = (patchify(x, model.encoder.patch_size) for x in (images, decoded))
    if getattr(model, "norm_pix_loss", False):
        target, mean, std = normalize_patches(target)
        pred = (pred - mean) / std
    return target, pred


def replay_minr(fixture):
    """Start from the weight tokens: a fixture has no images."""
    config, coords = fixture["config"], fixture["coords"]  # coords (B, H, W, 2)
    model = build(
        fixture, img_size=8, patch_size=4, in_chans=config["output_dim"], dim=config["token_dim"],
        depth=1, heads=1, hypernetwork=config["variant"], mlp_depth=config["n_layer"],
        modulated_layers=config["modulated_layer_idxs"], hidden_dim=config["hidden_dim"][0],
        groups=config["n_weight_groups"][0], out_bias=config["output_bias"])
    model.weight_tokens = nn.Parameter(fixture["weight_tokens"].clone())
    layers = model.modulate(model.weight_tokens)
    pred = model.decode(coords.flatten(1, 2), layers).view(fixture["target"].shape)
    return model, (pred - fixture["target"]).square().mean(), pred


def replay_imae(fixture):
    """Take the teacher's latents from the fixture, which has no teacher."""
    config, model = fixture["config"], build(fixture)
    model.distill_weight = float(config["distill"])
    x1, x2, noise, alpha = fixture["x1"], fixture["x2"], fixture["noise"], config["lam"]
    model.teach = lambda images, ids_keep: fixture[        # it gets the unmixed images
        "teacher_latent_x1" if torch.equal(images, x1) else "teacher_latent_x2"]
    loss, _ = model(x1, noise, x2, alpha)
    return model, loss, [patchify(x, config["patch_size"])
                         for x in model.unmix(x1, x2, alpha, noise)[0]]


def replay_classifier(fixture):
    model = build(fixture, pool={"avg": "mean", "token": "token"}[fixture["config"]["global_pool"]])
    logits = model.logits(fixture["images"])
    return model, F.cross_entropy(logits, fixture["labels"]), logits


def replay_masked(fixture):
    """Predict the masked patches of images, as MAE, CrossMAE and HyperMAE do."""
    config, images, noise, more = fixture["config"], fixture["images"], fixture["noise"], {}
    if fixture["method"] == "hypermae":
        more = dict(mlp_depth=config["pre_mod_depth"] + 1 + config["post_mod_depth"])
    model = build(fixture, **more)
    loss, _ = model(images, noise)
    _, pred = in_loss_space(model, images, model.reconstruct(images, noise)[0])
    if fixture["method"] == "crossmae":                    # only what the loss compares, sorted
        ids = model.encoder.mask(images, noise, model.mask_ratio)[1][:, model.skipped:]
        pred = gather_patches(pred, ids.sort(dim=1).values)
    return model, loss, pred


def replay(fixture):
    """Return this project's {"loss": 0-dim, "pred": tensor or list, "grads": {name: tensor}}."""
    run = {"minr": replay_minr, "imae": replay_imae, "finetune": replay_classifier}
    model, loss, pred = run.get(fixture["method"], replay_masked)(fixture)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), "pred": pred, "grads": grads}


def distances(fixture):
    """Return the largest differences of loss, predictions and gradients from those in a fixture."""
    ours, grads = replay(fixture), our_names(fixture["grads"])

    def far(a, b):
        return max(map(far, a, b)) if isinstance(b, list) else (a - b).abs().max().item()
    return (far(ours["loss"], fixture["loss"]), far(ours["pred"], fixture["pred"]),
            max(far(ours["grads"][name], grad) for name, grad in grads.items()))
