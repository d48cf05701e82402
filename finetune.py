"""Evaluate what an encoder has learned: `python finetune.py --checkpoint runs/mae_shapes/last.pt`.

Fine-tune the encoder, train the same network from scratch, fit a linear probe, or classify by
nearest neighbours. --mode eval is for a fine-tuned checkpoint, yours or a released one. `finetune`
opens the data, builds a Classifier and hands both to train.fit. train.py handles data and files.

The recipes are MAE's (He et al., CVPR 2022): Table 9 for fine-tuning, Table 10 for the linear
probe. CrossMAE Table 11 and HyperMAE Table 13 are like Table 9. Erasing and flips are from the
released code. The end of this file lists how ours differ. For i-MAE, see tests/docs/FLAGS.md.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

import train
from train import count, fraction, in_range, path
from vit import IMAGENET_MEAN, IMAGENET_STD, Method, ViT, normalize, require


# --------------------------------------------------------------------------------------- training
def finetune(flags, cls):
    """Run --mode finetune, scratch or linear on a `cls`, and return the last row of the log."""
    here = train.start_processes(flags)
    with train.open_run(flags, here, run_name(flags)) as folder:
        run, model, data, val = prepare(flags, here, cls, folder)
        return train.fit(run, here, model, data, val, augmentation(run, here, model, data))


def nearest_neighbours(flags, cls):
    """Run --mode knn: print and return the accuracies."""
    here = train.start_processes(flags)
    run, model, data, val = prepare(flags, here, cls)
    score = knn(model.eval(), data, run.k, here)
    row = evaluate(score, val, here, model.encoder.img_size, run.eval_images)
    text = as_text(row, val, run.data, run.eval_images)
    print(f"{text}, by {min(run.k, len(data.labels))} neighbours out of {len(data.labels)}")
    return row


def prepare(flags, here, cls, folder=None):
    """Open the checkpoint and the data, settle the run, and build a `cls`. Returns the settings,
    the model and both data sets."""
    start = train.NO_CHECKPOINT
    if flags.checkpoint:
        start = train.read_checkpoint(flags.checkpoint, flags.heads, flags.part)
    name = flags.data or start["flags"].get("data", "shapes")
    img_size = flags.img_size or start["config"].get("img_size")
    data, val, img_size = train.open_data(name, here, img_size, train_images=flags.train_images)
    odd = ", ".join(sorted({*data.classes} ^ {*val.classes})[:5])
    require(len(data.classes) > 1 and data.classes == val.classes, f"--data {name} needs two or "
            f"more train/CLASS/ and the same val/CLASS/, not {len(data.classes)} and "
            f"{len(val.classes)}{f' (only in one: {odd})' * bool(odd)}. To split folders CLASS/, "
            f"or sort images into them, see \"folds\" in tests/docs/HOWTO.md")
    if start.get("classes", data.classes) != data.classes:             # the head is for others
        start["model"] = {k: x for k, x in start["model"].items() if not k.startswith("head.")}
    data = keep_labels(data, flags.labels, flags.seed)
    sizes = train.encoder_sizes(flags, img_size, start["config"])
    probe = flags.mode in ("linear", "knn")
    extra_tokens = len(start["model"].get("encoder.extra_tokens", ()))
    method = train.METHODS.get(start["method"])            # a fork's class may set pool
    own, _ = train.arguments_of(cls)
    own["pool"] = (start["config"].get("pool") or getattr(method, "pool", None)
                   or default_pool(extra_tokens, sizes["dim"]))
    images = len(data.labels), len(val.labels[:flags.eval_images])
    run = train.settle(
        flags, sizes, *RECIPES.get(flags.mode, ({}, {})), *images, own=own,
        fixed=dict(classes=len(data.classes), probe=probe, extra_tokens=extra_tokens,
                   norm=probe and "encoder.norm.weight" in start["model"],
                   mean=start["mean"], std=start["std"]), data=name, folder=folder)
    torch.manual_seed(run.seed)
    model = cls(**run.config).to(here.device)
    if flags.mode == "knn":
        model.head = None                                  # only the encoder is used
    if flags.mode != "scratch":
        train.initialize(model, start)
    return run, model, data, val


def run_name(flags):
    """Name a run after its checkpoint and mode, --data if given, --labels if below 1, and --part
    unless it is the encoder."""
    words = [train.name_of(flags.checkpoint), flags.mode] if flags.checkpoint else ["scratch"]
    if flags.data or not flags.checkpoint:
        words.append(train.name_of(flags.data or "shapes"))
    if flags.labels < 1:
        words.append(f"{flags.labels:g}")
    if flags.part != "encoder":
        words.append(flags.part)
    return "_".join(words)


def augmentation(run, here, model, data):
    """Return the transform of training images, or None if train.fit can crop whole batches: images
    in memory, without RandAugment or erasing."""
    require(not run.randaug or model.encoder.in_chans in (1, 3), f"RandAugment needs 1 or 3 "
            f"channels, and the images have {model.encoder.in_chans}: pass --randaug 0")
    require(not model.probe or run.batch_size > here.world * run.accum, f"--batch_size "
            f"{run.batch_size}: a probe's BatchNorm needs two images in each process and piece")
    extra = [v2.RandAugment(2, run.randaug)] if run.randaug else []    # two per image; item 1
    if run.erasing:                                        # item 2
        extra += [v2.RandomErasing(run.erasing, value=[255 * m for m in model.mean])]
    if extra or not data.in_memory:
        return train.crop_transform(model.encoder.img_size, run, *extra)


def layer_decay_groups(model, weight_decay, layer_decay):
    """Return parameter groups, each a dict of params, weight_decay and lr_factor. The learning rate
    of layer i is multiplied by lr_factor = layer_decay ** (n - i) (BEiT; MAE Table 9). Embeddings
    are layer 0, block j is layer j + 1, and everything after the blocks is layer n. As in
    pretraining, biases and norms (parameters with fewer than two axes) get no weight decay. Here,
    as in the release, learned tokens and positions get none either."""
    groups, n = {}, len(model.encoder.blocks) + 1
    for name, p in model.named_parameters():
        part = name.removeprefix("encoder.").split(".")
        learned = part[0] in ("cls_token", "pos_embed", "extra_tokens")
        layer = 0 if learned or part[0] == "patch_embed" else n
        if part[0] == "blocks":
            layer = int(part[1]) + 1
        decays = p.ndim > 1 and not learned
        if p.requires_grad:
            if (layer, decays) not in groups:
                groups[layer, decays] = dict(
                    params=[], weight_decay=weight_decay if decays else 0.0,
                    lr_factor=layer_decay ** (n - layer))
            groups[layer, decays]["params"].append(p)
    return [*groups.values()]


def keep_labels(data, fraction, seed):
    """Return `data` with only a fraction of each class's images, at least one, drawn by `seed`."""
    g, chosen = torch.Generator().manual_seed(seed), []
    for c in range(len(data.classes)):
        ids = (data.labels == c).nonzero().flatten()
        order = ids[torch.randperm(len(ids), generator=g)]
        chosen.append(order[:max(1, round(fraction * len(ids)))])
    return data.select(torch.cat(chosen))


# -------------------------------------------------------------------------- the model, the recipes
class Classifier(Method):
    """A ViT with a classification head. In training, call `loss, metrics = model(images, targets)`.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        extra_tokens: number of extra tokens after the patches (MINR's weight tokens)
        classes: number of classes
        probe: train only a linear layer, after a BatchNorm without affine parameters (MAE A.1)
        norm: whether a probe's encoder has a final norm. In fine-tuning, the encoder has
            one only if pool is "token" (CrossMAE A.6); otherwise a norm after pooling, fc_norm,
            replaces it (MAE's release)
        mean, std: the input is (image / 255 - mean) / std
        pool: features for the head. mean: of the patch tokens. token: class token. extra: mean of
            the extra tokens. joined: all extra tokens (MINR's default up to 5000 features) or,
            without any, all patch tokens as one vector
        drop_path: drop path rate of the last block
        smoothing: label smoothing
        mixup: alpha of MixUp; 0: off. With CutMix on, too, each --accum piece draws one
        cutmix: alpha of CutMix; 0: off
        mix_ratio: weight of an image that is mixed with another one, without MixUp; 0: off
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12,
                 extra_tokens=0, classes=1000, probe=False, norm=False, mean=IMAGENET_MEAN,
                 std=IMAGENET_STD, *, pool="mean", drop_path=0.0, smoothing=0.0, mixup=0.0,
                 cutmix=0.0, mix_ratio=0.0):
        super().__init__()
        pools = ("mean", "token", "extra", "joined")
        require(pool in pools and (pool != "extra" or extra_tokens),
                f"--pool {pool} must be one of {pools}; extra is for MINR only")
        require(not mix_ratio or not (mixup or cutmix), "--mix_ratio needs --mixup 0 --cutmix 0")
        self.classes, self.pool, self.probe, self.smoothing = classes, pool, probe, smoothing
        self.mean, self.std, self.mix_ratio = tuple(mean), tuple(std), mix_ratio
        self.mixers = [kind(alpha=alpha, num_classes=classes) for kind, alpha in
                       ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if alpha]
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, drop_path=drop_path,
                           norm=norm if probe else pool == "token", extra_tokens=extra_tokens)
        self.encoder.pos_embed.requires_grad_()            # fixed in pretraining, learned here
        width = dim * (extra_tokens or self.encoder.num_patches) if pool == "joined" else dim
        self.num_features = width
        linear = nn.Linear(width, classes)
        nn.init.trunc_normal_(linear.weight, std=0.01 if probe else 2e-5)  # as in the release
        nn.init.zeros_(linear.bias)
        if probe:
            self.encoder.requires_grad_(False)
            self.head = nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=1e-6), linear)
        else:                                              # the encoder normalises the class token
            self.fc_norm = nn.Identity() if pool == "token" else nn.LayerNorm(width, eps=1e-6)
            self.head = linear

    def features(self, images):
        """Return the features of normalised images (B,C,H,W): (B,D), (B,G*D) or (B,L*D)."""
        tokens = self.encoder(images)                                  # (B, 1+L+G, D)
        patches = tokens[:, 1:1 + self.encoder.num_patches]            # (B, L, D)
        extra = tokens[:, 1 + self.encoder.num_patches:]               # (B, G, D)
        if self.pool == "token":
            return tokens[:, 0]                                        # (B, D)
        if self.pool == "joined":
            return (extra if extra.shape[1] else patches).flatten(1)   # (B, G*D) or (B, L*D)
        return (patches if self.pool == "mean" else extra).mean(dim=1)  # (B, D)

    def logits(self, images):
        """Return the logits (B,classes) of normalised images (B,C,H,W)."""
        x = self.features(images)                          # (B, D), or (B, G*D), or (B, L*D)
        with torch.autocast(images.device.type, enabled=False):        # in 16 bits, classes tie
            x = x.float()
            scores = self.head(x if self.probe else self.fc_norm(x))   # (B, classes)
        return scores

    def classify(self, images):
        """Switch to eval mode and return the logits (B,classes) of images (B,C,H,W) in [0, 255]."""
        inputs = normalize(images, self)
        require(not images.is_floating_point() or images.amin() >= 0 and images.amax() > 1,
                "images must be in [0, 255], e.g. uint8, not in [0, 1], and not normalised")
        return self.eval().logits(inputs)

    def parameter_groups(self, run):
        """Return the parameter groups of the optimizer, each a dict."""
        return layer_decay_groups(self, run.weight_decay, run.layer_decay)

    def draw_batch(self, crops, labels, noise):
        """Return a step's images and labels."""
        return [crops[0], labels]

    def model_inputs(self, images, labels):
        """Return normalised images and targets for a piece of the batch. Each piece and process
        draws its own mixture, as in the release."""
        images = normalize(images, self)
        if self.mix_ratio:                                 # i-MAE Table 4, item 7
            labels = F.one_hot(labels, self.classes).float()
            return [torch.lerp(x.roll(1, 0), x, self.mix_ratio) for x in (images, labels)]
        return v2.RandomChoice(self.mixers)(images, labels) if self.mixers else (images, labels)

    def scores(self, data, val, here, run):
        """Return the scores of evaluate."""
        if here.world > 1:
            for buffer in self.buffers():                  # BatchNorm: all use rank 0's statistics
                dist.broadcast(buffer, 0)
        return evaluate(self.classify, val, here, self.encoder.img_size, run.eval_images)

    def forward(self, images, targets):
        """Return the cross-entropy and {"loss": the detached loss} for normalised images (B,C,H,W)
        and targets. Targets are class indices (B,) or class probabilities (B,classes)."""
        loss = F.cross_entropy(self.logits(images), targets, label_smoothing=self.smoothing)
        return loss, {"loss": loss.detach()}


def default_pool(extra_tokens, dim):
    """Return the default --pool for an encoder of width dim. For MINR, it uses the weight tokens:
    MINR's loss reads only their outputs, so the outputs of patch tokens are not trained."""
    if not extra_tokens:
        return "mean"                                      # items 4, 5
    return "joined" if extra_tokens * dim <= 5000 else "extra"         # a head of moderate size


FINETUNE = dict(  # MAE Table 9, CrossMAE Table 11, HyperMAE Table 13; item 6
    optimizer="adamw", blr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, schedule="cosine",
    batch_size=1024, epochs=100, warmup_epochs=5, crop=0.08, flip=True, randaug=27, erasing=0.25,
    mixup=0.8, cutmix=1.0, mix_ratio=0.0, smoothing=0.1, drop_path=0.1, layer_decay=0.75)
PLAIN = dict(randaug=0, erasing=0.0, mixup=0.0, cutmix=0.0, drop_path=0.0)  # off in MAE's probe
LINEAR = dict(  # MAE Table 10, with SGD instead of LARS (item 3)
    FINETUNE, optimizer="sgd", blr=0.1, weight_decay=0.0, batch_size=4096, epochs=90,
    warmup_epochs=10, smoothing=0.0, layer_decay=1.0, **PLAIN)
# ours: what --recipe small replaces of the above, see tests/docs/RECIPE.md and train.derive
SMALL_LINEAR = dict(
    batch_size=128, epochs=10, warmup_epochs=1, for_images=10_000, crop=0.5, **PLAIN)
SMALL = dict(SMALL_LINEAR, batch_size=64, lr=2e-3, crop=0.85, up_to=10)
RECIPES = {  # for each mode: the paper's recipe and the small one
    "finetune": (FINETUNE, dict(SMALL, layer_decay=0.9)), "linear": (LINEAR, SMALL_LINEAR),
    "scratch": (dict(FINETUNE, layer_decay=1.0), dict(SMALL, width_power=1.5, up_to=50))}  # item 8


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(score, val, here, img_size, most=None):
    """Return scores on val in %: the accuracies top1 and, with six classes or more, top5; top1's
    standard_error for this many images; and the share of the largest_class, i.e. the accuracy of
    always answering it. score(images) returns scores (b,classes)."""
    ranks = (1, 5) if len(val.classes) > 5 else (1,)
    sums, n = {f"top{k}": 0 for k in ranks}, 0             # a process without images reports zeros
    for _, images, labels in train.val_batches(val, here, img_size, most):
        with here.autocast():
            scores = score(images)                                     # (b, classes)
        right = scores.topk(min(5, scores.shape[1])).indices == labels.unsqueeze(1)  # (b, 5)
        for k in ranks:
            sums[f"top{k}"] += 100 * right[:, :k].sum()
        n += len(images)
    row = here.mean_over_processes(sums, n)
    every = val.labels[train.random_order(len(val.labels))[:most]]     # of all processes
    return {**row, "standard_error": (row["top1"] * (100 - row["top1"]) / len(every)) ** 0.5,
            "largest_class": 100 * every.bincount().max().item() / len(every)}


def as_text(row, val, name, most):
    """Return the accuracies in words, and what a constant reaches: the largest class's share."""
    scores = ", ".join(f"{score} {row[score]:.2f}" for score in ("top1", "top5") if score in row)
    n, share = len(val.labels[:most]), row["largest_class"]
    return f"{scores}, on {n} images of {name}; largest class {share:.2f} %"


@torch.no_grad()
def knn(model, data, k, here, temperature=0.07):
    """Return a function score(images). It returns votes (b,classes). The k training images with
    the most similar features vote for their classes. Each vote has weight exp(cosine / temperature)
    (Wu et al., 2018). Features are pooled as set by --pool and normalised to unit length."""
    torch.set_float32_matmul_precision("highest")          # TF32 would round the cosines

    def embed(images):
        with here.autocast():
            features = model.features(normalize(images, model))
        return F.normalize(features.float(), dim=1)                    # (b, width)

    bank = torch.zeros(len(data.labels), model.num_features, device=here.device)   # (N, width)
    for ids, images, _ in train.val_batches(data, here, model.encoder.img_size):
        bank[ids.to(here.device)] = embed(images)
    if here.world > 1:                                     # each process has filled its own rows
        dist.all_reduce(bank)
    bank_labels = data.labels.to(here.device)

    def score(images):
        features = embed(images)                                       # (b, width)
        with torch.autocast(here.device.type, enabled=False):  # in 16 bits, many cosines would tie
            cosine, ids = (features @ bank.T).topk(min(k, len(bank)))  # (b, k) each
        votes = torch.zeros(len(ids), len(data.classes), device=here.device)
        return votes.scatter_add(1, bank_labels[ids], (cosine / temperature).exp())  # (b, classes)
    return score


def evaluate_checkpoint(flags, cls):
    """Run --mode eval: print and return the accuracies of a checkpoint with a head."""
    here = train.start_processes(flags)
    content = train.read_checkpoint(flags.checkpoint, flags.heads)
    state, config = content["model"], content["config"]
    if content["method"] is None and "head.weight" in state:           # a released checkpoint
        pool = "mean" if "fc_norm.weight" in state else "token"
        config = dict(config, classes=len(state["head.weight"]), pool=pool)
    require("classes" in config, f"{flags.checkpoint} has no classification head: train one with "
                                 f"--mode finetune or linear")
    name = flags.data or content["flags"].get("data", "shapes")
    val, img_size = train.open_data(name, here, config["img_size"], parts=["val"])
    classes = content.get("classes", val.classes)          # in order; a released file has no names
    odd, said = ", ".join(sorted({*val.classes} ^ {*classes})[:5]), "it has no val/CLASS/"
    if val.classes:
        said = f"only in one: {odd}" if odd else f"their order is {', '.join(val.classes[:5])}"
    require(val.classes == classes and len(classes) == config["classes"],
            f"the {config['classes']} classes of {flags.checkpoint} are not those of {name}: "
            f"{said}")
    model = train.model_of({**content, "config": config}, cls).to(here.device)
    row = evaluate(model.classify, val, here, img_size, flags.eval_images)
    print(as_text(row, val, name, flags.eval_images))
    return row


# ------------------------------------------------------------------------------- the command line
TUNING = {  # flags, as in train.py; a Classifier's own arguments are flags, too
    "randaug": (in_range(int, 0, 30), "magnitude of RandAugment, up to 30; 0: off"),
    "erasing": (fraction, "probability of erasing a rectangle"),
    "layer_decay": (fraction, "ratio of a layer's learning rate to the next layer's; 1: no decay")}


@train.settings_restored()
def main(argv=None, classifier=Classifier):
    """Run `python finetune.py` with the arguments `argv`, like train.main, on a Classifier or a
    subclass. Returns the last row of log.jsonl. The modes knn and eval write no files, and return
    the scores."""
    words = train.words_of(argv)
    modes = (*RECIPES, "knn", "eval")
    parser = train.new_parser("finetune.py", f"--checkpoint FILE --mode {'|'.join(modes)}", words)
    option = parser.add_argument
    option("--mode", choices=modes, default="finetune",
           help="linear: a linear probe; knn: nearest neighbours; scratch: fine-tune from random "
                "weights, with the sizes and data of any --checkpoint; eval: evaluate a fine-tuned "
                "checkpoint (finetune)")
    mode = parser.parse_known_args(words)[0].mode           # it decides which other flags exist
    parser.set_defaults(method="classifier")
    if mode not in RECIPES:
        unused = [x for x in words if x.split("=")[0] in {f"--{name}" for name in train.RUN}]
        require(not unused, f"--mode {mode} writes no run: leave out {' '.join(unused)}")
    option("-h", "--help", action="help", help="show this help and exit")
    option("--checkpoint", metavar="FILE", type=path, required=mode != "scratch",
           help="checkpoint from train.py, or released by MAE, CrossMAE or timm")
    train.add_flags(parser, "data and device", train.DATA)
    if mode == "eval":
        train.add_flags(parser, "encoder", {"heads": train.ENCODER["heads"]})
        return evaluate_checkpoint(parser.parse_args(words), classifier)
    train.add_flags(parser, "training images and encoder", train.ENCODER)
    option("--part", default="encoder", metavar="X",
           help="which part of the checkpoint to use, e.g. teacher (encoder)")
    option("--labels", type=in_range(float, 1e-6, 1), default=1.0, metavar="X",
           help="use this fraction of each class's labels, at least one per class (1)")
    own, flags = train.arguments_of(classifier)
    if mode == "knn":
        option("--k", type=count, default=20, help="number of neighbours (20)")
        flags = {name: flags[name] for name in flags if name not in FINETUNE}  # for training
    recipe, small = RECIPES.get(mode, ({}, {}))
    train.add_flags(parser, f"arguments of {classifier.__name__}", flags, {**own, **recipe}, small)
    if mode != "knn":
        train.add_flags(parser, "run", train.RUN)
        flags = {**train.RECIPE, **TUNING}
        if mode == "linear":                               # its encoder is frozen
            del flags["layer_decay"]
        train.add_flags(parser, "recipe", flags, {**train.DEFAULTS, **recipe}, small)
    run = nearest_neighbours if mode == "knn" else finetune
    return run(parser.parse_args(words), classifier)


# Paper and release: where they or torchvision differ, and what we do
#   1. RandAugment (9, 0.5) draws magnitudes near 9 of 10. We use torchvision's, always at 27 of 30.
#   2. Only the released code has random erasing. It fills in noise; we fill in the mean colour.
#   3. The paper's linear probe uses LARS, which PyTorch lacks, and batches of 16384. Ours uses SGD
#      with momentum and batches of 4096. By Table 10's caption, SGD with these works similarly.
#   4. For fine-tuning, MAE A.1 uses the class token, HyperMAE Sec. 3 the mean of all tokens, and
#      MAE's release the mean of the patch tokens. We follow MAE's release.
#   5. The probe and nearest neighbours also use these features, so that methods can be compared.
#      The released probe uses the class token (`--pool token`) or, for a mean, a new, frozen norm;
#      ours keeps the encoder's. For MINR, see default_pool.
#   6. The recipe is for ViT-B, layer decay as in MAE and HyperMAE (CrossMAE Table 11 lists none).
#      For other sizes, and for what the releases have instead, see tests/docs/FLAGS.md.
#   7. i-MAE Table 4 does not explain its "image mix ratio". We weight images and labels by it.
#   8. `--mode scratch` is Table 9 without layer decay. MAE has Table 11, which averages weights.
#   9. The releases report the best epoch on the validation images; we report the last one. When
#      fine-tuning, their final learning rate is 1e-6. `crop` (0.08) is timm's, and in no table.

if __name__ == "__main__":
    train.shell(main)
