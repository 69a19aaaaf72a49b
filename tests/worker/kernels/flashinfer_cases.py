"""Steps that the planner can make, run by the FlashInfer adapter on a double, and by plain torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from medha_worker.device import host_device
from medha_worker.kernels.protocol import KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention

from .computing_device import computing_device, on_device, on_host
from .flashinfer_double import FlashInferDouble

HEAD_DIM = 64
PACKAGE = "medha_worker.kernels.flashinfer"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two roundings of a result of size 1."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence: `SequenceSpan` without its place."""

    rows: int
    context: int
    is_causal: bool = True
    stride: int = 1
    first_key: int = 0
    first_stride: int = 0

    def span(self, row: int, table: Sequence[int] | npt.NDArray[np.int64]) -> SequenceSpan:
        """Return the span whose first row is `row`."""
        window = self.first_key, self.first_stride
        return SequenceSpan(row, self.rows, self.context, table, self.is_causal, self.stride, *window)


@dataclass(frozen=True)
class Case:
    """A step, and the model and pool that it runs on."""

    chunks: Sequence[Chunk]
    block_tokens: int = 4
    kv_heads: int = 2
    group: int = 2
    dtype: torch.dtype = torch.bfloat16
    window_tokens: int | None = None
    has_sinks: bool = False
    seed: int = 0

    @property
    def sizes(self) -> KernelSizes:
        return KernelSizes(self.kv_heads * self.group, self.kv_heads, HEAD_DIM, 256, 512)

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    def spans(self) -> list[SequenceSpan]:
        """Return the spans, with blocks scattered over the pool, and the blocks of some sequences shared."""
        scattered = np.random.default_rng(self.seed).permutation(self.blocks())
        spans, row, used = [], 0, 0
        for chunk in self.chunks:
            needed = -(-chunk.span(row, ()).total_length // self.block_tokens)
            spans.append(chunk.span(row, scattered[used : used + needed]))
            row, used = row + chunk.rows, used + needed
        return spans

    def blocks(self) -> int:
        """Return the blocks of the pool: those that are needed, and some more."""
        tokens = (chunk.context + 1 + chunk.rows * chunk.stride for chunk in self.chunks)
        return sum(-(-count // self.block_tokens) for count in tokens) + 3

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return q, both pools and sinks, on the host; q has gaps between rows, as a part of all heads has."""
        random = torch.Generator().manual_seed(self.seed)
        heads = torch.randn(self.rows, self.kv_heads * (self.group + 2), HEAD_DIM, generator=random).to(
            self.dtype
        )
        shape = self.kv_heads, self.blocks() * self.block_tokens, HEAD_DIM
        keys, values = (torch.randn(*shape, generator=random).to(self.dtype) for _ in range(2))
        sinks = torch.randn(self.kv_heads * self.group, generator=random) if self.has_sinks else None
        return heads[:, : self.kv_heads * self.group], keys, values, sinks


def adapter(case: Case, double: FlashInferDouble, package: str = PACKAGE) -> Any:
    """Return the adapter of `package` for a case, on the double."""
    made = importlib.import_module(f"{package}.flashinfer_attention").FlashInferAttention
    device = computing_device(case.dtype, double.work)
    return made(double, device, case.sizes)


def attended(case: Case, attention: Any, step: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the adapter's result, on the host. `step` is what was planned, if it was planned before."""
    q, keys, values, sinks = (None if one is None else on_device(one) for one in case.tensors())
    step = step or attention.plan(case.spans(), case.block_tokens, case.window_tokens)
    output, sums = step.attend(q, keys, values, sinks)
    return on_host(output), on_host(sums)


def assert_equals_torch(case: Case, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Assert that a result equals plain torch's in float32, up to the rounding of its dtype."""
    q, keys, values, sinks = case.tensors()
    step = TorchAttention(host_device(torch.float32)).plan(
        case.spans(), case.block_tokens, case.window_tokens
    )
    output, sums = step.attend(q.float(), keys.float(), values.float(), sinks)
    tolerance = TOLERANCE[case.dtype]
    assert found[0].dtype == case.dtype
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[0].float(), output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], sums, rtol=1e-5, atol=1e-4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a step of any spans, on any model and pool."""
    window = draw(st.none() | st.integers(1, 30))
    chunks = []
    for _ in range(draw(st.integers(1, 5))):
        rows, context = draw(st.integers(1, 9)), draw(st.integers(0, 25))
        kinds = (
            ["causal", "strided"] if window is not None or context == 0 else ["causal", "strided", "context"]
        )
        kind = draw(st.sampled_from(kinds))
        stride = draw(st.integers(2, 4)) if kind == "strided" else 1
        first_key = first_stride = 0
        if window is None and draw(st.booleans()):  # the span says where each row's window begins
            first_key = draw(st.integers(-9, context if kind != "context" else context - 1))
            first_stride = draw(st.integers(0, stride)) if kind != "context" else 0
        chunks.append(Chunk(rows, context, kind != "context", stride, first_key, first_stride))
    return Case(
        chunks,
        block_tokens=draw(st.sampled_from([1, 3, 4, 16])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 7])),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        window_tokens=window,
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )
