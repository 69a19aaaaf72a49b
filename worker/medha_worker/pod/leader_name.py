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

LOOKUP_SECONDS = 2.0
LOG_SECONDS = 10.0

_log = logging.getLogger("medha.pod")


class LeaderName:
    """Looks up the leader's name, and logs the result, for as long as a part of the pod waits for the leader."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._pending = Event()
        Thread(target=self._run, name="leader", daemon=True).start()

    def look_up(self, pending: bool) -> None:
        """Set whether a part of this pod waits for the leader now."""
        if pending:
            self._pending.set()
        else:
            self._pending.clear()

    def _run(self) -> None:
        reported, logged_at, since = "", float("-inf"), time.monotonic()
        while True:
            if not self._pending.is_set():
                reported = ""
                self._pending.wait()
                since = time.monotonic()
                time.sleep(LOOKUP_SECONDS)  # a leader that answers within that time needs no log line
                continue
            found, now = looked_up(self._host), time.monotonic()
            if found != reported or now - logged_at >= LOG_SECONDS:
                reported, logged_at = found, now
                _log.info("waiting for the leader since %.0f s: %s", now - since, found)
            time.sleep(LOOKUP_SECONDS)


def looked_up(host: str) -> str:
    """Return, as text, the addresses of a name, or why it does not resolve."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return f"{host} does not resolve yet ({error.strerror or error})"
    return f"{host} is {', '.join(sorted(found))}, which does not answer yet"
