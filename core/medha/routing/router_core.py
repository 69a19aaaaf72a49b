"""RouterCore: decides which replica serves which sequence, and when. `medha_router.replica_link` does the I/O.

Binding is late: a sequence waits here, not in a replica, until a ready replica of its model can begin it soon. The
core keeps the tokens that every open sequence has emitted, so that a new epoch or another replica can resume
it with the same seed, and the client sees one stream. A sequence is never lost. It ends with a `Deliver` that
has a finish reason, with one `Fail`, or because its client has gone.

The parts: `ledgers` has the waiting sequences in the order of their replicas' policy, and answers when one could
start. `known_replicas` is what replicas announce, and what was forwarded since. `replica_choice` chooses between
them: the most urgent sequence chooses first, and samples of one prompt stay together. `roles` says which of them compute
a prompt and which its output; once a sequence has a token, it moves from the former to the latter. `lost_attempts` finds the
sequence that causes losses of replicas. `attained_service` is the service of owners, which take turns when not all
can be on time. A deadline is set once, when a sequence arrives, from the replicas' own targets (`medha.slo`) and
prefill times; later announcements and losses do not change it. A sequence that moves after its first token gets another one.

Time comes in as `now` (seconds of the driver's monotonic clock). The same events give the same commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medha.routing.deadline_ledger import Opening
from medha.routing.drain_moves import leaves_for, may_take_over
from medha.routing.fleet import Fleet, most_tokens
from medha.routing.known_models import KnownModels
from medha.routing.known_replicas import Forwarded, KnownReplica
from medha.routing.kv_sources import KvSources
from medha.routing.ledgers import Ledgers, retry_after_seconds
from medha.routing.listening import Listening
from medha.routing.lost_attempts import (
    conviction,
    count_attempt,
    count_loss,
    is_suspect,
    without_trial,
)
from medha.routing.model_work import ModelWorks
from medha.routing.open_sequences import Key, OpenSequence
from medha.routing.replica_choice import (
    able_replicas,
    choose,
    ignored_grammar,
    move_targets,
    peer_with_kv,
    reservation_tokens,
    resumption_seconds,
)
from medha.routing.replica_demand import DemandReason, DemandTerms, ModelWork, replica_demand
from medha.routing.roles import lone_role, read_pays
from medha.routing.router_events import (
    Abandon,
    Arrive,
    BundleKnown,
    Declared,
    Deliver,
    Fail,
    FailureKind,
    LinkLost,
    Move,
    NewSequence,
    Notice,
    Received,
    Reject,
    RouterCommand,
    RouterEvent,
    Send,
    SendPrompt,
    ServedElsewhere,
)
from medha.routing.routing_limits import RoutingLimits
from medha.routing.unserved import Unserved
from medha.scheduler.attained_service import AttainedService
from medha.scheduler.request import NOWHERE
from medha.slo import class_terms, ttft_target_seconds
from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Failed,
    Heartbeat,
    Refused,
    Submit,
    Tick,
)

MOST_LOOKS = 256
"""Most sequences of a draining replica that one pass examines; the pass of the next tick continues after them."""
MOST_MISSES = 64
"""Most sequences in a row without a replica for them before a pass ends; the next pass begins after them."""


class RouterCore:
    """The router's decisions. `handle` takes one event and returns what to do, in order."""

    def __init__(self, limits: RoutingLimits | None = None, demand: DemandTerms | None = None) -> None:
        self._limits = limits or RoutingLimits()
        self._works = ModelWorks(demand or DemandTerms())
        self._listening = Listening(self._limits.late_seconds, self._limits.stopped_seconds)
        self.fleet = Fleet(self._limits)
        self._replicas = self.fleet.replicas
        self._sequences: dict[str, OpenSequence] = {}
        self._by_wire_id: dict[str, OpenSequence] = {}
        self._attained = AttainedService()
        self._waiting = Ledgers(self._limits.max_waiting)
        self._bundles = self.fleet.bundles
        self._unserved = Unserved(self._limits)
        self.models = KnownModels()
        self._lone_roles: dict[str, str] = {}  # model -> role of the only replicas that serve it
        self._rejected: dict[str, str] = {}  # replica -> reason, so that each is reported once
        self._arrivals = 0
        self._sources = KvSources()

    def handle(self, event: RouterEvent, now: float) -> list[RouterCommand]:
        return self._handle(event, now) + self._sources.take_freed()

    def _handle(self, event: RouterEvent, now: float) -> list[RouterCommand]:
        match event:
            case Arrive():
                return self._arrive(event, now)
            case Abandon(id=sequence_id):
                return self._abandon(sequence_id, now)
            case Received():
                return self._received(event, now)
            case BundleKnown(digest=digest):
                self._bundles.add(digest)
                commands: list[RouterCommand] = []
                for key in sorted({one.key for one in self._replicas.values() if one.card.digest == digest}):
                    commands += self._follow(key)
                return commands + self._dispatch(now)
            case LinkLost(replica=replica):
                self._rejected.pop(replica, None)
                return self._lose(replica, now) + self._dispatch(now)
            case Declared(models=models):
                self.models.declare(models)
                self._forget_withdrawn()
                return []
            case ServedElsewhere(owner, tokens):
                self._attained.charge(owner, tokens, now)
                return []
            case Tick():
                return self._tick(now)

    # Queries of the HTTP side ---------------------------------------------------------------------

    def is_expected(self, model: str, now: float) -> bool:
        """Return whether replicas of a model may come, because a manifest names it, or may be about to."""
        return self.models.is_expected(model, now, self._limits.name_seconds)

    def works(self, guests: Mapping[str, int], now: float) -> dict[str, ModelWork]:
        """Return what clients want now of each known model; `guests` are requests in the waiting room, by model."""
        sequences = self._sequences.values()
        return self._works.now(
            self.models.names, sequences, self._waiting, self.fleet.serving_key, guests, now
        )

    def demand(self, model: str, work: ModelWork) -> dict[DemandReason, float]:
        """Return the replicas of a model that this work needs, by reason (`medha.routing.replica_demand`)."""
        return replica_demand(work, self._works.size(model), self._works.terms)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def open(self) -> int:
        return len(self._sequences)

    # Client side ----------------------------------------------------------------------------------

    def _arrive(self, request: Arrive, now: float) -> list[RouterCommand]:
        ids = [new.id for new in request.sequences]
        assert not any(sequence_id in self._sequences for sequence_id in ids), (
            "ids are the driver's to keep apart"
        )
        problem = self._cannot_serve(request)
        if problem is not None:
            kind, detail = problem
            retry_after = 1 if kind == "unavailable" else None
            return [Fail(sequence_id, kind, detail, retry_after) for sequence_id in ids]
        leaders = {new.prompt: new.id for new in reversed(request.sequences)}
        sequences = [
            self._accept(new, request, now, leads=leaders[new.prompt] == new.id) for new in request.sequences
        ]
        return self._dispatch(now) + self._refuse(request, sequences, now)

    def _accept(self, new: NewSequence, request: Arrive, now: float, *, leads: bool) -> OpenSequence:
        self._arrivals += 1
        sequence = OpenSequence(
            new=new,
            request=request,
            arrived_at=now,
            deadline=now + self.fleet.ttft_target_seconds(request, new.prompt_length),
            work_seconds=self.fleet.work_seconds(request, new.prompt_length),
            tie=self._arrivals,
            turn=self._attained.turn(request.owner),
            leads=leads,
        )
        self._sequences[new.id] = sequence
        self._attained.charge(request.owner, new.prompt_length, now)
        self._works.arrived(request.model, self._wait(sequence), sequence.deadline - now, now)
        return sequence

    def _refuse(self, request: Arrive, sequences: Iterable[OpenSequence], now: float) -> list[RouterCommand]:
        """End those of a new request's sequences that may not wait: too many wait already, or they would wait for too long."""
        left = [sequence for sequence in sequences if sequence.replica is None]
        waiting = len(self._waiting) - len(left)
        of_owner = self._waiting.waiting_of(request.owner) - len(left)
        most_seconds = self.fleet.most_wait_seconds(request)
        commands: list[RouterCommand] = []
        for sequence in left:
            reason = None
            if not self._waiting.has_room_for(request.owner, waiting, of_owner):
                reason = f"{waiting} requests are waiting already"
            elif most_seconds is not None and self._start_seconds(sequence, now) > most_seconds:
                reason = f"requests of its service class wait for {most_seconds:g} s at most"
            if reason is None:
                waiting, of_owner = waiting + 1, of_owner + 1
            else:
                commands.append(self._overloaded(sequence, reason, now))
        return commands

    def _overloaded(self, sequence: OpenSequence, reason: str, now: float) -> Fail:
        start_seconds = self._start_seconds(sequence, now)
        text = f"{reason}; the earliest start of this one is in {start_seconds:.1f} s, so try again later"
        return self._fail(sequence, "overloaded", text, now, retry_after_seconds(start_seconds))

    def _start_seconds(self, sequence: OpenSequence, now: float) -> float:
        return self._waiting.start_seconds(sequence, self.fleet.serving(sequence.request), now)

    def _cannot_serve(self, request: Arrive) -> tuple[FailureKind, str] | None:
        serving = self.fleet.serving(request)
        if serving:
            longest = max(replica.card.longest_request_tokens for replica in serving)
            requested = max(new.prompt_length for new in request.sequences) + 1
            if requested <= longest:
                return None
            return (
                "too_long",
                f"the KV cache holds {longest} tokens; prompt and first output token need {requested}",
            )
        if self.models and self.models.find(request.model) is None:
            return "model_not_found", f"The model `{request.model}` does not exist."
        if self.fleet.serving_key((request.model, request.digest)):
            return "unavailable", ignored_grammar(request.model)
        return "unavailable", f"no ready replica serves the model `{request.model}` now; try again later"

    def _abandon(self, sequence_id: str, now: float) -> list[RouterCommand]:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return []
        replica, wire_id = sequence.replica, sequence.wire_id
        self._forget(sequence, now)
        return [Send(replica, Cancel(wire_id))] if replica is not None else []

    # Replica side ---------------------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> list[RouterCommand]:
        replica = self._replicas.get(event.replica)
        if replica is not None:
            replica.heard_at = self._listening.seconds(now)
        match event.message:
            case Heartbeat():
                return []
            case Announce() as card:
                assert event.replica == card.replica
                return self._announce(card, now)
            case Emit() as emit:
                return self._emit(event.replica, emit, now)
            case Refused() as refused:
                return self._refused(event.replica, refused, now)
            case Failed() as failed:
                return self._failed(event.replica, failed, now)

    def _announce(self, card: Announce, now: float) -> list[RouterCommand]:
        reason = self.fleet.refusal_of(card)
        if reason is not None:
            if self._rejected.get(card.replica) == reason:
                return []
            self._rejected[card.replica] = reason
            return [*self._lose(card.replica, now), Reject(card.replica, reason)]
        self._rejected.pop(card.replica, None)
        self.models.announce(card, now)

        commands: list[RouterCommand] = []
        known = self._replicas.get(card.replica)
        if known is not None and _identity(known.card) != _identity(card):
            commands += self._lose(card.replica, now)  # a new epoch knows none of the old one's sequences
            known = None
        drains = card.draining and (known is None or not known.card.draining)
        if known is None:
            self._replicas[card.replica] = KnownReplica(card, self._listening.seconds(now), now)
        else:
            if known.card.ready and not card.ready:  # its epoch is lost; others may serve what is open there
                self._sources.lose(card.replica)
                for sequence in list(known.open.values()):
                    commands += self._resume(sequence, now)
            known.announce(card, now)
        commands += self._bundles.request(card, now)
        commands += self._follow(self._replicas[card.replica].key)
        if drains:  # later decisions are those of ticks: it announces often, and may have many sequences
            commands += self._move_from(self._replicas[card.replica], now)
        return commands + self._dispatch(now)

    def _follow(self, key: Key) -> list[RouterCommand]:
        """Order a model's waiting sequences by the policy of the replicas that serve it now.

        Return a notice if all of these are of one role, `prefill` or `decode`, or no longer are.
        """
        serving, model = self.fleet.serving_key(key), key[0]
        self._waiting.follow(key, serving)
        self._works.follow(model, serving)
        lone, before = lone_role(serving), self._lone_roles.get(model, "")
        if lone == before:
            return []
        self._lone_roles[model] = lone
        if lone:
            text = f"only replicas of the role `{lone}` serve the model {model!r}; until others come, they do all of its work"
            return [Notice(text)]
        del self._lone_roles[model]
        return [Notice(f"the role `{before}` no longer serves the model {model!r} alone", is_warning=False)]

    def _emit(self, replica: str, emit: Emit, now: float) -> list[RouterCommand]:
        sequence = self._assigned(replica, emit.id)
        if sequence is None and emit.id in self._sources:
            return []  # sent before the move reached the replica; another replica samples the same tokens
        if sequence is None:
            # This attempt was abandoned: its replica was silent, or the router has restarted.
            return [Send(replica, Cancel(emit.id))] if emit.finish_reason is None else []
        sequence.emitted.extend(emit.tokens)
        if emit.tokens:
            if not sequence.has_progress:
                sequence.first_token_at, sequence.first_tokens = now, len(sequence.emitted)
                self._sources.free(sequence)
            sequence.has_progress = True  # so it is not taken for the cause of a loss
            sequence.kv_dtype = self._replicas[replica].card.kv_dtype
            sequence.losses, sequence.was_aboard = 0, False
            self._attained.charge(sequence.owner, len(emit.tokens), now)
        if emit.finish_reason is not None:
            self._forget(sequence, now)
        delivered = Deliver(
            sequence.new.id,
            emit.tokens,
            emit.finish_reason,
            emit.logprobs,
            emit.cached_tokens,
            emit.prompt_logprobs,
        )
        moves = self._decode_elsewhere(sequence, now) if emit.tokens and emit.finish_reason is None else []
        return [delivered, *moves]

    def _decode_elsewhere(self, sequence: OpenSequence, now: float) -> list[RouterCommand]:
        """Let a sequence with a new token go on at a replica that decodes, if its present one is for prompts."""
        assert sequence.replica is not None
        source = self._replicas[sequence.replica]
        serving = self.fleet.serving_key(sequence.key)
        chosen = choose(sequence, move_targets(sequence, source, serving), serving)
        if chosen is None:
            return []
        name = source.card.replica
        leaves = self._leave_kv(sequence, name, chosen, now)
        sort_key = self._waiting.of(sequence.key).key(sequence, now)
        sent = self._forward_samples(sequence, chosen, sort_key, now)
        return [Move(sequence.new.id, name), leaves, *sent]

    def _refused(self, replica: str, refused: Refused, now: float) -> list[RouterCommand]:
        sequence = self._assigned(replica, refused.id)
        if sequence is None:
            return []
        match refused.reason:
            case "capacity" | "draining" | "not_ready":
                self._replicas[replica].full = True  # until its next announcement
                self._replicas[replica].prefixes.forget(sequence.new.prefix, sequence.known_tokens)
                self._unassign(sequence)
                self._wait(sequence)
                return self._dispatch(now)
            case "too_long":
                return [self._fail(sequence, "too_long", refused.detail or "the request is too long", now)]
            case _:
                return [self._fail(sequence, "invalid", refused.detail or f"refused: {refused.reason}", now)]

    def _failed(self, replica: str, failed: Failed, now: float) -> list[RouterCommand]:
        sequence = self._assigned(replica, failed.id)
        if sequence is None:
            return []
        if failed.reason == "rank_lost":
            self._replicas[replica].full = True  # until it announces how it continues
            count_loss(sequence, self._limits, now, computed=True)
            return self._resume(sequence, now) + self._dispatch(now)
        kind: FailureKind = "internal"
        if failed.reason in ("out_of_memory", "grammar_late"):
            kind = failed.reason
        elif failed.reason == "grammar":
            kind = "invalid"
        return [self._fail(sequence, kind, failed.detail or f"the replica failed: {failed.reason}", now)]

    def _lose(self, replica: str, now: float) -> list[RouterCommand]:
        """Resume the sequences of a replica that is lost as a whole."""
        lost = self._replicas.pop(replica, None)
        if lost is None:
            return []
        self._sources.lose(replica)
        commands: list[RouterCommand] = []
        for sequence in list(lost.open.values()):
            if sequence.new.id not in self._sequences:
                continue  # it has ended with another sample of its prompt
            if self._listening.was_stopped(now):
                commands += self._resume(sequence, now, is_own_doing=True)
            else:
                count_loss(sequence, self._limits, now, computed=False)
                commands += self._resume(sequence, now)
        return commands + self._follow(lost.key)

    def _tick(self, now: float) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        listened_seconds = self._listening.tick(now)
        for name, replica in list(self._replicas.items()):
            silent_seconds = listened_seconds - replica.heard_at
            if silent_seconds > self._limits.silence_seconds:
                commands.append(Reject(name, f"silent for {silent_seconds:.1f} s"))
                # It may come back on the same connection, and must not compute what others do by then.
                left = (one.wire_id for one in self._sources.at(name))
                commands += [Send(name, Cancel(wire_id)) for wire_id in (*replica.open, *left)]
                commands += self._lose(name, now)
        self._forget_withdrawn()
        for key in self._waiting:
            self._waiting.refresh(key, self.fleet.serving_key(key))
        for replica in self._replicas.values():
            commands += self._move_from(replica, now)
        commands += self._dispatch(now)
        usable = {name for name, replica in self._replicas.items() if self.fleet.is_usable(replica)}
        hopeless = self._unserved.hopeless(self._replicas.values(), usable, self._waiting, now)
        commands += [self._fail(sequence, kind, detail, now) for sequence, kind, detail in hopeless]
        announced = {replica.card.digest for replica in self._replicas.values()}
        open_ones = (sequence.request.digest for sequence in self._sequences.values())
        return commands + self._bundles.drop_unneeded(announced, open_ones, now)

    # Late binding ---------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> list[RouterCommand]:
        """Forward waiting sequences, the most urgent first, to replicas that can begin them soon.

        If nothing can be forwarded, this takes a few vector operations over the rows of each ledger for which a
        replica has a place (`medha.routing.deadline_ledger`).
        """
        commands: list[RouterCommand] = []
        for key in self._waiting:
            with_place = [replica for replica in self.fleet.serving_key(key) if replica.has_place]
            if with_place:
                commands += self._dispatch_to(key, with_place, now)
        return commands

    def _dispatch_to(self, key: Key, with_place: list[KnownReplica], now: float) -> list[RouterCommand]:
        commands: list[RouterCommand] = []
        ledger, serving = self._waiting.of(key), self.fleet.serving_key(key)
        lookahead = self._limits.lookahead_seconds
        longest = most_tokens(serving)
        takes_turns = ledger.takes_turns(now)

        def opening(replica: KnownReplica) -> Opening:
            most = longest[replica.card.follows_grammars]
            return replica.opening(lookahead, most, takes_turns=takes_turns)

        openings = {replica.card.replica: opening(replica) for replica in with_place}
        missed: list[OpenSequence] = []  # in a row
        for sequence, sort_key in ledger.urgent_first(now, openings.values()):
            if sequence.row == NOWHERE:
                continue  # it went with another sample of its prompt
            turn, is_late = ledger.turn(sequence), ledger.is_late(sequence, now)
            able = able_replicas(sequence, serving)
            found = [
                replica
                for replica in with_place
                if replica in able
                and openings[replica.card.replica].holds(
                    sequence.tokens,
                    sequence.whole_tokens,
                    reservation_tokens(sequence, replica.card),
                    is_late=is_late or turn < openings[replica.card.replica].until_turn,
                )
            ]
            busy = [one for one in found if not openings[one.card.replica].is_soon(sort_key, turn)]
            chosen = self._choose(sequence, [one for one in found if one not in busy], serving, now)
            for replica in busy:  # later sequences must not overtake this one there
                with_place.remove(replica)
            if chosen is None:
                missed.append(sequence)
                if len(missed) == MOST_MISSES or not with_place:
                    break
                continue
            missed = []
            commands += self._forward_samples(sequence, chosen, sort_key, now)
            openings[chosen.card.replica] = opening(chosen)
            if not chosen.has_place:
                with_place.remove(chosen)
            if not with_place:
                break
        if with_place and len(missed) == MOST_MISSES:
            ledger.set_aside(missed)  # so that the next pass reaches the sequences behind them
        else:
            ledger.take_back()
        return commands

    def _choose(
        self,
        sequence: OpenSequence,
        replicas: list[KnownReplica],
        serving: list[KnownReplica],
        now: float,
    ) -> KnownReplica | None:
        if is_suspect(sequence, self._limits):
            replicas = without_trial(replicas, self._limits, now)
        return choose(sequence, replicas, serving)

    def _forward_samples(
        self, sequence: OpenSequence, replica: KnownReplica, sort_key: float, now: float
    ) -> list[RouterCommand]:
        """Forward a sequence, and with it the waiting samples of the same prompt, which share its KV there."""
        new, name = sequence.new, replica.card.replica
        # The name is as unique as the wire id: the replica may have forgotten an earlier one already.
        prompt = f"{sequence.next_wire_id}/prompt"
        together = [sequence]
        if not (sequence.emitted or is_suspect(sequence, self._limits)):
            others = (self._sequences.get(one.id) for one in sequence.request.sequences)
            together += [
                one
                for one in others
                if one is not None
                and one is not sequence
                and one.row != NOWHERE
                and one.may_go_with(sequence)
            ]
        submits: list[RouterCommand] = []
        for one in together:
            if one is not sequence and not replica.has_place:
                break
            ahead_seconds = replica.seconds_before(sort_key) if replica.card.lanes else replica.seconds_ahead
            submit = self._forward(one, replica, prompt, sort_key, now)
            submits.append(Send(name, submit, ahead_seconds))
        salt = sequence.request.cache_salt
        sending = SendPrompt(name, prompt, new.prompt, tuple(sequence.emitted), len(submits), salt)
        return [sending, *submits]

    def _forward(
        self, sequence: OpenSequence, replica: KnownReplica, prompt: str, sort_key: float, now: float
    ) -> Submit:
        new, request, name = sequence.new, sequence.request, replica.card.replica
        contested_until = self._waiting.of(sequence.key).contested_until
        self._waiting.remove(sequence, served=True)
        wire_id = sequence.next_wire_id
        sequence.attempts += 1
        sequence.replica, sequence.wire_id = name, wire_id
        sequence.sent_at, sequence.has_progress = now, False
        self._by_wire_id[wire_id] = sequence
        cached = replica.prefixes.known_tokens(new.prefix)
        peer, peer_tokens = self._peer(sequence, replica, now)
        replica.prefixes.add(new.prefix)
        sequence.known_tokens = cached
        reserved = reservation_tokens(sequence, replica.card)
        replica.opens(wire_id, sequence, reserved)
        lanes = replica.berth(sequence.tokens, reserved).lanes
        if peer and read_pays(replica, peer_tokens, cached):
            cached = max(cached, peer_tokens)
        seconds = 0.0 if sequence.shares_prefill else replica.own_seconds(sequence.tokens, cached)
        replica.takes(Forwarded(wire_id, sort_key, lanes, reserved, seconds))

        return Submit(
            id=wire_id,
            prompt=prompt,
            tokens=sequence.tokens,
            prompt_length=new.prompt_length,
            seed=new.seed,
            sample_index=new.sample_index,
            age_seconds=max(0.0, now - sequence.arrived_at),
            deadline_after_seconds=sequence.due_after_seconds,
            tpot_target_seconds=request.tpot_target_seconds,
            service_class=request.service_class,
            sampling=new.sampling,
            owner=request.owner,
            contested_seconds=max(0.0, contested_until - now),
            peer=peer,
            peer_tokens=peer_tokens,
        )

    def _peer(self, sequence: OpenSequence, replica: KnownReplica, now: float) -> tuple[str, int]:
        """Return the replica from which another one may read a sequence's KV, and of how many tokens."""
        source = sequence.kv_source
        if source is not None and replica.reads_from(self._replicas[source.replica]):
            return source.replica, source.tokens
        others = [one for one in self._replicas.values() if one.key == sequence.key]
        return peer_with_kv(sequence, replica, others, now)

    # Replicas that drain --------------------------------------------------------------------------

    def _move_from(self, replica: KnownReplica, now: float) -> list[RouterCommand]:
        """Move sequences from a replica that drains to others, as far as that is better for them."""
        commands: list[RouterCommand] = []
        card = replica.card
        if not (card.ready and card.draining and replica.open) or card.drain_seconds is None:
            return commands
        serving = self.fleet.serving_key(replica.key)
        if not may_take_over(replica, serving):
            return commands
        reading_tokens = sum(one.tokens for one in self._sources.at(card.replica))
        for sequence in replica.next_open(MOST_LOOKS):
            if is_suspect(sequence, self._limits):
                continue
            target = leaves_for(sequence, replica, serving, reading_tokens, now)
            if target is not None:
                reading_tokens += sequence.tokens
                commands.append(self._leave_kv(sequence, card.replica, target, now))
                commands += self._dispatch(now)
        return commands

    def _leave_kv(self, sequence: OpenSequence, name: str, target: KnownReplica, now: float) -> Send:
        """Let a sequence leave a replica and wait for another one, which may read its KV; return its `Cancel`.

        If it has a token, its client waits for the next one. So it is due again, as a prompt would be that takes as long to
        compute as the replica `target` takes to get its KV. Otherwise it stays due when it was.
        """
        if sequence.has_progress:
            terms = class_terms(target.card.service_classes, sequence.request.service_class)
            sequence.deadline = now + ttft_target_seconds(terms, resumption_seconds(sequence, target))
            sequence.has_moved = True
        leaves = Send(name, Cancel(sequence.wire_id, moves=True))
        self._sources.leave(sequence, name)
        self._unassign(sequence)
        self._wait(sequence)
        return leaves

    # Bookkeeping ----------------------------------------------------------------------------------

    def _assigned(self, replica: str, wire_id: str) -> OpenSequence | None:
        sequence = self._by_wire_id.get(wire_id)
        return sequence if sequence is not None and sequence.replica == replica else None

    def _resume(
        self, sequence: OpenSequence, now: float, *, is_own_doing: bool = False
    ) -> list[RouterCommand]:
        """Requeue a sequence that its replica lost, to continue after its emitted tokens; or end it.

        `is_own_doing`: the replica was lost because this router had stopped, so the attempt does not count.
        """
        if not is_own_doing:
            count_attempt(sequence, self._limits, now)
        if sequence.losses >= self._limits.max_losses:
            return self._convict(sequence, now)
        if sequence.lost_attempts >= self._limits.max_attempts:
            detail = (
                f"{sequence.lost_attempts} attempts in a row were lost with their replicas; try again later"
            )
            return [self._fail(sequence, "unavailable", detail, now)]
        self._unassign(sequence)
        self._wait(sequence)
        return []

    def _convict(self, sequence: OpenSequence, now: float) -> list[RouterCommand]:
        """End a sequence that kills its replicas, and with it the suspects that are samples of the same prompt."""
        detail = conviction(sequence, self._limits)
        commands: list[RouterCommand] = [self._fail(sequence, "internal", detail, now)]
        for other in list(self._sequences.values()):
            is_sample = other.request is sequence.request and other.new.prompt == sequence.new.prompt
            if is_sample and other.losses:
                if other.replica in self._replicas:
                    assert other.replica is not None
                    commands.append(Send(other.replica, Cancel(other.wire_id)))
                commands.append(self._fail(other, "internal", detail, now))
        return commands

    def _wait(self, sequence: OpenSequence) -> float:
        """Let a sequence wait; return the prefill seconds that it has left."""
        return self._waiting.add(sequence, self.fleet.serving_key(sequence.key))

    def _unassign(self, sequence: OpenSequence) -> None:
        if sequence.replica is None:
            return
        del self._by_wire_id[sequence.wire_id]
        if sequence.replica in self._replicas:
            self._replicas[sequence.replica].closes(sequence.wire_id)
        sequence.replica = None

    def _forget_withdrawn(self) -> None:
        self.models.forget_withdrawn(replica.card.model for replica in self._replicas.values())
        self._works.forget(self.models.names)

    def _forget(self, sequence: OpenSequence, now: float) -> None:
        if sequence.row != NOWHERE:
            self._waiting.remove(sequence, served=False)
            if not sequence.attempts:  # it was never served
                tokens, charged_at = sequence.new.prompt_length, sequence.arrived_at
                self._attained.take_back(sequence.owner, tokens, charged_at, now)
        self._unassign(sequence)
        self._sources.free(sequence)
        self._works.ended(sequence.request.model, now)
        del self._sequences[sequence.new.id]

    def _fail(
        self,
        sequence: OpenSequence,
        kind: FailureKind,
        detail: str,
        now: float,
        retry_after: int | None = None,
    ) -> Fail:
        self._forget(sequence, now)
        if kind in ("unavailable", "out_of_memory", "grammar_late"):
            retry_after = 1
        return Fail(sequence.new.id, kind, detail, retry_after)


def _identity(card: Announce) -> tuple[str, str, int]:
    return card.model, card.digest, card.epoch
