"""The controller with prefix caching, against ranks that check the content of every block they read."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.wire.messages import Done, Emit, EntryFailed, Sample, Step, StepProfile, Submit

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")


def submit_ids(replica: Any, submit: Submit, ids: tuple[int, ...]) -> None:
    """Submit a request whose prompt has these ids."""
    replica.prompt_ids[submit.prompt] = ids
    hashes = HASHER.hashes(np.array(ids, dtype=np.int32))
    replica.submit(replace(submit, tokens=len(ids), prompt_length=len(ids), block_hashes=hashes))


def last_step(replica: Any) -> Step:
    step: Step = replica.steps[-1]
    return step


def is_held(replica: Any, name: str) -> bool:
    held: bool = replica.controller._table.is_held(replica.controller.find(name))
    return held


def admits(replica: Any) -> dict[str, int]:
    """Cached tokens of every request that was admitted."""
    return {admit.id: admit.cached_tokens for step in replica.steps for admit in step.admits}


@given(seed=st.integers(0, 100_000))
def test_whatever_happens_every_block_holds_what_its_reader_expects(
    replica_of: Any, submit_of: Any, seed: int
) -> None:
    """Arrivals, cancels, failures, a full pool, chunks, several stages: the fake ranks compare every position."""
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "medha.scheduler.prefix_followers.WORTH_WAITING_TOKENS", random.choice([4, 12])
        )  # or nobody would wait
        replica = replica_of(
            random=Random(seed),
            stages=random.randint(1, 3),
            kv_blocks=random.choice([12, 25, 60]),
            default_output_tokens=16,
            max_chunk_tokens=random.choice([6, 32]),
            min_chunk_tokens=4,
            stop_chance=0.05,
            failure_chance=random.choice([0.0, 0.05]),
            hasher=random.choice([None, HASHER]),
        )
    for index in range(30):
        choice = random.random()
        ended = [name for name in replica.emitted if name in replica.endings]
        if choice < 0.1 and ended:  # the next turn of a chat
            before = random.choice(ended)
            ids = (*replica.prompt_ids[f"prompt of {before}"], *replica.emitted[before], 5)
            submit_ids(replica, submit_of(f"r{index}", len(ids), random.choice([3, 20])), ids)
        elif choice < 0.4:
            branch = random.randint(0, 3)
            length = random.randint(1, 40)
            ids = tuple(branch if position >= 10 * branch else 7 for position in range(length))
            submit_ids(replica, submit_of(f"r{index}", length, random.choice([None, 3, 20])), ids)
        elif choice < 0.45:
            known = [request.id for request in replica.controller.requests()]
            if known:
                replica.cancel(random.choice(known))
        else:
            replica.advance()
        replica.controller.ledger.check()
    replica.run().check_empty()
    assert replica.ledger.state_hash() == replica.controller.ledger.state_hash()
    alike = replica.controller._sharing._followers_of_prefixes
    assert not alike._waiting
    assert not alike._prefilling
    assert not alike._followers


def test_a_prompt_that_was_computed_before_computes_its_last_block_alone(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of()
    ids = tuple(range(16))
    for name in ("first", "second"):
        submit_ids(replica, submit_of(name, 16, 2), ids)
        first_step = len(replica.steps) - 1
        replica.run()
        assert len(replica.emitted[name]) == 2
    assert admits(replica) == {"first": 0, "second": 12}
    assert sum(entry.token_count for entry in replica.steps[first_step].entries) == 4
    emits = [command for commands in replica.commands for command in commands if isinstance(command, Emit)]
    assert [(emit.id, emit.cached_tokens) for emit in emits] == [
        ("first", 0),
        ("first", 0),
        ("second", 12),
        ("second", 0),
    ]


def test_blocks_are_shared_only_once_they_are_computed(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(stages=2, max_chunk_tokens=8, min_chunk_tokens=4)
    ids = tuple(range(30))
    submit_ids(replica, submit_of("first", 30, 2), ids)
    submit_ids(replica, submit_of("at once", 30, 2), ids)
    replica.run()
    assert admits(replica)["first"] == 0
    assert 0 <= admits(replica)["at once"] < 28, "what was still in the pipeline is not shared"
    submit_ids(replica, submit_of("later", 30, 2), ids)
    replica.run().check_empty()
    assert admits(replica)["later"] == 28


def test_a_prompt_still_being_computed_is_shared_as_far_as_it_is(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(max_chunk_tokens=8, min_chunk_tokens=4)
    submit_ids(replica, submit_of("long", 40, 2), tuple(range(40)))
    replica.advance()
    replica.advance()  # 16 of 40 tokens are computed
    submit_ids(replica, submit_of("short", 20, 2, deadline_after_seconds=0.01), tuple(range(20)))
    replica.run().check_empty()
    assert admits(replica)["short"] >= 16


def test_what_a_failed_entry_wrote_is_never_shared(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    submit_ids(replica, submit_of("fails", 16, 2), tuple(range(16)))
    step = last_step(replica)
    replica._pipeline.clear()
    replica.handle(Done(step.step_id, failures=(EntryFailed("fails", "out_of_memory"),)))
    replica.run()
    assert replica.controller.pools.cached_blocks == 0
    submit_ids(replica, submit_of("again", 16, 2), tuple(range(16)))
    replica.run().check_empty()
    assert admits(replica)["again"] == 0


def test_cached_blocks_count_as_free_and_give_way_to_requests(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=10)
    submit_ids(replica, submit_of("a", 32, 4), tuple(range(32)))
    replica.run()
    pools = replica.controller.pools
    assert pools.cached_blocks == 8
    assert pools.free_tokens == replica.controller.load().kv_tokens_free == 40
    submit_ids(replica, submit_of("b", 36, 4), tuple(range(100, 136)))
    assert last_step(replica).admits[0].evictions, "what is in the way is evicted, and the ranks are told"
    replica.run().check_empty()
    submit_ids(replica, submit_of("c", 36, 4), tuple(range(100, 136)))
    assert last_step(replica).admits[0].cached_tokens == 32


def test_without_prefix_caching_nothing_is_remembered(
    replica_of: Any, submit_of: Any, config_of: Any
) -> None:
    replica = replica_of()
    off = type(replica)(replace(config_of(), prefix_caching=False))
    for name in ("first", "second"):
        submit_ids(off, submit_of(name, 16, 2), tuple(range(16)))
        off.run()
    assert admits(off) == {"first": 0, "second": 0}
    assert not any(step.inserts for step in off.steps)
    assert off.controller.pools.cached_blocks == 0


@pytest.mark.parametrize("samples", [2, 5])
def test_samples_of_a_cached_prompt_fork_the_one_that_found_it(
    replica_of: Any, submit_of: Any, samples: int
) -> None:
    replica = replica_of()
    ids = tuple(range(18))
    submit_ids(replica, submit_of("before", 18, 2), ids)
    replica.run()
    for index in range(samples):
        submit_ids(replica, submit_of(f"s{index}", 18, 3, prompt="shared", sample_index=index), ids)
    replica.run().check_empty()
    found = admits(replica)
    assert found["s0"] == 16
    forks = [admit for step in replica.steps for admit in step.admits if admit.fork_of is not None]
    assert {admit.id for admit in forks} == {f"s{index}" for index in range(1, samples)}


def test_what_a_cancelled_request_still_had_in_flight_is_not_shared(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    submit_ids(replica, submit_of("a", 16, 5), tuple(range(16)))
    step = last_step(replica)
    replica.cancel("a")
    replica._pipeline.clear()
    replica.handle(Done(step.step_id, samples=(Sample("a", 3),)))
    replica.run()
    assert "a" not in replica.emitted
    assert replica.controller.pools.cached_blocks == 0
    assert replica.controller.pools.held_blocks == 0


# --- outputs ------------------------------------------------------------------------------------------


def test_the_next_turn_of_a_chat_finds_prompt_and_answer_cached(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(hasher=HASHER)
    ids = tuple(range(18))
    submit_ids(replica, submit_of("turn 1", 18, 12), ids)
    replica.run()
    ids = (*ids, *replica.emitted["turn 1"])  # 30 tokens, of which the last has no KV
    submit_ids(replica, submit_of("turn 2", 35, 8), (*ids, 1, 2, 3, 4, 5))
    replica.run()
    ids = (*ids, 1, 2, 3, 4, 5, *replica.emitted["turn 2"])  # 43
    submit_ids(replica, submit_of("turn 3", 44, 2), (*ids, 9))
    replica.run().check_empty()
    assert admits(replica) == {"turn 1": 0, "turn 2": 28, "turn 3": 40}


def test_the_answer_of_a_request_that_failed_is_not_shared(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(hasher=HASHER)
    ids = tuple(range(16))
    submit_ids(replica, submit_of("fails", 16, 40), ids)
    for _ in range(12):
        replica.advance()
    step = replica._pipeline.pop(0).step
    replica.handle(Done(step.step_id, failures=(EntryFailed("fails", "out_of_memory"),)))
    replica.run()
    outputs = tuple(replica.emitted["fails"])
    assert len(outputs) >= 8
    submit_ids(replica, submit_of("again", 16 + len(outputs), 2), (*ids, *outputs))
    replica.run().check_empty()
    assert admits(replica)["again"] == 16, "its prompt was computed before, and is good"


# --- requests that wait -------------------------------------------------------------------------------


def running(replica: Any) -> set[str]:
    return {request.id for request in replica.controller.requests() if not request.waits}


def test_questions_about_one_document_share_its_kv_and_run_together(replica_of: Any, submit_of: Any) -> None:
    """The pool holds the document and ten further blocks; each question needs two of its own."""
    replica = replica_of(kv_blocks=110, default_output_tokens=2)
    document = tuple(range(400))
    submit_ids(replica, submit_of("reader", 404, 3), (*document, 1, 2, 3, 4))
    replica.advance()
    names = [f"question {index}" for index in range(4)]
    for index, name in enumerate(names):
        submit_ids(replica, submit_of(name, 404, 3), (*document, 100 + index, 2, 3, 4))
    for _ in range(2):
        replica.advance()
    assert running(replica) >= set(names), "none waits until another has ended"
    replica.run().check_empty()
    assert {admits(replica)[name] for name in names} == {400}


def test_a_follower_may_start_once_the_prompt_that_begins_alike_is_computed(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=120, max_chunk_tokens=64)
    document = tuple(range(400))
    submit_ids(replica, submit_of("reader", 404, 30), (*document, 1, 2, 3, 4))
    for index in range(3):
        submit_ids(replica, submit_of(f"question {index}", 404, 2), (*document, 100 + index, 2, 3, 4))
    assert running(replica) == {"reader"}, "there is room for one document"
    pending = replica.controller.load().pending_prefill_seconds
    while not replica.emitted.get("reader"):
        replica.advance()
    assert replica.controller.load().pending_prefill_seconds < pending / 10
    for _ in range(8):
        replica.advance()
    assert all(replica.emitted.get(f"question {index}") for index in range(3))
    assert "reader" in running(replica), "they did not wait for it to end"
    replica.run().check_empty()


def test_a_cached_document_leaves_a_question_about_it_short(replica_of: Any, submit_of: Any) -> None:
    """Its KV is there: it piles up none, and so does not count against the caps on long prompts."""
    replica = replica_of(kv_blocks=400, long_threshold_tokens=100, max_running_long=1, max_chunk_tokens=300)
    document = tuple(range(400))
    submit_ids(replica, submit_of("before", 400, 2), document)
    replica.run()
    submit_ids(replica, submit_of("other long", 400, 9), tuple(range(1000, 1400)))
    submit_ids(replica, submit_of("question", 404, 2), (*document, 7, 7, 7, 7))
    submit_ids(replica, submit_of("third long", 400, 9), tuple(range(2000, 2400)))
    replica.advance()
    assert [{admit.id for admit in step.admits} for step in replica.steps if step.admits] == [
        {"before"},
        {"other long"},
        {"question"},
    ]
    replica.run().check_empty()


def test_the_ttft_target_of_a_cached_prompt_is_that_of_the_whole(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=4000)
    for name in ("first", "second"):
        hashes = HASHER.hashes(np.arange(8000, dtype=np.int32))
        replica.submit(submit_of(name, 8000, 2, prompt="the same", block_hashes=hashes))
        (request,) = replica.controller.requests()
        revised = request.targets.ttft_seconds
        if name == "first":
            expected = revised
        replica.run()
    assert revised == pytest.approx(expected, rel=0.2)
    assert revised > 2.0


@pytest.mark.parametrize("policy", ["fcfs", "lars", "guarded"])
@pytest.mark.parametrize("long_threshold_tokens", [1_000_000, 100])
def test_questions_that_arrive_together_compute_their_document_once(
    replica_of: Any, submit_of: Any, policy: str, long_threshold_tokens: int
) -> None:
    replica = replica_of(
        kv_blocks=1000, max_chunk_tokens=64, policy=policy, long_threshold_tokens=long_threshold_tokens
    )
    document = tuple(range(600))
    for index in range(4):
        submit_ids(replica, submit_of(f"q{index}", 604, 2), (*document, 1000 + index, 2, 3, 4))
    pending = replica.controller.load().pending_prefill_seconds
    assert pending < 1.5 * replica.controller.predictor.prefill_seconds(0, 604), "it counts once, too"
    replica.run().check_empty()
    computed = sum(entry.token_count for step in replica.steps for entry in step.entries)
    assert computed == 600 + 4 * (4 + 1), "and each question, and its first output token"
    assert sorted(admits(replica).values()) == [0, 600, 600, 600]


def test_who_shares_only_the_beginning_waits_no_longer_than_for_that(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=1000, max_chunk_tokens=64, policy="srpt")
    submit_ids(replica, submit_of("book", 900, 2), tuple(range(900)))
    submit_ids(replica, submit_of("excerpt", 404, 2), (*range(400), 1, 2, 3, 4))
    while not replica.emitted.get("excerpt"):
        replica.advance()
    assert admits(replica)["excerpt"] == 400
    assert not replica.emitted.get("book")
    replica.run().check_empty()


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_who_waits_for_a_prefill_that_ends_early_goes_on_without_it(
    replica_of: Any, submit_of: Any, how: str
) -> None:
    replica = replica_of(kv_blocks=1000, max_chunk_tokens=64)
    for name in ("first", "second", "third"):
        submit_ids(replica, submit_of(name, 604, 2), (*range(600), *name.encode()[:4]))
    replica.advance()
    assert running(replica) == {"first"}
    if how == "cancelled":
        replica.cancel("first")
    else:
        step = last_step(replica)
        replica._pipeline.clear()
        replica.handle(Done(step.step_id, failures=(EntryFailed("first", "out_of_memory"),)))
    replica.run().check_empty()
    assert len(replica.emitted["second"]) == len(replica.emitted["third"]) == 2
    assert admits(replica)["third"] == 600, "the second has led the third"


def test_a_more_urgent_question_does_not_wait_for_a_patient_one(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=1000, max_chunk_tokens=64)
    document = tuple(range(600))
    submit_ids(replica, submit_of("patient", 604, 2, deadline_after_seconds=900.0), (*document, 1, 2, 3, 4))
    submit_ids(replica, submit_of("urgent", 604, 2, deadline_after_seconds=0.1), (*document, 5, 6, 7, 8))
    while not replica.emitted.get("urgent"):
        replica.advance()
    assert admits(replica)["urgent"] < 600
    replica.run().check_empty()


def test_no_follower_waits_for_a_leader_that_is_demoted(replica_of: Any, submit_of: Any) -> None:
    """Its revised deadline is later than the follower's deadline, so a follower that waited would be late with it."""
    replica = replica_of(
        kv_blocks=4000,
        max_chunk_tokens=64,
        policy="guarded",
        step_seconds=0.064,
        profile=StepProfile(0.0, 1e-3, 0.0, 0.0),
    )
    document = tuple(range(600))
    submit_ids(
        replica, submit_of("leader", 3000, 2, deadline_after_seconds=3.2), (*document, *range(1000, 3400))
    )
    replica.advance()
    submit_ids(replica, submit_of("question", 604, 2, deadline_after_seconds=3.5), (*document, 1, 2, 3, 4))
    assert is_held(replica, "question")
    submit_ids(replica, submit_of("urgent", 1500, 2, deadline_after_seconds=2.0), tuple(range(5000, 6500)))
    for _ in range(3):
        replica.advance()
    assert replica.controller.due(replica.controller.find("leader")) > 3.5, "it is demoted"
    assert not is_held(replica, "question")
    while not replica.emitted.get("question"):
        replica.advance()
    assert not replica.emitted.get("leader")
    replica.run().check_empty()


@pytest.mark.parametrize(("deadline_seconds", "alone"), [(3.2, False), (20.0, True), (10_000.0, False)])
def test_a_sample_with_more_time_than_the_one_that_is_demoted_computes_its_prompt_itself(
    replica_of: Any, submit_of: Any, deadline_seconds: float, alone: bool
) -> None:
    """Not one that is as late itself, nor one for which the revised deadline is early enough."""
    replica = replica_of(
        kv_blocks=4000,
        max_chunk_tokens=64,
        policy="guarded",
        step_seconds=0.064,
        profile=StepProfile(0.0, 1e-3, 0.0, 0.0),
    )
    replica.submit(submit_of("first", 3000, 2, prompt="the same", deadline_after_seconds=3.2))
    replica.submit(submit_of("second", 3000, 2, prompt="the same", deadline_after_seconds=deadline_seconds))
    assert is_held(replica, "second")
    replica.submit(submit_of("urgent", 1500, 2, deadline_after_seconds=2.0))
    replica.advance()
    assert replica.controller.find("second").is_detached == alone
    replica.run().check_empty()
    assert len(replica.emitted["first"]) == len(replica.emitted["second"]) == 2
