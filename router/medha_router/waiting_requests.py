"""Requests that wait for the first replica of their model: futures around a `WaitingRoom`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from medha.routing.waiting_room import Guest, RoomRefusal, WaitingRoom
from medha_router.api_error import ApiError

_POLL_SECONDS = 0.1


class WaitingRequests:
    """The waiting requests of a router, which share one loop that exists only while somebody waits."""

    def __init__(
        self,
        room: WaitingRoom,
        is_awaited: Callable[[str], bool],
        refused: Callable[[RoomRefusal], None],
    ) -> None:
        """Wait for models while `is_awaited` holds: replicas are expected, and nothing serves them."""
        self.room = room
        self._is_awaited = is_awaited
        self._refused = refused
        self._futures: dict[str, asyncio.Future[None]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._ended: str | None = None  # why nobody may wait any more

    async def wait(self, id_: str, model: str, owner: str, body_bytes: int) -> None:
        """Wait until a model need not be awaited any more. If this is cancelled, the request leaves the room.

        Raises:
            ApiError: 503, the room is full, the owner's share of it is taken, or no replica came in time.
        """
        loop = asyncio.get_running_loop()
        if not self.room.is_open or not self._is_awaited(model):
            return
        if self._ended is not None:
            raise self._unavailable(self._ended, model, 1)
        refusal = self.room.enter(Guest(id_, model, owner, body_bytes, loop.time()))
        if refusal is not None:
            self._refused(refusal)
            is_own = refusal == "share"
            who = (
                "as many of your own requests as may" if is_own else "as many requests as the router can hold"
            )
            text = f"no replica serves the model {model[:200]!r} yet, and {who} wait for one; try again later"
            seconds = self.room.seconds_until_room(loop.time(), owner if is_own else None)
            raise self._unavailable(text, model, seconds)
        self._futures[id_] = loop.create_future()
        if self._loop is None:
            self._loop = asyncio.create_task(self._watch())
        try:
            await self._futures[id_]
        finally:
            del self._futures[id_]
            self.room.leave(id_)

    def end_all(self, detail: str) -> None:
        """End every waiting request with an error, and also those that are about to wait."""
        self._ended = detail
        for guest in self.room.everybody():
            self._end(guest, detail)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self.room):
            await asyncio.sleep(_POLL_SECONDS)
            for guest in self.room.go_on(self._is_awaited):
                future = self._futures[guest.id]
                if not future.done():
                    future.set_result(None)
            for guest in self.room.late(loop.time()):
                self._refused("late")
                waited = loop.time() - guest.since
                text = (
                    f"no replica of the model {guest.model[:200]!r} came in {waited:.0f} s; try again later"
                )
                self._end(guest, text)
        self._loop = None

    def _end(self, guest: Guest, text: str) -> None:
        future = self._futures[guest.id]
        if not future.done():  # it is if the client has gone in this turn of the loop
            future.set_exception(self._unavailable(text, guest.model, 1))

    def _unavailable(self, text: str, model: str, retry_after_seconds: int) -> ApiError:
        return ApiError(503, text, code="unavailable", retry_after_seconds=retry_after_seconds, model=model)
