"""Progress of a start as occasional log lines, for outputs that cannot show a progress bar."""

from __future__ import annotations

from datetime import datetime, timedelta

from medha_process.part_state import PartState

LINE_SECONDS = 5.0


class ProgressLines:
    """Chooses which progress reports become lines; all parts of a start share one instance."""

    def __init__(self) -> None:
        self._logged_at: datetime | None = None

    def line(self, part: str, state: PartState, at: datetime) -> str:
        """Return a line for the state that `part` reported at `at`.

        It is empty if the state has no count, or if there was another line less than LINE_SECONDS before.
        """
        if not state.total:
            return ""
        if self._logged_at is not None and at - self._logged_at < timedelta(seconds=LINE_SECONDS):
            return ""
        self._logged_at = at
        return f"{part} {state.detail}"
