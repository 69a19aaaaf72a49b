"""gpt-oss' experts are read as numbers and in MXFP4, split by their width; what does not fit is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from medha.errors import CheckpointInvalid, MedhaError, ModelUnsupported
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import round_mxfp4
from medha_worker.device import host_device
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.mxfp4_rows import Mxfp4Rows
from medha_worker.model.quantised_experts import QuantisedExperts
from medha_worker.model.weights import LayerWeights, Shard, Weights, load_weights

FILE = "model.safetensors"
LAYER = "model.layers.1."
EXPERTS = f"{LAYER}mlp.experts."
COUNT, HIDDEN, WIDTH = 8, 128, 160  # of the tiny preset: five blocks of a row of downs


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    for name in ("none", "mxfp4"):
        init_checkpoint(folder / name, preset="tiny", seed=3, architecture="gpt_oss", quantisation=name)
    return {name: folder / name for name in ("none", "mxfp4")}


def load(directory: Path, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Weights:
    config = ModelConfig.from_directory(directory)
    shard = Shard(rank, size, 0, config.num_layers, config.num_layers)
    return load_weights(directory, config, shard, device=host_device(dtype))


def numbers_of(weights: object) -> torch.Tensor:
    """Return the weights of all experts as numbers, [experts, in, out]."""
    if isinstance(weights, torch.Tensor):
        return weights
    assert isinstance(weights, QuantisedExperts)
    parts = [weight.parts[0] for weight in weights.each]
    return torch.stack([part.numbers(slice(0, part.rows), torch.float32).t() for part in parts])


def stored_numbers(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gates and ups in turn, and downs, as transformers reads them, [experts, in, out]."""
    stored, found = load_file(directory / FILE), []
    for name in ("gate_up_proj", "down_proj"):
        if EXPERTS + name in stored:
            found.append(stored[EXPERTS + name])
        else:
            packed = stored[f"{EXPERTS}{name}_blocks"], stored[f"{EXPERTS}{name}_scales"]
            # It has [experts, in, out] too.
            found.append(convert_moe_packed_tensors(*packed, dtype=torch.float32))
    return found[0], found[1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["none", "mxfp4"])
def test_the_slices_of_all_ranks_together_are_what_transformers_reads(
    checkpoints: dict[str, Path], name: str, size: int
) -> None:
    """Two ranks have 80 of 160 columns, and four have 40: slices begin within blocks of 32."""
    directory = checkpoints[name]
    stored = load_file(directory / FILE)
    layers = [load(directory, rank, size).layers[1] for rank in range(size)]
    gate_up, down = stored_numbers(directory)
    assert gate_up.shape == (COUNT, HIDDEN, 2 * WIDTH)
    assert float(gate_up.std()) > 0.05
    gates, ups = zip(*(numbers_of(layer.gate_up).chunk(2, dim=2) for layer in layers), strict=True)
    assert torch.equal(torch.cat(gates, dim=2), gate_up[..., ::2])
    assert torch.equal(torch.cat(ups, dim=2), gate_up[..., 1::2])
    assert torch.equal(torch.cat([numbers_of(layer.down) for layer in layers], dim=1), down)
    biases = [layer.gate_up_bias for layer in layers]
    gates, ups = zip(*(bias.chunk(2, dim=1) for bias in biases if bias is not None), strict=True)
    assert torch.equal(torch.cat(gates, dim=1), stored[f"{EXPERTS}gate_up_proj_bias"][:, ::2])
    assert torch.equal(torch.cat(ups, dim=1), stored[f"{EXPERTS}gate_up_proj_bias"][:, 1::2])
    assert [layer.down_bias is not None for layer in layers] == [True, *[False] * (size - 1)]
    check_what_is_beside_the_experts(layers, stored)


def check_what_is_beside_the_experts(layers: list[LayerWeights], stored: dict[str, torch.Tensor]) -> None:
    sinks = [layer.sinks for layer in layers if layer.sinks is not None]
    assert torch.equal(torch.cat(sinks), stored[f"{LAYER}self_attn.sinks"])
    for layer in layers:
        assert layer.router is not None
        assert torch.equal(layer.router.t(), stored[f"{LAYER}mlp.router.weight"])
        assert layer.router_bias is not None
        assert torch.equal(layer.router_bias, stored[f"{LAYER}mlp.router.bias"])


def test_experts_in_mxfp4_take_the_memory_that_is_planned(checkpoints: dict[str, Path]) -> None:
    config, weights = ModelConfig.from_directory(checkpoints["mxfp4"]), load(checkpoints["mxfp4"])
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in weights.layers
        for experts in (layer.gate_up, layer.down)
        if isinstance(experts, QuantisedExperts)
        for tensor in experts.tensors()
    }
    numbers = 3 * COUNT * HIDDEN * WIDTH
    assert sum(held.values()) == 2 * numbers * 17 // 32
    assert config.expert_weight_bytes(4) == 17 / 32
    plain = ModelConfig.from_directory(checkpoints["none"])
    assert plain.weights_bytes(4) - config.weights_bytes(4) == 2 * numbers * 4 - 2 * numbers * 17 // 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_byte_and_every_scale_is_the_number_of_transformers(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 16)
    found = Mxfp4Rows(values, scales, 512).numbers(slice(0, 255), dtype)
    wanted = convert_moe_packed_tensors(values[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(found, wanted.to(dtype))
    assert torch.equal(Mxfp4Rows(values, scales, 90, 19).numbers(slice(7, 9), dtype), found[7:9, 19:109])


def test_rounded_weights_are_the_nearest_numbers() -> None:
    weight = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    blocks, scales, numbers = round_mxfp4(weight)
    assert torch.equal(
        convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2), numbers
    )
    largest = weight.view(3, 4, 2, 32).abs().amax(-1, keepdim=True)
    # Between 4 and 6 sizes are 2 apart, and 8 is rounded to 6.
    assert bool(((numbers - weight).view(3, 4, 2, 32).abs() <= largest / 4 + 1e-7).all())


def damage(directory: Path, kind: str) -> None:
    path, config = directory / FILE, directory / "config.json"
    tensors, fields = load_file(path), json.loads(config.read_text())
    match kind:
        case "missing scales":
            del tensors[f"{EXPERTS}down_proj_scales"]
        case "scales of other blocks":
            tensors[f"{EXPERTS}down_proj_scales"] = torch.zeros(COUNT, HIDDEN, 10, dtype=torch.uint8)
        case "a missing expert":
            tensors[f"{EXPERTS}gate_up_proj_blocks"] = tensors[f"{EXPERTS}gate_up_proj_blocks"][:7].clone()
        case "scales in float8":
            scales = tensors[f"{EXPERTS}down_proj_scales"]
            tensors[f"{EXPERTS}down_proj_scales"] = scales.view(torch.float8_e4m3fn)
        case "numbers in spite of the configuration":
            for part in ("blocks", "scales"):
                del tensors[f"{EXPERTS}down_proj_{part}"]
            tensors[f"{EXPERTS}down_proj"] = torch.zeros(COUNT, WIDTH, HIDDEN)
        case "no configuration":
            del fields["quantization_config"]
        case "no sinks":
            del tensors[f"{LAYER}self_attn.sinks"]
        case "a width that cuts blocks":
            fields["intermediate_size"] = 176
    save_file(tensors, path)
    config.write_text(json.dumps(fields))
    if kind == "a truncated file":
        path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        ("missing scales", CheckpointInvalid, r"1\.mlp\.experts\.down_proj_scales of .* is missing"),
        ("scales of other blocks", CheckpointInvalid, r"down_proj_scales has shape \[8, 128, 10\].*\[8, 128, 5\]"),
        ("a missing expert", CheckpointInvalid, r"gate_up_proj_blocks has shape \[7, .*\[8, 320, 4, 16\]"),
        ("scales in float8", ModelUnsupported, r"down_proj_scales is stored as F8_E4M3"),
        (
            "numbers in spite of the configuration",
            CheckpointInvalid,
            r"down_proj_blocks of shape \[8, 128, 5, 16\] is missing \(and 1 more\)",
        ),
        ("no configuration", CheckpointInvalid, r"gate_up_proj of shape \[8, 128, 320\] is missing"),
        ("no sinks", CheckpointInvalid, r"1\.self_attn\.sinks of shape \[4\] is missing"),
        ("a width that cuts blocks", CheckpointInvalid, r"intermediate_size is 176, but experts in MXFP4"),
        ("a truncated file", CheckpointInvalid, r"is no complete safetensors file"),
    ],
)  # fmt: skip
def test_damage_is_named_before_anything_is_allocated(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: type[MedhaError],
    named: str,
) -> None:
    directory = Path(shutil.copytree(checkpoints["mxfp4"], tmp_path / "damaged"))
    damage(directory, kind)

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise MedhaError("memory was allocated")

    monkeypatch.setattr(torch, "empty", fail)
    monkeypatch.setattr(torch.Tensor, "to", fail)
    with pytest.raises(error, match=named):
        load(directory)


def test_a_scale_that_is_no_number_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoints["mxfp4"], tmp_path / "damaged"))
    tensors = load_file(directory / FILE)
    tensors[f"{EXPERTS}down_proj_scales"][5, 3, 1] = 255
    save_file(tensors, directory / FILE)
    with pytest.raises(CheckpointInvalid, match=r"down_proj_scales holds 255, which stands for no number"):
        load(directory)
    assert math.isnan(float(torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()))
