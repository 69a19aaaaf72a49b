"""A model on a device with memory of its own, by fake tensors: no operator of a step mixes it with host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medha.kv.blocks import BlockCopy
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.kernels.fast_rows import Float8Blocks, Float8Rows, Int4Rows, Int8Rows
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.kernels.protocol import PackRows
from medha_worker.kernels.quantised_rows import PlainRows, QuantisedRows
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.model.kv_scales import LayerScales
from medha_worker.model.latent_tensors import LatentWeights
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.mxfp4_rows import Mxfp4Rows
from medha_worker.model.partial_attention import Rows
from medha_worker.model.quantised_experts import QuantisedExperts
from medha_worker.model.quantised_weights import QuantisedWeight
from medha_worker.model.spread import Landing, OwnPart, RingKeys, RingQueries, SpreadPlan
from medha_worker.model.tensor_group import Alone
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import LayerWeights, Shard, load_weights

from ..device_watch import GPU, Watch, fake_gpu, watched
from ..models import run_step

BLOCK_TOKENS = 16
ROWS = 42


HOLDERS = (
    LayerWeights, LatentWeights, LayerScales, PlainRows, QuantisedRows, Mxfp4Rows, Float8Blocks, Float8Rows, Int4Rows, Int8Rows,
)  # fmt: skip


def faked(value: Any) -> Any:
    """Return weights with each tensor replaced by one on the fake device; call this in the context of a watch."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
    if isinstance(value, QuantisedWeight):
        return QuantisedWeight(faked(value.parts))
    if isinstance(value, QuantisedExperts):
        return QuantisedExperts(faked(value.each))
    if isinstance(value, (tuple, list)):
        return [faked(one) for one in value]
    if isinstance(value, HOLDERS):
        return replace(value, **{field.name: faked(getattr(value, field.name)) for field in fields(value)})
    return value


@contextmanager
def on_a_fake_device(
    checkpoint: Path,
    shard: Shard,
    dtype: torch.dtype,
    config: ModelConfig | None = None,
    pack_rows: PackRows | None = None,
) -> Iterator[tuple[Transformer, Watch]]:
    """Compute only shapes, types and devices in this context; an operator that mixes devices raises or is recorded."""
    config = config or ModelConfig.from_directory(checkpoint)
    device = fake_gpu(dtype)
    stored = load_weights(checkpoint, config, shard, device=host_device(dtype), pack_rows=pack_rows)
    with watched() as watch:
        parts = ("layers", "embedding", "final_norm", "head", "kv_scales")
        weights = replace(stored, device=device, **{name: faked(getattr(stored, name)) for name in parts})
        kernels = choose_kernels(shard.kernel_sizes(config), device)
        yield Transformer(config, shard, weights, kernels=kernels), watch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


def spans() -> list[SequenceSpan]:
    """Return a chunk after a context, both in scattered blocks, and two decodes: one in a single run, one scattered."""
    scattered, run = np.array([9, 2, 7, 4, 5, 0]), np.array([11, 12, 13])
    return [
        SequenceSpan(0, 40, 50, scattered),
        SequenceSpan(40, 1, 33, run),
        SequenceSpan(41, 1, 80, scattered[::-1]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", ["whole", "first", "last"])
def test_a_step_stays_on_its_device(checkpoint: Path, dtype: torch.dtype, stage: str) -> None:
    layers = ModelConfig.from_directory(checkpoint).num_layers
    first, last = {"whole": (0, layers), "first": (0, 1), "last": (1, layers)}[stage]
    shard = Shard(0, 1, first, last, layers)
    with on_a_fake_device(checkpoint, shard, dtype) as (model, watch):
        cache = model.new_kv_cache(16, BLOCK_TOKENS)
        entering = (
            torch.zeros(ROWS, dtype=torch.int64)
            if shard.is_first_stage
            else torch.zeros(ROWS, model.config.hidden_size, dtype=dtype)
        )
        hidden = run_step(model, entering, torch.arange(ROWS), spans(), cache)
        assert (hidden.device.type, hidden.dtype) == ("cuda", dtype)
        if shard.is_last_stage:
            logits = model.logits(hidden[[0, 41]])
            assert logits is not None
            assert (logits.device.type, logits.dtype) == ("cuda", torch.float32)
        cache.copy_blocks([BlockCopy(3, 4), BlockCopy(5, 6)])
        assert watch.found == []


def shared_with_two_lanes() -> SpreadPlan:
    """Return a plan of lane 0 that has every part: rows that stay, leave and arrive, direct queries, and both rings."""
    own = Rows(ROWS, spans())
    there = Rows(4, [SequenceSpan(0, 4, 60, np.arange(4), is_causal=False)])
    rows = torch.arange(0, 40, 2)
    ring = Rows(len(rows), [SequenceSpan(3, 5, 30, np.arange(2), is_causal=False)])
    return SpreadPlan(
        local=own,
        landing=Landing(
            (torch.arange(30), np.arange(40, 70)),
            {1: torch.arange(30, 42)},
            {2: np.array([7, 90, 3])},
        ),
        own=[OwnPart(slice(40, 41), (1,))],
        foreign=[(2, there)],
        queries=RingQueries((0, 1), rows, {0: ring, 1: there}, (1,)),
        keys=RingKeys((0, 1, 2), rows, torch.tensor([4, 1]), {0: 2, 1: 2, 2: 3}, {1: ring, 2: ring}),
        sequences=[span.rows for span in own.spans],
    )


class Links:
    """Links to two other lanes, from which something always arrives at once."""

    lane = 0

    def start(self, outgoing: Any, incoming: Any) -> None: ...

    def finish(self, started: None) -> None: ...


def test_a_step_of_several_lanes_stays_on_its_device(checkpoint: Path) -> None:
    whole = Shard.whole(ModelConfig.from_directory(checkpoint))
    with on_a_fake_device(checkpoint, whole, torch.bfloat16) as (model, watch):
        links: Any = Links()
        cache = model.new_kv_cache(16, BLOCK_TOKENS)
        model = model.in_grid(Alone(), links)
        tokens, plan = torch.zeros(ROWS, dtype=torch.int64), shared_with_two_lanes()
        hidden = run_step(model, tokens, torch.arange(ROWS), (), cache, plan)
        assert hidden.device.type == "cuda"
        assert watch.found == []


def test_kernels_made_for_another_device_are_noticed(checkpoint: Path) -> None:
    whole = Shard.whole(ModelConfig.from_directory(checkpoint))
    with on_a_fake_device(checkpoint, whole, torch.bfloat16) as (model, watch):
        cache = model.new_kv_cache(16, BLOCK_TOKENS)
        misplaced = model.with_kernels(
            replace(model.kernels, attention=TorchAttention(host_device(torch.bfloat16)))
        )
        with pytest.raises(RuntimeError, match="two devices"):
            run_step(misplaced, torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS), spans(), cache)
        at = torch.arange(3)
        assert cache.keys[0][:, at].device.type == "cuda"  # an operator that fake tensors let pass
        assert watch.found == ["aten.index.Tensor"]
