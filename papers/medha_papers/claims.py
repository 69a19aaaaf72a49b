"""A paper's figure beside ours, and the fixed rule that gives the verdict.

The rule is the same for every row, whether a formula or a simulation stands behind it:

* *reproduced*: the paper's figure (or a part of the range that it states) lies inside our band, which is what
  our figure becomes when each capacity of the inputs (FLOP/s, memory bandwidth, link bandwidth, memory size)
  is 10 % lower or 10 % higher, for a formula one with another, for a simulation all alike;
* *direction only*: it does not, but the order that the paper claims holds in all seeds and points, for a formula at
  every corner of the band;
* *refuted*: the order does not hold either, or there is none that could: "equal", "like", a plain figure that its
  sentence compares with nothing. Of one that it does compare, the order stands beside it as "direction: ...". It may
  follow from a formula's form; then "direction only" says that the model has it, and nothing of any machine;
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
"""How far capacities are moved either way."""


_ROUNDING = 1e-9  # an exact equality must not fail by the last digit of a float


@dataclass(frozen=True, slots=True)
class Capacity:
    """Factors on what the hardware can do; 1 is the data sheet or the measured fit."""

    compute: float = 1.0
    bandwidth: float = 1.0
    link: float = 1.0
    memory: float = 1.0


Order = Callable[[float, Capacity], bool]
"""Whether the order that a paper claims holds, of our figure at a capacity and that capacity."""

NOMINAL = Capacity()
CORNERS = tuple(Capacity(*factors) for factors in product((1 - BAND, 1 + BAND), repeat=4))


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a paper, as the interval that its words allow, beside ours.

    `paper` has equal ends for a number, different ones for a range, and an infinite end for "above" or "below".
    `direction` says whether the order that the paper claims holds everywhere in our results; None: it has none.
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
    """A row of the target table: what a paper claims, and every figure of ours that tests it."""

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
        """Plain values for a JSON file; open ends of intervals become null."""
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
    """The verdict of a row whose figures have `verdicts`: the weakest that could be tested."""
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
    """A figure whose value, band and direction follow from a formula of the capacities."""
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
    """A figure that depends on an input nobody published; `missing` names it."""
    return Figure(name, unit, exactly(paper), None, None, note=f"missing: {missing}")


def exactly(paper: float | tuple[float, float]) -> tuple[float, float]:
    """A number as the interval that holds it alone."""
    return paper if isinstance(paper, tuple) else (paper, paper)


def above(value: float) -> tuple[float, float]:
    return (value, inf)


def below(value: float) -> tuple[float, float]:
    return (-inf, value)


def more_than(limit: float) -> Order:
    """The order of a figure that the paper has above `limit`: a time longer than its peer's, say, for a ratio and 1."""
    return lambda ours, _: ours > limit


def _finite(end: float) -> float | None:
    return end if abs(end) != inf else None
