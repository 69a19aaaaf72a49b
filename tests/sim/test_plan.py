"""`medha plan`: grids, their memory and times, what is said when nothing fits, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from medha.api.replica import MedhaReplicaSpec
from medha.cost.hardware import (
    A100,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA3_27B,
    GPT_OSS_20B,
    GPT_OSS_120B,
    H100,
    LLAMA3_8B,
    LLAMA3_70B,
    QWEN3_30B_A3B,
    ExpertShape,
    profile_for,
)
from medha.cost.predictor import Chunking, Predictor, Work
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha_cli.main import main
from medha_sim.plan import Wish, bounds, grids, plan, rate, read_shape, shortfall
from medha_sim.scenario import deployment_of

SPARSE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
WISH = Wish(context_tokens=1_000_000, ttft_seconds=30.0, tpot_seconds=0.02)


def test_grids_divide_the_heads_and_stay_inside_a_node_and_the_number_of_gpus() -> None:
    found = list(grids(LLAMA3_8B, H100, 16))
    assert Topology(8, 2, 1) in found
    assert all(grid.ranks <= 16 and grid.tensor <= 8 and grid.stream <= 32 for grid in found)
    assert len(found) == len(set(found))
    five_heads = replace(LLAMA3_8B, query_heads=20, kv_heads=5)
    assert {grid.tensor for grid in grids(five_heads, H100, 8)} == {1}


def test_grids_divide_the_width_of_the_mlps_that_occur() -> None:
    """A replica of another grid would be refused when it starts."""
    narrow = replace(QWEN3_30B_A3B, experts=ExpertShape(48, 128, 8, 1412))
    assert {grid.tensor for grid in grids(narrow, H100, 8)} == {1, 2, 4}
    assert {grid.tensor for grid in grids(replace(narrow, intermediate=5), H100, 8)} == {1, 2, 4}
    half = replace(narrow, intermediate=6146, experts=ExpertShape(24, 128, 8, 1412))
    assert {grid.tensor for grid in grids(half, H100, 8)} == {1, 2}
    assert {grid.tensor for grid in grids(replace(LLAMA3_8B, intermediate=14340), H100, 8)} == {1, 2, 4}


def test_weights_and_kv_of_a_gpu_are_counted_to_the_byte() -> None:
    rating = rate(LLAMA3_8B, H100, Topology(8, 2, 2), WISH)
    assert rating.weights_bytes == LLAMA3_8B.weights_bytes / 16
    assert rating.kv_bytes == pytest.approx(1_000_512 * 131_072 / 32)
    assert rating.offload_bytes == 0
    assert rating.kv_tokens == pytest.approx(rating.kv_room_bytes * 32 / 131_072, abs=1)


def test_a_draft_model_takes_memory_of_the_gpu_that_samples_on_each_lane() -> None:
    draft = replace(LLAMA3_8B, name="draft", layers=4)
    plain = rate(LLAMA3_8B, H100, Topology(8, 2, 1), WISH)
    found = rate(LLAMA3_8B, H100, Topology(8, 2, 1), replace(WISH, draft=draft))
    assert found.weights_bytes == plain.weights_bytes + draft.weights_bytes
    assert found.kv_bytes == pytest.approx(plain.kv_bytes + 1_000_512 * 131_072 / 8)
    assert found.kv_tokens < plain.kv_tokens
    lanes = rate(LLAMA3_8B, H100, Topology(8, 2, 2), replace(WISH, draft=draft))
    assert lanes.weights_bytes == found.weights_bytes
    assert lanes.kv_bytes == pytest.approx(found.kv_bytes / 2), (
        "each lane has the draft model's KV of its part"
    )
    assert lanes.kv_tokens == pytest.approx(2 * found.kv_tokens, abs=2)


def test_the_command_counts_a_draft_model_and_names_one_that_is_not_known() -> None:
    asked = ["plan", "--context", "64K", "--draft-model", "Llama-3-8B", "--model", "Llama-3-70B"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    assert "hold those of Llama-3-8B, too" in " ".join(result.output.split())
    wrong = CliRunner().invoke(main, ["plan", "--draft-model", "none-such"])
    assert wrong.exit_code == 2
    assert "--draft-model none-such: neither a preset" in wrong.output


def test_kv_heads_are_repeated_where_tensor_parallelism_passes_their_number() -> None:
    two_heads = replace(LLAMA3_8B, kv_heads=2)
    four, eight = (rate(two_heads, H100, Topology(tensor, 1, 1), WISH).kv_bytes for tensor in (4, 8))
    assert four == eight


def test_more_stages_shorten_prefill_and_more_lanes_shorten_decode() -> None:
    long = replace(WISH, context_tokens=4_000_000)
    base, stages, lanes = (
        rate(LLAMA3_8B, H100, grid, long)
        for grid in (Topology(8, 4, 1), Topology(8, 8, 1), Topology(8, 4, 2))
    )
    assert stages.ttft_seconds < base.ttft_seconds
    assert lanes.tpot_seconds < base.tpot_seconds


def test_the_plan_is_the_smallest_grid_that_meets_everything() -> None:
    ratings = plan(LLAMA3_8B, H100, WISH)
    best = ratings[0]
    assert best.fits
    assert best.ttft_seconds <= WISH.ttft_seconds
    assert best.tpot_seconds <= WISH.tpot_seconds
    assert best.batch >= 1
    assert all(best.gpus <= rating.gpus for rating in ratings if rating.fits)
    # Theory asks for 9.3 GPUs at full peak (paper A Fig. 2); chunks of 20 ms reach no more than half of it.
    assert 10 < best.gpus <= 64


@pytest.mark.parametrize("grid", [Topology(8, 1, 1), Topology(8, 4, 1), Topology(8, 4, 4)])
@pytest.mark.parametrize("tpot_seconds", [0.02, 0.2])
def test_ttft_is_that_of_the_predictor_that_schedules(grid: Topology, tpot_seconds: float) -> None:
    wish = replace(WISH, tpot_seconds=tpot_seconds)
    chunking = Chunking(max_tokens=8192, min_tokens=32, budget_seconds=tpot_seconds / grid.stream)
    exact = Predictor(profile_for(LLAMA3_8B, H100, grid), grid, chunking).prefill_seconds(0, 1_000_000)
    assert rate(LLAMA3_8B, H100, grid, wish).ttft_seconds == pytest.approx(exact, rel=0.03)


def test_a_prompt_shorter_than_a_chunk_takes_a_whole_step() -> None:
    """No less than reading the weights once, and no more for a token fewer."""
    grid = Topology(2, 1, 1)
    ttfts = [
        rate(LLAMA3_8B, H100, grid, replace(WISH, context_tokens=tokens)).ttft_seconds
        for tokens in (1, 31, 100, 1_000)
    ]
    assert min(ttfts) > LLAMA3_8B.weights_bytes / grid.ranks / H100.memory_bytes_per_second
    assert ttfts == sorted(ttfts)


def test_tpot_is_that_of_the_predictor_that_schedules() -> None:
    grid = Topology(8, 4, 1)
    predictor = Predictor(profile_for(LLAMA3_8B, H100, grid), grid)
    alone = predictor.latency_seconds([Work(1_000_512, 1)])
    wish = replace(WISH, tpot_seconds=1.01 * alone, max_gpus=32)
    rating = rate(LLAMA3_8B, H100, grid, wish)
    assert rating.batch == 4  # one request in each stage; a second one there would pass the target
    assert rating.tpot_seconds == pytest.approx(alone, rel=0.01)


def test_a_batch_one_larger_would_pass_the_target_or_the_memory() -> None:
    rating = rate(LLAMA3_8B, H100, Topology(8, 4, 1), replace(WISH, tpot_seconds=0.05))
    more = rate(
        LLAMA3_8B, H100, Topology(8, 4, 1), replace(WISH, tpot_seconds=0.05, concurrent=rating.batch + 1)
    )
    assert rating.batch >= 1
    assert more.misses in (("TPOT",), ("memory",), ("memory", "TPOT"))


def test_bounds_are_those_of_paper_a_figure_2() -> None:
    one, two = bounds(LLAMA3_8B, H100, WISH, [1_000_000, 2_000_000], search=False)
    assert (one.compute, two.compute) == (10, 37)  # the paper reads 10 and 40
    assert one.binding == two.binding == "compute"
    assert one.planned is None


def test_kv_that_does_not_fit_names_what_would_have_to_be_offloaded() -> None:
    wish = replace(WISH, context_tokens=10_000_000, max_gpus=8)
    closest = plan(LLAMA3_70B, A100, wish)[0]
    assert closest.offload_bytes == min(rating.offload_bytes for rating in plan(LLAMA3_70B, A100, wish)) > 0
    text = shortfall(LLAMA3_70B, A100, wish, closest)
    assert re.search(r"do not fit.*offload .* GB to host memory; try less of --context", text)


def test_targets_out_of_reach_name_the_closest_grid_and_the_flags_that_fix_it() -> None:
    wish = replace(WISH, ttft_seconds=1.0, tpot_seconds=0.1, max_gpus=16)
    closest = plan(LLAMA3_8B, H100, wish)[0]
    text = shortfall(LLAMA3_8B, H100, wish, closest)
    assert f"closest, {closest.topology}, misses TTFT" in text
    fixed = float(text.split("--ttft ")[1].split()[0])
    assert plan(LLAMA3_8B, H100, replace(wish, ttft_seconds=fixed))[0].fits


@pytest.mark.parametrize("name", ["context_tokens", "ttft_seconds", "memory_fraction", "max_gpus"])
def test_a_wish_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=name):
        replace(WISH, **{name: 0})


def test_a_config_json_gives_the_same_shape_as_the_preset(tmp_path: Path) -> None:
    values = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert replace(read_shape(tmp_path), name=LLAMA3_8B.name) == LLAMA3_8B
    assert read_shape(tmp_path / "config.json") == read_shape(tmp_path)
    del values["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigInvalid, match="hidden_size is None"):
        read_shape(tmp_path)


def test_a_mixture_of_experts_counts_all_of_them(tmp_path: Path) -> None:
    values = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert replace(read_shape(tmp_path), name=QWEN3_30B_A3B.name) == QWEN3_30B_A3B
    assert QWEN3_30B_A3B.weights_bytes == pytest.approx(61.06e9, rel=1e-3)
    mixed = values | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    assert read_shape(tmp_path).experts == ExpertShape(23, 128, 8, 768)
    assert plan(read_shape(tmp_path), H100, WISH)[0].fits


def test_every_tensor_rank_holds_all_latents_and_lanes_divide_them(tmp_path: Path) -> None:
    values = {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = read_shape(tmp_path)
    assert replace(model, name=DEEPSEEK_V2_LITE.name) == DEEPSEEK_V2_LITE
    one, split, spread = (
        rate(model, H100, Topology(*grid), WISH) for grid in ((1, 1, 1), (4, 1, 1), (1, 1, 4))
    )
    assert split.kv_bytes == one.kv_bytes == 4 * spread.kv_bytes
    assert one.kv_bytes == WISH.request_tokens * WISH.concurrent * 27 * 576 * 2
    copied = 27 * 2048 * 576 * 2
    assert split.weights_bytes == pytest.approx((one.weights_bytes - copied) / 4 + copied)
    del values["first_k_dense_replace"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigInvalid, match="first_k_dense_replace is None; it must be a whole number"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("fields", "tokens", "share"),
    [
        ({"model_type": "mistral"}, 4096, 1.0),
        ({"model_type": "mistral", "sliding_window": None}, 1, 0.0),
        ({"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, 1, 0.0),
        ({"model_type": "qwen2", "sliding_window": 100}, 1, 0.0),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}, 1, 0.0),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 9}, 4096, 0.25),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, 4096, 1.0),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 512, 10 / 12),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, 4096, 0.75),
        ({"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2}, 128, 0.5),
        ({"layer_types": ["full_attention"] * 9 + ["sliding_attention"] * 3}, 1, 0.0),
        (
            {
                "model_type": "gemma3_text",
                "layer_types": ["full_attention"] * 9 + ["sliding_attention"] * 3,
            },
            4096,
            0.25,
        ),
    ],
)
def test_a_plan_knows_the_layers_with_windows(
    tmp_path: Path, fields: dict[str, object], tokens: int, share: float
) -> None:
    sizes = dict.fromkeys(("num_attention_heads", "hidden_size"), 4) | {"num_hidden_layers": 12}
    values = sizes | {"intermediate_size": 8, "vocab_size": 8, "head_dim": 1, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(values | fields))
    shape = read_shape(tmp_path)
    assert (shape.window_tokens, shape.window_share) == (tokens, pytest.approx(share))


def test_windows_make_a_long_context_cheaper_and_beside_tiers_their_kv_takes_memory_all_the_same() -> None:
    wish = replace(WISH, concurrent=8, host_bytes=2**30)
    whole = replace(GEMMA3_27B, window_share=0.0)
    with_windows, without = (rate(model, H100, Topology(8, 2, 2), wish) for model in (GEMMA3_27B, whole))
    assert with_windows.ttft_seconds < without.ttft_seconds / 2
    assert with_windows.tpot_seconds < without.tpot_seconds / 2
    assert with_windows.kv_bytes == without.kv_bytes


@pytest.mark.parametrize(("prefix_caching", "factor"), [(False, 1.8), (True, 1.6)])
def test_a_replica_without_tiers_holds_more_tokens_of_a_model_with_windows(
    prefix_caching: bool, factor: float
) -> None:
    """Half of gpt-oss keeps 128 tokens of a sequence; a million tokens take little more than half of the KV."""
    kept = replace(WISH, context_tokens=10**6, output_tokens=512, host_bytes=2**30)
    freed = replace(kept, host_bytes=0, prefix_caching=prefix_caching)
    one_lane, two_lanes = Topology(1, 1, 1), Topology(1, 1, 2)
    before, after = (rate(GPT_OSS_20B, H100, one_lane, wish) for wish in (kept, freed))
    assert 0.5 < after.kv_bytes / before.kv_bytes < 0.53
    assert after.kv_tokens > factor * before.kv_tokens
    before, after = (rate(GPT_OSS_20B, H100, two_lanes, wish) for wish in (kept, freed))
    assert after.kv_tokens > factor * before.kv_tokens
    llama = [rate(LLAMA3_8B, H100, one_lane, wish) for wish in (kept, freed)]
    assert llama[0].kv_tokens == llama[1].kv_tokens
    with_windows, without = (
        bounds(GPT_OSS_20B, H100, wish, [10**7], search=False)[0].memory for wish in (freed, kept)
    )
    assert with_windows < without


def test_a_draft_model_keeps_all_of_its_kv_where_the_served_model_frees_what_is_before_its_windows() -> None:
    freed = replace(WISH, context_tokens=10**6, output_tokens=512, prefix_caching=False)
    draft = replace(LLAMA3_8B, name="draft", layers=1)
    alone, both = (
        rate(GPT_OSS_20B, H100, Topology(1, 1, 1), replace(freed, draft=one)) for one in (None, draft)
    )
    drafted_bytes = draft.kv_bytes_per_token * freed.request_tokens * freed.concurrent
    assert both.kv_bytes == pytest.approx(alone.kv_bytes + drafted_bytes)


def test_a_pool_that_has_no_windows_for_all_that_may_run_has_those_of_fewer() -> None:
    """Windows of 1,024 tokens for 256 sequences are more than all that fits beside the weights of Gemma-3-27B."""
    freed = replace(WISH, context_tokens=100_000)
    kept = replace(freed, host_bytes=2**30)
    ratings = [rate(GEMMA3_27B, H100, Topology(1, 1, 1), wish) for wish in (kept, freed)]
    assert ratings[1].kv_tokens > 1.5 * ratings[0].kv_tokens
    assert ratings[1].kv_bytes < ratings[0].kv_bytes


def test_no_window_is_freed_where_too_few_of_the_requests_would_run() -> None:
    freed = replace(WISH, context_tokens=100_000, concurrent=200)
    kept = replace(freed, host_bytes=2**30)
    ratings = [rate(GEMMA3_27B, H100, Topology(1, 1, 1), wish) for wish in (kept, freed)]
    assert ratings[0].kv_tokens == ratings[1].kv_tokens
    assert ratings[0].kv_bytes == ratings[1].kv_bytes


def test_the_text_model_of_a_model_with_images_has_a_plan(tmp_path: Path) -> None:
    text = {
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    }
    values = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert replace(read_shape(tmp_path), name=GEMMA3_27B.name) == GEMMA3_27B


def test_experts_in_mxfp4_take_the_bytes_of_the_published_files(tmp_path: Path) -> None:
    values = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = read_shape(tmp_path)
    assert replace(shape, name=GPT_OSS_20B.name, layer_weight_bytes=None) == GPT_OSS_20B
    assert shape.layer_weight_bytes == 2
    assert shape.weights_bytes == GPT_OSS_20B.weights_bytes == pytest.approx(13.76e9, rel=2e-3)
    assert GPT_OSS_120B.weights_bytes == pytest.approx(65.25e9, rel=2e-3)
    (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": None}))
    assert read_shape(tmp_path).weights_bytes == pytest.approx(2 * 20.91e9, rel=1e-3)


def test_deepseek_v3_takes_the_bytes_of_its_published_fp8_blocks(tmp_path: Path) -> None:
    """Embedding, head and routers are in bfloat16, and so is one linear of attention, once it is held."""
    values = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    shape = read_shape(tmp_path)
    plain = replace(shape, name=DEEPSEEK_V3.name, layer_weight_bytes=None, expert_weight_bytes=None)
    assert plain == DEEPSEEK_V3
    assert shape.expert_weight_bytes == 1 + 4 / 128**2
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "kimi_k2"}))
    assert read_shape(tmp_path) == shape
    heads_up = 61 * 128 * (128 + 128) * 512
    blocks = DEEPSEEK_V3.parameters + heads_up + 2 * 129280 * 7168 + 58 * 256 * 7168
    assert shape.weights_bytes == pytest.approx(blocks * (1 + 4 / 128**2), rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads is 3; it must divide num_attention_heads \(4\)"),
        ({"vocab_size": True}, "vocab_size is True; it must be a positive whole number"),
        ({"torch_dtype": "int3"}, "dtype is 'int3'; it must be one of float32, bfloat16, float16"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; choose a model of llama, mistral"),
        ({"num_local_experts": 8}, "num_local_experts is 8; choose a dense model"),
        ({"model_type": "mixtral", "num_experts": 8}, "num_experts is 8; choose a dense model"),
        ({"model_type": "mixtral"}, "num_local_experts is None; it must be a positive"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config.quant_method is 'hqq'"),
        ({"compression_config": {"quant_method": "hqq"}}, "compression_config.quant_method is 'hqq'"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "quantization_config": {"quant_method": "hqq"}},
            "quantization_config.quant_method is 'hqq', but models of this type are served in compressed-tensors or fp8",
        ),
        (
            SPARSE | {"num_experts_per_tok": 9},
            r"num_experts_per_tok is 9; it must be at most num_experts \(8\)",
        ),
        (SPARSE | {"num_local_experts": 4}, r"num_local_experts is 4; it must be equal to num_experts \(8\)"),
        (SPARSE | {"num_experts": 0, "num_local_experts": 4}, "num_experts is 0; it must be a positive"),
        (SPARSE | {"decoder_sparse_step": "2"}, "decoder_sparse_step is '2'; it must be a positive"),
        (SPARSE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a positive"),
        (SPARSE | {"mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types is .* a list of 4"),
        ({"model_type": "gemma3"}, "text_config is None; it must be an object with the text model's sizes"),
        ({"model_type": "gemma3", "text_config": [1]}, r"text_config is \[1\]; it must be an object"),
        ({"model_type": "gemma3", "text_config": {"dtype": "int3"}}, "dtype is 'int3'; it must be one of"),
        (
            {"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "awq"}},
            "quantization_config is .*'awq'.*; choose an unquantised gemma3",
        ),
        ({"num_key_value_heads": None, "head_dim": None, "num_local_experts": 0}, ""),
    ],
)
def test_a_model_that_no_replica_serves_has_no_plan(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), 4)
    values = sizes | {"intermediate_size": 8, "vocab_size": 8} | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    if words:
        with pytest.raises(ConfigInvalid, match=words):
            read_shape(tmp_path)
    else:
        assert (read_shape(tmp_path).kv_heads, read_shape(tmp_path).head_dim) == (4, 1)


@pytest.mark.parametrize(("text", "found"), [("[]", "list"), ('"s"', "str"), ("null", "NoneType")])
def test_a_model_that_is_no_object_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigInvalid, match=f"is a JSON {found}, expected an object"):
        read_shape(tmp_path)


def test_the_command_prints_a_table_json_and_a_page(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["plan", "--context", "128K", "--max-gpus", "8"]
    table = runner.invoke(main, arguments)
    assert table.exit_code == 0
    assert "128,000 + 512 tokens" in table.output
    assert "Bound by" in table.output
    page = tmp_path / "plan.html"
    shown = runner.invoke(main, [*arguments, "--json", "--plot", str(page)])
    assert shown.exit_code == 0
    report = json.loads(shown.output)
    assert report["grids"][0]["fits"]
    assert [row["context_tokens"] for row in report["by_context"]][3] == 128_000
    html = page.read_text(encoding="utf-8")
    assert "Plotly.newPlot" in html
    assert 'src="http' not in html  # readable without a network


def test_two_missed_targets_are_fixed_together() -> None:
    wish = replace(WISH, ttft_seconds=1.0, tpot_seconds=0.001, max_gpus=16)
    text = shortfall(LLAMA3_8B, H100, wish, plan(LLAMA3_8B, H100, wish)[0])
    found = re.search(r"try --ttft (\S+) with --tpot (\S+)$", text)
    assert found, text
    ttft, tpot = map(float, found.groups())
    for fixed, fits in (
        (replace(wish, ttft_seconds=ttft, tpot_seconds=tpot), True),
        (replace(wish, ttft_seconds=ttft), False),
        (replace(wish, tpot_seconds=tpot), False),
    ):
        assert plan(LLAMA3_8B, H100, fixed)[0].fits is fits


def test_more_gpus_are_named_where_they_suffice_and_weights_that_do_not_fit_are_told_from_kv() -> None:
    wish = replace(WISH, context_tokens=1000, tpot_seconds=0.05, max_gpus=1)
    closest = plan(LLAMA3_70B, A100, wish)[0]
    text = shortfall(LLAMA3_70B, A100, wish, closest)
    assert "not even the weights fit: on TP1 x SPP1 x KVP1 they take 141 GB of each GPU" in text
    found = re.search(r"--max-gpus (\d+)", text)
    assert found
    assert plan(LLAMA3_70B, A100, replace(wish, max_gpus=int(found[1])))[0].fits
    assert not plan(LLAMA3_70B, A100, replace(wish, max_gpus=int(found[1]) - 1))[0].fits
    hasty = replace(wish, tpot_seconds=0.0001, max_gpus=8)
    assert "--max-gpus" not in shortfall(LLAMA3_8B, H100, hasty, plan(LLAMA3_8B, H100, hasty)[0])


def test_a_batch_is_priced_by_its_own_time_and_not_by_that_of_more_requests_than_fit() -> None:
    few, many = (rate(LLAMA3_8B, H100, Topology(8, 4), replace(WISH, concurrent=n)) for n in (1, 1000))
    assert many.batch == few.batch < 1000
    assert many.cost_per_million_output == few.cost_per_million_output
    assert many.tpot_seconds > few.tpot_seconds


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize(
    "arguments",
    [["--model", "Llama-3-70B", "--hardware", "A100", "--concurrent", "1000"], ["--context", "1M"]],
)
def test_no_figure_is_shortened_however_narrow_the_terminal(
    columns: int, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = CliRunner().invoke(main, ["plan", *arguments, "--max-gpus", "8", "--rows", "20"])
    assert "8 x 1 x 1" in shown.stdout
    assert "…" not in shown.stdout


def test_where_nothing_fits_the_closest_grids_are_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["plan", "--context", "10M", "--ttft", "2", "--max-gpus", "8"]
    page = tmp_path / "plan.html"
    shown = CliRunner().invoke(main, [*arguments, "--plot", str(page)])
    assert shown.exit_code == 2
    assert "error: no grid of up to 8 H100" in shown.stderr
    assert re.search(r"^8 x 1 x 1 +8 +9,\d{3}! +6\d\.\d! .* 754 *$", shown.stdout, re.MULTILINE), (
        "nothing is cut"
    )
    assert "…" not in shown.stdout
    assert "GPUs by context" in shown.stdout
    assert "Plotly.newPlot" in page.read_text(encoding="utf-8")
    report = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert report["plan"] is None
    assert report["grids"][0]["misses"] == ["memory", "TTFT", "TPOT"]


def test_the_command_refuses_what_it_does_not_know() -> None:
    runner = CliRunner()
    for arguments, message in (
        (["--context", "5X"], "write 131072, 128K, 1M"),
        (["--model", "nope"], "neither a preset"),
        (["--hardware", "abacus"], "choose one of"),
        (
            ["--plot", "/nonexistent/plan.html"],
            "--plot is /nonexistent/plan.html, whose folder does not exist",
        ),
        (["--plot", f"{__file__}/plan.html"], "whose folder is a file"),
        (["--plot", "/proc/plan.html"], "--plot: /proc/plan.html cannot be written"),
        (["--rows", "-1"], "Invalid value for '--rows': -1 is not in the range"),
        (["--context", "0"], "Invalid value for '--context': '0' is not in the range of 1 to 1,000,000,000"),
        (["--context", "9" * 400], "Invalid value for '--context'"),
        (["--output", "0"], "Invalid value for '--output'"),
        (["--ttft", "0"], "Invalid value for '--ttft': 0.0 is not in the range"),
        (["--tpot", "nan"], "Invalid value for '--tpot': nan is no finite number"),
        (["--price", "0"], "Invalid value for '--price'"),
        (["--memory-fraction", "2"], "Invalid value for '--memory-fraction'"),
        (["--concurrent", "0"], "Invalid value for '--concurrent'"),
        (["--max-gpus", "0"], "Invalid value for '--max-gpus'"),
        (["--context", "10M", "--ttft", "2", "--max-gpus", "8"], "no grid of up to 8 H100"),
        (["--disk-tier", "64Gi"], "--disk-tier is 68,719,476,736, and there is no host tier"),
        (["--store", "64Mi"], "--store is 67,108,864, and there is no host tier"),
        (["--host-tier", "1Gi", "--no-prefix-caching"], "--no-prefix-caching leaves none; leave one of them"),
        (
            ["--host-tier", "1Ki", "--max-gpus", "1"],
            "--host-tier is 1,024 bytes, and a block of 16 tokens takes 2,097,152",
        ),
        (
            ["--streaming", "1Ki", "--max-gpus", "1"],
            "--streaming is 1,024 bytes, and a block of 16 tokens takes 2,097,152",
        ),
    ):
        result = runner.invoke(main, ["plan", *arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.split())


@pytest.mark.long
def test_fp8_halves_the_kv_of_a_model_in_bfloat16_and_needs_no_more_gpus() -> None:
    def planned(*options: str) -> dict[str, Any]:
        shown = CliRunner().invoke(main, ["plan", "--model", "Llama-3-8B", "--json", *options])
        found: dict[str, Any] = json.loads(shown.output)
        return found

    full, rounded = planned(), planned("--kv-dtype", "fp8")
    kv_bytes = {str(one["topology"]): one["kv_bytes"] for one in full["grids"]}
    for one in rounded["grids"]:
        assert one["kv_bytes"] == pytest.approx(kv_bytes[str(one["topology"])] / 2)
    for before, after in zip(full["by_context"], rounded["by_context"], strict=True):
        assert after["memory"] <= before["memory"]
        assert after["bandwidth"] <= before["bandwidth"]
    assert rounded["by_context"][-1]["bandwidth"] < full["by_context"][-1]["bandwidth"]


def test_a_manifest_that_asks_for_fp8_is_simulated_with_twice_the_tokens() -> None:
    source = {"name": "m", "source": {"path": "x"}}
    auto, fp8 = (
        MedhaReplicaSpec.model_validate({"model": source, "kvCache": {"dtype": dtype, "size": "8Gi"}})
        for dtype in ("auto", "fp8")
    )
    tokens = [deployment_of(spec, H100, LLAMA3_8B).kv_tokens() for spec in (auto, fp8)]
    assert tokens[1] == 2 * tokens[0]


def test_streaming_makes_a_larger_request_fit_at_the_time_of_the_host_link() -> None:
    wish = replace(WISH, ttft_seconds=2000.0, tpot_seconds=5.0, max_gpus=1)
    without = rate(LLAMA3_8B, H100, Topology(1, 1, 1), wish)
    assert "memory" in without.misses
    found = rate(LLAMA3_8B, H100, Topology(1, 1, 1), replace(wish, streaming_bytes=200 * 2**30))
    assert found.fits
    assert found.longest_tokens > wish.request_tokens > found.kv_tokens
    streamed_bytes = found.streamed_tokens * LLAMA3_8B.kv_bytes_per_token
    assert found.tpot_seconds == pytest.approx(streamed_bytes / H100.host_link_bytes_per_second)
    assert found.tpot_seconds < found.longest_step_seconds
    too_little = rate(LLAMA3_8B, H100, Topology(1, 1, 1), replace(wish, streaming_bytes=2**30))
    assert "memory" in too_little.misses
    short = replace(wish, context_tokens=100_000)
    small, usual = (
        rate(LLAMA3_8B, H100, Topology(1, 1, 1), replace(short, streaming_bytes=size)) for size in (2**33, 0)
    )
    assert small.streamed_tokens == 0
    assert small.tpot_seconds == usual.tpot_seconds


def test_lower_tiers_hold_more_tokens_and_their_kv_comes_in_the_time_of_their_bytes() -> None:
    wish = replace(
        WISH, context_tokens=128_000, host_bytes=2**36, disk_bytes=2**39, disk_bytes_per_second=2**30, store_bytes_per_second=2**28,
    )  # fmt: skip
    grid = Topology(8, 1, 2)
    found = rate(LLAMA3_8B, H100, grid, wish)
    assert found.disk_tokens == pytest.approx(8 * found.host_tokens, rel=1e-6)
    rank_bytes = wish.context_tokens * LLAMA3_8B.kv_bytes_per_token / grid.ranks
    copied_seconds = rank_bytes / H100.host_link_bytes_per_second
    assert found.host_seconds == pytest.approx(copied_seconds, rel=0.01)
    assert found.disk_seconds == pytest.approx(rank_bytes / 2**30 + copied_seconds, rel=0.05)
    objects = wish.context_tokens / 2 / 16 / 32  # on each lane; each takes 30 ms, and four are read at a time
    store_seconds = (1 + objects / 4) * 0.03 + rank_bytes / 2**28
    assert found.store_seconds == pytest.approx(store_seconds + copied_seconds, rel=0.02)
    without = rate(LLAMA3_8B, H100, grid, replace(wish, disk_bytes=0, store_bytes_per_second=0.0))
    assert (without.disk_tokens, without.disk_seconds, without.store_seconds) == (0, None, None)
    assert without.host_seconds == found.host_seconds


def test_a_tier_that_does_not_hold_a_whole_prompt_shows_no_time_for_it() -> None:
    """KV of disks and stores passes through the host tier, so that one has to hold the prompt in any case."""
    wish = replace(
        WISH, context_tokens=128_000, host_bytes=2**31, disk_bytes=2**31, store_bytes_per_second=2**28
    )
    grid = Topology(8, 1, 2)
    rank_bytes = wish.context_tokens * LLAMA3_8B.kv_bytes_per_token / grid.ranks
    assert rank_bytes == pytest.approx(2**30, rel=0.05)
    found, small_disk, small_host = (
        rate(LLAMA3_8B, H100, grid, replace(wish, **sizes))  # type: ignore[arg-type]
        for sizes in ({}, {"disk_bytes": 2**29}, {"host_bytes": 2**29})
    )
    assert None not in (found.host_seconds, found.disk_seconds, found.store_seconds)
    assert small_disk.disk_seconds is None
    assert (small_disk.host_seconds, small_disk.store_seconds) == (found.host_seconds, found.store_seconds)
    assert (small_host.host_seconds, small_host.disk_seconds, small_host.store_seconds) == (None, None, None)


def test_tiers_hold_whole_blocks() -> None:
    block_bytes = 16 * LLAMA3_8B.kv_bytes_per_token
    wish = replace(WISH, host_bytes=3 * block_bytes - 1, disk_bytes=5 * block_bytes)
    found = rate(LLAMA3_8B, H100, Topology(1, 1, 1), wish)
    assert (found.host_tokens, found.disk_tokens) == (32, 80)
    assert rate(LLAMA3_8B, H100, Topology(1, 1, 2), wish).host_tokens == 64


def test_a_streamed_request_comes_from_no_tier() -> None:
    wish = replace(
        WISH, ttft_seconds=2000.0, tpot_seconds=5.0, max_gpus=1, host_bytes=2**36, streaming_bytes=200 * 2**30
    )
    found = rate(LLAMA3_8B, H100, Topology(1, 1, 1), wish)
    assert found.streamed_tokens
    assert found.host_seconds is None


@pytest.mark.parametrize("field", ["disk_bytes", "store_bytes_per_second"])
def test_a_lower_tier_needs_a_host_tier(field: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"{field} is .* and host_bytes is 0.*--host-tier"):
        replace(WISH, **{field: 2**30})  # type: ignore[arg-type]
