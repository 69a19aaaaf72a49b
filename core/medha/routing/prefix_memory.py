"""The memory of a router: which prefixes it recently sent to which replica.

`medha.routing.replica_choice` sends a sequence to the replica where its first token is expected soonest. For that it
must know how much of a prompt a replica has cached, and a router cannot see the caches. So it remembers what it sent,
at marks in the prompt. Each mark lies about one and a half times as far from the start as the one before: there are a
few dozen per prompt, however long it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from math import log

from medha.kv.prefix_cache import hash_at, hash_count

MARK_BLOCK_TOKENS = 64
"""Block size of the hasher for marks, tokens; shorter prefixes are not worth remembering."""
REMEMBERED_MARKS = 16_384
"""Most marks remembered per replica: some thousand prompts."""

Prefix = tuple[tuple[int, str], ...]
"""The marks of a prompt: (tokens, hash of all ids up to there), ascending."""


def marks(hashes: str, block_size_tokens: int = MARK_BLOCK_TOKENS) -> Prefix:
    """Return the marks of a prompt with these block hashes.

    They are at 1, 2, 3, 4, 6, 8, 12, ... blocks, and at its last whole block.
    """
    blocks = hash_count(hashes)
    powers = [2**power for power in range(blocks.bit_length())]
    ends = {end for power in powers for end in (power, 3 * power // 2) if end <= blocks}
    return tuple(
        (end * block_size_tokens, hash_at(hashes, end - 1)) for end in sorted(ends | {blocks}) if end
    )


class PrefixMemory:
    """Prefixes recently sent to a replica; the least recently sent marks are forgotten first."""

    def __init__(self, limit: int = REMEMBERED_MARKS) -> None:
        self._limit = limit
        self._marks: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, prefix: Prefix) -> None:
        for _, mark in reversed(prefix):  # so that the shortest, which most prompts share, are forgotten last
            self._marks[mark] = None
            self._marks.move_to_end(mark)
        while len(self._marks) > self._limit:
            self._marks.popitem(last=False)

    def forget(self, prefix: Prefix, beyond_tokens: int) -> None:
        """Forget the marks of a prompt after its first `beyond_tokens` tokens: the replica did not take it."""
        for tokens, mark in prefix:
            if tokens > beyond_tokens:
                self._marks.pop(mark, None)

    def known_tokens(self, prefix: Prefix) -> int:
        """Return the tokens up to the last mark that is remembered, 0 if none is."""
        for tokens, mark in reversed(prefix):
            if mark in self._marks:
                return tokens
        return 0


def prefill_seconds(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the prefill time of a lone prompt of `tokens` tokens, interpolated between announced (tokens, seconds).

    Below the first point the time is proportional; beyond the last it is quadratic, as that of attention.
    Without points it is 0, so that only the replicas' announced loads tell them apart.
    """
    if not points or tokens <= 0:
        return 0.0
    index = bisect_left(points, (tokens, float("-inf")))
    if index == 0:
        return points[0][1] * tokens / points[0][0]
    if index == len(points):
        return points[-1][1] * (tokens / points[-1][0]) ** 2
    (low, low_seconds), (high, high_seconds) = points[index - 1], points[index]
    exponent = log(high_seconds / low_seconds) / log(high / low)  # a power law: exact where the curve is one
    return float(low_seconds * (tokens / low) ** exponent)
