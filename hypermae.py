"""HyperMAE: a ViT predicts one layer of a small MLP, which maps patch coordinates to pixels.

Belagali, Zhou, Li, Samaras: HyperMAE: Modulating Implicit Neural Representations for MAE Training.
Release: https://github.com/cvlab-stonybrook/HyperMAE

Learnt weight tokens go through a few ViT blocks (Feat2W) with the encoded visible patches, and
become one matrix M. M is a layer of an MLP (PaCo-MLP) that maps the coordinates of a patch to its
pixels: an implicit neural representation of the image, of which all other layers are shared by all
images. There are no mask tokens: a hidden patch costs one pass through a small MLP.

    B images, L patches, K visible, D encoder width, n weight tokens, h width of the PaCo-MLP
    N patches that are predicted, p patch side, T (h,n) the learnt transformation matrix
    images (B,C,H,W) -> visible patches (B,K,D) -> encoder (B,1+K,D), with weight tokens (B,1+K+n,D)
    -> Feat2W -> M (B,h,h); coordinates (B,N,2) and M -> PaCo-MLP -> pixels (B,N,p*p*C)

Where paper and release differ, and what is done here:
  1. Sec. 2.2 has ReLU after the hidden layers; Algorithm 1 shows none; the release has none before
     and after M, so that three linear layers follow one another there. As released by default;
     `relu_around_m` does as the text says.
  2. Sec. 2.1 takes MAE's encoder, which has a final norm. The release builds it and never calls it:
     Feat2W gets the last block's output. Here there is none, nor one after Feat2W (as released).
     Weight tokens and T start with a deviation of 0.02, as released.
  3. The release adds 0.5 to the pixels, on top of the last layer's bias (`out_bias`). As released.
  4. The release predicts all patches, Algorithm 1 only the hidden ones. The release projects all
     tokens of Feat2W, Algorithm 1 the weight tokens. Both as in the paper. Sec. 2.2 appends weight
     tokens after the encoded patches, Algorithm 1 before, which gives the same, as they have no
     positions: here they are the last.
  5. "PositionalEmbedding" to h in Algorithm 1 is the release's Fourier features of the patch's
     centre, 2*pe_dim of them whatever h is (by default both are 256).
  6. Table 3 does not normalise targets, Table 1 shows that it is better to: on by default.
  7. The release stores M on the module between calls, and un-normalises by a standard deviation
     plus 1e-6. Here M is an argument, and un-normalising is the exact inverse.
  8. Sec. 2.2 allows M to be any of the l layers, h x h. The last one gives pixels, so it cannot;
     the first (Table 7's 0) has 2*pe_dim inputs, so there M is 2*pe_dim x h.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vit import IMAGENET_MEAN, IMAGENET_STD, Block, InputError, ViT, init_weights, visible_count


def grid_coords(size, device=None):
    """Centres (H*W,2) of H x W cells, row and column, each in -1 ... 1. (minr.py has it too.)"""
    H, W = size
    row = (2 * torch.arange(H, device=device) + 1) / H - 1             # (H,)
    col = (2 * torch.arange(W, device=device) + 1) / W - 1             # (W,)
    return torch.stack([row.repeat_interleave(W), col.repeat(H)], dim=1)  # (H*W, 2)


def fourier_features(coords, dim, sigma):
    """Coordinates (...,2) -> (...,2 dim): cosines, then sines, of pi f x, with x the row and then
    the column, and dim/2 frequencies f, geometrically spaced from 1 to sigma. Always in float32:
    phases up to pi sigma are too large for half precision. (minr.py has it too.)"""
    frequencies = torch.linspace(0, math.log(sigma), dim // 2, device=coords.device).exp()
    phase = (coords.float()[..., None] * frequencies).flatten(-2) * math.pi  # (..., dim)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)               # (..., 2 dim)


class HyperMAE(nn.Module):
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches, `encoder` gives
    features. Defaults: the paper's (Table 3, Sec. 5.3), ViT-B/16, with normalised targets.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        mask_ratio: share of the patches that is hidden (Table 10)
        norm_pix_loss: predict patches normalised by their own mean and variance (Table 1)
        n_weight_tokens: number of weight tokens (Table 4)
        feat2w_depth: number of Feat2W blocks, shared ones included (Table 5)
        shared_blocks: how many of the encoder's last blocks are Feat2W's first, too (Table 6)
        mlp_depth: number of PaCo-MLP layers, M included (Table 8)
        hidden_dim: width of the PaCo-MLP (Table 9)
        modulated_layer: the layer that M is, counted from 0, at most mlp_depth - 2 (Table 7)
        pe_dim: number of cosines, and of sines, among the Fourier features (release)
        pe_sigma: highest frequency of the Fourier features, in periods per image (release)
        out_bias: constant that is added to the predicted pixels (release)
        relu_around_m: ReLU before and after M, as in the text (Sec. 2.2)
        loss_on: patches that the loss covers, masked or all (Table 11)
    """

    recipe = dict(  # Table 12; batch 512 on ImageNet-100 (Sec. 5.4); flip, crop's scale: release
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=400, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, for images up to 64 pixels and for the micro encoder: a grid of 8 x 8
        # patches needs no high frequencies; plain targets, so that predictions can be viewed
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1,
        norm_pix_loss=False, feat2w_depth=2, hidden_dim=128, pe_dim=32, pe_sigma=8.0)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    lr_scale = 1.0

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, norm_pix_loss=True, n_weight_tokens=16, feat2w_depth=4,
                 shared_blocks=0, mlp_depth=6, hidden_dim=256, modulated_layer=1, pe_dim=128,
                 pe_sigma=1024.0, out_bias=0.5, relu_around_m=False, loss_on="masked"):
        super().__init__()
        if not 0 <= modulated_layer <= mlp_depth - 2:
            raise InputError(f"modulated_layer {modulated_layer} is not between 0 and mlp_depth "
                             f"{mlp_depth} - 2: the last layer gives pixels")
        if not 0 <= shared_blocks <= min(feat2w_depth, depth) or feat2w_depth < 1:
            raise InputError(f"shared_blocks {shared_blocks} is not between 0 and feat2w_depth "
                             f"{feat2w_depth} (at least 1) and the encoder's {depth} blocks")
        if pe_dim < 2 or pe_dim % 2:
            raise InputError(f"pe_dim {pe_dim} is not even and at least 2")
        for name, value in dict(pe_sigma=pe_sigma, n_weight_tokens=n_weight_tokens,
                                hidden_dim=hidden_dim).items():
            if not value >= 1:
                raise InputError(f"{name} {value} is less than 1")
        if loss_on not in ("masked", "all"):
            raise InputError(f"loss_on {loss_on} is not masked or all")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=False)
        self.mask_ratio, self.norm_pix_loss, self.loss_on = mask_ratio, norm_pix_loss, loss_on
        self.modulated_layer, self.relu_around_m = modulated_layer, relu_around_m
        self.shared_blocks, self.out_bias = shared_blocks, out_bias
        self.pe_dim, self.pe_sigma = pe_dim, pe_sigma
        visible_count(self.encoder.num_patches, mask_ratio)            # InputError, unless it fits
        p, q = self.encoder.patch_size

        self.weight_tokens = nn.Parameter(torch.empty(n_weight_tokens, dim).normal_(std=0.02))
        self.feat2w_blocks = nn.ModuleList(
            Block(dim, heads) for _ in range(feat2w_depth - shared_blocks))
        self.proj = nn.Linear(dim, hidden_dim)                         # Proj
        widths = [2 * pe_dim, *[hidden_dim] * (mlp_depth - 1), p * q * in_chans]
        shapes = list(zip(widths, widths[1:]))             # (inputs, outputs) of each layer
        rows, _ = shapes.pop(modulated_layer)              # M's: (h, h), or (2 pe_dim, h)
        self.T = nn.Parameter(torch.empty(rows, n_weight_tokens).normal_(std=0.02))    # (h, n)
        self.paco_mlp = nn.ModuleList(nn.Linear(a, b) for a, b in shapes)  # all layers but M
        self.apply(init_weights)

    def encode(self, images, ids_keep):
        """Encoder and Feat2W: the visible patches ids_keep (B,K) of images -> the layer M (B,h,h)
        of the PaCo-MLP; (B,2*pe_dim,h) if modulated_layer is 0."""
        n = len(self.weight_tokens)
        unshared = len(self.encoder.blocks) - self.shared_blocks       # see no weight tokens
        x = self.encoder.embed(images, ids_keep)                       # (B, K, D) F^0 = x_vis
        x = self.encoder.add_learned_tokens(x)                            # (B, 1+K, D)
        for block in self.encoder.blocks[:unshared]:
            x = block(x)                                   # (B, 1+K, D) F^12, if none is shared
        W = self.weight_tokens.expand(len(x), -1, -1)                  # (B, n, D) W^0, Sec. 2.2
        x = torch.cat([x, W], dim=1)                                   # (B, 1+K+n, D)
        for block in [*self.encoder.blocks[unshared:], *self.feat2w_blocks]:  # shared: Table 6
            x = block(x)                                               # (B, 1+K+n, D) Feat2W
        W = x[:, -n:]                                                  # (B, n, D) W^4
        return self.T @ self.proj(W)                                   # (B, h, h) M = T Proj(W^4)

    def decode(self, coords, M):
        """The PaCo-MLP (Sec. 2.2, Algorithm 1): coordinates (B,N,2), or (N,2) for all images, and M
        (B,h,h), without a bias -> pixels (B,N,p*p*C), out_bias added (item 3). ReLU between layers,
        except right before and after M, unless relu_around_m (item 1)."""
        mod = self.modulated_layer
        z = fourier_features(coords, self.pe_dim, self.pe_sigma)       # PositionalEmbedding(pco, h)
        z = z.to(M.dtype)                                              # (B, N, 2 pe_dim)
        for i in range(mod):                                           # layers before modulation
            z = self.paco_mlp[i](z)                                    # (B, N, h)
            if i < mod - 1 or self.relu_around_m:                      # release: none next to M
                z = F.relu(z)
        z = z @ M                                                      # (B, N, h) matmul(z, M)
        if self.relu_around_m:
            z = F.relu(z)
        for i in range(mod, len(self.paco_mlp)):                       # layers after modulation
            if i > mod:
                z = F.relu(z)
            z = self.paco_mlp[i](z)                        # (B, N, h); the last: (B, N, p*p*C)
        return z + self.out_bias                                       # (B, N, p*p*C)

    def forward(self, images, noise=None):
        """Images (B,C,H,W), normalised, and noise (B,L; None: random) -> the loss, the mean squared
        error of the predicted patches (Algorithm 1), a float32 scalar, and {"loss": the same,
        detached}."""
        ids_keep, ids, _ = self.encoder.mask(images, noise, self.mask_ratio)  # of x_vis, x_masked
        M = self.encode(images, ids_keep)                              # (B, h, h)
        if self.loss_on == "all":                                      # Table 11
            ids = torch.cat([ids_keep, ids], dim=1)                    # (B, L)
        coords = grid_coords(self.encoder.grid, images.device)[ids]    # (B, N, 2) pco
        pred = self.decode(coords, M)                                  # (B, N, p*p*C) z
        target = self.encoder.targets(images, ids, self.norm_pix_loss)  # (B, N, p*p*C) x_masked
        loss = (pred.float() - target).square().mean()                 # MSELoss(z, x_masked)
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised -> the same as decoded, and the mask (B,L), 1 = hidden.
        Nothing is copied: visible patches are predicted too, although only loss_on "all" has them.
        mask_ratio: None for the model's own. leak_free: see ViT.paste_patches. ValueError if noise
        is a 0/1 mask of another mask_ratio."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        coords = grid_coords(self.encoder.grid, images.device)[ids]    # (B, L, 2)
        pred = self.decode(coords, self.encode(images, ids_keep))      # (B, L, p*p*C)
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W)
        return decoded, mask
