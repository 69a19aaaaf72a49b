"""Metrics of the catalogue, counted from the controller's events and commands.

The controller itself counts nothing: the observer sees each event, the commands that it led to, and the state
after it. The simulator can use it in the same way, to be shown on the same dashboards.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from medha.metrics import CONTROLLER_METRICS, Metric
from medha.scheduler.controller import ReplicaController
from medha.scheduler.status import written_blocks
from medha.wire.messages import Cancel, ControllerCommand, ControllerEvent, Done, Emit, Failed, Refused, Step


@dataclass(frozen=True, slots=True)
class _Launched:
    step: Step
    at: float
    prefill: dict[str, int]  # prefill tokens by sequence


class Observer:
    """Counts the metrics of one replica controller in a given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        collectors = {metric.name: _collector(metric, registry) for metric in CONTROLLER_METRICS}
        self._counters = {name: one for name, one in collectors.items() if isinstance(one, Counter)}
        self._gauges = {name: one for name, one in collectors.items() if isinstance(one, Gauge)}
        self._histograms = {name: one for name, one in collectors.items() if isinstance(one, Histogram)}
        self._totals = Counted[str]()
        self._launched: dict[int, _Launched] = {}
        self._free_at: dict[int, float] = {}  # when each lane ended its last step

    def observe(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        now: float,
        handle_seconds: float,
    ) -> None:
        """Count one event and the commands that it led to."""
        self._histograms["medha_controller_handle_seconds"].observe(handle_seconds)
        match event:
            case Done():
                self._done(event, core, now)
            case Cancel():
                self._finished("cancelled")
        for command in commands:
            match command:
                case Step():
                    self._launch(command, core, now)
                case Emit(finish_reason=reason) if reason is not None:
                    self._finished(reason)
                case Failed(reason=reason):
                    self._finished(reason)
                case Refused(reason=reason):
                    self._counters["medha_sequences_refused"].labels(reason=reason).inc()

    def _launch(self, step: Step, core: ReplicaController, now: float) -> None:
        prefill: dict[str, int] = {}
        decodes = 0
        for entry in step.entries:
            request = core.find(entry.id)
            assert request is not None, f"{entry.id} runs and is not known"
            if request.is_decoding:
                decodes += 1
                continue
            is_first = entry.id not in prefill  # other lanes may compute parts of the same chunk
            prefill[entry.id] = prefill.get(entry.id, 0) + entry.token_count
            if not is_first:
                continue
            self._histograms["medha_prefill_slack_seconds"].labels(
                service_class=request.submit.service_class
            ).observe(core.slack_seconds(request, now))
        for tokens in prefill.values():
            self._histograms["medha_chunk_tokens"].observe(tokens)
        if step.entries:
            for phase, tokens, sequences in (
                ("prefill", sum(prefill.values()), len(prefill)),
                ("decode", decodes, decodes),
            ):
                if sequences:
                    self._histograms["medha_step_tokens"].labels(phase=phase).observe(tokens)
                    self._histograms["medha_step_sequences"].labels(phase=phase).observe(sequences)
            if core.packed(step).misses_tpot:
                self._counters["medha_decode_tpot_misses"].inc()
        self._launched[step.step_id] = _Launched(step, now, prefill)

    def _done(self, done: Done, core: ReplicaController, now: float) -> None:
        launched = self._launched.pop(done.step_id)
        begun_at = launched.at
        if core.config.topology.stream == 1:  # launched ahead, it may have waited for the step before it
            begun_at = max(begun_at, *(self._free_at.get(lane, begun_at) for lane in launched.step.lanes))
        self._free_at |= dict.fromkeys(launched.step.lanes, now)
        self._counters["medha_steps"].inc()
        if not launched.step.entries:
            return  # bookkeeping only: nothing was computed, nothing predicted
        observed, predicted = now - begun_at, launched.step.predicted_seconds
        self._histograms["medha_step_observed_seconds"].observe(observed)
        self._histograms["medha_step_predicted_seconds"].observe(predicted)
        if predicted > 0:
            self._histograms["medha_step_prediction_error_ratio"].observe(observed / predicted)

    def _finished(self, reason: str) -> None:
        self._counters["medha_sequences_finished"].labels(reason=reason).inc()

    def dropped(self, link: str, reason: str, messages: int = 1) -> None:
        """Count messages that were dropped, here or by ranks."""
        self._counters["medha_dropped_messages"].labels(link=link, reason=reason).inc(messages)

    def refused(self, link: str, connections: int) -> None:
        """Count peers that were not let in."""
        self._counters["medha_refused_connections"].labels(link=link).inc(connections)

    def state(self, core: ReplicaController) -> None:
        """Set the gauges.

        This visits every request, so drivers call it only when they announce their load.
        """
        load, pools = core.load(), core.pools
        written = written_blocks(core, core.requests())
        for lane in range(pools.lanes):
            ledger = pools.ledger(lane)
            used = min(ledger.held_blocks, written[lane])  # `written` counts a shared block more than once
            for state, blocks in (
                ("free", ledger.free_blocks),
                ("cached", ledger.remembered_blocks),
                ("used", used),
                ("reserved", ledger.held_blocks - used),
            ):
                self._gauges["medha_kv_blocks"].labels(lane=str(lane), state=state).set(blocks)
        self._gauges["medha_kv_used_ratio"].set(pools.held_blocks / max(pools.blocks, 1))
        self._count_up("medha_prefix_cache_queried_tokens", pools.queried_tokens)
        self._count_up("medha_prefix_cache_hit_tokens", pools.hit_tokens)
        self._gauges["medha_sequences_running"].set(load.running)
        self._gauges["medha_sequences_waiting"].set(load.waiting)
        self._gauges["medha_pending_prefill_seconds"].set(load.pending_prefill_seconds)
        self._gauges["medha_epoch"].set(core.epoch)

    def _count_up(self, name: str, total: int) -> None:
        """Add the growth of a total that is counted elsewhere and restarts at 0 with each epoch."""
        before = self._totals[name]
        self._counters[name].inc(total - before if total >= before else total)
        self._totals[name] = total


def _collector(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind == "counter":
        return Counter(metric.name, metric.meaning, metric.labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(metric.name, metric.meaning, metric.labels, registry=registry)
    return Histogram(metric.name, metric.meaning, metric.labels, buckets=metric.buckets, registry=registry)
