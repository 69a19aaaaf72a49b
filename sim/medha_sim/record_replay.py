"""Replay the record of a live replica (`medha up --record`), and simulate it under other settings.

The first line of a record holds the manifest's spec (and the profile, if the spec names one), the second the
`RankReady` that the settings were derived from. Each later line holds one controller event, its time and a
digest of the commands that it led to.

* `verify` feeds the events to a fresh controller and compares the commands. A difference means that the code
  has changed since, or that the controller is not deterministic, which would be a bug.
* `read` converts the record into the `RunLog` of a simulation, so that both are judged by the same figures.
* `what_if` simulates the same requests again under any scheduling. Each step takes the time of a randomly
  drawn live step with a similar predicted time, so slow moments of the machine are included. The draws are
  paired: with one seed, the machine is slow at the same times under every scheduling (`SlowMoments`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from medha.api.replica import MedhaReplicaSpec, SchedulingSpec
from medha.cost.cost_profile import Profile
from medha.cost.predictor import Predictor
from medha.errors import ConfigInvalid, WireInvalid
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Completed, History
from medha.scheduler.replica_config import ReplicaConfig, derive
from medha.wire.frames import decode, digest
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    DiskReport,
    Done,
    Drain,
    Emit,
    Failed,
    GrammarReady,
    KvAsk,
    KvDone,
    KvTicket,
    RankReady,
    Refused,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tick,
)
from medha_sim.executor import PredictorCost, StepCost, StepTiming
from medha_sim.run_log import RequestRecord, RunLog
from medha_sim.run_summary import SERIES_POINTS
from medha_sim.scenario import medha_replica
from medha_sim.simulation import Arrival, Progress, Simulation, Workload

_NEIGHBOURS = 32
"""Number of live steps with a similar predicted time, one of which is drawn."""
_NO_TIME_SECONDS = 1e11  # about 3,000 years; no clock reads more
_OWN_EVENTS: dict[Any, ControllerEvent] = {"Drain": Drain(), "Tick": Tick()}
"""Events that no message brings, by their type in a record."""
_FASTEST = 0.1  # shortest time of a step, as a share of its prediction


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event line of a record."""

    line: int
    now: float
    event: ControllerEvent
    commands: str | None  # digest; None if the version that wrote the record has none


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed log."""

    path: Path
    spec: MedhaReplicaSpec
    ready: RankReady
    profile: Profile | StepProfile
    events: tuple[Recorded, ...]
    cut_off: bool = False  # the last line is incomplete: the process was killed

    def config(self, scheduling: SchedulingSpec | None = None) -> ReplicaConfig:
        """Return the live replica's settings, optionally with another scheduling."""
        spec = self.spec if scheduling is None else self.spec.model_copy(update={"scheduling": scheduling})
        return derive(spec, self.ready)


@dataclass(slots=True)
class Difference:
    """The first point where a replay differs from its log."""

    line: int
    detail: str


@dataclass(slots=True)
class Verification:
    """The result of `verify`."""

    events: int = 0
    commands: int = 0
    steps: int = 0
    compared: int = 0  # events for which the record has a digest of the commands
    difference: Difference | None = None


def read_record(path: Path) -> Record:
    """Read a record from its file.

    Raises:
        ConfigInvalid: a line is invalid; the error names the file and the line. Only the last line may be
            incomplete.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path}: cannot be read: {error}") from error
    if len(lines) < 2:
        raise ConfigInvalid(
            f"{path}: has {len(lines)} lines; a record of `medha up --record` begins with its spec and its ranks"
        )
    header = _object(path, 1, lines[0])
    try:
        spec = MedhaReplicaSpec.model_validate(header.get("spec"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("spec", *map(str, first["loc"])))
        text = f"{path}:1: {where}: {first['msg']}; a record's first line holds the spec as `medha up --record` writes it"
        raise ConfigInvalid(text) from error
    ready = _message(path, 2, lines[1])
    if not isinstance(ready, RankReady):
        raise ConfigInvalid(f"{path}:2: is a {type(ready).__name__}; the second line is the ranks' RankReady")
    for name in ("block_size_tokens", "kv_blocks", "max_model_len"):
        if getattr(ready, name) < 1:
            raise ConfigInvalid(
                f"{path}:2: {name} is {getattr(ready, name)}; no rank serves with less than 1: record the run again"
            )
    profile: Profile | StepProfile = ready.profile
    if "profile" in header:
        profile = Profile.from_json(json.dumps(header["profile"]), f"{path}:1: profile")
    events: list[Recorded] = []
    for number, text in enumerate(lines[2:], start=3):
        try:
            events.append(_recorded(path, number, text))
        except ConfigInvalid:
            if number < len(lines):
                raise
            return Record(path, spec, ready, profile, tuple(events), cut_off=True)
    return Record(path, spec, ready, profile, tuple(events))


def verify(record: Record) -> Verification:
    """Feed the record to a fresh controller and stop at the first difference."""
    found = Verification()
    for recorded, commands in _replayed(record, found):
        found.events += 1
        found.commands += len(commands)
        found.steps += sum(isinstance(command, Step) for command in commands)
        if recorded.commands is None:
            continue
        found.compared += 1
        if digest(commands) != recorded.commands:
            names = ", ".join(type(command).__name__ for command in commands) or "nothing"
            found.difference = Difference(
                recorded.line,
                f"a {type(recorded.event).__name__} leads to {names}, which is not what was commanded live; replay with the "
                "release that wrote the record, for others may decide otherwise",
            )
            break
    return found


@dataclass(frozen=True, slots=True)
class LiveRanks:
    """Observed and predicted stage times of live steps: seconds, float64 [steps], by ascending prediction."""

    predicted: npt.NDArray[np.float64]
    observed: npt.NDArray[np.float64]
    computed: npt.NDArray[np.float64]
    """Seconds that a rank measured: `observed` without messages, and without waiting for a CPU core."""
    message_seconds: float  # one way, between controller and ranks

    @classmethod
    def of(cls, steps: list[tuple[float, float, float]], message_seconds: float) -> LiveRanks:
        """Create an instance from (predicted, observed, computed) of all steps, in any order."""
        table = np.array(sorted(steps)).reshape(len(steps), 3)
        return cls(table[:, 0], table[:, 1], table[:, 2], message_seconds)

    @property
    def factor(self) -> float:
        """Median of computed over predicted time; 1 if no step was seen."""
        return float(np.median(self.computed / self.predicted)) if len(self.computed) else 1.0


class SlowMoments:
    """Random slowness of a machine over time: with one seed, the same times are slow under every policy.

    Each launch of a step draws its own number, keyed by (seed, lane, moment, index of the launch among those
    of the lane in that moment). Two runs therefore draw the same numbers wherever they launch steps at about
    the same time, whatever they launched before. Otherwise the first differing step would shift all later
    draws, and the difference between two policies would be mostly luck.
    """

    def __init__(self, seed: int, moment_seconds: float) -> None:
        """`moment_seconds` is the length of a moment; about the length of one step is best."""
        self._seed = seed
        self._moment_seconds = moment_seconds
        self._last: dict[int, tuple[int, int]] = {}  # lane -> (moment of its last launch, launches in it)

    def sample(self, lane: int, now: float) -> float:
        """Draw a uniform number in [0, 1) for a step of `lane` at `now` (seconds); near 1 is slow."""
        moment = int(now / self._moment_seconds)
        last, launches = self._last.get(lane, (-1, 0))
        launches = launches + 1 if moment == last else 1
        self._last[lane] = (moment, launches)
        return float(np.random.default_rng((self._seed, lane, moment, launches)).random())


class Resampled:
    """A step cost drawn from the live steps with a similar predicted time.

    The difference between the two predictions, times the live median of computed over predicted, is added.
    Only the computed part keeps the stage busy: the controller corrects its predictions by it, as it does live.
    """

    def __init__(self, cost: StepCost, ranks: LiveRanks, seed: int) -> None:
        self._cost = cost
        self._ranks = ranks
        self._factor = ranks.factor
        # If no step took measurable time, the record does not show how long a slow moment is: use 1 s.
        typical_seconds = (float(np.median(ranks.observed)) if len(ranks.observed) else 0.0) or 1.0
        self._slow = SlowMoments(seed, typical_seconds)

    def __call__(self, step: Step, now: float) -> StepTiming:
        timing = self._cost(step, now)
        live = self._ranks
        seen = min(_NEIGHBOURS, len(live.predicted))
        if not seen or not step.entries:
            return timing
        predicted = max(timing.stage_seconds)
        nearest = int(np.searchsorted(live.predicted, predicted)) - seen // 2
        first = min(max(nearest, 0), len(live.predicted) - seen)
        near = slice(first, first + seen)
        more = self._factor * (predicted - live.predicted[near])
        slowest_last = np.argsort(live.observed[near] + more, kind="stable")
        drawn = int(slowest_last[int(seen * self._slow.sample(step.lanes[0], now))])
        apart = max(0.0, float(live.observed[near][drawn] - live.computed[near][drawn]))
        seconds = float(live.computed[near][drawn] + more[drawn])
        scale = max(seconds, _FASTEST * predicted) / predicted
        return StepTiming(
            tuple(stage * scale for stage in timing.stage_seconds), timing.transit_seconds + apart
        )


@dataclass(slots=True)
class Reading:
    """The live run in the form of a simulation's log; time starts with the first event."""

    record: Record
    log: RunLog = field(default_factory=RunLog)
    submits: dict[str, Submit] = field(default_factory=dict)
    ranks: LiveRanks = field(default_factory=lambda: LiveRanks.of([], 0.0))

    def workload(self) -> Workload:
        """Return the requests; each wants as many tokens as it got live before it ended or was cancelled."""
        requests = self.log.requests
        return Workload(
            [
                Arrival(
                    id=id_,
                    at_seconds=requests[id_].arrived_at,
                    prompt_tokens=submit.tokens,
                    output_tokens=max(1, requests[id_].tokens),
                    ttft_target_seconds=requests[id_].ttft_target_seconds,
                    tpot_target_seconds=requests[id_].tpot_target_seconds,
                    kind=requests[id_].kind,
                    service_class=submit.service_class,
                    max_tokens=submit.sampling.max_tokens,
                    prompt=submit.prompt,
                    block_hashes=submit.block_hashes,
                    owner=submit.owner,
                )
                for id_, submit in self.submits.items()
            ]
        )


def read(record: Record) -> Reading:
    """Replay a record and record the answers, up to a `Done` that does not match a launched step."""
    return _Reader(record).read()


def what_if(
    reading: Reading, scheduling: SchedulingSpec, *, seed: int = 0, progress: Progress | None = None
) -> RunLog:
    """Simulate the recorded requests under another scheduling, or under the same one to validate the simulator.

    Compare two schedulings by the differences between runs with equal seeds, which share the machine's slow
    moments.
    """
    record, requests = reading.record, reading.workload()
    config = replace(record.config(scheduling), draft_costs=None)  # a record has no ids to guess
    truth = Predictor(record.profile, config.topology, tokens_per_lane=config.tokens_per_lane)
    replica = medha_replica(
        "replica",
        config,
        record.profile,
        requests.ends_at(),
        cost=Resampled(PredictorCost(truth), reading.ranks, seed),
        message_seconds=reading.ranks.message_seconds,
    )
    sample_seconds = reading.log.window_seconds / SERIES_POINTS or 1.0
    simulation = Simulation([replica], requests, sample_seconds=sample_seconds)
    return simulation.run(reading.log.window_seconds, progress)


def changed_scheduling(record: Record, changes: dict[str, Any]) -> SchedulingSpec:
    """Return the live scheduling with other values for some fields, spelt as in a manifest.

    Raises:
        ConfigInvalid: a field is unknown or its value is invalid; the error names the field.
    """
    document = record.spec.scheduling.model_dump(mode="json", by_alias=True)
    for name in changes:
        if name not in document:
            raise ConfigInvalid(f"scheduling has no field {name!r}; it has {', '.join(document)}")
    try:
        return SchedulingSpec.model_validate(document | changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigInvalid(
            f"scheduling.{first['loc'][0]}: {first['msg']} (found {first['input']!r})"
        ) from error


# --- replaying the controller ------------------------------------------------------------------------


def _replayed(record: Record, found: Verification) -> Iterator[tuple[Recorded, list[ControllerCommand]]]:
    """Yield each event with a fresh controller's commands.

    If an event does not fit the steps launched so far, set `found.difference` and end.
    """
    controller = ReplicaController(record.config(), record.profile)
    launched: dict[int, Step] = {}
    for recorded in record.events:
        event = recorded.event
        if isinstance(event, Done):
            step = launched.pop(event.step_id, None)
            if step is None:
                found.difference = Difference(recorded.line, f"step {event.step_id} was never launched")
                return
            strangers = _strangers(event, step)
            if strangers:
                found.difference = Difference(
                    recorded.line,
                    f"step {event.step_id} was to compute other sequences than {', '.join(strangers[:3])}",
                )
                return
        commands = controller.handle(event, recorded.now)
        launched |= {command.step_id: command for command in commands if isinstance(command, Step)}
        yield recorded, commands


def _strangers(done: Done, step: Step) -> list[str]:
    """Return the sequences that `done` reports on although `step` did not include them."""
    answered = {sample.id for sample in done.samples} | {failure.id for failure in done.failures}
    answered |= {id_ for id_, _ in (*done.block_hashes, *done.drafts)}
    return sorted(answered - {entry.id for entry in step.entries})


# --- reading the record ---------------------------------------------------------------------------------


class _Reader:
    """Builds a `Reading` by replaying the record on a fresh controller."""

    def __init__(self, record: Record) -> None:
        self._events = record.events
        self._config = record.config()
        self._controller = ReplicaController(self._config, record.profile)
        self._cost = PredictorCost(Predictor(record.profile, self._config.topology))
        self._reading = Reading(record)
        self._log = self._reading.log
        self._history = History()
        self._rows: dict[int, int] = {}  # step -> its row in the `RunLog`
        self._steps: list[tuple[float, float, float]] = []  # predicted, observed, computed seconds of a stage
        self._overheads: list[float] = []  # seconds from launch to `Done`, less compute time

    def read(self) -> Reading:
        start = self._events[0].now if self._events else 0.0
        span = self._events[-1].now - start if self._events else 0.0
        for recorded in self._events:
            now = recorded.now - start
            if isinstance(recorded.event, Done):
                launched = self._history.launched.get(recorded.event.step_id)
                if launched is None or _strangers(recorded.event, launched.step):
                    break
            self._log.window_seconds = now
            self._before(recorded.event, now)
            commands = self._controller.handle(recorded.event, recorded.now)
            facts = self._history.take(self._controller, recorded.event, commands, recorded.now)
            for command in commands:
                self._take(command, now)
            if isinstance(recorded.event, Submit):
                self._note_targets(recorded.event)
            if isinstance(recorded.event, Done) and facts.completed is not None:
                self._done(recorded.event, facts.completed)
            self._sample(now, span / SERIES_POINTS)
        if self._steps:
            self._reading.ranks = LiveRanks.of(self._steps, max(0.0, float(np.median(self._overheads)) / 2))
        return self._reading

    def _before(self, event: ControllerEvent, now: float) -> None:
        match event:
            case Submit() if event.id not in self._reading.submits:
                self._submit(event, now)
            case Cancel() if event.id in self._log.requests:
                if self._log.requests[event.id].ended_at is None:
                    self._log.ended(event.id, "finished", now, "cancelled")

    def _submit(self, submit: Submit, now: float) -> None:
        self._reading.submits[submit.id] = submit
        is_long = submit.tokens >= self._config.long_threshold_tokens
        self._log.arrived(
            RequestRecord(
                id=submit.id,
                kind="long" if is_long else "short",
                service_class=submit.service_class,
                prompt_tokens=submit.tokens,
                output_tokens=0,
                arrived_at=now,
                ttft_target_seconds=submit.deadline_after_seconds or 0.0,
                tpot_target_seconds=submit.tpot_target_seconds or 0.0,
            )
        )

    def _note_targets(self, submit: Submit) -> None:
        """Record the targets that the controller applies.

        The TTFT target is counted from this arrival: the time that the request spent before it is subtracted.
        """
        request = self._controller.find(submit.id)
        if request is not None:
            seen = self._log.requests[submit.id]
            seen.ttft_target_seconds = max(0.001, request.targets.ttft_seconds - submit.age_seconds)
            seen.tpot_target_seconds = request.targets.tpot_seconds

    def _done(self, done: Done, completed: Completed) -> None:
        step, row = completed.launched.step, self._rows.pop(done.step_id)
        timing = self._cost(step, completed.launched.at)
        if not step.entries or done.compute_seconds <= 0:
            return
        self._log.steps.busy_seconds[row] = done.compute_seconds
        predicted, stages = max(timing.stage_seconds), len(timing.stage_seconds)
        observed = completed.observed_seconds
        if stages == 1:  # measured until the answer, so that time spent waiting for a CPU core is included
            self._steps.append((predicted, observed, done.compute_seconds))
            self._overheads.append(0.0)
        else:  # that time would include waiting behind other steps, which the simulated pipeline adds itself
            self._steps.append((predicted, done.compute_seconds, done.compute_seconds))
            self._overheads.append(observed - stages * done.compute_seconds)

    def _take(self, command: ControllerCommand, now: float) -> None:
        match command:
            case Step():
                if command.entries:
                    self._log.stepped(command, self._prompt_tokens, 0.0, now)
                self._rows[command.step_id] = len(self._log.steps.at) - 1
            case Emit():
                seen = self._log.requests[command.id]
                if command.tokens and seen.ended_at is None:
                    self._log.emitted(command.id, len(command.tokens), now)
                    seen.output_tokens += len(command.tokens)
                if command.finish_reason is not None and seen.ended_at is None:
                    self._log.ended(command.id, "finished", now)
            case Refused() if self._log.requests[command.id].ended_at is None:  # a repeated id may have ended
                self._log.ended(command.id, "refused", now, f"{command.reason}: {command.detail}")
            case Failed():
                self._log.ended(command.id, "failed", now, f"{command.reason}: {command.detail}")

    def _prompt_tokens(self, name: str) -> int:
        request = self._controller.find(name)
        assert request is not None, f"{name} runs and is not known"
        return request.submit.tokens

    def _sample(self, now: float, every_seconds: float) -> None:
        series = self._log.series
        if series.at and now - series.at[-1] < every_seconds:
            return
        load = self._controller.load()
        series.at.append(now)
        series.running.append(load.running)
        series.waiting.append(load.waiting)
        all_tokens = self._config.pool_tokens
        series.kv_share.append(1 - load.kv_tokens_free / all_tokens if all_tokens else 0.0)


# --- parsing lines -----------------------------------------------------------------------------------


_EVENTS = (Submit, Cancel, StageFree, Done, GrammarReady, DiskReport, KvAsk, KvTicket, KvDone)
"""Messages that are events of a controller."""


def _recorded(path: Path, number: int, text: str) -> Recorded:
    entry = _object(path, number, text)
    now, event, commands = entry.get("now"), entry.get("event"), entry.get("commands")
    if not isinstance(now, int | float) or not isinstance(event, dict):
        raise ConfigInvalid(f"{path}:{number}: has no `now` or no `event`")
    if not -_NO_TIME_SECONDS < now < _NO_TIME_SECONDS:  # also true for NaN
        raise ConfigInvalid(
            f"{path}:{number}: now is {now}, which is not a time; delete the line and those after it"
        )
    own = _OWN_EVENTS.get(event.get("type"))
    if own is not None:
        return Recorded(number, float(now), own, commands)
    message = _message(path, number, json.dumps(event))
    if not isinstance(message, _EVENTS):
        raise ConfigInvalid(f"{path}:{number}: {type(message).__name__} is not an event of a controller")
    return Recorded(number, float(now), message, commands)


def _message(path: Path, number: int, text: str) -> Any:
    try:
        return decode([text.encode()])[0]
    except WireInvalid as error:
        raise ConfigInvalid(f"{path}:{number}: {error}") from error


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"{path}:{number}: is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigInvalid(f"{path}:{number}: is a JSON {type(found).__name__}, expected an object")
    return found
