"""Draw how the five methods work. `python -m tests.diagrams` writes to .github: hero.svg, what the
lines of MAE.forward make of an image; diagram_all.svg, all methods; and diagram_mae.svg and so on,
one method each, with the code's names and shapes.

One function per method draws its two diagrams. x and y are pixels of the README's picture, y from
the top of a method's images. In labels, | separates lines; lines of code begin with `, and the
README has none.
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
from vit import denormalize, normalize, patchify

# Images have 4 x 4 patches, numbered row by row. CrossMAE predicts `some` of the masked ones.
PATCHES = dict(all=range(16), visible=(2, 5, 11, 12), some=(0, 7, 9, 14),
               masked=(0, 1, 3, 4, 6, 7, 8, 9, 10, 13, 14, 15))
SIDE, MID, WORDS = 64, 32, 87          # an image's side and centre; y of the words below the images
MARKS = (Path(__file__).parent / "lib/diagrams.svg").read_text(encoding="utf-8")
MARKS = MARKS.split("\n", 1)[1].removesuffix("</svg>\n")
KEY = dict(hills="visible patch", house="visible, second image", blend="blended patch",
           masked="masked patch", zero="masked pixels set to 0", o="not in the loss",
           a="token of a patch", c="class token", m="mask token, with position", w="weight token",
           shared="hollow: learned, the same for all images", own="made for each image",
           block="transformer block", cross="cross-attention block",
           frozen="trained before, frozen", wire="the loss compares",
           kept="kept after pretraining", new="differs from MAE")


def tag(name, cls="", body="", **attributes):
    words = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<{name} class="{cls}"{words}>{body}</{name}>'


def squares(ids, gap):
    """Return the squares of some patches of an image, as path data."""
    s = 16 - 2 * gap
    return "".join(f"M{i % 4 * 16 + gap} {i // 4 * 16 + gap}h{s}v{s}h{-s}z" for i in sorted(ids))


class Drawing:
    """Collects the parts of a picture. Its methods are the visual language."""

    def __init__(self, detail):
        self.detail, self.parts, self.used, self.bottom = detail, [], set(), 0
        self.low = 162 if detail else 121                  # height of an area of the class `new`

    def add(self, name, cls, body="", **attributes):
        self.used.add(cls)
        self.bottom = max(self.bottom, attributes.get("y", 0) + attributes.get("height", 0))
        self.parts.append(tag(name, cls, body, **attributes))

    def say(self, *labels):
        """Write labels (x, y, lines), or (x, lines) below the images."""
        for x, *y, lines in labels:
            for i, line in enumerate(lines.split("|")):
                kind = {"`": "code", "~": "soft fine", "^": "soft narrow"}.get(line[:1], "soft")
                if line and kind != ("soft narrow" if self.detail else "code"):
                    self.add("text", kind, line.lstrip("`~^"), x=x,
                             y=(y or [WORDS])[0] + 14 * i * (kind != "soft narrow"))

    def rect(self, x, y, width, height, cls="new", r=5):
        self.add("rect", cls, x=x, y=y, width=width, height=height, rx=r)

    def arrow(self, *points, both=False):
        self.add("polyline", "wire", points=" ".join(f"{x},{y}" for x, y in points),
                 marker_start="url(#head)" if both else "none", marker_end="url(#head)")

    def flow(self, y, *spans):
        for x0, x1 in spans:
            self.arrow((x0, y), (x1, y))

    def image(self, x, y, img, shown, others="masked", blur="none", size=SIDE):
        """Draw the patches `shown` of an image. The others are grey squares (masked), squares with
        a zero (zero), or small ones, if visible, and grey ones, if masked (o)."""
        rest = {*PATCHES["all"]} - {*PATCHES[shown]}
        small = rest & {*PATCHES["visible"]} if others == "o" else set()
        body = tag("g", "", tag("use", "", href="#" + img, filter=blur), clip_path=f"url(#{shown})")
        body += tag("path", "o", d=squares(small, 6)) * bool(small)
        if others == "zero":
            body += "".join(tag("use", "", href="#zero", x=i % 4 * 16, y=i // 4 * 16)
                            for i in sorted(rest))
        elif rest - small:
            body += tag("path", "masked", d=squares(rest - small, 1))
        self.add("g", "", body, transform=f"translate({x} {y}) scale({size / SIDE})")
        self.used.update([img, others] if rest else [img])

    def tokens(self, x, columns, y=MID, turn=False):
        """Draw columns of tokens, a letter each. The first is centred on y; all end together. If
        turned, they are rows."""
        columns = columns.split()
        if turn:
            self.parts.append(f'<g transform="translate({x} {y}) rotate(-90)">')
            x, y = -7, 4.5 * len(columns[0]) - 1
        for i, column in enumerate(columns):
            for j, letter in enumerate(column[::-1]):
                self.add("use", letter, href=f"#{letter}", x=x + 16 * i,
                         y=y + 4.5 * len(columns[0]) - 8 - 9 * j)
                self.used.add(letter.lower())              # the legend shows c for C
        self.parts += ["</g>"] * turn

    def blocks(self, x, n, y=MID, height=SIDE, cls="block"):
        for i in range(n):
            self.rect(x + 13 * i, y - height / 2, 8, height, cls, 2.5)

    # ---------------------------------------------- parts of several methods, from left to right
    def encoder(self, output, y=MID, image="hills", tokens="Caaaa", others="masked", x=182,
                words="encoder"):
        """Draw the part that is kept, between an image and its output. Its blocks begin at x."""
        self.image(14, y - MID, image, "visible", others)
        self.rect(86, y - 36, x - 32, 74, "kept", 6)
        self.tokens(152, tokens, y)
        self.blocks(x, 4, y)
        self.flow(y, (82, 149), (x - 14, x - 3), *[(x + 50, x + 62)] * bool(output))
        self.tokens(x + 65, output, y)
        self.say((117, y - 7, "~linear"), (119, y + 16, "~+ position"),
                 (161 if x == 182 else x + 23, y + 55, "`encoder" if self.detail else
                  words if x == 182 else f"~{words}"))

    def decoder(self, start, y=MID, tokens="caaaa"):
        self.tokens(440, tokens + " mmmm mmmm mmmm", y)
        self.blocks(518, 2, y, 56)
        self.flow(y, (start, 436), (504, 515), (542, 638))
        self.say((585, y - 7, "`decoder_pred" if self.detail else "~linear"))

    def mlp(self, what, tall, wide, shape):
        """Draw an MLP. Its second layer is the product of matrices of the classes tall and wide."""
        for x, rows, columns, cls in (364, 4, 3, tall), (397, 3, 4, wide):
            for i in range(12):
                self.rect(x + i % columns * 8, 26 - 4 * rows + i // columns * 8, 7, 7, cls, 0)
        self.add("path", "wire", d="M363 8V4H429V8")                       # a bracket above both
        self.arrow((396, 4), (396, -7), (554, -7), (554, 5))
        self.rect(455, MID - 14, 28, 28, "shared", 2)
        for i in (7, 14, 21) if what == "patch" else [18]:
            self.add("path", "thin", d=f"M{455 + i} 18v28M455 {46 - i}h28")
        self.rect(*(469, 25, 7, 7, "ink", 0) if what == "patch" else (470.5, 25.5, 5, 5, "ink"))
        self.add("path", "wire", d=f"M489 {MID - 8}q3-8 6 0t6 0")          # Fourier features
        nodes = [[(518 + 24 * i, MID + 20 * (j - 1)) for j in range(3)] for i in range(4)]
        for cls, start, end in zip(("thin", "thick", "thin"), nodes, nodes[1:]):
            self.add("path", cls, d="".join(f"M{x} {y}L{X} {Y}" for x, y in start for X, Y in end))
        for x, y in sum(nodes, []):
            self.add("circle", "shared", cx=x, cy=y, r=3.5)
        self.flow(MID, (486, 510), (598, 638))
        self.say((392, 31, "×"), (469, f"{what}|~position|`coords" + f"|`{shape}" * bool(shape)),
                 (500, "||||`fourier_features"), (554, "^MLP"))
        if self.detail or what == "pixel":
            self.say((391, "~one layer,|~for each image|^layer"),
                     (554, "~MLP; all but orange:|~shared by all images"))
        else:                                              # where these symbols are first used
            self.say((390, "~orange: one|~layer, made for|~each image|^layer"), (469, "||~as waves"),
                     (556, "~MLP, a small network;|~the rest is shared|~by all images"))

    def loss(self, words, shape, shown="masked", rows=(("hills", MID),), new=True, note=""):
        """Compare predictions, of a shape, with originals: images, each centred on a height y. The
        words are on yellow if they are `new`. Below them is a note."""
        bottom = rows[-1][1] + MID
        if new:
            self.rect(642, bottom + 8, 170, 20 + 14 * words.replace("|^", "").count("|"))
        for image, y in rows:
            self.image(642, y - MID, image, shown, "o", "url(#blur)")
            self.image(748, y - MID, image, shown, "o")
            self.arrow((710, y), (744, y), both=True)
        self.say((727, bottom + 23, words), (727, bottom + 41, note),
                 *((x, bottom + 58, f"`{name}" + f"|`{shape}" * bool(shape)) for x, name in
                   ((674, "pred"), (780, "target"))))


# ------------------------------------------- the methods; the pictures show the docstrings
NORMALISED = "~(normalised by default)"
IMAGES = (46, "`images|`(B,C,H,W)|`ids_keep|`(B,K)")


def mae(d):
    """MAE: Encode only the visible patches. A small decoder predicts the masked ones."""
    d.encoder("caaaa", words="large encoder")
    d.decoder(265)
    d.loss("masked patches", "(B,M,p*p*C)", new=False, note=NORMALISED)
    d.say(IMAGES, (254, "|`latent|`(B,1+K,D)"), (350, 25, "~linear + position"),
          (350, 48, "`decoder_embed|`decoder_pos_embed"), (500, "small decoder"),
          (472, "|`add_mask_tokens|`(B,1+L,E)"), (529, -3, "`decoder_blocks"))
    return ("L = 16 patches of p * p pixels, K = 4 visible, M = 12 masked. D, E: widths of encoder "
            "and decoder")


def crossmae(d):
    """CrossMAE: Mask tokens attend to encoder tokens, not each other, so some can be left out."""
    d.rect(242, -13, 388, d.low + 14 * (not d.detail))
    d.encoder("")
    for x, y in (173, MID), (192.5, 4), (205.5, 4), (218.5, 4), (231.5, 4):
        d.add("path", "wire", d=f"M{x} {y}V-10")
        d.add("circle", "soft", cx=x, cy=y, r=2)
    for y, turn, x, end, weights in (10, -7, 510, 0, (6, 12, 9, 16, 4)), (
            54, 72, 525, SIDE, (14, 5, 10, 7, 17)):        # a weighted sum for each decoder block
        d.arrow((173, -10), (250, -10), (250, y), (264, y))
        for i, height in enumerate(weights):
            d.rect(269 + 6 * i, y + 8 - height, 4, height, "shared", 0)
        d.add("text", "ink", "Σ", x=307, y=y + 7, font_size=18)
        d.tokens(350, "caaaa", y, turn=True)
        d.flow(y, (318, 346))
        d.arrow((394, y), (412, y), (412, turn), (x, turn), (x, end))
    d.blocks(506, 2, cls="cross")
    for y in (8, 24, 40, 56):                              # no path from one mask token to another
        d.tokens(462, "m", y)
        d.flow(y, (478, 503), (530, 638))
    d.loss("~masked patches, all or some|^all or some", "(B,P,p*p*C)", "some", note=NORMALISED)
    d.say(IMAGES, (200, -18, "`maps"), (294, 36, "`map_weights"), (373, 36, "`dec_norms"),
          (584, 2, "`decoder_pred" if d.detail else "~linear"))
    if d.detail:
        d.say((346, "for each decoder block, one mix|of the input and all blocks' outputs|"
               "`(B,1+K,D)"), (522, "mask tokens attend|only to the mix|`mask_token (B,P,E)|"
                               "`cross_attn"))
    else:
        d.say((346, "~for each decoder block, one sum|~of the input and all blocks' outputs,|"
               "~with learned weights (bars)|^sums"),
              (533, "~solid: cross-attention blocks.|~Mask tokens attend|~only to the sum|^attend"))
    return ("K = 4 visible, P = 4 predicted patches of p * p pixels. D, E: widths of encoder and "
            "decoder")


def hypermae(d):
    """HyperMAE: For each image, predict one layer of an MLP: patch position in, pixels out."""
    d.rect(263, -13, 367, d.low + 14 * (not d.detail))
    d.encoder("caaaa")
    d.tokens(267, "lll")
    d.blocks(293, 2)
    d.tokens(324, "www")
    d.flow(MID, (282, 290), (315, 322))
    d.arrow((339, MID), (348, MID), (348, 54), (412, 54), (412, 42))
    d.mlp("patch", "shared", "own", "")
    d.loss("masked patches", "", new=False, note=NORMALISED)
    d.say(IMAGES, *[(306, "more blocks"), (313, "||`feat2w_blocks")] if d.detail else [
          (304, "~weight tokens|~(diamonds),|~more blocks|^blocks")],
          (292, -18, "`weight_tokens"), (368, 67, "~linear"), (404, 67, "`proj"), (357, 30, "`T"),
          (391, "||`(B,h,h)"), (554, "||`paco_mlp"))
    return "K = 4 visible patches. h: width of the MLP"


def minr(d):
    """MINR: For each image, predict one layer of an MLP: pixel position in, colour out."""
    d.rect(6, -13, 230, d.low)
    d.rect(304, -13, 326, d.low)
    d.encoder("www", tokens="Czzza zazz azzz zzaz lll", others="zero", x=246)
    d.arrow((327, MID), (360, MID))
    d.mlp("pixel", "own", "shared", "(N,2)")
    d.loss("all pixels", "(B,N,C)", "all")
    d.say((110, "~masked pixels are 0;|~all patches are encoded|^masked are 0"),
          (46, "||`images|`(B,C,H,W)"),
          (222, -18, "`extra_tokens (G,D)"), (190, "||`(B,1+L+G,D)"), (341, 25, "~linear"),
          (332, "||`tokens|`(B,G,D)"), (348, 64, "`to_columns"), (391, "||`U @ V|`(B,a,b)"),
          (554, "||`layers"))
    return ("L = 16 patches, G = 3 weight tokens, N pixels. D: encoder width. a, b: inputs and "
            "outputs of the layer")


def imae(d):
    """i-MAE: Encode a random blend of two images. Linear layers taught by a frozen MAE split it."""
    d.rect(2, -17, 410, 214)
    d.rect(86, 52, 150, 74, "zone", 6)
    d.encoder("cxxxx", 88, "blend", "Cxxxx")
    for i, image, letter, weight, sign in ((1, "hills", "a", "smaller part", -1),
                                           (2, "house", "b", "larger part", 1)):
        teacher, branch, edge = 88 + 77 * sign, 88 + 38 * sign, 91.5 + 95.5 * sign
        tokens = "c" + 4 * letter
        d.image(31, teacher - 18, image, "visible", size=36)
        d.arrow((37, teacher - 20 * sign), (37, 88 + 35 * sign))
        d.tokens(92, "C" + 4 * letter, teacher, turn=True)
        d.tokens(348, tokens, teacher, turn=True)
        d.tokens(348, tokens, branch, turn=True)
        d.blocks(182, 4, teacher, 20, "frozen")
        d.rect(262, teacher - 6, 40, 12, "frozen", 2.5)
        d.flow(teacher, (70, 89), (137, 179), (232, 259), (305, 345))
        d.arrow((264, 88), (276, 88), (276, branch), (345, branch))
        d.arrow((369, teacher - 9 * sign), (369, branch + 9 * sign), both=True)
        d.decoder(393, branch, tokens)
        d.say((77, 92 + 47 * sign, f"~{weight}"), (205, edge, "~frozen MAE"),
              (282, edge, "~linear"), (312, branch - 7, "~linear"),
              (391, 92 + 57 * sign, "~match"), (18, teacher + 4, f"`x_{i}"), (369, edge, f"`w_{i}"),
              (369, 92 + 21 * sign, f"`z_{i}"))
    d.loss("~masked patches of both,|~and the two matches|^both, matches", "(B,M,p*p*C)",
           rows=(("hills", 50), ("house", 126)))
    d.say((500, 92, "~+ position, same decoder"), (327, 92, "`decoder_embed"), (20, 46, "`mix"),
          (205, 34, "`teach"), (76, 212, "`mix, x_i (B,C,H,W)"), (345, 212, "`w_i, z_i (B,1+K,E)"))
    return "K = 4 visible, M = 12 masked patches of p * p pixels. E: decoder width"


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
    sizes = dict(L=names["self"].encoder.num_patches, M=names["ids_mask"].shape[1])
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
    return svg("hero", d.parts, y - 8)


# --------------------------------------------------------------------------------- whole pictures
METHODS = dict(mae=mae, crossmae=crossmae, hypermae=hypermae, minr=minr, imae=imae)


def legend(d, kinds):
    """Explain marks. Return the height."""
    x, y, wide, high = (12, 18, 5.5, 24) if d.detail else (12, 20, 9.1, 29)
    for kind in kinds:
        words = 38 + round(wide * len(KEY[kind]))
        if x + words > 843:
            x, y = 12, y + high
        if kind == "wire":
            d.arrow((x - 2, y), (x + 16, y), both=True)
        elif kind in ("a", "c", "m", "w", "zero"):
            d.add("use", kind, href=f"#{kind}", x=x, y=y - (8 if kind == "zero" else 3.5))
        else:
            width, height = (4, 4) if kind == "o" else (11, 11)
            if kind in ("block", "cross", "frozen"):
                width, height = 8, 18
            d.rect(x + 7 - width / 2, y - height / 2, width, height, kind, height / 8)
            if kind == "blend":
                d.add("path", "hills", d=f"M{x + 1.5} {y - 5.5}h11l-11 11z")
        d.add("text", "soft", KEY[kind], x=x + 20, y=y + 4, text_anchor="start")
        x += words
    return y + 18


def svg(name, parts, height, scale=1):
    """Return an SVG on a background, of width 830 * scale. All ids in it begin with its name."""
    clips = "".join(tag("clipPath", "", tag("path", "", d=squares(ids, kind != "all")), id=kind)
                    for kind, ids in PATCHES.items())
    body = [MARKS, clips, tag("rect", "back", width="100%", height="100%", rx=6), *parts]
    text = tag("svg", "", "\n".join(body), xmlns="http://www.w3.org/2000/svg", font_size=12,
               font_family="-apple-system, 'Segoe UI', Arial, sans-serif", text_anchor="middle",
               stroke_width=1.3, viewBox=f"0 0 830 {height}", width=830 * scale,
               height=height * scale)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text) + "\n"


def move(y, parts):
    return [f'<g transform="translate(0 {y})">', *parts, "</g>"]


def draw(picture):
    """Return the SVG of a method, by its name, or of "all" without the names of the code."""
    detail = picture != "all"
    top, above = (30, 36) if detail else (0, 45)
    d, columns, key, y = Drawing(detail), Drawing(detail), Drawing(detail), top + 28
    for name in [picture] if detail else METHODS:
        method = Drawing(detail)
        letters = METHODS[name](method)
        title, sentence = METHODS[name].__doc__.split(": ", 1)
        words = tag("tspan", "method", title, font_size=15, font_weight=600)
        words += tag("tspan", "sentence", sentence, dx=10)
        d.add("text", "ink", words, x=12, y=21 + y * (not detail), text_anchor="start")
        if not detail:
            d.add("path", "rule", d=f"M0 {y}H830")
        d.parts += move(y + above, method.parts)
        d.used |= method.used
        y += above + method.bottom + 12
    columns.rect(84, top, 330, y - top, "zone", 0)
    columns.rect(631, top, 199, y - top, "zone", 0)
    for x, word in (42, "mask"), (249, "encode"), (521, "decode"), (727, "loss"):
        columns.add("text", "ink head", word, x=x, y=top + 18, font_weight=600)
    columns.say((674, top + 18, "~predicted"), (780, top + 18, "~original"))
    of_mae = "hills masked o a c m shared block wire kept new".split()
    size = legend(key, [kind for kind in KEY if kind in (d.used | {"shared"} if detail else of_mae)])
    if not detail:
        parts = [*key.parts, *move(size, [*columns.parts, *d.parts])]
    else:
        d.add("text", "soft", f"B images of H * W pixels, C channels. {letters}.", x=12, y=y + 20,
              text_anchor="start")
        parts, y = [*columns.parts, *d.parts, *move(y + 28, key.parts)], y + 28
    return svg(picture, parts, y + size, 1.5 if detail else 1)         # large on a tour's page


if __name__ == "__main__":
    folder = Path(__file__).parent.parent / ".github"
    (folder / "hero.svg").write_text(hero(), encoding="utf-8")
    for name in ["all", *METHODS]:
        (folder / f"diagram_{name}.svg").write_text(draw(name), encoding="utf-8")
