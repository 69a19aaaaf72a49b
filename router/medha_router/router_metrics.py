"""The router's metrics collectors, made from the catalogue in a registry that is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from medha.metric_catalogue import (
    NOT_TOKENISED,
    ROUTER_METRICS,
    VLLM_ALIASES,
    Metric,
    prompt_length_label,
)
from medha.routing.router_core import KnownModel
from medha.wire.messages import Announce

_ENGINE = "router"
"""The `engine` label of metrics that the router measures itself."""
_STATES = ("ready", "draining", "starting")


def make_collectors(
    metrics: Iterable[Metric], registry: CollectorRegistry
) -> dict[str, Counter | Gauge | Histogram]:
    """Return one collector per metric, by name."""
    made: dict[str, Counter | Gauge | Histogram] = {}
    for metric in metrics:
        match metric.kind:
            case "counter":
                made[metric.name] = Counter(metric.name, metric.meaning, metric.labels, registry=registry)
            case "gauge":
                made[metric.name] = Gauge(metric.name, metric.meaning, metric.labels, registry=registry)
            case "histogram":
                made[metric.name] = Histogram(
                    metric.name, metric.meaning, metric.labels, registry=registry, buckets=metric.buckets
                )
    return made


LINKS = ("control", "tokens")
"""Names of the links to replicas in metrics."""


class Observer:
    """All metrics of the router, with one method for each event."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._metrics: dict[str, Collector] = {**make_collectors((*ROUTER_METRICS, *VLLM_ALIASES), registry)}
        for link in LINKS:
            self.connections_refused(link, 0)  # start at 0, so that the first refusal is an increase too

    def _count(self, name: str, amount: float, *labels: str) -> None:
        counter = self._metrics[name]
        assert isinstance(counter, Counter)
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._metrics[name]
        assert isinstance(gauge, Gauge)
        (gauge.labels(*labels) if labels else gauge).set(value)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._metrics[name]
        assert isinstance(histogram, Histogram)
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def tokenized(self, place: str, seconds: float) -> None:
        self._observe("medha_router_tokenize_seconds", seconds, place)

    def message_dropped(self, link: str, reason: str) -> None:
        self._count("medha_router_dropped_messages", 1, link, reason)

    def http_refused(self, reason: str) -> None:
        self._count("medha_router_http_refusals", 1, reason)

    def connections_refused(self, link: str, connections: int) -> None:
        self._count("medha_router_refused_connections", connections, link)

    def resubmitted(self) -> None:
        self._count("medha_router_resubmissions", 1)

    def accepted(self, model: str, prompt_tokens: int) -> None:
        self._count("medha_prompt_tokens", prompt_tokens, model)
        self._count("vllm:prompt_tokens", prompt_tokens, model, _ENGINE)

    def prompt_cached(self, model: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the cached tokens of a prompt that got its first output token."""
        self._count("medha_cached_prompt_tokens", cached_tokens, model)
        self._count("vllm:prefix_cache_queries", prompt_tokens, model, _ENGINE)
        self._count("vllm:prefix_cache_hits", cached_tokens, model, _ENGINE)

    def output(self, model: str, tokens: int) -> None:
        self._count("medha_output_tokens", tokens, model)
        self._count("vllm:generation_tokens", tokens, model, _ENGINE)

    def first_token(
        self, model: str, service_class: str, prompt_tokens: int, seconds: float, target_seconds: float
    ) -> None:
        length = prompt_length_label(prompt_tokens)
        self._observe("medha_request_ttft_seconds", seconds, model, service_class)
        self._observe("vllm:time_to_first_token_seconds", seconds, model, _ENGINE)
        self._observe(
            "medha_request_ttft_target_ratio", seconds / target_seconds, model, service_class, length
        )
        self.ttft_attained(model, service_class, prompt_tokens, seconds <= target_seconds)

    def ttft_attained(self, model: str, service_class: str, prompt_tokens: int, met: bool) -> None:
        length = prompt_length_label(prompt_tokens)
        self._count("medha_request_ttft_attainment", 1, model, service_class, length, str(met).lower())

    def between_tokens(self, model: str, service_class: str, seconds: float) -> None:
        self._observe("medha_inter_token_seconds", seconds, model, service_class)
        self._observe("vllm:inter_token_latency_seconds", seconds, model, _ENGINE)

    def per_token(self, model: str, service_class: str, seconds: float) -> None:
        self._observe("medha_request_tpot_seconds", seconds, model, service_class)
        self._observe("vllm:request_time_per_output_token_seconds", seconds, model, _ENGINE)

    def tpot_attained(self, model: str, service_class: str, prompt_tokens: int, met: bool) -> None:
        length = prompt_length_label(prompt_tokens)
        self._count("medha_request_tpot_attainment", 1, model, service_class, length, str(met).lower())

    def sequence_finished(self, model: str, reason: str) -> None:
        self._count("vllm:request_success", 1, model, _ENGINE, reason)

    def request_finished(self, model: str, service_class: str, seconds: float) -> None:
        self._observe("medha_request_seconds", seconds, model, service_class)
        self._observe("vllm:e2e_request_latency_seconds", seconds, model, _ENGINE)

    def request_ended(self, model: str, endpoint: str, outcome: str) -> None:
        self._count("medha_requests", 1, model, endpoint, outcome)

    def never_tokenised(self, model: str, service_class: str, requests: int = 1) -> None:
        """Count requests that were refused before their prompt length was known; they miss their TTFT targets."""
        labels = (model, service_class, NOT_TOKENISED, "false")
        self._count("medha_request_ttft_attainment", requests, *labels)

    def snapshot(
        self,
        cards: Iterable[Announce],
        models: Mapping[str, KnownModel],
        *,
        requests_open: int,
        sequences_open: int,
        sequences_waiting: int,
        waiting_by_model: dict[str, int],
        connections_open: int,
        bodies_bytes: int,
    ) -> None:
        """Set the gauges just before they are read; those of replicas that have gone disappear."""
        self._set("medha_router_requests_open", requests_open)
        self._set("medha_router_sequences_open", sequences_open)
        self._set("medha_router_sequences_waiting", sequences_waiting)
        self._set("medha_router_http_connections", connections_open)
        self._set("medha_router_body_bytes", bodies_bytes)
        for name, collector in self._metrics.items():
            if isinstance(collector, Gauge) and name.startswith(
                ("medha_replica_", "medha_router_replicas", "vllm:")
            ):
                collector.clear()
        states = {(model, state): 0 for model in models for state in _STATES}
        for model, known in models.items():
            self._begin_refusals(model, known)
            if known.desired_replicas is not None:
                self._set("medha_router_replicas_desired", known.desired_replicas, model)
        for card in cards:
            used = 1 - card.kv_tokens_free / card.kv_tokens_total if card.kv_tokens_total else 0.0
            where = (card.model, card.replica)
            self._set("medha_replica_sequences_running", card.running, *where)
            self._set("medha_replica_sequences_waiting", card.waiting, *where)
            self._set("medha_replica_kv_used_ratio", used, *where)
            self._set("medha_replica_pending_prefill_seconds", card.pending_prefill_seconds, *where)
            self._set("vllm:num_requests_running", card.running, *where)
            self._set("vllm:num_requests_waiting", card.waiting, *where)
            self._set("vllm:kv_cache_usage_perc", used, *where)
            state = "draining" if card.draining else "ready" if card.ready else "starting"
            states[card.model, state] = states.get((card.model, state), 0) + 1
        for (model, state), count in states.items():
            self._set("medha_router_replicas", count, model, state)
        for model, count in waiting_by_model.items():
            self._set("vllm:num_requests_waiting", count, model, _ENGINE)

    def _begin_refusals(self, model: str, known: KnownModel) -> None:
        """Export the counters of refusals from 0 on: Prometheus does not see the first increase of a new series."""
        for endpoint in ("chat", "completions"):
            self._count("medha_requests", 0, model, endpoint, "unavailable")
        for service_class in known.service_classes:
            self.never_tokenised(model, service_class, 0)
