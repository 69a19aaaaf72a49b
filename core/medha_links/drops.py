"""Messages that are dropped: counted by link and reason, and logged without letting a peer fill the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from medha.errors import WireInvalid

Count = Callable[[str, str], None]
"""Counts one message dropped from a link (the first argument) for a reason (the second)."""


class Drops:
    """What one process has dropped."""

    def __init__(self, log: logging.Logger, count: Count | None = None) -> None:
        self._log = log
        self._count = count
        self.counts: Counter[tuple[str, str]] = Counter()
        """Messages by (link, reason)."""

    def drop(self, link: str, error: WireInvalid) -> None:
        """Count one message; every power of two is logged."""
        self.counts[link, error.reason] += 1
        seen = self.counts[link, error.reason]
        if self._count is not None:
            self._count(link, error.reason)
        if seen & (seen - 1) == 0:
            self._log.warning(
                "dropped a message on %s (%s, %d so far): %.300s", link, error.reason, seen, error
            )
