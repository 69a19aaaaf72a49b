"""Under random schedules, ranks that compute with another replica's KV sample the text of `transformers` to the last token.

One replica serves random requests, and drains at some time: requests that have begun go on at a second one, as a router moves them.
The second one asks the first for the KV of these and of random other requests. Both are real controllers and real ranks, and the
KV crosses real sockets; only the router between them is played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
from medha.wire.messages import (
    Cancel,
    DiskReport,
    Drain,
    HostTierFigures,
    KvAsk,
    KvDone,
    KvTicket,
    Sampling,
)
from medha_worker.rank.peer_reader import PeerBlocks

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .test_controlled import GREEDY, MOST_EVENTS
from .test_peer_kv_on_grids import SOURCE, peers_of
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
    check_nothing_is_left,
    check_on_ranks,
    random_queries,
)

pytestmark = pytest.mark.timeout(900)  # an example may take seconds where other tests run beside it

TAKER = "second"
POOL_BLOCKS = 60
EVERYTHING = "offered", "read", "moved", "had nothing"
SHAPES = [
    pytest.param(((1, 1, 1), "llama", 4), id="one rank"),
    pytest.param(((1, 1, 2), "qwen3", 2), id="KVP2"),
] + [
    pytest.param((shape, architecture, 100), id=f"{Topology(*shape)} long", marks=pytest.mark.long)
    for shape, architecture in [
        ((1, 1, 1), "llama"),
        ((1, 1, 2), "qwen3"),
        ((2, 1, 1), "llama-biased"),
        ((1, 2, 1), "mistral"),
        ((2, 1, 2), "mistral"),
        ((1, 2, 2), "qwen2"),
    ]
]


@dataclass
class Pair:
    """Two replicas, and the router's part between them."""

    source: TierLife
    taker: TierLife
    random: Random
    sampling: Sampling
    tickets: list[KvTicket] = field(default_factory=list)
    """Those that offer something. Their holder's reports come last: ranks of the source run before those of the taker."""
    moved: int = 0
    had_nothing: int = 0
    asked: int = 0
    answered: int = 0

    def serve(self, first: list[Query], second: list[Query], drains: bool) -> None:
        """Serve requests of both to the end; the source may drain once it has got its own."""
        left, drain_left = ([*first], [*second]), drains
        for _ in range(MOST_EVENTS):
            busy = [life for life in (self.source, self.taker) if life.is_busy]
            if not (busy or any(left) or self._waiting()):
                break
            chance = self.random.random()
            if left[0] and (chance < 0.1 or not busy):
                self.source.submit(left[0].pop(0), self.sampling)
            elif left[1] and (chance < 0.2 or not busy):
                self.taker.submit(left[1].pop(0), self.sampling, peer=SOURCE)
            elif drain_left and not left[0] and chance < 0.25:
                self.drain(first)
                drain_left = False
            elif self._waiting() and (chance < 0.5 or not busy):
                self.pass_on()
            elif busy:
                self.random.choice(busy).move()
        assert len(self.source.ends) == len(first), "not all have ended"
        assert len(self.taker.ends) == len(second) + self.moved, "not all have ended"
        steps = len(self.source.steps)
        self._end(first)
        for life in (self.source, self.taker):
            check_nothing_is_left(life)
        del self.source.steps[steps:]  # ranks of the taker read before those of the source forget the tickets

    def _end(self, queries: Sequence[Query]) -> None:
        """Let the source know that nobody needs its KV any more."""
        for ticket in {one.ticket for one in self.taker.messages if isinstance(one, KvDone)}:
            self.source.handle(KvDone(ticket, SOURCE, TAKER))
        for query in queries:
            if self.source.ends[query.name] == "moved":
                self.source.handle(Cancel(query.name))
        while self.source.is_busy:
            self.source.move()

    def _waiting(self) -> bool:
        return self.asked < len(self.taker.messages) or self.answered < len(self.source.messages)

    def pass_on(self) -> None:
        """Carry one message about KV to the other replica."""
        if self.answered < len(self.source.messages):
            offer = self.source.messages[self.answered]
            self.answered += 1
            assert isinstance(offer, KvTicket)
            if offer.ticket:
                self.tickets.append(offer)
            self.had_nothing += not offer.ticket
            self.taker.handle(replace(offer, source=SOURCE))
            return
        ask = self.taker.messages[self.asked]
        self.asked += 1
        if isinstance(ask, KvAsk):
            self.source.handle(replace(ask, asker=TAKER, ticket=f"ticket {self.asked}"))

    def drain(self, queries: Sequence[Query]) -> None:
        """Drain the source, and move the requests that have begun to answer."""
        self.source.handle(Drain())
        for query in queries:
            sampled = self.source.sampled.get(query.name, 0)
            if sampled and query.name not in self.source.ends:
                self.source.end(query.name, "moved")
                self.source.handle(Cancel(query.name, moves=True))
                self.taker.submit(query, self.sampling, peer=SOURCE, sampled=sampled)
                self.moved += 1


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


def test_texts_are_those_of_the_reference_while_replicas_hand_kv_over(
    replica: tuple[Ranks, Reference, int], tmp_path: Path
) -> None:
    ranks, reference, examples = replica
    lanes = ranks.topology.kv
    happened = dict.fromkeys(EVERYTHING, 0)

    @given(
        seed=st.integers(0, 10_000),
        host_blocks=st.sampled_from([48, 100, 400]),
        is_striped=st.booleans(),
        is_sampled=st.booleans(),
        drains=st.booleans(),
        steps_ahead=st.integers(0, 2),
    )
    @example(1, 400, False, False, True, 1)
    @settings(max_examples=examples, deadline=None)
    def run(
        seed: int, host_blocks: int, is_striped: bool, is_sampled: bool, drains: bool, steps_ahead: int
    ) -> None:
        tiers = Tiers(host_blocks, 0, False, 0)
        sampling = SAMPLED if is_sampled else GREEDY
        config = ReplicaConfig(
            topology=ranks.topology,
            scheduling=SchedulingSpec(max_chunk_tokens=32, min_chunk_tokens=4, max_running=8),
            service_classes={"default": ServiceClass(name="default", default_output_tokens=5)},
            default_class="default",
            max_model_len=MODEL_TOKENS,
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=POOL_BLOCKS // lanes,
            long_threshold_tokens=60,
            tokens_per_lane=24 if lanes > 1 else MODEL_TOKENS,
            context_parallel=ContextParallel("striped", RingCosts(8, 2))
            if is_striped and lanes > 1
            else None,
            host_tier=HostTierFigures(host_blocks // lanes, 1, 1e-7, 1e-7),
            peer_block_seconds=1e-9,
        )
        source, taker = (
            TierLife(ReplicaController(config, PROFILE), Random(seed + number)) for number in range(2)
        )
        random = Random(seed)
        first = random_queries(random, config, reference, sampling, [])
        second = [
            replace(query, name=f"s{query.name}")
            for query in random_queries(random, config, reference, sampling, first)
        ]
        pair = Pair(source, taker, random, sampling)
        pair.serve(first, second, drains)

        served: dict[int, PeerBlocks] = {}
        taken: dict[int, PeerBlocks] = {}
        reports: list[DiskReport] = []
        try:
            check_on_ranks(
                ranks, source, reference, tiers, tmp_path, steps_ahead=steps_ahead, peers=peers_of(served, reports)
            )  # fmt: skip
            places = tuple(served[rank].server.figures for rank in range(ranks.topology.ranks))
            readers = peers_of(taken, reports, pair.tickets, places)
            check_on_ranks(ranks, taker, reference, tiers, tmp_path, steps_ahead=steps_ahead, peers=readers)
        finally:
            opened = [*served.values(), *taken.values()]
            with ThreadPoolExecutor(len(opened) or 1) as pool:  # each waits until its thread has ended
                list(pool.map(PeerBlocks.close, opened))
        assert not [one for one in reports if one.not_loaded], reports
        counts = taker.controller.pools.peer_counts
        assert counts.failed_loads == 0
        happened["offered"] += len(pair.tickets)
        happened["read"] += counts.loaded_blocks
        happened["moved"] += pair.moved
        happened["had nothing"] += pair.had_nothing

    run()
    assert not [name for name, times in happened.items() if not times], happened
