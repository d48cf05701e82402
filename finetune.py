"""What an encoder has learnt: fine-tune it, probe it linearly or by nearest neighbours, or compare
it with the same network from scratch: `python finetune.py --checkpoint runs/mae/last.pt`.

The recipes are those of He et al., Masked Autoencoders Are Scalable Vision Learners (CVPR 2022),
Tables 9 and 10, as in CrossMAE Table 11 and HyperMAE Table 13, with what the released code adds.
Data, processes, checkpoints and the loop are train.py's.

Where paper and released code differ, or torchvision does from both, and what is done here:
  1. The papers' RandAugment (9, 0.5) varies its magnitude around 9 of 10; torchvision's is fixed
     and counts to 30, so that 27 is as strong.
  2. Erased rectangles (released code only) get the mean colour; there they get noise.
  3. The linear probe uses SGD with momentum: the paper's LARS is for its batch of 16,384.
  4. Mean pooling leaves out the class token, as released. HyperMAE's text pools all tokens.
  5. Probe and neighbours take the mean too, so that all methods compare; the release's probe reads
     the class token (--pool token).
  6. Layer decay is 0.75 as in the papers; the release's command for ViT-B has 0.65.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from train import (RECIPE, Feed, Parser, crop_batch, crop_transform, describe, fit, initialize,
                   mean_over_processes, name_run, normalize, open_data, read_sizes, settle,
                   start_processes, val_batches, vit_config)
from vit import IMAGENET_MEAN, IMAGENET_STD, SIZES, ViT

FINETUNE = dict(  # MAE Table 9, CrossMAE Table 11, HyperMAE Table 13; released code: erasing
    optimizer="adamw", blr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, schedule="cosine",
    batch_size=1024, epochs=100, warmup_epochs=5, crop=0.08, flip=True, randaug=27, erasing=0.25,
    mixup=0.8, cutmix=1.0, mix_ratio=0.0, smoothing=0.1, drop_path=0.1, layer_decay=0.75)
PLAIN = dict(randaug=0, erasing=0.0, mixup=0.0, cutmix=0.0, drop_path=0.0)
LINEAR = dict(  # MAE Table 10, with SGD for LARS
    FINETUNE, optimizer="sgd", blr=0.1, momentum=0.9, weight_decay=0.0, batch_size=16384, epochs=90,
    warmup_epochs=10, smoothing=0.0, layer_decay=1.0, **PLAIN)
RECIPES = {"finetune": FINETUNE, "linear": LINEAR, "knn": FINETUNE,
           "scratch": dict(FINETUNE, layer_decay=1.0)}     # no layer knows more than another
SMALL = dict(batch_size=128, epochs=10, warmup_epochs=1, crop=0.5, **PLAIN)  # up to 64 pixels
SMALL_RECIPES = {mode: {**recipe, **SMALL, **({} if mode == "linear" else {"lr": 2e-3})}
                 for mode, recipe in RECIPES.items()}

HELP = RECIPE + """
    randaug: magnitude of RandAugment, up to 30 (27: the papers' 9 of 10); 0: none
    erasing: probability of erasing a rectangle
    mixup: a of Beta(a, a), the weights of MixUp; 0: none
    cutmix: a of Beta(a, a), the areas of CutMix; 0: none
    mix_ratio: share of a picture, the rest is another (i-MAE Table 4), not mixup and cutmix; 0: all
    smoothing: label smoothing
    drop_path: stochastic depth of the last block
    layer_decay: the rate of a layer over that of the next one
"""


class Classifier(nn.Module):
    """A ViT with a head: `logits(images)`, and `loss, metrics = model(images, targets)`.

    Args:
        img_size, patch_size, in_chans, dim, depth, heads: of the encoder, see vit.ViT
        classes: number of classes
        pool: "mean" of the patch tokens or the class "token"
        probe: train nothing but a linear layer after a BatchNorm without affine (MAE, Appendix A.1)
        norm: whether the encoder of a probe has a final norm
        drop_path: stochastic depth of the last block
        smoothing: label smoothing
        mean, std: how its input is normalised
    """

    def __init__(self, img_size=224, patch_size=16, in_chans=3, dim=768, depth=12, heads=12, *,
                 classes=1000, pool="mean", probe=False, norm=False, drop_path=0.0, smoothing=0.0,
                 mean=IMAGENET_MEAN, std=IMAGENET_STD):
        super().__init__()
        self.pool, self.probe, self.smoothing = pool, probe, smoothing
        self.mean, self.std = tuple(mean), tuple(std)
        self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads, drop_path=drop_path,
                           norm=norm if probe else pool == "token")
        self.encoder.pos_embed.requires_grad_()            # fixed until here, learnt from here on
        linear = nn.Linear(dim, classes)
        nn.init.trunc_normal_(linear.weight, std=0.01 if probe else 2e-5)  # as released
        nn.init.zeros_(linear.bias)
        if probe:
            self.encoder.requires_grad_(False)
            self.head = nn.Sequential(nn.BatchNorm1d(dim, affine=False, eps=1e-6), linear)
        else:
            self.fc_norm = nn.LayerNorm(dim, eps=1e-6) if pool == "mean" else nn.Identity()
            self.head = linear

    def features(self, images):
        """Images (B,C,H,W), normalised -> (B,D): the mean patch token or the class token."""
        tokens = self.encoder(images)                                  # (B, 1+L, D)
        return tokens[:, 1:].mean(dim=1) if self.pool == "mean" else tokens[:, 0]

    def logits(self, images):
        """Images (B,C,H,W), normalised -> (B,classes)."""
        x = self.features(images)                                      # (B, D)
        return self.head(x if self.probe else self.fc_norm(x))

    def forward(self, images, targets):
        """Targets are classes (B,) or their probabilities (B,classes) -> the loss and {"loss"}."""
        loss = F.cross_entropy(self.logits(images).float(), targets, label_smoothing=self.smoothing)
        return loss, {"loss": loss.detach()}


def layer_decay_groups(model, weight_decay, layer_decay):
    """Parameter groups, the rate of layer i of n scaled by layer_decay ** (n - i): the embedding is
    layer 0, block i is i + 1, the head n. Weight decay as in training, but none on the class token
    and the positions (BEiT; MAE Table 9)."""
    groups, n = {}, len(model.encoder.blocks) + 1
    for name, p in model.named_parameters():
        part = name.removeprefix("encoder.").split(".")
        embedding = part[0] in ("cls_token", "pos_embed", "patch_embed")
        layer = 0 if embedding else int(part[1]) + 1 if part[0] == "blocks" else n
        decays = p.ndim > 1 and part[0] not in ("cls_token", "pos_embed")
        if p.requires_grad:
            group = dict(params=[], weight_decay=weight_decay * decays,
                         lr_scale=layer_decay ** (n - layer))
            groups.setdefault((layer, decays), group)["params"].append(p)
    return [*groups.values()]


@torch.no_grad()
def evaluate(score, val, args, procs, img_size):
    """{"top1", "top5"} of val in percent, where score(pictures) -> (b,classes)."""
    sums, count = {"top1": 0, "top5": 0}, 0
    for _, pictures, labels in val_batches(val, args, procs, img_size, args.eval_images):
        scores = score(pictures)
        right = scores.topk(min(5, scores.shape[1])).indices == labels[:, None]  # (b, 5)
        sums["top1"] += 100 * right[:, 0].sum()
        sums["top5"] += 100 * right.sum()
        count += len(labels)
    return mean_over_processes(sums, count, procs)


@torch.no_grad()
def knn(model, train, args, procs, img_size, temperature=0.07):
    """score(pictures) -> (b,classes): votes of the --k most similar training pictures, each worth
    exp(cosine / temperature) (Wu et al. 2018). Features: as --pool says, of unit length."""
    def embed(pictures):
        return F.normalize(model.features(normalize(pictures, model)).float(), dim=1)  # (b, D)
    parts = [(embed(pictures), labels) for _, pictures, labels in
             val_batches(train, args, procs, img_size, most=len(train.labels))]
    bank, labels = (torch.cat(part) for part in zip(*parts))           # (N, D), (N,)
    if procs.world > 1:
        parts = [None] * procs.world
        dist.all_gather_object(parts, (bank.cpu(), labels.cpu()))
        bank, labels = (torch.cat(part).to(procs.device) for part in zip(*parts))

    def score(pictures):
        cosine, ids = (embed(pictures) @ bank.T).topk(min(args.k, len(bank)))  # (b, k)
        votes = torch.zeros(len(ids), len(train.classes), device=ids.device)
        return votes.scatter_add(1, labels[ids], (cosine / temperature).exp())
    return score


def run(args):
    """A parsed command line of finetune.py, from data to the last epoch."""
    config, data = {}, None
    if args.checkpoint:
        config, data = read_sizes(args.checkpoint, args.heads)
    elif args.mode != "scratch":
        raise ValueError(f"--mode {args.mode} needs --checkpoint FILE; --mode scratch does not")
    procs, args.data = start_processes(args.device), args.data or data or "shapes"
    img_size = args.img_size or config.get("img_size")
    train, val, img_size = open_data(args.data, img_size, procs.device)
    if not train.classes:
        raise ValueError(f"--data {args.data} has no labels: give class folders in train/ and val/")
    taken = settle(args, (SMALL_RECIPES if max(img_size) <= 64 else RECIPES)[args.mode])
    if args.randaug > 30:
        raise ValueError(f"--randaug {args.randaug} is more than 30")
    if args.mix_ratio and (args.mixup or args.cutmix):
        raise ValueError(f"--mix_ratio {args.mix_ratio} needs --mixup 0 and --cutmix 0")
    if args.lr is None:
        args.lr = args.blr * args.batch_size / 256
    source = Path(args.checkpoint or args.size or "micro").absolute()      # runs/NAME/last.pt, or
    source = source.parent.name if source.stem == "last" else source.stem  # a released file's name
    name_run(args, f"{source}_{args.mode}")

    torch.manual_seed(args.seed)
    given = {k: v for k in ("patch_size", "dim", "depth", "heads") if (v := getattr(args, k))}
    config = {**(config or vit_config(args, img_size)), **SIZES.get(args.size, {}), **given,
              "img_size": img_size, "classes": len(train.classes), "pool": args.pool,
              "probe": args.mode in ("linear", "knn"), "drop_path": args.drop_path,
              "smoothing": args.smoothing}
    model = Classifier(**config).to(procs.device)
    notes = initialize(model, args.checkpoint) if args.mode != "scratch" else []
    if args.mode == "knn":
        args.epochs, taken = 0, f"votes   of {args.k} neighbours"
    describe(args, procs, train, val, model, taken, *notes)

    if args.mode == "knn":
        votes = knn(model.eval(), train, args, procs, img_size)
        row = evaluate(votes, val, args, procs, img_size)
        if procs.rank == 0:
            print(f"{args.k} nearest neighbours: top1 {row['top1']:.2f}, top5 {row['top5']:.2f}")
        return row

    more = [v2.RandAugment(2, args.randaug)] if args.randaug else []
    if args.erasing:
        value = [255 * m for m in model.mean]
        more += [v2.PILToTensor(), v2.RandomErasing(args.erasing, value=value)]
    in_workers = bool(more) or not train.in_memory
    feed = Feed(train, args, procs, crop_transform(img_size, args, *more) if in_workers else None)
    mixers = [kind(alpha=alpha, num_classes=len(train.classes)) for kind, alpha in
              ((v2.MixUp, args.mixup), (v2.CutMix, args.cutmix)) if alpha]

    def prepare(rows, pictures, labels, generator):
        if not in_workers:
            pictures = crop_batch(pictures, rows, img_size, args, generator)
        images, ratio = normalize(pictures, model), args.mix_ratio
        if ratio:
            labels = F.one_hot(labels, len(train.classes)).float()
            return [ratio * x + (1 - ratio) * x.roll(1, 0) for x in (images, labels)]
        with torch.random.fork_rng(devices=[]):            # the same weights in every process
            torch.default_generator.manual_seed(generator.initial_seed())
            return v2.RandomChoice(mixers)(images, labels) if mixers else (images, labels)

    def validate():
        model.eval()
        return evaluate(lambda pictures: model.logits(normalize(pictures, model)), val, args,
                        procs, img_size)

    groups = layer_decay_groups(model, args.weight_decay, args.layer_decay)
    row = fit(args, procs, model, groups, feed, prepare, validate, method="classifier",
              config=config)
    if procs.rank == 0:
        folder = Path(args.runs, args.name)
        print(f"log     {folder / 'log.jsonl'}\nmodel   {folder / 'last.pt'}")
    return row


def main(argv=None):
    """`python finetune.py` with the words `argv`; returns the last line of log.jsonl, a dict."""
    about = f"Fine-tune or probe an encoder. Some defaults up to 64 pixels differ: {SMALL}"
    parser = Parser("finetune.py", about, "mode", RECIPES)
    recipe = RECIPES[parser.parse_known_args(argv)[0].mode]
    option = parser.add_argument
    option("--checkpoint", metavar="FILE", help="train.py's, or a released MAE, CrossMAE, timm one")
    option("--pool", choices=("mean", "token"), default="mean", help="of the tokens")
    option("--k", type=int, default=20, help="neighbours of --mode knn")
    parser.add_options(recipe, HELP, {})
    parser.set_defaults(eval_images=2 ** 62)               # all of them
    return parser.run(run, argv)


if __name__ == "__main__":
    main()
