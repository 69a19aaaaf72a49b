"""The recorder between clients and a server passes bytes on unchanged, and reads requests and answers from them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from .report import entry
from .traffic import recorded


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fields = json.loads(body)
        refusal = {"error": {"param": "store", "code": "unsupported_parameter", "message": "no `store`"}}
        answer = json.dumps(refusal).encode() if fields.get("store") else body
        self.send_response(400 if fields.get("store") else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "9")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_requests_of_one_connection_are_read_in_order_and_answers_are_unchanged(url: str) -> None:
    bodies = [{"model": "a", "n": 1}, {"model": "b", "store": True}, {"model": "c" * 200_000}]
    with recorded(url) as recorder:
        with httpx.Client(base_url=recorder.url, timeout=30) as client:
            client.head("/health")
            answers = [client.post("/v1/completions?x=1", json=body) for body in bodies]
        assert [answers[0].json(), answers[2].json()] == [bodies[0], bodies[2]]
        head, *found = recorder.exchanges()
    assert (head.method, head.status) == ("HEAD", 200)
    assert [one.fields for one in found] == bodies
    assert [one.status for one in found] == [200, 400, 200]
    assert {(one.method, one.path) for one in found} == {("POST", "/v1/completions")}
    summary = entry(found)
    assert summary["requests"]["POST /v1/completions"] == {
        "count": 3, "fields": ["model", "n", "store"], "statuses": {"200": 2, "400": 1},
    }  # fmt: skip
    (refused,) = summary["refused"]
    assert (refused["param"], refused["status"]) == ("store", 400)
