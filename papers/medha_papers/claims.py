"""A paper's figure beside ours, and the fixed rule for the verdict.

The rule is the same for every row, whether its figures come from a formula or a simulation:

* *reproduced*: the paper's figure (or a part of the range that it states) lies inside our band. The band spans
  our figures when the capacities of the inputs (FLOP/s, memory bandwidth, link bandwidth, memory size) are 10 %
  lower or 10 % higher: in all combinations for a formula, all together for a simulation;
* *direction only*: it does not, but the order that the paper claims holds in all seeds and points, for a
  formula at every corner of the band;
* *refuted*: the order does not hold either, or there is no order to test: "equal", "like", a plain figure that
  its sentence compares with nothing. If the sentence does compare it, a note states the order as
  "direction: ...". The order may follow from the form of a formula; then "direction only" is a statement about
  the model, not about any machine;
* *not testable*: an input that the figure depends on is not published.

A row has the verdict of its weakest figure that could be tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any, Literal

Verdict = Literal["reproduced", "direction only", "refuted", "not testable"]

_WEAKEST_FIRST: tuple[Verdict, ...] = ("refuted", "direction only", "reproduced")
BAND = 0.1
"""Relative change of capacities, in both directions, that spans the band."""


_ROUNDING = 1e-9  # tolerance, so that an exact equality does not fail by rounding


@dataclass(frozen=True, slots=True)
class Capacity:
    """Factors on the hardware's capacities; 1 is the value of the data sheet or the measured fit."""

    compute: float = 1.0
    bandwidth: float = 1.0
    link: float = 1.0
    memory: float = 1.0


Order = Callable[[float, Capacity], bool]
"""Predicate of our figure at a capacity and of that capacity: True if the order that a paper claims holds."""

NOMINAL = Capacity()
CORNERS = tuple(Capacity(*factors) for factors in product((1 - BAND, 1 + BAND), repeat=4))


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a paper, as the interval that its words allow, beside ours.

    `paper` has equal ends for a number, different ends for a range, and an infinite end for "above" or
    "below". `direction` is whether the order that the paper claims holds everywhere in our results; None: it
    claims none.
    """

    name: str
    unit: str
    paper: tuple[float, float]
    ours: float | None
    band: tuple[float, float] | None
    direction: bool | None = None
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.ours is None or self.band is None:
            return "not testable"
        low, high = self.band
        rounding = _ROUNDING * max(abs(low), abs(high))
        if self.paper[0] <= high + rounding and low - rounding <= self.paper[1]:
            return "reproduced"
        return "direction only" if self.direction else "refuted"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the target table: a claim of a paper, and all our figures that test it."""

    id: str
    source: str
    claim: str
    figures: tuple[Figure, ...]
    inputs: dict[str, str] = field(default_factory=dict)
    method: str = "closed form"

    @property
    def verdict(self) -> Verdict:
        return weakest([figure.verdict for figure in self.figures])

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file; open ends of intervals become null."""
        return {
            "id": self.id,
            "source": self.source,
            "claim": self.claim,
            "method": self.method,
            "verdict": self.verdict,
            "inputs": self.inputs,
            "figures": [
                {
                    "name": figure.name,
                    "unit": figure.unit,
                    "paper": [_finite(end) for end in figure.paper],
                    "ours": figure.ours,
                    "band": None if figure.band is None else list(figure.band),
                    "direction": figure.direction,
                    "verdict": figure.verdict,
                    "note": figure.note,
                }
                for figure in self.figures
            ],
        }


def weakest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a row whose figures have `verdicts`: the weakest that could be tested."""
    for verdict in _WEAKEST_FIRST:
        if verdict in verdicts:
            return verdict
    return "not testable"


def modelled(
    name: str,
    unit: str,
    paper: float | tuple[float, float],
    model: Callable[[Capacity], float],
    *,
    order: Order | None = None,
    note: str = "",
) -> Figure:
    """Return a figure whose value, band and direction follow from a formula of the capacities."""
    points = (NOMINAL, *CORNERS)
    values = [model(point) for point in points]
    ours = values[0]
    return Figure(
        name=name,
        unit=unit,
        paper=exactly(paper),
        ours=ours,
        band=(min(values), max(values)),
        direction=None if order is None else all(map(order, values, points)),
        note=note,
    )


def untestable(name: str, unit: str, paper: float | tuple[float, float], missing: str) -> Figure:
    """Return a figure that depends on an unpublished input; `missing` names the input."""
    return Figure(name, unit, exactly(paper), None, None, note=f"missing: {missing}")


def exactly(paper: float | tuple[float, float]) -> tuple[float, float]:
    """Return a number as the interval that contains only this number; a range stays as it is."""
    return paper if isinstance(paper, tuple) else (paper, paper)


def above(value: float) -> tuple[float, float]:
    return (value, inf)


def below(value: float) -> tuple[float, float]:
    return (-inf, value)


def more_than(limit: float) -> Order:
    """Return the order "above `limit`": for example, a ratio above 1 if one time is longer than another."""
    return lambda ours, _: ours > limit


def _finite(end: float) -> float | None:
    return end if abs(end) != inf else None
