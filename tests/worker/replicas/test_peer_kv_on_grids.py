"""Replicas of every kind of grid compute with the KV of another one what they compute without.

A first replica serves documents. A second one gets questions about them and asks the first one for the KV. Both are real
controllers and real ranks, and the KV crosses real sockets; only the router between them is played.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.context_parallel import ContextParallel, RingCosts
from medha.kv.prefix_cache import PrefixHasher
from medha.model.kv_dtype import KvDtype
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    ControllerEvent,
    DiskReport,
    HostTierFigures,
    KvAsk,
    KvDone,
    KvTicket,
    PeerFigures,
    Sampling,
    StepProfile,
    Submit,
)
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.rank.peer_reader import PeerBlocks, PeerReader
from medha_worker.rank.peer_server import PeerServer

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import STRIPED_GRID_ROWS, model_of
from .test_controlled import GREEDY, MODEL, VOCAB, Life
from .test_host_tier_on_grids import SAMPLED, Answers

pytestmark = pytest.mark.timeout(400)

BLOCK_TOKENS, POOL_TOKENS, HOST_BLOCKS = 4, 400, 400
LEAST_BLOCKS = 30
"""Least blocks of a lane's pool: a lane may have stripes of all documents."""
DOCUMENTS = 3
HASHER = PrefixHasher(BLOCK_TOKENS, b"shared")
SOURCE = "first"
PROFILE = StepProfile(0.001, 0.01, 1e-7, 0.0001)
"""Times by which a document is read faster than it is computed."""


@dataclass
class PeerLife(Life):
    """A life of a replica whose messages about KV are kept, and whose ranks report loads one after the other."""

    seen: int = 0
    loads: int = 0
    extents: dict[int, int] = field(default_factory=dict)  # by lane: how many there are

    def handle(self, event: ControllerEvent) -> None:
        super().handle(event)
        reports: list[DiskReport] = []
        for load in (load for step in self.steps[self.seen :] for load in step.loads if load.count):
            extent = self.extents.get(load.lane, 0)
            self.extents[load.lane] = extent + 1
            if load.ticket:
                self.loads += 1
                reports += [
                    DiskReport(rank, load.lane, loaded=((extent, 1e-6),))
                    for rank in self.controller.config.topology.ranks_of_lane(load.lane)
                ]
        self.seen = len(self.steps)
        for report in reports:
            self.handle(report)


def config(ranks: Ranks, *, striped: bool) -> ReplicaConfig:
    return ReplicaConfig(
        topology=ranks.topology,
        scheduling=SchedulingSpec(max_chunk_tokens=32, min_chunk_tokens=4, max_running=8),
        service_classes={"default": ServiceClass(name="default", default_output_tokens=4)},
        default_class="default",
        max_model_len=150,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=max(POOL_TOKENS // BLOCK_TOKENS // ranks.topology.kv, LEAST_BLOCKS),
        long_threshold_tokens=60,
        tokens_per_lane=24,
        context_parallel=ContextParallel("striped", RingCosts(8, 2)) if striped else None,
        host_tier=HostTierFigures(HOST_BLOCKS // ranks.topology.kv, 1, 1e-7, 1e-7),
        peer_block_seconds=1e-9,
    )


def submit(name: str, ids: npt.NDArray[np.int32], sampling: Sampling, peer: str = "") -> Submit:
    return Submit(
        name, name, len(ids), len(ids), seed=3, sampling=replace(sampling, max_tokens=4),
        block_hashes=HASHER.hashes(ids), peer=peer, peer_tokens=len(ids) if peer else 0,
    )  # fmt: skip


def finish(life: PeerLife) -> None:
    while life.moving:
        life.move()


@pytest.mark.parametrize(
    ("shape", "architecture", "kv_dtype", "striped"),
    [
        pytest.param((1, 1, 1), "llama", "auto", False, id="one rank"),
        pytest.param((2, 1, 1), "llama-biased", "auto", False, id="TP2", marks=pytest.mark.long),
        pytest.param((1, 2, 1), "mistral", "auto", False, id="SPP2", marks=pytest.mark.long),
        pytest.param((1, 1, 2), "qwen3", "auto", False, id="KVP2"),
        pytest.param((1, 1, 2), "qwen3", "auto", True, id="KVP2, striped"),
        pytest.param(
            (1, 2, 2), "deepseek_v2", "auto", False, id="SPP2 x KVP2, latents", marks=pytest.mark.long
        ),
        pytest.param((1, 1, 1), "llama", "fp8", False, id="one rank, FP8", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_without_another_replica_and_less_is_computed(
    shape: tuple[int, int, int], architecture: str, kv_dtype: KvDtype, striped: bool, tmp_path: Path
) -> None:
    has_latents = architecture.startswith("deepseek")
    sizes = MODEL | ({"num_key_value_heads": 4} if has_latents else {"head_dim": 16})
    save_reference(tmp_path, architecture, **sizes)
    tolerance = 1e-4 if kv_dtype == "auto" else 0.05
    compare(Ranks(Topology(*shape), tmp_path, kv_dtype=kv_dtype), tolerance, striped=striped)


@pytest.mark.parametrize(("grid", "striped"), STRIPED_GRID_ROWS)
def test_texts_are_those_without_another_replica_on_every_grid(
    grid: Topology, striped: bool, tmp_path: Path
) -> None:
    save_reference(tmp_path, "mistral", **model_of(grid))
    compare(Ranks(grid, tmp_path), 1e-4, striped=striped)


def compare(ranks: Ranks, tolerance: float, *, striped: bool) -> None:
    """Compare texts, logits and what is computed with those of a replica that reads from no other one."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, VOCAB, 70 + 10 * number).astype(np.int32) for number in range(DOCUMENTS)]
    questions = {
        f"q{number}": np.concatenate([document, rng.integers(0, VOCAB, 9)]).astype(np.int32)
        for number, document in enumerate(documents)
    }
    reading = {f"d{number}": document for number, document in enumerate(documents)}
    try:
        for sampling in (GREEDY, SAMPLED):
            alone = life_of(ranks, striped=striped)
            for name, ids in questions.items():
                alone.handle(submit(name, ids, sampling))
            finish(alone)
            texts, logits = run(ranks, alone, questions)

            source, taker = life_of(ranks, striped=striped), life_of(ranks, striped=striped)
            for name, ids in reading.items():
                source.handle(submit(name, ids, sampling))
            finish(source)
            tickets: list[KvTicket] = []
            for name, ids in questions.items():
                taker.handle(submit(name, ids, sampling, peer=SOURCE))
                ask = taker.messages[-1]
                assert isinstance(ask, KvAsk)
                source.handle(replace(ask, asker="second", ticket=f"ticket {name}"))
                offer = source.messages[-1]
                assert isinstance(offer, KvTicket)
                assert offer.parts, "it has the document"
                tickets.append(offer)
                taker.handle(replace(offer, source=SOURCE))
            finish(source)
            finish(taker)
            assert set(taker.ends.values()) == {"length"}

            served: dict[int, PeerBlocks] = {}
            taken: dict[int, PeerBlocks] = {}
            reports: list[DiskReport] = []
            try:
                run(ranks, source, reading, peers=peers_of(served, reports))
                places = tuple(served[rank].server.figures for rank in range(ranks.topology.ranks))

                make = peers_of(taken, reports, tickets, places)
                answers, computed = run(ranks, taker, questions, peers=make)
            finally:
                for one in (*served.values(), *taken.values()):
                    one.close()
            assert not [one for one in reports if one.not_loaded], reports
            assert len([one for one in reports if one.loaded]) >= taker.loads > 0
            assert answers == texts
            for at in computed.keys() & logits.keys():
                assert float((computed[at] - logits[at]).abs().max()) <= tolerance, at
            assert computed.keys() < logits.keys(), "some prefill was avoided"
            counts = taker.controller.pools.peer_counts
            assert counts.hits == DOCUMENTS
            assert counts.failed_loads == 0
            # Lanes that do not stripe cut a longer prompt at other places: then only the first lane's part is the same.
            assert counts.loaded_blocks >= DOCUMENTS * (24 if ranks.topology.kv > 1 else 60) // BLOCK_TOKENS
            done = [one for one in taker.messages if isinstance(one, KvDone)]
            assert {one.ticket for one in done} == {one.ticket for one in tickets}
            for one in done:
                source.handle(replace(one, asker="second"))
            for life in (source, taker):
                for tier in life.controller.pools.tiers:
                    tier.check()
                    assert tier.served_blocks == 0
    finally:
        ranks.close()


def life_of(ranks: Ranks, *, striped: bool) -> PeerLife:
    return PeerLife(ReplicaController(config(ranks, striped=striped), PROFILE), Random(1))


def run(
    ranks: Ranks,
    life: PeerLife,
    prompts: dict[str, npt.NDArray[np.int32]],
    peers: Callable[[int, HostBlocks], PeerBlocks] | None = None,
) -> tuple[Answers, dict[tuple[str, int], torch.Tensor]]:
    samples, logits = ranks.run(
        life.steps,
        prompts,
        kv_blocks=life.controller.config.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        host_blocks=HOST_BLOCKS // ranks.topology.kv,
        peers=peers,
    )
    answers: Answers = {name: [] for name in prompts}
    for sample in samples:
        answers[sample.id].append(sample.token)
    return answers, logits


def peers_of(
    made: dict[int, PeerBlocks],
    reports: list[DiskReport],
    tickets: Sequence[KvTicket] = (),
    places: Sequence[PeerFigures] = (),
) -> Callable[[int, HostBlocks], PeerBlocks]:
    """Return a function that makes what a rank hands KV over with, keeps it in `made`, and says where to show tickets."""

    def make(rank: int, host: HostBlocks) -> PeerBlocks:
        identity = f"rank {rank}"
        found = made[rank] = PeerBlocks(
            PeerServer("tcp://127.0.0.1:*", host, identity), PeerReader(host, identity, time.monotonic)
        )
        found.reader.begin_epoch(DiskReport(rank), reports.append)
        for ticket in tickets:
            found.reader.learn(ticket.ticket, places[rank])
        return found

    return make
