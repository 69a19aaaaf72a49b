"""A model on FlashInfer's double, on a device with memory of its own: the same as in plain torch, also as captured decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch

from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.kernels.flashinfer.flashinfer_attention import FlashInferAttention
from medha_worker.kernels.flashinfer.flashinfer_rows import FlashInferRows
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_rows import TorchRows
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import LayerWeights, Shard, load_weights

from ..models import load_model, run_step
from .computing_device import computing_device, on_device, on_host
from .flashinfer_double import FlashInferDouble

BLOCK_TOKENS, BLOCKS = 16, 24


def on_the_double(directory: Path, double: FlashInferDouble) -> Transformer:
    config, device = ModelConfig.from_directory(directory), computing_device(torch.float16, double.work)
    shard = Shard.whole(config)
    kernels = replace(
        torch_kernels(device),
        attention=FlashInferAttention(double, device, shard.kernel_sizes(config)),
        rows=FlashInferRows(double, TorchRows()),
    )
    stored = load_weights(directory, config, shard, device=device)

    def placed(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else device.place(tensor)

    layers = [
        LayerWeights(**{field.name: placed(getattr(layer, field.name)) for field in fields(layer)})
        for layer in stored.layers
    ]
    outside = {name: placed(getattr(stored, name)) for name in ("embedding", "final_norm", "head")}
    return Transformer(config, shard, replace(stored, layers=layers, **outside), kernels=kernels)


def on_device_pool(model: Transformer) -> KVCache:
    cache = model.new_kv_cache(BLOCKS, BLOCK_TOKENS)
    cache.keys, cache.values = ([on_device(pool) for pool in pools] for pools in (cache.keys, cache.values))
    return cache


def steps() -> list[list[SequenceSpan]]:
    """Return steps of two sequences: their prompts, one in chunks, and then decodes of both."""
    tables = np.random.default_rng(0).permutation(BLOCKS).reshape(2, -1)
    first, second = tables
    return [
        [SequenceSpan(0, 40, 0, first)],
        [SequenceSpan(0, 1, 40, first), SequenceSpan(1, 30, 0, second)],
        [SequenceSpan(0, 1, 41, first), SequenceSpan(1, 25, 30, second)],
        *([SequenceSpan(0, 1, 42 + step, first), SequenceSpan(1, 1, 55 + step, second)] for step in range(3)),
    ]


def positions(spans: Sequence[SequenceSpan]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(span.context_length, span.context_length + span.row_count) for span in spans]
    )


def test_steps_equal_plain_torch_and_decodes_are_captured(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=2)
    double = FlashInferDouble()
    plain = load_model(tmp_path / "tiny", ModelConfig.from_directory(tmp_path / "tiny"), dtype=torch.float16)
    model = on_the_double(tmp_path / "tiny", double)
    pools = plain.new_kv_cache(BLOCKS, BLOCK_TOKENS), on_device_pool(model)
    model.capture_decodes(pools[1], [1, 2, 4])
    double.work.finish()
    captured = double.wrappers[1:]  # the first one was made to see whether it can be captured
    assert [wrapper.plans for wrapper in captured] == [1] * 3 * 2
    for number, spans in enumerate(steps()):
        where = positions(spans)
        tokens = where * 7 % 50
        wanted = run_step(plain, tokens, where, spans, pools[0])
        found = on_host(run_step(model, tokens, where, spans, pools[1]))
        error = float((found - wanted).float().norm() / wanted.float().norm())
        assert error < 0.005, f"step {number} differs by {error}"
        double.work.finish()
    assert sum(wrapper.plans for wrapper in captured) == 3 * 2 + 3, "three steps were of decodes alone"
