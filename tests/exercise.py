"""Exercises: rewrite functions of this project and check them.

    python -m tests.exercise                           # the list, from easy to hard
    python -m tests.exercise mae.MAE.forward           # removes its body from mae.py
    python -m tests.exercise --check mae.MAE.forward   # is it right? if not, where is it wrong?
    python -m tests.exercise --check                   # check all, one line each
    python -m tests.exercise --handout FOLDER NAMES    # a copy for students, without those bodies

A check calls your function on tiny inputs and compares its results and gradients with those of a
plain-loop reference (tests/lib/references.py). During a check, references also replace all other
exercise functions, so you can check one function while others are missing or wrong. Ties, speed and
errors for invalid arguments are not checked. Each check is a process of its own, which reads the
files as they are now, also in a notebook: from tests.exercise import main; main(["--check"]).
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torchvision.transforms.v2                           # here, so that checks need not import it

from tests.lib.references import EXERCISES, Different

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 30                                               # after which a check is stopped
COPIES = {"hypermae.fourier_features": "minr.fourier_features"}        # the same function
TRAINED = {"x", "y", "latent", "M", "tokens"}              # arguments that earlier layers compute


def find(name):
    """Return the module or class that has the function `name`, and its name there."""
    module, *classes, last = name.split(".")
    owner = importlib.import_module(module)
    for part in classes:
        owner = getattr(owner, part)
    return owner, last


# -------------------------------------------------------------------------- comparing two results
def shapes(value):
    """Describe the shape of a result, e.g. "[(2, 3), number]"; lists and tuples look alike."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shapes(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        parts = [shapes(part) for part in value]
        if len(parts) > 3 and len(set(parts)) == 1:        # e.g. a tensor as a list
            return f"[{len(parts)} x {parts[0]}]"
        return "[" + ", ".join(parts) + "]"
    if isinstance(value, torch.Tensor) and value.ndim:
        return str(tuple(value.shape))
    known = isinstance(value, (torch.Tensor, int, float))
    return "number" if known else type(value).__name__


def leaves(value, names):
    """Yield every tensor or number in a result, as (label, names of its axes, value); `names` is
    the argument `returns` of references.exercise."""
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
        yield label, axes.split(", "), value


def some(words):
    """Name the first three words and count the others."""
    words = sorted(map(str, words))
    return ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")


def difference(expected, yours, names):
    """Describe the first difference between two results; "" if there is none."""
    if yours is None:
        return "yours returns None: is a return missing?"
    if isinstance(expected, dict) and isinstance(yours, dict) and expected.keys() != yours.keys():
        missing, more = expected.keys() - yours.keys(), yours.keys() - expected.keys()
        return "; ".join(f"{word} {some(keys)}" for word, keys in (
            ("missing:", missing), ("not expected:", more)) if keys)
    if shapes(expected) != shapes(yours):
        return f"expected shape {shapes(expected)}, yours {shapes(yours)}"
    pairs, last = zip(leaves(expected, names), leaves(yours, names)), ("loss", "metrics loss")
    for (label, axes, a), (_, _, b) in sorted(pairs, key=lambda pair: pair[0][0] in last):
        if torch.is_tensor(a) and torch.is_tensor(b) and a.dtype != b.dtype:
            return f"{label or 'result'}: expected dtype {a.dtype}, yours {b.dtype}"
        a, b = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
        x, y = a.double(), b.double()
        near = (x - y).abs() <= 1e-4 * x.nan_to_num().abs().max().clamp(min=1e-2)
        wrong = ~(near | x.isnan() & y.isnan())
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            a, b = a[tuple(where)].item(), b[tuple(where)].item()
            a, b = (a, b) if isinstance(a, bool) else (f"{a:.5g}", f"{b:.5g}")
            place = [f"{axis} {i}" for axis, i in zip(axes[-len(where):], where) if axis]
            place = ", ".join(filter(None, [label, *place]))
            count = f" ({wrong.sum()} of {wrong.numel()} numbers differ)" if where else ""
            return f"{place or 'result'}: expected {a}, yours {b}{count}"
    return ""


def hint(name, args, yours):
    """Return a hint if a common mistake gives the same wrong result, otherwise ""."""
    item = EXERCISES[name]
    for slip, text in item.slips.items():
        with contextlib.suppress(Exception):               # some mistakes need other arguments
            wrong = item.call(lambda *args: item.reference(*args, slip=slip), *args)
            if not difference(wrong, yours, item.returns):
                return f"\n  Hint: {text}"
    return ""


def training_effects(result, names, model, inputs):
    """Return what matters for training, {words: value}: whether each part of a result requires a
    gradient, and the gradients of parameters and of those `inputs` {name: value} in TRAINED."""
    effects, total = {}, torch.zeros(())
    for label, _, leaf in leaves(result, names):
        leaf = torch.as_tensor(leaf)
        effects[f"{label or 'result'} has a gradient"] = leaf.requires_grad
        if leaf.requires_grad:                             # each number gets a weight of its own
            total = total + (leaf * torch.linspace(1, 2, leaf.numel()).view_as(leaf)).sum()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained.update((f"its argument {key}", inputs[key]) for key in TRAINED & inputs.keys())
    grads = [None] * len(trained)
    if total.requires_grad:
        grads = torch.autograd.grad(total, trained.values(), allow_unused=True)
    for (name, p), g in zip(trained.items(), grads):
        effects[f"the gradient of {name}"] = torch.zeros_like(p) if g is None else g
    return effects


# -------------------------------------------------------------------------------- the check itself
@contextlib.contextmanager
def references_instead_of(names):
    """Temporarily replace these functions with their references, wherever they are imported."""
    modules = {sys.modules.get(name.split(".")[0]) for name in EXERCISES} - {None}
    with contextlib.ExitStack() as undo:
        for name in names:
            if name.split(".")[0] in sys.modules:
                owner, last = find(name)
                function = getattr(owner, last, None)
                for place in [owner] if isinstance(owner, type) else modules:
                    for key in [k for k, value in vars(place).items() if value is function]:
                        undo.enter_context(patch.object(place, key, EXERCISES[name].reference))
        yield


def in_words(name, args):
    """Describe the arguments of a call: "images (2, 3, 4, 6); patch_size 2"."""
    keys = inspect.signature(EXERCISES[name].reference).parameters
    words = []
    for key, arg in zip(keys, args):
        arg = shapes(arg) if torch.is_tensor(arg) and arg.ndim else arg
        words.append(arg.said if isinstance(arg, torch.nn.Module) else f"{key} {arg}")
    return "; ".join(words)


def compare(name, function, args):
    """Raise Different unless the function does what the reference does with these arguments."""
    item = EXERCISES[name]
    model = args[0] if isinstance(args[0], torch.nn.Module) else torch.nn.Module()
    inputs = dict(zip(inspect.signature(item.reference).parameters, args))
    for key in TRAINED & inputs.keys():
        inputs[key].requires_grad_()
    clones = {key: arg.clone() if torch.is_tensor(arg) else arg for key, arg in inputs.items()}
    expected = item.call(item.reference, *args)            # yours may change the model
    yours = item.call(function, *clones.values())
    if torch.is_tensor(yours) and yours.ndim and shapes([*yours]) == shapes(expected):
        yours = [*yours]                                   # a stacked tensor is as good as a list
    for key, arg in inputs.items():
        if torch.is_tensor(arg) and not torch.equal(arg, clones[key]):
            raise Different(f"it modifies its argument {key} in place: work on a copy")
    text = difference(expected, yours, item.returns)
    if text:
        raise Different(text + hint(name, args, yours))
    text = difference(training_effects(expected, item.returns, model, inputs),
                      training_effects(yours, item.returns, model, clones), "")
    if text:
        raise Different(f"{text}\n  Hint: the values are right but the gradients are not. Is "
                        f"something wrongly detached, or not detached, or rebuilt from numbers?")


def check(name):
    """Return what is wrong with the function `name`, in words; "" if it is right."""
    verdict, called = "is not checked: its file cannot be imported", []
    try:
        with torch.random.fork_rng([]), torch.enable_grad():
            module = importlib.import_module(name.split(".")[0])
            verdict = "raises an error"
            owner, last = find(name)
            function = getattr(owner, last)
            with references_instead_of(EXERCISES.keys() - {name}):
                torch.manual_seed(0)
                for args in EXERCISES[name].cases(module):
                    called = [f"called with: {in_words(name, args)}"]
                    compare(name, function, args)
        return ""
    except Different as error:
        verdict, lines = "is not right yet", [str(error)]
    except BaseException as error:                         # exit() is no Exception
        if str(error).startswith("exercise: "):
            other = str(error).removeprefix("exercise: ")
            calls = "" if other == name else f"calls {other}, which "
            return f"{name} {calls}is not implemented yet"
        lines = [f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
                 for frame in traceback.extract_tb(error.__traceback__)
                 if Path(frame.filename).parent == ROOT][-3 if called else -1:]
        lines += "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    return "\n  ".join([f"{name} {verdict}", *called, *lines])


def check_alone(name, result, out):
    """Write check(name) to the file `result` and what the function prints to the file `out`, in a
    process of its own."""
    for fd in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND), fd)
    sys.stdout = sys.stderr = os.fdopen(1, "w", 1, encoding="utf-8")
    for file in ROOT.glob("*.py"):                         # a notebook may have read them before
        sys.modules.pop(file.stem, None)
    sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull     # ... or compiled them
    torch.set_num_threads(1)                               # a fork has no other threads
    result.write_text(check(name), "utf-8", "replace")


def verdict(name):
    """Check an exercise in another process. Returns what is wrong with it, in words, or "", and
    what it printed."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with TemporaryDirectory() as folder:
        result, out = Path(folder, "result"), Path(folder, "out")
        out.touch()
        process = context.Process(target=check_alone, args=(name, result, out))
        process.start()
        try:
            process.join(SECONDS)
            text = f"{name} ends the process (exit code {process.exitcode}) instead of returning"
            if process.is_alive():
                text = f"{name} takes more than {SECONDS} seconds: does a loop never end?"
            if result.exists():
                text = result.read_text("utf-8")
        finally:
            process.kill()
            process.join()
        with out.open(encoding="utf-8", errors="replace") as file:
            return text, file.read(2000)                   # an endless loop may have printed more


def report(names):
    """Check these exercises, or all if none is named, and print each result at once. Returns 0 if
    all are right, otherwise 1."""
    wrong = 0
    for name in names or EXERCISES:
        print(name, end=" ", flush=True)
        text, printed = verdict(name)
        wrong = 1 if text else wrong
        text = text.removeprefix(f"{name} ") or "is right"
        print(text if names else text.split("\n")[0])
        if names and printed:
            print("  It printed:", *printed.splitlines(), sep="\n  ")
    return wrong


# -------------------------------------------------------------------------------- removing bodies
def file_of(name):
    return f"{name.split('.')[0]}.py"


def find_body(text, name):
    """Return the syntax tree of the function `name` in the text of its file, and the number of
    lines before its body; the docstring is not part of the body."""
    node = ast.parse(text)
    for part in name.split(".")[1:]:
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node, node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1


def body_of(name, text):
    """Return the lines of the body of the function `name` in its file's text, or []."""
    with contextlib.suppress(SyntaxError, StopIteration):
        node, start = find_body(text, name)
        return text.splitlines()[start:node.end_lineno]
    return []


def git(*words):
    """Return what a git command prints in this folder."""
    if not shutil.which("git"):
        refuse("removing a body needs git, which can bring it back, but git is not installed")
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, encoding="utf-8")
    if done.returncode:
        refuse("removing a body needs a git repository, which can bring it back, but git says: "
               + " ".join(done.stderr.split()))
    return done.stdout


def remove(folder, name, message):
    """Remove the body of the function `name` from its file in `folder`, and return its line
    number. Its signature and docstring stay."""
    path = folder / file_of(name)
    text = path.read_text(encoding="utf-8")
    node, start = find_body(text, name)
    lines, indent = text.splitlines(), " " * node.body[0].col_offset
    lines[start:node.end_lineno] = [f'{indent}raise NotImplementedError("exercise: {message}")']
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return node.lineno


def refuse(message):
    """End the program with one line. (Not by InputError: students edit vit.py, so importing it may
    fail.)"""
    sys.exit(f"tests.exercise: error: {message}")


def remove_here(names):
    """Remove the bodies of these exercises from the working tree. Refuses if `git restore` could
    not bring one of them back."""
    for name in names:
        file = file_of(name)
        body = body_of(name, (ROOT / file).read_text(encoding="utf-8"))
        if not body or body != body_of(name, git("show", f":./{file}")):
            refuse(f"{name} is not as git has it (removed already?), so git could not restore it. "
                   f"git stash push {file} keeps your version of it, git restore {file} discards "
                   f"it")
    for name in names:
        item, line = EXERCISES[name], remove(ROOT, name, name)
        print(f"{file_of(name)}, line {line}: {name}: {item.task} ({item.section})")
    files = " ".join(sorted({file_of(name) for name in names}))
    print(f"Check it:     python -m tests.exercise --check {' '.join(names)}\n"
          f"Get it back:  git restore {files}\n"
          f"              (these are whole files; to keep what you wrote: git stash push {files})")


def handout(folder, names):
    """Copy the project's last commit into a new folder, without the bodies of these exercises, and
    add a page of tasks. Solutions that are not committed stay out. Of the tests, only those of
    results stay: the others also test how a function is written."""
    if not names:
        refuse("--handout needs the names of exercises: --handout FOLDER NAMES")
    git("ls-files", "--error-unmatch", "mae.py")           # the project's repository, not another
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        refuse(f"{folder} exists and is not empty")
    archive = folder / "all.tar"
    git("archive", "HEAD", "-o", str(archive.absolute()))
    shutil.unpack_archive(archive, folder)
    archive.unlink()
    for file in {*folder.glob("tests/unit/test_*.py")} - {folder / "tests/unit/test_golden.py"}:
        file.unlink()                                      # some also have solutions
    readme = folder / "README.md"
    text = readme.read_text("utf-8").replace("With these lines", "With a few lines")
    for picture in re.findall(r"(?s)<picture>.*?</picture>\n|<img [^>]*>\n", text):
        if "hero" in picture or "tour" in picture:         # they show solutions
            text = text.replace(picture, "")
    for picture in ("hero.svg", "tour.png", "tour_dark.png"):
        (folder / ".github" / picture).unlink(missing_ok=True)
    teach = "\n## Teach\nSee [TASKS.md](TASKS.md).\n"    # there is no git in this copy
    readme.write_text(re.sub(r"(?s)\n## Teach\n.*?(?=\n## |$)", teach, text), "utf-8")
    page = ["# Tasks", "The body of each function below has been removed. Its docstring (or its "
            "class's), the paper and the list at the end of the file (where paper and release "
            "differ) tell you what it must do. The checks compare your results with plain-loop "
            "references in `tests/lib/references.py`; try not to look at those. Ties, speed and "
            "errors for invalid arguments are not checked.",
            "Install: `pip install -r requirements.txt`. Until every function is written, "
            "`train.py` and `pytest` stop with an error that ends in `exercise: NAME`. The README "
            "describes the complete project.",
            f"All tasks: `python -m tests.exercise --check {' '.join(names)}`",
            "Once they are right, `python -m pytest` compares losses, predictions and gradients of "
            "all methods with the numbers of the released codes, however you wrote the functions. "
            "(This copy lacks the project's other tests, e.g. of speed and of comments.)"]
    for i, name in enumerate(names, 1):
        remove(folder, name, name)
        item = EXERCISES[name]
        page += [f"## {i}. `{name}`", f"In `{file_of(name)}`: {item.task} ({item.section}). Check "
                 f"it: `python -m tests.exercise --check {name}`"]
        if name in COPIES:
            remove(folder, COPIES[name], f"{COPIES[name]} (the same as {name})")
            page.append(f"`{COPIES[name]}` is the same function: copy yours there.")
    (folder / "TASKS.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    print(f"{folder}: {len(names)} of {len(EXERCISES)} exercises, described in TASKS.md. All other "
          f"functions are complete, and some are similar to the removed ones")


def main(argv=None):
    """Run the command line. Returns 0 if all checks pass, otherwise 1."""
    parser = argparse.ArgumentParser("python -m tests.exercise", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="exercises whose bodies are "
                        "removed from the files here (default: list all exercises)")
    parser.add_argument("--check", action="store_true", help="check these exercises (default: all)")
    parser.add_argument("--handout", type=Path, metavar="FOLDER", help="remove the bodies "
                        "only in a copy of the project, in the new folder FOLDER")
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in EXERCISES:
            refuse(f"{name} is not an exercise: python -m tests.exercise lists all")
    names = [name for name in EXERCISES if name in args.names]
    if args.check:
        return report(names)
    if args.handout:
        handout(args.handout, names)
    elif names:
        remove_here(names)
    else:
        print(__doc__.split("\n\n")[1], end="\n\n")
        for name, item in EXERCISES.items():
            print(f"{name:32} {item.task} ({item.section})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
