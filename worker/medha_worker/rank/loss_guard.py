"""Ends a GPU's wait for a rank that was lost, because NCCL itself waits without a limit.

A host that waits for its GPU cannot notice that the GPU waits for another rank. So a thread compares the clock with the
bound of the running step, and reads the errors that torch's watchdog reports. On a loss it aborts all groups, which ends
their kernels. The host then continues with void results, until `check` reports the loss.

Unproven without GPUs: that an abort also ends the kernels of captured steps, and how long it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any  # for NCCL's groups, whose methods torch does not declare

from torch._C._distributed_c10d import ErrorType

from medha.errors import PartFailed
from medha_worker.rank.data_plane import first_line

POLL_SECONDS = 0.2

_log = logging.getLogger("medha.rank")


class LossGuard:
    """Aborts the groups of one rank once another rank was lost."""

    def __init__(
        self,
        rank: int,
        groups: Mapping[str, Any],
        clock: Callable[[], float] = monotonic,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`groups` are by name; `clock` returns seconds."""
        self._rank, self._groups = rank, dict(groups)
        self._clock, self._poll_seconds = clock, poll_seconds
        self._lost = ""  # the reason, once a rank was lost
        self._due: tuple[float, float] | None = None  # when the running step must have ended, and its bound
        self._aborting = Lock()
        self._ended = Event()
        self._thread = Thread(target=self._run, daemon=True, name="loss guard")
        self._thread.start()

    def bound(self, wait: timedelta) -> None:
        """Begin a step, which must end within `wait`."""
        seconds = wait.total_seconds()
        self._due = self._clock() + seconds, seconds

    def end(self) -> None:
        """End the step.

        Raises:
            PartFailed: a rank was lost, so that results since `bound` are void.
        """
        self._due = None
        self.poll()
        self.check()

    def check(self) -> None:
        """Raise `PartFailed` if a rank is known to be lost; cheap enough for every call of a group.

        Otherwise the calling thread would wait in an aborted group until its own captured steps are gone.
        """
        if self._lost:
            raise PartFailed(f"rank {self._rank} lost another rank: {self._lost}")

    def poll(self) -> None:
        """Abort all groups if one reports an error, or if the step has not ended in time."""
        for name, group in self._groups.items():
            error = group.get_error()
            if error != ErrorType.SUCCESS:
                self.abort(f"NCCL reports {error.name} among the ranks of {name}")
                return
        due = self._due
        if due is not None and self._clock() > due[0]:
            self.abort(f"a step had not ended after {due[1]:g} s")

    def abort(self, reason: str) -> None:
        """Abort all groups, unless that was done before; any thread may call this. It waits for nothing."""
        with self._aborting:
            if self._lost:
                return
            self._lost = reason  # before results become void
        # Each on its own thread: NCCL ends the kernels of a group at once, but returns from an abort only when all
        # captured steps with a kernel of that group are gone.
        for name, group in self._groups.items():
            Thread(target=_abort, args=(name, group), daemon=True, name=f"abort {name}").start()

    def close(self) -> None:
        """End the guard, and abort all groups."""
        self._ended.set()
        self._thread.join()
        self.abort("this rank has left the epoch")
        self._groups = {}

    def _run(self) -> None:
        while not self._ended.wait(self._poll_seconds):
            self.poll()


def _abort(name: str, group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:  # its kernels may go on; the watchdog ends a process that waits for them
        _log.warning("the group of %s could not be aborted: %s", name, first_line(error))
