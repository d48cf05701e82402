"""Tests of every method in train.METHODS, including your own: its interface, that it learns, that
masked pixels do not leak. Some are for the five methods only: recipes, that each option does
something. (What is special to one method has a file of its own.)"""

import contextlib
import copy
import math
import warnings
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import (DataDependentOutputException,
                                           DynamicOutputShapeException, FakeTensorMode)

import finetune
import train
from tests.lib.models import load_encoder, load_model
from tests.unit.conftest import HERE, TINY, same, settings, stopping_after_two, together
from tests.unit.golden import in_loss_space
from train import IMAE, METHODS
from vit import (InputError, Method, ViT, gather_patches, mask_noise, normalize,
                 normalize_patches, patchify, unpatchify)

SMALL = dict(img_size=(16, 24), patch_size=4, in_chans=3, dim=16, depth=2, heads=2,
             mask_ratio=0.75)
DECODER = dict(decoder_dim=16, decoder_depth=2, decoder_heads=2)
TEACHER = dict(dim=12, depth=1, heads=2)
BASE = defaultdict(dict, {  # arguments that keep the models small
    "mae": DECODER,
    "crossmae": DECODER,
    "hypermae": dict(n_weight_tokens=3, feat2w_depth=2, mlp_depth=4, hidden_dim=12, pe_dim=8,
                     pe_sigma=4.0),
    "minr": dict(hidden_dim=8, groups=4, ff_dim=4, ff_sigma=4.0, mlp_depth=4),
    "imae": DECODER,
})
DECODER_OPTIONS = [dict(norm_pix_loss=False), dict(decoder_dim=32), dict(decoder_depth=1),
                   dict(decoder_heads=4)]
OPTIONS = {  # every one of a method's own arguments, and some of the encoder's
    "mae": DECODER_OPTIONS,
    "crossmae": [*DECODER_OPTIONS, dict(prediction_ratio=0.25), dict(feature_maps="last"),
                 dict(feature_maps=(1,)), dict(include_input=False), dict(self_attention=True),
                 dict(softmax_weights=True), dict(project_maps=True)],
    "hypermae": [dict(norm_pix_loss=False), dict(n_weight_tokens=5), dict(feat2w_depth=1),
                 dict(shared_blocks=1), dict(shared_blocks=2), dict(mlp_depth=5),
                 dict(hidden_dim=8), dict(modulated_layer=0), dict(modulated_layer=2),
                 dict(pe_dim=12), dict(pe_sigma=2.0), dict(out_bias=0.0), dict(relu_around_m=True),
                 dict(relu_around_m=True, modulated_layer=0), dict(loss_on="all")],
    "minr": [dict(hypernetwork="transinr"), dict(modulated_layers=(0, 2)), dict(mlp_depth=3),
             dict(hypernetwork="transinr", modulated_layers=(2,)), dict(hidden_dim=12),
             dict(groups=3), dict(ff_dim=8), dict(ff_sigma=2.0), dict(out_bias=0.0),
             dict(loss_on="masked"), dict(coord_jitter=True), dict(pixel_fraction=0.3),
             dict(encode_visible_only=True)],
    "imae": [dict(norm_pix_loss=True), *DECODER_OPTIONS[1:], dict(branches=1), dict(beta=0.2),
             dict(alpha=0.3), dict(teacher=TEACHER), dict(teacher=TEACHER, distill_weight=0.5)],
}
SHARED = [{}, dict(mask_ratio=0.95), dict(in_chans=5, patch_size=(4, 8))]     # 1 of 24 is visible
LARGER = {"hypermae": dict(hidden_dim=64, pe_dim=32),      # to learn two images of noise
          "minr": dict(hidden_dim=128, groups=64, ff_dim=64, ff_sigma=16.0)}
for name, cls in METHODS.items():
    if name not in OPTIONS:                                # your own: sizes like its template's
        own, _ = train.arguments_of(cls)
        BASE[name] = {k: v for k, v in cls.small_config.items() if k in own}
        for other in OPTIONS:
            if train.arguments_of(METHODS[other])[0].keys() <= own.keys():
                BASE[name], LARGER[name] = BASE[other], LARGER.get(other, {})
MASKED = [name for name in METHODS if "mask_ratio" in train.arguments_of(METHODS[name])[0]]
CASES = [(name, options) for name in METHODS for options in SHARED + OPTIONS.get(name, [])
         if name in MASKED or "mask_ratio" not in options]
PIXELS = [name for name in METHODS if METHODS[name].reconstruct]
FORKS = [name for name in METHODS if name not in OPTIONS]


def build_arguments(name, **options):
    """Return a small model's arguments."""
    arguments = {**SMALL, **BASE[name], **options}
    if name not in MASKED:                                 # contrastive learning, for example
        del arguments["mask_ratio"]
    return arguments


def build(name, **options):
    torch.manual_seed(0)
    return METHODS[name](**build_arguments(name, **options))


def images_and_noise(B=3, C=3, L=24):
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, C, 16, 24, generator=g), torch.rand(B, L, generator=g)


def inputs_of(model):
    return images_and_noise(C=model.encoder.in_chans, L=model.encoder.num_patches)


def arguments(model, images, noise, alpha=torch.tensor(0.3)):
    """Return forward's arguments for a batch: for i-MAE, each image's predecessor is its partner,
    and alpha is fixed; in other methods, other crops of an image are mirrored."""
    if isinstance(model, IMAE):
        return [images, noise, images.roll(1, 0), alpha]
    return [images, noise, *[images.flip(3)] * (model.crops - 1)]


def loss_of(model, images, noise):
    """Return the loss of a batch."""
    return model(*arguments(model, images, noise))[0]


GROUPS = ["--batch_size", "32"]                            # pieces of 16: groups of 8 divide them
methods = pytest.mark.parametrize("name", METHODS)
cases = pytest.mark.parametrize("name, options", CASES)


@cases
def test_every_trainable_parameter_gets_a_gradient(name, options):
    model = build(name, **options)
    loss, metrics = model(inputs_of(model)[0])
    loss.backward()
    assert loss.dtype == torch.float32 and loss.ndim == 0
    assert not any(value.requires_grad or value.ndim for value in metrics.values()), (
        "metrics are 0-dim and detached")
    assert metrics["loss"] == loss
    dead = [n for n, p in model.named_parameters() if p.requires_grad and (
        p.grad is None or not p.grad.any() or not p.grad.isfinite().all())]
    assert dead == []
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    wrong = sorted(n for n in frozen if not n.startswith("teacher.")
                   and not n.endswith("pos_embed"))
    assert not wrong, f"a frozen copy must be called teacher; frozen: {wrong[0]}, ..."


@pytest.mark.parametrize("name, options", [
    *((name, {}) for name in METHODS), ("mae", dict(norm_pix_loss=False)),
    ("crossmae", dict(feature_maps="last", norm_pix_loss=False)),
    ("crossmae", dict(prediction_ratio=0.25, include_input=False, self_attention=True,
                      softmax_weights=True, project_maps=True)),
    ("hypermae", dict(norm_pix_loss=False, shared_blocks=1, relu_around_m=True, loss_on="all")),
    ("minr", dict(hypernetwork="transinr", loss_on="masked", coord_jitter=True, pixel_fraction=0.3,
                  encode_visible_only=True)),
    ("imae", dict(norm_pix_loss=True, teacher=TEACHER, branches=1))])
def test_on_a_gpu_that_does_not_exist(name, options):
    """On fake tensors, everything is on one device, and nothing waits for a value."""
    model = build(name, **options)
    inputs = arguments(model, *inputs_of(model), alpha=torch.rand(3))
    # not state_dict(), which lacks buffers that are not saved
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with FakeTensorMode() as mode:
        state = {k: mode.from_tensor(v).cuda() for k, v in state.items()}
        inputs = tuple(mode.from_tensor(x).cuda() for x in inputs)
        try:
            loss, metrics = torch.func.functional_call(model, state, inputs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            pytest.fail(f"forward needs a tensor's value, e.g. for .item(), int() or x[x > 0], and "
                        f"would wait for the GPU in each step: see rule 4 in FORKS.md ({error})")
        assert all(x.is_cuda for x in (loss, *metrics.values()))


def test_a_step_waits_for_nothing():
    """A training step runs on the device "meta", whose tensors have no values."""
    model, inputs = build("mae").to("meta"), [x[:2].to("meta") for x in images_and_noise()]
    train.train_step(settings(accum=2, clip_grad=1), HERE, model, model,
                     torch.optim.AdamW(model.parameters()),
                     torch.amp.GradScaler("cpu", enabled=False), inputs, 0)
    with pytest.raises(RuntimeError, match="item"):
        model.encoder.cls_token.sum().item()


def needs_a_mask_from_noise(model, images, noise):
    """Skip the test if the model chooses its mask from the images, in reconstruct or in forward. If
    it does not, but noise does not decide the mask either, fail."""
    mask, used = model.encoder.mask, []

    def recorded(*inputs):
        used.append(mask(*inputs))
        return used[-1]
    model.encoder.mask = recorded
    detail = images * model.encoder.pixels_of(noise.flip(0))
    for name in ("reconstruct", "forward"):
        masks = []
        for x in (images, detail, images.neg()):
            result = getattr(model, name)(x, noise)
            masks.append(result[1] if name == "reconstruct" else used[-1][2])
        if not torch.equal(masks[0], mask(images, noise, model.mask_ratio)[2]):
            assert not torch.equal(masks[0], masks[1]) or not torch.equal(masks[0], masks[2]), (
                f"the mask of {name} depends neither on noise, as vit.ViT.mask uses it, nor on the "
                f"images")
            pytest.skip("the mask depends on the images, so this test, which sets it, cannot apply")
    del model.encoder.mask


@pytest.mark.parametrize("name", PIXELS)
def test_noise_and_masks(name):
    """Noise None draws a new mask each time. Noise only decides which patches are visible, so a
    bool mask (True = masked) of the same patches gives the same results. A bool mask can have any
    number of visible patches, the same in all rows; zeros and ones of another dtype are noise."""
    model, (images, noise), losses = build(name), images_and_noise(), []
    needs_a_mask_from_noise(model, images, noise)
    for draw in (lambda: None, lambda: mask_noise("random", 3, model.encoder.grid)):
        torch.manual_seed(2)
        losses.append(loss_of(model, images, draw()))
    assert losses[0] == losses[1], "with noise None, draw it as vit.ViT.mask does"
    assert model(images)[0] != model(images)[0], "with noise None, each call needs a new mask"

    loss, (decoded, mask) = loss_of(model, images, noise), model.reconstruct(images, noise)
    for equivalent in (mask.bool(), mask):
        assert torch.allclose(loss, loss_of(model, images, equivalent), atol=1e-6), (
            "the loss depends on more than which patches noise leaves visible")
        again = model.reconstruct(images, equivalent)
        assert torch.allclose(decoded, again[0], atol=1e-5) and torch.equal(mask, again[1]), (
            "reconstruct depends on more than which patches noise leaves visible")
    wrong = mask.clone()
    wrong[2, wrong[2].nonzero()[-1]] = 0                   # one more is visible
    for call in (model, model.reconstruct):
        with pytest.raises(ValueError, match="equally many visible patches: .6, 7. of 24"):
            call(images, wrong.bool())
        call(images, wrong)
    assert model.reconstruct(images, wrong)[1].sum(1).tolist() == [18] * 3, "18 of 24 are masked"
    for n in range(1, 24):
        own = noise.argsort(1).argsort(1) < n              # the n patches with the lowest noise
        assert torch.equal(model.reconstruct(images, own)[1], own.float())
    assert model.reconstruct(images, mask_ratio=0.5)[1].sum(1).tolist() == [12] * 3, (
        "reconstruct must use its argument mask_ratio")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_argument_is_tested(name):
    tried = {argument for options in SHARED + OPTIONS[name] for argument in options}
    missing = METHODS[name].__init__.__kwdefaults__.keys() - tried
    assert not missing, f"OPTIONS[{name!r}] has no values of {missing}"


@pytest.mark.parametrize("name, options", [(n, o) for n, o in CASES if o and "in_chans" not in o])
def test_each_option_changes_what_it_names(name, options):
    """The loss differs although all parameters that both models have are equal."""
    base, model = build(name), build(name, **options)
    shapes, own_shapes = ({k: v.shape for k, v in m.state_dict().items()} for m in (base, model))
    images, noise = images_and_noise()
    model.load_state_dict({k: v for k, v in base.state_dict().items()
                           if own_shapes.get(k) == shapes[k]}, strict=False)
    losses = []
    for m in (base, model):
        torch.manual_seed(0)                               # seeds the model's own random draws
        losses.append(m(images, noise)[0])
    assert (losses[0] - losses[1]).abs() > 1e-6, f"{options} changes nothing"


def three_steps(name, flipped=False, **options):
    """Return the losses of three training steps, then numbers that are other ones if a prediction,
    a parameter or a buffer is."""
    model, (images, noise), seen = build(name, **options), images_and_noise(4), []
    noise = noise.flip(1) if flipped else noise
    crops = [(50 * images + 128).clamp(0, 255)[:, [c % 3 for c in range(len(model.mean))]]]
    optimizer = torch.optim.SGD(model.parameter_groups(settings()), lr=0.01)
    for step in range(3):
        torch.manual_seed(step)                            # what the model draws for itself
        model.before_step(step / 3, optimizer)
        batch = model.draw_batch(crops * model.crops, torch.zeros(4, dtype=torch.long), noise)
        loss = model(*model.model_inputs(*batch))[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.after_step((step + 1) / 3)
        seen.append(loss.item())
    if model.reconstruct:
        seen.append(model.reconstruct(normalize(crops[0], model), noise)[0].sum().item())
    return seen + [x.double().norm().item() for x in model.state_dict().values()]


def others(argument, value):
    """Return other values of an argument: those in OPTIONS, and near ones of numbers and bools."""
    listed = [o[argument] for each in OPTIONS.values() for o in each if {*o} == {argument}]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        listed += [value / 2 if isinstance(value, float) else 2 * value, value + 1]
    return [x for x in listed if x != value]


@pytest.mark.parametrize("name, argument", [
    (name, argument) for name in FORKS for argument in (*train.arguments_of(METHODS[name])[0],
                                                        "mask")])
def test_your_arguments_do_something(name, argument):
    """Another value of an argument changes the losses or, of one that no method here has, at least
    the prediction or the weights."""
    cls, usual, tried = METHODS[name], three_steps(name), []
    known = {"mask", *train.arguments_of(type("All", (cls,), dict(unused=())))[0]}
    assert {*cls.unused} <= known, f"`unused` has {sorted({*cls.unused} - known)}: no arguments"
    if argument == "mask":
        tried = [three_steps(name, flipped=True)] if "mask" not in cls.unused else []
    else:
        value = {**train.arguments_of(cls)[0], **build_arguments(name)}[argument]
        for other in others(argument, value):
            with contextlib.suppress(InputError):          # not every value suits the model
                tried.append(three_steps(name, **{argument: other}))
    n = 3 if argument == "mask" or any(argument in o for x in OPTIONS.values() for o in x) else None
    assert not tried or any(x[:n] != usual[:n] for x in tried), (
        f"--{argument} does nothing in {cls.__name__}: add it to `unused`, see FORKS.md")


def test_arguments_that_do_nothing_are_found(monkeypatch):
    """(That is, test_your_arguments_do_something can fail.)"""
    class Fork(METHODS["mae"]):
        def __init__(self, *args, idle=0.5, busy=0.5, late=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.busy, self.late, self.factor = busy, late, 1.0

        def target(self, images, ids):
            return self.busy * self.factor * gather_patches(patchify(images, 4), ids)

        def after_step(self, progress):
            self.factor = self.late * progress
    monkeypatch.setitem(METHODS, "fork", Fork)
    monkeypatch.setitem(BASE, "fork", DECODER)
    monkeypatch.setattr("tests.unit.test_methods.MASKED", [*MASKED, "fork"])
    check = test_your_arguments_do_something
    for argument in ("busy", "late", "mask_ratio", "decoder_dim", "mask"):
        check("fork", argument)
    for argument in ("idle", "norm_pix_loss"):
        with pytest.raises(AssertionError, match=f"--{argument} does nothing in Fork"):
            check("fork", argument)
    Fork.unused = ("idle", "norm_pix_loss")
    assert not {*Fork.unused} & train.arguments_of(Fork)[0].keys()
    Fork.unused = ("idel",)
    with pytest.raises(AssertionError, match="`unused` has .'idel'.: no arguments"):
        check("fork", "busy")


@pytest.mark.parametrize("name, options", [case for case in CASES if case[0] in PIXELS])
def test_no_leak_from_masked_pixels(name, options):
    """Predictions depend on visible pixels only, with leak_free: otherwise, norm_pix_loss uses the
    true patch's mean and variance. Visible patches are also predicted."""
    model = build(name, **options)
    images, noise = inputs_of(model)
    needs_a_mask_from_noise(model, images, noise)
    masked = model.encoder.pixels_of(model.encoder.mask(images, noise, model.mask_ratio)[2]).bool()
    others = images, images + masked * torch.randn(images.shape), images + ~masked
    unchanged, masked_changed, visible_changed = (
        model.reconstruct(x, noise, leak_free=True)[0] for x in others)
    assert torch.equal(unchanged, masked_changed), (
        "masked pixels change the prediction, or noise does not decide what is masked")
    assert not torch.allclose(unchanged, visible_changed), "visible pixels do not change it"
    assert unchanged.shape == images.shape, "reconstruct returns images of another shape"
    assert (unchanged - images)[(~masked).expand_as(images)].abs().mean() > 0.1, (
        "visible patches are copied; reconstruct must predict them")


@pytest.mark.parametrize("name", [name for name in MASKED if name not in PIXELS])
def test_the_student_sees_only_visible_patches(name):
    """Without pixels to compare: masked patches that the encoder embeds do not change the loss."""
    model, (images, noise), seen = build(name), images_and_noise(), []

    def watch(_, inputs):
        seen.append(inputs[0].detach().requires_grad_(torch.is_grad_enabled()))
        return seen[-1]
    model.encoder.patch_embed.register_forward_pre_hook(watch)
    loss_of(model, images, noise).backward()
    masked = model.encoder.mask(images, noise, model.mask_ratio)[2].bool()     # (B, L)
    patches = patchify(images, 4)
    for x in seen:                                         # not views, and not only visible patches
        if x.shape == patches.shape and torch.equal(x, patches) and x.grad is not None:
            assert not x.grad[masked].any(), "the student sees masked patches"


@pytest.mark.parametrize("name", [
    name for name in PIXELS if name not in ("crossmae", "hypermae", "minr")])
def test_each_prediction_is_in_its_place(name):
    """A patch changes its own prediction most, unless, for example, the class token is not dropped.
    The three methods left out have no tokens of visible patches in the decoder: there a patch
    changes all predictions alike. (For them see test_loss_is_the_mean_over_patches.)"""
    model, (images, noise), changes = build(name), images_and_noise(24), []
    needs_a_mask_from_noise(model, images, noise)

    def predict(bump):
        return patchify(model.reconstruct(images + bump, noise, leak_free=True)[0], 4)
    for ids in model.encoder.mask(images, noise, 0.75)[0].T:           # a patch of each image, (B,)
        bump = unpatchify(F.one_hot(ids, 24)[..., None].expand(-1, -1, 48), 4, (4, 6))
        change = (predict(0.1 * bump) - predict(0)).square().mean(2).sqrt()      # (B, L)
        changes.append(change.gather(1, (ids[:, None] + torch.arange(24)) % 24))
    own, *others = torch.cat(changes).mean(0)              # of the same patch, of the next ones
    assert max(others) < 1.5 * own, "predictions belong to other patches"


@pytest.mark.parametrize("name, options", [
    *[(n, dict(norm_pix_loss=norm)) for n in ("mae", "crossmae", "hypermae") for norm in (0, 1)],
    ("crossmae", dict(self_attention=True)), ("hypermae", dict(loss_on="all")),
    *[("minr", dict(loss_on=where, hypernetwork=kind)) for where in ("all", "masked")
      for kind in ("ginr", "transinr")]])
def test_loss_is_the_mean_over_patches(name, options):
    """The loss is the mean over masked patches or, with loss_on, over all patches."""
    model, (images, noise) = build(name, **options), images_and_noise()
    decoded, mask = model.reconstruct(images, noise)
    target, pred = in_loss_space(model, images, decoded)
    error = pred - target
    if options.get("loss_on") != "all":
        error = error[mask.bool()]
    assert torch.allclose(model(images, noise)[0], error.square().mean(), atol=1e-5)


@pytest.mark.parametrize("name", [
    n for n in OPTIONS if "norm_pix_loss" in METHODS[n].__init__.__kwdefaults__])
def test_leak_free(name):
    """A normalised prediction gets the mean and variance of the true patch or, if leak_free, of all
    visible pixels."""
    images, noise = images_and_noise()
    for normalized in (False, True):
        model = build(name, norm_pix_loss=normalized)
        (leaky, mask), (free, _) = (model.reconstruct(images, noise, leak_free=f) for f in (0, 1))
        free, (_, wanted) = patchify(free, 4), in_loss_space(model, images, leaky)
        if normalized:
            visible = patchify(images, 4)[mask == 0].view(3, 1, -1)
            _, mean, std = normalize_patches(visible)
            free = (free - mean) / std
        assert torch.allclose(free, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["mae", *FORKS])
def test_one_batch_overfits(name):
    """(The gradients of the others are those of the released codes: test_golden.py.)"""
    model = build(name, dim=32, **LARGER.get(name, {}))
    images, noise = images_and_noise(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first = loss_of(model, images, noise).item()
    for _ in range(300):
        loss = loss_of(model, images, noise)
        if loss < 0.4 * first:                             # an L1 loss also gets there
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pytest.fail(f"the loss of one batch fell only from {first:.2f} to {loss:.2f}: forward is "
                f"wrong, or the loss is one that falls slowly (L1, say) or not to 0 (cross-entropy "
                f"with soft targets: take KL), or the sizes do not suit (BASE and LARGER here)")


@pytest.mark.parametrize("name, options", [
    *[(n, {}) for n in PIXELS], ("mae", DECODER_OPTIONS[0]), ("imae", dict(teacher=TEACHER))])
def test_a_call_changes_nothing(name, options):
    """A call changes no buffers and no attributes. The loss is float32 under autocast and, for the
    five methods, even if the model is in bfloat16."""
    model, (images, noise) = build(name, **options).eval(), images_and_noise()
    state, names = copy.deepcopy(model.state_dict()), {*vars(model)}
    loss = loss_of(model, images, noise)
    model.reconstruct(images)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(model, images, noise)
    assert rounded.dtype == torch.float32 and abs(loss - rounded) < 0.05, (
        f"under autocast, the loss must be float32 and about {loss:.3f}; it is {rounded}")
    assert {*vars(model)} == names, "forward or reconstruct adds an attribute to the model"
    assert torch.equal(loss, loss_of(model, images, noise)), "the same call gives another loss"
    assert same(model.state_dict(), state), "forward or reconstruct changes a parameter or buffer"
    decoded = model.reconstruct(images, noise)[0]
    assert name not in OPTIONS or not decoded.requires_grad
    if name in OPTIONS:
        model, images = model.bfloat16(), images.bfloat16()
        rounded, again = loss_of(model, images, noise), model.reconstruct(images, noise)[0]
        assert rounded.dtype == again.dtype == torch.float32 and abs(loss - rounded) < 0.1
        assert (decoded - again).abs().mean() < 0.1


IMPOSSIBLE = {  # the message names the first one
    "crossmae": [dict(prediction_ratio=0.9), dict(prediction_ratio=0.0), dict(feature_maps=(0,)),
                 dict(feature_maps="last", softmax_weights=True), dict(decoder_heads=0),
                 dict(project_maps=True, feature_maps="last"), dict(decoder_depth=0)],
    "hypermae": [dict(modulated_layer=3), dict(feat2w_depth=0), dict(pe_dim=7),
                 dict(shared_blocks=3, depth=4), dict(n_weight_tokens=0), dict(loss_on="some")],
    "minr": [dict(hypernetwork="inr"), dict(pixel_fraction=0.0), dict(ff_dim=3),
             dict(modulated_layers=(4,)), dict(groups=3, hypernetwork="transinr"), dict(groups=0)],
    "imae": [dict(branches=3), dict(beta=0.0), dict(alpha=1.1), dict(distill_weight=1.0)],
}


@pytest.mark.parametrize("name, options", [
    *[(n, options) for n in IMPOSSIBLE for options in IMPOSSIBLE[n]],
    *[(n, options) for n in METHODS
      for options in (dict(heads=3), dict(heads=0), dict(img_size=30), dict(mask_ratio=0.99))
      if n in MASKED or "mask_ratio" not in options]])
def test_impossible_options(name, options):
    """The constructor refuses impossible options, the first call an impossible mask ratio."""
    argument = next(iter(options)).removeprefix("decoder_")
    with pytest.raises(InputError, match=argument):
        build(name, **options)(images_and_noise()[0])


def flags(options):
    """Return options as command-line arguments."""
    words = [([f"--{k}" if v else f"--no-{k}"] if isinstance(v, bool) else [f"--{k}", str(v)])
             for k, v in options.items()]
    return [word for pair in words for word in pair]


def data_for(name, folder):
    """Return --data for a method: the folder, or a file of tensors unless it takes RGB images."""
    cls = METHODS[name]
    if len(cls.mean) == 3:
        return str(folder)
    *parts, _ = train.open_data(str(folder), HERE)
    ids = [c % 3 for c in range(len(cls.mean))]
    torch.save({part: (data.images[:, ids], data.labels, data.classes)
                for part, data in zip(("train", "val"), parts)}, "images.pt")
    return "images.pt"


@methods
def test_from_the_command_line_to_a_classifier(name, pretrain, folder, capsys):
    """train.py writes a run, load_model returns its model, and finetune.py takes its encoder. The
    nearest neighbour's accuracy equals one computed by hand."""
    data = data_for(name, folder)
    content = pretrain("--method", name, "--img_size", "16,24", "--data", data, name=name,
                       own=flags(BASE[name]))
    row = content["history"][1]
    assert all(math.isfinite(v) for v in row.values()), f"a metric is not finite: {row}"
    model = load_model(f"runs/{name}/last.pt")
    assert isinstance(model, METHODS[name]) and not model.training, "load_model: another class"
    assert same(model.state_dict(), content["model"]), "load_model gives other weights"

    torch.save({key: content[key] for key in ("method", "config", "model")}, "own.pt")
    own = train.read_checkpoint("own.pt")                  # of a training loop of one's own
    assert (own["mean"], own["std"]) == (model.mean, model.std)

    words = ["--checkpoint", f"runs/{name}/last.pt", "--workers", "0"]
    row, features, classes = finetune.main([*words, "--mode", "knn", "--k", "1"]), [], []
    for split in train.open_data(data, HERE, (16, 24))[:2]:
        _, images, labels = next(train.val_batches(split, HERE, (16, 24)))     # all
        tokens = model.encoder(normalize(images, model))
        patches, extra = tokens[:, 1:25], tokens[:, 25:]
        read = extra.flatten(1) if extra.shape[1] else patches.mean(1)
        features.append(F.normalize(read, dim=1))
        classes.append(labels)
    nearest = (features[1] @ features[0].T).argmax(1)
    right = classes[0][nearest] == classes[1]
    assert row["top1"] == pytest.approx(100 * right.float().mean().item()), (
        "finetune.py's features are not the mean of the encoder's patch tokens")
    encoder = load_encoder(f"runs/{name}/last.pt")
    assert torch.equal(encoder(normalize(images, encoder)), tokens), "load_encoder differs"
    assert "newly initialised" not in capsys.readouterr().out, "a part is not in the checkpoint"


@methods
def test_what_finetuning_reads_is_trained(name):
    """The tokens that finetune.py pools by default get a gradient of the pretraining loss after the
    last block."""
    model, (images, noise) = build(name), images_and_noise()
    extra = len(model.state_dict().get("encoder.extra_tokens", ()))
    pool = getattr(METHODS[name], "pool", finetune.default_pool(extra, 16))
    tuned = finetune.Classifier((16, 24), 4, 3, 16, 2, 2, extra_tokens=extra, probe=True, norm=True,
                                pool=pool)

    def gradients(encoder, value_of):
        """Return whether class, patch and extra tokens after the last block change value_of()."""
        left = []
        hook = encoder.blocks[-1].register_forward_hook(lambda *call: left.append(call[2]))
        value = value_of()
        hook.remove()
        grad = torch.autograd.grad(value, left[0])[0].abs().amax((0, 2))
        parts = grad.split([1, len(grad) - 1 - extra, extra])
        return [bool(part.numel() and part.max() > 0) for part in parts]
    read = gradients(tuned.requires_grad_().encoder, lambda: tuned.features(images).square().sum())
    trained = gradients(model.encoder, lambda: model(images, noise)[0])
    assert any(read) and all(there for there, is_read in zip(trained, read) if is_read), (
        "finetune.py pools the patch tokens, but the loss does not reach them after the last "
        "block. Set `pool` in the class, e.g. to \"token\" if only the class token is trained")


def draws_numbers(model):
    """Return whether model_inputs or forward draw random numbers, although forward gets noise."""
    losses, (images, noise) = [], inputs_of(model)
    for seed in (0, 1):
        torch.manual_seed(seed)
        inputs = model.model_inputs(*arguments(model, (50 * images + 128).clamp(0, 255), noise))
        losses.append(model(*inputs)[0])
    return losses[0] != losses[1]


def is_mean_over_images(model):
    """Return whether the loss is the mean of the losses of the batch's halves. Warn if not, except
    for i-MAE, whose partners here, but not in train.py, are from the same piece."""
    images, noise = images_and_noise(32, C=model.encoder.in_chans)
    halves = [loss_of(model, x, z) for x, z in zip(images.split(16), noise.split(16))]
    if torch.allclose(sum(halves) / 2, loss_of(model, images, noise), atol=1e-5):
        return True
    if not isinstance(model, IMAE):
        warnings.warn(f"the loss of {type(model).__name__} compares the images of a batch, so "
                      f"--accum and the number of processes change it: see rule 3 in FORKS.md")
    return False


@methods
def test_the_seed_is_the_run(name, pretrain, folder):
    """Two runs with one seed are equal, even if one computes its batches in pieces (unless the loss
    compares the images of a batch)."""
    words = ["--method", name, "--optimizer", "sgd", "--lr", "0.1", "--eval_images", "1",
             "--data", data_for(name, folder), *GROUPS * (name in FORKS)]
    if name == "minr":
        words += ["--pixel_fraction", "0.3", "--coord_jitter", "--loss_on", "masked"]
    model, accum = build(name), "2" if name in FORKS else "4"
    whole = draws_numbers(model) or not is_mean_over_images(model)
    a = pretrain(*words, name="a", own=flags(BASE[name]))
    b = pretrain(*words, "--accum", "1" if whole else accum, name="b", own=flags(BASE[name]))
    assert a["history"][-1]["loss"] < 1e3, "the loss diverges at --lr 0.1: nothing to compare"
    assert same(a["model"], b["model"], atol=1e-6), (
        "--accum changes the run: does forward update a buffer such as a centre? Do that in "
        "after_step")
    assert b["history"][0]["loss"] == pytest.approx(a["history"][0]["loss"], rel=1e-5), (
        "--accum changes the logged loss: it must be a mean over images")


@pytest.mark.parametrize("name", [
    name for name in METHODS if METHODS[name].after_step is not Method.after_step])
def test_after_step(name, pretrain, folder, monkeypatch):
    """after_step is called after each optimizer step, with the progress, and changes something."""
    after_step, calls = METHODS[name].after_step, []

    def state(model):
        """Return a copy of a model's tensors and numbers."""
        numbers = {k: torch.tensor(v) for k, v in vars(model).items()
                   if isinstance(v, (bool, int, float))}
        return copy.deepcopy({**model.state_dict(), **dict(model.named_buffers()), **numbers})

    def watched(self, progress):
        before = state(self)
        after_step(self, progress)
        calls.append((progress, not same(before, state(self))))
    monkeypatch.setattr(METHODS[name], "after_step", watched)
    pretrain("--method", name, "--accum", "2", "--data", data_for(name, folder), name=name,
             own=flags(BASE[name]))
    assert calls, "after_step was never called"
    assert [progress for progress, _ in calls] == pytest.approx(
        [i / 10 for i in range(1, 11)]), "after_step must be called once after each step"
    assert any(changed for _, changed in calls), "after_step changes nothing"


@methods
def test_init_loads_everything(name, pretrain, folder):
    """--init of a run of the same method leaves nothing random, also no teacher."""
    words = ["--method", name, "--epochs", "0", "--data", data_for(name, folder)]
    a = pretrain(*words, name="a", own=flags(BASE[name]))
    b = pretrain(*words, "--seed", "1", "--init", "runs/a", name="b", own=flags(BASE[name]))
    wrong = [x for x in a["model"] if not torch.equal(a["model"][x], b["model"][x])]
    assert not wrong, f"--init leaves something random, e.g. {wrong[0]}: by from_mae? A buffer?"


@pytest.mark.parametrize("name", FORKS)
def test_your_method_resumes(name, pretrain, folder, monkeypatch):
    """A run that was interrupted ends as one that was not."""
    words = ["--method", name, "--epochs", "3", "--data", data_for(name, folder)]
    whole = pretrain(*words, name="whole", own=flags(BASE[name]))
    with stopping_after_two(monkeypatch):
        pretrain(*words, name="part", own=flags(BASE[name]))
    part = pretrain(*words, "--resume", name="part", own=flags(BASE[name]))
    assert same(whole["model"], part["model"]), (
        "a resumed run differs: set what depends on progress in before_step, and keep what cannot "
        "be computed in a buffer that is saved")


@pytest.mark.parametrize("name", FORKS)
def test_your_method_in_two_processes(name, pretrain, folder):
    """Two processes train like one, unless each draws its own numbers, or the loss compares images
    of a batch."""
    if draws_numbers(build(name)) or not is_mean_over_images(build(name)):
        pytest.skip("each process draws its own numbers, or compares its own images")
    words = ["--method", name, "--data", data_for(name, folder), *TINY, *flags(BASE[name]),
             *GROUPS, "--optimizer", "sgd", "--lr", "0.1"]
    one = pretrain(*words, name="one", own=[])
    together("train.py", *words, "--name", "two", "--device", "cpu")
    two = train.read_checkpoint("runs/two")
    assert same(one["model"], two["model"], atol=1e-5), (
        "two processes differ from one: does draw_batch draw an image's own numbers (rule 1 in "
        "FORKS.md), or forward update a buffer, e.g. a centre (rule 2)?")


@pytest.mark.parametrize("name, tokens", [
    ("mae", dict(mask_token=0.02)), ("crossmae", dict(mask_token=0.02)),
    ("imae", dict(mask_token=0.02)), ("hypermae", dict(weight_tokens=0.02, T=0.02)),
    ("minr", {"encoder.extra_tokens": 1.0})])             # the release's
def test_initial_weights(name, tokens):
    """Learned tokens are drawn with std 0.02, as in MAE. LayerNorms have MAE's epsilon. Positions
    of encoder and decoder are not trained. Linear layers have Xavier-uniform weights and zero
    biases (patch embeddings: PyTorch's default), except mixing weights (test_crossmae.py) and
    MINR's to_columns (PyTorch's default)."""
    decoder = dict(decoder_dim=512, decoder_depth=1) if "mask_token" in tokens else {}
    model = build(name, dim=512, depth=1, **decoder)
    for token, std in {"encoder.cls_token": 0.02, **tokens}.items():
        values = model.get_parameter(token).detach()
        assert values.std() == pytest.approx(std, rel=0.3 if token == "T" else 0.1), token
        assert values.mean().abs() < 0.5 * std, token
    assert not [n for n, p in model.named_parameters() if "pos_embed" in n and p.requires_grad]
    for part, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            assert module.eps == (1e-5 if part.startswith("to_columns") else 1e-6), part
        elif isinstance(module, nn.Linear) and not part.startswith(("to_columns", "wfm")):
            limit = math.sqrt(6 / sum(module.weight.shape))
            assert 0.9 * limit < module.weight.abs().max() <= limit, part
            limit = module.in_features ** -0.5 if part == "encoder.patch_embed" else 0
            assert 0.9 * limit <= module.bias.abs().max() <= limit, part
    assert ViT(dim=96, extra_tokens=60).extra_tokens.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name, options, checkpointing", [
    ("mae", dict(decoder_depth=1), True), ("crossmae", dict(decoder_depth=1), True),
    ("hypermae", dict(feat2w_depth=1), False),
    ("minr", dict(pixel_fraction=0.3, coord_jitter=True), False),
    ("imae", dict(decoder_depth=1, teacher=TEACHER), False)])
def test_compiles_into_one_graph(name, options, checkpointing, monkeypatch):
    """No graph breaks, and other images, masks and weights alpha need no new graph."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build(name, depth=1, **options)
    net = train.wrap(model, settings(grad_checkpointing=checkpointing, compile=True), HERE)
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        images, noise = (x.roll(seed, 1) for x in images_and_noise())
        pairs = (images.roll(1, 0), torch.tensor(0.2 + 0.2 * seed)) if name == "imae" else ()
        losses = []
        for call in (net, model):
            torch.manual_seed(seed)
            losses.append(call(images, noise, *pairs)[0])
            losses[-1].backward()
        assert torch.allclose(*losses, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("sizes_vary, graphs", [(True, 1), (False, 3)])
def test_compiles_for_sizes_that_vary(sizes_vary, graphs, monkeypatch):
    """With sizes_vary, other numbers of visible patches need no new graph."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model, (images, noise) = build("mae", depth=1), images_and_noise()

    class Varying(nn.Module):
        def forward(self, images, ids_keep):
            return model.encode(images, ids_keep)
    varying = Varying()
    varying.sizes_vary = sizes_vary
    net = train.wrap(varying, settings(compile=True), HERE)
    torch._dynamo.utils.counters.clear()
    for K in (6, 9, 12):
        net(images, noise.argsort(1)[:, :K])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("device, world, accum, sizes_vary, mode", [
    ("cuda", 1, 1, False, "reduce-overhead"), ("cpu", 1, 1, False, None),
    ("cuda", 2, 1, False, None), ("cuda", 1, 2, False, None), ("cuda", 1, 1, True, None)])
def test_cuda_graphs(device, world, accum, sizes_vary, mode, monkeypatch):
    """--compile uses CUDA graphs only on a GPU, in one process, for whole batches and for shapes
    that do not vary. (On a GPU, test_devices.py compares losses.)"""
    modes = []
    monkeypatch.setattr(torch, "compile", lambda model, mode, dynamic: modes.append(mode))
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda model, **_: model)
    here = HERE._replace(device=torch.device(device), world=world)
    model = build("mae")
    model.sizes_vary = sizes_vary
    train.wrap(model, settings(compile=True, accum=accum), here)
    assert modes == [mode]


def test_gradient_checkpointing(pretrain, spy):
    """Each block's activations are recomputed, and the run stays the same."""
    a, b = (pretrain("--method", "crossmae", "--epochs", "1", *more, name=f"{len(more)}")
            for more in ([], ["--grad_checkpointing"]))
    assert same(a["model"], b["model"])
    blocks = spy(train, "checkpoint", lambda forward, *_, **__: type(forward.__self__).__name__)
    net = train.wrap(build("crossmae"), settings(grad_checkpointing=True), HERE)
    net(*images_and_noise())
    assert blocks == ["Block"] * 2 + ["CrossBlock"] * 2


MAE_RECIPE = dict(  # MAE Table 8, CrossMAE Table 10; crop: the release
    optimizer="adamw", blr=1.5e-4, betas=(0.9, 0.95), weight_decay=0.05, batch_size=4096,
    schedule="cosine", warmup_epochs=40, epochs=800, crop=0.2, flip=True)


@pytest.mark.parametrize("name, recipe, defaults", [
    ("mae", MAE_RECIPE, dict(decoder_dim=512, decoder_depth=8, decoder_heads=16)),
    ("crossmae", MAE_RECIPE, dict(prediction_ratio=0.75, decoder_dim=512, decoder_depth=12,
                                  decoder_heads=16)),
    ("hypermae", dict(MAE_RECIPE, epochs=400),             # Tables 12 and 3, and the release
     dict(n_weight_tokens=16, feat2w_depth=4, shared_blocks=0, mlp_depth=6, hidden_dim=256,
          modulated_layer=1, pe_dim=128, pe_sigma=1024.0, out_bias=0.5, loss_on="masked",
          norm_pix_loss=True)),                            # item 6
    ("imae", dict(MAE_RECIPE, blr=1e-3),                   # Table 1, ImageNet; the rest is MAE's
     dict(norm_pix_loss=False, beta=1.0)),
    ("minr", dict(  # the paper gives none: the release, for Imagenette
        optimizer="adam", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0, batch_size=32,
        schedule="constant", warmup_epochs=0, epochs=400, crop=0.75, flip=True), {})])
def test_recipes_and_defaults_are_the_papers(name, recipe, defaults):
    """Defaults are from MAE's Table 1 and CrossMAE's A.6. (test_minr.py has MINR's.)"""
    assert METHODS[name].recipe == recipe
    assert {**defaults, "mask_ratio": 0.75}.items() <= METHODS[name].__init__.__kwdefaults__.items()
