"""Plans the part of one lane in a step whose requests are spread over several lanes, from shard maps alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from medha.kv.context_parallel import OWNER, PASS_KV, PASS_Q
from medha.shards import ShardMap
from medha.wire.messages import Extent
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.partial_attention import Rows
from medha_worker.model.spread import Landing, OwnPart, RingKeys, RingQueries, SpreadPlan

LOCAL = "local"
STRATEGIES = (LOCAL, OWNER, PASS_KV, PASS_Q)

Ids = npt.NDArray[np.int64]


def positions(extents: Sequence[Extent]) -> Ids:
    """Return the positions of the rows of an entry, or of several in sequence, int64 [rows]."""
    runs = np.array(
        [(extent.start, extent.stride, extent.count) for extent in extents], dtype=np.int64
    ).reshape(-1, 3)
    starts, strides, counts = np.repeat(runs, runs[:, 2], axis=0).T
    first_rows = np.repeat(np.cumsum(runs[:, 2]) - runs[:, 2], runs[:, 2])
    at: Ids = starts + strides * (np.arange(len(counts)) - first_rows)
    return at


@dataclass(frozen=True)
class SpreadEntry:
    """An entry of a step: the positions of one request that `lane` computes, as the planning lane sees them.

    `stop` is the position to which the whole step brings the request: other entries may compute other
    positions of it. `table` is the request's block table on the planning lane, int64; empty if it holds
    nothing there. `window_table` replaces it in layers that free KV before their windows; None: there are none. Its
    blocks before the windows are meaningless.
    """

    shards: ShardMap
    lane: int
    extents: tuple[Extent, ...]
    stop: int
    table: Ids
    strategy: str = OWNER
    request: str = ""
    window_table: Ids | None = None

    @property
    def count(self) -> int:
        return sum(extent.count for extent in self.extents)

    @property
    def holders(self) -> tuple[int, ...]:
        """Lanes that hold, after this step, any KV that a row of the entry attends to."""
        return self.shards.participants(self.extents[-1].last + 1)

    def seen_on(self, window_tokens: int | None) -> tuple[int, ...]:
        """Return the `holders` of KV that some row sees in a layer with this window; None: rows see the whole context."""
        if window_tokens is None:
            return self.holders
        return tuple(lane for lane in self.holders if self.spans_on(lane, 0, window_tokens=window_tokens))

    def spans_on(
        self, holder: int, first_row: int, table: Ids | None = None, window_tokens: int | None = None
    ) -> list[SequenceSpan]:
        """Return the spans of the entry's rows on the KV of `holder`; rows that see nothing there have none.

        `table` is the block table of that KV; by default the entry's own.
        """
        table = self.table if table is None else table
        spans, row = [], first_row
        for extent in self.extents:
            for first, last in pairwise(self._edges(extent, window_tokens)):
                position = extent.start + first * extent.stride
                span = self._span(holder, row + first, last - first, position, extent.stride, window_tokens)
                if span is not None:
                    spans.append(replace(span, blocks=table))
            row += extent.count
        return spans

    def _edges(self, extent: Extent, window_tokens: int | None) -> list[int]:
        """Return the rows of an extent, and their number, at which the lane of a row or of its window's edge changes."""
        edges = {0, extent.count}
        for behind in (0,) if window_tokens is None else (0, window_tokens):
            for piece in self.shards.pieces(max(0, extent.start - behind), max(0, extent.last + 1 - behind)):
                edges.add(-(-(piece.start + behind - extent.start) // extent.stride))
        return sorted(row for row in edges if 0 <= row <= extent.count)

    def _span(
        self, holder: int, row: int, count: int, position: int, stride: int, window_tokens: int | None
    ) -> SequenceSpan | None:
        """Return the span of rows from `position` on, within which no lane changes, on the KV of `holder`."""
        seen = self.shards.local_lengths(position + 1).get(holder, 0)
        is_causal = self.shards.locate(position)[0] == holder
        first = first_stride = 0
        # The last position that the first row does not see; below zero if it sees all.
        before = -1 if window_tokens is None else position - window_tokens
        if before >= 0:
            first = self.shards.local_lengths(before + 1).get(holder, 0)
            first_stride = stride if self.shards.locate(before)[0] == holder else 0
        if is_causal:
            return SequenceSpan(row, count, seen - 1, (), True, stride, first, first_stride)
        if first_stride:
            count = min(count, -(-(seen - first) // first_stride))
        if first >= seen:
            return None
        return SequenceSpan(row, count, seen, (), False, stride, first, first_stride)

    def kept_by(self) -> dict[int, tuple[Ids, Ids]]:
        """Return by lane the rows whose K and V belong there, counted from 0, and their local positions."""
        kept: dict[int, tuple[list[Ids], list[Ids]]] = {}
        row = 0
        for extent in self.extents:
            for _, count, lane, local in self._pieces(extent):
                rows, places = kept.setdefault(lane, ([], []))
                rows.append(np.arange(row, row + count))
                places.append(local + extent.stride * np.arange(count))
                row += count
        return {lane: (np.concatenate(rows), np.concatenate(places)) for lane, (rows, places) in kept.items()}

    def slots(self, places: Ids, block_tokens: int) -> Ids:
        """Return the slots of local positions in the pool of the planning lane."""
        return self.table[places // block_tokens] * block_tokens + places % block_tokens

    def _pieces(self, extent: Extent) -> Iterator[tuple[int, int, int, int]]:
        """Split an extent at lane boundaries; yield first position, count, lane and first local position."""
        stride = extent.stride
        done = 0
        for piece in self.shards.pieces(extent.start, extent.last + 1):
            count = -(-(piece.stop - extent.start) // stride) - done
            if count > 0:
                first = extent.start + done * stride
                yield first, count, piece.lane, piece.local_start + first - piece.start
                done += count


def plan_spread(
    lane: int,
    own: Sequence[SpreadEntry],
    foreign: Sequence[SpreadEntry],
    block_tokens: int,
    windows: Sequence[int | None] = (),
) -> SpreadPlan | None:
    """Return the work of `lane` in a step for its `own` entries and for the `foreign` ones of other lanes.

    The own entries follow one another in the lane's batch. Both are in the order of the step. `windows` are those of
    the model's layers, in tokens, or None for the whole context. The result is None if no entry is shared, so that a
    plain step suffices.
    """
    is_shared = any(entry.strategy in (PASS_KV, PASS_Q) or len(entry.holders) > 1 for entry in own)
    if not (is_shared or foreign):
        return None
    whole = _plan_layers(lane, own, foreign, block_tokens, None)
    own, foreign = [[_in_windows(entry) for entry in entries] for entries in (own, foreign)]
    windowed = {
        window: _plan_layers(lane, own, foreign, block_tokens, window)
        for window in dict.fromkeys(windows)
        if window is not None
    }
    return replace(whole, windowed=windowed)


def _in_windows(entry: SpreadEntry) -> SpreadEntry:
    """Return an entry as layers with a window see it."""
    return entry if entry.window_table is None else replace(entry, table=entry.window_table)


def _plan_layers(
    lane: int,
    own: Sequence[SpreadEntry],
    foreign: Sequence[SpreadEntry],
    block_tokens: int,
    window_tokens: int | None,
) -> SpreadPlan:
    """Return the plan of all layers with this window; None: their rows see the whole context."""
    rows = [0]
    for entry in own:
        rows.append(rows[-1] + entry.count)
    spans = [
        span
        for entry, row in zip(own, rows, strict=False)
        for span in entry.spans_on(lane, row, window_tokens=window_tokens)
    ]
    parts = []
    for entry, row in zip(own, rows, strict=False):
        helpers = tuple(holder for holder in entry.seen_on(window_tokens) if holder != lane)
        if helpers and entry.strategy not in (PASS_KV, PASS_Q):
            parts.append(OwnPart(slice(row, row + entry.count), helpers))
    asked = [
        (entry.lane, Rows(entry.count, entry.spans_on(lane, 0, window_tokens=window_tokens)))
        for entry in foreign
        if entry.strategy == OWNER and lane in entry.seen_on(window_tokens)
    ]
    return SpreadPlan(
        Rows(rows[-1], spans),
        _landing(lane, own, rows, foreign, block_tokens),
        parts,
        asked,
        _ring_queries(lane, own, rows, foreign, window_tokens),
        _ring_keys(lane, own, rows, foreign, block_tokens, window_tokens),
        [slice(*ends) for ends in pairwise(rows)],
    )


def _landing(
    lane: int,
    own: Sequence[SpreadEntry],
    rows: Sequence[int],
    foreign: Sequence[SpreadEntry],
    block_tokens: int,
) -> Landing:
    to: dict[int, list[Ids]] = {}
    here: tuple[list[Ids], list[Ids]] = ([], [])
    for entry, row in zip(own, rows, strict=False):
        for keeper, (kept, places) in entry.kept_by().items():
            if keeper == lane:
                here[0].append(kept + row)
                here[1].append(entry.slots(places, block_tokens))
            else:
                to.setdefault(keeper, []).append(kept + row)
    of: dict[int, list[Ids]] = {}
    for entry in foreign:
        kept_here = entry.kept_by().get(lane)
        if kept_here is not None:
            of.setdefault(entry.lane, []).append(entry.slots(kept_here[1], block_tokens))
    return Landing(
        (_joined(here[0]), np.concatenate([np.arange(0), *here[1]])),
        {keeper: _joined(found) for keeper, found in to.items()},
        {computing: np.concatenate(found) for computing, found in of.items()},
    )


def _ring_queries(
    lane: int,
    own: Sequence[SpreadEntry],
    rows: Sequence[int],
    foreign: Sequence[SpreadEntry],
    window_tokens: int | None,
) -> RingQueries | None:
    entries = [entry for entry in (*own, *foreign) if entry.strategy == PASS_Q]
    lanes = ring_lanes(entries)
    if lane not in lanes:
        return None
    of: dict[int, Rows] = {}
    for entry in entries:
        found = of.get(entry.lane, Rows(0, ()))
        spans = () if entry.lane == lane else entry.spans_on(lane, found.count, window_tokens=window_tokens)
        of[entry.lane] = Rows(found.count + entry.count, (*found.spans, *spans))
    mine = [(row, entry) for entry, row in zip(own, rows, strict=False) if entry.strategy == PASS_Q]
    answers = {
        holder
        for _, entry in mine
        for holder in entry.holders
        if entry.spans_on(holder, 0, window_tokens=window_tokens)
    }
    return RingQueries(
        lanes,
        _joined([np.arange(row, row + entry.count) for row, entry in mine]),
        of,
        sorted(answers - {lane}),
    )


def _ring_keys(
    lane: int,
    own: Sequence[SpreadEntry],
    rows: Sequence[int],
    foreign: Sequence[SpreadEntry],
    block_tokens: int,
    window_tokens: int | None,
) -> RingKeys | None:
    entries = [entry for entry in (*own, *foreign) if entry.strategy == PASS_KV]
    lanes = ring_lanes(entries)
    if lane not in lanes:
        return None
    held = _passing_blocks(entries, block_tokens, window_tokens)
    first_block: dict[tuple[str, int], int] = {}
    blocks = dict.fromkeys(lanes, 0)
    for name, ranges in held.items():
        for holder, passed in ranges.items():
            first_block[name, holder] = blocks[holder]
            blocks[holder] += len(passed)
    by_name = {entry.request: entry for entry in entries}
    tables = [by_name[name].table[part.start : part.stop] for name in held if (part := held[name].get(lane))]
    of: dict[int, Rows] = {}
    mine: list[Ids] = []
    count = 0
    for entry, row in zip(own, rows, strict=False):
        if entry.strategy != PASS_KV:
            continue
        for holder, passed in held[entry.request].items():
            if holder == lane:
                continue
            first = first_block[entry.request, holder]
            passing = np.arange(first - passed.start, first + len(passed))  # no row sees those that stay
            spans = entry.spans_on(holder, count, passing, window_tokens)
            of[holder] = Rows(0, (*of.get(holder, Rows(0, ())).spans, *spans))
        mine.append(np.arange(row, row + entry.count))
        count += entry.count
    return RingKeys(
        lanes,
        _joined(mine),
        _joined(tables),
        blocks,
        {holder: Rows(count, found.spans) for holder, found in of.items() if found.spans},
    )


def _passing_blocks(
    entries: Sequence[SpreadEntry], block_tokens: int, window_tokens: int | None
) -> dict[str, dict[int, range]]:
    """Return the blocks of each request that each lane sends around the ring: all but those before every row's window.

    Requests are in the order of their names, the same on all lanes.
    """
    held: dict[str, dict[int, range]] = {}
    for name, entry in sorted({entry.request: entry for entry in entries}.items()):
        unseen = 0
        if window_tokens is not None:
            starts = [one.extents[0].start for one in entries if one.request == name]
            unseen = max(0, min(starts) + 1 - window_tokens)
        before = entry.shards.local_lengths(unseen)
        held[name] = {
            holder: range(before.get(holder, 0) // block_tokens, -(-tokens // block_tokens))
            for holder, tokens in entry.shards.local_lengths(entry.stop).items()
        }
    return held


def ring_lanes(entries: Sequence[SpreadEntry]) -> list[int]:
    """Return the lanes that compute or hold a part of one of the entries: the ring, in ascending order."""
    return sorted(
        {lane for entry in entries for lane in (entry.lane, *entry.shards.participants(entry.stop))}
    )


def _joined(parts: Sequence[Ids]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(0), *parts]))
