"""Heartbeats of a process: a thread that sends them and checks that the main loop makes progress.

A process that was stopped falls silent, so that its supervisor kills and restarts it. If only the main loop
hangs, the thread would still send heartbeats, so this watchdog kills the process: a call that does not return
cannot be fixed from inside.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import time
from contextlib import suppress
from threading import Thread

from medha_process.part_state import PartState

BEAT_SECONDS = 0.5
AWAY_SECONDS = 3.0  # a longer gap between two beats: the whole process stood still, not only its main loop

_log = logging.getLogger("medha.watchdog")


class Deadline:
    """The time by which the main loop must report again, and what it does until then."""

    def __init__(self) -> None:
        self._until, self._activity = float("inf"), "starting"
        self._polled_at: float | None = None

    def renew(self, now: float, seconds: float, activity: str) -> None:
        """Begin an activity of the main loop that takes at most `seconds`."""
        self._until, self._activity = now + seconds, activity

    def missed(self, now: float) -> str | None:
        """Return the overdue activity of the main loop, or None.

        Time in which the whole process stood still does not count.
        """
        before, self._polled_at = self._polled_at, now
        if before is not None and now - before > AWAY_SECONDS:
            self._until += now - before
        return self._activity if now > self._until else None


class Watchdog:
    """Sends heartbeats to the supervisor (sd_notify(3)) while the main loop is not overdue."""

    def __init__(self) -> None:
        self._deadline = Deadline()
        self._state: PartState | None = None
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        Thread(target=self._watch, daemon=True).start()

    def allow(self, seconds: float, activity: str) -> None:
        """Require that the main loop calls this again within `seconds`; otherwise this process is killed."""
        self._deadline.renew(time.monotonic(), seconds, activity)

    def report(self, state: PartState) -> None:
        """Report the state of the main loop: at once if it is new, and with every heartbeat."""
        if state == self._state:
            return
        self._state = state
        with _sender(wait_seconds=0) as sender:
            self._beat(sender)

    def _beat(self, sender: socket.socket) -> None:
        if self._address:
            state = self._state
            lines = [b"WATCHDOG=1"] if state is None else [b"WATCHDOG=1", state.line()]
            with suppress(OSError):  # the supervisor is busy or gone; this process ends with it anyway
                sender.sendto(b"\n".join(lines), self._address)

    def _watch(self) -> None:
        with _sender(wait_seconds=1) as sender:
            while True:
                overdue = self._deadline.missed(time.monotonic())
                if overdue is not None:
                    _log.critical("stuck in %s", overdue)
                    os.kill(os.getpid(), signal.SIGKILL)
                self._beat(sender)
                time.sleep(BEAT_SECONDS)


def _sender(wait_seconds: int) -> socket.socket:
    """Return a socket that waits up to `wait_seconds` for room in the receiver's queue.

    A flood of datagrams from others may leave no room at first.
    """
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if wait_seconds:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", wait_seconds, 0))
    else:
        sender.setblocking(False)
    return sender
