"""The operator's metrics, made from the catalogue in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from medha.observing.metric_catalogue import OPERATOR_METRICS
from medha_operator.index import Index
from medha_operator.kube.kinds import DEPLOYMENT, REPLICA
from medha_operator.kube.store import Document
from medha_operator.kube.workqueue import WorkQueue
from medha_operator.replica.observed import seconds
from medha_process.collectors import Collectors

_CATALOGUE = {metric.name: metric for metric in OPERATOR_METRICS}
_OF_RESOURCES = ("medha_operator_condition", "medha_operator_reason")
"""Metrics that are read from the index at each scrape."""
_EXPORTED = frozenset({"Ready", "Reconciling", "Stalled", "Degraded", "Available"})
_EXPLAINED = {"Ready": False, "Reconciling": True}
"""Conditions whose reason is exported, each with the status at which it is: good ones need no reason."""
_NO_STATUS = {"status": "Unknown", "reason": "NoStatus"}
"""Condition of a resource that no reconcile has described yet."""


class Telemetry:
    """The operator's counters and histograms; each method records one kind of occurrence."""

    def __init__(self, index: Index, queue: WorkQueue) -> None:
        self.registry = CollectorRegistry()
        counted = (metric for name, metric in _CATALOGUE.items() if name not in _OF_RESOURCES)
        collectors = Collectors(counted, self.registry)
        self._reconciles = collectors.histograms["medha_operator_reconcile_seconds"]
        self._errors = collectors.counters["medha_operator_reconcile_errors"]
        self._waits = collectors.histograms["medha_operator_queue_seconds"]
        self._writes = collectors.counters["medha_operator_writes"]
        self._ready = collectors.histograms["medha_operator_ready_seconds"]
        self._leading = collectors.gauges["medha_operator_leading"]
        collectors.gauges["medha_operator_queue_keys"].set_function(lambda: len(queue))
        self.registry.register(_Resources(index))

    def waited(self, elapsed_seconds: float) -> None:
        self._waits.observe(elapsed_seconds)

    def reconciled(self, kind: str, outcome: str, elapsed_seconds: float) -> None:
        self._reconciles.labels(kind, outcome).observe(elapsed_seconds)

    def failed(self, kind: str, reason: str) -> None:
        self._errors.labels(kind, reason).inc()

    def wrote(self, verb: str) -> None:
        self._writes.labels(verb).inc()

    def leads(self) -> None:
        self._leading.set(1)

    def described(self, resource: Document, after: Mapping[str, Any], now: float) -> None:
        """Record the time until ready if `resource` becomes ready by the status `after`.

        `resource` has its earlier status. `now` is Unix time in seconds.
        """
        old, new = _conditions(resource.get("status", {})), _conditions(after)
        is_ready = new.get("Ready", {}).get("status") == "True"
        was_ready = old.get("Ready", {}).get("status") == "True"
        began = old.get("Reconciling", {})
        if is_ready and not was_ready and began.get("status") == "True":
            since = seconds(began["lastTransitionTime"])
            if since == min(seconds(condition["lastTransitionTime"]) for condition in old.values()):
                # Reconciling since its first status, which is written some time after the creation: count
                # from the latter.
                since = seconds(resource["metadata"]["creationTimestamp"])
            self._ready.labels(resource["kind"]).observe(max(0.0, now - since))


class _Resources(Collector):
    """Our resources one by one, read at each scrape: a deleted resource leaves no series."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        holds, reasons = (_family(name) for name in _OF_RESOURCES)
        for kind in (REPLICA, DEPLOYMENT):
            for key, document in self._index.resources(kind):
                conditions = _conditions(document.get("status", {}))
                for name in sorted(_EXPORTED & {"Ready", *conditions}):
                    condition = conditions.get(name, _NO_STATUS)
                    is_true = condition["status"] == "True"
                    holds.add_metric((*key, name), float(is_true))
                    if _EXPLAINED.get(name) == is_true:
                        reasons.add_metric((*key, name, condition["reason"]), 1.0)
        yield holds
        yield reasons


def _family(name: str) -> GaugeMetricFamily:
    desired = _CATALOGUE[name]
    return GaugeMetricFamily(desired.name, desired.meaning, labels=desired.labels)


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions", ())}
