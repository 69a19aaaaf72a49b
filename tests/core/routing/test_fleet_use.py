"""Several routers hold a key's limits together, by what they report to each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from medha.api.api_keys import ApiKey, hash_of
from medha.routing.fleet_use import FORGET_SECONDS, SILENCE_SECONDS, FleetUse
from medha.routing.key_limits import (
    Arrived,
    Ended,
    LevelElsewhere,
    Tokenised,
    Usage,
    UsedElsewhere,
    decide,
    emptied,
)
from medha.wire.messages import KeyUse, RouterUse


def report(number: int, router: str = "a", **changes: float) -> RouterUse:
    fields = {"key": "k", "begun": 1, "requests": 0, "tokens": 0, "open_requests": 0} | changes
    return RouterUse(router, number, (KeyUse(**fields),))  # type: ignore[arg-type]


def test_of_a_first_report_the_levels_count_and_after_that_what_was_added() -> None:
    fleet = FleetUse()
    first = report(5, requests=1000, tokens=10**6, requests_level=3.5, tokens_level=20.0)
    assert fleet.heard(first, 0.0) == [("k", LevelElsewhere(3.5, 20.0))]
    assert fleet.heard(report(6, requests=1002, tokens=10**6), 1.0) == [("k", UsedElsewhere(2, 0))]
    assert fleet.heard(report(8, requests=1002, tokens=10**6 + 7), 2.0) == [("k", UsedElsewhere(0, 7))]


@pytest.mark.parametrize("number", [5, 6])
def test_a_report_that_comes_twice_or_late_adds_nothing(number: int) -> None:
    fleet = FleetUse()
    fleet.heard(report(1), 0.0)
    assert fleet.heard(report(6, requests=2, open_requests=1), 1.0) == [("k", UsedElsewhere(2, 0))]
    assert fleet.heard(report(number, requests=1, open_requests=9), 1.0) == []
    assert fleet.open_requests("k", 1.0) == 1


def test_a_key_that_was_idle_counts_from_nothing_again() -> None:
    fleet = FleetUse()
    fleet.heard(report(1), 0.0)
    fleet.heard(report(2, requests=10), 1.0)
    assert fleet.heard(report(4, begun=4, requests=12), 2.0) == [("k", UsedElsewhere(12, 0))], (
        "although the report without the key was lost"
    )
    fleet.heard(RouterUse("a", 5), 3.0)
    assert fleet.heard(report(6, begun=6, requests=3), 4.0) == [("k", UsedElsewhere(3, 0))]


def test_open_requests_of_a_router_count_until_it_is_lost_or_silent() -> None:
    fleet = FleetUse()
    fleet.heard(report(1, "a", open_requests=2), 0.0)
    fleet.heard(report(1, "b", open_requests=3), 1.0)
    assert fleet.open_requests("k", 1.0) == 5
    assert fleet.open_requests("other", 1.0) == 0
    fleet.lost("b")
    assert fleet.open_requests("k", 1.0) == 2
    fleet.heard(report(2, "b", open_requests=4), 1.5)
    assert fleet.open_requests("k", 1.5) == 6, "only the connection of one replica had ended"
    assert fleet.open_requests("k", SILENCE_SECONDS + 0.1) == 4
    fleet.lost("a router that never reported")


def test_after_a_long_silence_a_report_is_a_first_one_again() -> None:
    fleet = FleetUse()
    fleet.heard(report(1), 0.0)
    late = report(2, requests=500, requests_level=2.0)
    assert fleet.heard(late, FORGET_SECONDS + 0.1) == [("k", LevelElsewhere(2.0, 0.0))]


@dataclass
class Door:
    """A router: one key's usage, and what it heard."""

    name: str
    key: ApiKey
    usage: Usage = field(default_factory=lambda: Usage(0.0))
    fleet: FleetUse = field(default_factory=FleetUse)
    reports: int = 0

    def ask(self, event: Arrived | Ended | Tokenised, now: float) -> bool:
        elsewhere = self.fleet.open_requests(self.key.name, now)
        self.usage, refusal = decide(self.usage, event, self.key, now, elsewhere)
        return refusal is None

    def report(self, now: float) -> RouterUse:
        self.reports += 1
        usage = emptied(self.usage, self.key, now)
        use = KeyUse(
            self.key.name, 1, usage.total_requests, usage.total_tokens, usage.open_requests,
            usage.requests, usage.tokens,
        )  # fmt: skip
        return RouterUse(self.name, self.reports, (use,))

    def hear(self, report: RouterUse, now: float) -> None:
        for name, event in self.fleet.heard(report, now):
            assert name == self.key.name
            self.usage, _ = decide(self.usage, event, self.key, now)


def doors(count: int, **limits: int) -> list[Door]:
    key = ApiKey.model_validate({"name": "k", "sha256": hash_of("k")} | limits)
    return [Door(str(number), key) for number in range(count)]


def exchange(all_of_them: list[Door], now: float) -> None:
    for one in all_of_them:
        told = one.report(now)
        for other in all_of_them:
            if other is not one:
                other.hear(told, now)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_flood_through_all_routers_gets_a_keys_rate_and_no_more_than_one_bucket_each_at_once(
    count: int,
) -> None:
    limit, seconds, per_second = 60, 300, 20
    fleet, dice = doors(count, requestsPerMinute=limit), random.Random(count)
    admitted = []
    exchange(fleet, 0.0)
    for tick in range(seconds * per_second):
        now = tick / per_second
        if tick % (per_second // 4) == 0:
            exchange(fleet, now)
        for one in dice.sample(fleet, count):
            for _ in range(3):
                if one.ask(Arrived(), now):
                    admitted.append(now)
                    one.ask(Ended(), now)
        assert len(admitted) <= count * limit + now * limit / 60 + 1
    assert len(admitted) == pytest.approx(limit * (1 + seconds / 60), abs=2 * count)


def test_many_tokens_at_one_router_close_the_others_until_the_bucket_has_emptied() -> None:
    fleet = doors(3, tokensPerMinute=600)
    exchange(fleet, 0.0)
    assert fleet[0].ask(Tokenised(600), 0.0)
    exchange(fleet, 0.0)
    assert not any(one.ask(Tokenised(300), 10.0) for one in fleet)
    exchange(fleet, 30.0)
    assert fleet[1].ask(Tokenised(300), 30.0)
    exchange(fleet, 30.0)
    assert not any(one.ask(Tokenised(300), 31.0) for one in fleet)


def test_a_router_that_is_added_knows_at_once_what_was_used_before() -> None:
    first, second = doors(2, tokensPerMinute=600)
    assert first.ask(Tokenised(600), 0.0)
    second.hear(first.report(1.0), 1.0)
    assert not second.ask(Tokenised(100), 1.0)
    assert second.ask(Tokenised(100), 11.0)
    first.hear(second.report(11.0), 11.0)
    assert first.usage.tokens == pytest.approx(590), "its use is not added to itself by way of the other"
