"""The progress of requests, as a controller's events tell it, in reports to routers and in the timeline of a record."""

from __future__ import annotations

from typing import Any

import pytest

from medha.observing.timeline import Interrupted, Timeline
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.request_progress import happenings, happenings_of, progress
from medha.wire.messages import Emit, StageFree, SteppedAside, Submit


@pytest.mark.parametrize("seed", range(2))
def test_the_bars_of_a_run_hold_all_that_was_computed_and_sampled(random_run: Any, seed: int) -> None:
    replica = random_run(seed)
    core, history = ReplicaController(replica.config, replica.profile), History()
    timeline = Timeline(0.0)
    prompts: dict[str, int] = {}
    output: dict[str, int] = {}
    cached: dict[str, int] = {}
    aside: set[str] = set()
    for now, event in replica.log:
        commands = core.handle(event, now)
        for happening, at in happenings(event, commands, core, history, "r0", now):
            timeline.take(happening, at)
        history.take(core, event, commands, now)
        if isinstance(event, Submit) and event.id in history.open:
            prompts[event.id] = event.tokens
        for command in commands:
            match command:
                case Emit(id=name, tokens=tokens):
                    output[name] = output.get(name, 0) + len(tokens)
                    cached[name] = max(cached.get(name, 0), command.cached_tokens)
                case SteppedAside(id=name):
                    aside.add(name)
    assert prompts.keys() == {bar.began.id for bar in timeline}
    for bar in timeline:
        name = bar.began.id
        chunks = [segment for segment in bar.segments if segment.kind == "chunk"]
        sampled = sum(segment.tokens for segment in bar.segments if segment.kind == "decode")
        assert sampled == output.get(name, 0)
        assert bar.outcome is not None
        assert ("aside" in {segment.kind for segment in bar.segments}) == (name in aside)
        if sampled and name not in aside:
            assert sum(segment.tokens for segment in chunks) == prompts[name] - cached[name]
            assert [segment.kind for segment in bar.segments[:2]] in (
                ["sent", "chunk"],
                ["chunk"],
                ["chunk", "chunk"],
                ["chunk", "decode"],
            )
    assert len(prompts) > 30


def test_a_request_that_steps_aside_is_reported() -> None:
    aside = SteppedAside("a", "p~1", "p", 30)
    report = progress(StageFree(0, 0), [aside], History(), 1.0)
    assert report is not None
    assert (report.chunks, report.stepped_aside) == ((), ("a",))
    assert list(happenings_of(report, 1.0)) == [Interrupted("a", "aside")]
    assert progress(StageFree(0, 0), [], History(), 1.0) is None


def test_a_report_has_the_chunks_of_the_step_that_ended(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(max_chunk_tokens=16, min_chunk_tokens=4)
    replica.submit(submit_of("a", 40, 2))
    replica.run()
    core, history = ReplicaController(replica.config, replica.profile), History()
    reports = []
    for now, event in replica.log:
        commands = core.handle(event, now)
        report = progress(event, commands, history, now)
        if report is not None:
            reports.append(report)
        history.take(core, event, commands, now)
    chunks = [chunk for report in reports for chunk in report.chunks]
    assert sum(chunk.tokens for chunk in chunks) == 40
    assert [chunk.is_first for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert all(report.began_seconds > 0 for report in reports)
