"""Simulated nodes: KWOK acts for them, and pods on them become Ready without running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.binaries import build
from cluster.control_plane import ControlPlane, free_port

_SELECTOR = "type=kwok"


@contextmanager
def with_kwok(plane: ControlPlane, nodes: int, gpus: int = 64) -> Iterator[list[str]]:
    """Create `nodes` Ready nodes of `gpus` GPUs each, and yield their names.

    The cluster needs controllers and a scheduler. Pods are placed there by the node selector `type: kwok` and
    need no tolerations. The nodes remain after the block, but nothing acts for them any more.

    Raises:
        CannotBuild: KWOK is missing.
        NotStarted: KWOK ended, or the nodes did not become Ready in time.
    """
    plane.programs.update(build(["kwok"]))
    names = [f"kwok-{index}" for index in range(nodes)]
    listed = {"apiVersion": "v1", "kind": "List", "items": [_node(name, gpus) for name in names]}
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))
    server = plane.start(
        "kwok",
        f"--kubeconfig={plane.keys.kubeconfig(plane.inner_url, 'kwok', 'system:masters')}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-label-selector={_SELECTOR}",
        f"--server-address=127.0.0.1:{free_port('127.0.0.1')}",
        "--node-lease-duration-seconds=200",  # renewing hundreds of leases would dominate the load
    )
    try:
        server.wait_until(lambda: _ready(plane) == nodes, f"made {nodes} nodes Ready")
        yield names
    finally:
        server.stop()


def add_node(plane: ControlPlane, name: str, gpus: int) -> None:
    """Add a node while KWOK runs."""
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(_node(name, gpus)))


def _node(name: str, gpus: int) -> dict[str, Any]:
    amounts = {"cpu": "192", "memory": "2Ti", "pods": "1000", "nvidia.com/gpu": str(gpus)}
    labels = {"type": "kwok", "kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"node.alpha.kubernetes.io/ttl": "0", "kwok.x-k8s.io/node": "fake"},
        },
        "status": {"allocatable": amounts, "capacity": amounts},
    }


def _ready(plane: ControlPlane) -> int:
    path = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
    said = plane.kubectl("get", "nodes", f"--selector={_SELECTOR}", "-o", f"jsonpath={path}", check=False)
    return said.split().count("True")
