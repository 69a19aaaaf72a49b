"""A router's keys: made once there is one, and found again by the next one of its name."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from medha_operator.cluster import Cluster
from medha_operator.keys import make_router_keys
from medha_operator.kinds import ROUTER, SECRET
from medha_operator.settings import RouterSite
from reconcile.fake_cluster import FakeCluster

SITE = RouterSite(name="front", namespace="default")
AGAIN_SECONDS = 300.0
OWN, SHARED = ((SECRET.name, "default", f"front-{what}") for what in ("keys", "enrolment"))


def look(cluster: FakeCluster) -> float:
    return asyncio.run(make_router_keys(cast(Cluster, cluster), SITE, AGAIN_SECONDS))


def install(cluster: FakeCluster) -> None:
    cluster.put({"kind": ROUTER.name, "metadata": {"name": "front", "namespace": "default"}, "spec": {}})


def data(cluster: FakeCluster) -> list[Any]:
    return [cluster.objects[name]["data"] for name in (OWN, SHARED)]


def test_nothing_is_made_before_there_is_a_router_which_is_asked_for_soon_again() -> None:
    cluster = FakeCluster()
    assert look(cluster) < AGAIN_SECONDS
    assert cluster.objects == {}


def test_a_router_that_is_installed_anew_finds_the_keys_that_its_replicas_know() -> None:
    cluster = FakeCluster()
    install(cluster)
    assert look(cluster) == AGAIN_SECONDS
    before = data(cluster)
    assert [cluster.objects[name]["metadata"].get("ownerReferences") for name in (OWN, SHARED)] == [
        None,
        None,
    ]
    del cluster.objects[ROUTER.name, "default", "front"]
    look(cluster)
    install(cluster)
    assert look(cluster) == AGAIN_SECONDS
    assert data(cluster) == before


def test_what_enrols_is_the_same_wherever_an_earlier_attempt_ended() -> None:
    cluster = FakeCluster()
    install(cluster)
    look(cluster)
    before = data(cluster)
    del cluster.objects[SHARED]
    look(cluster)
    assert data(cluster) == before
