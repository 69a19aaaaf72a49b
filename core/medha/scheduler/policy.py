"""Policies without state: vectorised sort keys over columns of requests, smallest first.

Keys change with time, so they are computed again for each decision and never kept in a heap.
The notation is that of docs/design.md#deadlines: arrival a, relative deadline d, total prefill work w,
remaining work r, slack s(t) = a + d - t - r(t). `guarded`, which has state, is in `medha.scheduler.guarded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

POLICIES = frozenset({"fcfs", "edf", "lrs", "srpt", "lars", "guarded"})
"""Names of all policies."""
CLOCK_POLICIES = frozenset({"fcfs", "edf", "guarded"})
"""Policies whose keys are times on the clock; a message has them relative to the time at which it is sent."""

_SMALLEST_SECONDS = 1e-6  # a division by the work of an empty prefill must not fail
_FIRST_ROWS = 64  # a step rarely reads more
_GROWTH = 8
_SAMPLES = 8  # sampled keys per wanted row: enough to cut off that number of rows to within a half of it


@dataclass(frozen=True, slots=True)
class Columns:
    """The input of a policy: arrays of equal length, with one row for each request whose prefill is not over.

    Times are in seconds on the controller's clock.
    """

    arrival: Floats
    """a"""
    deadline: Floats
    """a + d"""
    work_seconds: Floats
    """w: time of the whole prefill, alone"""
    remaining_seconds: Floats
    """r(t): the part of it that is not yet dispatched"""
    tie: Ints
    """Unique numbers in the order of arrival, so that no two rows have the same place in any order."""

    def slack(self, now: float) -> Floats:
        """s(t) = a + d - t - r(t)"""
        return self.deadline - now - self.remaining_seconds

    def relative_slack(self, now: float) -> Floats:
        """rho = s / w (paper B §4)"""
        return self.slack(now) / np.maximum(self.work_seconds, _SMALLEST_SECONDS)


def read_due(policy: str, arrival: float, deadline: float) -> float:
    """Return when the reads that a request waits for are due (seconds, controller's clock).

    Files and objects are read in this order: by deadline, or by arrival with `fcfs`.
    """
    return arrival if policy == "fcfs" else deadline


def keys(policy: str, columns: Columns, now: float, lars_denominator: str = "work") -> Floats:
    """Return the sort keys of a policy without state, smallest first; ties go by `columns.tie`.

    fcfs  a                first come, first served
    edf   a + d            earliest deadline first
    lrs   s                least remaining slack
    srpt  r                shortest remaining processing time
    lars  s / w            length-aware relative slack (paper B §4); `lars_denominator` "deadline" gives
          s / d            paper A eq. 7, with the current time added
    """
    match policy:
        case "fcfs":
            return columns.arrival
        case "edf":
            return columns.deadline
        case "lrs":
            return columns.slack(now)
        case "srpt":
            return columns.remaining_seconds
        case "lars" if lars_denominator == "work":
            return columns.relative_slack(now)
        case "lars":
            return columns.slack(now) / np.maximum(columns.deadline - columns.arrival, _SMALLEST_SECONDS)
    raise AssertionError(f"the manifest allows no policy {policy!r}")


def urgent_first(keys: Floats, tie: Ints) -> Iterator[int]:
    """Yield rows by (key, tie), smallest first, sorted only as far as they are read.

    A step reads a few rows of perhaps thousands, and keys change, so no order is kept between steps. Instead,
    the rows below a cut are selected and only these are sorted. Any cut gives the same order. A cut with
    about as many rows below it as are wanted is found from a sample of the keys, in a tenth of the time of an
    exact selection.
    """
    wanted = _FIRST_ROWS
    rows, left = np.arange(len(keys)), keys
    while wanted < len(rows):
        every = len(rows) // (wanted * _SAMPLES) + 1
        low = left <= np.sort(left[::every])[wanted // every]
        first = rows[low]
        yield from first[np.lexsort((tie[first], keys[first]))].tolist()
        rows, left = rows[~low], left[~low]
        wanted *= _GROWTH
    yield from rows[np.lexsort((tie[rows], left))].tolist()
