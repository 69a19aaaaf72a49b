"""Files and objects behind the host tiers of simulated replicas (`medha.kv.disk_tier`, `medha.kv.store_tier`).

A real rank has threads that read and write beside its steps. Here, each lane has as many of them, and their work takes the time
that the replica's config states. No read waits for a write, and reads begin in the order of due times. Work begins once the step
that asks for it has begun in the last stage. Nothing fails, and the store itself is never the bottleneck, however many replicas
use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from medha.cost.tier_seconds import PARALLEL_READS, STORE_ACCESS_SECONDS
from medha.kv.due_queue import DueQueue
from medha.kv.prefix_cache import hash_count
from medha.scheduler.controller import ReplicaController
from medha.wire.messages import Admit, DiskReport, Grow, HostDrop, HostLoad, Step, StoreLookup

PARALLEL_WRITES = 2
"""Objects that a rank writes at a time."""


class Clock(Protocol):
    """The virtual clock of a simulation."""

    def at(self, time: float, deliver: Callable[[Any, float], None], what: Any, /) -> None:
        """Schedule `deliver(what, time)`."""
        ...


@dataclass(slots=True, eq=False)
class _Work:
    lane: int
    fields: dict[str, Any]  # of the report that it ends with
    seconds: float
    is_write: bool = False
    object: str = ""  # that it writes to the store
    ends: tuple[tuple[int, int], ...] = ()  # up to which block of which extents it writes
    called_off: dict[str, Any] = field(default_factory=dict)  # fields of the report if it is called off
    is_off: bool = False
    due: float = 0.0  # earlier ones begin first


class _Threads:
    """Some threads of one lane's ranks: those that read, or those that write."""

    def __init__(
        self,
        threads: int,
        clock: Clock,
        seconds: Callable[[_Work], float],
        ended: Callable[[_Work, float], None],
    ) -> None:
        self._free, self._clock, self._seconds, self._on_end = threads, clock, seconds, ended
        self._waiting: DueQueue[_Work] = DueQueue()
        self._running: list[_Work] = []

    def add(self, work: _Work, now: float) -> None:
        self._waiting.add(work, work.due)
        self._start(now)

    def drop(self, keep: dict[int, int]) -> None:
        """Cancel the writes of host blocks that are given to others; `keep` has the number of blocks that stay of each extent."""
        for work in (*self._waiting, *self._running):
            work.is_off = work.is_off or any(stop > keep.get(extent, stop) for extent, stop in work.ends)

    def _start(self, now: float) -> None:
        while self._free and self._waiting:
            work = self._waiting.pop()
            self._free -= 1
            self._running.append(work)
            self._clock.at(now + (0.0 if work.is_off else self._seconds(work)), self._ended, work)

    def _ended(self, work: _Work, now: float) -> None:
        self._free += 1
        self._running.remove(work)
        self._on_end(work, now)
        self._start(now)


class FilesAndObjects:
    """The disk tier of one simulated replica, and its part of a store that replicas share."""

    def __init__(
        self,
        core: ReplicaController,
        stored: set[str],
        clock: Clock,
        deliver: Callable[[DiskReport, float], None],
    ) -> None:
        """`stored` are the objects of the store; `deliver` brings a rank's report to `core`."""
        self._core, self._stored, self._deliver = core, stored, deliver
        self._clock = clock
        lanes = range(core.config.topology.kv)
        self._next_extent = [0 for _ in lanes]
        self._disk_reads = [_Threads(1, clock, self._seconds, self._ended) for _ in lanes]
        self._disk_writes = [_Threads(1, clock, self._seconds, self._ended) for _ in lanes]
        self._store_reads = [_Threads(PARALLEL_READS, clock, self._seconds, self._ended) for _ in lanes]
        self._store_writes = [_Threads(PARALLEL_WRITES, clock, self._seconds, self._ended) for _ in lanes]

    @staticmethod
    def of(
        core: object, stored: set[str], clock: Clock, deliver: Callable[[DiskReport, float], None]
    ) -> FilesAndObjects | None:
        """Return what a controller's ranks have; None if these have neither a disk tier nor a store."""
        if not isinstance(core, ReplicaController):
            return None
        if core.config.disk_tier is None and core.config.store_block_seconds is None:
            return None
        return FilesAndObjects(core, stored, clock, deliver)

    def begin(self, now: float) -> None:
        """Report that all disks are empty."""
        if self._core.config.disk_tier is not None:
            for lane in range(self._core.config.topology.kv):
                self._report(lane, {"found_all": True}, now)

    def launched(self, step: Step, at: float) -> None:
        """Take what the ranks begin to read and to write with a step that they begin at `at`."""
        drops: dict[int, list[HostDrop]] = {}
        for lane, dropped in _drops(step):
            drops.setdefault(lane, []).extend(dropped)
        for lane, found in drops.items():
            keep = {one.extent: one.keep for one in found}
            self._disk_writes[lane].drop(keep)
            self._store_writes[lane].drop(keep)
        work = [self._read(load, extent) for load, extent in self._extents(step)]
        for write in step.writes:
            name, blocks = write.file.name, hash_count(write.file.hashes)
            ends: tuple[tuple[int, int], ...] = ((write.extent, write.first + blocks),)
            work.append(
                _Work(
                    write.lane, {"written": (name,)}, self._disk_seconds(blocks), True, "", ends,
                    {"not_written": (name,)},
                )
            )  # fmt: skip
        for store in step.stores:
            name, blocks = store.object.name, sum(part.count for part in store.blocks)
            ends = tuple((part.extent, part.start + part.count) for part in store.blocks)
            seconds = STORE_ACCESS_SECONDS + PARALLEL_WRITES * blocks * self._store_block_seconds
            work.append(
                _Work(store.lane, {"stored": (name,)}, seconds, True, name, ends, {"not_stored": (name,)})
            )
        if any(work):
            self._clock.at(at, self._add, [one for one in work if one is not None])

    def look_up(self, lookup: StoreLookup, now: float) -> None:
        """Answer which objects are there."""
        there = 0
        while there < len(lookup.objects) and lookup.objects[there] in self._stored:
            there += 1
        # A rank asks for the first object, then for the last, and then searches by bisection.
        asked = (
            1 if there == 0 else 2 if there == len(lookup.objects) else 2 + len(lookup.objects).bit_length()
        )
        fields = {"looked_up": ((lookup.number, there),)}
        self._store_reads[lookup.lane].add(
            _Work(lookup.lane, fields, asked * STORE_ACCESS_SECONDS, due=-inf), now
        )

    # --- internals ----------------------------------------------------------------------------------

    @property
    def _store_block_seconds(self) -> float:
        return self._core.config.store_block_seconds or 0.0

    def _disk_seconds(self, blocks: int) -> float:
        figures = self._core.config.disk_tier
        return 0.0 if figures is None else figures.access_seconds + blocks * figures.read_seconds_per_block

    def _extents(self, step: Step) -> Iterable[tuple[HostLoad, int]]:
        """Yield the loads of a step with their extents, which are numbered as ranks number them (`HostLedger`)."""
        following = self._next_extent
        for load in step.loads:
            if load.count:
                yield load, following[load.lane]
                following[load.lane] += 1
        for change in _changes(step):
            for eviction in change.evictions:
                following[eviction.lane] += len(eviction.offloads)

    def _read(self, load: HostLoad, extent: int) -> _Work | None:
        """Return the work of a load; None if it comes from the device or from another replica."""
        if load.last >= 0 or load.ticket:
            return None
        if not load.is_stored:
            seconds = self._disk_seconds(load.count)
        else:
            seconds = STORE_ACCESS_SECONDS + PARALLEL_READS * load.count * self._store_block_seconds
        return _Work(
            load.lane,
            {"loaded": ((extent, seconds),)},
            seconds,
            object="" if not load.is_stored else load.file,
            due=load.due,
        )

    def _add(self, works: list[_Work], now: float) -> None:
        for work in works:
            writes, reads = (
                (self._store_writes, self._store_reads)
                if work.object
                else (self._disk_writes, self._disk_reads)
            )
            (writes if work.is_write else reads)[work.lane].add(work, now)

    def _seconds(self, work: _Work) -> float:
        """Return how long some work takes that begins now: an object that is there already is not written again."""
        return STORE_ACCESS_SECONDS if work.is_write and work.object in self._stored else work.seconds

    def _ended(self, work: _Work, now: float) -> None:
        fields = work.called_off if work.is_off else work.fields
        if work.is_write and work.object and not work.is_off:
            if work.object in self._stored:
                fields = fields | {"found_stored": fields["stored"]}
            self._stored.add(work.object)
        self._report(work.lane, fields, now)

    def _report(self, lane: int, fields: dict[str, Any], now: float) -> None:
        for rank in self._core.config.topology.ranks_of_lane(lane):
            self._deliver(DiskReport(rank, lane, self._core.epoch, **fields), now)


def _changes(step: Step) -> Iterable[Grow | Admit]:
    """Yield what evicts blocks, in the order in which ranks carry it out."""
    yield from step.grows
    yield from step.admits


def _drops(step: Step) -> Iterable[tuple[int, tuple[HostDrop, ...]]]:
    """Yield what host tiers drop with a step, with the lane of each."""
    for load in step.loads:
        yield load.lane, load.drops
    for change in _changes(step):
        for eviction in change.evictions:
            yield eviction.lane, eviction.drops
