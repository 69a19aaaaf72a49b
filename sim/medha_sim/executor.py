"""The ranks of a replica under a virtual clock: the times when stages become free, and the tokens sampled.

A step enters stage 0 of the lanes that it names, passes one stage after the other, and leaves at the last.
Each stage of each lane works on one step at a time, in launch order (`StageFree` of stage 0 lets the
controller launch the next one: stream pipelining, paper B §3.2). Lanes that share a step run in lock-step:
stage s begins on all of them when it is free on all of them, and takes as long as the slowest.

A `StepCost` determines how long a stage is busy. `PredictorCost` uses a ground-truth predictor, separate from
the controller's own. `Perturbed` adds bias and noise, so that the controller's prediction error can be
studied.

A sampled token is its position, so a guess at it is right if it is that number. A `Guesser` makes the guesses, as
prompt lookup, a draft model or a head does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import Protocol

import numpy as np

from medha.cost.predictor import Predictor, Work
from medha.cost.tier_seconds import fetch_seconds, offload_seconds
from medha.kv.lane_replay import admitted_map, grown_map
from medha.shards import ShardMap
from medha.wire.messages import ControllerEvent, Done, HostTierFigures, Sample, StageFree, Step, StepEntry


@dataclass(slots=True)
class StepTiming:
    """Time that a step keeps each stage busy, and time in transit after each stage (seconds)."""

    stage_seconds: tuple[float, ...]  # with copies
    transit_seconds: float = 0.0  # hop to the next stage; after the last one, sampling
    copy_seconds: float = 0.0  # in each stage, of copies between KV pool and host tier
    waits_seconds: float = (
        0.0  # the part of each stage's time in which it computes nothing, because of copies
    )
    slowness: float = 1.0  # factor by which the ranks are slower than predicted, in this step
    draft_seconds: float = 0.0  # the part of the last stage's time in which a draft model or head computes

    def draft(self, seconds: float) -> None:
        """Let the last stage, which samples, propose guesses after the step; `seconds` is as predicted."""
        self.draft_seconds = seconds * self.slowness
        *others, last = self.stage_seconds
        self.stage_seconds = (*others, last + self.draft_seconds)


Drafts = tuple[tuple[str, tuple[int, ...]], ...]
"""Guesses at the next tokens of sequences, as in `Done.drafts`."""


class StepCost(Protocol):
    """The ground truth of a replica: the cost of a step on its ranks."""

    def __call__(self, step: Step, now: float, /) -> StepTiming:
        """Return the timing of a step.

        Called once for each step, in launch order, so that it may track admits and releases.

        `now` is the simulated time of the launch, seconds.
        """


class Guesser(Protocol):
    """The part of a replica that guesses tokens."""

    def __call__(self, step: Step, samples: Sequence[Sample], /) -> tuple[Drafts, float]:
        """Return the guesses that come with a step's samples, and the seconds that they take on the rank that samples.

        Called once for each step, in launch order.
        """


class PredictorCost:
    """A predictor's times as the ground truth. Every stage is as slow as the slowest.

    Shard maps are tracked as ranks track them, so that a coupled step is charged for the KV that each lane
    holds.
    """

    def __init__(self, truth: Predictor, host_tier: HostTierFigures | None = None) -> None:
        """`truth` must not be shared: a controller's predictor corrects itself, the truth does not.

        `host_tier` has the times of copies, if the lanes have a host tier.
        """
        self._truth = truth
        self._host_tier = host_tier
        self._stages = truth.topology.stream
        self._hops: dict[int, float] = {}  # tokens -> seconds
        self._shards: dict[str, ShardMap] = {}  # of sequences on several lanes

    def __call__(self, step: Step, _now: float) -> StepTiming:
        if self._truth.topology.kv > 1:
            self._place(step)
        timing = self._computed(step)
        if self._host_tier is not None:
            offloaded = offload_seconds(self._host_tier, step.admits, step.grows, step.loads)
            fetched = fetch_seconds(self._host_tier, step.fetches)
            before = max(offloaded.get(lane, 0.0) for lane in step.lanes)
            beside = max(fetched.get(lane, 0.0) for lane in step.lanes)
            busiest = max(timing.stage_seconds)
            timing.copy_seconds = before + beside
            timing.waits_seconds = before + max(beside - busiest, 0.0)
            timing.stage_seconds = tuple(before + max(seconds, beside) for seconds in timing.stage_seconds)
        return timing

    def _computed(self, step: Step) -> StepTiming:
        if not step.entries:
            return StepTiming((0.0,) * self._stages)
        if len(step.lanes) > 1:
            return self._coupled(step)
        tally = self._truth.tally()
        decodes = contexts = 0
        for entry in step.entries:
            extents = entry.extents
            first = extents[0]
            if first.count == 1 and len(extents) == 1:
                decodes += 1
                contexts += first.start
            else:
                tally.add(_work(entry, first.start))
        tally.add_decodes(contexts, decodes)
        return StepTiming((tally.seconds(),) * self._stages, self._hop(tally.tokens))

    def _coupled(self, step: Step) -> StepTiming:
        tallies = {lane: self._truth.tally() for lane in step.lanes}
        exchanged_queries = 0
        for entry in step.entries:
            start, count = entry.extents[0].start, entry.token_count
            shards = self._shards.get(entry.id)
            if shards is None:
                tallies[entry.lane].add(_work(entry, start))
                continue
            lengths = shards.local_lengths(start)
            tallies[entry.lane].add(_work(entry, lengths.pop(entry.lane, 0)))
            for lane, tokens in lengths.items():
                tallies[lane].add(Work(tokens, count, attention_only=True))
            if len(shards.participants(start + count)) > 1:
                exchanged_queries += count
        seconds = self._truth.coupled_tally_seconds(list(tallies.values()), exchanged_queries)
        return StepTiming(
            (seconds,) * self._stages, self._hop(max(tally.tokens for tally in tallies.values()))
        )

    def _place(self, step: Step) -> None:
        """Update the shard maps of sequences from a step's releases, grows and admits."""
        for id_ in step.releases:
            self._shards.pop(id_, None)
        for grow in step.grows:
            shards = self._shards.get(grow.id)
            if shards is not None:
                self._shards[grow.id] = grown_map(shards, grow)
        for admit in step.admits:
            if len(admit.segments) > 1 or admit.stripings:
                self._shards[admit.id] = admitted_map(admit)

    def _hop(self, tokens: int) -> float:
        if self._stages == 1:
            return 0.0
        seconds = self._hops.get(tokens)
        if seconds is None:
            seconds = self._hops[tokens] = float(self._truth.profile.hop.seconds(np.array([tokens]))[0])
        return seconds


def _work(entry: StepEntry, context: int) -> Work:
    """Return what the lane of an entry computes; each verified guess is one more row that is sampled."""
    return Work(context, entry.token_count, head_rows=1 + len(entry.drafts))


class Perturbed:
    """Another cost, times `bias` and log-normal noise of mean one (one draw a step, shared by all stages)."""

    def __init__(self, cost: StepCost, *, bias: float, noise: float, generator: np.random.Generator) -> None:
        """`noise` is the standard deviation of the factor; `generator` must not be shared."""
        self._cost = cost
        self._bias = bias
        self._sigma = sqrt(log(1 + noise * noise))
        self._generator = generator

    def __call__(self, step: Step, now: float) -> StepTiming:
        timing = self._cost(step, now)
        factor = self._bias
        if self._sigma > 0:
            factor *= float(self._generator.lognormal(-self._sigma * self._sigma / 2, self._sigma))
        return StepTiming(
            tuple(seconds * factor for seconds in timing.stage_seconds),
            timing.transit_seconds * factor,
            timing.copy_seconds * factor,
            timing.waits_seconds * factor,
            timing.slowness * factor,
        )


@dataclass(slots=True)
class Launched:
    """The events and the timing of a launched step."""

    events: tuple[tuple[float, ControllerEvent], ...]  # (time when it reaches the controller, event)
    timing: StepTiming
    begun_at: float = 0.0  # when all stages have begun it
    right_guesses: int = 0  # of those that it verifies


class Executor:
    """Runs steps on `lanes` pipelines of `stages` stages."""

    def __init__(
        self,
        cost: StepCost,
        *,
        stages: int,
        lanes: int,
        ends_at: Mapping[str, int],
        message_seconds: float = 0.0,
        guesser: Guesser | None = None,
    ) -> None:
        """`ends_at` is the length (prompt and output) at which each sequence samples its stop token;
        `message_seconds` is the latency of a message between controller and ranks, in each direction.
        Without a `guesser`, no step verifies guesses."""
        self._cost = cost
        self._guesser = guesser
        self._stages = stages
        self._message_seconds = message_seconds
        self._ends_at = ends_at
        self._free_at = [[0.0] * lanes for _ in range(stages)]  # [stage][lane]
        self._done_at = [0.0] * lanes  # steps end in order, however long each is in transit

    @property
    def guesses(self) -> bool:
        """True if its ranks guess tokens, or the process around the controller does."""
        return self._guesser is not None

    def launch(self, step: Step, now: float) -> Launched:
        """Queue a step that the controller launches at `now` after those already in the pipeline."""
        timing = self._cost(step, now)
        samples = self._samples(step)
        drafts: Drafts = ()
        right_guesses = 0
        if self._guesser is not None:
            drafts, draft_seconds = self._guesser(step, samples)
            if draft_seconds:
                timing.draft(draft_seconds)
            right_guesses = len(samples) - sum([entry.samples for entry in step.entries])
        lanes = step.lanes
        at = now + self._message_seconds
        left_first = begun_at = at
        for stage, busy in enumerate(timing.stage_seconds):
            free_at = self._free_at[stage]
            for lane in lanes:
                if free_at[lane] > at:
                    at = free_at[lane]
            begun_at = at
            at += busy
            for lane in lanes:
                free_at[lane] = at
            if stage == 0:
                left_first = at
            at += timing.transit_seconds
        for lane in lanes:
            if self._done_at[lane] > at:
                at = self._done_at[lane]
        for lane in lanes:
            self._done_at[lane] = at
        done = Done(
            step.step_id,
            samples,
            compute_seconds=max(timing.stage_seconds) - timing.waits_seconds,
            lanes=lanes,
            drafts=drafts,
            copy_seconds=timing.copy_seconds,
            draft_seconds=timing.draft_seconds,
        )
        free = StageFree(step.step_id, 0, lanes)
        message = self._message_seconds
        return Launched(((left_first + message, free), (at + message, done)), timing, begun_at, right_guesses)

    def _samples(self, step: Step) -> tuple[Sample, ...]:
        """Return a token for each sampling entry, and one more for each guess that is right.

        A token's id is its position, so tests see gaps and repeats.
        """
        ends_at = self._ends_at
        samples = []
        for entry in step.entries:
            if entry.samples:
                position = entry.extents[-1].last + 1 - len(entry.drafts)
                end = ends_at.get(entry.id)
                if end is None:
                    end = ends_at[original_id(entry.id)]
                samples.append(Sample(entry.id, position, "stop" if position + 1 >= end else None))
                for draft in entry.drafts:
                    if draft != position or position + 1 >= end:
                        break
                    position += 1
                    samples.append(Sample(entry.id, position, "stop" if position + 1 >= end else None))
        return tuple(samples)


def original_id(wire_id: str) -> str:
    """Return a sequence's id in the workload; the router appends `~n` for the n-th retry."""
    return wire_id.partition("~")[0]
