"""Reads config.json: fields that change results are implemented, or refused by name instead of ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.model.model_config import ClampedSwiglu, ExpertsConfig, ModelConfig
from medha_worker.model.rope import RopeConfig

ABSENT = object()

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "pretraining_tp": 1,
    "use_cache": True,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": 32_768,
    "max_window_layers": 8,
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None, "head_dim": 128}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "head_dim": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_window_layers": 48,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_act": ABSENT,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": ABSENT,
}
"""The text model of 1 B parameters."""
GEMMA3_WITH_IMAGES: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
    "tie_word_embeddings": ABSENT,
}
"""The model of 4 B parameters; the fields of a Llama around it do not count."""
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_local_experts": 32,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "torch_dtype": None,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
DEFAULT = {"rope_type": "default", "rope_theta": 500_000.0}


def read(
    directory: Path,
    changes: dict[str, Any] | None = None,
    max_model_len: int | None = None,
    rope_scaling: dict[str, Any] | None = None,
) -> ModelConfig:
    """Read the Llama above with some fields changed or removed."""
    fields = {name: value for name, value in (LLAMA | (changes or {})).items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(fields))
    return ModelConfig.from_directory(directory, max_model_len, rope_scaling)


def test_a_llama_3_2_config_is_read_as_written(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
        rope=RopeConfig("llama3", 500_000.0, 32.0, 8192),
        dtype="bfloat16",
        windows=(None,) * 16,
        max_position_tokens=131_072,  # as published, half of 8,192 times the factor
        max_model_len=131_072,
    )


def test_fields_that_may_be_missing_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        dict.fromkeys(
            (
                "head_dim",
                "num_key_value_heads",
                "rms_norm_eps",
                "rope_theta",
                "rope_scaling",
                "tie_word_embeddings",
                "torch_dtype",
            ),
            ABSENT,
        ),
    )
    assert (config.head_dim, config.num_kv_heads, config.rms_norm_eps) == (64, 32, 1e-6)
    assert (config.rope, config.tie_word_embeddings, config.dtype) == (RopeConfig(), False, "float32")
    assert read(tmp_path, QWEN3 | {"head_dim": ABSENT}).head_dim == 128


def test_published_mixtures_of_experts_have_their_published_sizes(tmp_path: Path) -> None:
    mixtral = read(tmp_path, MIXTRAL)
    assert mixtral.experts == ExpertsConfig(8, 2, 14_336, renormalises=True, layers=frozenset(range(32)))
    assert mixtral.parameters == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.linear_flops_per_token == pytest.approx(2 * 12.75e9, rel=1e-3)
    qwen = read(tmp_path, QWEN3_MOE)
    assert qwen.experts == ExpertsConfig(128, 8, 768, renormalises=True, layers=frozenset(range(48)))
    assert qwen.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert qwen.linear_flops_per_token == pytest.approx(2 * 3.04e9, rel=1e-2)


def test_the_published_gpt_oss_is_read_as_written(tmp_path: Path) -> None:
    """Without a data type it is in bfloat16, as its tensors are."""
    config = read(tmp_path, GPT_OSS)
    assert config.parameters == pytest.approx(20.9e9, rel=0.005)
    assert config.weights_bytes(2) == pytest.approx(13.76e9, rel=0.002)
    assert config.experts == ExpertsConfig(
        32, 4, 2880, renormalises=True, layers=frozenset(range(24)), swiglu=ClampedSwiglu(1.702, 7.0)
    )
    assert config.windows == (128, None) * 12
    assert config.qkv_bias
    assert config.output_bias
    assert config.dtype == "bfloat16"
    assert config.max_model_len == 131_072
    assert config.rope == RopeConfig("yarn", 150_000.0, 32.0, 4096, truncate=False)
    missing = (
        "layer_types",
        "rope_scaling",
        "rope_theta",
        "attention_bias",
        "sliding_window",
        "swiglu_limit",
    )
    assert read(tmp_path, GPT_OSS | dict.fromkeys(missing, ABSENT)) == config
    assert read(tmp_path, GPT_OSS, max_model_len=128).windows == (None,) * 24
    wider = read(tmp_path, GPT_OSS | {"swiglu_limit": 9.0, "quantization_config": None})
    assert wider.experts is not None
    assert wider.experts.swiglu == ClampedSwiglu(1.702, 9.0)
    assert wider.weights_bytes(2) == 2 * wider.parameters


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (GPT_OSS | {"sliding_window": None}, "sliding_window is None, but must be a whole number of at least 1"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit is 0, but must be a positive number"),
        (GPT_OSS | {"quantization_config": {"quant_method": "awq"}}, "'awq', but models of this type are served in mxfp4 alone; choose"),
        (
            GPT_OSS
            | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.3.mlp"]}},
            r"modules_to_not_convert is \['model.layers.3.mlp'\], which is not supported",
        ),
        (MIXTRAL | {"quantization_config": {"quant_method": "mxfp4"}}, "served in compressed-tensors or fp8 or awq or gptq alone"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method is 'mxfp4', which is not supported"),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0, which is not supported"),
    ],
)  # fmt: skip
def test_what_a_gpt_oss_cannot_be_is_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(MedhaError, match=named):
        read(tmp_path, changes)


def test_sparse_layers_are_those_that_transformers_makes_sparse(tmp_path: Path) -> None:
    """`transformers` writes the number of experts under another name than published checkpoints do."""
    step = {"decoder_sparse_step": 3, "mlp_only_layers": [5, 47]}
    config = read(tmp_path, QWEN3_MOE | step | {"num_experts": ABSENT, "num_local_experts": 16})
    assert config.experts is not None
    assert config.experts.count == 16
    assert config.experts.layers == frozenset(range(2, 48, 3)) - {5, 47}
    assert config.mlp_widths == {"intermediate_size": 6144, "moe_intermediate_size": 768}
    absent = dict.fromkeys(("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"), ABSENT)
    experts = read(tmp_path, QWEN3_MOE | absent).experts
    assert experts is not None
    assert (len(experts.layers), experts.renormalises) == (48, False)


@pytest.mark.parametrize(
    ("model", "has_norm"), [(QWEN3_MOE, True), (QWEN3, True), (GEMMA3, True), (LLAMA, False)]
)
def test_a_norm_of_queries_and_keys_may_be_named_as_the_family_has_it(
    model: dict[str, Any], has_norm: bool, tmp_path: Path
) -> None:
    """Qwen3-Coder-30B-A3B names the norm that every Qwen3-MoE has."""
    config = read(tmp_path, model | {"use_qk_norm": has_norm})
    assert config.qk_norm is has_norm
    assert config == read(tmp_path, model)


def test_a_mixtures_missing_fields_take_the_defaults_of_its_family(tmp_path: Path) -> None:
    absent = dict.fromkeys(("rope_theta", "rms_norm_eps", "sliding_window"), ABSENT)
    mixtral, qwen = (
        read(tmp_path, MIXTRAL | absent),
        read(tmp_path, QWEN3_MOE | absent | {"head_dim": ABSENT}),
    )
    assert (mixtral.rope.theta, mixtral.rms_norm_eps, mixtral.max_model_len) == (1e6, 1e-5, 131_072)
    assert (qwen.rope.theta, qwen.rms_norm_eps, qwen.head_dim) == (1e4, 1e-6, 64)


def test_gemma_3_has_two_kinds_of_layers(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert config.local_layers == frozenset(range(26)) - {5, 11, 17, 23}
    assert (config.rope_of(4).theta, config.rope_of(5).theta) == (10_000, 1_000_000)
    assert config.tie_word_embeddings
    assert (config.query_scale, config.embedding_scale) == (1.0, pytest.approx(1152**0.5))
    assert config.parameters == pytest.approx(1.0e9, rel=0.01)
    # A window that does not bind leaves these layers their RoPE.
    short = read(tmp_path, GEMMA3, 512)
    assert (short.windows, short.local_layers) == ((None,) * 26, config.local_layers)


def test_the_text_model_is_read_from_a_model_with_images(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_WITH_IMAGES)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_model_len, config.dtype) == (262_208, 131_072, "bfloat16")
    assert (config.rope, config.local_rope) == (RopeConfig("linear", 1e6, 8.0, 131_072), RopeConfig())
    assert (config.windows.count(1024), config.tie_word_embeddings) == (29, True)
    assert config.parameters == pytest.approx(3.88e9, rel=0.01)


def test_the_spellings_and_defaults_of_gemma_3_mean_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, GEMMA3 | {"rope_scaling": scaling})
    assert (old.rope.kind, old.rope.factor, old.max_model_len) == ("linear", 8.0, 32_768)
    kinds = ("full_attention", "sliding_attention")
    new = {
        "rope_scaling": ABSENT,
        "rope_parameters": {kinds[0]: scaling | {"rope_theta": 1e6}, kinds[1]: {"rope_theta": 1e4}},
        "sliding_window_pattern": ABSENT,
        "layer_types": [kinds[(index + 1) % 6 != 0] for index in range(26)],
    }
    absent = dict.fromkeys(("rope_theta", "rope_local_base_freq", "hidden_activation", "head_dim"), ABSENT)
    assert read(tmp_path, GEMMA3 | absent | new) == old
    absent |= {"rope_scaling": scaling, "query_pre_attn_scalar": ABSENT, "sliding_window_pattern": ABSENT}
    assert read(tmp_path, GEMMA3 | absent) == old
    override = read(tmp_path, GEMMA3 | {"query_pre_attn_scalar": 64}, rope_scaling=scaling)
    assert (override.rope.factor, override.local_rope, override.query_scale) == (8.0, old.local_rope, 2.0)
    assert override.max_model_len == 8 * 32_768


@pytest.mark.parametrize(
    ("changes", "tensor", "named"),
    [
        (QWEN3_MOE | {"moe_intermediate_size": 100}, 8, r"moe_intermediate_size \(100\)"),
        (MIXTRAL | {"intermediate_size": 100}, 8, r"intermediate_size \(100\)"),
        (QWEN3_MOE | {"intermediate_size": 100}, 8, None),  # no layer is dense
        (QWEN3_MOE | {"intermediate_size": 100, "mlp_only_layers": [0]}, 8, r"intermediate_size \(100\)"),
    ],
)
def test_the_width_of_experts_must_divide(
    changes: dict[str, Any], tensor: int, named: str | None, tmp_path: Path
) -> None:
    config = read(tmp_path, changes)
    if named is None:
        config.require_tensor_size(tensor)
        return
    with pytest.raises(ConfigInvalid, match=rf"parallelism\.tensor is {tensor}, .* divide {named}"):
        config.require_tensor_size(tensor)


def test_biases_are_where_each_architecture_has_them(tmp_path: Path) -> None:
    def biases(changes: dict[str, Any]) -> tuple[bool, bool, bool]:
        config = read(tmp_path, changes)
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases({"attention_bias": True}) == (True, True, False)
    assert biases({"mlp_bias": True}) == (False, False, True)
    assert biases(QWEN2) == (True, False, False)
    assert biases(QWEN3) == (False, False, False)
    assert biases(QWEN3 | {"attention_bias": True}) == (True, True, False)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": YARN, "rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 1e6},
        {"rope_scaling": ABSENT, "rope_theta": ABSENT, "rope_parameters": YARN | {"rope_theta": 1e6}},
        {"rope_scaling": YARN, "rope_theta": 1e6, "rope_parameters": None},
        {
            "rope_scaling": ABSENT,
            "rope_theta": ABSENT,
            "rope_parameters": {"full_attention": YARN | {"rope_theta": 1e6}},
        },
        {
            "rope_scaling": ABSENT,
            "rope_parameters": {
                kind: YARN | {"rope_theta": 1e6} for kind in ("full_attention", "sliding_attention")
            },
        },
    ],
)
def test_every_spelling_of_rope_means_the_same(spelling: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, spelling | {"max_position_embeddings": 32_768})
    assert config.rope == RopeConfig("yarn", 1e6, 4.0, 32_768)
    assert config.max_model_len == 131_072


@pytest.mark.parametrize(
    ("changes", "override", "limit"),
    [
        ({"rope_scaling": None}, None, 131_072),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, None, 131_072),
        ({"rope_scaling": None}, {"rope_type": "linear", "factor": 4.0}, 4 * 131_072),
        # A linear scaling takes the place of the checkpoint's own, which its length has in it.
        (GEMMA3_WITH_IMAGES, {"rope_type": "linear", "factor": 8.0}, 131_072),
        (GEMMA3_WITH_IMAGES, {"rope_type": "linear", "factor": 16.0}, 2 * 131_072),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 2.0}, 65_536),
        ({"rope_scaling": None}, {"rope_type": "yarn", "factor": 8.0}, 8 * 131_072),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None, 131_072),
        ({"rope_scaling": YARN | {"factor": None}}, None, 131_072),
        ({}, LLAMA["rope_scaling"], 8192 * 32),
        ({"dual_chunk_attention_config": None}, None, 131_072),
        (
            {
                "dual_chunk_attention_config": {
                    "original_max_position_embeddings": 262_144,
                    "chunk_size": 262_144,
                }
            },
            None,
            131_072,
        ),
    ],
)
def test_the_limit_is_what_the_scaling_reaches(
    changes: dict[str, Any], override: dict[str, Any] | None, limit: int, tmp_path: Path
) -> None:
    assert read(tmp_path, changes, rope_scaling=override).max_model_len == limit
    assert read(tmp_path, changes, limit, override).max_model_len == limit
    with pytest.raises(MedhaError, match=rf"model\.maxModelLen is {limit + 1}"):
        read(tmp_path, changes, limit + 1, override)


def test_an_override_keeps_the_checkpoints_theta_in_either_spelling(tmp_path: Path) -> None:
    override = {"rope_type": "linear", "factor": 2.0}
    wanted = RopeConfig("linear", 500_000.0, 2.0, 131_072)
    assert read(tmp_path, rope_scaling=override).rope == wanted
    new = {"rope_scaling": ABSENT, "rope_theta": ABSENT, "rope_parameters": DEFAULT}
    assert read(tmp_path, new, rope_scaling=override).rope == wanted
    assert read(tmp_path, new, rope_scaling=override | {"rope_theta": 7e5}).rope.theta == 7e5


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_a_factor_that_transformers_ignores_is_ignored_with_a_warning(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has it. In a manifest, it is refused."""
    absent = {"rope_scaling": ABSENT}
    plain = read(tmp_path, QWEN3 | absent | {field: YARN})
    assert not caplog.records
    assert read(tmp_path, QWEN3 | absent | {field: YARN | {"attn_factor": 0.878}}) == plain
    (record,) = caplog.records
    assert "attn_factor is 0.878, and is ignored" in record.getMessage()
    with pytest.raises(ModelUnsupported, match=r"model\.ropeScaling: attn_factor is 0\.878"):
        read(tmp_path, QWEN3, rope_scaling=YARN | {"attn_factor": 0.878})


def test_dynamic_rope_is_served_within_the_original_length_and_refused_beyond(tmp_path: Path) -> None:
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096}
    assert read(tmp_path, dynamic).max_model_len == 4096
    with pytest.raises(ModelUnsupported, match=r"4097.*dynamic.*4096 tokens.*model\.ropeScaling"):
        read(tmp_path, dynamic, 4097)


@pytest.mark.parametrize(
    ("changes", "max_model_len"),
    [
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": None}, None),
        (QWEN2, None),
        (QWEN2 | {"sliding_window": 0}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        (QWEN2 | {"use_sliding_window": True}, 32_768),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 16}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 16}, None),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": None}, None),
    ],
)
def test_a_sliding_window_that_does_not_bind_is_none(
    changes: dict[str, Any], max_model_len: int | None, tmp_path: Path
) -> None:
    config = read(tmp_path, changes, max_model_len)
    assert config.max_model_len == (max_model_len or 131_072)
    assert config.windows == (None,) * 16


@pytest.mark.parametrize(
    ("changes", "max_model_len", "window", "full_layers"),
    [
        (MISTRAL, 4097, 4096, 0),
        (MISTRAL, None, 4096, 0),
        (MISTRAL | {"sliding_window": ABSENT}, None, 4096, 0),
        (MISTRAL | {"sliding_window": 1}, 2, 1, 0),
        (QWEN2 | {"use_sliding_window": True}, None, 32_768, 8),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, None, 32_768, 0),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "max_window_layers": 16,
                "layer_types": ["full_attention"] * 15 + ["sliding_attention"],
            },
            None,
            32_768,
            15,
        ),
        (
            QWEN3 | {"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 3},
            None,
            4096,
            3,
        ),
    ],
)
def test_each_layer_has_its_own_window(
    changes: dict[str, Any], max_model_len: int | None, window: int, full_layers: int, tmp_path: Path
) -> None:
    windows = read(tmp_path, changes, max_model_len).windows
    assert windows == (None,) * full_layers + (window,) * (16 - full_layers)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sliding_window": 1024}, "sliding_window is 1024.*LlamaForCausalLM has no window.*at most 1024"),
        (
            MISTRAL | {"layer_types": ["full_attention"] + ["sliding_attention"] * 15},
            "layer_types is .*MistralForCausalLM have the same window.*at most 4096",
        ),
        (
            QWEN3_MOE
            | {
                "use_sliding_window": True,
                "sliding_window": 4096,
                "layer_types": ["full_attention", "sliding_attention"] * 24,
            },
            "layer_types is .*Qwen3MoeForCausalLM have the same window.*at most 4096",
        ),
    ],
)
def test_a_window_that_the_architecture_does_not_have_is_refused_with_the_length_that_works(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=found):
        read(tmp_path, changes)


def test_a_checkpoint_with_dual_chunk_attention_is_served_up_to_the_length_that_needs_none(
    tmp_path: Path,
) -> None:
    """Qwen2.5-1M states a million tokens, of which the first 262,144 are computed as in any Qwen2.5."""
    changes: dict[str, Any] = {
        "max_position_embeddings": 1_010_000,
        "dual_chunk_attention_config": {
            "chunk_size": 262_144,
            "local_size": 8192,
            "original_max_position_embeddings": 262_144,
        },
    }
    assert read(tmp_path, changes).max_model_len == 262_144
    assert read(tmp_path, changes, 262_144).max_model_len == 262_144
    with pytest.raises(
        ModelUnsupported, match=r"maxModelLen is 262145, but beyond 262144 .*dual_chunk_attention_config"
    ):
        read(tmp_path, changes, 262_145)


@pytest.mark.parametrize("name", ["FP8", None])
def test_a_description_in_a_file_of_modelopt_is_refused_by_its_algorithm(
    name: str | None, tmp_path: Path
) -> None:
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": name}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    with pytest.raises(
        ModelUnsupported, match=rf"hf_quant_config\.json: quant_algo is {name!r}, in ModelOpt's format"
    ):
        read(tmp_path)


def test_errors_leave_out_the_middle_of_long_values(tmp_path: Path) -> None:
    ignored = [f"model.layers.{layer}.mlp.down_proj" for layer in range(200)]
    with pytest.raises(ModelUnsupported, match="quantization_config is ") as refused:
        read(
            tmp_path,
            GEMMA3_WITH_IMAGES | {"quantization_config": QUANTISATIONS["w4a16"] | {"ignore": ignored}},
        )
    assert len(str(refused.value)) < 300


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM .*LlamaForCausalLM"),
    (MIXTRAL | {"num_experts": 8}, "num_experts is 8"),
    (QWEN3_MOE | {"n_routed_experts": 8}, "n_routed_experts is 8"),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        r"quantization_config\.quant_method is 'hqq'.*unquantised",
    ),
    ({"compression_config": {"quant_method": "sparse"}}, r"compression_config\.quant_method is 'sparse'"),
    (
        MIXTRAL | {"quantization_config": {"quant_method": "hqq"}},
        r"quantization_config\.quant_method is 'hqq', but models of this type .*or the unquantised one",
    ),
    (
        QWEN3_MOE | {"compression_config": QUANTISATIONS["w4a16"] | {"format": "marlin-24"}},
        r"compression_config\.format is 'marlin-24', which is not supported",
    ),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is 64"),
    ({"index_topk": 2048}, "index_topk is 2048"),
    ({"use_qk_norm": True}, "use_qk_norm is True"),
    (QWEN3_MOE | {"use_qk_norm": False}, "use_qk_norm is False"),
    ({"use_logn_attn": True}, "use_logn_attn is True"),
    ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling is "),
    ({"sliding_window": 4096}, "sliding_window is 4096.*LlamaForCausalLM has no window"),
    (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
    (GEMMA3 | {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0"),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (
        GEMMA3 | {"rope_scaling": ABSENT, "rope_parameters": {"sliding_attention": YARN}},
        "rope_parameters is .*default or linear",
    ),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
    ({"rotary_pct": 0.25}, "rotary_pct"),
    ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts is 8"),
    ({"num_experts": 64}, "num_experts is 64"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"is_causal": False}, "is_causal is False"),
    ({"no_rope_layers": [1, 1, 1, 0] * 4}, "no_rope_layers"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'.*bfloat16"),
    ({"dtype": "float64"}, "dtype is 'float64'"),
    ({"layer_types": ["full_attention"] * 15 + ["linear_attention"]}, "layer_types"),
    (
        GEMMA3_WITH_IMAGES | {"quantization_config": QUANTISATIONS["w4a16"]},
        "quantization_config is .*unquantised Gemma3ForConditionalGeneration",
    ),
    ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'.*yarn"),
    ({"rope_scaling": YARN | {"type": ["yarn"]}}, r"rope_type is \['yarn'\].*yarn"),
    ({"rope_scaling": {"rope_type": [1], "factor": 2.0}}, r"rope_type is \[1\]"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type is 'mrope'"),
    ({"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "mrope_section"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    (
        {
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": DEFAULT,
                "sliding_attention": DEFAULT | {"rope_theta": 1e4},
            },
        },
        "rope_parameters .*one set",
    ),
    (
        {"rope_scaling": None, "rope_parameters": {"full_attention": DEFAULT, "rope_theta": 1e4}},
        "rope_parameters",
    ),
]


@pytest.mark.parametrize(("changes", "named"), UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_name_and_value(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        read(tmp_path, changes)


INVALID: list[tuple[dict[str, Any], str]] = [
    *(
        (model | {name: 10**400}, f"{name} is 1000.*0000, but must be a .*2^53".replace("^", r"\^"))
        for model, name in (
            ({}, "hidden_size"),
            ({}, "vocab_size"),
            ({}, "rms_norm_eps"),
            ({}, "rope_theta"),
            ({}, "max_position_embeddings"),
            (QWEN2 | {"use_sliding_window": True}, "max_window_layers"),
            (GEMMA3, "query_pre_attn_scalar"),
            (GPT_OSS, "swiglu_limit"),
        )
    ),
    ({"rope_scaling": YARN | {"factor": 1e308}}, r"factor is 1e\+308, but must be a positive number"),
    ({"rope_scaling": YARN | {"beta_fast": 10**400}}, "beta_fast is 1000"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"),
    ({"architectures": ABSENT}, "architectures is missing"),
    ({"architectures": []}, "architectures is "),
    ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ({"model_type": "mistral"}, "model_type is 'mistral'.*'llama'"),
    ({"hidden_size": ABSENT}, "hidden_size is missing"),
    ({"hidden_size": 2048.5}, r"hidden_size is 2048\.5"),
    ({"hidden_size": "2048"}, "hidden_size is '2048'"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5.*32"),
    (MISTRAL | {"sliding_window": None, "num_key_value_heads": ABSENT}, "num_key_value_heads is missing"),
    ({"head_dim": ABSENT, "num_attention_heads": 24}, "num_attention_heads is 24.*2048"),
    ({"head_dim": 63}, "head dimension is 63"),
    ({"rms_norm_eps": -1.0}, r"rms_norm_eps is -1\.0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"max_position_embeddings": None}, "max_position_embeddings is None"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    ({"dual_chunk_attention_config": True}, "dual_chunk_attention_config is True.*an object or null"),
    (
        {"dual_chunk_attention_config": {"chunk_size": 8192}},
        "dual_chunk_attention_config: original_max_position_embeddings is missing",
    ),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
    ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "type is 'linear'"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "high_freq_factor is missing",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        "high_freq_factor is 4",
    ),
    ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no'"),
    ({"rope_parameters": DEFAULT}, "rope_scaling is .*equal to rope_parameters"),
    ({"layer_types": ["full_attention"]}, "layer_types is .*16"),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 16}, "use_sliding_window is False"),
    (QWEN2 | {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is -1"),
    (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
    (QWEN2 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
    (GEMMA3 | {"sliding_window": None}, "sliding_window is None"),
    (GEMMA3_WITH_IMAGES | {"text_config": None}, "text_config is None"),
    (GEMMA3_WITH_IMAGES | {"text_config": {"model_type": "llama"}}, "text_config is .*gemma3_text"),
    (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    (GEMMA3 | {"rope_parameters": DEFAULT}, "rope_parameters is .*sliding_attention"),
    (
        GEMMA3 | {"rope_scaling": YARN, "rope_parameters": {"full_attention": DEFAULT}},
        "rope_scaling is .*absent beside rope_parameters",
    ),
    (MIXTRAL | {"num_local_experts": ABSENT}, "num_local_experts is missing"),
    (MIXTRAL | {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9.*num_local_experts \(8\)"),
    (QWEN3_MOE | {"num_experts": ABSENT}, "num_experts is missing"),
    (QWEN3_MOE | {"num_local_experts": 64}, r"num_local_experts is 64.*num_experts \(128\)"),
    (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (QWEN3_MOE | {"mlp_only_layers": [1.5]}, r"mlp_only_layers is \[1\.5\]"),
    (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
]


@pytest.mark.parametrize(("changes", "named"), INVALID)
def test_wrong_and_missing_values_are_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=named):
        read(tmp_path, changes)


def test_a_factor_that_an_override_replaces_may_be_tiny(tmp_path: Path) -> None:
    stored = {"rope_scaling": {"type": "linear", "factor": 1e-308}}
    assert read(tmp_path, stored, 512, {"rope_type": "linear", "factor": 2.0}).rope.factor == 2.0


def test_a_wrong_override_is_the_manifests_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"model\.ropeScaling: factor is missing"):
        read(tmp_path, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ConfigInvalid, match=r"model\.maxModelLen is 0"):
        read(tmp_path, max_model_len=0)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "holds a list"),
        (b"\xff\xfe", "is not JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "lists or objects are nested too deeply"),
    ],
    ids=["missing", "cut off", "a list", "bytes", "deep"],
)
def test_a_config_that_cannot_be_read_is_named(
    content: str | bytes | None, named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointInvalid, match=rf"config\.json: {named}"):
        ModelConfig.from_directory(tmp_path)


def test_kimi_k2_is_a_deepseek_v3_under_a_name_of_its_own() -> None:
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163_840, "hidden_size": 7168, "intermediate_size": 18_432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu",
        "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 50_000.0, "max_position_embeddings": 131_072,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }  # fmt: skip
    config = ModelConfig.from_values(fields | {"model_type": "kimi_k2"})
    assert config == ModelConfig.from_values(fields | {"model_type": "deepseek_v3"})
    assert config.rope_is_interleaved
    assert config.max_model_len == 131_072
    with pytest.raises(CheckpointInvalid, match="model_type is 'kimi_k2', but must be 'llama'"):
        ModelConfig.from_values(LLAMA | {"model_type": "kimi_k2"})


@pytest.mark.parametrize("model", [LLAMA, QWEN2])
@pytest.mark.parametrize(
    "name", ["tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "norm_topk_prob"]
)
def test_null_is_false_where_that_is_the_default(model: dict[str, Any], name: str) -> None:
    fields = LLAMA | model | {name: None}
    assert ModelConfig.from_values(fields) == ModelConfig.from_values(fields | {name: False})
