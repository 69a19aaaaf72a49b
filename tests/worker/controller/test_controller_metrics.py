"""Metrics of a controller that are counted in its core, whose life is one epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.host_tier import KvTier
from medha.kv.pools import WindowPool
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Ended, Facts, History, OpenRequest
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    ControllerEvent,
    DiskTierFigures,
    Done,
    HostTierFigures,
    Sample,
    Sampling,
    StepProfile,
    Submit,
)
from medha_worker.controller.controller_metrics import Observer

CONFIG = ReplicaConfig(
    topology=Topology(kv=2),
    scheduling=SchedulingSpec(),
    service_classes={"default": ServiceClass(name="default")},
    default_class="default",
    max_model_len=1000,
    block_size_tokens=16,
    kv_blocks=10,
    long_threshold_tokens=1000,
)


def new_core(epoch: int, queried_tokens: int) -> ReplicaController:
    core = ReplicaController(CONFIG, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), epoch)
    core.pools.queried_tokens = queried_tokens
    return core


def test_a_count_goes_on_where_the_epoch_before_left_it() -> None:
    registry = CollectorRegistry()
    observer = Observer(registry)
    for core in (new_core(0, 100), new_core(0, 150), new_core(1, 0), new_core(1, 30)):
        observer.state(core)
    assert registry.get_sample_value("medha_prefix_cache_queried_tokens_total") == 180


def test_every_lane_has_its_blocks_by_state() -> None:
    registry = CollectorRegistry()
    Observer(registry).state(new_core(0, 0))
    for lane in ("0", "1"):
        free = registry.get_sample_value("medha_kv_blocks", {"lane": lane, "state": "free"})
        cached = registry.get_sample_value("medha_kv_blocks", {"lane": lane, "state": "cached"})
        assert (free, cached) == (10, 0)


def test_outputs_that_step_aside_and_how_well_they_were_expected_are_counted() -> None:
    registry = CollectorRegistry()
    observer = Observer(registry)
    request = OpenRequest(9, "default", 0.0, 0.05, expected_tokens=50, emitted=100)
    cancelled = OpenRequest(9, "default", 0.0, 0.05, expected_tokens=50, emitted=1)
    facts = Facts(0, 1.0, stepped_aside=["default", "default"])
    facts.ended = [Ended("length", request), Ended("cancelled", cancelled)]
    observer.observe(facts, 0.0)
    labels = {"service_class": "default"}
    assert registry.get_sample_value("medha_sequences_stepped_aside_total", labels) == 2
    assert registry.get_sample_value("medha_output_expected_ratio_count", labels) == 1
    assert registry.get_sample_value("medha_output_expected_ratio_sum", labels) == 2


def test_a_sequence_counts_how_long_it_waited_prefilled_and_decoded_and_how_long_its_texts_are() -> None:
    """The meanings are vLLM's; a sequence that was resumed with output of another replica counts nowhere."""
    registry = CollectorRegistry()
    observer, history, core = Observer(registry), History(), new_core(0, 0)

    def happens(event: ControllerEvent, now: float) -> None:
        commands = core.handle(event, now)
        observer.observe(history.take(core, event, commands, now), 0.0)

    sampling = Sampling(max_tokens=3)
    first = Submit("a", "pa", 20, 20, seed=1, age_seconds=2.0, sampling=sampling)
    resumed = Submit("b", "pb", 21, 20, seed=1, age_seconds=7.0, sampling=sampling)
    for submit in (first, resumed):
        happens(submit, 10.0)
        for now in (10.5, 11.0, 12.5, 13.0):
            if core.steps_in_flight:
                step = core.steps_in_flight[0]
                samples = tuple(Sample(entry.id, 1) for entry in step.entries)
                happens(Done(step.step_id, samples, lanes=step.lanes), now)
        assert core.find(submit.id) is None
    found = {
        name: registry.get_sample_value(f"medha_sequence_{name}_sum", {"service_class": "default"})
        for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "prompt_tokens", "output_tokens")
    }
    assert found == {
        "queue_seconds": 2.0,
        "prefill_seconds": 0.5,
        "decode_seconds": 2.0,
        "prompt_tokens": 20.0,
        "output_tokens": 3.0,
    }
    for name in found:
        count = registry.get_sample_value(f"medha_sequence_{name}_count", {"service_class": "default"})
        assert count == 1


def test_swaps_are_counted_in_both_directions() -> None:
    config = replace(CONFIG, topology=Topology(), host_tier=HostTierFigures(20, 1000, 2e-6, 1e-6))
    core, registry = ReplicaController(config, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), 0), CollectorRegistry()
    observer, text = Observer(registry), "".join(f"{block:032x}" for block in range(16))

    def serve(name: str, hashes: str, *, swaps: bool) -> None:
        assert core.pools.admit(name, 128, 128, block_hashes=hashes)
        core.pools.computed(name, 128)
        core.pools.release(name, 128, swaps=swaps)
        core.pools.take_releases()

    half = len(text) // 2
    serve("aside", text[:half], swaps=True)
    serve("other", text[half:], swaps=False)
    observer.state(core)
    assert registry.get_sample_value("medha_sequences_swapped") == 1
    serve("aside", text[:half], swaps=False)
    observer.state(core)
    assert registry.get_sample_value("medha_sequences_swapped") == 0
    for direction, blocks, seconds in (("out", 6, 1e-6), ("in", 5, 2e-6)):
        labels = {"direction": direction}
        assert registry.get_sample_value("medha_swaps_total", labels) == 1
        assert registry.get_sample_value("medha_swap_bytes_total", labels) == 1000 * blocks
        assert registry.get_sample_value("medha_swap_seconds_total", labels) == pytest.approx(
            seconds * blocks
        )
    assert registry.get_sample_value("medha_long_swaps_total") == 0


def test_avoided_prefill_is_counted_by_tier_and_goes_on_in_the_next_epoch() -> None:
    registry = CollectorRegistry()
    observer = Observer(registry)
    for epoch, seconds in ((0, 2.0), (0, 3.0), (1, 0.5)):
        core = new_core(epoch, 0)
        core.pools.avoided_prefill_seconds["disk"] = seconds
        observer.state(core)
    found = {
        tier: registry.get_sample_value("medha_avoided_prefill_seconds_total", {"tier": tier})
        for tier in get_args(KvTier)
    }
    assert found == {"host": 0.0, "disk": 3.5, "store": 0.0, "peers": 0.0}


def test_reads_of_the_tiers_of_an_epoch_are_predicted_and_those_of_others_are_not_shown() -> None:
    registry = CollectorRegistry()
    observer, profile = Observer(registry), StepProfile(1e-3, 1e-6, 1e-9, 1e-5)
    host = HostTierFigures(20, 2**20, 2e-6, 1e-6)
    with_disk = replace(CONFIG, topology=Topology(), host_tier=host, disk_tier=DiskTierFigures(9, 0.25, 1e-3))
    observer.state(ReplicaController(with_disk, profile, 0))

    def shown(name: str) -> dict[str, float | None]:
        return {tier: registry.get_sample_value(name, {"tier": tier}) for tier in get_args(KvTier)}

    latency, per_gib = "medha_tier_read_latency_seconds", "medha_tier_read_seconds_per_gib"
    assert shown(latency) == {"host": 0.0, "disk": pytest.approx(0.25), "store": None, "peers": None}
    assert shown(per_gib) == pytest.approx(
        {"host": 1024 * 2e-6, "disk": 1024 * 1e-3, "store": None, "peers": None}
    )
    observer.state(ReplicaController(replace(with_disk, disk_tier=None), profile, 1))
    assert [tier for tier, value in shown(latency).items() if value is not None] == ["host"]
    assert [tier for tier, value in shown(per_gib).items() if value is not None] == ["host"]


def test_what_a_store_got_and_what_it_had_are_counted_in_bytes() -> None:
    config = replace(
        CONFIG, topology=Topology(), host_tier=HostTierFigures(20, 1000, 2e-6, 1e-6), store_block_seconds=1e-6,
        object_blocks=2,
    )  # fmt: skip
    core, registry = ReplicaController(config, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), 0), CollectorRegistry()
    assert core.pools.store is not None
    core.pools.store.counts.written_blocks, core.pools.store.counts.found_blocks = 6, 4
    Observer(registry).state(core)
    assert registry.get_sample_value("medha_store_tier_written_bytes_total") == 6000
    assert registry.get_sample_value("medha_store_tier_found_bytes_total") == 4000


def test_blocks_of_windows_are_shown_where_layers_free_what_is_before_them() -> None:
    kept, freed = CollectorRegistry(), CollectorRegistry()
    profile = StepProfile(1e-3, 1e-6, 1e-9, 1e-5)
    Observer(kept).state(ReplicaController(CONFIG, profile, 0))
    config = replace(CONFIG, topology=Topology(), window_pool=WindowPool(500, 64))
    core = ReplicaController(config, profile, 0)
    core.handle(Submit("r", "p", 100, 100, 0), 0.0)
    Observer(freed).state(core)

    def blocks(registry: CollectorRegistry, state: str) -> float | None:
        return registry.get_sample_value("medha_kv_window_blocks", {"lane": "0", "state": state})

    held = -(-100 // config.block_size_tokens)
    assert [blocks(freed, state) for state in ("held", "cached", "free")] == [held, 0, 500 - held]
    assert blocks(kept, "free") is None
