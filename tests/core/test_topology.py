"""The numbering of ranks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from medha.errors import ConfigInvalid
from medha.topology import Coordinates, Topology, stage_layers

SIZES = st.integers(1, 6)


@given(tensor=SIZES, stream=SIZES, kv=SIZES)
def test_ranks_and_coordinates_are_one_to_one(tensor: int, stream: int, kv: int) -> None:
    topology = Topology(tensor, stream, kv)
    everywhere = [topology.coordinates(rank) for rank in range(topology.ranks)]
    assert len(set(everywhere)) == topology.ranks == tensor * topology.pods
    assert [topology.rank(at) for at in everywhere] == list(range(topology.ranks))
    assert all(at.kv < kv and at.stream < stream and at.tensor < tensor for at in everywhere)


def test_the_tensor_ranks_of_a_pod_are_neighbours_and_lanes_are_far_apart() -> None:
    topology = Topology(tensor=2, stream=3, kv=2)
    assert topology.coordinates(0) == Coordinates(kv=0, stream=0, tensor=0)
    assert topology.coordinates(1) == Coordinates(kv=0, stream=0, tensor=1)
    assert topology.coordinates(2) == Coordinates(kv=0, stream=1, tensor=0)
    assert topology.coordinates(6) == Coordinates(kv=1, stream=0, tensor=0)
    assert str(topology) == "TP2 x SPP3 x KVP2"


@pytest.mark.parametrize("axis", ["tensor", "stream", "kv"])
def test_an_axis_without_ranks_is_refused(axis: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"parallelism\.{axis} is 0; it must be at least 1"):
        Topology(**{axis: 0})


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_grid_is_our_own_bug(rank: int) -> None:
    with pytest.raises(AssertionError, match=f"rank {rank} of 4"):
        Topology(tensor=4).coordinates(rank)


@given(layers=st.integers(1, 200), stages=st.integers(1, 32), head=st.floats(0, 10))
def test_stages_share_the_layers_so_that_the_slowest_is_as_fast_as_it_can_be(
    layers: int, stages: int, head: float
) -> None:
    assume(stages <= layers)
    ranges = stage_layers(layers, stages, head_cost_layers=head)
    assert [layer for layers_of in ranges for layer in layers_of] == list(range(layers))
    assert all(ranges)

    def slowest(counts: list[int]) -> float:
        return max([*counts[:-1], counts[-1] + head])

    best = min(
        slowest([-(-(layers - last) // max(stages - 1, 1))] * (stages - 1) + [last])
        for last in (range(1, layers - stages + 2) if stages > 1 else [layers])
    )
    assert slowest([len(layers_of) for layers_of in ranges]) == best


def test_the_stage_with_the_output_head_gets_fewer_layers() -> None:
    assert [len(r) for r in stage_layers(8, 2)] == [4, 4]
    assert [len(r) for r in stage_layers(8, 2, head_cost_layers=2)] == [5, 3]
    assert [len(r) for r in stage_layers(9, 4)] == [2, 2, 2, 3]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"parallelism\.stream is 3, but the model has 2 layers"):
        stage_layers(2, 3)
