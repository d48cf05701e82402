"""What the papers measure of trained models: tables equal those computed by hand, and pictures show
what their captions say."""

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import train
from tests import analyses
from tests.analyses import (contributions, decoder_attention, draw_contributions,
                            draw_map_weights, draw_rendered, draw_unmixed, latents, main,
                            psnr, ridge_r2, same_noise, separability)
from tests.lib.masks import copy_visible, fixed_noise
from tests.unit.conftest import HERE
from tests.unit.test_methods import BASE, TEACHER, build, flags, images_and_noise
from vit import denormalize, gather_patches, normalize_patches, patchify


@pytest.mark.parametrize("options", [{}, dict(norm_pix_loss=False), dict(feature_maps="last"),
                                     dict(self_attention=True, decoder_depth=3, mask_ratio=0.8)])
def test_contributions_add_up(options):
    """The contributions of mask token and positions and of each block sum to the prediction, and
    their images sum to the reconstruction (Appendix D)."""
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
    _, mean, std = normalize_patches(gather_patches(patchify(images, 4), ids))
    if not model.norm_pix_loss:
        mean, std = 0, 1
    assert len(cells) == len(parts)
    for j, cell in enumerate(cells):                       # the mean is added once
        wanted = parts[j] * std + (j == 0) * mean
        assert torch.allclose(gather_patches(patchify(cell, 4), ids), wanted, atol=1e-5)
        assert not cell[visible].any()                     # only masked patches are shown
    assert torch.allclose(last, copy_visible(model.encoder, decoded, images, mask), atol=1e-4)


def test_figure_of_the_mixing_weights():
    """Rows are decoder blocks, columns are maps, and grey is 0 (Figure 5c)."""
    model = build("crossmae", decoder_depth=4)
    (cells,), W = draw_map_weights(model)["map_weights"][1].values(), model.map_weights()
    assert cells.shape == (1, 3, 4, 3)
    wanted = (0.5 + 0.5 * W / W.abs().max()).expand(3, -1, -1)
    assert torch.allclose(denormalize(cells, model)[0], wanted, atol=1e-6)
    assert draw_map_weights(build("crossmae", feature_maps="last")) == {}


def test_decoder_attention():
    """The numbers of CrossMAE's Table 6 equal those computed head by head, over two batches. A mask
    token's attention sums to the number of heads."""
    mae, images = build("mae", decoder_depth=3, mask_ratio=0.8), images_and_noise(150)[0]
    (title, rows), = decoder_attention(mae, images).items()
    assert [row["block"] for row in rows] == [0, 1, 2, "sum"] and title.endswith("; 150 images")
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
    *blocks, whole = rows
    for key in ("visible", "masked"):
        assert whole[key] == pytest.approx(sum(row[key] for row in blocks), abs=1e-6)
    assert whole["share of visible"] == pytest.approx(5 * whole["visible"] / 6, abs=1e-6)


def test_rendered():
    """The picture shows images at four times the size, beside bicubically upscaled ones."""
    model, (images, _) = build("minr"), images_and_noise()
    large, upscaled = draw_rendered(model, images)["rendered"][1].values()
    noise = fixed_noise(model.encoder, images)
    assert torch.allclose(large, model.render(images, (64, 96), noise), atol=1e-6)
    wanted = F.interpolate(model.render(images, (16, 24), noise), (64, 96), mode="bicubic")
    assert torch.allclose(upscaled, wanted, atol=1e-6)


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
    r2, again = (ridge_r2(s * x[fit], half[fit], s * x[val], half[val]) for s in (1, 1e-3))
    assert abs(r2 - 0.5) < 0.12 and again == pytest.approx(r2)         # at any scale
    assert ridge_r2(x[fit], linear[fit], x[val], linear[val] + 100) < 0.1


@pytest.mark.parametrize("branches, teacher", [(1, TEACHER), (2, TEACHER), (2, None)])
def test_separability(branches, teacher):
    """Each alpha has a row. With a teacher, a row has R^2 for each branch."""
    images, model = images_and_noise(18)[0], build("imae", branches=branches, teacher=teacher)
    rows, = separability(model, images[:8], images[8:]).values()
    names = [f"{where} {name}" for where in ("branch", "mixed", "control")
             for name in ("subordinate", "dominant")[:branches]]
    assert [row["alpha"] for row in rows] == [i / 20 for i in range(1, 11)]
    psnrs = ["psnr", "dominant", "unrelated", "by other"][:2 + branches]
    assert all([*row] == ["alpha", *psnrs, *(names if teacher else [])] for row in rows)
    assert separability(model, images[:8], images[8:17]) == {}
    noise = same_noise(model, images)                      # one mask for all
    assert torch.equal(noise, noise[:1].expand_as(noise)) and len(noise[0].unique()) == 24


def test_separability_finds_what_exists():
    """Images are noise here, so untrained latents of a mixture tell more of the dominant image than
    of the other. PSNR equals one computed by hand."""
    images = torch.randn(300, 3, 16, 24, generator=torch.Generator().manual_seed(4))
    model, val = build("imae", teacher=TEACHER), images[200:]
    decoded, mask = model.unmix(val, val.roll(1, 0), 0.2, same_noise(model, val))
    row = [*separability(model, images[:200], val).values()][0][3]
    assert row["alpha"] == 0.2
    for name, x, y in (("psnr", decoded[0], val), ("dominant", decoded[0], val.roll(1, 0)),
                       ("unrelated", decoded[0], val.roll(50, 0)), ("by other", decoded[1], val)):
        wanted = psnr(denormalize(x, model), denormalize(y, model), model.encoder.pixels_of(mask))
        assert row[name] == pytest.approx(wanted.mean().item())
    fit, score = (latents(model, z, 0.2, ("subordinate", "dominant")) for z in (images[:200], val))
    for source in ("mixed", "control"):                    # computed from the mixture alone
        assert row[f"{source} subordinate"] < row[f"{source} dominant"] < 0.95
        for name in ("subordinate", "dominant"):
            x, y = ((z[source], z[f"teacher {name}"]) for z in (fit, score))
            assert row[f"{source} {name}"] == pytest.approx(ridge_r2(*x, *y))

    model.teacher["encoder"], model.teacher["decoder_embed"] = model.encoder, model.decoder_embed[0]
    row = [*separability(model, images[:200], val).values()][0][0]          # weights 0.05 and 0.95
    assert row["branch dominant"] > 0.9 > 0.3 > row["branch subordinate"]


def test_unmixed():
    """Each of four weights has a row, with both predictions and both images. The caption counts the
    rows in which the subordinate prediction is nearer to its image."""
    model, (images, _) = build("imae"), images_and_noise()
    caption, columns = draw_unmixed(model, images[:2])["unmix"]
    alphas, (x_1, x_2) = torch.arange(0.1, 0.5, 0.1), images[:2, None].expand(2, 4, 3, 16, 24)
    mix, _ = model.mix_images(x_1, x_2, alphas)
    decoded, mask = model.unmix(x_1, x_2, alphas, same_noise(model, x_1))
    wanted = mix, mix * (1 - model.encoder.pixels_of(mask)), *decoded, x_1, x_2
    for column, images_wanted in zip(columns.values(), wanted, strict=True):
        assert torch.allclose(column, images_wanted, atol=1e-5)
    own, other = ((decoded[0] - x).square().sum((1, 2, 3)) for x in (x_1, x_2))
    assert f"in {(own < other).sum()} of 4 rows" in caption
    assert draw_unmixed(model, images[:1]) == {}


def test_command(pretrain, folder, spy, capsys):
    """The command prints tables and writes pictures for each checkpoint, on the validation images
    that it was trained on, or on others."""
    seen = spy(analyses, "analyse", lambda model, train, val: (train, val))
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
        assert Image.open(f"runs/{name}.png").width > 90 and f"runs/{name}.png" in said
    val = train.open_data(str(folder), HERE)[1].images / 255
    assert all((x == val).all((1, 2, 3)).any() for x in seen[2][1])    # MINR's are in [0, 1]
    assert len(seen[2][1]) == 11 and seen[2][0] is None and len(seen[4][0]) == 40
    main(["runs/imae", "--workers", "0", "--eval_images", "10", "--data", "shapes"])
    assert "shapes: 10 mixtures of two" in " ".join(capsys.readouterr().out.split())
