"""CrossMAE: each hidden patch is decoded by itself, so that it is enough to decode some of them.

Fu, Lian, Wang, Shi, Wang, Yala, Darrell, Efros, Goldberg: Rethinking Patch Dependence for Masked
Autoencoders (TMLR 2025, arXiv 2401.14391), whose numbers of sections, tables and figures are used
here; an earlier anonymous version has others. Release: https://github.com/TonyLianLong/CrossMAE

MAE's decoder lets hidden patches attend to one another, which they do little (Sec. 1). Here a mask
token is a query that cross-attends to the encoder's tokens and to nothing else, so that a patch's
prediction is the same whichever others are asked for: the loss may take a random subset of the
hidden patches (`prediction_ratio`), and nothing is computed for the rest. Each decoder block reads
its own learnt mix of the feature maps: the first encoder block's input and all blocks' outputs.

    B images, L patches, K visible, M predicted, D encoder width, E decoder width, p patch side
    n feature maps f_1 ... f_n of (B,1+K,D); W (decoder depth,n) the weights of their mixes
    images (B,C,H,W) -> visible patches (B,K,D) -> encoder: maps (n,B,1+K,D) -> mixes (B,1+K,D)
    queries (B,M,E) -> decoder blocks, which read the mixes -> pixels (B,M,p*p*C)

Where paper and release differ, and what is done here:
  1. Sec. 3.4 draws the mixing weights from N(0, 1/n); the release then overwrites them by xavier's.
     We follow the paper. n is the number of maps (A.3), 13 for ViT-B: 12 blocks and the input.
     (Sec. 3.4 calls n the encoder's depth, 12, and then adds the input.)
  2. Sec. 3.3 predicts a share of the patches. As released, int(L (mask ratio - prediction ratio))
     hidden patches are skipped and the others predicted: at 0.75 and 0.15 of 64 patches 10, not
     int(9.6) = 9.
  3. Predicted are the hidden patches with the highest noise, as released: a uniform choice with
     random masks and, at 75%, grid masks (Table 15: `--mask grid`). With `--mask block` it is not
     uniform: the rectangles that are hidden first are always predicted; nor with a 0/1 mask as
     noise: its last hidden patches in raster order are.
  4. Mask tokens are the queries, encoder tokens keys and values, the class token's too (release).
     Sec. 4.4 exchanges these roles and counts visible patches alone; Figure 4's caption calls the
     encoder's output "keys and queries", a slip for values.
  5. With mixing, the encoder has no final norm; each mix has its own. Without (feature_maps "last",
     Table 3d's one map) the release forgets to build the norm that it calls: here it is the
     encoder's final one.
  6. The prediction ratio is 0.75 by default, as in Sec. 4.2; Appendix C calls 0.25 the default.
  7. Softmax weights (Table 8) are over the maps, for each decoder block; projections (Table 9)
     one per map, for all decoder blocks. Norms before mixing too (A.3: no better) are not built.
  8. Table 3d does not name its 3 and 6 maps: 3,7,11 and 1,3,5,7,9,11 would be evenly spaced. Its
     numbers do not count the input.
  9. For ViT-S the release has decoder_dim 256 and decoder_heads 8; A.6 says MAE's width. Neither is
     a default here: give flags.
 10. With self_attention and a prediction ratio below the mask ratio, `reconstruct` predicts all
     hidden patches at once, more queries than attended to one another in training.
 11. Appendix D takes the norm before the head to be linear, which it is once its standard deviation
     is fixed: `contributions` takes that of the last block's output.
 12. Slips: A.6 says 0.75 for Table 1, which has rows of 0.25 too, and Sec. 3.4 for the scaling of
     the learning rate, which is in 3.3. The last two rows of Table 5, without and with inter-block
     attention, have the accuracies and minutes of CrossMAE (0.25) and (0.75) in Table 4.
"""

import torch
import torch.nn.functional as F
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, MLP, Attention, InputError, ViT, init_weights,
                 normalize, normalize_patches, sincos_pos_embed, visible_count)


class CrossAttention(nn.Module):
    """Queries x (B,M,E) read y (B,1+K,D), projected here to keys and values (Sec. 3.2): (B,M,E). As
    in released weights, the layer kv gives k, then v, and in each the heads one after the other."""

    def __init__(self, dim, context_dim, heads):
        super().__init__()
        if heads < 1 or dim % heads:
            raise InputError(f"width {dim} is not a multiple of {heads} heads")
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(context_dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, y):
        q = self.q(x)                                                  # (B, M, E)
        k, v = self.kv(y).chunk(2, dim=2)                              # (B, 1+K, E) each
        q = q.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, M, E/heads)
        k = k.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, heads, 1+K, E/heads)
        v = v.unflatten(2, (self.heads, -1)).transpose(1, 2)           # the same
        x = F.scaled_dot_product_attention(q, k, v)                    # (B, heads, M, E/heads)
        return self.proj(x.transpose(1, 2).flatten(2))                 # (B, M, E)


class CrossBlock(nn.Module):
    """A pre-norm decoder block: self-attention of the queries (on request), cross-attention to y,
    an MLP. Queries x (B,M,E) and encoder tokens y (B,1+K,D) -> (B,M,E)."""

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
    """`loss, metrics = model(images)`; `reconstruct` predicts all patches, `encoder` gives
    features. Defaults: the paper's (Sec. 4.2, A.6), ViT-B/16 with normalised targets, which only
    the caption of Figure 5 implies.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        mask_ratio: share of the patches that is hidden (Table 3b)
        prediction_ratio: share of all patches that is predicted, at most mask_ratio (Table 3c)
        norm_pix_loss: predict patches normalised by their own mean and variance
        decoder_dim: width of the decoder (A.6: MAE's)
        decoder_depth: number of decoder blocks (Table 3e)
        decoder_heads: attention heads of the decoder (release)
        feature_maps: encoder blocks whose outputs the decoder reads: "all", mixed; "last" alone,
            not mixed; or a list with the last one, counted from 0, as in 3,7,11 (Table 3d)
        include_input: mix the first block's input too (A.5); None: yes, unless feature_maps is last
        self_attention: let the predicted patches attend to each other, too (Table 3a)
        softmax_weights: make the mixing weights positive, with a sum of 1 (Table 8)
        project_maps: apply a linear layer to each feature map before mixing (Table 9)
    """

    recipe = dict(  # Table 10; blr is multiplied by lr_scale (A.6); scale of the crop: release
        optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, for images up to 64 pixels and for the micro encoder; lr times lr_scale
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1,
        norm_pix_loss=False, decoder_dim=64, decoder_depth=4, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 mask_ratio=0.75, prediction_ratio=0.75, norm_pix_loss=True, decoder_dim=512,
                 decoder_depth=12, decoder_heads=16, feature_maps="all",
                 include_input: bool = None, self_attention=False, softmax_weights=False,
                 project_maps=False):
        super().__init__()
        self.mix_maps = mix_maps = feature_maps != "last"
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, norm=not mix_maps)
        self.mask_ratio, self.prediction_ratio = mask_ratio, prediction_ratio
        self.norm_pix_loss, self.softmax_weights = norm_pix_loss, softmax_weights
        L, K = self.encoder.num_patches, visible_count(self.encoder.num_patches, mask_ratio)
        self.skipped = int(L * (mask_ratio - prediction_ratio))        # Sec. 3.3; item 2
        if prediction_ratio > mask_ratio:
            raise InputError(f"prediction_ratio {prediction_ratio} must be at most mask_ratio "
                             f"{mask_ratio}: give both")
        if not (prediction_ratio > 0 and K + self.skipped < L):
            raise InputError(f"prediction_ratio {prediction_ratio} must be larger: it predicts "
                             f"none of {L} patches")
        if decoder_depth < 1:
            raise InputError(f"decoder_depth {decoder_depth} is less than 1")
        # A.6: lr = gamma base_lr batchsize / (256 p), prediction ratio gamma, mask ratio p
        self.lr_scale = prediction_ratio / mask_ratio
        p, q = self.encoder.patch_size

        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E)
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            CrossBlock(decoder_dim, dim, decoder_heads, self_attention)
            for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        if mix_maps:
            blocks = range(depth) if feature_maps == "all" else feature_maps
            if isinstance(blocks, (int, float, str)):      # one block; no word but all and last
                blocks = [blocks]
            if (not set(blocks) <= set(range(depth)) or depth - 1 not in blocks
                    or len(set(blocks)) < len(blocks)):
                raise InputError(f"feature_maps {feature_maps} is not all, last or a list of "
                                 f"different blocks from 0 to {depth - 1} that includes the last")
            self.map_ids = sorted(int(i) + 1 for i in blocks)          # in the list of ViT.layers
            if include_input is not False:
                self.map_ids.insert(0, 0)                              # Sec. 3.4, A.5
            n = len(self.map_ids)
            if softmax_weights and n == 1:
                raise InputError("softmax_weights of one map are 1: mix more")
            self.map_proj = nn.ModuleList()                            # Table 9, else empty
            if project_maps:
                self.map_proj.extend(nn.Linear(dim, dim) for _ in self.map_ids)
            self.dec_norms = nn.ModuleList(
                nn.LayerNorm(dim, eps=1e-6) for _ in range(decoder_depth))
            self.wfm = nn.ModuleDict({                                 # named as released
                "linear": nn.Linear(n, decoder_depth, bias=False)})
        elif include_input or softmax_weights or project_maps:
            raise InputError("feature_maps last mixes nothing: it excludes include_input, "
                             "softmax_weights and project_maps")
        self.apply(init_weights)
        if mix_maps:
            nn.init.normal_(self.wfm["linear"].weight, std=n ** -0.5)  # w ~ N(0, 1/n), Sec. 3.4

    def map_weights(self):
        """The weights w_j^k of the mixes (decoder depth,n), a row for each decoder block."""
        W = self.wfm["linear"].weight
        return W.softmax(dim=1) if self.softmax_weights else W         # Table 8

    def encode(self, images, ids_keep):
        """Inter-block attention (Sec. 3.4): what each decoder block reads of the visible patches
        ids_keep (B,K), a list of (B,1+K,D): its mix of the feature maps map_ids, through its norm
        in dec_norms; without mix_maps, the encoder's output."""
        tokens = self.encoder.embed(images, ids_keep)                  # (B, K, D)
        if not self.mix_maps:                                          # Figure 4a
            return [self.encoder.encode(tokens)] * len(self.decoder_blocks)
        maps = self.encoder.layers(tokens)                             # 1 + depth of (B, 1+K, D)
        maps = [maps[i] for i in self.map_ids]                         # f_1 ... f_n
        if self.map_proj:
            maps = [proj(f) for proj, f in zip(self.map_proj, maps)]   # Table 9
        maps = torch.stack(maps)                                       # (n, B, 1+K, D)
        # eq. 1: t_k = sum_j w_j^k f_j, for each decoder block k: (decoder depth, B, 1+K, D)
        mixes = torch.einsum("kn,nbtd->kbtd", self.map_weights(), maps)
        return [norm(t) for norm, t in zip(self.dec_norms, mixes)]     # (B, 1+K, D) each, A.3

    def decode(self, features, ids):
        """Predictions (B,M,p*p*C) of the patches ids (B,M) from the features of encode."""
        x = self.mask_token + self.decoder_pos_embed[0, 1:][ids]       # (B, M, E) queries Sec. 3.2
        for block, y in zip(self.decoder_blocks, features):
            x = block(x, y)                                            # (B, M, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, M, p*p*C)

    def forward(self, images, noise=None):
        """Images (B,C,H,W), normalised, and noise (B,L; None: random) -> the loss, the mean squared
        error of the predicted patches, a float32 scalar, and {"loss": the same, detached}. With
        random masks and without self_attention, the loss is an unbiased estimate of the loss over
        all hidden patches (Sec. 3.3, 4.4)."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        ids = ids_mask[:, self.skipped:]                               # (B, M) a random subset
        pred = self.decode(self.encode(images, ids_keep), ids)         # (B, M, p*p*C)
        target = self.encoder.targets(images, ids, self.norm_pix_loss)  # the same
        loss = (pred.float() - target).square().mean()                 # Sec. 3.3
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised -> the same as decoded, and the mask (B,L), 1 = hidden.
        Nothing is copied: visible patches are predicted too, although the loss leaves them out.
        mask_ratio: None for the model's own. leak_free: see ViT.paste_patches. ValueError if noise
        is a 0/1 mask of another mask_ratio."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        features = self.encode(images, ids_keep)
        # apart, so that with self_attention visible queries do not change the hidden ones
        hidden = self.decode(features, ids_mask)                       # (B, L-K, p*p*C)
        visible = self.decode(features, ids_keep)                      # (B, K, p*p*C)
        pred, ids = torch.cat([visible, hidden], dim=1), torch.cat([ids_keep, ids_mask], dim=1)
        decoded = self.encoder.paste_patches(images, pred, ids, ids_keep, self.norm_pix_loss,
                                             leak_free)                # (B, C, H, W)
        return decoded, mask

    def contributions(self, images, noise):
        """Appendix D: each decoder block's part of the predictions of all hidden patches, (1 +
        decoder depth,B,L-K,p*p*C), first that of mask token and position; ids_keep; ids_mask. The
        parts add up to the prediction: the final norm is linear once its deviation is fixed, here
        to that of the last output; the biases of norm and head are in the first part."""
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        x = self.mask_token + self.decoder_pos_embed[0, 1:][ids_mask]  # (B, L-K, E) f_0
        parts = [x]                                                    # first f_0, then each g_i
        for block, y in zip(self.decoder_blocks, self.encode(images, ids_keep)):
            output = block(x, y)                                       # f_i, from f_{i-1}
            parts.append(output - x)                                   # g_i = f_i - f_{i-1}
            x = output
        norm, head = self.decoder_norm, self.decoder_pred              # h
        std = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()  # (B, L-K, 1)
        parts = torch.stack(parts)                         # (1+decoder depth, B, L-K, E)
        parts = (parts - parts.mean(-1, keepdim=True)) / std * norm.weight
        parts = parts @ head.weight.T                      # (1+decoder depth, B, L-K, p*p*C) h(g_i)
        parts[0] += head(norm.bias)
        return parts, ids_keep, ids_mask

    @torch.no_grad()
    def figures(self, images):
        """{name: (caption, images (rows,columns,C,H,W))}: the parts of Appendix D, and the weights
        of Figure 5c."""
        noise = self.encoder.fixed_noise(images)
        parts, ids_keep, ids_mask = self.contributions(images, noise)
        if self.norm_pix_loss:
            _, mean, std = normalize_patches(self.encoder.targets(images, ids_mask))
            parts = parts * std                                        # of the true patches
            parts[0] += mean
        paste, grey = self.encoder.paste_patches, torch.zeros_like(images)   # 0: the mean colour
        cells = [paste(images, torch.zeros_like(parts[0]), ids_mask, ids_keep)]
        for part in parts:
            cells.append(paste(grey, part, ids_mask, ids_keep))
        cells.append(paste(images, parts.sum(0), ids_mask, ids_keep))
        figures = {"contributions": (
            "visible patches, the part of mask token and position, that of each decoder block, all "
            "together", torch.stack(cells, dim=1))}        # (B, 3 + decoder depth, C, H, W)
        if self.mix_maps:
            W = self.map_weights()                                     # (decoder depth, n)
            values = (127.5 + 127.5 * W / W.abs().max()).expand(1, len(self.mean), -1, -1)
            figures["map_weights"] = (
                "a row for each decoder block, a column for each feature map: its weight in the "
                "mix, 0 in grey, negative ones darker",
                normalize(values, self)[None])             # (1, 1, C, decoder depth, n)
        return figures
