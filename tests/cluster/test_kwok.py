"""KWOK's nodes take pods as real ones would, as many as their GPUs allow, without running them."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.conftest import skipping_what_cannot_run
from cluster.control_plane import control_plane
from cluster.kwok import with_kwok


def test_pods_become_ready_on_nodes_that_only_seem_to_be_until_their_gpus_are_taken(tmp_path: Path) -> None:
    labels = {"app": "fake"}
    container = {"name": "c", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    pods = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "fake"},
        "spec": {
            "replicas": 5,
            "podManagementPolicy": "Parallel",
            "serviceName": "fake",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"nodeSelector": {"type": "kwok"}, "containers": [container]},
            },
        },
    }
    with (
        skipping_what_cannot_run(),
        control_plane(tmp_path) as plane,
        with_kwok(plane, nodes=2, gpus=8) as nodes,
    ):
        plane.kubectl("apply", "-f", "-", stdin=json.dumps(pods))
        plane.kubectl("wait", "sts/fake", "--for=jsonpath={.status.readyReplicas}=4", "--timeout=30s")
        found = json.loads(plane.kubectl("get", "pods", "-o", "json"))["items"]
        placed = sorted(pod["spec"].get("nodeName", "") for pod in found)
        assert placed == ["", nodes[0], nodes[0], nodes[1], nodes[1]]
