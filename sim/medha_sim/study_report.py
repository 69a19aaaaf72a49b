"""Reports of a study: a self-contained HTML page, and a JSON document.

The page embeds plotly's script (MIT licence) and fetches nothing. Every figure of the page is also in the
JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from plotly.offline import get_plotlyjs

from medha_sim.run_summary import Summary, interval_95
from medha_sim.scenario import Deployment
from medha_sim.study import StudyResult
from medha_sim.study_plots import (
    Runs,
    at,
    attainment,
    chunks,
    convoy,
    curves,
    latency,
    over_load,
    over_time,
    plot,
)

_MOST_WARNINGS = 12
_LEAST_SEEDS = 3  # with fewer, an interval is useless: Student's factor for two is 12.7
_MANY_UNDECIDED = 0.05  # share of undecided requests above which a run gets a warning
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
    """The content of a report."""

    title: str
    paragraphs: tuple[str, ...]
    runs: Runs
    document: Summary  # the JSON
    warnings: tuple[str, ...] = ()


def of_study(result: StudyResult) -> Report:
    """Return the report of a study."""
    return Report(
        title="Medha under a virtual clock",
        paragraphs=(_description(result), _METHOD),
        runs=result.runs,
        document=result.as_json(),
        warnings=tuple(_warnings(result)),
    )


def figures(report: Report) -> str:
    """Return the JSON document."""
    return json.dumps(report.document, indent=1) + "\n"


def page(report: Report) -> str:
    """Return the HTML page."""
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
        parts += map(plot, over_load(central))
    parts.append("</body></html>")
    return "\n".join(part for part in parts if part)


def comparable(runs: Runs) -> Runs:
    """Return the runs that reached their end; if there are none, all runs."""
    whole = [(key, summary) for key, summary in runs if not summary["interrupted"]]
    return whole or runs


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of a run, and its format."""

    name: str
    value: Callable[[Summary], float | None]
    text: Callable[[float], str]


def columns(runs: Runs) -> list[Column]:
    """Return the columns of a table of these runs."""
    found = []
    for kind in dict.fromkeys(kind for _, summary in runs for kind in summary["kinds"]):
        found += [
            Column(f"{kind}: TTFT in time", _figure_at("kinds", kind, "ttft_attainment"), _percent),
            Column(f"{kind}: TTFT p50", _figure_at("kinds", kind, "ttft_seconds", "p50"), _duration),
            Column(f"{kind}: TTFT p99", _figure_at("kinds", kind, "ttft_seconds", "p99"), _duration),
        ]
    guesses = []
    if any("guesses" in summary for _, summary in runs):
        guesses = [
            Column("tokens a decode", _figure_at("guesses", "tokens_per_decode"), _hundredths),
            Column("guesses verified a decode", _figure_at("guesses", "verified_per_decode"), _hundredths),
            Column("of these, right", _figure_at("guesses", "right_share"), _percent),
        ]
    return [
        *found,
        *guesses,
        Column("TPOT in time", _figure_at("all", "tpot_attainment"), _percent),
        Column("TPOT p50", _figure_at("all", "tpot_seconds", "p50"), _duration),
        Column("TPOT p99", _figure_at("all", "tpot_seconds", "p99"), _duration),
        Column("good requests/s", _figure_at("all", "goodput_per_second"), _rate),
        Column("censored", _figure_at("all", "censored"), _count),
        Column("undecided", _figure_at("all", "ttft_undecided"), _count),
    ]


def table_rows(runs: Runs, *, band: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of systems: mean over seeds +- half the 95 % interval, [band]."""
    shown = columns(runs)
    rows = []
    for system in dict.fromkeys(key.system for key, _ in runs):
        mine = [(key, summary) for key, summary in runs if key.system == system]
        rows.append([system, *(_cell(mine, column, band=band) for column in shown)])
    return ["system", *(column.name for column in shown)], rows


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of a system minus that of the first system, by seed: both saw the same requests."""

    system: str
    less: str
    column: Column
    by_seed: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the mean over the seeds, and half the 95 % interval of that mean, as plain data."""
        mean, half_width = interval_95(self.by_seed)
        return {
            "system": self.system,
            "less": self.less,
            "figure": self.column.name,
            "mean": mean,
            "half_width": half_width,
            "seeds": len(self.by_seed),
        }


def differences(runs: Runs) -> list[Difference]:
    """Return shares and rates of each system minus those of the first one, paired by seed.

    Paired differences can tell systems apart whose own intervals overlap. Systems with fewer than
    `_LEAST_SEEDS` seeds, such as a live run, are left out.
    """
    central = {(key.system, key.seed): summary for key, summary in runs if key.capacity == 1}
    seeds_of = Counter(system for system, _ in central)
    first, *others = [system for system, seeds in seeds_of.items() if seeds >= _LEAST_SEEDS] or [""]
    found = []
    for system in others:
        seeds = [seed for name, seed in central if name == system and (first, seed) in central]
        for column in columns(runs):
            if column.text not in (_percent, _rate):
                continue
            pairs = [
                (column.value(central[system, seed]), column.value(central[first, seed])) for seed in seeds
            ]
            known = tuple(one - other for one, other in pairs if one is not None and other is not None)
            if len(known) >= _LEAST_SEEDS:
                found.append(Difference(system, first, column, known))
    return found


def difference_rows(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of `differences`: mean over seeds +- half the 95 % interval."""
    found = differences(runs)
    shown = list(dict.fromkeys(one.column.name for one in found))
    cells = {
        (f"{one.system} - {one.less}", one.column.name): _interval(one.by_seed, one.column.text, sign="+")
        for one in found
    }
    names = dict.fromkeys(name for name, _ in cells)
    return ["difference", *shown], [
        [name, *(cells.get((name, column), "-") for column in shown)] for name in names
    ]


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
    if deployment.guesses:
        text += f" {_guessing(deployment)}"
    if result.capacity_rate is not None:
        text += f" Capacity, measured with a backlog: {result.capacity_rate:.3f} requests a second."
    if spec.band:
        text += (
            f" Whiskers and brackets: least and greatest with ranks {spec.band:.0%} slower and faster than the "
            "profile says."
        )
    if len(spec.seeds) >= _LEAST_SEEDS:
        text += " ±: 95 % interval of the mean over seeds."
    return text


def _guessing(deployment: Deployment) -> str:
    """Return a sentence on how tokens are guessed."""
    speculation = deployment.scheduling.speculation
    model = "" if deployment.draft is None else f" ({deployment.draft.name})"
    return (
        f"Up to {speculation.max_draft_tokens} tokens of a sequence are guessed by {speculation.method}{model}; each guess is "
        f"right with a chance of {deployment.acceptance:g}."
    )


def _warnings(result: StudyResult) -> Iterable[str]:
    if result.interrupted:
        yield (
            f"Interrupted: {len(result.runs)} of {result.planned} runs are here, "
            f"{sum(summary['interrupted'] for _, summary in result.runs)} of them stopped on the way."
        )
    if result.failure is not None:
        yield f"Broken off: {len(result.runs)} of {result.planned} runs are here. {result.failure}"
    for key, summary in comparable(result.runs):
        counts = summary["all"]
        if key.capacity == 1 and counts["ttft_undecided"] > _MANY_UNDECIDED * max(counts["arrived"], 1):
            yield (
                f"{key}: {counts['ttft_undecided']} of {counts['arrived']} requests are undecided; simulate "
                "longer to know more."
            )
        for why in summary["unserved"]:
            yield f"{key}: {why['count']} {why['ending']} as {why['reason']}, the first: {why['first']}."


def _sections(runs: Runs) -> Iterable[str]:
    central = [(key, summary) for key, summary in runs if key.capacity == 1]
    yield _table(*_turned(*table_rows(runs)))
    head, rows = difference_rows(runs)
    if rows:
        yield "<p class='note'>Paired by seed, each less the first:</p>"
        yield _table(*_turned(head, rows))
    kinds = list(dict.fromkeys(kind for _, summary in central for kind in summary["kinds"]))
    yield "<h2>Deadlines met</h2>"
    yield plot(attainment(runs, "kinds", "by kind of request"))
    yield plot(attainment(runs, "lengths", "by prompt length, tokens"))
    classes = any(len(summary["classes"]) > 1 for _, summary in central)
    if classes:
        yield plot(attainment(runs, "classes", "by service class"))
    yield "<h2>Time to first token</h2>"
    yield "<p class='note'>Distributions are means of the seeds' quantiles.</p>"
    for kind in kinds:
        yield plot(curves(central, ("kinds", kind, "ttft_seconds"), f"{kind}: TTFT, seconds"))
        yield plot(
            curves(central, ("kinds", kind, "ttft_over_target"), f"{kind}: TTFT / its target", mark=1.0)
        )
    yield plot(latency(central, "lengths", "ttft_seconds", "TTFT by prompt length, tokens"))
    if classes:
        yield plot(latency(central, "classes", "ttft_seconds", "TTFT by service class"))
    yield "<h2>Time per output token</h2>"
    yield plot(curves(central, ("all", "tpot_seconds"), "mean TPOT of a request, seconds"))
    yield plot(latency(central, "lengths", "tpot_seconds", "TPOT by prompt length, tokens"))
    if classes:
        yield plot(latency(central, "classes", "tpot_seconds", "TPOT by service class"))
    yield "<h2>Convoys</h2>"
    yield "<p>TTFT of short requests that arrive while a long prompt is not yet answered, and of the others.</p>"
    yield plot(convoy(central))
    yield "<h2>Inside the replicas</h2>"
    yield f"<p class='note'>Seed {central[0][0].seed}.</p>" if central else ""
    first = [(key, summary) for key, summary in central if key.seed == central[0][0].seed]
    yield plot(over_time(first, "running", "requests that hold KV"))
    yield plot(over_time(first, "waiting", "requests that wait"))
    yield plot(over_time(first, "kv_share", "share of KV held"))
    yield plot(chunks(central))
    yield plot(
        curves(central, ("steps", "observed_over_predicted"), "step time, observed / predicted", mark=1.0)
    )


def _turned(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Transpose a table, so that each system has a column: there are more figures than systems."""
    first, *others = zip(head, *rows, strict=True)
    return list(first), [list(other) for other in others]


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"


# --- helpers -----------------------------------------------------------------------------------------


def _figure_at(*path: str) -> Callable[[Summary], float | None]:
    return lambda summary: at(summary, *path)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    if abs(seconds) < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def _rate(value: float) -> str:
    return f"{value:.3f}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
