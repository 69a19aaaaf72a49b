"""What processes exported in a situation that alerts are about: recorded by the test that makes it, played to Prometheus' rules.

A recording holds two scrapes of one process, before and after something went on for a while. A test that makes the
situation calls `record`: every recorded series must still be exported, by name and labels; a gauge must have the recorded value,
and a counter must rise if it rose in the recording, and only then. With MEDHA_RECORD=1 in the environment it writes the recording anew.

`played` takes recordings as minutes of a scraped process: gauges stay as they were, counters rise each minute by what they
rose between the two scrapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parent / "recorded"
ASKED = (
    "medha_request_ttft_attainment_total",
    "medha_request_tpot_attainment_total",
    "medha_requests_total",
    "medha_router_replicas",
    "medha_router_replicas_desired",
    "medha_router_requests_open",
    "medha_router_refused_connections_total",
    "medha_step_prediction_error_ratio_bucket",
    "medha_rank_throttled",
    "medha_rank_xid_errors_total",
    "medha_operator_leading",
    "medha_operator_reconcile_errors_total",
    "medha_operator_condition",
    "medha_operator_reason",
)
"""Names of all series that alerts ask for; nothing else is recorded."""
_AFTER = "# after\n"

Series = tuple[str, frozenset[tuple[str, str]]]
Scrape = dict[Series, float]


def read(text: str, of: Callable[[Mapping[str, str]], bool] = lambda _: True) -> Scrape:
    """What a page of metrics holds of the series that alerts ask for, and whose labels `of` takes."""
    return {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in ASKED and of(sample.labels)
    }


def record(
    situation: str,
    before: str,
    after: str | None = None,
    of: Callable[[Mapping[str, str]], bool] = lambda _: True,
) -> None:
    """Compare two pages of metrics, or one for both, with the recording of `situation`; `of` says which labels belong to it."""
    first, last = read(before, of), read(before if after is None else after, of)
    if os.environ.get("MEDHA_RECORD"):
        FOLDER.mkdir(exist_ok=True)
        # What a counter has counted in tests before belongs to other situations.
        rests = {
            one for one in first if one[0].endswith("_total") and first[one] and first[one] == last.get(one)
        }
        kept = [{one: scrape[one] for one in scrape.keys() - rests} for scrape in (first, last)]
        _path(situation).write_text(_AFTER.join(map(_text, kept)), encoding="utf-8")
    start, end = recorded(situation)
    anew = "where that is meant, record anew with MEDHA_RECORD=1"
    missing = _text({one: end[one] for one in end.keys() - last.keys()})
    assert not missing, f"{situation}: no longer exported; {anew}:\n{missing}"
    changed = _text({one: last[one] for one in end if _is_unlike(one, (start, end), (first, last))})
    assert not changed, (
        f"{situation}: gauges of another value, or counters that rise or stand still; {anew}:\n{changed}"
    )


def _is_unlike(series: Series, kept: tuple[Scrape, Scrape], found: tuple[Scrape, Scrape]) -> bool:
    """Whether a gauge has another value than in the recording, or a counter rises where it stood still, or the reverse."""
    if series[0].endswith("_bucket"):  # which of them rise is a matter of speed
        return False
    if not is_counter(series):
        return kept[1][series] != found[1][series]
    recorded_rise, rise = (last[series] - first.get(series, 0.0) for first, last in (kept, found))
    return (recorded_rise > 0) != (rise > 0)


def is_counter(series: Series) -> bool:
    """Whether a series only rises; the others that are recorded are gauges."""
    return series[0].endswith(("_total", "_bucket"))


def recorded(situation: str) -> tuple[Scrape, Scrape]:
    """The two scrapes of a recording."""
    before, _, after = _path(situation).read_text(encoding="utf-8").partition(_AFTER)
    return read(before), read(after)


def situations() -> set[str]:
    """Names of all recordings."""
    return {path.stem for path in FOLDER.glob("*.prom")}


def _path(situation: str) -> Path:
    return FOLDER / f"{situation}.prom"


def _text(scrape: Scrape) -> str:
    lines = []
    for (name, labels), value in scrape.items():
        inner = ",".join(f'{label}="{text}"' for label, text in sorted(labels))
        lines.append(f"{name}{{{inner}}} {value:g}\n" if inner else f"{name} {value:g}\n")
    return "".join(sorted(lines))


@dataclass(frozen=True)
class Spell:
    """So many minutes of a situation, or without one in which nothing is scraped; `times` as much goes on in each as was recorded."""

    situation: str | None
    minutes: int
    times: float = 1.0


def played(process: Mapping[str, str], spells: Iterable[Spell]) -> list[dict[str, Any]]:
    """Input series of `promtool test rules`, a sample a minute: one process, whose scrapes get the labels `process`."""
    values: dict[Series, list[str]] = {}
    totals: dict[Series, float] = {}
    minute = 0
    for spell in spells:
        before, after = recorded(spell.situation) if spell.situation else ({}, {})
        if not spell.situation:
            totals.clear()  # whoever comes next counts anew
        for series in after.keys() | totals.keys():
            seen = values.setdefault(series, ["_"] * minute)
            if not is_counter(series):
                seen += [f"{after[series]:g}"] * spell.minutes
                continue
            if series in before:
                totals.setdefault(series, 0.0)
            step = (after.get(series, 0.0) - before.get(series, 0.0)) * spell.times
            for passed in range(spell.minutes):
                if passed:
                    totals[series] = totals.get(series, 0.0) + step
                seen.append(f"{totals[series]:g}" if series in totals else "_")
        minute += spell.minutes
        for seen in values.values():
            gone = minute - len(seen)
            if gone and seen[-1] not in ("_", "stale"):  # as Prometheus notes what is no longer exported
                seen.append("stale")
                gone -= 1
            seen += ["_"] * gone
    return [{"series": _name(series, process), "values": " ".join(seen)} for series, seen in values.items()]


def _name(series: Series, process: Mapping[str, str]) -> str:
    labels = dict(series[1]) | process
    inner = ", ".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
    return f"{series[0]}{{{inner}}}"
