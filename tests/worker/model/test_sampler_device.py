"""Sampling on a device: the samples of the CPU, and no wait for the device but for its results."""

from __future__ import annotations

from dataclasses import fields, replace
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

from ..device_watch import fake_gpu, watched
from ..sampling_cases import CASES, Allowing, any_sampling, case, results


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


@pytest.mark.parametrize(
    "group", [0, 1, *(pytest.param(group, marks=pytest.mark.long) for group in range(2, 8))]
)
def test_a_device_samples_what_the_cpu_samples(group: int) -> None:
    """All options, alone and together: the race without gaps, and nuclei that are searched among all tokens."""
    for number in range(group, CASES, 8):
        here = TokenSampler(SparseRace(), host_device(torch.float32))
        there = TokenSampler(DenseRace(), BESIDE)
        for ours, theirs in zip(
            results(case(number), here.sample), results(case(number), there.sample), strict=True
        ):
            assert repr(list(map(comparable, ours))) == repr(list(map(comparable, theirs))), number


@pytest.mark.parametrize("top_k", [0, 3, 1500])
def test_a_flat_nucleus_takes_one_read(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nuclei of thousands of tokens, and of a `top_k` with many ties, also beside rows without either."""
    reads = counted_reads(monkeypatch)
    logits = (torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1)) * 0.01).round(decimals=2)
    options = [
        Sampling(top_p=0.95, top_k=top_k),
        Sampling(),
        Sampling(top_p=0.3, top_k=top_k),
        Sampling(top_p=0.99, top_k=top_k),
    ]

    def sequences() -> list[SequenceSampler]:
        return [plain_sequence(option, seed, 20_000) for seed, option in enumerate(options)]

    for position in range(20):
        ours, theirs = sequences(), sequences()
        for one in (*ours, *theirs):
            one.position += position
        here = TokenSampler(SparseRace(), host_device(torch.float32)).sample(logits, ours)
        reads.clear()
        assert TokenSampler(DenseRace(), BESIDE).sample(logits, theirs) == here
        assert len(reads) == 1


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each read of sampled results from a device."""
    reads: list[int] = []
    packed = token_sampler.packed

    def noting(parts: list[torch.Tensor]) -> torch.Tensor:
        reads.append(len(parts))
        return packed(parts)

    monkeypatch.setattr(token_sampler, "packed", noting)
    return reads


def plain_sequence(option: Sampling, seed: int, vocab: int) -> SequenceSampler:
    return SequenceSampler(
        option, seed=seed, sample_index=0, tokens=np.arange(8, dtype=np.int32), prompt_length=5, vocab_size=vocab
    )  # fmt: skip


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


def decode(sampler: SequenceSampler, drafts: tuple[int, ...] = ()) -> PlannedEntry:
    """Return the entry of a decode behind eight tokens; only its sampling is of interest."""
    sequence = SequenceState(np.arange(8, dtype=np.int32), sampler, None, np.arange(1), 7)
    entry = StepEntry("one", 0, (Extent(7, 1 + len(drafts)),), samples=True, drafts=drafts)
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


def verified(
    device: Device, sequences: list[SequenceSampler], rows: list[torch.Tensor], drafts: list[tuple[int, ...]]
) -> list[list[object]]:
    """Return what a step samples: for each sequence, its tokens and why it ends; `rows` are those of its logits."""
    race = SparseRace() if device.is_host else DenseRace()
    tokens = SampledTokens(lambda hidden: hidden, None, device, TokenSampler(race, device), rows[0].shape[1])
    hidden = torch.cat(rows)
    starts = np.cumsum([0, *map(len, rows)]).tolist()
    computed = [
        Computed(decode(sampler, draft), hidden, start)
        for sampler, draft, start in zip(sequences, drafts, starts, strict=False)
    ]
    return [
        [(comparable(one), reason) for one, reason in result.sampled] for result in tokens.sample(computed)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_guesses_are_verified_with_one_read(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device samples behind all guesses at once, and takes the tokens that the CPU samples one behind the other.

    Options that need the tokens before take more reads: penalties, and masks.
    """
    chance, vocab = np.random.default_rng(seed), 300
    count = int(chance.integers(1, 5))
    options = [any_sampling(chance, vocab) for _ in range(count)]
    if seed % 2:
        plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        options = [replace(option, **plain) for option in options]
    kept = [int(chance.integers(0, 4)) for _ in range(count)]

    def sequences() -> list[SequenceSampler]:
        return [plain_sequence(option, row, vocab) for row, option in enumerate(options)]

    rows = [
        torch.randn(1 + right + int(chance.integers(0, 3)), vocab, generator=torch.Generator().manual_seed(seed + 99 * row))
        for row, right in enumerate(kept)
    ]  # fmt: skip
    drafts = []
    for one, logits, right in zip(sequences(), rows, kept, strict=True):
        text = []
        for row in logits:
            sampled = TokenSampler(SparseRace(), host_device(torch.float32)).sample(row[None], [one])[0]
            text.append(sampled.token if isinstance(sampled, SampledToken) else 0)
            one.append(text[-1])
        wrong = chance.integers(0, vocab, len(logits) - 1 - right).tolist()
        drafts.append((*text[:right], *wrong))
    expected = verified(host_device(torch.float32), sequences(), rows, drafts)
    assert all(one for one in expected)
    reads = counted_reads(monkeypatch)
    assert verified(BESIDE, sequences(), rows, drafts) == expected
    if seed % 2:
        assert len(reads) == 1


def test_too_little_memory_for_all_guesses_leaves_them_to_be_verified_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(4))
    greedy = Sampling(temperature=0.0)
    drafts = [tuple(logits[:2].argmax(dim=-1).tolist())]
    launch, refused = TokenSampler.launch, []

    def scarce(self: TokenSampler, given: torch.Tensor, plan: Any) -> list[torch.Tensor]:
        if len(given) > 1:
            refused.append(len(given))
            raise MemoryError
        return launch(self, given, plan)

    monkeypatch.setattr(TokenSampler, "launch", scarce)
    found = verified(BESIDE, [plain_sequence(greedy, 1, 300)], [logits], drafts)
    assert [one[0].token for one in found[0]] == logits.argmax(dim=-1).tolist()  # type: ignore[index]
    assert refused == [3]
