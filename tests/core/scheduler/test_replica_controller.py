"""The replica controller against a fake replica that replays and checks everything it commands."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.scheduler.controller import ReplicaController
from medha.scheduler.growth import GROWTH_SHARE
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    Done,
    Drain,
    Emit,
    EntryFailed,
    Refused,
    Sample,
    StageFree,
    Step,
    StepProfile,
)

ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 120),  # tokens
            st.one_of(st.none(), st.integers(0, 30)),  # max_tokens
            st.integers(1, 3),  # samples
            st.booleans(),  # resumed
        ),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("advance"), st.integers(1, 12)),
        st.tuples(st.just("advance late"), st.integers(1, 4)),
    ),
    max_size=30,
)
SETTINGS = st.fixed_dictionaries(
    {
        "stages": st.integers(1, 4),
        "kv_blocks": st.integers(8, 60),
        "block_size_tokens": st.sampled_from([1, 3, 4, 16]),
        "max_model_len": st.sampled_from([40, 150, 1000]),
        "long_threshold_tokens": st.sampled_from([20, 60, 1000]),
        "max_running_long": st.integers(1, 3),
        "max_running": st.sampled_from([2, 5, 256]),
        "max_waiting": st.sampled_from([3, 100]),
        "min_chunk_tokens": st.sampled_from([1, 8]),
        "max_chunk_tokens": st.sampled_from([8, 32, 100]),
        "policy": st.sampled_from(["fcfs", "edf", "lrs", "srpt", "lars", "guarded"]),
        "stop_chance": st.sampled_from([0.0, 0.1]),
        "failure_chance": st.sampled_from([0.0, 0.03]),
        "step_seconds": st.sampled_from([0.01, 1.0]),
        "default_output_tokens": st.integers(1, 20),
    }
)


@given(actions=ACTIONS, replica_settings=SETTINGS, seed=st.integers(0, 1000))
def test_whatever_happens_the_guarantees_to_ranks_and_router_hold(
    replica_of: Any, submit_of: Any, actions: list[Any], replica_settings: dict[str, Any], seed: int
) -> None:
    replica = replica_of(random=Random(seed), **replica_settings)
    submitted: list[str] = []
    for action in actions:
        match action:
            case ("submit", tokens, max_tokens, samples, resumed):
                for index in range(samples):
                    id_ = f"r{len(submitted)}"
                    submitted.append(id_)
                    replica.submit(
                        submit_of(
                            id_,
                            tokens,
                            max_tokens,
                            prompt=f"prompt {len(submitted) - index}",
                            prompt_length=max(1, tokens // 2) if resumed else tokens,
                            sample_index=index,
                        )
                    )
            case ("cancel", index):
                if submitted:
                    replica.cancel(submitted[index % len(submitted)])
            case ("advance", count):
                for _ in range(count):
                    replica.advance()
            case ("advance late", count):
                for _ in range(count):
                    replica.advance(late_stage_free=True)
    replica.run()
    replica.check_empty()


# --- admission ---------------------------------------------------------------------------------------


def test_64_chats_that_name_no_max_tokens_run_at_once_on_a_model_of_a_million_tokens(
    replica_of: Any, submit_of: Any
) -> None:
    prompt = 100
    replica = replica_of(
        kv_blocks=int(64 * -(-(prompt + 4096) // 16) / (1 - GROWTH_SHARE)) + 1,
        block_size_tokens=16,
        max_model_len=1_000_000,
        default_output_tokens=4096,
        max_chunk_tokens=8192,
    )
    for index in range(64):
        replica.submit(submit_of(f"chat {index}", prompt))
    while replica.controller.load().waiting:
        replica.advance()
    assert replica.controller.load().running == 64
    assert replica.controller.load().waiting == 0


def test_a_named_max_tokens_is_reserved_whole_except_for_the_last_token_sampled(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=4, block_size_tokens=4)
    replica.submit(submit_of("fits", 10, 7))  # positions 0..15 are computed, token 16 is only drawn
    assert replica.steps[0].admits[0].reserved_tokens == 16
    replica.run().check_empty()
    assert len(replica.emitted["fits"]) == 7
    assert replica.endings["fits"] == ["length"]


def test_a_request_without_max_tokens_grows_until_the_model_ends(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=100, default_output_tokens=2, max_model_len=60)
    replica.submit(submit_of("a", 10))
    replica.run().check_empty()
    assert replica.endings["a"] == ["length"]
    assert len(replica.emitted["a"]) == 50
    assert any(step.grows for step in replica.steps)


def test_a_request_without_max_tokens_grows_until_no_kv_is_left(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=10, block_size_tokens=4, default_output_tokens=2)
    replica.submit(submit_of("a", 10))
    replica.run().check_empty()
    assert replica.endings["a"] == ["length"]
    assert len(replica.emitted["a"]) == 31, "40 positions are computed, and one more token is drawn"


def test_when_kv_ends_one_request_steps_aside_and_the_others_grow_into_its_blocks(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=16, block_size_tokens=4, default_output_tokens=6)
    for name in "abcd":
        replica.submit(submit_of(name, 10))
    replica.run().check_empty()
    assert [len(replica.emitted[name]) for name in "abcd"] == [16 * 4 - 10 + 1] * 4, (
        "each has had the whole pool"
    )
    assert all(ending == ["length"] for ending in replica.endings.values())
    assert "a" not in replica.asides[:-1], "the oldest is spared as long as there is another"


def test_requests_wait_for_kv_and_get_it_when_others_end(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=5, block_size_tokens=4)
    for index in range(10):
        replica.submit(submit_of(f"r{index}", 12, 6))  # 17 positions: the whole pool
    assert replica.controller.load().running == 1
    replica.run().check_empty()
    assert all(len(tokens) == 6 for tokens in replica.emitted.values())


def test_a_late_large_request_is_not_overtaken_by_a_stream_of_small_ones(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=20, block_size_tokens=4, step_seconds=0.1, policy="fcfs")
    _stream_of_small_ones_around(replica, submit_of, submit_of("large", 60, 5))


def test_a_late_long_request_is_not_kept_out_by_the_head_room_for_short_ones(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(
        kv_blocks=20,
        block_size_tokens=4,
        step_seconds=0.1,
        policy="fcfs",
        long_threshold_tokens=50,
        short_headroom=0.3,
    )
    _stream_of_small_ones_around(replica, submit_of, submit_of("large", 60, 5))


def _stream_of_small_ones_around(replica: Any, submit_of: Any, large: Any) -> None:
    """Of 20 blocks the small ones hold 16, each of them 4 for 12 steps; the large one needs 16."""
    for index in range(400):
        if index == 30:
            replica.submit(large)
        if index % 3 == 0:
            replica.submit(submit_of(f"small {index}", 4, 12))
        replica.advance()
        if "large" in replica.emitted:
            break
    assert "large" in replica.emitted, "it starves"
    assert replica.now > 4, "it waited until it was late"
    replica.run().check_empty()


def test_short_requests_overtake_a_large_one_that_finds_no_room_and_is_not_late(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=20, block_size_tokens=4)
    replica.submit(submit_of("running", 40, 4))
    replica.submit(submit_of("large", 60, 4))
    replica.submit(submit_of("small", 4, 4))
    replica.advance()
    assert [admit.id for step in replica.steps for admit in step.admits] == ["running", "small"]
    replica.run().check_empty()


@pytest.mark.parametrize(
    ("limits", "admitted"),
    [
        ({"max_running_long": 2}, ["l0", "l1", "short"]),
        ({"short_headroom": 0.5}, ["l0", "l1", "short"]),
        ({"short_headroom": 0.1}, ["l0", "l1", "l2", "short"]),
        ({"max_running": 2}, ["l0", "l1"]),
    ],
)
def test_longs_are_capped_in_number_and_in_their_share_of_the_pool(
    replica_of: Any, submit_of: Any, limits: dict[str, Any], admitted: list[str]
) -> None:
    replica = replica_of(
        kv_blocks=100, block_size_tokens=4, long_threshold_tokens=50, policy="fcfs", **limits
    )
    replica.submit(submit_of("first", 4, 1))  # holds stage 0, so that the others are admitted together
    for index in range(4):
        replica.submit(submit_of(f"l{index}", 96, 5))
    replica.submit(submit_of("short", 20, 5))
    replica.advance()
    assert [admit.id for step in replica.steps[1:2] for admit in step.admits] == admitted
    replica.run().check_empty()


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"id_": "known"}, "invalid", "request known is already here"),
        ({"prompt_length": 0}, "invalid", "prompt_length 0 of 10"),
        ({"prompt_length": 11}, "invalid", "prompt_length 11 of 10"),
        ({"prompt": "prompt of known"}, "invalid", "prompt prompt of known has 8 tokens, not 10"),
        ({"age_seconds": float("nan")}, "invalid", "finite"),
        ({"deadline_after_seconds": float("inf")}, "invalid", "finite"),
        ({"tpot_target_seconds": float("nan")}, "invalid", "finite"),
        ({"contested_seconds": float("nan")}, "invalid", "finite"),
        ({"service_class": "gold"}, "unknown_class", "'gold'"),
        ({"tokens": 100}, "too_long", "maxModelLen is 100"),
        ({"tokens": 90}, "too_long", "the KV pool holds 80"),
        ({"max_tokens": 72}, "too_long", "the KV pool holds 80"),
    ],
)
def test_an_impossible_request_is_refused_with_its_reason(
    replica_of: Any, submit_of: Any, fields: dict[str, Any], reason: str, detail: str
) -> None:
    replica = replica_of(kv_blocks=20, block_size_tokens=4, max_model_len=100)
    replica.submit(submit_of("known", 8))
    arguments = {"id_": "new", "tokens": 10} | fields
    (refused,) = replica.controller.handle(submit_of(**arguments), 0.0)
    assert isinstance(refused, Refused)
    assert refused.reason == reason
    assert detail in refused.detail
    replica.run().check_empty()


def test_a_request_of_the_largest_size_that_is_not_refused_runs(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=20, block_size_tokens=4, max_model_len=100)
    replica.submit(submit_of("output", 10, 71))
    replica.submit(submit_of("prompt", 80))
    replica.run().check_empty()
    assert len(replica.emitted["output"]) == 71
    assert len(replica.emitted["prompt"]) == 1


def test_more_waiting_requests_than_the_limit_are_refused_with_capacity(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_waiting=2)
    for index in range(4):  # the first one starts at once
        replica.submit(submit_of(f"r{index}", 8, 2))
    assert replica.endings == {"r3": ["refused capacity"]}
    replica.run().check_empty()


def test_a_draining_replica_refuses_new_requests_and_ends_those_it_has(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=8, block_size_tokens=4)
    replica.submit(submit_of("running", 20, 5))
    replica.submit(submit_of("waiting", 20, 5))
    replica.handle(Drain())
    assert replica.controller.draining
    replica.submit(submit_of("new", 20, 5))
    replica.run().check_empty()
    assert replica.endings == {"new": ["refused draining"], "running": ["length"], "waiting": ["length"]}


# --- prompts that are shared --------------------------------------------------------------------------


def test_samples_of_one_prompt_share_its_blocks_and_compute_one_token_again(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=40, block_size_tokens=4)
    for index in range(3):
        replica.submit(submit_of(f"s{index}", 22, 3, prompt="p", sample_index=index))
    replica.advance()
    first, second = replica.steps[:2]
    assert [admit.fork_of for admit in first.admits] == [None]
    assert [(admit.fork_of, admit.shared_tokens) for admit in second.admits] == [("s0", 21), ("s0", 21)]
    assert {entry.id: entry.token_count for entry in second.entries} == {"s0": 1, "s1": 1, "s2": 1}
    assert replica.ledger.held_blocks == 6 + 1 + 1, "5 blocks are shared; each has its own last one"
    replica.run().check_empty()
    assert [prompt for step in replica.steps for prompt in step.forgets] == ["p"]


def test_a_sample_does_not_share_a_prefill_that_fails(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(stages=2, kv_blocks=40, max_chunk_tokens=32)
    replica.submit(submit_of("a", 20, 3, prompt="p"))
    replica.submit(submit_of("b", 20, 3, prompt="p"))
    controller = replica.controller
    assert controller.handle(StageFree(0, 0), 0.1) == []
    (failed, step) = controller.handle(Done(0, failures=(EntryFailed("a", "out_of_memory"),)), 0.2)
    assert failed.id == "a"
    assert isinstance(step, Step)
    assert step.releases == ("a",)
    assert [admit.fork_of for admit in step.admits] == [None], "its KV is not there: it prefills by itself"


def test_a_prompt_named_again_before_the_ranks_were_asked_to_forget_it_is_kept(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=8, block_size_tokens=4)
    replica.submit(submit_of("busy", 20, 2))
    replica.submit(submit_of("a", 10, 2, prompt="p"))
    replica.cancel("a")
    replica.submit(submit_of("b", 10, 2, prompt="p"))
    replica.run().check_empty()
    assert [prompt for step in replica.steps for prompt in step.forgets].count("p") == 1


# --- ends ---------------------------------------------------------------------------------------------


def test_a_request_cancelled_in_flight_keeps_its_blocks_until_its_step_is_done(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(stages=2, max_chunk_tokens=32, kv_blocks=64)
    replica.submit(submit_of("a", 100, 4))
    replica.advance()  # the second chunk enters stage 0
    assert len(replica.steps) == 2
    replica.cancel("a")
    held = replica.controller.ledger.held_blocks
    assert held > 0
    replica.advance()
    assert replica.controller.ledger.held_blocks == held, "the second chunk is still in flight"
    replica.run().check_empty()
    assert replica.emitted == {}
    assert [step.releases for step in replica.steps] == [(), (), ("a",)]


def test_a_token_sampled_after_the_cancel_is_dropped(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("a", 10, 4))
    replica.cancel("a")
    commands = replica.controller.handle(Done(0, (Sample("a", 5),)), 0.0)
    assert [type(command) for command in commands] == [Step]


def test_a_failure_after_the_cancel_is_not_reported(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("a", 10, 4))
    replica.cancel("a")
    commands = replica.controller.handle(Done(0, failures=(EntryFailed("a", "internal"),)), 0.0)
    assert [type(command) for command in commands] == [Step]


def test_a_cancel_of_an_unknown_request_changes_nothing(replica_of: Any) -> None:
    replica = replica_of()
    assert replica.handle(Cancel("nobody")) == []
    replica.check_empty()


def test_a_waiting_request_that_is_cancelled_is_gone_and_its_prompt_forgotten(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=8, block_size_tokens=4)
    replica.submit(submit_of("a", 20, 2))
    replica.submit(submit_of("b", 20, 2))
    replica.cancel("b")
    assert replica.controller.load().waiting == 0
    replica.run().check_empty()
    assert "prompt of b" in [prompt for step in replica.steps for prompt in step.forgets]


def test_a_resumed_request_computes_its_output_again_but_samples_only_what_is_left(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of()
    replica.submit(submit_of("a", 15, 8, prompt_length=10))
    replica.run().check_empty()
    assert replica.steps[0].entries[0].token_count == 15
    assert len(replica.emitted["a"]) == 3


@pytest.mark.parametrize(("tokens", "max_tokens"), [(18, 8), (100, None), (10, 0)])
def test_a_request_with_nothing_left_to_sample_ends_at_once(
    replica_of: Any, submit_of: Any, tokens: int, max_tokens: int | None
) -> None:
    replica = replica_of(max_model_len=100)
    replica.submit(submit_of("a", tokens, max_tokens, prompt_length=10))
    assert replica.commands == [[Emit("a", (), "length")]]
    replica.check_empty()


def test_the_reason_of_the_last_stage_is_passed_on_with_its_logprobs(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(stop_chance=1.0)
    replica.submit(submit_of("a", 10, 5))
    replica.run().check_empty()
    assert replica.endings["a"] == ["stop"]
    assert len(replica.emitted["a"]) == 1


# --- the pipeline -------------------------------------------------------------------------------------


def test_the_next_chunk_enters_stage_0_as_soon_as_the_last_one_has_left_it(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(stages=3, kv_blocks=100, max_chunk_tokens=32)
    replica.submit(submit_of("a", 200, 2))
    for event in (StageFree(0, 0), StageFree(1, 0)):
        assert [type(command) for command in replica.controller.handle(event, 0.0)] == [Step]
    assert replica.controller.handle(StageFree(0, 1), 0.0) == [], "stage 1 of step 0 says nothing of stage 0"
    assert replica.controller.handle(StageFree(2, 0), 0.0) == [], "three steps are in flight"


def test_a_stage_free_that_its_done_has_overtaken_does_not_free_stage_0_again(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(stages=2, kv_blocks=100, max_chunk_tokens=32)
    replica.submit(submit_of("a", 200, 2))
    controller = replica.controller
    assert [type(command) for command in controller.handle(Done(0), 0.0)] == [Step]
    assert controller.handle(StageFree(0, 0), 0.0) == [], "step 1 is in stage 0"
    assert [type(command) for command in controller.handle(StageFree(1, 0), 0.0)] == [Step]


def test_every_31st_step_carries_a_hash_of_the_ledger(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("a", 10, 70))
    replica.run().check_empty()
    assert [step.step_id for step in replica.steps if step.state_hash is not None] == [0, 31, 62]


# --- order --------------------------------------------------------------------------------------------


def test_lars_serves_shorts_that_arrive_behind_a_long_before_its_rest(
    replica_of: Any, submit_of: Any
) -> None:
    """A long of 10 s with 16 s, and at t=5 two shorts of 0.5 s with 1 s: FCFS would make them wait 5 s."""
    order = _order_of_first_tokens(replica_of, submit_of, "lars")
    assert order == ["s0", "s1", "long"]
    assert _order_of_first_tokens(replica_of, submit_of, "fcfs") == ["long", "s0", "s1"]


def _order_of_first_tokens(replica_of: Any, submit_of: Any, policy: str) -> list[str]:
    # 1 ms a token: 10,000 tokens take 10 s; attention is free
    replica = replica_of(
        kv_blocks=2000,
        block_size_tokens=16,
        policy=policy,
        max_chunk_tokens=100,
        step_seconds=0.1,
        min_chunk_tokens=100,
        profile=StepProfile(0.0, 1e-3, 0.0, 0.0),
    )
    replica.submit(submit_of("long", 10_000, 1, deadline_after_seconds=16.0))
    while replica.now < 5:
        replica.advance()
    for name in ("s0", "s1"):
        replica.submit(submit_of(name, 500, 1, deadline_after_seconds=1.0))
    replica.run().check_empty()
    return list(replica.emitted)


def test_a_request_keeps_the_age_that_it_had_elsewhere(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=8, block_size_tokens=4, policy="fcfs")
    replica.submit(submit_of("running", 20, 2))
    replica.submit(submit_of("new", 20, 2))
    replica.submit(submit_of("requeued", 20, 2, age_seconds=5.0))
    replica.run().check_empty()
    assert list(replica.emitted) == ["running", "requeued", "new"]


def test_the_tpot_target_of_a_running_request_bounds_the_chunks_beside_it(
    replica_of: Any, submit_of: Any
) -> None:
    chunks = []
    for target in (0.025, 0.04):
        replica = replica_of(kv_blocks=1000)
        replica.submit(submit_of("chat", 10, 5, tpot_target_seconds=target))
        replica.submit(submit_of("document", 1000, 1))
        replica.advance()
        chunks.append({entry.id: entry.token_count for entry in replica.steps[1].entries})
        assert replica.steps[1].predicted_seconds <= target
        replica.run().check_empty()
    assert chunks[0]["chat"] == chunks[1]["chat"] == 1
    assert 100 < chunks[0]["document"] < chunks[1]["document"] < 400


def test_two_long_prompts_share_a_step_while_their_kv_is_short(replica_of: Any, submit_of: Any) -> None:
    """What makes a chunk's time is the KV that it attends to, not what will follow."""
    replica = replica_of(kv_blocks=1000, long_threshold_tokens=50)
    replica.submit(submit_of("first", 4, 1))  # holds stage 0, so that the others start together
    for name in ("l0", "l1"):
        replica.submit(submit_of(name, 60, 1))
    replica.run().check_empty()
    assert {entry.id: entry.token_count for entry in replica.steps[1].entries} == {"l0": 60, "l1": 60}


def test_load_counts_what_waits_and_runs(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=8, block_size_tokens=4)
    replica.submit(submit_of("a", 20, 2))
    replica.submit(submit_of("b", 20, 2))
    load = replica.controller.load()
    assert (load.running, load.waiting, replica.controller.pools.held_blocks, load.kv_tokens_free) == (
        1,
        1,
        6,
        8,
    )
    # b waits with all of its prefill; a has all of it in flight
    assert load.pending_prefill_seconds == pytest.approx(0.001 + 0.002 + 0.0001 + 210e-8)
    replica.run().check_empty()
    assert replica.controller.load().pending_prefill_seconds == 0


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_load_counts_a_request_cancelled_in_flight_neither_as_running_nor_twice_as_ended(
    config_of: Any, submit_of: Any, profile: StepProfile, lanes: int
) -> None:
    controller = ReplicaController(lanes_of(config_of, lanes), profile)
    (step,) = controller.handle(submit_of("a", 80, 4), 0.0)
    assert len(controller.pools.shards("a").lanes) == lanes
    assert controller.load().running == 1
    controller.handle(Cancel("a"), 0.1)
    assert controller.load().running == 0
    assert controller.pools.held_blocks > 0, "a step has it still"
    controller.handle(Done(step.step_id, lanes=step.lanes), 0.2)
    assert (controller.load().running, controller.pools.held_blocks) == (0, 0)


# --- what a stream's wish costs, and what a long prefill's order does not ------------------------------


def test_a_stream_that_asks_for_1_ms_lowers_the_prefill_rate_of_others_by_less_than_5_percent(
    replica_of: Any, submit_of: Any
) -> None:
    seconds = []
    for target in (None, 0.001):
        replica = replica_of(kv_blocks=20_000, long_threshold_tokens=4000)
        replica.submit(submit_of("stream", 10, 2000, tpot_target_seconds=target))
        replica.submit(submit_of("document", 20_000, 1))
        while "document" not in replica.emitted:
            replica.advance()
        seconds.append(sum(step.predicted_seconds for step in replica.steps))
    assert seconds[1] < seconds[0] / 0.95


@pytest.mark.parametrize("policy", ["srpt", "guarded"])
@pytest.mark.parametrize("min_prefill_share", [0.0, 0.1])
def test_every_prefill_ends_beside_decodes_that_take_more_than_their_target_alone(
    replica_of: Any, submit_of: Any, policy: str, min_prefill_share: float
) -> None:
    """64 decodes of 1 ms each, of which every token is due in 50 ms: no step has time for a prompt."""
    profile = StepProfile(0.001, 0.0001, 1e-8, 0.001)
    replica = replica_of(
        kv_blocks=50_000,
        long_threshold_tokens=500,
        profile=profile,
        policy=policy,
        min_prefill_share=min_prefill_share,
    )
    chats = [f"chat {index}" for index in range(64)]
    for name in chats:
        replica.submit(submit_of(name, 10, 1000))
    while len(replica.emitted) < len(chats):
        replica.advance()
    prompts = {"long": 2000, "short": 300}
    for name, tokens in prompts.items():
        replica.submit(submit_of(name, tokens, 1))
    first = len(replica.steps)
    for _ in range(200):
        if prompts.keys() <= replica.emitted.keys():
            break
        replica.advance()
        assert replica.controller.packed(replica.steps[-1]).misses_tpot
    assert prompts.keys() <= replica.emitted.keys(), "a prefill starves"
    assert not replica.endings.keys() & set(chats)
    steps = [step for step in replica.steps[first:] if any(entry.id in prompts for entry in step.entries)]
    assert all(len(step.entries) > len(chats) for step in steps), "no decode is left out of a step"


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize("policy", ["edf", "lrs", "srpt", "lars", "guarded"])
def test_a_lone_long_prefill_takes_the_same_steps_as_under_fcfs(
    replica_of: Any, submit_of: Any, policy: str, decodes: bool
) -> None:
    chunks = []
    for name in ("fcfs", policy):
        replica = replica_of(kv_blocks=2000, long_threshold_tokens=500, policy=name, stages=2)
        if decodes:
            replica.submit(submit_of("chat", 10, 300))
        replica.submit(submit_of("long", 6000, 1))
        while "long" not in replica.emitted:
            replica.advance()
        entries = [entry for step in replica.steps for entry in step.entries]
        chunks.append([entry.token_count for entry in entries if entry.id == "long"])
    assert chunks[0] == chunks[1]
    assert len(chunks[0]) > 5


def test_decodes_in_flight_bound_the_steps_behind_theirs(replica_of: Any, submit_of: Any) -> None:
    """With two stages the next token waits for the step in between, too."""
    replica = replica_of(stages=2, kv_blocks=1000)
    replica.submit(submit_of("chat", 10, 20))
    while "chat" not in replica.emitted:
        replica.advance()
    replica.submit(submit_of("document", 3000, 1))
    while "document" not in replica.emitted:
        replica.advance()
    behind = [step for step in replica.steps if {entry.id for entry in step.entries} == {"document"}]
    assert behind
    assert all(step.predicted_seconds <= 0.05 / 2 for step in behind if "chat" not in replica.endings)


def test_guarded_meets_all_deadlines_of_the_papers_example_up_to_one_step(
    replica_of: Any, submit_of: Any
) -> None:
    """A long of 10 s due at 16 s and two shorts of 0.5 s due at 6 s, in chunks of 0.1 s (paper B; no slack at all)."""
    replica = replica_of(
        kv_blocks=2000,
        block_size_tokens=16,
        policy="guarded",
        max_chunk_tokens=100,
        min_chunk_tokens=100,
        step_seconds=0.1,
        profile=StepProfile(0.0, 1e-3, 0.0, 0.0),
    )
    replica.submit(submit_of("long", 10_000, 1, deadline_after_seconds=16.0))
    while replica.now < 4.95:  # 5.0 in sums of 0.1
        replica.advance()
    for name in ("s0", "s1"):
        replica.submit(submit_of(name, 500, 1, deadline_after_seconds=1.0))
    ends: dict[str, float] = {}
    while len(ends) < 3:
        replica.advance()
        for name in replica.emitted:
            ends.setdefault(name, replica.now)
    assert ends["s0"] <= 6.1 + 1e-9
    assert ends["s1"] <= 6.1 + 1e-9
    assert ends["long"] <= 16.1 + 1e-9


# --- admission without convoys -------------------------------------------------------------------------


def test_shorts_pass_a_late_request_that_waits_for_kv_and_it_still_gets_in(
    replica_of: Any, submit_of: Any
) -> None:
    """A holder has half of the pool for long; a late large request needs more than the other half."""
    replica = replica_of(
        kv_blocks=100, block_size_tokens=4, step_seconds=0.1, short_headroom=0.2, policy="fcfs"
    )
    replica.submit(submit_of("holder", 20, 180))  # 50 blocks, for 180 steps
    replica.submit(submit_of("large", 300, 10))  # 78 blocks
    beside = 0
    for index in range(600):
        if index % 3 == 0:
            replica.submit(submit_of(f"short {index}", 4, 12))
        replica.advance()
        if "large" in replica.emitted:
            break
        if replica.now > 3 and "holder" not in replica.endings:
            requests = replica.controller.requests()
            held = [one for one in requests if one.id.startswith("short") and not one.waits]
            beside = max(beside, len(held))
            assert sum(4 for _ in held) <= 20 or replica.now < 5, "no more than the head-room"
    assert beside > 0, "a convoy stands behind it"
    assert "large" in replica.emitted, "it starves"
    assert "holder" in replica.endings
    replica.run().check_empty()


def test_a_request_beside_a_claim_is_demoted_for_nothing_when_the_claimant_is_cancelled(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=20, block_size_tokens=4, step_seconds=0.5, short_headroom=0.0)
    replica.submit(submit_of("holder", 20, 41))  # 15 of 20 blocks
    replica.submit(submit_of("large", 60, 5))
    for _ in range(10):
        replica.advance()
    replica.submit(submit_of("small", 4, 5))
    replica.advance()
    assert "small" not in replica.emitted, "what is free is claimed"
    replica.cancel("large")
    for _ in range(2):
        replica.advance()
    assert "small" in replica.emitted
    replica.run().check_empty()


# --- several lanes -------------------------------------------------------------------------------------


def lanes_of(config_of: Any, lanes: int, **settings: Any) -> Any:
    config = config_of(kv_blocks=50, block_size_tokens=4, max_chunk_tokens=16, **settings)
    return dataclasses.replace(config, topology=Topology(kv=lanes), tokens_per_lane=32)


def test_a_short_request_goes_to_the_lane_with_the_least_prefill_ahead(
    config_of: Any, submit_of: Any, profile: StepProfile
) -> None:
    controller = ReplicaController(lanes_of(config_of, 2), profile)
    (first,) = controller.handle(submit_of("a", 30, 4), 0.0)
    (second,) = controller.handle(submit_of("b", 8, 4), 0.0)
    assert (first.lanes, second.lanes) == ((0,), (1,))
    assert second.admits[0].segments[0].lane == 1
    assert [entry.lane for entry in second.entries] == [1]
    assert controller.handle(submit_of("c", 8, 4), 0.0) == [], "both lanes are busy"
    _, third = controller.handle(Done(1, (Sample("b", 7),), lanes=(1,)), 0.1)
    assert isinstance(third, Step)
    assert third.lanes == (1,), "lane 0 has half of a still ahead"
    assert [entry.id for entry in third.entries] == ["b", "c"]


def test_lanes_join_a_long_request_as_its_kv_reaches_them_and_the_others_go_on_alone(
    config_of: Any, submit_of: Any, profile: StepProfile
) -> None:
    controller = ReplicaController(lanes_of(config_of, 3), profile)
    steps = controller.handle(submit_of("long", 80, 1), 0.0)
    segments = steps[0].admits[0].segments
    assert [segment.lane for segment in segments] == [0, 1, 2], "all of its KV is reserved at once"
    lanes = []
    while steps:
        step = steps.pop(0)
        lanes.append(step.lanes)
        assert [(entry.id, entry.lane) for entry in step.entries] == [("long", 0)]
        samples = tuple(Sample(entry.id, 7) for entry in step.entries if entry.samples)
        steps += [
            command
            for command in controller.handle(Done(step.step_id, samples, lanes=step.lanes), 0.1)
            if isinstance(command, Step) and command.entries
        ]
        if len(lanes) == 2:
            (beside,) = controller.handle(submit_of("short", 8, 1), 0.1)
            assert beside.lanes == (2,), "nothing of the long one is there yet"
            _, release = controller.handle(Done(beside.step_id, (Sample("short", 7),), lanes=(2,)), 0.1)
            assert isinstance(release, Step)
            assert (release.lanes, release.releases) == ((2,), ("short",))
            controller.handle(Done(release.step_id, lanes=(2,)), 0.1)
    assert lanes[:2] == [(0,), (0,)]
    assert lanes[2:4] == [(0, 1), (0, 1)]
    assert lanes[-1] == (0, 1, 2)


def run_steps(controller: ReplicaController, steps: list[Any], now: float) -> float:
    """Let `steps`, and all that follow, take what they are predicted to; returns when the last one was done."""
    while steps:
        step = steps.pop(0)
        now += step.predicted_seconds
        samples = tuple(Sample(entry.id, 7, "stop") for entry in step.entries if entry.samples)
        done = Done(step.step_id, samples, compute_seconds=step.predicted_seconds, lanes=step.lanes)
        steps += [command for command in controller.handle(done, now) if isinstance(command, Step)]
    return now


def test_a_prefill_over_several_lanes_leaves_no_word_of_slowness_behind(
    config_of: Any, submit_of: Any
) -> None:
    """It begins on lane 0; lane 1 joins, and the next step of lane 0 alone comes when the whole prompt is done."""
    controller = ReplicaController(lanes_of(config_of, 2), StepProfile(0.0, 2.0, 0.0, 0.0))
    now = run_steps(controller, controller.handle(submit_of("long", 180, 1), 0.0), 0.0)
    assert now > 300
    now = run_steps(controller, controller.handle(submit_of("next", 4, 1), now), now)
    assert controller._step_builder._pace.of_prefills == 1.0


def test_a_prefill_that_is_cancelled_does_not_make_the_idle_time_behind_it_a_step(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=2000, block_size_tokens=16, max_chunk_tokens=100)
    replica.submit(submit_of("long", 10_000, 1))
    replica.advance()
    replica.cancel("long")
    replica.run()
    replica.now += 600.0
    replica.submit(submit_of("next", 100, 1))
    assert replica.controller._step_builder._pace.of_prefills == pytest.approx(1.0, abs=0.01)
    replica.run().check_empty()


def test_a_controller_of_a_later_epoch_says_so_in_its_steps(
    config_of: Any, submit_of: Any, profile: StepProfile
) -> None:
    controller = ReplicaController(config_of(), profile, epoch=3)
    (step,) = controller.handle(submit_of("a", 8, 1), 0.0)
    assert (controller.epoch, step.epoch) == (3, 3)


def test_long_prompts_that_decode_keep_no_other_one_out(replica_of: Any, submit_of: Any) -> None:
    """The cap is on prefills that are half done; what decodes hold is bounded by the longs' share of the pool."""
    replica = replica_of(kv_blocks=400, block_size_tokens=4, long_threshold_tokens=50, max_running_long=1)
    replica.submit(submit_of("decodes", 96, 200))
    while "decodes" not in replica.emitted:
        replica.advance()
    replica.submit(submit_of("next", 96, 5))
    while "next" not in replica.endings:
        replica.advance()
    assert "decodes" not in replica.endings
    replica.run().check_empty()


@pytest.mark.parametrize(("count", "demoted"), [(4, 0), (12, 8)])
def test_guarded_sums_what_prompts_keep_a_stage_busy_and_not_how_long_they_pass_the_pipeline(
    replica_of: Any, submit_of: Any, count: int, demoted: int
) -> None:
    """Prompts of 0.1 s in each of 16 stages take 1.6 s alone; 0.5 s of their 2 s are left when they drain: for four behind `first`."""
    profile = StepProfile(0.0, 0.0001, 0.0, 0.0)
    replica = replica_of(
        kv_blocks=4000,
        stages=16,
        policy="guarded",
        max_step_seconds=1.7,
        profile=profile,
        max_chunk_tokens=1000,
    )
    replica.submit(submit_of("first", 1, 1))  # holds stage 0, so that the others are looked at together
    for index in range(count):
        replica.submit(submit_of(f"p{index}", 1000, 1, deadline_after_seconds=2.0))
    replica.advance()
    requests = [replica.controller.find(f"p{index}") for index in range(count)]
    late = [request for request in requests if replica.controller.is_demoted(request)]
    assert len(late) == demoted
    replica.run().check_empty()


def test_the_time_between_steps_is_taken_off_the_budget_of_those_beside_decodes(
    replica_of: Any, submit_of: Any
) -> None:
    profile = StepProfile(0.001, 0.0001, 0.0, 0.0)
    replica = replica_of(kv_blocks=20_000, profile=profile, max_chunk_tokens=10_000)
    replica.submit(submit_of("chat", 10, 2000))
    while "chat" not in replica.emitted:
        replica.advance()
    replica.submit(submit_of("document", 60_000, 1))
    while "document" not in replica.emitted:
        replica.step_seconds = (replica.steps[-1].predicted_seconds or 0.001) + 0.002
        replica.advance()
    beside = [step for step in replica.steps if len(step.entries) == 2]
    assert len(beside) > 100
    assert beside[0].predicted_seconds == pytest.approx(0.05, rel=0.01)
    assert beside[-2].predicted_seconds + 0.002 == pytest.approx(0.05, rel=0.01)


# --- settings reach the decisions ----------------------------------------------------------------------


def first_of(replica: Any, submits: list[Any]) -> str:
    """Which of these begins first, behind one that runs when they come."""
    replica.submit(
        dataclasses.replace(submits[0], id="before", tokens=10, prompt_length=10, prompt="of its own")
    )
    for submit in submits:
        replica.submit(submit)
    replica.run()
    began = [entry.id for step in replica.steps for entry in step.entries if entry.id != "before"]
    return str(began[0])


@pytest.mark.parametrize(("denominator", "first"), [("work", "long"), ("deadline", "short")])
def test_lars_divides_slack_by_what_the_settings_say(
    replica_of: Any, submit_of: Any, denominator: str, first: str
) -> None:
    """After 1.2 s: 0.7 s of slack for 0.1 s of work due after 2 s, and about 5 s for 2.6 s due after 9 s."""
    replica = replica_of(kv_blocks=20_000, max_running=1, policy="lars", lars_denominator=denominator)
    short = submit_of("short", 1000, 1, deadline_after_seconds=2.0, age_seconds=1.2)
    long = submit_of("long", 15_000, 1, deadline_after_seconds=9.0, age_seconds=1.2)
    assert first_of(replica, [short, long]) == first


@pytest.mark.parametrize(("share", "first"), [(0.1, "on time"), (0.5, "hopeless")])
def test_a_demoted_request_gets_a_revised_deadline_by_the_share_of_the_settings(
    replica_of: Any, submit_of: Any, share: float, first: str
) -> None:
    """About 1.1 s of work get a revised deadline 11 s or 2.2 s from now; the other one is due after 5 s."""
    replica = replica_of(kv_blocks=20_000, policy="guarded", demoted_share=share)
    hopeless = submit_of("hopeless", 8000, 1, deadline_after_seconds=0.5)
    on_time = submit_of("on time", 3000, 1, deadline_after_seconds=5.0)
    assert first_of(replica, [hopeless, on_time]) == first


def test_a_long_prefill_that_has_time_leaves_room_for_another_one(replica_of: Any, submit_of: Any) -> None:
    chunks = []
    for cap in (0.0, 0.4):
        replica = replica_of(
            kv_blocks=20_000, long_threshold_tokens=4000, policy="fcfs", space_sharing_cap=cap
        )
        replica.submit(submit_of("document", 30_000, 1, deadline_after_seconds=1000.0))
        while replica.controller.find("document").dispatched < 4000:
            replica.advance()
        replica.submit(submit_of("question", 3900, 1, deadline_after_seconds=1000.0))
        for _ in range(2):
            replica.advance()
        chunks.append({entry.id: entry.token_count for entry in replica.steps[-1].entries})
    assert chunks[1]["document"] < 0.8 * chunks[0]["document"]
    assert chunks[1]["question"] > chunks[0].get("question", 0)
