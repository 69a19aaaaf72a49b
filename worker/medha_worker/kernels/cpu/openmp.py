"""Runs kernels that torch does not know on torch's own OpenMP threads.

A second pool of threads would compete with torch's for the cores. `GOMP_parallel` of the libgomp that torch
has loaded runs a C function on the same team.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import torch

# Functions that compiled code calls, by the names under which they are linked.
SYMBOLS = {"medha_thread": "omp_get_thread_num", "medha_threads": "omp_get_num_threads"}


class OpenMP:
    """A loaded libgomp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        for ours, theirs in SYMBOLS.items():
            address = ctypes.cast(getattr(library, theirs), ctypes.c_void_p).value
            llvm.add_symbol(ours, address)

    def run(self, address: int, call: npt.NDArray[np.int64], threads: int) -> None:
        """Run the C function `void (int64 *call)` once on each thread of a team, and wait for all."""
        self._parallel(address, call.ctypes.data, threads, 0)


@lru_cache(maxsize=1)
def torchs_openmp() -> OpenMP | None:
    """Return the OpenMP library whose threads torch uses; None if it is not GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        return OpenMP(ctypes.CDLL(str(path)))  # torch has already loaded it, so this returns the same library
    return None
