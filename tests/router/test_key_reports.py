"""Routers report the use of API keys to each other, so that a key's limits hold for all of them together."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from medha.api.api_keys import ApiKey, ApiKeys, hash_of
from medha_router.api_error import ApiError
from medha_router.key_accounts import Account, KeyAccounts
from medha_router.router_metrics import Observer


class Two:
    """Two routers with the same keys, and a clock."""

    def __init__(self, **limits: int) -> None:
        self.key = ApiKey.model_validate({"name": "k", "sha256": hash_of("k")} | limits)
        self.now = 0.0
        self.first, self.second = (
            KeyAccounts(ApiKeys([self.key]), Observer(CollectorRegistry()), lambda: self.now)
            for _ in range(2)
        )

    def exchange(self) -> int:
        """Pass on the reports that are due; return their number."""
        due = [(self.first.due_report(), self.second), (self.second.due_report(), self.first)]
        for report, other in due:
            if report is not None:
                other.heard(report)
        return sum(report is not None for report, _ in due)

    def begin(self, accounts: KeyAccounts) -> Account:
        account = accounts.account(self.key)
        account.begin()
        return account


def test_a_requests_concurrency_is_used_up_by_the_other_routers_clients_until_they_end() -> None:
    two = Two(concurrency=1)
    two.exchange()
    held = two.begin(two.first)
    two.exchange()
    with pytest.raises(ApiError, match="concurrency"):
        two.begin(two.second)
    held.end()
    two.exchange()
    two.begin(two.second)


def test_a_stream_that_began_without_a_limit_counts_against_the_one_that_its_key_has_got_since() -> None:
    two = Two()
    stream = two.begin(two.first)
    two.key = two.key.model_copy(update={"tokens_per_minute": 100})
    two.first.replace(ApiKeys([two.key]))
    for _ in range(3):
        two.begin(two.first).charge_prompts(30, "m")
        stream.charge_output(1)
    with pytest.raises(ApiError, match="tokensPerMinute"):
        two.begin(two.first).charge_prompts(30, "m")


def test_requests_of_a_router_that_is_lost_are_open_no_longer() -> None:
    two = Two(concurrency=1)
    two.exchange()
    two.begin(two.first)
    report = two.first.due_report()
    assert report is not None
    assert two.second.heard(report) == []
    two.second.lost(report.router)
    two.begin(two.second)


def test_prompts_and_outputs_at_one_router_delay_requests_at_the_other() -> None:
    two = Two(tokensPerMinute=600)
    two.exchange()
    account = two.begin(two.first)
    account.charge_prompts(200, "m")
    account.charge_output(400)
    account.end()
    two.exchange()
    with pytest.raises(ApiError, match="try again in 1 s"):
        two.begin(two.second)
    two.now = 10.0
    two.begin(two.second).charge_prompts(100, "m")


def test_a_report_is_due_when_something_has_changed_and_every_second() -> None:
    two = Two(requestsPerMinute=60)
    assert two.exchange() == 2
    assert two.exchange() == 0
    two.begin(two.first)
    assert two.exchange() == 1
    two.now = 0.9
    assert two.exchange() == 0
    two.now = 1.5
    assert two.exchange() == 2


def test_only_keys_in_use_are_reported_and_each_anew_once_it_was_idle() -> None:
    two = Two(requestsPerMinute=60)
    two.begin(two.first).end()
    report = two.first.due_report()
    assert report is not None
    assert [(use.key, use.requests) for use in report.keys] == [("k", 1)]
    two.now = 5.0
    idle = two.first.due_report()
    assert idle is not None
    assert idle.keys == ()
    two.begin(two.first)
    again = two.first.due_report()
    assert again is not None
    assert (again.keys[0].requests, again.keys[0].begun) == (1, again.number)


def test_short_requests_of_a_key_without_limits_are_reported_too() -> None:
    two = Two()
    two.exchange()
    heard = []
    for _ in range(3):
        account = two.begin(two.first)
        account.charge_prompts(50, "m")
        account.end()
        while (report := two.first.due_report()) is not None:
            heard += two.second.heard(report)
        two.now += 0.25
    assert [served.tokens for served in heard] == [50, 50, 50]
    last = two.first.due_report()
    assert last is None


def test_a_routers_own_report_and_keys_that_it_does_not_have_change_nothing() -> None:
    two = Two(concurrency=1)
    two.begin(two.first)
    report = two.first.due_report()
    assert report is not None
    two.first.heard(report)
    two.first.lost(report.router)
    assert two.first.open_requests() == {"k": 1}
    two.second.replace(ApiKeys([]))
    two.second.heard(report)
    assert two.second.open_requests() == {}


def test_without_keys_nothing_is_reported() -> None:
    accounts = KeyAccounts(None, Observer(CollectorRegistry()), lambda: 0.0)
    assert accounts.due_report() is None
