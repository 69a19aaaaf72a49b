"""The formats that a `quantization_config` describes, the layers that have them, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from medha.errors import CheckpointInvalid, MedhaError, ModelUnsupported
from medha.model.quantisation import ActivationFormat, StoredTensor, decode

# In the form in which llm-compressor writes it.
W8A8: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
                "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.4,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.11.0",
}  # fmt: skip
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*layers\\.0\\..*_proj$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
            },
        }
    },
}
DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.1,
    "static_groups": False, "true_sequential": True, "model_name_or_path": None,
}  # fmt: skip
FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CONFIGS = {"w8a8": W8A8, "w4a16": W4A16, "deepseek": DEEPSEEK, "awq": AWQ, "gptq": GPTQ}
UP = "model.layers.3.mlp.up_proj"


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a configuration with one field changed, by its path; group 0 may be left out."""
    found = copy.deepcopy(config)
    at, *names = found, *path.split(".")
    for name in names[:-1]:
        at = at["config_groups"]["group_0"] if name == "group" else at[name]
    at[names[-1]] = value
    return found


def test_an_integer_format_with_rounded_activations() -> None:
    form = decode(W8A8).format_of(UP)
    assert form is not None
    assert (form.layout, form.bits, form.group_size, form.block_rows) == ("bytes", 8, None, 1)
    assert form.activations == ActivationFormat("int8")
    assert form.tensors(6, 10) == {
        "weight": StoredTensor(((6, 10),), frozenset({"I8"})),
        "weight_scale": StoredTensor(((6, 1),)),
    }
    assert form.held_bytes(6, 10, 2) == 6 * 10 + 6 * 2


@pytest.mark.parametrize(
    ("name", "rows", "columns", "scales"),
    [
        ("w8a8", 16, 24, 16 * 4),
        ("w8a8", 12, 24, None),  # rows in eights
        ("w8a8", 8, 2**17, None),  # sums might exceed 32 bits
        ("w4a16", 24, 256, 24 * 2 * 4),
        ("w4a16", 20, 256, None),
        ("w4a16", 24, 200, None),  # the last group is shorter
        ("awq", 24, 256, 24 * 2 * 4),
        ("gptq", 24, 256, None),  # columns in another order
        ("deepseek", 256, 384, 2 * 4 * 4),  # three groups, and room for a fourth
        ("deepseek", 192, 384, None),
    ],
)
def test_a_form_for_a_devices_units_takes_scales_of_its_own(
    name: str, rows: int, columns: int, scales: int | None
) -> None:
    form = decode(CONFIGS[name]).format_of(UP)
    assert form is not None
    held = form.held_bytes(rows, columns, 2, is_for_device_units=True)
    if scales is None:
        assert held == form.held_bytes(rows, columns, 2)
    else:
        assert held == rows * columns * form.bits // 8 + scales


def test_packed_groups() -> None:
    form = decode(changed(W4A16, "group.weights.symmetric", False)).format_of(UP)
    assert form is not None
    shapes = {name: tensor.shapes[0] for name, tensor in form.tensors(20, 300).items()}
    assert shapes == {
        "weight_packed": (20, 38),
        "weight_shape": (2,),
        "weight_scale": (20, 3),
        "weight_zero_point": (3, 3),
    }


def test_the_other_formats() -> None:
    block, awq, gptq = (decode(config).format_of(UP) for config in (DEEPSEEK, AWQ, GPTQ))
    assert block is not None
    assert awq is not None
    assert gptq is not None
    assert block.tensors(300, 130)["weight_scale_inv"].shapes == ((3, 2),)
    assert block.activations == ActivationFormat("float8", group_size=128)
    assert {name: tensor.shapes[0] for name, tensor in awq.tensors(16, 256).items()} == {
        "qweight": (256, 2), "qzeros": (2, 2), "scales": (2, 16),
    }  # fmt: skip
    assert {name: tensor.shapes[0] for name, tensor in gptq.tensors(16, 256).items()} == {
        "qweight": (32, 16), "qzeros": (2, 2), "scales": (2, 16), "g_idx": (256,),
    }  # fmt: skip
    assert gptq.has_group_index
    assert gptq.zero_point_offset == 1
    assert decode(GPTQ | {"checkpoint_format": "gptq_v2"}).formats[0][1].zero_point_offset == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [({}, "activation_scheme is 'static'"), ({"activation_scheme": "dynamic"}, "weight_block_size is None")],
)
def test_fp8_of_autofp8_is_refused_in_words_that_lead_to_no_further_refusal(
    changes: dict[str, Any], named: str
) -> None:
    """All that is served instead is said at once: blocks need both fields, and other scales another method."""
    autofp8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    with pytest.raises(ModelUnsupported, match=named) as caught:
        decode(autofp8 | changes)
    for said in (
        "activation_scheme 'dynamic'",
        "weight_block_size such as [128, 128]",
        "'compressed-tensors'",
    ):
        assert said in str(caught.value)


def test_ignored_layers_are_named_whole_by_expression_or_by_a_part() -> None:
    compressed = decode(W4A16)
    assert compressed.format_of("lm_head") is None
    assert compressed.format_of("model.layers.0.mlp.up_proj") is None
    assert compressed.format_of("model.layers.10.mlp.up_proj") is not None
    fp8 = decode(DEEPSEEK | {"modules_to_not_convert": ["mlp.gate"], "ignored_layers": ["mlp.down_proj"]})
    assert fp8.format_of("model.layers.5.mlp.gate") is None
    assert fp8.format_of("model.layers.5.mlp.down_proj") is None
    assert fp8.format_of("model.layers.5.mlp.gate_proj") is not None, "parts end at dots"
    assert fp8.format_of(UP) is not None


def test_layers_that_awq_ignores_are_named_by_any_piece_as_its_writers_compare_them() -> None:
    awq = decode(AWQ | {"modules_to_not_convert": ["down", "mlp.gate", "layers.1."]})
    assert awq.format_of("model.layers.5.mlp.gate") is None
    assert awq.format_of("model.layers.5.mlp.gate_proj") is None
    assert awq.format_of("model.layers.5.mlp.experts.3.gate_proj") is not None
    assert awq.format_of("model.layers.1.mlp.up_proj") is None
    assert awq.format_of("model.layers.11.mlp.up_proj") is not None
    assert awq.format_of("model.layers.5.mlp.down_proj") is None
    assert awq.format_of(UP) is not None
    assert awq.format_of("lm_head") is None
    dotted = decode(AWQ | {"modules_to_not_convert": ["mlp.gate."]})
    assert dotted.format_of("model.layers.5.mlp.gate_proj") is not None
    assert decode(GPTQ | {"desc_act": None}) == decode(GPTQ | {"desc_act": False})


def test_gptq_may_list_the_layers_that_are_quantised() -> None:
    experts = [f"block_sparse_moe.experts.{index}.w1" for index in range(2)]
    for listed in ([["self_attn.k_proj"], experts], ["self_attn.k_proj", *experts]):
        found = decode(GPTQ | {"modules_in_block_to_quantize": listed})
        layers = ("self_attn.k_proj", "self_attn.q_proj", experts[1], "block_sparse_moe.experts.11.w1")
        formats = [found.format_of(f"model.layers.7.{layer}") for layer in layers]
        assert [form is not None for form in formats] == [True, False, True, False]
    with pytest.raises(CheckpointInvalid, match=r"modules_in_block_to_quantize is .*list of names"):
        decode(GPTQ | {"modules_in_block_to_quantize": [["q_proj"], [3]]})


def test_gptq_may_except_layers_by_expressions() -> None:
    found = decode(GPTQ | {"dynamic": {r"-:.*mlp\.gate$": {}, "-:.*layers.2.*down_proj": {}}})
    assert found.format_of("model.layers.0.mlp.gate") is None
    assert found.format_of("model.layers.0.mlp.experts.3.gate_proj") is not None
    assert found.format_of("model.layers.2.mlp.experts.3.down_proj") is None


def test_a_layer_named_by_itself_has_that_format_whatever_the_order() -> None:
    groups = copy.deepcopy(W4A16["config_groups"])
    groups["group_1"] = copy.deepcopy(groups["group_0"]) | {"targets": ["re:.*up_proj"]}
    groups["group_1"]["weights"]["group_size"] = 64
    groups["group_2"] = copy.deepcopy(groups["group_0"]) | {"targets": [UP]}
    groups["group_2"]["weights"]["group_size"] = 32
    found = decode(W4A16 | {"config_groups": groups})
    layers = (UP, "model.layers.4.mlp.up_proj", "model.layers.4.mlp.down_proj")
    assert [form.group_size for layer in layers if (form := found.format_of(layer))] == [32, 64, 128]


@pytest.mark.parametrize(
    ("config", "path", "value", "error", "named"),
    [
        (W8A8, "quant_method", "bitsandbytes", ModelUnsupported, "quant_method is 'bitsandbytes'"),
        (W8A8, "quant_method", None, CheckpointInvalid, "quant_method is None"),
        (W8A8, "format", "marlin-24", ModelUnsupported, "format is 'marlin-24'"),
        (W8A8, "format", "pack-quantized-2", ModelUnsupported, "format is 'pack-quantized-2'"),
        (W8A8, "kv_cache_scheme", {"num_bits": 8}, ModelUnsupported, "kv_cache_scheme.type is None"),
        (W8A8, "kv_cache_scheme", FP8_KV | {"type": "int"}, ModelUnsupported, "kv_cache_scheme.type is 'int'"),
        (W8A8, "kv_cache_scheme", FP8_KV | {"num_bits": 4}, ModelUnsupported, "kv_cache_scheme.num_bits is 4"),
        (W8A8, "kv_cache_scheme", FP8_KV | {"dynamic": True}, ModelUnsupported, "kv_cache_scheme.dynamic is True"),
        (W8A8, "kv_cache_scheme", FP8_KV | {"symmetric": False}, ModelUnsupported, "scheme.symmetric is False"),
        (W8A8, "kv_cache_scheme", FP8_KV | {"strategy": "token"}, ModelUnsupported, "scheme.strategy is 'token'"),
        (W8A8, "kv_cache_scheme", "fp8", CheckpointInvalid, "kv_cache_scheme is 'fp8'"),
        (W8A8, "transform_config", {"config_groups": {"u": 1}}, ModelUnsupported, "transform_config"),
        (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}, ModelUnsupported, "sparsity_config"),
        (W8A8, "quantization_status", "calibration", ModelUnsupported, "quantization_status is 'calibration'"),
        (W8A8, "config_groups", {}, CheckpointInvalid, "config_groups is {}"),
        (W8A8, "config_groups", [], CheckpointInvalid, "config_groups is \\[\\]"),
        (W8A8, "ignore", ["re:("], CheckpointInvalid, "ignore is .*expressions"),
        (W8A8, "ignore", ["re:" + "(" * 10_000], CheckpointInvalid, "ignore is .*expressions"),
        (W8A8, "group.targets", ["re:a{99999999999}"], CheckpointInvalid, "targets is .*expressions"),
        (W8A8, "ignore", "lm_head", CheckpointInvalid, "ignore is 'lm_head'"),
        (W8A8, "group.targets", [], CheckpointInvalid, "group_0.targets"),
        (W8A8, "group.output_activations", {"num_bits": 8}, ModelUnsupported, "output_activations"),
        (W8A8, "group.weights.num_bits", 4, ModelUnsupported, "weights.num_bits is 4"),
        (W8A8, "group.weights.type", "float", CheckpointInvalid, "weights.type is 'float'"),
        (W8A8, "group.weights.strategy", "attn_head", ModelUnsupported, "weights.strategy is 'attn_head'"),
        (W8A8, "group.weights.dynamic", True, ModelUnsupported, "weights.dynamic is True"),
        (W8A8, "group.weights.symmetric", "yes", CheckpointInvalid, "weights.symmetric is 'yes'"),
        (W8A8, "group.weights", None, ModelUnsupported, "weights is None, .*quantised weights in each"),
        (W8A8, "group.input_activations.symmetric", False, ModelUnsupported, "activations.symmetric is False"),
        (W8A8, "group.input_activations.num_bits", 4, ModelUnsupported, "activations.num_bits is 4"),
        (W8A8, "group.input_activations.dynamic", "local", ModelUnsupported, "activations.dynamic is 'local'"),
        (W8A8, "group.input_activations.strategy", "tensor", ModelUnsupported, "strategy is 'tensor'"),
        (W4A16, "group.weights.num_bits", 3, ModelUnsupported, "weights.num_bits is 3"),
        (W4A16, "group.weights.group_size", 0, CheckpointInvalid, "weights.group_size is 0"),
        (W4A16, "group.weights.strategy", "tensor", ModelUnsupported, "weights.strategy is 'tensor'"),
        (W4A16, "group.weights.actorder", "random", ModelUnsupported, "actorder is 'random'"),
        (DEEPSEEK, "weight_block_size", [128], CheckpointInvalid, "weight_block_size is \\[128\\]"),
        (DEEPSEEK, "weight_block_size", None, ModelUnsupported, "weight_block_size is None"),
        (DEEPSEEK, "activation_scheme", "static", ModelUnsupported, "activation_scheme is 'static'"),
        (DEEPSEEK, "fmt", "e5m2", ModelUnsupported, "fmt is 'e5m2'"),
        (DEEPSEEK, "scale_fmt", "ue4m3", ModelUnsupported, "scale_fmt is 'ue4m3'"),
        (AWQ, "bits", 3, ModelUnsupported, "bits is 3"),
        (AWQ, "version", "gemv", ModelUnsupported, "version is 'gemv'"),
        (AWQ, "zero_point", False, ModelUnsupported, "zero_point is False"),
        (AWQ, "group_size", True, CheckpointInvalid, "group_size is True"),
        (GPTQ, "bits", 2, ModelUnsupported, "bits is 2"),
        (GPTQ, "lm_head", True, ModelUnsupported, "lm_head is True"),
        (GPTQ, "desc_act", "no", CheckpointInvalid, "desc_act is 'no'"),
        (GPTQ, "checkpoint_format", "marlin", ModelUnsupported, "checkpoint_format is 'marlin'"),
        (GPTQ, "dynamic", {"+:.*down_proj": {"bits": 8}}, ModelUnsupported, "dynamic is .* one format for all"),
        (GPTQ, "dynamic", {"-:(": {}}, CheckpointInvalid, "dynamic is .*valid expressions"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_served_is_refused_by_name_and_value(
    config: dict[str, Any], path: str, value: Any, error: type[MedhaError], named: str
) -> None:
    with pytest.raises(error, match=rf"config\.json: quantization_config.*{named}"):
        decode(changed(config, path, value))


@pytest.mark.parametrize("value", [[], "awq", 4])
def test_a_description_that_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(CheckpointInvalid, match="must be an object"):
        decode(value)


def test_a_layer_whose_rows_do_not_fill_words_is_refused() -> None:
    form = decode(AWQ).format_of(UP)
    assert form is not None
    form.require_divisible(UP, 64, 100)
    with pytest.raises(CheckpointInvalid, match=r"up_proj has 60 rows, but AWQ packs 8"):
        form.require_divisible(UP, 60, 100)


def test_scales_of_keys_and_values_are_stated_for_a_layer_or_for_each_head() -> None:
    assert decode(W8A8).kv_scales is None
    assert decode(W8A8 | {"kv_cache_scheme": FP8_KV}).kv_scales == "tensor"
    by_head = FP8_KV | {"strategy": "attn_head"}
    assert decode(W8A8 | {"kv_cache_scheme": by_head}).kv_scales == "attn_head"
    alone = decode(W8A8 | {"kv_cache_scheme": FP8_KV, "config_groups": {}})
    assert alone.kv_scales == "tensor"
    assert alone.format_of(UP) is None
