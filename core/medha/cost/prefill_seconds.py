"""Prefill times of prompts alone: cumulative seconds at chunk ends, in one pass.

Algorithm 3 of paper B simulates every length from zero, which is quadratic. The chunks of a long prompt begin
with the chunks of each shorter one, so one pass over the chunks serves all lengths. The last, partial chunk
is computed exactly, and a prompt that stands between two chunk ends first completes that chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Cost = Callable[[Counts, Counts], Seconds]
"""Function (contexts, counts) -> seconds of one sequence's chunk alone in a step; non-decreasing in both."""
OneCost = Callable[[int, int], float]
"""The same for one chunk."""


class Alone(NamedTuple):
    """Duration of a prefill if nothing else runs: it keeps a stage busy, and then drains from the pipeline.

    Others may use the pipeline while it drains, so several prefills together take the sum of their
    `busy_seconds`.
    """

    busy_seconds: float  # of the slowest stage
    drain_seconds: float  # from there until the result

    @property
    def seconds(self) -> float:
        return self.busy_seconds + self.drain_seconds


NOTHING = Alone(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Chunking:
    """Chunks of a lone prefill: as large as the budget allows, in whole multiples of the smallest chunk."""

    max_tokens: int = 2048
    min_tokens: int = 32
    budget_seconds: float = inf  # budget of a stage

    def size_at(self, context: int, cost: Cost) -> int:
        """Return the largest chunk after `context` tokens that fits the budget; at least the smallest chunk."""
        step = min(self.min_tokens, self.max_tokens)
        if _one(cost, context, self.max_tokens) <= self.budget_seconds:
            return self.max_tokens
        low, high = 1, -(-self.max_tokens // step)
        while high - low > 1:
            middle = (low + high) // 2
            if _one(cost, context, middle * step) <= self.budget_seconds:
                low = middle
            else:
                high = middle
        return low * step


class PrefillTable:
    """Seconds between any two lengths of a lone prompt; grows to the longest requested length."""

    def __init__(self, chunking: Chunking, stage: Cost, drain: Cost) -> None:
        """Make an empty table.

        Chunks do not overtake each other, so the chunk that drains longest delays all after it. A pipeline
        of equal stages takes the sum of all chunks in one stage, and the longest chunk once more in each
        other stage.

        Args:
            stage: seconds for which a chunk keeps the slowest stage busy.
            drain: seconds from then until its result.
        """
        self._chunking = chunking
        self._stage = stage
        self._drain = drain
        self._ends: Counts = np.zeros(1, dtype=np.int64)
        self._sums: Seconds = np.zeros(1)
        self._drains: Seconds = np.zeros(1)  # the longest so far
        self._rows = [(0, 0.0, 0.0)]  # the same three as rows: reading one row is faster
        self._end_list = [0]  # and the ends as a list: searching for one is faster

    @property
    def ends(self) -> Counts:
        """Chunk ends walked so far, tokens, from 0."""
        return self._ends

    def seconds(self, contexts: Counts, tokens: Counts) -> Seconds:
        """Return the seconds from each of `contexts` to the result at `tokens`; 0 where nothing is left."""
        if len(tokens) == 0:
            return np.zeros(0)
        self._reach(int(tokens.max()))
        ends, sums = self._ends, self._sums
        contexts = np.minimum(contexts, tokens)
        first = np.searchsorted(ends, contexts, side="left")  # the end of the current chunk
        last = np.searchsorted(ends, tokens, side="right") - 1  # the last end that is passed
        within = last < first  # both lie inside one chunk
        tail_start = np.where(within, contexts, ends[last])
        begun = np.where(within, 0, ends[first] - contexts)
        total = self._stage(tail_start, tokens - tail_start)
        total += self._stage(contexts, begun)
        total += np.where(within, 0.0, sums[last] - sums[first])
        drain = np.maximum(self._drain(tail_start, tokens - tail_start), self._drain(contexts, begun))
        total += np.maximum(drain, np.where(last > first, self._drains[last], 0.0))
        return np.where(tokens > contexts, total, 0.0)

    def one(self, context: int, tokens: int, stage: OneCost, drain: OneCost) -> Alone:
        """Return `seconds` of one sequence, in its parts; numpy's calls would take longer than the sums.

        `stage` and `drain` are the same costs for single chunks.
        """
        if tokens <= context:
            return NOTHING
        self._reach(tokens)
        rows = self._rows
        first = bisect_left(self._end_list, context)
        last = bisect_right(self._end_list, tokens) - 1
        if last < first:
            return Alone(stage(context, tokens - context), drain(context, tokens - context))
        end, total, longest = rows[last]
        begun, before, _ = rows[first]
        total -= before
        parts = [(context, begun - context), (end, tokens - end)]
        total += sum(stage(start, count) for start, count in parts if count)
        waits = [drain(start, count) for start, count in parts if count]
        return Alone(total, max(waits + [longest] * (last > first)))

    def _reach(self, tokens: int) -> None:
        """Extend the table until a chunk ends at `tokens` or beyond; runs of equal chunks are one numpy call."""
        if self._ends[-1] >= tokens:
            return
        goal = max(tokens, 2 * int(self._ends[-1]))
        ends, sums, drains = [self._ends], [self._sums], [self._drains]
        position, total = int(self._ends[-1]), float(self._sums[-1])
        while position < goal:
            size = self._chunking.size_at(position, self._stage)
            starts = np.arange(position, self._last_start(position, size, goal) + 1, size)
            sizes = np.full(len(starts), size)
            run = total + np.cumsum(self._stage(starts, sizes))
            ends.append(starts + size)
            sums.append(run)
            drains.append(self._drain(starts, sizes))
            position, total = int(starts[-1]) + size, float(run[-1])
        self._ends, self._sums = np.concatenate(ends), np.concatenate(sums)
        self._drains = np.maximum.accumulate(np.concatenate(drains))
        self._end_list = self._ends.tolist()
        self._rows = list(zip(self._end_list, self._sums.tolist(), self._drains.tolist(), strict=True))

    def _last_start(self, position: int, size: int, goal: int) -> int:
        """Return the last start before `goal` at which a chunk of `size` tokens still fits the budget."""
        step = min(self._chunking.min_tokens, self._chunking.max_tokens)
        low, high = position, max(goal - 1, position)
        if size <= step or _one(self._stage, high, size) <= self._chunking.budget_seconds:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if _one(self._stage, middle, size) <= self._chunking.budget_seconds:
                low = middle
            else:
                high = middle
        return low


def _one(cost: Cost, context: int, count: int) -> float:
    return float(cost(np.array([context]), np.array([count]))[0])
