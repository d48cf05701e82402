"""What the tour, the diagrams and the analyses do with masks."""

import torch

from vit import mask_noise


def fixed_noise(encoder, images):
    """Return noise (B,L) for images (B,C,H,W), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    return mask_noise("random", len(images), encoder.grid, generator=generator).to(images.device)


def copy_visible(encoder, decoded, images, mask):
    """Return `decoded` (B,C,H,W), with the patches of `images` where mask (B,L) is 0 (visible)."""
    return torch.where(encoder.pixels_of(mask).bool(), decoded, images)
