"""The forms of quantised weights with products of their own: which a device has, and how the parts of a weight are brought into them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch

from medha.model.quantisation import (
    FP8_ALIGNED,
    FP8_BLOCK,
    INT4_GROUPS,
    INT4_ROWS,
    INT8_ALIGNED,
    INT8_MOST_COLUMNS,
    ActivationFormat,
)
from medha_worker.device import Device
from medha_worker.kernels.activation_rounding import rounded
from medha_worker.kernels.fast_rows import Float8Blocks, Float8Rows, Int4Rows, Int8Rows
from medha_worker.kernels.quantised_rows import FastRows, QuantisedRows, WeightRows

_log = logging.getLogger("medha.kernels")

_TRIED_ROWS, _TRIED_COLUMNS = 256, 3 * FP8_BLOCK
_INT4_GROUP = 128
_TRIED = (1, 16, 70)
"""Rows of activations of the products that are tried: a decode, several, and a chunk."""
MOST_ERROR = 0.01
"""Error of a product that is tried, over its size: rounding in 16 bits costs less, and a wrong place much more."""


@dataclass(frozen=True)
class Form:
    """A form of weights.

    Attributes:
        name: Its name in messages.
        fits: Returns True if rows can be brought into the form.
        of: Returns rows in it.
        example: Returns stored rows of random values, so many rows and columns, in host memory.
    """

    name: str
    fits: Callable[[QuantisedRows], bool]
    of: Callable[[QuantisedRows], FastRows]
    example: Callable[[torch.Generator, int, int], QuantisedRows]


class FastForms:
    """`PackRows` that knows some forms, and brings weights into those whose products are right.

    A form is tried once, when the first weight fits it. So a model that has no such weights tries nothing.
    """

    def __init__(self, forms: Sequence[Form], is_right: Callable[[Form], bool] = lambda _: True) -> None:
        """`is_right` tries the products of a form."""
        self._forms = tuple(forms)
        self._is_right = cache(is_right)

    def __call__(self, parts: Sequence[WeightRows]) -> Sequence[WeightRows]:
        joined = _joined(parts)
        if joined is not None and (made := self._made(joined)) is not None:
            return (made,)
        return tuple(self._made(part) or part for part in parts)

    def _made(self, part: WeightRows) -> FastRows | None:
        if isinstance(part, QuantisedRows):
            for form in self._forms:
                if form.fits(part) and self._is_right(form):
                    return form.of(part)
        return None


def fast_forms(device: Device) -> FastForms | None:
    """Return the forms that a device has, which are tried there before they are used; None if it has none."""
    found = [FORMS[name] for name in _names(device)]
    return FastForms(found, partial(_is_right, device=device)) if found else None


def _names(device: Device) -> tuple[str, ...]:
    """Return the forms that this kind of device has."""
    if device.is_host:
        return names_of_cpu()
    if device.torch_device.type != "cuda" or not torch.cuda.is_available():
        return ()
    return names_of_gpu(torch.cuda.get_device_capability(device.torch_device), device.dtype)


def names_of_cpu() -> tuple[str, ...]:
    """Return the forms whose products are faster than those of numbers on this CPU: INT8, if it has instructions for it (VNNI).

    Those for FP8, and for INT4 in float32 or of many rows, are slower on CPUs (docs/quantisation.md).
    """
    return ("INT8",) if torch.cpu._is_vnni_supported() else ()


def names_of_gpu(capability: tuple[int, int], dtype: torch.dtype) -> tuple[str, ...]:
    """Return the forms that GPUs of a compute capability have for activations of a type.

    The units for FP8 came with 8.9; products in blocks, by cuBLAS, with 9.0, and only there. The operator for INT4 takes bfloat16.
    """
    found = []
    is_half = dtype in (torch.bfloat16, torch.float16)
    if capability >= (8, 0):
        found += ["INT8", *(["INT4"] if dtype == torch.bfloat16 else [])]
    if capability >= (8, 9) and is_half:
        found.append("FP8")
    if capability[0] == 9 and is_half:
        found.append("FP8 in blocks")
    return tuple(found)


def _is_right(form: Form, device: Device) -> bool:
    """Return True if the products of a form are those of its numbers on a device; else the log says why they are not used."""
    try:
        error = error_of(form, device)
    except Exception as failure:  # noqa: BLE001 - of an operator that this version or GPU does not have
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if error <= MOST_ERROR:
            return True
        reason = f"their error is {error:.2g}"
    _log.warning(
        "weights in %s are made numbers for each product, because products fail (%s)", form.name, reason
    )
    return False


@torch.inference_mode()
def error_of(form: Form, device: Device) -> float:
    """Return the largest error of a form's products and numbers with random values, over the size of what they have to be.

    It is infinite if any of them is NaN.
    """
    random = torch.Generator().manual_seed(0)
    stored = form.example(random, _TRIED_ROWS, _TRIED_COLUMNS)
    wanted_numbers = stored.numbers(slice(0, stored.rows), torch.float32)
    made = form.of(on_device(stored, device))
    numbers = made.numbers(slice(0, made.rows), device.dtype).float().cpu()
    errors = [_size(numbers - wanted_numbers) / _size(wanted_numbers)]
    for rows in _TRIED:
        if made.takes(rows):
            x = torch.randn(rows, stored.columns, generator=random).to(device.dtype)
            largest = x.abs().amax(dim=1, keepdim=True)
            found = made.product(device.place(x), device.place(largest)).float().cpu()
            if stored.activations is not None:
                x = rounded(x, stored.activations, largest, stored.input_scale)
            wanted = x.float() @ wanted_numbers.t()
            errors.append(_size(found - wanted) / _size(wanted))
    return max(math.inf if math.isnan(error) else error for error in errors)  # `max` would skip NaN


def on_device(part: QuantisedRows, device: Device) -> QuantisedRows:
    """Return rows whose tensors are on a device."""
    held = {field.name: getattr(part, field.name) for field in fields(part)}
    placed: dict[str, Any] = {
        name: device.place(one) for name, one in held.items() if isinstance(one, torch.Tensor)
    }
    return replace(part, **placed)


def _size(x: torch.Tensor) -> float:
    """Return the root mean square, NaN included."""
    return float(x.double().pow(2).mean().sqrt())


# --- forms --------------------------------------------------------------------------------------------


def _fits_int8(part: QuantisedRows) -> bool:
    # Static scales stay with numbers: an integer cannot hold the NaN by which a rank says that its memory ran out.
    return (
        _has_row_scales(part, "int8", torch.int8)
        and part.activations is not None
        and not part.activations.is_static
        and _is_aligned(part, INT8_ALIGNED, INT8_ALIGNED)
        and part.columns <= INT8_MOST_COLUMNS
    )


def _fits_float8(part: QuantisedRows) -> bool:
    return _has_row_scales(part, "float8", torch.float8_e4m3fn) and _is_aligned(
        part, FP8_ALIGNED, FP8_ALIGNED
    )


def _fits_float8_blocks(part: QuantisedRows) -> bool:
    activations = part.activations
    return (
        part.values.dtype == torch.float8_e4m3fn
        and part.group_size == part.block_rows == FP8_BLOCK
        and part.group_of is part.block_of is None
        and not part.block_start
        and activations is not None
        and activations.kind == "float8"
        and activations.group_size == FP8_BLOCK
        and _is_aligned(part, FP8_BLOCK, FP8_BLOCK)
    )


def _fits_int4(part: QuantisedRows) -> bool:
    return (
        part.has_pairs
        and part.activations is None
        and part.block_rows == 1
        and part.group_of is None
        and part.group_size in INT4_GROUPS
        and _is_aligned(part, INT4_ROWS, part.group_size or 1)
    )


def _has_row_scales(part: QuantisedRows, kind: str, dtype: torch.dtype) -> bool:
    """Return True if values have no zero points, and values and activations are of this kind and without groups."""
    return (
        part.values.dtype == dtype
        and not part.has_pairs
        and part.zero is None
        and not part.offset
        and part.group_size is None
        and part.group_of is None
        and part.block_rows in (None, 1)
        and part.activations is not None
        and part.activations.kind == kind
        and part.activations.group_size is None
    )


def _is_aligned(part: QuantisedRows, rows: int, columns: int) -> bool:
    """Return True if there are rows, and rows and columns are such multiples; a small vocabulary leaves some ranks no row of the head."""
    return part.rows > 0 and part.rows % rows == 0 and part.columns % columns == 0


def _scales(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=random) + 0.5


def _int8_example(random: torch.Generator, rows: int, columns: int) -> QuantisedRows:
    values = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=random)
    return QuantisedRows(values, columns, _scales(random, rows, 1), activations=ActivationFormat("int8"))


def _float8_values(random: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    bytes_ = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random)
    return bytes_.masked_fill_(bytes_ & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)  # but for NaN


def _float8_example(random: torch.Generator, rows: int, columns: int) -> QuantisedRows:
    values = _float8_values(random, rows, columns)
    return QuantisedRows(values, columns, _scales(random, rows, 1), activations=ActivationFormat("float8"))


def _float8_blocks_example(random: torch.Generator, rows: int, columns: int) -> QuantisedRows:
    return QuantisedRows(
        _float8_values(random, rows, columns),
        columns,
        _scales(random, rows // FP8_BLOCK, columns // FP8_BLOCK),
        group_size=FP8_BLOCK,
        block_rows=FP8_BLOCK,
        activations=ActivationFormat("float8", group_size=FP8_BLOCK),
    )


def _int4_example(random: torch.Generator, rows: int, columns: int) -> QuantisedRows:
    scale = _scales(random, rows, columns // _INT4_GROUP)
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=random)
    pairs = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=random)
    return QuantisedRows(pairs, columns, scale, zero, has_pairs=True, group_size=_INT4_GROUP)


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        form.name: form
        for form in (
            Form("INT8", _fits_int8, Int8Rows.of, _int8_example),
            Form("INT4", _fits_int4, Int4Rows.of, _int4_example),
            Form("FP8", _fits_float8, Float8Rows.of, _float8_example),
            Form("FP8 in blocks", _fits_float8_blocks, Float8Blocks.of, _float8_blocks_example),
        )
    }
)
"""Forms by their names."""


# --- parts that are joined ----------------------------------------------------------------------------


def _joined(parts: Sequence[WeightRows]) -> QuantisedRows | None:
    """Return the rows of all parts, so that one product serves them; None if their forms differ, or groups and blocks are cut."""
    every = [part for part in parts if isinstance(part, QuantisedRows)]
    first = every[0] if every else None
    if first is None or len(every) < len(parts):
        return None
    if len(every) == 1:
        return first
    if len(set(map(_kind, every))) > 1 or not all(map(_is_in_order, every)):
        return None
    if not all(map(_ends_with_block, every[:-1])):
        return None
    scales = [part.input_scale for part in every]
    if first.input_scale is not None and not all(
        scale is not None and torch.equal(scale, first.input_scale) for scale in scales
    ):
        return None
    # torch cannot join all types of 8 bits.
    values = torch.cat([part.values.view(torch.uint8) for part in every]).view(first.values.dtype)
    has_blocks = first.block_rows not in (None, 1)
    scale = torch.cat(
        [part.scale if has_blocks else part.scale.expand(part.rows, part.scale.shape[1]) for part in every]
    )
    zeros = [part.zero for part in every if part.zero is not None]
    return replace(
        first,
        values=values,
        scale=scale,
        zero=torch.cat(zeros) if zeros else None,
        block_rows=first.block_rows if has_blocks else 1,
    )


def _kind(part: QuantisedRows) -> tuple[object, ...]:
    """Return what parts have in common that can be joined."""
    blocks = 1 if part.block_rows is None else part.block_rows
    return (
        part.values.dtype, part.columns, part.has_pairs, part.group_size, part.scale.shape[1], blocks, part.offset,
        part.zero is None, part.activations, part.input_scale is None,
    )  # fmt: skip


def _is_in_order(part: QuantisedRows) -> bool:
    """Return True if rows and columns are in the order of blocks and groups, and zero points are those of rows."""
    has_own_zeros = part.zero is None or part.block_rows is not None
    return part.group_of is part.block_of is None and not part.block_start and has_own_zeros


def _ends_with_block(part: QuantisedRows) -> bool:
    return part.block_rows is None or part.rows % part.block_rows == 0
