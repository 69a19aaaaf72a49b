"""Derives the progress of requests from a controller's events and commands: as a report to routers, and for a timeline.

Both are pure functions of one event, the commands that it led to, and the controller's state after it. `history` is the
controller's history before it takes the event, so that it still holds the step that the event ends.

`History.take` interprets the same messages, for another purpose. It runs at every event, and counts: its facts have the
number of sampled tokens, and not whose they are. A happening is about one request, and is made only while a record is
written or a sequence is traced, so that steps cost no more without them. A router makes the same happenings of the
messages that it receives. Only `History` decides what a chunk is: both get chunks from `History.launched`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from medha.observing.timeline import Began, Computed, Finished, Happening, Interrupted, Placed, Sampled
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.validation import class_name
from medha.wire.messages import (
    Cancel,
    ChunkProgress,
    ControllerCommand,
    ControllerEvent,
    Done,
    Emit,
    Failed,
    ProgressReport,
    Refused,
    SteppedAside,
    Submit,
)


def progress(
    event: ControllerEvent, commands: Sequence[ControllerCommand], history: History, now: float
) -> ProgressReport | None:
    """Return the progress of requests that their routers cannot see otherwise; None if there is none."""
    chunks, began_seconds = [], 0.0
    launched = history.launched.get(event.step_id) if isinstance(event, Done) else None
    if launched is not None and launched.chunks:
        admitted = {admit.id for admit in launched.step.admits}
        began_seconds = now - launched.at
        chunks = [
            ChunkProgress(chunk.request, chunk.tokens, chunk.lane, chunk.request in admitted)
            for chunk in launched.chunks
        ]
    aside = tuple(command.id for command in commands if isinstance(command, SteppedAside))
    return ProgressReport(tuple(chunks), began_seconds, aside) if chunks or aside else None


def happenings_of(report: ProgressReport, now: float) -> Iterator[Happening]:
    """Yield the happenings of a report that was made at `now`."""
    began = now - report.began_seconds
    for chunk in report.chunks:
        yield Computed(chunk.id, began, chunk.tokens, chunk.lane, chunk.is_first)
    for request_id in report.stepped_aside:
        yield Interrupted(request_id, "aside")


def happenings(
    event: ControllerEvent,
    commands: Sequence[ControllerCommand],
    core: ReplicaController,
    history: History,
    replica: str,
    now: float,
) -> Iterator[tuple[Happening, float]]:
    """Yield the happenings of a controller's event, each with its time."""
    if isinstance(event, Submit) and not any(isinstance(command, Refused) for command in commands):
        request = core.find(event.id)
        if request is not None:
            arrived_at = now - event.age_seconds
            began = Began(
                event.id,
                event.tokens,
                class_name(core.config, event),
                due_seconds=request.deadline - arrived_at,
                tpot_target_seconds=request.targets.tpot_seconds,
            )
            yield began, arrived_at
            yield Placed(event.id, replica), now
    report = progress(event, commands, history, now)
    if report is not None:
        for happening in happenings_of(report, now):
            yield happening, now
    for command in commands:
        match command:
            case Emit():
                yield Sampled(command.id, len(command.tokens), command.cached_tokens), now
                if command.finish_reason is not None:
                    yield Finished(command.id, command.finish_reason), now
            case Failed():
                yield Finished(command.id, command.reason), now
    if isinstance(event, Cancel):
        yield Finished(event.id, "moved" if event.moves else "cancelled"), now
