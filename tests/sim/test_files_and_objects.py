"""Simulated replicas have the disk tier and the store of their manifest, with the controller's own code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec, ParallelismSpec
from medha.cost.hardware import A100, H100, LLAMA3_8B, LLAMA3_70B
from medha.errors import ConfigInvalid
from medha.routing.router_core import RouterCore
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha_sim.scenario import Deployment, deployment_of
from medha_sim.simulation import Arrival, SimulatedReplica, Simulation, Workload

TENSOR = 8
POOL_TOKENS, HOST_TOKENS, DOCUMENT_TOKENS = 24_000, 80_000, 16_000
DOCUMENTS = 12
STORE = {"url": "file:///unused", "bandwidth": "8Gi"}


def deployment(*, disk_tokens: int = 0, store: bool = False, **parallelism: int) -> Deployment:
    """Return a replica; one with a store has a model that takes long to compute, so that reading many objects is faster."""
    model = LLAMA3_70B if store else LLAMA3_8B
    token_bytes = model.kv_bytes_per_token // (TENSOR * parallelism.get("stream", 1))
    tiers: dict[str, object] = {"host": {"size": str(HOST_TOKENS * token_bytes)}}
    if disk_tokens:
        tiers["disk"] = {"size": str(disk_tokens * token_bytes)}
    if store:
        tiers["store"] = STORE
    spec = MedhaReplicaSpec(
        model=ModelSpec(name="m", source=ModelSource(path="unused"), max_model_len=65536),
        parallelism=ParallelismSpec(tensor=TENSOR, **parallelism),
        kv_cache=KvCacheSpec.model_validate({"size": str(POOL_TOKENS * token_bytes), "tiers": tiers}),
    )
    return deployment_of(spec, A100 if store else H100, model, disk_bytes_per_second=8 * 2**30)


def documents(rounds: int) -> Workload:
    """Return requests for each document in turn, one at a time, as often as there are rounds."""
    arrivals = [
        Arrival(
            f"{turn}.{number}", 30.0 * (turn * DOCUMENTS + number), DOCUMENT_TOKENS, 20, 30.0, 1.0,
            max_tokens=20, conversation=f"d{number}",
        )
        for turn in range(rounds)
        for number in range(DOCUMENTS)
    ]  # fmt: skip
    return Workload(arrivals)


def controller(replica: SimulatedReplica) -> ReplicaController:
    assert isinstance(replica.controller, ReplicaController)
    return replica.controller


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({}, id="one stage"),
        pytest.param({"stream": 2}, id="two stages", marks=pytest.mark.long),
        pytest.param({"kv": 2}, id="two lanes", marks=pytest.mark.long),
    ],
)
def test_documents_come_back_from_files_that_the_host_tier_cannot_hold_together(
    parallelism: dict[str, int],
) -> None:
    computed = {}
    for disk_tokens in (0, 2 * DOCUMENTS * DOCUMENT_TOKENS):
        here = deployment(disk_tokens=disk_tokens, **parallelism)
        made = documents(2)
        replica = here.maker(made)(0)
        log = Simulation([replica], made).run(2000)
        assert {record.ending for record in log.requests.values()} == {"finished"}
        computed[disk_tokens] = sum(log.chunks.tokens)
        pools = controller(replica).pools
        for disk, tier in zip(pools.disks, pools.tiers, strict=False):
            disk.check()
            assert disk.loading_blocks == disk.writing_blocks == 0
            assert not tier.unwritten, "what can be written is written"
            assert not disk.counts.failed_loads
        busy, predicted = np.array(log.steps.busy_seconds), np.array(log.steps.predicted_seconds)
        assert busy[busy > 0] == pytest.approx(predicted[busy > 0], rel=0.03)
    loaded = sum(disk.counts.loaded_blocks for disk in controller(replica).pools.disks)
    assert loaded * here.block_size_tokens > DOCUMENT_TOKENS
    assert computed[2 * DOCUMENTS * DOCUMENT_TOKENS] < 0.8 * computed[0]


def test_a_chat_does_not_wait_for_the_reads_of_a_document_before_it() -> None:
    """Reading the document takes 88 ms, and the beginning of the chat 18 ms, less than computing it."""
    here = replace(deployment(disk_tokens=2 * DOCUMENTS * DOCUMENT_TOKENS), disk_bytes_per_second=3 * 2**30)
    first = documents(1).arrivals
    chat = Arrival("chat", 0.0, 3200, 20, 30.0, 1.0, max_tokens=20, conversation="chat")
    at = 30.0 * DOCUMENTS
    document = replace(first[0], id="document again", at_seconds=at, ttft_target_seconds=60.0)
    made = Workload([chat, *first, document, replace(chat, id="chat again", at_seconds=at + 0.005)])
    replica = here.maker(made)(0)
    log = Simulation([replica], made).run(2000)
    (disk,) = controller(replica).pools.disks
    ttfts = {name: record.ttft_seconds for name, record in log.requests.items()}
    assert disk.counts.hits == 2
    assert ttfts["chat again"] < ttfts["chat"] < 0.088 < ttfts["document again"]


def test_a_second_replica_reads_from_the_store_what_the_first_one_has_computed() -> None:
    here = replace(deployment(store=True), replicas=2)
    made = documents(2)
    make = here.maker(made)
    replicas = [make(0), make(1)]
    # The first replica drains behind the first round: what it has goes with it, but for the store.
    simulation = Simulation(replicas, made, router=RouterCore(), latencies=here.latencies)
    simulation.at(30.0 * DOCUMENTS - 1, lambda name, now: simulation.drain_replica(name, now), "replica-0")
    log = simulation.run(2000)
    assert {record.ending for record in log.requests.values()} == {"finished"}
    stores = [controller(replica).pools.store for replica in replicas]
    assert all(store is not None for store in stores)
    for store in stores:
        assert store is not None
        store.check()
        assert not store.counts.failed_loads
    assert simulation.stored
    assert sum(store.counts.written_blocks for store in stores if store is not None) > 0
    read = sum(store.counts.loaded_blocks for store in stores if store is not None)
    assert read * here.block_size_tokens >= DOCUMENT_TOKENS // 2
    assert sum(log.chunks.tokens) < 2 * DOCUMENTS * DOCUMENT_TOKENS


def test_a_slow_disk_and_a_slow_store_are_left_for_the_device() -> None:
    """The time that a document takes from a slow tier is longer than computing it, so that it is computed."""
    slow = [
        replace(deployment(disk_tokens=10**6), disk_bytes_per_second=2e6),
        replace(deployment(store=True), store_bytes_per_second=2e6),
    ]
    for here in slow:
        without = replace(here, disk_bytes=0, store_bytes_per_second=0.0)
        found = []
        for one in (here, without):
            log = one.simulation(documents(2)).run(2000)
            found.append([record.ttft_seconds for record in log.requests.values()])
        assert found[0] == found[1]


def test_a_disk_tier_without_a_host_tier_or_with_room_for_no_block_is_refused() -> None:
    here = Deployment(model=LLAMA3_8B, hardware=H100, topology=Topology(tensor=TENSOR), disk_bytes=2**30)
    with pytest.raises(
        ConfigInvalid, match=r"kvCache\.tiers\.disk\.size is .*set kvCache\.tiers\.host\.size"
    ):
        here.config()
    with pytest.raises(ConfigInvalid, match=r"kvCache\.tiers\.disk\.size is 1024 bytes.*raise it"):
        replace(here, host_bytes=2**30, disk_bytes=1024).config()
