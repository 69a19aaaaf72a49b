"""The router process: bind, serve, drain, end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

import click
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from medha.api.api_keys import ApiKeys
from medha.errors import PartFailed
from medha_process.host_resources import raise_file_limit
from medha_process.part_process import begin_part, end_with_parent, log_failure, settings_option
from medha_process.part_settings import in_url
from medha_process.router_settings import RouterSettings
from medha_process.shared_files import write_whole
from medha_process.watchdog import BEAT_SECONDS, Watchdog
from medha_router.app import HttpApi, build_app, build_metrics_app
from medha_router.connections import Connection, Connections, connection_limit
from medha_router.key_accounts import KeyAccounts
from medha_router.origin_policy import SitePolicy, is_loopback
from medha_router.replica_link import ReplicaLink
from medha_router.request_spans import RequestSpans
from medha_router.router_metrics import Observer
from medha_router.tls import following_context, server_context
from medha_router.tls_listener import TlsListener
from medha_router.tokenizing import Tokenizing
from medha_router.ui import Ui
from medha_router.watched_files import WatchedFiles
from medha_traces.switch import start

log = logging.getLogger("medha.router")

_STUCK_SECONDS = 30.0  # after this time without running, the event loop is stuck; a busy one runs sooner
_METRICS_CONNECTIONS = 64
"""Connections of scrapers and probes; clients cannot take them."""
_NEXT_REQUEST_SECONDS = 1.0
"""Time that a client gets to send its next request over a connection that its last answer left open."""
_BACKLOG = 2048
"""Connections that the kernel queues until they are accepted; uvicorn's own default."""
_UNREAD_BYTES = 128 * 2**10
"""Output that the kernel keeps for a client that does not read; it would let that grow to megabytes. Linux doubles it."""


class _Server(uvicorn.Server):
    """Runs uvicorn without its signal handlers: a stop drains first, and `/ready` must answer 503 meanwhile.

    With a certificate, connections are TLS; a handshake has as long as a request's head.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        connections: Connections,
        certificate: WatchedFiles[ssl.SSLContext] | None,
    ) -> None:
        super().__init__(config)
        self._connections = connections
        self._certificate = certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        certificate = self._certificate
        if certificate is None:
            await super().startup(sockets)
            return
        # The listeners of uvicorn have neither a context that changes nor a limit in time.
        await super().startup([])
        context = following_context(lambda: certificate.content)

        def connect() -> Connection:
            return self.config.http_protocol_class(  # type: ignore[call-arg, return-value]  # as uvicorn calls it
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        for listener in sockets or []:
            server = TlsListener(listener, self._connections, context, connect)
            self.servers.append(server)  # type: ignore[arg-type]  # uvicorn only closes them

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # connections inherit it
    listener.bind((host, port))
    listener.listen(_BACKLOG)  # connections before uvicorn accepts are queued, not refused
    return listener


def _url(host: str, listener: socket.socket, scheme: str = "http") -> str:
    return f"{scheme}://{in_url(host)}:{listener.getsockname()[1]}"


def _announce_bound(
    settings: RouterSettings, listener: socket.socket, metrics_listener: socket.socket, link: ReplicaLink
) -> None:
    bound = {
        "url": _url(settings.host, listener, "http" if settings.tls_key_file is None else "https"),
        "metrics_url": f"{_url(settings.metrics_host, metrics_listener)}/metrics",
        "control": link.control_endpoint,
        "tokens": link.tokens_endpoint,
    }
    log.info("listening %s", json.dumps(bound))
    if settings.ready_file is not None:
        write_whole(Path(settings.ready_file), json.dumps(bound))


def _scraped_sites(listener: socket.socket, settings: RouterSettings) -> SitePolicy:
    """Return the policy of the port for metrics, where scrapers call a pod by its address."""
    address = listener.getsockname()[0]
    return SitePolicy.of(address, settings.allowed_hosts if is_loopback(address) else (), ())


def _server(
    app: ASGIApp,
    connections: Connections,
    settings: RouterSettings,
    certificate: WatchedFiles[ssl.SSLContext] | None = None,
    trusted_proxies: Sequence[IPv4Network | IPv6Network] = (),
) -> _Server:
    proxies = [str(network) for network in trusted_proxies]
    config = uvicorn.Config(
        app,
        http=partial(Connection, connections),  # type: ignore[arg-type]  # uvicorn only calls it
        timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # it may be a fraction
        ws="none",
        lifespan="off",
        proxy_headers=bool(proxies),  # a client could choose its address with them
        forwarded_allow_ips=proxies,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    return _Server(config, connections, certificate)


class _Router:
    """The servers of a router's two addresses and their components, from their start until they have drained."""

    def __init__(
        self,
        settings: RouterSettings,
        file_limit: int,
        keys: WatchedFiles[ApiKeys] | None,
        certificate: WatchedFiles[ssl.SSLContext] | None,
    ) -> None:
        self._settings = settings
        self._file_limit = file_limit
        self._keys = keys
        self._certificate = certificate
        self._observer = observer = Observer(CollectorRegistry())
        self._tokenizing = Tokenizing(settings, observer.tokenized)
        self._source = start(
            settings.traces_endpoint, settings.traces_ratio, "medha-router", os.environ, observer.spans_lost
        )
        self._spans = None if self._source is None else RequestSpans(self._source)

    def listen(self, listener: socket.socket, metrics_listener: socket.socket) -> None:
        """Connect the components that serve these two addresses, and begin to listen for replicas."""
        settings, observer, spans = self._settings, self._observer, self._spans
        accounts = KeyAccounts(
            None if self._keys is None else self._keys.content, observer, asyncio.get_running_loop().time
        )
        self._link = link = ReplicaLink(settings, self._tokenizing, observer, accounts, spans)
        self._connections = connections = self._connections_of_clients()
        watched: list[WatchedFiles[Any]] = [
            files for files in (self._keys, self._certificate) if files is not None
        ]
        self._api = api = HttpApi(
            settings, self._tokenizing, link, observer, connections, accounts, watched, spans
        )
        sites = SitePolicy.of(listener.getsockname()[0], settings.allowed_hosts, settings.allowed_origins)
        app = build_app(api, sites, accounts, spans)
        server = _server(app, connections, settings, self._certificate, settings.trusted_proxies)
        metrics_connections = Connections(
            _METRICS_CONNECTIONS, settings.head_seconds, settings.output_seconds, observer.http_refused
        )
        self._ui = Ui(link)
        metrics_app = build_metrics_app(api, self._ui, _scraped_sites(metrics_listener, settings))
        # No proxy is trusted there: `/ui` is for this machine only, and a proxy could pass anybody off as it.
        metrics_server = _server(metrics_app, metrics_connections, settings)
        link.start()
        self._background: list[asyncio.Task[Any]] = [asyncio.create_task(_keep_alive(Watchdog()))]
        if self._keys is not None:
            follow = partial(_follow, self._keys, accounts)
            self._background.append(asyncio.create_task(self._keys.watch(follow, settings.poll_seconds)))
        if self._certificate is not None:
            self._background.append(
                asyncio.create_task(self._certificate.watch(lambda: None, settings.poll_seconds))
            )
        self._servers = (server, metrics_server)
        self._serving = [
            asyncio.create_task(server.serve(sockets=[listener])),
            asyncio.create_task(metrics_server.serve(sockets=[metrics_listener])),
        ]
        _announce_bound(settings, listener, metrics_listener, link)
        self._tokenizing.start()

    def _connections_of_clients(self) -> Connections:
        settings = self._settings
        limit = connection_limit(settings.max_connections, self._file_limit)
        if limit < settings.max_connections:
            log.warning(
                "the limit on open files, %d, allows %d HTTP connections and not %d; raise the hard limit (`ulimit -Hn`)",
                self._file_limit,
                limit,
                settings.max_connections,
            )
        return Connections(
            limit,
            settings.head_seconds,
            settings.output_seconds,
            self._observer.http_refused,
            settings.trusted_proxies,
        )

    async def until_stopped(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, a server ends or a bug ends the link."""
        watching = [asyncio.create_task(stop.wait()), asyncio.create_task(self._link.broken.wait())]
        self._background += watching
        await asyncio.wait((*self._serving, *watching), return_when=asyncio.FIRST_COMPLETED)

    async def leave(self, stopped: bool, end: asyncio.Event) -> None:
        """Close both servers. If somebody has `stopped` this router, first leave and drain; `end` cuts that short."""
        settings, api, connections = self._settings, self._api, self._connections
        api.leaving = connections.leaving = True
        if stopped:
            log.info("stopping; %d requests are open", api.open_requests)
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), settings.leave_seconds)
        connections.draining = True
        api.drain()
        if stopped:
            await _drained(api, connections, settings.drain_seconds, end)
        self._link.end_all("this router is stopping")
        self._ui.end()
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._serving)

    async def close(self) -> int:
        """End everything else, and return the exit status."""
        for task in self._background:
            task.cancel()
        await self._link.close()
        self._tokenizing.close()
        if self._source is not None:
            self._source.close()
        return 1 if self._link.broken.is_set() else 0


async def serve(settings: RouterSettings, file_limit: int) -> int:
    """Serve until SIGTERM, then leave and drain; or until SIGUSR1, then end at once.

    Returns the exit status: 1 if a bug ended it.

    Raises:
        ConfigInvalid: the file of API keys, or the certificate, cannot be used; or traces are on and cannot be made.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    end = asyncio.Event()

    def end_now() -> None:
        end.set()
        stop.set()

    loop.add_signal_handler(signal.SIGUSR1, end_now)

    router = _Router(settings, file_limit, _api_keys(settings), _certificate(settings))
    with (
        _listen(settings.host, settings.port) as listener,
        _listen(settings.metrics_host, settings.metrics_port) as metrics_listener,
    ):
        router.listen(listener, metrics_listener)
        await router.until_stopped(stop)
        await router.leave(stop.is_set(), end)
        return await router.close()


def _api_keys(settings: RouterSettings) -> WatchedFiles[ApiKeys] | None:
    path = settings.api_keys_file
    if path is None:
        return None
    keys = WatchedFiles("API keys", (path,), lambda: ApiKeys.from_text(path.read_bytes(), str(path)))
    log.info("%d API keys in %s", len(keys.content.keys), path)
    return keys


def _certificate(settings: RouterSettings) -> WatchedFiles[ssl.SSLContext] | None:
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is None or key is None:
        return None
    return WatchedFiles("TLS certificate", (certificate, key), partial(server_context, certificate, key))


def _follow(keys: WatchedFiles[ApiKeys], accounts: KeyAccounts) -> None:
    """Accept the keys of a file that has changed."""
    log.info("%d API keys are in force", len(keys.content.keys))
    accounts.replace(keys.content)


async def _drained(api: HttpApi, connections: Connections, limit_seconds: float, end: asyncio.Event) -> None:
    """Wait until no request is open, and none is on its way over a connection that its client may still use."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    while loop.time() < deadline and not end.is_set():
        if not api.open_requests and loop.time() > connections.kept_at + _NEXT_REQUEST_SECONDS:
            return
        await asyncio.sleep(0.02)
    if api.open_requests:
        reason = "this router must end at once" if end.is_set() else "the drain time is over"
        log.warning("%s; %d open requests are aborted", reason, api.open_requests)


async def _keep_alive(watchdog: Watchdog) -> None:
    while True:
        watchdog.allow(_STUCK_SECONDS, "its event loop")
        await asyncio.sleep(BEAT_SECONDS)


@click.command()
@settings_option
def main(settings_file: Path) -> None:
    """Serve HTTP for replicas; the settings are a JSON file of `RouterSettings`."""
    settings = begin_part(RouterSettings, settings_file)
    if settings.exit_with_parent:
        end_with_parent(end_signal=signal.SIGUSR1)
    logging.getLogger("uvicorn").setLevel("WARNING")  # it logs each start and stop, as we do
    with log_failure(log):
        try:
            sys.exit(uvloop.run(serve(settings, raise_file_limit())))
        except OSError as error:
            places = f"{settings.host}:{settings.port} or {settings.metrics_host}:{settings.metrics_port}"
            raise PartFailed(f"cannot listen on {places}: {error}") from error
