"""A reflector lists once, watches from there, and lists again only when it must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from medha_operator.index import Index
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import KINDS, NODE, Key, Kind
from medha_operator.kube.reflector import Reflector
from medha_operator.kube.store import WentBack

Event = tuple[str, dict[str, Any]]


def service(version: int, name: str = "r") -> dict[str, Any]:
    labels = {"medha.dev/replica": "r"}
    metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels}
    return {"kind": "Service", "metadata": metadata | {"resourceVersion": str(version)}}


class Played:
    """An API server that answers lists and watches from a script, and then blocks for ever."""

    def __init__(self, lists: list[Any], watches: list[list[Event] | ApiError]) -> None:
        self.lists, self.watches = lists, watches
        self.asked: list[str] = []
        self.pauses: list[float] = []
        """Seconds that the reflector would have slept."""
        self.has_ended = asyncio.Event()

    async def pages(self, *_: object) -> AsyncIterator[tuple[list[dict[str, Any]], str]]:
        self.asked.append("list")
        answer = self.lists.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        yield answer, str(max((int(item["metadata"]["resourceVersion"]) for item in answer), default=1))

    async def watch(
        self, _: object, __: object, ___: object, version: str, ____: float
    ) -> AsyncIterator[Event]:
        self.asked.append(f"watch {version}")
        if not self.watches:
            self.has_ended.set()
            await asyncio.Event().wait()
        answer = self.watches.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        for event in answer:
            yield event


def reflect(played: Played, kind: Kind = KINDS["Service"], *, is_optional: bool = False) -> Index:
    """Run until the script is over; no pause takes time."""
    index = Index(lambda _: None)

    async def run() -> None:
        reflector = Reflector(
            cast(Cluster, played),
            kind,
            index.stores[kind.name],
            namespace=None,
            selector="",
            relist_seconds=1000.0,
            is_optional=is_optional,
        )
        task = asyncio.create_task(reflector.run())
        await (reflector.is_synced.wait() if is_optional else played.has_ended.wait())
        task.cancel()

    really = asyncio.sleep

    async def sleep(seconds: float) -> None:
        played.pauses.append(seconds)
        await really(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("medha_operator.kube.reflector.asyncio.sleep", sleep)
        asyncio.run(run())
    return index


def names(index: Index) -> list[str]:
    entries = index.stores["Service"].of(Key("MedhaReplica", "default", "r"))
    return sorted(entry.document["metadata"]["name"] for entry in entries)


def test_a_watch_that_ends_goes_on_where_it_ended() -> None:
    bookmark = ("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    played = Played(
        [[service(5)]], [[("ADDED", service(7, "b"))], [bookmark], ApiError(0, "NoAnswer", "broken")]
    )
    index = reflect(played)
    assert played.asked == ["list", "watch 5", "watch 7", "watch 9", "watch 9"]
    assert names(index) == ["b", "r"]


def test_a_version_that_is_too_old_is_answered_by_a_new_list() -> None:
    gone = ApiError(410, "Expired", "too old resource version")
    played = Played([[service(5)], [service(30, "new")]], [gone])
    index = reflect(played)
    assert played.asked == ["list", "watch 5", "list", "watch 30"]
    assert names(index) == ["new"]


def test_a_list_that_fails_is_asked_for_again() -> None:
    failures = [ApiError(500, "InternalError", "etcd"), ApiError(429, "TooManyRequests", "later")]
    played = Played([*failures, [service(5)]], [])
    assert names(reflect(played)) == ["r"]


@pytest.mark.parametrize(
    ("status", "pauses"),
    [(500, [0.2, 0.5, 1.0, 2.0]), (403, [0.2, 0.5, 1.0, 2.0]), (410, [0, 0.5, 1.0, 2.0])],
)
def test_a_watch_that_is_always_refused_costs_a_list_less_and_less_often(
    status: int, pauses: list[float]
) -> None:
    played = Played(
        [[service(5)] for _ in range(5)], [ApiError(status, "Reason", "no watch") for _ in range(4)]
    )
    reflect(played)
    assert played.asked == ["list", "watch 5"] * 5
    assert played.pauses == pauses


def test_a_watch_that_has_reported_something_is_listed_for_soon_when_it_ends() -> None:
    refused = ApiError(500, "InternalError", "no watch")
    notice: list[Event] = [("ADDED", service(7, "b"))]
    played = Played([*[[service(5)]] * 3, [service(8)]], [refused, refused, notice, refused])
    reflect(played)
    assert played.pauses == [0.2, 0.5, 1.0, 0.2]  # the third one since a watch has ended at once
    assert played.asked[-3:] == ["watch 7", "list", "watch 8"]


def test_nodes_that_may_not_be_read_count_as_none() -> None:
    played = Played([ApiError(403, "Forbidden", "nodes") for _ in range(10)], [])
    index = reflect(played, NODE, is_optional=True)
    assert len(index.stores["Node"]) == 0


def test_an_api_server_that_goes_back_in_time_ends_the_reflector() -> None:
    gone = ApiError(410, "Expired", "too old resource version")
    played = Played([[service(5)], [service(3)]], [gone])

    async def run() -> None:
        index = Index(lambda _: None)
        reflector = Reflector(
            cast(Cluster, played),
            KINDS["Service"],
            index.stores["Service"],
            namespace=None,
            selector="",
            relist_seconds=1000.0,
        )
        with pytest.raises(WentBack):
            await reflector.run()

    asyncio.run(run())
