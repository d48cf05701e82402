"""Plain-loop references of the exercise functions, for tests/exercise.py.

A reference takes its function's arguments and `slip`, the name of a common mistake to make, so that
a check can tell a student which mistake leads to a wrong result.
"""

import inspect
import math
from itertools import product
from types import SimpleNamespace

import torch

EXERCISES = {}                                             # {name: the arguments of exercise()}


class Different(Exception):
    """Says how a result differs from the reference's."""


def exercise(name, section, task, returns, cases, call=None, **slips):
    """Register the reference of an exercise.

    returns: names of the result's axes, e.g. "image, patch"; for a tuple, a tuple of these, each
        with a label, e.g. "mask: image, patch"; for a list of any length, [names for its elements]
    cases(module): returns a list of tuples, the arguments of each call
    call(function, *arguments): returns what to compare (default: what the function returns)
    slips: {slip: the hint for this mistake}
    """
    def register(reference):
        EXERCISES[name] = SimpleNamespace(
            section=section, task=task, returns=returns, cases=cases, slips=slips,
            reference=reference, call=call or (lambda function, *args: function(*args)))
        return reference
    return register


def build(cls, *sizes, **options):
    """Return a module of these sizes or, without sizes, a tiny model with 2 of 2 x 3 patches
    visible. All trained weights are random, including those of norms."""
    names, known = inspect.signature(cls.__init__).parameters, dict(
        img_size=(4, 6), patch_size=2, dim=8, depth=1, heads=2, mask_ratio=0.6,
        prediction_ratio=0.6, decoder_dim=12, decoder_depth=1, decoder_heads=2, hidden_dim=6,
        n_weight_tokens=3, feat2w_depth=1, mlp_depth=4, pe_dim=4, pe_sigma=4.0, ff_dim=4,
        ff_sigma=4.0, groups=2)
    config = {} if sizes else {k: v for k, v in known.items() if k in names}
    model = cls(*sizes, **{**config, **options})
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.3 * torch.randn_like(p)
    model.said = f"{cls.__name__} {', '.join(f'{k}={v}' for k, v in options.items())}".strip()
    return model


def random_inputs(B=2):
    """Return images (B,3,4,6), noise (B,6), and its ids_keep (B,2) and ids_mask (B,4)."""
    noise = torch.rand(B, 6)
    return torch.randn(B, 3, 4, 6), noise, *noise.argsort(dim=1).split([2, 4], dim=1)


# ------------------------------------------------------------------------- from easy to hard
@exercise(
    "vit.patchify", "ViT Sec. 3.1; MAE Sec. 3", "images -> patches in raster order",
    "image, patch, value",
    lambda vit: [(torch.randn(2, 3, 4, 6), 2), (torch.randn(2, 1, 4, 6), (2, 3))],
    channels="the channel varies slowest within a patch. It should vary fastest.",
    columns="patches are sorted column by column. Raster order is row by row.",
    inside="pixels within a patch are sorted column by column. They should be row by row.",
    memory="a patch has neighbours in memory, not in the image. A reshape cannot cut out squares.",
    strided="a patch has pixels from all over the image. In reshape, h precedes p, and w q.")
def patchify(images, patch_size, slip=""):
    B, C, H, W = images.shape
    p, q = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
    patches = torch.zeros(B, H // p * (W // q), p * q * C)
    for b, c, y, x in product(range(B), range(C), range(H), range(W)):
        patch = y // p * (W // q) + x // q
        value = (y % p * q + x % q) * C + c
        if slip == "channels":
            value = c * p * q + y % p * q + x % q
        elif slip == "columns":
            patch = x // q * (H // p) + y // p
        elif slip == "inside":
            value = (x % q * p + y % p) * C + c
        elif slip == "memory":
            patch, value = divmod((c * H + y) * W + x, p * q * C)
        elif slip == "strided":
            (j, y_patch), (i, x_patch) = divmod(y, H // p), divmod(x, W // q)
            patch, value = y_patch * (W // q) + x_patch, (j * q + i) * C + c
        patches[b, patch, value] = images[b, c, y, x]
    return patches


def rate_cases(train):
    said = dict(lr=0.3, min_lr=0.1, warmup_epochs=2, epochs=10, schedule="cosine")
    return [(t, SimpleNamespace(**{**said, **other})) for other in (
        {}, dict(warmup_epochs=0), dict(schedule="constant")) for t in (0, 0.5, 2, 3.7, 6, 10)]


@exercise(
    "train.learning_rate", "MAE Table 8", "a warmup, then half a cosine", "", rate_cases,
    whole="the cosine starts at epoch 0. It should start where the warmup ends.",
    floor="the learning rate should end at min_lr.",
    added="min_lr is added everywhere. The highest learning rate should be lr.",
    step="the learning rate should also change within an epoch.",
    constant="the schedule is ignored.")
def learning_rate(t, args, slip=""):
    t = int(t) if slip == "step" else t
    if t < args.warmup_epochs:
        return args.lr * t / args.warmup_epochs
    if args.schedule == "constant" and slip != "constant":
        return args.lr
    start = 0 if slip == "whole" else args.warmup_epochs
    half = math.pi * (t - start) / (args.epochs - start) / 2
    falls, rises = math.cos(half) ** 2, math.sin(half) ** 2
    return falls * args.lr + {"floor": 0, "added": 1}.get(slip, rises) * args.min_lr


@exercise(
    "vit.normalize_patches", "MAE Sec. 3, Reconstruction target", "patches to mean 0, variance 1",
    ("patches: image, patch, value", "mean: image, patch, column", "std: image, patch, column"),
    lambda vit: [(torch.stack([torch.randn(3, 4) + 1, torch.cat([
        torch.full((2, 4), 0.5), 1e-3 * torch.randn(1, 4)])]),)],
    biased="the variance is biased (divided by N). The docstring says unbiased.",
    epsilon="a patch of one colour has variance 0. What does the docstring add to it?",
    outside="1e-6 is added to the standard deviation. It should be added to the variance.",
    image="mean and variance are computed over a whole image. Each patch has its own.")
def normalize_patches(patches, slip=""):
    B, L, _ = patches.shape
    result, means, stds = torch.empty_like(patches), torch.empty(B, L, 1), torch.empty(B, L, 1)
    for b, i in product(range(B), range(L)):
        values = (patches[b] if slip == "image" else patches[b, i]).flatten().tolist()
        mean = sum(values) / len(values)
        var = sum((v - mean) ** 2 for v in values) / (len(values) - (slip != "biased"))
        std = math.sqrt(var + 1e-6)
        if slip in ("epsilon", "outside"):
            std = math.sqrt(var) + (1e-6 if slip == "outside" else 0)
        result[b, i], means[b, i], stds[b, i] = (patches[b, i] - mean) / std, mean, std
    return result, means, stds


@exercise(
    "vit.masking", "MAE Sec. 3, Masking", "sort noise to choose visible patches",
    ("ids_keep: image, place", "ids_mask: image, place", "mask: image, patch"),
    lambda vit: [(torch.rand(3, 6), 2), (torch.randn(2, 35), 7)],
    highest="the patches with the highest noise are visible. Those with the lowest should be.",
    inverted="the mask is inverted. 1 is masked, 0 visible.",
    count="K patches are masked. K is the number of visible ones.",
    raster="the ids are in raster order. They should be sorted by noise.",
    ranks="the ids are the ranks of the patches. They should be the patches, sorted by rank.",
    shuffled="the mask is sorted by noise. Its entry i should be for patch i.")
def masking(noise, K, slip=""):
    L = noise.shape[1]
    K = L - K if slip == "count" else K
    ids, mask = [], torch.ones(noise.shape)
    for b, row in enumerate(noise.tolist()):
        order = sorted(range(L), key=row.__getitem__, reverse=slip == "highest")
        if slip == "raster":
            order = sorted(order[:K]) + sorted(order[K:])
        elif slip == "ranks":
            order = [order.index(i) for i in range(L)]
        ids.append(order)
        for i in range(K) if slip == "shuffled" else order[:K]:
            mask[b, i] = 0
    ids = torch.tensor(ids)
    return ids[:, :K], ids[:, K:], 1 - mask if slip == "inverted" else mask


def mix_cases(imae):
    model, images, partners = build(imae.IMAE), torch.randn(3, 3, 3, 3), torch.randn(3, 3, 3, 3)
    alphas = (torch.tensor([0.3, 0.9, 0.5]), torch.tensor(0.4), 0.3, 0.8)
    return [(model, images, partners, alpha) for alpha in alphas]


@exercise(
    "imae.IMAE.mix_images", "i-MAE Algorithm 1, item 3", "mix images, and sort each pair by weight",
    ("mix: image, channel, row, column", ("subordinate: image, channel, row, column",
                                          "dominant: image, channel, row, column")),
    mix_cases,
    weight="alpha is the weight of images, not of partners.",
    roles="subordinate and dominant are exchanged. The subordinate one has the smaller weight.",
    half="at exactly 0.5, images should be the subordinate ones (item 3).")
def mix_images(self, images, partners, alpha, slip=""):
    weights, mix, small, large = torch.as_tensor(alpha).expand(len(images)), [], [], []
    for x, y, a in zip(images, partners, weights):
        first = a < 0.5 if slip == "half" else a <= 0.5
        first = not first if slip == "roles" else first
        small.append(x if first else y)
        large.append(y if first else x)
        a = 1 - a if slip == "weight" else a
        mix.append(a * x + (1 - a) * y)
    return torch.stack(mix), (torch.stack(small), torch.stack(large))


def coordinates(*shape):
    return torch.randint(-8, 9, (*shape, 2)) / 8           # eighths are exact in every precision


def call_features(function, *args):
    """Call fourier_features; float64 is as good as float32."""
    result = function(*args)
    return result.double() if torch.is_tensor(result) else result


@exercise(
    "hypermae.fourier_features", "HyperMAE Algorithm 1, item 5", "cosines and sines of coordinates",
    "image, coordinate, feature",
    lambda hypermae: [(coordinates(3), 6, 8.0), (coordinates(2, 3), 6, 8.0),
                      (coordinates(3).bfloat16(), 4, 64.0)],
    call_features,
    sines="sines come before cosines. The cosines should come first.",
    pi="pi is missing.",
    double="the phase is 2 pi f c. The docstring says pi f c.",
    open="the last frequency should be sigma itself.",
    mixed="row and column alternate. All frequencies of the row should come first.")
def fourier_features(coords, dim, sigma, slip=""):
    n, rows = dim // 2, []
    for row, column in coords.reshape(-1, 2).tolist():
        phases = []
        for x, k in product((row, column), range(n)):
            f = sigma ** (k / (n if slip == "open" else n - 1))
            phases.append({"pi": 1, "double": 2 * math.pi}.get(slip, math.pi) * f * x)
        if slip == "mixed":
            phases = [phases[half + k] for k in range(n) for half in (0, n)]
        halves = [[math.cos(a) for a in phases], [math.sin(a) for a in phases]]
        rows.append(halves[1] + halves[0] if slip == "sines" else halves[0] + halves[1])
    return torch.tensor(rows).view(*coords.shape[:-1], 2 * dim)


@exercise(
    "vit.sincos_pos_embed", "MAE Appendix A.1", "fixed sine-cosine positions",
    "batch, token, channel", lambda vit: [(12, (2, 3)), (8, (3, 2))],
    rows="the first half of the channels encodes the row. It should encode the column.",
    interleaved="sines and cosines alternate. In each half, all sines should come first.",
    endpoint="the frequencies are wrong. In 10000^(-i/n), i ends at n-1 but is divided by n.")
def sincos_pos_embed(dim, grid, slip=""):
    (h, w), n, table = grid, dim // 4, [[0.0] * dim]
    for y, x in product(range(h), range(w)):
        row = []
        for place in (y, x) if slip == "rows" else (x, y):
            angles = [place / 10000 ** (i / (n - (slip == "endpoint"))) for i in range(n)]
            parts = [[math.sin(a) for a in angles], [math.cos(a) for a in angles]]
            if slip == "interleaved":
                parts = zip(*parts)
            row += [value for part in parts for value in part]
        table.append(row)
    return torch.tensor([table])


@exercise(
    "mae.MAE.add_mask_tokens", "MAE Sec. 3, MAE decoder", "visible and mask tokens with positions",
    "image, token, channel", lambda mae: [(build(mae.MAE), torch.randn(2, 3, 8),
                                           *random_inputs()[2:])],
    positions="the positions are left out.",
    places="positions follow the order of the tokens. Each patch has its own, given by its id.",
    shifted="each patch has the position of the one before it. Row 0 is the class token's.",
    raster="tokens are in raster order. They should be sorted by noise, visible ones first.")
def add_mask_tokens(self, latent, ids_keep, ids_mask, slip=""):
    results, K = [], ids_keep.shape[1]
    for b, ids in enumerate(torch.cat([ids_keep, ids_mask], dim=1).tolist()):
        x = self.decoder_embed(latent[b])                              # (1+K, E)
        rows = {-1: x[0] + self.decoder_pos_embed[0, 0]}
        for place, patch in enumerate(ids):
            token = x[1 + place] if place < K else self.mask_token[0, 0]
            row = {"places": 1 + place, "shifted": patch}.get(slip, 1 + patch)
            if slip != "positions":
                token = token + self.decoder_pos_embed[0, row]
            rows[patch if slip == "raster" else place] = token
        results.append(torch.stack([rows[place] for place in sorted(rows)]))
    return torch.stack(results)


LOSS_SLIPS = dict(
    all="the loss covers all patches. It should cover only the masked ones.",
    divided="the sum is divided by the number of all patches. Divide by the number of masked ones.",
    pixels="norm_pix_loss is ignored or inverted.",
    order="predictions are compared with other patches' pixels. Predictions are sorted by noise.",
    mask="the mask is in raster order, but it is applied to errors sorted by noise.",
    raster="target and mask are in raster order, but predictions are sorted by noise.",
    ignored="noise is ignored: a new mask is drawn.")


def mean_error(model, images, z, ids_keep, ids_mask, slip):
    """Return the mean squared error over the masked patches of images, predicted from z."""
    ids, K, errors = torch.cat([ids_keep, ids_mask], dim=1), ids_keep.shape[1], []
    pred = model.decode(z, ids_keep, ids_mask, visible_too=True)             # (B, L, p*p*C)
    patches = patchify(images, model.encoder.patch_size)
    if model.norm_pix_loss != (slip == "pixels"):
        patches = normalize_patches(patches)[0]
    for b in range(len(ids)):
        part = ids_mask[b] if slip in ("mask", "raster") else slice(0 if slip == "all" else K, None)
        patch_ids = {"order": ids_mask[b].sort().values, "raster": ids_mask[b]}.get(
            slip, ids[b, part])
        for prediction, i in zip(pred[b, part], patch_ids):
            errors.append((prediction - patches[b, i]) ** 2)
    patches = ids.numel() if slip == "divided" else len(errors)
    return torch.stack(errors).sum() / (patches * pred.shape[2])


def call_forward(forward, model, images, noise, *more):
    """Call forward. Raises Different if noise is None and forward always uses the same mask."""
    torch.manual_seed(1)                                   # in case forward draws noise anyway
    if noise is not None:
        return forward(model, images, noise, *more)
    if len({forward(model, images, None, *more)[0].item() for _ in range(9)}) == 1:
        raise Different("noise is None, but every call uses the same mask: draw a new one")
    return {}


def loss_cases(mae):
    images, noise, *_ = random_inputs()
    return [(build(mae.MAE, norm_pix_loss=False), images, noise),
            (build(mae.MAE, norm_pix_loss=True), images, noise),
            (build(mae.MAE), images, None)]


@exercise(
    "mae.MAE.forward", "MAE Sec. 3", "the loss: mask, encode, decode, compare",
    ("loss: ", "metrics"), loss_cases, call_forward,
    leak="all patches are encoded, so the visible ones have seen the masked ones.",
    **LOSS_SLIPS)
def mae_forward(self, images, noise=None, slip=""):
    noise = torch.rand(len(images), 6) if noise is None or slip == "ignored" else noise
    ids_keep, ids_mask, _ = masking(noise, int(6 * (1 - self.mask_ratio)))
    seen = torch.cat([ids_keep, ids_mask], dim=1) if slip == "leak" else ids_keep
    z = self.encode(images, seen)
    loss = mean_error(self, images, z[:, :1 + ids_keep.shape[1]], ids_keep, ids_mask, slip)
    return loss, {"loss": loss.detach()}


ATTENTION_SLIPS = dict(
    scale="the scores are not divided by the square root of a head's width.",
    full="the scores are divided by the root of the full width. Take the root of a head's width.",
    axis="the softmax is over the queries. The weights of each query should sum to 1.",
    heads="there is only one head, of full width.",
    interleaved="the heads are interleaved. The channels of a head should be neighbours.",
    split="a reshape alone splits the heads wrongly: (B, N, heads, d) needs a transpose after it.",
    merge="the heads are joined wrongly: each token should get its own part of every head.")


def attend(module, q, k, v, slip):
    """Return the attention of queries (M,E) to keys and values (N,E), head by head: (M,E)."""
    heads, results = 1 if slip == "heads" else module.heads, []
    E, d = q.shape[1], q.shape[1] // heads
    scale = {"scale": 1, "full": E ** 0.5}.get(slip, d ** 0.5)
    for i in range(heads):
        part = slice(i, E, heads) if slip == "interleaved" else slice(i * d, i * d + d)
        parts = [t[:, part] for t in (q, k, v)]                        # (M, d), (N, d), (N, d)
        if slip == "split":
            parts = [t.reshape(heads, len(t), d)[i] for t in (q, k, v)]
        weights = (parts[0] @ parts[1].T / scale).exp()                # (M, N)
        weights = weights / weights.sum(0 if slip == "axis" else 1, keepdim=True)
        results.append(weights @ parts[2])                             # (M, d)
    x = torch.cat(results, 1)                                          # (M, E)
    if slip == "merge":
        x = torch.stack(results).reshape(q.shape)
    return module.proj(x)


@exercise(
    "vit.Attention.forward", "ViT eq. 5-8", "multi-head self-attention", "image, token, channel",
    lambda vit: [(build(vit.Attention, 12, 2), torch.randn(2, 5, 12))],
    order="q, k and v are mixed up. qkv outputs q, then k, then v.", **ATTENTION_SLIPS)
def attention(self, x, slip=""):
    results = []
    for tokens in x:
        q, k, v = self.qkv(tokens).chunk(3, dim=1)                     # (N, D) each
        q, k = (k, q) if slip == "order" else (q, k)
        results.append(attend(self, q, k, v, slip))
    return torch.stack(results)


@exercise(
    "crossmae.CrossAttention.forward", "CrossMAE Sec. 3.2", "queries attend to another sequence",
    "image, query, channel",
    lambda crossmae: [(build(crossmae.CrossAttention, 12, c, 2), torch.randn(2, 3, 12),
                       torch.randn(2, 4, c)) for c in (12, 6)],
    order="keys and values are exchanged. kv outputs k, then v.",
    own="keys and values are computed from x. They should come from y.",
    token="the first token of y, the class token, is left out. Queries should also attend to it.",
    **ATTENTION_SLIPS)
def cross_attention(self, x, y, slip=""):
    results = []
    for queries, context in zip(x, {"own": x, "token": y[:, 1:]}.get(slip, y)):
        k, v = self.kv(context).chunk(2, dim=1)                        # (1+K, E) each
        k, v = (v, k) if slip == "order" else (k, v)
        results.append(attend(self, self.q(queries), k, v, slip))
    return torch.stack(results)


def map_cases(crossmae):
    images, _, ids_keep, _ = random_inputs()
    return [(build(crossmae.CrossMAE, depth=3, decoder_depth=4, **options), images, ids_keep)
            for options in ({}, dict(feature_maps="last"),
                            dict(include_input=False, softmax_weights=True),
                            dict(project_maps=True, feature_maps=(0, 2)))]


@exercise(
    "crossmae.CrossMAE.encode", "CrossMAE Sec. 3.4, eq. 1", "inter-block attention",
    ["decoder block: image, token, channel"], map_cases,
    shared="all decoder blocks use one row of weights. Each has its own.",
    norms="the mixes are not normalised. Each decoder block has a norm (A.3).",
    logits="softmax_weights is ignored: map_weights() applies it.",
    axis="the softmax is over decoder blocks. It should be over the maps.",
    projection="project_maps is ignored.")
def crossmae_encode(self, images, ids_keep, slip=""):
    maps, results = self.encoder.feature_maps(self.encoder.embed(images, ids_keep)), []
    if not hasattr(self, "wfm"):                           # feature_maps "last"
        return [self.encoder.norm(maps[-1]) for _ in self.decoder_blocks]
    W = self.wfm["linear"].weight
    if self.softmax_weights and slip != "logits":
        W = W.exp() / W.exp().sum(0 if slip == "axis" else 1, keepdim=True)
    for k, norm in enumerate(self.dec_norms):
        t = 0
        for j, i in enumerate(self.map_ids):
            f = maps[i]
            if self.map_proj and slip != "projection":
                f = self.map_proj[j](f)
            t = t + W[0 if slip == "shared" else k, j] * f
        results.append(t if slip == "norms" else norm(t))
    return results


def by_parameter(function, model, *args):
    """Return the groups as {parameter: {weight_decay, lr_factor}}: their order does not matter."""
    names, found = {id(p): name for name, p in model.named_parameters()}, {}
    for group in function(model, *args):
        params = group["params"]                           # an optimizer also takes a single one
        for p in [params] if torch.is_tensor(params) else params:
            name = names.get(id(p), "what is not a parameter of the model")
            if name in found:
                raise Different(f"{name} is in two groups")
            found[name] = {key: group[key] for key in ("weight_decay", "lr_factor")}
    return found


@exercise(
    "finetune.layer_decay_groups", "BEiT; MAE Table 9", "lower learning rates for lower layers", "",
    lambda finetune: [(build(finetune.Classifier, **options), *more) for options, *more in (
        (dict(depth=2), 0.05, 0.5), (dict(depth=2, pool="token"), 0.1, 0.75),
        (dict(depth=2, probe=True), 0.05, 0.5), (dict(depth=12), 0.05, 0.5),
        (dict(depth=2, extra_tokens=2, pool="extra"), 0.05, 0.5))], by_parameter,
    shifted="the exponents are off by one. The head's lr_factor should be 1.",
    reversed="the head has the lowest learning rate. The embedding should have it.",
    embedding="the embedding has the learning rate of block 0. It is a layer of its own.",
    everything="all parameters decay. Only those with two axes or more should.",
    tokens="learned tokens or positions decay. They should not.")
def layer_decay_groups(model, weight_decay, layer_decay, slip=""):
    groups, encoder = [], model.encoder
    tokens = [*encoder.parameters(recurse=False)]          # learned tokens or positions
    layers = [[*tokens, *encoder.patch_embed.parameters()]]
    layers += [list(block.parameters()) for block in encoder.blocks]
    below = {id(p) for layer in layers for p in layer}
    layers.append([p for p in model.parameters() if id(p) not in below])
    for i, layer in enumerate(layers):
        steps = i if slip == "reversed" else len(layers) - 1 - i + (slip == "shifted")
        steps -= slip == "embedding" and i == 0
        for p in layer:
            learned = slip != "tokens" and any(p is token for token in tokens)
            decays = p.ndim > 1 and not learned or slip == "everything"
            if p.requires_grad:
                groups.append(dict(params=[p], weight_decay=weight_decay if decays else 0,
                                   lr_factor=math.prod([layer_decay] * steps)))
    return groups


def paco_cases(hypermae):
    models = [build(hypermae.HyperMAE, **options) for options in (
        {}, dict(modulated_layer=2), dict(modulated_layer=0), dict(relu_around_m=True),
        dict(relu_around_m=True, modulated_layer=0), dict(out_bias=0.2, modulated_layer=2))]
    return [(model, coordinates(*shape), torch.randn(2, len(model.T), 6))
            for model, shape in zip(models, [(2, 3), (3,)] * 3)]


@exercise(
    "hypermae.HyperMAE.decode", "HyperMAE Sec. 2.2, Algorithm 1", "the modulated MLP",
    "image, coordinate, value", paco_cases,
    around="there is a ReLU next to M. It belongs there only with relu_around_m.",
    before="there is a ReLU before M. It belongs there only with relu_around_m.",
    after="there is a ReLU after M. It belongs there only with relu_around_m.",
    ignored="relu_around_m is ignored.",
    final="there is a ReLU after the last layer.",
    bias="out_bias is not added.",
    late="M comes one layer late: modulated_layer counts from 0.",
    transposed="M is transposed.")
def paco_mlp(self, coords, M, slip=""):
    depth, results = len(self.paco_mlp) + 1, []
    around = self.relu_around_m and slip != "ignored"
    place = self.modulated_layer + (slip == "late")
    has_relu = {place - 1: around or slip in ("around", "before"),           # other layers have one
                place: around or slip in ("around", "after"), depth - 1: slip == "final"}
    for own, places in zip(M, coords.expand(len(M), -1, -1)):
        z = fourier_features(places, self.pe_dim, self.pe_sigma)       # (P, 2 pe_dim)
        for i in range(depth):
            if i == place:
                z = z @ (own.T if slip == "transposed" else own)
            else:
                z = self.paco_mlp[i if i < place else i - 1](z)
            if has_relu.get(i, True):
                z = z * (z > 0)                                        # (P, h)
        results.append(z if slip == "bias" else z + self.out_bias)
    return torch.stack(results)


def modulate_cases(minr):
    models = [build(minr.MINR, **options) for options in (
        {}, dict(modulated_layers=(0, 2)),
        dict(hypernetwork="transinr", groups=3, modulated_layers=(0, 1, 3)))]
    return [(model, torch.randn(2, len(model.encoder.extra_tokens), 8)) for model in models]


@exercise(
    "minr.MINR.modulate", "MINR Sec. 3.2; GINR; TransINR", "weight tokens -> an MLP's layers",
    ["layer", ("weights: image, input, output", "bias: output")], modulate_cases,
    norm="columns should have norm 1.",
    rows="rows have norm 1. Columns should: W (a,b) has b of them.",
    tokens="all layers use the same tokens. Each modulated layer has its own.",
    shared="columns of shared layers should also have norm 1.",
    early="the predicted columns are normalised. The columns of the product should be.",
    repeat="predicted columns repeat as 0 0 1 1. They should repeat as 0 1 0 1.",
    factors="predicted columns replace shared ones. The two should be multiplied (item 3).")
def modulate(self, tokens, slip=""):
    def unit(W, axis=0 if slip == "rows" else 1):          # scale columns to norm 1
        return torch.stack([x / (x ** 2).sum().sqrt() for x in W.unbind(axis)], dim=axis)
    layers, start = [], 0
    for i, (shared, bias) in enumerate(zip(self.weights, self.biases)):
        if i not in self.tokens_per_layer:
            layers.append((shared if slip in ("norm", "shared") else unit(shared), bias))
            continue
        g, (a, b), images = self.tokens_per_layer[i], shared.shape, []
        for mine in tokens[:, start:start + g]:
            own = torch.stack([self.to_columns[str(i)](token) for token in mine], dim=1)   # (a, g)
            own = unit(own) if slip == "early" else own
            columns = []
            for j in range(b):
                if self.hypernetwork == "ginr":
                    columns.append(sum(own[:, k] * shared[k, j] for k in range(g)))
                else:
                    k = j * g // b if slip == "repeat" else j % g
                    columns.append(own[:, k] * (1 if slip == "factors" else shared[:, j]))
            W = torch.stack(columns, dim=1)                            # (a, b)
            images.append(W if slip in ("norm", "early") else unit(W))
        layers.append((torch.stack(images), bias))
        start += 0 if slip == "tokens" else g
    return layers


def imae_cases(imae):
    (images, noise, *_), partners, alpha = random_inputs(3), torch.randn(3, 3, 4, 6), torch.rand(3)
    teacher, other = dict(teacher=dict(dim=8, depth=1, heads=2)), build(imae.IMAE, alpha=0.3)
    other.draw_alpha = lambda device: torch.tensor(0.6)
    other.said += " with draw_alpha overridden"
    cases = [(build(imae.IMAE, **options), images, *more) for options, *more in (
        (teacher, noise, partners, alpha), (dict(norm_pix_loss=True), noise, partners, 0.7),
        (dict(distill_weight=0.5, **teacher), noise, partners, 0.3),
        (dict(distill_weight=0.0, **teacher), noise, partners, 0.3),
        (dict(branches=1, **teacher), noise, partners, 0.3), (dict(alpha=0.3), noise, None, None),
        ({}, None, partners, 0.3))]
    return [*cases, (other, images, noise, partners, None)]


@exercise(
    "imae.IMAE.forward", "i-MAE Algorithm 1", "the loss of two branches, with distillation",
    ("loss: ", "metrics"), imae_cases, call_forward,
    mean="the branches' losses are averaged. They should be added (item 4).",
    targets="each branch predicts the other's image.",
    mixture="the target is the mixture. Each branch predicts its own image.",
    teacher="the teacher sees the mixture. It should see the unmixed images (item 1).",
    same="both branches share a teacher latent. Each image has its own.",
    weight="distill_weight is ignored.",
    partners="without partners, each image's partner should be the one before it in the batch.",
    **LOSS_SLIPS)
def imae_forward(self, images, noise=None, partners=None, alpha=None, slip=""):
    noise = torch.rand(len(images), 6) if noise is None or slip == "ignored" else noise
    if partners is None:
        step = 1 if slip == "partners" else -1
        partners = torch.stack([images[(b + step) % len(images)] for b in range(len(images))])
    if alpha is None:
        alpha = self.draw_alpha("cpu")
    mix, xs = mix_images(self, images, partners, alpha)
    ids_keep, ids_mask, _ = masking(noise, int(6 * (1 - self.mask_ratio)))
    recon, distill = [], torch.tensor(0.0)
    for i, z in enumerate(self.encode(mix, ids_keep)):
        target = mix if slip == "mixture" else xs[1 - i if slip == "targets" else i]
        recon.append(mean_error(self, target, z, ids_keep, ids_mask, slip))
        if self.distill_weight > 0:
            seen = mix if slip == "teacher" else xs[0 if slip == "same" else i]
            w = self.teacher["decoder_embed"](self.teacher["encoder"](seen, ids_keep))
            distill = distill + ((z - w) ** 2).sum() / z.numel()
    loss = sum(recon) / (len(recon) if slip == "mean" else 1)
    loss = loss + (1 if slip == "weight" else self.distill_weight) * distill
    metrics = dict(loss=loss, distill=distill, **dict(zip(("subordinate", "dominant"), recon)))
    return loss, {name: value.detach() for name, value in metrics.items()}
