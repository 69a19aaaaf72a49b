"""Reads config.json: fields that change results are implemented, or refused by name instead of ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.rope import RopeConfig

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
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
DEFAULT = {"rope_type": "default", "rope_theta": 500_000.0}
ABSENT = object()


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
        # The scaling was made for 8192 * 32 tokens.
        max_position_tokens=262_144,
        max_model_len=262_144,
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
        ({"rope_scaling": None}, {"rope_type": "yarn", "factor": 8.0}, 8 * 131_072),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, None, 131_072),
        ({"rope_scaling": YARN | {"factor": None}}, None, 131_072),
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
        (QWEN2 | {"use_sliding_window": True}, 32_768),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 16}, None),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 16}, None),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": None}, None),
    ],
)
def test_a_sliding_window_that_does_not_bind_is_served(
    changes: dict[str, Any], max_model_len: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, changes, max_model_len).max_model_len == (max_model_len or 131_072)


@pytest.mark.parametrize(
    ("changes", "max_model_len", "window"),
    [
        (MISTRAL, 4097, 4096),
        (MISTRAL, None, 4096),
        (MISTRAL | {"sliding_window": ABSENT}, None, 4096),
        ({"sliding_window": 1024}, None, 1024),
        (QWEN2 | {"use_sliding_window": True}, None, 32_768),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, None, 32_768),
        (
            QWEN2
            | {
                "use_sliding_window": True,
                "max_window_layers": 16,
                "layer_types": ["full_attention"] * 15 + ["sliding_attention"],
            },
            None,
            32_768,
        ),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 3}, None, 4096),
    ],
)
def test_a_sliding_window_that_binds_is_refused_with_the_length_that_works(
    changes: dict[str, Any], max_model_len: int | None, window: int, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported, match=rf"sliding_window is {window}.*at most {window}"):
        read(tmp_path, changes, max_model_len)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["MixtralForCausalLM"]}, "architecture MixtralForCausalLM .*LlamaForCausalLM"),
    (
        {"quantization_config": {"quant_method": "hqq"}},
        r"quantization_config\.quant_method is 'hqq'.*unquantised",
    ),
    ({"compression_config": {"quant_method": "sparse"}}, r"compression_config\.quant_method is 'sparse'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
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
    ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'.*yarn"),
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
]


@pytest.mark.parametrize(("changes", "named"), INVALID)
def test_wrong_and_missing_values_are_named(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=named):
        read(tmp_path, changes)


def test_a_wrong_override_is_the_manifests_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"model\.ropeScaling: factor is missing"):
        read(tmp_path, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ConfigInvalid, match=r"model\.maxModelLen is 0"):
        read(tmp_path, max_model_len=0)


@pytest.mark.parametrize(
    ("content", "named"),
    [(None, "cannot be read"), ("{", "is not JSON"), ("[1]", "holds a list"), (b"\xff\xfe", "is not JSON")],
)
def test_a_config_that_cannot_be_read_is_named(
    content: str | bytes | None, named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(CheckpointInvalid, match=rf"config\.json: {named}"):
        ModelConfig.from_directory(tmp_path)
