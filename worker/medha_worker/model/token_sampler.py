"""Samples the next tokens of a step on the device of the logits, in the order of operations that `sampler` gives.

The device is given a plan, and its results are copied to the host once. Between the two, nothing waits for the
device: which operators run depends on the plan alone. So the search for a nucleus covers as many tokens as the options of
the rows can leave, which is the whole vocabulary without `top_k`. On the CPU, where it costs nothing to read the numbers, the
search begins with few tokens, and is widened where that is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from medha_worker.device import HOST, Device
from medha_worker.kernels.protocol import TokenRace
from medha_worker.model.flat_columns import Column
from medha_worker.model.penalty_tables import PenaltySlots, PenaltyTables
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler
from medha_worker.model.sampling_plan import (
    BatchPlan,
    BlockPlan,
    Filters,
    Logprobs,
    Racing,
    RowIndex,
    SamplingPlan,
    plan_batch,
    plan_step,
    read_results,
)

_NEGATIVE_INFINITY = float("-inf")
_FIRST_NUCLEUS_WIDTH = 1024  # tokens among which the CPU searches for a nucleus first
_BATCHES = 4  # plans that are kept: with several stages, as many batches take turns
_WIDER = 8  # factor by which the CPU widens its search for a nucleus


class TokenSampler:
    """Samples tokens on one device. One thread at a time may call it: its tables follow the sequences."""

    def __init__(self, race: TokenRace, device: Device) -> None:
        self._race = race
        self._device, self._is_host = device, device.is_host
        self._slots = PenaltySlots()
        self._tables = PenaltyTables(device.torch_device)
        self._bits = bits_of_bytes(device)
        self._batches: deque[BatchPlan] = deque(maxlen=_BATCHES)

    def sample(
        self, logits: Tensor, sequences: Sequence[SequenceSampler], plan: SamplingPlan | None = None
    ) -> list[SampledToken | NotSampled]:
        """Sample the next token of every row. Changes no sequence: `SequenceSampler.append` adds the token.

        Args:
            logits: float32 [rows, vocab], on this device; not changed.
            sequences: The sequence of each row.
            plan: Their plan if it was made before the logits.
        """
        assert logits.shape[0] == len(sequences), f"{logits.shape[0]} rows for {len(sequences)} sequences"
        if not sequences:
            return []
        vocab = logits.shape[1]
        plan = plan or self.plan(sequences, vocab)
        assert vocab == plan.batch.vocab, f"{vocab} tokens, and {plan.batch.vocab} were planned"
        parts = self.launch(logits, plan)
        if not self._is_host:
            # The one copy to the host, and the one wait for the device.
            parts = list(torch.split(packed(parts).to(HOST), [len(part) for part in parts]))
        return read_results(plan, [part.tolist() for part in parts])

    def plan(self, sequences: Sequence[SequenceSampler], vocab: int) -> SamplingPlan:
        """Return the plan of the next token of each sequence, on the device; the logits need not be there yet."""
        plan = plan_step(self._batch_of(sequences, vocab), sequences)
        plan.columns.stage(self._device)
        return plan if plan.masks is None else plan._replace(masks=self._device.place(plan.masks))

    def _batch_of(self, sequences: Sequence[SequenceSampler], vocab: int) -> BatchPlan:
        for batch in self._batches:
            if batch.holds_for(sequences, vocab):
                return batch
        batch = plan_batch(sequences, vocab, self._slots)
        batch.columns.stage(self._device)
        self._batches.append(batch)
        return batch

    def launch(self, logits: Tensor, plan: SamplingPlan) -> list[Tensor]:
        """Start the sampling of float32 [rows, vocab]; return what `read_results` reads as parts, [n] each, on the device."""
        if plan.penalties is not None:
            self._tables.update(plan.penalties, plan.batch.vocab)
            plan.penalties.record()
        masks = None if plan.masks is None else forbidden(plan.masks, self._bits, plan.batch.vocab)
        parts: list[Tensor] = []
        for block, keys in zip(plan.batch.blocks, plan.keys, strict=True):
            rows = logits[block.first : block.first + block.rows] if block.rows < len(logits) else logits
            parts += self._block(rows, block, keys, masks)
        return parts

    def _block(
        self, logits: Tensor, block: BlockPlan, keys: Column | None, masks: Tensor | None
    ) -> list[Tensor]:
        adjusted = adjust_logits(logits, block, masks, self._tables) if block.adjusts else logits
        best, tokens = adjusted.max(dim=-1)  # NaN wins a max, so that `best` shows it
        if block.racing is not None:
            assert keys is not None
            tokens = self._winners(adjusted, tokens, block.racing, keys)
        logprobs = _logprobs(logits, tokens, block.logprobs) if block.logprobs is not None else []
        return [tokens, best, *logprobs]

    def _winners(self, adjusted: Tensor, tokens: Tensor, racing: Racing, keys: Column) -> Tensor:
        """Return all tokens with those of the racing rows replaced."""
        filtered = filter_logits(_rows(adjusted, racing.rows), racing.filters, widens=self._is_host)
        return _replaced(tokens, racing.rows, self._race.winners(filtered, keys.tensor))


def bits_of_bytes(device: Device) -> Tensor:
    """Return the eight bits of a byte, uint8 [8], the lowest one first."""
    places = torch.arange(8, dtype=torch.int32, device=device.torch_device)
    return (torch.ones_like(places) << places).to(torch.uint8)


def forbidden(words: Tensor, bits: Tensor, vocab: int) -> Tensor:
    """Return bool [rows, vocab], true where the bit of a token is 0 in `words`, int32 [rows, ceil(vocab / 32)].

    `bits` are those of `bits_of_bytes`.

    Words are little-endian, as they are on all processors that torch runs on.
    """
    by_byte = words.view(torch.uint8)[:, :, None] & bits
    return (by_byte == 0).view(len(words), -1)[:, :vocab]


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return the numbers of tensors, [n] each, as one, float64 [n]."""
    return torch.cat([part.double() for part in parts])


def adjust_logits(logits: Tensor, block: BlockPlan, masks: Tensor | None, tables: PenaltyTables) -> Tensor:
    """Apply steps 2 to 4 of the order to float32 [rows, vocab]; return a new tensor if a row needs them."""
    adjusted = logits.clone(memory_format=torch.contiguous_format) if block.adjusts_in_place else logits
    if block.bias is not None:
        adjusted.view(-1).index_add_(0, block.bias.places.tensor, block.bias.values.tensor)
    if (repetition := block.repetition) is not None:
        rows, penalties = _rows(adjusted, repetition.rows), repetition.penalties.tensor
        penalised = torch.where(rows > 0, rows / penalties, rows * penalties)
        seen = tables.seen(repetition.slots)
        adjusted = _replaced(adjusted, repetition.rows, torch.where(seen, penalised, rows))
    if (counted := block.counted) is not None:
        rows, counts = _rows(adjusted, counted.rows), tables.counts(counted.slots)
        if counted.frequency is not None:
            rows = rows - counted.frequency.tensor * counts
        if counted.presence is not None:
            rows = rows - counted.presence.tensor * (counts > 0)
        adjusted = _replaced(adjusted, counted.rows, rows)
    if block.stops is not None:
        adjusted.view(-1).index_fill_(0, block.stops.tensor, _NEGATIVE_INFINITY)
    if block.masked is not None and masks is not None:
        rows = _rows(adjusted, block.masked.rows)
        rows = rows.masked_fill(masks[block.masked.masks], _NEGATIVE_INFINITY)
        adjusted = _replaced(adjusted, block.masked.rows, rows)
    return adjusted


def filter_logits(logits: Tensor, filters: Filters, *, widens: bool) -> Tensor:
    """Apply step 5: temperature, top-k, top-p and min-p of each row; float64 [rows, vocab], -inf if filtered.

    Rows are shifted so that their largest value is 0, which keeps every temperature above 0 in range. A nucleus is
    searched among as many logits as it can have, or, if the search `widens`, among few first: that reads the numbers.
    """
    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= filters.temperatures.tensor
    # An infinite temperature makes 0 / inf = 0 and -inf / inf = NaN: masked logits must stay masked.
    scaled.masked_fill_(logits == _NEGATIVE_INFINITY, _NEGATIVE_INFINITY)
    if (top_k := filters.top_k) is not None:
        rows = _rows(scaled, top_k.rows)
        last = rows.topk(top_k.most, dim=-1).values.gather(1, top_k.last.tensor)
        scaled = _replaced(scaled, top_k.rows, rows.masked_fill_(rows < last, _NEGATIVE_INFINITY))
    if (top_p := filters.top_p) is not None:
        rows = _rows(scaled, top_p.rows)
        if widens:
            threshold = _widened_thresholds(rows, top_p.probabilities.tensor)
        else:
            total = rows.exp().sum(dim=-1, keepdim=True)
            threshold, _ = _thresholds_among(rows, total, top_p.probabilities.tensor, top_p.most)
        scaled = _replaced(scaled, top_p.rows, rows.masked_fill_(rows < threshold, _NEGATIVE_INFINITY))
    if filters.log_min_p is not None:
        # The largest is 0 after the shift.
        scaled.masked_fill_(scaled < filters.log_min_p.tensor, _NEGATIVE_INFINITY)
    return scaled


def _widened_thresholds(rows: Tensor, top_p: Tensor) -> Tensor:
    """Return the lowest logit of the smallest set of most probable tokens whose probabilities reach `top_p`.

    `top_p` and the result are [rows, 1]. Few of the largest logits are read first, without sorting the vocabulary, and
    more of them for the rows that need them.
    """
    vocab = rows.shape[1]
    # One by one: then a total is rounded the same whatever the other rows are.
    total = torch.stack([row.exp().sum() for row in rows])[:, None]
    width = min(_FIRST_NUCLEUS_WIDTH, vocab)
    threshold, wide = _thresholds_among(rows, total, top_p, width)
    while wide is not None and bool(wide.any()):
        width = min(width * _WIDER, vocab)
        at = wide.nonzero().squeeze(1)
        threshold[at], still_wide = _thresholds_among(rows[at], total[at], top_p[at], width)
        if still_wide is None:
            break
        wide[at] = still_wide
    return threshold


def _thresholds_among(rows: Tensor, total: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the thresholds as the `width` largest logits give them, and bool [rows] of those that need more of them.

    If these are all logits, the second result is None.
    """
    if width == rows.shape[1]:
        largest = rows.sort(dim=-1, descending=True).values
    else:
        largest = rows.topk(width, dim=-1).values
    before = largest.exp().cumsum(dim=-1) / total - largest.exp() / total
    # The most probable token stays, however small top_p is.
    inside = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = largest.gather(1, inside - 1)
    if width == rows.shape[1]:
        return threshold, None
    # A row whose last candidate is masked has no more tokens, though rounding may leave its sum below top_p.
    return threshold, (before[:, -1] < top_p[:, 0]) & (largest[:, -1] > _NEGATIVE_INFINITY)


def _logprobs(logits: Tensor, tokens: Tensor, asked: Logprobs) -> list[Tensor]:
    """Do step 1 for the rows that ask for it: return log-probabilities of their tokens, and of the most probable ones."""
    natural = torch.log_softmax(_rows(logits, asked.rows), dim=-1)
    sampled = natural.gather(1, _rows(tokens, asked.rows)[:, None])
    values, ids = natural.topk(asked.most, dim=-1)
    return [sampled.flatten(), values.flatten(), ids.flatten()]


def _rows(tensor: Tensor, index: RowIndex) -> Tensor:
    """Return some rows, or the tensor itself if these are all."""
    return tensor if index is None else tensor.index_select(0, index.tensor)


def _replaced(tensor: Tensor, index: RowIndex, rows: Tensor) -> Tensor:
    """Replace some rows, in place, or return `rows` if these are all."""
    return rows if index is None else tensor.index_copy_(0, index.tensor, rows)
