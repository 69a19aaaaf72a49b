"""A replica over two real nodes, one of which is lost: said within a minute, replaced after the limit, refused later.

The tests share one cluster and go on where the one before has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster import images, medha
from cluster.api import condition, eventually
from cluster.conftest import CRDS, skipping_what_cannot_run
from cluster.medha import Document
from cluster.node import Node
from cluster.nodes import Cluster, two_nodes
from cluster.operator_process import operator

pytestmark = pytest.mark.timeout(400)

READY_SECONDS = 120.0
TOLD_SECONDS = 60.0
"""From the loss of a node to the word of it; Kubernetes itself takes 40 to 50 s to notice."""
UNREACHABLE = ("True", "NodeUnreachable")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with the worker's image, torch and a checkpoint, the operator on neither, and a replica on both."""
    folder = tmp_path_factory.mktemp("lost-node")
    with skipping_what_cannot_run():
        archive = images.build(["worker"])["worker"]
    with (
        skipping_what_cannot_run(),
        two_nodes(folder, [archive]) as running,
        operator(folder, running.kubeconfig, image_pull_policy="Never"),
    ):
        for node in running.nodes:
            alone = replace(running, nodes=[node])
            medha.bring_torch(alone)
            medha.bring_checkpoint(alone, folder / node.name)
        running.kubectl("apply", "--server-side", "-f", str(CRDS))
        running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
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


def degraded(cluster: Cluster) -> tuple[str, str]:
    return condition(medha.get(cluster, "medhareplica", "tiny"), "Degraded")


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


def said_within_limit(cluster: Cluster, lost: float) -> None:
    eventually(lambda: degraded(cluster), lambda seen: seen == UNREACHABLE, TOLD_SECONDS + 30)
    assert time.monotonic() - lost <= TOLD_SECONDS  # a promise to users: not of this machine's speed


def test_a_kubelet_that_comes_back_within_the_limit_costs_no_pod(cluster: Cluster) -> None:
    before, node = medha.pod_uids(cluster), far_node(cluster)
    lost = time.monotonic()
    node.stop_kubelet()
    said_within_limit(cluster, lost)
    node.start_kubelet()
    node.wait_until_ready()
    wait_ready(cluster)
    eventually(lambda: degraded(cluster), lambda seen: seen[0] == "False", READY_SECONDS)
    assert medha.pod_uids(cluster) == before


def test_the_pods_of_a_frozen_node_are_replaced_and_its_old_ranks_are_refused_when_it_thaws(
    cluster: Cluster,
) -> None:
    before, node = medha.pod_uids(cluster), far_node(cluster)
    medha.apply(cluster, spread(node_lost_seconds=10))
    lost = time.monotonic()
    node.freeze()
    said_within_limit(cluster, lost)
    eventually(lambda: set(medha.pod_uids(cluster).values()).isdisjoint(before.values()), bool, READY_SECONDS)
    wait_ready(cluster)
    assert node.name not in places(cluster).values()

    after = medha.pod_uids(cluster)
    assert sorted(after) == sorted(before)
    node.thaw(with_kubelet=False)  # which would end the old ranks before they are heard of
    eventually(
        lambda: cluster.kubectl("logs", "tiny-l0-0"), lambda log: "is not let in" in log, READY_SECONDS
    )
    node.start_kubelet()
    node.wait_until_ready()
    assert condition(medha.get(cluster, "medhareplica", "tiny")) == ("True", "Serving")
    assert medha.pod_uids(cluster) == after
