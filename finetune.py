"""What an encoder has learnt: fine-tune it, probe it linearly or by nearest neighbours, compare it
with the same network from scratch, or evaluate a fine-tuned checkpoint, one's own or a released
one: `python finetune.py --checkpoint runs/mae_shapes/last.pt`.

The recipes are those of He et al., Masked Autoencoders Are Scalable Vision Learners (CVPR 2022),
Tables 9 and 10, as in CrossMAE Table 11 and HyperMAE Table 13, with what the released code adds.
Data, processes, checkpoints and the loop are train.py's: finetune opens the data, builds a
Classifier and hands both to train.fit.

Where paper and released code differ, or torchvision does from both, and what is done here:
  1. The papers' RandAugment (9, 0.5) varies its magnitude around 9 of 10; torchvision's is fixed
     and counts to 30, so that 27 is as strong.
  2. Erased rectangles (released code only) get the mean colour; there they get noise.
  3. The linear probe uses SGD with momentum: the paper's LARS is for its batch of 16,384.
  4. Mean pooling leaves out the class token, as released. HyperMAE's text pools all tokens.
  5. Probe and neighbours take the mean too, so that all methods compare; the release's probe reads
     the class token (--pool token). Of MINR all read its weight tokens, which its loss trains
     (--pool joined, or extra).
  6. Layer decay is 0.75 as in the papers; the release's command for ViT-B has 0.65.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from train import (HELP, KINDS, LAYOUT, SHARED, add_flags, add_options, apply_recipe, autocast,
                   bounded_number, crop_batch, crop_transform, fit, initialize, mean_over_processes,
                   name_run, open_data, read, run_cli, val_batches, vit_config)
from vit import IMAGENET_MEAN, IMAGENET_STD, InputError, ViT, count_extra_tokens, normalize

FINETUNE = dict(  # MAE Table 9, CrossMAE Table 11, HyperMAE Table 13; released code: erasing
    optimizer="adamw", blr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, schedule="cosine",
    batch_size=1024, epochs=100, warmup_epochs=5, crop=0.08, flip=True, randaug=27, erasing=0.25,
    mixup=0.8, cutmix=1.0, mix_ratio=0.0, smoothing=0.1, drop_path=0.1, layer_decay=0.75)
PLAIN = dict(randaug=0, erasing=0.0, mixup=0.0, cutmix=0.0, drop_path=0.0)
LINEAR = dict(  # MAE Table 10, with SGD for LARS
    FINETUNE, optimizer="sgd", blr=0.1, weight_decay=0.0, batch_size=16384, epochs=90,
    warmup_epochs=10, smoothing=0.0, layer_decay=1.0, **PLAIN)
SMALL = dict(  # ours, for small images and the micro encoder, see train.apply_recipe
    batch_size=128, epochs=10, warmup_epochs=1, crop=0.5, **PLAIN)
RECIPES = {  # mode: recipe and small
    "finetune": (FINETUNE, dict(SMALL, lr=2e-3)), "linear": (LINEAR, SMALL),
    "knn": (FINETUNE, SMALL), "eval": (FINETUNE, SMALL),
    "scratch": (dict(FINETUNE, layer_decay=1.0), dict(SMALL, lr=2e-3))}  # no layer is pretrained


MOST_FEATURES = 5000  # that --pool joined may make: 64 patch tokens of the micro encoder are 4,096


class Classifier(nn.Module):
    """A ViT with a head: `logits(images)`, and `loss, metrics = model(images, targets)`.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        extra_tokens: number of learned tokens after the patches (MINR's weight tokens)
        classes: number of classes
        pool: what becomes the features: the "mean" of the patch tokens; the class "token"; the mean
            of the "extra" tokens; or the extra tokens "joined" to one vector, where there are none
            the patch tokens
        probe: train nothing but a linear layer after a BatchNorm without affine (MAE, Appendix A.1)
        norm: whether the encoder of a probe has a final norm
        drop_path, smoothing: stochastic depth of the last block, label smoothing
        mean, std: how its input is normalised
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 extra_tokens=0, classes=1000, pool="mean", probe=False, norm=False, drop_path=0.0,
                 smoothing=0.0, mean=IMAGENET_MEAN, std=IMAGENET_STD):
        super().__init__()
        self.pool, self.probe, self.smoothing = pool, probe, smoothing
        self.mean, self.std = tuple(mean), tuple(std)
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, drop_path=drop_path,
                           norm=norm if probe else pool == "token", extra_tokens=extra_tokens)
        self.encoder.pos_embed.requires_grad_()            # fixed until here, learnt from here on
        width = dim * (extra_tokens or self.encoder.num_patches) if pool == "joined" else dim
        if pool == "extra" and not extra_tokens:
            raise InputError("--pool extra: this encoder has no extra tokens, only MINR's has")
        if width > MOST_FEATURES and pool == "joined":
            raise InputError(f"--pool joined: {width} features are more than {MOST_FEATURES}; try "
                             f"--pool {'extra' if extra_tokens else 'mean'}")
        linear = nn.Linear(width, classes)
        nn.init.trunc_normal_(linear.weight, std=0.01 if probe else 2e-5)  # as released
        nn.init.zeros_(linear.bias)
        if probe:
            self.encoder.requires_grad_(False)
            self.head = nn.Sequential(nn.BatchNorm1d(width, affine=False, eps=1e-6), linear)
        else:                                              # the class token has the encoder's norm
            self.fc_norm = nn.Identity() if pool == "token" else nn.LayerNorm(width, eps=1e-6)
            self.head = linear

    def features(self, images):
        """Images (B,C,H,W), normalised -> what `pool` makes of their tokens: (B,D), or (B,G*D) or
        (B,L*D) if joined."""
        tokens = self.encoder(images)                                  # (B, 1+L+G, D)
        patches = tokens[:, 1:1 + self.encoder.num_patches]            # (B, L, D)
        extra = tokens[:, 1 + self.encoder.num_patches:]               # (B, G, D)
        if self.pool == "token":
            return tokens[:, 0]
        if self.pool == "joined":
            return (extra if extra.shape[1] else patches).flatten(1)
        return (patches if self.pool == "mean" else extra).mean(dim=1)

    def logits(self, images):
        """Images (B,C,H,W), normalised -> (B,classes)."""
        x = self.features(images)                                      # (B, D), or wider
        return self.head(x if self.probe else self.fc_norm(x))

    def classify(self, images):
        """Images (b,C,H,W), 0 ... 255 -> logits (b,classes), in eval mode."""
        return self.eval().logits(normalize(images, self))

    def forward(self, images, targets):
        """Targets are classes (B,) or their probabilities (B,classes) -> the loss and {"loss"}."""
        loss = F.cross_entropy(self.logits(images).float(), targets, label_smoothing=self.smoothing)
        return loss, {"loss": loss.detach()}


def default_pool(extra_tokens, dim):
    """What is read of an encoder of width dim unless --pool says otherwise: of MINR's, the tokens
    that its loss trains."""
    if not extra_tokens:
        return "mean"
    return "joined" if extra_tokens * dim <= MOST_FEATURES else "extra"


def layer_decay_groups(model, weight_decay, layer_decay):
    """Groups of the trained parameters, each a dict of params, weight_decay and lr_scale, which is
    layer_decay ** (n - i) for layer i of n: the embedding is layer 0, block i is i + 1, what is
    after the blocks n. Weight decay as in training (none below two axes: biases and norms), but
    none on learned tokens and positions (BEiT; MAE Table 9)."""
    groups, n = {}, len(model.encoder.blocks) + 1
    for name, p in model.named_parameters():
        part = name.removeprefix("encoder.").split(".")
        learned = part[0] in ("cls_token", "pos_embed", "extra_tokens")
        embedding = learned or part[0] == "patch_embed"
        layer = 0 if embedding else int(part[1]) + 1 if part[0] == "blocks" else n
        decays = p.ndim > 1 and not learned
        if p.requires_grad:
            group = dict(params=[], weight_decay=weight_decay if decays else 0.0,
                         lr_scale=layer_decay ** (n - layer))
            groups.setdefault((layer, decays), group)["params"].append(p)
    return [*groups.values()]


@torch.no_grad()
def evaluate(score, val, args, img_size):
    """{"top1", "top5"} of val in %, where score(images) -> (b,classes), and None: no picture."""
    sums = {"top1": 0, "top5": 0}                          # a process without images reports zeros
    for _, images, labels in val_batches(val, args, img_size, args.eval_images):
        with autocast(args):
            scores = score(images)
        right = scores.topk(min(5, scores.shape[1])).indices == labels.unsqueeze(1)  # (b, 5)
        sums["top1"] += 100 * right[:, 0].sum()
        sums["top5"] += 100 * right.sum()
    return mean_over_processes(sums, len(val.labels[:args.eval_images]), args), None


@torch.no_grad()
def knn(model, train, args, img_size, temperature=0.07):
    """score(images) -> (b,classes): votes of the --k most similar training images, each worth
    exp(cosine / temperature) (Wu et al. 2018). Features: as --pool says, of unit length."""
    def embed(images):
        with autocast(args):
            features = model.features(normalize(images, model))
        return F.normalize(features.float(), dim=1)                    # (b, width)

    width = model.head[0].num_features                     # of the features, as the probe's norm
    bank = torch.zeros(len(train.labels), width, device=args.device)   # (N, width)
    bank_labels = torch.zeros(len(train.labels), dtype=torch.long, device=args.device)
    for ids, images, labels in val_batches(train, args, img_size):
        bank[ids.to(args.device)], bank_labels[ids.to(args.device)] = embed(images), labels
    if args.world > 1:                                     # each process has filled rows of its own
        dist.all_reduce(bank)
        dist.all_reduce(bank_labels)

    def score(images):
        features = embed(images)                                       # (b, width)
        with torch.autocast(args.device.type, enabled=False):          # in 16 bits many would tie
            cosine, ids = (features @ bank.T).topk(min(args.k, len(bank)))           # (b, k)
        votes = torch.zeros(len(ids), len(train.classes), device=args.device)
        return votes.scatter_add(1, bank_labels[ids], (cosine / temperature).exp())
    return score


def keep_labels(dataset, share, seed):
    """Leave a share of each class's images in the dataset, chosen by the seed, at least one."""
    g, keep = torch.Generator().manual_seed(seed), []
    for c in range(len(dataset.classes)):                  # list_folder has seen some in each
        ids = (dataset.labels == c).nonzero().flatten()
        n = max(1, round(share * len(ids)))
        keep += ids[torch.randperm(len(ids), generator=g)[:n]].tolist()
    dataset.labels = dataset.labels[keep]
    dataset.unreadable = dataset.unreadable[keep].share_memory_()
    if torch.is_tensor(dataset.images):
        dataset.images = dataset.images[keep]
    else:
        dataset.images = [dataset.images[i] for i in keep]


def evaluate_checkpoint(args):
    """--mode eval: top-1 and top-5 of a checkpoint with a head. Nothing is written."""
    content = read(args.checkpoint, args.heads)
    state, config = content["model"], content["config"]
    if content["method"] is None and "head.weight" in state:           # a released one
        pool = "mean" if "fc_norm.weight" in state else "token"
        config = dict(config, classes=len(state["head.weight"]), pool=pool)
    elif content["method"] != "classifier":
        raise InputError(f"{args.checkpoint} has no head to classify with: --mode finetune or "
                         f"linear trains one")
    for name in ("img_size", "patch_size", "size", "dim", "depth"):
        if getattr(args, name) not in (None, config.get(name)):
            raise InputError(f"--mode eval takes {name} from {args.checkpoint}: leave out --{name}")
    args.data = args.data or content["flags"].get("data")
    if args.data is None:
        raise InputError(f"{args.checkpoint} does not name its data: give --data FOLDER")
    args.batch_size = args.batch_size or 250 * args.world
    _, val, img_size = open_data(args.data, config["img_size"], args)
    classes = content.get("classes", val.classes)
    if len(val.classes) != config["classes"] or val.classes != classes:
        names = f": {', '.join(classes[:3])} ..." if "classes" in content else ""
        raise InputError(f"{args.checkpoint} knows {config['classes']} classes{names}; --data "
                         f"{args.data} has {len(val.classes)}: {', '.join(val.classes[:3])} ...")
    model = Classifier(**config).to(args.device)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"{args.checkpoint} does not fit a classifier: "
                         f"{' '.join(str(error).split())[:200]}") from None
    row, _ = evaluate(model.classify, val, args, img_size)
    n = len(val.labels[:args.eval_images])
    print(f"top1 {row['top1']:.2f}, top5 {row['top5']:.2f}, of {n} images of {args.data}")
    return row


def finetune(args):
    """A parsed command line of finetune.py, from data to the last epoch."""
    if not args.checkpoint and args.mode != "scratch":
        raise InputError(f"--mode {args.mode} needs --checkpoint FILE; --mode scratch does not")
    if args.mode == "eval":
        return evaluate_checkpoint(args)
    source = {"config": {}, "flags": {}, "model": {}}
    if args.checkpoint:
        source = read(args.checkpoint, args.heads)
    given_data, args.data = args.data, args.data or source["flags"].get("data", "shapes")
    path = Path(args.checkpoint or "scratch").absolute()   # runs/NAME/last.pt or a released file
    words = [path.parent.name if path.stem == "last" else path.stem]
    words += [args.mode] if args.checkpoint else []
    if not args.checkpoint or given_data not in (None, source["flags"].get("data")):
        words.append(Path(args.data).resolve().name)
    words += [f"{args.labels:g}"] if args.labels < 1 else []
    name_run(args, "_".join(words))
    train, val, img_size = open_data(
        args.data, args.img_size or source["config"].get("img_size"), args)
    if not train.classes:
        raise InputError(f"--data {args.data} has no labels: give class folders in train/ and val/")
    keep_labels(train, args.labels, args.seed)
    config = vit_config(args, img_size, source["config"])
    apply_recipe(args, *RECIPES[args.mode], config, len(train.labels))
    if args.mode == "linear" and args.batch_size <= args.world * args.accum:
        raise InputError(f"--batch_size {args.batch_size}: the BatchNorm of --mode linear needs "
                         f"two images for each process and --accum piece")
    if args.eval_every is None:                            # few labels: not after each epoch
        args.eval_every = max(1, round(len(val.labels) / len(train.labels)))
    torch.manual_seed(args.seed)
    extra_tokens = count_extra_tokens(source["model"])
    args.pool = args.pool or default_pool(extra_tokens, config["dim"])
    config.update(classes=len(train.classes), pool=args.pool, extra_tokens=extra_tokens,
                  smoothing=args.smoothing, drop_path=args.drop_path,
                  probe=args.mode in ("linear", "knn"),
                  norm="encoder.norm.weight" in source["model"],
                  mean=source.get("mean", IMAGENET_MEAN), std=source.get("std", IMAGENET_STD))
    model = Classifier(**config).to(args.device)
    if args.mode != "scratch":
        initialize(model, source, args.checkpoint)
    del source                                             # its weights are in the model now
    if args.mode == "knn":
        row, _ = evaluate(knn(model.eval(), train, args, img_size), val, args, img_size)
        largest = 100 * val.labels.bincount().max().item() / len(val.labels)
        print(f"top1 {row['top1']:.2f}, top5 {row['top5']:.2f}, largest class {largest:.2f} %")
        return row
    more = [v2.RandAugment(2, args.randaug)] if args.randaug else []
    if args.erasing:
        more += [v2.RandomErasing(args.erasing, value=[255 * m for m in model.mean])]
    if more or train.transform:                            # image by image, in workers
        train.transform = crop_transform(img_size, args, *more)
        if torch.is_tensor(train.images):
            train.images = train.images.cpu()
    mixers = [kind(alpha=alpha, num_classes=len(train.classes)) for kind, alpha in
              ((v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)) if alpha]

    def make_inputs(images, labels):
        """The model's arguments: images and targets."""
        crops = images if train.transform else crop_batch(images, img_size, args)
        images = normalize(crops, model)
        if args.mix_ratio:
            labels = F.one_hot(labels, len(train.classes)).float()
            return [torch.lerp(x.roll(1, 0), x, args.mix_ratio) for x in (images, labels)]
        return v2.RandomChoice(mixers)(images, labels) if mixers else (images, labels)

    groups = layer_decay_groups(model, args.weight_decay, args.layer_decay)
    row = fit(args, model, groups, train, val, make_inputs,
              partial(evaluate, model.classify, val, args, img_size),
              method="classifier", config=config)
    last = Path(args.runs, args.name, "last.pt")
    print(f'next    python finetune.py --mode eval --checkpoint "{last}"')
    return row


def main(argv=None):
    """`python finetune.py` with the words `argv`; returns the last row of log.jsonl, a dict."""
    parser = argparse.ArgumentParser("finetune.py", **LAYOUT)
    option = parser.add_argument
    option("--mode", choices=RECIPES, default="finetune", metavar="NAME",
           help="finetune, linear (probe), knn (nearest neighbours), scratch (no checkpoint), eval "
                "(of a fine-tuned checkpoint) (finetune)")
    mode = parser.parse_known_args(argv)[0].mode
    option("--checkpoint", metavar="FILE", help="of train.py, or released by MAE, CrossMAE or timm")
    option("--labels", type=bounded_number(float, 0, 1), default=1.0, metavar="X",
           help="share of each class's labels to train on, at least one (1)")
    option("--pool", choices=("mean", "token", "extra", "joined"), help="features: mean of the "
           "patch tokens; class token; mean of the extra tokens (MINR's weight tokens); all extra "
           "tokens joined, where there are none all patch tokens. For MINR joined or, if that "
           "makes too many numbers, extra; else (mean)")
    option("--k", type=bounded_number(int, 1), default=20, help="neighbours of --mode knn (20)")
    add_options(parser)
    recipe, small = RECIPES[mode]
    add_flags(parser, f"recipe of --mode {mode}", {**SHARED, **recipe}, small, HELP, KINDS)
    parser.set_defaults(pairs=False, own_draws=True)       # drop path differs between pieces
    parser.description = (
        f"usage: python finetune.py --checkpoint FILE --mode {mode} [--flag value ...]\n\n"
        f"Fine-tune or evaluate an encoder. In parentheses: the value without the flag;\n"
        f"small images are those up to 64 pixels, and any for --size micro.")
    return run_cli(parser, finetune, argv)


if __name__ == "__main__":
    main()
