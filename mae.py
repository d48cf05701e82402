"""MAE: mask most of an image, encode the rest, and predict what is masked.

A ViT encodes only the quarter of the patches that stays visible, so a large encoder is cheap to
train. A small decoder gets the encoded patches and, for every masked patch, the learned mask token
plus the patch's position. It predicts the masked patches' pixels, in MAE's recipe normalised.
The loss is the mean squared error of these pixels. After training, only the encoder is kept.

He, Chen, Xie, Li, Dollar, Girshick: Masked Autoencoders Are Scalable Vision Learners (CVPR 2022).
Release: https://github.com/facebookresearch/mae. "Item 3" refers to the list at the end.

    B images with C channels, L patches of p*p pixels (or p*q), K visible, M = L - K masked,
    D encoder width, E decoder width. noise (B,L): the K patches with the lowest noise stay visible
    images (B,C,H,W) -> visible tokens (B,K,D) -> encoder (B,1+K,D) -> decoder (B,1+L,E)
    -> masked patches (B,M,p*p*C). The first token, the class token, is learned; it has no patch
"""

import torch
from torch import nn

from vit import (Block, Method, ViT, gather_patches, init_weights, normalize_patches, patchify,
                 sincos_pos_embed)


class MAE(Method):
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches; `encoder` returns
    features. Defaults are ViT-B and normalised pixels (the paper's ablations: ViT-L, plain pixels).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        mask_ratio: fraction of patches to mask (Figure 5)
        norm_pix_loss: predict patches normalised by their own mean and variance (Table 1d)
        decoder_dim: width of the decoder (Table 1b)
        decoder_depth: number of decoder blocks (Table 1a)
        decoder_heads: attention heads of the decoder (release)
    """

    recipe = dict(  # Table 8; epochs from Table 1, flip from Sec. 4.1, crop from the release
        # blr: learning rate for a batch of 256; crop: smallest crop, as a fraction of the area
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    # ours, for narrower encoders, with vit.Method.small_recipe; plain targets can be viewed
    small_config = dict(norm_pix_loss=False, decoder_dim=64, decoder_depth=2, decoder_heads=2)

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, norm_pix_loss=True, decoder_dim=512, decoder_depth=8,
                 decoder_heads=16):
        super().__init__()
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        p, q = self.encoder.patch_size                     # patch height and width; usually q = p

        self.decoder_embed = nn.Linear(dim, decoder_dim)               # Appendix A.1
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))  # item 5
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E) item 6
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)        # item 6
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        init_weights(self)                                             # item 5

    def encode(self, images, ids_keep):
        """Encode the visible patches ids_keep (B,K) of images (Sec. 3, "MAE encoder"). Returns
        (B,1+K,D). The encoder gets no mask tokens: after pretraining, there are none (Table 1c)."""
        return self.encoder(images, ids_keep)                          # (B, 1+K, D) item 2

    def add_mask_tokens(self, latent, ids_keep, ids_mask):
        """Return the decoder's input (B,1+L,E), as in Sec. 3, "MAE decoder": the latent (B,1+K,D),
        projected to width E (A.1), and a mask token per masked patch, with positions (item 1)."""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        x = self.decoder_embed(latent)                                 # (B, 1+K, E)
        return torch.cat([x[:, :1] + self.decoder_pos_embed[:, :1],    # (B, 1, E) class token
                          x[:, 1:] + pos[ids_keep],                    # (B, K, E) visible patches
                          self.mask_token + pos[ids_mask]], dim=1)     # (B, M, E) masked patches

    def decode(self, latent, ids_keep, ids_mask, visible_too=False):
        """Predict the masked patches ids_mask (B,M) from the latent (B,1+K,D). Returns (B,M,p*p*C).
        With visible_too, predictions of the visible patches ids_keep come first: (B,L,p*p*C)."""
        x = self.add_mask_tokens(latent, ids_keep, ids_mask)           # (B, 1+L, E)
        for block in self.decoder_blocks:
            x = block(x)                                               # (B, 1+L, E)
        # class token, visible, masked patches: this order replaces a mask in the loss (item 2)
        x = x[:, 1 if visible_too else 1 + ids_keep.shape[1]:]         # (B, M or L, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, M or L, p*p*C)

    def target(self, images, ids):
        """Return what to predict for patches ids (B,M): their pixels (B,M,p*p*C), float32."""
        target = gather_patches(patchify(images, self.encoder.patch_size), ids).float()
        if self.norm_pix_loss:             # more local contrast, higher accuracy (Table 1d; item 3)
            target, _, _ = normalize_patches(target)                   # (B, M, p*p*C)
        return target

    def forward(self, images, noise=None):
        """Return loss and metrics for normalised images (B,C,H,W). By default, noise (B,L) is
        random; sorting patches by it is the paper's shuffling. The loss, a float32 scalar, is the
        mean squared error over the masked patches; metrics is {"loss": the detached loss}."""
        # few patches stay visible, so extrapolating from neighbours is hard (Sec. 3; item 4)
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)  # (B, K), (B, M)
        # the large encoder sees only the visible patches; the small decoder pays for the others
        latent = self.encode(images, ids_keep)                         # (B, 1+K, D)
        pred = self.decode(latent, ids_keep, ids_mask)                 # (B, M, p*p*C)
        target = self.target(images, ids_mask)                         # (B, M, p*p*C)
        loss = (pred - target).square().mean()     # scalar; on all patches: less accurate (Sec. 3)
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Reconstruct normalised images (B,C,H,W). Returns the result (B,C,H,W) and the mask (B,L),
        1 = masked. Visible patches are also predicted, although the loss ignores them. With
        leak_free, the true patches' mean and variance are not used (see ViT.paste_patches)."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        latent = self.encode(images, ids_keep)                         # (B, 1+K, D)
        pred = self.decode(latent, ids_keep, ids_mask, visible_too=True)       # (B, L, p*p*C)
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W)
        return decoded, mask


# Paper and release: where they differ, and what we do
#   1. Both unshuffle the decoder's tokens into raster order (Sec. 3, "Simple implementation").
#      Self-attention is permutation-equivariant, so we leave them sorted by noise.
#   2. Both embed all patches and then drop the masked ones; we embed only the visible ones. The
#      release predicts all patches and masks the loss; in training, we predict only masked ones.
#   3. Sec. 3 does not define a patch's variance. We take the release's: unbiased, plus 1e-6.
#   4. K is L (1 - mask_ratio), rounded down, as in the release (vit.visible_count).
#   5. Weights have Xavier initialisation: the blocks' by Appendix A.1, others as in the release.
#      There, the patch embedding's bias keeps PyTorch's default, and learned tokens have std 0.02.
#   6. The norm before the head and the zero position of the class token are from the release.
