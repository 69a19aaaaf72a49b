"""The linears of layers by name, and the memory that they take in a quantised format."""

from __future__ import annotations

from dataclasses import replace

import pytest

from medha.model.latent_shape import LatentShape
from medha.model.linear_sizes import ExpertNames, LinearSizes, SparseBlock
from medha.model.quantisation import decode

from .test_quantisation import AWQ, DEEPSEEK, W4A16

DENSE = LinearSizes(2, hidden=256, query_heads=4, query_width=256, kv_width=128, intermediate=512)
MIXTRAL = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
SPARSE = replace(DENSE, sparse=SparseBlock(frozenset({1}), 4, 384, names=MIXTRAL))
LATENT = replace(
    DENSE,
    latent=LatentShape(query_rank=128, kv_rank=64, plain_dim=32, rope_dim=16, value_dim=48),
    sparse=SparseBlock(frozenset({1}), 4, 384, shared_intermediate=128, names=ExpertNames()),
)


def test_a_dense_layer_has_seven_linears() -> None:
    found = DENSE.shared(1)
    assert len(found) == 7
    assert found["model.layers.1.self_attn.k_proj"] == (128, 256)
    assert found["model.layers.1.mlp.down_proj"] == (256, 512)
    assert DENSE.of_experts(1) == {}


def test_a_sparse_layer_has_three_for_each_expert_and_no_mlp() -> None:
    assert len(SPARSE.shared(0)) == 7
    assert len(SPARSE.shared(1)) == 4
    assert SPARSE.of_experts(0) == {}
    found = SPARSE.of_experts(1)
    assert len(found) == 12
    assert found["model.layers.1.block_sparse_moe.experts.3.w2"] == (256, 384)
    assert SPARSE.split_inputs == {"o_proj", "down_proj", "w2"}


def test_latent_attention_has_linears_of_its_own_and_shared_experts_are_shared() -> None:
    shapes = {name.removeprefix("model.layers.1."): shape for name, shape in LATENT.shared(1).items()}
    assert shapes == {
        "self_attn.q_a_proj": (128, 256),
        "self_attn.q_b_proj": (4 * 48, 128),
        "self_attn.kv_a_proj_with_mqa": (80, 256),
        "self_attn.kv_b_proj": (4 * 80, 64),
        "self_attn.o_proj": (256, 4 * 48),
        "mlp.shared_experts.gate_proj": (128, 256),
        "mlp.shared_experts.up_proj": (128, 256),
        "mlp.shared_experts.down_proj": (256, 128),
    }
    assert LATENT.latent is not None
    at_once = replace(LATENT, latent=replace(LATENT.latent, query_rank=0))
    assert at_once.shared(0)["model.layers.0.self_attn.q_proj"] == (4 * 48, 256)


def test_the_mean_size_of_a_weight_counts_scales_and_ignored_layers() -> None:
    count = sum(rows * columns for rows, columns in DENSE.shared(0).values())
    assert DENSE.mean_bytes(None, 2) is None
    quantised = decode(W4A16)  # layer 0 is ignored
    for element_bytes, group_bytes in ((2, 2 + 2), (4, 4)):  # in 16 bits, a shift beside the scale
        taken = element_bytes * count + count / 2 + group_bytes * count / 128
        assert DENSE.mean_bytes(quantised, element_bytes) == pytest.approx(taken / (2 * count))
    assert DENSE.mean_expert_bytes(decode(W4A16), 2) is None


def test_the_mean_size_of_a_weight_of_experts_counts_those_that_are_not_quantised() -> None:
    assert SPARSE.mean_expert_bytes(None, 2) is None
    group = 4 / 8 + (2 + 1) / 128  # a scale and a zero point
    assert SPARSE.mean_expert_bytes(decode(AWQ), 2) == pytest.approx(group)
    ignored = decode(AWQ | {"modules_to_not_convert": ["experts.0", "experts.1.w2"]})
    assert SPARSE.mean_expert_bytes(ignored, 2) == pytest.approx((8 * group + 4 * 2) / 12)
    router = 4 * 256
    shared = sum(rows * columns for index in (0, 1) for rows, columns in SPARSE.shared(index).values())
    mean = SPARSE.mean_bytes(decode(AWQ), 2)
    with_shift = 4 / 8 + (2 + 2) / 128
    assert mean == pytest.approx((shared * with_shift + router * 2) / (shared + router))


def test_latents_hold_one_linear_as_numbers_and_the_block_of_each_reordered_row() -> None:
    form = decode(DEEPSEEK).format_of("model.layers.1.self_attn.q_b_proj")
    assert form is not None
    held = {
        name: LATENT.held_bytes(f"model.layers.1.self_attn.{name}", shape, form, 2)
        for name, shape in (("kv_b_proj", (320, 64)), ("q_b_proj", (192, 128)), ("o_proj", (256, 192)))
    }
    assert held == {
        "kv_b_proj": 320 * 64 * 2,
        "q_b_proj": 192 * 128 + 2 * 1 * 4 + 192 * 4,
        "o_proj": 256 * 192
        + 2 * 2 * 4
        + 192 * 4,  # the last group is shorter, so that each column has an index
    }
