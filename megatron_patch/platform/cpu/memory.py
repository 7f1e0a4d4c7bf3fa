"""What glibc does with freed memory: handed back to the kernel, each page costs a fault and a clearing at its next use."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next allocation, for the rest of this process; whether it could be asked.

    A training step frees what the next one allocates again, several hundred MB: measured 1.45 s a step instead of 1.60 on the
    56M llama of benchmarks/train_vs_hf.py. The memory that a process holds then never shrinks. False without glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
        return bool(libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, NEVER))
    except (AttributeError, OSError, TypeError):
        return False
