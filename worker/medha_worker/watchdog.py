"""What shows that this process gets on: a thread that beats, and judges the main loop that it speaks for.

A process that was stopped, or whose machine is gone, falls silent: its supervisor kills it and starts it again. One whose
main loop hangs beats on, so that its own watchdog has to end it: what does not return cannot be mended from inside.
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

from medha_worker.part_state import PartState

BEAT_SECONDS = 1.0
AWAY_SECONDS = 3.0  # between two beats: then the whole process stood still, and not its main loop alone

_log = logging.getLogger("medha.watchdog")


class Promise:
    """Until when the main loop has promised to be back, and from what."""

    def __init__(self) -> None:
        self._until, self._doing = float("inf"), "starting"
        self._looked_at: float | None = None

    def renew(self, now: float, seconds: float, doing: str) -> None:
        """The main loop does something that takes no longer than this."""
        self._until, self._doing = now + seconds, doing

    def broken(self, now: float) -> str | None:
        """What the main loop does for longer than it has promised; time in which nobody looked does not count."""
        before, self._looked_at = self._looked_at, now
        if before is not None and now - before > AWAY_SECONDS:
            self._until += now - before
        return self._doing if now > self._until else None


class Watchdog:
    """Beats to the supervisor every second, as sd_notify(3) says, for as long as the main loop keeps its promises."""

    def __init__(self) -> None:
        self._promise = Promise()
        self._state: PartState | None = None
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)
        Thread(target=self._watch, daemon=True).start()

    def allow(self, seconds: float, doing: str) -> None:
        """Called by the main loop: it will call again within so many seconds, or this process is killed."""
        self._promise.renew(time.monotonic(), seconds, doing)

    def tell(self, state: PartState) -> None:
        """Called by the main loop: what it is at. Said at once if it is new, and with every beat."""
        if state == self._state:
            return
        self._state = state
        with _sender(wait_seconds=0) as sender:
            self._beat(sender)

    def _beat(self, sender: socket.socket) -> None:
        if self._address:
            state = self._state
            lines = [b"WATCHDOG=1"] if state is None else [b"WATCHDOG=1", state.line()]
            with suppress(OSError):  # a supervisor that is busy or gone: the parent's death ends us anyway
                sender.sendto(b"\n".join(lines), self._address)

    def _watch(self) -> None:
        with _sender(wait_seconds=1) as sender:
            while True:
                overdue = self._promise.broken(time.monotonic())
                if overdue is not None:
                    _log.critical("stuck in %s", overdue)
                    os.kill(os.getpid(), signal.SIGKILL)
                self._beat(sender)
                time.sleep(BEAT_SECONDS)


def _sender(wait_seconds: int) -> socket.socket:
    """A socket that waits so long for room in its receiver's queue: a flood of others' datagrams leaves none at once."""
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if wait_seconds:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", wait_seconds, 0))
    else:
        sender.setblocking(False)
    return sender
