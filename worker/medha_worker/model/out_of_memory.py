"""Keeps the memory that each step frees for the next step, and detects when memory ran out."""

import ctypes

import torch

# Parameters of glibc's mallopt(3); the largest mmap threshold that it accepts on 64 bits.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_OUT_OF_MEMORY_SIGNS = ("not enough memory", "can't allocate memory", "out of memory", "defaultcpuallocator")
_MMAP_THRESHOLD_MAX_BYTES = 32 * 1024 * 1024


def keep_freed_memory() -> bool:
    """Tell the C library not to return freed activations to the system; False if it has no such setting.

    A step frees and allocates the same tensors in every layer. By default, glibc returns large ones and gets
    them again as fresh pages, which the kernel must zero: 28,000 page faults in a chunk of 512 tokens of the
    `small` preset, 300 with this setting. It applies to the whole process, so a rank calls this once, before
    the first step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX_BYTES))


def ran_out(error: Exception) -> bool:
    """True if the error says that memory ran out; CPU kernels say so only in the text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)
