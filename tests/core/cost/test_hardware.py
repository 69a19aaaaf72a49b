"""Accelerators, models, and the profiles that follow from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medha.cost.crossover import NEVER_TOKENS, crossover_tokens
from medha.cost.fitted_hardware import LINKS, MEASURED, POOLED, SHA256, TILE_ROWS, WHOLE_WAVES
from medha.cost.hardware import (
    A100,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA3_27B,
    H100,
    H200,
    HARDWARE,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA31_405B,
    MIXTRAL_8X7B,
    MODELS,
    QWEN3_30B_A3B,
    ExpertShape,
    Hardware,
    ModelShape,
    layer_operations,
    profile_for,
)
from medha.cost.predictor import Predictor, Work
from medha.cost.touched_experts import touched_share
from medha.errors import ConfigInvalid
from medha.topology import Topology

EACH_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
EACH_HARDWARE = pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)


@pytest.mark.parametrize(
    ("model", "parameters", "kv_bytes"),
    [
        (LLAMA3_8B, 8.03e9, 131_072),
        (LLAMA3_70B, 70.55e9, 327_680),
        (LLAMA31_405B, 405.85e9, 516_096),
        (MIXTRAL_8X7B, 46.70e9, 131_072),
        (QWEN3_30B_A3B, 30.53e9, 98_304),
        (GEMMA3_27B, 27.01e9, 507_904),  # without the 0.4 B that see images
        (DEEPSEEK_V2_LITE, 15.71e9, 27 * 576 * 2),
        (DEEPSEEK_V3, 671.03e9, 61 * 576 * 2),
    ],
)
def test_models_have_their_published_sizes(model: ModelShape, parameters: float, kv_bytes: int) -> None:
    assert model.parameters == pytest.approx(parameters, rel=0.001)
    assert model.kv_bytes_per_token == kv_bytes


def test_a_token_passes_a_few_of_all_experts() -> None:
    """The models' cards, of which the embedding is not multiplied; DeepSeek-V3's counts no embedding (36.7 + 0.9)."""
    for model, active in ((MIXTRAL_8X7B, 12.88e9), (QWEN3_30B_A3B, 3.35e9), (DEEPSEEK_V3, 37.6e9)):
        assert model.linear_flops_per_token / 2 + model.vocab * model.hidden == pytest.approx(
            active, rel=0.01
        )


def test_prefill_flops_are_counted_causally() -> None:
    assert LLAMA3_8B.prefill_flops(10**6) == pytest.approx(2.78e17, rel=0.01)
    assert LLAMA3_70B.prefill_flops(10**6) == pytest.approx(1.45e18, rel=0.01)
    assert LLAMA31_405B.prefill_flops(10**6) == pytest.approx(4.94e18, rel=0.01)


def test_a_request_is_long_where_attention_passes_the_linear_layers() -> None:
    assert LLAMA3_8B.long_threshold_tokens == pytest.approx(29_000, rel=0.05)
    assert LLAMA3_70B.long_threshold_tokens == pytest.approx(53_000, rel=0.05)


@pytest.mark.parametrize(
    ("window_tokens", "window_share", "expected"),
    [(1, 0.0, 1500), (2000, 0.5, 1500), (500, 0.5, 2500), (500, 1.0, NEVER_TOKENS), (1500, 1.0, 1500)],
)
def test_layers_with_a_window_make_requests_long_later(
    window_tokens: int, window_share: float, expected: int
) -> None:
    assert crossover_tokens(3000.0, 2.0, window_tokens, window_share) == expected


def test_prefill_flops_count_what_windows_see() -> None:
    tokens, linear = 5000, replace(GEMMA3_27B, window_share=0.0).prefill_flops(0)
    seen = sum(GEMMA3_27B.seen_tokens(position + 1) for position in range(tokens))
    wanted = linear + 2.0 * GEMMA3_27B.passed_parameters * tokens
    wanted += GEMMA3_27B.attention_flops_per_pair * seen
    assert GEMMA3_27B.prefill_flops(tokens) == pytest.approx(wanted)


@EACH_MODEL
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_the_ranks_of_a_pod_share_the_flops(model: ModelShape, tensor: int) -> None:
    operations = layer_operations(model, A100, tensor)
    flops = sum(operation.compute_seconds_per_row * operation.experts_per_row for operation in operations)
    experts = model.experts or ExpertShape(0, 0, 0, 0)
    one = 3 * model.hidden * experts.intermediate
    copies = 0 if model.latent is None else (tensor - 1) * model.latent.copied_parameters(model.hidden)
    copies += 3 * model.hidden * experts.shared_intermediate
    dense = replace(
        model, kv_heads=max(model.kv_heads, tensor)
    ).layer_parameters  # more ranks than heads keep copies
    assert flops * A100.peak_flops * tensor == pytest.approx(2.0 * (dense + copies + experts.per_token * one))
    weights = sum(operation.fixed_seconds for operation in operations) * A100.memory_bytes_per_second * tensor
    assert weights == pytest.approx(2.0 * (dense + copies) + experts.count * one * model.expert_bytes)


@EACH_MODEL
@EACH_HARDWARE
def test_no_step_beats_its_data_sheet(model: ModelShape, hardware: Hardware) -> None:
    topology = Topology(tensor=8)
    predictor = Predictor(profile_for(model, hardware, topology), topology)
    for chunk in (1, 128, 4096):
        for context in (0, 100_000, 2_000_000):
            work = Work(context, chunk)
            flops = 2.0 * model.passed_parameters * chunk
            seen = model.seen_tokens(context + (chunk + 1) / 2)
            made = model.chunk_flops_per_pair * chunk * seen + model.making_flops_per_key * context
            flops += min(model.attention_flops_per_pair * chunk * seen, made)
            experts = model.experts or ExpertShape(0, 1, 1, 0)
            share = touched_share(experts.count, experts.per_token, np.array(chunk, np.float64))
            read = (model.shared_parameters + float(share) * model.expert_parameters) * model.dtype_bytes
            read += model.kv_bytes_per_token * model.seen_tokens(context)
            least = max(flops / hardware.peak_flops, read / hardware.memory_bytes_per_second) / 8
            assert least < predictor.stage_seconds([work]) < 20 * least + 0.02


@EACH_MODEL
def test_newer_hardware_is_faster(model: ModelShape) -> None:
    topology = Topology(tensor=8)
    for works in ([Work(1_000_000, 512)], [Work(100_000, 1)] * 8):
        seconds = [
            Predictor(profile_for(model, hardware, topology), topology).stage_seconds(works)
            for hardware in (A100, H100, H200)
        ]
        assert seconds[0] > seconds[1] >= seconds[2]


def test_long_decodes_run_at_the_stated_share_of_bandwidth() -> None:
    topology = Topology(tensor=8)
    predictor = Predictor(profile_for(LLAMA3_8B, H100, topology), topology)
    seconds = predictor.stage_seconds([Work(8_000_000, 1)]) - predictor.stage_seconds([Work(0, 1)])
    read = 8_000_000 * LLAMA3_8B.kv_bytes_per_token / 8
    assert read / seconds == pytest.approx(0.85 * H100.memory_bytes_per_second, rel=0.01)


@EACH_HARDWARE
def test_what_a_profile_needs_was_fitted(hardware: Hardware) -> None:
    operations = {operation.name for operation in layer_operations(LLAMA3_8B, hardware, 1)}
    assert {name for kin, name in POOLED if kin == hardware.fitted_as} == operations
    assert (hardware.fitted_as in TILE_ROWS) != (hardware.fitted_as in WHOLE_WAVES)
    assert (hardware.fitted_as, "send_recv", 2, 1) in LINKS
    for devices in (2, 4, 8):
        assert (hardware.fitted_as, "all_reduce", devices, devices) in LINKS


def test_fitted_fractions_are_sane() -> None:
    for efficiency, bandwidth, launch_seconds in (*MEASURED.values(), *POOLED.values()):
        assert 0.5 < efficiency <= 1
        assert 0.25 < bandwidth < 2.5  # beyond 1: the benchmark's weights lay in the cache
        assert 0 < launch_seconds < 2e-5
    assert all(len(digest) == 64 for digest in SHA256.values())


def test_tensor_parallelism_pays_for_its_all_reduce() -> None:
    tokens = np.array([2048])
    links = [
        profile_for(LLAMA3_8B, A100, Topology(tensor=n)).all_reduce.seconds(tokens)[0] for n in (1, 2, 4, 8)
    ]
    assert links[0] == 0
    assert all(seconds > 1e-4 for seconds in links[1:])


@pytest.mark.parametrize("tensor", [3, 64])
def test_tensor_parallelism_that_splits_heads_is_refused(tensor: int) -> None:
    with pytest.raises(
        ConfigInvalid, match=rf"parallelism\.tensor is {tensor}, which does not divide the 32"
    ):
        profile_for(LLAMA3_8B, A100, Topology(tensor=tensor))


def test_more_ranks_than_kv_heads_keep_copies_of_them() -> None:
    narrow = replace(LLAMA3_8B, name="narrow", kv_heads=2)
    per_rank = [
        profile_for(narrow, A100, Topology(tensor=tensor)).attention.kv_seconds_per_token
        for tensor in (1, 2, 4, 8)
    ]
    assert per_rank == pytest.approx([2 * per_rank[1], per_rank[1], per_rank[1], per_rank[1]])
