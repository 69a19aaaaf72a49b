"""Groups of ranks in host memory, over gloo: formed at one address of this rank, in a store that all ranks share.

They are created here rather than by `init_process_group`, whose state belongs to the process: it
numbers its group names, so a replaced rank would use other names than ranks that have formed groups before,
and they would never find each other.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any  # for gloo's groups, whose methods torch does not declare

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined] # not declared so

from medha.errors import PartFailed
from medha_worker.rank.data_plane import first_line


class GlooGroups:
    """Forms the groups of one rank in one epoch."""

    def __init__(self, store: Store, rank: int, address: str, wait: timedelta) -> None:
        """Listen at `address` alone: connections are not encrypted. `wait` bounds forming a group, and each wait in it.

        Raises:
            PartFailed: this rank cannot listen at `address`.
        """
        self._store, self._rank, self._wait = store, rank, wait
        try:
            with _sharing_the_core():
                self._device = ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise PartFailed(f"rank {rank} cannot listen at its own address, {address}: {error}") from error

    def form(self, name: str, members: Sequence[int]) -> Any:
        """Form the group of these ranks, once all of them are there.

        Raises:
            PartFailed: one of them did not come in time.
        """
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # only these options take a device
        options._devices, options._timeout = [self._device], self._wait
        try:
            named = PrefixStore(name, self._store)
            return ProcessGroupGloo(named, members.index(self._rank), len(members), options)
        except RuntimeError as error:
            who, it = f"the other {len(members) - 1}", "one of them"
            # The key under which the missing rank would have stored its address.
            if awaited := re.search(r"keys: \S+/(\d+)$", first_line(error)):
                who, it = f"rank {members[int(awaited[1])]}", "it"
            raise PartFailed(
                f"rank {self._rank} did not reach {who} of {name} within {self._wait.total_seconds():g} s: {it} ended, is cut "
                f"off or did not come, and its own log says why ({first_line(error)})"
            ) from error


class Sent:
    """Tensors being sent: gloo reads them until they are received, and reports that only to a wait.

    Beyond `most`, the oldest has been received: the controller lets no more steps into the pipeline than it
    has stages, and one more into a single stage.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[tuple[Work, torch.Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def keep(self, work: Work, tensor: torch.Tensor, wait: timedelta) -> None:
        """Keep a tensor until it is received; if there are more than `most`, wait for the oldest."""
        self._works.append((work, tensor))
        while len(self._works) > self._most:
            self._works.popleft()[0].wait(wait)

    def forget(self) -> None:
        """Release all tensors, whether they were received or not."""
        self._works.clear()


@contextmanager
def _sharing_the_core() -> Iterator[None]:
    """Keep threads started in this context from preempting a computing thread (`SCHED_BATCH`).

    Gloo's thread spins while another thread holds the lock of a connection, as the computing thread does when
    it sends. If gloo's thread preempted the computing thread just then, on a core that both share, it would
    spin until its time slice is over: milliseconds.
    """
    is_changed = False
    with suppress(OSError):  # refused, as sandboxes do in several ways: then only time is lost
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_changed = True
    try:
        yield
    finally:
        if is_changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
