"""The id of each request, and the access log: one line when a request is over.

The id is the client's own `x-request-id` if it is fit for logs and for the names of sequences, else a new
one. It is sent back in the response. It is also a part of the response's `id` and of the names under which
controllers know the request's sequences, in their logs, records and traces.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medha_router.probe_paths import PROBE_PATHS

log = logging.getLogger("medha.router")

_SANE = re.compile(r"[A-Za-z0-9._:+=/@-]{1,128}")  # no `~`: it counts attempts in the names of sequences
_ROUTINE = (*PROBE_PATHS, "/metrics")
"""Paths that are requested every few seconds; logged at `debug`."""
_MOST_PATH_CHARACTERS = 200
_MOST_MODEL_CHARACTERS = 200


@dataclass
class Entry:
    """The log entry of one request; its handlers fill it in."""

    request_id: str
    is_clients: bool
    """True if the client chose the id; another request may then have the same id."""
    key_name: str | None = None
    """Name of the API key; None if there was no valid one."""
    model: str | None = None
    outcome: str | None = None
    """The outcome: `stop`, `length`, `cancelled`, or the code of the error."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    ttft_seconds: float | None = None
    trace_id: str | None = None
    """Trace that the request is a part of; None if it is not traced."""

    @classmethod
    def of(cls, scope: Scope) -> Entry:
        """Return the entry of the request with this ASGI scope."""
        entry: Entry = scope["state"]["entry"]
        return entry

    @property
    def unique_id(self) -> str:
        """The id, with a random suffix if another request may have the same."""
        return f"{self.request_id}-{uuid.uuid4().hex[:16]}" if self.is_clients else self.request_id

    def fields(self) -> str:
        values = {
            "id": self.request_id,
            "key": self.key_name,
            "model": None if self.model is None else _plain(self.model)[:_MOST_MODEL_CHARACTERS],
            "outcome": self.outcome,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "trace": self.trace_id,
            "ttft_seconds": None if self.ttft_seconds is None else f"{self.ttft_seconds:.3f}",
        }
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


class AccessLog:
    """Gives each request its `Entry`, and logs it at the end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        loop = asyncio.get_running_loop()
        started = loop.time()
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        is_clients = _SANE.fullmatch(given) is not None
        entry = Entry(given if is_clients else uuid.uuid4().hex, is_clients)
        scope.setdefault("state", {})["entry"] = entry
        status = 500  # the status of a bug before a response was begun

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = entry.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            path = _plain(scope["raw_path"].decode("latin-1"))[:_MOST_PATH_CHARACTERS]
            host, port = scope["client"] or ("-", 0)
            log.log(
                logging.DEBUG if path in _ROUTINE else logging.INFO,
                "%s %s %d %s total_seconds=%.3f client=%s:%d",
                scope["method"],
                path,
                status,
                entry.fields(),
                loop.time() - started,
                _plain(host),
                port,
            )


def _plain(text: str) -> str:
    """Return the text with characters that could pass for another field or line replaced by `?`."""
    return re.sub(r"[^!-~]", "?", text)
