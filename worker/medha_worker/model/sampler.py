"""Samples the next token of each sequence, reproducibly.

Order of operations on a row of logits (bias, masks and penalties as in vLLM; filters as in `transformers`):

1. log-probabilities that the request asked for are those of the *raw* distribution (natural logarithm);
2. `logit_bias` is added;
3. `repetition_penalty` (prompt and output), then `frequency_penalty` and `presence_penalty` (output only);
4. stop ids are masked while there are fewer than `min_tokens` output tokens; the sequence's mask, which follows
   its grammar, masks what it forbids;
5. temperature 0 takes the largest logit; otherwise logits are divided by the temperature and go through
   `top_k`, `top_p`, `min_p`, each on the distribution that the previous one leaves;
6. one token is sampled by the Gumbel-max race: argmax of logit_i - ln(-ln(u_i)).

u_i is a hash of (seed, sample index, position, token id), so a sample depends on nothing else: not on the
rows beside it, their order, or how often the sequence was resumed. The race also tolerates noise: rounding
that moves the distribution by a total variation of d changes the token with probability O(d), while inverting
a cumulative sum would shift every boundary of the vocabulary.

Ties with the last token that `top_k` or `top_p` keeps are kept, so that the result cannot depend on the order
of a sort (bf16 logits tie often).

This file has the state of a sequence, in host memory. `sampling_plan` lays out what a step needs of it, and
`token_sampler` computes that on the device of the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from medha.wire.messages import FailureReason, FinishReason, Sampling, TokenLogprob
from medha_worker.kernels.random_stream import stream_key


class TokenMask(Protocol):
    """The tokens that a sequence may have next, as a pure function of its output ids so far."""

    @property
    def fault(self) -> str | None:
        """Return why no token is allowed any more; None if the mask is in order."""

    def words(self, outputs: Sequence[int]) -> Tensor | None:
        """Return int32 [ceil(vocab / 32)], of which bit t % 32 of word t // 32 allows token t; None: all are allowed."""

    def ahead(self, outputs: Sequence[int]) -> None:
        """Ask for the words of these outputs, which are needed next, so that they are computed while something else runs."""


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
    """The sampling parameters of one sequence, and the tokens that they depend on."""

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
        mask: TokenMask | None = None,
    ) -> None:
        """`tokens` is the sequence so far, int32 [n]: prompt and, from `prompt_length` on, resumed output."""
        outside = [token for token in sampling.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}; the vocabulary has {vocab_size}")
        self.sampling = sampling
        self.stream = stream_key(seed, sample_index)
        self.prompt, self.prompt_length = tokens[:prompt_length], prompt_length
        self.position = len(tokens)
        self.mask = mask
        self.outputs: list[int] = tokens[prompt_length:].tolist()
        self.stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self.stops_in_vocab = sorted(token for token in self.stop_ids if 0 <= token < vocab_size)
        self.penalises_repetition = sampling.repetition_penalty != 1.0
        self.penalises_counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self.output_counts = Counter(self.outputs) if self.penalises_counts else Counter[int]()

    @property
    def output_count(self) -> int:
        return self.position - self.prompt_length

    @property
    def must_not_stop(self) -> bool:
        """True if the next token may be none of `stops_in_vocab`."""
        return self.output_count < self.sampling.min_tokens

    @property
    def reads_tokens(self) -> bool:
        """True if the next token depends on what the tokens before it are, beside the logits."""
        return self.mask is not None or self.penalises_repetition or self.penalises_counts

    def after(self, tokens: int) -> SequenceSampler:
        """Return the sampler of the token after `tokens` more than are known; `reads_tokens` must be False."""
        assert not self.reads_tokens, "its next token depends on what the tokens before it are"
        sampler = copy(self)
        sampler.position += tokens
        return sampler

    def ahead(self) -> SequenceSampler:
        """Return a sampler of the same tokens, whose `position` may be moved to tokens that are only guessed.

        It follows what is appended here, and has neither mask nor log-probabilities.
        """
        sampler = copy(self)
        sampler.sampling = replace(self.sampling, logprobs=None)
        sampler.mask = None
        return sampler

    def append(self, token: int) -> FinishReason | None:
        """Append `token` to the sequence; return the finish reason if it ends the sequence, else None."""
        self.position += 1
        self.outputs.append(token)
        if self.penalises_counts:
            self.output_counts[token] += 1
        if token in self.stop_ids and self.output_count >= self.sampling.min_tokens:
            return "stop"
        if self.sampling.max_tokens is not None and self.output_count >= self.sampling.max_tokens:
            return "length"
        if self.mask is not None:
            self.mask.ahead(self.outputs)
        return None
