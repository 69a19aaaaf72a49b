"""What `medha up` shows: progress, one table, examples, and the parts' logs with a prefix.

In a terminal with colours and a spinner; elsewhere, and with NO_COLOR, as plain lines.
"""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

_COLOURS = {"router": "cyan", "controller": "magenta"}
_RANK_COLOURS = ("green", "yellow", "blue", "bright_red", "bright_green", "bright_yellow", "bright_blue")


class TerminalDisplay:
    """Shows one replica on `console`; `summary` makes what is shown once it is ready, from the parts' PIDs."""

    def __init__(
        self, console: Console, name: str, summary: Callable[[dict[str, int]], list[RenderableType]]
    ) -> None:
        self._console = console
        self._name = name
        self._summary = summary
        self._styles: dict[str, str] = {}
        self._width = 0
        self._progress: Progress | None = None

    def starting(self, parts: list[str]) -> None:
        self._width = max(map(len, parts))
        ranks = [part for part in parts if part not in _COLOURS]
        self._styles = _COLOURS | {
            part: _RANK_COLOURS[index % len(_RANK_COLOURS)] for index, part in enumerate(ranks)
        }
        text = f"starting {self._name}: {', '.join(parts)}"
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(text, total=None)
            self._progress.start()
        else:
            self.say(text)

    def line(self, part: str, text: str) -> None:
        prefix = Text(f"{part:<{self._width}} | ", style=self._styles.get(part, ""))
        self._print(prefix + Text.from_ansi(text))

    def say(self, text: str) -> None:
        self._print(Text(f"medha: {text}", style="bold"))

    def ready(self, process_ids: dict[str, int]) -> None:
        self._end_progress()
        for renderable in self._summary(process_ids):
            self._print(renderable)

    def close(self) -> None:
        self._end_progress()

    def _end_progress(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=isinstance(renderable, Text), highlight=False)
        self._console.file.flush()
