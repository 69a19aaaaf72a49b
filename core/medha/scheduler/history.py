"""Derives facts from a controller's events and commands; metrics, status and traces show them.

A controller keeps only what its decisions need. `History` gets each event with the commands that it led to,
and keeps the rest: when a step was launched, and when a request got its first token. `History.take` returns
the facts of one event, so that metrics, status and traces need not interpret messages.

An entry of a step is a *decode* if it computes a sampled token; any other is *prefill*, the last chunk of a
prompt included, from which the first token is sampled. Output that an earlier epoch sampled is part of the
prompt, and so is the output of a request that stepped aside. A request decodes from its first token on
(`Request.has_sampled`), so from then on each entry of it is a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from medha.scheduler.controller import ReplicaController
from medha.scheduler.validation import class_name
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Emit,
    Failed,
    FailureReason,
    FinishReason,
    Refused,
    StageFree,
    Step,
    StepEntry,
    SteppedAside,
    Submit,
)

EndReason = FinishReason | FailureReason | Literal["cancelled", "moved"]
"""Reason why a request ended here. `moved`: it goes on at another replica."""
OpenPhase = Literal["waiting", "prefill", "decode"]
"""Phase of a request that has not ended."""


class Chunk(NamedTuple):
    """The prompt positions of one request that a step computes on one lane, from `start` on."""

    request: str
    lane: int
    start: int
    tokens: int
    prompt_tokens: int  # of the whole prompt


def is_decode(entry: StepEntry, prompt_tokens: int) -> bool:
    """Return whether an entry computes a sampled token and not one of the prompt's `prompt_tokens` tokens."""
    return entry.extents[0].start >= prompt_tokens


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was sent to the ranks, with its entries by kind; one without entries only updates their state."""

    step: Step
    at: float
    chunks: tuple[Chunk, ...]
    decodes: tuple[StepEntry, ...]
    slacks: tuple[tuple[str, float], ...]  # service class and slack seconds of each request with a chunk
    misses_tpot: bool  # the step is predicted to take longer than its decodes' targets allow

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def tokens_by_request(self) -> dict[str, int]:
        """The prefill tokens of each request, on all lanes together."""
        tokens: dict[str, int] = {}
        for chunk in self.chunks:
            tokens[chunk.request] = tokens.get(chunk.request, 0) + chunk.tokens
        return tokens


@dataclass(frozen=True, slots=True)
class Completed:
    """A step that has left the last stage.

    On a single stage, the time of a step that was launched ahead begins when the step before it ended.
    """

    launched: Launched
    observed_seconds: float
    drafted_tokens: int = 0  # that were verified
    accepted_tokens: int = 0  # of these, the right ones


@dataclass(slots=True)
class OpenRequest:
    """An accepted request that has not ended: its targets, and its output so far."""

    prompt_tokens: int  # including its output before it last stepped aside
    service_class: str
    deadline: float
    tpot_target_seconds: float
    expected_tokens: int = 0  # output tokens that were expected here when it arrived
    prompt_length: int = 0  # without any output
    arrived_at: float = 0.0  # at its router
    is_resumed: bool = False  # it came with output of another replica or epoch
    prefill_at: float | None = None  # when it first got KV
    emitted: int = 0
    first_token_at: float = 0.0  # set once a token is emitted
    last_token_at: float = 0.0

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first; None before the second."""
        if self.emitted < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.emitted - 1)

    @property
    def ttft_met(self) -> bool:
        """True if the first token came by the deadline."""
        return self.first_token_at <= self.deadline


class Ended(NamedTuple):
    """The end of a request; `request` is None if it ended on arrival, because nothing was left to sample."""

    reason: EndReason
    request: OpenRequest | None

    @property
    def tpot_met(self) -> bool | None:
        """True if the request met its TPOT target; None unless it finished with two output tokens or more."""
        if self.request is None or self.reason not in ("stop", "length"):
            return None
        seconds = self.request.tpot_seconds
        return None if seconds is None else seconds <= self.request.tpot_target_seconds


@dataclass(slots=True)
class Facts:
    """The facts of one event and of the commands that it led to, each kind in order of occurrence."""

    epoch: int
    now: float
    left_first_stage: int | None = None  # a step
    completed: Completed | None = None
    moves: list[tuple[str, OpenPhase | None, int]] = field(default_factory=list)
    """Phases that begin or continue, as (request, phase, prompt tokens). The phase is None if the request has ended. The
    number of tokens is 0 unless the request begins to wait or begins its prefill."""
    launched: list[Launched] = field(default_factory=list)
    first_tokens: list[OpenRequest] = field(default_factory=list)
    later_tokens: int = 0  # output tokens, without those that are the first of a request
    ended: list[Ended] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # reasons
    stepped_aside: list[str] = field(default_factory=list)  # service classes of these requests


class History:
    """Keeps the facts of one controller's open requests and of its steps in flight."""

    def __init__(self) -> None:
        self.launched: dict[int, Launched] = {}
        """Steps in flight."""
        self.open: dict[str, OpenRequest] = {}
        """Requests that have not ended."""
        self._free_at: dict[int, float] = {}  # when each lane ended its last step

    def take(
        self,
        core: ReplicaController,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        now: float,
    ) -> Facts:
        """Return the facts of an event that led to `commands`; `core` is the controller's state after it."""
        facts = Facts(core.epoch, now)
        match event:
            case StageFree(step_id=step_id, stage=0):
                facts.left_first_stage = step_id
            case Done():
                facts.completed = self._complete(event, core, now)
            case Submit():
                self._arrive(event, commands, core, facts)
            case Cancel():
                self._end(event.id, "moved" if event.moves else "cancelled", facts)
        for command in commands:
            match command:
                case Emit():
                    self._emit(command, facts)
                case Step():
                    self._launch(command, core, facts)
                case Failed():
                    self._end(command.id, command.reason, facts)
                case Refused():
                    facts.refused.append(command.reason)
                case SteppedAside():
                    self._step_aside(command, facts)
        return facts

    def _arrive(
        self, submit: Submit, commands: Sequence[ControllerCommand], core: ReplicaController, facts: Facts
    ) -> None:
        request = core.find(submit.id)
        if request is None or any(isinstance(command, Refused) for command in commands):
            return  # refused, perhaps because another request has this id; or nothing is left to sample
        self.open[submit.id] = OpenRequest(
            submit.tokens,
            class_name(core.config, submit),
            request.deadline,
            request.targets.tpot_seconds,
            request.expected_output_tokens - (submit.tokens - submit.prompt_length),
            prompt_length=submit.prompt_length,
            arrived_at=request.arrival,
            is_resumed=request.has_output_in_prompt,
        )
        facts.moves.append((submit.id, "waiting", submit.tokens))

    def _step_aside(self, aside: SteppedAside, facts: Facts) -> None:
        request = self.open[aside.id]
        request.prompt_tokens = aside.tokens
        facts.stepped_aside.append(request.service_class)
        facts.moves.append((aside.id, "waiting", aside.tokens))

    def _launch(self, step: Step, core: ReplicaController, facts: Facts) -> None:
        chunks, decodes = [], []
        for entry in step.entries:
            prompt_tokens = self.open[entry.id].prompt_tokens
            if is_decode(entry, prompt_tokens):
                decodes.append(entry)
            else:
                start, tokens = entry.extents[0].start, entry.token_count
                chunks.append(Chunk(entry.id, entry.lane, start, tokens, prompt_tokens))
        slacks = []
        for name in dict.fromkeys(chunk.request for chunk in chunks):
            request = core.find(name)
            assert request is not None, f"{name} runs and is not known"
            slacks.append((self.open[name].service_class, core.slack_seconds(request, facts.now)))
        misses_tpot = bool(step.entries) and core.packed(step).misses_tpot
        launched = Launched(step, facts.now, tuple(chunks), tuple(decodes), tuple(slacks), misses_tpot)
        self.launched[step.step_id] = launched
        facts.launched.append(launched)
        for admit in step.admits:
            admitted = self.open.get(admit.id)
            if admitted is not None and admitted.prefill_at is None:
                admitted.prefill_at = facts.now
            facts.moves.append((admit.id, "prefill", admit.tokens))

    def _complete(self, done: Done, core: ReplicaController, now: float) -> Completed:
        launched = self.launched.pop(done.step_id)
        began_at, lanes = launched.at, launched.step.lanes
        if core.config.topology.stream == 1:  # launched ahead, it may have waited for the step before it
            began_at = max(began_at, *(self._free_at.get(lane, began_at) for lane in lanes))
        self._free_at |= dict.fromkeys(lanes, now)
        drafted = sum([len(entry.drafts) for entry in launched.decodes])
        accepted = len(done.samples) - len({sample.id for sample in done.samples}) if drafted else 0
        return Completed(launched, now - began_at, drafted, accepted)

    def _emit(self, emit: Emit, facts: Facts) -> None:
        request = self.open.get(emit.id)
        if request is not None and emit.tokens:
            if request.emitted:
                facts.later_tokens += len(emit.tokens)
            else:
                request.first_token_at = facts.now
                facts.first_tokens.append(request)
            request.emitted += len(emit.tokens)
            request.last_token_at = facts.now
        if emit.finish_reason is None:
            facts.moves.append((emit.id, "decode", 0))
        else:
            self._end(emit.id, emit.finish_reason, facts)

    def _end(self, name: str, reason: EndReason, facts: Facts) -> None:
        facts.moves.append((name, None, 0))
        request = self.open.pop(name, None)
        # A cancellation may cross the end of its request, and one that has moved is cancelled once more.
        if request is not None or reason not in ("cancelled", "moved"):
            facts.ended.append(Ended(reason, request))
