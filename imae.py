"""i-MAE: encode a mixture of two images, and separate its latent into the two by linear layers.

Zhang, Shen: i-MAE: Are Latent Representations in Masked Autoencoders Linearly Separable? (arXiv
2210.11470). All numbers of sections, tables, figures and algorithms here are those of its
supplementary material. Release: https://github.com/VILA-Lab/i-mae

The encoder sees the visible patches of a weighted sum of two images. One linear layer for each
image maps the latent to the input of a shared MAE decoder, which predicts that image: branch 1 the
subordinate one (of the smaller weight), branch 2 the dominant one. Distillation pulls each branch
towards the latent that a frozen MAE, the teacher, has of that image unmixed.

    B images, L patches, K visible, M = L - K hidden, D encoder width, E decoder width, p patch side
    x = images and y = partners; a the weight of x: Algorithm 1's alpha, `mix` in the code, where
    Algorithm 1's mix is `mixture`;
    x_1 and x_2 the same two, subordinate and dominant; z_1, z_2 the branches' latents, w_1, w_2 the
    teacher's. Algorithm 1's E_i and D_i are i-MAE's encoder and decoder, one for both branches
    a x + (1-a) y (B,C,H,W) -> visible patches (B,K,D) -> encoder (B,1+K,D)
    -> for each branch i: z_i (B,1+K,E) -> decoder -> pixels of x_i's hidden patches (B,M,p*p*C)

Where paper and release differ, and what is done here:
  1. Algorithm 1 leaves masking out, of the teacher's input as of the student's, and gives the
     teacher the unmixed images. The release gives it the student's visible patches, but computes
     both latents from the mixture. Here: those patches, as released, of the unmixed images.
  2. Algorithm 1's l2_loss(z1, x1) means w1. What is compared are the teacher's latents after its
     decoder embedding, and z after F_1 and F_2, which map to the decoder's width; the l2_loss is
     the mean over all values, the class token's too (release).
  3. At exactly a = 0.5, x is the subordinate image (release; Algorithm 1: y).
  4. The branches' losses are added, not averaged (the paper and the release).
  5. Algorithm 1 always normalises targets; Section 1 has plain pixels on CIFAR and Tiny-ImageNet.
     The release accepts norm_pix_loss and ignores it; here it works.
  6. The release keeps MAE's decoder embedding but never uses it; the branches are initialised from
     it when training starts from an MAE (`--init` here). Otherwise they start from xavier's, in the
     release from torch's default.
  7. The paper mixes within the batch; train.py draws partners from the whole data set
     (draw_partners), so that `--same_class` can be exact. Bare calls use the batch.
  8. ImageNet: Section 1 says MAE's settings, blr 1.5e-4 among them, Table 1 says blr 1e-3: as in
     Table 1. Its mask ratio of 0.5 is for figures, without normalised targets; here it is 0.75, for
     classification, with `--norm_pix_loss` (Section 1). What neither states is MAE's, as are 800
     epochs (release: 400).
  9. The release's figures paste the visible patches of x_1, here those of the mixture.
"""

from collections import defaultdict

import torch
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, Block, InputError, ViT, denormalize, init_weights,
                 pair, sincos_pos_embed, visible_count)

MIXES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45)             # Section 2, Figures 2 and 4


class IMAE(nn.Module):
    """`loss, metrics = model(images)`; `unmix` separates mixtures, `reconstruct` predicts all
    patches, `encoder` gives features. Defaults: ViT-B/16, MAE's decoder, targets not normalised.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        teacher: None, or dict(dim, depth, heads) of a frozen MAE's encoder (teacher_of)
        mask_ratio: share of the patches that is hidden (Table 1: 0.75, but 0.5 on ImageNet)
        norm_pix_loss: predict patches normalised by their own mean and variance (Section 1)
        decoder_dim: width of the decoder (MAE's)
        decoder_depth: number of decoder blocks (MAE's)
        decoder_heads: attention heads of the decoder (MAE's)
        branches: 2, or 1 for the subordinate image alone (Section 2)
        beta: the weight of the first image is drawn from Beta(beta, beta) (Table 2: 1)
        mix: a fixed weight of the first image; None: it is drawn
        distill_weight: weight of the distillation loss, Algorithm 1's c; None: 1 with a teacher, 0
            without
    """

    recipe = dict(  # Table 1, ImageNet (item 8). CIFAR: blr 1.5e-4, no augmentation. Tiny-ImageNet:
        # blr 1.5e-4, with --same_class 3.5e-4 (Table 2)
        optimizer="adamw", blr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, for images up to 64 pixels and for the micro encoder: MAE's, without
        # augmentation as on CIFAR (Table 1)
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1, crop=1.0, flip=False,
        decoder_dim=64, decoder_depth=2, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    lr_scale = 1.0
    pairs = True                                                       # train.py draws partners

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12,
                 teacher=None, *, mask_ratio=0.75, norm_pix_loss=False, decoder_dim=512,
                 decoder_depth=8, decoder_heads=16, branches=2, beta=1.0, mix: float = None,
                 distill_weight: float = None):
        super().__init__()
        if branches not in (1, 2):
            raise InputError(f"branches {branches} is not 1 or 2")
        if not beta > 0:                                   # also if it is nan
            raise InputError(f"beta {beta} is not above 0")
        if distill_weight is None:
            distill_weight = 1.0 if teacher else 0.0
        if not distill_weight >= 0:
            raise InputError(f"distill_weight {distill_weight} is less than 0")
        if distill_weight > 0 and not teacher:
            raise InputError(f"distill_weight {distill_weight} needs a teacher: --teacher FILE")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        visible_count(self.encoder.num_patches, mask_ratio)            # InputError, unless it fits
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        self.beta, self.mix, self.distill_weight = beta, mix, distill_weight
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
        self.apply(init_weights)
        self.teacher = None
        if teacher:                                                    # E_m, loaded by train.py
            self.teacher = nn.ModuleDict(dict(
                encoder=ViT(img_size, patch_size, in_chans, **teacher),
                decoder_embed=nn.Linear(teacher["dim"], decoder_dim))).requires_grad_(False)

    def mixture(self, images, partners, mix):
        """The mixture (B,C,H,W) of images and partners (B,C,H,W), and the two as (subordinate,
        dominant); `mix` is the weight of images, a number or (B,). At 0.5 images are subordinate
        (item 3). ValueError if shapes differ."""
        if partners.shape != images.shape:
            raise ValueError(f"partners {tuple(partners.shape)} for images {tuple(images.shape)}")
        a = torch.as_tensor(mix, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
        x1 = torch.where(a <= 0.5, images, partners)                   # subordinate
        x2 = torch.where(a <= 0.5, partners, images)                   # dominant
        return a * images + (1 - a) * partners, (x1, x2)               # a x + (1 - a) y

    def encode(self, mixture, ids_keep):
        """A mixture's visible patches ids_keep (B,K) -> the latents [z_1, z_2], (B,1+K,E) each."""
        latent = self.encoder(mixture, ids_keep)                       # (B, 1+K, D) E_i(mixture)
        return [F_i(latent) for F_i in self.decoder_embed]             # z_1 = F_1(latent), z_2

    def decode(self, z, ids_keep, ids_mask, count):
        """A latent z (B,1+K,E) -> predictions (B,count,p*p*C) of the last `count` tokens. Their
        order is class token, visible, hidden: the last M are the hidden patches, the last L all
        patches. (As in mae.py.)"""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        x = torch.cat([z[:, :1] + self.decoder_pos_embed[:, :1],       # (B, 1, E) class token
                       z[:, 1:] + pos[ids_keep],                       # (B, K, E) visible patches
                       self.mask_token + pos[ids_mask]], dim=1)        # (B, M, E) hidden patches
        for block in self.decoder_blocks:
            x = block(x)                                               # (B, 1+L, E)
        x = x[:, -count:]                                              # (B, count, E)
        return self.decoder_pred(self.decoder_norm(x))                 # (B, count, p*p*C)

    @torch.no_grad()
    def teach(self, images, ids_keep):
        """The teacher's latents w (B,1+K,E) of the patches ids_keep (B,K) of images."""
        return self.teacher["decoder_embed"](self.teacher["encoder"](images, ids_keep))

    def forward(self, images, noise=None, partners=None, mix=None):
        """Images and partners (B,C,H,W), normalised, noise (B,L; None: random) and mix, the weight
        of images, a number or (B,) (None: draw_mix) -> the loss, a float32 scalar, and its parts,
        detached: {"loss", "subordinate", "dominant" (if there is that branch), "distill" (before
        distill_weight)}. Each branch adds the mean squared error of its image's hidden patches and,
        to distill, that between its latent and the teacher's (items 1, 2, 4). Partners: Algorithm
        1's perm(img), which train.py draws; None: the image before, in the batch."""
        partners = images.roll(1, 0) if partners is None else partners
        mix = self.draw_mix(images.device) if mix is None else mix
        mixture, xs = self.mixture(images, partners, mix)              # x_1, x_2
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        recon, distill = [], torch.zeros((), device=images.device)
        ws = (None, None)
        if self.distill_weight > 0:                                    # both in one call: faster
            n = len(self.decoder_embed)                                # branches
            ws = self.teach(torch.cat(xs[:n]), ids_keep.repeat(n, 1)).chunk(n)  # w_i = E_m(x_i)
        for z, x, w in zip(self.encode(mixture, ids_keep), xs, ws):    # z_i, w_i (B, 1+K, E), x_i
            pred = self.decode(z, ids_keep, ids_mask, ids_mask.shape[1])  # p_1, p_2 = D_i(z)
            target = self.encoder.targets(x, ids_mask, self.norm_pix_loss)  # t_i = norm_pix(x_i)
            recon.append((pred.float() - target).square().mean())      # MSE(p_i, t_i)
            if self.distill_weight > 0:
                distill = distill + (z.float() - w.float()).square().mean()  # l2_loss(z_i, w_i)
        loss = self.distill_weight * distill + sum(recon)              # c distill + recon
        metrics = {"loss": loss, **dict(zip(("subordinate", "dominant"), recon)),
                   "distill": distill}
        return loss, {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised and not mixed -> the same as decoded by the last branch (the
        dominant one, unless `branches` is 1), and the mask (B,L), 1 = hidden. Nothing is copied:
        visible patches are predicted too, although the loss leaves them out. mask_ratio: None for
        the model's own. leak_free: see ViT.paste_patches. ValueError if noise is a 0/1 mask of
        another mask_ratio."""
        decoded, mask = self.unmix(images, images, 1.0, noise, mask_ratio, leak_free)
        return decoded[-1], mask

    @torch.no_grad()
    def unmix(self, images, partners, mix, noise=None, mask_ratio=None, leak_free=False):
        """A mixture of images and partners as decoded by each branch, [subordinate, dominant] of
        (B,C,H,W), and the mask (B,L); mix is the weight of images. The rest: see reconstruct."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        mixture, xs = self.mixture(images, partners, mix)
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact=True)
        ids = torch.cat([ids_keep, ids_mask], dim=1)                   # (B, L) in noise order
        decoded = []
        for z, x in zip(self.encode(mixture, ids_keep), xs):
            pred = self.decode(z, ids_keep, ids_mask, ids.shape[1])    # (B, L, p*p*C)
            statistics_from = mixture if leak_free else x              # mean and variance
            decoded.append(self.encoder.paste_patches(statistics_from, pred, ids, ids_keep,
                                                      self.norm_pix_loss, leak_free))
        return decoded, mask

    def draw_mix(self, device):
        """The weight of images, a 0-dim tensor, one for the batch as in Algorithm 1: the argument
        mix, or drawn from Beta(b, b)."""
        mix = self.mix
        if mix is None:
            mix = torch.distributions.Beta(self.beta, self.beta).sample().item()
        return torch.full((), mix, device=device)          # filled there: no copy from the CPU

    def from_mae(self, state):
        """A state dict in this model's names: an MAE's decoder embedding becomes all branches'."""
        state = dict(state)
        for part in ("weight", "bias"):
            if f"decoder_embed.{part}" in state:
                value = state.pop(f"decoder_embed.{part}")
                for i in range(len(self.decoder_embed)):
                    state[f"decoder_embed.{i}.{part}"] = value
        return state

    def same_noise(self, images):
        """The same noise (B,L) for all images, in each call: one mask for all."""
        return self.encoder.fixed_noise(images[:1]).expand(len(images), -1)

    def figures(self, images):
        """{"unmix": (caption, images (rows,columns,C,H,W))}: the first two images in mixtures, as
        in Figures 6 and 7."""
        if len(images) < 2:
            return {}
        x1, x2, rows = images[:1], images[1:2], []
        for a in MIXES:
            decoded, mask = self.unmix(x1, x2, a, self.same_noise(x1))  # of each branch
            mixture, _ = self.mixture(x1, x2, a)
            masked = mixture * (1 - self.encoder.pixels_of(mask))
            pasted = self.encoder.copy_visible(decoded[0], mixture, mask)
            rows.append(torch.cat([mixture, masked, decoded[0], pasted, x1, x2]))
        return {"unmix": (
            "a row for each weight of the subordinate image, 0.05 to 0.45: mixture, masked, "
            "subordinate image as predicted, with the mixture's visible patches, subordinate "
            "image, dominant image", torch.stack(rows))}

    def latents(self, images, mix, names):
        """Latents of images (N,C,H,W), each mixed with the image before it, which is the dominant
        one: {"mixed": the encoder's, "control": the teacher's of the mixture, "branch NAME": z,
        "teacher NAME": w}, (N,1+K,D or E) each. All under one mask: token t is the same patch."""
        parts = defaultdict(list)
        for x, y in zip(images.split(250), images.roll(1, 0).split(250)):
            ids_keep, _, _ = self.encoder.mask(x, self.same_noise(x), self.mask_ratio)
            mixture, xs = self.mixture(x, y, mix)
            mixed = self.encoder(mixture, ids_keep)
            parts["mixed"].append(mixed)
            parts["control"].append(self.teach(mixture, ids_keep))
            for name, F_i, image in zip(names, self.decoder_embed, xs):
                parts[f"branch {name}"].append(F_i(mixed))
                parts[f"teacher {name}"].append(self.teach(image, ids_keep))
        return {name: torch.cat(part) for name, part in parts.items()}

    def subordinate_psnr(self, images, mix):
        """PSNR (N,) in dB of hidden pixels of images (N,C,H,W) as the first branch predicts them
        from mixtures with the image before."""
        decibels = []
        for x, y in zip(images.split(250), images.roll(1, 0).split(250)):
            decoded, mask = self.unmix(x, y, mix, self.same_noise(x))
            hidden = self.encoder.pixels_of(mask)                      # (b, 1, H, W)
            error = (denormalize(decoded[0], self) - denormalize(x, self)).square()
            error = (error * hidden).mean((1, 2, 3)) / hidden.mean((1, 2, 3))
            decibels.append(-10 * error.clamp(min=1e-10).log10())
        return torch.cat(decibels)

    @torch.no_grad()
    def measures(self, train, val):
        """Ours: how linearly separable the latents are, {title: a row {name: number} for each
        weight of MIXES}, of images val (N,C,H,W), normalised; {} for less than 10. The title says
        what the numbers are. Linear maps are fitted on `train`."""
        if len(val) < 10:
            return {}
        names = ("subordinate", "dominant")[:len(self.decoder_embed)]
        rows = []
        for mix in MIXES:
            row = {"mix": mix, "psnr": self.subordinate_psnr(val, mix).mean().item()}
            if self.teacher:
                fit, score = self.latents(train, mix, names), self.latents(val, mix, names)
                for source in ("branch", "mixed", "control"):
                    for name in names:
                        key = f"branch {name}" if source == "branch" else source
                        target = f"teacher {name}"
                        row[f"{source} {name}"] = ridge_r2(fit[key], fit[target], score[key],
                                                           score[target])
            rows.append(row)
        title = (f"{len(val)} mixtures of two images for each weight (mix) of the subordinate one; "
                 f"psnr: of its hidden pixels as predicted, in dB")
        if self.norm_pix_loss:
            title += ", with their patches' true mean and variance"
        if self.teacher:
            title += (f"; R^2 (1 is best) of linear maps, fitted on {len(train)} training images, "
                      f"from branch or mixed latent to the teacher's latent of that image unmixed; "
                      f"control: from the latent that the teacher, which never saw a mixture in "
                      f"training, has of the mixture")
        return {title: rows}


def draw_partners(indices, labels, same_class, generator):
    """Partners (n,) of the images `indices` (n,), out of the N images with labels (N,). same_class
    None: any other image. Otherwise semantics-enhanced sampling (Section 1, Table 2): a share r =
    same_class of the partners, 0 ... 1, is of the same class, the others are of another. The k-th
    is of the same class if floor((k+1) r) > floor(k r), which spreads them evenly over batches."""
    N, n = len(labels), len(indices)
    u = torch.rand(n, dtype=torch.float64, generator=generator)   # one draw for each partner

    def choose(count):                                     # u as a number from 0 to count - 1
        return (u * count).long()

    if same_class is None:
        return (indices + 1 + choose(N - 1)) % N
    k = torch.arange(n, dtype=torch.float64)
    same = ((k + 1) * same_class + 1e-9).floor() > (k * same_class + 1e-9).floor()  # 1e-9: rounding
    # all images, one class after the other: labels 1 0 1 0 give by_class 1 3 0 2
    by_class = labels.argsort(stable=True)
    place = by_class.argsort()[indices]                    # of each image in by_class
    sizes = labels.bincount()
    size = sizes[labels[indices]]                          # of its class
    start = (sizes.cumsum(0) - sizes)[labels[indices]]     # of its class in by_class
    mate = start + (place - start + 1 + choose(size - 1)) % size       # in the class, not itself
    other = (start + size + choose(N - size)) % N                      # outside, after the class
    return by_class[torch.where(same, mate, other)]


def check_same_class(labels, classes, same_class):
    """ValueError if images of these labels (N,) and class names (none: unlabelled) have no partners
    for draw_partners' share same_class."""
    if same_class is None:
        return
    sizes = labels.unique(return_counts=True)[1]           # of each class
    lacks_mates = same_class > 0 and sizes.min() < 2
    lacks_others = same_class < 1 and len(sizes) < 2
    if not classes or lacks_mates or lacks_others:
        raise InputError(f"--same_class {same_class} needs class folders: if above 0, with two or "
                         f"more images each; if below 1, two or more folders")


def teacher_of(checkpoint, config):
    """A checkpoint, {"method", "config", "model"} as train.read gives it, as the teacher of an IMAE
    of the constructor arguments config: its {dim, depth, heads}, and the state dict to load into
    IMAE.teacher. ValueError if it is no MAE, or one of other patches or another decoder width."""
    sizes, state = checkpoint["config"], checkpoint["model"]
    if (checkpoint.get("method") not in ("mae", None) or "map_weights" in state
            or not state.keys() >= {"decoder_embed.weight", "encoder.norm.weight"}):
        raise InputError("the teacher is not an MAE with a decoder, or has inter-block attention")
    theirs = {**sizes, "decoder_dim": len(state["decoder_embed.weight"])}
    for name in ("img_size", "patch_size", "in_chans", "decoder_dim"):
        if pair(theirs[name]) != pair(config[name]):       # a size may be 8 or (8, 8)
            raise InputError(f"the teacher has {name} {theirs[name]}, this model {config[name]}")
    return ({name: sizes[name] for name in ("dim", "depth", "heads")},
            {k: v for k, v in state.items() if k.startswith(("encoder.", "decoder_embed."))})


def ridge_r2(x, y, x_val, y_val, weight=1e-3):
    """R^2 on val of the linear map from x (N,T,a) to y (N,T,b), T tokens, that ridge regression
    fits: the share of the variance of y_val around y's mean at each position that it explains."""
    x, y, x_val, y_val = (t.cpu().double() for t in (x, y, x_val, y_val))
    x_val, y_val = (x_val - x.mean(0)).flatten(0, 1), (y_val - y.mean(0)).flatten(0, 1)
    x, y = (x - x.mean(0)).flatten(0, 1), (y - y.mean(0)).flatten(0, 1)
    gram = x.T @ x                                                     # (a, a)
    gram += weight * gram.diagonal().mean() * torch.eye(len(gram))
    left = y_val - x_val @ torch.linalg.solve(gram, x.T @ y)           # (N T, b)
    return 1 - (left.square().sum() / y_val.square().sum()).item()
