"""Proposes guesses in rounds: one for each sequence in a round.

A guess is sampled with the parameters of its sequence and the random numbers of its position, as a token is. So a drafter
that agrees with the model on the likely tokens mostly agrees on the sampled one, too. Grammars and log-probabilities are
ignored, and penalties count known tokens, but no guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from medha_worker.model.sampler import SampledToken, SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.rank.lane_plan import PlannedEntry
from medha_worker.rank.sampled_tokens import Result

Guesses = tuple[tuple[str, tuple[int, ...]], ...]
"""Names of sequences, each with the guesses at its next tokens."""
Followed = tuple[tuple[str, int], ...]
"""Names of sequences, each with the number of its tokens that a draft model has computed."""


@dataclass(slots=True)
class Proposing:
    """A sequence for which guesses are proposed after its `known` tokens."""

    planned: PlannedEntry
    sampler: SequenceSampler  # of guesses
    known: int
    proposes: int  # most guesses
    row: int  # of the hidden states that the next guess is proposed from
    guesses: list[int] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """True if another guess is wanted after the last one."""
        return 0 < len(self.guesses) < self.proposes and self.guesses[-1] not in self.sampler.stop_ids


def known_tokens(planned: PlannedEntry, result: Result | None) -> int:
    """Return how many tokens of an entry's sequence are known once the step has sampled."""
    return planned.known if result is None else planned.known + len(result.sampled)


def goes_on(result: Result | None) -> bool:
    """Return whether a step has sampled a token that does not end its sequence."""
    return result is not None and bool(result.sampled) and result.sampled[-1][1] is None


def propose_rounds(
    sampler: TokenSampler,
    proposing: Sequence[Proposing],
    logits: Tensor,
    compute: Callable[[Sequence[Proposing]], Tensor],
) -> None:
    """Propose the guesses of all sequences.

    `logits` are those of the first guesses, [sequences, vocab]. `compute` computes the last guesses of sequences, and
    returns the logits of the next ones.
    """
    going = list(proposing)
    while going:
        for one in going:
            one.sampler.position = one.known + len(one.guesses)
        sampled = sampler.sample(logits, [one.sampler for one in going])
        for one, token in zip(going, sampled, strict=True):
            if isinstance(token, SampledToken):
                one.guesses.append(token.token)
            else:
                one.proposes = 0
        going = [one for one in going if one.goes_on]
        if going:
            logits = compute(going)


def proposed(proposing: Sequence[Proposing]) -> Guesses:
    """Return the guesses that were proposed."""
    return tuple((one.planned.entry.id, tuple(one.guesses)) for one in proposing if one.guesses)
