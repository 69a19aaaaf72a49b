"""A rank's place at which ranks of other replicas read KV blocks of its host tier.

A step names the host blocks that a *ticket* is good for, and voids it later (`medha.kv.lane_replay`). A rank of another
replica asks for some of these blocks, in the order in which the ticket has them, and gets their bytes and a CRC-32 of each.
The ticket is a random number which only the two replicas know, so who shows it may read. Whoever connects must also know
the public key of the socket, and all that is sent is encrypted.

Steps and the thread that answers share host blocks: the thread holds the lock while it copies some, and a step takes it to
void a ticket before its blocks get other owners. So nobody reads bytes of later owners.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import zmq
from isal.isal_zlib import crc32

from medha.api.kv_cache_spec import PeerPlane
from medha.kv.blocks import Run, cut_runs
from medha.kv.lane_replay import ServeBlocks
from medha.wire.messages import PeerFigures
from medha_links.key_files import KeyPair
from medha_links.sockets import bind
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import Rows
from medha_worker.rank.peer_plane import plane
from medha_worker.rank.sealed_bytes import SealedGiving

PIECE_BYTES = 4 * 2**20
"""Most bytes of one answer, unless a block is larger. A step that voids a ticket may wait while so many are copied."""
UNKNOWN = "unknown"
"""Error of an answer to a ticket that is not good yet, or no longer."""
_REQUEST_BYTES = 4096
_POLL_MILLISECONDS = 100

_log = logging.getLogger("medha.peers")


class PeerServer:
    """The socket and the plane of one rank, the tickets that are good there, and the thread that answers."""

    def __init__(
        self,
        endpoint: str,
        host: HostBlocks,
        identity: str,
        plane_name: PeerPlane = "sockets",
        bytes_endpoint: str = "",
    ) -> None:
        """Bind the endpoints; `identity` is a digest of all that the content of blocks depends on.

        Without `bytes_endpoint`, no bytes go over a plain socket.

        Raises:
            PlaneFailed: the plane of this name cannot be opened.
            zmq.ZMQError: an endpoint cannot be bound.
        """
        self._host, self._identity = host, identity
        self._plane_name = plane_name
        self._plane = plane(plane_name).giving(piece_bytes(host.block_bytes))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = KeyPair.new()
        self._sealed: SealedGiving | None = None
        try:
            self._opened = bind(
                self._context, endpoint, keys, largest_frame_bytes=_REQUEST_BYTES, admits_all=True
            )
            if bytes_endpoint:
                self._sealed = SealedGiving(self._context, bytes_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._plane.close()
            raise
        bound = self._opened.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.figures = PeerFigures(
            bound, keys.public.decode(), identity, self._sealed.endpoint if self._sealed else ""
        )
        self._lock = threading.Lock()
        self._tickets: dict[str, tuple[Run, ...]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="medha-peers", daemon=True)
        self._thread.start()

    # --- called by steps ------------------------------------------------------------------------------

    def void(self, tickets: Iterable[str]) -> None:
        """Let nobody read what these tickets were good for; their blocks may get other owners."""
        with self._lock:
            for ticket in tickets:
                self._tickets.pop(ticket, None)

    def serve(self, serves: Iterable[ServeBlocks]) -> None:
        """Let holders of these tickets read their blocks, whose content is there."""
        with self._lock:
            self._tickets.update((one.ticket, one.slots) for one in serves)

    def end_epoch(self) -> None:
        """Void all tickets."""
        with self._lock:
            self._tickets.clear()

    def close(self) -> None:
        """Void all tickets and end the thread."""
        self.end_epoch()
        self._closing = True
        self._thread.join()
        self._opened.close(0)
        if self._sealed:
            self._sealed.close()
        self._context.term()
        self._plane.close()

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        socket = self._opened.socket
        while not self._closing:
            self._opened.connections.take()  # nobody else reads them
            if not socket.poll(_POLL_MILLISECONDS):
                continue
            try:
                peer, *frames = socket.recv_multipart()
                answer, payload = self._answer(frames)
                with suppress(zmq.ZMQError):  # it has gone
                    socket.send_multipart([peer, json.dumps(answer).encode(), payload], copy=False)
            except Exception:  # noqa: BLE001 - whatever was sent, others are answered
                _log.exception("a question of another replica's rank could not be answered")

    def _answer(self, frames: list[bytes]) -> tuple[dict[str, Any], memoryview]:
        """Return the answer to a question, and the bytes of blocks; without any if there is an error."""
        nothing = memoryview(b"")
        try:
            (text,) = frames
            asked = json.loads(text)
            ticket, identity = str(asked["ticket"]), asked["identity"]
            start, count = int(asked["start"]), int(asked["count"])
        except (ValueError, KeyError, TypeError):
            return {"error": "this is no question"}, nothing
        number: dict[str, Any] = {"start": start}
        if identity != self._identity:
            return number | {"error": "the blocks here are those of another model, grid or version"}, nothing
        if not 0 < count <= max(1, PIECE_BYTES // self._host.block_bytes) or start < 0:
            return number | {"error": f"{count} blocks from {start} on are no piece"}, nothing
        with self._lock:
            runs = self._tickets.get(ticket)
            if runs is None:
                return number | {"error": UNKNOWN}, nothing
            runs = tuple(cut_runs(list(runs), start, start + count))
            found = self._rows(runs)
        if len(found) != count:
            return number | {"error": f"the ticket has no blocks {start}+{count}"}, nothing
        if self._sealed and (key := self._sealed.send(str(asked.get("sealed_to", "")), found)):
            return number | {"sealed": key}, nothing
        number |= {"checksums": [crc32(row.data) for row in found]}
        offered = self._plane.offer(found) if asked.get("plane") == self._plane_name else None
        if offered is None:
            return number, found.reshape(-1).data
        return number | {"offered": offered[0]}, offered[1]

    def _rows(self, runs: tuple[Run, ...]) -> Rows:
        """Return a copy of host blocks; most pieces are one run, which is copied once."""
        rows = [self._host.rows(slot, length) for slot, length in runs]
        match rows:
            case []:
                return np.empty((0, 0), dtype=np.uint8)
            case [one]:
                return one
            case _:
                return np.concatenate(rows)


def piece_bytes(block_bytes: int) -> int:
    """Return the most bytes of one answer."""
    return max(PIECE_BYTES, block_bytes)


def pieces_of(count: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the size of each piece in which so many blocks are asked for."""
    most = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, count, most):
        yield start, min(most, count - start)
