"""RoPE's angles are those of `transformers`, bit for bit, out to a million tokens."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medha_worker.model.rope import RopeConfig, inverse_frequencies, rotation_table

CASES: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(theta=500_000.0), {"rope_type": "default"}),
    "linear": (RopeConfig("linear", 10_000.0, 8.0), {"rope_type": "linear", "factor": 8.0}),
    "llama3": (
        RopeConfig("llama3", 500_000.0, 32.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        RopeConfig("yarn", 1_000_000.0, 4.0, 32_768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    ),
    "yarn, own attention factor": (
        RopeConfig("yarn", 10_000.0, 16.0, 4096, attention_factor=0.9),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 0.9,
        },
    ),
    "yarn, two mscales, no truncation": (
        RopeConfig(
            "yarn",
            10_000.0,
            40.0,
            4096,
            beta_fast=24.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": False,
        },
    ),
    "dynamic within the original length": (
        RopeConfig("dynamic", 10_000.0, 4.0),
        {"rope_type": "dynamic", "factor": 4.0},
    ),
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_angles_equal_transformers_bit_for_bit(case: str, head_dim: int) -> None:
    ours, theirs = CASES[case]
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=1 << 20,
        rope_parameters=theirs | {"rope_theta": ours.theta},
    )
    near, far = torch.arange(4096), torch.arange((1 << 20) - 4096, 1 << 20)
    positions = torch.cat([near, torch.arange(4096, 1 << 20, 997), far])
    cos, sin = rotation_table(*inverse_frequencies(ours, head_dim), positions)
    wanted_cos, wanted_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert torch.equal(cos, wanted_cos[0, :, : head_dim // 2])
    assert torch.equal(sin, wanted_sin[0, :, : head_dim // 2])


def test_the_table_of_a_few_positions_is_that_part_of_the_whole() -> None:
    frequencies, factor = inverse_frequencies(CASES["yarn"][0], 64)
    whole = rotation_table(frequencies, factor, torch.arange(3000))
    part = rotation_table(frequencies, factor, torch.tensor([2999, 17]))
    assert all(torch.equal(some, every[[2999, 17]]) for some, every in zip(part, whole, strict=True))
