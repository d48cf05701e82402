"""Fine-tuning, probing, neighbours, few labels and evaluation of encoders."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

import finetune
import train
from finetune import Classifier
from mae import MAE
from tests.lib.models import load_model
from tests.unit.conftest import (HERE, ROOT, TINY, parsed, same, settings, stopping_after_two,
                                 together, write_pictures)
from tests.unit.golden import load, replay
from vit import IMAGENET_MEAN, InputError, from_released, normalize, resize_pos_embed


def classifier(**kwargs):
    """Return a classifier with 4 x 6 patches."""
    torch.manual_seed(0)
    return Classifier((16, 24), 4, dim=16, depth=2, heads=2, classes=3, **kwargs)


def random_images(n):
    """Return images (n,3,16,24), uint8, whose brightness differs."""
    images = torch.randint(0, 256, (n, 3, 16, 24), dtype=torch.uint8)
    images[:, 0] = images[:, 0] // 8 + (200 // n) * torch.arange(n).byte()[:, None, None]
    return images


@pytest.mark.parametrize("pool, extra, width", [
    ("mean", 0, 16), ("token", 0, 16), ("joined", 0, 384), ("mean", 3, 16), ("token", 3, 16),
    ("extra", 3, 16), ("joined", 3, 48)])
def test_features(pool, extra, width):
    """Features are pooled from the 24 patch tokens, or from the extra tokens after them."""
    model, images = classifier(pool=pool, extra_tokens=extra), torch.randn(2, 3, 16, 24)
    tokens = model.encoder(images)
    assert tokens.shape == (2, 25 + extra, 16)
    patches, extras = tokens[:, 1:25], tokens[:, 25:]
    wanted = {"mean": patches.mean(1), "token": tokens[:, 0], "extra": extras.mean(1),
              "joined": torch.cat((extras if extra else patches).unbind(1), dim=1)}[pool]
    assert torch.equal(model.features(images), wanted)
    assert wanted.shape == (2, width) and model.logits(images).shape == (2, 3)


def test_extra_tokens_travel(pretrain, folder, capsys):
    """A classifier gets a MINR's extra tokens, even from a file of only the encoder. Other models
    say what they do not load."""
    own = "--method minr --hidden_dim 8 --groups 5 --ff_dim 4 --ff_sigma 4 --mlp_depth 3".split()
    state = pretrain(*own, name="minr", own=[])["model"]
    alone = {k.removeprefix("encoder."): v for k, v in state.items() if "encoder." in k}
    torch.save(alone, "x.pth")
    words = [*TINY[8:], "--data", str(folder), "--heads", "2", "--epochs", "0", "--name", "tuned"]
    for path, mode in (("runs/minr", "finetune"), ("x.pth", "linear"), ("runs/minr", "scratch")):
        finetune.main(["--checkpoint", path, "--mode", mode, *words, "--overwrite"])
        tuned, name = train.read_checkpoint("runs/tuned"), "encoder.extra_tokens"
        assert (tuned["config"]["pool"], tuned["config"]["extra_tokens"]) == ("joined", 5)
        assert torch.equal(tuned["model"][name], state[name]) == (mode != "scratch")
        assert tuned["mean"] == (train.MINR.mean if "minr" in path else train.MAE.mean)
    pretrain("--init", "runs/minr/last.pt")
    said = capsys.readouterr().out
    assert "left out of the file: biases, encoder.extra_tokens, to_columns" in said


def test_what_pooling_is_possible():
    """By default, joined tokens make at most 5,000 features."""
    pools = [finetune.default_pool(extra, 20) for extra in (0, 250, 251)]
    assert pools == ["mean", "joined", "extra"]


@pytest.mark.parametrize("pool", ["mean", "token", "extra", "joined"])
@pytest.mark.parametrize("probe", [False, True])
def test_what_is_trained(probe, pool):
    """Everything that is used is trained, including positions; in a probe, only the head is."""
    model = classifier(probe=probe, pool=pool, extra_tokens=2 * (pool in ("extra", "joined")))
    model(torch.randn(4, 3, 16, 24), torch.tensor([0, 1, 2, 0]))[0].backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None}
    assert moved == {n for n, p in model.named_parameters() if p.requires_grad}
    assert moved == {"head.1.weight", "head.1.bias"} if probe else "encoder.pos_embed" in moved
    head = model.head[1] if probe else model.head          # as in the release
    assert head.weight.std().item() == pytest.approx(0.01 if probe else 2e-5, rel=0.3)
    if probe:
        norm = model.head[0]
        assert isinstance(norm, torch.nn.BatchNorm1d) and (norm.affine, norm.eps) == (False, 1e-6)


def test_smoothing_and_probabilities():
    model, images = classifier(smoothing=0.1), torch.randn(4, 3, 16, 24)
    torch.nn.init.normal_(model.head.weight)               # logits that differ
    labels = torch.tensor([0, 1, 2, 0])
    hard = F.one_hot(labels, 3).float()
    wanted = -((hard * 0.9 + 0.1 / 3) * model.logits(images).log_softmax(1)).sum(1).mean()
    assert all(torch.allclose(model(images, x)[0], wanted, atol=1e-6) for x in (labels, hard))


def test_each_layer_has_its_learning_rate(tune, spy):
    """Each step scales the learning rate by each layer's factor (tests/lib/references.py)."""
    steps = spy(torch.optim.AdamW, "step", lambda optimizer: sorted(
        {group["lr"] for group in optimizer.param_groups}))
    content, _ = tune("--lr", "0.1", "--layer_decay", "0.5", "--weight_decay", "0.3",
                      "--warmup_epochs", "0")
    assert {group["weight_decay"] for group in content["optimizer"]["param_groups"]} == {0, 0.3}
    assert steps[0] == pytest.approx([0.1 / 8, 0.1 / 4, 0.1 / 2, 0.1])
    assert steps[5] == pytest.approx([lr / 2 for lr in steps[0]])      # after 5 of 10 steps


def test_finetuning_and_probing_learn(tune, folder):
    content, row = tune("--epochs", "8", "--lr", "5e-3", "--crop", "1")
    assert row["top1"] == 100 and "top5" not in row        # of two classes
    assert content["history"][0].keys() >= {"top1", "loss", "lr", "img_s"}
    with pytest.raises(InputError, match="has the method classifier, .* in METHODS of train.py"):
        load_model("runs/tuned/last.pt")
    model = load_model("runs/tuned/last.pt", {"classifier": Classifier})
    assert model.class_names == ["a", "b"]
    split = train.open_data(str(folder), HERE)[1]
    assert torch.equal(model.logits(normalize(split.images, model)).argmax(1), split.labels)
    content, row = tune("--mode", "linear", "--epochs", "8", "--crop", "1", name="probe")
    before = train.read_checkpoint("runs/mae/last.pt")["model"]       # unchanged
    encoder = {name: x for name, x in content["model"].items() if name.startswith("encoder.")}
    assert row["top1"] > 90 and "encoder.norm.weight" in encoder
    assert same(encoder, {name: before[name] for name in encoder})


def test_names_of_runs():
    """A run is named after its checkpoint and mode, then --data, --labels and --part if given."""
    for name, words in {"mae_shapes_linear": "--checkpoint runs/mae_shapes/last.pt --mode linear",
                        "mae_vit_finetune_birds_0.1": "--checkpoint mae_vit.pth --data my/birds "
                        "--labels 0.1", "scratch_shapes": "--mode scratch",
                        "mae_finetune_teacher": "--checkpoint mae.pth --part teacher"}.items():
        assert finetune.run_name(parsed("finetune.py", words)) == name


def test_starts(folder, tune):
    """A run takes the encoder, the data and resized positions from its checkpoint. A run from
    scratch takes none of them."""
    finetune.main(["--mode", "scratch", "--data", str(folder), *TINY, "--epochs", "0"])
    finetune.main("--checkpoint runs/mae --img_size 24,32 --epochs 0 --batch_size 8".split())
    mae, tuned, scratch = (train.read_checkpoint(f"runs/{name}") for name in (
        "mae", "mae_finetune", f"scratch_{folder.name}"))
    tokens = [run["model"]["encoder.cls_token"] for run in (mae, tuned, scratch)]
    assert torch.equal(*tokens[:2]) and not torch.equal(*tokens[1:])
    old, new = (run["model"]["encoder.pos_embed"] for run in (mae, tuned))
    assert torch.equal(resize_pos_embed(old, (4, 4), (6, 8)), new)
    assert tuned["flags"]["data"] == str(folder) and scratch["flags"]["layer_decay"] == 1.0


def test_part(tune):
    """With --part teacher, the teacher is the encoder (i-MAE's: see test_imae.py)."""
    content = train.read_checkpoint("runs/mae")
    content["model"] |= {name.replace("encoder", "teacher", 1): x + 1
                         for name, x in content["model"].items() if name.startswith("encoder.")}
    torch.save(content, "taught.pt")
    a, b = (tune("--checkpoint", "taught.pt", "--epochs", "0", *more, name=f"{len(more)}")[0]
            for more in ([], ["--part", "teacher"]))
    for name in ("encoder.cls_token", "encoder.blocks.0.attn.qkv.weight"):
        assert torch.equal(a["model"][name] + 1, b["model"][name])


@pytest.mark.parametrize("mode", ["finetune", "linear"])
def test_evaluating_a_checkpoint(tune, folder, mode, spy, capsys):
    """Evaluation gives the numbers from training, also with only the val/ of --data, and writes no
    file. Scores are never rounded to 16 bits. The output counts the images."""
    row = tune("--mode", mode, "--lr", "0.01")[1]
    shutil.copytree(folder / "val", "only/val")
    before, kinds = sorted(Path().rglob("*")), spy(torch.Tensor, "topk", lambda x, *_: x.dtype)
    for more in ([], ["--data", "only"], ["--amp", "bf16", "--eval_images", "4"]):
        found = finetune.main(["--mode", "eval", "--checkpoint", "runs/tuned/last.pt", *more,
                               "--workers", "0"])
        assert "bf16" in more or found["top1"] == row["top1"]
        assert {*kinds} == {torch.float32}
        kinds.clear()
        said = capsys.readouterr().out
        assert f"on {4 if 'bf16' in more else 11} images of " in said
    assert sorted(Path().rglob("*")) == before


def test_classes_of_a_checkpoint(tune, folder, refused):
    """Evaluation compares the names of classes in their order: with b, a, accuracy would be 0."""
    tune("--epochs", "0")
    val = train.open_data(str(folder), HERE, parts=["val"])[0]
    for names, words in ((["b", "a"], "b, a"), (["a", "b", "c"], "only in one: c"),
                         ([], "it has no val/CLASS/")):
        torch.save({"val": (val.images, val.labels, names)}, "other.pt")
        refused(finetune.main, "--mode eval --checkpoint runs/tuned --data other.pt",
                "runs/tuned", "other.pt", words)


def test_a_classifier_goes_on_as_it_was(tune, folder, capsys):
    """Training that starts from a classifier keeps its pooling, and its head. For other classes, the
    head is new, even if there are as many."""
    first, _ = tune("--pool", "token", "--epochs", "1")
    words = "--checkpoint runs/tuned --epochs 0 --batch_size 8 --name"
    finetune.main(f"{words} more")
    again = train.read_checkpoint("runs/more")
    assert again["config"]["pool"] == "token" and same(first["model"], again["model"])
    data, val, _ = train.open_data(str(folder), HERE)
    torch.save({name: (part.images, part.labels, ["c", "d"])
                for name, part in (("train", data), ("val", val))}, "other.pt")
    capsys.readouterr()
    finetune.main(f"{words} other --data other.pt")
    assert "new, with random weights: head" in capsys.readouterr().out
    other = train.read_checkpoint("runs/other")["model"]
    assert not torch.equal(other["head.weight"], first["model"]["head.weight"])
    assert torch.equal(other["encoder.cls_token"], first["model"]["encoder.cls_token"])


def test_a_file_of_another_class(tune, monkeypatch, refused):
    """A classifier of one's own is evaluated and loaded by its own class."""
    class Own(Classifier):
        def __init__(self, *args, frozen=2, **kwargs):
            super().__init__(*args, **kwargs)
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "main", partial(finetune.main, classifier=Own))
        _, row = tune("--epochs", "1")
    words = "--mode eval --checkpoint runs/tuned --workers 0"
    wrong = "runs/tuned/last.pt has frozen, which class Classifier lacks: use the file's own class"
    refused(finetune.main, words, wrong)
    with pytest.raises(InputError, match=wrong):
        load_model("runs/tuned", {"classifier": Classifier})
    class Deeper(Classifier):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.hidden = nn.Linear(2, 2)
    content = train.read_checkpoint("runs/tuned")
    config = {k: x for k, x in content["config"].items() if k != "frozen"}
    model = Deeper(**config).state_dict()
    torch.save({**content, "config": config, "model": model}, "deeper.pt")
    refused(finetune.main, "--mode eval --checkpoint deeper.pt --workers 0", "hidden.bias, hidden.w",
            "which class Classifier lacks")
    assert finetune.main(words, Own)["top1"] == row["top1"]
    assert load_model("runs/tuned", {"classifier": Own}).class_names == ["a", "b"]


def test_scaled_images_are_refused(tune):
    """The pixels of a pipeline of one's own, with ToDtype(scale=True), would all look black. So
    would normalised ones."""
    tune("--epochs", "0")
    model = load_model("runs/tuned", {"classifier": Classifier})
    images = torch.rand(2, 3, *model.encoder.img_size)
    for wrong in (images, 4 * images - 2):
        with pytest.raises(InputError, match="images must be in .0, 255."):
            model.classify(wrong)
    for wrong in (255 * images.movedim(1, 3), (255 * images[0]).movedim(0, 2).byte().numpy()):
        with pytest.raises(InputError, match=r"\(B,3,H,W\).*torch.as_tensor.*movedim\(-1, -3\)"):
            model.classify(wrong)
    with pytest.raises(InputError, match=r"not ndarray \(2, 3, 16, 16\)"):
        model.classify((255 * images).numpy())
    assert model.classify(255 * images).shape == (2, 2)


def test_nearest_neighbours_by_hand(spy):
    """Each of four neighbours votes with exp(cosine / 0.07), computed from mean patch tokens of
    unit length. Under autocast, only the model computes in 16 bits."""
    model = classifier(probe=True, norm=True).eval()       # this also seeds
    images, labels = random_images(9), torch.tensor([0, 1, 1, 2, 2, 0, 1, 0, 2])
    query, wanted = images[:1] // 2 * 2, torch.zeros(3)
    tokens = model.encoder(normalize(torch.cat([images, query]), model))[:, 1:].mean(1)
    for cosine, label in sorted(zip(F.cosine_similarity(tokens[:9], tokens[9:]), labels))[-4:]:
        wanted[label] += (cosine / 0.07).exp()
    ranked = spy(torch.Tensor, "topk",
                 lambda x, *_: (x.dtype, torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")             # as start_processes does on a GPU
    for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        here = HERE._replace(dtype=dtype)
        score = finetune.knn(model, train.ImageDataset(images, labels, "abc"), 4, here)
        with here.autocast():                              # as evaluate calls it
            assert torch.allclose(score(query), wanted, rtol=rtol)
    assert ranked == [(torch.float32, "highest")] * 2


def test_few_labels(tune, tmp_path, capsys, spy):
    """--labels keeps a fraction of each class's images, at least one, which the seed chooses.
    Validation is rarer, so that it covers no more images than training."""
    write_pictures(tmp_path / "data/train", "ab", 20)
    write_pictures(tmp_path / "data/train", "c", 2, seed=1)
    write_pictures(tmp_path / "data/val", "abc", 4)

    def kept(fraction, seed):
        split = train.open_data("data", HERE)[0]
        every, split = split.images, finetune.keep_labels(split, fraction, seed)
        ids = [(every == x).all((1, 2, 3)).nonzero().item() for x in split.images]
        assert [min(2, i // 20) for i in ids] == split.labels.tolist()
        return split.labels.bincount().tolist(), sorted(ids)
    assert kept(0.28, 0)[0] == [6, 6, 1] and kept(1.0, 0)[1] == [*range(42)]       # rounded
    assert kept(0.2, 0) == kept(0.2, 0) != kept(0.2, 1) and kept(1e-6, 0)[0] == [1, 1, 1]
    seeds = spy(finetune, "keep_labels", lambda data, fraction, seed: seed)
    words = ["--data", "data", "--labels", "0.15"]
    content, _ = tune(*words, "--batch_size", "4", "--epochs", "5", "--seed", "3")
    assert "7 train, 12 val" in capsys.readouterr().out and seeds == [3]
    scored = [row["epoch"] for row in content["history"] if "top1" in row]
    assert scored == [2, 4, 5]                             # 12 is about two times 7
    tune("--mode", "knn", *words, "--eval_images", "4", "--pool", "token", "--k", "8")
    said = capsys.readouterr().out
    assert "on 4 images" in said and "7 neighbours out of 7" in said
    assert re.search(r"largest class (50|75)\.00 %, by", said)         # of the four


def test_flags_do_something(tune):
    flags = ["", "--drop_path 0.5", "--smoothing 0.3", "--seed 1", "--crop 1", "--mode linear",
             "--mode linear --mix_ratio 0.3"]
    runs = [tune(*words.split(), name=f"{i}")[0]["model"] for i, words in enumerate(flags)]
    for i, words in enumerate(flags):
        for run, other in zip(runs[:i], flags):
            assert not same(run, runs[i]), f"'{words}' does the same as '{other}'"


def augmented(images, **more):
    """Return a data set of these images, transformed as set by --randaug and --erasing."""
    data = train.ImageDataset(images, torch.arange(len(images)) % 3, "abc")
    run = settings(**{"randaug": 0, "erasing": 0.0, **more}, batch_size=len(images))
    return train.Transformed(data, finetune.augmentation(run, HERE, classifier(), data))


def test_augmentation_of_an_image():
    """An image's seed draws two RandAugment operations, of the given magnitude, and a rectangle
    that is filled with the mean colour."""
    images = random_images(12)
    data, erasing = augmented(images, randaug=27), augmented(images, erasing=1.0)
    half = augmented(images, erasing=0.5)
    assert 2 < sum(torch.equal(half[0, i][0], image) for i, image in enumerate(images)) < 10
    crop = train.crop_transform((16, 24), settings())
    mean = torch.tensor([int(255 * m) for m in IMAGENET_MEAN])
    for i, image in enumerate(images):
        ours, *_ = data[5, i]
        torch.manual_seed(hash((5, i)))
        assert torch.equal(ours, v2.RandAugment(2, 27)(crop(image)))
        erased, *_ = erasing[0, i]
        gone = (erased != image).any(0)
        assert 0.01 < gone.float().mean() < 0.4 and (erased[:, gone].T == mean).all()
    with pytest.raises(InputError, match="images have 4: pass --randaug 0"):
        finetune.augmentation(settings(randaug=9), HERE, Classifier(16, 4, 4, 16, 1, 2), None)


@pytest.mark.parametrize("more", [dict(mix_ratio=0.25), dict(mixup=0.8), dict(mixup=1e3),
                                  dict(cutmix=1.0)])
def test_mixed_images(more):
    """Labels get the weights of the images or, in CutMix, the fractions of their pixels."""
    images, labels = random_images(12), torch.arange(12) % 3
    model = classifier(**more)
    mixed, targets = model.model_inputs(*model.draw_batch([images], labels, None))
    x, y = normalize(images, classifier()), normalize(images.roll(1, 0), classifier())
    weight = ((mixed - y) / (x - y))[(x - y).abs() > 0.1]  # of each image
    mean, whole = weight.mean(), (weight - weight.round()).abs().max() < 1e-3
    assert whole if "cutmix" in more else weight.std() < 1e-3 and 0.01 < mean < 0.99
    assert "mix_ratio" not in more or mean == pytest.approx(0.25, abs=1e-3)
    assert more.get("mixup") != 1e3 or 0.4 < mean < 0.6    # Beta(1000, 1000)
    one_hot = F.one_hot(labels, 3).float()
    wanted = mean * one_hot + (1 - mean) * one_hot.roll(1, 0)
    assert torch.allclose(targets, wanted, atol=0.05)


def test_released_checkpoints(tmp_path, monkeypatch, refused):
    """Classifiers of both poolings can be evaluated, on as many classes, and trained further."""
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "ten/train", "abcdefghij", 1)
    write_pictures(tmp_path / "ten/val", "abcdefghij", 5)
    fixture = load(ROOT / "tests/unit/golden/finetune_avg.pt")
    tuned, val = fixture["state_dict"], train.open_data("ten", HERE, (32, 32))[1]
    _, images, labels = next(train.val_batches(val, HERE, (32, 32)))
    for pool, norm in (("token", "norm."), ("avg", "fc_norm.")):
        state = {name.replace("fc_norm.", norm): x for name, x in tuned.items()}
        torch.save(state, "x.pth")
        row = finetune.main("--mode eval --checkpoint x.pth --heads 4 --data ten".split())
        scores = replay({**fixture, "config": {**fixture["config"], "global_pool": pool},
                         "state_dict": state, "images": normalize(images, MAE),
                         "labels": labels})["pred"]
        rank = (scores > scores.gather(1, labels[:, None])).sum(1)
        top1, top5 = (100 * (rank < n).float().mean().item() for n in (1, 5))
        assert row == pytest.approx(dict(top1=top1, top5=top5, largest_class=10, standard_error=(
            top1 * (100 - top1) / 50) ** 0.5)) and 0 < top5 < 100
    refused(finetune.main, "--mode eval --checkpoint x.pth --heads 4", "10 classes of x.pth")
    finetune.main("--checkpoint x.pth --heads 4 --data ten --epochs 0 --batch_size 2 --name more")
    assert same(train.read_checkpoint("runs/more")["model"], from_released(tuned))


@pytest.mark.parametrize("mode, words", [
    ("linear", "--amp fp16"),
    ("finetune", "--mixup 0.8 --cutmix 1 --drop_path 0.2 --randaug 9 --workers 1")])
def test_a_resumed_run_is_the_same(tune, monkeypatch, mode, words):
    """A resumed run continues all random numbers, in workers and in the process itself."""
    words = ["--mode", mode, "--epochs", "3", *words.split()]
    straight, _ = tune(*words, name="straight")
    with stopping_after_two(monkeypatch):
        tune(*words, "--patch_size", "4", name="stopped")  # as the encoder has it
    resumed, _ = tune(*words, "--resume", name="stopped")
    assert same(straight["model"], resumed["model"]) and straight["scaler"] == resumed["scaler"]


def alike(_, *words):
    """Run finetune.py, and assert that both processes score images alike."""
    evaluate = finetune.evaluate

    def compared(score, *inputs):
        with torch.no_grad():
            scores = score(torch.arange(3 * 3 * 16 * 16).view(3, 3, 16, 16) % 256)
        both = [torch.zeros_like(scores) for _ in range(2)]
        dist.all_gather(both, scores)
        assert torch.equal(*both)
        return evaluate(score, *inputs)
    finetune.evaluate = compared
    finetune.main([*map(str, words)])


def test_two_processes(tune, folder):
    """Neighbours, training and validation give what one process gives. A probe's BatchNorm sees
    half a batch in each, but both validate with the saved statistics."""
    common = ["--data", folder, "--checkpoint", "runs/mae/last.pt", "--workers", "0"]
    words = [*common, *TINY[8:], "--name", "two"]
    neighbours = ["--mode", "knn", "--k", "3", "--labels", "0.2"]
    row, said = tune(*neighbours)[1], together("finetune.py", *common, *neighbours, work=alike)
    assert f"top1 {row['top1']:.2f}, on" in said
    together("finetune.py", *words, "--optimizer", "sgd")
    two, (one, row) = train.read_checkpoint("runs/two"), tune("--optimizer", "sgd")
    assert same(one["model"], two["model"], atol=1e-6) and one["flags"]["lr"] > 1e-3
    assert two["history"][-1]["top1"] == pytest.approx(row["top1"], abs=1e-3)
    together("finetune.py", *words, "--mode", "linear", "--overwrite", work=alike)
    assert train.read_checkpoint("runs/two")["config"]["probe"]
