"""Fits a `Profile` to measured steps, and tests how well a profile predicts steps it was not fitted to.

A step's forward pass is modelled as `linear(tokens) + sum over sequences (s + slope(queries) * keys)`: two
curves through knots and a constant, all unknowns linear in the measured seconds. They are found by least
squares of relative errors, with no increment below zero, so that more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from medha.cost.cost_profile import Attention, Operation, Profile
from medha.cost.predictor import Predictor, Work

_Floats = npt.NDArray[np.float64]

_SWEEPS = 20_000
_TOLERANCE = 1e-10
_SHORTEST_SECONDS = 1e-9  # lower bound of measured seconds, for a stage without an output head


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measured times of one step, in seconds: the forward pass, then output head and sampling."""

    works: tuple[Work, ...]
    forward_seconds: float
    sampling_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.sampling_seconds

    @property
    def tokens(self) -> int:
        return sum(work.count for work in self.works)

    @property
    def longest_context(self) -> int:
        return max(work.context for work in self.works)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Error on the steps whose longest context is `low .. high` tokens, of a profile fitted to the rest."""

    low: int
    high: int
    steps: int
    mean_error: float  # mean of |predicted / measured - 1|
    worst_error: float


def fit_profile(
    steps: Sequence[MeasuredStep],
    *,
    layers: int,
    name: str,
    source: str,
    window_tokens: int = 1,
    window_share: float = 0.0,
) -> Profile:
    """Return the profile that fits `steps` best; a share of the layers has a window of so many tokens."""
    attention = Attention(window_tokens=window_tokens, window_share=window_share)
    seen = attention.one().seen
    tokens = np.array([step.tokens for step in steps])
    uniform = [step for step in steps if len(set(step.works)) == 1]
    token_knots = np.unique([step.tokens for step in uniform])
    count_knots = _count_knots(uniform)
    slopes = np.array([
        np.sum(
            [_slope_terms(work.count, count_knots) * seen(work.pairs / work.count) for work in step.works], axis=0
        )
        for step in steps
    ])  # fmt: skip
    sequences = np.array([[float(len(step.works))] for step in steps])
    terms = np.hstack([_increments(tokens, token_knots), slopes, sequences])
    solved = _non_negative_least_squares(terms, np.array([step.forward_seconds for step in steps])) / layers
    linear = np.cumsum(solved[: len(token_knots)])
    slope = np.cumsum(solved[len(token_knots) : -1])

    rows = np.array([len(step.works) for step in steps])
    head_terms = np.stack([np.ones(len(rows)), rows], axis=1).astype(np.float64)
    head = _non_negative_least_squares(head_terms, np.array([step.sampling_seconds for step in steps]))
    return Profile(
        name=name,
        source=source,
        layers=layers,
        linear=(Operation("linear", compute_seconds_per_row=_last_slope(token_knots, linear)),),
        linear_points=tuple(zip(token_knots.tolist(), linear.tolist(), strict=True)),
        attention=replace(
            attention,
            sequence_seconds=float(solved[-1]),
            points=tuple(zip(count_knots.tolist(), slope.tolist(), strict=True)),
        ),
        head=Operation("head", launch_seconds=float(head[0]), compute_seconds_per_row=float(head[1])),
    )


def errors(profile: Profile, steps: Sequence[MeasuredStep]) -> _Floats:
    """Return |predicted / measured - 1| of each step."""
    predictor = Predictor(profile)
    predicted = np.array([predictor.stage_seconds(step.works) for step in steps])
    measured = np.array([step.seconds for step in steps])
    found: _Floats = np.abs(predicted / measured - 1)
    return found


def held_out(
    steps: Sequence[MeasuredStep], *, layers: int, window_tokens: int = 1, window_share: float = 0.0
) -> list[HeldOut]:
    """Return, for each range of contexts, the errors on its steps of a profile fitted without them."""
    contexts = sorted({step.longest_context for step in steps})
    ranges = [(low + 1, high) for low, high in pairwise(contexts)]
    if len(contexts) > 3:
        ranges.append((contexts[-1] // 4 + 1, contexts[-1]))  # as far beyond the fit as serving may ask
    results = []
    for low, high in ranges:
        tested = [step for step in steps if low <= step.longest_context <= high]
        rest = [step for step in steps if not low <= step.longest_context <= high]
        fitted = fit_profile(
            rest,
            layers=layers,
            name="held out",
            source="",
            window_tokens=window_tokens,
            window_share=window_share,
        )
        found = errors(fitted, tested)
        results.append(HeldOut(low, high, len(tested), float(found.mean()), float(found.max())))
    return results


def _count_knots(uniform: Sequence[MeasuredStep]) -> npt.NDArray[np.int64]:
    """Return the query counts measured after at least two contexts.

    A single context cannot separate attention from linear layers. 1 is always included.
    """
    contexts: dict[int, set[int]] = {}
    for step in uniform:
        contexts.setdefault(step.works[0].count, set()).add(step.works[0].context)
    return np.unique([1, *(count for count, seen in contexts.items() if len(seen) > 1)])


def _slope_terms(count: int, knots: npt.NDArray[np.int64]) -> _Floats:
    """Return [knots]: the share of each increment in the seconds per key of `count` queries.

    Beyond the last knot, the shares grow in proportion to `count`.
    """
    last = int(knots[-1])
    terms: _Floats = _increments(np.array([min(count, last)]), knots)[0] * max(count / last, 1.0)
    return terms


def _last_slope(knots: npt.NDArray[np.int64], values: _Floats) -> float:
    """Return the slope of the last segment, which extrapolates the curve: large steps are compute-bound."""
    if len(knots) == 1:
        return float(values[0] / knots[0])
    return float((values[-1] - values[-2]) / (knots[-1] - knots[-2]))


def _increments(values: npt.NDArray[np.int64], knots: npt.NDArray[np.int64]) -> _Floats:
    """Return [values, knots]: the share of each knot's increment that a curve has gained at each value.

    Beyond the last knot, its last segment continues.
    """
    columns = [np.ones(len(values))]
    for left, right in pairwise(knots.tolist()):
        most = np.inf if right == knots[-1] else 1.0
        columns.append(np.clip((values - left) / (right - left), 0.0, most))
    return np.stack(columns, axis=1)


def _non_negative_least_squares(terms: _Floats, measured: _Floats) -> _Floats:
    """Return x >= 0 that minimises the sum of ((terms @ x) / measured - 1)^2, by coordinate descent."""
    scaled = terms / np.maximum(measured, _SHORTEST_SECONDS)[:, None]
    size = np.linalg.norm(scaled, axis=0)
    used = size > 0
    scaled = scaled[:, used] / size[used]
    gram, wanted = scaled.T @ scaled, scaled.T @ np.ones(len(measured))
    x = np.zeros(int(used.sum()))
    for _ in range(_SWEEPS):
        before = x.copy()
        for index in range(len(x)):
            x[index] = max(0.0, x[index] + wanted[index] - float(gram[index] @ x))
        if np.abs(x - before).max(initial=0.0) <= _TOLERANCE * np.abs(x).max(initial=0.0):
            break
    free = x > 0  # solve exactly for what remains above zero, unless that makes some of it negative
    exact = np.linalg.lstsq(scaled[:, free], np.ones(len(measured)), rcond=None)[0]
    if (exact >= 0).all():
        x[free] = exact
    result = np.zeros(len(size))
    result[used] = x / size[used]
    return result
