"""HTTP helpers that FastAPI lacks: client disconnects and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from medha_router.api_error import ApiError
from medha_router.bodies import ClientGone

_KEEP_ALIVE_SECONDS = 15.0
_PIECE_BYTES = 64 * 2**10
_T = TypeVar("_T")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T] | asyncio.Future[_T]) -> _T:
    """Return the result of `work`, which is cancelled if the client goes away.

    Raises:
        ClientGone: the client went away.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for unfinished in (task, watch):
            unfinished.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """A response of server-sent events; comments keep proxies from timing out while a long prompt is computed.

    The generator is always closed, even if the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], headers: Mapping[str, str], end: Callable[[], None]
    ) -> None:
        """`end` is called once, when the stream is over."""
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await while_connected(receive, self._send_all(send, is_head=scope["method"] == "HEAD"))
        except ClientGone:
            pass
        finally:
            self._end()

    async def _send_all(self, send: Send, *, is_head: bool) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if is_head:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        step: asyncio.Future[bytes] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(self._events))
                while not (await asyncio.wait((step,), timeout=_KEEP_ALIVE_SECONDS))[0]:
                    await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
                try:
                    content = step.result()
                except StopAsyncIteration:
                    break
                await send({"type": "http.response.body", "body": content, "more_body": True})
        finally:
            if step is not None and not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class PacedResponse(Response):
    """An answer that may be large: it is written as fast as the client takes it.

    Without that, a copy of the whole answer waits in the transport's buffer.
    """

    def __init__(self, content: bytes, end: Callable[[], None]) -> None:
        """`end` is called once, when the answer has been written or its client has gone."""
        super().__init__(content, media_type="application/json")
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for start in range(0, len(content), _PIECE_BYTES):
            piece = bytes(content[start : start + _PIECE_BYTES])
            is_last = start + _PIECE_BYTES >= len(content)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


def error_response(error: ApiError, request_id: str) -> Response:
    headers = error.headers()
    if error.status == 408:
        headers["Connection"] = "close"  # the rest of the request may never come
    return Response(to_json(error.body(request_id)), error.status, headers, "application/json")


def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), headers=headers, media_type="application/json")
