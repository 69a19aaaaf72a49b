"""The order in which a step considers prefills: the policy, applied to the rows that it may take now."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from medha.api.replica import SchedulingSpec
from medha.scheduler.guarded import Guarded, GuardedSettings
from medha.scheduler.policy import Bools, Floats, Ints, keys, urgent_first
from medha.scheduler.request_table import RequestTable

Ordered = Callable[[Bools], Iterator[int]]
"""Function from flags by row to the flagged rows, most urgent first."""

_BATCH = 256  # rows that are selected at once: a step reads only a few


class PrefillOrder:
    """Applies the policy that the settings name."""

    def __init__(self, scheduling: SchedulingSpec, lanes: int = 1, stages: int = 1) -> None:
        self._policy = scheduling.policy
        self._lars_denominator = scheduling.lars_denominator
        self._guarded: Guarded | None = None
        if scheduling.policy == "guarded":
            self._guarded = Guarded(
                GuardedSettings(scheduling.demoted_share, scheduling.max_step_seconds / stages, lanes)
            )

    @property
    def can_demote(self) -> bool:
        """True if the policy may make a prefill due later than its deadline."""
        return self._guarded is not None

    def select(self, table: RequestTable, correction: float, pace: float, now: float) -> Ordered:
        """Determine the order of all rows once; the result is then applied to successive selections of rows.

        `guarded` sums work, so it uses the time that prefills keep a stage busy, divided by their measured
        `pace`. The other policies use the keys of the papers, with the time that each prefill takes alone.
        """
        if self._guarded is not None:
            plan = table.plan
            first = self._guarded.first(table.stage_columns, plan, now, correction / pace)
            return lambda chosen: _by_due(plan.by_due, first, chosen)
        columns = table.columns(correction)
        sort_keys, tie = keys(self._policy, columns, now, self._lars_denominator), columns.tie
        return lambda chosen: _by_key(sort_keys, tie, chosen)


def _by_due(by_due: Ints, first: int | None, chosen: Bools) -> Iterator[int]:
    """Yield the chosen rows by due time; `first` comes before all others."""
    if first is not None and chosen[first]:
        yield first
    for start in range(0, len(by_due), _BATCH):
        rows = by_due[start : start + _BATCH]
        for row in rows[chosen[rows]].tolist():
            if row != first:
                yield row


def _by_key(sort_keys: Floats, tie: Ints, chosen: Bools) -> Iterator[int]:
    if 2 * np.count_nonzero(chosen) > len(chosen):
        for row in urgent_first(sort_keys, tie):
            if chosen[row]:
                yield row
        return
    rows = np.flatnonzero(chosen)
    for place in urgent_first(sort_keys[rows], tie[rows]):
        yield int(rows[place])
