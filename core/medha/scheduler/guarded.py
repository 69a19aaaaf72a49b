"""The policy `guarded`: meet every deadline that can still be met, and starve no request that misses its own.

Every request has a *due* time, and requests are ordered by it. At first it is the deadline. All due times can
be met if, for each of them, the work due by then fits before it. An arrival, or a step that took longer than
predicted, can make that impossible. The policy then *demotes* a request: of those that are due by the first
time that cannot be met, the one with the most remaining work. A demoted request is due at a *revised
deadline*: the time at which it would end if the demoted requests had a share of the server to themselves, in
the order of demotion. A revised deadline binds like a deadline, and a request that is due at one is never
demoted.

Demoting the largest request leaves the most others on time (J. M. Moore, Management Science 15, 1968).
docs/scheduling.md states the guarantees, with proofs; docs/performance-scheduling.md has measured figures.

In names, `late` means demoted and `kept` not demoted. A *place* is an index into the order by due time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isinf, nextafter

import numpy as np

from medha.scheduler.policy import Bools, Columns, Floats, Ints

_EPSILON_SECONDS = 1e-6
"""Tolerance for rounding in differences of absolute times and in sums of work."""
_SINGLE_ROUNDS = 8  # rounds of a decision that resolve the first violation; later ones resolve the worst
_FAR_ROUNDS = 2  # rounds of a decision for violations beyond the near rows: each passes over all rows
_RETURNS = 4  # demoted requests tried for each deadline that is restored
# Most deadlines that one decision restores. When steps get faster there may be room for thousands; the next
# decision, which follows soon, restores more.
_MOST_RETURNS = 16
_BATCH = 64
_FIRST_BAD = 64  # violations that are examined before all of them are


@dataclass(frozen=True, slots=True)
class GuardedSettings:
    demoted_share: float = 0.1
    """Share of the server that bounds how long demoted requests wait: (work ahead + own work) / share."""
    grace_seconds: float = 0.5
    """Longest step. While no request is demoted, lateness below it is an effect of steps and not overload."""
    lanes: int = 1
    """Lanes that serve the rows in parallel. With more than one, revised deadlines are unproven estimates."""
    few_rows: int = 32
    """Most rows that are examined in a loop, which is faster than arrays for so few. At most `near_rows`."""
    near_rows: int = 1024
    """Rows, due next, that every decision examines."""
    far_every_decisions: int = 8
    """Interval in decisions at which all rows are examined, if there are more than the near ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The due times of all requests: the state of the policy, in arrays that `Guarded` updates.

    The arrays belong to the owner of the rows. When it adds a row, it sets `due` to the deadline and
    `revised_deadline` to infinity. It keeps `by_due` sorted as rows are added and removed.
    """

    due: Floats
    """Absolute due times: deadlines, or revised deadlines of demoted requests."""
    revised_deadline: Floats
    """Absolute revised deadlines; infinite for requests that were never demoted."""
    by_due: Ints
    """All rows, sorted by due time."""


class Guarded:
    """Orders the prefills of one plan under `guarded`. Deterministic: equal calls give equal decisions."""

    def __init__(self, settings: GuardedSettings) -> None:
        self.settings = settings
        self._space = _Space(0)
        self._near_decisions = 0  # since all rows were examined
        self._far_left = False  # the last decision left far violations to the next one
        self._any_late = False  # a row was demoted when all were last examined, or since

    def order(self, columns: Columns, plan: Plan, now: float) -> Iterator[int]:
        """Update `plan` and return its rows, most urgent first."""
        first = self.first(columns, plan, now)
        return _lazily(plan.by_due.copy(), first)  # the caller may move rows before it reads on

    def first(self, columns: Columns, plan: Plan, now: float, factor: float = 1.0) -> int | None:
        """Update `plan` and return the row that precedes all others; None if the order is by due time alone.

        The remaining work is multiplied by `factor`.
        """
        rows = len(plan.by_due)
        if not rows:
            return None
        if rows <= self.settings.few_rows:
            is_unchanged, row = self._if_unchanged(columns, plan, now, factor)
            if is_unchanged:
                return row
        if rows > self._space.rows:
            self._space = _Space(2 * rows)
        near = self.settings.near_rows
        self._near_decisions += 1
        if rows <= near or self._far_left or self._near_decisions == self.settings.far_every_decisions:
            near, self._near_decisions, self._any_late = rows, 0, False
        view = _View(columns, plan, now, factor, self.settings, self._space, near, self._any_late)
        view = self._feasible(view)
        self._any_late = view.any_late
        place = self._cheap(view)
        return None if place is None else int(plan.by_due[place])

    def _if_unchanged(
        self, columns: Columns, plan: Plan, now: float, factor: float
    ) -> tuple[bool, int | None]:
        """Return whether the plan can stay as it is, and the row that then goes first.

        The plan stays if every due time can be met and no demoted row can get its deadline back. The result
        is exactly that of `_feasible` and `_cheap`, in a fifth of the time for the few rows that most
        decisions see. If it is False, those two must decide. All work is finite.
        """
        order: list[int] = plan.by_due.tolist()
        absolute: list[float] = plan.due.tolist()
        deadline: list[float] = columns.deadline.tolist()
        remaining: list[float] = (columns.remaining_seconds * factor).tolist()
        grace = self.settings.grace_seconds
        for row in order:
            if absolute[row] > deadline[row]:
                grace = 0.0
        due: list[float] = []
        done: list[float] = []
        room: list[float] = []
        smallest, smallest_load = -1, 0.0  # of the demoted rows: place and load of the one with least work
        for place, row in enumerate(order):
            load = remaining[row] / self.settings.lanes
            due.append(absolute[row] - now)
            done.append((done[-1] if place else 0.0) + load)
            left = due[place] - max(done[place], remaining[row])
            late = absolute[row] > deadline[row]
            room.append(left - load if late else left + grace)
            if room[place] < -_EPSILON_SECONDS:
                return False, None
            if late:
                if smallest < 0 or remaining[row] < remaining[order[smallest]]:
                    smallest, smallest_load = place, load
                until = deadline[row] - now
                before = bisect_right(due, until)
                ahead = done[before - 1] if before else 0.0
                if load <= min(until - ahead, min(room[before:place], default=inf)):
                    return False, None  # it might get its deadline back
        self._near_decisions, self._far_left, self._any_late = 0, False, smallest >= 0
        if smallest < 0 or smallest_load > self.settings.demoted_share * min(room[:smallest], default=inf):
            return True, None
        return True, order[smallest]

    def _feasible(self, view: _View) -> _View:
        """Demote requests until every due time can be met; if none need be, restore deadlines that fit."""
        rounds = far_rounds = 0
        self._far_left = False
        while len(bad := (view.room < -_EPSILON_SECONDS).nonzero()[0]):
            late = view.late[bad]
            kept = bad[~late]
            hopeless = kept[view.remaining[kept] > view.due[kept] + view.grace + _EPSILON_SECONDS]
            if len(hopeless):
                view = self._demote(view, hopeless[np.argsort(view.remaining[hopeless], kind="stable")])
            elif (missed := view.missed(bad, late)) is not None and view.is_broken(missed):
                view = self._renew(view)
            else:
                worst = rounds >= _SINGLE_ROUNDS  # many violations: faster; excess demotions are undone later
                point = self._worst_point(view, bad) if worst else self._first_point(view, bad, late)
                if point is None:
                    break
                far_rounds += point >= self.settings.near_rows
                if far_rounds > _FAR_ROUNDS and not worst:  # the rest can wait for the next decision
                    self._far_left = True
                    break
                view = self._demote(view, _largest(view, point))
            rounds += 1
        if rounds == 0 and view.any_late:  # after demotions there is hardly any room to restore a deadline
            self._restore_deadlines(view)
        return view

    def _first_point(self, view: _View, bad: Ints, late: Bools) -> int | None:
        """Return the first of `_points`; it is nearly always among the first violations."""
        if not late[0]:
            return int(bad[0])
        if len(bad) > _FIRST_BAD:
            points = self._points(view, bad[:_FIRST_BAD])
            if len(points):
                return int(points[0])
        points = self._points(view, bad)
        return int(points[0]) if len(points) else None

    def _worst_point(self, view: _View, bad: Ints) -> int | None:
        """Return the one of `_points` with the least room."""
        points = self._points(view, bad)
        return int(points[np.argmin(view.room[points])]) if len(points) else None

    def _points(self, view: _View, bad: Ints) -> Ints:
        """Return the places without room (`bad`) for which a request before them must be demoted.

        While a revised deadline can still be met, it demotes no request that is small compared with its own
        work.
        """
        late = view.late[bad]
        if not late.any():
            return bad
        kept = (~view.late[: int(bad[-1]) + 1]).nonzero()[0]
        # At index i: the largest load of the first i rows that are not demoted (few, under overload).
        most = np.concatenate(([0.0], np.maximum.accumulate(view.load[kept])))
        largest = most[kept.searchsorted(bad, side="right")]
        load = view.load[bad]
        tolerated = (largest < self.settings.demoted_share * load) & (
            view.room[bad] + load >= -_EPSILON_SECONDS
        )
        return bad[~late | ((largest > 0) & ~tolerated)]

    def _demote(self, view: _View, places: Ints) -> _View:
        """Demote the requests at these places: their due times become their revised deadlines.

        A revised deadline is set once, and stays valid even if the deadline was restored meanwhile. If the
        share alone would finish a request by its deadline, its revised deadline is just after the deadline,
        so that others must be demoted instead.
        """
        plan, rows = view.plan, view.plan.by_due[places]
        if len(places) == 1:  # nearly always; the same sums as below, without arrays
            place, row = int(places[0]), int(rows[0])
            revised = float(plan.revised_deadline[row])
            if isinf(revised):
                ahead = view.demoted_seconds() + float(view.load[place])
                end = view.now + max(ahead, float(view.remaining[place])) / self.settings.demoted_share
                revised = max(end, nextafter(float(view.columns.deadline[row]), inf))
                plan.revised_deadline[row] = revised
            return view.moved_one(place, revised)
        fresh = places[np.isinf(plan.revised_deadline[rows])]
        if len(fresh):
            before = view.demoted_seconds() + view.load[fresh].cumsum()
            ends = view.now + np.maximum(before, view.remaining[fresh]) / self.settings.demoted_share
            fresh_rows = plan.by_due[fresh]
            plan.revised_deadline[fresh_rows] = np.maximum(
                ends, np.nextafter(view.columns.deadline[fresh_rows], np.inf)
            )
        return view.moved(places, plan.revised_deadline[rows])

    def _renew(self, view: _View) -> _View:
        """Replace revised deadlines that the demoted requests could not meet even without all other requests.

        This happens when steps took longer than predicted.
        """
        late_load = np.multiply(view.load, view.late, out=view.scratch)
        alone = np.maximum(late_load.cumsum(), view.remaining)
        broken = (view.late & (alone > view.due + _EPSILON_SECONDS)).nonzero()[0]
        revised_deadline = view.now + alone[broken] / self.settings.demoted_share
        view.plan.revised_deadline[view.plan.by_due[broken]] = revised_deadline
        return view.moved(broken, revised_deadline)

    def _restore_deadlines(self, view: _View) -> None:
        """Restore the deadlines of the smallest demoted requests while all other due times can be met."""
        earliest = np.add(view.remaining, view.now, out=view.scratch)
        deadline = view.columns.deadline.take(view.by_due, out=view.spare, mode="clip")
        places = (view.late & (deadline >= earliest)).nonzero()[0]
        for _ in range(_MOST_RETURNS):
            smallest = places
            if len(places) > _RETURNS:
                smallest = places[np.argpartition(view.remaining[places], _RETURNS)[:_RETURNS]]
            for place in smallest[np.argsort(view.remaining[smallest], kind="stable")].tolist():
                if view.can_be_in_time(place):
                    break
            else:
                return
            to = view.move(place, view.deadline_of(place))
            places = places[places != place]
            if to < place:
                places[(places >= to) & (places < place)] += 1
            else:
                places[(places > place) & (places <= to)] -= 1

    def _cheap(self, view: _View) -> int | None:
        """Return the place of the smallest demoted request if it may go first, else None.

        It may if its load is at most `demoted_share` of the room of every request before it, so that it
        costs them next to nothing.
        """
        if not view.any_late:
            return None
        np.copyto(view.scratch, view.remaining)
        view.scratch[view.kept()] = np.inf
        place = int(view.scratch.argmin())
        room = float(view.room[:place].min()) if place else inf
        return place if view.load[place] <= self.settings.demoted_share * room else None


def _largest(view: _View, point: int) -> Ints:
    """Return the places with most work up to `point`, as many as must be demoted to meet its due time."""
    kept = (~view.late[: point + 1]).nonzero()[0]
    load = view.load[kept]
    wanted = -view.room[point] - _EPSILON_SECONDS
    largest = load.argmax()
    if load[largest] >= wanted:  # nearly always: one is enough, and no sort is needed
        return kept[largest : largest + 1]
    kept = kept[np.argsort(-load, kind="stable")]
    return kept[: int(view.load[kept].cumsum().searchsorted(wanted)) + 1]


def _lazily(rows: Ints, first: int | None = None) -> Iterator[int]:
    """Yield rows one by one, `first` before all others."""
    if first is not None:
        yield first
        rows = rows[rows != first]
    for start in range(0, len(rows), _BATCH):
        yield from rows[start : start + _BATCH].tolist()


class _Space:
    """Preallocated arrays that successive views write into.

    The system provides new arrays of thousands of rows page by page, which takes longer than filling them.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.columns: list[Floats] = [np.empty(rows) for _ in range(7)]
        self.late: Bools = np.empty(rows, dtype=np.bool_)
        self.all_rows: Floats = np.empty(rows)


class _View:
    """Columns sorted by due time (a *place* is an index into them), with times relative to now."""

    def __init__(
        self,
        columns: Columns,
        plan: Plan,
        now: float,
        factor: float,
        settings: GuardedSettings,
        space: _Space,
        rows: int,
        any_late: bool,
    ) -> None:
        """View the first `rows` rows by due time; `any_late`: one of the others is demoted."""
        self.columns, self.plan, self.now, self.factor = columns, plan, now, factor
        self.settings, self.space = settings, space
        self.by_due: Ints = plan.by_due[:rows]
        by_due = self.by_due
        due, remaining, load, done, room, scratch, spare = [column[:rows] for column in space.columns]
        self.scratch: Floats = scratch
        """Buffer for temporary results."""
        self.spare: Floats = spare
        """A second buffer for temporary results."""
        plan.due.take(by_due, out=due, mode="clip")  # any mode but "raise" writes straight into `out`
        columns.remaining_seconds.take(by_due, out=remaining, mode="clip")
        remaining *= factor
        self.remaining: Floats = remaining
        self.load: Floats = (
            remaining if settings.lanes == 1 else np.divide(remaining, settings.lanes, out=load)
        )
        """Seconds of all lanes together that each row takes; with one lane, the same array as `remaining`."""
        deadline = columns.deadline.take(by_due, out=spare, mode="clip")
        self.late: Bools = np.greater(due, deadline, out=space.late[:rows])
        """Flags of demoted rows."""
        self.any_late = any_late or bool(self.late.any())
        self.grace = 0.0 if self.any_late else settings.grace_seconds
        self.due: Floats = np.subtract(due, now, out=due)
        self.done: Floats = self.load.cumsum(out=done)
        """Time at which each row and all before it can be done."""
        self.room: Floats = room
        """Seconds by which each row may be delayed; negative where its due time cannot be met."""
        self._find_room(0, rows)

    def kept(self) -> Ints:
        """Return the places of rows that are not demoted; under overload these are few."""
        return (~self.late).nonzero()[0]

    def _find_room(self, first: int, stop: int) -> None:
        due, load, room = self.due[first:stop], self.load[first:stop], self.room[first:stop]
        ends = self.done[first:stop]
        if self.settings.lanes > 1:
            ends = np.maximum(ends, self.remaining[first:stop], out=self.scratch[first:stop])
        np.subtract(due, ends, out=room)
        if not self.any_late:
            room += self.grace
            return
        # A revised deadline keeps a margin of the request's own work, which only small requests may use.
        kept = (~self.late[first:stop]).nonzero()[0]
        room -= load
        room[kept] = due[kept] - ends[kept]

    def missed(self, bad: Ints, late: Bools) -> int | None:
        """Return the first of the places `bad` whose revised deadline cannot be met even without its margin.

        `late` flags the demoted ones among `bad`. None if there is no such place.
        """
        if not self.any_late:
            return None
        for examined in (_FIRST_BAD, len(bad)):  # nearly always among the first
            places = bad[:examined]
            found = places[late[:examined] & (self.room[places] + self.load[places] < -_EPSILON_SECONDS)]
            if len(found):
                return int(found[0])
        return None

    def is_broken(self, place: int) -> bool:
        """Return whether the demoted rows up to `place` would miss its due time even without all other rows.

        The cumulative sum, in order, decides. A plain sum takes a tenth of the time and gives the same answer
        unless it is so near that rounding decides: both differ from the true sum by less than `len` roundings
        of it.
        """
        until = slice(place + 1)
        loads = np.multiply(self.load[until], self.late[until], out=self.scratch[until])
        latest, own = float(self.due[place]) + _EPSILON_SECONDS, float(self.remaining[place])
        total = float(loads.sum())
        if abs(total - latest) <= 1e-15 * len(loads) * total:
            total = float(loads.cumsum()[-1])
        return max(total, own) > latest

    def demoted_seconds(self) -> float:
        """Return the load of all rows that have a revised deadline, even if their deadline was restored."""
        plan = self.plan
        has_one = np.isfinite(plan.revised_deadline)
        work = np.multiply(self.columns.remaining_seconds, has_one, out=self.space.all_rows[: len(has_one)])
        return float(work.sum()) * self.factor / self.settings.lanes

    def deadline_of(self, place: int) -> float:
        """Return the absolute deadline of the request at `place`."""
        return float(self.columns.deadline[self.plan.by_due[place]])

    def can_be_in_time(self, place: int) -> bool:
        """Return whether a demoted request can get its deadline back and all other due times still be met."""
        until = self.deadline_of(place) - self.now
        before = int(self.due.searchsorted(until, side="right"))
        ahead = self.done[before - 1] if before else 0.0
        room = self.room[before:place].min() if before < place else inf
        return bool(self.load[place] <= min(until - ahead, room))

    def moved(self, places: Ints, dues: Floats) -> _View:
        """Give the requests at these places other due times and return the resulting view."""
        if len(places) == 1:
            return self.moved_one(int(places[0]), float(dues[0]))
        return self._sorted_in(places, dues)

    def moved_one(self, place: int, due: float) -> _View:
        """Make `due`, the revised deadline of the request at `place`, its due time; return the resulting view."""
        if not self.any_late:
            return self._sorted_in(np.array([place]), np.array([due]))
        self.move(place, due)
        return self

    def _sorted_in(self, places: Ints, dues: Floats) -> _View:
        plan = self.plan
        rows = plan.by_due[places]
        plan.due[rows] = dues
        rows = rows[np.argsort(dues, kind="stable")]
        others = np.delete(plan.by_due, places)
        plan.by_due[:] = np.insert(
            others, np.searchsorted(plan.due[others], plan.due[rows], side="right"), rows
        )
        return _View(
            self.columns, plan, self.now, self.factor, self.settings, self.space, len(self.due), any_late=True
        )

    def move(self, place: int, due: float) -> int:
        """Give the request at `place`, which has a revised deadline, another due time; the view stays sorted.

        Return its new place; the length of the view if it left the view.
        """
        row = int(self.plan.by_due[place])
        self.plan.due[row] = due
        to = int(self.due.searchsorted(due - self.now, side="right"))
        to -= to > place
        if to == len(self.due) - 1 < len(self.plan.by_due) - 1:
            self._leave(place, due)
            return len(self.due)
        first, last = min(place, to), max(place, to)
        lower, upper = slice(first, last), slice(first + 1, last + 1)
        source, target = (upper, lower) if to > place else (lower, upper)
        columns = [self.by_due, self.due, self.remaining, self.late, self.done, self.room]
        if self.load is not self.remaining:
            columns.append(self.load)
        for column in columns:
            moving = column[place]
            column[target] = column[source]
            column[to] = moving
        own = float(self.load[to])
        load = own if to < place else -own
        self.done[target] += load
        self.room[target] -= load
        self.due[to] = due - self.now
        self.late[to] = bool(due > self.columns.deadline[row])
        self.done[to] = own + (float(self.done[to - 1]) if to else 0.0)
        if self.settings.lanes > 1:
            self._find_room(first, last + 1)
        else:
            room = float(self.due[to]) - float(self.done[to])
            self.room[to] = room - own if self.late[to] else room
        return to

    def _leave(self, place: int, due: float) -> None:
        """Remove the request at `place`, which is now due after all rows of the view."""
        order, last, own = self.plan.by_due, len(self.due) - 1, float(self.load[place])
        to = int(self.plan.due.searchsorted(due, side="right", sorter=order)) - 1
        row = order[place]
        order[place:to] = order[place + 1 : to + 1]
        order[to] = row
        columns = [self.due, self.remaining, self.late, self.done, self.room]
        if self.load is not self.remaining:
            columns.append(self.load)
        for column in columns:
            column[place:last] = column[place + 1 :]
        self._cut(last)
        self.done[place:] -= own
        if self.settings.lanes > 1:
            self._find_room(place, last)
        else:
            self.room[place:] += own

    def _cut(self, rows: int) -> None:
        """Shrink the view to its first `rows` rows."""
        self.by_due, self.due, self.late = self.by_due[:rows], self.due[:rows], self.late[:rows]
        self.load = self.remaining[:rows] if self.load is self.remaining else self.load[:rows]
        self.remaining = self.load if self.settings.lanes == 1 else self.remaining[:rows]
        self.done, self.room = self.done[:rows], self.room[:rows]
        self.scratch, self.spare = self.scratch[:rows], self.spare[:rows]
