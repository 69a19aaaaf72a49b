"""The plan of one step's sampling: all that the device needs besides the logits, as numbers in host memory.

It depends on the sequences alone, so it can be made and copied to the device while the logits are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha.wire.messages import Sampling, TokenLogprob
from medha_worker.kernels.random_stream import position_key
from medha_worker.model.flat_columns import Columns
from medha_worker.model.penalty_tables import PenaltySlots, PenaltyUpdate, plan_update
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler

ELEMENTS_AT_ONCE = 2**22  # logits that are filtered and raced together: bounds the float64 scratch memory


@dataclass(frozen=True, slots=True)
class Bias:
    """The `logit_bias` of all rows: places in the flat block, and values."""

    places: slice
    values: slice


@dataclass(frozen=True, slots=True)
class Repetition:
    """The rows of a block with a repetition penalty, their rows in the table, and the penalties."""

    rows: slice
    slots: slice
    penalties: slice


@dataclass(frozen=True, slots=True)
class Counted:
    """The rows of a block with a frequency or presence penalty, their rows in the table, and the penalties."""

    rows: slice
    slots: slice
    frequency: slice
    presence: slice


@dataclass(frozen=True, slots=True)
class Masked:
    """The rows of a block for which a hook masks tokens, and its masks, which are rows of the plan's."""

    rows: slice
    masks: slice


@dataclass(frozen=True, slots=True)
class TopK:
    """The racing rows that keep only their most probable tokens, and the index of the last one kept."""

    rows: slice
    last: slice
    most: int


@dataclass(frozen=True, slots=True)
class TopP:
    """The racing rows that keep a nucleus, and their probabilities."""

    rows: slice
    probabilities: slice


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of the filters of the racing rows."""

    temperatures: slice
    top_k: TopK | None
    top_p: TopP | None
    log_min_p: slice | None  # of all racing rows; -inf keeps every token


@dataclass(frozen=True, slots=True)
class Racing:
    """The rows of a block that are sampled at a temperature above 0, their keys and filters."""

    rows: slice
    keys: slice
    filters: Filters
    nucleus_rows: tuple[int, ...]  # the rows of the block that have a nucleus


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The rows of a block for which log-probabilities are requested, and how many of the most probable ones."""

    rows: slice
    in_block: tuple[int, ...]
    counts: tuple[int, ...]
    most: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan of consecutive rows that are sampled together. Slices are columns, or None where no row needs them."""

    first: int
    rows: int
    bias: Bias | None
    repetition: Repetition | None
    counted: Counted | None
    stops: slice | None  # places in the flat block that are masked
    masked: Masked | None
    racing: Racing | None
    logprobs: Logprobs | None

    @property
    def adjusts(self) -> bool:
        """True if logits of the block are changed before the filters."""
        return any((self.bias, self.repetition, self.counted, self.stops, self.masked))


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The plan of all rows of a step."""

    vocab: int
    columns: tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
    masks: Tensor | None  # bool [masked rows, vocab]: the tokens that are allowed
    penalties: PenaltyUpdate
    blocks: tuple[BlockPlan, ...]


def plan_sampling(sequences: Sequence[SequenceSampler], vocab: int, slots: PenaltySlots) -> SamplingPlan:
    """Return the plan of the rows of these sequences, and call their mask hooks."""
    columns = Columns()
    penalties = plan_update(sequences, slots, vocab, columns)
    masks: list[Tensor] = []
    at_once = max(1, ELEMENTS_AT_ONCE // vocab)
    blocks = [
        _plan_block(first, sequences[first : first + at_once], vocab, slots, columns, masks)
        for first in range(0, len(sequences), at_once)
    ]
    return SamplingPlan(
        vocab, columns.flat(), torch.stack(masks) if masks else None, penalties, tuple(blocks)
    )


def plan_filters(parameters: Sequence[Sampling], vocab: int, columns: Columns) -> Filters:
    """Return the filters of rows with these parameters."""
    top_k = [(row, one.top_k) for row, one in enumerate(parameters) if 0 < one.top_k < vocab]
    top_p = [(row, one.top_p) for row, one in enumerate(parameters) if one.top_p < 1.0]
    min_p = [one.min_p for one in parameters]
    return Filters(
        temperatures=columns.reals([one.temperature for one in parameters]),
        top_k=TopK(
            columns.integers([row for row, _ in top_k]),
            columns.integers([k - 1 for _, k in top_k]),
            max(k for _, k in top_k),
        )
        if top_k
        else None,
        top_p=TopP(columns.integers([row for row, _ in top_p]), columns.reals([p for _, p in top_p]))
        if top_p
        else None,
        # p_i < min_p * p_max, as logarithms.
        log_min_p=columns.reals([math.log(one) if one else -math.inf for one in min_p])
        if any(min_p)
        else None,
    )


def _plan_block(
    first: int,
    sequences: Sequence[SequenceSampler],
    vocab: int,
    slots: PenaltySlots,
    columns: Columns,
    masks: list[Tensor],
) -> BlockPlan:
    rows = list(enumerate(sequences))
    return BlockPlan(
        first,
        len(sequences),
        bias=_bias(rows, vocab, columns),
        repetition=_repetition(rows, slots, columns),
        counted=_counted(rows, slots, columns),
        stops=_stops(rows, vocab, columns),
        masked=_masked(rows, columns, masks),
        racing=_racing(rows, vocab, columns),
        logprobs=_logprobs(rows, vocab, columns),
    )


_Rows = Sequence[tuple[int, SequenceSampler]]


def _bias(rows: _Rows, vocab: int, columns: Columns) -> Bias | None:
    biased = [(row, one.sampling.logit_bias) for row, one in rows if one.sampling.logit_bias]
    if not biased:
        return None
    return Bias(
        columns.integers([row * vocab + token for row, bias in biased for token in bias]),
        columns.reals([value for _, bias in biased for value in bias.values()]),
    )


def _repetition(rows: _Rows, slots: PenaltySlots, columns: Columns) -> Repetition | None:
    penalised = [(row, one) for row, one in rows if one.penalises_repetition]
    if not penalised:
        return None
    return Repetition(
        columns.integers([row for row, _ in penalised]),
        columns.integers([slots.slot_of(one).index for _, one in penalised]),
        columns.reals([one.sampling.repetition_penalty for _, one in penalised]),
    )


def _counted(rows: _Rows, slots: PenaltySlots, columns: Columns) -> Counted | None:
    penalised = [(row, one) for row, one in rows if one.penalises_counts]
    if not penalised:
        return None
    return Counted(
        columns.integers([row for row, _ in penalised]),
        columns.integers([slots.slot_of(one).index for _, one in penalised]),
        columns.reals([one.sampling.frequency_penalty for _, one in penalised]),
        columns.reals([one.sampling.presence_penalty for _, one in penalised]),
    )


def _stops(rows: _Rows, vocab: int, columns: Columns) -> slice | None:
    places = [row * vocab + token for row, one in rows if one.must_not_stop for token in one.stops_in_vocab]
    return columns.integers(places) if places else None


def _masked(rows: _Rows, columns: Columns, masks: list[Tensor]) -> Masked | None:
    first, masked = len(masks), []
    for row, one in rows:
        allowed = one.mask(one.outputs) if one.mask is not None else None
        if allowed is not None:
            masks.append(allowed)
            masked.append(row)
    return Masked(columns.integers(masked), slice(first, len(masks))) if masked else None


def _racing(rows: _Rows, vocab: int, columns: Columns) -> Racing | None:
    racing = [(row, one) for row, one in rows if one.sampling.temperature > 0]
    if not racing:
        return None
    return Racing(
        columns.integers([row for row, _ in racing]),
        columns.integers([position_key(one.stream, one.position) for _, one in racing]),
        plan_filters([one.sampling for _, one in racing], vocab, columns),
        tuple(row for row, one in racing if one.sampling.top_p < 1.0),
    )


def _logprobs(rows: _Rows, vocab: int, columns: Columns) -> Logprobs | None:
    asked = [(row, one.sampling.logprobs) for row, one in rows if one.sampling.logprobs is not None]
    if not asked:
        return None
    in_block, counts = tuple(row for row, _ in asked), tuple(count for _, count in asked)
    return Logprobs(columns.integers(in_block), in_block, counts, min(max(counts), vocab))


def read_results(
    plan: SamplingPlan, values: Sequence[float], *, flags_nuclei: bool
) -> tuple[list[SampledToken | NotSampled], list[int]]:
    """Return the result of each row, and the rows whose nucleus was wider than the candidates that were searched.

    `values` are those that `TokenSampler.launch` computes.
    """
    results: list[SampledToken | NotSampled] = []
    wide: list[int] = []
    at = 0

    def take(count: int) -> Sequence[float]:
        nonlocal at
        at += count
        return values[at - count : at]

    for block in plan.blocks:
        ids, best = take(block.rows), take(block.rows)
        if flags_nuclei and block.racing is not None and block.racing.nucleus_rows:
            nuclei = block.racing.nucleus_rows
            flags = take(len(nuclei))
            wide += [
                block.first + row
                for row, flag in zip(nuclei, flags, strict=True)
                if flag and math.isfinite(best[row])
            ]
        logprobs: dict[int, TokenLogprob] = {}
        if (asked := block.logprobs) is not None:
            sampled = take(len(asked.in_block))
            top = [take(asked.most) for _ in asked.in_block]
            top_ids = [take(asked.most) for _ in asked.in_block]
            for index, (row, count) in enumerate(zip(asked.in_block, asked.counts, strict=True)):
                ids_of_row = map(int, top_ids[index][:count])
                pairs = tuple(zip(ids_of_row, top[index][:count], strict=True))
                logprobs[row] = TokenLogprob(logprob=sampled[index], top=pairs)
        results += [
            SampledToken(int(ids[row]), logprobs.get(row))
            if math.isfinite(best[row])
            else _not_sampled(best[row])
            for row in range(block.rows)
        ]
    assert at == len(values), f"{len(values)} values for a plan of {at}"
    return results, wide


def _not_sampled(best: float) -> NotSampled:
    """Return why a row whose largest logit is not finite has no token; NaN wins every comparison for the largest."""
    if math.isnan(best):
        return NotSampled(
            "the logits hold NaN: the model's numbers have overflowed or its weights are damaged",
            "not_finite",
        )
    if best > 0:
        return NotSampled("the logits hold +inf: the model's numbers have overflowed", "not_finite")
    return NotSampled("every token is masked, so none can be sampled")
