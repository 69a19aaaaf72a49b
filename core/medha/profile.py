"""What one layer, one output head and one link cost: the numbers that the predictor multiplies and adds.

A `Profile` is data. It comes from a rank's warm-up (`Profile.of_warm_up`), from `medha profile`, which measures a
machine, or from `medha.hardware.profile_for`, which knows only a data sheet and fitted efficiencies.

Every cost is a roofline: `launch + max(rows * compute, fixed + rows * memory)`, in seconds, of rows that are rounded
up to whole tiles. Where measured points exist, they hold inside their range, and the roofline continues them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from medha.messages import StepProfile

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Operation:
    """Seconds of one operation of one layer, over `rows` of a step: the roofline, and a launch."""

    name: str
    launch_seconds: float = 0.0
    compute_seconds_per_row: float = 0.0
    fixed_seconds: float = 0.0  # weights read from memory
    memory_seconds_per_row: float = 0.0  # activations read and written
    tile_rows: int = 1  # rows are computed in whole tiles
    times: int = 1  # in a layer

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        """Seconds over each of `rows`; no rows cost nothing."""
        padded = np.ceil(rows / self.tile_rows) * self.tile_rows
        busy = np.maximum(
            padded * self.compute_seconds_per_row, self.fixed_seconds + rows * self.memory_seconds_per_row
        )
        return np.where(rows > 0, self.times * (self.launch_seconds + busy), 0.0)


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of rows (or bytes): the lowest of its lines `latency + rows * seconds_per_row`, one for each protocol.

    A link without lines costs nothing.
    """

    lines: tuple[tuple[float, float], ...] = ()

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        if not self.lines:
            return np.zeros(len(rows))
        return np.where(rows > 0, np.min([a + rows * b for a, b in self.lines], axis=0), 0.0)

    def of_rows(self, bytes_per_row: float, times: int = 1) -> Link:
        """This link of bytes as one of rows, used `times` times one after the other."""
        return Link(tuple((times * a, times * b * bytes_per_row) for a, b in self.lines))


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: per sequence the longer of computing its pairs and reading its KV.

    A decode is then exactly linear in its context, so that many of them are one multiplication.
    """

    launch_seconds: float = 0.0  # once for each step
    sequence_seconds: float = 0.0  # each sequence's own part
    seconds_per_pair: float = 0.0  # one query token against one KV token
    kv_seconds_per_token: float = 0.0  # reading one token's keys and values
    rows_per_token: int = 1  # query heads that share a KV head, folded into rows
    tiles: tuple[int, ...] = (1,)  # rows of the tiles that a kernel offers, ascending; the last one repeats

    def seconds(self, context: int, count: int, *, foreign: bool = False) -> float:
        """Of `count` queries behind `context` tokens; `foreign`: the context is another lane's whole shard."""
        if foreign:
            keys, read = float(context), context
        else:
            keys, read = context + (count + 1) / 2, context + count
        compute = self._padded(count) * keys * self.seconds_per_pair
        memory = read * self.kv_seconds_per_token
        return self.sequence_seconds + max(memory, compute)

    def seconds_many(self, contexts: Counts, counts: Counts) -> Seconds:
        """`seconds` of many sequences of a lane's own."""
        rows = counts * self.rows_per_token
        last = self.tiles[-1]
        padded = (-(-rows // last) * last).astype(np.float64)
        for tile in reversed(self.tiles[:-1]):
            padded = np.where(rows <= tile, tile, padded)
        keys = contexts + (counts + 1) / 2
        compute = padded / self.rows_per_token * keys * self.seconds_per_pair
        memory = (contexts + counts) * self.kv_seconds_per_token
        return np.where(counts > 0, self.sequence_seconds + np.maximum(compute, memory), 0.0)

    @property
    def decode_seconds_per_token(self) -> float:
        """What each token of KV, its own included, adds to a decode."""
        return max(self._padded(1) * self.seconds_per_pair, self.kv_seconds_per_token)

    def _padded(self, count: int) -> float:
        """Query tokens, rounded up to whole tiles of rows."""
        rows = count * self.rows_per_token
        for tile in self.tiles[:-1]:
            if rows <= tile:
                return tile / self.rows_per_token
        last = self.tiles[-1]
        return -(-rows // last) * last / self.rows_per_token


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one lane. Layers are spread evenly over its stages; the output head is the last stage's."""

    name: str
    source: str  # where the numbers come from, in words
    layers: int  # of the whole lane
    launch_seconds: float = 0.0  # of a step in one stage, however small
    linear: tuple[Operation, ...] = ()  # of one layer, over the step's tokens
    attention: Attention = field(default_factory=Attention)  # of one layer
    head: Operation = field(default_factory=lambda: Operation("head"))  # over the rows that may be sampled
    all_reduce: Link = field(default_factory=Link)  # all of one layer's, over the step's tokens
    hop: Link = field(default_factory=Link)  # from one stage to the next, over the step's tokens
    exchange: Link = field(default_factory=Link)  # one layer's queries and partials, over exchanged queries

    @classmethod
    def of_warm_up(cls, measured: StepProfile, stages: int = 1) -> Profile:
        """The additive constants that a rank measured over its own stage, as a profile of one layer a stage."""
        return cls(
            name="warm-up",
            source="measured by a rank's warm-up steps",
            layers=stages,
            launch_seconds=measured.step_seconds,
            linear=(Operation("linear", compute_seconds_per_row=measured.linear_seconds_per_token),),
            attention=Attention(
                sequence_seconds=measured.sequence_seconds,
                seconds_per_pair=measured.attention_seconds_per_pair,
            ),
        )

    def linear_seconds(self, tokens: Counts) -> Seconds:
        """Of one layer's linear and elementwise operations over each of `tokens` tokens."""
        total = np.zeros(len(tokens))
        for operation in self.linear:
            total += operation.seconds(tokens)
        return np.maximum.accumulate(total) if len(total) else total
