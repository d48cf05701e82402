"""Why is this line here? Train a method without it, and compare:

    python -m tests.why                            # the list, in the order of the code
    python -m tests.why mae.no_decoder_positions   # the question, the paper's answer, both scores
    python -m tests.why mae.l1 mae:crop=1 --seeds 0 1 2 --jobs 2
    python -m tests.why mae                        # all variations of MAE
    python -m tests.why all --seeds 0 1 2 --out tests/logs/why.jsonl

A variation changes one thing in a method: `mae:crop=1` is the method mae with a flag of train.py,
and `mae.l1` is a class below. The method and its variations are trained on 10,000 images of CIFAR-10
if it is in data/, otherwise of shapes. For tables and the rule of "clear", and for --data, --seeds
and other flags, see tests.compare. At the end come the scores in tests/logs/why.jsonl.

Programs know the classes below if `-m tests.why` is put before their names:

    python -m tests.why train.py --method mae.l1
    python -m tests.why finetune.py --checkpoint runs/mae.l1_shapes
    python -m tests.why -m tests.tour mae.l1
"""

import argparse
import importlib
import re
from collections import namedtuple
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import finetune
import train
import vit
from mae import MAE
from tests import compare
from train import METHODS, shell, words_of
from vit import ViT, gather_patches, patchify, require

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "tests/logs/why.jsonl"
REFERENCES = {}                                            # method: with what flags it is compared
COLUMNS = {"mae": ["pixels", "20-NN", "10%"]}              # what is measured; others: see columns_of

Variation = namedtuple("Variation", "spec file line question paper reference")
VARIATIONS, CLASSES = {}, {}                               # by spec, see tests.compare; by method


def method_of(spec):
    """Return the method, one of the five, of a spec such as mae.l1 or mae:crop=1."""
    return re.match(r"\w+", spec)[0]


def variation(spec, file, line, question, paper, reference=None):
    """Add a variation: what it is for tests.compare, the line that it removes or changes, a
    question about this line, and the paper's answer. Returns a decorator for its class, if any."""
    reference = reference or REFERENCES.get(method_of(spec), method_of(spec))
    VARIATIONS[spec] = Variation(spec, file, line, question, paper, reference)

    def add(cls):
        CLASSES[spec.split(":")[0]] = cls
        return cls
    return add


class Altered:
    """A method in which a class within replaces its parent: all modules of the parent's class get
    the new class, and keep their parameters. The encoder is then no vit.ViT: its checkpoints have
    one more name, without numbers, so that a ViT refuses them, except for `classifier` below."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for part in parts_of(type(self)).values():
            for module in self.modules():
                if type(module) is part.__base__:
                    module.__class__ = part
        self.encoder.register_buffer(type(self).__name__, torch.empty(0))


def parts_of(cls):
    """Return the classes {name: class} within a class."""
    return {name: part for name, part in vars(cls).items() if isinstance(part, type)}


# -------------------------------------------------------------------------------------------- MAE
@variation(
    "mae.constant_rate", "mae.py", 'schedule="cosine"',
    "Why does the learning rate fall to zero along a cosine?",
    "The paper gives no reason: Table 8 lists cosine decay.")
class ConstantRate(MAE):
    recipe = dict(MAE.recipe, schedule="constant")


variation(
    "mae:betas=0.9,0.999", "mae.py", "betas=(0.9, 0.95)",
    "Why is AdamW's beta2 0.95, and not 0.999, the default?",
    "The paper gives no reason: Table 8 cites iGPT (Chen et al., 2020).")

variation(
    "mae:weight_decay=0", "mae.py", "weight_decay=0.05",
    "What does weight decay do in a run as short as this one?",
    "The paper gives no reason: Table 8 lists 0.05.")

variation(
    "mae:warmup_epochs=0", "vit.py", "warmup_epochs=1",
    "What happens without warmup, if the learning rate is highest at the first step?",
    "The paper gives no reason: Table 8 lists 40 epochs and cites Goyal et al. (2017).")

variation(
    "mae:crop=1", "mae.py", "crop=0.2",
    "Are random crops needed, if random masks already make each image new in each epoch?",
    "Sec. 4.1 and Table 1e: hardly, as masks do most of what augmentation does elsewhere. Without "
    "crops and flips, ViT-L loses 0.9 points fine-tuned (84.9 to 84.0).")

variation(
    "mae:norm_pix_loss", "mae.py", "norm_pix_loss=False",
    "What do normalised targets change? (Their pixels cannot be compared: they are seen with the "
    "mean and variance of the visible pixels.)",
    "Sec. 3 and 4.1, Table 1d: they raise the contrast within a patch and the accuracy, for ViT-L "
    "from 84.9 to 85.4 fine-tuned.")

variation(
    "mae:decoder_dim=32", "mae.py", "decoder_dim=64",
    "Is half the decoder's width enough?",
    "Sec. 4.1 and Table 1b: a narrow decoder is enough for fine-tuning; for a linear probe, 512, "
    "half the width of ViT-L, is best.")

variation(
    "mae:decoder_dim=128", "mae.py", "decoder_dim=64",
    "Is a decoder of twice the width better?",
    "Table 1b: no. With 1024 instead of 512, ViT-L loses 0.6 points fine-tuned.")

variation(
    "mae:decoder_depth=1", "mae.py", "decoder_depth=2",
    "Is one decoder block enough?",
    "Sec. 4.1 and Table 1a: for fine-tuning, yes (84.8 against 84.9 with eight blocks). For a "
    "linear probe, no (65.5 against 73.5).")

variation(
    "mae:decoder_depth=6", "mae.py", "decoder_depth=2",
    "Are six decoder blocks better than two?",
    "Sec. 4.1 and Table 1a: for a linear probe, yes, up to eight blocks. The decoder's blocks then "
    "specialise in pixels, and the encoder's output can stay more abstract.")

for ratio in (0.25, 0.5, 0.9):
    variation(
        f"mae:mask_ratio={ratio}", "mae.py", "mask_ratio=0.75",
        f"Why mask 75% of the patches, and not {ratio:.0%}?",
        "Sec. 3 and Figure 5: with a high ratio, neighbours no longer give the answer away. For "
        "ViT-L, 75% is best for a linear probe, and 40 to 80% are good for fine-tuning.")


@variation(
    "mae.no_final_norm", "vit.py", "return self.norm(x)",
    "Does the encoder need a LayerNorm after its last block?",
    "The paper gives no reason: A.1 says that the encoder ends with it.")
class NoFinalNorm(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.norm = nn.Identity()


@variation(
    "mae.post_norm", "vit.py", "x = x + self.drop_path(self.attn(self.norm1(x)))",
    "Why is the LayerNorm before attention and MLP, and not after the sum?",
    "The paper gives no reason: it takes the blocks of ViT (eq. 2, 3).")
class PostNorm(Altered, MAE):
    class Block(vit.Block):
        def forward(self, x):
            x = self.norm1(x + self.drop_path(self.attn(x)))           # (B, N, D)
            return self.norm2(x + self.drop_path(self.mlp(x)))         # (B, N, D)


@variation(
    "mae.relu", "vit.py", "return self.fc2(F.gelu(self.fc1(x)))",
    "Does a ReLU do what the GELU does?",
    "The paper gives no reason: it takes the blocks of ViT.")
class Relu(Altered, MAE):
    class MLP(vit.MLP):
        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))


@variation(
    "mae.no_class_token", "vit.py", "cls = self.cls_token + self.pos_embed[:, :1]",
    "What does the class token do in pretraining, where nothing is predicted from it? (Without it, "
    "the decoder gets zeros in its place.)",
    "A.1: it is there for the classifier. MAE works similarly well without it, if features are "
    "averaged.")
class NoClassToken(Altered, MAE):
    class Encoder(ViT):
        def encode(self, tokens):
            for block in self.blocks:
                tokens = block(tokens)                                 # (B, K, D)
            return F.pad(self.norm(tokens), (0, 0, 1, 0))              # (B, 1+K, D)


@variation(
    "mae.no_encoder_positions", "vit.py", "return self.patch_embed(patches) + pos",
    "Does the encoder need to know where its patches are? (Fine-tuning then learns positions from "
    "zero.)",
    "The paper gives no reason: Sec. 3 adds positions, as in ViT.")
class NoEncoderPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.pos_embed.data.zero_()


@variation(
    "mae.learned_positions", "mae.py",
    "sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)",
    "Why are positions fixed sines and cosines, in encoder and decoder, and not learned?",
    "The paper gives no reason: A.1 says that they are.")
class LearnedPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for positions in (self.encoder.pos_embed, self.decoder_pos_embed):
            nn.init.normal_(positions, std=0.02)
            positions.requires_grad_()


@variation(
    "mae.pytorch_init", "mae.py", "init_weights(self)",
    "What does Xavier initialisation do, against PyTorch's default?",
    "The paper gives no reason: A.1 follows ViT's code.")
class PytorchInit(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


@variation(
    "mae.mask_tokens_in_encoder", "mae.py", "return self.encoder(images, ids_keep)",
    "Why does the encoder not see mask tokens, as in BEiT and SimMIM? (Here, a masked patch is zero "
    "before its embedding, so its token is the learned bias, plus its position. The decoder gets "
    "all of the encoder's tokens.)",
    "Sec. 4.1 and Table 1c: it would see them only in pretraining. With them, ViT-L loses 14 points "
    "in a linear probe (73.5 to 59.6), 0.7 fine-tuned, and needs 3.3 times the operations.")
class MaskTokensInEncoder(MAE):
    def encode(self, images, ids_keep):
        visible = gather_patches(patchify(images, self.encoder.patch_size), ids_keep)
        return self.encoder(self.encoder.paste_patches(0 * images, visible, ids_keep, ids_keep))

    def add_mask_tokens(self, latent, ids_keep, ids_mask):
        x = self.decoder_embed(latent) + self.decoder_pos_embed        # (B, 1+L, E)
        patches = gather_patches(x[:, 1:], torch.cat([ids_keep, ids_mask], dim=1))
        return torch.cat([x[:, :1], patches], dim=1)                   # (B, 1+L, E)


@variation(
    "mae.no_decoder_positions", "mae.py", "pos = self.decoder_pos_embed[0, 1:]",
    "Why does the decoder need positions, if the encoder's tokens already have them?",
    "Sec. 3: without them, mask tokens have no information about their place in the image.")
class NoDecoderPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder_pos_embed.data.zero_()


@variation(
    "mae.mean_colours", "mae.py",
    "target = gather_patches(patchify(images, self.encoder.patch_size), ids).float()",
    "Is fine detail needed in the targets, or only each patch's mean colour?",
    "Sec. 4.1: yes. With targets reduced to 96 principal components, accuracy is lower.")
class MeanColours(MAE):
    def target(self, images, ids):
        pixels = super().target(images, ids).unflatten(2, (-1, self.encoder.in_chans))
        return pixels.mean(2, keepdim=True).expand_as(pixels).flatten(2)       # (B, M, p*p*C)


@variation(
    "mae.one_mask", "mae.py", "self.encoder.mask(images, noise, self.mask_ratio)",
    "Does each image need its own mask, or is one for the whole batch enough?",
    "The paper gives no reason: Sec. 3 draws patches at random.")
class OneMask(MAE):
    def draw_batch(self, crops, labels, noise):
        return super().draw_batch(crops, labels, noise[:1].expand_as(noise))


variation(
    "mae:mask=block", "mae.py", "self.encoder.mask(images, noise, self.mask_ratio)",
    "Why are masked patches scattered at random, and not in blocks, as in BEiT?",
    "Sec. 4.1 and Table 1f: at a mask ratio of 75%, blocks are too hard. ViT-L loses 2.1 points "
    "fine-tuned (84.9 to 82.8).")

variation(
    "mae:mask=grid", "mae.py", "self.encoder.mask(images, noise, self.mask_ratio)",
    "Why not keep one of every four patches in a regular grid?",
    "Sec. 4.1 and Table 1f: this task is easier. Predictions are sharper, but ViT-L loses 0.9 "
    "points fine-tuned (84.9 to 84.0).")


@variation(
    "mae.all_patches", "mae.py", "pred = self.decode(latent, ids_keep, ids_mask) ",
    "Why is the loss only on masked patches?",
    "Sec. 3, a footnote: the choice is driven by results. On all pixels, accuracy is slightly "
    "lower, e.g. by 0.5 points.")
class AllPatches(MAE):
    def forward(self, images, noise=None):
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        latent = self.encode(images, ids_keep)                         # (B, 1+K, D)
        pred = self.decode(latent, ids_keep, ids_mask, visible_too=True)       # (B, L, p*p*C)
        target = self.target(images, torch.cat([ids_keep, ids_mask], dim=1))   # (B, L, p*p*C)
        loss = (pred - target).square().mean()
        return loss, {"loss": loss.detach()}


@variation(
    "mae.l1", "mae.py", "loss = (pred - target).square().mean()",
    "Why the squared error, and not the absolute one?",
    "The paper gives no reason: Sec. 3 uses the mean squared error.")
class L1(MAE):
    def forward(self, images, noise=None):
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        pred = self.decode(self.encode(images, ids_keep), ids_keep, ids_mask)
        loss = (pred - self.target(images, ids_mask)).abs().mean()
        return loss, {"loss": loss.detach()}


# ------------------------------------------------------------------------------------ the program
def classifier(words):
    """Return a Classifier for finetune.py with the arguments `words`. Its encoder is altered like
    that of the --checkpoint."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    file = parser.parse_known_args(words)[0].checkpoint
    cls = METHODS.get(train.read_checkpoint(file)["method"]) if file else None
    if cls and issubclass(cls, Altered):
        return type(cls.__name__, (Altered, finetune.Classifier), parts_of(cls))
    return finetune.Classifier


def run_program(words):
    """Run another program of this project, e.g. train.py or tests.tour, with the methods CLASSES.
    Returns what it returns."""
    program, *words = words[words[0] == "-m":]
    module = importlib.import_module(program.removesuffix(".py"))
    if module is finetune:
        return finetune.main(words, classifier(words))
    return module.main(words)


def default_data():
    """Return CIFAR-10 if it is in data/, as a file, as folders or as downloaded, or shapes."""
    copies = {"data/cifar10.pt": "data/cifar10.pt", "data/cifar10/train": "data/cifar10",
              "data/cifar-10-batches-py": "cifar10"}
    return next((copies[path] for path in copies if Path(path).exists()), "shapes")


def columns_of(reference):
    return COLUMNS.get(method_of(reference), ["pixels", "20-NN"])


def describe(found, in_full):
    """Print a variation: its question and, `in_full`, its line with its number, and the paper's
    answer."""
    if not in_full:
        print(f"{found.spec:{max(map(len, VARIATIONS))}}  {found.question}")
        return
    code = (ROOT / found.file).read_text(encoding="utf-8")
    number = code[:code.index(found.line)].count("\n")
    print(f"\n{found.spec}\n  {found.file}, line {number + 1}: {code.splitlines()[number].strip()}"
          f"\n  Why?   {found.question}\n  Paper: {found.paper}")


def measure(names, more):
    """Train and evaluate variations and their references, seed by seed, with more flags of
    tests.compare. Then print scores, recorded ones as well. Returns the number of failures."""
    groups, plans, chains = {}, [], {}
    for name in names:
        reference = VARIATIONS[name].reference
        groups.setdefault(reference, [reference]).append(name)
    for reference, specs in groups.items():
        plans.append(compare.plan([
            *specs, "--data", default_data(), "--train_images", "10000", "--seeds", "0",
            "--out", "runs/why.jsonl", "--columns", *columns_of(reference), *more]))
        for keys, commands in compare.chains_of(plans[-1]):            # a reference can be in two
            chains[keys["seed"], keys["encoder"]] = keys, commands
    seeds = [chains[key] for seed in plans[0].seeds for key in chains if key[0] == seed]
    failed = compare.run_all(seeds, plans[0].out, plans[0].jobs)
    for plan in plans:
        compare.show(compare.numbers_of(plan), plan.methods, plan.columns)
        for numbers in compare.read_numbers(LOG) if LOG.exists() and plan.out.resolve() != LOG else ():
            print("\nrecorded in tests/logs/why.jsonl:", end="")
            compare.show(numbers, plan.methods, plan.columns)
    if failed:
        print("", *failed, sep="\n")
    return len(failed)


def main(argv=None):
    """Run `python -m tests.why` with the arguments `argv`. Returns the number of failed commands,
    or what another program returns."""
    words = words_of(argv)
    asked = [*takewhile(lambda word: not word.startswith("-"), words)]
    with patch.dict(METHODS, CLASSES):
        if re.search(r"^-m$|\.py$|^tests\.", " ".join(words[:1])):
            return run_program(words)
        known = {"all": [*VARIATIONS], **{name: [name] for name in VARIATIONS}}
        for name in VARIATIONS:
            known.setdefault(method_of(name), []).append(name)
        wrong = [word for word in asked if word not in known]
        require(not wrong, f"{wrong} is no variation: `python -m tests.why` lists them")
        for name in asked or known["all"]:
            if name in VARIATIONS:
                describe(VARIATIONS[name], in_full=bool(asked))
        names = [*dict.fromkeys(name for word in asked for name in known[word])]
        return measure(names, words[len(asked):]) if names else 0


if __name__ == "__main__":
    from tests import why                                  # so that classes are not in __main__
    shell(why.main)
