"""Under random schedules and tiers, ranks sample the text of `transformers` to the last token.

A controller serves random requests on a small KV pool with random tiers below it: host memory, files, a store, streaming. Then real
ranks run its steps with real files, as threads of this process that are connected by gloo. A second life begins with the files and
the objects of the first, and continues many of its texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import DiskReport, DiskTierFigures, HostTierFigures, StreamingFigures

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .test_controlled import GREEDY
from .test_disk_tier_on_grids import found_in
from .test_store_on_grids import OBJECT_BLOCKS
from .tier_lives import (
    BLOCK_TOKENS,
    MODEL,
    MODEL_TOKENS,
    PROFILE,
    SAMPLED,
    Query,
    Reference,
    TierLife,
    Tiers,
    check_on_ranks,
    random_queries,
    serve,
)

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(1800)  # an example may take seconds where other tests run beside it

SHAPES = [
    pytest.param(((1, 1, 1), "llama", 6), id="one rank"),
    pytest.param(((1, 1, 2), "qwen3", 3), id="KVP2"),
] + [
    pytest.param((shape, architecture, 150), id=f"{Topology(*shape)} long", marks=pytest.mark.long)
    for shape, architecture in [
        ((1, 1, 1), "llama"),
        ((1, 1, 2), "qwen3"),
        ((1, 1, 3), "llama"),
        ((2, 1, 1), "llama-biased"),
        ((1, 2, 1), "mistral"),
        ((1, 2, 2), "qwen2"),
        ((2, 1, 2), "mistral"),
        ((2, 2, 2), "qwen3"),
    ]
]


@pytest.fixture(params=SHAPES)
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Reference, int]]:
    shape, architecture, examples = request.param
    directory: Path = tmp_path_factory.mktemp(architecture)
    reference = Reference(save_reference(directory, architecture, **MODEL))
    ranks = Ranks(Topology(*shape), directory)
    yield ranks, reference, examples
    ranks.close()


def test_texts_are_those_of_the_reference_under_random_schedules_and_tiers(
    replica: tuple[Ranks, Reference, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ranks, reference, examples = replica
    lanes = ranks.topology.kv
    happened: dict[str, int] = {}

    @given(
        seed=st.integers(0, 10_000),
        pool_blocks=st.sampled_from([24, 30, 50]),
        host_blocks=st.sampled_from([24, 40, 400]),
        disk_blocks=st.sampled_from([0, 60, 400]),
        has_store=st.booleans(),
        streamed_blocks=st.sampled_from([0, 45]),
        max_swaps=st.sampled_from([0, 2]),
        is_striped=st.booleans(),
        is_sampled=st.booleans(),
        fetch_seconds=st.sampled_from([1e-7, 1e-4]),
        output_tokens=st.sampled_from([2, 5, 9]),
        steps_ahead=st.integers(0, 2),
    )
    # Between them, everything happens on the grids of the short rows.
    @example(237, 24, 24, 0, False, 0, 0, False, False, 1e-7, 2, 0)
    @example(964, 50, 400, 0, True, 0, 0, True, True, 1e-4, 5, 1)
    @example(7591, 24, 24, 60, False, 45, 0, False, True, 1e-4, 2, 2)
    @settings(max_examples=examples, deadline=None)
    def run(
        seed: int,
        pool_blocks: int,
        host_blocks: int,
        disk_blocks: int,
        has_store: bool,
        streamed_blocks: int,
        max_swaps: int,
        is_striped: bool,
        is_sampled: bool,
        fetch_seconds: float,
        output_tokens: int,
        steps_ahead: int,
    ) -> None:
        tiers = Tiers(host_blocks, disk_blocks, has_store, streamed_blocks)
        sampling = SAMPLED if is_sampled else GREEDY
        config = ReplicaConfig(
            topology=ranks.topology,
            scheduling=SchedulingSpec(
                max_chunk_tokens=32,
                min_chunk_tokens=4,
                max_running=8,
                max_swaps=max_swaps,
                short_headroom=0.05,
            ),
            service_classes={
                "default": ServiceClass(
                    name="default",
                    default_output_tokens=output_tokens,
                    ttft_floor_seconds=0.2,
                    tpot_target_seconds=0.3,
                )
            },
            default_class="default",
            max_model_len=MODEL_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=max(pool_blocks // lanes, 12),
            long_threshold_tokens=60,
            tokens_per_lane=24 if lanes > 1 else MODEL_TOKENS,
            context_parallel=ContextParallel("striped", RingCosts(8, 2))
            if is_striped and lanes > 1 and not streamed_blocks  # a replica's spec refuses both together
            else None,
            host_tier=HostTierFigures(host_blocks // lanes, 1, fetch_seconds, 1e-7),
            disk_tier=DiskTierFigures(disk_blocks // lanes, 1e-6, 1e-7) if disk_blocks else None,
            store_block_seconds=1e-9 if has_store else None,
            object_blocks=OBJECT_BLOCKS,
            streaming=StreamingFigures(streamed_blocks // lanes, 1, 1e-6) if streamed_blocks else None,
        )
        place, there = tmp_path_factory.mktemp("tiers"), [set[str]() for _ in range(lanes)]
        found = [
            DiskReport(rank, ranks.topology.coordinates(rank).kv, found_all=True)
            for rank in range(ranks.topology.ranks)
        ]
        queries: list[Query] = []
        for number in range(2):
            life = TierLife(ReplicaController(config, PROFILE), Random(seed + number), there=there)
            if disk_blocks:
                life.reports += found
            queries = random_queries(life.random, config, reference, sampling, queries)
            serve(life, queries, sampling)
            check_on_ranks(ranks, life, reference, tiers, place, steps_ahead=steps_ahead)
            if disk_blocks:
                found = found_in(ranks, place / "kv")
            there = [set().union(*there) for _ in range(lanes)]
            count(happened, life)

    run()
    assert not [name for name in EVERYTHING if not happened.get(name)], happened


EVERYTHING = (
    "fetched", "offloaded", "swapped in", "read from files", "read from the store", "stepped aside", "streamed",
)  # fmt: skip


def count(happened: dict[str, int], life: TierLife) -> None:
    """Count what has happened in a life."""
    pools = life.controller.pools
    for name, number in {
        "fetched": pools.tier_counts.fetched_blocks,
        "offloaded": pools.tier_counts.offloaded_blocks,
        "swapped in": pools.tier_counts.swapped_in_blocks,
        "read from files": pools.disk_counts.loaded_blocks,
        "read from the store": pools.store.counts.loaded_blocks if pools.store is not None else 0,
        "stepped aside": len(life.asides),
        "streamed": sum(1 for step in life.steps for admit in step.admits if admit.device_blocks),
    }.items():
        happened[name] = happened.get(name, 0) + number
