"""Hand-overs of KV between two replicas' controllers: who asks, who gives, who waits for how long, and what is kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.cost.tier_seconds import ReadSeconds
from medha.kv.host_tier import Held, HostTier
from medha.kv.pools import KvPools
from medha.kv.prefix_cache import PrefixHasher, hash_at, hash_count
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.peer_kv import NOTHING_SECONDS, SHARE_SECONDS
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.status_report import PeersStatus, status
from medha.topology import Topology
from medha.wire.frames import decode, digest, encode
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    DiskReport,
    Done,
    Drain,
    HostTierFigures,
    KvAsk,
    KvDone,
    KvTicket,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tick,
)

SIZE, HOST_BLOCKS = 4, 60
HASHER = PrefixHasher(SIZE, b"shared")
SLOW = StepProfile(0.001, 0.01, 1e-7, 0.0001)
FAST = StepProfile(0.001, 1e-6, 1e-9, 0.0001)


def ids(seed: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


@dataclass
class Side:
    """A replica's controller, whose ranks run each step at once."""

    profile: StepProfile = SLOW
    host_blocks: int = HOST_BLOCKS
    kv_blocks: int = 200
    hands_over: bool = True
    output_tokens: int = (
        0  # after which steps that sample stay in flight until `end_steps`; 0: all outputs have one token
    )
    now: float = 0.0
    steps: list[Step] = field(default_factory=list)
    messages: list[KvAsk | KvTicket | KvDone] = field(default_factory=list)
    log: list[tuple[ControllerEvent, float, str]] = field(default_factory=list)
    admitted: dict[str, int] = field(default_factory=dict)  # request -> cached tokens
    in_flight: list[Step] = field(default_factory=list)
    sampled: int = 0
    _events: deque[ControllerEvent] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.core = self.new_core()

    def new_core(self) -> ReplicaController:
        config = ReplicaConfig(
            topology=Topology(1, 1, 1),
            scheduling=SchedulingSpec(),
            service_classes={"default": ServiceClass(name="default", default_output_tokens=4)},
            default_class="default",
            max_model_len=2000,
            block_size_tokens=SIZE,
            kv_blocks=self.kv_blocks,
            long_threshold_tokens=10_000,
            host_tier=HostTierFigures(self.host_blocks, 100, 1e-7, 1e-7),
            peer_block_seconds=1e-6 if self.hands_over else None,
        )
        return ReplicaController(config, self.profile)

    def handle(self, event: ControllerEvent) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return  # a call further up handles it
        while self._events:
            self._handle(self._events[0])
            self._events.popleft()

    def _handle(self, event: ControllerEvent) -> None:
        commands = self.core.handle(event, self.now)
        self.log.append((event, self.now, digest(commands)))
        for command in commands:
            match command:
                case Step() as step:
                    self.steps.append(step)
                    self.admitted |= {one.id: one.cached_tokens for one in step.admits}
                    samples = any(one.samples for one in step.entries)
                    if samples and self.output_tokens and self.sampled == self.output_tokens:
                        self.in_flight.append(step)
                    else:
                        self._end_step(step)
                case KvAsk() | KvTicket() | KvDone():
                    self.messages.append(command)
                case _:
                    pass

    def _end_step(self, step: Step) -> None:
        reason: Literal["length"] | None = None if self.output_tokens else "length"
        names = [one.id for one in step.entries if one.samples]
        self.sampled += len(names)
        tokens = len(PROMPT) + self.sampled
        hashes = HASHER.hashes(with_output(self.sampled)) if self.output_tokens else ""
        filled = [
            (name, hash_at(hashes, tokens // SIZE - 1)) for name in names if hashes and tokens % SIZE == 0
        ]
        samples = tuple(Sample(name, 7, reason) for name in names)
        self.handle(StageFree(step.step_id, 0))
        self.handle(Done(step.step_id, samples, (), 0.001, block_hashes=tuple(filled)))

    def end_steps(self) -> None:
        """End the steps in flight."""
        while self.in_flight:
            self._end_step(self.in_flight.pop(0))

    def submit(self, name: str, prompt: np.ndarray[tuple[int], np.dtype[np.int32]], **fields: object) -> None:
        salt = str(fields.pop("salt", ""))
        values: dict[str, object] = {
            "block_hashes": HASHER.hashes(prompt, salt), "sampling": Sampling(max_tokens=1), **fields
        }  # fmt: skip
        self.handle(Submit(name, name, len(prompt), len(prompt), seed=1, **values))  # type: ignore[arg-type]

    def last(self) -> KvAsk | KvTicket | KvDone:
        return self.messages[-1]

    @property
    def served_blocks(self) -> int:
        return self.core.pools.tiers[0].served_blocks

    @property
    def loads(self) -> list[tuple[str, int, int]]:
        return [
            (load.ticket, load.start, load.count) for step in self.steps for load in step.loads if load.count
        ]


PROMPT = ids(1, 101)  # 25 whole blocks
OTHER = ids(99, 101)


def with_output(tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate([PROMPT, np.full(tokens, 7, np.int32)])


HINT = {"peer": "r0", "peer_tokens": 100}


def asked(taker: Side, name: str = "q", **fields: object) -> KvAsk:
    """Submit a request with a hint; return what it asks."""
    taker.submit(name, PROMPT, **{**HINT, **fields})
    ask = taker.last()
    assert isinstance(ask, KvAsk)
    return ask


def offered(source: Side, ask: KvAsk, ticket: str = "t") -> KvTicket:
    source.handle(replace(ask, asker="r1", ticket=ticket))
    offer = source.last()
    assert isinstance(offer, KvTicket)
    return replace(offer, source="r0")


def blocks_of(offer: KvTicket) -> list[int]:
    return [hash_count(part.hashes) for part in offer.parts]


def source_with(prompt: np.ndarray[tuple[int], np.dtype[np.int32]] = PROMPT, **fields: int) -> Side:
    source = Side(**fields)  # type: ignore[arg-type]
    source.submit("d", prompt)
    assert source.admitted == {"d": 0}
    return source


def test_a_prompt_that_a_peer_has_is_read_and_then_fetched() -> None:
    source, taker = source_with(), Side()
    ask = asked(taker)
    assert (ask.source, ask.tokens, hash_count(ask.hashes)) == ("r0", 101, 25)
    assert taker.admitted == {}, "it waits"
    offer = offered(source, ask)
    assert [(part.lane, hash_count(part.hashes)) for part in offer.parts] == [(0, 25)]
    (serve,) = source.steps[-1].serves
    assert serve.ticket == "t"
    assert sum(one.count for one in serve.blocks) == 25
    taker.handle(offer)
    assert taker.loads == [("t", 0, 25)]
    assert taker.admitted == {}
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    assert taker.admitted == {"q": 100}
    avoided_seconds = taker.core.pools.avoided_prefill_seconds
    assert [name for name, seconds in avoided_seconds.items() if seconds] == ["peers"]
    assert taker.last() == KvDone("t", "r0")
    shown = status(taker.core, History(), 0.0).peers
    assert shown == PeersStatus(hits=1, loaded=25, offered=0, failures=0)
    source.handle(KvDone("t", "r0", asker="r1"))
    shown = status(source.core, History(), 0.0).peers
    assert shown == PeersStatus(hits=0, loaded=0, offered=25, failures=0)
    assert source.steps[-1].unserves == ("t",)
    assert source.served_blocks == 0
    for side in (source, taker):
        side.core.pools.tiers[0].check()


def test_a_request_that_waits_for_a_peer_counts_as_what_it_will_have_to_compute() -> None:
    source, taker = source_with(), Side()
    whole = taker.core.predictor.prefill_seconds(0, 101)
    asked(taker)
    assert 0 < taker.core.load().pending_prefill_seconds < whole / 10
    taker.now = 60.0
    taker.handle(Tick())
    assert taker.admitted == {"q": 0}, "it has waited too long"
    assert source.core.load().pending_prefill_seconds == 0


def test_what_is_here_already_is_not_read_again() -> None:
    source, taker = source_with(), Side()
    taker.submit("own", PROMPT[:41])
    taker.handle(offered(source, asked(taker)))
    assert taker.loads == [("t", 10, 15)]
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    assert taker.admitted["q"] == 100


@pytest.mark.parametrize(
    "fields",
    [
        {"peer": ""},
        {"peer_tokens": 0},
        {"block_hashes": ""},
        {"peer_tokens": 3},
    ],
    ids=["no peer", "nothing there", "no hashes", "less than a block"],
)
def test_a_request_does_not_wait_for_what_it_cannot_get(fields: dict[str, object]) -> None:
    taker = Side()
    taker.submit("q", PROMPT, **{**HINT, **fields})
    assert taker.messages == []
    assert taker.admitted == {"q": 0}


def test_a_prompt_that_is_computed_faster_than_read_is_computed() -> None:
    taker = Side(profile=FAST)
    taker.submit("q", PROMPT, **HINT)
    assert taker.messages == []
    assert taker.admitted == {"q": 0}


def test_a_replica_that_hands_nothing_over_neither_asks_nor_gives() -> None:
    taker, source = Side(hands_over=False), Side(hands_over=False)
    assert status(taker.core, History(), 0.0).peers is None
    taker.submit("q", PROMPT, **HINT)
    assert taker.messages == []
    source.submit("d", PROMPT)
    offer = offered(source, KvAsk("q", "r0", "", 101, HASHER.hashes(PROMPT)))
    assert (offer.ticket, offer.parts) == ("", ())


def test_the_first_reads_correct_the_prediction_of_later_ones() -> None:
    source, taker = source_with(), Side()
    taker.handle(offered(source, asked(taker)))
    prices = taker.core._tier_seconds
    assert prices is not None
    before = prices.peer_seconds(25)
    taker.handle(DiskReport(0, loaded=((0, 500.0),)))
    assert prices.peer_seconds(25) > before
    for _ in range(30):
        prices.observe_peer_load(25, 500.0)
    taker.submit("other", ids(2, 101), peer="r0", peer_tokens=100)
    assert taker.admitted["other"] == 0, "it is predicted to take minutes"


def test_keys_with_different_salts_share_nothing() -> None:
    source, taker = Side(), Side()
    source.submit("d", PROMPT, salt="one key")
    offer = offered(source, asked(taker, salt="another key"))
    assert offer.ticket == ""
    taker.handle(offer)
    assert taker.admitted == {"q": 0}
    assert source.served_blocks == 0


def test_hand_overs_that_were_recorded_are_replayed() -> None:
    source, taker = source_with(), Side()
    taker.handle(offered(source, asked(taker)))
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    source.handle(KvDone("t", "r0", asker="r1"))
    for side in (source, taker):
        core = side.new_core()
        for event, now, commands in side.log:
            assert not isinstance(event, Tick | Drain)
            again, _ = decode(encode(event))
            assert digest(core.handle(again, now)) == commands  # type: ignore[arg-type]


@pytest.mark.parametrize("when", ["before the answer", "before the blocks"])
def test_a_request_computes_if_its_peer_takes_too_long(when: str) -> None:
    source, taker = source_with(), Side()
    ask = asked(taker)
    offer = offered(source, ask)
    if when == "before the blocks":
        taker.handle(offer)
    due = taker.core.next_due
    assert due is not None
    assert due < 3, "no longer than computing takes, and a little"
    taker.now = due
    taker.handle(Tick())
    assert taker.admitted == {"q": 0}
    if when == "before the answer":
        taker.handle(offer)
        assert taker.last() == KvDone("t", "r0"), "the peer need not keep it"
        assert taker.loads == []
        taker.submit("next", ids(3, 101), **HINT)
        assert taker.admitted["next"] == 0, "a silent peer is not asked for a while"
        taker.now += 40
        asked(taker, "later", block_hashes=HASHER.hashes(ids(4, 101)))
    else:
        taker.handle(DiskReport(0, loaded=((0, 2.0),)))
        assert taker.last() == KvDone("t", "r0")
    taker.core.pools.tiers[0].check()


def test_a_failed_read_frees_its_room_and_the_peer_is_left_alone_for_a_while() -> None:
    source, taker = source_with(), Side()
    taker.handle(offered(source, asked(taker)))
    taker.handle(DiskReport(0, not_loaded=(0,)))
    assert taker.admitted == {"q": 0}
    assert taker.last() == KvDone("t", "r0")
    assert taker.core.pools.tiers[0].ledger.held_blocks == 0
    assert taker.core.pools.peer_counts.failed_loads == 1
    taker.submit("next", ids(3, 101), **HINT)
    assert taker.admitted["next"] == 0


def test_requests_of_one_prompt_ask_once_and_wait_together() -> None:
    source, taker = source_with(), Side()
    hashes = HASHER.hashes(PROMPT)
    for name in ("a", "b"):
        taker.handle(
            Submit(name, "p", 101, 101, seed=1, sampling=Sampling(max_tokens=1), block_hashes=hashes, **HINT)  # type: ignore[arg-type]
        )
    (ask,) = taker.messages
    assert isinstance(ask, KvAsk)
    taker.handle(Cancel("a"))
    taker.handle(offered(source, ask))
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    assert taker.admitted == {"b": 100}


def test_a_request_that_leaves_wants_no_answer() -> None:
    source, taker = source_with(), Side()
    ask = asked(taker)
    taker.handle(Cancel("q"))
    taker.handle(offered(source, ask))
    assert taker.last() == KvDone("t", "r0")
    assert taker.loads == []


@pytest.mark.parametrize("kind", ["foreign hashes", "no such lane", "another source"])
def test_an_answer_to_another_question_is_not_used(kind: str) -> None:
    source, taker = source_with(), Side()
    offer = offered(source, asked(taker))
    (part,) = offer.parts
    match kind:
        case "foreign hashes":
            offer = replace(offer, parts=(replace(part, hashes=HASHER.hashes(ids(9, 100))),))
        case "no such lane":
            offer = replace(offer, parts=(replace(part, lane=1),))
        case "another source":
            offer = replace(offer, source="r7")
    taker.handle(offer)
    assert taker.loads == []
    assert taker.last() == KvDone("t", offer.source)
    if kind != "another source":
        assert taker.admitted == {"q": 0}


def test_a_peer_that_refuses_is_not_asked_again_soon_and_one_without_this_prompt_is() -> None:
    for reason, asks_again in (("nothing here continues the prompt", True), ("KV of another grid", False)):
        taker = Side()
        taker.handle(KvTicket(asked(taker).id, "r1", reason=reason, source="r0"))
        assert taker.admitted == {"q": 0}
        taker.submit("next", ids(3, 101), **HINT)
        assert ("next" not in taker.admitted) == asks_again


def test_tickets_keep_at_most_half_of_a_host_tier() -> None:
    source = source_with(host_blocks=40)
    source.submit("other", OTHER)
    ask = KvAsk("q", "r0", "", 101, HASHER.hashes(PROMPT))
    of_other = KvAsk("p", "r0", "", 101, HASHER.hashes(OTHER))
    assert blocks_of(offered(source, ask, "t1")) == [20]
    assert blocks_of(offered(source, ask, "t2")) == [20], "what is kept already takes no more room"
    assert source.served_blocks == 20
    assert offered(source, of_other, "t3").ticket == ""
    source.handle(KvDone("t1", "r0", asker="another replica"))
    source.handle(KvDone("t2", "r0", asker="r1"))
    assert source.served_blocks == 20, "only its holder gives it back"
    source.handle(KvDone("t1", "r0", asker="r1"))
    assert source.served_blocks == 0
    assert blocks_of(offered(source, of_other, "t4")) == [20]


@pytest.mark.parametrize(
    ("served", "asked_for", "kept"),
    [
        ([(0, 0, 4)], [(0, 0, 9)], 4),
        ([(0, 0, 4), (0, 2, 5), (0, 7, 1)], [(0, 0, 9)], 8),
        ([(0, 0, 9), (1, 0, 3)], [(0, 0, 9), (1, 0, 5)], 12),
        ([(0, 3, 4)], [(0, 0, 9)], 0),
        ([(0, 0, 9), (1, 2, 3)], [(0, 4, 2), (1, 2, 9)], 5),
        ([], [(0, 0, 9)], 0),
    ],
)
def test_blocks_that_several_tickets_keep_count_once(
    served: list[tuple[int, int, int]], asked_for: list[tuple[int, int, int]], kept: int
) -> None:
    tier = HostTier(40, SIZE, Fixed())
    for seed in range(2):
        tier.take_in(HASHER.hashes(ids(seed, 40)), 0, 10, is_awaited=False)
    for number, one in enumerate(served):
        tier.serve(f"t{number}", [Held(*one)])
    blocks = {(extent, block) for extent, start, count in served for block in range(start, start + count)}
    assert tier.served_blocks == len(blocks)
    assert tier.served_of(Held(*one) for one in asked_for) == kept


def test_a_ticket_that_nobody_gives_back_ends_by_itself() -> None:
    source = source_with()
    offered(source, KvAsk("q", "r0", "", 101, HASHER.hashes(PROMPT)))
    due = source.core.next_due
    assert due is not None
    assert SHARE_SECONDS <= due < 2 * SHARE_SECONDS
    source.now = due
    source.handle(Tick())
    assert source.served_blocks == 0
    assert source.steps[-1].unserves == ("t",)
    assert source.core.next_due is None
    assert source.core.idle


def test_blocks_of_a_ticket_stay_while_others_are_offloaded() -> None:
    source = source_with(host_blocks=50, kv_blocks=60)
    offered(source, KvAsk("q", "r0", "", 101, HASHER.hashes(PROMPT)))
    for seed in range(20, 40):
        source.submit(str(seed), ids(seed, 150))
        source.core.pools.tiers[0].check()
    tier = source.core.pools.tiers[0]
    assert sum(one.count for one in tier.match(HASHER.hashes(PROMPT), 0, 25)) == 25
    assert tier.counts.dropped_blocks > 0
    source.handle(KvDone("t", "r0", asker="r1"))
    for seed in range(40, 60):
        source.submit(str(seed), ids(seed, 190))
    assert sum(one.count for one in tier.match(HASHER.hashes(PROMPT), 0, 25)) < 25


# --- a replica that drains ----------------------------------------------------------------------------------


def moved_from(source: Side, *, drains: bool = True, ends_steps: bool = True) -> KvAsk:
    """Let a source sample 40 tokens of a request, which then moves; return what another replica asks."""
    source.output_tokens = 40
    source.submit("q", PROMPT, sampling=Sampling(max_tokens=500))
    assert source.sampled == 40
    if drains:
        source.handle(Drain())
    source.handle(Cancel("q", moves=True))
    if ends_steps:
        source.end_steps()
    whole = with_output(40)
    return KvAsk("q~1", "r0", "", len(whole), HASHER.hashes(whole))


def test_a_replica_that_drains_gives_prompt_and_output_of_a_request_that_moves() -> None:
    source, taker = Side(), Side()
    ask = moved_from(source)
    assert source.core.idle
    assert not source.core.is_drained, "the KV is still to be read"
    offer = offered(source, ask)
    assert [(part.lane, hash_count(part.hashes)) for part in offer.parts] == [(0, 35)]
    taker.handle(
        Submit(
            "q~1", "q~1", 141, 101, seed=1, sampling=Sampling(max_tokens=41), peer="r0", peer_tokens=140,
            block_hashes=ask.hashes,
        )
    )  # fmt: skip
    taker.handle(offer)
    assert taker.loads == [("t", 0, 35)]
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    assert taker.admitted == {"q~1": 140}, "the last token is computed"
    assert taker.core.resumed_tokens == 140
    source.handle(replace(taker.last(), asker="r1"))
    assert not source.core.is_drained, "its router has not said that it goes on"
    source.handle(Cancel("q"))
    assert source.core.is_drained
    assert source.served_blocks == 0
    for side in (source, taker):
        side.core.pools.tiers[0].check()
        assert side.core.pools.held_blocks == 0


def test_a_replica_that_drains_waits_for_a_ticket_until_it_is_void() -> None:
    source = Side()
    offered(source, moved_from(source))
    source.handle(Cancel("q"))
    assert not source.core.is_drained
    due = source.core.next_due
    assert due is not None
    source.now = due
    source.handle(Tick())
    assert source.core.is_drained


def test_a_replica_that_drains_does_not_wait_for_what_ends_without_a_move() -> None:
    source = Side(output_tokens=40)
    source.submit("q", PROMPT, sampling=Sampling(max_tokens=500))
    source.handle(Drain())
    source.handle(Cancel("unknown", moves=True))
    source.handle(Cancel("q"))
    assert not source.core.is_drained
    source.end_steps()
    assert source.core.is_drained


def test_output_can_be_read_while_a_step_with_its_request_is_in_flight() -> None:
    source = Side()
    ask = moved_from(source, ends_steps=False)
    assert source.core.steps_in_flight
    assert [hash_count(part.hashes) for part in offered(source, ask).parts] == [35]


def test_tickets_of_a_replica_that_drains_get_all_of_its_host_tier() -> None:
    source = source_with(host_blocks=40)
    source.submit("other", OTHER)
    source.handle(Drain())
    ask = KvAsk("q", "r0", "", 101, HASHER.hashes(PROMPT))
    assert blocks_of(offered(source, ask, "t1")) == [25]
    assert blocks_of(offered(source, replace(ask, hashes=HASHER.hashes(OTHER)), "t2")) == [15]


def test_a_request_that_moves_from_a_replica_that_serves_gets_all_of_its_host_tier() -> None:
    """So a prompt goes to a replica that decodes as a whole, if the host tier has room for it alone."""
    source = Side(host_blocks=40)
    ask = moved_from(source, drains=False)
    other = replace(ask, id="r", hashes=HASHER.hashes(PROMPT, "another key"))
    assert blocks_of(offered(source, other, "t0")) == []
    longer = np.concatenate([with_output(40), ids(5, 4)])
    another = KvAsk("s", "r0", "", len(longer), HASHER.hashes(longer))
    assert blocks_of(offered(source, another, "t0")) == [20], "a longer prompt is of another request"
    source.handle(KvDone("t0", "r0", asker="r1"))
    assert blocks_of(offered(source, ask, "t1")) == [35]
    source.handle(KvDone("t1", "r0", asker="r1"))
    source.handle(Cancel("q"))
    assert blocks_of(offered(source, ask, "t2")) == [20], (
        "it goes on elsewhere, and others ask for its prompt"
    )


class Fixed:
    """Times by which everything is worth a copy."""

    def fetch_seconds(self, blocks: int) -> float:
        return 1e-6 * blocks

    def compute_seconds(self, context: int, tokens: int) -> float:
        return 1.0 * (tokens - context)

    def load_seconds(self, blocks: int, files: int) -> float:
        return 1e-6 * (blocks + files)

    def peer_seconds(self, blocks: int) -> float:
        return 1e-6 * blocks


def two_lanes() -> KvPools:
    return KvPools(
        lanes=2, kv_blocks=16, block_size_tokens=SIZE, tokens_per_lane=4 * SIZE, host_blocks=64, prices=Fixed(),
        lane_ranks=[(0,), (1,)], has_peers=True,
    )  # fmt: skip


def compute(
    pools: KvPools,
    name: str,
    prompt: np.ndarray[tuple[int], np.dtype[np.int32]],
    owners: tuple[int, ...] | None = None,
) -> None:
    tokens = len(prompt)
    hashes = HASHER.hashes(prompt)
    assert pools.admit(name, tokens, tokens, block_hashes=hashes, owners=owners) is not None
    pools.computed(name, tokens)
    pools.release(name, tokens)
    pools.take_inserts()
    pools.take_releases()


def test_a_lane_that_has_several_parts_of_a_long_prompt_gives_each_block_as_what_it_is() -> None:
    """The prompt was computed twice, and its second half lay on the lane on which the first half had been."""
    prompt = ids(1, 16 * SIZE + 1)
    hashes = HASHER.hashes(prompt)
    source, taker = two_lanes(), two_lanes()
    compute(source, "d", prompt)
    compute(source, "e", prompt, owners=(1,))
    for seed in (50, 51):
        compute(source, str(seed), ids(seed, 30 * SIZE))  # they move the prompt to the host tier
    parts = source.share("t", len(prompt), hashes, is_long=True)
    assert [(part.lane, hash_count(part.hashes)) for part in parts] == [(0, 9), (0, 7)]
    serves, _ = source.take_serves()
    offered: dict[int, list[str]] = {}
    for serve in serves:
        assert serve.lane not in offered, "a rank knows one list of blocks for a ticket"
        places = source.tiers[serve.lane]._extents
        offered[serve.lane] = [
            hash_at(places[one.extent].hashes, one.start + block)
            for one in serve.blocks
            for block in range(one.count)
        ]
    taker.begin_peer_loads("t", parts)
    read = 0
    for load in taker.take_loads():
        extent = taker.tiers[load.lane]._extents[read % 2]
        wanted = [hash_at(extent.hashes, block) for block in range(load.count)]
        assert offered[load.lane][load.start : load.start + load.count] == wanted
        read += 1
    assert read == 2
    assert [tier.served_blocks for tier in source.tiers] == [16, 0]
    source.unshare("t")
    assert [tier.served_blocks for tier in source.tiers] == [0, 0]


def test_a_ticket_of_which_nothing_is_read_is_given_back_at_once() -> None:
    """Its blocks are being read already: with another ticket, or from files."""
    source, taker = source_with(), Side()
    first, second = asked(taker, "q1"), asked(taker, "q2")
    taker.handle(offered(source, first, "t1"))
    taker.handle(offered(source, second, "t2"))
    assert taker.loads == [("t1", 0, 25)]
    assert taker.last() == KvDone("t2", "r0")
    assert taker.admitted == {}, "both wait"
    taker.handle(DiskReport(0, loaded=((0, 0.01),)))
    assert taker.admitted["q1"] == 100
    assert taker.admitted["q2"] == 100
    assert [one.ticket for one in taker.messages if isinstance(one, KvDone)] == ["t2", "t1"]


def test_a_request_waits_no_longer_for_the_blocks_if_the_answer_took_long() -> None:
    source, taker = source_with(), Side()
    offer = offered(source, asked(taker))
    due = taker.core.next_due
    assert due is not None
    taker.now = due - 0.01
    taker.handle(offer)
    assert taker.core.next_due == due


def test_a_request_waits_no_longer_than_computing_takes_and_a_quarter_of_a_second() -> None:
    taker = Side()
    compute = taker.core.predictor.prefill_seconds(0, 101) - taker.core.predictor.prefill_seconds(100, 101)
    taker.core._tier_seconds._peer_reads = ReadSeconds(0.9 * compute, 0.0)  # type: ignore[union-attr]
    asked(taker)
    due = taker.core.next_due
    assert due is not None
    assert due <= 0.25 + 1.001 * compute


def test_a_peer_that_had_nothing_of_a_prompt_is_not_asked_for_its_beginning_for_a_while() -> None:
    taker = Side()
    ask = asked(taker)
    taker.handle(replace(offered(Side(), ask), source="r0"))
    assert taker.admitted == {"q": 0}
    taker.submit("same beginning", np.concatenate([PROMPT[:40], ids(9, 60)]), **HINT)
    assert taker.messages == [ask]
    other = ids(8, 101)
    taker.submit("another", other, **HINT)
    assert len(taker.messages) == 2
    taker.now = NOTHING_SECONDS
    taker.submit("later", PROMPT[:97], **{**HINT, "salt": ""})
    assert taker.core.pools.expected(97, HASHER.hashes(PROMPT[:97]))[0] == 96, "it was computed here"
    assert taker.core._peer_kv._lacks_until.keys() == {("r0", hash_at(ask.hashes, 0))}


@pytest.mark.parametrize(("moves", "ends"), [(True, 0.0), (False, 1.0)])
def test_a_request_that_moves_does_not_count_as_an_ended_output(moves: bool, ends: float) -> None:
    source = Side(output_tokens=40)
    source.submit("q", PROMPT, sampling=Sampling(max_tokens=500))
    source.handle(Cancel("q", moves=moves))
    source.end_steps()
    counts = source.core._output_lengths._classes["default"]
    assert (counts.observed > 0, counts.ends.sum()) == (True, ends)
