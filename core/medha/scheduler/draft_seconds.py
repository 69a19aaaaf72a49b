"""Predicted times of a draft model's work behind a step, corrected by measured ones.

Ranks measure a draft model when they start (`DraftCosts`). It draws guesses in rounds, one of each sequence in a round, and
computes the tokens before them, which it may never have seen. Both are corrected as steps are
(`medha.cost.correction`), each with a factor of its own: what sampling takes depends on the requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from medha.cost.correction import Correction, PartedSeconds
from medha.wire.messages import DraftCosts


@dataclass(slots=True)
class DraftSeconds:
    """The measured costs of a draft model, and their correction."""

    costs: DraftCosts
    correction: Correction = field(default_factory=Correction)

    def of(self, rounds: int, guesses: int, tokens: int = 0) -> float:
        """Return the seconds in which so many guesses are drawn in so many rounds, behind `tokens` that are computed before."""
        return self.correction.seconds(self.uncorrected(rounds, guesses, tokens))

    def uncorrected(self, rounds: int, guesses: int, tokens: int = 0) -> PartedSeconds:
        """Return the same before correction: draws as decodes, and the tokens before them as a prefill."""
        costs = self.costs
        draws = rounds * costs.round_seconds + guesses * costs.row_seconds
        return PartedSeconds(draws + tokens * costs.token_seconds, draws)

    def tokens_within(self, seconds: float) -> float:
        """Return how many tokens can be computed in this time."""
        each = self.costs.token_seconds * self.correction.prefill
        return seconds / each if each > 0 else float("inf")

    def observe(self, predicted: PartedSeconds, observed_seconds: float) -> None:
        """Update the correction by the measured time of work that was predicted so, before correction."""
        self.correction = self.correction.after(predicted, observed_seconds)
