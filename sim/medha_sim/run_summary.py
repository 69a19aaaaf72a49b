"""Compute the figures of a run from its log, as plain data that JSON can hold.

A TTFT target is *decided* once the first token has come, the deadline has passed without it (missed), or the
request was refused or failed (missed). Requests that are still inside their deadline when the clock stops are
*undecided*: they are left out of the attainment and counted separately. A run with many of them needs a
longer window. TTFT quantiles are over requests that have a first token; `censored` counts the requests that
have not ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from medha_sim.run_log import GuessCounts, RequestRecord, RunLog

LENGTH_BUCKETS = (1_000, 8_000, 32_000, 128_000, 512_000)
"""Upper bounds of the length buckets, in prompt tokens; the last bucket has none."""
QUANTILES = (0.5, 0.9, 0.95, 0.99)
CURVE_POINTS = 101  # points of each plotted distribution
SERIES_POINTS = 600

Summary = dict[str, Any]

# Two-sided 95 % points of Student's t, by degrees of freedom; beyond the table, 1.96 is used.
_STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def summarise(log: RunLog) -> Summary:
    """Return everything that a report shows of a run."""
    records = list(log.requests.values())
    window = log.window_seconds
    return {
        "window_seconds": window,
        "interrupted": log.interrupted,
        "all": group(records, window),
        "kinds": _by(records, lambda record: record.kind, window),
        "classes": _by(records, lambda record: record.service_class, window),
        "lengths": _by(records, lambda record: length_bucket(record.prompt_tokens), window),
        "unserved": unserved(records),
        "convoy": convoy(records),
        "steps": steps(log),
        "series": series(log),
        **({} if log.guesses is None else {"guesses": guesses(log, log.guesses)}),
    }


def guesses(log: RunLog, counts: GuessCounts) -> Summary:
    """Return how many guesses were verified, how many of them were right, and what that made of a decode."""
    decodes = sum(log.steps.decodes)
    return {
        "verified": counts.verified,
        "right": counts.right,
        "right_share": _ratio(counts.right, counts.verified),
        "verified_per_decode": _ratio(counts.verified, decodes),
        "tokens_per_decode": _ratio(decodes + counts.right, decodes),
        "draft_seconds": counts.draft_seconds,
    }


def group(records: Sequence[RequestRecord], window_seconds: float) -> Summary:
    """Return figures of some requests of a run of `window_seconds`."""
    with_token = [record for record in records if record.first_token_at is not None]
    ttft = [record.first_token_at - record.arrived_at for record in with_token if record.first_token_at]
    relative = [
        seconds / record.ttft_target_seconds for seconds, record in zip(ttft, with_token, strict=False)
    ]
    tpot = [seconds for record in records if (seconds := record.tpot_seconds) is not None]
    outcomes = [ttft_met(record, window_seconds) for record in records]
    decided = [outcome for outcome in outcomes if outcome is not None]
    tpot_outcomes = [tpot_met(record) for record in records if record.tpot_seconds is not None]
    good = sum(1 for record in records if is_good(record))
    tokens = sum(record.tokens for record in records)
    return {
        "arrived": len(records),
        "finished": sum(record.ending == "finished" for record in records),
        "refused": sum(record.ending == "refused" for record in records),
        "failed": sum(record.ending == "failed" for record in records),
        "censored": sum(record.ending == "censored" for record in records),
        "ttft_undecided": len(outcomes) - len(decided),
        "ttft_attainment": share(decided),
        "tpot_attainment": share(tpot_outcomes),
        "late_token_share": _ratio(
            sum(record.late_gaps for record in records), tokens - sum(1 for r in records if r.tokens)
        ),
        "good": good,
        "goodput_per_second": _ratio(good, window_seconds),
        "finished_per_second": _ratio(sum(r.ending == "finished" for r in records), window_seconds),
        "output_tokens_per_second": _ratio(tokens, window_seconds),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "ttft_seconds": distribution(ttft),
        "ttft_over_target": distribution(relative),
        "tpot_seconds": distribution(tpot),
    }


def unserved(records: Iterable[RequestRecord]) -> list[Summary]:
    """Return the count and the first request's detail for each reason why requests were refused or failed."""
    found: dict[tuple[str, str], Summary] = {}
    for record in records:
        if record.ending not in ("refused", "failed"):
            continue
        reason, _, detail = record.detail.partition(": ")
        first = {"ending": record.ending, "reason": reason, "count": 0, "first": detail}
        found.setdefault((record.ending, reason), first)["count"] += 1
    return list(found.values())


def ttft_met(record: RequestRecord, window_seconds: float) -> bool | None:
    """Return whether the first token came inside the deadline; None while undecided."""
    ttft = record.ttft_seconds
    if ttft is not None:
        return ttft <= record.ttft_target_seconds
    if record.ending in ("refused", "failed"):
        return False
    late = record.arrived_at + record.ttft_target_seconds < window_seconds
    return False if late else None


def tpot_met(record: RequestRecord) -> bool:
    """Return whether the mean time per output token is inside its target; below two tokens, it is."""
    tpot = record.tpot_seconds
    return tpot is None or tpot <= record.tpot_target_seconds


def is_good(record: RequestRecord) -> bool:
    """Return whether the request finished inside both targets; goodput counts these."""
    ttft = record.ttft_seconds
    in_time = ttft is not None and ttft <= record.ttft_target_seconds
    return record.ending == "finished" and in_time and tpot_met(record)


def convoy(records: Sequence[RequestRecord], long_tokens: int = 100_000) -> Summary:
    """Compare the TTFT of short requests that arrive while a long prompt is unanswered with the others'.

    The ratio of the two shows a convoy: short requests queued behind a long one (paper B §2.6).
    """
    intervals = sorted(
        (record.arrived_at, inf if record.first_token_at is None else record.first_token_at)
        for record in records
        if record.prompt_tokens >= long_tokens
    )
    merged: list[tuple[float, float]] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    starts = np.array([start for start, _ in merged])
    behind: list[float] = []
    free: list[float] = []
    for record in records:
        ttft = record.ttft_seconds
        if record.prompt_tokens >= long_tokens or ttft is None:
            continue
        index = int(np.searchsorted(starts, record.arrived_at, side="right")) - 1
        inside = index >= 0 and record.arrived_at < merged[index][1]
        (behind if inside else free).append(ttft)
    return {
        "while_long_prefills": distribution(behind),
        "otherwise": distribution(free),
        "median_ratio": _ratio(float(np.median(behind)), float(np.median(free))) if behind and free else None,
    }


def steps(log: RunLog) -> Summary:
    """Return chunk sizes by context, the accuracy of step predictions, and how busy the slowest stage was."""
    columns = log.steps
    busy = np.frombuffer(columns.busy_seconds, np.float64) if columns.at else np.zeros(0)
    predicted = np.frombuffer(columns.predicted_seconds, np.float64) if columns.at else np.zeros(0)
    known = predicted > 0
    chunks = log.chunks
    context = np.frombuffer(chunks.context, np.int64) if chunks.context else np.zeros(0, np.int64)
    sizes = np.frombuffer(chunks.tokens, np.int64) if chunks.tokens else np.zeros(0, np.int64)
    borders = [0, *LENGTH_BUCKETS, 2**62]
    by_context = {}
    for low, high in pairwise(borders):
        inside = sizes[(context >= low) & (context < high)]
        if len(inside):
            by_context[length_bucket(low)] = distribution(inside.tolist())
    return {
        "count": len(columns.at),
        "busy_share": _ratio(float(busy.sum()), log.window_seconds),
        "busy_seconds": distribution(busy.tolist()),
        "observed_over_predicted": distribution((busy[known] / predicted[known]).tolist()),
        "decodes": distribution(list(columns.decodes)),
        "chunk_tokens_by_context": by_context,
    }


def series(log: RunLog) -> Summary:
    """Return the state over time, thinned to at most `SERIES_POINTS` means over consecutive samples."""
    at = np.frombuffer(log.series.at, np.float64) if log.series.at else np.zeros(0)
    edges = np.unique(np.linspace(0, len(at), SERIES_POINTS + 1).astype(int))[:-1]
    thinned = {"at": at[edges].tolist() if len(at) else []}
    for name in ("running", "waiting", "kv_share"):
        values = np.frombuffer(getattr(log.series, name), np.float64) if len(at) else np.zeros(0)
        if len(values):
            counts = np.diff(np.append(edges, len(values)))
            thinned[name] = np.round(np.add.reduceat(values, edges) / counts, 4).tolist()
        else:
            thinned[name] = []
    return thinned


def distribution(values: Sequence[float]) -> Summary:
    """Return count, mean, max, quantiles and, for plots, `CURVE_POINTS` quantiles; or a count of 0 alone."""
    if not values:
        return {"count": 0}
    array = np.asarray(values, np.float64)
    figures: Summary = {"count": len(array), "mean": float(array.mean()), "max": float(array.max())}
    for quantile, value in zip(QUANTILES, np.quantile(array, QUANTILES), strict=True):
        figures[f"p{quantile * 100:g}"] = float(value)
    curve = np.quantile(array, np.linspace(0, 1, CURVE_POINTS))
    figures["curve"] = [float(f"{value:.5g}") for value in curve]
    return figures


def length_bucket(prompt_tokens: int) -> str:
    """Return the name of the bucket of a prompt's length."""
    for low, high in zip((0, *LENGTH_BUCKETS), LENGTH_BUCKETS, strict=False):
        if prompt_tokens < high:
            return f"{_thousands(low)}-{_thousands(high)}"
    return f"{_thousands(LENGTH_BUCKETS[-1])} and more"


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of its 95 % interval (Student's t); the width is infinite for one value."""
    array: npt.NDArray[np.float64] = np.asarray(values, np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return mean, inf
    student = _STUDENT_95[len(array) - 2] if len(array) - 2 < len(_STUDENT_95) else 1.96
    return mean, student * float(array.std(ddof=1)) / sqrt(len(array))


def share(outcomes: Iterable[bool]) -> float | None:
    """Return the share of True; None if there are no outcomes."""
    counted = list(outcomes)
    return sum(counted) / len(counted) if counted else None


def _by(
    records: Iterable[RequestRecord], name: Callable[[RequestRecord], str], window_seconds: float
) -> Summary:
    groups: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda record: record.prompt_tokens):
        groups.setdefault(name(record), []).append(record)
    return {key: group(members, window_seconds) for key, members in groups.items()}


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None


def _thousands(tokens: int) -> str:
    return f"{tokens // 1000}K" if tokens else "0"
