"""The policy `guarded`: keep every deadline that can still be kept, and never leave the others behind.

Every request has a *due* time, and the order is by due time. At first that is its deadline. All dues can be met when,
for each, the work due until then fits before it. When an arrival (or a step that took longer than predicted) makes
that impossible, the request with most remaining work among those whose removal helps is *given up*: its due moves
from the deadline to a *promise*, the time at which it would end if those given up had a share of the server to
themselves, in the order of being given up. A promise binds like a deadline, and is never given up.

With the largest gone the most others are on time (J. M. Moore, Management Science 15, 1968). docs/scheduling.md says
what is promised to whom, with proofs and measured figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from medha.policy import Bools, Columns, Floats, Ints

_EPSILON_SECONDS = 1e-6
"""Differences of absolute times and sums of work are not exact."""
_SINGLE_ROUNDS = 8
_RETURNS = 4
_BATCH = 64


@dataclass(frozen=True, slots=True)
class GuardedSettings:
    given_up_share: float = 0.1
    """Part of the server that bounds how long those given up wait: promised is (work ahead + own work) / share."""
    grace_seconds: float = 0.5
    """Longest step. While nobody is given up, being late by less comes of steps and is no overload."""
    lanes: int = 1
    """Lanes that serve the rows side by side. With more than one what is promised is an estimate, and no proof."""


@dataclass(frozen=True, slots=True)
class Plan:
    """When each request is due: the whole state of the policy, in arrays that `Guarded.order` brings up to date.

    They belong to the owner of the rows, who sets `due` to the deadline and `promise` to infinity when a row comes,
    and keeps `by_due` sorted when rows come and go.
    """

    due: Floats
    """Absolute: the deadline, or the promise of one given up."""
    promise: Floats
    """Absolute; infinite for a request that has never been given up."""
    by_due: Ints
    """All rows, by due."""


class Guarded:
    """The order of prefills under `guarded`. Deterministic: what it decides follows from its arguments alone."""

    def __init__(self, settings: GuardedSettings) -> None:
        self.settings = settings

    def order(self, columns: Columns, plan: Plan, now: float) -> Iterator[int]:
        """Rows, most urgent first, after `plan` was brought up to date."""
        if not len(plan.by_due):
            return iter(())
        view = self._feasible(columns, plan, now)
        first = self._cheap(view)
        rows = plan.by_due.copy()  # the caller may move rows before it has read on
        return _lazily(rows) if first is None else _lazily(rows, first)

    def _feasible(self, columns: Columns, plan: Plan, now: float) -> _View:
        """Give up until every due can be met, then take back whom there is room for."""
        rounds = 0
        while True:
            view = _View.of(columns, plan, now, self.settings)
            if view.lowest_room >= -_EPSILON_SECONDS:
                break
            if self._renew(plan, view, now):
                continue
            victims = self._victims(view, worst=rounds >= _SINGLE_ROUNDS)
            if not len(victims):
                break
            self._give_up(columns, plan, view, victims, now)
            rounds += 1
        if view.any_late:
            for _ in range(_RETURNS):
                if not self._take_back(columns, plan, view, now):
                    break
                view = _View.of(columns, plan, now, self.settings)
        return view

    def _victims(self, view: _View, *, worst: bool) -> Ints:
        """Places (in the order of dues) of those to give up next; none if that would help nobody."""
        kept = ~view.late
        hopeless = np.flatnonzero(kept & (view.remaining > view.due + view.grace + _EPSILON_SECONDS))
        if len(hopeless):
            return hopeless[np.argsort(view.remaining[hopeless], kind="stable")]
        # A promise does not drive out requests that are small against its own work while it can still be kept.
        largest = np.maximum.accumulate(np.where(kept, view.load, 0.0))
        small = (largest < self.settings.given_up_share * view.load) & (
            view.room + view.load >= -_EPSILON_SECONDS
        )
        bad = (view.room < -_EPSILON_SECONDS) & ~(view.late & ((largest <= 0.0) | small))
        points = np.flatnonzero(bad)
        if not len(points):
            return points
        point = int(points[np.argmin(view.room[points])]) if worst else int(points[0])
        before = np.flatnonzero(kept[: point + 1])
        before = before[np.argsort(-view.load[before], kind="stable")]
        saved = np.cumsum(view.load[before])
        count = int(np.searchsorted(saved, -view.room[point] - _EPSILON_SECONDS)) + 1
        return before[:count] if worst else before[:1]

    def _give_up(self, columns: Columns, plan: Plan, view: _View, places: Ints, now: float) -> None:
        """Move the dues of these to their promises. A promise once given stays, even if it was taken back since.

        One whom the share alone would finish in time is promised to be hardly late: others have to go.
        """
        rows = plan.by_due[places]
        promised = np.isfinite(plan.promise[plan.by_due])
        fresh = places[~promised[places]]
        ahead = float(view.load[promised].sum()) + np.cumsum(view.load[fresh])
        ends = now + np.maximum(ahead, view.remaining[fresh]) / self.settings.given_up_share
        fresh_rows = plan.by_due[fresh]
        plan.promise[fresh_rows] = np.maximum(ends, np.nextafter(columns.deadline[fresh_rows], np.inf))
        self._move(plan, places, plan.promise[rows])

    def _renew(self, plan: Plan, view: _View, now: float) -> bool:
        """Replace promises that those given up cannot keep even alone: steps took longer than predicted."""
        alone = np.maximum(np.cumsum(np.where(view.late, view.load, 0.0)), view.remaining)
        broken = np.flatnonzero(view.late & (alone > view.due + _EPSILON_SECONDS))
        if not len(broken):
            return False
        promise = now + alone[broken] / self.settings.given_up_share
        plan.promise[plan.by_due[broken]] = promise
        self._move(plan, broken, promise)
        return True

    def _take_back(self, columns: Columns, plan: Plan, view: _View, now: float) -> bool:
        """Give the smallest of those given up its deadline again, if everybody else's due can still be met."""
        in_time = (plan.due > columns.deadline) & (columns.deadline - columns.remaining_seconds >= now)
        rows = np.flatnonzero(in_time)
        for row in rows[np.lexsort((columns.tie[rows], columns.remaining_seconds[rows]))][:_RETURNS].tolist():
            deadline, load = columns.deadline[row] - now, columns.remaining_seconds[row] / self.settings.lanes
            before = int(np.searchsorted(view.due, deadline, side="right"))
            place = int(np.searchsorted(view.due, plan.due[row] - now))
            ahead = view.done[before - 1] if before else 0.0
            if ahead + load <= deadline and np.all(view.room[before:place] >= load):
                self._move(plan, np.flatnonzero(plan.by_due == row), columns.deadline[[row]])
                return True
        return False

    @staticmethod
    def _move(plan: Plan, places: Ints, dues: Floats) -> None:
        """Set other dues at these places of the order, and sort them in."""
        rows = plan.by_due[places]
        plan.due[rows] = dues
        others = np.delete(plan.by_due, places)
        rows = rows[np.argsort(dues, kind="stable")]
        plan.by_due[:] = np.insert(
            others, np.searchsorted(plan.due[others], plan.due[rows], side="right"), rows
        )

    def _cheap(self, view: _View) -> int | None:
        """The place of the smallest given up, if it may go first: that costs those before it next to nothing."""
        if not view.any_late:
            return None
        place = int(np.argmin(np.where(view.late, view.remaining, np.inf)))
        room = float(view.room[:place].min(initial=np.inf))
        return place if view.load[place] <= self.settings.given_up_share * room else None


def _lazily(rows: Ints, first: int | None = None) -> Iterator[int]:
    """Rows one by one, that at place `first` before all others."""
    if first is not None:
        yield int(rows[first])
        rows = np.delete(rows, first)
    for start in range(0, len(rows), _BATCH):
        yield from rows[start : start + _BATCH].tolist()


@dataclass(frozen=True, slots=True)
class _View:
    """Columns in the order of dues, times counted from now."""

    due: Floats
    remaining: Floats
    load: Floats  # what it takes of all lanes together
    late: Bools  # given up
    any_late: bool
    grace: float
    done: Floats  # when all of it and before it can be done
    room: Floats  # by how much each may be delayed
    lowest_room: float

    @staticmethod
    def of(columns: Columns, plan: Plan, now: float, settings: GuardedSettings) -> _View:
        due = plan.due[plan.by_due] - now
        remaining = columns.remaining_seconds[plan.by_due]
        late = (plan.due > columns.deadline)[plan.by_due]
        any_late = bool(late.any())
        grace = 0.0 if any_late else settings.grace_seconds
        load = remaining if settings.lanes == 1 else remaining / settings.lanes
        done = np.cumsum(load)
        ends = done if settings.lanes == 1 else np.maximum(done, remaining)
        # A promise keeps its own work once more as a margin, which only small requests may use.
        room = due - ends + (-load * late if any_late else grace)
        return _View(due, remaining, load, late, any_late, grace, done, room, float(room.min()))
