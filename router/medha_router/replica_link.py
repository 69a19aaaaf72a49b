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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from medha.declared import DeclaredModel
from medha.errors import CheckpointInvalid, WireInvalid
from medha.kv.prefix_cache import PrefixHasher
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, marks
from medha.routing.router_core import (
    Abandon,
    Arrive,
    BundleKnown,
    Declared,
    Deliver,
    Fail,
    LinkLost,
    Received,
    Reject,
    RouterCore,
    RouterEvent,
    RoutingLimits,
    Send,
    SendPrompt,
)
from medha.wire.bundle_digest import BUNDLE_FILES, MAX_BUNDLE_BYTES, bundle_digest
from medha.wire.frames import TOKENS_PER_FRAME, TokenIds, decode, encode, tokens_to_frame
from medha.wire.messages import Announce, BundlePart, Emit, Failed, Message, Refused, Submit, Tick, Tokens
from medha_links.drops import Drops
from medha_links.key_files import KeyPair, read_tokens
from medha_links.sockets import TOKENS_FRAME_BYTES, Authenticator, bind
from medha_process.router_settings import RouterSettings
from medha_router.declared import DeclaredFiles
from medha_router.peer_checks import Peers, require_in_vocabulary, require_plausible
from medha_router.prepare import Catalog, ModelTerms
from medha_router.router_metrics import Observer
from medha_router.tokenizing import Tokenizing

log = logging.getLogger("medha.router")

_TICK_SECONDS = 0.25

Outcome = Deliver | Fail
"""The results that arrive for a sequence."""


class ReplicaLink:
    """Executes the commands of RouterCore."""

    def __init__(self, settings: RouterSettings, tokenizing: Tokenizing, observer: Observer) -> None:
        self.core = RouterCore(
            RoutingLimits(
                max_waiting=settings.max_waiting,
                silence_seconds=settings.silence_seconds,
                unserved_seconds=settings.unserved_seconds,
            )
        )
        self._hasher = PrefixHasher(MARK_BLOCK_TOKENS, secrets.token_bytes(32))
        self._tokenizing = tokenizing
        self._observer = observer
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
        folder = settings.models_directory
        self._declared_files = None if folder is None else DeclaredFiles(Path(folder))
        self._peers = Peers()
        self._parts: dict[tuple[bytes, str], dict[str, bytes]] = {}  # bundles that are being received
        self._prompts: dict[str, TokenIds] = {}
        self._outcomes: dict[str, asyncio.Queue[Outcome]] = {}  # by sequence
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
            self._declare(self._declared_files.changed() or ())
            self._spawn(asyncio.create_task(self._declared_files.watch(self._declare)))

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
        for card in self.core.cards():
            if not card.ready or card.draining:
                continue
            known = models.get(card.model)
            longest = max(card.longest_request_tokens, known.longest_request_tokens if known else 0)
            length = max(card.max_model_len, known.max_model_len if known else 0)  # some replica takes it
            models[card.model] = ModelTerms(card.digest, length, longest, card.vocab_size)
        return Catalog(models, tuple(name for name in self.core.known_models() if name not in models))

    def submit(self, arrive: Arrive, prompts: dict[str, TokenIds]) -> asyncio.Queue[Outcome]:
        """Start sequences; their results arrive in the returned queue. End with `release`."""
        outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._prompts.update(prompts)
        if len(self.core.cards(arrive.model)) > 1:  # else there is no choice
            arrive = self._marked(arrive, prompts)
        for new in arrive.sequences:
            self._outcomes[new.id] = outcomes
        self._handle(arrive)
        return outcomes

    def _marked(self, arrive: Arrive, prompts: dict[str, TokenIds]) -> Arrive:
        """Return the same sequences with the marks of their prompts, by which the core finds a cached prefix."""
        salt = arrive.cache_salt
        prefixes = {name: marks(self._hasher.hashes(ids, salt)) for name, ids in prompts.items()}
        sequences = tuple(replace(new, prefix=prefixes[new.prompt]) for new in arrive.sequences)
        return replace(arrive, sequences=sequences)

    def abandon(self, sequence_id: str) -> None:
        """Cancel a sequence whose rest is not needed; no more results of it arrive."""
        self._outcomes.pop(sequence_id, None)
        self._handle(Abandon(sequence_id))

    def release(self, arrive: Arrive) -> None:
        """Free what a client request holds, however it ended."""
        for new in arrive.sequences:
            if new.id in self._outcomes:
                self.abandon(new.id)
        for prompt in {new.prompt for new in arrive.sequences}:
            self._prompts.pop(prompt, None)

    def end_all(self, detail: str) -> None:
        """End every open sequence with an error, and cancel it on its replica."""
        for sequence_id, outcomes in list(self._outcomes.items()):
            self.abandon(sequence_id)
            outcomes.put_nowait(Fail(sequence_id, "unavailable", detail, 1))

    # Events in, commands out ----------------------------------------------------------------------

    def _handle(self, event: RouterEvent) -> None:
        loop = asyncio.get_running_loop()
        for command in self.core.handle(event, loop.time()):
            match command:
                case Deliver() | Fail():
                    ends = isinstance(command, Fail) or command.finish_reason is not None
                    outcomes = (
                        self._outcomes.pop(command.id, None) if ends else self._outcomes.get(command.id)
                    )
                    if outcomes is not None:
                        outcomes.put_nowait(command)
                case SendPrompt():
                    self._send_prompt(command)
                case Send(replica=replica, message=message):
                    if isinstance(message, Submit) and "~" in message.id:
                        self._observer.resubmitted()
                    self._send(self._control, replica, encode(message))
                case Reject(replica=replica, reason=reason):
                    log.warning("replica %s is not used: %s", replica, reason)

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

    def _declare(self, models: tuple[DeclaredModel, ...]) -> None:
        self._handle(Declared(models))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for name, link in self._links.items():
                self._observer.connections_refused(name, link.connections.refused())
            self._handle(Tick())

    async def _receive_tokens(self) -> None:
        """Receive `Announce`s, the only messages on this link: they identify the replica of a connection."""
        while True:
            frames = await self._tokens.recv_multipart()
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
        while True:
            frames = await self._control.recv_multipart()
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
                is_alive = any(one.replica == card.replica for one in self.core.cards())
                former = self._peers.received_on_control(card, identity, is_alive=is_alive)
                if former is not None:
                    self._parts = {key: parts for key, parts in self._parts.items() if key[0] != former}
                    self._handle(LinkLost(card.replica))
                if self._peers.is_whole(card.replica):
                    self._handle(Received(card.replica, card))
            case Emit() | Refused() | Failed() as answer:
                card = self._peers.card(identity)
                if isinstance(answer, Emit):
                    require_in_vocabulary(answer, card.vocab_size)
                self._handle(Received(card.replica, answer))
            case BundlePart() as part if payload is not None:
                self._bundle_part(identity, part, payload)
            case other:
                raise WireInvalid(
                    f"{type(other).__name__} is not expected from a replica", reason="unexpected"
                )

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
