"""CrossMAE: each masked patch is decoded on its own, only from the encoder's tokens.

In MAE's decoder, mask tokens attend less to each other than to visible tokens (Sec. 1, Table 6).
CrossMAE decodes them by cross-attention: each mask token is a query that attends only to encoder
tokens, so no prediction depends on the others. This allows partial reconstruction: the loss can use
a random subset of the masked patches (`prediction_ratio`), and the decoder skips the rest. With
inter-block attention, each decoder block attends to its own learned mix of feature maps. These are
the encoder's tokens before its first block and after each block. The loss is the mean squared error
over the pixels of the predicted patches. By default, these pixels are normalised.

Fu, Lian, Wang, Shi, Wang, Yala, Darrell, Efros, Goldberg: Rethinking Patch Dependence for Masked
Autoencoders (TMLR 2025, arXiv 2401.14391). Release: https://github.com/TonyLianLong/CrossMAE

    B images, L patches, K visible, M masked, P predicted, D encoder width, E decoder width, p patch
    side, n feature maps f_1 ... f_n; their weights w (decoder depth,n) in the mixes t_1, t_2, ...
    noise (B,L): the K patches with the lowest noise stay visible
    images (B,C,H,W) -> visible tokens (B,K,D) -> maps (n,B,1+K,D) -> mixes (B,1+K,D) each
    queries (B,P,E) -> decoder blocks, where block k attends to mix t_k -> pixels (B,P,p*p*C)
"""

import torch
import torch.nn.functional as F
from torch import nn

from vit import (MLP, Attention, Method, ViT, gather_patches, init_weights, normalize_patches,
                 patchify, require, sincos_pos_embed)


class CrossAttention(nn.Module):
    """Let queries x (B,P,E) attend to tokens y (B,1+K,D) with E = dim, D = context_dim (Sec. 3.2).
    Returns (B,P,E). `kv` outputs k and v, concatenated like q, k and v in vit.Attention."""

    def __init__(self, dim, context_dim, heads):
        super().__init__()
        require(heads >= 1 and dim % heads == 0,
                f"width {dim} must be a multiple of the number of heads, {heads}")
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(context_dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, y):
        q = self.q(x)                                                  # (B, P, E) ViT eq. 5
        k, v = self.kv(y).chunk(2, dim=2)                              # (B, 1+K, E) each
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, P, E/heads)
        k = k.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, 1+K, E/heads)
        v = v.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, 1+K, E/heads)
        x = F.scaled_dot_product_attention(q, k, v)      # (B, heads, P, E/heads) ViT eq. 6, 7
        return self.proj(x.transpose(1, 2).flatten(2))                 # (B, P, E) ViT eq. 8


class CrossBlock(nn.Module):
    """A pre-norm decoder block (Figure 4b). Queries x attend to tokens y as in CrossAttention, then
    go through an MLP. Returns (B,P,E). With self_attention, queries attend to each other first."""

    def __init__(self, dim, context_dim, heads, self_attention=False):
        super().__init__()
        if self_attention:                                 # ablation: Table 3a
            self.norm0 = nn.LayerNorm(dim, eps=1e-6)
            self.self_attn = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.cross_attn = CrossAttention(dim, context_dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, 4 * dim)
        self.self_attention = self_attention

    def forward(self, x, y):
        if self.self_attention:                            # ablation: A.4, Figure 6
            x = x + self.self_attn(self.norm0(x))                      # (B, P, E)
        x = x + self.cross_attn(self.norm1(x), y)                      # (B, P, E) Sec. 3.2
        return x + self.mlp(self.norm2(x))                             # (B, P, E)


class CrossMAE(Method):
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches; `encoder` returns
    features. Defaults follow the paper: ViT-B/16 (Table 3), 12 decoder blocks and ratios of 0.75
    (Sec. 4.1, 4.2, A.6), and normalised targets (item 6).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        mask_ratio: fraction of patches to mask, the paper's p (Table 3b)
        prediction_ratio: fraction of all patches to predict, the paper's gamma; at most mask_ratio
            (Table 3c, item 6). Unless --lr is set, gamma / p multiplies the learning rate (A.6)
        norm_pix_loss: predict patches normalised by their own mean and variance
        decoder_dim: width of the decoder (512 as in MAE: A.6, item 9)
        decoder_depth: number of decoder blocks (Table 3e)
        decoder_heads: attention heads of the decoder (release)
        feature_maps: encoder blocks whose outputs are mixed for the decoder: all, or a list of
            blocks (counted from 0) that includes the last one, e.g. 3,7,11. With "last", the
            decoder gets only the encoder's output (Table 3d, items 5, 8)
        include_input: also mix in the first block's input, unless feature_maps is last (A.5)
        self_attention: let the predicted patches also attend to one another (Table 3a)
        softmax_weights: apply a softmax to the mixing weights (Table 8)
        project_maps: apply a linear layer to each feature map before mixing (Table 9)
    """

    recipe = dict(  # Table 10, with the release's crop; lr_scale multiplies lr (A.6)
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    # ours, for encoders narrower than base, with vit.Method.small_recipe. CIFAR-10, micro, 3 seeds:
    # masked pixels 18.24 dB, 20-NN 45.2%
    small_config = dict(norm_pix_loss=False, decoder_dim=64, decoder_depth=4, decoder_heads=2)

    @staticmethod
    def lr_scale(mask_ratio, prediction_ratio, **_):
        """Return what the learning rate is multiplied by: gamma / p (Sec. 3.3). A.6: lr = gamma *
        base_lr * batchsize / (256 * p)."""
        return prediction_ratio / mask_ratio if mask_ratio else 1.0    # 0 is refused later

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, prediction_ratio=0.75, norm_pix_loss=True, decoder_dim=512,
                 decoder_depth=12, decoder_heads=16, feature_maps: tuple = "all",
                 include_input=True, self_attention=False, softmax_weights=False,
                 project_maps=False):
        super().__init__()
        self.inter_block = feature_maps != "last"          # whether to mix maps (Sec. 3.4)
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads,
                           norm=not self.inter_block)                  # item 5
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        self.softmax_weights = softmax_weights
        L = self.encoder.num_patches
        self.skipped = int(L * (mask_ratio - prediction_ratio))        # not predicted: item 2
        require(0 < prediction_ratio <= mask_ratio, f"prediction_ratio {prediction_ratio} must be "
                f"above 0 and at most mask_ratio {mask_ratio}: set both")
        require(decoder_depth >= 1, f"decoder_depth {decoder_depth} must be at least 1")
        p, q = self.encoder.patch_size

        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E)
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            CrossBlock(decoder_dim, dim, decoder_heads, self_attention)
            for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        if self.inter_block:
            self.map_ids = choose_maps(feature_maps, include_input, depth)
            n = len(self.map_ids)
            self.map_proj = nn.ModuleList(                 # empty except in an ablation (Table 9)
                nn.Linear(dim, dim) for _ in self.map_ids if project_maps)
            self.dec_norms = nn.ModuleList(
                nn.LayerNorm(dim, eps=1e-6) for _ in range(decoder_depth))
            # weights of feature maps, named as in the release
            self.wfm = nn.ModuleDict({"linear": nn.Linear(n, decoder_depth, bias=False)})
        init_weights(self)
        if self.inter_block:
            nn.init.normal_(self.wfm["linear"].weight, std=n ** -0.5)  # w ~ N(0, 1/n), item 1
        require(self.inter_block or not (softmax_weights or project_maps),
                "feature_maps last mixes nothing: leave out softmax_weights and project_maps")

    def map_weights(self):
        """Return the mixing weights w_j^k (decoder depth,n), one row per decoder block."""
        w = self.wfm["linear"].weight                                  # (decoder depth, n)
        return w.softmax(dim=1) if self.softmax_weights else w  # (decoder depth, n) Table 8, item 7

    def encode(self, images, ids_keep):
        """Encode the visible patches ids_keep (B,K) of images. Returns a list: the tokens (B,1+K,D)
        that each decoder block attends to, i.e. its own mix of the feature maps, after its own norm
        (Sec. 3.4, A.3, item 5), or the encoder's output if there is no inter-block attention."""
        tokens = self.encoder.embed(images, ids_keep)                  # (B, K, D)
        if not self.inter_block:                                       # Figure 4a
            return [self.encoder.encode(tokens)] * len(self.decoder_blocks)
        maps = self.encoder.feature_maps(tokens)           # (B, 1+K, D) each, 1 + depth of them
        maps = [maps[i] for i in self.map_ids]             # f_1 ... f_n, (B, 1+K, D) each
        if self.map_proj:
            maps = [proj(f) for proj, f in zip(self.map_proj, maps)]   # ablation: Table 9
        maps = torch.stack(maps)                                       # (n, B, 1+K, D)
        # eq. 1: t_k = sum_j w_j^k f_j, for each decoder block k: (decoder depth, B, 1+K, D)
        mixes = torch.einsum("kj,jbsd->kbsd", self.map_weights(), maps)
        return [norm(t_k) for norm, t_k in zip(self.dec_norms, mixes)]  # Figure 4c

    def decode(self, features, ids):
        """Predict the patches ids (B,P) from encode's list. Returns (B,P,p*p*C)."""
        # the mask tokens are queries, with the positions of their patches (Figure 4a; item 4)
        x = self.mask_token + self.decoder_pos_embed[0, 1:][ids]       # (B, P, E)
        for block, y in zip(self.decoder_blocks, features):
            x = block(x, y)                                            # (B, P, E) Figure 4b
        return self.decoder_pred(self.decoder_norm(x))                 # (B, P, p*p*C)

    def forward(self, images, noise=None):
        """Return loss and metrics for normalised images (B,C,H,W). noise (B,L) is random by
        default. The loss, a float32 scalar, is the mean squared error over the predicted patches;
        metrics is {"loss": the detached loss}. With the default noise and no self_attention, the
        loss is an unbiased estimate of the error over all masked patches (Sec. 3.3, 4.4)."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        skipped = min(self.skipped, ids_mask.shape[1] - 1)             # predict at least one
        ids = ids_mask[:, skipped:]                                    # (B, P) Sec. 3.3; item 3
        pred = self.decode(self.encode(images, ids_keep), ids)         # (B, P, p*p*C)
        # (B, P, p*p*C), float32: the pixels of the same patches
        target = gather_patches(patchify(images, self.encoder.patch_size), ids).float()
        if self.norm_pix_loss:                                         # item 6
            target, _, _ = normalize_patches(target)                   # (B, P, p*p*C)
        loss = (pred - target).square().mean()                         # scalar, Sec. 3.3
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Reconstruct normalised images (B,C,H,W). Returns the result (B,C,H,W) and the mask (B,L),
        1 = masked. All patches are predicted, though the loss ignores visible and skipped ones.
        With leak_free, the true patches' mean and variance are not used (see ViT.paste_patches)."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio)
        features = self.encode(images, ids_keep)
        # two calls, because with self_attention the queries of one call influence each other
        pred_mask = self.decode(features, ids_mask)                    # (B, M, p*p*C) item 10
        pred_keep = self.decode(features, ids_keep)                    # (B, K, p*p*C)
        pred = torch.cat([pred_keep, pred_mask], dim=1)                # (B, L, p*p*C)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W)
        return decoded, mask


def choose_maps(feature_maps, include_input, depth):
    """Return the indices of the feature maps to mix (Sec. 3.4, A.5): 0 for the first block's input,
    i+1 for block i's output. Raises InputError if the last block is missing or one is unknown."""
    blocks = range(depth) if feature_maps == "all" else feature_maps
    require({*blocks} <= {*range(depth)} and depth - 1 in blocks,
            f"feature_maps {feature_maps} must be all, last or a list of blocks from 0 to "
            f"{depth - 1} that includes {depth - 1}")
    return ([0] if include_input else []) + [block + 1 for block in sorted(blocks)]


# Paper and release: where they differ, and what we do (numbers as in the TMLR version)
#   1. Sec. 3.4 draws the mixing weights from N(0, 1/n), and so do we. So does the release, but it
#      then overwrites them with Xavier initialisation. n is the number of maps (A.3): 13 for ViT-B,
#      including the input. (Sec. 3.4 calls n the encoder's depth, 12, and then adds the input.)
#   2. As in the release, int(L (mask ratio - prediction ratio)) masked patches are skipped, and the
#      others predicted. With L = 64 and ratios 0.75 and 0.15, these are 10, not int(9.6) = 9.
#   3. As in the release, the masked patches with the highest noise are predicted: a uniform choice
#      for random masks and, at mask ratio 0.75 with even h and w, for grid masks. But block masks
#      always give patches of the rectangles masked first, bool masks the last in raster order.
#   4. Mask tokens are the queries; encoder tokens are the keys and values (Sec. 3.2), the class
#      token included, as in the release. Sec. 4.4 and Figure 4a call visible tokens queries, too.
#   5. A.3 normalises the mixes, not the encoder's output. As in the release, each mix has its own
#      norm. A.3 also tried norms before mixing, without gain; we omit them. For "last" (one map in
#      Table 3d), the release calls a norm that it never creates; we use the encoder's final norm.
#   6. By default, the prediction ratio is 0.75, as in Sec. 4.2 and in the release's program.
#      Appendix C seems to say 0.25. The release's README trains ViT-B with 0.25, but says that its
#      checkpoints had 0.75 (ViT-H: 0.25). Only Figure 5's caption says that targets are normalised.
#   7. The release lacks Tables 8 and 9. Here, Table 8's softmax runs over the maps, separately for
#      each decoder block, and in Table 9, each map has one projection for all decoder blocks.
#   8. Table 3d neither lists its maps nor counts the input. Three evenly spaced ones are 3,7,11.
#   9. For all ViTs, A.6 uses MAE's decoder width, and so do we; for ViT-S, the release uses 256.
#  10. `reconstruct` decodes all masked patches together. With self_attention and a prediction ratio
#      below the mask ratio, more queries then attend to one another than in training.
