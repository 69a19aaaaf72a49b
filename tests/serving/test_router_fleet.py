"""Several routers before replicas of two grids: one is killed, added or rolled under load, and API keys keep limits.

Clients keep connections open, as those of a Service do, and choose a router among those that a load balancer would
name. Every request has an answer that is known before. So what was sent is what came back exactly, and the connections
that the killed router had.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml

from benchmark import benchmark
from medha.api.api_keys import hash_of
from medha.api.declared import DeclaredModel, to_text

SERVED = benchmark("served")
pytestmark = pytest.mark.timeout(400)  # eight processes start, on a machine that may do other things

GRIDS = ((1, 1, 1), (2, 1, 2))
LEAVE_SECONDS = 10.0  # longer than it takes until `Balancer` has noticed, also on a busy machine
BODIES = [
    {
        "model": "m", "prompt": f"question {number}: " + "word " * (15 * number), "seed": number,
        "temperature": number % 2, "max_tokens": 20 + 10 * number, "ignore_eos": True, "stream": number % 3 > 0,
    }
    for number in range(6)
]  # fmt: skip


def text_of(client: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    """Ask for a completion and return its text.

    Raises:
        httpx.HTTPError: the connection broke, or the answer is an error.
    """
    if not body["stream"]:
        answer = client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.raise_for_status().iter_lines()
        try:
            return "".join(SERVED.texts_of_events(lines))
        except SERVED.StreamFailed as failed:
            raise httpx.RemoteProtocolError(str(failed)) from failed


class Balancer:
    """Routers that want requests, as their probes said last; clients choose among them."""

    def __init__(self, routers: list[Any]) -> None:
        self._routers = routers
        self.wanting: list[Any] = list(routers)
        self._ended = threading.Event()
        self._probes: dict[str, httpx.Client] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, router: Any) -> None:
        self._routers.append(router)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            self.wanting = [router for router in list(self._routers) if self._wants(router)]
        for probe in self._probes.values():
            probe.close()

    def _wants(self, router: Any) -> bool:
        probe = self._probes.setdefault(router.name, httpx.Client(timeout=5))
        return bool(router.is_accepting(probe.get))


@dataclass
class Asked:
    """A request, the router that it went to, and what became of it."""

    router: str
    body: int
    text: str | None = None
    error: str = ""


@dataclass
class Load:
    """Clients that ask one question after the other, each over connections that it keeps."""

    balancer: Balancer
    clients: int = 5
    asked: list[Asked] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        open_clients: dict[str, httpx.Client] = {}
        while not self._ended.is_set():
            router = dice.choice(self.balancer.wanting)
            client = open_clients.setdefault(router.url, httpx.Client(base_url=router.url, timeout=60))
            one = Asked(router.name, dice.randrange(len(BODIES)))
            self.asked.append(one)
            try:
                one.text = text_of(client, BODIES[one.body])
            except httpx.HTTPError as error:
                one.error = repr(error)
        for client in open_clients.values():
            client.close()

    def wait(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        ended = sum(one.text is not None or bool(one.error) for one in list(self.asked)) + more
        wait_for(
            lambda: sum(one.text is not None or bool(one.error) for one in list(self.asked)) >= ended,
            "requests end",
        )

    def join(self) -> list[Asked]:
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=90)
            assert not thread.is_alive(), "a client hangs"
        return self.asked


def wait_for(done: Callable[[], bool], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Site:
    """Replicas of two grids, and the routers that all of them join."""

    def __init__(self, programs: ModuleType, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._numbers = itertools.count(1)
        models = folder / "models"
        models.mkdir()
        (models / "m.json").write_text(to_text([DeclaredModel(name="m", replicas=len(GRIDS))]))
        keys = folder / "keys.yaml"
        self.settings: dict[str, Any] = {
            "models_directory": str(models), "join_seconds": 60, "leave_seconds": LEAVE_SECONDS, "drain_seconds": 60,
            "silence_seconds": 6,  # on a busy machine, 2 s may pass without a heartbeat
        }  # fmt: skip
        self.keys_file = keys
        self.fleet = programs.Fleet(folder / "fleet", GRIDS, **self.settings)
        self.routers = [self.fleet.router]
        self.expected: list[str] = []

    def start(self) -> None:
        self.fleet.start()
        with httpx.Client(base_url=self.fleet.router.url, timeout=60) as client:
            self.expected = [text_of(client, body) for body in BODIES]
        assert len(set(self.expected)) == len(BODIES)

    def add(self, **settings: Any) -> Any:
        """Start a further router, which no replica has joined yet."""
        name = f"router{next(self._numbers)}"
        router = self._programs.Router(
            self._folder / name, self.fleet.router.keys, **(self.settings | settings)
        )
        self.routers.append(router)
        return router

    def join(self) -> None:
        """Have all replicas join all routers, as they do by the addresses of a headless Service."""
        for replica in self.fleet.replicas:
            replica.join(self.routers)

    def remove(self, router: Any) -> None:
        self.routers.remove(router)
        self.join()
        router.close()

    def held(self) -> float:
        """The load of all replicas: sequences that run or wait for any router, and the share of KV that they hold."""
        names = ("running", "waiting")
        return sum(
            router.metric(f"medha_replica_sequences_{name}") for router in self.routers for name in names
        ) + sum(router.metric("medha_replica_kv_used_ratio") for router in self.routers)

    def close(self) -> None:
        self.fleet.close()
        for router in self.routers:
            router.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "fleet").mkdir()
    site = Site(benchmark("fleet"), folder)
    try:
        site.start()
        yield site
    finally:
        site.close()


def routers(site: Site, count: int) -> list[Any]:
    """Bring the site to so many routers, all of which replicas have joined."""
    while len(site.routers) < count:
        site.add()
    site.join()
    for router in site.routers:
        wait_for(lambda router=router: router.is_accepting(), f"{router.name} is joined")  # type: ignore[misc]
    return site.routers


@contextmanager
def load(site: Site) -> Iterator[tuple[Balancer, Load]]:
    balancer = Balancer(list(site.routers))
    running = Load(balancer)
    try:
        running.wait(8)
        yield balancer, running
    finally:
        running.join()
        balancer.close()


def lost(router: Any) -> float:
    """Return how often a router submitted a sequence again because its replica, or a rank of it, was lost."""
    reasons = ("rank_lost", "replica_lost")
    return sum(router.metric("medha_router_resubmissions_total", reason=reason) for reason in reasons)


def wrong(site: Site, asked: list[Asked]) -> list[Asked]:
    """Requests that did not come back exactly."""
    return [one for one in asked if one.error or one.text != site.expected[one.body]]


@pytest.mark.long
def test_a_router_that_is_killed_breaks_its_own_connections_and_nothing_else(site: Site) -> None:
    victim = routers(site, 3)[-1]
    moved = [lost(router) for router in site.routers[:-1]]
    long = BODIES[1] | {"max_tokens": 7000, "prompt": "long"}
    broken: list[str] = []

    def hog() -> None:
        with httpx.Client(base_url=victim.url, timeout=60) as client:
            try:
                text_of(client, long)
            except httpx.HTTPError as error:
                broken.append(repr(error))

    hogs = [threading.Thread(target=hog) for _ in range(2)]
    with load(site) as (_, running):
        for thread in hogs:
            thread.start()
        wait_for(lambda: victim.metric("medha_router_sequences_open") >= 2, "the victim has long streams")
        running.wait(4)
        victim.process.send_signal(signal.SIGKILL)
        for thread in hogs:
            thread.join(timeout=60)
        running.wait(8)
    assert len(broken) == 2
    failed = wrong(site, running.asked)
    assert {one.router for one in failed} <= {victim.name}
    assert all(one.error for one in failed), "no client got a wrong text"
    assert all(one.text is not None or one.error for one in running.asked), "every request has ended"
    site.remove(victim)
    wait_for(lambda: site.held() == 0, "what the killed router had sent is cancelled, and its KV free")
    now = [lost(router) for router in site.routers]
    assert now == moved, "requests of the other routers went on undisturbed"


@pytest.mark.long
def test_a_router_that_is_added_and_one_that_is_rolled_cost_no_request(site: Site) -> None:
    first = routers(site, 2)[0]
    with load(site) as (balancer, running):
        added = site.add()
        balancer.add(added)
        running.wait(4)
        assert not added.is_accepting(), "no replica has joined it"
        assert added not in balancer.wanting
        site.join()
        wait_for(lambda: added in balancer.wanting, "it is joined, and wants requests")
        running.wait(4)
        served = list(running.asked)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(timeout=90) == 0
        running.wait(8)
    assert wrong(site, running.asked) == []
    assert added.name in {one.router for one in running.asked}
    assert first.name in {one.router for one in served}
    site.remove(first)
    wait_for(lambda: site.held() == 0, "nothing is left")


@pytest.mark.long
def test_the_limits_of_an_api_key_hold_over_all_routers(site: Site) -> None:
    limits = {"rate": {"requestsPerMinute": 12}, "many": {"concurrency": 2}}
    entries = [{"name": name, "sha256": hash_of(name), **limit} for name, limit in limits.items()]
    site.keys_file.write_text(yaml.safe_dump({"keys": entries}))
    two = [site.add(api_keys_file=site.keys_file) for _ in range(2)]
    site.join()
    try:
        for router in two:
            wait_for(lambda router=router: router.is_accepting(), "it is joined")  # type: ignore[misc]
        clients = [httpx.Client(base_url=router.url, timeout=60) for router in two]
        short = {"model": "m", "prompt": "a", "max_tokens": 1}

        def status(client: httpx.Client, key: str, body: dict[str, Any] = short) -> int:
            bearer = {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json=body, headers=bearer).status_code

        began = time.monotonic()
        codes = []
        for number in range(32):
            codes.append(status(clients[number % 2], "rate"))
            time.sleep(0.3)  # a report of one router reaches the other meanwhile
        admitted = codes.count(200)
        fair = 12 + 12 * (time.monotonic() - began) / 60
        assert set(codes) == {200, 429}
        assert fair - 2 <= admitted <= fair + 2, "alone, each router would have admitted that much"

        hold = {**short, "max_tokens": 7000, "ignore_eos": True}
        with httpx.Client(base_url=two[0].url, timeout=60) as holding:
            streams = [
                holding.stream(
                    "POST",
                    "/v1/completions",
                    json={**hold, "stream": True},
                    headers={"authorization": "Bearer many"},
                )
                for _ in range(2)
            ]
            for stream in streams:
                assert stream.__enter__().status_code == 200
            wait_for(lambda: status(clients[1], "many") == 429, "the other router's requests count")
            for stream in streams:
                stream.__exit__(None, None, None)
        wait_for(lambda: status(clients[1], "many") == 200, "their clients have gone")
        for client in clients:
            client.close()
    finally:
        for router in two:
            site.remove(router)
