"""Fills steps: decodes first, then prefills in the order of the policy, with KV for waiting ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

import numpy as np

from medha.cost.predictor import Predictor
from medha.cost.stream_seconds import StreamSeconds
from medha.cost.tier_seconds import TierSeconds
from medha.kv.context_parallel import ContextParallel
from medha.scheduler.admission import Admission
from medha.scheduler.fetches import FETCH_SHARE, Fetches
from medha.scheduler.lanes import Lanes
from medha.scheduler.pace import Pace
from medha.scheduler.packer import Batch, DecodeTargets, Limits, Packed, PrefillCandidate, Space
from medha.scheduler.prefill_order import PrefillOrder
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import NOWHERE, Request
from medha.scheduler.request_table import NEAR_REVISED_DEADLINE, RequestTable
from medha.scheduler.sharing import Sharing
from medha.scheduler.speculation import Drafts, Proposals
from medha.scheduler.speculator import Speculator
from medha.wire.messages import Admit, Extent, Grow, KvFetch, StepEntry

Place = Callable[[PrefillCandidate], bool]
"""Gives KV to a waiting prefill and updates it; returns False if it gets none or cannot take part in the step."""

MOST_MISSES = 10
"""Consecutive prefills without space after which a step counts as full (paper B bounds its skips, too).

While the step is empty, the search goes on: without a step no event may come, and later prefills would wait for ever.
"""
MOST_ORDERS = 4
"""Most selections of candidates for a step; a further one is made once admissions have used up the KV of the rest."""
_USUAL_STEP_TOKENS = 512
"""Size of the step whose hop time is the initial estimate of the time between steps."""
_LEAST_OF_TARGET = 0.5
"""Share of a TPOT target that always remains for the steps themselves, whatever time passes between them."""
MOST_POSITIONS = 32768
"""Most positions for which the extents of decodes are cached: 8 MB."""
MOST_ELSEWHERE = 64
"""Most waiting requests that a step may skip because another lane should take them."""


@dataclass(slots=True)
class BuiltStep:
    """The entries of a step, and the requests that they compute."""

    packed: Packed
    entries: list[StepEntry]
    decodes: list[Request]
    prefills: list[tuple[Request, int]]  # with the tokens of its chunk
    drafts: Drafts  # guesses that the decodes verify
    proposals: Proposals  # guesses that are proposed after them
    fetches: tuple[KvFetch, ...] = ()


def pack(
    batch: Batch,
    targets: DecodeTargets | None,
    prefills: Iterator[PrefillCandidate],
    limits: Limits,
    place: Place,
    admits: Sequence[Admit] = (),
    draft: Callable[[Space], None] = lambda _: None,
) -> Packed:
    """Add prefill chunks to a step that already holds its decodes.

    Args:
        batch: the step, with its decodes.
        targets: targets of the running decodes; None if there are none.
        prefills: most urgent first; read only as far as the step has space.
        place: gives KV to those that wait.
        admits: the admits that the step carries; `place` appends to them.
        draft: adds drafted tokens to the decodes, in the space that the chunks leave.
    """
    head = list(islice(prefills, 2))
    space = Space(batch, targets, head, limits)
    choose_and_place(chain(head, prefills), space, place, admits)
    give_back(space, place)
    draft(space)
    return space.close()


def choose_and_place(
    prefills: Iterable[PrefillCandidate], space: Space, place: Place, admits: Sequence[Admit]
) -> None:
    """Phase 1: take prefills into a step, most urgent first, and give KV to those that wait.

    A request gets KV only in the step that computes its first chunk, so each prefill is given its chunk before
    the next one is considered. A prefill that does not fit is set aside for this step.
    """
    misses = 0
    for prefill in prefills:
        if prefill.is_long and space.has_long(prefill):
            continue
        taken = _take(prefill, space.share_seconds(prefill), space, place)
        misses = 0 if taken else misses + 1
        if space.is_full or (misses >= MOST_MISSES and (admits or not space.is_empty)):
            return


def give_back(space: Space, place: Place) -> None:
    """Phase 2: give the space that the others left to the long prefills that yielded it."""
    for prefill in space.yielding:
        if prefill.id in space.packed.chunks:
            space.enlarge(prefill)
        elif not space.has_long(prefill):
            _take(prefill, space.packed.budget_seconds, space, place)


def _take(prefill: PrefillCandidate, budget_seconds: float, space: Space, place: Place) -> bool:
    """Give a prefill the largest chunk that fits, and KV if it waits; return False if it finds no space or no KV."""
    tokens = space.largest_chunk(prefill, budget_seconds)
    if prefill.waits and tokens:
        if not space.is_its_turn(prefill) or not place(prefill):
            return False
        if prefill.moved:  # partly cached, or split over lanes
            tokens = space.largest_chunk(prefill, budget_seconds)
        if prefill.is_long and space.has_long(prefill):
            return False
    return space.add(prefill, tokens)


class StepBuilder:
    """Fills the steps of a replica, one after the other."""

    def __init__(
        self,
        config: ReplicaConfig,
        predictor: Predictor,
        table: RequestTable,
        admission: Admission,
        sharing: Sharing,
        lanes: Lanes,
        tier_seconds: TierSeconds | None = None,
        stream_seconds: StreamSeconds | None = None,
    ) -> None:
        """`tier_seconds` are the times of the lanes' host tiers, if they have any; `stream_seconds` those of streamed KV."""
        self._stream_seconds = stream_seconds
        self._predictor = predictor
        self._tier_seconds = tier_seconds
        self.fetches = Fetches(admission.pools, tier_seconds)
        self._table = table
        self._admission = admission
        self._sharing = sharing
        self._lanes = lanes
        self._all_lanes = tuple(range(len(lanes)))
        self._has_one_lane = len(lanes) == 1
        self._long_threshold_tokens = config.long_threshold_tokens
        self._block_size_tokens = config.block_size_tokens
        self._context_parallel = config.context_parallel
        self._stages = config.topology.stream
        self.prefill_order = PrefillOrder(config.scheduling, config.topology.kv, self._stages)
        self._pace = Pace(predictor.hop_seconds(_USUAL_STEP_TOKENS) * (1 - 1 / self._stages))
        self._limits = _limits(config)
        self.speculator = Speculator(config)
        self._one_token_at: dict[int, tuple[Extent, ...]] = {}

    def build(
        self, lanes: tuple[int, ...], admits: list[Admit], now: float, grows: Sequence[Grow] = ()
    ) -> BuiltStep:
        """Fill a step of `lanes` with these `grows`; append the admits that it needs to `admits`."""

        def place(prefill: PrefillCandidate) -> bool:
            known = len(admits)
            placed = self._place(prefill, lanes, admits)
            if self._tier_seconds is not None and len(admits) > known:
                batch.copy(self._tier_seconds.by_lane(admits[known:]))
                prefill.moved = True  # what the copies leave of the step may be too little for its chunk
                request = self._table[prefill.id]
                if placed and request.fetches:
                    turn.fetch_at_once(request, self._fetching_seconds(batch, targets))
                    return not request.fetches
            return placed

        drafts: Drafts = {}
        proposals = Proposals()

        def draft(space: Space) -> None:
            nonlocal drafts, proposals
            if not self.speculator.is_off:
                drafts, proposals = self._guess(space, lanes, now)

        batch, targets = self._batch_of_decodes(lanes), self._tpot_targets(lanes)
        if self._tier_seconds is not None:
            batch.copy(self._tier_seconds.by_lane(admits, grows, self._admission.pools.pending_loads))
        turn = self.fetches.turn(batch, lanes, decodes=targets is not None)
        if targets is None:
            turn.fetch(self._fetching_seconds(batch, targets))
        packed = pack(batch, targets, self._by_urgency(lanes, now), self._limits, place, admits, draft)
        if targets is not None:  # they take part in the next step, so that decodes can run ahead
            turn.fetch(self._fetching_seconds(batch, targets))
        decodes = [request for lane in lanes for request in self._lanes[lane].decodes.take(lanes)]
        prefills = [(self._table[id_], count) for id_, count in packed.chunks.items()]
        entries = self._decode_entries(decodes, drafts, proposals)
        alone_seconds, continues = self._dispatch(prefills, entries) if prefills else (0.0, False)
        if entries:
            self._pace.launched(
                lanes,
                now,
                packed.predicted_seconds,
                alone_seconds * self._predictor.correction.prefill,
                with_decodes=targets is not None,
                continues=continues,
            )
        else:
            self.rested(lanes)
        self._lanes.couple()
        return BuiltStep(packed, entries, decodes, prefills, drafts, proposals, tuple(turn.taken))

    def write_through(self, lanes: tuple[int, ...]) -> None:
        """Let a step of `lanes` copy blocks that are offered to the store to host tiers, within a part of its time.

        Call it before all other changes of the step.
        """
        pools = self._admission.pools
        if self._tier_seconds is None or not pools.has_offers:
            return
        step_seconds = self._fetching_seconds(self._batch_of_decodes(lanes), self._tpot_targets(lanes))
        block_seconds = self._tier_seconds.offload_seconds(1)
        blocks = int(FETCH_SHARE * step_seconds / block_seconds) if block_seconds > 0 else pools.blocks
        pools.write_through(blocks)

    def _fetching_seconds(self, batch: Batch, targets: DecodeTargets | None) -> float:
        """Return the time of the step so far, beside which fetches can be copied; the longest allowed one without decodes."""
        longest = self._limits.max_step_seconds
        if targets is None:
            return longest / self._stages
        return batch.seconds() or min(targets.tpot_seconds, longest) / self._stages

    def _guess(self, space: Space, lanes: tuple[int, ...], now: float) -> tuple[Drafts, Proposals]:
        """Let the decodes of a step verify drafted tokens; return these, and the guesses that are proposed after them."""
        decodes = [
            request
            for lane in lanes
            for request in self._lanes[lane].decodes.runnable
            if request.runs_on(lanes)
        ]
        slack_seconds = self._table.least_slack_seconds(now, self._predictor.correction.prefill)
        return self.speculator.guess(
            space.batch,
            self._batch_of_decodes(lanes),
            decodes,
            prefills=len(space.packed.chunks),
            most_seconds=min(space.draft_seconds, space.batch.seconds() + slack_seconds),
            between_seconds=self._pace.between_seconds,
        )

    def prefers_drafts(self, lanes: tuple[int, ...], decodes: Sequence[Request]) -> bool:
        """Return whether decodes in flight should wait for their tokens, so that the next step can verify drafts."""
        if self.speculator.is_off:
            return False
        batch = Batch(self._predictor, lanes)
        for request in decodes:
            if request.is_spread:
                batch.add_spread_decode(request.lane, request.lane_tokens, is_masked=request.grammar != "")
            else:
                batch.add_decodes(request.lane, request.dispatched, 1, request.grammar != "")
        targets = self._tpot_targets(lanes)
        longest = 0.0 if targets is None else min(targets.tpot_seconds, self._limits.max_step_seconds)
        return self.speculator.prefers_drafts(batch, decodes, longest, self._pace.between_seconds)

    def _batch_of_decodes(self, lanes: tuple[int, ...]) -> Batch:
        batch = Batch(self._predictor, lanes, self._stream_seconds)
        for lane in lanes:
            decodes = self._lanes[lane].decodes
            decodes.add_to(batch, lane, lanes)
            if self._stream_seconds is not None:
                for request in decodes.runnable:
                    if request.streams and request.runs_on(lanes):
                        batch.stream(request.streamed_blocks)
        return batch

    def rested(self, lanes: tuple[int, ...]) -> None:
        """Record that `lanes` can take a step, and that there is nothing to fill it with."""
        self._pace.rested(lanes)

    def _dispatch(self, prefills: list[tuple[Request, int]], entries: list[StepEntry]) -> tuple[float, bool]:
        """Put chunks into a step.

        Return how long they would keep a stage busy alone, uncorrected, and whether one of the prefills has
        more to compute.
        """
        for request, count in prefills:
            if request.in_ring and self._context_parallel is not None:
                entries += self._ring_entries(request, count, self._context_parallel)
            else:
                entries.append(_entry(request, count))
        alone_seconds = self._table.busy_seconds([request for request, _ in prefills])
        dispatched: list[Request] = []
        for request, count in prefills:
            request.dispatch(count)
            if request.dispatched == request.length:
                dispatched.append(request)
        self._table.prefilled(dispatched)
        for request in dispatched:
            if request.is_long:
                self._admission.prefilled(request)
        go_on = [request for request, _ in prefills if request.row != NOWHERE]
        for request in go_on:
            self._progressed(request)
            if request.is_long and request.stalls:  # one token is left, for which no long prompt need wait
                self._admission.prefilled(request)
        alone_seconds -= self._table.busy_seconds(go_on)
        return alone_seconds, bool(go_on)

    def _place(self, prefill: PrefillCandidate, lanes: tuple[int, ...], admits: list[Admit]) -> bool:
        """Give KV to a waiting prefill; return False if there is none, or if it cannot take part in this step."""
        request = self._table[prefill.id]
        if not self.admit(request, admits):
            return False
        context, is_long = request.dispatched, request.dispatched >= self._long_threshold_tokens
        stop = request.may_dispatch_to
        remaining = stop - context
        prefill.moved = (context, remaining, request.lane) != (
            prefill.context,
            prefill.remaining,
            prefill.lane,
        )
        prefill.context, prefill.remaining, prefill.is_long = context, remaining, is_long
        prefill.rest, prefill.lane = request.length - stop, request.lane
        prefill.streamed_blocks = self._streamed_blocks(request)
        if request.in_ring:
            prefill.moved, prefill.in_ring, prefill.lane_tokens = True, True, request.lane_tokens
        prefill.waits = not request.runs_on(lanes)  # its cached prefix may couple further lanes
        return not prefill.waits and remaining > 0

    def admit(self, request: Request, admits: list[Admit]) -> bool:
        """Give KV to a waiting request; return False if there is none for it."""
        pending_seconds = self._pending_seconds()
        if not request.waits or not self._admission.has_place(request):
            return False
        if self._admission.lane_for(request, self._all_lanes, pending_seconds) is None:
            return False
        tokens = request.submit.tokens

        def remaining_seconds(cached_tokens: int) -> float:
            return self._predictor.prefill_seconds(cached_tokens, tokens)

        admit = self._admission.admit(request, pending_seconds, remaining_seconds)
        if admit is None:  # cached blocks that it counted on are gone, or KV is free elsewhere only
            self._sharing.update(request)
            if self._admission.lane_for(request, self._all_lanes, pending_seconds) is not None:
                self._table.misfits(request)
            return False
        admits.append(admit)
        self.fetches.begin(request)
        self._sharing.enter(request)
        if request.cached_tokens:
            self._progressed(request)
        self._lanes.remapped(request)
        return True

    def _progressed(self, request: Request) -> None:
        """Update the remaining work of a prefill with newly dispatched or cached positions."""
        left = self._predictor.uncorrected_prefill(request.dispatched, request.submit.tokens)
        self._table.progressed(request, left)

    def _decode_entries(
        self, decodes: Iterable[Request], drafts: Drafts, proposals: Proposals
    ) -> list[StepEntry]:
        """Return the entries of a step's decodes, and count these as dispatched, but not the tokens that they verify."""
        entries: list[StepEntry] = []
        one_token_at = self._one_token_at
        for request in decodes:
            name = request.id
            if request.is_spread or name in drafts or name in proposals.counts or name in proposals.follows:
                proposed, followed = proposals.counts.get(name, 0), proposals.follows.get(name, 0)
                entries.append(_entry(request, 1, drafts.get(name, ()), proposed, followed))
                request.dispatch(1)
                request.followed = request.dispatched if proposed else request.followed + followed
            else:  # the same, in a fraction of the time: benchmarks/scheduler.py, 256 decodes
                position = request.dispatched
                extents = one_token_at.get(position) or self._cached_extents(position)
                entries.append(StepEntry(request.id, request.lane, extents, True))
                request.dispatched = position + 1
                request.steps_in_flight += 1
        return entries

    def _cached_extents(self, position: int) -> tuple[Extent, ...]:
        """Create the extents of one token at `position`, cached for the next sequence that decodes there."""
        if len(self._one_token_at) >= MOST_POSITIONS:
            self._one_token_at.clear()
        extents = self._one_token_at[position] = (Extent(position, 1),)
        return extents

    def _ring_entries(
        self, request: Request, count: int, context_parallel: ContextParallel
    ) -> list[StepEntry]:
        """Return the entries of the next `count` positions of a prompt that lanes compute together."""
        assert request.shard_map is not None
        stop = request.dispatched + count
        return context_parallel.entries(
            request.id,
            request.lanes,
            request.dispatched,
            stop,
            samples=stop == request.length,
            shard_map_version=request.shard_map.version,
        )

    def _pending_seconds(self) -> list[float]:
        """Return `pending_by_lane` if there is a choice of lanes."""
        return [0.0] if self._has_one_lane else self.pending_by_lane()

    def pending_by_lane(self) -> list[float]:
        """Return the prefill seconds ahead of a new request on each lane, steps in flight included."""
        admitted = self._table.remaining_by_lane(len(self._lanes)) * self._predictor.correction.prefill
        return [
            seconds + sum(lane.in_flight_seconds.values())
            for lane, seconds in zip(self._lanes, admitted.tolist(), strict=True)
        ]

    def _tpot_targets(self, lanes: tuple[int, ...]) -> DecodeTargets | None:
        """Return the tightest targets of all decodes on `lanes`, less the time that passes between steps."""
        tightest = fair = inf
        decoding = False
        for lane in lanes:
            target = self._lanes[lane].decodes.targets
            if target is not None:
                decoding = True
                tightest = min(tightest, target.tpot_seconds)
                fair = min(fair, target.fair_tpot_seconds)
        if not decoding:
            return None
        between_seconds = self._pace.between_seconds
        passes = between_seconds * self._stages
        return DecodeTargets(
            max(tightest - passes, tightest * _LEAST_OF_TARGET),
            max(fair - passes, fair * _LEAST_OF_TARGET),
            between_seconds,
        )

    def _by_urgency(self, lanes: tuple[int, ...], now: float) -> Iterator[PrefillCandidate]:
        """Yield the prefills that a step on `lanes` may take, most urgent first: running, or finding KV.

        When admissions have used up the free KV, the remaining candidates are selected again instead of being
        tried one by one.
        """
        table = self._table
        if not table.rows:
            return
        ordered = self.prefill_order.select(
            table, self._predictor.correction.prefill, self._pace.of_prefills, now
        )
        if self.prefill_order.can_demote:
            self._sharing.leave_demoted()
        seen = np.zeros(len(table.rows), dtype=np.bool_)
        running = table.running_on(lanes)
        elsewhere = 0
        for turn in range(MOST_ORDERS):
            eligible = running
            may_retry = turn < MOST_ORDERS - 1 and elsewhere < MOST_ELSEWHERE
            if may_retry and table.waiting and not self._admission.is_full:
                eligible = running | table.admissible(self._admission.capacity(lanes))
            if turn:
                eligible = eligible & ~seen
            if not eligible.any():
                return
            for row in ordered(eligible):
                request = table.rows[row]
                seen[row] = True
                if request.stalls:
                    continue
                lane: int | None = request.lane
                if lane == NOWHERE:
                    if request.is_long and self._defers_to_others(request, now):
                        continue
                    lane = self._lane_for(request, lanes)
                elif not request.runs_on(lanes):
                    continue  # admitted with this step, and its cached prefix couples further lanes
                if lane is not None:
                    yield self._candidate(request, lane, now)
                    continue
                elsewhere += 1
                if self._has_one_lane or elsewhere >= MOST_ELSEWHERE:
                    break
            else:
                return

    def _streamed_blocks(self, request: Request) -> int:
        """Return about how many blocks of its context the next chunk of a prefill streams, on one lane."""
        if not request.streamed_blocks:
            return 0
        context_blocks = request.dispatched // (len(request.held_lanes) * self._block_size_tokens)
        return min(request.streamed_blocks, context_blocks + 1)

    def _defers_to_others(self, request: Request, now: float) -> bool:
        """Return whether a waiting long request leaves KV to others, because it is demoted.

        It does so until its revised deadline is near; then it is as urgent as any.
        """
        if not self._table.is_demoted(request) or not self._admission.longs_exceed_share:
            return False
        return self._table.due(request) - now > NEAR_REVISED_DEADLINE * self._table.remaining_seconds(request)

    def _lane_for(self, request: Request, lanes: Sequence[int]) -> int | None:
        """Return which of `lanes` has KV for a waiting request now, if any."""
        if not self._admission.has_place(request) or self._table.is_held(request):
            return None
        return self._admission.lane_for(request, lanes, self._pending_seconds())

    def _candidate(self, request: Request, lane: int, now: float) -> PrefillCandidate:
        """Return a request as a candidate for the packer; `lane` computes it, or would."""
        dispatched, stop = request.dispatched, request.may_dispatch_to
        waits = request.lane == NOWHERE
        if waits and request.prompt.sharing is not None:
            dispatched = request.submit.tokens - 1
        is_long = dispatched >= self._long_threshold_tokens
        relative_slack = 0.0
        if is_long:
            relative_slack = self._table.relative_slack(request, now, self._predictor.correction.prefill)
        candidate = PrefillCandidate(
            request.id,
            dispatched,
            stop - dispatched,
            is_long,
            relative_slack,
            lane,
            waits=waits,
            of_long_prompt=request.is_long,
            in_ring=request.in_ring,
            scores_prompt=request.scores_prompt,
            rest=request.length - stop,
            streamed_blocks=self._streamed_blocks(request),
        )
        if len(request.lanes) > 1:
            candidate.lane_tokens = request.lane_tokens
        return candidate


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


def _entry(
    request: Request, count: int, drafts: tuple[int, ...] = (), proposes: int = 0, follows: int = 0
) -> StepEntry:
    """Return the entry of a request's next `count` positions, which are not counted as dispatched yet, and of `drafts`."""
    extents = (Extent(request.dispatched, count + len(drafts)),)
    samples = request.dispatched + count == request.length
    if len(request.lanes) == 1:
        return StepEntry(
            request.id, request.lane, extents, samples, drafts=drafts, proposes=proposes, follows=follows
        )
    assert request.shard_map is not None
    return StepEntry(request.id, request.lane, extents, samples, "owner", request.shard_map.version, drafts)
