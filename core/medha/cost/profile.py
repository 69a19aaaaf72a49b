"""What one layer, one output head and one link cost: the numbers that the predictor multiplies and adds.

A `Profile` is data. It comes from a rank's warm-up (`Profile.of_warm_up`), from `medha profile`, which measures a
machine, or from `medha.hardware.profile_for`, which knows a data sheet and what fraction of it is reached.

Every cost is a roofline: `launch + max(rows * compute, fixed + rows * memory)`, in seconds, of rows that are rounded
up to whole tiles, or to whole waves of them. Where measured points exist, they hold inside their range, and the roofline continues them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from medha.cost.attention_seconds import AttentionSeconds
from medha.errors import ConfigInvalid
from medha.wire.messages import StepProfile

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_AtLeastOne = Annotated[int, Field(ge=1)]
_STRICT = ConfigDict(extra="forbid")  # a typing error in a profile file must not become a silent zero


@dataclass(frozen=True, slots=True)
class Kernel:
    """A matrix kernel that computes whole tiles, `units` of them at a time: a wave that is not full takes as long as one
    that is."""

    __pydantic_config__ = _STRICT

    tile_rows: _AtLeastOne
    tiles_across: _AtLeastOne  # in each row of tiles
    units: _AtLeastOne  # of the device, one tile each
    wave_seconds: _NonNegative

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        tiles = np.ceil(rows / self.tile_rows) * self.tiles_across
        return np.ceil(tiles / self.units) * self.wave_seconds


@dataclass(frozen=True, slots=True)
class Operation:
    """Seconds of one operation of one layer, over `rows` of a step: the roofline, and a launch."""

    __pydantic_config__ = _STRICT

    name: str
    launch_seconds: _NonNegative = 0.0
    compute_seconds_per_row: _NonNegative = 0.0
    fixed_seconds: _NonNegative = 0.0  # weights read from memory
    memory_seconds_per_row: _NonNegative = 0.0  # activations read and written
    tile_rows: _AtLeastOne = 1  # rows are computed in whole tiles
    times: _AtLeastOne = 1  # in a layer
    kernels: tuple[Kernel, ...] = ()  # the fastest of them computes the rows, instead of so much per row

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        """Seconds over each of `rows`; no rows cost nothing."""
        busy = np.maximum(self.compute_seconds(rows), self.fixed_seconds + rows * self.memory_seconds_per_row)
        return np.where(rows > 0, self.times * (self.launch_seconds + busy), 0.0)

    def compute_seconds(self, rows: Counts | Seconds) -> Seconds:
        """Of one time in a layer, were memory and launch free."""
        if self.kernels:
            return np.min([kernel.seconds(rows) for kernel in self.kernels], axis=0)  # type: ignore[no-any-return]
        return np.ceil(rows / self.tile_rows) * self.tile_rows * self.compute_seconds_per_row

    def slowed(self, launch: float, compute: float, fixed: float, memory: float) -> Operation:
        """The same operation with each of its times so many times as long."""
        return replace(
            self,
            launch_seconds=self.launch_seconds * launch,
            compute_seconds_per_row=self.compute_seconds_per_row * compute,
            fixed_seconds=self.fixed_seconds * fixed,
            memory_seconds_per_row=self.memory_seconds_per_row * memory,
            kernels=tuple(
                replace(kernel, wave_seconds=kernel.wave_seconds * compute) for kernel in self.kernels
            ),
        )


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of rows (or bytes): the lowest of its lines `latency + rows * seconds_per_row`, one for each protocol,
    but never less than a floor, which small transfers do not leave.

    A link without lines costs nothing.
    """

    __pydantic_config__ = _STRICT

    lines: tuple[tuple[_NonNegative, _NonNegative], ...] = ()
    floor_seconds: _NonNegative = 0.0

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        if not self.lines:
            return np.zeros(len(rows))
        lowest = np.min([a + rows * b for a, b in self.lines], axis=0)
        return np.where(rows > 0, np.maximum(lowest, self.floor_seconds), 0.0)

    def seconds_one(self, rows: int) -> float:
        """The same of one transfer, without numpy's calls."""
        if not self.lines or rows <= 0:
            return 0.0
        return max(self.floor_seconds, min(a + rows * b for a, b in self.lines))

    def of_rows(self, bytes_per_row: float, times: float = 1) -> Link:
        """This link of bytes as one of rows, used `times` times one after the other."""
        lines = tuple((times * a, times * b * bytes_per_row) for a, b in self.lines)
        return Link(lines, times * self.floor_seconds)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: per sequence the longer of computing its pairs and reading its KV.

    Seconds are linear in the context, for every count of queries; so many decodes are one multiplication. `points`, where
    measured, are (queries, seconds a key) and stand for the roofline's slope up to their last one.
    """

    __pydantic_config__ = _STRICT

    launch_seconds: _NonNegative = 0.0  # once for each step
    sequence_seconds: _NonNegative = 0.0  # each sequence's own part
    seconds_per_pair: _NonNegative = 0.0  # one query token against one KV token
    kv_seconds_per_token: _NonNegative = 0.0  # reading one token's keys and values
    rows_per_token: _AtLeastOne = 1  # query heads that share a KV head, folded into rows
    tiles: tuple[_AtLeastOne, ...] = (1,)  # rows of the tiles that a kernel offers; the last one repeats
    points: tuple[tuple[_AtLeastOne, _NonNegative], ...] = ()

    def __post_init__(self) -> None:
        if not self.tiles or any(a >= b for a, b in pairwise(self.tiles)):
            raise ValueError(f"tiles must be ascending, one at least, but are {self.tiles}")
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.points)):
            raise ValueError("points must ascend in queries, and never fall in seconds a key")
        if self.points and self.points[0][0] != 1:
            raise ValueError(f"points must begin with one query, not with {self.points[0][0]}")

    def one(self) -> AttentionSeconds:
        """The formula of one sequence with these numbers."""
        return AttentionSeconds(
            sequence_seconds=self.sequence_seconds,
            seconds_per_pair=self.seconds_per_pair,
            kv_seconds_per_token=self.kv_seconds_per_token,
            rows_per_token=self.rows_per_token,
            tiles=self.tiles,
            points=self.points,
        )

    def seconds(self, context: int, count: int, *, foreign: bool = False) -> float:
        """Of `count` queries behind `context` tokens; `foreign`: the context is another lane's whole shard."""
        return self.one().of(context, count, foreign)

    def seconds_many(self, contexts: Counts, counts: Counts) -> Seconds:
        """`seconds` of many sequences of a lane's own."""
        keys = contexts + (counts + 1) / 2
        if self.points:
            known, slopes = (np.array(column, np.float64) for column in zip(*self.points, strict=True))
            beyond = np.maximum(counts / known[-1], 1.0)
            busy = keys * np.interp(counts, known, slopes) * beyond
        else:
            rows = counts * self.rows_per_token
            padded = np.ceil(rows / self.tiles[-1]) * self.tiles[-1]
            for tile in reversed(self.tiles[:-1]):
                padded = np.where(rows <= tile, tile, padded)
            compute = padded / self.rows_per_token * keys * self.seconds_per_pair
            busy = np.maximum(compute, (contexts + counts) * self.kv_seconds_per_token)
        return np.where(counts > 0, self.sequence_seconds + busy, 0.0)

    @property
    def decode_seconds_per_token(self) -> float:
        """What each token of KV, its own included, adds to a decode."""
        if self.points:
            return self.points[0][1]
        return max(self.one().padded(1) * self.seconds_per_pair, self.kv_seconds_per_token)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one lane. Layers are spread evenly over its stages; the output head is the last stage's."""

    __pydantic_config__ = _STRICT

    name: str
    source: str  # where the numbers come from, in words
    layers: _AtLeastOne  # of the whole lane
    tensor: _AtLeastOne = 1  # ranks that share each layer; the numbers are of one of them
    launch_seconds: _NonNegative = 0.0  # of a step in one stage, however small
    linear: tuple[Operation, ...] = ()  # of one layer, over the step's tokens
    linear_points: tuple[tuple[_AtLeastOne, _NonNegative], ...] = ()  # measured (tokens, seconds) of them all
    attention: Attention = field(default_factory=Attention)  # of one layer
    head: Operation = field(default_factory=lambda: Operation("head"))  # over the rows that may be sampled
    all_reduce: Link = field(default_factory=Link)  # all of one layer's, over the step's tokens
    hop: Link = field(default_factory=Link)  # from one stage to the next, over the step's tokens
    exchange: Link = field(default_factory=Link)  # one layer's queries and partials, over exchanged queries
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.linear_points)):
            raise ValueError("linear_points must ascend in tokens, and never fall in seconds")

    @classmethod
    def of_warm_up(cls, measured: StepProfile, stages: int = 1, tensor: int = 1) -> Profile:
        """What a rank measured over its own stage, as a profile of one layer a stage."""
        return cls(
            name="warm-up",
            source="measured by a rank's warm-up steps",
            layers=stages,
            tensor=tensor,
            launch_seconds=measured.step_seconds,
            linear=(Operation("linear", compute_seconds_per_row=measured.linear_seconds_per_token),),
            linear_points=measured.token_points,
            attention=Attention(
                sequence_seconds=measured.sequence_seconds,
                seconds_per_pair=measured.attention_seconds_per_pair,
                points=measured.query_points,
            ),
        )

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> Profile:
        """A profile from its JSON; `where` names its file in errors.

        Raises:
            ConfigInvalid: names every wrong field, its value and what was expected.
        """
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                field_name = ".".join(str(part) for part in problem["loc"]) or "the file"
                found = f" (found {problem['input']!r:.80})" if problem["type"] != "missing" else ""
                lines.append(f"{where}: {field_name}: {problem['msg']}{found}")
            lines.append(
                "measure it again with `medha profile`, or take the profile's name out of the manifest"
            )
            raise ConfigInvalid("\n".join(lines)) from error

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal profile."""
        return _ADAPTER.dump_json(self, indent=1).decode() + "\n"

    def linear_seconds(self, tokens: Counts) -> Seconds:
        """Of one layer's linear and elementwise operations, over each of ascending `tokens`; never falls."""
        total = np.zeros(len(tokens))
        for operation in self.linear:
            total += operation.seconds(tokens)
        if self.linear_points:
            known, seconds = (
                np.array(column, np.float64) for column in zip(*self.linear_points, strict=True)
            )
            end = float(known[-1])
            roofline_at_end = sum(float(operation.seconds(known[-1:])[0]) for operation in self.linear)
            beyond = seconds[-1] + np.maximum(total - roofline_at_end, 0.0)
            total = np.where(tokens > end, beyond, np.interp(tokens, known, seconds))
            total[tokens == 0] = 0.0
        return np.maximum.accumulate(total)

    def scaled(self, factor: float = 1.0, attention: float = 1.0) -> Profile:
        """The same lane with every time `factor` as long, and its attention `attention` times that: a sensitivity band."""
        own = self.attention
        both = factor * attention
        return replace(
            self,
            name=f"{self.name}, times x {factor:g}, attention x {attention:g}",
            launch_seconds=self.launch_seconds * factor,
            linear=tuple(operation.slowed(factor, factor, factor, factor) for operation in self.linear),
            linear_points=tuple((tokens, seconds * factor) for tokens, seconds in self.linear_points),
            attention=replace(
                own,
                launch_seconds=own.launch_seconds * both,
                sequence_seconds=own.sequence_seconds * both,
                seconds_per_pair=own.seconds_per_pair * both,
                kv_seconds_per_token=own.kv_seconds_per_token * both,
                points=tuple((count, seconds * both) for count, seconds in own.points),
            ),
            head=self.head.slowed(factor, factor, factor, factor),
            all_reduce=self.all_reduce.of_rows(1.0, factor),
            hop=self.hop.of_rows(1.0, factor),
            exchange=self.exchange.of_rows(1.0, factor),
        )


_ADAPTER = TypeAdapter(Profile)
