"""Reads KV blocks of other replicas into the host tier of a rank, on a thread of its own.

Steps hand over which blocks of a ticket go to which host blocks (`medha.kv.lane_replay`), and each rank reads its part from
the same rank of the other replica (`peer_server`). The thread reports its results in the same form as reads from files.
Bytes reach a host block only after their checksum, or the tag of their encryption, was verified. Host blocks that are
being read into keep their owner until all ranks have reported.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import zmq
from isal.isal_zlib import crc32

from medha.api.kv_cache_spec import PeerPlane
from medha.kv.lane_replay import HostTierWork, ReadBlocks
from medha.wire.messages import DiskReport, PeerFigures
from medha_links.key_files import KeyPair
from medha_links.sockets import TOKENS_FRAME_BYTES, connect
from medha_worker.model.disk_blocks import CalledOff, place_rows
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import Rows
from medha_worker.rank.peer_plane import PlaneFailed, plane
from medha_worker.rank.peer_server import PIECE_BYTES, UNKNOWN, PeerServer, piece_bytes, pieces_of
from medha_worker.rank.sealed_bytes import NotSealed, SealedTaking

SILENT_SECONDS = 3.0
"""Time without an answer after which the other replica counts as lost."""
UNKNOWN_SECONDS = 10.0
"""Time within which the other rank must know a ticket: there, the step that serves it may wait behind other steps."""
_AGAIN_SECONDS = 0.02
_IN_FLIGHT = 4
"""Questions that wait for an answer at a time, so that the network is never idle."""
_MOST_TICKETS = 256
_POLL_MILLISECONDS = 50
_PIECES_WITH_ANSWERS = 16
"""Pieces from one rank that come with answers, one after the other, before this is logged."""

_log = logging.getLogger("medha.peers")


class PeerFailed(Exception):
    """Another replica's rank does not give what its ticket offered."""


@dataclass(slots=True, eq=False)
class _Job:
    read: ReadBlocks
    report: DiskReport  # that names rank, lane and epoch
    is_off: bool = False


class PeerReader:
    """The thread of one rank that reads blocks of other replicas."""

    def __init__(
        self, host: HostBlocks, identity: str, clock: Callable[[], float], plane_name: PeerPlane = "sockets"
    ) -> None:
        """`clock` returns seconds; `identity` is a digest of all that the content of blocks depends on.

        Raises:
            PlaneFailed: the plane of this name cannot be opened.
        """
        self.host, self._identity, self._clock = host, identity, clock
        self._plane = plane(plane_name).taking(piece_bytes(host.block_bytes))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = KeyPair.new()
        self._ways = _WaysOfBytes()
        self._condition = threading.Condition()
        self._sources: OrderedDict[str, PeerFigures] = OrderedDict()  # by ticket
        self._jobs: deque[_Job] = deque()
        self._running: _Job | None = None
        self._report = DiskReport(0)
        self._send: Callable[[DiskReport], None] = lambda _: None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="medha-peer-reads", daemon=True)
        self._thread.start()

    # --- called by steps ------------------------------------------------------------------------------

    def begin_epoch(self, report: DiskReport, send: Callable[[DiskReport], None]) -> None:
        """Call off all work of earlier epochs; `send` may be called by another thread."""
        self.end_epoch()
        with self._condition:
            self._report, self._send = report, send

    def end_epoch(self) -> None:
        """Call off all work: the host blocks may get other owners."""
        with self._condition:
            for job in (*self._jobs, *([self._running] if self._running else [])):
                job.is_off = True
            self._jobs.clear()
            self._sources.clear()
            self._send = lambda _: None

    def learn(self, ticket: str, source: PeerFigures) -> None:
        """Note the address of the rank to which this one shows a ticket."""
        with self._condition:
            self._sources[ticket] = source
            while len(self._sources) > _MOST_TICKETS:
                self._sources.popitem(last=False)

    def submit(self, work: HostTierWork) -> None:
        """Hand over what a step reads from other replicas."""
        reads = [_Job(read, self._report) for read in work.reads if read.ticket]
        if reads:
            with self._condition:
                self._jobs += reads
                self._condition.notify()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until all reads have ended; return False if it takes longer. For tests."""
        with self._condition:
            return self._condition.wait_for(lambda: not (self._jobs or self._running), timeout_seconds)

    def close(self) -> None:
        """Call off all work and end the thread."""
        self.end_epoch()
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        self._context.term()
        self._plane.close()

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._running = None
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._closing or self._jobs)
                if self._closing:
                    return
                job = self._running = self._jobs.popleft()
                source = self._sources.get(job.read.ticket)
            extent, started = job.read.extent, self._clock()
            try:
                self._read(job, source)
            except CalledOff:
                continue
            except PeerFailed as error:
                _log.warning("KV of another replica could not be read, so it is computed: %s", error)
                with self._condition:  # further reads of the ticket would take as long to fail
                    self._sources.pop(job.read.ticket, None)
                self._tell(job, not_loaded=(extent,))
            except Exception:  # noqa: BLE001 - a bug of ours must not leave requests waiting
                _log.exception("KV of another replica could not be read")
                self._tell(job, not_loaded=(extent,))
            else:
                self._tell(job, loaded=((extent, self._clock() - started),))

    def _tell(self, job: _Job, **fields: object) -> None:
        with self._condition:
            if not job.is_off:
                self._send(replace(job.report, **fields))  # type: ignore[arg-type]

    @contextmanager
    def _guard(self, job: _Job) -> Iterator[None]:
        """Hold the lock, if the host blocks of a job are still its own."""
        with self._condition:
            if job.is_off:
                raise CalledOff
            yield

    def _read(self, job: _Job, source: PeerFigures | None) -> None:
        if source is None:
            raise PeerFailed("nobody has said where to show its ticket, or a read with it has failed")
        if source.identity != self._identity:
            raise PeerFailed(f"the blocks at {source.endpoint} are those of another model, grid or version")
        try:
            opened = connect(
                self._context,
                source.endpoint,
                secrets.token_bytes(8).replace(b"\0", b"\1"),
                self._keys,
                source.public_key.encode(),
                largest_frame_bytes=max(TOKENS_FRAME_BYTES, 2 * self.host.block_bytes),
            )
        except zmq.ZMQError as error:
            raise PeerFailed(f"{source.endpoint:.80} is no place to connect to: {error}") from error
        sealed: SealedTaking | None = None
        try:
            if source.bytes_endpoint and not self._plane.name:
                sealed = self._connect_sealed(source.bytes_endpoint)
            place_rows(
                self.host,
                job.read.slots,
                max(1, PIECE_BYTES // self.host.block_bytes),
                self._pieces(job, opened.socket, sealed, source),
                lambda: self._guard(job),
            )
        finally:
            opened.close(0)
            if sealed:
                sealed.close()

    def _connect_sealed(self, endpoint: str) -> SealedTaking | None:
        """Return a plain socket for encrypted bytes; None if this is no place to connect to, so that they come with answers."""
        try:
            return SealedTaking(self._context, endpoint, piece_bytes(self.host.block_bytes))
        except zmq.ZMQError:
            return None

    def _pieces(
        self, job: _Job, socket: zmq.Socket[bytes], sealed: SealedTaking | None, source: PeerFigures
    ) -> Iterator[Rows]:
        """Yield the blocks of a job in order, verified, a few at a time.

        Raises:
            PeerFailed: they do not come, or are not what was sent.
        """
        read, where = job.read, source.endpoint
        total = sum(length for _, length in read.slots)
        pieces = pieces_of(total, self.host.block_bytes)
        known_by = self._clock() + UNKNOWN_SECONDS
        asked: deque[tuple[int, int]] = deque()
        is_known = False

        def ask(start: int, count: int) -> None:
            question = {
                "ticket": read.ticket, "identity": self._identity, "start": read.start + start, "count": count,
                "plane": self._plane.name, "sealed_to": sealed.identity if sealed else "",
            }  # fmt: skip
            socket.send(json.dumps(question).encode())
            asked.append((start, count))

        for piece in islice(pieces, 1):  # the others follow once the ticket is good
            ask(*piece)
        while asked:
            start, count = asked.popleft()
            header, payload = self._received(job, socket, where)
            if not is_known and header.get("error") == UNKNOWN and self._clock() < known_by:
                self._wait(job, _AGAIN_SECONDS)
                ask(start, count)
                continue
            if "error" in header:
                raise PeerFailed(f"{where}: {header['error']!s:.200}")
            is_known = True
            for further in islice(pieces, _IN_FLIGHT - len(asked)):
                ask(*further)
            if header.get("start") != read.start + start:
                raise PeerFailed(f"{where} has answered with other blocks than were asked for")
            size_bytes = count * self.host.block_bytes
            key = header.get("sealed")
            if sealed:
                self._ways.note(source.bytes_endpoint, is_plain=isinstance(key, str))
            if sealed and isinstance(key, str):
                yield self._unsealed(job, sealed, key, size_bytes, where).reshape(count, -1)
                continue
            if isinstance(offered := header.get("offered"), dict):
                try:
                    payload = self._plane.take(offered, size_bytes)
                except PlaneFailed as error:
                    raise PeerFailed(f"{where}: {error!s:.200}") from error
            if len(payload) != size_bytes:
                raise PeerFailed(f"{where} has answered with other blocks than were asked for")
            rows = np.frombuffer(payload, dtype=np.uint8).reshape(count, -1)
            if header.get("checksums") != [crc32(row.data) for row in rows]:
                raise PeerFailed(f"{where}: a block does not match its checksum")
            yield rows

    def _unsealed(self, job: _Job, sealed: SealedTaking, key: str, size_bytes: int, where: str) -> Rows:
        """Return decrypted bytes that have come over the plain socket. Their tag detects more than checksums would."""
        until = self._clock() + SILENT_SECONDS
        try:
            while (taken := sealed.take(key, size_bytes, _POLL_MILLISECONDS)) is None:
                self._wait_until(until, job, where)
        except NotSealed as error:
            raise PeerFailed(f"{where}: {error}") from error
        return taken

    def _received(
        self, job: _Job, socket: zmq.Socket[bytes], where: str
    ) -> tuple[dict[str, object], memoryview]:
        until = self._clock() + SILENT_SECONDS
        while not socket.poll(_POLL_MILLISECONDS):
            self._wait_until(until, job, where)
        try:
            text, payload = socket.recv_multipart(copy=False)
            header = json.loads(text.bytes)
        except ValueError as error:
            raise PeerFailed(f"{where} has answered with what is no answer: {error}") from error
        if not isinstance(header, dict):
            raise PeerFailed(f"{where} has answered with what is no answer")
        return header, payload.buffer

    def _wait_until(self, until: float, job: _Job, where: str) -> None:
        """Raise if the job was called off, or if it is too late to go on waiting for another rank."""
        self._wait(job, 0.0)
        if self._clock() >= until:
            raise PeerFailed(f"{where} has not answered for {SILENT_SECONDS:g} s")

    def _wait(self, job: _Job, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: job.is_off or self._closing, seconds)
            if job.is_off:
                raise CalledOff


class _WaysOfBytes:
    """Logs once for each plain socket whether bytes come through it, or with the answers because it cannot be reached."""

    def __init__(self) -> None:
        self._with_answers = Counter[
            str
        ]()  # endpoint -> pieces since one came through the plain socket there
        self._logged: dict[str, bool] = {}  # endpoint -> True: they come through it

    def note(self, endpoint: str, *, is_plain: bool) -> None:
        """Note how a piece came from a rank whose plain socket is at `endpoint`.

        The first pieces may come with the answers, because they were asked for before the plain socket was connected.
        """
        if len(self._with_answers) > _MOST_TICKETS:
            self._logged.clear()
            self._with_answers.clear()
        self._with_answers[endpoint] = 0 if is_plain else self._with_answers[endpoint] + 1
        logged = self._logged.get(endpoint)
        if is_plain and logged is not True:
            self._logged[endpoint] = True
            _log.info("KV of other replicas comes encrypted by AES-GCM from %s", endpoint)
        elif self._with_answers[endpoint] >= _PIECES_WITH_ANSWERS and logged is not False:
            self._logged[endpoint] = False
            _log.warning(
                "The last %d pieces of KV of another replica came over CURVE, more slowly, and none through its plain socket at %s. "
                "Check that network policies and firewalls open this port to the pods of other replicas.",
                self._with_answers[endpoint],
                endpoint,
            )


@dataclass(frozen=True)
class PeerBlocks:
    """Both directions of a rank's hand-overs."""

    server: PeerServer
    reader: PeerReader

    def end_epoch(self) -> None:
        """Void all tickets, and call off all reads."""
        self.server.end_epoch()
        self.reader.end_epoch()

    def close(self) -> None:
        """End both threads."""
        self.reader.close()
        self.server.close()


def peer_blocks(
    endpoint: str, host: HostBlocks, identity: str, plane_name: PeerPlane, bytes_endpoint: str = ""
) -> PeerBlocks:
    """Begin to give and take blocks; over sockets if the plane of this name cannot be opened here.

    Raises:
        zmq.ZMQError: an endpoint cannot be bound.
    """
    try:
        blocks = _over(plane_name, endpoint, host, identity, bytes_endpoint)
    except PlaneFailed as error:
        _log.warning(
            "KV goes to and comes from other replicas over sockets, not over %s: %s", plane_name, error
        )
        return _over("sockets", endpoint, host, identity, bytes_endpoint)
    if plane_name != "sockets":
        _log.info("KV goes to and comes from other replicas over %s", plane_name)
    return blocks


def _over(
    plane_name: PeerPlane, endpoint: str, host: HostBlocks, identity: str, bytes_endpoint: str
) -> PeerBlocks:
    """Open both directions over one plane.

    Raises:
        PlaneFailed: an end of the plane cannot be opened.
        zmq.ZMQError: an endpoint cannot be bound.
    """
    reader = PeerReader(host, identity, time.perf_counter, plane_name)
    try:
        return PeerBlocks(PeerServer(endpoint, host, identity, plane_name, bytes_endpoint), reader)
    except BaseException:
        reader.close()
        raise
