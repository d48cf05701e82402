"""The README: its Python runs, its links lead somewhere, its commands can run in their order."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torchvision import datasets

import finetune
import train
import vit
from tests.conftest import DECODER, ROOT, write_pictures

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


def test_the_first_page_shows_what_is_there():
    """The training step is mae.py's, and the numbers of lines are about those of the files. The
    page stays short."""
    (step,) = re.findall(r"```py\n(.*?)```", TEXT, re.DOTALL)
    code = [line.split("  #")[0].strip() for line in step.splitlines()]
    forward = inspect.getsource(train.MAE.forward)
    assert len(code) == 5 and all(line in forward for line in code)
    lines = re.findall(r"\| `(\w+\.py)` \| (\d+) \|", TEXT)
    assert {file for file, _ in lines} == {f"{name}.py" for name in OWN}
    assert len(TEXT.splitlines()) <= 200 and len(TEXT) <= 14_000
    for file, n in lines:
        assert int(n) == pytest.approx(len((ROOT / file).read_text().splitlines()), rel=0.1)


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


def test_commands_and_links(monkeypatch):
    scripts, flags, runs = {"train": train, "finetune": finetune}, {"--out"}, set()
    for script in scripts.values():                        # they only parse
        monkeypatch.setattr(script, "run_cli", lambda parser, work, argv: (
            flags.update(parser._option_string_actions), parser.parse_args(argv))[1])
    shell = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
    for script, words in re.findall(r"(\w+)\.py(.*?)(?:  #.*)?\n", shell):
        assert {*re.findall(r"runs/(\w+)/last.pt", words)} <= runs         # made further up
        args = scripts[script].main(words.split())
        if script == "train" and not args.eval:            # no run twice
            runs.add(args.name or f"{args.method}_{(args.data or 'shapes').split('/')[-1]}")
    assert len(runs) == len(re.findall(r"train\.py", shell)) - len(re.findall("--eval ", shell))
    assert {*re.findall(r"--[\w-]+", " ".join(re.findall(r"`(--[^`]*)`", TEXT)))} <= flags
    titles = {t.lower().replace(" ", "-") for t in re.findall(r"^## (.*)", TEXT, re.MULTILINE)}
    links = {*re.findall(r"\(#(.*?)\)", TEXT)}
    assert {"read", "run", "compare", "teach", "fork"} <= links <= titles
    files = re.findall(r'src="(.*?)"|`(\S+\.py)`|\((tests/[^)#]+)', TEXT)
    assert all((ROOT / (a or b or c)).is_file() for a, b, c in files)


def test_the_papers_tables_as_flags(monkeypatch):
    """Each row of flags, with each of its numbers, is parsed with the command above it, and its
    model is built, without data and without initialising weights."""
    sides, built = {"cifar10": 32, "cifar100": 32, "/data/tiny-imagenet": 64}, []
    for name in ("kaiming_uniform_", "xavier_uniform_", "uniform_", "normal_", "trunc_normal_"):
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **options: tensor)

    def open_data(name, img_size, args):
        images = torch.zeros(4, 3, 1, 1, dtype=torch.uint8)
        split = train.ImageDataset(images, [0, 0, 1, 1], ["a", "b"])
        return split, split, vit.pair(img_size or sides.get(name, 224))

    def fit(args, *_, config, **__):
        built.append({"config": config, "flags": {"data": args.data}, "model": {}})

    for script in (train, finetune):
        monkeypatch.setattr(script, "open_data", open_data)
        monkeypatch.setattr(script, "fit", fit)
    monkeypatch.setattr(train, "compare", lambda args: built.append(built[-1]))
    monkeypatch.setattr(train, "read_checkpoint", lambda *_: {"config": {}})
    monkeypatch.setattr(train, "teacher_of", lambda *_: (vit.SIZES["tiny"], None))
    monkeypatch.setattr(torch.nn.ModuleDict, "load_state_dict", lambda *_: None)     # the teacher's
    monkeypatch.setattr(finetune, "read_checkpoint", lambda *_: built[-1])
    monkeypatch.setattr(finetune, "initialize", lambda *_: [])

    text = (ROOT / "tests/FLAGS.md").read_text(encoding="utf-8").replace("\n", " ")
    papers = re.findall(r"## (\S+) (.*?)(?=## |$)", text)
    assert [paper for paper, _ in papers] == ["MAE", "CrossMAE", "HyperMAE", "MINR", "i-MAE"]
    for paper, text in papers:
        commands, n = {}, len(built)                       # the last one of each script
        rows = []
        for italic, row, numbers in re.findall(
                r"(\*?)`((?:(?:train|finetune)\.py )?--.*?)`\*?(?: \(([\d., ]+)\))?", text):
            rows.append((italic, row))
            rows += [(italic, re.sub(r"[\d.]+$", x, row)) for x in numbers.split(", ") if numbers]
        for italic, row in rows:
            script = "finetune.py" if italic else "train.py"
            if row.startswith("--eval"):
                row = f"train.py {row}"
            elif row.startswith(script):
                commands[script] = row
            else:
                row = f"{commands[script]} {row}"
            {"train.py": train, "finetune.py": finetune}[script].main(row.split()[1:])
        assert len(built) - n == len(rows) > 8, f"{paper}: not every row has a model"
