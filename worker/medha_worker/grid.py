"""The data plane of a replica's ranks: `torch.distributed` groups for tensors, and nothing else.

Ranks meet through the leader's store (rank 0), then form one group per pod for tensor parallelism. Between stages,
hidden states go from a rank to the one with the same tensor index in the next stage, and drawn tokens go from the
last stage back to the first. Only tensors travel (object collectives would pickle), and every wait has a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from medha.errors import PartFailed
from medha.topology import Coordinates, Topology

WAIT_SECONDS = 10.0
"""Bound of each receive and collective once the ranks have met: a rank that is silent for longer is lost."""


class Grid:
    """This rank's place in the grid, and its ways to the others."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        endpoint: str,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        meet_seconds: float,
    ) -> None:
        """Meet the other ranks at `endpoint` (`tcp://host:port` of rank 0); all of them must call this.

        `hidden_size` and `dtype` are those of the hidden states that travel between stages.

        Raises:
            PartFailed: they did not all come within `meet_seconds`.
        """
        self.topology, self.rank = topology, rank
        self._hidden_size, self._dtype = hidden_size, dtype
        self.here = here = topology.coordinates(rank)
        self.is_first_stage = here.stream == 0
        self.is_last_stage = here.stream == topology.stream - 1
        self.drawing_rank = topology.rank(Coordinates(here.kv, topology.stream - 1, 0))  # of this lane
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        try:
            dist.init_process_group(
                "gloo",
                init_method=endpoint,
                rank=rank,
                world_size=topology.ranks,
                timeout=timedelta(seconds=meet_seconds),
            )
            pods = [self._pod(kv, stage) for kv in range(topology.kv) for stage in range(topology.stream)]
            wait = timedelta(seconds=WAIT_SECONDS)
            groups = {pod[0]: dist.new_group(pod, timeout=wait, backend="gloo") for pod in pods}
            # Point to point between stages; a group of its own, so that its bound is the short one.
            self._everyone = dist.new_group(timeout=wait, backend="gloo")
        except (RuntimeError, ValueError) as error:
            raise PartFailed(
                f"rank {rank} did not meet the other {topology.ranks - 1} at {endpoint} within {meet_seconds:g} s: "
                f"{error}; their own logs say why"
            ) from error
        pod = self._pod(self.here.kv, self.here.stream)
        self.tensor_group = PodGroup(groups[pod[0]], pod, self.here.tensor)

    def smallest(self, value: int) -> int:
        """The least of all ranks' values."""
        found = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._everyone)
        return int(found)

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it to take them."""
        self._send(hidden.contiguous(), self._at_stage(self.here.stream + 1))

    def receive_hidden(self, rows: int) -> torch.Tensor:
        """What the previous stage sends next: [rows, hidden_size]."""
        hidden = torch.empty(rows, self._hidden_size, dtype=self._dtype)
        if rows > 0:
            self._receive(hidden, self._at_stage(self.here.stream - 1), "hidden states")
        return hidden

    def send_tokens(self, ids: Sequence[int]) -> None:
        """From the rank that has drawn: the tokens of a step, to every rank of the lane's first stage but itself."""
        for rank in self._pod(self.here.kv, 0):
            if rank != self.rank:
                self._send(torch.tensor(ids, dtype=torch.int64), rank)

    def receive_tokens(self, count: int) -> list[int]:
        """On the first stage: the next step's tokens, from the rank that has drawn them."""
        ids = torch.empty(count, dtype=torch.int64)
        self._receive(ids, self.drawing_rank, "drawn tokens")
        return [int(token) for token in ids.tolist()]

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Between lanes, at this stage and tensor index: send each lane its tensor, and fill those that come back."""
        here = self.here
        works = [
            post(tensor, self.topology.rank(replace(here, kv=lane)), group=self._everyone)
            for post, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
            for lane, tensor in sorted(tensors.items())
        ]
        try:
            for work in works:
                assert work is not None, "this rank is in the group"
                work.wait()
        except RuntimeError as error:
            lanes = sorted({*outgoing, *incoming})
            raise PartFailed(
                f"rank {self.rank} lost one of lanes {lanes} in a shared step: {error}"
            ) from error

    def close(self) -> None:
        """Leave; the others notice by their next wait."""
        dist.destroy_process_group()

    def _pod(self, kv: int, stage: int) -> list[int]:
        return [self.topology.rank(Coordinates(kv, stage, tensor)) for tensor in range(self.topology.tensor)]

    def _at_stage(self, stage: int) -> int:
        return self._pod(self.here.kv, stage)[self.here.tensor]

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        work = dist.isend(tensor, rank, group=self._everyone)
        assert work is not None
        self._sent.append((work, tensor))  # gloo reads the tensor until it is sent

    def _receive(self, tensor: torch.Tensor, rank: int, what: str) -> None:
        try:
            dist.recv(tensor, rank, group=self._everyone)
        except RuntimeError as error:
            raise PartFailed(
                f"rank {self.rank} waits for {what} of rank {rank}, and lost it: {error}"
            ) from error


class PodGroup:
    """The tensor ranks of one pod, as the model's `TensorGroup`."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], index: int) -> None:
        self._group, self._ranks, self._index = group, list(ranks), index

    def all_reduce(self, x: torch.Tensor) -> None:
        if len(self._ranks) > 1:
            dist.all_reduce(x, group=self._group)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        if len(self._ranks) == 1:
            return x
        # Equal shapes are all that gather takes: pad to the widest.
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in widths] if self._index == 0 else None
        dist.gather(padded, parts, dst=self._ranks[0], group=self._group)
        if parts is None:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
