"""A step of every family and of every form of weights on fake `cuda` tensors: it stays on its device, as that of a Llama."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medha_worker.checkpoints.presets import ARCHITECTURES, init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.kernels.expert_products import GroupedProducts
from medha_worker.kernels.fast_forms import FORMS, FastForms
from medha_worker.kernels.protocol import PackRows
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard

from ..models import run_step
from ..operator_doubles import convert_weight_to_int4pack
from .test_device import BLOCK_TOKENS, ROWS, Links, on_a_fake_device, shared_with_two_lanes, spans

SPARSE_QUANTISATIONS = [
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "fp8-block"),
    ("qwen3_moe", "w4a16"),
    ("mixtral", "awq"),
    ("mixtral", "gptq-desc-act"),
    ("qwen3_moe", "w8a8"),
]
VARIED = ("deepseek_v2", "gemma3_text", "gpt_oss", "qwen3_moe")
"""Families whose layers differ from those in the other tests that CI runs here."""
WINDOW_TOKENS = 24
WINDOWED = [name for name, family in ARCHITECTURES.items() if family.has_window]


class OneOfTwo:
    """A tensor group on a fake device, in which the other rank adds nothing."""

    captures = True

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        return x.new_empty(x.shape[0], sum(widths))


def found_in_steps(
    checkpoint: Path,
    *,
    tensor: int,
    config: ModelConfig | None = None,
    has_grouped_products: bool = True,
    pack_rows: PackRows | None = None,
) -> list[str]:
    """Run a step of own rows, one that is shared with two lanes, and the output head; return what no step may do."""
    config = config or ModelConfig.from_directory(checkpoint)
    shard = Shard(0, tensor, 0, config.num_layers, config.num_layers)
    group: Any = OneOfTwo()
    links: Any = Links()
    with on_a_fake_device(checkpoint, shard, torch.bfloat16, config, pack_rows) as (model, watch):
        if has_grouped_products:  # as on an H100 (`expert_products`)
            model = model.with_kernels(replace(model.kernels, experts=GroupedProducts(model.kernels.experts)))
        model = model.in_grid(group, links)
        tokens, positions = torch.zeros(ROWS, dtype=torch.int64), torch.arange(ROWS)
        shared = shared_with_two_lanes()
        shared = replace(shared, windowed={window: shared for window in config.windows if window is not None})
        for spread in (None, shared):
            cache = model.new_kv_cache(16, BLOCK_TOKENS)
            hidden = run_step(model, tokens, positions, () if spread else spans(), cache, spread)
            assert (hidden.device.type, hidden.dtype) == ("cuda", torch.bfloat16)
        logits = model.logits(hidden[:2])
        assert logits is not None
        assert (logits.device.type, logits.dtype) == ("cuda", torch.float32)
        return watch.found


def made(directory: Path, architecture: str, **options: Any) -> Path:
    init_checkpoint(
        directory / "made", preset="tiny", seed=0, architecture=architecture, dtype="bfloat16", **options
    )
    return directory / "made"


def long_unless(is_short: bool, *values: Any) -> Any:
    """Return parameters of a test, which takes seconds, for CI if `is_short`."""
    return pytest.param(*values, marks=() if is_short else pytest.mark.long)


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        long_unless(tensor == 1 and name in VARIED, name, tensor)
        for name in ARCHITECTURES
        for tensor in (1, 2)
    ],
)
def test_a_step_of_a_family_stays_on_its_device(tmp_path: Path, architecture: str, tensor: int) -> None:
    window = {"window_tokens": WINDOW_TOKENS} if architecture in WINDOWED else {}
    assert found_in_steps(made(tmp_path, architecture, **window), tensor=tensor) == []


@pytest.mark.parametrize(
    ("architecture", "quantisation"),
    [long_unless(form[0] == "mixtral", *form) for form in (("mixtral", "none"), ("qwen3_moe", "fp8-block"))],
)
def test_a_step_on_a_gpu_without_grouped_products_stays_on_its_device(
    tmp_path: Path, architecture: str, quantisation: str
) -> None:
    checkpoint = made(tmp_path, architecture, quantisation=quantisation)
    assert found_in_steps(checkpoint, tensor=1, has_grouped_products=False) == []


@pytest.mark.parametrize(
    ("quantisation", "tensor"),
    [
        *(long_unless(name == "fp8-block", name, 1) for name in QUANTISATIONS),
        *(long_unless(False, name, 2) for name in ("w8a8", "gptq-desc-act")),
    ],
)
def test_a_step_with_quantised_weights_stays_on_its_device(
    tmp_path: Path, quantisation: str, tensor: int
) -> None:
    assert found_in_steps(made(tmp_path, "qwen2", quantisation=quantisation), tensor=tensor) == []


@pytest.mark.parametrize(
    ("quantisation", "tensor"),
    [
        long_unless(form == ("w4a16", 1), *form)
        for form in (("w4a16", 1), ("w8a8", 2), ("fp8", 2), ("fp8-tensor", 1), ("fp8-block", 1))
    ],
)
def test_a_step_with_weights_for_a_devices_units_stays_on_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantisation: str, tensor: int
) -> None:
    """Torch checks the shapes, types and strides of its operators' operands."""
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", convert_weight_to_int4pack)
    checkpoint = made(tmp_path, "qwen2", quantisation=quantisation)
    assert found_in_steps(checkpoint, tensor=tensor, pack_rows=FastForms(list(FORMS.values()))) == []


@pytest.mark.parametrize(
    ("architecture", "quantisation"),
    [long_unless(form[1] == "mxfp4", *form) for form in SPARSE_QUANTISATIONS],
)
def test_a_step_with_quantised_experts_stays_on_its_device(
    tmp_path: Path, architecture: str, quantisation: str
) -> None:
    assert found_in_steps(made(tmp_path, architecture, quantisation=quantisation), tensor=1) == []


@pytest.mark.parametrize(
    "architecture",
    [long_unless(name == "deepseek_v3", name) for name in ("llama", "gemma3_text", "deepseek_v3")],
)
def test_a_step_over_fp8_kv_stays_on_its_device(tmp_path: Path, architecture: str) -> None:
    checkpoint = made(tmp_path, architecture)
    config = ModelConfig.from_directory(checkpoint, kv_dtype="fp8")
    assert found_in_steps(checkpoint, tensor=1, config=config) == []
