"""Generator of docs/reproduction.md from a campaign's file: each claim, our figure, its band, the verdict.

One section comes from the file of `benchmarks/roles.py`. `report` turns outcomes into plain data once, when a campaign
ends. `page` is a pure function of that data and of that file, so the committed page can be checked against the
committed files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from medha_papers import closed_form_rows, lone_rows
from medha_papers.campaign_plan import SCALES, Scale
from medha_papers.campaign_run import Outcome
from medha_papers.comparison import comparisons, goals, offered_loads
from medha_papers.roles_section import section
from medha_papers.simulated_rows import Rows, calibration, strength
from medha_sim.baselines.systems import LOONGSERVE_ITERATION_SECONDS

_HEAD = """# The papers' claims, reproduced or refuted

This page shows which claims of three papers hold for Medha, by simulation or by formula, with
the figures behind each verdict.

Written by `{command}` from `{file}`; do not edit. Mode **{mode}**, code of commit `{commit}` (digest of the simulated
sources: `{sources}`): {done} of {planned} runs{errors}, {core_hours:.2f} core hours{took}.{adopted}{warning}

Paper A is "Medha: Efficient LLM Inference on Multi-Million Context Lengths Without Approximation", paper B "No Request
Left Behind", paper C Meta's "Context Parallelism for Scalable Million-Token Inference".

## How to read the verdicts

The verdicts have the same meaning for formulas and for simulations:

- **reproduced**: the paper's figure, or part of the range that it states, lies inside our band. The band is the range of our
  figure when capacities (FLOP/s, memory bandwidth, link bandwidth, memory size) are 10 % lower or higher. In formulas,
  all of them change together; in simulations, the ranks are 10 % slower or faster than the controller predicts.
- **direction only**: the paper's figure lies outside, but the order that the paper claims holds in all seeds and
  points; for a formula, at every corner of the band.
- **refuted**: the order does not hold either, or the claim states no order ("equal", "like", or a figure that is compared
  with nothing). If a figure is compared, its order is shown beside it as "direction: ...". The order may follow from the
  form of a formula (T16, T17, T29); then "direction only" is a statement about the model, not about any machine.
- **not testable**: an input is not published, or the runs are not part of this campaign.

The verdict of a row is that of its weakest figure that could be tested. Constants are fitted once and named with the
rows that use them; none is tuned for a row. The papers' load points of 0.75 requests/s and above are at or beyond
saturation. There, 10 % of capacity change medians by large factors, as the bands show.
"""

_MET = {True: "yes", False: "**no**", None: "window too short to tell"}

_SIMPLIFICATIONS = """## What the simulations leave out

- Costs are rooflines with efficiencies fitted to public profiles of GEMMs and collectives; attention at long contexts
  is extrapolated. Every system has the same costs, so no system computes faster by assumption.
- Requests are sampled from fits: ShareGPT-like prompts and outputs, and Medha-SWE-like long ones, fitted to the only
  two percentiles that are published. Arrivals are Poisson; the papers do not state theirs.
- TTFT quantiles include only requests that got a first token in the window, as in the papers ("unfinished dropped").
- Each baseline's simplifications are in its module, `sim/medha_sim/baselines/`.
"""


def report(
    outcomes: dict[str, Outcome],
    capacities: dict[str, dict[str, float]],
    scale: Scale,
    planned: Sequence[str],
) -> dict[str, Any]:
    """Return all contents of the page as plain data; `planned` are the keys of all runs of the scale."""
    rows = [
        *closed_form_rows.rows(),
        *lone_rows.rows(Rows(outcomes, scale)),
        *Rows(outcomes, scale).all(),
    ]
    compared = comparisons(outcomes, scale)
    return {
        "rows": [row.to_json() for row in sorted(rows, key=lambda row: int(row.id[1:]))],
        "comparisons": [row.to_json() for row in compared],
        "goals": [goal.to_json() for goal in goals(compared, scale.window_seconds)],
        "loads": [load.to_json() for load in offered_loads(outcomes, capacities, scale)],
        "strength": strength(outcomes, scale),
        "calibration": calibration(outcomes, scale),
        "capacities": capacities,
        "planned": len(planned),
        "done": sum(key in outcomes and "error" not in outcomes[key] for key in planned),
        "errors": sorted(key for key, outcome in outcomes.items() if "error" in outcome),
        "core_hours": sum(outcome.get("core_seconds", 0.0) for outcome in outcomes.values()) / 3600,
    }


def page(campaign: dict[str, Any], roles: dict[str, Any]) -> str:
    """Return the page, in Markdown, for the contents of a campaign's file and of that of `benchmarks/roles.py`."""
    shown = campaign["report"]
    mode = campaign["mode"]
    errors = f", {len(shown['errors'])} failed" if shown["errors"] else ""
    warning = ""
    if mode != "full":
        scale = SCALES[mode]
        warning = (
            f"\n\n**This is a {mode} run**: windows of {scale.window_seconds:g} s, {scale.paper_seeds} seed"
            f"{'s' * (scale.paper_seeds > 1)}, {'a' if scale.band else 'no'} capacity band. It only shows "
            "that everything works; its simulated figures are too noisy to use."
        )
    elif shown["done"] < shown["planned"]:
        warning = (
            "\n\nThe campaign ended before all runs were done; figures are those of the seeds that were run."
        )
    parts = [
        _HEAD.format(
            command="make simulations" if mode == "full" else f"make simulations MODE={mode}",
            file=campaign["file"],
            mode=mode,
            commit=campaign["commit"],
            sources=campaign["sources"],
            done=shown["done"],
            planned=shown["planned"],
            errors=errors,
            core_hours=shown["core_hours"],
            took="".join(map(_took, campaign.get("took", []))),
            adopted="".join(map(_adoption, campaign.get("adopted", []))),
            warning=warning,
        ),
        _summary(shown["rows"]),
        *(_row(row) for row in shown["rows"]),
        _policies(shown),
        _loads(shown),
        _loongserve(shown),
        section(roles),
        _SIMPLIFICATIONS,
    ]
    if shown["errors"]:
        parts.append("## Runs that failed\n\n" + "\n".join(f"- {key}" for key in shown["errors"]) + "\n")
    return "\n".join(parts)


def _took(call: dict[str, Any]) -> str:
    """Return the text on how long one call of the command took, including the work around the runs."""
    return f"; {call['runs']} of them took {call['minutes']:g} minutes with {call['processes']} processes"


def _adoption(adoption: dict[str, Any]) -> str:
    """Return the text on the origin of results that the code named on the page did not simulate."""
    left_out = adoption.get("except", [])
    whose = f" but those of {' and '.join(left_out)}, which were simulated again" if left_out else ""
    return (
        f"\n\nResults were taken over from sources `{adoption['sources']}` (commit `{adoption['commit']}`), after a change "
        f"that must not change decisions{whose}. {len(adoption['again'])} runs of all kinds, selected by the two digests, and "
        "the capacities were simulated again after it and gave the same figures to the last digit."
    )


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    verdicts = ("reproduced", "direction only", "refuted", "not testable")
    line = ", ".join(f"{counts[verdict]} {verdict}" for verdict in verdicts)
    table = _table(
        ("Row", "Claim", "How", "Verdict", "Figures"),
        (
            (
                f"[{row['id']}](#{row['id'].lower()})",
                row["claim"],
                row["method"],
                f"**{row['verdict']}**",
                _tally(row["figures"]),
            )
            for row in rows
        ),
    )
    return f"## Summary\n\n{len(rows)} rows: {line}.\n\n{table}"


def _tally(figures: Sequence[dict[str, Any]]) -> str:
    counts = Counter(figure["verdict"] for figure in figures)
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _row(row: dict[str, Any]) -> str:
    inputs = "; ".join(f"{name}: {value}" for name, value in row["inputs"].items())
    table = _table(
        ("Figure", "Paper", "Ours", "Band", "Verdict", "Note"),
        (
            (
                f"{figure['name']} ({figure['unit']})",
                _interval(figure["paper"]),
                _number(figure["ours"]),
                "" if figure["band"] is None else _interval(figure["band"]),
                figure["verdict"],
                figure["note"],
            )
            for figure in row["figures"]
        ),
    )
    return (
        f"## {row['id']}\n\n{row['claim']} ({row['source']}). By {row['method']}: **{row['verdict']}**.\n\n"
        f"Inputs: {inputs}.\n\n{table}"
    )


def _policies(shown: dict[str, Any]) -> str:
    text = (
        "## Beyond the papers: `guarded` against other policies and systems\n\n"
        "Share of requests whose first token came inside max(2 s, 3 x isolated prefill), percent, with 95 % intervals over "
        "seeds. Policies (guarded to fcfs) run in Medha's own controller, systems as baselines, on the same requests; load is the arrival rate over the "
        "deployment's capacity, measured with a backlog. Differences are `guarded` minus the other, seed by seed. "
        "`single-*`, Medha's policies with one prefill a step, are there for 5 % long, where the goals are set: with the "
        "other mixes the report might take longer than its 90 minutes.\n"
    )
    if shown["goals"]:
        text += (
            "\nA goal is met where the mean over the seeds meets it: single seeds, one hour each, may miss it, and so may "
            "the lower end of the interval.\n\n"
        )
        text += _table(
            (
                "Goal (5 % long)",
                "Mean",
                "Worst seed",
                "Seeds that miss it",
                "Met by the mean",
                "By the whole interval",
            ),
            (
                (
                    goal["text"],
                    _with_width(goal["value"]),
                    _with_width((goal["worst"], None)),
                    f"{goal['below']} of {goal['seeds']}",
                    _MET[goal["met"]],
                    _MET[goal["met_by_interval"]],
                )
                for goal in shown["goals"]
            ),
        )
    if not shown["comparisons"]:
        return text + "\nNo such runs are part of this campaign.\n"
    return (
        text
        + "\n"
        + _table(
            ("Long", "Load", "Policy", "Seeds", "Short", "Long", "Difference, short", "Difference, long"),
            (
                (
                    _percent(row["long_share"]),
                    f"{row['load']:g}",
                    row["policy"],
                    str(row["seeds"]),
                    _with_width(row["short"]),
                    _with_width(row["long"]),
                    "" if row["policy"] == "guarded" else _with_width(row["short_difference"]),
                    "" if row["policy"] == "guarded" else _with_width(row["long_difference"]),
                )
                for row in shown["comparisons"]
            ),
        )
    )


def _loads(shown: dict[str, Any]) -> str:
    text = (
        "## The offered loads\n\nLoad 1 is the rate at which the simulated deployment itself works off this mix while a backlog "
        "waits: "
    )
    if not shown["capacities"]:
        return "## The offered loads\n\nNo capacity was measured in this campaign.\n"
    text += "; ".join(
        f"{_percent(share)} long: {capacity['rate']:.3f} requests/s of {capacity['mean_work_seconds']:.3g} s "
        "isolated prefill each"
        for share, capacity in sorted(shown["capacities"].items(), key=lambda item: float(item[0]))
    )
    text += (
        ". Below it are the loads that really came, in prefill work a second over that capacity, and what `guarded` did of "
        "it inside the window (percent, 95 % intervals over seeds): below load 1 nearly all, above it what the ranks can.\n"
    )
    return (
        text
        + "\n"
        + _table(
            ("Long", "Load", "Requests/s", "Work offered", "Work done"),
            (
                (
                    _percent(row["long_share"]),
                    f"{row['load']:g}",
                    f"{row['rate']:.3f}",
                    _with_width(row["offered"]),
                    _with_width(row["done"]),
                )
                for row in shown["loads"]
            ),
        )
    )


def _loongserve(shown: dict[str, Any]) -> str:
    curve = _table(
        ("Requests/s, short only", "P90 TTFT, LoongServe (s)", "P90 TTFT, Medha (s)"),
        ((f"{rate:g}", _number(theirs), _number(ours)) for rate, theirs, ours in shown["calibration"]),
    )
    return (
        "## LoongServe: calibrated once\n\n"
        "Its published time model has coefficients that are not published. Ours computes as fast as Medha's ranks; the one "
        f"constant is the engine's time in each iteration, {1e3 * LOONGSERVE_ITERATION_SECONDS:.0f} ms, chosen so that its "
        f"curve of short requests bends at 1.75 requests/s (T4), and then frozen for every other row:\n\n{curve}\n"
        "How many times faster all its steps would have to be, that time included, to undo a claim:\n\n"
        + _table(("Claim", "Undone at"), shown["strength"])
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _interval(ends: Sequence[float | None]) -> str:
    low, high = ends
    if low == high:
        return _number(low)
    if low is None:
        return f"below {_number(high)}"
    if high is None:
        return f"above {_number(low)}"
    return f"{_number(low)} to {_number(high)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value and abs(value) < 0.001:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _with_width(value: Sequence[float | None]) -> str:
    mean, width = value
    if mean is None:
        return "none came"
    return f"{mean:.1f}" if width is None else f"{mean:.1f} ± {width:.1f}"


def _percent(share: float | str) -> str:
    return f"{100 * float(share):g} %"
