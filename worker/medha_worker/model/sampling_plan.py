"""The plan of one step's sampling: all that the device needs besides the logits, as numbers in host memory.

It depends on the sequences alone, so it can be made and copied to the device before the logits are computed. Most of it
stays the same for as long as the same sequences are sampled together: that part is the plan of the *batch*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from medha.wire.messages import Sampling, TokenLogprob
from medha_worker.kernels.random_stream import position_key
from medha_worker.model.flat_columns import Column, Columns
from medha_worker.model.penalty_tables import PenaltySlot, PenaltySlots, PenaltyUpdate, Slots, plan_update
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler

WORD_BITS = 32  # tokens in a word of a mask
ELEMENTS_AT_ONCE = 2**22  # logits that are filtered and raced together: bounds the float64 scratch memory

RowIndex = Column | None
"""Ascending indices of some rows, int64 [n]; None: all rows."""


@dataclass(frozen=True, slots=True)
class Bias:
    """The `logit_bias` of all rows: places in the flat block, and values."""

    places: Column
    values: Column


@dataclass(frozen=True, slots=True)
class Repetition:
    """The rows of a block with a repetition penalty, their rows in the table, and the penalties."""

    rows: RowIndex
    slots: Slots
    penalties: Column


@dataclass(frozen=True, slots=True)
class Counted:
    """The rows of a block with a frequency or presence penalty, their rows in the table, and the penalties.

    A penalty is None if it is 0 for all of them.
    """

    rows: RowIndex
    slots: Slots
    frequency: Column | None
    presence: Column | None


@dataclass(frozen=True, slots=True)
class Masked:
    """The rows of a block that have a mask, and those of the step's masks that belong to them."""

    rows: RowIndex
    masks: slice


@dataclass(frozen=True, slots=True)
class TopK:
    """The racing rows that keep only their most probable tokens, and the index of the last one kept."""

    rows: RowIndex
    last: Column
    most: int


@dataclass(frozen=True, slots=True)
class TopP:
    """The racing rows that keep a nucleus, their `top_p`, and the number of most probable tokens that are searched.

    All tokens are searched, unless each of the rows has a `top_k`. Then the largest `top_k` is enough: any further
    token that `top_k` has left ties with the last one, and is kept or dropped with it.
    """

    rows: RowIndex
    probabilities: Column
    most: int


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of the filters of the racing rows."""

    temperatures: Column
    top_k: TopK | None
    top_p: TopP | None
    log_min_p: Column | None  # of all racing rows; -inf keeps every token


@dataclass(frozen=True, slots=True)
class Racing:
    """The rows of a block that are sampled at a temperature above 0, and their filters."""

    rows: RowIndex
    in_block: tuple[int, ...]
    filters: Filters


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The rows of a block for which log-probabilities are requested, and how many of the most probable ones."""

    rows: RowIndex
    in_block: tuple[int, ...]
    counts: tuple[int, ...]
    most: int


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan of consecutive rows that are sampled together; a part is None where no row needs it."""

    first: int
    rows: int
    bias: Bias | None
    repetition: Repetition | None
    counted: Counted | None
    stops: Column | None  # places in the flat block that are masked
    masked: Masked | None
    racing: Racing | None
    logprobs: Logprobs | None
    adjusts: bool  # whether any part before `racing` is there
    adjusts_in_place: bool  # whether they change single logits of the block, or those of some rows


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The part of a plan that holds for each step of the same sequences."""

    vocab: int
    blocks: tuple[BlockPlan, ...]
    columns: Columns  # of the blocks
    penalised: tuple[tuple[int, PenaltySlot], ...]  # rows with penalties
    hooked: tuple[int, ...]  # rows with a mask
    must_not_stop: tuple[tuple[int, bool], ...]  # rows with a least number of tokens; True: below it
    sequences: tuple[ref[SequenceSampler], ...]  # weak: a free row of the tables belongs to no sequence

    def holds_for(self, sequences: Sequence[SequenceSampler], vocab: int) -> bool:
        """True if this is the plan of these sequences as they are now."""
        return (
            vocab == self.vocab
            and [one() for one in self.sequences] == list(sequences)
            and all(sequences[row].must_not_stop == must_not for row, must_not in self.must_not_stop)
        )


class SamplingPlan(NamedTuple):
    """The plan of all rows of a step."""

    batch: BatchPlan
    columns: Columns  # of the step alone
    keys: tuple[Column | None, ...]  # of each block's racing rows
    masks: Tensor | None  # int32 [masked rows, ceil(vocab / 32)]: a bit for each token; None: all are allowed
    penalties: PenaltyUpdate | None


def plan_batch(sequences: Sequence[SequenceSampler], vocab: int, slots: PenaltySlots) -> BatchPlan:
    """Return what stays the same while these sequences are sampled together."""
    columns = Columns()
    at_once = max(1, ELEMENTS_AT_ONCE // vocab)
    rows = list(enumerate(sequences))
    hooked = tuple(row for row, one in rows if one.mask is not None)
    return BatchPlan(
        vocab,
        tuple(
            _plan_block(first, sequences[first : first + at_once], vocab, slots, columns, hooked)
            for first in range(0, len(sequences), at_once)
        ),
        columns,
        penalised=tuple(
            (row, slots.slot_of(one)) for row, one in rows if one.penalises_repetition or one.penalises_counts
        ),
        hooked=hooked,
        must_not_stop=tuple((row, one.must_not_stop) for row, one in rows if one.sampling.min_tokens),
        sequences=tuple(map(ref, sequences)),
    )


def plan_step(batch: BatchPlan, sequences: Sequence[SequenceSampler]) -> SamplingPlan:
    """Return the plan of the next token of a batch's sequences, and ask for their masks."""
    columns = Columns()
    keys = tuple([_keys(block, sequences, columns) for block in batch.blocks])
    masks = _masks([sequences[row] for row in batch.hooked], batch.vocab) if batch.hooked else None
    penalised = [(sequences[row], slot) for row, slot in batch.penalised]
    penalties = plan_update(penalised, batch.vocab, columns) if penalised else None
    return SamplingPlan(batch, columns, keys, masks, penalties)


def _keys(block: BlockPlan, sequences: Sequence[SequenceSampler], columns: Columns) -> Column | None:
    if block.racing is None:
        return None
    racing = [sequences[block.first + row] for row in block.racing.in_block]
    return columns.integers([position_key(one.stream, one.position) for one in racing])


def plan_filters(parameters: Sequence[Sampling], vocab: int, columns: Columns) -> Filters:
    """Return the filters of rows with these parameters."""
    top_k = [(row, one.top_k) for row, one in enumerate(parameters) if 0 < one.top_k < vocab]
    top_p = [(row, one.top_p) for row, one in enumerate(parameters) if one.top_p < 1.0]
    min_p = [one.min_p for one in parameters]
    rows = len(parameters)
    return Filters(
        temperatures=columns.doubles_of_rows([one.temperature for one in parameters]),
        top_k=TopK(
            _index([row for row, _ in top_k], rows, columns),
            columns.integers_of_rows([k - 1 for _, k in top_k]),
            max(k for _, k in top_k),
        )
        if top_k
        else None,
        top_p=TopP(
            _index([row for row, _ in top_p], rows, columns),
            columns.doubles_of_rows([p for _, p in top_p]),
            min(vocab, max(parameters[row].top_k or vocab for row, _ in top_p)),
        )
        if top_p
        else None,
        # p_i < min_p * p_max, as logarithms.
        log_min_p=columns.doubles_of_rows([math.log(one) if one else -math.inf for one in min_p])
        if any(min_p)
        else None,
    )


def _index(some: Sequence[int], rows: int, columns: Columns) -> RowIndex:
    return None if len(some) == rows else columns.integers(some)


def _masks(hooked: Sequence[SequenceSampler], vocab: int) -> Tensor | None:
    masks = [one.mask.words(one.outputs) for one in hooked if one.mask is not None]
    if all(mask is None for mask in masks):
        return None
    everything = torch.full((-(-vocab // WORD_BITS),), -1, dtype=torch.int32)
    return torch.stack([everything if mask is None else mask for mask in masks])


def _plan_block(
    first: int,
    sequences: Sequence[SequenceSampler],
    vocab: int,
    slots: PenaltySlots,
    columns: Columns,
    hooked: tuple[int, ...],
) -> BlockPlan:
    rows = list(enumerate(sequences))
    places = bias, stops = _bias(rows, vocab, columns), _stops(rows, vocab, columns)
    by_rows = repetition, counted, masked = (
        _repetition(rows, slots, columns),
        _counted(rows, slots, columns),
        _masked(first, rows, columns, hooked),
    )
    return BlockPlan(
        first,
        len(sequences),
        bias,
        repetition,
        counted,
        stops,
        masked,
        racing=_racing(rows, vocab, columns),
        logprobs=_logprobs(rows, vocab, columns),
        adjusts=any(part is not None for part in (*places, *by_rows)),
        adjusts_in_place=any(part is not None for part in places)
        or any(part is not None and part.rows is not None for part in by_rows),
    )


_Rows = Sequence[tuple[int, SequenceSampler]]


def _bias(rows: _Rows, vocab: int, columns: Columns) -> Bias | None:
    biased = [(row, one.sampling.logit_bias) for row, one in rows if one.sampling.logit_bias]
    if not biased:
        return None
    return Bias(
        columns.integers([row * vocab + token for row, bias in biased for token in bias]),
        columns.singles([value for _, bias in biased for value in bias.values()]),
    )


def _repetition(rows: _Rows, slots: PenaltySlots, columns: Columns) -> Repetition | None:
    penalised = [(row, one) for row, one in rows if one.penalises_repetition]
    if not penalised:
        return None
    return Repetition(
        _index([row for row, _ in penalised], len(rows), columns),
        slots.rows_of((one for _, one in penalised), columns),
        columns.singles_of_rows([one.sampling.repetition_penalty for _, one in penalised]),
    )


def _counted(rows: _Rows, slots: PenaltySlots, columns: Columns) -> Counted | None:
    penalised = [(row, one) for row, one in rows if one.penalises_counts]
    if not penalised:
        return None
    frequency = [one.sampling.frequency_penalty for _, one in penalised]
    presence = [one.sampling.presence_penalty for _, one in penalised]
    return Counted(
        _index([row for row, _ in penalised], len(rows), columns),
        slots.rows_of((one for _, one in penalised), columns),
        columns.singles_of_rows(frequency) if any(frequency) else None,
        columns.singles_of_rows(presence) if any(presence) else None,
    )


def _stops(rows: _Rows, vocab: int, columns: Columns) -> Column | None:
    places = [row * vocab + token for row, one in rows if one.must_not_stop for token in one.stops_in_vocab]
    return columns.integers(places) if places else None


def _masked(first: int, rows: _Rows, columns: Columns, hooked: tuple[int, ...]) -> Masked | None:
    own = [row for row, one in rows if one.mask is not None]
    if not own:
        return None
    start = hooked.index(first + own[0])
    return Masked(_index(own, len(rows), columns), slice(start, start + len(own)))


def _racing(rows: _Rows, vocab: int, columns: Columns) -> Racing | None:
    racing = [(row, one) for row, one in rows if one.sampling.temperature > 0]
    if not racing:
        return None
    in_block = tuple(row for row, _ in racing)
    return Racing(
        _index(in_block, len(rows), columns),
        in_block,
        plan_filters([one.sampling for _, one in racing], vocab, columns),
    )


def _logprobs(rows: _Rows, vocab: int, columns: Columns) -> Logprobs | None:
    asked = [(row, one.sampling.logprobs) for row, one in rows if one.sampling.logprobs is not None]
    if not asked:
        return None
    in_block, counts = tuple(row for row, _ in asked), tuple(count for _, count in asked)
    return Logprobs(_index(in_block, len(rows), columns), in_block, counts, min(max(counts), vocab))


def read_results(plan: SamplingPlan, parts: Iterable[Sequence[float]]) -> list[SampledToken | NotSampled]:
    """Return the result of each row. `parts` are the numbers of what `TokenSampler.launch` computes."""
    results: list[SampledToken | NotSampled] = []
    part = iter(parts)
    for block in plan.batch.blocks:
        ids, best = next(part), next(part)
        logprobs = _read_logprobs(block.logprobs, part) if block.logprobs is not None else {}
        results += [
            SampledToken(int(token), logprobs.get(row)) if math.isfinite(largest) else _not_sampled(largest)
            for row, (token, largest) in enumerate(zip(ids, best, strict=True))
        ]
    return results


def _read_logprobs(asked: Logprobs, part: Iterator[Sequence[float]]) -> dict[int, TokenLogprob]:
    """Return the log-probabilities by row of the block."""
    sampled, values, ids = next(part), next(part), next(part)
    logprobs = {}
    for index, (row, count) in enumerate(zip(asked.in_block, asked.counts, strict=True)):
        top = slice(index * asked.most, index * asked.most + min(count, asked.most))
        pairs = zip(map(int, ids[top]), values[top], strict=True)
        logprobs[row] = TokenLogprob(logprob=sampled[index], top=tuple(pairs))
    return logprobs


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
