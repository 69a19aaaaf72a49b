"""Clients that hold on to connections, send slowly, send too much, or send what is no HTTP: over real sockets."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from .conftest import MODEL, Router, ScriptedReplica, running_router, wait_for

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MI = 2**20


def head(path: str, length: int | None, *more: str) -> bytes:
    """The head of a POST of JSON."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", framing, *more]
    return "\r\n".join([*lines, "", ""]).encode()


def dial(router: Router, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(router.address, timeout=30, source_address=(source, 0))


def read_to_end(connection: socket.socket) -> bytes:
    """All that comes until the router closes."""
    content = b""
    try:
        while piece := connection.recv(65536):
            content += piece
    except ConnectionResetError:
        pass  # it closed while something of ours was on its way
    return content


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer with a length; the connection stays open."""
    with connection.makefile("rb") as reader:
        status = int(reader.readline().split()[1])
        headers = {}
        while line := reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, reader.read(int(headers["content-length"]))


def error_code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router that waits for nobody for long."""
    folder = tmp_path_factory.mktemp("hasty")
    with running_router(folder, head_seconds=0.3, idle_seconds=0.3, body_seconds=0.3) as router:
        yield router


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router with little room; it waits for long."""
    settings = {
        "max_body_bytes": MI,
        "max_bodies_bytes": 3 * MI,
        "large_body_bytes": 100_000,
        "tokenize_processes": 1,
        "head_seconds": 600,
        "body_seconds": 600,
    }
    with running_router(tmp_path_factory.mktemp("narrow"), **settings) as router:
        yield router


# --- time ---------------------------------------------------------------------------------------------


def test_a_connection_that_says_nothing_is_closed(hasty: Router) -> None:
    with dial(hasty) as silent:
        assert read_to_end(silent) == b""


@pytest.mark.parametrize("part", [b"GET", HEALTH[:-2], head("/tokenize", 5)[:-1], b"\r\n"])
def test_half_a_head_gets_408_and_is_closed(hasty: Router, part: bytes) -> None:
    with dial(hasty) as slow:
        slow.sendall(part)
        answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "request_timeout"


@pytest.mark.parametrize("next_part", [b"", b"G"])
def test_a_connection_is_closed_if_no_other_request_follows(hasty: Router, next_part: bytes) -> None:
    with dial(hasty) as idle:
        for _ in range(2):
            idle.sendall(HEALTH)
            assert read_answer(idle)[0] == 200
        idle.sendall(next_part)
        assert read_to_end(idle).startswith(b"HTTP/1.1 408 " if next_part else b"")


@pytest.mark.parametrize("length", [50, None], ids=["with a length", "in chunks"])
@pytest.mark.parametrize("part", [b"", b"2\r\n{}"])
def test_half_a_body_gets_408_and_is_closed(hasty: Router, length: int | None, part: bytes) -> None:
    with dial(hasty) as slow:
        slow.sendall(head("/v1/completions", length) + part)
        answer = read_to_end(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "request_timeout"
    assert hasty.metric("medha_router_body_bytes") == 0


def test_what_came_fast_buys_no_time_to_be_silent_in(hasty: Router) -> None:
    """At 32 KiB/s it would be half a minute, in which it keeps the room for large bodies from others."""
    with dial(hasty) as silent:
        silent.sendall(head("/v1/completions", 2 * MI) + b" " * MI)
        assert read_to_end(silent).startswith(b"HTTP/1.1 408 ")


def test_a_body_may_take_its_time_if_it_goes_on(hasty: Router) -> None:
    """At 32 KiB/s or more: it comes in eight parts, which take longer than the first patience."""
    part = b" " * 40_000
    with dial(hasty) as steady:
        steady.sendall(head("/tokenize", 8 * len(part)))
        for count in range(1, 9):
            steady.sendall(part)
            wait_for(lambda want=count: hasty.metric("medha_router_body_bytes") in (0, want * len(part)), "")
        status, _, body = read_answer(steady)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_json")


# --- memory -------------------------------------------------------------------------------------------


def test_bodies_under_way_count_from_their_first_byte_and_leave_room_for_small_ones(
    narrow: Router,
) -> None:
    with ExitStack() as stack:
        for address in ("127.0.0.1", "127.0.0.2"):
            upload = stack.enter_context(dial(narrow, address))
            upload.sendall(head("/v1/completions", MI) + b" " * (MI - 1))
        wait_for(lambda: narrow.metric("medha_router_body_bytes") == 2 * MI - 2, "not counted")
        third = stack.enter_context(dial(narrow))
        third.sendall(head("/v1/completions", MI) + b" " * (MI - 1))
        status, headers, body = read_answer(third)
        assert (status, headers["retry-after"]) == (429, "5")
        assert json.loads(body)["error"]["code"] == "overloaded"
        small = narrow.post("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert small.status_code == 503, "no replica is there, but the body was read"
    wait_for(lambda: narrow.metric("medha_router_body_bytes") == 0, "bodies of clients that went are kept")


def test_a_body_is_refused_by_its_length_before_it_is_read(narrow: Router) -> None:
    with dial(narrow) as large:
        large.sendall(head("/v1/completions", MI + 1, "Expect: 100-continue"))
        status, _, body = read_answer(large)
        assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
        large.sendall(b" " * (MI + 1))  # a client that sends it all the same can use the connection
        large.sendall(HEALTH)
        assert read_answer(large)[0] == 200


def test_bodies_whose_clients_went_while_they_waited_for_a_tokenizer_are_forgotten(
    narrow: Router,
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "user": "x" * 200_000}).encode()
    whole = head("/v1/completions", len(body)) + body
    with dial(narrow) as first:
        first.sendall(whole)
        assert read_answer(first)[0] == 503  # a tokenising process has been started
    children = psutil.Process(narrow.process.pid).children()
    (tokenizer,) = [child for child in children if "medha_router.tokenizing" in child.cmdline()]
    tokenizer.send_signal(signal.SIGSTOP)
    try:
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(dial(narrow)).sendall(whole)
            wait_for(lambda: narrow.metric("medha_router_body_bytes") == 4 * len(body), "not counted")
        # One of them is at work, and its process needs it to the end.
        wait_for(lambda: narrow.metric("medha_router_body_bytes") == len(body), "kept")
    finally:
        tokenizer.send_signal(signal.SIGCONT)
    wait_for(lambda: narrow.metric("medha_router_body_bytes") == 0, "kept to the end")


@pytest.mark.parametrize(
    "headers",
    [
        b"X: " + b"y" * 40_000 + b"\r\n",
        b"X: y\r\n" * 101,
        b"X: " + b"y" * 40_000,
        b"X: " + b"y" * 40_000 + b"\r\n\r\n",
        b"X: " + b"y" * 400 + b"\r\n" + b"Y: " + b"y" * 32_400 + b"\r\n\r\n",
    ],
    ids=["large", "many", "unfinished", "large and whole", "whole by two headers"],
)
def test_a_head_is_bounded(narrow: Router, headers: bytes) -> None:
    with dial(narrow) as wide:
        wide.sendall(HEALTH[:-2] + headers)
        answer = read_to_end(wide)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_code(answer) == "head_too_large"


def test_a_target_is_bounded_like_the_rest_of_a_head(narrow: Router) -> None:
    with dial(narrow) as wide:
        wide.sendall(HEALTH.replace(b"/health", b"/health?" + b"y" * 33_000))
        answer = read_to_end(wide)
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("path", "begins"),
    [("/v1/completions", b"HTTP/1.1 100 "), ("/nowhere", b"HTTP/1.1 404 ")],
    ids=["before the answer", "behind the answer"],
)
def test_trailers_behind_a_body_are_bounded(narrow: Router, path: str, begins: bytes) -> None:
    with dial(narrow) as wide:
        wide.sendall(head(path, None, "Expect: 100-continue"))
        assert wide.recv(13) == begins
        wide.sendall(b"0\r\nX: " + b"y" * 50_000)
        answer = read_to_end(wide)
    assert (b"HTTP/1.1 431 " in answer) == (begins == b"HTTP/1.1 100 ")


# --- number -------------------------------------------------------------------------------------------


def test_connections_are_bounded_together_and_by_address(tmp_path: Path) -> None:
    with running_router(tmp_path, max_connections=8) as router:
        with ExitStack() as stack:
            for _ in range(6):
                stack.enter_context(dial(router))
            with dial(router) as seventh:
                answer = read_to_end(seventh)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in answer
            for address in ("127.0.0.2", "127.0.0.3"):
                other = stack.enter_context(dial(router, address))
                other.sendall(HEALTH)
                assert read_answer(other)[0] == 200
            with dial(router, "127.0.0.4") as ninth:
                assert read_to_end(ninth).startswith(b"HTTP/1.1 503 ")
            assert router.metric("medha_router_http_connections") == 8, "scrapers have a port of their own"
            assert router.metrics_http.get("/health").status_code == 200, "and so have probes"
        wait_for(lambda: router.metric("medha_router_http_connections") == 0, "closed ones count")
        assert router.metric('medha_router_http_refusals_total{reason="too_many"}') == 2


def test_connections_are_bounded_by_the_limit_on_open_files_which_is_raised_first(tmp_path: Path) -> None:
    with running_router(tmp_path, file_limit=200) as router, ExitStack() as stack:
        assert psutil.Process(router.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (200, 200)
        for _ in range(250):
            stack.enter_context(dial(router))
        with dial(router, "127.0.0.2") as other:
            other.sendall(HEALTH)
            assert read_answer(other)[0] == 200
    lines = router.log.read_text().splitlines()
    assert [line for line in lines if "limit on open files, 200, allows 100 HTTP connections" in line]
    turned_away = [line for line in lines if "refused a connection of 127.0.0.1" in line]
    assert 0 < len(turned_away) < 10


# --- what is no request --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/2.7\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        head("/tokenize", 5, "Transfer-Encoding: chunked") + b"0\r\n\r\n",
        head("/tokenize", 5, "Content-Length: 6") + b"{}",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        head("/tokenize", None) + b"xyz\r\n",
    ],
)
def test_what_is_no_http_gets_400_and_no_line_in_the_log(narrow: Router, garbage: bytes) -> None:
    before = narrow.log.read_bytes()
    with dial(narrow) as strange:
        strange.sendall(garbage)
        answer = read_to_end(strange)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_code(answer) == "invalid_http"
    assert narrow.log.read_bytes() == before


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_that_offers_http_2_is_served_by_http_1_with_its_body(
    router: Router, replica: ScriptedReplica, chunked: bool, at_once: bool
) -> None:
    """Java's own client offers HTTP/2 with each request, and sends the body without an answer to that."""
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    top = head("/v1/completions", None if chunked else len(body), *offer)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    with dial(router) as java:
        for _ in range(2):
            if at_once:
                java.sendall(top + sent)
            else:
                java.sendall(top)
                wait_for(lambda: router.metric("medha_router_http_connections") >= 1, "not open")
                java.sendall(sent[:9])
                java.sendall(sent[9:])
            status, _, content = read_answer(java)
            assert (status, json.loads(content)["object"]) == (200, "text_completion")


def test_an_offer_of_http_2_without_a_body_is_answered_and_the_next_request_too(router: Router) -> None:
    offer = (
        HEALTH[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n\r\n"
    )
    with dial(router) as java:
        for request in (offer, offer, HEALTH):
            java.sendall(request)
            assert read_answer(java)[0] == 200


def test_a_request_behind_one_that_is_not_answered_yet_is_dropped_with_the_connection(
    narrow: Router,
) -> None:
    with dial(narrow) as eager:
        eager.sendall(3 * HEALTH)
        answer = read_to_end(eager)
    assert answer.count(b"HTTP/1.1 ") == answer.count(b"HTTP/1.1 200 ") == 1
    assert b"connection: close" in answer.lower()


def test_what_comes_during_a_stream_leaves_the_stream_whole(router: Router) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": True}).encode()
    with dial(router) as noisy:
        noisy.sendall(head("/v1/completions", len(body)) + body + b"\x00 no HTTP \r\n")
        answer = read_to_end(noisy)
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_of_http_1_0_gets_a_plain_answer_until_the_connection_closes(
    router: Router, replica: ScriptedReplica, stream: bool
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    with dial(router) as old:
        old.sendall(head("/v1/completions", len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        top, _, content = read_to_end(old).partition(b"\r\n\r\n")
    assert b" 200 " in top.splitlines()[0]
    assert b"transfer-encoding" not in top.lower()
    if stream:
        events = content.decode().removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        assert len(events) == len(replica.script.tokens) + 1
        assert all(event.startswith("data: ") for event in events)
    else:
        assert json.loads(content)["object"] == "text_completion"


# --- clients that go -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_a_client_that_goes_while_it_sends_is_counted_and_fills_no_log(narrow: Router, path: str) -> None:
    ended = "medha_requests_total"
    before, count = narrow.log.read_bytes(), narrow.metric(ended)
    with dial(narrow) as short:
        short.sendall(head(path, 1000) + b"{")
        wait_for(lambda: narrow.metric("medha_router_body_bytes") == 1, "not received")
    wait_for(lambda: narrow.metric("medha_router_body_bytes") == 0, "not noticed")
    if path != "/tokenize":
        wait_for(lambda: narrow.metric(ended) == count + 1, "not counted")
        assert narrow.metric(
            'medha_requests_total{endpoint="completions",model="(unknown)",outcome="cancelled"}'
        ) or (narrow.metric('medha_requests_total{endpoint="chat",model="(unknown)",outcome="cancelled"}'))
    assert narrow.log.read_bytes() == before
