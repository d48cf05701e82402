"""Draw how the five methods work. `python -m tests.diagrams` writes to .github: hero.svg, what the
lines of MAE.forward make of an image; diagram_all.svg, all methods; and diagram_mae.svg and so on,
one method each, with the code's names and shapes.

One function per method draws its two diagrams. x and y are pixels of the README's picture, y from the top of a
method's images. In labels, | separates lines; lines of code begin with `, and the README has none.
"""

import ast
import inspect
import re
import textwrap
from base64 import b64encode
from html import escape
from io import BytesIO
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image

from mae import MAE
from train import load_model, read_image
from vit import denormalize, gather_patches, normalize, patchify

# Images have 4 x 4 patches, numbered row by row. CrossMAE predicts `some` of the masked ones.
PATCHES = dict(all=range(16), visible=(2, 5, 11, 12), some=(0, 7, 9, 14),
               masked=(0, 1, 3, 4, 6, 7, 8, 9, 10, 13, 14, 15))
SIDE, MID, WORDS = 64, 32, 81          # an image's side and centre; y of the words below the images
MARKS = Path(__file__).with_suffix(".svg").read_text(encoding="utf-8").split("\n", 1)[1].removesuffix("</svg>\n")
KEY = dict(a="visible patch", b="visible, second image", x="blended patch", masked="masked patch",
           z="masked pixels set to 0", o="not in the loss", wire="the loss compares",
           c="class token", m="mask token, learned, with position", l="weight token, learned",
           w="weight token, encoded", own="made for each image", shared="shared by all images",
           block="transformer block", frozen="trained before, frozen", new="differs from MAE")


def tag(name, cls="", body="", **attributes):
    words = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<{name} class="{cls}"{words}>{body}</{name}>'


def squares(ids, gap):
    """Return the squares of some patches of an image, as path data."""
    s = 16 - 2 * gap
    return "".join(f"M{i % 4 * 16 + gap} {i // 4 * 16 + gap}h{s}v{s}h{-s}z" for i in ids)


class Drawing:
    """Collects the parts of a picture. Its methods are the visual language."""

    def __init__(self, detail):
        self.detail, self.parts, self.used = detail, [], set()
        self.low = 132 if detail else 116                  # height of an area of the class `new`

    def add(self, name, cls, body="", **attributes):
        self.used.add(cls)
        self.parts.append(tag(name, cls, body, **attributes))

    def say(self, *labels):
        """Write labels (x, y, lines), or (x, lines) below the images."""
        for x, *y, lines in labels:
            for i, line in enumerate(lines.split("|")):
                if line and (self.detail or line[0] != "`"):
                    self.add("text", "code" if line[0] == "`" else "soft", line.lstrip("`"), x=x,
                             y=(y or [WORDS])[0] + (11 if self.detail else 14) * i)

    def rect(self, x, y, width, height, cls="new", r=5):
        self.add("rect", cls, x=x, y=y, width=width, height=height, rx=r)

    def arrow(self, *points, both=False):
        self.add("polyline", "wire", points=" ".join(f"{x},{y}" for x, y in points),
                 marker_start="url(#head)" if both else "none", marker_end="url(#head)")

    def flow(self, y, *spans):
        for x0, x1 in spans:
            self.arrow((x0, y), (x1, y))

    def image(self, x, y, img, shown, others="masked", blur="none", size=SIDE):
        """Draw the patches `shown` of an image, and the others as squares of the class `others`."""
        rest = {*PATCHES["all"]} - {*PATCHES[shown]}
        body = tag("g", "", tag("use", "", href="#" + img, filter=blur), clip_path=f"url(#{shown})")
        body += tag("path", others, d=squares(rest, 6 if others == "o" else 1))
        self.add("g", "", body, transform=f"translate({x} {y}) scale({size / SIDE})")
        self.used.update([others] * bool(rest))

    def tokens(self, x, columns, y=MID):
        """Draw columns of tokens, a letter each. The first is centred on y; all end together."""
        columns = columns.split()
        for i, column in enumerate(columns):
            for j, letter in enumerate(column[::-1]):
                self.add("use", letter, href=f"#{letter}", x=x + 12 * i,
                         y=y + 5.5 * len(columns[0]) - 10 - 11 * j)

    def blocks(self, x, n, y=MID, height=SIDE, cls="block"):
        for i in range(n):
            self.rect(x + 15 * i, y - height / 2, 8, height, cls, 2.5)

    # ---------------------------------------------- parts of several methods, from left to right
    def encoder(self, words="encoder", y=MID, image="hills", tokens="caaaa", output=""):
        self.image(14, y - MID, image, "visible")
        self.tokens(140, tokens, y)
        self.blocks(168, 4, y)
        self.flow(y, (82, 136), (153, 165), *[(224, 236)] * bool(output))
        self.tokens(239, output, y)
        self.say((109, y - 6, "`ids_keep"), (109, y + 13, "`(B,K)"), (132, y + 48, "|`(B,1+K,D)"),
                 (188, y + 48, words + "|`encoder"))

    def decoder(self, start, y=MID, tokens="caaaa"):
        self.tokens(478, tokens + " mmmm mmmm mmmm", y)
        self.blocks(537, 2, y, 56)
        self.flow(y, (start, 474), (526, 534), (564, 638))
        self.say((590, y - 6, "linear"), (601, y + 13, "`decoder_pred"))

    def mlp(self, what, tall, wide, product, shape, layers):
        """Draw an MLP. Its second layer is the product of matrices of the classes tall and wide."""
        for x, rows, columns, cls in (345, 4, 3, tall), (378, 3, 4, wide):
            for i in range(12):
                self.rect(x + i % columns * 8, 26 - 4 * rows + i // columns * 8, 7, 7, cls, 0)
        self.add("path", "wire", d="M344 8V4H410V8")                       # a bracket above both
        self.arrow((377, 4), (377, -7), (541, -7), (541, 5))
        self.rect(446, MID - 14, 28, 28, "shared", 2)
        for i in (7, 14, 21) if what == "patch" else [18]:
            self.add("path", "thin", d=f"M{446 + i} 18v28M446 {46 - i}h28")
        self.rect(*(460, 25, 7, 7, "ink", 0) if what == "patch" else (461.5, 25.5, 5, 5, "ink"))
        nodes = [[(505 + 24 * i, MID + 20 * (j - (n - 1) / 2)) for j in range(n)]
                 for i, n in enumerate((2, 3, 3, 3))]
        for cls, start, end in zip(("thin", "thick", "thin"), nodes, nodes[1:]):
            self.add("path", cls, d="".join(f"M{x} {y}L{X} {Y}" for x, y in start for X, Y in end))
        for x, y in sum(nodes, []):
            self.add("circle", "shared", cx=x, cy=y, r=3.5)
        self.flow(MID, (478, 497), (586, 638))
        self.say((373, 30, "×"), product, (460, f"{what}|position|`coords|{shape}"),
                 (470, 7, "`fourier_features"),
                 (555, "MLP; all but orange:|shared by all images|" + layers))

    def loss(self, words, shape, shown="masked", rows=(("hills", MID),)):
        """Compare predictions, of a shape, with originals: images, each centred on a height y."""
        bottom = rows[-1][1] + MID
        if words != "masked patches":
            self.rect(652, bottom + 4, 150, 18 + 14 * words.count("|"))
        for image, y in rows:
            self.image(642, y - MID, image, shown, "o", "url(#blur)")
            self.image(748, y - MID, image, shown, "o")
            self.arrow((710, y), (744, y), both=True)
        self.say((727, bottom + 17, words), (674, bottom + 44, f"`pred|`{shape}"),
                 (780, bottom + 44, f"`target|`{shape}"))


# ------------------------------------------- the methods; the README's picture shows the docstrings
def mae(d):
    """MAE: Encode only the visible patches. A small decoder predicts the masked ones."""
    d.encoder("large encoder", output="caaaa")
    d.decoder(252)
    d.loss("masked patches", "(B,M,p*p*C)")
    d.say((46, "|`images|`(B,C,H,W)"), (243, "|`latent|`(B,1+K,D)"), (445, 26, "linear"),
          (435, 45, "`decoder_embed"), (340, "after training, all methods|keep only the encoder"),
          (530, "small decoder"), (481, "|`add_mask_tokens|`(B,1+L,E)"), (577, "|`decoder_blocks"))
    return "M = 12 masked. D, E: widths of encoder and decoder"


def crossmae(d):
    """CrossMAE: Mask tokens attend to encoder tokens, not each other, so some can be left out."""
    d.rect(138, -13, 114, 13)
    d.rect(230, -13, 394, d.low)
    d.encoder()
    for x, y in (157, MID), (172, 0), (187, 0), (202, 0), (217, 0):
        d.add("circle", "soft", cx=x, cy=y, r=2.5)
        d.add("path", "wire", d=f"M{x} {y}V-7")
    for y, turn, x, end in (14, -7, 541, 0), (50, 71, 556, SIDE):      # a mix for each block
        d.arrow((157, -7), (262, -7), (262, y), (275, y))
        d.rect(278, y - 10, 44, 20, "block", 4)
        d.flow(y, (325, 337))
        d.tokens(341, "c a a a a", y)
        d.arrow((402, y), (420, y), (420, turn), (x, turn), (x, end))
        d.say((300, y + 4, "mix"))
    d.blocks(537, 2)
    for y in (8, 24, 40, 56):                              # no path from one mask token to another
        d.tokens(490, "m", y)
        d.flow(y, (502, 534), (546, 549), (564, 638))
    d.loss("masked patches,|all or some", "(B,P,p*p*C)", "some")
    d.say((344, 85, "for each decoder block, a learned mix|of the input and all blocks' outputs"),
          (46, "|`images|`(B,C,H,W)"), (200, -17, "`maps (n,B,1+K,D)"), (300, 35, "`map_weights"),
          (369, 35, "`dec_norms"), (369, 68, "`(B,1+K,D)"), (463, "`mask_token|`(B,P,E)"),
          (590, 2, "linear"), (596, 35, "`decoder_pred"),
          (545, 85, "mask tokens attend|only to the mix|`cross_attn"))
    return "M = 12 masked, P = 4 predicted, n = 5 maps. D, E: widths of encoder and decoder"


def hypermae(d):
    """HyperMAE: For each image, predict one layer of an MLP: patch position in, pixels out."""
    d.rect(250, -13, 374, d.low)
    d.encoder(output="caaaa lll")
    d.blocks(275, 2)
    d.tokens(311, "www")
    d.flow(MID, (266, 273), (301, 308))
    d.arrow((326, MID), (334, MID), (334, 52), (394, 52), (394, 41))
    d.mlp("patch", "shared", "own", (377, "one layer,|for each image|`M = T @ proj(W)|`(B,h,h)"),
          "`(B,P,2)", "`paco_mlp")
    d.loss("masked patches", "(B,P,p*p*C)")
    d.say((46, "|`images|`(B,C,H,W)"), (258, -3, "`weight_tokens"), (362, 64, "linear"),
          (290, "more blocks|`feat2w_blocks|`(B,1+K+n,D)"), (316, 58, "`W"))
    return "P = 12 predicted, n = 3 weight tokens. D, h: widths of encoder and MLP"


def minr(d):
    """MINR: For each image, predict weights of an MLP: pixel position in, colour out."""
    d.rect(6, -13, 151, d.low)
    d.rect(234, -13, 390, d.low)
    d.image(14, 0, "hills", "visible", "z")
    d.tokens(91, "czzza zazz azzz zzaz lll")               # the columns of the image
    d.blocks(168, 4)
    d.tokens(239, "www")
    d.flow(MID, (80, 88), (156, 165), (224, 236), (254, 341))
    d.mlp("pixel", "own", "shared", (342, "one MLP layer for each image|(TransINR: all layers)|"
                                     "`W = U @ V|`(B,a,b)"), "`(N,2)", "`layers")
    d.loss("all pixels", "(B,N,C)", "all")
    d.say((82, "masked pixels are 0;|all patches are encoded"), (46, "||`images|`(B,C,H,W)"),
          (116, "||`extra_tokens|`(B,1+L+G,D)"), (188, "encoder|`encoder"), (296, 26, "linear"),
          (243, "||`tokens|`(B,G,D)"), (296, 45, "`to_columns"))
    return "G = 3 weight tokens. N pixels. W: a inputs, b outputs; in TransINR, W = [U ... U] * V"


def imae(d):
    """i-MAE: Encode a random blend of two images. Linear layers taught by a frozen MAE split it."""
    d.rect(6, -15, 406, 198)
    d.rect(114, 27, 142, 117, "zone")
    d.encoder("encoder", 84, "blend", "cxxxx", "cxxxx")
    for i, image, tokens, weight, sign in ((1, "hills", "caaaa", "smaller part", -1),
                                           (2, "house", "cbbbb", "larger part", 1)):
        teacher, branch, row = 84 + 73 * sign, 84 + 38 * sign, " ".join(tokens)
        d.image(28, teacher - 18, image, "visible", size=36)
        d.arrow((34, teacher - 20 * sign), (34, 84 + 35 * sign))
        for x, y in (92, teacher), (348, teacher), (348, branch):
            d.tokens(x, row, y)
        d.blocks(168, 4, teacher, 20, "frozen")
        d.flow(teacher, (67, 89), (152, 165), (224, 345))
        d.arrow((252, 84), (264, 84), (264, branch), (345, branch))
        d.arrow((366, teacher - 8 * sign), (366, branch + 8 * sign), both=True)
        d.decoder(408, branch, tokens)
        d.say((74, 88 + 46 * sign, weight), (196, 88 + 91 * sign, "frozen MAE"),
              (304, branch - 6, "linear"), (389, 88 + 55 * sign, "match"),
              (17, teacher + 3, f"`x_{i}"), (376, 87 + 26 * sign, "`z_i (B,1+K,E)"),
              (286, 87 + 64 * sign, "`teach(x_i,ids_keep)"), (376, 87 + 86 * sign, "`w_i"))
    images = ("hills", 46), ("house", 122)
    d.loss("masked patches of both,|and the two matches", "(B,M,p*p*C)", rows=images)
    d.say((545, 88, "same decoder"), (302, 87, "`decoder_embed"), (92, 64, "`mix"))
    return "M = 12 masked. D, E: widths of encoder and decoder. The images' weights are random"


# ------------------------------------------------------- the README's first picture: MAE.forward
SENTENCES = ("Cut the image into {L} patches.|Mask {M} of them at random.",
             "The encoder turns each visible patch|into a row of numbers.",
             "The decoder predicts the masked patches|from these rows.",
             "The target: the masked patches|of the original.",
             "How far off? Training makes this|number small, without any labels.")


def forward_lines():
    """Return the statements of MAE.forward, without its docstring and its return."""
    source = textwrap.dedent(inspect.getsource(MAE.forward))
    statements = ast.parse(source).body[0].body[1:-1]
    return [" ".join(ast.get_source_segment(source, x).split()) for x in statements]


def run_forward():
    """Run these lines with a trained model and an image. Return the variables, {name: value}."""
    folder = Path(__file__).parent / "models"
    model = load_model(folder / "mae.pt")
    images = normalize(read_image(folder / "images/val/automobile/0917.jpg")[None], model)
    names = dict(self=model, images=images, noise=model.encoder.fixed_noise(images))
    with torch.no_grad():
        for line in forward_lines():
            exec(line, MAE.forward.__globals__, names)
    return names


def mosaic(tiles, grid, gap=2):
    """Return a picture as a data URL: tiles (L,p,q,4), RGB and opacity in [0, 1], in a grid."""
    tiles = tiles.repeat_interleave(6, dim=1).repeat_interleave(6, dim=2)
    tiles = F.pad(tiles, (0, 0, 0, gap, 0, gap)).unflatten(0, grid)    # (h, w, p, q, 4)
    pixels = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)         # (h*p, w*q, 4)
    pixels = pixels[:len(pixels) - gap, :pixels.shape[1] - gap].mul(255).round().byte()
    file = BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def hero_pictures(names):
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
    """Return the SVG of MAE.forward: a sentence for each line, the line, and what it made."""
    names, d, side, left, right, y = run_forward(), Drawing(True), 112, 566, 706, 12
    sizes = dict(L=names["_"].shape[1], M=names["ids_mask"].shape[1])
    steps = zip(forward_lines(), SENTENCES, hero_pictures(names), strict=True)
    for i, (code, words, pictures) in enumerate(steps):
        words = words.format(**sizes).split("|")
        code = textwrap.wrap(code, 49, subsequent_indent="\u00a0" * 4)         # SVG keeps these
        top, middle = y + side / 2 + 17 - 12 * len(words + code), y + side / 2
        for j, line in enumerate(words + code):
            d.add("text", "line" if line in code else "say", escape(line), x=14,
                  y=top + 24 * j + 3 * (line in code), text_anchor="start")
        boxes = [(left, side), (right, side)] if i != 1 else [(left, 10), (left + 16, 236)]
        for (x, width), data in zip(boxes, pictures):
            if i != 1:
                d.rect(x - 1, y - 1, width + 2, side + 2, "pale", 0)
            d.add("image", "", href=data, x=x, y=y, width=width, height=side,
                  preserveAspectRatio="none")
        if i in (0, 2, 4):
            d.flow(middle, (left + side + 4, right - 4))
        if i:
            d.add("path", "rule", d=f"M0 {y - 10}H830")
        y += side + 20
    d.add("circle", "c", cx=left + 5, cy=147.2, r=3)       # the class token, at the first row
    d.add("text", "loss", f"{names['loss']:.2f}", x=right + side / 2, y=middle + 12)
    return svg("hero", d.parts, y - 8, 12)


# --------------------------------------------------------------------------------- whole pictures
METHODS = dict(mae=mae, crossmae=crossmae, hypermae=hypermae, minr=minr, imae=imae)


def legend(d, kinds, size):
    """Explain marks. Return the height."""
    x, y = 12, 18
    for kind in kinds:
        width = 36 + round(.52 * size * len(KEY[kind]))
        if x + width > 843:
            x, y = 12, y + 24
        if len(kind) == 1:
            d.tokens(x, kind, y)
        elif kind == "wire":
            d.arrow((x - 4, y), (x + 12, y), both=True)
        else:
            height = 16 if kind in ("block", "frozen") else 9
            d.rect(x, y - height / 2, 9, height, kind, height / 8)
        d.add("text", "soft", KEY[kind], x=x + 16, y=y + size / 3, text_anchor="start")
        x += width
    return y + 18


def svg(name, parts, height, size, scale=1):
    """Return an SVG of width 830 on a background. All ids in it begin with its name."""
    body = "\n".join([MARKS, tag("rect", "back", width="100%", height="100%", rx=6), *parts])
    text = tag("svg", "", body, xmlns="http://www.w3.org/2000/svg", font_size=size,
               font_family="-apple-system, 'Segoe UI', Arial, sans-serif", text_anchor="middle",
               stroke_width=1.3, viewBox=f"0 0 830 {height}", width=scale * 830,
               height=scale * height)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text) + "\n"


def draw(picture):
    """Return the SVG of a method, by its name, or of "all" without the names of the code."""
    detail = picture != "all"
    d, top, y = Drawing(detail), Drawing(detail), 28
    size, scale, above, below = (9, 1.5, 34, 70) if detail else (12, 1, 43, 43)
    for name in [picture] if detail else METHODS:
        d.parts.append(f'<g transform="translate(0 {y + above})">')
        note = METHODS[name](d)
        if not detail:
            title, sentence = METHODS[name].__doc__.split(": ", 1)
            words = tag("tspan", "method", title, font_size=15, font_weight=600)
            words += tag("tspan", "sentence", sentence, dx=10)
            d.add("text", "ink", words, x=12, y=21 - above, text_anchor="start")
            d.add("path", "rule", d=f"M0 {-above}H830")
        d.parts.append("</g>")
        y += above + (168 if name == "imae" else SIDE) + below
    if detail:
        d.add("text", "soft", "B images, C channels, p * p pixels per patch. Here L = 16 "
              f"patches, K = 4 visible, {note}.", x=12, y=y, text_anchor="start")
        y += 14
    height = legend(top, [kind for kind in KEY if kind in d.used], size)
    top.rect(84, height, 330, y, "zone", 0)
    top.rect(628, height, 202, y, "zone", 0)
    for x, word in (42, "mask"), (249, "encode"), (521, "decode"), (727, "loss"):
        top.add("text", "ink", word, x=x, y=height + 18, font_weight=600)
    top.say((674, height + 18, "predicted"), (780, height + 18, "original"))
    clips = "".join(tag("clipPath", "", tag("path", "", d=squares(ids, kind != "all")), id=kind)
                    for kind, ids in PATCHES.items())
    parts = [clips, *top.parts, f'<g transform="translate(0 {height})">', *d.parts, "</g>"]
    return svg(picture, parts, y + height, size, scale)


if __name__ == "__main__":
    folder = Path(__file__).parent.parent / ".github"
    (folder / "hero.svg").write_text(hero(), encoding="utf-8")
    for name in ["all", *METHODS]:
        (folder / f"diagram_{name}.svg").write_text(draw(name), encoding="utf-8")
