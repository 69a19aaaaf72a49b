"""The state that all baselines share: requests, the KV that they reserve, and the steps in flight.

KV is counted in tokens, not in blocks. As in Medha's controller, a request reserves its prompt and its output
at admission (at most `output_tokens` of output), so that no baseline is charged for preemption by
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medha.scheduler.controller import Load
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    Done,
    Emit,
    Extent,
    Refused,
    StageFree,
    Step,
    StepEntry,
    Submit,
)


@dataclass(slots=True)
class Request:
    """A sequence of a baseline. Token positions below `dispatched` are computed or in the pipeline."""

    submit: Submit
    arrival: float
    length: int  # prompt, and output so far
    limit_tokens: int
    reserve_tokens: int
    dispatched: int = 0
    emitted: int = 0
    in_flight: bool = False
    ended: bool = False

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def is_decoding(self) -> bool:
        return self.emitted > 0

    @property
    def missing_tokens(self) -> int:
        """Number of positions that are not dispatched yet."""
        return self.length - self.dispatched


@dataclass(slots=True)
class Book:
    """Requests in order of arrival. `kv_tokens` bounds the total reservation of the running ones."""

    kv_tokens: int
    max_model_len: int = 2**31 - 1
    output_tokens: int = 4096
    waiting: dict[str, Request] = field(default_factory=dict)
    running: dict[str, Request] = field(default_factory=dict)
    kv_free: int = field(init=False)

    def __post_init__(self) -> None:
        self.kv_free = self.kv_tokens

    def submit(self, submit: Submit, now: float) -> list[ControllerCommand]:
        """Queue a request, or refuse one that could never be admitted."""
        asked = submit.sampling.max_tokens
        limit = self.max_model_len if asked is None else submit.prompt_length + asked
        reserve = min(limit, submit.tokens + self.output_tokens)
        if submit.tokens >= self.max_model_len or reserve > self.kv_tokens:
            return [
                Refused(submit.id, "too_long", f"{submit.tokens} tokens; the pool holds {self.kv_tokens}")
            ]
        self.waiting[submit.id] = Request(
            submit, now - submit.age_seconds, submit.tokens, min(limit, self.max_model_len), reserve
        )
        return []

    def admit(self, request: Request) -> bool:
        """Reserve KV for a waiting request; return False if there is no room."""
        if request.reserve_tokens > self.kv_free:
            return False
        self.kv_free -= request.reserve_tokens
        self.running[request.id] = self.waiting.pop(request.id)
        return True

    def cancel(self, cancel: Cancel) -> Request | None:
        """Remove a request, or mark it as ended if it is in flight: it then leaves when its step is done.

        Returns the request if it was running.
        """
        self.waiting.pop(cancel.id, None)
        request = self.running.get(cancel.id)
        if request is not None:
            request.ended = True
            if not request.in_flight:
                self.release(request)
        return request

    def release(self, request: Request) -> None:
        del self.running[request.id]
        self.kv_free += request.reserve_tokens

    def finish(self, step: Step, done: Done) -> tuple[list[ControllerCommand], list[Request]]:
        """Process a step that left the pipeline; return its output and the requests that ended with it."""
        samples = {sample.id: sample for sample in done.samples}
        commands: list[ControllerCommand] = []
        ended: list[Request] = []
        for entry in step.entries:
            request = self.running.get(entry.id)
            if request is None:
                continue
            request.in_flight = False
            sample = samples.get(entry.id)
            if sample is not None and not request.ended:
                request.length += 1
                request.emitted += 1
                reason = sample.finish_reason
                if reason is None and request.length >= request.limit_tokens:
                    reason = "length"
                commands.append(Emit(entry.id, (sample.token,), reason))
                request.ended = reason is not None
            if request.ended:
                self.release(request)
                ended.append(request)
        return commands, ended

    def load(self) -> Load:
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens_free=self.kv_free,
            pending_prefill_seconds=0.0,
        )


class Steps:
    """Numbers steps, and keeps those in flight."""

    def __init__(self) -> None:
        self._next = 0
        self.in_flight: dict[int, Step] = {}

    def launch(
        self, batch: Sequence[tuple[Request, int]], lanes: tuple[int, ...] = (0,), strategy: str = "local"
    ) -> Step:
        """Create a step of `batch`, pairs of (request, tokens), on coupled `lanes`."""
        entries = []
        for request, count in batch:
            extent = Extent(request.dispatched, count)
            request.dispatched += count
            request.in_flight = True
            samples = request.dispatched == request.length
            entries.append(StepEntry(request.id, lanes[0], (extent,), samples, strategy=strategy))
        return self.issue(tuple(entries), lanes)

    def issue(self, entries: tuple[StepEntry, ...], lanes: tuple[int, ...]) -> Step:
        step = Step(step_id=self._next, epoch=0, entries=entries, lanes=lanes)
        self._next += 1
        self.in_flight[step.step_id] = step
        return step

    def done(self, done: Done) -> Step:
        return self.in_flight.pop(done.step_id)


class Pipeline:
    """Tracks whether the next step may enter: stage 0 must be free, and fewer steps than stages in flight."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._in_flight: set[int] = set()
        self._last: int | None = None
        self._stage_free = True

    @property
    def ready(self) -> bool:
        return self._stage_free and len(self._in_flight) < self._stages

    def launched(self, step: Step) -> None:
        self._in_flight.add(step.step_id)
        self._last, self._stage_free = step.step_id, False

    def stage_free(self, event: StageFree) -> None:
        if event.stage == 0 and event.step_id == self._last:
            self._stage_free = True

    def done(self, event: Done) -> None:
        self._in_flight.discard(event.step_id)
        if not self._in_flight:
            self._stage_free = True
