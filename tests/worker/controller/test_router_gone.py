"""A controller whose router has gone ends all of its requests, and serves the next router."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from medha.api.replica import ParallelismSpec, SchedulingSpec, ServiceClass
from medha.wire.frames import tokens_to_frame
from medha.wire.messages import Announce, Emit, RankHello, Sample, Sampling, StageFree, Step, Tokens

from .test_controller import IDS, READY, SPEC, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """Start a controller that runs one request at a time, so that others wait."""
    spec = SPEC.model_copy(update={"scheduling": SchedulingSpec(max_running=1)})
    stage = Stage(tmp_path, spec)
    yield stage
    stage.close()


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Stage]:
    """Start a controller with two stages, for which rank 0 reports, and KV for 640 tokens."""
    classes = (ServiceClass(name="default", default_output_tokens=512),)
    parallelism = ParallelismSpec(stream=2)
    stage = Stage(tmp_path, SPEC.model_copy(update={"parallelism": parallelism, "service_classes": classes}))
    others = stage.connect_rank(b"rank-1")
    for link in others:
        link.send(RankHello(1, "first"))
    epoch = stage.hello().epoch
    stage.rank.send(replace(READY, epoch=epoch, kv_blocks=40))
    others[0].send(replace(READY, epoch=epoch, kv_blocks=40, rank=1))
    for router_link in (stage.router, stage.router_tokens):
        assert isinstance(stage._next(router_link, Announce).message, Announce)
    yield stage
    for link in others:
        link.close(0)
    stage.close()


def ask_for_all(stage: Stage) -> Step:
    """Let one request run, one wait for KV and one for its ids, and send half a prompt; return the step in flight."""
    stage.ready()
    stage.send_tokens("p", sequences=2)
    stage.submit("runs", "p", sampling=Sampling(max_tokens=100))
    stage.submit("waits", "p", sampling=Sampling(max_tokens=100))
    stage.submit("held", "unheard", sampling=Sampling(max_tokens=100))
    stage.router_tokens.send(Tokens("half", 0, 40), tokens_to_frame(IDS))
    step = stage.step()
    assert [entry.id for entry in step.entries] == ["runs"]
    while (card := stage.from_controller(Announce)).waiting != 1:  # type: ignore[attr-defined]
        assert isinstance(card, Announce)
    return step


def close_router(stage: Stage) -> None:
    """Close the router, and wait until the controller has noticed it, which takes longer on a busy machine.

    The step in flight must not end before that: the controller would run another decode for the router's request.
    """
    stage.wait_for_ready_file()
    url = stage.metrics_url()
    stage.close_router()
    end = time.monotonic() + 20
    while "\nmedha_sequences_waiting 0.0\n" not in httpx.get(url).text:
        assert time.monotonic() < end, "the controller does not notice"
        time.sleep(0.02)


def test_nothing_is_left_of_a_router_that_was_killed_and_nobody_is_computed_for_it(stage: Stage) -> None:
    step = ask_for_all(stage)
    close_router(stage)
    stage.finish(step, Sample("runs", 7))
    bookkeeping = stage.step()
    assert (bookkeeping.entries, bookkeeping.releases, bookkeeping.forgets) == ((), ("runs",), ("p",))
    stage.finish(bookkeeping)
    former = stage.router.peer
    stage.open_router()
    card = stage.from_controller(Announce)
    assert isinstance(card, Announce)
    assert (card.running, card.waiting, card.kv_tokens_free) == (0, 0, card.kv_tokens_total)
    assert stage.router.peer.startswith(b"r0/")
    assert stage.router.peer != former, (
        "a new connection, by which the router knows that it has lost messages"
    )
    assert isinstance(stage._next(stage.router_tokens, Announce).message, Announce)
    # Names that the former router used: its prompts must have gone with it.
    for link in (stage.rank, stage.rank_tokens):
        link.send(RankHello(0, "first"))
    stage.router_tokens.send(Tokens("half", 0, 20), tokens_to_frame(IDS))
    stage.submit("held", "half", sampling=Sampling(max_tokens=1))
    step = stage.step()
    assert [entry.id for entry in step.entries] == ["held"]
    stage.finish(step, Sample("held", 9))
    emit = stage.from_controller(Emit)
    assert isinstance(emit, Emit)
    assert (emit.id, emit.tokens) == ("held", (9,)), "nothing of the former router's requests comes before it"


def test_a_request_that_gets_kv_while_those_of_its_router_are_ended_still_has_its_ids(
    pipeline: Stage,
) -> None:
    """They end one after the other: with a claim on KV, the step may begin that admits who waited behind it."""
    for name, output, deadline_seconds in (("runs", 491, None), ("claims", 491, 1e-3), ("behind", 100, None)):
        pipeline.send_tokens(name)
        sampling = Sampling(max_tokens=output)
        pipeline.submit(name, name, sampling=sampling, deadline_after_seconds=deadline_seconds)
    first = pipeline.step()
    assert [admit.id for admit in first.admits] == ["runs"]
    while pipeline.from_controller(Announce).waiting != 2:  # type: ignore[attr-defined]
        pass
    pipeline.rank.send(StageFree(first.step_id, 0))  # the next step may begin before this one is done
    for _ in range(2):
        pipeline.from_controller(Announce)  # by now it has heard that
    close_router(pipeline)
    second = pipeline.step()
    assert [admit.id for admit in second.admits] == ["behind"]
    for step in (first, second):
        pipeline.finish(step, *(Sample(entry.id, 7) for entry in step.entries))
    forgotten = set(second.forgets)
    while forgotten != {"runs", "claims", "behind"}:
        step = pipeline.step()
        forgotten |= set(step.forgets)
        pipeline.finish(step)


@pytest.mark.long
def test_a_router_that_does_not_admit_the_replica_is_logged_and_tried_again(tmp_path: Path) -> None:
    """The router's tokens may change, and then admit the replica."""
    stage = Stage(tmp_path, start=False)
    try:
        token = stage.keys.enrolment.read_text()
        stage.close_router()
        stage.keys.enrolment.write_text("another token that is long enough to be one")
        stage.open_router()
        stage.keys.enrolment.write_text(token)
        stage.start()
        end = time.monotonic() + 20
        while stage.router.connections.refused() == 0:
            assert time.monotonic() < end, "nobody was refused"
            time.sleep(0.05)
        stage.close_router()
        stage.open_router()
        stage.ready()
        log = stage.kill()
        assert "does not admit this replica" in log
        assert str(stage.keys.enrolment) in log
        assert token.strip() not in log
    finally:
        stage.close()


@pytest.mark.parametrize("name", ["controller", "ranks_public", "router_public", "enrolment"])
def test_a_key_file_that_is_missing_ends_the_start_and_is_named(tmp_path: Path, name: str) -> None:
    stage = Stage(tmp_path, start=False)
    missing = getattr(stage.keys, name)
    missing.unlink()
    stage.start()
    try:
        assert stage.process.wait(timeout=20) == 1
        assert stage.process.stderr is not None
        log = stage.process.stderr.read()
        assert f"{missing}: " in log
        assert "docs/security.md" in log
        assert "Traceback" not in log
    finally:
        stage.close()


def test_metrics_report_that_kv_is_free_while_there_is_no_router(stage: Stage) -> None:
    step = ask_for_all(stage)
    close_router(stage)
    stage.finish(step, Sample("runs", 7))
    stage.finish(stage.step())
    url = stage.metrics_url()
    end = time.monotonic() + 20
    while "\nmedha_kv_used_ratio 0.0\n" not in httpx.get(url).text:
        assert time.monotonic() < end, "KV is still held"
        time.sleep(0.05)
    stage.open_router()
