"""A record replays to the same commands, is read as what happened, and answers what would have been."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medha.api.replica import MedhaReplicaSpec
from medha.cost.predictor import Predictor
from medha.errors import ConfigInvalid
from medha.scheduler.controller import Load, ReplicaController
from medha.scheduler.grammars import COMPILE_SECONDS, grammar_name
from medha.scheduler.replica_config import derive
from medha.wire.frames import digest, encode
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Drain,
    Extent,
    Failed,
    GrammarReady,
    RankReady,
    Sampling,
    Step,
    StepEntry,
    StepProfile,
    Submit,
    Tick,
)
from medha_sim.executor import Perturbed, PredictorCost, StepCost, StepTiming
from medha_sim.record_replay import (
    LiveRanks,
    Record,
    Resampled,
    changed_scheduling,
    read,
    read_record,
    verify,
    what_if,
)
from medha_sim.run_log import RunLog
from medha_sim.scenario import medha_replica
from medha_sim.simulation import Arrival, Simulation, Workload

SPEC = MedhaReplicaSpec.model_validate(
    {"model": {"name": "tiny", "source": {"path": "/tiny"}}, "scheduling": {"maxChunkTokens": 256}}
)
READY = RankReady(
    rank=0,
    block_size_tokens=16,
    kv_blocks=2000,
    weights_bytes=1,
    activation_bytes=1,
    kv_bytes=1,
    profile=StepProfile(
        step_seconds=0.002,
        linear_seconds_per_token=1e-4,
        attention_seconds_per_pair=1e-8,
        sequence_seconds=1e-4,
    ),
    device="cpu",
    max_model_len=8000,
    vocab_size=100,
    linear_flops_per_token=1000.0,
    attention_flops_per_pair=1.0,
)


class Recording:
    """A controller that writes down what it is told, as the controller's process does."""

    def __init__(self, controller: ReplicaController) -> None:
        self._controller = controller
        self.predictor = controller.predictor
        header = {"spec": SPEC.model_dump(mode="json", by_alias=True)}
        self.lines = [json.dumps(header), bytes(encode(READY)[0]).decode()]

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands = self._controller.handle(event, now)
        is_own = isinstance(event, Drain | Tick)  # no message
        text = f'{{"type":"{type(event).__name__}"}}' if is_own else bytes(encode(event)[0]).decode()
        now_and_event = f'"now": {now + 1000.0!r}, "event": {text}'
        self.lines.append(f'{{{now_and_event}, "commands": "{digest(commands)}"}}')
        return commands

    def load(self) -> Load:
        return self._controller.load()


def requests(count: int = 30) -> Workload:
    return Workload(
        [
            Arrival(
                id=f"r{index}",
                at_seconds=0.02 * index,
                prompt_tokens=(20, 3000, 90, 400)[index % 4],
                output_tokens=1 + index % 9,
                ttft_target_seconds=0.5,
                tpot_target_seconds=0.05,
                max_tokens=(1 + index % 9) if index % 2 else None,
            )
            for index in range(count)
        ]
    )


class Slower:
    """Ranks that take twice what the profile says."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = Perturbed(cost, bias=2.0, noise=0.0, generator=None)  # type: ignore[arg-type]

    def __call__(self, step: Step, now: float) -> StepTiming:
        return self._cost(step, now)


def record_of(folder: Path, change: Callable[[list[str]], None] = lambda lines: None) -> tuple[Path, RunLog]:
    """A log of simulated ranks that are half as fast as the profile says, and what was seen."""
    workload = requests()
    config = derive(SPEC, READY)
    cost = Slower(PredictorCost(Predictor(READY.profile, config.topology)))
    replica = medha_replica("r", config, READY.profile, workload.ends_at(), cost=cost, message_seconds=0.001)
    assert isinstance(replica.controller, ReplicaController)
    recording = Recording(replica.controller)
    replica.controller = recording
    log = Simulation([replica], workload).run(100)
    recording.handle(Drain(), 100.0)
    change(recording.lines)
    path = folder / "log.jsonl"
    path.write_text("\n".join(recording.lines) + "\n")
    return path, log


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, RunLog]:
    path, log = record_of(tmp_path_factory.mktemp("record"))
    return read_record(path), log


def test_a_log_replays_to_the_commands_that_were_given_live(recorded: tuple[Record, RunLog]) -> None:
    found = verify(recorded[0])
    assert found.difference is None
    assert found.events == found.compared == len(recorded[0].events) > 100
    assert found.steps > 50


def test_a_log_replays_grammars_that_were_compiled_and_one_that_was_not_in_time(tmp_path: Path) -> None:
    recording = Recording(ReplicaController(derive(SPEC, READY), READY.profile))
    for id_ in ("ready", "late"):
        sampling = Sampling(max_tokens=1, grammar=id_)
        recording.handle(Submit(id_, f"prompt of {id_}", 20, 20, 0, sampling=sampling), 0.0)
    recording.handle(GrammarReady(grammar_name("ready")), 0.1)
    ended = recording.handle(Tick(), COMPILE_SECONDS)
    assert [(one.id, one.reason) for one in ended if isinstance(one, Failed)] == [("late", "grammar_late")]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(recording.lines) + "\n")
    found = verify(read_record(path))
    assert found.difference is None
    assert found.events == found.compared == 4


def test_a_log_is_read_as_what_happened(recorded: tuple[Record, RunLog]) -> None:
    record, live = recorded
    reading = read(record)
    assert set(reading.log.requests) == set(live.requests)
    for id_, seen in reading.log.requests.items():
        happened = live.requests[id_]
        assert (seen.tokens, seen.ending) == (happened.tokens, happened.ending)
        assert seen.ttft_seconds == pytest.approx(happened.ttft_seconds)
        assert seen.ttft_target_seconds == pytest.approx(happened.ttft_target_seconds)
    beside = np.round(reading.ranks.observed - 2 * reading.ranks.predicted, 6)
    # Two messages; none where a step went out ahead of the end of the one before it.
    assert set(beside.tolist()) == {0.002, 0.0}
    assert np.mean(beside == 0.002) > 0.9
    assert list(reading.ranks.predicted) == sorted(reading.ranks.predicted)


def test_a_step_takes_what_live_steps_of_its_size_took() -> None:
    live = [(0.001 * size, 0.003 * size, 0.003 * size) for size in range(1, 100)]
    live += [(0.1 * size, 0.2 * size, 0.2 * size) for size in range(10, 100)]
    ranks = LiveRanks.of(list(reversed(live)), 0.0)
    step = Step(step_id=0, epoch=0, entries=(StepEntry("a", 0, (Extent(0, 1),), False),))

    def taken(seconds: float) -> float:
        cost = Resampled(lambda *_: StepTiming((seconds, seconds)), ranks, seed=1)
        return cost(step, 0.0).stage_seconds[0]

    assert taken(0.05) == pytest.approx(0.15, rel=0.02)  # slope and offset of the live steps around it
    assert taken(5.0) == pytest.approx(10.0, rel=0.25)
    assert taken(1e-9) > 0
    assert LiveRanks.of([], 0.0).factor == 1.0


def test_a_log_whose_steps_took_no_time_is_simulated_all_the_same() -> None:
    step = Step(step_id=0, epoch=0, entries=(StepEntry("a", 0, (Extent(0, 1),), False),))
    ranks = LiveRanks.of([(0.01, 0.0, 0.0)] * 3, 0.0)
    (seconds,) = Resampled(lambda *_: StepTiming((0.01,)), ranks, seed=0)(step, 1.0).stage_seconds
    assert 0 < seconds < 0.01


def test_what_a_rank_did_not_measure_keeps_no_stage_busy() -> None:
    """Messages and waits for a core come on top: a controller does not correct its predictions by them."""
    step = Step(step_id=0, epoch=0, entries=(StepEntry("a", 0, (Extent(0, 1),), False),))
    live = LiveRanks.of([(0.001 * size, 0.002 * size + 0.005, 0.002 * size) for size in range(1, 100)], 0.0)
    timing = Resampled(lambda *_: StepTiming((0.05,), 0.001), live, seed=0)(step, 1.0)
    assert timing.stage_seconds == pytest.approx((0.1,))
    assert timing.transit_seconds == pytest.approx(0.006)


def test_the_machine_is_slow_at_the_same_times_whatever_was_launched_before() -> None:
    """So two policies of one seed differ by what they decide, and not by their luck."""
    live = LiveRanks.of([(0.01, 0.01, 0.01)] * 20 + [(0.01, 0.2, 0.2)] * 5, 0.0)  # every fifth step is slow
    step = Step(step_id=0, epoch=0, entries=(StepEntry("a", 0, (Extent(0, 1),), False),))

    def taken(seed: int, times: list[float]) -> dict[float, float]:
        cost = Resampled(lambda *_: StepTiming((0.01,)), live, seed)
        return {now: cost(step, now).stage_seconds[0] for now in times}

    every = taken(0, [0.005 + 0.01 * index for index in range(500)])
    some = taken(0, [0.005 + 0.01 * index for index in range(500) if index % 7])
    assert some == {now: every[now] for now in some}
    assert np.mean([seconds > 0.1 for seconds in every.values()]) == pytest.approx(0.2, abs=0.05)
    assert taken(1, list(every)) != every
    crowd = taken(0, [0.001 * index for index in range(5000)])  # ten launches in a moment draw ten times
    assert np.mean([seconds > 0.1 for seconds in crowd.values()]) == pytest.approx(0.2, abs=0.02)


def test_differences_of_policies_are_paired_by_seed(tmp_path: Path) -> None:
    """On a machine with slow moments, the paired difference of two policies varies less than an unpaired one."""
    record = read_record(record_of(tmp_path)[0])
    reading = read(record)
    slower = np.where(np.arange(len(reading.ranks.observed)) % 4 == 0, 3, 1)
    slow, computed = reading.ranks.observed * slower, reading.ranks.computed * slower
    reading.ranks = replace(reading.ranks, observed=slow, computed=computed)
    seeds = range(12)

    def mean_ttfts(policy: str) -> np.ndarray:
        scheduling = changed_scheduling(record, {"policy": policy})
        runs = [what_if(reading, scheduling, seed=seed) for seed in seeds]
        return np.array([np.mean([one.ttft_seconds for one in run.requests.values()]) for run in runs])

    fcfs, guarded = mean_ttfts("fcfs"), mean_ttfts("guarded")
    paired, unpaired = np.std(fcfs - guarded), np.std(fcfs - np.roll(guarded, 1))
    assert 0 < paired < 0.7 * unpaired


def test_simulating_the_live_scheduling_gives_what_happened(recorded: tuple[Record, RunLog]) -> None:
    record, live = recorded
    again = what_if(read(record), record.spec.scheduling)
    for id_, seen in again.requests.items():
        assert seen.tokens == live.requests[id_].tokens
        assert seen.ttft_seconds == pytest.approx(live.requests[id_].ttft_seconds, rel=0.05, abs=0.005)


def test_another_scheduling_leads_to_other_times(recorded: tuple[Record, RunLog]) -> None:
    record, live = recorded
    changed = changed_scheduling(record, {"policy": "srpt", "maxChunkTokens": 64})
    other = what_if(read(record), changed)
    assert all(seen.ending == "finished" for seen in other.requests.values())
    assert any(
        seen.ttft_seconds != pytest.approx(live.requests[id_].ttft_seconds, rel=0.1)
        for id_, seen in other.requests.items()
    )


def test_a_command_that_was_not_given_live_is_found_with_its_line(tmp_path: Path) -> None:
    def change(lines: list[str]) -> None:
        entry = json.loads(lines[10])
        lines[10] = json.dumps(entry | {"commands": "0123456789abcdef"})

    found = verify(read_record(record_of(tmp_path, change)[0]))
    assert found.difference is not None
    assert found.difference.line == 11
    assert "is not what was commanded live" in found.difference.detail


def test_an_event_that_is_missing_is_found(tmp_path: Path) -> None:
    def change(lines: list[str]) -> None:
        submits = [index for index, line in enumerate(lines) if '"type":"Submit"' in line]
        del lines[submits[0]]

    found = verify(read_record(record_of(tmp_path, change)[0]))
    assert found.difference is not None
    assert found.difference.line < 10


def test_an_answer_for_a_sequence_that_was_not_computed_is_found_with_its_line(tmp_path: Path) -> None:
    at = 0

    def change(lines: list[str]) -> None:
        nonlocal at
        at = next(index for index, line in enumerate(lines) if index > 30 and '"Done"' in line)
        entry = json.loads(lines[at])
        entry["event"]["body"]["block_hashes"] = [["ghost", "00"]]
        lines[at] = json.dumps(entry)

    record = read_record(record_of(tmp_path, change)[0])
    found = verify(record)
    assert found.difference is not None
    assert found.difference.line == at + 1
    assert "to compute other sequences than ghost" in found.difference.detail
    assert read(record).log.window_seconds < record.events[-1].now - record.events[0].now


def test_a_log_without_digests_is_checked_by_its_steps_and_samples(tmp_path: Path) -> None:
    def change(lines: list[str]) -> None:
        for index in range(2, len(lines)):
            entry = json.loads(lines[index])
            del entry["commands"]
            lines[index] = json.dumps(entry)

    path, _ = record_of(tmp_path, change)
    found = verify(read_record(path))
    assert found.difference is None
    assert found.compared == 0
    lines = path.read_text().splitlines()
    submits = [index for index, line in enumerate(lines) if '"Submit"' in line]
    path.write_text("\n".join(line for index, line in enumerate(lines) if index not in submits))
    found = verify(read_record(path))
    assert found.difference is not None
    assert "was never launched" in found.difference.detail


def test_a_client_that_went_away_wants_no_more_than_it_had(tmp_path: Path) -> None:
    def change(lines: list[str]) -> None:
        submitted = next(index for index, line in enumerate(lines) if '"id":"r1"' in line)
        cancel = {"now": json.loads(lines[submitted])["now"], "event": json.loads(encode(Cancel("r1"))[0])}
        lines[submitted + 1 :] = [json.dumps(cancel)]

    reading = read(read_record(record_of(tmp_path, change)[0]))
    assert (reading.log.requests["r1"].ending, reading.log.requests["r1"].detail) == ("finished", "cancelled")
    assert [one.output_tokens for one in reading.workload().arrivals if one.id == "r1"] == [1]


def test_a_log_that_was_cut_off_is_used_up_to_there(tmp_path: Path) -> None:
    path, _ = record_of(tmp_path)
    text = path.read_text()
    path.write_text(text[: len(text) * 2 // 3])
    record = read_record(path)
    assert record.cut_off
    assert verify(record).difference is None
    assert any(seen.ending == "censored" for seen in read(record).log.requests.values())


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (0, "nonsense", ":1: is no JSON"),
        (0, '{"spec": {"model": {}}}', ":1: spec.model.name: Field required"),
        (0, "{}", ":1: spec: Input should be a valid dictionary"),
        (1, '{"v":1,"type":"Cancel","body":{"id":"a"}}', ":2: is a Cancel"),
        (3, "[]", ":4: is a JSON list"),
        (3, '{"now": 1.0}', ":4: has no `now` or no `event`"),
        (3, '{"now": NaN, "event": {"type": "Drain"}}', ":4: now is nan, which is not a time"),
        (3, '{"now": 1e999, "event": {"type": "Drain"}}', ":4: now is inf, which is not a time"),
        (3, '{"now": 1e30, "event": {"type": "Drain"}}', ":4: now is 1e+30, which is not a time"),
        (3, '{"now": 1.0, "event": {"v":1,"type":"Nonsense","body":{}}}', ":4: unknown message type"),
        (3, '{"now": 1.0, "event": {"v":1,"type":"Shutdown","body":{}}}', ":4: Shutdown is not an event"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: int, text: str, words: str) -> None:
    def change(lines: list[str]) -> None:
        lines[line] = text

    with pytest.raises(ConfigInvalid) as caught:
        read_record(record_of(tmp_path, change)[0])
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["block_size_tokens", "kv_blocks", "max_model_len"])
def test_ranks_that_could_serve_nothing_are_refused(tmp_path: Path, name: str) -> None:
    def change(lines: list[str]) -> None:
        ready = json.loads(lines[1])
        ready["body"][name] = 0
        lines[1] = json.dumps(ready)

    with pytest.raises(ConfigInvalid, match=f":2: {name} is 0; no rank serves with less than 1"):
        read_record(record_of(tmp_path, change)[0])


def test_a_request_that_is_refused_twice_ends_once(tmp_path: Path) -> None:
    """Its id was submitted twice, and never had a chance."""

    def change(lines: list[str]) -> None:
        index, first = next((index, line) for index, line in enumerate(lines) if '"Submit"' in line)
        submitted = json.loads(first)
        submitted["event"]["body"] |= {"id": "twice", "tokens": 10**9}
        lines[index:index] = [json.dumps(submitted)] * 2

    record = read_record(record_of(tmp_path, change)[0])
    assert read(record).log.requests["twice"].ending == "refused"


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigInvalid, match="begins with its spec and its ranks"):
        read_record(tmp_path / "empty")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        read_record(tmp_path / "none")


def test_a_wrong_setting_is_named(recorded: tuple[Record, RunLog]) -> None:
    with pytest.raises(ConfigInvalid, match="no field 'chunk'; it has policy"):
        changed_scheduling(recorded[0], {"chunk": 1})
    with pytest.raises(ConfigInvalid, match=r"scheduling\.maxChunkTokens: .*found 0"):
        changed_scheduling(recorded[0], {"maxChunkTokens": 0})
