"""The data plane of a replica's ranks: `torch.distributed` groups for tensors, and nothing else.

Ranks meet through the leader's store (rank 0), then form one group per pod for tensor parallelism. Between stages,
hidden states go from a rank to the one with the same tensor index in the next stage, and drawn tokens go from the
last stage back to the first. Only tensors travel (object collectives would pickle), and every wait has a bound.

Groups are made here rather than by `init_process_group`, whose state belongs to the process: names that it counts up
differ between a rank that was replaced and those that have met before, so that they would never find each other.
They are gloo's, whatever computes: there is no NCCL yet.
"""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import Any  # of gloo's groups: torch declares none of their methods

import torch
from torch.distributed import (  # type: ignore[attr-defined] # the stores are exported, but not declared so
    AllreduceOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    TCPStore,
    Work,
)

from medha.errors import PartFailed
from medha.topology import Coordinates, Topology

WAIT_SECONDS = 10.0
"""Bound of each receive and collective once the ranks have met: a rank that is silent for longer is lost."""
PATIENCE = 10.0
"""Where a stage takes seconds, it may be silent for so many times as long as was predicted: ranks may share their cores.

Half of what the watchdog allows (`timeouts.PATIENCE`), so that who waits leaves before it is itself taken for stuck.
"""
MOST_WAIT_SECONDS = 3600.0
_ROUND_SHARE = 0.1
"""How often a rank that warms up is heard by those that wait for it, as a share of that bound."""


class Grid:
    """This rank's place in the grid, and its ways to the others."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        endpoint: str,
        *,
        address: str,
        epoch: int,
        hidden_size: int,
        dtype: torch.dtype,
        meet_seconds: float,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Meet the other ranks at `endpoint` (`tcp://host:port` of rank 0); all of them must call this.

        `address` is this rank's own, and the only one on which it listens: the data plane is not encrypted.
        `hidden_size` and `dtype` are those of the hidden states that travel between stages. `meet_seconds` bounds the
        wait for rank 0 to listen, `wait_seconds` each wait after that.

        Raises:
            PartFailed: they did not all come in time, or this one cannot listen where it should.
        """
        self.topology, self.rank = topology, rank
        self._hidden_size, self._dtype = hidden_size, dtype
        self._wait_seconds = wait_seconds
        self._wait = timedelta(seconds=wait_seconds)  # of the step that runs
        self._predicted_seconds: deque[float] = deque(maxlen=max(topology.stream, 2) * topology.kv)
        self.here = here = topology.coordinates(rank)
        self.lane = here.kv
        self.is_first_stage = here.stream == 0
        self.stages = topology.stream
        self.is_last_stage = here.stream == topology.stream - 1
        self.drawing_rank = topology.rank(Coordinates(here.kv, topology.stream - 1, 0))  # of this lane
        self._coming: deque[tuple[Work | None, torch.Tensor]] = (
            deque()
        )  # hidden states that were not taken yet
        self._sent_hidden = _Sent(2 * topology.stream)
        self._sent_tokens = _Sent((2 * topology.stream + 2) * topology.tensor)
        pod = self._pod(here.kv, here.stream)
        store = _store(endpoint, rank, topology.ranks, meet_seconds)
        try:
            with _sharing_the_core():
                device = ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise PartFailed(f"rank {rank} cannot listen at its own address, {address}: {error}") from error

        def group(name: str, members: Sequence[int]) -> Any:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # only so can a device be named
            options._devices, options._timeout = [device], timedelta(seconds=wait_seconds)
            try:
                named = PrefixStore(f"{epoch}/{name}", store)
                return ProcessGroupGloo(named, members.index(rank), len(members), options)
            except RuntimeError as error:
                who, it = f"the other {len(members) - 1}", "one of them"
                # The key under which the one that is missing would have left its address.
                if awaited := re.search(r"keys: \S+/(\d+)$", _first_line(error)):
                    who, it = f"rank {members[int(awaited[1])]}", "it"
                raise PartFailed(
                    f"rank {rank} did not meet {who} of {name} within {wait_seconds:g} s: {it} ended, is cut "
                    f"off or did not come, and its own log says why ({_first_line(error)})"
                ) from error

        self._everyone = group("everyone", range(topology.ranks))
        self._gathering = group("gathering", range(topology.ranks))
        tensor_ranks = group(f"pod {pod[0]}", pod)
        self._store = store  # rank 0's serves the others
        self.tensor_group = PodGroup(tensor_ranks, here.tensor, topology.tensor)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """While this lasts, those that wait in `smallest` hear again and again that this rank lives.

        Raises:
            PartFailed: another rank was lost meanwhile.
        """
        ended = Event()

        def tell() -> None:
            while not ended.wait(_ROUND_SHARE * self._wait_seconds):
                self._round(is_here=False)

        with ThreadPoolExecutor(1, "warming-up") as pool:
            telling = pool.submit(tell)
            try:
                yield
            finally:
                ended.set()
            telling.result()

    def smallest(self, value: int) -> int:
        """The least of all ranks' values; waits for those that are `warming_up`.

        Raises:
            PartFailed: nothing is heard of one of them.
        """
        while (found := self._round(value)) is None:
            pass
        return found

    def _round(self, value: int = 0, *, is_here: bool = True) -> int | None:
        """All ranks say whether they are here, and their values; the least one once all are."""
        # Each round is short, however long a warm-up takes: so a rank that is lost is missed within the usual bound.
        found = torch.tensor([int(is_here), value], dtype=torch.int64)
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        try:
            self._gathering.allreduce([found], options).wait()
        except RuntimeError as error:
            raise PartFailed(
                f"rank {self.rank} lost another rank while all of them gathered: {_first_line(error)}"
            ) from error
        all_here, least = found.tolist()
        return int(least) if all_here else None

    def begin_step(self, predicted_seconds: float) -> float:
        """The next step begins, which takes a stage so long; seconds that any step in flight takes one at the most.

        That bounds the waits from here on: another lane may still be at a step ahead of one that is shared with it.
        """
        self._predicted_seconds.append(predicted_seconds)
        longest_seconds = max(self._predicted_seconds)
        seconds = min(max(self._wait_seconds, PATIENCE * longest_seconds), MOST_WAIT_SECONDS)
        self._wait = timedelta(seconds=seconds)
        self.tensor_group.wait_at_most(self._wait)
        return longest_seconds

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it to take them."""
        work, kept = self._send(hidden.contiguous(), self._at_stage(self.here.stream + 1))
        self._sent_hidden.keep(work, kept, self._wait)

    def expect_hidden(self, rows: int) -> None:
        """The previous stage will send [rows, hidden_size]. They come while this rank computes; gloo sends nothing before.

        Any one thread may call this, in the order of the steps.

        Raises:
            PartFailed: that stage has gone.
        """
        hidden = torch.empty(rows, self._hidden_size, dtype=self._dtype)
        before = self._at_stage(self.here.stream - 1)
        with self._waiting_for(before, "hidden states"):
            coming = self._everyone.recv([hidden], before, _TAG) if rows else None
        self._coming.append((coming, hidden))

    def receive_hidden(self) -> torch.Tensor:
        """The first of what is expected, once it is here.

        Raises:
            PartFailed: it does not come in time.
        """
        coming, hidden = self._coming.popleft()
        if coming is not None:
            with self._waiting_for(self._at_stage(self.here.stream - 1), "hidden states"):
                coming.wait(self._wait)
        return hidden

    def send_tokens(self, ids: Sequence[int]) -> None:
        """From the rank that has drawn: a step's tokens and their digest, to every rank of the lane's first stage but itself."""
        for rank in self._pod(self.here.kv, 0):
            if rank != self.rank:
                self._sent_tokens.keep(*self._send(torch.tensor(ids, dtype=torch.int64), rank), self._wait)

    def receive_tokens(self, count: int) -> list[int]:
        """On the first stage: the next step's tokens and their digest, from the rank that has drawn them."""
        ids = torch.empty(count, dtype=torch.int64)
        with self._waiting_for(self.drawing_rank, "drawn tokens"):
            self._everyone.recv([ids], self.drawing_rank, _TAG).wait(self._wait)
        return [int(token) for token in ids.tolist()]

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> list[Work]:
        """Between lanes, at this stage and tensor index: begin to send each lane its tensor, and to fill those that come."""
        os.sched_yield()  # what gloo's thread has put off is done before we take the lock that it may want
        ranks = {lane: self.topology.rank(replace(self.here, kv=lane)) for lane in (*outgoing, *incoming)}
        return [
            *(self._everyone.recv([incoming[lane]], ranks[lane], _TAG) for lane in sorted(incoming)),
            *(self._everyone.send([outgoing[lane]], ranks[lane], _TAG) for lane in sorted(outgoing)),
        ]

    def finish(self, works: Sequence[Work]) -> None:
        """Wait for all that was started."""
        try:
            for work in works:
                work.wait(self._wait)
        except RuntimeError as error:
            raise PartFailed(f"rank {self.rank} lost another lane in a shared step: {error}") from error

    def lane_bytes_per_second(self, clock: Callable[[], float]) -> float:
        """How fast a tensor reaches the next lane while as much comes from the one before; 0 where there is one lane.

        All ranks measure together. `clock` gives seconds.
        """
        lanes = self.topology.kv
        if lanes == 1:
            return 0.0
        following, before = (self.lane + 1) % lanes, (self.lane - 1) % lanes
        sent, received = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8)
        seconds = []
        for _ in range(_PROBES):
            started = clock()
            self.finish(self.start({following: sent}, {before: received}))
            seconds.append(clock() - started)
        return _PROBE_BYTES / max(min(seconds), 1e-9)

    def close(self) -> None:
        """Leave: connections close, which is how those who wait for this rank notice at once."""
        self._coming.clear()
        self._sent_hidden.forget()
        self._sent_tokens.forget()
        self.tensor_group.close()
        del self._everyone, self._gathering, self._store

    def _pod(self, kv: int, stage: int) -> list[int]:
        return [self.topology.rank(Coordinates(kv, stage, tensor)) for tensor in range(self.topology.tensor)]

    def _at_stage(self, stage: int) -> int:
        return self._pod(self.here.kv, stage)[self.here.tensor]

    def _send(self, tensor: torch.Tensor, rank: int) -> tuple[Work, torch.Tensor]:
        return self._everyone.send([tensor], rank, _TAG), tensor

    @contextmanager
    def _waiting_for(self, rank: int, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PartFailed(
                f"rank {self.rank} waits for {what} of rank {rank}, and lost it: {error}"
            ) from error


def _store(endpoint: str, rank: int, ranks: int, meet_seconds: float) -> TCPStore:
    """Where the ranks find each other: rank 0 serves it at `endpoint`, and the others call there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    listening = None
    if rank == 0:
        try:
            listening = socket.create_server((host, int(port)), backlog=ranks).detach()
        except OSError as error:
            raise PartFailed(
                f"rank 0 cannot listen at {endpoint} for the other {ranks - 1}: {error}"
            ) from error
    try:
        return TCPStore(
            host,
            int(port),
            is_master=rank == 0,
            timeout=timedelta(seconds=meet_seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except RuntimeError as error:
        raise PartFailed(
            f"rank {rank} did not find rank 0 at {endpoint} within {meet_seconds:g} s: it does not listen there, as its own log "
            f"says, or is cut off ({_first_line(error)})"
        ) from error


@contextmanager
def _sharing_the_core() -> Iterator[None]:
    """Threads that are started here never interrupt one that computes: they run on a free core, or when their turn comes.

    Gloo's thread spins while another one holds the lock of a connection, as the computing thread does when it sends. Were the
    computing thread interrupted just then, on a core that both share, gloo's would spin until its turn is over: milliseconds.
    """
    is_changed = False
    with suppress(
        OSError
    ):  # sandboxes refuse it in several ways; without it, the computing thread only loses time
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_changed = True
    try:
        yield
    finally:
        if is_changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _first_line(error: RuntimeError) -> str:
    """Torch puts its own stack behind it."""
    return str(error).partition("\n")[0]


_PROBE_BYTES, _PROBES = 1 << 22, 3
_TAG = 0  # messages between two ranks keep their order


class _Sent:
    """Tensors on their way: gloo reads them until they are taken, and knows that they are only when it is waited for.

    Beyond `most`, the oldest has been taken: the controller lets no more steps into the pipeline than it has stages, and one
    more into a single stage.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[tuple[Work, torch.Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._works)

    def keep(self, work: Work, tensor: torch.Tensor, wait: timedelta) -> None:
        self._works.append((work, tensor))
        while len(self._works) > self._most:
            self._works.popleft()[0].wait(wait)

    def forget(self) -> None:
        self._works.clear()


class PodGroup:
    """The tensor ranks of one pod, as the model's `TensorGroup`."""

    def __init__(self, group: Any, index: int, size: int) -> None:
        self._group: Any = group
        self._index, self._size = index, size

    def wait_at_most(self, wait: timedelta) -> None:
        """Bound what is begun from here on."""
        self._group.set_timeout(wait)

    def all_reduce(self, x: torch.Tensor) -> None:
        if self._size > 1:
            self._group.allreduce([x]).wait()

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        if self._size == 1:
            return x
        # Equal shapes are all that gather takes: pad to the widest.
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths] if self._index == 0 else []
        self._group.gather([parts] if parts else [], [padded], GatherOptions()).wait()
        if not parts:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def close(self) -> None:
        self._group = None
