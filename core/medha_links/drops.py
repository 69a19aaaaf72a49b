"""Messages that are dropped: counted by link and reason, and logged without letting a peer fill the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from threading import Lock

from medha.errors import DROP_REASONS, WireInvalid

Count = Callable[[str, str], None]
"""Counts one message dropped from a link (the first argument) for a reason (the second)."""

MOST_MESSAGES = 2**53
"""More than any process can have dropped, and still exact in the floating-point numbers of metrics."""


class Drops:
    """What one process has dropped."""

    def __init__(self, log: logging.Logger, count: Count | None = None) -> None:
        self._log = log
        self._count = count
        self._lock = Lock()  # a rank's links may be read by two threads
        self.counts: Counter[tuple[str, str]] = Counter()
        """Messages by (link, reason)."""

    def drop(self, link: str, error: WireInvalid) -> None:
        """Count one message; every power of two is logged."""
        with self._lock:
            self.counts[link, error.reason] += 1
            seen = self.counts[link, error.reason]
        if self._count is not None:
            self._count(link, error.reason)
        if seen & (seen - 1) == 0:
            self._log.warning(
                "dropped a message on %s (%s, %d so far): %.300s", link, error.reason, seen, error
            )

    def totals(self) -> tuple[tuple[str, str, int], ...]:
        """(link, reason, messages) since this process began, as it tells others: at most one for each of `DROP_REASONS` a link."""
        with self._lock:
            return tuple((link, reason, messages) for (link, reason), messages in self.counts.items())


class RankDrops:
    """What ranks have dropped, by the totals that they tell: each counts from the start of its process."""

    def __init__(self, links: Collection[str]) -> None:
        """`links` are the names that ranks give to theirs."""
        self._links = frozenset(links)
        self._known: dict[int, tuple[str, Counter[tuple[str, str]]]] = {}  # incarnation and totals, by rank

    def growth(
        self, rank: int, incarnation: str, totals: Sequence[tuple[str, str, int]]
    ) -> Counter[tuple[str, str]]:
        """Messages by (link, reason) that were not told before; links and reasons of another release are left out.

        Raises:
            WireInvalid: a total is no number of messages. Nothing of it is counted.
        """
        for link, reason, messages in totals:
            if not 0 <= messages <= MOST_MESSAGES:
                what = "fewer than no" if messages < 0 else f"more than {MOST_MESSAGES}"
                raise WireInvalid(f"rank {rank} has dropped {what} messages on {link:.80} ({reason:.80})")
        former, known = self._known.get(rank, (incarnation, Counter()))
        if former != incarnation:
            known = Counter()
        self._known[rank] = incarnation, known
        told = Counter(
            {
                (link, reason): n
                for link, reason, n in totals
                if link in self._links and reason in DROP_REASONS
            }
        )
        growth = told - known  # a total that is lower is older: it was on its way when a connection broke
        known.update(growth)
        return growth
