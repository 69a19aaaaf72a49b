"""DNS lookups of the leader's name, for log lines about what a pod waits for.

The name is in DNS only once the leader's pod has an address, which may be long after this pod has started.
ZeroMQ resolves the name by itself whenever it connects; the lookups here, in a separate thread, only log the
state.
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
    """Looks up a name, and logs the result, for as long as it is wanted."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._wanted = Event()
        Thread(target=self._ask, name="leader", daemon=True).start()

    def want(self, wanted: bool) -> None:
        """Set whether a part of this pod waits for the leader now."""
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
                time.sleep(ASK_SECONDS)  # a leader that answers within that time needs no log line
                continue
            found, now = looked_up(self._host), time.monotonic()
            if found != told or now - told_at >= TELL_SECONDS:
                told, told_at = found, now
                _log.info("waiting for the leader since %.0f s: %s", now - since, found)
            time.sleep(ASK_SECONDS)


def looked_up(host: str) -> str:
    """Return, as text, the addresses of a name, or why it does not resolve."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"{host} does not resolve yet ({error.strerror or error})"
    return f"{host} is {', '.join(sorted(found))}, which does not answer yet"
