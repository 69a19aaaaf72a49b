"""The plots of a report, as plotly figures. Each system keeps its colour."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from medha_sim.run_summary import CURVE_POINTS, LENGTH_BUCKETS, Summary, length_bucket
from medha_sim.study import RunKey

Runs = Sequence[tuple[RunKey, Summary]]
Figure = Any  # plotly has no types

_COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#efb118", "#6cc5b0", "#9c6b4e", "#9498a0")
_HEIGHT = 380
_LOG_TICKS = [digit * 10.0**power for power in range(-6, 8) for digit in (1, 2, 5)]

LOG: dict[str, Any] = {
    "type": "log",
    "tickvals": _LOG_TICKS,
    "ticktext": [f"{tick:,.7g}" if tick < 1e6 else f"{tick / 1e6:g}M" for tick in _LOG_TICKS],
}
"""Logarithmic axis with all tick labels written out; plotly shows bare digits between powers of ten."""


def attainment(runs: Runs, grouping: str, title: str) -> Figure:
    """Plot the share of decided requests in time as bars, and the capacity band as whiskers."""
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
                    and (found := at(run, grouping, group, "ttft_attainment")) is not None
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


def curves(runs: Runs, path: tuple[str, ...], title: str, mark: float | None = None) -> Figure:
    """Plot cumulative distributions, averaged over runs."""
    figure = _figure(title)
    shares = [index / (CURVE_POINTS - 1) for index in range(CURVE_POINTS)]
    for system, colour in _systems(runs):
        curves = [
            found["curve"]
            for key, run in runs
            if key.system == system and (found := at(run, *path)) is not None and found["count"]
        ]
        if curves:
            x = [fmean(points) for points in zip(*curves, strict=True)]
            figure.add_scatter(x=x, y=shares, name=system, mode="lines", line_color=colour)
    if mark is not None:
        figure.add_vline(x=mark, line_dash="dot", line_color="#59636e")
    figure.update_xaxes(**LOG)
    figure.update_yaxes(
        tickformat=".0%", title="share of requests" if path[0] != "steps" else "share of steps"
    )
    return figure


def latency(runs: Runs, grouping: str, figure_name: str, title: str) -> Figure:
    """Plot medians of a time as bars, with whiskers up to its 99th percentile; both are means over seeds."""
    groups = _group_names(runs, grouping)
    figure = _figure(f"{title}: median (bar) and p99 (whisker), seconds")
    times: list[float] = []
    for system, colour in _systems(runs):
        medians, rise = [], []
        for group in groups:
            found = [at(run, grouping, group, figure_name) for key, run in runs if key.system == system]
            known = [one for one in found if one and one["count"]]
            medians.append(fmean(one["p50"] for one in known) if known else None)
            rise.append(fmean(one["p99"] - one["p50"] for one in known) if known else 0.0)
        times += [median for median in medians if median]
        times += [median + more for median, more in zip(medians, rise, strict=True) if median]
        figure.add_bar(x=groups, y=medians, name=system, marker_color=colour, error_y=_up(rise))
    figure.update_yaxes(**_axis_of_bars(times))
    return figure


def convoy(runs: Runs) -> Figure:
    """Plot the TTFT of short requests that arrive while a long prompt is unanswered, and of the others."""
    figure = _figure("TTFT of short requests, seconds: median (bar) and p90 (whisker)")
    times: list[float] = []
    for place, name in (("otherwise", "no long prompt"), ("while_long_prefills", "behind a long prompt")):
        systems, medians, highs = [], [], []
        for system, _ in _systems(runs):
            found = [at(run, "convoy", place) for key, run in runs if key.system == system]
            known = [one for one in found if one and one["count"]]
            if known:
                systems.append(system)
                medians.append(fmean(one["p50"] for one in known))
                highs.append(fmean(one["p90"] for one in known))
        rise = [high - median for high, median in zip(highs, medians, strict=True)]
        times += [*medians, *highs]
        figure.add_bar(x=systems, y=medians, name=name, error_y=_up(rise))
    figure.update_yaxes(**_axis_of_bars(times))
    return figure


def over_time(runs: Runs, column: str, title: str) -> Figure:
    """Plot a column of the series over time; `runs` has one run for each system."""
    figure = _figure(f"{title}, over time (seconds)")
    for (system, colour), (_, summary) in zip(_systems(runs), runs, strict=False):
        found = summary["series"]
        figure.add_scatter(x=found["at"], y=found[column], name=system, mode="lines", line_color=colour)
    if column == "kv_share":
        figure.update_yaxes(tickformat=".0%")
    return figure


def chunks(runs: Runs) -> Figure:
    """Plot sizes of prefill chunks by the context before them."""
    figure = _figure("prefill chunks by context (tokens): median (bar) and p90 (whisker)")
    for system, colour in _systems(runs):
        buckets: dict[str, list[Summary]] = {}
        for key, run in runs:
            if key.system == system:
                for bucket, found in run["steps"]["chunk_tokens_by_context"].items():
                    buckets.setdefault(bucket, []).append(found)
        medians = [fmean(one["p50"] for one in found) for found in buckets.values()]
        rise = [fmean(one["p90"] - one["p50"] for one in found) for found in buckets.values()]
        figure.add_bar(x=list(buckets), y=medians, name=system, marker_color=colour, error_y=_up(rise))
    ordered = [length_bucket(end - 1) for end in LENGTH_BUCKETS] + [length_bucket(LENGTH_BUCKETS[-1])]
    figure.update_xaxes(categoryorder="array", categoryarray=ordered)
    return figure


def over_load(runs: Runs) -> list[Figure]:
    """Plot the attainment of each kind, and goodput, over the offered load."""
    kinds = list(dict.fromkeys(kind for _, summary in runs for kind in summary["kinds"]))
    figures = []
    for kind in kinds:
        figure = _line_per_system(runs, ("kinds", kind, "ttft_attainment"), f"{kind}: TTFT in time")
        figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
        figures.append(figure)
    return [*figures, _line_per_system(runs, ("all", "goodput_per_second"), "good requests a second")]


def _line_per_system(runs: Runs, path: tuple[str, ...], title: str) -> Figure:
    figure = _figure(f"{title}, over the offered load")
    for system, colour in _systems(runs):
        points: dict[float, list[float]] = {}
        for key, run in runs:
            found = at(run, *path)
            if key.system == system and key.load is not None and found is not None:
                points.setdefault(key.load, []).append(found)
        loads = sorted(points)
        means = [fmean(points[load]) for load in loads]
        figure.add_scatter(x=loads, y=means, name=system, mode="lines+markers", line_color=colour)
    return figure


# --- helpers ---


def at(summary: Summary, *path: str) -> Any:
    """Return the value at a path of keys, or None."""
    found: Any = summary
    for name in path:
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


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


def plot(figure: Figure) -> str:
    """Return a figure as a fragment of a page that already has plotly's script."""
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )
    return text


def _axis_of_bars(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis if values span more than a factor of 10, else one from zero.

    On a logarithmic axis the length of a bar has no meaning, so it is avoided where possible.
    """
    known = [value for value in values if value > 0]
    return LOG if known and max(known) > 10 * min(known) else {"rangemode": "tozero"}


def _systems(runs: Runs) -> list[tuple[str, str]]:
    """Return each system with its colour."""
    names = list(dict.fromkeys(key.system for key, _ in runs))
    return [(name, _COLOURS[index % len(_COLOURS)]) for index, name in enumerate(names)]


def _group_names(runs: Runs, grouping: str) -> list[str]:
    """Return the names of groups, in the order of the run that has the most groups; others follow."""
    most: Summary = max((summary[grouping] for _, summary in runs), key=len, default={})
    missing = [name for _, summary in runs for name in summary[grouping] if name not in most]
    return [*most, *dict.fromkeys(missing)]


def _up(rise: Sequence[float]) -> dict[str, Any]:
    """Return whiskers that only go up."""
    return {
        "type": "data",
        "symmetric": False,
        "array": rise,
        "arrayminus": [0.0] * len(rise),
        "thickness": 1,
    }
