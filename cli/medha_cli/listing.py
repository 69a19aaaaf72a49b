"""Tables that fit the terminal: if it is too narrow, the least important columns are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

GAP = 2  # terminal columns between two table columns


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Columns of the lowest `importance` are dropped first, those of importance 9 never. `optional` columns are
    dropped if they are empty.
    """

    name: str
    importance: int = 9
    right: bool = False
    optional: bool = False


class Listing:
    """Rows below headings, one line each."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[RenderableType]]) -> None:
        assert all(len(row) == len(columns) for row in rows), "a cell for each column"
        self.columns, self.rows = columns, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = self._fitting(console, options)
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold reverse", show_edge=False)
        for index in kept:
            column = self.columns[index]
            justify = "right" if column.right else "left"
            table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(row[index] for index in kept))
        yield table

    def _fitting(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the indices of the columns that fit together."""
        widths = []
        for index, column in enumerate(self.columns):
            cells = [Measurement.get(console, options, row[index]).maximum for row in self.rows]
            widths.append(max([len(column.name), *cells]) + GAP)
        kept = [
            index
            for index, column in enumerate(self.columns)
            if not column.optional or any(row[index] for row in self.rows)
        ]
        while sum(widths[index] for index in kept) > options.max_width:
            least = min(kept, key=lambda index: (self.columns[index].importance, -index))
            if self.columns[least].importance == 9:
                break
            kept.remove(least)
        return kept

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)


def line(*parts: str | tuple[str, str]) -> Text:
    """Return a line of text that is cut at the edge of the terminal."""
    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
