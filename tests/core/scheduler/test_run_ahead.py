"""On a single stage, decodes go ahead: a step is launched before the tokens that it begins with are drawn."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from medha.wire.messages import Done, Sample, StageFree


def positions(step: Any) -> dict[str, int]:
    """Where each sequence of a step begins."""
    return {entry.id: entry.extents[0].start for entry in step.entries}


def in_flight(replica: Any) -> list[dict[str, int]]:
    return [positions(step) for step in replica.controller.steps_in_flight]


SHORT, LONG = {"ttft_floor_seconds": 2.0}, {"ttft_floor_seconds": 0.02}
"""Beside the one a step of 1.2 ms is short, beside the other it is long."""


def draws(replica: Any) -> list[dict[str, int]]:
    """What is in flight once the forward pass of the oldest step has ended, and its tokens have not been drawn."""
    replica.handle(StageFree(replica.controller.steps_in_flight[0].step_id, 0))
    return in_flight(replica)


@pytest.mark.parametrize("steps", [SHORT, LONG], ids=["short", "long"])
def test_the_next_step_is_there_before_one_has_ended(replica_of: Any, submit_of: Any, steps: Any) -> None:
    replica = replica_of(**steps)
    replica.submit(submit_of("chat", 8, 6))
    assert draws(replica) == [{"chat": 0}], "it samples the first token"
    for position in range(8, 12):
        replica.advance()
        both = [{"chat": position}, {"chat": position + 1}]
        assert in_flight(replica) == (both if steps == SHORT else both[:1])
        assert draws(replica) == both
    replica.advance()
    assert draws(replica) == [{"chat": 12}], "which draws the last token: nothing comes behind it"
    replica.run().check_empty()
    assert len(replica.emitted["chat"]) == 6
    assert sum(len(step.entries) for step in replica.steps) == 6


def test_with_stages_a_sequence_has_one_token_in_flight(replica_of: Any, submit_of: Any) -> None:
    """There other steps run meanwhile."""
    replica = replica_of(stages=2)
    replica.submit(submit_of("chat", 8, 6))
    while replica.advance():
        assert len(in_flight(replica)) <= 1
    replica.check_empty()


def test_who_arrives_while_a_short_step_runs_waits_for_the_one_behind_it(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(**SHORT)
    replica.submit(submit_of("first", 8, 20))
    for _ in range(3):
        replica.advance()
    replica.submit(submit_of("second", 8, 20))
    assert in_flight(replica) == [{"first": 10}, {"first": 11}]
    for _ in range(2):
        replica.advance()
    assert in_flight(replica) == [{"first": 12, "second": 0}]
    replica.run().check_empty()


def test_who_arrives_while_a_long_step_runs_is_in_the_next_one(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(**LONG)
    replica.submit(submit_of("first", 8, 20))
    for _ in range(3):
        replica.advance()
    replica.submit(submit_of("second", 8, 20))
    assert draws(replica) == [{"first": 10}], "nothing goes ahead of it"
    replica.advance()
    assert in_flight(replica) == [{"first": 11, "second": 0}]
    assert draws(replica) == [{"first": 11, "second": 0}], (
        "the second's first token would miss the step behind"
    )
    replica.advance()
    assert draws(replica) == [{"first": 12, "second": 8}, {"first": 13, "second": 9}]
    replica.run().check_empty()


def test_who_waits_for_a_place_keeps_no_decode_from_running_ahead(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(max_running=2)
    for name in ("first", "second", "waits"):
        replica.submit(submit_of(name, 8, 20))
    for _ in range(3):
        replica.advance()
    assert [step.keys() for step in draws(replica)] == 2 * [{"first", "second"}]
    replica.cancel("first")
    for _ in range(3):  # until no step has it
        replica.advance()
    assert in_flight(replica)[0].keys() == {"second", "waits"}
    replica.run().check_empty()


@pytest.mark.parametrize("steps", [SHORT, LONG], ids=["short", "long"])
def test_who_waits_for_a_place_gets_the_one_of_a_request_that_ends_with_the_step_in_flight(
    replica_of: Any, submit_of: Any, steps: Any
) -> None:
    replica = replica_of(max_running=2, **steps)
    for name, tokens in (("stays", 20), ("ends", 5), ("waits", 5)):
        replica.submit(submit_of(name, 8, tokens))
    replica.run().check_empty()
    last = max(step.step_id for step in replica.steps if "ends" in positions(step))
    first = min(step.step_id for step in replica.steps if "waits" in positions(step))
    assert first == last + 1


@pytest.mark.parametrize("steps", [SHORT, LONG], ids=["short", "long"])
def test_nobody_ends_for_want_of_kv_that_a_step_in_flight_gives_back(
    replica_of: Any, submit_of: Any, steps: Any
) -> None:
    """Three find none to grow; one steps aside for all, because `ends` gives some back before another one has to."""
    sizes = {"default_output_tokens": 1, "max_model_len": 12}
    replica = replica_of(kv_blocks=7, block_size_tokens=4, **sizes, **steps)
    replica.submit(submit_of("before", 3, 1))
    for name, tokens in (("first", None), ("second", None), ("third", None), ("ends", 3), ("stays", 5)):
        replica.submit(submit_of(name, 3, tokens))
    replica.run().check_empty()
    assert [len(replica.emitted[name]) for name in ("first", "second", "third")] == [9, 9, 9]


def test_what_is_computed_behind_a_stop_token_is_dropped(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("chat", 8, 20))
    for _ in range(4):
        replica.advance()
    held = replica.controller.ledger.held_blocks
    replica.stop_chance = 1.0
    replica.advance()
    assert replica.endings["chat"] == ["stop"]
    assert len(in_flight(replica)) == 1
    assert replica.controller.ledger.held_blocks == held, "a step in flight still writes there"
    emitted = list(replica.emitted["chat"])
    replica.run().check_empty()
    assert replica.emitted["chat"] == emitted


def test_a_sequence_that_has_to_grow_keeps_the_others_with_it(replica_of: Any, submit_of: Any) -> None:
    """It grows once its token is there; if the others went ahead of it meanwhile, it would lose a step to them."""
    replica = replica_of(kv_blocks=100, block_size_tokens=4, default_output_tokens=4, max_model_len=60)
    replica.submit(submit_of("grows", 8))
    replica.submit(submit_of("other", 8, 50))
    while replica.advance():
        if "other" in replica.emitted and "other" not in replica.endings:
            assert len(replica.emitted["grows"]) == len(replica.emitted["other"]) + 1
    assert any(step.grows for step in replica.steps)
    assert len(replica.emitted["grows"]) == 52
    replica.check_empty()


def test_tokens_are_emitted_in_their_order(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("chat", 8, 5))
    replica.advance()
    draws(replica)
    step, ahead = (step.step_id for step in replica.controller.steps_in_flight)
    first, second = (Sample("chat", token) for token in (10, 11))
    (emit, *_) = replica.controller.handle(Done(step, (first,)), 1.0)
    assert emit.tokens == (10,)
    (emit, *_) = replica.controller.handle(Done(ahead, (second,)), 2.0)
    assert emit.tokens == (11,)


@pytest.mark.parametrize("failure_chance", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_many_that_stop_fail_and_are_cancelled_leave_nothing(
    replica_of: Any, submit_of: Any, seed: int, failure_chance: float
) -> None:
    random = Random(seed)
    steps = random.choice([SHORT, LONG])
    sizes = {"kv_blocks": 60, "default_output_tokens": 16}
    replica = replica_of(random=random, stop_chance=0.1, failure_chance=failure_chance, **sizes, **steps)
    for index in range(12):
        replica.submit(submit_of(f"r{index}", random.randint(1, 40), random.choice([None, 3, 30])))
        for _ in range(random.randint(0, 6)):
            replica.advance()
        if random.random() < 0.3:
            replica.cancel(f"r{random.randint(0, index)}")
    replica.run().check_empty()
