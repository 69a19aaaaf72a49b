"""DeepSeek's latent attention and experts: their kinds and fields, and what the KV pool holds of a token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.device import host_device
from medha_worker.kernels.batch_invariant import batch_invariant_kernels
from medha_worker.kernels.flashinfer.flashinfer_kernels import flashinfer_kernels
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import KernelSizes, KernelsUnavailable
from medha_worker.kernels.triton.triton_kernels import triton_kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard
from medha_worker.rank.engine import _block_bytes
from medha_worker.rank.rank_reports import shape_of

from ..models import load_model
from .test_model_transformer import (
    TOLERANCE,
    largest_error,
    make_pair,
    random_tokens,
    run_chunks,
    save_reference,
)

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": 24, "n_group": None}, {}),
    "v2-yarn": ("deepseek_v2", {}, YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "v3-yarn": ("deepseek_v3", {"attention_bias": True}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}),
    "v3-yarn-one-scale": (
        "deepseek_v3",
        {"q_lora_rank": None, "attention_bias": True},
        YARN | {"mscale": 0.7},
    ),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}, {}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_each_kind_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, sizes, rope = KINDS[kind]
    pair = make_pair(tmp_path, architecture, rope or None, **sizes)
    tokens = random_tokens(100)
    with torch.inference_mode():
        wanted = pair.reference_logits(tokens)
    assert float(wanted.std()) > 0.3, "logits too small for the tolerance to mean something"
    for chunks in ([100], [1, 60, 1, 1, 37]):
        assert largest_error(run_chunks(pair.model, tokens, chunks), wanted) <= TOLERANCE


@pytest.mark.long
def test_a_row_of_published_width_is_attended_to_by_the_kernels_of_this_machine(tmp_path: Path) -> None:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    pair = make_pair(tmp_path, "deepseek_v2", **widths, initializer_range=0.05)
    assert pair.config.head_dim == 576
    tokens = random_tokens(90)
    with torch.inference_mode():
        wanted = pair.reference_logits(tokens)
    assert largest_error(run_chunks(pair.model, tokens, [70, 1, 19]), wanted) <= TOLERANCE


def test_the_pool_holds_one_row_of_latent_and_key_for_each_token_on_every_tensor_rank(tmp_path: Path) -> None:
    save_reference(tmp_path, "deepseek_v3")
    config = ModelConfig.from_directory(tmp_path)
    for rank in (0, 3):
        model = load_model(tmp_path, config, Shard(rank, 4, 0, 2, 2))
        cache = model.new_kv_cache(5, 4)
        assert [tuple(pool.shape) for pool in cache.keys] == [(1, 6 * 4, 32 + 32)] * 2
        assert all(keys is values for keys, values in zip(cache.keys, cache.values, strict=True))
        assert _block_bytes(config, model, 4, 2) == 2 * 4 * (32 + 32) * 4
    of_layer = 64 * (32 + 64) + 32 * 4 * 48 + 4 * (32 * (16 + 24) + 24 * 64)
    mlps = 3 * 64 * 112 + 64 * 8 + 3 * 64 * 48 * (3 + 1)
    assert config.linear_flops_per_token == 2 * (2 * of_layer + mlps + 160 * 64)
    assert config.parameters == 2 * of_layer + mlps + 3 * 64 * 48 * 5 + 2 * 160 * 64


def test_a_tensor_rank_counts_its_heads_and_all_latents(tmp_path: Path) -> None:
    save_reference(tmp_path, "deepseek_v3")
    config = ModelConfig.from_directory(tmp_path)
    shape = shape_of(Shard(1, 2, 1, 2, 2), config, 4)
    assert shape.kv_bytes_per_token == (32 + 32) * 4
    attention = 64 * (32 + 64) + 2 * (32 * 48 + 32 * (16 + 24) + 24 * 64)
    assert shape.shared_parameters == attention + 64 * 8 + 3 * 64 * 24
    assert shape.expert_parameters == 8 * 3 * 64 * 24
    assert shape.attention_flops_per_pair == 4 * 2 * (32 + 32)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    save_reference(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, tmp_path / "model.safetensors")
    config = ModelConfig.from_directory(tmp_path)
    assert (config.num_layers, config.further_layers) == (2, 1)
    load_model(tmp_path, config)
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"tensor model\.layers\.3\.eh_proj\.weight is unexpected"):
        load_model(tmp_path, config)


def test_checkpoints_with_one_tensor_for_all_experts_give_the_same_model(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, "deepseek_v3")
    reference.save_pretrained(tmp_path / "fused", save_original_format=False)
    config, tokens = ModelConfig.from_directory(tmp_path), random_tokens(20)
    names = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    apart, fused = (load_model(directory, config) for directory in (tmp_path, tmp_path / "fused"))
    assert torch.equal(run_chunks(apart, tokens, [20]), run_chunks(fused, tokens, [20]))


@pytest.mark.parametrize(
    ("architecture", "changes", "error", "words"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ModelUnsupported, "topk_method is 'noaux_tc'.*'greedy'"),
        ("deepseek_v2", {"norm_topk_prob": True}, ModelUnsupported, "norm_topk_prob is True"),
        ("deepseek_v2", {"rope_interleave": False}, ModelUnsupported, "rope_interleave is False"),
        ("deepseek_v2", {"mlp_bias": True}, ModelUnsupported, "mlp_bias is True"),
        ("deepseek_v3", {"topk_method": "greedy"}, ModelUnsupported, "topk_method is 'greedy'.*'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, ModelUnsupported, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, ModelUnsupported, "moe_layer_freq is 2"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "mxfp4"}},
            ModelUnsupported,
            "'mxfp4', but models of this type are served in compressed-tensors or fp8",
        ),
        (
            "deepseek_v3",
            {"quantization_config": QUANTISATIONS["fp8-kv"]},
            ModelUnsupported,
            "scales of keys and values do not apply to latents",
        ),
        ("deepseek_v3", {"n_group": 3}, CheckpointInvalid, r"n_group is 3, but must be a divisor .* \(8\)"),
        ("deepseek_v3", {"n_group": 8}, CheckpointInvalid, "n_group is 8, .* 2 or more in each"),
        (
            "deepseek_v3",
            {"topk_group": 3},
            CheckpointInvalid,
            r"topk_group is 3, but must be at most n_group \(2\)",
        ),
        ("deepseek_v3", {"num_experts_per_tok": 5}, CheckpointInvalid, "topk_group is 1, .* suffice .*5"),
        ("deepseek_v3", {"num_key_value_heads": 2}, CheckpointInvalid, "equal to num_attention_heads"),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 7},
            CheckpointInvalid,
            "qk_rope_head_dim is 7, but must be even",
        ),
        ("deepseek_v3", {"q_lora_rank": ...}, CheckpointInvalid, "q_lora_rank is missing"),
        ("deepseek_v3", {"n_shared_experts": None}, CheckpointInvalid, "n_shared_experts is None"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": ...},
            CheckpointInvalid,
            "first_k_dense_replace is missing",
        ),
    ],
)
def test_what_is_not_computed_exactly_is_refused_by_name(
    architecture: str, changes: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    save_reference(tmp_path, architecture)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(error, match=words):
        ModelConfig.from_directory(tmp_path)


def test_tensor_parallelism_must_divide_heads_and_experts(tmp_path: Path) -> None:
    save_reference(tmp_path, "deepseek_v3")
    config = ModelConfig.from_directory(tmp_path)
    for size in (1, 2, 4):
        config.require_tensor_size(size)
    with pytest.raises(ConfigInvalid, match="does not divide num_attention_heads"):
        config.require_tensor_size(8)


def test_a_row_gets_the_same_bits_beside_any_others(tmp_path: Path) -> None:
    """`spec.determinism: batchInvariant` holds for latent attention and for the choice of experts."""
    save_reference(tmp_path, "deepseek_v3")
    config, device = ModelConfig.from_directory(tmp_path), host_device(torch.float32)
    try:
        kernels = batch_invariant_kernels(
            Shard.whole(config).kernel_sizes(config), device, torch_kernels(device)
        )
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    model, tokens = load_model(tmp_path, config, kernels=kernels), random_tokens(90)
    whole = run_chunks(model, tokens, [90])
    for chunks in ([50, 1, 1, 30, 8], [1] * 90):
        assert torch.equal(run_chunks(model, tokens, chunks), whole)


def test_kernels_for_gpus_refuse_latents() -> None:
    sizes, host = KernelSizes(4, 1, 64, 64, 128, made_head_dim=48), host_device(torch.bfloat16)
    device = replace(host, torch_device=torch.device("cuda"))
    for make in (triton_kernels, flashinfer_kernels):
        with pytest.raises(KernelsUnavailable, match="no attention over latents"):
            make(sizes, device, torch_kernels(host))
