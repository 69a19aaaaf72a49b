"""Stand for torch's operators that run on GPUs alone, by what their sources say that they do: for INT4, and for blocks of FP8."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch._subclasses.fake_tensor import FakeTensorMode

from .device_watch import GPU

_LANES = 32
_SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)
_COLUMNS = (0, 8, 16, 24, 1, 9, 17, 25)
"""The column, in a pair of tiles of 16, of each value of a word of lane 0, from the lowest bits on."""
BLOCK = 128


@lru_cache
def int4_places(rows: int, columns: int, tiles: int) -> torch.Tensor:
    """Return the place of each value of packed words in [rows, columns], [rows / 8, columns / (16 tiles), 32, tiles / 2, 8].

    That is the order of `matrix_to_m16n8k16_Bint4_layout` in torch's int4mm.cu, written value by value.
    """
    shape = rows // 8, columns // (16 * tiles), _LANES, tiles // 2
    places = []
    for row_tile, outer, lane, pair in product(*map(range, shape)):
        first = (row_tile * 8 + lane // 4) * columns + (outer * tiles + 2 * pair) * 16 + lane % 4 * 2
        places += [first + column for column in _COLUMNS]
    return torch.tensor(places).view(*shape, 8)


def convert_weight_to_int4pack(weight: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return `torch._convert_weight_to_int4pack` of two values in each byte, the first one high, uint8 [rows, columns / 2]."""
    assert weight.dtype == torch.uint8
    assert weight.is_contiguous()
    assert tiles in (2, 4, 8)
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    assert (rows % 8, columns % (16 * tiles)) == (0, 0)
    values = torch.stack([weight >> 4, weight & 15], dim=2).flatten().long()
    words = (values[int4_places(rows, columns, tiles)] << torch.tensor(_SHIFTS)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def weight_int4pack_mm(
    x: torch.Tensor, words: torch.Tensor, group_size: int, scale_and_shift: torch.Tensor
) -> torch.Tensor:
    """Return `torch._weight_int4pack_mm`: numbers are rounded once to bfloat16, and products added up in float32."""
    assert x.dtype == scale_and_shift.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert words.is_contiguous()
    assert group_size in (32, 64, 128, 256)
    row_tiles, outer, lanes, pairs = words.shape
    rows, columns = row_tiles * 8, outer * pairs * 2 * 16
    assert (lanes, x.shape[1]) == (_LANES, columns)
    assert scale_and_shift.shape == (columns // group_size, rows, 2)
    assert scale_and_shift.is_contiguous()
    values = torch.empty(rows * columns)
    values[int4_places(rows, columns, 2 * pairs)] = ((words[..., None] >> torch.tensor(_SHIFTS)) & 15).float()
    scale, shift = scale_and_shift.float().transpose(0, 1).repeat_interleave(group_size, dim=1).unbind(2)
    numbers = ((values.view(rows, columns).double() - 8) * scale + shift).bfloat16()
    return (x.float() @ numbers.float().t()).bfloat16()


class BlockedProducts:
    """Stands for `F.scaled_mm` of blocks, and notes the numbers of rows that it was given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale_x: torch.Tensor,
        recipe_x: Any,
        scale_weight: torch.Tensor,
        recipe_weight: Any,
        *,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert recipe_x == F.ScalingType.BlockWise1x128
        assert recipe_weight == F.ScalingType.BlockWise128x128
        with FakeTensorMode():  # torch checks shapes and strides of tensors on a GPU, and computes nothing
            faked = [
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=GPU)
                for one in (x, weight, scale_x, scale_weight)
            ]
            torch._scaled_mm_v2(
                faked[0], faked[1], [faked[2]], [recipe_x.value], [], [faked[3]], [recipe_weight.value], [], None,
                output_dtype, (), False,
            )  # fmt: skip
        self.rows.append(x.shape[0])
        groups, blocks = -(-x.shape[1] // BLOCK), weight.shape[1] // BLOCK
        assert scale_x.shape == (x.shape[0], groups)
        whole = scale_weight[:groups, :blocks].repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)
        entering = x.double() * scale_x.repeat_interleave(BLOCK, dim=1)
        return (entering @ (weight.double() * whole)).to(output_dtype)
