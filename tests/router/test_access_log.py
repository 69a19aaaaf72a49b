"""One line in the log for each request, and its id wherever the request is spoken of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, Router, Script, ScriptedReplica, running_router, say, wait_for

Served = tuple[Router, ScriptedReplica]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, bundle_files: dict[str, bytes], bundle: Bundle
) -> Iterator[Served]:
    """A router that logs as it does by default, with a replica that says four words."""
    with running_router(
        tmp_path_factory.mktemp("logging"), log_level="info", max_body_bytes=10_000
    ) as router:
        replica = ScriptedReplica(
            router, bundle_files, script=Script(tokens=say(bundle, "one two three four"))
        )
        router.wait_ready()
        yield router, replica
        replica.stop()


def line_of(router: Router, request_id: str) -> str:
    """The one line of a request."""
    found: list[str] = []

    def is_there() -> bool:
        found[:] = [line for line in router.log.read_text().splitlines() if f" id={request_id} " in line]
        return bool(found)

    wait_for(is_there, "nothing was logged")
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_logged_with_its_id_tokens_and_times(served: Served, stream: bool) -> None:
    router, replica = served
    tokens = len(replica.script.tokens)
    body = {"model": MODEL, "prompt": [5, 6, 7], "stream": stream}
    asked = f"trace-{stream}/1:2+3=.@_"
    answer = router.post("/v1/completions", body, headers={"x-request-id": asked})
    assert answer.headers["x-request-id"] == asked
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO medha\.router: POST /v1/completions 200 "
        rf"id={re.escape(asked)} model={MODEL} outcome=length prompt_tokens=3 output_tokens={tokens} "
        r"ttft_seconds=\d\.\d{3} total_seconds=\d\.\d{3} client=127\.0\.0\.1:\d+",
        line_of(router, asked),
    )


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_the_id_is_a_part_of_all_names_under_which_a_replica_gets_the_request(
    served: Served, endpoint: str
) -> None:
    router, replica = served
    replica.submits.clear()
    body = {"model": MODEL, "prompt": "x"} if endpoint == "completions" else {
        "model": MODEL, "messages": [{"role": "user", "content": "x"}],
    }  # fmt: skip
    prefix = "cmpl" if endpoint == "completions" else "chatcmpl"
    answers = [
        router.post(f"/v1/{endpoint}", body | {"n": 2}, headers={"x-request-id": "twice"}) for _ in range(2)
    ]
    names = [answer.json()["id"] for answer in answers]
    assert all(name.startswith(f"{prefix}-twice-") for name in names)
    assert len(set(names)) == 2, "requests of one name must not be taken for each other"
    assert [submit.id for submit in replica.submits] == [f"{name}-{i}" for name in names for i in range(2)]
    made = router.post(f"/v1/{endpoint}", body)
    assert made.json()["id"] == f"{prefix}-{made.headers['x-request-id']}"


@pytest.mark.parametrize(
    "given", ["a b", "a~1", "", "x" * 129, "a;b", 'a"', "é".encode().decode("latin-1"), "a\tb"]
)
def test_an_id_that_could_be_taken_for_something_else_is_replaced(served: Served, given: str) -> None:
    answer = served[0].http.get("/v1/models", headers=[(b"x-request-id", given.encode("latin-1"))])
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


def test_refusals_are_logged_with_their_codes(served: Served) -> None:
    router, _ = served
    origin = {"Origin": "https://evil.example"}
    rows = [
        ("POST", "/v1/completions", {"json": {"model": "other", "prompt": "x"}}, 404, "model_not_found"),
        ("POST", "/v1/completions", {"content": b"{}"}, 415, "unsupported_media_type"),
        ("POST", "/v1/chat/completions", {"json": {"model": "x" * 20_000}}, 413, "body_too_large"),
        ("GET", "/v1/models", {"headers": origin}, 403, "forbidden_origin"),
        ("GET", "/nowhere%0a%20x?key=secret", {}, 404, "not_found"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
    ]
    for method, path, options, status, code in rows:
        answer = router.http.request(method, path, **options)  # type: ignore[arg-type]
        assert answer.status_code == status
        line = line_of(router, answer.headers["x-request-id"])
        plain = path.partition("?")[0]
        assert f"{method} {plain} {status} id={answer.headers['x-request-id']} outcome={code} " in line
    assert "secret" not in router.log.read_text()


def test_a_client_that_leaves_its_stream_is_logged_as_such(served: Served, bundle: Bundle) -> None:
    router, replica = served
    before, replica.script = replica.script, Script(tokens=say(bundle, "one"), hold=True)
    body = {"model": MODEL, "prompt": "x", "stream": True}
    headers = {"x-request-id": "leaves"}
    with httpx.stream("POST", router.url + "/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    replica.script = before
    assert " 200 id=leaves model=tiny outcome=cancelled prompt_tokens=" in line_of(router, "leaves")


def test_probes_and_scrapes_are_not_logged(served: Served) -> None:
    router, _ = served
    headers = {"x-request-id": "probe"}
    for path in ("/health", "/ready", "/metrics"):
        assert router.metrics_http.get(path, headers=headers).status_code == 200
    for path in ("/health", "/ready", "/v1/models"):
        assert router.http.get(path, headers=headers).status_code == 200
    assert " GET /v1/models 200 " in line_of(router, "probe")


def test_under_a_supervisor_that_shows_the_time_lines_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEDHA_PARENT_PID", str(os.getpid()))
    with running_router(tmp_path, log_level="info") as router:
        pass
    assert all(line.startswith("INFO medha.router: ") for line in router.log.read_text().splitlines())
