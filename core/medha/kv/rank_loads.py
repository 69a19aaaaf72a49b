"""Loads of one lane's host tier that ranks have begun, and their ends: a load has ended once all ranks have reported it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from medha.wire.messages import DiskReport


@dataclass(slots=True)
class _Load:
    blocks: int
    ranks: set[int]  # that have not reported it
    seconds: float = 0.0  # of the slowest rank
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: its extent, its size, how long the slowest rank read, and whether the blocks are there."""

    extent: int
    blocks: int
    seconds: float
    is_there: bool


@dataclass(slots=True)
class RankLoads:
    """The loads of a lane of `ranks` that have not ended, by extent."""

    ranks: frozenset[int]
    _loads: dict[int, _Load] = field(default_factory=dict)

    def __contains__(self, extent: int) -> bool:
        return extent in self._loads

    @property
    def blocks(self) -> int:
        """Blocks that are being read."""
        return sum(load.blocks for load in self._loads.values())

    def begin(self, extent: int, blocks: int) -> None:
        """Note that ranks read so many blocks into an extent."""
        self._loads[extent] = _Load(blocks, set(self.ranks))

    def report(self, report: DiskReport) -> list[Loaded]:
        """Take a rank's report; return the loads that have ended with it."""
        outcomes: Iterable[tuple[int, float | None]] = (
            *report.loaded,
            *((extent, None) for extent in report.not_loaded),
        )
        ended: list[Loaded] = []
        for extent, seconds in outcomes:
            load = self._loads.get(extent)
            if load is None or report.rank not in self.ranks:
                continue
            load.ranks.discard(report.rank)
            load.failed = load.failed or seconds is None
            load.seconds = max(load.seconds, seconds or 0.0)
            if not load.ranks:  # else others may still write to the extent
                del self._loads[extent]
                ended.append(Loaded(extent, load.blocks, load.seconds, not load.failed))
        return ended
