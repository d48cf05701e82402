"""The pages: their Python runs, links lead somewhere, commands can run in their order."""

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import finetune
import train
from tests import bench, evaluate
from tests.unit.conftest import DECODER, FIVE, ROOT, parsed, write_pictures
from vit import normalize

PAGES = [ROOT / "README.md", *sorted((ROOT / "tests").glob("**/*.md"))]


def python(page):
    """Return the pieces of Python of a page."""
    text = (ROOT / "tests/docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_python(pretrain, folder, monkeypatch):
    """REFERENCE.md's pieces of Python run in their order: features of a folder, a model's methods,
    a file that both scripts read, a photo's class name, a notebook's cell."""
    pretrain("--epochs", "0", name="mae_shapes")
    shown = SimpleNamespace(Image=lambda file: Path(file).read_bytes())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=shown))
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    words = ["--data", str(folder), "--epochs", "0"]
    finetune.main(["--checkpoint", "runs/mae_shapes", *words, "--name", "mae_shapes_finetune"])
    write_pictures(Path("photos"), "ab", 2, side=50)
    shutil.copy("photos/a/0.png", "photo.jpg")
    Path("tests").symlink_to(ROOT / "tests")
    names = {}
    for piece in python("REFERENCE.md"):
        if "import timm" not in piece:                     # test_timm
            exec(piece, names)
    model = train.load_model("tests/models/tiny.pt")
    photo = train.center_crop(train.read_image("photo.jpg"), (32, 32))[None]
    tokens = model.encoder(normalize(photo, model))        # (1, 1+64, 192)
    assert [str(x) for x in names["files"]] == [f"photos/{x}.png" for x in ("a/0", "a/1", "b/0", "b/1")]
    assert torch.allclose(names["features"][0], tokens[0, 1:].mean(0), atol=1e-5)
    sums = names["attention"].sum(3)
    assert sums.shape == (8, 2, 65) and torch.allclose(sums, torch.ones(()))
    assert names["grids"][-1].shape == (8, 64, 8, 8) and names["mask"].shape == (8, 64)
    assert names["scores"]["epoch"] == 1 and names["scores"]["psnr_masked"] > 5
    assert names["name"] in ("a", "b") and names["photo"].shape == (3, 16, 16)
    rows = evaluate.main(["own.pt", *words[:2], "--mask_ratios", "0.75"])
    assert len(rows) == 1 and rows[0]["psnr_masked"] > 3
    finetune.main(["--checkpoint", "own.pt", *words])


def test_forks(pretrain, monkeypatch):
    """FORKS.md's methods train and are measured, even without pixels. The first one mixes feature
    maps by its weights."""
    names, data = {"__name__": "fork"}, None
    write_pictures(Path("photos"), "ab", 2, side=50)
    for piece in python("FORKS.md"):
        known = {*names}
        exec(piece, names)
        cls = [x for key, x in names.items() if key not in known and key.endswith("MAE")
               and key != "MAE"]
        if not cls:                                        # it has written a file of images
            data = ["--data", "nir.pt", "--patch_size", "8"]
            continue
        monkeypatch.setitem(train.METHODS, "fork", cls[0])
        run = pretrain("--method", "fork", *(data or []), "--overwrite", name="fork", own=DECODER)
        assert run["history"][-1]["loss"] > 0
        # only settings that its constructor takes are listed
        assert ("norm_pix_loss" in run["flags"]["origin"]) == ("norm_pix_loss" in run["config"])
        if not data:                                       # bench reads no images
            bench.main("--method fork --steps 1 --warmup 0 --batch_size 2".split())
        if cls[0].reconstruct:
            assert evaluate.main(["runs/fork", "--mask_ratios", "0.75"])
    assert torch.load("grey.pt")["train"].shape[1:] == (1, 32, 32)
    model = names["InterBlockMAE"](16, 4, dim=16, depth=2, heads=2)
    images, ids = torch.randn(2, 3, 16, 16), torch.tensor([[3, 1], [0, 2]])        # ids: (B, K)
    maps = model.encoder.feature_maps(model.encoder.embed(images, ids))
    mix = sum(w * f for w, f in zip(model.map_weights, maps))
    assert torch.allclose(model.encode(images, ids), model.encoder.norm(mix), atol=1e-6)


def test_a_method_needs_only_its_file_and_vit():
    """A method imports only vit.py from this project; vit.py imports nothing from it."""
    for name in ("vit", *FIVE):
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        imported = {*re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
        assert imported & {"vit", *FIVE, "train", "finetune", "tests"} <= {"vit"} - {name}, name


def test_timm(tmp_path, monkeypatch):
    """REFERENCE.md's Python gives timm's ViT our weights."""
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    Path("tests").symlink_to(ROOT / "tests")
    names, (piece,) = {}, [x for x in python("REFERENCE.md") if "import timm" in x]
    exec(piece, names)
    x, model, other = torch.randn(2, 3, 32, 32), names["model"], names["vit"]
    assert (other.forward_features(x) - model.encoder(x)).abs().max() < 1e-5
    assert train.read_checkpoint("mae_vit_tiny.pth")["config"]["depth"] == 12


def commands(page):
    """Return [script, word, ...] of each command of train.py or finetune.py on a page."""
    text = page.read_text(encoding="utf-8")
    shell = "".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)).replace("\\\n", "")
    found = re.findall(r"(?:^|[ /])((?:train|finetune)\.py(?: --.*?)?)(?:  #|$)", shell, re.M)
    return [command.split() for command in found]


def test_commands_of_the_readme():
    """Commands use only runs that earlier ones have made."""
    runs = set()
    for script, *words in commands(ROOT / "README.md"):
        assert {*re.findall(r"runs/(\w+)/last.pt", " ".join(words))} <= runs
        args = parsed(script, words)
        if script == "train.py":
            name = args.name or f"{args.method}_{train.name_of(args.data or 'shapes')}"
            assert name not in runs, f"two runs are called {name}"
            runs.add(name)
    assert runs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands(page, monkeypatch):
    """Commands of both scripts parse, also with a method of one's own; programs are there."""
    monkeypatch.setitem(train.METHODS, "yours", train.MAE)
    for script, *words in commands(page):
        parsed(script, words)
    for program in re.findall(r"python -m (tests\.\w+)", page.read_text(encoding="utf-8")):
        assert find_spec(program), program


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page):
    """The links of each page lead to files, and to headings that are there."""
    text = page.read_text(encoding="utf-8")
    for link, heading in re.findall(r"""(?:\]\(|src(?:set)?=")((?!http)[^)"#]*)(#[^)"]*)?""", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            words = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert heading[1:] in words, link + heading


def test_the_papers_tables_as_flags():
    """Each row of flags, with each of its numbers, is parsed with the command above it."""
    text, count = (ROOT / "tests/docs/FLAGS.md").read_text(encoding="utf-8"), 0
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for line in filter(None, block.replace("\\\n    ", "").splitlines()):
            if line.startswith(("train.py ", "finetune.py ")):
                command = line
                continue
            row, numbers = re.fullmatch(                   # table, flags, (numbers), # comment
                r".{14}(--?[^(#]*[^(# ])(?: \(([\d., ]+)\))?(?: +# .*)?", line).groups()
            row = row if row.startswith("-m tests.evaluate") else f"{command} {row}"
            more = [re.sub(r"[\d.]+$", x, row) for x in (numbers or "").split(", ") if x]
            for script, *words in map(str.split, [row, *more]):
                parsed(script, words)
                count += 1
    assert count > 150
