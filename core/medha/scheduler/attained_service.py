"""The service of each owner: tokens of its prompts and outputs, of which half are forgotten in each half-life.

A sequence is charged when it arrives, so waiting sequences count as served, and `n` samples count `n` times. Its
*turn* stands for the service that its owner had attained before that. It is a logarithm to which each half-life adds 1,
as older tokens weigh less. So turns of different times can be compared, and later arrivals do not pass a sequence with
a large turn for ever.
"""

from __future__ import annotations

from heapq import nlargest
from math import inf, log2

import numpy as np

from medha.scheduler.policy import Floats

HALF_LIFE_SECONDS = 60.0
"""Time in which attained service loses half of its weight."""
REMEMBERED_OWNERS = 8192
"""Owners that remain when records are forgotten, at twice so many: those that attained most. Others count as new."""

_Record = tuple[float, float]
"""Tokens, and the time at which they had this number."""


class AttainedService:
    """The service of all owners. Times are in seconds, on the clock of `now`."""

    def __init__(self, remembered: int = REMEMBERED_OWNERS) -> None:
        self._remembered = remembered
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def charge(self, owner: str, tokens: int, now: float) -> None:
        """Count tokens for an owner."""
        self._change(owner, tokens, now)

    def take_back(self, owner: str, tokens: int, charged_at: float, now: float) -> None:
        """Take back what is left of a charge for a sequence that was never served; the rest is forgotten already."""
        self._change(owner, -_left((tokens, charged_at), now), now)

    def _change(self, owner: str, tokens: float, now: float) -> None:
        left = self.tokens(owner, now) + tokens
        if left <= 0:
            self._records.pop(owner, None)
            return
        self._records[owner] = left, now
        if len(self._records) > 2 * self._remembered:  # seldom, so that its cost is spread
            most = nlargest(
                self._remembered, self._records.items(), key=lambda item: (_turn(item[1]), item[0])
            )
            self._records = dict(most)

    def tokens(self, owner: str, now: float) -> float:
        """Return the tokens that an owner was charged, less what is forgotten at `now`."""
        record = self._records.get(owner)
        return 0.0 if record is None else _left(record, now)

    def turn(self, owner: str) -> float:
        """Return the turn of a sequence that arrives now; -inf if nothing is remembered of its owner."""
        record = self._records.get(owner)
        return -inf if record is None else _turn(record)


def tokens_of(turns: Floats, now: float) -> Floats:
    """Return the tokens that are left at `now` of the service that each of these turns stands for."""
    tokens: Floats = np.exp2(turns - now / HALF_LIFE_SECONDS)
    return tokens


def _left(record: _Record, now: float) -> float:
    tokens, at = record
    return float(tokens * 2.0 ** ((at - now) / HALF_LIFE_SECONDS))


def _turn(record: _Record) -> float:
    """Return a number that grows with the tokens, and by 1 in each half-life, as older tokens weigh less."""
    tokens, at = record
    return log2(tokens) + at / HALF_LIFE_SECONDS if tokens > 0 else -inf
