"""Requests that outgrow their expected output: KV is held for them, and one steps aside if there is none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.growth import GROWTH_SHARE, MOST_ASIDES, Growth, Held, who_make_way, with_too_much
from medha.scheduler.request import Prompt, Request
from medha.slo import Targets
from medha.wire.messages import Cancel, SteppedAside, Submit

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")


def admitted(replica: Any) -> list[Any]:
    return [admit for step in replica.steps for admit in step.admits]


def reserved(replica: Any, name: str) -> list[int]:
    """Tokens that a request reserved each time that it was admitted."""
    return [admit.reserved_tokens for admit in admitted(replica) if admit.id == name]


def until_one_steps_aside(replica: Any) -> str:
    while not replica.asides:
        assert replica.advance()
    name: str = replica.asides[0]
    return name


def test_two_streams_that_may_use_the_whole_pool_keep_no_chat_waiting(
    replica_of: Any, submit_of: Any
) -> None:
    """The pool holds both streams and nothing else. Before, the first chat waited until one of them had ended."""
    replica = replica_of(
        kv_blocks=1024, block_size_tokens=SIZE, default_output_tokens=100, short_headroom=0.1,
        long_threshold_tokens=400, step_seconds=0.01,
    )  # fmt: skip
    for name in ("stream 0", "stream 1"):
        replica.submit(submit_of(name, 8, 2040))
    waits: list[float] = []
    while len(replica.endings) < 2 + len(waits) and any(
        f"stream {index}" not in replica.endings for index in (0, 1)
    ):
        name = f"chat {len(waits)}"
        replica.submit(submit_of(name, 300, 50))  # nearly all of the headroom
        began = replica.now
        while name not in replica.emitted:
            assert replica.advance()
        waits.append(replica.now - began)
        long = [replica.controller.find(f"stream {index}") for index in (0, 1)]
        if all(request is not None and not request.waits for request in long):
            assert sum(request.reserved_tokens for request in long) <= 0.9 * 1024 * SIZE, "the headroom stays"
        while name not in replica.endings:
            assert replica.advance()
    replica.run().check_empty()
    assert len(waits) > 30
    assert max(waits) < 0.1, "three steps of many thousand"
    assert set(replica.asides) == {"stream 1"}, (
        "the oldest is spared, and chats reserve all that they can need"
    )
    assert [len(replica.emitted[f"stream {index}"]) for index in (0, 1)] == [2040, 2040]


def test_the_one_that_steps_aside_has_the_fewest_tokens_and_is_not_the_oldest(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=100, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=399)
    for name, tokens in (("oldest", 4), ("large", 120), ("small", 20), ("middle", 60)):
        replica.submit(submit_of(name, tokens))
    assert until_one_steps_aside(replica) == "small"
    replica.run().check_empty()
    assert "oldest" not in replica.asides[: replica.asides.index("middle")]


def test_one_that_can_need_no_more_never_steps_aside(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=30, block_size_tokens=SIZE, default_output_tokens=8, max_model_len=100)
    replica.submit(submit_of("grows", 8))
    replica.submit(submit_of("exact", 40, 8))
    replica.submit(submit_of("grows, too", 8))
    replica.run().check_empty()
    assert set(replica.asides) <= {"grows", "grows, too"}
    assert replica.asides


def test_a_request_steps_aside_a_bounded_number_of_times_and_doubles_its_output(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=80, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=316)
    for index in range(20):
        replica.submit(submit_of(f"r{index}", 4))
    replica.run().check_empty()
    most = Counter(replica.asides).most_common(1)[0]
    assert 2 <= most[1] <= MOST_ASIDES
    for index in range(20):
        outputs = [tokens - 4 for tokens in reserved(replica, f"r{index}")]
        assert all(after >= min(2 * before, 316 - 4) - SIZE for before, after in pairwise(outputs))
    assert all(len(tokens) == 312 for tokens in replica.emitted.values())


def test_one_that_comes_back_doubles_its_output_also_where_outputs_are_short(
    replica_of: Any, submit_of: Any
) -> None:
    controller = replica_of(kv_blocks=100, block_size_tokens=SIZE).controller
    for index in range(200):
        controller._output_lengths.ended(str(index), "default", "", 60, cut_off=False)
    submit = submit_of("r", 150, prompt_length=100)
    controller.handle(submit, 0.0)
    before = replace(controller.find("r"), reservation_tokens=170)
    assert controller._expected_output_tokens(submit, "default", None) < 70
    assert controller._expected_output_tokens(submit, "default", before) == 140
    last = replace(before, asides=MOST_ASIDES - 1)
    assert controller._expected_output_tokens(submit, "default", last) == controller.config.max_model_len


def test_what_the_cache_still_has_is_not_computed_again(replica_of: Any, submit_of: Any) -> None:
    """Its output was hashed as it came, so that it is found behind its prompt."""
    replica = replica_of(
        kv_blocks=60, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=200, hasher=HASHER
    )
    for index in range(3):
        ids = tuple(range(100 * index, 100 * index + 17))
        submit = submit_of(f"r{index}", len(ids))
        replica.prompt_ids[submit.prompt] = ids
        hashes = HASHER.hashes(np.array(ids, dtype=np.int32))
        replica.submit(replace(submit, block_hashes=hashes))
    name = until_one_steps_aside(replica)
    for other in {"r0", "r1", "r2"} - {name}:
        replica.cancel(other)
    replica.run().check_empty()
    again = [admit for admit in admitted(replica) if admit.id == name][1]
    assert again.prompt_length == 17 < again.cached_tokens < again.tokens


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_that_stepped_aside_can_be_cancelled(
    replica_of: Any, submit_of: Any, *, in_flight: bool
) -> None:
    replica = replica_of(
        stages=3 if in_flight else 1,
        kv_blocks=24,
        block_size_tokens=SIZE,
        default_output_tokens=4,
        max_model_len=90,
    )
    for name in "abc":
        replica.submit(submit_of(name, 9))
    if in_flight:
        while not any(request.steps_aside for request in replica.controller.requests()):
            assert replica.advance()
        (name,) = [request.id for request in replica.controller.requests() if request.steps_aside]
    else:
        name = until_one_steps_aside(replica)
    replica.cancel(name)
    replica.run().check_empty()
    assert replica.endings[name] == ["cancelled"]
    others = [len(replica.emitted[other]) for other in "abc" if other != name]
    assert others == [81, 81]


@pytest.mark.parametrize(("max_tokens", "held"), [(150, 0), (300, int(GROWTH_SHARE * 100))])
def test_kv_is_held_for_growth_only_while_a_request_may_outgrow_what_it_has(
    replica_of: Any, submit_of: Any, max_tokens: int, held: int
) -> None:
    for more, waits in ((0, 0), (1, 1)):
        replica = replica_of(kv_blocks=100, block_size_tokens=SIZE, default_output_tokens=150)
        replica.submit(submit_of("first", 4, max_tokens))
        assert replica.controller.growth_blocks == held
        free = replica.controller.pools.free_blocks_on(0)
        load = replica.controller.load()
        assert load.kv_tokens_free == SIZE * free
        assert [lane.kv_tokens_free for lane in load.lanes] == [SIZE * (free - held)], (
            "what a router may send"
        )
        replica.submit(submit_of("second", SIZE * (free - held + more), 1))
        replica.advance()
        assert replica.controller.load().waiting == waits
        replica.cancel("first")
        replica.cancel("second")
        replica.run().check_empty()


def test_no_waiting_request_gets_kv_while_a_running_one_lacks_some(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(
        stages=3, kv_blocks=60, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=150
    )
    for name in "abcde":
        replica.submit(submit_of(name, 9))
    found = 0
    for index in range(400):
        replica.submit(submit_of(f"waits {index}", 4, 2))
        steps = len(replica.steps)
        if not replica.advance():
            break
        if replica.steps[steps:] and any(lane.decodes.starved for lane in replica.controller.lanes):
            found += replica.controller.load().waiting > 0
            assert replica.controller._admission.is_full
            assert replica.steps[-1].admits == ()
            assert replica.controller.load().lanes[0].kv_tokens_free == 0
    assert found
    replica.run().check_empty()


def test_samples_of_one_prompt_step_aside_each_for_itself(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=40, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=120)
    for index in range(4):
        replica.submit(submit_of(f"sample {index}", 30, prompt="shared", sample_index=index))
    replica.run().check_empty()
    assert replica.asides
    assert all(len(tokens) == 90 for tokens in replica.emitted.values())


def test_a_client_that_is_resumed_is_expected_to_go_on(replica_of: Any, submit_of: Any) -> None:
    """It has 500 tokens of output from a replica that was lost, where chats have 100."""
    replica = replica_of(kv_blocks=10_000, block_size_tokens=SIZE, default_output_tokens=100)
    replica.submit(submit_of("resumed", 600, 5000, prompt_length=100))
    replica.advance()
    assert 600 < reserved(replica, "resumed")[0] < 5100
    replica.handle(Cancel("resumed"))


def test_a_fresh_controller_lets_the_same_requests_step_aside(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=40, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=120)
    for index in range(5):
        replica.submit(submit_of(f"r{index}", 10 + index))
    replica.run().check_empty()
    commands = [command for one in replica.commands for command in one]
    assert sum(isinstance(command, SteppedAside) for command in commands) == len(replica.asides) > 0
    again = replica_of(kv_blocks=40, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=120)
    assert [again.controller.handle(event, now) for now, event in replica.log] == replica.commands


# --- between keys -----------------------------------------------------------------------------------

RUNNING = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 50), st.integers(0, 20), st.booleans()
    ),
    min_size=1,
    max_size=12,
)


@given(RUNNING)
def test_requests_of_a_key_with_more_than_its_share_step_aside_first(
    running: list[tuple[str, int, int, int, bool]],
) -> None:
    """With one owner, or one request each, the order is that of asides, computed tokens and arrival alone."""
    submit = Submit("r", "p", 1, 1, 0)
    growth = Growth(1000)
    requests: list[Request] = []
    held: dict[str, Held] = {}
    for tie, (owner, asides, computed, blocks, may_outgrow) in enumerate(running):
        request = Request(
            replace(submit, owner=owner), f"r{tie}", Prompt("p", 1), tie, 0.0, Targets(1.0, 1.0, 1.0), False,
            1, 9, 1, most_tokens=1 + may_outgrow, reserved_tokens=1, lane=0, asides=asides, computed=computed,
        )  # fmt: skip
        requests.append(request)
        growth.watch(request, 1, 1, is_long=False)
        one = held.setdefault(owner, Held())
        one.requests, one.blocks = one.requests + 1, one.blocks + blocks
    watched = [request for request in requests if request.may_outgrow]
    if not watched:
        return
    total = sum(one.blocks for one in held.values())
    found = growth.who_steps_aside(watched[-1], with_too_much(held))
    others = watched[1:] or watched
    assert found in others, "the oldest is spared"
    large = {
        owner for owner, one in held.items() if one.requests > 1 and one.blocks > total / len(held) + 1e-9
    }
    of_large = [request for request in others if request.submit.owner in large]
    least = min(of_large or others, key=lambda one: (one.asides, one.computed, -one.tie))
    assert found is least


def test_no_answer_of_a_key_with_few_steps_aside_for_those_of_a_key_with_many(
    replica_of: Any, submit_of: Any
) -> None:
    """It has the fewest tokens and is the latest, so that it would be the cheapest to compute again."""
    replica = replica_of(kv_blocks=60, block_size_tokens=SIZE, default_output_tokens=4, max_model_len=200)
    for index in range(4):
        replica.submit(submit_of(f"large {index}", 20, owner="large"))
    for index in range(6):
        replica.submit(submit_of(f"small {index}", 4, 40, owner="small"))
        while f"small {index}" not in replica.endings:
            assert replica.advance()
    assert {"large 1", "large 2", "large 3"} & set(replica.asides)
    assert not [name for name in replica.asides if name.startswith("small")]
    replica.run().check_empty()


@pytest.mark.parametrize("answers", [22, 30])
def test_decodes_of_a_key_with_much_kv_make_way_for_a_key_that_would_be_late(
    replica_of: Any, submit_of: Any, answers: int
) -> None:
    """All KV is taken; with 30, some of the large key's own requests wait for it, too."""
    replica = replica_of(kv_blocks=400, block_size_tokens=SIZE, step_seconds=0.1)
    for index in range(answers):
        replica.submit(submit_of(f"large {index}", 8, 64, owner="large"))
    for _ in range(3):
        replica.advance()
    came = replica.now
    replica.submit(submit_of("small", 600, 8, owner="small"))
    while "small" not in replica.emitted:
        assert replica.advance()
    assert replica.now - came <= 2.0, "its target"
    assert not replica.endings, "it had to wait for others to end"
    assert replica.asides
    assert all(name.startswith("large") for name in replica.asides)
    replica.run().check_empty()
    assert {len(replica.emitted[f"large {index}"]) for index in range(answers)} == {64}


def test_an_answer_that_made_way_comes_back_with_the_reservation_that_it_had(
    replica_of: Any, submit_of: Any
) -> None:
    """It did not outgrow its KV. If it reserved all that it can need, it would wait until nearly all KV is free."""
    replica = replica_of(
        kv_blocks=200, block_size_tokens=SIZE, default_output_tokens=60, max_model_len=790, step_seconds=0.1
    )
    for index in range(9):
        replica.submit(submit_of(f"large {index}", 8, owner="large"))
    for index in range(6):
        for _ in range(3):
            replica.advance()
        name = f"small {index}"
        replica.submit(submit_of(name, 300, 2, owner="small", deadline_after_seconds=0.2))
        while name not in replica.endings:
            assert replica.advance()
    made_way = Counter(replica.asides)
    assert max(made_way.values()) > 1
    for name in made_way:
        assert max(reserved(replica, name)) <= 8 + 60 + SIZE, name
    for index in range(9):
        replica.cancel(f"large {index}")
    replica.run().check_empty()


def test_of_answers_that_share_their_prompt_the_last_one_to_make_way_frees_it(
    replica_of: Any, submit_of: Any
) -> None:
    """It counts for the first of them, which has ended."""
    replica = replica_of(kv_blocks=212, block_size_tokens=SIZE, step_seconds=0.1)
    for index, tokens in enumerate((2, 60, 60)):
        sample = submit_of(f"sample {index}", 321, tokens, prompt="shared", sample_index=index, owner="large")
        replica.submit(sample)
    replica.submit(submit_of("other", 330, 60, owner="large"))
    while "sample 0" not in replica.endings or len(replica.emitted) < 4:
        assert replica.advance()
    replica.submit(submit_of("small", 160, 8, owner="small", deadline_after_seconds=0.5))
    while "small" not in replica.emitted:
        assert replica.advance()
    assert sorted(replica.asides) == ["sample 1", "sample 2"]
    replica.run().check_empty()


def test_while_others_make_way_nobody_takes_what_they_leave(replica_of: Any, submit_of: Any) -> None:
    """More answers would have to make way for the claimant if later requests took these blocks."""
    replica = replica_of(
        stages=3, kv_blocks=400, block_size_tokens=SIZE, step_seconds=0.1, short_headroom=0.5
    )
    for index in range(22):
        replica.submit(submit_of(f"large {index}", 8, 64, owner="large"))
    while len(replica.emitted) < 22:
        assert replica.advance()
    replica.submit(submit_of("small", 600, 8, owner="small", deadline_after_seconds=0.5))
    before = len(admitted(replica))
    for index in range(20):
        replica.submit(submit_of(f"later {index}", 8, 8, owner=f"key {index}", deadline_after_seconds=60.0))
        assert replica.advance()
    first = next(admit.id for admit in admitted(replica)[before:] if not admit.id.startswith("later"))
    assert first == "small"
    assert len(replica.asides) == 9, "151 blocks, where 4 are free and an answer has 18"
    replica.run().check_empty()


def test_requests_without_keys_do_not_make_way_for_each_other(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=400, block_size_tokens=SIZE, step_seconds=0.1)
    for index in range(30):
        replica.submit(submit_of(f"r{index}", 8, 64, owner=f"request {index}"))
    replica.submit(submit_of("late", 600, 8, owner="late"))
    replica.run().check_empty()
    assert not replica.asides


DECODING = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "small"]),
        st.integers(0, MOST_ASIDES),
        st.integers(0, 50),
        st.integers(1, 30),
        st.booleans(),
        st.booleans(),
    ),
    max_size=14,
)


@given(DECODING, st.integers(1, 60), st.integers(0, 30))
def test_making_way_frees_enough_and_leaves_each_owner_as_much_as_the_other_gets(
    running: list[tuple[str, int, int, int, bool, bool]], needed: int, free: int
) -> None:
    submit = Submit("r", "p", 1, 1, 0)
    requests: list[Request] = []
    held: dict[str, Held] = {}
    for tie, (owner, asides, computed, blocks, is_long, is_decoding) in enumerate(running):
        request = Request(
            replace(submit, owner=owner), f"r{tie}", Prompt("p", 1), tie, 0.0, Targets(1.0, 1.0, 1.0), is_long,
            1, 9, 1, asides=asides, computed=computed, counted_blocks=blocks, emitted=int(is_decoding),
        )  # fmt: skip
        requests.append(request)
        one = held.setdefault(owner, Held())
        one.requests, one.blocks = one.requests + 1, one.blocks + blocks
    before = {owner: one.blocks for owner, one in held.items()}
    missing = needed - free
    blocks_of = {request.id: request.counted_blocks for request in requests}
    found = who_make_way(requests, held, "small", needed, missing, lambda name: blocks_of[name])
    assert {owner: one.blocks for owner, one in held.items()} == before, "nothing is changed"
    if not found:
        return
    assert sum(one.counted_blocks for one in found) >= missing > 0
    assert all(one.has_sampled and not one.is_long and one.asides < MOST_ASIDES for one in found)
    for owner in {one.submit.owner for one in found}:
        assert owner != "small"
        left = before[owner] - sum(one.counted_blocks for one in found if one.submit.owner == owner)
        assert left >= before.get("small", 0) + needed
