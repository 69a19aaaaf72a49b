"""Ask a Prometheus what every panel of the dashboards asks, and draw the answers as one SVG for each dashboard.

    python dashboards/plot.py --prometheus http://127.0.0.1:9090 --minutes 30 FOLDER

The pictures show the queries and their data. They are not Grafana's, and say so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NOTE = "Drawn by dashboards/plot.py from the answers of a Prometheus. This is not Grafana."


@dataclass(frozen=True)
class Line:
    """A line of a graph: its legend, and its samples as pairs (seconds, value)."""

    legend: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Span:
    """The time of a picture, in seconds since 1970."""

    start: float
    end: float
    step_seconds: float
    rate_seconds: float
    """Value of `$__rate_interval`: at least four scrapes."""


Ask = Callable[[str, Span], list[tuple[dict[str, str], list[tuple[float, float]]]]]
"""Function that returns labels and samples of each series that a query gives over a span."""


def documents() -> dict[str, dict[str, Any]]:
    """Return name -> document of every dashboard."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}


def panels_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that ask something."""
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def chosen(query: str, span: Span) -> str:
    """Return a query with the values that Grafana would fill in, where `All` is chosen for every variable."""
    intervals = {"$__rate_interval": span.rate_seconds, "$__range": span.end - span.start}
    for name, seconds in intervals.items():
        query = query.replace(name, f"{max(1, round(seconds))}s")
    return re.sub(r"\$\w+", ".*", query)


def legend(pattern: str, labels: dict[str, str]) -> str:
    """Return the legend of a series; a pattern is text with labels in double braces."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), pattern).strip()


def lines_of(panel: dict[str, Any], ask: Ask, span: Span) -> list[Line]:
    """Return what a panel shows: every sample of its queries that is a number."""
    found = []
    for target in panel["targets"]:
        for labels, samples in ask(chosen(target["expr"], span), span):
            points = tuple(sample for sample in samples if math.isfinite(sample[1]))
            if points:
                found.append(Line(legend(target["legendFormat"], labels), points))
    return found


def answers(document: dict[str, Any], ask: Ask, span: Span) -> dict[str, list[Line]]:
    """Return title -> lines of every panel of a dashboard."""
    return {panel["title"]: lines_of(panel, ask, span) for panel in panels_of(document)}


def prometheus(url: str) -> Ask:
    """Return the function that asks a Prometheus for a span."""

    def ask(query: str, span: Span) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        fields = {"query": query, "start": span.start, "end": span.end, "step": span.step_seconds}
        data = urllib.parse.urlencode(fields).encode()
        with urllib.request.urlopen(f"{url}/api/v1/query_range", data, timeout=60) as answer:  # noqa: S310 (the address is given)
            series = json.load(answer)["data"]["result"]
        return [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in series]

    return ask


# --- the picture ---------------------------------------------------------------------------------------

_CELL, _LINE = 50, 27
"""Width of a column and height of a row of Grafana's grid, pixels."""
_TOP = 56
_COLOURS = ("#3274d9", "#e0752d", "#37872d", "#c4162a", "#8f3bb8", "#b5891a", "#1f9e9e", "#6e6e6e")
_NAMES = {"red": "#c4162a", "orange": "#e0752d", "green": "#37872d"}
_MOST_LEGENDS = 8
_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def written(value: float, unit: str) -> str:
    """Return a value as an axis shows it."""
    if unit == "percentunit":
        return f"{100 * value:,.0f} %" if abs(value) >= 10 else f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
    for power, letter in _POWERS:
        if abs(value) >= power:
            return f"{value / power:.3g} {letter}"
    return f"{value:.3g}"


def drawing(
    document: dict[str, Any], found: dict[str, list[Line]], absent: dict[str, str], span: Span
) -> str:
    """Return the SVG of a dashboard.

    Args:
        found: title -> lines of each panel.
        absent: title -> why a panel has no data.
    """
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in document["panels"])
    width, height = 24 * _CELL, _TOP + bottom * _LINE + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="22" font-size="17" font-weight="bold">{escape(document["title"])}</text>',
        f'<text x="8" y="42" fill="#555555">{escape(document["description"])} {NOTE}</text>',
    ]
    for panel in document["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * _CELL, _TOP + place["y"] * _LINE
        if panel["type"] == "row":
            parts.append(
                f'<text x="8" y="{y + 18}" font-size="14" font-weight="bold">{escape(panel["title"])}</text>'
            )
            continue
        lines = found[panel["title"]]
        box = (x + 4, y + 3, place["w"] * _CELL - 8, place["h"] * _LINE - 6)
        parts.append(_frame(panel, box))
        if not lines:
            parts.append(_absence(absent.get(panel["title"], "no data"), box))
        elif panel["type"] == "stat":
            parts.append(_number(panel, lines[0], box))
        else:
            parts.append(_graph(panel, lines, box, span))
    return "\n".join([*parts, "</svg>", ""])


_Box = tuple[int, int, int, int]


def _frame(panel: dict[str, Any], box: _Box) -> str:
    x, y, width, height = box
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#fafafa" stroke="#cccccc"/>'
        f'<text x="{x + 8}" y="{y + 17}" font-weight="bold">{escape(panel["title"])}'
        f"<title>{escape(panel['description'])}</title></text>"
    )


def _absence(why: str, box: _Box) -> str:
    x, y, width, height = box
    rows = _folded(f"No data: {why}", 62)
    first = y + height // 2 - 7 * (len(rows) - 1)
    return "".join(
        f'<text x="{x + width // 2}" y="{first + 14 * index}" text-anchor="middle" fill="#888888">{escape(row)}</text>'
        for index, row in enumerate(rows)
    )


def _folded(text: str, most: int) -> list[str]:
    rows = [""]
    for word in text.split():
        if rows[-1] and len(rows[-1]) + 1 + len(word) > most:
            rows.append("")
        rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


def _number(panel: dict[str, Any], line: Line, box: _Box) -> str:
    x, y, width, height = box
    value = line.points[-1][1]
    defaults = panel["fieldConfig"]["defaults"]
    colour = "#333333"
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            colour = _NAMES[step["color"]]
    return (
        f'<text x="{x + width // 2}" y="{y + height // 2 + 16}" font-size="36" text-anchor="middle" fill="{colour}">'
        f"{written(value, defaults['unit'])}</text>"
    )


def _graph(panel: dict[str, Any], lines: list[Line], box: _Box, span: Span) -> str:
    x, y, width, height = box
    defaults = panel["fieldConfig"]["defaults"]
    shown = lines[:_MOST_LEGENDS]
    legends = -(-len(shown) // 2)
    left, top, right, base = x + 56, y + 28, x + width - 8, y + height - 14 * legends - 20
    values = [value for line in lines for _, value in line.points]
    low, high = min(defaults.get("min", 0), *values, 0.0), max(*values, 0.0)
    high = high if high > low else low + 1.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        level = base - share * (base - top)
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{level:.0f}" y2="{level:.0f}" stroke="#e4e4e4"/>'
            f'<text x="{left - 4}" y="{level + 4:.0f}" text-anchor="end" fill="#555555">{written(low + share * (high - low), defaults["unit"])}</text>'
        )
    parts.append(
        f'<text x="{right}" y="{base + 13}" text-anchor="end" fill="#555555">{span.end - span.start:.0f} s</text>'
        f'<text x="{left}" y="{base + 13}" fill="#555555">0 s</text>'
    )
    for index, line in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        for run in _runs(line.points, 1.5 * span.step_seconds):
            places = [
                (
                    left + (at - span.start) / (span.end - span.start) * (right - left),
                    base - (value - low) / (high - low) * (base - top),
                )
                for at, value in run
            ]
            if len(places) == 1:
                parts.append(
                    f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2" fill="{colour}"/>'
                )
            else:
                path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for index, line in enumerate(shown):
        across = x + 10 + (index % 2) * (width // 2 - 4)
        down = y + height - 14 * legends + 14 * (index // 2) + 6
        name = line.legend or "value"
        more = f" and {len(lines) - len(shown)} more" if len(lines) > len(shown) and line is shown[-1] else ""
        parts.append(
            f'<rect x="{across}" y="{down - 7}" width="9" height="3" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
            f'<text x="{across + 13}" y="{down}" fill="#333333">{escape(name[:32] + more)}</text>'
        )
    return "".join(parts)


def _runs(points: Iterable[tuple[float, float]], most_seconds: float) -> list[list[tuple[float, float]]]:
    """Return the samples in groups without a gap."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or point[0] - runs[-1][-1][0] > most_seconds:
            runs.append([])
        runs[-1].append(point)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--prometheus", required=True, help="address of the Prometheus")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes until now to show (default 60)")
    parser.add_argument("--scrape-seconds", type=float, default=15.0, help="scrape interval (default 15)")
    options = parser.parse_args()
    end = datetime.now(UTC).timestamp()
    seconds = 60 * options.minutes
    span = Span(end - seconds, end, max(seconds / 60, options.scrape_seconds), 4 * options.scrape_seconds)
    ask = prometheus(options.prometheus.rstrip("/"))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents().items():
        path = options.folder / f"{name}.svg"
        path.write_text(drawing(document, answers(document, ask, span), {}, span), encoding="utf-8")
        sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main()
