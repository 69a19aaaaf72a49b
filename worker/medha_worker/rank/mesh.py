"""This rank's place in the grid: the rendezvous with the other ranks, small messages of the host, and the data plane.

Ranks rendezvous through the store of the leader (rank 0), then form groups in host memory (`GlooGroups`), over which the
host exchanges readiness, sizes and sampled tokens. Tensors of steps go over the data plane, which is chosen
by the rank's device: all-reduces in a pod, hidden states from a rank to the rank with the same tensor index in the next
stage, and what lanes exchange. Only tensors travel (object collectives would pickle), and every wait is bounded.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from threading import Event

import torch
from torch.distributed import (  # type: ignore[attr-defined] # the stores are exported, but not declared so
    AllreduceOptions,
    PrefixStore,
    ReduceOp,
    TCPStore,
)

from medha.errors import PartFailed
from medha.topology import Topology
from medha_worker.device import HOST, Device
from medha_worker.rank.data_plane import (
    MOST_WAIT_SECONDS,
    TAG,
    DataPlane,
    NewPlane,
    PlaneSite,
    first_line,
    neighbours,
    pod_ranks,
    waiting_for,
)
from medha_worker.rank.gloo_groups import GlooGroups, Sent
from medha_worker.rank.plane_choice import choose_plane

WAIT_SECONDS = 10.0
"""Least bound of each receive and collective after the rendezvous; a rank that is silent for longer is lost.

Waits in a step that is predicted to take long have a longer bound (`PATIENCE`).
"""
PATIENCE = 10.0
"""Longest silence of a stage whose steps take seconds, as a multiple of the predicted time.

The margin is wide because ranks may share cores. It is half of what the watchdog allows
(`timeouts.PATIENCE`), so that a waiting rank ends its wait before it is itself considered stuck.
"""
_ROUND_SHARE = 0.1
"""Interval at which a rank that is warming up reports to the ranks that wait for it, as a share of their wait."""
_PROBE_BYTES, _PROBES = 1 << 22, 3


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
        device: Device,
        rendezvous_seconds: float,
        wait_seconds: float = WAIT_SECONDS,
        new_plane: NewPlane = choose_plane,
    ) -> None:
        """Rendezvous with the other ranks at `endpoint` (`tcp://host:port` of rank 0); all must call this.

        `address` is this rank's own address, and the only one on which it listens: the data plane is not
        encrypted. `hidden_size`, and the dtype of `device`, are those of the hidden states that travel between stages.
        `rendezvous_seconds` bounds the wait for rank 0 to listen, `wait_seconds` each wait after that.

        Raises:
            PartFailed: not all ranks arrived in time, or this rank cannot listen at `address`.
        """
        self.topology, self.rank = topology, rank
        self._device = device
        self._wait_seconds = wait_seconds
        self._wait = timedelta(seconds=wait_seconds)  # bound of waits in the running step
        self._predicted_seconds: deque[float] = deque(maxlen=max(topology.stream, 2) * topology.kv)
        self.here = here = topology.coordinates(rank)
        self.lane = here.kv
        self.is_first_stage = here.stream == 0
        self.stages = topology.stream
        self.is_last_stage = here.stream == topology.stream - 1
        self.sampling_rank = pod_ranks(topology, replace(here, stream=topology.stream - 1))[0]  # of this lane
        self.samples = rank == self.sampling_rank
        self._sent_tokens = Sent((2 * topology.stream + 2) * topology.tensor)
        self._store = _store(endpoint, rank, topology.ranks, rendezvous_seconds)  # rank 0's serves the others
        of_epoch = PrefixStore(f"{epoch}", self._store)
        groups = GlooGroups(of_epoch, rank, address, self._wait)
        self._everyone = groups.form("everyone", range(topology.ranks))
        self._gathering = groups.form("gathering", range(topology.ranks))
        site = PlaneSite(
            neighbours(topology, rank),
            device,
            hidden_size,
            topology.stream,
            self._wait,
            self._everyone,
            groups.form,
            of_epoch,
        )
        self.plane = self._formed(new_plane, site)
        self.tensor_group = self.plane.tensor_group

    def _formed(self, new_plane: NewPlane, site: PlaneSite) -> DataPlane:
        """Form the data plane, and wait until all ranks have; NCCL takes long, and some ranks form more groups."""
        plane: DataPlane | None = None
        try:
            with self._reporting(lambda _: None):
                plane = new_plane(site)
            self.smallest(0)
        except BaseException:
            if plane is not None:
                plane.close()
            raise
        return plane

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Report to the ranks waiting in `smallest` that this rank is alive, while the context lasts.

        If another rank is lost, this ends what the data plane waits for.

        Raises:
            PartFailed: another rank was lost meanwhile.
        """
        with self._reporting(self.plane.abort):
            yield

    @contextmanager
    def _reporting(self, on_loss: Callable[[str], None]) -> Iterator[None]:
        """Report as `warming_up` does; call `on_loss`, on another thread, once another rank is lost."""
        ended = Event()

        def announce() -> None:
            while not ended.wait(_ROUND_SHARE * self._wait_seconds):
                try:
                    self._round(is_here=False)
                except PartFailed as error:
                    on_loss(str(error))
                    raise

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
                f"rank {self.rank} lost another rank while all of them gathered: {first_line(error)}"
            ) from error
        all_here, least = found.tolist()
        return int(least) if all_here else None

    def total_in_pod(self, count: int) -> int:
        """Return the sum of a count over the tensor ranks of this pod.

        Raises:
            PartFailed: one of them was lost.
        """
        total = self._device.place(torch.tensor([count], device=HOST))
        self.plane.bound(self._wait)
        self.tensor_group.all_reduce(total)
        found = int(total)
        self.plane.check()
        return found

    def begin_step(self, predicted_seconds: float) -> float:
        """Begin the next step; return the longest predicted time of a step in flight, in seconds per stage.

        That time bounds all waits from here on: another lane may still be running a step ahead of one that it
        shares with this lane.
        """
        self._predicted_seconds.append(predicted_seconds)
        longest_seconds = max(self._predicted_seconds)
        seconds = min(max(self._wait_seconds, PATIENCE * longest_seconds), MOST_WAIT_SECONDS)
        self._wait = timedelta(seconds=seconds)
        self.plane.bound(self._wait)
        return longest_seconds

    def end_step(self) -> None:
        """End the step that `begin_step` began, once the device has run it.

        Raises:
            PartFailed: a rank was lost, so that its results are void.
        """
        self.plane.check()

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it to receive them."""
        self.plane.send_hidden(hidden)

    def expect_hidden(self, rows: int) -> None:
        """Post the receive of the previous stage's hidden states, as `DataPlane.expect_hidden` does.

        Raises:
            PartFailed: that stage is gone.
        """
        self.plane.expect_hidden(rows)

    def receive_hidden(self) -> torch.Tensor:
        """Return the oldest expected hidden states, [rows, hidden_size], in any memory.

        Raises:
            PartFailed: they do not arrive in time.
        """
        return self.plane.receive_hidden()

    def send_tokens(self, ids: Sequence[int]) -> None:
        """Send a step's tokens and their digest to all other ranks of the lane's first stage.

        Called on the sampling rank, once the device has sampled them.

        Raises:
            PartFailed: a rank was lost, so that the tokens are void.
        """
        self.plane.check()
        for rank in pod_ranks(self.topology, replace(self.here, stream=0)):
            if rank != self.rank:
                tokens = torch.tensor(ids, dtype=torch.int64, device=HOST)
                self._sent_tokens.keep(self._everyone.send([tokens], rank, TAG), tokens, self._wait)

    def receive_tokens(self, count: int) -> list[int]:
        """Receive the next step's tokens and digest from the sampling rank; called on the first stage."""
        ids = torch.empty(count, dtype=torch.int64, device=HOST)
        with waiting_for(self.rank, self.sampling_rank, "sampled tokens"):
            self._everyone.recv([ids], self.sampling_rank, TAG).wait(self._wait)
        self.plane.bound(self._wait)  # later waits of the step have the whole bound again
        return [int(token) for token in ids.tolist()]

    def lane_bytes_per_second(self, clock: Callable[[], float]) -> float:
        """Measure the rate at which this rank sends to the next lane while the previous lane sends to it; 0 for a single lane.

        All ranks measure together. `clock` returns seconds.
        """
        lanes = self.topology.kv
        if lanes == 1:
            return 0.0
        following, before = (self.lane + 1) % lanes, (self.lane - 1) % lanes
        sent, received = self._device.place(torch.zeros(2, _PROBE_BYTES, dtype=torch.uint8, device=HOST))
        seconds = []
        for _ in range(_PROBES):
            self._device.synchronise()
            started = clock()
            self.plane.bound(self._wait)
            self.plane.finish(self.plane.start({following: sent}, {before: received}))
            self._device.synchronise()
            seconds.append(clock() - started)
            self.plane.check()
        return _PROBE_BYTES / max(min(seconds), 1e-9)

    def close(self) -> None:
        """Close the connections, so that ranks that wait for this one notice at once that it has left."""
        self._sent_tokens.forget()
        self.plane.close()
        del self._everyone, self._gathering, self._store


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
            f"says, or is cut off ({first_line(error)})"
        ) from error
