"""A small cluster in memory for the deployment's planner: replicas start, become ready and move like real ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from typing import Any

from medha.api.replica import MedhaReplicaSpec
from medha_operator.deployment.observed_deployment import (
    MAY_DRAIN,
    TEMPLATE_LABEL,
    ObservedDeployment,
    StoredTemplate,
    child_index,
    child_of,
)
from medha_operator.deployment.plan_deployment import plan_deployment
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Action, Apply, Confirm, Delete, Plan, RecordEvent, SetStatus
from medha_operator.replica.observed import timestamp
from medha_operator.replica.revision import Revision, begin
from medha_operator.status_fields import DeploymentStatus

SETTINGS = OperatorSettings()
GANG = "2030-01-01T00:00:00Z"
LATER_GANG = "2030-02-02T00:00:00Z"


def template(**spec: Any) -> dict[str, Any]:
    return {"spec": {"model": {"name": "m", "source": {"path": "x"}}} | spec}


@cache
def _pods_of(spec: str) -> Revision:
    return begin(MedhaReplicaSpec.model_validate_json(spec), [])


class DeploymentWorld:
    """Simulates a deployment and its replicas. `capacity` is how many replicas the cluster can place."""

    def __init__(self, replicas: int, *, capacity: int = 100, **spec: Any) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
        self.spec: dict[str, Any] = {"replicas": replicas, "template": template()} | spec
        self.generation = 1
        self.is_deleting = False
        self.status = DeploymentStatus()
        self.capacity = capacity
        self.replicas: dict[str, dict[str, Any]] = {}
        self.templates: dict[str, StoredTemplate] = {}
        self.kept_of_replicas: dict[str, Revision] = {}
        """Revisions, by name."""
        self.cordoned: set[str] = set()
        """Names of replicas that are on a cordoned node."""
        self.broken: set[str] = set()
        """Images that never start."""
        self.hindered: set[str] = set()
        """Names of replicas one of whose objects is refused: their status says so, and their pods serve on."""
        self.refused: set[str] = set()
        """Names of replicas whose specs are refused: their pods are left alone and reported as they are."""
        self.untold: set[str] = set()
        """Names of replicas whose specs are refused by an earlier release, which did not report on their pods."""
        self.notice: list[RecordEvent] = []
        self.writes = 0
        self._serial = 0

    def change(self, **spec: Any) -> None:
        self.spec = self.spec | spec
        self.generation += 1

    # --- the operator's side ----------------------------------------------------------------------------

    def observe(self) -> ObservedDeployment:
        return ObservedDeployment(
            name="d",
            namespace="default",
            uid="u",
            generation=self.generation,
            resource_version="1",
            spec=self.spec,
            status=self.status,
            is_deleting=self.is_deleting,
            children=tuple(
                child_of(document, index, "u", self.kept_of_replicas.values())
                for name, document in self.replicas.items()
                if (index := child_index("d", name)) is not None
            ),
            templates=tuple(self.templates.values()),
        )

    def plan(self) -> Plan:
        return plan_deployment(self.observe(), self.now, SETTINGS)

    def do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.writes += not isinstance(action, RecordEvent | Confirm)
            match action:
                case Apply(manifest) if manifest["kind"] == "MedhaReplica":
                    self._apply(manifest)
                case Apply(manifest):
                    kept = StoredTemplate(
                        manifest["metadata"]["name"].removeprefix("d-"),
                        manifest["revision"],
                        copy.deepcopy(manifest["data"]["template"]),
                    )
                    self.templates[kept.name] = kept
                case Delete(kind="MedhaReplica", name=name, uid=uid):
                    if name in self.replicas and self.replicas[name]["metadata"]["uid"] == uid:
                        self.replicas[name]["metadata"]["deletionTimestamp"] = timestamp(self.now)
                case Delete(name=name):
                    del self.templates[name.removeprefix("d-")]
                case SetStatus(DeploymentStatus() as status):
                    self.status = status
                case RecordEvent():
                    self.notice.append(action)
                case Confirm():
                    pass
                case _:
                    raise AssertionError(action)

    def settle(self, rounds: int = 60) -> int:
        """Plan and act until nothing is left to do, with turns of the replicas in between; return the last writes."""
        for _ in range(rounds):
            before = (self.writes, copy.deepcopy(self.replicas))
            self.do(self.plan().actions)
            self.operate()
            if (self.writes, self.replicas) == before:
                return 0
            self.now += 5
        return self.writes - before[0]

    # --- the replicas' side -----------------------------------------------------------------------------

    def operate(self) -> None:
        """Give the replicas' own operator, their pods and the scheduler one turn."""
        self.replicas = {
            name: document
            for name, document in self.replicas.items()
            if "deletionTimestamp" not in document["metadata"]
        }
        for names in (self.cordoned, self.hindered, self.refused, self.untold):
            names &= self.replicas.keys()
        placed = sum(bool(one["status"].get("placed")) for one in self.replicas.values())
        for name, document in sorted(self.replicas.items()):
            placed += self._turn(name, document, has_room=placed < self.capacity)

    def _turn(self, name: str, document: dict[str, Any], *, has_room: bool) -> int:
        status, metadata = document["status"], document["metadata"]
        if name in self.refused | self.untold:
            self._record_event(name, document)
            return 0
        kept = _pods_of(json.dumps(document["spec"]))
        self.kept_of_replicas[kept.name], pods = kept, kept.name
        had = bool(status.get("placed"))
        leaves = name in self.cordoned and (
            status.get("newestMember") is None
            or metadata.get("annotations", {}).get(MAY_DRAIN) == status["newestMember"]
        )
        is_suspended = document["spec"].get("suspend", False)
        if (
            status.get("revision") != pods or leaves or is_suspended
        ):  # all pods end, and start anew in a later turn
            status.update(placed=False, started=False, newestMember=None, revision=pods)
            self.cordoned.discard(name)
        elif not status.get("placed"):
            status["placed"] = has_room
        elif not status.get("started"):
            status["started"] = document["spec"].get("image") not in self.broken
            if status["started"]:
                status["newestMember"] = timestamp(self.now)
        self._record_event(name, document)
        return bool(status.get("placed")) - had

    def _record_event(self, name: str, document: dict[str, Any]) -> None:
        status, generation = document["status"], document["metadata"]["generation"]
        status["observedGeneration"] = generation
        broken = (
            status.get("placed")
            and not status.get("started")
            and document["spec"].get("image") in self.broken
        )
        reason = (
            "Serving" if status.get("started")
            else "CrashLooping" if broken
            else "Suspended" if document["spec"].get("suspend")
            else "InsufficientCapacity" if not status.get("placed")
            else "Loading"
        )  # fmt: skip
        derived = {
            "Ready": (bool(status.get("started")), reason),
            "Serving": (bool(status.get("started")), reason),
            "Scheduled": (bool(status.get("placed")), reason),
            "Stalled": (bool(broken), reason),
            "Draining": (name in self.cordoned, "NodeCordoned"),
        }
        no = {"Ready": (False, "Refused"), "Accepted": (False, "Refused"), "Stalled": (True, "Refused")}
        if name in self.untold:
            derived = no
        elif name in self.hindered or (name in self.refused and not status.get("started")):
            derived |= no
        elif name in self.refused:
            derived |= {kind: said for kind, said in no.items() if kind != "Ready"}
        before = {entry["type"]: entry for entry in status.get("conditions", ())}
        status["conditions"] = [
            {
                "type": kind,
                "status": str(holds),
                "reason": why,
                "message": "",
                "observedGeneration": generation,
                "lastTransitionTime": before[kind]["lastTransitionTime"]
                if kind in before and before[kind]["status"] == str(holds)
                else timestamp(self.now),
            }
            for kind, (holds, why) in derived.items()
        ]

    def _apply(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        stored = copy.deepcopy(manifest)
        found = self.replicas.get(name)
        self._serial += 1
        if found is None:
            stored["metadata"] |= {
                "uid": f"uid-{self._serial}",
                "generation": 1,
                "creationTimestamp": timestamp(self.now),
            }
            stored["status"] = {}
        else:
            assert found["spec"].get("placement") == stored["spec"].get("placement"), "gang is immutable"
            stored["metadata"] |= {
                key: found["metadata"][key]
                for key in ("uid", "generation", "creationTimestamp", "deletionTimestamp")
                if key in found["metadata"]
            }
            stored["metadata"]["generation"] += stored["spec"] != found["spec"]
            stored["status"] = found["status"]
        stored["metadata"]["resourceVersion"] = str(self._serial)
        self.replicas[name] = stored

    # --- what tests look at -----------------------------------------------------------------------------

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(entry for entry in self.status.conditions if entry.type == kind)
        return found.status, found.reason

    def serving(self) -> set[str]:
        """Return the replicas whose pods serve now, whatever their status says."""
        return {name for name, one in self.replicas.items() if one["status"].get("started")}

    def is_ending(self, name: str) -> bool:
        """Return whether it has been changed so that its pods end at its next turn."""
        one = self.replicas[name]
        is_changed = _pods_of(json.dumps(one["spec"])).name != one["status"].get("revision")
        return (
            is_changed
            or "deletionTimestamp" in one["metadata"]
            or MAY_DRAIN in one["metadata"].get("annotations", {})
        )

    def ended_by(self, manifest: dict[str, Any]) -> bool:
        """Return whether applying `manifest` ends pods of a replica that serves."""
        name = manifest["metadata"]["name"]
        if name not in self.serving() or self.is_ending(name):
            return False
        leaves = name in self.cordoned and MAY_DRAIN in manifest["metadata"].get("annotations", {})
        return (
            leaves or _pods_of(json.dumps(manifest["spec"])).name != self.replicas[name]["status"]["revision"]
        )

    def images(self) -> list[str]:
        """Return the image of each replica, by index."""
        ordered = sorted(self.replicas, key=lambda name: child_index("d", name) or 0)
        return [self.replicas[name]["spec"].get("image", "") for name in ordered]

    def revisions(self) -> set[str]:
        return {one["metadata"]["labels"][TEMPLATE_LABEL] for one in self.replicas.values()}


def applied(planned: Plan) -> list[str]:
    """Return the names of the replicas that the plan applies."""
    return [
        action.manifest["metadata"]["name"]
        for action in planned.actions
        if isinstance(action, Apply) and action.manifest["kind"] == "MedhaReplica"
    ]


def deleted(planned: Plan) -> list[str]:
    return [one.name for one in planned.actions if isinstance(one, Delete) and one.kind == "MedhaReplica"]


def watched(world: DeploymentWorld, rounds: int = 80) -> tuple[int, int, list[str]]:
    """Settle; return the least number that served, the most that existed, and the order of changes."""
    least, most, order = len(world.serving()), len(world.replicas), []
    for _ in range(rounds):
        planned = world.plan()
        order += [name for name in applied(planned) if name in world.serving()]
        world.do(planned.actions)
        world.operate()
        least, most = min(least, len(world.serving())), max(most, len(world.replicas))
        world.now += 5
    assert world.plan().actions == ()
    return least, most, order
