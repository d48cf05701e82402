"""The README: its Python runs, its links lead somewhere, its commands can run in their order."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torchvision import datasets

import finetune
import train
import vit
from tests.conftest import DECODER, ROOT, parsed, write_pictures

OWN = "vit mae crossmae hypermae minr imae train finetune".split()       # not a fork's files
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "tests/REFERENCE.md").read_text(encoding="utf-8")
MODELS, CLASSIFIER, LOOP, INTER_BLOCK, SIMMIM, TIMM = re.findall(
    r"```python\n(.*?)```", REFERENCE, re.DOTALL)


def test_python(pretrain, folder, monkeypatch):
    """Each piece of Python runs, and both scripts read what the loop has saved."""
    pretrain("--epochs", "0", name="mae_shapes")
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, transform, download: datasets.FakeData(
        64, (3, 32, 32), transform=transform))
    names = {"vit": vit}
    exec(LOOP, names)
    exec(MODELS, names)
    words = ["--data", str(folder), "--epochs", "0"]
    assert train.read_checkpoint("own.pt")["flags"] == {"data": "cifar10"}  # used by default
    rows = train.main(["--eval", "own.pt", *words[:2], "--mask_ratios", "0.75"])
    assert len(rows) == 1 and rows[0]["psnr_masked"] > 5
    finetune.main(["--checkpoint", "own.pt", *words, "--name", "mae_shapes_finetune"])
    write_pictures(Path("photos"), "x", 1, side=50)
    Path("photos/x/0.png").rename("photo.jpg")
    exec(CLASSIFIER, names)
    assert names["name"] in ("a", "b") and names["photo"].shape == (3, 32, 32)


def test_forks(pretrain, monkeypatch):
    """The commands train and evaluate both examples. The first has MAE's flags, and mixes the maps
    by its weights. A method may have flags and metrics of its own, and a bool mask."""
    names = {"__name__": "interblock", "vit": vit}
    exec(INTER_BLOCK, names)
    exec(SIMMIM, names)

    class SimMIM(train.MAE):
        low_res_recipe, low_res_config = {}, {}

        def __init__(self, *, mask_ratio=0.5, own_flag=1, **sizes):
            super().__init__(**sizes, mask_ratio=mask_ratio, decoder_dim=16, decoder_heads=2)
            self.head = torch.nn.Linear(16, 48)

        def forward(self, *inputs):
            loss, metrics = names["forward"](self, *inputs)
            return loss, {**metrics, "twice": 2 * loss.detach()}

        def reconstruct(self, *inputs):
            decoded, mask = super().reconstruct(*inputs)
            return decoded, mask.bool()
    cls = names["InterBlockMAE"]
    monkeypatch.setitem(train.METHODS, "simmim", SimMIM)
    monkeypatch.setitem(train.METHODS, "interblock", cls)
    for name, own in (("simmim", ["--own_flag", "2"]), ("interblock", DECODER)):
        assert pretrain("--method", name, name=name, own=own)["history"][-1]["loss"] > 0
        assert train.main(["--eval", f"runs/{name}", "--mask_ratios", "0.75"])
    run = train.read_checkpoint("runs/simmim")
    row = run["history"][-1]
    assert run["config"]["own_flag"] == 2 and row["twice"] == pytest.approx(2 * row["loss"])
    assert train.method_arguments(cls) == train.method_arguments(train.MAE)
    model, images = cls(16, 4, dim=16, depth=2, heads=2), torch.randn(2, 3, 16, 16)
    ids = torch.tensor([[3, 1], [0, 2]])                               # (B, K)
    maps = model.encoder.feature_maps(model.encoder.embed(images, ids))
    mix = sum(w * f for w, f in zip(model.map_weights, maps))
    assert torch.allclose(model.encode(images, ids), model.encoder.norm(mix), atol=1e-6)


def test_a_method_needs_only_its_file_and_vit():
    """A method imports only vit.py from this project; vit.py imports nothing from it."""
    own = {*OWN, "tests"}
    for name in OWN[:6]:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {module.name for module in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
        assert {module.split(".")[0] for module in imported} & own <= {"vit"}, name


def test_timm(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(TIMM, names)
    x, model, other = torch.randn(2, 3, 224, 224), names["model"], names["vit"]
    assert (other.forward_features(x) - model.encoder(x)).abs().max() < 1e-5
    assert train.read_checkpoint("mae_vit_base.pth")["config"]["depth"] == 12


def test_commands_and_links():
    """Commands parse and use only runs that earlier ones have made. Links lead somewhere."""
    runs, shell = set(), "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL))
    for script, words in re.findall(r"(\w+\.py)(.*?)(?:  #.*)?\n", shell.replace("\\\n", "")):
        assert {*re.findall(r"runs/(\w+)/last.pt", words)} <= runs
        args = parsed(script, words.split())
        if script == "train.py" and not args.eval:
            name = args.name or f"{args.method}_{Path(args.data or 'shapes').stem}"
            assert name not in runs, f"two runs are called {name}"
            runs.add(name)
    titles = {t.lower().replace(" ", "-") for t in re.findall(r"^## (.*)", TEXT, re.MULTILINE)}
    assert {*re.findall(r"\(#(.*?)\)", TEXT)} <= titles
    files = re.findall(r'src="(.*?)"|`(\S+\.py)`|\((tests/[^)#]+)', TEXT)
    assert runs and all((ROOT / (a or b or c)).is_file() for a, b, c in files)


def test_the_papers_tables_as_flags():
    """Each row of flags, with each of its numbers, is parsed with the command above it."""
    text, count = (ROOT / "tests/FLAGS.md").read_text(encoding="utf-8").replace("\n", " "), 0
    commands = {}                                          # the last one of each script
    for italic, row, numbers in re.findall(
            r"(\*?)`((?:(?:train|finetune)\.py )?--.*?)`\*?(?: \(([\d., ]+)\))?", text):
        script = "finetune.py" if italic else "train.py"
        if row.startswith(script):
            commands[script] = row
        elif not row.startswith("--eval"):
            row = f"{commands[script]} {row}"
        for row in [row, *(re.sub(r"[\d.]+$", x, row) for x in numbers.split(", ") if x)]:
            parsed(script, row.removeprefix(script).split())
            count += 1
    assert count > 100
