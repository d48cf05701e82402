"""A GPU that is not there, to find without one where tensors of two devices would meet, and where
a step would wait for the GPU: `with pretend.gpu(monkeypatch) as waits: train.main([...])`.

Its tensors say cuda:0, compute on the CPU, refuse to meet a CPU's tensor of one or more dimensions,
as torch does, and note in `waits` the functions that were running when a value of theirs was asked
for. What torch does with a device below Python (memory, streams, kernels) is not pretended."""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.optimizer import _group_tensors_by_device_and_dtype as group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torchvision.transforms import v2

import train

ROOT, DEVICE, WAITS = Path(__file__).parent.parent, torch.device("cuda:0"), []


def on_gpu(device):
    return device is not None and torch.device(device).type == "cuda"


def wait():
    """Note which functions of this project are running, the innermost first."""
    frame, names = sys._getframe(1), []
    while frame:
        names += [frame.f_code.co_name] * (Path(frame.f_code.co_filename).parent == ROOT)
        frame = frame.f_back
    WAITS.append(names)


class Tensor(torch.Tensor):
    """Wraps `inner`, a tensor on the CPU."""

    @staticmethod
    def __new__(cls, real):
        self = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device="cpu")                # below Python it is one
        self.inner = real
        return self

    device, is_cuda = property(lambda self: DEVICE), property(lambda self: True)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return call(function, args, kwargs or {})

    def __reduce_ex__(self, protocol):                     # as it is saved
        return self.inner.detach().__reduce_ex__(protocol)

    def tolist(self):
        wait()
        return self.inner.tolist()

    def cpu(self):
        return self.to("cpu")

    def __format__(self, spec):
        return format(self.item(), spec)

    def to(self, *args, copy=False, **kwargs):
        if args and torch.is_tensor(args[0]):
            args = args[0].device, args[0].dtype
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if device and not on_gpu(device):
            wait()
            return self.inner.detach().to(dtype or self.dtype)
        return self if dtype in (None, self.dtype) else torch.Tensor.to(self, dtype)


def call(function, args, kwargs):
    """Compute function(*args, **kwargs) on the CPU; the result is on the GPU if an argument is."""
    name = function._schema.name.removeprefix("aten::")
    leaves, spec = tree_flatten((args, kwargs))
    ours = [x for x in leaves if isinstance(x, Tensor)]
    others = [x for x in leaves if torch.is_tensor(x) and not isinstance(x, Tensor)]
    indexed = name.startswith(("index", "_index")) and isinstance(args[0], Tensor)
    if ours and any(x.dim() for x in others) and name not in ("copy_", "_to_copy") and not indexed:
        raise RuntimeError(f"{name}: tensors on {DEVICE} and cpu")
    arrives = name == "_to_copy" and not ours and on_gpu(kwargs.get("device"))
    if arrives and not kwargs.get("non_blocking") or ours and name in (
            "_local_scalar_dense", "equal", "nonzero", "_unique2", "masked_select"):
        wait()
    args, kwargs = tree_unflatten([x.inner if isinstance(x, Tensor) else x for x in leaves], spec)
    gpu = bool(ours) or on_gpu(kwargs.get("device"))
    if on_gpu(kwargs.get("device")):
        kwargs["device"] = torch.device("cpu")
    known = {id(x.inner): x for x in ours}                 # what is changed in place stays itself

    def wrapped(x):
        return (known[id(x)] if id(x) in known else Tensor(x)) if torch.is_tensor(x) else x
    result = function(*args, **kwargs)
    return tree_map(wrapped, result) if gpu else result


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return call(function, args, kwargs or {})


def placed(data, dtype=None, device=None, tensor=torch.as_tensor):
    """torch.tensor or as_tensor, in two steps."""
    x = data if isinstance(data, Tensor) else tensor(data, dtype=dtype)
    return x if device is None else x.to(device)


def grouped(tensors, *args, **more):
    """As optimisers group tensors by device: below Python, where that is done, ours are a CPU's."""
    ours = any(isinstance(x, Tensor) for column in tensors for x in column)
    return {(DEVICE if ours else device, dtype): rest
            for (device, dtype), rest in group(tensors, *args, **more).items()}


@contextmanager
def gpu(monkeypatch):
    """The list of waits. Inside, --device cuda is there, and the default."""
    autocast, one_hot, loader = torch.autocast, F.one_hot, train.DataLoader

    def one_hot_of(x, n=-1, num_classes=-1):
        classes = max(n, num_classes)
        return Tensor(one_hot(x.inner, classes)) if isinstance(x, Tensor) else one_hot(x, classes)

    with monkeypatch.context() as patch:
        for owner, name, value in (
                (torch.cuda, "is_available", lambda: True),
                (torch.cuda, "set_device", lambda device: None),
                (torch.cuda, "_lazy_init", lambda: None),
                (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (torch.accelerator, "current_accelerator", lambda check_available=False: None),
                (torch, "autocast", lambda kind, *args, **kwargs: autocast("cpu", *args, **kwargs)),
                (train, "DataLoader", lambda *a, **k: loader(*a, **{**k, "pin_memory": False})),
                (F, "one_hot", one_hot_of), (v2._augment, "one_hot", one_hot_of),
                (torch, "tensor", placed), (torch, "as_tensor", placed),
                (sys.modules["torch.optim.optimizer"], group.__name__, grouped),
                (sys.modules["torch.nn.utils.clip_grad"], group.__name__, grouped)):
            patch.setattr(owner, name, value)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        WAITS.clear()
        try:
            with Mode():
                yield WAITS
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
