"""Costs of one layer, one output head and one link: the numbers that the predictor multiplies and adds.

A `Profile` is data. It comes from a rank's warm-up (`Profile.of_warm_up`), from `medha profile`, which
measures a machine, or from `medha.cost.hardware.profile_for`, which uses data sheets and the fraction of them that
is reached.

Every cost is a roofline: `launch + max(rows * compute, fixed + rows * memory)`, in seconds, where rows are
rounded up to whole tiles, or to whole waves of tiles. Measured points, where they exist, replace the roofline
inside their range; beyond it the roofline continues them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from medha.cost.attention_seconds import AttentionSeconds
from medha.cost.touched_experts import touched_share
from medha.errors import ConfigInvalid
from medha.wire.messages import StepProfile

Seconds = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_AtLeastOne = Annotated[int, Field(ge=1)]
_STRICT = ConfigDict(extra="forbid")  # a typo in a profile file must not become a silent zero


@dataclass(frozen=True, slots=True)
class Kernel:
    """A matrix kernel that computes whole tiles, `units` at a time. A partial wave takes as long as a full one."""

    __pydantic_config__ = _STRICT

    tile_rows: _AtLeastOne
    tiles_across: _AtLeastOne  # tiles in each row of tiles
    units: _AtLeastOne  # units of the device; each computes one tile
    wave_seconds: _NonNegative

    def seconds(self, rows: Counts | Seconds, groups: Seconds | float = 1.0) -> Seconds:
        """Return the seconds for each of `rows`, spread evenly over `groups` that share no tile."""
        tiles = groups * np.ceil(rows / groups / self.tile_rows) * self.tiles_across
        return np.ceil(tiles / self.units) * self.wave_seconds


@dataclass(frozen=True, slots=True)
class Operation:
    """Seconds of one operation of one layer, over `rows` of a step: a launch and the roofline."""

    __pydantic_config__ = _STRICT

    name: str
    launch_seconds: _NonNegative = 0.0
    compute_seconds_per_row: _NonNegative = 0.0
    fixed_seconds: _NonNegative = 0.0  # weights read from memory, of all experts
    memory_seconds_per_row: _NonNegative = 0.0  # activations read and written
    tile_rows: _AtLeastOne = 1  # rows are computed in whole tiles
    times: _AtLeastOne = 1  # times that it runs in a layer
    kernels: tuple[Kernel, ...] = ()  # the fastest computes the rows, in place of `compute_seconds_per_row`
    experts: _AtLeastOne = 1  # parts of the weights; each row passes `experts_per_row` of them
    experts_per_row: _AtLeastOne = 1

    def __post_init__(self) -> None:
        if self.experts_per_row > self.experts:
            raise ValueError(
                f"experts_per_row is {self.experts_per_row}; it must be at most experts, which is {self.experts}"
            )

    def seconds(self, rows: Counts | Seconds) -> Seconds:
        """Return the seconds for each of `rows`; zero rows cost nothing. Experts that no row passes are not read."""
        read = self.fixed_seconds * self._touched(rows) / self.experts
        busy = np.maximum(self.compute_seconds(rows), read + rows * self.memory_seconds_per_row)
        return np.where(rows > 0, self.times * (self.launch_seconds + busy), 0.0)

    def compute_seconds(self, rows: Counts | Seconds) -> Seconds:
        """Return the seconds of a single run over each of `rows`, if memory and launch were free."""
        groups, passes = self._touched(rows), rows * self.experts_per_row
        if self.kernels:
            return np.min([kernel.seconds(passes, groups) for kernel in self.kernels], axis=0)  # type: ignore[no-any-return]
        return (
            groups * np.ceil(passes / groups / self.tile_rows) * self.tile_rows * self.compute_seconds_per_row
        )

    def _touched(self, rows: Counts | Seconds) -> Seconds | float:
        """Return the expected number of experts that each of `rows` pass; 1 where there are no rows."""
        if self.experts == 1:
            return 1.0
        share = touched_share(self.experts, self.experts_per_row, np.asarray(rows, np.float64))
        return np.maximum(1.0, self.experts * share)

    def slowed(self, launch: float, compute: float, fixed: float, memory: float) -> Operation:
        """Return the same operation with each of its times multiplied by the given factor."""
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
    """A transfer of rows (or bytes).

    Its time is the lowest of the lines `latency + rows * seconds_per_row`, one for each protocol, but at
    least the floor, which bounds small transfers. A link without lines costs nothing.
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
        """Return the same for one transfer, without numpy's calls."""
        if not self.lines or rows <= 0:
            return 0.0
        return max(self.floor_seconds, min(a + rows * b for a, b in self.lines))

    def of_rows(self, bytes_per_row: float, times: float = 1) -> Link:
        """Return this link of bytes as a link of rows that is used `times` times in succession."""
        lines = tuple((times * a, times * b * bytes_per_row) for a, b in self.lines)
        return Link(lines, times * self.floor_seconds)


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer: for each sequence the longer of computing its pairs and reading its KV.

    Seconds are linear in the context for every count of queries, so many decodes are one multiplication.
    `points`, where measured, are (queries, seconds per key) and replace the roofline's slope up to the last
    one. Layers with a window count at most its keys; then the numbers are of the mean of all layers.
    """

    __pydantic_config__ = _STRICT

    launch_seconds: _NonNegative = 0.0  # once per step
    sequence_seconds: _NonNegative = 0.0  # each sequence's own part
    seconds_per_pair: _NonNegative = 0.0  # one query token against one KV token
    kv_seconds_per_token: _NonNegative = 0.0  # reading one token's keys and values
    rows_per_token: _AtLeastOne = 1  # query heads that share a KV head, folded into rows
    tiles: tuple[_AtLeastOne, ...] = (1,)  # tile sizes, in rows, that a kernel offers; the last one repeats
    points: tuple[tuple[_AtLeastOne, _NonNegative], ...] = ()
    window_tokens: _AtLeastOne = 1  # keys that a query sees in a layer with a window
    window_share: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the layers that have a window

    def __post_init__(self) -> None:
        if not self.tiles or any(a >= b for a, b in pairwise(self.tiles)):
            raise ValueError(f"tiles must be ascending, one at least, but are {self.tiles}")
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.points)):
            raise ValueError("points must ascend in queries, and never fall in seconds a key")
        if self.points and self.points[0][0] != 1:
            raise ValueError(f"points must begin with one query, not with {self.points[0][0]}")

    def one(self) -> AttentionSeconds:
        """Return the formula of one sequence with these numbers."""
        return AttentionSeconds(
            sequence_seconds=self.sequence_seconds,
            seconds_per_pair=self.seconds_per_pair,
            kv_seconds_per_token=self.kv_seconds_per_token,
            rows_per_token=self.rows_per_token,
            tiles=self.tiles,
            points=self.points,
            window_tokens=self.window_tokens,
            window_share=self.window_share,
        )

    def seconds(self, context: int, count: int, *, foreign: bool = False) -> float:
        """Return the seconds of `count` queries after `context` tokens.

        `foreign`: the context is another lane's whole shard.
        """
        return self.one().of(context, count, foreign)

    def seconds_many(self, contexts: Counts, counts: Counts) -> Seconds:
        """Return `seconds` of many sequences on their own lane."""
        keys = self._seen_many(contexts + (counts + 1) / 2)
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
            busy = np.maximum(compute, self._seen_many(contexts + counts) * self.kv_seconds_per_token)
        return np.where(counts > 0, self.sequence_seconds + busy, 0.0)

    def _seen_many(self, keys: Counts | Seconds) -> Counts | Seconds:
        if not self.window_share:
            return keys
        return keys - self.window_share * np.maximum(keys - self.window_tokens, 0)

    @property
    def decode_seconds_per_token(self) -> float:
        """Seconds that each token of KV, its own included, adds to a decode."""
        if self.points:
            return self.points[0][1]
        return max(self.one().padded(1) * self.seconds_per_pair, self.kv_seconds_per_token)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one lane. Layers are spread evenly over its stages; the output head is on the last stage."""

    __pydantic_config__ = _STRICT

    name: str
    source: str  # origin of the numbers, in words
    layers: _AtLeastOne  # of the whole lane
    tensor: _AtLeastOne = 1  # ranks that share each layer; the numbers are of one of them
    launch_seconds: _NonNegative = 0.0  # of a step in one stage, however small
    linear: tuple[Operation, ...] = ()  # of one layer, over the step's tokens
    linear_points: tuple[tuple[_AtLeastOne, _NonNegative], ...] = ()  # measured (tokens, seconds) of `linear`
    attention: Attention = field(default_factory=Attention)  # of one layer
    head: Operation = field(default_factory=lambda: Operation("head"))  # over the rows that may be sampled
    mask_seconds_per_row: _NonNegative = 0.0  # of those rows, each that follows a grammar
    all_reduce: Link = field(default_factory=Link)  # all of one layer's, over the step's tokens
    hop: Link = field(default_factory=Link)  # from one stage to the next, over the step's tokens
    exchange: Link = field(default_factory=Link)  # one layer's queries and partials, over exchanged queries
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.linear_points)):
            raise ValueError("linear_points must ascend in tokens, and never fall in seconds")

    @classmethod
    def of_warm_up(cls, measured: StepProfile, stages: int = 1, tensor: int = 1) -> Profile:
        """Return a rank's measurements of its own stage as a profile with one layer per stage."""
        head_seconds = min(measured.head_seconds_per_row, measured.sequence_seconds)
        return cls(
            name="warm-up",
            source="measured by a rank's warm-up steps",
            layers=stages,
            tensor=tensor,
            launch_seconds=measured.step_seconds,
            linear=(Operation("linear", compute_seconds_per_row=measured.linear_seconds_per_token),),
            linear_points=measured.token_points,
            attention=Attention(
                sequence_seconds=measured.sequence_seconds - head_seconds,
                seconds_per_pair=measured.attention_seconds_per_pair,
                points=measured.query_points,
                window_tokens=measured.window_tokens,
                window_share=measured.window_share,
            ),
            head=Operation("head", compute_seconds_per_row=head_seconds),
            mask_seconds_per_row=measured.mask_seconds_per_row,
        )

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "profile") -> Profile:
        """Return a profile from its JSON; `where` names its file in errors.

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
        """Return JSON from which `from_json` restores an equal profile."""
        return _ADAPTER.dump_json(self, indent=1).decode() + "\n"

    def linear_seconds(self, tokens: Counts) -> Seconds:
        """Return the seconds of one layer's linear and elementwise operations for ascending `tokens`; never falls."""
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
        """Return the lane with all times scaled by `factor`, and attention also by `attention`: a sensitivity band."""
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
            mask_seconds_per_row=self.mask_seconds_per_row * factor,
            all_reduce=self.all_reduce.of_rows(1.0, factor),
            hop=self.hop.of_rows(1.0, factor),
            exchange=self.exchange.of_rows(1.0, factor),
        )


_ADAPTER = TypeAdapter(Profile)
