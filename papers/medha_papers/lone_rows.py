"""Rows T11, T12, T18, T19 from the outcomes of a campaign: a long prompt beside decoding streams.

The claims are from papers A and B. With KVP, lanes join as the KV exceeds multiples of `TOKENS_PER_LANE`,
and work in lock step from then on (docs/design.md#lock-step).
"""

from __future__ import annotations

from collections.abc import Callable

from medha.cost.hardware import H100, LLAMA3_8B, profile_for
from medha.cost.predictor import TOKENS_PER_LANE
from medha.topology import Topology
from medha_papers.claims import Figure, Row, above, below
from medha_papers.lone_prompt import Alone
from medha_papers.simulated_rows import Measure, Point, Rows, never, over

_NO_LONGER = 1.001
"""Tolerance, as a factor, for a P95 against the other run's P95 that was its target.

Steps are as long as predicted, but the time between steps is learnt, not known.
"""
_CANCELS = "ranks that are slower all alike cancel in it, so that its band says little"


def rows(simulated: Rows) -> list[Row]:
    """Return the four rows."""
    return [t11(simulated), t12(simulated), t18(simulated), t19(simulated)]


def t11(simulated: Rows) -> Row:
    """T11: chunks of 32 cost 1.75x those of 4,096, end to end (A §3.2)."""

    def ratio(point: Point) -> float | None:
        small, large = (
            point.alone("8B-TP8", f"static-{chunk}", 1_000_000, "static", "prefill_seconds")
            for chunk in (32, 4096)
        )
        return over(small, large)

    return _row(
        "T11",
        "A §3.2",
        "8B on 8 H100, 1M tokens: a prefill in chunks of 32 takes 1.75 times as long as in chunks of 4,096",
        "TP8",
        simulated.figure(
            "prefill time, chunk 32 over 4,096", "x", 1.75, ratio, _more_than(1.0), note=_CANCELS
        ),
    )


def t12(simulated: Rows) -> Row:
    """T12: adaptive chunks dominate every static size (B Fig. 4; A Fig. 6)."""
    sizes = simulated.scale.chunks

    def dominated(no_longer: float) -> Measure:
        def count(point: Point) -> float | None:
            found = [point.alone("8B-TP8", f"adaptive-{size}", 1_000_000) for size in sizes]
            if not all(found):
                return None
            pairs = ((Alone(**one["adaptive"]), Alone(**one["static"])) for one in found)
            return float(sum(_dominates(adaptive, static, no_longer) for adaptive, static in pairs))

        return count

    strictly = dominated(1.0)(Point(simulated.outcomes, simulated.scale, 0, 1.0))

    return _row(
        "T12",
        "B §3.2, Fig. 4; A §3.2, Fig. 6",
        "8B, 1M tokens: adaptive chunks dominate the Pareto frontier of static sizes (prefill time, P95 step)",
        "TP8",
        simulated.figure(
            "static sizes that adaptive chunks beat on both axes",
            f"of {len(sizes)}",
            float(len(sizes)),
            dominated(_NO_LONGER),
            _more_than(len(sizes) / 2),
            note=f"the shape of a plot: sizes {sizes[0]:,} to {sizes[-1]:,}, each against adaptive chunks with its own P95 as "
            f"the target; theirs may be 0.1 % above it, and to the last digit {strictly or 0:g} are beaten",
        ),
    )


def _dominates(adaptive: Alone, static: Alone, no_longer: float) -> bool:
    return (
        adaptive.prefill_seconds <= static.prefill_seconds
        and adaptive.p95_gap_seconds <= no_longer * static.p95_gap_seconds
    )


def t18(simulated: Rows) -> Row:
    """T18: at 4M, chunks of 128 make decodes take 100 ms.

    KVP improves both axes above 1M (A Fig. 13; B Fig. 20).
    """
    points = simulated.scale.lane_points
    one_lane, four_lanes = "8B-TP4-SPP4", "8B-TP4-SPP4-KVP4"

    def decode(deployment: str) -> Measure:
        def milliseconds(point: Point) -> float | None:
            seconds = point.alone(deployment, "static-128", 4_000_000, "static", "p95_gap_seconds")
            return None if seconds is None else 1e3 * seconds

        return milliseconds

    def better(point: Point) -> float | None:
        wins = 0
        for tokens, chunk in points:
            one, four = (
                point.alone(lanes, f"static-{chunk}", tokens, "static") for lanes in (one_lane, four_lanes)
            )
            if one is None or four is None:
                return None
            wins += all(four[axis] < one[axis] for axis in ("prefill_seconds", "p95_gap_seconds"))
        return float(wins)

    return _row(
        "T18",
        "A §3.4, Fig. 13; B App. B.3, Fig. 20",
        "8B, TP4 SPP4: P95 decode almost 100 ms beside a 4M prompt in chunks of 128; KVP betters TTFT and TBT above 1M",
        "TP4 SPP4",
        simulated.figure(
            "P95 decode beside 4M, chunk 128, KVP1",
            "ms",
            (95.0, 100.0),
            decode(one_lane),
            _more_than(50.0),
            note="direction: above the usual 50 ms target",
        ),
        simulated.figure("the same with KVP4", "ms", below(95.0), decode(four_lanes), never),
        simulated.figure(
            "points at 2M and 4M where KVP4 betters both axes",
            f"of {len(points)}",
            (max(len(points) - 1.0, 1.0), float(len(points))),
            better,
            _more_than(len(points) / 2),
            note='"in most cases"; at 2M and the smallest chunk the paper sees no gain either',
        ),
    )


def t19(simulated: Rows) -> Row:
    """T19: KVP grows from 4 to 16 servers over 2M tokens and keeps the iteration time (B Fig. 6)."""

    def servers(end: int) -> Measure:
        def count(point: Point) -> float | None:
            lanes = point.alone("8B-TP8-SPP4-KVP4", "static-512", 2_000_000, "static", "lanes", end)
            return None if lanes is None else 4.0 * lanes

        return count

    def growth(deployment: str) -> Measure:
        def ratio(point: Point) -> float | None:
            first, last = (
                point.alone(deployment, "static-512", 2_000_000, "static", "busy_seconds", end)
                for end in (0, 1)
            )
            return over(last, first)

        return ratio

    return _row(
        "T19",
        "B §3.3, Fig. 6",
        "8B, TP8 SPP4 KVP4, 2M tokens: 4 servers grow to 16, iteration time stays nearly the same",
        "TP8 SPP4 KVP4",
        simulated.figure("servers at the start", "servers", 4.0, servers(0), never),
        simulated.figure("servers at 2M", "servers", 16.0, servers(1), never),
        simulated.figure(
            "iteration time at 2M over that at 512 Ki",
            "x",
            (0.9, 1.1),
            growth("8B-TP8-SPP4-KVP4"),
            never,
            note=f'"near-consistent"; {_CANCELS}',
        ),
        simulated.figure(
            "the same without KVP", "x", above(2.0), growth("8B-TP8-SPP4"), never, note=_CANCELS
        ),
        tokens_per_lane=f"{TOKENS_PER_LANE:,} (inferred from the figure)",
    )


def _more_than(limit: float) -> Callable[[float], bool]:
    return lambda value: value > limit


def _row(id_: str, source: str, claim: str, shape: str, *figures: Figure, tokens_per_lane: str = "") -> Row:
    profile = profile_for(LLAMA3_8B, H100, Topology(8))
    inputs = {
        "costs": f"{profile.source}; 8B on H100",
        "shape": shape,
        "requests": "the prompt, and a stream that decodes on each lane",
    }
    if tokens_per_lane:
        inputs["tokens per lane"] = tokens_per_lane
    return Row(id_, source, claim, figures, inputs, "simulation")
