"""Heartbeats of parts: each sends a datagram every half second to its supervisor, as services do to systemd.

The protocol is sd_notify(3): the environment variable NOTIFY_SOCKET names a socket, `WATCHDOG=1` is a
heartbeat, and a line `X_MEDHA_STATE=` has the state of the part (`part_state`). The socket is a file that
only its owner may write to. The kernel reports the sender of a datagram, so a part needs no name, and no
other process can speak for it. The limit is longer until the first heartbeat, because the part imports its
libraries, perhaps from a slow disk.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread

import psutil

from medha.errors import ConfigInvalid
from medha_process.part_state import PartState, read_state

SOCKET_NAME = "notify"
"""Name of the socket's file in the run directory."""

SILENT_SECONDS = 5.0
"""Longest silence of a part that works; it beats twice a second, from a thread that does nothing else."""
STOPPED_SECONDS = 2.0
"""The same for a part that the kernel reports as stopped: no slow machine is reported so, and it stays stopped."""
IMPORT_SECONDS = 60.0
"""The same for a part that has sent no heartbeat yet: its imports take seconds, on a busy machine many seconds."""
IMPORT_FACTOR = 2.0
"""Limit until a first heartbeat, as a multiple of the longest time that any part has needed, if that is more."""
POLL_SECONDS = 0.5  # interval between checks for silent parts
DATAGRAM_BYTES = 8192
CLOSE_SECONDS = 5.0  # longest wait for the listening thread to end; it blocks on nothing else
AWAY_SECONDS = 3.0  # a longer gap between two checks: the supervisor or the whole machine stood still

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7)


class Beats:
    """The time of each process's last heartbeat, in seconds of any one clock."""

    def __init__(self) -> None:
        self._last_seen_at: dict[int, float] = {}  # by process: its last heartbeat, or its start
        self._not_yet_seen: set[int] = set()  # processes without a heartbeat since their start
        self._slowest_import_seconds = 0.0  # longest time from a start to the first heartbeat
        self._polled_at: float | None = None
        self._lock = Lock()  # between the listening thread and the one that checks

    def started(self, process_id: int, now: float) -> None:
        """Begin to watch a process."""
        with self._lock:
            self._last_seen_at[process_id] = now
            self._not_yet_seen.add(process_id)

    def seen(self, process_id: int, now: float) -> bool:
        """Record a heartbeat; return False if the process is not watched."""
        with self._lock:
            if process_id not in self._last_seen_at:
                return False
            if process_id in self._not_yet_seen:
                seconds = now - self._last_seen_at[process_id]
                self._slowest_import_seconds = max(self._slowest_import_seconds, seconds)
            self._last_seen_at[process_id] = now
            self._not_yet_seen.discard(process_id)
            return True

    def forget(self, process_id: int) -> None:
        """Stop watching a process that has ended or is about to."""
        with self._lock:
            self._last_seen_at.pop(process_id, None)
            self._not_yet_seen.discard(process_id)

    def silent(self, now: float, is_stopped: Callable[[int], bool] = lambda _: False) -> dict[int, float]:
        """Return the processes that have been silent for too long, each with the seconds of its silence.

        The limit is SILENT_SECONDS, or STOPPED_SECONDS if `is_stopped` is true, that is if the kernel reports the
        process as stopped. Before the first heartbeat it is IMPORT_SECONDS, or IMPORT_FACTOR times what the slowest
        part has needed so far: a replacement on a slow machine imports as slowly as the part before it. Call it every
        POLL_SECONDS.
        """
        with self._lock:
            was_away = self._polled_at is not None and now - self._polled_at > AWAY_SECONDS
            self._polled_at = now
            if was_away:  # heartbeats of that time may not have been read yet
                self._last_seen_at = dict.fromkeys(self._last_seen_at, now)
            import_seconds = max(IMPORT_SECONDS, IMPORT_FACTOR * self._slowest_import_seconds)
            quiet = {
                one: (now - last_seen_at, import_seconds if one in self._not_yet_seen else SILENT_SECONDS)
                for one, last_seen_at in self._last_seen_at.items()
            }
        return {
            one: seconds
            for one, (seconds, limit) in quiet.items()
            if seconds > limit or (seconds > STOPPED_SECONDS and is_stopped(one))
        }


def is_stopped(process_id: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP); False if a debugger holds it."""
    try:
        return bool(psutil.Process(process_id).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has ended
        return False


class Listener:
    """The socket that receives heartbeats, read by a separate thread.

    A datagram counts only if its sender has our user id and is a process that `beats` watches. No datagram
    can end the thread.
    """

    def __init__(self, directory: Path, beats: Beats, reported: Callable[[int, PartState], None]) -> None:
        """Bind the socket. `reported` is called with a process and its state, from the listener's thread.

        Raises:
            ConfigInvalid: no socket can be created in `directory`.
        """
        self._beats = beats
        self._on_state = reported
        self._path = directory.absolute() / SOCKET_NAME
        self.address = str(self._path)
        self._failure = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        os.fchmod(self._socket.fileno(), 0o600)  # Linux makes the file with this mode: unix(7)
        try:
            self._path.unlink(missing_ok=True)  # left by a supervisor that was killed
            self._socket.bind(self.address)
            self._file = _identity(self._path)
        except OSError as error:
            self._socket.close()
            raise ConfigInvalid(
                f"{self.address}: cannot be used as a socket ({error.strerror or error}); name a run directory that can be "
                "written, with a path of at most 100 bytes"
            ) from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = Thread(target=self._run, daemon=True, name="beats")
        self._thread.start()

    def problem(self) -> str:
        """Return why heartbeats can no longer be received; empty as long as they can."""
        if not self._thread.is_alive():
            return f"the thread that receives the parts' heartbeats has ended ({self._failure})"
        if _identity(self._path) != self._file:
            return f"{self.address}, the socket for the parts' heartbeats, was removed"
        return ""

    def close(self) -> None:
        if _identity(self._path) == self._file:
            self._path.unlink(missing_ok=True)
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            return  # its resources are freed when this process ends
        self._socket.close()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._wake, selectors.EVENT_READ)
                while all(key.fileobj is self._socket for key, _ in selector.select()):
                    self._receive()
        except Exception as error:  # noqa: BLE001 - whatever it is, `problem` reports it
            self._failure = f"{type(error).__name__}: {error}"

    def _receive(self) -> None:
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(DATAGRAM_BYTES, room, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data.startswith(b"WATCHDOG=1"):
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                process_id, user_id, _ = _CREDENTIALS.unpack(content[: _CREDENTIALS.size])
                if user_id != os.getuid() or not self._beats.seen(process_id, time.monotonic()):
                    return
                state = read_state(data)
                if state is not None:
                    self._on_state(process_id, state)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at `path`; None if there is none."""
    with suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None
