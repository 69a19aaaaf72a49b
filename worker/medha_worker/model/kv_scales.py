"""Scales of an FP8 pool: where they come from, and how K, V, queries and results pass them.

A key is its number in the pool times the scale of its head, so a score is that of a query times the scale; likewise, a sum
of values is a sum of numbers times the scale. Attention therefore needs no scale: queries are multiplied before it, and
results after it. The two parts of a latent row, the latent and the key with position, have a scale each.

Scales that the checkpoint does not state follow from the weights alone. A norm before a linear bounds the length of its
input, and the length of a row of weights bounds the number that it makes of that (Cauchy-Schwarz). No prompt can exceed
such a bound, and all ranks and replicas find the same: rounding errors of activations have no part in it, as they would
in a largest number that was measured, which lies near a power of two for some of a model's thousands of heads. A bound is
often 10 to 100 times the largest number that occurs. That costs no precision, because FP8 is a floating-point format:
below its largest number, 448, it has its full precision down to 2^-6.

Scales may also be measured, once for a checkpoint, and are then read from a file. No power of two is needed to make them
the same everywhere, so that the largest number that was measured can be exact. That matters where it is in the keys of
all tokens: an error there moves every score.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from medha_worker.kernels.packed_weight import matrix_of
from medha_worker.model.quantised_weights import Linear, QuantisedWeight

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest number of E4M3."""
_MOST_EXPONENT = 12
"""Largest exponent of a scale, a power of two, either way: a float16 query times it neither overflows nor vanishes."""
MARGIN = 2.0
"""Largest numbers that were measured become so many times smaller than FP8's: a power of two keeps them exact."""
_TILE_ROWS = 256  # rows of a weight whose lengths are computed at a time


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales of one layer's K and V, float32 [kv_heads, 1], or of each value of a latent row, [1, row_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class ScaledHeads:
    """Applies the scales of one layer."""

    def __init__(self, scales: LayerScales) -> None:
        self._keys, self._values = scales.keys, scales.values

    def rounded(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, [rows, kv_heads, head_dim], as FP8: the nearest one, and at most the largest. NaN remains NaN."""
        keys = _rounded(k, self._keys)
        return keys, keys if v is k else _rounded(v, self._values)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Multiply queries, [rows, query_heads, head_dim], in place by the scales of the keys of their heads."""
        return _multiplied(q, self._keys)

    def results(self, attended: torch.Tensor) -> torch.Tensor:
        """Multiply sums of values, [rows, query_heads, head_dim], in place by the scales of the values."""
        return _multiplied(attended, self._values)

    def numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply latent rows of the pool, [rows, row_dim], in place by their scales."""
        return rows.mul_(self._keys[0])


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # A conversion makes NaN of what is too large.
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _multiplied(heads: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, query_heads, head_dim = heads.shape
    kv_heads = scale.shape[0]
    heads.view(rows, kv_heads, query_heads // kv_heads, head_dim).mul_(scale[:, None])
    return heads


def digest_of(scales: Sequence[LayerScales] | None) -> str:
    """Return a digest of the scales of a rank's layers; empty without scales."""
    if scales is None:
        return ""
    digest = blake2b(digest_size=8)
    for one in scales:
        for part in (one.keys, one.values):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights that make the K and V of a layer from its normed hidden states.

    Attributes:
        weight: [hidden, columns], of which the last ones are those of K and V, or of a latent row.
        bias: [columns]; None: there is none.
        norm: What the norm before the product multiplies by, [hidden].
        own_norm: What a norm of keys multiplies by, [head_dim], or that of latents, [kv_rank]; None: there is none.
        rotation_factor: The factor on the cosines and sines of RoPE.
    """

    weight: Linear
    bias: torch.Tensor | None
    norm: torch.Tensor
    own_norm: torch.Tensor | None
    rotation_factor: float


def scales_of_heads(made_by: HeadWeights, kv_heads: int, head_dim: int) -> LayerScales:
    """Return a scale, a power of two, for the keys and for the values of each head."""
    columns, width = made_by.weight.shape[1], kv_heads * head_dim
    keys = _bounds(made_by, range(columns - 2 * width, columns - width)).view(kv_heads, head_dim)
    if made_by.own_norm is not None:
        keys = _normed_bounds(made_by.own_norm).expand(kv_heads, head_dim)
    values = _bounds(made_by, range(columns - width, columns)).view(kv_heads, head_dim)
    return LayerScales(_powers(_rotated(keys, made_by)), _powers(values))


def scales_of_latents(made_by: HeadWeights, rope_dim: int) -> LayerScales:
    """Return the scales of a latent row: a power of two for the latent, and one for the key with position."""
    assert made_by.own_norm is not None
    columns = made_by.weight.shape[1]
    latent = _normed_bounds(made_by.own_norm)[None]
    key = _rotated(_bounds(made_by, range(columns - rope_dim, columns))[None], made_by)
    row = torch.cat([_powers(latent).expand(1, latent.shape[1]), _powers(key).expand(1, rope_dim)], dim=1)
    return LayerScales(row, row)


def scales_of_largest(keys: torch.Tensor, values: torch.Tensor) -> LayerScales:
    """Return the scales of a layer whose heads have these largest sizes of keys and of values, float32 [kv_heads].

    Sizes up to `MARGIN` times as large are within FP8. A head of zeros has the scale 1.
    """
    return LayerScales(_with_margin(keys), _with_margin(values))


def _with_margin(largest: torch.Tensor) -> torch.Tensor:
    scale = (largest * (MARGIN / FP8_MAX)).masked_fill(largest == 0, 1.0)
    return scale.clamp(math.ldexp(1.0, -_MOST_EXPONENT), math.ldexp(1.0, _MOST_EXPONENT))[:, None]


def _bounds(made_by: HeadWeights, columns: range) -> torch.Tensor:
    """Return the largest size that each of these outputs can have, float64 [columns]."""
    norm = made_by.norm.double()
    lengths = torch.cat([(rows * norm).norm(dim=1) for rows in _rows_of(made_by.weight, columns)])
    bounds = lengths * math.sqrt(norm.shape[0])
    if made_by.bias is not None:
        bounds = bounds + made_by.bias[columns.start : columns.stop].double().abs()
    return bounds


def _normed_bounds(norm: torch.Tensor) -> torch.Tensor:
    """Return the largest size of each value after an RMSNorm, float64 [size]."""
    return norm.double().abs() * math.sqrt(norm.shape[0])


def _rotated(bounds: torch.Tensor, made_by: HeadWeights) -> torch.Tensor:
    """Return bounds, [heads, size], of heads whose halves RoPE has rotated into each other."""
    first, second = bounds.chunk(2, dim=1)
    return torch.hypot(first, second) * made_by.rotation_factor


def _rows_of(weight: Linear, columns: range) -> Iterator[torch.Tensor]:
    """Yield what makes some of a product's outputs, float64 [some, inputs]."""
    if not isinstance(weight, QuantisedWeight):
        matrix = matrix_of(weight)
        for start in range(columns.start, columns.stop, _TILE_ROWS):
            yield matrix[:, start : min(start + _TILE_ROWS, columns.stop)].t().double()
        return
    first = 0
    for part in weight.parts:
        for start in range(max(columns.start - first, 0), min(columns.stop - first, part.rows), _TILE_ROWS):
            stop = min(start + _TILE_ROWS, columns.stop - first, part.rows)
            yield part.numbers(slice(start, stop), torch.float32).double()
        first += part.rows


def _powers(bounds: torch.Tensor) -> torch.Tensor:
    """Return for each row of bounds the least power of two by which all of them are within FP8, float32 [rows, 1]."""
    powers = [_power(bound) for bound in bounds.amax(dim=1).tolist()]
    return torch.tensor(powers, dtype=torch.float32, device=bounds.device)[:, None]


def _power(bound: float) -> float:
    if not 0 < bound < math.inf:
        return 1.0
    mantissa, exponent = math.frexp(bound / FP8_MAX)
    least = exponent - 1 if mantissa == 0.5 else exponent
    return math.ldexp(1.0, max(-_MOST_EXPONENT, min(least, _MOST_EXPONENT)))
