"""The TP x SPP x KVP grid: coordinates of ranks and pods.

A rank has coordinates (kv, stream, tensor): its lane, its stage, and its part of each layer. Ranks are
numbered lane by lane, stage by stage, so that the tensor ranks of one pod are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

from medha.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class Coordinates:
    kv: int  # lane
    stream: int  # stage
    tensor: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the three axes."""

    tensor: int = 1
    stream: int = 1
    kv: int = 1

    def __post_init__(self) -> None:
        for axis in ("tensor", "stream", "kv"):
            size = getattr(self, axis)
            if size < 1:
                raise ConfigInvalid(f"parallelism.{axis} is {size}; it must be at least 1")

    @property
    def ranks(self) -> int:
        return self.kv * self.stream * self.tensor

    @property
    def pods(self) -> int:
        return self.kv * self.stream

    def rank(self, at: Coordinates) -> int:
        return (at.kv * self.stream + at.stream) * self.tensor + at.tensor

    def coordinates(self, rank: int) -> Coordinates:
        assert 0 <= rank < self.ranks, f"rank {rank} of {self.ranks}"
        pod, tensor = divmod(rank, self.tensor)
        kv, stream = divmod(pod, self.stream)
        return Coordinates(kv=kv, stream=stream, tensor=tensor)

    def ranks_of_lane(self, lane: int) -> range:
        """Return the ranks of all stages of a lane."""
        ranks = self.stream * self.tensor
        return range(lane * ranks, (lane + 1) * ranks)

    def __str__(self) -> str:
        return f"TP{self.tensor} x SPP{self.stream} x KVP{self.kv}"


def stage_layers(layers: int, stages: int, *, head_cost_layers: float = 0.0) -> list[range]:
    """Return the layers of each stage, such that the slowest stage is as fast as possible.

    All layers cost the same; the last stage also has the output head, which costs as much as
    `head_cost_layers` layers. Each stage has at least one layer; earlier stages take the remainder.

    Raises:
        ConfigInvalid: there are fewer layers than stages.
    """
    if stages > layers:
        raise ConfigInvalid(
            f"parallelism.stream is {stages}, but the model has {layers} layers; a stage needs at least one"
        )

    def slowest(last: int) -> float:
        before = -(-(layers - last) // (stages - 1)) if stages > 1 else 0
        return max(before, last + head_cost_layers)

    most_last = layers - (stages - 1)
    # Among equally fast choices, the largest last stage makes the others the most even.
    last = layers if stages == 1 else min(range(1, most_last + 1), key=lambda count: (slowest(count), -count))
    ranges, start = [], 0
    for stage in range(stages - 1):
        count = -(-(layers - last - start) // (stages - 1 - stage))
        ranges.append(range(start, start + count))
        start += count
    return [*ranges, range(start, layers)]
