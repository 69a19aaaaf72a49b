"""Status of a controller's process: the core's own status, and what is recorded beside the core.

The core keeps only the state that decisions need. Launch times of steps, token rates and attained targets are
recorded here, from the same events and commands that the metrics are counted from.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from medha.scheduler.controller import ReplicaController
from medha.scheduler.status import AttainmentStatus, Order, ReplicaStatus, Seen, status
from medha.scheduler.validation import class_name
from medha.wire.messages import Cancel, ControllerCommand, ControllerEvent, Done, Emit, Failed, Step, Submit

WINDOW_SECONDS = 10.0
"""Window over which rates are averaged; shorter while the process has not run that long."""
_BUCKET_SECONDS = 0.5


@dataclass(slots=True)
class _Bucket:
    """Work that was completed within one interval of `_BUCKET_SECONDS`."""

    begins: float
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


@dataclass(slots=True)
class _Open:
    """An open request: its targets, and its output so far."""

    service_class: str
    deadline: float
    tpot_seconds: float
    emitted: int = 0
    first_token_at: float = 0.0  # set once a token is emitted
    last_token_at: float = 0.0


class Watch:
    """Records the status of one controller's process, across epochs."""

    def __init__(self, replica: str, model: str) -> None:
        self._replica, self._model = replica, model
        self._began: float | None = None  # when the first epoch began
        self._buckets: deque[_Bucket] = deque()
        self._attained = Counter[tuple[str, str, bool]]()  # (class, ttft | tpot, met)
        self._launched_at: dict[int, float] = {}
        self._prefill_tokens: dict[int, int] = {}  # by step
        self._open: dict[str, _Open] = {}

    def begin_epoch(self, now: float) -> None:
        """Forget steps and open requests, because a fresh core replaces the one before."""
        self._began = now if self._began is None else self._began
        self._launched_at.clear()
        self._prefill_tokens.clear()
        self._open.clear()

    def observe(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        now: float,
    ) -> None:
        """Record one event and the commands that it led to."""
        match event:
            case Submit():
                self._arrived(event, core)
            case Done():
                self._done(event, now)
            case Cancel():
                self._ended(event.id)
        for command in commands:
            match command:
                case Step():
                    self._launch(command, now)
                case Emit():
                    self._emit(command, now)
                case Failed():
                    self._ended(command.id)

    def _arrived(self, submit: Submit, core: ReplicaController) -> None:
        request = core.find(submit.id)
        if request is not None and submit.id not in self._open:
            name = class_name(core.config, submit)
            self._open[submit.id] = _Open(name, request.deadline, request.targets.tpot_seconds)

    def _launch(self, step: Step, now: float) -> None:
        self._launched_at[step.step_id] = now
        prefill = 0
        for entry in step.entries:
            request = self._open.get(entry.id)
            if request is None or not request.emitted:
                prefill += entry.token_count
        self._prefill_tokens[step.step_id] = prefill

    def _done(self, done: Done, now: float) -> None:
        self._launched_at.pop(done.step_id, None)
        prefill = self._prefill_tokens.pop(done.step_id, 0)
        if not self._buckets or now - self._buckets[-1].begins >= _BUCKET_SECONDS:
            self._buckets.append(_Bucket(now))
            self._forget(now)
        bucket = self._buckets[-1]
        bucket.steps += 1
        bucket.prefill_tokens += prefill

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].begins > WINDOW_SECONDS:
            self._buckets.popleft()

    def _emit(self, emit: Emit, now: float) -> None:
        request = self._open.get(emit.id)
        if request is None:
            return
        if emit.tokens:
            if not request.emitted:
                request.first_token_at = now
                self._attained[request.service_class, "ttft", now <= request.deadline] += 1
            elif self._buckets:  # the last one, to which the step that produced them was added
                self._buckets[-1].decode_tokens += len(emit.tokens)
            request.emitted += len(emit.tokens)
            request.last_token_at = now
        if emit.finish_reason is not None:
            if request.emitted > 1:
                spent = request.last_token_at - request.first_token_at
                met = spent <= request.tpot_seconds * (request.emitted - 1)
                self._attained[request.service_class, "tpot", met] += 1
            del self._open[emit.id]

    def _ended(self, request: str) -> None:
        self._open.pop(request, None)

    def status(
        self,
        core: ReplicaController | None,
        now: float,
        *,
        missing_ranks: Sequence[int] = (),
        order: Order = "urgency",
        most_requests: int = 50,
    ) -> ReplicaStatus:
        """Return the status at `now`; `core` is None while the ranks gather."""
        self._forget(now)
        up_seconds = 0.0 if self._began is None else now - self._began
        window = min(WINDOW_SECONDS, max(up_seconds, _BUCKET_SECONDS))
        begun = {name: request for name, request in self._open.items() if request.emitted}
        seen = Seen(
            self._launched_at,
            {name: request.first_token_at for name, request in begun.items()},
            {name: request.last_token_at for name, request in begun.items()},
        )
        state = "gathering" if core is None else "draining" if core.draining else "serving"
        return ReplicaStatus(
            replica=self._replica,
            model=self._model,
            state=state,  # type: ignore[arg-type] # one of the three
            missing_ranks=tuple(missing_ranks) if core is None else (),
            up_seconds=up_seconds,
            window_seconds=window,
            prefill_tokens_per_second=sum(bucket.prefill_tokens for bucket in self._buckets) / window,
            decode_tokens_per_second=sum(bucket.decode_tokens for bucket in self._buckets) / window,
            steps_per_second=sum(bucket.steps for bucket in self._buckets) / window,
            attainment=tuple(
                AttainmentStatus(
                    service_class=name,
                    ttft_met=self._attained[name, "ttft", True],
                    ttft_missed=self._attained[name, "ttft", False],
                    tpot_met=self._attained[name, "tpot", True],
                    tpot_missed=self._attained[name, "tpot", False],
                )
                for name in sorted({name for name, _, _ in self._attained})
            ),
            core=None if core is None else status(core, now, seen, order=order, most_requests=most_requests),
        )
