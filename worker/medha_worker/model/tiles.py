"""Exact float32 attention for many rows, tile by tile, out of torch's matrix products.

torch's own CPU kernel keeps the running maximum of every row, and rescales what it has summed whenever that
grows. Softmax does not change when a constant is taken from a row's scores, and any constant will do that keeps
exp() within float32: here it is the maximum over the first tile, or none at all where scores are small. What
remains per score is the two products, one exp and one addition. Tiles are sized to stay in a core's cache.

Measured on two cores of a Sapphire Rapids machine, float32, 512 rows x 16K keys, 8/2 heads of 64: torch's kernel
reaches 70 % of the sgemm rate, this 84 %.
"""

from collections.abc import Callable, Iterator

import torch

# One tile of scores, [rows, keys] for a KV head, is 1 MiB: half of a core's second-level cache.
TILE_ROWS = 512
TILE_KEYS = 512

# While each row's maximum over its first tile is within +-SMALL, exp() needs no shift: what underflows then is
# smaller than e^-47 of the row's sum, and what grows towards overflow (e^88) is seen in the sum.
_SMALL = 40.0
_LARGE = 1e30

# K and V of one tile of keys, each [kv_heads, keys, head_dim], and what is added to its scores: float32
# [rows, keys], -inf where a row must not see a key; or None.
KeyTile = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def tiled_attention(
    q: torch.Tensor, tiles: Callable[[], Iterator[KeyTile]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `q` over the keys of all tiles, in one softmax.

    Args:
        q: float32 [kv_heads, rows, head_dim], already multiplied by the score scale; the query heads of a group
            are rows of their KV head.
        tiles: Gives the tiles, at least one, the same ones at every call. Each row sees a key of the first tile.

    Returns:
        Output like `q`, and the log-sum-exp (natural) of each row's scores, float32 [kv_heads, rows].
    """
    weighted, total, shift = _accumulate(q, tiles(), None)
    if not bool((total < _LARGE).all()):
        # A later score is far above the first tile's maximum. Rare enough to compute everything again.
        maxima = [_scores(q, k, mask).amax(-1, keepdim=True) for k, _, mask in tiles()]
        weighted, total, shift = _accumulate(q, tiles(), torch.stack(maxima).amax(0))
    log_sum_exp = total.log() if shift is None else total.log() + shift
    return weighted.div_(total), log_sum_exp.squeeze(-1)


def _accumulate(
    q: torch.Tensor, tiles: Iterator[KeyTile], shift: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sums over all keys of exp(score - shift) * v, like `q`, and of exp(score - shift), [kv_heads, rows, 1].

    `shift`, [kv_heads, rows, 1], is chosen from the first tile if not given. Returned last; None for zero.
    """
    weighted = total = buffer = None
    for k, v, mask in tiles:
        shape = (*q.shape[:2], k.shape[1])
        if buffer is None or buffer.shape != shape:
            buffer = q.new_empty(shape)
        weights = _scores(q, k, mask, out=buffer)
        if weighted is None and shift is None:
            maximum = weights.amax(-1, keepdim=True)
            if not bool((maximum.abs() < _SMALL).all()):
                shift = maximum
        if shift is not None:
            weights.sub_(shift)
        weights.exp_()
        if weighted is None or total is None:
            weighted, total = torch.bmm(weights, v), weights.sum(-1, keepdim=True)
        else:
            weighted.baddbmm_(weights, v)
            total.add_(weights.sum(-1, keepdim=True))
    assert weighted is not None, "there is no tile"
    assert total is not None
    return weighted, total, shift


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    scores = torch.bmm(q, k.transpose(1, 2)) if out is None else torch.bmm(q, k.transpose(1, 2), out=out)
    return scores if mask is None else scores.add_(mask)
