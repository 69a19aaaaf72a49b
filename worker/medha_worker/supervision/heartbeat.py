"""Which parts show that they live: each sends a datagram a second to its supervisor, as to systemd.

The protocol is sd_notify(3): the environment's NOTIFY_SOCKET names a socket, `WATCHDOG=1` says "I get on", and a line
`X_MEDHA_STATE=` says what the part is at (`part_state`). The
kernel tells who has sent a datagram, so a part needs no name, and no other process can speak for it. Until its first
sign of life a part has longer: it imports its libraries, perhaps from a slow disk.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable
from threading import Lock, Thread

import psutil

from medha_worker.part_state import PartState, read_state

SILENT_SECONDS = 5.0
"""A part that is silent for longer was stopped or hangs: it beats every second, from a thread that does nothing else."""
STOPPED_SECONDS = 2.0
"""The same for a part that the kernel calls stopped: no slow machine looks like that, and it does not go on by itself."""
IMPORT_SECONDS = 60.0
"""The same for a part that was never heard yet: its imports take seconds, on a busy machine many of them."""
LOOK_SECONDS = 1.0  # how often it is looked for silent parts
DATAGRAM_BYTES = 8192
AWAY_SECONDS = 3.0  # between two looks: then it was the supervisor, or the whole machine, that stood still

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7)


class Beats:
    """When each process was heard last, in seconds on any one clock."""

    def __init__(self) -> None:
        self._heard_at: dict[int, float] = {}  # or started
        self._unheard: set[int] = set()  # since they were started
        self._looked_at: float | None = None
        self._lock = Lock()  # between the thread that listens and the one that looks

    def started(self, process_id: int, now: float) -> None:
        """From here on it is watched; it may have been heard already."""
        with self._lock:
            if process_id not in self._heard_at:
                self._heard_at[process_id] = now
                self._unheard.add(process_id)

    def heard(self, process_id: int, now: float) -> None:
        with self._lock:
            self._heard_at[process_id] = now
            self._unheard.discard(process_id)

    def forget(self, process_id: int) -> None:
        """It has ended, or is about to."""
        with self._lock:
            self._heard_at.pop(process_id, None)
            self._unheard.discard(process_id)

    def silent(self, now: float, is_stopped: Callable[[int], bool] = lambda _: False) -> dict[int, float]:
        """Processes that were not heard for SILENT_SECONDS, or STOPPED_SECONDS, or IMPORT_SECONDS: for how many seconds.

        Call it every LOOK_SECONDS.

        `is_stopped` says of a process whether the kernel calls it so.
        """
        with self._lock:
            was_away = self._looked_at is not None and now - self._looked_at > AWAY_SECONDS
            self._looked_at = now
            if was_away:  # what was said meanwhile may not have been read yet
                self._heard_at = dict.fromkeys(self._heard_at, now)
            quiet = {
                one: (now - heard_at, IMPORT_SECONDS if one in self._unheard else SILENT_SECONDS)
                for one, heard_at in self._heard_at.items()
            }
        return {
            one: seconds
            for one, (seconds, limit) in quiet.items()
            if seconds > limit or (seconds > STOPPED_SECONDS and is_stopped(one))
        }


def is_stopped(process_id: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP); one that a debugger holds was not."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended
        return False


class Listener:
    """The socket that parts beat on, read by a thread of its own."""

    def __init__(self, beats: Beats, told: Callable[[int, PartState], None]) -> None:
        """`told` is called with a process and what it is at, from this listener's thread."""
        self._beats = beats
        self._told = told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"medha-{secrets.token_hex(8)}"
        self._socket.bind(f"\0{name}")  # in no file system, and gone with us
        self.address = f"@{name}"
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(DATAGRAM_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            if data == b"STOP":
                return
            if not data.startswith(b"WATCHDOG=1"):
                continue
            state = read_state(data)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    process_id, _, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                    self._beats.heard(process_id, time.monotonic())
                    if state is not None:
                        self._told(process_id, state)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"STOP", "\0" + self.address.removeprefix("@"))
        self._thread.join()
        self._socket.close()
