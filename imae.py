"""i-MAE: encode a mixture of two images and separate the two in its latent with linear layers.

Zhang, Shen: i-MAE: Are Latent Representations in Masked Autoencoders Linearly Separable? (arXiv
2210.11470; we cite its supplementary material). Release: https://github.com/VILA-Lab/i-mae

The encoder sees visible patches of a weighted sum of two images. A linear layer for each image maps
its output to a latent z, from which a shared MAE decoder predicts that image: the subordinate one
(of smaller weight), then the dominant one. A frozen MAE, the teacher, gives each z a target, w.

    B images, L patches, K visible, M = L - K masked, D encoder width, E decoder width, p patch side
    mix = alpha x + (1-alpha) y, of images x and partners y; x_1, x_2 = the two as subordinate and
    dominant; z_i = the latent of branch i, w_i = the teacher's of x_i
    mix (B,C,H,W) -> visible patches (B,K,D) -> encoder (B,1+K,D)
    -> for each branch i: z_i (B,1+K,E) -> decoder -> pixels of x_i's masked patches (B,M,p*p*C)
"""

from collections import defaultdict

import torch
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, Block, ViT, denormalize, init_weights, pair, require,
                 sincos_pos_embed)

ALPHAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)            # Figure 4; Figure 2 from 0.1


class IMAE(nn.Module):
    """`loss, metrics = model(images)`; `unmix` separates mixtures, `reconstruct` predicts all
    patches, `encoder` gives features. Defaults: ViT-B/16, MAE's decoder, and targets that are not
    normalised; for ImageNet see item 8.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: the encoder's, see vit.ViT
        teacher: None, or dict(dim, depth, heads) of a frozen MAE's encoder (see teacher_of)
        mask_ratio: fraction of patches to mask (Table 1: 0.75, but 0.5 on ImageNet)
        norm_pix_loss: predict patches normalised by their own mean and variance (Section 1)
        decoder_dim: width of the decoder (MAE's)
        decoder_depth: number of decoder blocks (MAE's)
        decoder_heads: attention heads of the decoder (MAE's)
        branches: 2, or 1 for the subordinate image alone (Sections 2 and 3)
        beta: the weight of the first image is drawn from Beta(beta, beta) (Table 2: 1)
        alpha: fixed weight of the first image; None: drawn from Beta(beta, beta)
        distill_weight: weight of the distillation loss, Algorithm 1's c; None: 1 with a teacher, 0
            without
    """

    recipe = dict(  # Table 1, ImageNet (item 8). CIFAR: blr 1.5e-4, no augmentation. Tiny-ImageNet:
        # blr 1.5e-4, with --same_class 3.5e-4 (Table 2)
        optimizer="adamw", blr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    # ours, for images up to 64 pixels or the micro encoder: MAE's, without augmentation as on CIFAR
    # (Table 1); first for training, then for the model
    small = dict(lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1, crop=1.0, flip=False)
    small_model = dict(decoder_dim=64, decoder_depth=2, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    lr_scale = 1.0
    pairs = True                                           # train.py draws partners, item 7

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
                f"distill_weight {distill_weight} needs a teacher: --teacher FILE")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        self.beta, self.alpha, self.distill_weight = beta, alpha, distill_weight
        p, q = self.encoder.patch_size

        self.decoder_embed = nn.ModuleList(                            # F_1 and F_2
            nn.Linear(dim, decoder_dim) for _ in range(branches))
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
        """Mix images and partners (B,C,H,W), where alpha, a number or (B,), is the weight of
        images. Returns mix (B,C,H,W), and the two as (subordinate, dominant). If alpha is exactly
        0.5, `images` are subordinate (item 3). Raises ValueError if their shapes differ."""
        if partners.shape != images.shape:
            raise ValueError(f"partners {tuple(partners.shape)} for images {tuple(images.shape)}")
        # (1, 1, 1, 1) or (B, 1, 1, 1)
        alpha = torch.as_tensor(alpha, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
        mix = alpha * images + (1 - alpha) * partners                  # (B, C, H, W) Algorithm 1
        # item 3
        x_1 = torch.where(alpha <= 0.5, images, partners)              # (B, C, H, W) subordinate
        x_2 = torch.where(alpha <= 0.5, partners, images)              # (B, C, H, W) dominant
        return mix, (x_1, x_2)

    def encode(self, mix, ids_keep):
        """Encode the visible patches ids_keep (B,K) of mix: the latents [z_1, z_2], (B,1+K,E) each.
        The i in Algorithm 1's encoder E_i and decoder D_i stands for i-MAE: each exists once."""
        mixed = self.encoder(mix, ids_keep)                            # (B, 1+K, D) E_i(mix)
        return [F_i(mixed) for F_i in self.decoder_embed]              # z_1 and z_2, item 2

    def decode(self, z, ids_keep, ids_mask, P):
        """Predict the last P patches in noise order from a latent z (B,1+K,E): (B,P,p*p*C). P = M
        gives the masked patches, P = L all patches. (As in mae.py, but after the embedding.)"""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        x = torch.cat([z[:, :1] + self.decoder_pos_embed[:, :1],       # (B, 1, E) class token
                       z[:, 1:] + pos[ids_keep],                       # (B, K, E) visible patches
                       self.mask_token + pos[ids_mask]], dim=1)        # (B, M, E) masked patches
        for block in self.decoder_blocks:
            x = block(x)                                               # (B, 1+L, E)
        x = x[:, -P:]                                                  # (B, P, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, P, p*p*C)

    @torch.no_grad()
    def teach(self, images, ids_keep):
        """Return the teacher's latents w (B,1+K,E) of the patches ids_keep (B,K) of images."""
        latent = self.teacher["encoder"](images, ids_keep)             # (B, 1+K, D) E_m, item 1
        return self.teacher["decoder_embed"](latent)                   # (B, 1+K, E) item 2

    def forward(self, images, noise=None, partners=None, alpha=None):
        """Return loss and metrics for normalised images and partners (B,C,H,W). noise (B,L) is
        random if None. Partners are Algorithm 1's perm(img); if None, each image's predecessor in
        the batch (item 7). alpha, a number or (B,), is the weight of images; None means draw_alpha.

        Each branch adds two mean squared errors to the loss: that over its image's masked patches
        and, times distill_weight, that between its latent and the teacher's (items 1, 2, 4). The
        loss is a float32 scalar. metrics holds it and its parts, detached: {"loss", "subordinate",
        "dominant" (if that branch exists), "distill" (before distill_weight)}."""
        partners = images.roll(1, 0) if partners is None else partners
        alpha = self.draw_alpha(images.device) if alpha is None else alpha
        mix, xs = self.mix_images(images, partners, alpha)             # (B, C, H, W) each
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        recon, distill = [], torch.zeros((), device=images.device)
        for z, x in zip(self.encode(mix, ids_keep), xs):   # z_i (B, 1+K, E), x_i (B, C, H, W)
            pred = self.decode(z, ids_keep, ids_mask, ids_mask.shape[1])  # (B, M, p*p*C) D_i(z_i)
            target = self.encoder.targets(x, ids_mask, self.norm_pix_loss)  # (B, M, p*p*C) item 5
            recon.append((pred.float() - target).square().mean())      # MSE(p_i, t_i)
            if self.distill_weight > 0:
                w = self.teach(x, ids_keep)                            # (B, 1+K, E) w_i
                distill = distill + (z.float() - w.float()).square().mean()  # l2_loss(z_i, w_i)
        loss = self.distill_weight * distill + sum(recon)              # c distill + recon, item 4
        metrics = {"loss": loss, **dict(zip(("subordinate", "dominant"), recon)),
                   "distill": distill}
        return loss, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Return the reconstruction (B,C,H,W) of normalised, unmixed images (B,C,H,W) by the last
        branch (the dominant one, unless `branches` is 1), and the mask (B,L), 1 = masked. All
        patches are predicted, even visible ones, which the loss ignores. mask_ratio defaults to the
        model's; for leak_free see ViT.paste_patches."""
        decoded, mask = self.unmix(images, images, 1.0, noise, mask_ratio, leak_free)
        return decoded[-1], mask                                       # (B, C, H, W), (B, L)

    @torch.no_grad()
    def unmix(self, images, partners, alpha, noise=None, mask_ratio=None, leak_free=False):
        """Mix images and partners, where alpha is the weight of images, and decode each branch.
        Returns [subordinate, dominant], (B,C,H,W) each, and the mask (B,L). leak_free takes mean
        and variance from the mixture's visible pixels. For the other arguments see reconstruct."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        mix, xs = self.mix_images(images, partners, alpha)             # (B, C, H, W) each
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        decoded = []
        for z, x in zip(self.encode(mix, ids_keep), xs):
            pred = self.decode(z, ids_keep, ids_mask, ids.shape[1])    # (B, L, p*p*C)
            statistics_from = mix if leak_free else x      # (B, C, H, W) mean and variance
            decoded.append(self.encoder.paste_patches(statistics_from, pred, ids, ids_keep,
                                                      self.norm_pix_loss, leak_free))
        return decoded, mask

    def draw_alpha(self, device):
        """Return the weight of images, a 0-dim tensor: one per batch, as in Algorithm 1. It is
        self.alpha or, if that is None, a draw from Beta(beta, beta)."""
        alpha = self.alpha
        if alpha is None:
            alpha = torch.distributions.Beta(self.beta, self.beta).sample().item()
        return torch.full((), alpha, device=device)        # created on the device: no copy

    def from_mae(self, state):
        """Adapt a state dict to this model's names: an MAE's decoder embedding is copied to every
        branch (item 6)."""
        state = dict(state)
        for part in ("weight", "bias"):
            if f"decoder_embed.{part}" in state:
                value = state.pop(f"decoder_embed.{part}")
                for i in range(len(self.decoder_embed)):
                    state[f"decoder_embed.{i}.{part}"] = value
        return state

    # ----------------------------------------------------------------- what the paper analyses
    def same_noise(self, images):
        """Return noise (B,L) that gives all images the same mask, on every call."""
        return self.encoder.fixed_noise(images[:1]).expand(len(images), -1)

    def figures(self, images):
        """Return {"unmix": (caption, images (rows,columns,C,H,W))}: the first two images in
        mixtures, as in Figures 6 and 7."""
        if len(images) < 2:
            return {}
        x_1, x_2, rows = images[:1], images[1:2], []
        for alpha in ALPHAS:
            decoded, mask = self.unmix(x_1, x_2, alpha, self.same_noise(x_1))  # of each branch
            mix, _ = self.mix_images(x_1, x_2, alpha)
            masked = mix * (1 - self.encoder.pixels_of(mask))
            pasted = self.encoder.copy_visible(decoded[0], mix, mask)  # item 9
            rows.append(torch.cat([mix, masked, decoded[0], pasted, x_1, x_2]))
        return {"unmix": (
            "one row per weight of the subordinate image, 0.05 to 0.45: mixture, masked mixture, "
            "predicted subordinate image, the same with the mixture's visible patches, true "
            "subordinate image, dominant image", torch.stack(rows))}

    def latents(self, images, alpha, names):
        """Mix each of images (N,C,H,W) with its predecessor, the dominant image (alpha up to 0.5).
        Returns a dict of latents (N,1+K,D or E): "mixed", the encoder's output for the mixture;
        "control", the teacher's latent of the mixture; and for each branch NAME in `names`, "branch
        NAME", z, and "teacher NAME", w. All use one mask, so token t is always the same patch."""
        parts = defaultdict(list)
        for x, y in zip(images.split(250), images.roll(1, 0).split(250)):
            ids_keep, _, _ = self.encoder.mask(x, self.same_noise(x), self.mask_ratio)
            mix, xs = self.mix_images(x, y, alpha)
            mixed = self.encoder(mix, ids_keep)                        # (b, 1+K, D)
            parts["mixed"].append(mixed)
            parts["control"].append(self.teach(mix, ids_keep))
            for name, F_i, image in zip(names, self.decoder_embed, xs):
                parts[f"branch {name}"].append(F_i(mixed))
                parts[f"teacher {name}"].append(self.teach(image, ids_keep))
        return {name: torch.cat(part) for name, part in parts.items()}

    def subordinate_psnr(self, images, alpha):
        """Return the PSNR (N,) in dB of the masked pixels of images (N,C,H,W), as predicted by the
        first branch from mixtures with their predecessors."""
        decibels = []
        for x, y in zip(images.split(250), images.roll(1, 0).split(250)):
            decoded, mask = self.unmix(x, y, alpha, self.same_noise(x))
            masked = self.encoder.pixels_of(mask)                      # (b, 1, H, W)
            error = (denormalize(decoded[0], self) - denormalize(x, self)).square()
            error = (error * masked).mean((1, 2, 3)) / masked.mean((1, 2, 3))
            decibels.append(-10 * error.clamp(min=1e-10).log10())
        return torch.cat(decibels)

    @torch.no_grad()
    def measures(self, train, val):
        """Measure linear separability (our measure), for normalised images val (N,C,H,W): {title: a
        row {name: number} per weight in ALPHAS}; {} for fewer than 10 images. The title explains
        the numbers. Linear maps are fitted on the images `train`."""
        if len(val) < 10:
            return {}
        names = ("subordinate", "dominant")[:len(self.decoder_embed)]
        rows = []
        for alpha in ALPHAS:
            row = {"alpha": alpha, "psnr": self.subordinate_psnr(val, alpha).mean().item()}
            if self.teacher:
                fit, score = self.latents(train, alpha, names), self.latents(val, alpha, names)
                for source in ("branch", "mixed", "control"):
                    for name in names:
                        key = f"branch {name}" if source == "branch" else source
                        target = f"teacher {name}"
                        row[f"{source} {name}"] = ridge_r2(fit[key], fit[target], score[key],
                                                           score[target])
            rows.append(row)
        title = (f"{len(val)} mixtures of two images for each weight alpha of the subordinate one; "
                 f"psnr: of its masked pixels as predicted, in dB")
        if self.norm_pix_loss:
            title += ", with their patches' true mean and variance"
        if self.teacher:
            title += (f"; R^2 (1 is best) of linear maps, fitted on {len(train)} training images, "
                      f"from the branch or mixed latent to the teacher's latent of the unmixed "
                      f"image; control: from the teacher's own latent of the mixture, although it "
                      f"never saw one in training")
        return {title: rows}


def ridge_r2(x, y, x_val, y_val, weight=1e-3):
    """Return the R^2 on val of a linear map from x (N,T,a) to y (N,T,b), T tokens, fitted by ridge
    regression, (X^T X + lambda I)^-1 X^T Y: the fraction of the variance of y_val, around the mean
    of y at each position, that it explains."""
    x, y, x_val, y_val = (t.cpu().double() for t in (x, y, x_val, y_val))
    x_val, y_val = (x_val - x.mean(0)).flatten(0, 1), (y_val - y.mean(0)).flatten(0, 1)
    x, y = (x - x.mean(0)).flatten(0, 1), (y - y.mean(0)).flatten(0, 1)
    gram = x.T @ x                                                     # (a, a)
    gram += weight * gram.diagonal().mean() * torch.eye(len(gram))     # lambda I
    residual = y_val - x_val @ torch.linalg.solve(gram, x.T @ y)       # (N*T, b)
    return 1 - (residual.square().sum() / y_val.square().sum()).item()


# ------------------------------------------------------------------- what train.py needs for pairs
def draw_partners(indices, labels, same_class, generator):
    """Draw partners (n,) for the images `indices` (n,), out of N images with labels (N,).
    same_class None: any other image. Otherwise semantics-enhanced sampling (Section 1, Table 2): a
    fraction r = same_class of the partners come from the same class, the rest from other classes.
    The k-th of `indices` gets one of its own class if floor((k+1) r) > floor(k r), which spreads
    them evenly over batches."""
    N, n = len(labels), len(indices)
    u = torch.rand(n, dtype=torch.float64, generator=generator)        # one draw for each partner

    def choose(count):
        """Turn u into numbers from 0 to count - 1."""
        return (u * count).long()

    if same_class is None:
        return (indices + 1 + choose(N - 1)) % N
    k = torch.arange(n, dtype=torch.float64)
    same = ((k + 1) * same_class + 1e-9).floor() > (k * same_class + 1e-9).floor()  # 1e-9: rounding
    # in brackets: for labels 1 0 1 0, indices 0 1 2 3
    by_class = labels.argsort(stable=True)                 # one class after the other (1 3 0 2)
    place = by_class.argsort()[indices]                    # of each image in by_class (2 0 3 1)
    sizes = labels.bincount()                              # of the classes (2 2)
    size = sizes[labels[indices]]                          # of each image's class (2 2 2 2)
    start = (sizes.cumsum(0) - sizes)[labels[indices]]     # of its class in by_class (2 0 2 0)
    # a place in its class, not its own (3 1 2 0), or one in another class (image 0: place 0 or 1)
    mate = start + (place - start + 1 + choose(size - 1)) % size
    other = (start + size + choose(N - size)) % N
    return by_class[torch.where(same, mate, other)]        # same class: (2 3 0 1)


def check_same_class(labels, classes, same_class):
    """Raise InputError if draw_partners could not find partners among images with labels (N,) and
    class names (empty: unlabelled), for a fraction same_class or None."""
    if same_class is None:
        return
    sizes = labels.unique(return_counts=True)[1]           # of each class
    has_mates = same_class == 0 or sizes.min() >= 2
    has_others = same_class == 1 or len(sizes) >= 2
    require(classes and has_mates and has_others,
            f"--same_class {same_class} needs class folders: above 0, each needs at least two "
            f"images; below 1, there must be at least two folders")


def teacher_of(checkpoint, config):
    """Use a checkpoint, {"method", "config", "model"} as returned by train.read, as the teacher of
    an IMAE with constructor arguments `config`. Returns its {dim, depth, heads} and the state dict
    for IMAE.teacher. Raises InputError unless it is an MAE with the same image and patch size,
    channels and decoder width."""
    sizes, state = checkpoint["config"], checkpoint["model"]
    require(checkpoint["method"] in ("mae", None)
            and state.keys() >= {"decoder_embed.weight", "encoder.norm.weight"},
            "the teacher is not an MAE with a decoder")
    theirs = {**sizes, "decoder_dim": len(state["decoder_embed.weight"])}
    for name in ("img_size", "patch_size", "in_chans", "decoder_dim"):
        require(pair(theirs[name]) == pair(config[name]),  # a size may be 8 or (8, 8)
                f"the teacher has {name} {theirs[name]}, this model {config[name]}")
    return ({name: sizes[name] for name in ("dim", "depth", "heads")},
            {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder_embed."))})


# Paper and release: where they differ, and what we do
#   1. Algorithm 1 shows no masking, neither for teacher nor student, and gives the teacher the
#      unmixed images. The release gives it the student's visible patches, but computes both latents
#      from the mixture. Here it gets the student's visible patches of the unmixed images.
#   2. Algorithm 1's l2_loss(z1, x1) means w1. The loss compares the teacher's latents after its
#      decoder embedding with z after F_1 and F_2, which map to the decoder's width. It averages
#      over all values, including the class token's (release).
#   3. At exactly alpha = 0.5, x is the subordinate image (release; Algorithm 1: y).
#   4. The branches' losses are added, not averaged (the paper and the release).
#   5. Algorithm 1 always normalises targets; Section 1 has plain pixels on CIFAR and Tiny-ImageNet.
#      The release accepts norm_pix_loss and ignores it; here it works.
#   6. The release keeps MAE's decoder embedding but never uses it; the branches are initialised
#      from it when training starts from an MAE (`--init` here). Otherwise they start from Xavier
#      initialisation (release: PyTorch's default).
#   7. The paper mixes within the batch; train.py draws partners from the whole data set
#      (draw_partners), so that `--same_class` can be exact. Called without partners, `forward`
#      pairs images within the batch.
#   8. On ImageNet, Section 1 uses MAE's settings, including blr 1.5e-4, but Table 1 says blr 1e-3;
#      we follow Table 1. Its mask ratio of 0.5 is for figures, without normalised targets; our
#      default is 0.75, for classification, to be used with `--norm_pix_loss` (Section 1). Settings
#      given by neither are MAE's, including the 800 epochs (release: 400).
#   9. The release's figures paste in the visible patches of x_1; ours, those of the mixture.
