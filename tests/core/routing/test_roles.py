"""Roles of replicas in a router: which of them a prompt goes to, when a sequence moves, and who serves if a role is missing."""

from dataclasses import replace

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, Prefix, marks
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Arrive,
    BundleKnown,
    Deliver,
    LinkLost,
    Move,
    NewSequence,
    Notice,
    Received,
    RouterCommand,
    Send,
    SendPrompt,
)
from medha.wire.messages import Announce, Cancel, Emit, Refused, Sampling, ServiceClassTerms, Submit

POINTS = ((100, 1.0), (10_000, 100.0))  # computing a token takes 10 ms
CARD = Announce(
    replica="r0",
    model="m",
    digest="d",
    epoch=1,
    ready=True,
    draining=False,
    max_model_len=10_000,
    vocab_size=100,
    kv_tokens_total=10_000,
    kv_tokens_free=10_000,
    running=0,
    waiting=0,
    pending_prefill_seconds=0.0,
    longest_request_tokens=10_000,
    waiting_limit=100,
    service_classes=(ServiceClassTerms("default", 2.0, 3.0, 0.05, 0.01, 400),),
    prefill_points=POINTS,
    hands_kv_over=True,
    read_seconds=0.8,  # so a prompt of 100 tokens is not worth a move, and one of 200 is
    read_seconds_per_token=0.001,
)
LONG, SHORT = 640, 64


class World:
    """A router's core and the replicas that it hears of."""

    def __init__(self, **roles: str) -> None:
        self.core = RouterCore()
        self.core.handle(BundleKnown("d"), 0.0)
        self.notices: list[str] = []
        self.cards = {name: replace(CARD, replica=name, role=role) for name, role in roles.items()}
        for name in roles:
            self.announce(name)

    def announce(self, name: str, **fields: object) -> list[RouterCommand]:
        self.cards[name] = replace(self.cards[name], **fields)  # type: ignore[arg-type]
        return self._noted(self.core.handle(Received(name, self.cards[name]), 0.0))

    def lose(self, name: str) -> list[RouterCommand]:
        return self._noted(self.core.handle(LinkLost(name), 0.0))

    def _noted(self, commands: list[RouterCommand]) -> list[RouterCommand]:
        self.notices += [one.text for one in commands if isinstance(one, Notice)]
        return commands

    def ask(
        self, name: str, tokens: int, seed: int = 0, samples: int = 1, **sampling: object
    ) -> list[tuple[str, Submit]]:
        new = tuple(
            NewSequence(
                f"{name}{at}" if at else name, name, tokens, 7,
                Sampling(**{"max_tokens": 50, **sampling}),  # type: ignore[arg-type]
                at, prefix_of(tokens, seed),
            )
            for at in range(samples)
        )  # fmt: skip
        return submits(self.core.handle(Arrive("m", "d", new), 0.0))

    def emit(self, replica: str, wire_id: str, *tokens: int, now: float = 1.0) -> list[RouterCommand]:
        return self.core.handle(Received(replica, Emit(wire_id, tokens)), now)


def prefix_of(tokens: int, seed: int) -> Prefix:
    ids = np.random.default_rng(seed).integers(0, 100, tokens).astype(np.int32)
    return marks(PrefixHasher(MARK_BLOCK_TOKENS, b"k").hashes(ids))


def submits(commands: list[RouterCommand]) -> list[tuple[str, Submit]]:
    return [
        (one.replica, one.message)
        for one in commands
        if isinstance(one, Send) and isinstance(one.message, Submit)
    ]


def test_a_long_prompt_is_computed_at_one_replica_and_moves_with_its_first_token() -> None:
    world = World(d="decode", p="prefill")
    ((replica, submit),) = world.ask("a", LONG)
    assert (replica, submit.id, submit.peer) == ("p", "a", "")
    delivered, move, cancel, prompt, sent = world.emit("p", "a", 9)
    assert delivered == Deliver("a", (9,))
    assert move == Move("a", "p")
    assert cancel == Send("p", Cancel("a", moves=True))
    assert prompt == SendPrompt("d", "a~1/prompt", "a", (9,))
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Submit)
    resumed = sent.message
    assert (sent.replica, resumed.id, resumed.tokens, resumed.prompt_length) == ("d", "a~1", 641, LONG)
    assert (resumed.peer, resumed.peer_tokens, resumed.seed) == ("p", LONG, 7)
    age, due = resumed.age_seconds, resumed.deadline_after_seconds
    assert (age, due) == (1.0, 1.0 + 3 * (0.8 + 0.641)), "due as a prompt that takes as long as the read"
    freed = Send("p", Cancel("a"))
    assert world.emit("d", "a~1", 8) == [Deliver("a", (8,)), freed], (
        "it moves once, and its KV there is needed no longer"
    )


def test_what_the_first_replica_samples_after_the_move_is_dropped_and_no_token_is_lost() -> None:
    world = World(d="decode", p="prefill")
    world.ask("a", LONG)
    world.emit("p", "a", 9)
    assert world.emit("p", "a", 8) == [], "it has crossed the move"
    assert world.emit("d", "a~1", 8) == [Deliver("a", (8,)), Send("p", Cancel("a"))]
    assert world.core.handle(Received("d", Emit("a~1", (7,), "stop")), 2.0) == [Deliver("a", (7,), "stop")]
    assert world.core.open == 0


def test_a_sequence_that_ends_with_its_first_token_does_not_move() -> None:
    world = World(d="decode", p="prefill")
    world.ask("a", LONG)
    assert world.core.handle(Received("p", Emit("a", (9,), "stop")), 1.0) == [Deliver("a", (9,), "stop")]


@pytest.mark.parametrize(
    ("tokens", "sampling"), [(SHORT, {}), (MARK_BLOCK_TOKENS - 1, {}), (LONG, {"prompt_logprobs": 1})]
)
def test_a_prompt_that_is_not_worth_a_move_is_computed_where_it_decodes(
    tokens: int, sampling: dict[str, object]
) -> None:
    world = World(d="decode", p="prefill")
    ((replica, _),) = world.ask("a", tokens, **sampling)
    assert replica == "d"
    assert world.emit("d", "a", 9) == [Deliver("a", (9,))]


def test_where_reading_takes_longer_than_computing_nothing_moves() -> None:
    world = World(d="decode", p="prefill")
    world.announce("d", read_seconds_per_token=0.008)  # computing one takes 10 ms
    assert [name for name, _ in world.ask("a", LONG)] == ["d"]


def test_a_prompt_that_continues_what_a_decode_replica_has_stays_there() -> None:
    world = World(d="decode", p="prefill")
    world.ask("a", LONG)
    world.emit("p", "a", 9)
    assert [name for name, _ in world.ask("b", LONG)] == ["d"], "it has the same prompt by then"
    assert [name for name, _ in world.ask("c", LONG, seed=1)] == ["p"]


def test_each_sample_of_a_prompt_moves_by_itself() -> None:
    world = World(d="decode", p="prefill")
    assert [(name, submit.id) for name, submit in world.ask("a", LONG, samples=2)] == [
        ("p", "a"),
        ("p", "a1"),
    ]
    ((_, first),) = submits(world.emit("p", "a", 9))
    ((_, second),) = submits(world.emit("p", "a1", 3))
    assert (first.sample_index, first.id, second.sample_index, second.id) == (0, "a~1", 1, "a1~1")


def test_replicas_that_do_both_take_either_phase_and_keep_what_they_begin() -> None:
    world = World(b="both", p="prefill")
    ((replica, _),) = world.ask("a", LONG)
    assert replica == "b", "by name, since both are idle"
    assert world.emit("b", "a", 9) == [Deliver("a", (9,))]
    world.announce("b", pending_prefill_seconds=50.0)
    assert [name for name, _ in world.ask("c", LONG, seed=1)] == ["p"]
    assert [name for name, _ in submits(world.emit("p", "c", 9))] == ["b"]
    assert world.notices == []


def test_a_sequence_decodes_where_it_is_until_another_replica_has_a_place_and_kv_for_it() -> None:
    world = World(d="decode", p="prefill")
    world.announce("d", kv_tokens_free=600)
    world.ask("a", LONG)
    assert world.emit("p", "a", 9) == [Deliver("a", (9,))]
    world.announce("d", kv_tokens_free=5000, waiting=100)
    assert world.emit("p", "a", 8) == [Deliver("a", (8,))]
    world.announce("d", waiting=0)
    ((replica, submit),) = submits(world.emit("p", "a", 7))
    assert (replica, submit.tokens) == ("d", LONG + 3)


def test_a_move_that_is_refused_waits_for_the_next_place() -> None:
    world = World(d="decode", p="prefill")
    world.ask("a", LONG)
    world.emit("p", "a", 9)
    assert submits(world.core.handle(Received("d", Refused("a~1", "capacity")), 1.0)) == []
    ((replica, submit),) = submits(world.announce("d"))
    assert (replica, submit.id, submit.tokens, submit.peer) == ("d", "a~2", 641, "p")


@pytest.mark.parametrize("alone", ["prefill", "decode"])
def test_a_role_that_is_alone_serves_and_says_so(alone: str) -> None:
    world = World(r=alone)
    assert [name for name, _ in world.ask("long", LONG)] == ["r"]
    assert [name for name, _ in world.ask("short", SHORT, seed=1)] == ["r"]
    assert world.emit("r", "long", 9) == [Deliver("long", (9,))]
    (notice,) = world.notices
    assert f"only replicas of the role `{alone}` serve the model 'm'" in notice
    world.announce("r")
    assert len(world.notices) == 1, "once"
    world.cards["o"] = replace(CARD, replica="o", role="both")
    world.announce("o")
    assert world.notices[1:] == [f"the role `{alone}` no longer serves the model 'm' alone"]


def test_losing_a_decode_replica_lets_its_sequences_go_on_by_what_is_known_of_their_kv() -> None:
    world = World(d="decode", e="decode", p="prefill")
    world.ask("a", LONG)
    ((first, _),) = submits(world.emit("p", "a", 9))
    other = {"d": "e", "e": "d"}[first]
    ((replica, submit),) = submits(world.lose(first))
    assert (replica, submit.peer, submit.tokens) == (other, "p", 641), "the prompt is still there"
    ((replica, submit),) = submits(world.lose(other))
    assert (replica, submit.tokens) == ("p", 641), "no other is left"
    assert "`prefill`" in world.notices[-1]


def test_a_prompt_whose_kv_is_lost_is_computed_at_a_prefill_replica_again() -> None:
    world = World(d="decode", p="prefill", q="prefill")
    world.ask("a", LONG)
    world.emit("p", "a", 9)
    world.lose("p")
    world.cards["e"] = replace(CARD, replica="e", role="decode")
    world.announce("e")
    ((replica, submit),) = submits(world.lose("d"))
    assert (replica, submit.tokens, submit.peer) == ("q", 641, "")
    ((replica, submit),) = submits(world.emit("q", "a~2", 8))
    assert (replica, submit.tokens, submit.peer) == ("e", 642, "q")


def test_a_long_output_of_a_replica_that_drains_goes_on_where_outputs_are_decoded() -> None:
    world = World(d="decode", p="prefill")
    world.ask("a", LONG, max_tokens=2000)
    world.emit("p", "a", 9)
    world.emit("d", "a~1", *range(599))
    world.cards["e"] = replace(CARD, replica="e", role="decode")
    world.announce("e")
    ((replica, submit),) = submits(world.announce("d", draining=True, drain_seconds=15.0))
    assert (replica, submit.peer, submit.peer_tokens) == ("e", "d", LONG + 599)
    assert world.emit("e", "a~2", 7) == [Deliver("a", (7,)), Send("d", Cancel("a~1"))]


def test_a_long_output_moves_once_there_is_a_decode_replica() -> None:
    world = World(p="prefill")
    world.ask("a", LONG, max_tokens=2000)
    world.emit("p", "a", *range(600))
    world.cards["d"] = replace(CARD, replica="d", role="decode")
    world.announce("d")
    ((replica, submit),) = submits(world.emit("p", "a", 7))
    assert (replica, submit.peer, submit.peer_tokens) == ("d", "p", LONG + 600)


def test_replicas_that_cannot_read_the_kv_of_prefill_replicas_compute_prompts_too() -> None:
    """Else each prompt would be computed twice in a rollout, and its stream would wait for the second time."""
    world = World(d="decode", p="prefill")
    world.announce("d", kv_identity="newer")
    served = {name for seed in range(4) for name, _ in world.ask(f"a{seed}", LONG, seed=seed)}
    assert served == {"d", "p"}
    for name, replica in world.core._replicas.items():
        for wire_id in list(replica.open):
            assert submits(world.emit(name, wire_id, 9)) == [], "it stays"


def test_a_sequence_moves_only_to_a_replica_that_reads_its_kv() -> None:
    world = World(d="decode", e="decode", p="prefill")
    world.announce("d", kv_identity="newer")
    world.announce("e", waiting=100)
    world.ask("a", LONG)
    assert world.emit("p", "a", 9) == [Deliver("a", (9,))]
    world.announce("e", waiting=0)
    assert [name for name, _ in submits(world.emit("p", "a", 8))] == ["e"]


def test_a_text_that_has_begun_stays_where_kv_is_rounded_alike() -> None:
    world = World(d="decode", p="prefill")
    world.announce("d", kv_dtype="fp8")
    world.ask("a", LONG)
    assert world.emit("p", "a", 9) == [Deliver("a", (9,))]
