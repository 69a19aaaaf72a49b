"""A small cluster in memory for the planner: it carries out actions and acts for StatefulSets and kubelets."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import (
    Action,
    Apply,
    Confirm,
    CopyEnrolment,
    CreateKeys,
    Delete,
    Plan,
    Prune,
    RecordEvent,
    SetStatus,
)
from medha_operator.replica.nodes import requires_capacity
from medha_operator.replica.observed import Capacity, Node, Observed, Pod, any_report_since
from medha_operator.replica.plan import plan
from medha_operator.replica.revision import Revision
from medha_operator.status_fields import ReplicaStatus
from reconcile.fake_cluster import merged

SETTINGS = OperatorSettings()
GRID: dict[str, Any] = {"parallelism": {"tensor": 2, "stream": 2, "kv": 2}}


class World:
    """One replica and its objects."""

    def __init__(self, **spec: Any) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
        self.spec: dict[str, Any] = {"model": {"name": "m", "source": {"path": "x"}}} | spec
        self.generation = 1
        self.status = ReplicaStatus()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.revisions: dict[str, Revision] = {}
        self.pods: dict[str, Pod] = {}
        self.owners: dict[str, str] = {}
        """Name of a pod -> UID of the StatefulSet that has made it."""
        self.nodes: dict[str, Node] = {}
        self.other_nodes: list[Node] = [Node(reporting_since=0.0)]
        """Nodes that have no pod of the replica."""
        self.unmade: tuple[str, str] | None = None
        """Reason and message of the events that say why pods are not created."""
        self.capacity = Capacity(True)
        """The answer whether other nodes have room for the replica."""
        self.held: set[str] = set()
        """UIDs of objects and pods that a finalizer of somebody else holds."""
        self.is_deleting = False
        self.deployment: str | None = None
        self.may_drain: str | None = None
        self.notice: list[RecordEvent] = []
        self.created_pods = 0
        self.writes = 0
        self._serial = 0

    # --- the operator's side ----------------------------------------------------------------------------

    def observe(self) -> Observed:
        sets = {
            found["metadata"]["uid"] for (kind, _), found in self.objects.items() if kind == "StatefulSet"
        }
        lanes = {name: self.owners[name] in sets for name in self.pods}
        observed = Observed(
            name="r",
            namespace="default",
            uid="u",
            generation=self.generation,
            resource_version="1",
            spec=self.spec,
            status=self.status,
            deployment=self.deployment,
            may_drain=self.may_drain,
            objects=copy.deepcopy(self.objects),
            revisions=tuple(self.revisions.values()),
            pods=tuple(pod for name, pod in self.pods.items() if lanes[name]),
            earlier_pods=tuple(pod for name, pod in self.pods.items() if not lanes[name]),
            is_deleting=self.is_deleting,
            nodes=dict(self.nodes),
            any_report_since=any_report_since([*self.nodes.values(), *self.other_nodes]),
        )
        return replace(
            observed, unmade=self.unmade, capacity=self.capacity if requires_capacity(observed) else None
        )

    def plan(self) -> Plan:
        return plan(self.observe(), self.now, SETTINGS)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.writes += not isinstance(action, RecordEvent | Confirm)
            match action:
                case Apply(manifest):
                    self._apply(manifest)
                case CreateKeys(name) | CopyEnrolment(name, _, _):
                    self.objects["Secret", name] = self._stored(
                        {"kind": "Secret", "metadata": {"name": name}}
                    )
                case Prune(kind=kind, name=name, uid=uid, patch=patch):
                    found = self.objects[kind, name]
                    assert found["metadata"]["uid"] == uid
                    self.objects[kind, name] = self._stored(merged(found, patch))
                case Delete(kind="Pod", name=name, uid=uid):
                    if name in self.pods and self.pods[name].uid == uid:
                        self._end_pod(self.pods[name], is_forced=action.is_forced)
                case Delete(kind=kind, name=name, uid=uid):
                    if (kind, name) in self.objects and self.objects[kind, name]["metadata"]["uid"] == uid:
                        self._end_object(kind, name)
                case SetStatus(status):
                    self.status = status
                case RecordEvent():
                    self.notice.append(action)

    def settle(self, rounds: int = 12) -> int:
        """Plan and act until nothing is left to do, with turns of the cluster in between; return the last writes."""
        for _ in range(rounds):
            before = self.writes
            self.do(self.plan().actions)
            self.controllers()
            self.kubelets()
            if self.writes == before:
                return 0
            self.now += 2
        return self.writes - before

    def is_reported_ready(self) -> bool:
        return any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)

    # --- the cluster's side -----------------------------------------------------------------------------

    def hold(self) -> None:
        """Put somebody's finalizer on everything that exists."""
        self.held |= {pod.uid for pod in self.pods.values()}
        self.held |= {found["metadata"]["uid"] for found in self.objects.values()}

    def release(self) -> None:
        """Remove the finalizers: what is being deleted goes, pods once their kubelets report."""
        self.held.clear()
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.has_finalizer}
        for (kind, name), found in list(self.objects.items()):
            if "deletionTimestamp" in found["metadata"]:
                self._remove(kind, name)

    def _end_pod(self, pod: Pod, *, is_forced: bool) -> None:
        assert not (pod.has_finalizer if is_forced else pod.is_deleting), f"{pod.name} is deleted twice"
        assert is_forced or not self.is_reported_ready(), f"{pod.name} ends of what is Ready"
        if is_forced and pod.uid not in self.held:
            del self.pods[pod.name]
        else:
            self.pods[pod.name] = replace(pod, is_deleting=True, has_finalizer=is_forced)

    def _end_object(self, kind: str, name: str) -> None:
        metadata = self.objects[kind, name]["metadata"]
        assert "deletionTimestamp" not in metadata, f"{kind} {name} is deleted twice"
        if metadata["uid"] in self.held:
            metadata["deletionTimestamp"] = "2030-01-01T00:00:00Z"
        else:
            self._remove(kind, name)

    def _remove(self, kind: str, name: str) -> None:
        del self.objects[kind, name]
        self.revisions = {key: one for key, one in self.revisions.items() if f"r-{key}" != name}

    def controllers(self) -> None:
        """End deleted pods and pods of no StatefulSet, and create the pods that StatefulSets miss."""
        sets = {
            found["metadata"]["uid"]: found
            for (kind, _), found in sorted(self.objects.items())
            if kind == "StatefulSet"
        }
        for name, pod in list(self.pods.items()):
            lane = sets.get(self.owners[name])
            is_wanted = lane is not None and int(name.rpartition("-")[2]) < lane["spec"]["replicas"]
            if (pod.is_deleting or not is_wanted) and not self._is_silent(pod) and pod.uid not in self.held:
                del self.pods[name]
            elif not is_wanted:
                self.pods[name] = replace(pod, is_deleting=True)
        for lane in sets.values():
            if "deletionTimestamp" not in lane["metadata"]:
                self._make_pods(lane)

    def kubelets(self) -> None:
        """Place and start every pod; make it ready once its whole gang has started."""
        self.pods = {
            name: pod
            if pod.is_failed or self._is_silent(pod)
            else replace(pod, is_scheduled=True, is_started=True, is_ready=True, node=pod.node or "node")
            for name, pod in self.pods.items()
        }

    def _is_silent(self, pod: Pod) -> bool:
        node = self.nodes.get(pod.node or "")
        return node is not None and node.unreachable_since is not None

    def _make_pods(self, lane: dict[str, Any]) -> None:
        template = lane["spec"]["template"]["metadata"]["labels"]
        for ordinal in range(lane["spec"]["replicas"]):
            name = f"{lane['metadata']['name']}-{ordinal}"
            if name not in self.pods:
                self.created_pods += 1
                self._serial += 1
                self.owners[name] = lane["metadata"]["uid"]
                self.pods[name] = Pod(
                    name=name,
                    uid=f"pod-{self._serial}",
                    resource_version="1",
                    lane=int(template["medha.dev/lane"]),
                    revision=template["medha.dev/revision"],
                    created=self.now,
                )

    def _apply(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ControllerRevision":
            data = copy.deepcopy(manifest["data"])
            key = name.removeprefix("r-")
            self.revisions[key] = Revision(
                key, manifest["revision"], data["fields"], tuple(data["templates"])
            )
        self.objects[manifest["kind"], name] = self._stored(manifest)

    def _stored(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._serial += 1
        stored = copy.deepcopy(manifest)
        before = self.objects.get((manifest["kind"], manifest["metadata"]["name"]), {}).get("metadata", {})
        kept = {name: before[name] for name in ("uid", "deletionTimestamp") if name in before}
        stored["metadata"] |= {"uid": f"uid-{self._serial}", "resourceVersion": str(self._serial)} | kept
        return stored


def condition(world: World, kind: str) -> tuple[str, str]:
    found = next(entry for entry in world.status.conditions if entry.type == kind)
    return found.status, found.reason


def uids(world: World) -> set[str]:
    return {pod.uid for pod in world.pods.values()}


def deleted_pods(planned: Plan) -> set[str]:
    return {action.name for action in planned.actions if isinstance(action, Delete) and action.kind == "Pod"}


def allowed_away(world: World) -> Any:
    return world.objects["PodDisruptionBudget", "r"]["spec"]["maxUnavailable"]
