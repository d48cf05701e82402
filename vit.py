"""A plain Vision Transformer and what three or more methods share: patches, positions, masking,
released names. Nothing here knows a method, but for the names of its parameters, at the end.

Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021; "ViT" below), with the fixed
positions, the initialisation and the masking of He et al., Masked Autoencoders Are Scalable Vision
Learners (CVPR 2022; "MAE"). "Released" is https://github.com/facebookresearch/mae.

    B images, C channels, L = h*w patches in raster order, K visible, D width, p x q patch size
    images (B,C,H,W)   patches (B,L,p*q*C)   tokens (B,1+K,D)   noise (B,L)   mask (B,L), 1 = hidden
    G extra tokens, for models that have them: tokens (B,1+K+G,D), class token first, then patches
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SIZES = {  # micro: ours, for CPUs; tiny and small: DeiT Table 1; base, large, huge: ViT Table 1
    "micro": dict(dim=64, depth=4, heads=2),
    "tiny": dict(dim=192, depth=12, heads=3),
    "small": dict(dim=384, depth=12, heads=6),
    "base": dict(dim=768, depth=12, heads=12),
    "large": dict(dim=1024, depth=24, heads=16),
    "huge": dict(dim=1280, depth=32, heads=16),
}


class InputError(ValueError):
    """A wrong input, not a bug: train.py and finetune.py end with its message in one line."""


# ------------------------------------------------------------------------------- images and patches
def pair(size):
    """An int or an (H, W) pair, as an (H, W) tuple. InputError unless above 0."""
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        raise InputError(f"{size} is not a size in pixels, as in 32 or 32,48")
    return sides


def grid_of(img_size, patch_size, **_):
    """The grid (h, w) of patches, from ints or (H, W) pairs; other arguments of a model are left
    aside. InputError unless they fit."""
    (H, W), (p, q) = pair(img_size), pair(patch_size)
    if H % p or W % q:
        raise InputError(f"img_size {H}x{W} is not a multiple of patch_size {p}x{q}: the nearest "
                         f"that are, {max(p, H - H % p)}x{max(q, W - W % q)} and "
                         f"{H + (-H) % p}x{W + (-W) % q}")
    return (H // p, W // q)


def patchify(images, patch_size):
    """Images (B,C,H,W) -> patches (B,L,p*q*C) in raster order, also within a patch; channel
    fastest. patch_size is an int or (H, W)."""
    B, C, H, W = images.shape
    p, q = pair(patch_size)
    if H % p or W % q:
        raise ValueError(f"images of {H}x{W} are not a multiple of patch_size {p}x{q}")
    x = images.reshape(B, C, H // p, p, W // q, q)                     # (B, C, h, p, w, q)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * q * C)       # (B, h*w, p*q*C)


def unpatchify(patches, patch_size, grid):
    """patchify's inverse: patches (B,L,p*q*C) of a grid (h, w) -> images (B,C,h*p,w*q)."""
    (h, w), (p, q) = grid, pair(patch_size)
    if patches.shape[1] != h * w or patches.shape[2] % (p * q):
        raise ValueError(f"patches {tuple(patches.shape)} do not fit {grid} of {p}x{q} pixels")
    x = patches.reshape(-1, h, w, p, q, patches.shape[2] // (p * q))   # (B, h, w, p, q, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, h * p, w * q)  # (B, C, H, W)


def gather_patches(x, ids):
    """The patches or tokens ids (B,K) of x (B,L,D), image by image: (B,K,D)."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2]))


def normalize_patches(patches):
    """Patches (B,L,N), each with mean 0 and variance 1 (MAE Sec. 3), and the mean and std (B,L,1)
    that they had. The variance is unbiased, plus 1e-6, as released."""
    var, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    std = (var + 1e-6).sqrt()
    return (patches - mean) / std, mean, std


def normalize(images, model):
    """Images (B,C,H,W) of values 0 ... 255 -> the model's input, float: (x / 255 - mean) / std."""
    channels = []
    for x, mean, std in zip(images.unbind(1), model.mean, model.std):
        channels.append((x / 255 - mean) / std)    # Python floats avoid a copy to the device
    return torch.stack(channels, dim=1)                                # (B, C, H, W)


def denormalize(images, model):
    """The model's input or output (B,C,H,W) -> float images, x * std + mean, clamped to 0 ... 1."""
    mean = torch.tensor(model.mean, device=images.device).view(-1, 1, 1)   # (C, 1, 1)
    std = torch.tensor(model.std, device=images.device).view(-1, 1, 1)     # (C, 1, 1)
    return (images.float() * std + mean).clamp(0, 1)


# ---------------------------------------------------------------------------------------- positions
def sincos_pos_embed(dim, grid):
    """Fixed positions (1,1+L,dim) of a grid (h, w) (MAE Appendix A.1; their layout: release); the
    first, the class token's, is zero. The first half of the channels has the column, the second the
    row, each [sin | cos] of its product with n = dim/4 frequencies 10000 ** -(i/n), i from 0.
    InputError unless dim is a multiple of 4."""
    if dim % 4:
        raise InputError(f"dim {dim} is not a multiple of 4, as sin-cos positions need")
    h, w = grid
    frequency = 10000 ** -(torch.arange(dim // 4).double() / (dim // 4))  # (dim/4,)
    row = torch.arange(h).repeat_interleave(w)                         # (L,) of each patch
    col = torch.arange(w).repeat(h)                                    # (L,)
    row, col = row[:, None] * frequency, col[:, None] * frequency      # (L, dim/4) each
    table = torch.cat([col.sin(), col.cos(), row.sin(), row.cos()], dim=1)  # (L, dim)
    table = torch.cat([torch.zeros(1, dim), table])                    # (1+L, dim) class token
    return table[None].float()                                         # (1, 1+L, dim)


def resize_pos_embed(pos_embed, grid, new_grid):
    """Positions (1,1+L,D) of a grid (h, w) -> of another (ViT Sec. 3.2), bicubic as released."""
    table = pos_embed[:, 1:].reshape(1, *grid, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    table = F.interpolate(table, size=tuple(new_grid), mode="bicubic", align_corners=False)
    return torch.cat([pos_embed[:, :1], table.flatten(2).transpose(1, 2)], dim=1)  # (1, 1+L', D)


# ------------------------------------------------------------------------------------------ masking
def visible_count(L, mask_ratio):
    """K, how many of L patches are visible: truncated, as released. (225 at 0.8 give 44, not 45:
    1 - 0.8 is a little below 0.2 in floating point.) InputError if mask_ratio is not between 0 and
    1, or leaves none visible or none hidden."""
    if not 0 < mask_ratio < 1:
        raise InputError(f"mask_ratio {mask_ratio} is not between 0 and 1")
    K = int(L * (1 - mask_ratio))
    if not 0 < K < L:
        raise InputError(f"mask_ratio {mask_ratio} shows {K} of {L} patches: at least one must be "
                         f"visible and one hidden")
    return K


def mask_noise(kind, B, grid, device=None, generator=None):
    """Noise (B,L) for masking(), where the lowest are visible. "random": uniform. "grid": one of
    every four patches, at even rows and columns, is lowest (MAE Figure 6, CrossMAE Table 15).
    "block": rectangles of 10 to 40% of the image, less where its border cuts them, are hidden one
    after the other (MAE Figure 6). BEiT's lie inside the image and have at least 16 patches."""
    h, w = grid
    noise = torch.rand(B, h, w, device=device, generator=generator)
    row, col = (torch.arange(n, device=device) for n in grid)
    if kind == "grid":
        noise = noise + ((row % 2)[:, None] | (col % 2)[None])         # (B, h, w)
    elif kind == "block":
        n = 16                                             # rectangles, nearly always enough
        draws = torch.rand(4, B, n, 1, device=device, generator=generator)
        area, aspect, y, x = draws                                     # (B, n, 1) each
        area = 0.1 + 0.3 * area                                        # of the image's
        aspect = 0.3 ** (2 * aspect - 1)                   # height / width, from 0.3 to 1 / 0.3
        rows = ((row + 0.5) / h - y).abs() < (area * aspect).sqrt() / 2  # (B, n, h)
        cols = ((col + 0.5) / w - x).abs() < (area / aspect).sqrt() / 2  # (B, n, w)
        inside = rows[:, :, :, None] & cols[:, :, None, :]             # (B, n, h, w)
        rank = torch.arange(n, 0, -1, device=device).view(n, 1, 1)     # the first has the highest
        noise = noise + (inside * rank).amax(dim=1)                    # (B, h, w)
    elif kind != "random":
        raise InputError(f"mask {kind!r} is not one of random, grid, block")
    return noise.flatten(1)                                            # (B, L)


def masking(noise, mask_ratio):
    """A random subset is visible (MAE Sec. 3, "Masking"), by sorting noise (B,L) as released: the K
    lowest (visible_count) -> ids_keep (B,K) and ids_mask (B,L-K) in the order of the noise, and
    mask (B,L), floats, 1 = hidden."""
    K = visible_count(noise.shape[1], mask_ratio)
    order = noise.argsort(dim=1, stable=True)              # (B, L) of equal noise in raster order
    ids_keep, ids_mask = order[:, :K], order[:, K:]                    # (B, K), (B, L-K)
    mask = torch.ones_like(noise).scatter(1, ids_keep, 0)              # (B, L)
    return ids_keep, ids_mask, mask


# ---------------------------------------------------------------------------------- the transformer
class Attention(nn.Module):
    """Multi-head self-attention (ViT eq. 5-8), (B,N,dim) -> (B,N,dim). As in released weights, the
    layer qkv gives q, k and v one after the other, and in each the heads one after the other."""

    def __init__(self, dim, heads):
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"width {dim} is not a multiple of {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=2)                          # (B, N, D) each, ViT eq. 5
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, N, D/heads)
        k = k.unflatten(2, (self.heads, -1)).transpose(1, 2)           # the same
        v = v.unflatten(2, (self.heads, -1)).transpose(1, 2)           # the same
        x = F.scaled_dot_product_attention(q, k, v)                    # the same, ViT eq. 6, 7
        return self.proj(x.transpose(1, 2).flatten(2))                 # (B, N, D) ViT eq. 8


class MLP(nn.Module):
    """Two linear layers around an exact GELU, on the last axis."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm block, (B,N,dim) -> (B,N,dim). In training, drop_path is the probability that an
    image skips the attention, and that it skips the MLP (stochastic depth)."""

    def __init__(self, dim, heads, mlp_ratio=4.0, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, int(mlp_ratio * dim))
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))               # ViT eq. 2
        return x + self.drop_path(self.mlp(self.norm2(x)))             # ViT eq. 3


def init_weights(module):
    """MAE's initialisation (A.1), for `apply`: linear layers xavier (qkv as one matrix), bias 0."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class ViT(nn.Module):
    """The encoder: `model(images)` gives tokens (B,1+L,dim), class token first, and hides nothing;
    `model(images, ids_keep)` encodes only the patches ids_keep (B,K): (B,1+K,dim). Extra tokens, if
    there are any, follow the patches: (B,1+L+G,dim).

    Args:
        img_size, patch_size: int or (H, W) in pixels; InputError if they do not fit
        in_chans, dim, depth, heads: channels, width, number of blocks, attention heads
        mlp_ratio: hidden width of the MLPs over dim
        norm: a LayerNorm after the last block; False where nothing after it needs one
        drop_path: stochastic depth of the last block, growing linearly from 0 at the first
        extra_tokens: number G of learned tokens after the patches, elsewhere called register tokens
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mlp_ratio=4.0, norm=True, drop_path=0.0, extra_tokens=0):
        super().__init__()
        self.grid = grid_of(img_size, patch_size)
        self.img_size, self.patch_size = pair(img_size), pair(patch_size)
        self.in_chans, self.dim = in_chans, dim
        self.num_patches = math.prod(self.grid)

        self.cls_token = nn.Parameter(torch.empty(1, 1, dim).normal_(std=0.02))
        self.pos_embed = nn.Parameter(sincos_pos_embed(dim, self.grid), requires_grad=False)
        proj = nn.Conv2d(in_chans, dim, self.patch_size, self.patch_size)
        self.patch_embed = nn.ModuleDict({"proj": proj})               # bias: torch's default
        drops = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_ratio, drop) for drop in drops)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity()
        self.extra_tokens = None
        if extra_tokens:
            self.extra_tokens = nn.Parameter(torch.empty(extra_tokens, dim).normal_(std=0.02))
        self.apply(init_weights)
        nn.init.xavier_uniform_(proj.weight.view(dim, -1))             # as a (D, C*p*q) matrix

    def check(self, images):
        """ValueError if channels or size of images (B,C,H,W) are not this model's."""
        if images.shape[1:] != (self.in_chans, *self.img_size):
            raise ValueError(f"images of shape {tuple(images.shape)} for a model of "
                             f"{(self.in_chans, *self.img_size)}")

    def mask(self, images, noise, mask_ratio, exact=False):
        """Choose the visible patches (see masking): ids_keep (B,K), ids_mask (B,L-K), mask (B,L).
        `noise` (B,L) is random if None, or may itself be a mask, 0 = visible and 1 = hidden.
        ValueError if it does not fit the images or, with `exact`, if it is a mask with another
        number of visible patches than mask_ratio gives."""
        self.check(images)
        B, L = len(images), self.num_patches
        if noise is None:
            noise = mask_noise("random", B, self.grid, images.device)
        if noise.shape != (B, L):
            raise ValueError(f"noise of shape {tuple(noise.shape)} for {B} images of {L} patches")
        if exact and ((noise == 0) | (noise == 1)).all():
            shown, K = (noise == 0).sum(1), visible_count(L, mask_ratio)
            if (shown != K).any():
                raise ValueError(f"the mask shows {shown[shown != K][0]} of {L} patches, "
                                 f"mask_ratio {mask_ratio} shows {K}")
        return masking(noise.float(), mask_ratio)

    def fixed_noise(self, images):
        """Random noise (B,L), the same in each call, for figures and analyses."""
        g = torch.Generator().manual_seed(0)
        return mask_noise("random", len(images), self.grid, generator=g).to(images.device)

    def pixels_of(self, mask):
        """A mask of patches (B,L) -> a mask of pixels (B,1,H,W)."""
        p, q = self.patch_size
        return unpatchify(mask[..., None].expand(-1, -1, p * q), (p, q), self.grid)

    def targets(self, images, ids, normalized=False):
        """What is to be predicted: the patches ids (B,M) of images (B,C,H,W), float32, each
        normalised by its own mean and variance on request: (B,M,p*q*C)."""
        patches = gather_patches(patchify(images, self.patch_size), ids).float()
        return normalize_patches(patches)[0] if normalized else patches

    def paste_patches(self, images, pred, ids, ids_keep, normalized=False, leak_free=False):
        """Images (B,C,H,W) with predictions pred (B,M,p*q*C) in place of the patches ids (B,M).
        Predictions of `normalized` patches get back a mean and a variance first: the true patch's,
        which flatters the image and its PSNR, or, `leak_free`, those of all visible pixels, in the
        patches ids_keep (B,K)."""
        patches = patchify(images, self.patch_size).float()            # (B, L, p*q*C)
        pred = pred.float()
        if normalized:
            if leak_free:                                              # (B, 1, K*p*q*C)
                known = gather_patches(patches, ids_keep).flatten(1)[:, None]
            else:
                known = gather_patches(patches, ids)                   # (B, M, p*q*C) the truth
            _, mean, std = normalize_patches(known)                    # (B, M or 1, 1) each
            pred = pred * std + mean
        patches = patches.scatter(1, ids[..., None].expand_as(pred), pred)
        return unpatchify(patches, self.patch_size, self.grid)

    def copy_visible(self, decoded, images, mask):
        """Decoded images (B,C,H,W) with the visible patches, where mask (B,L) is 0, copied from
        images (B,C,H,W)."""
        return torch.where(self.pixels_of(mask).bool(), decoded, images)

    def embed(self, images, ids_keep=None):
        """Patch embeddings with positions (B,L,D), or only those of ids_keep (B,K): (B,K,D)."""
        self.check(images)
        patches = patchify(images, self.patch_size)                    # (B, L, p*q*C)
        pos = self.pos_embed[:, 1:]                                    # (1, L, D)
        if ids_keep is not None:
            patches = gather_patches(patches, ids_keep)                # (B, K, p*q*C)
            pos = pos[0][ids_keep]                                     # (B, K, D)
        # stored as a convolution, for the released names; on patches it is a linear layer
        proj = self.patch_embed["proj"]
        weight = proj.weight.permute(0, 2, 3, 1).reshape(self.dim, -1)  # (D, p*q*C)
        return F.linear(patches, weight, proj.bias) + pos              # ViT eq. 1

    def add_learned_tokens(self, tokens):
        """Tokens (B,K,D) with the class token before and the extra tokens after them: (B,1+K,D), or
        (B,1+K+G,D)."""
        cls = self.cls_token + self.pos_embed[:, :1]                   # (1, 1, D) ViT eq. 1
        parts = [cls.expand(len(tokens), -1, -1), tokens]
        if self.extra_tokens is not None:
            parts.append(self.extra_tokens.expand(len(tokens), -1, -1))  # (B, G, D)
        return torch.cat(parts, dim=1)

    def encode(self, tokens):
        """Tokens (B,K,D) through all blocks and the final norm, if there is one: (B,1+K,D)."""
        x = self.add_learned_tokens(tokens)                               # (B, 1+K, D)
        for block in self.blocks:
            x = block(x)                                               # (B, 1+K, D)
        return self.norm(x)                                            # ViT eq. 4, of all tokens

    def layers(self, tokens):
        """All feature maps of tokens (B,K,D), without the final norm: the first block's input and
        each block's output, a list of 1 + depth, (B,1+K,D) each."""
        maps = [self.add_learned_tokens(tokens)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return maps

    def forward(self, images, ids_keep=None):
        return self.encode(self.embed(images, ids_keep))


# ----------------------------------------------------------------------------------- released names
ENCODER_NAMES = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.", "extra_tokens")
DECODER_NAMES = ("mask_token", "decoder_", "wfm.", "dec_norms.", "fc_norm.", "head.")  # or a head's


def from_released(state):
    """A released state dict (MAE's, CrossMAE's, timm's vit_*; with or without its outer "model") in
    this project's names: the encoder's get the prefix `encoder.`, the others stay as they are."""
    return {("encoder." if name.startswith(ENCODER_NAMES) else "") + name: value
            for name, value in state.get("model", state).items()}


def to_released(model):
    """The state dict of a model with an `encoder` in released names: from_released's inverse."""
    return {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}


def encoder_sizes(state):
    """What the shapes in a state dict of our names say about its encoder."""
    dim, in_chans, *patch_size = state["encoder.patch_embed.proj.weight"].shape
    blocks = {name.split(".")[2] for name in state if name.startswith("encoder.blocks.")}
    return dict(dim=dim, depth=len(blocks), patch_size=tuple(patch_size), in_chans=in_chans)


def count_extra_tokens(state):
    """The number G of extra tokens of the encoder in a state dict of our names, 0 for none."""
    return len(state.get("encoder.extra_tokens", ()))


def sizes_of(state, path, heads=None):
    """The constructor's arguments of the encoder in a state dict of our names, read off its shapes,
    with `heads` (None: of the size in SIZES that is as wide). Its grid is taken to be square.
    InputError if it is no ViT's."""
    try:
        sizes = encoder_sizes(state)
        side = math.isqrt(state["encoder.pos_embed"].shape[1] - 1)
    except KeyError as error:
        raise InputError(f"{path} is not a ViT's checkpoint: it has no {error}") from None
    if heads is None:
        heads = {size["dim"]: size["heads"] for size in SIZES.values()}.get(sizes["dim"])
    if heads is None:
        raise InputError(f"{path} does not say its number of heads: give --heads")
    return dict(sizes, img_size=tuple(side * p for p in sizes["patch_size"]), heads=heads,
                extra_tokens=count_extra_tokens(state))


def encoder_and_rest(state):
    """The encoder in a state dict of our names, and the rest of it (a decoder or a head), without a
    frozen teacher."""
    encoder = {k: v for k, v in state.items() if k.startswith("encoder.")}
    rest = {k: v for k, v in state.items() if not k.startswith(("encoder.", "teacher."))}
    return encoder, rest


def transfer(model, state, grid=None):
    """Start `model` from a state dict of our names: from its encoder, and from the rest of it if
    that is the same in both, by names and shapes. Positions of another `grid` (h, w; None: a
    released file's, square) are interpolated. A frozen teacher in either is left alone.

    Returns lines that say what was not taken over. InputError says what does not fit."""
    encoder, rest = encoder_and_rest(state)
    own_encoder, own_rest = encoder_and_rest(model.state_dict())
    theirs, ours = encoder_sizes(encoder), encoder_sizes(own_encoder)
    if theirs != ours:
        text = ("width {dim}, depth {depth}, patch {patch_size[0]}x{patch_size[1]}, "
                "channels {in_chans}")
        raise InputError(f"the file: {text.format(**theirs)}; here {text.format(**ours)}")

    resized, new_grid = {}, model.encoder.grid
    for part, name in ((encoder, "encoder.pos_embed"), (rest, "decoder_pos_embed")):
        if name in part:
            L = part[name].shape[1] - 1
            old_grid = grid or (math.isqrt(L), math.isqrt(L))
            if old_grid != new_grid and math.prod(old_grid) == L:
                part[name] = resize_pos_embed(part[name], old_grid, new_grid)
                resized[name] = f"interpolated from {old_grid} to {new_grid} patches: {name}"

    notes, errors = [], []
    if {k: v.shape for k, v in rest.items()} != {k: v.shape for k, v in own_rest.items()}:
        if grid is None:                                   # a released file, perhaps not a MAE's
            errors += [f"{k} is left over" for k in rest if not k.startswith(DECODER_NAMES)]
        for verb, part in (("not taken over", rest), ("fresh", own_rest)):
            if part:
                notes.append(f"{verb}: {', '.join(sorted({k.split('.')[0] for k in part}))}")
        rest = {}
    for k in sorted(encoder.keys() | own_encoder.keys()):
        if k in encoder and k in own_encoder:
            was, here = tuple(encoder[k].shape), tuple(own_encoder[k].shape)
            if was != here:
                errors.append(f"{k} is {was}, here {here}")
        elif k == "encoder.norm.weight" and k in encoder:
            notes.append("not taken over: encoder.norm (expected: mean pooling has its own norm, "
                         "some methods have none)")
        elif k == "encoder.norm.weight":
            notes.append("fresh: encoder.norm (expected: some methods have none)")
        elif k == "encoder.extra_tokens":
            notes.append(f"{'not taken over' if k in encoder else 'fresh'}: {k} (MINR alone has "
                         f"them)")
        elif k != "encoder.norm.bias":
            errors.append(f"{k} is {'left over' if k in encoder else 'missing'}")
    if errors:
        more = f"; and {len(errors) - 4} more" if len(errors) > 4 else ""
        raise InputError("; ".join(errors[:4]) + more)

    taken = {k: v for k, v in (encoder | rest).items() if k in (own_encoder | own_rest)}
    model.load_state_dict(taken, strict=False)
    return sorted(notes + [note for name, note in resized.items() if name in taken])
