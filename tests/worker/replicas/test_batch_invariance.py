"""`determinism: batchInvariant`: every position gets the same logits to the bit, whatever shares its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from medha.api.determinism import Determinism
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec, ParallelismSpec
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import Device, host_device
from medha_worker.kernels.batch_invariant import differences
from medha_worker.kernels.cpu.compiled_kernels import compiled_kernels
from medha_worker.kernels.name_table import choose_kernels, torch_kernels
from medha_worker.kernels.protocol import Kernels, KernelSizes
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.model.tensor_group import Alone, RankOrder, in_rank_order
from medha_worker.profiling import step_timer
from medha_worker.rank import engine
from medha_worker.rank.step_recorder import StepRecorder

from ..model.test_model_transformer import save_reference
from ..random_steps import STRATEGIES, Planner, Query
from ..ranks import Ranks

CPU = host_device(torch.float32)
SIZES = KernelSizes(query_heads=8, kv_heads=2, head_dim=64, hidden_size=512, intermediate_size=1408)


class RowsByBatch(TorchRows):
    """A norm that adds up in another order for many rows, as a library's reduction does."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if len(x) < 8:
            return super().rms_norm(x, weight, eps)
        mean = x.square().flip(-1).cumsum(-1)[..., -1:] / x.shape[-1]
        return x * torch.rsqrt(mean + eps) * weight


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        KernelSizes(9, 3, 64, 576, 1536),
        KernelSizes(4, 4, 16, 64, 96),  # rows of plain torch
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_get_the_same_bits_alone_in_a_chunk_and_beside_others(sizes: KernelSizes, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert choose_kernels(sizes, CPU, "batchInvariant").name == "batch-invariant"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda kernels: replace(kernels, products=torch_kernels(CPU).products), ["products"]),
        (lambda kernels: replace(kernels, rows=RowsByBatch()), ["norms"]),
        (
            lambda kernels: replace(
                kernels, attention=compiled_kernels(SIZES, CPU, torch_kernels(CPU)).attention
            ),
            ["attention"],
        ),
        (lambda kernels: replace(kernels, attention=torch_kernels(CPU).attention), ["attention"]),
    ],
)
def test_the_check_finds_operators_that_depend_on_the_batch(
    change: Callable[[Kernels], Kernels], found: list[str]
) -> None:
    assert differences(change(choose_kernels(SIZES, CPU, "batchInvariant")), SIZES, CPU) == found


@pytest.mark.parametrize("window_tokens", [None, 90, 220])
def test_a_row_whose_scores_overflow_does_not_change_the_rows_beside_it(window_tokens: int | None) -> None:
    """Without the true maximum first, a task whose sum overflows starts again, and all its rows round differently."""
    kernels = choose_kernels(SIZES, CPU, "batchInvariant")
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 256, 64, generator=generator) for _ in range(2))
    q = torch.randn(100, 8, 64, generator=generator)
    q[50] = 1000 * keys[0, 128]
    blocks = list(range(16))

    def attended(first: int, last: int) -> torch.Tensor:
        span = SequenceSpan(0, last - first, 150 + first, blocks)
        return kernels.attention.plan([span], 16, window_tokens).attend(q[first:last], keys, values)[0]

    whole = attended(0, 100)
    assert whole.isfinite().all()
    assert torch.equal(torch.cat([attended(0, 50), attended(50, 51), attended(51, 100)]), whole)


@pytest.mark.parametrize(
    ("device", "sizes", "reason"),
    [
        (host_device(torch.bfloat16), SIZES, "float32"),
        (CPU, replace(SIZES, head_dim=12), "heads of 12 values"),
        (replace(CPU, torch_device=torch.device("cuda")), SIZES, "tried out"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_field_the_reason_and_the_fix(
    device: Device, sizes: KernelSizes, reason: str
) -> None:
    with pytest.raises(ConfigInvalid) as raised:
        choose_kernels(sizes, device, "batchInvariant")
    text = str(raised.value)
    assert "spec.determinism is batchInvariant" in text
    assert reason in text
    assert "set spec.determinism to bestEffort" in text


class Known:
    """A group of ranks whose values are known."""

    captures = True

    def __init__(self, everyone: list[torch.Tensor]) -> None:
        self._everyone = everyone

    def all_reduce(self, x: torch.Tensor) -> None:
        rank = next(index for index, part in enumerate(x) if part.any())
        others = torch.stack(self._everyone)
        others[rank] = 0
        x.add_(others)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return torch.cat([x] * len(widths), dim=1)


def test_sums_over_ranks_are_taken_in_rank_order() -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([0.25])]
    for rank, own in enumerate(values):
        x = own.clone()
        group = in_rank_order(Known(values), rank, len(values))
        group.all_reduce(x)
        assert x.item() == 0.25, "another order gives 1.25 or 1"
        assert group.gather_last_dim(torch.ones(1, 1), [1, 1]).shape == (1, 2)  # type: ignore[union-attr]
    pair = Known(values[:2])
    assert in_rank_order(pair, 0, 2) is pair


GRIDS = [
    (1, 1, 1),
    *(pytest.param(shape, marks=pytest.mark.long) for shape in [(2, 1, 1), (4, 1, 1), (1, 2, 1)]),
    (2, 2, 1),
]
QUERIES = [Query(90, 4), Query(37, 5, family=1), Query(120, 3, family=2), Query(60, 5), Query(5, 6, family=3)]


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_every_position_has_the_same_logits_however_steps_are_formed(
    shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """Chunks, batches, block tables and cached prefixes differ from plan to plan; the first runs every request alone."""
    save_reference(
        tmp_path,
        "llama",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        initializer_range=0.1,
    )
    ranks = Ranks(Topology(*shape), tmp_path, determinism="batchInvariant")
    try:
        seen: dict[tuple[str, int], torch.Tensor] = {}
        for seed in range(5):
            planner = Planner(1, 1000, False, np.random.default_rng(seed), kv_blocks=256)
            planner.run(QUERIES, list(STRATEGIES), one_by_one=seed == 0)
            _, logits = ranks.run(
                planner.steps, planner.prompts, kv_blocks=planner.kv_blocks, block_tokens=planner.block_tokens
            )
            for place, row in logits.items():
                assert torch.equal(seen.setdefault(place, row), row), (seed, place)
        assert len(seen) > 250
    finally:
        ranks.close()


def test_ranks_and_profiles_take_the_promise_from_the_manifest(tmp_path: Path) -> None:
    init_checkpoint(tmp_path, preset="tiny", seed=0, force=True)
    promises: list[tuple[Determinism, str]] = [("batchInvariant", "batch-invariant"), ("bestEffort", "cpu")]
    for determinism, name in promises:
        measured = step_timer.load(
            tmp_path, max_model_len=None, dtype="float32", threads=1, determinism=determinism
        )
        assert measured.kernels.name == name
        spec = MedhaReplicaSpec(
            model=ModelSpec(name="tiny", source=ModelSource(path="unused")),
            parallelism=ParallelismSpec(tensor=4),
            threads=1,
            determinism=determinism,
        )
        settings = RankSettings(
            rank=1, spec=spec, model_directory=tmp_path, control="", tokens="", key_file=tmp_path,
            controller_key_file=tmp_path,
        )  # fmt: skip
        loaded = engine.load(settings, StepRecorder(1), lambda *_: None)
        assert loaded._model.kernels.name == name
        group = loaded._in_grid(AnyGrid(), lambda: None)._group  # type: ignore[arg-type]
        assert isinstance(group, RankOrder) == (determinism == "batchInvariant")


class AnyLanes:
    def finish(self, started: object) -> None: ...


class AnyGrid:
    tensor_group = Alone()
    plane = AnyLanes()
