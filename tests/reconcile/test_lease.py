"""The lease: who may write, until when, and that no write is sent that could end after it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from medha_operator.kube.client import ApiError, Cluster, Fenced
from medha_operator.kube.lease import Lease, LeaseLost, Tenure, write_seconds
from medha_operator.operator_settings import OperatorSettings

SETTINGS = OperatorSettings(lease_seconds=15.0)


@dataclass
class Kept:
    """The Lease as an API server keeps it, with its optimistic lock; `fails` calls are not answered."""

    found: dict[str, Any] | None = None
    fails: int = 0
    version: int = 0
    written: list[dict[str, Any]] = field(default_factory=list)

    async def get(self, *_: object) -> dict[str, Any] | None:
        self._answer()
        return self.found

    async def write_lease(self, document: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        self._answer()
        known = None if self.found is None else self.found["metadata"]["resourceVersion"]
        if document["metadata"].get("resourceVersion") != known or is_new != (self.found is None):
            raise ApiError(409, "Conflict", "somebody was faster")
        self.version += 1
        metadata = document["metadata"] | {"resourceVersion": str(self.version)}
        self.found = document | {"metadata": metadata}
        self.written.append(self.found)
        return self.found

    async def settle(self) -> None: ...

    def _answer(self) -> None:
        if self.fails:
            self.fails -= 1
            raise ApiError(0, "NoAnswer", "timeout")


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Party:
    """One of several operators."""

    def __init__(self, kept: Kept, clock: Clock, name: str, settings: OperatorSettings = SETTINGS) -> None:
        self.tenure = Tenure(clock)
        self.lease = Lease(cast(Cluster, kept), self.tenure, name, settings)

    def tries(self) -> bool:
        return asyncio.run(self.lease._try_to_take())

    def renews(self) -> bool:
        return asyncio.run(self.lease._renewed())


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_one_of_two_holds_it_and_may_write_until_it_could_end_too_late(kept: Kept, clock: Clock) -> None:
    first, second = Party(kept, clock, "first"), Party(kept, clock, "second")
    assert first.tries()
    assert not second.tries()
    assert first.tenure.covers(4.0)
    assert not second.tenure.covers(0.0)
    clock.now += 11.5
    assert not first.tenure.covers(4.0)  # it would end after 15.5 s


def test_others_wait_for_a_whole_lease_without_a_sign(kept: Kept, clock: Clock) -> None:
    first, second = Party(kept, clock, "first"), Party(kept, clock, "second")
    first.tries()
    second.tries()
    clock.now += 14.0
    assert first.renews()
    assert not second.tries()
    clock.now += 14.9
    assert not second.tries()
    clock.now += 0.2
    assert second.tries()
    assert not first.tenure.covers(0.0)  # it had ended for the first before it began for the second


@pytest.mark.parametrize("lease_seconds", [1.1, 1.4, 2.5, 15.4])
def test_a_lease_of_a_broken_number_of_seconds_is_not_over_for_others_before_it_is_for_its_holder(
    kept: Kept, clock: Clock, lease_seconds: float
) -> None:
    settings = OperatorSettings(lease_seconds=lease_seconds)
    first, second = (Party(kept, clock, name, settings) for name in ("first", "second"))
    assert first.tries()
    assert not second.tries()
    clock.now += lease_seconds - 0.01
    assert first.tenure.covers(0.0)
    assert not second.tries()
    clock.now += 1.0
    assert second.tries()


def test_a_holder_that_finds_another_stops_at_once(kept: Kept, clock: Clock) -> None:
    first, second = Party(kept, clock, "first"), Party(kept, clock, "second")
    first.tries()
    assert kept.found is not None
    kept.found["spec"]["holderIdentity"] = ""  # somebody has edited it
    second.tries()
    assert first.tenure.covers(4.0)
    assert not first.renews()
    assert not first.tenure.covers(0.0)


def test_renewals_without_an_answer_end_the_tenure_and_the_process(kept: Kept, clock: Clock) -> None:
    party = Party(kept, clock, "first")
    party.tries()
    kept.fails = 10**6

    async def keep() -> None:
        async def passes(seconds: float) -> None:
            clock.now += seconds

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(asyncio, "sleep", passes)
            await party.lease.keep()

    with pytest.raises(LeaseLost):
        asyncio.run(keep())
    assert clock.now >= 1015.0


def test_a_container_that_restarts_in_its_pod_goes_on_at_once(kept: Kept, clock: Clock) -> None:
    Party(kept, clock, "pod").tries()
    assert Party(kept, clock, "pod").tries()


def test_who_gives_it_back_writes_nothing_more_and_the_next_begins_at_once(kept: Kept, clock: Clock) -> None:
    first, second = Party(kept, clock, "first"), Party(kept, clock, "second")
    first.tries()
    asyncio.run(first.lease.release())
    assert not first.tenure.covers(0.0)
    assert second.tries()
    assert [entry["spec"]["leaseTransitions"] for entry in kept.written] == [1, 1, 2]


def test_a_write_that_the_lease_does_not_cover_is_not_sent() -> None:
    client = cast(Any, None)  # which would fail were it used
    cluster = Cluster(client, lambda _: False, lambda _: None, 4.0)
    manifest = {"kind": "Service", "metadata": {"name": "r", "namespace": "default"}}
    with pytest.raises(Fenced, match="PATCH /api/v1/namespaces/default/services/r was not sent"):
        asyncio.run(cluster.apply(manifest))


@pytest.mark.parametrize("lease_seconds", [2.0, 6.0, 15.0, 60.0])
def test_a_write_fits_into_a_lease_that_is_about_to_be_renewed(lease_seconds: float) -> None:
    assert write_seconds(lease_seconds) <= lease_seconds * 2 / 3 - lease_seconds / 6
