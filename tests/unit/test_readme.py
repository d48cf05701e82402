"""The pages: their Python runs, links lead somewhere, commands can run in their order."""

import re
import shutil
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import finetune
import train
from tests import bench, evaluate
from tests.lib.models import load_encoder, load_model, to_released
from tests.unit.conftest import (DECODER, FIVE, ROOT, parsed, same, stopping_after_two,
                                 write_pictures)
from vit import patchify

PAGES = [ROOT / "README.md", *sorted((ROOT / "tests").glob("**/*.md"))]


def python(page):
    """Return the pieces of Python of a page."""
    text = (ROOT / "tests/docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with the data, runs and files that HOWTO.md names, all of them small."""
    root = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        few_shapes(patch)
        train.main("--epochs 1 --batch_size 20 --workers 0")
        finetune.main("--checkpoint runs/mae_shapes --epochs 0 --workers 0")
        write_pictures(Path("photos"), "ab", 20, side=32)
        for part, n in (("train", 9), ("val", 3)):
            write_pictures(Path("LABELS", part), "abc", n, side=32)
        for copy in ("photo.jpg", "mask.png"):
            shutil.copy("photos/a/0.png", copy)
        files = sorted(Path("photos").rglob("*.png"))
        Path("labels.csv").write_text("".join(f"{file},{file.parent.name}\n" for file in files))
        Path("numbers.csv").write_text("".join(f"{x},{i}\n" for i, x in enumerate(files)))
        Path("arrays").mkdir()
        images = np.random.default_rng(0).integers(0, 256, (40, 28, 28), "uint8")
        for i, image in enumerate(images):
            np.save(f"arrays/{i}.npy", np.stack([16 * image.astype("uint16")] * 12))
        made_up("audio", (64, 256), lambda x: x[:, :32])           # loud in low or high frequencies
        made_up("series", (6, 40), lambda x: x[:, :3])             # in one half of the channels
        made_up("volumes", (16, 32, 32), lambda x: x[:, :, :16])   # in the upper half
        labels = np.arange(40)[:, None] % 2
        np.savez("medmnist.npz", train_images=images, train_labels=labels, val_images=images[:9],
                 val_labels=labels[:9])
        Path("tests").symlink_to(ROOT / "tests")
    return root


def made_up(name, shape, half):
    """Write NAME.npz with 48 + 32 arrays of noise, of two classes: in one, `half` is louder."""
    rng, parts = np.random.default_rng(0), {}
    for part, n in (("train", 48), ("val", 32)):
        x, labels = rng.normal(size=(n, *shape)), np.arange(n) % 2
        half(x)[labels == 0] += 1
        parts.update({f"{part}_x": x, f"{part}_y": labels})
    np.savez(f"{name}.npz", **parts)


def few_shapes(patch):
    """Let --data shapes be 100 + 10 images instead of 10,000 + 1,000."""
    draw = train.draw_shapes
    patch.setattr(train, "draw_shapes",
                  lambda n, size, seed: draw(n // 100 if n >= 1000 else n, size, seed))


@pytest.mark.parametrize("piece", python("HOWTO.md"))
def test_howto(desk, monkeypatch, capsys, piece):
    """Each answer runs as it stands, for one epoch, and prints the numbers in its comments. Other
    data than photos train for five, after which the classifier is better than chance."""
    monkeypatch.chdir(desk)
    few_shapes(monkeypatch)
    shown = SimpleNamespace(Image=lambda file: Path(file).read_bytes())
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("METHODS", "IMG_EXTENSIONS", "read_image"):           # what a piece replaces comes
        value = getattr(train, name)                                   # back
        monkeypatch.setattr(train, name, dict(value) if isinstance(value, dict) else value)
    epochs = "5" if "accuracy =" in piece else "1"
    for module in (train, finetune):
        main = module.main
        monkeypatch.setattr(module, "main", lambda words, *more, main=main: main(
            [*train.words_of(words), "--epochs", epochs, "--workers", "0", "--overwrite"], *more))
    for module in ("wandb", "tensorboard"):
        if module in piece and not find_spec(module):
            pytest.skip(f"{module} is not installed")
    if not find_spec("onnxscript"):
        piece = re.sub(r"torch\.onnx.*", "", piece)
    capsys.readouterr()
    names = {"__name__": "howto"}
    exec(piece, names)
    assert names.get("accuracy", 100) > 80                 # of two classes
    if "as_images" in names:                               # a patch of the volume is one patch
        volume, patches = torch.zeros(16, 32, 32), set()
        for place in ((0, 0, 0), (3, 7, 7), (4, 0, 0), (0, 8, 0), (0, 0, 8)):
            volume[place] = 1
            tokens = patchify(names["as_images"](volume[None]), 8)[0].sum(1)   # (L,)
            patches.add(tuple(tokens.nonzero().flatten().tolist()))
            volume[place] = 0
        assert len(patches) == 4                           # the first two are in the same patch
    wanted = re.findall(r"print\(.*  # ([\d.]+)", piece)
    assert not wanted or capsys.readouterr().out.split() == wanted


def test_commands_of_howto(desk, monkeypatch):
    """The commands of HOWTO.md run in their order."""
    monkeypatch.chdir(desk)
    few_shapes(monkeypatch)
    for script, *words in commands(ROOT / "tests/docs/HOWTO.md"):
        if "knn" not in words:
            words += ["--epochs", "0" if "0" in words else "5", "--overwrite"]
        {"train.py": train, "finetune.py": finetune}[script].main([*words, "--workers", "0"])


def test_forks(pretrain, tune, monkeypatch):
    """FORKS.md's methods train and are measured, even without pixels. Each is in a file of its own.
    The averaged classifier saves the average of the weights, and resumes as if it never stopped."""
    for piece in python("FORKS.md"):
        names = {"__name__": "fork"}
        exec(piece, names)
        cls, = [x for x in names.values() if getattr(x, "__module__", "") == "fork"]
        if issubclass(cls, finetune.Classifier):
            continue
        monkeypatch.setitem(train.METHODS, "fork", cls)
        for file in [[], ["--features", str(ROOT / "tests/models/mae.pt")]]:
            if file and cls.__name__ != "FeatureMAE":
                continue
            own = DECODER if "decoder_dim" in train.arguments_of(cls)[0] else []
            run = pretrain("--method", "fork", "--img_size", "32", *file, "--overwrite",
                           name="fork", own=own)
            assert run["history"][-1]["loss"] > 0 and run["config"].get("decoder_dim", 16) == 16
            if cls.reconstruct:
                assert evaluate.main(["runs/fork", "--mask_ratios", "0.75"])
            teacher = {name.removeprefix("teacher."): value for name, value in run["model"].items()
                       if name.startswith("teacher.")}
            if file:                                       # frozen, and loaded from its file
                assert same(teacher, load_encoder(file[1]).state_dict())
                assert load_model("runs/fork").teacher.dim == 64
            elif teacher:
                assert not torch.equal(teacher["cls_token"], run["model"]["encoder.cls_token"])
                train.main(f"--method fork --init {ROOT}/tests/models/mae.pt --epochs 0 --name begun")
                begun = load_model("runs/begun")
                assert same(begun.teacher.state_dict(), begun.encoder.state_dict())
                assert same(begun.encoder.state_dict(),
                            load_encoder(ROOT / "tests/models/mae.pt").state_dict())
        bench.main("--method fork --steps 1 --warmup 0 --batch_size 2".split())
    words = ["--epochs", "3", "--decay", "0.5"]
    main = partial(finetune.main, classifier=cls)
    monkeypatch.setattr(finetune, "main", main)
    whole, row = tune(*words, name="whole")
    with stopping_after_two(monkeypatch):
        tune(*words, name="part")
    part, _ = tune(*words, "--resume", name="part")
    assert same(whole["model"], part["model"])
    assert main("--mode eval --checkpoint runs/whole --workers 0")["top1"] == row["top1"]
    model = load_model("runs/whole", {"classifier": cls})
    images = torch.rand(2, 3, *model.encoder.img_size)
    assert not torch.equal(model.logits(images), model.live.logits(images))


def test_a_method_needs_only_its_file_and_vit():
    """A method imports only vit.py from this project; vit.py imports nothing from it."""
    for name in ("vit", *FIVE):
        text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
        imported = {*re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
        assert imported & {"vit", *FIVE, "train", "finetune", "tests"} <= {"vit"} - {name}, name


def test_requirements():
    """torchvision 0.N belongs to torch 2.(N - 15)."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    torch_minor, vision_minor = re.search(r"torch>=2\.(\d+)\ntorchvision>=0\.(\d+)", text).groups()
    assert int(vision_minor) == int(torch_minor) + 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(page):
    """A code block begins and ends on lines of its own, in pairs."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```\w*$", text, re.MULTILINE)
    assert len(fences) == text.count("```") and len(fences) % 2 == 0


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


# how Hugging Face's ViTMAEForPreTraining calls what MAE's release calls otherwise
HUGGING_FACE = {"blocks.": "encoder.layer.", "decoder_encoder.layer.": "decoder_layers.",
                "attn.proj": "attention.output.dense", "mlp.fc1": "intermediate.dense",
                "mlp.fc2": "output.dense", "norm1": "layernorm_before", "norm2": "layernorm_after",
                "patch_embed.proj": "embeddings.patch_embeddings.projection"}
ENCODER = {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
           "norm.weight": "layernorm.weight", "norm.bias": "layernorm.bias"}


def test_files_of_other_frameworks(tmp_path, monkeypatch, pretrain):
    """Lightning's files are read; REFERENCE.md's Python renames those of Hugging Face. Training
    starts from all their weights."""
    pretrain()
    model, theirs = load_model("runs/mae"), {}
    released = to_released(model)
    torch.save({"state_dict": {f"model.{name}": x for name, x in released.items()},
                "hyper_parameters": {"lr": 1.0}}, "lightning.ckpt")
    for name, value in released.items():
        new = ENCODER.get(name, name)
        for ours, other in HUGGING_FACE.items():
            new = new.replace(ours, other)
        new = f"decoder.{new}" if name.startswith(("decoder", "mask_token")) else f"vit.{new}"
        if "attn.qkv" in new:
            for part, x in zip(("query", "key", "value"), value.chunk(3)):
                theirs[new.replace("attn.qkv", f"attention.attention.{part}")] = x
        else:
            theirs[new] = value
    torch.save(theirs, "pytorch_model.bin")
    pieces = [x for x in python("REFERENCE.md") if "pytorch_model.bin" in x]
    if find_spec("safetensors"):
        from safetensors.torch import save_file
        save_file({name: x.contiguous() for name, x in theirs.items()}, "model.safetensors")
        Path("pytorch_model.bin").unlink()
    for piece in pieces[not find_spec("safetensors"):]:
        exec(piece, {})
    for file in ("lightning.ckpt", "mae_full.pth"):
        again = pretrain("--init", file, "--epochs", "0", "--overwrite", name="again")
        assert same(again["model"], model.state_dict()), file


def commands(page):
    """Return [script, word, ...] of each command of train.py or finetune.py on a page."""
    text = page.read_text(encoding="utf-8")
    shell = "".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)).replace("\\\n", "")
    found = re.findall(r"(?:^|[ /])((?:train|finetune)\.py(?: --.*?)?)(?:  #|$)", shell, re.M)
    return [command.split() for command in found if "$" not in command]


def test_commands_of_the_readme():
    """Commands use only runs that earlier ones have made. First comes what they need."""
    text, runs = (ROOT / "README.md").read_text(encoding="utf-8"), set()
    places = [text.index(x) for x in ("apt install git python3-venv", "git clone", "-m venv env",
                                      "pip install -r requirements.txt", "\npython train.py\n")]
    assert places == sorted(places)
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
    names = {}
    exec(python("FORKS.md")[0], names)
    monkeypatch.setitem(train.METHODS, "yours", names["YoursMAE"])
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
            if line.startswith(("python ", "torchrun ")):
                command = re.search(r"(train|finetune)\.py .*", line)[0]
                continue
            row, numbers = re.fullmatch(                   # table, flags, (numbers), # comment
                r".{14}((?:python )?-[^(#]*[^(# ])(?: \(([\d., ]+)\))?(?: +# .*)?", line).groups()
            row = f"{command} {row}" if row.startswith("--") else row.removeprefix("python ")
            more = [re.sub(r"[\d.]+$", x, row) for x in (numbers or "").split(", ") if x]
            for script, *words in map(str.split, [row, *more]):
                parsed(script, words)
                count += 1
    assert count > 150
