"""A pod answers probes, and ends, by the states that its parts report; no process and no clock is used."""

from __future__ import annotations

import socket

import pytest

from medha_process.part_state import PartState, Phase, read_state
from medha_process.supervision.lifecycle import Abort, Interrupt
from medha_worker.pod.leader_name import looked_up
from medha_worker.pod.pod_watch import FAILED_RENDEZVOUS_SECONDS, LIVE_SECONDS, PodWatch

PARTS = ["controller", "rank 0", "rank 1"]
READY_SECONDS, DRAIN_SECONDS = 100.0, 30.0


@pytest.fixture
def watch() -> PodWatch:
    return PodWatch(PARTS, 0.0, READY_SECONDS, DRAIN_SECONDS, "grid-l0-0.grid.tests.svc")


def tell(watch: PodWatch, phase: Phase, now: float = 1.0, *parts: str, **fields: object) -> None:
    for part in parts or PARTS:
        watch.reported(part, PartState.model_validate({"phase": phase, **fields}), now)


def failed_rendezvous(watch: PodWatch, epoch: int, now: float) -> None:
    """Two ranks say it, and say it again with every beat."""
    for _ in range(2):
        tell(
            watch,
            "gathering",
            now,
            "rank 0",
            "rank 1",
            failed_epoch=epoch,
            failed_reason="rank 2 did not come",
        )


def test_a_pod_has_started_once_all_its_parts_serve_and_for_good(watch: PodWatch) -> None:
    tell(watch, "serving", 1.0, "rank 0", "rank 1", epoch=7)
    assert not watch.started().ok
    assert watch.started().reasons == ("controller starts",)
    tell(watch, "serving", 2.0, "controller", epoch=7)
    assert watch.started().ok
    assert watch.ready().ok
    watch.ended("rank 1", 3.0)
    assert watch.started().ok
    assert watch.ready().reasons == ("rank 1 starts",)


def test_reasons_say_what_each_part_waits_for(watch: PodWatch) -> None:
    tell(watch, "loading", 1.0, "rank 0")
    tell(watch, "calling", 1.0, "rank 1")
    tell(watch, "gathering", 1.0, "controller", detail="waiting for rank 2, 3")
    assert watch.ready().reasons == (
        "controller waits for the other ranks (waiting for rank 2, 3)",
        "rank 0 loads its weights",
        "rank 1 calls the leader, grid-l0-0.grid.tests.svc",
    )


def test_who_was_asked_to_stop_is_not_ready_and_waits_only_for_requests_that_may_be_open(
    watch: PodWatch,
) -> None:
    assert watch.interrupted() == Interrupt(busy=False, drain_seconds=DRAIN_SECONDS)
    tell(watch, "serving", epoch=7)
    assert watch.interrupted() == Interrupt(busy=True, drain_seconds=DRAIN_SECONDS)
    assert watch.ready().reasons == ("stopping: asked to stop",)


def test_a_supervisor_whose_loop_does_not_turn_does_not_live(watch: PodWatch) -> None:
    watch.poll(50.0)
    assert watch.live(50.0 + LIVE_SECONDS).ok
    assert not watch.live(50.1 + LIVE_SECONDS).ok


def test_three_meetings_that_fail_within_ten_minutes_ask_for_a_restart(watch: PodWatch) -> None:
    for epoch in (3, 4):
        failed_rendezvous(watch, epoch, 10.0 * epoch)
        assert watch.poll(10.0 * epoch) is None
    failed_rendezvous(watch, 5, 50.0)
    found = watch.poll(50.0)
    assert isinstance(found, Abort)
    assert found.exit_status == 75
    assert found.reason.startswith("RendezvousFailed: ")
    assert found.reason.endswith("rank 2 did not come")


def test_meetings_that_failed_longer_ago_do_not_count(watch: PodWatch) -> None:
    for epoch, now in ((3, 10.0), (4, 20.0), (5, 10.0 + FAILED_RENDEZVOUS_SECONDS)):
        failed_rendezvous(watch, epoch, now)
        tell(watch, "serving", now + 1, epoch=epoch)
    assert watch.poll(20.0 + FAILED_RENDEZVOUS_SECONDS) is None


def test_ranks_that_have_weights_and_do_not_meet_in_time_ask_for_a_restart(watch: PodWatch) -> None:
    tell(watch, "serving", 10.0, epoch=1)
    tell(watch, "gathering", 20.0, "rank 1")
    assert watch.poll(20.0 + READY_SECONDS) is None
    found = watch.poll(20.1 + READY_SECONDS)
    assert isinstance(found, Abort)
    assert (found.exit_status, "rank 1 waits for the other ranks" in found.reason) == (75, True)


def test_a_start_that_takes_too_long_is_no_reason_to_replace_the_others(watch: PodWatch) -> None:
    tell(watch, "calling", 10.0, "rank 0")
    tell(watch, "loading", 10.0, "rank 1")
    found = watch.poll(0.1 + READY_SECONDS)
    assert isinstance(found, Abort)
    assert found.exit_status == 1
    assert found.reason.startswith("StartTooSlow: not ready within 100 s (spec.lifecycle.readySeconds): ")


def test_who_is_refused_asks_to_be_replaced(watch: PodWatch) -> None:
    tell(watch, "calling", 1.0, "rank 0", refused="it was last in epoch 3")
    found = watch.poll(1.0)
    assert isinstance(found, Abort)
    assert (found.exit_status, found.reason.endswith("it was last in epoch 3")) == (75, True)


def test_a_state_is_read_as_it_was_written_and_anything_else_is_as_if_nothing_was_said() -> None:
    state = PartState(phase="rendezvous", epoch=4, detail="groups form")
    assert read_state(b"WATCHDOG=1\n" + state.line()) == state
    assert read_state(b"WATCHDOG=1") is None
    assert read_state(b'WATCHDOG=1\nX_MEDHA_STATE={"phase": "dreaming"}') is None


def test_a_name_that_is_not_in_dns_yet_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_up("127.0.0.9") == "127.0.0.9 is 127.0.0.9, which does not answer yet"

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert looked_up("grid-l0-0") == "grid-l0-0 does not resolve yet (Name or service not known)"
