"""The lanes of a replica: which of them can take a step now, which move together, and what decodes on each.

Lanes that share a running request are *coupled*: they run the same steps in lock step. A lane joins a request
only once KV of the request is to be written there, so a long prefill begins on one lane and couples another
one each time that it enters a new shard. Lanes that share nothing step independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from medha.scheduler.packer import Batch, DecodeTargets
from medha.scheduler.request import Request


@dataclass(slots=True)
class Decodes:
    """The decodes of one lane, aggregated so that the packer need not examine each.

    Requests in `runnable` have a next token to compute. `contexts_tokens` sums the KV of those that lie on this lane
    alone. Targets count every running decode, also those whose token is in flight: they wait for this step just the same.
    """

    runnable: list[Request] = field(default_factory=list)
    contexts_tokens: int = 0  # KV tokens of the runnable requests, without the spread ones
    masked: int = 0  # runnable requests that follow a grammar, without the spread ones
    spread: list[Request] = field(default_factory=list)  # runnable requests whose KV lies on several lanes
    starved: list[Request] = field(default_factory=list)  # requests that have used up their KV
    _targets: dict[tuple[float, float], int] = field(default_factory=dict)
    targets: DecodeTargets | None = None
    """The tightest targets; None if nothing decodes."""

    def begin(self, request: Request) -> None:
        """Add the targets of a request that got its first token."""
        target = (request.targets.tpot_seconds, request.targets.fair_tpot_seconds)
        self._targets[target] = self._targets.get(target, 0) + 1
        if self._targets[target] == 1:
            self._tighten()

    def end(self, request: Request) -> None:
        """Remove a decoding request that has ended."""
        target = (request.targets.tpot_seconds, request.targets.fair_tpot_seconds)
        self._targets[target] -= 1
        if self._targets[target] == 0:
            del self._targets[target]
            self._tighten()
        for where in (self.runnable, self.starved):
            if request in where:
                where.remove(request)
                if where is self.runnable:
                    self._leave(request)

    def add(self, request: Request) -> None:
        """Add a request whose next token may be computed, once there is KV for it."""
        if request.length > request.reserved_tokens:
            self.starved.append(request)
            return
        self.runnable.append(request)
        if request.is_spread:
            self.spread.append(request)
        else:
            self.contexts_tokens += request.dispatched
            self.masked += request.grammar != ""

    def take(self, lanes: Sequence[int]) -> list[Request]:
        """Take all runnable requests into a step of `lanes`; any that just grew to another lane stays."""
        removed, stay = self.runnable, [one for one in self.spread if not one.runs_on(lanes)]
        if stay:
            removed = [request for request in removed if request not in stay]
        self.runnable, self.spread, self.contexts_tokens, self.masked = list(stay), stay, 0, 0
        return removed

    def _leave(self, request: Request) -> None:
        if request.is_spread:
            self.spread.remove(request)
        else:
            self.contexts_tokens -= request.dispatched
            self.masked -= request.grammar != ""

    def add_to(self, batch: Batch, lane: int, lanes: Sequence[int]) -> None:
        """Add the runnable requests of `lane` to a step of `lanes`."""
        alone = len(self.runnable) - len(self.spread)
        if alone:
            batch.add_decodes(lane, self.contexts_tokens, alone, self.masked)
        for request in self.spread:
            if request.runs_on(lanes):
                batch.add_spread_decode(lane, request.lane_tokens, is_masked=request.grammar != "")

    def _tighten(self) -> None:
        self.targets = None
        if self._targets:
            tpot_seconds, fair_seconds = zip(*self._targets, strict=True)
            self.targets = DecodeTargets(min(tpot_seconds), min(fair_seconds))


@dataclass(slots=True)
class Lane:
    """The controller's view of a lane."""

    index: int
    stages: int
    stage_free: bool = True
    newest_step: int = -1
    in_flight_seconds: dict[int, float] = field(default_factory=dict)  # predicted, by step
    decodes: Decodes = field(default_factory=Decodes)
    quarantined: int = 0  # ended requests that are still in a step in flight

    @property
    def can_start_step(self) -> bool:
        """True if stage 0 is free and the pipeline is not full."""
        return self.stage_free and len(self.in_flight_seconds) < self.stages

    def launched(self, step_id: int, predicted_seconds: float) -> None:
        self.in_flight_seconds[step_id] = predicted_seconds
        self.newest_step = step_id
        self.stage_free = False

    def left_stage_0(self, step_id: int) -> None:
        """Mark stage 0 as free if this is the newest step.

        An older step's `StageFree` may arrive late: its `Done` can overtake it on another link.
        """
        if step_id == self.newest_step:
            self.stage_free = True

    def done(self, step_id: int) -> None:
        del self.in_flight_seconds[step_id]
        if not self.in_flight_seconds:
            self.stage_free = True  # a step that is done has left every stage


class Lanes:
    """All lanes of a replica, and which of them move together."""

    def __init__(self, lanes: int, stages: int) -> None:
        self._lanes = [Lane(index, stages) for index in range(lanes)]
        self._spread: dict[str, Request] = {}  # running requests whose KV lies on several lanes
        self.coupled = coupled(lanes, ())
        """The partition of lanes into sets that move together."""

    def __getitem__(self, index: int) -> Lane:
        return self._lanes[index]

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def __len__(self) -> int:
        return len(self._lanes)

    def can_start_step_on(self, lanes: Sequence[int]) -> bool:
        """Return whether each of `lanes` can take a step."""
        for lane in lanes:  # noqa: SIM110 - a generator takes longer
            if not self._lanes[lane].can_start_step:
                return False
        return True

    def lone_step(self, lanes: Sequence[int]) -> int | None:
        """Return the only step in flight on `lanes` if all of them run it, on a single stage; else None."""
        newest = self._lanes[lanes[0]].newest_step
        for lane in lanes:
            here = self._lanes[lane]
            if here.stages > 1 or len(here.in_flight_seconds) != 1 or here.newest_step != newest:
                return None
        return newest

    def are_free(self, lanes: Sequence[int]) -> bool:
        """Return whether stage 0 of each of `lanes` is free."""
        return all(self._lanes[lane].stage_free for lane in lanes)

    def decode(self, lanes: Sequence[int]) -> bool:
        """Return whether a request on `lanes` has a token to compute, even if it still lacks KV for it."""
        for lane in lanes:
            decodes = self._lanes[lane].decodes
            if decodes.runnable or decodes.starved:
                return True
        return False

    def remapped(self, request: Request) -> None:
        """Record that a request was given KV, or more KV, perhaps on further lanes."""
        if request.is_spread:
            self._spread[request.id] = request
            self.couple()

    def ended(self, request: Request) -> None:
        """Record that a running request needs no more steps."""
        if request.is_spread:
            del self._spread[request.id]
            self.couple()

    def couple(self) -> None:
        """Update the partition: lanes join requests as these progress."""
        if self._spread or len(self.coupled) < len(self._lanes):
            self.coupled = coupled(len(self._lanes), self._spread.values())


def coupled(lanes: int, requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Return the partition of lanes into sets that move together, each in ascending order."""
    together = [{lane} for lane in range(lanes)]
    for request in requests:
        joined = set().union(*(together[lane] for lane in request.lanes))
        for lane in joined:
            together[lane] = joined
    return sorted({tuple(sorted(group)) for group in together})
