"""Counts the windows of running sequences, if layers free KV before them and their pool is too small for `maxRunning`.

A request may begin only if the pool has a whole window left, however short the request is. So every request needs the same room
to begin, and short ones do not overtake a long one. A running request counts only the blocks that it can ever need. All lanes
have equal pools, and a sequence counts on each of them, wherever its KV lies.
"""

from __future__ import annotations

from medha.kv.window_tables import WindowNeed


class WindowPlaces:
    """The windows of a replica's running sequences."""

    def __init__(self, need: WindowNeed, pool_blocks: int) -> None:
        """`pool_blocks` is the size of a lane's pool of windows."""
        self._need, self._pool_blocks = need, pool_blocks
        self._held: dict[str, int] = {}  # blocks of each sequence
        self._held_blocks = 0

    @property
    def free(self) -> int:
        """Number of sequences that may still begin, however long they become."""
        need = self._need
        left_blocks = self._pool_blocks - need.step_blocks - self._held_blocks
        # If the pool holds every sequence whole, no step needs more.
        whole = self._pool_blocks // need.longest_blocks - len(self._held)
        return max(left_blocks // need.sequence_blocks, whole)

    def take(self, sequence: str, most_blocks: int) -> None:
        """Count a sequence that has at most `most_blocks` blocks in layers without a window."""
        blocks = min(most_blocks, self._need.sequence_blocks)
        self._held[sequence] = blocks
        self._held_blocks += blocks

    def give_back(self, sequence: str) -> None:
        """Remove a sequence that `take` has counted."""
        self._held_blocks -= self._held.pop(sequence)
