"""The operator's metrics, as Prometheus reads them, after reconciles with every outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from medha_operator.index import Index
from medha_operator.kube.client import ApiError, Fenced
from medha_operator.kube.kinds import Key
from medha_operator.kube.workqueue import WorkQueue
from medha_operator.operator_metrics import Telemetry
from medha_operator.operator_settings import OperatorSettings
from medha_operator.program import Program
from medha_operator.reconciler import Reconciler, ReconcileResult

CREATED = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
WAITED_SECONDS = 3.0
LOOKS: Mapping[str, ReconcileResult | Exception] = {
    "refused": ApiError(403, "Forbidden", "by policy"),
    "too-late": ApiError(409, "Conflict", "somebody was faster"),
    "unanswered": ApiError(0, "NoAnswer", "timeout"),
    "fenced": Fenced("the lease ends too soon"),
    "broken": ValueError("a mistake of ours"),
    "done": ReconcileResult(),
    "goes-on": ReconcileResult(requeue_seconds=300.0),
}


class Scripted:
    """A reconciler whose reconciles end as the name of the resource says."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self._left = set(LOOKS)

    async def reconcile(self, key: Key) -> ReconcileResult:
        self._left.discard(key.name)
        if not self._left:
            self.has_ended.set()
        outcome = LOOKS[key.name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_reconciles_are_counted_by_outcome_errors_by_reason_and_waits_in_seconds() -> None:
    async def run() -> None:
        program = Program(OperatorSettings(), "me")
        now = [0.0]
        program._queue = WorkQueue(lambda: now[0])
        program._telemetry = Telemetry(program.index, program._queue)
        value = program._telemetry.registry.get_sample_value
        for name in LOOKS:
            program._queue.add(Key("MedhaReplica", "default", name))
        assert value("medha_operator_queue_keys") == len(LOOKS)
        now[0] += WAITED_SECONDS
        scripted = Scripted()
        working = asyncio.create_task(program._work(cast(Reconciler, scripted)))
        await scripted.has_ended.wait()
        await asyncio.sleep(0)  # the last reconcile is counted when its caller continues
        working.cancel()
        program._queue.close()

        assert value("medha_operator_queue_keys") == 0
        assert value("medha_operator_queue_seconds_count") == len(LOOKS)
        assert value("medha_operator_queue_seconds_sum") == WAITED_SECONDS * len(LOOKS)
        for reason in ("Forbidden", "Conflict", "NoAnswer", "Fenced", "Bug"):
            labels = {"kind": "MedhaReplica", "reason": reason}
            assert value("medha_operator_reconcile_errors_total", labels) == 1
        for outcome, count in (("failed", 5), ("unchanged", 2)):
            labels = {"kind": "MedhaReplica", "outcome": outcome}
            assert value("medha_operator_reconcile_seconds_count", labels) == count

    asyncio.run(run())


def at(seconds: float) -> str:
    return datetime.fromtimestamp(CREATED + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def status(**conditions: tuple[str, float]) -> dict[str, Any]:
    """Conditions by type: status, and seconds after the creation of its last change."""
    return {
        "conditions": [
            {"type": name, "status": value, "reason": "Reason", "lastTransitionTime": at(since)}
            for name, (value, since) in conditions.items()
        ]
    }


@pytest.mark.parametrize(
    ("before", "taken_seconds"),
    [
        pytest.param(
            status(Ready=("False", 4), Scheduled=("True", 9), Reconciling=("True", 4), Stalled=("False", 4)),
            200.0,
            id="since its creation, though the first reconcile came later",
        ),
        pytest.param(
            status(Ready=("False", 150), Reconciling=("True", 150), Stalled=("False", 4)),
            50.0,
            id="since it was ready before",
        ),
        pytest.param(
            status(Ready=("False", 4), Reconciling=("True", 120), Stalled=("False", 4)),
            80.0,
            id="since its suspension ended",
        ),
    ],
)
def test_the_time_to_ready_counts_from_what_was_asked_for(
    before: dict[str, Any], taken_seconds: float
) -> None:
    async def run() -> None:
        queue = WorkQueue(lambda: 0.0)
        telemetry = Telemetry(Index(queue.add), queue)
        metadata = {"name": "r", "namespace": "default", "creationTimestamp": at(0)}
        resource = {"kind": "MedhaReplica", "metadata": metadata, "status": before}
        after = status(Ready=("True", 200), Reconciling=("False", 200), Stalled=("False", 4))
        telemetry.described(resource, after, CREATED + 200)
        telemetry.described(resource | {"status": after}, after, CREATED + 300)  # it stays so: counted once
        labels = {"kind": "MedhaReplica"}
        value = telemetry.registry.get_sample_value
        assert value("medha_operator_ready_seconds_count", labels) == 1
        assert value("medha_operator_ready_seconds_sum", labels) == taken_seconds

    asyncio.run(run())


def test_conditions_are_exported_for_each_resource_and_reasons_only_where_something_is_amiss() -> None:
    async def run() -> None:
        queue = WorkQueue(lambda: 0.0)
        index = Index(queue.add)
        value = Telemetry(index, queue).registry.get_sample_value

        def offer(name: str, version: int, **conditions: tuple[str, float]) -> dict[str, Any]:
            metadata = {"name": name, "namespace": "team-a", "uid": name, "resourceVersion": str(version)}
            document = {"kind": "MedhaReplica", "metadata": metadata, "spec": {}}
            index.offer(document | ({"status": status(**conditions)} if conditions else {}))
            return document

        def holds(name: str, condition: str) -> float | None:
            return value("medha_operator_condition", _labels(name, condition))

        def reason(name: str, condition: str, said: str) -> float | None:
            return value("medha_operator_reason", _labels(name, condition) | {"reason": said})

        offer("new", 1)
        offer(
            "good",
            2,
            Ready=("True", 0),
            Reconciling=("False", 0),
            Stalled=("False", 0),
            Scheduled=("True", 0),
        )
        offer("bad", 3, Ready=("False", 0), Reconciling=("True", 0), Stalled=("False", 0))
        assert (holds("new", "Ready"), reason("new", "Ready", "NoStatus")) == (0, 1)
        assert [holds("good", kind) for kind in ("Ready", "Reconciling", "Stalled", "Scheduled")] == [
            1,
            0,
            0,
            None,
        ]
        assert [reason("good", kind, "Reason") for kind in ("Ready", "Reconciling")] == [None, None]
        assert [holds("bad", kind) for kind in ("Ready", "Reconciling", "Stalled")] == [0, 1, 0]
        assert [reason("bad", kind, "Reason") for kind in ("Ready", "Reconciling", "Stalled")] == [1, 1, None]
        index.stores["MedhaReplica"].see("DELETED", offer("bad", 4))
        assert holds("bad", "Ready") is None

    asyncio.run(run())


def _labels(name: str, condition: str) -> dict[str, str]:
    return {
        "kind": "MedhaReplica",
        "resource_namespace": "team-a",
        "resource": name,
        "condition": condition,
    }
