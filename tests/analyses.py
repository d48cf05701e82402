"""What the papers measure of trained models, in tables and pictures:

    python -m tests.analyses runs/mae_shapes runs/imae_shapes [--data DATA]

MAE:       what mask tokens attend to (CrossMAE Table 6)
CrossMAE:  what each decoder block contributes (Figure 5, Appendix D); mixing weights (Figure 5c)
MINR:      images rendered at four times their size
i-MAE:     how well mixtures are separated (i-MAE Figures 4, 6, 7)

Pictures are written beside the checkpoint. HyperMAE's paper has only reconstructions, which
tests.evaluate draws.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from textwrap import fill

import torch
import torch.nn.functional as F

from crossmae import CrossMAE
from imae import IMAE
from mae import MAE
from minr import MINR
from tests.lib.masks import fixed_noise, psnr
from tests.lib.models import load_any
from tests.lib.pictures import save_picture
from tests.lib.plot import as_table
from train import (DATA, DEFAULTS, add_flags, name_of, open_data, path, read_checkpoint, shell,
                   start_processes, val_batches, words_of)
from vit import denormalize, gather_patches, normalize, normalize_patches, patchify, visible_count

ALPHAS = [i / 20 for i in range(1, 11)]                    # i-MAE Figure 4's range, and 0.5


# ---------------------------------------------------------------------------------------------- MAE
def decoder_attention(mae, images):
    """Measure what mask tokens attend to in an MAE's decoder (Table 6, CrossMAE's starting point).
    Images (N,C,H,W) are normalised. Returns {title: rows}, a row for each decoder block and one for
    their sum. A row has the attention from one mask token to one visible (or class) token and to
    one mask token, averaged over tokens and images and summed over heads. It also has the share
    that goes to all visible tokens.

    CrossMAE's A.1 averages over blocks and heads. But Table 6 must sum over heads: in each block,
    the 50 visible and 147 masked tokens together get about 16. Its last row also sums over blocks.
    Table 6 counts blocks from 1, this function from 0."""
    noise = fixed_noise(mae.encoder, images)
    seen = 1 + visible_count(mae.encoder.num_patches, mae.mask_ratio)  # with the class token
    attended = 0                                           # mean over images, summed part by part
    for part, part_noise in zip(images.split(100), noise.split(100)):
        ids_keep, ids_mask, _ = mae.encoder.mask(part, part_noise, mae.mask_ratio)
        # (B, 1+L, E), the mask tokens last
        x = mae.add_mask_tokens(mae.encode(part, ids_keep), ids_keep, ids_mask)
        to_each = []
        for block in mae.decoder_blocks:
            q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=2)   # (B, 1+L, E) each
            q = q[:, seen:].unflatten(2, (block.attn.heads, -1))       # (B, M, heads, E/heads)
            k = k.unflatten(2, (block.attn.heads, -1)).transpose(1, 2)  # (B, heads, 1+L, E/heads)
            # (B, heads, M, 1+L)
            scores = q.transpose(1, 2) @ k.transpose(2, 3) / k.shape[3] ** 0.5
            # softmax: ViT eq. 6; mean over mask tokens and images, sum over heads: (1+L,)
            to_each.append(scores.softmax(dim=-1).mean(2).sum((0, 1)) / len(images))
            x = block(x)                                               # (B, 1+L, E)
        attended = attended + torch.stack(to_each)                     # (decoder depth, 1+L)
    rows = []
    for name, tokens in [*enumerate(attended), ("sum", attended.sum(0))]:
        rows.append({"block": name, "visible": tokens[:seen].mean().item(),
                     "masked": tokens[seen:].mean().item(),
                     "share of visible": (tokens[:seen].sum() / tokens.sum()).item()})
    return {f"attention from one mask token to one visible and to one masked token, by decoder "
            f"block (means, summed over heads); share that goes to all visible tokens; "
            f"{len(images)} images": rows}


# ----------------------------------------------------------------------------------------- CrossMAE
def contributions(model, images, noise):
    """Split a CrossMAE's predictions for all masked patches into a sum of contributions (Appendix
    D): (1+decoder depth,B,M,p*p*C). The first comes from mask token, position and the biases of
    norm and head, the others from the decoder blocks. Also returns ids_keep and ids_mask. Here f_i
    is the output of decoder block i, not a feature map.

    Appendix D treats the norm before the head as linear. It is linear once its std is fixed, here
    to the std of the last block's output."""
    ids_keep, ids_mask, _ = model.encoder.mask(images, noise, model.mask_ratio)
    x = model.mask_token + model.decoder_pos_embed[0, 1:][ids_mask]    # (B, M, E) f_0
    parts = [x]                                                        # first f_0, then each g_i
    for block, y in zip(model.decoder_blocks, model.encode(images, ids_keep)):
        output = block(x, y)                                           # (B, M, E) f_i from f_{i-1}
        parts.append(output - x)                                       # g_i = f_i - f_{i-1}
        x = output
    norm, head = model.decoder_norm, model.decoder_pred                # together h in Appendix D
    std = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()  # (B, M, 1)
    parts = torch.stack(parts)                             # (1+decoder depth, B, M, E)
    parts = (parts - parts.mean(-1, keepdim=True)) / std * norm.weight
    parts = parts @ head.weight.T                          # (1+decoder depth, B, M, p*p*C) h(g_i)
    parts[0] += head(norm.bias)                                        # adds both biases, once
    return parts, ids_keep, ids_mask


def draw_contributions(model, images):
    """Draw the contributions to a CrossMAE's predictions (Appendix D), for images (B,C,H,W):
    {name: (caption, columns {title: images (B,C,H,W)})}."""
    parts, ids_keep, ids_mask = contributions(model, images, fixed_noise(model.encoder, images))
    if model.norm_pix_loss:
        patches = patchify(images, model.encoder.patch_size)           # (B, L, p*p*C)
        _, mean, std = normalize_patches(gather_patches(patches, ids_mask))    # (B, M, 1) each
        parts = parts * std                                # the true patches' std
        parts[0] += mean                                   # the true patches' mean, added only once
    paste, grey = model.encoder.paste_patches, torch.zeros_like(images)      # 0: the mean colour
    columns = {"visible patches": paste(images, torch.zeros_like(parts[0]), ids_mask, ids_keep),
               "mask token\nand position": paste(grey, parts[0], ids_mask, ids_keep)}
    for i, part in enumerate(parts[1:]):
        columns[f"decoder\nblock {i}"] = paste(grey, part, ids_mask, ids_keep)
    columns["sum"] = paste(images, parts.sum(0), ids_mask, ids_keep)
    return {"contributions": ("what each part adds to the prediction", columns)}


def draw_map_weights(model):
    """Draw a CrossMAE's mixing weights (Figure 5c), a pixel each: {name: (caption, columns {title:
    images (1,C,decoder depth,n)})}. Returns {} if the model mixes no maps."""
    if not model.inter_block:
        return {}
    w = model.map_weights()                                            # (decoder depth, n)
    values = (127.5 + 127.5 * w / w.abs().max()).expand(1, len(model.mean), -1, -1)
    return {"map_weights": (
        "mixing weights, one row per decoder block and one column per feature map; grey is 0, "
        "darker is negative", {"mixing weights": normalize(values, model)})}


# --------------------------------------------------------------------------------------------- MINR
def draw_rendered(model, images):
    """Let a MINR render masked images (B,C,H,W) at four times their size: {name: (caption, columns
    {title: images (B,C,4H,4W)})}."""
    H, W = model.encoder.img_size
    noise = fixed_noise(model.encoder, images)
    native = model.render(images, (H, W), noise)                       # (B, C, H, W)
    large = model.render(images, (4 * H, 4 * W), noise)                # (B, C, 4H, 4W)
    upscaled = F.interpolate(native, scale_factor=4, mode="bicubic")   # (B, C, 4H, 4W)
    return {"rendered": (
        "4x: rendered at four times the model's size (training with --coord_jitter avoids a grid); "
        "1x: rendered at the model's size, then upscaled bicubically",
        {"rendered at 4x": large, "rendered at 1x,\nupscaled": upscaled})}


# -------------------------------------------------------------------------------------------- i-MAE
def same_noise(model, images):
    """Return noise (B,L) that gives all images the same mask, on every call."""
    return fixed_noise(model.encoder, images[:1]).expand(len(images), -1)


def draw_unmixed(model, images):
    """Let an i-MAE separate mixtures of the first two images (B,C,H,W), as in i-MAE Figures 6 and
    7, for four weights of the subordinate image: {name: (caption, columns {title: images
    (4,C,H,W)})}. Returns {} if B is 1. Nothing is copied into the predictions."""
    if len(images) < 2:
        return {}
    x_1, x_2, columns = images[:1], images[1:2], defaultdict(list)
    noise = same_noise(model, x_1)
    for alpha in ALPHAS[1:8:2]:                             # 0.1, 0.2, 0.3, 0.4
        decoded, mask = model.unmix(x_1, x_2, alpha, noise)
        mix, _ = model.mix_images(x_1, x_2, alpha)
        columns["mixture"].append(mix)
        columns["masked"].append(mix * (1 - model.encoder.pixels_of(mask)))
        for name, prediction in zip(("subordinate", "dominant"), decoded):
            columns[f"{name},\npredicted"].append(prediction)
    columns["subordinate"], columns["dominant"] = 4 * [x_1], 4 * [x_2]
    columns = {title: torch.cat(rows) for title, rows in columns.items()}      # a row per weight
    own, other = ((columns["subordinate,\npredicted"] - x).square().sum((1, 2, 3))
                  for x in (x_1, x_2))                     # a number per weight
    return {"unmix": (
        f"a row for each weight of the subordinate image: 0.1, 0.2, 0.3, 0.4. Its prediction is "
        f"nearer to it than to the dominant image in {(own < other).sum()} of 4 rows", columns)}


def latents(model, images, alpha, names):
    """Mix each of the images (N,C,H,W) with its predecessor. The image has weight alpha, and is
    subordinate up to alpha 0.5. Returns these latents of an i-MAE; `names` has a NAME for each
    branch:

        mixed          (N,1+K,D)   the encoder's output for the mixture
        branch NAME    (N,1+K,E)   z_i, the branch's latent
        teacher NAME   (N,1+K,E)   w_i, the branch's target
        control        (N,1+K,E)   the teacher's latent of the mixture

    All images get the same mask, so token t is always the same patch."""
    parts = defaultdict(list)
    for x, partner in zip(images.split(250), images.roll(1, 0).split(250)):
        ids_keep, _, _ = model.encoder.mask(x, same_noise(model, x), model.mask_ratio)
        mix, xs = model.mix_images(x, partner, alpha)                  # (B, C, H, W) each
        mixed = model.encoder(mix, ids_keep)                           # (B, 1+K, D)
        parts["mixed"].append(mixed)
        parts["control"].append(model.teach(mix, ids_keep))
        for name, F_i, x_i in zip(names, model.decoder_embed, xs):
            parts[f"branch {name}"].append(F_i(mixed))
            parts[f"teacher {name}"].append(model.teach(x_i, ids_keep))
    return {name: torch.cat(part) for name, part in parts.items()}


def ridge_r2(x, y, x_val, y_val, weight=1e-3):
    """Fit a linear map from x (N,T,a) to y (N,T,b), with T tokens, by ridge regression: (X^T X +
    lambda I)^-1 X^T Y. First, each token's means over the N images of x and y are subtracted, also
    from x_val and y_val. Returns R^2 on these: 1 - squared error / sum of the squares of y_val."""
    x, y, x_val, y_val = (t.cpu().double() for t in (x, y, x_val, y_val))
    x_val, y_val = (x_val - x.mean(0)).flatten(0, 1), (y_val - y.mean(0)).flatten(0, 1)
    x, y = (x - x.mean(0)).flatten(0, 1), (y - y.mean(0)).flatten(0, 1)
    gram = x.T @ x                                                     # (a, a)
    gram += weight * gram.diagonal().mean() * torch.eye(len(gram))     # lambda I
    residual = y_val - x_val @ torch.linalg.solve(gram, x.T @ y)       # (N*T, b)
    return 1 - (residual.square().sum() / y_val.square().sum()).item()


def unmixed_psnr(model, images, alpha):
    """Mix each of the images (N,C,H,W) with its predecessor. The image has weight alpha <= 0.5.
    Returns {name: PSNR (N,) in dB, over masked pixels}: of the first branch's prediction, compared
    with the image (psnr), with the dominant image and with one that is not in the mixture
    (unrelated); of the second branch's prediction, compared with the image (by other)."""
    found, others = defaultdict(list), [images.roll(n, 0) for n in (1, len(images) // 2)]
    for parts in zip(*(x.split(250) for x in (images, *others))):
        decoded, mask = model.unmix(*parts[:2], alpha, same_noise(model, parts[0]))
        masked = model.encoder.pixels_of(mask)                         # (B, 1, H, W)
        decoded, parts = ([denormalize(x, model) for x in xs] for xs in (decoded, parts))
        for name, image in zip(("psnr", "dominant", "unrelated"), parts):
            found[name] += psnr(decoded[0], image, masked)
        for prediction in decoded[1:]:                         # none if there is only one branch
            found["by other"] += psnr(prediction, parts[0], masked)
    return {name: torch.stack(x) for name, x in found.items()}


def separability(model, train, val):
    """Measure an i-MAE's linear separability on normalised images `val` (N,C,H,W), in our own way.
    Linear maps are fitted on the images `train`. Returns {title: rows}, or {} for fewer than 10
    images. A row {name: number} is for one weight in ALPHAS; the title explains the numbers."""
    if len(val) < 10:
        return {}
    names, rows = ("subordinate", "dominant")[:len(model.decoder_embed)], []
    for alpha in ALPHAS:
        row = {name: x.mean().item() for name, x in unmixed_psnr(model, val, alpha).items()}
        row = {"alpha": alpha, **row}
        if model.teacher:
            fit, score = (latents(model, images, alpha, names) for images in (train, val))
            for source in ("branch", "mixed", "control"):
                for name in names:
                    key = f"branch {name}" if source == "branch" else source
                    target = f"teacher {name}"
                    row[f"{source} {name}"] = ridge_r2(fit[key], fit[target], score[key],
                                                       score[target])
        rows.append(row)
    title = (f"{len(val)} mixtures of two images for each weight alpha of the subordinate one; "
             f"psnr: PSNR in dB of its prediction, over masked pixels; dominant, unrelated: the "
             f"same prediction, compared with the dominant image, and with one that is not in the "
             f"mixture; by other: the dominant image's prediction, compared with this image")
    if model.norm_pix_loss:
        title += ", un-normalised with the true mean and variance of each patch"
    if model.teacher:
        title += (f"; others: R^2 (1 is best) of linear maps, fitted on {len(train)} training "
                  f"images, to the teacher's latent of the unmixed image, from the branch's latent "
                  f"(branch), the encoder's output (mixed), or the teacher's latent of the mixture "
                  f"(control), although the teacher was trained on no mixtures")
    return {title: rows}


# --------------------------------------------------------------------------------- the command line
@torch.no_grad()
def analyse(model, train, val):
    """Return what the papers measure of a model on normalised images (N,C,H,W): tables {title:
    rows} and pictures {name: (caption, columns {title: images (rows,C,H,W)})}."""
    if isinstance(model, MAE):
        return decoder_attention(model, val), {}
    if isinstance(model, CrossMAE):
        return {}, {**draw_contributions(model, val[:8]), **draw_map_weights(model)}
    if isinstance(model, MINR):
        return {}, draw_rendered(model, val[:8])
    if isinstance(model, IMAE):
        return separability(model, train, val), draw_unmixed(model, val[:2])
    return {}, {}


def analyse_file(file, args, here):
    """Print the tables of a checkpoint, and write its pictures beside it."""
    content = read_checkpoint(file)
    data = args.data or content["flags"].get("data", "shapes")
    model = load_any(content).to(here.device)
    size = model.encoder.img_size
    train, val, _ = open_data(data, here, size)

    def images_of(part):
        """Return normalised images (N,C,H,W)."""
        batches = val_batches(part, here, size, args.eval_images)
        return normalize(torch.cat([images for _, images, _ in batches]), model)

    only_pairs = isinstance(model, IMAE)                   # only i-MAE needs training images
    tables, pictures = analyse(model, images_of(train) if only_pairs else None, images_of(val))
    for title, rows in tables.items():
        print(fill(f"{file}, {data}: {title}", 100), as_table(rows), sep="\n")
    for name, (caption, columns) in pictures.items():
        picture = Path(content["path"]).with_name(f"{name}_{name_of(content['path'])}.png")
        save_picture({title: denormalize(x, model) for title, x in columns.items()}, picture)
        print(fill(f"see     {picture}: {caption}", 100))
    if not tables and not pictures:
        print(f"note    nothing to measure for {file}, a {type(model).__name__}")


def main(argv=None):
    """Run `python -m tests.analyses` with the arguments `argv`."""
    parser = argparse.ArgumentParser("tests.analyses", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**{**DEFAULTS, "eval_images": 1000, "amp": "fp32"})
    parser.add_argument("checkpoints", nargs="+", type=path, metavar="FILE", help="from train.py")
    flags = {name: DATA[name] for name in DATA if name != "amp"}       # all is in float32
    flags["eval_images"] = (flags["eval_images"][0], "images to use; for i-MAE, also for the fit")
    add_flags(parser, "data and device", flags, {**DEFAULTS, "eval_images": 1000})
    args = parser.parse_args(words_of(argv))
    here = start_processes(args)
    for file in args.checkpoints:
        analyse_file(file, args, here)


if __name__ == "__main__":
    shell(main)
