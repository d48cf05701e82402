"""i-MAE: encode a mixture of two images, and separate it into two latents with linear layers.

The encoder sees the visible patches of a weighted sum of two images. Two linear layers, F_1 and
F_2, turn its output into two latents, one for each image. From each latent, the same MAE decoder
predicts the corresponding image. With distillation, a frozen MAE (the teacher) also encodes the
visible patches of each unmixed image. The loss sums two mean squared errors for each image: that of
its masked patches and, with distillation, that between its latent and the teacher's.

Zhang, Shen: i-MAE: Are Latent Representations in Masked Autoencoders Linearly Separable? (arXiv
2210.11470; we cite its supplementary material). Release: https://github.com/VILA-Lab/i-mae

    B images, L patches, K visible, M = L - K masked, D encoder width, E decoder width, p patch side
    mix = alpha images + (1-alpha) partners. Of the two, x_1 has less weight (subordinate), x_2 more
    (dominant). x_i has two latents: z_i = F_i(encoder(mix)), and the teacher's w_i. The
    paper's E_i (i: i-MAE) is our encoder, D_i the decoder, E_m the teacher's encoder, of width D_m
    mix (B,C,H,W) -> visible tokens (B,K,D), those with the lowest noise (B,L) -> encoder (B,1+K,D)
    -> for each branch i: z_i (B,1+K,E) -> decoder -> masked patches of x_i (B,M,p*p*C)
"""

import torch
from torch import nn

from vit import (Block, Method, ViT, gather_patches, init_weights, normalize_patches, pair,
                 patchify, require, sincos_pos_embed)


class IMAE(Method):
    """`loss, metrics = model(images)`; `unmix` separates mixtures; `reconstruct` predicts all
    patches; `encoder` returns features. Defaults: ViT-B, MAE's decoder and plain targets (item 8).

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        teacher: dict(dim, depth, heads) of a frozen MAE's encoder (default: no teacher)
        mask_ratio: fraction of patches to mask (Table 1: 0.75, but 0.5 on ImageNet)
        norm_pix_loss: predict patches normalised by their own mean and variance (Section 1)
        decoder_dim: width of the decoder (as in MAE)
        decoder_depth: number of decoder blocks (as in MAE)
        decoder_heads: attention heads of the decoder (as in MAE)
        branches: 2 (Section 3), or 1 to predict only the subordinate image (Section 2)
        beta: the images' weight in the mixture is drawn from Beta(b, b), b = beta (Table 2: 1)
        alpha: the images' fixed weight in the mixture (default: drawn from Beta(beta, beta))
        distill_weight: weight of the distillation loss, Algorithm 1's c (default: 1 with a teacher,
            as in the release; 0 without)
    """

    recipe = dict(  # Table 1 for ImageNet (item 8); CIFAR, Tiny-ImageNet: see tests/docs/FLAGS.md
        optimizer="adamw", blr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    # ours, for encoders narrower than base; images are not augmented, as on CIFAR in Table 1.
    # CIFAR-10, micro, 3 seeds, with a teacher: masked pixels 17.86 dB, 20-NN 43.9%
    small_recipe = dict(Method.small_recipe, crop=1.0, flip=False)
    small_config = dict(decoder_dim=64, decoder_depth=2, decoder_heads=2)
    crops = 2                                              # of an image and of its partner

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12,
                 teacher=None, *, mask_ratio=0.75, norm_pix_loss=False, decoder_dim=512,
                 decoder_depth=8, decoder_heads=16, branches=2, beta=1.0, alpha: float = None,
                 distill_weight: float = None):
        super().__init__()
        require(branches in (1, 2), f"branches {branches} must be 1 or 2")
        require(beta > 0, f"beta {beta} must be above 0")
        require(alpha is None or 0 <= alpha <= 1, f"alpha {alpha} must be between 0 and 1")
        if distill_weight is None:
            distill_weight = 1.0 if teacher else 0.0
        require(teacher or distill_weight == 0,
                f"distill_weight {distill_weight} needs a teacher: pass --teacher FILE")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        self.beta, self.alpha, self.distill_weight = beta, alpha, distill_weight
        p, q = self.encoder.patch_size

        # F_1 and F_2, the paper's linear separation: one decoder embedding per branch
        self.decoder_embed = nn.ModuleList(nn.Linear(dim, decoder_dim) for _ in range(branches))
        self.mask_token = nn.Parameter(torch.empty(1, 1, decoder_dim).normal_(std=0.02))
        self.decoder_pos_embed = nn.Parameter(                         # (1, 1+L, E)
            sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_dim, decoder_heads) for _ in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.decoder_pred = nn.Linear(decoder_dim, p * q * in_chans)
        init_weights(self)                                             # item 6
        self.teacher = None
        if teacher:                                        # E_m and its decoder embedding, item 2
            self.teacher = nn.ModuleDict(dict(
                encoder=ViT(img_size, patch_size, in_chans, **teacher),
                decoder_embed=nn.Linear(teacher["dim"], decoder_dim))).requires_grad_(False)

    def mix_images(self, images, partners, alpha):
        """Mix images and partners (B,C,H,W). alpha, the weight of `images`, is a number or (B,).
        Returns the mixture and (x_1, x_2), the subordinate and the dominant images, (B,C,H,W) each.
        At alpha 0.5, `images` are subordinate (item 3). Raises ValueError if the shapes differ."""
        if partners.shape != images.shape:
            raise ValueError(f"partners are {tuple(partners.shape)}, but images are "
                             f"{tuple(images.shape)}")
        # (1, 1, 1, 1) or (B, 1, 1, 1)
        alpha = torch.as_tensor(alpha, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
        mix = alpha * images + (1 - alpha) * partners                  # (B, C, H, W) Algorithm 1
        x_1 = torch.where(alpha <= 0.5, images, partners)              # (B, C, H, W) subordinate
        x_2 = torch.where(alpha <= 0.5, partners, images)              # (B, C, H, W) dominant
        return mix, (x_1, x_2)

    def encode(self, mix, ids_keep):
        """Encode the visible patches ids_keep (B,K) of mix. Returns [z_1, z_2], (B,1+K,E) each."""
        mixed = self.encoder(mix, ids_keep)                            # (B, 1+K, D)
        return [F_i(mixed) for F_i in self.decoder_embed]              # z_1 and z_2, item 2

    def decode(self, z, ids_keep, ids_mask, visible_too=False):
        """Predict the masked patches ids_mask (B,M) from a latent z (B,1+K,E), much as in mae.py.
        Returns (B,M,p*p*C). With visible_too, the visible patches come first: (B,L,p*p*C)."""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        tokens = torch.cat([z[:, :1] + self.decoder_pos_embed[:, :1],  # (B, 1, E) class token
                            z[:, 1:] + pos[ids_keep],                  # (B, K, E) visible patches
                            self.mask_token + pos[ids_mask]], dim=1)   # (B, M, E) masked patches
        for block in self.decoder_blocks:
            tokens = block(tokens)                                     # (B, 1+L, E)
        tokens = tokens[:, 1 if visible_too else 1 + ids_keep.shape[1]:]       # (B, M or L, E)
        return self.decoder_pred(self.decoder_norm(tokens))            # (B, M or L, p*p*C)

    @torch.no_grad()
    def teach(self, images, ids_keep):
        """Return the teacher's latents (B,1+K,E) for the patches ids_keep (B,K) of images."""
        latent = self.teacher["encoder"](images, ids_keep)             # (B, 1+K, D_m) E_m, item 1
        # project from width D_m to E, that of z_i; Algorithm 1 omits this (item 2)
        return self.teacher["decoder_embed"](latent)                   # (B, 1+K, E)

    def forward(self, images, noise=None, partners=None, alpha=None):
        """Return loss and metrics for normalised images and partners (B,C,H,W). Partners are
        Algorithm 1's perm(img), by default each image's predecessor in the batch (item 7). noise
        (B,L) and alpha, the weight of `images`, are drawn by default. alpha is a number or (B,).

        The loss, a float32 scalar, is a sum over branches. Each branch adds the mean squared error
        of its masked patches, plus distill_weight times that between its latent and the teacher's
        (items 1, 2, 4). metrics has detached scalars: "loss"; the patch errors "subordinate" and,
        with two branches, "dominant"; and "distill", the unweighted sum of the latent errors."""
        partners = images.roll(1, 0) if partners is None else partners
        alpha = self.draw_alpha(images.device) if alpha is None else alpha
        mix, xs = self.mix_images(images, partners, alpha)             # (B, C, H, W) each
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        recon, distill = [], torch.zeros((), device=images.device)
        # Algorithm 1 writes both branches out: `recon` compares p_i (pred) with t_i (target), and
        # `distill` compares z_i with w_i
        for z_i, x_i in zip(self.encode(mix, ids_keep), xs):           # (B, 1+K, E), (B, C, H, W)
            pred = self.decode(z_i, ids_keep, ids_mask)                # (B, M, p*p*C)
            # (B, M, p*p*C), float32
            target = gather_patches(patchify(x_i, self.encoder.patch_size), ids_mask).float()
            if self.norm_pix_loss:                                     # item 5
                target, _, _ = normalize_patches(target)               # (B, M, p*p*C)
            recon.append((pred - target).square().mean())
            if self.distill_weight > 0:
                w_i = self.teach(x_i, ids_keep)                        # (B, 1+K, E)
                distill = distill + (z_i.float() - w_i).square().mean()        # item 2
        # Algorithm 1: c * distill + recon, item 4
        loss = self.distill_weight * distill + sum(recon)              # scalar
        metrics = {"loss": loss, **dict(zip(("subordinate", "dominant"), recon)),
                   "distill": distill}
        return loss, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Reconstruct normalised, unmixed images (B,C,H,W) with the dominant branch, or with the
        only one. Returns the result (B,C,H,W) and the mask (B,L), 1 = masked. Visible patches are
        also predicted, although the loss ignores them. With leak_free, the true patches' mean and
        variance are not used (see ViT.paste_patches)."""
        # with alpha 1, the mixture is the image itself, and the image is dominant
        decoded, mask = self.unmix(images, images, 1.0, noise, mask_ratio, leak_free)
        return decoded[-1], mask                                       # (B, C, H, W), (B, L)

    @torch.no_grad()
    def unmix(self, images, partners, alpha, noise=None, mask_ratio=None, leak_free=False):
        """Mix images and partners, and decode each branch. alpha is the weight of `images`. Returns
        [subordinate, dominant], (B,C,H,W) each, and the mask (B,L). With leak_free, mean and
        variance are those of the mixture's visible pixels. For other arguments, see reconstruct."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        mix, xs = self.mix_images(images, partners, alpha)             # (B, C, H, W) each
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        decoded = []
        for z_i, x_i in zip(self.encode(mix, ids_keep), xs):
            pred = self.decode(z_i, ids_keep, ids_mask, visible_too=True)      # (B, L, p*p*C)
            statistics_from = mix if leak_free else x_i    # (B, C, H, W) for mean and variance
            decoded.append(self.encoder.paste_patches(statistics_from, pred, ids, ids_keep,
                                                      self.norm_pix_loss, leak_free))
        return decoded, mask

    def draw_images(self, order, labels, run, generator):
        """Return an epoch's images and their partners from the whole data set (item 7)."""
        check_same_class(labels, run.same_class)
        return [order, draw_partners(order, labels, run.same_class, generator)]

    def draw_batch(self, crops, labels, noise):
        """Return forward's arguments: images, noise, partners and one alpha for the whole batch."""
        return [*super().draw_batch(crops, labels, noise), self.draw_alpha(noise.device)]

    def draw_alpha(self, device):
        """Return the weight of `images`, a 0-dim tensor: one for the whole batch, as in Algorithm
        1. It is self.alpha if set, otherwise a draw from Beta(beta, beta)."""
        alpha = self.alpha
        if alpha is None:
            alpha = torch.distributions.Beta(self.beta, self.beta).sample().item()
        return torch.full((), alpha, device=device)        # created on the device: no copy

    def from_mae(self, state):
        """Adapt an MAE's state dict to this model, for --init: each branch's F_i becomes a copy
        of the MAE's decoder embedding (item 6)."""
        state = dict(state)
        for part in ("weight", "bias"):
            if f"decoder_embed.{part}" in state:
                value = state.pop(f"decoder_embed.{part}")
                for branch in range(len(self.decoder_embed)):
                    state[f"decoder_embed.{branch}.{part}"] = value
        return state


# ------------------------------------------------------------------------------ pairs and teachers
def draw_partners(indices, labels, same_class, generator):
    """Draw a partner for each of the images `indices` (n,) from N images with labels (N,). Returns
    the partners' indices (n,). If same_class is None, any other image can be drawn. Otherwise,
    same_class is the fraction r of images whose partner has the same class (semantics-enhanced
    sampling: Section 1, Table 2). Image k of `indices` gets a mate, i.e. a same-class partner, if
    floor((k+1) r) > floor(k r). This spreads mates evenly over batches."""
    N, n = len(labels), len(indices)
    u = torch.rand(n, dtype=torch.float64, generator=generator)        # one draw for each partner

    def choose(count):
        """Turn u into numbers from 0 to count - 1."""
        return (u * count).long()

    if same_class is None:
        return (indices + 1 + choose(N - 1)) % N
    k = torch.arange(n, dtype=torch.float64)
    same = ((k + 1) * same_class + 1e-9).floor() > (k * same_class + 1e-9).floor()  # 1e-9: rounding
    # Sort the images by class: each class is a block. A mate comes from the image's own block,
    # counting from the image; any other partner from outside, counting from the block's end.
    # Both counts wrap around. In parentheses: an example with labels 1 0 1 0 and indices 0 1 2 3.
    by_class = labels.argsort(stable=True)                 # images in sorted order (1 3 0 2)
    place = by_class.argsort()[indices]                    # inverse permutation: places (2 0 3 1)
    sizes = labels.bincount()                              # size of each block (2 2)
    size = sizes[labels[indices]]                          # size of each image's block (2 2 2 2)
    start = (sizes.cumsum(0) - sizes)[labels[indices]]     # start of each image's block (2 0 2 0)
    mate = start + (place - start + 1 + choose(size - 1)) % size   # the mate's place (3 1 2 0)
    other = (start + size + choose(N - size)) % N          # outside the block (for image 0: 0 or 1)
    return by_class[torch.where(same, mate, other)]        # if all get mates: images (2 3 0 1)


def check_same_class(labels, same_class):
    """Raise InputError if images with labels (N,) do not allow this same_class (see draw_partners).
    """
    sizes = labels.unique(return_counts=True)[1]           # size of each class
    has_mates = same_class in (None, 0) or sizes.min() >= 2
    has_others = same_class in (None, 1) or len(sizes) >= 2
    require(same_class is None or labels.min() >= 0 and has_mates and has_others,
            f"--same_class {same_class} needs class folders: at least two images in each, if it "
            f"is above 0, and at least two folders, if it is below 1")


def teacher_state(checkpoint, config):
    """Return the teacher's state dict, for an IMAE with the constructor arguments `config`, from a
    checkpoint that train.read_checkpoint has read. Raises InputError unless it holds an MAE of the
    same image and patch size, channels and decoder width."""
    sizes, state = checkpoint["config"], checkpoint["model"]
    require(checkpoint["method"] in ("mae", None)
            and state.keys() >= {"decoder_embed.weight", "encoder.norm.weight"},
            "the teacher is not an MAE with a decoder")
    theirs = {**sizes, "decoder_dim": len(state["decoder_embed.weight"])}
    for name in ("img_size", "patch_size", "in_chans", "decoder_dim"):
        require(pair(theirs[name]) == pair(config[name]),  # a size may be 8 or (8, 8)
                f"the teacher has {name} {theirs[name]}, this model {config[name]}")
    return {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder_embed."))}


# Paper and release: where they differ, and what we do
#   1. In Algorithm 1, no input is masked; the teacher sees x_1 and x_2. The release's teacher sees
#      the mixture's visible patches, so w_1 = w_2. Ours sees the visible patches of x_1 and x_2.
#   2. In Algorithm 1's l2_loss(z1, x1), x1 must mean w1. As in the release, w_i is the output of
#      the teacher's decoder embedding, and z_i that of F_i. The loss includes the class token.
#   3. In Algorithm 1, x1 and x2 are first the images and partners, later our x_1 and x_2. At alpha
#      0.5, images count as subordinate, as in the release; in Algorithm 1, partners do.
#   4. As in the paper and the release, we add the losses of the branches, and do not average them.
#   5. Algorithm 1 always normalises targets; in Section 1 they are plain pixels on CIFAR and
#      Tiny-ImageNet. The release accepts norm_pix_loss and ignores it; here it works.
#   6. If training starts from an MAE (`--init`), F_1 and F_2 are copies of its decoder embedding.
#      Otherwise they have Xavier initialisation (in the release, PyTorch's default). The release's
#      model also has MAE's decoder embedding, but does not use it.
#   7. The paper mixes within the batch, and so does `forward` without partners. train.py draws
#      partners from the whole data set (draw_partners), so that `--same_class` can be exact. The
#      release's `classmixINPair` is missing, but gets same_prob 1.0: probably pairs of one class.
#   8. On ImageNet, Section 1 uses "MAE's specifications", i.e. blr 1.5e-4. We follow Table 1, which
#      has 1e-3. For classification, Section 1 uses mask ratio 0.75 (our default) and normalised
#      targets; for figures, 0.5 and plain ones. The rest is MAE's, e.g. 800 epochs.
