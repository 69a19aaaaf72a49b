"""K and V in FP8: how they are rounded, that kernels read them exactly, and that scales follow from the checkpoint alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import Device, host_device
from medha_worker.kernels.cpu.compiled_kernels import compiled_kernels
from medha_worker.kernels.name_table import choose_kernels, torch_kernels
from medha_worker.kernels.protocol import Kernels, KernelSizes, KernelsUnavailable
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.triton.triton_kernels import triton_kernels
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_scales import FP8, LayerScales, ScaledHeads, digest_of
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prepared_step import OwnStep
from medha_worker.model.weights import Shard, load_weights

from ..fp8_kv_reference import to_fp8
from ..models import kernels_of_a_rank, load_model
from .test_model_transformer import SIZES, random_tokens, run_chunks, save_reference

DEVICE = host_device(torch.float32)
SIZES_OF_KERNELS = KernelSizes(4, 2, 32, 64, 128, has_fp8_kv=True)
BLOCK_TOKENS = 4


def kernels(kind: str) -> Kernels:
    plain = torch_kernels(DEVICE)
    if kind == "torch":
        return plain
    return compiled_kernels(SIZES_OF_KERNELS, DEVICE, plain, invariant=kind == "invariant")


every_kernel = pytest.mark.parametrize("kind", ["torch", "cpu", "invariant"])


@given(
    sizes=st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=20),
    exponents=st.lists(st.integers(-12, 12), min_size=1, max_size=3),
    is_one_tensor=st.booleans(),
)
def test_numbers_are_rounded_as_torch_does_and_those_too_large_become_the_largest(
    sizes: list[float], exponents: list[int], is_one_tensor: bool
) -> None:
    """Zeros, a single KV head and infinitely large quotients are among them."""
    scale = torch.tensor([[2.0**exponent] for exponent in exponents])
    k = torch.tensor(sizes)[:, None, None] * torch.tensor([[1.0, -1.0]]).expand(len(exponents), 2)
    v = k if is_one_tensor else -k
    keys, values = ScaledHeads(LayerScales(scale, scale)).rounded(k, v)
    assert keys.dtype == values.dtype == FP8
    assert (keys is values) == is_one_tensor
    for found, given_ in ((keys.float(), k), (values.float(), v)):
        assert bool(found.isfinite().all())
        fits = (given_ / scale).abs() <= 448
        wanted = (given_ / scale).to(FP8).float()
        assert torch.equal(found[fits], wanted[fits])
        assert bool((found[~fits].abs() == 448).all())
        assert torch.equal(found[~fits].sign(), given_[~fits].sign())


def test_what_memory_did_not_suffice_for_remains_nan() -> None:
    one = torch.ones(1, 1)
    lost = torch.full((1, 1, 4), math.nan)
    for rounded in ScaledHeads(LayerScales(one, one)).rounded(lost, lost.clone()):
        assert bool(rounded.float().isnan().all())


@every_kernel
def test_attention_reads_every_number_of_fp8_exactly(kind: str) -> None:
    """With queries of zero, a row that sees one key gets its value: as a decode, and as the first row of a chunk."""
    heads, width = SIZES_OF_KERNELS.kv_heads, SIZES_OF_KERNELS.head_dim
    every = torch.arange(256, dtype=torch.uint8).view(-1, 1, width).expand(-1, heads, width)
    blocks = len(every)
    values = torch.zeros(heads, blocks * BLOCK_TOKENS, width, dtype=FP8)
    values.view(torch.uint8)[:, ::BLOCK_TOKENS] = every.transpose(0, 1)
    for rows in (1, 2):
        spans = [SequenceSpan(block * rows, rows, 0, [block]) for block in range(blocks)]
        q = torch.zeros(blocks * rows, SIZES_OF_KERNELS.query_heads, width)
        step = kernels(kind).attention.plan(spans, BLOCK_TOKENS)
        found = step.attend(q, torch.zeros_like(values), values)[0][::rows]
        wanted = every.reshape(-1, heads, width).contiguous().view(FP8).float()
        torch.testing.assert_close(found, wanted.repeat_interleave(2, dim=1), rtol=0, atol=0, equal_nan=True)


@every_kernel
def test_a_chunk_attends_to_its_own_keys_as_they_are_rounded(kind: str) -> None:
    """Scales are no powers of two, a head's keys are far larger than the other's, and one value is too large."""
    random = torch.Generator().manual_seed(0)
    scales = LayerScales(torch.tensor([[0.013], [1.7]]), torch.tensor([[0.4], [0.0021]]))
    cache = KVCache(
        num_layers=1, kv_heads=2, head_dim=32, num_blocks=12, block_tokens=BLOCK_TOKENS, device=DEVICE,
        scales=[scales],
    )  # fmt: skip
    k, v = (torch.randn(40, 2, 32, generator=random) for _ in range(2))
    k[:, 1] *= 90.0
    v[3, 1] = 1e6
    q = torch.randn(40, 4, 32, generator=random) * torch.tensor([1.0, 1.0, 0.01, 0.01])[:, None]
    table = torch.randperm(12, generator=random).tolist()
    found = torch.cat(
        [
            OwnStep([SequenceSpan(0, stop - start, start, table)], cache, kernels(kind)).attend(
                0, q[start:stop].clone(), k[start:stop], v[start:stop]
            )
            for start, stop in ((0, 17), (17, 18), (18, 40))
        ]
    )
    rounded_k, rounded_v = to_fp8(k, scales.keys), to_fp8(v, scales.values)
    assert float(rounded_v[3, 1, 0]) == pytest.approx(448 * 0.0021)

    def attention(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1).repeat_interleave(2, dim=0) for x in (keys, values)]
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), *heads, is_causal=True
        ).transpose(0, 1)

    torch.testing.assert_close(found, attention(rounded_k, rounded_v), rtol=1e-4, atol=1e-5)
    assert float((found - attention(k, v)).abs().max()) > 1e-2, "rounding would make no difference"


def scales_of(directory: Path, tensor: int = 1, stage: slice = slice(0, 2)) -> list[Any]:
    """Return the scales of each tensor rank of a stage."""
    config = ModelConfig.from_directory(directory, kv_dtype="fp8")
    shards = [Shard(rank, tensor, stage.start, stage.stop, config.num_layers) for rank in range(tensor)]
    return [load_weights(directory, config, shard, device=DEVICE).kv_scales for shard in shards]


def require_the_same_on_every_grid(directory: Path, config: ModelConfig, whole: list[LayerScales]) -> None:
    """Check that stages and tensor ranks have the scales of their layers and heads of those of the `whole` model."""
    layers = config.num_layers
    assert digest_of(
        [*scales_of(directory, 1, slice(0, 1))[0], *scales_of(directory, 1, slice(1, layers))[0]]
    ) == digest_of(whole)
    for tensor in (2, 4):
        held = scales_of(directory, tensor, slice(0, layers))
        for rank, own in enumerate(held):
            count = own[0].keys.shape[0]
            first = rank * config.num_kv_heads // tensor
            for mine, all_heads in zip(own, whole, strict=True):
                assert torch.equal(mine.keys, all_heads.keys[first : first + count])
                assert torch.equal(mine.values, all_heads.values[first : first + count])


@pytest.mark.parametrize(
    "architecture", ["llama-biased", "qwen3", "gemma3_text-window", "gpt_oss", "deepseek_v2", "deepseek_v3"]
)
def test_scales_are_powers_of_two_that_no_prompt_exceeds_and_the_same_on_every_grid(
    tmp_path: Path, architecture: str
) -> None:
    """Rounding errors have no part in them, so that a rank finds the scales of its heads and layers alone."""
    save_reference(tmp_path, architecture)
    config = ModelConfig.from_directory(tmp_path, kv_dtype="fp8")
    layers = config.num_layers
    (whole,) = scales_of(tmp_path, 1, slice(0, layers))
    for one in whole:
        for scale in (one.keys, one.values):
            assert bool((torch.frexp(scale).mantissa == 0.5).all())
    require_the_same_on_every_grid(tmp_path, config, whole)

    model = load_model(tmp_path, config)
    cache = model.new_kv_cache(40, BLOCK_TOKENS)
    tokens = random_tokens(150)
    step = model.prepare(torch.arange(150), [SequenceSpan(0, 150, 0, list(range(40)))], cache)
    model.forward(tokens, step)
    for pool in (*cache.keys, *cache.values):
        numbers = pool[:, :150].float().abs()
        assert float(numbers.max()) < 448, "a number reached its bound"
        assert float((numbers > 2**-6).float().mean()) > 0.95, "numbers lose precision"


LOGIT_ERROR = 0.15
"""Root mean square of the errors of logits whose standard deviation is 1.3, of random models whose attention is sharp."""


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "deepseek_v2"])
def test_logits_stay_near_those_of_full_precision(tmp_path: Path, architecture: str) -> None:
    save_reference(tmp_path, architecture)
    full = ModelConfig.from_directory(tmp_path)
    rounded = replace(full, kv_dtype="fp8")
    tokens = random_tokens(150)
    wanted, found = (
        run_chunks(load_model(tmp_path, config, kernels=kernels_of_a_rank(config)), tokens, [70, 1, 79])
        for config in (full, rounded)
    )
    assert 1e-3 < float((found - wanted).square().mean().sqrt()) <= LOGIT_ERROR
    assert float((found.argmax(-1) == wanted.argmax(-1)).float().mean()) >= 0.85


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibrated") / "model"
    init_checkpoint(directory, preset="tiny", seed=1, quantisation="fp8-kv")
    return directory


def restored(
    source: Path, target: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """Copy a checkpoint, with its tensors and its `kv_cache_scheme` changed."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config["quantization_config"]["kv_cache_scheme"])
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_scales_of_a_checkpoint_are_used_in_every_published_form(calibrated: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_directory(calibrated)
    layers = slice(0, config.num_layers)
    stored = load_file(calibrated / "model.safetensors")["model.layers.1.self_attn.k_scale"].float()
    (scales,) = scales_of(calibrated, 1, layers)
    assert torch.equal(scales[1].keys, stored.expand(config.num_kv_heads, 1))
    assert load_model(calibrated, config)._weights.kv_scales is None, "with `auto` they are not used"

    def renamed(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            kind = name[-len("k_scale")]
            tensors[name.replace(f"{kind}_scale", f"{kind}_proj.output_scale")] = tensors.pop(name).view(())

    def by_head(tensors: dict[str, torch.Tensor], scheme: dict[str, Any]) -> None:
        scheme["strategy"] = "attn_head"
        for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
            factors = torch.arange(1.0, 1 + config.num_kv_heads, dtype=tensors[name].dtype)
            tensors[name] = (tensors[name] * factors).view(-1, 1, 1).clone()

    same = restored(calibrated, tmp_path / "renamed", renamed)
    assert digest_of(scales_of(same, 1, layers)[0]) == digest_of(scales)
    heads = restored(calibrated, tmp_path / "heads", by_head)
    (found,) = scales_of(heads, 1, layers)
    assert found[0].keys.shape == (config.num_kv_heads, 1)
    halves = scales_of(heads, 2, layers)
    assert torch.equal(torch.cat([half[0].values for half in halves]), found[0].values)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, r"tensor model\.layers\.0\.self_attn\.v_scale of shape \[1\] is missing"),
        (torch.zeros(1), r"v_scale is \[0\.0\].*spec\.kvCache\.dtype to auto"),
        (torch.tensor([math.nan]), r"v_scale is \[nan\]"),
        (torch.ones(3), r"v_scale has shape \[3\]"),
    ],
    ids=["missing", "zero", "nan", "misshaped"],
)
def test_scales_that_cannot_be_used_are_refused(
    calibrated: Path, tmp_path: Path, value: torch.Tensor | None, named: str
) -> None:
    def damage(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        name = "model.layers.0.self_attn.v_scale"
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    broken = restored(calibrated, tmp_path / "broken", damage)
    with pytest.raises(CheckpointInvalid, match=named):
        scales_of(broken)


def test_kernels_that_read_no_fp8_refuse_at_start() -> None:
    gpu = Device(torch.device("meta"), torch.bfloat16, DEVICE.memory, DEVICE.runtime)
    sizes = replace(SIZES_OF_KERNELS, head_dim=64)
    with pytest.raises(KernelsUnavailable, match=r"spec\.kvCache\.dtype"):
        triton_kernels(sizes, gpu, torch_kernels(DEVICE))
    with pytest.raises(ConfigInvalid, match=r"spec\.determinism is batchInvariant.*spec\.kvCache\.dtype"):
        choose_kernels(sizes, gpu, "batchInvariant")


def test_a_block_takes_a_byte_for_each_number(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    config = ModelConfig.from_directory(tmp_path, kv_dtype="fp8")
    cache = load_model(tmp_path, config).new_kv_cache(5, BLOCK_TOKENS)
    numbers = SIZES["num_hidden_layers"] * 2 * config.num_kv_heads * config.head_dim
    assert sum(pool.nbytes for pool in (*cache.keys, *cache.values)) == (5 + 1) * BLOCK_TOKENS * numbers
