"""The router process: bind, serve, drain, end."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from medha.errors import PartFailed
from medha_process.host_resources import raise_file_limit
from medha_process.part_process import begin_part, end_with_parent, log_failure, settings_option
from medha_process.router_settings import RouterSettings
from medha_process.watchdog import BEAT_SECONDS, Watchdog
from medha_router.app import HttpApi, build_app
from medha_router.connections import Connection, Connections, connection_limit
from medha_router.origin_policy import SitePolicy
from medha_router.replica_link import ReplicaLink
from medha_router.router_metrics import Observer
from medha_router.tokenizing import Tokenizing

log = logging.getLogger("medha.router")

_STUCK_SECONDS = 30.0  # after this time without running, the event loop is stuck; a busy one runs sooner
_BACKLOG = 2048
"""Connections that the kernel queues until they are accepted; uvicorn's own default."""


class _Server(uvicorn.Server):
    """Runs uvicorn without its signal handlers: a stop drains first, and `/ready` must answer 503 meanwhile."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(_BACKLOG)  # connections before uvicorn accepts are queued, not refused
    return listener


def _announce_bound(settings: RouterSettings, listener: socket.socket, link: ReplicaLink) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    bound = {
        "url": f"http://{host}:{listener.getsockname()[1]}",
        "control": link.control_endpoint,
        "tokens": link.tokens_endpoint,
    }
    log.info("listening %s", json.dumps(bound))
    if settings.ready_file is not None:
        target = Path(settings.ready_file)
        unfinished = target.with_name(target.name + ".part")
        unfinished.write_text(json.dumps(bound), encoding="utf-8")
        unfinished.rename(target)  # atomic: readers see a complete file


async def serve(settings: RouterSettings, file_limit: int) -> int:
    """Serve until SIGTERM, then drain; or until SIGUSR1, then end at once.

    Returns the exit status: 1 if a bug ended it.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    end = asyncio.Event()

    def end_now() -> None:
        end.set()
        stop.set()

    loop.add_signal_handler(signal.SIGUSR1, end_now)

    observer = Observer(CollectorRegistry())
    tokenizing = Tokenizing(settings, observer.tokenized)
    with _listen(settings.host, settings.port) as listener:
        link = ReplicaLink(settings, tokenizing, observer)
        limit = connection_limit(settings.max_connections, file_limit)
        if limit < settings.max_connections:
            log.warning(
                "the limit on open files, %d, allows %d HTTP connections and not %d; raise the hard limit (`ulimit -Hn`)",
                file_limit,
                limit,
                settings.max_connections,
            )
        connections = Connections(limit, settings.head_seconds, observer.http_refused)
        api = HttpApi(settings, tokenizing, link, observer, connections)
        address = listener.getsockname()[0]
        sites = SitePolicy.of(address, settings.allowed_hosts, settings.allowed_origins)
        config = uvicorn.Config(
            build_app(api, sites),
            http=partial(Connection, connections),  # type: ignore[arg-type]  # uvicorn only calls it
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type]  # it may be a fraction
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        link.start()
        beating = asyncio.create_task(_keep_alive(Watchdog()))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        _announce_bound(settings, listener, link)

        stopping = asyncio.create_task(stop.wait())
        broken = asyncio.create_task(link.broken.wait())
        await asyncio.wait((serving, stopping, broken), return_when=asyncio.FIRST_COMPLETED)
        api.draining = True
        if stop.is_set():
            log.info("stopping; %d requests are open", api.open_requests)
            await _drained(api, settings.drain_seconds, end)
        link.end_all("this router is stopping")
        server.should_exit = True
        await serving
        for task in (stopping, broken, beating):
            task.cancel()
        await link.close()
        tokenizing.close()
    return 1 if link.broken.is_set() else 0


async def _drained(api: HttpApi, limit_seconds: float, end: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    while api.open_requests and loop.time() < deadline and not end.is_set():  # noqa: ASYNC110 - a plain count is enough
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
            raise PartFailed(f"cannot listen on {settings.host}:{settings.port}: {error}") from error
