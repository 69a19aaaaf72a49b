"""Write Grafana's dashboards: `python dashboards/generate.py FOLDER ...`, run by `make gen`.

A dashboard is a list of rows of panels, each panel a question in one sentence and PromQL over the metric catalogue.
Times are `$__rate_interval`, so that any scrape interval works.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """A graph has the question that it answers, its unit as Grafana spells it, and a query for each line."""

    title: str
    asks: str
    unit: str
    queries: dict[str, str]
    """Legend -> PromQL."""
    kind: str = "timeseries"
    steps: tuple[tuple[str, float | None], ...] = ()
    """Colours and the values from which they hold."""
    minimum: int | None = 0
    """Least value of the axis where the unit is a share; None: it may be negative, and follows the data."""


@dataclass(frozen=True)
class Dashboard:
    """A page of Grafana."""

    name: str
    title: str
    says: str
    rows: dict[str, list[Panel]]
    variables: dict[str, str] = field(default_factory=dict)
    """Name -> query for its values."""

    def document(self) -> dict[str, Any]:
        """Return the document that Grafana imports."""
        return {
            "uid": f"medha-{self.name}",
            "title": f"Medha / {self.title}",
            "description": self.says,
            "tags": ["medha"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {"list": [_source(), *(_variable(*entry) for entry in self.variables.items())]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[dict[str, Any]]:
        panels: list[dict[str, Any]] = []
        top = 0
        for title, row in self.rows.items():
            position = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
            panels.append(
                {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": position, "panels": []}
            )
            top += 1
            for index, panel in enumerate(row):
                line, column = divmod(index, _COLUMNS // _WIDTH)
                position = {"x": column * _WIDTH, "y": top + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
                panels.append(_panel(len(panels) + 1, panel, position))
            top += -(-len(row) // (_COLUMNS // _WIDTH)) * _HEIGHT
        return panels


def _panel(number: int, panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        defaults["custom"] = {"fillOpacity": 8, "showPoints": "never"}
    if panel.unit == "percentunit":
        defaults |= {"max": 1} if panel.minimum is None else {"min": panel.minimum, "max": 1}
    if panel.steps:
        steps = [{"color": color, "value": value} for color, value in panel.steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    options: dict[str, Any] = {"legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.asks,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.replace("_", " ").capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


# --- the dashboards' queries -----------------------------------------------------------------------------

_GOOD = (("red", None), ("orange", 0.9), ("green", 0.95))


def _quantiles(
    metric: str, where: str, by: str = "", shares: tuple[float, ...] = (0.5, 0.99)
) -> dict[str, str]:
    """Return legend -> query for a quantile of a histogram, for each value of the label `by`."""
    named = f" {{{{{by}}}}}" if by else ""
    grouped = f"le, {by}" if by else "le"
    inner = f"sum by ({grouped}) (rate({metric}_bucket{where}[$__rate_interval]))"
    return {f"p{share * 100:g}{named}": f"histogram_quantile({share}, {inner})" for share in shares}


def _rate(metric: str, where: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def _share(metric: str, where: str, by: str, window: str = "$__rate_interval") -> str:
    """Return the query for the share of requests that met their target: 0 if all missed it, none without requests."""
    met = where.replace("}", ', met="true"}')
    every = f"sum by ({by}) (rate({metric}{where}[{window}]))"
    return f"(sum by ({by}) (rate({metric}{met}[{window}])) or 0 * {every}) / {every}"


_R = '{namespace=~"$namespace", model=~"$model"}'
_N = '{namespace=~"$namespace"}'
_TTFT, _TPOT = "medha_request_ttft_attainment_total", "medha_request_tpot_attainment_total"


def _slack() -> dict[str, str]:
    """Return legend -> query for what is left of its target when a request's first token comes, as a share of the target.

    It is 1 minus TTFT divided by the target, so the least slack belongs to the largest quotient.
    """
    quotients = _quantiles("medha_request_ttft_target_ratio", _R, "", (0.99, 0.5))
    return {
        legend: f"1 - {query}"
        for legend, query in zip(("the least 1 %", "median"), quotients.values(), strict=True)
    }


SLO = Dashboard(
    name="slo",
    title="SLO",
    says="Shows whether requests meet their targets, and what prevents it.",
    variables={
        "namespace": "label_values(medha_requests_total, namespace)",
        "model": 'label_values(medha_requests_total{namespace=~"$namespace"}, model)',
    },
    rows={
        "Attainment": [
            Panel("First tokens in time", "Share of requests whose first token met its target.", "percentunit", {"": _share(_TTFT, _R, "", "$__range")}, "stat", _GOOD),
            Panel("Output tokens in time", "Share of requests whose time per output token met its target.", "percentunit", {"": _share(_TPOT, _R, "", "$__range")}, "stat", _GOOD),
            Panel("Budget spent, over one hour", "Misses divided by the misses that an objective of 95 % allows. Above 14.4, a month's budget is spent in two days.", "short", {"first tokens": f"(1 - ({_share(_TTFT, _R, 'model', '1h')})) / 0.05", "output tokens": f"(1 - ({_share(_TPOT, _R, 'model', '1h')})) / 0.05"}),
            Panel("First tokens in time, by class", "Which service class misses its target?", "percentunit", {"{{service_class}}": _share(_TTFT, _R, "service_class")}),
            Panel("First tokens in time, by length of prompt", "Do long prompts wait behind short ones, or short behind long?", "percentunit", {"{{prompt_tokens}}": _share(_TTFT, _R, "prompt_tokens")}),
            Panel("Output tokens in time, by class", "Do prefills slow down running answers?", "percentunit", {"{{service_class}}": _share(_TPOT, _R, "service_class")}),
            Panel("TTFT divided by its target", "1 is just in time. Plain seconds mean little if prompt lengths differ a thousandfold.", "short", _quantiles("medha_request_ttft_target_ratio", _R, "service_class")),
            Panel("TTFT", "Time to first token.", "s", _quantiles("medha_request_ttft_seconds", _R, "service_class")),
            Panel("TPOT", "Mean time per output token of whole sequences.", "s", _quantiles("medha_request_tpot_seconds", _R, "service_class")),
        ],
        "Traffic": [
            Panel("Requests", "How do requests end?", "reqps", {"{{outcome}}": _rate("medha_requests_total", _R, "outcome")}),
            Panel("Tokens", "How much work arrives, and how much of it is cached?", "short", {"prompt": f"sum(rate(medha_prompt_tokens_total{_R}[$__rate_interval]))", "prompt, cached": f"sum(rate(medha_cached_prompt_tokens_total{_R}[$__rate_interval]))", "output": f"sum(rate(medha_output_tokens_total{_R}[$__rate_interval]))"}),
            Panel("In the router", "Do requests wait for a replica?", "short", {"requests": f"sum(medha_router_requests_open{_N})", "sequences": f"sum(medha_router_sequences_open{_N})", "sequences that wait": f"sum(medha_router_sequences_waiting{_N})"}),
        ],
        "Replicas": [
            Panel("Replicas", "How many replicas can serve, and how many should?", "short", {"{{model}} {{state}}": f"max by (model, state) (medha_router_replicas{_R})", "{{model}} wanted": f"max by (model) (medha_router_replicas_desired{_R})"}),
            Panel("Replicas needed", "How many replicas does the load need, and for what?", "short", {"{{model}} {{reason}}": f"sum by (model, reason) (medha_deployment_desired_replicas{_R})"}),
            Panel("Missed deadlines, predicted", "By how many seconds will requests that wait miss their targets, in sum?", "s", {"{{model}}": f"sum by (model) (medha_deployment_missed_deadline_seconds_predicted{_R})"}),
            Panel("KV in use", "Is memory the bottleneck?", "percentunit", {"{{replica}}": f"max by (replica) (medha_replica_kv_used_ratio{_R})"}),
            Panel("Prefill ahead", "How long would a new prompt wait?", "s", {"{{replica}}": f"max by (replica) (medha_replica_pending_prefill_seconds{_R})"}),
            Panel("Sequences", "How many run, and how many wait for KV?", "short", {"{{replica}} running": f"max by (replica) (medha_replica_sequences_running{_R})", "{{replica}} waiting": f"max by (replica) (medha_replica_sequences_waiting{_R})"}),
            Panel("Tokenising", "Does the router itself delay requests?", "s", _quantiles("medha_router_tokenize_seconds", _N, "place")),
        ],
        "Deadlines": [
            Panel("Short prompts beside long ones", "Do short requests wait while a long prefill is in flight on their replica? The two pairs of lines should be close.", "s", _quantiles("medha_short_prompt_ttft_seconds", _R, "beside_long")),
            Panel("Slack at the first token", "Share of its target that a request has left when its first token comes. Below 0, it is late.", "percentunit", _slack(), minimum=None),
            Panel("First token after forwarding", "When was the first token predicted, from the replica's load when the request was forwarded, and when did it come?", "s", {f"{legend} observed": query for legend, query in _quantiles("medha_forwarded_ttft_observed_seconds", _R).items()} | {f"{legend} predicted": query for legend, query in _quantiles("medha_forwarded_ttft_predicted_seconds", _R).items()}),
            Panel("First token, observed divided by predicted", "For which prompts does the router expect too much or too little? More urgent requests that arrive later, and a wait for KV, bring them above 1.", "short", _quantiles("medha_forwarded_ttft_prediction_error_ratio", _R, "prompt_tokens", (0.5,))),
        ],
        "Queue": [
            Panel("Waiting in the router, by class", "Which class waits for a replica with room?", "short", {"{{model}} {{service_class}}": f"sum by (model, service_class) (medha_router_sequences_waiting{_R})"}),
            Panel("Waiting in the router, by API key", "Whose requests wait?", "short", {"{{key}} {{service_class}}": f"sum by (key, service_class) (medha_key_sequences_waiting{_N})"}),
            Panel("First tokens in time, by API key", "Does the load of one key make another's requests late?", "percentunit", {"{{key}}": _share("medha_key_ttft_attainment_total", _N, "key")}),
        ],
        "Failovers": [
            Panel("Submitted again", "Are replicas or ranks lost, or are requests refused?", "short", {"{{reason}}": _rate("medha_router_resubmissions_total", _R, "reason")}),
            Panel("Pauses of streams that continued", "How long does a client see nothing when its stream leaves a replica?", "s", _quantiles("medha_stream_pause_seconds", _R, "resumed")),
            Panel("Streams that continued", "Why did they leave their replica, and where did they continue?", "short", {"{{reason}} {{resumed}}": _rate("medha_stream_pause_seconds_count", _R, "reason, resumed")}),
        ],
        "Links": [
            Panel("Messages dropped", "Do versions or clocks disagree?", "short", {"{{link}} {{reason}}": _rate("medha_router_dropped_messages_total", _N, "link, reason")}),
            Panel("Connections refused", "Does a peer without a valid token try to connect?", "short", {"{{link}}": _rate("medha_router_refused_connections_total", _N, "link")}),
        ],
    },
)  # fmt: skip

_P = '{namespace=~"$namespace", pod=~"$pod"}'

REPLICA = Dashboard(
    name="replica",
    title="Replica",
    says="Shows what the controller of a replica decides, and how well it predicts.",
    variables={
        "namespace": "label_values(medha_steps_total, namespace)",
        "pod": 'label_values(medha_steps_total{namespace=~"$namespace"}, pod)',
    },
    rows={
        "Steps": [
            Panel("Steps", "How many steps does it run per second?", "short", {"{{pod}}": _rate("medha_steps_total", _P, "pod")}),
            Panel("Duration of a step", "How long do steps take, and how long were they expected to take?", "s", {f"{legend} observed": query for legend, query in _quantiles("medha_step_observed_seconds", _P).items()} | {f"{legend} predicted": query for legend, query in _quantiles("medha_step_predicted_seconds", _P).items()}),
            Panel("Observed divided by predicted", "Are predictions correct? Near 1 they are.", "short", _quantiles("medha_step_prediction_error_ratio", _P, "pod", (0.1, 0.5, 0.9))),
            Panel("Tokens of a step", "How are prefill and decode mixed?", "short", _quantiles("medha_step_tokens", _P, "phase")),
            Panel("Sequences of a step", "How many sequences share a step?", "short", _quantiles("medha_step_sequences", _P, "phase")),
            Panel("Chunk of a prefill", "How large are prefill chunks?", "short", _quantiles("medha_chunk_tokens", _P)),
            Panel("Slack of prefills", "Below 0, the first token will be late.", "s", _quantiles("medha_prefill_slack_seconds", _P, "service_class", (0.01, 0.5))),
            Panel("Decodes too slow", "Which share of steps breaks a TPOT target?", "percentunit", {"{{pod}}": f"{_rate('medha_decode_tpot_misses_total', _P, 'pod')} / {_rate('medha_steps_total', _P, 'pod')}"}),
            Panel("Time to decide", "Does the controller delay the ranks?", "s", _quantiles("medha_controller_handle_seconds", _P, "pod")),
        ],
        "Memory": [
            Panel("KV in use", "Is the KV pool full?", "percentunit", {"{{pod}}": f"max by (pod) (medha_kv_used_ratio{_P})"}),
            Panel("KV blocks", "How many are free, cached, reserved and used?", "short", {"{{lane}} {{state}}": f"sum by (lane, state) (medha_kv_blocks{_P})"}),
            Panel("Blocks of windows", "In layers that free KV before their windows: how many blocks are free, keep windows of cached prefixes, and are held?", "short", {"{{lane}} {{state}}": f"sum by (lane, state) (medha_kv_window_blocks{_P})"}),
            Panel("Held for growth", "How many free blocks are held for answers that outgrow the expected output?", "short", {"{{pod}}": f"max by (pod) (medha_kv_growth_blocks{_P})"}),
            Panel("Output, divided by expected", "Is KV reserved for about as much output as comes? Above 1, sequences need more than they reserved.", "short", _quantiles("medha_output_expected_ratio", _P, "service_class", (0.5, 0.9, 0.99))),
            Panel("Stepped aside", "How often does a sequence give its KV back, and compute it again, because others have outgrown theirs?", "short", {"{{service_class}}": _rate("medha_sequences_stepped_aside_total", _P, "service_class")}),
            Panel("Prefix cache", "Which share of prompt tokens was not computed again?", "percentunit", {"{{pod}}": f"{_rate('medha_prefix_cache_hit_tokens_total', _P, 'pod')} / {_rate('medha_prefix_cache_queried_tokens_total', _P, 'pod')}"}),
        ],
        "KV tiers": [
            Panel("Hits", "How many sequences get KV from each tier in a second, and how many prompts are looked up in the store?", "short", {"{{pod}} host": _rate("medha_host_tier_hits_total", _P, "pod"), "{{pod}} disk": _rate("medha_disk_tier_hits_total", _P, "pod"), "{{pod}} peers": _rate("medha_peer_kv_hits_total", _P, "pod"), "{{pod}} store": _rate("medha_store_tier_hits_total", _P, "pod"), "{{pod}} store lookups": _rate("medha_store_tier_lookups_total", _P, "pod")}),
            Panel("Prefill avoided", "How many seconds of prefill does KV of each tier replace in a second?", "short", {"{{pod}} {{tier}}": _rate("medha_avoided_prefill_seconds_total", _P, "pod, tier")}),
            Panel("Fetched tokens", "How many prompt tokens are fetched in a second instead of being computed, and how many of streams that have moved here?", "short", {"{{pod}}": _rate("medha_host_tier_fetched_tokens_total", _P, "pod"), "{{pod}} moved": _rate("medha_peer_kv_resumed_tokens_total", _P, "pod")}),
            Panel("Reads, per GiB", "How long is a rank predicted to read a GiB of each tier, besides the latency?", "s", {"{{pod}} {{tier}}": f"max by (pod, tier) (medha_tier_read_seconds_per_gib{_P})"}),
            Panel("Latency of reads", "How long is a read of a file, of an object or of another replica predicted to take, however small it is?", "s", {"{{pod}} {{tier}}": f"max by (pod, tier) (medha_tier_read_latency_seconds{_P})"}),
            Panel("Host tier", "How much KV do the ranks of a lane hold in host memory?", "bytes", {"{{pod}} {{lane}}": f"max by (pod, lane) (medha_host_tier_bytes{_P})"}),
            Panel("Copies", "How much KV is fetched from host memory, and offloaded to it?", "Bps", {"{{pod}} fetched": _rate("medha_host_tier_fetched_bytes_total", _P, "pod"), "{{pod}} offloaded": _rate("medha_host_tier_offloaded_bytes_total", _P, "pod")}),
            Panel("Swapped", "How many sequences have stepped aside, how often do they, and how often for the deadline of another one?", "short", {"{{pod}} wait": f"sum by (pod) (medha_sequences_swapped{_P})", "{{pod}} {{direction}}": _rate("medha_swaps_total", _P, "pod, direction"), "{{pod}} for deadlines": _rate("medha_long_swaps_total", _P, "pod")}),
            Panel("Swapped KV", "How much KV is copied for sequences that step aside and come back?", "Bps", {"{{pod}} {{direction}}": _rate("medha_swap_bytes_total", _P, "pod, direction")}),
            Panel("Time of swaps", "Which share of the time do these copies take?", "percentunit", {"{{pod}} {{direction}}": _rate("medha_swap_seconds_total", _P, "pod, direction")}),
            Panel("Disk tier", "How much KV do the ranks of a lane keep in files, and how much waits to be written?", "bytes", {"{{pod}} {{lane}}": f"max by (pod, lane) (medha_disk_tier_bytes{_P})", "{{pod}} {{lane}} waits": f"max by (pod, lane) (medha_disk_tier_waiting_bytes{_P})"}),
            Panel("Files", "How much KV is read from files, written to them, and not written because the disk is too slow?", "Bps", {"{{pod}} loaded": _rate("medha_disk_tier_loaded_bytes_total", _P, "pod"), "{{pod}} written": _rate("medha_disk_tier_written_bytes_total", _P, "pod"), "{{pod}} skipped": _rate("medha_disk_tier_skipped_bytes_total", _P, "pod")}),
            Panel("Disk failures", "How many files could not be written or read?", "short", {"{{pod}}": _rate("medha_disk_tier_failures_total", _P, "pod"), "{{pod}} {{lane}} is off": f"max by (pod, lane) (medha_disk_tier_off{_P})"}),
            Panel("Peers", "How much KV is read from other replicas, and offered to them?", "Bps", {"{{pod}} loaded": _rate("medha_peer_kv_loaded_bytes_total", _P, "pod"), "{{pod}} offered": _rate("medha_peer_kv_offered_bytes_total", _P, "pod")}),
            Panel("Peer failures", "How many reads of other replicas' KV fail?", "short", {"{{pod}}": _rate("medha_peer_kv_failures_total", _P, "pod")}),
            Panel("Store", "How much KV is read from the store that replicas share, written to it, found there already, and not written?", "Bps", {"{{pod}} loaded": _rate("medha_store_tier_loaded_bytes_total", _P, "pod"), "{{pod}} written": _rate("medha_store_tier_written_bytes_total", _P, "pod"), "{{pod}} found": _rate("medha_store_tier_found_bytes_total", _P, "pod"), "{{pod}} skipped": _rate("medha_store_tier_skipped_bytes_total", _P, "pod")}),
            Panel("Store failures", "How many objects could not be written or read, and is the store left alone?", "short", {"{{pod}}": _rate("medha_store_tier_failures_total", _P, "pod"), "{{pod}} rests": f"max by (pod) (medha_store_tier_rests{_P})"}),
        ],
        "Streamed KV": [
            Panel("Host memory of streamed KV", "How much KV of requests larger than the KV pools lies in host memory, on each rank of a lane?", "bytes", {"{{pod}} {{lane}}": f"max by (pod, lane) (medha_streaming_bytes{_P})"}),
            Panel("Reads of streamed KV", "How much of it do steps read?", "Bps", {"{{pod}}": _rate("medha_streamed_bytes_total", _P, "pod")}),
            Panel("Streamed sequences", "How many such sequences begin in a second?", "short", {"{{pod}}": _rate("medha_streamed_sequences_total", _P, "pod")}),
        ],
        "Sequences": [
            Panel("Sequences", "How many run, and how many wait for KV?", "short", {"{{pod}} running": f"sum by (pod) (medha_sequences_running{_P})", "{{pod}} waiting": f"sum by (pod) (medha_sequences_waiting{_P})"}),
            Panel("Prefill ahead", "How long would a new prompt wait?", "s", {"{{pod}}": f"max by (pod) (medha_pending_prefill_seconds{_P})"}),
            Panel("Ended", "How do sequences end?", "short", {"{{reason}}": _rate("medha_sequences_finished_total", _P, "reason")}),
            Panel("Refused", "Why are submissions refused?", "short", {"{{reason}}": _rate("medha_sequences_refused_total", _P, "reason")}),
            Panel("Epoch", "It increases when ranks were lost and a new epoch began.", "short", {"{{pod}}": f"max by (pod) (medha_epoch{_P})"}),
            Panel("Messages dropped", "Do versions or clocks disagree?", "short", {"{{link}} {{reason}}": _rate("medha_dropped_messages_total", _P, "link, reason")}),
        ],
    },
)  # fmt: skip

_K = '{namespace=~"$namespace", kind=~"$kind"}'
_WHICH = "kind, resource_namespace, resource"
_HOLDS = (
    f'max by ({_WHICH}) (medha_operator_condition{{namespace=~"$namespace", kind=~"$kind", condition="%s"}})'
)
_WHY = f'max by ({_WHICH}, reason) (medha_operator_reason{{namespace=~"$namespace", kind=~"$kind", condition="Ready"}})'

OPERATOR = Dashboard(
    name="operator",
    title="Operator",
    says="Shows whether replicas become what was asked for, and how fast.",
    variables={
        "namespace": "label_values(medha_operator_leading, namespace)",
        "kind": 'label_values(medha_operator_condition{namespace=~"$namespace"}, kind)',
    },
    rows={
        "Resources": [
            Panel("Ready", "How many resources are ready, and why are the others not?", "short", {"{{kind}} ready": f"sum by (kind) ({_HOLDS % 'Ready'})", "{{kind}} {{reason}}": f"count by (kind, reason) ({_WHY})"}),
            Panel("Not ready", "Which resources are not ready, and why?", "short", {"{{kind}} {{resource_namespace}}/{{resource}} {{reason}}": _WHY}),
            Panel("Stalled", "These resources need a person's action.", "short", {"{{kind}} {{resource_namespace}}/{{resource}}": f"{_HOLDS % 'Stalled'} == 1"}),
            Panel("From change to ready", "How long does a change take until it serves?", "s", _quantiles("medha_operator_ready_seconds", _K, "kind", (0.5, 0.9, 0.99))),
        ],
        "Work": [
            Panel("Reconciles", "How often are resources reconciled, and with which outcome?", "ops", {"{{kind}} {{outcome}}": _rate("medha_operator_reconcile_seconds_count", _K, "kind, outcome")}),
            Panel("Duration of a reconcile", "Observing, planning, and every call to the API server.", "s", _quantiles("medha_operator_reconcile_seconds", _K, "outcome")),
            Panel("Errors", "Which reconciles fail, and why? Conflicts are retried and need no action.", "ops", {"{{kind}} {{reason}}": _rate("medha_operator_reconcile_errors_total", _K, "kind, reason")}),
            Panel("Queue", "How many resources wait to be reconciled?", "short", {"resources": f"sum(medha_operator_queue_keys{_N})"}),
            Panel("Time in the queue", "How long do they wait?", "s", _quantiles("medha_operator_queue_seconds", _N)),
            Panel("Writes", "Writes to the API server. At rest there are none.", "ops", {"{{verb}}": _rate("medha_operator_writes_total", _N, "verb")}),
            Panel("Leading", "Which operator holds the Lease? It is always exactly one.", "short", {"{{pod}}": f"max by (pod) (medha_operator_leading{_N})"}),
        ],
    },
)  # fmt: skip

_D = '{namespace=~"$namespace", pod=~"$pod", rank=~"$rank"}'
_RANK = "{{pod}} rank {{rank}}"


def _of_peak(total: str, peak: str) -> str:
    """Return the query for the rate of a rank's total as a share of its device's peak."""
    return f"{_rate(total, _D, 'namespace, pod, rank')} / max by (namespace, pod, rank) ({peak}{_D})"


def _state(metric: str, label: str = "", value: str = "") -> str:
    """Return the query for a state of ranks, with one value of a label if there is one."""
    where = _D.replace("}", f', {label}="{value}"}}') if label else _D
    return f"max by (pod, rank) ({metric}{where})"


def _step_share() -> str:
    every = _rate("medha_rank_step_seconds_total", _D, "namespace, pod, part")
    return f"{every} / on (namespace, pod) group_left () sum by (namespace, pod) ({every})"


DEVICES = Dashboard(
    name="devices",
    title="Devices",
    says="Shows where the time of ranks goes, and how well their devices are used.",
    variables={
        "namespace": "label_values(medha_rank_info, namespace)",
        "pod": 'label_values(medha_rank_info{namespace=~"$namespace"}, pod)',
        "rank": 'label_values(medha_rank_info{namespace=~"$namespace", pod=~"$pod"}, rank)',
    },
    rows={
        "Steps of ranks": [
            Panel("Parts of a step", "Where does the time of steps go?", "percentunit", {"{{pod}} {{part}}": _step_share()}),
            Panel("Time of a step", "How long does a step of a rank take on average?", "s", {_RANK: f"{_rate('medha_rank_step_seconds_total', _D, 'pod, rank')} / {_rate('medha_rank_steps_total', _D, 'pod, rank')}"}),
            Panel("Prepared ahead", "In which share of the time does a rank prepare steps while it runs others?", "percentunit", {_RANK: _rate("medha_rank_ahead_seconds_total", _D, "pod, rank")}),
            Panel("Busy", "Which share of the time does a rank run steps? The rest of the time it is idle.", "percentunit", {_RANK: _rate("medha_rank_step_seconds_total", _D, "pod, rank")}),
            Panel("Waiting for others", "Which share of the time does a rank wait for stages, tensor ranks and lanes?", "percentunit", {_RANK: _rate("medha_rank_step_seconds_total", _D.replace("}", ', part=~"receive|all_reduce|gather|exchange"}'), "pod, rank")}),
            Panel("MFU", "Which share of the device's peak FLOP/s do steps need? Idle time counts.", "percentunit", {_RANK: _of_peak("medha_rank_estimated_flops_total", "medha_rank_peak_flops_per_second")}),
            Panel("MBU", "Which share of the device's peak memory rate do steps need? Idle time counts.", "percentunit", {_RANK: _of_peak("medha_rank_estimated_read_bytes_total", "medha_rank_peak_bytes_per_second")}),
            Panel("FLOP/s", "How much do steps compute? This is there without a known peak, too.", "flops", {_RANK: _rate("medha_rank_estimated_flops_total", _D, "pod, rank")}),
        ],
        "Devices": [
            Panel("Memory", "How much of the device's memory is taken?", "bytes", {f"{_RANK} used": _state("medha_rank_memory_bytes", "state", "used"), f"{_RANK} free": _state("medha_rank_memory_bytes", "state", "free")}),
            Panel("Throttled", "Which GPUs run below their clocks, and why? The power limit is usual under full load.", "short", {f"{_RANK} {{{{reason}}}}": f"max by (pod, rank, reason) (medha_rank_throttled{_D}) == 1"}),
            Panel("SM clock", "Does one GPU run slower than the others?", "hertz", {_RANK: _state("medha_rank_clock_hertz", "clock", "sm")}),
            Panel("Temperature", "Which GPUs are hot?", "celsius", {_RANK: _state("medha_rank_temperature_celsius")}),
            Panel("Power", "How much power do GPUs draw, and how much may they?", "watt", {_RANK: _state("medha_rank_power_watts"), f"{_RANK} limit": _state("medha_rank_power_limit_watts")}),
            Panel("Utilisation", "Which share of the time does any kernel run?", "percentunit", {_RANK: _state("medha_rank_utilisation_ratio", "unit", "compute")}),
            Panel("Errors", "Do GPUs report errors (Xid)?", "short", {f"{_RANK} {{{{cause}}}}": f"sum by (pod, rank, cause) (increase(medha_rank_xid_errors_total{_D}[$__rate_interval]))"}),
            Panel("Last error", "Which Xid did a GPU report last, of each cause?", "none", {f"{_RANK} {{{{cause}}}}": f"max by (pod, rank, cause) (medha_rank_last_xid{_D})"}),
        ],
    },
)  # fmt: skip

DASHBOARDS = (SLO, REPLICA, DEVICES, OPERATOR)


def files() -> dict[str, str]:
    """Return file name -> content that should be there."""
    return {f"{each.name}.json": json.dumps(each.document(), indent=1) + "\n" for each in DASHBOARDS}


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        for name, text in files().items():
            (folder / name).write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {folder / name}\n")
