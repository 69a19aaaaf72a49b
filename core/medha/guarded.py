"""The policy `guarded`: keep every deadline that can still be kept, and never leave the others behind.

Requests are in two sets. The *kept* can all still be on time when they are served in the order of their deadlines;
when an arrival (or a step that took longer than predicted) makes that impossible, the request with most remaining
work among those whose removal helps is *given up* (J. M. Moore, 1968: with it gone the most others are on time). The
given-up share a guaranteed part of the time of prefills, in the order in which each would end if it had that part
alone, and everything that the kept leave.

The state is explicit: the `given_up` column, which belongs to the engine's table and moves with its rows, and the
account in `Guarded`. See docs/scheduling.md for what is promised, and the proofs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from medha.policy import Bools, Columns, Floats, Ints, urgent_first


@dataclass(frozen=True, slots=True)
class GuardedSettings:
    given_up_share: float = 0.1
    """Part of the time of prefills that the given-up get while there are any."""
    grace_seconds: float = 0.5
    """Longest step: while nobody is given up, being late by less is the work of steps and no overload."""


class Guarded:
    """Which requests are kept, and the account of those given up."""

    def __init__(self, settings: GuardedSettings) -> None:
        self.settings = settings
        self.owed_seconds = 0.0
        """What the given-up are still to get of their share; the next step is theirs if it is positive."""
        self._both = False

    def order(self, columns: Columns, given_up: Bools, by_deadline: Ints, now: float) -> Iterator[int]:
        """Rows, most urgent first, lazily; `given_up` (one flag per row, new rows False) is brought up to date.

        `by_deadline` is the order of all rows by (deadline, tie).
        """
        self._choose(columns, given_up, by_deadline, now)
        kept = by_deadline[~given_up[by_deadline]]
        rest = np.flatnonzero(given_up)
        self._both = len(kept) > 0 and len(rest) > 0
        if not len(rest):
            self.owed_seconds = 0.0
            return iter(kept.tolist())
        late = self._given_up_first(columns, rest)
        if self.owed_seconds > 0 or not len(kept):
            return chain((next(late),), iter(kept.tolist()), late)
        return chain(iter(kept.tolist()), late)

    def charge(self, kept_seconds: float, given_up_seconds: float) -> None:
        """Account for a launched step: what it spends on prefills of either set.

        Time in which only one set has work is nobody's debt.
        """
        if self._both:
            share = self.settings.given_up_share
            self.owed_seconds += share * kept_seconds - (1 - share) * given_up_seconds

    def _given_up_first(self, columns: Columns, rows: Ints) -> Iterator[int]:
        """The given-up by a + w / share: when each would end if it had the share alone from its arrival.

        Only those that arrived before another's such time can be before it, so none waits for ever.
        """
        share = max(self.settings.given_up_share, 0.01)
        ends = columns.arrival[rows] + columns.work_seconds[rows] / share
        return (int(rows[place]) for place in urgent_first(ends, columns.tie[rows]))

    def _choose(self, columns: Columns, given_up: Bools, by_deadline: Ints, now: float) -> None:
        """Give up until the kept are feasible again, then take back whom there is room for."""
        deadline = columns.deadline[by_deadline] - now
        remaining = columns.remaining_seconds[by_deadline]
        gone = given_up[by_deadline]
        grace = 0.0 if gone.any() else self.settings.grace_seconds
        hopeless = remaining > deadline + grace
        gone |= hopeless
        while True:
            room = self._room(deadline, remaining, gone) + grace
            bad = np.flatnonzero(room < 0)
            if not len(bad):
                break
            grace = 0.0
            prefix = np.where(gone[: bad[0] + 1], -1.0, remaining[: bad[0] + 1])
            gone[int(np.argmax(prefix))] = True
        given_up[by_deadline] = gone

    def _room(self, deadline: Floats, remaining: Floats, gone: Bools) -> Floats:
        """Seconds by which each kept row may be delayed; infinite for a given-up one."""
        share = self.settings.given_up_share
        rest = float(remaining[gone].sum())
        done = np.cumsum(np.where(gone, 0.0, remaining))
        allowed = np.maximum((1 - share) * deadline, deadline - rest)
        return np.where(gone, np.inf, allowed - done)
