"""Promises of the operator, each tested by a short run on a real API server; defective operators fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from campaign.proxy import Call, Fault, FaultyProxy
from cluster.api import Api, Document, PlayedKubelets, condition, eventually
from cluster.operator_process import Operator, operator
from medha_operator.kube.kinds import CHILDREN, DEPLOYMENT, KINDS, POD, REPLICA

_SERVICE = KINDS["Service"]
_SECONDS = 20.0
_COLLECTED_SECONDS = 120.0
"""Seconds within which owned objects are collected: the garbage collector discovers new kinds every 30 s, and
retries failures with increasing delays."""
SPEC: Document = {
    "model": {"name": "m", "source": {"path": "checkpoint"}},
    "parallelism": {"stream": 2, "kv": 2},
    "resources": {"accelerator": "none"},
}


@dataclass
class Ground:
    """The environment in which a promise is tested: its own namespace, with an operator for that alone."""

    api: Api
    proxy: FaultyProxy
    kubelets: PlayedKubelets
    folder: Path
    namespace: str
    module: str

    @contextmanager
    def operator(self, name: str = "op", **settings: Any) -> Iterator[Operator]:
        settings = {"lease_namespace": self.namespace, "namespaces": [self.namespace]} | settings
        kubeconfig = self.proxy.kubeconfig(self.folder)
        with operator(self.folder, kubeconfig, name, module=self.module, **settings) as running:
            yield running

    def apply(self, kind: str = "MedhaReplica", **spec: Any) -> None:
        head = {"apiVersion": REPLICA.api_version, "kind": kind}
        self.api.apply(head | {"metadata": {"name": "r", "namespace": self.namespace}, "spec": spec})

    def ready(self, kind: str = "MedhaReplica") -> Document:
        """Return the resource once it is ready for its present spec; AssertionError on timeout."""
        found = eventually(
            lambda: self.api.get(KINDS[kind], "r", self.namespace),
            lambda seen: (
                seen is not None
                and condition(seen)[0] == "True"
                and seen["status"]["observedGeneration"] == seen["metadata"]["generation"]
            ),
            _SECONDS,
        )
        assert found is not None
        return found

    def pods(self) -> dict[str, Document]:
        return {pod["metadata"]["name"]: pod for pod in self.api.list(POD, self.namespace)}

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def children(self) -> set[str]:
        """Return the names of the created objects, without the revision history."""
        return {name for name in self._made() if not name.startswith("ControllerRevision")}

    def lasting(self) -> dict[str, str]:
        """Return the UIDs of the objects that a replica keeps through every revision with the same lanes."""
        kinds = ("Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet")
        return {name: one["metadata"]["uid"] for name, one in self._made().items() if name.startswith(kinds)}

    def orphans(self) -> set[str]:
        """Return the names of created objects without an owner, which would never be collected."""
        return {name for name, one in self._made().items() if not one["metadata"].get("ownerReferences")}

    def _made(self) -> dict[str, Document]:
        return {
            f"{kind.name} {one['metadata']['name']}": one
            for kind in CHILDREN
            for one in self.api.list(kind, self.namespace, "app.kubernetes.io/managed-by=medha-operator")
        }


def a_deleted_replica_leaves_nothing(ground: Ground) -> None:
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        assert ground.orphans() == set()
        ground.api.delete(REPLICA, "r", ground.namespace)
        eventually(
            lambda: ground.children() | ground.pods().keys(), lambda left: not left, _COLLECTED_SECONDS
        )


def what_others_delete_comes_back(ground: Ground) -> None:
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        # An operator that has yet to read its own status reconciles for that, and restores the Service by chance.
        time.sleep(1.0)
        ground.api.delete(_SERVICE, "r", ground.namespace)
        eventually(lambda: ground.api.get(_SERVICE, "r", ground.namespace), bool, _SECONDS)


def an_upgrade_touches_no_pod(ground: Ground) -> None:
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        before, children = ground.uids(), ground.children()
    with ground.operator("newer", worker_image="medha-worker:newer"):
        ground.apply(**SPEC, scheduling={"policy": "edf"})  # makes sure that it has reconciled
        ground.ready()
        time.sleep(1.0)
        assert ground.uids() == before
        assert ground.children() == children


def a_revision_reaches_every_pod_and_a_revert_finds_its_children(ground: Ground) -> None:
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        before, children, lasting = ground.uids(), ground.children(), ground.lasting()
        assert len(lasting) == 5  # two lanes
        ground.apply(**SPEC, kvCache={"size": "1Gi"})
        ground.ready()
        between = ground.uids()
        assert not set(before.values()) & set(between.values())
        revisions = {pod["metadata"]["labels"]["medha.dev/revision"] for pod in ground.pods().values()}
        assert len(revisions) == 1
        assert ground.lasting() == lasting
        ground.apply(**SPEC)
        ground.ready()
        eventually(ground.children, lambda now: now == children, _SECONDS)
        assert ground.lasting() == lasting


def one_kill_makes_one_restart(ground: Ground) -> None:
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        before = ground.uids()
        time.sleep(1.1)  # timestamps count seconds: the successor must be younger
        ground.api.delete(POD, "r-l1-0", ground.namespace)
        after = eventually(
            ground.uids,
            lambda now: len(now) == 4 and not set(now.values()) & set(before.values()),
            _SECONDS,
        )
        found = ground.ready()
        time.sleep(1.5)
        assert ground.uids() == after
        assert found["status"]["restarts"] == 1


def a_pod_that_was_made_meanwhile_lives(ground: Ground) -> None:
    """A pod is replaced by another of its name between the operator's read and its delete."""
    fault = _ReplacedMeanwhile(ground)
    with ground.operator():
        ground.apply(**SPEC)
        ground.ready()
        time.sleep(1.1)
        ground.proxy.begin(fault)
        ground.api.delete(POD, "r-l1-1", ground.namespace)
        eventually(lambda: fault.successor, bool, _SECONDS)
        ground.ready()
        assert ground.uids()["r-l0-0"] == fault.successor


class _ReplacedMeanwhile(Fault):
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.successor = ""

    async def before_write(self, call: Call) -> tuple[int, str] | None:
        if call.method == "DELETE" and call.path.endswith("/pods/r-l0-0") and not self.successor:
            before = self._ground.uids()["r-l0-0"]
            self._ground.api.delete(POD, "r-l0-0", self._ground.namespace)
            uids = eventually(self._ground.uids, lambda now: now.get("r-l0-0", before) != before, _SECONDS)
            self.successor = uids["r-l0-0"]
        return None


def pods_that_never_all_started_are_left_alone(ground: Ground) -> None:
    ground.kubelets.held.add(ground.namespace)
    with ground.operator():
        ground.apply(**SPEC)
        before = eventually(ground.uids, lambda now: len(now) == 4, _SECONDS)
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
        container = {"name": "worker", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
        placed = [{"type": "PodScheduled", "status": "True"}]
        for name in before:
            status = {"conditions": placed, "containerStatuses": [container | {"state": waiting}]}
            ground.api.call("PATCH", POD.path(ground.namespace, name, "status"), {"status": status})
        found = eventually(
            lambda: ground.api.get(REPLICA, "r", ground.namespace),
            lambda seen: condition(seen)[1] == "ImagePullFailed" or ground.uids() != before,
            _SECONDS,
        )
        assert ground.uids() == before
        assert condition(found, "Stalled") == ("True", "ImagePullFailed")


def a_rollout_keeps_what_must_serve(ground: Ground) -> None:
    """At first no new pod starts, so that any pod taken down is noticed; then all pods start."""
    one = SPEC | {"parallelism": {"stream": 1, "kv": 1}}

    def serving() -> int:
        return sum(bool(pod.get("status", {}).get("containerStatuses")) for pod in ground.pods().values())

    with ground.operator():
        ground.apply("MedhaDeployment", replicas=2, template={"spec": one})
        ground.ready("MedhaDeployment")
        ground.kubelets.held.add(ground.namespace)
        ground.apply("MedhaDeployment", replicas=2, template={"spec": one | {"kvCache": {"size": "1Gi"}}})
        eventually(ground.uids, lambda now: "r-2-l0-0" in now, _SECONDS)
        time.sleep(2.0)
        assert serving() == 2
        ground.kubelets.held.discard(ground.namespace)
        deadline = time.monotonic() + _SECONDS
        while True:
            assert serving() >= 2
            found = ground.api.get(DEPLOYMENT, "r", ground.namespace)
            if (
                found is not None
                and found["status"]["observedGeneration"] == found["metadata"]["generation"]
                and condition(found)[0] == "True"
            ):
                break
            assert time.monotonic() < deadline, found


PROMISES: tuple[Callable[[Ground], None], ...] = (
    a_deleted_replica_leaves_nothing,
    what_others_delete_comes_back,
    an_upgrade_touches_no_pod,
    a_revision_reaches_every_pod_and_a_revert_finds_its_children,
    one_kill_makes_one_restart,
    a_pod_that_was_made_meanwhile_lives,
    pods_that_never_all_started_are_left_alone,
    a_rollout_keeps_what_must_serve,
)

BROKEN_BY: dict[str, Callable[[Ground], None]] = {
    # defective operator in `campaign.defective` -> the promise that it breaks
    "lost_owner": a_deleted_replica_leaves_nothing,
    "edge_triggered": what_others_delete_comes_back,
    "stale_read": what_others_delete_comes_back,
    "changing_name": an_upgrade_touches_no_pod,
    "new_rendering": an_upgrade_touches_no_pod,
    "half_rollout": a_revision_reaches_every_pod_and_a_revert_finds_its_children,
    "double_restart": one_kill_makes_one_restart,
    "no_precondition": a_pod_that_was_made_meanwhile_lives,
    "early_restart": pods_that_never_all_started_are_left_alone,
    "greedy_rollout": a_rollout_keeps_what_must_serve,
}


def is_kept(promise: Callable[[Ground], None], ground: Ground) -> str:
    """Describe how the operator breaks the promise; return an empty string if it keeps it."""
    try:
        promise(ground)
    except (AssertionError, httpx.HTTPStatusError) as error:
        return f"{promise.__name__}: {error!r:.500}"
    finally:
        ground.proxy.begin(Fault())
        ground.kubelets.held.discard(ground.namespace)
    return ""
