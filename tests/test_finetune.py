import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import finetune
import train
from finetune import Classifier, layer_decay_groups
from mae import MAE
from tests.conftest import ROOT, TINY, same, settings, stopping_after_two, together, write_pictures
from tests.golden import load, replay, vit_args
from vit import IMAGENET_MEAN, denormalize, from_released, normalize, resize_pos_embed, to_released


def classifier(**kwargs):
    torch.manual_seed(0)
    return Classifier(16, 4, dim=16, depth=2, heads=2, classes=3, **kwargs)


def test_replay_takes_the_class_token():
    """A fixture pooled by the class token, made from the other: norm, token, head."""
    fixture = load(ROOT / "tests/golden/finetune_avg.pt")
    state = {k.replace("fc_norm.", "norm."): v for k, v in fixture["state_dict"].items()}
    fixture = {"method": "finetune", "config": {**fixture["config"], "global_pool": "token"},
               "state_dict": state, "images": fixture["images"], "labels": fixture["labels"]}
    model = Classifier(**vit_args(fixture["config"]), classes=10, pool="token")
    model.load_state_dict(from_released(state))
    assert same(to_released(model), state)                 # its names are the released ones
    tokens = model.encoder(fixture["images"])
    assert torch.allclose(replay(fixture)["pred"], model.head(tokens[:, 0]), atol=1e-6)


@pytest.mark.parametrize("pool, extra, width", [
    ("mean", 0, 16), ("token", 0, 16), ("joined", 0, 256), ("mean", 3, 16), ("token", 3, 16),
    ("extra", 3, 16), ("joined", 3, 48)])
def test_features(pool, extra, width):
    """Of 16 patch tokens and of extra tokens, which come after them."""
    model, images = classifier(pool=pool, extra_tokens=extra), torch.randn(2, 3, 16, 16)
    tokens = model.encoder(images)
    assert tokens.shape == (2, 17 + extra, 16)
    patches, extras = tokens[:, 1:17], tokens[:, 17:]
    wanted = {"mean": patches.mean(1), "token": tokens[:, 0], "extra": extras.mean(1),
              "joined": torch.cat((extras if extra else patches).unbind(1), dim=1)}[pool]
    assert torch.equal(model.features(images), wanted)
    assert wanted.shape == (2, width) and model.logits(images).shape == (2, 3)


def test_extra_tokens_travel(pretrain, folder, tmp_path, capsys, refused):
    """From a MINR to a classifier, in each mode, and back, also of files from before the encoder
    had them."""
    own = "--method minr --hidden_dim 8 --groups 5 --ff_dim 4 --ff_sigma 4 --mlp_depth 3".split()
    minr, mae = pretrain(*own, name="minr", own=[]), pretrain()
    tokens, words = minr["model"]["encoder.extra_tokens"], [*TINY[8:], "--data", str(folder)]
    assert tokens.shape == (5, 16) and minr["mean"] == (0, 0, 0)
    old = dict(minr, model=dict(minr["model"]))
    old["model"]["weight_tokens"] = old["model"].pop("encoder.extra_tokens")
    torch.save(old, "old.pt")
    assert same(train.read("old.pt")["model"], minr["model"]) and train.load("old.pt")
    Path("runs/old").mkdir()
    Path("old.pt").rename("runs/old/last.pt")
    refused(train.main, ["--data", folder, *TINY, *own, "--name", "old", "--resume"],
            "runs/old/last.pt is of an older version of this code and cannot be resumed")
    torch.save({k.removeprefix("encoder."): v for k, v in minr["model"].items()
                if k.startswith("encoder.")}, "encoder.pth")
    for path, heads in (("runs/minr/last.pt", []), ("runs/old/last.pt", []),
                        ("encoder.pth", ["--heads", "2"])):
        for mode in ("finetune", "linear", "knn", "scratch"):
            finetune.main(["--checkpoint", path, "--mode", mode, *words, *heads, "--epochs", "0",
                           "--name", "tuned", "--overwrite"])
            if mode == "knn":
                continue
            tuned = train.read("runs/tuned/last.pt")
            assert (tuned["config"]["pool"], tuned["config"]["extra_tokens"]) == ("joined", 5)
            kept = torch.equal(tuned["model"]["encoder.extra_tokens"], tokens)
            assert kept == (mode != "scratch")
    finetune.main(["--mode", "eval", "--checkpoint", "runs/tuned/last.pt", *words[-2:]])
    finetune.main(["--checkpoint", "runs/mae/last.pt", "--pool", "joined", *words, "--name", "j"])
    assert train.read("runs/j/last.pt")["model"]["head.weight"].shape == (2, 256)
    assert finetune.default_pool(200, 768) == "extra"
    refused(finetune.main, ["--checkpoint", "runs/mae/last.pt", "--pool", "extra", *words],
            "--pool extra", "no extra tokens")
    refused(finetune.main, ["--mode", "scratch", "--img_size", "64", "--patch_size", "4", "--dim",
                            "32", "--heads", "2", "--pool", "joined", *words],
            "--pool joined: 8192 features are more than 5000; try --pool mean")
    capsys.readouterr()
    pretrain("--init", "runs/minr/last.pt", name="a")
    pretrain(*own, "--init", "runs/mae/last.pt", name="b", own=[])
    pretrain(*own, "--init", "runs/minr/last.pt", "--epochs", "0", name="c", own=[])
    said = capsys.readouterr().out
    assert "not taken over: encoder.extra_tokens" in said and "fresh: encoder.extra_tokens" in said
    assert same(train.read("runs/c/last.pt")["model"], minr["model"])


@pytest.mark.parametrize("pool", ["mean", "token", "extra", "joined"])
@pytest.mark.parametrize("probe", [False, True])
def test_what_is_trained(probe, pool):
    """All that can be, positions too, or nothing but the head."""
    model = classifier(probe=probe, pool=pool, extra_tokens=2 * (pool in ("extra", "joined")))
    model(torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]))[0].backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved == {"head.1.weight", "head.1.bias"} if probe else "encoder.pos_embed" in moved
    head = model.head[1] if probe else model.head          # as released
    assert head.weight.std().item() == pytest.approx(0.01 if probe else 2e-5, rel=0.3)
    if probe:
        norm = model.head[0]
        assert isinstance(norm, torch.nn.BatchNorm1d) and (norm.affine, norm.eps) == (False, 1e-6)


@pytest.mark.parametrize("mode, wanted", [
    ("finetune", dict(  # MAE Table 9, CrossMAE Table 11, HyperMAE Table 13; erasing: release
        optimizer="adamw", blr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, schedule="cosine",
        batch_size=1024, epochs=100, warmup_epochs=5, crop=0.08, flip=True, randaug=27,
        erasing=0.25, mixup=0.8, cutmix=1.0, mix_ratio=0, smoothing=0.1, drop_path=0.1,
        layer_decay=0.75)),
    ("linear", dict(  # MAE Table 10, by SGD
        optimizer="sgd", blr=0.1, betas=(0.9, 0.999), weight_decay=0, schedule="cosine",
        batch_size=16384, epochs=90, warmup_epochs=10, crop=0.08, flip=True, randaug=0, erasing=0,
        mixup=0, cutmix=0, mix_ratio=0, smoothing=0, drop_path=0, layer_decay=1))])
def test_recipes_are_the_papers(mode, wanted):
    assert finetune.RECIPES[mode][0] == wanted
    small = dict(batch_size=128, epochs=10, warmup_epochs=1, crop=0.5, randaug=0, erasing=0,
                 mixup=0, cutmix=0, drop_path=0)
    assert finetune.RECIPES[mode][1] == {**small, **(dict(lr=2e-3) if mode == "finetune" else {})}
    assert train.SHARED == dict(lr=None, blr=None, min_lr=0, momentum=0.9)


def test_smoothing_and_probabilities():
    model, images = classifier(smoothing=0.1), torch.randn(4, 3, 16, 16)
    torch.nn.init.normal_(model.head.weight)               # logits that differ
    labels = torch.tensor([0, 1, 2, 0])
    hard = F.one_hot(labels, 3).float()
    wanted = -((hard * 0.9 + 0.1 / 3) * model.logits(images).log_softmax(1)).sum(1).mean()
    assert all(torch.allclose(model(images, x)[0], wanted, atol=1e-6) for x in (labels, hard))


def test_layer_decay_and_weight_decay(tune):
    """What one step changes, beside one of equal rates, and what weight decay adds to it."""
    words = ["--optimizer", "sgd", "--lr", "0.1", "--batch_size", "40", "--warmup_epochs", "0"]
    words += ["--weight_decay", "0", "--epochs", "1", "--layer_decay", "1"]
    start, equal, scaled, decayed = (
        tune(*words, *more.split(), name=f"x{more}")[0]["model"] for more in (
            "--epochs 0", "--seed 0", "--layer_decay .5", "--layer_decay .5 --weight_decay 1"))
    for name, p in start.items():
        block = name.startswith("encoder.blocks") and int(name.split(".")[2])
        scale = 0.5 ** (2 - block if "blocks" in name else 3 if "encoder" in name else 0)
        decay = 0.1 * scale * (p.ndim > 1 and name.endswith("weight"))    # no token, no position
        assert torch.allclose(scaled[name] - p, scale * (equal[name] - p), atol=1e-6), name
        assert torch.allclose(scaled[name] - decayed[name], decay * p, atol=1e-6), name
        assert (equal[name] != p).any(), name


def test_groups_do_not_depend_on_weight_decay():
    """A resumed run, whose weight decay may be another, has its moments by the order of these."""
    model = classifier()
    none, some = ([[id(p) for p in group["params"]] for group in layer_decay_groups(model, x, 0.5)]
                  for x in (0.0, 0.05))
    assert none == some


def test_finetuning_and_probing_learn(tune, folder, capsys):
    content, row = tune("--epochs", "8", "--lr", "5e-3", "--crop", "1")
    said = capsys.readouterr().out
    assert row["top1"] == row["top5"] == 100 and " top1 100.00, " in said
    assert content["history"][0].keys() >= {"top1", "top5", "loss", "lr", "img_s", "eval_s"}
    assert "fresh: fc_norm, head" in said and "not taken over: encoder.norm (expected: " in said
    model = train.load("runs/tuned/last.pt", {"classifier": Classifier})
    split = train.open_data(str(folder), None, settings())[1]
    assert torch.equal(model.logits(normalize(split.images, model)).argmax(1), split.labels)
    content, row = tune("--mode", "linear", "--epochs", "8", "--crop", "1", name="probe")
    before = train.read("runs/mae/last.pt")["model"]       # of which nothing changes
    encoder = {name: x for name, x in content["model"].items() if name.startswith("encoder.")}
    assert row["top1"] > 90 and "encoder.norm.weight" in encoder
    assert same(encoder, {name: before[name] for name in encoder})


def test_names_and_starts(folder, tune, refused):
    """A run is named after checkpoint and mode; from scratch, which needs none, after the data."""
    finetune.main(["--mode", "scratch", "--data", str(folder), *TINY, "--epochs", "0"])
    finetune.main("--checkpoint runs/mae/last.pt --img_size 24 --epochs 0 --batch_size 8".split())
    mae, tuned, scratch = (train.read(f"runs/{name}/last.pt") for name in (
        "mae", "mae_finetune", f"scratch_{folder.name}"))
    tokens = [run["model"]["encoder.cls_token"] for run in (mae, tuned, scratch)]
    assert torch.equal(*tokens[:2]) and not torch.equal(*tokens[1:])
    old, new = (run["model"]["encoder.pos_embed"] for run in (mae, tuned))
    assert torch.equal(resize_pos_embed(old, (4, 4), (6, 6)), new)
    assert tuned["flags"]["data"] == str(folder) and scratch["flags"]["layer_decay"] == 1.0
    assert tuned["flags"]["own_draws"] and not mae["flags"]["own_draws"]     # see train.train_step
    Path("runs/mae").rename("runs/mae_shapes")
    for name, words in (("mae_shapes_linear", "--mode linear --checkpoint runs/mae_shapes/last.pt"),
                        ("scratch_shapes", "--mode scratch")):
        Path("runs", name).mkdir()
        Path("runs", name, "last.pt").write_text("")
        refused(finetune.main, words.split(), f"runs/{name} holds a run")


@pytest.mark.parametrize("words, wanted", [
    ("--mode finetune", dict(lr=2e-3, randaug=0, crop=0.5)),
    ("--mode scratch --img_size 224", dict(lr=2e-3, randaug=0)),
    ("--mode scratch --size tiny --img_size 64", dict(lr=2e-3, randaug=0)),
    ("--mode scratch --size tiny --img_size 224", dict(lr=1e-3 * 8 / 256, randaug=27, mixup=0.8)),
    ("--mode linear", dict(lr=0.1 * 8 / 256, randaug=0))])
def test_small_pictures_and_encoders(tune, words, wanted):
    flags = tune(*words.split(), "--epochs", "0", "--eval_images", "1")[0]["flags"]
    assert {name: flags[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("mode", ["finetune", "linear"])
def test_evaluating_a_checkpoint(tune, folder, mode, refused):
    """The same numbers as after training, also with --data of the same classes; no file is new. In
    bfloat16 it runs."""
    row, before = tune("--mode", mode, "--lr", "0.01")[1], sorted(Path().rglob("*"))
    for more in ([], ["--data", str(folder)], ["--amp", "bf16"]):
        found = finetune.main(["--mode", "eval", "--checkpoint", "runs/tuned/last.pt", *more,
                               "--workers", "0"])
        assert "bf16" in more or found == {name: row[name] for name in ("top1", "top5")}
    for name, value in (("img_size", "32"), ("patch_size", "8"), ("size", "tiny"), ("dim", "32")):
        refused(finetune.main, ["--mode", "eval", "--checkpoint", "runs/tuned/last.pt", f"--{name}",
                                value], f"takes {name} from runs/tuned/last.pt: leave out --{name}")
    assert sorted(Path().rglob("*")) == before


def test_nearest_neighbours_by_hand(monkeypatch):
    """Of four unit-length mean patch tokens, exp(cosine / 0.07) each; under autocast, too, whose 16
    bits are for the model alone."""
    model = classifier(probe=True, norm=True).eval()       # it seeds, too
    pictures = torch.randint(0, 256, (9, 3, 16, 16), dtype=torch.uint8)
    pictures[:, 0] = pictures[:, 0] // 8 + 25 * torch.arange(9).byte()[:, None, None]
    labels, query = torch.tensor([0, 1, 1, 2, 2, 0, 1, 0, 2]), pictures[:1] // 2 * 2
    split, found, wanted = train.ImageDataset(pictures, labels, "abc"), [], torch.zeros(3)
    tokens = model.encoder(normalize(torch.cat([pictures, query]), model))[:, 1:].mean(1)
    for cosine, label in sorted(zip(F.cosine_similarity(tokens[:9], tokens[9:]), labels))[-4:]:
        wanted[label] += (cosine / 0.07).exp()
    topk, ranked = torch.Tensor.topk, []
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: (ranked.append(x.dtype), topk(x, k))[1])
    for dtype in (torch.float32, torch.bfloat16):
        args = settings(k=4, dtype=dtype)
        score = finetune.knn(model, split, args, (16, 16))
        with train.autocast(args):                         # as evaluate calls it
            found += score(query)
    assert torch.allclose(found[0], wanted, rtol=1e-4) and ranked == [torch.float32] * 2
    assert not torch.equal(*found) and torch.allclose(*found, rtol=0.2)


def test_few_labels(tune, tmp_path, capsys, refused):
    """A share of each class's pictures, at least one; no more are validated than trained on."""
    for part, n in (("train", 20), ("val", 4)):
        write_pictures(tmp_path / "data" / part, "abc", n)
    for name in [*(f"b/{i}" for i in range(10)), *(f"c/{i}" for i in range(18))]:
        (tmp_path / f"data/train/{name}.png").unlink()

    def kept(share, seed):
        split = train.open_data("data", None, settings())[0]
        every = split.images
        finetune.keep_labels(split, share, seed)
        ids = [(every == x).all((1, 2, 3)).nonzero().item() for x in split.images]
        assert [0 if i < 20 else 1 if i < 30 else 2 for i in ids] == split.labels.tolist()
        return split.labels.bincount().tolist(), sorted(ids)
    assert kept(0.2, 0)[0] == [4, 2, 1] and kept(0.2, 0) == kept(0.2, 0) != kept(0.2, 1)
    assert kept(0.0, 0)[0] == [1, 1, 1] and kept(1.0, 0)[1] == [*range(32)]
    words = ["--data", "data", "--batch_size", "4", "--labels", "0.2"]
    a, b = (tune(*words, "--epochs", "5", "--seed", seed, name=seed)[0] for seed in "01")
    assert not same(a["model"], b["model"]) and "7 train, 12 val" in capsys.readouterr().out
    scored = [row["epoch"] for row in a["history"] if "top1" in row]
    assert scored == [2, 4, 5] and len(a["history"]) == 5  # 12 are two times 7, about
    history = tune(*words, "--eval_every", "1")[0]["history"]
    assert len([row for row in history if "top1" in row]) == 2
    content, row = tune("--mode", "knn", *words[:-1], "0", name="knn")
    assert content is None and row["top1"] == 100
    assert re.search(r"top1 100.00, .* largest class 33.33 %", capsys.readouterr().out)
    (tmp_path / "data/train/d").mkdir()
    refused(finetune.main, ["--checkpoint", "runs/mae/last.pt", *words], "class", "d")


def test_flags_do_something(tune):
    flags = ["", "--drop_path 0.5", "--smoothing 0.3", "--pool token", "--seed 1", "--lr 1e-2",
             "--crop 1", *(f"--mode linear {x}" for x in ("", "--mix_ratio 0.3", "--pool token"))]
    runs = [tune(*words.split(), name=f"{i}")[0]["model"] for i, words in enumerate(flags)]
    for i, words in enumerate(flags):
        for run, other in zip(runs[:i], flags):
            assert not same(run, runs[i]), f"'{words}' does as '{other}'"


def test_augmentation(tune, spy):
    """As the model gets it: erased rectangles of the mean colour, mixtures of labels likewise."""
    def inputs(words):
        tune(*"--crop 1 --no-flip --epochs 1 --batch_size 40 --overwrite".split(), *words.split())
        return seen.pop()
    seen = spy(Classifier, "forward", lambda self, images, targets: (
        denormalize(images, self), targets))
    (plain, labels), (erased, _) = inputs(""), inputs("--erasing 1")
    gone = (erased - plain).abs().amax(1) > 3e-3           # (40, 16, 16)
    colour = erased - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    assert gone.flatten(1).any(1).all() and colour.abs().amax(1)[gone].max() < 3e-3
    a, b = (inputs(f"--randaug 27 --workers {n}")[0] for n in (0, 2))
    assert torch.equal(a, b) and ((a - plain).abs().amax((1, 2, 3)) > 0.05).sum() > 10
    other, one_hot = plain.roll(1, 0), F.one_hot(labels, 2).float()
    differ = (plain - other).abs() > 0.1
    for words in ("--mix_ratio 0.25", "--mixup 0.8", "--cutmix 1"):
        mixed, targets = inputs(words)
        weight = ((mixed - other) / (plain - other))[differ]           # of each picture
        share, whole = weight.mean(), (weight - weight.round()).abs().max() < 1e-3
        assert whole if words == "--cutmix 1" else weight.std() < 1e-3 and 0.01 < share < 0.99
        assert "0.25" not in words or share == pytest.approx(0.25, abs=1e-3)
        wanted = share * one_hot + (1 - share) * one_hot.roll(1, 0)
        assert torch.allclose(targets, wanted, atol=0.02), words


def test_released_checkpoints(folder, tmp_path, monkeypatch, refused, capsys):
    monkeypatch.chdir(tmp_path)
    golden = ROOT / "tests/golden"
    mae, tuned = (load(golden / f"{x}.pt")["state_dict"] for x in ("mae", "finetune_avg"))
    words = ["--data", str(folder), "--checkpoint", "x.pth", *TINY[8:], "--epochs", "0"]
    torch.save({"model": mae}, "x.pth")
    refused(finetune.main, words, "x.pth does not say its number of heads: give --heads")
    words += ["--heads", "4"]
    finetune.main([*words, "--name", "a"])
    content, bias = train.read("runs/a/last.pt"), "blocks.2.mlp.fc1.bias"
    assert torch.equal(content["model"][f"encoder.{bias}"], mae[bias])
    assert content["config"]["depth"] == 3 and content["config"]["img_size"] == (32, 32)
    assert "not taken over: decoder_blocks" in capsys.readouterr().out
    torch.save({"weight": torch.zeros(3)}, "x.pth")
    refused(finetune.main, words, "x.pth is not a ViT's checkpoint")
    write_pictures(tmp_path / "ten/train", "abcdefghij", 1)
    write_pictures(tmp_path / "ten/val", "abcdefghij", 5)
    capsys.readouterr()
    fixture = load(golden / "finetune_avg.pt")
    _, split, _ = train.open_data("ten", (32, 32), settings())
    for pool, norm in (("token", "norm."), (fixture["config"]["global_pool"], "fc_norm.")):
        state = {name.replace("fc_norm.", norm): x for name, x in tuned.items()}
        torch.save(state, "x.pth")
        row = finetune.main("--mode eval --checkpoint x.pth --heads 4 --data ten".split())
        scores = replay({**fixture, "config": {**fixture["config"], "global_pool": pool},
                         "state_dict": state, "images": normalize(split.images, MAE),
                         "labels": split.labels})["pred"]
        rank = (scores > scores.gather(1, split.labels[:, None])).sum(1)
        wanted = {f"top{n}": 100 * (rank < n).float().mean().item() for n in (1, 5)}
        assert row == pytest.approx(wanted) and 0 < row["top5"] < 100
        assert f"top5 {row['top5']:.2f}, of 50 images of ten" in capsys.readouterr().out
    refused(finetune.main, ["--mode", "eval", *words[2:]], "x.pth does not name its data")
    finetune.main([*words, "--data", "ten", "--name", "b"])            # keeps a head as large
    assert same(train.read("runs/b/last.pt")["model"], from_released(tuned))


@pytest.mark.parametrize("mode, words", [
    ("scratch", "--dim 16 --depth 2"), ("linear", "--amp fp16"),
    ("finetune", "--mixup 0.8 --cutmix 1 --drop_path 0.2 --randaug 9 --workers 1")])
def test_resuming_is_not_having_stopped(tune, monkeypatch, mode, words):
    """Where workers draw, too, and mixing and drop path in the process itself."""
    words = ["--mode", mode, "--epochs", "3", *words.split()]
    straight, _ = tune(*words, name="straight")
    with stopping_after_two(monkeypatch):
        tune(*words, "--patch_size", "4", name="stopped")  # the encoder's, too
    resumed, _ = tune(*words, "--resume", name="stopped")
    assert same(straight["model"], resumed["model"]) and straight["scaler"] == resumed["scaler"]


def alike(_, *words):
    """finetune.py, whose evaluations must be of the same model on both processes."""
    evaluate = finetune.evaluate

    def compared(score, *inputs):
        mean = score.__self__.head[0].running_mean         # score is the model's classify
        means = [torch.zeros_like(mean) for _ in range(2)]
        dist.all_gather(means, mean)
        assert torch.equal(*means)
        return evaluate(score, *inputs)
    finetune.evaluate = compared
    finetune.main([*map(str, words)])


def test_two_processes(tune, folder):
    """Neighbours, training and validation as by one; a probe, whose BatchNorm sees half a batch,
    and which is validated with the statistics that are saved."""
    words = ["--data", folder, "--checkpoint", "runs/mae/last.pt", *TINY[8:], "--name", "two"]
    neighbours = ["--mode", "knn", "--k", "3", "--labels", "0.2"]
    row, said = tune(*neighbours)[1], together("finetune.py", *words, *neighbours)
    assert f"top1 {row['top1']:.2f}, top5 {row['top5']:.2f}" in said
    together("finetune.py", *words, "--optimizer", "sgd")
    two, (one, row) = train.read("runs/two/last.pt"), tune("--optimizer", "sgd")
    assert same(one["model"], two["model"], atol=1e-6) and one["flags"]["lr"] > 1e-3
    assert two["history"][-1]["top1"] == pytest.approx(row["top1"], abs=1e-3)
    together("finetune.py", *words, "--mode", "linear", "--overwrite", work=alike)
    assert train.read("runs/two/last.pt")["config"]["probe"]
