"""Predicted times of a draft model's work after a step, corrected by measured ones.

Ranks measure a draft model when they start (`DraftCosts`). It proposes guesses in rounds, one for each sequence in a round.
First it computes the tokens before them that it has not computed yet. The two times are corrected like those of steps
(`medha.cost.correction`), each with a factor of its own, because the time of sampling depends on the requests.

Each lane has a draft model of its own. Those of the lanes of a step work at the same time, so the longest time counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from medha.cost.correction import Correction, PartedSeconds
from medha.wire.messages import DraftCosts


@dataclass(slots=True)
class ProposalWork:
    """The work of a lane's draft model after a step."""

    rounds: int = 0  # the most guesses of one sequence
    guesses: int = 0  # of all sequences
    tokens: int = 0  # that it computes before them

    def propose(self, count: int) -> None:
        """Add the `count`-th guess of a sequence."""
        self.rounds = max(self.rounds, count)
        self.guesses += 1


@dataclass(slots=True)
class DraftSeconds:
    """The measured costs of a draft model, and their correction."""

    costs: DraftCosts
    correction: Correction = field(default_factory=Correction)

    def of(self, rounds: int, guesses: int, tokens: int = 0) -> float:
        """Return the seconds to compute `tokens`, and then to propose `guesses` in so many `rounds`."""
        return self.correction.seconds(self.uncorrected(rounds, guesses, tokens))

    def uncorrected(self, rounds: int, guesses: int, tokens: int = 0) -> PartedSeconds:
        """Return the same before correction: proposals as decodes, and the tokens before them as a prefill."""
        costs = self.costs
        proposals = rounds * costs.round_seconds + guesses * costs.row_seconds
        return PartedSeconds(proposals + tokens * costs.token_seconds, proposals)

    def of_work(self, work: ProposalWork) -> float:
        """Return the seconds of the work of one lane."""
        return self.of(work.rounds, work.guesses, work.tokens)

    def longest(self, works: Iterable[ProposalWork]) -> ProposalWork:
        """Return the work that takes longest; no work if there is none."""
        return max(works, key=self.of_work, default=ProposalWork())

    def tokens_within(self, seconds: float) -> float:
        """Return how many tokens can be computed in a time."""
        each = self.costs.token_seconds * self.correction.prefill
        return seconds / each if each > 0 else float("inf")

    def observe(self, predicted: PartedSeconds, observed_seconds: float) -> None:
        """Update the correction by the measured time of work, and what was predicted for it before correction."""
        self.correction = self.correction.after(predicted, observed_seconds)
