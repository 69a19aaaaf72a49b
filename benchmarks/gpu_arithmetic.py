"""Count what steps of large models ask of a GPU, and predict what they take on an H100, before a GPU has run them.

    python benchmarks/gpu_arithmetic.py --quick
    python benchmarks/gpu_arithmetic.py --json benchmarks/results/gpu_arithmetic.json

The engine's own code runs on fake `cuda` tensors, and every operator is counted: launches, bytes and FLOPs. Llama-3-8B is
on one rank; of Llama-3-70B, one of eight tensor ranks is counted. FlashInfer's kernels are counted as its sources have them:
two launches for attention whose keys are split (and one that turns the base of log-sum-exps that are needed), one for each row
operator.

Predicted seconds are those of the core's predictor for these models and an H100 (docs/predictor.md): the scheduler plans with them.
MFU and MBU divide the counted FLOPs and bytes by them and by the data sheet's rates. So the first run on a GPU confirms or
refutes every number here. Nothing in this file was measured on a GPU.

* overhead: bytes that a decode step moves beyond weights, KV and logits, which no engine can avoid;
* launches: what launching costs a decode that is not captured, at 4 us a launch, over the step's predicted time;
* graphs: memory of the captured steps' fixed inputs and results, and of their activations, which all share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from harness import Row, claim, exit_with, parser, report, table
from random_llama import random_model
from torch._subclasses.fake_tensor import FakeTensorMode

from medha.cost.hardware import H100, LLAMA3_8B, LLAMA3_70B, ModelShape, profile_for
from medha.cost.predictor import Predictor, Work
from medha.topology import Topology
from medha_worker.device import Device, InOrder
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.decode_graphs import captured_sizes
from medha_worker.profiling.step_counts import Counting, StepCounts

GPU = torch.device("cuda", 0)
BLOCK_TOKENS = 64
LAUNCH_SECONDS = 4e-6  # of an operator of torch from Python, on a current server's core
MODELS = ((LLAMA3_8B, 1), (LLAMA3_70B, 8))
DECODES = ((1, 1024), (16, 8192), (64, 8192), (256, 1024), (1, 131_072), (1, 900_000), (8, 131_072))
CHUNKS = ((0, 8192), (120_000, 8192), (500_000, 2048), (120_000, 512), (120_000, 32))


@dataclass(frozen=True, slots=True)
class Case:
    """A step of one kind: `sequences` that compute `count` tokens each, behind `context` tokens."""

    model: ModelShape
    tensor: int
    sequences: int
    context: int
    count: int

    def __str__(self) -> str:
        what = f"{self.sequences} decodes" if self.count == 1 else f"chunk of {self.count:,}"
        return f"{self.model.name} TP{self.tensor}, {what} behind {self.context:,}"

    @property
    def works(self) -> list[Work]:
        return [Work(self.context, self.count)] * self.sequences


class Counted:
    """Stands for FlashInfer's kernels: makes their results' shapes, and counts what they launch, read and compute."""

    def __init__(self, counts: StepCounts) -> None:
        self.counts = counts
        self._spans: Sequence[SequenceSpan] = ()

    def plan(self, spans: Sequence[SequenceSpan], block_tokens: int, *_: Any) -> Counted:
        self._spans = spans
        tables = 4.0 * sum(-(-span.total_length // block_tokens) for span in spans)
        self.counts.add("copies of tables", 3, tables)
        return self

    def for_graph(self, *_: int) -> None:
        return None

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        *_: torch.Tensor | None,
        needs_sums: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = sum(Work(span.context_length, span.row_count).pairs for span in self._spans)
        read = sum(span.total_length for span in self._spans)
        kv_heads, _slots, head_dim = keys.shape
        moved = 2.0 * keys.element_size() * (read * kv_heads * head_dim + q.numel())
        self.counts.add("attention", 2 + needs_sums, moved, 4.0 * pairs * q.shape[1] * head_dim)
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, _: float) -> torch.Tensor:
        self.counts.add("rms_norm", 1, x.element_size() * (2.0 * x.numel() + weight.numel()))
        return x.new_empty(x.shape)

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, _: float
    ) -> torch.Tensor:
        self.counts.add("add_rms_norm", 1, hidden.element_size() * (4.0 * hidden.numel() + weight.numel()))
        return part

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, _: torch.Tensor) -> None:
        self.counts.add("rotate", 1, 2.0 * heads.element_size() * (heads.numel() + cos.numel()))

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.counts.add("silu_multiply", 1, 1.5 * gate_up.element_size() * gate_up.numel())
        return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)

    gelu_multiply = silu_multiply


class CountedGroup:
    """Stands for the other tensor ranks: an all-reduce is one launch that reads and writes its rows."""

    captures = True

    def __init__(self, counts: StepCounts) -> None:
        self._counts = counts

    def all_reduce(self, x: torch.Tensor) -> None:
        self._counts.add("all_reduce", 1, 2.0 * x.element_size() * x.numel())

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        self._counts.add("gather", 1, 4.0 * x.shape[0] * (x.shape[1] + sum(widths)))
        return x.new_empty(x.shape[0], sum(widths))


def counted(case: Case) -> StepCounts:
    """Run the engine's code for one rank's part of a step on fake tensors, and return what it asks of the device."""
    device = Device(GPU, torch.bfloat16, HostMemory(), InOrder(GPU))
    blocks = -(-(case.context + case.count) // BLOCK_TOKENS)
    spans = [
        SequenceSpan(row * case.count, case.count, case.context, np.arange(row * blocks, (row + 1) * blocks))
        for row in range(case.sequences)
    ]
    rows = case.sequences * case.count
    with FakeTensorMode():
        layers = case.model.layers
        model = random_model(
            case.model, layers, device, torch_kernels(device), tensor=case.tensor, copies=False
        )
        cache = model.new_kv_cache(case.sequences * blocks, BLOCK_TOKENS)
        with Counting() as counting:
            counts = counting.counts
            stand_in = Counted(counts)
            plain = torch_kernels(device)
            kernels = replace(plain, name="counted", attention=stand_in, rows=stand_in)
            group = CountedGroup(counts)
            model = model.with_kernels(kernels).in_grid(group, _NoLanes())
            positions = torch.zeros(rows, dtype=torch.int64)
            hidden = model.forward(
                torch.zeros(rows, dtype=torch.int64), model.prepare(positions, spans, cache)
            )
            model.logits(hidden[: case.sequences])
    return counts


class _NoLanes:
    lane = 0

    def start(self, *_: Any) -> None: ...

    def finish(self, *_: Any) -> None: ...


def predicted(case: Case) -> Row:
    """Return a step's counts, predicted seconds, MFU and MBU of one rank."""
    counts = counted(case)
    topology = Topology(case.tensor, 1, 1)
    seconds = Predictor(profile_for(case.model, H100, topology), topology).latency_seconds(case.works)
    rows = case.sequences * case.count
    read = case.sequences * (case.context + case.count)
    needed = (case.model.weights_bytes + read * case.model.kv_bytes_per_token) / case.tensor
    needed -= (
        case.model.vocab * case.model.hidden * case.model.dtype_bytes / case.tensor
    )  # rows of the embedding alone
    needed += 4 * case.sequences * case.model.vocab / case.tensor  # logits
    return {
        "step": str(case),
        "launches": counts.total_launches,
        "launches_per_layer": counts.total_launches // case.model.layers,
        "gigabytes": round(counts.bytes / 1e9, 3),
        "needed_gigabytes": round(needed / 1e9, 3),
        "teraflops": round(counts.flops / 1e12, 4),
        "predicted_ms": round(1e3 * seconds, 3),
        "mfu": round(counts.flops / seconds / H100.peak_flops, 3),
        "mbu": round(counts.bytes / seconds / H100.memory_bytes_per_second, 3),
        "launch_share_uncaptured": round(counts.total_launches * LAUNCH_SECONDS / seconds, 3),
        "rows": rows,
    }


def graph_bytes(model: ModelShape, tensor: int, most_rows: int, most_blocks: int) -> float:
    """Return the memory of all captured steps: two of each size, whose activations share one pool."""
    fixed = sum(
        2 * (rows * (8 + 8 + 8 + 4) + 4 * most_blocks + rows * model.hidden * model.dtype_bytes)
        for rows in captured_sizes(most_rows)
    )
    wide = (
        2 * model.intermediate // tensor
        + model.hidden
        + (model.query_heads + 2 * model.kv_heads) * model.head_dim // tensor
    )
    return fixed + most_rows * wide * model.dtype_bytes


def main() -> int:
    arguments = parser(__doc__, quick="four steps of the small model").parse_args()
    cases = [
        *(Case(model, tensor, count, context, 1) for model, tensor in MODELS for count, context in DECODES),
        *(Case(model, tensor, 1, context, count) for model, tensor in MODELS for context, count in CHUNKS),
    ]
    if arguments.quick:
        cases = [case for case in cases if case.model is LLAMA3_8B and case.context in (8192, 120_000)]
    rows = [predicted(case) for case in cases]
    decodes = [row for row, case in zip(rows, cases, strict=True) if case.count == 1]
    graphs = [
        {"model": model.name, "megabytes": round(graph_bytes(model, tensor, 256, 16_384) / 1e6, 1)}
        for model, tensor in MODELS
    ]
    claims = [
        claim("launches of a decode step in each layer", max(row["launches_per_layer"] for row in decodes), "launches",
              14, "less"),
        claim("bytes that a decode step moves, over those of weights, KV and logits",
              max(row["gigabytes"] / row["needed_gigabytes"] for row in decodes), "ratio", 1.3, "less"),
    ]  # fmt: skip
    columns = [
        "step",
        "launches",
        "gigabytes",
        "teraflops",
        "predicted_ms",
        "mfu",
        "mbu",
        "launch_share_uncaptured",
    ]
    table(columns, [[row[name] for name in columns] for row in rows])
    print("\nCaptured steps of up to 256 decodes:")
    table(["model", "megabytes"], [list(row.values()) for row in graphs])
    return report(claims, arguments.json, {"steps": rows, "graphs": graphs})


if __name__ == "__main__":
    exit_with(main)
