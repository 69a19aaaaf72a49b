"""The router's metrics collectors, made from the catalogue in a registry that is passed in."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, get_args

from prometheus_client import CollectorRegistry

from medha.api.api_keys import owner_of_key
from medha.api.replica_role import ReplicaRole
from medha.observing.metric_catalogue import (
    KEY_METRICS,
    LOST_SPANS,
    NOT_TOKENISED,
    ROUTER_METRICS,
    SHORT_PROMPT_TOKENS,
    VLLM_ALIASES,
    prompt_length_label,
)
from medha.routing.key_limits import LIMITS
from medha.routing.known_models import KnownModel
from medha.routing.replica_demand import DemandReason, ModelWork
from medha.routing.waiting_room import ROOM_REFUSALS, RoomRefusal
from medha.wire.messages import Announce
from medha_process.collectors import Collectors
from medha_router.sequence_history import (
    LEAVE_REASONS,
    Fact,
    ForwardedFirstToken,
    Moved,
    Resubmitted,
    Resumed,
)

_ENGINE = "router"
"""The `engine` label of metrics that the router measures itself."""
_STATES = ("ready", "draining", "starting")
_CLEARED = (
    "medha_deployment_",
    "medha_replica_",
    "medha_router_replicas",
    "medha_router_waiting_room_requests",
    "medha_router_sequences_waiting",
    "medha_key_",
    "vllm:",
)
"""Beginnings of the names of gauges whose label values may go."""
_RESUMED = {True: "elsewhere", False: "same"}
"""Values of the label `resumed`, by whether a stream continued on another replica."""
_KEY_LABELS = {"limit": LIMITS, "met": ("true", "false")}
"""Values of the labels that counters of API keys have beside `key`."""

LINKS = ("control", "tokens")
"""Names of the links to replicas in metrics."""


class Observer:
    """All metrics of the router, with one method for each event."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        collectors = Collectors((*ROUTER_METRICS, *KEY_METRICS, *VLLM_ALIASES), registry)
        self._counters, self._gauges = collectors.counters, collectors.gauges
        self._histograms = collectors.histograms
        for link in LINKS:
            self.connections_refused(link, 0)  # start at 0, so that the first refusal is an increase too
        for reason in LOST_SPANS:
            self.spans_lost(reason, 0)
        for reason in ROOM_REFUSALS:
            self._count("medha_router_waiting_room_refusals", 0, reason)

        self._key_names: set[str] = set()  # those that have series
        self._token_children: dict[tuple[str, tuple[str, ...]], Any] = {}

    def _count(self, name: str, amount: float, *labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def _token_series(self, name: str, *labels: str) -> Any:
        """Return a series that each token adds to, and that is never removed: finding it takes longer than adding to it."""
        found = self._token_children.get((name, labels))
        if found is None:
            collector = self._counters.get(name) or self._histograms[name]
            found = self._token_children[name, labels] = collector.labels(*labels)
        return found

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._histograms[name]
        (histogram.labels(*labels) if labels else histogram).observe(value)

    def tokenized(self, place: str, seconds: float) -> None:
        self._observe("medha_router_tokenize_seconds", seconds, place)

    def message_dropped(self, link: str, reason: str) -> None:
        self._count("medha_router_dropped_messages", 1, link, reason)

    def spans_lost(self, reason: str, spans: int) -> None:
        """Count spans of traces that are lost; it may be called from any thread."""
        self._count("medha_router_lost_spans", spans, reason)

    def waiting_room_refused(self, reason: RoomRefusal) -> None:
        self._count("medha_router_waiting_room_refusals", 1, reason)

    def http_refused(self, reason: str) -> None:
        self._count("medha_router_http_refusals", 1, reason)

    def connections_refused(self, link: str, connections: int) -> None:
        self._count("medha_router_refused_connections", connections, link)

    def unauthenticated(self, reason: str) -> None:
        self._count("medha_router_unauthenticated_requests", 1, reason)

    def key_request(self, key: str) -> None:
        self._key_names.add(key)
        self._count("medha_key_requests", 1, key)

    def key_refused(self, key: str, limit: str) -> None:
        self._key_names.add(key)
        self._count("medha_key_refusals", 1, key, limit)

    def key_tokens(self, key: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self._key_names.add(key)
        self._count("medha_key_prompt_tokens", prompt_tokens, key)
        self._count("medha_key_output_tokens", output_tokens, key)

    def happened(self, fact: Fact) -> None:
        """Record what happened to a sequence."""
        match fact:
            case Resubmitted(model=model, reason=reason):
                self._count("medha_router_resubmissions", 1, model, reason)
            case Resumed(model=model, reason=reason, is_elsewhere=is_elsewhere):
                labels = (model, reason, _RESUMED[is_elsewhere])
                self._observe("medha_stream_pause_seconds", fact.pause_seconds, *labels)
            case Moved(model=model, tokens=tokens, read_tokens=read):
                self._count("medha_router_moved_tokens", read, model, "read")
                self._count("medha_router_moved_tokens", tokens - read, model, "computed")
            case ForwardedFirstToken(model=model, predicted_seconds=predicted, observed_seconds=observed):
                self._observe("medha_forwarded_ttft_predicted_seconds", predicted, model)
                self._observe("medha_forwarded_ttft_observed_seconds", observed, model)
                if predicted > 0:  # for a replica that announces no prefill times, nothing is predicted
                    length = prompt_length_label(fact.prompt_tokens)
                    self._observe(
                        "medha_forwarded_ttft_prediction_error_ratio", observed / predicted, model, length
                    )

    def accepted(self, model: str, prompt_tokens: int) -> None:
        self._count("medha_prompt_tokens", prompt_tokens, model)
        self._count("vllm:prompt_tokens", prompt_tokens, model, _ENGINE)

    def prompt_cached(self, model: str, prompt_tokens: int, cached_tokens: int) -> None:
        """Count the cached tokens of a prompt that got its first output token."""
        self._count("medha_cached_prompt_tokens", cached_tokens, model)
        self._count("vllm:prefix_cache_queries", prompt_tokens, model, _ENGINE)
        self._count("vllm:prefix_cache_hits", cached_tokens, model, _ENGINE)

    def output(self, model: str, tokens: int, thought_tokens: int) -> None:
        """Count output tokens, of which some are of thoughts."""
        self._token_series("medha_output_tokens", model).inc(tokens)
        self._token_series("medha_reasoning_tokens", model).inc(thought_tokens)
        self._token_series("vllm:generation_tokens", model, _ENGINE).inc(tokens)

    def key_ttft_attained(self, key: str, met: bool) -> None:
        self._key_names.add(key)
        self._count("medha_key_ttft_attainment", 1, key, str(met).lower())

    def first_token(
        self,
        model: str,
        service_class: str,
        prompt_tokens: int,
        seconds: float,
        target_seconds: float,
        *,
        is_beside_long: bool,
    ) -> None:
        """Record the first token of a request, and whether a long prefill was in flight beside it."""
        length = prompt_length_label(prompt_tokens)
        self._observe("medha_request_ttft_seconds", seconds, model, service_class)
        self._observe("vllm:time_to_first_token_seconds", seconds, model, _ENGINE)
        self._observe(
            "medha_request_ttft_target_ratio", seconds / target_seconds, model, service_class, length
        )
        self.ttft_attained(model, service_class, prompt_tokens, seconds <= target_seconds)
        if prompt_tokens <= SHORT_PROMPT_TOKENS:
            self._observe("medha_short_prompt_ttft_seconds", seconds, model, str(is_beside_long).lower())

    def ttft_attained(self, model: str, service_class: str, prompt_tokens: int, met: bool) -> None:
        length = prompt_length_label(prompt_tokens)
        self._count("medha_request_ttft_attainment", 1, model, service_class, length, str(met).lower())

    def between_tokens(self, model: str, service_class: str, seconds: float) -> None:
        self._token_series("medha_inter_token_seconds", model, service_class).observe(seconds)
        self._token_series("vllm:inter_token_latency_seconds", model, _ENGINE).observe(seconds)

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

    def _set_keys(self, open_by_key: Mapping[str, int]) -> None:
        """Set the gauges of API keys, and remove all series of keys that have gone."""
        for name in self._key_names - open_by_key.keys():
            for metric in KEY_METRICS:
                if metric.kind == "counter":
                    others = (_KEY_LABELS[label] for label in metric.labels if label != "key")
                    for values in product(*others):
                        self._counters[metric.name].remove(name, *values)
        self._key_names = set(open_by_key)
        for name, requests in open_by_key.items():
            self._set("medha_key_requests_open", requests, name)

    def snapshot(
        self,
        cards: Iterable[Announce],
        models: Mapping[str, KnownModel],
        *,
        requests_open: int,
        sequences_open: int,
        waiting: Mapping[tuple[str, str, str], int],
        connections_open: int,
        bodies_bytes: int,
        large_bodies_waiting: int,
        waiting_room_bytes: int,
        waiting_room_by_model: Mapping[str, int],
        open_by_key: Mapping[str, int],
        files_valid: Mapping[str, bool],
    ) -> None:
        """Set the gauges just before they are read; those of replicas and API keys that have gone disappear.

        `waiting` has the sequences that wait in the router, by model, service class and owner; `open_by_key` the open
        requests of each API key.
        """
        for name, gauge in self._gauges.items():
            if name.startswith(_CLEARED):
                gauge.clear()
        self._set_keys(open_by_key)
        self._set_waiting(waiting, models, open_by_key)
        for what, is_valid in files_valid.items():
            self._set("medha_router_file_valid", is_valid, what)
        self._set("medha_router_requests_open", requests_open)
        self._set("medha_router_sequences_open", sequences_open)
        self._set("medha_router_http_connections", connections_open)
        self._set("medha_router_body_bytes", bodies_bytes)
        self._set("medha_router_large_bodies_waiting", large_bodies_waiting)
        self._set("medha_router_waiting_room_bytes", waiting_room_bytes)
        states = {(model, state): 0 for model in models for state in _STATES}
        roles = {(model, role): 0 for model in models for role in get_args(ReplicaRole)}
        for model, known in models.items():
            self._begin(model, known)
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
            roles[card.model, card.role] = roles.get((card.model, card.role), 0) + (state == "ready")
        for (model, state), count in states.items():
            self._set("medha_router_replicas", count, model, state)
        for (model, role), count in roles.items():
            self._set("medha_router_replicas_by_role", count, model, role)
        for model in models:
            self._set("medha_router_waiting_room_requests", waiting_room_by_model.get(model, 0), model)

    def show_demand(self, model: str, work: ModelWork, demand: Mapping[DemandReason, float]) -> None:
        """Set the gauges by which replicas of a model are scaled; `snapshot` comes first, and clears them."""
        self._set("medha_deployment_pending_prefill_seconds", work.pending_seconds, model)
        self._set("medha_deployment_missed_deadline_seconds_predicted", work.missed_seconds, model)
        for reason, replicas in demand.items():
            self._set("medha_deployment_desired_replicas", replicas, model, reason)

    def _set_waiting(
        self,
        waiting: Mapping[tuple[str, str, str], int],
        models: Mapping[str, KnownModel],
        keys: Iterable[str],
    ) -> None:
        classes = {(model, name): 0 for model, known in models.items() for name in known.service_classes}
        by_class = Counts(classes)
        by_key = Counts({(key, name): 0 for key in keys for _, name in classes})
        by_model = Counts(dict.fromkeys(models, 0))
        key_of_owner = {owner_of_key(key): key for key in keys}
        for (model, service_class, owner), count in waiting.items():
            by_model[model] += count
            by_class[model, service_class] += count
            if owner in key_of_owner:
                by_key[key_of_owner[owner], service_class] += count
        for model, count in by_model.items():
            self._set("vllm:num_requests_waiting", count, model, _ENGINE)
        for labels, count in by_class.items():
            self._set("medha_router_sequences_waiting", count, *labels)
        for labels, count in by_key.items():
            self._set("medha_key_sequences_waiting", count, *labels)

    def _begin(self, model: str, known: KnownModel) -> None:
        """Export counts of what is rare from 0 on: Prometheus does not see the first increase of a new series."""
        pauses = self._histograms["medha_stream_pause_seconds"]
        for reason in LEAVE_REASONS:
            self._count("medha_router_resubmissions", 0, model, reason)
            for where in _RESUMED.values():
                pauses.labels(model, reason, where)
        for source in ("read", "computed"):
            self._count("medha_router_moved_tokens", 0, model, source)
        for endpoint in ("chat", "completions", "responses"):
            self._count("medha_requests", 0, model, endpoint, "unavailable")
        for service_class in known.service_classes:
            self.never_tokenised(model, service_class, 0)
