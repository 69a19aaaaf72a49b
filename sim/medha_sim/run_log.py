"""The log of a simulation: a record for each request, columns for steps and chunks, the state at intervals.

`medha_sim.run_summary` evaluates it. Times are seconds of the virtual clock, which starts at 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from medha.scheduler.history import is_decode
from medha.wire.messages import Step

Ending = Literal["finished", "refused", "failed", "censored"]
"""`censored` means that the request was still under way when the simulation stopped."""


@dataclass(slots=True)
class RequestRecord:
    """The history of a request (seconds of the virtual clock; None if the event did not happen)."""

    id: str
    kind: str  # the part of the workload that it comes from, e.g. "short" or "long"
    service_class: str
    prompt_tokens: int
    output_tokens: int  # tokens that it wants
    arrived_at: float
    ttft_target_seconds: float
    tpot_target_seconds: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0  # output tokens that it got
    worst_gap_seconds: float = 0.0  # longest wait between two of its tokens
    late_gaps: int = 0  # gaps above its TPOT target
    ending: Ending = "censored"
    detail: str = ""

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.first_token_at is None or self.last_token_at is None or self.tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.tokens - 1)


@dataclass(slots=True)
class Series:
    """State at intervals, as columns of equal length, over all replicas."""

    at: array[float] = field(default_factory=lambda: array("d"))
    running: array[float] = field(default_factory=lambda: array("d"))
    waiting: array[float] = field(default_factory=lambda: array("d"))  # in replicas and in the router
    kv_share: array[float] = field(default_factory=lambda: array("d"))  # KV tokens held, of all


@dataclass(slots=True)
class StepColumns:
    """Columns of equal length, with a row for each step that computes something.

    Times are those of the slowest stage.
    """

    at: array[float] = field(default_factory=lambda: array("d"))
    predicted_seconds: array[float] = field(default_factory=lambda: array("d"))  # the controller's prediction
    busy_seconds: array[float] = field(default_factory=lambda: array("d"))  # what it took
    prefill_tokens: array[int] = field(default_factory=lambda: array("q"))
    decodes: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class ChunkColumns:
    """Columns of equal length, with a row for each prefill chunk."""

    at: array[float] = field(default_factory=lambda: array("d"))
    context: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class GuessCounts:
    """Guesses that steps have verified, and the time that proposing them took on the rank that samples."""

    verified: int = 0
    right: int = 0  # each saved its sequence a step
    draft_seconds: float = 0.0


@dataclass(slots=True)
class RunLog:
    """Everything that a simulation records."""

    requests: dict[str, RequestRecord] = field(default_factory=dict)
    series: Series = field(default_factory=Series)
    steps: StepColumns = field(default_factory=StepColumns)
    chunks: ChunkColumns = field(default_factory=ChunkColumns)
    gaps: dict[str, array[float]] = field(default_factory=dict)
    """Seconds between tokens, by request id; recorded only for requests that have an array here."""
    guesses: GuessCounts | None = None  # None: no replica guesses
    window_seconds: float = 0.0  # simulated time; later arrivals are not in the log
    interrupted: bool = False

    def arrived(self, record: RequestRecord) -> None:
        assert record.id not in self.requests, f"{record.id} arrives twice"
        self.requests[record.id] = record

    def emitted(self, id_: str, tokens: int, now: float) -> None:
        """Record that `tokens` more output tokens reach the client."""
        record = self.requests[id_]
        last = record.last_token_at
        if last is None:
            record.first_token_at = now
        else:
            gap = now - last
            if gap > record.worst_gap_seconds:
                record.worst_gap_seconds = gap
            if gap > record.tpot_target_seconds:
                record.late_gaps += 1
            if self.gaps and id_ in self.gaps:
                self.gaps[id_].append(gap)
        record.tokens += tokens
        record.last_token_at = now

    def ended(self, id_: str, ending: Ending, now: float, detail: str = "") -> None:
        record = self.requests[id_]
        assert record.ended_at is None, f"{id_} ends twice"
        record.ending, record.ended_at, record.detail = ending, now, detail

    def stepped(
        self, step: Step, prompt_tokens: Callable[[str], int], busy_seconds: float, now: float
    ) -> None:
        """Record that a replica launches a step; `prompt_tokens` returns the size of a sequence's prompt there."""
        decodes = prefill_tokens = 0
        for entry in step.entries:
            if is_decode(entry, prompt_tokens(entry.id)):
                decodes += 1
            else:
                count = entry.token_count
                prefill_tokens += count
                self.chunks.at.append(now)
                self.chunks.context.append(entry.extents[0].start)
                self.chunks.tokens.append(count)
        steps = self.steps
        steps.at.append(now)
        steps.predicted_seconds.append(step.predicted_seconds)
        steps.busy_seconds.append(busy_seconds)
        steps.prefill_tokens.append(prefill_tokens)
        steps.decodes.append(decodes)

    def guessed(self, step: Step, right: int, draft_seconds: float) -> None:
        """Record what became of the guesses that a step verifies, and how long it proposes others."""
        counts = self.guesses
        assert counts is not None, "no replica guesses"
        counts.verified += sum([len(entry.drafts) for entry in step.entries])
        counts.right += right
        counts.draft_seconds += draft_seconds
