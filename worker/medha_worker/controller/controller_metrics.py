"""Metrics of the catalogue, counted from the facts of a controller's history (`medha.scheduler.history`)."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client import CollectorRegistry

from medha.kv.store_tier import StoreCounts
from medha.observing.metric_catalogue import CONTROLLER_METRICS, LOST_SPANS
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Completed, Facts, Launched, OpenRequest
from medha.scheduler.status_report import kv_by_lane
from medha.scheduler.tier_report import Tier, read_times
from medha_process.collectors import Collectors


class Observer:
    """Counts the metrics of one replica controller in a given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        collectors = Collectors(CONTROLLER_METRICS, registry)
        self._counters, self._gauges = collectors.counters, collectors.gauges
        self._histograms = collectors.histograms
        self._totals = defaultdict[tuple[str, ...], float](float)
        self._tiers = set[Tier]()  # that have gauges of their reads
        for reason in LOST_SPANS:
            self.spans_lost(reason, 0)  # from 0 on, so that the first loss is an increase

    def observe(self, facts: Facts, handle_seconds: float) -> None:
        """Count the facts of one event, which the controller took `handle_seconds` to handle."""
        self._histograms["medha_controller_handle_seconds"].observe(handle_seconds)
        if facts.completed is not None:
            self._counters["medha_steps"].inc()
            if facts.completed.launched.step.entries:  # without entries, nothing was computed or predicted
                self._completed(facts.completed)
        for launched in facts.launched:
            if launched.step.entries:
                self._launched(launched)
        for begun in facts.first_tokens:
            if not begun.is_resumed and begun.prefill_at is not None:
                self._of_class("queue_seconds", begun, begun.prefill_at - begun.arrived_at)
                self._of_class("prefill_seconds", begun, begun.first_token_at - begun.prefill_at)
        for ended in facts.ended:
            if ended.request is not None and ended.request.emitted and not ended.request.is_resumed:
                self._whole(ended.request)
            self._counters["medha_sequences_finished"].labels(reason=ended.reason).inc()
            request = ended.request
            if ended.reason in ("stop", "length") and request is not None and request.expected_tokens > 0:
                ratio = self._histograms["medha_output_expected_ratio"]
                ratio.labels(service_class=request.service_class).observe(
                    request.emitted / request.expected_tokens
                )
        for service_class in facts.stepped_aside:
            self._counters["medha_sequences_stepped_aside"].labels(service_class=service_class).inc()
        for reason in facts.refused:
            self._counters["medha_sequences_refused"].labels(reason=reason).inc()

    def _whole(self, request: OpenRequest) -> None:
        """Count a sequence that has ended with at least one token."""
        self._of_class("decode_seconds", request, request.last_token_at - request.first_token_at)
        self._of_class("prompt_tokens", request, request.prompt_length)
        self._of_class("output_tokens", request, request.emitted)

    def _of_class(self, name: str, request: OpenRequest, value: float) -> None:
        histogram = self._histograms[f"medha_sequence_{name}"]
        histogram.labels(service_class=request.service_class).observe(value)

    def _launched(self, launched: Launched) -> None:
        for service_class, seconds in launched.slacks:
            slack = self._histograms["medha_prefill_slack_seconds"].labels(service_class=service_class)
            slack.observe(seconds)
        chunk_tokens = launched.tokens_by_request.values()
        for tokens in chunk_tokens:
            self._histograms["medha_chunk_tokens"].observe(tokens)
        decodes = len(launched.decodes)
        decoded = sum([entry.token_count for entry in launched.decodes])
        for phase, tokens, sequences in (
            ("prefill", sum(chunk_tokens), len(chunk_tokens)),
            ("decode", decoded, decodes),
        ):
            if sequences:
                self._histograms["medha_step_tokens"].labels(phase=phase).observe(tokens)
                self._histograms["medha_step_sequences"].labels(phase=phase).observe(sequences)
        if launched.misses_tpot:
            self._counters["medha_decode_tpot_misses"].inc()

    def _completed(self, completed: Completed) -> None:
        self._counters["medha_drafted_tokens"].inc(completed.drafted_tokens)
        self._counters["medha_accepted_draft_tokens"].inc(completed.accepted_tokens)
        observed, predicted = completed.observed_seconds, completed.launched.step.predicted_seconds
        self._histograms["medha_step_observed_seconds"].observe(observed)
        self._histograms["medha_step_predicted_seconds"].observe(predicted)
        if predicted > 0:
            self._histograms["medha_step_prediction_error_ratio"].observe(observed / predicted)

    def dropped(self, link: str, reason: str, messages: int = 1) -> None:
        """Count messages that were dropped, here or by ranks."""
        self._counters["medha_dropped_messages"].labels(link=link, reason=reason).inc(messages)

    def spans_lost(self, reason: str, spans: int) -> None:
        """Count spans of traces that are lost; it may be called from any thread."""
        self._counters["medha_lost_spans"].labels(reason=reason).inc(spans)

    def refused(self, link: str, connections: int) -> None:
        """Count connections that were refused."""
        self._counters["medha_refused_connections"].labels(link=link).inc(connections)

    def state(self, core: ReplicaController) -> None:
        """Set the gauges.

        This visits every request, so drivers call it only when they announce their load.
        """
        load, pools = core.load(), core.pools
        for lane, kv in enumerate(kv_by_lane(core, list(core.requests()))):
            for state in ("free", "cached", "used", "reserved"):
                self._gauges["medha_kv_blocks"].labels(lane=str(lane), state=state).set(getattr(kv, state))
        for lane in range(pools.lanes):
            windows = pools.windows(lane)
            if windows is None:
                continue
            states = {
                "free": windows.free_blocks,
                "cached": windows.cached_blocks,
                "held": windows.held_blocks,
            }
            for state, blocks in states.items():
                self._gauges["medha_kv_window_blocks"].labels(lane=str(lane), state=state).set(blocks)
        self._gauges["medha_kv_used_ratio"].set(pools.held_blocks / max(pools.blocks, 1))
        self._gauges["medha_kv_growth_blocks"].set(core.growth_blocks)
        self._count_up("medha_prefix_cache_queried_tokens", pools.queried_tokens)
        self._count_up("medha_prefix_cache_hit_tokens", pools.hit_tokens)
        self._host_tier(core)
        self._streaming(core)
        self._disk_tier(core)
        self._peer_kv(core)
        self._store_tier(core)
        self._read_times(core)
        self._gauges["medha_sequences_running"].set(load.running)
        self._gauges["medha_sequences_waiting"].set(load.waiting)
        self._gauges["medha_pending_prefill_seconds"].set(load.pending_prefill_seconds)
        self._gauges["medha_epoch"].set(core.epoch)

    def _host_tier(self, core: ReplicaController) -> None:
        figures, tiers, counts = core.config.host_tier, core.pools.tiers, core.pools.tier_counts
        block_bytes = 0 if figures is None else figures.block_bytes
        for lane in range(core.pools.lanes):
            held_bytes = tiers[lane].ledger.held_blocks * block_bytes if tiers else 0
            self._gauges["medha_host_tier_bytes"].labels(lane=str(lane)).set(held_bytes)
        self._count_up("medha_host_tier_hits", counts.hits)
        self._count_up("medha_host_tier_fetched_bytes", counts.fetched_blocks * block_bytes)
        self._count_up("medha_host_tier_offloaded_bytes", counts.offloaded_blocks * block_bytes)
        self._count_up(
            "medha_host_tier_fetched_tokens", counts.fetched_blocks * core.config.block_size_tokens
        )
        for name, seconds in core.pools.avoided_prefill_seconds.items():
            self._count_up("medha_avoided_prefill_seconds", seconds, tier=name)
        self._swaps(core, block_bytes)

    def _streaming(self, core: ReplicaController) -> None:
        figures, pools = core.config.streaming, core.pools
        block_bytes = 0 if figures is None else figures.block_bytes
        for lane in range(pools.lanes):
            ledger = pools.ledger(lane)
            held_blocks = ledger.streamed_blocks - ledger.free_streamed_blocks
            self._gauges["medha_streaming_bytes"].labels(lane=str(lane)).set(held_blocks * block_bytes)
        self._count_up("medha_streamed_sequences", pools.streamed_sequences)
        self._count_up("medha_streamed_bytes", core.streamed_blocks * block_bytes)

    def _swaps(self, core: ReplicaController, block_bytes: int) -> None:
        figures, pools, counts = core.config.host_tier, core.pools, core.pools.tier_counts
        self._gauges["medha_sequences_swapped"].set(pools.swapped)
        self._count_up("medha_long_swaps", core.long_swaps)
        out_seconds = in_seconds = 0.0
        if figures is not None:
            out_seconds = counts.swapped_out_blocks * figures.offload_seconds_per_block
            in_seconds = counts.swapped_in_blocks * figures.fetch_seconds_per_block
        for direction, swaps, blocks, seconds in (
            ("out", pools.swaps_out, counts.swapped_out_blocks, out_seconds),
            ("in", pools.swaps_in, counts.swapped_in_blocks, in_seconds),
        ):
            self._count_up("medha_swaps", swaps, direction=direction)
            self._count_up("medha_swap_bytes", blocks * block_bytes, direction=direction)
            self._count_up("medha_swap_seconds", seconds, direction=direction)

    def _disk_tier(self, core: ReplicaController) -> None:
        figures, disks, counts = core.config.host_tier, core.pools.disks, core.pools.disk_counts
        block_bytes = 0 if figures is None else figures.block_bytes
        for lane in range(core.pools.lanes):
            held_bytes = disks[lane].held_blocks * block_bytes if disks else 0
            self._gauges["medha_disk_tier_bytes"].labels(lane=str(lane)).set(held_bytes)
            unwritten = core.pools.tiers[lane].unwritten if disks else None
            waiting_bytes = 0 if unwritten is None else unwritten.blocks * block_bytes
            self._gauges["medha_disk_tier_waiting_bytes"].labels(lane=str(lane)).set(waiting_bytes)
            is_off = bool(disks and disks[lane].fault)
            self._gauges["medha_disk_tier_off"].labels(lane=str(lane)).set(is_off)
        self._count_up("medha_disk_tier_hits", counts.hits)
        self._count_up("medha_disk_tier_loaded_bytes", counts.loaded_blocks * block_bytes)
        self._count_up("medha_disk_tier_written_bytes", counts.written_blocks * block_bytes)
        self._count_up("medha_disk_tier_skipped_bytes", counts.skipped_blocks * block_bytes)
        self._count_up("medha_disk_tier_failures", counts.failed_loads + counts.failed_writes)

    def _peer_kv(self, core: ReplicaController) -> None:
        figures, counts = core.config.host_tier, core.pools.peer_counts
        block_bytes = 0 if figures is None else figures.block_bytes
        self._count_up("medha_peer_kv_hits", counts.hits)
        self._count_up("medha_peer_kv_loaded_bytes", counts.loaded_blocks * block_bytes)
        self._count_up("medha_peer_kv_offered_bytes", counts.served_blocks * block_bytes)
        self._count_up("medha_peer_kv_failures", counts.failed_loads)
        self._count_up("medha_peer_kv_resumed_tokens", core.resumed_tokens)

    def _store_tier(self, core: ReplicaController) -> None:
        figures, store = core.config.host_tier, core.pools.store
        block_bytes = 0 if figures is None else figures.block_bytes
        counts = StoreCounts() if store is None else store.counts
        self._gauges["medha_store_tier_rests"].set(store is not None and store.rests)
        self._count_up("medha_store_tier_lookups", counts.lookups)
        self._count_up("medha_store_tier_hits", counts.hits)
        self._count_up("medha_store_tier_loaded_bytes", counts.loaded_blocks * block_bytes)
        self._count_up("medha_store_tier_written_bytes", counts.written_blocks * block_bytes)
        self._count_up("medha_store_tier_found_bytes", counts.found_blocks * block_bytes)
        self._count_up("medha_store_tier_skipped_bytes", counts.skipped_blocks * block_bytes)
        self._count_up("medha_store_tier_failures", counts.failed_loads + counts.failed_writes)

    def _read_times(self, core: ReplicaController) -> None:
        latency = self._gauges["medha_tier_read_latency_seconds"]
        per_gib = self._gauges["medha_tier_read_seconds_per_gib"]
        times = read_times(core)
        for tier, time in times.items():
            latency.labels(tier=tier).set(time.latency_seconds)
            per_gib.labels(tier=tier).set(time.seconds_per_gib)
        for tier in self._tiers - times.keys():  # an epoch without the store, for example
            latency.remove(tier)
            per_gib.remove(tier)
        self._tiers = set(times)

    def _count_up(self, name: str, total: float, **labels: str) -> None:
        """Add the growth of a total that is counted elsewhere and restarts at 0 with each epoch."""
        key = (name, *labels.values())
        before = self._totals[key]
        counter = self._counters[name].labels(**labels) if labels else self._counters[name]
        counter.inc(total - before if total >= before else total)
        self._totals[key] = total
