"""Draw the README's first picture, .github/hero.svg: what the lines of MAE.forward make of an
image. `python -m tests.lib.hero` does it again, after these lines have changed."""

import ast
import inspect
import textwrap
from base64 import b64encode
from html import escape
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from mae import MAE
from train import load_model, read_checkpoint, read_image
from vit import denormalize, mask_noise, normalize, patchify

ROOT = Path(__file__).resolve().parent.parent.parent
SENTENCES = ("Cut the image into 64 patches.|Mask 48 of them at random.",
             "The encoder turns each visible patch into|numbers: a row each, orange above zero,|"
             "blue below. (●: the class token.)",
             "The decoder predicts the masked patches.|Right: together with the visible ones.",
             "The target: the masked patches|of the original.",
             "How far off? Training makes this|number small, without any labels.")
STYLE = """
.say { font: 20px -apple-system, "Segoe UI", Arial, sans-serif; fill: #1f2328 }
.line { font: 18px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #0969da }
.loss { font-size: 34px; font-weight: 600; text-anchor: middle } .dot, .arrow { fill: #59636e }
.back { fill: #fff } .pale { fill: #e6eaef } .soft { font-size: 15px; text-anchor: middle }
@media (max-width: 560px) { .say { font-size: 23px } .soft { font-size: 19px }
.loss { font-size: 34px } }
@media (prefers-color-scheme: dark) { .say { fill: #f0f6fc } .line { fill: #58a6ff }
.back { fill: #0d1117 } .pale { fill: #2a313c } .dot, .arrow { fill: #9198a1 } }
"""


def run_forward():
    """Run the lines of MAE.forward, except its docstring and return, with a trained model. Returns
    the lines that assign something, the variables {name: value}, and the loss before training."""
    path = ROOT / "tests/models"
    model, config = load_model(path / "mae.pt"), read_checkpoint(path / "mae.pt")["config"]
    images = normalize(read_image(path / "images/val/automobile/0917.jpg")[None], model)
    noise = mask_noise("random", 1, model.encoder.grid, generator=torch.Generator().manual_seed(0))
    names, lines = dict(self=model, images=images, noise=noise), []
    source = textwrap.dedent(inspect.getsource(MAE.forward))
    torch.manual_seed(0)
    with torch.no_grad():
        for node in ast.parse(source).body[0].body[1:-1]:
            exec(ast.unparse(node), MAE.forward.__globals__, names)
            if isinstance(node, ast.Assign):               # an `if` does not run here
                lines.append(" ".join(ast.get_source_segment(source, node).split()))
        return lines, names, MAE(**config)(images, noise)[0].item()


def mosaic(tiles, grid, gap=2):
    """Return a picture as a data URL: tiles (L,p,q,4), RGB and opacity in [0, 1], in a grid."""
    tiles = tiles.repeat_interleave(6, dim=1).repeat_interleave(6, dim=2)
    tiles = F.pad(tiles, (0, 0, 0, gap, 0, gap)).unflatten(0, grid)    # (h, w, p, q, 4)
    pixels = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)         # (h*p, w*q, 4)
    pixels = pixels[:len(pixels) - gap, :pixels.shape[1] - gap].mul(255).round().byte()
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def pictures_of(names):
    """Return the pictures of each line, one or two, from the variables of MAE.forward."""
    encoder, ids, keep = names["self"].encoder, names["ids_mask"][0], names["ids_keep"][0]
    (p, q), L, grid = encoder.patch_size, encoder.num_patches, encoder.grid
    orange, blue = torch.tensor([[213, 94, 0], [0, 114, 178]]) / 255

    def tiles(patches):                                    # (1, n, p*q*3) -> (n, p, q, 4)
        x = denormalize(patches.view(-1, p, q, 3).permute(0, 3, 1, 2), names["self"])
        return F.pad(x.permute(0, 2, 3, 1), (0, 1), value=1)

    def place(x, ids, opacity=0.0):                        # grey where there is no patch
        grey = torch.tensor([0.5, 0.5, 0.5, opacity]).expand(L, p, q, 4)
        return mosaic(grey.index_copy(0, ids, x), grid)

    patches, pred = tiles(patchify(names["images"], (p, q))), tiles(names["pred"])
    error = (names["pred"] - names["target"]).square().view(-1, p, q, 3).mean(3, keepdim=True)
    error = 1 - (1 - orange) * (error / error.quantile(0.99)).clamp(max=1)     # white: no error
    latent = names["latent"][0, :, None, :, None].expand(-1, p, -1, 1)         # (1+K, p, D, 1)
    strength = (latent.abs() / latent.abs().quantile(0.99)).clamp(max=1)
    rows = torch.cat([torch.where(latent > 0, orange, blue), strength], dim=3)
    column = F.pad(patches[keep], (0, 0) * 3 + (1, 0))     # no patch for the class token
    return [[mosaic(patches, grid), place(patches[keep], keep, 0.6)],
            [mosaic(x, (len(x), 1)) for x in (column, rows)],
            [place(pred, ids), mosaic(patches.index_copy(0, ids, pred), grid, gap=0)],
            [place(tiles(names["target"]), ids)], [place(F.pad(error, (0, 1), value=1), ids)]]


def hero():
    """Return the SVG: a sentence for each line, the line, and what it made."""
    (lines, names, before), parts, side, left, right, y = run_forward(), [], 112, 566, 706, 12
    for i, (code, words, pictures) in enumerate(
            zip(lines, SENTENCES, pictures_of(names), strict=True)):
        words = [("say", line) for line in words.split("|")]
        spaces = "\u00a0" * 4                              # SVG would drop other ones
        words += [("line", line) for line in textwrap.wrap(code, 49, subsequent_indent=spaces)]
        for j, (kind, line) in enumerate(words):
            parts.append(f'<text class="{kind}" x="14" y="{y + 73 - 12 * len(words) + 24 * j}">'
                         f'{escape(line)}</text>')
        boxes = [(left, side), (right, side)] if i != 1 else [(left, 10), (left + 16, 236)]
        for (x, width), data in zip(boxes, pictures):
            parts.append(f'<rect class="{"pale" if i != 1 else "back"}" x="{x - 1}" y="{y - 1}" '
                         f'width="{width + 2}" height="{side + 2}"/><image href="{data}" x="{x}" '
                         f'y="{y}" width="{width}" height="{side}" preserveAspectRatio="none"/>')
        if i in (0, 2, 4):
            parts.append(f'<path class="arrow" d="M{left + 116} {y + 55.4}h14v-2.6l6 3.2-6 3.2v-2.6'
                         f'h-14z"/>')
        parts += [f'<path class="pale" d="M0 {y - 11}h830v2h-830z"/>'] * (i > 0)
        y += side + 20
    middle = right + side / 2
    parts += [f'<circle class="dot" cx="{left + 5}" cy="147.2" r="3"/>',      # the class token
              f'<text class="say loss" x="{middle}" y="{y - 72}">{names["loss"]:.2f}</text>',
              f'<text class="say soft" x="{middle}" y="{y - 46}">untrained: {before:.1f}</text>']
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="830" viewBox="0 0 830 '
                      f'{y - 8}"><style>{STYLE}</style>',
                      '<rect class="back" width="100%" height="100%" rx="6"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    (ROOT / ".github/hero.svg").write_text(hero(), encoding="utf-8")
