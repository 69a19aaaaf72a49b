"""Tests of the layers that a rank loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from medha.topology import Topology
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.rank.engine import _shard


@pytest.mark.parametrize(("layers", "stages", "expected"), [(24, 2, [12, 12]), (9, 4, [3, 2, 2, 2])])
def test_stages_are_even_for_a_prefill_however_large_the_output_head_is(
    tmp_path: Path, layers: int, stages: int, expected: list[int]
) -> None:
    """In models of up to a billion parameters, the output head is as large as several layers."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = replace(ModelConfig.from_directory(tmp_path / "tiny"), num_layers=layers, vocab_size=150_000)
    shards = [_shard(config, Topology(stream=stages), rank, chunk_tokens=2048) for rank in range(stages)]
    assert [shard.last_layer - shard.first_layer for shard in shards] == expected
    assert config.vocab_size * config.hidden_size > config.linear_flops_per_token / 4, "mostly head"


def test_the_last_stage_has_fewer_layers_where_its_output_head_weighs_in_chunks_that_are_small(
    tmp_path: Path,
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = replace(ModelConfig.from_directory(tmp_path / "tiny"), num_layers=24, vocab_size=150_000)
    layer_weights = (config.linear_flops_per_token / 2 - config.vocab_size * config.hidden_size) / 24
    head_layers = (
        config.vocab_size * config.hidden_size / layer_weights / 32
    )  # one row of a chunk of 32 samples
    shards = [_shard(config, Topology(stream=2), rank, chunk_tokens=32) for rank in range(2)]
    first, last = (shard.last_layer - shard.first_layer for shard in shards)
    assert first + last == 24
    assert first > last
    assert abs(first - last - head_layers) <= 1
