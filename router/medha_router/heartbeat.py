"""Heartbeats that show the supervisor that this router is alive, as in sd_notify(3).

A thread sends one every second while the event loop has run recently. A loop that is busy for some seconds
keeps its connections; a process that was stopped falls silent at once, and is killed and restarted.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from contextlib import suppress
from threading import Thread

BEAT_SECONDS = 1.0
STUCK_SECONDS = 30.0  # for an event loop that does not run
_SEND_WAIT = struct.pack("ll", 1, 0)  # seconds and microseconds


class Heartbeat:
    """Sends heartbeats; `run` is a task of the event loop that is watched."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._address = os.environ.get("NOTIFY_SOCKET", "").replace("@", "\0", 1)

    async def run(self) -> None:
        Thread(target=self._beat, daemon=True).start()
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(BEAT_SECONDS)

    def _beat(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # Wait for room in the supervisor's queue, which datagrams of others may fill for a moment.
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_WAIT)
            while self._address:
                if time.monotonic() - self._turned_at < STUCK_SECONDS:
                    with suppress(OSError):  # a supervisor that is busy or gone
                        sender.sendto(b"WATCHDOG=1", self._address)
                time.sleep(BEAT_SECONDS)
