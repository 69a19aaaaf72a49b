"""The queue of grammars that wait to be checked, so that they occupy no thread that prepares requests.

A check may take a second. One is made at a time, and owners (API keys, or else addresses) take turns: many grammars of
one owner delay each other, and not those of others. Requests with the same grammar wait for the same check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from medha_router.api_error import ApiError
from medha_router.owner_queue import OwnerQueue

MOST_WAITING = 64
"""Most grammars that wait to be checked."""
MOST_WAITING_OF_OWNER = 16
"""Most grammars of one owner that wait to be checked."""
RETRY_SECONDS = 5


@dataclass(eq=False)
class _Job:
    question: bytes
    owner: str
    answered: asyncio.Future[str]
    waiting: int = 0  # requests that wait for it


class CheckQueue:
    """The checks that wait, and the one that is made; used on the event loop."""

    def __init__(self, learn: Callable[[bytes], str]) -> None:
        """`learn` makes a check; it is called on a thread."""
        self._learn = learn
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._jobs: dict[bytes, _Job] = {}  # by question, the one that is made included
        self._waiting: OwnerQueue[_Job] = OwnerQueue()
        self._is_busy = False

    async def learn(self, question: bytes, owner: str) -> str:
        """Wait until a check has been made, and return its answer.

        Raises:
            ApiError: 429 too many grammars of the owner wait; 503 too many of all.
            PartFailed: it cannot be made.
        """
        job = self._jobs.get(question) or self._enqueue(question, owner)
        job.waiting += 1
        try:
            return await asyncio.shield(job.answered)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.answered.done():
                self._withdraw(job)

    def begin_with(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` on the thread that makes checks, before those that are asked for from now on."""
        self._thread.submit(prepare)

    def close(self) -> None:
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True)

    def _enqueue(self, question: bytes, owner: str) -> _Job:
        own = self._waiting.of(owner)
        if own >= MOST_WAITING_OF_OWNER:
            message = (
                f"{own} new grammars of your own requests wait to be checked; wait until some of them have begun, and "
                "send fewer different ones at once"
            )
            raise ApiError(429, message, code="overloaded", retry_after_seconds=RETRY_SECONDS)
        if len(self._waiting) >= MOST_WAITING:
            message = "too many new grammars of all clients wait to be checked; try again later"
            raise ApiError(503, message, code="overloaded", retry_after_seconds=RETRY_SECONDS)
        job = self._jobs[question] = _Job(question, owner, asyncio.get_running_loop().create_future())
        self._waiting.add(owner, job)
        self._start_next()
        return job

    def _start_next(self) -> None:
        if self._is_busy or (job := self._waiting.take()) is None:
            return
        self._is_busy = True
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, self._learn, job.question)
        work.add_done_callback(lambda work: self._finish(job, work))

    def _finish(self, job: _Job, work: asyncio.Future[str]) -> None:
        self._is_busy = False
        del self._jobs[job.question]
        if work.cancelled():
            job.answered.cancel()
        elif (error := work.exception()) is None:
            job.answered.set_result(work.result())
        else:
            job.answered.set_exception(error)
            job.answered.exception()  # nobody may be left who waits for it
        self._start_next()

    def _withdraw(self, job: _Job) -> None:
        """Forget a check that nobody waits for, unless it is being made."""
        if self._waiting.remove(job.owner, job):
            del self._jobs[job.question]
