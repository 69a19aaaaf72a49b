"""Fitted distributions of the lengths of prompts and outputs.

Their parameters are computed by `benchmarks/fit_lengths.py` from the public trace that it names; the trace
itself is not part of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

_NORMAL = NormalDist()


class Lengths(Protocol):
    """Lengths of the prompts and outputs of a kind of request."""

    def sample(self, count: int, generator: np.random.Generator) -> tuple[Counts, Counts]:
        """Draw prompt and output tokens of `count` requests, int64 [count] each and at least 1."""


class Quantity(Protocol):
    """A distribution of a number of tokens, defined by its quantile function."""

    def at(self, probabilities: npt.NDArray[np.float64]) -> Counts:
        """Return the quantiles, int64, in the shape of `probabilities`."""


@dataclass(frozen=True, slots=True)
class Knots:
    """A quantile function that interpolates linearly between points."""

    probabilities: Sequence[float]
    tokens: Sequence[int]

    def at(self, probabilities: npt.NDArray[np.float64]) -> Counts:
        return np.rint(np.interp(probabilities, self.probabilities, self.tokens)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution truncated to `low .. high` tokens."""

    mu: float
    sigma: float
    low: int
    high: int

    def at(self, probabilities: npt.NDArray[np.float64]) -> Counts:
        below, above = (_NORMAL.cdf((log(tokens) - self.mu) / self.sigma) for tokens in (self.low, self.high))
        inside = np.clip(below + probabilities * (above - below), 1e-12, 1 - 1e-12)
        normal = np.array([_NORMAL.inv_cdf(probability) for probability in inside.ravel()])
        tokens = np.rint(np.exp(self.mu + self.sigma * normal)).astype(np.int64)
        return np.clip(tokens, self.low, self.high).reshape(probabilities.shape)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant number of tokens."""

    tokens: int

    def at(self, probabilities: npt.NDArray[np.float64]) -> Counts:
        return np.full(probabilities.shape, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Independent:
    """Independent prompt and output; pairs of more than `most_tokens` in total get a shorter output."""

    prompt: Quantity
    output: Quantity
    most_tokens: int | None = None

    def sample(self, count: int, generator: np.random.Generator) -> tuple[Counts, Counts]:
        uniform = generator.random((count, 2))  # row by row: the first n requests do not depend on `count`
        prompts, outputs = self.prompt.at(uniform[:, 0]), self.output.at(uniform[:, 1])
        if self.most_tokens is not None:
            outputs = np.maximum(1, np.minimum(outputs, self.most_tokens - prompts))
        return prompts, outputs


@dataclass(frozen=True, slots=True)
class Stretched:
    """Requests of another kind with prompts `factor` times as long (paper B §6.3 scales its trace to 2M)."""

    lengths: Lengths
    factor: float

    def sample(self, count: int, generator: np.random.Generator) -> tuple[Counts, Counts]:
        prompts, outputs = self.lengths.sample(count, generator)
        return np.rint(prompts * self.factor).astype(np.int64), outputs


_PROBABILITIES = (0, .01, .025, .05, .1, .15, .2, .3, .4, .5, .6, .7, .8, .9, .95, .975, .99, 1)  # fmt: skip

SHAREGPT = Independent(
    prompt=Knots(
        _PROBABILITIES,
        (1, 12, 18, 29, 74, 180, 382, 777, 1203, 1730, 2401, 3235, 4278, 5696, 6563, 7056, 7434, 8141),
    ),
    output=Knots(
        _PROBABILITIES,
        (2, 6, 24, 44, 84, 130, 181, 271, 346, 415, 493, 581, 683, 834, 920, 965, 998, 1024),
    ),
    most_tokens=8192,
)
"""ShareGPT, cut at 8K: 30,731 rows, Kolmogorov-Smirnov distance 0.0071 (prompt) and 0.0051 (output).

Prompt and output are independent here; in the trace the logarithms' correlation is 0.06.
"""

MEDHA_SWE = Independent(
    prompt=LogNormal(mu=14.1080, sigma=1.9897, low=100_000, high=1_000_000),
    output=LogNormal(mu=log(518), sigma=0.3469, low=1, high=8192),
)
"""Medha-SWE-like: P50 393K and P90 839K after the cut to 100K-1M, outputs 518 and 808 (paper B §6.1, all it states)."""
