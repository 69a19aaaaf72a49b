"""On a single stage, decodes go ahead: the next step is on its way before the tokens that it begins with are drawn."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest


def positions(step: Any) -> dict[str, int]:
    """Where each sequence of a step begins."""
    return {entry.id: entry.extents[0].start for entry in step.entries}


def in_flight(replica: Any) -> list[dict[str, int]]:
    return [positions(step) for step in replica.controller.steps_in_flight]


def test_ranks_that_decode_have_the_next_step_before_they_have_ended_one(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of()
    replica.submit(submit_of("chat", 8, 6))
    assert in_flight(replica) == [{"chat": 0}], "whether its prompt can be computed is not known yet"
    for position in range(8, 11):
        replica.advance()
        assert in_flight(replica) == [{"chat": position}, {"chat": position + 1}]
    replica.advance()
    assert in_flight(replica) == [{"chat": 11}, {"chat": 12}]
    replica.advance()
    assert in_flight(replica) == [{"chat": 12}], "of which the last token is drawn: nothing comes behind it"
    replica.run().check_empty()
    assert len(replica.emitted["chat"]) == 6
    assert sum(len(step.entries) for step in replica.steps) == 6


def test_with_stages_a_sequence_has_one_token_in_flight(replica_of: Any, submit_of: Any) -> None:
    """There another step runs meanwhile: the pipeline itself leaves time to prepare the next one."""
    replica = replica_of(stages=2)
    replica.submit(submit_of("chat", 8, 6))
    while replica.advance():
        assert len(in_flight(replica)) <= 1
    replica.check_empty()


def test_who_has_drawn_its_first_token_decodes_with_the_next_step(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("first", 8, 20))
    for _ in range(3):
        replica.advance()
    replica.submit(submit_of("second", 8, 20))
    (running, ahead) = in_flight(replica)
    assert "second" not in running | ahead, "it comes behind what is on its way"
    for _ in range(2):
        replica.advance()
    assert [step.keys() for step in in_flight(replica)] == [{"first", "second"}], (
        "none goes behind its prompt"
    )
    replica.advance()
    assert [step.keys() for step in in_flight(replica)] == 2 * [{"first", "second"}]
    replica.run().check_empty()


def test_no_step_goes_ahead_while_a_prefill_waits(replica_of: Any, submit_of: Any) -> None:
    """Which one is next had better be decided when its turn comes."""
    replica = replica_of(max_chunk_tokens=8, min_chunk_tokens=1)
    replica.submit(submit_of("chat", 8, 40))
    for _ in range(3):
        replica.advance()
    replica.submit(submit_of("book", 80, 1))
    for _ in range(2):
        replica.advance()
    while "book" not in replica.emitted:
        (step,) = in_flight(replica)
        assert "chat" in step
        replica.advance()
    replica.run().check_empty()


def test_what_is_computed_behind_a_stop_token_is_dropped(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(stop_chance=1.0)
    replica.submit(submit_of("one", 8, 20))
    replica.run().check_empty()
    replica.stop_chance = 0.0
    replica.submit(submit_of("many", 8, 20))
    for _ in range(4):
        replica.advance()
    held = replica.controller.ledger.held_blocks
    replica.stop_chance = 1.0
    replica.advance()
    assert replica.endings["many"] == ["stop"]
    assert replica.controller.ledger.held_blocks == held, "a step in flight still writes there"
    emitted = list(replica.emitted["many"])
    replica.run().check_empty()
    assert replica.emitted["many"] == emitted
    assert len(replica.emitted["one"]) == 1


def test_kv_is_not_looked_for_on_behalf_of_a_token_that_may_never_be_drawn(
    replica_of: Any, submit_of: Any
) -> None:
    """A sequence at the end of its reservation grows with the step behind, as it would without going ahead."""
    replica = replica_of(kv_blocks=100, block_size_tokens=4, default_output_tokens=4, max_model_len=60)
    replica.submit(submit_of("chat", 8))
    grown_at = []
    while replica.advance():
        for step in replica.controller.steps_in_flight:
            if step.grows and step.step_id not in grown_at:
                grown_at.append(step.step_id)
                assert len(replica.controller.steps_in_flight) <= 2
                assert replica.controller.steps_in_flight[0] is step, "no step before it was under way"
    assert grown_at
    replica.check_empty()
    assert len(replica.emitted["chat"]) == 52


@pytest.mark.parametrize("failure_chance", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(20))
def test_many_that_stop_fail_and_are_cancelled_leave_nothing(
    replica_of: Any, submit_of: Any, seed: int, failure_chance: float
) -> None:
    random = Random(seed)
    replica = replica_of(random=random, stop_chance=0.1, failure_chance=failure_chance, kv_blocks=60)
    for index in range(12):
        replica.submit(submit_of(f"r{index}", random.randint(1, 40), random.choice([None, 3, 30])))
        for _ in range(random.randint(0, 6)):
            replica.advance()
        if random.random() < 0.3:
            replica.cancel(f"r{random.randint(0, index)}")
    replica.run().check_empty()
