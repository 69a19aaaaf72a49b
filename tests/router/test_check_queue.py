"""Grammars are checked one at a time; owners take turns, and what is too much is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from medha.errors import PartFailed
from medha_process.router_settings import RouterSettings
from medha_router import grammar_check
from medha_router.api_error import ApiError
from medha_router.check_queue import MOST_WAITING, MOST_WAITING_OF_OWNER, CheckQueue
from medha_router.grammar_check import GrammarCheck
from medha_router.tokenizing import Tokenizing


class Checks:
    """Checks that last until they are let go."""

    def __init__(self) -> None:
        self.made: list[bytes] = []
        self.goes_on = Event()

    def learn(self, question: bytes) -> str:
        self.made.append(question)
        self.goes_on.wait(60)
        if question == b"lost":
            raise PartFailed("the process was lost")
        return question.decode()


Scenario = Callable[[Checks, CheckQueue], Coroutine[Any, Any, None]]


def run(scenario: Scenario) -> Checks:
    checks = Checks()

    async def main() -> None:
        queue = CheckQueue(checks.learn)
        try:
            await scenario(checks, queue)
        finally:
            checks.goes_on.set()
            queue.close()

    asyncio.run(main())
    return checks


async def begun(*waits: Awaitable[str]) -> list[asyncio.Future[str]]:
    """Let requests begin to wait, in their order."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    await asyncio.sleep(0)
    return tasks


def test_owners_take_turns_and_one_grammar_is_checked_once() -> None:
    async def scenario(checks: Checks, queue: CheckQueue) -> None:
        asked = [(b"a0", "a"), (b"a1", "a"), (b"a2", "a"), (b"b0", "b"), (b"a1", "c"), (b"c0", "c")]
        tasks = await begun(*(queue.learn(question, owner) for question, owner in asked))
        checks.goes_on.set()
        await asyncio.gather(*tasks)

    assert run(scenario).made == [b"a0", b"a1", b"b0", b"c0", b"a2"]


def test_an_owner_with_too_many_is_told_so_and_others_are_not() -> None:
    async def scenario(checks: Checks, queue: CheckQueue) -> None:
        tasks = await begun(
            *(queue.learn(b"a%d" % number, "a") for number in range(MOST_WAITING_OF_OWNER + 1))
        )
        with pytest.raises(ApiError, match="your own requests") as refused:
            await queue.learn(b"one more", "a")
        assert (refused.value.status, refused.value.retry_after_seconds is not None) == (429, True)
        tasks += await begun(queue.learn(b"b", "b"), queue.learn(b"a3", "a"))  # one that waits already
        checks.goes_on.set()
        await asyncio.gather(*tasks)

    assert b"b" in run(scenario).made


def test_more_than_all_may_have_is_refused() -> None:
    async def scenario(checks: Checks, queue: CheckQueue) -> None:
        tasks = await begun(*(queue.learn(b"%d" % number, f"{number}") for number in range(MOST_WAITING + 1)))
        with pytest.raises(ApiError, match="all clients") as refused:
            await queue.learn(b"one more", "other")
        assert refused.value.status == 503
        checks.goes_on.set()
        await asyncio.gather(*tasks)
        await queue.learn(b"one more", "other")

    run(scenario)


def test_a_grammar_whose_clients_have_gone_is_not_checked() -> None:
    async def scenario(checks: Checks, queue: CheckQueue) -> None:
        tasks = await begun(*(queue.learn(question, "a") for question in (b"0", b"1", b"1", b"2")))
        tasks[1].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0)
        checks.goes_on.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found] == [False, True, False, True]

    assert run(scenario).made == [b"0", b"1"]


def test_a_check_that_cannot_be_made_fails_its_own_requests_alone() -> None:
    async def scenario(checks: Checks, queue: CheckQueue) -> None:
        checks.goes_on.set()
        with pytest.raises(PartFailed):
            await queue.learn(b"lost", "a")
        await queue.learn(b"found", "a")

    assert run(scenario).made == [b"lost", b"found"]


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


def test_the_process_that_checks_starts_with_the_router_and_ends_with_it(tmp_path: Path) -> None:
    settings = RouterSettings(
        key_file=tmp_path, enrolment_file=tmp_path, scratch_directory=str(tmp_path), tokenize_threads=1
    )
    others = _children()

    async def main() -> None:
        tokenizing = Tokenizing(settings, lambda *_: None)
        try:
            tokenizing.start()
            deadline = time.monotonic() + 60
            while not _children() - others:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        finally:
            tokenizing.close()  # also while it starts

    asyncio.run(main())
    assert not _children() - others


def test_no_grammar_is_checked_once_the_router_ends() -> None:
    check = GrammarCheck()
    check.start()
    check.close()
    with pytest.raises(PartFailed, match="is stopping"):
        check.fault('start: "b"')


def test_the_first_check_starts_no_process_where_one_was_started_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = GrammarCheck()
    check.start()
    monkeypatch.setattr(grammar_check.subprocess, "Popen", None)
    assert check.fault('start: "b"') is None
    check.close()
