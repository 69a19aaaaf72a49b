"""The status of a controller across epochs: rates, first tokens, met deadlines, and no request of a lost epoch."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
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
    HostTierFigures,
    Sample,
    Sampling,
    Step,
    StepProfile,
    Submit,
    Tick,
)
from medha_worker.controller.live_status import WINDOW_SECONDS, LiveStatus

CONFIG = ReplicaConfig(
    topology=Topology(),
    scheduling=SchedulingSpec(max_chunk_tokens=64, min_chunk_tokens=64),
    service_classes={name: ServiceClass(name=name) for name in ("default", "batch")},
    default_class="default",
    max_model_len=1000,
    block_size_tokens=16,
    kv_blocks=100,
    long_threshold_tokens=1000,
)


class Beside:
    """A core and its watch, as the controller's process drives them."""

    def __init__(self) -> None:
        self.watch = LiveStatus("grid", "tiny")
        self.steps: deque[Step] = deque()  # in flight
        self.begin(0)

    def begin(self, epoch: int, now: float = 0.0, config: ReplicaConfig = CONFIG) -> None:
        self.core = ReplicaController(config, StepProfile(1e-3, 1e-6, 1e-9, 1e-5), epoch)
        self.history = History()
        self.steps.clear()
        self.watch.begin_epoch(self.history, now)

    def take(self, event: ControllerEvent, now: float) -> Step | None:
        """Handle an event, and return the step that then runs."""
        commands = self.core.handle(event, now)
        self.watch.observe(self.history.take(self.core, event, commands, now), self.core)
        self.steps += (command for command in commands if isinstance(command, Step))
        return self.steps[0] if self.steps else None

    def submit(self, name: str, now: float = 0.0, **fields: Any) -> Step:
        options = {"sampling": Sampling(max_tokens=3)} | fields
        step = self.take(Submit(name, f"p-{name}", 50, 50, seed=1, **options), now)
        assert step is not None
        return step

    def finish(self, step: Step | None, now: float, *samples: Sample) -> Step | None:
        assert step is self.steps.popleft()
        return self.take(Done(step.step_id, samples), now)


@pytest.fixture
def beside() -> Beside:
    return Beside()


def run(beside: Beside, at: tuple[float, float, float], **fields: Any) -> None:
    """Serve one request of 50 prompt tokens, whose three tokens are sampled at these times."""
    step: Step | None = beside.submit("a", **fields)
    for now, reason in zip(at, (None, None, "length"), strict=True):
        step = beside.finish(step, now, Sample("a", 7, reason))  # type: ignore[arg-type]
    beside.finish(step, at[-1])  # the step that informs the ranks of its end


def test_rates_are_means_over_the_last_seconds(beside: Beside) -> None:
    run(beside, (1.0, 2.0, 3.0))
    found = beside.watch.status(beside.core, 5.0)
    assert found.window_seconds == 5.0
    assert found.prefill_tokens_per_second == 50 / 5
    assert found.decode_tokens_per_second == 2 / 5
    assert beside.watch.status(beside.core, 3.5 + WINDOW_SECONDS).decode_tokens_per_second == 0


def test_what_tiers_copy_is_a_mean_over_the_last_seconds_too_and_starts_again_with_an_epoch(
    beside: Beside,
) -> None:
    config = replace(CONFIG, host_tier=HostTierFigures(20, 1000, 1e-6, 1e-6))

    def rates(now: float) -> list[tuple[str, float, float]]:
        found = beside.watch.status(beside.core, now).tier_rates
        return [(one.tier, one.read_bytes_per_second, one.written_bytes_per_second) for one in found]

    assert rates(0.0) == [], "there is no tier"
    for epoch, (start, blocks) in enumerate(((0.0, 4), (20.0, 2))):
        beside.begin(epoch, now=start, config=config)
        beside.take(Tick(), start + 0.1)
        counts = beside.core.pools.tiers[0].counts
        counts.fetched_blocks, counts.offloaded_blocks = blocks, 3 * blocks
        beside.take(Tick(), start + 0.2)  # nothing was completed: ranks may report copies between two steps
        counts.fetched_blocks += 1
        beside.take(Tick(), start + 4.0)
        window = 5.0 if epoch == 0 else WINDOW_SECONDS
        copied = 1000 * (blocks + 1) / window, 1000 * 3 * blocks / window
        assert rates(start + 5.0) == [("host", *copied)]
        assert rates(start + 12.0) == [("host", 1000 / WINDOW_SECONDS, 0.0)]
    assert beside.watch.status(None, 33.0).tier_rates == ()


def test_a_deadline_counts_from_when_the_request_reached_the_router(beside: Beside) -> None:
    run(beside, (1.0, 1.02, 1.04), deadline_after_seconds=1.5, age_seconds=1.0)
    (row,) = beside.watch.status(beside.core, 2.0).attainment
    assert (row.ttft_met, row.ttft_missed, row.tpot_met, row.tpot_missed) == (0, 1, 1, 0)


def test_deadlines_are_counted_by_the_class_of_the_request(beside: Beside) -> None:
    run(beside, (1.0, 2.0, 3.0), service_class="batch", deadline_after_seconds=1.5)
    (row,) = beside.watch.status(beside.core, 4.0).attainment
    assert (row.service_class, row.ttft_met, row.tpot_met, row.tpot_missed) == ("batch", 1, 0, 1)


def test_a_running_request_shows_its_times_and_its_steps_age(beside: Beside) -> None:
    step = beside.submit("a", now=1.0)
    step = beside.finish(step, 1.5, Sample("a", 7))  # type: ignore[assignment]
    beside.finish(step, 1.6, Sample("a", 7))
    found = beside.watch.status(beside.core, 2.0).core
    assert found is not None
    (request,), (running,) = found.requests, found.steps
    assert request.ttft_seconds == pytest.approx(0.5)
    assert request.tpot_seconds == pytest.approx(0.1)
    assert running.since_seconds == pytest.approx(0.5)  # it was sent ahead, with the step before it


def test_nothing_is_remembered_of_requests_that_have_ended(beside: Beside) -> None:
    run(beside, (1.0, 2.0, 3.0))
    step = beside.submit("b", 4.0)
    beside.take(Cancel("b"), 4.1)
    beside.finish(beside.finish(step, 4.2), 4.3)
    assert beside.history.open == {}
    assert beside.history.launched == {}


def test_a_lost_epoch_is_reported_and_the_counts_stay(beside: Beside) -> None:
    run(beside, (1.0, 1.01, 1.02))
    beside.submit("b", 2.0)
    lost = beside.watch.status(None, 3.0, missing_ranks=[1])
    assert (lost.state, lost.missing_ranks, lost.core) == ("gathering", (1,), None)
    beside.begin(1, now=4.0)
    found = beside.watch.status(beside.core, 5.0, missing_ranks=[0])
    assert (found.state, found.missing_ranks, found.up_seconds) == ("serving", (), 5.0)
    assert found.core is not None
    assert found.core.steps == ()
    run(beside, (6.0, 6.01, 6.02))  # the same step numbers and ids again
    assert beside.watch.status(beside.core, 7.0).attainment[0].ttft_met >= 1
