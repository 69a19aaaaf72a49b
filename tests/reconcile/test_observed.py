"""Facts from the documents of pods and nodes: capacity, volumes, image, model, crash, rendezvous."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from medha_operator.replica.observed import Node, any_report_since, node_of, pod_of


def pod(**status: Any) -> dict[str, Any]:
    metadata = {
        "name": "r-l0-0",
        "uid": "u",
        "resourceVersion": "1",
        "creationTimestamp": "2030-01-01T00:00:00Z",
        "labels": {"medha.dev/lane": "0", "medha.dev/revision": "abc"},
    }
    return {"metadata": metadata, "spec": {}, "status": status}


def unscheduled(message: str, reason: str = "Unschedulable") -> dict[str, Any]:
    entry = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    return pod(conditions=[entry])


def worker(**entry: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "worker"} | entry])


def crashed(code: int, message: str = "") -> dict[str, Any]:
    return {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": code, "reason": "Error", "message": message}},
    }


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."), "InsufficientCapacity"),
        (unscheduled('persistentvolumeclaim "weights" not found'), "VolumeUnavailable"),
        (unscheduled("", "SchedulingGated"), "WaitingForGang"),
        (unscheduled("waiting for minCount pods from a gang to appear"), "WaitingForGang"),
        (worker(state={"waiting": {"reason": "ImagePullBackOff"}}), "ImagePullFailed"),
        (worker(state={"waiting": {"reason": "CreateContainerConfigError"}}), "ContainerNotCreated"),
        (worker(**crashed(1)), "CrashLooping"),
        (worker(**crashed(75)), "RendezvousFailed"),
        (worker(**crashed(69)), "NoAccelerator"),
        (pod(initContainerStatuses=[{"name": "fetch-model"} | crashed(1)]), "ModelFetchFailed"),
        (
            pod(
                initContainerStatuses=[{"name": "fetch-model", "state": {"terminated": {"exitCode": 1}}}],
                containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
            ),
            "ModelFetchFailed",
        ),
    ],
)
def test_each_trouble_has_a_reason_of_its_own(document: dict[str, Any], reason: str) -> None:
    found = pod_of(document).problem
    assert found is not None
    assert found[0] == reason


def test_a_pod_with_a_node_is_scheduled_whatever_the_scheduler_has_written_late() -> None:
    document = unscheduled("binding rejected", reason="SchedulerError")
    document["spec"]["nodeName"] = "n"
    found = pod_of(document)
    assert found.is_scheduled
    assert found.problem is None


WAITING = {"state": {"waiting": {"reason": "ContainerCreating"}}}
INITIALIZING = {"state": {"waiting": {"reason": "PodInitializing"}}}
RUNNING: dict[str, Any] = {"state": {"running": {}}}


def starting(
    worker: dict[str, Any], first: dict[str, Any] | None = None, set_up: str = "True", sidecar: bool = False
) -> dict[str, Any]:
    """Return a pod that has a node, with the state of its worker and of an init container."""
    states = [("PodScheduled", "True"), ("PodReadyToStartContainers", set_up)]
    document = pod(
        conditions=[{"type": kind, "status": status} for kind, status in states],
        containerStatuses=[{"name": "worker"} | worker],
        initContainerStatuses=[] if first is None else [{"name": "first"} | first],
    )
    policy = {"restartPolicy": "Always"} if sidecar else {}
    return document | {"spec": {"initContainers": [{"name": "first"} | policy]}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            starting(WAITING, set_up="False"),
            "volumes or its network",
        ),  # or a Secret that it mounts is missing
        (starting(INITIALIZING, INITIALIZING, set_up="False"), "volumes or its network"),
        (starting(INITIALIZING, INITIALIZING), "container first is not created yet"),
        (starting(WAITING), "container worker is not created yet"),
        (starting(WAITING, RUNNING, sidecar=True), "container worker is not created yet"),
    ],
)
def test_containers_that_a_kubelet_does_not_start_point_at_the_events(
    document: dict[str, Any], words: str
) -> None:
    found = pod_of(document).problem
    assert found is not None
    assert found[0] == "StartingContainers"
    assert words in found[1]
    assert "events" in found[1]


@pytest.mark.parametrize("document", [starting(RUNNING), starting(INITIALIZING, RUNNING)])
def test_a_pod_whose_containers_run_has_started_them(document: dict[str, Any]) -> None:
    assert pod_of(document).problem is None


@pytest.mark.parametrize("is_sidecar", [True, False])
def test_a_sidecar_beside_the_worker_fetches_no_model(is_sidecar: bool) -> None:
    assert pod_of(starting(RUNNING, RUNNING, sidecar=is_sidecar)).is_fetching is not is_sidecar


def test_a_sidecar_that_crashes_is_no_model_that_cannot_be_fetched() -> None:
    found = pod_of(starting(RUNNING, crashed(1), sidecar=True)).problem
    assert found is not None
    assert found[0] == "CrashLooping"


def test_the_last_output_of_a_crash_is_reported() -> None:
    found = pod_of(worker(**crashed(1, "no such\n file"))).problem
    assert found == ("CrashLooping", "container worker: ended with exit code 1 (Error): no such file")


@pytest.mark.parametrize(
    "entry",
    [
        {"state": {"terminated": {"exitCode": 69, "reason": "Error", "message": "no GPU"}}},
        {"lastState": {"terminated": {"exitCode": 69, "reason": "Error", "message": "no GPU"}}, **RUNNING},
        crashed(69, "no GPU"),
    ],
)
def test_a_worker_that_has_found_no_accelerator_is_told_by_that_until_it_starts(
    entry: dict[str, Any],
) -> None:
    expected = ("NoAccelerator", "container worker: ended with exit code 69 (Error): no GPU")
    assert pod_of(worker(**entry)).problem == expected
    assert pod_of(worker(**entry | RUNNING | {"started": True})).problem is None


def test_a_sidecar_that_ends_with_that_status_has_another_reason() -> None:
    found = pod_of(pod(containerStatuses=[{"name": "proxy"} | crashed(69)])).problem
    assert found is not None
    assert found[0] == "CrashLooping"


def test_a_long_message_is_quoted_from_its_end() -> None:
    found = pod_of(worker(**crashed(1, "x" * 1000 + " the fix"))).problem
    assert found is not None
    assert found[1].endswith("x the fix")
    assert len(found[1]) < 600


def test_a_member_asks_for_a_restart_until_it_has_come_up_again_by_itself() -> None:
    ended = {"lastState": {"terminated": {"exitCode": 75}}}
    assert pod_of(worker(state={"terminated": {"exitCode": 75}}, started=False)).requests_restart
    assert pod_of(worker(state={"running": {}}, started=False, **ended)).requests_restart
    assert not pod_of(worker(state={"running": {}}, started=True, **ended)).requests_restart
    assert not pod_of(worker(state={"terminated": {"exitCode": 1}}, started=False)).requests_restart


@pytest.mark.parametrize(("grace", "has_finalizer"), [(600, False), (0, True)])
def test_a_pod_that_is_there_though_it_was_deleted_without_grace_is_held(
    grace: int, has_finalizer: bool
) -> None:
    document = pod()
    document["metadata"] |= {
        "deletionTimestamp": "2030-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": grace,
    }
    found = pod_of(document)
    assert (found.is_deleting, found.has_finalizer) == (True, has_finalizer)
    assert not pod_of(pod()).has_finalizer


CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
KARPENTER = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
AUTOSCALER = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
SINCE = 1893456000.0  # 2030-01-01T00:00:00Z


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, Node()),
        ({"unschedulable": True}, Node(cordoned=True)),
        (
            {"unschedulable": True, "taints": [CORDON | {"timeAdded": "2030-01-01T00:00:00Z"}]},
            Node(cordoned=True, cordoned_since=SINCE),
        ),
        ({"taints": [CORDON | {"timeAdded": "2030-01-01T00:00:00Z"}]}, Node()),  # just uncordoned
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, Node()),
        ({"taints": [KARPENTER]}, Node(cordoned=True)),
        ({"taints": [AUTOSCALER]}, Node(cordoned=True)),
        ({"taints": [AUTOSCALER | {"value": "1893456000"}]}, Node(cordoned=True, cordoned_since=SINCE)),
        (
            {
                "unschedulable": True,
                "taints": [
                    CORDON | {"timeAdded": "2030-01-01T00:00:00Z"},
                    AUTOSCALER | {"value": "1893456060"},
                ],
            },
            Node(cordoned=True, cordoned_since=SINCE + 60),
        ),
    ],
)
def test_a_node_is_to_be_emptied_by_people_and_by_autoscalers(spec: dict[str, Any], expected: Node) -> None:
    assert replace(node_of({"spec": spec}), taints=()) == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Unknown", Node(unreachable_since=SINCE)),
        ("True", Node(reporting_since=SINCE, is_ready=True)),
        ("False", Node(reporting_since=SINCE)),  # not ready, but its kubelet says so
    ],
)
def test_a_node_whose_kubelet_does_not_report_is_unknown(status: str, expected: Node) -> None:
    ready = {"type": "Ready", "status": status, "lastTransitionTime": "2030-01-01T00:00:00Z"}
    assert node_of({"status": {"conditions": [ready]}}) == expected


def test_some_node_reports_since_the_first_of_those_that_do() -> None:
    silent = Node(unreachable_since=SINCE)
    assert (
        any_report_since([Node(reporting_since=SINCE + 60), silent, Node(reporting_since=SINCE + 5)])
        == SINCE + 5
    )
    assert any_report_since([silent, Node()]) is None


@pytest.mark.parametrize(
    ("toleration", "expected"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}, True),
        ({"key": "karpenter.sh/disrupted", "operator": "Exists"}, True),
        ({"key": "nvidia.com/gpu", "operator": "Exists"}, False),
    ],
)
def test_a_pod_may_tolerate_that_its_node_is_emptied(toleration: dict[str, str], expected: bool) -> None:
    assert pod_of(pod() | {"spec": {"tolerations": [toleration]}}).tolerates_emptying is expected
