"""One HTML page that needs nothing else, and the JSON beside it: what a study found.

The page holds plotly's script (MIT licence) and fetches nothing. Every figure of the page is in the JSON too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from medha_sim.metrics import CURVE_POINTS, Summary, interval_95
from medha_sim.study import RunKey, StudyResult

Runs = Sequence[tuple[RunKey, Summary]]
Figure = Any  # plotly has no types

_COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#efb118", "#6cc5b0", "#9c6b4e", "#9498a0")
_HEIGHT = 380
_MOST_WARNINGS = 12
_LEAST_SEEDS = 3  # below, an interval says nothing: Student's factor for two is 12.7
_MANY_UNDECIDED = 0.05  # share of requests
_METHOD = (
    "The controllers and the router are the ones that serve; step times are predicted, and attention on data-centre "
    "accelerators is known to about 30 %. A TTFT target is decided once the first token came or the deadline passed; "
    "requests still inside it at the end are “undecided” and left out."
)
_STYLE = """
:root { color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1f2328; }
body { max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { max-width: 78ch; margin: .3rem 0 .8rem; } .note { color: #59636e; }
.warn { background: #fff8e1; border-left: 4px solid #efb118; padding: .5rem .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.scroll { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a page says, besides what the runs say themselves."""

    title: str
    paragraphs: tuple[str, ...]
    runs: Runs
    document: Summary  # the JSON
    warnings: tuple[str, ...] = ()


def of_study(result: StudyResult) -> Report:
    """The report of a study."""
    return Report(
        title="Medha under a virtual clock",
        paragraphs=(_description(result), _METHOD),
        runs=result.runs,
        document=result.as_json(),
        warnings=tuple(_warnings(result)),
    )


def write_report(report: Report, html: Path) -> Path:
    """Write the page and, beside it, the JSON, whose path is returned."""
    beside = html.with_suffix(".json")
    beside.write_text(json.dumps(report.document, indent=1) + "\n", encoding="utf-8")
    html.write_text(page(report), encoding="utf-8")
    return beside


def page(report: Report) -> str:
    """The HTML page."""
    runs = comparable(report.runs)
    central = [(key, summary) for key, summary in runs if key.capacity == 1]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<meta name='viewport' content='width=device-width'><title>{escape(report.title)}</title>",
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p class='note'>{escape(paragraph)}</p>" for paragraph in report.paragraphs),
        *(f"<p class='warn'>{escape(warning)}</p>" for warning in report.warnings[:_MOST_WARNINGS]),
    ]
    for load in dict.fromkeys(key.load for key, _ in central):
        at_load = [(key, summary) for key, summary in runs if key.load == load]
        if load is not None:
            parts.append(f"<h2>Offered load {load:g}</h2>")
        parts += _sections(at_load)
    if len({key.load for key, _ in central}) > 1:
        parts.append("<h2>Over the offered load</h2>")
        parts.append(_plot(_over_load(central)))
    parts.append("</body></html>")
    return "\n".join(part for part in parts if part)


def comparable(runs: Runs) -> Runs:
    """Runs that reached their end; if there are none, those that were interrupted."""
    whole = [(key, summary) for key, summary in runs if not summary["interrupted"]]
    return whole or runs


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a run, and how it is written."""

    name: str
    value: Callable[[Summary], float | None]
    text: Callable[[float], str]


def columns(runs: Runs) -> list[Column]:
    """What a table of these runs shows."""
    found = []
    for kind in dict.fromkeys(kind for _, summary in runs for kind in summary["kinds"]):
        found += [
            Column(f"{kind}: TTFT in time", _figure_at("kinds", kind, "ttft_attainment"), _percent),
            Column(f"{kind}: TTFT p50", _figure_at("kinds", kind, "ttft_seconds", "p50"), _duration),
            Column(f"{kind}: TTFT p99", _figure_at("kinds", kind, "ttft_seconds", "p99"), _duration),
        ]
    return [
        *found,
        Column("TPOT p50", _figure_at("all", "tpot_seconds", "p50"), _duration),
        Column("TPOT p99", _figure_at("all", "tpot_seconds", "p99"), _duration),
        Column("good requests/s", _figure_at("all", "goodput_per_second"), _rate),
        Column("censored", _figure_at("all", "censored"), _count),
        Column("undecided", _figure_at("all", "ttft_undecided"), _count),
    ]


def table_rows(runs: Runs, *, band: bool = True) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table that compares systems: mean over seeds +- half the 95 % interval, [band]."""
    shown = columns(runs)
    rows = []
    for system in dict.fromkeys(key.system for key, _ in runs):
        mine = [(key, summary) for key, summary in runs if key.system == system]
        rows.append([system, *(_cell(mine, column, band=band) for column in shown)])
    return ["system", *(column.name for column in shown)], rows


def difference_rows(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Each system less the first one: mean over seeds of the differences of a seed, +- half the 95 % interval.

    All systems see the same requests, so that this tells them apart where their own intervals overlap. No rows for
    fewer than `_LEAST_SEEDS` seeds.
    """
    central = {(key.system, key.seed): summary for key, summary in runs if key.capacity == 1}
    systems = list(dict.fromkeys(system for system, _ in central))
    shown = [column for column in columns(runs) if column.text in (_percent, _rate)]
    rows = []
    for system in systems[1:]:
        seeds = [seed for name, seed in central if name == system and (systems[0], seed) in central]
        cells = []
        for column in shown:
            pairs = [
                (column.value(central[system, seed]), column.value(central[systems[0], seed]))
                for seed in seeds
            ]
            known = [one - other for one, other in pairs if one is not None and other is not None]
            cells.append(_interval(known, column.text, sign="+") if len(known) >= _LEAST_SEEDS else "-")
        if any(cell != "-" for cell in cells):
            rows.append([f"{system} - {systems[0]}", *cells])
    return ["difference", *(column.name for column in shown)], rows


def _cell(runs: Runs, column: Column, *, band: bool) -> str:
    central = [found for key, run in runs if key.capacity == 1 and (found := column.value(run)) is not None]
    if not central:
        return "-"
    text = _interval(central, column.text)
    others = [found for key, run in runs if key.capacity != 1 and (found := column.value(run)) is not None]
    if others and band:
        text += f" [{column.text(min(others))} to {column.text(max(others))}]"
    return text


def _interval(values: Sequence[float], text: Callable[[float], str], sign: str = "") -> str:
    mean, half_width = interval_95(values)
    written = (sign if mean >= 0 else "") + text(mean)
    return f"{written} ±{text(half_width)}" if len(values) >= _LEAST_SEEDS else written


# --- the parts of the page ---------------------------------------------------------------------------


def _description(result: StudyResult) -> str:
    spec, deployment = result.spec, result.spec.deployment
    workload = spec.workload
    described = {
        "mix": f"ShareGPT-like requests, {workload.long_share:.1%} of them Medha-SWE-like (100K-1M tokens"
        + (f", times {workload.long_scale:g})" if workload.long_scale != 1 else ")"),
        "conversations": "conversations of several turns",
        "trace": f"the trace {workload.trace}",
    }[workload.shape]
    if workload.rate is not None and not spec.loads:
        described += f" at {workload.rate:g} a second"
    shape = f"{deployment.topology}" + (
        f", {deployment.replicas} replicas" if deployment.replicas > 1 else ""
    )
    devices = deployment.topology.ranks * deployment.replicas
    text = (
        f"{deployment.model.name} on {devices} {deployment.hardware.name} ({shape}; "
        f"{deployment.kv_tokens():,} KV tokens a lane). {described[0].upper()}{described[1:]}, "
        f"{spec.duration_seconds:g} s each, seeds {', '.join(map(str, spec.seeds))}."
    )
    if result.capacity_rate is not None:
        text += f" Capacity, measured with a backlog: {result.capacity_rate:.3f} requests a second."
    if spec.band:
        text += (
            f" Whiskers and brackets: least and greatest with ranks {spec.band:.0%} slower and faster than the "
            "profile says. ±: 95 % interval of the mean over seeds."
        )
    return text


def _warnings(result: StudyResult) -> Iterable[str]:
    if result.interrupted:
        yield (
            f"Interrupted: {len(result.runs)} of {result.planned} runs are here, "
            f"{sum(summary['interrupted'] for _, summary in result.runs)} of them stopped on the way."
        )
    for key, summary in comparable(result.runs):
        figures = summary["all"]
        if key.capacity == 1 and figures["ttft_undecided"] > _MANY_UNDECIDED * max(figures["arrived"], 1):
            yield (
                f"{key}: {figures['ttft_undecided']} of {figures['arrived']} requests are undecided; simulate "
                "longer to know more."
            )
        if figures["refused"] or figures["failed"]:
            yield f"{key}: {figures['refused']} refused, {figures['failed']} failed."


def _sections(runs: Runs) -> Iterable[str]:
    central = [(key, summary) for key, summary in runs if key.capacity == 1]
    yield _table(*table_rows(runs))
    head, rows = difference_rows(runs)
    if rows:
        yield "<p class='note'>Paired by seed, each less the first:</p>"
        yield _table(head, rows)
    kinds = list(dict.fromkeys(kind for _, summary in central for kind in summary["kinds"]))
    yield "<h2>Deadlines met</h2>"
    yield _plot(_attainment(runs, "kinds", "by kind of request"))
    yield _plot(_attainment(runs, "lengths", "by prompt length, tokens"))
    if any(len(summary["classes"]) > 1 for _, summary in central):
        yield _plot(_attainment(runs, "classes", "by service class"))
    yield "<h2>Time to first token</h2>"
    yield "<p class='note'>Distributions are means of the seeds' quantiles.</p>"
    for kind in kinds:
        yield _plot(_curves(central, ("kinds", kind, "ttft_seconds"), f"{kind}: TTFT, seconds"))
        yield _plot(
            _curves(central, ("kinds", kind, "ttft_over_target"), f"{kind}: TTFT / its target", mark=1.0)
        )
    yield "<h2>Time per output token</h2>"
    yield _plot(_curves(central, ("all", "tpot_seconds"), "mean TPOT of a request, seconds"))
    yield "<h2>Convoys</h2>"
    yield "<p>TTFT of short requests that arrive while a long prompt is not yet answered, and of the others.</p>"
    yield _plot(_convoy(central))
    yield "<h2>Inside the replicas</h2>"
    yield f"<p class='note'>Seed {central[0][0].seed}.</p>" if central else ""
    first = [(key, summary) for key, summary in central if key.seed == central[0][0].seed]
    yield _plot(_over_time(first, "running", "requests that hold KV"))
    yield _plot(_over_time(first, "waiting", "requests that wait"))
    yield _plot(_over_time(first, "kv_share", "share of KV held"))
    yield _plot(_chunks(central))
    yield _plot(
        _curves(central, ("steps", "observed_over_predicted"), "step time, observed / predicted", mark=1.0)
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"


def _attainment(runs: Runs, grouping: str, title: str) -> Figure:
    """Bars: share of decided requests in time; whiskers: the capacity band."""
    groups = _group_names(runs, grouping)
    figure = _figure(f"TTFT in time, {title}")
    for system, colour in _systems(runs):
        means, below, above = [], [], []
        for group in groups:
            values = {
                capacity: [
                    found
                    for key, run in runs
                    if key.system == system
                    and (key.capacity == 1) == capacity
                    and (found := _at(run, grouping, group, "ttft_attainment")) is not None
                ]
                for capacity in (True, False)
            }
            mean = fmean(values[True]) if values[True] else None
            means.append(mean)
            below.append(0.0 if mean is None else mean - min([mean, *values[False]]))
            above.append(0.0 if mean is None else max([mean, *values[False]]) - mean)
        whiskers = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
        figure.add_bar(x=groups, y=means, name=system, marker_color=colour, error_y=whiskers)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


def _curves(runs: Runs, path: tuple[str, ...], title: str, mark: float | None = None) -> Figure:
    """Cumulative distributions."""
    figure = _figure(title)
    shares = [index / (CURVE_POINTS - 1) for index in range(CURVE_POINTS)]
    for system, colour in _systems(runs):
        curves = [
            found["curve"]
            for key, run in runs
            if key.system == system and (found := _at(run, *path)) is not None and found["count"]
        ]
        if curves:
            x = [fmean(points) for points in zip(*curves, strict=True)]
            figure.add_scatter(x=x, y=shares, name=system, mode="lines", line_color=colour)
    if mark is not None:
        figure.add_vline(x=mark, line_dash="dot", line_color="#59636e")
    figure.update_xaxes(type="log")
    figure.update_yaxes(
        tickformat=".0%", title="share of requests" if path[0] != "steps" else "share of steps"
    )
    return figure


def _convoy(runs: Runs) -> Figure:
    figure = _figure("TTFT of short requests, seconds: median (bar) and p90 (whisker)")
    for place, name in (("otherwise", "no long prompt"), ("while_long_prefills", "behind a long prompt")):
        systems, medians, highs = [], [], []
        for system, _ in _systems(runs):
            found = [_at(run, "convoy", place) for key, run in runs if key.system == system]
            known = [one for one in found if one and one["count"]]
            if known:
                systems.append(system)
                medians.append(fmean(one["p50"] for one in known))
                highs.append(fmean(one["p90"] for one in known))
        rise = [high - median for high, median in zip(highs, medians, strict=True)]
        whiskers = {"type": "data", "symmetric": False, "array": rise, "arrayminus": [0.0] * len(rise)}
        figure.add_bar(x=systems, y=medians, name=name, error_y=whiskers)
    figure.update_yaxes(type="log")
    return figure


def _over_time(runs: Runs, column: str, title: str) -> Figure:
    figure = _figure(f"{title}, over time (seconds)")
    for (system, colour), (_, summary) in zip(_systems(runs), runs, strict=False):
        found = summary["series"]
        figure.add_scatter(x=found["at"], y=found[column], name=system, mode="lines", line_color=colour)
    if column == "kv_share":
        figure.update_yaxes(tickformat=".0%")
    return figure


def _chunks(runs: Runs) -> Figure:
    figure = _figure("prefill chunks by context (tokens): median (bar) and p90 (whisker)")
    for system, colour in _systems(runs):
        buckets: dict[str, list[Summary]] = {}
        for key, run in runs:
            if key.system == system:
                for bucket, found in run["steps"]["chunk_tokens_by_context"].items():
                    buckets.setdefault(bucket, []).append(found)
        medians = [fmean(one["p50"] for one in found) for found in buckets.values()]
        rise = [fmean(one["p90"] - one["p50"] for one in found) for found in buckets.values()]
        whiskers = {"type": "data", "symmetric": False, "array": rise, "arrayminus": [0.0] * len(rise)}
        figure.add_bar(x=list(buckets), y=medians, name=system, marker_color=colour, error_y=whiskers)
    figure.update_xaxes(categoryorder="array", categoryarray=_group_names(runs, "lengths"))
    return figure


def _over_load(runs: Runs) -> Figure:
    figure = _figure("TTFT in time, over the offered load")
    kinds = list(dict.fromkeys(kind for _, summary in runs for kind in summary["kinds"]))
    for system, colour in _systems(runs):
        for index, kind in enumerate(kinds):
            points: dict[float, list[float]] = {}
            for key, run in runs:
                found = _at(run, "kinds", kind, "ttft_attainment")
                if key.system == system and key.load is not None and found is not None:
                    points.setdefault(key.load, []).append(found)
            loads = sorted(points)
            figure.add_scatter(
                x=loads,
                y=[fmean(points[load]) for load in loads],
                name=f"{system}, {kind}",
                mode="lines+markers",
                line={"color": colour, "dash": ("solid", "dash", "dot")[index % 3]},
            )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


# --- small things ------------------------------------------------------------------------------------


def _figure(title: str) -> Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        template="plotly_white",
        height=_HEIGHT,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.15},
        barmode="group",
    )
    return figure


def _plot(figure: Figure) -> str:
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )
    return text


def _systems(runs: Runs) -> list[tuple[str, str]]:
    """Each system with its colour."""
    names = list(dict.fromkeys(key.system for key, _ in runs))
    return [(name, _COLOURS[index % len(_COLOURS)]) for index, name in enumerate(names)]


def _group_names(runs: Runs, grouping: str) -> list[str]:
    """Names of groups in the order of their size: the run that has the most of them knows it."""
    most: Summary = max((summary[grouping] for _, summary in runs), key=len, default={})
    missing = [name for _, summary in runs for name in summary[grouping] if name not in most]
    return [*most, *dict.fromkeys(missing)]


def _figure_at(*path: str) -> Callable[[Summary], float | None]:
    return lambda summary: _at(summary, *path)


def _at(summary: Summary, *path: str) -> Any:
    """What lies at a path of keys, or None."""
    found: Any = summary
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _rate(value: float) -> str:
    return f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
