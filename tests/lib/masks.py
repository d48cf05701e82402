"""What the tour, the diagrams and the analyses do with masks, and the PSNR of masked pixels."""

import torch

from vit import mask_noise


def fixed_noise(encoder, images):
    """Return noise (B,L) for images (B,C,H,W), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return mask_noise("random", len(images), encoder.grid, generator=generator).to(images.device)


def copy_visible(encoder, decoded, images, mask):
    """Return `decoded` (B,C,H,W), with the patches of `images` where mask (B,L) is 0 (visible)."""
    return torch.where(encoder.pixels_of(mask).bool(), decoded, images)


def psnr(decoded, images, where):
    """Return the PSNR (B,) in dB, as train.evaluate_psnr does, of the pixels where `where`
    (B,1,H,W) is 1. decoded and images (B,C,H,W) are in [0, 1]."""
    error = (decoded - images).square() * where                        # (B, C, H, W)
    error = error.mean((1, 2, 3)) / where.mean((1, 2, 3))              # (B,)
    return -10 * error.clamp(min=1e-10).log10()
