"""A replica over two real nodes, one of which is lost: said at once, replaced after the limit, refused later.

The tests share one cluster and go on where the one before has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from cluster import images, medha
from cluster.api import condition, eventually
from cluster.conftest import skipping_what_cannot_run
from cluster.definitions import define
from cluster.medha import Document
from cluster.node import Node
from cluster.nodes import Cluster, two_nodes
from cluster.operator_process import operator
from medha_operator.replica.observed import seconds

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

READY_SECONDS = 120.0
GRACE_SECONDS = 40
"""How long a kubelet may be silent; Kubernetes looks every 5 s. (By default 50 since 1.32, and 40 before.)"""
NOTICE_SECONDS = 60.0
"""From a node's end to our word of it."""
TOLD_SECONDS = 10.0
"""Of which ours: an event's way, and far less than the next look without one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with the worker's image, torch and a checkpoint, the operator on neither, and a replica on both."""
    folder = tmp_path_factory.mktemp("lost-node")
    with skipping_what_cannot_run():
        archive = images.build(["worker"])["worker"]
    with (
        skipping_what_cannot_run(),
        two_nodes(
            folder, [archive], controller_flags=[f"--node-monitor-grace-period={GRACE_SECONDS}s"]
        ) as running,
        operator(folder, running.kubeconfig, image_pull_policy="Never"),
    ):
        for node in running.nodes:
            alone = replace(running, nodes=[node])
            medha.bring_torch(alone)
            medha.bring_checkpoint(alone, folder / node.name)
        define(running)
        medha.apply(running, spread(node_lost_seconds=600))
        wait_ready(running)
        yield running


def spread(node_lost_seconds: float) -> Document:
    """The example, half of it on each node if there is room."""
    document = medha.tiny(lifecycle={"restart": {"nodeLostSeconds": node_lost_seconds}})
    del document["spec"]["routerRef"]
    document["spec"]["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"medha.dev/replica": "tiny"}},
        }
    ]
    return document


def wait_ready(cluster: Cluster) -> None:
    cluster.kubectl("wait", "medhareplica/tiny", "--for=condition=Ready", f"--timeout={READY_SECONDS:.0f}s")


def places(cluster: Cluster) -> dict[str, str]:
    """Node of each pod."""
    pods = medha.get(cluster, "pods", "-l", "medha.dev/replica=tiny")["items"]
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods}


def far_node(cluster: Cluster) -> Node:
    """The node that the replica's controller is not on."""
    where = places(cluster)
    (found,) = (node for node in cluster.nodes if node.name != where["tiny-l0-0"])
    assert found.name in where.values()
    return found


def reported_soon(cluster: Cluster, node: Node, lost: float) -> None:
    """Wait until the replica says that the node, lost at that Unix time, is lost, and soon after Kubernetes does."""

    def degraded() -> dict[str, str]:
        return _condition(medha.get(cluster, "medhareplica", "tiny"), "Degraded")

    notice = eventually(degraded, lambda seen: seen["reason"] == "NodeUnreachable", 2 * NOTICE_SECONDS)
    assert notice["status"] == "True"
    noticed = _condition(medha.get(cluster, "node", node.name), "Ready")
    assert noticed["status"] == "Unknown"
    times = [seconds(entry["lastTransitionTime"]) for entry in (noticed, notice)]
    assert times[1] - times[0] <= TOLD_SECONDS
    assert times[1] - lost <= NOTICE_SECONDS


def _condition(resource: Document, kind: str) -> dict[str, str]:
    (found,) = (entry for entry in resource["status"]["conditions"] if entry["type"] == kind)
    return dict(found)


def test_a_kubelet_that_comes_back_within_the_limit_costs_no_pod(cluster: Cluster) -> None:
    before, node = medha.pod_uids(cluster), far_node(cluster)
    lost = datetime.now(UTC).timestamp()
    node.stop_kubelet()
    reported_soon(cluster, node, lost)
    node.start_kubelet()
    node.wait_until_ready()
    wait_ready(cluster)
    eventually(
        lambda: condition(medha.get(cluster, "medhareplica", "tiny"), "Degraded")[0],
        lambda status: status == "False",
        READY_SECONDS,
    )
    assert medha.pod_uids(cluster) == before


def test_the_pods_of_a_frozen_node_are_replaced_and_its_old_ranks_are_refused_when_it_thaws(
    cluster: Cluster,
) -> None:
    before, node = medha.pod_uids(cluster), far_node(cluster)
    medha.apply(cluster, spread(node_lost_seconds=10))
    lost = datetime.now(UTC).timestamp()
    node.freeze()
    reported_soon(cluster, node, lost)
    eventually(lambda: set(medha.pod_uids(cluster).values()).isdisjoint(before.values()), bool, READY_SECONDS)
    wait_ready(cluster)
    assert node.name not in places(cluster).values()

    after = medha.pod_uids(cluster)
    assert sorted(after) == sorted(before)
    node.thaw(with_kubelet=False)  # which would end the old ranks before they are heard of
    eventually(
        lambda: cluster.kubectl("logs", "tiny-l0-0"), lambda log: "is not admitted" in log, READY_SECONDS
    )
    node.start_kubelet()
    node.wait_until_ready()
    assert condition(medha.get(cluster, "medhareplica", "tiny")) == ("True", "Serving")
    assert medha.pod_uids(cluster) == after
