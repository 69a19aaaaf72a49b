"""Finds the routers of a replica: the endpoints of its settings, with every address that their host names have.

In Kubernetes the host is the name of a headless Service, whose addresses are those of all routers' pods, ready or
not. Names are looked up again and again by a thread of their own, because a lookup may block for seconds.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from threading import Event, Thread

from medha_process.part_settings import RouterEndpoints

LOOKUP_SECONDS = 2.0
"""Seconds between two lookups of a host name."""

Addresses = Mapping[str, tuple[str, ...]]
"""Host name -> its IP addresses."""

_log = logging.getLogger("medha.controller")


def names(routers: Iterable[RouterEndpoints]) -> set[str]:
    """Return the host names that must be looked up."""
    return {one.host for one in routers if one.host and not _is_address(one.host)}


def located(routers: Iterable[RouterEndpoints], addresses: Addresses) -> tuple[RouterEndpoints, ...]:
    """Return the endpoints of every router, none twice; a name without an address stands for no router."""
    found: list[RouterEndpoints] = []
    for one in routers:
        if one.host and not _is_address(one.host):
            found += [one.at(address) for address in addresses.get(one.host, ())]
        else:
            found.append(one)
    return tuple(dict.fromkeys(found))


def look_up(name: str) -> tuple[str, ...]:
    """Return the IP addresses of a host name, sorted.

    They are of one family, because a router with an IPv4 and an IPv6 address would otherwise count as two.

    Raises:
        OSError: the name has no address, or no name server answers.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"it is no host name: {error}") from error
    preferred = found[0][0]
    return tuple(sorted({str(address[0]) for family, *_, address in found if family == preferred}))


class RouterDiscovery:
    """A thread that looks up the host names of routers. A name that cannot be looked up keeps its last addresses."""

    def __init__(
        self,
        routers: tuple[RouterEndpoints, ...],
        look_up: Callable[[str], tuple[str, ...]] = look_up,
        seconds: float = LOOKUP_SECONDS,
    ) -> None:
        """Look up each name every `seconds`."""
        self._routers = routers
        self._look_up = look_up
        self._seconds = seconds
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._failed: set[str] = set()
        self._ended = Event()
        self._changed = Event()
        self._thread: Thread | None = None
        self.found: tuple[RouterEndpoints, ...] = ()
        """Endpoints of all routers that are known now."""
        self.follow(routers)

    def follow(self, routers: tuple[RouterEndpoints, ...]) -> None:
        """Find these routers from now on."""
        self._routers = routers
        self.found = located(routers, self._addresses)
        self._changed.set()
        if self._thread is None and names(routers):
            self._thread = Thread(target=self._run, daemon=True, name="router discovery")
            self._thread.start()

    def close(self) -> None:
        """End the thread with its current lookup; nobody waits for that."""
        self._ended.set()
        self._changed.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            routers = self._routers
            wanted = names(routers)
            self._addresses = {name: self._addresses_of(name) for name in sorted(wanted)}
            self._failed &= wanted
            if not self._changed.is_set():  # if it is set, `follow` has named other routers meanwhile
                self.found = located(routers, self._addresses)
                self._changed.wait(self._seconds)

    def _addresses_of(self, name: str) -> tuple[str, ...]:
        former = self._addresses.get(name, ())
        try:
            found = self._look_up(name)
        except OSError as error:
            if name not in self._failed:
                self._failed.add(name)
                kept = f"it keeps {', '.join(former)}" if former else "this replica has no router there"
                _log.warning("the address of the routers, %s, cannot be looked up: %s; %s", name, error, kept)
            return former
        self._failed.discard(name)
        if found != former:
            _log.info("routers at %s: %s", name, ", ".join(found))
        return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
