"""The threads that compute the calls of compiled kernels: the caller's, and helpers that it never waits for in vain.

In OpenMP, a call begins only when every thread of the team runs. Where router and controller share the cores with a rank,
one of the threads is often not running. Each of a step's dozens of calls would then wait until another process leaves a core.

Here, the caller waits only for helpers that have begun a part of the call. If another process interrupts such a helper, the
caller computes alone for some milliseconds after the wait, and leaves the helper's core to that process. The results are the
same to the bit.
"""

from __future__ import annotations

import ctypes
import math
import platform
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import llvmlite.binding as llvm
import numpy as np

from medha_worker.kernels.cpu.host_compiler import Compiled
from medha_worker.kernels.cpu.team_code import (
    LIBRARY_FUNCTIONS,
    LINE,
    MOST_PARTS,
    TEAM_FIELDS,
    compiled_team,
)

_RUN = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_HELP = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
_PART = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

_ALONE_SECONDS = 0.003  # about a turn of the process that has interrupted a helper
_LATE_NANOSECONDS = 50_000
TeamFunction: TypeAlias = Callable[[Sequence[int], int], None]
"""Computes so many parts of a call, whose fields are given, on the threads that `HelperTeam.grow` has started."""


@lru_cache
def float_bits(value: float) -> int:
    """Return a float32 as a field of a call."""
    return int(np.float32(value).view(np.int32))


class HelperTeam:
    """Threads that compute the parts of a call. One thread at a time may call it."""

    def __init__(
        self, alone_seconds: float = _ALONE_SECONDS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Make a team without helpers. After the caller has waited for a helper, it computes alone for `alone_seconds`."""
        self._alone_seconds, self._clock = alone_seconds, clock
        library = ctypes.CDLL(None)
        for name in LIBRARY_FUNCTIONS:
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        self._code = compiled_team(platform.machine())
        self._state = _State()
        self._run = _RUN(self._code.address("run"))
        self._helpers: list[threading.Thread] = []
        self._alone_until = -math.inf
        weakref.finalize(self, _stop, self._state, self._helpers)

    @property
    def is_alone(self) -> bool:
        """True while the caller computes alone because a helper was interrupted."""
        return self._clock() < self._alone_until

    def grow(self, threads: int) -> int:
        """Start helpers until the team has at least `threads` threads, the caller's included; return how many it has."""
        while len(self._helpers) < threads - 1:
            arguments = (self._code, self._state, len(self._helpers) + 1)
            helper = threading.Thread(target=_help, args=arguments, name="medha-kernels", daemon=True)
            helper.start()
            self._helpers.append(helper)
        return 1 + len(self._helpers)

    def function(self, compiled: Compiled, name: str) -> TeamFunction:
        """Return an exported function, of the type `team_code.PART`, to be called by this team."""
        address = compiled.address(name)
        compute = _PART(address)

        def run(fields: Sequence[int], parts: int) -> None:
            call = array("q", fields)  # numpy's arrays take longer to make, and to ask for their address
            data, _ = call.buffer_info()
            if parts > 1 and self._helpers and not self.is_alone:
                assert parts < MOST_PARTS
                if self._run(self._state.address, address, data, parts) > _LATE_NANOSECONDS:
                    self._alone_until = self._clock() + self._alone_seconds
                return
            for part in range(parts):
                compute(data, part, parts, 0)

        return run


class _State:
    """The memory that the threads of a team share; it lives as long as any of them."""

    def __init__(self) -> None:
        memory = np.zeros((len(TEAM_FIELDS) + 1) * LINE, dtype=np.int64)
        self._lines = memory[-(memory.ctypes.data // memory.itemsize) % LINE :]  # from a cache line on
        self.address = int(self._lines.ctypes.data)
        self._semaphore = ctypes.c_void_p(self.address + 8 * LINE * TEAM_FIELDS.index("semaphore"))
        self._library = ctypes.CDLL(None)
        self._library.sem_init(self._semaphore, 0, 0)

    def stop(self, helpers: int) -> None:
        self._lines[LINE * TEAM_FIELDS.index("stopping")] = 1
        for _ in range(helpers):
            self._library.sem_post(self._semaphore)


def _help(code: Compiled, state: _State, number: int) -> None:
    _HELP(code.address("help"))(state.address, number)


def _stop(state: _State, helpers: list[threading.Thread]) -> None:
    """End the helpers of a team that is no longer used."""
    state.stop(len(helpers))
