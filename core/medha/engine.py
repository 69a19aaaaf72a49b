"""The replica controller: `handle(event, now) -> commands`.

The controller is a state machine over messages. It owns no socket, no thread and no clock: the worker drives
it in real time, the simulator under a virtual clock, and a recorded list of (time, event) fed to a fresh
controller gives the same commands again.

How a request moves::

    Submit -> waiting -> admitted: holds KV, prefills, decodes -> ended -> released
                  \\                                            /
                   `---------------- Cancel -----------------'

* `StageFree` and `Done` are two events. A step leaves stage 0 long before it leaves the last stage, and the next
  chunk of the same prompt may enter as soon as stage 0 is free; so `dispatched` moves when a step is launched and
  `computed` when it is done.
* The ledger is changed only when a step is launched (grows, admits) or a request has left the pipeline (releases),
  and each change rides on the next step, in the order that the ranks replay it.
* A request that ends while a step with it is in flight waits in quarantine: its blocks are not reused before then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import isfinite

from medha.blocks import BlockLedger
from medha.config import ReplicaConfig
from medha.messages import (
    Admit,
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Drain,
    Emit,
    EntryFailed,
    Extent,
    Failed,
    Grow,
    RefusalReason,
    Refused,
    Sample,
    StageFree,
    Step,
    StepEntry,
    StepProfile,
    Submit,
)
from medha.packer import DecodeCandidate, Limits, Packed, PrefillCandidate, pack
from medha.policy import policy_key
from medha.predictor import Predictor
from medha.request import Request
from medha.slo import targets

STATE_HASH_EVERY_STEPS = 32
GROWTH_TOKENS = 1024
"""How far an unreserved request's KV grows at a time: large enough to stay in long runs of blocks."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica tells routers of itself, and exports as gauges."""

    running: int
    waiting: int
    kv_tokens_free: int
    kv_blocks_held: int
    pending_prefill_seconds: float


@dataclass(slots=True)
class _Bookkeeping:
    """Changes of ranks' state that ride on the next step."""

    releases: list[str] = field(default_factory=list)
    forgets: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.releases or self.forgets)


class ReplicaController:
    """Decides what one replica computes next."""

    def __init__(self, config: ReplicaConfig, profile: StepProfile, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.predictor = Predictor(profile)
        self.ledger = BlockLedger(config.kv_blocks, config.block_size_tokens)
        self.last_packed = Packed()
        self._key = policy_key(config.scheduling.policy, config.scheduling.lars_denominator)
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # holds KV; in the order of admission
        self._prompt_users: dict[str, int] = {}
        self._in_flight: dict[int, Step] = {}
        self._stage_free = True
        self._draining = False
        self._next_step_id = 0
        self._bookkeeping = _Bookkeeping()

    # --- what others may read -----------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is still to be told to the ranks."""
        return not (self._waiting or self._running or self._in_flight or self._bookkeeping)

    def knows_prompt(self, prompt: str) -> bool:
        """Whether a request here names this prompt."""
        return prompt in self._prompt_users

    def requests(self) -> Iterable[Request]:
        """Every request known here, waiting ones first."""
        return [*self._waiting.values(), *self._running.values()]

    def load(self) -> Load:
        alive = [request for request in self._running.values() if not request.ended]
        pending = [*self._waiting.values(), *(request for request in alive if not request.is_decoding)]
        return Load(
            running=len(alive),
            waiting=len(self._waiting),
            kv_tokens_free=self.ledger.free_tokens,
            kv_blocks_held=self.ledger.held_blocks,
            pending_prefill_seconds=sum(self._remaining_seconds(request) for request in pending),
        )

    def relative_slack(self, request: Request, now: float) -> float:
        """rho of a request that has not finished its prefill."""
        return request.prefill_state(self._remaining_seconds(request)).relative_slack(now)

    def slack_seconds(self, request: Request, now: float) -> float:
        """Deadline - now - remaining work, of a request that has not finished its prefill."""
        return request.prefill_state(self._remaining_seconds(request)).slack(now)

    # --- the one entry ------------------------------------------------------------------------------

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Take one event at `now` (seconds, any monotonic origin); return what is to be done, in order."""
        commands: list[ControllerCommand] = []
        match event:
            case Submit():
                commands += self._submit(event, now)
            case Cancel():
                self._cancel(event.id)
            case StageFree():
                # Done may overtake it on another link: only the newest step says that stage 0 is free.
                if event.stage == 0 and event.step_id == self._next_step_id - 1:
                    self._stage_free = True
            case Done():
                commands += self._done(event)
            case Drain():
                self._draining = True
        return commands + self._launch(now)

    # --- requests come and go -----------------------------------------------------------------------

    def _submit(self, submit: Submit, now: float) -> list[ControllerCommand]:
        refusal = self._refusal(submit)
        if refusal is not None:
            return [refusal]
        service_class = self.config.service_classes[self._class_name(submit)]
        work_seconds = self._prefill_seconds(0, submit.tokens)
        request = Request(
            submit=submit,
            arrival=now - submit.age_seconds,
            targets=targets(
                service_class, work_seconds, submit.deadline_after_seconds, submit.tpot_target_seconds
            ),
            work_seconds=work_seconds,
            is_long=submit.tokens >= self.config.long_threshold_tokens,
            length=submit.tokens,
            limit_tokens=self._limit_tokens(submit),
        )
        if request.length >= request.limit_tokens:  # resumed with nothing left to draw
            return [Emit(id=submit.id, tokens=(), finish_reason="length")]
        self._waiting[submit.id] = request
        if submit.prompt in self._bookkeeping.forgets:  # not yet told: the ranks still have it
            self._bookkeeping.forgets.remove(submit.prompt)
        self._prompt_users[submit.prompt] = self._prompt_users.get(submit.prompt, 0) + 1
        return []

    def _refusal(self, submit: Submit) -> Refused | None:
        """Why a request is not taken, or None."""

        def refused(reason: RefusalReason, detail: str) -> Refused:
            return Refused(id=submit.id, reason=reason, detail=detail)

        config = self.config
        if submit.id in self._waiting or submit.id in self._running:
            return refused("invalid", f"request {submit.id} is already here")
        if not 1 <= submit.prompt_length <= submit.tokens:
            return refused("invalid", f"prompt_length {submit.prompt_length} of {submit.tokens} tokens")
        seconds = (submit.age_seconds, submit.deadline_after_seconds or 0, submit.tpot_target_seconds or 0)
        if not all(map(isfinite, seconds)):
            return refused("invalid", f"age, deadline and TPOT target must be finite: {seconds} seconds")
        known_tokens = self._prompt_tokens(submit.prompt)
        if known_tokens not in (None, submit.tokens):
            return refused(
                "invalid", f"prompt {submit.prompt} has {known_tokens} tokens, not {submit.tokens}"
            )
        if self._draining:
            return refused("draining", "the replica is stopping")
        if self._class_name(submit) not in config.service_classes:
            return refused(
                "unknown_class", f"service class {submit.service_class!r} is not one of the replica's"
            )
        if submit.prompt_length >= config.max_model_len:
            return refused("too_long", f"{submit.tokens} tokens; maxModelLen is {config.max_model_len}")
        if self._reservation_tokens(submit) > config.kv_tokens:
            return refused("too_long", f"{submit.tokens} tokens; the KV pool holds {config.kv_tokens}")
        if len(self._waiting) >= config.scheduling.max_waiting:
            return refused("capacity", f"{len(self._waiting)} requests already wait")
        return None

    def _prompt_tokens(self, prompt: str) -> int | None:
        """Token ids of a prompt that some request here names."""
        if prompt not in self._prompt_users:
            return None
        return next(request.submit.tokens for request in self.requests() if request.submit.prompt == prompt)

    def _class_name(self, submit: Submit) -> str:
        return self.config.default_class if submit.service_class == "default" else submit.service_class

    def _limit_tokens(self, submit: Submit) -> int:
        asked = submit.sampling.max_tokens
        limit = self.config.max_model_len
        return limit if asked is None else min(limit, submit.prompt_length + asked)

    def _reservation_tokens(self, submit: Submit) -> int:
        """Tokens of KV that a request is promised (DESIGN §5): its whole output, or its class's usual output.

        Nothing is reserved for the last token drawn: its KV is never computed.
        """
        limit = self._limit_tokens(submit)
        if submit.sampling.max_tokens is None:
            usual = self.config.service_classes[self._class_name(submit)].default_output_tokens
            limit = min(limit, submit.tokens + usual, max(self.config.kv_tokens, submit.tokens + 1))
        return max(limit - 1, submit.tokens)

    def _cancel(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._drop_prompt(self._waiting.pop(request_id))
        elif request_id in self._running:
            self._end(self._running[request_id])

    def _end(self, request: Request) -> None:
        """No more steps for it; its KV is free once no step in flight has it."""
        request.ended = True
        if request.steps_in_flight == 0:
            del self._running[request.id]
            self.ledger.release(request.id)
            self._bookkeeping.releases.append(request.id)
            self._drop_prompt(request)

    def _drop_prompt(self, request: Request) -> None:
        prompt = request.submit.prompt
        self._prompt_users[prompt] -= 1
        if self._prompt_users[prompt] == 0:
            del self._prompt_users[prompt]
            self._bookkeeping.forgets.append(prompt)

    # --- a step has left the pipeline ---------------------------------------------------------------

    def _done(self, done: Done) -> list[ControllerCommand]:
        step = self._in_flight.pop(done.step_id)
        if not self._in_flight:
            self._stage_free = True  # a step that is done has left every stage
        if step.entries:
            self.predictor.observe(step.predicted_seconds, done.compute_seconds)
        for entry in step.entries:
            request = self._running[entry.id]
            request.steps_in_flight -= 1
            request.computed += entry.token_count
        commands: list[ControllerCommand] = []
        for failure in done.failures:
            commands += self._fail(failure)
        for sample in done.samples:
            commands += self._take_sample(sample)
        for entry in step.entries:
            request_or_none = self._running.get(entry.id)
            if request_or_none is not None and request_or_none.ended:
                self._end(request_or_none)  # leaves quarantine if this was its last step
        return commands

    def _take_sample(self, sample: Sample) -> list[ControllerCommand]:
        request = self._running[sample.id]
        if request.ended:
            return []  # cancelled while the step ran
        request.length += 1
        request.emitted += 1
        finish_reason = sample.finish_reason
        if finish_reason is None and request.length >= request.limit_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            request.ended = True
        return [
            Emit(
                id=sample.id,
                tokens=(sample.token,),
                finish_reason=finish_reason,
                logprobs=() if sample.logprob is None else (sample.logprob,),
            )
        ]

    def _fail(self, failure: EntryFailed) -> list[ControllerCommand]:
        request = self._running[failure.id]
        if request.ended:
            return []
        request.ended = True
        return [Failed(id=failure.id, reason=failure.reason, detail=failure.detail)]

    # --- the next step ------------------------------------------------------------------------------

    def _launch(self, now: float) -> list[ControllerCommand]:
        """Launch a step if stage 0 is free and there is something to compute or to tell the ranks."""
        if not self._stage_free or len(self._in_flight) >= self.config.topology.stream:
            return []
        grows, exhausted = self._grow()
        admits = self._admit(now)
        entries = self._pack(now)
        ends: list[ControllerCommand] = [
            Emit(id=request.id, tokens=(), finish_reason="length") for request in exhausted
        ]
        if not (entries or admits or grows or self._bookkeeping):
            if not exhausted:
                return []
            self._end_all(exhausted)
            return ends + self._launch(now)
        step_id = self._next_step_id
        step = Step(
            step_id=step_id,
            epoch=self.epoch,
            entries=tuple(entries),
            releases=tuple(self._bookkeeping.releases),
            forgets=tuple(self._bookkeeping.forgets),
            grows=tuple(grows),
            admits=tuple(admits),
            predicted_seconds=self.last_packed.predicted_seconds if entries else 0.0,
            state_hash=self.ledger.state_hash() if step_id % STATE_HASH_EVERY_STEPS == 0 else None,
        )
        self._next_step_id += 1
        self._in_flight[step_id] = step
        self._stage_free = False
        self._bookkeeping = _Bookkeeping()
        for entry in entries:
            request = self._running[entry.id]
            request.dispatched += entry.token_count
            request.steps_in_flight += 1
        self._end_all(exhausted)
        return [*ends, step]

    def _grow(self) -> tuple[list[Grow], list[Request]]:
        """Let requests that reserved no output of their own grow on; name one for which no KV is left.

        The others that find none wait for the blocks of that one, or of those in quarantine. Its blocks are
        released only after this step is built: ranks apply releases before grows and admits, so a release in
        between would give the ledgers different tables.
        """
        grows: list[Grow] = []
        exhausted: list[Request] = []
        soon_free = any(request.ended for request in self._running.values())
        for request in self._running.values():
            if request.runnable_tokens == 0 or request.length <= self.ledger.reserved_tokens(request.id):
                continue
            for wanted in (min(request.length + GROWTH_TOKENS, request.limit_tokens), request.length):
                if self.ledger.grow(request.id, wanted):
                    grows.append(Grow(id=request.id, reserved_tokens=wanted))
                    break
            else:
                if not soon_free:
                    request.ended = soon_free = True
                    exhausted.append(request)
        return grows, exhausted

    def _end_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._end(request)

    def _admit(self, now: float) -> list[Admit]:
        """Give KV to waiting requests, most urgent first.

        A request that finds no room is overtaken by those that do, until it is late: then nobody is admitted
        before it, so that a stream of small requests cannot starve a large one.
        """
        admits: list[Admit] = []
        for request in self._by_urgency(self._waiting.values(), now):
            if len(self._running) >= self.config.scheduling.max_running:
                break
            sibling = self._sibling(request)
            if sibling is not None and sibling.computed < sibling.submit.tokens:
                continue  # the same prompt is being prefilled, which may yet fail: wait and share it
            admit = self._fork(request, sibling) if sibling is not None else self._reserve(request)
            if admit is None:
                if self.slack_seconds(request, now) < 0 and not self._is_held_back(request):
                    break
                continue
            del self._waiting[request.id]
            self._running[request.id] = request
            admits.append(admit)
        return admits

    def _sibling(self, request: Request) -> Request | None:
        """A running request of the same prompt, whose KV can be shared."""
        if self._prompt_users[request.submit.prompt] < 2:
            return None
        for other in self._running.values():
            if other.submit.prompt == request.submit.prompt and not other.ended:
                return other
        return None

    def _reserve(self, request: Request) -> Admit | None:
        if self._is_held_back(request):
            return None
        reserved = self._reservation_tokens(request.submit)
        if not self.ledger.reserve(request.id, reserved):
            return None
        return self._admit_message(request, reserved)

    def _fork(self, request: Request, sibling: Request) -> Admit | None:
        """Share the sibling's prompt; its last token is computed again, to draw from it."""
        shared = request.submit.tokens - 1
        reserved = self._reservation_tokens(request.submit)
        if self.ledger.fork(sibling.id, request.id, shared, reserved) is None:
            return None
        request.dispatched = request.computed = shared
        return replace(self._admit_message(request, reserved), fork_of=sibling.id, shared_tokens=shared)

    def _is_held_back(self, request: Request) -> bool:
        """Longs are capped in number and in their share of the KV pool, so that shorts find room.

        The first long always passes, however large: otherwise a stream of shorts could keep it out for ever.
        """
        if not request.is_long:
            return False
        longs = [other for other in self._running.values() if other.is_long]
        if not longs:
            return False
        scheduling = self.config.scheduling
        if len(longs) >= scheduling.max_running_long:
            return True
        held = sum(self.ledger.reserved_tokens(other.id) for other in longs)
        wanted = held + self._reservation_tokens(request.submit)
        return wanted > (1 - scheduling.short_headroom) * self.config.kv_tokens

    def _admit_message(self, request: Request, reserved_tokens: int) -> Admit:
        submit = request.submit
        return Admit(
            id=submit.id,
            prompt=submit.prompt,
            tokens=submit.tokens,
            prompt_length=submit.prompt_length,
            seed=submit.seed,
            sample_index=submit.sample_index,
            sampling=submit.sampling,
            reserved_tokens=reserved_tokens,
        )

    def _pack(self, now: float) -> list[StepEntry]:
        """Entries of the next step: all runnable decodes, then prefill chunks in the order of the policy."""
        runnable = [request for request in self._running.values() if self._is_runnable(request)]
        decodes = [
            DecodeCandidate(request.id, request.dispatched, request.targets.tpot_seconds)
            for request in runnable
            if request.is_decoding
        ]
        prefills = [
            PrefillCandidate(
                id=request.id,
                context=request.dispatched,
                remaining=request.runnable_tokens,
                is_long=request.dispatched >= self.config.long_threshold_tokens,
                relative_slack=self.relative_slack(request, now),
            )
            for request in self._by_urgency((request for request in runnable if not request.is_decoding), now)
        ]
        if not decodes and not prefills:
            return []
        self.last_packed = pack(decodes, prefills, self._limits(), self.predictor)
        return [self._entry(self._running[id_], count) for id_, count in self.last_packed.tokens.items()]

    def _is_runnable(self, request: Request) -> bool:
        """It has positions to compute, and KV for them."""
        return request.runnable_tokens > 0 and request.length <= self.ledger.reserved_tokens(request.id)

    def _entry(self, request: Request, count: int) -> StepEntry:
        return StepEntry(
            id=request.id,
            lane=0,
            extents=(Extent(start=request.dispatched, count=count),),
            samples=request.dispatched + count == request.length,
        )

    def _limits(self) -> Limits:
        scheduling = self.config.scheduling
        return Limits(
            stages=self.config.topology.stream,
            max_chunk_tokens=scheduling.max_chunk_tokens,
            min_chunk_tokens=scheduling.min_chunk_tokens,
            max_step_seconds=scheduling.max_step_seconds,
            min_prefill_share=scheduling.min_prefill_share,
            space_sharing_cap=scheduling.space_sharing_cap,
        )

    # --- urgency ------------------------------------------------------------------------------------

    def _by_urgency(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Requests in the order of the policy; ties by arrival, then by id, so that the order is total."""

        def key(request: Request) -> tuple[float, float, str]:
            state = request.prefill_state(self._remaining_seconds(request))
            return (self._key(state, now), request.arrival, request.id)

        return sorted(requests, key=key)

    def _remaining_seconds(self, request: Request) -> float:
        return self._prefill_seconds(request.dispatched, request.submit.tokens)

    def _prefill_seconds(self, context: int, tokens: int) -> float:
        return self.predictor.prefill_seconds(context, tokens, self.config.scheduling.max_chunk_tokens)
