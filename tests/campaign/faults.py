"""The faults of the campaign, implemented with the proxy's hooks; all random choices come from a seed."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from campaign.proxy import Call, Fault, is_change


@dataclass
class KilledAtWrite(Fault):
    """Kills the operator at its n-th write: before the API server gets it, or when it is done, unanswered."""

    number: int
    is_before: bool
    kill: Callable[[], None]

    async def before_write(self, call: Call) -> tuple[int, str] | None:
        if self.is_before and call.number == self.number:
            self.times += 1
            self.kill()
            return 503, "ServiceUnavailable"  # nobody receives it
        return None

    async def after_write(self, call: Call) -> tuple[int, str] | None:
        if not self.is_before and call.number == self.number:
            self.times += 1
            self.kill()
        return None


@dataclass
class KilledWhileEnding(Fault):
    """Kills the operator while its objects are collected: at its n-th event since the deletion.

    With 0 it is killed before the deletion, and never gets the event.
    """

    number: int
    kill: Callable[[], None]

    def __post_init__(self) -> None:
        self._left = self.number + 1
        self._is_ending = False

    def begin(self) -> None:
        """Call before the resource is deleted."""
        self._is_ending = True
        self._count()

    async def notice(self, call: Call, event: bytes) -> list[bytes]:
        if self._is_ending and is_change(event):
            self._count()
        return [event]

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.times += 1
            self.kill()


@dataclass
class HeldWrite(Fault):
    """Holds the first write to a kind of object and passes it on later, whichever operator leads then."""

    plural: str
    call: Call | None = None

    def __post_init__(self) -> None:
        self.has_finalizer, self.has_passed = threading.Event(), threading.Event()
        self._may_go = threading.Event()

    def let_go(self) -> None:
        self._may_go.set()

    async def before_write(self, call: Call) -> tuple[int, str] | None:
        if self.call is None and f"/{self.plural}" in call.path:
            self.call = call
            self.has_finalizer.set()
            await asyncio.shield(asyncio.to_thread(self._may_go.wait))
        return None

    async def after_write(self, call: Call) -> tuple[int, str] | None:
        if call is self.call:
            self.has_passed.set()
        return None


@dataclass
class HeldEvents(Fault):
    """Drops events of our own resources, as if the watch lagged."""

    async def notice(self, call: Call, event: bytes) -> list[bytes]:
        return [] if "/medha.dev/" in call.path else [event]


@dataclass
class StaleView(Fault):
    """Shows the past: while `is_stale`, lists answer what they answered at `mark`, and new watches wait."""

    _latest: dict[str, bytes] = field(default_factory=dict)
    _marked: dict[str, bytes] = field(default_factory=dict)
    is_stale: bool = False

    def mark(self) -> None:
        """Keep the latest answer of each list, to be shown while `is_stale`."""
        self._marked = dict(self._latest)

    def listed(self, call: Call, body: bytes) -> bytes:
        if call.method != "GET" or b'"items"' not in body:
            return body
        key = call.path
        if self.is_stale:
            self.times += key in self._marked
            return self._marked.get(key, body)
        self._latest[key] = body
        return body

    async def watched(self, call: Call) -> None:
        while self.is_stale:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.05)


@dataclass
class UnsureEvents(Fault):
    """Delays events at random, so that they come in bursts, and drops some."""

    seed: int
    lost_share: float = 0.15
    longest_seconds: float = 0.6
    is_over: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def notice(self, call: Call, event: bytes) -> list[bytes]:
        if self.is_over or "/leases" in call.path:
            return [event]
        if is_change(event) and self._random.random() < self.lost_share:
            self.times += 1
            return []
        if self._random.random() < 0.5:
            self.times += 1
            await asyncio.sleep(self._random.uniform(0, self.longest_seconds))
        return [event]


@dataclass
class UnsureAnswers(Fault):
    """Answers writes with a conflict or a server error; some of them take effect all the same."""

    seed: int
    share: float = 0.3
    is_over: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def before_write(self, call: Call) -> tuple[int, str] | None:
        return self._answer()

    async def after_write(self, call: Call) -> tuple[int, str] | None:
        return self._answer()

    def _answer(self) -> tuple[int, str] | None:
        if self.is_over or self._random.random() >= self.share / 2:
            return None
        self.times += 1
        return self._random.choice(_ANSWERS)


@dataclass
class UnsureReads(Fault):
    """Refuses reads and watches with a server error, or breaks them in the middle of an answer or event."""

    seed: int
    refused_share: float = 0.2
    cut_share: float = 0.1
    is_over: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    async def before_read(self, call: Call) -> tuple[int, str] | None:
        if self.is_over or self._random.random() >= self.refused_share:
            return None
        self.times += 1
        return self._random.choice([answer for answer in _ANSWERS if answer[0] != 409])

    def cut(self, call: Call, piece: bytes) -> int | None:
        if self.is_over or self._random.random() >= self.cut_share:
            return None
        self.times += 1
        return self._random.randrange(len(piece))


_ANSWERS = (
    (409, "Conflict"),
    (500, "InternalError"),
    (503, "ServiceUnavailable"),
    (504, "Timeout"),
    (429, "TooManyRequests"),
)
