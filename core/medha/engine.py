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
* The ledgers are changed only when a step is launched (grows, admits) or a request has left the pipeline (releases),
  and each change rides on the next step, in the order that the ranks replay it. Every rank of every lane sees every
  step, so that all ledgers see all changes in one order; it computes only the steps that name its lane.
* A request that ends while a step with it is in flight waits in quarantine: its blocks are not reused before then.

The parts: `intake` says what a request is entitled to, `admission` gives KV, `candidates` is the table of prefills that
`policy` and `guarded` order, `lanes` knows what can take a step, and `packer` fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from medha import intake
from medha.admission import Admission
from medha.alike import Alike
from medha.blocks import BlockLedger
from medha.candidates import Candidates
from medha.config import ReplicaConfig
from medha.lanes import Lane, coupled
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
    Refused,
    Sample,
    StageFree,
    Step,
    StepEntry,
    StepProfile,
    Submit,
    decode_entry,
)
from medha.packer import Batch, DecodeTargets, Limits, Packed, PrefillCandidate, pack
from medha.pools import KvPools
from medha.predictor import Chunking, Predictor
from medha.profile import Profile
from medha.request import NOWHERE, Prompt, Request
from medha.slo import targets
from medha.urgency import Urgency

STATE_HASH_EVERY_STEPS = 32
MOST_ORDERS = 4
"""How often a step selects candidates anew because admissions have used up the room of others."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica tells routers of itself, and exports as gauges."""

    running: int
    waiting: int
    kv_tokens_free: int
    kv_blocks_held: int
    pending_prefill_seconds: float


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight, and whom it computes."""

    step: Step
    decodes: list[Request]
    prefills: list[tuple[Request, int]]  # with the tokens of its chunk


class ReplicaController:
    """Decides what one replica computes next."""

    def __init__(
        self, config: ReplicaConfig, profile: StepProfile | Profile | Predictor, epoch: int = 0
    ) -> None:
        """A controller that knows no request; after a lost rank, a new one with the next `epoch` takes its place."""
        self.config = config
        self.epoch = epoch
        self.predictor = profile if isinstance(profile, Predictor) else _predictor(config, profile)
        self.last_packed = Packed()
        self._admission = Admission(config)
        self._pools = self._admission.pools
        self._candidates = Candidates(by_due=config.scheduling.policy == "guarded")
        self._alike = Alike()
        self._urgency = Urgency(config.scheduling, config.topology.kv)
        self._limits = _limits(config)
        self._lanes = [Lane(index, config.topology.stream) for index in range(config.topology.kv)]
        self._coupled = coupled(len(self._lanes), ())
        self._waiting: dict[str, Request] = {}
        self._running: dict[str, Request] = {}  # holds KV; in the order of admission
        self._spread: dict[str, Request] = {}  # of those, the ones on several lanes that have not ended
        self._prompts: dict[str, Prompt] = {}
        self._in_flight: dict[int, _Launched] = {}
        self._forgets: dict[str, None] = {}  # prompts whose ids ranks need no more; rides on the next step
        self._draining = False
        self._next_step_id = 0
        self._arrivals = 0

    # --- what others may read -----------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is still to be told to the ranks."""
        return not (self._waiting or self._running or self._in_flight or self._has_news)

    @property
    def _has_news(self) -> bool:
        """Ranks are still to be told of something that has ended, or can be shared."""
        return bool(self._forgets) or any(self._pools.has_news(lane.index) for lane in self._lanes)

    @property
    def pools(self) -> KvPools:
        """The KV of all lanes."""
        return self._pools

    @property
    def ledger(self) -> BlockLedger:
        """Of lane 0."""
        return self._pools.ledger(0)

    def knows_prompt(self, prompt: str) -> bool:
        """Whether a request here names this prompt."""
        return prompt in self._prompts

    def requests(self) -> Iterable[Request]:
        """Every request known here, waiting ones first."""
        return [*self._waiting.values(), *self._running.values()]

    def find(self, request_id: str) -> Request | None:
        """The request of this id, if it is here."""
        return self._waiting.get(request_id) or self._running.get(request_id)

    def load(self) -> Load:
        return Load(
            running=len(self._running) - sum(lane.quarantined for lane in self._lanes),
            waiting=len(self._waiting),
            kv_tokens_free=self._pools.free_tokens,
            kv_blocks_held=self._pools.held_blocks,
            pending_prefill_seconds=self._candidates.total_remaining_seconds() * self.predictor.correction,
        )

    def slack_seconds(self, request: Request, now: float) -> float:
        """Deadline - now - remaining work, of a request that has not finished its prefill."""
        return request.deadline - now - self._remaining_seconds(request)

    def relative_slack(self, request: Request, now: float) -> float:
        """rho of a request that has not finished its prefill."""
        return self.slack_seconds(request, now) / max(request.work_seconds, 1e-6)

    def _remaining_seconds(self, request: Request) -> float:
        return self._candidates.remaining_seconds(request) * self.predictor.correction

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
                self._stage_free(event)
            case Done():
                commands += self._done(event)
            case Drain():
                self._draining = True
        for lanes in self._coupled:
            # A launch may couple lanes that come later; they move together from the next event on.
            if lanes in self._coupled and all(self._lanes[lane].takes_step for lane in lanes):
                commands += self._launch(lanes, now)
        return commands

    def _launch(self, lanes: tuple[int, ...], now: float) -> list[ControllerCommand]:
        """Launch a step on `lanes` if there is something to compute or to tell the ranks."""
        grows, exhausted = self._grow(lanes)
        admits = self._admit_late(now)
        entries, decodes, prefills = self._fill(lanes, admits, now)
        ends: list[ControllerCommand] = [
            Emit(id=request.id, tokens=(), finish_reason="length") for request in exhausted
        ]
        if not (entries or admits or grows or self._has_news):
            for request in exhausted:
                self._end(request)
            return ends + self._launch(lanes, now) if exhausted else []
        step = self._new_step(lanes, entries, grows, admits)
        self._in_flight[step.step_id] = _Launched(step, decodes, prefills)
        for lane in lanes:
            self._lanes[lane].launched(step.step_id, step.predicted_seconds)
        for (
            request
        ) in exhausted:  # not before: ranks apply releases first, so that theirs ride on a later step
            self._end(request)
        return [*ends, step]

    def _new_step(
        self, lanes: tuple[int, ...], entries: list[StepEntry], grows: list[Grow], admits: list[Admit]
    ) -> Step:
        """The next step, with all that ranks are still to be told."""
        hashes: tuple[int, ...] = ()
        everywhere = range(len(self._lanes))
        if self._next_step_id % STATE_HASH_EVERY_STEPS == 0:
            hashes = tuple(self._pools.state_hash(lane) for lane in everywhere)
        step = Step(
            step_id=self._next_step_id,
            epoch=self.epoch,
            entries=tuple(entries),
            releases=self._pools.take_releases(everywhere),
            forgets=tuple(self._forgets),
            grows=tuple(grows),
            admits=tuple(admits),
            predicted_seconds=self.last_packed.predicted_seconds if entries else 0.0,
            state_hash=hashes[0] if len(hashes) == 1 else None,
            publishes=self._pools.take_publishes(everywhere),
            lanes=lanes,
            state_hashes=hashes if len(hashes) > 1 else (),
        )
        self._next_step_id += 1
        self._forgets = {}
        return step

    def _grow(self, lanes: tuple[int, ...]) -> tuple[list[Grow], list[Request]]:
        """Let requests that have used up their KV grow on; name one for which none is left.

        The others that find none wait for the blocks of that one, or of those in quarantine.
        """
        grows: list[Grow] = []
        exhausted: list[Request] = []
        for lane in lanes:
            here = self._lanes[lane]
            soon_free = here.quarantined > 0
            starved, here.decodes.starved = here.decodes.starved, []
            for request in starved:
                grow = self._admission.grow(request)
                if grow is not None:
                    grows.append(grow)
                    self._after_map_change(request)
                    here.decodes.add(request)
                elif soon_free:
                    here.decodes.starved.append(request)
                else:
                    soon_free = True
                    exhausted.append(request)
        return grows, exhausted

    def _admit_late(self, now: float) -> list[Admit]:
        """Let the claimant in as soon as there is room for it, and find the next one."""
        admits: list[Admit] = []
        if not self._waiting or len(self._running) >= self.config.scheduling.max_running:
            return admits
        claimant = self._admission.claimant
        if claimant is None:
            room, correction = self._admission.free_room(), self.predictor.correction
            claimant = self._candidates.late_without_room(room, now, correction)
            if claimant is not None:
                self._admission.claim(claimant)
        elif not claimant.prompt.prefilling:
            self._admit(claimant, admits)
        return admits

    def _admit(self, request: Request, admits: list[Admit]) -> bool:
        """Give KV to a waiting request; False if there is none for it."""
        if len(self._running) >= self.config.scheduling.max_running:
            return False
        tokens = request.submit.tokens

        def remaining_seconds(cached_tokens: int) -> float:
            return self.predictor.prefill_seconds(cached_tokens, tokens)

        admit = self._admission.admit(request, self._pending_seconds(), remaining_seconds)
        if admit is None:
            return False
        admits.append(admit)
        del self._waiting[request.id]
        self._alike.remove(request)
        self._running[request.id] = request
        self._candidates.admitted(request)
        prompt = request.prompt
        del prompt.waiting[request.id]
        prompt.holders[request.id] = request
        self._share(prompt)
        self._after_map_change(request)
        if request.cached_tokens:
            self._progressed([request])
        return True

    def _pending_seconds(self) -> list[float]:
        """Prefill seconds ahead of a new request on each lane, steps in flight included."""
        if len(self._lanes) == 1:
            return [0.0]
        admitted = self._candidates.remaining_by_lane(len(self._lanes)) * self.predictor.correction
        return [
            seconds + sum(lane.in_flight_seconds.values())
            for lane, seconds in zip(self._lanes, admitted.tolist(), strict=True)
        ]

    def _after_map_change(self, request: Request) -> None:
        if request.is_spread:
            self._spread[request.id] = request
            self._couple()

    def _couple(self) -> None:
        self._coupled = coupled(len(self._lanes), self._spread.values())

    # --- requests come and go -----------------------------------------------------------------------

    def _submit(self, submit: Submit, now: float) -> list[ControllerCommand]:
        refused = self._refusal(submit)
        if refused is not None:
            return [Refused(submit.id, *refused)]
        config = self.config
        limit_tokens = intake.limit_tokens(config, submit)
        if submit.tokens >= limit_tokens:  # resumed with nothing left to draw
            return [Emit(id=submit.id, tokens=(), finish_reason="length")]
        prompt = self._prompts.setdefault(submit.prompt, Prompt(submit.prompt, submit.tokens))
        prompt.users += 1
        self._forgets.pop(submit.prompt, None)  # not yet told: the ranks still have it
        may_spread = intake.may_spread(config, submit)
        cached_tokens, _ = self._pools.expected(submit.tokens, submit.block_hashes, is_long=may_spread)
        seconds = uncorrected_seconds = self.predictor.uncorrected_prefill_seconds(0, submit.tokens)
        if cached_tokens:
            seconds = self.predictor.uncorrected_prefill_seconds(cached_tokens, submit.tokens)
        # Promised by the whole prompt, whatever is cached: a cache must not make a promise tighter.
        work_seconds = uncorrected_seconds * self.predictor.correction
        service_class = config.service_classes[intake.class_name(config, submit)]
        self._arrivals += 1
        request = Request(
            submit=submit,
            id=submit.id,
            prompt=prompt,
            tie=self._arrivals,
            arrival=now - submit.age_seconds,
            targets=targets(
                service_class, work_seconds, submit.deadline_after_seconds, submit.tpot_target_seconds
            ),
            work_seconds=work_seconds,
            is_long=submit.tokens - cached_tokens >= config.long_threshold_tokens,
            length=submit.tokens,
            limit_tokens=limit_tokens,
            reservation_tokens=intake.reservation_tokens(config, submit),
            may_spread=may_spread,
        )
        self._waiting[request.id] = request
        prompt.waiting[request.id] = request
        self._alike.add(request)
        self._candidates.add(request, seconds, self._admission.wanted_blocks(request))
        if prompt.users > 1:
            self._share(prompt, newcomer=request)
        return []

    def _refusal(self, submit: Submit) -> intake.Refusal | None:
        """Why a request is not taken, or None."""
        if self.find(submit.id) is not None:
            return "invalid", f"request {submit.id} is already here"
        prompt = self._prompts.get(submit.prompt)
        malformed = intake.malformed(submit, None if prompt is None else prompt.tokens)
        if malformed is not None:
            return "invalid", malformed
        if self._draining:
            return "draining", "the replica is stopping"
        unservable = intake.unservable(self.config, submit)
        if unservable is not None:
            return unservable
        if len(self._waiting) >= self.config.scheduling.max_waiting:
            return "capacity", f"{len(self._waiting)} requests already wait"
        return None

    def _cancel(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self._alike.remove(request)
            self._candidates.remove([request])
            self._admission.withdraw(request)
            self._leave_prompt(request)
        elif request_id in self._running:
            self._end(self._running[request_id])

    def _stop(self, request: Request) -> None:
        """No more steps for a running request; its KV waits in quarantine."""
        request.ended = True
        for lane in request.held_lanes:
            self._lanes[lane].quarantined += 1
        self._candidates.remove([request])
        if request.is_decoding:
            self._lanes[request.lane].decodes.end(request)
        if request.is_spread:
            del self._spread[request.id]
            self._couple()
        self._share(request.prompt)

    def _end(self, request: Request) -> None:
        """No more steps for it; its KV is free once no step in flight has it."""
        if not request.ended:
            self._stop(request)
        if request.steps_in_flight == 0:
            for lane in request.held_lanes:
                self._lanes[lane].quarantined -= 1
            del self._running[request.id]
            self._admission.release(request)
            self._leave_prompt(request)

    def _leave_prompt(self, request: Request) -> None:
        prompt = request.prompt
        prompt.users -= 1
        prompt.waiting.pop(request.id, None)
        prompt.holders.pop(request.id, None)
        if prompt.users == 0:
            del self._prompts[prompt.name]
            self._forgets[prompt.name] = None

    def _share(self, prompt: Prompt, newcomer: Request | None = None) -> None:
        """Let those that wait share a prefill of their prompt that is computed, and wait for one that runs.

        The latter may yet fail, and only what is computed can be shared.
        """
        if not prompt.waiting:
            return
        holders = [holder for holder in prompt.holders.values() if not holder.ended]
        sharing = next((holder for holder in holders if holder.computed >= prompt.tokens), None)
        prefilling = bool(holders) and sharing is None
        changed = (prompt.sharing, prompt.prefilling) != (sharing, prefilling)
        prompt.sharing, prompt.prefilling = sharing, prefilling
        for request in prompt.waiting.values() if changed else (newcomer,) if newcomer else ():
            there = prompt.tokens - 1 if sharing is not None else 0
            seconds = self.predictor.uncorrected_prefill_seconds(there, prompt.tokens)
            wanted = self._admission.wanted_blocks(request)
            self._candidates.wants(request, wanted, seconds, held=prefilling)

    # --- a step moves through the pipeline ----------------------------------------------------------

    def _stage_free(self, stage_free: StageFree) -> None:
        launched = self._in_flight.get(stage_free.step_id)
        if stage_free.stage == 0 and launched is not None:  # else its Done has come already, on another link
            for lane in launched.step.lanes:
                self._lanes[lane].left_stage_0(stage_free.step_id)

    def _done(self, done: Done) -> list[ControllerCommand]:
        launched = self._in_flight.pop(done.step_id)
        for lane in launched.step.lanes:
            self._lanes[lane].done(done.step_id)
        if launched.step.entries:
            self.predictor.observe(launched.step.predicted_seconds, done.compute_seconds)
        commands: list[ControllerCommand] = []
        for failure in done.failures:
            self._pools.forget_outputs(failure.id)
            commands += self._fail(failure)
        for request in launched.decodes:
            request.computed += 1
            request.steps_in_flight -= 1
        for request, count in launched.prefills:
            request.computed += count
            request.steps_in_flight -= 1
            if not request.ended:
                self._prefill_done(request)
        for sample in done.samples:
            commands += self._take_sample(sample)
        for request_id, hashes in done.block_hashes:
            self._pools.extend(request_id, hashes, self._running[request_id].length)
        for request in (*launched.decodes, *(request for request, _ in launched.prefills)):
            if request.ended:
                self._end(request)  # leaves quarantine if this was its last step
        return commands

    def _prefill_done(self, request: Request) -> None:
        """A chunk is computed: its whole blocks may be shared, and its whole prompt forked."""
        self._pools.computed(request.id, request.computed)
        if request.computed >= request.prompt.tokens:
            self._share(request.prompt)
            for other in self._alike.told_by(request):
                self._look_again(other)

    def _look_again(self, request: Request) -> None:
        """More of a waiting request's prompt is cached than when it came: it needs less KV and less time."""
        if request.prompt.sharing is None:
            tokens, hashes = request.submit.tokens, request.submit.block_hashes
            cached_tokens, _ = self._pools.expected(tokens, hashes, is_long=request.may_spread)
            seconds = self.predictor.uncorrected_prefill_seconds(cached_tokens, tokens)
            wanted = self._admission.wanted_blocks(request)
            self._candidates.wants(request, wanted, seconds, held=request.prompt.prefilling)

    def _take_sample(self, sample: Sample) -> list[ControllerCommand]:
        request = self._running[sample.id]
        if request.ended:
            return []  # cancelled while the step ran
        request.length += 1
        finish_reason = sample.finish_reason
        if finish_reason is None and request.length >= request.limit_tokens:
            finish_reason = "length"
        is_first = request.emitted == 0
        if finish_reason is not None:
            self._stop(request)
        else:
            decodes = self._lanes[request.lane].decodes
            if is_first:
                decodes.begin(request)
            decodes.add(request)
        request.emitted += 1
        return [
            Emit(
                id=sample.id,
                tokens=(sample.token,),
                finish_reason=finish_reason,
                logprobs=() if sample.logprob is None else (sample.logprob,),
                cached_tokens=request.cached_tokens if is_first else 0,
            )
        ]

    def _fail(self, failure: EntryFailed) -> list[ControllerCommand]:
        request = self._running[failure.id]
        if request.ended:
            return []
        self._stop(request)
        return [Failed(id=failure.id, reason=failure.reason, detail=failure.detail)]

    # --- what goes into a step ----------------------------------------------------------------------

    def _fill(
        self, lanes: tuple[int, ...], admits: list[Admit], now: float
    ) -> tuple[list[StepEntry], list[Request], list[tuple[Request, int]]]:
        """Entries of the next step, and whom they compute: all runnable decodes, then prefill chunks."""
        batch = Batch(self.predictor, lanes)
        for lane in lanes:
            self._lanes[lane].decodes.put_into(batch, lane, lanes)

        def admit(prefill: PrefillCandidate) -> bool:
            request = self._waiting.get(prefill.id)
            if request is None or not self._admit(request, admits):
                return False  # others have taken its place since it was looked at
            prefill.lane, prefill.context = request.lane, request.dispatched
            prefill.is_long = request.dispatched >= self.config.long_threshold_tokens
            prefill.remaining = min(request.length, request.joins_at) - request.dispatched
            return request.runs_on(lanes)  # else what is cached couples more of them

        packed = pack(batch, self._tpot_targets(lanes), self._prefills(lanes, now), self._limits, admit)
        self.last_packed = packed
        decodes = [request for lane in lanes for request in self._lanes[lane].decodes.take(lanes)]
        prefills = [(self._running[id_], count) for id_, count in packed.chunks.items()]
        entries = _decode_entries(decodes)
        entries += [_entry(request, count) for request, count in prefills]
        if prefills:
            self._dispatch(prefills)
        if self._spread:
            self._couple()
        return entries, decodes, prefills

    def _dispatch(self, prefills: list[tuple[Request, int]]) -> None:
        """Chunks have gone into a step: bring requests and table up to date."""
        table = self._candidates
        for request, count in prefills:
            request.dispatch(count)
        table.remove(request for request, _ in prefills if request.dispatched == request.length)
        self._progressed(request for request, _ in prefills if request.row != NOWHERE)

    def _progressed(self, requests: Iterable[Request]) -> None:
        """Positions of unfinished prefills are dispatched, or were cached."""
        for request in requests:
            seconds = self.predictor.uncorrected_prefill_seconds(request.dispatched, request.submit.tokens)
            self._candidates.progressed(request, seconds)

    def _tpot_targets(self, lanes: tuple[int, ...]) -> DecodeTargets | None:
        """The tightest of all decodes on `lanes`."""
        found = [target for lane in lanes if (target := self._lanes[lane].decodes.targets) is not None]
        if len(found) < 2:
            return found[0] if found else None
        return DecodeTargets(
            min(target.tpot_seconds for target in found), min(target.fair_tpot_seconds for target in found)
        )

    def _prefills(self, lanes: tuple[int, ...], now: float) -> Iterator[PrefillCandidate]:
        """Prefills that a step on `lanes` may take, most urgent first: running ones, and those that find KV.

        Whom the first admissions leave no room is not asked one by one: the rest is ordered anew without them.
        """
        table = self._candidates
        if not len(table):
            return
        ordered = self._urgency.look_at(table, self.predictor.correction, now)
        seen = np.zeros(len(table), dtype=np.bool_)
        running = table.running(lanes)
        for turn in range(MOST_ORDERS):
            eligible = running & ~seen
            if turn < MOST_ORDERS - 1 and len(self._running) < self.config.scheduling.max_running:
                eligible |= table.admissible(self._admission.room(lanes)) & ~seen
            if not eligible.any():
                return
            for row in ordered(eligible):
                request = table.requests[row]
                seen[row] = True
                if request.is_spread and not request.runs_on(lanes):
                    continue  # admitted with this step, and what is cached of it couples more lanes
                lane = self._lane_for(request, lanes) if request.waits else request.lane
                if lane is None:
                    break
                yield self._candidate(request, lane, now)
            else:
                return

    def _lane_for(self, request: Request, lanes: Sequence[int]) -> int | None:
        """Which of `lanes` has KV for a waiting request now."""
        if len(self._running) >= self.config.scheduling.max_running or request.prompt.prefilling:
            return None
        return self._admission.lane_for(request, lanes, self._pending_seconds())

    def _candidate(self, request: Request, lane: int, now: float) -> PrefillCandidate:
        """A request as the packer sees it; `lane` computes it, or would."""
        dispatched = request.dispatched
        if request.waits and request.prompt.sharing is not None:
            dispatched = request.submit.tokens - 1
        is_long = dispatched >= self.config.long_threshold_tokens
        return PrefillCandidate(
            id=request.id,
            context=dispatched,
            remaining=min(request.length, request.joins_at) - dispatched,
            is_long=is_long,
            relative_slack=self.relative_slack(request, now) if is_long else 0.0,
            lane=lane,
            lane_tokens=request.lane_tokens if len(request.lanes) > 1 else {},
            waits=request.waits,
        )


def _limits(config: ReplicaConfig) -> Limits:
    scheduling = config.scheduling
    return Limits(
        stages=config.topology.stream,
        max_chunk_tokens=scheduling.max_chunk_tokens,
        min_chunk_tokens=scheduling.min_chunk_tokens,
        max_step_seconds=scheduling.max_step_seconds,
        min_prefill_share=scheduling.min_prefill_share,
        space_sharing_cap=scheduling.space_sharing_cap,
    )


def _decode_entries(decodes: Iterable[Request]) -> list[StepEntry]:
    """Entries of the decodes of a step, which count as dispatched from here on."""
    entries: list[StepEntry] = []
    for request in decodes:
        if request.is_spread:
            entries.append(_entry(request, 1))
            request.dispatch(1)
        else:  # the same in a third of the time
            entries.append(decode_entry(request.id, request.lane, request.dispatched))
            request.dispatched += 1
            request.steps_in_flight += 1
    return entries


def _entry(request: Request, count: int) -> StepEntry:
    """The next `count` positions of a request, before they count as dispatched."""
    extents = (Extent(request.dispatched, count),)
    samples = request.dispatched + count == request.length
    if len(request.lanes) == 1:
        return StepEntry(request.id, request.lane, extents, samples)
    assert request.shard_map is not None
    return StepEntry(request.id, request.lane, extents, samples, "owner", request.shard_map.version)


def _predictor(config: ReplicaConfig, profile: StepProfile | Profile) -> Predictor:
    stages, scheduling = config.topology.stream, config.scheduling
    chunking = Chunking(
        max_tokens=scheduling.max_chunk_tokens,
        min_tokens=min(scheduling.min_chunk_tokens, scheduling.max_chunk_tokens),
        budget_seconds=scheduling.max_step_seconds / stages,
    )
    return Predictor(profile, config.topology, chunking, config.tokens_per_lane)
