"""Lists from a real API server are read page by page, and take the memory of one page."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api import Api, Document
from cluster.control_plane import ControlPlane
from medha_operator.index import REPLICA_LABEL, Index
from medha_operator.kube import client
from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import POD, Key
from medha_operator.kube.reflector import Reflector

PODS, PAGE = 60, 2
ANNOTATION_BYTES = 100_000


@pytest.fixture
def api(plane: ControlPlane) -> Iterator[Api]:
    with Api(plane) as client:
        yield client


@pytest.fixture
def home(api: Api) -> str:
    """A namespace with pods of one replica, each with a large annotation that is no fact."""
    home = api.namespace("lists")
    api.call("POST", f"/api/v1/namespaces/{home}/serviceaccounts", {"metadata": {"name": "default"}})
    spec = {"containers": [{"name": "c", "image": "i"}]}
    for number in range(PODS):
        metadata = {
            "name": f"r-l0-{number}",
            "labels": {REPLICA_LABEL: "r"},
            "annotations": {"large": "x" * ANNOTATION_BYTES},
        }
        api.call("POST", POD.path(home), {"metadata": metadata, "spec": spec})
    return home


def test_a_list_takes_the_memory_of_a_page_and_misses_nothing_that_is_deleted_meanwhile(
    plane: ControlPlane, api: Api, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    monkeypatch.setattr(client, "_PAGE", PAGE)
    pages: list[Document] = []
    really = Cluster._call

    async def call(self: Cluster, *asked: Any, **how: Any) -> Document:
        answer = await really(self, *asked, **how)
        pages.append(answer["metadata"])
        if len(pages) == 2:  # one of a page that was read, and one of a page that is yet to be
            for number in (0, PODS - 1):
                api.call("DELETE", POD.path(home, f"r-l0-{number}"), {"gracePeriodSeconds": 0})
        return answer

    monkeypatch.setattr(Cluster, "_call", call)
    both_deleted = asyncio.Event()
    index = Index(lambda _: both_deleted.set() if len(store) == PODS - 2 else None)
    store = index.stores[POD.name]

    async def reflect() -> int:
        cluster = await Cluster.connect(lambda _: True, lambda _: None, 4.0)
        reflector = Reflector(
            cluster, POD, store, namespace=home, selector=REPLICA_LABEL, relist_seconds=60.0
        )
        tracemalloc.start()
        task = asyncio.create_task(reflector.run())
        try:
            await reflector.is_synced.wait()
            _, most = tracemalloc.get_traced_memory()
            both_deleted.clear()  # the list came by that number of pods, too
            await asyncio.wait_for(both_deleted.wait(), 20)
        finally:
            tracemalloc.stop()
            task.cancel()
            await cluster.close()
        return most

    most_bytes = asyncio.run(reflect())
    assert len(pages) == PODS / PAGE
    assert len({page["resourceVersion"] for page in pages}) == 1
    names = {entry.document.name for entry in store.of(Key("MedhaReplica", home, "r"))}
    assert names == {f"r-l0-{number}" for number in range(1, PODS - 1)}
    # The parser takes 13 times a page's text for a moment; all pods would be 6 MB.
    assert most_bytes < PODS * ANNOTATION_BYTES * 2 / 3
