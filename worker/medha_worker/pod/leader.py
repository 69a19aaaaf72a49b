"""Finding the leader's name: it stands in DNS only once its pod has an address, which may be long after ours started.

ZeroMQ asks again by itself whenever it connects; this asks as well, in a thread of its own, to say what it waits for.
"""

from __future__ import annotations

import logging
import socket
import time
from threading import Event, Thread

ASK_SECONDS = 2.0
TELL_SECONDS = 10.0

_log = logging.getLogger("medha.pod")


class LeaderName:
    """Looks a name up as long as it is wanted."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._wanted = Event()
        Thread(target=self._ask, name="leader", daemon=True).start()

    def want(self, wanted: bool) -> None:
        """Whether somebody waits for the leader now."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()

    def _ask(self) -> None:
        told, told_at, since = "", float("-inf"), time.monotonic()
        while True:
            if not self._wanted.is_set():
                told = ""
                self._wanted.wait()
                since = time.monotonic()
                time.sleep(ASK_SECONDS)  # who answers within that needs no words
                continue
            found, now = looked_up(self._host), time.monotonic()
            if found != told or now - told_at >= TELL_SECONDS:
                told, told_at = found, now
                _log.info("waiting for the leader since %.0f s: %s", now - since, found)
            time.sleep(ASK_SECONDS)


def looked_up(host: str) -> str:
    """In words, where a name leads."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"{host} does not resolve yet ({error.strerror or error})"
    return f"{host} is {', '.join(sorted(found))}, which does not answer yet"
