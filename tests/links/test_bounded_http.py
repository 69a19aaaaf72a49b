"""The servers of metrics and health: whoever asks is answered, however many others only connect."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from medha_links import bounded_http
from medha_links.bounded_http import MOST_CONNECTIONS, BoundedWsgiServer

WAIT_SECONDS = 20.0


class Page:
    """A WSGI application with one page that streams until it is stopped."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.streams = threading.Semaphore(0)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return self._stream() if environ["PATH_INFO"] == "/stream" else [b"here"]

    def _stream(self) -> Iterator[bytes]:
        self.streams.release()
        try:
            while True:
                yield b"x" * 1_000_000
        finally:
            self.ended.set()


class Served:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.server = BoundedWsgiServer("127.0.0.1", 0, page)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.server.start("bounded")

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.server.server_port), timeout=WAIT_SECONDS)
        connection.sendall(data)
        return connection


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(Page())
    yield served
    served.server.shutdown()
    served.server.server_close()


def threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_hundreds_of_idle_connections_take_few_threads_and_keep_nobody_from_an_answer(served: Served) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(served.connect(b"GET / HT")) for _ in range(10 * MOST_CONNECTIONS)]
        for _ in range(20):
            assert httpx.get(served.url, timeout=WAIT_SECONDS).text == "here"
        assert threads() <= MOST_CONNECTIONS + 1  # an evicted one may be about to end
        assert idle[0].recv(1) == b"", "the oldest have made room"


def test_a_connection_that_sends_its_request_too_slowly_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "REQUEST_SECONDS", 0.2)
    with served.connect(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ") as slow:
        assert slow.recv(1) == b""  # the test's own timeout bounds it
    with served.connect() as silent:
        assert silent.recv(1) == b""


def test_a_client_that_takes_nothing_any_more_is_given_up_without_a_word(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bounded_http.BoundedHandler, "timeout", 0.2)
    with served.connect(b"GET /stream HTTP/1.1\r\n\r\n"):
        assert served.page.ended.wait(WAIT_SECONDS)
    assert capfd.readouterr() == ("", "")


def test_where_all_connections_are_being_answered_another_one_is_refused(served: Served) -> None:
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS):
            stack.enter_context(served.connect(b"GET /stream HTTP/1.1\r\n\r\n"))
            assert served.page.streams.acquire(timeout=WAIT_SECONDS)
        with served.connect() as refused:
            assert refused.recv(1) == b""
    while served.server._answering:  # the test's own timeout bounds it
        assert served.page.ended.wait(WAIT_SECONDS)
    assert httpx.get(served.url).text == "here"


@pytest.mark.parametrize(
    "request_", [b"\x16\x03\x01\x02\n", b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"X" * 70_000 + b"\n"]
)
def test_what_is_no_request_is_answered_or_closed_and_nothing_is_logged(
    served: Served, request_: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with served.connect(request_) as odd:
        while odd.recv(4096):
            pass
    assert httpx.get(served.url).text == "here"
    assert capfd.readouterr() == ("", "")


def test_an_application_that_fails_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(_environ: dict[str, Any], _start_response: Callable[..., Any]) -> Iterable[bytes]:
        raise RuntimeError("a bug of ours")

    server = BoundedWsgiServer("127.0.0.1", 0, fails)
    server.start("fails")
    assert httpx.get(f"http://127.0.0.1:{server.server_port}").status_code == 500
    server.shutdown()
    server.server_close()
    sys.stderr.flush()
    assert "a bug of ours" in capfd.readouterr().err
