"""The protocol of a moment in a device's work whose time the device keeps."""

from __future__ import annotations

from typing import Protocol, Self


class TimedMark(Protocol):
    """A point in the work that a thread has given to a device, and the time at which the device passed it."""

    def seconds_until(self, later: Self) -> float:
        """Return the time from this mark to a later one of the same device, which has passed both."""
        ...
