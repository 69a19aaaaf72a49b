"""Write the tables and the picture of the convoy in docs/performance.md: `python benchmarks/convoy_page.py`, a part of `make gen`.

They are read from `results/convoy.json`, so that the page cannot differ from what was measured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from html import escape

from convoy_trace import AXES, LONG_AXES
from harness import ROOT, Row, write

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "performance" / "convoy.svg"
RESULTS = ROOT / "benchmarks" / "results" / "convoy.json"
HEADS = {
    "short_p50": "short p50",
    "short_p90": "short p90",
    "short_p99": "short p99",
    "short_max": "short max",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "stall_p99": "stall p99",
    "long_mean": "mean long",
    "long_last": "last long",
}
"""Axis of a point -> head of its column."""
_PLACE = re.compile(
    r"(?<=<!-- convoy: written by `python benchmarks/convoy_page.py` -->\n).*?(?=<!-- /convoy -->)", re.DOTALL
)


def written(figures: Row, text: str) -> str:
    """Return the page's text with the tables of these figures; raises ValueError if it has no place for them."""
    if not _PLACE.search(text):
        raise ValueError(f"{PAGE} has no place for the tables of the convoy")
    return _PLACE.sub(lambda _: tables(figures), text)


def tables(figures: Row) -> str:
    """Return both tables as Markdown, with the picture between them."""
    points, compared = figures["points"], figures["frontier"]
    lines = ["", *_markdown(["system", *HEADS.values(), "on time", "texts"], [_cells(one) for one in points])]
    lines += ["", "![Short prompts against long ones and against the stream](performance/convoy.svg)", ""]
    lines += _markdown(
        ["peer", "our setting", "least ahead in", *HEADS.values()],
        [
            [
                one["peer"] + (" (throughput first)" if one["throughput_first"] else ""),
                one["ours"],
                HEADS[one["worst"]],
                *(f"{one['ratios'][axis]:.2f}" for axis in AXES),
            ]
            for one in compared
        ],
    )
    return "\n".join([*lines, "", ""])


def _cells(one: Row) -> list[str]:
    times = [_seconds(one[axis], 3 if axis == "itl_p50" else 1 if axis in LONG_AXES else 2) for axis in AXES]
    texts = f"{one['texts_equal']}/{one['texts']}"
    return [one["name"], *times, f"{100 * one['on_time']:.0f} %", texts]


def _seconds(value: float, digits: int) -> str:
    return f"{value:.{1 if value >= 10 else digits}f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]


# --- the picture ---------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 380, 270, 70, 76, 90
_COLOURS = {"Medha": "#3274d9", "vLLM": "#e0752d", "": "#6e6e6e"}
"""Start of a system's name -> colour of its points."""


def drawing(points: Sequence[Row]) -> str:
    """Return the SVG: the p99 of shorts against the last long's completion, and against the stream's gaps."""
    width, height = _LEFT + 2 * (_WIDTH + _GAP), _TOP + _HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="8" y="22" font-size="17" font-weight="bold">The convoy: short prompts, a stream and two long prompts on one machine</text>',
        '<text x="8" y="40" fill="#555555">Nearer to the lower left is better; all axes are logarithmic. '
        "Drawn by benchmarks/convoy_page.py.</text>",
    ]
    panels = (("long_last", "until the last long ends, s"), ("stall_p99", "gap of the stream, p99, s"))
    for number, (axis, title) in enumerate(panels):
        parts += _panel(points, axis, title, _LEFT + number * (_WIDTH + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(points: Sequence[Row], axis: str, title: str, x: float) -> list[str]:
    base = _TOP + _HEIGHT
    across = _scale([one["short_p99"] for one in points], x, x + _WIDTH)
    up = _scale([one[axis] for one in points], base, _TOP)
    parts = [
        f'<line x1="{x}" x2="{x + _WIDTH}" y1="{base}" y2="{base}" stroke="#999999"/>',
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{base}" stroke="#999999"/>',
        f'<text x="{x + _WIDTH / 2}" y="{base + 34}" text-anchor="middle">TTFT of short prompts, p99, s</text>',
        f'<text x="{x - 46}" y="{_TOP + _HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 {x - 46} {_TOP + _HEIGHT / 2})">{title}</text>',
    ]
    for value in _ticks([one["short_p99"] for one in points]):
        at = across(value)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{base}" stroke="#eeeeee"/>'
            f'<text x="{at:.1f}" y="{base + 16}" text-anchor="middle" fill="#555555">{value:g}</text>'
        )
    for value in _ticks([one[axis] for one in points]):
        at = up(value)
        parts.append(
            f'<line x1="{x}" x2="{x + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eeeeee"/>'
            f'<text x="{x - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555555">{value:g}</text>'
        )
    free = _TOP - 8.0  # labels must not cover each other
    for one in sorted(points, key=lambda one: up(one[axis])):
        colour = next(colour for start, colour in _COLOURS.items() if one["name"].startswith(start))
        left, down = across(one["short_p99"]), up(one[axis])
        is_right, free = left > x + 0.6 * _WIDTH, max(free + 13, down - 5)
        parts.append(
            f'<circle cx="{left:.1f}" cy="{down:.1f}" r="5" fill="{colour}"><title>{escape(one["name"])}</title></circle>'
            f'<text x="{left + (-8 if is_right else 8):.1f}" y="{free:.1f}" '
            f'text-anchor="{"end" if is_right else "start"}" fill="{colour}">{escape(one["name"])}</text>'
        )
    return parts


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Return the place of a value on a logarithmic axis with some room at both ends."""
    low, high = math.log(min(values) / 1.4), math.log(max(values) * 1.4)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round values (1, 2, 5 and their tenfolds) between the ends of an axis."""
    low, high = min(values) / 1.4, max(values) * 1.4
    found = [digit * 10.0**power for power in range(-4, 6) for digit in (1, 2, 5)]
    return [value for value in found if low <= value <= high]


def main() -> None:
    """Write the page and the picture."""
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    write(PAGE, written(figures, PAGE.read_text(encoding="utf-8")))
    write(PICTURE, drawing(figures["points"]))


if __name__ == "__main__":
    main()
