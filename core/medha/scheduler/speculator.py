"""Speculative decoding of one replica: decides what its steps verify and propose, and learns from the results.

The decisions are those of `medha.scheduler.speculation`. This module keeps the state that they depend on: how often guesses
are right, how long the draft model takes, and the time between steps that wait for guesses, or run ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from medha.scheduler.draft_seconds import DraftSeconds
from medha.scheduler.packer import Batch
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.request import Request
from medha.scheduler.speculation import (
    FORGETTING,
    PROBE_SHARE,
    Between,
    DraftChance,
    DraftLimits,
    Drafts,
    ProposalChoice,
    Proposals,
    choose_drafts,
    expected_tokens,
)
from medha.scheduler.turnaround import Turnaround
from medha.wire.messages import Done

REST_STEPS = 8
"""Steps with the same number of decodes that are not examined once guesses do not pay: the decision itself takes time."""
_MOST_PROBE_STEPS = 8
"""Steps whose time may be saved up for a probe."""
_PROVEN_GUESSES = 8
"""Guesses of all sequences after which the chance that one is right counts as known."""
_FIRST_STEPS = 1.0
"""Time that guesses may take at first, in steps, until the chance is known. The time that right guesses save is added to it,
and so is `_FIRST_SHARE` of the time that passes. A probe must fit into it as a whole."""
_FIRST_SHARE = 0.03
"""Share of the passing time that guesses may take until the chance is known."""


class Speculator:
    """Decides what the steps of a replica verify and propose, and learns from them."""

    def __init__(self, config: ReplicaConfig) -> None:
        speculation = config.scheduling.speculation
        self._tokens_each = 0 if speculation.method == "none" else speculation.max_draft_tokens
        self._most_running = config.scheduling.max_running
        self._most_tokens = config.scheduling.max_chunk_tokens
        self._model = None if config.draft_costs is None else DraftSeconds(config.draft_costs)
        self._has_head = speculation.method == "predictionHead"
        self._chance = DraftChance()
        self._turnaround = Turnaround()
        self._has_one_stage = config.topology.stream == 1
        # Steps whose time is left for guesses while nobody knows how often they are right.
        self._first_steps = _FIRST_STEPS
        self._decodes: dict[int, int] = {}  # by lane, of the last step that could propose or verify guesses
        self._saved_steps = 0.0  # steps whose time the draft model may take for a probe
        self._rested = 0  # steps since the last decision
        # Steps for which nothing is proposed, and the number of their decodes, by the lanes that move together.
        self._rests: dict[tuple[int, ...], tuple[int, int]] = {}

    @property
    def is_off(self) -> bool:
        """True if no step verifies guesses."""
        return self._tokens_each == 0

    def guess(
        self,
        batch: Batch,
        alone: Batch,
        decodes: Sequence[Request],
        *,
        prefills: int,
        most_seconds: float,
        between_seconds: float,
    ) -> tuple[Drafts, Proposals]:
        """Return what a step verifies, and what the draft model does after it; add both to its `batch`.

        Args:
            batch: the step, with its decodes and prefills.
            alone: the same without prefills. Guesses delay the prefills, too, so proposing them must pay for the decodes alone.
            decodes: its decodes.
            prefills: the number of its prefills.
            most_seconds: longest predicted time of the step.
            between_seconds: time between two steps, if there are several stages.
        """
        has_drafts = any(request.draft and not request.runs_ahead for request in decodes)
        if not decodes or not (has_drafts or self._model is not None):
            return {}, Proposals()
        for lane in batch.lanes:
            self._decodes[lane] = len(decodes)
        # A prompt that ends is sampled, too.
        most = self._most_running - len(decodes) - prefills
        limits = DraftLimits(self._tokens_each, most, most_seconds)
        between = self._between(between_seconds)
        left_seconds = most_seconds - (batch.seconds() - alone.seconds())
        proposals = self._propose(alone, decodes, replace(limits, seconds=left_seconds), between)
        batch.proposal_seconds = proposals.seconds
        drafts: Drafts = {}
        if has_drafts:
            drafts = choose_drafts(
                batch, decodes, limits, self._chances(decodes), between_seconds=between.waiting_seconds
            ).drafts
        return drafts, proposals

    def _propose(
        self, batch: Batch, decodes: Sequence[Request], limits: DraftLimits, between: Between
    ) -> Proposals:
        """Return the draft model's work after a step: what pays, or a probe to learn whether it would."""
        if self._model is None:
            return Proposals()
        lanes = tuple(batch.lanes)
        rests, rests_with = self._rests.get(lanes, (0, 0))
        if rests and len(decodes) == rests_with:
            self._rests[lanes] = rests - 1, rests_with
            self._rested += 1
            return Proposals()
        if self._has_head:
            for request in decodes:  # a head computes what steps compute
                request.followed = request.dispatched
        chances, plain_seconds = self._chances(decodes), max(batch.seconds(), 1e-9)
        choice = ProposalChoice(batch, decodes, limits, chances, self._model, between, self._most_tokens)
        proposals = choice.choose()
        if not self._is_proven:
            proposals = self._within_first_time(proposals, plain_seconds, between, decodes)
        if not proposals:
            proposals = self._probe(choice, plain_seconds)
            self._rests[lanes] = 0 if proposals else REST_STEPS, len(decodes)
        self._rested = 0
        for request in decodes:
            if request.id not in proposals.counts:
                request.draft_tokens *= FORGETTING
        return proposals

    @property
    def _is_proven(self) -> bool:
        return self._chance.judged >= _PROVEN_GUESSES

    def _within_first_time(
        self, proposals: Proposals, plain_seconds: float, between: Between, decodes: Sequence[Request]
    ) -> Proposals:
        """Return the proposals if they fit into the time for guesses before their chance is known, else none.

        If the draft model must first compute earlier tokens, it may also use `_FIRST_SHARE` of the steps that the sequence with
        most output to come is expected to take.
        """
        added = (1 + self._rested) * _FIRST_SHARE
        self._first_steps = min(self._first_steps + added, _MOST_PROBE_STEPS)
        later = max((expected_tokens(one) for one in decodes if one.id in proposals.follows), default=0)
        seconds = proposals.seconds
        if proposals.are_awaited:
            seconds += between.waiting_seconds - between.ahead_seconds
        if seconds > (self._first_steps + _FIRST_SHARE * later) * plain_seconds:
            return Proposals()
        self._first_steps -= seconds / plain_seconds
        return proposals

    def _probe(self, choice: ProposalChoice, plain_seconds: float) -> Proposals:
        """Let the draft model propose a single guess if there is time for it; `plain_seconds` is that of a step without."""
        if not self._is_proven:
            proposals = choice.probe(self._first_steps * plain_seconds, most=_PROVEN_GUESSES, is_whole=True)
            self._first_steps -= proposals.seconds / plain_seconds
            if proposals:
                return proposals
        saved = self._saved_steps + (1 + self._rested) * PROBE_SHARE
        self._saved_steps = min(saved, _MOST_PROBE_STEPS)
        proposals = choice.probe(self._saved_steps * plain_seconds)
        self._saved_steps -= proposals.seconds / plain_seconds
        return proposals

    def prefers_drafts(
        self, batch: Batch, decodes: Sequence[Request], most_seconds: float, between_seconds: float
    ) -> bool:
        """Return whether decodes in flight should wait for their tokens, so that the next step can verify drafts.

        Otherwise they may run ahead, which saves the time between two steps. `batch` is the next step.
        """
        if self.is_off or all(len(request.draft) < 2 for request in decodes):
            return False
        limits = DraftLimits(self._tokens_each, self._most_running - len(decodes), most_seconds)
        between = self._between(between_seconds)
        ahead_tokens_per_second = len(decodes) / max(batch.seconds() + between.ahead_seconds, 1e-9)
        drafted = choose_drafts(
            batch,
            decodes,
            limits,
            self._chances(decodes),
            between_seconds=between.waiting_seconds,
            unknown_tokens=1,
        )
        return bool(drafted.drafts) and drafted.tokens_per_second > ahead_tokens_per_second

    def _between(self, between_seconds: float) -> Between:
        if self._has_one_stage:
            return Between(self._turnaround.waiting_seconds, self._turnaround.ahead_seconds)
        return Between(between_seconds, between_seconds)

    def _chances(self, decodes: Sequence[Request]) -> Mapping[str, float]:
        if self._model is None:  # prompt lookup: that one sequence quotes a text says nothing about others
            return {request.id: request.draft_chance for request in decodes}
        return {request.id: self._chance.of(request) for request in decodes}

    # --- learning -----------------------------------------------------------------------------------

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """Learn from the next sampled tokens of a request; keep what is left of its draft."""
        if request.draft:
            self._chance.observe(request, tokens)
            # A right guess saves one sequence a step, which is this part of a step of all of them.
            self._first_steps += (len(tokens) - 1) / self._decodes.get(request.lane, 1)

    def take(self, done: Done, proposals: Proposals, requests: Mapping[str, Request]) -> float:
        """Process a draft model's reports on a step; return the seconds that the step took without it.

        `requests` are those of the step that have not ended.
        """
        for name, draft in done.drafts:
            if name in requests:
                requests[name].draft = draft
        for name, tokens in done.followed:
            if name in requests:
                requests[name].followed = tokens
        if not proposals:
            return done.compute_seconds
        proposed = {name for name, _ in done.drafts}
        for name in proposals.counts:
            if name in requests and name not in proposed:
                self._chance.missed(requests[name])
        seconds = done.draft_seconds or min(proposals.seconds, done.compute_seconds)
        if self._model is not None:
            self._model.observe(proposals.uncorrected, seconds)
        return done.compute_seconds - seconds

    def passed(self, between_seconds: float, compute_seconds: float, *, ran_ahead: bool) -> None:
        """Learn from the time that passed before a step of decodes on one stage, which then took `compute_seconds`."""
        self._turnaround.observe(between_seconds, compute_seconds, ran_ahead=ran_ahead)
