"""A trace shows what ranks did, in Perfetto's format and on one clock; it is bounded, and readable wherever it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    ControllerEvent,
    Done,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    StepTimes,
    Submit,
    TracePart,
)
from medha_worker.controller import trace_writer as trace_module
from medha_worker.controller.trace_writer import Tracing, read_trace

TOPOLOGY = Topology(stream=2, kv=2)
CONFIG = ReplicaConfig(
    topology=TOPOLOGY,
    scheduling=SchedulingSpec(max_chunk_tokens=64, min_chunk_tokens=64),
    service_classes={"default": ServiceClass(name="default")},
    default_class="default",
    max_model_len=1000,
    block_size_tokens=16,
    kv_blocks=100,
    long_threshold_tokens=1000,
)


class Traced:
    """A core and its trace, which began at 100 s."""

    def __init__(self) -> None:
        self.core = ReplicaController(CONFIG, StepProfile(1e-3, 1e-6, 1e-9, 1e-5))
        self.history = History()
        self.tracing = Tracing(TOPOLOGY, "here", 100.0, 200.0)

    def take(self, event: ControllerEvent, now: float) -> Step | None:
        commands = self.core.handle(event, now)
        self.tracing.observe(self.history.take(self.core, event, commands, now), self.core)
        return next((command for command in commands if isinstance(command, Step)), None)

    def submit(self, name: str, tokens: int, now: float) -> Step:
        message = Submit(name, f"p-{name}", tokens, tokens, seed=1, sampling=Sampling(max_tokens=2))
        step = self.take(message, now)
        assert step is not None
        return step

    def events(self) -> list[dict[str, Any]]:
        self.tracing.close()
        events: list[dict[str, Any]] = json.loads(b"".join(self.tracing.pieces()))
        named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
        assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
        return events


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    monkeypatch.setattr(trace_module, "IDLE_SECONDS", 0.001)
    return Traced()


def slices(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def part(rank: int, *steps: StepTimes, machine: str = "here", clock: float = 101.0) -> TracePart:
    return TracePart(rank, 0, machine, clock, steps)


def test_each_rank_has_a_track_in_the_process_of_its_lane(traced: Traced) -> None:
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in traced.events()
        if event["name"] == "thread_name"
    }
    assert named == {
        (1, 1): "stage 0 (rank 0)",
        (1, 2): "stage 1 (rank 1)",
        (2, 3): "stage 0 (rank 2)",
        (2, 4): "stage 1 (rank 3)",
        (1, 5): "stage 0 prepares (rank 0)",
        (1, 6): "stage 1 prepares (rank 1)",
        (2, 7): "stage 0 prepares (rank 2)",
        (2, 8): "stage 1 prepares (rank 3)",
    }


def test_what_was_prepared_while_another_step_ran_stands_beside_it(traced: Traced) -> None:
    before, step = traced.submit("book", 200, 100.0), 7
    times = (
        StepTimes(before.step_id, 100.1, 100.2, (("forward", 100.1, 100.2),)),
        StepTimes(step, 100.2, 100.4, (("prepare", 100.12, 100.15), ("forward", 100.2, 100.4))),
    )
    traced.tracing.put(101.0, part(1, *times))
    (prepared,) = slices(traced.events(), "prepare")
    assert (prepared["ts"], prepared["dur"], prepared["tid"]) == (120_000, 30_000, 6)
    assert prepared["args"]["step"] == step


def test_a_step_on_two_stages_is_two_slices_with_its_chunk_and_an_arrow_between(traced: Traced) -> None:
    step = traced.submit("book", 200, 100.0)
    first = StepTimes(step.step_id, 100.1, 100.2, (("send", 100.19, 100.2), ("forward", 100.1, 100.2)))
    second = StepTimes(
        step.step_id, 100.15, 100.4, (("receive", 100.15, 100.25), ("forward", 100.15, 100.35))
    )
    traced.tracing.put(101.0, part(0, first))
    traced.tracing.put(101.0, part(1, second))
    events = traced.events()
    one, other = slices(events, "prefill 64")
    assert (one["ts"], one["dur"], one["tid"]) == (100_000, 100_000, 1)
    assert (other["ts"], other["dur"], other["tid"]) == (150_000, 250_000, 2)
    assert one["args"]["chunks"] == ["book: 0 to 64"]
    assert [(event["ts"], event["dur"]) for event in slices(events, "forward")] == [
        (100_000, 90_000),  # until it sends
        (250_000, 100_000),  # since it has received
    ]
    assert [(event["ts"], event["dur"]) for event in slices(events, "sample")] == [(350_000, 50_000)]
    start, end = (next(event for event in events if event["ph"] == kind) for kind in "sf")
    assert start["id"] == end["id"]
    assert isinstance(start["id"], int)  # Perfetto draws no arrow for text
    assert (start["tid"], end["tid"], end["bp"]) == (1, 2, "e")
    assert (start["ts"], end["ts"]) == (190_000, 249_999)


def test_waits_that_come_too_often_are_traced_as_a_sum(traced: Traced) -> None:
    step = traced.submit("a", 20, 100.0)
    times = StepTimes(step.step_id, 100.1, 100.2, (), (("all_reduce", 0.0125),))
    traced.tracing.put(101.0, part(0, times))
    (found,) = slices(traced.events(), "prefill 20")
    assert found["args"]["all_reduce_ms"] == 12.5


def test_a_rank_of_another_machine_is_put_on_our_clock_by_its_fastest_message(traced: Traced) -> None:
    step = traced.submit("a", 20, 100.0)
    for sent, came in ((1.0, 101.5), (2.0, 102.25)):  # its clock is at most 100.25 s behind
        traced.tracing.put(came, part(0, StepTimes(step.step_id, sent, sent), machine="there", clock=sent))
    assert [event["ts"] for event in slices(traced.events(), "prefill 20")] == [1_500_000, 2_250_000]


def test_a_lane_that_only_helps_has_a_slice_and_no_arrow(traced: Traced) -> None:
    step = traced.submit("a", 20, 100.0)
    lane = step.entries[0].lane
    helper = TOPOLOGY.stream * (1 - lane) + 1
    times = StepTimes(step.step_id, 100.1, 100.2, (("receive", 100.1, 100.1),))
    traced.tracing.put(101.0, part(helper, times))
    events = traced.events()
    assert len(slices(events, "help other lanes")) == 1
    assert not [event for event in events if event["ph"] in "sf"]


def test_the_controller_shows_steps_in_flight_requests_phases_and_counters(traced: Traced) -> None:
    first = traced.submit("a", 100, 100.0)
    second = traced.take(StageFree(first.step_id, 0), 100.5)
    assert second is not None
    traced.take(Done(first.step_id), 101.0)
    traced.take(StageFree(second.step_id, 0), 101.5)
    traced.take(Done(second.step_id, (Sample("a", 7),)), 102.0)
    traced.take(Cancel("a"), 103.0)
    events = traced.events()
    moments = [
        (event["ph"], event["name"], event["ts"] / 1e6) for event in events if event.get("cat") == "request"
    ]
    assert moments == [
        ("b", "waiting", 0.0), ("e", "waiting", 0.0), ("b", "prefill", 0.0), ("e", "prefill", 2.0), ("b", "decode", 2.0),
        ("e", "decode", 3.0),
    ]  # fmt: skip
    steps = [(event["ph"], event["id"]) for event in events if event.get("cat") == "step"]
    assert steps[:5] == [("b", "0.0"), ("n", "0.0"), ("b", "0.1"), ("e", "0.0"), ("n", "0.1")]
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert set(counters) == {"requests", "prefill ahead (s)", "KV blocks of lane 0", "KV blocks of lane 1"}


def test_a_trace_that_was_cut_anywhere_is_read_as_far_as_it_goes(traced: Traced) -> None:
    step = traced.submit("a", 20, 100.0)
    traced.tracing.put(101.0, part(0, StepTimes(step.step_id, 100.1, 100.2)))
    traced.tracing.close()
    text = b"".join(traced.tracing.pieces())
    whole = json.loads(text)
    for stop in range(2, len(text)):
        found = read_trace(text[:stop])
        assert found == whole[: len(found)]
    assert read_trace(text[: text.rindex(b",\n")]) == whole[:-1]
    with pytest.raises(ValueError, match="begins with"):
        read_trace("{}")


def test_every_piece_ends_an_event_so_that_a_crash_leaves_what_can_be_read(traced: Traced) -> None:
    step = traced.submit("a", 20, 100.0)
    pieces = traced.tracing.pieces()
    text = next(pieces)
    assert len(json.loads(text + b"]")) > 0
    traced.tracing.put(101.0, part(0, StepTimes(step.step_id, 100.1, 100.2)))
    text += next(pieces)
    assert slices(json.loads(text + b"]"), "prefill 20")


def test_a_trace_ends_at_its_largest_size_with_a_message(traced: Traced) -> None:
    for index in range(2 * trace_module.PIECE_EVENTS):
        traced.tracing.put(100.0, part(0, StepTimes(index, 100.1, 100.2)))
    text = b"".join(traced.tracing.pieces(most_bytes=20_000))
    assert len(slices(json.loads(text), "step 0")) == 1
    assert not slices(json.loads(text), f"step {2 * trace_module.PIECE_EVENTS - 1}")
    assert "largest size" in json.loads(text)[-1]["name"]
    assert traced.tracing.closed


def test_what_nobody_writes_down_is_bounded_and_counted(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "MOST_QUEUED", 3)
    tracing = Tracing(TOPOLOGY, "here", 100.0, 200.0)
    for index in range(10):
        tracing.put(100.0, part(0, StepTimes(index, 100.1, 100.2)))
    tracing.close()
    events = json.loads(b"".join(tracing.pieces()))
    assert len(slices(events, "step 0") + slices(events, "step 2")) == 2
    assert events[-1]["name"] == "7 events were left out"


def test_a_reader_that_goes_away_ends_the_trace(traced: Traced) -> None:
    pieces = traced.tracing.pieces()
    next(pieces)
    pieces.close()  # type: ignore[attr-defined] # a generator
    assert traced.tracing.closed


def test_a_file_is_whole_once_it_is_joined(traced: Traced, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traced.tracing.write_to(path)
    traced.submit("a", 20, 100.0)
    traced.tracing.close()
    traced.tracing.join()
    assert any(event.get("cat") == "request" for event in json.loads(path.read_bytes()))


def test_a_file_that_cannot_be_made_ends_the_trace_alone(
    traced: Traced, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traced.tracing.write_to(tmp_path / "gone" / "trace.json")
    traced.tracing.join()
    assert traced.tracing.closed
    assert "the trace ends here" in caplog.text


def test_times_that_are_no_numbers_are_left_out_and_the_trace_stays_json(traced: Traced) -> None:
    nan, inf = float("nan"), float("inf")
    bad = (
        StepTimes(1, nan, 100.2),
        StepTimes(2, 100.1, inf),
        StepTimes(3, 100.1, 1e305),  # not finite in microseconds
        StepTimes(4, 100.1, 100.2, (("forward", -inf, 100.2),)),
        StepTimes(5, 100.1, 100.2, (), (("all_reduce", nan),)),
    )
    traced.tracing.put(101.0, part(0, *bad, StepTimes(6, 100.1, 100.2)))
    traced.tracing.put(101.0, part(1, StepTimes(7, 100.1, 100.2), machine="elsewhere", clock=nan))
    traced.tracing.put(101.0, part(1, StepTimes(8, 100.1, 100.2), machine="elsewhere", clock=100.5))
    traced.tracing.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    events = json.loads(b"".join(traced.tracing.pieces()), parse_constant=refuse)
    names = [event["name"] for event in events if event["ph"] in "Xi"]
    assert names == ["step 6", "5 steps were left out", "1 steps were left out", "step 8"]
