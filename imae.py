"""i-MAE: encode a mixture of two images, and take the latent apart again by linear layers.

Zhang, Shen: i-MAE, Are Latent Representations in Masked Autoencoders Linearly Separable?
(arXiv 2210.11470).

The encoder sees the visible patches of a weighted sum of two images. One linear layer for each
image maps the latent to the input of a shared MAE decoder, which has to paint that image: branch 1
the subordinate one (of the smaller weight), branch 2 the dominant one. Distillation pulls each
branch towards the latent that a frozen MAE, the teacher, has of that image unmixed.

    B images, L patches, K visible, M = L - K hidden, D encoder width, E decoder width, p patch side
    a the weight of the first image (Algorithm 1's alpha), z_1 and z_2 the branches, w_1 and w_2
    the teacher's latents of the same images
    a x1 + (1-a) x2 (B,C,H,W) -> visible patches (B,K,D) -> encoder (B,1+K,D) -> z (2B,1+K,E)
    -> decoder -> pixels of the hidden patches (2B,M,p*p*C)

Where paper and released code differ, and what is done here:
  1. Algorithm 1 gives the teacher each image unmixed; the release computes both latents from the
     mixture. As in the paper, of the patches that the student sees.
  2. Algorithm 1's l2_loss(z1, x1) means w1. What is compared are the teacher's latents through its
     decoder embedding, and z after F_1 and F_2, which map to the decoder's width (release).
  3. At exactly a = 0.5 the first image is the subordinate one (release; Algorithm 1: the second).
  4. The losses of the branches are added, not averaged (both).
  5. The release accepts norm_pix_loss and ignores it; here it works.
  6. The release keeps MAE's decoder embedding without a use; here F_1 and F_2 replace it, and
     start from it if the model does from an MAE (`--init`, as its script), else from xavier's.
  7. The paper mixes within the batch; train.py draws partners from the whole data set
     (draw_partners), so that `--same_class` can be exact. Bare calls use the batch.
  8. On ImageNet (Section 1, Table 1): `--norm_pix_loss` to classify, `--mask_ratio 0.5` to look.
     Weight decay, schedule, epochs, crop and flip are not stated: MAE's.
"""

import torch
from torch import nn

from vit import (IMAGENET_MEAN, IMAGENET_STD, Block, ViT, init_weights, mask_noise,
                 sincos_pos_embed, take, visible_count)


class IMAE(nn.Module):
    """`loss, metrics = model(images)`; `unmix` takes mixtures apart, `reconstruct` paints and
    `encoder` gives features. Defaults: the paper's, ViT-B/16.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        teacher: None, or dict(dim, depth, heads) of a frozen MAE's encoder; its weights are to be
            loaded into model.teacher, as train.py does
        mask_ratio: share of the patches that is hidden
        norm_pix_loss: predict patches normalised by their own mean and variance
        decoder_dim: width of the decoder
        decoder_depth: blocks of the decoder
        decoder_heads: attention heads of the decoder
        branches: 2, or 1 for the subordinate image alone
        beta: b of Beta(b, b), from which the weight of the first image is drawn
        distill_weight: c, of the distillation (1 with a teacher, 0 without)
    """

    recipe = dict(  # Table 1, ImageNet; CIFAR: blr 1.5e-4, no augmentation; Tiny-ImageNet: blr
        # 1.5e-4, with --same_class 3.5e-4 (Table 2)
        optimizer="adamw", blr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, schedule="cosine",
        batch_size=4096, epochs=800, warmup_epochs=40, crop=0.2, flip=True)
    small = dict(  # ours, MAE's, without augmentation as on CIFAR
        lr=2e-3, batch_size=64, epochs=10, warmup_epochs=1, crop=1.0, flip=False,
        decoder_dim=64, decoder_depth=2, decoder_heads=2)
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    lr_scale = 1.0
    pairs = True                                           # the loop supplies partners

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12,
                 teacher=None, *, mask_ratio=0.75, norm_pix_loss=False, decoder_dim=512,
                 decoder_depth=8, decoder_heads=16, branches=2, beta=1.0,
                 distill_weight: float = None):
        super().__init__()
        if branches not in (1, 2):
            raise ValueError(f"branches {branches} is not 1 or 2")
        if not beta > 0:
            raise ValueError(f"beta {beta} is not above 0")
        if distill_weight is None:
            distill_weight = 1.0 if teacher else 0.0
        if not distill_weight >= 0:
            raise ValueError(f"distill_weight {distill_weight} is less than 0")
        if distill_weight > 0 and not teacher:
            raise ValueError(f"distill_weight {distill_weight} needs a teacher: --teacher FILE")
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)
        visible_count(self.encoder.num_patches, mask_ratio)            # or ValueError
        self.mask_ratio, self.norm_pix_loss = mask_ratio, norm_pix_loss
        self.beta, self.distill_weight = beta, distill_weight
        p, q = self.encoder.patch_size

        self.decoder_embed = nn.ModuleList(                            # F_1, F_2
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
        if teacher:                                                    # its weights are loaded
            self.teacher = nn.ModuleDict(dict(
                encoder=ViT(img_size, patch_size, in_chans, **teacher),
                decoder_embed=nn.Linear(teacher["dim"], decoder_dim))).requires_grad_(False)

    def from_mae(self, state):
        """A state dict in this model's names: an MAE's decoder embedding starts all branches."""
        state = dict(state)
        for part in {"weight", "bias"} if "decoder_embed.weight" in state else ():
            value = state.pop(f"decoder_embed.{part}")
            state |= {f"decoder_embed.{i}.{part}": value for i in range(len(self.decoder_embed))}
        return state

    def mixture(self, images, partners, mix):
        """mix: a number or (B,) -> the mixture, and (images, partners) as (subordinate, dominant);
        all (B,C,H,W). ValueError if partners are not like images."""
        if partners.shape != images.shape:
            raise ValueError(f"partners of shape {tuple(partners.shape)} for images of "
                             f"{tuple(images.shape)}")
        a = torch.as_tensor(mix, device=images.device, dtype=images.dtype).view(-1, 1, 1, 1)
        first = a <= 0.5                                               # is the subordinate one
        pair = torch.where(first, images, partners), torch.where(first, partners, images)
        return a * images + (1 - a) * partners, pair

    def encode(self, mixture, ids_keep):
        """A mixture's visible patches ids_keep (B,K) -> each branch's latent: [(B,1+K,E)]."""
        latent = self.encoder(mixture, ids_keep)                       # (B, 1+K, D)
        return [branch(latent) for branch in self.decoder_embed]

    def decode(self, z, ids_keep, ids_mask, last):
        """Latents z (B,1+K,E) -> predictions (B,last,p*p*C) of the last so many patches in noise
        order, as mae.MAE.decode."""
        pos = self.decoder_pos_embed[0, 1:]                            # (L, E)
        x = torch.cat([z[:, :1] + self.decoder_pos_embed[:, :1],       # (B, 1, E) class token
                       z[:, 1:] + pos[ids_keep],                       # (B, K, E) what is visible
                       self.mask_token + pos[ids_mask]], dim=1)        # (B, M, E) what is hidden
        *blocks, final = self.decoder_blocks
        for block in blocks:
            x = block(x)                                               # (B, 1+L, E)
        return self.decoder_pred(self.decoder_norm(final(x, last)))    # (B, last, p*p*C)

    @torch.no_grad()
    def teach(self, images, ids_keep):
        """The teacher's latents w (B,1+K,E) of the same patches of images."""
        return self.teacher["decoder_embed"](self.teacher["encoder"](images, ids_keep))

    def forward(self, images, noise=None, partners=None, mix=None):
        """Images and partners (B,C,H,W; None: the images before), normalised, noise (B,L; None:
        random) and mix, the weight of images, a number or (B,) (None: Beta(b, b)) -> the loss, a
        float32 scalar, and its parts, detached: {"loss", "subordinate", "dominant", "distill"}."""
        partners = images.roll(1, 0) if partners is None else partners
        mix = torch.distributions.Beta(self.beta, self.beta).sample() if mix is None else mix
        mixture, pair = self.mixture(images, partners, mix)
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        zs = self.encode(mixture, ids_keep)                            # (B, 1+K, E) a branch
        n, (keep, hide) = len(zs), (ids.repeat(len(zs), 1) for ids in (ids_keep, ids_mask))
        pred = self.decode(torch.cat(zs), keep, hide, hide.shape[1]).float()  # (nB, M, p*p*C)
        target = self.encoder.targets(torch.cat(pair[:n]), hide, self.norm_pix_loss)
        recon = (pred - target).square().unflatten(0, (n, -1)).mean((1, 2, 3))  # (n,) a branch
        distill = torch.zeros_like(recon[0])
        if self.distill_weight > 0:                                    # both terms of distill(...)
            w = self.teach(torch.cat(pair[:n]), keep)                  # (nB, 1+K, E)
            distill = n * (torch.cat(zs).float() - w.float()).square().mean()
        loss = recon.sum() + self.distill_weight * distill
        names = ("loss", "subordinate", "dominant")[:n + 1] + ("distill",)
        return loss, {k: v.detach() for k, v in zip(names, (loss, *recon, distill))}

    def run(self, images, partners, mix, noise, mask_ratio, exact=False):
        """A branch each, [subordinate, dominant]: predictions (B,L,p*p*C) in raster order, and the
        images that they are of; the mixture, ids_keep and the mask (B,L)."""
        mixture, pair = self.mixture(images, partners, mix)
        ids_keep, ids_mask, mask = self.encoder.mask(images, noise, mask_ratio, exact)
        order = torch.cat([ids_keep, ids_mask], dim=1).argsort(dim=1)  # (B, L)
        pred = [take(self.decode(z, ids_keep, ids_mask, order.shape[1]), order)
                for z in self.encode(mixture, ids_keep)]
        return pred, pair, mixture, ids_keep, mask

    def predict(self, images, noise):
        """All patches (B,L,p*p*C) of images, not mixed, by the last branch, in raster order and in
        the space of the loss. It is the dominant one, unless `branches` is 1."""
        return self.run(images, images, 1.0, noise, self.mask_ratio)[0][-1]

    @torch.no_grad()
    def unmix(self, images, partners, mix, noise=None, mask_ratio=None, leak_free=False):
        """What the branches predict of a mixture, visible patches too: [subordinate, dominant] of
        (B,C,H,W), and the mask (B,L). For the last arguments see reconstruct_all."""
        mask_ratio = self.mask_ratio if mask_ratio is None else mask_ratio
        pred, pair, mixture, ids_keep, mask = self.run(images, partners, mix, noise, mask_ratio,
                                                       exact=True)
        ids = torch.arange(self.encoder.num_patches, device=images.device).expand_as(mask)
        return [self.encoder.fill(mixture if leak_free else target, x, ids, ids_keep,
                                  self.norm_pix_loss, leak_free)
                for x, target in zip(pred, pair)], mask

    @torch.no_grad()
    def reconstruct_all(self, images, noise=None, mask_ratio=None, leak_free=False):
        """Images (B,C,H,W), normalised and not mixed, as decoded by the last branch (the dominant
        one, unless `branches` is 1): every patch predicted, visible ones too, which the loss has
        not trained. And the mask (B,L).

        `mask_ratio` replaces the model's in this call. With `norm_pix_loss` a predicted patch gets
        the mean and variance of the true one or, `leak_free`, of all visible pixels (ViT.fill).
        ValueError if noise is a 0/1 mask that shows another number of patches than mask_ratio."""
        decoded, mask = self.unmix(images, images, 1.0, noise, mask_ratio, leak_free)
        return decoded[-1], mask

    def reconstruct(self, images, noise=None, mask_ratio=None, leak_free=False):
        """reconstruct_all with the visible patches copied from images."""
        decoded, mask = self.reconstruct_all(images, noise, mask_ratio, leak_free)
        return self.encoder.copy_visible(decoded, images, mask), mask

    def one_mask(self, images):
        """The same noise (B,L) for all images."""
        g = torch.Generator().manual_seed(0)
        noise = mask_noise("random", 1, self.encoder.grid, generator=g)
        return noise.expand(len(images), -1).to(images.device)

    def figures(self, images):
        """{"unmix": (rows,columns,C,H,W)}: the first two images in mixtures, as Figures 6 and 7: a
        row a weight; mixture, masked, subordinate prediction, with visible patches, targets."""
        if len(images) < 2:
            return {}
        x1, x2, rows = images[:1], images[1:2], []
        for a in MIXES:
            (decoded, *_), mask = self.unmix(x1, x2, a, self.one_mask(x1))
            mixture, hidden = self.mixture(x1, x2, a)[0], self.encoder.pixels_of(mask).bool()
            rows.append(torch.cat([mixture, mixture * ~hidden, decoded,
                                   torch.where(hidden, decoded, mixture), x1, x2]))
        return {"unmix": torch.stack(rows)}

    @torch.no_grad()
    def measures(self, train, val):
        """How linearly separable the latents are: {title: a row {name: number} for each weight of
        MIXES}, of images val (N,C,H,W), normalised, each mixed with the one before as the dominant
        one, all under one mask; {} for less than 10. "psnr": of the subordinate image's hidden
        pixels, dB. With a teacher, R^2 of linear maps, fitted on `train`, from the branches and
        from the mixed latent to the teacher's latents of the two images unmixed; means of each
        position do not count."""
        if len(val) < 10:
            return {}
        branches = ("subordinate", "dominant")[:len(self.decoder_embed)]

        def latents(images, partners, a):                              # (b, 1+K, E or D) each
            ids_keep = self.encoder.mask(images, self.one_mask(images), self.mask_ratio)[0]
            mixed = self.encoder(self.mixture(images, partners, a)[0], ids_keep)
            found = {f"branch {n}": F(mixed) for n, F in zip(branches, self.decoder_embed)}
            wanted = {n: self.teach(x, ids_keep) for n, x in zip(branches, (images, partners))}
            return {**found, **{f"mixed {n}": mixed for n in branches}, **wanted}

        def batches(images):
            return zip(images.split(250), images.roll(1, 0).split(250))

        def psnr(images, partners, a):                                 # (b,)
            (decoded, *_), mask = self.unmix(images, partners, a, self.one_mask(images))
            hidden = self.encoder.pixels_of(mask)
            mean, std = (images.new_tensor(v).view(-1, 1, 1) for v in (self.mean, self.std))
            error = (decoded * std + mean).clamp(0, 1) - (images * std + mean)
            error = (error.square() * hidden).mean((1, 2, 3)) / hidden.mean((1, 2, 3))
            return -10 * error.clamp(min=1e-10).log10()
        rows = []
        for a in MIXES:
            decibels = torch.cat([psnr(*b, a) for b in batches(val)])
            rows.append({"mix": a, "psnr": decibels.mean().item()})
            if self.teacher:
                parts = [[latents(*b, a) for b in batches(part)] for part in (train, val)]
                fit, score = ({k: torch.cat([p[k] for p in part]) for k in part[0]}
                              for part in parts)
                rows[-1] |= {k: ridge_r2(fit[k], fit[n], score[k], score[n])
                             for k in fit if k not in branches for n in branches if k.endswith(n)}
        return {f"dB of hidden pixels of the subordinate image and, with a teacher, R^2 of linear "
                f"maps to its latents, fitted on {len(train)} images": rows}


def draw_partners(order, labels, same_class, generator):
    """Partners of pictures, indices `order` (n,) of the N in labels (N,): any other picture or, by
    semantics-enhanced sampling, a share same_class in 0 ... 1 (the paper's r) of the same class and
    the others of another, exactly: the k-th is iff floor((k+1) r) > floor(k r)."""
    N, u = len(labels), torch.rand(len(order), dtype=torch.float64, generator=generator)
    if same_class is None:
        return (order + 1 + (u * (N - 1)).long()) % N
    by_class, sizes = labels.argsort(stable=True), labels.unique(return_counts=True)[1]
    label = labels.unique(return_inverse=True)[1][order]   # 0, 1, ... also where one is missing
    start, size, place = (sizes.cumsum(0) - sizes)[label], sizes[label], by_class.argsort()[order]
    k = torch.arange(len(order), dtype=torch.float64)
    same = ((k + 1) * same_class + 1e-9).floor() > (k * same_class + 1e-9).floor()
    mate = start + (place - start + 1 + (u * (size - 1)).long()) % size     # next in the class
    other = (start + size + (u * (N - size)).long()) % N                   # after it, in a circle
    return by_class[torch.where(same, mate, other)]


MIXES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.45)                   # of Figures 6 and 7


def ridge_r2(x, y, x_val, y_val, weight=1e-3):
    """R^2 on val of the linear map from x (N,T,a) to y (N,T,b), T tokens, that ridge regression
    fits: the share of the variance of y_val around y's mean token that it explains."""
    x, y, x_val, y_val = (t.cpu().double() for t in (x, y, x_val, y_val))
    x_val, y_val = (x_val - x.mean(0)).flatten(0, 1), (y_val - y.mean(0)).flatten(0, 1)
    x, y = (x - x.mean(0)).flatten(0, 1), (y - y.mean(0)).flatten(0, 1)
    gram = x.T @ x                                                     # (a, a)
    gram += weight * gram.diagonal().mean() * torch.eye(len(gram))
    left = y_val - x_val @ torch.linalg.solve(gram, x.T @ y)           # (N T, b)
    return 1 - (left.square().sum() / y_val.square().sum()).item()
