"""What goes wrong: command lines, checkpoints, images, kills, full disks, losses that are not
finite. Invalid input ends in one line, and no run is lost."""

import errno
import json
import math
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import finetune
import train
from tests.conftest import (DECODER, TINY, ended, fork, same, script, settings, torchrun,
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
train | --epoch 5                              | unrecognized arguments: --epoch 5
train | --epochs 1 --warmup_epochs 2           | --warmup_epochs 2.0 exceeds --epochs 1
train | --batch_size 41                        | --batch_size 41 exceeds the 40 training images
train | --accum 3                              | --batch_size 8 is not divisible by ; --accum 3
train | --decoder_depth 0                      | --decoder_depth: 0 must be finite and at least 1
train | --mask_ratio 0.99                      | mask_ratio 0.99 leaves 0 of 16
train | --lr nan                               | --lr ; nan must be finite and at least 0
train | --blr inf                              | --blr: inf must be finite and at least 0
train | --betas 0.9                            | --betas: 0.9 must be 2 numbers
train | --betas 0.9,1                          | --betas: 1 must be from 0 to 0.999999
train | --img_size 3x4                         | --img_size: invalid N or H,W value: '3x4'
train | --patch_size 4,0                       | --patch_size: 0 must be finite and at least 1
train | --data nowhere                         | --data nowhere is not shapes, cifar10, cifar100
train | --data empty                           | --data empty has 0 images ; at least two
train | --data unsorted                        | unsorted: train/ and val/ need class folders
train | --data no_val           | no_val has train/ but no val/ ; train.py takes --data no_val/train
train | --data differ                          | only one of train/ and val/ has images of
train | --name mae --data shapes               | runs/mae already holds a run ; --resume ; --over
train | --name mae --resume --depth 1 --heads 1 | runs/mae/last.pt cannot be resumed: depth was 2, \
is 1; heads was 2, is 1. Its command was python
train | --name mae --resume --data other --batch_size 2 --seed 1 --train_images 3 | \
data was data, is other; files was 52 images ; is 8 images ; seed was 0, is 1
tune  | --name tuned --resume --labels 0.5     | labels was 1.0, is 0.5
train | --name mae --resume --optimizer sgd    | cannot be resumed: optimizer was adamw, is sgd
train | --name tuned --resume                  | cannot be resumed: method was classifier, is mae
train | --method imae --same_class 0.5 --data flat | --same_class 0.5 needs class folders
train | --method imae --teacher runs/tuned     | the teacher is not an MAE
train | --method imae --teacher runs/mae --patch_size 8 | (4, 4), this model (8, 8)
eval  | --eval gone.pt                         | No such file ; gone.pt
eval  | --eval own.pt                          | own.pt does not say which data it was trained on
tune  | --checkpoint=                          | No such file ; last.pt
tune  | --data flat                            | --data flat has 0 classes: put the images into
tune  | --dim 32                  | runs/mae/last.pt does not fit: ; the file has (16,), the
tune  | --data single                          | --data single has 1 classes
tune  | --mode linear --accum 8                | --batch_size 8: BatchNorm needs two images
tune  | --labels 0                             | --labels: 0 must be from 1e-06 to 1
test  | --checkpoint runs/mae/last.pt          | runs/mae/last.pt has no classification head
test  | --data other                           | trained on 2 classes ; c, d ...
test  | --img_size 32 --lr 1 --pool mean       | unrecognized arguments: --img_size 32 --lr 1 --pool
test  | --mode knn --epochs 5 --drop_path 0.1  | unrecognized arguments: --epochs 5 --drop_path 0.1
tune  | --mode linear --drop_path 0.1          | unrecognized arguments: --drop_path 0.1
eval  | --mask_ratio 0.6 --seed 1 --no-flip | unrecognized arguments: --mask_ratio 0.6 --seed 1 --no
train | --mask_ratios 0.6 --masks grid   | unrecognized arguments: --mask_ratios 0.6 --masks grid
"""
COMMANDS = [[part.strip() for part in row.split("|")] for row in COMMANDS.strip().splitlines()]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """Return a folder with good and bad data sets, and a run of each kind."""
    root = tmp_path_factory.mktemp("desk")
    for part, classes, n in (("data/train", "ab", 20), ("data/val", "ab", 6), ("flat", "x", 6),
                             ("no_val/train", "ab", 2), ("other/train", "cd", 2),
                             ("other/val", "cd", 2), ("differ/train", "ab", 2),
                             ("differ/val", "ac", 2),
                             ("single/train", "a", 2), ("single/val", "a", 2)):
        write_pictures(root / part, classes, n)
    for name in ("empty", "unsorted/train/.hidden", "unsorted/val"):
        (root / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, words in (("mae", []), ("imae", ["--method", "imae", "--teacher", "runs/mae"])):
            train.main([*BASE["train"], "--name", name, "--epochs", "1", *words])
        finetune.main([*BASE["tune"], "--name", "tuned"])
        content = train.read_checkpoint("runs/mae")
        torch.save({key: content[key] for key in ("method", "config", "model")}, "own.pt")
    return root


def listing(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.fixture
def desk(furnished, monkeypatch):
    """Enter the furnished folder. Afterwards, remove what the test has added, even if it failed."""
    monkeypatch.chdir(furnished)
    before = listing(furnished)
    yield furnished
    for path in sorted(listing(furnished).keys() - before.keys(), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind, words, parts", COMMANDS, ids=[words for _, words, _ in COMMANDS])
def test_wrong_command_lines(desk, refused, kind, words, parts):
    """One line says what is wrong, and no file changes."""
    before = listing(desk)
    refused(MAINS[kind], [*BASE[kind], *words.split()], *parts.split(" ; "))
    assert listing(desk) == before


def test_wrong_command_lines_in_processes(desk, refused, monkeypatch):
    """An error is printed once, whether all processes have it or only one."""
    def ranks(*words):
        time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / 10)         # Parser.error's
        more = ["--epoch", "1"] if os.environ["RANK"] == "1" else []
        script(*words, *more)
    for work, words, said in (
            (script, ["train.py", *BASE["train"], "--batch_size", "42"], "the 40 training images"),
            (script, ["finetune.py", *BASE["tune"], "--mode", "linear", "--batch_size", "2"],
             "--batch_size 2: BatchNorm needs two images"),
            (ranks, ["train.py", *BASE["train"]], "unrecognized arguments: --epoch 1")):
        code, lines = ended(fork(torchrun, work, *words))
        assert code != 0 and sum(said in line for line in lines) == 1, lines
    assert not (desk / "runs/new").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(train.main, BASE["eval"], "--eval runs in one process, not in 2")


# ------------------------------------------------------------------------- checkpoints of strangers

class Payload:
    def __reduce__(self):
        return Path("ran").touch, ()                       # the code that must not run


BROKEN = {  # from a good file's bytes and content: broken bytes or content
    "empty": lambda file, content: b"",
    "half": lambda file, content: file[:len(file) // 2],
    "code": lambda file, content: {**content, "extra": Payload()},
    "pickled code": lambda file, content: pickle.dumps({"model": Payload()}, 2),
    "other names": lambda file, content: {"epoch": 3, "state_dict": content["model"]}}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(desk, refused, name):
    """Commands that read a checkpoint refuse a broken one by name, and run no code from it."""
    good, bad = Path("runs/mae/last.pt"), Path("runs/bad/last.pt")
    bad.parent.mkdir()
    content = BROKEN[name](good.read_bytes(), train.read_checkpoint(good))
    bad.write_bytes(content) if isinstance(content, bytes) else torch.save(content, bad)
    before, why = listing(desk), [": EOFError"] if name == "empty" else []
    for kind, words in (("train", "--name bad --resume"), ("train", "--init runs/bad"),
                        ("eval", "--eval runs/bad/last.pt"),
                        ("train", "--method imae --teacher runs/bad"),
                        ("tune", "--checkpoint runs/bad")):
        refused(MAINS[kind], [*BASE[kind], *words.split()], f"{bad}", *why)
    assert listing(desk) == before


# ------------------------------------------------------------------------------------------ images

def write_broken(folder):
    """Write three files that cannot be read, each for its own reason, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("torn.jpg", "nothing.jpg", "text.jpg")]
    Image.effect_noise((64, 64), 99).save(files[0])
    torn = files[0].read_bytes()
    for file, content in zip(files, (torn[:len(torn) // 2], b"", b"a cat, sitting")):
        file.write_bytes(content)
    return files


@pytest.mark.parametrize("side, words", [(16, []), (40, ["--workers", "2"])])
def test_broken_images_are_replaced(tmp_path, monkeypatch, capfd, side, words):
    """In memory and in files, each broken image is replaced by the next one and named once. PIL
    refuses images of more than twice its limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    write_pictures(Path("data/val"), "ab", 3, side)
    bad = write_broken(Path("data/train/a"))
    write_pictures(Path("data/train"), "ab", 14, side)     # 33 files
    for name, mode, value in (("1.tif", "F", 0.5), ("2.tif", "I", -1), ("3.tif", "I", 2 ** 16)):
        bad.append(Path("data/train/a", name))             # 32 bits
        Image.new(mode, (side, side), value).save(bad[-1])
    bad.append(Path("data/train/a/0.png"))
    Image.new("RGB", (70, 70)).save(bad[-1])
    train.main(["--data", "data", *TINY, *DECODER, "--img_size", "16", *words])
    said = "".join(capfd.readouterr()).splitlines()
    assert [sum(str(path) in line for line in said) for path in bad] == [1] * len(bad)
    rows = [json.loads(line) for line in open("runs/mae_data/log.jsonl")]
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_what_replaces_an_image(tmp_path):
    """The next readable file and its label replace an image; the first file follows the last."""
    write_pictures(tmp_path / "val", "ab", 1)
    write_pictures(tmp_path / "train", "ab", 2)
    for broken in ("a/1.png", "b/1.png"):
        (tmp_path / "train" / broken).write_bytes(b"")
    files = [str(tmp_path / "train" / name) for name in ("a/0.png", "b/0.png")]
    images = torch.stack([train.read_image(file) for file in files])
    part, *_ = train.open_data(str(tmp_path), None, settings())        # a0 a1 b0 b1
    assert torch.equal(part.images, images[[0, 1, 1, 0]]) and part.labels.tolist() == [0, 1, 1, 0]
    for broken in ("val/a/0.png", "val/b/0.png"):
        (tmp_path / broken).write_bytes(b"")
    with pytest.raises(InputError, match="none of 2 images can be read"):
        train.open_data(str(tmp_path), (8, 8), settings())             # before any training
    for file in files:
        Path(file).write_bytes(b"")
    with pytest.raises(InputError, match="none of 4 images can be read"):
        train.open_data(str(tmp_path), None, settings())


# ------------------------------------------------------------------------------------------- kills

def alike(name, other="straight"):
    """Assert that two runs have the same weights, optimizer state and log, except for times."""
    for a, b in zip(*([json.loads(line) for line in open(f"runs/{n}/log.jsonl")]
                      for n in (name, other)), strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] == b[k] for k in a if k != "img_s" and k != "wait" and not k.endswith("_s"))
    a, b = (train.read_checkpoint(f"runs/{n}/last.pt") for n in (name, other))
    assert a["epoch"] == b["epoch"] and same(a["model"], b["model"])
    a, b = (content["optimizer"]["state"] for content in (a, b))
    assert a.keys() == b.keys() and all(same(a[i], b[i]) for i in a)
    assert not [path for path in Path("runs", name).iterdir() if "tmp" in path.name]


@pytest.fixture
def words(pretrain, folder):
    """words(name, epochs) returns the flags of a run that can be resumed, in a new folder."""
    return lambda name, epochs: ["--data", str(folder), *TINY, *DECODER, "--name", name, "--epochs",
                                 str(epochs), "--resume"]


def die(*inputs, **more):
    """Write half of a file, if one is being written, and be killed."""
    if len(inputs) > 1 and hasattr(inputs[1], "write"):
        inputs[1].write(b"half")
        inputs[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)


def killed(owner, name, call, *words):
    """Run train.py, and be killed in call number `call` of owner.name."""
    function, calls = getattr(owner, name), []

    def instead(*inputs, **more):
        calls.append(1)
        return (die if len(calls) == call else function)(*inputs, **more)
    setattr(owner, name, instead)                          # only in this process
    script("train.py", *words)


POINTS = [  # owner, name, call, and the epoch that last.pt holds then
    (train.MAE, "forward", 3, 0), (Image.Image, "save", 1, 1), (train.MAE, "reconstruct", 1, 1),
    (torch, "save", 1, 1), (os, "replace", 1, 1), (json, "dumps", 2, 2), (torch, "save", 2, 3)]


def test_kills(words):
    """A run that is killed at each of POINTS equals one that never was. last.pt is always whole."""
    more = ["--img_size", "8"]                             # images are read from files
    train.main([*words("straight", 5), *more])
    for owner, name, call, epoch in POINTS:
        process = fork(killed, owner, name, call, *words("killed", 5), *more)
        assert ended(process)[0] == -signal.SIGKILL
        assert (train.read_checkpoint("runs/killed")["epoch"] if epoch else 0) == epoch
    assert ended(fork(script, "train.py", *words("killed", 5), *more))[0] == 0
    alike("killed")


def dying(*words):
    """Do as script, but kill rank 1 in the third epoch, once."""
    if os.environ["RANK"] == "1" and not Path("died").exists():
        Path("died").touch()
        killed(train.MAE, "forward", 13, *words)
    script("train.py", *words)


def test_a_kill_of_one_of_two_processes(words):
    """torchrun ends the other process and starts both again. The results are as without a kill."""
    assert ended(fork(torchrun, script, "train.py", *words("straight", 3)))[0] == 0
    assert ended(fork(partial(torchrun, restarts=1), dying, *words("killed", 3)))[0] == 0
    assert "resumed after epoch 2" in Path("out").read_text()
    alike("killed")


def as_machine(*words):
    """Do as script, as on a machine of its own with its own --runs, and save its exit code."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        script("train.py", *words, "--runs", f"runs{rank}")
    except SystemExit as stop:
        Path(f"code{rank}").write_text(str(stop.code))


def test_resuming_on_machines_without_a_shared_disk(words):
    """If only the first machine has a checkpoint, both stop with a line each. Nothing is lost."""
    assert ended(fork(torchrun, as_machine, *words("x", 2)))[0] == 0
    last, log = (Path("runs0/x", name) for name in ("last.pt", "log.jsonl"))
    before = last.read_bytes(), log.read_bytes()
    assert not Path("code0").exists() and not Path("runs1/x/last.pt").exists()
    _, lines = ended(fork(torchrun, as_machine, *words("x", 3)))
    assert [Path(f"code{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert len(lines) == 2 and (last.read_bytes(), log.read_bytes()) == before
    for rank in range(2):
        assert any(f"the same runs{rank}/x/last.pt to resume" in line for line in lines), lines


@pytest.mark.parametrize("wide", [[], ["--dim", "64"]])    # tensors of more than a file's buffer
def test_a_full_disk(words, wide):
    """The last checkpoint stays, and one line says what happened."""
    resource = pytest.importorskip("resource", reason="Unix only")
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

@pytest.mark.parametrize("value, amp", [(math.nan, "fp32"), (math.inf, "fp32"), (math.nan, "fp16")])
def test_a_loss_that_is_not_finite_stops_within_the_epoch(words, monkeypatch, value, amp):
    """The third epoch, of 40 steps, stops before step 21. The second epoch's checkpoint is kept."""
    train.main(words("lost", 2))
    forward, calls = train.MAE.forward, []

    def losing(self, *inputs):
        loss, _ = forward(self, *inputs)
        calls.append(1)
        loss = loss * value if len(calls) > 3 else loss
        return loss, {"loss": loss.detach()}
    monkeypatch.setattr(train.MAE, "forward", losing)
    with pytest.raises(SystemExit, match="not finite at epoch 3, step .*, lr .*: use --clip"):
        train.main([*words("lost", 4), "--batch_size", "1", "--lr", "0.00123", "--amp", amp])
    assert len(calls) <= 20 and train.read_checkpoint("runs/lost")["epoch"] == 2


def breaking(monkeypatch, call, change):
    """Call change(weights, metrics) after this call of train_step, counted from 1."""
    step, calls = train.train_step, []

    def instead(net, *rest):
        metrics = step(net, *rest)
        calls.append(1)
        if len(calls) == call:
            change(next(net.parameters()).data, metrics)
        return metrics
    monkeypatch.setattr(train, "train_step", instead)


def test_weights_that_are_not_finite_are_not_written(words, monkeypatch):
    """If an epoch's last step breaks the weights after a finite loss, the epoch is not saved."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="not finite at epoch 2, "
                                                       "step 5, lr"):
        breaking(patch, 10, lambda weights, metrics: weights.fill_(math.nan))
        train.main(words("lost", 4))
    assert train.read_checkpoint("runs/lost")["epoch"] == 1
    train.main(words("lost", 4))
    train.main(words("straight", 4))
    alike("lost")


def test_a_scale_that_is_too_large(words, monkeypatch):
    """Steps whose gradients overflow are skipped until the scale fits, and a loss that overflows in
    such a step does not end the run. The run began without a scale."""
    train.main(words("large", 1))
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler",
                        lambda *inputs, **more: scaler(*inputs, init_scale=2.0 ** 22, **more))
    breaking(monkeypatch, 5, lambda weights, metrics: metrics.update(loss=torch.tensor(math.inf)))
    row = train.main([*words("large", 3), "--amp", "fp16"])
    content = train.read_checkpoint("runs/large")
    assert row["epoch"] == 3 and math.isfinite(row["loss"]) and content["scaler"]["scale"] < 2 ** 22
    assert content["history"][1]["loss"] == math.inf
    updates = {int(state["step"]) for state in content["optimizer"]["state"].values()}
    assert len(updates) == 1 and 0 < updates.pop() < 15
