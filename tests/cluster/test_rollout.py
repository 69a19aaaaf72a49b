"""A deployment on a cluster with a scheduler and KWOK's nodes: changed, drained, and without room, it goes on serving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.api import Api, Document, condition, eventually
from cluster.conftest import skipping_what_cannot_run
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import define
from cluster.kwok import add_node, with_kwok
from cluster.operator_process import operator
from medha_operator.kube.kinds import DEPLOYMENT, POD, REPLICA
from medha_operator.replica.gang_restarts import EVICTION_SECONDS
from medha_operator.replica.nodes import SETTLE_SECONDS

_SECONDS = 60.0


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Four nodes of four GPUs, room for four replicas, and an operator that waits two seconds for room."""
    folder = tmp_path_factory.mktemp("rollout")
    with (
        skipping_what_cannot_run(),
        control_plane(folder, before_controllers=define) as plane,
        with_kwok(plane, nodes=4, gpus=4),
        operator(folder, plane.kubeconfig, surge_wait_seconds=2.0),
    ):
        yield plane


@pytest.fixture
def api(plane: ControlPlane) -> Iterator[Api]:
    with Api(plane) as client:
        yield client


def apply(api: Api, **changes: object) -> None:
    """Two replicas of two pods of two GPUs."""
    template = {
        "model": {"name": "m", "source": {"path": "checkpoint"}},
        "parallelism": {"tensor": 2, "stream": 2},
        "template": {"spec": {"nodeSelector": {"type": "kwok"}}},
    }
    api.apply(
        {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaDeployment",
            "metadata": {"name": "chat", "namespace": "default"},
            "spec": {"replicas": 2, "template": {"spec": template | changes}},
        }
    )


def complete(api: Api) -> Document:
    found = eventually(
        lambda: api.get(DEPLOYMENT, "chat"),
        lambda seen: (
            seen is not None
            and condition(seen) == ("True", "Complete")
            and seen["status"]["observedGeneration"] == seen["metadata"]["generation"]
        ),
        _SECONDS,
    )
    assert found is not None
    return found


def serving(api: Api) -> int:
    """Replicas all of whose pods are ready, and of one revision."""
    pods: dict[str, list[Document]] = {}
    for pod in api.list(POD, "default", "medha.dev/replica"):
        pods.setdefault(pod["metadata"]["labels"]["medha.dev/replica"], []).append(pod)
    return sum(
        len(members) == 2
        and len({one["metadata"]["labels"]["medha.dev/revision"] for one in members}) == 1
        and all("deletionTimestamp" not in one["metadata"] for one in members)
        and all(
            entry["status"] == "True"
            for one in members
            for entry in one.get("status", {}).get("conditions", [{"type": "Ready", "status": "False"}])
            if entry["type"] == "Ready"
        )
        for members in pods.values()
    )


@contextmanager
def least_serving(api: Api) -> Iterator[list[int]]:
    """How many replicas served at each of many moments of the block."""
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            seen.append(serving(api))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def test_a_new_revision_reaches_all_replicas_while_two_serve(api: Api) -> None:
    apply(api)
    complete(api)
    before = {pod["metadata"]["uid"] for pod in api.list(POD, "default")}
    with least_serving(api) as seen:
        apply(api, kvCache={"size": "1Gi"})
        found = complete(api)
    assert min(seen) >= 2
    assert sorted(one["metadata"]["name"] for one in api.list(REPLICA)) == ["chat-0", "chat-1"]
    assert found["status"]["updatedReplicas"] == 2
    assert found["status"]["currentRevision"] == found["status"]["updateRevision"]
    eventually(  # what HPA and KEDA count, once the garbage collector has taken those that stood in
        lambda: len(api.list(POD, "default", found["status"]["selector"])), lambda count: count == 2, _SECONDS
    )
    assert not before & {pod["metadata"]["uid"] for pod in api.list(POD, "default")}


def test_kopf_writes_nothing_to_a_deployment_and_the_operator_only_its_status(api: Api) -> None:
    apply(api)
    metadata = complete(api)["metadata"]
    fields = {(entry["manager"], entry.get("subresource", "")) for entry in metadata["managedFields"]}
    assert fields == {("user", ""), ("medha-operator", "status")}
    assert "finalizers" not in metadata
    assert "annotations" not in metadata


@pytest.mark.long
def test_draining_a_node_ends_and_two_serve_meanwhile(plane: ControlPlane, api: Api) -> None:
    apply(api)
    complete(api)
    node = api.list(POD, "default", "medha.dev/replica=chat-0")[0]["spec"]["nodeName"]
    with least_serving(api) as seen:
        said = plane.kubectl(
            *("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--timeout={_SECONDS:.0f}s")
        )
        complete(api)
    plane.kubectl("uncordon", node)
    assert f"node/{node} drained" in said
    assert min(seen) >= 2
    assert all(pod["spec"]["nodeName"] != node for pod in api.list(POD, "default"))
    assert len(api.list(REPLICA)) == 2
    assert all(one["status"]["restarts"] == 0 for one in api.list(REPLICA))


def test_without_room_it_waits_with_a_reason_and_goes_on_when_there_is_room(
    plane: ControlPlane, api: Api
) -> None:
    apply(api)
    complete(api)
    used = {pod["spec"]["nodeName"] for pod in api.list(POD, "default")}
    for index in range(4):
        plane.kubectl("taint", "node", f"kwok-{index}", "full=1:NoSchedule")
    assert used
    with least_serving(api) as seen:
        apply(api, kvCache={"size": "2Gi"})
        eventually(
            lambda: condition(api.get(DEPLOYMENT, "chat"), "Stalled"),
            lambda stalled: stalled == ("True", "SurgeUnschedulable"),
            _SECONDS,
        )
        assert "raise rollout.maxUnavailable" in plane.kubectl("get", "md", "chat", "-o", "yaml")
    assert min(seen) >= 2
    for index in range(4):
        plane.kubectl("taint", "node", f"kwok-{index}", "full=1:NoSchedule-")
    complete(api)
    assert condition(api.get(DEPLOYMENT, "chat"), "Stalled") == ("False", "Complete")


def lone(api: Api, name: str, **pod: object) -> None:
    """A replica of one pod that asks for no GPU."""
    spec = {
        "model": {"name": "m", "source": {"path": "checkpoint"}},
        "resources": {"accelerator": "none"},
        "template": {"spec": pod},
    }
    metadata = {"name": name, "namespace": "default"}
    api.apply(
        {"apiVersion": "medha.dev/v1alpha1", "kind": "MedhaReplica", "metadata": metadata, "spec": spec}
    )
    eventually(lambda: derived(api, name, "Ready"), lambda ready: ready == ("True", "Serving"), _SECONDS)


def derived(api: Api, name: str, kind: str) -> tuple[str, str]:
    return condition(api.get(REPLICA, name), kind)


def uids(api: Api, name: str) -> set[str]:
    return {one["metadata"]["uid"] for one in api.list(POD, "default", f"medha.dev/replica={name}")}


@contextmanager
def cordoned(plane: ControlPlane, selector: str) -> Iterator[None]:
    plane.kubectl("cordon", "-l", selector)
    try:
        yield
    finally:
        plane.kubectl("uncordon", "-l", selector)


@pytest.mark.long
def test_with_all_nodes_cordoned_a_lone_replica_serves_on_and_a_drain_ends_once_a_node_is_added(
    plane: ControlPlane, api: Api
) -> None:
    """As in an upgrade that cordons every old node before it drains the first."""
    lone(api, "alone", nodeSelector={"type": "kwok"})
    before = uids(api, "alone")
    node = api.list(POD, "default", "medha.dev/replica=alone")[0]["spec"]["nodeName"]
    drain = ("drain", node, "--pod-selector=medha.dev/replica=alone", "--delete-emptydir-data")
    with cordoned(plane, "type=kwok"):
        # Longer than it takes to look for room, and than evictors are waited for, after which the replica would be ended.
        said = plane.kubectl(*drain, f"--timeout={SETTLE_SECONDS + EVICTION_SECONDS + 10:.0f}s", check=False)
        assert "Cannot evict pod as it would violate the pod's disruption budget" in said
        assert uids(api, "alone") == before
        assert derived(api, "alone", "Draining") == ("True", "NodeCordoned")
        assert derived(api, "alone", "Ready") == ("True", "Serving")
        add_node(plane, "kwok-new", gpus=4)
        said = plane.kubectl(*drain, f"--timeout={_SECONDS:.0f}s")
        assert f"node/{node} drained" in said
        eventually(lambda: uids(api, "alone"), lambda now: len(now) == 1 and not now & before, _SECONDS)
        eventually(
            lambda: derived(api, "alone", "Ready"), lambda ready: ready == ("True", "Serving"), _SECONDS
        )
    (moved,) = api.list(POD, "default", "medha.dev/replica=alone")
    assert moved["spec"]["nodeName"] == "kwok-new"
    found = api.get(REPLICA, "alone")
    assert found is not None
    assert found["status"]["restarts"] == 0
    plane.kubectl("delete", "mr", "alone")
    plane.kubectl("delete", "node", "kwok-new")


@pytest.mark.long
def test_a_pod_that_could_only_come_back_to_its_cordoned_node_is_left_there(
    plane: ControlPlane, api: Api
) -> None:
    """Though it tolerates the cordon: there is no other node for it."""
    node = "kubernetes.io/hostname=kwok-0"
    lone(
        api, "bound", nodeSelector={"kubernetes.io/hostname": "kwok-0"}, tolerations=[{"operator": "Exists"}]
    )
    before = uids(api, "bound")
    with cordoned(plane, node):
        eventually(
            lambda: derived(api, "bound", "Draining"),
            lambda found: found == ("True", "NodeCordoned"),
            _SECONDS,
        )
        assert uids(api, "bound") == before
        assert plane.kubectl("get", "pdb", "bound", "-o", "jsonpath={.spec.maxUnavailable}") == "0"
    eventually(
        lambda: derived(api, "bound", "Draining"), lambda found: found == ("False", "NotDraining"), _SECONDS
    )
    assert uids(api, "bound") == before
    plane.kubectl("delete", "mr", "bound")
