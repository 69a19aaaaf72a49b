"""The OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from medha.metric_catalogue import UNKNOWN_MODEL
from medha.slo import FALLBACK_TERMS
from medha.wire.messages import ServiceClassTerms
from medha_process.router_settings import RouterSettings
from medha_router.access_log import AccessLog, Entry
from medha_router.api_error import ApiError
from medha_router.bodies import Bodies, BodyLimits, ClientGone
from medha_router.connections import Connections
from medha_router.event_streams import (
    DONE,
    EventStream,
    error_response,
    event,
    json_response,
    while_connected,
)
from medha_router.generation import Generation, Piece
from medha_router.openai_requests import shown
from medha_router.openai_responses import Answers, usage
from medha_router.origin_policy import SitePolicy, Sites
from medha_router.prepare import Endpoint, Plan, Prepared
from medha_router.replica_link import ReplicaLink
from medha_router.router_metrics import Observer
from medha_router.tokenizing import Tokenizing

_EARLY_ERROR_SECONDS = 0.5
"""Longest time until a stream's status is sent; an error before then still gets its own status."""


class HttpApi:
    """The endpoints, on top of the router's components."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizing: Tokenizing,
        link: ReplicaLink,
        observer: Observer,
        connections: Connections,
    ) -> None:
        self._bodies = Bodies(
            BodyLimits(settings.max_body_bytes, settings.large_body_bytes, settings.body_seconds),
            settings.bodies_budget_bytes,
        )
        self._tokenizing = tokenizing
        self._link = link
        self._observer = observer
        self._connections = connections
        self._started = int(datetime.now(UTC).timestamp())
        self.draining = False
        self.open_requests = 0

    # Generation -----------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def _generate(self, request: Request, endpoint: Endpoint) -> Response:
        if self.draining:
            error = ApiError(503, "this router is stopping", code="unavailable", retry_after_seconds=1)
            self._count_refusal(endpoint, error)
            raise error
        self.open_requests += 1
        entry = Entry.of(request.scope)
        handed_over = False  # to a stream, which outlives this call
        try:
            generation, answers, headers = await self._start(request, endpoint)
            pieces = generation.pieces()
            try:
                if generation.plan.stream:
                    first = await while_connected(request.receive, _soon(pieces))
                    events = self._events(generation, answers, pieces, first)
                    handed_over = True
                    return EventStream(events, headers, lambda: self._end(generation, entry))
                whole = await while_connected(request.receive, _collect(pieces))
                total = _usage(generation)
                return json_response(answers.whole(whole, total), headers)
            finally:
                if not handed_over:
                    _close(generation, entry)
        except ApiError as error:
            entry.outcome = error.code
            return error_response(error)
        except ClientGone:
            entry.outcome = "cancelled"
            return Response(status_code=499)  # nobody receives it; nginx's code for a closed connection
        finally:
            if not handed_over:
                self.open_requests -= 1

    def _end(self, generation: Generation, entry: Entry) -> None:
        _close(generation, entry)
        self.open_requests -= 1

    async def _start(
        self, request: Request, endpoint: Endpoint
    ) -> tuple[Generation, Answers, dict[str, str]]:
        arrived_at = asyncio.get_running_loop().time()
        try:
            ttft_target = _milliseconds(request, "x-slo-ttft-ms")
            requested_tpot = _milliseconds(request, "x-slo-tpot-ms")
            prepared = await self._prepare(request, endpoint)
            plan = prepared.plan
            assert plan is not None
            terms = self._service_class(plan)
        except ClientGone:
            self._observer.request_ended(UNKNOWN_MODEL, endpoint, "cancelled")
            raise
        except Exception as error:
            self._count_refusal(endpoint, error)
            raise
        tpot_target = None if requested_tpot is None else max(requested_tpot, terms.tpot_floor_seconds)
        prefix = "chatcmpl" if endpoint == "chat" else "cmpl"
        request_id = f"{prefix}-{Entry.of(request.scope).unique_id}"
        bundle = self._tokenizing.bundle(plan.digest)
        generation = Generation(
            request_id,
            prepared,
            terms,
            ttft_target,
            tpot_target,
            self._link,
            bundle,
            self._observer,
            arrived_at,
        )
        answers = Answers(request_id, int(datetime.now(UTC).timestamp()), plan, bundle)
        headers = {
            "x-medha-service-class": terms.name,
            "x-medha-tpot-target-ms": f"{generation.tpot_target_seconds * 1000:g}",
        }
        if ttft_target is not None:
            headers["x-medha-ttft-target-ms"] = f"{ttft_target * 1000:g}"
        return generation, answers, headers

    async def _prepare(self, request: Request, endpoint: Endpoint) -> Prepared:
        body = self._bodies.open()
        try:
            await body.receive(request)
            work = self._tokenizing.prepare(endpoint, body, self._link.catalog())
        except BaseException:
            body.release()
            raise
        return await while_connected(request.receive, work)

    def _count_refusal(self, endpoint: Endpoint, error: Exception) -> None:
        """Count a request that failed before it became sequences; a bug counts as the client's internal error."""
        told = error if isinstance(error, ApiError) else ApiError(500, "", code="internal_error")
        model = told.model or ""
        known = self._link.core.known(model)
        outcome = told.code or "error"
        self._observer.request_ended(model if known is not None else UNKNOWN_MODEL, endpoint, outcome)
        if known is not None and told.is_ours:
            classes = known.service_classes
            named = told.service_tier
            self._observer.never_tokenised(model, named if named in classes else classes[0])

    def _service_class(self, plan: Plan) -> ServiceClassTerms:
        """Return the class that `service_tier` names.

        `auto`, `default` and none mean the first class, unless a class has that name.
        """
        cards = self._link.core.cards(plan.model)
        classes = next((card.service_classes for card in cards if card.service_classes), (FALLBACK_TERMS,))
        wanted = plan.service_tier or "auto"
        for terms in classes:
            if terms.name == wanted:
                return terms
        if wanted in ("auto", "default"):
            return classes[0]
        known = ", ".join(dict.fromkeys(("auto", "default", *(terms.name for terms in classes))))
        message = f"`service_tier` is {shown(wanted)}; this model has {known}"
        raise ApiError(400, message, "service_tier", "invalid_value", model=plan.model)

    async def _events(
        self,
        generation: Generation,
        answers: Answers,
        pieces: AsyncIterator[Piece],
        first: asyncio.Task[Piece],
    ) -> AsyncGenerator[bytes]:
        opened: set[int] = set()
        try:
            async for piece in _resumed(first, pieces):
                content = b""
                if piece.index not in opened:
                    opened.add(piece.index)
                    opening = answers.opening(piece.index)
                    content = event(opening) if opening is not None else b""
                for chunk in answers.chunks(piece):
                    if generation.plan.continuous_usage:
                        chunk["usage"] = _usage(generation)
                    content += event(chunk)
                yield content
            if generation.plan.include_usage:
                yield event(answers.usage_chunk(_usage(generation)))
        except ApiError as error:
            yield event(error.body())
        finally:
            first.cancel()
        yield DONE

    # Other endpoints ------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, "detokenize")

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        try:
            prepared = await self._prepare(request, endpoint)
        except ClientGone:
            Entry.of(request.scope).outcome = "cancelled"
            return Response(status_code=499)
        return Response(prepared.answer, media_type="application/json")

    async def models(self) -> Response:
        names = sorted(self._link.catalog().models)
        return json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, model: str) -> Response:
        self._link.catalog().terms(model)
        return json_response(self._model(model))

    def _model(self, name: str) -> dict[str, object]:
        terms = self._link.catalog().models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "medha",
            "max_model_len": terms.max_model_len,
        }

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        if self.draining:
            raise ApiError(503, "this router is stopping", code="unavailable")
        if not self._link.core.ready:
            raise ApiError(503, "no ready replica is known", code="unavailable")
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        core = self._link.core
        self._observer.snapshot(
            core.cards(),
            core.known_models(),
            requests_open=self.open_requests,
            sequences_open=core.open,
            sequences_waiting=core.waiting,
            waiting_by_model=core.waiting_by_model(),
            connections_open=self._connections.open,
            bodies_bytes=self._bodies.held_bytes,
        )
        content = generate_latest(self._observer.registry)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})


def build_app(api: HttpApi, sites: SitePolicy) -> ASGIApp:
    """Return the ASGI application. Every response carries `X-Request-Id`; every error is an OpenAI error object."""
    # No redirects: their target would be taken from the Host header.
    app = FastAPI(title="Medha", openapi_url=None, redirect_slashes=False)
    for path, post in (
        ("/v1/chat/completions", api.chat_completions),
        ("/v1/completions", api.completions),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
    ):
        app.add_api_route(path, post, methods=["POST"])
    for path, get in (
        ("/v1/models", api.models),
        ("/v1/models/{model:path}", api.model),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/metrics", api.metrics),
    ):
        app.add_api_route(path, get, methods=["GET", "HEAD"])

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        Entry.of(request.scope).outcome = error.code
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": ", ".join([*allowed, "OPTIONS"])})
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        Entry.of(request.scope).outcome = code
        message = f"{error.detail}: {request.method} {request.url.path}"
        response = error_response(ApiError(error.status_code, message, code=code))
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join([*allowed, "OPTIONS"])
        return response

    async def on_bug(_request: Request, _error: Exception) -> Response:
        return error_response(ApiError(500, "internal error of the router", code="internal_error"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    if sites.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(sites.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return AccessLog(Sites(app, sites))


def _close(generation: Generation, entry: Entry) -> None:
    """End a generation, and record its outcome in the access log entry."""
    generation.close()
    entry.model = generation.plan.model
    entry.outcome = generation.outcome
    entry.prompt_tokens = generation.prompt_tokens
    entry.output_tokens = generation.output_tokens
    entry.ttft_seconds = generation.ttft_seconds


def _usage(generation: Generation) -> dict[str, Any]:
    return usage(generation.prompt_tokens, generation.output_tokens, generation.cached_tokens)


async def _collect(pieces: AsyncIterator[Piece]) -> list[Piece]:
    """Return one whole piece per choice, in order of index."""
    choices: dict[int, Piece] = {}
    texts: dict[int, list[str]] = {}
    async for piece in pieces:
        whole = choices.setdefault(piece.index, Piece(piece.index))
        texts.setdefault(piece.index, []).append(piece.text)
        whole.tokens += piece.tokens
        whole.finish_reason = piece.finish_reason
    for index, whole in choices.items():
        whole.text = "".join(texts[index])
    return [choices[index] for index in sorted(choices)]


async def _resumed(first: asyncio.Task[Piece], pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield await first
    async for piece in pieces:
        yield piece


async def _soon(pieces: AsyncIterator[Piece]) -> asyncio.Task[Piece]:
    """Return the task of the first piece, after a moment in which an early error would have come.

    Raises:
        ApiError: an early error came.
    """
    first = asyncio.ensure_future(anext(pieces))
    try:
        await asyncio.wait((first,), timeout=_EARLY_ERROR_SECONDS)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        first.result()
    return first


def _milliseconds(request: Request, header: str) -> float | None:
    """Return the client's own target from a header, in seconds; None if the header is absent.

    Raises:
        ApiError: the header is not a positive number.
    """
    given = request.headers.get(header)
    if given is None:
        return None
    try:
        seconds = float(given) / 1000
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        message = f"the header {header} is {given[:80]!r}; give a positive number of milliseconds"
        raise ApiError(400, message, header, "invalid_value")
    return seconds
