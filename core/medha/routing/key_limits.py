"""The limits of an API key: what happens is an event, and each event yields the next usage and perhaps a refusal.

Requests and tokens fill a bucket each, which empties evenly within a minute. A bucket holds what the key may
use in a minute. So a key that was idle can use a minute's worth at once, and in the long run never more than
its limits.

A prompt is charged when its length is known, and it has to fit. Output tokens are charged as they are sampled.
Nobody knows their number before, so they may overfill the bucket; the key's next requests are then refused
until the bucket has emptied below its limit.

A key may be used through several routers. Each adds what the others report to its own buckets
(`medha.routing.fleet_use`), so that all have the same level but for what was not reported yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from medha.api.api_keys import ApiKey

Limit = Literal["requestsPerMinute", "tokensPerMinute", "concurrency", "serviceClasses"]
LIMITS: tuple[Limit, ...] = ("requestsPerMinute", "tokensPerMinute", "concurrency", "serviceClasses")
"""Limits of a key, by their names in the file."""

_BUSY_SECONDS = 1.0
"""Seconds after which a client may try again if too many requests are open; the end of none is known."""
_ROUNDING = 1e-9
"""Relative error of a level that was emptied in many small steps."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a key: the levels of its buckets at the time `as_of` (seconds), and its open requests.

    The buckets hold the use of all routers; the other numbers are this router's own.
    """

    as_of: float
    requests: float = 0.0
    tokens: float = 0.0
    open_requests: int = 0
    total_requests: int = 0
    total_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        """True if it limits the key no more than no usage at all."""
        return self.open_requests == 0 and self.requests == 0 and self.tokens == 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request arrived; its body is not read yet."""


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The prompts of an open request turned out to have this many tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """An open request got this many output tokens."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """An open request ended."""


@dataclass(frozen=True, slots=True)
class UsedElsewhere:
    """Another router reported this much new use."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LevelElsewhere:
    """A router that was not heard before reported its buckets' levels; what this router knows may be part of them."""

    requests: float
    tokens: float


Event = Arrived | Tokenised | Sampled | Ended | UsedElsewhere | LevelElsewhere


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A refusal: the limit, its value, and the seconds until the same request may pass (None: it never may)."""

    limit: Limit
    value: int
    wait_seconds: float | None


def decide(
    usage: Usage, event: Event, key: ApiKey, now: float, open_elsewhere: int = 0
) -> tuple[Usage, OverLimit | None]:
    """Return the usage after an event, and a refusal if the key's limits do not allow it.

    A refused request has used nothing by that event. It is open only if its arrival was not refused.
    `open_elsewhere` is the number of the key's requests that are open at other routers.
    """
    usage = emptied(usage, key, now)
    match event:
        case Arrived():
            refusal = _arrival_refusal(usage, key, open_elsewhere)
            if refusal is not None:
                return usage, refusal
            return replace(_filled(usage, requests=1), open_requests=usage.open_requests + 1), None
        case Tokenised(tokens):
            limit = key.tokens_per_minute
            if limit is not None and usage.tokens + tokens > limit * (1 + _ROUNDING):
                excess = usage.tokens + tokens - limit
                wait_seconds = None if tokens > limit else _seconds(excess, limit)
                return usage, OverLimit("tokensPerMinute", limit, wait_seconds)
            return _filled(usage, tokens=tokens), None
        case Sampled(tokens):
            return _filled(usage, tokens=tokens), None
        case Ended():
            return replace(usage, open_requests=usage.open_requests - 1), None
        case UsedElsewhere(requests, tokens):
            usage = replace(usage, requests=usage.requests + requests, tokens=usage.tokens + tokens)
        case LevelElsewhere(least_requests, least_tokens):
            requests_level = max(usage.requests, least_requests)
            usage = replace(usage, requests=requests_level, tokens=max(usage.tokens, least_tokens))
    return emptied(usage, key, now), None  # a bucket without a limit stays empty


def _filled(usage: Usage, requests: int = 0, tokens: int = 0) -> Usage:
    """Return the usage after some by this router's own clients."""
    return replace(
        usage,
        requests=usage.requests + requests,
        tokens=usage.tokens + tokens,
        total_requests=usage.total_requests + requests,
        total_tokens=usage.total_tokens + tokens,
    )


def _arrival_refusal(usage: Usage, key: ApiKey, open_elsewhere: int) -> OverLimit | None:
    if key.concurrency is not None and usage.open_requests + open_elsewhere >= key.concurrency:
        return OverLimit("concurrency", key.concurrency, _BUSY_SECONDS)
    limit = key.requests_per_minute
    if limit is not None and usage.requests + 1 > limit * (1 + _ROUNDING):
        return OverLimit("requestsPerMinute", limit, _seconds(usage.requests + 1 - limit, limit))
    limit = key.tokens_per_minute
    if limit is not None and usage.tokens + 1 > limit * (1 + _ROUNDING):  # no prompt is shorter than a token
        return OverLimit("tokensPerMinute", limit, _seconds(usage.tokens + 1 - limit, limit))
    return None


def emptied(usage: Usage, key: ApiKey, now: float) -> Usage:
    """Return the usage at the time `now`; a bucket without a limit is empty."""
    minutes = (now - usage.as_of) / 60
    requests, tokens = (
        0.0 if limit is None else max(0.0, level - minutes * limit)
        for level, limit in ((usage.requests, key.requests_per_minute), (usage.tokens, key.tokens_per_minute))
    )
    return replace(usage, as_of=now, requests=requests, tokens=tokens)


def _seconds(excess: float, limit: int) -> float:
    """Return how long a bucket takes to lose `excess`."""
    return excess * 60 / limit
