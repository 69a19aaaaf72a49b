"""Reads a slice of a quantised weight from a checkpoint's tensors, in the one form in which all formats are held.

A slice may begin within a group, a block or a packed word: what covers it is read, and cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from medha.errors import CheckpointInvalid
from medha.model.quantisation import WeightFormat
from medha_worker.kernels.quantised_rows import QuantisedRows

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns whose values AWQ packs into a word, from the lowest bits on."""

ReadSlice = Callable[..., torch.Tensor]
"""Reads a part of a tensor, `read(name, *index)` with a slice for each dimension, in host memory and as it is stored."""


@dataclass(frozen=True)
class WeightSlice:
    """The rows and columns that a rank holds of a layer's weight, [rows_of_all, columns_of_all]."""

    layer: str
    rows: range
    columns: range
    rows_of_all: int
    columns_of_all: int


def read_rows(
    part: WeightSlice, form: WeightFormat, read: ReadSlice, place: Callable[[torch.Tensor], torch.Tensor]
) -> QuantisedRows:
    """Read a slice of a quantised weight; `read` takes names without the layer's, `place` puts a tensor into the device's memory.

    Raises:
        CheckpointInvalid: the groups that a tensor gives to columns contradict `config.json`, or FP8 holds NaN.
    """
    group_of, groups = _group_of(part, form, read)
    if form.layout in ("awq", "gptq"):
        values = (_awq_values if form.layout == "awq" else _gptq_values)(part, form, read)
        words = _covering(part.rows, form.per_word)
        order = _AWQ_ORDER if form.layout == "awq" else None
        zero = _unpacked(read("qzeros", groups, words), form.bits, order)[
            :, _within(part.rows, words, form.per_word)
        ]
        zero = ((zero + form.zero_point_offset) & (2**form.bits - 1)).t()
        scale, offset, block_start = read("scales", groups, _slice(part.rows)).t(), 0, 0
    else:
        values = (
            _packed_values(part, form, read)
            if form.layout == "packed"
            else read("weight", _slice(part.rows), _slice(part.columns))
        )
        if form.is_float and bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise CheckpointInvalid(f"tensor {part.layer}.weight holds NaN; fetch the checkpoint again")
        blocks = _covering(part.rows, form.block_rows or part.rows_of_all)
        block_start = part.rows.start - blocks.start * (form.block_rows or part.rows_of_all)
        scale, zero = read(form.scale_name), None
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.float()
            if bool(scale.isnan().any()):
                raise CheckpointInvalid(
                    f"tensor {part.layer}.{form.scale_name} holds NaN; fetch the checkpoint again"
                )
        scale = scale.reshape(1, 1) if form.block_rows is None else scale[blocks, groups]
        offset = 2 ** (form.bits - 1) if form.layout == "packed" else 0
        if form.has_zero_points and form.layout == "packed":
            words = _covering(part.rows, form.per_word)
            packed = read("weight_zero_point", words, groups).t().contiguous()
            zero = _unpacked(packed, form.bits)[:, _within(part.rows, words, form.per_word)].t()
        elif form.has_zero_points:
            zero = read("weight_zero_point")
            zero = zero.reshape(1, 1) if form.block_rows is None else zero[blocks, groups]
    is_static = form.activations is not None and form.activations.is_static
    return QuantisedRows(
        values=place(values.contiguous()),
        columns=len(part.columns),
        scale=place(scale.contiguous()),
        zero=None if zero is None else place(zero.contiguous()),
        offset=offset,
        has_pairs=form.bits == 4,
        group_size=form.group_size,
        group_of=None if group_of is None else place(group_of),
        block_rows=form.block_rows,
        block_start=block_start,
        activations=form.activations,
        input_scale=place(read("input_scale").reshape(1)) if is_static else None,
    )


def _group_of(part: WeightSlice, form: WeightFormat, read: ReadSlice) -> tuple[torch.Tensor | None, slice]:
    """Return the group of each column of the slice, and the groups to read.

    The first result is None if the slice has whole groups of neighbouring columns, or a single group.
    """
    size, columns = form.group_size, part.columns
    regular = torch.arange(columns.start, columns.stop, dtype=torch.int32)
    regular = regular.div_(size, rounding_mode="floor") if size is not None else regular.zero_()
    if form.layout == "gptq" or form.has_group_index:
        name = "g_idx" if form.layout == "gptq" else "weight_g_idx"
        index, count = read(name, _slice(columns)), form.groups(part.columns_of_all)
        if bool(((index < 0) | (index >= count)).any()):
            raise CheckpointInvalid(
                f"tensor {part.layer}.{name} names a group beyond the {count} of {part.columns_of_all} columns in groups of "
                f"{size}; fetch a checkpoint whose files belong together"
            )
        if not torch.equal(index, regular):
            if not form.has_group_index:
                raise CheckpointInvalid(
                    f"tensor {part.layer}.{name} is not in the order of columns, but config.json has desc_act false; "
                    "fetch a checkpoint whose files belong together"
                )
            return index, slice(0, count)
    if size is None:
        return None, slice(0, 1)
    groups = _covering(columns, size)
    is_whole = columns.start % size == 0 and len(columns) % size == 0
    if is_whole or groups.stop - groups.start == 1:
        return None, groups
    return regular - groups.start, groups


def _awq_values(part: WeightSlice, form: WeightFormat, read: ReadSlice) -> torch.Tensor:
    words = _covering(part.rows, form.per_word)
    values = _unpacked(read("qweight", _slice(part.columns), words), form.bits, _AWQ_ORDER)
    return _in_pairs(values[:, _within(part.rows, words, form.per_word)].t())


def _gptq_values(part: WeightSlice, form: WeightFormat, read: ReadSlice) -> torch.Tensor:
    words = _covering(part.columns, form.per_word)
    return _cut(read("qweight", words, _slice(part.rows)).t(), part, words, form)


def _packed_values(part: WeightSlice, form: WeightFormat, read: ReadSlice) -> torch.Tensor:
    words = _covering(part.columns, form.per_word)
    return _cut(read("weight_packed", _slice(part.rows), words), part, words, form)


def _cut(packed: torch.Tensor, part: WeightSlice, words: slice, form: WeightFormat) -> torch.Tensor:
    """Return the slice's columns of words, [rows, words], whose lowest bits are first: bytes of one or two values."""
    within = _within(part.columns, words, form.per_word)
    if form.bits == 4 and within.start % 2:
        return _in_pairs(_unpacked(packed, form.bits)[:, within])
    per_byte = 8 // form.bits
    wide = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return wide[:, within.start // per_byte : -(-within.stop // per_byte)]


def _in_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return values of 4 bits, uint8 [rows, columns], as two in each byte, the first one low."""
    packed = values[:, ::2].contiguous()
    packed[:, : values.shape[1] // 2] |= values[:, 1::2] << 4
    return packed


def _unpacked(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the values of words, [rows, words], as uint8 [rows, words x values per word]; `order` has each one's place."""
    places = order or tuple(range(32 // bits))
    values = torch.empty(*packed.shape, len(places), dtype=torch.uint8)
    for index, place in enumerate(places):
        values[..., place] = (packed >> (index * bits)) & (2**bits - 1)
    return values.flatten(1)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _covering(part: range, size: int) -> slice:
    """Return the units of `size` that cover a range."""
    return slice(part.start // size, -(-part.stop // size))


def _within(part: range, units: slice, size: int) -> slice:
    """Return where a range lies in the units of `size` that cover it."""
    first = part.start - units.start * size
    return slice(first, first + len(part))
