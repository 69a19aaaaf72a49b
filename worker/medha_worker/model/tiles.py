"""Exact float32 attention for many rows, tile by tile, out of torch's matrix products.

torch's own CPU kernel keeps the running maximum of every row, and rescales what it has summed whenever that
grows. Softmax does not change when a constant is taken from a row's scores, and any constant will do that keeps
exp() within float32: here it is the maximum over the first tile, or none at all where scores are small. What
remains per score is the two products, one exp and one addition, on a tile that stays in a core's cache.

Each tile takes four small operators, and between them torch's threads must not fall asleep: with libgomp set
`GOMP_SPINCOUNT=3000` (some microseconds), or whole prefills lose a third of their rate where the wait policy is
passive. Threads of our own in place of torch's were measured too: slower, for they fight with torch's for the cores.
"""

from collections.abc import Sequence

import torch

# One tile of scores, [rows, keys] of a KV head, is 1 MiB: half of a core's second-level cache.
TILE_ROWS = 512
TILE_KEYS = 512

# While each row's maximum over its first tile is within +-SMALL, exp() needs no shift: what underflows then is
# smaller than e^-47 of the row's sum, and what grows towards overflow (e^88) is seen in the sum.
_SMALL = 40.0
_LARGE = 1e30

# Keys transposed, [kv_heads, head_dim, keys], and values, [kv_heads, keys, head_dim].
KeyTile = tuple[torch.Tensor, torch.Tensor]


class RowTile:
    """The softmax of a tile of rows over all the keys they see, which are added tile by tile.

    Each row must see one of the first keys added. If `overflowed` is true after the last, show all keys again to
    `measure`, `restart`, and add them again: now the constant of each row is its true maximum.
    """

    def __init__(self, q: torch.Tensor, scratch: torch.Tensor) -> None:
        """A tile of rows.

        Args:
            q: float32 [kv_heads, rows, head_dim], multiplied by the score scale; grouped query heads are rows.
            scratch: float32 [kv_heads, rows, TILE_KEYS], free to overwrite between calls.
        """
        self._q, self._scratch = q, scratch
        self._weighted = torch.zeros_like(q)  # sum of exp(score - constant) * v
        self._total = q.new_zeros(*q.shape[:2], 1)  # sum of exp(score - constant)
        self._constant: torch.Tensor | None = None  # [kv_heads, rows, 1]; None is zero
        self._maximum: torch.Tensor | None = (
            None  # likewise: of the first scores, or of all that were measured
        )

    def add(self, keys: Sequence[KeyTile], mask: torch.Tensor | None = None) -> None:
        """Count these keys in; `mask`, float32 [rows, keys], is -inf where a row must not see a key, else 0."""
        for k, v in keys:
            weights = self._scores(k, mask)
            if self._maximum is None:
                self._maximum = weights.amax(-1, keepdim=True)
                if not bool((self._maximum.abs() < _SMALL).all()):
                    self._constant = self._maximum
            if self._constant is not None:
                weights.sub_(self._constant)
            weights.exp_()
            self._total.add_(weights.sum(-1, keepdim=True))
            self._weighted.baddbmm_(weights, v)

    @property
    def overflowed(self) -> bool:
        """Whether some score was so far above its row's constant that the sums are of no use."""
        return not bool((self._total < _LARGE).all())

    def measure(self, keys: Sequence[KeyTile], mask: torch.Tensor | None = None) -> None:
        """Raise the rows' maxima to those over these keys, without counting the keys in."""
        assert self._maximum is not None
        for k, _ in keys:
            self._maximum = torch.maximum(self._maximum, self._scores(k, mask).amax(-1, keepdim=True))

    def restart(self) -> None:
        """Forget the sums, and take the maxima as constants from now on."""
        self._constant = self._maximum
        self._total.zero_()
        self._weighted.zero_()

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention output, like `q`, and the log-sum-exp (natural) of the scores, float32 [kv_heads, rows]."""
        log_sum_exp = self._total.log() if self._constant is None else self._total.log() + self._constant
        return self._weighted / self._total, log_sum_exp.squeeze(-1)

    def _scores(self, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        is_whole = k.shape[2] == self._scratch.shape[2]
        scores = torch.bmm(self._q, k, out=self._scratch) if is_whole else torch.bmm(self._q, k)
        return scores if mask is None else scores.add_(mask)


def key_tiles(keys: torch.Tensor, values: torch.Tensor) -> list[KeyTile]:
    """Views of `keys` and `values`, [kv_heads, tokens, head_dim], cut into tiles."""
    return [
        (keys[:, first : first + TILE_KEYS].transpose(1, 2), values[:, first : first + TILE_KEYS])
        for first in range(0, keys.shape[1], TILE_KEYS)
    ]
