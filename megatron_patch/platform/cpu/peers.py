"""Reading the memory of another process of this machine, one copy, no buffer of both (process_vm_readv of Linux)."""

import ctypes
import functools
import os


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read(pid: int, address: int, target) -> None:
    """Fill the contiguous CPU tensor ``target`` from ``address`` of process ``pid``.

    Raises OSError: the process is gone, may not be read, or has nothing there.
    """
    length, done = target.numel() * target.element_size(), 0
    call = _call()
    while done < length:
        here, there = _Range(target.data_ptr() + done, length - done), _Range(address + done, length - done)
        count = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
        done += count


@functools.cache
def _call():
    """process_vm_readv. Raises OSError where the C library has none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):
        raise OSError("process_vm_readv: not on this system") from None
    function.restype, function.argtypes = ctypes.c_ssize_t, [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    return function
