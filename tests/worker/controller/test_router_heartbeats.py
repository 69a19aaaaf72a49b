"""Heartbeats of a controller: a thread sends them, whatever its main loop does, unless that hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
import zmq

from medha.errors import PartFailed
from medha.wire.frames import decode
from medha.wire.messages import Heartbeat
from medha_links.key_files import KeyPair
from medha_links.sockets import Authenticator, Opened, bind, connect
from medha_worker.controller import router_heartbeats
from medha_worker.controller.router_heartbeats import STALLED_SECONDS, RouterHeartbeats, is_driven

SERVER, CLIENT = KeyPair.new(), KeyPair.new()
Socket = zmq.Socket[bytes]


class Router:
    """A router that hears heartbeats."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.authenticator = Authenticator(self.context, [CLIENT.public])
        self.endpoint = f"ipc://{folder}/control"
        self.link = bind(self.context, self.endpoint, SERVER)

    def open(self, identity: bytes) -> Opened[Socket]:
        return connect(self.context, self.endpoint, identity, CLIENT, SERVER.public)

    def heard(self) -> bytes:
        """Return the identity under which the next heartbeat comes."""
        assert self.link.socket.poll(20_000), "no heartbeat"
        identity, *frames = self.link.socket.recv_multipart()
        assert decode(frames) == (Heartbeat(), None)
        return identity

    def close(self) -> None:
        self.link.close(0)
        self.authenticator.close()
        self.context.term()


@pytest.fixture
def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    monkeypatch.setattr(router_heartbeats, "HEARTBEAT_SECONDS", 0.01)
    router = Router(tmp_path)
    yield router
    router.close()


@pytest.fixture
def beats(router: Router) -> Iterator[RouterHeartbeats]:
    beats = RouterHeartbeats()
    yield beats
    beats.close()


def test_a_turn_of_the_main_loop_that_takes_long_delays_no_heartbeat(
    router: Router, beats: RouterHeartbeats
) -> None:
    beats.allow({b"r0/1": router.open})
    assert {router.heard() for _ in range(20)} == {b"r0/1"}  # and the loop does nothing else meanwhile


def test_heartbeats_follow_the_control_link_to_its_next_identity(
    router: Router, beats: RouterHeartbeats
) -> None:
    for identity in (b"r0/1", b"r0/2"):
        beats.allow({identity: router.open})
        while router.heard() != identity:
            pass  # the former one's, and not for ever: a heartbeat that does not come fails the test


def test_a_main_loop_that_hangs_is_given_up_after_some_seconds() -> None:
    assert is_driven(100.0 + STALLED_SECONDS, 100.0)
    assert not is_driven(100.1 + STALLED_SECONDS, 100.0)


def test_no_heartbeat_is_sent_while_the_main_loop_hangs(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: SimpleQueue[bool] = SimpleQueue()
    answers = iter([False] * 5)

    def decision(_now: float, _turned_at: float) -> bool:
        asked.put(True)
        return next(answers, True)

    monkeypatch.setattr(router_heartbeats, "is_driven", decision)
    beats = RouterHeartbeats()
    beats.allow({b"r0/1": router.open})
    router.heard()
    beats.close()
    assert asked.qsize() >= 6


def test_an_error_in_the_thread_ends_the_main_loop_with_its_reason(
    router: Router, beats: RouterHeartbeats
) -> None:
    def cannot_open(_identity: bytes) -> Opened[Socket]:
        failed.set()
        raise OSError(24, "Too many open files")

    failed = Event()
    beats.allow({b"r0/1": router.open})
    router.heard()
    beats.allow({b"r0/1": router.open, b"r0/2": cannot_open})
    assert failed.wait(20)
    beats.close()  # waits for the thread, which has closed its sockets
    with pytest.raises(PartFailed, match=r"heartbeats.*Too many open files"):
        beats.allow({b"r0/1": router.open})
