"""RouterCore: decides which replica serves which sequence, and when. `medha_router.replica_link` does the I/O.

Binding is late: a sequence waits here, not in a replica, until a ready replica of its model has capacity. The
core keeps the tokens that every open sequence has emitted, so that a new epoch or another replica can resume
it with the same seed, and the client sees one stream. A sequence is never lost. It ends with a `Deliver` that
has a finish reason, with one `Fail`, or because its client has gone.

A sequence goes to the replica where its first token is expected soonest (`medha.routing.prefix_memory`), if
possible to one whose free KV holds it. Samples of one prompt stay together. The most urgent sequence chooses
first: the one with the least slack, that is, whose prefill would have to begin first. Slack is computed once,
when the sequence arrives, from the replicas' own targets (`medha.slo`) and prefill times. Later announcements
and losses do not change it, so no sequence starves.

Time comes in as `now` (seconds of the driver's monotonic clock). The same events give the same commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal

from medha.declared import DeclaredModel
from medha.routing.prefix_memory import Prefix, PrefixMemory, prefill_seconds
from medha.routing.waiting_queues import Key, WaitingQueues
from medha.slo import FALLBACK_TERMS, class_terms, ttft_target_seconds
from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Failed,
    FetchBundle,
    FinishReason,
    Refused,
    Sampling,
    Submit,
    Tick,
    TokenLogprob,
)

# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to generate; the driver holds the token ids of `prompt`."""

    id: str
    prompt: str
    prompt_length: int
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    sample_index: int = 0
    prefix: Prefix = ()  # marks of the prompt (`prefix_memory`); empty: no replica is preferred for its cache


@dataclass(frozen=True, slots=True)
class Arrive:
    """The sequences of one client request (`n` samples of each of its prompts)."""

    model: str
    digest: str  # digest of the bundle that the prompts were tokenised with
    sequences: tuple[NewSequence, ...]
    service_class: str = "default"
    deadline_after_seconds: float | None = None
    tpot_target_seconds: float | None = None
    cache_salt: str = ""  # the prompts share KV only with prompts of the same salt


@dataclass(frozen=True, slots=True)
class Abandon:
    """The rest of this sequence is not needed: its client has gone, or a stop string was found."""

    id: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a replica."""

    replica: str
    message: Announce | Refused | Emit | Failed


@dataclass(frozen=True, slots=True)
class BundleKnown:
    """The bundle of this digest is loaded, so its replicas can be used."""

    digest: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A replica cannot be reached any more."""

    replica: str


@dataclass(frozen=True, slots=True)
class Declared:
    """The models that manifests name now; each list replaces the one before."""

    models: tuple[DeclaredModel, ...]


RouterEvent = Arrive | Abandon | Received | BundleKnown | LinkLost | Declared | Tick

# --- commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPrompt:
    """Send the ids of the driver's prompt `source`, then `emitted`, to a replica under the name `prompt`."""

    replica: str
    prompt: str
    source: str
    emitted: tuple[int, ...] = ()
    sequences: int = 1  # number of `Submit`s that name it in the same pass
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    replica: str
    message: Submit | Cancel | FetchBundle


@dataclass(frozen=True, slots=True)
class Deliver:
    """Output tokens for the client, each exactly once and in order."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0  # as in `Emit`


FailureKind = Literal[
    "invalid", "too_long", "model_not_found", "overloaded", "unavailable", "out_of_memory", "internal"
]


@dataclass(frozen=True, slots=True)
class Fail:
    """The sequence ends with an error; nothing follows."""

    id: str
    kind: FailureKind
    detail: str
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """A replica is not used; goes to the log."""

    replica: str
    reason: str


RouterCommand = SendPrompt | Send | Deliver | Fail | Reject

# --- state -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a manifest names or that a replica has announced, whether or not anything serves it now."""

    service_classes: tuple[str, ...]
    """Names of the service classes, at least one; the first is the default."""
    desired_replicas: int | None = None
    """Replicas that the manifests ask for; None if the model is known from announcements only."""


@dataclass(frozen=True, slots=True)
class RoutingLimits:
    max_waiting: int = 4096
    """Most sequences that wait here; more are answered `overloaded`."""
    silence_seconds: float = 10.0
    """Seconds without an announcement after which a replica counts as dead. Replicas announce every second."""
    unserved_seconds: float = 60.0
    """Seconds that an accepted sequence waits for a replica to come back, before it ends as `unavailable`."""
    recovery_seconds: float = 3600.0
    """The same while a replica of its model announces that it is not ready: it is restarting and loads its weights.

    The manifest says how long that may take, and the controller enforces it; this is the upper bound in any
    case.
    """
    fetch_seconds: float = 10.0
    """Seconds after which a bundle that has not arrived is requested again."""
    max_losses: int = 2
    """Losses in a row after which a sequence is taken for the cause of its replicas' failures, and fails.

    A loss is a failure of the replica during a step that contained the sequence, before it sampled a token
    for it. From the first loss on the sequence is a suspect. A replica gets one suspect at a time, so that
    the second loss has no other suspect. The third death of a process within a minute ends the replica.
    """
    trial_seconds: float = 30.0
    """Seconds after which a sequence is no longer suspected of killing the replica that it was sent to.

    If that replica is lost later, the loss counts as the sequence's first. A process that needs longer to die
    cannot die three times in a minute.
    """
    max_attempts: int = 16
    """Attempts in a row, without a token of the sequence, that may end with their replicas for any reason."""


@dataclass(slots=True)
class _Sequence:
    new: NewSequence
    request: Arrive
    arrived_at: float
    order: tuple[float, int]  # queue key: latest start of its prefill, then order of arrival
    emitted: list[int] = field(default_factory=list)
    attempts: int = 0
    lost_attempts: int = 0  # attempts since its last token that ended because the replica did
    losses: int = 0  # those of them that count against it (`RoutingLimits.max_losses`)
    has_progress: bool = False  # this attempt has sampled a token
    sent_at: float = 0.0  # when this attempt began
    replica: str | None = None
    wire_id: str = ""  # differs between attempts, so that a late message of an old attempt is recognised

    @property
    def tokens(self) -> int:
        return self.new.prompt_length + len(self.emitted)

    @property
    def key(self) -> Key:
        return self.request.model, self.request.digest


@dataclass(slots=True)
class _Replica:
    card: Announce  # its last announcement
    last_seen_at: float  # when that arrived
    open: dict[str, _Sequence] = field(default_factory=dict)  # by wire id
    forwarded: int = 0  # sequences forwarded since that announcement
    forwarded_tokens: int = 0  # KV tokens that these will reserve
    forwarded_seconds: float = 0.0  # prefill seconds of these
    full: bool = False  # it has refused a sequence since
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)

    @property
    def serves(self) -> bool:
        return self.card.ready and not self.card.draining

    @property
    def seconds_ahead(self) -> float:
        """Seconds of prefill ahead of a new sequence."""
        return self.card.pending_prefill_seconds + self.forwarded_seconds

    def own_seconds(self, tokens: int, cached_tokens: int) -> float:
        """Return the seconds of prefill of a new sequence here, without the part that is cached."""
        points = self.card.prefill_points
        return prefill_seconds(points, tokens) - prefill_seconds(points, min(cached_tokens, tokens - 1))


class RouterCore:
    """The router's decisions. `handle` takes one event and returns what to do, in order."""

    def __init__(self, limits: RoutingLimits | None = None) -> None:
        self._limits = limits or RoutingLimits()
        self._replicas: dict[str, _Replica] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._by_wire_id: dict[str, _Sequence] = {}
        self._waiting: WaitingQueues[_Sequence] = WaitingQueues()
        self._bundles: set[str] = set()
        self._fetch_requested_at: dict[str, float] = {}  # digest -> when it was last requested
        self._unserved_since: dict[Key, float] = {}
        self._declared: dict[str, DeclaredModel] = {}
        self._announced: dict[str, tuple[str, ...]] = {}  # model -> its service classes, as last announced
        self._withdrawn: set[str] = set()  # announced models that no manifest names any more
        self._rejected: dict[str, str] = {}  # replica -> reason, so that each is reported once
        self._arrivals = 0

    def handle(self, event: RouterEvent, now: float) -> list[RouterCommand]:
        match event:
            case Arrive():
                return self._arrive(event, now)
            case Abandon(id=sequence_id):
                return self._abandon(sequence_id)
            case Received():
                return self._received(event, now)
            case BundleKnown(digest=digest):
                self._bundles.add(digest)
                self._fetch_requested_at.pop(digest, None)
                return self._dispatch(now)
            case LinkLost(replica=replica):
                return self._lose(replica) + self._dispatch(now)
            case Declared(models=models):
                self._declare(models)
                return []
            case Tick():
                return self._tick(now)

    # Queries of the HTTP side ---------------------------------------------------------------------

    def cards(self, model: str | None = None) -> list[Announce]:
        """Return the announcements of live replicas whose bundle is known; only those of `model`, if one is named."""
        return [
            replica.card
            for replica in self._replicas.values()
            if replica.card.digest in self._bundles and model in (None, replica.card.model)
        ]

    def known(self, model: str) -> KnownModel | None:
        """Return what is known of a model, or None.

        If nothing serves a known model, that is an outage, not a wrong name.
        """
        declared, announced = self._declared.get(model), self._announced.get(model)
        if declared is None and announced is None:
            return None
        classes = announced or (declared.service_classes if declared is not None else ())
        wanted = declared.replicas if declared is not None else None
        return KnownModel(classes or (FALLBACK_TERMS.name,), wanted)

    def known_models(self) -> dict[str, KnownModel]:
        """Return every model that a manifest names or that was announced, by name."""
        names = sorted({*self._declared, *self._announced})
        return {name: found for name in names if (found := self.known(name)) is not None}

    @property
    def ready(self) -> bool:
        return any(self._usable(replica) for replica in self._replicas.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def waiting_by_model(self) -> dict[str, int]:
        """Return the number of sequences that wait here, for each known model."""
        counts = dict.fromkeys((*self._declared, *self._announced), 0)
        for model, digest in self._waiting:
            counts[model] = counts.get(model, 0) + len(self._waiting.of((model, digest)))
        return counts

    @property
    def open(self) -> int:
        return len(self._sequences)

    def ttft_target_seconds(self, request: Arrive, prompt_tokens: int) -> float:
        """Return the seconds from arrival until a prompt's first token is due: the client's deadline, else its class's.

        Replicas of one model may differ in speed. The tightest target among the serving replicas that can
        hold the prompt counts, so that it waits here no longer than any of them would let it. It is computed
        from the announced prefill times, so it differs from the replica's own target by a few per cent.
        Infinite if no replica serves the request.
        """
        if request.deadline_after_seconds is not None:
            return request.deadline_after_seconds
        cards = [replica.card for replica in self._serving(request)]
        return min(
            (
                ttft_target_seconds(
                    class_terms(card.service_classes, request.service_class),
                    prefill_seconds(card.prefill_points, prompt_tokens),
                )
                for card in cards
                if card.longest_request_tokens > prompt_tokens
            ),
            default=inf,
        )

    def _slack_seconds(self, request: Arrive, prompt_tokens: int) -> float:
        """Return how long a new prompt may wait: its TTFT target minus its own prefill on the fastest replica."""
        own = min(
            (
                prefill_seconds(replica.card.prefill_points, prompt_tokens)
                for replica in self._serving(request)
                if replica.card.longest_request_tokens > prompt_tokens
            ),
            default=0.0,
        )
        return self.ttft_target_seconds(request, prompt_tokens) - own

    # Client side ----------------------------------------------------------------------------------

    def _arrive(self, request: Arrive, now: float) -> list[RouterCommand]:
        ids = [new.id for new in request.sequences]
        assert not any(sequence_id in self._sequences for sequence_id in ids), (
            "ids are the driver's to keep apart"
        )
        problem = self._cannot_serve(request)
        if problem is not None:
            kind, detail = problem
            return [Fail(sequence_id, kind, detail, self._retry_after(request)) for sequence_id in ids]
        for new in request.sequences:
            self._arrivals += 1
            slack = self._slack_seconds(request, new.prompt_length)
            sequence = _Sequence(new, request, now, (now + slack, self._arrivals))
            self._sequences[new.id] = sequence
            self._waiting.add(sequence.key, sequence)
        commands = self._dispatch(now)
        if len(self._waiting) > self._limits.max_waiting:
            for sequence_id in ids:
                sequence = self._sequences[sequence_id]
                if sequence.replica is None:
                    detail = f"{self._limits.max_waiting} requests are waiting already; try again later"
                    commands.append(self._fail(sequence, "overloaded", detail))
        return commands

    def _cannot_serve(self, request: Arrive) -> tuple[FailureKind, str] | None:
        serving = self._serving(request)
        if serving:
            longest = max(replica.card.longest_request_tokens for replica in serving)
            requested = max(new.prompt_length for new in request.sequences) + 1
            if requested <= longest:
                return None
            return (
                "too_long",
                f"the KV cache holds {longest} tokens; prompt and first output token need {requested}",
            )
        if (self._declared or self._announced) and self.known(request.model) is None:
            return "model_not_found", f"The model `{request.model}` does not exist."
        return "unavailable", f"no ready replica serves the model `{request.model}` now; try again later"

    def _abandon(self, sequence_id: str) -> list[RouterCommand]:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        replica, wire_id = sequence.replica, sequence.wire_id
        self._forget(sequence)
        return [Send(replica, Cancel(wire_id))] if replica is not None else []

    # Manifests ------------------------------------------------------------------------------------

    def _declare(self, models: Iterable[DeclaredModel]) -> None:
        before, self._declared = self._declared, {model.name: model for model in models}
        self._withdrawn = (self._withdrawn | before.keys()) - self._declared.keys()
        self._forget_withdrawn()

    def _forget_withdrawn(self) -> None:
        """Forget models that manifests no longer name, once the last of their replicas has gone."""
        if self._withdrawn:
            present = {replica.card.model for replica in self._replicas.values()}
            for model in self._withdrawn - present:
                self._announced.pop(model, None)
            self._withdrawn &= present

    # Replica side ---------------------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[RouterCommand]:
        match event.message:
            case Announce() as card:
                assert event.replica == card.replica
                return self._announce(card, now)
            case Emit() as emit:
                return self._emit(event.replica, emit)
            case Refused() as refused:
                return self._refused(event.replica, refused, now)
            case Failed() as failed:
                return self._failed(event.replica, failed, now)

    def _announce(self, card: Announce, now: float) -> list[RouterCommand]:
        reason = self._unacceptable(card)
        if reason is not None:
            if self._rejected.get(card.replica) == reason:
                return []
            self._rejected[card.replica] = reason
            return [*self._lose(card.replica), Reject(card.replica, reason)]
        self._rejected.pop(card.replica, None)
        self._announced[card.model] = tuple(terms.name for terms in card.service_classes)

        commands: list[RouterCommand] = []
        known = self._replicas.get(card.replica)
        if known is not None and _identity(known.card) != _identity(card):
            commands += self._lose(card.replica)  # a new epoch knows none of the old one's sequences
            known = None
        if known is None:
            self._replicas[card.replica] = _Replica(card, now)
        else:
            if known.card.ready and not card.ready:  # its epoch is lost; others may serve what is open there
                for sequence in list(known.open.values()):
                    commands += self._resume(sequence)
            known.card, known.last_seen_at = card, now
            known.forwarded = known.forwarded_tokens = 0
            known.forwarded_seconds = 0.0
            known.full = False
        if card.digest not in self._bundles:
            fetch_requested_at = self._fetch_requested_at.get(card.digest)
            if fetch_requested_at is None or now - fetch_requested_at >= self._limits.fetch_seconds:
                self._fetch_requested_at[card.digest] = now
                commands.append(Send(card.replica, FetchBundle(card.digest)))
        return commands + self._dispatch(now)

    def _unacceptable(self, card: Announce) -> str | None:
        for other in self._replicas.values():
            mixes = other.card.model == card.model and other.card.digest != card.digest
            if mixes and other.card.replica != card.replica:
                return (
                    f"its bundle {card.digest[:12]} of model {card.model!r} differs from {other.card.digest[:12]} "
                    f"of replica {other.card.replica!r}; give both the same checkpoint, or different model names"
                )
        return None

    def _emit(self, replica: str, emit: Emit) -> list[RouterCommand]:
        sequence = self._assigned(replica, emit.id)
        if sequence is None:
            # This attempt was abandoned: its replica was silent, or the router has restarted.
            return [Send(replica, Cancel(emit.id))] if emit.finish_reason is None else []
        sequence.emitted.extend(emit.tokens)
        if emit.tokens:
            sequence.has_progress = True  # so it is not what kills its replicas
            sequence.losses = sequence.lost_attempts = 0
        if emit.finish_reason is not None:
            self._forget(sequence)
        return [Deliver(sequence.new.id, emit.tokens, emit.finish_reason, emit.logprobs, emit.cached_tokens)]

    def _refused(self, replica: str, refused: Refused, now: float) -> list[RouterCommand]:
        sequence = self._assigned(replica, refused.id)
        if sequence is None:
            return []
        match refused.reason:
            case "capacity" | "draining" | "not_ready":
                self._replicas[replica].full = True  # until its next announcement
                self._unassign(sequence)
                self._waiting.add(sequence.key, sequence)
                return self._dispatch(now)
            case "too_long":
                return [self._fail(sequence, "too_long", refused.detail or "the request is too long")]
            case _:
                return [self._fail(sequence, "invalid", refused.detail or f"refused: {refused.reason}")]

    def _failed(self, replica: str, failed: Failed, now: float) -> list[RouterCommand]:
        sequence = self._assigned(replica, failed.id)
        if sequence is None:
            return []
        if failed.reason == "rank_lost":
            self._replicas[replica].full = True  # until it announces how it continues
            self._count_loss(sequence, now)
            is_cause = sequence.losses >= self._limits.max_losses
            return (self._convict(sequence) if is_cause else self._resume(sequence)) + self._dispatch(now)
        kind: FailureKind = "out_of_memory" if failed.reason == "out_of_memory" else "internal"
        return [self._fail(sequence, kind, failed.detail or f"the replica failed: {failed.reason}")]

    def _lose(self, replica: str) -> list[RouterCommand]:
        lost = self._replicas.pop(replica, None)
        if lost is None:
            return []
        return [command for sequence in list(lost.open.values()) for command in self._resume(sequence)]

    def _tick(self, now: float) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        for name, replica in list(self._replicas.items()):
            if now - replica.last_seen_at > self._limits.silence_seconds:
                commands.append(Reject(name, f"silent for {now - replica.last_seen_at:.1f} s"))
                commands += self._lose(name)
        self._forget_withdrawn()
        commands += self._dispatch(now)
        return commands + self._end_hopeless(now)

    def _end_hopeless(self, now: float) -> list[RouterCommand]:
        """End queued sequences that had no serving replica for too long, or that no remaining replica can hold."""
        longest: dict[Key, int] = {}
        recovering: set[Key] = set()
        for replica in self._replicas.values():
            key = (replica.card.model, replica.card.digest)
            if self._usable(replica):
                longest[key] = max(longest.get(key, 0), replica.card.longest_request_tokens)
            elif not replica.card.ready and not replica.card.draining:
                recovering.add(key)
        unserved_since: dict[Key, float] = {}
        commands: list[RouterCommand] = []
        for key in self._waiting:
            queue = tuple(self._waiting.of(key))
            limit = longest.get(key)
            if limit is not None:
                detail = f"no replica is left that holds more than {limit} tokens"
                gone = [sequence for sequence in queue if sequence.tokens >= limit]
                commands += [self._fail(sequence, "too_long", detail) for sequence in gone]
                continue
            since = unserved_since[key] = self._unserved_since.get(key, now)
            limits = self._limits
            allowed_seconds = limits.recovery_seconds if key in recovering else limits.unserved_seconds
            if now - since >= allowed_seconds:
                detail = f"no replica of the model `{key[0]}` came back in {now - since:.0f} s"
                commands += [self._fail(sequence, "unavailable", detail) for sequence in queue]
        self._unserved_since = unserved_since
        return commands

    # Late binding ---------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> list[RouterCommand]:
        """Forward queued sequences, the most urgent first, while replicas have capacity.

        A sequence is examined only while a replica that could serve it has capacity. The cost is therefore that
        of the forwarded sequences, plus long sequences that only a full replica could hold.
        """
        commands: list[RouterCommand] = []
        for key in self._waiting:
            with_capacity = [
                replica
                for replica in self._replicas.values()
                if self._has_capacity(replica) and (replica.card.model, replica.card.digest) == key
            ]
            if with_capacity:
                commands += self._dispatch_to(key, with_capacity, now)
        named = Counter(
            command.message.prompt
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, Submit)
        )
        return [
            replace(command, sequences=named[command.prompt]) if isinstance(command, SendPrompt) else command
            for command in commands
        ]

    def _dispatch_to(self, key: Key, with_capacity: list[_Replica], now: float) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        names: dict[str, tuple[str, str]] = {}  # prompt sent in this pass -> (replica, its name there)
        kept: list[_Sequence] = []
        seen = 0
        for sequence in self._waiting.of(key):
            if not with_capacity:
                break
            seen += 1
            chosen = self._choose(sequence, with_capacity, names.get(sequence.new.prompt), now)
            if chosen is None:
                kept.append(sequence)
                continue
            commands += self._forward(sequence, chosen, names, now)
            if not self._has_capacity(chosen):
                with_capacity.remove(chosen)
        self._waiting.replace_front(key, seen, kept)
        return commands

    def _choose(
        self, sequence: _Sequence, replicas: Iterable[_Replica], sent: tuple[str, str] | None, now: float
    ) -> _Replica | None:
        """Return the replica for `sequence`: where its prompt was just sent, else with the soonest first token."""
        tokens, prefix = sequence.tokens, sequence.new.prefix
        fitting = [replica for replica in replicas if replica.card.longest_request_tokens > tokens]
        whole = sequence.new.prompt_length + (sequence.new.sampling.max_tokens or 1)
        able = [replica for replica in fitting if replica.card.longest_request_tokens >= whole]
        if len(able) < len(fitting) and any(
            replica.card.longest_request_tokens >= whole for replica in self._serving(sequence.request)
        ):
            fitting = able  # the others would cut the output short
        if sequence.losses:  # with two suspects in a replica, its loss could not be attributed
            fitting = [
                one for one in fitting if not any(self._is_on_trial(it, now) for it in one.open.values())
            ]
        if len(fitting) < 2:
            return fitting[0] if fitting else None

        def preference(replica: _Replica) -> tuple[bool, bool, float, int, int, int, str]:
            card = replica.card
            cached = replica.prefixes.known_tokens(prefix)
            return (
                sent is None or bool(sequence.emitted) or sent[0] != card.replica,  # samples share prompt KV
                card.kv_tokens_free - replica.forwarded_tokens < _reservation(sequence, card),
                replica.seconds_ahead + replica.own_seconds(tokens, cached),
                -cached,
                replica.forwarded_tokens,  # tells idle replicas apart between two announcements
                card.running + card.waiting,
                card.replica,
            )

        return min(fitting, key=preference)

    def _is_on_trial(self, sequence: _Sequence, now: float) -> bool:
        """Return whether an open sequence is a suspect that may still kill its replica soon after being sent."""
        return sequence.losses > 0 and now - sequence.sent_at < self._limits.trial_seconds

    def _forward(
        self, sequence: _Sequence, replica: _Replica, names: dict[str, tuple[str, str]], now: float
    ) -> list[RouterCommand]:
        new, request, name = sequence.new, sequence.request, replica.card.replica
        wire_id = new.id if sequence.attempts == 0 else f"{new.id}~{sequence.attempts}"
        sequence.attempts += 1
        sequence.replica, sequence.wire_id = name, wire_id
        sequence.sent_at, sequence.has_progress = now, False
        self._by_wire_id[wire_id] = sequence
        replica.open[wire_id] = sequence
        cached = replica.prefixes.known_tokens(new.prefix)
        replica.prefixes.add(new.prefix)
        replica.forwarded += 1
        replica.forwarded_tokens += _reservation(sequence, replica.card)
        replica.forwarded_seconds += replica.own_seconds(sequence.tokens, cached)

        commands: list[RouterCommand] = []
        shared = names.get(new.prompt)
        if shared is not None and shared[0] == name and not sequence.emitted:
            prompt = shared[1]
        else:
            # The name is as unique as the wire id: the replica may have forgotten an earlier one already.
            prompt = f"{wire_id}/prompt"
            emitted = tuple(sequence.emitted)
            commands.append(SendPrompt(name, prompt, new.prompt, emitted, cache_salt=request.cache_salt))
            if not sequence.emitted:
                names[new.prompt] = (name, prompt)
        submit = Submit(
            id=wire_id,
            prompt=prompt,
            tokens=sequence.tokens,
            prompt_length=new.prompt_length,
            seed=new.seed,
            sample_index=new.sample_index,
            age_seconds=max(0.0, now - sequence.arrived_at),
            deadline_after_seconds=request.deadline_after_seconds,
            tpot_target_seconds=request.tpot_target_seconds,
            service_class=request.service_class,
            sampling=new.sampling,
        )
        commands.append(Send(name, submit))
        return commands

    def _has_capacity(self, replica: _Replica) -> bool:
        # A replica without a queue (limit 0) still takes one at a time.
        limit = max(1, replica.card.waiting_limit)
        return self._usable(replica) and not replica.full and replica.card.waiting + replica.forwarded < limit

    def _usable(self, replica: _Replica) -> bool:
        return replica.serves and replica.card.digest in self._bundles

    def _serving(self, request: Arrive) -> list[_Replica]:
        return [
            replica
            for replica in self._replicas.values()
            if self._usable(replica)
            and replica.card.model == request.model
            and replica.card.digest == request.digest
        ]

    # Bookkeeping ----------------------------------------------------------------------------------

    def _assigned(self, replica: str, wire_id: str) -> _Sequence | None:
        sequence = self._by_wire_id.get(wire_id)
        return sequence if sequence is not None and sequence.replica == replica else None

    def _resume(self, sequence: _Sequence) -> list[RouterCommand]:
        """Requeue a sequence that its replica lost, to continue after its emitted tokens; or end it."""
        sequence.lost_attempts += 1
        if sequence.lost_attempts >= self._limits.max_attempts:
            detail = (
                f"{sequence.lost_attempts} attempts in a row were lost with their replicas; try again later"
            )
            return [self._fail(sequence, "unavailable", detail)]
        self._unassign(sequence)
        self._waiting.add(sequence.key, sequence)
        return []

    def _count_loss(self, sequence: _Sequence, now: float) -> None:
        """Count the loss of a replica against a sequence of the interrupted step, unless it has sampled a token."""
        if sequence.has_progress:
            return
        is_quick = now - sequence.sent_at < self._limits.trial_seconds
        sequence.losses = sequence.losses + 1 if is_quick else 1

    def _convict(self, sequence: _Sequence) -> list[RouterCommand]:
        """End a sequence that kills its replicas, and with it the suspects that are samples of the same prompt."""
        detail = (
            f"{sequence.losses} replicas in a row were lost within {self._limits.trial_seconds:g} s of being sent this "
            "request, while they computed it; it is assumed to be the cause, and is not tried again"
        )
        commands: list[RouterCommand] = [self._fail(sequence, "internal", detail)]
        for other in list(self._sequences.values()):
            is_sample = other.request is sequence.request and other.new.prompt == sequence.new.prompt
            if is_sample and other.losses:
                if other.replica is not None:
                    commands.append(Send(other.replica, Cancel(other.wire_id)))
                commands.append(self._fail(other, "internal", detail))
        return commands

    def _unassign(self, sequence: _Sequence) -> None:
        if sequence.replica is None:
            return
        del self._by_wire_id[sequence.wire_id]
        if sequence.replica in self._replicas:
            del self._replicas[sequence.replica].open[sequence.wire_id]
        sequence.replica = None

    def _forget(self, sequence: _Sequence) -> None:
        if sequence.replica is None:
            self._waiting.remove(sequence.key, sequence)
        self._unassign(sequence)
        del self._sequences[sequence.new.id]

    def _fail(self, sequence: _Sequence, kind: FailureKind, detail: str) -> Fail:
        self._forget(sequence)
        retry_after = self._retry_after(sequence.request) if kind in ("overloaded", "unavailable") else None
        return Fail(sequence.new.id, kind, detail, retry_after)

    def _retry_after(self, request: Arrive) -> int:
        """Return the seconds until the least loaded replica has finished its pending prefills; from 1 to 60."""
        pending = [card.pending_prefill_seconds for card in self.cards(request.model)]
        return min(60, max(1, ceil(min(pending, default=1.0))))


def _reservation(sequence: _Sequence, card: Announce) -> int:
    """Return the KV tokens that a sequence will reserve in a replica, counting its whole output.

    The output is `max_tokens`, or else the default of its service class.
    """
    output = sequence.new.sampling.max_tokens
    if output is None:
        output = class_terms(card.service_classes, sequence.request.service_class).default_output_tokens
    whole = max(sequence.new.prompt_length + output, sequence.tokens + 1)
    return min(whole, max(card.max_model_len, sequence.tokens + 1))


def _identity(card: Announce) -> tuple[str, str, int]:
    return card.model, card.digest, card.epoch
