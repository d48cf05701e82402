"""Recompute the released code's reference numbers, in tests/unit/golden/*.pt, with our classes.

`replay(fixture)` builds the model from `config` and `state_dict`, runs it on the fixture's inputs
and returns this project's own loss, predictions and gradients. Gradients have the released names.
It never reads an expected value. Released names are mapped to ours here, except for methods with
public checkpoints: vit.from_released maps those."""

import torch
import torch.nn.functional as F
from torch import nn

from crossmae import CrossMAE
from finetune import Classifier
from hypermae import HyperMAE, grid_coords
from imae import IMAE
from mae import MAE
from minr import MINR
from vit import MLP, from_released, gather_patches, linear_patch_embed

EXPECTED = ("loss", "pred", "grads", "latent", "mask", "ids_keep", "logits", "pred_indices", "psnr",
            "modulation_matrix", "pred_returned", "pixels", "modulations", "hyponet_weights",
            "branch_latent", "weak_idx", "loss_with_distill", "loss_without_distill")


def load(path):
    """Return a fixture: a dict of tensors, numbers and strings."""
    return torch.load(path, weights_only=True)


def vit_args(config):
    """Return the encoder's sizes under our names."""
    names = dict(img_size="img_size", patch_size="patch_size", in_chans="in_chans", dim="embed_dim",
                 depth="depth", heads="num_heads")
    return {ours: config[released] for ours, released in names.items()}


def decoder_args(config):
    """Return the sizes of a transformer decoder, and whether targets are normalised."""
    return dict(norm_pix_loss=config["norm_pix_loss"], decoder_dim=config["decoder_embed_dim"],
                decoder_depth=config["decoder_depth"], decoder_heads=config["decoder_num_heads"])


def prepare(model, config, state):
    """Give the model the fixture's MLP ratio, LayerNorm eps and weights; return it in eval mode."""
    for module in model.modules():
        if isinstance(getattr(module, "mlp", None), MLP):
            dim = module.mlp.fc1.in_features
            module.mlp = MLP(dim, int(config["mlp_ratio"] * dim))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config["norm_eps"]
    model.load_state_dict(state)
    return model.eval()


def gradients(model, loss, released=lambda name: name):
    """Return {released name: gradient} for the trainable parameters."""
    model.zero_grad()
    loss.backward()
    grads = {released(name.removeprefix("encoder.")): p.grad
             for name, p in model.named_parameters() if p.requires_grad}
    # the release embeds patches by a convolution, whose weight is (D, C, p, q)
    weight = grads.pop("patch_embed.weight").unflatten(1, (*model.encoder.patch_size, -1))
    grads["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)
    grads["patch_embed.proj.bias"] = grads.pop("patch_embed.bias")
    return grads


def in_raster_order(pred, ids_keep, ids_mask):
    """Sort predictions (B,L,N) from noise order (visible patches first) into raster order."""
    return gather_patches(pred, torch.cat([ids_keep, ids_mask], dim=1).argsort(dim=1))


def replay_mae(fixture):
    config = fixture["config"]
    model = MAE(**vit_args(config), **decoder_args(config), mask_ratio=config["mask_ratio"])
    prepare(model, config, from_released(fixture["state_dict"]))
    images, noise = fixture["images"], fixture["noise"]
    loss, _ = model(images, noise)
    with torch.no_grad():
        ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
        latent = model.encode(images, ids_keep)
        pred = model.decode(latent, ids_keep, ids_mask, visible_too=True)
        pred = in_raster_order(pred, ids_keep, ids_mask)
    return {"loss": loss.detach(), "pred": pred, "grads": gradients(model, loss)}


def replay_crossmae(fixture):
    config = fixture["config"]
    model = CrossMAE(**vit_args(config), **decoder_args(config), mask_ratio=config["mask_ratio"],
                     prediction_ratio=config["kept_mask_ratio"])
    prepare(model, config, from_released(fixture["state_dict"]))
    images, noise = fixture["images"], fixture["noise"]
    loss, _ = model(images, noise)
    with torch.no_grad():                                  # as in training: only these patches
        ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
        ids = ids_mask[:, model.skipped:].sort(dim=1).values
        pred = model.decode(model.encode(images, ids_keep), ids)
    return {"loss": loss.detach(), "pred": pred, "grads": gradients(model, loss)}


HYPERMAE_NAMES = {"feat2w_blocks": "feat2W_blocks", "proj": "linear_proj_pacomlp_dim",
                  "T": "transformation_matrix", "paco_mlp": "pacomlp.mlp"}


def replay_hypermae(fixture):
    config = fixture["config"]

    def released(name):
        first, *rest = name.split(".", 1)
        return ".".join([HYPERMAE_NAMES.get(first, first), *rest])
    model = HyperMAE(
        **vit_args(config), mask_ratio=config["mask_ratio"], norm_pix_loss=config["norm_pix_loss"],
        n_weight_tokens=config["n_weight_tokens"], feat2w_depth=config["feat2W_depth"],
        mlp_depth=config["pre_mod_depth"] + 1 + config["post_mod_depth"],
        modulated_layer=config["pre_mod_depth"], hidden_dim=config["hidden_dim"],
        pe_dim=config["pe_dim"], pe_sigma=config["pe_sigma"], out_bias=config["out_bias"])
    state = linear_patch_embed(fixture["state_dict"])
    prepare(model, config, {name: state[released(name.removeprefix("encoder."))]
                            for name in model.state_dict()})
    images, noise = fixture["images"], fixture["noise"]
    loss, _ = model(images, noise)
    with torch.no_grad():
        ids_keep, _, _ = model.encoder.mask(images, noise, model.mask_ratio)
        pred = model.decode(grid_coords(model.encoder.grid), model.encode(images, ids_keep))
    return {"loss": loss.detach(), "pred": pred, "grads": gradients(model, loss, released)}


def replay_minr(fixture):
    """Start from the weight tokens: a fixture has no images."""
    config, state = fixture["config"], fixture["state_dict"]
    model = MINR(
        8, 4, config["output_dim"], config["token_dim"], 1, 1, hypernetwork=config["variant"],
        modulated_layers=config["modulated_layer_idxs"], mlp_depth=config["n_layer"],
        hidden_dim=config["hidden_dim"][0], groups=config["n_weight_groups"][0],
        ff_dim=config["ff_dim"], ff_sigma=config["ff_sigma"], out_bias=config["output_bias"])
    ours = {}                                              # {released name: our parameter(s)}
    for i, (W, bias) in enumerate(zip(model.weights, model.biases)):
        own, factor = i in model.tokens_per_layer, f"shared_factor.linear_wb{i}"
        base = torch.zeros_like(state[f"hyponet.params_dict.linear_wb{i}"][:-1])
        ours[f"hyponet.params_dict.linear_wb{i}"] = (base if factor in state else W, bias)
        if factor in state:
            ours[factor] = (W,)
        if own:
            for name, p in model.to_columns[str(i)].named_parameters():
                ours[f"group_modulation_postfc.linear_wb{i}.{name}"] = (p,)
    with torch.no_grad():
        for name, (first, *bias) in ours.items():
            value = state[name]
            first.copy_(value[:-1] if bias else value.view_as(first))
            bias and bias[0].copy_(value[-1])
    tokens = fixture["weight_tokens"].clone().requires_grad_()
    coords = fixture["coords"]                             # (B, H, W, 2)
    pred = model.decode(coords.flatten(1, 2), model.modulate(tokens)).view(fixture["target"].shape)
    loss = (pred - fixture["target"]).square().mean()
    loss.backward()

    def grad(first, *bias):
        g = torch.zeros_like(first) if first.grad is None else first.grad
        return torch.cat([g, bias[0].grad[None]]) if bias else g
    grads = {name: grad(*parts).view_as(state[name]) for name, parts in ours.items()}
    grads["weight_tokens"] = tokens.grad
    return {"loss": loss.detach(), "pred": pred.detach(), "grads": grads}


def replay_imae(fixture):
    """Take the teacher's latents from the fixture, which has no teacher."""
    config, alpha = fixture["config"], fixture["config"]["lam"]
    model = IMAE(**vit_args(config), **decoder_args(config), mask_ratio=config["mask_ratio"])
    def released(name):
        first, dot, last = name.rpartition(".")
        return {"decoder_embed.0": "decoder_embed1",
                "decoder_embed.1": "decoder_embed2"}.get(first, first) + dot + last
    state = linear_patch_embed(fixture["state_dict"])
    prepare(model, config, {name: state[released(name.removeprefix("encoder."))]
                            for name in model.state_dict()})
    model.norm_pix_loss = False                            # the release accepts and ignores it
    model.distill_weight = float(config["distill"])
    x1, x2, noise = fixture["x1"], fixture["x2"], fixture["noise"]
    model.teach = lambda images, ids_keep: fixture[        # it gets the unmixed images
        "teacher_latent_x1" if torch.equal(images, x1) else "teacher_latent_x2"]
    loss, _ = model(x1, noise, x2, alpha)
    with torch.no_grad():
        ids_keep, ids_mask, _ = model.encoder.mask(x1, noise, model.mask_ratio)
        pred = []
        for z in model.encode(alpha * x1 + (1 - alpha) * x2, ids_keep):
            decoded = model.decode(z, ids_keep, ids_mask, visible_too=True)
            pred.append(in_raster_order(decoded, ids_keep, ids_mask))
    return {"loss": loss.detach(), "pred": pred, "grads": gradients(model, loss, released)}


def replay_finetune(fixture):
    config = fixture["config"]
    pool = {"avg": "mean", "token": "token"}[config["global_pool"]]
    model = Classifier(**vit_args(config), classes=config["num_classes"], pool=pool)
    prepare(model, config, from_released(fixture["state_dict"]))
    logits = model.logits(fixture["images"])
    loss = F.cross_entropy(logits, fixture["labels"])
    return {"loss": loss.detach(), "pred": logits.detach(), "grads": gradients(model, loss)}


REPLAY = {"mae": replay_mae, "crossmae": replay_crossmae, "hypermae": replay_hypermae,
          "minr": replay_minr, "imae": replay_imae, "finetune": replay_finetune}


def replay(fixture):
    """Return this project's {"loss": 0-dim, "pred": tensor, "grads": {released name: tensor}}."""
    return REPLAY[fixture["method"]](fixture)


def distances(fixture):
    """Return the largest differences of loss, predictions and gradients from those in a fixture."""
    ours = replay({k: v for k, v in fixture.items() if k not in EXPECTED})
    assert ours["grads"].keys() >= fixture["grads"].keys() and len(fixture["grads"]) > 2

    def far(a, b):
        return max(map(far, a, b)) if isinstance(b, list) else (a - b).abs().max().item()
    return (far(ours["loss"], fixture["loss"]), far(ours["pred"], fixture["pred"]),
            max(far(ours["grads"][name], grad) for name, grad in fixture["grads"].items()))
