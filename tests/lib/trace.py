"""Run code and record what each of its lines made: the tensors on the pages of tour.py, and those
that test_tour.py compares with the shapes in comments."""

import ast
import re
import sys
import tokenize
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch


@lru_cache
def statements(path):
    """Return {line: the statement in it} for the functions of a file. The statement of a loop or a
    condition is its header. Each has path, node (ast), function, definition (the function's node),
    first and last line, code (of its header), and comments {line: text}; `above` has the comments
    on lines before it.
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
            last=last, code=ast.unparse(node).split("\n")[0], comments=own,
            above={i: comments[i] for i in range(start, lines[0])},
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
    `parts` {line: value}, `names` (the variables after it, {name: value}) and `calls` (the calls
    inside it)."""
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
            except Exception:                              # e.g. before the first run of a loop
                return None

        def follow(frame, event, arg):
            now = call.step and call.step.statement
            statement = table.get(frame.f_lineno, now) if event == "line" else now
            if now and (event == "return" or statement is not now):
                call.step.values = [value_of(x, frame) for x in now.targets] or [arg]
                call.step.made = [tensors(value) for value in call.step.values]
                call.step.names = dict(frame.f_locals)
                call.steps.append(call.step)
            if statement is not now:
                parts = {i: value_of(x, frame) for i, x in statement.parts.items()}
                call.step = SimpleNamespace(statement=statement, parts=parts, calls=[])
            if event == "return":
                running.pop()
                if not call.steps:                         # only a docstring
                    running[-1].step.calls.remove(call)
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
