"""The replica controller: `handle(event, now) -> commands`.

The controller is a state machine over messages. It owns no socket, no thread and no clock: the worker drives
it in real time, the simulator under a virtual clock, and a recorded list of (time, event) fed to a fresh
controller gives the same commands again.

The life of a request::

    Submit -> waiting -> admitted: holds KV, prefills, decodes -> ended -> released
               ^  \\                            |               /
               |   `------------ Cancel --------+--------------'
               `------ steps aside: KV is short

* `StageFree` and `Done` are two events. A step leaves stage 0 long before it leaves the last stage, and the
  next chunk of the same prompt may enter as soon as stage 0 is free. So `dispatched` moves when a step is
  launched and `computed` when it is done.
* The ledgers change only when a step is launched (grows, admits) or a request has left the pipeline
  (releases). Each change is sent with the next step, in the order in which the ranks replay it. Every rank of
  every lane receives every step, so all ledgers see all changes in one order. A rank computes only the steps
  that name its lane.
* A request that ends while a step with it is in flight waits in quarantine: its blocks are reused only after
  that step.
* A request that outgrows the output expected of it gets more KV. If there is none, one request steps aside
  (`growth`): it gets no more steps, as if it had ended, and then waits again, with its output as part of its
  prompt. What a step in flight still samples for it is dropped, and sampled again later.
* A request with a grammar is kept out of the step that would sample for it until ranks have compiled that
  (`grammars`).
* With one stage, ranks would wait for the controller between two steps. If no prefill could take part in the
  next step, decodes *run ahead*: that step is launched before the tokens that it starts from are sampled.
  Anything that a sequence computes beyond its stop token is dropped.

The parts: `validation` checks a request and derives its limits. `request_table` keeps the requests, and
`sharing` what they may share. `lanes` tracks which lanes can take a step. `step_builder` fills the step: it
reads prefills in the order that `prefill_order` gives them, `admission` gives them KV, and `packer` sizes
their chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from medha.cost.cost_profile import Profile
from medha.cost.predictor import Chunking, Predictor
from medha.cost.stream_seconds import StreamSeconds
from medha.cost.tier_seconds import TierSeconds
from medha.kv.blocks import BlockLedger
from medha.kv.pools import KvPools
from medha.kv.prefix_cache import hash_count
from medha.scheduler import validation
from medha.scheduler.admission import Admission
from medha.scheduler.attained_service import AttainedService
from medha.scheduler.grammars import COMPILE_SECONDS, Grammars
from medha.scheduler.growth import MOST_ASIDES
from medha.scheduler.lanes import Lanes
from medha.scheduler.load_waits import LoadWaits
from medha.scheduler.long_swaps import LongSwaps
from medha.scheduler.output_lengths import OutputLengths
from medha.scheduler.packer import Packed
from medha.scheduler.peer_kv import PeerKv
from medha.scheduler.policy import read_due
from medha.scheduler.prompt_logprobs import joined
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.request_table import RequestTable
from medha.scheduler.sharing import Sharing
from medha.scheduler.step_builder import BuiltStep, StepBuilder
from medha.scheduler.store_kv import StoreKv
from medha.slo import Targets, targets
from medha.wire.messages import (
    Admit,
    Cancel,
    CompileGrammar,
    ControllerCommand,
    ControllerEvent,
    DiskReport,
    Done,
    Drain,
    Emit,
    EntryFailed,
    Failed,
    FailureReason,
    GrammarReady,
    Grow,
    KvAsk,
    KvDone,
    KvTicket,
    LaneLoad,
    PolicyTerms,
    PromptLogprobs,
    Refused,
    Sample,
    StageFree,
    Step,
    SteppedAside,
    StepProfile,
    StoreLookup,
    Submit,
    TokenLogprob,
)

STATE_HASH_EVERY_STEPS = 31
"""Steps between state hashes. Odd, so that hashes seldom coincide with `guarded`'s far decisions (1 in 8)."""
SHORT_STEP = 0.025
"""Longest step after which decodes run ahead at once, as a share of the strictest TTFT floor.

It bounds how long the step launched ahead keeps a new arrival waiting.
"""

_LATE_GRAMMAR = (
    f"the grammar of this request was not compiled within {COMPILE_SECONDS:g} s; simplify it, or send fewer grammars at "
    "once, and try again"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a replica announces to routers and exports as gauges."""

    running: int
    waiting: int
    kv_tokens_free: int
    pending_prefill_seconds: float
    lanes: tuple[LaneLoad, ...] = ()
    kv_tokens_wanted: int = 0  # free KV that the waiting requests need, all together


@dataclass(slots=True)
class _Launched:
    """A step in flight, and the requests that it computes."""

    step: Step
    built: BuiltStep
    at: float  # when it was launched
    ran_ahead: bool  # another step was in flight on its lanes


ToRanksOrPeers = CompileGrammar | StoreLookup | KvAsk
"""Commands that an arriving request causes, before any step has it."""


@dataclass(slots=True)
class _Returning:
    """A request that has stepped aside, and the `Submit` with which it comes back."""

    request: Request
    submit: Submit


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
        self._tier_seconds = (
            None
            if config.host_tier is None
            else TierSeconds(
                config.host_tier,
                self.predictor,
                config.disk_tier,
                config.peer_block_seconds or 0.0,
                config.store_block_seconds or 0.0,
            )
        )
        self._stream_seconds = None if config.streaming is None else StreamSeconds(config.streaming)
        self._admission = Admission(config, self._table, self._tier_seconds)
        self._pools = self._admission.pools
        self._sharing = Sharing(
            self._table,
            self._admission,
            self.predictor,
            config.block_size_tokens,
            frees_windows=config.window_pool is not None,
        )
        self._lanes = Lanes(config.topology.kv, config.topology.stream)
        self._attained = AttainedService()
        self._charges: list[tuple[str, int]] = []  # output tokens of owners whose requests end
        self._step_builder = StepBuilder(
            config,
            self.predictor,
            self._table,
            self._admission,
            self._sharing,
            self._lanes,
            self._tier_seconds,
            self._stream_seconds,
        )
        self._long_swaps = LongSwaps(config, self._table, self._admission, self.predictor, self._tier_seconds)
        self._output_lengths = OutputLengths(
            {one.name: one.default_output_tokens for one in config.service_classes.values()}
        )
        self._grammars = Grammars(config.topology.kv, epoch)
        self._load_waits = LoadWaits()
        self._peer_kv = PeerKv(self._pools, self._load_waits)
        lane_ranks = [tuple(config.topology.ranks_of_lane(lane)) for lane in range(config.topology.kv)]
        self.store_kv = StoreKv(self._pools, self._load_waits, lane_ranks, epoch)
        self._returning: list[_Returning] = []
        self._in_flight: dict[int, _Launched] = {}
        floors_seconds = [one.ttft_floor_seconds for one in config.service_classes.values()]
        self._short_seconds = SHORT_STEP * min(floors_seconds)
        self._draining = False
        self._arrivals = 0
        self._resumed_tokens = 0
        self._streamed_blocks = 0
        self._next_step_id = 0
        self._done_at: dict[tuple[int, ...], float] = {}  # when the last step of these lanes ended

    # --- read-only state ----------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def idle(self) -> bool:
        """True if no request waits or runs, no step is in flight, and nothing is to be sent to the ranks."""
        return self._table.is_empty and not (self._in_flight or self._has_changes)

    @property
    def is_drained(self) -> bool:
        """True if it is idle, and no other replica may still read its KV."""
        return self.idle and not self._peer_kv.gives

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

    @property
    def next_due(self) -> float | None:
        """Time at which a `Tick` must come, unless another event does before; None if there is no such time."""
        dues = (
            self._grammars.next_due,
            self._load_waits.next_due,
            self._peer_kv.next_due,
            self.store_kv.next_due,
        )
        return min((due for due in dues if due is not None), default=None)

    def knows_prompt(self, prompt: str) -> bool:
        """Return whether a request here names this prompt."""
        return prompt in self._sharing.prompts

    def requests(self) -> Iterable[Request]:
        """Return every request known here, in the order of arrival."""
        return list(self._table)

    def expected_output_tokens(self, service_class: str) -> int:
        """Return how many output tokens are expected of a new request of a service class."""
        return self._output_lengths.expected_tokens(service_class)

    @property
    def long_swaps(self) -> int:
        """Times that a long request stepped aside for the deadline of another one."""
        return self._long_swaps.count

    @property
    def growth_blocks(self) -> int:
        """Free KV blocks that are held for requests that outgrow the output expected of them."""
        return self._admission.growth_blocks

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
            pending_prefill_seconds=self._table.total_remaining_seconds() * self.predictor.correction.prefill,
            lanes=tuple(
                LaneLoad(self._admission.free_tokens_on(lane), pending)
                for lane, pending in enumerate(self._step_builder.pending_by_lane())
            ),
            kv_tokens_wanted=self._table.wanted_blocks * self.config.block_size_tokens,
        )

    @property
    def policy_terms(self) -> PolicyTerms:
        """The policy by which prefills are ordered, as announced to routers."""
        return self._step_builder.prefill_order.terms

    def work_ahead(self, now: float) -> tuple[tuple[float, float], ...]:
        """Return points (key of the policy, seconds of pending work with at most that key), as announced to routers."""
        order, correction = self._step_builder.prefill_order, self.predictor.correction.prefill
        return order.work_ahead(self._table, correction, now)

    def slack_seconds(self, request: Request, now: float) -> float:
        """Return deadline - now - remaining work of a request that has not finished its prefill."""
        remaining_seconds = self._table.remaining_seconds(request) * self.predictor.correction.prefill
        return request.deadline - now - remaining_seconds

    # --- entry point --------------------------------------------------------------------------------

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        """Process an event at `now` (seconds, any monotonic origin) and return the commands, in order."""
        commands: list[ControllerCommand] = []
        self._table.owners.at(now)
        self.store_kv.go_on(now)
        match event:
            case StageFree():
                self._stage_free(event)
            case Done():
                commands += self._done(event, now)
            case Submit():
                commands += self._submit(event, now)
            case Cancel():
                self._cancel(event, now)
            case GrammarReady():
                for request in self._grammars.ready(event):
                    commands += self._fail_unserved(request, "grammar", event.fault, now)
            case DiskReport():
                commands += self._disk_report(event, now)
            case KvAsk():
                commands.append(self._give_kv(event, now))
            case KvTicket():
                commands += self._peer_kv.answered(event, now, self._go_on)
            case KvDone():
                self._peer_kv.end(event)
            case Drain():
                self._draining = True
                self._pools.share_all()
        self._peer_kv.expire(now)
        late = self._load_waits.late(now)
        self._peer_kv.late(late, now)
        self.store_kv.late(late, now)
        for request in late:
            self._go_on(request)
        for request in self._grammars.late(now):
            commands += self._fail_unserved(request, "grammar_late", _LATE_GRAMMAR, now)
        for owner, tokens in self._charges:
            self._attained.charge(owner, tokens, now)
        self._charges.clear()
        commands += self._come_back(now)
        for lanes in self._lanes.coupled:
            # A launch may couple lanes that come later in this loop; they move together from the next event on.
            if lanes in self._lanes.coupled and self._lanes.can_start_step_on(lanes):
                commands += self._launch(lanes, now)
            if lanes in self._lanes.coupled and self._run_ahead(lanes):
                commands += self._launch(lanes, now, runs_ahead=True)
        return [*commands, *self._grammars.take_drops()]

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
        * while a decode lacks KV, or while a waiting request can take the place of one that ends;
        * if the step in flight verifies drafts, because then it is not known how many tokens it samples;
        * if the next step should verify drafts, which begin after known tokens. They may be proposed in the step in
          flight.
        """
        if self._might_prefill or any(self._lanes[lane].decodes.starved for lane in lanes):
            return False
        step_id = self._lanes.lone_step(lanes)
        if step_id is None:
            return False
        launched = self._in_flight[step_id]
        step = launched.step
        if launched.built.prefills or launched.built.drafts or step.lanes != lanes:
            return False
        if launched.built.proposals.are_awaited:
            return False
        if step.predicted_seconds > self._short_seconds and not self._lanes.are_free(lanes):
            return False
        continuing = [request for request in launched.built.decodes if request.continues]
        if len(continuing) < len(launched.built.decodes) and self._table.waiting:
            return False
        if not all(request.can_run_ahead for request in continuing):
            return False
        if self._step_builder.prefers_drafts(lanes, continuing):
            return False
        for request in continuing:
            request.length += 1
            request.runs_ahead = True
            self._lanes[request.lane].decodes.add(request)
        return bool(continuing)

    @property
    def _might_prefill(self) -> bool:
        """True if a prefill could take part in a step: one that holds KV or may get some."""
        if not self._table.rows:
            return False
        waiting = self._table.waiting
        stalled, stalled_waiting = self._grammars.stalled()
        stalled += len(self._step_builder.fetches)
        if len(self._table.rows) > waiting + stalled:
            return True
        return waiting > len(stalled_waiting | self._load_waits.waiting) and self._admission.has_place_for_any

    def _launch(
        self, lanes: tuple[int, ...], now: float, *, runs_ahead: bool = False
    ) -> list[ControllerCommand]:
        """Launch a step on `lanes` if there is something to compute or to send to the ranks."""
        if not (self._table.rows or self._lanes.decode(lanes) or self._has_changes):
            self._step_builder.rested(lanes)
            return []
        self._step_builder.write_through(lanes)
        self._sharing.end_forks()
        grows, exhausted, aside = self._grow(lanes)
        self._admission.is_paused = any(lane.decodes.starved for lane in self._lanes)
        admits = self._admit_late(now)
        aside += self._make_way(now)
        aside += self._swap(now)
        built = self._step_builder.build(lanes, admits, now, grows)
        ends: list[ControllerCommand] = [
            Emit(id=request.id, tokens=(), finish_reason="length") for request in exhausted
        ]
        if not (built.entries or admits or grows or built.fetches or self._has_changes):
            for request in (*exhausted, *aside):
                self._end(request)
            returning = self._come_back(now)
            return [*ends, *returning, *self._launch(lanes, now)] if exhausted or aside else []
        step = self._new_step(lanes, built, grows, admits)
        self._in_flight[step.step_id] = _Launched(step, built, now, runs_ahead)
        for lane in lanes:
            self._lanes[lane].launched(step.step_id, step.predicted_seconds)
        # Only now: ranks apply a step's releases first, so these must be sent with a later step.
        for request in (*exhausted, *aside):
            self._end(request)
        return [*ends, step, *self._come_back(now)]

    def _new_step(
        self, lanes: tuple[int, ...], built: BuiltStep, grows: list[Grow], admits: list[Admit]
    ) -> Step:
        """Build the next step, with all pending messages to the ranks."""
        hashes: tuple[int, ...] = ()
        if self._next_step_id % STATE_HASH_EVERY_STEPS == 0:
            hashes = self._pools.state_hashes()
        deletes, writes = self._pools.take_writes()
        serves, unserves = self._pools.take_serves()
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
            inserts=self._pools.take_inserts(),
            lanes=lanes,
            state_hashes=hashes if len(hashes) > 1 else (),
            loads=self._pools.take_loads(),
            deletes=deletes,
            writes=writes,
            serves=serves,
            unserves=unserves,
            stores=self._pools.take_stores(),
            fetches=built.fetches,
        )
        self._next_step_id += 1
        self._sharing.forgets = {}
        self._pools.sent(step)
        return step

    def _grow(self, lanes: tuple[int, ...]) -> tuple[list[Grow], list[Request], list[Request]]:
        """Grow the KV of requests that have used it up.

        Return the grows, requests that hold all KV that they can get and must end, and those that step aside.
        At most one steps aside at a time. The others without KV wait for its blocks, or for those of requests
        in quarantine. No KV is released here: ranks apply a step's releases before its grows.
        """
        grows: list[Grow] = []
        exhausted: list[Request] = []
        aside: list[Request] = []
        for lane in lanes:
            here = self._lanes[lane]
            starved, here.decodes.starved = here.decodes.starved, []
            for request in starved:
                if request.ended:
                    continue  # it steps aside for another one
                grow = self._admission.grow(request) if request.may_outgrow else None
                if grow is not None:
                    grows.append(grow)
                    self._output_lengths.outgrew(
                        request.id, request.service_class, request.submit.owner, request.output_tokens
                    )
                    self._lanes.remapped(request)
                    here.decodes.add(request)
                elif not request.may_outgrow:
                    exhausted.append(request)
                    self._stop(request, cut_off=True)
                else:
                    here.decodes.starved.append(request)
                    if not any(other.quarantined for other in self._lanes):
                        aside.append(self._admission.who_steps_aside(request))
                        self._step_aside(aside[-1])
        return grows, exhausted, aside

    def _make_way(self, now: float) -> list[Request]:
        """Let requests of owners with much KV step aside for the claimant if it would otherwise be late; return them."""
        aside = self._admission.who_make_way(now, self.predictor.correction.prefill)
        for request in aside:
            request.makes_way = True
            self._step_aside(request)
        return aside

    def _swap(self, now: float) -> list[Request]:
        """Let a long request step aside for the deadline of one that waits for KV; return it, if there is one."""
        swap = self._long_swaps.choose(now)
        if swap is None:
            return []
        swap.request.makes_way, swap.request.due_back = True, swap.due
        self._step_aside(swap.request)
        return [swap.request]

    def _step_aside(self, request: Request) -> None:
        request.steps_aside = True
        self._stop(request)

    def _admit_late(self, now: float) -> list[Admit]:
        """Admit the claimant, which gets KV that becomes free, as soon as there is enough for it."""
        admits: list[Admit] = []
        if not self._table.waiting or self._admission.is_full:
            return admits
        claimant = self._admission.find_claimant(now, self.predictor.correction.prefill)
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
        if submit.sampling.prompt_logprobs is not None and submit.tokens == submit.prompt_length:
            submit = replace(submit, block_hashes="")  # cached KV would hide the logits that are asked for
        return [*self._arrive(submit, now)]

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

    def _come_back(self, now: float) -> list[SteppedAside | ToRanksOrPeers]:
        """Let requests that have stepped aside arrive again, so that they wait for KV."""
        if not self._returning:
            return []
        returning, self._returning = self._returning, []
        commands: list[SteppedAside | ToRanksOrPeers] = []
        for one in returning:
            before, submit = one.request, one.submit
            commands.append(SteppedAside(submit.id, submit.prompt, before.submit.prompt, submit.tokens))
            commands += self._arrive(submit, now, before)
        return commands

    def _as_it_comes_back(self, request: Request) -> Submit:
        """Return the submit of a request that steps aside, with its output as part of its prompt."""
        submit, tokens = request.submit, request.known_tokens
        if tokens == submit.tokens:
            return submit
        hashes = submit.block_hashes + self._pools.output_hashes(request.id)
        if hash_count(hashes) != tokens // self.config.block_size_tokens:
            hashes = ""  # not all of its blocks were hashed
        name = f"{request.id}/aside-{request.asides + 1}"
        return replace(submit, prompt=name, tokens=tokens, block_hashes=hashes)

    def _expected_output_tokens(self, submit: Submit, service_class: str, before: Request | None) -> int:
        """Return for how many output tokens a request reserves KV, unless its limit is lower.

        `before` is the request as it stepped aside. One that had outgrown its KV gets KV for at least twice its output. One
        that made way for another request gets at least what it had, because it had not outgrown it.
        """
        produced = submit.tokens - submit.prompt_length
        expected = self._output_lengths.expected_tokens(service_class, submit.owner, produced)
        if before is None:
            return expected
        reserved = before.reservation_tokens - submit.prompt_length
        if before.makes_way:
            return max(expected, reserved + 1)  # a last token needs no KV
        if before.asides + 1 - before.ways >= MOST_ASIDES:
            return self.config.max_model_len
        return max(expected, 2 * produced, 2 * reserved)

    def _arrive(self, submit: Submit, now: float, before: Request | None = None) -> list[ToRanksOrPeers]:
        """Add an accepted request, which then waits for KV; `before` is the same one as it stepped aside.

        Return what must be sent to ranks before a step with it.
        """
        config, predictor = self.config, self.predictor
        streams = validation.streams(config, submit)
        if streams:
            submit = replace(submit, block_hashes="")  # streamed KV is not shared
        class_name = validation.class_name(config, submit)
        expected = self._expected_output_tokens(submit, class_name, before)
        reservation_tokens = validation.reservation_tokens(config, submit, expected)
        may_spread = validation.may_spread(config, submit, reservation_tokens)
        # The targets follow from the whole prompt, whatever is cached: a cache must not tighten a deadline.
        whole = predictor.uncorrected_prefill(0, submit.tokens)
        work_seconds = whole.seconds * predictor.correction.prefill
        targets = self._targets(submit, class_name, work_seconds, before, now)
        arrival = now - submit.age_seconds if before is None else before.arrival
        due = read_due(config.scheduling.policy, arrival, arrival + targets.ttft_seconds)
        awaited = self._pools.begin_loads(submit.tokens, submit.block_hashes, due=due, is_long=may_spread)
        cached_tokens, _ = self._pools.expected(submit.tokens, submit.block_hashes, is_long=may_spread)
        left = predictor.uncorrected_prefill(cached_tokens, submit.tokens) if cached_tokens else whole
        self._arrivals += before is None
        request = Request(
            submit=submit,
            id=submit.id,
            prompt=self._sharing.prompt_of(submit.prompt, submit.tokens),
            tie=self._arrivals,
            arrival=arrival,
            targets=targets,
            is_long=streams or submit.tokens - cached_tokens >= config.long_threshold_tokens,
            length=submit.tokens,
            limit_tokens=validation.limit_tokens(config, submit),
            reservation_tokens=reservation_tokens,
            turn=self._attained.turn(submit.owner),
            contested_until=now + submit.contested_seconds if submit.contested_seconds > 0 else -inf,
            most_tokens=validation.most_tokens(config, submit),
            service_class=class_name,
            expected_output_tokens=expected,
            may_spread=may_spread,
            streams=streams,
            cached_tokens=cached_tokens,
            read_due=due,
        )
        if before is None:
            self._attained.charge(submit.owner, submit.tokens, now)
        else:
            request.continue_from(before)
        asked: list[ToRanksOrPeers] = [*self._grammars.arrive(request, now)]
        if awaited is not None:
            self._load_waits.begin(request, awaited, now)
        elif before is None:
            asked += self._peer_kv.ask(request, now)
            if request.awaits_load:  # it computes only the rest, so it delays others less
                left = predictor.uncorrected_prefill(
                    min(submit.peer_tokens, submit.tokens - 1), submit.tokens
                )
            asked += self.store_kv.ask(request, now)
        self._sharing.arrive(request, work_seconds, left)
        return asked

    def _targets(
        self, submit: Submit, class_name: str, work_seconds: float, before: Request | None, now: float
    ) -> Targets:
        """Return the targets of a request; one that stepped aside is due again, as a new one of its length would be.

        `before` is the request as it stepped aside; None if it has not. A long one that did so for another's deadline
        is due at `before.due_back`.
        """
        service_class = self.config.service_classes[class_name]
        tpot_seconds = submit.tpot_target_seconds
        if before is None:
            return targets(service_class, work_seconds, submit.deadline_after_seconds, tpot_seconds)
        again = targets(service_class, work_seconds, None, tpot_seconds)
        if before.due_back is not None:
            return replace(again, ttft_seconds=before.due_back - before.arrival)
        return replace(again, ttft_seconds=now - before.arrival + again.ttft_seconds)

    def _cancel(self, cancel: Cancel, now: float) -> None:
        request = self._table.find(cancel.id)
        if not cancel.moves:
            self._peer_kv.moved(cancel.id)
        elif request is not None and (request.steps_aside or not request.ended):
            self._peer_kv.moves(request)
        if request is not None:
            self._withdraw(request, now, goes_on=cancel.moves)

    def _fail_unserved(
        self, request: Request, reason: FailureReason, detail: str, now: float
    ) -> list[ControllerCommand]:
        """End a request that cannot be served."""
        self._withdraw(request, now)
        return [Failed(request.id, reason, detail)]

    def _withdraw(self, request: Request, now: float, *, goes_on: bool = False) -> None:
        """End a request, in whatever phase it is; `goes_on`: another replica continues its output."""
        if request.waits or request.steps_aside:
            self._count_output(request, cut_off=True)
        request.steps_aside = False
        if request.waits:
            self._admission.withdraw(request)
            if not request.asides:  # it was never served
                submit = request.submit
                charged_at = request.arrival + submit.age_seconds
                self._attained.take_back(submit.owner, submit.tokens, charged_at, now)
            self._leave(request)
            return
        if goes_on and not request.ended:
            self._stop(request, cut_off=True)
        self._end(request)

    def _count_output(self, request: Request, *, cut_off: bool) -> None:
        """Learn from the output length of a request that ends; `cut_off`: its output might have been longer."""
        if request.output_tokens > 0:
            self._output_lengths.ended(
                request.id,
                request.service_class,
                request.submit.owner,
                request.output_tokens,
                cut_off=cut_off or request.length >= request.limit_tokens,
            )

    def _stop(self, request: Request, *, cut_off: bool = False, last_tokens: int = 0) -> None:
        """Give a running request no more steps; its KV waits in quarantine.

        It ends with `last_tokens` tokens, which `emitted` does not count yet.
        """
        request.ended = True
        if request.emitted + last_tokens:
            self._charges.append((request.submit.owner, request.emitted + last_tokens))
        if not request.steps_aside:
            self._count_output(request, cut_off=cut_off)
        for lane in request.held_lanes:
            self._lanes[lane].quarantined += 1
        if request.has_sampled:
            self._lanes[request.lane].decodes.end(request)
        self._lanes.ended(request)
        self._step_builder.fetches.leave(request)
        self._table.stop(request)
        self._sharing.stop(request)

    def _end(self, request: Request) -> None:
        """Give a running request no more steps, and release its KV once it is in no step in flight.

        If it steps aside, it waits from then on (`_come_back`).
        """
        if not request.ended:
            self._stop(request)
        if request.steps_in_flight == 0:
            for lane in request.held_lanes:
                self._lanes[lane].quarantined -= 1
            if request.steps_aside:
                self._returning.append(_Returning(request, self._as_it_comes_back(request)))
            self._admission.release(request)
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._table.remove(request)
        self._sharing.leave(request)
        self._grammars.leave(request)
        self._load_waits.leave(request)
        self._peer_kv.leave(request)
        self.store_kv.leave(request)

    # --- progress of steps --------------------------------------------------------------------------

    def _disk_report(self, report: DiskReport, now: float) -> list[KvDone]:
        ended = self._pools.disk_report(report)
        times = self._tier_seconds
        if times is not None:
            for loads, observe in (
                (ended.from_files, times.observe_load),
                (ended.from_peers, times.observe_peer_load),
                (ended.from_store, times.observe_store_load),
            ):
                for one in loads:
                    if one.is_there:
                        observe(one.blocks, one.seconds)
        done = self._peer_kv.loaded(report.lane, ended.from_peers, now)
        self.store_kv.report(report, ended, now, self._go_on)
        for request in self._load_waits.loaded(report.lane, ended.extents):
            self._go_on(request)
        return done

    def _give_kv(self, ask: KvAsk, now: float) -> KvTicket:
        if self._tier_seconds is None or self.config.peer_block_seconds is None:
            return KvTicket(ask.id, ask.asker, reason="this replica gives no KV")
        return self._peer_kv.give(ask, self._tier_seconds.peer_seconds, now)

    def reads_of(self, ticket: str) -> frozenset[tuple[int, int]]:
        """Return the extents into which blocks of another replica's ticket are being read, each with its lane."""
        return self._peer_kv.reads(ticket)

    @property
    def read_line(self) -> tuple[float, float]:
        """Predicted seconds to read another replica's KV: for each read, and for each token; 0 if it takes no KV."""
        if self._tier_seconds is None or not self._pools.has_peers:
            return 0.0, 0.0
        access_seconds, block_seconds = self._tier_seconds.peer_line()
        return access_seconds, block_seconds / self.config.block_size_tokens

    @property
    def tier_read_lines(self) -> dict[str, tuple[float, float]]:
        """Predicted seconds of a read of each tier, and of each of its blocks (`TierSeconds.read_lines`); empty without tiers."""
        return {} if self._tier_seconds is None else self._tier_seconds.read_lines()

    @property
    def resumed_tokens(self) -> int:
        """Tokens of requests that came with output and a peer whose KV was cached here or read, not computed."""
        return self._resumed_tokens

    @property
    def streamed_blocks(self) -> int:
        """Blocks that steps have streamed from host memory, on the lane that streams most of each sequence."""
        return self._streamed_blocks

    def _go_on(self, request: Request) -> None:
        """Let a request that has waited for loads get KV."""
        if request.waits and not request.ended:
            self._sharing.update(request)

    def _stage_free(self, stage_free: StageFree) -> None:
        launched = self._in_flight.get(stage_free.step_id)
        if stage_free.stage == 0 and launched is not None:  # else its Done has come already, on another link
            for lane in launched.step.lanes:
                self._lanes[lane].left_stage_0(stage_free.step_id)

    def _done(self, done: Done, now: float) -> list[ControllerCommand]:
        launched = self._in_flight.pop(done.step_id)
        for lane in launched.step.lanes:
            self._lanes[lane].done(done.step_id)
        if self._tier_seconds is not None and done.copy_seconds > 0:
            self._tier_seconds.observe(launched.step, done.copy_seconds)
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
        for request_id, part in done.prompt_logprobs:
            self._table[request_id].prompt_logprobs.append(part)
        by_sequence = _by_sequence(done.samples) if launched.built.drafts else zip(done.samples, strict=True)
        for samples in by_sequence:
            emit = self._apply_samples(now, *samples)
            if emit is not None:
                commands.append(emit)
        if done.block_hashes:
            self._note_filled_blocks(done.block_hashes)
        requests = (*launched.built.decodes, *(request for request, _ in launched.built.prefills))
        if launched.step.entries:
            self._learn(launched, done, requests, now)
        for request in requests:
            if request.ended:
                self._end(request)  # leaves quarantine if this was its last step
        return commands

    def _learn(self, launched: _Launched, done: Done, requests: Iterable[Request], now: float) -> None:
        """Correct predictions by the time that a step with these requests took, and by its draft model's reports."""
        built, speculator = launched.built, self._step_builder.speculator
        seconds = done.compute_seconds
        if not speculator.is_off:
            going = {request.id: request for request in requests if not request.ended}
            seconds = speculator.take(done, built.proposals, going)
            ended_at, self._done_at[launched.step.lanes] = self._done_at.get(launched.step.lanes, 0.0), now
            if not (built.prefills or launched.step.admits):
                began_at = max(launched.at, ended_at) if launched.ran_ahead else launched.at
                speculator.passed(
                    now - began_at - done.compute_seconds, done.compute_seconds, ran_ahead=launched.ran_ahead
                )
        self._streamed_blocks += built.packed.streamed_blocks
        if built.packed.is_streaming and self._stream_seconds is not None:
            self._stream_seconds.observe(built.packed.streamed_blocks, seconds)
        elif not built.packed.copies_bind:
            self.predictor.observe(built.packed.uncorrected, seconds)

    def _note_filled_blocks(self, block_hashes: Iterable[tuple[str, str]]) -> None:
        """Record the hashes of blocks that output tokens have filled.

        The last hash of a request is that of its last whole block.
        """
        size, later = self.config.block_size_tokens, Counter(request_id for request_id, _ in block_hashes)
        for request_id, hashes in block_hashes:
            later[request_id] -= 1
            blocks = self._table[request_id].known_tokens // size - later[request_id]
            self._pools.extend(request_id, hashes, blocks * size)
            self._pools.offer_output(request_id, self._table[request_id].computed)

    def _prefill_done(self, request: Request) -> None:
        """Record a computed chunk: its whole blocks can be shared, and a complete prompt can be forked."""
        self._pools.computed(request.id, request.computed)
        self._sharing.computed(request)

    def _apply_samples(self, now: float, sample: Sample, *further: Sample) -> Emit | None:
        """Take a sampled token, and the `further` ones that were sampled after right guesses."""
        request = self._table[sample.id]
        if request.ended:
            return None  # cancelled while the step ran, or sampled beyond its end
        ran_ahead, request.runs_ahead = request.runs_ahead, False
        request.length += not ran_ahead
        tokens: tuple[int, ...] = (sample.token,)
        logprobs: tuple[TokenLogprob, ...] = () if sample.logprob is None else (sample.logprob,)
        finish_reason = sample.finish_reason
        if further:
            request.accept(len(further))
            tokens += tuple(one.token for one in further)
            logprobs += tuple(one.logprob for one in further if one.logprob is not None)
            finish_reason = further[-1].finish_reason
        self._step_builder.speculator.observe(request, tokens)
        if finish_reason is None and request.length >= request.limit_tokens:
            finish_reason = "length"
        is_first = request.emitted == 0
        if finish_reason is not None:
            self._stop(request, last_tokens=len(tokens))
        elif not ran_ahead:
            decodes = self._lanes[request.lane].decodes
            if is_first:
                decodes.begin(request)
            decodes.add(request)
        if is_first and request.submit.peer and request.has_output_in_prompt and not request.asides:
            self._resumed_tokens += request.served_from_cache
        request.emitted += len(tokens)
        if request.paced_from == inf:
            request.paced_from, request.paced_length = now, request.known_tokens
        return Emit(
            sample.id,
            tokens,
            finish_reason,
            logprobs,
            request.served_from_cache
            if is_first and not (request.has_output_in_prompt and request.asides)
            else 0,
            self._prompt_logprobs(request) if is_first and request.scores_prompt else None,
        )

    @staticmethod
    def _prompt_logprobs(request: Request) -> PromptLogprobs | None:
        """Return the log-probabilities of a request's prompt, and forget them."""
        parts, request.prompt_logprobs = request.prompt_logprobs, []
        return joined(parts, request.submit.prompt_length)

    def _fail(self, failure: EntryFailed) -> list[ControllerCommand]:
        request = self._table[failure.id]
        if request.ended:
            return []
        self._stop(request, cut_off=True)
        return [Failed(id=failure.id, reason=failure.reason, detail=failure.detail)]


def _by_sequence(samples: Iterable[Sample]) -> Iterable[Sequence[Sample]]:
    """Return the samples of each sequence, in order."""
    by_sequence: dict[str, list[Sample]] = {}
    for sample in samples:
        by_sequence.setdefault(sample.id, []).append(sample)
    return by_sequence.values()


def _predictor(config: ReplicaConfig, profile: StepProfile | Profile) -> Predictor:
    stages, scheduling = config.topology.stream, config.scheduling
    chunking = Chunking(
        max_tokens=scheduling.max_chunk_tokens,
        min_tokens=min(scheduling.min_chunk_tokens, scheduling.max_chunk_tokens),
        budget_seconds=scheduling.max_step_seconds / stages,
    )
    return Predictor(profile, config.topology, chunking, config.tokens_per_lane)
