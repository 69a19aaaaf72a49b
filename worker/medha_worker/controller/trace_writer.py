"""Traces for Perfetto and chrome://tracing: what every rank did, step by step, and which requests waited.

The format is Trace Event JSON ("Trace Event Format", the Chromium project) in its array form. The array needs
no closing bracket, so a file that a crash has cut off after a line can be read up to there. Each lane is a process of
the trace. Each of its ranks has a thread for its steps, and one for the steps that it prepares ahead. Process 0 is the
controller, with counters, the steps in flight and the requests.

Times are the controller's monotonic clock, relative to the beginning of the trace. Ranks on the same machine
read the same clock. The clock offset of a rank elsewhere is estimated as the smallest difference seen between
receiving and sending a part, which is too large by the latency of the fastest message.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any

from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Chunk, Facts
from medha.topology import Topology
from medha.wire.messages import StepTimes, TracePart
from medha_worker.rank.step_recorder import PREPARED

MOST_BYTES = 256 * 2**20
"""Largest size of a trace; it ends there even if its time is not over."""
MOST_QUEUED = 20_000
"""Most inputs that may wait to be written; further ones are left out and counted."""
PIECE_EVENTS = 2000  # about how many events are written at once
KNOWN_STEPS = 4096
MOST_NAMED = 32  # decodes of a step that are listed by name
COUNTER_SECONDS = 0.02  # shortest interval between two samples of the counters
IDLE_SECONDS = 0.5  # how long the writer waits for an input before it checks whether the trace has ended

LARGEST_SECONDS = 1e12
"""Largest time that is accepted from a rank; larger ones and NaN are left out, as JSON cannot express them."""

Event = dict[str, Any]

_log = logging.getLogger("medha.trace")


@dataclass(frozen=True, slots=True)
class StepLaunched:
    epoch: int
    step_id: int
    lanes: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    decodes: tuple[tuple[str, int], ...]  # request, its lane
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step has left the first stage or, with `is_done`, the last one."""

    epoch: int
    step_id: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class RequestMoved:
    """A request has entered a phase (waiting, prefill or decode), or has ended (None)."""

    request: str
    phase: str | None
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Counted:
    """Numbers of one kind, which viewers draw as a stack."""

    name: str
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class EpochLost:
    """An epoch has ended, because ranks were lost or settings have changed."""

    reason: str


TraceInput = EpochLost | StepLaunched | StepEnded | RequestMoved | Counted | TracePart


class Tracing:
    """A trace while it is taken: the controller's loop queues its inputs, and another thread writes them."""

    def __init__(self, topology: Topology, machine: str, now: float, until: float) -> None:
        self.until = until
        self._format = TraceFormat(topology, machine, now)
        self._queue: Queue[tuple[float, TraceInput]] = Queue(MOST_QUEUED)
        self._left_out = 0
        self._closed = False
        self._counted_at = float("-inf")

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Accept no further inputs; the writer ends once it has written those in the queue."""
        self._closed = True

    def put(self, at: float, trace_input: TraceInput) -> None:
        """Queue an input; `at` is its time on the controller's clock, or the time when a part was received."""
        if self._closed:
            return
        try:
            self._queue.put_nowait((at, trace_input))
        except Full:
            self._left_out += 1

    def observe(self, facts: Facts, core: ReplicaController) -> None:
        """Queue the inputs of one event; `core` is the state after it."""
        if facts.left_first_stage is not None:
            self.put(facts.now, StepEnded(facts.epoch, facts.left_first_stage, is_done=False))
        if facts.completed is not None:
            step_id = facts.completed.launched.step.step_id
            self.put(facts.now, StepEnded(facts.epoch, step_id, is_done=True))
        for request, phase, prompt_tokens in facts.moves:
            self.put(facts.now, RequestMoved(request, phase, prompt_tokens))
        for launched in facts.launched:
            step, decodes = launched.step, tuple((entry.id, entry.lane) for entry in launched.decodes)
            trace_input = StepLaunched(
                step.epoch, step.step_id, step.lanes, launched.chunks, decodes, step.predicted_seconds
            )
            self.put(facts.now, trace_input)
        if facts.now - self._counted_at >= COUNTER_SECONDS:
            self._counted_at = facts.now
            self._count(core, facts.now)

    def _count(self, core: ReplicaController, now: float) -> None:
        load = core.load()
        self.put(now, Counted("requests", (("running", load.running), ("waiting", load.waiting))))
        self.put(now, Counted("prefill ahead (s)", (("seconds", load.pending_prefill_seconds),)))
        for lane in core.lanes:
            ledger = core.pools.ledger(lane.index)
            held = (("held", ledger.held_blocks), ("cached", ledger.remembered_blocks))
            self.put(now, Counted(f"KV blocks of lane {lane.index}", held))

    def pieces(self, most_bytes: int = MOST_BYTES) -> Iterator[bytes]:
        """Yield the file's text until the trace is closed or `most_bytes` long.

        Each piece ends at the end of a line.
        """
        try:
            piece = _lines(self._format.names(), first=True)
            written = 0
            while True:
                yield piece
                written += len(piece)
                events = self._events()
                if events is None:
                    break
                if written + 1024 > most_bytes:
                    yield _lines([_note("the trace has reached its largest size")])
                    break
                piece = _lines(events)
            if self._left_out:
                yield _lines([_note(f"{self._left_out} events were left out")])
            yield b"\n]\n"
        finally:
            self._closed = True

    def _events(self) -> list[Event] | None:
        """Return the events that wait in the queue; None once the trace is closed and the queue is empty."""
        found: list[Event] = []
        try:
            found = self._format.events(*self._queue.get(timeout=IDLE_SECONDS))
            while len(found) < PIECE_EVENTS:
                found += self._format.events(*self._queue.get_nowait())
        except Empty:
            return found or (None if self._closed else [])
        return found

    def write_to(self, path: Path) -> None:
        """Write a file in a separate thread, until the trace is closed or a write fails."""

        def write() -> None:
            try:
                with path.open("wb", buffering=0) as file:  # unbuffered: whole lines, even if we are killed
                    for piece in self.pieces():
                        file.write(piece)
            except OSError as error:
                _log.error("the trace ends here: %s", error)
                self.close()

        self._writer = Thread(target=write, name="trace")
        self._writer.start()

    def join(self) -> None:
        """Wait until the file, if one is being written, is complete."""
        if hasattr(self, "_writer"):
            self._writer.join()


class TraceFormat:
    """Turns inputs into trace events. Lanes are processes 1, 2, ...; the controller is process 0."""

    def __init__(self, topology: Topology, machine: str, began: float) -> None:
        self._topology = topology
        self._machine = machine
        self._began = began
        self._steps: OrderedDict[tuple[int, int], StepLaunched] = OrderedDict()
        self._phases: dict[str, str] = {}  # current phase by request
        self._offsets: dict[tuple[int, str], float] = {}  # clock offset by rank and machine

    def names(self) -> list[Event]:
        """Return the events that name processes and threads."""
        topology = self._topology
        found = [_named("process_name", 0, 0, "controller"), _sorted(0)]
        for rank in range(topology.ranks):
            here = topology.coordinates(rank)
            pid = 1 + here.kv
            if here.stream == here.tensor == 0:
                found += [_named("process_name", pid, 0, f"lane {here.kv}"), _sorted(pid)]
            name = f"stage {here.stream}" + (f", tensor {here.tensor}" if topology.tensor > 1 else "")
            found.append(_named("thread_name", pid, rank + 1, f"{name} (rank {rank})"))
            ahead = f"{name} prepares (rank {rank})"
            found.append(_named("thread_name", pid, rank + 1 + topology.ranks, ahead))
        return found

    def events(self, at: float, trace_input: TraceInput) -> list[Event]:
        """Return the trace events of an input whose time was `at` on the controller's clock."""
        match trace_input:
            case StepLaunched() as step:
                return self._launched(at, step)
            case StepEnded() as end:
                return self._step_ended(at, end)
            case RequestMoved() as moved:
                return self._moved(at, moved)
            case Counted(name, values):
                return [self._event("C", name, at, args=dict(values))]
            case EpochLost(reason):
                return [self._event("i", f"the epoch has ended: {reason}", at, s="g")]
            case TracePart() as part:
                return self._part(at, part)

    def _launched(self, at: float, step: StepLaunched) -> list[Event]:
        self._steps[step.epoch, step.step_id] = step
        if len(self._steps) > KNOWN_STEPS:
            self._steps.popitem(last=False)
        if not (step.chunks or step.decodes):
            return []
        id_ = f"{step.epoch}.{step.step_id}"
        return [self._event("b", _label(step), at, cat="step", id=id_, args=_args(step))]

    def _step_ended(self, at: float, end: StepEnded) -> list[Event]:
        step = self._steps.get((end.epoch, end.step_id))
        if step is None or not (step.chunks or step.decodes):
            return []
        id_ = f"{end.epoch}.{end.step_id}"
        if end.is_done:
            return [self._event("e", _label(step), at, cat="step", id=id_)]
        return [self._event("n", "left the first stage", at, cat="step", id=id_)]

    def _moved(self, at: float, moved: RequestMoved) -> list[Event]:
        before = self._phases.get(moved.request)
        if before == moved.phase:
            return []
        found = []
        if before is not None:
            found.append(self._event("e", before, at, cat="request", id=moved.request))
        if moved.phase is None:
            self._phases.pop(moved.request, None)
        else:
            self._phases[moved.request] = moved.phase
            args = {"request": moved.request}
            if moved.prompt_tokens:
                args["prompt_tokens"] = str(moved.prompt_tokens)
            found.append(self._event("b", moved.phase, at, cat="request", id=moved.request, args=args))
        return found

    def _part(self, at: float, part: TracePart) -> list[Event]:
        here = self._topology.coordinates(part.rank)
        where = {"pid": 1 + here.kv, "tid": part.rank + 1}
        steps = [times for times in part.steps if _is_time(part.clock_seconds) and _are_times(times)]
        left_out = part.left_out + len(part.steps) - len(steps)
        found = []
        if steps:
            offset = self._offset(at, part)
            for times in steps:
                found += self._step(part.rank, part.epoch, times, offset, where)
        if left_out:
            found.append(self._event("i", f"{left_out} steps were left out", at, **where, s="t"))
        return found

    def _offset(self, at: float, part: TracePart) -> float:
        """Return the offset that converts a rank's times to the controller's clock."""
        if part.machine and part.machine == self._machine:
            return 0.0
        key = part.rank, part.machine
        seen = at - part.clock_seconds
        self._offsets[key] = min(seen, self._offsets.get(key, seen))
        return self._offsets[key]

    def _step(
        self, rank: int, epoch: int, times: StepTimes, offset: float, where: dict[str, int]
    ) -> list[Event]:
        here = self._topology.coordinates(rank)
        step = _on_lane(self._steps.get((epoch, times.step_id)), here.kv)
        args: dict[str, Any] = {"step": times.step_id} | ({} if step is None else _args(step))
        for what, seconds in times.waits:
            args[f"{what}_ms"] = round(1e3 * seconds, 3)
        name = f"step {times.step_id}" if step is None else _label(step, nothing="help other lanes")
        found = [self._slice(name, times.started, times.ended, offset, where, args)]
        samples = here.stream == self._topology.stream - 1
        for what, since, until in _parts(times, samples=samples):
            # Preparing has a track of its own, because it overlaps the step before.
            beside = where | {"tid": where["tid"] + self._topology.ranks} if what == PREPARED else where
            found.append(self._slice(what, since, until, offset, beside, {"step": times.step_id}))
        if step is None or step.chunks or step.decodes:  # else no hidden states are sent
            found += self._arrows(rank, epoch, times, offset, where)
        return found

    def _arrows(
        self, rank: int, epoch: int, times: StepTimes, offset: float, where: dict[str, int]
    ) -> list[Event]:
        """Return flow events from the stage that sends hidden states to the stage that receives them."""
        here, found = self._topology.coordinates(rank), []
        for what, since, until in times.spans:
            leaving, coming = what == "send" and here.stream < self._topology.stream - 1, what == "receive"
            if not (leaving or (coming and here.stream > 0)):
                continue
            sender = rank if leaving else rank - self._topology.tensor
            id_ = epoch * 2**40 + times.step_id * self._topology.ranks + sender  # Perfetto needs a number
            # Data may arrive before the call that sends it returns, but never before that call begins.
            moment = since if leaving else until - min(1e-6, (until - since) / 2)
            arrow = self._event(
                "s" if leaving else "f", "hidden states", moment + offset, cat="stage", id=id_
            )
            found.append(arrow | where | ({} if leaving else {"bp": "e"}))
        return found

    def _slice(
        self, name: str, since: float, until: float, offset: float, where: dict[str, int], args: Event
    ) -> Event:
        event = self._event("X", name, since + offset, args=args)
        return event | where | {"dur": round(1e6 * max(0.0, until - since), 3)}

    def _event(self, kind: str, name: str, at: float, **more: Any) -> Event:
        at_microseconds = round(1e6 * (at - self._began), 3)
        return {"ph": kind, "name": name, "ts": at_microseconds, "pid": 0, "tid": 0, **more}


def _is_time(seconds: float) -> bool:
    return abs(seconds) <= LARGEST_SECONDS  # false for NaN


def _are_times(times: StepTimes) -> bool:
    of_spans = (moment for _, since, until in times.spans for moment in (since, until))
    return all(
        map(_is_time, (times.started, times.ended, *of_spans, *(seconds for _, seconds in times.waits)))
    )


def _parts(times: StepTimes, *, samples: bool) -> list[tuple[str, float, float]]:
    """Return the spans of a step.

    The span of the forward pass excludes the receive before it and the send after it. With `samples`, sampling
    (named "sample") lasts from the end of the forward pass to the end of the step.
    """
    found = [span for span in times.spans if span[0] != "forward"]
    for what, since, until in times.spans:
        if what != "forward":
            continue
        received = [end for name, _, end in found if name.startswith("receive") and end <= until]
        begins = max(received, default=since)
        sent = [start for name, start, _ in found if name == "send" and begins <= start <= until]
        found.append((what, begins, min(sent, default=until)))
        if samples:
            found.append(("sample", until, times.ended))
    return found


def _on_lane(step: StepLaunched | None, lane: int) -> StepLaunched | None:
    """Return the step with only the chunks and decodes of one lane."""
    if step is None:
        return None
    return replace(
        step,
        chunks=tuple(chunk for chunk in step.chunks if chunk.lane == lane),
        decodes=tuple(decode for decode in step.decodes if decode[1] == lane),
    )


def _label(step: StepLaunched, nothing: str = "update") -> str:
    prefill, decodes = sum(chunk.tokens for chunk in step.chunks), len(step.decodes)
    parts = [f"prefill {prefill}"] * bool(step.chunks) + [f"decode {decodes}"] * bool(decodes)
    return " + ".join(parts) or nothing


def _args(step: StepLaunched) -> Event:
    return {
        "lanes": list(step.lanes),
        "chunks": [f"{one.request}: {one.start} to {one.start + one.tokens}" for one in step.chunks],
        "decodes": [name for name, _ in step.decodes[:MOST_NAMED]],
        "predicted_ms": round(1e3 * step.predicted_seconds, 3),
    }


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _sorted(pid: int) -> Event:
    """Return the event that sorts processes by their ids."""
    return {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


def _note(text: str) -> Event:
    """Return a note on the whole trace, shown at its beginning."""
    return {"ph": "i", "name": text, "ts": 0.0, "pid": 0, "tid": 0, "s": "g"}


def _lines(events: Iterable[Event], *, first: bool = False) -> bytes:
    """Return events as lines of a JSON array: `first` ones open the array, later ones begin with a comma."""
    lines = [json.dumps(event, separators=(",", ":")) for event in events]
    if not lines:
        return b""
    return (("[\n" if first else ",\n") + ",\n".join(lines)).encode()


def read_trace(text: str | bytes) -> list[Event]:
    """Return the events of a trace, even of one that was cut off.

    Raises:
        ValueError: the text is not a trace.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="ignore")
    if not text.startswith("["):
        raise ValueError("a trace begins with [")
    before_last = text[: text.rindex(",\n")] if ",\n" in text else "["
    for attempt in (text, f"{text}]"):
        try:
            return list(json.loads(attempt))
        except ValueError:
            pass
    return list(json.loads(f"{before_last}]"))
