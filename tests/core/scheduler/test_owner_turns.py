"""Owners take turns if not all can be on time: no key's requests wait behind the backlog of another key."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from medha.cost.prefill_seconds import Alone
from medha.scheduler import prefill_order
from medha.scheduler.attained_service import AttainedService
from medha.scheduler.owner_turns import LITTLE_TOKENS, contested_until, take_turns
from medha.scheduler.policy import POLICIES
from medha.scheduler.request import NOWHERE, Prompt, Request
from medha.scheduler.request_table import RequestTable
from medha.slo import Targets
from medha.wire.messages import Step, Submit

CHUNK_TOKENS = 32
ROWS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100_000), st.booleans()), min_size=1, max_size=30)


@given(ROWS, st.randoms(use_true_random=False), st.floats(0, 1e6))
def test_an_owner_with_clearly_less_goes_first_and_the_policy_decides_the_rest(
    rows: list[tuple[int, int, bool]], random: Random, now: float
) -> None:
    owner = np.array([number for number, _, _ in rows])
    contested = np.array([flag for _, _, flag in rows])
    attained = AttainedService()
    turns = []
    for _, tokens, _ in rows:
        attained.charge("x", tokens, now)
        turns.append(attained.turn("x"))
        attained.take_back("x", tokens, now, now)
    turn = np.array(turns)
    policy = random.sample(range(len(rows)), len(rows))
    order = np.array(policy)
    take_turns(order, contested, owner, turn, now)
    assert sorted(order.tolist()) == sorted(policy)
    assert [row for row in order if not contested[row]] == [row for row in policy if not contested[row]]
    assert [place for place, row in enumerate(order) if contested[row]] == [
        place for place, row in enumerate(policy) if contested[row]
    ]
    for number in set(owner.tolist()):
        own = [row for row in order if owner[row] == number and contested[row]]
        assert own == [row for row in policy if owner[row] == number and contested[row]]
        assert turn[own].tolist() == sorted(turn[own])
    service = np.exp2(turn - now / 60.0) + LITTLE_TOKENS
    largest = {number: service[contested & (owner == number)].max() for number in set(owner[contested])}
    going = [row for row in order if contested[row]]
    for place, row in enumerate(going):
        for later in going[place + 1 :]:
            if policy.index(row) > policy.index(later):
                assert service[row] < service[later]
            assert not (4 * largest[owner[later]] < service[row]), "an owner with a quarter goes first"
        if max(largest.values()) <= 4 * min(largest.values()):
            assert place == 0 or policy.index(going[place - 1]) < policy.index(row), "about equal owners"


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 2)), max_size=20), st.integers(1, 3))
def test_the_last_deadline_that_edf_would_miss_ends_what_is_contested(
    rows: list[tuple[float, float]], lanes: int
) -> None:
    deadline = np.array([due for due, _ in rows])
    work = np.array([seconds for _, seconds in rows])
    missed, done = -inf, 0.0
    for due, seconds in sorted(rows, key=lambda one: one[0]):
        done += seconds / lanes
        if done > due + 0.5 + 1e-6:
            missed = due
    assert contested_until(deadline, work, lanes, 0.5, 0.0) == missed


def overloaded(replica_of: Any, submit_of: Any, policy: str, seed: int, owners: str) -> Any:
    """A replica with about ten times the prompts that it can serve in time, of some owners in turn."""
    random = Random(seed)
    replica = replica_of(policy=policy, kv_blocks=40_000, max_chunk_tokens=CHUNK_TOKENS, stages=seed % 2 + 1)
    for index in range(60):
        tokens = random.randint(50, 500)
        owner = owners[index % len(owners)]
        replica.submit(submit_of(f"r{index}", tokens, random.randint(1, 3), owner=owner))
        if random.random() < 0.5:
            replica.advance()
    return replica


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_owner_is_served_by_the_policy_alone(
    replica_of: Any, submit_of: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commands are those of a controller that knows no turns, also under overload."""
    mine = overloaded(replica_of, submit_of, policy, 3, "a")
    for _ in range(300):
        mine.advance()

    def none(*_: Any) -> float:
        return -inf

    monkeypatch.setattr(prefill_order, "contested_until", none)
    plain = overloaded(replica_of, submit_of, policy, 3, "a")
    for _ in range(300):
        plain.advance()
    assert mine.commands == plain.commands
    monkeypatch.undo()
    several = overloaded(replica_of, submit_of, policy, 3, "aaaaaaab")
    for _ in range(300):
        several.advance()
    assert several.commands != mine.commands, "the load is too small to show anything"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_while_all_can_be_on_time_owners_do_not_matter(replica_of: Any, submit_of: Any, policy: str) -> None:
    def commands(owners: str) -> Any:
        replica = replica_of(policy=policy, kv_blocks=40_000, max_chunk_tokens=CHUNK_TOKENS)
        for index in range(20):
            fields = {"deadline_after_seconds": 30.0 + index % 7, "owner": owners[index % len(owners)]}
            replica.submit(submit_of(f"r{index}", 40 * (index % 5 + 1), 3, **fields))
        replica.run().check_empty()
        return replica.commands

    assert commands("a") == commands("abc")


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=4, phases=[Phase.generate])
@given(st.integers(0, 1000), st.integers(1, 3 * CHUNK_TOKENS))
def test_a_request_of_another_owner_waits_for_no_backlog(
    replica_of: Any, submit_of: Any, policy: str, seed: int, tokens: int
) -> None:
    """An owner that has attained more gives way, whatever it has sent.

    From then on no step has a chunk of it instead of one of the other's prompt, except those in flight.
    """
    replica = overloaded(replica_of, submit_of, policy, seed, "a")
    # The turn of r0 came before its owner had attained anything, so no other owner goes before r0.
    while served_tokens(replica) < 4 * LITTLE_TOKENS or "r0" not in replica.emitted:
        replica.submit(submit_of(f"more {len(replica.log)}", 500, 2, owner="a"))
        replica.advance()
    target = {"deadline_after_seconds": 60.0, "contested_seconds": 70.0}
    replica.submit(submit_of("small", tokens, 2, owner="b", **target))
    before = len(replica.steps)
    while "small" not in replica.emitted:
        replica.advance()
        steps: list[Step] = replica.steps[before:]
        assert len(steps) < 20
    mine = [index for index, step in enumerate(steps) if any(one.id == "small" for one in step.entries)]
    count = -(-tokens // CHUNK_TOKENS)
    assert mine[0] <= 3, "steps in flight, and the one that was launched with its arrival"
    assert mine[:count] == [*range(mine[0], mine[0] + count)], "each next chunk is in the next step"


def served_tokens(replica: Any) -> int:
    """Return the prompt tokens that steps have computed."""
    return sum(extent.count for step in replica.steps for one in step.entries for extent in one.extents)


@pytest.mark.parametrize("output", [1, 2, 5])
@pytest.mark.parametrize("guesses", [0, 3])
def test_an_owner_is_charged_for_its_prompt_and_its_whole_output(
    replica_of: Any, submit_of: Any, output: int, guesses: int
) -> None:
    replica = replica_of(guesses=guesses)
    replica.submit(submit_of("a", 16, output, owner="x"))
    replica.run().check_empty()
    attained = replica.controller._attained.tokens("x", replica.now)
    assert attained == pytest.approx(16 + output, rel=0.005)  # a little is forgotten meanwhile


@pytest.mark.parametrize("served", [False, True])
def test_a_sequence_that_steps_aside_comes_back_with_the_turn_that_it_left_with(served: bool) -> None:
    """The turns of an owner then remain the same, whichever of its sequences leave and come back."""
    table, requests = RequestTable(), []
    for number, owner in enumerate("aaab"):
        submit = Submit(f"{number}", f"{number}", 1, 1, seed=1, owner=owner)
        prompt, aims, turn = Prompt(submit.prompt, 1), Targets(1.0, 0.05, 0.05), float(number)
        requests.append(
            Request(
                submit, submit.id, prompt, number, 0.0, aims, False, 1, 2, reservation_tokens=2, turn=turn
            )
        )
        table.add(requests[-1], 1.0, Alone(1.0, 0.0), 1.0, 0)

    leaves = requests[1]
    leaves.lane = 0
    table.place(leaves)
    if served:
        table.prefilled([leaves])
    table.stop(leaves)
    table.remove(leaves)
    assert sorted(table.turns[1]) == ([1.0, 2.0, 3.0] if served else [0.0, 1.0, 3.0])

    again = replace(leaves, lane=NOWHERE)
    again.continue_from(leaves)
    table.add(again, 1.0, Alone(1.0, 0.0), 1.0, 0)
    assert sorted(table.turns[1]) == [0.0, 1.0, 2.0, 3.0]
