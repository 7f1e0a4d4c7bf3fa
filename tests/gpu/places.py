"""Which tensors would be on the GPU: a CPU run that keeps track of it, and reports what CUDA would refuse.

The CPU platform maps device 'cuda' to cpu, so a tensor left on the host by mistake works there and fails on a GPU. Inside
:class:`Places` 'cuda' is mapped to device('cpu', 0), which torch keeps apart from device('cpu') in the arguments it is
given; tensors made there are 'cuda', others 'cpu', results follow their inputs, and ``Tensor.device`` answers 'cuda'.
Seen: torch functions called from Python in this thread. Not seen: backward passes inside torch, and what reaches Python
without a torch function (autograd.Function results, mapped files); such a tensor fits everywhere.
"""

import functools
import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

CUDA = torch.device("cuda", 0)
MAPPED = torch.device("cpu", 0)
# These take tensors of two places: copies, and indices on the host.
MIXING = ("copy_", "to", "_foreach_copy_", "__getitem__", "__setitem__", "__set__", "type_as", "set_")
FROM_HOST = ("from_numpy", "frombuffer")  # no torch function
MOVING = ("to", "type_as", "cuda")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base",
               "_reduce_scatter_base")


class Places(TorchFunctionMode):
    """``faults``: one line per mixed call or host tensor in a collective, with the line of code at fault."""

    def __init__(self):
        super().__init__()
        self.places, self.faults = WeakTensorKeyDictionary(), []

    def __enter__(self):
        from megatron_patch.platform.cpu import Cpu, devices

        self.undo = [(devices, "to_cpu", devices.to_cpu), (torch.Tensor, "cuda", torch.Tensor.cuda), (Cpu, "device", Cpu.device)]
        self.undo += [(torch, name, getattr(torch, name)) for name in FROM_HOST]
        self.undo += [(torch.distributed, name, getattr(torch.distributed, name)) for name in COLLECTIVES]
        mapped = devices.to_cpu
        devices.to_cpu = lambda device: MAPPED if mapped(device) is not device else device
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to(CUDA)
        Cpu.device = property(lambda _: CUDA)
        for owner, name, original in self.undo[3:]:
            setattr(owner, name, (self._from_host if owner is torch else functools.partial(self._collective, name))(original))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for owner, name, original in self.undo:
            setattr(owner, name, original)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func == torch.Tensor.device.__get__:
            return func(*args) if self.places.get(args[0], "cuda") == "cpu" else CUDA
        if name == "backward":
            with self:
                return torch.autograd.backward(*args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        self._check(name, inputs)
        out = func(*args, **kwargs)
        if name == "__set__" and len(inputs) == 2:
            self._put(inputs[0], self.places.get(inputs[1]))
        place = self._place(name, args, kwargs, inputs)
        if name in (*MOVING, "cpu") and any(out is t for t in inputs) and self.places.get(out) != place:
            out = out.view_as(out)  # on the same device torch gives the tensor itself back
        for tensor in _tensors(out):
            if place is not None and not any(tensor is t for t in inputs):
                self._put(tensor, place)
        return out

    def _put(self, tensor, place):
        if place is not None:
            self.places[tensor] = place

    def _place(self, name, args, kwargs, inputs):
        device = kwargs.get("device")
        if device is None and name == "to":
            device = next((a for a in args if isinstance(a, (str, torch.device))), None)
        if name == "cpu" or device is not None and device != MAPPED:
            return None if getattr(device, "type", device) == "meta" else "cpu"
        if device is not None:
            return "cuda"
        if name in ("to", "type_as") and len(inputs) == 2:
            return self.places.get(inputs[1])
        known = [self.places[t] for t in inputs if t in self.places]
        return "cuda" if "cuda" in known else "cpu" if known or not inputs else None

    def _check(self, name, inputs):
        known = {self.places[t] for t in inputs if t in self.places and (t.dim() or self.places[t] == "cuda")}
        if len(known) == 2 and name not in MIXING or name == "numpy" and known == {"cuda"}:
            self._fault(name)

    def _from_host(self, original):
        def make(*args, **kwargs):
            out = original(*args, **kwargs)
            self._put(out, "cpu")
            return out

        return make

    def _collective(self, name, original):
        def run(*args, **kwargs):
            if any(self.places.get(t) == "cpu" for t in _tensors((args, kwargs))):
                self._fault(name)
            return original(*args, **kwargs)

        return run

    def _fault(self, name):
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and not f.filename.endswith("places.py")]
        self.faults.append(f"{name}: {frames[-1].filename.split('site-packages/')[-1]}:{frames[-1].lineno}: {frames[-1].line}")


def _tensors(value):
    """The tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
