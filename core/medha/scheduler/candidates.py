"""The table of prefills: every request that has prompt positions left to dispatch, as a struct of arrays.

A decision looks at all of them at once, so each fact that it needs is one numpy column. Rows are dense: the last row
takes the place of one that goes. The order of the rows by due time is kept while requests come and go, at the price of
a short `memmove` each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from medha.cost.prefill_seconds import Alone
from medha.scheduler.guarded import Plan
from medha.scheduler.policy import Bools, Columns, Floats, Ints
from medha.scheduler.request import NOWHERE, Request

_FIRST_CAPACITY = 64
NEAR_PROMISE = 3.0
"""Times its own work: from so long before its promise a request that was given up lets nobody else take KV first."""

_Lanes = npt.NDArray[np.int16]
_Item = TypeVar("_Item", bound=np.generic)


@dataclass(slots=True)
class Room:
    """Blocks of KV that waiting requests may take now."""

    of_one_lane: int
    of_all_lanes: int  # for requests that may be cut over several lanes
    of_longs: int | None = None  # what is left of the share of long ones; None: no limit
    starts_long: bool = True  # whether another long one may begin its prefill


class Candidates:
    """Waiting requests, and running ones whose prefill is not wholly dispatched."""

    def __init__(self, *, by_due: bool = False) -> None:
        """`by_due`: keep the order of due times, for a policy that reads it."""
        self._keeps_order = by_due
        self.requests: list[Request] = []  # by row
        # Columns of one type lie in one array, so that a row moves in four operations.
        self._seconds: Floats = np.zeros((9, _FIRST_CAPACITY), dtype=np.float64)
        self._counts: Ints = np.zeros((2, _FIRST_CAPACITY), dtype=np.int64)
        self._lane: _Lanes = np.zeros(_FIRST_CAPACITY, dtype=np.int16)  # NOWHERE while it waits
        self._flags: Bools = np.zeros((4, _FIRST_CAPACITY), dtype=np.bool_)
        self._by_due: Ints = np.zeros(_FIRST_CAPACITY, dtype=np.int64)  # rows, in that order
        self._most_wanted = 0  # no row wants more blocks; fewer, perhaps
        self._any_misfit = False  # or none any more
        self._name_columns()

    def __len__(self) -> int:
        return len(self.requests)

    def _name_columns(self) -> None:
        arrival, deadline, work, remaining, busy, busy_until, due, promise, patience = self._seconds
        self._arrival: Floats = arrival
        self._deadline: Floats = deadline
        self._work: Floats = work
        self._remaining: Floats = remaining  # before the predictor's correction
        self._busy: Floats = busy  # of it, in a stage
        self._busy_until: Floats = busy_until  # the deadline of that
        self._due: Floats = due
        self._promise: Floats = promise
        self._patience: Floats = patience  # until then one that was given up claims no share of longs
        tie, wanted = self._counts
        self._tie: Ints = tie
        self._wanted: Ints = wanted  # blocks of KV to be admitted; 0 once it is
        long, spread, held, misfit = self._flags
        self._long: Bools = long
        self._spread: Bools = spread  # may be cut over several lanes
        self._held: Bools = held  # waits for a prefill that it will share
        self._misfit: Bools = misfit  # finds no place, though there is as much KV as it wants

    def _double(self) -> None:
        """Room for twice as many rows."""
        self._seconds, self._counts = _doubled(self._seconds), _doubled(self._counts)
        self._flags, self._lane = _doubled(self._flags), _doubled(self._lane)
        self._by_due = _doubled(self._by_due)
        self._name_columns()

    # --- rows come, change and go -------------------------------------------------------------------

    def add(self, request: Request, left: Alone, busy_until: float, wanted_blocks: int) -> None:
        """A new row; `left` is before correction, and its busy part should end by `busy_until`."""
        row = len(self.requests)
        if row == len(self._tie):
            self._double()
        request.row = row
        self.requests.append(request)
        self._arrival[row] = request.arrival
        self._deadline[row] = request.deadline
        due = self._busy_until[row] = self._due[row] = busy_until
        self._promise[row] = self._patience[row] = np.inf
        self._work[row] = request.work_seconds
        self._remaining[row], self._busy[row] = left.seconds, left.busy_seconds
        self._tie[row] = request.tie
        self._want(request, wanted_blocks)
        self._lane[row] = request.lane
        self._long[row] = request.is_long
        self._spread[row] = request.may_spread
        self._held[row] = self._misfit[row] = False
        if self._keeps_order:
            place = int(self._due[:row].searchsorted(due, side="right", sorter=self._by_due[:row]))
            self._by_due[place + 1 : row + 1] = self._by_due[place:row]
            self._by_due[place] = row

    def _want(self, request: Request, blocks: int) -> None:
        self._wanted[request.row] = request.wanted_blocks = blocks
        self._most_wanted = max(self._most_wanted, blocks)

    def remove(self, requests: Iterable[Request]) -> None:
        """Their rows go; nothing happens to a request that has none."""
        by_row = self.requests
        before = len(by_row)
        gone: list[int] = []
        moved: dict[int, int] = {}  # row -> the row that its request had before
        for request in requests:
            row = request.row
            if row == NOWHERE:
                continue
            replacement = by_row.pop()
            last = len(by_row)
            gone.append(moved.pop(row, row))
            request.row = NOWHERE
            if row != last:
                moved[row] = moved.pop(last, last)
                by_row[row] = replacement
                replacement.row = row
        if gone and self._keeps_order:
            self._leave_order(before, gone, moved)
        if moved:  # all at once: a step ends dozens of prefills
            to, source = np.array([*moved]), np.array([*moved.values()])
            self._seconds[:, to] = self._seconds.take(source, axis=1)
            self._counts[:, to] = self._counts.take(source, axis=1)
            self._flags[:, to] = self._flags.take(source, axis=1)
            self._lane[to] = self._lane[source]

    def _leave_order(self, before: int, gone: list[int], moved: dict[int, int]) -> None:
        """Take `gone` of the `before` rows out of the order, and give those that will move their new names."""
        order = self._by_due[:before]
        found = self._places(before, [*gone, *moved.values()])
        places, renamed = sorted(found[: len(gone)]), found[len(gone) :]
        if moved:
            order[renamed] = [*moved]
        to = places[0]
        for place, following in zip(places, [*places[1:], before], strict=True):  # runs that stay close up
            stay = following - place - 1
            if stay:
                order[to : to + stay] = order[place + 1 : following]
                to += stay

    def _places(self, before: int, rows: list[int]) -> list[int]:
        """Where `rows` of the first `before` ones stand in the order."""
        due, order = self._due[:before], self._by_due[:before]
        wanted = np.array(rows)
        places = due.searchsorted(due[wanted], sorter=order)
        for index in (order[places] != wanted).nonzero()[0].tolist():  # several are due at once
            places[index] = (order == wanted[index]).argmax()
        found: list[int] = places.tolist()
        return found

    def admitted(self, request: Request) -> None:
        """It holds KV now, and runs on its lane."""
        self._lane[request.row] = request.lane
        self._wanted[request.row] = 0

    def wants(self, request: Request, blocks: int, left: Alone, busy_until: float, *, held: bool) -> None:
        """What a waiting request needs to be admitted, and whether it must wait for a prefill that it shares."""
        row = request.row
        self._want(request, blocks)
        self._remaining[row], self._busy[row] = left.seconds, left.busy_seconds
        self._held[row], self._misfit[row] = held, False
        if busy_until != self._busy_until[row]:
            kept = self._due[row] <= self._busy_until[row]
            self._busy_until[row] = busy_until
            if kept or self._due[row] < busy_until:
                self._fall_due(row, busy_until)

    def misfits(self, request: Request) -> None:
        """A waiting request found no place, though there was as much KV as it wants: it lacks KV, for all that."""
        self._misfit[request.row] = self._any_misfit = True

    def _fall_due(self, row: int, due: float) -> None:
        """Give a row another due, and its place by it."""
        self._due[row] = due
        if self._keeps_order:
            rows = len(self.requests)
            others = self._by_due[:rows]
            others = others[others != row]
            place = int(self._due[others].searchsorted(due, side="right"))
            self._by_due[:rows] = np.insert(others, place, row)

    def progressed(self, request: Request, left: Alone) -> None:
        """What is left of a prefill has changed; before correction."""
        self._remaining[request.row], self._busy[request.row] = left.seconds, left.busy_seconds

    # --- what a decision looks at -------------------------------------------------------------------

    def columns(self, correction: float) -> Columns:
        """A view for policies; remaining work is corrected."""
        rows = len(self.requests)
        return Columns(
            arrival=self._arrival[:rows],
            deadline=self._deadline[:rows],
            work_seconds=self._work[:rows],
            remaining_seconds=self._remaining[:rows] * correction,
            tie=self._tie[:rows],
        )

    @property
    def stage_columns(self) -> Columns:
        """The same with what prefills keep a stage busy, which adds up, and by when that should end; not corrected."""
        rows = len(self.requests)
        return Columns(
            arrival=self._arrival[:rows],
            deadline=self._busy_until[:rows],
            work_seconds=self._work[:rows],
            remaining_seconds=self._busy[:rows],
            tie=self._tie[:rows],
        )

    @property
    def plan(self) -> Plan:
        """When each row is due: for `Guarded`, which brings it up to date."""
        rows = len(self.requests)
        return Plan(due=self._due[:rows], promise=self._promise[:rows], by_due=self._by_due[:rows])

    def dispatched_by(self, request: Request) -> float:
        """By when all of its prefill is to be dispatched: long ago if it is, later than its deadline if it was given up."""
        return float(self._due[request.row]) if request.row != NOWHERE else -inf

    def remaining_seconds(self, request: Request) -> float:
        """What is left of one prefill, before correction."""
        return float(self._remaining[request.row]) if request.row != NOWHERE else 0.0

    def due(self, request: Request) -> float:
        """When one is due: its deadline, or a later promise."""
        return float(self._due[request.row]) if request.row != NOWHERE else request.deadline

    def busy_seconds(self, requests: Iterable[Request]) -> float:
        """How long what is left of these would keep a stage busy if each were alone; before correction."""
        return sum([float(self._busy[request.row]) for request in requests if request.row != NOWHERE])

    def total_remaining_seconds(self) -> float:
        """Of all rows, before correction."""
        return float(self._remaining[: len(self.requests)].sum())

    def remaining_by_lane(self, lanes: int) -> Floats:
        """Of rows that hold KV, by the lane that computes them; before correction."""
        rows = len(self.requests)
        lane = self._lane[:rows] - NOWHERE  # those that wait come first
        seconds = np.bincount(lane, weights=self._remaining[:rows], minlength=lanes + 1)
        return np.asarray(seconds[1:], dtype=np.float64)

    def running(self, lanes: Sequence[int]) -> Bools:
        """Rows that hold KV and are computed by one of `lanes`."""
        lane = self._lane[: len(self.requests)]
        found: Bools = lane == lanes[0]
        for other in lanes[1:]:
            found |= lane == other
        return found

    def admissible(self, room: Room) -> Bools:
        """Waiting rows that find room, and share no prefill that still runs."""
        rows = len(self.requests)
        refused = self._without(room)
        if not room.starts_long:
            refused |= self._long[:rows]
        elif room.of_longs is not None and self._most_wanted > room.of_longs:
            refused |= self._long[:rows] & (self._wanted[:rows] > room.of_longs)
        refused |= self._held[:rows]
        refused |= self._lane[:rows] != NOWHERE
        return np.logical_not(refused, out=refused)

    def late_without_room(self, room: Room, now: float, correction: float) -> Request | None:
        """The waiting request of the earliest deadline that has no slack left and lacks nothing but free KV.

        Long ones may lack their share of it. Of those, one that was given up is not late before its promise is near,
        or has been: others can still be in time.
        """
        rows = len(self.requests)
        least = room.of_one_lane if room.of_longs is None else min(room.of_one_lane, room.of_longs)
        if rows == 0 or (self._most_wanted <= least and not self._any_misfit):
            return None
        lacking = self._wanted[:rows] > least
        if not self._any_misfit and not lacking.any():
            self._most_wanted = least
            return None
        if self._any_misfit:
            self._any_misfit = bool(self._misfit[:rows].any())
            lacking |= self._misfit[:rows]
        found = lacking.nonzero()[0]  # few, as a rule, of whom all else is asked
        found = found[(self._lane[found] == NOWHERE) & ~self._held[found]]
        wanted, is_long = self._wanted[found], self._long[found]
        together = np.where(self._spread[found], max(room.of_all_lanes, room.of_one_lane), room.of_one_lane)
        lacks = (wanted > together) | self._misfit[found]
        lacks_share = np.zeros(len(found), dtype=np.bool_)
        if not room.starts_long:
            lacks &= ~is_long
        elif room.of_longs is not None:
            lacks_share = is_long & (wanted > room.of_longs)
            lacks |= lacks_share
        remaining = self._remaining[found] * correction
        late = lacks & (self._deadline[found] - remaining < now)
        if self._keeps_order and lacks_share.any():
            near = self._due[found] - NEAR_PROMISE * remaining
            near[self._due[found] <= self._deadline[found]] = np.inf
            patience = self._patience[found] = np.minimum(self._patience[found], near)
            late &= ~lacks_share | (patience <= now)
        return self._earliest(found[late])

    def late(self, now: float, correction: float) -> Request | None:
        """The waiting request of the earliest deadline that has no slack left, and shares no prefill that still runs."""
        rows = len(self.requests)
        late = self._deadline[:rows] - self._remaining[:rows] * correction < now
        late &= self._lane[:rows] == NOWHERE
        late &= ~self._held[:rows]
        return self._earliest(late.nonzero()[0])

    def _earliest(self, rows: Ints) -> Request | None:
        """The one of `rows` with the earliest deadline."""
        if not len(rows):
            return None
        order = np.lexsort((self._tie[rows], self._deadline[rows]))
        return self.requests[int(rows[order[0]])]

    def _without(self, room: Room) -> Bools:
        """Rows that want more than is free."""
        rows = len(self.requests)
        wanted = self._wanted[:rows]
        found: Bools
        if self._most_wanted <= room.of_one_lane:  # as long as KV is not short
            found = np.zeros(rows, dtype=np.bool_)
        else:
            found = wanted > room.of_one_lane
        if room.of_all_lanes > room.of_one_lane:
            found &= ~self._spread[:rows] | (wanted > room.of_all_lanes)
        return found


def _doubled(columns: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    return np.concatenate([columns, np.zeros_like(columns)], axis=-1)
