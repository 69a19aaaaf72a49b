"""Metrics of a replica's ranks and their devices, from what the ranks report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from prometheus_client import CollectorRegistry

from medha.errors import WireInvalid
from medha.observing.metric_catalogue import RANK_METRICS, STEP_PARTS, THROTTLE_MEANINGS
from medha.topology import Topology
from medha.wire.messages import GpuFigures, RankReport, RankXid
from medha_process.collectors import Collectors
from medha_worker.nvml import xid_cause

MOST = 1e30
"""Largest number that is accepted from a rank."""
MOST_CHARACTERS = 100
"""Longest text that becomes a label."""
_STATES = ("total", "used", "free")
_CLOCKS = ("sm", "memory")
_UNITS = ("compute", "memory")
_CAUSES = ("device", "program", "notice")

Series = tuple[str, tuple[str, ...]]
"""Name of a metric, and the values of its labels after the rank."""


class RankMetrics:
    """Counts and shows what ranks report; counters survive the processes of ranks, states last for an epoch."""

    def __init__(self, topology: Topology, registry: CollectorRegistry) -> None:
        collectors = Collectors(RANK_METRICS, registry)
        self._counters, self._gauges = collectors.counters, collectors.gauges
        self._topology = topology
        self._known: dict[int, tuple[str, dict[Series, float]]] = {}  # incarnation and totals, by rank
        self._shown: dict[int, set[Series]] = {}  # states by rank

    def report(self, report: RankReport, *, is_serving: bool) -> None:
        """Count the growth of a rank's totals since its last report, and show the states that it reports.

        The first report of a process only sets the base, so a restarted controller does not count again what its
        predecessor counted. States are shown while the replica serves (`is_serving`): a report that arrives after
        the loss of its rank would otherwise show them again.

        Raises:
            WireInvalid: a number is impossible. No part of the report is counted.
        """
        totals, states = dict(_totals(report)), dict(_states(report))
        for (name, _), number in (*totals.items(), *states.items()):
            if not (math.isfinite(number) and 0 <= number <= MOST):
                raise WireInvalid(f"rank {report.rank} reports {name} {number}, expected 0 to {MOST:g}")
        incarnation, known = self._known.get(report.rank, ("", {}))
        if incarnation != report.incarnation:
            known = totals
        self._known[report.rank] = report.incarnation, totals
        for (name, labels), total in totals.items():
            self._counters[name].labels(str(report.rank), *labels).inc(
                max(0.0, total - known.get((name, labels), 0.0))
            )
        if is_serving:
            self._show(report, states)

    def _show(self, report: RankReport, states: dict[Series, float]) -> None:
        rank = str(report.rank)
        here = self._topology.coordinates(report.rank)
        about = (text[:MOST_CHARACTERS] for text in (report.pod, report.device, report.uuid))
        states["medha_rank_info", (str(here.kv), str(here.stream), str(here.tensor), *about)] = 1
        for (name, labels), state in states.items():
            self._gauges[name].labels(rank, *labels).set(state)
        self._forget(report.rank, self._shown.get(report.rank, set()) - states.keys())
        self._shown[report.rank] = set(states)
        if report.gpu is not None:
            for cause in _CAUSES:  # from 0 on, so that the first error is an increase
                self._counters["medha_rank_xid_errors"].labels(rank, cause)

    def xid(self, error: RankXid) -> None:
        """Count an error of a rank's GPU."""
        labels = str(error.rank), xid_cause(error.xid)
        self._counters["medha_rank_xid_errors"].labels(*labels).inc()
        self._gauges["medha_rank_last_xid"].labels(*labels).set(error.xid)

    def forget_states(self) -> None:
        """Remove all states, because the ranks that reported them may be gone."""
        for rank, shown in self._shown.items():
            self._forget(rank, shown)
        self._shown.clear()

    def _forget(self, rank: int, states: Set[Series]) -> None:
        for name, labels in states:
            self._gauges[name].remove(str(rank), *labels)


def _totals(report: RankReport) -> Iterator[tuple[Series, float]]:
    """Yield the totals of a report; parts that only another release has are ignored."""
    yield ("medha_rank_steps", ()), float(report.steps)
    yield ("medha_rank_ahead_seconds", ()), report.ahead_seconds
    yield ("medha_rank_estimated_flops", ()), report.flops
    yield ("medha_rank_estimated_read_bytes", ()), report.read_bytes
    for part, seconds in report.part_seconds:
        if part in STEP_PARTS:
            yield ("medha_rank_step_seconds", (part,)), seconds


def _states(report: RankReport) -> Iterator[tuple[Series, float]]:
    """Yield the states of a report; those that only another release has are ignored."""
    for state, memory_bytes in report.memory_bytes:
        if state in _STATES:
            yield ("medha_rank_memory_bytes", (state,)), float(memory_bytes)
    if report.peak_flops_per_second:
        yield ("medha_rank_peak_flops_per_second", ()), report.peak_flops_per_second
    if report.peak_bytes_per_second:
        yield ("medha_rank_peak_bytes_per_second", ()), report.peak_bytes_per_second
    if report.gpu is not None:
        yield from _gpu_states(report.gpu)


def _gpu_states(gpu: GpuFigures) -> Iterator[tuple[Series, float]]:
    for clock, hertz in gpu.clock_hertz:
        if clock in _CLOCKS:
            yield ("medha_rank_clock_hertz", (clock,)), hertz
    if gpu.throttled is not None:
        for reason in THROTTLE_MEANINGS:
            yield ("medha_rank_throttled", (reason,)), float(reason in gpu.throttled)
    for unit, share in gpu.utilisation:
        if unit in _UNITS:
            yield ("medha_rank_utilisation_ratio", (unit,)), share
    for name, figure in (
        ("medha_rank_temperature_celsius", gpu.temperature_celsius),
        ("medha_rank_power_watts", gpu.power_watts),
        ("medha_rank_power_limit_watts", gpu.power_limit_watts),
    ):
        if figure is not None:
            yield (name, ()), figure
