"""Sampling on a device: the samples of the CPU, and no wait for the device but for its results."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from medha.shards import Segment, ShardMap
from medha.wire.messages import Extent, Sampling, StepEntry
from medha_worker.device import HOST, Device, InOrder, host_device
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.torch_race import DenseRace, SparseRace
from medha_worker.model import token_sampler
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.rank.lane_plan import PlannedEntry
from medha_worker.rank.lane_state import SequenceState
from medha_worker.rank.sampled_tokens import Computed, SampledTokens

from .device_watch import fake_gpu, watched
from .sampling_cases import CASES, Allowing, case, results


class Beside(Device):
    """A device in host memory that the sampler takes for one beside it, on which waiting costs time."""

    @property
    def is_host(self) -> bool:
        return False


BESIDE = Beside(HOST, torch.float32, HostMemory(), InOrder(HOST))


def comparable(result: SampledToken | NotSampled) -> object:
    """Return all of a result but the order of tokens that are equally probable."""
    if isinstance(result, NotSampled) or result.logprob is None:
        return result
    return result.token, result.logprob.logprob, [value for _, value in result.logprob.top]


@pytest.mark.parametrize("group", range(8))
def test_a_device_samples_what_the_cpu_samples(group: int) -> None:
    """All options, alone and together: the race without gaps, and nuclei that are flagged and searched again."""
    for number in range(group, CASES, 8):
        here = TokenSampler(SparseRace(), host_device(torch.float32))
        there = TokenSampler(DenseRace(), BESIDE)
        for ours, theirs in zip(
            results(case(number), here.sample), results(case(number), there.sample), strict=True
        ):
            assert repr(list(map(comparable, ours))) == repr(list(map(comparable, theirs))), number


def every_option(vocab: int) -> list[SequenceSampler]:
    """Return one sequence for each option that differs from its default, and one with all of them."""
    changes: dict[str, Any] = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {3: 1.5}, "logprobs": 4, "min_tokens": 6, "stop_token_ids": (5,),
    }  # fmt: skip
    known = {field.name for field in fields(Sampling)}
    assert known - changes.keys() == {"max_tokens", "ignore_eos", "grammar", "prompt_logprobs"}, (
        "an option that nothing here watches"
    )
    options = [
        Sampling(),
        Sampling(temperature=0.0),
        *(Sampling(**{name: value}) for name, value in changes.items()),
        Sampling(**changes),
    ]
    return [
        SequenceSampler(
            option, seed=row, sample_index=0, tokens=np.arange(9, dtype=np.int32), prompt_length=5, vocab_size=vocab,
            eos_token_ids=(2,), mask=Allowing(lambda _: torch.ones(vocab, dtype=torch.bool)) if row % 3 == 0 else None,
        )
        for row, option in enumerate(options)
    ]  # fmt: skip


def launched() -> tuple[int, int]:
    """Launch the sampling of every option on a fake GPU; return the copies to it in the first step and in the second."""
    vocab = 3000
    sequences = every_option(vocab)
    with watched() as watch:
        sampler = TokenSampler(DenseRace(), fake_gpu(torch.float32))
        logits = torch.zeros(len(sequences), vocab, device="cuda")
        copies = []
        # The tables of penalties are new in the first step, and brought up to date in the second.
        for token in range(2):
            plan = sampler.plan(sequences, vocab)
            planned = watch.to_device
            values = token_sampler.packed(sampler.launch(logits, plan))
            assert watch.to_device == planned
            copies.append(planned)
            for sequence in sequences:
                sequence.append(token)
        assert (values.device.type, values.dtype) == ("cuda", torch.float64)
        assert watch.found == []
        values.to(HOST)
        assert len(watch.to_host) == 1
    return copies[0], copies[1] - copies[0]


def test_nothing_waits_for_the_device_and_few_copies_go_there() -> None:
    first, second = launched()
    assert first <= 3  # numbers of the batch, numbers of the step, and masks
    assert second <= 2


@pytest.mark.parametrize(
    ("defect", "error"),
    [
        (
            lambda rows, at: rows if at is None else rows[int(at.tensor.sum()) :],
            "item|data-dependent|scalar",
        ),
        (lambda rows, at: rows if at is None else rows[at.tensor > 0], "nonzero|dynamic|data-dependent"),
        (lambda rows, at: rows if at is None else rows[torch.arange(len(at.tensor))], "assert"),
        (
            lambda rows, at: rows if at is None else rows.index_select(0, at.tensor.cpu()),
            "two devices|device",
        ),
        (lambda rows, at: rows if at is None else rows.cpu().cuda().index_select(0, at.tensor), "assert"),
    ],
    ids=[
        "reads a value",
        "masks an index",
        "index in host memory",
        "index copied back",
        "copies to the host",
    ],
)
def test_the_watch_finds(defect: Any, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sampler, "_rows", defect)
    with pytest.raises(Exception, match=error) as caught:
        launched()
    assert caught.type is not AttributeError


def decode(sampler: SequenceSampler) -> PlannedEntry:
    """Return the entry of a decode behind eight tokens; only its sampling is of interest."""
    sequence = SequenceState(np.arange(8, dtype=np.int32), sampler, None, np.arange(1), 7)
    entry = StepEntry("one", 0, (Extent(7, 1),), samples=True)
    return PlannedEntry(entry, sequence, 8, ShardMap((Segment(0, 0, 8),)), np.arange(1))


def test_only_kernels_follow_the_logits() -> None:
    """All numbers of a plan are on the device before the logits are computed, also those of penalties and masks."""
    events: list[str] = []

    class Noting(InOrder):
        def place(self, tensor: torch.Tensor) -> torch.Tensor:
            events.append("copy")
            return super().place(tensor)

    vocab, device = 300, Beside(HOST, torch.float32, HostMemory(), Noting(HOST))
    samplers = every_option(vocab)
    hidden = torch.randn(len(samplers), vocab, generator=torch.Generator().manual_seed(2))
    computed = [Computed(decode(sampler), hidden, row) for row, sampler in enumerate(samplers)]

    def logits(last: torch.Tensor) -> torch.Tensor:
        events.append("logits")
        return last

    tokens = SampledTokens(logits, None, device, TokenSampler(DenseRace(), device), vocab)
    sampled = [result.sampled[0][0] for result in tokens.sample(computed)]
    assert events == ["copy", "copy", "copy", "logits"]
    here = TokenSampler(SparseRace(), host_device(torch.float32))
    expected = here.sample(hidden, every_option(vocab))
    assert list(map(comparable, sampled)) == list(map(comparable, expected))
