"""The table of all requests of a replica: by id, and with a numpy column for each fact that decisions compare.

A request is here from its arrival until its KV is released. While it has prompt positions left to dispatch, it
also has a row. A decision examines all rows at once, so each fact that it needs is a column. Facts that
change while a request has a row (what it needs, how much work is left, when it is due) are in its columns
and nowhere else; the constant ones are copied when the row is added, and its lane when it gets KV. The request
keeps them, because they are needed when it has no row: decodes are compared by them, and one that steps aside comes
back with them. Its turn is copied back when the row is removed.

    column                            written by
    arrival, deadline, work, tie,     `add`: constant
    long, spread, owner,
    contested, returns
    turn                              `add`; `prefilled`, `stop`, `remove` (of rows of the same owner);
                                      `take_turns` through `turns`
    remaining, busy                   `add`, `needs`, `progressed`
    begun                             `add`, `progressed`
    busy_until                        `add`, `needs`
    needed, held, misfit              `add`, `needs`, `misfits`; `place` sets `needed` to 0
    lane                              `add`, `place`
    due, revised_deadline             `add`, `needs`, and the policy `guarded` through `plan`
    patience                          `add`, `late_without_capacity`

Rows are dense: the last row replaces a removed one. The order of the rows by due time is maintained as rows
are added and removed, at the cost of a short `memmove` each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from medha.cost.prefill_seconds import Alone
from medha.scheduler.guarded import Plan
from medha.scheduler.owner_places import OwnerPlaces
from medha.scheduler.policy import Bools, Columns, Floats, Ints
from medha.scheduler.request import NOWHERE, Request

_FIRST_CAPACITY = 64
NEAR_REVISED_DEADLINE = 3.0
"""Time before its revised deadline, in multiples of its remaining work, from which a demoted long request no longer
leaves KV to others."""

_Lanes = npt.NDArray[np.int16]
_Item = TypeVar("_Item", bound=np.generic)


@dataclass(slots=True)
class Capacity:
    """Blocks of KV that waiting requests may take now."""

    of_one_lane: int
    of_all_lanes: int  # for requests that may be split over several lanes
    of_longs: int | None = None  # what is left of the share of long requests; None: no limit
    of_returning: int | None = None  # the same for those of them that come back
    starts_long: bool = True  # whether another long request may begin its prefill
    over: tuple[int, ...] = ()  # owners that must leave running places or KV to others, by number
    over_kv: bool = False  # one of them holds too much KV
    above_share: tuple[int, ...] = ()  # owners whose requests that are not long may not claim KV
    early_seconds: float = 0.0  # requests that are not long count as late so much before they are


class RequestTable:
    """All requests of a replica: the only record of which are here, which wait, and what each still needs."""

    def __init__(self, *, by_due: bool = False) -> None:
        """`by_due`: maintain the order by due time, for a policy that reads it."""
        self._keeps_order = by_due
        self._by_id: dict[str, Request] = {}
        self._holders: dict[str, Request] = {}
        self.waiting = 0
        """Number of requests that hold no KV."""
        self._returning = 0  # those of them that come back to the share of long requests
        self.owners = OwnerPlaces()
        """The numbers of requests of each owner that wait, and that hold KV."""
        self._ended = 0  # requests whose KV waits in quarantine
        self.rows: list[Request] = []
        """Requests by row: those that wait, and those whose prefill is not wholly dispatched."""
        # Columns of one type share one array, so that a row moves in four operations.
        self._seconds: Floats = np.zeros((11, _FIRST_CAPACITY), dtype=np.float64)
        self._counts: Ints = np.zeros((4, _FIRST_CAPACITY), dtype=np.int64)
        self._lane: _Lanes = np.zeros(_FIRST_CAPACITY, dtype=np.int16)  # NOWHERE while it waits
        self._flags: Bools = np.zeros((5, _FIRST_CAPACITY), dtype=np.bool_)
        self._by_due: Ints = np.zeros(_FIRST_CAPACITY, dtype=np.int64)  # rows, sorted by due time
        self._most_needed = 0  # upper bound of the blocks that any row needs
        self._any_misfit = False  # False only if no row is a misfit
        self._name_columns()

    def _name_columns(self) -> None:
        (arrival, deadline, work, remaining, busy, busy_until, due, revised, patience, turn, contested) = (
            self._seconds
        )
        self._arrival: Floats = arrival
        self._deadline: Floats = deadline
        self._work: Floats = work
        self._remaining: Floats = remaining  # before the predictor's correction
        self._busy: Floats = busy  # the part of it that keeps a stage busy
        self._busy_until: Floats = busy_until  # the deadline of that part
        self._due: Floats = due
        self._revised_deadline: Floats = revised
        self._patience: Floats = patience  # time before which a demoted long request does not claim KV
        self._turn: Floats = turn  # of its owner
        self._contested: Floats = contested  # deadline up to which its router cannot serve all in time
        tie, needed, owner, begun = self._counts
        self._tie: Ints = tie
        self._owner: Ints = owner  # its number
        self._begun: Ints = begun  # tokens of its prompt that are dispatched, and were not cached
        self._needed: Ints = needed  # KV blocks needed for admission; 0 once admitted
        long, spread, held, misfit, returns = self._flags
        self._long: Bools = long
        self._spread: Bools = spread  # may be split over several lanes
        self._held: Bools = held  # waits for a prefill that it will share
        self._misfit: Bools = misfit  # found no place although as much KV as it needs was free
        self._returns: Bools = returns  # long, stepped aside for a deadline: other long ones leave it KV

    def _double(self) -> None:
        """Double the capacity."""
        self._seconds, self._counts = _doubled(self._seconds), _doubled(self._counts)
        self._flags, self._lane = _doubled(self._flags), _doubled(self._lane)
        self._by_due = _doubled(self._by_due)
        self._name_columns()

    # --- who is here --------------------------------------------------------------------------------

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id, if it is here."""
        return self._by_id.get(request_id)

    def __getitem__(self, request_id: str) -> Request:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[Request]:
        """Yield every request, in the order of arrival."""
        return iter(self._by_id.values())

    @property
    def holders(self) -> Iterable[Request]:
        """The requests that hold KV, including those that have ended, in the order of admission."""
        return self._holders.values()

    @property
    def running(self) -> int:
        """Number of requests that hold KV, including those that have ended."""
        return len(self._by_id) - self.waiting

    @property
    def active(self) -> int:
        """Number of requests that hold KV and have not ended."""
        return self.running - self._ended

    @property
    def is_empty(self) -> bool:
        return not self._by_id

    # --- the life of a request ----------------------------------------------------------------------

    def add(
        self, request: Request, work_seconds: float, left: Alone, busy_until: float, needed_blocks: int
    ) -> None:
        """Add a request that waits for KV.

        `work_seconds` is the predicted time of its whole prefill if it runs alone. `left`, the part that is
        not computed yet, is uncorrected; its busy part should end by `busy_until`.
        """
        self._by_id[request.id] = request
        self.waiting += 1
        self._returning += request.returns
        row = len(self.rows)
        if row == len(self._tie):
            self._double()
        request.row = row
        self.rows.append(request)
        self._arrival[row] = request.arrival
        self._deadline[row] = request.deadline
        due = self._busy_until[row] = self._due[row] = busy_until
        self._revised_deadline[row] = self._patience[row] = np.inf
        self._work[row] = work_seconds
        self._remaining[row], self._busy[row] = left.seconds, left.busy_seconds
        self._turn[row] = request.turn
        self._contested[row] = request.contested_until
        self._tie[row] = request.tie
        self._begun[row] = 0
        self._owner[row] = self.owners.arrive(request.submit.owner, is_long=request.is_long)
        self._set_needed(request, needed_blocks)
        self._lane[row] = request.lane
        self._long[row] = request.is_long
        self._spread[row] = request.may_spread
        self._returns[row] = request.returns
        self._held[row] = self._misfit[row] = False
        if self._keeps_order:
            place = int(self._due[:row].searchsorted(due, side="right", sorter=self._by_due[:row]))
            self._by_due[place + 1 : row + 1] = self._by_due[place:row]
            self._by_due[place] = row

    def _set_needed(self, request: Request, blocks: int) -> None:
        self._needed[request.row] = blocks
        self._most_needed = max(self._most_needed, blocks)

    def needs(self, request: Request, blocks: int, left: Alone, busy_until: float, *, held: bool) -> None:
        """Update the needs of a waiting request; `held`: it must wait for a prefill that it will share."""
        row = request.row
        self._set_needed(request, blocks)
        self._remaining[row], self._busy[row] = left.seconds, left.busy_seconds
        self._held[row], self._misfit[row] = held, False
        if busy_until != self._busy_until[row]:
            kept = self._due[row] <= self._busy_until[row]
            self._busy_until[row] = busy_until
            if kept or self._due[row] < busy_until:
                self._shift_due_times(row, busy_until)

    def misfits(self, request: Request) -> None:
        """Record that a waiting request lacks KV: it found no place although as much as it needs was free."""
        self._misfit[request.row] = self._any_misfit = True

    def place(self, request: Request) -> None:
        """Record that a waiting request now holds KV and runs on its lane."""
        self.waiting -= 1
        self._returning -= request.returns
        self._holders[request.id] = request
        self.owners.place(request.submit.owner, is_long=request.is_long)
        self._lane[request.row] = request.lane
        self._needed[request.row] = 0

    def progressed(self, request: Request, left: Alone) -> None:
        """Update the uncorrected remaining work of a prefill, and the part of it that is done."""
        self._remaining[request.row], self._busy[request.row] = left.seconds, left.busy_seconds
        self._begun[request.row] = max(request.dispatched - request.cached_tokens, 0)

    def stop(self, request: Request) -> None:
        """Record that a request with KV gets no more steps."""
        self._ended += 1
        self._leave_rows([request], served=False)

    def remove(self, request: Request) -> None:
        """Remove a request that waits, or that has ended and holds no KV any more."""
        del self._by_id[request.id]
        if request.waits:
            self.waiting -= 1
            self._returning -= request.returns
            self._leave_rows([request], served=False)
        else:
            self._ended -= 1
            del self._holders[request.id]
        self.owners.leave(request.submit.owner, waited=request.waits, is_long=request.is_long)

    def prefilled(self, requests: Iterable[Request]) -> None:
        """Remove the rows of requests with no prompt left to dispatch; one without a row is ignored."""
        self._leave_rows(requests, served=True)

    def _leave_rows(self, requests: Iterable[Request], *, served: bool) -> None:
        """Remove the rows of requests; `served`: they were prefilled, and take the earliest turns of their owners."""
        by_row = self.rows
        before = len(by_row)
        gone: list[int] = []
        moved: dict[int, int] = {}  # row -> the row that its request had before
        for request in requests:
            row = request.row
            if row == NOWHERE:
                continue
            at = moved.pop(row, row)
            if self.owners.has_several(request.submit.owner):
                self._swap_turns(at, before, served=served)
            request.turn = self._turn.item(at)
            replacement = by_row.pop()
            last = len(by_row)
            gone.append(at)
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

    def _swap_turns(self, row: int, rows: int, *, served: bool) -> None:
        """Let a row leave with the earliest turn of its owner's rows, or with the latest one if it is not served."""
        own = (self._owner[:rows] == self._owner[row]).nonzero()[0]
        turns = self._turn[own]
        other = own[turns.argmin() if served else turns.argmax()]
        self._turn[other], self._turn[row] = self._turn[row], self._turn[other]
        self._owner[row] = 0  # no owner: another row that leaves in the same call must not find this one

    def _leave_order(self, before: int, gone: list[int], moved: dict[int, int]) -> None:
        """Remove `gone` of the `before` rows from the order, and renumber the rows that will move."""
        order = self._by_due[:before]
        found = self._places(before, [*gone, *moved.values()])
        places, renamed = sorted(found[: len(gone)]), found[len(gone) :]
        if moved:
            order[renamed] = [*moved]
        to = places[0]
        for place, following in zip(places, [*places[1:], before], strict=True):  # close the gaps
            stay = following - place - 1
            if stay:
                order[to : to + stay] = order[place + 1 : following]
                to += stay

    def _places(self, before: int, rows: list[int]) -> list[int]:
        """Return the places of `rows`, out of `before` rows, in the order by due time."""
        due, order = self._due[:before], self._by_due[:before]
        needed = np.array(rows)
        places = due.searchsorted(due[needed], sorter=order)
        for index in (order[places] != needed).nonzero()[0].tolist():  # several rows have one due time
            places[index] = (order == needed[index]).argmax()
        found: list[int] = places.tolist()
        return found

    def _shift_due_times(self, row: int, due: float) -> None:
        """Set another due time for a row and update the order."""
        self._due[row] = due
        if self._keeps_order:
            rows = len(self.rows)
            others = self._by_due[:rows]
            others = others[others != row]
            place = int(self._due[others].searchsorted(due, side="right"))
            self._by_due[:rows] = np.insert(others, place, row)

    # --- views and queries for decisions ------------------------------------------------------------

    @property
    def contested_until(self) -> float:
        """The deadline up to which, as routers said, not all of their sequences can be on time; -inf: all can."""
        return float(self._contested[: len(self.rows)].max(initial=-inf))

    @property
    def turns(self) -> tuple[Ints, Floats, Ints]:
        """The number of each row's owner, the turn that the row has, and the tokens of it that are served."""
        rows = len(self.rows)
        return self._owner[:rows], self._turn[:rows], self._begun[:rows]

    def columns(self, correction: float) -> Columns:
        """Return a view for policies, with corrected remaining work."""
        rows = len(self.rows)
        return Columns(
            arrival=self._arrival[:rows],
            deadline=self._deadline[:rows],
            work_seconds=self._work[:rows],
            remaining_seconds=self._remaining[:rows] * correction,
            tie=self._tie[:rows],
        )

    @property
    def stage_columns(self) -> Columns:
        """A view of the stage-busy part of the work, which adds up over prefills, and of its deadline.

        The work is uncorrected.
        """
        rows = len(self.rows)
        return Columns(
            arrival=self._arrival[:rows],
            deadline=self._busy_until[:rows],
            work_seconds=self._work[:rows],
            remaining_seconds=self._busy[:rows],
            tie=self._tie[:rows],
        )

    @property
    def plan(self) -> Plan:
        """The due times of all rows, for `Guarded`, which updates them."""
        rows = len(self.rows)
        return Plan(
            due=self._due[:rows], revised_deadline=self._revised_deadline[:rows], by_due=self._by_due[:rows]
        )

    @property
    def returning_blocks(self) -> int:
        """Blocks that long requests need which have stepped aside for a deadline, and wait."""
        if not self._returning:
            return 0
        rows = len(self.rows)
        return int(self._needed[:rows][self._returns[:rows]].sum())

    @property
    def wanted_blocks(self) -> int:
        """Free KV blocks that the waiting requests need, all together."""
        return int(self._needed[: len(self.rows)].sum()) if self.waiting else 0

    def needed_blocks(self, request: Request) -> int:
        """Return how many free KV blocks a waiting request needs to be admitted."""
        return self._needed.item(request.row)

    def owner_number(self, request: Request) -> int:
        """Return the number that stands for a waiting request's owner."""
        return self._owner.item(request.row)

    def is_held(self, request: Request) -> bool:
        """Return whether a waiting request waits for a prefill that it will share."""
        return self._held.item(request.row)

    def is_demoted(self, request: Request) -> bool:
        """Return whether a request is demoted, so that it is due at a revised deadline.

        A request that is wholly dispatched is not.
        """
        row = request.row
        return row != NOWHERE and self._due.item(row) > self._busy_until.item(row)

    def due(self, request: Request) -> float:
        """Return when the first token of a request is due: at its deadline, or its revised one while demoted.

        The columns have the earlier time at which its last chunk must have left a stage. The prompt then drains
        from the pipeline.
        """
        row = request.row
        if not self.is_demoted(request):
            return request.deadline
        return self._due.item(row) + (self._deadline.item(row) - self._busy_until.item(row))

    def prefill_due(self, request: Request) -> float:
        """Return `due` of a prefill; -inf if it is wholly dispatched already."""
        return -inf if request.row == NOWHERE else self.due(request)

    def remaining_seconds(self, request: Request) -> float:
        """Return the uncorrected remaining work of one prefill."""
        return self._remaining.item(request.row) if request.row != NOWHERE else 0.0

    def busy_seconds(self, requests: Iterable[Request]) -> float:
        """Return the uncorrected time for which these prefills, each alone, would still keep a stage busy."""
        return sum([self._busy.item(request.row) for request in requests if request.row != NOWHERE])

    def relative_slack(self, request: Request, now: float, correction: float) -> float:
        """Return rho of a request that has a row: its slack as a share of its whole work."""
        slack = request.deadline - now - self._remaining.item(request.row) * correction
        return slack / max(self._work.item(request.row), 1e-6)

    def least_slack_seconds(self, now: float, correction: float) -> float:
        """Return the least slack of all rows; infinite if there are none."""
        rows = len(self.rows)
        slack = self._deadline[:rows] - now - self._remaining[:rows] * correction
        return float(slack.min(initial=inf))

    def total_remaining_seconds(self) -> float:
        """Return the uncorrected remaining work of all rows."""
        return float(self._remaining[: len(self.rows)].sum())

    def remaining_by_lane(self, lanes: int) -> Floats:
        """Return the uncorrected remaining work of rows that hold KV, by the lane that computes them."""
        rows = len(self.rows)
        lane = self._lane[:rows] - NOWHERE  # 0: waiting rows; i + 1: lane i
        seconds = np.bincount(lane, weights=self._remaining[:rows], minlength=lanes + 1)
        return np.asarray(seconds[1:], dtype=np.float64)

    def running_on(self, lanes: Sequence[int]) -> Bools:
        """Return flags of the rows that hold KV and are computed by one of `lanes`."""
        lane = self._lane[: len(self.rows)]
        found: Bools = lane == lanes[0]
        for other in lanes[1:]:
            found |= lane == other
        return found

    def admissible(self, room: Capacity) -> Bools:
        """Return flags of the waiting rows that find enough free KV and a place, and wait for no prefill of others."""
        rows = len(self.rows)
        refused = self._without(room)
        if not room.starts_long:
            refused |= self._long[:rows]
        elif room.of_longs is not None and self._most_needed > room.of_longs:
            refused |= self._lacks_share(np.arange(rows), room.of_longs, room.of_returning)
        refused |= self._held[:rows]
        if room.over:
            refused |= np.isin(self._owner[:rows], room.over)
        refused |= self._lane[:rows] != NOWHERE
        return np.logical_not(refused, out=refused)

    def late_without_capacity(self, room: Capacity, now: float, correction: float) -> Request | None:
        """Return the late waiting request that lacks only free KV and has the earliest deadline.

        A request is late if it has no slack left. One that is not long counts as late `early_seconds` before that, so
        that others can make way for it. All that are not long count as late while an owner holds too much KV
        (`over_kv`). A long one may lack its share of KV instead of free KV. A demoted long one that lacks its share
        counts as late only once its revised deadline is, or was, near: before that, others can still be on time.
        """
        rows = len(self.rows)
        least = room.of_one_lane if room.of_longs is None else min(room.of_one_lane, room.of_longs)
        if rows == 0 or (self._most_needed <= least and not self._any_misfit):
            return None
        lacking = self._needed[:rows] > least
        if not self._any_misfit and not lacking.any():
            self._most_needed = least
            return None
        if self._any_misfit:
            self._any_misfit = bool(self._misfit[:rows].any())
            lacking |= self._misfit[:rows]
        found = lacking.nonzero()[0]  # usually few; only these are examined further
        found = found[(self._lane[found] == NOWHERE) & ~self._held[found]]
        if room.over:
            found = found[~np.isin(self._owner[found], room.over)]
        if room.above_share:
            found = found[self._long[found] | ~np.isin(self._owner[found], room.above_share)]
        needed, is_long = self._needed[found], self._long[found]
        together = np.where(self._spread[found], max(room.of_all_lanes, room.of_one_lane), room.of_one_lane)
        lacks = (needed > together) | self._misfit[found]
        lacks_share = np.zeros(len(found), dtype=np.bool_)
        if not room.starts_long:
            lacks &= ~is_long
        elif room.of_longs is not None:
            lacks_share = self._lacks_share(found, room.of_longs, room.of_returning)
            lacks |= lacks_share
        remaining = self._remaining[found] * correction
        early_seconds = np.where(is_long, 0.0, room.early_seconds)
        late = lacks & (self._deadline[found] - remaining < now + early_seconds)
        if room.over_kv:
            late |= lacks & ~is_long
        if self._keeps_order and lacks_share.any():
            due, busy_until = self._due[found], self._busy_until[found]
            near = due + (self._deadline[found] - busy_until) - NEAR_REVISED_DEADLINE * remaining
            near[due <= busy_until] = np.inf  # not demoted
            patience = self._patience[found] = np.minimum(self._patience[found], near)
            late &= ~lacks_share | (patience <= now)
        return self._earliest(found[late])

    def soon_late(
        self, room: Capacity, now: float, correction: float, least_seconds: float, most_seconds: float
    ) -> Request | None:
        """Return the request with the earliest deadline that can still be on time, and lacks only free KV of a lane.

        Its prefill must begin within `most_seconds`, but not within `least_seconds`. Long requests, those that may spread,
        and those whose owners may not claim KV do not count.
        """
        rows = len(self.rows)
        if rows == 0 or (self._most_needed <= room.of_one_lane and not self._any_misfit):
            return None
        slack_seconds = self._deadline[:rows] - self._remaining[:rows] * correction - now
        found = (slack_seconds >= least_seconds) & (slack_seconds <= most_seconds)
        found &= (self._needed[:rows] > room.of_one_lane) | self._misfit[:rows]
        found &= self._lane[:rows] == NOWHERE
        found &= ~(self._held[:rows] | self._long[:rows] | self._spread[:rows])
        if room.over or room.above_share:
            found &= ~np.isin(self._owner[:rows], (*room.over, *room.above_share))
        return self._earliest(found.nonzero()[0])

    def late(self, room: Capacity, now: float, correction: float) -> Request | None:
        """Return the waiting request with the earliest deadline among those without slack.

        Requests that wait for a prefill that they will share, or for others to take places, do not count.
        """
        rows = len(self.rows)
        late = self._deadline[:rows] - self._remaining[:rows] * correction < now
        late &= self._lane[:rows] == NOWHERE
        late &= ~self._held[:rows]
        if room.over:
            late &= ~np.isin(self._owner[:rows], room.over)
        return self._earliest(late.nonzero()[0])

    def _lacks_share(self, rows: Ints, of_longs: int, of_returning: int | None) -> Bools:
        """Return flags of those of `rows` that are long and need more than what is left of the share of long requests.

        Args:
            rows: rows of the table.
            of_longs: blocks that are left of the share.
            of_returning: the same for those that come back; None: no limit.
        """
        needed = self._needed[rows]
        found = self._long[rows] & (needed > of_longs)
        if self._returning:
            may_return = True if of_returning is None else needed <= of_returning
            found &= ~(self._returns[rows] & may_return)
        return found

    def _earliest(self, rows: Ints) -> Request | None:
        """Return the request of `rows` with the earliest deadline."""
        if not len(rows):
            return None
        order = np.lexsort((self._tie[rows], self._deadline[rows]))
        return self.rows[int(rows[order[0]])]

    def _without(self, room: Capacity) -> Bools:
        """Return flags of the rows that need more KV than is free."""
        rows = len(self.rows)
        needed = self._needed[:rows]
        found: Bools
        if self._most_needed <= room.of_one_lane:  # KV is not short
            found = np.zeros(rows, dtype=np.bool_)
        else:
            found = needed > room.of_one_lane
        if room.of_all_lanes > room.of_one_lane:
            found &= ~self._spread[:rows] | (needed > room.of_all_lanes)
        return found


def _doubled(columns: npt.NDArray[_Item]) -> npt.NDArray[_Item]:
    return np.concatenate([columns, np.zeros_like(columns)], axis=-1)
