"""The exercises: a check passes right solutions however they are written, and says what is wrong
with others; bodies are taken out and come back; handouts. A handout goes without this file, which
has solutions."""

import inspect
import math
import shutil
import subprocess
import sys

import pytest
import torch.nn.functional as F

from tests import exercise
from tests.exercise import EXERCISES, ROOT, check, find, main

ATTEND = """
def heads(t):
    return t.reshape(*t.shape[:2], self.heads, -1)                     # (B, N, heads, d)
scores = torch.einsum("bihc,bjhc->bhij", heads(q), heads(k)) / (q.shape[2] / self.heads) ** 0.5
weights = scores.softmax(dim=3)
x = torch.einsum("bhij,bjhc->bihc", weights, heads(v))
return self.proj(x.flatten(2))"""
WRONG_ATTENTION = [
    (" / (q.shape[2] / self.heads) ** 0.5", "", "not divided"),
    ("** 0.5", "", "should be the root"),
    ("q.shape[2] / self.heads", "q.shape[2]", "channel 0: expected"),
    ("dim=3", "dim=2", "over the queries"),
    ("self.heads, -1", "1, -1", "channel 0: expected"),
    ("self.heads, -1)", "-1, self.heads).mT", "channel 0: expected"),
    ("x.flatten(2)", "x.transpose(1, 2).reshape(x.flatten(2).shape)", "put together wrongly"),
    ("self.proj(x.flatten(2))", "x.flatten(2)", "proj, is missing"),
    ("heads(v))", "heads(v.detach()))", "the gradient of")]

SOLUTIONS = {  # name: a right body, and [(text in it, other text, part of the message)]; "": right
    "vit.patchify": ("""
p, q = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
h, w = images.shape[2] // p, images.shape[3] // q
squares = [images[:, :, p * i:p * i + p, q * j:q * j + q] for i in range(h) for j in range(w)]
return torch.stack([x.permute(0, 2, 3, 1).flatten(1) for x in squares], dim=1)""", [
        ("permute(0, 2, 3, 1)", "permute(0, 1, 2, 3)", "slowest within a patch"),
        ("permute(0, 2, 3, 1)", "permute(0, 3, 2, 1)", "pixels within a patch"),
        ("for i in range(h) for j in range(w)", "for j in range(w) for i in range(h)", "by row"),
        ("squares =", "return images.reshape(len(images), h * w, -1)\nsquares =", "neighbours"),
        ("dim=1", "dim=0", "expected shape (2, 6, 12), yours (6, 2, 12)"),
        ("return", "result =", "it returns nothing: is there a return?"),
        ("squares =", "images.add_(1)\nsquares =", "images has been changed"),
        ("(patch_size, patch_size)", "patch_size", "TypeError"),
        ("squares =", "images = images.double()\nsquares =", "")]),
    "train.learning_rate": ("""
warmup, last = args.warmup_epochs, args.epochs
if warmup and t < warmup:
    return t * (args.lr / warmup)
if args.schedule == "constant":
    return args.lr
middle, half = (args.lr + args.min_lr) / 2, (args.lr - args.min_lr) / 2
return middle + half * math.cos(math.pi * (t - warmup) / (last - warmup))""", [
        ("(t - warmup) / (last - warmup)", "t / last", "begins where the warm-up ends"),
        ("(last - warmup)", "last", "result: expected"),
        ("args.min_lr", "0", "end at min_lr"),
        ("math.pi *", "2 * math.pi *", "whole cosine"),
        ("math.cos", "math.sin", "result: expected"),
        ('"constant"', '"none"', "schedule is ignored"),
        ("warmup and t < warmup", "t <= warmup", "ZeroDivisionError"),
        ("warmup, last", "t = int(t)\nwarmup, last", "within an epoch"),
        ("warmup and t < warmup", "t < warmup", "")]),
    "vit.normalize_patches": ("""
mean = patches.mean(-1, keepdim=True)
var = ((patches - mean) ** 2).sum(-1, keepdim=True) / (patches.shape[-1] - 1)
std = torch.sqrt(var + 1e-6)
return (patches - mean) / std, mean, std""", [
        ("shape[-1] - 1", "shape[-1]", "biased"),
        ("var + 1e-6", "var", "What does the docstring"),
        ("torch.sqrt(var + 1e-6)", "torch.sqrt(var) + 1e-6", "belongs to the variance"),
        ("torch.sqrt(var + 1e-6)", "var + 1e-6", "unit of the pixels"),
        ("mean, std", "mean, var", "std, image 0, patch 0, column 0: expected"),
        ("(-1, keepdim=True)", "((1, 2), keepdim=True)", "expected"),
        ("(patches - mean) / std, mean, std", "(patches - mean) / std", "yours (2, 3, 4)")]),
    "vit.masking": ("""
K = visible_count(noise.shape[1], mask_ratio)
order = noise.argsort(dim=1)
mask = (order.argsort(dim=1) >= K).float()
return order[:, :K], order[:, K:], mask""", [
        ("order = noise", "order = (-noise)", "highest noise"),
        (">= K", "< K", "inverted"),
        ("order = ", "L = noise.shape[1]\nK = L - int(L * mask_ratio)\norder = ", "truncates"),
        ("order = ", "noise = noise[:1].expand_as(noise)\norder = ", "noise of its own"),
        ("order[:, :K], order[:, K:]", "*(x.sort()[0] for x in (order[:, :K], order[:, K:]))",
         "in raster order"),
        ("noise.argsort(dim=1)", "noise.argsort(dim=1).argsort(dim=1)", "ranks"),
        ("order.argsort(dim=1) >=", "torch.arange(len(noise[0])).expand_as(noise) >=", "Entry i"),
        (".float()", "", "of bools"),
        ("noise.argsort(dim=1)", "noise.argsort(dim=0)", "ids_keep, image 0"),
        ("noise.argsort(dim=1)", "noise.topk(len(noise[0]), largest=False).indices", "")]),
    "imae.IMAE.mixture": ("""
if images.shape != partners.shape:
    raise ValueError("shapes")
a = torch.as_tensor(mix) * torch.ones(len(images))
mixed = torch.einsum("b,bchw->bchw", a, images - partners) + partners
small = torch.stack([x if w <= 0.5 else y for x, y, w in zip(images, partners, a)])
return mixed, (small, images + partners - small)""", [
        ("a, images - partners) + partners", "a, partners - images) + images", "not of partners"),
        ("w <= 0.5", "w > 0.5", "are exchanged"),
        ("w <= 0.5", "True", "always the subordinate"),
        ("w <= 0.5", "w < 0.5", "exactly 0.5"),
        ('torch.einsum("b,bchw->bchw", a, images - partners)', "a * (images - partners)", "axis"),
        ("(small, images + partners - small)", "(images, partners)", "always the subordinate"),
        ('raise ValueError("shapes")', "pass", "expected a ValueError"),
        ("(small, images + partners - small)", "[small, images + partners - small]", "")]),
    "hypermae.fourier_features": ("""
f = torch.tensor([sigma ** (k / (dim // 2 - 1)) for k in range(dim // 2)]).double()
phases = torch.cat([coords[..., :1].double() * f, coords[..., 1:].double() * f], dim=-1)
phases = math.pi * phases
return torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)""", [
        ("cos(phases), torch.sin(phases)", "sin(phases), torch.cos(phases)", "sines come before"),
        ("math.pi * ", "", "pi is missing"),
        ("math.pi * ", "2 * math.pi * ", "2 pi f x"),
        ("(dim // 2 - 1)", "(dim // 2)", "sigma itself"),
        ("sigma ** (k / (dim // 2 - 1))", "1 + k * (sigma - 1) / (dim // 2 - 1)", "geometrically"),
        ("coords[..., :1].double() * f, coords[..., 1:]", "coords[..., 1:] * f, coords[..., :1]",
         "column comes before"),
        ("phases = math", "phases = phases.unflatten(-1, (2, -1)).mT.flatten(-2)\nphases = math",
         "row and column alternate"),
        ("math.pi * phases", "(math.pi * phases).to(coords.dtype)", "feature"),
        (".double()", ".float()", "")]),
    "vit.sincos_pos_embed": ("""
if dim % 4:
    raise ValueError(dim)
n, (h, w) = dim // 4, grid
angles = torch.arange(max(grid))[:, None] * torch.exp(-math.log(10000) / n * torch.arange(n))
table = torch.cat([angles.sin(), angles.cos()], dim=1)                 # of each row or column
table = torch.cat([table[:w].repeat(h, 1), table[:h].repeat_interleave(w, 0)], dim=1)
return torch.cat([torch.zeros(1, dim), table])[None]""", [
        ("table[:w].repeat(h, 1), table[:h].repeat_interleave(w, 0)",
         "table[:h].repeat_interleave(w, 0), table[:w].repeat(h, 1)", "should have the column"),
        ("(10000) / n", "(10000) / (n - 1)", "does not reach n"),
        ("(10000) / n", "(10000) / dim", "expected"),
        ("[:w].repeat(h, 1), table[:h].repeat_interleave(w, 0)",
         "[:w].repeat_interleave(h, 0), table[:h].repeat(w, 1)", "expected"),
        ("angles.sin(), angles.cos()", "angles.cos(), angles.sin()", "cosines come before"),
        ("torch.cat([angles.sin(), angles.cos()], dim=1)",
         "torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)", "alternate"),
        ("torch.zeros(1, dim)", "table[:1]", "class token has a position"),
        ("raise ValueError(dim)", "pass", "expected a ValueError")]),
    "mae.MAE.decoder_input": ("""
ids = torch.cat([torch.zeros(len(z), 1).long(), ids_keep + 1, ids_mask + 1], dim=1)
hidden = self.mask_token.repeat(len(z), ids_mask.shape[1], 1)
pos = torch.stack([self.decoder_pos_embed[0][i] for i in ids])
return torch.cat([self.decoder_embed(z), hidden], dim=1) + pos""", [
        (" + pos", "", "left out"),
        ("ids_keep + 1, ids_mask + 1", "ids_keep, ids_mask", "one before it"),
        ("for i in ids]", "for i in [torch.arange(7)] * len(z)]", "by its id"),
        ("pos = ", "ids[:, 3:] = 0\npos = ", "all are the same"),
        ("return", "z = z[:, [0, 2, 1]]\nreturn", "token 1"),
        ("return torch.cat([self.decoder_embed(z), hidden], dim=1) + pos",
         "x = torch.cat([self.decoder_embed(z), hidden], dim=1) + pos\n"
         "return torch.stack([x[b][ids[b].argsort()] for b in range(len(z))])", "raster order"),
        ("self.decoder_embed(z)", "self.decoder_embed(z).detach()", "gradient of decoder_embed"),
        ("self.decoder_embed(z)", "self.decoder_embed(z.clone())", "")]),
    "mae.MAE.forward": ("""
L = self.encoder.num_patches
noise = torch.rand(len(images), L) if noise is None else noise
ids_keep, ids_mask, mask = self.encoder.mask(images, noise, self.mask_ratio)
ids = torch.cat([ids_keep, ids_mask], dim=1)
pred = self.decode(self.encode(images, ids_keep), ids_keep, ids_mask, L)
target = self.encoder.targets(images, ids, self.norm_pix_loss)
error = ((pred - target) ** 2).mean(dim=2)
loss = (error * mask.gather(1, ids)).sum() / mask.sum()
return loss, {"loss": loss.detach()}""", [
        ("(error * mask.gather(1, ids)).sum() / mask.sum()", "error.mean()", "covers all patches"),
        ("mask.gather(1, ids)).sum() / mask.sum()",
         "(1 - mask).gather(1, ids)).sum() / (1 - mask).sum()", "covers the visible"),
        ("(error * mask.gather(1, ids)).sum() / mask.sum()", "((pred - target) ** 2)[:, 2:].sum()",
         "this is a sum"),
        ("mask.gather(1, ids)", "mask", "the mask is in raster order"),
        ("(error * mask.gather(1, ids)).sum() / mask.sum()", "(error * mask.gather(1, ids)).mean()",
         "number of all patches"),
        (".mean(dim=2)", ".sum(dim=2)", "errors of a patch are summed"),
        ("mask(images, noise, ", "mask(images, None, ", "noise is ignored"),
        ("self.encode(images, ids_keep)", "self.encode(images, ids)[:, :1 + ids_keep.shape[1]]",
         "all patches are encoded"),
        ("((pred - target) ** 2)", "(pred - target).abs()", "absolute"),
        ("self.norm_pix_loss", "False", "norm_pix_loss is ignored"),
        ("ids = torch.cat([ids_keep, ids_mask]", "ids = torch.cat([ids_keep, ids_mask.sort()[0]]",
         "noise order"),
        ("ids_keep, ids_mask, mask = self.encoder.mask(images, noise",
         "ids_mask, ids_keep, mask = self.encoder.mask(images, noise", "loss: expected"),
        ("torch.rand(len(images), L)", "torch.arange(L).expand(len(images), L)", "another mask"),
        ('{"loss": loss.detach()}', '{"loss": loss}', "return the metric detached: loss.detach()"),
        ('{"loss": loss.detach()}', '{"loss": loss.item()}',
         "metrics loss is a Python number: expected a tensor, loss.detach()"),
        ("return loss,", "return loss.detach(),", "  loss has a gradient: expected True"),
        ("pred - target", "pred.detach() - target", "gradient: expected True"),
        ('return loss, {"loss": loss.detach()}', "return loss", "yours number"),
        ("pred - target", "pred.double() - target.double()", "")]),
    "vit.Attention.forward": ("""
q, k, v = torch.split(self.qkv(x), x.shape[2], dim=2)""" + ATTEND, [
        ("q, k, v =", "k, q, v =", "mixed up"), ("q, k, v =", "v, k, q =", "expected"),
        *WRONG_ATTENTION]),
    "crossmae.CrossAttention.forward": ("""
q, (k, v) = self.q(x), self.kv(y).split(self.q.out_features, dim=2)""" + ATTEND, [
        ("(k, v) =", "(v, k) =", "exchanged"), ("self.kv(y)", "self.kv(x)", "made of y"),
        *WRONG_ATTENTION]),
    "crossmae.CrossMAE.encode": ("""
maps = self.encoder.layers(self.encoder.embed(images, ids_keep))
if not hasattr(self, "wfm"):
    return [self.encoder.norm(maps[-1]) for block in self.decoder_blocks]
W, results = self.map_weights(), []
for k in range(len(W)):
    t = torch.zeros_like(maps[0])
    for j, i in enumerate(self.map_ids):
        t = t + W[k, j] * (self.map_proj[j](maps[i]) if len(self.map_proj) else maps[i])
    results.append(self.dec_norms[k](t))
return results""", [
        ("W[k, j]", "W[0, j]", "one row of weights"),
        ("self.dec_norms[k](t)", "t", "not normalised"),
        ("self.dec_norms[k]", "self.dec_norms[0]", "have one norm"),
        ("(t))", "(maps[-1]))", "only the last map"),
        ("W[k, j]", "W[k, -1 - j]", "wrong order"),
        ("self.map_weights()", "self.wfm['linear'].weight", "softmax_weights is ignored"),
        ("W, results = self.map_weights()",
         "W, results = self.wfm['linear'].weight.softmax(0 if self.softmax_weights else 1)",
         "expected"),
        ("self.map_proj[j](maps[i]) if len(self.map_proj) else maps[i]", "maps[i]",
         "project_maps is ignored"),
        ("len(self.map_proj) else maps[i]", "len(self.map_proj) else maps[j]", "expected"),
        ("return results", "return torch.stack(results)", "")]),
    "finetune.layer_decay_groups": ("""
depth, groups = len(model.encoder.blocks), []
for name, p in model.named_parameters():
    if p.requires_grad:
        i = depth + 1
        if name.startswith("encoder.blocks."):
            i = 1 + int(name.split(".")[2])
        elif name.startswith(("encoder.cls", "encoder.pos", "encoder.patch")):
            i = 0
        decays = name.endswith("weight") and p.ndim > 1
        groups.append(dict(params=[p], weight_decay=weight_decay if decays else 0,
                           lr_scale=layer_decay ** (depth + 1 - i)))
return groups""", [
        ("depth + 1 - i", "depth + 2 - i", "off by one"),
        ("depth + 1 - i", "i", "the head has the lowest rate"),
        ("i = 0", "i = 1", "layer of its own"),
        ('name.endswith("weight") and p.ndim > 1', '"cls" not in name and "pos" not in name',
         "biases or norms decay"),
        ('name.endswith("weight") and p.ndim > 1', "p.ndim > 1", "class token or the positions"),
        ('name.endswith("weight") and p.ndim > 1', "True", "all parameters decay"),
        ("if p.requires_grad:", "if True:", "not expected: encoder."),
        ("if p.requires_grad:", 'if p.requires_grad and "cls" not in name:', "missing: encoder"),
        ("lr_scale=", "scale=", "KeyError: 'lr_scale'"),
        ("return groups", "return groups + groups[:1]", "is in two groups"),
        ("return groups", "return tuple(groups[::-1])", "")]),
    "hypermae.HyperMAE.decode": ("""
z = fourier_features(coords.expand(len(M), -1, -1), self.pe_dim, self.pe_sigma)
layers, mod = list(self.paco_mlp), self.modulated_layer
layers.insert(mod, lambda x: torch.einsum("bni,bio->bno", x, M))
for i, layer in enumerate(layers):
    z = layer(z)
    beside = not self.relu_around_m and (i == mod or i + 1 == mod)
    if i + 1 < len(layers) and not beside:
        z = z.clamp(min=0)
return self.out_bias + z""", [
        ("not self.relu_around_m and ", "False and ", "beside M"),
        ("not self.relu_around_m and ", "", "relu_around_m is ignored"),
        ("z = z.clamp(min=0)", "pass", "there is no ReLU"),
        ("i + 1 < len(layers) and ", "", "after the last layer"),
        ("self.out_bias + z", "z", "out_bias is not added"),
        ("x, M)", "x, M.mT if M.shape[1] == M.shape[2] else M)", "M is transposed"),
        ("(i == mod or i + 1 == mod)", "i == mod", "expected"),
        ("insert(mod", "insert(mod - 1", "hypermae.HyperMAE.decode"),
        ("z.clamp(min=0)", "(z + z.abs()) / 2", "")]),
    "minr.MINR.modulate": ("""
layers, columns = [], list(tokens.unbind(1))
for i, (W, bias) in enumerate(zip(self.weights, self.biases)):
    if i in self.groups:
        own = [self.to_weights[str(i)](columns.pop(0)) for _ in range(self.groups[i])]
        own = torch.stack(own, dim=2)
        if self.hypernetwork == "ginr":
            W = torch.einsum("bag,gc->bac", own, W)
        else:
            W = torch.cat([own] * (W.shape[1] // own.shape[2]), dim=2) * W
    layers.append([W / W.square().sum(-2, keepdim=True).sqrt(), bias])
return layers""", [
        ("sum(-2", "sum(-1", "rows have norm 1"),
        ("W / W.square().sum(-2, keepdim=True).sqrt()", "W", "columns should have norm 1"),
        ("W / W.square().sum(-2, keepdim=True).sqrt()",
         "F.normalize(W, dim=-2) if i in self.groups else W", "shared layers"),
        ("own = torch.stack(own, dim=2)", "own = F.normalize(torch.stack(own, dim=2), dim=1)",
         "expected"),
        ("torch.cat([own] * (W.shape[1] // own.shape[2]), dim=2)",
         "own.repeat_interleave(W.shape[1] // own.shape[2], 2)", "0 0 1 1"),
        ("columns.pop(0)", "columns.pop()", "expected"),
        ("return layers", "return [W for W, bias in layers]", "expected shape"),
        ("dim=2) * W", "dim=2) + W", "expected"),
        ("dim=2) * W", "dim=2) + 0 * W", "They should be factors"),
        ("self.to_weights[str(i)](columns", "self.to_weights[str(i)][1](columns", "LayerNorm")]),
    "imae.IMAE.forward": ("""
B, L = len(images), self.encoder.num_patches
partners = torch.cat([images[-1:], images[:-1]]) if partners is None else partners
mix = self.draw_alpha(images.device) if mix is None else mix
mixture, xs = self.mixture(images, partners, mix)
noise = torch.rand(B, L) if noise is None else noise
ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
zs = self.encode(mixture, ids_keep)
parts, distill = {}, torch.tensor(0.0)
for name, z, x in zip(("subordinate", "dominant"), zs, xs):
    pred = self.decode(z, ids_keep, ids_mask, L)[:, -ids_mask.shape[1]:]
    target = self.encoder.targets(x, ids_mask, self.norm_pix_loss)
    parts[name] = F.mse_loss(pred, target)
    if self.distill_weight:
        distill = distill + F.mse_loss(z, self.teach(x, ids_keep))
loss = sum(parts.values()) + self.distill_weight * distill
parts.update(loss=loss, distill=distill)
return loss, {name: part.detach() for name, part in parts.items()}""", [
        ("part.detach()", "part.item()", "is a Python number"),
        ("sum(parts.values())", "sum(parts.values()) / len(parts)", "averaged"),
        ("zs, xs)", "zs, xs[::-1])", "expected"),
        ("targets(x,", "targets(mixture,", "target is the mixture"),
        ("self.teach(x,", "self.teach(mixture,", "teacher sees the mixture"),
        ("self.teach(x,", "self.teach(xs[0],", "one teacher's latent"),
        ("self.distill_weight * distill", "distill", "distill_weight is ignored"),
        ("[images[-1:], images[:-1]]", "[images[1:], images[:1]]", "loss: expected"),
        ("self.norm_pix_loss", "not self.norm_pix_loss", "means the opposite"),
        ("ids_mask, L)[:, -ids_mask.shape[1]:]", "ids_mask, L)[:, :ids_mask.shape[1]]", "expected"),
        ("parts.update(loss=loss, distill=distill)", "parts.update(loss=loss)", "expected shape"),
        ("F.mse_loss(pred, target)", "(pred - target).flatten().square().sum() / target.numel()",
         "")]),
}


def solve(monkeypatch, name, body):
    """The body as that of the function `name`, with what its module has imported, math and F."""
    owner, last = find(name)
    head = f"def {last}{inspect.signature(getattr(owner, last))}:"
    known = {**vars(sys.modules[name.split(".")[0]]), "math": math, "F": F}
    exec(head + body.replace("\n", "\n    "), known, made := {})
    monkeypatch.setattr(owner, last, made[last])


@pytest.mark.parametrize("name", EXERCISES)
def test_right_and_wrong_solutions(name, monkeypatch):
    assert check(name) == ""
    body, changes = SOLUTIONS[name]
    for old, new, message in [("", "", ""), *changes]:
        assert old in body, old
        solve(monkeypatch, name, body.replace(old, new))
        text = check(name)
        assert message in text and bool(message) == bool(text), (new, message, text)
    solve(monkeypatch, name, f"\nraise NotImplementedError('exercise: {name}')")
    assert check(name) == f"{name} is not written yet"


@pytest.mark.parametrize("name", EXERCISES)
def test_the_hint_names_each_slip(name, monkeypatch):
    item, (owner, last) = EXERCISES[name], find(name)
    assert len(item.slips) >= 3
    for slip, hint in item.slips.items():
        monkeypatch.setattr(owner, last, lambda *args, **more: item.reference(
            *args, **more, slip=slip))
        assert hint in check(name), slip


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """git(words) in a copy of this project's sources, all committed."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    for file in ROOT.glob("*.py"):
        shutil.copy(file, tmp_path)

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c",
                        "core.autocrlf=false", *words], cwd=tmp_path, check=True,
                       capture_output=True)
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr(exercise, "ROOT", tmp_path)
    return git


def test_a_body_is_taken_out_and_comes_back(repository, tmp_path, capsys, refused):
    before = (tmp_path / "mae.py").read_bytes()
    assert main(["mae.MAE.forward", "vit.Attention.forward"]) == 0
    out, after = capsys.readouterr().out, (tmp_path / "mae.py").read_text(encoding="utf-8")
    assert "--check mae.MAE.forward vit.Attention.forward" in out
    assert "git checkout HEAD -- mae.py vit.py" in out
    assert '    raise NotImplementedError("exercise: mae.MAE.forward")\n\n    @torch' in after
    assert "error of the hidden patches, a float32 scalar" in after
    assert "# Sec. 3: hidden patches only" in after and "pred.float() - target" not in after
    refused(main, ["mae.MAE.forward"], "mae.MAE.forward is already taken out: write it in mae.py, "
            "line ", ", then --check mae.MAE.forward")
    repository("checkout", "HEAD", "--", "mae.py", "vit.py")
    assert (tmp_path / "mae.py").read_bytes() == before
    repository("rm", "--cached", "mae.py")
    refused(main, ["mae.MAE.forward"], "git does not know mae.py")
    shutil.rmtree(tmp_path / ".git")
    refused(main, ["vit.patchify"], "git does not know vit.py")
    assert (tmp_path / "mae.py").read_bytes() == before


def test_a_body_is_only_taken_out_if_git_has_it(repository, tmp_path, refused):
    path = tmp_path / "mae.py"
    before = path.read_text(encoding="utf-8")
    assert main(["mae.MAE.forward"]) == 0
    taken = 'raise NotImplementedError("exercise: mae.MAE.forward")'
    written = path.read_text(encoding="utf-8").replace(taken, f"x = 1  # of eq. 1\n        {taken}")
    path.write_text(written, encoding="utf-8")
    refused(main, ["mae.MAE.forward"], "mae.py has changes", "To keep yours: git commit -m mine",
            "To drop them: git checkout HEAD -- mae.py")
    repository("add", "mae.py")
    assert exercise.comparison("mae.MAE.forward").endswith("git diff HEAD -- mae.py")
    assert exercise.comparison("vit.patchify") == ""
    assert main(["mae.MAE.decoder_input"]) == 0            # another one, which git has
    assert "x = 1  # of eq. 1" in path.read_text(encoding="utf-8")
    for changed in (before + "x = 1\n", before.replace("def decoder_input", "def other"),
                    before.replace("def forward(self, images,", "def forward(self, images")):
        path.write_text(changed, encoding="utf-8")
        refused(main, ["mae.MAE.forward"], "mae.py has changes", "name them together")
        assert path.read_text(encoding="utf-8") == changed


def test_handout(tmp_path, refused):
    folder, names = tmp_path / "class", [name for name in EXERCISES if "cross" not in name]
    assert main(["--handout", str(folder), *names]) == 0
    refused(main, ["--handout", folder, "mae.MAE.forward"], "is not an empty folder")
    refused(main, ["--handout", tmp_path / "new"], "needs the names")
    refused(main, ["--handout", "mae.MAE.forward"], "mae.MAE.forward was read as the folder")
    refused(main, ["--handout", ROOT / "tests/new", "mae.MAE.forward"], "is in the project's tests")
    page = (folder / "TASKS.md").read_text(encoding="utf-8")
    assert all(f"--check {name}`" in page for name in names)
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    for solution in ("phase.cos()", "noise.argsort", "pos[ids_mask]", "own.repeat(", "var_mean("):
        assert solution not in text and solution in "".join(
            file.read_text(encoding="utf-8") for file in ROOT.glob("*.py"))
    assert not (folder / "tests/test_exercise.py").exists()

    source = (ROOT / "vit.py").read_text(encoding="utf-8")
    source = source.replace("noise.argsort", "noise.argsorted")
    (folder / "vit.py").write_text(source, encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "tests.exercise", "--check", *names], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 1 and not done.stderr
    assert "vit.patchify is right" in done.stdout and "vit.masking stops with" in done.stdout
    assert "in masking: order = noise.argsorted(" in done.stdout and "AttributeError" in done.stdout
    for name in names:
        assert name.startswith("vit.") or f"{name} is not written yet\n" in done.stdout


def test_the_list_and_unknown_names(capsys, refused):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-len(EXERCISES):]] == list(EXERCISES)
    assert main(["--check", "vit.patchify"]) == 0
    assert capsys.readouterr().out.startswith("vit.patchify is right")
    refused(main, ["--check", "patchify"], "patchify is not an exercise", "vit.patchify")
    refused(main, ["mae.MAE.foward"], "did you mean mae.MAE.forward")
