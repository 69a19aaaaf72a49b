"""Guesses of simulated replicas at the next tokens of sequences: each is right with a given probability.

The guesses of a real replica depend on texts, which a simulation does not have. So a random number decides whether a guess
is right. The number depends only on the seed, the sequence and the position. Every policy, load and depth therefore gets
the same texts, and a guess that is right at one probability is right at every higher one.

The controller gets guesses as it does from real ranks. By prompt lookup, each sampled token that does not end its sequence
comes with guesses at the tokens after it. A draft model or head proposes as many as the step asks for, and
`medha_sim.draft_times` says how long that takes. Real prompt lookup finds no guess at all at many tokens, and is right
for long stretches at others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from medha.wire.messages import Sample, Step, StepEntry
from medha_sim.draft_times import DraftTimes, Run
from medha_sim.executor import Drafts, original_id

ACCEPTANCE = 0.5
"""Chance that a guess is right, unless the user gives another. Controllers assume this chance before they have judged any
guess, so by default their assumption is correct from the start."""
WRONG = -1
"""A guess that is wrong; tokens are positions, so none is negative."""
_LOTS = 1 << 64
_LEAST_SECONDS = 1e-6
"""Measured time of a draft model that finds nothing to do: for the controller, 0 means that nothing was measured."""


class Texts:
    """Decides for each token of each sequence whether a guess at it is right."""

    def __init__(self, acceptance: float, seed: int, ends_at: Mapping[str, int]) -> None:
        """`ends_at` is the length (prompt and output) at which each sequence samples its stop token."""
        self._below = acceptance * _LOTS
        self._seed = seed
        self._ends_at = ends_at

    def is_right(self, id_: str, position: int) -> bool:
        """Return whether a guess at the token at a position of a sequence is right."""
        lot = blake2b(f"{self._seed} {original_id(id_)} {position}".encode(), digest_size=8).digest()
        return int.from_bytes(lot) < self._below

    def guess(self, id_: str, position: int) -> int:
        """Return a guess at the token at a position."""
        return position if self.is_right(id_, position) else WRONG

    def ends_with(self, id_: str, token: int) -> bool:
        """Return whether a token, which may be a wrong guess, is the last one of its sequence."""
        end = self._ends_at.get(id_)
        return token + 1 == (self._ends_at[original_id(id_)] if end is None else end)


class LookupGuesser:
    """Guesses as by prompt lookup: `tokens` of them after each sampled token. They take no time of the ranks."""

    def __init__(self, texts: Texts, tokens: int) -> None:
        self._texts = texts
        self._tokens = tokens

    def __call__(self, _step: Step, samples: Sequence[Sample], /) -> tuple[Drafts, float]:
        guess = self._texts.guess
        drafts = tuple(
            (id_, tuple(guess(id_, position) for position in range(known, known + self._tokens)))
            for id_, known in known_tokens(samples).items()
        )
        return drafts, 0.0


class ProposingGuesser:
    """Guesses as of a draft model or head: those that the entries of a step ask for, after its samples."""

    def __init__(self, texts: Texts, times: DraftTimes) -> None:
        self._texts = texts
        self._times = times
        self._computed: dict[str, int] = {}  # tokens of each sequence that the draft model has computed
        self._proposed: dict[str, int] = {}  # guesses that it proposed after them

    def __call__(self, step: Step, samples: Sequence[Sample], /) -> tuple[Drafts, float]:
        for id_ in (*step.releases, *(admit.id for admit in step.admits)):
            self._computed.pop(id_, None)
            self._proposed.pop(id_, None)
        asked = [entry for entry in step.entries if entry.proposes or entry.follows]
        if not asked:
            return (), 0.0
        known = known_tokens(samples)
        drafts = list[tuple[str, tuple[int, ...]]]()
        # Each lane has a draft model of its own, and they compute at the same time.
        work = defaultdict[int, tuple[list[Run], list[tuple[int, int]]]](lambda: ([], []))
        for entry in asked:
            run, draft = self._propose(entry, known.get(entry.id))
            runs, places = work[entry.lane]
            if run.count:
                runs.append(run)
            if draft:
                drafts.append((entry.id, draft))
                places.append((known[entry.id], len(draft)))
        seconds = max(self._times.seconds(runs, places) for runs, places in work.values())
        return tuple(drafts), max(seconds, _LEAST_SECONDS)

    def _propose(self, entry: StepEntry, known: int | None) -> tuple[Run, tuple[int, ...]]:
        """Return the tokens that the draft model computes of an entry's sequence, and its guesses after them.

        `known` is the number of the sequence's tokens with those sampled now; None if it ends, or is not sampled.
        """
        if self._times.is_head:  # the step itself has computed all that is before the guesses
            return Run(0, 0), () if known is None else self._chain(entry.id, known, entry.proposes)
        start = entry.extents[0].start
        computed = self._settled(entry.id, start if known is None else known)
        if known is not None and entry.proposes and computed + entry.follows >= start:
            draft = self._chain(entry.id, known, entry.proposes)
            self._computed[entry.id], self._proposed[entry.id] = known, len(draft)
            return Run(computed, known - computed), draft
        stop = max(min(computed + entry.follows, start), computed)
        self._computed[entry.id] = stop
        return Run(computed, stop - computed), ()

    def _settled(self, id_: str, known: int) -> int:
        """Return how many tokens are computed once right guesses count; of the last guess proposed, no KV was computed."""
        computed, proposed = self._computed.get(id_, 0), self._proposed.pop(id_, 0)
        stop = min(computed + proposed - 1, known - 1)
        while computed < stop and self._texts.is_right(id_, computed):
            computed += 1
        return computed

    def _chain(self, id_: str, known: int, proposes: int) -> tuple[int, ...]:
        """Return up to `proposes` guesses; nothing is proposed after a guess that ends the sequence."""
        draft: list[int] = []
        for position in range(known, known + proposes):
            draft.append(self._texts.guess(id_, position))
            if self._texts.ends_with(id_, draft[-1]):
                break
        return tuple(draft)


def known_tokens(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the number of known tokens of each sequence that goes on after its samples."""
    last = {sample.id: sample for sample in samples}
    return {id_: sample.token + 1 for id_, sample in last.items() if sample.finish_reason is None}
