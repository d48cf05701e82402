"""Look inside a method: an image goes through it, and a page shows what every line makes of it.

    python -m tests.tour mae                           # our trained model, one of our images
    python -m tests.tour mae --checkpoint runs/mae_shapes/last.pt --image photo.jpg

The page, tour_METHOD.html, shows the code that ran: docstrings and comments are on the left, shapes
and pictures of what each line made on the right. Click a line with a triangle to open the functions
it calls, or "why?" to read what happens without the line. A table leads from the paper's sections
and equations to the lines. Lines are found by tracing, so your own method needs nothing in this
file. No page needs a network or JavaScript.
"""

import argparse
import ast
import inspect
import math
import re
import sys
import textwrap
from base64 import b64encode
from html import escape
from io import BytesIO
from pathlib import Path
from string import Template

import torch
import torch.nn.functional as F
from torchvision.transforms.v2.functional import to_pil_image

from tests.lib.masks import copy_visible, fixed_noise
from tests.lib.models import NORM_PIX_LOSS, load_any
from tests.lib.trace import flatten, statements, tensors, trace
from train import IMAE, METHODS, center_crop, read_image, shell
from vit import Method, ViT, denormalize, normalize, require, unpatchify, visible_count

try:
    from tests.why import at_lines
except ImportError:                                        # students' copies may lack it
    at_lines = dict

ROOT = Path(__file__).resolve().parent.parent
TRAINED = ROOT / "tests/models"
IMAGES = [TRAINED / f"images/val/{x}.jpg" for x in ("truck/0399", "frog/0044")]
VIT = str(ROOT / "vit.py")
TINY = dict(img_size=(32, 48), patch_size=4, in_chans=3, dim=80, depth=4, heads=4)


def masks(model):
    """Return whether noise and mask_ratio decide which patches are visible."""
    return hasattr(model, "mask_ratio") and "mask_ratio" not in model.unused


def letters(model):
    """Return {letter: size} for a model, with the letters in the docstrings of the files."""
    encoder = model.encoder
    (H, W), (h, w), (p, q) = encoder.img_size, encoder.grid, encoder.patch_size
    sizes = dict(C=encoder.in_chans, H=H, W=W, h=h, w=w, L=h * w, p=p, q=q, D=encoder.dim,
                 G=0 if encoder.extra_tokens is None else len(encoder.extra_tokens))
    if masks(model):
        K = visible_count(h * w, model.mask_ratio)
        sizes.update(K=K, M=h * w - K)
    if hasattr(model, "decoder_pos_embed"):
        sizes.update(E=model.decoder_pos_embed.shape[2])
    if hasattr(model, "map_weights"):                      # CrossMAE
        sizes.update(P=sizes["M"] - model.skipped)
    if hasattr(model, "map_ids"):
        sizes.update(n=len(model.map_ids))
    if hasattr(model, "weight_tokens"):                    # HyperMAE
        sizes.update(n=len(model.weight_tokens), h=model.proj.out_features,
                     P=sizes["L" if model.loss_on == "all" else "M"])
    return sizes


# ---------------------------------------------------------------------------------------- the lines
def made_by(steps):
    """Return [(name, tensor)] for the tensors that the runs of a line made. Of three or more runs,
    only the last tensor of each shape is kept. With two runs (i-MAE's branches), all are kept."""
    runs = [f", run {i} of 2" for i in (1, 2)] if len(steps) == 2 else [""] * len(steps)
    made = [(name + run, x) for step, run in zip(steps, runs)
            for name, part in zip(step.statement.targets or [""], step.made) for x in part]
    return made if len(steps) < 3 else [*{x.shape: (name, x) for name, x in made}.values()]


def numbers_of(made, steps=()):
    """Return as text the shapes of the tensors that a line made, or its last run's numbers."""
    words = [str(tuple(x.shape)) if x.ndim else f"{x.item():.4g}" for _, x in made]
    words = [*dict.fromkeys(words)] or [f"{x:.4g}" for step in steps[-1:] for x in step.values
                                        if isinstance(x, (int, float)) and abs(x) < 1000]
    return ", ".join(words) if len(words) < 6 else f"{words[0]} ... {words[-1]}"


def split_comment(text):
    """Split a comment into the shapes that it begins with, e.g. "(B, K), (B, M)", and its words."""
    shape = r"(?:\((?:\.{3}|[^().;:])*,[^().;:]*\)(?: each)?|scalar\b)"
    found = re.match(rf"# *({shape}(?:,?(?: or| then)? {shape})*|)(.*)", text)
    return found[1], found[2].strip(", ").lstrip(";:. ")


# ------------------------------------------------------------------------------------- the pictures
NOT_MEASURED = "not measured yet"
GREY = 0.8                                                 # where a picture has no patch


def open_image(file, img_size):
    """Return the middle of an image file as an image (3,H,W), uint8, with img_size (H, W)."""
    require(Path(file).is_file(), f"image {file} does not exist: check its name and its folder")
    return center_crop(read_image(file), img_size, 1)


def png_url(x):
    """Return an image (C,h,w) in [0, 1] as the URL of a PNG that contains it."""
    file = BytesIO()
    to_pil_image((255 * x).round().byte()).save(file, "PNG", compress_level=1)     # fast
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def png(x, height, text="", cls=""):
    """Return an image (C,h,w) in [0, 1] as HTML, about `height` pixels high, with a caption. Of
    three or more channels, the first three are shown; otherwise the first, in grey. Of the class
    "heat", white is dark on dark pages."""
    x = x[:3] if len(x) >= 3 else x[:1]
    scale, text = max(1, round(height / x.shape[1])), escape(text)
    x = F.interpolate(x[None].float(), scale_factor=scale)[0].clamp(0, 1)
    return (f'<figure><img class="{cls}" alt="{text}" src="{png_url(x)}">'
            f"<figcaption>{text}</figcaption></figure>")


def heat(x, most=None):
    """Colour a matrix (h,w): negative blue, 0 white, positive orange. Colours are full from `most`
    on, by default the 99% quantile. Returns (3,h,w) in [0, 1]."""
    x = (x / (most or x.abs().quantile(0.99).clamp(min=1e-9))).clamp(-1, 1)
    return torch.stack([1 + 0.8 * x.clamp(max=0), 1 - 0.45 * x.abs(), 1 - 0.9 * x.clamp(min=0)])


def number_table(x, text):
    """Return a small matrix as HTML, a table of coloured numbers with a caption."""
    colours = (255 * heat(x).clamp(0, 1)).int().permute(1, 2, 0).tolist()
    rows = ["".join(f'<td style="background:rgb{tuple(colour)}">{number:.2f}</td>'
                    for number, colour in zip(*row)) for row in zip(x.tolist(), colours)]
    return (f'<div class="numbers"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>'
            f"{escape(text)}</div>")


def places_of(n, names, encoder):
    """Return the places (n,) of n patches in the grid, from a variable such as ids_mask."""
    for name, ids in reversed(names.items()):
        if name.startswith("ids") and torch.is_tensor(ids) and ids.shape[1:] == (n,):
            return ids[0]
    return torch.arange(n) if n == encoder.num_patches else None


def attention(call, names, given, encoder):
    """Return a picture of one token's attention to the patches, as HTML, from q and k (B,heads,n,d)
    in `names`. The token is the last one after the patches, e.g. a weight token, or otherwise the
    central patch, which is blue. `given` {name: value}: the arguments of the functions that lead
    here. Without ids_keep in them, tokens are in raster order."""
    q, k, L, (h, w) = names["q"][0], names["k"][0], encoder.num_patches, encoder.grid
    ids = [x for x in map(given.get, ("ids_keep", "ids_mask")) if torch.is_tensor(x)]
    if k.shape[1] <= L:                                    # k (heads,n,d): only visible patches
        ids = [names["ids_keep"]] if torch.is_tensor(names.get("ids_keep")) else []
    elif given.get("ids_keep") is None:
        ids = [torch.arange(L)[None]]
    keys = places = torch.cat(ids, dim=1)[0] if ids else torch.arange(0)
    crossed = sum(map(torch.is_tensor, call.inputs.values())) > 1      # queries are other patches
    if crossed:
        places = places_of(q.shape[1], names, encoder)
    if places is None or not 0 < len(keys) < k.shape[1]:
        return ""                                          # it is unknown which patches these are
    index, place, who = q.shape[1] - 1, None, "the last token"
    if crossed or q.shape[1] == 1 + len(places):
        i = ((places // w - h // 2) ** 2 + (places % w - w // 2) ** 2).argmin().item()
        index, place, who = i + (not crossed), places[i], "the blue patch"
    weights = (q[:, [index]] @ k.mT / k.shape[2] ** 0.5).softmax(dim=2).mean((0, 1))       # (n,)
    grid = torch.full((L,), torch.nan).index_copy(0, keys, weights[1:1 + len(keys)])
    shown = heat(grid.nan_to_num(0)[None])[:, 0].where(~grid.isnan(), GREY)
    if place is not None:
        shown[:, place] = torch.tensor([0, 0.3, 1])
    text = f"attention of {who}, up to {weights[1:].max():.2g}"
    return png(shown.view(3, h, w), 128, text, "heat")


def draw_attention(call, encoder, names=None, given=None, path=()):
    """Give each step that computes attention a picture, `drawn`, and yield the names of the
    functions that lead to it with the picture. super().forward() is not named."""
    names, given = {**(names or {}), **call.inputs}, {**(given or {}), **call.inputs}
    for step in call.steps:
        known = {**names, **step.names}
        if "scaled_dot_product" in step.statement.code and {"q", "k"} <= {*known}:
            step.drawn = attention(call, known, given, encoder)
            yield path, step.drawn
        for inner in step.calls:
            is_super = inner.function == "forward" and inner.inputs.get("self") is names.get("self")
            more = () if is_super else (inner.function,)
            yield from draw_attention(inner, encoder, known, given, (*path, *more))


def picture(name, x, letters, names, model, text=""):
    """Return a picture of a tensor as HTML, with a caption that begins with `text`; "" if it would
    tell nothing. `letters`: its shape in the file's comment; `names` {name: value}: variables."""
    encoder, (*_, n, size) = model.encoder, (0, 0, *x.shape)
    (H, W), (p, q) = encoder.img_size, encoder.patch_size
    L, C = encoder.num_patches, encoder.in_chans
    side = max(64, min(H, 160))
    is_image = x.ndim == 4 and x.shape[1] in (1, C) and x.shape[2:] == (H, W)
    if is_image and x.shape[1] == 1 or x.ndim == 2 and size in (L, H * W) and len(x) < 9 and (
            x.dtype != torch.long):
        grid = x[0].float().view(encoder.grid if x[0].numel() == L else (H, W))
        if {*grid.unique().tolist()} <= {0.0, 1.0}:
            return png(1 - grid[None], side, f"{text}black: 1, masked")
        if C > 1 or not is_image:
            return png(heat(grid), side, f"{text}{grid.min():.2g} to {grid.max():.2g}", "heat")
    if x.ndim == 2 and x.dtype == torch.long and size < L and 0 <= x.min() <= x.max() < L:
        grid = torch.zeros(L).index_fill(0, x[0], 1).view(1, *encoder.grid)
        return png(grid, side, f"white: {name or 'these patches'}")
    image, places = None, places_of(n, names, encoder)
    if is_image:
        image = torch.cat([*F.pad(x[:4].float(), (0, 1), value=torch.nan)], dim=2)[..., :-1]
    elif x.ndim == 3 and (n, size) == (H * W, C):          # a rendered image
        image = x[0].T.view(C, H, W)
    elif x.ndim == 3 and size == p * q * C and places is not None and (
            "*" in letters or not letters):                # patches
        canvas = torch.full((1, L, size), torch.nan).index_copy(1, places, x[:1].float())
        image = unpatchify(canvas, (p, q), encoder.grid)[0]
    if image is not None:
        image = image / 255 if x.max() > 20 else denormalize(image, model)
        return png(image.nan_to_num(GREY), side, text)
    matrix = x[0] if x.ndim == 3 else x
    if not x.is_floating_point() or matrix.ndim != 2 or min(matrix.shape) < 3:
        return ""
    if max(matrix.shape) <= 8:
        return number_table(matrix, text)
    text = f"{text}{matrix.min():.2g} to {matrix.max():.2g}"
    matrix = matrix[::math.ceil(len(matrix) / 64), ::math.ceil(size / 144)].float()
    rows, columns = matrix.shape
    return png(heat(matrix), rows * max(1, min(192 // columns, 72 // rows)), text, "heat")


def pictures(made, letters, names, model):
    """Return at most two of [(name, tensor)] as pictures, in HTML: the tensors with the most axes,
    as often only these depend on the image. The list's order stays."""
    texts = [f"{name} {tuple(x.shape)} " if len(made) > 1 else "" for name, x in made]
    shown = [picture(*pair, letters, names, model, text) for pair, text in zip(made, texts)]
    best = sorted(range(len(made)), key=lambda i: (not shown[i], -made[i][1].ndim))[:2]
    return "".join(shown[i] for i in sorted(best))


# ------------------------------------------------------------------------------- the paper's order
KINDS = ["Sec.", "Appendix", "eq.", "Algorithm", "Figure", "Table"]
NUMBER = r"(?:[A-H]\.)?\d+(?:\.\d+)*[a-z]?(?:-\d+)?\b"
CITED = re.compile(                                        # a word; kind and numbers, or only A.1
    r"(?:(\w+)[\s#]+)?\b(?:(Sec|Section|Appendix|eq|Algorithm|Figure|Table)\b\.?[\s#]+"
    rf"({NUMBER}(?:(?:,[\s#]+|[\s#]+and[\s#]+){NUMBER})*)|([A-H]\.\d+(?:\.\d+)*))\b")


def paper_order(cls):
    """Return [(reference, path, line, code)] for the references to a method's paper in its file and
    in vit.py: sections, appendices, equations, algorithms, figures, tables, each in order. The code
    is a line's, or the name of the function or argument that a docstring describes."""
    found, others = set(), {"ViT", "DeiT", "BEiT", *(x.__name__ for x in METHODS.values())}
    for path in {inspect.getfile(cls), VIT}:
        text = Path(path).read_text(encoding="utf-8").split("\n# Paper and release")[0]
        for match in CITED.finditer(text):
            line, source = text.count("\n", 0, match.end()) + 1, [*text.splitlines(), ""]
            while source[line - 1].strip().startswith("#"):            # a comment above its code
                line += 1
            s = statements(path).get(line)
            own = match[1] == cls.__name__ or path != VIT and match[1] not in others
            if not own or s is None or s.definition is None:
                continue
            code = source[line - 1].split("  #")[0].strip()
            if s.node is s.definition.body[0] and isinstance(s.node, ast.Expr):    # a docstring
                code, arguments = s.function, re.findall(
                    r"(?m)^ +(\w[\w, ]*): ", "\n".join(source[s.first:line]))
                if isinstance(s.definition, ast.ClassDef):
                    code = [code, *arguments][-1]
                else:
                    line = s.definition.lineno
            kind = next((x for x in KINDS if x[:2] == str(match[2])[:2]), "Appendix")
            for n in re.findall(NUMBER, match[3] or match[4]):
                found.add(("Appendix" if n[0].isalpha() else kind, n, path, line, code))
    return [(f"{kind} {n}", *rest) for kind, n, *rest in sorted(found, key=lambda x: (
        KINDS.index(x[0]), [i.zfill(3) for i in re.findall(r"\d+|\w", x[1])], x[2] == VIT, x[3]))]


def paper_table(cls, html):
    """Return paper_order as HTML. Lines that are in the page, `html`, are links."""
    rows, shown = [], {*re.findall(r'<i title="([\w.]+)"> *(\d+)<', html)}
    for reference, path, line, code in paper_order(cls):
        file, s = Path(path).name, statements(path).get(line)
        place, start = f"{file} {line}", str(s.first if s else line)
        if (file, start) in shown:
            place = f'<a href="#{file}-{start}">{place}</a>'
        words = reference, place, f"<code>{escape(code)}</code>"
        rows.append(f'<tr>{"".join(f"<td>{x}</td>" for x in words)}</tr>')
    return ("<details><summary>▸ In the paper's order: sections, equations, algorithms, figures, "
            f'tables, and their lines</summary><table class="note">{"".join(rows)}</table>'
            "</details>") * bool(rows)


# ----------------------------------------------------------------------------------------- the page
def as_html(text, path):
    """Return a note as HTML: code in backticks, and "item 3" as a button that shows its text."""
    button = rf'<button type="button" popovertarget="{Path(path).stem}-\g<0>">\g<0></button>'
    text = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(text))
    text = re.sub(r"\n {4,}", "<br>", text).replace("\n\n", "<br><br>")        # formulas: by line
    return re.sub(r"\bitems? \d+(?:(?:, | and )\d+)*",
                  lambda found: re.sub(r"\d+", button, found[0]), text)


def items_of(path):
    """Return a file's list "Paper and release" as HTML: buttons, and the texts that they show."""
    tail = Path(path).read_text().split("\n# Paper and release")[-1].replace("\n#      ", " ")
    items = re.findall(r"# +(\d+)\. (.*)", tail)
    buttons = as_html(f"Paper and release, {Path(path).name}: items {', '.join(dict(items))}", path)
    return f'<p class="note">{buttons}</p>' * bool(items) + "".join(
        f'<div popover id="{Path(path).stem}-{n}"><b>Paper and release, {n}.</b> {escape(text)}'
        f"</div>" for n, text in items)


def whys(path, first, last):
    """Return a button for each variation of these lines in tests.why, as HTML."""
    found = [x for i in range(first, last + 1) for x in at_lines().get((Path(path).name, i), ())]
    return "".join(f'<button type="button" popovertarget="why-{anchor}">why?</button> '
                   for anchor, *_ in found)


def answers(html):
    """Return what the buttons of `whys` in the HTML show."""
    asked = {*re.findall(r'popovertarget="why-(.*?)"', html)}
    return "".join(
        f'<div popover id="why-{anchor}"><b>{escape(found.question)}</b><br>{escape(found.paper)}'
        f"<br>{escape(f'With python -m tests.why {found.spec}: {words or NOT_MEASURED}.')}"
        f"</div>" for all_found in at_lines().values() for anchor, found, words in all_found
        if anchor in asked)


def row(path, left, first, last, note, made, kind="row"):
    """Return lines of a file as HTML, without comments and the first `left` columns, between a note
    and what they made."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()[first - 1:last]
    lines = [*filter(str.strip, [re.sub(r"(^|  +)# .*", "", x)[left:] for x in lines])]
    for i, line in enumerate(lines):
        number = " " * 5 if i else f'<i title="{escape(Path(path).name)}">{first:>4}</i> '
        indent = 9 + len(line) - len(line.lstrip())        # of a line that is too long
        lines[i] = f'<span style="--n:{indent}ch">{number}{escape(line)}</span>'
    return (f'<div class="{kind}"><div class="note">{note}</div><pre>{"".join(lines)}</pre>'
            f'<div class="made">{made}</div></div>') * bool(lines)


def title(call, names, model):
    """Return the header and docstring of a function as HTML, with its arguments."""
    path, definition, inputs = call.path, call.steps[0].statement.definition, call.inputs.items()
    words = [f"{escape(Path(path).name)}, {call.steps[0].statement.function}", *[
        f"<b>{name}</b> {tuple(x.shape) if torch.is_tensor(x) else x}" for name, x in inputs
        if torch.is_tensor(x) or isinstance(x, (int, float))]]
    images = [(name, x) for name, x in inputs if torch.is_tensor(x) and x.ndim == 4]
    words.append(f"<div>{pictures(images, '', names, model)}</div>")
    return row(path, definition.col_offset, definition.lineno, definition.body[0].lineno - 1,
               as_html(ast.get_docstring(definition) or "", path), "<br>".join(words), "row title")


def cells(s, first, i, steps, known, model):
    """Return the lines first ... i of a statement as a row of HTML. `steps`: its runs."""
    own, left = {j: x for j, x in s.comments.items() if first <= j <= i}, s.definition.col_offset
    above = " ".join(x.lstrip("# ") for x in s.above.values() if first == s.first)
    told = [split_comment(x) for x in [f"# {above}", *own.values()]]
    letters = ", ".join(filter(None, [shape for shape, _ in told]))
    notes = [as_html(text, s.path) for _, text in told if text] + [whys(s.path, first, i)]
    notes = "<br>".join(filter(None, notes))
    makers = [] if s.only_names or i < s.last else steps
    made = made_by(makers)
    words = [numbers_of(made, makers)]
    if i in s.parts:
        together = [f"together {words[0]}"] if words[0] else []
        made = [("", x) for step in steps[-1:] for x in tensors(step.parts[i])]
        words = [numbers_of(made), *together]
    if len(steps) > 1 and (made or steps[-1].calls):
        words.append(f"× {len(steps)}")
    options = vars(known.get("self", s)) if steps else {}
    for name in re.findall(r"\bself\.(\w+)\b(?!\()", s.code if i == s.last else ""):
        if isinstance(options.get(name), (bool, int, float, str)):
            words.append(f"{name} = {options[name]}")
    drawn = getattr(steps[-1], "drawn", "") if steps else ""
    return row(s.path, left, first, i, notes, f"<b>{escape(letters) * bool(steps)}</b> "
               f"{escape(', '.join(filter(None, words)))}<div>"
               f"{drawn or pictures(made, letters, known, model)}</div>",
               "row" if steps else "row off")


def section(call, model, names=None):
    """Return a call as HTML: the function's header and docstring, then its statements as in the
    file, each with its calls below. Calls are open at first, except those in vit.py. Those that
    make no tensors are left out. `names` {name: value} are the callers' variables."""
    path, definition, runs = call.path, call.steps[0].statement.definition, {}
    for step in call.steps:
        runs.setdefault(step.statement.first, []).append(step)
    names = {**(names or {}), **call.inputs}
    html = [title(call, names, model)]
    first = definition.body[ast.get_docstring(definition) is not None].lineno
    for i in range(first, definition.end_lineno + 1):
        s = statements(path).get(i)
        if s is None or s.definition is not definition:    # `else:`, or a nested function
            html.append(row(path, definition.col_offset, i, i, "", "",
                            "row" if s is None else "row off"))
            first = i + 1
            continue
        if i < s.last and i not in s.parts:                # a row is a statement or a part of one
            continue
        steps = runs.get(s.first, [])
        if isinstance(s.node, ast.For):                    # a loop also ends in its header
            steps = steps[:-1] or steps
        known = {**names, **steps[-1].names} if steps else names
        shown = cells(s, first, i, steps, known, model)
        called = {c.steps[0].statement.definition: c for step in steps for c in step.calls}
        makers = [c for c in called.values() if any(any(x.made) for y in flatten([c])
                                                    for x in y.steps)]
        if makers and i == s.last:                         # the last of several runs
            here = " open" * any(c.path != VIT for c in makers)
            inner = "".join(section(c, model, known) for c in makers)
            shown = f"<details{here}><summary>{shown}</summary>{inner}</details>"
        html.append(shown)
        first = i + 1
    return f'<div class="call">{"".join(html)}</div>'


def once(html):
    """Drop each picture that the HTML already shows further up."""
    figure = r'<figure>.*?base64,(.*?)".*?</figure>'
    first = {found[1]: found.start() for found in [*re.finditer(figure, html)][::-1]}
    return re.sub(figure, lambda found: found[0] * (found.start() == first[found[1]]), html)


def link(svg, html, file):
    """Link each name in a diagram to the first row of a file that assigns it or else uses it."""
    rows = re.findall(rf'<i title="{file}"> *(\d+)</i> (.*?)</pre>', html)

    def lead(found):
        uses = r"def {0}\(|^[\w, ]*\b{0}\b[\w, ]* = ", r"\b{0}\b(?!\.mask\()"
        lines = [i for use in uses for i, code in rows if re.search(use.format(found[1]), code)]
        return f'<a href="#{file}-{lines[0]}">{found[0]}</a>' if lines else found[0]
    return re.sub(r'<text class="code"[^>]*>(\w+).*?</text>', lead, svg)


def page(text, about, known, strip, call, model):
    """Return the whole page: the method's diagram, the file's docstring `text`, a line `about` the
    run, the letters' numbers {letter: n}, a strip of captioned images, and a traced call."""
    file, diagram = Path(call.path), ""
    lines = once(section(call, model))
    drawn = ROOT / f".github/diagram_{type(model).__module__}.svg"
    if drawn.exists() and file.stem == type(model).__module__:
        diagram = link(drawn.read_text(encoding="utf-8"), lines, file.name)
    paper = paper_table(type(model), lines)
    for name, i in {*re.findall(r'href="#([\w.]+)-(\d+)"', diagram + paper)}:
        lines = re.sub(rf'<i (?=title="{name}"> *{i}<)', f'<i id="{name}-{i}" ', lines, count=1)
    title, _, idea = text.replace("`", "").partition("\n")
    if not getattr(model, "norm_pix_loss", True):
        idea = re.sub(r"by default\s+normalised|normalised\s+by default", r"\g<0> (here: not)",
                      idea)
    parts, legend = [], ""
    for part in idea.strip("\n").split("\n\n"):
        if part.startswith("    "):
            legend += f"<pre>{escape(textwrap.dedent(part))}</pre>"
        else:
            parts.append(f"<p>{escape(part)}</p>")
    files = sorted({inner.path for inner in flatten([call])})
    spans = "".join(f"<span><b>{k}</b> = {n}</span>" for k, n in known.items())
    page = (Path(__file__).parent / "lib/tour.html").read_text(encoding="utf-8")
    return Template(page).substitute(
        title=escape(title), diagram=diagram, idea="".join(parts), strip=strip, legend=legend,
        letters=spans, about=escape(about), paper=paper, lines=lines,
        items="".join(map(items_of, files)) + answers(lines))


# ------------------------------------------------------------------------------- the command line
def strip_of(model, inputs, calls):
    """Return captioned pictures of a run as HTML: the images, what is masked, what is predicted,
    the weights of CrossMAE's feature maps, and attention in `encode` and in `decode`."""
    encoder, (image, noise, *more) = model.encoder, inputs
    shown, seen, decoded = {"image": image}, image, {}
    if hasattr(model, "unmix"):                            # i-MAE: a partner, and a weight
        seen, (x_1, x_2) = model.mix_images(image, *more)
        shown = {"x_1": x_1, "x_2": x_2, f"{more[1]:g} x_1 + {1 - more[1]:g} x_2": seen}
        decoded = dict(zip(("x_1 (subordinate), ", "x_2 (dominant), "),
                           model.unmix(image, *more, noise)[0]))
    elif more and more[0].ndim == 4:
        shown["its second view"] = more[0]
    if not hasattr(model, "unmix") and getattr(model, "reconstruct", None):
        decoded[""], mask = model.reconstruct(image, noise)
    if masks(model) and noise.shape[1:] == (encoder.num_patches,):
        _, ids_mask, mask = encoder.mask(image, noise, model.mask_ratio)
        shown["masked"] = seen.where(encoder.pixels_of(mask) == 0, torch.nan)
    for name, x in decoded.items():
        shown[f"{name}predicted; visible patches copied"] = copy_visible(encoder, x, seen, mask)
    if getattr(model, "skipped", 0):                       # CrossMAE leaves some out
        ids = ids_mask[:, model.skipped:]
        mask = torch.zeros_like(mask).scatter(1, ids, 1)
        shown[f"in the loss: {ids.shape[1]} of {ids_mask.shape[1]} masked patches"] = image.where(
            encoder.pixels_of(mask) > 0, torch.nan)
    html = [png(denormalize(x, model)[0].nan_to_num(GREY), 128, name) for name, x in shown.items()]
    if hasattr(model, "map_weights"):
        html.append(number_table(model.map_weights(), "weights of the feature maps: a row for each "
                                 "decoder block, a column for each map"))
    drawn = [*draw_attention(calls[0], encoder)]
    for part in ("encode", "decode"):
        html += [x.replace("attention", f"{part}, last block: attention")
                 for path, x in drawn if path[:1] == (part,) and x][-1:]
    return "".join(html)


def explained(sizes, docs):
    """Return the sizes {letter: n} that the first docstring with a legend explains, e.g. L in "L
    patches"."""
    text = next(doc for doc in docs if "B images" in doc)
    return {k: n for k, n in sizes.items()
            if k in "BCHW" or n and re.search(rf"\b{k}(?=\s+[a-z=])", text)}


def tour_method(args):
    """Return the arguments of `page` for a method."""
    cls = METHODS[args.method]
    torch.manual_seed(0)
    path, more = args.checkpoint or TRAINED / f"{args.method}.pt", ""
    if args.checkpoint or path.exists():
        model = load_any(path, norm_pix_loss=args.norm_pix_loss)
    else:                                                  # a method of your own
        path = "random weights"
        model = cls(**{**TINY, "in_chans": len(cls.mean), **cls.small_config})
    require(type(model) is cls, f"{path} is not of method {args.method}")
    if not args.checkpoint and args.method == "crossmae":  # show that patches can be left out
        model.skipped = model.encoder.num_patches // 2
        more = ("Here, prediction_ratio is 0.25. This model was trained with 0.75, i.e. on all "
                "masked patches, but its weights fit any ratio. ")
    (H, W), C = model.encoder.img_size, model.encoder.in_chans
    most = 2 if issubclass(cls, IMAE) else 1               # others: several crops of one image
    require(len(args.image) <= most, f"--image: {args.method} takes at most {most}")
    files, images = [*args.image, *IMAGES[len(args.image):most]], []
    for file in files:
        image = open_image(file, (H, W))
        crops = [center_crop(image, (H, W), 0.7 ** i) for i in range(cls.crops // most)]
        for crop in map(torch.Tensor.float, crops):
            grey = crop.mean(0, keepdim=True)              # for one channel, or a fourth
            images.append(torch.cat([crop] * (C > 2) + [grey] * C)[:C])
    images = torch.stack(images).split(1)
    image, noise = normalize(images[0], model), fixed_noise(model.encoder, images[0])
    inputs = model.model_inputs(*model.draw_batch(images, torch.full((1,), -1), noise))
    if issubclass(cls, IMAE):
        inputs[-1] = 0.3                                   # alpha
    bases = [inspect.getfile(x) for x in cls.__mro__ if issubclass(x, torch.nn.Module)]
    with torch.no_grad():
        calls = trace(lambda: model.eval()(*inputs), [*bases[:-1], *ROOT.glob("*.py")])
        strip = strip_of(model, inputs, calls)
    known = next(x for x in cls.__mro__ if x.__module__ != "tests.why")
    text = sys.modules[known.__module__].__doc__ or cls.__name__
    sizes = {"B": 1, **letters(model)}
    if hasattr(model, "to_columns"):                       # MINR: numbers for each layer
        outputs = [len(bias) for bias in model.biases]
        sizes.update(N=H * W, a_i=[2 * model.ff_dim, *outputs[:-1]], b_i=outputs,
                     g_i=[model.tokens_per_layer.get(i, 0) for i in range(len(outputs))])
    if hasattr(model, "weight_tokens"):                    # HyperMAE's M is a matrix
        del sizes["M"]
    options = []
    for name, parameter in inspect.signature(cls).parameters.items():
        value = getattr(model, name, model)
        if not isinstance(value, (dict, torch.nn.Module)):
            default = "" if value == parameter.default else f" (default {parameter.default})"
            options.append(f"{name}={value}{default}")
    path, *files = (str(x).removeprefix(f"{ROOT}/") for x in (path, *files))
    hooks = [x for x in ("draw_images", "draw_batch", "model_inputs", "before_step", "after_step")
             if getattr(cls, x) is not getattr(Method, x)]
    more += f"Before or after what is shown, training calls {', '.join(hooks)}. " * bool(hooks)
    about = (f"{args.method} from {path}, in evaluation mode, on {' and '.join(files)}. {more}"
             f"Options: {', '.join(options)}.")
    docs = [sys.modules[x.__module__].__doc__ or "" for x in (*cls.__mro__, ViT)]
    return text, about, explained(sizes, docs), strip, calls[0], model


def main(argv=None):
    """Run `python -m tests.tour` with the arguments `argv`."""
    parser = argparse.ArgumentParser("tour", usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("method", choices=METHODS)
    option("--checkpoint", metavar="FILE",
           help="from train.py, or a released one with a decoder (tests/models/METHOD.pt)")
    option("--norm_pix_loss", **NORM_PIX_LOSS)
    option("--image", metavar="FILE", nargs="+", default=[],
           help="image file; for imae also its partner (a truck and a frog of CIFAR-10)")
    option("--out", metavar="FILE", help="the page (tour_METHOD.html)")
    args = parser.parse_args(argv)
    out = Path(args.out or f"tour_{args.method}.html")
    out.write_text(page(*tour_method(args)), encoding="utf-8")
    print(f"see     {out}: open it in a browser")


# The README's pictures, .github/tour.png and tour_dark.png (with
# --blink-settings=preferredColorScheme=0), show the page's top and the line that calls encode:
#   python -m tests.tour mae
#   sed 's|</style>|body > :not(.strip, .call), body > .call > :not(details:nth-of-type(2)) {&|
#        s|</style>| display: none } &|' tour_mae.html > part.html
#   chromium --headless --no-sandbox --hide-scrollbars --window-size=830,505 \
#       --screenshot=.github/tour.png "file://$PWD/part.html"
if __name__ == "__main__":
    shell(main)
