"""Models from checkpoints, ours or released ones, and our models with released names, for timm."""

import argparse
from pathlib import Path

from train import METHODS, model_of, read_checkpoint
from vit import ViT, require

NORM_PIX_LOSS = dict(action=argparse.BooleanOptionalAction,
                     help="whether a released file's targets were normalised; default: its name "
                          "says so")


def load_model(source, methods=METHODS):
    """Return a checkpoint's model in eval mode, with the class_names of its training data. `source`
    is a path or what read_checkpoint returns. Raises InputError if its method is unknown."""
    content = source if isinstance(source, dict) else read_checkpoint(source)
    require(content["method"] in methods, f"{content['path']} has the method {content['method']}, "
            f"not {', '.join(methods)}; a method of your own must be in METHODS of train.py, "
            f"and a classifier is evaluated by finetune.py --mode eval")
    model = model_of(content, methods[content["method"]])
    model.class_names = content.get("classes", [])
    return model.eval()


def load_any(source, norm_pix_loss=None):
    """Return the model of a checkpoint, ours or a released one, in eval mode. `source` is a path or
    what train.read_checkpoint returns. norm_pix_loss says whether a released file's targets were
    normalised; by default, its name does."""
    content = source if isinstance(source, dict) else read_checkpoint(source)
    if content["method"] is None:
        content = with_decoder(content, norm_pix_loss)
    return load_model(content)


def with_decoder(content, norm_pix_loss=None):
    """Return a released checkpoint with its method, MAE or CrossMAE, and all constructor arguments.
    The file does not have the number of the decoder's heads, which is 16 in all released models."""
    state, path = content["model"], content["path"]
    require("decoder_pred.weight" in state, f"{path} has no decoder: use it only for features")
    depth = len({name.split(".")[1] for name in state if name.startswith("decoder_blocks.")})
    is_cross = any("cross_attn" in name for name in state)
    if norm_pix_loss is None:                              # see tests/docs/REFERENCE.md
        norm_pix_loss = is_cross or "full" in Path(path).name
        require(norm_pix_loss or "visualize" in Path(path).name, f"{path}: were its targets "
                f"normalised? Pass --norm_pix_loss or --no-norm_pix_loss")
    config = dict(content["config"], norm_pix_loss=norm_pix_loss, decoder_heads=16,
                  decoder_dim=state["decoder_pos_embed"].shape[2], decoder_depth=depth)
    if is_cross:
        maps = state["wfm.linear.weight"].shape[1] if "wfm.linear.weight" in state else 0
        config.update(feature_maps="all" if maps else "last", include_input=maps > config["depth"],
                      self_attention=any("self_attn" in name for name in state))
    return {**content, "method": "crossmae" if is_cross else "mae", "config": config}


def to_released(model):
    """Invert vit.from_released: return a model's state dict with the released names, where a
    convolution embeds the patches."""
    state = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    weight = state.pop("patch_embed.weight").unflatten(1, (*model.encoder.patch_size, -1))
    state["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)      # (D, C, p, q)
    state["patch_embed.proj.bias"] = state.pop("patch_embed.bias")
    return state


def load_encoder(path, heads=None):
    """Return a checkpoint's encoder in eval mode, a vit.ViT. Its mean and std are those of its
    input, for vit.normalize. For `heads`, see vit.sizes_of."""
    content = read_checkpoint(path, heads)
    state = {name.removeprefix("encoder."): value for name, value in content["model"].items()
             if name.startswith("encoder.")}
    sizes = {name: content["config"][name]
             for name in ("img_size", "patch_size", "in_chans", "dim", "depth", "heads")}
    encoder = ViT(**sizes, norm="norm.weight" in state,
                  extra_tokens=len(content["model"].get("encoder.extra_tokens", ())))
    encoder.load_state_dict(state)
    encoder.mean, encoder.std = content["mean"], content["std"]
    return encoder.eval()
