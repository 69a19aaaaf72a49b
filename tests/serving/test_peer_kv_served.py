"""Two replicas behind a router: what the one has computed, the other one reads instead of computing it.

Many questions about one document come at once. The replica that has the document takes the first ones, and the router sends
the rest to the other one, which asks for the document's KV.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmark import benchmark
from held_points import HAND_OVER_POINTS, held_hand_overs

from .tier_leaks import controller_of, wait_released

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

DOCUMENT_TOKENS, QUESTION_TOKENS, QUESTIONS = 8000, 1200, 5
ROUNDS = 12
"""Most documents that are asked about: on a busy machine, a request may not wait until its KV has been read."""
MAX_MODEL_LEN = 10_000
KV_CACHE: dict[str, Any] = {
    "size": "96Mi", "tiers": {"host": {"size": "128Mi"}, "peers": {"bandwidth": "1Gi"}}
}  # fmt: skip


class Site:
    """Two replicas of one grid, and clients."""

    def __init__(self, folder: Path, grid: tuple[int, int, int], plane: str = "sockets") -> None:
        source = {"path": str(folder / "checkpoint")}
        model = {"name": "m", "source": source, "maxModelLen": MAX_MODEL_LEN}
        tiers = KV_CACHE["tiers"]
        peers = tiers["peers"] | {"plane": plane}
        spec = {"model": model, "kvCache": KV_CACHE | {"tiers": tiers | {"peers": peers}}}
        self.points = held_hand_overs(folder / "points")
        fleet, environment = benchmark("fleet").Fleet, self.points.environment
        self.fleet = fleet(folder, (grid, grid), spec=spec, environment=environment, silence_seconds=6)
        self._clients = ThreadPoolExecutor(QUESTIONS)

    def close(self) -> None:
        self._clients.shutdown(cancel_futures=True)
        self.fleet.close()

    def ask(self, prompt: list[int], salt: str, temperature: float) -> str:
        body: dict[str, Any] = {
            "model": "m", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 1,
            "temperature": temperature, "cache_salt": salt,
        }  # fmt: skip
        answer = httpx.post(self.fleet.router.url + "/v1/completions", json=body, timeout=300)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def ask_all(self, prompts: list[list[int]], salt: str, temperature: float) -> list[Future[str]]:
        return [self._clients.submit(self.ask, one, salt, temperature) for one in prompts]

    def wait_released(self) -> None:
        """Wait until no replica holds anything for anybody: tickets whose readers died are kept for half a minute, and more."""
        self.fleet.wait_idle()
        for replica in self.fleet.replicas:
            wait_released(controller_of(replica.folder), 180)

    def total(self, name: str) -> float:
        return sum(replica.metric(f"medha_peer_kv_{name}_total") for replica in self.fleet.replicas)


def prompts(number: int) -> tuple[list[int], list[list[int]]]:
    """Return a document, and questions about it."""
    dice = random.Random(number)
    document = [dice.randrange(5, 96) for _ in range(DOCUMENT_TOKENS)]
    return document, [
        document + [dice.randrange(5, 96) for _ in range(QUESTION_TOKENS)] for _ in range(QUESTIONS)
    ]


@pytest.fixture(
    scope="module",
    params=[(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)],
    ids=["one rank", "TP2", "SPP2", "KVP2"],
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("peers"), request.param)
    try:
        site.fleet.start()
        yield site
    finally:
        site.close()


def test_texts_are_those_without_hand_overs(site: Site) -> None:
    for number in range(ROUNDS):
        document, questions = prompts(number)
        temperature = 0.9 * (number % 2)
        site.ask(document, "shared", temperature)
        handed = [one.result() for one in site.ask_all(questions, "shared", temperature)]
        alone = [site.ask(one, f"{number} {at}", temperature) for at, one in enumerate(questions)]
        assert handed == alone
        site.fleet.wait_idle()
        if site.total("loaded_bytes") > 0 and number >= 1:
            break
    assert site.total("hits") > 0
    assert site.total("loaded_bytes") > 0
    assert site.total("offered_bytes") > 0
    assert site.total("failures") == 0
    site.wait_released()


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1)], ids=["one rank", "TP2"])
def test_texts_are_those_without_hand_overs_if_kv_goes_through_nixl(
    grid: tuple[int, int, int], tmp_path: Path
) -> None:
    """Two served replicas, each with the real library; no rank has gone back to sockets."""
    pytest.importorskip("nixl", reason="the package nixl is not installed: pip install 'medha[nixl]'")
    site = Site(tmp_path, grid, plane="nixl")
    try:
        site.fleet.start()
        test_texts_are_those_without_hand_overs(site)
        logs = [replica.log.read_text() for replica in site.fleet.replicas]
        assert not [
            log for log in logs if "over sockets, not over nixl" in log or "over sockets from now on" in log
        ]
        assert all("KV goes to and comes from other replicas over nixl" in log for log in logs)
    finally:
        site.close()


@pytest.mark.parametrize("point", HAND_OVER_POINTS)
def test_a_source_that_is_killed_at_a_point_of_a_hand_over_changes_no_text(site: Site, point: str) -> None:
    """It dies as it is asked, as it answers, as it sends blocks, or as it is told that all were read."""
    for number in range(100, 100 + ROUNDS):
        document, questions = prompts(number)
        source = asked_for(site, document)
        site.points.hold(point)
        asked = site.ask_all(questions, "shared", 0.9)
        is_reached = site.points.wait(point, partial(are_done, asked))
        if is_reached:
            source.stop()
        site.points.release(point)
        if is_reached:
            site.fleet.wait_ready(1)
            source.start()
            site.fleet.wait_ready()
        handed = [one.result() for one in asked]
        alone = [site.ask(one, f"{number} {at}", 0.9) for at, one in enumerate(questions)]
        assert handed == alone
        site.fleet.wait_idle()
        if is_reached:
            break
    else:
        pytest.fail(f"in vain: a hand-over that comes to the point {point}")
    site.wait_released()


def are_done(asked: list[Future[str]]) -> bool:
    return all(one.done() for one in asked)


def asked_for(site: Site, document: list[int]) -> Any:
    """Return the replica that has computed a document."""

    def queried() -> list[float]:
        name = "medha_prefix_cache_queried_tokens_total"
        return [replica.metric(name) for replica in site.fleet.replicas]

    before = queried()
    site.ask(document, "shared", 0.9)
    site.fleet.wait_idle()
    more = [after - earlier for after, earlier in zip(queried(), before, strict=True)]
    return site.fleet.replicas[more.index(max(more))]
