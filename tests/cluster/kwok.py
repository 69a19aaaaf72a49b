"""Nodes that only seem to be: KWOK answers for them, and pods on them become Ready without running."""

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
    """Names of `nodes` Ready nodes of `gpus` GPUs each, in a cluster with controllers and a scheduler.

    Pods go there by the node selector `type: kwok` and tolerate nothing in particular. They stay when this ends, and
    nobody answers for them.

    Raises:
        CannotBuild: KWOK is missing.
        NotStarted: it ended, or the nodes have not become Ready.
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
        "--node-lease-duration-seconds=200",  # renewals of hundreds of leases would be most of the load
    )
    try:
        server.wait_until(lambda: _ready(plane) == nodes, f"made {nodes} nodes Ready")
        yield names
    finally:
        server.stop()


def add_node(plane: ControlPlane, name: str, gpus: int) -> None:
    """One more node, while KWOK runs."""
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
