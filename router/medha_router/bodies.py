"""Bodies of requests: read within bounds of size, time and memory.

Every byte of a body counts from its arrival until the body is tokenised (`Bodies`), so that neither slow clients nor
many at once can fill the memory. A part of the room is kept for small bodies: whoever sends large ones keeps out large
ones only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect

from medha_router.api_error import ApiError

LEAST_BYTES_PER_SECOND = 32 * 2**10
"""A body that comes more slowly, beyond the first seconds, is given up."""
_SMALL_SHARE = 8
"""One of so many parts of the room is kept for small bodies."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


def room_for_large(room_bytes: int) -> int:
    """What of the room for all bodies large ones may take."""
    return room_bytes - room_bytes // _SMALL_SHARE


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of one body."""

    largest_bytes: int
    small_bytes: int
    """Up to here a body counts as small."""
    patience_seconds: float
    """Beyond what its bytes take at `LEAST_BYTES_PER_SECOND`, and between two pieces of it."""


class Bodies:
    """The bodies that are held now."""

    def __init__(self, limits: BodyLimits, room_bytes: int) -> None:
        """`room_bytes` is the most that all bodies together may hold."""
        self.limits = limits
        self._room_bytes = room_bytes
        self.held_bytes = 0

    def open(self) -> Body:
        return Body(self)

    def grow(self, body: Body, more: int) -> None:
        """
        Raises:
            ApiError: 429, there is no room for `more` bytes of this body now.
        """
        is_small = body.held_bytes + more <= self.limits.small_bytes
        room = self._room_bytes if is_small else room_for_large(self._room_bytes)
        if self.held_bytes + more > room:
            message = "the bodies of too many requests are being received and tokenised; try again later"
            raise ApiError(429, message, code="overloaded", retry_after_seconds=5)
        self.held_bytes += more
        body.held_bytes += more


class Body:
    """One body: what has come of it, and the room that it takes until `release`."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.held_bytes = 0
        self.content = bytearray()

    async def receive(self, request: Request) -> None:
        """Read the whole body into `content`.

        Raises:
            ApiError: 413 it is too large, whether or not it says so; 408 it comes too slowly; 415 it is not sent as plain
                JSON; 429 there is no room.
            ClientGone: the client went away.
        """
        _require_plain_json(request)
        limits = self._bodies.limits
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limits.largest_bytes:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        due = loop.time() + limits.patience_seconds
        try:
            async with asyncio.timeout_at(due) as patience:
                async for piece in request.stream():
                    if len(self.content) + len(piece) > limits.largest_bytes:
                        raise self._too_large()
                    self._bodies.grow(self, len(piece))
                    self.content += piece
                    # What comes fast buys time, but none to be silent in.
                    enough = due + len(self.content) / LEAST_BYTES_PER_SECOND
                    patience.reschedule(min(enough, loop.time() + limits.patience_seconds))
        except TimeoutError as error:
            text = (
                f"the body came too slowly: {len(self.content)} bytes so far; send it faster, or less of it"
            )
            raise ApiError(408, text, code="request_timeout") from error
        except ClientDisconnect as error:
            raise ClientGone from error

    def release(self) -> None:
        """Forget the body; more than once does no harm."""
        self._bodies.held_bytes -= self.held_bytes
        self.held_bytes = 0
        self.content = bytearray()

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._bodies.limits.largest_bytes} bytes"
        return ApiError(413, text, code="body_too_large")


def _require_plain_json(request: Request) -> None:
    """
    Raises:
        ApiError: the headers name another type, none at all, or a compression. A web page of another site can send
            such types without asking first.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        said = f"is {kind[:80]!r}" if kind else "is missing"
        text = f"the header Content-Type {said}; send JSON, with `Content-Type: application/json`"
        raise ApiError(415, text, "content-type", "unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() != "identity":
        text = (
            f"the header Content-Encoding is {coding[:80]!r}; send the body uncompressed, without this header"
        )
        raise ApiError(415, text, "content-encoding", "unsupported_media_type")
