"""What goes wrong: command lines, checkpoints, pictures, kills, full disks, losses that are not
finite. Each ends in one line, and no run is lost. And what must go right: any valid model."""

import errno
import json
import math
import os
import pickle
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import finetune
import train
from tests.conftest import (DECODER, TINY, ended, fork, same, script, shell, torchrun,
                            write_pictures)
from train import METHODS, method_arguments

# ---------------------------------------------------------------------------------- command lines

MAINS = {"train": train.main, "eval": train.main, "tune": finetune.main}
BASE = {"train": ["--data", "data", "--name", "new", *TINY],
        "eval": ["--eval", "runs/mae/last.pt", "--workers", "0"],
        "tune": ["--checkpoint", "runs/mae/last.pt", "--data", "data", "--name", "new",
                 *TINY[8:], "--epochs", "1"]}
COMMANDS = """
train | --depht 3                              | --depht
train | --prediction_ratio 0.5                 | --prediction_ratio
train | --epochs 1 --warmup_epochs 2           | --warmup_epochs 2 ; --epochs 1
train | --batch_size 41                        | --batch_size 41 is more than the 40 training
train | --accum 3                              | --batch_size 8 is not divisible by ; --accum 3
train | --betas 0.9                            | --betas 0.9 ; two numbers
train | --betas 0.9,2.0                        | --betas (0.9, 2.0) ; below 1
train | --betas nan,0.9                        | --betas (nan, 0.9) ; two numbers
train | --epoch 5                              | unrecognized: --epoch 5; did you mean --epochs?
train | --batch-size 5                         | did you mean --batch_size?
train | --mask_ratio 0                         | mask_ratio 0.0 is not between 0 and 1
train | --mask_ratio 0.99                      | mask_ratio 0.99 shows 0 of 16
train | --mask_ratio 75                        | --mask_ratio ; 75 is not a number from 0 to 1
train | --img_size 0                           | 0 is not a size in pixels, as in 32
train | --img_size abc                         | abc is not a size in pixels
train | --img_size 32,                         | --img_size ; '32,'
train | --img_size 100001 --patch_size 16 --data shapes | img_size ; 100001 ; patch_size ; 16
train | --img_size 16 --patch_size 5 | img_size 16x16 is not ; patch_size 5x5 ; 15x15 and 20x20
train | --data nowhere                         | --data nowhere is not shapes, cifar10, cifar100
train | --data empty                           | --data empty has 0 images ; two
train | --data no_val                          | no_val has train/, but no val/
train | --data flat_val                        | val/ needs a folder of images for each class
train | --data differ                          | only one of train/ and val/ has the class b
train | --device warp                          | --device ; 'warp'
train | --init nothing.pt                      | there is no checkpoint nothing.pt
train | --runs text.pt                         | text.pt/new
train | --name mae --data shapes               | runs/mae holds a run ; --resume ; --overwrite
train | --resume --overwrite                   | --overwrite: not allowed with argument --resume
train | --name mae --resume --depth 1          | runs/mae/last.pt cannot be resumed: depth ; 2
train | --name mae --resume --optimizer sgd    | cannot be resumed: optimizer was adamw, is sgd
train | --name imae --resume --method imae     | teacher was runs/mae/last.pt, is None
train | --device cuda                          | --device cuda is not there for 1 processes
train | --name tuned --resume                  | cannot be resumed: method was classifier, is mae
train | --method crossmae --feature_maps 1.5   | feature_maps 1.5 ; from 0 to 1
train | --method hypermae --pe_sigma inf       | --pe_sigma ; inf
train | --method minr --modulated_layers 1.5   | modulated_layers (1.5,) are not layers
tune  | --mode linear --batch_size 4 --accum 4 | --batch_size 4 ; two images for each
train | --method imae --same_class 2           | --same_class ; 2 is not a number from 0 to 1
train | --method imae --same_class 0.5 --data flat | --same_class 0.5 needs class folders
train | --method imae --teacher gone.pt        | there is no checkpoint gone.pt
train | --method imae --teacher runs/cross/last.pt | the teacher is not an MAE
train | --method imae --teacher runs/tuned/last.pt | the teacher is not an MAE
train | --method imae --teacher runs/mae/last.pt --patch_size 8 | (4, 4), this model (8, 8)
train | --method imae --teacher runs/mae/last.pt --img_size 8 | (16, 16), this model (8, 8)
train | --method imae --teacher runs/mae/last.pt --decoder_dim 32 | decoder_dim 64, this model 32
eval  | --eval                                 | --eval ; argument
eval  | --eval gone.pt                         | there is no checkpoint gone.pt
eval  | --eval runs/tuned/last.pt              | runs/tuned/last.pt ; train.py
tune  | --checkpoint data                      | no checkpoint data
tune  | --checkpoint=                          | --mode finetune needs --checkpoint FILE
tune  | --data flat                            | --data flat has no labels: give class folders
tune  | --dim 32 | runs/mae/last.pt does not fit: ; width 16 ; here width 32
tune  | --mask_ratio 0.5                       | --mask_ratio
tune  | --mode eval                            | runs/mae/last.pt has no head to classify with
tune  | --mode eval --checkpoint runs/tuned/last.pt --data other | knows 2 classes ; c, d ...
"""
ARGUMENTS = """
train | --method vae ; --epochs two ; --epochs -1 ; --eval_every 0 ; --batch_size 0 ; --momentum 2
train | --workers -1 ; --seed 99999999999999999999 ; --crop 2 ; --crop nan ; --lr nan ; --blr inf
train | --weight_decay -1 ; --clip_grad inf ; --optimizer lion ; --schedule step ; --amp fp8
train | --mask stripes ; --mask_ratio nan ; --depth 0 ; --decoder_depth 0 ; --decoder_dim 0
tune  | --mode probe ; --labels 1.5 ; --labels nan ; --mix_ratio 2 ; --mixup inf ; --erasing -1
tune  | --smoothing 2 ; --drop_path 2 ; --pool max ; --randaug 99 ; --k 0 ; --size giant
eval  | --mask_ratios nan ; --mask_ratios 2 ; --eval_images 0
"""
COMMANDS = [[part.strip() for part in row.split("|")] for row in COMMANDS.strip().splitlines()]
for line in ARGUMENTS.splitlines()[1:]:
    COMMANDS += [[line[:5].strip(), words, " ; ".join(words.split())]
                 for words in line[8:].split(" ; ")]


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """A working folder with data in all states, and a run of each kind."""
    root = tmp_path_factory.mktemp("desk")
    for part, classes, n in (("data/train", "ab", 20), ("data/val", "ab", 6), ("flat", "x", 6),
                             ("two", "x", 2), ("no_val/train", "ab", 2), ("flat_val", ["val"], 2),
                             ("flat_val/train", "ab", 2), ("other/train", "cd", 2),
                             ("other/val", "cd", 2), ("differ/train", "ab", 2),
                             ("differ/val", "ac", 2)):
        write_pictures(root / part, classes, n)
    (root / "empty").mkdir()
    (root / "text.pt").write_text("not a checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, words in (("mae", []), ("cross", ["--method", "crossmae"]),
                            ("imae", ["--method", "imae", "--teacher", "runs/mae/last.pt"])):
            train.main([*BASE["train"], "--name", name, "--epochs", "1", *words])
        finetune.main([*BASE["tune"], "--name", "tuned"])
    return root


def listing(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.fixture
def desk(furnished, monkeypatch):
    """There; afterwards, and even if the test fails, it is as it was."""
    monkeypatch.chdir(furnished)
    before = listing(furnished)
    yield furnished
    for path in sorted(listing(furnished).keys() - before.keys(), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("kind, words, parts", COMMANDS, ids=[words for _, words, _ in COMMANDS])
def test_wrong_command_lines(desk, refused, monkeypatch, kind, words, parts):
    def too_large(n, img_size, seed):                      # it would need all memory
        raise AssertionError("numbers are to be checked before data are made")
    monkeypatch.setattr(train, "draw_shapes", too_large)
    before, began = listing(desk), time.time()
    refused(MAINS[kind], [*BASE[kind], *words.split()], *parts.split(" ; "))
    assert listing(desk) == before and time.time() - began < 10


def test_wrong_command_lines_in_processes(desk, refused):
    done = shell("train.py", "--mask_ratio", "2")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        refused(train.main, BASE["eval"], "--eval runs in one process, not in 2")
    words = [*BASE["train"], "--data", "two", "--batch_size", "2"]     # more than pictures
    code, lines = ended(fork(torchrun, script, "train.py", *words))
    assert code != 0 and any("more than the 1 training images" in line for line in lines)
    assert not (desk / "runs/new").exists()


def lame(*words):
    """As script, but rank 1 does not find the data; the other would wait for it."""
    script("train.py", *words, *["--data", "gone"] * (os.environ["RANK"] == "1"))


def test_an_error_of_one_rank_ends_all(desk):
    code, lines = ended(fork(torchrun, lame, *BASE["train"]))
    assert code != 0 and any("--data gone is not shapes" in line for line in lines)


# ------------------------------------------------------------------------- checkpoints of strangers

class Payload:
    def __reduce__(self):
        return Path("ran").touch, ()                       # the code that must not run


READERS = {  # every way in
    "resume": ("train", ["--name", "bad", "--resume"]),
    "init": ("train", ["--init", "runs/bad/last.pt"]),
    "eval": ("eval", ["--eval", "runs/bad/last.pt"]),
    "teacher": ("train", ["--method", "imae", "--teacher", "runs/bad/last.pt"]),
    "checkpoint": ("tune", ["--checkpoint", "runs/bad/last.pt"])}
ALL = " ".join(READERS)
BROKEN = {  # from the bytes and the content of a good one: other bytes or content; who refuses it
    "empty": (lambda file, c: b"", ALL),
    "half": (lambda file, c: file[:len(file) // 2], ALL),
    "all but 1": (lambda file, c: file[:-1], ALL),
    "text": (lambda file, c: b"not a checkpoint", ALL),
    "numpy": (lambda file, c: Path("other.npz").read_bytes(), ALL),
    "pickled list": (lambda file, c: pickle.dumps([1, 2]), ALL),
    "list": (lambda file, c: [1, 2], ALL),
    "no weights": (lambda file, c: {"model": {}}, ALL),
    "other names": (lambda file, c: {"epoch": 3, "state_dict": c["model"]}, ALL),
    "pickled code": (lambda file, c: pickle.dumps({"model": Payload()}, 2), ALL),
    "code": (lambda file, c: {**c, "extra": Payload()}, ALL),
    "shape": (lambda file, c: {**c, "model": {**c["model"], "encoder.cls_token": torch.ones(1, 8)}},
              "init checkpoint"),
    "classifier": (lambda file, c: Path("runs/tuned/last.pt").read_bytes(), "resume eval")}
CASES = [(name, reader) for name in BROKEN for reader in BROKEN[name][1].split()]


@pytest.mark.parametrize("name, reader", CASES)
def test_broken_checkpoints(desk, refused, name, reader):
    np.savez("other.npz", a=np.zeros(3))
    good, bad = Path("runs/mae/last.pt"), Path("runs/bad/last.pt")
    bad.parent.mkdir()
    content = BROKEN[name][0](good.read_bytes(), train.read(good))
    bad.write_bytes(content) if isinstance(content, bytes) else torch.save(content, bad)
    before, (kind, words) = listing(desk), READERS[reader]
    refused(MAINS[kind], [*BASE[kind], *words], "runs/bad", *["code"] * ("code" in name))
    assert listing(desk) == before


# ---------------------------------------------------------------------------------------- pictures

def write_unreadable(folder):
    """Files of each kind that cannot be read; root reads what is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in ("torn.jpg", "nothing.jpg", "text.jpg", "locked.jpg")]
    Image.effect_noise((64, 64), 99).save(files[0])
    torn = files[0].read_bytes()
    for file, content in zip(files, (torn[:len(torn) // 2], b"", b"a cat, sitting", torn)):
        file.write_bytes(content)
    files[3].chmod(0)
    return files[:3 + (not os.access(files[3], os.R_OK))]


@pytest.mark.parametrize("side, words", [(16, []), (40, ["--workers", "2"])])
def test_unreadable_pictures_are_replaced(tmp_path, monkeypatch, capfd, side, words):
    """By the next one, with its label. In memory, and streamed. Of whole batches, so that none is
    left out. PIL refuses one of more than twice its limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2400)
    write_pictures(Path("data/val"), "ab", 3, side)
    bad = write_unreadable(Path("data/train/a"))
    write_pictures(Path("data/train"), "ab", 14, side)     # 33 files
    bad += [Path("data/train/a/0.png"), Path("data/train/a/1.tif")]
    Image.new("RGB", (70, 70)).save(bad[-2])
    Image.new("F", (side, side), 0.5).save(bad[-1])        # not of 0 to 255
    train.main(["--data", "data", *TINY, *DECODER, "--img_size", "16", *words])
    said = "".join(capfd.readouterr()).splitlines()
    assert [sum(str(path) in line for line in said) for path in bad] == [1] * len(bad)
    rows = [json.loads(line) for line in open("runs/mae_data/log.jsonl")]
    assert all(math.isfinite(row["loss"]) for row in rows)
    files = [str(bad[0]), "data/train/b/0.png", "data/train/b/1.png"]
    image, label = train.ImageDataset(files, [0, 1, 2], "abc")[0, 0]
    assert torch.equal(image, train.read_image(files[1])) and label == 1


@pytest.mark.parametrize("words", [[], ["--img_size", "16"]])
def test_nothing_but_unreadable_pictures(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        write_unreadable(Path("bad", part, "a"))
        Path("bad", part, "a/locked.jpg").unlink()
    with pytest.raises(SystemExit, match="2"):
        train.main(["--data", "bad", *TINY, "--batch_size", "1", *words])
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 4 and "none of 3 images can be read" in said[-1]
    assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------- kills

def alike(name, other="straight"):
    """Whether two runs are: weights, the optimiser's state and log.jsonl, timing aside."""
    for a, b in zip(*([json.loads(line) for line in open(f"runs/{n}/log.jsonl")]
                      for n in (name, other)), strict=True):
        assert a.keys() >= b.keys() - {"save_s"}            # a resumed run does not know its own
        assert all(a[k] == b[k] for k in a if k != "img_s" and k != "wait" and not k.endswith("_s"))
    a, b = (train.read(f"runs/{n}/last.pt") for n in (name, other))
    assert a["epoch"] == b["epoch"] and same(a["model"], b["model"])
    a, b = (content["optimizer"]["state"] for content in (a, b))
    assert a.keys() == b.keys() and all(same(a[i], b[i]) for i in a)
    assert not [path for path in Path("runs", name).iterdir() if "tmp" in path.name]


@pytest.fixture
def words(pretrain, folder):
    """words(name, epochs) of a resumable run, in a folder of its own."""
    return lambda name, epochs: ["--data", folder, *TINY, *DECODER, "--name", name, "--epochs",
                                 str(epochs), "--resume"]


@pytest.mark.parametrize("kills, epochs", [
    (2, 40), pytest.param(20, 400, marks=pytest.mark.slow)])
def test_kills(words, kills, epochs):
    """A run that is killed at random times, before it can be through, is the one that never was."""
    began = time.time()
    train.main([*map(str, words("straight", epochs))])
    r, share = random.Random(kills), (time.time() - began) / kills
    for _ in range(kills):
        process = fork(script, "train.py", *words("killed", epochs))
        time.sleep(r.uniform(0.1, 0.6) * share)
        process.kill()
        assert ended(process)[0] == -signal.SIGKILL
        if Path("runs/killed/last.pt").exists():
            train.read("runs/killed/last.pt")
    assert ended(fork(script, "train.py", *words("killed", epochs)))[0] == 0
    alike("killed")


def replace_after(epoch, monkeypatch, owner, name, act):
    """Once last.pt holds this epoch, owner.name does `act` instead."""
    before, last = getattr(owner, name), Path("runs/killed/last.pt")

    def instead(*inputs, **more):
        late = last.exists() and train.read(last)["epoch"] == epoch
        return (act if late else before)(*inputs, **more)
    monkeypatch.setattr(owner, name, instead)


def die(*inputs, **more):
    if len(inputs) > 1 and hasattr(inputs[1], "write"):
        inputs[1].write(b"half")
        inputs[1].flush()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("owner, name, more", [
    (torch, "save", []), (os, "fsync", ["--workers", "1", "--img_size", "8"]), (os, "replace", []),
    (json, "dumps", [])])
def test_a_kill_while_a_file_is_written(words, monkeypatch, owner, name, more):
    """Of the last epoch, which is done again by whoever resumes, or just its row in log.jsonl."""
    train.main([*map(str, words("straight", 3)), *more])
    with monkeypatch.context() as patch:
        replace_after(3 if owner is json else 2, patch, owner, name, die)
        assert ended(fork(script, "train.py", *words("killed", 3), *more))[0] == -signal.SIGKILL
    assert train.read("runs/killed/last.pt")["epoch"] == (3 if owner is json else 2)
    assert ended(fork(script, "train.py", *words("killed", 3), *more))[0] == 0
    alike("killed")


def dying(*words):
    """As script, but rank 1 is killed in the third epoch; once."""
    if os.environ["RANK"] == "1" and not Path("died").exists():
        forward, calls = train.MAE.forward, []

        def last(*inputs):
            calls.append(1)
            if len(calls) == 13:
                Path("died").touch()
                die()
            return forward(*inputs)
        train.MAE.forward = last                           # of this process alone
    script("train.py", *words)


def test_a_kill_of_one_of_two_processes(words):
    """torchrun ends the other, or, if it may, starts both again."""
    assert ended(fork(torchrun, script, "train.py", *words("straight", 4)))[0] == 0
    code, _ = ended(fork(torchrun, dying, *words("killed", 4)))
    assert code not in (0, None) and train.read("runs/killed/last.pt")["epoch"] == 2
    assert ended(fork(torchrun, script, "train.py", *words("killed", 4)))[0] == 0
    alike("killed")
    Path("died").unlink()
    assert ended(fork(lambda *w: torchrun(dying, *w, restarts=1), *words("again", 4)))[0] == 0
    assert Path("died").exists()
    alike("again")


@pytest.mark.parametrize("more", [[], ["--workers", "2", "--img_size", "8"]])
def test_ctrl_c_ends_a_run_with_one_line(words, more):
    """It goes to all processes of the group, workers too (which smaller pictures need)."""
    process = fork(script, "train.py", *words("stopped", 1000), *more)
    for _ in range(200):
        time.sleep(0.05 * (not Path("runs/stopped/last.pt").exists()))
    os.killpg(process.pid, signal.SIGINT)
    code, lines = ended(process, 5)
    assert code == 130 and len(lines) == 1 and "--resume" in lines[0], lines
    assert train.read("runs/stopped/last.pt")["epoch"] >= 1


def full(*inputs, **more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("kind", ["fsync", "picture", "limit"])
def test_a_full_disk(words, monkeypatch, kind):
    """The last checkpoint stays, and a line says what cannot be written."""
    resource = pytest.importorskip("resource", reason="of Unix")
    train.main([*map(str, words("full", 2))])
    before = Path("runs/full/last.pt").read_bytes()

    def tight():
        if kind == "limit":                                # of the kernel: a file is half of it
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)
        script("train.py", *words("full", 4))
    with monkeypatch.context() as patch:
        if kind != "limit":
            patch.setattr(*(os, "fsync") if kind == "fsync" else (Image.Image, "save"), full)
        code, lines = ended(fork(tight))
    said = os.strerror(errno.ENOSPC) if kind == "picture" else "runs/full/"
    assert code == 2 and len(lines) == 1 and said in lines[0], lines[-3:]
    assert kind == "picture" or Path("runs/full/last.pt").read_bytes() == before
    assert train.main([*map(str, words("full", 4))])["epoch"] == 4


# ------------------------------------------------------------------------------- not finite numbers

def losing(monkeypatch, value):
    """From MAE's fourth call in training on, the loss is `value`; 0.125 before. The calls."""
    forward, calls = train.MAE.forward, []

    def instead(self, *inputs):
        loss, _ = forward(self, *inputs)
        calls.append(1)
        loss = loss * value if len(calls) > 3 else loss * 0 + 0.125
        return loss, {"loss": loss.detach()}
    monkeypatch.setattr(train.MAE, "forward", instead)
    return calls


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_within_the_epoch(words, monkeypatch, value):
    """Of 40 steps, before the 21st, with its number and its rate; the epoch before is there."""
    train.main([*map(str, words("lost", 2))])
    with monkeypatch.context() as patch:
        calls = losing(patch, value)

        def work():
            try:
                train.main([*map(str, words("lost", 4)), "--batch_size", "1", "--lr", "0.00123"])
            finally:
                Path("calls").write_text(str(len(calls)))
        code, lines = ended(fork(work))
    assert code in (1, 2) and len(lines) == 1, lines[-3:]
    for part in ("not finite", "epoch 3, step ", "lr ", "--resume", "--lr", "--clip_grad"):
        assert part in lines[0]
    assert int(Path("calls").read_text()) <= 20 and train.read("runs/lost/last.pt")["epoch"] == 2


def test_weights_that_are_not_finite_are_not_written(words, monkeypatch):
    """The last step of the second epoch breaks them, after a finite loss."""
    step, calls = train.train_step, []

    def breaking(net, optimizer, *rest):
        totals = step(net, optimizer, *rest)
        calls.append(1)
        if len(calls) == 10:
            optimizer.param_groups[0]["params"][0].data.view(-1)[0] = math.nan
        return totals
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="not finite at epoch 2, "
                                                       "step 5, lr"):
        patch.setattr(train, "train_step", breaking)
        train.main([*map(str, words("lost", 4))])
    assert train.read("runs/lost/last.pt")["epoch"] == 1
    train.main([*map(str, words("lost", 4))])
    train.main([*map(str, words("straight", 4))])
    alike("lost")


def test_a_scale_that_is_too_large(words, monkeypatch):
    """Gradients overflow and steps are skipped until it fits. The run began without a scale."""
    train.main([*map(str, words("large", 1))])
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler",
                        lambda *inputs, **more: scaler(*inputs, init_scale=2.0 ** 22, **more))
    row = train.main([*map(str, words("large", 3)), "--amp", "fp16"])
    content = train.read("runs/large/last.pt")
    assert row["epoch"] == 3 and math.isfinite(row["loss"]) and content["scaler"]["scale"] < 2 ** 22
    updates = {int(state["step"]) for state in content["optimizer"]["state"].values()}
    assert len(updates) == 1 and 0 < updates.pop() < 15


def test_out_of_memory_is_one_line(words, monkeypatch, capsys):
    def too_much(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
    monkeypatch.setattr(train, "train_step", too_much)
    with pytest.raises(SystemExit) as stop:
        train.main([*map(str, words("large", 2))])
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 1 and len(lines) == 1
    for part in ("--accum", "--grad_checkpointing", "--batch_size"):
        assert part in lines[0]


# ------------------------------------------------------------------------------- any valid model

def draw(seed):
    """A method, its arguments and the number of visible patches that they ask for."""
    r, name = random.Random(seed), [*METHODS][seed % len(METHODS)]
    either, depth, in_chans = (lambda: r.random() < 0.5), r.randint(1, 3), r.randint(1, 5)
    h, w, p, q = r.randint(2, 6), r.randint(2, 6), r.choice((1, 2, 3, 5, 8)), r.choice((2, 4, 7))
    L, heads = h * w, r.choice((1, 2, 3, 4))
    ratio = r.choice((0.25, 0.5, 0.6, 0.75, 0.8, 0.9, 0.95, r.uniform(0.05, 0.95)))
    while not 0 < int(L * (1 - ratio)) < L:
        ratio = r.uniform(0.05, 0.95)
    options = dict(img_size=(h * p, w * q), patch_size=(p, q), in_chans=in_chans, mask_ratio=ratio,
                   dim=4 * heads * r.randint(1, 4), depth=depth, heads=heads)
    if name == "minr":
        layers, hidden, transinr = r.randint(1, 5), r.choice((4, 6, 8)), either()
        own = sorted(r.sample(range(layers), r.randint(1, layers)))
        outputs = {hidden if i < layers - 1 else in_chans for i in own}
        groups = [g for g in range(1, 10) if not (transinr and any(b % min(g, b) for b in outputs))]
        options |= dict(hypernetwork="transinr" if transinr else "ginr", mlp_depth=layers,
                        modulated_layers=tuple(own), hidden_dim=hidden, groups=r.choice(groups),
                        ff_dim=2 * r.randint(1, 5), ff_sigma=r.uniform(1, 99), out_bias=r.random(),
                        loss_on=r.choice(("all", "masked")), coord_jitter=either(),
                        pixel_fraction=r.uniform(0.01, 1), encode_visible_only=either())
        return name, options
    if "norm_pix_loss" in method_arguments(METHODS[name]):
        options["norm_pix_loss"] = either()
    if name == "hypermae":
        layers, blocks = r.randint(2, 6), r.randint(1, 3)
        options |= dict(n_weight_tokens=r.randint(1, 6), feat2w_depth=blocks, mlp_depth=layers,
                        shared_blocks=r.randint(0, min(blocks, depth)), hidden_dim=r.randint(1, 9),
                        modulated_layer=r.randint(0, layers - 2), pe_dim=2 * r.randint(1, 5),
                        pe_sigma=r.uniform(1, 2000), out_bias=r.random(), relu_around_m=either(),
                        loss_on=r.choice(("masked", "all")))
        return name, options
    if "decoder_dim" not in method_arguments(METHODS[name]):          # a new method
        return name, options
    heads = r.choice((1, 2, 3))
    options |= dict(decoder_dim=4 * heads * r.randint(1, 3), decoder_heads=heads,
                    decoder_depth=r.randint(1, 3))
    if name == "mae":
        options["inter_block_attention"] = either()
    elif name == "crossmae":
        maps = r.choice(("all", "last", (*r.sample(range(depth - 1), r.randint(0, depth - 1)),
                                         depth - 1)))
        one = maps == "last"
        options |= dict(prediction_ratio=r.uniform(0.01, 1) * ratio, feature_maps=maps,
                        include_input=None if one else r.choice((None, True, False)),
                        self_attention=either(), project_maps=not one and either())
        n = depth if maps == "all" else len(maps)
        several = n + (options["include_input"] is not False) > 1
        options["softmax_weights"] = not one and several and either()
    elif name == "imae":
        teacher = dict(dim=8, depth=1, heads=2) if either() else None
        options |= dict(branches=r.choice((1, 2)), beta=r.uniform(0.1, 3), teacher=teacher,
                        distill_weight=r.choice((None, 0.0, 0.5)) if teacher else None)
    return name, options


@pytest.mark.parametrize("seed", [*range(40), *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 340))])
def test_any_valid_model(seed):
    name, options = draw(seed)
    torch.manual_seed(seed)
    model, B = METHODS[name](**options), 2
    L, ratio = model.encoder.num_patches, options["mask_ratio"]
    K, numbers = int(L * (1 - ratio)), math.prod(options["patch_size"]) * options["in_chans"]
    images, noise = torch.rand(B, options["in_chans"], *options["img_size"]), torch.rand(B, L)
    seen = []                                              # what a CrossMAE predicts
    if name == "crossmae":
        model.decoder_pred.register_forward_hook(lambda *io: seen.append(io[2].shape))
    for inputs in ((images, noise), (images,)):
        loss, metrics = model(*inputs)
        loss.backward()
        assert all(math.isfinite(v) for v in metrics.values())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    if name == "crossmae":
        M = L - K - int(L * (ratio - options["prediction_ratio"]))
        assert M > 0 and seen == [(B, M, numbers)] * 2
    assert model.encoder.mask(images, noise, ratio)[0].shape == (B, K)
    for more in ({}, dict(leak_free=True), dict(mask_ratio=0.5)):
        decoded, mask = model.eval().reconstruct(images, noise, **more)
        shown = int(L * (1 - more.get("mask_ratio", ratio)))
        assert decoded.shape == images.shape and decoded.isfinite().all()
        assert mask.shape == (B, L) and mask.sum(1).tolist() == [L - shown] * B
