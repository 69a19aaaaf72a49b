"""Streams of a replica that is lost or drains continue on another one, of another grid, with the same text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from benchmark import benchmark

TOKENS = 600  # so many that no stream ends before its replica is lost
SILENCE_SECONDS = 6.0
KINDS = (
    pytest.param("kill controller", marks=pytest.mark.long),  # its connection ends
    pytest.param("cut", marks=pytest.mark.long),  # it is silent
    pytest.param("drain", marks=pytest.mark.long),
    pytest.param("stop rank", marks=pytest.mark.long),
    pytest.param("stop", marks=pytest.mark.long),
    pytest.param("kill", marks=pytest.mark.long),
)


@pytest.fixture(scope="module")
def failover() -> ModuleType:
    return benchmark("failover")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 1, 1), id="TP2"),
        pytest.param((2, 1, 2), id="TP2 x KVP2", marks=pytest.mark.long),
    ],
)
def fleet(
    request: pytest.FixtureRequest, failover: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A replica of one rank and one of a grid, behind one router.

    The router tolerates a longer silence than by default: on a busy machine, 2 s may pass without a heartbeat.
    """
    grids = ((1, 1, 1), request.param)
    fleet = failover.Fleet(tmp_path_factory.mktemp("fleet"), grids, silence_seconds=SILENCE_SECONDS)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def expected(failover: ModuleType, fleet: Any) -> list[str]:
    """The texts of streams that nothing disturbs: sampled or greedy ones, one that follows a schema, and a function call."""
    streams = failover.Streams(fleet.router.url, TOKENS)
    texts: list[str] = streams.join()
    assert len(set(texts)) == len(texts)
    row = r'\[\s*\{\s*"id"\s*:\s*\d+\s*,\s*"colour"\s*:\s*"(red|green|blue)"'
    for text, one in zip(texts, streams.all, strict=True):
        assert one.form == "text" or re.search(row, text), text
        assert one.form != "function" or re.match(r'store\s*\{\s*"rows"', text), text
    assert {one.form for one in streams.all} == {"text", "schema", "function"}
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_a_replica_that_is_lost_continue_on_another_with_the_same_text(
    failover: ModuleType, fleet: Any, expected: list[str], kind: str
) -> None:
    """A replica that was stopped or cut off comes back while others compute its streams."""
    outcome = failover.measure(fleet, kind, TOKENS, expected)
    assert outcome.errors == []
    assert outcome.moved >= 1
    assert outcome.same == len(expected)


@pytest.mark.long
def test_streams_that_end_in_time_stay_on_a_replica_that_drains(
    failover: ModuleType, fleet: Any, expected: list[str]
) -> None:
    draining = fleet.replicas[0]
    fleet.restart(draining, drain_seconds=60.0)
    fleet.wait_idle()
    before = fleet.moved()
    streams = failover.Streams(fleet.router.url, TOKENS)
    streams.wait(lambda: min(len(one.times) for one in streams.all) >= failover.FIRST_TOKENS)
    assert fleet.running(draining) >= 1
    draining.drain()
    assert streams.join() == expected
    assert fleet.moved() == before, fleet.router.log.read_text()[-4000:]


def outcome(
    failover: ModuleType, kind: str = "kill", pauses: tuple[float, ...] = (2.0, 2.5), same: int = 6
) -> Any:
    return failover.Outcome(kind, "r0", len(pauses), same, list(pauses))


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"pauses": (2.0, 3.1)}, ["kill: longest pause of a stream that moves"]),
        ({"same": 5}, ["streams with the same text"]),
        ({"pauses": ()}, ["losses that moved no stream"]),
    ],
)
def test_a_pause_a_wrong_text_and_a_loss_without_effect_are_missed_goals(
    failover: ModuleType, changes: dict[str, Any], missed: list[str]
) -> None:
    found = failover.claims([outcome(failover, "cut"), outcome(failover, **changes)])
    assert [claim["name"] for claim in found if not benchmark("harness").holds(claim)] == missed
