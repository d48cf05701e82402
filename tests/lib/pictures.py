"""Pictures of images in columns, with titles."""

import math

import torch
import torch.nn.functional as F
from PIL import ImageDraw, ImageFont
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import make_grid


def save_picture(columns, path):
    """Write columns {title: images (rows,C,H,W) in [0, 1]} as a picture. Enlarges small images. The
    background is transparent, for light and dark pages."""
    images = [x[:, :3].cpu() if x.shape[1] >= 3 else x[:, :1].cpu() for x in columns.values()]
    H, W = images[0].shape[2:]
    size = [n * math.ceil(128 / max(H, W)) for n in (H, W)]
    top = 4 + 20 * max(len(title.splitlines()) for title in columns)
    cells = torch.stack([F.interpolate(x, size) for x in images], dim=1).flatten(0, 1)
    cells = torch.cat([cells.expand(-1, 3, -1, -1), torch.ones_like(cells[:, :1])], dim=1)  # RGBA
    grid = make_grid(cells, nrow=len(images))
    picture = to_pil_image(F.pad(grid, (0, 0, top, 0)).clamp(0, 1))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(17)
    for i, title in enumerate(columns):
        draw.text((2 + i * (size[1] + 2), 0), title, fill="#777", font=font)
    picture.save(path)
