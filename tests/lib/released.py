"""Our models with the parameter names of the released checkpoints, e.g. for timm."""


def to_released(model):
    """Invert vit.from_released: return a model's state dict with the released names, where a
    convolution embeds the patches."""
    state = {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
    weight = state.pop("patch_embed.weight").unflatten(1, (*model.encoder.patch_size, -1))
    state["patch_embed.proj.weight"] = weight.permute(0, 3, 1, 2)      # (D, C, p, q)
    state["patch_embed.proj.bias"] = state.pop("patch_embed.bias")
    return state
