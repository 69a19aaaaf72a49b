"""Builds answers that may be large in threads, so that the event loop serves other clients meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from medha_router.prepare import Plan

_MOST_AT_ONCE = 4
"""Large answers that are built at the same time: each may take half a gigabyte."""
_T = TypeVar("_T")


class LargeAnswers:
    """Builds the answers of all requests, a few large ones at a time."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MOST_AT_ONCE)

    async def build(self, plan: Plan, make: Callable[[], _T]) -> _T:
        """Return what `make` returns: an answer of a request, or a part of it. It runs in a thread if that may be large."""
        if plan.sampling.logprobs is None and plan.sampling.prompt_logprobs is None:
            return make()
        async with self._room:
            return await asyncio.to_thread(make)
