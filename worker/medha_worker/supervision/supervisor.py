"""Running parts of a replica as processes: thin I/O around `lifecycle`.

Each part leads a session of its own, so a terminal's Ctrl-C reaches the supervisor alone, and whatever a part
has started can be ended with it. Two threads per part only wait: one for its output, one for its end. All that
happens becomes an event in one queue, and the main thread takes them one by one; what it has to say is `Shown` from
another. Parts that fall silent are found by looking (`heartbeat`). What parts say that they are at goes to a `Watch`, which may give up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import IO, Any, Protocol, Self

from medha_worker.part_state import PartState
from medha_worker.process import PARENT
from medha_worker.supervision.heartbeat import LOOK_SECONDS, Beats, Listener, is_stopped
from medha_worker.supervision.lifecycle import (
    Event,
    Exited,
    GiveUp,
    Interrupt,
    Kill,
    Lifecycle,
    Phase,
    Present,
    Ready,
    Say,
    Silent,
    Start,
    Terminate,
    TimePassed,
    begin,
    handle,
)
from medha_worker.supervision.shown import Display, Shown, local_time

READY_POLL_SECONDS = 0.1
LAST_LINES_SECONDS = 1.0  # for output that is still in the pipe when a part has ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the replica."""

    name: str
    argv: tuple[str, ...]
    # Added to the environment, where the user's own does not say otherwise.
    environment: Mapping[str, str] = field(default_factory=dict)
    end_signal: signal.Signals = signal.SIGTERM  # stops it at once, where SIGTERM drains it first


@dataclass(frozen=True, slots=True)
class Printed:
    """A part has written one line."""

    part: str
    line: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Told:
    """A process has said what it is at."""

    process_id: int
    state: PartState


class Watch(Protocol):
    """Follows what the parts say that they are at; all of it is called in the main thread, with a monotonic `now`."""

    def told(self, part: str, state: PartState, now: float) -> None: ...

    def ended(self, part: str, now: float) -> None: ...

    def look(self, now: float) -> GiveUp | None:
        """Called at least every second: whether the parts can go on."""

    def interrupted(self) -> Interrupt:
        """The parts will be asked to stop: whether requests may be open, and how long they get."""

    def gives_up(self, reason: str) -> None:
        """The parts will be ended, as `look` has said."""


class Unwatched:
    """The watch of `medha up`: it sees all of a replica's parts end, and asks its router whether it is ready."""

    def told(self, part: str, state: PartState, now: float) -> None: ...

    def ended(self, part: str, now: float) -> None: ...

    def look(self, now: float) -> GiveUp | None: ...

    def interrupted(self) -> Interrupt:
        return Interrupt()

    def gives_up(self, reason: str) -> None: ...


_Happening = Event | Printed | Told


class StopRequests:
    """The signals that ask to stop, as events: while this context lasts, none of them ends the process by itself."""

    def __init__(self) -> None:
        self.events: SimpleQueue[_Happening] = SimpleQueue()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            self.events.put(Interrupt())

        # Whoever started us with `nohup` means that a terminal which closes ends nothing.
        heard = (
            one for one in STOP_SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN
        )
        self._before = {number: signal.signal(number, interrupt) for number in heard}
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
    awaits_word: bool = False,
    watch: Watch | None = None,
    requests: StopRequests,
) -> Lifecycle:
    """Start every part, and return the final state once the last one has ended; call it in the main thread.

    `groups` is the order in which the parts are asked to stop. `run_directory` gets the socket on which they show that
    they live. `is_ready` is polled until it is true, and must not block for long. `awaits_word`: another pod's part
    tells these ones when the replica is drained. `requests` has begun: what came before the parts were started counts.

    Raises:
        ConfigInvalid: there can be no socket in `run_directory`.
    """
    watch = watch or Unwatched()
    parts = [part for group in groups for part in group]
    by_name = {part.name: part for part in parts}
    names = tuple(tuple(part.name for part in group) for group in groups)
    events = requests.events
    beats = Beats()
    listener = Listener(run_directory, beats, lambda process_id, state: events.put(Told(process_id, state)))
    shown = Shown(display)
    running: dict[str, _Process] = {}

    def start(part: Part) -> None:
        running[part.name] = process = _Process(part, events, listener.address)
        beats.started(process.pid, time.monotonic())

    def silent() -> list[Silent]:
        if listener.trouble():
            return []  # it is not the parts that are to blame
        found = beats.silent(time.monotonic(), is_stopped)
        return [
            Silent(name, round(found[process.pid], 1))
            for name, process in running.items()
            if process.pid in found
        ]

    def look(now: float) -> GiveUp | None:
        given_up, trouble = watch.look(now), listener.trouble()
        return GiveUp(f"no part can be watched any more: {trouble}") if trouble else given_up

    inbox = _Inbox(events, is_ready, silent, look)
    try:
        shown.starting([part.name for part in parts])
        for part in parts:
            start(part)
        state = begin(
            names,
            time.monotonic(),
            ready_seconds=ready_seconds,
            drain_seconds=drain_seconds,
            awaits_word=awaits_word,
        )
        while state.phase is not Phase.ENDED:
            event = inbox.next(state)
            if isinstance(event, Printed):
                shown.line(event.part, event.line, event.at)
                continue
            if isinstance(event, Told):
                for name, process in running.items():
                    if process.pid == event.process_id:
                        watch.told(name, event.state, time.monotonic())
                        if state.phase is Phase.STARTING:
                            shown.progress(name, event.state)
                continue
            match event:
                case Exited(name):
                    beats.forget(running[name].pid)
                    running[name].reap()
                    watch.ended(name, time.monotonic())
                case Interrupt():
                    event = watch.interrupted()
                case GiveUp(reason):
                    watch.gives_up(reason)
            state, commands = handle(state, event, time.monotonic())
            for command in commands:
                match command:
                    case Terminate(name, drain):
                        running[name].terminate(drain=drain)
                    case Kill(name):
                        beats.forget(running[name].pid)
                        running[name].kill()
                    case Start(name):
                        start(by_name[name])
                    case Present():
                        shown.ready({name: process.pid for name, process in running.items()})
                    case Say(text):
                        shown.say(text)
        return state
    finally:
        for process in running.values():
            process.kill()  # only what an error of ours has left
            process.reap()
        listener.close()
        shown.close()


class _Inbox:
    """What has happened: lines, ends and signals from the queue; readiness, silence and deadlines from looking."""

    def __init__(
        self,
        events: SimpleQueue[_Happening],
        is_ready: Callable[[], bool],
        silent: Callable[[], list[Silent]],
        look: Callable[[float], GiveUp | None],
    ) -> None:
        self._events = events
        self._is_ready = is_ready
        self._silent = silent
        self._look = look
        self._poll_at = self._silence_at = time.monotonic()
        self._gave_up = False

    def next(self, state: Lifecycle) -> _Happening:
        """The next event; looking comes first, so that a part that prints without end hides nothing."""
        now = time.monotonic()
        if now >= state.deadline:
            return TimePassed()
        given_up = self._look(now)
        if given_up is not None and not self._gave_up:
            self._gave_up = True
            return given_up
        look_at = min(state.deadline, now + LOOK_SECONDS)
        if state.phase is Phase.STARTING:
            if now >= self._poll_at:
                self._poll_at = now + READY_POLL_SECONDS
                if self._is_ready():
                    return Ready()
            look_at = min(look_at, self._poll_at)
        if state.phase in (Phase.STARTING, Phase.SERVING, Phase.DRAINING):
            if now >= self._silence_at:
                self._silence_at = now + LOOK_SECONDS
                for part in self._silent():
                    self._events.put(part)
            look_at = min(look_at, self._silence_at)
        try:
            return self._events.get(timeout=max(0.0, look_at - now))
        except Empty:
            return TimePassed()


def last_words(line: str) -> str:
    """Why a part ends, if this line says so: they are told with its end, and not as a line.

    A part logs it as critical, and nothing after it.
    """
    level, _, rest = line.partition(" ")
    return rest.partition(": ")[2] if level == "CRITICAL" else ""


class _Process:
    """One running part. Only the main thread signals and reaps it, so its id is never another process's."""

    def __init__(self, part: Part, events: SimpleQueue[_Happening], notify_socket: str) -> None:
        self._name = part.name
        self._end_signal = part.end_signal
        self._events = events
        self._last_line = self._last_words = ""
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
        """End the part and everything that it has started."""
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
                if self._last_words:  # they were none
                    self._events.put(Printed(self._name, self._last_line, at))
                self._last_words = last_words(line)
                if line:
                    self._last_line = line
                if not self._last_words:
                    self._events.put(Printed(self._name, line, at))

    def _await_end(self) -> None:
        # WNOWAIT leaves the process to be reaped by the main thread, which may be about to signal it.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        os.killpg(self.pid, signal.SIGKILL)  # what it has started and left behind, such as a tokenizer pool
        self._reader.join(LAST_LINES_SECONDS)
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self._events.put(Exited(self._name, status, self._last_line, self._last_words))
