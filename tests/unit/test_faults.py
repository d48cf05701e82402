"""What goes wrong: command lines, checkpoints, images, kills, full disks, losses that are not
finite. Invalid input ends with exit code 2 and one line, and no run is lost."""

import errno
import io
import json
import math
import os
import shutil
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

import finetune
import train
from tests import curves, evaluate
from tests.unit.conftest import (DECODER, HERE, TINY, ended, fork, same, script, write_pictures)
from vit import InputError

# ---------------------------------------------------------------------------------- command lines
MAINS = {"train": train.main, "eval": evaluate.main, "tune": finetune.main, "test": finetune.main}
BASE = {"train": ["--data", "data", "--name", "new", *TINY],
        "eval": ["--workers", "0"],
        "tune": ["--checkpoint", "runs/mae/last.pt", "--data", "data", "--name", "new",
                 *TINY[8:], "--epochs", "1"],
        "test": ["--checkpoint", "runs/tuned/last.pt", "--mode", "eval", "--workers", "0"]}
COMMANDS = """
train | --epoch 5                              | --epoch
train | --batch-size 4                         | arguments: --batch-size 4 ; see --batch_size:
train | -learning-rate=4 --prediction_ratio 1  | -learning-rate=4 --prediction_ratio 1 ; see --lr:
train | –mask_ratio .5                         | arguments: –mask_ratio .5 ; see --mask_ratio:
train | --flip False                           | arguments: False ; --no-flip ; no value
train | --resume runs/mae                      | arguments: runs/mae ; --resume ; no value
train | --device cuda:1                        | 'cuda:1' ; CUDA_VISIBLE_DEVICES=1
tune  | --drop-path 0.1                        | arguments: --drop-path 0.1 ; see --drop_path: drop
train | --batch_size 41                        | --batch_size 41 ; 40
train | --lr nan                               | --lr
train | --betas 0.9,b                          | --betas ; '0.9,b'
train | --betas 0.9                            | --betas ; '0.9'
train | --betas 0.9,1.5                        | --betas ; 1.5 must be between 0 and 1
train | --epochs 3 --warmup_epochs 3           | --warmup_epochs 3.0 ; below --epochs 3
train | --lr 1e-4 --min_lr 1e-2                | --min_lr 0.01 ; 0.0001
train | --init runs/mae --heads 1              | runs/mae/last.pt has 2 heads, not --heads 1
tune  | --heads 1                              | runs/mae/last.pt has 2 heads, not --heads 1
tune  | --mix_ratio 0.7 --mixup 0.8            | --mix_ratio needs --mixup 0
train | --patch_size 4,0                       | --patch_size
train | --data nowhere                         | --data nowhere
train | --device cuda                          | --device cuda is not available
train | --data empty                           | empty
train | --name mae                             | runs/mae ; --resume ; --overwrite ; --name
train | --name mae --resume --overwrite        | --resume and --overwrite
train | --name mae --resume --depth 1 --heads 1 | depth was 2, is 1; heads was 2, is 1
train | --name mae --resume --data other --batch_size 2 | class names was ['a', 'b'], is ['c', 'd']
train | --name mae --resume --seed 1           | seed was 0, is 1
train | --name mae --resume --optimizer sgd    | optimizer was adamw, is sgd
tune  | --name tuned --resume --labels 0.5     | images was 40, is 20
train | --name mae --overwrite --init runs/mae | --overwrite would remove ; another --name
train | --name mae --overwrite --init link.pt  | --overwrite would remove link.pt
train | --name mae --overwrite --data runs/mae/own.pt | --overwrite would remove ; own.pt
train | --method imae --teacher linked/last.pt --name mae --overwrite | --overwrite would remove
tune  | --name mae --overwrite                 | --overwrite would remove ; runs/mae/last.pt
tune  | --mode knn --resume                    | knn writes no run: leave out --name --resume
train | --name tuned --resume                  | method was classifier, is mae
train | --method imae --same_class 0.5 --data flat/up/data/val/a --batch_size 1 | --same_class 0.5
train | --method imae --teacher runs/mae --patch_size 8 | teacher
eval  | runs/tuned                             | runs/tuned
eval  | runs/mae runs/large                    | runs/large
tune  | --data flat/up/data/val/a              | train/CLASS/ ; val/CLASS/
tune  | --part teacher                         | --part teacher ; last.pt has only ; encoder
tune  | --pool means                           | --pool means ; joined
tune  | --dim 32                               | the file has (16, ; the model (32,
tune  | --mode linear --batch_size 4 --accum 4 | --batch_size 4 ; BatchNorm
test  | --checkpoint runs/mae/last.pt          | runs/mae/last.pt
test  | --img_size 32 --lr 1 --pool mean       | --img_size 32 --lr 1 --pool
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
    (root / "linked").symlink_to("runs/mae")
    (root / "link.pt").symlink_to("runs/mae/last.pt")
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


# ------------------------------------------------------------------------- checkpoints of strangers
class Payload:
    def __reduce__(self):
        return Path("ran").touch, ()                       # the code that must not run


BROKEN = {  # part of the message: from a good file's bytes and content, broken bytes or content
    "damaged": lambda file, content: file[:len(file) // 2],
    "GLOBAL getattr": lambda file, content: {**content, "extra": Payload()},
    "is no ViT": lambda file, content: {f"x.{k}": v for k, v in content["model"].items()},
    "tests/docs/REFERENCE.md": lambda file, content: torch.zeros(3),
    "GLOBAL pathlib": lambda file, content: {**content, "data": Path("data")},
    "GLOBAL torch.nn.modules.linear.Linear": lambda file, content: torch.nn.Linear(2, 2),
    "operand 60": lambda file, content: b"<html>"}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(desk, refused, name):
    """A broken checkpoint is refused by its name, and the line says why. No code in it runs."""
    good, bad = Path("runs/mae/last.pt"), Path("bad.pt")
    content = BROKEN[name](good.read_bytes(), train.read_checkpoint(good))
    bad.write_bytes(content) if isinstance(content, bytes) else torch.save(content, bad)
    refused(train.main, [*BASE["train"], "--init", "bad.pt"], "bad.pt", name)
    assert not Path("ran").exists()


# ------------------------------------------------------------------------------------------ images
def write_broken(folder):
    """Write files that cannot be read, each for its own reason, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("torn.jpg", "nothing.jpg", "text.jpg")]
    Image.effect_noise((64, 64), 99).save(files[0])
    torn = files[0].read_bytes()
    for file, content in zip(files, (torn[:len(torn) // 2], b"", b"a cat, sitting")):
        file.write_bytes(content)
    files.append(folder / "1.tif")                         # 32 bits
    Image.new("F", (16, 16), 0.5).save(files[-1])
    return files


@pytest.mark.parametrize("words", [[], ["--img_size", "8"]])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, words):
    """In memory and in files, others replace unreadable files, which warnings name, in training and
    in validation."""
    monkeypatch.chdir(tmp_path)
    write_pictures(Path("data/val"), "ab", 6)
    write_pictures(Path("data/train"), "ab", 60)
    bad = write_broken(Path("data/train/a")) + write_broken(Path("data/val/b"))
    with pytest.warns(UserWarning) as said:
        train.main(["--data", "data", *TINY, *DECODER, *words])
    lines = [str(warning.message) for warning in said]
    assert all(any(f"cannot read {path}:" in line for line in lines) for path in bad)


def test_a_broken_file_warns_once(tmp_path, monkeypatch):
    """Workers that live for a run, and those of each validation, warn once for each file, and the
    end counts the files."""
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        write_pictures(Path("data", part), "ab", 70)
        Path("data", part, "a/3.png").write_bytes(b"")
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: print(text, file=sys.stderr))
    words = ["--data", "data", *TINY, *DECODER, "--img_size", "8", "--epochs", "3"]
    code, lines = ended(fork(script, "train.py", *words, "--workers", "2"))
    assert code == 0 and len([line for line in lines if "cannot read" in line]) == 2, lines
    assert "note    2 image files cannot be read" in Path("out").read_text()


@pytest.mark.filterwarnings("ignore:cannot read")
def test_what_replaces_an_image(tmp_path):
    """Other images of files, with their labels, replace unreadable ones, and none does so often.
    Readable images are drawn as ever. If most cannot be read, the run ends."""
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 40)
    for i in range(30):                                    # these sort together
        (tmp_path / f"train/a/{i}.png").write_bytes(b"")
    data, _, size = train.open_data(str(tmp_path), HERE, (8, 8))
    read = train.Transformed(data, partial(train.center_crop, img_size=size))
    images, labels = zip(*(read[5, i] for i in range(80)))
    good = [i for i in range(80) if Path(os.fsdecode(data.images[i])).stat().st_size]
    assert len(good) == 50
    every = torch.stack([images[i] for i in good])
    drawn = [good[(every == image).all((1, 2, 3)).nonzero().item()] for image in images]
    assert data.labels[drawn].tolist() == [*labels] and all(drawn[i] == i for i in good)
    assert max(map(drawn.count, good)) < 6
    data, *_ = train.open_data(str(tmp_path), HERE)        # in memory; a is red, b is blue
    assert torch.equal(data.images.float().mean((2, 3)).argmax(1), 2 * data.labels)
    for file in sorted(tmp_path.rglob("train/*/*.png"))[1:]:
        file.write_bytes(b"")
    with pytest.raises(InputError, match="cannot read ten images in a row"):
        [read[5, i] for i in range(80)]


@pytest.mark.parametrize("kind, name", [("uint16", "x.png"), ("uint16", "x.tif"),
                                        ("int32", "x.tif"), ("float32", "x.tif")])
def test_files_of_other_depths(tmp_path, capsys, kind, name):
    """16 bits of which only 12 are used get a line, because they become black. 32 bits are refused,
    and so are formats that are not images, whatever their name: EPS would run Ghostscript."""
    for i in range(4):
        pixels = np.arange(256).reshape(16, 16).astype(kind)
        Image.fromarray(16 * pixels).save(tmp_path / f"{i}{name}")
    if kind == "uint16":
        train.open_data(str(tmp_path), HERE)
        assert "hardly any contrast: see" in capsys.readouterr().out
        for i in range(4):
            Image.fromarray(256 * pixels).save(tmp_path / f"{i}{name}")
        assert train.open_data(str(tmp_path), HERE)[0].images.max() == 255
        assert "hardly any contrast" not in capsys.readouterr().out
    else:
        with pytest.raises(InputError, match="32-bit images are not supported"):
            train.open_data(str(tmp_path), HERE)
    Image.new("RGB", (9, 9)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "eps.png")
    with pytest.raises(InputError, match="cannot identify image file"):
        train.read_image(tmp_path / "eps.png")


def test_cifar_without_a_network(tmp_path, monkeypatch, refused):
    """The line says which file to put where."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", urlopen_without_network)
    refused(train.main, "--data cifar10", "cifar-10-python.tar.gz", "the folder `data`")


def urlopen_without_network(*_, **__):
    raise URLError("no network")


# ------------------------------------------------------------------- streams, processors, processes
class Idle(io.StringIO):
    """A stream like IDLE's: no `reconfigure`, and called a terminal."""

    def isatty(self):
        return True

    reconfigure = property()


def test_without_a_terminal(pretrain, monkeypatch):
    """In IDLE and notebooks, a run prints readable lines. A script's `shell` has the same effect."""
    out, err = Idle(), Idle()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    train.shell(pretrain)
    assert "epoch 2: loss" in out.getvalue() and err.getvalue() == ""


@pytest.mark.parametrize("stream", [None, SimpleNamespace(write=len, flush=list)])
def test_streams_that_are_not_there(pretrain, monkeypatch, stream):
    """Programs without a console, e.g. pythonw, have no stderr, and some streams lack isatty."""
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, stream)
    assert pretrain()["epoch"] == 2


@pytest.mark.parametrize("facts", [{"avx512_bf16": False}, {"avx512_bf16": True}, {}, None])
def test_a_slow_precision(pretrain, monkeypatch, capsys, facts):
    """A CPU without bf16 gets a line; one that is not known, e.g. by PyTorch 2.9, does not."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts, raising=False)
    if facts is None:
        monkeypatch.delattr(torch.cpu, "get_capabilities")
    pretrain("--amp", "bf16", "--epochs", "0")
    assert ("--amp bf16 is slower" in capsys.readouterr().out) == (facts == {"avx512_bf16": False})


def test_processes_that_see_different_folders(pretrain, monkeypatch, refused):
    """One node resumes, another, with a disk of its own, would start anew: none trains."""
    pretrain()
    gather = train.Process.gather

    def seen(self, value):
        return [value, 0] if isinstance(value, int) and value == 2 else gather(self, value)
    monkeypatch.setattr(train.Process, "gather", seen)
    refused(lambda words: pretrain(*words), ["--resume", "--epochs", "3"], "epochs, [2, 0]",
            "runs/mae")


# ------------------------------------------------------------------------------ kills and full disks
@pytest.mark.parametrize("error", [
    RuntimeError("unexpected pos 1308672 vs 1308560"),     # how torch's writer says it
    OSError(errno.ENOSPC, "No space left on device")])
def test_a_full_disk(words, monkeypatch, refused, error):
    """One line names the file. last.pt stays as it was, and no part of a file is left."""
    train.main(words("full", 1))

    def fill(_, new):
        new.write_bytes(b"half")
        raise error
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fill)
        refused(lambda words: train.shell(partial(train.main, words)), words("full", 2),
                "cannot write runs/full/last.pt")
    assert train.read_checkpoint("runs/full")["epoch"] == 1
    assert not [*Path("runs/full").glob("*tmp*")]
    assert train.main(words("full", 2))["epoch"] == 2


@pytest.mark.parametrize("owner, name, file", [
    (Path, "write_text", "log.jsonl"), (Image.Image, "save", "recon.png"),
    (curves, "draw", "curves.svg")])
def test_a_disk_that_is_full_after_the_checkpoint(words, monkeypatch, refused, owner, name, file):
    """One line names the file. With more room, --resume writes it, although no epoch is left."""
    def fill(*inputs, **_):
        new, = [x for x in inputs if isinstance(x, Path)]
        new.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fill)
        refused(lambda words: train.shell(partial(train.main, words)),
                [*words("full", 2), "--eval_every", "2"], f"runs/full/{file}", "No space left")
    folder = Path("runs/full")
    left = {path.name for path in folder.iterdir()}
    assert "last.pt" in left and file not in left and not [*folder.glob("*tmp*")]
    assert train.main(words("full", 2))["epoch"] == 2
    assert len(rows("full")) == 2 and Image.open(folder / "recon.png").load()
    assert left | {path.name for path in folder.iterdir()} == {
        "curves.svg", "last.pt", "log.jsonl", "recon.png"}


def test_a_folder_that_cannot_be_written(words, monkeypatch, refused, spy):
    """This is found before the first step."""
    steps = spy(train, "train_step", lambda *_: 1)
    Path("runs").mkdir()
    Path("runs/full").touch()
    refused(lambda words: train.shell(partial(train.main, words)), words("full", 2), "runs/full")
    assert not steps


def test_resuming_with_other_files(pretrain, capsys, refused):
    """A run keeps its teacher, whatever its path, and does not read another --init."""
    for seed in "123":
        pretrain("--epochs", "0", "--seed", seed, name=seed)
    words = ["--method", "imae", "--teacher"]
    pretrain(*words, "runs/1", "--init", "runs/1", name="pairs")
    Path("runs/1").rename("runs/moved")
    refused(lambda words: pretrain(*words, name="pairs"), [*words, "runs/2", "--resume"],
            "--teacher was runs/1, with other weights")
    capsys.readouterr()
    pretrain(*words, "runs/moved", "--resume", "--init", "runs/3", name="pairs")
    assert "note    --init runs/3 is not used" in capsys.readouterr().out
    pretrain(*words, "runs/moved", "--resume", name="pairs")
    assert "is not used" not in capsys.readouterr().out


def test_weights_only_are_not_resumed(words, refused):
    """The line says how to start from them. If images were added since, it says the same."""
    train.main(words("mae", 1))
    last = train.read_checkpoint("runs/mae")
    last["flags"]["images"] += 1
    torch.save(last, "runs/mae/last.pt")
    refused(train.main, words("mae", 2), "images was 41, is 40",
            "--init (finetune.py: --checkpoint) runs/mae/last.pt")
    torch.save({name: last[name] for name in ("method", "config", "model")}, "runs/mae/last.pt")
    refused(train.main, words("mae", 2), "only weights",
            "--init (finetune.py: --checkpoint) runs/mae/last.pt")



@pytest.mark.parametrize("owner, name", [
    (train, "find_images"), (train.MAE, "reconstruct"), (os, "replace")])
def test_a_run_that_has_saved_nothing_leaves_nothing(pretrain, monkeypatch, owner, name):
    """The same command can be repeated, and a bug keeps its traceback."""
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(owner, name, lambda *_, **__: None + 1)
        train.shell(pretrain)
    assert not Path("runs/mae").exists() and sys.stdout.line_buffering     # as in a log file
    assert pretrain()["epoch"] == 2


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
            Path(inputs[1]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, instead)                          # only in this process
    script("train.py", *words)


def rows(name):
    """Return the rows of a log, without times."""
    every = [json.loads(line) for line in open(f"runs/{name}/log.jsonl")]
    return [{k: row[k] for k in row.keys() - {"img_s", "wait"}} for row in every]


POINTS = [  # owner, name, call, and the epoch that last.pt holds then
    (train.MAE, "forward", 3, 0), (Image.Image, "save", 1, 1), (torch, "save", 1, 1),
    (os, "replace", 3, 1), (json, "dumps", 4, 3)]         # a resumed run first writes log, picture


def test_kills(words):
    """A run that is killed at each of POINTS has the weights, optimizer state and logs of one that
    never was. last.pt is always whole."""
    more = ["--img_size", "8"]                             # images are read from files
    train.main([*words("straight", 4), *more])
    for owner, name, call, epoch in POINTS:
        process = fork(killed, owner, name, call, *words("killed", 4), *more)
        assert ended(process)[0] == -signal.SIGKILL
        assert (train.read_checkpoint("runs/killed")["epoch"] if epoch else 0) == epoch
    assert ended(fork(script, "train.py", *words("killed", 4), *more))[0] == 0
    assert rows("killed") == rows("straight") and not [*Path("runs/killed").glob("*tmp*")]
    a, b = (train.read_checkpoint(f"runs/{name}") for name in ("killed", "straight"))
    assert a["epoch"] == b["epoch"] and same(a["model"], b["model"])
    a, b = (content["optimizer"]["state"] for content in (a, b))
    assert a.keys() == b.keys() and all(same(a[i], b[i]) for i in a)


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
    (part(labels=torch.arange(8) % 2 + 1), part(), "labels must be from 0 to 1"),
    ((part()[0].movedim(1, 3), *part()[1:]), part(), "use images.movedim(3, 1)"),
    (part(labels=torch.rand(8)), part(), "integer labels; float32"),
    (part(labels=torch.zeros(8, 3).long()), part(), "N integer labels; (8, 3)"),
    ((part()[0], part()[1]), part(), '{"train": (images, labels, class names), "val": ...}'),
    (part(0), part(), "(0, 3, 8, 8)"),
    (part(images=torch.zeros(8, 3, 8, 8)), part(), "uint8; float32"),
    (part(images=[*part()[0]]), part(), "with tensors: see"),
    (part(images=np.zeros((8, 3, 8, 8), "uint8")), part(), "with tensors: see")])
def test_what_a_file_of_tensors_must_hold(tmp_path, refused, monkeypatch, train_part, val_part,
                                          words):
    monkeypatch.chdir(tmp_path)
    torch.save({"train": train_part, "val": val_part}, "own.pt")
    refused(train.main, ["--data", "own.pt", "--patch_size", "4", "--batch_size", "2"],
            *words.split("; "))


LAYOUTS = {  # files: parts of the message, or (images, classes) of train and val
    "x/train/a/0.png x/val/a/1.png": "the folder that has train/",
    "images/train/0.png images/val/1.png labels/0.txt": "has train/ ; images/train/0.png",
    "train/a/0.png train/b/1.png":
        "has no val/, but train/: ; \"folds\" in tests/docs/HOWTO.md ; to pretrain ; {}/train",
    "Training/a/0.png Testing/a/1.png": "has train/ (in lower case) ; see ['Training/a/0.png']",
    "0.png 1.png runs/mae/log.jsonl runs/mae/last.pt runs/mae/recon.png": (1, "", 1, ""),
    "0.png a/1.png a/log.jsonl": (1, "", 1, ""),           # not a run
    "train/0.png test/1.png": "has no val/, but test/, train/: rename ; --data {}/train",
    "val/a/0.png": "has no train/, but val/: ; --data {}/val",
    "train/a/0.gif val/a/0.png": "{}/train has 0 images",
    "0.png": "has 1 images (.jpg ; at least 2",
    "train/a/0.png val/images/1.png": (1, "a", 1, "images"),           # Tiny ImageNet
    "train/a/0.png val/0.png val/1.png": (1, "a", 2, ""),  # ImageNet
    "train/train/0.png val/train/0.png": (1, "train", 1, "train"),
    "train/a/0.png train/1.png val/a/2.png": (1, "a", 1, "a"),
    "train/0.png train/1.png val/2.png": (2, "", 1, ""),
    "train/a/0.png valid/a/1.png": (1, "a", 1, "a"),
    "train/a/0.png validation/a/1.png test/a/2.png": (1, "a", 1, "a"),
    "valid/0.png invalid/1.png": (1, "", 1, ""),           # two classes of another task
    "test/0.png a/1.png": (1, "", 1, ""),
    "train/images/0.png train/labels/0.txt val/images/1.png val/labels/1.txt":
        (1, "images", 1, "images"),
    "train/a/x/0.png train/b/x/1.png val/a/2.png val/b/3.png": (2, "ab", 2, "ab")}


@pytest.mark.parametrize("files", LAYOUTS)
def test_layouts_of_folders(tmp_path, refused, files):
    """Each layout is read, or a line says what lies there and what to do."""
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / file, "PNG")
    if isinstance(LAYOUTS[files], str):
        parts = LAYOUTS[files].format(tmp_path).split(" ; ")
        refused(lambda x: train.open_data(x, HERE), str(tmp_path), *parts)
    else:
        found = train.open_data(str(tmp_path), HERE)[:2]
        assert LAYOUTS[files] == tuple(x for data in found for x in (
            len(data.labels), "".join(data.classes)))
        assert all((data.labels.min() < 0) == (not data.classes) for data in found)


def test_folders_without_labels(tmp_path, monkeypatch, refused):
    """Images in train/ and val/ pretrain without class folders. Fine-tuning says what is missing,
    or which classes are in one part only."""
    monkeypatch.chdir(tmp_path)
    write_pictures(Path("data"), ("train", "val"), 8)
    train.main(["--data", "data", *TINY, *DECODER])
    words = ["--checkpoint", "runs/mae_data", *TINY[8:]]
    refused(finetune.main, words, "train/CLASS/", "not 0 and 0", "\"folds\" in tests/docs/HOWTO.md")
    write_pictures(Path("labels/train"), "abc", 4)
    write_pictures(Path("labels/val"), "ab", 4)
    refused(finetune.main, [*words, "--data", "labels"], "not 3 and 2 (only in one: c)")
