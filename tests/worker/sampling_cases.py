"""Seeded batches for samplers: every option, alone and combined, over several steps, with ties and unusual rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medha.wire.messages import Sampling
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler, TokenMask

Sample = Callable[[torch.Tensor, Sequence[SequenceSampler]], list[SampledToken | NotSampled]]
VOCABULARIES = (7, 300, 3_000, 20_000)
CASES = 400
STEPS = 3


@dataclass(frozen=True)
class Case:
    """Sequences, and the logits of their next steps, float32 [rows, vocab] each."""

    sequences: list[SequenceSampler]
    steps: list[torch.Tensor]


class Allowing:
    """A `TokenMask` whose tokens a function gives: output ids -> bool [vocab], or None for all."""

    fault = None

    def __init__(self, allowed: Callable[[Sequence[int]], torch.Tensor | None]) -> None:
        self._allowed = allowed

    def words(self, outputs: Sequence[int]) -> torch.Tensor | None:
        allowed = self._allowed(outputs)
        if allowed is None:
            return None
        padded = torch.nn.functional.pad(allowed.long(), (0, -len(allowed) % 32)).view(-1, 32)
        return (padded << torch.arange(32)).sum(dim=1).view(torch.int32)[::2].contiguous()

    def ahead(self, outputs: Sequence[int]) -> None: ...


def third(vocab: int, kept: int) -> TokenMask:
    """Return a hook that allows a third of the vocabulary, another one after each token; none at all if `kept` < 0."""

    def mask(outputs: Sequence[int]) -> torch.Tensor | None:
        if len(outputs) % 4 == 3:
            return None
        return (torch.arange(vocab) + len(outputs)) % 3 == kept

    return Allowing(mask)


def any_sampling(chance: np.random.Generator, vocab: int) -> Sampling:
    """Return parameters of which each has an even chance to be set."""

    def one(default: Any, *others: Any) -> Any:
        return others[int(chance.integers(len(others)))] if chance.random() < 0.5 else default

    bias = {int(token): float(chance.normal()) * 3 for token in chance.choice(vocab, 5, replace=False)}
    return Sampling(
        temperature=one(1.0, 0.0, 0.3, 0.7, 1.7, 40.0, 1e-300, math.inf),
        top_k=one(0, 1, 3, 40, 1_100, vocab, vocab + 9),
        top_p=one(1.0, 1e-9, 0.3, 0.9, 0.999, 0.9999999),
        min_p=one(0.0, 0.001, 0.1, 1.0),
        repetition_penalty=one(1.0, 0.8, 1.3),
        presence_penalty=one(0.0, 0.5, -0.7),
        frequency_penalty=one(0.0, 0.25, -0.1),
        logit_bias=one({}, bias),
        logprobs=one(None, 0, 1, 5, vocab + 1 if vocab < 10 else 20),
        stop_token_ids=one((), (0, 2), (1, vocab + 4)),
        ignore_eos=bool(chance.integers(2)),
        min_tokens=one(0, 2, 9),
        max_tokens=one(None, 4),
    )


def case(number: int) -> Case:
    """Return a batch that is the same on every machine."""
    chance = np.random.default_rng(number)
    vocab = VOCABULARIES[number % len(VOCABULARIES)]
    sequences = []
    for _ in range(int(chance.integers(1, 7))):
        prompt_length = int(chance.integers(1, 20))
        tokens = chance.integers(0, vocab, prompt_length + int(chance.integers(0, 4))).astype(np.int32)
        sequences.append(
            SequenceSampler(
                any_sampling(chance, vocab),
                seed=int(chance.integers(-(2**63), 2**63 - 1)),
                sample_index=int(chance.integers(4)),
                tokens=tokens,
                prompt_length=prompt_length,
                vocab_size=vocab,
                eos_token_ids=(3,),
                mask=third(vocab, int(chance.integers(-1, 3))) if chance.random() < 0.2 else None,
            )
        )
    spread = (0.02, 1.0, 3.0, 8.0)[int(chance.integers(4))]  # nearly flat to nearly certain
    steps = []
    for _ in range(STEPS):
        logits = torch.from_numpy(chance.normal(size=(len(sequences), vocab)).astype(np.float32)) * spread
        if chance.random() < 0.5:
            logits = logits.bfloat16().float()  # many ties
        for row in range(len(sequences)):
            if chance.random() < 0.06:
                logits[row, int(chance.integers(vocab))] = float(chance.choice([math.nan, math.inf]))
            if chance.random() < 0.1:
                logits[row, chance.random(vocab) < 0.5] = -math.inf
        steps.append(logits)
    return Case(sequences, steps)


def results(one: Case, sample: Sample) -> Iterator[list[SampledToken | NotSampled]]:
    """Yield the results of each step; what was sampled is appended to its sequence."""
    for logits in one.steps:
        sampled = sample(logits, one.sequences)
        for sequence, result in zip(one.sequences, sampled, strict=True):
            if isinstance(result, SampledToken):
                sequence.append(result.token)
        yield sampled
