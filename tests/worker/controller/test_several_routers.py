"""A controller of several routers: each has its own requests, and all hear how full the replica is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from medha.api.replica import SchedulingSpec
from medha.wire.frames import tokens_to_frame
from medha.wire.messages import (
    BEATS,
    Announce,
    BundlePart,
    Cancel,
    Emit,
    FetchBundle,
    KeyUse,
    Message,
    Refused,
    RouterLost,
    RouterUse,
    Sample,
    Sampling,
    Step,
    Submit,
    Tokens,
)
from medha_links.key_files import KeyPair, read_tokens
from medha_links.sockets import Authenticator, bind
from medha_process.part_settings import ControllerSettings, RouterEndpoints
from medha_worker.controller.router_discovery import RouterDiscovery, located, look_up, names

from .test_controller import IDS, SPEC, Router, Stage

USE = RouterUse("other", 1, (KeyUse("search", 1, 3, 40, 2, 3.0, 40.0),))


class Other:
    """A further router, in a context of its own as a process has."""

    def __init__(self, stage: Stage, endpoints: RouterEndpoints) -> None:
        self._stage = stage
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        enrolled = KeyPair.of_token(read_tokens(stage.keys.enrolment)[0]).public
        self._authenticator = Authenticator(self._context, [enrolled])
        keys = KeyPair.read(stage.keys.router)
        self.control, self.tokens = (
            Router(bind(self._context, endpoint, keys)) for endpoint in (endpoints.control, endpoints.tokens)
        )

    def hear(self) -> None:
        """Wait until the controller has announced itself on both links."""
        for link in (self.control, self.tokens):
            assert isinstance(self._stage._next(link, Announce).message, Announce)

    def submit(self, name: str, prompt: str) -> None:
        sampling = Sampling(max_tokens=100)
        self.tokens.send(Tokens(prompt, 0, len(IDS)), tokens_to_frame(IDS))
        self.control.send(Submit(name, prompt, len(IDS), len(IDS), 1, sampling=sampling))

    def next(self, kind: type[Message]) -> Message:
        return self._stage._next(self.control, kind).message

    def close(self) -> None:
        """Disappear, as a router does that is killed."""
        for link in (self.control, self.tokens):
            link.close(0)
        self._authenticator.close()
        self._context.term()


def endpoints(folder: Path) -> RouterEndpoints:
    return RouterEndpoints(control=f"ipc://{folder}/other_control", tokens=f"ipc://{folder}/other_tokens")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, others=(endpoints(tmp_path),))
    yield stage
    stage.close()


@pytest.fixture
def other(stage: Stage, tmp_path: Path) -> Iterator[Other]:
    other = Other(stage, endpoints(tmp_path))
    yield other
    other.close()


def finish(stage: Stage, step: Step, token: int) -> None:
    stage.finish(step, *(Sample(entry.id, token) for entry in step.entries if entry.samples))


def test_each_router_gets_the_tokens_of_its_own_requests_and_all_hear_of_all_that_runs(
    stage: Stage, other: Other
) -> None:
    stage.ready()
    other.hear()
    stage.send_tokens("p")
    stage.submit("mine", "p", sampling=Sampling(max_tokens=100))
    finish(stage, stage.step(), 7)
    other.submit("theirs", "q")
    while len((step := stage.step()).entries) < 2:
        finish(stage, step, 7)
    finish(stage, step, 8)
    emit = other.next(Emit)
    assert isinstance(emit, Emit)
    assert (emit.id, emit.tokens) == ("theirs", (8,))
    assert stage.from_controller(Emit).id == "mine"  # type: ignore[attr-defined]
    for heard in (other.next, stage.from_controller):
        while heard(Announce).running != 2:  # type: ignore[union-attr, attr-defined]
            finish(stage, stage.step(), 7)


def test_a_router_can_neither_cancel_nor_name_what_is_anothers(stage: Stage, other: Other) -> None:
    stage.ready()
    other.hear()
    stage.send_tokens("p", sequences=2)
    stage.submit("mine", "p", sampling=Sampling(max_tokens=100))
    step = stage.step()
    other.control.send(Cancel("mine"))
    other.control.send(Submit("mine", "q", len(IDS), len(IDS), 1))
    refused = other.next(Refused)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == ("invalid", "request mine is already here")
    other.control.send(Submit("second", "p", len(IDS), len(IDS), 1))
    refused = other.next(Refused)
    assert isinstance(refused, Refused)
    assert "belongs to another router" in refused.detail
    finish(stage, step, 7)
    step = stage.step()
    assert [entry.id for entry in step.entries] == ["mine"], "it is still computed"
    assert stage.from_controller(Emit) == Emit("mine", (7,))


def test_only_what_a_router_had_sent_ends_with_it_and_the_others_learn_that_it_has_gone(
    tmp_path: Path,
) -> None:
    spec = SPEC.model_copy(update={"scheduling": SchedulingSpec(max_running=2)})
    stage = Stage(tmp_path, spec, others=(endpoints(tmp_path),))
    other = Other(stage, endpoints(tmp_path))
    try:
        stage.ready()
        other.hear()
        stage.send_tokens("p")
        stage.submit("mine", "p", sampling=Sampling(max_tokens=100))
        other.submit("theirs", "q")
        other.submit("theirs too", "r")
        other.control.send(USE)
        assert stage.from_controller(RouterUse) == USE
        while len((step := stage.step()).entries) < 2:
            finish(stage, step, 7)
        other.close()
        assert stage.from_controller(RouterLost) == RouterLost("other")
        finish(stage, step, 8)
        after = stage.step()
        assert [entry.id for entry in after.entries] == ["mine"]
        assert "theirs" in after.releases
        finish(stage, after, 9)
        while (card := stage.from_controller(Announce)).running != 1 or card.waiting:  # type: ignore[attr-defined]
            finish(stage, stage.step(), 9)
    finally:
        stage.close()


def test_what_one_router_reports_reaches_the_others_and_not_itself(stage: Stage, other: Other) -> None:
    stage.ready()
    other.hear()
    stage.router.send(RouterUse("mine", 1))
    assert other.next(RouterUse) == RouterUse("mine", 1)
    other.control.send(USE)
    assert stage.from_controller(RouterUse) == USE
    other.control.send(RouterUse("other", 2))
    assert stage.from_controller(RouterUse) == RouterUse("other", 2)


def test_a_router_that_is_added_while_the_replica_serves_is_joined_and_gets_bundle_and_heartbeats(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    other = Other(stage, endpoints(tmp_path))
    try:
        stage.ready()
        settings = ControllerSettings.read(stage.settings)
        both = (*settings.routers, endpoints(tmp_path))
        settings.model_copy(update={"routers": both}).write(stage.settings)
        card = other.next(Announce)
        assert isinstance(card, Announce)
        other.control.send(FetchBundle(card.digest))
        part = other.next(BundlePart)
        assert isinstance(part, BundlePart)
        while not other.control.beating:
            other.next(Announce)
        assert other.control.beating == other.control.peer + BEATS
        assert stage.router.peer != other.control.peer
    finally:
        other.close()
        stage.close()


def test_a_replica_announces_how_many_routers_it_serves(stage: Stage, other: Other) -> None:
    stage.ready()
    other.hear()
    for heard in (other.next, stage.from_controller):
        while heard(Announce).routers != 2:  # type: ignore[union-attr, attr-defined]
            pass
    other.close()
    while stage.from_controller(Announce).routers != 1:  # type: ignore[attr-defined]
        pass


@pytest.mark.long
def test_links_to_a_router_that_is_no_longer_found_stay_until_it_ends(tmp_path: Path) -> None:
    stage = Stage(tmp_path, others=(endpoints(tmp_path),))
    other = Other(stage, endpoints(tmp_path))
    try:
        stage.ready()
        other.hear()
        other.submit("theirs", "q")
        step = stage.step()
        settings = ControllerSettings.read(stage.settings)
        settings.model_copy(update={"routers": settings.routers[:1]}).write(stage.settings)
        end = time.monotonic() + 2.5  # the file is polled every second
        while time.monotonic() < end:
            finish(stage, step, 7)
            assert other.next(Emit) == Emit("theirs", (7,))
            step = stage.step()
            time.sleep(0.1)
        other.close()
        other = Other(stage, endpoints(tmp_path))
        stage.send_tokens("p")
        stage.submit("mine", "p")
        while [entry.id for entry in step.entries] != ["mine"]:
            finish(stage, step, 7)
            step = stage.step()
        assert not other.control.socket.poll(2000), "nobody connects to it any more"
    finally:
        other.close()
        stage.close()


# --- where routers are --------------------------------------------------------------------------------------

SERVICE = RouterEndpoints(control="tcp://front.svc:5700", tokens="tcp://front.svc:5701")
FIXED = RouterEndpoints(control="tcp://[::1]:1", tokens="tcp://[::1]:2")
LOCAL = RouterEndpoints(control="ipc:///c", tokens="ipc:///t")


def at(address: str) -> RouterEndpoints:
    return RouterEndpoints(control=f"tcp://{address}:5700", tokens=f"tcp://{address}:5701")


def test_a_name_stands_for_a_router_at_each_of_its_addresses() -> None:
    assert names((SERVICE, FIXED, LOCAL)) == {"front.svc"}
    addresses = {"front.svc": ("10.0.0.1", "fd00::7")}
    found = located((FIXED, SERVICE, LOCAL, SERVICE), addresses)
    assert found == (FIXED, at("10.0.0.1"), at("[fd00::7]"), LOCAL)
    assert located((SERVICE,), {}) == ()


def test_an_endpoint_may_name_the_address_that_its_connection_comes_from() -> None:
    fixed, named = (
        RouterEndpoints(control=f"tcp://10.0.0.9:0;{host}:1", tokens=f"tcp://10.0.0.9:0;{host}:2")
        for host in ("10.0.0.1", "front.svc")
    )
    assert names((fixed, named)) == {"front.svc"}
    assert located((named,), {"front.svc": ("10.0.0.1",)}) == (fixed,)


def test_links_of_one_router_have_one_host() -> None:
    with pytest.raises(ValueError, match="give both links the same host"):
        RouterEndpoints(control="tcp://a:1", tokens="tcp://b:2")


def test_a_router_with_an_address_of_each_family_is_one_router(monkeypatch: pytest.MonkeyPatch) -> None:
    v6, v4 = (family.value for family in (socket.AF_INET6, socket.AF_INET))
    stream = socket.SOCK_STREAM
    answer = [
        (v4, stream, 6, "", ("10.0.0.2", 0)),
        (v6, stream, 6, "", ("fd00::1", 0, 0, 0)),
        (v4, stream, 6, "", ("10.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert look_up("front.svc") == ("10.0.0.1", "10.0.0.2")


def test_a_name_that_cannot_be_one_has_no_address() -> None:
    with pytest.raises(OSError, match="no host name"):
        look_up("routers..svc")


def test_addresses_are_looked_up_again_and_a_failure_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: list[tuple[str, ...] | OSError] = [
        OSError("no such name"), ("10.0.0.1",), OSError("nobody answers"), ("10.0.0.1", "10.0.0.2"),
    ]  # fmt: skip
    seen: list[tuple[RouterEndpoints, ...]] = []

    def look_up(name: str) -> tuple[str, ...]:
        assert name == "front.svc"
        seen.append(discovery.found if len(seen) else ())
        answer = answers[min(len(seen), len(answers)) - 1]
        if isinstance(answer, OSError):
            raise answer
        return answer

    caplog.set_level("INFO")
    discovery = RouterDiscovery((SERVICE,), look_up, seconds=0.05)
    end = time.monotonic() + 10
    while len(discovery.found) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert seen[:4] == [(), (), (at("10.0.0.1"),), (at("10.0.0.1"),)]
    discovery.follow((FIXED,))
    assert discovery.found == (FIXED,)
    discovery.close()
    assert "no such name; this replica has no router there" in caplog.text
    assert "nobody answers; it keeps 10.0.0.1" in caplog.text
    assert "routers at front.svc: 10.0.0.1, 10.0.0.2" in caplog.text
