"""A plane on which KV blocks go through NIXL: a rank reads them out of registered memory of another one, by UCX.

The rank that gives copies the blocks of an answer to a place of its registered memory, and says where. The other one reads
them from there, and NIXL then reports to the first one that the place is free. Nothing but these places is registered, so nothing
else can be read. The rank that reads verifies checksums that came over encrypted sockets, so it notices bytes of another answer.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from medha_worker.model.kv_files import Rows
from medha_worker.rank.peer_plane import PlaneFailed

NAME = "nixl"
_PLACES = 8
"""Answers whose bytes wait to be read; further ones carry their bytes themselves."""
_FREE_SECONDS = 10.0
"""Time after which a place is free although nobody has read it: the rank that asked has gone."""
_READ_SECONDS = 3.0
_POLL_SECONDS = 0.0001
_MOST_GIVERS = 64

_log = logging.getLogger("medha.peers")


class _Agent:
    """An agent of NIXL with one piece of registered memory."""

    def __init__(self, size_bytes: int) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise PlaneFailed(f"the library nixl is not installed ({error}); install medha[nixl]") from error
        self.name = secrets.token_hex(8)
        self.memory = np.zeros(size_bytes, dtype=np.uint8)
        try:
            self.nixl = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
            self._registered = self.nixl.register_memory([(self.address, size_bytes, 0, "")], "DRAM")
            self.metadata: bytes = self.nixl.get_agent_metadata()
        except Exception as error:
            raise PlaneFailed(f"NIXL cannot be opened: {error}") from error

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered)


class NixlGiving:
    """The end of the rank that gives."""

    def __init__(self, piece_bytes: int) -> None:
        """Register memory for some answers of at most `piece_bytes` bytes.

        Raises:
            PlaneFailed: NIXL is not installed, or cannot be opened.
        """
        self._piece_bytes = piece_bytes
        self._agent = _Agent(_PLACES * piece_bytes)
        self._metadata = self._agent.metadata.hex()
        self._free = list(range(_PLACES))
        self._taken: dict[str, tuple[int, float]] = {}  # by the mark of an answer: its place, and until when

    def offer(self, rows: Rows, /) -> tuple[dict[str, Any], memoryview] | None:
        """Copy blocks to a free place, and say where it is; return None if there is none."""
        self._take_back()
        if not self._free:
            return None
        place, mark = self._free.pop(), secrets.token_hex(8)
        self._taken[mark] = place, time.monotonic() + _FREE_SECONDS
        begin = place * self._piece_bytes
        self._agent.memory[begin : begin + rows.size] = rows.reshape(-1)
        at = self._agent.address + begin
        offered = {
            "plane": NAME,
            "agent": self._agent.name,
            "metadata": self._metadata,
            "at": at,
            "mark": mark,
        }
        return offered, memoryview(b"")

    def close(self) -> None:
        """Deregister the memory, so that no rank can read it."""
        self._agent.close()

    def _take_back(self) -> None:
        read = [mark.decode() for marks in self._agent.nixl.get_new_notifs().values() for mark in marks]
        late = [mark for mark, (_, until) in self._taken.items() if until <= time.monotonic()]
        for mark in (*read, *late):
            place, _ = self._taken.pop(mark, (-1, 0.0))
            if place >= 0:
                self._free.append(place)


class NixlTaking:
    """The end of the rank that takes."""

    def __init__(self, piece_bytes: int) -> None:
        """Register memory for one answer of at most `piece_bytes` bytes.

        Raises:
            PlaneFailed: NIXL is not installed, or cannot be opened.
        """
        self.name = NAME
        self._piece_bytes = piece_bytes
        self._agent = _Agent(piece_bytes)
        self._givers: OrderedDict[str, str] = OrderedDict()  # by the name that answers give: NIXL's

    def take(self, offered: Mapping[str, Any], size_bytes: int, /) -> memoryview:
        """Read the bytes of an answer, which are good until the next call.

        After an error, all further bytes come with the answers, so nobody reads what NIXL may still write.

        Raises:
            PlaneFailed: they do not come within some seconds, or the answer makes no sense.
        """
        try:
            self._read(offered, size_bytes)
        except Exception as error:
            self.name = ""
            _log.warning(
                "KV of other replicas comes over sockets from now on, because NIXL has failed: %s", error
            )
            raise PlaneFailed(f"NIXL has failed: {error}") from error
        return self._agent.memory[:size_bytes].data

    def close(self) -> None:
        """Deregister the memory, so that no rank can read it."""
        self._agent.close()

    def _read(self, offered: Mapping[str, Any], size_bytes: int) -> None:
        agent, at, mark = self._agent.nixl, int(offered["at"]), str(offered["mark"]).encode()
        if not 0 < size_bytes <= self._piece_bytes:
            raise ValueError(f"{size_bytes} bytes are no piece")
        giver = self._giver(str(offered["agent"]), bytes.fromhex(offered["metadata"]))
        here = agent.get_xfer_descs([(self._agent.address, size_bytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(at, size_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", here, there, giver, mark)
        try:
            until = time.monotonic() + _READ_SECONDS
            state = agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() >= until:
                    raise TimeoutError(f"a read takes longer than {_READ_SECONDS:g} s")
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"a read has ended with {state}")
        finally:
            agent.release_xfer_handle(handle)

    def _giver(self, name: str, metadata: bytes) -> str:
        if name not in self._givers:
            found = self._agent.nixl.add_remote_agent(metadata)
            self._givers[name] = found.decode() if isinstance(found, bytes) else str(found)
            if len(self._givers) > _MOST_GIVERS:
                _, oldest = self._givers.popitem(last=False)
                self._agent.nixl.remove_remote_agent(oldest)
        return self._givers[name]
