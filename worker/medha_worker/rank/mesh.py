"""The data plane of a replica's ranks: `torch.distributed` groups that carry tensors and nothing else.

Ranks rendezvous through the store of the leader (rank 0), then form one group per pod for tensor parallelism.
Between stages, hidden states go from a rank to the rank with the same tensor index in the next stage; sampled
tokens go from the last stage back to the first. Only tensors travel (object collectives would pickle), and
every wait is bounded.

The groups are created here rather than by `init_process_group`, whose state belongs to the process: it
numbers its group names, so a replaced rank would use other names than ranks that have formed groups before,
and they would never find each other. All groups use gloo, which sends and receives tensors in host memory
(`HOST`); there are no NCCL groups. Tensors on a device are copied to host memory and back, which waits for the
device.
"""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event
from typing import Any  # for gloo's groups, whose methods torch does not declare

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
from medha_worker.device import HOST

WAIT_SECONDS = 10.0
"""Bound of each receive and collective after the rendezvous; a rank that is silent for longer is lost."""
PATIENCE = 10.0
"""Longest silence of a stage whose steps take seconds, as a multiple of the predicted time.

The margin is wide because ranks may share cores. It is half of what the watchdog allows
(`timeouts.PATIENCE`), so that a waiting rank ends its wait before it is itself considered stuck.
"""
MOST_WAIT_SECONDS = 3600.0
_ROUND_SHARE = 0.1
"""Interval at which a rank that is warming up reports to the ranks that wait for it, as a share of their wait."""


class Mesh:
    """This rank's place in the grid, and its connections to the other ranks."""

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
        rendezvous_seconds: float,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Rendezvous with the other ranks at `endpoint` (`tcp://host:port` of rank 0); all must call this.

        `address` is this rank's own address, and the only one on which it listens: the data plane is not
        encrypted. `hidden_size` and `dtype` are those of the hidden states that travel between stages.
        `rendezvous_seconds` bounds the wait for rank 0 to listen, `wait_seconds` each wait after that.

        Raises:
            PartFailed: not all ranks arrived in time, or this rank cannot listen at `address`.
        """
        self.topology, self.rank = topology, rank
        self._hidden_size, self._dtype = hidden_size, dtype
        self._wait_seconds = wait_seconds
        self._wait = timedelta(seconds=wait_seconds)  # bound of waits in the running step
        self._predicted_seconds: deque[float] = deque(maxlen=max(topology.stream, 2) * topology.kv)
        self.here = here = topology.coordinates(rank)
        self.lane = here.kv
        self.is_first_stage = here.stream == 0
        self.stages = topology.stream
        self.is_last_stage = here.stream == topology.stream - 1
        self.sampling_rank = topology.rank(Coordinates(here.kv, topology.stream - 1, 0))  # of this lane
        self._expected: deque[tuple[Work | None, torch.Tensor]] = (
            deque()
        )  # hidden states that were not taken yet
        self._sent_hidden = _Sent(2 * topology.stream)
        self._sent_tokens = _Sent((2 * topology.stream + 2) * topology.tensor)
        pod = self._pod(here.kv, here.stream)
        store = _store(endpoint, rank, topology.ranks, rendezvous_seconds)
        try:
            with _sharing_the_core():
                device = ProcessGroupGloo.create_device(hostname=address)
        except RuntimeError as error:
            raise PartFailed(f"rank {rank} cannot listen at its own address, {address}: {error}") from error

        def group(name: str, members: Sequence[int]) -> Any:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # only these options take a device
            options._devices, options._timeout = [device], timedelta(seconds=wait_seconds)
            try:
                named = PrefixStore(f"{epoch}/{name}", store)
                return ProcessGroupGloo(named, members.index(rank), len(members), options)
            except RuntimeError as error:
                who, it = f"the other {len(members) - 1}", "one of them"
                # The key under which the missing rank would have stored its address.
                if awaited := re.search(r"keys: \S+/(\d+)$", _first_line(error)):
                    who, it = f"rank {members[int(awaited[1])]}", "it"
                raise PartFailed(
                    f"rank {rank} did not meet {who} of {name} within {wait_seconds:g} s: {it} ended, is cut "
                    f"off or did not come, and its own log says why ({_first_line(error)})"
                ) from error

        self._everyone = group("everyone", range(topology.ranks))
        self._gathering = group("gathering", range(topology.ranks))
        tensor_ranks = group(f"pod {pod[0]}", pod)
        self._store = store  # rank 0's store serves the others
        self.tensor_group = PodGroup(tensor_ranks, here.tensor, topology.tensor)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Report to the ranks waiting in `smallest` that this rank is alive, while the context lasts.

        Raises:
            PartFailed: another rank was lost meanwhile.
        """
        ended = Event()

        def announce() -> None:
            while not ended.wait(_ROUND_SHARE * self._wait_seconds):
                self._round(is_here=False)

        with ThreadPoolExecutor(1, "warming-up") as pool:
            announcing = pool.submit(announce)
            try:
                yield
            finally:
                ended.set()
            announcing.result()

    def smallest(self, value: int) -> int:
        """Return the smallest of all ranks' values, after waiting for ranks that are `warming_up`.

        Raises:
            PartFailed: a rank was lost.
        """
        while (found := self._round(value)) is None:
            pass
        return found

    def _round(self, value: int = 0, *, is_here: bool = True) -> int | None:
        """Exchange readiness and values with all ranks; return the smallest value if all are ready."""
        # Each round is short, however long a warm-up takes, so that a lost rank is noticed within the usual
        # bound.
        found = torch.tensor([int(is_here), value], dtype=torch.int64, device=HOST)
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
        """Begin the next step; return the longest predicted time of a step in flight, in seconds per stage.

        That time bounds all waits from here on: another lane may still be running a step ahead of one that it
        shares with this lane.
        """
        self._predicted_seconds.append(predicted_seconds)
        longest_seconds = max(self._predicted_seconds)
        seconds = min(max(self._wait_seconds, PATIENCE * longest_seconds), MOST_WAIT_SECONDS)
        self._wait = timedelta(seconds=seconds)
        self.tensor_group.wait_at_most(self._wait)
        return longest_seconds

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it to receive them."""
        work, kept = self._send(hidden.to(HOST).contiguous(), self._at_stage(self.here.stream + 1))
        self._sent_hidden.keep(work, kept, self._wait)

    def expect_hidden(self, rows: int) -> None:
        """Post the receive of the previous stage's hidden states, [rows, hidden_size].

        They then arrive while this rank computes. Gloo sends nothing before the receive is posted. Any single
        thread may call this, in the order of the steps.

        Raises:
            PartFailed: that stage is gone.
        """
        hidden = torch.empty(rows, self._hidden_size, dtype=self._dtype, device=HOST)
        before = self._at_stage(self.here.stream - 1)
        with self._waiting_for(before, "hidden states"):
            expected = self._everyone.recv([hidden], before, _TAG) if rows else None
        self._expected.append((expected, hidden))

    def receive_hidden(self) -> torch.Tensor:
        """Return the oldest expected hidden states, in host memory, once they have arrived.

        Raises:
            PartFailed: they do not arrive in time.
        """
        expected, hidden = self._expected.popleft()
        if expected is not None:
            with self._waiting_for(self._at_stage(self.here.stream - 1), "hidden states"):
                expected.wait(self._wait)
        return hidden

    def send_tokens(self, ids: Sequence[int]) -> None:
        """Send a step's tokens and their digest to all other ranks of the lane's first stage.

        Called on the sampling rank.
        """
        for rank in self._pod(self.here.kv, 0):
            if rank != self.rank:
                self._sent_tokens.keep(
                    *self._send(torch.tensor(ids, dtype=torch.int64, device=HOST), rank), self._wait
                )

    def receive_tokens(self, count: int) -> list[int]:
        """Receive the next step's tokens and digest from the sampling rank; called on the first stage."""
        ids = torch.empty(count, dtype=torch.int64, device=HOST)
        with self._waiting_for(self.sampling_rank, "sampled tokens"):
            self._everyone.recv([ids], self.sampling_rank, _TAG).wait(self._wait)
        return [int(token) for token in ids.tolist()]

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> _Transfers:
        """Begin to send each lane of `outgoing` its tensor, and to fill those of `incoming`.

        The peers are the ranks of the same stage and tensor index in the other lanes.
        """
        os.sched_yield()  # let gloo's thread finish before we take the lock that it may want
        ranks = {lane: self.topology.rank(replace(self.here, kv=lane)) for lane in (*outgoing, *incoming)}
        received = {lane: _like_on_host(tensor) for lane, tensor in incoming.items()}
        sent = {lane: tensor.to(HOST) for lane, tensor in outgoing.items()}
        works = [
            *(self._everyone.recv([received[lane]], ranks[lane], _TAG) for lane in sorted(incoming)),
            *(self._everyone.send([sent[lane]], ranks[lane], _TAG) for lane in sorted(outgoing)),
        ]
        landings = [
            (tensor, incoming[lane]) for lane, tensor in received.items() if tensor is not incoming[lane]
        ]
        return _Transfers(works, landings, sent)

    def finish(self, started: _Transfers) -> None:
        """Wait for all transfers that `start` returned.

        Raises:
            PartFailed: another lane was lost.
        """
        try:
            for work in started.works:
                work.wait(self._wait)
        except RuntimeError as error:
            raise PartFailed(f"rank {self.rank} lost another lane in a shared step: {error}") from error
        for received, target in started.landings:
            target.copy_(received)

    def lane_bytes_per_second(self, clock: Callable[[], float]) -> float:
        """Measure the rate to the next lane while as much arrives from the previous one; 0 for a single lane.

        All ranks measure together. `clock` returns seconds.
        """
        lanes = self.topology.kv
        if lanes == 1:
            return 0.0
        following, before = (self.lane + 1) % lanes, (self.lane - 1) % lanes
        sent, received = torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, device=HOST)
        seconds = []
        for _ in range(_PROBES):
            started = clock()
            self.finish(self.start({following: sent}, {before: received}))
            seconds.append(clock() - started)
        return _PROBE_BYTES / max(min(seconds), 1e-9)

    def close(self) -> None:
        """Close the connections, by which ranks that wait for this one notice at once that it has left."""
        self._expected.clear()
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


def _store(endpoint: str, rank: int, ranks: int, rendezvous_seconds: float) -> TCPStore:
    """Return the store for the rendezvous: rank 0 serves it at `endpoint`, and the others connect there."""
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
            timeout=timedelta(seconds=rendezvous_seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except RuntimeError as error:
        raise PartFailed(
            f"rank {rank} did not find rank 0 at {endpoint} within {rendezvous_seconds:g} s: it does not listen there, as its own log "
            f"says, or is cut off ({_first_line(error)})"
        ) from error


@contextmanager
def _sharing_the_core() -> Iterator[None]:
    """Keep threads started in this context from preempting a computing thread (`SCHED_BATCH`).

    Gloo's thread spins while another thread holds the lock of a connection, as the computing thread does when
    it sends. If gloo's thread preempted the computing thread just then, on a core that both share, it would
    spin until its time slice is over: milliseconds.
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
    """Return the first line of the message; torch appends its own stack."""
    return str(error).partition("\n")[0]


_PROBE_BYTES, _PROBES = 1 << 22, 3
_TAG = 0  # messages between two ranks keep their order


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Transfers between lanes that have begun."""

    works: Sequence[Work]
    landings: Sequence[tuple[torch.Tensor, torch.Tensor]]  # received in host memory, and where it belongs
    sent: Mapping[int, torch.Tensor]  # gloo reads them until they are received


def _like_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for what a tensor receives: the tensor itself if it is there."""
    return tensor if tensor.device == HOST else torch.empty_like(tensor, device=HOST)


class _Sent:
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
        self.captures = size == 1

    def wait_at_most(self, wait: timedelta) -> None:
        """Bound the wait of every collective that is begun from here on."""
        self._group.set_timeout(wait)

    def all_reduce(self, x: torch.Tensor) -> None:
        if self._size == 1:
            return
        summed = x.to(HOST)
        self._group.allreduce([summed]).wait()
        if summed is not x:
            x.copy_(summed)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        if self._size == 1:
            return x
        # Gather takes only equal shapes: pad to the widest.
        padded = torch.zeros(x.shape[0], max(widths), dtype=x.dtype, device=HOST)
        padded[:, : x.shape[1]] = x.to(HOST)
        parts = [torch.empty_like(padded) for _ in widths] if self._index == 0 else []
        self._group.gather([parts] if parts else [], [padded], GatherOptions()).wait()
        if not parts:
            return None
        gathered = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        return gathered.to(x.device)

    def close(self) -> None:
        self._group = None
