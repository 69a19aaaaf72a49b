"""Rows T1 to T9 from the outcomes of a campaign, under the fixed rule of `medha_papers.claims`.

"Medha" is `medha-lars`: LARS with multi-prefill batching, as in paper B; `single-*` has no such batching.
Quantiles include only requests that got a first token inside the window ("unfinished dropped", B §6.2), so a
system that serves fewer requests looks better than it is; the counts of T2 and T8 show how many it served.
Ratios are taken within a seed and then averaged. The band spans the averages at nominal speed and on ranks
that are 10 % slower and faster. Where the papers only say "flat", "similar" or "blows up", the figure states
the interval that we assume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from medha_papers.campaign_plan import Scale, lone_run
from medha_papers.campaign_run import Outcome, Run
from medha_papers.claims import Figure, Row, above, below, exactly, untestable

SIMILAR = (0.8, 1.25)
"""Interval that we assume for "similar", "comparable" and "resembling"."""

Measure = Callable[["Point"], float | None]


@dataclass(frozen=True, slots=True)
class Point:
    """A seed at a capacity of a campaign; looks up the outcomes."""

    outcomes: dict[str, Outcome]
    scale: Scale
    seed: int
    capacity: float

    @property
    def low(self) -> float:
        return min(self.scale.rates)

    @property
    def high(self) -> float:
        return max(self.scale.rates)

    def mixed(self, system: str, rate: float, *path: str, share: float = 0.05, **run: Any) -> float | None:
        """Return a figure of a run with `share` long requests; `path` is its place in the outcome."""
        window = self.scale.window_seconds if share else self.scale.short_window_seconds
        if "deployment" in run:
            window = self.scale.deep_window_seconds
        chosen = Run(system, share, self.seed, window, rate=rate, capacity=self.capacity)
        value: Any = self.outcomes.get(replace(chosen, **run).key)
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return None if value is None else float(value)

    def alone(self, deployment: str, system: str, tokens: int, *path: str | int) -> Any:
        """Return a figure of a run of a lone prompt, which has no seed.

        `path` is its place in the outcome.
        """
        value: Any = self.outcomes.get(lone_run(deployment, system, tokens, self.capacity).key)
        if value is None or "error" in value:
            return None
        for name in path:
            value = value[name]
        return value

    def ttft(self, system: str, rate: float, quantile: str, **run: Any) -> float | None:
        return self.mixed(system, rate, "all", "ttft_seconds", quantile, **run)

    def tpot(self, system: str, rate: float, quantile: str, **run: Any) -> float | None:
        return self.mixed(system, rate, "all", "tpot_seconds", quantile, **run)

    def longest_rate(self, system: str, **run: Any) -> float | None:
        """Return the highest rate of the scale up to which the P90 of TTFT is at most 10 s.

        If it is above 10 s at the lowest rate, return half the lowest rate.
        """
        best = self.low / 2
        for rate in self.scale.rates:
            p90 = self.ttft(system, rate, "p90", **run)
            if p90 is None:
                return None
            if p90 > 10.0:
                break
            best = rate
        return best


def over(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio of two values; None if one is missing or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


@dataclass(frozen=True, slots=True)
class Rows:
    """Computes the rows T1 to T9 of one campaign."""

    outcomes: dict[str, Outcome]
    scale: Scale

    def all(self) -> list[Row]:
        return [
            self.t1(),
            self.t2(),
            self.t3(),
            self.t4(),
            self.t5(),
            self.t6(),
            self.t7(),
            self.t8(),
            self.t9(),
        ]

    def figure(
        self,
        name: str,
        unit: str,
        paper: float | tuple[float, float],
        measure: Measure,
        order: Callable[[float], bool],
        note: str = "",
    ) -> Figure:
        """Return a figure from means over seeds, at nominal capacity and at the ends of the band.

        `order` says whether the claimed order holds for a value of one seed.
        """
        means: dict[float, float] = {}
        every: list[float] = []
        for capacity in (1.0, *self.scale.band):
            points = (
                Point(self.outcomes, self.scale, seed, capacity) for seed in range(self.scale.paper_seeds)
            )
            values = [value for point in points if (value := measure(point)) is not None]
            if values:
                means[capacity] = fmean(values)
                every += values
        if 1.0 not in means:
            return untestable(name, unit, paper, "these runs are not part of this campaign, or failed")
        missing = [f"{capacity:g}" for capacity in self.scale.band if capacity not in means]
        if len(means) == 1:
            note = f"{note}; no band was run" if note else "no band was run"
        elif missing:
            lacks = f"no run of the band at {' and '.join(missing)}"
            note = f"{note}; {lacks}" if note else lacks
        return Figure(
            name,
            unit,
            exactly(paper),
            means[1.0],
            (min(means.values()), max(means.values())),
            all(map(order, every)),
            note,
        )

    # --- rows -----------------------------------------------------------------------------------------

    def t1(self) -> Row:
        def ratio(quantile: str, kind: str = "all") -> Measure:
            def measure(point: Point) -> float | None:
                slow, fast = (
                    point.mixed(system, 0.75, kind, "ttft_seconds", quantile)
                    for system in ("loongserve", "medha-lars")
                )
                return over(slow, fast)

            return measure

        return self.row(
            "T1",
            "B abstract, §1, §6.2, Fig. 1, 9",
            "5 % long, 0.75 requests/s: median TTFT 30x below LoongServe's, 174x at the tail",
            self.figure("median TTFT, LoongServe over Medha", "x", 30.0, ratio("p50"), _greater),
            self.figure(
                "P90 TTFT, LoongServe over Medha", "x", 174.0, ratio("p90"), _greater, "B §6.4 says P90"
            ),
            self.figure(
                "P99 TTFT, LoongServe over Medha",
                "x",
                174.0,
                ratio("p99"),
                _greater,
                "B's abstract says P99; the last percent of Medha's are long requests",
            ),
            self.figure(
                "P99 TTFT of short requests, LoongServe over Medha",
                "x",
                174.0,
                ratio("p99", "short"),
                _greater,
                "B §1 says short requests",
            ),
        )

    def t2(self) -> Row:
        def finished(point: Point) -> float | None:
            return over(
                point.mixed("medha-lars", point.high, "all", "finished"),
                point.mixed("loongserve", point.high, "all", "finished"),
            )

        return self.row(
            "T2",
            "B abstract, §6.2; A §5.2",
            "5.7x the throughput of LoongServe (B), over 5x (A), 5x the effective capacity (§6.2)",
            self.figure(
                "highest rate with P90 TTFT below 10 s, Medha over LoongServe",
                "x",
                (5.0, 5.7),
                lambda p: over(p.longest_rate("medha-lars"), p.longest_rate("loongserve")),
                _greater,
                "our reading of effective capacity, on the papers' four rates; half the lowest where none passes",
            ),
            self.figure(
                "requests finished at the highest rate, Medha over LoongServe",
                "x",
                (5.0, 5.7),
                finished,
                _greater,
            ),
        )

    def t3(self) -> Row:
        return self.row(
            "T3",
            "B §6.4, Fig. 1a",
            "1 % long: LoongServe 8x slower than without; Medha's P90 TTFT below 10 s at 5 %",
            self.figure(
                "LoongServe's median TTFT, 1 % long over none",
                "x",
                8.0,
                lambda p: over(
                    p.ttft("loongserve", 0.75, "p50", share=0.01),
                    p.ttft("loongserve", 0.75, "p50", share=0.0),
                ),
                _greater,
            ),
            self.figure(
                "LoongServe's median TTFT, 5 % long over none",
                "x",
                30.0,
                lambda p: over(
                    p.ttft("loongserve", 0.75, "p50"), p.ttft("loongserve", 0.75, "p50", share=0.0)
                ),
                _greater,
                "B §6.4 reads 30x so",
            ),
            self.figure(
                "Medha's P90 TTFT at 5 %, 0.75 requests/s",
                "s",
                below(10.0),
                lambda p: p.ttft("medha-lars", 0.75, "p90"),
                lambda value: value < 10.0,
            ),
        )

    def t4(self) -> Row:
        def growth(system: str) -> Measure:
            return lambda p: over(
                p.ttft(system, p.high, "p90", share=0.0), p.ttft(system, p.low, "p90", share=0.0)
            )

        return self.row(
            "T4",
            "B §6.2, Fig. 9a; A Fig. 15a",
            "Short requests only: LoongServe's P90 blows up at 1.75 requests/s, Medha stays flat and below Sarathi",
            self.figure(
                "LoongServe's P90 TTFT, highest rate over lowest",
                "x",
                above(5.0),
                growth("loongserve"),
                _greater,
                "calibrated to this row, once",
            ),
            self.figure(
                "Medha's P90 TTFT, highest rate over lowest",
                "x",
                SIMILAR,
                growth("medha-lars"),
                never,
            ),
            self.figure(
                "P90 TTFT at the highest rate, Sarathi (chunk 512) over Medha",
                "x",
                above(1.0),
                lambda p: over(
                    p.ttft("sarathi-512", p.high, "p90", share=0.0),
                    p.ttft("medha-lars", p.high, "p90", share=0.0),
                ),
                _greater,
            ),
        )

    def t5(self) -> Row:
        def worst_sarathi(point: Point) -> float | None:
            values = [point.tpot("sarathi-2048", rate, "p99") for rate in (0.75, 1.75)]
            known = [value for value in values if value is not None]
            return max(known) if known else None

        return self.row(
            "T5",
            "B §6.2, Fig. 10; A Fig. 16",
            "TPOT: LoongServe 5x Medha's without long requests; Sarathi up to 1 s beside long ones",
            self.figure(
                "median TPOT, short only, highest rate, LoongServe over Medha",
                "x",
                5.0,
                lambda p: over(
                    p.tpot("loongserve", p.high, "p50", share=0.0),
                    p.tpot("medha-lars", p.high, "p50", share=0.0),
                ),
                _greater,
            ),
            self.figure(
                "P99 TPOT of Sarathi (chunk 2,048), 5 % long",
                "s",
                1.0,
                worst_sarathi,
                lambda value: value > 0.1,
                "direction: beyond twice the 50 ms target",
            ),
            self.figure(
                "P99 TPOT of Medha, 5 % long, 0.75 requests/s",
                "s",
                below(0.06),
                lambda p: p.tpot("medha-lars", 0.75, "p99"),
                lambda value: value < 0.06,
                '"consistent": our reading, the 50 ms target and a fifth',
            ),
        )

    def t6(self) -> Row:
        def normalised(system: str, point: Point) -> float | None:
            return point.mixed(system, point.high, "all", "ttft_over_target", "p50")

        return self.row(
            "T6",
            "B §6.4, Fig. 13; §4.2; A Fig. 22",
            "1.75 requests/s, 5 % long: multi-prefill batching lowers LARS's median TTFT 1.6 to 1.8 times, 1.8x throughput",
            self.figure(
                "median TTFT over target, LARS alone over Medha",
                "x",
                (1.6, 1.8),
                lambda p: over(normalised("single-lars", p), normalised("medha-lars", p)),
                _greater,
                "the papers' normaliser is not published: ours is the deadline",
            ),
            self.figure(
                "requests finished, Medha over LARS alone",
                "x",
                1.8,
                lambda p: over(
                    p.mixed("medha-lars", p.high, "all", "finished"),
                    p.mixed("single-lars", p.high, "all", "finished"),
                ),
                _greater,
            ),
        )

    def t7(self) -> Row:
        return self.row(
            "T7",
            "B §6.4, Fig. 13; A Fig. 22",
            "EDF is good at low load and like FCFS at high load",
            self.figure(
                "median TTFT at the lowest rate, EDF over LARS alone",
                "x",
                below(1.25),
                lambda p: over(p.ttft("single-edf", p.low, "p50"), p.ttft("single-lars", p.low, "p50")),
                lambda value: value <= 1.25,
            ),
            self.figure(
                "median TTFT at the highest rate, EDF over FCFS",
                "x",
                SIMILAR,
                lambda p: over(p.ttft("single-edf", p.high, "p50"), p.ttft("single-fcfs", p.high, "p50")),
                never,
            ),
        )

    def t8(self) -> Row:
        def fewer(than: str) -> Measure:
            def measure(point: Point) -> float | None:
                ratio = over(
                    point.mixed("loongserve-reserved", 0.75, "long", "finished"),
                    point.mixed(than, 0.75, "long", "finished"),
                )
                return None if ratio is None else 100 * (1 - ratio)

            return measure

        return self.row(
            "T8",
            "B §6.5, Fig. 14; A Fig. 23",
            "2 of 8 instances reserved for shorts: up to 20 % fewer long requests complete than with Medha, 10 % fewer "
            "than with plain LoongServe",
            self.figure(
                "fewer long completions than Medha, 0.75 requests/s",
                "%",
                20.0,
                fewer("medha-lars"),
                _positive,
            ),
            self.figure(
                "fewer long completions than LoongServe, 0.75 requests/s",
                "%",
                10.0,
                fewer("loongserve"),
                _positive,
            ),
        )

    def t9(self) -> Row:
        def ratio(kind: str, rate: float, quantile: str) -> Measure:
            def measure(point: Point) -> float | None:
                flat, deep = (
                    point.mixed("medha-lars", rate, "all", kind, quantile, deployment=shape)
                    for shape in ("70B-2D", "70B-3D")
                )
                return over(flat, deep)

            return measure

        return self.row(
            "T9",
            "B §6.3, Fig. 11, 12; A Fig. 17, 18",
            "70B on 64 H100, 5 % of up to 2M: SPP8 and SPP4 KVP2 have equal TTFT at 0.25 and 0.75 requests/s; with KVP "
            "TPOT is 2x better at 1.75",
            *(
                self.figure(
                    f"median TTFT at {rate} requests/s, 2D over 3D",
                    "x",
                    SIMILAR,
                    ratio("ttft_seconds", rate, "p50"),
                    never,
                )
                for rate in (0.25, 0.75)
            ),
            *(
                self.figure(
                    f"{quantile.upper()} TPOT at 1.75 requests/s, 2D over 3D",
                    "x",
                    2.0,
                    ratio("tpot_seconds", 1.75, quantile),
                    _greater,
                )
                for quantile in ("p50", "p90")
            ),
        )

    def row(self, id_: str, source: str, claim: str, *figures: Figure) -> Row:
        scale = self.scale
        inputs = {
            "model and ranks": "70B on 64 H100" if id_ == "T9" else "Llama-3 8B on 16 A100, TP8 SPP2",
            "requests": "ShareGPT-like and Medha-SWE-like fits, Poisson",
            "window": f"{scale.window_seconds:g} s ({scale.short_window_seconds:g} s without long ones)",
            "seeds": str(scale.paper_seeds),
        }
        if id_ == "T9":
            inputs["window"] = f"{scale.deep_window_seconds:g} s"
            inputs["seeds"] += " (1 of the band)"
        return Row(id_, source, claim, figures, inputs, "simulation")


def _greater(value: float) -> bool:
    return value > 1.0


def _positive(value: float) -> bool:
    return value > 0.0


def never(value: float) -> bool:  # noqa: ARG001 - "equal" has no order that could still hold
    return False


def strength(outcomes: dict[str, Outcome], scale: Scale) -> list[tuple[str, str]]:
    """Return pairs of a claim and the factor by which LoongServe would have to be faster to undo it.

    The factors come from runs of a faster LoongServe.
    """
    point = Point(outcomes, scale, 0, 1.0)
    high = point.high

    def longer(quantile: str, rate: float, share: float) -> Callable[..., float | None]:
        return lambda **run: over(
            point.ttft("loongserve", rate, quantile, share=share, **run),
            point.ttft("medha-lars", rate, quantile, share=share),
        )

    def slowed_by(share: float) -> Callable[..., float | None]:
        return lambda **run: over(
            point.ttft("loongserve", 0.75, "p50", share=share, **run),
            point.ttft("loongserve", 0.75, "p50", share=0.0, **run),
        )

    claims: tuple[tuple[str, Callable[..., float | None]], ...] = (
        ("T1: median TTFT below LoongServe's (5 % long, 0.75 requests/s)", longer("p50", 0.75, 0.05)),
        ("T1: P90 TTFT below LoongServe's", longer("p90", 0.75, 0.05)),
        ("T1: P99 TTFT below LoongServe's", longer("p99", 0.75, 0.05)),
        (
            "T1: P99 TTFT of short requests below LoongServe's",
            lambda **run: over(
                point.mixed("loongserve", 0.75, "short", "ttft_seconds", "p99", **run),
                point.mixed("medha-lars", 0.75, "short", "ttft_seconds", "p99"),
            ),
        ),
        (
            "T2: P90 TTFT below 10 s up to a higher rate than LoongServe's",
            lambda **run: over(point.longest_rate("medha-lars"), point.longest_rate("loongserve", **run)),
        ),
        (
            f"T2: more requests finished than by LoongServe (5 % long, {high:g} requests/s)",
            lambda **run: over(
                point.mixed("medha-lars", high, "all", "finished"),
                point.mixed("loongserve", high, "all", "finished", **run),
            ),
        ),
        ("T3: 1 % long requests slow LoongServe's median TTFT (0.75 requests/s)", slowed_by(0.01)),
        ("T3: 5 % long requests slow LoongServe's median TTFT", slowed_by(0.05)),
        (f"T4: P90 TTFT below LoongServe's (short only, {high:g} requests/s)", longer("p90", high, 0.0)),
        (
            f"T5: TPOT below LoongServe's (short only, {high:g} requests/s)",
            lambda **run: over(
                point.tpot("loongserve", high, "p50", share=0.0, **run),
                point.tpot("medha-lars", high, "p50", share=0.0),
            ),
        ),
        (
            "T8: more long requests completed than by LoongServe with a reserve for shorts (0.75 requests/s)",
            lambda **run: over(
                point.mixed("medha-lars", 0.75, "long", "finished"),
                point.mixed("loongserve-reserved", 0.75, "long", "finished", **run),
            ),
        ),
        (
            "T8: more long requests completed by LoongServe without that reserve than with it, both so much faster",
            lambda **run: over(
                point.mixed("loongserve", 0.75, "long", "finished", **run),
                point.mixed("loongserve-reserved", 0.75, "long", "finished", **run),
            ),
        ),
    )
    answers = []
    for claim, measure in claims:
        tried = [
            (speed, value)
            for speed in (1.0, *scale.speeds)
            if (value := measure(loongserve_speed=speed)) is not None
        ]
        undone = next((index for index, (_, value) in enumerate(tried) if value <= 1.0), None)
        if not tried:
            answers.append((claim, "not run"))
        elif undone == 0:
            answers.append((claim, "it does not hold as it is"))
        elif len(tried) == 1:
            answers.append((claim, "no faster one was run"))
        elif undone is not None:
            answers.append((claim, f"between {tried[undone - 1][0]:g}x and {tried[undone][0]:g}x"))
        else:
            speed, value = tried[-1]
            answers.append((claim, f"more than {speed:g}x (there the ratio is still {value:.3g})"))
    return answers


def calibration(outcomes: dict[str, Outcome], scale: Scale) -> list[tuple[float, float | None, float | None]]:
    """Return (rate, P90 TTFT of LoongServe, P90 TTFT of Medha) with short requests only, of the first seed.

    This is the curve to which LoongServe was calibrated.
    """
    point = Point(outcomes, scale, 0, 1.0)
    loongserve, medha = (
        [point.ttft(system, rate, "p90", share=0.0) for rate in scale.rates]
        for system in ("loongserve", "medha-lars")
    )
    return list(zip(scale.rates, loongserve, medha, strict=True))
