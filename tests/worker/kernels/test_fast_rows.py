"""Products by a device's own units are those of the numbers of quantised weights, in all forms, and are not used where they are not.

`torch._int_mm` and the product by rows of `F.scaled_mm` run on this CPU. The operators for INT4 and for blocks of FP8 do not:
doubles stand for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha.model.quantisation import ActivationFormat
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.device import Device, host_device
from medha_worker.kernels import fast_forms as forms
from medha_worker.kernels import fast_rows
from medha_worker.kernels.activation_rounding import rounded
from medha_worker.kernels.fast_forms import FORMS, MOST_ERROR, FastForms, error_of, names_of_gpu
from medha_worker.kernels.fast_rows import INT4_MOST_ROWS, Int4Rows
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.quantised_rows import FastRows, PlainRows, QuantisedRows, WeightRows
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_products import TorchProducts
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_weights import LinearProducts, QuantisedWeight
from medha_worker.model.tensor_group import Alone
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard, load_weights

from ..device_watch import fake_gpu, watched
from ..model.test_device_families import long_unless
from ..model.test_quantised_weights import weight_of
from ..models import run_step
from ..operator_doubles import BlockedProducts, convert_weight_to_int4pack, weight_int4pack_mm

ROUNDED_ONCE = 0.005
"""Error of a product in bfloat16 against that of numbers, over its size: both round several times by 2^-9 at most."""


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> BlockedProducts:
    """Let doubles compute what runs on GPUs alone; others are torch's own."""
    own, double = F.scaled_mm, BlockedProducts()

    def scaled_mm(*operands: Any, **options: Any) -> torch.Tensor:
        is_blocked = operands[3] == F.ScalingType.BlockWise1x128
        return (double if is_blocked else own)(*operands, **options)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", convert_weight_to_int4pack)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", weight_int4pack_mm)
    return double


def size(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def product(parts: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return LinearProducts(TorchProducts(), Alone(), 0, 1).product(x, QuantisedWeight(parts), **options)


def every_form() -> FastForms:
    return FastForms(list(FORMS.values()))


def example(name: str, rows: int = 256, columns: int = 384) -> QuantisedRows:
    return FORMS[name].example(torch.Generator().manual_seed(1), rows, columns)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("rows", [0, 1, 17, 70])
def test_a_product_by_a_devices_units_is_that_of_numbers(
    blocks: BlockedProducts, name: str, rows: int
) -> None:
    stored = example(name)
    (made,) = every_form()([stored])
    assert isinstance(made, FastRows)
    assert (made.rows, made.columns) == (stored.rows, stored.columns)
    x, bias = activations(rows, stored.columns), activations(1, stored.rows)[0]
    wanted, found = product([stored], x, bias=bias), product([made], x, bias=bias)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert rows == 0 or size(found.float() - wanted.float()) <= ROUNDED_ONCE * size(wanted)
    target = torch.ones_like(found)
    LinearProducts(TorchProducts(), Alone(), 0, 1).add_product(target, x, QuantisedWeight([made]))
    assert rows == 0 or size(target - 1 - product([stored], x)) <= ROUNDED_ONCE * size(wanted)


@pytest.mark.parametrize("name", ["INT8", "FP8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_of_activations_are_multiplied_as_well(name: str, dtype: torch.dtype) -> None:
    stored = example(name)
    x = activations(20, stored.columns, dtype)
    wanted, found = product([stored], x), product(every_form()([stored]), x)
    assert found.dtype == dtype
    assert size(found.float() - wanted.float()) <= (1e-5 if dtype == torch.float32 else 1e-3) * size(wanted)


def test_sums_of_int8_are_exact() -> None:
    """Values that are powers of two, and scales that are, leave nothing to round."""
    values = torch.randint(-128, 128, (16, 256), dtype=torch.int8)
    stored = QuantisedRows(values, 256, torch.full((16, 1), 0.5), activations=ActivationFormat("int8"))
    x = torch.randint(-128, 128, (5, 256)).float()
    x[:, 0] = 127.5  # the scale of each row is 1
    x[x == -128] = -127
    (made,) = every_form()([stored])
    assert isinstance(made, FastRows)
    found = made.product(x, x.abs().amax(1, keepdim=True))
    entering = x.round().clamp_(-128, 127)
    assert torch.equal(found, (entering.double() @ values.double().t() * 0.5).float())


def test_int8_on_a_gpu_gets_the_rows_that_its_operator_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 16 rows, in eights; a weight is multiplied in parts, so that sums take bounded memory."""
    seen, own = [], torch._int_mm

    def int_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] > 16
        assert x.shape[0] % 8 == x.shape[1] % 8 == weight.shape[1] % 8 == 0
        assert x.is_contiguous()
        assert weight.stride(0) == 1
        seen.append((x.shape[0], weight.shape[1]))
        return own(x, weight)

    stored = example("INT8")
    (made,) = every_form()([stored])
    wanted = [product([stored], activations(rows, stored.columns)) for rows in (1, 30)]
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    monkeypatch.setattr(fast_rows, "is_in_host_memory", lambda _: False)
    monkeypatch.setattr(fast_rows, "_SUMS", 32 * 100)
    for rows, right in zip((1, 30), wanted, strict=True):
        found = product([made], activations(rows, stored.columns))
        assert size(found - right) <= ROUNDED_ONCE * size(right)
    assert seen == [(24, 128), (24, 128), (32, 96), (32, 96), (32, 64)]


def test_blocks_get_rows_in_fours(blocks: BlockedProducts) -> None:
    stored = example("FP8 in blocks")
    for rows in (1, 4, 6):
        product(every_form()([stored]), activations(rows, stored.columns))
    assert blocks.rows == [4, 4, 8]


@pytest.mark.parametrize("columns", [96, 192, 352, 384])
def test_numbers_of_packed_int4_are_those_that_were_packed(blocks: BlockedProducts, columns: int) -> None:
    """Columns are packed in 2, 4 or 8 tiles; scales are powers of two, so that no number is rounded."""
    group = 128 if columns % 128 == 0 else 32
    random = torch.Generator().manual_seed(columns)
    pairs = torch.randint(0, 256, (40, columns // 2), dtype=torch.uint8, generator=random)
    scale = torch.exp2(torch.randint(-3, 3, (40, columns // group), generator=random).float())
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=random)
    for stored in (
        QuantisedRows(pairs, columns, scale, zero, has_pairs=True, group_size=group),
        QuantisedRows(pairs, columns, scale, offset=8, has_pairs=True, group_size=group),
    ):
        (made,) = every_form()([stored])
        assert isinstance(made, Int4Rows)
        assert made.group_size == group
        for rows in (slice(0, 40), slice(3, 21), slice(39, 40)):
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(made.numbers(rows, dtype), stored.numbers(rows, dtype))


def test_many_rows_are_multiplied_with_numbers_of_int4(
    blocks: BlockedProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = example("INT4")
    (made,) = every_form()([stored])

    def refused(*_: object) -> None:
        raise AssertionError("its operator reads the weights again for every 16 rows")

    monkeypatch.setattr(torch, "_weight_int4pack_mm", refused)
    x = activations(INT4_MOST_ROWS + 1, stored.columns)
    wanted = product([stored], x)
    assert size(product([made], x) - wanted) <= ROUNDED_ONCE * size(wanted)
    with pytest.raises(AssertionError, match="its operator"):
        product([made], x[:-1])


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_row_of_nan_stays_nan_and_alone(blocks: BlockedProducts, name: str) -> None:
    """A rank whose memory ran out says so by NaN, which every later rank has to see."""
    stored = example(name)
    x = activations(4, stored.columns)
    x[1] = torch.nan
    found = product(every_form()([stored]), x)
    assert bool(found[1].isnan().all())
    assert not bool(found[[0, 2, 3]].isnan().any())


FORM_OF = {
    "w8a8": "INT8",
    "w4a16": "INT4",
    "w4a16-asym": "INT4",
    "fp8": "FP8",
    "fp8-kv": "FP8",
    "fp8-tensor": "FP8",
    "awq": "INT4",
    "gptq": "INT4",
    "fp8-block": "FP8 in blocks",
    "fp8-block-ue8m0": "FP8 in blocks",
}


def stored_rows(name: str, rows: int = 256, columns: range = range(384), whole: int = 384) -> QuantisedRows:
    """Return a slice of a weight in a published size of groups or blocks."""
    size_of_groups = 128 if "block" in name else 32
    return weight_of(name, rows, columns, whole, 1, size_of_groups)[0]


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_formats_are_brought_into_the_forms_that_they_fit(blocks: BlockedProducts, name: str) -> None:
    part = stored_rows(name)
    fitting = [form for form, one in FORMS.items() if one.fits(part)]
    assert fitting == ([FORM_OF[name]] if name in FORM_OF else [])
    (made,) = every_form()([part])
    # The ranks of a group exchange the same, whichever form each of them has found to be right.
    assert QuantisedWeight([made]).has_row_scales == QuantisedWeight([part]).has_row_scales
    if fitting:
        x = activations(9, part.columns)
        wanted = product([part], x)
        assert size(product([made], x) - wanted) <= ROUNDED_ONCE * size(wanted)
    else:
        assert made is part


@pytest.mark.parametrize(
    ("name", "rows", "columns", "why"),
    [
        ("w4a16", 256, range(16, 48), "groups are cut"),
        ("awq", 256, range(16), "a part of one group"),
        ("w4a16", 252, range(384), "rows are no multiple of 8"),
        ("fp8", 250, range(384), "rows are no multiple of 16"),
        ("w8a8", 256, range(380), "columns are no multiple of 8"),
        ("fp8-block", 192, range(384), "the last block is cut"),
        ("fp8-block", 256, range(64), "groups are cut"),
    ],
)
def test_sizes_that_an_operator_does_not_take_stay_as_they_are(
    name: str, rows: int, columns: range, why: str
) -> None:
    part = stored_rows(name, rows, columns)
    assert every_form()([part]) == (part,), why


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_weight_without_rows_stays_as_it_is(name: str) -> None:
    """A small vocabulary leaves the last ranks no row of the output head, and no kernel starts for nothing."""
    stored = example(name)
    part = replace(
        stored,
        values=stored.values[:0],
        scale=stored.scale[:0],
        zero=None if stored.zero is None else stored.zero[:0],
    )
    assert every_form()([part]) == (part,)
    assert product([part], activations(3, part.columns)).shape == (3, 0)


def test_blocks_of_a_slice_have_scales_of_their_own(blocks: BlockedProducts) -> None:
    """A slice of one row of blocks is contiguous, but keeps the stride of the whole weight, which the operator refuses."""
    whole = torch.rand(3, 16) + 0.5
    part = replace(example("FP8 in blocks", 128, 512), scale=whole[1:2, :4])
    assert part.scale.is_contiguous()
    x = activations(4, 512)
    wanted = product([part], x)
    assert size(product(every_form()([part]), x) - wanted) <= ROUNDED_ONCE * size(wanted)


def test_static_int8_and_zero_points_stay_as_they_are() -> None:
    part = example("INT8")
    static = replace(
        part, activations=ActivationFormat("int8", is_static=True), input_scale=torch.tensor([0.1])
    )
    shifted = replace(part, zero=torch.ones(part.rows, 1, dtype=torch.int8))
    alone = replace(part, activations=None)
    too_wide = replace(part, values=torch.zeros(8, 2**17, dtype=torch.int8), columns=2**17)
    for one in (static, shifted, alone, too_wide):
        assert every_form()([one]) == (one,)


@pytest.mark.parametrize("name", sorted(FORM_OF))
def test_parts_of_one_form_are_joined_to_one_product(blocks: BlockedProducts, name: str) -> None:
    """Queries, keys and values of a layer are three linears, each with scales of its own."""
    parts = [stored_rows(name, rows) for rows in (384, 128, 256)]
    if parts[0].block_rows is None:
        parts[1] = replace(parts[1], scale=parts[1].scale * 2)
    joined = every_form()(parts)
    assert len(joined) == 1
    x = activations(5, 384)
    wanted = product(parts, x)
    assert size(product(joined, x) - wanted) <= ROUNDED_ONCE * size(wanted)


def test_parts_of_other_forms_have_products_of_their_own(blocks: BlockedProducts) -> None:
    first, second = stored_rows("fp8-tensor"), stored_rows("fp8-tensor", 128)
    assert second.input_scale is not None
    other = replace(second, input_scale=second.input_scale * 2)
    plain = PlainRows(activations(16, 384))
    cut = stored_rows("fp8-block", 192)
    cases: list[list[WeightRows]] = [
        [first, other],
        [first, plain],
        [stored_rows("fp8"), stored_rows("w8a8")],
        [cut, stored_rows("fp8-block")],
    ]
    x = activations(5, 384)
    for parts in cases:
        made = every_form()(parts)
        assert len(made) == 2
        assert [isinstance(part, FastRows) for part in made] == [
            part is not plain and part is not cut for part in parts
        ]
        wanted = product(parts, x)
        assert size(product(made, x) - wanted) <= ROUNDED_ONCE * size(wanted)


@pytest.mark.parametrize("name", ["w8a8", "fp8", "fp8-tensor"])
def test_a_row_parallel_product_rounds_by_the_scale_of_whole_rows(name: str) -> None:
    x = activations(4, 384, torch.float32)
    x[:, 300] *= 20  # on the second rank
    largest = x.abs().amax(dim=1, keepdim=True)
    found = torch.zeros(4, 256)
    for columns in (range(192), range(192, 384)):
        (made,) = every_form()([stored_rows(name, columns=columns)])
        assert isinstance(made, FastRows)
        found += made.product(x[:, columns.start : columns.stop].contiguous(), largest)
    whole = stored_rows(name)
    assert whole.activations is not None
    entering = rounded(x, whole.activations, largest, whole.input_scale)
    wanted = entering @ whole.numbers(slice(0, 256), torch.float32).t()
    assert size(found - wanted) <= 1e-5 * size(wanted)


@pytest.mark.parametrize(
    ("capability", "dtype", "names"),
    [
        ((9, 0), torch.bfloat16, ("INT8", "INT4", "FP8", "FP8 in blocks")),
        ((9, 0), torch.float16, ("INT8", "FP8", "FP8 in blocks")),
        ((9, 0), torch.float32, ("INT8",)),
        ((8, 9), torch.bfloat16, ("INT8", "INT4", "FP8")),
        ((8, 0), torch.bfloat16, ("INT8", "INT4")),
        ((10, 0), torch.bfloat16, ("INT8", "INT4", "FP8")),
        ((7, 5), torch.float16, ()),
    ],
)
def test_a_gpu_has_the_forms_of_its_units(
    capability: tuple[int, int], dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    assert names_of_gpu(capability, dtype) == names


def swapped_columns(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    return convert_weight_to_int4pack((weight << 4) | (weight >> 4), tiles)


def without_shift(
    x: torch.Tensor, words: torch.Tensor, group_size: int, scale_and_shift: torch.Tensor
) -> torch.Tensor:
    return weight_int4pack_mm(
        x, words, group_size, scale_and_shift * torch.tensor([1, 0], dtype=torch.bfloat16)
    )


def fails(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("not on this GPU")


def nowhere_written(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Stand for an operator that leaves what was in memory."""
    return torch.full((x.shape[0], weight.shape[1]), torch.nan)


def packed(device: Device, stored: QuantisedRows) -> WeightRows:
    """Return a weight as a rank's own kernels hold it."""
    pack = forms.fast_forms(device)
    assert pack is not None
    (made,) = pack([stored])
    return made


@pytest.mark.parametrize(
    ("name", "operator", "wrong"),
    [
        ("INT4", "_convert_weight_to_int4pack", swapped_columns),
        ("INT4", "_weight_int4pack_mm", without_shift),
        ("INT4", "_weight_int4pack_mm", fails),
        ("INT8", "_int_mm", lambda x, weight: torch.zeros(x.shape[0], weight.shape[1], dtype=torch.int32)),
        ("FP8", "scaled_mm", fails),
        ("FP8", "scaled_mm", nowhere_written),
        ("FP8 in blocks", "scaled_mm", lambda *operands, **options: BlockedProducts()(*operands, **options) * 2),
    ],
)  # fmt: skip
def test_an_operator_that_fails_or_is_wrong_is_found_before_a_weight_is_brought_into_its_form(
    blocks: BlockedProducts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    operator: str,
    wrong: Callable[..., torch.Tensor],
) -> None:
    device, stored = host_device(torch.bfloat16), example(name)
    monkeypatch.setattr(forms, "_names", lambda _: (name,))
    assert error_of(FORMS[name], device) <= MOST_ERROR
    assert isinstance(packed(device, stored), FastRows)
    monkeypatch.setattr(F if operator == "scaled_mm" else torch, operator, wrong)
    with caplog.at_level(logging.WARNING, logger="medha.kernels"):
        assert packed(device, stored) is stored
    assert f"weights in {name} are made numbers for each product" in caplog.text


def test_a_form_is_tried_once_and_only_if_a_weight_fits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, own = list[str](), forms.error_of

    def error_of_form(form: forms.Form, device: Device) -> float:
        tried.append(form.name)
        return own(form, device)

    monkeypatch.setattr(forms, "error_of", error_of_form)
    monkeypatch.setattr(forms, "_names", lambda _: ("INT8", "FP8"))
    pack = forms.fast_forms(host_device(torch.float32))
    assert pack is not None
    pack([PlainRows(activations(16, 384))])
    pack([stored_rows("awq")])
    assert tried == []
    for _ in range(2):
        pack([example("INT8")])
    assert tried == ["INT8"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(name: str) -> Path:
        if not (folder / name).exists():
            init_checkpoint(folder / name, preset="tiny", seed=1, quantisation=name, architecture="qwen2")
        return folder / name

    return checkpoint


SHORT = ("w8a8", "w4a16-asym", "fp8-tensor")
"""Formats whose checkpoints are made in CI, where that takes seconds."""


def logits_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    rows = len(tokens)
    span = SequenceSpan(0, rows, 0, np.arange(4))
    hidden = run_step(model, tokens, torch.arange(rows), [span], model.new_kv_cache(4, 16))
    found = model.logits(hidden)
    assert found is not None
    return found


def loaded(directory: Path, device: Device) -> tuple[ModelConfig, Shard, Any]:
    config = ModelConfig.from_directory(directory)
    shard = Shard.whole(config)
    return (
        config,
        shard,
        load_weights(directory, config, shard, device=device, pack_rows=every_form()),
    )


@pytest.mark.parametrize("name", [long_unless(name in SHORT, name) for name in sorted(QUANTISATIONS)])
def test_the_memory_that_is_planned_in_16_bits_is_what_packed_weights_take(
    blocks: BlockedProducts, checkpoints: Callable[[str], Path], name: str
) -> None:
    """A weight is held in one form: memory of the other is let go of. Scales of activations may be shared by joined parts."""
    config, _, weights = loaded(checkpoints(name), host_device(torch.bfloat16))
    parts = [
        part
        for layer in weights.layers
        for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)
        for part in weight.parts
    ]
    assert any(isinstance(part, FastRows) for part in parts) == (name in FORM_OF)
    storages = {one.untyped_storage().data_ptr(): one for part in parts for one in part.tensors()}
    held = sum(one.untyped_storage().nbytes() for one in storages.values())
    embeddings = 2 * 2 * config.vocab_size * config.hidden_size
    planned = config.weights_bytes(2)
    assert planned - 16 * config.num_layers <= held + embeddings <= planned


@pytest.mark.parametrize("name", SHORT)
def test_logits_by_a_devices_units_are_those_of_numbers(
    blocks: BlockedProducts, checkpoints: Callable[[str], Path], name: str
) -> None:
    device = host_device(torch.bfloat16)
    config, shard, weights = loaded(checkpoints(name), device)
    kernels = torch_kernels(device)
    tokens = torch.arange(40) * 7 % config.vocab_size
    packed = Transformer(config, shard, weights, kernels=kernels)
    as_stored = Transformer.load(checkpoints(name), config, shard, device=device, kernels=kernels)
    found, wanted = (logits_of(model, tokens) for model in (packed, as_stored))
    assert size(found - wanted) <= 0.1 * size(wanted)
    assert float((found.argmax(-1) == wanted.argmax(-1)).float().mean()) >= 0.8


@pytest.mark.parametrize("name", sorted(FORMS))
def test_products_stay_on_their_device(
    blocks: BlockedProducts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No operator reads from host memory, or is one that GPUs lack; torch checks the shapes and strides of each."""
    monkeypatch.undo()  # of the doubles
    with watched() as watch:
        stored, device = example(name), fake_gpu(torch.bfloat16)
        placed = forms.on_device(stored, device)
        made = FORMS[name].of(placed)
        for rows in (1, 17, 300):
            x = torch.empty(rows, stored.columns, dtype=torch.bfloat16, device=device.torch_device)
            found = product([made], x)
            assert (found.shape, found.dtype, found.device.type) == ((rows, stored.rows), x.dtype, "cuda")
        assert watch.found == []
