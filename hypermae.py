"""HyperMAE: a ViT predicts one layer of a small MLP that maps a patch's coordinates to its pixels.

The MLP is called PaCo-MLP (patch-coordinate MLP). One of its layers, the matrix M, is different for
each image; all images share the other layers. ViT blocks called Feat2W read the encoded visible
patches and a few learned weight tokens, and turn the weight tokens into M. HyperMAE has no mask
tokens: a masked patch costs one pass through the MLP. The loss is the mean squared error over the
pixels of the masked patches. By default, these pixels are normalised.

Belagali, Zhou, Li, Samaras: HyperMAE: Modulating Implicit Neural Representations for MAE Training
(SSL workshop at NeurIPS 2023). Release: https://github.com/cvlab-stonybrook/HyperMAE

    B images, L patches, K visible, L-K masked, P predicted, p patch side, D encoder width, h width
    of the PaCo-MLP, n weight tokens. T (h,n), a learned matrix, mixes them into the rows of M
    noise (B,L): the K patches with the lowest noise stay visible
    images (B,C,H,W) -> visible tokens (B,K,D) -> encoder (B,1+K,D), with weight tokens (B,1+K+n,D)
    -> Feat2W -> M (B,h,h); coordinates (B,P,2) and M -> PaCo-MLP -> pixels (B,P,p*p*C)
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from vit import (Block, Method, ViT, gather_patches, init_weights, normalize_patches, patchify,
                 require)


def grid_coords(size, device=None):
    """Return the centres (H*W,2) of H x W cells, (row, column) in [-1, 1] (same in minr.py)."""
    H, W = size
    row = (2 * torch.arange(H, device=device) + 1) / H - 1             # (H,)
    col = (2 * torch.arange(W, device=device) + 1) / W - 1             # (W,)
    return torch.stack([row.repeat_interleave(W), col.repeat(H)], dim=1)  # (H*W, 2)


def fourier_features(coords, dim, sigma):
    """Turn coordinates (...,2) into features (...,2 dim): cosines, then sines, of pi f c. Each
    coordinate c (row, then column) is multiplied by dim/2 frequencies f. These form a geometric
    sequence from 1 to sigma periods per image, e.g. 1 and 8 for dim 4 and sigma 8. On raw
    coordinates, an MLP learns fine detail only slowly. Features are float32: half precision is too
    coarse for phases up to pi sigma. (Same in minr.py.)"""
    frequencies = torch.linspace(0, math.log(sigma), dim // 2, device=coords.device).exp()
    phase = (coords.float()[..., None] * frequencies).flatten(-2) * math.pi  # (..., dim)
    return torch.cat([phase.cos(), phase.sin()], dim=-1)               # (..., 2 dim)


class HyperMAE(Method):
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches; `encoder` returns
    features. Defaults follow the paper (Table 3, Sec. 5.3), but targets are normalised (item 6).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        mask_ratio: fraction of patches to mask (Table 10)
        norm_pix_loss: predict patches normalised by their own mean and variance (Table 1)
        n_weight_tokens: number of weight tokens (n in Table 4)
        feat2w_depth: number of Feat2W blocks, including shared ones (f in Table 5)
        shared_blocks: number of the encoder's last blocks that also read the weight tokens. They
            are also Feat2W's first blocks, and run only once (s in Table 6)
        mlp_depth: number of PaCo-MLP layers, including M (l in Table 8)
        hidden_dim: width of the PaCo-MLP (h in Table 9)
        modulated_layer: index of the layer that M replaces, 0 to mlp_depth - 2 (mod in Table 7)
        pe_dim: number of cosines in the positional embedding, and also of sines (release)
        pe_sigma: highest frequency in the positional embedding, in periods per image (release)
        out_bias: constant added to the predicted pixels (release)
        relu_around_m: put a ReLU before and after M, as in Sec. 2.2
        loss_on: patches in the loss: masked or all (Table 11)
    """

    recipe = dict(  # Table 12, with the release's crop and flip; ImageNet-100: batch 512 (Sec. 5.4)
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=400, warmup_epochs=40, crop=0.2, flip=True)
    # ours, for encoders narrower than base, with vit.Method.small_recipe. CIFAR-10, micro, 3 seeds:
    # masked pixels 17.61 dB, 20-NN 46.0%
    small_config = dict(  # lower frequencies, as a grid of 8 x 8 patches is coarser (item 5)
        norm_pix_loss=False, feat2w_depth=2, hidden_dim=128, pe_dim=32, pe_sigma=8.0)

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, norm_pix_loss=True, n_weight_tokens=16, feat2w_depth=4,
                 shared_blocks=0, mlp_depth=6, hidden_dim=256, modulated_layer=1, pe_dim=128,
                 pe_sigma=1024.0, out_bias=0.5, relu_around_m=False, loss_on="masked"):
        super().__init__()
        require(0 <= modulated_layer <= mlp_depth - 2,                 # item 8
                f"modulated_layer {modulated_layer} must be between 0 and mlp_depth - 2 = "
                f"{mlp_depth - 2}: the last layer outputs pixels")
        require(0 <= shared_blocks <= min(feat2w_depth, depth) and feat2w_depth >= 1,
                f"feat2w_depth {feat2w_depth} must be at least 1 and shared_blocks {shared_blocks} "
                f"between 0 and {min(feat2w_depth, depth)}, the smaller of feat2w_depth and depth")
        require(pe_dim >= 2 and pe_dim % 2 == 0, f"pe_dim {pe_dim} must be even and at least 2")
        require(n_weight_tokens >= 1, f"n_weight_tokens {n_weight_tokens} must be at least 1")
        require(loss_on in ("masked", "all"), f"loss_on {loss_on} must be masked or all")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=False)  # item 2
        self.mask_ratio, self.norm_pix_loss, self.loss_on = mask_ratio, norm_pix_loss, loss_on
        self.modulated_layer, self.relu_around_m = modulated_layer, relu_around_m
        self.shared_blocks, self.out_bias = shared_blocks, out_bias
        self.pe_dim, self.pe_sigma = pe_dim, pe_sigma
        p, q = self.encoder.patch_size

        self.weight_tokens = nn.Parameter(                             # item 2
            torch.empty(n_weight_tokens, dim).normal_(std=0.02))
        self.feat2w_blocks = nn.ModuleList(
            Block(dim, heads) for _ in range(feat2w_depth - shared_blocks))
        self.proj = nn.Linear(dim, hidden_dim)                         # Sec. 2.2
        widths = [2 * pe_dim, *[hidden_dim] * (mlp_depth - 1), p * q * in_chans]
        shapes = list(zip(widths, widths[1:]))             # inputs and outputs of each layer
        rows, _ = shapes.pop(modulated_layer)              # M, not a layer: a row for each input
        self.T = nn.Parameter(                             # (h, n) or, for layer 0, (2 pe_dim, n)
            torch.empty(rows, n_weight_tokens).normal_(std=0.02))      # mixes n tokens into rows
        self.paco_mlp = nn.ModuleList(nn.Linear(a, b) for a, b in shapes)  # all layers except M
        init_weights(self)

    def encode(self, images, ids_keep):
        """Encode the visible patches ids_keep (B,K) of images, and turn them into layer M of the
        PaCo-MLP (Sec. 2.2). Returns (B,h,h) or, if modulated_layer is 0, (B,2*pe_dim,h). M is all
        that decode gets from the image. The paper counts Feat2W as part of the decoder."""
        n = len(self.weight_tokens)
        unshared = len(self.encoder.blocks) - self.shared_blocks       # blocks only in the encoder
        x = self.encoder.embed(images, ids_keep)                       # (B, K, D) paper: F^0
        x = self.encoder.add_learned_tokens(x)                         # (B, 1+K, D)
        for block in self.encoder.blocks[:unshared]:
            x = block(x)                       # (B, 1+K, D) paper: F^12, if none is shared
        w = self.weight_tokens.expand(x.shape[0], -1, -1)              # (B, n, D) W^0
        x = torch.cat([x, w], dim=1)                                   # (B, 1+K+n, D) order: item 4
        for block in [*self.encoder.blocks[unshared:], *self.feat2w_blocks]:  # shared: Table 6
            x = block(x)                                               # (B, 1+K+n, D) Feat2W
        w = x[:, -n:]                                      # (B, n, D) paper: W^4, after 4 blocks
        return self.T @ self.proj(w)       # (B, h, h) or (B, 2 pe_dim, h); M = T Proj(W^4)

    def decode(self, coords, M):
        """Map coordinates to pixels with the PaCo-MLP (Sec. 2.2, Algorithm 1). coords are (B,P,2),
        or (P,2) if all images share them. M (B,h,h) is a layer without a bias. Returns (B,P,p*p*C).
        A ReLU follows each layer except the last one and, by default, except M and the layer before
        it (item 1)."""
        z = fourier_features(coords, self.pe_dim, self.pe_sigma)       # (B, P, 2 pe_dim) item 5
        z = z.to(M.dtype)                                              # (B, P, 2 pe_dim)
        mod = self.modulated_layer                         # M is not in paco_mlp, as in Algorithm 1
        for i, layer in enumerate(self.paco_mlp[:mod]):                # Algorithm 1's first loop
            z = layer(z)                                               # (B, P, h)
            if i < mod - 1 or self.relu_around_m:                      # item 1
                z = F.relu(z)                                          # (B, P, h)
        z = z @ M                                                      # (B, P, h) modulation
        if self.relu_around_m:                                         # item 1
            z = F.relu(z)                                              # (B, P, h)
        *hidden, last = self.paco_mlp[mod:]                            # Algorithm 1's second loop
        for layer in hidden:
            z = F.relu(layer(z))                                       # (B, P, h)
        return last(z) + self.out_bias                                 # (B, P, p*p*C) item 3

    def forward(self, images, noise=None):
        """Return loss and metrics for normalised images (B,C,H,W). noise (B,L) is random by
        default. The loss, a float32 scalar, is the mean squared error over the predicted patches
        (Algorithm 1); metrics is {"loss": the detached loss}."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        M = self.encode(images, ids_keep)                  # (B, h, h) or (B, 2 pe_dim, h)
        ids = ids_mask                                                 # (B, L-K) item 4
        if self.loss_on == "all":                                      # ablation: Table 11
            ids = torch.cat([ids_keep, ids_mask], dim=1)               # (B, L)
        coords = grid_coords(self.encoder.grid, images.device)[ids]    # (B, P, 2) Algorithm 1: pco
        pred = self.decode(coords, M)                                  # (B, P, p*p*C)
        # (B, P, p*p*C), float32; Algorithm 1: x_masked
        target = gather_patches(patchify(images, self.encoder.patch_size), ids).float()
        if self.norm_pix_loss:                                         # item 6
            target, _, _ = normalize_patches(target)                   # (B, P, p*p*C)
        loss = (pred - target).square().mean()                         # scalar
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Reconstruct normalised images (B,C,H,W). Returns the result (B,C,H,W) and the mask (B,L),
        1 = masked. All patches are predicted; the loss includes visible ones only if loss_on is
        "all". For leak_free, see ViT.paste_patches."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        coords = grid_coords(self.encoder.grid, images.device)[ids]    # (B, L, 2)
        pred = self.decode(coords, self.encode(images, ids_keep))      # (B, L, p*p*C)
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W) item 7
        return decoded, mask


# Paper and release: where they differ, and what we do
#   1. Sec. 2.2 has a ReLU after every hidden layer. Algorithm 1 shows none. The release has no ReLU
#      just before or after M, so three linear layers come in a row. We follow the release by
#      default, and Sec. 2.2 with `relu_around_m`.
#   2. Sec. 2.1 uses MAE's encoder, which ends in a norm. The release never calls this norm; we omit
#      it. As in the release, no norm follows Feat2W. Weight tokens and T are drawn with std 0.02.
#   3. The release adds 0.5 (`out_bias`) to the pixels, on top of the last layer's bias. So do we.
#   4. We follow Algorithm 1, which predicts only the masked patches and projects only the weight
#      tokens; the release predicts all patches and projects all Feat2W tokens. As in Sec. 2.2,
#      weight tokens come last; in Algorithm 1 they come first. Attention ignores the order.
#   5. Algorithm 1's "PositionalEmbedding" has h dimensions. Our Fourier features of the patch
#      centre, as in the release, have 2*pe_dim for any h (both are 256 by default). At the centres
#      of 14 x 14 patches, frequencies above 7 look like lower ones; the release goes to 1024.
#   6. Table 3 has plain targets. We normalise them by default: in Table 1, this is more accurate.
#   7. The release stores M on the module between calls and adds 1e-6 to the standard deviation when
#      un-normalising. Here M is an argument, and un-normalising exactly inverts normalising.
#   8. Sec. 2.2 lets any layer be M, with size h x h. We exclude the last layer, as it must output
#      pixels. The first (0 in Table 7) has 2*pe_dim inputs, so M is 2*pe_dim x h there.
