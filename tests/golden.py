"""Replay the reference numbers in tests/golden/*.pt, made with the released codes, through this
project's classes.

`replay(fixture)` builds the model from `config` and `state_dict`, runs it on the fixture's inputs
and returns this project's own loss, predictions and gradients, the latter under released names. It
never looks at an expected value. The mapping from released names to ours lives here, except where
public checkpoints exist: that one is vit.from_released."""

import torch
import torch.nn.functional as F
from torch import nn

from finetune import Classifier
from mae import MAE
from vit import Block, from_released


def load(path):
    """A fixture: a dict of tensors, numbers and strings."""
    return torch.load(path, weights_only=True)


def vit_args(config):
    """The sizes of the encoder, by our names."""
    return dict(
    img_size=config["img_size"],
    patch_size=config["patch_size"],
    in_chans=config["in_chans"],
    dim=config["embed_dim"],
    depth=config["depth"],
     heads=config["num_heads"])


def prepare(model, config, state):
    """The model with the fixture's MLP ratio, LayerNorm eps and weights, in eval mode."""
    for blocks in [
    m for name,
    m in model.named_modules() if isinstance(
        m,
         nn.ModuleList) and name.endswith("blocks")]:
        for i, block in enumerate(blocks):
            if config["mlp_ratio"] != 4:
                blocks[i] = Block(
    block.norm1.normalized_shape[0],
    block.attn.heads,
     config["mlp_ratio"])
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = config["norm_eps"]
    model.load_state_dict(state)
    return model.eval()


def gradients(model, loss, fixture):
    """{released name: gradient} of the trainable parameters, or of those in `grad_names`."""
    model.zero_grad()
    loss.backward()
    grads = {name.removeprefix("encoder."): p.grad for name,
     p in model.named_parameters() if p.requires_grad}
    return {name: grads[name] for name in (fixture.get("grad_names") or grads)}


def replay_mae(fixture):
    config = fixture["config"]
    model = MAE(
    **vit_args(config),
    mask_ratio=config["mask_ratio"],
    norm_pix_loss=config["norm_pix_loss"],
    decoder_dim=config["decoder_embed_dim"],
    decoder_depth=config["decoder_depth"],
     decoder_heads=config["decoder_num_heads"])
    prepare(model, config, from_released(fixture["state_dict"]))
    loss, _ = model(fixture["images"], fixture["noise"])
    with torch.no_grad():
        pred = model.predict(fixture["images"], fixture["noise"])
    return {"loss": loss.detach(), "pred": pred, "grads": gradients(model, loss, fixture)}


def replay_finetune(fixture):
    config = fixture["config"]
    pool = {"avg": "mean", "token": "token"}[config["global_pool"]]
    model = Classifier(**vit_args(config), classes=config["num_classes"], pool=pool)
    prepare(model, config, from_released(fixture["state_dict"]))
    logits = model.logits(fixture["images"])
    loss = F.cross_entropy(logits, fixture["labels"])
    return {
    "loss": loss.detach(),
    "pred": logits.detach(),
    "grads": gradients(
        model,
        loss,
         fixture)}


REPLAY = {"mae": replay_mae, "finetune": replay_finetune}


def replay(fixture):
    """This project's {"loss": 0-dim, "pred": tensor, "grads": {released name: tensor}}."""
    return REPLAY[fixture["method"]](fixture)
