"""The scheduler's own gangs (alpha in Kubernetes 1.35), for real: all pods of a replica find nodes, or none does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.binaries import CannotBuild
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import define
from cluster.operator_process import operator

GATES = ("GenericWorkload=true", "GangScheduling=true")
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A whole control plane whose scheduler knows gangs, and an operator that may use them."""
    try:
        with (
            control_plane(
                tmp_path_factory.mktemp("gang"),
                gates=GATES,
                runtime_config=["scheduling.k8s.io/v1alpha1=true"],
                # Nobody renews the leases of the nodes: they must not be lost before a slow machine is done.
                controller_flags=["--node-monitor-grace-period=600s"],
                before_controllers=define,
            ) as plane,
            operator(plane.folder, plane.kubeconfig, gang_apis=["core"]),
        ):
            yield plane
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kubernetes API server: {error}")


def add_node(plane: ControlPlane, name: str, cpu: int) -> None:
    """A node that nobody runs: pods are bound to it and never start."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"room": name}}}
    plane.kubectl("create", "-f", "-", stdin=json.dumps(node))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    capacity = {"cpu": str(cpu), "memory": "64Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": now}
    status = {
        "capacity": capacity,
        "allocatable": capacity,
        "conditions": [ready | {"lastTransitionTime": now}],
    }
    patch = json.dumps({"status": status})
    plane.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
    # Every node begins with it; the lifecycle controller is slower to take it away.
    plane.kubectl("taint", "node", name, "node.kubernetes.io/not-ready:NoSchedule-", check=False)


def apply(plane: ControlPlane, name: str, gang: str) -> None:
    document = {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "m", "source": {"path": "checkpoint"}},
            "parallelism": {"stream": 2, "kv": 2},
            "resources": {"accelerator": "none", "requests": {"cpu": "2"}},
            "placement": {"gang": gang},
        },
    }
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(document))


def nodes_of(plane: ControlPlane, name: str) -> list[str]:
    """Node of each pod of the replica; empty where it has none."""
    listed = json.loads(plane.kubectl("get", "pods", "-l", f"medha.dev/replica={name}", "-o", "json"))
    return [pod["spec"].get("nodeName", "") for pod in listed["items"]]


def condition(plane: ControlPlane, name: str, kind: str) -> tuple[str, str]:
    found: dict[str, Any] = json.loads(plane.kubectl("get", "mr", name, "-o", "json"))
    for entry in found.get("status", {}).get("conditions", ()):
        if entry["type"] == kind:
            return entry["status"], entry["reason"]
    return "", ""


def remove(plane: ControlPlane, name: str) -> None:
    """Delete the replica, and its pods in the place of the kubelets that are not there."""
    plane.kubectl("delete", "mr", name)
    pods = ("pods", "-l", f"medha.dev/replica={name}")

    def are_gone() -> bool:
        plane.kubectl("delete", *pods, "--force", "--grace-period=0")
        return not nodes_of(plane, name)

    eventually(are_gone, lambda: plane.kubectl("get", *pods))


def eventually(holds: Callable[[], bool], seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.2)


def test_half_a_replica_is_never_placed_and_the_whole_is_once_it_fits(scheduled: ControlPlane) -> None:
    add_node(scheduled, "half", cpu=5)  # two of four pods of two cores
    apply(scheduled, "alone", "none")
    eventually(
        lambda: sorted(nodes_of(scheduled, "alone")) == ["", "", "half", "half"],
        lambda: nodes_of(scheduled, "alone"),
    )
    eventually(
        lambda: condition(scheduled, "alone", "Scheduled") == ("False", "InsufficientCapacity"),
        lambda: scheduled.kubectl("get", "mr", "alone", "-o", "yaml"),
    )
    remove(scheduled, "alone")

    apply(scheduled, "whole", "core")
    eventually(
        lambda: condition(scheduled, "whole", "Scheduled")[1] in ("InsufficientCapacity", "WaitingForGang"),
        lambda: scheduled.kubectl("get", "mr,pods,workloads", "-o", "yaml"),
    )
    assert nodes_of(scheduled, "whole") == ["", "", "", ""]
    (workload,) = json.loads(scheduled.kubectl("get", "workloads", "-o", "json"))["items"]
    assert workload["spec"]["podGroups"][0]["policy"]["gang"]["minCount"] == 4

    add_node(scheduled, "other", cpu=5)
    eventually(
        lambda: sorted(nodes_of(scheduled, "whole")) == ["half", "half", "other", "other"],
        lambda: scheduled.kubectl("get", "pods", "-o", "yaml"),
    )
    remove(scheduled, "whole")
    eventually(
        lambda: "No resources found" in scheduled.kubectl("get", "workloads"),
        lambda: scheduled.kubectl("get", "workloads"),
    )


def test_a_gang_that_the_installation_does_not_name_is_reported_and_nothing_is_made(
    scheduled: ControlPlane,
) -> None:
    apply(scheduled, "unnamed", "volcano")
    eventually(
        lambda: condition(scheduled, "unnamed", "Stalled") == ("True", "GangUnavailable"),
        lambda: scheduled.kubectl("get", "mr", "unnamed", "-o", "yaml"),
    )
    assert nodes_of(scheduled, "unnamed") == []
    scheduled.kubectl("delete", "mr", "unnamed")
