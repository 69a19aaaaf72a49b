"""Experts are read from both forms of checkpoints, split by their width; what does not fit is refused before memory is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError, ModelUnsupported
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard, Weights, load_weights

from .test_model_transformer import save_reference

FILE = "model.safetensors"


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset with eight experts of width 176 in both layers."""
    directory = tmp_path_factory.mktemp("experts") / str(request.param)
    init_checkpoint(directory, preset="tiny", seed=3, architecture=request.param)
    return directory


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / pristine.name))


def load(directory: Path, rank: int = 0, size: int = 1) -> Weights:
    config = ModelConfig.from_directory(directory)
    shard = Shard(rank, size, 0, config.num_layers, config.num_layers)
    return load_weights(directory, config, shard, device=host_device(torch.float32))


def names_of(directory: Path) -> tuple[str, list[str]]:
    """Return the prefix of the second layer's experts, and the ends of gate, up and down."""
    if directory.name == "mixtral":
        return "model.layers.1.block_sparse_moe.experts", ["w1.weight", "w3.weight", "w2.weight"]
    return "model.layers.1.mlp.experts", ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_slices_of_all_ranks_together_are_the_experts(pristine: Path, size: int) -> None:
    stored = load_file(pristine / FILE)
    layers = [load(pristine, rank, size).layers[1] for rank in range(size)]
    prefix, (gate, up, down) = names_of(pristine)
    for expert in range(8):
        gates, ups = zip(*(layer.gate_up[expert].chunk(2, dim=1) for layer in layers), strict=True)
        assert torch.equal(torch.cat(gates, dim=1).t(), stored[f"{prefix}.{expert}.{gate}"])
        assert torch.equal(torch.cat(ups, dim=1).t(), stored[f"{prefix}.{expert}.{up}"])
        downs = torch.cat([layer.down[expert] for layer in layers])
        assert torch.equal(downs.t(), stored[f"{prefix}.{expert}.{down}"])
    router = stored[f"{prefix.removesuffix('experts')}gate.weight"]
    for layer in layers:
        assert layer.router is not None
        assert torch.equal(layer.router.t(), router)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe-mixed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_tensor_for_all_experts_gives_the_same_weights(
    architecture: str, rank: int, tmp_path: Path
) -> None:
    model = save_reference(tmp_path / "published", architecture)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "fused" / FILE)
    published, fused = (load(tmp_path / name, rank, 2) for name in ("published", "fused"))
    for ours, theirs in zip(published.layers, fused.layers, strict=True):
        assert torch.equal(ours.gate_up, theirs.gate_up)
        assert torch.equal(ours.down, theirs.down)
        assert (ours.router is None) == (theirs.router is None)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the file, or remove them."""
    tensors = load_file(directory / FILE) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / FILE)


def damage(directory: Path, kind: str) -> None:
    prefix, linears = names_of(directory)
    count = "num_local_experts" if directory.name == "mixtral" else "num_experts"
    width = "intermediate_size" if directory.name == "mixtral" else "moe_intermediate_size"
    match kind:
        case "missing expert":
            change_tensors(directory, dict.fromkeys(f"{prefix}.5.{name}" for name in linears))
        case "more experts than there are":
            change_config(directory, **{count: 9})
        case "fewer experts than there are":
            change_config(directory, **{count: 7})
        case "another width":
            change_config(directory, **{width: 88})
        case "router of another size":
            router = f"{prefix.removesuffix('experts')}gate.weight"
            change_tensors(directory, {router: torch.zeros(7, 128)})
        case "truncated file":
            path = directory / FILE
            path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing expert", r"experts\.5\.\w+\.weight of shape \[176, 128\] is missing \(and 2 more\)"),
        ("more experts than there are", r"experts\.8\.\w+\.weight of shape \[176, 128\] is missing"),
        ("fewer experts than there are", r"experts\.7\.\w+\.weight is unexpected \(and 5 more\)"),
        ("another width", r"experts\.\d\.\w+\.weight has shape \[\d+, \d+\], but config\.json makes it"),
        ("router of another size", r"gate\.weight has shape \[7, 128\].*\[8, 128\]"),
        ("truncated file", r"model\.safetensors: is no complete safetensors file"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_allocated(
    checkpoint: Path, kind: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(checkpoint, kind)
    refuse_memory(monkeypatch)
    with pytest.raises(CheckpointInvalid, match=named):
        load(checkpoint)


def test_an_expert_in_integers_is_named_before_anything_is_allocated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, (gate, *_) = names_of(checkpoint)
    change_tensors(checkpoint, {f"{prefix}.5.{gate}": torch.zeros(176, 128, dtype=torch.int8)})
    refuse_memory(monkeypatch)
    with pytest.raises(ModelUnsupported, match=r"experts\.5\.\w+\.weight is stored as I8.*bfloat16"):
        load(checkpoint)


def test_a_width_that_does_not_divide_is_named_before_anything_is_allocated(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = "intermediate_size" if checkpoint.name == "mixtral" else "moe_intermediate_size"
    change_config(checkpoint, **{width: 178})
    refuse_memory(monkeypatch)
    with pytest.raises(
        ConfigInvalid, match=rf"parallelism\.tensor is 4, which does not divide {width} \(178\)"
    ):
        load(checkpoint, 0, 4)


def refuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the weights of a rank begin to be allocated or read."""

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise MedhaError("memory was allocated")

    monkeypatch.setattr(torch, "empty", fail)
    monkeypatch.setattr(torch.Tensor, "to", fail)
