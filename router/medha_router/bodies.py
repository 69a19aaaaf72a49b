"""Request bodies, read within bounds of size, time and memory.

Every byte of a body counts from its arrival until the body is tokenised (`Bodies`), so that neither slow
clients nor many clients at once can fill the memory. A part of the room is reserved for small bodies, so that
large bodies can only keep out other large bodies. One owner (an API key, or else an address) cannot take all of
the room from the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from fastapi import Request
from starlette.requests import ClientDisconnect

from medha_process.router_settings import large_body_budget, owner_body_budget
from medha_router.api_error import ApiError

LEAST_BYTES_PER_SECOND = 32 * 2**10
"""Slowest rate of a body, after its first seconds; a slower body is refused."""


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of one body."""

    largest_bytes: int
    small_bytes: int
    """Largest body that counts as small."""
    patience_seconds: float
    """Seconds that a body may take beyond its bytes at `LEAST_BYTES_PER_SECOND`; also the longest pause in it."""


class Bodies:
    """The bodies that are held now."""

    def __init__(self, limits: BodyLimits, budget_bytes: int) -> None:
        """`budget_bytes` is the most that all bodies together may hold."""
        self.limits = limits
        self._budget_bytes = budget_bytes
        self._held_by_owner: Counter[str] = Counter()
        self.held_bytes = 0

    def open(self, owner: str) -> Body:
        """Return a new body; `owner` stands for the client that sends it."""
        return Body(self, owner)

    def grow(self, body: Body, more: int) -> None:
        """Reserve room for `more` bytes of a body.

        Raises:
            ApiError: 429, there is no room now.
        """
        is_small = body.held_bytes + more <= self.limits.small_bytes
        room = self._budget_bytes if is_small else large_body_budget(self._budget_bytes)
        if self.held_bytes + more > room:
            message = "the bodies of too many requests are being received and tokenised; try again later"
            raise ApiError(429, message, code="overloaded", retry_after_seconds=5)
        if self._held_by_owner[body.owner] + more > owner_body_budget(room):
            message = (
                "too many bytes of your own requests are being received and tokenised; wait until some of them have begun, "
                "and send fewer at once"
            )
            raise ApiError(429, message, code="overloaded", retry_after_seconds=5)
        self.held_bytes += more
        self._held_by_owner[body.owner] += more
        body.held_bytes += more

    def shrink(self, body: Body) -> None:
        """Free the room of a body."""
        self.held_bytes -= body.held_bytes
        self._held_by_owner[body.owner] -= body.held_bytes
        body.held_bytes = 0
        if not self._held_by_owner[body.owner]:
            del self._held_by_owner[body.owner]


class Body:
    """A request body: the bytes received so far, and the room that it takes until `release`."""

    def __init__(self, bodies: Bodies, owner: str) -> None:
        self._bodies = bodies
        self.owner = owner
        self.held_bytes = 0
        self.content = bytearray()
        self._holds = 0

    async def receive(self, request: Request) -> None:
        """Read the whole body into `content`.

        Raises:
            ApiError: 413 it is too large, declared so or not; 408 it arrives too slowly; 415 it is not sent as plain JSON;
                429 there is no room.
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
                    # Fast bytes extend the deadline, but never allow a longer pause.
                    enough = due + len(self.content) / LEAST_BYTES_PER_SECOND
                    patience.reschedule(min(enough, loop.time() + limits.patience_seconds))
        except TimeoutError as error:
            text = f"the body arrives too slowly: {len(self.content)} bytes so far; send it faster, or less of it"
            raise ApiError(408, text, code="request_timeout") from error
        except ClientDisconnect as error:
            raise ClientGone from error

    def hold(self) -> None:
        """Count one more user of the body: `release` must then be called once more."""
        self._holds += 1

    def release(self) -> None:
        """Free the body's memory unless another user needs it; further calls do no harm."""
        if self._holds:
            self._holds -= 1
            return
        self._bodies.shrink(self)
        self.content = bytearray()

    def _too_large(self) -> ApiError:
        text = f"the body is larger than {self._bodies.limits.largest_bytes} bytes"
        return ApiError(413, text, code="body_too_large")


def _require_plain_json(request: Request) -> None:
    """Refuse requests that do not declare uncompressed JSON.

    Raises:
        ApiError: the headers name another type, no type, or a compression. Web pages of other sites can send such types
            without a CORS preflight.
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
