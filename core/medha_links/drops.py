"""Dropped messages: counted by link and reason, and logged so that a peer cannot fill the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from threading import Lock

from medha.errors import DROP_REASONS, WireInvalid

Count = Callable[[str, str], None]
"""Function that counts one message dropped from a link (the first argument) for a reason (the second)."""

MOST_MESSAGES = 2**53
"""More messages than any process can have dropped, and still exact in the floating-point numbers of metrics."""


class Drops:
    """Counts the messages that one process has dropped."""

    def __init__(self, log: logging.Logger, count: Count | None = None) -> None:
        self._log = log
        self._count = count
        self._lock = Lock()  # a rank's links may be read by two threads
        self.counts: Counter[tuple[str, str]] = Counter()
        """Messages by (link, reason)."""

    def drop(self, link: str, error: WireInvalid) -> None:
        """Count one message; log each time the count is a power of two."""
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
        """Return (link, reason, messages) since this process began: at most one for each of `DROP_REASONS` per link."""
        with self._lock:
            return tuple((link, reason, messages) for (link, reason), messages in self.counts.items())


class RankDrops:
    """Counts the messages that ranks have dropped, from their reported totals, each since its process began."""

    def __init__(self, links: Collection[str]) -> None:
        """`links` are the names of the ranks' links."""
        self._links = frozenset(links)
        self._known: dict[int, tuple[str, Counter[tuple[str, str]]]] = {}  # incarnation and totals, by rank

    def growth(
        self, rank: int, incarnation: str, totals: Sequence[tuple[str, str, int]]
    ) -> Counter[tuple[str, str]]:
        """Return the messages by (link, reason) since the last report, without links and reasons of another release.

        Raises:
            WireInvalid: a total is not a number of messages. No part of the report is counted.
        """
        for link, reason, messages in totals:
            if not 0 <= messages <= MOST_MESSAGES:
                what = "fewer than no" if messages < 0 else f"more than {MOST_MESSAGES}"
                raise WireInvalid(f"rank {rank} has dropped {what} messages on {link:.80} ({reason:.80})")
        former, known = self._known.get(rank, (incarnation, Counter()))
        if former != incarnation:
            known = Counter()
        self._known[rank] = incarnation, known
        reported = Counter(
            {
                (link, reason): n
                for link, reason, n in totals
                if link in self._links and reason in DROP_REASONS
            }
        )
        growth = reported - known  # a lower total is older: it was in flight when a connection broke
        known.update(growth)
        return growth
