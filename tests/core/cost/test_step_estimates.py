"""Estimated FLOPs and reads of a step, against numbers computed by hand for Llama-3-8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from medha.cost.attention_pairs import attention_pairs
from medha.cost.hardware import DEEPSEEK_V3, LLAMA3_8B, MIXTRAL_8X7B, ModelShape
from medha.cost.step_estimates import StepCosts, StepWork, peak_of

LAYER_WEIGHTS = 218_103_808
"""4096 x 128 x 2 x (32 + 8) of attention and 3 x 4096 x 14336 of the MLP."""
HEAD_WEIGHTS = 525_336_576
"""128256 x 4096."""
KV_BYTES = 131_072
"""2 x 32 layers x 8 heads x 128 x 2 bytes, of one token."""
PAIR_FLOPS = 524_288
"""4 x 32 layers x 32 heads x 128."""


def step_flops(shard: ModelShape, work: StepWork) -> float:
    return StepCosts.of(shard).flops(work)


def step_read_bytes(shard: ModelShape, work: StepWork) -> float:
    return StepCosts.of(shard).read_bytes(work)


def test_a_decode_behind_1024_tokens() -> None:
    work = StepWork(rows=1, sampled_rows=1, pairs=attention_pairs(1, 1024), keys=1025)
    assert step_flops(LLAMA3_8B, work) == 15_009_316_864 + 1025 * PAIR_FLOPS == 15_546_712_064
    assert step_read_bytes(LLAMA3_8B, work) == 15_009_316_864 + 1025 * KV_BYTES == 15_143_665_664


def test_64_decodes_read_the_weights_once_and_the_keys_of_each() -> None:
    work = StepWork(64, 64, 64 * attention_pairs(1, 8191), 64 * 8192)
    assert step_flops(LLAMA3_8B, work) == 64 * (15_009_316_864 + 8192 * PAIR_FLOPS)
    assert step_read_bytes(LLAMA3_8B, work) == 15_009_316_864 + 64 * 8192 * KV_BYTES


def test_a_chunk_that_does_not_sample_passes_no_head() -> None:
    work = StepWork(rows=512, pairs=attention_pairs(512, 1536), keys=2048)
    pairs = 512 * 1536 + 512 * 513 // 2
    assert step_flops(LLAMA3_8B, work) == 2 * 32 * LAYER_WEIGHTS * 512 + PAIR_FLOPS * pairs
    assert step_read_bytes(LLAMA3_8B, work) == 2 * 32 * LAYER_WEIGHTS + 2048 * KV_BYTES


def test_a_prompt_at_once_has_the_flops_of_the_models_shape() -> None:
    work = StepWork(8192, 1, attention_pairs(8192, 0), 8192)
    assert step_flops(LLAMA3_8B, work) == LLAMA3_8B.prefill_flops(8192)


def test_latents_count_in_the_form_that_takes_fewer_flops() -> None:
    heads, latent = 61 * 128, 512
    absorbed, plain, making = 4 * heads * 576, 2 * heads * (192 + 128), 2 * heads * latent * 256
    alone = step_flops(DEEPSEEK_V3, StepWork(rows=1))
    assert step_flops(DEEPSEEK_V3, StepWork(1, 0, 5000, 5000)) == alone + 5000 * absorbed
    chunk = StepWork(512, 0, attention_pairs(512, 4000), 4512)
    assert step_flops(DEEPSEEK_V3, chunk) == 512 * alone + plain * chunk.pairs + 4000 * making
    prompt = StepWork(8192, 1, attention_pairs(8192, 0), 8192)
    assert step_flops(DEEPSEEK_V3, prompt) == DEEPSEEK_V3.prefill_flops(8192)


def test_a_step_reads_the_experts_that_its_rows_pass() -> None:
    """A row reads 2 of 8 experts; 4 rows read 1 - (3/4)^4 of them, and each passes 2."""
    experts = 32 * 8 * 3 * 4096 * 14336
    shared = 32 * (4096 * 128 * 2 * (32 + 8) + 4096 * 8)
    assert step_read_bytes(MIXTRAL_8X7B, StepWork(rows=1)) == pytest.approx(2 * (shared + experts / 4))
    assert step_read_bytes(MIXTRAL_8X7B, StepWork(rows=4)) == pytest.approx(
        2 * (shared + experts * (1 - 81 / 256))
    )
    assert step_read_bytes(MIXTRAL_8X7B, StepWork(rows=1000)) == pytest.approx(2 * (shared + experts))
    assert step_read_bytes(MIXTRAL_8X7B, StepWork(keys=1)) == 131_072
    assert step_flops(MIXTRAL_8X7B, StepWork(rows=4)) == 4 * 2 * (shared + experts / 4)


def test_a_lane_that_only_helps_reads_keys_and_no_weights() -> None:
    work = StepWork(pairs=3 * 1000, keys=1000)
    assert step_flops(LLAMA3_8B, work) == 3000 * PAIR_FLOPS
    assert step_read_bytes(LLAMA3_8B, work) == 1000 * KV_BYTES
    assert step_flops(LLAMA3_8B, StepWork()) == step_read_bytes(LLAMA3_8B, StepWork()) == 0


def test_two_halves_of_the_heads_columns_and_layers_make_the_whole() -> None:
    work = StepWork(16, 4, 5000, 900)
    half = replace(LLAMA3_8B, query_heads=16, kv_heads=4, intermediate=7168, vocab=64128)
    first, last = replace(half, layers=10, vocab=0), replace(half, layers=22)
    for estimate in (step_flops, step_read_bytes):
        assert 2 * (estimate(first, work) + estimate(last, work)) == estimate(LLAMA3_8B, work)
    # A first stage has no head: its estimate does not depend on what is sampled.
    assert step_flops(first, work) == step_flops(first, replace(work, sampled_rows=0))


@pytest.mark.parametrize(
    ("rows", "context", "stride"), [(1, 0, 1), (5, 7, 1), (4, 3, 2), (3, 10, 8), (0, 9, 1)]
)
def test_pairs_are_the_sum_over_rows(rows: int, context: int, stride: int) -> None:
    assert attention_pairs(rows, context, stride) == sum(context + 1 + row * stride for row in range(rows))


def test_a_peak_is_known_by_the_whole_name_and_for_16_bits() -> None:
    peak = peak_of("NVIDIA H100 80GB HBM3", 2)
    assert peak is not None
    assert (peak.flops_per_second, peak.memory_bytes_per_second) == (989e12, 3.35e12)
    assert peak_of("NVIDIA H100 80GB HBM3", 4) is None
    assert peak_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 2) is None
