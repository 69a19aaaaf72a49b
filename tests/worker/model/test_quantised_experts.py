"""Quantised experts are read in slices of every size, take the memory that is planned, and damage to them is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha_worker.checkpoints import presets
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.device import host_device
from medha_worker.kernels.expert_products import BlockedProducts, GroupedProducts
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.quantised_rows import PlainRows, QuantisedRows
from medha_worker.model import quantised_experts
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_experts import (
    QuantisedExperts,
    products_of_each,
    products_of_experts,
    products_of_stacked,
)
from medha_worker.model.quantised_weights import LinearProducts, QuantisedWeight, tensors_of
from medha_worker.model.stacked_experts import StackedExperts
from medha_worker.model.tensor_group import Alone
from medha_worker.model.weights import LayerWeights

from ..quantised_models import rounding_of
from .test_quantised_weights import Threads, load, weight_of

MADE = (
    ("mixtral", "w4a16-asym"),
    ("mixtral", "gptq-desc-act"),
    ("qwen3_moe", "fp8-block"),
    ("qwen3_moe", "w8a8"),
    ("deepseek_v2", "awq"),
    ("deepseek_v3", "fp8-block"),
    ("deepseek_v3", "fp8-block-ue8m0"),
    ("deepseek_v3", "fp8"),
)
Checkpoint = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Make checkpoints that have one tokenizer, because its training takes longer than everything else."""
    folder, tokenizers = tmp_path_factory.mktemp("experts"), list[Any]()
    train = presets._train_tokenizer

    def tokenizer(*arguments: Any) -> Any:
        if not tokenizers:
            tokenizers.append(train(*arguments))
        return tokenizers[0]

    def made(architecture: str, quantisation: str) -> Path:
        directory = folder / f"{architecture} {quantisation}"
        if not directory.exists():
            init_checkpoint(
                directory, preset="tiny", seed=4, architecture=architecture, quantisation=quantisation
            )
        return directory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "_train_tokenizer", tokenizer)
        yield made


def matrices_of(layer: LayerWeights) -> Iterator[torch.Tensor]:
    """Yield what the matrices of a layer hold in memory."""
    for weight in (layer.qkv, layer.output, layer.shared_gate_up, layer.shared_down, layer.router):
        yield from () if weight is None else tensors_of(weight)
    for experts in (layer.gate_up, layer.down):
        yield from experts.tensors() if isinstance(experts, QuantisedExperts) else tensors_of(experts)
    if layer.latent is not None:
        yield from (
            tensor for tensor in layer.latent.tensors() if tensor.ndim > 1 or tensor.dtype == torch.int32
        )


@pytest.mark.parametrize(("architecture", "quantisation"), MADE)
def test_the_planned_memory_is_what_all_matrices_take(
    checkpoint: Checkpoint, architecture: str, quantisation: str
) -> None:
    directory = checkpoint(architecture, quantisation)
    weights, config = load(directory), ModelConfig.from_directory(directory)
    held = sum(tensor.untyped_storage().nbytes() for layer in weights.layers for tensor in matrices_of(layer))
    head = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(weights.head))
    assert held + head + 512 * 128 * 4 == config.weights_bytes(4)
    assert held < config.parameters * 4 / 2


def numbers_of(weight: QuantisedWeight) -> torch.Tensor:
    """Return a weight as numbers, [out, in]."""
    return torch.cat([part.numbers(slice(0, part.rows), torch.float32) for part in weight.parts])


@pytest.mark.parametrize(
    ("architecture", "quantisation"), [one for one in MADE if not one[1].startswith("fp8-block")]
)
@pytest.mark.parametrize("size", [2, 4])
def test_the_slices_of_all_ranks_together_are_the_whole_experts(
    checkpoint: Checkpoint, architecture: str, quantisation: str, size: int
) -> None:
    """Four ranks have 44 of 176 columns each, which begin within groups of 32 and words of 8."""
    directory = checkpoint(architecture, quantisation)
    whole = load(directory).layers[1]
    layers = [load(directory, size, rank).layers[1] for rank in range(size)]
    for expert in (0, 7):
        parts = [numbers_of(layer.gate_up.each[expert]).chunk(2) for layer in layers]
        gates_before_ups = torch.cat([part[place] for place in (0, 1) for part in parts])
        assert torch.equal(gates_before_ups, numbers_of(whole.gate_up.each[expert]))
        downs = torch.cat([numbers_of(layer.down.each[expert]) for layer in layers], dim=1)
        assert torch.equal(downs, numbers_of(whole.down.each[expert]))


@pytest.mark.parametrize("block_rows", [1, 3, 4, None])
def test_reordered_rows_are_the_same_numbers_in_another_order(block_rows: int | None) -> None:
    blocks = 1 if block_rows is None else -(-11 // block_rows)
    rows = QuantisedRows(
        torch.randn(10, 8).to(torch.float8_e4m3fn),
        8,
        torch.rand(blocks, 2),
        group_size=4,
        block_rows=block_rows,
        block_start=0 if block_rows in (None, 1) else 1,
    )
    index, again = torch.randperm(10), torch.randperm(10)
    wanted = rows.numbers(slice(0, 10), torch.float32)
    found = rows.reordered(index)
    assert torch.equal(found.numbers(slice(2, 9), torch.float32), wanted[index][2:9])
    assert torch.equal(found.reordered(again).numbers(slice(0, 10), torch.float32), wanted[index][again])
    plain = PlainRows(wanted).reordered(index)
    assert torch.equal(plain.numbers(slice(0, 10), torch.float32), wanted[index])


@pytest.mark.parametrize("name", ["w8a8", "fp8", "fp8-tensor", "w4a16"])
def test_ranks_share_the_scales_of_rows_of_all_experts_at_once(name: str) -> None:
    """Each of two ranks has a part of the inputs of four experts, of which one has no rows."""
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(3))
    x[:, 70] *= 20  # the largest is on the second rank
    row_ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    whole = [weight_of(name, 32, range(96), 96, seed) for seed in range(4)]
    rounding = whole[0][0].activations
    entering = x if rounding is None else rounding_of(rounding)(x)
    of_rows = [0, 0, 2, 2, 2, 3]
    wanted = torch.stack([row @ whole[expert][1].t() for row, expert in zip(entering, of_rows, strict=True)])
    kernels, threads = torch_kernels(host_device(torch.float32)), Threads(2)
    found = [torch.zeros(0)] * 2

    def run(rank: int) -> None:
        columns = range(44) if rank == 0 else range(44, 96)
        parts = [weight_of(name, 32, columns, 96, seed)[0] for seed in range(4)]
        found[rank] = products_of_experts(
            kernels,
            LinearProducts(kernels.products, threads.of(rank), rank, 2),
            x[:, columns.start : columns.stop],
            QuantisedExperts([QuantisedWeight([part]) for part in parts]),
            row_ends,
            is_partial=True,
        )

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(run, range(2)))
    assert float((found[0] + found[1] - wanted).abs().max()) <= 1e-4


GROUPED = GroupedProducts(BlockedProducts())


@pytest.mark.parametrize(
    ("architecture", "quantisation"), [*MADE, ("gpt_oss", "mxfp4"), ("mixtral", "fp8-tensor")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_products_that_do_not_know_whose_rows_there_are_equal_those_that_do(
    checkpoint: Checkpoint, architecture: str, quantisation: str, rank: int
) -> None:
    """Rank 1 of two has slices that begin within groups and words. Some experts have no rows, and all rows may have one."""
    size = 1 if rank == 0 or quantisation.startswith("fp8-block") else 2
    layer = load(checkpoint(architecture, quantisation), size, rank if size > 1 else 0).layers[1]
    kernels, random = torch_kernels(host_device(torch.float32)), torch.Generator().manual_seed(5)
    products = LinearProducts(kernels.products, Alone(), 0, 1)
    for weights in (layer.gate_up, layer.down):
        assert isinstance(weights, QuantisedExperts)
        stacked = StackedExperts.of(weights.each)
        assert stacked is not None
        count, inner = len(weights.each), weights.each[0].shape[0]
        for chosen in ([1, 1, 3], [count - 1] * 2, [0, 2, 2, 2, *[3] * 30, count - 1], [2] * 9, []):
            row_ends = torch.bincount(torch.tensor(chosen, dtype=torch.int64), minlength=count)
            row_ends = row_ends.cumsum(0).to(torch.int32)
            x = torch.randn(len(chosen), inner, generator=random)
            wanted = products_of_experts(kernels, products, x, weights, row_ends)
            largest = products.largest_in_rows(x, weights)
            for experts in (GROUPED, BlockedProducts()):
                found = products_of_stacked(experts, x, stacked, row_ends, largest)
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_few_columns_of_all_experts_are_made_at_a_time(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(BlockedProducts):
        shapes: list[tuple[int, ...]] = []  # noqa: RUF012 - of this test alone

        def product(self, x: torch.Tensor, weights: torch.Tensor, row_ends: torch.Tensor) -> torch.Tensor:
            self.shapes.append(tuple(weights.shape))
            return super().product(x, weights, row_ends)

    weights = load(checkpoint("qwen3_moe", "w8a8")).layers[1].gate_up
    stacked = StackedExperts.of(weights.each)
    monkeypatch.setattr(quantised_experts, "DEVICE_TILE", 64 * 8 * 128)
    row_ends = torch.full((8,), 9, dtype=torch.int32)
    found = products_of_stacked(Seen(), torch.randn(9, 128), stacked, row_ends, torch.ones(9, 1))
    assert found.shape == (9, 352)
    assert Seen.shapes == [(8, 128, 64), (8, 128, 64), (8, 128, 48)] * 2
    Seen.shapes.clear()
    products_of_stacked(Seen(), torch.randn(2, 128), stacked, row_ends.clamp(max=2), torch.ones(2, 1))
    assert Seen.shapes == [(2, 128, 176)] * 2  # numbers of two experts alone


def change(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_groups_of_activations_that_a_slice_of_experts_would_cut_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen3_moe", "fp8-block"), tmp_path / "model"))
    settings = QUANTISATIONS["fp8-block"] | {"modules_to_not_convert": ["self_attn"]}
    change(directory, {"quantization_config": settings})
    with pytest.raises(ConfigInvalid, match=r"tensor is 2.*experts\.0\.down_proj within groups of 128"):
        ModelConfig.from_directory(directory).require_tensor_size(2)


def test_an_expert_that_is_ignored_is_read_as_numbers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint("mixtral", "w4a16-asym"), tmp_path / "model"))
    layer = "model.layers.1.block_sparse_moe.experts.3.w2"
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(layer)}
    tensors[f"{layer}.weight"] = torch.randn(128, 176)
    save_file(tensors, path)
    settings = json.loads((directory / "config.json").read_text())["quantization_config"]
    change(directory, {"quantization_config": settings | {"ignore": ["lm_head", layer]}})
    weights, config = load(directory), ModelConfig.from_directory(directory)
    assert StackedExperts.of(weights.layers[1].down.each) is None
    parts = [weight.parts[0] for weight in weights.layers[1].down.each]
    assert [index for index, part in enumerate(parts) if isinstance(part, PlainRows)] == [3]
    assert torch.equal(parts[3].values, tensors[f"{layer}.weight"])
    held = sum(tensor.untyped_storage().nbytes() for one in weights.layers for tensor in matrices_of(one))
    assert held + 2 * 512 * 128 * 4 == config.weights_bytes(4)
    x, row_ends = torch.randn(9, 176), torch.tensor([2, 2, 3, 6, 9, 9, 9, 9], dtype=torch.int32)
    kernels, down = torch_kernels(host_device(torch.float32)), weights.layers[1].down
    products = LinearProducts(kernels.products, Alone(), 0, 1)
    wanted = products_of_experts(kernels, products, x, down, row_ends)
    torch.testing.assert_close(
        products_of_each(products, x, down, row_ends, None), wanted, rtol=1e-4, atol=1e-4
    )


def test_scales_that_are_stored_as_powers_are_those_numbers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("deepseek_v3", "fp8-block-ue8m0")
    directory = Path(shutil.copytree(source, tmp_path / "model"))
    path = directory / "model.safetensors"
    tensors, name = load_file(path), "model.layers.1.mlp.experts.5.down_proj.weight_scale_inv"
    scales = {one: scale for one, scale in tensors.items() if one.endswith("weight_scale_inv")}
    assert all(bool((torch.frexp(scale).mantissa == 0.5).all()) for scale in scales.values())
    save_file(tensors | {one: scale.to(torch.float8_e8m0fnu) for one, scale in scales.items()}, path)
    wanted, found = load(source).layers[1], load(directory).layers[1]
    for ours, theirs in zip(matrices_of(found), matrices_of(wanted), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    damaged = torch.full_like(scales[name], float("nan")).to(torch.float8_e8m0fnu)
    save_file(tensors | {name: damaged}, path)
    with pytest.raises(CheckpointInvalid, match=rf"tensor {name} holds NaN; fetch the checkpoint again"):
        load(directory)


EXPERT = "model.layers.1.mlp.experts.5.down_proj"


def damage(directory: Path, kind: str) -> None:
    path = directory / "model.safetensors"
    tensors, settings = load_file(path), QUANTISATIONS["fp8-block"]
    match kind:
        case "missing scale":
            del tensors[f"{EXPERT}.weight_scale_inv"]
        case "blocks of another size":
            settings = settings | {"weight_block_size": [64, 64]}
        case "fewer experts":
            change(directory, {"num_experts": 6})
        case "more experts":
            change(directory, {"num_experts": 9})
        case "another width":
            change(directory, {"moe_intermediate_size": 160})
        case "an expert in numbers":
            del tensors[f"{EXPERT}.weight_scale_inv"]
            tensors[f"{EXPERT}.weight"] = torch.zeros(128, 176)
        case "a quantised router":
            tensors["model.layers.1.mlp.gate.weight_scale_inv"] = torch.ones(1, 1)
        case "one tensor for all experts":
            tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
            for layer in ("model.layers.0", "model.layers.1"):
                tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.zeros(8, 352, 128)
                tensors[f"{layer}.mlp.experts.down_proj"] = torch.zeros(8, 128, 176)
        case "scales in another format":
            settings = settings | {"scale_fmt": "ue4m3"}
        case "no configuration":
            settings = None
        case "an unknown method":
            settings = {"quant_method": "hqq"}
    change(directory, {"quantization_config": settings})
    save_file(tensors, path)
    if kind == "a truncated file":
        path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("kind", "error", "named"),
    [
        ("missing scale", CheckpointInvalid, r"experts\.5\.down_proj\.weight_scale_inv of shape \[1, 2\] is missing"),
        ("blocks of another size", CheckpointInvalid, r"weight_scale_inv has shape \[\d, \d\], but config\.json makes it"),
        ("fewer experts", CheckpointInvalid, r"experts\.6\..* is unexpected \(and 23 more\)"),
        ("more experts", CheckpointInvalid, r"experts\.8\.gate_proj\.weight of shape \[176, 128\] is missing \(and 11 more\)"),
        ("another width", CheckpointInvalid, r"experts\.\d\.\w+\.weight has shape .*176.*, but config\.json makes it .*160"),
        ("an expert in numbers", CheckpointInvalid, r"experts\.5\.down_proj\.weight_scale_inv .* is missing"),
        ("a quantised router", CheckpointInvalid, r"1\.mlp\.gate\.weight_scale_inv is unexpected"),
        ("one tensor for all experts", CheckpointInvalid, r"0\.mlp\.experts\.0\.gate_proj\.weight .* is missing"),
        ("scales in another format", ModelUnsupported, r"quantization_config\.scale_fmt is 'ue4m3'"),
        ("no configuration", CheckpointInvalid, r"weight_scale_inv is unexpected"),
        ("an unknown method", ModelUnsupported, r"quant_method is 'hqq', but models of this type"),
        ("a truncated file", CheckpointInvalid, r"is no complete safetensors file"),
    ],
)  # fmt: skip
def test_damage_to_experts_is_refused_before_anything_is_read(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, error: type[MedhaError], named: str
) -> None:
    directory = Path(shutil.copytree(checkpoint("qwen3_moe", "fp8-block"), tmp_path / "damaged"))
    damage(directory, kind)
    seen: list[int] = []
    with pytest.raises(error, match=named):
        load(directory, progress=lambda done, _: seen.append(done))
    assert not seen
