"""Two real nodes: pods of one reach those of the other, and a node that is frozen is silent until it is thawed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.conftest import hello_image, skipping_what_cannot_run
from cluster.nodes import Cluster, two_nodes
from cluster.test_nodes import deployed

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pair")
    with skipping_what_cannot_run(), two_nodes(folder, [hello_image(folder)]) as running:
        yield running


def pods(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """By node; there is one on each."""
    items = json.loads(cluster.kubectl("get", "pods", "-l", "app=hello", "-o", "json"))["items"]
    return {pod["spec"]["nodeName"]: pod for pod in items}


def test_a_pod_reaches_the_other_nodes_pod_and_a_frozen_node_is_silent_until_it_is_thawed(
    pair: Cluster,
) -> None:
    objects = json.loads(deployed("hello", 2))
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "hello"}},
    }
    objects["items"][0]["spec"]["template"]["spec"]["topologySpreadConstraints"] = [spread]
    pair.kubectl("apply", "-f", "-", stdin=json.dumps(objects))
    pair.kubectl("rollout", "status", "deployment/hello", "--timeout=60s")
    first, second = pods(pair)["node-1"], pods(pair)["node-2"]

    def asked() -> str:
        url = f"http://{second['status']['podIP']}:8080"
        return pair.kubectl("exec", first["metadata"]["name"], "--", "/hello", "get", url, check=False)

    assert asked() == second["metadata"]["name"]
    pair.nodes[1].freeze()
    assert "Client.Timeout" in asked()
    pair.nodes[1].thaw()
    assert asked() == second["metadata"]["name"]
    assert pods(pair)["node-2"]["metadata"]["uid"] == second["metadata"]["uid"]
