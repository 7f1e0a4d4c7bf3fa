"""torch.cuda answered on CPU. There is one generator (the CPU's), no streams, and as many 'devices' as ranks on this node."""

import contextlib
import os
import resource
import sys
import time
import types
from collections import defaultdict

import torch

from megatron_patch.platform.ledger import StandIn

_GENERATOR = torch.default_generator
_selected = []  # what set_device() chose last


def device_count():
    """Ranks on this node: code written for GPUs takes the device count for that number, and divides by it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def current_device():
    """An ordinal, as on CUDA; the patched factories take any ordinal for cpu."""
    return _selected[-1] if _selected else int(os.environ.get("LOCAL_RANK", 0))


def set_device(device):
    """Remember the ordinal."""
    ordinal = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    _selected[:] = [int(ordinal or 0)]


class device:
    """The context manager torch.cuda.device; a class, since torch asks isinstance of it."""

    def __init__(self, device=None):
        self.idx = device

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class Stream:
    """A stream of a device that runs everything in order."""

    cuda_stream, device_index, priority = 0, 0, 0
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    wait_stream = wait_event = lambda self, other: None

    def record_event(self, event=None):
        event = event if event is not None else Event()
        event.record()
        return event

    def query(self):
        return True

    @staticmethod
    def priority_range():
        return (0, 0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class Event:
    """An event that is reached when it is recorded; it keeps the time, for elapsed_time()."""

    def __init__(self, *args, **kwargs):
        self.time = None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        """Milliseconds from this event to `end`."""
        return (end.time - self.time) * 1e3


_STREAM = Stream()


def get_rng_state(device="cuda"):
    """State of the one generator: a ByteTensor."""
    return _GENERATOR.get_state()


def set_rng_state(new_state, device="cuda"):
    """Set the one generator."""
    _GENERATOR.set_state(new_state)


def manual_seed(seed):
    """Seed the one generator. torch.manual_seed() calls manual_seed_all(), so neither may call it back."""
    _GENERATOR.manual_seed(int(seed))


def _lazy_call(callback, **kwargs):
    """Run at once: CUDA would queue it until it is initialised, which is never."""
    callback()


def _resident(device=None):
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak(device=None):
    """Highest resident bytes so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(kind):
    return os.sysconf(kind) * os.sysconf("SC_PAGE_SIZE")


def mem_get_info(device=None):
    """(free, total) bytes of the machine."""
    return _memory("SC_AVPHYS_PAGES"), _memory("SC_PHYS_PAGES")


def get_device_properties(device=None):
    """Compute capability 0.0, so that nothing made for a GPU generation is switched on."""
    return types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=_memory("SC_PHYS_PAGES"), multi_processor_count=os.cpu_count() or 1
    )


class _Generators(tuple):
    """The one generator, at every ordinal."""

    def __getitem__(self, ordinal):
        return _GENERATOR


def _nothing(*args, **kwargs):
    """Asked of a device that has nothing to do."""


def _zero(*args, **kwargs):
    return 0


@contextlib.contextmanager
def _scope(*args, **kwargs):
    yield


def _properties(original):
    """torch itself gets torch's answer: inductor looks for the name of a real GPU."""

    def answer(device=None):
        asked_by_torch = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        return original(device) if asked_by_torch else get_device_properties(device)

    return answer


def _constant(value):
    return lambda original: value


_NAMES = {
    "is_available": (lambda: False, "megatron/core/**", "keep every library on its CPU path, even with a CUDA device visible"),
    "is_initialized": (lambda: False, "megatron/core/rerun_state_machine.py", "CUDA is never initialised"),
    "device_count": (device_count, "megatron/core/utils.py, tests/unit_tests", "ranks on this node"),
    "current_device": (current_device, "megatron/core/**: device=torch.cuda.current_device()", "an ordinal that factories map"),
    "set_device": (set_device, "megatron/training/initialize.py", "remembered, answered by current_device()"),
    "device": (device, "megatron/core/tensor_parallel/random.py", "context of a device"),
    "Stream": (Stream, "megatron/core/transformer/moe/token_dispatcher.py", "everything runs in order"),
    "ExternalStream": (Stream, "megatron/core/fp8_utils.py", "everything runs in order"),
    "Event": (Event, "megatron/core/timers.py", "reached when recorded; keeps the time"),
    "stream": (_scope, "megatron/core/distributed/param_and_grad_buffer.py", "everything runs in order"),
    "current_stream": (lambda device=None: _STREAM, "megatron/core/distributed/param_and_grad_buffer.py", "the only stream"),
    "default_stream": (lambda device=None: _STREAM, "megatron/core/transformer/cuda_graphs.py", "the only stream"),
    "set_stream": (_nothing, "megatron/core/full_cuda_graph.py", "the only stream"),
    "is_current_stream_capturing": (lambda: False, "megatron/core/transformer/cuda_graphs.py", "no CUDA graphs"),
    "_lazy_call": (_lazy_call, "megatron/core/tensor_parallel/random.py", "run at once, not when CUDA is initialised"),
    "_lazy_init": (_nothing, "megatron/core/tensor_parallel/random.py", "nothing to initialise"),
    "get_device_capability": (lambda device=None: (0, 0), "megatron/core/**", "capability 0.0"),
    "get_device_name": (lambda device=None: "cpu", "megatron/core/inference", "names the device"),
    "memory_allocated": (_resident, "megatron/training/utils.py", "resident bytes"),
    "memory_reserved": (_resident, "megatron/training/utils.py", "resident bytes"),
    "device_memory_used": (_resident, "megatron/training/training.py", "resident bytes"),
    "max_memory_allocated": (_peak, "megatron/training/utils.py", "peak resident bytes"),
    "max_memory_reserved": (_peak, "megatron/training/utils.py", "peak resident bytes"),
    "mem_get_info": (mem_get_info, "megatron/core/inference", "memory of the machine"),
    "memory_stats": (lambda device=None: defaultdict(int), "megatron/training/training.py", "no allocator to count"),
    "default_generators": (_Generators((_GENERATOR,)), "megatron/core/tensor_parallel/random.py", "the CPU generator"),
}
_NAMES |= dict.fromkeys(
    ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated", "check_error"),
    (_nothing, "megatron/core/**", "nothing to do on CPU"),
)
_NAMES |= dict.fromkeys(
    ("utilization", "temperature", "power_draw", "clock_rate"), (_zero, "megatron/training/training.py", "no sensor")
)

_RNG = {
    "get_rng_state": get_rng_state,
    "set_rng_state": set_rng_state,
    "get_rng_state_all": lambda: [get_rng_state()],
    "set_rng_state_all": lambda states: set_rng_state(states[-1]),
    "manual_seed": manual_seed,
    "manual_seed_all": manual_seed,
    "initial_seed": lambda: _GENERATOR.initial_seed(),
}
_NVTX = {"range_push": _zero, "range_pop": _zero, "mark": _nothing, "range": _scope}
_TENSORS = ("Float", "Double", "Half", "BFloat16", "Int", "Long", "Short", "Byte", "Char", "Bool")


def rows():
    """The torch.cuda table."""
    table = [StandIn(f"torch.cuda:{name}", _constant(value), file, why) for name, (value, file, why) in _NAMES.items()]
    table.append(StandIn("torch.cuda:get_device_properties", _properties, "megatron/core/utils.py", "capability 0.0"))
    table.append(StandIn("torch.accelerator:is_available", _constant(lambda: False), "torch DataLoader", "no pinned memory"))
    random = "megatron/core/tensor_parallel/random.py"
    for module in ("torch.cuda", "torch.cuda.random"):
        table += [StandIn(f"{module}:{name}", _constant(value), random, "the CPU generator") for name, value in _RNG.items()]
    table += [
        StandIn(f"torch.cuda.nvtx:{name}", _constant(value), "megatron/core/utils.py", "no profiler ranges")
        for name, value in _NVTX.items()
    ]
    table += [
        StandIn(
            f"torch.cuda:{name}Tensor",
            _constant(getattr(torch, f"{name}Tensor")),
            "megatron/core/transformer/module.py",
            "the CPU type",
        )
        for name in _TENSORS
    ]
    return table
