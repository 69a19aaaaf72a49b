"""A sum over ranks that is added and normed by one kernel gives the hidden states of two kernels, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.tensor_group import Alone
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

from ..models import load_model, run_step

BLOCK_TOKENS = 16


class Fusing(TorchRows):
    """Rows that are added and normed at once, in plain torch, so that both ways round alike."""

    def __init__(self) -> None:
        self.fused: list[int] = []  # rows of each call

    def add_rms_norm(  # type: ignore[override]
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        self.fused.append(len(hidden))
        hidden.add_(part)
        return part.copy_(self.rms_norm(hidden, weight, eps))


class Tight(Fusing):
    """Rows on a rank without memory for the MLP of a whole step."""

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        if len(gate_up) > 5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().silu_multiply(gate_up)


class TightUnfused(Tight):
    def add_rms_norm(self, *_: Any) -> None: ...  # type: ignore[override]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


@pytest.fixture(scope="module")
def with_result_norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "gemma"
    init_checkpoint(directory, preset="tiny", seed=0, architecture="gemma3_text")
    return directory


def hidden_states(checkpoint: Path, rows: TorchRows, counts: tuple[int, ...], tensor: int) -> torch.Tensor:
    """Return the hidden states of one of `tensor` ranks, which adds nothing of the others, for sequences of these lengths."""
    config = ModelConfig.from_directory(checkpoint)
    shard = Shard(0, tensor, 0, config.num_layers, config.num_layers)
    model: Transformer = load_model(checkpoint, config, shard)
    links: Any = object()
    model = model.with_kernels(replace(model.kernels, rows=rows)).in_grid(Alone(), links)
    spans, start, block = [], 0, 0
    for count in counts:
        blocks = -(-count // BLOCK_TOKENS)
        spans.append(SequenceSpan(start, count, 0, range(block, block + blocks)))
        start, block = start + count, block + blocks
    positions = torch.cat([torch.arange(count) for count in counts])
    cache = model.new_kv_cache(block, BLOCK_TOKENS)
    return run_step(model, positions % config.vocab_size, positions, spans, cache)


@pytest.mark.parametrize(
    ("counts", "each_layer"), [((1, 3, 5), 2), ((600,), 1)], ids=["short", "in two tiles of the MLP"]
)
def test_fused_and_separate_kernels_agree(checkpoint: Path, counts: tuple[int, ...], each_layer: int) -> None:
    fusing = Fusing()
    found = hidden_states(checkpoint, fusing, counts, tensor=2)
    assert torch.equal(found, hidden_states(checkpoint, TorchRows(), counts, tensor=2))
    layers = ModelConfig.from_directory(checkpoint).num_layers
    # The last layer has no norm behind its MLP, and tiles are not normed together.
    assert fusing.fused == [sum(counts)] * (layers * each_layer - (each_layer == 2))


def test_sequences_that_run_alone_for_lack_of_memory_are_normed_alike(checkpoint: Path) -> None:
    fusing, counts = Tight(), (1, 3, 5)
    found = hidden_states(checkpoint, fusing, counts, tensor=2)
    assert len(fusing.fused) > 2
    assert found.isfinite().all()
    assert torch.equal(found, hidden_states(checkpoint, TightUnfused(), counts, tensor=2))


def test_a_rank_alone_adds_within_its_product(checkpoint: Path) -> None:
    fusing = Fusing()
    hidden_states(checkpoint, fusing, (4,), tensor=1)
    assert fusing.fused == []


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_result_is_normed_before_it_is_added(with_result_norms: Path, tensor: int) -> None:
    """1,100 rows are more than are normed at once."""
    for counts, is_fused in (((1, 3, 5), True), ((1100,), False)):
        fusing = Fusing()
        found = hidden_states(with_result_norms, fusing, counts, tensor)
        assert torch.equal(found, hidden_states(with_result_norms, TorchRows(), counts, tensor))
        assert (len(fusing.fused) == 3) == is_fused
