"""MAE: hide most of an image, encode what is left, and predict what is hidden.

He, Chen, Xie, Li, Dollar, Girshick: Masked Autoencoders Are Scalable Vision Learners (CVPR 2022).
Release: https://github.com/facebookresearch/mae

A random 75% of the patches is hidden, and a ViT encodes only the visible rest, so that a large
encoder is cheap to train. A small decoder gets the encoded patches and, in place of each hidden
one, the same learnt mask token, distinguished only by its position embedding. It predicts the
pixels of the hidden patches; afterwards the decoder is thrown away and the encoder is the result.

    B images, L patches, K visible, M = L - K hidden, D encoder width, E decoder width, p patch side
    images (B,C,H,W) -> visible patches (B,K,D) -> encoder (B,1+K,D) -> decoder (B,1+L,E)
    -> pixels of the hidden patches (B,M,p*p*C)

Masks are drawn by noise, a random number for each patch: the K lowest are visible (vit.masking).

Where this file differs from both, or the release from the paper:
  1. Both un-shuffle the decoder's tokens to raster order (Sec. 3, "Simple implementation").
     Attention does not depend on the order: here tokens stay in the order of their noise, the
     visible first, so that the hidden ones are simply the last M.
  2. Both embed all patches, then drop the hidden ones; here only the visible ones are embedded. The
     release's head predicts all patches, in training too; here, in training, only the hidden ones.
  3. Normalised targets (Sec. 3): the release takes the unbiased variance plus 1e-6, of which the
     paper says nothing. As released.
  4. K is L (1 - mask_ratio), truncated, as released.
  5. The paper initialises with xavier (Appendix A.1). As released, the patch projection's bias
     keeps torch's default, and both learnt tokens start with a deviation of 0.02.
  6. The norm before the head and the class token's position, zero, are the release's.
"""

import torch
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, Block, ViT, init_weights, sincos_pos_embed,
                 visible_count)


class MAE(nn.Module):
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches, `encoder` gives
    features. Defaults: the paper's, but for ViT-B/16 (its own: ViT-L/16) and normalised targets,
    which it finds better (Table 1d; its own: plain pixels).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        mask_ratio: share of the patches that is hidden (Figure 5)
        norm_pix_loss: predict patches normalised by their own mean and variance (Table 1d)
        decoder_dim: width of the decoder (Table 1b)
        decoder_depth: number of decoder blocks (Table 1a)
        decoder_heads: attention heads of the decoder (release)
        inter_block_attention: decode a learnt mix of the first block's input and all blocks'
            outputs (CrossMAE Table 7), which `encoder.norm` then normalises. `encoder(images)`
            still gives the last output alone
    """

    recipe = dict(  # Table 8; 800 epochs: Table 1; flip: Sec. 4.1; crop: release
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, for images up to 64 pixels and for the micro encoder; targets are not
        # normalised, so that predictions can be viewed directly
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1,
        norm_pix_loss=False, decoder_dim=64, decoder_depth=2, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    lr_scale = 1.0                                         # CrossMAE has another

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, norm_pix_loss=True, decoder_dim=512, decoder_depth=8,
                 decoder_heads=16, inter_block_attention=False):
        super().__init__()
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        visible_count(self.encoder.num_patches, mask_ratio)            # InputError, unless it fits
        p, q = self.encoder.patch_size

        self.decoder_embed = nn.Linear(dim, decoder_dim)               # Appendix A.1
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E)
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        self.apply(init_weights)

        self.map_weights = None
        if inter_block_attention:                                      # CrossMAE Sec. 3.4, Table 7
            n = depth + 1                                              # w ~ N(0, 1/n)
            self.map_weights = nn.Parameter(torch.empty(n).normal_(std=n ** -0.5))

    def encode(self, images, ids_keep):
        """The visible patches ids_keep (B,K) of images, encoded (Sec. 3): (B,1+K,D)."""
        tokens = self.encoder.embed(images, ids_keep)                  # (B, K, D)
        if self.map_weights is not None:
            return self.mix_maps(tokens)                               # (B, 1+K, D)
        return self.encoder.encode(tokens)                             # (B, 1+K, D)

    def decoder_input(self, z, ids_keep, ids_mask):
        """Encoded tokens z (B,1+K,D) and a mask token for each hidden patch, with their positions:
        (B,1+L,E), class token first, then in the order of the noise."""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        z = self.decoder_embed(z)                                      # (B, 1+K, E)
        return torch.cat([z[:, :1] + self.decoder_pos_embed[:, :1],    # (B, 1, E) class token
                          z[:, 1:] + pos[ids_keep],                    # (B, K, E) visible patches
                          self.mask_token + pos[ids_mask]], dim=1)     # (B, M, E) hidden patches

    def decode(self, z, ids_keep, ids_mask, count):
        """Encoded tokens z (B,1+K,D) -> predictions (B,count,p*p*C) of the last `count` patches in
        the order of the noise. The last M are the hidden ones, the last L are all."""
        x = self.decoder_input(z, ids_keep, ids_mask)                  # (B, 1+L, E)
        for block in self.decoder_blocks:
            x = block(x)                                               # (B, 1+L, E)
        x = x[:, -count:]                                              # (B, count, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, count, p*p*C)

    def forward(self, images, noise=None):
        """Images (B,C,H,W), normalised, and noise (B,L; None: random) -> the loss, the mean squared
        error of the hidden patches, a float32 scalar, and {"loss": the same, detached}."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)      # Sec. 3
        z = self.encode(images, ids_keep)                              # (B, 1+K, D)
        pred = self.decode(z, ids_keep, ids_mask, ids_mask.shape[1])   # (B, M, p*p*C)
        target = self.encoder.targets(images, ids_mask, self.norm_pix_loss)  # as pred, Sec. 3
        loss = (pred.float() - target).square().mean()                 # Sec. 3: hidden patches only
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised -> the same as decoded, and the mask (B,L), 1 = hidden.
        Nothing is copied: visible patches are predicted too, although the loss leaves them out.
        mask_ratio: None for the model's own. leak_free: see ViT.paste_patches. ValueError if noise
        is a 0/1 mask of another mask_ratio."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) by noise
        z = self.encode(images, ids_keep)                              # (B, 1+K, D)
        pred = self.decode(z, ids_keep, ids_mask, ids.shape[1])        # (B, L, p*p*C)
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W)
        return decoded, mask

    # ------------------------------------------------ what CrossMAE's paper does with this model

    def mix_maps(self, tokens):
        """Inter-block attention (CrossMAE Sec. 3.4, Table 7): the learnt mix of all feature maps of
        tokens (B,K,D), normalised: (B,1+K,D)."""
        maps = torch.stack(self.encoder.layers(tokens), dim=-1)        # (B, 1+K, D, n)
        return self.encoder.norm(maps @ self.map_weights)              # (B, 1+K, D) CrossMAE eq. 1

    @torch.no_grad()
    def measures(self, train, val):
        """How much the hidden tokens of images val (N,C,H,W), normalised, attend to a visible token
        (class token included) and to a hidden one, in the decoder (CrossMAE Table 6, from which
        that paper starts). -> {title: a row for each decoder block, and one for their sum}: mean
        over images and tokens, summed over heads; and the share that all visible tokens get.
        `train` is not used.

        CrossMAE A.1 says averaged over heads, but its Table 6 has sums over 16 heads: a block's
        attention, 50 x 0.196 + 147 x 0.042, is about 16. Its blocks count from 1, here from 0."""
        noise = self.encoder.fixed_noise(val)
        seen = 1 + visible_count(self.encoder.num_patches, self.mask_ratio)  # with the class token
        attended = 0                                       # by block: attention to each token
        for images, part in zip(val.split(100), noise.split(100)):
            ids_keep, ids_mask, _ = self.encoder.mask(images, part, self.mask_ratio)
            x = self.decoder_input(self.encode(images, ids_keep), ids_keep, ids_mask)
            to_each = []
            for block in self.decoder_blocks:
                q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=2)  # (B, 1+L, E) each
                q = q[:, seen:].unflatten(2, (block.attn.heads, -1)).transpose(1, 2)
                k = k.unflatten(2, (block.attn.heads, -1)).transpose(1, 2)  # (B, heads, 1+L, d)
                # of the hidden queries, (B, heads, M, d): (B, heads, M, 1+L)
                attention = (q @ k.transpose(2, 3) / k.shape[3] ** 0.5).softmax(dim=-1)
                # (1+L,) mean over hidden tokens and images, sum over heads
                to_each.append(attention.mean(2).sum((0, 1)) / len(val))
                x = block(x)                                           # (B, 1+L, E)
            attended = attended + torch.stack(to_each)                 # (decoder depth, 1+L)
        rows = []
        for name, tokens in [*enumerate(attended), ("sum", attended.sum(0))]:
            rows.append({"block": name, "visible": tokens[:seen].mean().item(),
                         "hidden": tokens[seen:].mean().item(),
                         "share of visible": (tokens[:seen].sum() / tokens.sum()).item()})
        return {"how much hidden tokens attend to a visible and to a hidden token in each decoder "
                "block (mean, summed over heads), and the share of it that all visible tokens "
                f"together get; {len(val)} images": rows}
