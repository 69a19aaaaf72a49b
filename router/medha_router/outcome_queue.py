"""Queues the output of a request that its client has not read yet, up to a bound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from medha.routing.router_events import Deliver, Fail

MOST_WAITING_TOKENS = 2**16
"""Largest number of tokens that wait for one client; each alternative of a log-probability counts as one, too."""
_MERGE_FROM = 256
"""Number of waiting outcomes beyond which those of each sequence are merged: the client then needs fewer bytes to catch
up."""

Outcome = Deliver | Fail
"""The results that arrive for a sequence."""


class Unread(Exception):
    """The request was ended because its client did not take its output."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """An outcome and the time when it arrived, in seconds of the loop's clock; a merged one has that of its last part."""

    outcome: Outcome
    at: float


class OutcomeQueue:
    """The outcomes of one client request, in order for each of its sequences."""

    def __init__(self) -> None:
        self._waiting: deque[Arrived] = deque()
        self._tokens = 0  # that wait, as `MOST_WAITING_TOKENS` counts them
        self._has_some = asyncio.Event()
        self._is_over = False

    def put(self, outcome: Outcome, now: float) -> bool:
        """Add an outcome; return False if too much output waits now, so that the caller has to end the request."""
        self._waiting.append(Arrived(outcome, now))
        self._tokens += _weight(outcome)
        self._has_some.set()
        self._is_over |= self._tokens > MOST_WAITING_TOKENS
        return not self._is_over

    async def get(self) -> Arrived:
        """Return the next outcome, once there is one.

        Raises:
            Unread: the request was ended, and all output that it had until then has been taken.
        """
        if self._is_over and not self._waiting:
            raise Unread
        await self._has_some.wait()
        if len(self._waiting) > _MERGE_FROM:
            self._waiting = deque(merged(self._waiting))
            self._tokens = sum(_weight(arrived.outcome) for arrived in self._waiting)
        first = self._waiting.popleft()
        self._tokens -= _weight(first.outcome)
        if not self._waiting:
            self._has_some.clear()
        return first


def merged(waiting: Iterable[Arrived]) -> list[Arrived]:
    """Return one `Deliver` for each sequence, with all its tokens, and then the failures."""
    parts: dict[str, list[Deliver]] = {}
    times: dict[str, float] = {}
    failures = []
    for arrived in waiting:
        match arrived.outcome:
            case Deliver(id=sequence_id) as part:
                parts.setdefault(sequence_id, []).append(part)
                times[sequence_id] = arrived.at
            case Fail():
                failures.append(arrived)
    return [Arrived(_joined(those), times[sequence_id]) for sequence_id, those in parts.items()] + failures


def _joined(parts: list[Deliver]) -> Deliver:
    if len(parts) == 1:
        return parts[0]
    tokens = tuple(token for part in parts for token in part.tokens)
    logprobs = tuple(logprob for part in parts for logprob in part.logprobs)
    return replace(parts[0], tokens=tokens, logprobs=logprobs, finish_reason=parts[-1].finish_reason)


def _weight(outcome: Outcome) -> int:
    if isinstance(outcome, Fail):
        return 1
    return 1 + len(outcome.tokens) + sum(len(logprob.top) for logprob in outcome.logprobs)
