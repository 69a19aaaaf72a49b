"""A long request that was given up leaves KV to those that can be in time, while long ones crowd the pool."""

from __future__ import annotations

from typing import Any

import pytest

OUTPUT_TOKENS = 60
"""Of the request that holds KV already: it decodes all through a test."""


@pytest.fixture
def crowded(replica_of: Any, submit_of: Any) -> Any:
    """A replica of 100 blocks, of which a long request that decodes holds `blocks`."""

    def make(blocks: int) -> Any:
        replica = replica_of(
            policy="guarded",
            kv_blocks=100,
            block_size_tokens=4,
            long_threshold_tokens=80,
            short_headroom=0.0,
            max_step_seconds=0.02,
        )
        replica.submit(submit_of("holder", 4 * blocks - OUTPUT_TOKENS + 1, OUTPUT_TOKENS))
        replica.advance()
        assert replica.emitted["holder"]
        assert replica.controller.ledger.held_blocks == blocks
        return replica

    return make


def admitted(replica: Any) -> list[str]:
    return [admit.id for step in replica.steps for admit in step.admits]


def test_one_that_was_given_up_takes_no_kv_until_its_promise_is_near(crowded: Any, submit_of: Any) -> None:
    replica = crowded(blocks=40)
    replica.submit(submit_of("late", 100, 1, age_seconds=5.0))
    request = replica.controller.find("late")
    promises = []
    while "late" not in admitted(replica):
        promises.append(replica.controller.due(request))
        assert replica.advance()
    assert len(set(promises[1:])) == 1  # promised with the first step behind its arrival
    near = promises[1] - 3 * request.work_seconds
    assert near <= replica.now <= near + replica.step_seconds
    assert len(promises) > 5
    replica.run().check_empty()


def test_one_that_was_given_up_takes_kv_at_once_where_long_requests_hold_little_of_it(
    crowded: Any, submit_of: Any
) -> None:
    replica = crowded(blocks=35)  # of 100: no more than the share behind which the late wait
    replica.submit(submit_of("late", 100, 1, age_seconds=5.0))
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


def test_a_short_request_that_was_given_up_waits_for_nobody(crowded: Any, submit_of: Any) -> None:
    replica = crowded(blocks=40)
    replica.submit(submit_of("late", 60, 1, age_seconds=5.0))
    replica.advance()
    assert "late" in admitted(replica)
