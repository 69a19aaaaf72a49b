"""A router's keys are created once the router exists, and kept for the next router of its name."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, cast

import pytest

from medha_links.cluster_keys import TOKENS
from medha_operator.key_secrets import KEYS_UNUSABLE, make_router_keys
from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import ROUTER, SECRET, Key
from medha_operator.kube.store import Document
from medha_operator.operator_settings import OperatorSettings, RouterSite
from medha_operator.replica.actions import RecordEvent
from reconcile.fake_cluster import FakeCluster, Stage

SITE = RouterSite(name="front", namespace="default")
REREAD_SECONDS = 300.0
OWN, SHARED = ((SECRET.name, "default", f"front-{what}") for what in ("keys", "enrolment"))


def reconcile_quietly(cluster: FakeCluster) -> float:
    again, notice = reconcile_and_watch(cluster)
    assert notice == []
    return again


def reconcile_and_watch(cluster: FakeCluster) -> tuple[float, list[RecordEvent]]:
    heard: list[RecordEvent] = []

    async def record_event(about: Document, notice: RecordEvent) -> None:
        assert (about["kind"], about["metadata"]["name"]) == (ROUTER.name, "front")
        heard.append(notice)

    return asyncio.run(make_router_keys(cast(Cluster, cluster), SITE, REREAD_SECONDS, record_event)), heard


def install(cluster: FakeCluster) -> None:
    cluster.put({"kind": ROUTER.name, "metadata": {"name": "front", "namespace": "default"}, "spec": {}})


def data(cluster: FakeCluster) -> list[Any]:
    return [cluster.objects[name]["data"] for name in (OWN, SHARED)]


def test_nothing_is_made_before_there_is_a_router_which_is_asked_for_soon_again() -> None:
    cluster = FakeCluster()
    assert reconcile_quietly(cluster) < REREAD_SECONDS
    assert cluster.objects == {}


def test_a_router_that_is_installed_again_finds_the_keys_that_its_replicas_know() -> None:
    cluster = FakeCluster()
    install(cluster)
    assert reconcile_quietly(cluster) == REREAD_SECONDS
    before = data(cluster)
    assert [cluster.objects[name]["metadata"].get("ownerReferences") for name in (OWN, SHARED)] == [
        None,
        None,
    ]
    del cluster.objects[ROUTER.name, "default", "front"]
    reconcile_quietly(cluster)
    install(cluster)
    assert reconcile_quietly(cluster) == REREAD_SECONDS
    assert data(cluster) == before


def test_what_enrols_is_the_same_wherever_an_earlier_attempt_ended() -> None:
    cluster = FakeCluster()
    install(cluster)
    reconcile_quietly(cluster)
    before = data(cluster)
    del cluster.objects[SHARED]
    reconcile_quietly(cluster)
    assert data(cluster) == before


def spoilt(cluster: FakeCluster, name: tuple[str, str, str]) -> None:
    cluster.objects[name]["data"] = {}


def lost(cluster: FakeCluster, name: tuple[str, str, str]) -> None:
    del cluster.objects[name]


@pytest.mark.parametrize(
    ("harm", "name", "fixes"),
    [(lost, OWN, [SHARED]), (spoilt, OWN, [OWN, SHARED]), (spoilt, SHARED, [SHARED])],
    ids=["keys lost", "keys spoilt", "enrolment spoilt"],
)
def test_secrets_by_which_nobody_can_join_are_reported_and_left_until_somebody_deletes_them(
    harm: Callable[[FakeCluster, tuple[str, str, str]], None],
    name: tuple[str, str, str],
    fixes: list[tuple[str, str, str]],
) -> None:
    cluster = FakeCluster()
    install(cluster)
    reconcile_quietly(cluster)
    harm(cluster, name)
    reconcile_and_watch(cluster)  # what is lost is made
    for fix in fixes:
        before = data(cluster)
        again, (notice,) = reconcile_and_watch(cluster)
        assert again == REREAD_SECONDS
        assert (notice.reason, notice.is_warning) == (KEYS_UNUSABLE, True)
        assert fix[2] in notice.message
        assert "delete" in notice.message
        assert data(cluster) == before
        lost(cluster, fix)
        if fix != fixes[-1]:
            reconcile_and_watch(cluster)
    reconcile_quietly(cluster)
    reconcile_quietly(cluster)


def test_trouble_with_a_router_is_an_event_of_its_deployment() -> None:
    async def run() -> None:
        cluster = FakeCluster()
        install(cluster)
        stage = Stage(cluster, OperatorSettings(routers=(SITE,)))
        router = Key(ROUTER.name, "default", "front")
        await stage.reconciler.reconcile(router)
        assert cluster.notice == []
        lost(cluster, OWN)
        await stage.reconciler.reconcile(router)
        assert cluster.notice == [KEYS_UNUSABLE]

    asyncio.run(run())


def test_a_token_that_is_not_the_first_admits_too() -> None:
    """While a token is being replaced, the Secret holds both the newer and the earlier one."""
    cluster = FakeCluster()
    install(cluster)
    reconcile_quietly(cluster)
    entries = cluster.objects[OWN]["data"]
    entries[TOKENS] = b64encode(b"a-newer-token\n" + b64decode(entries[TOKENS])).decode()
    reconcile_quietly(cluster)
