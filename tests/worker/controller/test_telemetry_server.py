"""A controller's HTTP answers: who gets them, how others are refused, and that its own loop answers."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from medha.errors import ConfigInvalid
from medha_links.bounded_http import MOST_CONNECTIONS
from medha_worker.controller.telemetry_server import Questions, StatusQuery, Telemetry, TraceQuery, serve


@pytest.fixture
def questions() -> Iterator[Questions]:
    with closing(Questions()) as questions:
        yield questions


class Loop(threading.Thread):
    """Answers questions as the controller's loop does."""

    def __init__(self, questions: Questions) -> None:
        super().__init__(daemon=True)
        self.questions = questions
        self.seen: list[StatusQuery | TraceQuery] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.005):
            for question in self.questions.take():
                self.seen.append(question)
                match question:
                    case StatusQuery():
                        question.answer.set_result(b'{"state": "serving"}')
                    case TraceQuery(seconds) if seconds < 100:
                        question.answer.set_result(iter([b"[\n", b"\n]\n"]))
                    case TraceQuery():
                        question.answer.set_result(None)


@pytest.fixture
def loop(questions: Questions) -> Iterator[Loop]:
    loop = Loop(questions)
    loop.start()
    yield loop
    loop.ended.set()
    loop.join()


def get(
    questions: Questions, path: str, *, method: str = "GET", address: str = "127.0.0.1"
) -> tuple[str, bytes]:
    """Send one request; return status and body."""
    started: list[str] = []
    path, _, query = path.partition("?")
    environ: dict[str, Any] = {
        "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": method, "REMOTE_ADDR": address,
    }  # fmt: skip
    app = Telemetry(CollectorRegistry(), questions)
    body = b"".join(app(environ, lambda status, headers: started.append(status)))
    return started[0], body


def test_a_status_is_asked_for_with_its_order_and_its_size(questions: Questions, loop: Loop) -> None:
    assert get(questions, "/status?order=age&requests=3") == ("200 OK", b'{"state": "serving"}')
    assert get(questions, "/status")[0] == "200 OK"
    assert [(one.order, one.most_requests) for one in loop.seen if isinstance(one, StatusQuery)] == [
        ("age", 3),
        ("urgency", 50),
    ]


def test_a_trace_comes_in_pieces_and_only_one_at_a_time(questions: Questions, loop: Loop) -> None:
    assert get(questions, "/trace?seconds=2.5") == ("200 OK", b"[\n\n]\n")
    status, body = get(questions, "/trace?seconds=500")
    assert status == "409 Conflict"
    assert "another trace" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/status?order=x", "order is 'x': one of urgency"),
        ("/status?requests=1e9", "requests is '1e9': give 0 to 1000"),
        ("/status?requests=nan", "requests is 'nan'"),
        ("/trace?seconds=-1", "seconds is '-1': give 0 to 600"),
        ("/trace?seconds=many", "seconds is 'many'"),
    ],
)
def test_a_wrong_question_is_refused_with_what_would_be_right(
    questions: Questions, path: str, named: str
) -> None:
    status, body = get(questions, path)
    assert status == "400 Bad Request"
    assert named in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/status", "/trace"])
@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0"])
def test_another_machine_gets_no_names_of_requests(questions: Questions, path: str, address: str) -> None:
    status, body = get(questions, path, address=address)
    assert status == "403 Forbidden"
    assert "kubectl port-forward" in json.loads(body)["error"]
    assert get(questions, "/metrics", address=address)[0] == "200 OK"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_machine_is_known_by_every_name_of_loopback(
    questions: Questions, loop: Loop, address: str
) -> None:
    assert get(questions, "/status", address=address)[0] == "200 OK"


def test_nothing_else_is_here_and_nothing_can_be_written(questions: Questions) -> None:
    assert get(questions, "/secrets")[0] == "404 Not Found"
    assert get(questions, "/status", method="POST")[0] == "405 Method Not Allowed"


def test_a_loop_that_does_not_answer_is_reported_not_waited_for(
    questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha_worker.controller.telemetry_server.ANSWER_SECONDS", 0.05)
    status, body = get(questions, "/status")
    assert status == "503 Service Unavailable"
    assert "did not answer" in json.loads(body)["error"]


def test_a_controller_that_ends_refuses(questions: Questions) -> None:
    questions.close()
    assert get(questions, "/status")[0] == "503 Service Unavailable"


def test_connections_that_ask_nothing_take_few_threads_and_keep_no_scraper_from_its_page(
    questions: Questions,
) -> None:
    url = serve(CollectorRegistry(), questions, "127.0.0.1", 0)
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)))
        assert httpx.get(url, timeout=30).status_code == 200
        assert threading.active_count() - before <= MOST_CONNECTIONS + 1


def test_the_pages_are_served_over_real_http_beside_each_other(questions: Questions, loop: Loop) -> None:
    registry = CollectorRegistry()
    Counter("medha_x", "x", registry=registry).inc()
    url = serve(registry, questions, "127.0.0.1", 0)
    assert url.endswith("/metrics")
    assert "medha_x_total 1.0" in httpx.get(url).text
    assert httpx.get(url.replace("/metrics", "/status")).json() == {"state": "serving"}
    assert httpx.get(url.replace("/metrics", "/trace?seconds=1")).json() == []
    port = int(url.removesuffix("/metrics").rpartition(":")[2])
    with pytest.raises(ConfigInvalid, match=r"spec.metrics: cannot listen on 127.0.0.1 port \d+"):
        serve(registry, questions, "127.0.0.1", port)
