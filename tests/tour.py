"""Look inside a method: an image goes through it, and a page shows what every line makes of it.

    python -m tests.tour mae                           # our trained model, one of our images
    python -m tests.tour mae --checkpoint runs/mae_shapes/last.pt --image photo.jpg
    python -m tests.tour train                         # one training step, including the optimizer

The page, tour_METHOD.html, shows the code that ran: docstrings and comments are on the left, shapes
and pictures of what each line made on the right. A click on a line with a triangle opens what it
calls. The five methods' pages open with a diagram, whose names lead to their lines. Lines are found
by tracing, so your own method needs nothing in this file. No page needs a network or JavaScript.
"""

import argparse
import ast
import inspect
import math
import re
import sys
import textwrap
import tokenize
from base64 import b64encode
from contextlib import redirect_stdout
from functools import lru_cache
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import torchvision

import train
from tests import diagrams
from train import METHODS, center_crop, load_model, read_image
from vit import InputError, denormalize, normalize, require, unpatchify, visible_count

ROOT = Path(__file__).resolve().parent.parent
IMAGES = [ROOT / f"tests/models/images/val/{x}.jpg" for x in ("truck/0399", "frog/0044")]
TINY = dict(img_size=(32, 48), patch_size=4, in_chans=3, dim=80, depth=4, heads=4)


# --------------------------------------------------------------------------------------- the tracer
@lru_cache
def statements(path):
    """Return {line: the statement in it} for the functions of a file. The statement of a loop or a
    condition is its header. Each has path, node (ast), function, definition (the function's node),
    first and last line, and comments {line: text}; `above` has the comments on lines before it.
    `targets` is the code of what it assigns or appends. `only_names`: it returns only names.
    `parts` {line: code} has a list's elements if several of its lines have comments."""
    with open(path, "rb") as file:
        tokens = [x for x in tokenize.tokenize(file.readline) if x.type == tokenize.COMMENT]
    comments, table = {x.start[0]: x.string for x in tokens}, {}
    alone = {x.start[0] for x in tokens if x.line.strip() == x.string}

    def visit(parent, function, definition):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                visit(node, f"{function}.{node.name}".strip("."), node)
            else:
                if isinstance(node, ast.stmt):
                    add(node, function, definition)
                visit(node, function, definition)

    def add(node, function, definition):
        last = node.end_lineno
        if hasattr(node, "body"):                          # "if x: return" is one line
            last = max(node.lineno, node.body[0].lineno - 1)
        lines, start = range(node.lineno, last + 1), node.lineno
        while start - 1 in alone:
            start -= 1
        own = {i: comments[i] for i in lines if i in comments and i not in alone}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        targets = [ast.unparse(x) for target in targets if target for x in ast.walk(target)
                   if isinstance(x, (ast.Name, ast.Attribute, ast.Subscript))
                   and isinstance(x.ctx, ast.Store)]
        appended = re.match(r"([\w.]+)\.append\(", ast.unparse(node))
        elements = [x for part in ast.walk(node) if isinstance(part, ast.List) for x in part.elts]
        parts = {x.end_lineno: ast.unparse(x) for x in elements if x.end_lineno in own}
        kinds = {type(x) for x in ast.walk(node)}
        table.update(dict.fromkeys(lines, SimpleNamespace(
            path=path, node=node, function=function, definition=definition, first=lines[0],
            last=last, comments=own, above={i: comments[i] for i in range(start, lines[0])},
            targets=[f"{appended[1]}[-1]"] if appended else [x for x in targets if x != "_"],
            only_names=kinds <= {ast.Return, ast.Tuple, ast.Name, ast.Load},
            parts=parts if len(own) > 1 else {})))

    visit(ast.parse(Path(path).read_text()), "", None)
    return table


def tensors(value):
    """Return the list of all tensors in a value, which may be a nested tuple, list or dict."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [x for part in value for x in tensors(part)] if isinstance(value, (list, tuple)) else []


def trace(work, paths):
    """Run work() and return the calls of functions in the files `paths`. A call has `function` (its
    name), `path`, `inputs` (its arguments, {name: value}) and `steps`. A step has `statement`,
    `values` (what it assigned, appended, returned or yielded), `made` (the tensors in each value),
    `parts` {line: value}, `names` (the variables after it, {name: value}), `calls` (the calls
    inside it) and `gradients` (their norms, {name: norm}, if it called backward)."""
    paths, outside = {str(path) for path in paths}, SimpleNamespace(calls=[])
    running = [SimpleNamespace(step=outside)]

    def enter(frame, event, arg):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path not in paths or name.startswith("<"):      # [... for ...] is part of its line
            return None
        table, inputs = statements(path), dict(frame.f_locals)
        call = SimpleNamespace(function=name, path=path, inputs=inputs, steps=[], step=None)
        running[-1].step.calls.append(call)
        running.append(call)

        def value_of(code, frame):
            try:
                return eval(code, frame.f_globals, frame.f_locals)
            except NameError:                              # before the first run of a loop
                return None

        def follow(frame, event, arg):
            now = call.step and call.step.statement
            statement = table.get(frame.f_lineno, now) if event == "line" else now
            if now and (event == "return" or statement is not now):
                call.step.values = [value_of(x, frame) for x in now.targets] or [arg]
                call.step.made = [tensors(value) for value in call.step.values]
                call.step.names = dict(frame.f_locals)
                if ".backward(" in ast.unparse(now.node):
                    call.step.gradients = gradient_norms(frame.f_locals["net"])
                call.steps.append(call.step)
            if statement is not now:
                parts = {i: value_of(x, frame) for i, x in statement.parts.items()}
                call.step = SimpleNamespace(statement=statement, parts=parts, calls=[],
                                            gradients={})
            if event == "return":
                running.pop()
            return follow
        return follow

    previous = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(previous)
    return outside.calls


def gradient_norms(model):
    """Return {name: norm of the gradients} for each part of a model."""
    parts = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            parts.setdefault(name.split(".")[0], []).append(p.grad.norm())
    return {name: torch.stack(norms).norm().item() for name, norms in parts.items()}


def flatten(calls):
    """Yield the calls and all calls inside them."""
    for call in calls:
        yield call
        for step in call.steps:
            yield from flatten(step.calls)


def letters(model):
    """Return {letter: size} for a model, with the letters in the docstrings of the files."""
    encoder = model.encoder
    (H, W), (h, w), (p, q) = encoder.img_size, encoder.grid, encoder.patch_size
    sizes = dict(C=encoder.in_chans, H=H, W=W, h=h, w=w, L=h * w, p=p, q=q, D=encoder.dim,
                 G=0 if encoder.extra_tokens is None else len(encoder.extra_tokens))
    if hasattr(model, "mask_ratio"):
        K = visible_count(h * w, model.mask_ratio)
        sizes.update(K=K, M=h * w - K)
    if hasattr(model, "decoder_pos_embed"):
        sizes.update(E=model.decoder_pos_embed.shape[2])
    if hasattr(model, "skipped"):                      # CrossMAE
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
    made = [(name, x) for step in steps
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
    return found[1], found[2].strip(", ")


# ------------------------------------------------------------------------------------- the pictures
GREY = 0.8                                                 # where a picture has no patch


def png(x, height, text=""):
    """Return an image (3,h,w) in [0, 1] as HTML, about `height` pixels high, with a caption."""
    scale, text = max(1, round(height / x.shape[1])), escape(text)
    x = F.interpolate(x[None].float(), scale_factor=scale)[0].clamp(0, 1)
    file = BytesIO()
    torchvision.utils.save_image(x, file, format="PNG")
    data = b64encode(file.getvalue()).decode()
    return (f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
            f"<figcaption>{text}</figcaption></figure>")


def heat(x):
    """Colour a matrix (h,w): negative blue, 0 white, positive orange. Returns (3,h,w) in [0, 1]."""
    x = x / x.abs().quantile(0.99).clamp(min=1e-9)
    return torch.stack([1 + 0.8 * x.clamp(max=0), 1 - 0.45 * x.abs(), 1 - 0.9 * x.clamp(min=0)])


def places_of(n, names, encoder):
    """Return the places (n,) of n patches in the grid, from a variable such as ids_mask."""
    for name, ids in reversed(names.items()):
        if name.startswith("ids") and torch.is_tensor(ids) and ids.shape[1:] == (n,):
            return ids[0]
    return torch.arange(n) if n == encoder.num_patches else None


def attention(names, encoder):
    """Return a picture of the attention to each patch, as HTML, from the queries `q` and keys `k`
    (B,heads,n,d) in `names`."""
    q, k, L = names["q"], names["k"], encoder.num_patches
    weights = (q @ k.mT / k.shape[3] ** 0.5).softmax(dim=3)[0].mean((0, 1))    # (n,)
    keep, rest = [names.get(name) for name in ("ids_keep", "ids_mask")]
    places = torch.arange(L) if rest is None else torch.cat([keep, rest], dim=1)[0]
    places = places if len(weights) > L else keep[0]       # otherwise, only visible ones
    grid = torch.full((L,), torch.nan).index_copy(0, places, weights[1:1 + len(places)])
    shown = heat(grid.nan_to_num(0).view(encoder.grid))
    low, high = (f"{x:.2g}" for x in grid[~grid.isnan()].aminmax())
    return png(shown.where(~grid.view(encoder.grid).isnan(), GREY), 128,
               f"attention to each patch, mean over heads and queries: {low} to {high}")


def picture(name, x, letters, names, model, text=""):
    """Return a picture of a tensor as HTML, with a caption that begins with `text`; "" if it would
    tell nothing. `letters`: its shape in the file's comment; `names` {name: value}: variables."""
    encoder, (*_, n, size) = model.encoder, (0, 0, *x.shape)
    (H, W), (p, q) = encoder.img_size, encoder.patch_size
    L, C = encoder.num_patches, encoder.in_chans
    side = max(128, min(H, 160))
    is_image = x.ndim == 4 and x.shape[2:] == (H, W)
    if is_image and x.shape[1] == 1 or x.ndim == 2 and size in (L, H * W) and len(x) < 9 and (
            x.dtype != torch.long):
        grid = x[0].float().view(encoder.grid if x[0].numel() == L else (H, W))
        if {*grid.unique().tolist()} <= {0.0, 1.0}:
            return png(1 - grid.expand(3, -1, -1), side, f"{text}black: 1, masked")
        return png(heat(grid), side, f"{text}{grid.min():.2g} to {grid.max():.2g}")
    if x.ndim == 2 and x.dtype == torch.long and size < L and 0 <= x.min() <= x.max() < L:
        grid = torch.zeros(L).index_fill(0, x[0], 1).view(encoder.grid)
        return png(grid.expand(3, -1, -1), side, f"white: {name or 'these patches'}")
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
    if not x.is_floating_point() or matrix.ndim != 2 or min(matrix.shape) < 8:
        return ""
    text = f"{text}{matrix.min():.2g} to {matrix.max():.2g}"
    matrix = matrix[::math.ceil(len(matrix) / 96), ::math.ceil(size / 144)].float()
    rows, columns = matrix.shape
    return png(heat(matrix), rows * max(1, min(192 // columns, 160 // rows)), text)


def pictures(made, letters, names, model):
    """Return at most two of [(name, tensor)] as pictures, in HTML: the tensors with the most axes,
    as often only these depend on the image. The list's order stays."""
    texts = [f"{name} {tuple(x.shape)} " if len(made) > 1 else "" for name, x in made]
    shown = [picture(*pair, letters, names, model, text) for pair, text in zip(made, texts)]
    best = sorted(range(len(made)), key=lambda i: (not shown[i], -made[i][1].ndim))[:2]
    return "".join(shown[i] for i in sorted(best))


# ----------------------------------------------------------------------------------------- the page
STYLE = """
* { box-sizing: border-box } h1 { font-size: 1.6em; line-height: 1.2 }
:root { color-scheme: light dark; --blue: light-dark(#0550ae, #79b8ff) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1320px; margin: auto; padding: 12px }
pre, code { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere }
.top, .letters { display: flex; flex-wrap: wrap; gap: 0 16px }
.idea { flex: 1 1 420px } .strip { flex: 0 1 580px } .off pre { opacity: .45 }
svg { max-width: 100%; height: auto } a .code { fill: var(--blue) } :target { background: #fc06 }
img { image-rendering: pixelated; max-width: 100%; display: block; outline: 1px solid #8883 }
figure { display: inline-block; vertical-align: top; margin: 4px 12px 4px 0 }
figcaption { font-size: 12px; width: 0; min-width: max(100%, 8em) }
.row { display: grid; grid-template-columns: 27fr 46fr 27fr; gap: 2px 20px; padding: 3px 6px }
.note, .made, figcaption { font-size: 13px; line-height: 1.4 }
.note, figcaption, i { color: light-dark(#59636e, #9aa4af); font-style: normal }
.call { border-left: 3px solid #8884; margin: 6px 0 10px; padding-left: 4px }
.title { background: #8881; border-radius: 6px } b, button { color: var(--blue); font-weight: 600 }
summary { cursor: pointer; list-style: none } summary pre::before { content: "▸ " }
details[open] > summary pre::before { content: "▾ " }
button { font: inherit; background: none; border: 0; padding: 0; text-decoration: underline }
[popover] { max-width: 36em; padding: 14px 18px; border: 1px solid #8888; border-radius: 8px }
@media (max-width: 820px) { .row { grid-template-columns: 1fr } }
@media print { ::details-content { content-visibility: visible; display: block }
  .row, figure { break-inside: avoid } [popover] { display: block; position: static } }
"""
VIT = str(ROOT / "vit.py")


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


def section(call, model, names=None):
    """Return a call as HTML: the function's header and docstring, then its statements as in the
    file, each with its calls below. Calls are open at first, except those in vit.py; of these, the
    ones that make no tensors are left out. `names` {name: value} are the callers' variables."""
    path, definition = call.path, call.steps[0].statement.definition
    table, left = statements(path), definition.col_offset
    source, runs, names = Path(path).read_text().splitlines(), {}, names or {}
    file, doc = escape(Path(path).name), ast.get_docstring(definition)
    for step in call.steps:
        runs.setdefault(step.statement.first, []).append(step)

    def row(first, last, note, made, kind="row"):
        """Return lines of the file as HTML, between a note and what they made."""
        lines = [re.sub(r"(^|  +)# .*", "", x)[left:] for x in source[first - 1:last]]
        code = escape("\n".join(filter(str.strip, lines)))
        return (f'<div class="{kind}"><div class="note">{as_html(note, path)}</div><pre>'
                f'<i title="{file}">{first}</i> {code}</pre><div class="made">{made}</div></div>'
                ) * bool(code)

    names, inputs = {**names, **call.inputs}, call.inputs.items()
    words = [f"{file}, {call.steps[0].statement.function}", *[
        f"<b>{name}</b> {tuple(x.shape) if torch.is_tensor(x) else x}" for name, x in inputs
        if torch.is_tensor(x) or isinstance(x, (int, float))]]
    images = [(name, x) for name, x in inputs if torch.is_tensor(x) and x.ndim == 4]
    words.append(f"<div>{pictures(images, '', names, model)}</div>")
    html = [row(definition.lineno, definition.body[0].lineno - 1, doc or "", "<br>".join(words),
                "row title")]
    first = definition.body[doc is not None].lineno
    for i in range(first, definition.end_lineno + 1):
        s = table.get(i)
        if s is None or s.definition is not definition:    # `else:`, or a nested function
            html.append(row(i, i, "", "", "row" if s is None else "row off"))
            first = i + 1
            continue
        if i < s.last and i not in s.parts:                # a row is a statement or a part of one
            continue
        steps, comments = runs.get(s.first, []), {**s.above, **s.comments}
        if isinstance(s.node, ast.For):                    # a loop also ends in its header
            steps = steps[:-1] or steps
        told = [split_comment(comments[j]) for j in comments if j <= i and (
            j >= first or first == s.first)]
        letters = ", ".join(filter(None, [shape for shape, _ in told]))
        notes = " ".join(text for _, text in told)
        known = {**names, **steps[-1].names} if steps else names
        makers = [] if s.only_names or i < s.last else steps
        made = made_by(makers)
        words = [numbers_of(made, makers)]
        if i in s.parts:
            together = [f"together {words[0]}"] if words[0] else []
            made = [("", x) for step in steps[-1:] for x in tensors(step.parts[i])]
            words = [numbers_of(made), *together]
        called = {c.steps[0].statement.definition: c for step in steps for c in step.calls
                  if c.path != VIT or any(any(x.made) for y in flatten([c]) for x in y.steps)}
        calls = [*called.values()] if i == s.last else []  # the last of several runs
        if len(steps) > 1 and (made or calls):
            words.append(f"× {len(steps)}")
        if steps and steps[-1].gradients:
            norms = [f"{part} {norm:.2g}" for part, norm in steps[-1].gradients.items()]
            words.append(f"norms of gradients: {', '.join(norms)}")
        shown = pictures(made, letters, known, model)
        if steps and "scaled_dot_product" in source[i - 1]:
            shown = attention(known, model.encoder)
        cells = row(first, i, notes, f"<b>{escape(letters) * bool(steps)}</b> "
                    f"{escape(', '.join(filter(None, words)))}<div>{shown}</div>",
                    "row" if steps else "row off")
        if calls:
            here = " open" * any(c.path != VIT for c in calls)
            inner = "".join(section(c, model, known) for c in calls)
            cells = f"<details{here}><summary>{cells}</summary>{inner}</details>"
        html.append(cells)
        first = i + 1
    return f'<div class="call">{"".join(html)}</div>'


def once(html):
    """Drop each picture that the HTML already shows further up."""
    figure = r'<figure>.*?base64,(.*?)".*?</figure>'
    first = {found[1]: found.start() for found in [*re.finditer(figure, html)][::-1]}
    return re.sub(figure, lambda found: found[0] * (found.start() == first[found[1]]), html)


def link(svg, html, file):
    """Link each name in a diagram to the first row of a file that assigns it or else uses it."""
    rows = re.findall(rf'<i title="{file}">(\d+)</i> (.*?)</pre>', html, re.DOTALL)

    def lead(found):
        uses = r"def {0}\(|^[\w, ]*\b{0}\b[\w, ]* = ", r"\b{0}\b(?!\.mask\()"
        lines = [i for use in uses for i, code in rows if re.search(use.format(found[1]), code)]
        return f'<a href="#line-{lines[0]}">{found[0]}</a>' if lines else found[0]
    svg = re.sub(r'<text class="code"[^>]*>(\w+).*?</text>', lead, svg)
    for i in {*re.findall(r'"#line-(\d+)"', svg)}:
        html = html.replace(f'<i title="{file}">{i}<', f'<i id="line-{i}" title="{file}">{i}<', 1)
    return svg, html


def page(text, about, known, strip, call, model):
    """Return the whole page: the method's diagram, the file's docstring `text`, a line `about` the
    run, the letters' numbers {letter: n}, a strip of captioned images, and a traced call."""
    file, diagram, lines = Path(call.path), "", once(section(call, model))
    if file.stem in diagrams.METHODS and file.stem == type(model).__module__:
        diagram, lines = link(diagrams.draw(file.stem), lines, file.name)
    title, _, idea = text.replace("`", "").partition("\n")
    parts = [f"<pre>{escape(textwrap.dedent(part))}</pre>" if part.startswith("    ") else
             f"<p>{escape(part)}</p>" for part in idea.strip("\n").split("\n\n")]
    files = sorted({inner.path for inner in flatten([call])})
    spans = "".join(f"<span><b>{k}</b> = {n}</span>" for k, n in known.items())
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>'
            f'{STYLE}</style></head><body><h1>{escape(title)}</h1>{diagram}<div class="top"><div '
            f'class="idea">{"".join(parts)}</div><div class="strip">{strip}</div></div><div '
            f'class="letters">{spans}</div><p class="note">{escape(about)}</p><p class="note">A '
            f"line with ▸ opens what it calls; an item's number opens its text. Grey lines did "
            f"not run. × 4: the line ran four times; its last run is shown. Blue shapes are the "
            f"file's own comments, with this run's sizes. Each picture is shown once, on its own "
            f"scale: blue is negative, white 0, orange positive. Grey patches are not in the "
            f"tensor. Of a matrix, at most 96 rows (tokens or pixels) and 144 columns are shown."
            f"</p>{lines}{''.join(map(items_of, files))}</body></html>")


# ------------------------------------------------------------------------------- the command line
def strip_of(model, image, noise):
    """Return a row of captioned images: the image, masked, decoded, visible patches copied."""
    decoded, mask = model.reconstruct(image, noise)
    all_trained = getattr(model, "loss_on", "masked") == "all"
    images = {"image": image, "masked": image.where(model.encoder.pixels_of(mask) == 0, torch.nan),
              "decoded" if all_trained else "decoded; the loss ignores visible patches": decoded,
              "decoded, visible patches copied": model.encoder.copy_visible(decoded, image, mask)}
    return "".join(png(denormalize(x, model)[0].nan_to_num(GREY), 128, name)
                   for name, x in images.items())


def tour_method(args):
    """Return the arguments of `page` for a method."""
    cls = METHODS[args.method]
    torch.manual_seed(0)
    path = args.checkpoint or ROOT / f"tests/models/{args.method}.pt"
    if args.checkpoint or path.exists():
        model = load_model(path)
    else:                                                  # a method of your own
        path, model = "random weights", cls(**TINY, **cls.low_res_config)
    require(type(model) is cls, f"{path} is not of method {args.method}")
    H, W = model.encoder.img_size
    most = 2 if cls.pairs else 1
    require(len(args.image) <= most, f"--image: {args.method} takes at most {most}")
    files, images = [*args.image, *IMAGES[len(args.image):most]], []
    for file in files:
        try:
            images.append(center_crop(read_image(file), (H, W), 1))
        except Exception as error:                         # a broken file can raise anything
            raise InputError(f"--image {file}: give another image file ({error})") from None
    image, *partner = normalize(torch.stack(images), model).split(1)
    inputs = [image, model.encoder.fixed_noise(image)]
    if partner:
        inputs += [*partner, 0.3]                          # the weight of the image
    with torch.no_grad():
        calls = trace(lambda: model.eval()(*inputs), [inspect.getfile(cls), *ROOT.glob("*.py")])
        strip = strip_of(model, *inputs[:2])
    text = sys.modules[cls.__module__].__doc__ or cls.__name__
    sizes = {"B": 1, **letters(model)}
    if hasattr(model, "to_columns"):                       # MINR: numbers for each layer
        outputs = [len(bias) for bias in model.biases]
        sizes.update(N=H * W, a_i=[2 * model.ff_dim, *outputs[:-1]], b_i=outputs,
                     g_i=[model.tokens_per_layer.get(i, 0) for i in range(len(outputs))])
    known = {k: n for k, n in sizes.items()                # explained, as in "L patches"
             if k in "BCHW" or re.search(rf"\b{k}(?= [a-z=])", text)}
    options = [f"{name}={getattr(model, name)}" for name in inspect.signature(cls).parameters
               if not isinstance(getattr(model, name, model), (dict, torch.nn.Module))]
    path, *files = (str(x).removeprefix(f"{ROOT}/") for x in (path, *files))
    about = (f"{args.method} from {path}, in evaluation mode, on {' and '.join(files)}. Options: "
             f"{', '.join(options)}.")
    return text, about, known, strip, calls[0], model


def tour_train(args):
    """Return the arguments of `page` for a training step on eight images, from train_epoch on."""
    require(not args.checkpoint and not args.image, "train takes no --checkpoint and no --image")
    words = ("--epochs 1 --warmup_epochs 0 --train_images 8 --eval_images 8 --batch_size 8 "
             "--device cpu --workers 0 --runs").split()
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        calls = trace(lambda: train.main([*words, folder]),
                      [ROOT / "train.py", ROOT / "vit.py", ROOT / "mae.py"])
    call, = [call for call in flatten(calls) if call.function == "train_epoch"]
    model, about = call.inputs["net"], f"Options: {' '.join(words[:-1])}."
    return train.__doc__, about, {"B": 8, **letters(model)}, "", call, model


def main(argv=None):
    """Run `python -m tests.tour` with the arguments `argv`."""
    parser = argparse.ArgumentParser("tour", usage=argparse.SUPPRESS, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("method", choices=[*METHODS, "train"], metavar="METHOD",
           help=f"{', '.join(METHODS)}, or train (which takes only --out)")
    option("--checkpoint", metavar="FILE", help="checkpoint from train.py (tests/models/METHOD.pt)")
    option("--image", metavar="FILE", nargs="+", default=[],
           help="image file; for imae also its partner (a truck and a frog of CIFAR-10)")
    option("--out", metavar="FILE", help="the page (tour_METHOD.html)")
    
    args = parser.parse_args(argv)
    out = Path(args.out or f"tour_{args.method}.html")
    try:
        found = (tour_train if args.method == "train" else tour_method)(args)
        out.write_text(page(*found), encoding="utf-8")
    except (InputError, OSError) as error:
        parser.error(str(error).splitlines()[0])
    print(f"see     {out}: open it in a browser")


if __name__ == "__main__":
    main()
