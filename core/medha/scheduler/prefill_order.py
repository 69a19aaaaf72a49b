"""The order in which a step considers prefills: the policy, applied to the rows that it may take now.

If not all can be on time, owners take turns (`medha.scheduler.owner_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np

from medha.api.replica import SchedulingSpec
from medha.scheduler.guarded import Guarded, GuardedSettings
from medha.scheduler.owner_turns import contested_until, take_turns
from medha.scheduler.policy import CLOCK_POLICIES, Bools, Floats, Ints, keys, urgent_first
from medha.scheduler.request_table import RequestTable
from medha.wire.messages import PolicyTerms

Ordered = Callable[[Bools], Iterator[int]]
"""Function from flags by row to the flagged rows, most urgent first."""

MOST_WORK_POINTS = 8
"""Most points of the work ahead that a replica announces."""
_BATCH = 256  # rows that are selected at once: a step reads only a few


class PrefillOrder:
    """Applies the policy that the settings name."""

    def __init__(self, scheduling: SchedulingSpec, lanes: int = 1, stages: int = 1) -> None:
        self._lanes = lanes
        self._policy = scheduling.policy
        self._lars_denominator = scheduling.lars_denominator
        grace_seconds = scheduling.max_step_seconds / stages
        self._terms = PolicyTerms(
            scheduling.policy, scheduling.lars_denominator, scheduling.demoted_share, grace_seconds
        )
        self._guarded: Guarded | None = None
        if scheduling.policy == "guarded":
            self._guarded = Guarded(GuardedSettings(scheduling.demoted_share, grace_seconds, lanes))

    @property
    def terms(self) -> PolicyTerms:
        """The policy, as a replica announces it."""
        return self._terms

    @property
    def can_demote(self) -> bool:
        """True if the policy may make a prefill due later than its deadline."""
        return self._guarded is not None

    def select(self, table: RequestTable, correction: float, pace: float, now: float) -> Ordered:
        """Determine the order of all rows once; the result is then applied to successive selections of rows.

        `guarded` sums work, so it uses the time that prefills keep a stage busy, divided by their measured
        `pace`. The other policies use the keys of the papers, with the time that each prefill takes alone.
        """
        until = self._contested_until(table, correction / pace, now)
        if self._guarded is not None:
            plan = table.plan
            first = self._guarded.first(table.stage_columns, plan, now, correction / pace)
            if until == -inf:
                return lambda chosen: _by_due(plan.by_due, first, chosen)
            order = plan.by_due.copy()
        else:
            columns = table.columns(correction)
            sort_keys, tie = keys(self._policy, columns, now, self._lars_denominator), columns.tie
            if until == -inf:
                return lambda chosen: _by_key(sort_keys, tie, chosen)
            first, order = None, np.lexsort((tie, sort_keys))
        owner, turn, begun = table.turns
        take_turns(order, table.stage_columns.deadline <= until, owner, turn, now, begun)
        return lambda chosen: _by_due(order, first, chosen)

    def _contested_until(self, table: RequestTable, factor: float, now: float) -> float:
        """Return the deadline up to which owners take turns, because not all can be on time; -inf if all can."""
        if len(table.owners) == 1 or table.turns[1].max(initial=-inf) == -inf:
            return (
                -inf
            )  # one owner; or none has attained anything, as without keys, where each request is an owner
        columns, grace_seconds = table.stage_columns, self._terms.grace_seconds
        work_seconds = columns.remaining_seconds * factor
        here = contested_until(columns.deadline, work_seconds, self._lanes, grace_seconds, now)
        return max(here, table.contested_until)

    def work_ahead(
        self, table: RequestTable, correction: float, now: float
    ) -> tuple[tuple[float, float], ...]:
        """Return points (key, seconds of remaining work with at most that key), ascending (`Announce.work_ahead`).

        At a key between two points, the work counts as that of the lower point.
        """
        columns = table.columns(correction)
        rows = len(columns.tie)
        if not rows:
            return ()
        if self._guarded is not None:
            sort_keys = table.plan.due
        else:
            sort_keys = keys(self._policy, columns, now, self._lars_denominator)
        order = np.argsort(sort_keys, kind="stable")
        work = columns.remaining_seconds[order].cumsum()
        wanted = np.linspace(0, work[-1], min(rows, MOST_WORK_POINTS) + 1)[1:]
        last = np.minimum(work.searchsorted(wanted - 1e-9), rows - 1)
        found = np.unique(last)
        since = now if self._policy in CLOCK_POLICIES else 0.0
        return tuple(zip((sort_keys[order[found]] - since).tolist(), work[found].tolist(), strict=True))


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
