"""Attention does not depend on where a sequence's blocks lie in the pool: every kernel is compared with float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha_worker.device import host_device
from medha_worker.kernels import torch_attention as attention
from medha_worker.kernels.cpu import compiled_attention as cpu_attention
from medha_worker.kernels.protocol import AttentionBackend
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention

from .test_kernels_attention import compiled, normal, plain_attention

KV_HEADS = 2
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Kind:
    """The attention that a model of this number format and shape of heads uses."""

    name: str
    backend: Callable[[], AttentionBackend]
    head_dim: int
    group: int
    dtype: torch.dtype
    tolerance: float
    """Largest error of outputs near 1 and of logarithms of sums near 10.

    bfloat16 and float16 round K, V and each partial result to 2^-8 and 2^-11. float32 rounds numbers near 10 to 2^-20, and a
    score is a sum of 10 to 64 products: ten times that is allowed.
    """


KINDS = (
    Kind("float32, compiled", lambda: compiled(16, 2), 16, 2, torch.float32, 1e-5),
    Kind(
        "float32, compiled, without a decode of its own", lambda: compiled(32, 6), 32, 6, torch.float32, 1e-5
    ),
    Kind(
        "float32, heads that do not fill registers",
        partial(TorchAttention, host_device(torch.float32)),
        10,
        2,
        torch.float32,
        1e-5,
    ),
    Kind("float32, torch", partial(TorchAttention, host_device(torch.float32)), 64, 1, torch.float32, 1e-5),
    Kind("bfloat16", partial(TorchAttention, host_device(torch.bfloat16)), 64, 2, torch.bfloat16, 3e-2),
    Kind("float16", partial(TorchAttention, host_device(torch.float16)), 80, 2, torch.float16, 4e-3),
)


@dataclass(frozen=True)
class Thresholds:
    """Numbers of tokens at which the kernels change their method."""

    in_place: int
    gathered: int
    split: int


REAL = Thresholds(attention._IN_PLACE_TOKENS, attention._GATHERED_TOKENS, cpu_attention._SPLIT_KEYS)
SMALL = Thresholds(32, 96, 100)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run torch on two threads: on one, the compiled kernel does not split decodes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def table_of(runs: list[int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return a block table of runs of exactly these lengths, each anywhere in the pool."""
    starts, at = np.zeros(len(runs), dtype=np.int64), 0
    for index in rng.permutation(len(runs)):
        starts[index] = at
        at += runs[index] + 1  # otherwise a run might continue in the next one
    return np.concatenate([np.arange(start, start + run) for start, run in zip(starts, runs, strict=True)])


def spans_of(table: npt.NDArray[np.int64], rng: np.random.Generator) -> list[SequenceSpan]:
    """Return a sequence's steps: chunks that end anywhere, with a decode at the end, and rows of other lanes.

    In every step but the last, other lanes may compute positions between its rows.
    """
    tokens = len(table) * BLOCK_TOKENS - int(rng.integers(BLOCK_TOKENS))
    spans, row, at = [], 0, 0
    while at < tokens:
        left = tokens - at
        count = min(left, int(rng.choice([1, 2, 17, 64, 130, 300, left])))
        stride = int(rng.choice([1, 1, 1, 2, 3])) if count > 1 else 1
        rows = -(-count // stride)
        spans.append(SequenceSpan(row, rows, at, table, stride=stride if rows > 1 else 1))
        row += rows
        at += count
    spans.append(SequenceSpan(row, 1, tokens - 1, table))
    spans.append(SequenceSpan(row + 1, 5, tokens, table, is_causal=False))
    return spans


def error_of(backend: AttentionBackend, kind: Kind, spans: list[SequenceSpan]) -> float:
    """Return the largest error of a step of these spans over a random pool."""
    slots = (max(int(np.max(span.blocks)) for span in spans) + 1) * BLOCK_TOKENS
    rows, heads = sum(span.row_count for span in spans), KV_HEADS * kind.group
    keys = normal(KV_HEADS, slots, kind.head_dim, seed=1).to(kind.dtype)
    values = normal(KV_HEADS, slots, kind.head_dim, seed=2).to(kind.dtype)
    q = (2 * normal(rows, heads, kind.head_dim, seed=3)).to(
        kind.dtype
    )  # a few keys decide, so that none can hide
    found, sums = backend.plan(spans, BLOCK_TOKENS).attend(q, keys, values)
    error = 0.0
    for span in spans:
        positions = np.arange(span.total_length)
        blocks = np.asarray(span.blocks)[positions // BLOCK_TOKENS]
        place = torch.from_numpy(blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS)
        seen = np.full(span.row_count, span.total_length)
        if span.is_causal:
            seen = span.context_length + 1 + span.stride * np.arange(span.row_count)
        hidden = torch.from_numpy(positions >= seen[:, None])
        by_head = q[span.rows].transpose(0, 1).double() / math.sqrt(kind.head_dim)
        repeated = [pool[:, place].repeat_interleave(kind.group, dim=0) for pool in (keys, values)]
        wanted, wanted_sums = plain_attention(by_head, repeated[0], repeated[1], hidden)
        error = max(error, float((found[span.rows].transpose(0, 1).double() - wanted).abs().max()))
        error = max(error, float((sums[span.rows].T.double() - wanted_sums).abs().max()))
    return error


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("thresholds", [REAL, SMALL], ids=["real thresholds", "small thresholds"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=pytest.mark.long)])
def test_attention_is_exact_in_every_layout(kind: Kind, thresholds: Thresholds, examples: int) -> None:
    """Runs have every length around each threshold, in any order, and chunks end anywhere in them."""
    border = thresholds.in_place // BLOCK_TOKENS
    lengths = st.sampled_from([border - 1, border, border + 1, 1, 2, 2 * border]) | st.integers(1, 3 * border)
    backend = kind.backend()

    @given(runs=st.lists(lengths, min_size=1, max_size=8), seed=st.integers(0, 1000))
    @settings(max_examples=examples)
    def run(runs: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        assert error_of(backend, kind, spans_of(table_of(runs, rng), rng)) <= kind.tolerance

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_IN_PLACE_TOKENS", thresholds.in_place)
        patch.setattr(attention, "_GATHERED_TOKENS", thresholds.gathered)
        patch.setattr(cpu_attention, "_SPLIT_KEYS", thresholds.split)
        run()
