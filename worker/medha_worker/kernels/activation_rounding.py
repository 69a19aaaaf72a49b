"""The rounding of activations to 8 bits, before a product with quantised weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha.model.quantisation import ActivationFormat

_FLOAT8_MAX = 448.0  # of E4M3


def rounded(
    x: torch.Tensor, form: ActivationFormat, largest: torch.Tensor | None, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return activations, [rows, columns], rounded to a quantised format, as numbers of their own type.

    The arithmetic is that of compressed-tensors: a dynamic scale is the largest size divided by 127.5 for integers, and by
    448 for FP8; a scale of zero becomes the type's epsilon. Power scales are DeepSeek-V3.1's: the next power of two, in float32.

    Args:
        x: The activations.
        form: The format.
        largest: The largest size in each whole row, [rows, 1], for a format with one scale for each row.
        input_scale: The scale of a static format.
    """
    columns = x.shape[1]
    x, scale = _with_scale(x, form, largest, input_scale)
    return _nearest(x / scale, form).mul_(scale).to(x.dtype).flatten(1)[:, :columns]


def eight_bits(
    x: torch.Tensor, form: ActivationFormat, largest: torch.Tensor | None, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as values of 8 bits, [rows, columns], and their scales, float32 [rows, groups], or [1] of a static format.

    Columns are a multiple of the groups' size.
    """
    x, scale = _with_scale(x, form, largest, input_scale)
    steps = x / scale
    if form.kind == "int8":
        values = steps.round_().clamp_(-128, 127).to(torch.int8)
    else:
        values = steps.clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(1), scale.float() if scale.dim() == 1 else scale.float().flatten(1)


def _with_scale(
    x: torch.Tensor, form: ActivationFormat, largest: torch.Tensor | None, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activations, in groups if they share scales in groups, and the scales by which they are divided."""
    most = 127.5 if form.kind == "int8" else _FLOAT8_MAX
    if input_scale is not None:
        return x, input_scale  # it may be finer than activations, which are then rounded in its type
    if form.group_size is not None:
        padding = -x.shape[1] % form.group_size
        groups = (x.shape[1] + padding) // form.group_size
        x = (F.pad(x, (0, padding)) if padding else x).reshape(x.shape[0], groups, form.group_size)
        sizes = x.abs().amax(dim=-1, keepdim=True)
        return x, _power_scale(sizes, most) if form.has_power_scales else _scale(sizes, most)
    assert largest is not None, "a row's scale is of the whole row"
    return x, _scale(largest, most)


def _nearest(steps: torch.Tensor, form: ActivationFormat) -> torch.Tensor:
    """Return the numbers of a format that are nearest to these, which are changed."""
    if form.kind == "int8":
        return steps.round_().clamp_(-128, 127)
    return steps.clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).to(steps.dtype)


def _scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    scale = largest / most
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def _power_scale(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Return the least powers of two, float32, by which no size exceeds `most`."""
    scale = _scale(largest.float(), most)
    mantissa, exponent = torch.frexp(scale)  # a mantissa is in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
