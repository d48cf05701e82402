"""Evaluate what an encoder has learned: `python finetune.py --checkpoint runs/mae_shapes/last.pt`.

Fine-tune the encoder, train the same network from scratch, fit a linear probe, or classify by
nearest neighbours. --mode eval is for a fine-tuned checkpoint, yours or a released one. `finetune`
opens the data, builds a Classifier and hands both to train.fit. train.py handles data and files.

The recipes are MAE's (He et al., CVPR 2022): Table 9 for fine-tuning, Table 10 for the linear
probe. CrossMAE Table 11 and HyperMAE Table 13 are like Table 9. Erasing and flips are from the
released code. The end of this file lists the differences. For i-MAE, see tests/docs/FLAGS.md.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from train import (DATA, DEFAULTS, ENCODER, METHODS, RECIPE, RUN, add_flags, apply_recipe, autocast,
                   count, crop_batch, crop_transform, fill_in, fit, fraction, in_range, initialize,
                   mean_over_processes, name_of, new_parser, not_negative, open_data, open_run,
                   read_checkpoint, run_cli, val_batches, vit_config)
from vit import IMAGENET_MEAN, IMAGENET_STD, SIZES, ViT, count_extra_tokens, normalize, require


# --------------------------------------------------------------------------------------- training
def finetune(args):
    """Run --mode finetune, scratch or linear, and return the last row of the log."""
    model, config, train, val, img_size, saved = prepare(args)
    if args.eval_every is None:                            # few labels: validate less often
        n_val = len(val.labels[:args.eval_images])
        args.eval_every = max(1, args.epochs // 50, round(n_val / len(train.labels)))
    make_inputs = augmentation(train, model, img_size, args)
    groups = layer_decay_groups(model, args.weight_decay, args.layer_decay)

    def evaluate_model():
        if args.world > 1:
            for buffer in model.buffers():                 # BatchNorm: all use rank 0's statistics
                dist.broadcast(buffer, 0)
        return evaluate(model.classify, val, args, img_size)

    return fit(args, model, groups, train, val, make_inputs, evaluate_model, saved,
               method="classifier", config=config)


def nearest_neighbours(args):
    """Run --mode knn: print and return the accuracies."""
    model, _, train, val, img_size, _ = prepare(args)
    row, _ = evaluate(knn(model.eval(), train, args, img_size), val, args, img_size)
    largest = 100 * val.labels.bincount().max().item() / len(val.labels)
    n, k = len(val.labels[:args.eval_images]), min(args.k, len(train.labels))
    print(f"top1 {row['top1']:.2f}, top5 {row['top5']:.2f}, on {n} images of {args.data}, by {k} "
          f"neighbours out of {len(train.labels)}; largest class {largest:.2f} %")
    return row


def prepare(args):
    """Open the checkpoint and the data, and build a Classifier. Returns the model, its constructor
    arguments, both data sets, the image size, and the last.pt to resume from ({} if none)."""
    saved = open_run(args, run_name(args)) if args.mode != "knn" else {}
    source = saved or dict(config={}, flags={}, model={}, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if args.checkpoint and not saved:
        source = part_of(read_checkpoint(args.checkpoint, args.heads), args.part)
    args.data = args.data or source["flags"].get("data", "shapes")
    img_size = args.img_size or source["config"].get("img_size")
    train, val, img_size = open_data(args.data, img_size, args)
    require(len(train.classes) > 1, f"--data {args.data} needs at least two classes, each with a "
                                    f"folder in train/ and in val/")
    keep_labels(train, args.labels, args.seed)
    config = vit_config(args, img_size, source["config"])
    if args.mode != "knn":
        recipe, low_res = RECIPES[args.mode]
        if args.mode == "scratch":                         # wide networks need a lower lr
            relative_width = config["dim"] / SIZES["micro"]["dim"]
            low_res = dict(low_res, lr=low_res["lr"] / relative_width ** 1.5)
        apply_recipe(args, recipe, low_res, config, len(train.labels))
        config.update(smoothing=args.smoothing, drop_path=args.drop_path)
    args.pairs = args.same_draws = False                   # drop path differs between processes

    probe, extra_tokens = args.mode in ("linear", "knn"), count_extra_tokens(source["model"])
    cls = METHODS.get(source.get("method"))                # a fork's class may set pool
    pool = source["config"].get("pool") or getattr(cls, "pool", None)
    fill_in(args, {"pool": pool or default_pool(extra_tokens, config["dim"]),
                   "norm": probe and "encoder.norm.weight" in source["model"]})
    config.update(classes=len(train.classes), pool=args.pool, norm=args.norm, probe=probe,
                  extra_tokens=extra_tokens, mean=source["mean"], std=source["std"])
    torch.manual_seed(args.seed)
    model = Classifier(**config).to(args.device)
    print(f"features: {model.width} numbers (--pool {args.pool})")
    if args.mode == "knn":
        model.head = None                                  # only the encoder is used
    if args.mode != "scratch" and not saved:
        initialize(model, source, args.checkpoint)
    return model, config, train, val, img_size, saved


def run_name(args):
    """Name a run after its checkpoint and mode, --data if given, and --labels if below 1."""
    words = [name_of(args.checkpoint), args.mode] if args.checkpoint else ["scratch"]
    if args.data or not args.checkpoint:
        words.append(name_of(args.data or "shapes"))
    if args.labels < 1:
        words.append(f"{args.labels:g}")
    return "_".join(words)


def part_of(content, part):
    """Return a checkpoint in which `part`, e.g. a momentum teacher, is the encoder."""
    if part is None:
        return content
    state = {f"encoder.{name.removeprefix(part + '.')}": value
             for name, value in content["model"].items() if name.startswith(f"{part}.")}
    require(state, f"--part {part}: the checkpoint has no such part")
    return {**content, "model": state}


def augmentation(train, model, img_size, args):
    """Return a function make_inputs(images, labels). It returns the model's arguments: normalised
    images and targets. RandAugment and erasing take one image at a time. With either, workers crop
    and augment the images (with train.transform), and images in memory move to the CPU."""
    more = [v2.RandAugment(2, args.randaug)] if args.randaug else []   # two per image; item 1
    if args.erasing:                                       # item 2
        more += [v2.RandomErasing(args.erasing, value=[255 * m for m in model.mean])]
    if more or not train.in_memory:
        train.transform = crop_transform(img_size, args, *more)
        if train.in_memory:
            train.images = train.images.cpu()
    mixers = [kind(alpha=alpha, num_classes=len(train.classes)) for kind, alpha in
              ((v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)) if alpha]

    def make_inputs(images, labels):
        crops = images if train.transform else crop_batch(images, img_size, args)
        images = normalize(crops, model)
        if args.mix_ratio:                                 # i-MAE Table 4, item 8
            labels = F.one_hot(labels, len(train.classes)).float()
            return [torch.lerp(x.roll(1, 0), x, args.mix_ratio) for x in (images, labels)]
        return v2.RandomChoice(mixers)(images, labels) if mixers else (images, labels)
    return make_inputs


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
            group = dict(params=[], weight_decay=weight_decay if decays else 0.0,
                         lr_factor=layer_decay ** (n - layer))
            groups.setdefault((layer, decays), group)["params"].append(p)  # `group` only if new
    return [*groups.values()]


def keep_labels(dataset, fraction, seed):
    """Keep only a fraction of each class's images, at least one per class, chosen by the seed."""
    g, chosen = torch.Generator().manual_seed(seed), []
    for c in range(len(dataset.classes)):
        ids = (dataset.labels == c).nonzero().flatten()
        order = ids[torch.randperm(len(ids), generator=g)]
        chosen.append(order[:max(1, round(fraction * len(ids)))])
    dataset.select(torch.cat(chosen))


# -------------------------------------------------------------------------- the model, the recipes
class Classifier(nn.Module):
    """A ViT with a classification head. In training, call `loss, metrics = model(images, targets)`.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: encoder arguments, see vit.ViT
        extra_tokens: number of extra tokens after the patches (MINR's weight tokens)
        classes: number of classes
        pool: which features the head gets. "mean": mean of the patch tokens. "token": the class
            token. "extra": mean of the extra tokens. "joined": all extra tokens as one vector or,
            without extra tokens, all patch tokens
        probe: train only a linear layer, after a BatchNorm without affine parameters (MAE A.1)
        norm: whether a probe's encoder has a final norm (--norm). In fine-tuning, the encoder has
            one only if pool is "token" (CrossMAE A.6). Other features get fc_norm (MAE's release)
        drop_path, smoothing: drop path rate of the last block, label smoothing
        mean, std: the input is (image / 255 - mean) / std
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 extra_tokens=0, classes=1000, pool="mean", probe=False, norm=False, drop_path=0.0,
                 smoothing=0.0, mean=IMAGENET_MEAN, std=IMAGENET_STD):
        super().__init__()
        self.pool, self.probe, self.smoothing = pool, probe, smoothing
        self.mean, self.std = tuple(mean), tuple(std)
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, drop_path=drop_path,
                           norm=norm if probe else pool == "token", extra_tokens=extra_tokens)
        self.encoder.pos_embed.requires_grad_()            # fixed in pretraining, learned here
        require(pool != "extra" or extra_tokens, "--pool extra is for MINR only; try --pool mean")
        width = dim * (extra_tokens or self.encoder.num_patches) if pool == "joined" else dim
        require(pool != "joined" or width <= MOST_FEATURES, f"--pool joined: {width} features "
                f"exceed {MOST_FEATURES}; try --pool {'extra' if extra_tokens else 'mean'}")
        self.width = width                                 # number of features
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
        return self.head(x if self.probe else self.fc_norm(x))         # (B, classes)

    def classify(self, images):
        """Switch to eval mode and return the logits (B,classes) of images (B,C,H,W) in [0, 255]."""
        return self.eval().logits(normalize(images, self))

    def forward(self, images, targets):
        """Return the cross-entropy and {"loss": the detached loss} for normalised images (B,C,H,W)
        and targets. Targets are class indices (B,) or class probabilities (B,classes)."""
        loss = F.cross_entropy(self.logits(images).float(), targets, label_smoothing=self.smoothing)
        return loss, {"loss": loss.detach()}


def default_pool(extra_tokens, dim):
    """Return the default --pool for an encoder of width dim. For MINR, it uses the weight tokens:
    MINR's loss reads only their outputs, so the outputs of patch tokens are not trained."""
    if not extra_tokens:
        return "mean"                                      # items 4, 5
    return "joined" if extra_tokens * dim <= MOST_FEATURES else "extra"


MOST_FEATURES = 5000                                       # that --pool joined may give
FINETUNE = dict(  # MAE Table 9, CrossMAE Table 11, HyperMAE Table 13; items 6, 7
    optimizer="adamw", blr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, schedule="cosine",
    batch_size=1024, epochs=100, warmup_epochs=5, crop=0.08, flip=True, randaug=27, erasing=0.25,
    mixup=0.8, cutmix=1.0, mix_ratio=0.0, smoothing=0.1, drop_path=0.1, layer_decay=0.75)
PLAIN = dict(randaug=0, erasing=0.0, mixup=0.0, cutmix=0.0, drop_path=0.0)  # off in MAE's probe
LINEAR = dict(  # MAE Table 10, with SGD instead of LARS (item 3)
    FINETUNE, optimizer="sgd", blr=0.1, weight_decay=0.0, batch_size=16384, epochs=90,
    warmup_epochs=10, smoothing=0.0, layer_decay=1.0, **PLAIN)
LOW_RES = dict(batch_size=128, epochs=10, warmup_epochs=1, crop=0.5, **PLAIN)  # ours, for micro
LOW_RES_TUNED = dict(LOW_RES, batch_size=64, lr=2e-3, crop=0.85)  # tests/docs/RECIPE.md
RECIPES = {  # for each mode: the recipe, and what replaces parts of it if train.is_low_res
    "finetune": (FINETUNE, dict(LOW_RES_TUNED, layer_decay=0.9)), "linear": (LINEAR, LOW_RES),
    "scratch": (dict(FINETUNE, layer_decay=1.0), LOW_RES_TUNED)}  # item 9


# ------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def evaluate(score, val, args, img_size):
    """Return the accuracies {"top1", "top5"} on val in %, and None for no picture.
    score(images) returns scores (b,classes)."""
    sums, n = {"top1": 0, "top5": 0}, 0                    # a process without images reports zeros
    for _, images, labels in val_batches(val, args, img_size, args.eval_images):
        with autocast(args):
            scores = score(images)                                     # (b, classes)
        right = scores.topk(min(5, scores.shape[1])).indices == labels.unsqueeze(1)  # (b, 5)
        sums["top1"] += 100 * right[:, 0].sum()
        sums["top5"] += 100 * right.sum()
        n += len(images)
    return mean_over_processes(sums, n, args), None


@torch.no_grad()
def knn(model, train, args, img_size, temperature=0.07):
    """Return a function score(images). It returns votes (b,classes). The --k training images with
    the most similar features vote for their classes. Each vote has weight exp(cosine / temperature)
    (Wu et al., 2018). Features are pooled as set by --pool and normalised to unit length."""
    torch.set_float32_matmul_precision("highest")          # TF32 would round the cosines

    def embed(images):
        with autocast(args):
            features = model.features(normalize(images, model))
        return F.normalize(features.float(), dim=1)                    # (b, width)

    bank = torch.zeros(len(train.labels), model.width, device=args.device)         # (N, width)
    for ids, images, _ in val_batches(train, args, img_size):
        bank[ids.to(args.device)] = embed(images)
    if args.world > 1:                                     # each process has filled its own rows
        dist.all_reduce(bank)
    was_read = bank.any(dim=1)                             # False for images that cannot be read
    bank, bank_labels = bank[was_read], train.labels.to(args.device)[was_read]

    def score(images):
        features = embed(images)                                       # (b, width)
        with torch.autocast(args.device.type, enabled=False):  # in 16 bits, cosines would be equal
            cosine, ids = (features @ bank.T).topk(min(args.k, len(bank)))           # (b, k) each
        votes = torch.zeros(len(ids), len(train.classes), device=args.device)
        return votes.scatter_add(1, bank_labels[ids], (cosine / temperature).exp())  # (b, classes)
    return score


def evaluate_checkpoint(args):
    """Run --mode eval: print and return top-1 and top-5 accuracy of a checkpoint with a head."""
    content = read_checkpoint(args.checkpoint, args.heads)
    state, config = content["model"], content["config"]
    if content["method"] is None and "head.weight" in state:           # a released checkpoint
        pool = "mean" if "fc_norm.weight" in state else "token"
        config = dict(config, classes=len(state["head.weight"]), pool=pool)
    require("classes" in config, f"{args.checkpoint} has no classification head: train one with "
                                 f"--mode finetune or linear")
    args.data = args.data or content["flags"].get("data", "shapes")
    val, img_size = open_data(args.data, config["img_size"], args, parts=["val"])
    classes = content.get("classes", val.classes)
    require(len(val.classes) == config["classes"] and val.classes == classes,
            f"{args.checkpoint} has {config['classes']} classes: {', '.join(classes[:3])} ..., but "
            f"--data {args.data} has {len(val.classes)}: {', '.join(val.classes[:3])} ...")
    model = Classifier(**config).to(args.device)
    model.load_state_dict(state)
    row, _ = evaluate(model.classify, val, args, img_size)
    n = len(val.labels[:args.eval_images])
    print(f"top1 {row['top1']:.2f}, top5 {row['top5']:.2f}, on {n} images of {args.data}")
    return row


# ------------------------------------------------------------------------------- the command line
FEATURES = {  # flags, as in train.py
    "part": (str, "part of the checkpoint to evaluate, e.g. teacher; default: encoder"),
    "pool": (("mean", "token", "extra", "joined"), "mean: mean of the patch tokens (default); "
             "token: class token; extra: mean of the extra tokens (MINR's weight tokens); joined: "
             "all extra tokens or, without any, all patch tokens as one vector. Default for MINR: "
             "joined if it has at most 5000 features, else extra")}
NORM = {"norm": (bool, "end the frozen encoder with a LayerNorm; default: as in the checkpoint")}
AUGMENT = {
    "randaug": (in_range(int, 0, 30), "magnitude of RandAugment, up to 30; 0: off"),
    "erasing": (fraction, "probability of erasing a rectangle"),
    "mixup": (not_negative, "alpha of MixUp; 0: off"),
    "cutmix": (not_negative, "alpha of CutMix; 0: off"),
    "mix_ratio": (fraction, "weight of each image in a mixture with another image of the batch; "
                            "used instead of MixUp and CutMix; 0: off"),
    "smoothing": (fraction, "label smoothing")}
ENCODER_RECIPE = {  # not for a probe, whose encoder is frozen
    "lr": (not_negative, "learning rate; default: blr * batch_size / 256. With --mode scratch, the "
                         "low_res value is for ViT-micro. A wider encoder gets a lower value"),
    "drop_path": (fraction, "drop path rate of the last block"),
    "layer_decay": (fraction, "ratio of a layer's learning rate to the next layer's; 1: no decay")}


def main(argv=None):
    """Run `python finetune.py` with the arguments `argv`. Returns the last row of log.jsonl.
    The modes knn and eval write no files, and return {"top1", "top5"}."""
    parser = new_parser("finetune.py", "usage: python finetune.py --checkpoint FILE --mode "
                        f"{'|'.join(RECIPES)}|knn|eval [--flag value ...]")
    option = parser.add_argument
    option("--mode", choices=(*RECIPES, "knn", "eval"), default="finetune", metavar="NAME",
           help="finetune; linear: a linear probe; knn: nearest neighbours; scratch: fine-tune "
                "from random weights, with the sizes and data of any --checkpoint; eval: "
                "evaluate a fine-tuned checkpoint (finetune)")
    mode = parser.parse_known_args(argv)[0].mode           # it decides which other flags exist
    option("--checkpoint", metavar="FILE", required=mode != "scratch",
           help="checkpoint from train.py, or released by MAE, CrossMAE or timm")
    add_flags(parser, "data and device", DATA)
    if mode == "eval":
        add_flags(parser, "encoder", {"heads": ENCODER["heads"]})
        return run_cli(parser, evaluate_checkpoint, argv)
    add_flags(parser, "training images and encoder", ENCODER)
    add_flags(parser, "features", FEATURES)
    option("--labels", type=in_range(float, 1e-6, 1), default=1.0, metavar="X",
           help="use this fraction of each class's labels, at least one per class (1)")
    if mode == "knn":
        option("--k", type=count, default=20, help="number of neighbours (20)")
    if mode in ("linear", "knn"):
        add_flags(parser, "frozen encoder", NORM)
    if mode != "knn":
        add_flags(parser, "run", RUN)
        recipe, low_res = RECIPES[mode]
        flags = {**RECIPE, **AUGMENT, **({} if mode == "linear" else ENCODER_RECIPE)}
        add_flags(parser, "recipe", flags, {**DEFAULTS, **recipe}, low_res)
    return run_cli(parser, nearest_neighbours if mode == "knn" else finetune, argv)


# Paper and release: where they or torchvision differ, and what we do
#   1. RandAugment (9, 0.5) draws magnitudes near 9 of 10. We use torchvision's, always at 27 of 30.
#   2. Only the released code has random erasing. It fills in noise; we fill in the mean colour.
#   3. The paper's linear probe uses LARS, which PyTorch lacks; ours uses SGD with momentum.
#   4. For fine-tuning, MAE A.1 uses the class token, HyperMAE Sec. 3 the mean of all tokens, and
#      MAE's release the mean of the patch tokens. We follow MAE's release.
#   5. The probe and nearest neighbours also use these features, so that methods can be compared.
#      The released probe uses the class token (`--pool token`). For MINR, see default_pool.
#   6. Layer decay is 0.75 as in MAE and HyperMAE (CrossMAE Table 11 lists none). For ViT-B, the
#      releases of MAE and CrossMAE have 0.65 and `--blr 5e-4` (CrossMAE's also for ViT-S).
#   7. MAE and CrossMAE fine-tune ViT-B for 100 epochs and ViT-L for 50, HyperMAE ViT-B for 50.
#   8. i-MAE Table 4 does not explain its "image mix ratio". We weight images and labels by it.
#   9. `--mode scratch` uses Table 9 without layer decay. MAE itself uses Table 11 (A.2).

if __name__ == "__main__":
    main()
