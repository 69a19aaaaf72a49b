"""Recognises errors that say that memory ran out."""

import torch

_OUT_OF_MEMORY_SIGNS = ("not enough memory", "can't allocate memory", "out of memory", "defaultcpuallocator")


def ran_out(error: Exception) -> bool:
    """True if the error says that memory ran out; CPU kernels say so only in the text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)
