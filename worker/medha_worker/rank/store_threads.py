"""The threads of one rank that read and write objects of the store which replicas share.

The core decides which blocks go where (`medha.kv.store_tier`), and `kv_objects` has the objects. As with files
(`medha_worker.model.disk_blocks`), nothing here blocks a step: steps hand over work, and threads report what came of it. They
answer questions first, and then read in the order of due times. They hold the bytes of an object themselves while they talk to
the store, and take the lock only to copy them from or to host blocks.

A store may fail or hang for as long as it likes. After an error, work fails at once for some seconds. Work that takes far too
long is ended by a thread that watches the others: its report is sent, and whatever it may still read reaches no host block.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from medha.cost.tier_seconds import PARALLEL_READS
from medha.kv.due_queue import DueQueue
from medha.kv.lane_replay import HostTierWork, ReadBlocks, StoreBlocks
from medha.wire.messages import DiskReport, HostDrop, StoreLookup
from medha_worker.model.disk_blocks import CalledOff, place_rows, run_pieces
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import FileDamaged, blocks_at_once
from medha_worker.rank.kv_objects import KvObjects, ObjectMissing, StoreFailed

_WRITERS = 2
_REST_SECONDS = 2.0
"""Time after an error in which nothing is asked of the store; the controller leaves it alone for longer."""
_HUNG_SECONDS = 30.0
"""Time after which work is ended: no request to the store should take as long."""
_WATCH_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_MOST_EARLY = 64
REMAINS_SECONDS = 3600.0
"""Time without a change after which an unfinished file counts as left by a killed writer, and the interval between two searches.

A write takes seconds, or minutes where a volume hangs for a while.
"""

_log = logging.getLogger("medha.store")

Work = StoreLookup | ReadBlocks | StoreBlocks


@dataclass(slots=True, eq=False)
class _Job:
    work: Work
    report: DiskReport  # that names rank, lane and epoch
    is_off: bool = False  # its host blocks may have other owners
    is_reported: bool = False  # its report was sent
    began: float | None = None


class StoreThreads:
    """Objects behind the host blocks of a rank, and the threads that read and write them."""

    def __init__(
        self,
        objects: KvObjects,
        host: HostBlocks,
        clock: Callable[[], float],
        *,
        hung_seconds: float = _HUNG_SECONDS,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        """`clock` returns seconds."""
        self._objects, self.host, self._clock = objects, host, clock
        self._hung_seconds, self._rest_seconds = hung_seconds, rest_seconds
        self._piece_blocks = blocks_at_once(host.block_bytes)
        self._condition = threading.Condition()
        self._reads: DueQueue[_Job] = DueQueue()  # and lookups
        self._writes: DueQueue[_Job] = DueQueue()
        self._running: dict[threading.Thread, _Job | None] = {}
        self._early: list[StoreLookup] = []  # of an epoch that has not begun here
        self._report: DiskReport | None = None
        self._send: Callable[[DiskReport], None] = lambda _: None
        self._fault, self._rests_until = "", 0.0
        self._closing = False
        queues = [self._reads] * PARALLEL_READS + [self._writes] * _WRITERS
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name="medha-store", daemon=True)
            for queue in queues
        ]
        self._of = list(zip(self._threads, queues, strict=True))
        self._threads += [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (
                ("medha-store-watch", self._watch),
                ("medha-store-remains", self._delete_remains),
            )
        ]
        for thread in self._threads:
            thread.start()

    # --- called by steps ------------------------------------------------------------------------------

    def begin_epoch(self, report: DiskReport, key: str, send: Callable[[DiskReport], None]) -> None:
        """Call off all work of earlier epochs; hashes are of this key. `send` may be called by another thread.

        `report` names rank, lane and epoch.
        """
        self.end_epoch()
        with self._condition:
            self._objects.use_key(key)
            self._report, self._send = report, send
            early, self._early = self._early, []
            self._condition.notify_all()
        for lookup in early:
            self.look_up(lookup)

    def end_epoch(self) -> None:
        """Call off all work: the host blocks may get other owners."""
        with self._condition:
            for job in self._all_jobs():
                job.is_off = True
            self._reads.clear()
            self._writes.clear()
            self._report, self._send = None, lambda _: None

    def drop(self, drops: Iterable[HostDrop]) -> None:
        """Call off the writes of host blocks that are about to get other owners."""
        keep = {drop.extent: drop.keep for drop in drops}
        if not keep:
            return
        with self._condition:
            for job in self._all_jobs():
                if isinstance(job.work, StoreBlocks):
                    ends = job.work.extents
                    job.is_off = job.is_off or any(stop > keep.get(extent, stop) for extent, stop in ends)

    def look_up(self, lookup: StoreLookup) -> None:
        """Let a thread find out which objects are there."""
        with self._condition:
            if self._report is None or lookup.epoch > self._report.epoch:
                self._early = [*self._early, lookup][-_MOST_EARLY:]
            elif lookup.epoch == self._report.epoch and lookup.lane == self._report.lane:
                self._reads.add(_Job(lookup, self._report), -inf)
                self._condition.notify_all()

    def submit(self, work: HostTierWork) -> None:
        """Hand over the work of a step, whose copies have been made."""
        reads = [read for read in work.reads if read.is_stored]
        if not (reads or work.stores):
            return
        with self._condition:
            if self._report is not None:
                report = self._report
                for read in reads:
                    self._reads.add(_Job(read, report), read.due)
                for write in work.stores:
                    self._writes.add(_Job(write, report))
                self._condition.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all work is done; return False if it takes longer. For tests."""
        with self._condition:
            return self._condition.wait_for(lambda: not any(True for _ in self._all_jobs()), timeout_seconds)

    def close(self) -> None:
        """Call off all work and end the threads; those that hang in the store are left behind."""
        self.end_epoch()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        until = self._clock() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))

    def _all_jobs(self) -> Iterator[_Job]:
        yield from self._reads
        yield from self._writes
        yield from (job for job in self._running.values() if job is not None)

    # --- the threads ----------------------------------------------------------------------------------

    def _run(self, queue: DueQueue[_Job]) -> None:
        here = threading.current_thread()
        while True:
            with self._condition:
                self._running[here] = None
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closing or queue)
                if self._closing:
                    return
                job = self._running[here] = queue.pop()
                job.began = self._clock()
                fault = self._fault if job.began < self._rests_until else ""
            if fault:
                self._fail(job, fault)
                continue
            try:
                self._do(job)
            except CalledOff:
                self._fail(job, "")
            except StoreFailed as error:
                self._rest(str(error))
                self._fail(job, str(error))
            except ObjectMissing as error:
                _log.info("an object of the store has gone, so its KV is computed: %s", error)
                self._fail(job, "")
            except Exception:  # noqa: BLE001 - a bug of ours must not leave requests waiting
                _log.exception("the store tier has failed")
                self._fail(job, "an unexpected error, which the log of the rank has")

    def _do(self, job: _Job) -> None:
        match job.work:
            case StoreLookup(number=number, objects=objects):
                self._tell(job, looked_up=((number, self._there(objects)),))
            case ReadBlocks() as read:
                self._read(job, read)
            case StoreBlocks() as write:
                self._write(job, write)

    def _there(self, objects: Sequence[str]) -> int:
        """Return how many objects there are from the first on.

        A store deletes old objects first, and the beginning of a prompt is used most. So if the last object is there,
        all count. If it is not, bisection finds the first one that is missing. An object that is missing before that
        is noticed when it is read.
        """
        if not objects or not self._objects.has(objects[0]):
            return 0
        if self._objects.has(objects[-1]):
            return len(objects)
        low, high = 1, len(objects) - 1  # the first `low` are there, and number `high` is not
        while low < high:
            middle = (low + high) // 2
            if self._objects.has(objects[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _read(self, job: _Job, read: ReadBlocks) -> None:
        assert job.began is not None
        count = sum(blocks for _, blocks in read.slots)
        try:
            rows = self._objects.read(read.file, read.start, count)
        except FileDamaged as error:
            _log.warning("an object of the store is damaged, and is deleted: %s: %s", read.file, error)
            with suppress(StoreFailed):  # else it would never be written again
                self._objects.delete(read.file)
            self._fail(job, "")
            return
        place_rows(self.host, read.slots, self._piece_blocks, iter((rows,)), lambda: self._guard(job))
        self._tell(job, loaded=((read.extent, self._clock() - job.began),))

    @contextmanager
    def _guard(self, job: _Job) -> Iterator[None]:
        """Hold the lock, if the host blocks of a job are still its own."""
        with self._condition:
            if job.is_off:
                raise CalledOff
            yield

    def _write(self, job: _Job, write: StoreBlocks) -> None:
        name = write.object.name
        if self._objects.has(name):
            self._tell(job, stored=(name,), found_stored=(name,))
            return
        parts = []
        for slot, count in run_pieces(write.slots, self._piece_blocks):
            with self._guard(job):
                parts.append(self.host.rows(slot, count))
        self._objects.write(write.object, np.concatenate(parts))
        self._tell(job, stored=(name,))

    def _rest(self, fault: str) -> None:
        with self._condition:
            self._fault, self._rests_until = fault, self._clock() + self._rest_seconds
        _log.warning("the store has failed, and is left alone for a while: %s", fault)

    def _fail(self, job: _Job, fault: str) -> None:
        """Report that work was not done, because of an error of the store if there is a `fault`."""
        match job.work:
            case StoreLookup(number=number):
                self._tell(job, looked_up=((number, 0),), store_fault=fault[:500])
            case ReadBlocks(extent=extent):
                self._tell(job, not_loaded=(extent,), store_fault=fault[:500])
            case StoreBlocks(object=one):
                self._tell(job, not_stored=(one.name,), store_fault=fault[:500])

    def _tell(self, job: _Job, **fields: object) -> None:
        """Send the one report of a job. From then on, the job touches no host block, because they may get other owners."""
        with self._condition:
            if self._report is None or job.report.epoch != self._report.epoch or job.is_reported:
                return
            job.is_reported = job.is_off = True
            send = self._send
        # Without the lock: whoever sends may have to handle a `StoreLookup` that has arrived.
        send(replace(job.report, **fields))  # type: ignore[arg-type]

    # --- the thread that watches ----------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing, _WATCH_SECONDS)
                if self._closing:
                    return
                hung = self._hung()
            if hung:
                fault = f"nothing has come of a request for {self._hung_seconds:g} s"
                self._rest(fault)
                for job in hung:
                    self._fail(job, fault)

    def _hung(self) -> list[_Job]:
        """Return the jobs that take too long. If all threads of a queue hang, return the jobs that wait in it, too."""
        late = self._clock() - self._hung_seconds
        stuck = {
            thread
            for thread, job in self._running.items()
            if job and job.began is not None and job.began <= late
        }
        running = [job for thread in stuck if (job := self._running[thread]) is not None]
        found = [job for job in running if job.report is self._report and not job.is_reported]
        for queue in (self._reads, self._writes):
            if queue and all(thread in stuck for thread, its in self._of if its is queue):
                found += queue
                queue.clear()
        return found

    # --- the thread that deletes what killed writers have left ----------------------------------------

    def _delete_remains(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._report is not None)
                if self._closing:
                    return
            try:
                deleted = self._objects.delete_remains(REMAINS_SECONDS, lambda: not self._closing)
            except OSError as error:
                _log.warning("unfinished files of writers that were killed stay in the store: %s", error)
            else:
                if deleted:
                    _log.info("deleted %d unfinished files of writers that were killed", deleted)
            with self._condition:
                if self._condition.wait_for(lambda: self._closing, REMAINS_SECONDS):
                    return


def opened_within(open_store: Callable[[], KvObjects], seconds: float) -> tuple[KvObjects, str]:
    """Open a store, and return it with the key of its hashes. Wait no longer than `seconds` for a store that hangs.

    Raises:
        StoreFailed: it cannot be opened.
    """
    found: list[tuple[KvObjects, str] | StoreFailed] = []

    def run() -> None:
        try:
            objects = open_store()
            found.append((objects, objects.shared_key()))
        except StoreFailed as error:
            found.append(error)
        except Exception as error:  # noqa: BLE001 - it must not count as a store that does not answer
            _log.exception("the store cannot be opened")
            found.append(StoreFailed(f"an unexpected {type(error).__name__}, which the log of the rank has"))

    thread = threading.Thread(target=run, name="medha-store-open", daemon=True)
    thread.start()
    thread.join(seconds)
    match found:
        case [StoreFailed() as error]:
            raise error
        case [(objects, key)]:
            return objects, key
    raise StoreFailed(f"it has not answered for {seconds:g} s")
