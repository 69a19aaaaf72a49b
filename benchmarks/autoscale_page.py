"""The table and the picture of docs/performance-operation.md, from the results of `autoscale.py`: cost against lateness, for each signal."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from harness import ROOT, Row, mean_and_interval, write

PAGE = ROOT / "docs" / "performance-operation.md"
PICTURE = ROOT / "docs" / "autoscaling" / "signals.svg"
WORKLOADS = {
    "mix": "Prompts beside a few very long ones",
    "pages": "All prompts have some pages",
    "batch": "The first, half of them due in 15 min",
}
SIGNALS = {
    "demand": ("desired replicas", "#3274d9"),
    "queue": ("requests that wait", "#e0752d"),
    "kv": ("share of KV that is reserved", "#37872d"),
    "busy": ("share of time in which replicas compute", "#8f3bb8"),
    "fixed": ("always as many", "#6e6e6e"),
}
"""Name of a signal -> its words, and its colour in the picture."""
_LINK = "![Cost against late first tokens, for each signal and target](autoscaling/signals.svg)"
_TABLE = re.compile(
    r"(?<=<!-- signals: written by `python benchmarks/autoscale.py --docs` -->\n).*?(?=<!-- /signals -->)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Result:
    """The figures of one simulation."""

    replica_hours: float
    on_time_percent: float
    late_minutes: float
    """Minutes by which first tokens were late, summed; one that never came counts until the end."""
    requests: int
    unserved: int
    changes: int
    most_replicas: int
    cpu_seconds: float
    """Processor time of the simulation itself."""
    revision: str = ""
    """Commit that was simulated."""

    @property
    def price(self) -> float:
        """Replica hours, and late minutes at the same price."""
        return self.replica_hours + self.late_minutes / 60


def means(
    group: Sequence[Result],
    figures: Iterable[str] = ("replica_hours", "on_time_percent", "late_minutes", "price", "changes"),
) -> list[str]:
    """Return cells: means and half intervals over the seeds."""
    cells = []
    for figure in figures:
        mean, half = mean_and_interval([float(getattr(one, figure)) for one in group])
        cells.append(f"{mean:.2f} ± {half:.2f}" if half == half else f"{mean:.2f}")
    return cells


def groups(figures: Row) -> dict[str, dict[tuple[str, str], list[Result]]]:
    """Return the results of a file by workload, then by signal and target; workloads without results are left out."""
    found: dict[str, dict[tuple[str, str], list[Result]]] = {name: {} for name in WORKLOADS}
    names = list(SIGNALS)
    rows = [(*name.split(", "), row) for name, row in figures["rows"].items()]
    for workload, both, _, row in sorted(rows, key=lambda one: (names.index(one[1].split(" ")[0]), *one[:3])):
        signal, target = both.split(" ")
        found[workload].setdefault((signal, target), []).append(Result(**row))
    return {name: by_signal for name, by_signal in found.items() if by_signal}


def write_page(figures: Row, page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Write the table of a page, and the picture beside it."""
    text = page.read_text(encoding="utf-8")
    assert _TABLE.search(text), f"{page} has no place for the table"
    write(page, _TABLE.sub(lambda _: page_table(figures), text))
    write(picture, drawing(figures))


def page_table(figures: Row) -> str:
    """Return the table as Markdown."""
    found = groups(figures)
    lines = [
        "| signal, target for each replica | "
        + " | ".join(f"{WORKLOADS[name]}: replica hours | late minutes" for name in found)
        + " |",
        "|---|" + "---|" * (2 * len(found)),
    ]
    for signal, target in dict.fromkeys(key for by_signal in found.values() for key in by_signal):
        name = SIGNALS[signal][0] + ("" if signal == "demand" else f", {target}")
        cells: list[str] = []
        for by_signal in found.values():
            group = by_signal.get((signal, target))
            cells += means(group, ("replica_hours", "late_minutes")) if group else ("", "")
        lines.append("| " + " | ".join([name, *cells]) + " |")
    seeds = max(len(group) for by_signal in found.values() for group in by_signal.values())
    lines += [
        "",
        f"Means over {seeds} seeds, with half the 95 % interval (Student's t)." if seeds > 1 else "One seed.",
        "",
    ]
    return "\n".join([*lines, _LINK, ""])


# --- the picture ---------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 240, 64, 64, 80
_LEGEND = 22


def drawing(figures: Row) -> str:
    """Return the SVG: a graph for each workload, a line for each signal, and a point for each target."""
    found = groups(figures)
    width = _LEFT + len(found) * (_WIDTH + _GAP)
    height = _TOP + _HEIGHT + 60 + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="8" y="22" font-size="17" font-weight="bold">Cost against late first tokens, for each signal and target</text>',
        '<text x="8" y="40" fill="#555555">Nearer to the lower left is better. Bars are 95 % intervals over the seeds. '
        "Drawn by benchmarks/autoscale.py --docs.</text>",
    ]
    for number, (workload, by_signal) in enumerate(found.items()):
        parts += _graph(WORKLOADS[workload], by_signal, _LEFT + number * (_WIDTH + _GAP))
    across = 8
    for words, colour in SIGNALS.values():
        parts.append(
            f'<circle cx="{across + 4}" cy="{height - 14}" r="4" fill="{colour}"/>'
            f'<text x="{across + 14}" y="{height - 10}">{escape(words)}</text>'
        )
        across += 34 + 6 * len(words)
    return "\n".join([*parts, "</svg>", ""])


def _graph(title: str, by_signal: dict[tuple[str, str], list[Result]], x: float) -> list[str]:
    base = _TOP + _HEIGHT
    parts = [f'<text x="{x}" y="{_TOP - 8}" font-weight="bold">{escape(title)}</text>']
    hours = {key: mean_and_interval([one.replica_hours for one in group]) for key, group in by_signal.items()}
    late = {
        key: mean_and_interval([100 - one.on_time_percent for one in group])
        for key, group in by_signal.items()
    }
    right, above = (_end(mean for mean, _ in axis.values()) for axis in (hours, late))

    def place(across: float, up: float) -> tuple[float, float]:
        return x + min(1.0, max(0.0, across / right)) * _WIDTH, base - min(
            1.0, max(0.0, up / above)
        ) * _HEIGHT

    for share in (0.0, 0.5, 1.0):
        down, across = base - share * _HEIGHT, x + share * _WIDTH
        parts.append(
            f'<line x1="{x}" x2="{x + _WIDTH}" y1="{down}" y2="{down}" stroke="#e4e4e4"/>'
            f'<text x="{x - 5}" y="{down + 4}" text-anchor="end" fill="#555555">{share * above:.3g} %</text>'
            f'<text x="{across}" y="{base + 15}" text-anchor="middle" fill="#555555">{share * right:.3g}</text>'
        )
    parts.append(
        f'<text x="{x + _WIDTH / 2}" y="{base + 31}" text-anchor="middle">replica hours</text>'
        f'<text x="{x - 52}" y="{_TOP + _HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 {x - 52} {_TOP + _HEIGHT / 2})">first tokens that are late</text>'
    )
    for signal, (words, colour) in SIGNALS.items():
        points = [(key, place(hours[key][0], late[key][0])) for key in by_signal if key[0] == signal]
        path = " ".join(f"{across:.1f},{down:.1f}" for _, (across, down) in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1" opacity="0.6"/>'
        )
        for key, (across, down) in points:
            parts += _bars(place, hours[key], late[key], colour)
            label = "" if signal == "demand" else key[1]
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{colour}"><title>{escape(f"{words}, {key[1]}")}</title></circle>'
                f'<text x="{across + 6:.1f}" y="{down - 4:.1f}" fill="{colour}">{label}</text>'
            )
    return parts


def _bars(
    place: Callable[[float, float], tuple[float, float]],
    across: tuple[float, float],
    up: tuple[float, float],
    colour: str,
) -> list[str]:
    """Return the intervals of a point as two lines."""
    if across[1] != across[1]:  # one seed has none
        return []
    ends = [
        (place(across[0] - across[1], up[0]), place(across[0] + across[1], up[0])),
        (place(across[0], up[0] - up[1]), place(across[0], up[0] + up[1])),
    ]
    return [
        f'<line x1="{a:.1f}" y1="{b:.1f}" x2="{c:.1f}" y2="{d:.1f}" stroke="{colour}" opacity="0.5"/>'
        for (a, b), (c, d) in ends
    ]


def _end(values: Iterable[float]) -> float:
    """Return the end of an axis: somewhat above its largest value."""
    return 1.1 * max(values) or 1.0
