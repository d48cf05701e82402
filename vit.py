"""A plain Vision Transformer, and what the methods build on: patches, positions, masking and names
in released checkpoints. Only the code for these names, at the end, depends on the methods.

We follow Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021; "ViT" below). Fixed
positions, initialisation and masking are from He et al., Masked Autoencoders Are Scalable Vision
Learners (CVPR 2022; "MAE"). "The release" is https://github.com/facebookresearch/mae.

    B images, C channels, L = h*w patches in raster order, K visible, D width, p x q patch size
    images (B,C,H,W)   patches (B,L,p*q*C)   tokens (B,1+K,D)   noise (B,L)   mask (B,L), 1 = masked
    The first token is the class token, a learned token that belongs to no patch. A ViT can have G
    further learned tokens, called extra tokens, after the patches: (B,1+K+G,D)
"""

import math
import re

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


# ------------------------------------------------------------------------------------------ patches
def patchify(images, patch_size):
    """Cut images (B,C,H,W) into patches (B,L,p*q*C). Patches, and the pixels in each patch, are in
    raster order; the channel varies fastest. patch_size is an int or (p, q)."""
    B, C, H, W = images.shape
    p, q = pair(patch_size)
    h, w = H // p, W // q
    x = images.reshape(B, C, h, p, w, q)                               # (B, C, h, p, w, q)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * q * C)       # (B, L, p*q*C)


def unpatchify(patches, patch_size, grid):
    """Invert patchify: turn patches (B,L,p*q*C) of a grid (h, w) into images (B,C,h*p,w*q)."""
    (h, w), (p, q) = grid, pair(patch_size)
    B = patches.shape[0]                                   # len() would be a constant in an export
    x = patches.reshape(B, h, w, p, q, -1)                             # (B, h, w, p, q, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(B, -1, h * p, w * q)    # (B, C, H, W)


def gather_patches(x, ids):
    """Return those patches or tokens of x (B,L,D) whose indices are ids (B,K), as (B,K,D)."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2]))


def normalize_patches(patches):
    """Normalise each of the patches (B,L,N) to mean 0 and variance 1 (MAE Sec. 3). Returns the
    normalised patches x, and mean and std (B,L,1): x * std + mean restores the input. As in the
    release, std is sqrt(unbiased variance + 1e-6)."""
    var, mean = torch.var_mean(patches, dim=-1, keepdim=True)          # (B, L, 1) each
    std = (var + 1e-6).sqrt()                                          # (B, L, 1)
    return (patches - mean) / std, mean, std               # (B, L, N), (B, L, 1), (B, L, 1)


# ---------------------------------------------------------------------------------------- positions
def sincos_pos_embed(dim, grid):
    """Return fixed sine-cosine positions (1,1+L,dim), float32, for a grid (h, w), as in MAE
    Appendix A.1 with the release's channel layout. The class token's, the first, are zero. A patch
    in row y, column x gets [sin(x f), cos(x f), sin(y f), cos(y f)] with f_i = 10000^(-i/n), n =
    dim/4 and i = 0, ..., n-1. Raises InputError unless dim is a positive multiple of 4."""
    require(dim > 0 and dim % 4 == 0, f"dim {dim} must be a positive multiple of 4 (for positions)")
    h, w = grid
    frequency = 10000 ** -(torch.arange(dim // 4).double() / (dim // 4))  # (dim/4,)
    row = torch.arange(h).repeat_interleave(w)                         # (L,) y of each patch
    col = torch.arange(w).repeat(h)                                    # (L,) x of each patch
    row, col = row[:, None] * frequency, col[:, None] * frequency      # (L, dim/4) each
    table = torch.cat([col.sin(), col.cos(), row.sin(), row.cos()], dim=1)  # (L, dim)
    table = torch.cat([torch.zeros(1, dim), table])                    # (1+L, dim) class token
    return table[None].float()                                         # (1, 1+L, dim)


# ------------------------------------------------------------------------------------------ masking
def masking(noise, K):
    """Mask patches (MAE Sec. 3, "Masking") by sorting noise (B,L), as in the release: the K patches
    with the lowest noise stay visible. Returns ids_keep (B,K) and ids_mask (B,L-K), both sorted by
    noise, and mask (B,L), float, 1 = masked."""
    order = noise.argsort(dim=1, stable=True)              # (B, L) stable: ties in raster order
    ids_keep, ids_mask = order[:, :K], order[:, K:]                    # (B, K), (B, L-K)
    mask = torch.ones_like(noise).scatter(1, ids_keep, 0)              # (B, L)
    return ids_keep, ids_mask, mask


def visible_count(L, mask_ratio):
    """Return K, the number of visible patches of L, rounded down as in the release. Raises
    InputError unless mask_ratio leaves at least one visible and one masked."""
    require(0 < mask_ratio < 1, f"mask_ratio {mask_ratio} must be above 0 and below 1")
    K = int(L * (1 - mask_ratio))
    require(0 < K < L, f"mask_ratio {mask_ratio} leaves {K} of {L} patches visible: at least one "
                       f"must be visible and one masked")
    return K


def mask_noise(kind, B, grid, device=None, generator=None):
    """Draw noise (B,L) for masking(), where the patches with the lowest noise stay visible.
    "random" noise is uniform. "grid" noise is lowest for one of every four patches, at even rows
    and columns (MAE Figure 6, CrossMAE Table 15). With "block", random rectangles are masked one by
    one until enough are (MAE Figure 6). Each covers 10 to 40% of the image, or less at its border;
    after 16, random patches follow. MAE's, from BEiT, lie inside it and have 16 or more patches."""
    h, w = grid
    noise = torch.rand(B, h, w, device=device, generator=generator)    # (B, h, w)
    row, col = (torch.arange(n, device=device) for n in grid)
    if kind == "grid":
        noise = noise + ((row % 2)[:, None] | (col % 2)[None])         # (B, h, w) plus 0 or 1
    elif kind == "block":
        n = 16                                             # rectangles
        draws = torch.rand(4, B, n, 1, device=device, generator=generator)  # (4, B, n, 1)
        area, aspect, y, x = draws                                     # (B, n, 1) each
        area = 0.1 + 0.3 * area                            # a fraction of the image's area
        aspect = 0.3 ** (2 * aspect - 1)                   # height / width, from 0.3 to 1 / 0.3
        rows = ((row + 0.5) / h - y).abs() < (area * aspect).sqrt() / 2  # (B, n, h)
        cols = ((col + 0.5) / w - x).abs() < (area / aspect).sqrt() / 2  # (B, n, w)
        inside = rows[:, :, :, None] & cols[:, :, None, :]             # (B, n, h, w)
        rank = torch.arange(n, 0, -1, device=device).view(n, 1, 1)  # (n, 1, 1) the first is highest
        noise = noise + (inside * rank).amax(dim=1)                    # (B, h, w)
    elif kind != "random":
        raise InputError(f"mask {kind!r} is not one of random, grid, block")
    return noise.flatten(1)                                            # (B, L)


# ---------------------------------------------------------------------------------- the transformer
class Attention(nn.Module):
    """Multi-head self-attention (ViT eq. 5-8), (B,N,D) -> (B,N,D) with D = dim. As in the released
    weights, `qkv` outputs q, k and v concatenated, each with its heads concatenated."""

    def __init__(self, dim, heads):
        super().__init__()
        require(heads >= 1 and dim % heads == 0,
                f"width {dim} must be a multiple of the number of heads, {heads}")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=2)                          # (B, N, D) each, ViT eq. 5
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, N, D/heads)
        k = k.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, N, D/heads)
        v = v.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, N, D/heads)
        x = F.scaled_dot_product_attention(q, k, v)  # (B, heads, N, D/heads) ViT eq. 6, 7
        return self.proj(x.transpose(1, 2).flatten(2))                 # (B, N, D) ViT eq. 8


class MLP(nn.Module):
    """Apply two linear layers, with a GELU (not approximated) between them, to the last axis."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block, (B,N,D) -> (B,N,D) with D = dim. In training, each image skips
    the attention with probability drop_path, and likewise the MLP (stochastic depth)."""

    def __init__(self, dim, heads, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, 4 * dim)
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))               # (B, N, D) ViT eq. 2
        return x + self.drop_path(self.mlp(self.norm2(x)))             # (B, N, D) ViT eq. 3


def init_weights(model):
    """Initialise all linear layers as MAE A.1 does those of the transformer blocks, and the release
    the others, too: Xavier-uniform weights (qkv as one matrix) and zero biases. The patch embedding
    is left out, because class ViT draws it as the release does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("patch_embed"):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class ViT(nn.Module):
    """The encoder. `model(images)` encodes all patches and returns tokens (B,1+L,dim), class token
    first; `model(images, ids_keep)` encodes only the patches ids_keep (B,K): (B,1+K,dim). Extra
    tokens, if any, come last: (B,1+L+G,dim).

    Args:
        img_size, patch_size: int or (H, W), in pixels; the patches must tile the image
        in_chans, dim, depth, heads: channels, width, number of blocks, attention heads
        norm: put a LayerNorm after the last block; False in methods with their own norm or no norm
        drop_path: probability of skipping the last block's attention or MLP (stochastic depth). For
            other blocks it is smaller: it grows linearly from 0 at the first block
        extra_tokens: number G of learned tokens after the patches (also called register tokens)
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 norm=True, drop_path=0.0, extra_tokens=0):
        super().__init__()
        self.grid = grid_of(img_size, patch_size)
        self.img_size, self.patch_size = pair(img_size), pair(patch_size)
        self.in_chans, self.dim = in_chans, dim
        self.num_patches = math.prod(self.grid)
        p, q = self.patch_size

        self.cls_token = nn.Parameter(torch.empty(1, 1, dim).normal_(std=0.02))
        self.pos_embed = nn.Parameter(sincos_pos_embed(dim, self.grid), requires_grad=False)
        self.patch_embed = nn.Linear(p * q * in_chans, dim)            # its bias: PyTorch's default
        drops = torch.linspace(0, drop_path, depth, device="cpu").tolist()     # not on "meta"
        self.blocks = nn.ModuleList(Block(dim, heads, drop) for drop in drops)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity()
        self.extra_tokens = None
        if extra_tokens:
            self.extra_tokens = nn.Parameter(torch.empty(extra_tokens, dim).normal_(std=0.02))
        init_weights(self)                                 # methods with a decoder draw these again
        # drawn in the layout of a convolution's weight, as in the release
        weight = nn.init.xavier_uniform_(torch.empty(dim, in_chans * p * q))
        weight = weight.view(dim, in_chans, p, q).permute(0, 2, 3, 1)  # as patchify's pixels
        self.patch_embed.weight.data = weight.flatten(1)

    def mask(self, images, noise, mask_ratio):
        """Mask patches as masking does. Returns ids_keep (B,K), ids_mask (B,L-K) and mask (B,L).
        `noise` (B,L) is random by default. A bool `noise` is the mask itself, True = masked; then
        mask_ratio is not used. Raises ValueError unless all rows leave equally many visible."""
        B, L = images.shape[0], self.num_patches
        if noise is None:
            noise = mask_noise("random", B, self.grid, images.device)
        if noise.shape != (B, L):
            raise ValueError(f"noise has shape {tuple(noise.shape)}, but must have {(B, L)}")
        if noise.dtype == torch.bool:
            K, *others = (~noise).sum(dim=1).unique().tolist()         # one count for all images
            if others or K in (0, L):
                raise ValueError(f"images need equally many visible patches: {[K, *others]} of {L}")
        else:
            K = visible_count(L, mask_ratio)
        return masking(noise.float(), K)                               # (B, K), (B, L-K), (B, L)

    def embed(self, images, ids_keep=None):
        """Embed all patches of images (B,C,H,W), or only ids_keep (B,K), and add their positions.
        Returns (B,L,D) or (B,K,D). Raises ValueError if the images do not fit the model."""
        if images.shape[1:] != (self.in_chans, *self.img_size):
            raise ValueError(f"images are {tuple(images.shape[1:])}, but the model needs "
                             f"{(self.in_chans, *self.img_size)}")
        patches = patchify(images, self.patch_size)                    # (B, L, p*q*C)
        pos = self.pos_embed[:, 1:]                                    # (1, L, D)
        if ids_keep is not None:
            patches = gather_patches(patches, ids_keep)                # (B, K, p*q*C)
            pos = pos[0][ids_keep]                                     # (B, K, D)
        return self.patch_embed(patches) + pos                         # (B, K, D) ViT eq. 1

    def add_learned_tokens(self, tokens):
        """Put the class token before tokens (B,K,D), and extra tokens after them. Returns
        (B,1+K+G,D)."""
        B = tokens.shape[0]                                # not len(): see unpatchify
        cls = self.cls_token + self.pos_embed[:, :1]                   # (1, 1, D) ViT eq. 1
        parts = [cls.expand(B, -1, -1), tokens]
        if self.extra_tokens is not None:
            parts.append(self.extra_tokens.expand(B, -1, -1))          # (B, G, D)
        return torch.cat(parts, dim=1)                                 # (B, 1+K+G, D)

    def encode(self, tokens):
        """Add the class token and any extra tokens to patch tokens (B,K,D), then apply all blocks
        and, unless `norm` is False, the final norm. Returns (B,1+K+G,D)."""
        x = self.add_learned_tokens(tokens)                            # (B, 1+K+G, D)
        for block in self.blocks:
            x = block(x)                                               # (B, 1+K+G, D)
        return self.norm(x)                        # (B, 1+K+G, D) ViT eq. 4, for all tokens

    def feature_maps(self, tokens):
        """Return all feature maps for tokens (B,K,D): the first block's input and every block's
        output, without the final norm. They are a list of 1 + depth tensors (B,1+K+G,D)."""
        maps = [self.add_learned_tokens(tokens)]                       # [(B, 1+K+G, D)]
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return maps

    def forward(self, images, ids_keep=None):
        return self.encode(self.embed(images, ids_keep))

    # ------------------------------------------------------------------------------ reconstructions
    def paste_patches(self, images, pred, ids, ids_keep, normalized=False, leak_free=False):
        """Return images (B,C,H,W) with the patches `ids` (B,P) replaced by pred (B,P,p*q*C). If
        `normalized`, predictions are un-normalised first: by default with the mean and variance of
        each true patch, which makes the image look too good and its PSNR too high. With
        `leak_free`, they are those of all visible pixels, i.e. of the patches ids_keep (B,K)."""
        patches = patchify(images, self.patch_size).float()            # (B, L, p*q*C)
        pred = pred.float()
        if normalized:
            if leak_free:
                known = gather_patches(patches, ids_keep).flatten(1)[:, None]  # (B, 1, K*p*q*C)
            else:
                known = gather_patches(patches, ids)                   # (B, P, p*q*C) the truth
            _, mean, std = normalize_patches(known)                    # (B, P or 1, 1) each
            pred = pred * std + mean                                   # (B, P, p*q*C)
        patches = patches.scatter(1, ids[..., None].expand_as(pred), pred)  # (B, L, p*q*C)
        return unpatchify(patches, self.patch_size, self.grid)         # (B, C, H, W)

    def pixels_of(self, mask):
        """Turn a mask of patches (B,L) into a mask of pixels (B,1,H,W)."""
        p, q = self.patch_size
        return unpatchify(mask[..., None].expand(-1, -1, p * q), (p, q), self.grid)  # (B, 1, H, W)


# ------------------------------------------------------------------------------ what train.py calls
class Method(nn.Module):
    """What train.fit trains. A subclass has an `encoder` (a ViT); `forward` returns the loss and
    {name: value} for log.jsonl. draw_images is called for an epoch, draw_batch and before_step for
    a step, and model_inputs and forward for each of its --accum pieces: override what differs."""

    mean, std = IMAGENET_MEAN, IMAGENET_STD                # input: (image / 255 - mean) / std
    lr_scale = 1.0                     # factor of the learning rate, or a function of the config
    crops = 1                          # random crops of each image; 2 for pairs of views
    draws_alike = False                # whether forward draws the same in all pieces and processes
    sizes_vary = False                 # for --compile: whether shapes in forward vary between steps
    unused = ()                        # inherited arguments that do nothing: they are no flags
    small_recipe = dict(               # ours, for width 64 and at least 10,000 images: train.derive
        lr=2e-3, width_power=0.5, batch_size=64, epochs=10, warmup_epochs=1, for_images=10_000)
    small_config = {}                  # arguments of the constructor that belong to small_recipe
    reconstruct = None                 # see mae.py. None: predicts no pixels, so there is no PSNR

    def parameter_groups(self, run):
        """Return the optimizer's groups, with weight decay and without: biases and norms."""
        trained = [p for p in self.parameters() if p.requires_grad]
        return [dict(params=[p for p in trained if p.ndim > 1], weight_decay=run.weight_decay),
                dict(params=[p for p in trained if p.ndim <= 1], weight_decay=0.0)]

    def draw_images(self, order, labels, run, generator):
        """Return the indices (n,) of an epoch's images, once for each of the `crops`."""
        return [order] * self.crops

    def draw_batch(self, crops, labels, noise):
        """Return forward's arguments from this process's crops (b,C,H,W), uint8 or float, labels
        (b,), -1 if unlabelled, and noise (b,L). Random draws are equal in all processes. A 0-dim
        tensor goes whole to each piece; others have a row per image and are cut into pieces."""
        return [crops[0], noise, *crops[1:]]

    def model_inputs(self, *piece):
        """Return forward's arguments for a piece of draw_batch's: here, images are normalised."""
        return [normalize(x, self) if x.ndim == 4 else x for x in piece]

    def before_step(self, progress, optimizer):
        """Called at the beginning of each step, before draw_batch, e.g. to change weight decay in
        optimizer.param_groups. progress, in [0, 1), is the completed fraction of the run."""

    def after_step(self, progress):
        """Called after each optimizer step, e.g. to move a teacher. progress is in (0, 1]."""

    def scores(self, data, val, here, run):
        """Return scores {name: value} for log.jsonl besides the PSNRs. Runs in all processes."""
        return {}


# ---------------------------------------------------------------------- sizes, errors and colours
def pair(size):
    """Turn an int or (H, W) into a tuple (H, W). Raises InputError unless both are ints above 0."""
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    require(len(sides) == 2 and all(isinstance(n, int) and n > 0 for n in sides),
            f"{size} is not a size in pixels: use one like 32 or 32,48")
    return sides


def grid_of(img_size, patch_size, **_):
    """Return the patch grid (h, w). Each size is an int or (H, W). Other arguments are ignored, so
    that a whole config can be passed. Raises InputError unless the patches tile the image."""
    (H, W), (p, q) = pair(img_size), pair(patch_size)
    require(H % p == 0 and W % q == 0,
            f"img_size {H}x{W} must be a multiple of patch_size {p}x{q}: change one of them")
    return (H // p, W // q)


class InputError(ValueError):
    """Invalid user input, not a bug: train.py and finetune.py print the message and exit."""


def require(condition, message):
    """Raise InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def per_channel(values, device):
    """Return `values` as a tensor (C,1,1), created on the device: copying to a GPU would block."""
    return torch.stack([torch.full((1, 1), value, device=device) for value in values])


def normalize(images, model):
    """Turn images (B,C,H,W) in [0, 255] into float model input: (x / 255 - mean) / std."""
    C, shape = len(model.mean), tuple(images.shape)        # also of a NumPy array
    hint = " (use torch.as_tensor(images).movedim(-1, -3))" if shape[-1:] == (C,) else ""
    require(torch.is_tensor(images) and len(shape) == 4 and shape[1] == C, f"images must be a "
            f"tensor (B,{C},H,W), for {C} values of mean and std, not {type(images).__name__} "
            f"{shape}{hint}: see tests/docs/HOWTO.md")
    mean, std = (per_channel(x, images.device) for x in (model.mean, model.std))   # (C, 1, 1) each
    return (images / 255).sub_(mean).div_(std)             # in place: a batch takes gigabytes


def denormalize(images, model):
    """Turn model input or output (B,C,H,W) into float images in [0, 1]: x * std + mean, clamped."""
    mean, std = (per_channel(x, images.device) for x in (model.mean, model.std))   # (C, 1, 1) each
    return (images.float() * std + mean).clamp(0, 1)


# ------------------------------------------------------------------ parameter names in checkpoints
ENCODER_NAMES = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.", "extra_tokens")


def from_released(state):
    """Convert a released state dict from MAE, CrossMAE or timm (vit_*) to our names. Encoder
    parameters get the prefix `encoder.`, and the patch embedding, a convolution `patch_embed.proj`,
    becomes a linear layer. Decoders and heads keep their names. A prefix of all names, e.g. that of
    DistributedDataParallel or Lightning, is removed."""
    ours = {}
    anchor = next((name for name in state if name.endswith("patch_embed.proj.weight")), "")
    for name, value in state.items():                      # e.g. module., _orig_mod., backbone.
        name = name.removeprefix(anchor.removesuffix("patch_embed.proj.weight"))
        if name.endswith("patch_embed.proj.weight"):
            value = value.permute(0, 2, 3, 1).flatten(1)
        name = name.replace("patch_embed.proj.", "patch_embed.")
        ours["encoder." + name if name.startswith(ENCODER_NAMES) else name] = value
    return ours


def resize_pos_embed(pos_embed, grid, new_grid):
    """Resize positions (1,1+L,D) to another grid (ViT Sec. 3.2), bicubically as in the release."""
    table = pos_embed[:, 1:].reshape(1, *grid, -1).permute(0, 3, 1, 2)  # (1, D, h, w)
    table = F.interpolate(table, size=tuple(new_grid), mode="bicubic", align_corners=False)
    return torch.cat([pos_embed[:, :1], table.flatten(2).transpose(1, 2)], dim=1)  # (1, 1+L', D)


def sizes_of(state, path, heads=None):
    """Infer the encoder's constructor arguments from the shapes in a state dict with our names, for
    RGB images and square patches in a square grid. The number of heads is `heads` or the one in
    SIZES for this width and depth. Raises InputError if this fails."""
    for name in ("encoder.patch_embed.weight", "encoder.pos_embed"):
        require(name in state, f"{path} is no ViT with released names ({name} is missing); it has "
                f"{next(iter(state), 'nothing')}, ...: see tests/docs/REFERENCE.md")
    dim, inputs = state["encoder.patch_embed.weight"].shape
    depth = len({name.split(".")[2] for name in state if name.startswith("encoder.blocks.")})
    positions = state["encoder.pos_embed"].shape[1]
    side, patch_size = math.isqrt(positions - 1), math.isqrt(inputs // 3)
    require(side ** 2 + 1 == positions, f"{path} has {positions} positions, which are not those of "
                                        f"a class token and of a square grid")
    require(3 * patch_size ** 2 == inputs,
            f"{path} has patches of {inputs} values, which are not square RGB patches")
    known = {(size["dim"], size["depth"]): size["heads"] for size in SIZES.values()}
    heads = heads or known.get((dim, depth))
    require(heads, f"cannot tell the number of heads from {path}: pass --heads")
    return dict(img_size=(side * patch_size,) * 2, patch_size=(patch_size,) * 2, in_chans=3,
                dim=dim, depth=depth, heads=heads)


def transfer(model, state, grid):
    """Initialise `model` from a state dict with our names: its encoder and, if all their names and
    shapes match, its decoder or head, and its teacher. Positions are interpolated unless the state
    dict's `grid` (h, w) is the model's. Returns the names not set in the model, and those not used
    from `state`. Raises InputError if any is the encoder's, except norm and extra tokens."""
    own, state = model.state_dict(), dict(state)
    if grid != model.encoder.grid:
        for name in own.keys() & state.keys():
            if name.endswith("pos_embed"):
                state[name] = resize_pos_embed(state[name], grid, model.encoder.grid)
        print("positions resized from {}x{} to {}x{} patches".format(*grid, *model.encoder.grid))

    ours, theirs = ({name: tuple(x.shape) for name, x in each.items()} for each in (own, state))
    fitting = {name for name in own.keys() & state.keys() if ours[name] == theirs[name]}
    parts = {"encoder": set(), "teacher": set(), "rest": set()}
    for name in own.keys() | state.keys():
        part = name.split(".")[0]
        parts[part if part in parts else "rest"].add(name)
    wrong = [f"{name}: the file has {theirs.get(name, 'nothing')}, the model "
             f"{ours.get(name, 'nothing')}" for name in sorted(parts["encoder"] - fitting)
             if not name.startswith(("encoder.norm.", "encoder.extra_tokens"))]
    require(not wrong, "; ".join(wrong[:3]))

    loaded = fitting & parts["encoder"]
    for part in (parts["teacher"], parts["rest"]):         # all of it or nothing
        loaded |= part if part <= fitting else set()
    model.load_state_dict({name: state[name] for name in loaded}, strict=False)
    return sorted(own.keys() - loaded), sorted(state.keys() - loaded)
