import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchvision.transforms import v2

import train
from mae import MAE
from tests.conftest import DECODER, ROOT, TINY, same, shell, stopping_after_two, together, \
    write_pictures
from tests.golden import load
from vit import from_released, masking, patchify

ONE = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))


# ------------------------------------------------------------------------------------------ data


def test_shapes():
    (pictures, labels), again = train.draw_shapes(40, (24, 32), 3), train.draw_shapes(
        40, (24, 32), 3
    )
    assert (
        pictures.shape == (40, 3, 24, 32)
        and pictures.dtype == torch.uint8
        and len(train.SHAPES) >= 10
    )
    assert torch.equal(pictures, again[0]) and labels.bincount().tolist() == [4] * 10
    assert not torch.equal(pictures, train.draw_shapes(40, (24, 32), 4)[0])
    train_split, val, size = train.open_data("shapes")
    assert size == (32, 32) and len(train_split.labels) == 10_000 and len(val.labels) == 1_000
    assert not torch.equal(train_split.pictures[:1000], val.pictures)


def test_class_folders_in_memory(folder):
    part, val, size = train.open_data(str(folder))
    assert part.pictures.shape == (40, 3, 16, 16) and val.pictures.shape == (11, 3, 16, 16)
    assert (
        size == (16, 16)
        and part.classes == ["a", "b"]
        and part.labels.tolist() == [0] * 20 + [1] * 20
    )
    red, blue = part.pictures[:20].float().mean((0, 2, 3)), part.pictures[20:].float().mean(
        (0, 2, 3)
    )
    assert red[0] > red[2] + 50 and blue[2] > blue[0] + 50
    assert train.open_data(str(folder), (24, 32))[0].pictures.shape[2:] == (24, 32)


def test_flat_folder_holds_out_by_name(tmp_path):
    write_pictures(tmp_path, "x", 100)
    part, val, _ = train.open_data(str(tmp_path))
    assert len(part.labels) + len(val.labels) == 100 and 1 <= len(val.labels) <= 12
    assert part.classes == [] and set(part.labels.tolist()) == {-1}
    before = {name for name in train.list_folder(tmp_path)[1][0]}
    write_pictures(tmp_path, "y", 50)  # more pictures move none
    assert before <= {name for name in train.list_folder(tmp_path)[1][0]}


def test_large_pictures_stream(tmp_path):
    for part in ("train", "val"):
        write_pictures(tmp_path / part, "ab", 4, side=40)
    split, _, size = train.open_data(str(tmp_path), 16)
    assert size == (16, 16) and isinstance(split.pictures[0], str)
    args = SimpleNamespace(workers=0, crop=0.5, flip=True)
    transform = train.crop_transform(size, args)
    ids = torch.randperm(8).view(2, 4)

    def draw(workers, seed):
        feed = train.Feed(split, SimpleNamespace(workers=workers), ONE, transform)
        return [torch.cat([p for p, _ in feed(ids, seed, epoch)]) for epoch in range(2)]

    first, second = draw(0, seed=1)
    assert first.shape == (8, 3, 16, 16) and first.dtype == torch.uint8
    for got, wanted in zip(draw(2, seed=1), (first, second)):  # whichever worker draws it
        assert torch.equal(got, wanted)
    assert not torch.equal(first, second) and not torch.equal(first, draw(0, seed=2)[0])
    labels = torch.cat([labels for _, labels in train.Feed(split, args, ONE, transform)(ids, 0, 0)])
    assert torch.equal(labels, split.labels[ids.flatten()])


def test_pictures_are_upright_rgb(tmp_path):
    from PIL import Image

    picture = Image.new("RGB", (8, 4), (255, 0, 0))
    exif = picture.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    picture.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("L", (5, 5), 7).save(tmp_path / "grey.png")
    assert train.read_picture(tmp_path / "turned.jpg").size == (4, 8)
    assert train.read_picture(tmp_path / "grey.png").getpixel((0, 0)) == (7, 7, 7)
    assert train.cover(train.read_picture(tmp_path / "turned.jpg"), (6, 10)).size == (10, 6)


def crop(pictures, crop=1.0, flip=False, rows=None, seed=0):
    args = SimpleNamespace(crop=crop, flip=flip, batch_size=len(pictures))
    rows = torch.arange(len(pictures)) if rows is None else rows
    generator = torch.Generator().manual_seed(seed)
    return train.crop_batch(pictures[rows], rows, pictures.shape[2:], args, generator)


def test_crops_on_the_device():
    pictures = torch.randint(0, 256, (64, 3, 12, 16), dtype=torch.uint8)
    assert torch.allclose(
        crop(pictures), pictures.float(), atol=1e-3
    )  # no crop, no flip: the picture
    flipped = crop(pictures, flip=True)
    mirrored = [torch.allclose(x, p.flip(2), atol=1e-3) for x, p in zip(flipped, pictures.float())]
    same_side = [torch.allclose(x, p, atol=1e-3) for x, p in zip(flipped, pictures.float())]
    assert 15 < sum(mirrored) < 49 and sum(mirrored) + sum(same_side) == 64
    ramp = torch.arange(16.0).expand(64, 3, 12, 16).mul(10).byte()  # its slope is the zoom
    zoomed = crop(ramp, crop=0.2)
    slopes = (zoomed[..., 9] - zoomed[..., 6])[:, 0, 5] / 30
    assert slopes.unique().numel() > 50  # each picture its own crop
    assert 0.3 < slopes.min() and slopes.max() <= 1.001  # width: sqrt(.2 * 3/4) ... 1
    assert torch.equal(
        crop(pictures, 0.2, True, torch.tensor([3, 5])), crop(pictures, 0.2, True)[[3, 5]]
    )


def test_crop_statistics_match_torchvision():
    """Mean brightness of crops of a ramp, and the spread of their zoom, as torchvision's."""
    ramp = torch.linspace(0, 255, 32).expand(3, 32, 32).byte()
    ours = crop(ramp.expand(2000, -1, -1, -1), crop=0.2)
    theirs = torch.stack(
        [v2.RandomResizedCrop(32, (0.2, 1), antialias=True)(ramp) for _ in range(2000)]
    ).float()

    def zoom(x):
        return x[:, 0, 16, 24] - x[:, 0, 16, 8]

    for statistic in (torch.mean, torch.std):
        assert abs(statistic(zoom(ours)) - statistic(zoom(theirs))) < 4  # of about 95 and 20


# ------------------------------------------------------------------------------ optimiser, schedule


def test_learning_rate_is_the_formula():
    for t in (0, 0.5, 3.99, 4, 7.3, 19.9, 20):
        wanted = (
            1.5e-3 * t / 4
            if t < 4
            else 1e-5 + (1.5e-3 - 1e-5) * (1 + math.cos(math.pi * (t - 4) / 16)) / 2
        )
        assert train.learning_rate(t, 1.5e-3, 20, 4, "cosine", 1e-5) == pytest.approx(
            wanted, rel=1e-12
        )
    assert train.learning_rate(9, 1e-4, 20, 0, "constant") == 1e-4


def test_learning_rate_of_a_run(pretrain, monkeypatch):
    rates, step = [], train.train_step
    monkeypatch.setattr(
        train,
        "train_step",
        lambda net, optimizer, *rest: (rates.append(optimizer.param_groups[0]["lr"]),
                                       step(net, optimizer, *rest))[1],
    )
    pretrain("--blr", "0.01", "--epochs", "3")
    wanted = [train.learning_rate(i / 5, 0.01 * 8 / 256, 3, 1) for i in range(15)]
    assert (
        rates == pytest.approx(wanted) and rates[0] == 0 and max(rates) == pytest.approx(rates[5])
    )


def test_weight_decay_groups():
    model = MAE(16, 4, 3, 16, 2, 2, decoder_dim=16, decoder_depth=1, decoder_heads=2)
    decayed, free = train.weight_decay_groups(model, 0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(
        names[id(p)].endswith(("bias", "norm.weight", "norm1.weight", "norm2.weight"))
        for p in free["params"]
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(decayed["params"]) + len(free["params"]) == len(trainable)
    assert all(p.ndim > 1 for p in decayed["params"])


# --------------------------------------------------------------------------------- whole commands


def test_a_run_leaves_everything(pretrain, capsys):
    content = pretrain()
    said = capsys.readouterr().out
    assert sorted(p.name for p in Path("runs/mae").iterdir()) == ["last.pt", "log.jsonl",
                                                                  "recon.png"]
    rows = [json.loads(line) for line in open("runs/mae/log.jsonl")]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"loss", "lr", "img_s", "psnr_hidden", "psnr_image", "psnr_mean_colour"} <= rows[
        0
    ].keys()
    for part in ("recon.png", "log.jsonl", "last.pt", "python finetune.py --checkpoint", "lr 0.002",
                 "2 epochs x 5", "recipe  ", "optimizer adamw", "weight_decay 0.05",
                 "M parameters"):
        assert part in said
    assert content["method"] == "mae" and content["epoch"] == 2 and content["classes"] == ["a", "b"]
    assert content["flags"]["batch_size"] == 8 and content["seed"] == 0
    assert content["torch"] == torch.__version__
    model, images = train.load("runs/mae/last.pt"), torch.randn(2, 3, 16, 16)
    assert same(model.state_dict(), content["model"]) and not model.training
    assert model.reconstruct(images)[0].shape == images.shape


def test_losses_fall_and_reconstruction_beats_the_mean_colour(pretrain):
    rows = pretrain("--epochs", "40", "--no-flip", "--crop", "1", "--lr", "5e-3")["history"]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["psnr_hidden"] > rows[0]["psnr_hidden"] + 1


def test_the_same_seed_is_the_same_run(pretrain):
    assert same(pretrain(name="a")["model"], pretrain(name="b")["model"])


@pytest.mark.parametrize(
    "flags",
    ["--blr 1e-2", "--lr 1e-2", "--betas 0.9,0.999", "--weight_decay 0.5", "--warmup_epochs 0",
     "--crop 1", "--no-flip", "--min_lr 1e-3", "--clip_grad 0.01", "--seed 1", "--mask grid",
     "--mask block", "--epochs 3", "--optimizer adam --weight_decay 0.5", "--optimizer sgd",
     "--schedule constant", "--mask_ratio 0.5", "--norm_pix_loss", "--decoder_depth 2",
     "--inter_block_attention", "--dim 32", "--depth 1", "--heads 1", "--batch_size 16",
     "--img_size 32", "--img_size 32,16", "--patch_size 8", "--size tiny", "--amp bf16",
     "--accum 2 --amp bf16"],
)
def test_every_flag_does_something(pretrain, flags):
    plain, other = pretrain(name="a")["model"], pretrain(*flags.split(), name="b")["model"]
    if flags == "--size tiny":  # the parts given come first
        assert same(plain, other)
        return
    if flags.startswith("--heads"):  # of the same shapes
        assert plain.keys() == other.keys()
    assert plain.keys() != other.keys() or any(
        plain[k].shape != other[k].shape or not torch.equal(plain[k], other[k]) for k in plain
    )


def test_grad_checkpointing_changes_nothing(pretrain, capsys):
    """But memory: tests/test_bench.py."""
    assert same(pretrain(name="a")["model"],
                pretrain("--grad_checkpointing", name="b")["model"])


def test_momentum(pretrain):
    a, b = (
        pretrain("--optimizer", "sgd", "--momentum", m, name=m)["model"] for m in ("0.5", "0.9")
    )
    assert not same(a, b)


def test_a_flat_folder_trains_and_says_that_it_holds_some_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pictures(Path("flat"), "x", 60)
    train.main(["--data", "flat", *TINY, *DECODER])
    assert "val is held out by name" in capsys.readouterr().out
    assert train.read("runs/mae/last.pt")["classes"] == []


def test_sizes(pretrain, monkeypatch, tmp_path):
    args = ["--size", "tiny", "--epochs", "0", "--workers", "0", "--eval_images", "2",
            "--patch_size", "8"]
    train.main([*args, "--decoder_dim", "16", "--decoder_heads", "2"])
    config = train.read("runs/mae/last.pt")["config"]
    assert (config["dim"], config["depth"], config["heads"]) == (192, 12, 3)
    assert config["decoder_depth"] == MAE.small["decoder_depth"] and not config["norm_pix_loss"]


def test_accumulated_pieces_are_one_batch(pretrain):
    words = ["--batch_size", "32", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "4"]
    start = pretrain(*words[:6], "--epochs", "0", name="start")["model"]
    whole = pretrain(*words, name="whole")["model"]
    pieces = pretrain(*words, "--accum", "4", name="pieces")["model"]
    assert same(whole, pieces, atol=1e-6) and not same(whole, start, atol=1e-3)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_are_one(pretrain, folder, processes):
    """The same weights after all steps: the same pictures, crops and masks, divided. By SGD: Adam
    makes steps of full size of rounding errors where a gradient is zero, as of a key's bias. A
    batch of 12 does not divide the 40 pictures, nor do the processes the 11 to validate on."""
    words = ["--optimizer", "sgd", "--lr", "0.1", "--accum", "2", "--batch_size", "12"]
    one = pretrain(*words, name="one")
    words = ["--data", str(folder), "--name", "two", *TINY, *DECODER, *words]
    if processes == 2:                                     # with the real torchrun
        done = shell("train.py", *words, processes=2)
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
        said = done.stdout
    else:
        said = together("train.py", *words, processes=processes)
    two = train.read("runs/two/last.pt")
    assert same(one["model"], two["model"], atol=1e-6)
    assert said.count("epoch 2,") == 1                     # one process speaks
    for a, b in zip(one["history"], two["history"]):
        assert a["psnr_hidden"] == pytest.approx(
            b["psnr_hidden"], abs=1e-3
        )  # 11 pictures, none twice
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def untimed(row):
    """A line of the log without what a clock says."""
    return {k: v for k, v in row.items() if k not in ("img_s", "wait")}


def test_resuming_is_not_having_stopped(pretrain, monkeypatch):
    straight = pretrain("--epochs", "4", name="straight")
    with stopping_after_two(monkeypatch):
        pretrain("--epochs", "4", name="stopped")
    assert train.read("runs/stopped/last.pt")["epoch"] == 2
    resumed = pretrain("--epochs", "4", "--resume", name="stopped")
    assert same(straight["model"], resumed["model"])
    for a, b in zip(
        straight["optimizer"]["state"].values(), resumed["optimizer"]["state"].values()
    ):
        assert same(a, b)
    for a, b in zip(straight["history"], resumed["history"]):
        assert untimed(a) == untimed(b)
    assert len(open("runs/stopped/log.jsonl").readlines()) == 4


def test_resume_without_a_run_starts_and_a_finished_one_stays(pretrain):
    first = pretrain("--resume")
    assert same(first["model"], pretrain("--resume")["model"]) and len(first["history"]) == 2


def test_runs_are_not_overwritten(pretrain, folder, refused):
    before = pretrain()["model"]
    refused(train.main, ["--data", folder, *TINY, *DECODER], "runs/mae holds a run", "--resume",
            "--overwrite")
    assert same(before, train.read("runs/mae/last.pt")["model"])
    assert not same(before, pretrain("--overwrite", "--seed", "1")["model"])


def test_resume_takes_the_settings_asked_for(pretrain, capsys):
    first = pretrain()
    same_run = pretrain("--resume", "--epochs", "0")  # nothing to do, nothing lost
    assert (
        same_run["epoch"] == 2
        and len(same_run["history"]) == 2
        and same(first["model"], same_run["model"])
    )
    capsys.readouterr()
    other = pretrain("--resume", "--epochs", "3", "--weight_decay", "0.9", "--betas", "0.5,0.6")
    said = capsys.readouterr().out
    assert "resumed; after epoch 2" in said and "--weight_decay 0.9 was 0.05" in said
    assert other["optimizer"]["param_groups"][0]["weight_decay"] == 0.9
    assert tuple(other["optimizer"]["param_groups"][0]["betas"]) == (0.5, 0.6)


def test_init_from_a_released_checkpoint(pretrain, folder, refused, tmp_path, capsys):
    state = load(ROOT / "tests/golden/mae.pt")["state_dict"]
    torch.save(
        {"model": state, "args": __import__("argparse").Namespace(lr=1)}, tmp_path / "mae.pth"
    )
    sizes = ["--img_size", "32", "--patch_size", "8", "--dim", "32", "--depth", "3", "--heads", "4"]
    words = [*sizes, "--epochs", "0", "--init", "mae.pth"]
    # another decoder: encoder only
    content = pretrain(*words, name="other")
    assert torch.equal(content["model"]["encoder.cls_token"], state["cls_token"])
    assert "fresh: decoder_blocks" in capsys.readouterr().out
    words += ["--decoder_dim", "24", "--decoder_depth", "2", "--decoder_heads", "4"]
    content = pretrain(*words, name="whole")
    assert same(content["model"], from_released(state))
    pretrain(*words, "--img_size", "48", name="larger")
    assert (
        "interpolated from (4, 4) to (6, 6) patches: encoder.pos_embed" in capsys.readouterr().out
    )

    words = ["--data", folder, *TINY, *DECODER, *words, "--name", "broken"]
    torch.save(
        {k: v for k, v in state.items() if k != "blocks.1.attn.proj.bias"}, tmp_path / "mae.pth"
    )
    refused(train.main, words, "mae.pth", "encoder.blocks.1.attn.proj.bias is missing")
    torch.save({**state, "surplus": torch.zeros(2)}, tmp_path / "mae.pth")
    refused(train.main, words, "mae.pth", "surplus is left over")
    assert not Path("runs/broken").exists()


def test_init_from_an_own_checkpoint(pretrain):
    first = pretrain()["model"]
    assert same(
        first, pretrain("--init", "runs/mae/last.pt", "--epochs", "0", name="again")["model"]
    )


def test_an_interrupted_overwrite_does_not_leave_the_old_run(pretrain, monkeypatch):
    pretrain()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "train_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        pretrain("--overwrite")
    assert not Path("runs/mae/last.pt").exists()


def test_a_process_without_a_validation_picture(tmp_path, monkeypatch):
    write_pictures(tmp_path / "flat", "x", 10)  # of which one is held out
    assert len(train.list_folder(tmp_path / "flat")[1][0]) == 1
    monkeypatch.chdir(tmp_path)
    together("train.py", "--data", "flat", *TINY, *DECODER)


def test_help_lists_the_methods_words(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--method", "mae", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for part in ("--inter_block_attention", "CrossMAE Table 7", "--no-norm_pix_loss", "(0.75)",
                 "--blr"):
        assert part in said


# ------------------------------------------------------------------------------------- evaluation


class Grey(torch.nn.Module):
    """Paints hidden patches grey (0.5); as a method of which the PSNR is known."""

    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)

    def __init__(self):
        super().__init__()
        self.encoder = MAE(8, 4, 3, 16, 1, 2, decoder_dim=16, decoder_heads=2).encoder

    def reconstruct(self, images, noise, mask_ratio=None, leak_free=False):
        mask = masking(noise, 0.75)[2]
        hidden = mask.view(-1, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
        grey = (torch.full((3, 1, 1), 0.5) - torch.tensor(self.mean).view(3, 1, 1)) / torch.tensor(
            self.std
        ).view(3, 1, 1)
        return images * (1 - hidden) + grey * hidden, mask


def test_default_patches_divide_the_picture():
    for side, wanted in ((28, 4), (32, 4), (64, 8), (100, 10), (224, 16)):
        args = SimpleNamespace(size=None, dim=None, depth=None, heads=None, patch_size=None)
        assert train.vit_config(args, (side, side))["patch_size"] == (wanted, wanted)


def test_psnr_by_hand():
    pictures = torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8)
    val = train.Split(pictures, torch.zeros(7).long(), ["x"])
    args = SimpleNamespace(eval_images=100, workers=0)
    scores = train.evaluate_psnr(Grey(), val, args, ONE)
    truth = pictures / 255
    masks = masking(train.eval_noise("random", torch.arange(7), (2, 2)), 0.75)[2]
    hidden_db, image_db, fill_db = [], [], []
    for x, mask in zip(truth, masks):
        patches = patchify(x[None], 4)[0]  # (4, 48)
        error = (patches[mask == 1] - 0.5).square()
        hidden_db.append(-10 * math.log10(error.mean()))
        image_db.append(-10 * math.log10(error.sum() / patches.numel()))
        colour = patches[mask == 0].view(-1, 3).mean(0)
        fill_db.append(-10 * math.log10((patches[mask == 1].view(-1, 3) - colour).square().mean()))
    for name, wanted in (("hidden", hidden_db), ("image", image_db), ("mean_colour", fill_db)):
        assert scores[f"psnr_{name}"] == pytest.approx(sum(wanted) / 7, abs=1e-3)


def test_evaluation_masks_belong_to_the_picture():
    noise = train.eval_noise("random", torch.arange(10), (4, 4))
    assert torch.equal(noise[3:5], train.eval_noise("random", torch.tensor([3, 4]), (4, 4)))
    assert noise.unique().numel() == 160


def test_evaluation_pictures_are_spread_and_shared():
    split = train.Split(torch.zeros(101, 3, 1, 1, dtype=torch.uint8), torch.arange(101), [])
    args = SimpleNamespace(workers=0)
    seen = [
        torch.cat(
            [
                ids
                for ids, *_ in train.val_batches(
                    split,
                    args,
                    SimpleNamespace(rank=rank, world=3, device=ONE.device),
                    (1, 1),
                    33,
                    batch_size=4,
                )
            ]
        )
        for rank in range(3)
    ]
    together = torch.cat(seen).sort().values
    assert together.unique().numel() == 33 and (together[0], together[-1]) == (0, 100)
    assert sum(len(ids) for ids, *_ in train.val_batches(split, args, ONE, (1, 1), 2**62)) == 101
    # more processes than pictures
    many = SimpleNamespace(rank=150, world=200, device=ONE.device)
    assert list(train.val_batches(split, args, many, (1, 1), 2**62)) == []
    assert train.mean_over_processes({"a": 0}, 1, ONE) == {"a": 0}


def test_evaluation_does_not_touch_training(pretrain, monkeypatch):
    plain = pretrain(name="a")["model"]
    evaluate = train.evaluate_psnr
    monkeypatch.setattr(train, "evaluate_psnr", lambda *args: (evaluate(*args), evaluate(*args))[1])
    assert same(plain, pretrain(name="b")["model"])


def test_norm_pix_loss_is_said_under_the_picture(pretrain, capsys):
    pretrain()
    assert "true mean and variance" not in capsys.readouterr().out
    pretrain("--norm_pix_loss", "--overwrite")
    said = capsys.readouterr().out
    assert "was given its true mean and variance" in said and "leak_free=True" in said


# ----------------------------------------------------------------------------------------- --eval


def test_eval_of_several_checkpoints(pretrain, folder, capsys):
    """A row a checkpoint and mask ratio, the same numbers as after training, nothing else touched;
    a picture with a column a checkpoint."""
    runs = {"mae": pretrain("--no-norm_pix_loss"), "half": pretrain("--img_size", "8", name="half")}
    before = {name: Path(f"runs/{name}/last.pt").read_bytes() for name in runs}
    capsys.readouterr()
    rows = train.main(
        ["--eval", "runs/mae/last.pt", "runs/half/last.pt", "--mask_ratios", "0.5", "0.75",
         "--workers", "0"]
    )
    said = capsys.readouterr().out.splitlines()
    assert "mean over 11 of" in said[0] and len({len(line) for line in said[1:6]}) == 1
    assert [(row["checkpoint"][5:9], row["mask_ratio"]) for row in rows] == [("mae/", 0.5),
                                                                             ("mae/", 0.75),
                                                                             ("half", 0.5),
                                                                             ("half", 0.75)]
    for name, row in (("mae", rows[1]), ("half", rows[3])):
        for key in ("psnr_hidden", "psnr_image", "psnr_mean_colour"):
            assert row[key] == pytest.approx(runs[name]["history"][-1][key], abs=1e-4)
    assert all(Path(f"runs/{name}/last.pt").read_bytes() == b for name, b in before.items())
    with train.Image.open("runs/mae/eval.png") as picture:
        assert picture.size == (4 * 130 + 2, 8 * 130 + 2)
    (grid,) = train.main(["--eval", "runs/mae/last.pt", "--mask_ratios", "0.75", "--mask", "grid"])
    assert grid["psnr_hidden"] != rows[1]["psnr_hidden"]


def test_eval_of_normalised_patches(pretrain, capsys):
    """Said where the true statistics are used; not used with --leak_free."""
    pretrain("--norm_pix_loss")
    words = ["--eval", "runs/mae/last.pt", "--mask_ratios", "0.75"]
    (flattered,) = train.main(words)
    assert "true mean and variance" in capsys.readouterr().out
    (honest,) = train.main([*words, "--leak_free"])
    assert "true mean and variance" not in capsys.readouterr().out
    assert honest["psnr_hidden"] < flattered["psnr_hidden"]


def test_eval_by_two_processes(pretrain):
    """11 pictures, none twice and none lost."""
    pretrain()
    one = train.main(["--eval", "runs/mae/last.pt", "--mask_ratios", "0.75"])[0]
    said = together("train.py", "--eval", "runs/mae/last.pt", "--mask_ratios", "0.75").splitlines()
    together("train.py", "--eval", "runs/mae/last.pt", "--eval_images", "1")
    values = [float(x) for x in said[2].split()[-3:]]
    assert values == pytest.approx([one[k] for k in list(one)[-3:]], abs=0.006)


def test_eval_shows_what_is_special_to_a_method(pretrain, capsys):
    """i-MAE: separability's table and the picture of mixtures."""
    pretrain()
    pretrain("--method", "imae", "--teacher", "runs/mae/last.pt", name="imae")
    capsys.readouterr()
    train.main(["--eval", "runs/imae/last.pt", "--mask_ratios", "0.75", "--eval_images", "1"])
    assert "branch subordinate" not in capsys.readouterr().out         # too few to fit anything
    train.main(["--eval", "runs/imae/last.pt", "--mask_ratios", "0.75"])
    said = capsys.readouterr().out
    assert "branch subordinate" in said and said.count("\n0.") == 6
    with train.Image.open("runs/imae/unmix.png") as picture:
        assert picture.size == (6 * 130 + 2, 6 * 130 + 2)


def test_eval_of_every_kind_of_figure(pretrain, capsys):
    """CrossMAE's and MINR's pictures, MINR's rendering in the table, MAE's attention, the same
    twice; one mask ratio for all columns."""
    pretrain()
    pretrain("--method", "crossmae", "--mask_ratio", "0.8", name="cross")
    small = ["--hidden_dim", "8", "--groups", "4", "--ff_dim", "4"]
    pretrain("--method", "minr", name="minr", own=small)
    capsys.readouterr()
    files = [f"runs/{name}/last.pt" for name in ("mae", "cross", "minr", "mae")]
    rows = train.main(["--eval", *files, "--mask_ratios", "0.75"])
    said = capsys.readouterr().out
    assert [("psnr_rendered" in row) for row in rows] == [False, False, True, False]
    tables = said.split("attention of the decoder's hidden tokens, mean of 11 images\n")[1:]
    assert len(tables) == 2 and tables[0].splitlines()[:3] == tables[1].splitlines()[:3]
    assert "masked (0.75)" in said
    for name, size in (("cross/contributions", (4 * 130 + 2, 8 * 130 + 2)),
                       ("minr/rendered", (2 * 130 + 2, 8 * 130 + 2))):
        with train.Image.open(f"runs/{name}.png") as picture:
            assert picture.size == size
    assert Path("runs/cross/map_weights.png").exists()


def test_gradients_are_exchanged_once_a_step():
    """no_sync for all pieces of a batch but the last."""
    entered = []

    class Net(torch.nn.Linear):
        def no_sync(self):
            entered.append(1)
            return nullcontext()

        def forward(self, x):
            loss = super().forward(x).mean()
            return loss, {"loss": loss.detach()}
    net, args = Net(2, 2), SimpleNamespace(accum=3, clip_grad=0)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1), torch.amp.GradScaler(enabled=False)
    train.train_step(net, optimizer, scaler, iter([(torch.ones(1, 2),)] * 3), args, torch.float32)
    assert len(entered) == 2


def test_metrics_are_reduced_once_an_epoch(pretrain, monkeypatch):
    mean, calls = train.mean_over_processes, []
    monkeypatch.setattr(train, "mean_over_processes", lambda *x: calls.append(1) or mean(*x))
    pretrain(name="a")
    often = len(calls)
    pretrain("--batch_size", "1", name="b")
    assert len(calls) == 2 * often


def test_a_method_of_your_own(pretrain, folder, refused, monkeypatch):
    """What every method has is asked for at the start, not after an epoch; and a flag's words."""
    class Own(MAE):
        """
        own_flag: a number that does nothing
        """
        def __init__(self, *, mask_ratio=0.75, own_flag=1, **sizes):
            super().__init__(mask_ratio=mask_ratio, decoder_dim=16, decoder_heads=2, **sizes)

        __doc__ += MAE.__doc__

    monkeypatch.setitem(train.METHODS, "own", Own)
    pretrain("--method", "own", "--own_flag", "2", name="own", own=[])
    with monkeypatch.context() as patch:
        patch.delattr(MAE, "reconstruct")
        refused(train.main, ["--method", "own", "--name", "x", "--data", folder, *TINY],
                "Own lacks reconstruct")
    older = train.read("runs/own/last.pt")
    del older["config"]["own_flag"]                        # was not there yet, so it was 1
    torch.save(older, "runs/own/last.pt")
    refused(train.main, ["--method", "own", "--data", folder, *TINY, "--own_flag", "2", "--resume"],
            "cannot be resumed: it has own_flag 1, not 2")
    monkeypatch.setattr(Own, "__doc__", MAE.__doc__)
    refused(train.main, ["--method", "own"], "--own_flag", "docstring")
