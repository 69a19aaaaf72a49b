"""State machine, without I/O, for the parts of `medha up` or a pod: when to restart, stop and kill them.

Transitions::

    STARTING --ready--> SERVING --Ctrl-C--> DRAINING --the last part has exited--> ENDED (exit 0)
        |                  |                   |
        |                  |                   +-- a part asked to stop fails, or is late --> STOPPING (exit 1)
        |                  +-- a part exits: it is restarted; the third time in a minute,
        |                  |       or the twentieth in an hour ------------------------------> STOPPING (exit 1)
        |                  +-- a part falls silent: it is killed, and so exits
        |                  +-- both also while DRAINING, as long as requests may be open
        +-- a part falls silent: it is named
        +-- a part exits, or ready takes too long ------------------------------------------> STOPPING (exit 1)
        +-- Ctrl-C -------------------------------------------------------------------------> STOPPING (exit 0)

    DRAINING or STOPPING --Ctrl-C again--> KILLING (exit 130)
    STOPPING --grace is over--> KILLING
    STARTING or SERVING --the watch of the parts ends them--> STOPPING (its exit status)

DRAINING asks the parts to stop in order, one group after the other: the router first, because it knows the
open requests and ends when the last is finished; then the controller, then the ranks. STOPPING asks all at
once. After a failure it asks them not to drain, because no request can be finished without the part that
failed. Where another pod has the requests (`awaits_notice`), DRAINING asks no part: that pod's controller
notifies the ranks when the last request is finished. STARTING, DRAINING and STOPPING have a deadline, so none
of them lasts for ever (a pod's watch has its own limit for STARTING). The state is ENDED when no part runs
any more, never before.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, replace
from enum import Enum

from medha.errors import AcceleratorMissing

GRACE_SECONDS = 10.0  # time to exit after a SIGTERM, for a part that has no requests to finish
FAILED_GRACE_SECONDS = 3.0  # the same after a failure: enough to send an error to clients
MOST_DEATHS = 3  # deaths of one part within DEATHS_SECONDS after which its fault is assumed to be permanent
DEATHS_SECONDS = 60.0
MOST_DEATHS_SLOW = 20  # the same within SLOW_DEATHS_SECONDS, so that no slow crash loop goes on for ever
SLOW_DEATHS_SECONDS = 3600.0
_BECAUSE = " because: "  # before the reason that a part has logged
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    KILLING = "killing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Ready:
    """The replica answers requests."""


@dataclass(frozen=True, slots=True)
class Exited:
    """A part has ended.

    `status` is as in subprocess: negative for a signal. `last_line` is its last line of output.
    `last_log_lines` is the reason that it logged for its end, if any, which has not been shown yet.
    """

    part: str
    status: int
    last_line: str = ""
    last_log_lines: str = ""


@dataclass(frozen=True, slots=True)
class Silent:
    """A running part has sent no heartbeat for `seconds`: it was stopped, or hangs."""

    part: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ctrl-C or SIGTERM.

    `busy`: requests may be open here. `drain_seconds`, if given, replaces the value that was set at the
    start.
    """

    busy: bool = True
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """The watch of the parts has found that they cannot go on together."""

    reason: str
    exit_status: int = 1


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The event that only time has passed; deadlines are checked."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a part to stop: after its open requests (`drain`), or at once, with an error for each of them."""

    part: str
    drain: bool = True


@dataclass(frozen=True, slots=True)
class Kill:
    part: str


@dataclass(frozen=True, slots=True)
class Start:
    """Restart a part."""

    part: str


@dataclass(frozen=True, slots=True)
class Present:
    """Show the start table."""


@dataclass(frozen=True, slots=True)
class Log:
    text: str


Event = Ready | Exited | Silent | Interrupt | Abort | TimePassed
Command = Terminate | Kill | Start | Present | Log


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of one `medha up` or pod. `deadline` is in seconds, on the clock of `now` in `handle`."""

    groups: tuple[tuple[str, ...], ...]  # parts in the order in which they are asked to stop
    running: frozenset[str]
    deadline: float
    drain_seconds: float
    ready_seconds: float
    awaits_notice: bool = False  # another pod's controller notifies the parts when requests are drained
    phase: Phase = Phase.STARTING
    stop_requested: frozenset[str] = frozenset()
    deaths: tuple[tuple[str, float], ...] = ()  # parts that have ended while needed, and when
    silent: frozenset[str] = frozenset()  # parts already reported as silent while starting
    exit_status: int = 0
    failure: str = ""  # why exit_status is not 0

    @property
    def in_order(self) -> list[str]:
        """Running parts, in the order in which they are stopped."""
        return [part for group in self.groups for part in group if part in self.running]


def begin(
    groups: tuple[tuple[str, ...], ...],
    now: float,
    *,
    ready_seconds: float,
    drain_seconds: float,
    awaits_notice: bool = False,
) -> Lifecycle:
    """Return the state of a replica whose parts have just been started."""
    return Lifecycle(
        groups=groups,
        running=frozenset(part for group in groups for part in group),
        deadline=now + ready_seconds,
        drain_seconds=drain_seconds,
        ready_seconds=ready_seconds,
        awaits_notice=awaits_notice,
    )


def handle(state: Lifecycle, event: Event, now: float) -> tuple[Lifecycle, list[Command]]:
    """Return the state after `event`, and the commands to carry out."""
    match event:
        case Ready() if state.phase is Phase.STARTING:
            return replace(state, phase=Phase.SERVING, deadline=math.inf), [Present()]
        case Interrupt(busy, drain_seconds):
            if drain_seconds is not None:
                state = replace(state, drain_seconds=drain_seconds)
            return _interrupted(state, now, busy=busy)
        case Abort(reason, exit_status) if state.phase in (Phase.STARTING, Phase.SERVING):
            return _fail(state, now, reason, exit_status)
        case Exited() if event.part in state.running:
            return _exited(replace(state, running=state.running - {event.part}), event, now)
        case Silent(part, seconds) if part in state.running and _is_needed(state, part):
            return state, [Log(f"{part} has sent no heartbeat for {seconds:g} s; killing it"), Kill(part)]
        case Silent(part, seconds) if state.phase is Phase.STARTING and part not in state.silent:
            # It may read weights from a slow disk. The deadline bounds that, and this line names the part.
            state = replace(state, silent=state.silent | {part})
            return state, [Log(f"{part} has sent no heartbeat for {seconds:g} s")]
        case TimePassed() if now >= state.deadline:
            return _too_late(state, now)
    return state, []


def _interrupted(state: Lifecycle, now: float, *, busy: bool) -> tuple[Lifecycle, list[Command]]:
    match state.phase:
        case Phase.STARTING:
            state, commands = _stop(state, now, GRACE_SECONDS)
            return state, [Log("stopping before the replica was ready"), *commands]
        case Phase.SERVING:
            return _drain(state, now, busy=busy)
        case Phase.DRAINING | Phase.STOPPING:
            state, commands = _kill(replace(state, exit_status=state.exit_status or INTERRUPTED))
            return state, [Log("killing all parts"), *commands]
        case Phase.KILLING | Phase.ENDED:
            return state, []


def _drain(state: Lifecycle, now: float, *, busy: bool) -> tuple[Lifecycle, list[Command]]:
    if not busy:
        state, commands = _stop(state, now, GRACE_SECONDS)
        return state, [Log("stopping: no requests are open here"), *commands]
    state = replace(state, phase=Phase.DRAINING)
    if state.awaits_notice:
        text = f"draining: the leader gets {state.drain_seconds:g} s to finish open requests"
        return replace(state, deadline=now + state.drain_seconds + GRACE_SECONDS), [Log(text)]
    state, commands = _stop_next_group(state, now)
    text = f"draining: open requests get {state.drain_seconds:g} s to finish; Ctrl-C again kills"
    return state, [Log(text), *commands]


def _exited(state: Lifecycle, event: Exited, now: float) -> tuple[Lifecycle, list[Command]]:
    commands: list[Command] = []
    match state.phase:
        case Phase.STARTING:
            reason = f"before the replica was ready, {_how(event)}"
            state, commands = _fail(state, now, reason, _status_after(event))
        case Phase.SERVING:
            state, commands = _start_again(state, event, now)
        case Phase.DRAINING:
            clean = (0, -signal.SIGTERM) if event.part in state.stop_requested else (0,)
            if event.status in clean:
                state, commands = _stop_next_group(state, now)
            elif _is_needed(state, event.part):
                state, commands = _start_again(state, event, now)
            else:
                state, commands = _fail(state, now, f"while draining, {_how(event)}")
        case Phase.STOPPING | Phase.KILLING | Phase.ENDED:
            if event.last_log_lines and not _is_reported(state.failure, event.last_log_lines):
                commands = [Log(_how(event))]
    if not state.running:
        state = replace(state, phase=Phase.ENDED, deadline=math.inf)
    return state, commands


def _is_needed(state: Lifecycle, part: str) -> bool:
    """Return whether open requests may need this part, so that it is restarted if it ends or hangs.

    While draining, they may need a part that was not asked to stop as long as a part of the first group runs,
    or, with `awaits_notice`, until the part ends on the other pod's notice.
    """
    match state.phase:
        case Phase.SERVING:
            return True
        case Phase.DRAINING if part not in state.stop_requested:
            return state.awaits_notice or not state.running.isdisjoint(state.groups[0])
        case _:
            return False


def _start_again(state: Lifecycle, event: Exited, now: float) -> tuple[Lifecycle, list[Command]]:
    """Restart a part that has ended while requests may be open, or fail if it has died too often."""
    recent = tuple((part, at) for part, at in state.deaths if now - at < SLOW_DEATHS_SECONDS)
    own = [at for part, at in recent if part == event.part] + [now]
    for most, seconds in ((MOST_DEATHS, DEATHS_SECONDS), (MOST_DEATHS_SLOW, SLOW_DEATHS_SECONDS)):
        deaths = sum(now - at < seconds for at in own)
        if deaths >= most:
            times = f"{deaths} times in {seconds:g} s"
            reason = f"{_how(event)}; it ended {times}, and is not restarted"
            return _fail(state, now, reason, _status_after(event))
    state = replace(state, running=state.running | {event.part}, deaths=(*recent, (event.part, now)))
    times = f" (it ended {len(own)} times within an hour)" if len(own) > 1 else ""
    return state, [Log(f"{_how(event)}; restarting it{times}"), Start(event.part)]


def _too_late(state: Lifecycle, now: float) -> tuple[Lifecycle, list[Command]]:
    match state.phase:
        case Phase.STARTING:
            reason = (
                f"not ready after {state.ready_seconds:g} s; see the last lines above, "
                "or raise spec.lifecycle.readySeconds"
            )
            return _fail(state, now, reason)
        case Phase.DRAINING if not state.stop_requested:
            state, commands = _stop(state, now, GRACE_SECONDS)
            return state, [
                Log("the leader did not report in time that the replica is drained; stopping"),
                *commands,
            ]
        case Phase.DRAINING:
            late = [part for part in state.in_order if part in state.stop_requested]
            return _fail(state, now, f"{', '.join(late)} did not stop in time and will be killed")
        case _:
            return _kill(state)


def _fail(state: Lifecycle, now: float, reason: str, exit_status: int = 1) -> tuple[Lifecycle, list[Command]]:
    """Stop all parts because of `reason`; only the first failure is reported.

    Nothing can be drained without the part that failed, so parts that were asked to drain are now asked to
    stop at once.
    """
    state = replace(
        state,
        exit_status=state.exit_status or exit_status,
        failure=state.failure or reason,
        stop_requested=frozenset(),
    )
    return _stop(state, now, FAILED_GRACE_SECONDS, drain=False)


def _stop(
    state: Lifecycle, now: float, grace_seconds: float, *, drain: bool = True
) -> tuple[Lifecycle, list[Command]]:
    commands: list[Command] = [
        Terminate(part, drain) for part in state.in_order if part not in state.stop_requested
    ]
    return replace(
        state, phase=Phase.STOPPING, stop_requested=state.running, deadline=now + grace_seconds
    ), commands


def _kill(state: Lifecycle) -> tuple[Lifecycle, list[Command]]:
    return replace(state, phase=Phase.KILLING, deadline=math.inf), [Kill(part) for part in state.in_order]


def _stop_next_group(state: Lifecycle, now: float) -> tuple[Lifecycle, list[Command]]:
    """Ask the first group that still runs to stop, unless it was asked before."""
    for index, group in enumerate(state.groups):
        left = [part for part in group if part in state.running]
        if not left:
            continue
        if state.stop_requested.issuperset(left):
            return state, []
        work_seconds = state.drain_seconds if index == 0 else 0.0  # only the first has requests to finish
        deadline = now + work_seconds + GRACE_SECONDS
        return replace(state, stop_requested=state.stop_requested.union(left), deadline=deadline), [
            Terminate(p) for p in left
        ]
    return state, []


def _status_after(event: Exited) -> int:
    """Return the exit status after a part's end: its own if that says what is missing, else 1."""
    missing = AcceleratorMissing.exit_status
    return missing if event.status == missing else 1


def _is_reported(failure: str, words: str) -> bool:
    """Return whether `failure` already contains this reason: a rank and its controller may both log it."""
    return words in failure or failure.rpartition(_BECAUSE)[2] in words


def _how(event: Exited) -> str:
    if event.status < 0:
        try:
            how = f"was killed by {signal.Signals(-event.status).name}"
        except ValueError:
            how = f"was killed by signal {-event.status}"
    else:
        how = f"exited with status {event.status}"
    if event.status == -signal.SIGILL:
        how += (
            " (an instruction that this CPU announces but lacks, as some virtual machines do with AMX: set "
            "model.dtype to float32, or ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment)"
        )
    if event.last_log_lines:
        return f"{event.part} {how}{_BECAUSE}{event.last_log_lines}"
    return f"{event.part} {how}" + (f"; its last line: {event.last_line}" if event.last_line else "")
