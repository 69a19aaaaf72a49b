"""The spans of a router: an HTTP request, what is done before it waits, and its sequences with each attempt at a replica.

A sequence's spans follow the happenings that its bar on the page `/ui` is made of (`medha.observing.timeline`). The context of an
attempt travels in its `Submit`, so that the replica's own spans are below it. Nothing here exists unless traces are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medha.observing.timeline import Began, Finished, Happening, Interrupted, Sampled, Timeline
from medha.routing.prefix_memory import prefill_seconds
from medha.routing.router_core import RouterCore
from medha.routing.router_events import Send as Forward
from medha.wire.messages import Cancel, FetchBundle, Submit
from medha_router.access_log import Entry
from medha_router.api_error import ApiError
from medha_router.bodies import ClientGone
from medha_router.probe_paths import PROBE_PATHS
from medha_traces import attribute_names as names

if TYPE_CHECKING:
    from medha_traces.exporting import LiveSpan, SpanSource

MOST_SEQUENCES = 16
"""Sequences of one request that have spans."""
_GOOD_OUTCOMES = ("stop", "length", "cancelled")
_SHOWN_PATH = 200
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})


@dataclass(slots=True)
class _Sequence:
    """A sequence whose request is recorded, with the spans that are open."""

    span: LiveSpan
    queue: LiveSpan | None
    began: Began
    attempt: LiveSpan | None = None
    attempts: int = 0
    has_token: bool = False  # of this attempt


class RequestSpans:
    """The open spans of a router's requests."""

    def __init__(self, source: SpanSource) -> None:
        self.source = source
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record what is done within as a part of the current request."""
        return _phase(self.source.current(), name)

    def take(self, happening: Happening) -> None:
        """Follow a sequence. Its parent is the request whose task it begins in."""
        if isinstance(happening, Began):
            self._begin(happening)
            return
        sequence = self._sequences.get(happening.id)
        if sequence is None:
            return
        match happening:
            case Sampled(tokens=tokens, cached_tokens=cached_tokens) if tokens and not sequence.has_token:
                sequence.has_token = True
                if sequence.attempt is not None:
                    sequence.attempt.event(names.FIRST_SAMPLED)
                    sequence.attempt.set({names.CACHED_TOKENS: cached_tokens})
            case Interrupted(kind="moved", reason=reason):
                _end_attempt(sequence, reason)
                sequence.queue = sequence.span.child(names.QUEUE, {names.LEFT_BECAUSE: reason})
            case Finished(outcome=outcome):
                error = None if outcome in _GOOD_OUTCOMES else outcome
                _end_attempt(sequence, error)
                _end(sequence.queue, error)
                sequence.span.set({names.OUTCOME: outcome})
                sequence.span.end(error)
                del self._sequences[happening.id]

    def forwarded(self, send: Forward, core: RouterCore) -> Submit | Cancel | FetchBundle:
        """Return the message of a command of `core`, a `Submit` with the context of the attempt that begins with it."""
        submit = send.message
        if not isinstance(submit, Submit):
            return submit
        sequence = self._sequences.get(submit.id) or self._sequences.get(submit.id.rpartition("~")[0])
        if sequence is None:
            return submit
        if sequence.queue is not None:
            sequence.queue.set(_standing(sequence.began, send, submit, core))
            sequence.queue.end()
            sequence.queue = None
        sequence.attempts += 1
        sequence.has_token = False
        sampling = submit.sampling
        sequence.attempt = sequence.span.child(
            names.ATTEMPT_SPAN,
            {
                names.SEQUENCE_ID: submit.id,
                names.REPLICA: send.replica,
                names.ATTEMPT: sequence.attempts,
                names.RESUMED_TOKENS: submit.tokens - submit.prompt_length,
                names.PROVIDER: names.OUR_PROVIDER,
                names.REQUEST_MODEL: sequence.began.model,
                names.INPUT_TOKENS: submit.prompt_length,
                names.REQUEST_MAX_TOKENS: sampling.max_tokens,
                names.REQUEST_TEMPERATURE: sampling.temperature,
                names.REQUEST_TOP_P: sampling.top_p,
            },
            "client",
        )
        return replace(submit, trace=sequence.attempt.trace)

    def _begin(self, began: Began) -> None:
        parent = self.source.current()
        index = began.id.rpartition("-")[2]
        if not parent.is_recorded or not index.isdecimal() or int(index) >= MOST_SEQUENCES:
            return
        span = parent.child(
            names.SEQUENCE,
            {
                names.SEQUENCE_ID: began.id,
                names.SERVICE_CLASS: began.service_class,
                names.INPUT_TOKENS: began.prompt_tokens,
                names.TTFT_TARGET: began.due_seconds,
                names.TPOT_TARGET: began.tpot_target_seconds,
            },
        )
        queue = span.child(names.QUEUE, {names.SERVICE_CLASS: began.service_class})
        self._sequences[began.id] = _Sequence(span, queue, began)


class TracedTimeline(Timeline):
    """A timeline whose happenings become spans, too."""

    def __init__(self, origin: float, spans: RequestSpans) -> None:
        super().__init__(origin)
        self._spans = spans

    def take(self, happening: Happening, at: float) -> None:
        super().take(happening, at)
        self._spans.take(happening)


class TracedRequests:
    """Makes the span of each HTTP request, below that of the client if its headers name one."""

    def __init__(self, app: ASGIApp, source: SpanSource) -> None:
        self._app = app
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        entry = Entry.of(scope)
        method = scope["method"] if scope["method"] in _METHODS else "HTTP"
        span = self._source.serve(
            method,
            Headers(scope=scope),
            {names.METHOD: method, names.SCHEME: scope["scheme"], names.REQUEST_ID: entry.request_id},
        )
        if span.is_recorded:
            entry.trace_id = span.trace_id
        answer = _Answer(span)

        async def follow(message: Message) -> None:
            answer.follow(message)
            await send(message)

        try:
            with span.as_current():
                await self._app(scope, receive, follow if span.is_recorded else send)
        finally:
            if span.is_recorded:
                self._end(span, answer, method, scope, entry)

    def _end(self, span: LiveSpan, answer: _Answer, method: str, scope: Scope, entry: Entry) -> None:
        answer.end()
        route = getattr(scope.get("route"), "path", None)  # set by FastAPI, if it has found one
        if route is not None:
            span.name(f"{method} {route}")
        operation = names.OPERATIONS.get(route or "")
        span.set(
            {
                names.ROUTE: route,
                names.PATH: scope["path"][:_SHOWN_PATH],
                names.STATUS: answer.status,
                names.KEY_NAME: entry.key_name,
                names.OUTCOME: entry.outcome,
                names.OPERATION: operation,
                names.PROVIDER: None if operation is None else names.OUR_PROVIDER,
                names.REQUEST_MODEL: entry.model,
                names.INPUT_TOKENS: entry.prompt_tokens,
                names.OUTPUT_TOKENS: entry.output_tokens,
                names.FIRST_CHUNK_SECONDS: None
                if entry.ttft_seconds is None
                else round(entry.ttft_seconds, 6),
                names.FINISH_REASONS: [entry.outcome] if entry.outcome in ("stop", "length") else None,
            }
        )
        # As the conventions say, a client's own error is no error of the server.
        is_error = answer.status >= 500
        span.end((entry.outcome or str(answer.status)) if is_error else None)


class _Answer:
    """The answer to a request while it is sent; one in pieces has a span of its own."""

    def __init__(self, request: LiveSpan) -> None:
        self.status = 500  # that of a bug before an answer has begun
        self._request = request
        self._stream: LiveSpan | None = None
        self._has_content = False

    def follow(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body, goes_on = message.get("body", b""), message.get("more_body", False)
        if goes_on and self._stream is None:
            self._stream = self._request.child(names.STREAM)
        if self._stream is not None and body and not self._has_content and not body.startswith(b":"):
            self._has_content = True
            self._stream.event(names.FIRST_CHUNK)
        if not goes_on:
            self.end()

    def end(self) -> None:
        _end(self._stream)
        self._stream = None


def no_phase(_name: str) -> AbstractContextManager[None]:
    """Record nothing, as traces are off."""
    return nullcontext()


@contextmanager
def _phase(request: LiveSpan, name: str) -> Iterator[None]:
    if not request.is_recorded:
        yield
        return
    span = request.child(name)
    error: str | None = "internal_error"
    try:
        yield
        error = None
    except ApiError as refusal:
        # As for requests: a client's own error is none of the server.
        error = refusal.code if refusal.is_ours else None
        raise
    except ClientGone:
        error = None
        raise
    finally:
        span.end(error)


def _standing(began: Began, send: Forward, submit: Submit, core: RouterCore) -> dict[str, str | float | None]:
    """Return where a sequence stands when it leaves the queue: the policy of its replica, and the time to spare."""
    due, slack = began.due_seconds, None
    card = next((one for one in core.fleet.cards(began.model) if one.replica == send.replica), None)
    if card is not None and due is not None:
        slack = due - submit.age_seconds - prefill_seconds(card.prefill_points, submit.tokens)
    policy = None if card is None else card.order.policy
    return {names.POLICY: policy, names.AHEAD: send.ahead_seconds, names.SLACK: slack}


def _end_attempt(sequence: _Sequence, error: str | None) -> None:
    _end(sequence.attempt, error)
    sequence.attempt = None


def _end(span: LiveSpan | None, error: str | None = None) -> None:
    if span is not None:
        span.end(error)
