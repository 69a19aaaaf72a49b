"""Ranks that sample the token p + 1 at each position p, and a drafter that knows that and is sometimes wrong."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from medha.wire.messages import Sample, StepEntry

WRONG = 1_000_000
"""Added to a token, it is never sampled."""


def known_end(entry: StepEntry) -> int:
    """Return the position behind those that an entry computes, without those of its drafts."""
    return entry.extents[-1].last + 1 - len(entry.drafts)


def sampled(entry: StepEntry, stops: Callable[[], bool]) -> list[Sample]:
    """Return the samples of an entry: one, and another one for each draft up to the first wrong one."""
    samples: list[Sample] = []
    for position, draft in enumerate((*entry.drafts, -1), known_end(entry)):
        samples.append(Sample(entry.id, position + 1, "stop" if stops() else None))
        if samples[-1].finish_reason is not None or draft != position + 1:
            break
    return samples


def guessed(random: Random, position: int, least: int, most: int, chance: float) -> tuple[int, ...]:
    """Return `least` to `most` guesses at the tokens from `position` on, each right with this chance."""
    tokens = range(position + 1, position + 1 + random.randint(least, most))
    return tuple(token if random.random() < chance else token + WRONG for token in tokens)
