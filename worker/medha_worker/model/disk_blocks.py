"""The disk tier of one rank: threads that copy KV blocks between the host tier and files.

The core decides which blocks go where (`medha.kv.disk_tier`), and `kv_files` has the files. Nothing here blocks a step: steps
hand over work, and the threads report what came of it. One thread reads, in the order of due times. It begins to read the
next file before it has copied the last piece of the one before. Another thread writes and deletes. So requests wait for reads,
but not for writes. The core does not have a file deleted while it is read.

Steps and threads share host blocks. A thread takes the lock to copy a few blocks from or to them. A step that drops
host blocks, to give them to others, takes it to call off the work that concerns them. So no bytes of later owners reach
a file, and no bytes of a file reach later owners.

A disk may have less space than the tier's size. Then the core lets the tier shrink. A lack of space does not count as a
failure, and is logged once in an epoch.

A disk may hang. A third thread watches the other two. If a job makes no progress for long, it switches the tier off, and
reports all work as not done.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace

from medha.kv.blocks import Run
from medha.kv.disk_tier import MOST_REPORTED_BYTES
from medha.kv.due_queue import DueQueue
from medha.kv.lane_replay import HostTierWork, ReadBlocks, WriteBlocks
from medha.kv.prefix_cache import hash_count
from medha.wire.messages import DiskFile, DiskReport, HostDrop
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import NO_SPACE, FileDamaged, FileRead, KvFiles, Rows, blocks_at_once

MOST_FAILURES = 8
"""Reads, writes or deletes in a row that fail before the disk is no longer used: each costs a write, or a request a wait."""
_HUNG_SECONDS = 30.0
"""Time without any progress after which the disk counts as hung."""
_WATCH_SECONDS = 0.5
_CLOSE_SECONDS = 2.0

_log = logging.getLogger("medha.disk")


class CalledOff(Exception):
    """The host blocks of some work have other owners."""


@dataclass(slots=True, eq=False)
class _Job:
    work: ReadBlocks | WriteBlocks | str | None  # a name: a file to delete; None: to report what is there
    report: DiskReport  # that names rank, lane and epoch
    is_off: bool = False
    moved_at: float = 0.0  # the time of its last progress
    is_abandoned: bool = False  # it was reported as not done


class DiskBlocks:
    """Files behind the host blocks of a rank, the threads that read and write them, and the one that watches these."""

    def __init__(
        self,
        files: KvFiles,
        host: HostBlocks,
        clock: Callable[[], float],
        fault: str = "",
        *,
        size_bytes: int,
        hung_seconds: float = _HUNG_SECONDS,
    ) -> None:
        """`clock` returns seconds. `fault` is the reason why the disk cannot be used, if it cannot.

        `size_bytes` is the size that the manifest asks for, which a warning names.
        """
        self._files, self.host, self._clock = files, host, clock
        self.fault, self._hung_seconds = fault, hung_seconds
        self._size_bytes = size_bytes
        self._has_warned = False  # of a lack of space, in this epoch
        self._piece_blocks = blocks_at_once(host.block_bytes)
        self._failures = Counter[str]()  # in a row, by what has failed
        self._condition = threading.Condition()
        self._reads: DueQueue[_Job] = DueQueue()
        self._others: DueQueue[_Job] = DueQueue()
        self._running: dict[str, _Job] = {}  # by thread
        # The read that comes next, unless a more urgent one arrives. Only the thread that reads touches it.
        self._begun: tuple[_Job, FileRead] | None = None
        self._report = DiskReport(0)
        self._key = ""  # of the epoch's hashes
        self._send: Callable[[DiskReport], None] = lambda _: None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(name, queue), name=name, daemon=True)
            for name, queue in (("medha-disk-reads", self._reads), ("medha-disk", self._others))
        ]
        self._watcher = threading.Thread(target=self._watch, name="medha-disk-watch", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()

    def kept_key(self) -> str:
        """Return the key of the hashes of the files that are there, hexadecimal; empty if there is none."""
        return "" if self.fault else self._files.kept_key()

    # --- called by steps ------------------------------------------------------------------------------

    def begin_epoch(self, report: DiskReport, key: str, send: Callable[[DiskReport], None]) -> None:
        """Call off all work of earlier epochs, and report which files of this key are there.

        `report` names rank, lane and epoch; `send` may be called by another thread.
        """
        self.end_epoch()
        with self._condition:
            self._report, self._send = report, send
            self._others.add(_Job(None, report))
            self._key = key
            self._has_warned = False
            self._condition.notify_all()

    def end_epoch(self) -> None:
        """Call off all work: the host blocks may get other owners."""
        with self._condition:
            for job in self._all_jobs():
                job.is_off = True
            self._reads.clear()
            self._others.clear()
            self._send = lambda _: None

    def drop(self, drops: Iterable[HostDrop]) -> None:
        """Call off the writes of host blocks that are about to get other owners."""
        keep = {drop.extent: drop.keep for drop in drops}
        if not keep:
            return
        with self._condition:
            for job in self._all_jobs():
                match job.work:
                    case WriteBlocks(extent=extent, first=first, slots=slots) if extent in keep:
                        job.is_off = job.is_off or first + sum(count for _, count in slots) > keep[extent]
                    case _:
                        pass

    def submit(self, work: HostTierWork) -> None:
        """Hand over the work of a step, whose copies have been made."""
        if not (work.reads or work.deletes or work.writes):
            return
        with self._condition:
            for read in work.reads:
                if not (read.ticket or read.is_stored):
                    self._reads.add(_Job(read, self._report), read.due)
            for name in work.deletes:
                self._others.add(_Job(name, self._report))
            for write in work.writes:
                self._others.add(_Job(write, self._report))
            self._condition.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all work is done; return False if it takes longer. For tests."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._all_jobs(), timeout_seconds)

    def close(self) -> None:
        """Call off all work and end the threads; one that hangs in the disk is left behind."""
        self.end_epoch()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in (self._watcher, *self._threads):
            thread.join(_CLOSE_SECONDS)
        if not any(thread.is_alive() for thread in self._threads):
            self._files.release()

    def _all_jobs(self) -> list[_Job]:
        return [*self._running.values(), *self._reads, *self._others]

    # --- the threads ----------------------------------------------------------------------------------

    def _run(self, name: str, queue: DueQueue[_Job]) -> None:
        while True:
            with self._condition:
                self._running.pop(name, None)
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closing or queue)
                if self._closing:
                    break
                job = self._running[name] = queue.pop()
                self._moved(job)
            try:
                self._do(job)
            except Exception:  # noqa: BLE001 - a bug of ours must not leave requests waiting
                _log.exception("the disk tier has failed")
                self._switch_off("an unexpected error, which the log of the rank has")
                if isinstance(job.work, ReadBlocks):
                    self._tell(job, not_loaded=(job.work.extent,))
        if queue is self._reads:
            self._discard_begun()  # here, so that nobody else waits if it hangs

    def _do(self, job: _Job) -> None:
        match job.work:
            case None:
                self._find(job)
            case ReadBlocks() as read:
                self._read(job, read)
            case WriteBlocks() as write:
                self._write(job, write)
            case str() as name:
                if not self.fault:
                    try:
                        self._files.delete(name)
                    except OSError as error:
                        self._failed("deletes", f"{name} cannot be deleted: {error}")
                    else:
                        self._failures["deletes"] = 0

    def _tell(self, job: _Job, **fields: object) -> None:
        with self._condition:
            if job.is_abandoned or (job.is_off and not isinstance(job.work, WriteBlocks)):
                return
            self._send(replace(job.report, **fields))  # type: ignore[arg-type]

    def _failed(self, kind: str, detail: str) -> None:
        _log.warning("the disk tier goes on without: %s", detail)
        with self._condition:
            self._failures[kind] += 1
            if self._failures[kind] >= MOST_FAILURES:
                self._switch_off(
                    f"{self._failures[kind]} {kind} in a row have failed; the last one: {detail}"
                )

    def _found_no_space(self, detail: str) -> None:
        """Warn once that the disk has less space than the tier's size."""
        if self._has_warned:
            _log.debug("no space: %s", detail)
            return
        self._has_warned = True
        folder = self._files.directory
        try:
            held = f"{self._files.held_bytes()} bytes"
        except OSError as error:
            held = f"an unknown size ({error})"
        _log.warning(
            "the disk tier shrinks to what fits: %s has no space for another file beside this rank's files of %s, and "
            "kvCache.tiers.disk.size asks for %d bytes of each rank; from now on, the files make room there that were used least "
            "recently. Make the volume larger, or the size smaller (%s)",
            folder, held, self._size_bytes, detail,
        )  # fmt: skip

    def _switch_off(self, reason: str) -> None:
        """Use the disk no longer, and report that in this epoch, even if work of an earlier one shows it."""
        with self._condition:
            if not self.fault:
                _log.error("the disk tier is off: %s", reason)
                self.fault = reason
            self._send(replace(self._report, fault=self.fault[:500]))

    def _find(self, job: _Job) -> None:
        """Report the files that are there."""
        found: list[DiskFile] = []
        size = files = blocks = 0
        try:
            if not self.fault:
                self._files.acquire()
                self._files.keep_key(self._key)
                for file in self._files.scan(lambda: self._moved(job)):
                    found.append(file)
                    files, blocks = files + 1, blocks + hash_count(file.hashes)
                    size += len(file.hashes)
                    if size >= MOST_REPORTED_BYTES:
                        self._tell(job, found=tuple(found))
                        found, size = [], 0
        except OSError as error:
            self._switch_off(f"{self._files.directory} cannot be used: {error}")
            return
        if self.fault:
            self._tell(job, fault=self.fault)
            return
        _log.info("the disk tier has found %d blocks in %d files", blocks, files)
        self._tell(job, found=tuple(found), found_all=True)

    def _read(self, job: _Job, read: ReadBlocks) -> None:
        if self.fault:
            self._tell(job, not_loaded=(read.extent,))
            return
        started = self._clock()
        try:
            with closing(self._begun_or_new(job, read)) as reading:
                rows = reading.rows(on_last=self._begin_next)
                place_rows(self.host, read.slots, self._piece_blocks, rows, lambda: self._guard(job))
        except CalledOff:
            return
        except (FileDamaged, OSError, ValueError, KeyError, TypeError) as error:
            self._tell(job, not_loaded=(read.extent,), damaged=(read.file,))
            self._failed("reads", f"{read.file} cannot be read: {error}")
            return
        self._failures["reads"] = 0
        self._tell(job, loaded=((read.extent, self._clock() - started),))

    def _begun_or_new(self, job: _Job, read: ReadBlocks) -> FileRead:
        """Return the read of a job, which may have begun ahead of its turn."""
        if self._begun is not None and self._begun[0] is job:
            (_, reading), self._begun = self._begun, None
            return reading
        self._discard_begun()
        return self._begin(read)

    def _begin_next(self) -> None:
        """Begin the read that comes next in the queue, if there is one."""
        with self._condition:
            job = None if self.fault else self._reads.first()
        if job is not None and isinstance(job.work, ReadBlocks):
            self._begun = job, self._begin(job.work)

    def _begin(self, read: ReadBlocks) -> FileRead:
        return self._files.begin(read.file, read.start, sum(blocks for _, blocks in read.slots))

    def _discard_begun(self) -> None:
        """Close the read that was begun ahead of its turn, if there is one."""
        if self._begun is not None:
            self._begun[1].close()
            self._begun = None

    def _moved(self, job: _Job) -> None:
        job.moved_at = self._clock()

    @contextmanager
    def _guard(self, job: _Job) -> Iterator[None]:
        """Hold the lock, if the host blocks of a job are still its own."""
        with self._condition:
            if job.is_off:
                raise CalledOff
            self._moved(job)
            yield

    def _write(self, job: _Job, write: WriteBlocks) -> None:
        name = write.file.name
        if self.fault:
            self._tell(job, not_written=(name,))
            return

        def pieces() -> Iterator[Rows]:
            for slot, count in run_pieces(write.slots, self._piece_blocks):
                with self._condition:
                    if job.is_off:
                        raise CalledOff
                    self._moved(job)
                    rows = self.host.rows(slot, count)
                yield rows

        try:
            self._files.write(write.file, pieces())
        except CalledOff:
            self._tell(job, not_written=(name,))
        except OSError as error:
            detail = f"{name} cannot be written: {error}"
            if error.errno in NO_SPACE:
                self._tell(job, not_written=(name,), no_space=(name,))
                self._found_no_space(detail)
            else:
                self._tell(job, not_written=(name,))
                self._failed("writes", detail)
        else:
            self._failures["writes"] = 0
            self._tell(job, written=(name,))

    # --- the thread that watches ----------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._closing, _WATCH_SECONDS):
                    return
                late = self._clock() - self._hung_seconds
                if all(job.moved_at > late for job in self._running.values()):
                    continue
                stuck = self._all_jobs()
                self._reads.clear()
                self._others.clear()
                for job in stuck:
                    if not job.is_abandoned:
                        self._abandon(job)

    def _abandon(self, job: _Job) -> None:
        """Report that a job of a disk that hangs was not done. From then on, it neither touches host blocks nor reports."""
        self._switch_off(f"nothing has come of a file for {self._hung_seconds:g} s")
        match job.work:
            case ReadBlocks(extent=extent):
                self._tell(job, not_loaded=(extent,))
            case WriteBlocks(file=file):
                self._tell(job, not_written=(file.name,))
            case _:
                pass
        job.is_off = job.is_abandoned = True


def place_rows(
    host: HostBlocks,
    slots: Iterable[Run],
    piece_blocks: int,
    pieces: Iterator[Rows],
    guard: Callable[[], AbstractContextManager[None]],
) -> None:
    """Copy blocks that come in `pieces` to host blocks `slots`, in order and at most `piece_blocks` at a time.

    `guard` holds the lock of whoever may give these host blocks to others.

    Raises:
        CalledOff: they have got other owners, as `guard` says.
    """
    waiting: list[Rows] = []
    for slot, count in run_pieces(slots, piece_blocks):
        taken = 0
        while taken < count:
            rows = waiting.pop() if waiting else next(pieces)
            blocks = min(len(rows), count - taken)
            with guard():
                host.put_rows(slot + taken, rows[:blocks])
            taken += blocks
            if blocks < len(rows):
                waiting.append(rows[blocks:])


def run_pieces(runs: Iterable[Run], most: int) -> Iterator[Run]:
    """Cut runs into pieces of at most `most` blocks."""
    for first, length in runs:
        for at in range(first, first + length, most):
            yield at, min(most, first + length - at)
