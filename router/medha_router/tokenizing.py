"""Parsing, rendering and tokenising of requests, never on the event loop.

Small bodies go to a thread; owners take turns (`medha_router.owner_queue`). Large ones go to a separate process, in the
order of `medha_router.body_queue`: parsing 20 MB of JSON, rendering it and listing its millions of ids would block the
interpreter, and with it `/health`, for hundreds of milliseconds. A body whose client has gone waits no longer; if it is
long and at work, its process is killed, and another one is started when it is needed.

The memory of a process is freed when it ends, and a request that crashes it affects no other request. A
process that is lost during a request, or takes too long, is killed, and the request is retried once on
another process.

A new grammar is checked while its request holds neither a thread nor a process (`medha_router.check_queue`). The request
is then prepared once more; a large body waits in the queue again.

The two ends of a pipe exchange frames of a JSON header and raw bytes (`medha_router.child_pipe`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from medha.errors import RequestInvalid
from medha.wire.frames import tokens_to_frame
from medha_process.part_process import end_with_parent
from medha_process.router_settings import RouterSettings
from medha_router.api_error import ApiError
from medha_router.bodies import Body
from medha_router.body_queue import LONG_BYTES, BodyQueue
from medha_router.check_queue import CheckQueue
from medha_router.child_pipe import end_child, read_frame, write_frame
from medha_router.grammar_check import GrammarCheck, Unchecked
from medha_router.owner_queue import OwnerQueue
from medha_router.prepare import Catalog, Endpoint, Plan, Prepared, prepare
from medha_router.tokenizer_bundle import Bundle

_log = logging.getLogger("medha.router")

_PLAN = TypeAdapter(Plan)
_CATALOG = TypeAdapter(Catalog)
_MOST_SECONDS_PER_BYTE = 1e-5  # for each byte of a body, beyond `tokenize_seconds`


@dataclass(eq=False)
class _SmallJob:
    """A small body that waits for a thread, or is at work in one."""

    call: Callable[[], Prepared]
    outcome: asyncio.Future[Prepared]
    work: Future[Prepared] | None = None
    """The call in its thread, once it has one."""


@dataclass(eq=False)
class _Job:
    """A large body on its way through the queue and a process."""

    endpoint: Endpoint
    body: Body
    catalog: Catalog
    outcome: asyncio.Future[Prepared]
    answers: dict[bytes, str] = field(default_factory=dict)
    """Checks of its grammars, by question."""
    checks: asyncio.Task[None] | None = None
    """The wait for checks of its grammars; it is then neither in the queue nor in a process."""
    process: _Process | None = None
    """The process that works on it now."""
    is_withdrawn: bool = False
    """True once the client has gone."""

    @property
    def is_long(self) -> bool:
        return len(self.body.content) >= LONG_BYTES


class Tokenizing:
    """Bundles by digest, and the threads and processes that use them."""

    def __init__(self, settings: RouterSettings, observe_seconds: Callable[[str, float], None]) -> None:
        self._settings = settings
        self._observe_seconds = observe_seconds
        self._bundles: dict[str, Bundle] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="medha-bundles-", dir=settings.scratch_directory)
        self._threads = ThreadPoolExecutor(settings.tokenize_threads, "tokenize")
        self._small: OwnerQueue[_SmallJob] = OwnerQueue()
        self._busy_threads = 0
        self._grammar_check = GrammarCheck(waits=False)
        self._checks = CheckQueue(self._grammar_check.learn)
        self._large_threads = ThreadPoolExecutor(settings.tokenize_processes, "tokenize-large")
        self._processes: queue.SimpleQueue[_Process] = queue.SimpleQueue()  # idle ones
        self._started: set[_Process] = set()  # all of them, idle or not
        self._queue: BodyQueue[_Job] = BodyQueue(settings.tokenize_processes)
        self._closed = False

    @property
    def waiting_bodies(self) -> int:
        """Number of large bodies that wait for a process."""
        return self._queue.waiting

    def start(self) -> None:
        """Start the process that checks grammars, on a thread: the first request with a grammar then waits for the check alone."""
        self._checks.begin_with(self._grammar_check.start)

    async def add_bundle(self, files: Mapping[str, bytes]) -> str:
        """Load a bundle and return its digest.

        Raises:
            CheckpointInvalid: it cannot be used.
        """
        bundle = await asyncio.get_running_loop().run_in_executor(self._threads, self._load, files)
        self._bundles[bundle.digest] = bundle
        return bundle.digest

    def _load(self, files: Mapping[str, bytes]) -> Bundle:
        bundle = Bundle(files, self._grammar_check)
        folder = Path(self._folder.name) / bundle.digest
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return bundle

    def drop_bundle(self, digest: str) -> None:
        """Forget a bundle; requests that were prepared with it keep it."""
        self._bundles.pop(digest, None)
        shutil.rmtree(Path(self._folder.name) / digest, ignore_errors=True)

    def bundle(self, digest: str) -> Bundle:
        """Return a loaded bundle.

        Raises:
            ApiError: 503, it has been dropped.
        """
        bundle = self._bundles.get(digest)  # in one step, because threads call this
        if bundle is None:
            raise _gone()
        return bundle

    def prepare(self, endpoint: Endpoint, body: Body, catalog: Catalog) -> asyncio.Future[Prepared]:
        """Start preparing a request, and return the future result, or the ApiError for the client.

        The body is released when neither a thread nor a process needs it any more. Cancelling the future withdraws the
        body: it waits no longer, and if it is long, work on it ends.
        """
        loop = asyncio.get_running_loop()
        is_large = len(body.content) > self._settings.large_body_bytes
        outcome: asyncio.Future[Prepared]
        if is_large:
            outcome = self._enqueue(endpoint, body, catalog)
        else:
            outcome = loop.create_task(self._prepare_small(endpoint, body, catalog))
        place, started = "process" if is_large else "thread", loop.time()
        outcome.add_done_callback(lambda _: self._observe_seconds(place, loop.time() - started))
        return outcome

    async def _prepare_small(self, endpoint: Endpoint, body: Body, catalog: Catalog) -> Prepared:
        loop = asyncio.get_running_loop()
        job: _SmallJob | None = None
        answers: dict[bytes, str] = {}
        try:
            while True:
                try:
                    call = partial(self._prepare_here, endpoint, body, catalog, dict(answers))
                    job = _SmallJob(call, loop.create_future())
                    self._small.add(body.owner, job)
                    self._start_small()
                    return await job.outcome
                except Unchecked as unchecked:
                    await self._learn(unchecked, answers, body.owner)
        finally:
            work = None if job is None else job.work
            if job is not None and work is None:
                self._small.remove(body.owner, job)
            if work is None or work.done():
                body.release()
            else:  # the client has gone while a thread reads the body
                work.add_done_callback(lambda _: loop.call_soon_threadsafe(body.release))

    async def _learn(self, unchecked: Unchecked, answers: dict[bytes, str], owner: str) -> None:
        """Wait for checks of an owner's grammars, and add their answers.

        Raises:
            ApiError: too many grammars wait to be checked.
            PartFailed: a check cannot be made.
        """
        for question in unchecked.questions:
            answers[question] = await self._checks.learn(question, owner)

    def _start_small(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed and self._busy_threads < self._settings.tokenize_threads:
            job = self._small.take()
            if job is None:
                return
            self._busy_threads += 1
            job.work = self._threads.submit(job.call)
            job.work.add_done_callback(
                lambda work, job=job: loop.call_soon_threadsafe(self._finish_small, job, work)  # type: ignore[misc]
            )

    def _finish_small(self, job: _SmallJob, work: Future[Prepared]) -> None:
        self._busy_threads -= 1
        _pass_on(work, job.outcome)
        self._start_small()

    def _prepare_here(
        self, endpoint: Endpoint, body: Body, catalog: Catalog, answers: Mapping[bytes, str]
    ) -> Prepared:
        try:
            with self._grammar_check.given(answers):
                return prepare(endpoint, body.content, catalog, self.bundle, self._settings.max_samples)
        except RequestInvalid as error:
            raise ApiError.from_invalid(error) from error

    # Large bodies, on the event loop ----------------------------------------------------------------

    def _enqueue(self, endpoint: Endpoint, body: Body, catalog: Catalog) -> asyncio.Future[Prepared]:
        loop = asyncio.get_running_loop()
        job = _Job(endpoint, body, catalog, loop.create_future())
        job.outcome.add_done_callback(lambda outcome: self._withdraw(job) if outcome.cancelled() else None)
        self._take_turn(job)
        return job.outcome

    def _take_turn(self, job: _Job) -> None:
        self._queue.add(job, len(job.body.content), job.body.owner, asyncio.get_running_loop().time())
        self._start_waiting()

    def _start_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._closed and (job := self._queue.start_next()) is not None:
            work = self._large_threads.submit(self._prepare_in_process, job)
            work.add_done_callback(lambda work, job=job: loop.call_soon_threadsafe(self._finish, job, work))  # type: ignore[misc]

    def _finish(self, job: _Job, work: Future[Prepared]) -> None:
        self._queue.remove(job)
        if job.outcome.done():  # nobody waits for it
            job.body.release()
        elif isinstance(error := work.exception(), Unchecked):
            learning = self._learn(error, job.answers, job.body.owner)
            job.checks = asyncio.get_running_loop().create_task(learning)
            job.checks.add_done_callback(lambda checks: self._checked(job, checks))
        else:
            self._end_job(job, error or work.result())
        self._start_waiting()

    def _checked(self, job: _Job, checks: asyncio.Task[None]) -> None:
        """Let a large body take another turn, after the checks of its grammars."""
        job.checks = None
        if job.outcome.done():
            job.body.release()
        elif (error := checks.exception()) is not None:
            self._end_job(job, error)
        else:
            self._take_turn(job)

    @staticmethod
    def _end_job(job: _Job, result: Prepared | BaseException) -> None:
        job.body.release()
        if isinstance(result, BaseException):
            job.outcome.set_exception(result)
        else:
            job.outcome.set_result(result)

    def _withdraw(self, job: _Job) -> None:
        if job.checks is not None:
            job.checks.cancel()
            return
        if self._queue.is_waiting(job):
            self._queue.remove(job)
            job.body.release()
            return
        job.is_withdrawn = True
        process = job.process
        if process is not None and job.is_long:
            process.kill()  # its thread then ends the job

    # Large bodies, in a thread ----------------------------------------------------------------------

    def _prepare_in_process(self, job: _Job) -> Prepared:
        try:
            return self._attempt(job)
        except (OSError, EOFError) as error:
            if job.is_withdrawn:
                raise
            _log.warning("a tokenising process was lost, so its request goes to another one: %s", error)
        try:
            return self._attempt(job)
        except (OSError, EOFError) as error:  # most likely out of memory
            message = (
                "tokenising this request failed twice; it may be too large for the router's memory or take too long: send "
                "a shorter one, or try again later"
            )
            raise ApiError(500, message, code="internal_error") from error

    def _attempt(self, job: _Job) -> Prepared:
        """Prepare a request in an idle process.

        Raises:
            ApiError: the error for the client.
            Unchecked: its grammars have to be checked first.
            OSError, EOFError: the process was lost, or took too long and was killed; or the client has gone.
        """
        if self._closed:
            raise EOFError("the router is stopping")
        process = self._idle_process()
        header = {
            "endpoint": job.endpoint,
            "catalog": _CATALOG.dump_python(job.catalog),
            "max_samples": self._settings.max_samples,
            "answers": {question.decode(): answer for question, answer in job.answers.items()},
        }
        job.process = process
        if job.is_withdrawn:  # since it began; from here on, a withdrawal kills the process
            self._processes.put(process)
            raise EOFError("the client has gone")
        try:
            prepared = process.prepare(header, job.body.content)
        except (OSError, EOFError):
            self._end(process)
            raise
        except (ApiError, Unchecked):
            self._hand_back(process, job)
            raise
        self._hand_back(process, job)
        return prepared

    def _hand_back(self, process: _Process, job: _Job) -> None:
        job.process = None
        if job.is_withdrawn and job.is_long:  # it may be about to be killed
            self._end(process)
        else:
            self._processes.put(process)

    def _idle_process(self) -> _Process:
        while not self._processes.empty():
            with suppress(queue.Empty):  # another thread was faster
                process = self._processes.get_nowait()
                if process.is_alive:
                    return process
                self._end(process)
        process = _Process(self._folder.name, self._settings.tokenize_seconds)
        self._started.add(process)
        return process

    def _end(self, process: _Process) -> None:
        self._started.discard(process)
        process.end()

    def close(self) -> None:
        self._closed = True
        for process in list(self._started):
            process.kill()  # so that no thread waits for a busy one
        self._threads.shutdown(cancel_futures=True)
        self._grammar_check.close()
        self._checks.close()
        self._large_threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.end()
        self._folder.cleanup()


class _Process:
    """The router's end of one tokenising process."""

    def __init__(self, bundles_folder: str, most_seconds: float) -> None:
        self._most_seconds = most_seconds
        command = [sys.executable, "-m", "medha_router.tokenizing", bundles_folder, str(os.getpid())]
        # A separate session: Ctrl-C at a terminal must not reach it before the router's drain is over.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def prepare(self, header: dict[str, Any], body: bytearray) -> Prepared:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        overdue = Timer(self._most_seconds + _MOST_SECONDS_PER_BYTE * len(body), self.kill)
        overdue.start()
        try:
            write_frame(self._process.stdin, to_json(header), body)
            head, payload = read_frame(self._process.stdout, 2)
        finally:
            overdue.cancel()
        answer = from_json(bytes(head))
        if "error" in answer:
            raise ApiError(**answer["error"])
        if "unchecked" in answer:
            raise Unchecked(*(question.encode() for question in answer["unchecked"]))
        if "plan" not in answer:
            return Prepared(answer=bytes(payload))
        ends = np.cumsum(answer["lengths"])[:-1]
        # Not `tokens_from_frame`: prompts may be longer than one frame of a link.
        ids = np.frombuffer(payload, dtype="<i4").astype(np.int32, copy=False)
        prompts = np.split(ids, ends)
        return Prepared(_PLAN.validate_python(answer["plan"]), tuple(prompts))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        end_child(self._process)


def _pass_on(work: Future[Prepared], outcome: asyncio.Future[Prepared]) -> None:
    """Pass the result or error of finished work on to `outcome`, unless that is done already."""
    if outcome.done():
        return
    if work.cancelled():
        outcome.cancel()
    elif (error := work.exception()) is None:
        outcome.set_result(work.result())
    else:
        outcome.set_exception(error)


def _gone() -> ApiError:
    """Return the error of a request whose bundle was dropped, because no replica has served it for long."""
    text = "no replica serves this version of the model any longer; try again"
    return ApiError(503, text, code="unavailable", retry_after_seconds=1)


def _serve(bundles_folder: Path, router: int) -> None:
    """Run the tokenising process: answer until the router closes the pipe, and never outlive it.

    `router` is the id of the router's process.
    """
    end_with_parent(router)
    bundles: dict[str, Bundle] = {}
    check = GrammarCheck(waits=False)  # all checks are the router's, so that they wait in its queue

    def bundle_of(digest: str) -> Bundle:
        for dropped in [one for one in bundles if not (bundles_folder / one).exists()]:
            del bundles[dropped]
        if digest not in bundles:
            folder = bundles_folder / digest
            try:
                files = {path.name: path.read_bytes() for path in folder.iterdir()}
            except OSError as error:
                raise _gone() from error
            bundles[digest] = Bundle(files, check)
        return bundles[digest]

    source = os.fdopen(os.dup(0), "rb", buffering=0)
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not get between the frames

    def answer(payload: bytes, **header: Any) -> None:
        write_frame(sink, to_json(header), payload)

    while True:
        try:
            head, body = read_frame(source, 2)
        except EOFError:
            return
        header = from_json(bytes(head))
        catalog = _CATALOG.validate_python(header["catalog"])
        answers = {question.encode(): answer for question, answer in header["answers"].items()}
        check.keep(answers)
        try:
            with check.given(answers):
                prepared = prepare(header["endpoint"], body, catalog, bundle_of, header["max_samples"])
        except Unchecked as unchecked:
            answer(b"", unchecked=[question.decode() for question in unchecked.questions])
        except RequestInvalid as error:
            answer(b"", error=ApiError.from_invalid(error).fields())
        except ApiError as error:
            answer(b"", error=error.fields())
        else:
            if prepared.plan is None:
                answer(prepared.answer or b"")
            else:
                payload = b"".join(tokens_to_frame(prompt) for prompt in prepared.prompts)
                lengths = [len(prompt) for prompt in prepared.prompts]
                answer(payload, plan=asdict(prepared.plan), lengths=lengths)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
