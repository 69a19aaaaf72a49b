"""Run a scenario of the campaign with a fault, and check whether the cluster converges to the spec."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from campaign.faults import (
    KilledAtWrite,
    KilledWhileEnding,
    StaleView,
    UnsureAnswers,
    UnsureEvents,
    UnsureReads,
)
from campaign.forked import ForkedOperator, prepare
from campaign.history import History, watched
from campaign.oracle import wrong
from campaign.proxy import Fault, FaultyProxy, Record
from campaign.scenarios import SCENARIOS, Scenario
from cluster.api import Api, PlayedKubelets
from cluster.control_plane import ControlPlane
from medha_operator.kube.kinds import DEPLOYMENT, KINDS, POD, REPLICA

_SETTLE_SECONDS = 90.0  # the garbage collector discovers new kinds every 30 s


@dataclass(frozen=True)
class Plan:
    """Description of a run. Its `name` is unique, so that a campaign can resume where it was stopped."""

    scenario: str
    fault: str
    """`none`, `kill-before`, `kill-after`, `kill-ending`, `stale`, `events`, `answers`, `reads` or `pods`."""
    number: int = 0
    """Write, or event since the deletion, at which the operator is killed; step shown again; or seed."""

    @property
    def name(self) -> str:
        return f"{self.scenario}/{self.fault}/{self.number}"


@dataclass
class Outcome:
    """Result of a run; it is good if `wrong` is empty and the run was not skipped."""

    plan: str
    seconds: float = 0.0
    writes: int = 0
    starts: int = 0
    pods: int = 0
    """Number of pods created during the run."""
    is_skipped: bool = False
    """True if the fault never happened, such as a kill at a write that did not occur in this run."""
    wrong: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "; ".join(self.wrong)[:300]
        return "skipped, the fault never happened" if self.is_skipped else "well"


class Stage:
    """A control plane with a proxy in front and simulated kubelets, on which runs follow each other."""

    def __init__(self, folder: Path, api: Api, proxy: FaultyProxy, module: str) -> None:
        self._folder = folder
        self._api = api
        self._proxy = proxy
        self._module = module
        self._count = 0
        self.references: dict[str, tuple[Outcome, Record, History]] = {}

    def reference(self, scenario: str) -> tuple[Outcome, Record, History]:
        """Return the faultless run of a scenario, made once. If its outcome is wrong, it is no reference."""
        if scenario not in self.references:
            self.references[scenario] = self._run(Plan(scenario, "none"))
        return self.references[scenario]

    def run(self, plan: Plan) -> Outcome:
        """Run `plan` and evaluate it against the reference run."""
        reference, usual, usual_history = self.reference(plan.scenario)
        outcome, record, history = self._run(plan)
        if plan.fault != "pods" and outcome.pods > reference.pods:
            more = history.beyond(usual_history)
            outcome.wrong.append(f"{outcome.pods} pods were made instead of {reference.pods}: {more}")
        if plan.fault.startswith("kill"):
            outcome.wrong += done_too_often(record, usual)
        elif plan.fault in ("stale", "reads"):
            outcome.wrong += done_too_often(record, usual, _STARTS_PODS)
        return outcome

    def _run(self, plan: Plan) -> tuple[Outcome, Record, History]:
        self._count += 1
        namespace = self._api.namespace(f"run-{self._count}")
        scenario, began = SCENARIOS[plan.scenario], time.monotonic()
        outcome = Outcome(plan.name)
        with self._operator(namespace) as operator, watched(self._api, namespace) as history:
            fault = _fault(plan, operator)
            record = self._proxy.begin(fault)
            operator.start()
            outcome.wrong = self._play(plan, scenario, fault, namespace, operator, record)
            outcome.starts = operator.starts
        outcome.pods = len(history.made)
        outcome.is_skipped = plan.fault != "none" and fault.times == 0
        outcome.writes = len(record.writes)
        outcome.seconds = round(time.monotonic() - began, 2)
        self._clean(namespace)
        return outcome, record, history

    def _play(
        self,
        plan: Plan,
        scenario: Scenario,
        fault: Fault,
        namespace: str,
        operator: ForkedOperator,
        record: Record,
    ) -> list[str]:
        for number, step in enumerate(scenario.steps):
            document = step | {"metadata": step["metadata"] | {"namespace": namespace}}
            self._api.apply(document)
            if isinstance(fault, StaleView) and number == len(scenario.steps) - 1:
                self._see_the_past(fault, operator)
            if plan.fault == "pods":
                self._disturb(namespace, random.Random(plan.number), fault)
            _end_chaos(fault, after_seconds=2.0)
            problems = self._settle(namespace, document, operator)
            if problems:
                return [f"step {number}: {problem}" for problem in problems]
            if isinstance(fault, StaleView) and number == plan.number:
                operator.kill()  # it lists everything on restart; these lists are shown again later
                operator.start()
                self._settle(namespace, document, operator)
                fault.mark()
            record.steps.append(len(record.writes))
        if not scenario.deletes:
            return []
        kind = KINDS[scenario.steps[-1]["kind"]]
        record.is_ending = True
        if isinstance(fault, KilledWhileEnding):
            fault.begin()
        self._api.delete(kind, "r", namespace)
        _end_chaos(fault, after_seconds=2.0)
        return self._settle(namespace, None, operator)

    def _see_the_past(self, fault: StaleView, operator: ForkedOperator) -> None:
        """Restart the operator with the marked, stale view; show it the present 2.5 seconds later."""
        fault.is_stale = True
        operator.kill()
        operator.start()
        time.sleep(2.5)
        fault.is_stale = False

    def _disturb(self, namespace: str, chance: random.Random, fault: Fault) -> None:
        """Delete, evict and fail pods, and edit the status, at random for two seconds."""
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.0, 0.4))
            pods = self._api.list(POD, namespace)
            replicas = self._api.list(REPLICA, namespace)
            try:
                match chance.choice(("delete", "evict", "fail", "status")):
                    case "delete" if pods:
                        self._api.delete(POD, chance.choice(pods)["metadata"]["name"], namespace)
                    case "evict" if pods:
                        evict(self._api, namespace, chance.choice(pods)["metadata"]["name"])
                    case "fail" if pods:
                        path = POD.path(namespace, chance.choice(pods)["metadata"]["name"], "status")
                        self._api.call("PATCH", path, {"status": {"phase": "Failed", "reason": "Evicted"}})
                    case "status" if replicas:
                        path = REPLICA.path(namespace, chance.choice(replicas)["metadata"]["name"], "status")
                        self._api.call("PATCH", path, {"status": _spoilt(chance)})
                    case _:
                        continue
                fault.times += 1
            except httpx.HTTPStatusError:
                pass  # the object is already gone, or the disruption budget allows no eviction

    def _settle(self, namespace: str, applied: dict[str, Any] | None, operator: ForkedOperator) -> list[str]:
        """Wait until nothing is wrong three times in a row; restart a dead operator, as a kubelet would."""
        deadline, calm = time.monotonic() + _SETTLE_SECONDS, 0
        while True:
            if not operator.is_running:
                operator.start()
            problems = wrong(self._api, namespace, applied)
            calm = 0 if problems else calm + 1
            if calm == 3 or time.monotonic() > deadline:
                return problems
            time.sleep(0.1)

    @contextmanager
    def _operator(self, namespace: str) -> Iterator[ForkedOperator]:
        operator = ForkedOperator(
            self._folder, namespace, module=self._module, lease_seconds=6.0, resync_seconds=3.0
        )
        try:
            yield operator
        finally:
            operator.kill()

    def _clean(self, namespace: str) -> None:
        """Delete the resources and namespace of a run, which would slow the lists of later runs."""
        for kind in (DEPLOYMENT, REPLICA):
            for item in self._api.list(kind, namespace):
                with suppress(httpx.HTTPStatusError):  # it was deleted with its deployment
                    self._api.delete(kind, item["metadata"]["name"], namespace)
        self._api.call("DELETE", f"/api/v1/namespaces/{namespace}")


def evict(api: Api, namespace: str, pod: str) -> None:
    """Evict a pod as `kubectl drain` does; a refusal (429 by the budget) raises `httpx.HTTPStatusError`."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
    }
    api.call("POST", POD.path(namespace, pod, "eviction"), eviction)


_STARTS_PODS = frozenset({"medhareplicas", "statefulsets", "pods"})
"""Kinds of which an operator with a stale view must not create more than usual.

To such an operator, a deleted replica may seem new. It then creates the small objects, which the garbage
collector removes since their owner is gone; its status update is refused, and nothing that comes after it is
created.
"""


def done_too_often(record: Record, usual: Record, kinds: Collection[str] | None = None) -> list[str]:
    """Describe what a restarted operator created or deleted more often than in the usual run.

    With `kinds`, only creations of these kinds are checked. A pod whose StatefulSet is deleted is removed by
    the garbage collector or by the operator, whichever is faster.
    """
    found = []
    for (kind, name), count in record.created.items():
        most = usual.created[kind, name]
        is_judged = kind != "secrets" if kinds is None else kind in kinds
        if is_judged and count > most:
            found.append(f"{kind} {name} was created {count} times instead of {most}")
    for (kind, name), count in record.deleted.items():
        most = usual.deleted[kind, name]
        if kind == "pods":
            most += usual.deleted["statefulsets", name.rpartition("-")[0]]
        if count > most:
            found.append(f"{kind} {name} was deleted {count} times instead of {most}")
    return found


def _fault(plan: Plan, operator: ForkedOperator) -> Fault:
    match plan.fault:
        case "kill-before" | "kill-after":
            return KilledAtWrite(plan.number, plan.fault == "kill-before", operator.kill)
        case "kill-ending":
            return KilledWhileEnding(plan.number, operator.kill)
        case "stale":
            return StaleView()
        case "events":
            return UnsureEvents(plan.number)
        case "answers":
            return UnsureAnswers(plan.number)
        case "reads":
            return UnsureReads(plan.number)
        case _:
            return Fault()


def _end_chaos(fault: Fault, after_seconds: float) -> None:
    """End random faults after a time, since the cluster must converge only then."""
    if isinstance(fault, UnsureEvents | UnsureAnswers | UnsureReads):
        fault.is_over = False
        threading.Timer(after_seconds, setattr, (fault, "is_over", True)).start()


def _spoilt(chance: random.Random) -> dict[str, Any]:
    return chance.choice(
        (
            {"conditions": None, "observedGeneration": 0},
            {"newestMember": None, "restarts": 0},
            {"newestMember": "2001-01-01T00:00:00Z"},
            {"revision": "0123456789", "readyPods": 99},
        )
    )


@contextmanager
def stage(folder: Path, plane: ControlPlane, module: str = "medha_operator") -> Iterator[Stage]:
    """Yield a stage on `plane`, which must run its controllers and have our resource definitions."""
    with Api(plane) as api, PlayedKubelets(api), FaultyProxy(plane) as proxy:
        prepare(proxy.kubeconfig(folder))
        yield Stage(folder, api, proxy, module)
