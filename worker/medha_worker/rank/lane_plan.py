"""The plan of one lane for one step, resolved from the step and the lane's state; the executor only carries it out.

A plan states which entries the lane runs, which positions each of them computes, and where a token is sampled. It
has the block tables, the parts of other lanes to which rows attend, and the data to exchange with those lanes. It
also names the entries that fail before anything is computed. Making a plan changes no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from medha.cost.step_estimates import StepWork
from medha.kv.blocks import BlockCopy
from medha.kv.context_parallel import OWNER
from medha.kv.host_tier import TierCopy
from medha.kv.lane_replay import HostTierWork
from medha.kv.window_tables import WindowTable
from medha.shards import ShardMap
from medha.wire.frames import TokenIds
from medha.wire.messages import EntryFailed, Extent, Step, StepEntry
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.prepared_step import PreparedStep
from medha_worker.model.spread import SpreadPlan
from medha_worker.rank.kv_parallel_plan import LOCAL, STRATEGIES, Ids, SpreadEntry, plan_spread, positions
from medha_worker.rank.lane_state import LaneState, SequenceState, diverged


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """An entry that the lane runs.

    The step brings its sequence to position `stop`, perhaps together with entries on other lanes. `table` is the sequence's block
    table on this lane, and `window` that of the layers that free KV before their windows, if there are any.
    """

    entry: StepEntry
    sequence: SequenceState
    stop: int
    shards: ShardMap
    table: Ids
    window: WindowTable | None = None

    @property
    def known(self) -> int:
        """The position to which the step brings its sequence if no draft turns out right."""
        return self.stop - len(self.entry.drafts)

    def fed_tokens(self) -> list[TokenIds]:
        """Return the ids of its rows, int32; those sampled in earlier steps must have arrived."""
        drafts = self.entry.drafts
        if drafts:
            known = self.sequence.tokens(self.entry.extents[0].start, self.known)
            return [known, np.array(drafts, dtype=np.int32)]
        return [
            self.sequence.tokens(extent.start, extent.last + 1)[:: extent.stride]
            for extent in self.entry.extents
        ]

    @property
    def scored_rows(self) -> int:
        """Number of leading rows for which the log-probability of the next prompt token is requested."""
        if self.sequence.alternatives is None or self.entry.drafts:
            return 0
        extents, prompt_tokens = self.entry.extents, len(self.sequence.prompt)
        if extents[0].start >= prompt_tokens:
            return 0
        return self.entry.token_count - (extents[-1].last + 1 >= prompt_tokens)

    def spread(self, block_tokens: int) -> SpreadEntry:
        """Return the entry as several lanes share it."""
        window = None if self.window is None else self.window.from_start(block_tokens)
        return _spread_entry(self.entry, self.shards, self.stop, self.table, window)


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries as one flat batch: positions, int64 [rows] in host memory, and what its rows attend to.

    `spread` replaces `spans` if other lanes take part. `window_spans` replace them in layers that free KV before their
    windows; None: there are no such layers.
    """

    positions: Tensor
    spans: list[SequenceSpan]
    spread: SpreadPlan | None
    window_spans: list[SequenceSpan] | None = None


@dataclass(frozen=True, slots=True)
class LanePlan:
    """The part of one lane in a step; without a batch, nothing is computed here."""

    step: Step
    takes_part: bool = False  # whether the step names this lane
    copies: tuple[BlockCopy, ...] = ()  # KV copies, made before anything is computed
    entries: tuple[PlannedEntry, ...] = ()
    foreign: tuple[SpreadEntry, ...] = ()  # entries of other lanes that this lane serves
    failures: tuple[EntryFailed, ...] = ()
    batch: Batch | None = None  # of all entries
    prepared: PreparedStep | None = None  # the batch, if the model could prepare it ahead
    work: StepWork = field(default_factory=StepWork)  # of all entries, as it counts in estimates
    # Blocks that take KV of sequences on several lanes, int64, on a rank that guesses; None: there are none.
    overwritten: Ids | None = None
    tier_copies: tuple[TierCopy, ...] = ()  # between KV pool and host tier, made in order before `copies`
    # Work of the disk tier, of peers and of the store: drops and voided tickets come before those copies, the rest
    # after them.
    host_tier_work: HostTierWork = field(default_factory=HostTierWork)

    @property
    def has_spread(self) -> bool:
        """True if an entry's sequence lies on several lanes, even if only one of them computes it in this step."""
        return bool(self.foreign) or any(one.entry.strategy != LOCAL for one in self.entries)


def plan_lane(
    step: Step, state: LaneState, copies: tuple[BlockCopy, ...], windows: Sequence[int | None] = ()
) -> LanePlan:
    """Return the plan of a step whose changes to the ledger `state` has applied.

    `windows` are those of the model's layers, in tokens; None: their rows see the whole context.

    Raises:
        PartFailed: the state of this rank and the controller's have diverged; or an entry cannot be run, but
            other lanes run their share of it and could not be notified in time.
    """
    if state.lane not in step.lanes:
        return LanePlan(step, copies=copies)
    runs = _runs(step)
    entries: list[PlannedEntry] = []
    failures: list[EntryFailed] = []
    foreign: list[SpreadEntry] = []
    for entry in step.entries:
        if entry.lane == state.lane:
            found = _own_entry(entry, runs.get(entry.id), step, state)
            if isinstance(found, PlannedEntry):
                entries.append(found)
            elif found is not None:
                failures.append(found)
        # An entry that names no position is reported by its own lane.
        elif entry.strategy != LOCAL and entry.id in runs:
            asked = _foreign_entry(entry, runs[entry.id], step, state)
            if asked is not None:
                foreign.append(asked)
    block_tokens = state.ledger.block_size_tokens
    batch = lay_out(state.lane, entries, foreign, block_tokens, windows) if entries or foreign else None
    return LanePlan(step, True, copies, tuple(entries), tuple(foreign), tuple(failures), batch)


def lay_out(
    lane: int,
    entries: Sequence[PlannedEntry],
    foreign: Sequence[SpreadEntry],
    block_tokens: int,
    windows: Sequence[int | None] = (),
) -> Batch:
    """Return the entries as one batch, in which `lane` also serves the `foreign` entries of other lanes."""
    spread, spans, window_spans = None, [], []
    if foreign or any(one.entry.strategy != LOCAL for one in entries):
        spread = plan_spread(
            lane, [one.spread(block_tokens) for one in entries], foreign, block_tokens, windows
        )
    if spread is None:
        row = 0
        for one in entries:
            count = one.entry.token_count
            start = one.entry.extents[0].start
            spans.append(SequenceSpan(row, count, start, one.table))
            if one.window is not None:
                first_token, blocks = one.window
                window_spans.append(SequenceSpan(row, count, start - first_token, blocks))
            row += count
    at = positions([extent for one in entries for extent in one.entry.extents])
    return Batch(torch.from_numpy(at), spans, spread, window_spans or None)


def spread_blocks(lane: int, plan: LanePlan, block_tokens: int) -> Ids:
    """Return the blocks of `lane` into which a step writes KV of sequences that lie on several lanes, int64."""
    own = [one.spread(block_tokens) for one in plan.entries if one.entry.strategy != LOCAL]
    found = [np.empty(0, dtype=np.int64)]
    for entry in (*own, *plan.foreign):
        kept_here = entry.kept_by().get(lane)
        if kept_here is not None:
            found.append(entry.table[np.unique(kept_here[1] // block_tokens)])
    return np.concatenate(found)


def count_work(
    entries: Sequence[PlannedEntry], batch: Batch | None, windows: Sequence[int | None] = ()
) -> StepWork:
    """Return the work of a lane in a step; keys that several spans of one sequence see count once.

    With `windows`, those of the model's layers, pairs and keys are the mean of all layers, rounded.
    """
    if batch is None:
        return StepWork()
    rows = len(batch.positions)
    sampled = sum([one.entry.samples + len(one.entry.drafts) + one.scored_rows for one in entries])
    layers = Counter(windows or (None,))
    seen = [(count, *_pairs_and_keys(entries, batch, window)) for window, count in layers.items()]
    pairs, keys = (sum([one[0] * one[at] for one in seen]) / layers.total() for at in (1, 2))
    return StepWork(rows, sampled, round(pairs), round(keys))


def _pairs_and_keys(
    entries: Sequence[PlannedEntry], batch: Batch, window_tokens: int | None
) -> tuple[int, int]:
    """Return the (query, key) pairs of a layer with this window, and the keys that it reads."""
    rows = len(batch.positions)
    if batch.spread is None:  # then a row at position p sees p + 1 keys, all of them here
        if window_tokens is None:
            keys = sum([one.stop for one in entries])
            return int(batch.positions.sum()) + rows if rows > len(entries) else keys, keys
        seen = (batch.positions + 1).clamp(max=window_tokens)
        reads = [min(span.total_length, window_tokens + span.row_count - 1) for span in batch.spans]
        return int(seen.sum()), sum(reads)
    pairs, held = 0, dict[int, int]()
    spread = batch.spread if window_tokens is None else batch.spread.windowed[window_tokens]
    for span in _attended(spread):
        table = id(span.blocks)
        pairs += span.pairs_without_window
        if span.has_window:
            first = span.first_key + span.first_stride * np.arange(span.row_count)
            pairs -= int(np.maximum(first, 0).sum())
        held[table] = max(held.get(table, 0), span.total_length - span.first_seen)
    return pairs, sum(held.values())


def _attended(spread: SpreadPlan) -> Iterator[SequenceSpan]:
    """Yield the spans of all attention on a lane, for its own rows and for those of other lanes."""
    rings = [ring.of.values() for ring in (spread.queries, spread.keys) if ring is not None]
    foreign = [rows for _, rows in spread.foreign]
    for rows in (spread.local, *foreign, *(rows for ring in rings for rows in ring)):
        yield from rows.spans


def _own_entry(
    entry: StepEntry, run: _Run | None, step: Step, state: LaneState
) -> PlannedEntry | EntryFailed | None:
    """Return the entry as planned, or its failure; None if another lane reports that."""
    sequence = state.sequence(entry.id, step)
    if run is None:
        return EntryFailed(entry.id, "internal", "no position is named")
    shards = state.shards(entry, step)
    is_owner = shards.owner == state.lane
    if sequence.fault is not None:  # known to all lanes; only one of them reports it
        return EntryFailed(entry.id, "internal", sequence.fault) if is_owner else None
    problem = run.problem
    if problem is None and entry.strategy not in STRATEGIES:
        problem = f"strategy {entry.strategy!r} is not known"
    drafted = len(entry.drafts)
    if problem is None and drafted and not _can_draft(entry, run):
        problem = f"{drafted} tokens are drafted, with extents {entry.extents} and samples {entry.samples}"
    if problem is not None:
        if run.lanes > 1:
            raise diverged(step, f"{entry.id}: {problem}")
        return EntryFailed(entry.id, "internal", problem)
    # Only the owner of a request tracks how far all of it is computed.
    computed = sequence.computed if is_owner else run.start
    known = run.stop - drafted
    if not (run.start <= computed and known <= sequence.length and run.stop <= shards.tokens):
        raise diverged(
            step,
            f"{entry.id}: positions {run.start} to {run.stop}: {computed} are computed, {sequence.length} tokens "
            f"known, {shards.tokens} reserved",
        )
    last = entry.extents[-1].last - drafted
    if entry.samples and last + 1 != sequence.length:
        raise diverged(
            step,
            f"{entry.id}: a token is sampled after position {last}, but {sequence.length} tokens are known",
        )
    return PlannedEntry(entry, sequence, run.stop, shards, sequence.table, sequence.window)


def _can_draft(entry: StepEntry, run: _Run) -> bool:
    """Return whether an entry may have drafts: it samples, and computes one position and those of the drafts."""
    is_run = run.lanes == 1 and len(entry.extents) == 1
    return entry.samples and is_run and run.stop - run.start == 1 + len(entry.drafts)


def _foreign_entry(entry: StepEntry, run: _Run, step: Step, state: LaneState) -> SpreadEntry | None:
    """Return an entry that another lane runs if it concerns this lane."""
    sequence, shards = state.sequence(entry.id, step), state.shards(entry, step)
    window = None
    if sequence.window is not None:
        window = sequence.window.from_start(state.ledger.block_size_tokens)
    asked = _spread_entry(entry, shards, run.stop, sequence.table, window)
    # A ring needs all of its lanes, whatever they hold of one request.
    concerns = entry.strategy != OWNER or state.lane in asked.holders
    return asked if concerns and sequence.fault is None else None


def _spread_entry(
    entry: StepEntry, shards: ShardMap, stop: int, table: Ids, window: Ids | None
) -> SpreadEntry:
    return SpreadEntry(shards, entry.lane, entry.extents, stop, table, entry.strategy, entry.id, window)


@dataclass(frozen=True, slots=True)
class _Run:
    """The positions of one sequence that a step computes on all lanes: `start .. stop` (exclusive)."""

    start: int
    stop: int
    lanes: int
    problem: str | None  # reason why the extents are not one run of positions


def _runs(step: Step) -> dict[str, _Run]:
    """Return the step's runs of positions by sequence id; sequences without a position are left out."""
    runs: dict[str, _Run] = {}
    entries: dict[str, list[StepEntry]] = {}
    for entry in step.entries:
        entries.setdefault(entry.id, []).append(entry)
    for name, parts in entries.items():
        if len(parts) == len(parts[0].extents) == 1:  # the common case: a decode, or a chunk of one lane
            (only,) = parts[0].extents
            if only.count >= 1 and only.stride == 1:
                runs[name] = _Run(only.start, only.start + only.count, 1, None)
                continue
        if all(entry.extents for entry in parts):
            runs[name] = _checked_run(parts)
    return runs


def _checked_run(parts: Sequence[StepEntry]) -> _Run:
    extents = [extent for entry in parts for extent in entry.extents]
    start, stop = min(one.start for one in extents), max(one.last for one in extents) + 1
    is_run = sum(one.count for one in extents) == stop - start
    is_run &= all(one.count >= 1 and one.stride >= 1 for one in extents)
    is_run &= all(_is_ascending(entry.extents) for entry in parts)
    is_run &= len(parts) > 1 or parts[0].extents[-1].last - start + 1 == parts[0].token_count
    return _Run(start, stop, len(parts), None if is_run else f"{tuple(extents)} is not one run of positions")


def _is_ascending(extents: Sequence[Extent]) -> bool:
    """Return whether each extent begins after the end of the one before: a lane computes its positions in order."""
    return all(after.start > before.last for before, after in pairwise(extents))
