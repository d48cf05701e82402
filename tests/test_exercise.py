"""The exercises: a check accepts right solutions however they are written, and says what is wrong
with others; removed bodies come back; handouts. These do not include this file, which has
solutions."""

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
    ("** 0.5", "", "its square root"),
    ("q.shape[2] / self.heads", "q.shape[2]", "root of the full width"),
    ("self.heads, -1", "1, -1", "channel 0: expected"),
    ("heads(v))", "heads(v.detach()))", "the gradient of"),
    ("weights = ", "x = x.detach()\nweights = ", "")]

SOLUTIONS = {  # name: a right body, and [(text in it, other text, part of the message)]; "": right
    "vit.patchify": ("""
p, q = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
h, w = images.shape[2] // p, images.shape[3] // q
squares = [images[:, :, p * i:p * i + p, q * j:q * j + q] for i in range(h) for j in range(w)]
return torch.stack([x.permute(0, 2, 3, 1).flatten(1) for x in squares], dim=1)""", [
        ("permute(0, 2, 3, 1)", "permute(0, 1, 2, 3)", "slowest within a patch"),
        ("for i in range(h) for j in range(w)", "for j in range(w) for i in range(h)", "by row"),
        ("dim=1", "dim=0", "expected shape (2, 6, 12), yours (6, 2, 12)"),
        ("return", "result =", "None: is a return statement missing?"),
        ("squares =", "images.add_(1)\nsquares =", "its argument images in place"),
        ("dim=1)", "dim=1).tolist()", "expected shape (2, 6, 12), yours [[6 x [12 x number]],"),
        ("squares =", "torch.set_default_dtype(torch.float64)\nimages = images.double()\nsquares =",
         "yours torch.float64"),
        ("squares =", "images = images.double()\nsquares =", "yours torch.float64")]),
    "train.learning_rate": ("""
warmup, last = args.warmup_epochs, args.epochs
if warmup and t < warmup:
    return t * (args.lr / warmup)
if args.schedule == "constant":
    return args.lr
middle, half = (args.lr + args.min_lr) / 2, (args.lr - args.min_lr) / 2
return middle + half * math.cos(math.pi * (t - warmup) / (last - warmup))""", [
        ("(t - warmup) / (last - warmup)", "t / last", "where the warmup ends"),
        ("args.min_lr", "0", "end at min_lr"),
        ("warmup and t < warmup", "t <= warmup", "ZeroDivisionError"),
        ("warmup, last =", "args.warmup_epochs = max(args.warmup_epochs, 1)\nwarmup, last =",
         "it modifies warmup_epochs of its argument args"),
        ("warmup and t < warmup", "t < warmup", "")]),
    "vit.normalize_patches": ("""
mean = patches.mean(-1, keepdim=True)
var = ((patches - mean) ** 2).sum(-1, keepdim=True) / (patches.shape[-1] - 1)
std = torch.sqrt(var + 1e-6)
return (patches - mean) / std, mean, std""", [
        ("shape[-1] - 1", "shape[-1]", "biased"),
        ("var + 1e-6", "var", "What does the docstring"),
        ("(-1, keepdim=True)", "((1, 2), keepdim=True)", "expected"),
        ("(patches - mean) / std, mean, std", "(patches - mean) / std", "yours (2, 3, 4)")]),
    "vit.masking": ("""
K = visible_count(noise.shape[1], mask_ratio)
order = noise.argsort(dim=1)
mask = (order.argsort(dim=1) >= K).float()
return order[:, :K], order[:, K:], mask""", [
        ("order = noise", "order = (-noise)", "highest noise"),
        (">= K", "< K", "inverted"),
        (".float()", "", "yours torch.bool"),
        ("order[:, :K], order[:, K:], mask", "order[:, K:], order[:, :K], mask", "another order"),
        ("noise.argsort(dim=1)", "noise.topk(len(noise[0]), largest=False).indices", "")]),
    "imae.IMAE.mix_images": ("""
if images.shape != partners.shape:
    raise ValueError("shapes")
a = torch.as_tensor(alpha) * torch.ones(len(images))
mixed = torch.einsum("b,bchw->bchw", a, images - partners) + partners
small = torch.stack([x if w <= 0.5 else y for x, y, w in zip(images, partners, a)])
return mixed, (small, images + partners - small)""", [
        ("a, images - partners) + partners", "a, partners - images) + images", "not of partners"),
        ("w <= 0.5", "w > 0.5", "are exchanged"),
        ('raise ValueError("shapes")', "pass", "expected a ValueError"),
        ("(small, images + partners - small)", "[small, images + partners - small]", "")]),
    "hypermae.fourier_features": ("""
f = [sigma ** (k / (dim // 2 - 1)) for k in range(dim // 2)]
f = torch.tensor(f, device=coords.device).double()
phases = torch.cat([coords[..., :1].double() * f, coords[..., 1:].double() * f], dim=-1)
phases = math.pi * phases
return torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)""", [
        ("math.pi * ", "", "pi is missing"),
        ("math.pi * ", "2 * math.pi * ", "2 pi f x"),
        ("math.pi * phases", "(math.pi * phases).to(coords.dtype)", "feature"),
        (", device=coords.device", "", "with device=coords.device"),
        ("return torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)",
         "out = torch.zeros(*coords.shape[:-1], 2 * dim)\nout[..., :dim] = phases.cos()\n"
         "out[..., dim:] = phases.sin()\nreturn out", "with device=coords.device"),
        ("dim=-1)\nphases = math", "dim=-1).cpu()\nphases = math", ""),
        ("return torch.cat([torch.cos(phases), torch.sin(phases)], dim=-1)",
         "return [phases.cos(), phases.sin()]", "expected shape (3, 12), yours [(3, 6), (3, 6)]"),
        (".double()", ".float()", "")]),
    "vit.sincos_pos_embed": ("""
if dim % 4:
    raise ValueError(dim)
n, (h, w) = dim // 4, grid
angles = torch.arange(max(grid))[:, None] * torch.exp(-math.log(10000) / n * torch.arange(n))
table = torch.cat([angles.sin(), angles.cos()], dim=1)                 # of each row or column
table = torch.cat([table[:w].repeat(h, 1), table[:h].repeat_interleave(w, 0)], dim=1)
return torch.cat([torch.zeros(1, dim), table])[None]""", [
        ("table])[None]", "table])[None].double()", "dtype torch.float32, yours torch.float64"),
        ("table[:w].repeat(h, 1), table[:h].repeat_interleave(w, 0)",
         "table[:h].repeat_interleave(w, 0), table[:w].repeat(h, 1)", "should encode the column"),
        ("(10000) / n", "(10000) / (n - 1)", "i ends at n-1"),
        ("raise ValueError(dim)", "pass", "expected a ValueError")]),
    "mae.MAE.add_mask_tokens": ("""
ids = torch.cat([torch.zeros(len(latent), 1).long(), ids_keep + 1, ids_mask + 1], dim=1)
masked = self.mask_token.repeat(len(latent), ids_mask.shape[1], 1)
pos = torch.stack([self.decoder_pos_embed[0][i] for i in ids])
return torch.cat([self.decoder_embed(latent), masked], dim=1) + pos""", [
        (" + pos", "", "left out"),
        ("ids_keep + 1, ids_mask + 1", "ids_keep, ids_mask", "one before it"),
        ("masked =", "self.mask_token.data.zero_()\nmasked =", "mask_token of the model in place"),
        ("self.decoder_embed(latent)", "self.decoder_embed(latent).detach()",
         "gradient of decoder_embed"),
        ("self.decoder_embed(latent)", "self.decoder_embed(latent.detach())", "argument latent"),
        ("self.decoder_embed(latent)", "self.decoder_embed(latent.clone())", "")]),
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
        ("mask.gather(1, ids)", "mask", "the mask is in raster order"),
        ("torch.rand(len(images), L)", "torch.arange(L).expand(len(images), L)", "the same mask"),
        ("torch.rand(len(images), L)", "torch.rand(1, L).expand(len(images), L)",
         "all images have the same mask"),
        ("L = self.", "self.norm_pix_loss = False\nL = self.", "it modifies norm_pix_loss of the"),
        ("L = self.", "self.eval()\nL = self.", "it modifies training of the model"),
        ("L = self.", "torch.set_grad_enabled(False)\nL = self.", "has a gradient: expected True"),
        ('{"loss": loss.detach()}', '{"loss": loss}', "gradient: return loss.detach()"),
        ('{"loss": loss.detach()}', '{"loss": loss.item()}',
         "metrics loss is a Python number: return a detached tensor, loss.detach()"),
        ("return loss,", "return loss.detach(),", "  loss has a gradient: expected True"),
        ("return loss, {", "return {", "expected shape [number, {loss: number}]"),
        ('loss, {"loss": loss.detach()}', '{"loss": loss.detach()}, loss', "in another order"),
        ("pred - target", "pred.double() - target", "loss: expected dtype torch.float32, yours"),
        ("self.encode(images, ids_keep)", "self.encode(images=images, ids_keep=ids_keep)", ""),
        ("L = self.encoder.num_patches", "if len(images) > 1:                 # image by image\n"
         "    parts = [self.forward(images[i:i + 1], None if noise is None else noise[i:i + 1])\n"
         "             for i in range(len(images))]\n    loss = sum(loss for loss, _ in parts)"
         " / len(images)\n    return loss, {'loss': loss.detach()}\nL = self.encoder.num_patches",
         ""),
        ("pred - target", "pred.double().float() - target", "")]),
    "vit.Attention.forward": ("""
q, k, v = torch.split(self.qkv(x), x.shape[2], dim=2)""" + ATTEND, [
        ("q, k, v =", "k, q, v =", "mixed up"), ("q, k, v =", "v, k, q =", "expected"),
        ("self.qkv(x)", "self.qkv(x.detach())", "the gradient of its argument x"),
        *WRONG_ATTENTION]),
    "crossmae.CrossAttention.forward": ("""
q, (k, v) = self.q(x), self.kv(y).split(self.q.out_features, dim=2)""" + ATTEND, [
        ("(k, v) =", "(v, k) =", "exchanged"), ("self.kv(y)", "self.kv(x)", "should come from y"),
        ("self.kv(y)", "self.kv(y.detach())", "the gradient of its argument y"),
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
        ("W[k, j]", "W[0, j]", "use one row of weights"),
        ("self.dec_norms[k](t)", "t", "not normalised"),
        ("len(self.map_proj) else maps[i]", "len(self.map_proj) else maps[j]", "expected"),
        ("self.map_proj[j]", "self.map_proj[i]", "IndexError"),
        ("in self.decoder_blocks", "in self.encoder.blocks", "[4 x (2, 3, 8)], yours [(2, 3, 8), "),
        ("W, results =", "self.map_ids.append(self.map_ids.pop(0))\nW, results =",
         "it modifies map_ids of the model"),
        ("return results", "return results[::-1]", "in another order"),
        ("return results", "return torch.stack(results)", "")]),
    "finetune.layer_decay_groups": ("""
depth, groups = len(model.encoder.blocks), []
for name, p in model.named_parameters():
    if p.requires_grad:
        i = depth + 1
        if name.startswith("encoder.blocks."):
            i = 1 + int(name.split(".")[2])
        elif name.startswith("encoder.") and "norm" not in name:
            i = 0
        decays = name.endswith("weight") and p.ndim > 1
        groups.append(dict(params=[p], weight_decay=weight_decay if decays else 0,
                           lr_factor=layer_decay ** (depth + 1 - i)))
return groups""", [
        ("depth + 1 - i", "depth + 2 - i", "off by one"),
        ("depth + 1 - i", "i", "the head has the lowest learning rate"),
        ('"norm" not in name', '"norm" not in name and "ex" not in name', "extra_tokens lr_factor"),
        ("if p.requires_grad:", "if True:", "weight, encoder.blocks.0.attn.qkv.bias and 25 more"),
        ("if p.requires_grad:", 'if p.requires_grad and "cls" not in name:', "missing: encoder"),
        ("lr_factor=", "scale=", "KeyError: 'lr_factor'"),
        ("return groups", "return groups + groups[:1]", "is in two groups"),
        ("return groups", "return dict(enumerate(groups))", "a list of dicts"),
        ("params=[p]", "params=[name]", "params has a str that is not a parameter"),
        ("params=[p]", "params={p}", "params is a set"),
        ("params=[p]", "params=[p.data]", "not a parameter of the model"),
        ("weight_decay if decays", "0.05 if decays", "expected 0.1, yours 0.05"),
        ("layer_decay ** ", "0.5 ** ", "lr_factor: expected"),
        ("if p.requires_grad:", "p.requires_grad_()\n    if True:", "requires_grad of the model"),
        ("params=[p]", "params=p", ""),
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
        ("not self.relu_around_m and ", "False and ", "next to M"),
        ("not self.relu_around_m and ", "", "relu_around_m is ignored"),
        ("x, M)", "x, M.detach())", "the gradient of its argument M"),
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
        ("return layers", "return [W for W, bias in layers]", "expected shape"),
        ("tokens.unbind", "tokens.detach().unbind", "the gradient of its argument tokens"),
        ("self.to_weights[str(i)](columns", "self.to_weights[str(i)][1](columns", "LayerNorm")]),
    "imae.IMAE.forward": ("""
B, L = len(images), self.encoder.num_patches
partners = torch.cat([images[-1:], images[:-1]]) if partners is None else partners
alpha = self.draw_alpha(images.device) if alpha is None else alpha
mix, xs = self.mix_images(images, partners, alpha)
noise = torch.rand(B, L) if noise is None else noise
ids_keep, ids_mask, _ = self.encoder.mask(images, noise, self.mask_ratio)
zs = self.encode(mix, ids_keep)
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
        ("F.mse_loss(z, self.", "2 * F.mse_loss(z, self.", "metrics distill: expected"),
        ("zs, xs)", "zs, xs[::-1])", "paired in the wrong order"),
        ("self.draw_alpha(images.device)", "self.alpha", "draw_alpha() does not draw it"),
        ("torch.rand(B, L)", "torch.rand(1, L).expand(B, L)", "all images have the same mask"),
        ("B, L =", "torch.rand(3)\nB, L =", ""),
        ("B, L =", "self.norm_pix_loss = False\nB, L =", "it modifies norm_pix_loss of the model"),
        ("F.mse_loss(pred, target)", "(pred - target).flatten().square().sum() / target.numel()",
         "")]),
}


def solve(monkeypatch, name, body):
    """Make `body` that of the function `name`, with what its module has imported, math and F."""
    owner, last = find(name)
    head = f"def {last}{inspect.signature(getattr(owner, last))}:"
    known = {**vars(sys.modules[name.split(".")[0]]), "math": math, "F": F}
    made = {}
    exec(head + body.replace("\n", "\n    "), known, made)
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
    assert check(name) == f"{name} is not implemented yet"


@pytest.mark.parametrize("name", EXERCISES)
def test_the_hint_names_each_slip(name, monkeypatch):
    item, (owner, last) = EXERCISES[name], find(name)
    assert len(item.slips) >= 3
    for slip, hint in item.slips.items():
        monkeypatch.setattr(owner, last, lambda *args, **more: item.reference(
            *args, **more, slip=slip))
        assert hint in check(name), slip


def test_a_check_ends(monkeypatch, capsys):
    monkeypatch.setattr(exercise, "LIMIT", 1)
    solve(monkeypatch, "vit.patchify", "\nwhile True:\n    images = images + 1")
    solve(monkeypatch, "vit.masking", "\n__import__('os')._exit(3)")
    assert main(["--check", "vit.patchify", "vit.masking"]) == 1
    said = capsys.readouterr().out
    assert "vit.patchify takes too long" in said and "SystemExit: 3" in said


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Return git(words), which runs in a copy of this project's sources, all committed."""
    if not shutil.which("git"):
        pytest.skip("git is missing")
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


def test_a_body_is_removed_and_comes_back(repository, tmp_path, capsys, refused):
    """Nothing is removed that git could not bring back."""
    path, before = tmp_path / "mae.py", (tmp_path / "mae.py").read_bytes()
    assert main(["mae.MAE.forward", "vit.Attention.forward"]) == 0
    assert "git checkout HEAD -- mae.py vit.py" in capsys.readouterr().out
    after = path.read_text(encoding="utf-8")
    start = after.index("        their predictions, a float32", after.index("def forward"))
    assert after[start:].splitlines()[1:4] == [
        "        # see Sec. 3, item 4, Table 1d, item 3",
        '        raise NotImplementedError("exercise: mae.MAE.forward")', ""]
    refused(main, ["mae.MAE.forward"], "mae.MAE.forward is already removed: write it in mae.py, "
            "then --check mae.MAE.forward")

    taken = 'raise NotImplementedError("exercise: mae.MAE.forward")'
    path.write_text(after.replace(taken, f"x = 1\n        {taken}"), encoding="utf-8")
    refused(main, ["mae.MAE.forward"], "mae.MAE.forward has uncommitted changes. To keep them: git "
            "commit -m mine", "To discard all changes of the file: git checkout HEAD -- mae.py")
    assert main(["mae.MAE.add_mask_tokens"]) == 0          # another one, which git has
    assert "x = 1\n" in path.read_text(encoding="utf-8")
    repository("checkout", "HEAD", "--", "mae.py", "vit.py")
    assert path.read_bytes() == before
    shutil.rmtree(tmp_path / ".git")
    refused(main, ["vit.patchify"], "git does not track vit.py")
    assert path.read_bytes() == before


@pytest.mark.parametrize("has_git", [True, False])
def test_handout(repository, tmp_path, has_git):
    """A copy has no solution: neither in a body, nor in a file or change that is not committed."""
    (tmp_path / "solutions.py").write_text("mine")
    if not has_git:                                        # then it has all files
        shutil.rmtree(tmp_path / ".git")
    folder, names = tmp_path / "class", [name for name in EXERCISES if "cross" not in name]
    assert main(["--handout", str(folder), *names]) == 0
    assert (folder / "solutions.py").exists() != has_git
    page = (folder / "TASKS.md").read_text(encoding="utf-8")
    assert all(f"--check {name}`" in page for name in names)
    text, original = ("".join(file.read_text(encoding="utf-8") for file in place.glob("*.py"))
                      for place in (folder, ROOT))
    for solution in ("phase.cos()", "noise.argsort", "x[:, 1:] + pos[ids_keep]",
                     "U.repeat(", "var_mean(", "the large encoder sees", "w_i.float"):
        assert solution not in text and solution in original
    assert not (folder / "tests/test_exercise.py").exists()


def test_a_removed_body_ends_a_check_in_words(capsys, monkeypatch):
    solve(monkeypatch, "vit.masking", "\nraise NotImplementedError('exercise: vit.masking')")
    assert main(["--check"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{name} is " + ("not implemented yet" if name == "vit.masking" else "right")
                    for name in EXERCISES]
