"""Which part of a step falls to one lane, where requests are spread over several: a pure reading of shard maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medha.shards import ShardMap
from medha_worker.model.batch import SequenceSpan
from medha_worker.model.spread import ForeignPart, OwnPart, SpreadPlan, Written


@dataclass(frozen=True)
class SpreadEntry:
    """Positions `start .. stop` (exclusive) of one request in a step, as a lane sees them.

    `table` is the request's block table on this lane, int64; empty where it holds nothing here.
    """

    shards: ShardMap
    start: int
    stop: int
    table: npt.NDArray[np.int64]

    def on(self, lane: int, first_row: int, block_tokens: int) -> tuple[list[SequenceSpan], list[Written]]:
        """The attention of the entry's rows to what `lane` holds, and the tokens whose K and V it keeps."""
        spans, written = [], []
        seen = self.shards.local_lengths(self.start).get(lane, 0)
        for piece in self.shards.pieces(self.start, self.stop):
            row, count = first_row + piece.start - self.start, piece.stop - piece.start
            if piece.lane == lane:
                spans.append(SequenceSpan(row, count, seen, self.table))
                written.append(
                    Written(slice(row, row + count), self._slots(piece.local_start, count, block_tokens))
                )
                seen += count
            elif seen > 0:
                spans.append(SequenceSpan(row, count, seen, self.table, is_causal=False))
        return spans, written

    def kept_by(self, first_row: int) -> dict[int, list[slice]]:
        """Which rows' K and V belong on which lane."""
        kept: dict[int, list[slice]] = {}
        for piece in self.shards.pieces(self.start, self.stop):
            rows = slice(first_row + piece.start - self.start, first_row + piece.stop - self.start)
            kept.setdefault(piece.lane, []).append(rows)
        return kept

    @property
    def lanes(self) -> tuple[int, ...]:
        """Those that hold a part of what is computed up to `stop`."""
        return self.shards.participants(self.stop)

    def _slots(self, start: int, count: int, block_tokens: int) -> torch.Tensor:
        positions = np.arange(start, start + count)
        return torch.from_numpy(
            self.table[positions // block_tokens] * block_tokens + positions % block_tokens
        )


def plan_spread(
    lane: int, own: Sequence[SpreadEntry], foreign: Sequence[SpreadEntry], block_tokens: int
) -> SpreadPlan | None:
    """What `lane` does for `own` entries, one behind the other in its batch, and for those of others that it helps.

    Both are in the order of the step. None: nothing here is shared, so that a plain step will do.
    """
    spans: list[SequenceSpan] = []
    written: list[Written] = []
    parts: list[OwnPart] = []
    row = 0
    for entry in own:
        found, kept = entry.on(lane, row, block_tokens)
        spans += found
        written += kept
        count = entry.stop - entry.start
        helpers = tuple(helper for helper in entry.lanes if helper != lane)
        if helpers:
            parts.append(OwnPart(slice(row, row + count), helpers, entry.kept_by(row)))
        row += count
    if not (parts or foreign):
        return None
    asked = []
    for entry in foreign:
        found, kept = entry.on(lane, 0, block_tokens)
        asked.append(ForeignPart(entry.shards.owner, entry.stop - entry.start, found, kept))
    return SpreadPlan(row, spans, written, parts, asked)
