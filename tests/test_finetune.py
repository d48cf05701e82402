import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import finetune
import train
from finetune import Classifier, layer_decay_groups
from tests.conftest import ROOT, TINY, same, stopping_after_two, together, write_pictures
from tests.golden import load, replay, vit_args
from vit import from_released, resize_pos_embed, to_released


def classifier(**kwargs):
    torch.manual_seed(0)
    return Classifier(
        **{**dict(img_size=16, patch_size=4, dim=16, depth=2, heads=2, classes=3), **kwargs}
    )


def test_replay_takes_the_class_token():
    """A fixture pooled by the class token, made from the other: norm, token, head."""
    fixture = load(ROOT / "tests/golden/finetune_avg.pt")
    state = {k.replace("fc_norm.", "norm."): v for k, v in fixture["state_dict"].items()}
    fixture = {"method": "finetune", "config": {**fixture["config"], "global_pool": "token"},
               "state_dict": state, "images": fixture["images"], "labels": fixture["labels"]}
    model = Classifier(**vit_args(fixture["config"]), classes=10, pool="token")
    model.load_state_dict(from_released(state))
    tokens = model.encoder(fixture["images"])
    wanted = F.linear(tokens[:, 0], state["head.weight"], state["head.bias"])
    assert torch.allclose(replay(fixture)["pred"], wanted, atol=1e-6)


def test_classifier_names_are_the_released_ones():
    state = load(ROOT / "tests/golden/finetune_avg.pt")["state_dict"]
    model = classifier(img_size=32, patch_size=8, dim=32, depth=3, heads=4, classes=10)
    model.load_state_dict(from_released(state))
    assert same(to_released(model), state)


@pytest.mark.parametrize(
    "options", [{}, dict(pool="token"), dict(probe=True, norm=True), dict(probe=True, pool="token")]
)
def test_what_is_trained(options):
    model = classifier(**options)
    loss, metrics = model(torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    if options.get("probe"):
        assert moved == {"head.1.weight", "head.1.bias"}
        assert isinstance(model.head[0], torch.nn.BatchNorm1d) and not model.head[0].affine
    else:
        assert "encoder.pos_embed" in moved  # learnt from here on


def test_smoothing_and_probabilities():
    model, images = classifier(smoothing=0.1), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        torch.nn.init.normal_(model.head.weight)  # logits that differ
    labels = torch.tensor([0, 1, 2, 0])
    soft = F.one_hot(labels, 3) * 0.9 + 0.1 / 3
    wanted = -(soft * model.logits(images).log_softmax(1)).sum(1).mean()
    assert torch.allclose(model(images, labels)[0], wanted, atol=1e-6)
    assert torch.allclose(model(images, F.one_hot(labels, 3).float())[0], wanted, atol=1e-6)


def test_layer_decay_groups():
    model = classifier(depth=3)
    groups = layer_decay_groups(model, 0.05, 0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr_scale"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    for name, wanted in {"encoder.cls_token": (0.5**4, 0), "encoder.pos_embed": (0.5**4, 0),
                         "encoder.patch_embed.proj.weight": (0.5**4, 0.05),
                         "encoder.patch_embed.proj.bias": (0.5**4, 0),
                         "encoder.blocks.0.attn.qkv.weight": (0.5**3, 0.05),
                         "encoder.blocks.0.norm1.weight": (0.5**3, 0),
                         "encoder.blocks.2.mlp.fc2.weight": (0.5, 0.05), "fc_norm.weight": (1, 0),
                         "head.weight": (1, 0.05), "head.bias": (1, 0)}.items():
        assert found[name] == pytest.approx(wanted), name


def test_layer_decay_reaches_the_optimiser(tune):
    before = train.read("runs/mae/last.pt")["model"]
    content, _ = tune("--layer_decay", "0.01")
    drift = {
        k: (content["model"][k] - before[k]).abs().max() for k in before if k in content["model"]
    }
    assert (
        drift["encoder.patch_embed.proj.weight"]
        < 1e-3 * drift["encoder.blocks.1.attn.proj.weight"] * 20
    )


def test_finetuning_learns(tune, capsys):
    content, row = tune("--epochs", "8", "--lr", "5e-3", "--crop", "1")
    said = capsys.readouterr().out
    assert row["top1"] == 100 and row["top5"] == 100
    assert {"top1", "top5", "loss"} <= content["history"][0].keys()
    assert "fresh: fc_norm, head" in said and "not taken over: encoder.norm.weight" in said
    assert content["method"] == "classifier" and content["epoch"] == 8
    model = train.load("runs/tuned/last.pt", {"classifier": Classifier})
    split = train.open_data(content["flags"]["data"])[1]
    votes = model.logits(train.normalize(split.pictures, model)).argmax(1)
    assert torch.equal(votes, split.labels)


def test_linear_probe_leaves_the_encoder_alone(tune):
    content, row = tune("--mode", "linear", "--epochs", "8", "--crop", "1")
    before = train.read("runs/mae/last.pt")["model"]
    for name, value in content["model"].items():
        if name.startswith("encoder."):
            assert torch.equal(value, before[name])  # its final norm too
    assert row["top1"] > 90 and content["model"]["head.0.running_mean"].any()


def test_scratch_starts_from_nothing(tune):
    before = train.read("runs/mae/last.pt")["model"]
    content, _ = tune("--mode", "scratch", "--epochs", "0")
    assert content["config"]["dim"] == 16 and content["flags"]["layer_decay"] == 1.0
    assert not torch.equal(content["model"]["encoder.cls_token"], before["encoder.cls_token"])
    content, _ = tune("--epochs", "0", name="pretrained")
    assert torch.equal(content["model"]["encoder.cls_token"], before["encoder.cls_token"])


def test_scratch_needs_no_checkpoint(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = finetune.main(["--mode", "scratch", "--data", str(folder), *TINY])
    assert row["epoch"] == 2 and Path("runs/micro_scratch/last.pt").exists()


def test_nearest_neighbours(tune, capsys):
    content, row = tune("--mode", "knn", "--k", "3")
    assert content is None and row["top1"] == 100  # red and blue
    assert "3 nearest neighbours: top1 100.00" in capsys.readouterr().out


def test_nearest_neighbours_by_hand():
    """Votes of two neighbours of unit-length mean patch tokens, weighted by exp(cosine / 0.07)."""
    model = classifier(probe=True, norm=True).eval()
    pictures = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    labels, query = torch.tensor([0, 1, 2, 1, 0]), torch.randint(
        0, 256, (1, 3, 16, 16), dtype=torch.uint8
    )
    args = SimpleNamespace(k=2, eval_images=2**62, workers=0)
    one = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"))
    votes = finetune.knn(model, train.Split(pictures, labels, "abc"), args, one, (16, 16))(query)[0]

    def feature(x):
        return F.normalize(model.encoder(train.normalize(x, model))[:, 1:].mean(1), dim=1)

    cosine = (feature(pictures) @ feature(query).T)[:, 0]
    wanted = torch.zeros(3)
    for i in cosine.topk(2).indices:
        wanted[labels[i]] += math.exp(cosine[i] / 0.07)
    assert torch.allclose(votes, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    "flags",
    ["--layer_decay 0.5", "--drop_path 0.5", "--smoothing 0.3", "--mixup 0.8", "--cutmix 1.0",
     "--mix_ratio 0.35", "--randaug 11", "--erasing 1.0", "--pool token", "--weight_decay 0.5",
     "--seed 1", "--lr 1e-2", "--crop 1"],
)
def test_every_flag_does_something(tune, flags):
    (plain, _), (other, _) = tune(name="a"), tune(*flags.split(), name="b")
    plain, other = plain["model"], other["model"]
    assert plain.keys() != other.keys() or any(not torch.equal(plain[k], other[k]) for k in plain)


def test_a_probe_on_mixed_pictures(tune):
    plain, mixed = (
        tune("--mode", "linear", *words, name=name)[0]["model"]
        for name, words in (("a", ()), ("b", ("--mix_ratio", "0.35")))
    )
    assert not torch.equal(plain["head.1.weight"], mixed["head.1.weight"])


def test_a_fixed_mix_is_of_pictures_and_labels(tune, monkeypatch):
    seen = []
    fit = finetune.fit

    def spy(args, procs, model, groups, feed, prepare, *rest, **content):
        seen.append((prepare, feed))
        return fit(args, procs, model, groups, feed, prepare, *rest, **content)

    monkeypatch.setattr(finetune, "fit", spy)
    tune("--mix_ratio", "0.25", "--crop", "1", "--no-flip", "--epochs", "0")
    prepare, feed = seen[0]
    pictures, labels = feed.split.pictures[[0, 20]], torch.tensor([0, 1])
    images, targets = prepare(torch.tensor([0, 1]), pictures, labels, torch.Generator())
    model = SimpleNamespace(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    a, b = train.normalize(pictures, model)
    assert torch.allclose(images[0], 0.25 * a + 0.75 * b, atol=1e-3)
    assert targets.tolist() == [[0.25, 0.75], [0.75, 0.25]]


def test_another_image_size_interpolates_positions(tune, capsys):
    before = train.read("runs/mae/last.pt")["model"]["encoder.pos_embed"]
    content, _ = tune("--img_size", "24", "--epochs", "0")
    assert torch.equal(
        content["model"]["encoder.pos_embed"], resize_pos_embed(before, (4, 4), (6, 6))
    )
    assert (
        "interpolated from (4, 4) to (6, 6) patches: encoder.pos_embed" in capsys.readouterr().out
    )


def test_released_checkpoints(folder, tmp_path, monkeypatch, refused, capsys):
    monkeypatch.chdir(tmp_path)
    mae, tuned = (
        load(ROOT / f"tests/golden/{name}.pt")["state_dict"] for name in ("mae", "finetune_avg")
    )
    words = ["--data", str(folder), "--checkpoint", "x.pth", "--epochs", "0", "--workers", "0",
             "--batch_size", "8"]
    torch.save({"model": mae}, "x.pth")
    refused(finetune.main, words, "x.pth does not say its number of heads: give --heads")
    words += ["--heads", "4", "--warmup_epochs", "0"]
    finetune.main([*words, "--name", "a"])
    content = train.read("runs/a/last.pt")
    assert torch.equal(
        content["model"]["encoder.blocks.2.mlp.fc1.bias"], mae["blocks.2.mlp.fc1.bias"]
    )
    assert content["config"]["depth"] == 3 and content["config"]["img_size"] == (32, 32)
    said = capsys.readouterr().out
    assert "fresh: fc_norm, head" in said and "not taken over: decoder_blocks" in said

    torch.save({k: v for k, v in mae.items() if k != "blocks.0.norm2.bias"}, "x.pth")
    refused(finetune.main, words, "encoder.blocks.0.norm2.bias is missing")
    torch.save({**mae, "blocks.0.ls1.gamma": torch.ones(32)}, "x.pth")
    refused(finetune.main, words, "encoder.blocks.0.ls1.gamma is left over")
    torch.save({"weight": torch.zeros(3)}, "x.pth")
    refused(finetune.main, words, "x.pth is not a ViT's checkpoint")

    # a head of as many classes is kept
    write_pictures(tmp_path / "ten/train", "abcdefghij"[:3], 4)
    write_pictures(tmp_path / "ten/val", "abcdefghij"[:3], 2)
    tuned = {**tuned, "head.weight": tuned["head.weight"][:3], "head.bias": tuned["head.bias"][:3]}
    torch.save(tuned, "x.pth")
    finetune.main([*words, "--data", "ten", "--name", "b"])
    assert same(train.read("runs/b/last.pt")["model"], from_released(tuned))


def test_finetuning_resumes(tune, monkeypatch):
    """Where workers draw, too, and mixing and drop path in the process itself."""
    words = ["--epochs", "3", "--mixup", "0.8", "--cutmix", "1", "--drop_path", "0.2", "--randaug",
             "9", "--workers", "1"]
    straight, _ = tune(*words, name="straight")
    with stopping_after_two(monkeypatch):
        tune(*words, name="stopped")
    assert train.read("runs/stopped/last.pt")["epoch"] == 2
    assert same(straight["model"], tune(*words, "--resume", name="stopped")[0]["model"])


def test_two_processes(tune, folder):
    """A probe, whose BatchNorm sees half a batch each, and neighbours from both halves."""
    words = ["--data", folder, "--checkpoint", "runs/mae/last.pt", *TINY[8:], "--name", "two"]
    row = tune("--mode", "knn", "--k", "3")[1]
    said = together("finetune.py", *words, "--mode", "knn", "--k", "3")
    assert f"3 nearest neighbours: top1 {row['top1']:.2f}" in said
    together("finetune.py", *words, "--mode", "linear")
    assert train.read("runs/two/last.pt")["epoch"] == 2




@pytest.mark.parametrize("mode", ["scratch", "linear", "finetune"])
def test_every_mode_resumes(mode, folder, pretrain):
    pretrain()
    words = ["--data", str(folder), "--mode", mode, *TINY[8:], "--name", "x"]
    words += [*TINY[:8]] if mode == "scratch" else ["--checkpoint", "runs/mae/last.pt"]
    finetune.main(words)
    finetune.main([*words, "--epochs", "3", "--resume"])
    assert train.read("runs/x/last.pt")["epoch"] == 3
