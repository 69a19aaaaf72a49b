"""Predicted time of a whole step, and of a whole prefill.

First form: a step costs a constant, a term per token (linear layers), a term per (query, key) pair
(attention) and a term per sequence (its own attention call, sampling). The constants are measured by a
rank's warm-up steps. A slowly moving factor corrects the prediction by what steps really took, because an
over-prediction shrinks chunks silently and an under-prediction breaks TPOT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from medha.messages import StepProfile

_CORRECTION_WEIGHT = 0.05  # of one observation: about 20 steps to follow a change
_CORRECTION_BOUNDS = (0.25, 4.0)  # beyond them a step is an accident or the profile wrong: no factor helps


@dataclass(frozen=True, slots=True)
class Work:
    """The part of one sequence in a step: `count` query tokens behind `context` tokens of KV."""

    context: int
    count: int

    @property
    def pairs(self) -> float:
        """(query, key) pairs of causal attention: each query sees the context, itself and its predecessors."""
        return self.count * (self.context + (self.count + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A prediction, explained (seconds)."""

    step: float
    linear: float
    attention: float
    sequences: float

    @property
    def total(self) -> float:
        return self.step + self.linear + self.attention + self.sequences


class Predictor:
    """Predicts from a profile; `observe` moves the correction."""

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self.correction = 1.0

    def explain(self, works: Iterable[Work]) -> StepTerms:
        """The terms of a step over `works`, each after correction."""
        tokens, pairs, sequences = 0, 0.0, 0
        for work in works:
            tokens += work.count
            pairs += work.pairs
            sequences += 1
        return self._terms(tokens, pairs, sequences)

    def step_seconds(self, works: Iterable[Work]) -> float:
        """Predicted time of one step over `works`."""
        return self.explain(works).total

    def prefill_seconds(self, context: int, tokens: int, chunk_tokens: int) -> float:
        """Predicted time to bring a sequence from `context` to `tokens` tokens of KV, alone, in full chunks."""
        missing = tokens - context
        if missing <= 0:
            return 0.0
        chunks = ceil(missing / chunk_tokens)
        terms = self._terms(missing, Work(context, missing).pairs, chunks)
        return terms.total + (chunks - 1) * self.profile.step_seconds * self.correction

    def observe(self, predicted_seconds: float, observed_seconds: float) -> None:
        """Move the correction towards what a step really took."""
        if predicted_seconds <= 0 or observed_seconds <= 0:
            return
        wanted = self.correction * observed_seconds / predicted_seconds
        low, high = _CORRECTION_BOUNDS
        self.correction += _CORRECTION_WEIGHT * (min(high, max(low, wanted)) - self.correction)

    def _terms(self, tokens: int, pairs: float, sequences: int) -> StepTerms:
        profile, factor = self.profile, self.correction
        return StepTerms(
            step=profile.step_seconds * factor,
            linear=tokens * profile.linear_seconds_per_token * factor,
            attention=pairs * profile.attention_seconds_per_pair * factor,
            sequences=sequences * profile.sequence_seconds * factor,
        )
