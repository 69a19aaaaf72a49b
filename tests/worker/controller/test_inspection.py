"""The controller's loop answers questions, and ranks trace as long as somebody wants a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.messages import StepProfile, StepTimes, Trace, TracePart
from medha_worker.controller import trace_writer as trace_module
from medha_worker.controller.inspection import FOREVER_SECONDS, LAST_PARTS_SECONDS, Inspection
from medha_worker.controller.telemetry_server import StatusQuery, TraceQuery

CONFIG = ReplicaConfig(
    topology=Topology(stream=2),
    scheduling=SchedulingSpec(),
    service_classes={"default": ServiceClass(name="default")},
    default_class="default",
    max_model_len=1000,
    block_size_tokens=16,
    kv_blocks=10,
    long_threshold_tokens=1000,
)


def new_core(epoch: int = 0) -> ReplicaController:
    return ReplicaController(CONFIG, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), epoch)


@pytest.fixture
def inspection(monkeypatch: pytest.MonkeyPatch) -> Iterator[Inspection]:
    monkeypatch.setattr(trace_module, "IDLE_SECONDS", 0.001)
    inspection = Inspection("grid", "tiny", None)
    inspection.begin_epoch(new_core(), History(), 0.0)
    yield inspection
    inspection.close()


def ask(inspection: Inspection, question: StatusQuery | TraceQuery, now: float) -> Any:
    inspection.questions.ask(question)
    inspection.answer(new_core(), [], now)
    answer: Future[Any] = question.answer
    return answer.result(timeout=0)


def test_a_status_is_answered_when_the_loop_comes_round(inspection: Inspection) -> None:
    status = json.loads(ask(inspection, StatusQuery("age", 5), 2.0))
    assert (status["replica"], status["state"], status["up_seconds"]) == ("grid", "serving", 2.0)


def test_while_the_ranks_gather_the_status_names_who_is_missing(inspection: Inspection) -> None:
    question = StatusQuery("age", 5)
    inspection.questions.ask(question)
    inspection.answer(None, [1], 2.0)
    status = json.loads(question.answer.result(timeout=0))
    assert (status["state"], status["missing_ranks"], status["core"]) == ("gathering", [1], None)


def test_ranks_get_one_message_when_a_trace_begins_and_one_when_its_time_is_over(
    inspection: Inspection,
) -> None:
    assert inspection.rank_trace_requests(1.0) is None
    pieces = ask(inspection, TraceQuery(5.0), 2.0)
    assert inspection.rank_trace_requests(3.0) == Trace(4.0)
    assert inspection.rank_trace_requests(4.0) is None
    inspection.add_part(TracePart(0, 0, "", 1.0, (StepTimes(1, 0.5, 0.75),)), 5.0)
    assert (
        inspection.rank_trace_requests(7.0 + LAST_PARTS_SECONDS / 2) is None
    )  # the last parts are in transit
    assert inspection.rank_trace_requests(7.1 + LAST_PARTS_SECONDS) == Trace(0.0)
    assert any(event["name"] == "step 1" for event in json.loads(b"".join(pieces)))
    assert ask(inspection, TraceQuery(5.0), 9.0) is not None  # the next one


def test_a_second_trace_is_refused_while_one_is_taken(inspection: Inspection) -> None:
    assert ask(inspection, TraceQuery(5.0), 2.0) is not None
    assert ask(inspection, TraceQuery(5.0), 3.0) is None


def test_a_trace_ends_with_its_reader(inspection: Inspection) -> None:
    pieces = ask(inspection, TraceQuery(500.0), 2.0)
    assert inspection.rank_trace_requests(2.0) == Trace(500.0)
    next(pieces)
    pieces.close()
    assert inspection.rank_trace_requests(2.1) == Trace(0.0)


def test_the_ranks_of_the_next_epoch_go_on_with_a_trace(inspection: Inspection) -> None:
    ask(inspection, TraceQuery(50.0), 0.0)
    assert inspection.rank_trace_requests(0.0) == Trace(50.0)
    inspection.begin_epoch(new_core(1), History(), 10.0)
    assert inspection.rank_trace_requests(10.0) == Trace(40.0)


@pytest.mark.parametrize(("epoch", "name"), [(0, "trace.json"), (3, "trace.epoch3.json")])
def test_a_file_is_written_from_the_first_epoch_on_and_none_is_overwritten(
    tmp_path: Path, epoch: int, name: str
) -> None:
    inspection = Inspection("grid", "tiny", tmp_path / "trace.json")
    inspection.begin_epoch(new_core(epoch), History(), 1.0)
    request = inspection.rank_trace_requests(1.0)
    assert request is not None
    assert request.seconds == pytest.approx(FOREVER_SECONDS)
    inspection.close()
    assert json.loads((tmp_path / name).read_bytes())
