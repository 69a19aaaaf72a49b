"""The OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp

from medha.observing.metric_catalogue import UNKNOWN_MODEL
from medha.routing.joining import awaited, may_accept
from medha.routing.waiting_room import WaitingRoom
from medha.slo import FALLBACK_TERMS
from medha.wire.messages import ServiceClassTerms
from medha_process.router_settings import RouterSettings, owner_body_budget
from medha_router.access_log import AccessLog, Entry
from medha_router.api_error import ApiError
from medha_router.authentication import Authentication, key_of
from medha_router.bodies import Bodies, Body, BodyLimits, ClientGone
from medha_router.connections import Connections
from medha_router.event_streams import (
    DONE,
    EventStream,
    PacedResponse,
    error_response,
    event,
    json_response,
    while_connected,
)
from medha_router.generation import Generation, Piece
from medha_router.key_accounts import Account, KeyAccounts
from medha_router.large_answers import LargeAnswers
from medha_router.openai_responses import Answers, usage
from medha_router.openapi import document, page
from medha_router.origin_policy import SitePolicy, Sites
from medha_router.prepare import Catalog, Endpoint, Generating, Plan, Prepared
from medha_router.probe_paths import PROBE_PATHS
from medha_router.replica_link import ReplicaLink
from medha_router.request_model import shown
from medha_router.request_spans import RequestSpans, TracedRequests, no_phase
from medha_router.response_objects import ResponseObjects
from medha_router.router_metrics import Observer
from medha_router.tokenizing import Tokenizing
from medha_router.ui import Ui
from medha_router.unsupported_paths import explanation
from medha_router.waiting_requests import WaitingRequests
from medha_router.watched_files import WatchedFiles
from medha_traces.attribute_names import RECEIVE, ROOM, TOKENISE

TTFT_HEADERS = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms")
"""Headers with a request's own TTFT target; the first one is also that of the Gateway API Inference Extension."""
TPOT_HEADERS = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
"""Headers in which a gateway names an objective. It chooses the service class of that name, if the model has one."""
_MOST_TTFT_TARGET_SECONDS = 86400.0
"""Largest TTFT target that a request can set; a larger one in its header is reduced to this. While KV is short, smaller
requests overtake a request until it is late, so a distant target would let them do so for as long."""
VERSION = version("medha")
_NO_OTHER_SITE = "default-src 'none'; style-src 'unsafe-inline'"
_EARLY_ERROR_SECONDS = 0.5
"""Longest wait for a stream's first output before its status 200 is sent; an error before then gets its own status."""


class HttpApi:
    """The endpoints, on top of the router's components."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizing: Tokenizing,
        link: ReplicaLink,
        observer: Observer,
        connections: Connections,
        accounts: KeyAccounts,
        watched: Sequence[WatchedFiles[Any]],
        spans: RequestSpans | None = None,
    ) -> None:
        """Serve the router's components; `watched` are the files whose validity the metrics show."""
        self._phase = no_phase if spans is None else spans.phase
        self._bodies = Bodies(
            BodyLimits(settings.max_body_bytes, settings.large_body_bytes, settings.body_seconds),
            settings.bodies_budget_bytes,
        )
        self._tokenizing = tokenizing
        self._link = link
        self._observer = observer
        self._connections = connections
        self._accounts = accounts
        self._large_answers = LargeAnswers()
        self._watched = watched
        self._started = int(datetime.now(UTC).timestamp())
        self._join_seconds = settings.join_seconds
        self._began_at = asyncio.get_running_loop().time()
        self._has_joined = False
        self.leaving = False
        """Set when the router stops: it should get no new requests."""
        room_bytes = settings.waiting_room_budget_bytes
        room = WaitingRoom(room_bytes, owner_body_budget(room_bytes), settings.waiting_room_seconds)
        self._waiting_requests = WaitingRequests(room, self._is_awaited, observer.waiting_room_refused)
        self.draining = False
        """Set when the router no longer serves requests of new connections."""
        self.open_requests = 0
        described = document(VERSION)
        self._openapi = json_response(described)
        self._docs = HTMLResponse(page(described), headers={"Content-Security-Policy": _NO_OTHER_SITE})

    # Generation -----------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, "chat")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def responses(self, request: Request) -> Response:
        return await self._generate(request, "responses")

    async def _generate(self, request: Request, endpoint: Generating) -> Response:
        if self.draining and request.scope["state"]["is_late"]:
            error = ApiError(503, "this router is stopping", code="unavailable", retry_after_seconds=1)
            self._count_refusal(endpoint, error)
            raise error
        account = self._accounts.account(key_of(request.scope))
        try:
            account.begin()
        except ApiError as error:
            self._count_refusal(endpoint, error)
            raise
        self.open_requests += 1
        entry = Entry.of(request.scope)
        try:
            with ExitStack() as ending:
                ending.callback(self._leave, account)
                generation, answers, headers = await self._start(request, endpoint, account)
                ending.callback(_close, generation, entry)
                pieces = generation.pieces()
                if generation.plan.stream:
                    first = await while_connected(request.receive, _soon(pieces))
                    if isinstance(answers, ResponseObjects):
                        events = self._response_events(generation, answers, pieces, first)
                    else:
                        events = self._events(generation, answers, pieces, first, entry.request_id)
                    # The stream outlives this call.
                    return EventStream(events, headers, ending.pop_all().close)
                whole = await while_connected(request.receive, _collect(pieces))
                total = _usage(generation)
                return await self._large_answers.build(
                    generation.plan, lambda: json_response(answers.whole(whole, total), headers)
                )
        except ApiError as error:
            entry.outcome = error.code
            return error_response(error, entry.request_id)
        except ClientGone:
            entry.outcome = "cancelled"
            return Response(status_code=499)  # nobody receives it; nginx's code for a closed connection

    def _leave(self, account: Account) -> None:
        self.open_requests -= 1
        account.end()

    async def _start(
        self, request: Request, endpoint: Generating, account: Account
    ) -> tuple[Generation, Answers | ResponseObjects, dict[str, str]]:
        arrived_at = asyncio.get_running_loop().time()
        try:
            ttft_target = _milliseconds(request, TTFT_HEADERS)
            requested_tpot = _milliseconds(request, TPOT_HEADERS)
            if ttft_target is not None or requested_tpot is not None:
                account.require_own_targets()
            if ttft_target is not None:
                ttft_target = min(ttft_target, _MOST_TTFT_TARGET_SECONDS)
            prepared = await self._prepare(request, endpoint, account)
            plan = prepared.plan
            assert plan is not None
            cache_salt = account.cache_salt(plan.cache_salt)
            prefixes = await self._link.prefixes(plan.model, prepared.prompts, cache_salt)
            terms = self._service_class(plan, account, request)
            bundle = self._tokenizing.bundle(plan.digest)
            computed = plan.times_computed * sum(len(prompt) for prompt in prepared.prompts)
            account.charge_prompts(computed, plan.model)
        except ClientGone:
            self._observer.request_ended(UNKNOWN_MODEL, endpoint, "cancelled")
            raise
        except Exception as error:
            self._count_refusal(endpoint, error)
            raise
        tpot_target = None if requested_tpot is None else max(requested_tpot, terms.tpot_floor_seconds)
        prefix = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}[endpoint]
        request_id = f"{prefix}{Entry.of(request.scope).unique_id}"
        generation = Generation(
            request_id,
            prepared,
            prefixes,
            terms,
            ttft_target,
            tpot_target,
            self._link,
            bundle,
            self._observer,
            arrived_at,
            account,
        )
        created = int(datetime.now(UTC).timestamp())
        answers: Answers | ResponseObjects
        if endpoint == "responses":
            answers = ResponseObjects(request_id, created, plan, terms.name)
        else:
            answers = Answers(request_id, created, plan, bundle, generation.scored_prompts)
        headers = {
            "x-medha-service-class": terms.name,
            "x-medha-tpot-target-ms": f"{generation.tpot_target_seconds * 1000:g}",
        }
        if ttft_target is not None:
            headers["x-medha-ttft-target-ms"] = f"{ttft_target * 1000:.10g}"
        return generation, answers, headers

    async def _prepare(self, request: Request, endpoint: Endpoint, account: Account) -> Prepared:
        body = self._bodies.open(self._body_owner(request, account))
        try:
            with self._phase(RECEIVE):
                await body.receive(request)
            while True:
                catalog = self._link.catalog()
                work = self._tokenizing.prepare(endpoint, body, catalog)
                body.hold()  # it may have to be prepared once more
                try:
                    with self._phase(TOKENISE):
                        return await while_connected(request.receive, work)
                except ApiError as error:
                    if error.code != "unavailable" or error.model is None or error.model in catalog.models:
                        raise
                    await self._await_replica(request, body, error.model, error)
        finally:
            body.release()

    @staticmethod
    def _body_owner(request: Request, account: Account) -> str:
        """Return the owner whose share of the memory a body takes: the request's key, or else its client's address."""
        return account.owner("" if request.client is None else request.client.host)

    async def _await_replica(self, request: Request, body: Body, model: str, error: ApiError) -> None:
        """Let a request wait, untokenised, for the first replica of its model.

        Raises:
            ApiError: it may not wait, with `error` as the reason; or none came in time.
            ClientGone: the client went away.
        """
        if not self._waiting_requests.room.is_open or self.draining:
            raise error
        if self._link.core.fleet.is_served(model):
            return  # a replica has come since the request was prepared
        if not self._is_awaited(model):
            raise error
        id_ = Entry.of(request.scope).unique_id
        work = self._waiting_requests.wait(id_, model, body.owner, len(body.content))
        try:
            with self._phase(ROOM):
                await while_connected(request.receive, work)
        except ApiError as refusal:
            raise replace(refusal, service_tier=error.service_tier) from error

    def _is_awaited(self, model: str) -> bool:
        core = self._link.core
        return core.is_expected(model, asyncio.get_running_loop().time()) and not core.fleet.is_served(model)

    def drain(self) -> None:
        """Serve no requests of new connections, and end those that wait for a replica: another router may serve them."""
        self.draining = True
        self._waiting_requests.end_all("this router is stopping")

    def _count_refusal(self, endpoint: Endpoint, error: Exception) -> None:
        """Count a request that failed before it became sequences; a bug of ours counts as an internal error."""
        refusal = error if isinstance(error, ApiError) else ApiError(500, "", code="internal_error")
        model = refusal.model or ""
        known = self._link.core.models.find(model)
        outcome = refusal.code or "error"
        self._observer.request_ended(model if known is not None else UNKNOWN_MODEL, endpoint, outcome)
        if known is not None and refusal.is_ours:
            classes = known.service_classes
            named = refusal.service_tier
            self._observer.never_tokenised(model, named if named in classes else classes[0])

    def _service_class(self, plan: Plan, account: Account, request: Request) -> ServiceClassTerms:
        """Return the class that `service_tier` names, or else the objective in a gateway's header.

        `auto`, `default` and none mean the first class that the API key may use, unless a class has that name. An
        objective that is not the name of a class is ignored: it is for the gateway.
        """
        cards = self._link.core.fleet.cards(plan.model)
        classes = next((card.service_classes for card in cards if card.service_classes), (FALLBACK_TERMS,))
        objective = next((request.headers[name] for name in OBJECTIVE_HEADERS if name in request.headers), "")
        is_class = any(terms.name == objective for terms in classes)
        wanted = plan.service_tier or (objective if is_class else "auto")
        chosen = account.service_class(wanted, (terms.name for terms in classes), plan.model)
        for terms in classes:
            if terms.name == chosen:
                return terms
        known = ", ".join(dict.fromkeys(("auto", "default", *(terms.name for terms in classes))))
        message = f"`service_tier` is {shown(wanted)}; this model has {known}"
        raise ApiError(400, message, "service_tier", "invalid_value", model=plan.model)

    async def _events(
        self,
        generation: Generation,
        answers: Answers,
        pieces: AsyncIterator[Piece],
        first: asyncio.Task[Piece],
        request_id: str,
    ) -> AsyncGenerator[bytes]:
        opened: set[int] = set()
        try:
            async for piece in _resumed(first, pieces):
                content = b""
                if piece.index not in opened:
                    opened.add(piece.index)
                    opening = partial(_opening, answers, piece.index)
                    # Without log-probabilities it is small, and waits for no large answer of another request.
                    content = (
                        await self._large_answers.build(generation.plan, opening)
                        if generation.plan.echo_logprobs
                        else opening()
                    )
                for chunk in answers.chunks(piece):
                    if generation.plan.continuous_usage:
                        chunk["usage"] = _usage(generation)
                    content += event(chunk)
                yield content
            if generation.plan.include_usage:
                yield event(answers.usage_chunk(_usage(generation)))
        except ApiError as error:
            yield event(error.body(request_id))
        finally:
            first.cancel()
        yield DONE

    async def _response_events(
        self,
        generation: Generation,
        answers: ResponseObjects,
        pieces: AsyncIterator[Piece],
        first: asyncio.Task[Piece],
    ) -> AsyncGenerator[bytes]:
        try:
            yield answers.begin()
            async for piece in _resumed(first, pieces):
                content = answers.text(piece)
                if content:
                    yield content
            yield answers.end(_usage(generation))
        except ApiError as error:
            yield answers.failed(error)
        finally:
            first.cancel()

    # Other endpoints ------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, "tokenize")

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, "detokenize")

    async def _answer(self, request: Request, endpoint: Endpoint) -> Response:
        account = self._accounts.account(key_of(request.scope))
        account.begin()
        try:
            prepared = await self._prepare(request, endpoint, account)
        except ClientGone:
            Entry.of(request.scope).outcome = "cancelled"
            return Response(status_code=499)
        finally:
            account.end()
        assert prepared.answer is not None
        room = self._bodies.open(self._body_owner(request, account))  # the answer may be larger than the body
        self._bodies.grow(room, len(prepared.answer))
        return PacedResponse(prepared.answer, room.release)

    async def models(self) -> Response:
        catalog = self._link.catalog()
        aliases = (alias for alias, model in catalog.aliases.items() if model in catalog.models)
        names = sorted({*catalog.models, *aliases})
        return json_response({"object": "list", "data": [self._model(name, catalog) for name in names]})

    async def model(self, model: str) -> Response:
        catalog = self._link.catalog()
        catalog.terms(catalog.name(model))
        return json_response(self._model(model, catalog))

    def _model(self, name: str, catalog: Catalog) -> dict[str, object]:
        """Return OpenAI's object of a served model, with vLLM's fields; `name` may be an alias."""
        own_name = catalog.name(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "medha",
            "root": own_name,
            "parent": None,
            "max_model_len": catalog.models[own_name].max_model_len,
        }

    async def version(self) -> Response:
        return json_response({"version": VERSION})

    async def openapi(self) -> Response:
        return self._openapi

    async def docs(self) -> Response:
        return self._docs

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def accepting(self) -> Response:
        if self.leaving:
            raise ApiError(503, "this router is stopping", code="unavailable")
        if not self._has_joined:
            waited = asyncio.get_running_loop().time() - self._began_at
            declared, cards = self._link.core.models.declared, self._link.core.fleet.cards()
            self._has_joined = may_accept(declared, cards, waited, self._join_seconds)
            if not self._has_joined:
                missing = awaited(declared, cards)
                named = ", ".join(f"{count} of model `{name}`" for name, count in missing.items()) or "any"
                text = (
                    f"waiting for replicas to join: {named}; for {self._join_seconds - waited:.0f} s at most"
                )
                raise ApiError(503, text, code="unavailable")
        return json_response({"status": "accepting"})

    async def ready(self) -> Response:
        if self.leaving:
            raise ApiError(503, "this router is stopping", code="unavailable")
        if not self._link.core.fleet.ready:
            raise ApiError(503, "no ready replica is known", code="unavailable")
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        core = self._link.core
        guests = self._waiting_requests.room.by_model()
        self._observer.snapshot(
            core.fleet.cards(),
            core.models.all(),
            requests_open=self.open_requests,
            sequences_open=core.open,
            waiting=self._link.history.waiting(),
            connections_open=self._connections.open,
            bodies_bytes=self._bodies.held_bytes,
            large_bodies_waiting=self._tokenizing.waiting_bodies,
            waiting_room_bytes=self._waiting_requests.room.held_bytes,
            waiting_room_by_model=guests,
            open_by_key=self._accounts.open_requests(),
            files_valid={files.what: files.is_valid for files in self._watched},
        )
        for model, work in core.works(guests, asyncio.get_running_loop().time()).items():
            self._observer.show_demand(model, work, core.demand(model, work))
        content = generate_latest(self._observer.registry)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})


def build_app(
    api: HttpApi, sites: SitePolicy, accounts: KeyAccounts, spans: RequestSpans | None = None
) -> ASGIApp:
    """Return the application for clients; `spans` is None unless their requests are traced."""
    app = _bare_app(api)
    for path, post in (
        ("/v1/chat/completions", api.chat_completions),
        ("/v1/completions", api.completions),
        ("/v1/responses", api.responses),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
    ):
        app.add_api_route(path, post, methods=["POST"])
    for path, get in (
        ("/v1/models", api.models),
        ("/v1/models/{model:path}", api.model),
        ("/version", api.version),
        ("/openapi.json", api.openapi),
        ("/docs", api.docs),
    ):
        app.add_api_route(path, get, methods=["GET", "HEAD"])
    if accounts.required:
        app.add_middleware(Authentication, accounts=accounts)
    if sites.origins:  # outside of the keys: a browser asks for permission without one, and reads a 401
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(sites.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    guarded = Sites(app, sites)
    return AccessLog(guarded if spans is None else TracedRequests(guarded, spans.source))


def build_metrics_app(api: HttpApi, ui: Ui, sites: SitePolicy) -> ASGIApp:
    """Return the application for scrapers, probes and the page `/ui`, which has a port of its own."""
    app = _bare_app(api)
    app.add_api_route("/metrics", api.metrics, methods=["GET", "HEAD"])
    ui.add_to(app)
    return AccessLog(Sites(app, sites))


def _bare_app(api: HttpApi) -> FastAPI:
    """Return an application that has the pages for probes, and whose errors are all OpenAI error objects."""
    # No redirects: their target would be taken from the Host header.
    app = FastAPI(title="Medha", openapi_url=None, redirect_slashes=False)
    for path, get in zip(PROBE_PATHS, (api.health, api.ready, api.accepting), strict=True):
        app.add_api_route(path, get, methods=["GET", "HEAD"])

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        entry = Entry.of(request.scope)
        entry.outcome = error.code
        return error_response(error, entry.request_id)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": ", ".join([*allowed, "OPTIONS"])})
        code = "method_not_allowed" if error.status_code == 405 else "not_found"
        message = f"{error.detail}: {request.method} {request.url.path}"
        reason = explanation(request.url.path) if error.status_code == 404 else None
        if reason is not None:
            code, message = "unsupported_endpoint", f"{request.method} {request.url.path}: {reason}"
        entry = Entry.of(request.scope)
        entry.outcome = code
        response = error_response(ApiError(error.status_code, message, code=code), entry.request_id)
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join([*allowed, "OPTIONS"])
        return response

    async def on_bug(request: Request, _error: Exception) -> Response:
        error = ApiError(500, "internal error of the router", code="internal_error")
        return error_response(error, Entry.of(request.scope).request_id)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    return app


def _close(generation: Generation, entry: Entry) -> None:
    """End a generation, and record its outcome in the access log entry."""
    generation.close()
    entry.model = generation.plan.model
    entry.outcome = generation.outcome
    entry.prompt_tokens = generation.prompt_tokens
    entry.output_tokens = generation.output_tokens
    entry.ttft_seconds = generation.ttft_seconds


def _usage(generation: Generation) -> dict[str, Any]:
    return usage(
        generation.prompt_tokens,
        generation.output_tokens,
        generation.cached_tokens,
        generation.thought_tokens,
    )


def _opening(answers: Answers, index: int) -> bytes:
    """Return the event that begins the stream of a choice; nothing if there is none."""
    opening = answers.opening(index)
    return b"" if opening is None else event(opening)


async def _collect(pieces: AsyncIterator[Piece]) -> list[Piece]:
    """Return one whole piece per choice, in order of index."""
    choices: dict[int, Piece] = {}
    async for piece in pieces:
        whole = choices.setdefault(piece.index, Piece(piece.index))
        whole.tokens += piece.tokens
        whole.parts += piece.parts
        whole.finish_reason, whole.ends_with_calls = piece.finish_reason, piece.ends_with_calls
        whole.has_thoughts = piece.has_thoughts
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


def _milliseconds(request: Request, headers: Sequence[str]) -> float | None:
    """Return the client's own target from the first of these headers that is present, in seconds, or None.

    Raises:
        ApiError: the header is not a positive number.
    """
    header = next((name for name in headers if name in request.headers), None)
    if header is None:
        return None
    given = request.headers[header]
    try:
        seconds = float(given) / 1000
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        message = f"the header {header} is {given[:80]!r}; give a positive number of milliseconds"
        raise ApiError(400, message, header, "invalid_value")
    return seconds
