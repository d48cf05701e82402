"""The pages: their Python runs, links lead somewhere, commands can run in their order."""

import re
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import finetune
import train
from tests import bench, evaluate, why
from tests.exercise import EXERCISES
from tests.lib.models import load_encoder, load_model, to_released
from tests.unit.conftest import (DECODER, FIVE, ROOT, parsed, same, stopping_after_two,
                                 write_pictures)
from vit import normalize, patchify

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
        write_pictures(Path("photos"), "aé", 20, side=32)
        for name in ("1.jpeg", "1.JPEG", "1.webp", "1.tif"):
            Image.open("photos/a/1.png").save(f"photos/a/{name}")
        for part, n in (("train", 9), ("val", 3)):
            write_pictures(Path("LABELS", part), "abc", n, side=32)
        for copy in ("photo.jpg", "mask.png"):
            shutil.copy("photos/a/0.png", copy)
        files = sorted(Path("photos").rglob("*.png"))
        for table, column, cell in (("labels", "class", lambda i: files[i].parent.name),
                                    ("numbers", "number", str)):       # as Excel writes them
            rows = "".join(f"{file},{cell(i)}\n" for i, file in enumerate(files))
            Path(f"{table}.csv").write_text(f"file,{column}\n{rows}\n", "utf-8-sig")
        scenes_and_masks()
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


def scenes_and_masks():
    """Write a scene with room for four tiles and a stack of two slices; and scans whose upper half
    is missing by their masks."""
    for folder in ("scenes/a", "scenes/b", "scans", "masks"):
        Path(folder).mkdir(parents=True)
    Image.new("RGB", (460, 500)).save("scenes/a/0.png")
    slices = [Image.new("L", (240, 230), colour) for colour in (50, 200)]
    slices[0].save("scenes/b/0.tif", save_all=True, append_images=slices[1:])
    for i, file in enumerate(sorted(Path("photos").rglob("*.png"))):
        shutil.copy(file, f"scans/{i}.png")
        mask = Image.new("L", (32, 32))
        mask.paste(255, (0, 0, 32, 16))
        mask.save(f"masks/{i}.png")


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


def open_in_ascii(file, mode="r", encoding="ascii", **options):
    """Do what open does where text is ASCII unless one says otherwise, as Windows' is no UTF-8."""
    return open(file, mode, encoding=None if "b" in mode else encoding, **options)


@pytest.fixture
def howto(desk, monkeypatch):
    """howto(piece) runs a piece of HOWTO.md at the desk, for few epochs, and returns its names."""
    monkeypatch.chdir(desk)
    few_shapes(monkeypatch)
    rows = [{"image": Image.new("L", (32, 32)), "label": i % 2} for i in range(3)]
    view = nullcontext(SimpleNamespace(cursor=lambda: [(b"0", Path("photo.jpg").read_bytes())]))
    lmdb = SimpleNamespace(begin=lambda: view)
    for name, module in (
            ("IPython.display", dict(Image=lambda file: Path(file).read_bytes())),
            ("datasets", dict(load_dataset=lambda name, split: rows)),
            ("lmdb", dict(open=lambda name, **options: lmdb))):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("METHODS", "IMG_EXTENSIONS", "read_image"):           # what a piece replaces comes
        value = getattr(train, name)                                   # back
        monkeypatch.setattr(train, name, dict(value) if isinstance(value, dict) else value)

    def run(piece):
        epochs = "5" if "accuracy =" in piece else "1"
        for module in (train, finetune):
            main = module.main
            monkeypatch.setattr(module, "main", lambda words, *more, main=main: main(
                [*train.words_of(words), "--epochs", epochs, "--workers", "0", "--overwrite"],
                *more))
        names = {"__name__": "howto", "open": open_in_ascii}
        exec(piece, names)
        return names
    return run


@pytest.mark.parametrize("piece", python("HOWTO.md"))
def test_howto(howto, capsys, piece):
    """Each answer runs as it stands, for one epoch, and prints the numbers in its comments. Other
    data than photos train for five, after which the classifier is better than chance."""
    for module in ("wandb", "tensorboard"):
        if module in piece and not find_spec(module):
            pytest.skip(f"{module} is not installed")
    if not find_spec("onnxscript"):
        piece = re.sub(r"torch\.onnx.*", "", piece)
    capsys.readouterr()
    names = howto(piece)
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


def piece_with(text):
    """Return the only piece of HOWTO.md that contains `text`."""
    found, = [piece for piece in python("HOWTO.md") if text in piece]
    return found


def test_howto_classifies_arrays(howto):
    """The hint for arrays gives what files give; class names and file names may have accents."""
    piece = piece_with("classes.csv")
    hint = re.search(r"array \(h,w,3\): (.*)", piece)[1]
    tables = []
    for code in (piece, piece.replace("read_image(file) ", hint + "  ").replace(
            "            photo =", "            array = np.array(Image.open(file))\n"
            "            photo =", 1)):
        howto(f"import numpy as np\nfrom PIL import Image\n{code.replace('photos', 'photos/é')}")
        tables.append(Path("classes.csv").read_text("utf-8"))
    assert tables[0] == tables[1] and tables[0].count("photos/é/") == 20


def test_howto_scores(howto, capsys):
    """The AUROC is that of ranks, which is 0.5 for a class that always has the same probability."""
    names = howto(piece_with("auroc ="))
    a, b = names["a"].tolist(), names["b"].tolist()
    pairs = [1 if x > y else 0.5 if x == y else 0 for x in a for y in b]
    assert names["auroc"].item() == pytest.approx(sum(pairs) / len(pairs))
    *_, found = re.findall(r"(\d+)% of (\d+), F1 (\d.\d+)", capsys.readouterr().out)
    recall, total, f1 = map(float, found)
    guessed = names["confusion"][:, -1].sum().item()
    assert f1 == pytest.approx(2 * recall / 100 * total / (total + guessed), abs=0.01)


def test_howto_reads_tables(howto):
    """A table's head, mark and blank lines are no images. A missing file is an error."""
    piece = piece_with("labels.csv")
    howto(piece)
    links = [*Path("fold0").glob("*/*/*")]
    assert {link.parent.name for link in links} == {"a", "é"} and len(links) == 40
    assert all(link.exists() for link in links)
    with pytest.raises(FileNotFoundError, match="lost.png"):
        howto(piece.replace("csv.DictReader(file, skipinitialspace=True)", '[{"file": "lost.png", "class": "a"}]'))


@pytest.mark.parametrize("channels", (2, 6))
def test_howto_reads_other_channels(howto, channels):
    """from_mae turns RGB weights into those for any number of channels."""
    piece = piece_with("NirMAE").replace("(n, 4, 32, 32)", f"(n, {channels}, 32, 32)")
    names = howto(piece.replace("part(400)", "part(40)"))
    run, start = (train.read_checkpoint(x)["model"] for x in ("runs/nir", "tests/models/mae.pt"))
    assert run["encoder.patch_embed.weight"].shape == (64, 16 * channels)
    new = names["NirMAE"].from_mae(load_model("runs/nir", train.METHODS), start)
    old = start["encoder.patch_embed.weight"].unflatten(1, (16, 3))
    new = new["encoder.patch_embed.weight"].unflatten(1, (16, channels))
    assert torch.equal(new[..., :3], old[..., :channels])
    assert torch.allclose(new[..., 3:], old.mean(2, keepdim=True).expand_as(new[..., 3:]))


def test_howto_reads_bands_last(howto):
    """Arrays of 64 x 64 pixels and 13 bands have 13 channels."""
    rng = np.random.default_rng(0)
    for file in Path("arrays").glob("*.npy"):
        np.save(file, rng.integers(0, 4096, (64, 64, 13), "uint16"))
    howto(piece_with("BandsMAE"))
    config = train.read_checkpoint("runs/bands_arrays")["config"]
    assert config["in_chans"] == 13 and config["img_size"] == (64, 64)


def test_howto_copies_all_images(howto):
    """Shrinking reads all image files, tiles come from all slices, and packed data are unpacked."""
    howto(piece_with("thumbnail"))
    names = [{x.name for x in Path(folder, "a").iterdir()} for folder in ("photos", "small")]
    assert names[0] == names[1] and {"1.jpeg", "1.JPEG", "1.webp", "1.tif"} <= names[0]
    howto(piece_with("ImageSequence"))
    tiles = [Image.open(file) for file in sorted(Path("tiles").iterdir())]
    assert [x.size for x in tiles] == 6 * [(224, 224)]
    assert [x.getextrema() for x in tiles[4:]] == [(50, 50), (200, 200)]
    howto(piece_with("lmdb"))
    assert {*map(str, Path("LABELS/val").glob("[01]/*"))} == {
        f"LABELS/val/{i % 2}/{i}.png" for i in range(3)}
    assert train.read_image("photos/lmdb_0.jpg").shape == (3, 32, 32)


def test_howto_ignores_missing_pixels(howto):
    """Patches without pixels are masked, and pixels that are missing do not change the loss."""
    names = howto(piece_with("KnownMAE"))
    model, images = load_model("runs/known_scans", train.METHODS), names["images"][3:7]
    labels, noise = torch.arange(3, 7), torch.rand(4, 64)
    _, noise, known = model.draw_batch([images], labels, noise)
    _, ids_mask, mask = model.encoder.mask(images, noise, 0.75)
    assert mask.view(4, 8, 8)[:, :4].all() and mask.sum() == 4 * 48
    other = torch.where(names["masks"][3:7], 255 - images, images)
    with torch.no_grad():
        losses = [model(normalize(x, model), noise, known)[0]
                  for x in (images, other, 255 - images)]
    assert losses[0] == losses[1] != losses[2]


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
    """Commands of both scripts parse, also with a method of one's own or a variation; programs are
    there."""
    names = {}
    exec(python("FORKS.md")[0], names)
    for name, cls in {"yours": names["YoursMAE"], **why.CLASSES}.items():
        monkeypatch.setitem(train.METHODS, name, cls)
    for script, *words in commands(page):
        parsed(script, words)
    for program in re.findall(r"python -m (tests\.\w+)", page.read_text(encoding="utf-8")):
        assert find_spec(program), program


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page):
    """The links of each page lead to files, and to headings, anchors and lines that are there."""
    text = page.read_text(encoding="utf-8")
    for link, heading in re.findall(r"""(?:\]\(|src(?:set)?=")((?!http)[^)"#]*)(#[^)"]*)?""", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            words = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            words += re.findall(r'<a id="(.*?)">', target.read_text(encoding="utf-8"))
            lines = len(target.read_text(encoding="utf-8").splitlines())       # see test_why.py
            words += [f"L{i + 1}" for i in range(lines)] if target.suffix == ".py" else []
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


def test_teach(tmp_path, monkeypatch, capsys):
    """TEACH.md's piece for notebooks checks an exercise and writes a tour. Each exercise has
    points."""
    monkeypatch.chdir(tmp_path)
    piece, = [x for x in python("TEACH.md") if "exercise" in x]
    exec(piece, {})
    assert "mae.MAE.forward is right" in capsys.readouterr().out
    assert Path("tour_mae.html").exists()
    text = (ROOT / "tests/docs/TEACH.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [123] \| (.*) \|$", text, re.MULTILINE)
    assert sorted(re.findall(r"`(.*?)`", "".join(rows))) == sorted(EXERCISES)
