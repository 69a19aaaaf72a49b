"""Predicted time to stream KV from host memory while a step's attention reads it.

Ranks copy the next segment while they compute, so a step takes as long as the longer of the two. The warm-up measures the
copies. Steps that these predictably dominate correct them, and no other prediction.
"""

from __future__ import annotations

from medha.cost.tier_seconds import ReadSeconds
from medha.wire.messages import StreamingFigures


class StreamSeconds:
    """The time in which a rank streams blocks."""

    def __init__(self, figures: StreamingFigures) -> None:
        """Begin with the measured time of a block; 0 where attention reads host memory in place."""
        self._reads = ReadSeconds(0.0, figures.read_seconds_per_block)
        self._is_in_place = figures.read_seconds_per_block == 0

    def seconds(self, blocks: int) -> float:
        """Return the predicted time to stream so many blocks."""
        return self._reads.seconds(blocks, 1) if blocks and not self._is_in_place else 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        """Learn from a step that took so long because of so many blocks."""
        if not self._is_in_place:
            self._reads.observe(blocks, seconds)
