"""Samples the next tokens of a step on the device of the logits, in the order of operations that `sampler` gives.

The device is given a plan, and its results are copied to the host once. Between the two, nothing waits for the
device: which operators run depends on the plan alone. The exception is a nucleus that is wider than the first
candidates that are searched for it. Those rows are flagged in the results, and sampled once more among all tokens.
On the CPU, where waiting costs nothing, the search is widened at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medha_worker.device import HOST, Device
from medha_worker.kernels.protocol import TokenRace
from medha_worker.model.flat_columns import StagedColumns
from medha_worker.model.penalty_tables import PenaltySlots, PenaltyTables
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler
from medha_worker.model.sampling_plan import (
    BlockPlan,
    Filters,
    Logprobs,
    Racing,
    SamplingPlan,
    plan_sampling,
    read_results,
)

_NEGATIVE_INFINITY = float("-inf")
FIRST_NUCLEUS_WIDTH = 1024
_WIDER = 8  # factor by which the search for a nucleus is widened on the CPU


class TokenSampler:
    """Samples tokens on one device. One thread at a time may call it: its tables follow the sequences."""

    def __init__(self, race: TokenRace, device: Device) -> None:
        self._race = race
        self._device = device
        self._slots = PenaltySlots()
        self._tables = PenaltyTables(device.torch_device)

    def sample(self, logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[SampledToken | NotSampled]:
        """Sample the next token of every row. Changes no sequence: `SequenceSampler.append` adds the token.

        Args:
            logits: float32 [rows, vocab], on this device; not changed.
            sequences: The sequence of each row.
        """
        assert logits.shape[0] == len(sequences), f"{logits.shape[0]} rows for {len(sequences)} sequences"
        if not sequences:
            return []
        results, wide = self._sampled(logits, sequences, FIRST_NUCLEUS_WIDTH)
        if wide:
            rows = self._device.place(torch.tensor(wide))
            again, _ = self._sampled(
                logits.index_select(0, rows), [sequences[row] for row in wide], logits.shape[1]
            )
            for row, result in zip(wide, again, strict=True):
                results[row] = result
        return results

    def _sampled(
        self, logits: Tensor, sequences: Sequence[SequenceSampler], nucleus_width: int
    ) -> tuple[list[SampledToken | NotSampled], list[int]]:
        plan = self.plan(sequences, logits.shape[1])
        values = self.launch(logits, plan, nucleus_width)
        # The one copy to the host, and the one wait for the device.
        return read_results(plan, values.to(HOST).tolist(), flags_nuclei=not self._device.is_host)

    def plan(self, sequences: Sequence[SequenceSampler], vocab: int) -> SamplingPlan:
        """Return the plan of the next token of each sequence; the logits need not be there yet."""
        return plan_sampling(sequences, vocab, self._slots)

    def launch(self, logits: Tensor, plan: SamplingPlan, nucleus_width: int = FIRST_NUCLEUS_WIDTH) -> Tensor:
        """Start the sampling of float32 [rows, vocab]; return what `read_results` reads, float64 [n], on the device."""
        columns = StagedColumns.staged(plan.columns, self._device.place)
        masks = self._device.place(plan.masks) if plan.masks is not None else None
        self._tables.update(plan.penalties, plan.vocab, columns)
        plan.penalties.record()
        parts: list[Tensor] = []
        for block in plan.blocks:
            rows = logits[block.first : block.first + block.rows]
            parts += self._block(rows, block, columns, masks, nucleus_width)
        return torch.cat(parts)

    def _block(
        self,
        logits: Tensor,
        block: BlockPlan,
        columns: StagedColumns,
        masks: Tensor | None,
        nucleus_width: int,
    ) -> list[Tensor]:
        adjusted = adjust_logits(logits, block, columns, masks, self._tables)
        best, tokens = adjusted.max(dim=-1)  # NaN wins a max, so that `best` shows it
        flags: list[Tensor] = []
        if block.racing is not None:
            tokens, flags = self._winners(adjusted, tokens, block.racing, columns, nucleus_width)
        logprobs = _logprobs(logits, tokens, block.logprobs, columns) if block.logprobs is not None else []
        return [part.double().flatten() for part in (tokens, best, *flags, *logprobs)]

    def _winners(
        self, adjusted: Tensor, tokens: Tensor, racing: Racing, columns: StagedColumns, nucleus_width: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return all tokens with those of the racing rows replaced, and bool [nuclei] of those that are too wide."""
        rows = columns.integers[racing.rows]
        filtered, wide = filter_logits(
            _rows(adjusted, rows), racing.filters, columns, nucleus_width, widens=self._device.is_host
        )
        winners = self._race.winners(filtered, columns.integers[racing.keys])
        return _replaced(tokens, rows, winners), [] if wide is None else [wide]


def adjust_logits(
    logits: Tensor, block: BlockPlan, columns: StagedColumns, masks: Tensor | None, tables: PenaltyTables
) -> Tensor:
    """Apply steps 2 to 4 of the order to float32 [rows, vocab]; return a new tensor if they change anything."""
    if not block.adjusts:
        return logits
    adjusted = logits.clone(memory_format=torch.contiguous_format)
    if block.bias is not None:
        values = columns.reals[block.bias.values].float()
        adjusted.view(-1).index_add_(0, columns.integers[block.bias.places], values)
    if (repetition := block.repetition) is not None:
        at = columns.integers[repetition.rows]
        penalties = columns.reals[repetition.penalties].float()[:, None]
        rows = _rows(adjusted, at)
        penalised = torch.where(rows > 0, rows / penalties, rows * penalties)
        seen = tables.seen(columns.integers[repetition.slots])
        adjusted = _replaced(adjusted, at, torch.where(seen, penalised, rows))
    if (counted := block.counted) is not None:
        at = columns.integers[counted.rows]
        counts = tables.counts(columns.integers[counted.slots])
        rows = _rows(adjusted, at) - columns.reals[counted.frequency].float()[:, None] * counts
        rows -= columns.reals[counted.presence].float()[:, None] * (counts > 0)
        adjusted = _replaced(adjusted, at, rows)
    if block.stops is not None:
        adjusted.view(-1).index_fill_(0, columns.integers[block.stops], _NEGATIVE_INFINITY)
    if block.masked is not None:
        assert masks is not None
        at = columns.integers[block.masked.rows]
        rows = _rows(adjusted, at).masked_fill(~masks[block.masked.masks], _NEGATIVE_INFINITY)
        adjusted = _replaced(adjusted, at, rows)
    return adjusted


def filter_logits(
    logits: Tensor, filters: Filters, columns: StagedColumns, nucleus_width: int, *, widens: bool
) -> tuple[Tensor, Tensor | None]:
    """Apply step 5: temperature, top-k, top-p and min-p of each row; float64 [rows, vocab], -inf if filtered.

    Rows are shifted so that their largest value is 0, which keeps every temperature above 0 in range. A nucleus
    is searched among the `nucleus_width` largest logits. If it is wider, the search either `widens` or the
    second result, bool [nuclei], is true for the row, whose first result is then wrong.
    """
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= columns.reals[filters.temperatures][:, None]
    # An infinite temperature makes 0 / inf = 0 and -inf / inf = NaN: masked logits must stay masked.
    scaled.masked_fill_(logits == _NEGATIVE_INFINITY, _NEGATIVE_INFINITY)
    if (top_k := filters.top_k) is not None:
        at = columns.integers[top_k.rows]
        rows = _rows(scaled, at)
        last = rows.topk(top_k.most, dim=-1).values.gather(1, columns.integers[top_k.last][:, None])
        scaled = _replaced(scaled, at, rows.masked_fill(rows < last, _NEGATIVE_INFINITY))
    wide = None
    if (top_p := filters.top_p) is not None:
        at = columns.integers[top_p.rows]
        rows = _rows(scaled, at)
        threshold, wide = _nucleus_thresholds(
            rows, columns.reals[top_p.probabilities][:, None], nucleus_width, widens=widens
        )
        scaled = _replaced(scaled, at, rows.masked_fill_(rows < threshold, _NEGATIVE_INFINITY))
    if filters.log_min_p is not None:
        # The largest is 0 after the shift.
        scaled.masked_fill_(scaled < columns.reals[filters.log_min_p][:, None], _NEGATIVE_INFINITY)
    return scaled, wide


def _nucleus_thresholds(
    rows: Tensor, top_p: Tensor, width: int, *, widens: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the lowest logit of the smallest set of most probable tokens whose probabilities reach `top_p`.

    `top_p` and the result are [rows, 1]. Only the `width` largest logits are read, without sorting the
    vocabulary; see `filter_logits` for sets that are wider.
    """
    vocab = rows.shape[1]
    if widens:
        # One by one: then a total is rounded the same whatever the other rows are.
        total = torch.stack([row.exp().sum() for row in rows])[:, None]
    else:
        total = rows.exp().sum(dim=-1, keepdim=True)
    width = min(width, vocab)
    threshold, wide = _thresholds_among(rows, total, top_p, width)
    if not widens:
        return threshold, wide
    while width < vocab and bool(wide.any()):
        width = min(width * _WIDER, vocab)
        at = wide.nonzero().squeeze(1)
        threshold[at], wide[at] = _thresholds_among(rows[at], total[at], top_p[at], width)
    return threshold, None


def _thresholds_among(rows: Tensor, total: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    largest = rows.topk(width, dim=-1).values
    before = largest.exp().cumsum(dim=-1) / total - largest.exp() / total
    # The most probable token stays, however small top_p is.
    inside = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    # A row whose last candidate is masked has no more tokens, though rounding may leave its sum below top_p.
    wide = (before[:, -1] < top_p[:, 0]) & (largest[:, -1] > _NEGATIVE_INFINITY)
    if width == rows.shape[1]:
        wide = torch.zeros_like(wide)
    return largest.gather(1, inside - 1), wide


def _logprobs(logits: Tensor, tokens: Tensor, asked: Logprobs, columns: StagedColumns) -> list[Tensor]:
    """Do step 1 for the rows that ask for it: log-probabilities of their tokens, and the most probable ones with ids."""
    at = columns.integers[asked.rows]
    natural = torch.log_softmax(_rows(logits, at), dim=-1)
    sampled = natural.gather(1, _rows(tokens, at)[:, None])
    values, ids = natural.topk(asked.most, dim=-1)
    return [sampled, values, ids]


def _rows(tensor: Tensor, at: Tensor) -> Tensor:
    """Return the rows at ascending indices: the tensor itself if these are all."""
    return tensor if len(at) == len(tensor) else tensor.index_select(0, at)


def _replaced(tensor: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    """Replace the rows at ascending indices, in place, or return `rows` if these are all."""
    return rows if len(at) == len(tensor) else tensor.index_copy_(0, at, rows)
