"""CrossMAE: each hidden patch is read out of the encoder by itself, so only some need be.

Fu, Lian, Wang, Shi, Wang, Yala, Darrell, Efros, Goldberg: Rethinking Patch Dependence for Masked
Autoencoders (TMLR 2025, arXiv 2401.14391), whose numbers of sections, tables and figures are used
here; an earlier anonymous version has others. Release: https://github.com/TonyLianLong/CrossMAE

MAE's decoder lets hidden patches attend to one another, which they hardly use. Here a mask token is
a query that cross-attends to the encoder's tokens and to nothing else, so that a patch's prediction
is the same whichever others are asked for: the loss takes a random subset of the hidden patches and
nothing is computed for the rest. Each decoder block reads its own learnt mix of the feature maps of
all encoder blocks.

    B images, L patches, K visible, M predicted, D encoder width, E decoder width, p patch side
    n feature maps f_1 ... f_n of (B,1+K,D); W the weights of their mixes, one row a decoder block
    images (B,C,H,W) -> visible patches (B,K,D) -> encoder: maps (n,B,1+K,D) -> mixes (B,1+K,D)
    queries (B,M,E) -> decoder blocks, which read the mixes -> pixels (B,M,p*p*C)

Where paper and release differ, and what is done here:
  1. Sec. 3.4 draws the mixing weights from N(0, 1/n); the release then overwrites them by xavier's.
     As in the paper; n counts the maps (A.3), 13 for ViT-B with the input, not the blocks.
  2. Sec. 3.3 predicts a share of the patches. As released, int(L (mask ratio - prediction ratio))
     hidden patches are skipped and the others predicted: 10 of 64, not 9, at 0.75 and 0.15.
  3. The release predicts the end of the noise's order. Here the fractional part of the noise
     decides, which is the same for random noise, and uniform too where whole numbers make a pattern
     (grid and block masks; Table 15 is train.py's `--mask grid`).
  4. Mask tokens are the queries, encoder tokens keys and values. Sec. 4.4 exchanges these roles;
     Figure 4's caption calls the encoder's output "keys and queries", a slip for values.
  5. With mixing, the encoder has no final norm; each mix has its own, which cancels the scale of a
     single map's weight. For one map (Table 3d) the release forgets to build the norm that it
     calls: here it is the encoder's final one.
  6. The prediction ratio is 0.75 as in Sec. 4.2; Appendix C calls 0.25 the default.
  7. Softmax weights (Table 8) are over the maps, for each decoder block; projections (Table 9)
     one a map, for all decoder blocks. Norms before mixing too (A.3: no better) are not built.
  8. Table 3d does not name its 3 and 6 maps: 3,7,11 and 1,3,5,7,9,11 would be evenly spaced.
  9. For ViT-S the release has decoder_dim 256 and decoder_heads 8; A.6 says MAE's width.
 10. With self_attention and a prediction ratio below the mask ratio, `reconstruct` predicts all
     hidden patches at once, more queries than attended to one another in training.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, MLP, Attention, ViT, init_weights, normalize,
                 normalize_patches, sincos_pos_embed, visible_count)


class CrossAttention(nn.Module):
    """Queries x (B,M,E) read y (B,1+K,D), projected here to keys and values (Sec. 3.2): (B,M,E)."""

    def __init__(self, dim, context_dim, heads):
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"width {dim} is not a multiple of {heads} heads")
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(context_dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, y):
        (B, M, E), N = x.shape, y.shape[1]
        q = self.q(x).view(B, M, self.heads, -1).transpose(1, 2)       # (B, heads, M, E/heads)
        k, v = self.kv(y).view(B, N, 2, self.heads, -1).unbind(2)      # (B, 1+K, heads, E/heads)
        x = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))  # shape of q
        return self.proj(x.transpose(1, 2).reshape(B, M, E))           # (B, M, E)


class CrossBlock(nn.Module):
    """A pre-norm decoder block: [self-attention of the queries,] cross-attention, an MLP."""

    def __init__(self, dim, context_dim, heads, self_attention=False):
        super().__init__()
        if self_attention:
            self.norm0 = nn.LayerNorm(dim, eps=1e-6)
            self.self_attn = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.cross_attn = CrossAttention(dim, context_dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, 4 * dim)
        self.self_attention = self_attention

    def forward(self, x, y):
        if self.self_attention:
            x = x + self.self_attn(self.norm0(x))                      # A.4, Figure 6
        x = x + self.cross_attn(self.norm1(x), y)                      # Sec. 3.2, Figure 4b
        return x + self.mlp(self.norm2(x))


class CrossMAE(nn.Module):
    """`loss, metrics = model(images)`; `reconstruct` predicts what is hidden, `encoder` gives
    features. Defaults: the paper's (Sec. 4.2, A.6), ViT-B/16 with normalised targets.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        mask_ratio: share of the patches that is hidden (Table 3b)
        prediction_ratio: share of all patches that is predicted, at most mask_ratio (Table 3c)
        norm_pix_loss: predict patches normalised by their own mean and variance
        decoder_dim: width of the decoder (A.6: MAE's)
        decoder_depth: blocks of the decoder (Table 3e)
        decoder_heads: attention heads of the decoder (release)
        feature_maps: maps that are mixed: all, last or blocks from 0, as in 3,7,11 (Table 3d)
        include_input: mix the first block's input too (A.5; on, unless feature_maps is last)
        self_attention: among the predicted patches, before cross-attention (Table 3a)
        softmax_weights: mixing weights that are positive and add up to 1 (Table 8)
        project_maps: a linear layer for each map before mixing (Table 9)
    """

    recipe = dict(  # Table 10, and blr times lr_scale (A.6); the crop's scale: release
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, for pictures up to 64 pixels and for the micro encoder; lr times lr_scale
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1,
        norm_pix_loss=False, decoder_dim=64, decoder_depth=4, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, prediction_ratio=0.75, norm_pix_loss=True, decoder_dim=512,
                 decoder_depth=12, decoder_heads=16, feature_maps="all",
                 include_input: bool = None, self_attention=False, softmax_weights=False,
                 project_maps=False):
        super().__init__()
        self.mixes = mixes = feature_maps != "last"
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=not mixes)
        self.mask_ratio, self.prediction_ratio = mask_ratio, prediction_ratio
        self.norm_pix_loss, self.softmax_weights = norm_pix_loss, softmax_weights
        L, K = self.encoder.num_patches, visible_count(self.encoder.num_patches, mask_ratio)
        self.skipped = int(L * (mask_ratio - prediction_ratio))        # Sec. 3.3; item 2
        if not (0 < prediction_ratio <= mask_ratio and K + self.skipped < L):
            raise ValueError(f"prediction_ratio {prediction_ratio} is not above 0 and at most "
                             f"mask_ratio {mask_ratio}: give both")
        if decoder_depth < 1:
            raise ValueError(f"decoder_depth {decoder_depth} is less than 1")
        self.lr_scale = prediction_ratio / mask_ratio                  # gamma / p, Sec. 3.3, A.6
        p, q = self.encoder.patch_size

        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E)
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            CrossBlock(decoder_dim, dim, decoder_heads, self_attention)
            for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        if mixes:
            blocks = range(depth) if feature_maps == "all" else feature_maps
            blocks = [blocks] if isinstance(blocks, (int, str)) else [*blocks]
            if (depth - 1 not in blocks or len({*blocks}) < len(blocks)
                    or not all(isinstance(i, int) and 0 <= i < depth for i in blocks)):
                raise ValueError(f"feature_maps {feature_maps} is not all, last or a list of "
                                 f"different blocks from 0 to {depth - 1} that includes the last")
            self.map_ids = sorted(i + 1 for i in blocks)               # in the list of ViT.layers
            if include_input is not False:
                self.map_ids.insert(0, 0)                              # Sec. 3.4, A.5
            n = len(self.map_ids)
            if softmax_weights and n == 1:
                raise ValueError("softmax_weights of one map are 1: mix more")
            self.map_proj = nn.ModuleList(
                nn.Linear(dim, dim) for _ in range(n if project_maps else 0))
            self.dec_norms = nn.ModuleList(
                nn.LayerNorm(dim, eps=1e-6) for _ in range(decoder_depth))
            self.wfm = nn.ModuleDict({                                 # named as released
                "linear": nn.Linear(n, decoder_depth, bias=False)})
        elif include_input or softmax_weights or project_maps:
            raise ValueError("feature_maps last mixes nothing: it excludes include_input, "
                             "softmax_weights and project_maps")
        self.apply(init_weights)
        if mixes:
            nn.init.normal_(self.wfm["linear"].weight, std=n ** -0.5)  # w ~ N(0, 1/n), Sec. 3.4

    def map_weights(self):
        """The weights w_j^k of the mixes (decoder depth,n), a row a decoder block."""
        W = self.wfm["linear"].weight
        return W.softmax(dim=1) if self.softmax_weights else W         # Table 8

    def encode(self, images, ids_keep):
        """What each decoder block reads of the visible patches ids_keep (B,K), its inter-block
        attention (Sec. 3.4): (B,1+K,D) each."""
        tokens = self.encoder.embed(images, ids_keep)                  # (B, K, D)
        if not self.mixes:                                             # Figure 4a
            return [self.encoder.encode(tokens)] * len(self.decoder_blocks)
        maps = self.encoder.layers(tokens)                             # 1 + depth of (B, 1+K, D)
        maps = [maps[i] for i in self.map_ids]                         # f_1 ... f_n
        if self.map_proj:
            maps = [proj(f) for proj, f in zip(self.map_proj, maps)]   # Table 9
        maps = torch.stack(maps)                                       # (n, B, 1+K, D)
        mixes = self.map_weights() @ maps.flatten(1)                   # eq. 1: t_k = sum w_j^k f_j
        mixes = mixes.view(-1, *maps.shape[1:])                        # (decoder depth, B, 1+K, D)
        return [norm(t) for norm, t in zip(self.dec_norms, mixes)]     # (B, 1+K, D) each, A.3

    def decode(self, features, ids):
        """Predictions (B,M,p*p*C) of the patches ids (B,M) from the features of encode."""
        x = self.mask_token + self.decoder_pos_embed[0, 1:][ids]       # (B, M, E) queries Sec. 3.2
        for block, y in zip(self.decoder_blocks, features):
            x = block(x, y)                                            # (B, M, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, M, p*p*C)

    def subset(self, noise, ids_keep, ids_mask):
        """The patches of ids_mask (B,L-K) that are predicted (Sec. 3.3), (B,M), a uniform choice
        whatever the mask's pattern: those of the highest fractional part of noise (B,L). If the
        last visible and first hidden noise share a whole part, say 1.2 and 1.3, its hidden ones
        only have fractions above 0.2 and would win too often: they are stretched to 0 ... 1."""
        last, noise = noise.gather(1, ids_keep[:, -1:]), noise.gather(1, ids_mask)
        stretched = (noise - last) / (1 - last % 1)
        rank = torch.where(noise.floor() == last.floor(), stretched, noise % 1)
        return ids_mask.gather(1, rank.argsort(dim=1, stable=True)[:, self.skipped:])

    def forward(self, images, noise=None):
        """Images (B,C,H,W), normalised, and noise (B,L; None: random) -> the loss, a float32
        scalar, and {"loss"}, detached: the mean squared error of the predicted patches, which
        without self_attention is an unbiased estimate of that of all hidden ones (Sec. 3.3). If
        noise is a 0/1 mask, the hidden patches that come last in raster order are predicted."""
        if noise is None:
            noise = torch.rand(len(images), self.encoder.num_patches, device=images.device)
        noise = noise.float()
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        ids = self.subset(noise, ids_keep, ids_mask)                   # (B, M)
        pred = self.decode(self.encode(images, ids_keep), ids).float()  # (B, M, p*p*C)
        target = self.encoder.targets(images, ids, self.norm_pix_loss)  # the same
        loss = (pred - target).square().mean()                         # Sec. 3.3
        return loss, {"loss": loss.detach()}

    def predict(self, images, noise):
        """All hidden patches, and only these (B,L-K,p*p*C), in raster order and in the space of the
        loss."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        return self.decode(self.encode(images, ids_keep), ids_mask.sort(dim=1).values)

    @torch.no_grad()
    def reconstruct_all(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised, as decoded, nothing copied: visible patches are predicted
        too, which the loss has not trained. And the mask (B,L). `mask_ratio` replaces the model's;
        for `leak_free` see ViT.fill. ValueError if noise is a 0/1 mask of another mask_ratio."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        features, ids = self.encode(images, ids_keep), torch.cat([ids_keep, ids_mask], dim=1)
        pred = [self.decode(features, part) for part in (ids_keep, ids_mask)]  # as in training
        pred = torch.cat(pred, dim=1)                                  # (B, L, p*p*C)
        return self.encoder.fill(images, pred, ids, ids_keep, self.norm_pix_loss, leak_free), mask

    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """reconstruct_all with the visible patches copied from images."""
        decoded, mask = self.reconstruct_all(images, noise, mask_ratio, leak_free)
        return self.encoder.copy_visible(decoded, images, mask), mask

    def contributions(self, images, noise):
        """Each decoder block's own part of the predictions of all hidden patches (Appendix D): (1 +
        decoder depth,B,L-K,p*p*C), first that of mask token and position; ids_keep, ids_mask, mask.
        They add up exactly: the final norm is linear once its deviation is fixed, here to the last
        output's; the biases of norm and head are counted once, in the first part."""
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, self.mask_ratio)
        xs = [self.mask_token + self.decoder_pos_embed[0, 1:][ids_mask]]     # f_0
        for block, y in zip(self.decoder_blocks, self.encode(images, ids_keep)):
            xs.append(block(xs[-1], y))                                # f_i, each (B, L-K, E)
        parts = torch.stack([xs[0], *(b - a for a, b in zip(xs, xs[1:]))])   # g_i = f_i - f_{i-1}
        norm, head = self.decoder_norm, self.decoder_pred              # h
        std = (xs[-1].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        parts = (parts - parts.mean(-1, keepdim=True)) / std * norm.weight @ head.weight.T  # h(g_i)
        parts[0] += head(norm.bias)
        return parts, ids_keep, ids_mask, mask

    @torch.no_grad()
    def figures(self, images):
        """{"contributions": (rows,columns,C,H,W)}, a row an image: what is visible, the parts of
        Appendix D, and all together; and "map_weights", Figure 5c: a row a decoder block, a column
        a feature map, 0 in grey, negative ones darker."""
        noise = self.encoder.fixed_noise(images)
        parts, ids_keep, ids_mask, mask = self.contributions(images, noise)
        if self.norm_pix_loss:
            _, mean, std = normalize_patches(self.encoder.targets(images, ids_mask))
            parts = parts * std                                        # of the true patches
            parts[0] += mean

        def place(canvas, patches):
            return self.encoder.fill(canvas, patches, ids_mask, ids_keep)
        cells = [images * (1 - self.encoder.pixels_of(mask)),          # 2 + 1 + decoder depth
                 *(place(images * 0, part) for part in parts), place(images, parts.sum(0))]
        figures = {"contributions": torch.stack(cells, dim=1)}
        if self.mixes:
            W = self.map_weights()                                     # (decoder depth, n)
            grey = (127.5 + 127.5 * W / W.abs().max()).expand(1, len(self.mean), -1, -1)
            figures["map_weights"] = normalize(grey, self)[None]
        return figures
