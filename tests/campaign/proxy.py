"""An HTTP proxy in front of the API server that injects network and server faults into an operator's calls.

It counts writes (except those of the Lease), records what was created and deleted, and consults a fault on
every write, read and watch event. The operator connects to it without TLS; it connects to the API server as
an administrator.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from cluster.control_plane import ControlPlane, free_port
from cluster.keys import ADMIN

_HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding", "accept-encoding"}
# Faults parse and cut the server's answers. It compresses lists of more than 128 KiB unless asked not to.
_UNCOMPRESSED = {"Accept-Encoding": "identity"}


@dataclass(frozen=True)
class Call:
    """A call by the operator."""

    number: int
    """Number of the write in its run, from 1; 0 for a read."""
    method: str
    path: str
    query: str

    @property
    def is_event(self) -> bool:
        return "/events" in self.path


@dataclass
class Fault:
    """A fault injected into calls; this base class injects none. Its methods run in the proxy's loop."""

    times: int = field(default=0, init=False)
    """Number of times that the fault was injected."""

    async def before_write(self, call: Call) -> tuple[int, str] | None:
        """Called before a write is passed on; returns (status, reason) to refuse it with, or None."""
        return None

    async def after_write(self, call: Call) -> tuple[int, str] | None:
        """Called between a write and its answer; returns (status, reason) to answer instead, or None."""
        return None

    async def before_read(self, call: Call) -> tuple[int, str] | None:
        """Called before a read or watch is passed on; returns (status, reason) to refuse it with, or None."""
        return None

    def cut(self, call: Call, piece: bytes) -> int | None:
        """Return the number of bytes of an answer or event after which the connection breaks, or None."""
        return None

    def listed(self, call: Call, body: bytes) -> bytes:
        """Return the body to answer a read with."""
        return body

    async def watched(self, call: Call) -> None:
        """Called before a watch is passed on."""

    async def notice(self, call: Call, event: bytes) -> list[bytes]:
        """Return the events to send in place of a watch event."""
        return [event]


@dataclass
class Record:
    """Record of the operator's calls in a run."""

    writes: list[Call] = field(default_factory=list)
    reads: list[Call] = field(default_factory=list)
    """Reads other than watches."""
    created: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, name) -> number of creations, without Events; `kind` is the plural."""
    deleted: Counter[tuple[str, str]] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    """Number of writes when each step of the scenario had settled."""
    is_ending: bool = False
    """True once the scenario's resource is being deleted."""
    ending_events: int = 0
    """Watch events for the operator since then."""


class FaultyProxy:
    """The proxy; it runs in its own thread until the end of its `with` block."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._port}"
        self.fault = Fault()
        self.record = Record()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def begin(self, fault: Fault) -> Record:
        """Begin a run with a new fault and an empty record."""
        self.record, self.fault = Record(), fault
        return self.record

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig with which an operator reaches the API server through this proxy."""
        path = folder / "proxy.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "none"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    # --- in the thread ----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        context = ssl.create_default_context(cafile=str(self._plane.keys.authority))
        context.load_cert_chain(*self._plane.keys.client(*ADMIN))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            self._session = session
            application = web.Application(client_max_size=2**26)
            application.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(
                application, access_log=None, shutdown_timeout=0.5, handler_cancellation=True
            )
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            self._started.set()
            await self._ended.wait()
            await runner.cleanup()
        await asyncio.sleep(0.25)  # TLS connections take a moment to close

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        is_write = request.method not in ("GET", "HEAD") and "/leases" not in request.path
        call = Call(
            len(self.record.writes) + 1 if is_write else 0, request.method, request.path, request.query_string
        )
        if is_write:
            self.record.writes.append(call)
            return await self._write(request, call)
        refused = await self.fault.before_read(call)
        if refused is not None:
            return _refusal(*refused)
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, call)
        return await self._read(request, call)

    async def _read(self, request: web.Request, call: Call) -> web.StreamResponse:
        self.record.reads.append(call)
        fault = self.fault
        status, headers, body = await self._pass_on(request)
        if status == 200 and "/leases" not in request.path:
            body = fault.listed(call, body)
        kept = fault.cut(call, body)
        if kept is None:
            return web.Response(status=status, headers=headers, body=body)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(body)
        with suppress(ConnectionResetError):
            await response.prepare(request)
            await response.write(body[:kept])
            _break(request)
        return response

    async def _write(self, request: web.Request, call: Call) -> web.Response:
        fault, record = self.fault, self.record
        refused = await fault.before_write(call)
        if refused is None:
            # A write that has begun is completed even if its sender is dead by now.
            status, headers, body = await asyncio.shield(
                asyncio.ensure_future(self._do(request, call, record))
            )
            refused = await fault.after_write(call)
            if refused is None:
                return web.Response(status=status, headers=headers, body=body)
        return _refusal(*refused)

    async def _do(
        self, request: web.Request, call: Call, record: Record
    ) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = await self._pass_on(request)
        if status in (200, 201) and not call.is_event:
            answer = json.loads(body)
            name = call.path.rpartition("/")[2] if call.method != "POST" else answer["metadata"]["name"]
            kind = call.path.split("/")[-1 if call.method == "POST" else -2]
            if status == 201:
                record.created[kind, name] += 1
            elif call.method == "DELETE":
                record.deleted[kind, name] += 1
        return status, headers, body

    async def _pass_on(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        async with self._session.request(
            request.method,
            self._upstream(request),
            data=await request.read() or None,
            headers=_headers(request.headers) | _UNCOMPRESSED,
        ) as answer:
            return answer.status, _headers(answer.headers), await answer.read()

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        fault, record = self.fault, self.record
        await fault.watched(call)
        async with self._session.get(
            self._upstream(request),
            headers=_headers(request.headers) | _UNCOMPRESSED,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_headers(answer.headers))
            with suppress(ConnectionResetError):  # the operator was killed
                await response.prepare(request)
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        record.ending_events += record.is_ending and is_change(line)
                        for event in await fault.notice(call, line):
                            kept = fault.cut(call, event)
                            await response.write(event[:kept] + (b"\n" if kept is None else b""))
                            if kept is not None:
                                _break(request)
                                return response
                await response.write(rest)
            return response

    def _upstream(self, request: web.Request) -> str:
        return f"{self._plane.url}{request.raw_path}"


def _headers(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP | {"authorization"}}


def is_change(event: bytes) -> bool:
    """Return whether a watch event is about an object; bookmarks and errors are not."""
    return json.loads(event)["type"] not in ("BOOKMARK", "ERROR")


def _break(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()


def _refusal(status: int, reason: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason}
    return web.json_response(body | {"message": "a fault of the campaign"}, status=status)
