"""The replica controller: `handle(event, now) -> commands`.

The controller is a state machine over messages. It owns no socket, no thread and no clock: the worker drives
it in real time, the simulator under a virtual clock, and a recorded list of (time, event) fed to a fresh
controller gives the same commands again.

The life of a request::

    Submit -> waiting -> admitted: holds KV, prefills, decodes -> ended -> released
                  \\                                            /
                   `---------------- Cancel -----------------'

* `StageFree` and `Done` are two events. A step leaves stage 0 long before it leaves the last stage, and the
  next chunk of the same prompt may enter as soon as stage 0 is free. So `dispatched` moves when a step is
  launched and `computed` when it is done.
* The ledgers change only when a step is launched (grows, admits) or a request has left the pipeline
  (releases). Each change is sent with the next step, in the order in which the ranks replay it. Every rank of
  every lane receives every step, so all ledgers see all changes in one order. A rank computes only the steps
  that name its lane.
* A request that ends while a step with it is in flight waits in quarantine: its blocks are reused only after
  that step.
* With one stage, ranks would wait for the controller between two steps. If no prefill could take part in the
  next step, decodes *run ahead*: that step is launched before the tokens that it starts from are sampled.
  Anything that a sequence computes beyond its stop token is dropped.

The parts: `validation` checks a request and derives its limits. `request_table` keeps the requests, and
`sharing` what they may share. `lanes` tracks which lanes can take a step. `step_builder` fills the step: it
reads prefills in the order that `prefill_order` gives them, `admission` gives them KV, and `packer` sizes
their chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from medha.cost.cost_profile import Profile
from medha.cost.predictor import Chunking, Predictor
from medha.kv.blocks import BlockLedger
from medha.kv.pools import KvPools
from medha.scheduler import validation
from medha.scheduler.admission import Admission
from medha.scheduler.lanes import Lanes
from medha.scheduler.packer import Packed
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.request_table import RequestTable
from medha.scheduler.sharing import Sharing
from medha.scheduler.step_builder import BuiltStep, StepBuilder
from medha.slo import targets
from medha.wire.messages import (
    Admit,
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Drain,
    Emit,
    EntryFailed,
    Failed,
    Grow,
    Refused,
    Sample,
    StageFree,
    Step,
    StepProfile,
    Submit,
)

STATE_HASH_EVERY_STEPS = 31
"""Steps between state hashes. Odd, so that hashes seldom coincide with `guarded`'s far decisions (1 in 8)."""
SHORT_STEP = 0.025
"""Longest step behind which decodes run ahead at once, as a share of the strictest TTFT floor.

It bounds how long the step launched ahead keeps a new arrival waiting.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a replica announces to routers and exports as gauges."""

    running: int
    waiting: int
    kv_tokens_free: int
    kv_blocks_held: int
    pending_prefill_seconds: float


@dataclass(slots=True)
class _Launched:
    """A step in flight, and the requests that it computes."""

    step: Step
    built: BuiltStep


class ReplicaController:
    """Decides what one replica computes next."""

    def __init__(
        self, config: ReplicaConfig, profile: StepProfile | Profile | Predictor, epoch: int = 0
    ) -> None:
        """Start without requests. After a rank is lost, a new controller with the next `epoch` takes over."""
        self.config = config
        self.epoch = epoch
        self.predictor = profile if isinstance(profile, Predictor) else _predictor(config, profile)
        self._table = RequestTable(by_due=config.scheduling.policy == "guarded")
        self._admission = Admission(config, self._table)
        self._pools = self._admission.pools
        self._sharing = Sharing(self._table, self._admission, self.predictor, config.block_size_tokens)
        self._lanes = Lanes(config.topology.kv, config.topology.stream)
        self._step_builder = StepBuilder(
            config, self.predictor, self._table, self._admission, self._sharing, self._lanes
        )
        self._in_flight: dict[int, _Launched] = {}
        floors_seconds = [one.ttft_floor_seconds for one in config.service_classes.values()]
        self._short_seconds = SHORT_STEP * min(floors_seconds)
        self._draining = False
        self._arrivals = 0
        self._next_step_id = 0

    # --- read-only state ----------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def idle(self) -> bool:
        """True if no request waits or runs, no step is in flight, and nothing is to be sent to the ranks."""
        return self._table.is_empty and not (self._in_flight or self._has_changes)

    @property
    def _has_changes(self) -> bool:
        """True if ranks have yet to receive releases, cache insertions, or prompts to forget."""
        return bool(self._sharing.forgets) or self._pools.has_changes

    @property
    def pools(self) -> KvPools:
        """The KV of all lanes."""
        return self._pools

    @property
    def ledger(self) -> BlockLedger:
        """The ledger of lane 0."""
        return self._pools.ledger(0)

    def knows_prompt(self, prompt: str) -> bool:
        """Return whether a request here names this prompt."""
        return prompt in self._sharing.prompts

    def requests(self) -> Iterable[Request]:
        """Return every request known here, in the order of arrival."""
        return list(self._table)

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id, if it is here."""
        return self._table.find(request_id)

    @property
    def lanes(self) -> Lanes:
        """The lanes, read-only: only the controller changes them."""
        return self._lanes

    @property
    def steps_in_flight(self) -> list[Step]:
        """Steps that have not left the last stage, oldest first."""
        return [launched.step for launched in self._in_flight.values()]

    def packed(self, step: Step) -> Packed:
        """Return how a step in flight was filled."""
        return self._in_flight[step.step_id].built.packed

    def is_demoted(self, request: Request) -> bool:
        """Return whether the policy `guarded` has demoted a request whose prompt is not wholly dispatched."""
        return self._table.is_demoted(request)

    def due(self, request: Request) -> float:
        """Return when the first token of a request is due, on the clock of `now`.

        This is its deadline, or its revised deadline while it is demoted.
        """
        return self._table.due(request)

    def load(self) -> Load:
        return Load(
            running=self._table.active,
            waiting=self._table.waiting,
            kv_tokens_free=self._pools.free_tokens,
            kv_blocks_held=self._pools.held_blocks,
            pending_prefill_seconds=self._table.total_remaining_seconds() * self.predictor.correction,
        )

    def slack_seconds(self, request: Request, now: float) -> float:
        """Return deadline - now - remaining work of a request that has not finished its prefill."""
        remaining_seconds = self._table.remaining_seconds(request) * self.predictor.correction
        return request.deadline - now - remaining_seconds

    # --- entry point --------------------------------------------------------------------------------

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Process an event at `now` (seconds, any monotonic origin) and return the commands, in order."""
        commands: list[ControllerCommand] = []
        match event:
            case StageFree():
                self._stage_free(event)
            case Done():
                commands += self._done(event)
            case Submit():
                commands += self._submit(event, now)
            case Cancel():
                self._cancel(event.id)
            case Drain():
                self._draining = True
        for lanes in self._lanes.coupled:
            # A launch may couple lanes that come later here; they move together from the next event on.
            if lanes in self._lanes.coupled and self._lanes.can_start_step_on(lanes):
                commands += self._launch(lanes, now)
            if lanes in self._lanes.coupled and self._run_ahead(lanes):
                commands += self._launch(lanes, now)
        return commands

    def _run_ahead(self, lanes: tuple[int, ...]) -> bool:
        """Let the decodes of `lanes` run ahead if they can, and return whether any does.

        They can then be in a step that is launched while the step in flight still computes the tokens that
        they start from. None runs ahead:

        * if a prefill might take part in the new step: which one may depend on the requests that end, or
          become shareable, in the step in flight;
        * if the step in flight has a prefill: a request that gets its first token there would have to wait
          for the step after the new one;
        * if the step in flight is long and still in stage 0: a request that arrives now waits for both
          steps, so a long step must have only its sampling left;
        * while a decode lacks KV, or while a waiting request can take the place of one that ends.
        """
        if self._might_prefill or any(self._lanes[lane].decodes.starved for lane in lanes):
            return False
        step_id = self._lanes.lone_step(lanes)
        if step_id is None:
            return False
        launched = self._in_flight[step_id]
        step = launched.step
        if launched.built.prefills or step.lanes != lanes:
            return False
        if step.predicted_seconds > self._short_seconds and not self._lanes.are_free(lanes):
            return False
        continuing = [request for request in launched.built.decodes if request.continues]
        if len(continuing) < len(launched.built.decodes) and self._table.waiting:
            return False
        if not all(request.can_run_ahead for request in continuing):
            return False
        for request in continuing:
            request.length += 1
            request.runs_ahead = True
            self._lanes[request.lane].decodes.add(request)
        return bool(continuing)

    @property
    def _might_prefill(self) -> bool:
        """True if a prefill could take part in a step: one that holds KV or may get some."""
        waiting = self._table.waiting
        return len(self._table.rows) > waiting or (waiting > 0 and not self._admission.is_full)

    def _launch(self, lanes: tuple[int, ...], now: float) -> list[ControllerCommand]:
        """Launch a step on `lanes` if there is something to compute or to send to the ranks."""
        if not (self._table.rows or self._lanes.decode(lanes) or self._has_changes):
            self._step_builder.rested(lanes)
            return []
        grows, exhausted = self._grow(lanes)
        admits = self._admit_late(now)
        built = self._step_builder.build(lanes, admits, now)
        ends: list[ControllerCommand] = [
            Emit(id=request.id, tokens=(), finish_reason="length") for request in exhausted
        ]
        if not (built.entries or admits or grows or self._has_changes):
            for request in exhausted:
                self._end(request)
            return ends + self._launch(lanes, now) if exhausted else []
        step = self._new_step(lanes, built, grows, admits)
        self._in_flight[step.step_id] = _Launched(step, built)
        for lane in lanes:
            self._lanes[lane].launched(step.step_id, step.predicted_seconds)
        # Only now: ranks apply a step's releases first, so these must be sent with a later step.
        for request in exhausted:
            self._end(request)
        return [*ends, step]

    def _new_step(
        self, lanes: tuple[int, ...], built: BuiltStep, grows: list[Grow], admits: list[Admit]
    ) -> Step:
        """Build the next step, with all pending messages to the ranks."""
        hashes: tuple[int, ...] = ()
        if self._next_step_id % STATE_HASH_EVERY_STEPS == 0:
            hashes = self._pools.state_hashes()
        step = Step(
            step_id=self._next_step_id,
            epoch=self.epoch,
            entries=tuple(built.entries),
            releases=self._pools.take_releases(),
            forgets=tuple(self._sharing.forgets),
            grows=tuple(grows),
            admits=tuple(admits),
            predicted_seconds=built.packed.predicted_seconds if built.entries else 0.0,
            state_hash=hashes[0] if len(hashes) == 1 else None,
            publishes=self._pools.take_publishes(),
            lanes=lanes,
            state_hashes=hashes if len(hashes) > 1 else (),
        )
        self._next_step_id += 1
        self._sharing.forgets = {}
        return step

    def _grow(self, lanes: tuple[int, ...]) -> tuple[list[Grow], list[Request]]:
        """Grow the KV of requests that have used it up; return the grows, and requests that must end instead.

        At most one request per lane must end. The others without KV wait for its blocks, or for those of
        requests in quarantine.
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
                    self._lanes.remapped(request)
                    here.decodes.add(request)
                elif soon_free:
                    here.decodes.starved.append(request)
                else:
                    soon_free = True
                    exhausted.append(request)
        return grows, exhausted

    def _admit_late(self, now: float) -> list[Admit]:
        """Admit the claimant, which gets KV that becomes free, as soon as there is enough for it."""
        admits: list[Admit] = []
        if not self._table.waiting or self._admission.is_full:
            return admits
        claimant = self._admission.find_claimant(now, self.predictor.correction)
        if claimant is not None:
            if self._admission.needed_blocks(claimant) != self._table.needed_blocks(claimant):
                self._sharing.update(claimant)
            self._admission.update_claim()
            self._step_builder.admit(claimant, admits)
        return admits

    # --- arrivals, cancellations, ends --------------------------------------------------------------

    def _submit(self, submit: Submit, now: float) -> list[ControllerCommand]:
        refusal = self._refusal(submit)
        if refusal is not None:
            return [Refused(submit.id, *refusal)]
        if submit.tokens >= validation.limit_tokens(self.config, submit):  # resumed, nothing left to sample
            return [Emit(id=submit.id, tokens=(), finish_reason="length")]
        self._arrive(submit, now)
        return []

    def _refusal(self, submit: Submit) -> validation.Refusal | None:
        """Return why a request is refused, or None."""
        if self._table.find(submit.id) is not None:
            return "invalid", f"request {submit.id} is already here"
        prompt = self._sharing.prompts.get(submit.prompt)
        malformed = validation.malformed(submit, None if prompt is None else prompt.tokens)
        if malformed is not None:
            return "invalid", malformed
        unservable = validation.unservable(self.config, submit)
        if unservable is not None:
            return unservable
        if self._table.waiting >= self.config.scheduling.max_waiting:
            return "capacity", f"{self._table.waiting} requests already wait"
        return ("draining", "the replica is stopping") if self._draining else None

    def _arrive(self, submit: Submit, now: float) -> None:
        """Add an accepted request, which then waits for KV."""
        config, predictor = self.config, self.predictor
        may_spread = validation.may_spread(config, submit)
        cached_tokens, _ = self._pools.expected(submit.tokens, submit.block_hashes, is_long=may_spread)
        whole = left = predictor.uncorrected_prefill(0, submit.tokens)
        if cached_tokens:
            left = predictor.uncorrected_prefill(cached_tokens, submit.tokens)
        # The target follows from the whole prompt, whatever is cached: a cache must not tighten a deadline.
        work_seconds = whole.seconds * predictor.correction
        service_class = config.service_classes[validation.class_name(config, submit)]
        self._arrivals += 1
        request = Request(
            submit=submit,
            id=submit.id,
            prompt=self._sharing.prompt_of(submit.prompt, submit.tokens),
            tie=self._arrivals,
            arrival=now - submit.age_seconds,
            targets=targets(
                service_class, work_seconds, submit.deadline_after_seconds, submit.tpot_target_seconds
            ),
            is_long=submit.tokens - cached_tokens >= config.long_threshold_tokens,
            length=submit.tokens,
            limit_tokens=validation.limit_tokens(config, submit),
            reservation_tokens=validation.reservation_tokens(config, submit),
            may_spread=may_spread,
            cached_tokens=cached_tokens,
        )
        self._sharing.arrive(request, work_seconds, left)

    def _cancel(self, request_id: str) -> None:
        request = self._table.find(request_id)
        if request is None:
            return
        if request.waits:
            self._admission.withdraw(request)
            self._leave(request)
        else:
            self._end(request)

    def _stop(self, request: Request) -> None:
        """Give a running request no more steps; its KV waits in quarantine."""
        request.ended = True
        for lane in request.held_lanes:
            self._lanes[lane].quarantined += 1
        if request.is_decoding:
            self._lanes[request.lane].decodes.end(request)
        self._lanes.ended(request)
        self._table.stop(request)
        self._sharing.stop(request)

    def _end(self, request: Request) -> None:
        """Give a running request no more steps, and release its KV once it is in no step in flight."""
        if not request.ended:
            self._stop(request)
        if request.steps_in_flight == 0:
            for lane in request.held_lanes:
                self._lanes[lane].quarantined -= 1
            self._admission.release(request)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._table.remove(request)
        self._sharing.leave(request)

    # --- progress of steps --------------------------------------------------------------------------

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
        for request in launched.built.decodes:
            request.computed += 1
            request.steps_in_flight -= 1
        for request, count in launched.built.prefills:
            request.computed += count
            request.steps_in_flight -= 1
            if not request.ended:
                self._prefill_done(request)
        for sample in done.samples:
            emit = self._apply_sample(sample)
            if emit is not None:
                commands.append(emit)
        for request_id, hashes in done.block_hashes:
            self._pools.extend(request_id, hashes, self._table[request_id].known_tokens)
        for request in (*launched.built.decodes, *(request for request, _ in launched.built.prefills)):
            if request.ended:
                self._end(request)  # leaves quarantine if this was its last step
        return commands

    def _prefill_done(self, request: Request) -> None:
        """Record a computed chunk: its whole blocks can be shared, and a complete prompt can be forked."""
        self._pools.computed(request.id, request.computed)
        self._sharing.computed(request)

    def _apply_sample(self, sample: Sample) -> Emit | None:
        request = self._table[sample.id]
        if request.ended:
            return None  # cancelled while the step ran, or sampled beyond its end
        ran_ahead, request.runs_ahead = request.runs_ahead, False
        request.length += not ran_ahead
        finish_reason = sample.finish_reason
        if finish_reason is None and request.length >= request.limit_tokens:
            finish_reason = "length"
        is_first = request.emitted == 0
        if finish_reason is not None:
            self._stop(request)
        elif not ran_ahead:
            decodes = self._lanes[request.lane].decodes
            if is_first:
                decodes.begin(request)
            decodes.add(request)
        request.emitted += 1
        return Emit(
            sample.id,
            (sample.token,),
            finish_reason,
            () if sample.logprob is None else (sample.logprob,),
            request.cached_tokens if is_first else 0,
        )

    def _fail(self, failure: EntryFailed) -> list[ControllerCommand]:
        request = self._table[failure.id]
        if request.ended:
            return []
        self._stop(request)
        return [Failed(id=failure.id, reason=failure.reason, detail=failure.detail)]


def _predictor(config: ReplicaConfig, profile: StepProfile | Profile) -> Predictor:
    stages, scheduling = config.topology.stream, config.scheduling
    chunking = Chunking(
        max_tokens=scheduling.max_chunk_tokens,
        min_tokens=min(scheduling.min_chunk_tokens, scheduling.max_chunk_tokens),
        budget_seconds=scheduling.max_step_seconds / stages,
    )
    return Predictor(profile, config.topology, chunking, config.tokens_per_lane)
