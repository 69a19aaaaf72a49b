"""Two replicas behind a router: streams of the one that drains go on at the other one, which reads their KV from it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmark import benchmark
from held_points import HAND_OVER_POINTS, held_hand_overs

from .tier_leaks import controller_of, wait_released

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROMPT_TOKENS, OUTPUT_TOKENS, STREAMS = 3000, 5000, 3
FIRST_PIECES = 60
"""Pieces of each stream before its replica drains: some blocks of its output can be read."""
HELD_SECONDS = 180.0
"""Longest time for which a ticket may be kept whose reader has died, and more: 30 s, and eight times the time of reading."""
CHARACTERS = 2500
"""Length of the texts that are compared: clients leave then. So the replica has far too little time for all of the outputs."""
DRAIN_SECONDS = 10.0
SPEC = {"kvCache": {"size": "64Mi", "tiers": {"host": {"size": "96Mi"}, "peers": {"bandwidth": "1Gi"}}}}


@dataclass
class Text:
    """A stream's text, as far as it has come, and its pieces."""

    text: str = ""
    pieces: int = 0
    ended: Future[str] = field(default_factory=Future)


class Site:
    """Two replicas, and clients that stream."""

    def __init__(self, folder: Path, grid: tuple[int, int, int]) -> None:
        self.points = held_hand_overs(folder / "points")
        fleet, environment = benchmark("fleet").Fleet, self.points.environment
        self.fleet = fleet(folder, (grid, grid), spec=SPEC, environment=environment, silence_seconds=6)
        self._clients = ThreadPoolExecutor(STREAMS)

    def close(self) -> None:
        self._clients.shutdown(cancel_futures=True)
        self.fleet.close()

    def stream(self, seed: int, salt: str) -> Text:
        """Begin a stream; every second one is greedy."""
        found = Text()
        dice = random.Random(seed)
        body: dict[str, Any] = {
            "model": "m", "prompt": [dice.randrange(5, 96) for _ in range(PROMPT_TOKENS)], "stream": True,
            "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "seed": seed, "temperature": 0.9 * (seed % 2),
            "cache_salt": salt,
        }  # fmt: skip
        found.ended = self._clients.submit(self._read, found, body)
        return found

    def _read(self, found: Text, body: dict[str, Any]) -> str:
        events_of = benchmark("served").events_of
        url = self.fleet.router.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            response.raise_for_status()
            for event in events_of(response.iter_lines()):
                found.text += "".join(str(choice["text"]) for choice in event["choices"])
                found.pieces += 1
                if len(found.text) >= CHARACTERS:
                    break
        return found.text[:CHARACTERS]

    def texts(self, seeds: range, salt: str) -> list[str]:
        """Return the texts of undisturbed streams."""
        return [one.ended.result() for one in [self.stream(seed, salt) for seed in seeds]]


def wait_for(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, getattr(request, "param", (1, 1, 1)))
    try:
        site.fleet.start(DRAIN_SECONDS)
        yield site
    finally:
        site.close()


def begun(site: Site, seeds: range) -> tuple[list[Text], Any]:
    """Begin streams and wait until all have output; return them, and the replica that has most of them."""
    streams = [site.stream(seed, "moved") for seed in seeds]
    wait_for(lambda: all(one.pieces >= FIRST_PIECES for one in streams))
    return streams, max(site.fleet.replicas, key=site.fleet.running)


@pytest.mark.parametrize(
    "site", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=["one rank", "TP2", "KVP2"], indirect=True
)
def test_streams_of_a_replica_that_drains_go_on_where_their_kv_is_read(site: Site) -> None:
    seeds = range(STREAMS)
    streams, old = begun(site, seeds)
    (new,) = (one for one in site.fleet.replicas if one is not old)
    old.drain()
    moved = [one.ended.result() for one in streams]
    wait_for(lambda: not old.is_alive)
    assert moved == site.texts(seeds, "alone")
    site.fleet.wait_idle()
    count = site.fleet.router.metric("medha_router_resubmissions_total", reason="moved")
    assert count > 0
    least_tokens = count * (PROMPT_TOKENS + FIRST_PIECES - 16)
    assert new.metric("medha_peer_kv_resumed_tokens_total") >= least_tokens, "output was read, too"
    assert new.metric("medha_peer_kv_loaded_bytes_total") > 0
    assert new.metric("medha_peer_kv_failures_total") == 0
    wait_released(controller_of(new.folder))


@pytest.mark.parametrize("point", HAND_OVER_POINTS)
def test_a_replica_that_is_killed_at_a_point_of_a_move_changes_no_text(site: Site, point: str) -> None:
    """The one that drains dies as the other one asks, as it answers, as it sends blocks, or as it is told that all were read."""
    seeds = range(10, 10 + STREAMS)
    streams, old = begun(site, seeds)
    site.points.hold(point)
    old.drain()
    site.points.wait(point)
    old.signal(signal.SIGKILL)
    site.points.release(point)
    assert [one.ended.result() for one in streams] == site.texts(seeds, "alone")
    site.fleet.wait_idle()
    (new,) = (one for one in site.fleet.replicas if one is not old)
    wait_released(controller_of(new.folder), HELD_SECONDS)


@pytest.mark.parametrize("point", HAND_OVER_POINTS)
def test_a_replica_that_is_killed_at_a_point_as_it_takes_over_changes_no_text(site: Site, point: str) -> None:
    """The requests go back to their router, and on to the same replica once it has been started again."""
    seeds = range(20, 20 + STREAMS)
    streams, old = begun(site, seeds)
    (new,) = (one for one in site.fleet.replicas if one is not old)
    site.points.hold(point)
    old.drain()
    site.points.wait(point)
    new.stop()
    site.points.release(point)
    new.start(DRAIN_SECONDS)
    assert [one.ended.result() for one in streams] == site.texts(seeds, "alone")
    wait_for(lambda: not old.is_alive)
    site.fleet.wait_idle()
    wait_released(controller_of(new.folder), HELD_SECONDS)
