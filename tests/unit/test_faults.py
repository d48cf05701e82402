"""What goes wrong: command lines, checkpoints, images, kills, full disks, losses that are not
finite. Invalid input ends with exit code 2 and one line, and no run is lost."""

import errno
import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
import threading
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, PngImagePlugin

import finetune
import train
from tests.unit.conftest import (DECODER, HERE, TINY, ended, fork, same, script, torchrun,
                                 write_pictures)
from vit import InputError

# ---------------------------------------------------------------------------------- command lines

MAINS = {"train": train.main, "eval": train.main, "tune": finetune.main, "test": finetune.main}
BASE = {"train": ["--data", "data", "--name", "new", *TINY],
        "eval": ["--eval", "runs/mae/last.pt", "--workers", "0"],
        "tune": ["--checkpoint", "runs/mae/last.pt", "--data", "data", "--name", "new",
                 *TINY[8:], "--epochs", "1"],
        "test": ["--checkpoint", "runs/tuned/last.pt", "--mode", "eval", "--workers", "0"]}
COMMANDS = """
train | --epoch 5                              | --epoch
train | --batch_size 41                        | --batch_size 41 ; 40
train | --mask_ratio 0.99                      | mask_ratio 0.99
train | --lr nan                               | --lr
train | --betas 0.9,0.95,0.99                  | --betas ; must be 2 numbers
train | --patch_size 4,0                       | --patch_size
train | --init=                                | --init ; empty
train | --data nowhere                         | --data nowhere
train | --data empty                           | empty
train | --data flat/up                         | flat/up/data
train | --name mae                             | runs/mae ; --resume ; --overwrite ; --name
train | --name mae --resume --depth 1 --heads 1 | depth was 2, is 1; heads was 2, is 1
train | --name mae --resume --data other --batch_size 2 | images was
train | --name mae --resume --train_images 16  | train_images was None, is 16
train | --name mae --resume --seed 1           | seed was 0, is 1
train | --name mae --resume --optimizer sgd    | optimizer was adamw, is sgd
tune  | --name tuned --resume --labels 0.5     | labels was 1.0, is 0.5
train | --name tuned --resume                  | method was classifier, is mae
train | --method imae --same_class 0.5 --data flat/up/data/val/a | --same_class 0.5
train | --method imae --teacher runs/mae --patch_size 8 | teacher
eval  | --eval runs/tuned                      | runs/tuned
eval  | --eval runs/mae runs/large             | runs/large
tune  | --data flat/up/data/val/a              | classes
tune  | --dim 32                               | width 16 and depth 2, not 32 ; --dim
tune  | --part teacher                         | --part teacher
tune  | --mode linear --batch_size 8 --accum 8 | --batch_size 8 must be at least 16
test  | --checkpoint runs/mae/last.pt          | runs/mae/last.pt
test  | --data other                           | --data other
test  | --img_size 32 --lr 1 --pool mean       | --img_size 32 --lr 1 --pool
train | --mask_ratios 0.6 --masks grid         | --mask_ratios 0.6 --masks grid
"""
COMMANDS = [[part.strip() for part in row.split("|")] for row in COMMANDS.strip().splitlines()]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """Return a folder with good and bad data sets, and a run of each kind."""
    root = tmp_path_factory.mktemp("desk")
    for part, classes, n in (("data/train", "ab", 20), ("data/val", "ab", 6),
                             ("other/train", "cd", 2), ("other/val", "cd", 2)):
        write_pictures(root / part, classes, n)
    for name in ("empty", "flat/up"):
        (root / name).mkdir(parents=True)
    (root / "flat/up/data").symlink_to(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, more in (("mae", []), ("large", ["--img_size", "32"])):
            train.main([*BASE["train"], "--name", name, "--epochs", "1", *more])
        finetune.main([*BASE["tune"], "--name", "tuned"])
    return root


def listing(root):
    """Return {path: when it was written}, without the times of folders."""
    return {path: path.is_file() and path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.fixture
def desk(furnished, tmp_path, monkeypatch):
    """Enter a copy of the furnished folder, and return its path."""
    copy = shutil.copytree(furnished, tmp_path / "desk", symlinks=True)
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.parametrize("kind, words, parts", COMMANDS, ids=[words for _, words, _ in COMMANDS])
def test_wrong_command_lines(desk, refused, kind, words, parts):
    """The last line names the flag or file, and no file changes."""
    before = listing(desk)
    refused(MAINS[kind], [*BASE[kind], *words.split()], *parts.split(" ; "))
    assert listing(desk) == before


def test_a_download_that_fails(monkeypatch, refused):
    def download(*_, **__):
        raise URLError("no route to host")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "__init__", download)
    refused(train.main, ["--data", "cifar10", "--name", "new"], "--data cifar10", "no route")


# ------------------------------------------------------------------------- checkpoints of strangers

class Payload:
    def __reduce__(self):
        return Path("ran").touch, ()                       # the code that must not run


BROKEN = {  # from a good file's bytes and content: broken bytes or content
    "empty": lambda file, content: b"",
    "half": lambda file, content: file[:len(file) // 2],
    "code": lambda file, content: {**content, "extra": Payload()},
    "pickled code": lambda file, content: pickle.dumps({"model": Payload()}, 2),
    "other names": lambda file, content: {"epoch": 3, "state_dict": content["model"]},
    "no config": lambda file, content: {"method": "mae", "model": content["model"]},
    "a tensor": lambda file, content: torch.zeros(3)}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(desk, refused, name):
    """A broken checkpoint is refused by its name. No code in it runs."""
    good, bad = Path("runs/mae/last.pt"), Path("bad.pt")
    content = BROKEN[name](good.read_bytes(), train.read_checkpoint(good))
    bad.write_bytes(content) if isinstance(content, bytes) else torch.save(content, bad)
    refused(train.main, [*BASE["train"], "--init", "bad.pt"], "bad.pt")
    assert not Path("ran").exists()


# ------------------------------------------------------------------------------------------ images

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


def write_broken(folder):
    """Write files that cannot be read, each for its own reason, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("torn.jpg", "nothing.jpg", "text.jpg", "eps.png")]
    Image.effect_noise((64, 64), 99).save(files[0])
    torn = files[0].read_bytes()
    for file, content in zip(files, (torn[:len(torn) // 2], b"", b"a cat, sitting", EPS)):
        file.write_bytes(content)
    for name, mode, value in (("1.tif", "F", 0.5), ("2.tif", "I", -1), ("3.tif", "I", 2 ** 16)):
        files.append(folder / name)                        # 32 bits
        Image.new(mode, (16, 16), value).save(files[-1])
    files.append(folder / "large.png")                     # PIL refuses it
    Image.new("RGB", (70, 70)).save(files[-1])
    return files


@pytest.mark.parametrize("words", [[], ["--img_size", "8", "--workers", "1"]])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, capsys, refused, words):
    """In training, in memory and in files, unreadable files are counted in the first epoch and
    named. No program is started for EPS. In validation and for neighbours, one is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    Path("gs").write_text("#!/bin/sh\ntouch ran\n")
    Path("gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    write_pictures(Path("data/val"), "ab", 6)
    write_pictures(Path("data/train"), "ab", 60)
    bad = write_broken(Path("data/train/a"))
    row = train.main(["--data", "data", *TINY, *DECODER, *words])
    out = capsys.readouterr().out
    assert [out.count(f"cannot read {path.absolute()}:") for path in bad] == [1] * len(bad)
    assert out.count("8 of 128 image") == 1 and out.index("8 of 128") < out.index("epoch 1:")
    assert math.isfinite(row["psnr_masked"]) and not Path("ran").exists()
    knn = ["--checkpoint", "runs/mae_data", "--mode", "knn", "--workers", "0", "--data", "data"]
    refused(finetune.main, [*knn, "--img_size", "8"], "cannot read", "data/train/a/")
    broken = Path("data/val/b/x.png").absolute()
    broken.touch()
    refused(train.main, ["--data", "data", *TINY, *DECODER, *words, "--name", "new"], str(broken))
    assert not Path("runs/new").exists()


@pytest.mark.parametrize("words", [[], ["--img_size", "8"]])
def test_too_many_files_that_cannot_be_read(tmp_path, monkeypatch, refused, words):
    """A run stops if more than a tenth of the files are broken, or all samples of them."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        write_pictures(Path("data", part), "ab", 20)
    for n, part in ((10, "a tenth of 40 image files"), (40, "none of 40 images")):
        for file in sorted(Path("data/train").rglob("*.png"))[:n]:
            file.write_bytes(b"")
        refused(train.main, ["--data", "data", *TINY, *DECODER, *words], part, "train/a/0.png")
    assert not Path("runs").exists() or not [*Path("runs").iterdir()]


def test_images_that_vanish(pretrain, folder, monkeypatch, refused):
    """If images vanish after three epochs, the fourth ends before anything is written."""
    shutil.copytree(folder, "mine")
    write = train.write_rows

    def vanish(path, rows, *mode):
        write(path, rows, *mode)
        if mode and rows[0]["epoch"] == 3:
            shutil.rmtree("mine/train")
    monkeypatch.setattr(train, "write_rows", vanish)
    words = ["--data", "mine", "--img_size", "8", "--epochs", "4"]
    refused(lambda words: pretrain(*words), words, "cannot read", "mine/train/")
    assert train.read_checkpoint("runs/mae")["epoch"] == 3


def test_what_replaces_an_image(tmp_path, monkeypatch, capsys):
    """In training, other images of files, with their labels, replace unreadable ones, and none does
    so often. Readable images are drawn as ever. What all processes could not read is counted, and
    told once."""
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 40)
    for i in range(30):                                    # these sort together
        (tmp_path / f"train/a/{i}.png").write_bytes(b"")
    data, *_ = train.open_data(str(tmp_path), HERE, (8, 8))
    data.replaces = True
    images, labels, problems = zip(*(data[5, i] for i in range(80)))
    good = [i for i in range(80) if not problems[i]]
    assert len(good) == 50
    for i in {*range(80)} - {*good}:
        assert os.fsdecode(data.images[i]) in problems[i]
    every = torch.stack([images[i] for i in good])
    drawn = [good[(every == image).all((1, 2, 3)).nonzero().item()] for image in images]
    assert data.labels[drawn].tolist() == [*labels] and all(drawn[i] == i for i in good)
    assert max(map(drawn.count, good)) < 6
    data.unreadable, others = {*"abcde"}, {*"efghi"}       # of two processes
    monkeypatch.setattr(train, "gather", lambda found, _: [found, others])
    with pytest.raises(InputError, match="9 of 80 image files, more than a tenth"):
        train.check_unreadable(data, HERE)
    capsys.readouterr()
    for found in ("abc", "abc", "abcd"):                   # in three epochs
        data.unreadable = {*found}
        monkeypatch.setattr(train, "gather", lambda found, _: [found])
        train.check_unreadable(data, HERE)
    said = capsys.readouterr().out.split("note")
    assert [x.split()[:3] for x in said] == [[], ["3", "of", "80"], ["1", "of", "80"]]


# ------------------------------------------------------------------------------------------- kills

def interrupt(*_):
    raise KeyboardInterrupt


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", ["a bug", interrupt, terminate])
def test_a_run_that_has_saved_nothing_leaves_nothing(pretrain, monkeypatch, stop):
    """The same command can be repeated. A bug keeps its traceback."""
    for name in ("forward", "reconstruct"):                # in training, and in validation
        with monkeypatch.context() as patch, pytest.raises((TypeError, SystemExit)) as end:
            patch.setattr(train.MAE, name, stop)
            train.shell(pretrain)
        assert stop == "a bug" or end.value.code == 130
        assert not Path("runs/mae").exists()
    assert pretrain()["epoch"] == 2


def test_of_runs_that_start_at_once_one_trains(pretrain, folder):
    """All others stop with exit code 2, and change nothing of it."""
    wanted = pretrain(name="straight")
    words = ["--data", folder, *TINY, *DECODER, "--name", "mae"]
    processes = [fork(script, "train.py", *words) for _ in range(3)]
    assert sorted(ended(process)[0] for process in processes) == [0, 2, 2]
    assert same(wanted["model"], train.read_checkpoint("runs/mae")["model"])


@pytest.fixture
def words(pretrain, folder):
    """words(name, epochs) returns the flags of a run that can be resumed, in a new folder."""
    return lambda name, epochs: ["--data", str(folder), *TINY, *DECODER, "--name", name, "--epochs",
                                 str(epochs), "--resume"]


def killed(owner, name, call, *words):
    """Run train.py, and be killed in call number `call` of owner.name, halfway through a file."""
    function, calls = getattr(owner, name), []

    def instead(*inputs, **more):
        calls.append(1)
        if len(calls) < call:
            return function(*inputs, **more)
        if function is torch.save:
            inputs[1].write(b"half")
            inputs[1].flush()
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, instead)                          # only in this process
    script("train.py", *words)


def rows(name):
    """Return the rows of both logs, without times."""
    every = [json.loads(line) for file in ("log", "steps")
             for line in open(f"runs/{name}/{file}.jsonl")]
    return [{k: row[k] for k in row.keys() - {"img_s", "wait"}} for row in every]


POINTS = [  # owner, name, call, and the epoch that last.pt holds then
    (train.MAE, "forward", 3, 0), (Image.Image, "save", 1, 1), (train.MAE, "reconstruct", 1, 1),
    (torch, "save", 1, 1), (os, "replace", 1, 1), (json, "dumps", 4, 2), (torch, "save", 2, 3)]


def test_kills(words):
    """A run that is killed at each of POINTS has the weights, optimizer state and logs of one that
    never was. last.pt is always whole."""
    more = ["--img_size", "8"]                             # images are read from files
    train.main([*words("straight", 5), *more])
    for owner, name, call, epoch in POINTS:
        process = fork(killed, owner, name, call, *words("killed", 5), *more)
        assert ended(process)[0] == -signal.SIGKILL
        assert (train.read_checkpoint("runs/killed")["epoch"] if epoch else 0) == epoch
    assert ended(fork(script, "train.py", *words("killed", 5), *more))[0] == 0
    assert rows("killed") == rows("straight") and not [*Path("runs/killed").glob("*tmp*")]
    a, b = (train.read_checkpoint(f"runs/{name}") for name in ("killed", "straight"))
    assert a["epoch"] == b["epoch"] and same(a["model"], b["model"])
    a, b = (content["optimizer"]["state"] for content in (a, b))
    assert a.keys() == b.keys() and all(same(a[i], b[i]) for i in a)


def as_machine(*words):
    """Do as script, with a folder of runs for each rank."""
    script("train.py", *words, "--runs", f"runs{os.environ['RANK']}")


def test_resuming_on_machines_without_a_shared_disk(words):
    """If only one process finds a checkpoint, none trains, and nothing is lost."""
    train.main([*words("x", 2), "--runs", "runs0"])
    before = Path("runs0/x/last.pt").read_bytes(), Path("runs0/x/log.jsonl").read_bytes()
    code, lines = ended(fork(torchrun, as_machine, *words("x", 3)))
    assert code != 0 and any("runs0/x/last.pt" in line for line in lines), lines
    assert before == (Path("runs0/x/last.pt").read_bytes(), Path("runs0/x/log.jsonl").read_bytes())


def test_a_full_disk(words):
    """The last checkpoint stays, and one line says what happened."""
    resource = pytest.importorskip("resource", reason="Unix only")
    wide = ["--dim", "64"]                                 # tensors of more than a file's buffer
    train.main([*words("full", 2), *wide])
    before = Path("runs/full/last.pt").read_bytes()

    def tight():                                           # files may be half as long
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)
        script("train.py", *words("full", 4), *wide)
    code, lines = ended(fork(tight))
    assert code == 2 and len(lines) == 1 and os.strerror(errno.EFBIG) in lines[0], lines[-3:]
    assert Path("runs/full/last.pt").read_bytes() == before
    assert train.main([*words("full", 4), *wide])["epoch"] == 4


# ------------------------------------------------------------------------------- not finite numbers

def losing(monkeypatch, value, calls):
    """Multiply MAE's loss by a value in these calls, counted from 0. Returns a list with an element
    for each call."""
    forward, made = train.MAE.forward, []

    def instead(self, *inputs):
        loss = forward(self, *inputs)[0] * (value if len(made) in calls else 1)
        made.append(1)
        return loss, {"loss": loss.detach()}
    monkeypatch.setattr(train.MAE, "forward", instead)
    return made


@pytest.mark.parametrize("value, amp", [(math.inf, "fp32"), (math.nan, "fp16")])
def test_a_loss_that_is_not_finite_stops_within_the_epoch(words, monkeypatch, refused, value, amp):
    """The third epoch, of 40 steps, stops before step 21. The second epoch's checkpoint is kept."""
    train.main(words("lost", 2))
    made = losing(monkeypatch, value, range(3, 40))
    more = ["--batch_size", "1", "--amp", amp]
    refused(train.main, [*words("lost", 4), *more], "epoch 3", "--clip_grad")
    assert len(made) <= 20 and train.read_checkpoint("runs/lost")["epoch"] == 2


def test_weights_that_are_not_finite_are_not_written(words, monkeypatch, refused):
    """If an epoch's last step breaks the weights after a finite loss, the epoch is not saved."""
    def after_step(model, progress):
        if progress == 0.5:
            model.mask_token.data.fill_(math.nan)
    monkeypatch.setattr(train.MAE, "after_step", after_step, raising=False)
    refused(train.main, words("lost", 4), "epoch 2", "--clip_grad")
    assert train.read_checkpoint("runs/lost")["epoch"] == 1


def test_a_scale_that_is_too_large(words, monkeypatch):
    """Steps whose gradients overflow are skipped until the scale fits, and a loss that overflows in
    such a step does not end the run. The run began without a scale."""
    train.main(words("large", 1))
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler",
                        lambda *inputs, **more: scaler(*inputs, init_scale=2.0 ** 22, **more))
    losing(monkeypatch, math.inf, [4])                     # the epoch's last step, which is logged
    row = train.main([*words("large", 3), "--amp", "fp16"])
    content = train.read_checkpoint("runs/large")
    assert row["epoch"] == 3 and math.isfinite(row["loss"]) and content["scaler"]["scale"] < 2 ** 22
    assert content["history"][1]["loss"] == math.inf
    updates = {int(state["step"]) for state in content["optimizer"]["state"].values()}
    assert len(updates) == 1 and 0 < updates.pop() < 15


# ------------------------------------------------------------------------------ files of one's own

def part(n=8, **more):
    """Return the part of a .pt file, images and labels of two classes, with `more` replaced."""
    value = dict(images=torch.zeros(n, 3, 8, 8, dtype=torch.uint8), labels=torch.arange(n) % 2,
                 names=["a", "b"])
    return tuple({**value, **more}.values())


@pytest.mark.parametrize("train_part, val_part, words", [
    (part(labels=torch.arange(8) % 2 + 1), part(), "labels are from 1 to 2; from 0 to 1"),
    (part(labels=torch.arange(7)), part(), "labels must be 8 integers; (7,)"),
    (part(labels=torch.rand(8)), part(), "integers; float32"),
    (part(labels=[*"abcdabcd"]), part(), "dict of tensors; str"), (part(names=2), part(), "int"),
    (part(), part(names=["a", "c"]), "different class names"),
    (part(names={"0": "a", "1": "b"}), part(), "dict of tensors; 0"),
    (part(), part(labels=-torch.ones(8).long()), "val: labels are from -1 to -1"),
    (part(0), part(), "uint8 tensor; (0, 3, 8, 8)"), ([1, 2], part(), "dict of tensors; unpack"),
    (part(images=torch.zeros(8, 3, 8, 8)), part(), "uint8; float32"),
    (part(images=np.zeros((8, 3, 8, 8), "uint8")), part(), "own.pt must be a dict of tensors")])
def test_what_a_file_of_tensors_must_hold(tmp_path, refused, train_part, val_part, words):
    path = tmp_path / "own.pt"
    torch.save({"train": train_part, "val": val_part}, path)
    refused(lambda file: train.open_data(file, HERE), str(path), *words.split("; "))


@pytest.mark.parametrize("names, wanted", [
    ([0, 1], ["0", "1"]), ({1: "b", 0: "a"}, ["a", "b"]), (("a", "b"), ["a", "b"])])
def test_class_names_of_a_file_of_tensors(tmp_path, names, wanted):
    """Class names can be integers, a tuple, or a dict; images can also be alone."""
    torch.save({"train": part(names=names), "val": part(names=names)}, tmp_path / "own.pt")
    assert train.open_data(str(tmp_path / "own.pt"), HERE)[0].classes == wanted
    torch.save({x: part()[0] for x in ("train", "val")}, tmp_path / "own.pt")
    data = train.open_data(str(tmp_path / "own.pt"), HERE)[0]
    assert data.classes == [] and {*data.labels.tolist()} == {-1}


def test_what_else_a_file_may_hold(tmp_path, capsys):
    """A TIFF's fourth band is not transparency. Further bands and pages are counted. A PNG is read
    however long its text is."""
    bands = Image.merge("RGBA", [Image.new("L", (8, 8), value) for value in (247, 20, 30, 0)])
    bands.save(tmp_path / "0.tif")
    page = Image.new("RGB", (8, 8), (247, 20, 30))
    page.save(tmp_path / "1.tif", save_all=True, append_images=[page])
    text = PngImagePlugin.PngInfo()
    text.add_text("prompt", "x" * 2_000_000, zip=True)
    page.save(tmp_path / "2.png", pnginfo=text)
    data = [part.images for part in train.open_data(str(tmp_path), HERE)[:2]]
    assert (torch.cat(data) == torch.tensor([247, 20, 30]).view(3, 1, 1)).all()
    assert "more than one page" in capsys.readouterr().out


def test_a_folder_that_cannot_be_listed(folder, monkeypatch, refused):
    scandir = os.scandir

    def forbid(path):
        if str(path).endswith("train/b"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)
    monkeypatch.setattr(os, "scandir", forbid)
    refused(train.main, ["--data", folder, *TINY], "Permission denied", "train/b")


LAYOUTS = {  # files: parts of the message, or numbers of images and of classes
    "Training/a/0.png Training/b/0.png Test/a/0.png": "Training; Test; val/",
    "train2017/0.png val2017/0.png": "train2017; val2017", "x/train_images/0.png y/0.png": "x has",
    "train/0.png train/1.png val/2.png": (2, 1, 0), "train/a/0.png val/images/1.png": "images; a",
    "train/a/0.png train/1.png val/a/2.png": (1, 1, 1),
    "train/train/0.png val/train/0.png": (1, 1, 1),
    "fold1/0.png fold2/0.png": "fold1; fold2", "seg_train/a/0.png seg_test/a/0.png": "seg_train",
    "a/0.png b/0.png runs/x/last.pt runs/x/recon.png": (1, 1, 0), "train/a/0.png": "no val/",
    "train/a/0.png val/x.txt": "val has no images", "test/0.png a/1.png": (1, 1, 0),
    "train/a/x/0.png train/b/x/1.png val/a/2.png val/b/3.png": (2, 2, 2)}


@pytest.mark.parametrize("files", LAYOUTS)
def test_layouts_of_folders(tmp_path, refused, files):
    """Folders that look like parts of a data set are never a flat folder."""
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / file, "PNG")
    if isinstance(LAYOUTS[files], str):
        refused(lambda x: train.open_data(x, HERE), str(tmp_path), *LAYOUTS[files].split("; "))
    else:
        data, val, _ = train.open_data(str(tmp_path), HERE)
        assert (len(data.labels), len(val.labels), len(data.classes)) == LAYOUTS[files]


def test_two_images_are_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(Path("two"), "x", 2, side=8)
    assert train.main("--data two --epochs 1 --workers 0")["epoch"] == 1


# ------------------------------------------------------------- notebooks, streams, the environment

def test_main_in_a_notebook(pretrain, folder, tmp_path, monkeypatch):
    """main takes numbers, paths and one string, expands ~, raises InputError, works in a thread,
    and leaves signals and streams as they were."""
    monkeypatch.setenv("HOME", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM), sys.stdout, sys.stderr
    words = ["--data", folder, "--runs", "~/runs", *TINY, *DECODER, "--epochs", 1, "--name"]
    rows = [train.main([*words, "list"]),
            train.main(" ".join(f"'{word}'" for word in [*words, "string"]))]
    thread = threading.Thread(target=lambda: rows.append(train.main([*words, "thread"])))
    thread.start()
    thread.join()
    assert rows[0]["loss"] == rows[1]["loss"] == rows[2]["loss"]
    assert (tmp_path / "runs/thread/last.pt").exists() and not Path("~").exists()
    with pytest.raises(InputError, match="--resume .*--overwrite .*--name"):
        train.main([*words, "list"])
    assert before == (signal.getsignal(signal.SIGTERM), sys.stdout, sys.stderr)


class Closed(io.StringIO):
    """A stream that has been closed by another program, e.g. `| head`."""
    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("stream", [io.TextIOWrapper(io.BytesIO(), "cp1252"), Closed(), None])
def test_streams_do_not_end_a_run(pretrain, folder, monkeypatch, stream):
    """Not if they lack a letter, are closed, or are missing."""
    shutil.copytree(folder, "图片")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream and sys.stderr)
        train.main(["--data", "图片", *TINY, *DECODER])
        finetune.main("--checkpoint runs/mae_图片 --mode knn --workers 0")
    assert train.read_checkpoint("runs/mae_图片")["epoch"] == 2
    if isinstance(stream, io.TextIOWrapper):
        assert rb"\u56fe\u7247: 40 train" in stream.buffer.getvalue()


def test_side_products_do_not_cost_the_result(pretrain, monkeypatch, capsys):
    """The table of --eval is printed, and its picture is written to the current folder, if it
    cannot be beside the model. A picture or log that cannot be written does not end a run."""
    def refuse(columns, path, save=train.save_picture):
        if path.parent != Path("."):
            raise OSError(errno.EACCES, "Permission denied", str(path))
        save(columns, path)
    monkeypatch.setattr(train, "save_picture", refuse)
    assert pretrain()["epoch"] == 2
    train.main(["--eval", "runs/mae", "--workers", "0"])
    said = capsys.readouterr().out
    assert "cannot write runs/mae/recon.png: Permission denied" in said
    assert said.index("psnr_masked  psnr") < said.index("cannot write runs/mae/eval_mae.png")
    assert Path("eval_mae.png").exists()


def test_the_environment(pretrain, folder, monkeypatch, refused):
    """RANK of another program does not matter in a world of one. Otherwise, one line says what is
    missing, and so it does for a device or a compiler."""
    words = ["--data", folder, *TINY, *DECODER, "--name"]
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train.main([*words, "alone"])["epoch"] == 2
    monkeypatch.setenv("WORLD_SIZE", "")                   # a variable that is not set
    assert train.main([*words, "empty"])["epoch"] == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused(train.main, [*words, "x"], "WORLD_SIZE is 4", "MASTER_ADDR", "torchrun")
    refused(train.main, ["--eval", "x"], "--eval runs in one process")
    monkeypatch.delenv("WORLD_SIZE")
    refused(train.main, [*words, "x", "--device", "cuda"], "--device cuda", "use cpu")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: 1 / 0)
    refused(train.main, [*words, "x", "--compile"], "--compile", "division by zero", "g++")
    assert not Path("runs/x").exists()


def test_causes_are_named(pretrain, refused, monkeypatch, capsys):
    """Messages have the cause's own words: an unknown method, another version of a method, files
    that torch cannot read."""
    pretrain("--epochs", "0")
    content = torch.load("runs/mae/last.pt", weights_only=True)
    torch.save({**content, "method": "nir"}, "nir.pt")
    refused(train.main, ["--eval", "nir.pt"], "nir.pt", "method nir", "METHODS")
    torch.save({**content, "config": {**content["config"], "new": 1}}, "later.pt")
    refused(train.load_model, "later.pt", "later.pt does not fit MAE as it is now", "'new'")
    torch.save({**content, "source": "another text"}, "edited.pt")
    train.load_model("edited.pt")
    assert "edited.pt was trained with another version" in capsys.readouterr().out
    monkeypatch.setattr(torch, "load", lambda *_, **__: 1 / 0)
    refused(train.main, ["--init", "runs/mae", "--name", "x"], "mae/last.pt", "division by zero")
