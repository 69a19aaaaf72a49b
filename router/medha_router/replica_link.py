"""The link to replicas: two ZeroMQ ROUTER sockets around a RouterCore.

Replica controllers connect a DEALER to each of the two: *control* for all messages, *tokens* for token ids,
so that a 40 MB prompt never delays a `Cancel`. A controller connects both under one identity, its name and a
number of this connection, and sends its `Announce` on **both**; a replica that was heard on only one is not
used. A controller that returns with another number has lost the messages in flight, so its sequences are sent
again. Nothing here blocks: sends go to ZeroMQ's queues. These are unbounded, because the open requests bound
what they hold.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import zmq
import zmq.asyncio

from medha.errors import CheckpointInvalid, WireInvalid
from medha.kv.prefix_cache import PrefixHasher
from medha.observing.timeline import Timeline
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, Prefix, marks
from medha.routing.replica_demand import DemandTerms
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Declared,
    Deliver,
    DropBundle,
    Fail,
    LinkLost,
    Move,
    Notice,
    Received,
    Reject,
    RouterEvent,
    Send,
    SendPrompt,
)
from medha.routing.routing_limits import RoutingLimits
from medha.wire.bundle_digest import BUNDLE_FILES, MAX_BUNDLE_BYTES, bundle_digest
from medha.wire.frames import TOKENS_PER_FRAME, TokenIds, decode, encode, tokens_to_frame
from medha.wire.messages import (
    Announce,
    BundlePart,
    Emit,
    Failed,
    Heartbeat,
    KvAsk,
    KvDone,
    KvTicket,
    Message,
    ProgressReport,
    Refused,
    RouterLost,
    RouterUse,
    Tick,
    Tokens,
    WatchProgress,
)
from medha_links.drops import Drops
from medha_links.key_files import KeyPair, read_tokens
from medha_links.sockets import TOKENS_FRAME_BYTES, Authenticator, bind, connection_of
from medha_process.router_settings import RouterSettings
from medha_router.declared import DeclaredFiles
from medha_router.key_accounts import KeyAccounts
from medha_router.outcome_queue import OutcomeQueue
from medha_router.peer_checks import (
    Peers,
    require_in_vocabulary,
    require_plausible,
    require_plausible_kv,
    require_plausible_progress,
    require_plausible_use,
)
from medha_router.prepare import Catalog, ModelTerms
from medha_router.request_spans import RequestSpans, TracedTimeline
from medha_router.router_metrics import Observer
from medha_router.sequence_history import SequenceHistory
from medha_router.tokenizing import Tokenizing

log = logging.getLogger("medha.router")

_TICK_SECONDS = 0.25
_MESSAGES_IN_A_TURN = 16
_WATCH_SECONDS = 4.0
"""Seconds for which replicas go on reporting the progress of requests after the page `/ui` was last open."""
_PASSED_ON_BY = 2
"""Number of replicas that pass a report on to the other routers. The next report goes to different ones, because a replica
may have lost its connection to a router."""
HASHED_AT_ONCE_TOKENS = 65_536
"""Tokens of a prompt that are hashed while other tasks wait, which takes a millisecond or two."""
_Received = TypeVar("_Received")


async def in_turns(
    receive: Callable[[], Awaitable[_Received]], receive_now: Callable[[], _Received | None]
) -> AsyncIterator[_Received]:
    """Yield what `receive` returns, for ever; other tasks run in between, even if messages never run out.

    `receive_now` returns a message that has come already, or None. A step of a replica brings the tokens of all its requests
    at once, and awaiting each message would cost more than reading it.
    """
    while True:
        yield await receive()
        for _ in range(_MESSAGES_IN_A_TURN - 1):
            if (received := receive_now()) is None:
                break
            yield received
        await asyncio.sleep(0)


def frames_at_hand(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """Return the frames of a message that has come already, or None."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


async def prefixes_of(hasher: PrefixHasher, prompts: Sequence[TokenIds], cache_salt: str) -> list[Prefix]:
    """Return the marks of each of these prompts (int32 [n]); other tasks run between prompts and between pieces of one."""
    prefixes: list[Prefix] = []
    for ids in prompts:
        prompt = hasher.start(cache_salt)
        for start in range(0, len(ids), HASHED_AT_ONCE_TOKENS):
            if prefixes or start:  # a short request does not wait
                await asyncio.sleep(0)
            prompt.update(ids[start : start + HASHED_AT_ONCE_TOKENS])
        prefixes.append(marks(prompt.hashes))
    return prefixes


class ReplicaLink:
    """Executes the commands of RouterCore."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizing: Tokenizing,
        observer: Observer,
        accounts: KeyAccounts,
        spans: RequestSpans | None = None,
    ) -> None:
        """`accounts` are shared with other routers, by way of the replicas; `spans` is None unless requests are traced."""
        self.core = RouterCore(
            RoutingLimits(
                max_waiting=settings.max_waiting,
                silence_seconds=settings.silence_seconds,
                unserved_seconds=settings.unserved_seconds,
            ),
            DemandTerms(start_seconds=settings.replica_start_seconds),
        )
        now = asyncio.get_running_loop().time()
        self._spans = spans
        self.timeline = Timeline(now) if spans is None else TracedTimeline(now, spans)
        """The bars of the last sequences, for the page `/ui`."""
        self.history = SequenceHistory(self.timeline)
        self._watched_until = -inf  # time until which a page `/ui` counts as open
        self._asked_at = -inf  # when replicas were last asked for progress
        self._hasher = PrefixHasher(MARK_BLOCK_TOKENS, secrets.token_bytes(32))
        self._tokenizing = tokenizing
        self._observer = observer
        self._accounts = accounts
        self._reports = 0
        self._drops = Drops(log, observer.message_dropped)
        keys = KeyPair.read(settings.key_file)
        enrolled = [KeyPair.of_token(token).public for token in read_tokens(settings.enrolment_file)]
        self._context = zmq.asyncio.Context()
        self._authenticator = Authenticator(self._context, enrolled)
        self._links = {
            "control": bind(
                self._context, settings.control_endpoint, keys, largest_frame_bytes=MAX_BUNDLE_BYTES
            ),
            "tokens": bind(
                self._context, settings.tokens_endpoint, keys, largest_frame_bytes=TOKENS_FRAME_BYTES
            ),
        }
        self._control, self._tokens = (link.socket for link in self._links.values())
        self._control_at_hand: zmq.Socket[bytes] = zmq.Socket.shadow(self._control.underlying)
        folder = settings.models_directory
        self._declared_files = None if folder is None else DeclaredFiles(Path(folder))
        self._poll_seconds = settings.poll_seconds
        self._peers = Peers()
        # Descriptor of the connection of each control identity (`connection_of`).
        self._descriptors: dict[bytes, int] = {}
        self._parts: dict[tuple[bytes, str], dict[str, bytes]] = {}  # bundles that are being received
        self._prompts: dict[str, TokenIds] = {}
        self._outcomes: dict[str, OutcomeQueue] = {}  # by sequence
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken = asyncio.Event()
        """Set when a bug ended one of the loops: the process must not continue with only part of them."""

    @property
    def control_endpoint(self) -> str:
        return self._control.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def tokens_endpoint(self) -> str:
        return self._tokens.getsockopt_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        for loop in (self._receive_control(), self._receive_tokens(), self._tick()):
            self._spawn(asyncio.create_task(loop))
        if self._declared_files is not None:
            self._handle(Declared(self._declared_files.changed() or ()))
            watching = self._declared_files.watch(
                lambda models: self._handle(Declared(models)), self._poll_seconds
            )
            self._spawn(asyncio.create_task(watching))

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("the replica link broke", exc_info=task.exception())
            self.broken.set()

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Let the last Cancels leave; peers that have gone must not delay the router's exit.
        for link in self._links.values():
            link.close(linger_milliseconds=200)
        self._authenticator.close()
        self._context.term()

    # For the HTTP side ----------------------------------------------------------------------------

    def catalog(self) -> Catalog:
        models: dict[str, ModelTerms] = {}
        for card in self.core.fleet.cards():
            if not card.ready or card.draining:
                continue
            known = models.get(card.model)
            longest = max(card.longest_request_tokens, known.longest_request_tokens if known else 0)
            length = max(card.max_model_len, known.max_model_len if known else 0)  # some replica takes it
            tool_calls = self.core.models.tool_call_format(card.model)
            reasoning = self.core.models.reasoning_format(card.model)
            # True only if all do, because requests with a grammar never go to replicas that ignore grammars.
            follows = card.follows_grammars and card.ends_texts and (known is None or known.follows_grammars)
            models[card.model] = ModelTerms(
                card.digest, length, longest, card.vocab_size, tool_calls, reasoning, follows
            )
        unavailable = tuple(name for name in self.core.models.names if name not in models)
        return Catalog(models, unavailable, self.core.models.aliases)

    def submit(self, arrive: Arrive, prompts: dict[str, TokenIds]) -> OutcomeQueue:
        """Start sequences; their results arrive in the returned queue. End with `release`.

        If the queue is not emptied and becomes too long, all of them end with an error.
        """
        outcomes = OutcomeQueue()
        self._prompts.update(prompts)
        for new in arrive.sequences:
            self._outcomes[new.id] = outcomes
        self._handle(arrive)
        return outcomes

    async def prefixes(self, model: str, prompts: Sequence[TokenIds], cache_salt: str) -> list[Prefix]:
        """Return the marks of each prompt, int32 [n], by which the core finds a replica that has a prefix of it cached.

        They are empty if the model has at most one replica, because then there is no choice.
        """
        if len(self.core.fleet.cards(model)) <= 1:
            return [()] * len(prompts)
        return await prefixes_of(self._hasher, prompts, cache_salt)

    def abandon(self, sequence_id: str, outcome: Literal["cancelled", "stop"] = "cancelled") -> None:
        """Cancel a sequence whose rest is not needed; no more results of it arrive."""
        self._outcomes.pop(sequence_id, None)
        self._handle(Abandon(sequence_id, outcome))

    def release(self, arrive: Arrive) -> None:
        """Free what a client request holds, however it ended."""
        for new in arrive.sequences:
            if new.id in self._outcomes:
                self.abandon(new.id)
        for prompt in {new.prompt for new in arrive.sequences}:
            self._prompts.pop(prompt, None)
        now = asyncio.get_running_loop().time()
        self.history.forget((new.id for new in arrive.sequences), now)

    def end_all(self, detail: str) -> None:
        """End every open sequence with an error, and cancel it on its replica."""
        for sequence_id, outcomes in list(self._outcomes.items()):
            self.abandon(sequence_id)
            outcomes.put(Fail(sequence_id, "unavailable", detail, 1), asyncio.get_running_loop().time())

    def _end_unread(self, outcomes: OutcomeQueue) -> None:
        """End the sequences of a client request whose output nobody takes."""
        for sequence_id in [one for one, queue in self._outcomes.items() if queue is outcomes]:
            self.abandon(sequence_id)

    # Events in, commands out ----------------------------------------------------------------------

    def _handle(self, event: RouterEvent) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        commands = self.core.handle(event, now)
        for fact in self.history.fold(event, commands, now):
            self._observer.happened(fact)
        for command in commands:
            match command:
                case Deliver() | Fail():
                    if isinstance(command, Fail) and command.kind == "internal":
                        log.warning("sequence %s ends: %s", command.id, command.detail)
                    ends = isinstance(command, Fail) or command.finish_reason is not None
                    outcomes = (
                        self._outcomes.pop(command.id, None) if ends else self._outcomes.get(command.id)
                    )
                    if outcomes is not None and not outcomes.put(command, now):
                        loop.call_soon(self._end_unread, outcomes)  # not before these commands are done
                case SendPrompt():
                    self._send_prompt(command)
                case Send(replica=replica, message=message):
                    if self._spans is not None:
                        message = self._spans.forwarded(command, self.core)
                    self._send(self._control, replica, encode(message))
                case DropBundle(digest=digest):
                    self._tokenizing.drop_bundle(digest)
                    log.info("dropped bundle %s, which no replica has announced for long", digest[:12])
                case Reject(replica=replica, reason=reason):
                    log.warning("replica %s is not used: %s", replica, reason)
                case Notice(text=text, is_warning=is_warning):
                    log.log(logging.WARNING if is_warning else logging.INFO, "%s", text)
                case Move():  # the history has it
                    pass

    def _send_prompt(self, command: SendPrompt) -> None:
        ids, emitted = self._prompts[command.source], command.emitted
        total = len(ids) + len(emitted)
        for offset in range(0, len(ids), TOKENS_PER_FRAME):
            part = ids[offset : offset + TOKENS_PER_FRAME]
            piece = Tokens(command.prompt, offset, total, command.sequences, cache_salt=command.cache_salt)
            frames = encode(piece, tokens_to_frame(part))
            self._send(self._tokens, command.replica, frames)
        if emitted:
            raw = tokens_to_frame(np.asarray(emitted, dtype=np.int32))
            piece = Tokens(command.prompt, len(ids), total, command.sequences)
            frames = encode(piece, raw)
            self._send(self._tokens, command.replica, frames)

    def _send(
        self,
        socket: zmq.asyncio.Socket,
        replica: str,
        frames: Sequence[bytes | memoryview],
    ) -> None:
        # Without a high-water mark pyzmq sends within this call, so the order of calls is the order of messages.
        sent: asyncio.Future[Any] = asyncio.ensure_future(
            socket.send_multipart([self._peers.identity(replica), *frames], copy=False)
        )
        sent.add_done_callback(lambda future: self._sent(future, replica))

    def _sent(self, future: asyncio.Future[Any], replica: str) -> None:
        if not future.cancelled() and future.exception() is not None:
            log.warning("replica %s cannot be reached: %s", replica, future.exception())
            self._handle(LinkLost(replica))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._observer.connections_refused("tokens", self._links["tokens"].connections.refused())
            self._end_connections()
            self._handle(Tick())
            self._report_use()
            self._ask_for_progress()

    def _report_use(self) -> None:
        """Send the use of API keys to a few replicas, which pass it on to the other routers."""
        report = self._accounts.due_report()
        names = sorted(card.replica for card in self.core.fleet.cards())
        if report is None or not names:
            return
        for _ in range(min(_PASSED_ON_BY, len(names))):
            self._reports += 1
            self._send(self._control, names[self._reports % len(names)], encode(report))

    def watch(self) -> None:
        """Record that a page `/ui` is open, so that replicas report the progress of requests for a while."""
        self._watched_until = asyncio.get_running_loop().time() + _WATCH_SECONDS
        self._ask_for_progress()

    def _ask_for_progress(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._watched_until or now - self._asked_at < _WATCH_SECONDS / 2:
            return
        self._asked_at = now
        ask = encode(WatchProgress(_WATCH_SECONDS))
        for card in self.core.fleet.cards():
            if card.reports_progress:
                self._send(self._control, card.replica, ask)

    def _end_connections(self) -> None:
        """Treat replicas whose control connections have ended as lost: they drop their requests as well, and reconnect."""
        refused, ended = self._links["control"].connections.refused_and_ended()
        self._observer.connections_refused("control", refused)
        for identity in [one for one, descriptor in self._descriptors.items() if descriptor in ended]:
            del self._descriptors[identity]
            self._parts = {key: parts for key, parts in self._parts.items() if key[0] != identity}
            replica = self._peers.replica(identity)
            if replica is not None:
                log.warning("the connection of replica %s has ended", replica)
                self._handle(LinkLost(replica))
                self._peers.forget(identity)

    def _connected(self, identity: bytes, descriptor: int) -> None:
        """Record on which connection a peer was heard."""
        if self._descriptors.get(identity) != descriptor:
            self._end_connections()  # first, because a connection that has ended may have had the same descriptor
            self._descriptors[identity] = descriptor

    async def _receive_tokens(self) -> None:
        """Receive `Announce`s, the only messages on this link: they identify the replica of a connection."""
        async for frames in in_turns(self._tokens.recv_multipart, lambda: None):
            try:
                identity, message, _ = self._read(frames)
                if not isinstance(message, Announce):
                    raise WireInvalid("only Announce is expected on the token link", reason="unexpected")
                card = self._peers.received_on_tokens(message.replica, identity)
            except WireInvalid as error:
                self._drops.drop("tokens", error)
                continue
            if card is not None:
                self._handle(Received(card.replica, card))

    async def _receive_control(self) -> None:
        at_hand = self._control_at_hand
        async for received in in_turns(
            lambda: self._control.recv_multipart(copy=False), lambda: frames_at_hand(at_hand)
        ):
            frames = [frame.bytes for frame in received]
            self._connected(frames[0], connection_of(received[0]))
            try:
                self._take(*self._read(frames))
            except WireInvalid as error:
                self._drops.drop("control", error)

    def _read(self, frames: Sequence[bytes]) -> tuple[bytes, Message, memoryview | None]:
        identity, *rest = frames
        return identity, *decode(rest)

    def _take(self, identity: bytes, message: Message, payload: memoryview | None) -> None:
        """Handle one control message.

        Raises:
            WireInvalid: the message is out of place.
        """
        match message:
            case Announce() as card:
                require_plausible(card)
                is_alive = any(one.replica == card.replica for one in self.core.fleet.cards())
                former = self._peers.received_on_control(card, identity, is_alive=is_alive)
                if former is not None:
                    self._parts = {key: parts for key, parts in self._parts.items() if key[0] != former}
                    self._handle(LinkLost(card.replica))
                if self._peers.is_whole(card.replica):
                    self._handle(Received(card.replica, card))
            case Heartbeat() as beat:
                replica = self._peers.beating(identity)
                if replica is not None:  # an unknown one is about to announce itself, or was replaced
                    self._handle(Received(replica, beat))
            case Emit() | Refused() | Failed() as answer:
                card = self._peers.card(identity)
                if isinstance(answer, Emit):
                    require_in_vocabulary(answer, card.vocab_size)
                self._handle(Received(card.replica, answer))
            case ProgressReport() as progress:
                card = self._peers.card(identity)
                require_plausible_progress(progress)
                self.history.progress(card.replica, progress, asyncio.get_running_loop().time())
            case RouterUse() as report:
                self._peers.card(identity)
                require_plausible_use(report)
                for served in self._accounts.heard(report):
                    self._handle(served)
            case RouterLost(router=router):
                self._peers.card(identity)
                self._accounts.lost(router)
            case KvAsk() | KvTicket() | KvDone() as about_kv:
                require_plausible_kv(about_kv)
                self._pass_on(self._peers.card(identity), about_kv)
            case BundlePart() as part if payload is not None:
                self._bundle_part(identity, part, payload)
            case other:
                raise WireInvalid(
                    f"{type(other).__name__} is not expected from a replica", reason="unexpected"
                )

    def _pass_on(self, sender: Announce, message: KvAsk | KvTicket | KvDone) -> None:
        """Pass a message on to another replica of the sender's model; if that has gone, the waiting side times out."""
        target = message.asker if isinstance(message, KvTicket) else message.source
        if any(one.replica == target and one.hands_kv_over for one in self.core.fleet.cards(sender.model)):
            if isinstance(message, KvTicket):
                passed: Message = replace(message, source=sender.replica)
            else:
                passed = replace(message, asker=sender.replica)
            self._send(self._control, target, encode(passed))

    def _bundle_part(self, identity: bytes, part: BundlePart, payload: memoryview) -> None:
        if part.digest != self._peers.card(identity).digest:
            raise WireInvalid(f"bundle {part.digest:.12} is not the one that was announced")
        if part.name not in BUNDLE_FILES:  # a name becomes a file name: accept no other
            raise WireInvalid(f"{part.name:.80} is not a file of a bundle")
        parts = self._parts.setdefault((identity, part.digest), {})
        parts[part.name] = bytes(payload)
        if sum(map(len, parts.values())) > MAX_BUNDLE_BYTES:
            del self._parts[identity, part.digest]
            raise WireInvalid(
                f"bundle {part.digest:.12} is larger than {MAX_BUNDLE_BYTES} bytes", reason="size"
            )
        if part.remaining == 0:
            del self._parts[identity, part.digest]
            self._spawn(asyncio.create_task(self._load_bundle(part.digest, parts)))

    async def _load_bundle(self, digest: str, files: dict[str, bytes]) -> None:
        if bundle_digest(files) != digest:
            error = WireInvalid(f"bundle {digest:.12} does not match its digest")
            self._drops.drop("control", error)
            return
        try:
            await self._tokenizing.add_bundle(files)
        except CheckpointInvalid as error:
            log.error("bundle %s cannot be used: %s", digest[:12], error)  # noqa: TRY400 - the text says it all
            return
        except Exception:  # its files come from a replica, and must not end the router
            log.exception("bundle %s cannot be used", digest[:12])
            return
        log.info("loaded bundle %s (%d files)", digest[:12], len(files))
        self._handle(BundleKnown(digest))
