"""Who gets KV when it is short: late requests claim it, whatever kept them out, and demoted long ones leave it to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha.wire.messages import Done, Sample, Step, StepProfile, Submit

SIZE = 4
HASHER = PrefixHasher(SIZE, b"secret")
OUTPUT_TOKENS = 60
"""Of the request that holds KV already: it decodes all through a test."""


@pytest.fixture
def crowded(replica_of: Any, submit_of: Any) -> Any:
    """A replica of 100 blocks, of which a long request that decodes holds `blocks`."""

    def make(blocks: int, stages: int = 1) -> Any:
        replica = replica_of(
            stages=stages,
            policy="guarded",
            kv_blocks=100,
            block_size_tokens=4,
            long_threshold_tokens=80,
            short_headroom=0.0,
            max_step_seconds=0.02,
        )
        replica.submit(submit_of("holder", 4 * blocks - OUTPUT_TOKENS + 1, OUTPUT_TOKENS))
        while "holder" not in replica.emitted:
            assert replica.advance()
        assert replica.controller.ledger.held_blocks == blocks
        return replica

    return make


def admitted(replica: Any) -> list[str]:
    return [admit.id for step in replica.steps for admit in step.admits]


@pytest.mark.parametrize("stages", [1, 8])
def test_one_that_was_demoted_takes_no_kv_until_its_revised_deadline_is_near(
    crowded: Any, submit_of: Any, stages: int
) -> None:
    replica = crowded(blocks=40, stages=stages)
    replica.submit(submit_of("late", 100, 1, age_seconds=5.0))
    request = replica.controller.find("late")
    work_seconds = request.deadline - replica.controller.slack_seconds(request, 0.0)
    revised = []
    while "late" not in admitted(replica):
        revised.append(replica.controller.due(request))
        assert replica.advance()
    # Demoted in the first step after its arrival: one is on its way, ahead of the one that runs.
    assert len(set(revised[2:])) == 1
    near = revised[2] - 3 * work_seconds
    assert near <= replica.now <= near + replica.step_seconds
    assert len(revised) > 5
    replica.run().check_empty()


def test_one_that_was_demoted_takes_kv_at_once_where_long_requests_hold_little_of_it(
    crowded: Any, submit_of: Any
) -> None:
    replica = crowded(blocks=35)  # of 100: no more than the share behind which the late wait
    replica.submit(submit_of("late", 100, 1, age_seconds=5.0))
    for _ in range(2):
        replica.advance()
    assert admitted(replica) == ["holder", "late"]


def test_the_kv_that_it_leaves_goes_to_a_long_request_that_can_be_in_time(
    crowded: Any, submit_of: Any
) -> None:
    replica = crowded(blocks=40)
    replica.submit(submit_of("late", 160, 1, age_seconds=5.0))
    replica.advance()
    replica.submit(submit_of("in time", 160, 1, deadline_after_seconds=0.1))
    deadline = replica.controller.find("in time").deadline
    while "in time" not in replica.emitted:
        assert replica.advance()
    assert replica.now <= deadline
    assert "late" not in replica.emitted
    replica.run().check_empty()


def test_a_short_request_that_was_demoted_waits_for_nobody(crowded: Any, submit_of: Any) -> None:
    replica = crowded(blocks=40)
    replica.submit(submit_of("late", 60, 1, age_seconds=5.0))
    for _ in range(2):
        replica.advance()
    assert "late" in admitted(replica)


@pytest.mark.parametrize("policy", ["guarded", "lars", "fcfs"])
def test_a_large_request_with_a_distant_target_of_its_own_is_overtaken_until_then_and_no_longer(
    replica_of: Any, submit_of: Any, policy: str
) -> None:
    replica = replica_of(
        policy=policy, kv_blocks=100, block_size_tokens=SIZE, short_headroom=0.0, step_seconds=0.02
    )
    target_seconds = 3.0
    for index in range(400):
        if index % 9 == 0:  # 15 blocks for 48 steps: five or six of them at a time
            replica.submit(submit_of(f"short {index}", 12, 48, deadline_after_seconds=0.2))
        assert replica.advance()
        if index == 60:
            replica.submit(submit_of("waits", 236, 4, deadline_after_seconds=target_seconds))
            asked = replica.now
        if "waits" in replica.emitted:
            break
    waited = replica.now - asked
    assert waited > target_seconds - 0.5, "it claims KV before it is late"
    assert waited < target_seconds + 1.2, "those that hold KV then have ended"


# --- what a waiting request counts on may go -----------------------------------------------------------


def submit_ids(replica: Any, submit: Submit, ids: Sequence[int]) -> None:
    """Submit a request whose prompt has these ids."""
    replica.prompt_ids[submit.prompt] = tuple(ids)
    hashes = HASHER.hashes(np.array(ids, dtype=np.int32))
    replica.submit(replace(submit, tokens=len(ids), prompt_length=len(ids), block_hashes=hashes))


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs", "lars", "guarded"])
def test_a_late_request_whose_cached_prefix_was_evicted_while_it_waited_claims_all_that_it_needs_now(
    replica_of: Any, submit_of: Any, policy: str
) -> None:
    replica = replica_of(
        policy=policy, kv_blocks=100, block_size_tokens=SIZE, short_headroom=0.0, step_seconds=0.02
    )
    submit_ids(replica, submit_of("holder", 1, 20), range(200))
    for _ in range(3):
        replica.advance()
    for index in range(6):  # the pool is full of them, and what the holder leaves goes to the last three
        replica.submit(submit_of(f"early {index}", 12, 48, deadline_after_seconds=0.2))
    for _ in range(2):
        replica.advance()
    submit_ids(replica, submit_of("waits", 1, 4), range(204))
    request = replica.controller.find("waits")
    assert replica.controller._table.needed_blocks(request) == 2, "beside 50 of the holder's"
    for index in range(400):
        if index % 9 == 0:  # 15 blocks for 48 steps: five or six of them at a time
            replica.submit(submit_of(f"short {index}", 12, 48, deadline_after_seconds=0.2))
        assert replica.advance()
        if "waits" in replica.emitted:
            break
    assert "waits" in replica.emitted, "it starves"
    assert "holder" in replica.endings
    assert request.cached_tokens < 100, "what it had counted on was evicted"
    replica.run().check_empty()


def test_a_prompt_of_whole_blocks_that_are_all_held_still_wants_one_for_its_last_token(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=100, block_size_tokens=SIZE)
    submit_ids(replica, submit_of("holder", 1, 100), range(200))
    for _ in range(3):
        replica.advance()
    submit_ids(replica, submit_of("alike", 1, 160), range(200))
    request = replica.controller.find("alike")
    assert replica.controller._table.needed_blocks(request) == 90 - 49


class Lanes:
    """A controller of two lanes whose ranks do as they are told."""

    def __init__(self, config: Any, profile: StepProfile) -> None:
        self.controller = ReplicaController(replace(config, topology=Topology(kv=2)), profile)
        self.now = 0.0
        self.steps: list[Step] = []
        self.begun: list[str] = []
        self.lane_of: dict[str, int] = {}

    def handle(self, event: Any) -> None:
        for command in self.controller.handle(event, self.now):
            if isinstance(command, Step):
                self.steps.append(command)
                for admit in command.admits:
                    self.lane_of[admit.id] = admit.segments[0].lane
                self.begun += [entry.id for entry in command.entries if entry.samples]

    @property
    def free_blocks(self) -> list[int]:
        return [self.controller.pools.free_blocks_on(lane) for lane in range(2)]

    def submit(self, submit: Submit, ids: range | None = None) -> None:
        if ids is not None:
            hashes = HASHER.hashes(np.array(ids, dtype=np.int32))
            submit = replace(submit, tokens=len(ids), prompt_length=len(ids), block_hashes=hashes)
        self.handle(submit)

    def advance(self) -> None:
        self.now += 0.1
        step = self.steps.pop(0)
        samples = tuple(Sample(entry.id, 7) for entry in step.entries if entry.samples)
        self.handle(Done(step.step_id, samples, lanes=step.lanes))


@pytest.fixture
def two_lanes(config_of: Any, profile: StepProfile) -> Lanes:
    """Of 60 blocks each."""
    config = config_of(policy="fcfs", kv_blocks=60, block_size_tokens=SIZE, short_headroom=0.0)
    return Lanes(config, profile)


def test_a_late_request_gets_in_whose_prefix_is_on_a_full_lane_while_the_other_has_room_for_the_rest_alone(
    two_lanes: Lanes, submit_of: Any
) -> None:
    two_lanes.submit(submit_of("holder", 1, 141), range(80))
    two_lanes.advance()
    two_lanes.submit(submit_of("early", 4, 41))
    two_lanes.submit(submit_of("waits", 1, 117), range(84))  # 50 blocks, of which the first lane holds 20
    assert two_lanes.free_blocks == [5, 49]
    for index in range(280):
        if index % 60 == 59:
            two_lanes.submit(submit_of(f"short {index}", 4, 41))  # one or two of 11 blocks on the second lane
        two_lanes.advance()
        if "waits" in two_lanes.begun:
            break
    assert "waits" in two_lanes.begun, "it starves"
    assert two_lanes.controller.find("holder") is not None


def test_what_is_free_on_a_claimed_lane_is_not_for_a_request_that_finds_its_prefix_there(
    two_lanes: Lanes, submit_of: Any
) -> None:
    two_lanes.submit(submit_of("before", 1, 1), range(40))  # 10 blocks stay cached on the first lane
    two_lanes.advance()
    two_lanes.submit(submit_of("first", 4, 77))  # 20 blocks
    two_lanes.submit(submit_of("second", 4, 97))  # 25 blocks, on the other lane
    for _ in range(4):
        two_lanes.advance()
    two_lanes.submit(submit_of("large", 4, 197, age_seconds=5.0))  # 50 blocks
    two_lanes.advance()
    assert two_lanes.free_blocks == [40, 35]
    two_lanes.submit(submit_of("small", 1, 10), range(44))
    for _ in range(2):
        two_lanes.advance()
    assert two_lanes.lane_of == {"before": 0, "first": 0, "second": 1, "small": 1}
    while "large" not in two_lanes.lane_of:
        two_lanes.advance()
    assert two_lanes.lane_of["large"] == 0


def test_a_claim_moves_to_the_lane_where_others_can_make_way(two_lanes: Lanes, submit_of: Any) -> None:
    """More is free on the first lane, but no key with much KV decodes there."""
    two_lanes.submit(submit_of("first", 4, 157, owner="a"))  # 40 blocks
    two_lanes.submit(submit_of("large 1", 4, 109, owner="large"))  # 28 blocks
    two_lanes.submit(submit_of("large 2", 4, 109, owner="large"))
    while len(two_lanes.begun) < 6:
        two_lanes.advance()
    assert two_lanes.free_blocks == [20, 4]
    two_lanes.submit(submit_of("late", 1, 96, owner="small", age_seconds=5.0))  # 24 blocks
    for _ in range(6):
        two_lanes.advance()
    assert two_lanes.lane_of["late"] == 1
    assert two_lanes.controller.find("first") is not None


# --- long ones that their share keeps out ----------------------------------------------------------------


@pytest.fixture
def replica_of_longs(replica_of: Any) -> Any:
    """A replica of 100 blocks, of which longs (from 20 tokens on) get up to 90."""

    def make(**settings: Any) -> Any:
        return replica_of(
            kv_blocks=100,
            block_size_tokens=4,
            long_threshold_tokens=20,
            short_headroom=0.1,
            step_seconds=0.1,
            **settings,
        )

    return make


@pytest.mark.parametrize("policy", ["fcfs", "edf", "lrs", "lars", "guarded"])
@pytest.mark.parametrize("most_longs", [1, 32])
@pytest.mark.parametrize("tokens", [250, 395])
def test_a_late_long_request_gets_in_beside_a_stream_of_smaller_long_ones(
    replica_of_longs: Any, submit_of: Any, policy: str, most_longs: int, tokens: int
) -> None:
    """One of 64 blocks, and one that is larger than the share of longs and needs nearly all of the pool for itself."""
    replica = replica_of_longs(policy=policy, max_running_long=most_longs)
    began: int | None = None
    for index in range(1500):
        if index == 30:
            replica.submit(submit_of("big", tokens, 4))
        if index % 4 == 0:
            replica.submit(submit_of(f"long {index}", 20, 21))  # 10 blocks for 21 steps: 6 of them at a time
        if index % 6 == 0:
            replica.submit(submit_of(f"short {index}", 4, 5))
        assert replica.advance()
        if "big" in replica.emitted:
            began = began or index
            if index > began + 60:
                break
    assert began is not None, "it starves"
    assert began > 50, "it waited until it was late"
    behind = {f"long {index}" for index in range(began, began + 40)}
    assert behind & set(replica.emitted), "others go on behind it"
    replica.run().check_empty()


def test_shorts_keep_their_head_room_and_what_else_is_free_beside_a_long_request_that_waits_for_other_longs(
    replica_of_longs: Any, submit_of: Any
) -> None:
    replica = replica_of_longs(policy="fcfs")
    for index in range(3):
        replica.submit(submit_of(f"long {index}", 20, 101))  # 30 blocks each, for 101 steps
    replica.submit(submit_of("big", 160, 1, age_seconds=5.0))  # 40 blocks: longs may have no other
    replica.advance()
    for index in range(4):
        replica.submit(submit_of(f"short {index}", 4, 9))  # 3 blocks
    replica.submit(submit_of("one more long", 20, 1))  # 5 blocks, which are free
    for _ in range(20):
        replica.advance()
    assert {f"short {index}" for index in range(4)} <= set(replica.emitted)
    assert "one more long" not in replica.emitted, "it would stand in the way"
    replica.run().check_empty()
    assert list(replica.emitted).index("big") < list(replica.emitted).index("one more long")


@pytest.mark.parametrize("most_longs", [1, 32])
def test_other_longs_get_in_again_when_the_long_claimant_is_cancelled(
    replica_of_longs: Any, submit_of: Any, most_longs: int
) -> None:
    replica = replica_of_longs(policy="fcfs", max_running_long=most_longs)
    replica.submit(submit_of("holder", 20, 101))
    replica.advance()
    replica.submit(submit_of("big", 300, 1, age_seconds=5.0))
    for _ in range(3):
        replica.advance()
    replica.submit(submit_of("next", 100, 1))
    for _ in range(10):
        replica.advance()
    assert "next" not in replica.emitted
    replica.cancel("big")
    for _ in range(3):
        replica.advance()
    assert "next" in replica.emitted
    replica.run().check_empty()


def test_a_claimant_whose_prompt_another_sample_computes_claims_no_more(
    replica_of_longs: Any, submit_of: Any
) -> None:
    """The other sample is small enough to pass beside the claim; behind it the claimant wants less than was claimed."""
    replica = replica_of_longs(policy="fcfs", max_chunk_tokens=16, min_chunk_tokens=4)
    replica.submit(submit_of("holder", 16, 321))  # 84 blocks
    replica.advance()
    for name, tokens in (("large", 60), ("small", 5)):
        submit = submit_of(name, 16, tokens, age_seconds=5.0)
        replica.submit(replace(submit, prompt="the same"))
    for _ in range(10):
        replica.advance()
    assert "small" in replica.emitted
    replica.run().check_empty()


@given(seed=st.integers(0, 100_000))
def test_every_large_request_gets_in_beside_an_endless_stream_of_small_ones_that_leaves_some_kv_free(
    replica_of: Any, submit_of: Any, seed: int
) -> None:
    """They come as fast as others of them end, shorts or longs or both; the large one may count on what another holds."""
    random = Random(seed)
    small_blocks, held_blocks = random.randint(6, 16), random.randint(30, 70)
    most_small = int(random.choice([0.5, 0.7, 0.9]) * 100 / small_blocks)
    replica = replica_of(
        policy=random.choice(["fcfs", "edf", "lrs", "lars", "guarded"]),
        kv_blocks=100,
        block_size_tokens=SIZE,
        long_threshold_tokens=random.choice([1_000_000, 20]),
        short_headroom=random.choice([0.0, 0.1]),
        max_running_long=random.choice([1, 2, 32]),
        step_seconds=0.05,
    )
    sizes = random.choice([(4,), (20,), (4, 20, 2 * small_blocks)])
    submitted = 0

    def submit_small(deadline_seconds: float | None = None) -> None:
        nonlocal submitted
        submitted += 1
        tokens = random.choice(sizes)
        output = SIZE * small_blocks - tokens + 1
        small = submit_of(f"small {submitted}", tokens, output, deadline_after_seconds=deadline_seconds)
        replica.submit(small)

    if random.random() < 0.7:
        submit_ids(replica, submit_of("holder", 1, 20), range(SIZE * held_blocks))
        for _ in range(3):
            replica.advance()
        for _ in range(most_small):
            submit_small(0.2)
        for _ in range(2):
            replica.advance()
    large = random.randint(held_blocks + 1, 95)
    submit_ids(replica, submit_of("large", 1, 4), range(SIZE * large))
    for _ in range(2_500):
        ended = sum(name.startswith("small") for name in replica.endings)
        if submitted - ended < most_small and random.random() < 0.5:
            submit_small()
        assert replica.advance()
        if "large" in replica.emitted:
            break
    assert "large" in replica.emitted, "it starves"
    replica.run().check_empty()


# --- what longs share, and places -------------------------------------------------------------------------


def test_longs_of_one_document_count_it_once_against_their_share(
    replica_of_longs: Any, submit_of: Any
) -> None:
    """60 of the pool's 100 blocks are the document; of the 90 that longs may have, each question takes 11 more."""
    replica = replica_of_longs(policy="fcfs")
    submit_ids(replica, submit_of("first", 1, 6), range(240))
    for _ in range(3):
        replica.advance()
    for index in range(2):
        question = submit_of(f"question {index}", 1, 20, deadline_after_seconds=60.0)
        submit_ids(replica, question, [*range(240), *range(1000 + 100 * index, 1024 + 100 * index)])
    replica.submit(submit_of("another", 40, 1, deadline_after_seconds=60.0))  # 11 blocks
    for _ in range(2):
        replica.advance()
    assert {"question 0", "question 1"} <= set(admitted(replica))
    assert "first" not in replica.endings
    while "first" not in replica.endings:
        assert replica.advance()
    replica.advance()
    assert replica.controller.pools.held_blocks == 60 + 2 * 11, "they still hold the document"
    assert "another" not in admitted(replica), "beyond the head-room of shorts 8 blocks are free"
    replica.run().check_empty()
    assert "another" in replica.emitted


def test_guarded_gives_late_ones_a_share_of_the_places_where_places_are_short(
    replica_of: Any, submit_of: Any
) -> None:
    """Four run at a time, and more than four come: whoever was demoted would be behind the next ones for ever."""
    replica = replica_of(policy="guarded", max_running=4, kv_blocks=1000, step_seconds=0.1)
    for index in range(4):
        replica.submit(submit_of(f"holder {index}", 4, 40))
    replica.advance()
    names = [f"large {index}" for index in range(3)]
    for name in names:
        replica.submit(submit_of(name, 400, 2, deadline_after_seconds=0.5))
    for index in range(1200):
        if index % 2 == 0:
            replica.submit(submit_of(f"small {index}", 4, 10, deadline_after_seconds=1.0))
        replica.advance()
        if set(names) <= set(replica.emitted):
            break
    order = admitted(replica)
    assert set(names) <= set(order), "they starve"
    assert [name for name in order if name in names] == names, "the one that is late by longest comes first"
    between = np.diff([order.index(name) for name in names])
    assert (between >= 10).all(), "and the others have nine places in ten"
