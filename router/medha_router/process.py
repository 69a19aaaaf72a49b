"""The router process: bind, serve, drain, end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
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
from pydantic import ValidationError

from medha.errors import ConfigInvalid
from medha_process.host_resources import raise_file_limit
from medha_router.app import Door, build_app
from medha_router.connections import Connection, Connections, connection_limit
from medha_router.heartbeat import Heartbeat
from medha_router.origin_policy import SitePolicy
from medha_router.replica_link import ReplicaLink
from medha_router.router_metrics import Observer
from medha_router.router_settings import RouterSettings
from medha_router.tokenizing import Tokenizing

log = logging.getLogger("medha.router")

_PARENT = "MEDHA_PARENT_PID"
"""Environment variable set by a supervisor, which adds the time to each log line itself."""
_PARENT_POLL_SECONDS = 0.5
_BACKLOG = 2048
"""Connections that the kernel queues until they are accepted; uvicorn's own default."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: a stop drains first, and `/ready` must answer 503 meanwhile."""

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


async def serve(settings: RouterSettings, parent_pid: int, file_limit: int) -> int:
    """Serve until SIGTERM, then drain; or until SIGUSR1 or the loss of `parent_pid` as parent, then end at once.

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
        door = Door(settings, tokenizing, link, observer, connections)
        address = listener.getsockname()[0]
        sites = SitePolicy.of(address, settings.allowed_hosts, settings.allowed_origins)
        config = uvicorn.Config(
            build_app(door, sites),
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
        beating = asyncio.create_task(Heartbeat().run())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        _announce_bound(settings, listener, link)

        parent = asyncio.create_task(_parent_gone(parent_pid if settings.exit_with_parent else None))
        stopping = asyncio.create_task(stop.wait())
        broken = asyncio.create_task(link.broken.wait())
        await asyncio.wait((serving, parent, stopping, broken), return_when=asyncio.FIRST_COMPLETED)
        door.draining = True
        if stop.is_set():
            log.info("stopping; %d requests are open", door.open_requests)
            await _drained(door, settings.drain_seconds, end)
        link.end_all("this router is stopping")
        server.should_exit = True
        await serving
        for task in (parent, stopping, broken, beating):
            task.cancel()
        await link.close()
        tokenizing.close()
    return 1 if link.broken.is_set() else 0


async def _drained(door: Door, limit_seconds: float, end: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    while door.open_requests and loop.time() < deadline and not end.is_set():  # noqa: ASYNC110 - a plain count is enough
        await asyncio.sleep(0.02)
    if door.open_requests:
        log.warning("the drain time is over; %d open requests are aborted", door.open_requests)


async def _parent_gone(parent_pid: int | None) -> None:
    while parent_pid is None or os.getppid() == parent_pid:  # noqa: ASYNC110 - the kernel has no event for it
        await asyncio.sleep(_PARENT_POLL_SECONDS)
    log.warning("the parent process has ended, so this router ends")


@click.command()
@click.argument(
    "settings_file", metavar="SETTINGS.json", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(settings_file: Path) -> None:
    """Serve HTTP for replicas; the settings are a JSON file of `RouterSettings`."""
    parent_pid = os.getppid()  # first of all, as the parent may soon be gone
    # Ctrl-C reaches the whole process group of a terminal; the process that started the router decides when
    # it stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        settings = RouterSettings.model_validate_json(settings_file.read_bytes())
    except ValidationError as error:
        raise click.ClickException(f"{settings_file}: {error}") from error
    file_limit = raise_file_limit()
    logging.getLogger("uvicorn").setLevel("WARNING")  # it logs each start and stop, as we do
    time = "" if _PARENT in os.environ else "%(asctime)s "
    logging.basicConfig(level=settings.log_level.upper(), format=f"{time}%(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(uvloop.run(serve(settings, parent_pid, file_limit)))
    except ConfigInvalid as error:
        log.critical("%s", error)  # last words: a supervisor quotes them
        sys.exit(1)
    except OSError as error:
        log.critical("cannot listen on %s:%d: %s", settings.host, settings.port, error)
        sys.exit(1)
