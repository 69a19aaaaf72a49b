"""Samples the next token of each sequence, reproducibly.

Order of operations on a row of logits (bias, masks and penalties as in vLLM; filters as in `transformers`):

1. log-probabilities that the request asked for are those of the *raw* distribution (natural logarithm);
2. `logit_bias` is added;
3. `repetition_penalty` (prompt and output), then `frequency_penalty` and `presence_penalty` (output only);
4. stop ids are masked while there are fewer than `min_tokens` output tokens; the per-step mask hook masks
   what it forbids;
5. temperature 0 takes the largest logit; otherwise logits are divided by the temperature and go through
   `top_k`, `top_p`, `min_p`, each on the distribution that the previous one leaves;
6. one token is sampled by the Gumbel-max race: argmax of logit_i - ln(-ln(u_i)).

u_i is a hash of (seed, sample index, position, token id), so a sample depends on nothing else: not on the
rows beside it, their order, or how often the sequence was resumed. The race also tolerates noise: rounding
that moves the distribution by a total variation of d changes the token with probability O(d), while inverting
a cumulative sum would shift every boundary of the vocabulary.

Ties with the last token that `top_k` or `top_p` keeps are kept, so that the result cannot depend on the order
of a sort (bf16 logits tie often).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medha.wire.messages import FailureReason, FinishReason, Sampling, TokenLogprob

LogitsMask = Callable[[Sequence[int]], Tensor | None]
"""Per-step hook: the output ids so far -> bool [vocab] of the tokens allowed next (None: all are)."""

_NEGATIVE_INFINITY = float("-inf")
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK_64 = 2**64 - 1
# A u of 52 bits keeps the race's noise inside (-3.7, 36.8): a logit further below the best one cannot win.
_NOISE_SPAN = 42.0
_FIRST_NUCLEUS_WIDTH = 1024
_ELEMENTS_AT_ONCE = 2**22  # logits that are filtered and raced together: bounds the float64 scratch memory


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token sampled for a row, and its log-probabilities if they were requested."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class NotSampled:
    """A row from which no token can be sampled; `detail` says why."""

    detail: str
    reason: FailureReason = "internal"


class SequenceSampler:
    """The sampling parameters of one sequence, and the state of its tokens that they need.

    Penalties keep 5 bytes per vocabulary entry; sequences without penalties keep two counters.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        sample_index: int,
        tokens: npt.NDArray[np.int32],
        prompt_length: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        mask: LogitsMask | None = None,
    ) -> None:
        """`tokens` is the sequence so far, int32 [n]: prompt and, from `prompt_length` on, resumed output."""
        self.sampling = sampling
        self.stream = _stream_key(seed, sample_index)
        self.prompt_length = prompt_length
        self.position = len(tokens)
        self.mask = mask
        self.outputs = tokens[prompt_length:].tolist()
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self._stop_index = torch.tensor(
            sorted(token for token in self.stop_ids if 0 <= token < vocab_size), dtype=torch.int64
        )
        self._bias_index = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        outside = [token for token in sampling.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}; the vocabulary has {vocab_size}")
        self._seen: Tensor | None = None  # bool [vocab]: in prompt or output
        self._output_counts: Tensor | None = None  # float32 [vocab]
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.from_numpy(tokens.astype(np.int64))] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = np.bincount(tokens[prompt_length:], minlength=vocab_size)
            self._output_counts = torch.from_numpy(counts).float()

    @property
    def output_count(self) -> int:
        return self.position - self.prompt_length

    @property
    def adjusts(self) -> bool:
        """True if `adjust` would change the next row."""
        return (
            bool(self._bias_index.numel())
            or self._seen is not None
            or self._output_counts is not None
            or self.mask is not None
            or self._must_not_stop
        )

    @property
    def _must_not_stop(self) -> bool:
        return self.output_count < self.sampling.min_tokens and bool(self._stop_index.numel())

    def adjust(self, row: Tensor) -> Tensor:
        """Apply steps 2 to 4 of the module's order to `row`, float32 [vocab]; returns a new tensor."""
        row = row.clone()
        device = row.device
        if self._bias_index.numel():
            row.index_add_(0, self._bias_index.to(device), self._bias.to(device))
        if self._seen is not None:
            penalty = self.sampling.repetition_penalty
            penalised = torch.where(row > 0, row / penalty, row * penalty)
            row = torch.where(self._seen.to(device), penalised, row)
        if self._output_counts is not None:
            counts = self._output_counts.to(device)
            row -= self.sampling.frequency_penalty * counts
            row -= self.sampling.presence_penalty * (counts > 0)
        if self._must_not_stop:
            row[self._stop_index.to(device)] = _NEGATIVE_INFINITY
        allowed = self.mask(self.outputs) if self.mask is not None else None
        if allowed is not None:
            row.masked_fill_(~allowed.to(device), _NEGATIVE_INFINITY)
        return row

    def append(self, token: int) -> FinishReason | None:
        """Append `token` to the sequence; return the finish reason if it ends the sequence, else None."""
        self.position += 1
        self.outputs.append(token)
        if self._seen is not None:
            self._seen[token] = True
        if self._output_counts is not None:
            self._output_counts[token] += 1
        if token in self.stop_ids and self.output_count >= self.sampling.min_tokens:
            return "stop"
        if self.sampling.max_tokens is not None and self.output_count >= self.sampling.max_tokens:
            return "length"
        return None


def sample_tokens(logits: Tensor, sequences: Sequence[SequenceSampler]) -> list[SampledToken | NotSampled]:
    """Sample the next token of every row. Changes no state: `SequenceSampler.append` adds the token.

    Args:
        logits: float32 [rows, vocab], on any device; not changed.
        sequences: The sequence of each row.
    """
    assert logits.shape[0] == len(sequences), f"{logits.shape[0]} rows for {len(sequences)} sequences"
    if not sequences:
        return []
    adjusted = _adjusted(logits, sequences)
    best, tokens = adjusted.max(dim=-1)  # NaN wins a max, so checking `best` finds it
    can_sample = torch.isfinite(best).tolist()
    racing = [
        index
        for index, sequence in enumerate(sequences)
        if can_sample[index] and sequence.sampling.temperature > 0
    ]
    at_once = max(1, _ELEMENTS_AT_ONCE // logits.shape[1])
    for first in range(0, len(racing), at_once):
        rows = racing[first : first + at_once]
        chosen = torch.tensor(rows, device=logits.device)
        filtered = filter_logits(adjusted[chosen], [sequences[row].sampling for row in rows])
        tokens[chosen] = _race(
            filtered, [_mix(sequences[row].stream + sequences[row].position) for row in rows]
        )
    ids = tokens.tolist()
    logprobs = _logprobs(logits, sequences, ids)
    return [
        SampledToken(ids[index], logprobs.get(index)) if can_sample[index] else _not_sampled(adjusted[index])
        for index in range(len(sequences))
    ]


def filter_logits(logits: Tensor, parameters: Sequence[Sampling]) -> Tensor:
    """Apply step 5: temperature, top-k, top-p and min-p of each row; float64 [rows, vocab], -inf if filtered.

    Rows are shifted so that their largest value is 0, which keeps every temperature above 0 in range.
    """
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    scaled = logits.double()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= column([sampling.temperature for sampling in parameters])
    # An infinite temperature makes 0 / inf = 0 and -inf / inf = NaN: masked logits must stay masked.
    scaled.masked_fill_(logits == _NEGATIVE_INFINITY, _NEGATIVE_INFINITY)
    vocab = logits.shape[1]
    top_k = [min(sampling.top_k, vocab) if sampling.top_k > 0 else vocab for sampling in parameters]
    top_p = [sampling.top_p for sampling in parameters]
    min_p = [sampling.min_p for sampling in parameters]
    limited = [index for index, k in enumerate(top_k) if k < vocab]
    if limited:
        rows = scaled[limited]
        largest = rows.topk(max(top_k[index] for index in limited), dim=-1).values
        last = torch.tensor([[top_k[index] - 1] for index in limited], device=device)
        scaled[limited] = rows.masked_fill(rows < largest.gather(1, last), _NEGATIVE_INFINITY)
    for index in [index for index, p in enumerate(top_p) if p < 1.0]:
        row = scaled[index]
        row.masked_fill_(row < _nucleus_threshold(row, top_p[index]), _NEGATIVE_INFINITY)
    if any(min_p):
        # p_i < min_p * p_max, as logarithms; the largest is 0 after the shift.
        scaled.masked_fill_(scaled < column(min_p).log(), _NEGATIVE_INFINITY)
    return scaled


def _adjusted(logits: Tensor, sequences: Sequence[SequenceSampler]) -> Tensor:
    rows = [index for index, sequence in enumerate(sequences) if sequence.adjusts]
    if not rows:
        return logits
    adjusted = logits.clone()
    for index in rows:
        adjusted[index] = sequences[index].adjust(logits[index])
    return adjusted


def _nucleus_threshold(row: Tensor, top_p: float) -> Tensor:
    """Return the lowest logit of the smallest set of most probable tokens whose probabilities reach `top_p`.

    Reads only the largest logits, and more of them until they reach `top_p`, without sorting the vocabulary.
    """
    total = row.exp().sum()
    width = min(_FIRST_NUCLEUS_WIDTH, row.numel())
    while True:
        largest = row.topk(width).values
        before = largest.exp().cumsum(0) / total - largest.exp() / total
        if width == row.numel() or bool(before[-1] >= top_p):
            # The most probable token stays, however small top_p is.
            inside = max(1, int((before < top_p).sum()))
            return largest[inside - 1]
        width = min(width * 8, row.numel())


def _race(filtered: Tensor, keys: Sequence[int]) -> Tensor:
    """Return the winners, int64 [rows], of the Gumbel-max race over `filtered`, which is overwritten.

    `filtered` is float64 [rows, vocab] with maximum 0.
    """
    vocab = filtered.shape[1]
    scores = filtered.flatten()
    running = (scores > -_NOISE_SPAN).nonzero().squeeze(1)
    row = torch.div(running, vocab, rounding_mode="floor")
    key = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=filtered.device)
    uniform = _uniform(key.index_select(0, row), running - row * vocab)
    noise = uniform.neg_().log1p_().neg_().log_().neg_()
    # Logits that do not take part are far below: the best one has at least 0 - 3.7, and they get no noise.
    scores[running] += noise
    return scores.view_as(filtered).argmax(dim=-1)


def _logprobs(
    logits: Tensor, sequences: Sequence[SequenceSampler], tokens: Sequence[int]
) -> dict[int, TokenLogprob]:
    """Do step 1 for rows that ask for it: row -> log-probability of its token and the most probable ones."""
    asked = {
        index: sequence.sampling.logprobs
        for index, sequence in enumerate(sequences)
        if sequence.sampling.logprobs is not None
    }
    if not asked:
        return {}
    natural = torch.log_softmax(logits[list(asked)], dim=-1)
    sampled = natural.gather(1, torch.tensor([[tokens[index]] for index in asked], device=logits.device))
    widest = min(max(asked.values()), logits.shape[1])
    values, ids = (part.tolist() for part in natural.topk(widest, dim=-1))
    return {
        index: TokenLogprob(
            logprob=float(sampled[row]),
            top=tuple(zip(ids[row][:count], values[row][:count], strict=True)),
        )
        for row, (index, count) in enumerate(asked.items())
    }


def _not_sampled(row: Tensor) -> NotSampled:
    if bool(row.isnan().any()):
        return NotSampled(
            "the logits hold NaN: the model's numbers have overflowed or its weights are damaged",
            "not_finite",
        )
    if bool(row.isposinf().any()):
        return NotSampled("the logits hold +inf: the model's numbers have overflowed", "not_finite")
    return NotSampled("every token is masked, so none can be sampled")


# --- the random stream -------------------------------------------------------------------------------


def _mix(value: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits that looks random."""
    value &= _MASK_64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK_64
    return value ^ (value >> 31)


def _stream_key(seed: int, sample_index: int) -> int:
    return _mix(_mix(seed + _GOLDEN_GAMMA) + (sample_index + 1) * _GOLDEN_GAMMA)


def _signed(value: int) -> int:
    """Return the int64 with the bits of a 64-bit `value`: torch multiplies int64 with wrap-around."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(key: Tensor, token: Tensor) -> Tensor:
    """Return SplitMix64 of the stream `key` at counter `token`, as float64 in (0, 1); both are int64 [n]."""
    value = (token + 1).mul_(_signed(_GOLDEN_GAMMA)).add_(key)
    value.bitwise_xor_(_shift_right(value, 30)).mul_(_signed(_MIX_1))
    value.bitwise_xor_(_shift_right(value, 27)).mul_(_signed(_MIX_2))
    value.bitwise_xor_(_shift_right(value, 31))
    # 52 bits, so that adding a half stays exact and u can be neither 0 nor 1.
    return (_shift_right(value, 12).double() + 0.5) * 2.0**-52
