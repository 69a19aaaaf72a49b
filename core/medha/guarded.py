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
_FEW = 32  # rows


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
        self._space = _Space(0)

    def order(self, columns: Columns, plan: Plan, now: float) -> Iterator[int]:
        """Rows, most urgent first, after `plan` was brought up to date."""
        first = self.first(columns, plan, now)
        return _lazily(plan.by_due.copy(), first)  # the caller may move rows before it has read on

    def first(self, columns: Columns, plan: Plan, now: float) -> int | None:
        """Bring `plan` up to date; the row that goes before all others, which follow by due. None: just by due."""
        rows = len(plan.by_due)
        if not rows or (rows <= _FEW and self._meets_all(columns, plan, now)):
            return None
        if rows > self._space.rows:
            self._space = _Space(2 * rows)
        view = self._feasible(_View(columns, plan, now, self.settings, self._space))
        place = self._cheap(view)
        return None if place is None else int(plan.by_due[place])

    def _meets_all(self, columns: Columns, plan: Plan, now: float) -> bool:
        """Whether nobody is given up and every due can be met.

        As `_feasible` finds it, to the last digit, but in a fourth of the time for the few rows that most decisions see.
        """
        if self.settings.lanes > 1:
            return False
        due, deadline = plan.due.tolist(), columns.deadline.tolist()
        remaining: list[float] = columns.remaining_seconds.tolist()
        done = 0.0
        for row in plan.by_due.tolist():
            done += remaining[row]
            if (
                due[row] > deadline[row]
                or due[row] - now - done + self.settings.grace_seconds < -_EPSILON_SECONDS
            ):
                return False
        return True

    def _feasible(self, view: _View) -> _View:
        """Give up until every due can be met, then take back whom there is room for."""
        rounds = 0
        while len(bad := (view.room < -_EPSILON_SECONDS).nonzero()[0]):
            late = view.late[bad]
            hopeless = bad[~late & (view.remaining[bad] > view.due[bad] + view.grace + _EPSILON_SECONDS)]
            missed = bad[late & (view.room[bad] + view.load[bad] < -_EPSILON_SECONDS)]
            if len(hopeless):
                view = self._give_up(view, hopeless[np.argsort(view.remaining[hopeless], kind="stable")])
            elif len(missed) and view.is_broken(int(missed[0])):
                view = self._renew(view)
            else:
                worst = rounds >= _SINGLE_ROUNDS  # a flood: faster, and taken back if it was too many
                points = bad if not (worst or late[0]) else self._points(view, bad)
                if not len(points):
                    break
                point = points[np.argmin(view.room[points])] if worst else points[0]
                view = self._give_up(view, _largest(view, int(point)))
            rounds += 1
        while rounds == 0 and view.any_late and self._take_back(view):
            pass  # if somebody had to go, there is hardly room for others
        return view

    def _points(self, view: _View, bad: Ints) -> Ints:
        """Those of the places without room for which somebody before them has to go.

        A promise drives out nobody who is small against its own work while it can still be kept.
        """
        late = view.late[bad]
        if not late.any():
            return bad
        kept = (~view.late[: int(bad[-1]) + 1]).nonzero()[0]
        # The most work of one who is kept until each place, behind a 0 for none: in overload few are kept.
        most = np.concatenate(([0.0], np.maximum.accumulate(view.load[kept])))
        largest = most[kept.searchsorted(bad, side="right")]
        load = view.load[bad]
        tolerated = (largest < self.settings.given_up_share * load) & (
            view.room[bad] + load >= -_EPSILON_SECONDS
        )
        return bad[~late | ((largest > 0) & ~tolerated)]

    def _give_up(self, view: _View, places: Ints) -> _View:
        """Move the dues of these to their promises. A promise once given stays, even if it was taken back since.

        One whom the share alone would finish in time is promised to be hardly late: others have to go.
        """
        plan, rows = view.plan, view.plan.by_due[places]
        fresh = places[np.isinf(plan.promise[rows])]
        if len(fresh):
            promise = plan.promise.take(plan.by_due, out=view.scratch, mode="clip")
            promised = np.multiply(view.load, np.isfinite(promise), out=view.scratch)
            ahead = float(promised.sum()) + view.load[fresh].cumsum()
            ends = view.now + np.maximum(ahead, view.remaining[fresh]) / self.settings.given_up_share
            plan.promise[plan.by_due[fresh]] = np.maximum(ends, np.nextafter(view.deadline[fresh], np.inf))
        return view.moved(places, plan.promise[rows])

    def _renew(self, view: _View) -> _View:
        """Replace promises that those given up cannot keep even alone: steps took longer than predicted."""
        alone = np.maximum(view.late_load.cumsum(), view.remaining)
        broken = (view.late & (alone > view.due + _EPSILON_SECONDS)).nonzero()[0]
        promise = view.now + alone[broken] / self.settings.given_up_share
        view.plan.promise[view.plan.by_due[broken]] = promise
        return view.moved(broken, promise)

    def _take_back(self, view: _View) -> bool:
        """Give one of the smallest given up its deadline again, if everybody else's due can still be met."""
        earliest = np.add(view.remaining, view.now, out=view.scratch)
        places = (view.late & (view.deadline >= earliest)).nonzero()[0]
        if len(places) > _RETURNS:
            places = places[np.argpartition(view.remaining[places], _RETURNS)[:_RETURNS]]
        for place in places[np.argsort(view.remaining[places], kind="stable")].tolist():
            deadline, load = float(view.deadline[place]), view.load[place]
            before = int(view.due.searchsorted(deadline - view.now, side="right"))
            ahead = view.done[before - 1] if before else 0.0
            room = min(deadline - view.now - ahead, view.room[before:place].min(initial=np.inf))
            if load <= room:
                view.move(place, deadline)
                return True
        return False

    def _cheap(self, view: _View) -> int | None:
        """The place of the smallest given up, if it may go first: that costs those before it next to nothing."""
        if not view.any_late:
            return None
        view.scratch.fill(np.inf)
        np.copyto(view.scratch, view.remaining, where=view.late)
        place = int(view.scratch.argmin())
        room = float(view.room[:place].min(initial=np.inf))
        return place if view.load[place] <= self.settings.given_up_share * room else None


def _largest(view: _View, point: int) -> Ints:
    """Places of the kept with most work that are due until `point`: so many that its due can be met."""
    kept = (~view.late[: point + 1]).nonzero()[0]
    load = view.load[kept]
    wanted = -view.room[point] - _EPSILON_SECONDS
    largest = load.argmax()
    if load[largest] >= wanted:  # one is enough, as nearly always, and need not be found by sorting
        return kept[largest : largest + 1]
    kept = kept[np.argsort(-load, kind="stable")]
    return kept[: int(view.load[kept].cumsum().searchsorted(wanted)) + 1]


def _lazily(rows: Ints, first: int | None = None) -> Iterator[int]:
    """Rows one by one, `first` before all others."""
    if first is not None:
        yield first
        rows = rows[rows != first]
    for start in range(0, len(rows), _BATCH):
        yield from rows[start : start + _BATCH].tolist()


class _Space:
    """Arrays that one view after the other is written into.

    New arrays of thousands of rows come from the system page by page, which takes longer than to fill them.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.columns: list[Floats] = [np.empty(rows) for _ in range(8)]
        self.late: Bools = np.empty(rows, dtype=np.bool_)


class _View:
    """Columns in the order of dues (a *place* is an index into them), times counted from now."""

    def __init__(
        self, columns: Columns, plan: Plan, now: float, settings: GuardedSettings, space: _Space
    ) -> None:
        self.columns, self.plan, self.now, self.settings, self.space = columns, plan, now, settings, space
        by_due, rows = plan.by_due, len(plan.by_due)
        due, deadline, remaining, load, late_load, done, room, scratch = [
            column[:rows] for column in space.columns
        ]
        self.scratch: Floats = scratch
        """For results that are not kept."""
        plan.due.take(by_due, out=due, mode="clip")  # any mode but "raise" writes straight into `out`
        columns.deadline.take(by_due, out=deadline, mode="clip")
        columns.remaining_seconds.take(by_due, out=remaining, mode="clip")
        self.deadline: Floats = deadline
        """Absolute."""
        self.remaining: Floats = remaining
        self.load: Floats = (
            remaining if settings.lanes == 1 else np.divide(remaining, settings.lanes, out=load)
        )
        """What it takes of all lanes together: of one lane, the same array as `remaining`."""
        self.late: Bools = np.greater(due, deadline, out=space.late[:rows])
        """Given up."""
        self.any_late = bool(self.late.any())
        self.late_load: Floats = late_load
        """The load of the given up, 0 of the others; not set while nobody is."""
        if self.any_late:
            np.multiply(self.load, self.late, out=late_load)
        self.grace = 0.0 if self.any_late else settings.grace_seconds
        self.due: Floats = np.subtract(due, now, out=due)
        self.done: Floats = self.load.cumsum(out=done)
        """When it and all before it can be done."""
        self.room: Floats = room
        """By how much it may be delayed."""
        self._find_rooms(slice(None))

    def _find_rooms(self, places: slice) -> None:
        ends, room = self.done[places], self.room[places]
        if self.settings.lanes > 1:
            ends = np.maximum(ends, self.remaining[places], out=self.scratch[places])
        np.subtract(self.due[places], ends, out=room)
        if (
            self.any_late
        ):  # a promise keeps its own work once more as a margin, which only small requests may use
            room -= self.late_load[places]
        else:
            room += self.grace

    def is_broken(self, place: int) -> bool:
        """Whether the given up until there would be done only behind its due, even without the kept.

        The sum in order is what counts. A plain one is found in a tenth of the time, and says the same unless it comes
        so near that rounding decides: both differ from the true sum by less than `len` roundings of it.
        """
        loads = self.late_load[: place + 1]
        latest, own = float(self.due[place]) + _EPSILON_SECONDS, float(self.remaining[place])
        total = float(loads.sum())
        if abs(total - latest) <= 1e-15 * len(loads) * total:
            total = float(loads.cumsum()[-1])
        return max(total, own) > latest

    def moved(self, places: Ints, dues: Floats) -> _View:
        """The view after the requests at these places have got other dues."""
        if len(places) == 1 and self.any_late:
            self.move(int(places[0]), float(dues[0]))
            return self
        plan = self.plan
        rows = plan.by_due[places]
        plan.due[rows] = dues
        rows = rows[np.argsort(dues, kind="stable")]
        others = np.delete(plan.by_due, places)
        plan.by_due[:] = np.insert(
            others, np.searchsorted(plan.due[others], plan.due[rows], side="right"), rows
        )
        return _View(self.columns, plan, self.now, self.settings, self.space)

    def move(self, place: int, due: float) -> None:
        """Give the request at `place` another due, and sort it in; the rest of the view follows."""
        row = int(self.plan.by_due[place])
        self.plan.due[row] = due
        to = int(self.due.searchsorted(due - self.now, side="right"))
        to -= to > place
        first, last = min(place, to), max(place, to)
        lower, upper = slice(first, last), slice(first + 1, last + 1)
        source, target = (upper, lower) if to > place else (lower, upper)
        columns = [self.plan.by_due, self.due, self.deadline, self.remaining, self.late, self.late_load]
        if self.load is not self.remaining:
            columns.append(self.load)
        for column in (*columns, self.done, self.room):
            moving = column[place]
            column[target] = column[source]
            column[to] = moving
        load = float(self.load[to]) if to < place else -float(self.load[to])
        self.done[target] += load
        self.room[target] -= load
        self.due[to] = due - self.now
        late = self.late[to] = bool(due > self.deadline[to])
        self.late_load[to] = self.load[to] if late else 0.0
        self.done[to] = self.load[to] + (self.done[to - 1] if to else 0.0)
        exact = slice(to, to + 1) if self.settings.lanes == 1 else slice(first, last + 1)
        self._find_rooms(exact)
