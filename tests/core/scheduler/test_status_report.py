"""The status says what a controller is doing, for anybody who may not know what is in a prompt."""

from __future__ import annotations

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.status_report import MOST_REQUESTS, CoreStatus, Order, RequestStatus, status
from medha.topology import Topology
from medha.wire.messages import (
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Sample,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
)

PROFILE = StepProfile(1e-3, 1e-4, 1e-9, 1e-5)  # a token takes 0.1 ms


class Watched:
    """A controller and its history."""

    def __init__(self, controller: ReplicaController) -> None:
        self.controller, self._history = controller, History()

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]:
        commands = self.controller.handle(event, now)
        self._history.take(self.controller, event, commands, now)
        return commands

    def status(self, now: float, order: Order = "urgency", most_requests: int = 50) -> CoreStatus:
        return status(self.controller, self._history, now, order=order, most_requests=most_requests)


def new_core(
    *,
    stream: int = 2,
    kv: int = 1,
    kv_blocks: int = 1000,
    policy: str = "lars",
    scheduling: SchedulingSpec | None = None,
) -> Watched:
    if scheduling is None:
        scheduling = SchedulingSpec(policy=policy, max_chunk_tokens=256, min_chunk_tokens=256)  # type: ignore[arg-type]
    config = ReplicaConfig(
        topology=Topology(stream=stream, kv=kv),
        scheduling=scheduling,
        service_classes={name: ServiceClass(name=name) for name in ("default", "batch")},
        default_class="default",
        max_model_len=100_000,
        block_size_tokens=16,
        kv_blocks=kv_blocks,
        long_threshold_tokens=100_000,
    )
    return Watched(ReplicaController(config, PROFILE))


def submit(name: str, tokens: int = 100, **fields: object) -> Submit:
    options = {"sampling": Sampling(max_tokens=10)} | fields
    return Submit(id=name, prompt=f"p-{name}", tokens=tokens, prompt_length=tokens, seed=1, **options)  # type: ignore[arg-type]


def steps(commands: list[ControllerCommand]) -> list[Step]:
    return [command for command in commands if isinstance(command, Step)]


def find(found: CoreStatus, name: str) -> RequestStatus:
    return next(request for request in found.requests if request.id == name)


def test_a_long_prefill_is_seen_chunk_by_chunk_in_the_stages_of_the_pipeline() -> None:
    core = new_core()
    (first,) = steps(core.handle(submit("book", 2000), 0.0))
    core.handle(StageFree(first.step_id, 0), 0.5)
    found = core.status(1.0)
    assert [(step.in_first_stage, step.since_seconds) for step in found.steps] == [(False, 1.0), (True, 0.5)]
    assert [(step.chunks[0].start, step.chunks[0].tokens) for step in found.steps] == [(0, 256), (256, 256)]
    book = find(found, "book")
    assert (book.phase, book.dispatched_tokens, book.computed_tokens) == ("prefill", 512, 0)
    assert (found.lanes[0].steps_in_flight, found.lanes[0].first_stage_free) == (2, False)
    core.handle(Done(first.step_id), 1.0)
    assert find(core.status(1.0), "book").computed_tokens == 256


def test_a_decode_shows_its_tokens_and_what_one_takes() -> None:
    core = new_core(stream=1)
    (step,) = steps(core.handle(submit("chat"), 0.0))
    step, ahead = steps(core.handle(Done(step.step_id, (Sample("chat", 7),)), 1.0))
    core.handle(Done(step.step_id, (Sample("chat", 8),)), 1.2)
    core.handle(Done(ahead.step_id, (Sample("chat", 9),)), 1.4)
    found = core.status(2.0)
    chat = find(found, "chat")
    assert (chat.phase, chat.output_tokens, chat.prefill_left_seconds) == ("decode", 3, 0)
    assert (chat.age_seconds, chat.ttft_seconds) == (2.0, 1.0)
    assert chat.tpot_seconds == pytest.approx(0.2)
    assert [(step.decodes, step.chunks, step.in_first_stage) for step in found.steps] == 2 * [(1, (), True)]


def test_slack_is_what_is_left_of_the_deadline_beside_the_work() -> None:
    core = new_core()
    core.handle(submit("a", 1000, deadline_after_seconds=2.0, age_seconds=0.5), 10.0)
    found = find(core.status(11.0), "a")
    assert found.deadline_in_seconds == pytest.approx(0.5)
    assert found.prefill_left_seconds > 0
    assert found.slack_seconds == pytest.approx(0.5 - found.prefill_left_seconds)
    assert not found.demoted


def test_a_request_that_cannot_be_on_time_is_shown_as_demoted_with_its_revised_deadline() -> None:
    core = new_core(policy="guarded", kv_blocks=4000)
    core.handle(submit("hopeless", 50_000, deadline_after_seconds=0.01), 0.0)
    core.handle(submit("fine", 100, deadline_after_seconds=5.0), 0.0)
    found = core.status(1.0)
    hopeless = find(found, "hopeless")
    assert hopeless.demoted
    assert hopeless.revised_deadline_in_seconds is not None
    assert hopeless.revised_deadline_in_seconds > 0 > hopeless.deadline_in_seconds
    assert (find(found, "fine").demoted, find(found, "fine").revised_deadline_in_seconds) == (False, None)
    assert [(one.service_class, one.demoted, one.late) for one in found.classes] == [
        ("default", 1, 1),
        ("batch", 0, 0),
    ]


@pytest.mark.parametrize(("stream", "before_deadline"), [(1, False), (2, False), (8, False), (8, True)])
def test_a_revised_deadline_is_when_the_first_token_is_due_however_many_stages_the_prompt_drains_through(
    stream: int, before_deadline: bool
) -> None:
    """With many stages, work may be due later than at first and yet before the deadline of the first token."""
    share = 0.5
    scheduling = SchedulingSpec(
        policy="guarded",
        demoted_share=share,
        max_chunk_tokens=256,
        min_chunk_tokens=256,
        max_step_seconds=0.002,
    )
    core = new_core(stream=stream, scheduling=scheduling)
    alone = core.controller.predictor.uncorrected_prefill(0, 512)
    end = alone.busy_seconds / share
    deadline = 1e-3
    if before_deadline:
        latest = alone.seconds - scheduling.max_step_seconds / stream  # later, it could be on time
        deadline = (max(end, alone.drain_seconds) + latest) / 2
        assert deadline - alone.drain_seconds < end < deadline
    core.handle(submit("two chunks", 512, deadline_after_seconds=deadline), 0.0)
    found = core.status(0.0)
    request = find(found, "two chunks")
    assert (request.phase, request.demoted, found.classes[0].demoted) == ("prefill", True, 1)
    assert request.revised_deadline_in_seconds == pytest.approx(end + alone.drain_seconds)


def test_requests_are_counted_by_class_and_phase() -> None:
    core = new_core(kv_blocks=20)  # 320 tokens: for two of them
    for name, service_class in (("a", "default"), ("b", "batch"), ("c", "batch"), ("d", "batch")):
        core.handle(submit(name, 120, service_class=service_class), 0.0)
    by_name = {one.service_class: one for one in core.status(0.0).classes}
    assert (by_name["default"].prefilling, by_name["default"].waiting) == (1, 0)
    assert (by_name["batch"].waiting, by_name["batch"].waiting_tokens) == (
        3 - by_name["batch"].prefilling,
        120 * (3 - by_name["batch"].prefilling),
    )
    assert by_name["batch"].waiting >= 1


def test_the_blocks_of_a_lane_are_all_accounted_for() -> None:
    core = new_core(kv=2)
    (step,) = steps(core.handle(submit("a", 200), 0.0))
    core.handle(StageFree(step.step_id, 0), 0.1)
    core.handle(Done(step.step_id, (Sample("a", 7),)), 0.2)
    lanes = core.status(0.3).lanes
    kv = lanes[0].kv
    assert [lane.lane for lane in lanes] == [0, 1]
    assert kv.used == 13  # 200 tokens in blocks of 16
    assert kv.used + kv.reserved + kv.cached + kv.free == kv.blocks
    assert (lanes[0].decoding, lanes[1].kv.free) == (1, lanes[1].kv.blocks)


def test_a_request_that_ended_with_a_step_in_flight_is_still_shown_holding_its_kv() -> None:
    core = new_core()
    core.handle(submit("a"), 0.0)
    core.handle(Cancel("a"), 0.1)
    assert find(core.status(0.2), "a").phase == "ending"


@pytest.mark.parametrize(
    ("order", "first"), [("age", "old"), ("prompt", "book"), ("urgency", "hasty"), ("kv", "old")]
)
def test_the_order_that_is_asked_for_decides_who_is_named(order: Order, first: str) -> None:
    core = new_core()
    core.handle(submit("old", 100, age_seconds=9.0, deadline_after_seconds=100.0), 0.0)
    core.handle(submit("book", 10_000, deadline_after_seconds=100.0), 0.0)
    core.handle(submit("hasty", 200, deadline_after_seconds=0.5), 0.0)
    found = core.status(0.0, order=order, most_requests=1)
    assert [request.id for request in found.requests] == [first]
    assert found.running + found.waiting == 3


def test_a_status_is_bounded_whatever_waits() -> None:
    core = new_core(kv_blocks=20)
    for index in range(MOST_REQUESTS + 20):
        core.handle(submit(f"r{index}"), 0.0)
    found = core.status(0.0, most_requests=10**9)
    assert len(found.requests) == MOST_REQUESTS
    assert len(core.status(0.0, most_requests=-1).requests) == 0


def test_looking_changes_nothing() -> None:
    events = [submit("a", 700), submit("b", 300, deadline_after_seconds=0.01), submit("c", 50)]
    watched, alone = new_core(policy="guarded"), new_core(policy="guarded")
    for event in events:
        watched.status(0.0)
        assert watched.handle(event, 0.0) == alone.handle(event, 0.0)
    watched.status(0.1)
    assert watched.handle(StageFree(0, 0), 0.1) == alone.handle(StageFree(0, 0), 0.1)


def test_its_json_comes_back_as_the_same_status() -> None:
    core = new_core()
    core.handle(submit("a", 700), 0.0)
    found = core.status(0.5)
    assert CoreStatus.model_validate_json(found.model_dump_json()) == found
