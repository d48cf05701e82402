"""What the papers measure of trained models: tables equal those computed by hand, and pictures show
what their captions say."""

import pytest
import torch
from PIL import Image
from torch import nn

from tests.analyses import (contributions, decoder_attention, draw_contributions, latents, main,
                            ridge_r2, same_noise, separability)
from tests.lib.masks import copy_visible, fixed_noise, psnr
from tests.unit.test_methods import BASE, TEACHER, build, flags, images_and_noise
from vit import denormalize, gather_patches, normalize_patches, patchify


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=False), dict(feature_maps="last"),
                                     dict(self_attention=True, decoder_depth=3, mask_ratio=0.8)])
def test_contributions_add_up(options):
    """The contributions of mask token and positions and of each block sum to the prediction, and
    their images sum to the reconstruction (Appendix D). The patches' mean is added once."""
    model, images = build("crossmae", **options), images_and_noise()[0]
    nn.init.normal_(model.decoder_norm.bias)
    nn.init.normal_(model.decoder_norm.weight)
    noise = fixed_noise(model.encoder, images)
    parts, ids_keep, ids = contributions(model, images, noise)
    assert len(parts) == 1 + len(model.decoder_blocks)
    whole = model.decode(model.encode(images, ids_keep), ids)
    assert torch.allclose(parts.sum(0), whole, atol=1e-5)
    assert all(part.abs().mean() > 1e-4 for part in parts)
    first, *cells, last = draw_contributions(model, images)["contributions"][1].values()
    decoded, mask = model.reconstruct(images, noise)
    visible = (model.encoder.pixels_of(mask) == 0).expand_as(images)
    assert torch.equal(first, images * visible)            # grey is 0
    assert torch.allclose(last, copy_visible(model.encoder, decoded, images, mask), atol=1e-4)
    _, mean, std = normalize_patches(gather_patches(patchify(images, 4), ids))
    if not model.norm_pix_loss:
        mean, std = 0, 1
    for j, (cell, part) in enumerate(zip(cells, parts, strict=True)):
        wanted = part * std + (j == 0) * mean
        assert torch.allclose(gather_patches(patchify(cell, 4), ids), wanted, atol=1e-5)


def test_decoder_attention():
    """The numbers of CrossMAE's Table 6 equal those computed head by head, over two batches. A mask
    token's attention sums to the number of heads."""
    mae, images = build("mae", decoder_depth=3, mask_ratio=0.8), images_and_noise(150)[0]
    (title, (*rows, whole)), = decoder_attention(mae, images).items()
    assert [row["block"] for row in rows] == [0, 1, 2] and title.endswith("; 150 images")
    ids_keep, ids_mask, _ = mae.encoder.mask(images, fixed_noise(mae.encoder, images), 0.8)
    x = mae.add_mask_tokens(mae.encode(images, ids_keep), ids_keep, ids_mask)
    for block, row in zip(mae.decoder_blocks, rows):
        q, k, _ = block.attn.qkv(block.norm1(x)).chunk(3, dim=2)       # (150, 25, 16) each
        visible = masked = 0                               # 5 and 20 tokens; two heads of width 8
        for q_i, k_i in zip(q.chunk(2, dim=2), k.chunk(2, dim=2)):
            attention = (q_i @ k_i.transpose(1, 2) / 8 ** 0.5).softmax(dim=2)
            visible += attention[:, 5:, :5].mean().item()
            masked += attention[:, 5:, 5:].mean().item()
        assert 5 * visible + 20 * masked == pytest.approx(2)
        assert (row["visible"], row["masked"]) == pytest.approx((visible, masked), abs=1e-6)
        assert row["share of visible"] == pytest.approx(5 * visible / 2, abs=1e-6)
        x = block(x)
    assert whole["visible"] == pytest.approx(sum(row["visible"] for row in rows), abs=1e-6)
    assert whole["share of visible"] == pytest.approx(5 * whole["visible"] / 6, abs=1e-6)


def test_ridge_r2():
    """Predicting only each token's mean gives R^2 = 0. A wrong mean lowers R^2."""
    g = torch.Generator().manual_seed(0)
    x, A, noise = (torch.randn(*s, generator=g) for s in ((600, 2, 5), (5, 3), (600, 2, 3)))
    fit, val, linear = slice(0, 500), slice(500, 600), x @ A + 3
    other = noise + torch.tensor([[[5.0], [-5.0]]])
    half = x @ A / (x @ A).std() + noise                   # half of the variance is explained
    x[:, 0] += 5                                           # each token has a mean of its own
    assert ridge_r2(x[fit], linear[fit], x[val], linear[val]) > 0.999
    assert abs(ridge_r2(x[fit], other[fit], x[val], other[val])) < 0.1
    assert abs(ridge_r2(x[fit], half[fit], x[val], half[val]) - 0.5) < 0.12
    assert ridge_r2(x[fit], linear[fit], x[val], linear[val] + 100) < 0.1


@pytest.mark.parametrize("branches, teacher", [(1, TEACHER), (2, TEACHER), (2, None)])
def test_separability(branches, teacher):
    """Each alpha has a row; with a teacher, with R^2 for each branch. PSNR and R^2 equal those
    computed by hand, with one mask for all images."""
    images = torch.randn(60, 3, 16, 24, generator=torch.Generator().manual_seed(4))
    model, fit, val = build("imae", branches=branches, teacher=teacher), images[:40], images[40:]
    rows, = separability(model, fit, val).values()
    assert [row["alpha"] for row in rows] == [i / 20 for i in range(1, 11)]
    noise = same_noise(model, val)
    assert torch.equal(noise, noise[:1].expand_as(noise)) and len(noise[0].unique()) == 24
    decoded, mask = model.unmix(val, val.roll(1, 0), 0.2, noise)
    wanted = {"alpha": 0.2}
    for name, x, y in (("psnr", decoded[0], val), ("dominant", decoded[0], val.roll(1, 0)),
                       ("unrelated", decoded[0], val.roll(10, 0)), ("by other", decoded[-1], val)):
        x, y = denormalize(x, model), denormalize(y, model)
        wanted[name] = psnr(x, y, model.encoder.pixels_of(mask)).mean().item()
    if branches == 1:
        del wanted["by other"]
    if teacher:
        names = ("subordinate", "dominant")[:branches]
        fit, val = (latents(model, z, 0.2, names) for z in (fit, val))
        for where in ("branch", "mixed", "control"):
            for name in names:
                x, y = (f"branch {name}" if where == "branch" else where), f"teacher {name}"
                wanted[f"{where} {name}"] = ridge_r2(fit[x], fit[y], val[x], val[y])
    assert rows[3] == pytest.approx(wanted)


def test_command(pretrain, capsys):
    """The command prints tables and writes pictures for each checkpoint, on the validation images
    that it was trained on, or on others."""
    pretrain("--epochs", "0")
    for name, more in (("crossmae", []), ("minr", []), ("hypermae", []),
                       ("imae", ["--teacher", "runs/mae"])):
        pretrain("--method", name, *more, "--epochs", "0", name=name, own=flags(BASE[name]))
    capsys.readouterr()
    names = "mae crossmae minr hypermae imae".split()
    main(["--workers", "0", *(f"runs/{name}" for name in names)])
    said = " ".join(capsys.readouterr().out.split())       # lines are wrapped
    assert "visible tokens; 11 images" in said and "11 mixtures of two" in said
    for name in ("crossmae/contributions", "crossmae/map_weights", "minr/rendered", "imae/unmix"):
        picture = f"runs/{name}_{name.split('/')[0]}.png"
        assert Image.open(picture).width > 90 and picture in said
    main(["runs/imae", "--workers", "0", "--eval_images", "10", "--data", "shapes"])
    assert "shapes: 10 mixtures of two" in " ".join(capsys.readouterr().out.split())
