"""Slices of quantised weights are the numbers that were written, their products are right, and damage is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha.model.quantisation import ActivationFormat, decode
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS, pack, round_weight
from medha_worker.device import host_device
from medha_worker.kernels.activation_rounding import rounded
from medha_worker.kernels.quantised_rows import PlainRows, QuantisedRows
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_weights import LinearProducts, QuantisedWeight
from medha_worker.model.stored_quantised import WeightSlice, read_rows
from medha_worker.model.tensor_group import Alone
from medha_worker.model.weights import Shard, load_weights

from ..quantised_models import FORMATS, rounding_of, with_sizes

LAYER = "model.layers.0.mlp.up_proj"
WHOLE_ROWS = (
    *("w8a8", "w8a8-asym", "w8a8-static", "w8a8-group", "w4a8", "w4a16"),
    *("fp8", "fp8-tensor", "fp8-group", "gptq-desc-act"),
)
"""Formats of which the activations of a whole row share a scale, or are as they are."""


def rows_of(
    stored: dict[str, torch.Tensor], form: Any, shape: tuple[int, int], rows: range, columns: range
) -> QuantisedRows:
    """Read a slice of tensors that are in memory."""

    def read(name: str, *index: slice) -> torch.Tensor:
        return stored[name][index] if index else stored[name]

    return read_rows(WeightSlice(LAYER, rows, columns, *shape), form, read, lambda tensor: tensor)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_slice_is_the_numbers_that_were_written(data: st.DataObject) -> None:
    """Slices begin and end within groups, blocks and packed words; the last group may be shorter."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    form = decode(with_sizes(name, data.draw(st.sampled_from([3, 8, 16])))).formats[0][1]
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    if form.layout in ("awq", "gptq"):
        rows, columns = 8 * -(-rows // 8), 8 * -(-columns // 8)
    made = round_weight(torch.randn(rows, columns), form, seed=1)
    stored = {part: tensor.contiguous() for part, tensor in pack(made, form).items()}
    for part, tensor in stored.items():
        assert tuple(tensor.shape) in form.tensors(rows, columns)[part].shapes

    def some(count: int) -> range:
        first = data.draw(st.integers(0, count - 1))
        return range(first, data.draw(st.integers(first + 1, count)))

    own_rows, own_columns = some(rows), some(columns)
    found = rows_of(stored, form, (rows, columns), own_rows, own_columns)
    wanted = made.numbers[own_rows.start : own_rows.stop, own_columns.start : own_columns.stop]
    assert (found.rows, found.columns) == tuple(wanted.shape)
    first = data.draw(st.integers(0, len(own_rows) - 1))
    assert torch.equal(found.numbers(slice(0, found.rows), torch.float32), wanted)
    assert torch.equal(found.numbers(slice(first, found.rows), torch.float32), wanted[first:])


def word(*nibbles: int) -> int:
    """Return the int32 whose lowest bits are the first of eight values."""
    value = sum(nibble << (4 * index) for index, nibble in enumerate(nibbles))
    return value - 2**32 if value >= 2**31 else value


def test_packed_words_of_compressed_tensors() -> None:
    """Values lie from the low bits on, 8 above themselves, along columns; zero points likewise, along rows."""
    settings = with_sizes("w4a16-asym", 8)
    form = decode(settings).formats[0][1]
    stored = {
        "weight_packed": torch.tensor([[word(0, 1, 2, 3, 4, 5, 6, 15)]], dtype=torch.int32),
        "weight_scale": torch.tensor([[0.5]]),
        "weight_zero_point": torch.tensor([[word(3, 0, 0, 0, 0, 0, 0, 0)]], dtype=torch.int32),
    }
    found = rows_of(stored, form, (1, 8), range(1), range(8)).numbers(slice(0, 1), torch.float32)
    assert found.tolist() == [[-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 6.0]]
    symmetric = decode(with_sizes("w4a16", 8)).formats[0][1]
    found = rows_of(stored, symmetric, (1, 8), range(1), range(8)).numbers(slice(0, 1), torch.float32)
    assert found.tolist() == [[-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, 3.5]]


def test_words_of_awq() -> None:
    """A word holds eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    form = decode(with_sizes("awq", 8)).formats[0][1]
    stored = {
        "qweight": torch.tensor([[word(8, 10, 12, 14, 9, 11, 13, 15)]] * 8, dtype=torch.int32),
        "qzeros": torch.tensor([[word(8, 8, 8, 8, 8, 8, 8, 0)]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    found = rows_of(stored, form, (8, 8), range(8), range(8)).numbers(slice(0, 8), torch.float32)
    assert found[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 15]


@pytest.mark.parametrize(("version", "first"), [("gptq", 0.0), ("gptq_v2", 1.0)])
def test_words_of_gptq(version: str, first: float) -> None:
    """A word holds eight inputs of one output; the first version stores zero points less one, of 4 bits."""
    form = decode(with_sizes("gptq", 8) | {"checkpoint_format": version}).formats[0][1]
    stored = {
        "qweight": torch.tensor([[word(8, 9, 0, 0, 0, 0, 0, 0)] * 8], dtype=torch.int32),
        "qzeros": torch.tensor([[word(7, 15, 0, 0, 0, 0, 0, 0)]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
        "g_idx": torch.zeros(8, dtype=torch.int32),
    }
    found = rows_of(stored, form, (8, 8), range(8), range(8)).numbers(slice(0, 8), torch.float32)
    assert found[0, :2].tolist() == [first, first + 1]
    assert found[1, 0] == (8.0 if version == "gptq" else -7.0)


@pytest.mark.parametrize(
    ("index", "named"), [([0] * 8 + [2] * 8, "names a group beyond"), ([1] * 16, "desc_act false")]
)
def test_an_order_of_groups_that_contradicts_the_configuration_is_refused(
    index: list[int], named: str
) -> None:
    form = decode(with_sizes("gptq", 8)).formats[0][1]
    stored = dict(pack(round_weight(torch.randn(8, 16), form), form))
    stored["g_idx"] = torch.tensor(index, dtype=torch.int32)
    with pytest.raises(CheckpointInvalid, match=named):
        rows_of(stored, form, (8, 16), range(8), range(16))


def weight_of(
    name: str, rows: int, columns: range, all_columns: int, seed: int, group_size: int = 16
) -> tuple[QuantisedRows, torch.Tensor]:
    """Return a slice of a random weight in a format, and its numbers."""
    form = decode(with_sizes(name, group_size)).formats[0][1]
    made = round_weight(torch.randn(rows, all_columns, generator=torch.Generator().manual_seed(seed)), form)
    stored = {part: tensor.contiguous() for part, tensor in pack(made, form).items()}
    found = rows_of(stored, form, (rows, all_columns), range(rows), columns)
    return found, made.numbers[:, columns.start : columns.stop]


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_rounded_numbers(name: str, dtype: torch.dtype) -> None:
    """Three parts, one of them not quantised; tiles are smaller than a part."""
    (first, one), (second, two) = (weight_of(name, 4104, range(96), 96, seed) for seed in (1, 2))
    plain = torch.randn(24, 96)
    weight = QuantisedWeight([first, PlainRows(plain.to(dtype)), second])
    assert weight.shape == (96, 2 * 4104 + 24)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    entering = x if first.activations is None else rounding_of(first.activations)(x)
    wanted = torch.cat([entering.float() @ one.t(), x.float() @ plain.t(), entering.float() @ two.t()], dim=1)
    bias = torch.randn(weight.shape[1]).to(dtype)
    products = LinearProducts(TorchProducts(), Alone(), 0, 1)
    tolerance = (
        1e-4 if dtype == torch.float32 else 0.3
    )  # of numbers near 10, which bfloat16 rounds by 2^-9 several times
    found = products.product(x, weight, bias)
    assert float((found.float() - wanted - bias.float()).abs().max()) <= tolerance
    target = torch.ones(5, weight.shape[1], dtype=dtype)
    products.add_product(target, x, weight)
    assert float((target.float() - wanted - 1).abs().max()) <= tolerance


class Threads:
    """A group of ranks that are threads of this process."""

    captures = False

    def __init__(self, size: int) -> None:
        self._barrier, self._parts = Barrier(size), [torch.zeros(0)] * size

    def of(self, rank: int) -> _Member:
        return _Member(self, rank)

    def sum(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = x.clone()
        self._barrier.wait(60)
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait(60)
        return total


class _Member(Alone):
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(self._threads.sum(self._rank, x))


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_parts_of_the_inputs_sum_up_to_the_product_of_whole_rows(name: str) -> None:
    """The scale of a row of activations is that of the whole row, of which each rank has a part; one row is zero."""
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(3))
    x[2] = 0
    x[:, 70] *= 20  # the largest is on the second rank
    whole, numbers = weight_of(name, 32, range(96), 96, 1)
    entering = x.clone()
    if whole.activations is not None:
        entering = rounding_of(whole.activations)(x).nan_to_num(
            0
        )  # the formula divides a row of zeros by zero
    threads, found = Threads(2), [torch.zeros(0)] * 2

    def run(rank: int) -> None:
        columns = range(44) if rank == 0 else range(44, 96)
        part, _ = weight_of(name, 32, columns, 96, 1)
        products = LinearProducts(TorchProducts(), threads.of(rank), rank, 2)
        own = x[:, columns.start : columns.stop]
        found[rank] = products.product(own, QuantisedWeight([part]), is_partial=True)

    ranks = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert float((found[0] + found[1] - entering @ numbers.t()).abs().max()) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_power_scale_is_the_least_by_which_no_activation_is_too_large(dtype: torch.dtype) -> None:
    form = ActivationFormat("float8", group_size=1, has_power_scales=True)
    sizes = torch.tensor([0.0, 448.0, 449.0, 447.0, 896.0, 2.0**-20, 3e-6, 1000.0]).to(dtype)
    for x in (sizes, -sizes):
        found = rounded(x[None], form, None, None)[0].double()
        for size, got in zip(x.double().tolist(), found.tolist(), strict=True):
            power = 2.0 ** math.ceil(math.log2(abs(size) / 448)) if size else 1.0
            step = torch.tensor(size / power).to(torch.float8_e4m3fn).double() * power
            assert got == float(step.to(dtype))


def test_no_rows_of_activations_are_rounded_to_none() -> None:
    for name in ("w8a8", "fp8", "fp8-block"):
        part, _ = weight_of(name, 8, range(20), 20, 1)
        assert part.activations is not None
        x = torch.zeros(0, 20)
        assert rounded(x, part.activations, torch.zeros(0, 1), None).shape == (0, 20)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    for name in QUANTISATIONS:
        init_checkpoint(folder / name, preset="tiny", seed=1, quantisation=name, architecture="qwen2")
    return {name: folder / name for name in QUANTISATIONS}


def load(directory: Path, size: int = 1, rank: int = 0, **options: Any) -> Any:
    config = ModelConfig.from_directory(directory)
    shard = Shard(rank, size, 0, config.num_layers, config.num_layers)
    return load_weights(directory, config, shard, device=host_device(torch.float32), **options)


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_the_planned_memory_is_what_weights_take(checkpoints: dict[str, Path], name: str) -> None:
    weights, config = load(checkpoints[name]), ModelConfig.from_directory(checkpoints[name])
    held = sum(
        tensor.untyped_storage().nbytes()
        for layer in weights.layers
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)
        for tensor in weight.tensors()
    )
    assert held + 2 * 512 * 128 * 4 == config.weights_bytes(4)
    assert held < config.parameters * 4


def test_zeros_that_autogptq_wrote_as_biases_are_passed_over_and_other_numbers_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoints["gptq"], tmp_path / "biased"))
    path = directory / "model.safetensors"
    tensors = load_file(path)
    rows = {"self_attn.o_proj": 128, "mlp.gate_proj": 352, "mlp.down_proj": 128}
    for layer in range(2):
        for name, count in rows.items():
            assert f"model.layers.{layer}.{name}.qweight" in tensors
            tensors[f"model.layers.{layer}.{name}.bias"] = torch.zeros(count, dtype=torch.float16)
    save_file(tensors, path)
    biased, plain = load(directory), load(checkpoints["gptq"])
    for found, expected in zip(biased.layers, plain.layers, strict=True):
        assert found.output_bias is None
        assert found.gate_up_bias is None
        assert all(map(torch.equal, found.down.tensors(), expected.down.tensors()))
    tensors["model.layers.1.mlp.down_proj.bias"][3] = 0.5
    save_file(tensors, path)
    with pytest.raises(
        CheckpointInvalid, match=r"1\.mlp\.down_proj\.bias is not zero, but a Qwen2ForCausalLM"
    ):
        load(directory)
    tensors["model.layers.1.mlp.down_proj.bias"].zero_()
    tensors["model.layers.1.input_layernorm.bias"] = torch.zeros(128)
    save_file(tensors, path)
    with pytest.raises(
        CheckpointInvalid, match=r"1\.input_layernorm\.bias is unexpected: a Qwen2ForCausalLM"
    ):
        load(directory)


@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_activations_that_a_slice_would_cut_are_refused(
    checkpoints: dict[str, Path], size: int
) -> None:
    with pytest.raises(ConfigInvalid, match=rf"parallelism\.tensor is {size}.*o_proj within groups of 128"):
        load(checkpoints["fp8-block"], size)


def damage(directory: Path, kind: str) -> None:
    path, config = directory / "model.safetensors", directory / "config.json"
    tensors, fields = load_file(path), json.loads(config.read_text())
    layer = "model.layers.1.mlp.down_proj"
    weights = fields["quantization_config"]["config_groups"]["group_0"]["weights"]
    match kind:
        case "missing scale":
            del tensors[f"{layer}.weight_scale"]
        case "wrong group size":
            weights["group_size"] = 64
        case "unquantised layer":
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{layer}.{part}"]
            tensors[f"{layer}.weight"] = torch.zeros(128, 352)
        case "quantised layer that is ignored":
            fields["quantization_config"]["ignore"] = ["lm_head", layer]
        case "scale of integers":
            tensors[f"{layer}.weight_scale"] = tensors[f"{layer}.weight_scale"].to(torch.int32)
        case "another shape":
            tensors[f"{layer}.weight_shape"] = torch.tensor([128, 350])
        case "zero points that are not there":
            weights["symmetric"] = False
        case "no configuration":
            del fields["quantization_config"]
        case "other bits":
            weights["num_bits"] = 8
    save_file(tensors, path)
    config.write_text(json.dumps(fields))
    if kind == "truncated file":
        path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        (
            "missing scale",
            CheckpointInvalid,
            r"1\.mlp\.down_proj\.weight_scale of shape \[128, 11\] is missing",
        ),
        (
            "wrong group size",
            CheckpointInvalid,
            r"weight_scale has shape \[\d+, \d+\], but config\.json makes it",
        ),
        (
            "unquantised layer",
            CheckpointInvalid,
            r"1\.mlp\.down_proj\.weight_packed .* is missing \(and 2 more\)",
        ),
        ("quantised layer that is ignored", CheckpointInvalid, r"1\.mlp\.down_proj\.weight of .* is missing"),
        ("scale of integers", ModelUnsupported, r"1\.mlp\.down_proj\.weight_scale is stored as I32"),
        ("another shape", CheckpointInvalid, r"weight_shape is \[128, 350\], but .* \[128, 352\]"),
        ("zero points that are not there", CheckpointInvalid, r"weight_zero_point of shape .* is missing"),
        ("no configuration", CheckpointInvalid, r"q_proj\.weight of shape .* is missing"),
        ("other bits", CheckpointInvalid, r"weight_packed has shape \[\d+, \d+\], but config\.json makes it"),
        ("truncated file", CheckpointInvalid, r"is no complete safetensors file"),
    ],
)
def test_damage_is_refused_before_anything_is_read(
    checkpoints: dict[str, Path], tmp_path: Path, kind: str, error: type[MedhaError], named: str
) -> None:
    directory = Path(shutil.copytree(checkpoints["w4a16"], tmp_path / "damaged"))
    damage(directory, kind)
    seen: list[int] = []
    with pytest.raises(error, match=named):
        load(directory, progress=lambda done, _: seen.append(done))
    assert not seen
