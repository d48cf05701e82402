"""A tour: one image goes through a method's forward, line by line, with the shapes of all tensors.

    python -m tests.tour mae                           # an untrained model, an image of ours
    python -m tests.tour mae --checkpoint runs/mae_shapes/last.pt --image photo.jpg

Lines appear as in the file, with their numbers: a call first, then what runs inside it, then ("->")
its result. Beside them are the shapes and the file's own comments. Loops and functions are shown
once. A picture of the stages is written to tour_METHOD.png. Lines are found by tracing the running
code, so a method of your own needs nothing here. test_tour.py uses the same tracer.
"""

import argparse
import ast
import inspect
import linecache
import re
import sys
import textwrap
import tokenize
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import torchvision

from train import LAYOUT, METHODS, center_crop, draw_shapes, load, read_image
from vit import InputError, denormalize, normalize, patchify, require, visible_count

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(img_size=(32, 48), patch_size=4, in_chans=3, dim=80, depth=4, heads=4)
# of vit.py; what is the same in every method is shown for MAE only
SHOWN = {"ViT.embed", "ViT.add_learned_tokens", "ViT.encode", "ViT.layers"}
SHOWN_FOR_MAE = SHOWN | {"masking", "Block.forward", "Attention.forward"}


# --------------------------------------------------------------------------------------- the tracer
@lru_cache
def statements(path):
    """Return {line: the statement in it} for the functions of a file. The statement of a loop or a
    condition is its header. Fields: path, node (ast), function, first and last line, end (with its
    body), loops (number of loops around it), comments {line: text}, above (the lines of comments
    before it), targets (code of what it assigns or appends), only_names (whether it returns names
    and makes nothing), and parts {line: code}: elements of a list, if several lines of it have
    comments."""
    comments, alone, table = {}, set(), {}
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
                if token.line.strip() == token.string:
                    alone.add(token.start[0])

    def visit(parent, function, loops):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                visit(node, f"{function}.{node.name}".strip("."), 0)
            else:
                if isinstance(node, ast.stmt):
                    add(node, function, loops)
                visit(node, function, loops + isinstance(node, (ast.For, ast.While)))

    def add(node, function, loops):
        last = node.end_lineno
        if hasattr(node, "body"):                          # or in the same line: if x: return
            last = max(node.lineno, node.body[0].lineno - 1)
        lines, start = range(node.lineno, last + 1), node.lineno
        while start - 1 in alone:
            start -= 1
        own = {i: comments[i] for i in lines if i in comments and i not in alone}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        targets = [ast.unparse(x) for t in targets if t for x in getattr(t, "elts", [t])]
        appended = re.match(r"([\w.]+)\.append\(", ast.unparse(node))
        elements = [x for part in ast.walk(node) if isinstance(part, ast.List) for x in part.elts]
        parts = {x.end_lineno: ast.unparse(x) for x in elements if x.end_lineno in own}
        kinds = {type(x) for x in ast.walk(node)}
        table.update(dict.fromkeys(lines, SimpleNamespace(
            path=path, node=node, function=function, first=lines[0], last=last, end=node.end_lineno,
            loops=loops, comments=own, above={i: comments[i] for i in range(start, lines[0])},
            targets=[f"{appended[1]}[-1]"] if appended else [x for x in targets if x != "_"],
            only_names=kinds <= {ast.Return, ast.Tuple, ast.Name, ast.Load},
            parts=parts if len(own) > 1 else {})))

    visit(ast.parse(Path(path).read_text()), "", 0)
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
    {name: value} after it, and `calls`, those inside it."""
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
                call.steps.append(call.step)
            if statement is not now:
                parts = {i: value_of(x, frame) for i, x in statement.parts.items()}
                call.step = SimpleNamespace(statement=statement, parts=parts, calls=[])
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
def shape_of(made):
    """Return the shapes of tensors in words, e.g. "(1, 24, 80)" or "5 x (1, 25, 80)"."""
    shapes = [str(tuple(x.shape)) if x.ndim else "scalar" for x in made]
    if len(shapes) > 2:
        same = len({*shapes}) == 1
        return f"{len(shapes)} x {shapes[0]}" if same else f"{shapes[0]} ... {len(shapes)} tensors"
    return ", ".join(shapes)


def code_of(statement, i):
    """Return line i of a statement, without its comment and indentation."""
    line = linecache.getline(statement.path, i).rstrip()
    return line.removesuffix(statement.comments.get(i, "")).rstrip()[statement.node.col_offset:]


def lines_of(call, own, shown, told, level=0):
    """Return the lines about a call, (place, code, shape, comment): each statement that makes
    tensors, once, and the calls inside it. `own` is the method's file, `shown` the functions of
    vit.py to show; `told` collects functions, each of which is shown once."""
    first = call.steps[0].statement
    file, title = Path(first.path).stem, first.function.split(".")[-1]
    if file == "vit" and first.function not in shown:
        return [line for step in call.steps for inner in step.calls
                for line in lines_of(inner, own, shown, told, level)]
    if first.function in told:
        return []
    told.add(first.function)
    is_part = level == 0 or file != "vit" and title in ("encode", "decode")
    lines, runs = [("", f"--- {title} ", "", "")] * is_part, {}
    for step in call.steps:                                # runs: {line: steps of its statement}
        runs.setdefault(step.statement.first, []).append(step)
    for i, steps in sorted(runs.items()):
        s = steps[0].statement
        indent, place = "  " * (level + s.loops), "" if s.path == own else f"{file}:"
        inside = [line for inner in steps[0].calls
                  for line in lines_of(inner, own, shown, told, level + s.loops + 1)]
        shapes = [shape_of(sum(step.made, [])) for step in steps]
        shape = " ... ".join(dict.fromkeys(filter(None, shapes)))
        body = [runs[j] for j in runs if isinstance(s.node, ast.For) and s.last < j <= s.end]
        loops = any(any(step.made) for run in body for step in run)
        if s.only_names or not (shape or inside or loops):
            continue
        code = " ".join(code_of(s, j).strip() for j in range(i, s.last + 1))
        comment = " ".join(s.comments.values())
        if body:
            code, shape = f"{code}  x {len(body[0])}", shape if inside else ""
        if file != "vit":
            lines += [("", indent + text, "", "") for text in s.above.values()]
        if s.parts:
            lines += [(f"{place}{j}", indent + code_of(s, j), shape_of([part]), s.comments[j])
                      for j, part in steps[0].parts.items()]
        elif inside:
            lines += [(f"{place}{i}", indent + code, "", ""), *inside]
            if not isinstance(s.node, ast.Return):
                lines.append(("", f"{indent}-> {', '.join(s.targets)}", shape, comment))
        else:
            lines.append((f"{place}{i}", indent + code, shape, comment))
    return lines


def lay_out(place, code, shape, comment):
    """Return a line for a terminal of 100 columns, or several if it is too long."""
    if code.startswith("---"):
        return code.ljust(100, "-")
    left, right = f"{place:>7}  {code}", f"{shape:<15} {comment}".rstrip()
    column = min(55, 100 - len(right))
    if not right or len(left) + 2 > column and len(left) + 2 + len(right) > 100:
        left = textwrap.fill(left, 100, subsequent_indent=" " * 20, drop_whitespace=False)
        return f"{left}\n{'':{column}}{right}".rstrip()
    return f"{left:<{column - 2}}  {right}"


# -------------------------------------------------------------------------------------- the picture
def attention_maps(model, calls, ids_keep, ids_mask):
    """Return {title: image (1,3,h,w)}: to which patches the last attention layer in the encoder,
    and the last one outside it, attend (mean over heads; yellow: most; grey: no token)."""
    names = {id(module): name for name, module in model.named_modules()}
    K, L, maps = len(ids_keep), model.encoder.num_patches, {}
    for call in flatten(calls):
        name = names.get(id(call.inputs.get("self")), "")
        q, k = (call.steps[-1].names.get(x) for x in "qk")
        if not torch.is_tensor(q) or q.ndim != 4 or name.startswith("teacher"):
            continue
        inside = name.startswith("encoder.")
        ids = torch.arange(L) if inside else torch.cat([ids_keep, ids_mask])
        ids = ids if k.shape[2] > L else ids_keep
        weights = (q @ k.mT / k.shape[3] ** 0.5).softmax(dim=3)[0].mean(0)       # (queries, keys)
        who = "mask tokens" if hasattr(model, "mask_token") else "weight tokens"
        if q.shape == k.shape:                             # of what comes after the patches, if any
            others = weights[1 + (len(ids) if inside else K):]
            weights, who = (others, who) if len(others) else (weights[:1], "class token")
        values = weights.mean(0)[1:1 + len(ids)]
        x = (values - values.min()) / (values.max() - values.min())
        colours = torch.full((L, 3), 0.85)
        colours[ids] = torch.stack([x, 0.9 * x ** 1.5, 0.5 * (1 - x)], dim=1)
        title, image = f"attention of the {who} in {name}", colours.T
        maps[inside] = title, image.view(1, 3, *model.encoder.grid)
    return dict(maps.values())


def draw(model, inputs, calls, path):
    """Write the stages as a row of images, and return their titles."""
    images, noise, *pair = inputs
    encoder, mix, before, after = model.encoder, images, {"image": images}, {}
    ids_keep, ids_mask, mask = encoder.mask(images, noise, model.mask_ratio)
    if pair:
        mix = model.mix_images(images, *pair)[0]
        before.update({"partner": pair[0], "mixture": mix})
        for i, x in enumerate(model.unmix(images, *pair, noise)[0], start=1):
            after[f"decoded by branch {i}"] = x
    else:
        after["decoded"] = model.reconstruct(images, noise)[0]
        after["visible patches copied"] = encoder.copy_visible(after["decoded"], images, mask)
    after["original"] = images
    for part in (before, after):
        part.update({title: denormalize(x, model) for title, x in part.items()})
    shown, masked = denormalize(mix, model), encoder.pixels_of(mask).expand(-1, 3, -1, -1)
    patchwise = {"patches": shown, "mask (black: masked)": 1 - masked,
                 "visible patches": torch.where(masked > 0, 0.85, shown),
                 **attention_maps(model, calls, ids_keep[0], ids_mask[0])}
    scale, cells = max(1, 144 // max(encoder.img_size)), []
    size, (p, q) = [scale * n for n in encoder.img_size], [scale * n for n in encoder.patch_size]
    for title, x in {**before, **patchwise, **after}.items():
        x = F.interpolate(x, size)[0]
        if title in patchwise:                             # gaps between patches
            x[:, ::p], x[:, 1::p], x[:, :, ::q], x[:, :, 1::q] = 1, 1, 1, 1
        cells.append(x)
    torchvision.utils.save_image(cells, path, nrow=len(cells), padding=8, pad_value=1)
    return [*before, *patchwise, *after]


# ------------------------------------------------------------------------------- the command line
def tour(args):
    """Print the lines of a method, and write the picture."""
    cls = METHODS[args.method]
    torch.manual_seed(0)
    model = load(args.checkpoint) if args.checkpoint else cls(**TINY, **cls.small_model)
    require(type(model) is cls, f"{args.checkpoint} is not of method {args.method}")
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
        calls = trace(lambda: model.train()(*inputs), [own, *ROOT.glob("*.py")])
    text = sys.modules[cls.__module__].__doc__ or ""
    print(f"{cls.__name__}, {args.checkpoint or 'untrained'}: an image of {H} x {W} pixels. On the "
          f"left: lines of {Path(own).name}\n")
    print(*[line for line in text.splitlines() if line.startswith("    ")], sep="\n")
    known = [f"{k} = {n}" for k, n in {"B": 1, **letters(model)}.items()         # as in "L patches"
             if k in "BCHW" or re.search(rf"\b{k}(?= [a-z=])", text)]
    print(f"here {', '.join(known)}\n")
    shown = SHOWN_FOR_MAE if args.method == "mae" else SHOWN
    for line in lines_of(calls[0], own, shown, set()):
        print(lay_out(*line))
    out = args.out or f"tour_{args.method}.png"
    titles = enumerate(draw(model.eval(), inputs, calls, out), start=1)
    titles = "; ".join(f"{i} {title}" for i, title in titles)
    print("\n" + textwrap.fill(f"see {out}: {titles} (yellow: most, grey: no token)", 100))


def main(argv=None):
    """Run `python -m tests.tour` with the words `argv`."""
    parser = argparse.ArgumentParser("tour", description=__doc__, **LAYOUT)
    option = parser.add_argument
    option("method", choices=METHODS, metavar="METHOD", help=", ".join(METHODS))
    option("--checkpoint", metavar="FILE", help="from train.py (an untrained model)")
    option("--image", metavar="FILE", nargs="+", help="an image file; for imae also its partner "
           "(images of ours)")
    option("--out", metavar="FILE", help="the picture (tour_METHOD.png)")
    option("-h", "--help", action="help", help="show this and exit")
    args = parser.parse_args(argv)
    try:
        tour(args)
    except (InputError, OSError) as error:
        parser.error(str(error).splitlines()[0])


if __name__ == "__main__":
    main()
