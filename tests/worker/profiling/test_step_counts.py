"""Counts of a step: each operator once, views never, and the launches and bytes of whole steps within their bounds."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmark import benchmark
from medha.cost.hardware import LLAMA3_8B, LLAMA3_70B, ModelShape
from medha_worker.profiling.step_counts import Counting, StepCounts

arithmetic = benchmark("gpu_arithmetic")


def counted(run: object, *shapes: tuple[int, ...]) -> StepCounts:
    """Return the counts of `run`, called with bfloat16 tensors of these shapes on a fake device."""
    with FakeTensorMode(), torch.inference_mode():
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        with Counting() as counting:
            run(*tensors)  # type: ignore[operator]
    return counting.counts


def test_a_product_is_one_launch_that_reads_and_writes_each_matrix_once() -> None:
    counts = counted(lambda x, w: x @ w, (8, 64), (64, 32))
    assert (dict(counts.launches), counts.flops) == ({"mm": 1}, 2 * 8 * 64 * 32)
    assert counts.bytes == 2 * (8 * 64 + 64 * 32 + 8 * 32)


def test_views_and_memory_are_no_launches() -> None:
    counts = counted(lambda x: x[2:4].view(2, 8, 8).transpose(0, 1).new_empty(100), (8, 64))
    assert (counts.total_launches, counts.bytes) == (0, 0)


def test_a_write_through_a_view_is_a_launch() -> None:
    def write(x: torch.Tensor) -> None:
        x[:, 1:3] = 0.0
        x[0].add_(x[1])

    assert counted(write, (8, 64)).launches == {"fill_": 1, "add_": 1}


def test_a_lookup_reads_only_the_rows_that_it_returns() -> None:
    def look_up(table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(torch.zeros(3, dtype=torch.int64, device="cuda"), table)

    counts = counted(look_up, (1000, 64))
    assert counts.launches["embedding"] == 1
    assert counts.bytes < 2 * 2 * 3 * 64 + 100


@pytest.mark.parametrize(
    ("model", "tensor", "most_launches"), [(LLAMA3_8B, 1, 12), (LLAMA3_70B, 8, 14)], ids=str
)
def test_launches_and_bytes_of_a_decode_step_are_bounded(
    model: ModelShape, tensor: int, most_launches: int
) -> None:
    row = arithmetic.predicted(arithmetic.Case(model, tensor, 16, 8192, 1))
    assert row["launches_per_layer"] <= most_launches
    assert row["needed_gigabytes"] <= row["gigabytes"] <= 1.1 * row["needed_gigabytes"]


def test_flops_of_a_chunk_are_those_of_the_models_shape() -> None:
    row = arithmetic.predicted(arithmetic.Case(LLAMA3_8B, 1, 1, 0, 8192))
    assert row["teraflops"] == pytest.approx(LLAMA3_8B.prefill_flops(8192) / 1e12, rel=0.01)
