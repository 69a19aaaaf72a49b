"""The limits of an API key, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.api.api_keys import ApiKey, hash_of
from medha.routing.key_limits import (
    Arrived,
    Ended,
    Event,
    LevelElsewhere,
    OverLimit,
    Sampled,
    Tokenised,
    Usage,
    UsedElsewhere,
    decide,
)


def key(**limits: int) -> ApiKey:
    return ApiKey.model_validate({"name": "k", "sha256": hash_of("k")} | limits)


class Clocked:
    """A key's usage over time."""

    def __init__(self, **limits: int) -> None:
        self.key = key(**limits)
        self.usage = Usage(0.0)

    def at(self, now: float, event: Event) -> OverLimit | None:
        self.usage, refusal = decide(self.usage, event, self.key, now)
        return refusal


def test_without_limits_nothing_is_refused() -> None:
    one = Clocked()
    for _ in range(1000):
        assert one.at(0.0, Arrived()) is None
        assert one.at(0.0, Tokenised(10**9)) is None


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    one = Clocked(requestsPerMinute=6)
    assert [one.at(0.0, Arrived()) for _ in range(6)] == [None] * 6
    assert one.at(0.0, Arrived()) == OverLimit("requestsPerMinute", 6, pytest.approx(10.0))
    assert one.at(4.0, Arrived()) == OverLimit("requestsPerMinute", 6, pytest.approx(6.0))
    assert one.at(10.0, Arrived()) is None, "after the wait that was named"
    assert one.at(10.0, Arrived()) is not None
    assert [one.at(1000.0, Arrived()) for _ in range(7)].count(None) == 6, (
        "an idle key saves no more than a minute's"
    )


def test_requests_that_are_open_are_limited_until_one_ends() -> None:
    one = Clocked(concurrency=2)
    assert one.at(0.0, Arrived()) is None
    assert one.at(0.0, Arrived()) is None
    assert one.at(100.0, Arrived()) == OverLimit("concurrency", 2, 1.0)
    one.at(100.0, Ended())
    assert one.at(100.0, Arrived()) is None
    assert one.usage.open_requests == 2, "a refused request is not open"


def test_a_prompt_must_fit_and_a_refused_one_is_not_charged() -> None:
    one = Clocked(tokensPerMinute=600)
    assert one.at(0.0, Tokenised(500)) is None
    assert one.at(0.0, Tokenised(200)) == OverLimit("tokensPerMinute", 600, pytest.approx(10.0))
    assert one.at(0.0, Tokenised(100)) is None
    assert one.at(60.0, Tokenised(601)) == OverLimit("tokensPerMinute", 600, None), "it never fits"


def test_output_is_charged_as_it_comes_and_delays_the_next_request() -> None:
    one = Clocked(tokensPerMinute=600)
    assert one.at(0.0, Arrived()) is None
    assert one.at(0.0, Sampled(1200)) is None, "what was sampled cannot be taken back"
    refusal = one.at(0.0, Arrived())
    assert refusal == OverLimit("tokensPerMinute", 600, pytest.approx(60.1))
    assert one.at(60.2, Arrived()) is None


def test_a_limit_that_is_lowered_or_removed_holds_at_once() -> None:
    one = Clocked(requestsPerMinute=100)
    assert [one.at(0.0, Arrived()) for _ in range(50)] == [None] * 50
    one.key = key(requestsPerMinute=10)
    assert one.at(0.0, Arrived()) is not None
    one.key = key()
    assert one.at(0.0, Arrived()) is None


@given(
    limit=st.integers(1, 10**6),
    events=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**6)), max_size=60),
)
def test_over_any_time_no_more_passes_than_a_minutes_worth_and_what_time_allows(
    limit: int, events: list[tuple[float, int]]
) -> None:
    one = Clocked(tokensPerMinute=limit)
    now, passed = 0.0, 0
    for seconds, tokens in events:
        now += seconds
        refusal = one.at(now, Tokenised(tokens))
        if refusal is None:
            passed += tokens
            assert passed <= (limit + now * limit / 60) * (1 + 1e-6)
        elif refusal.wait_seconds is None:
            assert tokens > limit
        else:
            assert decide(one.usage, Tokenised(tokens), one.key, now + refusal.wait_seconds)[1] is None


# --- use at other routers ---------------------------------------------------------------------------------


def test_use_at_other_routers_fills_the_buckets_that_have_a_limit_and_only_those() -> None:
    one = Clocked(requestsPerMinute=10)
    assert one.at(0.0, UsedElsewhere(10, 10**6)) is None
    assert one.at(0.0, Arrived()) == OverLimit("requestsPerMinute", 10, pytest.approx(6.0))
    assert one.at(6.0, Arrived()) is None
    assert one.usage.tokens == 0
    assert one.usage.total_requests == 1, "only its own clients' use is its own to report"


def test_a_level_elsewhere_is_not_added_to_what_is_known_here() -> None:
    one = Clocked(tokensPerMinute=600)
    assert one.at(0.0, Tokenised(300)) is None
    one.at(0.0, LevelElsewhere(0.0, 400.0))
    assert one.usage.tokens == 400
    one.at(0.0, LevelElsewhere(0.0, 100.0))
    assert one.usage.tokens == 400


def test_requests_that_are_open_at_other_routers_count_against_the_concurrency() -> None:
    usage = Usage(0.0)
    usage, refusal = decide(usage, Arrived(), key(concurrency=3), 0.0, open_elsewhere=2)
    assert refusal is None
    usage, refusal = decide(usage, Arrived(), key(concurrency=3), 0.0, open_elsewhere=2)
    assert refusal == OverLimit("concurrency", 3, 1.0)
    assert usage.open_requests == 1


def test_a_key_is_idle_once_its_buckets_are_empty_and_nothing_is_open() -> None:
    one = Clocked(requestsPerMinute=60)
    one.at(0.0, Arrived())
    assert not one.usage.is_idle
    one.at(10.0, Ended())
    assert one.usage.is_idle
    one.at(10.0, UsedElsewhere(1, 0))
    assert not one.usage.is_idle
