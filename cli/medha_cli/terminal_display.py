"""The output of `medha up`: progress, one table, examples, and the parts' logs with a prefix.

It has colours and a progress bar in a terminal; NO_COLOR removes the colours alone. Elsewhere it is plain lines.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from medha_process.part_state import PartState
from medha_process.supervision.progress_lines import ProgressLines
from medha_process.supervision.supervisor_output import iso_time, local_time

_COLOURS = {"router": "cyan", "controller": "magenta"}
_RANK_COLOURS = ("green", "yellow", "blue", "bright_red", "bright_green", "bright_yellow", "bright_blue")


class TerminalDisplay:
    """Shows one replica on `console`; `summary` returns the output for a ready replica, from the parts' PIDs."""

    def __init__(
        self, console: Console, name: str, summary: Callable[[dict[str, int]], list[RenderableType]]
    ) -> None:
        self._console = console
        self._name = name
        self._summary = summary
        self._styles: dict[str, str] = {}
        self._width = 0
        self._progress: Progress | None = None  # in a terminal, while the replica starts
        self._task = TaskID(0)
        self._counts: dict[str, float] = {}  # finished share of each part that reports a total
        self._lines = ProgressLines()

    def starting(self, parts: list[str]) -> None:
        self._width = max(map(len, parts))
        ranks = [part for part in parts if part not in _COLOURS]
        self._styles = _COLOURS | {
            part: _RANK_COLOURS[index % len(_RANK_COLOURS)] for index, part in enumerate(ranks)
        }
        text = f"starting {self._name}: {', '.join(parts)}"
        if self._console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(text, total=None)
            self._progress.start()
        else:
            self.log(text, local_time())

    def line(self, part: str, text: str, at: datetime) -> None:
        prefix = Text(f"{part:<{self._width}} | ", style=self._styles.get(part, ""))
        self._print(self._time(at) + prefix + Text.from_ansi(text))

    def log(self, text: str, at: datetime) -> None:
        self._print(self._time(at) + Text(f"medha: {text}", style="bold"))

    def progress(self, part: str, state: PartState, at: datetime) -> None:
        if self._progress is None:
            line = self._lines.line(part, state, at)
            if line:
                self.log(line, at)
            return
        if state.total:
            self._counts[part] = state.done / state.total
            text = f"starting {self._name}: {part} {state.detail}"
            least = min(self._counts.values())
            self._progress.update(self._task, description=text, completed=least, total=1.0)

    def ready(self, process_ids: dict[str, int]) -> None:
        self._end_progress()
        for renderable in self._summary(process_ids):
            self._print(renderable)

    def close(self) -> None:
        self._end_progress()

    def _time(self, at: datetime) -> Text:
        """Return the time of day; where lines may be kept, in a file, also the date and the time zone."""
        text = f"{at:%H:%M:%S}.{at.microsecond // 1000:03}" if self._console.is_terminal else iso_time(at)
        return Text(f"{text} ", style="dim")

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=isinstance(renderable, Text), highlight=False)
        self._console.file.flush()
