"""Look inside a method: an image goes through it, and a page shows what every line makes of it.

    python -m tests.tour mae                           # an untrained model, an image of ours
    python -m tests.tour mae --checkpoint runs/mae_shapes/last.pt --image photo.jpg
    python -m tests.tour train                         # one training step, up to the optimizer

The page, tour_METHOD.html, needs neither network nor script. It has the code as it is in the file,
docstrings and comments on its left and, on its right, shapes and pictures of what a line made. A
line that calls something opens. Lines are found by tracing the running code, so a method of your
own needs nothing here. test_tour.py uses the same tracer.
"""

import argparse
import ast
import inspect
import keyword
import re
import sys
import textwrap
import tokenize
from base64 import b64encode
from contextlib import redirect_stdout
from functools import lru_cache, partial
from html import escape
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
import torchvision

import train
from train import LAYOUT, METHODS, center_crop, draw_shapes, load, read_image
from vit import InputError, denormalize, normalize, require, unpatchify, visible_count

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(img_size=(32, 48), patch_size=4, in_chans=3, dim=80, depth=4, heads=4)


# --------------------------------------------------------------------------------------- the tracer
@lru_cache
def statements(path):
    """Return {line: the statement in it} for the functions of a file. The statement of a loop or a
    condition is its header. Fields: path, node (ast), function, definition (its ast node), first
    and last line, comments {line: text}, above (the lines of comments before it), targets (code of
    what it assigns or appends), only_names (whether it returns names and makes nothing), and parts
    {line: code}: elements of a list, if several lines of it have comments."""
    comments, alone, table = {}, set(), {}
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
                if token.line.strip() == token.string:
                    alone.add(token.start[0])

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
        if hasattr(node, "body"):                          # or in the same line: if x: return
            last = max(node.lineno, node.body[0].lineno - 1)
        lines, start = range(node.lineno, last + 1), node.lineno
        while start - 1 in alone:
            start -= 1
        own = {i: comments[i] for i in lines if i in comments and i not in alone}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        targets = [x for target in targets if target for x in getattr(target, "elts", [target])]
        targets = [ast.unparse(x).lstrip("*") for x in targets]
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
    """Return the list of all tensors in a value, which may be a tuple, list or dict of others."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [x for part in value for x in tensors(part)] if isinstance(value, (list, tuple)) else []


def trace(work, paths):
    """Run work() and return the calls of functions in the files `paths`. A call has `inputs`, its
    arguments {name: value}, and `steps`. A step has `statement`, `values` (what it assigned,
    appended or returned), `made` (the tensors in each value), `parts` {line: value}, `names`
    {name: value} after it, `calls`, those inside it, and, after backward, the norms of
    `gradients`."""
    paths, outside = {str(path) for path in paths}, SimpleNamespace(calls=[])
    running = [SimpleNamespace(step=outside)]

    def enter(frame, event, arg):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path not in paths or name.startswith("<"):      # [... for ...] is part of its line
            return None
        call = SimpleNamespace(inputs=dict(frame.f_locals), steps=[], step=None)
        table = statements(path)
        running[-1].step.calls.append(call)
        running.append(call)

        def value_of(code, frame):
            try:
                return eval(code, frame.f_globals, frame.f_locals)
            except NameError:                              # of a loop that has not begun
                return None

        def follow(frame, event, arg):
            now = call.step and call.step.statement
            statement = table.get(frame.f_lineno, now) if event == "line" else now
            if now and (event == "return" or statement is not now):
                returns = isinstance(now.node, ast.Return)
                call.step.values = [arg] if returns else [value_of(x, frame) for x in now.targets]
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
    """Return {name: norm} of the gradients of a model's parts."""
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
    """Return {letter: size} of a model, as named at the top of the files."""
    encoder = model.encoder
    (H, W), (h, w), (p, q) = encoder.img_size, encoder.grid, encoder.patch_size
    sizes = dict(C=encoder.in_chans, H=H, W=W, h=h, w=w, L=h * w, p=p, q=q, D=encoder.dim,
                 G=0 if encoder.extra_tokens is None else len(encoder.extra_tokens))
    if hasattr(model, "mask_ratio"):
        K = visible_count(h * w, model.mask_ratio)
        sizes.update(K=K, M=h * w - K)
    if hasattr(model, "decoder_pos_embed"):
        sizes.update(E=model.decoder_pos_embed.shape[2])
    if hasattr(model, "unpredicted"):                      # CrossMAE
        sizes.update(P=sizes["M"] - model.unpredicted)
    if hasattr(model, "map_ids"):
        sizes.update(n=len(model.map_ids))
    if hasattr(model, "weight_tokens"):                    # HyperMAE
        sizes.update(n=len(model.weight_tokens), h=model.proj.out_features,
                     P=sizes["L" if model.loss_on == "all" else "M"])
    return sizes


# ---------------------------------------------------------------------------------------- the lines
def numbers_of(steps):
    """Return in words what steps made: the shapes of tensors, e.g. "(1, 24, 80)", or numbers."""
    made = [x for step in steps for part in step.made for x in part]
    words = [str(tuple(x.shape)) if x.ndim else f"{x.item():.4g}" for x in made] or [
        f"{x:.4g}" for step in steps for x in step.values
        if isinstance(x, (int, float)) and abs(x) < 1000]
    words = [*dict.fromkeys(words)]                        # each once
    return ", ".join(words) if len(words) < 4 else f"{words[0]} ... {words[-1]}"


def split_comment(text):
    """Split a comment into the shapes that it begins with, "(B, K), (B, M)", and its words."""
    shape = r"\([^().;:]*,[^().;:]*\)(?: each)?(?:, )?"
    shapes, words = re.match(rf"# *((?:{shape})*)(.*)", text).groups()
    return shapes.strip(", "), words.strip()


# ------------------------------------------------------------------------------------- the pictures
GREY = 0.8                                                 # where there is no patch


def png(x, height, text=""):
    """Return an image (3,h,w) in [0, 1] as HTML, about `height` pixels high, and a text below."""
    scale = max(1, round(height / x.shape[1]))
    x = F.interpolate(x[None].float(), scale_factor=scale)[0].clamp(0, 1)
    data = b64encode(torchvision.io.encode_png((x * 255).byte(), 9).numpy().tobytes()).decode()
    text = f"<figcaption>{escape(text)}</figcaption>" * bool(text)
    return f'<figure><img alt="" src="data:image/png;base64,{data}">{text}</figure>'


def heat(x):
    """Colour a matrix (h,w) by sign: blue, white at 0, orange. Returns (3,h,w) in [0, 1]."""
    x = x / x.abs().quantile(0.99).clamp(min=1e-9)
    return torch.stack([1 + 0.8 * x.clamp(max=0), 1 - 0.45 * x.abs(), 1 - 0.9 * x.clamp(min=0)])


def span(x):
    return f"{x.min():.2g} to {x.max():.2g}"


def places_of(n, names, encoder):
    """Return the places (n,) of n patches in the grid: those that a name like ids_mask holds."""
    for name, ids in reversed(names.items()):
        if name.startswith("ids") and torch.is_tensor(ids) and ids.shape[1:] == (n,):
            return ids[0]
    return torch.arange(n) if n == encoder.num_patches else None


def attention(names, encoder):
    """Return the attention to each patch, in a layer with queries and keys `q` and `k`
    (B,heads,n,d), as HTML."""
    q, k, L = names["q"], names["k"], encoder.num_patches
    weights = (q @ k.mT / k.shape[3] ** 0.5).softmax(dim=3)[0].mean((0, 1))    # (n,)
    ids = [names[name][0] for name in ("ids_keep", "ids_mask") if torch.is_tensor(names.get(name))]
    if len(weights) > L and len(ids) < 2:                  # all patches, in raster order
        ids = [torch.arange(L)]
    places = torch.cat(ids if len(weights) == L + 1 else ids[:1])
    grid = torch.full((L,), torch.nan).index_copy(0, places, weights[1:1 + len(places)])
    shown = heat(grid.nan_to_num(0).view(encoder.grid))
    return png(shown.where(~grid.view(encoder.grid).isnan(), GREY), 128,
               "attention to each patch, mean over heads and queries")


def picture(x, letters, names, model):
    """Return a tensor as HTML, or "" where a picture would tell nothing."""
    encoder, shape = model.encoder, tuple(x.shape)
    if len(shape) < 2:
        return ""
    (H, W), (p, q), L, C = encoder.img_size, encoder.patch_size, encoder.num_patches, shape[-1]
    side = max(128, min(H, 160))
    if len(shape) == 4 and shape[2:] == (H, W):
        x = x[:4].float()
        if shape[1] == 1:
            x = 1 - x.expand(-1, 3, -1, -1)
        else:
            x = x / 255 if x.max() > 20 else denormalize(x, model)
        return png(torch.cat([*F.pad(x, (0, 1), value=1)], dim=2)[..., :-1], side)
    if len(shape) == 3 and shape[1:] == (H * W, encoder.in_chans):     # a rendered image
        return png(denormalize(x[0].T.view(1, -1, H, W), model)[0], side)
    if len(shape) == 2 and len(x) < 9 and shape[1] in (L, H * W) and x.dtype != torch.long:
        grid = x[0].float().view(encoder.grid if shape[1] == L else (H, W))
        if {*grid.unique().tolist()} <= {0.0, 1.0}:
            return png(1 - grid.expand(3, -1, -1), side, "black: masked")
        return png(heat(grid), side, span(grid))
    if len(shape) == 2 and x.dtype == torch.long and shape[1] < L and x.max() < L:
        grid = torch.zeros(L).index_fill(0, x[0], 1).view(encoder.grid)
        return png(grid.expand(3, -1, -1), side, "white: these patches")
    places = places_of(shape[1], names, encoder) if len(shape) == 3 else None
    if places is not None and C == p * q * encoder.in_chans and ("*" in letters or not letters):
        canvas = torch.full((1, L, p, q, encoder.in_chans), torch.nan)
        canvas[0, places] = x[0].float().view(-1, p, q, encoder.in_chans)
        image = unpatchify(canvas.flatten(2), (p, q), encoder.grid)    # (1, C, H, W)
        return png(denormalize(image, model)[0].nan_to_num(GREY), side)
    matrix = x[0] if len(shape) == 3 else x
    if x.is_floating_point() and len(shape) in (2, 3) and min(matrix.shape) >= 8:
        matrix = matrix[:96, :144].float()
        (rows, columns), text = matrix.shape, span(matrix)
        return png(heat(matrix), rows * max(1, min(192 // columns, 160 // rows)), text)
    return ""


# ----------------------------------------------------------------------------------------- the page
STYLE = """
:root { color-scheme: light dark; --text: light-dark(#1f2328, #e6e6e6); --soft: light-dark(#59636e,
  #9aa4af); --line: light-dark(#d8dee4, #3a4149); --paper: light-dark(#fff, #15181c); --code:
  light-dark(#f6f8fa, #1f242b); --blue: light-dark(#0550ae, #79b8ff); --red: light-dark(#a0111f,
  #ff9a8d) }
* { box-sizing: border-box } h1 { font-size: 1.6em; line-height: 1.2 }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--paper);
  max-width: 1320px; margin: 0 auto; padding: 24px 16px 80px }
pre, code { font: 13px/1.55 ui-monospace, Menlo, Consolas, monospace; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere }
.top { display: flex; flex-wrap: wrap; gap: 10px 40px } .idea { flex: 1 1 420px }
.strip { flex: 1 1 340px } .letters { display: flex; flex-wrap: wrap; gap: 0 14px }
img { image-rendering: pixelated; max-width: 100%; display: block; outline: 1px solid #8883 }
figure { display: inline-block; vertical-align: top; margin: 4px 12px 4px 0 }
figcaption { font-size: 12px; color: var(--soft) } .made { font-size: 13px }
.row { display: grid; grid-template-columns: 27fr 46fr 27fr; gap: 2px 20px; padding: 3px 6px }
.note { font-size: 13.5px; line-height: 1.4; color: var(--soft) } .off pre { opacity: .45 }
.call { border-left: 3px solid var(--line); margin: 6px 0 10px 2px; padding-left: 6px }
.title { background: var(--code); border-radius: 6px; padding: 8px 6px }
b { color: var(--blue); font-weight: 600 } i { color: var(--soft); font-style: normal }
u { color: var(--red); text-decoration: none } s { color: var(--blue); text-decoration: none }
summary { cursor: pointer; list-style: none; border-radius: 6px }
summary:hover, summary:focus-visible { background: var(--code); outline: 2px solid var(--line) }
summary pre::before { content: "▸ "; color: var(--blue) }
details[open] > summary pre::before { content: "▾ " }
button { font: inherit; color: var(--blue); background: none; border: 0; padding: 0; cursor: help;
  text-decoration: underline dotted }
[popover] { max-width: 36em; padding: 14px 18px; border: 1px solid var(--line); color: var(--text);
  background: var(--paper); border-radius: 8px; box-shadow: 0 4px 24px #0004 }
@media (max-width: 820px) { .row { grid-template-columns: 1fr; padding: 6px 4px }
  body { padding: 12px 8px } .call { padding-left: 3px; margin-left: 0 } }
@media print { ::details-content { content-visibility: visible; display: block }
  .row, figure { break-inside: avoid } [popover] { display: block; position: static } }
"""
VIT = str(ROOT / "vit.py")
KEYWORDS = re.compile(rf"(\"[^\"]*\"|'[^']*')|\b({'|'.join([*keyword.kwlist, 'self'])})\b")


def as_html(text, path, used):
    """Return a note as HTML: code in backticks, and "item 3" as a button that shows its text, if it
    exists. Adds the items to `used`, a set of (path, number)."""
    def button(found):
        used.add((path, found[0]))
        return (f'<button type="button" popovertarget="{Path(path).stem}-{found[0]}">{found[0]}'
                f"</button>")

    text = re.sub(r"`(.*?)`", r"<code>\1</code>", escape(text))
    text = re.sub(r"\n {4,}", "<br>", text).replace("\n\n", "<br><br>")        # formulas: by line
    return re.sub(r"\bitems? \d+(?:(?:, | and )\d+)*",
                  lambda found: re.sub(r"\d+", button, found[0]), text)


def coloured(code):
    """Return code as HTML, with keywords and strings in colour."""
    parts = re.split(KEYWORDS, code)                       # text, string, keyword, text, ...
    marks = ("{}", "<s>{}</s>", "<u>{}</u>")
    return "".join(marks[i % 3].format(escape(part)) for i, part in enumerate(parts) if part)


def section(call, model, used, names=None, callers=()):
    """Return a call as HTML: its function's title and docstring, then a row for each statement, as
    in the file, with what it calls below it: open at first, except functions in vit.py.
    `names` {name: value} are the callers'; functions in `callers` are not shown again inside."""
    path, definition = call.steps[0].statement.path, call.steps[0].statement.definition
    file, left, table = escape(Path(path).name), definition.col_offset, statements(path)
    source = Path(path).read_text().splitlines()
    names, callers, runs = {**(names or {}), **call.inputs}, (*callers, definition), {}
    for step in call.steps:
        runs.setdefault(step.statement.first, []).append(step)
    inputs = [f"<b>{name}</b> {tuple(x.shape)}" for name, x in call.inputs.items()
              if torch.is_tensor(x) and x.ndim]
    title = "\n".join(x[left:] for x in source[definition.lineno - 1:definition.body[0].lineno - 1])
    doc = as_html(ast.get_docstring(definition) or "", path, used)
    html = [f'<div class="call"><div class="row title"><div class="note">{doc}</div><pre>'
            f'{coloured(title)}</pre><div class="made">{file}, line {definition.lineno}<br>'
            f'{"<br>".join(inputs)}</div></div>']

    def add(first, last, comments=(), steps=(), made=(), numbers="", ran=True, calls=()):
        """Add a row for the lines from first to last."""
        lines = [re.sub(r"(^|  +)# .*", "", x)[left + 4:] for x in source[first - 1:last]]
        code = "\n".join(filter(str.strip, lines))
        told = [split_comment(text) for text in comments]
        letters = ", ".join(filter(None, [shapes for shapes, _ in told]))
        known = {**names, **steps[-1].names} if steps else names
        words = [f"<b>{escape(letters)}</b>" * bool(steps), escape(numbers)]
        times = len(steps) - (bool(steps) and isinstance(steps[0].statement.node, ast.For))
        if times > 1 and (made or calls):                  # the header of a loop also ends it
            words.append(f"× {times}")
        if steps and steps[-1].gradients:
            norms = [f"{part} {norm:.2g}" for part, norm in steps[-1].gradients.items()]
            words.append(f"norms of gradients: {', '.join(norms)}")
        shown = [picture(x, letters, known, model) for x in [*made[:1], *made[1:][-1:]]]
        if "scaled_dot_product" in code and steps:
            shown = [attention(known, model.encoder)]
        note = as_html(" ".join(text for _, text in told).strip(), path, used)
        cells = (f'<div class="note">{note}</div><pre><i title="{file}">{first}</i>  '
                 f'{coloured(code)}</pre><div class="made">{" ".join(words)}'
                 f'<div>{"".join(shown)}</div></div>')
        kind = "row" if ran else "row off"
        if calls:
            here = " open" * any(c.steps[0].statement.path != VIT for c in calls)
            inner = "".join(section(c, model, used, known, callers) for c in calls)
            cells = f'<details{here}><summary class="{kind}">{cells}</summary>{inner}</details>'
        html.append(cells if calls else f'<div class="{kind}">{cells}</div>' * bool(code))

    i = definition.body[ast.get_docstring(definition) is not None].lineno
    while i <= definition.end_lineno:
        s = table.get(i)
        if s is None or s.definition is not definition:    # else, or a function inside this one
            add(i, i, ran=s is None)
            i += 1
            continue
        steps, inner = runs.get(s.first, []), {}
        for called in [c for step in steps for c in step.calls]:
            inner.setdefault(called.steps[0].statement.definition, called)     # the first one
        calls = [c for function, c in inner.items() if function not in callers]
        if s.parts:                                        # a list, with a comment for each element
            for j in range(s.first, s.last + 1):
                part = [steps[-1].parts[j]] if steps and j in s.parts else []
                numbers = [str(tuple(x.shape)) for x in part]
                if j == s.last:
                    numbers.append(f"together {numbers_of(steps)}")
                add(j, j, [s.comments[j]] if j in s.comments else [], steps, part,
                    ", ".join(numbers), bool(steps), calls if j == s.last else ())
        else:                                              # of two runs both: i-MAE's branches
            made = sum([sum(x.made, []) for x in (steps if len(steps) < 3 else steps[-1:])], [])
            add(s.first, s.last, [*s.above.values(), *s.comments.values()], steps,
                [] if s.only_names else made, "" if s.only_names else numbers_of(steps),
                bool(steps), calls)
        i = s.last + 1
    return "".join(html) + "</div>"


def items_of(path):
    """Return {number: text} of the list at the end of a file, "Paper and release"."""
    tail = Path(path).read_text().split("\n# Paper and release")[-1]
    return {n: " ".join(re.sub(r"\n#", "", text).split())
            for n, text in re.findall(r"#   (\d+)\. (.*(?:\n#      .*)*)", tail)}


def page(text, known, strip, call, model):
    """Return the whole page: the file's docstring `text`, the letters' numbers {letter: n}, a strip
    of captioned images, and a traced call."""
    title, _, idea = text.partition("\n")
    used, parts = set(), []
    body = section(call, model, used)
    items = [f'<div popover id="{Path(path).stem}-{n}"><b>Item {n}</b> {escape(text)}</div>'
             for path in sorted({path for path, _ in used})
             for n, text in items_of(path).items() if (path, n) in used]
    for part in idea.strip("\n").split("\n\n"):
        parts.append(f"<pre>{escape(textwrap.dedent(part))}</pre>" if part.startswith("    ") else
                     f"<p>{escape(part)}</p>")
    letters = "".join(f"<span><b>{k}</b> = {n}</span>" for k, n in known.items())
    top = f'<div class="idea">{"".join(parts)}</div><div class="strip">{strip}</div>'
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>'
            f'{STYLE}</style></head><body><h1>{escape(title)}</h1><div class="top">{top}</div>'
            f'<div class="letters">{letters}</div><p class="note">A line with ▸ opens what it '
            f"calls; an item's number opens its text. Grey lines did not run. Blue shapes "
            f"are the file's own comments; beside them are the sizes here. In a matrix a row is a "
            f"token, blue is negative and orange positive, on a scale of its own.</p>{body}"
            f"{''.join(items)}</body></html>")


# ------------------------------------------------------------------------------- the command line
def strip_of(model, image, noise):
    """Return a row of captioned images: the image, masked, decoded, visible patches copied."""
    encoder = model.encoder
    decoded, mask = model.reconstruct(image, noise)
    masked = denormalize(image, model)[0].where(encoder.pixels_of(mask)[0] == 0, GREY)
    copied = encoder.copy_visible(decoded, image, mask)
    images = {"image": denormalize(image, model)[0], "masked": masked,
              "decoded": denormalize(decoded, model)[0],
              "decoded, visible patches copied": denormalize(copied, model)[0]}
    return "".join(png(x, 128, name) for name, x in images.items())


def offer(method):
    """Say which newest run of a method could be toured instead of an untrained model."""
    for path in sorted(Path("runs").glob("*/last.pt"), key=lambda p: -p.stat().st_mtime):
        if train.read(path)["method"] == method:
            print(f"note    this model is untrained; for a trained one add --checkpoint {path}")
            return


def tour_method(args):
    """Return what `page` needs for a method, and its name."""
    cls = METHODS[args.method]
    torch.manual_seed(0)
    model = load(args.checkpoint) if args.checkpoint else cls(**TINY, **cls.small_model)
    require(type(model) is cls, f"{args.checkpoint} is not of method {args.method}")
    if not args.checkpoint:
        offer(args.method)
    H, W = model.encoder.img_size
    images = draw_shapes(32, (H, W), seed=5)[0][[14, 20]]  # a star and, as a partner, a pentagon
    files = args.image or []
    require(len(files) <= 1 + hasattr(cls, "pairs"), f"--image: {args.method} takes one image")
    for i, file in enumerate(files):
        require(Path(file).is_file(), f"--image {file}: there is no such file")
        try:
            images[i] = center_crop(read_image(file), (H, W), 1)
        except Exception as error:                         # a broken file can raise anything
            raise InputError(f"--image {file}: {error}") from None
    image, partner = normalize(images, model).split(1)
    inputs = [image, model.encoder.fixed_noise(image)]
    if hasattr(cls, "pairs"):
        inputs += [partner, 0.3]                           # the weight of the image
    own = inspect.getfile(cls)
    with torch.no_grad():
        calls = trace(lambda: model.eval()(*inputs), [own, *ROOT.glob("*.py")])
        strip = strip_of(model, *inputs[:2])
    text = sys.modules[cls.__module__].__doc__ or cls.__name__
    known = {k: n for k, n in {"B": 1, **letters(model)}.items()         # as in "L patches"
             if k in "BCHW" or re.search(rf"\b{k}(?= [a-z=])", text)}
    return text, known, strip, calls[0], model


def tour_train(args):
    """Return what `page` needs for a training step: one of eight images, from train_epoch on."""
    found, epoch = [], train.train_epoch

    def traced(number, net, *rest):
        found.append(net)
        found.extend(trace(lambda: found.append(epoch(number, net, *rest)),
                           [ROOT / "train.py", ROOT / "vit.py", ROOT / "mae.py"]))
        return found.pop(1)
    words = ("--epochs 1 --warmup_epochs 0 --train_images 8 --eval_images 8 --batch_size 8 "
             "--device cpu --workers 0 --runs").split()
    with TemporaryDirectory() as folder, patch.object(train, "train_epoch", traced), \
            redirect_stdout(StringIO()):
        train.main([*words, folder])
    model, call = found
    return train.__doc__, {"B": 8, **letters(model)}, "", call, model


def main(argv=None):
    """Run `python -m tests.tour` with the words `argv`."""
    parser = argparse.ArgumentParser("tour", description=__doc__, **LAYOUT)
    option = parser.add_argument
    option("method", choices=[*METHODS, "train"], metavar="METHOD",
           help=f"{', '.join(METHODS)}, or train")
    option("--checkpoint", metavar="FILE", help="from train.py (an untrained model)")
    option("--image", metavar="FILE", nargs="+", help="an image file; for imae also its partner "
           "(images of ours)")
    option("--out", metavar="FILE", help="the page (tour_METHOD.html)")
    option("-h", "--help", action="help", help="show this and exit")
    args = parser.parse_args(argv)
    try:
        found = (tour_train if args.method == "train" else tour_method)(args)
    except (InputError, OSError) as error:
        parser.error(str(error).splitlines()[0])
    out = Path(args.out or f"tour_{args.method}.html")
    out.write_text(page(*found), encoding="utf-8")
    print(f"see     {out}: open it in a browser")


if __name__ == "__main__":
    main()
