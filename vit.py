"""A small Vision Transformer, and what three or more of the methods share: patches, positions, masking, released names.

ViT: Dosovitskiy et al., An Image is Worth 16x16 Words (ICLR 2021), pre-norm, with the fixed sin-cos positions, the initialisation
and the masking by noise of He et al., Masked Autoencoders Are Scalable Vision Learners (CVPR 2022). Nothing here knows a method.

    B images, C channels, L = h*w patches in raster order, K visible, D width, p patch side
    images (B,C,H,W)   patches (B,L,p*p*C)   tokens (B,1+K,D)   noise (B,L)   mask (B,L), 1 = hidden
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SIZES = {  # width, depth, heads: micro is ours, made for a CPU; tiny and small are DeiT's (Table 1); the rest ViT's (Table 1)
    "micro": dict(dim=64, depth=4, heads=2),
    "tiny": dict(dim=192, depth=12, heads=3),
    "small": dict(dim=384, depth=12, heads=6),
    "base": dict(dim=768, depth=12, heads=12),
    "large": dict(dim=1024, depth=24, heads=16),
    "huge": dict(dim=1280, depth=32, heads=16),
}


# ---------------------------------------------------------------------------------------------------------------- patches

def pair(size):
    """An int or an (H, W) pair as an (H, W) tuple."""
    return (size, size) if isinstance(size, int) else tuple(size)


def patchify(images, patch_size):
    """Cut images (B,C,H,W) into patches (B,L,p*p*C): raster order; within one, row, column, channel (the fastest)."""
    B, C, H, W = images.shape
    p, q = pair(patch_size)
    if H % p or W % q:
        raise ValueError(f"images of {H}x{W} pixels are not a multiple of patch_size {p}x{q}")
    x = images.reshape(B, C, H // p, p, W // q, q)                         # (B, C, h, p, w, q)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, p * q * C)           # (B, h*w, p*q*C)


def unpatchify(patches, patch_size, grid):
    """The inverse of patchify: patches (B,L,p*p*C) on a grid (h, w) become images (B,C,h*p,w*p)."""
    (h, w), (p, q) = grid, pair(patch_size)
    if patches.shape[1] != h * w or patches.shape[2] % (p * q):
        raise ValueError(f"patches of shape {tuple(patches.shape)} do not fit a grid of {h}x{w} and patch_size {p}x{q}")
    x = patches.reshape(-1, h, w, p, q, patches.shape[2] // (p * q))       # (B, h, w, p, q, C)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, h * p, w * q)   # (B, C, H, W)


def take(x, ids):
    """Rows `ids` (B,K) of x (B,L,D), image by image: (B,K,D)."""
    return x.gather(1, ids[..., None].expand(-1, -1, x.shape[2]))


def normalize_patches(patches):
    """Each patch (..., p*p*C) with zero mean and unit variance, and its mean and standard deviation (..., 1). MAE, Sec. 4.1.

    The variance is the unbiased one and gets 1e-6 for flat patches, as released: patches == normalized * std + mean."""
    var, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    std = (var + 1e-6).sqrt()
    return (patches - mean) / std, mean, std


# -------------------------------------------------------------------------------------------------------------- positions

def sincos_pos_embed(dim, grid):
    """Fixed sin-cos positions (1,1+L,dim) of a grid (h, w); row 0, the class token's, is zero. ValueError unless dim % 4 == 0.

    The first half of the channels encodes the column, the second half the row, each as [sin | cos] at dim/4 frequencies."""
    if dim % 4:
        raise ValueError(f"sin-cos positions need a width that is a multiple of 4, not {dim}")
    row, col = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")         # (h, w) each
    frequency = 10000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))                      # (dim/4,)
    col, row = (x.reshape(-1, 1) * frequency for x in (col, row))                                           # (L, dim/4)
    table = torch.cat([col.sin(), col.cos(), row.sin(), row.cos()], dim=1)                                  # (L, dim)
    return F.pad(table, (0, 0, 1, 0))[None].float()                                                         # (1, 1+L, dim)


def resize_pos_embed(pos_embed, grid, new_grid):
    """Positions (1,1+L,D) of one grid (h, w) interpolated (bicubic, as MAE's fine-tuning) to another; row 0 is kept."""
    cls, table = pos_embed[:, :1], pos_embed[:, 1:]
    table = table.reshape(1, *grid, -1).permute(0, 3, 1, 2)                                                 # (1, D, h, w)
    table = F.interpolate(table, size=tuple(new_grid), mode="bicubic", align_corners=False)
    return torch.cat([cls, table.flatten(2).transpose(1, 2)], dim=1)                                        # (1, 1+L', D)


# ---------------------------------------------------------------------------------------------------------------- masking

def visible_count(L, mask_ratio):
    """K, the number of visible patches of L: truncated, as released (L 225 at 0.8 keeps 44). ValueError where K is 0 or L."""
    K = int(L * (1 - mask_ratio))
    if not (0 < mask_ratio < 1 and 0 < K < L):
        raise ValueError(f"mask_ratio {mask_ratio} leaves {K} of {L} patches visible: it lies between 0 and 1, "
                         "and at least one patch must be visible and one hidden")
    return K


def mask_noise(kind, B, grid, device=None, generator=None):
    """Noise (B,L) that masking() ranks: the lowest are visible.

    "random": uniform. "grid": one of every four patches, at even rows and columns, ranks first (MAE Figure 6, CrossMAE
    Table 15). "block": rectangles of 10-40% of the image are hidden one after another (after BEiT), so that whole regions are."""
    h, w = grid
    noise = torch.rand(B, h, w, device=device, generator=generator)
    row, col = (torch.arange(n, device=device) for n in grid)
    if kind == "grid":
        noise = noise + ((row % 2)[:, None] | (col % 2)[None])                                              # (B, h, w)
    elif kind == "block":
        n = 16
        area, log_ratio, y, x = torch.rand(4, B, n, 1, device=device, generator=generator)                  # (B, n, 1) each
        side = (0.1 + 0.3 * area).sqrt()
        ratio = ((2 * log_ratio - 1) * math.log(3.3) / 2).exp()                                             # BEiT: 0.3 to 3.3
        rows = ((row + 0.5) / h - y).abs() < side * ratio / 2                                               # (B, n, h)
        cols = ((col + 0.5) / w - x).abs() < side / ratio / 2                                               # (B, n, w)
        order = torch.arange(n, 0, -1, device=device).view(n, 1, 1)
        noise = noise + (rows[..., None] & cols[:, :, None]).mul(order).amax(1)                             # (B, h, w)
    elif kind != "random":
        raise ValueError(f"mask {kind!r} is not one of random, grid, block")
    return noise.flatten(1)                                                                                 # (B, L)


def masking(noise, mask_ratio):
    """Rank noise (B,L): the K lowest are visible -> ids_keep (B,K), ids_mask (B,L-K), both in noise order, mask (B,L), 1 = hidden."""
    K = visible_count(noise.shape[1], mask_ratio)
    ids_keep, ids_mask = noise.argsort(dim=1, stable=True).tensor_split([K], dim=1)
    return ids_keep, ids_mask, torch.ones_like(noise).scatter(1, ids_keep, 0)


def check_mask(noise, mask_ratio):
    """ValueError if noise (B,L) is a caller's own mask (0 visible, 1 hidden) whose zeros are not the K that mask_ratio leaves."""
    zeros, K = (noise == 0).sum(1), visible_count(noise.shape[1], mask_ratio)
    if ((noise == 0) | (noise == 1)).all() and (zeros != K).any():
        raise ValueError(f"the mask shows {zeros[zeros != K][0]} patches, but mask_ratio {mask_ratio} "
                         f"shows {K} of {noise.shape[1]}")


# ----------------------------------------------------------------------------------------------------------- the transformer

class Attention(nn.Module):
    """Multi-head self-attention, (B,N,dim) -> (B,N,dim)."""

    def __init__(self, dim, heads):
        super().__init__()
        if dim % heads:
            raise ValueError(f"width {dim} is not a multiple of {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, D = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                               # (B, heads, N, D/heads) each
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, D))               # (B, N, D)


class MLP(nn.Module):
    """Two linear layers around an exact GELU, on the last axis."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block; `drop_path` drops each branch of an image with that probability while training."""

    def __init__(self, dim, heads, mlp_ratio=4.0, drop_path=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, int(mlp_ratio * dim))
        self.drop_path = StochasticDepth(drop_path, mode="row")

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def init_weights(module):
    """MAE's initialisation, for `module.apply`: Linear xavier-uniform (qkv as one matrix) and bias 0; LayerNorm's is torch's."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


class ViT(nn.Module):
    """The encoder. `model(images)` gives tokens (B,1+L,dim), the class token first; deterministic, no masking unless asked.

    Args:
        img_size, patch_size: int or (H, W), in pixels; ValueError unless the one is a multiple of the other
        in_chans, dim, depth, heads, mlp_ratio: channels, width, blocks, attention heads, hidden width of the MLP over dim
        norm: a LayerNorm after the last block; False where nothing after the encoder needs it
        drop_path: stochastic depth of the last block, growing linearly from 0 at the first (fine-tuning)
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mlp_ratio=4.0, norm=True, drop_path=0.0):
        super().__init__()
        self.img_size, self.patch_size, self.in_chans, self.dim = pair(img_size), pair(patch_size), in_chans, dim
        (H, W), (p, q) = self.img_size, self.patch_size
        if min(H, W, p, q, in_chans, dim, heads) < 1 or depth < 0:
            raise ValueError(f"img_size {img_size}, patch_size {patch_size}, in_chans {in_chans}, dim {dim}, depth {depth} "
                             f"and heads {heads} must be positive")
        if H % p or W % q:
            raise ValueError(f"img_size {img_size} is not a multiple of patch_size {patch_size}")
        self.grid = (H // p, W // q)
        self.num_patches = self.grid[0] * self.grid[1]

        self.cls_token = nn.Parameter(torch.empty(1, 1, dim).normal_(std=0.02))
        self.pos_embed = nn.Parameter(sincos_pos_embed(dim, self.grid), requires_grad=False)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(in_chans, dim, (p, q), (p, q))})
        drops = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_ratio, drop) for drop in drops)
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm else nn.Identity()
        self.apply(init_weights)
        nn.init.xavier_uniform_(self.patch_embed["proj"].weight.view(dim, -1))   # as a (D, C*p*q) matrix; its bias is torch's

    def mask(self, images, noise, mask_ratio):
        """masking() of a noise (B,L); None draws a random one. ValueError unless its shape is the images' (B,L)."""
        B, L = len(images), self.num_patches
        if noise is None:
            noise = mask_noise("random", B, self.grid, images.device)
        if noise.shape != (B, L):
            raise ValueError(f"noise of shape {tuple(noise.shape)} for {B} images of {L} patches")
        return masking(noise, mask_ratio)

    def embed(self, images, ids_keep=None):
        """Patches and positions (B,L,D), or (B,K,D) of the patches ids_keep (B,K): a hidden patch is never embedded."""
        if images.shape[1:] != (self.in_chans, *self.img_size):
            raise ValueError(f"images of shape {tuple(images.shape)} for a model of {self.in_chans}x{self.img_size[0]}x"
                             f"{self.img_size[1]} images")
        patches, pos = patchify(images, self.patch_size), self.pos_embed[:, 1:]
        if ids_keep is not None:
            patches, pos = take(patches, ids_keep), pos[0][ids_keep]       # (B, K, p*q*C), (B, K, D)
        proj = self.patch_embed["proj"]                                    # a convolution by name, a matrix product at work
        return F.linear(patches, proj.weight.permute(0, 2, 3, 1).reshape(self.dim, -1), proj.bias) + pos

    def layers(self, tokens):
        """Prepend [CLS] to tokens (B,K,D); the blocks' input and every block's raw output: depth + 1 of (B,1+K,D)."""
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(len(tokens), -1, -1)
        maps = [torch.cat([cls, tokens], dim=1)]                           # (B, 1+K, D)
        for block in self.blocks:
            maps.append(block(maps[-1]))
        return maps

    def encode(self, tokens):
        """Tokens (B,K,D) through all blocks and the final norm where there is one: (B,1+K,D)."""
        return self.norm(self.layers(tokens)[-1])

    def forward(self, images, ids_keep=None):
        return self.encode(self.embed(images, ids_keep))


# ---------------------------------------------------------------------------------------------------------- released names

ENCODER_NAMES = ("cls_token", "pos_embed", "patch_embed.", "blocks.", "norm.")
DECODER_NAMES = ("mask_token", "decoder_", "wfm.", "dec_norms.", "fc_norm.", "head.")     # what else released files hold


def from_released(state):
    """A released state dict (MAE's, CrossMAE's, timm's vit_*; with or without its outer "model") in this project's names:
    the encoder's get the prefix `encoder.`, the decoder's and the head's are the same."""
    state = state.get("model", state)
    return {("encoder." if name.startswith(ENCODER_NAMES) else "") + name: value for name, value in state.items()}


def to_released(model):
    """The state dict of a model with an `encoder`, in the released names: the inverse of from_released."""
    return {name.removeprefix("encoder."): value for name, value in model.state_dict().items()}
