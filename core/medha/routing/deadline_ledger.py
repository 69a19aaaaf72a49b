"""The sequences that wait in a router for one model, in the order of the policy of the replicas that serve it.

The ledger has the same columns as a replica's table of requests, and the same code orders them
(`medha.scheduler.policy`, `medha.scheduler.guarded`). Deadlines and the denominator of LARS count the whole
prompt; the remaining work counts only tokens that no replica has cached. A sequence here has not begun, so its
remaining work is its whole uncached prefill.

Keys change with time. So the order is computed again when it is read. With many rows that is done at most every
`REORDER_SECONDS`, however many events there are; rows that came since are read last.

If not all rows can be on time, owners take turns (`medha.scheduler.owner_turns`). A row has the key of the place
that it takes. Rows of equal keys always go by attained service.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

import numpy as np

from medha.scheduler.guarded import Guarded, GuardedSettings, Plan
from medha.scheduler.owner_turns import contested_until, take_turns
from medha.scheduler.policy import CLOCK_POLICIES, POLICIES, Bools, Columns, Floats, Ints, keys, urgent_first
from medha.scheduler.request import NOWHERE
from medha.wire.messages import PolicyTerms

REORDER_SECONDS = 0.02
"""Shortest time between two orderings of more than `FEW_ROWS` rows."""
FEW_ROWS = 256
"""Rows that are ordered at every reading, because that takes no longer than to forward one of them."""
MOST_READ = 256
"""Most elements that one reading yields."""
_FIRST_CAPACITY = 64


class Waiting(Protocol):
    """An element of a ledger."""

    row: int
    """Its row in the ledger that holds it, else `NOWHERE`; only the ledger changes it."""

    @property
    def owner(self) -> str:
        """The name of its owner; elements of one owner compete as one."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a waiting element by which it is ordered; times are in seconds on the clock of `now`."""

    arrival: float
    deadline: float
    work_seconds: float  # prefill of its whole prompt
    remaining_seconds: float  # the part of it that is not cached anywhere
    tie: int  # unique; increases with each arrival
    turn: float  # `AttainedService.turn` of its owner
    tokens: int
    needed_tokens: int  # of KV
    whole_tokens: int = 0  # prompt and the longest output
    has_grammar: bool = False  # not every replica follows one


@dataclass(frozen=True, slots=True)
class Opening:
    """The bounds of the elements that a replica could begin soon; an element has to be within all of them."""

    below_tokens: float = inf
    most_whole_tokens: float = inf  # the longest output included
    cut_whole_tokens: float = (
        inf  # beyond that many, every replica would cut the output short, so this one may
    )
    kv_tokens: float = inf  # for elements that have slack; a late one may wait for KV in the replica
    until_key: float = inf
    until_turn: float = -inf
    """An element with a smaller turn need not be within `until_key` and `kv_tokens`."""
    follows_grammars: bool = True  # elements may have one

    def holds(self, tokens: int, whole_tokens: int, needed_tokens: int, *, is_late: bool) -> bool:
        """Return whether an element is within the bounds in tokens."""
        has_output = whole_tokens <= self.most_whole_tokens or whole_tokens > self.cut_whole_tokens
        return tokens < self.below_tokens and has_output and (is_late or needed_tokens <= self.kv_tokens)

    def is_soon(self, sort_key: float, turn: float) -> bool:
        """Return whether little work goes before an element with this key and turn."""
        return sort_key <= self.until_key or turn < self.until_turn


@dataclass(frozen=True, slots=True)
class Outlook:
    """The work that a ledger holds, and whether it can be in time."""

    pending_seconds: float  # prefill of all rows
    missed_seconds: float  # by which rows are predicted to miss their deadlines, summed
    lanes: float  # that the rows need from now on to be in time: their work over the time that is left


_Row = TypeVar("_Row", bound=Waiting)

EVERYTHING = (Opening(),)


class DeadlineLedger(Generic[_Row]):
    """The waiting sequences of one model and bundle."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        # arrival, deadline, work, remaining, due, revised deadline (seconds); turn
        self._seconds: Floats = np.zeros((7, _FIRST_CAPACITY))
        # tie, number of the owner, tokens, needed tokens, place in the order, whole tokens, 1 if it is set aside, 1 if it
        # has a grammar
        self._counts: Ints = np.zeros((8, _FIRST_CAPACITY), dtype=np.int64)
        self._order: Ints = np.zeros(0, dtype=np.int64)  # rows, most urgent first; NOWHERE where one has left
        self._place_keys: Floats = np.zeros(0)
        self._newcomers: list[int] = []  # rows that are not in the order yet
        self._ordered_at = -inf
        self._next_row = 0  # of `next_rows`
        self._owners: dict[str, int] = {}  # number of each owner that has rows
        self._rows_of: Counter[str] = Counter()
        self._numbers = 0
        self._terms = PolicyTerms()
        self._lanes = 1
        self._guarded: Guarded | None = None
        self.contested_until = -inf
        """The deadline up to which not all rows could be on time when they were last ordered."""
        self._has_aside = False

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[_Row]:
        """Iterate over a snapshot of all elements, in no order."""
        return iter(self._rows.copy())

    def follow(self, terms: PolicyTerms, lanes: int) -> None:
        """Order by these terms from now on; `lanes`: lanes of all replicas that serve the rows."""
        if terms.policy not in POLICIES:  # a newer release's
            terms = PolicyTerms()
        if (terms, lanes) == (self._terms, self._lanes):
            return
        if terms.policy != self._terms.policy:  # nobody is demoted
            self._seconds[4], self._seconds[5] = self._seconds[1], inf
        self._terms, self._lanes, self._guarded = terms, lanes, None
        if terms.policy == "guarded":
            self._guarded = Guarded(GuardedSettings(terms.demoted_share, terms.grace_seconds, lanes))
        self._ordered_at = -inf

    # --- rows ---------------------------------------------------------------------------------------

    def add(self, element: _Row, facts: Facts) -> None:
        row = element.row = len(self._rows)
        if row == self._seconds.shape[1]:
            self._seconds = np.concatenate([self._seconds, np.zeros_like(self._seconds)], axis=1)
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._rows.append(element)
        self._seconds[:, row] = (
            facts.arrival,
            facts.deadline,
            facts.work_seconds,
            facts.remaining_seconds,
            facts.deadline,
            inf,
            facts.turn,
        )
        owner = self._owners.get(element.owner)
        if owner is None:
            self._numbers += 1
            owner = self._owners[element.owner] = self._numbers
        self._rows_of[element.owner] += 1
        self._counts[:, row] = (
            facts.tie,
            owner,
            facts.tokens,
            facts.needed_tokens,
            NOWHERE,
            facts.whole_tokens,
            0,
            facts.has_grammar,
        )
        self._newcomers.append(row)

    def remove(self, element: _Row, *, served: bool) -> float:
        """Remove an element. It takes the earliest turn of its owner if it is served now, else the last one.

        Return the turn that it takes.
        """
        row = element.row
        turn = self._seconds.item(6, row)
        if self._rows_of[element.owner] > 1:
            rows = slice(len(self._rows))
            own = (self._counts[1, rows] == self._counts[1, row]).nonzero()[0]
            turns = self._seconds[6]
            other = own[turns[own].argmin() if served else turns[own].argmax()]
            turn, turns[other] = turns.item(other), turn
        element.row = NOWHERE
        self._take_out(row)
        last = self._rows.pop()
        if last is not element:
            old = last.row
            place = self._counts[4].item(old)
            if place == NOWHERE:
                self._newcomers[self._newcomers.index(old)] = row
            else:
                self._order[place] = row
            self._rows[row] = last
            self._seconds[:, row] = self._seconds[:, old]
            self._counts[:, row] = self._counts[:, old]
            last.row = row
        self._rows_of[element.owner] -= 1
        if not self._rows_of[element.owner]:
            del self._rows_of[element.owner]
            del self._owners[element.owner]
        return turn

    def _take_out(self, row: int) -> None:
        place = self._counts[4].item(row)
        if place == NOWHERE:
            self._newcomers.remove(row)
        else:
            self._order[place] = NOWHERE

    @property
    def is_contested(self) -> bool:
        """True if the rows of several owners could not all be on time when they were last ordered."""
        return self.contested_until > -inf

    @property
    def owners(self) -> int:
        """Number of owners that have elements here."""
        return len(self._owners)

    def turn(self, element: _Row) -> float:
        """Return the turn that an element has among those of its owner."""
        return float(self._seconds[6, element.row])

    def update(self, element: _Row, remaining_seconds: float) -> None:
        """Record the remaining work of an element: more or less of its prompt is cached than before."""
        self._seconds[3, element.row] = remaining_seconds

    def is_late(self, element: _Row, now: float) -> bool:
        """Return whether an element has no slack left, so that it would miss its deadline even if it began now."""
        row = element.row
        return bool(self._seconds[1, row] - self._seconds[3, row] <= now)

    def set_aside(self, elements: Iterable[_Row]) -> None:
        """Leave elements out of `urgent_first` until `take_back`."""
        self._counts[6, [element.row for element in elements]] = 1
        self._has_aside = True

    def take_back(self) -> None:
        """Return all elements that were set aside to their places."""
        if self._has_aside:
            self._counts[6, : len(self._rows)] = 0
            self._has_aside = False

    def with_tokens(self, least: int, *, has_grammar: bool) -> list[_Row]:
        """Return the elements of at least that many tokens, either those with a grammar or the others."""
        counts = self._counts[:, : len(self._rows)]
        rows = ((counts[2] >= least) & (counts[7] == has_grammar)).nonzero()[0]
        return [self._rows[row] for row in rows.tolist()]

    def next_rows(self, count: int) -> list[_Row]:
        """Return up to `count` elements after those of the last call, for updates that go round all rows."""
        first = self._next_row if self._next_row < len(self._rows) else 0
        self._next_row = first + count
        return self._rows[first : self._next_row]

    # --- order --------------------------------------------------------------------------------------

    def urgent_first(
        self, now: float, openings: Collection[Opening] = EVERYTHING, most: int | None = MOST_READ
    ) -> list[tuple[_Row, float]]:
        """Return the most urgent elements that fit into one of the openings, with their keys, in order.

        Those that are set aside are left out. If none fits, that takes a few vector operations.
        """
        if not self._fitting(openings, now, self._least_keys(now)).any():
            return []
        self._reorder_if_due(now)
        fitting = self._fitting(openings, now, self._keys_by_place(now))
        order = self._order[self._order != NOWHERE]
        if self._newcomers:
            order = np.concatenate([order, np.array(self._newcomers, dtype=np.int64)])
        order = order[fitting[order]][:most]
        by_row, sort_keys = self._rows, self._keys_by_place(now)[order]
        return [(by_row[row], key) for row, key in zip(order.tolist(), sort_keys.tolist(), strict=True)]

    def takes_turns(self, now: float) -> bool:
        """Return whether owners take turns, also in view of elements that have just come."""
        if self._newcomers and len(self._owners) > 1:
            self._reorder_if_due(now)
        return self.is_contested

    def _reorder_if_due(self, now: float) -> bool:
        is_due = len(self._rows) <= FEW_ROWS or now - self._ordered_at >= REORDER_SECONDS
        if is_due:
            self._reorder(now)
        return is_due

    def _fitting(self, openings: Iterable[Opening], now: float, sort_keys: Floats) -> Bools:
        """Return flags of the rows that fit into one of the openings."""
        found = np.zeros(len(self._rows), dtype=np.bool_)
        for opening in openings:
            found |= self._fits(opening, sort_keys, now)
        if self._has_aside:
            found &= self._counts[6, : len(self._rows)] == 0
        return found

    def _fits(self, opening: Opening, sort_keys: Floats, now: float) -> Bools:
        rows = len(self._rows)
        found: Bools = self._counts[2, :rows] < opening.below_tokens
        found &= (sort_keys <= opening.until_key) | (self._seconds[6, :rows] < opening.until_turn)
        if not opening.follows_grammars:
            found &= self._counts[7, :rows] == 0
        if opening.most_whole_tokens < opening.cut_whole_tokens:
            whole = self._counts[5, :rows]
            found &= (whole <= opening.most_whole_tokens) | (whole > opening.cut_whole_tokens)
        if opening.kv_tokens < inf:
            late = self._seconds[1, :rows] - self._seconds[3, :rows] <= now
            by_turn = self._seconds[6, :rows] < opening.until_turn
            found &= (self._counts[3, :rows] <= opening.kv_tokens) | late | by_turn
        return found

    def key(self, element: _Row, now: float) -> float:
        """Return the key of an element; the smallest goes first."""
        return self._keys_by_place(now).item(element.row)

    def seconds_before(self, element: _Row, now: float) -> float:
        """Return the work of all elements that go before this one, per lane."""
        self._reorder_if_due(now)
        rows, row = len(self._rows), element.row
        sort_keys, place = self._keys_by_place(now), self._counts[4, :rows]
        before = sort_keys < sort_keys[row]
        before |= (sort_keys == sort_keys[row]) & (place < place[row])
        return float(self._seconds[3, :rows][before].sum()) / self._lanes

    def outlook(self, now: float, ahead: Callable[[Floats], Floats], urgent_seconds: float) -> Outlook:
        """Return how late the rows will be: each begins once the rows before it are done, on all lanes together.

        `ahead` returns, for the keys of rows, the work per lane that replicas do before them. No row needs more than one
        lane, and none needs to be done within less than `urgent_seconds`.
        """
        self._reorder_if_due(now)
        order = self._order[self._order != NOWHERE]
        order = np.concatenate([order, np.array(self._newcomers, dtype=np.int64)])
        deadline, remaining = self._seconds[1, order], self._seconds[3, order]
        before = (remaining.cumsum() - remaining) / self._lanes
        ends = now + ahead(self._keys_by_place(now)[order]) + before + remaining
        left = np.maximum(np.maximum(deadline - now, remaining), urgent_seconds)
        return Outlook(
            pending_seconds=float(remaining.sum()),
            missed_seconds=float(np.maximum(ends - deadline, 0.0).sum()),
            lanes=float((remaining / left).sum()),
        )

    def _keys_by_place(self, now: float) -> Floats:
        """Return the keys by row: those of their places, or the policy's for rows that have none yet."""
        rows = len(self._rows)
        place = self._counts[4, :rows]
        if len(self._newcomers) == rows:
            return self._keys(now)
        if not self._newcomers:
            return self._place_keys[place]
        return np.where(place == NOWHERE, self._keys(now), self._place_keys[place])

    def _least_keys(self, now: float) -> Floats:
        """Return the keys by row; if they fall with time, those of now where they are smaller than when last ordered."""
        by_place = self._keys_by_place(now)
        if self._terms.policy in CLOCK_POLICIES:
            return by_place
        return np.minimum(by_place, self._keys(now))

    def _columns(self, rows: slice) -> Columns:
        arrival, deadline, work, remaining, _, _, _ = self._seconds[:, rows]
        return Columns(arrival, deadline, work, remaining, self._counts[0, rows])

    def _keys(self, now: float, rows: slice | None = None) -> Floats:
        rows = slice(len(self._rows)) if rows is None else rows
        if self._guarded is not None:
            due: Floats = self._seconds[4, rows]
            return due
        return keys(self._terms.policy, self._columns(rows), now, self._terms.lars_denominator)

    def _reorder(self, now: float) -> None:
        order = self._in_order_of_policy(now)
        self._place_keys = self._keys(now)[order]
        self.contested_until = -inf
        if len(self._owners) > 1:
            self._break_ties(order)
            deadline, remaining = self._seconds[1, : len(order)], self._seconds[3, : len(order)]
            until = contested_until(deadline, remaining, self._lanes, self._terms.grace_seconds, now)
            self.contested_until = until
            if self.is_contested:
                take_turns(order, deadline <= until, self._counts[1], self._seconds[6], now)
        self._counts[4, order] = np.arange(len(order))
        self._order, self._newcomers, self._ordered_at = order, [], now

    def _in_order_of_policy(self, now: float) -> Ints:
        rows = slice(len(self._rows))
        columns = self._columns(rows)
        if self._guarded is None:
            found = urgent_first(self._keys(now), columns.tie)
        else:
            due = self._seconds[4, rows]
            plan = Plan(due, self._seconds[5, rows], np.lexsort((columns.tie, due)))
            # Its choice of a demoted row that may go first is left out: whether there is time for it depends on what
            # replicas have begun.
            self._guarded.first(columns, plan, now)
            return plan.by_due
        return np.fromiter(found, np.int64, len(self._rows))

    def _break_ties(self, order: Ints) -> None:
        """Let rows of equal keys go by their turns; most keys differ."""
        in_order = self._place_keys
        if not (in_order[1:] == in_order[:-1]).any():
            return
        place = np.flatnonzero(np.diff(in_order, prepend=np.nan))  # where runs of equal keys begin
        run = np.repeat(np.arange(len(place)), np.diff(np.append(place, len(order))))
        order[:] = order[np.lexsort((self._seconds[6, order], run))]
