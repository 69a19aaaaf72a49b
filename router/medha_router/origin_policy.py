"""Checks of requests by web pages: another site's page must not spend this server's compute, nor read its answers.

Browsers name the site of a page in `Origin`; clients that are not browsers send none. A page whose own name
resolves to this machine (DNS rebinding) is recognised by `Host`: a server on a loopback address is only
called by names of this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from medha_router.access_log import Entry
from medha_router.api_error import ApiError
from medha_router.event_streams import error_response
from medha_router.probe_paths import PROBE_PATHS

_DEFAULT_PORTS = {"http": "80", "https": "443"}
"""Ports that origins and names leave out."""


def is_loopback(address: str) -> bool:
    """Return whether an address, or the name `localhost`, is this machine's own; other names are not resolved."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class SitePolicy:
    """The names by which the router may be called, and the sites whose pages may call it."""

    names: frozenset[str] | None
    """Allowed names in lower case, besides those of this machine; None: any name."""
    origins: frozenset[str]
    """Allowed origins, `scheme://host[:port]` in lower case; `*`: any."""

    @classmethod
    def of(cls, bound_address: str, hosts: Iterable[str], origins: Iterable[str]) -> SitePolicy:
        """Return the policy of a router on `bound_address`: names are checked on loopback, or if `hosts` are given."""
        names = frozenset(name.lower() for name in hosts)
        checks_names = bool(names) or is_loopback(bound_address)
        return cls(names if checks_names else None, frozenset(origin.lower() for origin in origins))

    def refusal(self, path: str, hosts: list[str], origins: list[str]) -> ApiError | None:
        """Return the error of a request with this path and these `Host` and `Origin` headers; None if it is allowed."""
        for host in hosts:  # probes call pods by their addresses, and their answers are of no use to a page
            if path not in PROBE_PATHS and not self._is_own(host_name(host)):
                text = (
                    f"the Host header is {host[:200]!r}, which is not a name of this server: use localhost or 127.0.0.1, "
                    "or add the name to `router.allowedHosts`"
                )
                return ApiError(403, text, code="forbidden_host")
        for origin in origins:
            if not self._is_allowed(origin.lower(), hosts):
                text = (
                    f"pages of {origin[:200]!r} may not use this server: add the origin to `router.allowedOrigins` "
                    "if they should"
                )
                return ApiError(403, text, code="forbidden_origin")
        return None

    def _is_own(self, name: str) -> bool:
        return self.names is None or name in self.names or is_loopback(name)

    def _is_allowed(self, origin: str, hosts: list[str]) -> bool:
        if "*" in self.origins or origin in self.origins:
            return True
        scheme, _, place = origin.partition("://")
        port = _DEFAULT_PORTS.get(scheme)
        same = {place, f"{place}:{port}", place.removesuffix(f":{port}")}
        return port is not None and any(host.lower() in same for host in hosts)


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without its port; empty if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


class Sites:
    """Refuses requests that a `SitePolicy` does not allow."""

    def __init__(self, app: ASGIApp, policy: SitePolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given: dict[bytes, list[str]] = {b"host": [], b"origin": []}
            for name, value in scope["headers"]:
                if name in given:
                    given[name].append(value.decode("latin-1"))
            error = self._policy.refusal(scope["path"], given[b"host"], given[b"origin"])
            if error is not None:
                Entry.of(scope).outcome = error.code
                await error_response(error, Entry.of(scope).request_id)(scope, receive, send)
                return
        await self._app(scope, receive, send)
