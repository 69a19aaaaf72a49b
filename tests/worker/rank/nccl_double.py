"""Doubles of torch's NCCL groups: one that records what it is asked, and one that carries it out over gloo.

Both have what `NcclPlane` and `LossGuard` call, with the semantics that torch documents: each group runs its operations
one after the other, beside those of other groups, and what is sent and received between `_start_coalescing`
and `_end_coalescing` is one operation. `test_nccl_plane.py` compares their methods with those of torch's own class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
from torch._C._distributed_c10d import ErrorType
from torch.distributed import AllreduceOptions, GatherOptions

from medha_worker.rank.data_plane import DataPlane, NewGroup, PlaneSite
from medha_worker.rank.nccl_plane import NcclPlane

Entry = tuple[Any, ...]


class Recording:
    """A group in which nothing happens: `log` gets every call, with ranks of the grid for their indices in the group."""

    def __init__(self, log: list[Entry], members: Sequence[int]) -> None:
        self._log, self._members = log, list(members)
        self.error = ErrorType.SUCCESS
        self.aborted = Event()
        self.let_go = Event()
        self.let_go.set()

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions | None = None) -> RecordedWork:
        self._add("allreduce", tuple(self._members), tensors)
        return self._work("allreduce", options)

    def gather(
        self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: GatherOptions
    ) -> RecordedWork:
        assert all(part.shape == tensors[0].shape for received in parts for part in received)
        self._add("gather", tuple(self._members), tensors)
        return self._work("gather", options)

    def send(self, tensors: list[torch.Tensor], index: int, tag: int) -> RecordedWork:
        self._add("send", self._members[index], tensors)
        return RecordedWork(self._log, "send")

    def recv(self, tensors: list[torch.Tensor], index: int, tag: int) -> RecordedWork:
        self._add("recv", self._members[index], tensors)
        return RecordedWork(self._log, "recv")

    def set_timeout(self, wait: Any) -> None: ...

    def _start_coalescing(self) -> None:
        self._log.append(("begin",))

    def _end_coalescing(self) -> RecordedWork:
        self._log.append(("end",))
        return RecordedWork(self._log, "exchange")

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        """Return only once the test lets go, as NCCL does while captured steps exist."""
        self.aborted.set()
        self.let_go.wait(60)

    def _add(self, what: str, peer: Any, tensors: Sequence[torch.Tensor]) -> None:
        (tensor,) = tensors
        assert tensor.is_contiguous()
        self._log.append((what, peer, tensor.numel(), tensor.dtype, tensor.device.type))

    def _work(self, what: str, options: Any) -> Any:
        """Return no work for an operation on the stream of the calling thread, as NCCL does."""
        return RecordedWork(self._log, what) if options is None or options.asyncOp else None


class RecordedWork:
    def __init__(self, log: list[Entry], what: str) -> None:
        self._log, self._what = log, what

    def wait(self, timeout: Any = None) -> bool:
        self._log.append(("host waits", self._what))
        return True

    def block_current_stream(self) -> None:
        self._log.append(("stream waits", self._what))


class OverGloo:
    """A group whose operations run one after the other on a thread, over gloo."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._stream = ThreadPoolExecutor(1)
        self._together: list[Callable[[], Any]] | None = None

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> None:
        assert not options.asyncOp
        self._run([lambda: self._group.allreduce(tensors)]).block_current_stream()

    def gather(
        self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: GatherOptions
    ) -> None:
        assert not options.asyncOp
        self._run([lambda: self._group.gather(parts, tensors, GatherOptions())]).block_current_stream()

    def send(self, tensors: list[torch.Tensor], index: int, tag: int) -> Any:
        return self._add(lambda: self._group.send(tensors, index, tag))

    def recv(self, tensors: list[torch.Tensor], index: int, tag: int) -> Any:
        return self._add(lambda: self._group.recv(tensors, index, tag))

    def _start_coalescing(self) -> None:
        assert self._together is None
        self._together = []

    def _end_coalescing(self) -> OnStream:
        assert self._together is not None
        together, self._together = self._together, None
        return self._run(together)

    def get_error(self) -> ErrorType:
        return ErrorType.SUCCESS

    def abort(self) -> None:
        self._group = None  # others notice that the connection is closed
        self._stream.shutdown(wait=False)

    def _add(self, operation: Callable[[], Any]) -> Any:
        if self._together is None:
            return self._run([operation])
        self._together.append(operation)
        return None

    def _run(self, operations: list[Callable[[], Any]]) -> OnStream:
        @torch.inference_mode()
        def run() -> None:
            for work in [operation() for operation in operations]:
                work.wait()

        return OnStream(self._stream.submit(run))


class OnStream:
    """An operation on a group's thread."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def block_current_stream(self) -> None:
        self._done.result()


def over_gloo(site: PlaneSite) -> DataPlane:
    """Return an `NcclPlane` whose groups are formed over gloo, on the device of the rank."""

    def form(name: str, members: Sequence[int]) -> OverGloo:
        return OverGloo(site.host_group(name, members))

    return NcclPlane(site.neighbours, site.device, site.hidden_size, form)


def recording(log: list[Entry]) -> NewGroup:
    """Return the function that forms groups which record to `log`."""
    return lambda _name, members: Recording(log, members)
