"""How far a start is, in lines for where no bar can be drawn: one now and then."""

from __future__ import annotations

from datetime import datetime, timedelta

from medha_worker.part_state import PartState

LINE_SECONDS = 5.0


class ProgressLines:
    """Chooses what to say of what parts tell; all parts of a start share one."""

    def __init__(self) -> None:
        self._said_at: datetime | None = None

    def line(self, part: str, state: PartState, at: datetime) -> str:
        """A line for what `part` said at `at`; empty where it counts nothing, or another was said shortly before."""
        if not state.total:
            return ""
        if self._said_at is not None and at - self._said_at < timedelta(seconds=LINE_SECONDS):
            return ""
        self._said_at = at
        return f"{part} {state.detail}"
