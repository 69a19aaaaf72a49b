"""The data plane of a rank: the groups that carry a step's tensors, behind one interface over gloo and NCCL.

A plane lives for one epoch. It adds up and gathers tensors in a pod, passes hidden states from stage to stage, and
exchanges tensors between lanes. Everything small that the host needs (readiness, sizes, token ids) goes
over the groups of `Mesh`, whatever the plane is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol  # Any is for torch's groups, whose methods torch does not declare

import torch
from torch.distributed import Store  # type: ignore[attr-defined] # exported, but not declared so

from medha.errors import PartFailed
from medha.topology import Coordinates, Topology
from medha_worker.device import Device
from medha_worker.model.tensor_group import TensorGroup

MOST_WAIT_SECONDS = 3600.0
"""No wait for another rank is longer, whatever a step was predicted to take."""
TAG = 0  # messages between two ranks keep their order
NewGroup = Callable[[str, Sequence[int]], Any]
"""Function that forms a group, of a name and the ranks in it; all of them must call it. It raises `PartFailed`."""


class DataPlane(Protocol):
    """The connections that carry tensors; `TensorGroup` within the pod, and `LaneLinks` to the other lanes.

    Tensors are on the rank's device. Received tensors may be used by all work that the calling thread gives to the device
    after the call. Calls raise `PartFailed` or `RuntimeError` if another rank was lost.
    """

    lane: int
    tensor_group: TensorGroup

    def bound(self, wait: timedelta) -> None:
        """Begin or continue a step: from here on, no wait for another rank may take longer than `wait`."""
        ...

    def check(self) -> None:
        """End the step that `bound` began, once the device has run it.

        Raises:
            PartFailed: a rank was lost, so that what the device has computed since `bound` is void.
        """
        ...

    def abort(self, reason: str) -> None:
        """End all waits of other threads for a rank that was lost; any thread may call this."""
        ...

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send a step's hidden states to the next stage, without waiting for it to receive them."""
        ...

    def expect_hidden(self, rows: int) -> None:
        """Post the receive of the previous stage's hidden states, [rows, hidden_size].

        They then arrive while this rank computes. Any single thread may call this, in the order of the steps.
        """
        ...

    def receive_hidden(self) -> torch.Tensor:
        """Return the oldest expected hidden states, in any memory."""
        ...

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Any:
        """Begin to send each lane of `outgoing` its tensor, and to fill those of `incoming`.

        The peers are the ranks of the same stage and tensor index in the other lanes.
        """
        ...

    def finish(self, started: Any) -> None:
        """Wait for all transfers that `start` returned."""
        ...

    def close(self) -> None:
        """Close the connections. Captured work that uses them must be gone by then, or go right after."""
        ...


@dataclass(frozen=True)
class Neighbours:
    """The ranks that a rank exchanges tensors with."""

    rank: int
    lane: int
    stage: int
    tensor: int
    """Index of the rank in its pod."""
    pod: tuple[int, ...]
    """Tensor ranks of its pod, by index, the rank included."""
    lanes: tuple[int, ...]
    """Ranks of its stage and tensor index, by lane, the rank included."""
    previous: int | None
    """Rank of its tensor index in the previous stage of its lane; None on the first stage."""
    following: int | None
    """Rank of its tensor index in the next stage of its lane; None on the last stage."""


def neighbours(topology: Topology, rank: int) -> Neighbours:
    """Return the ranks that `rank` exchanges tensors with."""
    here = topology.coordinates(rank)

    def at_stage(stage: int) -> int | None:
        return topology.rank(replace(here, stream=stage)) if 0 <= stage < topology.stream else None

    return Neighbours(
        rank=rank,
        lane=here.kv,
        stage=here.stream,
        tensor=here.tensor,
        pod=pod_ranks(topology, here),
        lanes=tuple(topology.rank(replace(here, kv=lane)) for lane in range(topology.kv)),
        previous=at_stage(here.stream - 1),
        following=at_stage(here.stream + 1),
    )


def pod_ranks(topology: Topology, here: Coordinates) -> tuple[int, ...]:
    """Return the tensor ranks of the pod that has the rank at `here`, by index."""
    return tuple(topology.rank(replace(here, tensor=tensor)) for tensor in range(topology.tensor))


@dataclass(frozen=True)
class PlaneSite:
    """The parts from which a rank makes its plane, once it has rendezvoused with the others."""

    neighbours: Neighbours
    device: Device
    hidden_size: int
    stages: int
    wait: timedelta
    """Bound of each wait until `bound` sets another."""
    everyone: Any
    """The group of all ranks in host memory; a rank's index in it is its number."""
    host_group: NewGroup
    """Forms a group in host memory."""
    store: Store
    """Store of this epoch, in which groups find their members."""


NewPlane = Callable[[PlaneSite], DataPlane]
"""Function that forms the groups of a plane; all ranks must call it. It raises `PartFailed`."""


@contextmanager
def waiting_for(here: int, rank: int, what: str) -> Iterator[None]:
    """Raise `PartFailed` if the rank that `here` waits for is lost."""
    try:
        yield
    except RuntimeError as error:
        raise PartFailed(f"rank {here} waits for {what} of rank {rank}, and lost it: {error}") from error


@contextmanager
def sharing_a_step(here: int) -> Iterator[None]:
    """Raise `PartFailed` if a lane that shares a step with rank `here` is lost."""
    try:
        yield
    except RuntimeError as error:
        raise PartFailed(f"rank {here} lost another lane in a shared step: {error}") from error


def first_line(error: Exception) -> str:
    """Return the first line of the message; torch appends its own stack."""
    return str(error).partition("\n")[0]
