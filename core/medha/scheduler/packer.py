"""Sizes the next step: all runnable decodes, then prefill chunks under a time budget.

This is paper B, algorithms 1 and 2, with corrections (docs/design.md#filling-a-step):

* The *whole batch* is predicted for each candidate chunk, because the time of a step is not additive.
* A prefill that does not fit is set aside for this step and never requeued into the same loop.
* Only long requests yield space, only while another prefill is runnable, and unused space is returned to
  them.
* At most one long prefill runs per lane and step. A long prompt gets KV only at its turn, no earlier
  than in a step in which the long prompts before it end. Otherwise KV would fill with half-finished prompts.
* The most urgent prefill always gets its smallest efficient chunk, so that no flood of decodes starves it.

Which prefills take part, and which of them get KV, is decided in `step_builder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from medha.cost.correction import PartedSeconds
from medha.cost.predictor import Predictor, Work
from medha.cost.stream_seconds import StreamSeconds
from medha.kv.context_parallel import share_tokens, shared_tokens

MOST_PREFILLS = 32
"""Most prefill chunks in a step: more would each be too small to matter, and each costs controller time."""
FAIR_SHARE = 0.975
"""Share of the prefill rate under classes' own TPOT targets that is kept if streams ask for tighter ones."""
IDLE_EFFICIENCY = 0.98
"""Share of the best prefill rate that a long chunk keeps while nothing decodes, so that arrivals wait less."""


@dataclass(slots=True)
class DecodeTargets:
    """Tightest TPOT targets of all running decodes, whether or not their next token is in this step."""

    tpot_seconds: float
    fair_tpot_seconds: float  # the same without targets tighter than those of the classes
    between_seconds: float = 0.0  # time between two steps that belongs to neither


# Not frozen: a decision creates dozens, and frozen initializers take longer than all the other work on them.
@dataclass(slots=True)
class PrefillCandidate:
    id: str
    context: int  # positions already dispatched
    remaining: int  # positions that it may dispatch now
    is_long: bool
    relative_slack: float  # rho, for space sharing
    lane: int = 0  # the lane that computes it
    lane_tokens: Mapping[int, int] = field(default_factory=dict)  # KV by lane, if several take part
    waits: bool = False  # it holds no KV yet, so the other fields are expected values
    moved: bool = False  # it was placed otherwise than expected
    rest: int = 0  # positions after `remaining`, for later steps
    of_long_prompt: bool = False  # its whole prompt is long, however little of it is computed
    in_ring: bool = False  # the lanes of `lane_tokens` share its chunk
    scores_prompt: bool = False  # all of its rows pass the output head
    streamed_blocks: int = 0  # that its chunk reads from host memory

    def head_rows(self, count: int) -> int:
        """Return how many of `count` rows of its chunk pass the output head."""
        return count if self.scores_prompt else 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step; tokens count all sequences of a lane together."""

    stages: int
    max_chunk_tokens: int
    min_chunk_tokens: int
    max_step_seconds: float
    min_prefill_share: float
    space_sharing_cap: float
    idle_efficiency: float = IDLE_EFFICIENCY


@dataclass(slots=True)
class Packed:
    """Prefill tokens by request, and why the step is as large as it is (seconds)."""

    chunks: dict[str, int] = field(default_factory=dict)
    predicted_seconds: float = 0.0
    uncorrected: PartedSeconds = field(default_factory=PartedSeconds)  # before correction, in its parts
    streamed_blocks: int = 0  # summed over its sequences, for each on the lane that streams most of it
    is_streaming: bool = False  # streaming takes longer than computing, and nothing else is copied beside it
    copies_bind: bool = False  # copies take longer than the layers, so its time does not show the latter's
    budget_seconds: float = 0.0
    misses_tpot: bool = False  # it takes longer than the tightest TPOT target of its decodes


class Batch:
    """A step under construction on one lane, or on several that run in lock step."""

    def __init__(
        self, predictor: Predictor, lanes: Sequence[int] = (0,), streaming: StreamSeconds | None = None
    ) -> None:
        self._predictor = predictor
        self._streaming = streaming
        self.streamed_blocks = 0
        """Blocks that the step streams from host memory."""
        self._tallies = {lane: predictor.tally() for lane in lanes}
        self._alone = self._tallies[lanes[0]] if len(lanes) == 1 else None
        self._exchanged_queries = 0
        self._exchanged_decodes = 0  # those of them that are decodes
        self._copies: dict[int, float] = {}  # seconds of copies to and from the host tier, by lane
        self._copy_seconds = 0.0  # of the lane where they take longest; computing begins after them
        self._beside: dict[int, float] = {}  # seconds that copies beside the layers take, by lane
        self.fetch_seconds = 0.0
        """The time of fetches beside the layers, on the lane where they take longest, after correction."""
        self._exchanged_guesses = 0  # queries of guesses, on top of all these
        self.proposal_seconds = 0.0
        """The time that a draft model takes after the step, corrected."""

    @property
    def lanes(self) -> Iterable[int]:
        return self._tallies

    def add_decodes(self, lane: int, contexts_tokens: int, count: int, masked: int = 0) -> None:
        """Add `count` decodes whose KV, `contexts_tokens` in all, lies on `lane` alone; `masked` follow a grammar."""
        self._tallies[lane].add_decodes(contexts_tokens, count, masked)

    def add_spread_decode(
        self, lane: int, lane_tokens: Mapping[int, int], *, is_masked: bool = False
    ) -> None:
        """Add a decode that `lane` computes and whose KV lies on several lanes; `is_masked`: it follows a grammar."""
        for holder, tokens in lane_tokens.items():
            work = Work(tokens, 1, attention_only=holder != lane)
            self._tallies[holder].add_decode(work, is_masked=is_masked)
        self._exchanged_queries += len(lane_tokens) > 1
        self._exchanged_decodes += len(lane_tokens) > 1

    def add_drafted(
        self, lane: int, lane_tokens: Mapping[int, int], context: int, count: int, *, is_masked: bool = False
    ) -> None:
        """Let a decode that `lane` computes verify its `count`-th drafted token.

        Its KV is `context` tokens on that lane, or `lane_tokens` if several lanes hold it.
        """
        self._draft(lane, lane_tokens, context, count, 1, is_masked)

    def remove_drafted(
        self, lane: int, lane_tokens: Mapping[int, int], context: int, count: int, *, is_masked: bool = False
    ) -> None:
        """Undo `add_drafted`."""
        self._draft(lane, lane_tokens, context, count, -1, is_masked)

    def copy(self, seconds_by_lane: Mapping[int, float]) -> None:
        """Add copies between KV pool and host tier, in seconds by lane, which are made before the step computes."""
        for lane, seconds in seconds_by_lane.items():
            if lane in self._tallies:
                self._copies[lane] = self._copies.get(lane, 0.0) + seconds
                self._copy_seconds = max(self._copy_seconds, self._copies[lane])

    def stream(self, blocks: int) -> None:
        """Add blocks that a decode of the step streams from host memory."""
        self.streamed_blocks += blocks

    def copy_beside(self, seconds_by_lane: Mapping[int, float]) -> None:
        """Add copies from host tier to KV pool, in seconds by lane, which are made while the step computes."""
        for lane, seconds in seconds_by_lane.items():
            if lane in self._tallies:
                self._beside[lane] = self._beside.get(lane, 0.0) + seconds
                self.fetch_seconds = max(self.fetch_seconds, self._beside[lane])

    def beside_seconds(self, more_blocks: int = 0) -> float:
        """Return the time of all copies from host memory beside the layers, if `more_blocks` more are streamed.

        Fetched and streamed blocks share a link, so their times add up.
        """
        return self.fetch_seconds + self._streaming_seconds(more_blocks)

    def _streaming_seconds(self, more_blocks: int = 0) -> float:
        blocks = self.streamed_blocks + more_blocks
        return self._streaming.seconds(blocks) if blocks and self._streaming is not None else 0.0

    def _draft(
        self, lane: int, lane_tokens: Mapping[int, int], context: int, count: int, sign: int, is_masked: bool
    ) -> None:
        for holder, tokens in lane_tokens.items() or ((lane, context),):
            work = Work(tokens, count, attention_only=holder != lane)
            self._tallies[holder].draft(work, sign, is_masked=is_masked)
        if len(lane_tokens) > 1:
            self._exchanged_guesses += sign

    def add(self, prefill: PrefillCandidate, count: int) -> None:
        """Add a chunk of `count` tokens."""
        self.streamed_blocks += prefill.streamed_blocks
        if not prefill.lane_tokens:
            self._tallies[prefill.lane].add_chunk(prefill.context, count, prefill.head_rows(count))
            return
        for holder, work in _shares(prefill, count):
            self._tallies[holder].add(work)
        self._exchanged_queries += count

    def remove(self, prefill: PrefillCandidate, count: int) -> None:
        """Remove a chunk that `add` added."""
        self.streamed_blocks -= prefill.streamed_blocks
        if not prefill.lane_tokens:
            work = Work(prefill.context, count, head_rows=prefill.head_rows(count))
            self._tallies[prefill.lane].remove(work)
            return
        for holder, work in _shares(prefill, count):
            self._tallies[holder].remove(work)
        self._exchanged_queries -= count

    def seconds(self) -> float:
        """Return the predicted time of the step."""
        return self.corrected(self.parted_seconds())

    def corrected(self, predicted: PartedSeconds) -> float:
        """Return the corrected time of a step with this prediction, its copies and its draft model included."""
        computed_seconds = self._predictor.correction.seconds(predicted)
        return max(computed_seconds, self.beside_seconds()) + self._copy_seconds + self.proposal_seconds

    def is_streaming(self, predicted: PartedSeconds) -> bool:
        """Return whether a step with this prediction streams KV for longer than it computes, and fetches none."""
        return not self.fetch_seconds and self.copies_bind(predicted)

    def copies_bind(self, predicted: PartedSeconds) -> bool:
        """Return whether the copies beside the layers take longer than a step with this prediction computes."""
        return self.beside_seconds() > self._predictor.correction.seconds(predicted)

    def parted_seconds(self) -> PartedSeconds:
        """Return the predicted time before correction, in its parts, without that of the draft model."""
        if self._alone is not None:
            return self._alone.parted_seconds()
        return self._predictor.coupled_parted_seconds(
            list(self._tallies.values()),
            self._exchanged_queries,
            self._exchanged_decodes,
            self._exchanged_guesses,
        )

    def seconds_with(self, prefill: PrefillCandidate, count: int) -> float:
        """Return the predicted time of the step with one more chunk."""
        if self._alone is not None:
            seconds = self._alone.seconds_with(prefill.context, count, prefill.head_rows(count))
            return max(seconds, self.beside_seconds(prefill.streamed_blocks)) + self._copy_seconds
        self.add(prefill, count)
        seconds = self.seconds()
        self.remove(prefill, count)
        return seconds

    def largest(self, prefill: PrefillCandidate, most: int, budget_seconds: float, least: int = 1) -> int:
        """Return the largest chunk of `least` to `most` tokens with which the step fits the budget, or 0.

        A chunk that streams KV may take as long as that takes: its tokens cost nothing more.
        """
        if most < least:
            return 0
        if prefill.streamed_blocks:
            streaming_seconds = self.beside_seconds(prefill.streamed_blocks)
            budget_seconds = max(budget_seconds, streaming_seconds + self._copy_seconds)
        above = self.seconds_with(prefill, most)
        if above <= budget_seconds:
            return most
        below = self.seconds_with(prefill, least)
        if below > budget_seconds:
            return 0
        low, high = least, most  # fits at low, not at high
        tries = 0
        while high - low > 1:
            # Time is nearly linear in the count. Where it is not, every third try bisects to bound the
            # search.
            guess = low + int((high - low) * (budget_seconds - below) / (above - below))
            tries += 1
            middle = min(max(guess, low + 1), high - 1) if tries % 3 else (low + high) // 2
            seconds = self.seconds_with(prefill, middle)
            if seconds <= budget_seconds:
                low, below = middle, seconds
            else:
                high, above = middle, seconds
        return low

    def efficient_seconds(
        self,
        prefill: PrefillCandidate,
        limits: Limits,
        budget_seconds: float,
        share: float,
        between_seconds: float = 0.0,
    ) -> float:
        """Return the time of the smallest step with `share` of the prefill rate of the largest in budget.

        Rates are those of an endless prompt that continues from `prefill`'s context, with `between_seconds`
        from the end of a step to the start of the next. The result never exceeds the budget.
        """
        largest = self.largest(prefill, limits.max_chunk_tokens, budget_seconds)
        if largest <= limits.min_chunk_tokens:
            return budget_seconds
        rate = share * largest / (self.seconds_with(prefill, largest) + between_seconds)
        size = _first(
            lambda count: count >= rate * (self.seconds_with(prefill, count) + between_seconds), largest
        )
        return min(self.seconds_with(prefill, max(size, limits.min_chunk_tokens)), budget_seconds)


class Space:
    """The space that a step has for prefills: seconds of its budget, and tokens on each of its lanes."""

    def __init__(
        self,
        batch: Batch,
        targets: DecodeTargets | None,
        head: Sequence[PrefillCandidate],
        limits: Limits,
    ) -> None:
        """Set the budget of a step that already holds its decodes.

        Args:
            batch: the step, with its decodes.
            targets: targets of the running decodes; None if there are none.
            head: the most urgent prefills, at least two if there are as many.
        """
        decodes = batch.parted_seconds()
        self.packed = Packed(predicted_seconds=batch.corrected(decodes))
        self.yielding: list[PrefillCandidate] = []
        """Long prefills that leave space to others, most urgent first."""
        self._batch = batch
        self._targets = targets
        self._limits = limits
        self._is_shared = len(head) > 1
        self._long_lanes: set[int] = set()  # lanes with a long prefill in this step
        self._continuing: set[int] = set()  # lanes on which a long prompt has more to compute after this step
        self._tokens_left = dict.fromkeys(batch.lanes, limits.max_chunk_tokens)
        self._has_decodes = decodes.whole > 0
        self._set_budget(head[0] if head else None)

    def _set_budget(self, first: PrefillCandidate | None) -> None:
        packed, batch, targets, limits = self.packed, self._batch, self._targets, self._limits
        longest = limits.max_step_seconds / limits.stages  # an arrival may wait that long to be considered
        if targets is None:
            packed.budget_seconds = longest
            if first is not None and first.is_long and limits.idle_efficiency < 1:
                packed.budget_seconds = batch.efficient_seconds(
                    first, limits, longest, limits.idle_efficiency
                )
            return
        target = targets.tpot_seconds / limits.stages
        least = packed.predicted_seconds / (1 - limits.min_prefill_share)
        packed.budget_seconds = max(min(target, longest), least)
        fair = max(min(targets.fair_tpot_seconds / limits.stages, longest), least)
        if first is not None and fair > packed.budget_seconds:
            floor = batch.efficient_seconds(first, limits, fair, FAIR_SHARE, targets.between_seconds)
            packed.budget_seconds = max(packed.budget_seconds, floor)

    @property
    def is_empty(self) -> bool:
        """True if the step has neither decodes nor chunks."""
        return not (self._has_decodes or self.packed.chunks)

    @property
    def is_full(self) -> bool:
        """True if no further prefill may take part."""
        return len(self.packed.chunks) == MOST_PREFILLS or not any(self._tokens_left.values())

    def has_long(self, prefill: PrefillCandidate) -> bool:
        """Return whether a lane that computes `prefill` already has a long one."""
        if prefill.in_ring:
            return not self._long_lanes.isdisjoint(prefill.lane_tokens)
        return prefill.lane in self._long_lanes

    def is_its_turn(self, prefill: PrefillCandidate) -> bool:
        """Return whether a waiting prefill may get KV.

        A long prompt waits until the long prompts before it, on its lane, have no more to compute.
        """
        return not (prefill.of_long_prompt and prefill.lane in self._continuing)

    def share_seconds(self, prefill: PrefillCandidate) -> float:
        """Return the part of the budget that a prefill may fill at first; a long one yields by its slack."""
        if not (prefill.is_long and self._is_shared):
            return self.packed.budget_seconds
        self.yielding.append(prefill)
        yielded = min(max(prefill.relative_slack, 0.0), self._limits.space_sharing_cap)
        return self.packed.budget_seconds * (1 - yielded)

    def largest_chunk(self, prefill: PrefillCandidate, budget_seconds: float, held: int = 0) -> int:
        """Return the tokens of the largest chunk that fits; 0 if not even the smallest one fits.

        The first prefill that gets a chunk gets at least its smallest one, even beyond the budget. A prefill
        that already has `held` tokens keeps them.
        """
        left = self._tokens_left.get(prefill.lane, 0)
        if prefill.in_ring:
            lanes = prefill.lane_tokens
            left = shared_tokens(min(self._tokens_left.get(lane, 0) for lane in lanes), len(lanes))
        most = min(prefill.remaining, left + held)
        least = min(self._limits.min_chunk_tokens, prefill.remaining)
        size = self._batch.largest(prefill, most, budget_seconds, least)
        if size < least:
            size = 0 if self.packed.chunks else min(least, most)
        return max(size, held)

    def add(self, prefill: PrefillCandidate, tokens: int, held: int = 0) -> bool:
        """Add a chunk of a prefill that holds KV, or return False if the chunk is empty: the prefill is set aside.

        It replaces a chunk of `held` tokens.
        """
        if prefill.of_long_prompt and tokens < prefill.remaining + prefill.rest:
            self._continuing.add(prefill.lane)
        if tokens == 0:
            return False
        self._batch.add(prefill, tokens)
        self.packed.chunks[prefill.id] = tokens
        if prefill.in_ring:
            for lane in prefill.lane_tokens:
                self._tokens_left[lane] -= share_tokens(tokens, len(prefill.lane_tokens))
                self._tokens_left[lane] += share_tokens(held, len(prefill.lane_tokens))
        else:
            self._tokens_left[prefill.lane] -= tokens - held
        if prefill.is_long:
            self._long_lanes.update(prefill.lane_tokens if prefill.in_ring else (prefill.lane,))
        return True

    def enlarge(self, prefill: PrefillCandidate) -> None:
        """Make a chunk as large as the whole budget allows."""
        held = self.packed.chunks[prefill.id]
        self._batch.remove(prefill, held)
        self.add(prefill, self.largest_chunk(prefill, self.packed.budget_seconds, held), held)

    @property
    def batch(self) -> Batch:
        """The step."""
        return self._batch

    @property
    def draft_seconds(self) -> float:
        """Longest time of the step if it verifies drafted tokens: within every decode's TPOT target."""
        if self._targets is None:
            return 0.0
        return min(self._targets.tpot_seconds, self._limits.max_step_seconds) / self._limits.stages

    def close(self) -> Packed:
        """Return how the step is filled."""
        packed, targets = self.packed, self._targets
        packed.uncorrected = self._batch.parted_seconds()
        packed.predicted_seconds = self._batch.corrected(packed.uncorrected)
        packed.streamed_blocks = self._batch.streamed_blocks
        packed.is_streaming = self._batch.is_streaming(packed.uncorrected)
        packed.copies_bind = self._batch.copies_bind(packed.uncorrected)
        if targets is not None:
            # The tolerance keeps rounding errors of the sum from counting as a miss.
            packed.misses_tpot = packed.predicted_seconds > targets.tpot_seconds / self._limits.stages * (
                1 + 1e-9
            )
        return packed


def _shares(prefill: PrefillCandidate, count: int) -> Iterator[tuple[int, Work]]:
    """Yield each lane's work for a chunk of a prompt on several lanes.

    Outside of a ring, one lane computes the chunk, and the others attend to their keys for it. The lanes of a ring compute
    equal parts, whose queries see equally many keys on average.
    """
    if not prefill.in_ring:
        for lane, tokens in prefill.lane_tokens.items():
            yield lane, Work(tokens, count, lane != prefill.lane, prefill.head_rows(count))
        return
    lanes = len(prefill.lane_tokens)
    for index, lane in enumerate(prefill.lane_tokens):
        share = (count + index) // lanes
        if share:
            context = prefill.context + (count - share) // 2
            yield lane, Work(context, share, head_rows=prefill.head_rows(share))


def _first(holds: Callable[[int], bool], most: int) -> int:
    """Return the smallest count in 1 .. `most` for which `holds` is true, by bisection; it is at `most`."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
