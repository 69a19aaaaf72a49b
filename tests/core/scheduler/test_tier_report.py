"""What the tiers of a replica have copied, hold and save, and how long reads of them are predicted to take."""

from __future__ import annotations

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.predictor import Predictor
from medha.cost.tier_seconds import TierSeconds
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.status_report import SwapsStatus, status
from medha.scheduler.tier_report import copied_bytes, read_times
from medha.topology import Topology
from medha.wire.messages import (
    DiskReport,
    DiskTierFigures,
    HostTierFigures,
    StepProfile,
    StreamingFigures,
)

PROFILE = StepProfile(1e-3, 1e-6, 1e-9, 1e-5)
MIB = 2**20
BLOCK_BYTES = MIB


def new_core(**tiers: object) -> ReplicaController:
    config = ReplicaConfig(
        topology=Topology(),
        scheduling=SchedulingSpec(),
        service_classes={"default": ServiceClass(name="default")},
        default_class="default",
        max_model_len=1000,
        block_size_tokens=16,
        kv_blocks=10,
        long_threshold_tokens=1000,
        **tiers,  # type: ignore[arg-type]
    )
    return ReplicaController(config, PROFILE)


HOST = HostTierFigures(20, BLOCK_BYTES, 2e-6, 1e-6)
ALL = {
    "host_tier": HOST,
    "disk_tier": DiskTierFigures(40, 0.001, 0.0005),
    "store_block_seconds": 0.002,
    "object_blocks": 2,
    "peer_block_seconds": 0.004,
    "streaming": StreamingFigures(8, 2 * BLOCK_BYTES, 1e-6),
}


def test_a_replica_without_tiers_reports_none() -> None:
    core = new_core()
    found = status(core, History(), 0.0)
    assert (found.tiers, found.swaps) == ((), None)
    assert (copied_bytes(core), read_times(core)) == ({}, {})


def test_each_tier_has_its_size_in_bytes_and_its_predicted_reads() -> None:
    core = new_core(**ALL)
    found = {one.tier: one for one in status(core, History(), 0.0).tiers}
    sizes = {tier: (one.size_bytes, one.held_bytes) for tier, one in found.items()}
    assert sizes == {
        "host": (20 * MIB, 0),
        "disk": (40 * MIB, 0),
        "store": (None, None),
        "peers": (None, None),
        "streaming": (16 * MIB, 0),
    }
    times = read_times(core)
    assert {tier: one.seconds_per_gib for tier, one in times.items()} == pytest.approx(
        {"host": 1024 * 2e-6, "disk": 1024 * 0.0005, "store": 1024 * 0.002, "peers": 1024 * 0.004}
    )
    assert times["disk"].latency_seconds == pytest.approx(0.001)
    assert times["host"].latency_seconds == 0
    for tier, one in found.items():
        expected = times.get(tier)
        shown = (one.read_latency_seconds, one.read_seconds_per_gib)
        assert shown == (
            (None, None) if expected is None else (expected.latency_seconds, expected.seconds_per_gib)
        )


def test_lines_of_reads_are_those_by_which_reads_are_predicted_also_after_some_were_measured() -> None:
    seconds = TierSeconds(HOST, Predictor(PROFILE), DiskTierFigures(40, 0.001, 0.0005), 0.004, 0.002)
    before = seconds.read_lines()
    for blocks in (1, 30, 7, 64):
        seconds.observe_load(blocks, 0.002 + blocks * 0.001)
        seconds.observe_peer_load(blocks, 0.05 + blocks * 0.006)
        seconds.observe_store_load(blocks, 0.06 + blocks * 0.016)
    lines = seconds.read_lines()
    assert all(lines[tier] > before[tier] for tier in ("disk", "store", "peers"))
    predicted = {
        "host": seconds.fetch_seconds(50),
        "disk": seconds.load_seconds(50, 1),
        "store": seconds.store_seconds(50, 0),
        "peers": seconds.peer_seconds(50),
    }
    assert {tier: access + 50 * block for tier, (access, block) in lines.items()} == pytest.approx(predicted)


def test_what_a_host_tier_copies_holds_and_swaps_is_in_the_status() -> None:
    core = new_core(host_tier=HOST)
    text = "".join(f"{block:032x}" for block in range(16))
    for name, hashes, swaps in (
        ("aside", text[: 8 * 32], True), ("other", text[8 * 32 :], False), ("aside", text[: 8 * 32], False),
    ):  # fmt: skip
        assert core.pools.admit(name, 128, 128, block_hashes=hashes)
        core.pools.computed(name, 128)
        core.pools.release(name, 128, swaps=swaps)
        core.pools.take_releases()
    counts = core.pools.tiers[0].counts
    assert counts.fetched_blocks > 0
    assert counts.offloaded_blocks > 0
    found = status(core, History(), 0.0)
    (host,) = found.tiers
    assert (host.read_bytes, host.written_bytes) == (
        counts.fetched_blocks * MIB,
        counts.offloaded_blocks * MIB,
    )
    assert (host.hits, host.held_bytes) == (1, core.pools.tiers[0].ledger.held_blocks * MIB)
    assert host.avoided_prefill_seconds == core.pools.avoided_prefill_seconds["host"] > 0
    assert found.swaps == SwapsStatus(waiting=0, out=1, back=1)


def test_a_tier_that_is_off_shows_why() -> None:
    core = new_core(**ALL)
    core.handle(DiskReport(0, fault="no such directory"), 0.0)
    disk = next(one for one in status(core, History(), 0.0).tiers if one.tier == "disk")
    assert disk.fault == "rank 0: no such directory"
