"""Why is this line here? Train a method without it, and compare:

    python -m tests.why                            # the list, in the order of the code
    python -m tests.why mae.no_decoder_positions   # the question, the paper's answer, both scores
    python -m tests.why mae.l1 mae:crop=1 --seeds 0 1 2 --jobs 2
    python -m tests.why mae                        # all variations of MAE
    python -m tests.why all --seeds 0 1 2 --out tests/logs/why.jsonl
    python -m tests.why --page                     # tables in WHY.md, and why.svg, from that log

A variation changes one thing in a method: `mae:crop=1` is the method mae with a flag of train.py,
and `mae.l1` is a class below. The method and its variations are trained on 10,000 images, of
CIFAR-10 if it is in data/, otherwise of shapes. For the tables, the rule that says what is clear,
--data, --seeds and other flags, see tests.compare. At the end come the scores that are recorded in
tests/logs/why.jsonl.

Programs know the classes below if `-m tests.why` is put before their names:

    python -m tests.why train.py --method mae.l1
    python -m tests.why finetune.py --checkpoint runs/mae.l1_shapes
    python -m tests.why -m tests.tour mae.l1
"""

import argparse
import difflib
import importlib
import re
import sys
from collections import defaultdict, namedtuple
from functools import cache
from itertools import takewhile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import finetune
import train
import vit
from crossmae import CrossMAE
from hypermae import HyperMAE
from imae import IMAE
from mae import MAE
from minr import MINR
from tests import compare
from tests.lib.plot import draw_bars
from train import METHODS, shell, words_of
from vit import ViT, gather_patches, patchify, require

ROOT = Path(__file__).resolve().parent.parent
LOG, PAGE = ROOT / "tests/logs/why.jsonl", ROOT / "tests/docs/WHY.md"
COLUMNS = {"pixels": compare.PIXELS, "20-NN": "20-NN", "fine-tuned": "10%x20"}         # on the page
UNITS = {"pixels": "dB", "20-NN": "points", "fine-tuned": "points"}
PROGRAM = r"^-m$|\.py$|^tests\."                           # the first word, if another program runs
REFERENCES = {"imae": "imae:teacher={mae}"}                # if it is not the method without flags
FEATURES = ("mae", "crossmae", "imae")                     # methods that are also fine-tuned

Variation = namedtuple("Variation", "spec file line question paper reference")
VARIATIONS, CLASSES = {}, {}                               # by spec, see tests.compare; by method


def method_of(spec):
    """Return the method, one of the five, of a spec such as mae.l1 or mae:crop=1."""
    return re.match(r"\w+", spec)[0]


def variation(spec, line, question, paper, file=None, reference=None):
    """Add a variation: what it is for tests.compare, the line that it removes or changes (in
    `file`, by default the method's), a question about this line, and the paper's answer. Returns a
    decorator for its class, if it has one."""
    method = method_of(spec)
    VARIATIONS[spec] = Variation(spec, file or f"{method}.py", line, question, paper,
                                 reference or REFERENCES.get(method, method))

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
variation("mae:betas=0.9,0.999", "betas=(0.9, 0.95)",
          "Why is AdamW's beta2 0.95, and not 0.999, the default?",
          "The paper gives no reason: Table 8 cites iGPT (Chen et al., 2020). With 0.999, the "
          "average of squared gradients stays too small for long after gradients have grown, which "
          "can cause loss spikes (Wortsman et al., 2023).")

variation("mae:weight_decay=0", "weight_decay=0.05",
          "What does weight decay do in a run as short as this one?",
          "The paper gives no reason: Table 8 lists 0.05.")


@variation("mae.constant_rate", 'schedule="cosine"',
           "Why does the learning rate fall to zero along a cosine?",
           "The paper gives no reason: Table 8 lists cosine decay.")
class ConstantRate(MAE):
    recipe = dict(MAE.recipe, schedule="constant")


variation("mae:lr=0.004", "lr=2e-3",
          "Is twice the learning rate better? (With a cosine, its mean is then about that of "
          "`mae.constant_rate`.)",
          "The paper gives no reason: Table 8 lists 1.5e-4 per 256 images. Our 2e-3 is for width "
          "64 and 10,000 images or more.", file="vit.py")

variation("mae:warmup_epochs=0", "warmup_epochs=1",
          "What happens without warmup, if the learning rate is highest at the first step?",
          "The paper gives no reason: Table 8 lists 40 epochs and cites Goyal et al. (2017), who "
          "use it because weights change fast at the start.",
          file="vit.py")

variation("mae:crop=1", "crop=0.2",
          "Are random crops needed, if random masks already make each image new in each epoch?",
          "Sec. 4.1 and Table 1e: hardly, as masks do most of what augmentation does elsewhere. "
          "Without crops and flips, ViT-L loses 0.9 points fine-tuned (84.9 to 84.0), but 7.8 in a "
          "linear probe.")

variation("mae:norm_pix_loss", "norm_pix_loss=False",
          "What do normalised targets change? (Their PSNR is lower in any case: a prediction gets "
          "the mean and variance of the visible pixels.)",
          "Sec. 3 and 4.1, Table 1d: they raise the contrast within a patch and the accuracy, for "
          "ViT-L from 84.9 to 85.4 fine-tuned.")

variation("mae:decoder_dim=32", "decoder_dim=64",
          "Is half the decoder's width enough?",
          "Sec. 4.1 and Table 1b: a narrow decoder is enough for fine-tuning; for a linear probe, "
          "512, half the width of ViT-L, is best.")

variation("mae:decoder_dim=128", "decoder_dim=64",
          "Is a decoder of twice the width better?",
          "Table 1b: no. With 1024 instead of 512, ViT-L loses 0.6 points fine-tuned.")

variation("mae:decoder_depth=1", "decoder_depth=2",
          "Is one decoder block enough?",
          "Sec. 4.1 and Table 1a: for fine-tuning, yes (84.8 against 84.9 with eight blocks). For "
          "a linear probe, no (65.5 against 73.5).")

variation("mae:decoder_depth=6", "decoder_depth=2",
          "Are six decoder blocks better than two?",
          "Sec. 4.1 and Table 1a: for a linear probe, yes, up to eight blocks. The decoder's "
          "blocks then specialise in pixels, and the encoder's output can stay more abstract.")

for ratio in (0.25, 0.5, 0.9):
    variation(f"mae:mask_ratio={ratio}", "mask_ratio=0.75",
              f"Why mask 75% of the patches, and not {ratio:.0%}?",
              "Sec. 3 and Figure 5: with a high ratio, neighbours no longer give the answer away. "
              "For ViT-L, 75% is best for a linear probe, and 40 to 80% are good for fine-tuning.")


@variation("mae.drop_path",
           "self.encoder = ViT(img_size, patch_size, in_chans, dim, depth, heads)",
           "Why does the encoder have no drop path in pretraining, as in the paper's fine-tuning? "
           "(Here, it grows from 0 in the first block to 0.1 in the last.)",
           "The paper gives no reason (A.1). Sec. 4.1 says that masks make the task hard, so that "
           "less augmentation is needed to regularise it.")
class DropPath(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for i, block in enumerate(self.encoder.blocks):                # as in finetune.py
            block.drop_path.p = 0.1 * i / (len(self.encoder.blocks) - 1)


@variation("mae.no_final_norm", "return self.norm(x)",
           "Does the encoder need a LayerNorm after its last block?",
           "The paper gives no reason: A.1 says that the encoder ends with it.", file="vit.py")
class NoFinalNorm(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.norm = nn.Identity()


@variation("mae.post_norm", "x = x + self.drop_path(self.attn(self.norm1(x)))",
           "Why is the LayerNorm before attention and MLP, and not after the sum?",
           "The paper gives no reason: it takes the blocks of ViT (eq. 2, 3). With the norm after "
           "the sum, gradients near the output are large at first, so training needs warmup "
           "(Xiong et al., 2020).", file="vit.py")
class PostNorm(Altered, MAE):
    class Block(vit.Block):
        def forward(self, x):
            x = self.norm1(x + self.drop_path(self.attn(x)))           # (B, N, D)
            return self.norm2(x + self.drop_path(self.mlp(x)))         # (B, N, D)


@variation("mae.relu", "return self.fc2(F.gelu(self.fc1(x)))",
           "Does a ReLU do what the GELU does?",
           "The paper gives no reason: it takes the blocks of ViT.", file="vit.py")
class Relu(Altered, MAE):
    class MLP(vit.MLP):
        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))


@variation("mae.no_class_token", "cls = self.cls_token + self.pos_embed[:, :1]",
           "What does the class token do in pretraining, where nothing is predicted from it? "
           "(Without it, the decoder embeds zeros in its place.)",
           "A.1: it is a dummy token, added to keep to ViT's design, and later the classifier's; "
           "MAE works similarly well without it, if features are averaged.", file="vit.py")
class NoClassToken(Altered, MAE):
    class Encoder(ViT):
        def encode(self, tokens):
            for block in self.blocks:
                tokens = block(tokens)                                 # (B, K, D)
            return F.pad(self.norm(tokens), (0, 0, 1, 0))              # (B, 1+K, D)


@variation("mae.no_encoder_positions", "return self.patch_embed(patches) + pos",
           "Does the encoder need to know where its patches are? (Fine-tuning then learns "
           "positions from zero.)",
           "The paper gives no reason: Sec. 3 adds positions, as in ViT.", file="vit.py")
class NoEncoderPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder.pos_embed.data.zero_()


@variation("mae.learned_positions",
           "sincos_pos_embed(decoder_dim, self.encoder.grid), requires_grad=False)",
           "Why are positions fixed sines and cosines, in encoder and decoder, and not learned?",
           "The paper gives no reason: A.1 says that they are.")
class LearnedPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for positions in (self.encoder.pos_embed, self.decoder_pos_embed):
            nn.init.normal_(positions, std=0.02)
            positions.requires_grad_()


@variation("mae.pytorch_init", "init_weights(self)",
           "What does Xavier initialisation do, against PyTorch's default?",
           "The paper gives no reason: A.1 follows ViT's code.")
class PytorchInit(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()


@variation("mae.masked_pixels", "return self.encoder(images, ids_keep)",
           "Why are masked patches left out, and not only their pixels replaced? (Here, the "
           "encoder gets ImageNet's mean colour instead, and the decoder all its tokens.)",
           "Sec. 3: without them, pretraining is faster and takes less memory. With mask tokens "
           "(Table 1c), ViT-L needs 3.3 times the operations.")
class MaskedPixels(MAE):
    def encode(self, images, ids_keep):
        visible = gather_patches(patchify(images, self.encoder.patch_size), ids_keep)
        return self.encoder(self.encoder.paste_patches(0 * images, visible, ids_keep, ids_keep))

    def add_mask_tokens(self, latent, ids_keep, ids_mask):
        x = self.decoder_embed(latent) + self.decoder_pos_embed        # (B, 1+L, E)
        patches = gather_patches(x[:, 1:], torch.cat([ids_keep, ids_mask], dim=1))
        return torch.cat([x[:, :1], patches], dim=1)                   # (B, 1+L, E)


@variation("mae.mask_tokens_in_encoder", "return self.encoder(images, ids_keep)",
           "Why does the encoder not get mask tokens, as in BEiT and SimMIM? (Here, they replace "
           "masked patches after the embedding, and the decoder gets all tokens of the encoder.)",
           "Sec. 4.1 and Table 1c: it would see them only in pretraining. With them, ViT-L loses "
           "14 points in a linear probe (73.5 to 59.6), loses 0.7 fine-tuned, and needs 3.3 times "
           "the operations.")
class MaskTokensInEncoder(MaskedPixels):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.encoder_mask_token = nn.Parameter(0.02 * torch.randn(1, 1, self.encoder.dim))

    def encode(self, images, ids_keep):
        seen = F.one_hot(ids_keep, self.encoder.num_patches).sum(1)[..., None] > 0    # (B, L, 1)
        masked = self.encoder_mask_token + self.encoder.pos_embed[:, 1:]              # (1, L, D)
        return self.encoder.encode(torch.where(seen, self.encoder.embed(images), masked))


variation("mae.mask_tokens_in_encoder:decoder_depth=0", "return self.encoder(images, ids_keep)",
          "Why an encoder and a decoder, and not one transformer that gets all patches, masked "
          "ones as mask tokens? (Here, as in SimMIM, no block follows the encoder.)",
          "Sec. 3 and 4.1: the large network then processes only visible patches, and the decoder "
          "specialises in pixels. In Table 1, both without mask tokens and with more decoder "
          "blocks, a linear probe is more accurate.")


@variation("mae.no_decoder_positions", "pos = self.decoder_pos_embed[0, 1:]",
           "Why does the decoder need positions, if the encoder's tokens already have them?",
           "Sec. 3: without them, mask tokens have no information about their place in the image.")
class NoDecoderPositions(MAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder_pos_embed.data.zero_()


@variation("mae.no_visible_positions", "x[:, 1:] + pos[ids_keep],",
           "Why do visible patches get positions in the decoder, if they had them in the encoder?",
           "The paper gives no reason: Sec. 3 adds positions to all tokens. CrossMAE's decoder "
           "adds them only to mask tokens.")
class NoVisiblePositions(MAE):
    def add_mask_tokens(self, latent, ids_keep, ids_mask):
        tokens = super().add_mask_tokens(latent, ids_keep, ids_mask)   # (B, 1+L, E)
        visible = self.decoder_embed(latent)                           # (B, 1+K, E)
        return torch.cat([visible, tokens[:, visible.shape[1]:]], dim=1)


@variation("mae.mean_colours",
           "target = gather_patches(patchify(images, self.encoder.patch_size), ids).float()",
           "Is fine detail needed in the targets? (Here, they are only each patch's mean colour.)",
           "Sec. 4.1, Table 1d: yes. With targets reduced to 96 principal components, ViT-L falls "
           "from 84.9 to 84.6 fine-tuned.")
class MeanColours(MAE):
    def target(self, images, ids):
        pixels = super().target(images, ids).unflatten(2, (-1, self.encoder.in_chans))
        return pixels.mean(2, keepdim=True).expand_as(pixels).flatten(2)       # (B, M, p*p*C)


@variation("mae.one_mask", "self.encoder.mask(images, noise, self.mask_ratio)",
           "Does each image need its own mask, or is one for the whole batch enough?",
           "The paper gives no reason: Sec. 3 draws patches at random.")
class OneMask(MAE):
    def draw_batch(self, crops, labels, noise):
        return super().draw_batch(crops, labels, noise[:1].expand_as(noise))


@variation("mae.fixed_masks:crop=1", "self.encoder.mask(images, noise, self.mask_ratio)",
           "Does an image need a new mask in each epoch? (Here, the sum of its pixels seeds its "
           "mask. Crops would change the sum, so this is compared with MAE without crops. Flips do "
           "not, so each image is masked in two ways.)",
           "Sec. 4.1: as masks differ in each iteration, they make new training samples, whatever "
           "the augmentation.", reference="mae:crop=1")
class FixedMasks(MAE):
    def draw_batch(self, crops, labels, noise):
        for i, image in enumerate(crops[0].round()):                   # (C, H, W)
            g = torch.Generator().manual_seed(int(image.sum()))        # a flip has the same sum
            noise[i] = torch.rand(noise.shape[1], generator=g)
        return super().draw_batch(crops, labels, noise)


variation("mae:mask=block", "self.encoder.mask(images, noise, self.mask_ratio)",
          "Why are masked patches scattered at random, and not in blocks, as in BEiT?",
          "Sec. 4.1 and Table 1f: at a mask ratio of 75%, blocks are too hard. ViT-L loses 2.1 "
          "points fine-tuned (84.9 to 82.8).")

variation("mae:mask=grid", "self.encoder.mask(images, noise, self.mask_ratio)",
          "Why not keep one of every four patches in a regular grid?",
          "Sec. 4.1 and Table 1f: this task is easier. Predictions are sharper, but ViT-L loses "
          "0.9 points fine-tuned (84.9 to 84.0).")


@variation("mae.all_patches", "pred = self.decode(latent, ids_keep, ids_mask) ",
           "Why is the loss only on masked patches?",
           "Sec. 3, a footnote: the choice is driven by results. On all pixels, accuracy is "
           "slightly lower, e.g. by 0.5 points.")
class AllPatches(MAE):
    def forward(self, images, noise=None):
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        latent = self.encode(images, ids_keep)                         # (B, 1+K, D)
        pred = self.decode(latent, ids_keep, ids_mask, visible_too=True)       # (B, L, p*p*C)
        target = self.target(images, torch.cat([ids_keep, ids_mask], dim=1))   # (B, L, p*p*C)
        loss = (pred - target).square().mean()
        return loss, {"loss": loss.detach()}


@variation("mae.l1", "loss = (pred - target).square().mean()",
           "Why the squared error, and not the absolute one?",
           "The paper gives no reason: Sec. 3 uses the mean squared error.")
class L1(MAE):
    def forward(self, images, noise=None):
        ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
        pred = self.decode(self.encode(images, ids_keep), ids_keep, ids_mask)
        loss = (pred - self.target(images, ids_mask)).abs().mean()
        return loss, {"loss": loss.detach()}


# --------------------------------------------------------------------------------------- CrossMAE
variation("crossmae:self_attention", "if self.self_attention:",
          "Do masked patches have to see one another?",
          "Sec. 4.3 and Table 3a: no. Self-attention in the decoder leaves the accuracy at 83.3.")

variation("crossmae:decoder_depth=1", "decoder_depth=4",
          "Is one decoder block enough?",
          "Sec. 4.3 and Table 3e: nearly, with 83.0 against 83.3 for twelve blocks.")


@variation("crossmae.no_rate_factor:prediction_ratio=0.25",
           "return prediction_ratio / mask_ratio if mask_ratio else 1.0",
           "If only a third of the masked patches is predicted, why is the learning rate a third?",
           "Sec. 3.3: with fewer patches, the loss varies more, which a lower learning rate makes "
           "up for.", reference="crossmae:prediction_ratio=0.25")
class NoRateFactor(CrossMAE):
    lr_scale = 1.0


variation("crossmae:feature_maps=last", 'self.inter_block = feature_maps != "last"',
          "Why does the decoder get all feature maps, and not only the encoder's output?",
          "Sec. 1 and 3.4, Table 3d: so that the decoder also gets early features. With the last "
          "map only, ViT-B reaches 82.9 instead of 83.3; six maps reach 83.5.")


variation("crossmae:no-include_input",
          "self.map_ids = choose_maps(feature_maps, include_input, depth)",
          "Why is the first block's input a feature map, too?",
          "Sec. 3.4: to give the decoder more low-level information.")


@variation("crossmae.one_mix", 'w = self.wfm["linear"].weight',
           "Does each decoder block need its own mix of the feature maps?",
           "Sec. 3.4 and 4.5, Figure 5: yes, early decoder blocks prefer late maps, and late "
           "blocks early ones. The paper does not train without.")
class OneMix(CrossMAE):
    def map_weights(self):
        w = super().map_weights()                                      # (decoder depth, n)
        return w[:1].expand_as(w)


@variation("crossmae.equal_weights", "return w.softmax(dim=1) if self.softmax_weights else w",
           "Do the weights of the feature maps have to be learned, or does their mean do?",
           "Sec. 3.4: learned weights replace a choice by hand. The paper does not train with "
           "equal ones.")
class EqualWeights(CrossMAE):
    def map_weights(self):
        w = super().map_weights()                                      # (decoder depth, n)
        return torch.full_like(w, 1 / w.shape[1])


@variation("crossmae.no_query_positions",
           "x = self.mask_token + self.decoder_pos_embed[0, 1:][ids]",
           "What can the decoder predict if all its queries are equal?",
           "The paper gives no reason: Sec. 3.2 adds positions to the mask tokens, as in MAE.")
class NoQueryPositions(CrossMAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder_pos_embed.data.zero_()


for ratio in (0.25, 0.15):
    variation(f"crossmae:prediction_ratio={ratio}", "ids = ids_mask[:, skipped:]",
              f"Are predictions for {ratio:.0%} of the patches enough? (The learning rate is then "
              "lower.)",
              "Sec. 3.3 and Table 3c: yes. ViT-B reaches 83.2 with 25%, 83.1 with 15% and 83.3 "
              "with 75%.")


# --------------------------------------------------------------------------------------- HyperMAE
variation("hypermae:feat2w_depth=1", "feat2w_depth=2",
          "Is one Feat2W block enough?",
          "Sec. 5.2.2 and Table 5: nearly. ViT-Tiny reaches 78.5 with one block and 79.3 with "
          "four.")

variation("hypermae:n_weight_tokens=4", "n_weight_tokens=16",
          "Are four weight tokens enough to describe an image?",
          "Sec. 5.2.1 and Table 4: not quite. ViT-Tiny reaches 77.2 with 4 and 79.3 with 16.")

variation("hypermae:shared_blocks=2", "shared_blocks=0",
          "Why are the Feat2W blocks not the encoder's last blocks?",
          "Sec. 5.2.3 and Table 6: the encoder would see weight tokens in pretraining that later "
          "are missing. ViT-Tiny reaches 77.2 instead of 79.3.")

variation("hypermae:mlp_depth=3", "mlp_depth=6",
          "Does the PaCo-MLP need six layers?",
          "Sec. 5.2.5 and Table 8: with three, one layer after M may not be enough for an image. "
          "ViT-Tiny reaches 76.9 instead of 79.3.")

variation("hypermae:modulated_layer=0", "modulated_layer=1",
          "Why is the predicted layer not the first one?",
          "Sec. 5.2.4 and Table 7: no layer would come before it to transform the positions. "
          "ViT-Tiny reaches 76.6 instead of 79.3.")

variation("hypermae:modulated_layer=4", "modulated_layer=1",
          "Why is the predicted layer an early one?",
          "Sec. 5.2.4 and Table 7: after a late one, too few layers are left to make pixels. "
          "ViT-Tiny reaches 76.2 instead of 79.3.")


@variation("hypermae.raw_coordinates", "z = fourier_features(coords, self.pe_dim, self.pe_sigma)",
           "Why Fourier features of a patch's coordinates, and not the coordinates themselves?",
           "Sec. 5.1: an MLP with ReLUs may lack the capacity for fine details, and Fourier "
           "features were proposed to keep them (Tancik et al., 2020).")
class RawPatchCoordinates(HyperMAE):
    def decode(self, coords, M):
        def repeat(coords, dim, sigma):
            return coords.float().repeat_interleave(dim, dim=-1)       # (B, P, 2 pe_dim)
        with patch("hypermae.fourier_features", repeat):
            return super().decode(coords, M)


variation("hypermae:relu_around_m", "if i < mod - 1 or self.relu_around_m:",
          "What does a ReLU before and after M change?",
          "Sec. 2.2 puts a ReLU after each hidden layer, but the release none around M (item 1).")

variation("hypermae:out_bias=0", "return last(z) + self.out_bias",
          "What does the constant 0.5 do that is added to the pixels?",
          "The paper does not mention it: it is from the release (item 3).")

variation("hypermae:loss_on=all", 'if self.loss_on == "all":',
          "Why is the loss only on masked patches?",
          "Sec. 5.2.8 and Table 11: visible patches make the task easier. With them, ViT-Tiny "
          "reaches 78.0 instead of 79.3.")


# ------------------------------------------------------------------------------------------- MINR
variation("minr:groups=4", "groups=16",
          "Are four weight tokens enough to describe an image?",
          "Our summary of the paper gives no number; the release has 256 tokens (item 7).")

for sigma in (4, 64):
    variation(f"minr:ff_sigma={sigma}", "ff_sigma=16.0",
              f"What if the highest frequency is {sigma} periods per image, and not 16? (32 pixels "
              f"can hold at most 16.)",
              "Our summary of the paper gives no number; the release has 128 for 182 pixels (item "
              "7).")

variation("minr:pixel_fraction=1", "pixel_fraction=0.25",
          "Does it cost accuracy to render only a quarter of the pixels in a training step?",
          "Our summary of the paper mentions no fraction. The quarter is ours, for speed.")

variation("minr:modulated_layers=3", 'modulated_layers = [1] if hypernetwork == "ginr"',
          "Why is the second layer the predicted one, and not the fourth?",
          "Our summary of the paper says only that the second layer was effective in experiments. "
          "By the abstract of Kim et al. (2023), who propose GINR, an early layer makes patterns "
          "of one image, and all other layers learn how to compose patterns, the same for all images.")

variation("minr:encode_visible_only", "tokens = self.encoder(images.masked_fill(masked, 0))",
          "Does the encoder have to see masked patches as zeros, or can they be left out, as in "
          "MAE?",
          "Our summary of the paper gives no reason: the image is masked. Leaving patches out is "
          "ours.")

variation("minr:hypernetwork=transinr", "W = U @ V ",
          "Why predict one layer by a matrix product (GINR), and not all layers (TransINR)?",
          "Sec. 3.2: layers that all images share can learn what images have in common. On the "
          "data set of training, TransINR is slightly better (CelebA: 21.87 against 21.68 dB), on "
          "others GINR.")


@variation("minr.no_weight_norm", "layers.append((F.normalize(W, dim=-2), bias))",
           "Why is each column of the weights scaled to length 1?",
           "Our summary of the paper does not mention it: it is from the release, which gives no "
           "reason (item 5).")
class NoWeightNorm(MINR):
    def modulate(self, tokens):
        with patch("minr.F.normalize", lambda W, dim: W):
            return super().modulate(tokens)


@variation("minr.raw_coordinates", "x = fourier_features(coords, self.ff_dim, self.ff_sigma)",
           "Why Fourier features of a pixel's coordinates, and not the coordinates themselves?",
           "Our summary of the paper does not mention them: they are from the release. MLPs "
           "learn low frequencies first, and Fourier features let them learn high ones (Tancik et "
           "al., 2020).")
class RawPixelCoordinates(MINR):
    def decode(self, coords, layers):
        def repeat(coords, dim, sigma):
            return coords.float().repeat_interleave(dim, dim=-1)       # (N, 2 ff_dim)
        with patch("minr.fourier_features", repeat):
            return super().decode(coords, layers)


variation("minr:loss_on=masked", "loss = error.mean() ",
          "Why is the loss on all pixels, and not only on masked ones, as in MAE?",
          "Our summary of the paper gives no reason: the loss is the L2 loss over all pixels.")


# ------------------------------------------------------------------------------------------ i-MAE
variation("imae:teacher={mae}:branches=1", "branches=2",
          "Why predict both images, and not only the one with less weight?",
          "The abstract (arXiv, version 2): predicting both, and distillation, serve to learn "
          "better features. In the supplement, Section 2 predicts the subordinate image, Section 3 "
          "both.")


@variation("imae.one_linear_layer:teacher={mae}",
           "nn.ModuleList(nn.Linear(dim, decoder_dim) for _ in range(branches))",
           "Does each image need its own linear layer after the encoder?",
           "Section 1 and Algorithm 1: these layers separate the two images; this is the paper's "
           "subject.")
class OneLinearLayer(IMAE):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder_embed[1] = self.decoder_embed[0]


variation("imae:teacher={mae:dim=32}", "encoder=ViT(img_size, patch_size, in_chans, **teacher)",
          "Can the teacher be half as wide as the encoder?",
          "The supplement does not say how wide its teacher is.")

variation("imae:teacher={mae}:distill_weight=0", "if self.distill_weight > 0:",
          "Is a teacher needed?",
          "The abstract (arXiv, version 2): predicting both images, and distillation, serve to "
          "learn better features.")

variation("imae:teacher={mae}:same_class=1",
          "return [order, draw_partners(order, labels, run.same_class, generator)]",
          "What if both images are of the same class? (This uses labels.)",
          "The abstract (arXiv, version 2): this, the semantics-enhanced sampling, serves to learn "
          "more of what an image means. Table 2 lists 0, 25, 50 and 100% of such pairs.")

for alpha in (0.5, 0.1):
    variation(f"imae:teacher={{mae}}:alpha={alpha}",
              "alpha = torch.distributions.Beta(self.beta, self.beta).sample().item()",
              f"Why is the images' weight in the mixture random, and not always {alpha}?",
              "The supplement gives no reason: Table 2 draws the weight from Beta(1, 1), i.e. "
              "uniformly. Section 2 finds low weights best for separating the subordinate image.")


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


def place_of(found):
    """Return the number of a variation's line in its file, from 1 on, and this line's code."""
    code = (ROOT / found.file).read_text(encoding="utf-8")
    number = code[:code.index(found.line)].count("\n")
    return number + 1, code.splitlines()[number].strip()


def describe(found, in_full):
    """Print a variation: its question and, `in_full`, its line with its number, and the paper's
    answer."""
    if not in_full:
        print(f"{found.spec:{max(map(len, VARIATIONS))}}  {found.question}")
        return
    number, code = place_of(found)
    print(f"\n{found.spec}\n  {found.file}, line {number}: {code}"
          f"\n  Why?   {found.question}\n  Paper: {found.paper}")


def measure(names, more):
    """Train and evaluate variations and their references, seed by seed, with more flags of
    tests.compare. Then print scores, recorded ones as well. Returns the number of failures."""
    groups, plans, chains = {}, [], {}
    for name in names:
        reference = VARIATIONS[name].reference
        groups.setdefault(reference, [reference]).append(name)
    for reference, specs in groups.items():
        columns = ["pixels", "20-NN", *["10%x20"] * (method_of(reference) in FEATURES)]
        plans.append(compare.plan([
            *specs, "--data", default_data(), "--train_images", "10000", "--seeds", "0",
            "--out", "runs/why.jsonl", "--columns", *columns, *more]))
        for keys, commands in compare.chains_of(plans[-1]):            # a reference can be in two
            chains[keys["seed"], keys["encoder"]] = keys, commands
    ordered = [chains[key] for seed in plans[0].seeds for key in chains if key[0] == seed]
    for plan in plans:
        compare.say_lengths(plan)
    failed = compare.run_all(ordered, plans[0].out, plans[0].jobs)
    for plan in plans:
        compare.show(compare.numbers_of(plan), plan.methods, plan.columns)
        if LOG.exists() and plan.out.resolve() != LOG:
            print("\nRecorded in tests/logs/why.jsonl:", end="")
            for numbers in compare.read_numbers(LOG):
                compare.show(numbers, plan.methods, plan.columns)
    if failed:
        print("", *failed, sep="\n")
    return len(failed)


# --------------------------------------------------------------------------------------- the page
def recorded():
    """Return the Numbers of LOG. If a run is there twice, the later line counts."""
    lines = {(x["encoder"], x["seed"], x["column"]): x for x in compare.read_lines(LOG)}
    return compare.Numbers([*lines.values()][-1]["table"], lines.values())


def differences(numbers, found):
    """Return {column: how a variation differs from its reference}, for the COLUMNS that were
    measured with three seeds; bold if clear."""
    minus = {name: numbers.minus(found.spec, found.reference, column)
             for name, column in COLUMNS.items()}
    return {name: text for name, text in minus.items() if text}


def verdict(minus):
    """Say in words what is clear in `differences`."""
    clear = [f"{name} {'worse' if '-' in text else 'better'}" for name, text in minus.items()
             if "**" in text]
    return ", ".join(clear) or ("no clear difference" if minus else "not measured")


@cache
def at_lines():
    """Return {(file, line number): [(anchor in WHY.md, variation, words on what changes)]}."""
    numbers, found_at = recorded(), defaultdict(list)
    for found in VARIATIONS.values():
        if found.line not in (ROOT / found.file).read_text(encoding="utf-8"):
            continue                                       # a student has changed it
        minus = differences(numbers, found)
        words = ", ".join(f"{name} {text.strip('*')} {UNITS[name]}" for name, text in minus.items())
        found_at[found.file, place_of(found)[0]].append(
            (compare.slug(found.spec), found, f"{words} ({verdict(minus)})" if minus else ""))
    return found_at


def tables():
    """Return {method: the rows of its table in WHY.md}. First comes what the others are compared
    with; a row that is compared with another one names it."""
    numbers, rows = recorded(), {}
    for found in VARIATIONS.values():
        number, _ = place_of(found)
        minus, method = differences(numbers, found), method_of(found.spec)
        first = REFERENCES.get(method, method)
        if method not in rows:
            cells = [numbers.cell(first, column) for column in COLUMNS.values()]
            rows[method] = [f"| `{first}` | as it is | {' | '.join(cells)} | |"]
        other = f", compared with `{found.reference}`" * (found.reference != first)
        cells = [minus.get(name, "") for name in COLUMNS]
        rows[method].append(
            f'| <a id="{compare.slug(found.spec)}"></a>[`{found.line.strip()}`](../../{found.file}'
            f"#L{number})<br>`{found.spec}`{other} | {found.question}<br>*{found.paper}* | "
            f"{' | '.join(cells)} | {verdict(minus)} |")
    return rows


def write_page():
    """Replace the tables in WHY.md, and draw why.svg: MAE's clear and other differences."""
    text = PAGE.read_text(encoding="utf-8")
    for method, rows in tables().items():
        head = ["| line, variation | question, *the paper's answer* | pixels, dB | 20-NN, points | "
                "fine-tuned, points | with this change |", "|---|---|---|---|---|---|"]
        before, after = text.split(f"<!-- {method} -->\n")
        after = after[after.index("\n\n") + 1:]
        text = "\n".join([f"{before}<!-- {method} -->", *head, *rows, after])
    PAGE.write_text(text, encoding="utf-8")
    numbers, bars = recorded(), {}
    for found in VARIATIONS.values():
        if found.reference == "mae":
            name = re.sub(r"^mae\.\w+:", "+ ", found.spec)  # the row before is the class alone
            name = re.sub(r"^mae[.:]", "", name).replace("_", " ")
            bars[name] = differences(numbers, found)
    draw_bars(ROOT / ".github/why.svg", {name: x for name, x in bars.items() if x}, UNITS)


def main(argv=None):
    """Run `python -m tests.why` with the arguments `argv`. Returns the number of failed commands,
    or what another program returns."""
    words = words_of(argv)
    asked = [*takewhile(lambda word: not word.startswith("-"), words)]
    with patch.dict(METHODS, CLASSES):
        if re.search(PROGRAM, " ".join(words[:1])):
            return run_program(words)
        if words == ["--page"]:
            write_page()
            return 0
        if {*words} & {"-h", "--help"}:
            print(__doc__)
            return 0
        require(asked or not words, f"put a variation before {' '.join(words)}")
        known = {"all": [*VARIATIONS], **{name: [name] for name in VARIATIONS}}
        for name in VARIATIONS:
            known.setdefault(method_of(name), []).append(name)
        wrong = [word for word in asked if word not in known]
        near = [x for word in wrong for x in difflib.get_close_matches(word, known, 1)]
        hint = f", but {', '.join(near)} may be meant" if near else ""
        require(not wrong, f"no variation is named {', '.join(wrong)}{hint}: `python -m tests.why` "
                           "lists them all")
        names = [*dict.fromkeys(name for word in asked for name in known[word])]
        for name in names or VARIATIONS:
            describe(VARIATIONS[name], in_full=name in asked)
        return measure(names, words[len(asked):]) if names else 0


if __name__ == "__main__":
    from tests import why                                  # so that classes are not in __main__
    if re.search(why.PROGRAM, " ".join(sys.argv[1:2])):
        shell(why.main)
    else:
        compare.end("tests.why", why.main)
