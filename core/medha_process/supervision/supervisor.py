"""Supervisor of the parts of a replica, as processes: thin I/O around `lifecycle`.

Each part leads its own session, so that a terminal's Ctrl-C reaches only the supervisor, and the processes
that a part has started can be ended with it. Two threads per part only wait: one for its output, one for its
end. Output, ends, signals and reported states become events in one queue, which the main thread handles one
by one; it writes through `Shown`, which has a thread of its own. Silent parts are found by polling
(`heartbeat`). The states that parts report go to a `Watch`, which may end all parts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import IO, Any, Protocol, Self

from medha_process.part_process import PARENT
from medha_process.part_state import PartState
from medha_process.supervision.heartbeat import POLL_SECONDS, Beats, Listener, is_stopped
from medha_process.supervision.lifecycle import (
    Abort,
    Command,
    Event,
    Exited,
    Interrupt,
    Kill,
    Lifecycle,
    Log,
    Phase,
    Present,
    Ready,
    Silent,
    Start,
    Terminate,
    TimePassed,
    begin,
    handle,
)
from medha_process.supervision.supervisor_output import Display, Shown, local_time

READY_POLL_SECONDS = 0.1
LAST_LINES_SECONDS = 1.0  # longest wait for output that is still in the pipe when a part has ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the replica: how to start and how to stop it."""

    name: str
    argv: tuple[str, ...]
    # Defaults: variables that are set in the supervisor's own environment take precedence.
    environment: Mapping[str, str] = field(default_factory=dict)
    end_signal: signal.Signals = signal.SIGTERM  # signal that stops it at once; SIGTERM may drain it first


@dataclass(frozen=True, slots=True)
class Printed:
    """A part has written one line."""

    part: str
    line: str
    at: datetime


@dataclass(frozen=True, slots=True)
class StateReported:
    """A process has reported its state."""

    process_id: int
    state: PartState


class Watch(Protocol):
    """Follows the states that parts report.

    All methods are called in the main thread, with a monotonic `now`.
    """

    def reported(self, part: str, state: PartState, now: float) -> None: ...

    def ended(self, part: str, now: float) -> None: ...

    def poll(self, now: float) -> Abort | None:
        """Return an `Abort` if the parts cannot continue, else None; called at least every second."""

    def interrupted(self) -> Interrupt:
        """Return whether requests may be open and how long they get.

        Called before parts are asked to stop.
        """

    def stopping_for(self, reason: str) -> None:
        """Record that the parts will be stopped for `reason`: `poll` has returned an `Abort`."""


class Unwatched:
    """The watch of `medha up`, which never ends the parts: the supervisor has all parts, and polls the router."""

    def reported(self, part: str, state: PartState, now: float) -> None: ...

    def ended(self, part: str, now: float) -> None: ...

    def poll(self, now: float) -> Abort | None: ...

    def interrupted(self) -> Interrupt:
        return Interrupt()

    def stopping_for(self, reason: str) -> None: ...


_InboxEvent = Event | Printed | StateReported


class StopRequests:
    """Context manager that turns stop signals into events; while it lasts, none of them ends the process."""

    def __init__(self) -> None:
        self.events: SimpleQueue[_InboxEvent] = SimpleQueue()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            self.events.put(Interrupt())

        # SIGHUP stays ignored under `nohup`: closing the terminal must end nothing.
        seen = (
            one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN
        )
        self._before = {number: signal.signal(number, interrupt) for number in seen}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def supervise(
    groups: tuple[tuple[Part, ...], ...],
    *,
    run_directory: Path,
    is_ready: Callable[[], bool],
    display: Display,
    ready_seconds: float,
    drain_seconds: float,
    awaits_notice: bool = False,
    watch: Watch | None = None,
    requests: StopRequests,
) -> Lifecycle:
    """Start every part, and return the final state once the last one has ended; call it in the main thread.

    `groups` is the order in which the parts are asked to stop. `run_directory` gets the socket for
    heartbeats. `is_ready` is polled until it is true, and must not block for long. With `awaits_notice`,
    another pod's controller notifies these parts when the replica is drained. `requests` must have been
    entered; signals that came before the parts were started count.

    Raises:
        ConfigInvalid: no socket can be created in `run_directory`.
    """
    names = tuple(tuple(part.name for part in group) for group in groups)
    parts = [part for group in groups for part in group]
    supervision = _Supervision(run_directory, is_ready, display, watch or Unwatched(), requests.events)
    try:
        supervision.start(parts)
        state = begin(
            names,
            time.monotonic(),
            ready_seconds=ready_seconds,
            drain_seconds=drain_seconds,
            awaits_notice=awaits_notice,
        )
        return supervision.run(state)
    finally:
        supervision.close()


class _Supervision:
    """The running parts of a replica or pod: events about them go to the lifecycle, and its commands are carried out."""

    def __init__(
        self,
        run_directory: Path,
        is_ready: Callable[[], bool],
        display: Display,
        watch: Watch,
        events: SimpleQueue[_InboxEvent],
    ) -> None:
        self._watch = watch
        self._events = events
        self._beats = Beats()
        self._listener = Listener(
            run_directory, self._beats, lambda process_id, state: events.put(StateReported(process_id, state))
        )
        self._shown = Shown(display)  # only now: its thread ends when it is closed
        self._inbox = _Inbox(events, is_ready, self._silent, self._poll)
        self._parts: dict[str, Part] = {}
        self._running: dict[str, _Process] = {}

    def start(self, parts: Sequence[Part]) -> None:
        """Start all parts for the first time."""
        self._parts = {part.name: part for part in parts}
        self._shown.starting([part.name for part in parts])
        for part in parts:
            self._start(part)

    def run(self, state: Lifecycle) -> Lifecycle:
        """Handle events until no part runs any more, and return the final state."""
        while state.phase is not Phase.ENDED:
            event = self._inbox.next(state)
            if isinstance(event, Printed):
                self._shown.line(event.part, event.line, event.at)
            elif isinstance(event, StateReported):
                self._reported(event, is_starting=state.phase is Phase.STARTING)
            else:
                state, commands = handle(state, self._noticed(event), time.monotonic())
                for command in commands:
                    self._carry_out(command)
        return state

    def close(self) -> None:
        """Free everything; parts still run here only after an error of ours."""
        for process in self._running.values():
            process.kill()
            process.reap()
        self._listener.close()
        self._shown.close()

    def _start(self, part: Part) -> None:
        self._running[part.name] = process = _Process(part, self._events, self._listener.address)
        self._beats.started(process.pid, time.monotonic())

    def _silent(self) -> list[Silent]:
        if self._listener.problem():
            return []  # the listener is at fault, not the parts
        found = self._beats.silent(time.monotonic(), is_stopped)
        return [
            Silent(name, round(found[process.pid], 1))
            for name, process in self._running.items()
            if process.pid in found
        ]

    def _poll(self, now: float) -> Abort | None:
        abort, problem = self._watch.poll(now), self._listener.problem()
        return Abort(f"no part can be watched any more: {problem}") if problem else abort

    def _reported(self, event: StateReported, *, is_starting: bool) -> None:
        for name, process in self._running.items():
            if process.pid == event.process_id:
                self._watch.reported(name, event.state, time.monotonic())
                if is_starting:
                    self._shown.progress(name, event.state)

    def _noticed(self, event: Event) -> Event:
        """Notify the watch of an event, and return what the lifecycle is to handle."""
        match event:
            case Exited(name):
                self._beats.forget(self._running[name].pid)
                self._running[name].reap()
                self._watch.ended(name, time.monotonic())
            case Interrupt():
                return self._watch.interrupted()
            case Abort(reason):
                self._watch.stopping_for(reason)
        return event

    def _carry_out(self, command: Command) -> None:
        match command:
            case Terminate(name, drain):
                self._running[name].terminate(drain=drain)
            case Kill(name):
                self._beats.forget(self._running[name].pid)
                self._running[name].kill()
            case Start(name):
                self._start(self._parts[name])
            case Present():
                self._shown.ready({name: process.pid for name, process in self._running.items()})
            case Log(text):
                self._shown.log(text)


class _Inbox:
    """Source of the main thread's events.

    Lines, ends and signals come from the queue; readiness, silence and deadlines are polled.
    """

    def __init__(
        self,
        events: SimpleQueue[_InboxEvent],
        is_ready: Callable[[], bool],
        silent: Callable[[], list[Silent]],
        poll: Callable[[float], Abort | None],
    ) -> None:
        self._events = events
        self._is_ready = is_ready
        self._silent = silent
        self._poll = poll
        self._poll_at = self._silence_at = time.monotonic()
        self._has_aborted = False

    def next(self, state: Lifecycle) -> _InboxEvent:
        """Return the next event; polling comes first, so that a part's endless output cannot delay it."""
        now = time.monotonic()
        if now >= state.deadline:
            return TimePassed()
        abort = self._poll(now)
        if abort is not None and not self._has_aborted:
            self._has_aborted = True
            return abort
        poll_at = min(state.deadline, now + POLL_SECONDS)
        if state.phase is Phase.STARTING:
            if now >= self._poll_at:
                self._poll_at = now + READY_POLL_SECONDS
                if self._is_ready():
                    return Ready()
            poll_at = min(poll_at, self._poll_at)
        if state.phase in (Phase.STARTING, Phase.SERVING, Phase.DRAINING):
            if now >= self._silence_at:
                self._silence_at = now + POLL_SECONDS
                for part in self._silent():
                    self._events.put(part)
            poll_at = min(poll_at, self._silence_at)
        try:
            return self._events.get(timeout=max(0.0, poll_at - now))
        except Empty:
            return TimePassed()


def last_log_lines(line: str) -> str:
    """Return the reason for a part's end if this line has it, else an empty text.

    A part logs the reason as CRITICAL, and nothing after it. It is reported with the end, not as a line.
    """
    level, _, rest = line.partition(" ")
    return rest.partition(": ")[2] if level == "CRITICAL" else ""


class _Process:
    """A running part.

    Only the main thread signals and reaps it, so its id is never that of another process.
    """

    def __init__(self, part: Part, events: SimpleQueue[_InboxEvent], notify_socket: str) -> None:
        self._name = part.name
        self._end_signal = part.end_signal
        self._events = events
        self._last_line = self._last_log_lines = ""
        self._process = subprocess.Popen(
            part.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **part.environment,
                **os.environ,
                "PYTHONUNBUFFERED": "1",
                PARENT: str(os.getpid()),
                "NOTIFY_SOCKET": notify_socket,
            },
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._reader = Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        self._waiter = Thread(target=self._await_end, daemon=True)
        self._waiter.start()

    def terminate(self, *, drain: bool) -> None:
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGTERM if drain else self._end_signal)

    def kill(self) -> None:
        """Kill the part and the processes that it has started."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Collect the status of a part that has ended or was killed."""
        self._waiter.join()
        self._process.wait()

    def _read(self, output: IO[bytes]) -> None:
        with output:
            for raw in output:
                line = raw.decode("utf-8", errors="replace").rstrip()
                at = local_time()
                if self._last_log_lines:  # another line follows, so they were not the last ones
                    self._events.put(Printed(self._name, self._last_line, at))
                self._last_log_lines = last_log_lines(line)
                if line:
                    self._last_line = line
                if not self._last_log_lines:
                    self._events.put(Printed(self._name, line, at))

    def _await_end(self) -> None:
        # WNOWAIT leaves the process to be reaped by the main thread, which may be about to signal it.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        os.killpg(self.pid, signal.SIGKILL)  # processes that it left behind, such as a tokenizer pool
        self._reader.join(LAST_LINES_SECONDS)
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._events.put(Exited(self._name, status, self._last_line, self._last_log_lines))
