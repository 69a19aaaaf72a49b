"""Prometheus' collectors of metrics of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from medha.observing.metric_catalogue import Metric


class Collectors:
    """The collectors of some metrics in one registry, by name."""

    def __init__(self, metrics: Iterable[Metric], registry: CollectorRegistry) -> None:
        self.counters: dict[str, Counter] = {}
        self.gauges: dict[str, Gauge] = {}
        self.histograms: dict[str, Histogram] = {}
        for metric in metrics:
            name, about = metric.name, (metric.name, metric.meaning, metric.labels)
            match metric.kind:
                case "counter":
                    self.counters[name] = Counter(*about, registry=registry)
                case "gauge":
                    self.gauges[name] = Gauge(*about, registry=registry)
                case "histogram":
                    self.histograms[name] = Histogram(*about, registry=registry, buckets=metric.buckets)
