"""Counts the silence of replicas only while the router listens, and recognises losses that are the router's own doing.

A router whose own loop is late, because it is busy or was stopped, has not read what its replicas have sent meanwhile.
So it must not take that time for their silence. Nor may it look for the cause among its requests if its connections have
ended by then: replicas end the connection of a router that does not answer.
"""

from __future__ import annotations

from math import inf


class Listening:
    """The seconds for which a router has listened, of which a gap between two ticks adds `late_seconds` at most."""

    def __init__(self, late_seconds: float, stopped_seconds: float) -> None:
        self._late_seconds = late_seconds
        self._stopped_seconds = stopped_seconds
        self._resumed_at = -inf
        self._ticked_at: float | None = None
        self._seconds = 0.0  # until the last tick

    def tick(self, now: float) -> float:
        """Record that the router's loop runs; return the seconds for which it has listened."""
        self._seconds = self.seconds(now)
        if self._is_stopped(now):
            self._resumed_at = now
        self._ticked_at = now
        return self._seconds

    def seconds(self, now: float) -> float:
        """Return the seconds for which the router has listened until `now`; none before its first tick."""
        if self._ticked_at is None:
            return self._seconds
        return self._seconds + min(now - self._ticked_at, self._late_seconds)

    def was_stopped(self, now: float) -> bool:
        """Return whether connections that end now may have been ended because this router had stopped."""
        return self._is_stopped(now) or now - self._resumed_at < self._stopped_seconds

    def _is_stopped(self, now: float) -> bool:
        return self._ticked_at is not None and now - self._ticked_at >= self._stopped_seconds
