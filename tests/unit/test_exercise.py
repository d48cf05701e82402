"""The exercises: a check accepts right solutions however they are written, and says what is wrong
with others. Removed bodies come back. A handout leaves out this file, which has solutions."""

import inspect
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map

from tests import exercise
from tests.exercise import EXERCISES, ROOT, check, find, main
from tests.unit.conftest import ended, fork

SOLUTIONS = {  # name: a right body, [(text in it, other text, part of the message or "" if right)]
    "vit.patchify": ("""
p, q = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
h, w = images.shape[2] // p, images.shape[3] // q
squares = [images[:, :, p * i:p * i + p, q * j:q * j + q] for i in range(h) for j in range(w)]
return torch.stack([x.permute(0, 2, 3, 1).flatten(1) for x in squares], dim=1)""", [
        ("dim=1", "dim=0", "expected shape (2, 6, 12), yours (6, 2, 12)"),
        ("squares =", "images.add_(1)\nsquares =", "its argument images in place"),
        ("squares =", "images = images.double()\nsquares =", "yours torch.float64")]),
    "vit.masking": ("""
order = noise.argsort(dim=1)
mask = (order.argsort(dim=1) >= K).float()
return order[:, :K], order[:, K:], mask""", [
        ("order[:, :K], order[:, K:], mask", "[order[:, :K], order[:, K:], mask]", ""),
        ("noise.argsort(dim=1)", "noise.topk(len(noise[0]), largest=False).indices", "")]),
    "hypermae.fourier_features": ("""
f = [sigma ** (k / (dim // 2 - 1)) for k in range(dim // 2)]
f = torch.tensor(f).double()
phases = torch.cat([coords[..., :1].double() * f, coords[..., 1:].double() * f], dim=-1)
phases = math.pi * phases
return torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)""", [
        ("math.pi * phases", "(math.pi * phases).to(coords.dtype)", "0, feature 2: expected"),
        ("[torch.cos", "[-torch.cos", "0, feature 0: expected"), (".double()", ".float()", "")]),
    "mae.MAE.add_mask_tokens": ("""
ids = torch.cat([torch.zeros(len(latent), 1).long(), ids_keep + 1, ids_mask + 1], dim=1)
masked = self.mask_token.repeat(len(latent), ids_mask.shape[1], 1)
pos = torch.stack([self.decoder_pos_embed[0][i] for i in ids])
return torch.cat([self.decoder_embed(latent), masked], dim=1) + pos""", [
        ("self.decoder_embed(latent)", "self.decoder_embed(latent).detach()",
         "gradient of decoder_embed"),
        ("self.decoder_embed(latent)", "self.decoder_embed(latent.detach())", "argument latent")]),
    "mae.MAE.forward": ("""
L = self.encoder.num_patches
noise = torch.rand(len(images), L) if noise is None else noise
ids_keep, ids_mask, mask = self.encoder.mask(images, noise, self.mask_ratio)
ids = torch.cat([ids_keep, ids_mask], dim=1)
pred = self.decode(self.encode(images, ids_keep), ids_keep, ids_mask, visible_too=True)
target = gather_patches(patchify(images, self.encoder.patch_size), ids)
if self.norm_pix_loss:
    target = normalize_patches(target)[0]
error = ((pred - target) ** 2).mean(dim=2)
loss = (error * mask.gather(1, ids)).sum() / mask.sum()
return loss, {"loss": loss.detach()}""", [
        ("torch.rand(len(images), L)", "torch.arange(L).expand(len(images), L)", "the same mask"),
        ("L = self.", "torch.set_grad_enabled(False)\nL = self.", "has a gradient: expected True"),
        ('{"loss": loss.detach()}', '{"loss": loss.item()}', ""),
        ("return loss, {", "return {", "expected shape [number, {loss: number}]")]),
    "finetune.layer_decay_groups": ("""
depth, groups = len(model.encoder.blocks), []
for name, p in model.named_parameters():
    if p.requires_grad:
        i = depth + 1
        if name.startswith("encoder.blocks."):
            i = 1 + int(name.split(".")[2])
        elif name.startswith("encoder.") and "norm" not in name:
            i = 0
        decays = name.endswith("weight") and p.ndim > 1
        groups.append(dict(params=[p], weight_decay=weight_decay if decays else 0,
                           lr_factor=layer_decay ** (depth + 1 - i)))
return groups""", [
        ('"norm" not in name', '"norm" not in name and "ex" not in name', "extra_tokens lr_factor"),
        ("if p.requires_grad:", "if True:", "weight, encoder.blocks.0.attn.qkv.bias and 25 more"),
        ("if p.requires_grad:", 'if p.requires_grad and "cls" not in name:', "missing: encoder"),
        ("return groups", "return groups + groups[:1]", "is in two groups"),
        ("lr_factor=", "scale=", "KeyError: 'lr_factor'"),
        ("params=[p]", "params=[p.data]", "not a parameter of the model"),
        ("params=[p]", "params=p", ""),
        ("return groups", "return tuple(groups[::-1])", "")]),
}


def solve(monkeypatch, name, body):
    """Give the function `name` this body, which can use math and what its module has imported."""
    owner, last = find(name)
    head = f"def {last}{inspect.signature(getattr(owner, last))}:"
    known = {**vars(sys.modules[name.split(".")[0]]), "math": math}
    made = {}
    exec(head + body.replace("\n", "\n    "), known, made)
    monkeypatch.setattr(owner, last, made[last])


@pytest.mark.parametrize("name", SOLUTIONS)
def test_right_and_wrong_solutions(name, monkeypatch):
    body, changes = SOLUTIONS[name]
    for old, new, message in [("", "", ""), *changes]:
        assert old in body, old
        solve(monkeypatch, name, body.replace(old, new))
        text = check(name)
        assert message in text and bool(message) == bool(text), (new, message, text)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_hint_names_each_slip(name, monkeypatch):
    item, (owner, last) = EXERCISES[name], find(name)
    assert len(item.slips) >= 3
    for slip, hint in item.slips.items():
        monkeypatch.setattr(owner, last, lambda *args, **more: item.reference(
            *args, **more, slip=slip))
        assert hint in check(name), slip


@pytest.mark.parametrize("name", EXERCISES)
def test_nan_is_not_right(name, monkeypatch):
    """No reference has a NaN that would excuse one."""
    item, (owner, last) = EXERCISES[name], find(name)

    def spoil(x):
        is_index = torch.is_tensor(x) and not x.is_floating_point()
        return x if is_index or isinstance(x, torch.nn.Parameter) else x * math.nan
    monkeypatch.setattr(owner, last, lambda *args, **more: tree_map(
        spoil, item.reference(*args, **more)))
    assert ": expected" in check(name), name


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Enter a copy of this project's sources, all committed, and return git(words). Checks read
    this copy."""
    if not shutil.which("git"):
        pytest.skip("git is missing")
    for file in (*ROOT.glob("*.py"), ROOT / "README.md"):
        shutil.copy(file, tmp_path)
    unneeded = shutil.ignore_patterns("__pycache__", "models", "logs")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=unneeded)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c",
                        "core.autocrlf=false", *words], cwd=tmp_path, check=True,
                       capture_output=True)
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return git


def write(folder, name, body):
    """Write a body into the file of its function, and of the copy of this function."""
    for place in [name, *filter(None, [exercise.COPIES.get(name)])]:
        path = folder / exercise.file_of(place)
        text = path.read_text(encoding="utf-8")
        node, start = exercise.find_body(text, place)
        lines, indent = text.splitlines(), " " * node.body[0].col_offset
        lines[start:node.end_lineno] = [indent + line for line in body.strip().splitlines()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_a_body_is_removed_and_comes_back(repository, tmp_path, refused, capsys):
    """Nothing is removed that `git restore` could not bring back. Errors are exceptions with one
    line, the one of git itself where it has one."""
    path, before = tmp_path / "mae.py", (tmp_path / "mae.py").read_bytes()

    assert main(["mae.MAE.forward", "vit.Attention.forward"]) == 0
    assert "git restore mae.py vit.py" in capsys.readouterr().out
    after = path.read_text(encoding="utf-8")
    start = after.index("; metrics is", after.index("def forward"))
    assert after[start:].splitlines()[1:3] == [
        '        raise NotImplementedError("exercise: mae.MAE.forward")', ""]
    refused(main, ["mae.MAE.forward"], "mae.MAE.forward is not as git has it (removed",
            "git restore mae.py")
    assert main(["--check"]) == 1                          # the others can still be checked
    said = capsys.readouterr().out.splitlines()
    missing = ("mae.MAE.forward", "vit.Attention.forward")
    assert said == [f"{name} is {'not implemented yet' if name in missing else 'right'}"
                    for name in EXERCISES]

    taken = 'raise NotImplementedError("exercise: mae.MAE.forward")'
    path.write_text(after.replace(taken, f"x = 1\n        {taken}"), encoding="utf-8")
    refused(main, ["mae.MAE.forward"], "git stash push mae.py keeps your version")
    assert main(["mae.MAE.add_mask_tokens"]) == 0          # git can restore this one
    assert "x = 1\n" in path.read_text(encoding="utf-8")
    repository("restore", "mae.py", "vit.py")
    assert path.read_bytes() == before
    refused(main, ["mae.forward"], "mae.forward is not an exercise")
    shutil.rmtree(tmp_path / ".git")
    refused(main, ["vit.patchify"], "needs a git repository", "git says: fatal: not a git reposit")
    assert path.read_bytes() == before


def test_whatever_the_file_does(repository, tmp_path, capsys, monkeypatch):
    """It is right, or wrong with a sentence. What is checked is the file as it is now, also if this
    process has imported it (in a notebook) or has just checked it."""
    right, name = SOLUTIONS["vit.masking"][0], "vit.masking"
    original = (tmp_path / "vit.py").read_text(encoding="utf-8")
    for body, part in (
            (right, "vit.masking is right\n"), ("exit()", "raises an error\n"),
            (right.replace("noise.arg", "(-noise).arg"), "Hint: the patches with the highest"),
            ("import os; os._exit(0)", "ends the process (exit code 0)"),
            ("return masking(noise, K)", "RecursionError"),
            ("return noise +", "cannot be imported"),
            ("while True: pass", "takes more than 0.2 seconds"),
            (f"print('K is 9')\n{right}", "is right\n  It printed:\n  K is 9\n")):
        monkeypatch.setattr(exercise, "SECONDS", 0.2 if "while" in body else 60)
        write(tmp_path, name, body)
        code, said = main(["--check", name]), capsys.readouterr().out
        assert said.startswith(name) and part in said, said
        assert code == (0 if right in body else 1)
        (tmp_path / "vit.py").write_text(original, encoding="utf-8")


def program(folder, name, *words):
    """Do what `python -m name ...` does in a folder, with its files."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = [name, *words]
    for key, module in [*sys.modules.items()]:             # torch stays: to import it takes seconds
        file = Path(getattr(module, "__file__", None) or "")
        if file.parent == ROOT or ROOT / "tests" in file.parents:
            del sys.modules[key]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def test_handout(repository, tmp_path):
    """A copy has no solution: neither in a body, nor in a file or change that is not committed.
    With right solutions, written differently, the commands in TASKS.md pass."""
    (tmp_path / "solutions.py").write_text("mine")
    folder = tmp_path / "class"
    assert main(["--handout", str(folder), *SOLUTIONS]) == 0
    assert not (folder / "solutions.py").exists()
    assert [file.name for file in folder.glob("tests/unit/test_*.py")] == ["test_golden.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    for solution in ("phase.cos()", "noise.argsort", "the large encoder sees"):
        assert solution not in text
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert not [name for name in ("hero.svg", "tour.png", "git restore") if name in readme]
    assert not [*folder.glob(".github/hero*"), *folder.glob(".github/tour*")]    # show a solution
    assert "(TASKS.md)" in readme and "\n## Quickstart" in readme and "\n## Fork" in readme
    page = (folder / "TASKS.md").read_text(encoding="utf-8")
    assert all(f"--check {name}`" in page for name in SOLUTIONS)
    for name, (body, _) in SOLUTIONS.items():
        write(folder, name, body)
    for tool in ("tests.exercise", "pytest"):
        words = re.search(rf"`python -m ({tool}.*?)`", page)[1].split()
        code, _ = ended(fork(program, folder, *words))
        assert code == 0, Path("out").read_text()


def test_grading(tmp_path):
    """TEACH.md's loop grades hand-ins, whatever else they contain or print. Endless loops end."""
    text = (ROOT / "tests/docs/TEACH.md").read_text(encoding="utf-8")
    loop, = re.findall(r"```bash\n(for .*?)```", text, re.DOTALL)
    course, desk = tmp_path / "course", tmp_path / "project"
    without = shutil.ignore_patterns("unit", "models")
    shutil.copytree(ROOT / "tests", course / "tests", ignore=without)
    for file in ROOT.glob("*.py"):
        shutil.copy(file, course)
    exercise = course / "tests/exercise.py"
    exercise.write_text(exercise.read_text("utf-8").replace("SECONDS = 30", "SECONDS = 2"), "utf-8")
    hand_in, vit = tmp_path / "hand_ins/ada", (ROOT / "vit.py").read_text("utf-8")
    (hand_in / "tests").mkdir(parents=True)
    (hand_in / "tests/exercise.py").write_text("print('is right')")
    order = "    order = noise.argsort(dim=1, stable=True)"
    endless = "    print('vit.masking is right')\n    while True:\n        pass\n"
    (hand_in / "vit.py").write_text(vit.replace(order, endless + order))
    shutil.copy(ROOT / "mae.py", hand_in)
    desk.mkdir()
    python = desk / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{desk}{os.pathsep}{os.environ['PATH']}"
    said = subprocess.run(["bash", "-c", loop], cwd=desk, env={**os.environ, "PATH": path},
                          capture_output=True, text=True, check=True).stdout
    assert said == "ada: 1 of 2 are right\n"
    grade = (hand_in / "grade.txt").read_text()
    assert "2 seconds" in grade and "  vit.masking is right" in grade
