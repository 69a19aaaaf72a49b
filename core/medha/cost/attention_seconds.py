"""Formula for the seconds of one sequence's attention in one layer, evaluated hundreds of times a second.

It is separate from `medha.cost.cost_profile`, whose dataclasses pydantic reads, so that it can be compiled.
"""

from __future__ import annotations

from bisect import bisect_left


class AttentionSeconds:
    """The longer of computing a sequence's pairs and reading its KV, or measured times. See `Attention` of `cost_profile`."""

    def __init__(
        self,
        *,
        sequence_seconds: float,
        seconds_per_pair: float,
        kv_seconds_per_token: float,
        rows_per_token: int,
        tiles: tuple[int, ...],
        points: tuple[tuple[int, float], ...],
        window_tokens: int,
        window_share: float,
    ) -> None:
        self._sequence_seconds = sequence_seconds
        self._seconds_per_pair = seconds_per_pair
        self._kv_seconds_per_token = kv_seconds_per_token
        self._rows_per_token = rows_per_token
        self._small_tiles = tiles[:-1]
        self._largest_small_tile = max(tiles[:-1], default=0)
        self._tile = tiles[-1]
        self._points = points
        self._window_tokens = window_tokens
        self._window_share = window_share

    def of(self, context: int, count: int, foreign: bool) -> float:
        """Return the seconds of `count` queries after `context` tokens.

        `foreign`: the context is another lane's whole shard.
        """
        keys = self.seen(context if foreign else context + (count + 1) / 2)
        if self._points:
            return self._sequence_seconds + keys * self._measured_slope(count)
        compute = self.padded(count) * keys * self._seconds_per_pair
        memory = self.seen(context if foreign else context + count) * self._kv_seconds_per_token
        return self._sequence_seconds + max(memory, compute)

    def seen(self, keys: float) -> float:
        """Return the keys that a query sees of so many: the mean over all layers, of which some have a window."""
        if self._window_share and keys > self._window_tokens:
            return keys - self._window_share * (keys - self._window_tokens)
        return keys

    def padded(self, count: int) -> float:
        """Return the query tokens, rounded up to whole tiles of rows."""
        rows = count * self._rows_per_token
        if rows <= self._largest_small_tile:
            for tile in self._small_tiles:
                if rows <= tile:
                    return tile / self._rows_per_token
        return -(-rows // self._tile) * self._tile / self._rows_per_token

    def _measured_slope(self, count: int) -> float:
        """Return the seconds per key for `count` queries: linear between measured points, proportional beyond them."""
        points = self._points
        index = bisect_left(points, (count,))
        if index == len(points):
            return points[-1][1] * count / points[-1][0]
        if points[index][0] == count:
            return points[index][1]
        (left, low), (right, high) = points[index - 1 : index + 1]
        return low + (high - low) * (count - left) / (right - left)
