"""Exercises: write a function of this project again, and check it.

    python -m tests.exercise                           # the list, from easy to hard
    python -m tests.exercise mae.MAE.forward           # takes that body out of mae.py
    python -m tests.exercise --check mae.MAE.forward   # is it right? if not, where and how?
    python -m tests.exercise --check                   # all of them, a line each
    python -m tests.exercise --handout FOLDER NAMES    # a copy for a class, those bodies taken out

A check calls the function with tiny inputs and compares what it returns, and the gradients, with
the plain loops of tests/references.py. These also stand in for all other exercises meanwhile, so
that one function can be checked while others are missing or wrong. What a docstring does not ask
for is not checked: ties, costs, precision.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import inspect
import io
import re
import shutil
import subprocess
import sys
import tokenize
import traceback
from pathlib import Path

import torch

try:
    from tests.references import EXERCISES
except ModuleNotFoundError:                                # python tests/exercise.py
    sys.exit("run it from the project's folder: python -m tests.exercise")

ROOT = Path(__file__).resolve().parent.parent
TWINS = {  # another function that holds the solution of the first
    "hypermae.fourier_features": "minr.fourier_features",
    "mae.MAE.decoder_input": "imae.IMAE.decode"}
# comments that stay in a body that is taken out: sources and equations
SOURCES = r"eq\.|Sec|Table|Figure|Algorithm|[Ii]tem|release|A\.\d| = |\w\w \+ \w\w|\w\(\w"


class Different(Exception):
    """What differs, in words."""


def find(name):
    """The module or class that has the function `name`, and its name there."""
    module, *classes, last = name.split(".")
    owner = importlib.import_module(module)
    for part in classes:
        owner = getattr(owner, part)
    return owner, last


# -------------------------------------------------------------------------- comparing two results
def shapes(value):
    """The form of a result in words, the same for lists and tuples: "[(2, 3), number]"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shapes(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shapes(part) for part in value) + "]"
    if isinstance(value, torch.Tensor) and value.ndim:
        kind = "" if value.is_floating_point() else " of bools" if value.dtype == torch.bool else (
            " of integers")
        return f"{tuple(value.shape)}{kind}"
    return "number" if isinstance(value, (torch.Tensor, int, float)) else repr(value)[:40]


def leaves(value, names):
    """Every tensor or number of a result, as (label, names of its axes, tensor); `names` are the
    `returns` of references.exercise."""
    if isinstance(value, dict):
        for key in sorted(value):
            for label, axes, leaf in leaves(value[key], ""):
                yield f"{names} {key} {label}".strip(), axes, leaf
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            if isinstance(names, tuple):                   # each part has names of its own
                yield from leaves(part, names[i])
            else:                                          # ["block: image, token"], ["layer", ...]
                title, _, axes = names[0].partition(": ")
                for label, axes, leaf in leaves(part, names[1] if len(names) > 1 else axes):
                    yield f"{title} {i} {label}".strip(), axes, leaf
    else:
        label, _, axes = names.rpartition(": ")
        yield label, axes.split(", "), torch.as_tensor(value)


def difference(expected, yours, names):
    """The first number in which two results differ, in words; "" if there is none."""
    if isinstance(expected, dict) and isinstance(yours, dict) and expected.keys() != yours.keys():
        missing, more = expected.keys() - yours.keys(), yours.keys() - expected.keys()
        return "; ".join(f"{word} {', '.join(map(str, keys))}" for word, keys in (
            ("missing:", missing), ("not expected:", more)) if keys)
    if shapes(expected) != shapes(yours):
        return f"expected shape {shapes(expected)}, yours {shapes(yours)}"
    for (label, axes, a), (_, _, b) in zip(leaves(expected, names), leaves(yours, names)):
        x, y = a.detach().double(), b.detach().double()
        near = (x - y).abs() <= 1e-4 * x.nan_to_num().abs().max().clamp(min=1e-2)
        wrong = ~(near | x.isnan() & y.isnan())
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            a, b = a[tuple(where)].item(), b[tuple(where)].item()
            a, b = (a, b) if isinstance(a, bool) else (f"{a:.5g}", f"{b:.5g}")
            place = [label] if label else []
            if axes != [""]:
                place += [f"{axis} {i}" for axis, i in zip(axes[-len(where):], where)]
            count = f" ({wrong.sum()} of {wrong.numel()} numbers differ)" if where else ""
            return f"{', '.join(place) or 'result'}: expected {a}, yours {b}{count}"
    return ""


def training_effects(result, names, model):
    """What training sees of a result: {which parts have a gradient, each parameter's gradient}."""
    effects, total = {}, torch.zeros(())
    for label, _, leaf in leaves(result, names):
        effects[f"{label or 'result'} has a gradient"] = leaf.requires_grad
        if leaf.requires_grad:                             # each number gets a weight of its own
            total = total + (leaf * torch.linspace(1, 2, leaf.numel()).view_as(leaf)).sum()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = [None] * len(trained)
    if total.requires_grad:
        grads = torch.autograd.grad(total, trained.values(), allow_unused=True)
    for (name, p), g in zip(trained.items(), grads):
        effects[f"the gradient of {name}"] = torch.zeros_like(p) if g is None else g
    return effects


# -------------------------------------------------------------------------------- the check itself
@contextlib.contextmanager
def references_instead_of(names):
    """For a while, references take the place of these functions, wherever they are imported."""
    modules = {sys.modules.get(name.split(".")[0]) for name in EXERCISES} - {None}
    undo = []
    for name in names:
        if name.split(".")[0] in sys.modules:
            owner, last = find(name)
            function = getattr(owner, last, None)
            for place in [owner] if isinstance(owner, type) else modules:
                for key in [k for k, value in vars(place).items() if value is function]:
                    undo.append((place, key, function))
                    setattr(place, key, EXERCISES[name].reference)
    try:
        yield
    finally:
        for place, key, function in undo:
            setattr(place, key, function)


def in_words(name, args):
    """The arguments of a call, as "images (2, 3, 4, 6), patch_size 2"."""
    words = []
    for key, arg in zip(inspect.signature(EXERCISES[name].reference).parameters, args):
        if isinstance(arg, torch.nn.Module):
            words.append(arg.said)
        else:
            words.append(f"{key} {shapes(arg) if torch.is_tensor(arg) and arg.ndim else arg}")
    return "; ".join(words)


def compare(name, function, args):
    """Raises Different unless the function does what the reference does with these arguments."""
    item, expected, yours, error = EXERCISES[name], None, None, None
    clones = [arg.clone() if torch.is_tensor(arg) else arg for arg in args]

    def answered(*args):
        result = function(*args)
        if result is None:
            raise Different("it returns nothing: is there a return?")
        return result
    try:
        yours = item.call(answered, *clones)
    except NotImplementedError:
        raise
    except Exception as raised:
        error = raised
    try:
        expected = item.call(item.reference, *args)
    except ValueError:                                     # as the docstring says
        if isinstance(error, ValueError):
            return
        raise Different(f"expected a ValueError, yours: {error or shapes(yours)}") from error
    if error:
        raise error
    if torch.is_tensor(yours) and yours.ndim and shapes([*yours]) == shapes(expected):
        yours = [*yours]                                   # as good as a list
    for key, arg, clone in zip(inspect.signature(item.reference).parameters, args, clones):
        if torch.is_tensor(arg) and not torch.equal(arg, clone):
            raise Different(f"the argument {key} has been changed: work on a copy of it")
    text = difference(expected, yours, item.returns)
    if text:
        for slip, hint in item.slips.items():
            with contextlib.suppress(Exception):           # some cannot be made with all arguments
                wrong = item.call(lambda *args: item.reference(*args, slip=slip), *args)
                if not difference(wrong, yours, item.returns):
                    text += f"\n  Hint: {hint}"
                    break
        raise Different(text)
    if "metrics" in item.returns and isinstance(yours, (list, tuple)):
        for key, value in yours[1].items():
            if not torch.is_tensor(value):
                raise Different(f"metrics {key} is a Python number: expected a tensor, "
                                f"{key}.detach()")
            if value.requires_grad:
                raise Different(f"metrics {key} has a gradient: return the metric detached: "
                                f"{key}.detach()")
    if isinstance(args[0], torch.nn.Module):
        text = difference(*(training_effects(result, item.returns, args[0])
                            for result in (expected, yours)), "")
        if text:
            raise Different(f"{text}\n  Hint: the numbers are right, but what is learnt from them "
                            f"is not. What is detached, or made anew from numbers?")


def check(name):
    """What is wrong with the function `name`, in words; "" if it is right."""
    called = ""
    try:
        owner, last = find(name)
        function = getattr(owner, last)
        with references_instead_of(EXERCISES.keys() - {name}), torch.random.fork_rng([]):
            torch.manual_seed(0)
            for args in EXERCISES[name].cases(sys.modules[name.split(".")[0]]):
                called = f" ({in_words(name, args)})"
                compare(name, function, args)
    except Different as error:
        return f"{name} is not right yet{called}\n  {error}"
    except Exception as error:
        if str(error).startswith("exercise: "):
            other = str(error).removeprefix("exercise: ")
            calls = "" if other == name else f"calls {other}, which "
            return f"{name} {calls}is not written yet"
        lines = [f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
                 for frame in traceback.extract_tb(error.__traceback__)
                 if Path(frame.filename).parent == ROOT]
        lines = lines[-3:] + "".join(traceback.format_exception_only(error)).rstrip().splitlines()
        return "\n  ".join([f"{name} stops with an error{called}", *lines])
    return ""


# ------------------------------------------------------------------------------ taking bodies out
def file_of(name):
    return f"{name.split('.')[0]}.py"


def find_body(text, name):
    """The syntax tree of the function `name` in the text of its file, and the number of lines up to
    its body, which comes after the docstring."""
    node = ast.parse(text)
    for part in name.split(".")[1:]:
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node, node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1


def without_bodies(text, names):
    """The lines of a file's text that are not in the bodies of these functions."""
    inside = set()
    for name in names:
        node, start = find_body(text, name)
        inside.update(range(start, node.end_lineno))
    return [line for i, line in enumerate(text.splitlines()) if i not in inside]


def take_out(folder, name, message):
    """Takes the body of the function `name` out of its file in `folder` -> the function's line.
    Signature, docstring and the comments that name an equation, a section or an item stay."""
    path = folder / file_of(name)
    text = path.read_bytes().decode("utf-8")
    node, start = find_body(text, name)
    body = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside = start < token.start[0] <= node.end_lineno
        if inside and token.type == tokenize.COMMENT and re.search(SOURCES, token.string):
            comment = re.sub("the same[,:] ", "", token.string)
            if not re.fullmatch(r"# (Sec\.|Table|Figure) \S+", comment):  # nothing on its own
                body.append(comment)
    body.append(f'raise NotImplementedError("exercise: {message}")')
    lines = text.splitlines(keepends=True)
    end = lines[0][len(lines[0].rstrip("\r\n")):]          # as the file has it
    lines[start:node.end_lineno] = [" " * node.body[0].col_offset + line + end for line in body]
    path.write_bytes("".join(lines).encode("utf-8"))
    return node.lineno


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, encoding="utf-8")


def refusal(name):
    """Why the body of this exercise must not be taken out, in one line: it is out already, or git
    could not bring it back as it is; "" if it may be."""
    file = file_of(name)
    text = (ROOT / file).read_bytes().decode("utf-8")
    with contextlib.suppress(SyntaxError, StopIteration):
        node = find_body(text, name)[0]
        code = [ast.unparse(part) for part in node.body[1:]]           # without the docstring
        if len(code) == 1 and code[0].startswith(f"raise NotImplementedError('exercise: {name}"):
            return (f"{name} is already taken out: write it in {file}, line {node.lineno}, "
                    f"then --check {name}")
    if not shutil.which("git") or git("ls-files", "--error-unmatch", file).returncode:
        return (f"git does not know {file} and could not bring it back: "
                f"python -m tests.exercise --handout FOLDER {name}")
    with contextlib.suppress(SyntaxError, StopIteration):  # other exercises may have been changed
        others = [other for other in EXERCISES if file_of(other) == file and other != name]
        committed = git("show", f"HEAD:./{file}").stdout
        if without_bodies(text, others) == without_bodies(committed, others):
            return ""
    return (f"{file} has changes that are not committed. Several in one file: name them together. "
            f"To keep yours: git commit -m mine {file} (git checkout then gives back yours, not "
            f"the original) or git stash push {file}. To drop them: git checkout HEAD -- {file}")


def comparison(name):
    """How to see the original beside a right solution; "" if git knows of no difference."""
    words = ["diff", "HEAD", "--", file_of(name)]
    differs = shutil.which("git") and git(*words).stdout
    return f"; compare with the original: git {' '.join(words)}" if differs else ""


def task(name):
    item = EXERCISES[name]
    return f"{item.task[0].upper()}{item.task[1:]} ({item.section})."


def empty(names):
    """Takes the bodies of these exercises out of the working tree. "", or why it must not."""
    for name in names:
        if refusal(name):
            return refusal(name)
    for name in names:
        print(f"{file_of(name)}, line {take_out(ROOT, name, name)}: {name}. {task(name)}")
    files = sorted({file_of(name) for name in names})
    print(f"Check it:     python -m tests.exercise --check {' '.join(names)}\n"
          f"Get it back:  git checkout HEAD -- {' '.join(files)}\n"
          f"              (whole files; git stash push {' '.join(files)} keeps what you wrote)")
    return ""


def handout(folder, names):
    """Copies the project into `folder` without the bodies of these exercises, with a page of tasks.
    "", or why it must not."""
    if str(folder) in EXERCISES:
        return f"--handout FOLDER NAMES: {folder} was read as the folder"
    if not names:
        return "--handout needs the names of exercises: --handout FOLDER NAMES"
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        return f"{folder} exists and is not an empty folder"
    if ROOT / "tests" in [folder.resolve(), *folder.resolve().parents]:
        return f"{folder} is in the project's tests: choose another place"
    kept = [path for part in ("*.py", "*.txt", "*.md", "LICENSE*") for path in ROOT.glob(part)]
    folder.mkdir(parents=True, exist_ok=True)
    for path in kept:
        shutil.copy(path, folder)
    for part in ("tests", ".github"):                      # test_exercise.py has solutions
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns(
                "__pycache__", "test_exercise.py"))
    page = ["# Tasks", "Each function below lacks its body. Its docstring (or its class's), the "
            "comments that are left and the paper say what it has to do. The checks compare with "
            "plain loops in `tests/references.py`: try without reading them. They do not look at "
            "speed, devices or ties.",
            "Install: `pip install -r requirements.txt`. Until all is written, `train.py` and "
            "`pytest` stop with `exercise: NAME`. The README is the whole project's.",
            "All tasks: `python -m tests.exercise --check " + " ".join(names) + "`"]
    for i, name in enumerate(names, 1):
        take_out(folder, name, name)
        twin = TWINS.get(name)
        page += [f"## {i}. `{name}`", f"{task(name)} In `{file_of(name)}`.",
                 f"Check: `python -m tests.exercise --check {name}`"]
        if twin:
            take_out(folder, twin, f"{twin} (with lines of {name})")
            page.append(f"`{twin}` has some of these lines and no check of its own: write it, too.")
            print(f"also taken out, as it has lines of {name}: {twin}")
    (folder / "TASKS.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    for file in sorted({file_of(name) for name in EXERCISES}):
        if "NotImplementedError(\"exercise: " in (ROOT / file).read_text(encoding="utf-8"):
            print(f"note: {file} has a body taken out already, which is missing in the copy, too")
    print(f"{folder}: {len(names)} of {len(EXERCISES)} exercises, described in TASKS.md")
    return ""


def main(argv=None):
    """The command line. Returns 0 if all is right, 1 if not; 2 where it refuses, in one line."""
    parser = argparse.ArgumentParser("python -m tests.exercise", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="exercises: their bodies "
                        "are taken out of the files here; without: a list")
    parser.add_argument("--check", action="store_true", help="check them; without NAMEs all")
    parser.add_argument("--handout", type=Path, metavar="FOLDER",
                        help="leave the files here; take the bodies out of a copy in FOLDER")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in EXERCISES:
            near = difflib.get_close_matches(name, EXERCISES, 3, 0.4)
            parser.exit(2, f"{name} is not an exercise" + (
                f"; did you mean {' or '.join(near)}?\n" if near else
                ": without a name there is a list\n"))
    names = [name for name in EXERCISES if name in args.names]
    if args.check:
        texts = {name: check(name) for name in names or EXERCISES}
        for name, text in texts.items():
            text = text or f"{name} is right{comparison(name) if names else ''}"
            print(text if names else re.split(r" \((?!with)|\n", text)[0])
        return int(any(texts.values()))
    if args.handout or names:
        reason = handout(args.handout, names) if args.handout else empty(names)
        if reason:
            parser.exit(2, f"{reason}\n")
        return 0
    print(__doc__.split("\n\n")[1], end="\n\n")
    for name, item in EXERCISES.items():
        print(f"{name:32} {item.task} ({item.section})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
