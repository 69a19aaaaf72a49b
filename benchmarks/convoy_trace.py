"""The trace of `convoy.py` and what is concluded from its measurements: pure functions over plain figures.

A *block* is one window of the trace: short prompts that arrive at random times, long prompts that arrive early in it,
and a stream that decodes all the while. A *point* is one system with one setting, over all its blocks.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

STREAM_TOKENS_PER_SECOND = 20.0  # pace of the stream that counts as load: one token in 50 ms
LONGS_WITHIN_SECONDS = 8.0  # all longs of a block arrive within this time of each other
BIN_GROWTH = 1.02  # gaps between tokens are counted in bins of two per cent
SHORTEST_GAP_SECONDS = 1e-5
FIRST_SECONDS = 2.0  # Medha's default TTFT deadline: the larger of this and a multiple of the time alone
TIMES_ALONE = 3.0
THROUGHPUT_FIRST_SECONDS = 5.0  # a point whose shorts take longer at p99 sets throughput above latency

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of a trace; `load` is the largest share of the machine that all its work may take."""

    blocks: int
    shorts: int  # of a block
    short_tokens: tuple[int, int]
    longs: int  # of a block
    long_tokens: tuple[int, int]
    output_tokens: int
    load: float


FULL = Scale(4, 76, (64, 512), 2, (16_384, 32_768), 8, 0.7)
QUICK = Scale(1, 6, (64, 128), 1, (768, 1024), 4, 0.6)


@dataclass(frozen=True)
class Capacity:
    """Speed of this machine: the seconds that a prompt takes alone, by its tokens, and those of one decode."""

    alone_seconds: Mapping[int, float]
    decode_seconds: float

    def prompt_seconds(self, tokens: int) -> float:
        """Return how long a prompt takes alone, interpolated between the measured lengths on logarithmic scales."""
        lengths = sorted(self.alone_seconds)
        seconds = [math.log(self.alone_seconds[length]) for length in lengths]
        return math.exp(float(np.interp(math.log(tokens), np.log(lengths), seconds)))

    def ttft_target_seconds(self, tokens: int) -> float:
        """Return the time in which the first token of a prompt counts as on time."""
        return max(FIRST_SECONDS, TIMES_ALONE * self.prompt_seconds(tokens))


@dataclass(frozen=True)
class Prompt:
    """A prompt of a block; `at_seconds` is its arrival from the start of the window."""

    name: str
    at_seconds: float
    tokens: int
    is_long: bool


def trace(scale: Scale, capacity: Capacity, block: int, seed: int) -> list[Prompt]:
    """Return the prompts of a block, by arrival: every system gets the same.

    Shorts arrive as a Poisson process with a known number of arrivals: uniformly over the window. The window is so long
    that all work of the block, done one prompt after the other, takes `scale.load` of it. The stream counts with
    `STREAM_TOKENS_PER_SECOND`.
    """
    random = np.random.default_rng([seed, block])
    shorts = random.integers(scale.short_tokens[0], scale.short_tokens[1] + 1, scale.shorts)
    # One long of each equal part of the range, so that blocks have nearly the same work.
    edges = np.linspace(*scale.long_tokens, scale.longs + 1)
    longs = random.permutation([random.uniform(*pair) for pair in itertools.pairwise(edges)])
    window = window_seconds(scale, capacity, [*shorts, *longs])
    at = {
        False: np.sort(random.uniform(0, window, scale.shorts)),
        True: np.sort(random.uniform(0, min(LONGS_WITHIN_SECONDS, window / 4), scale.longs)),
    }
    found = [
        Prompt(f"{'long' if is_long else 'short'} {number}", float(second), int(tokens), is_long)
        for is_long, sizes in ((False, shorts), (True, longs))
        for number, (second, tokens) in enumerate(zip(at[is_long], sizes, strict=True))
    ]
    return sorted(found, key=lambda prompt: prompt.at_seconds)


def window_seconds(scale: Scale, capacity: Capacity, prompt_tokens: Iterable[int | float]) -> float:
    """Return the length of a window in which these prompts and the stream take `scale.load` of the machine."""
    outputs = (scale.output_tokens - 1) * capacity.decode_seconds
    work = sum(capacity.prompt_seconds(int(tokens)) + outputs for tokens in prompt_tokens)
    stream = STREAM_TOKENS_PER_SECOND * capacity.decode_seconds
    if stream >= scale.load:
        raise ValueError(f"the stream alone takes {stream:.0%} of this machine, more than {scale.load:.0%}")
    return work / (scale.load - stream)


# --- figures of a block ------------------------------------------------------------------------------


def counted(gaps: Iterable[float]) -> dict[str, int]:
    """Return how many of the gaps (seconds) lie in each logarithmic bin; keys are the bins' numbers, as JSON wants them."""
    numbers = [
        round(math.log(max(gap, SHORTEST_GAP_SECONDS) / SHORTEST_GAP_SECONDS, BIN_GROWTH)) for gap in gaps
    ]
    return {str(number): numbers.count(number) for number in sorted(set(numbers))}


def quantile_of_counts(counts: Iterable[Mapping[str, int]], share: float, *, by_time: bool = False) -> float:
    """Return a quantile of counted gaps (seconds), right to one per cent.

    Every gap counts once or, `by_time`, as much as it is long: then the result is the gap that one is in at a random
    moment. A stream has few tokens while it stalls, so a quantile over its tokens hardly shows that it did.
    """
    total: dict[int, float] = {}
    for one in counts:
        for number, count in one.items():
            weight = count * (BIN_GROWTH ** int(number) if by_time else 1.0)
            total[int(number)] = total.get(int(number), 0.0) + weight
    wanted = share * sum(total.values())
    seen = 0.0
    for number in sorted(total):
        seen += total[number]
        if seen >= wanted:
            return SHORTEST_GAP_SECONDS * BIN_GROWTH**number
    raise ValueError("there are no gaps, so they have no quantile")


def same_start(text: str, reference: str) -> bool:
    """Return whether a text is the reference, or either is a beginning of the other: an engine may end at an EOS."""
    shorter, longer = sorted((text, reference), key=len)
    return bool(shorter) and longer.startswith(shorter)


# --- figures of a point ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """The figures of a system over its blocks; times in seconds, shares from 0 to 1."""

    name: str
    shorts: int = field(metadata={"axis": False})
    short_p50: float
    short_p90: float
    short_p99: float
    short_max: float
    itl_p50: float
    itl_p99: float
    stall_p99: float  # of the gap that the stream is in at a random moment
    long_mean: float
    long_last: float
    on_time: float = field(metadata={"axis": False})
    goodput_per_second: float = field(metadata={"axis": False})
    texts: int = field(metadata={"axis": False})
    texts_equal: int = field(metadata={"axis": False})


AXES = tuple(one.name for one in fields(Point) if one.name != "name" and one.metadata.get("axis", True))
"""Figures in which one point can be ahead of another; less is better in each."""


def point(name: str, blocks: Sequence[Row], capacity: Capacity) -> Point:
    """Return the figures of a system over its blocks.

    A long's completion counts from its arrival to its last token. The last one counts from the arrival of the block's
    first long until no long is left. Goodput is the number of prompts whose first token came on time, for each second
    from a block's first arrival to its last token.
    """
    shorts = [one["ttft"] for block in blocks for one in block["prompts"] if not one["long"]]
    longs = [[one for one in block["prompts"] if one["long"]] for block in blocks]
    last = [
        max(one["at"] + one["end"] for one in of_block) - min(one["at"] for one in of_block)
        for of_block in longs
    ]
    prompts = [one for block in blocks for one in block["prompts"]]
    on_time = sum(one["ttft"] <= capacity.ttft_target_seconds(one["tokens"]) for one in prompts)
    p50, p90, p99 = (float(np.quantile(shorts, share)) for share in (0.5, 0.9, 0.99))
    gaps = [block["gaps"] for block in blocks]
    return Point(
        name=name,
        shorts=len(shorts),
        short_p50=p50,
        short_p90=p90,
        short_p99=p99,
        short_max=max(shorts),
        itl_p50=quantile_of_counts(gaps, 0.5),
        itl_p99=quantile_of_counts(gaps, 0.99),
        stall_p99=quantile_of_counts(gaps, 0.99, by_time=True),
        long_mean=statistics.mean(one["end"] for of_block in longs for one in of_block),
        long_last=statistics.mean(last),
        on_time=on_time / len(prompts),
        goodput_per_second=on_time / sum(block["span"] for block in blocks),
        texts=sum(block["texts"] for block in blocks),
        texts_equal=sum(block["texts_equal"] for block in blocks),
    )


def common_blocks(done: Mapping[str, Row], systems: Iterable[str]) -> dict[str, list[Row]]:
    """Return each system's blocks that all of the systems have, so that all points have the same prompts."""
    numbers: dict[str, set[str]] = {}
    for key in done:
        system, _, number = key.rpartition(", block ")
        numbers.setdefault(system, set()).add(number)
    present = [system for system in systems if system in numbers]
    if not present:
        return {}
    common = sorted(set.intersection(*(numbers[system] for system in present)), key=int)
    if not common:
        return {}
    return {system: [done[block_key(system, int(number))] for number in common] for system in present}


def block_key(system: str, block: int) -> str:
    """Return the name under which a system's block is kept."""
    return f"{system}, block {block}"


@dataclass(frozen=True)
class Comparison:
    """A peer's point beside one of ours: the ratios ours / peer of all axes, and the axis of the largest."""

    peer: str
    ours: str
    ratios: Mapping[str, float]
    throughput_first: bool

    @property
    def worst(self) -> str:
        """Name the axis on which ours is farthest behind, or least ahead."""
        return max(self.ratios, key=self.ratios.__getitem__)

    @property
    def worst_ratio(self) -> float:
        """Return the ratio on that axis; at most 1 if ours is ahead on all of them."""
        return self.ratios[self.worst]


LONG_AXES = ("long_mean", "long_last")


def frontier(ours: Sequence[Point], peers: Sequence[Point]) -> list[Comparison]:
    """Compare each peer's point with the one of ours that comes closest to being ahead of it on all axes.

    Against a point that sets throughput above latency, this is the one with the least price in long completions.
    """
    found = []
    for peer in peers:
        first = peer.short_p99 >= THROUGHPUT_FIRST_SECONDS
        compared = [
            Comparison(
                peer.name,
                own.name,
                {axis: getattr(own, axis) / getattr(peer, axis) for axis in AXES},
                first,
            )
            for own in ours
        ]

        def price(one: Comparison) -> float:
            return max(one.ratios[axis] for axis in LONG_AXES) if one.throughput_first else one.worst_ratio

        found.append(min(compared, key=price))
    return found
