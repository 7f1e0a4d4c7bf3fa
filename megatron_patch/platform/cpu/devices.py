"""Device 'cuda' means cpu: torch's factories, Tensor and Module methods that take a device. Functions are replaced one by one; a
TorchFunctionMode would be popped inside Tensor.backward() and is unknown to other threads."""

import functools
import sys

import torch
from torch.utils import _device

from megatron_patch.platform.ledger import MISSING, SKIP, StandIn

_CPU = torch.device("cpu")


def to_cpu(device):
    """cpu for 'cuda', 'cuda:1', torch.device('cuda', 1) and an ordinal; anything else as it is."""
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU
    return device


def _keyword(original):
    """`original`, its keyword `device` mapped and `pin_memory` off (pinning needs a driver)."""

    @functools.wraps(original)
    def factory(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    # picklable as what it replaces, in a process without the stand-ins too
    factory.__module__, factory.__qualname__ = getattr(original, "__module__", None) or "torch", original.__name__
    return factory


def _builtin(original):
    """torch.jit's look-up of an operator by function: it knows the originals."""
    return lambda function: original(getattr(function, "__wrapped__", function))


def _move(original):
    """`Tensor.to` or `Module.to`: the device is the first positional argument or the keyword."""

    @functools.wraps(original)
    def to(self, *args, **kwargs):
        if args:
            args = (to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _type(original):
    """`Tensor.type()`: megatron compares it with 'torch.cuda.FloatTensor' and its like; all others get torch's answer."""

    @functools.wraps(original)
    def type(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        asked_by_megatron = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.")
        if args or kwargs or not asked_by_megatron or answer.startswith("torch.cuda."):
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    return type


def _same(original):
    """A tensor or module that is asked to go where it already is."""
    return lambda self, *args, **kwargs: self


def _load(original):
    @functools.wraps(original)
    def load(f, map_location=None, *args, **kwargs):
        return original(f, to_cpu(map_location), *args, **kwargs)

    return load


def _generator(original):
    """torch.Generator that takes device 'cuda'; it makes real generators, and isinstance means the real class."""

    class Meta(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, original)

        def __getattr__(cls, name):
            return getattr(original, name)

    class Generator(metaclass=Meta):
        def __new__(cls, device="cpu"):
            return original(device=to_cpu(device))

    return Generator


def _context(original):
    @functools.wraps(original)
    def __init__(self, device):
        original(self, to_cpu(device))

    return __init__


def _factory_names():
    # also fills torch's cached set of factories with the originals: `with torch.device('meta')` recognises a factory by it
    factories = _device._device_constructors()
    return sorted(
        name for name in dir(torch) if callable(getattr(torch, name)) and any(getattr(torch, name) is f for f in factories)
    )


NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def rows():
    """The device table."""
    anywhere = "megatron/core/**: device=torch.cuda.current_device(), device='cuda'"
    table = [StandIn(f"torch:{name}", _keyword, anywhere, "device 'cuda' is cpu") for name in _factory_names()]
    table += [StandIn(f"torch:Tensor.{name}", _keyword, anywhere, "device 'cuda' is cpu") for name in NEW]
    table += [
        StandIn("torch.jit._builtins:_find_builtin", _builtin, "torch.jit.script", "a wrapped factory is the same operator"),
        StandIn("torch.jit._recursive:_find_builtin", _builtin, "torch.jit.script", "a wrapped factory is the same operator"),
        StandIn("torch:Tensor.to", _move, anywhere, "device 'cuda' is cpu"),
        StandIn("torch.nn:Module.to", _move, anywhere, "device 'cuda' is cpu"),
        StandIn("torch:Tensor.cuda", _same, "megatron/core/tensor_parallel/data.py", "the tensor is on the device already"),
        StandIn("torch.nn:Module.cuda", _same, "megatron/core/**: module.cuda()", "the module is on the device already"),
        StandIn("torch:Tensor.pin_memory", _same, "megatron/core/optimizer/cpu_offloading", "pinning needs a driver"),
        StandIn(
            "torch:Tensor.record_stream", lambda o: lambda self, stream: None, "megatron/core/pipeline_parallel", "no streams"
        ),
        StandIn(
            "torch:Tensor.type", _type, "megatron/core/optimizer/optimizer.py", "fp32/fp16 parameters are told by 'torch.cuda.*'"
        ),
        StandIn(
            "torch:Generator", _generator, "megatron/core/inference/text_generation_controllers", "a generator on device 'cuda'"
        ),
        StandIn("torch:load", _load, "megatron/core/dist_checkpointing", "map_location 'cuda' is cpu"),
        StandIn("torch.utils._device:DeviceContext.__init__", _context, "with torch.device('cuda')", "device 'cuda' is cpu"),
    ]
    return table


def only_if_missing(value):
    """A row's `make` that fills a gap and leaves what is there."""
    return lambda original: value if original is MISSING else SKIP
