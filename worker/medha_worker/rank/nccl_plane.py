"""The data plane over NCCL: tensors go from GPU to GPU, and the host waits for nothing.

All-reduces and gathers of a pod run on the stream of the calling thread, so that a step can be captured with them.
Transfers of hidden states, and between lanes, run on a stream of their group, beside other computation. A transfer begins
after the work that the calling thread has launched so far, and work that is launched after `finish` begins after the
transfer. Torch's groups create these streams; the host never waits.

Each group has one communicator, made when the ranks rendezvous: steps make none, and captures must not. All sends and
receives of a lane in one exchange are a single operation, because separate ones would wait for each other in a circle.

Torch's watchdog only reports errors here (`TORCH_OPTIONS`); `LossGuard` acts on them.

Unproven until several GPUs have run it (docs/gpu.md): NCCL itself, overlap, and how an abort ends. This module is
type-checked, its calls are compared with the signatures of the pinned torch, and it runs over gloo in tests.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import monotonic
from typing import Any  # for NCCL's groups, whose methods torch does not declare

import torch
from torch.distributed import (  # type: ignore[attr-defined] # exported, but not declared so
    AllreduceOptions,
    DebugLevel,
    GatherOptions,
    PrefixStore,
    ProcessGroupNCCL,
    Store,
    Work,
    set_debug_level,
)

from medha.errors import PartFailed
from medha_worker.device import Device, InFlight
from medha_worker.model.tensor_group import Alone, TensorGroup
from medha_worker.rank.data_plane import (
    MOST_WAIT_SECONDS,
    TAG,
    Neighbours,
    NewGroup,
    PlaneSite,
    first_line,
    sharing_a_step,
    waiting_for,
)
from medha_worker.rank.loss_guard import LossGuard

TORCH_OPTIONS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # report errors; neither abort groups nor end the process
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # would replace the line above
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # would leave out the watchdog that reports errors
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # a watchdog that fails ends alone
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a second watchdog would end the process if the first one hangs
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # that second one, again, after an error
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps four times this after an error
    "TORCH_FR_BUFFER_SIZE": "0",  # otherwise it searches a stack trace for up to 8 s after an error
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # the older name of the line above, which some of torch still reads
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # operations of a group run in order on purpose
}
"""Environment of torch's NCCL groups, which read it when they are formed. NCCL_* variables are left as they are."""


FORM_SECONDS = 60.0
"""Longest wait for the other ranks of a group that is formed."""


class NcclPlane:
    """`DataPlane` with a group for the pod, one for each neighbouring stage, and one for the lanes."""

    def __init__(
        self,
        near: Neighbours,
        device: Device,
        hidden_size: int,
        form: NewGroup,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Form the groups with `form`, which returns `ProcessGroupNCCL`s; `PartFailed` if a rank does not come."""
        self.lane = near.lane
        self._near, self._device, self._hidden_size = near, device, hidden_size
        groups: dict[str, Any] = {}

        def formed(name: str, members: Sequence[int | None]) -> Any:
            if len(members) > 1 and None not in members:
                groups[name] = form(name, [member for member in members if member is not None])
            return groups.get(name)

        before = f"stages {near.previous} and {near.rank}", (near.previous, near.rank)
        after = f"stages {near.rank} and {near.following}", (near.rank, near.following)
        try:
            pod = formed(f"pod {near.pod[0]}", near.pod)
            # Every second pair of stages forms its group at once, then the others: no ranks wait for each other in a
            # circle, and the last stage does not wait for all pairs before it.
            for link in (before, after) if near.stage % 2 else (after, before):
                formed(*link)
            self._before: Any = groups.get(before[0])
            self._after: Any = groups.get(after[0])
            self._lanes = formed(f"lanes from {near.lanes[0]}", near.lanes)
        except BaseException:
            LossGuard(near.rank, groups, clock).close()
            raise
        self._guard = LossGuard(near.rank, groups, clock)
        self._pod = None if pod is None else NcclPod(pod, near.tensor, self._guard)
        self.tensor_group: TensorGroup = self._pod or Alone()
        self._expected: deque[tuple[Work | None, torch.Tensor]] = deque()
        self._taken: torch.Tensor | None = None  # the last hidden states that were received
        self._in_flight = InFlight(device.runtime)
        self._sending: tuple[Work, torch.Tensor] | None = None

    def bound(self, wait: timedelta) -> None:
        self._guard.bound(wait)

    def check(self) -> None:
        self._guard.end()

    def abort(self, reason: str) -> None:
        self._guard.abort(reason)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send hidden states; work that is launched from here on begins after the send of the step before.

        A captured step overwrites the hidden states of two steps before, which must have been sent by then.
        """
        self._guard.check()
        assert self._near.following is not None, "the last stage sends no hidden states"
        sent = hidden.contiguous()
        with waiting_for(self._near.rank, self._near.following, "a receive of hidden states"):
            work = self._after.send([sent], 1, TAG)
        if self._sending is not None:
            self._sending[0].block_current_stream()
        self._sending = work, sent

    def expect_hidden(self, rows: int) -> None:
        self._guard.check()
        assert self._near.previous is not None, "the first stage receives no hidden states"
        with (
            self._device.runtime.ahead(),  # without waiting for the running step
            waiting_for(self._near.rank, self._near.previous, "hidden states"),
        ):
            hidden = torch.empty(
                rows, self._hidden_size, dtype=self._device.dtype, device=self._device.torch_device
            )
            expected = self._before.recv([hidden], 0, TAG) if rows else None
        self._expected.append((expected, hidden))

    def receive_hidden(self) -> torch.Tensor:
        """Return the oldest expected hidden states, on the device; the host does not wait for them."""
        self._guard.check()
        if self._taken is not None:
            self._in_flight.keep(self._taken)  # the work that reads them is launched by now
        expected, hidden = self._expected.popleft()
        if expected is not None:
            expected.block_current_stream()
        self._taken = hidden
        return hidden

    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> _Exchange | None:
        self._guard.check()
        if not outgoing and not incoming:
            return None
        with sharing_a_step(self._near.rank):
            self._lanes._start_coalescing()
            try:
                for lane in sorted(incoming):
                    self._lanes.recv([incoming[lane]], lane, TAG)
                for lane in sorted(outgoing):
                    self._lanes.send([outgoing[lane]], lane, TAG)
            finally:
                # Always: this thread's later operations, of any group, would otherwise wait for the end of this one.
                work = self._lanes._end_coalescing()
        return _Exchange(work, (*outgoing.values(), *incoming.values()))

    def finish(self, started: _Exchange | None) -> None:
        if started is not None:
            started.work.block_current_stream()

    def close(self) -> None:
        """Leave the groups, without waiting for transfers in flight."""
        self._guard.close()
        self._expected.clear()
        self._sending = self._taken = None
        self._before = self._after = self._lanes = None
        if self._pod is not None:
            self._pod.close()


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Transfers between lanes that have begun, as one operation."""

    work: Work
    tensors: Sequence[torch.Tensor]  # which it reads and writes


class NcclPod:
    """The tensor ranks of a pod of several, as the model's `TensorGroup`; its calls may be captured."""

    captures = True

    def __init__(self, group: Any, index: int, guard: LossGuard) -> None:
        self._group: Any = group
        self._index, self._guard = index, guard
        # Both run on the stream of the calling thread, as what they read and write does.
        self._summing, self._gathering = AllreduceOptions(), GatherOptions()
        self._summing.asyncOp = self._gathering.asyncOp = False

    def all_reduce(self, x: torch.Tensor) -> None:
        self._guard.check()
        self._group.allreduce([x], self._summing)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        self._guard.check()
        # Gather takes only equal shapes: pad to the widest.
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths] if self._index == 0 else []
        self._group.gather([parts] if parts else [], [padded], self._gathering)
        if not parts:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        self._group = None


def nccl_plane(site: PlaneSite) -> NcclPlane:
    """Return the plane of a rank with a GPU."""
    restrain_torch()
    form = nccl_groups(site.store, site.neighbours.rank, site.device.torch_device)
    return NcclPlane(site.neighbours, site.device, site.hidden_size, form)


def restrain_torch() -> None:
    """Keep torch from ending this process for an error of NCCL, in groups that are formed from here on."""
    os.environ.update(TORCH_OPTIONS)
    set_debug_level(DebugLevel.OFF)  # in detail, torch handles errors in its own way


def nccl_groups(
    store: Store, rank: int, torch_device: torch.device, form_seconds: float = FORM_SECONDS
) -> NewGroup:
    """Return the function that forms NCCL groups of this rank, in the store of an epoch.

    Each is formed on a thread of its own, for two reasons. NCCL would wait without a limit. And torch counts open
    `_start_coalescing` calls by thread; if the end of one has failed, that thread can no longer form groups.
    """

    def connected(name: str, members: Sequence[int]) -> Any:
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=MOST_WAIT_SECONDS)  # the guard is faster
        options.is_high_priority_stream = True  # transfers begin while a large kernel runs
        named = PrefixStore(f"nccl {name}", store)
        group = ProcessGroupNCCL(named, members.index(rank), len(members), options)
        group.eager_connect_single_device(torch_device)
        return group

    def form(name: str, members: Sequence[int]) -> Any:
        formed: Future[Any] = Future()

        def run() -> None:
            try:
                formed.set_result(connected(name, members))
            except BaseException as error:  # noqa: BLE001 - raised where the group is waited for
                formed.set_exception(error)

        Thread(target=run, daemon=True, name=f"form {name}").start()
        try:
            return formed.result(form_seconds)
        except TimeoutError:
            raise PartFailed(
                f"rank {rank} could not form {name} over NCCL within {form_seconds:g} s: one of its ranks hangs, as its "
                "own log says, or their GPUs cannot reach each other (NCCL_DEBUG=INFO shows why)"
            ) from None
        except RuntimeError as error:
            raise PartFailed(
                f"rank {rank} could not form {name} over NCCL ({first_line(error)}): one of its ranks ended or is cut "
                "off, as its own log says, or their GPUs cannot reach each other (NCCL_DEBUG=INFO shows why)"
            ) from error

    return form
