"""A router that starts waits for its replicas before it wants requests; one that stops refuses nobody who finds it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from medha.api.declared import DeclaredModel, to_text
from medha.wire.messages import Emit
from medha_router.tokenizer_bundle import Bundle

from .conftest import (
    MODEL,
    Router,
    Script,
    ScriptedReplica,
    running_router,
    say,
    start_router,
    stop_router,
    wait_for,
)

BODY = {"model": MODEL, "prompt": "x"}


def accepting(router: Router) -> tuple[int, str]:
    answer = router.metrics_http.get("/accepting")
    return answer.status_code, answer.text


def declare(folder: Path, replicas: int) -> Path:
    models = folder / "models"
    models.mkdir()
    (models / "one.json").write_text(to_text([DeclaredModel(name=MODEL, replicas=replicas)]))
    return models


def test_it_wants_requests_once_all_declared_replicas_have_joined_and_from_then_on(
    tmp_path: Path, bundle_files: dict[str, bytes]
) -> None:
    models = declare(tmp_path, replicas=2)
    with running_router(tmp_path, models_directory=str(models), drain_seconds=1) as router:
        replicas = [ScriptedReplica(router, bundle_files, name="r0")]
        router.wait_ready()
        status, text = accepting(router)
        assert status == 503
        assert f"1 of model `{MODEL}`" in text
        replicas.append(ScriptedReplica(router, bundle_files, name="r1"))
        wait_for(lambda: accepting(router)[0] == 200, "both have joined")
        for replica in replicas:
            replica.stop()
        wait_for(lambda: router.http.get("/ready").status_code == 503, "nothing serves")
        assert accepting(router)[0] == 200, "it answers why, instead of nobody"


@pytest.mark.long
def test_it_waits_for_a_replica_that_never_comes_only_so_long(tmp_path: Path) -> None:
    models = declare(tmp_path, replicas=1)
    with running_router(tmp_path, models_directory=str(models), join_seconds=5) as router:
        assert accepting(router)[0] == 503
        wait_for(lambda: accepting(router)[0] == 200, "the wait is bounded")


@pytest.fixture
def leaving(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> Iterator[tuple[Router, ScriptedReplica]]:
    """A router that accepts requests for so long after SIGTERM that a test ends it otherwise."""
    router = start_router(tmp_path, leave_seconds=5, drain_seconds=30)
    replica = ScriptedReplica(router, bundle_files)
    replica.script = Script(tokens=say(bundle, "Hello"))
    router.wait_ready()
    yield router, replica
    replica.stop()
    stop_router(router)


def test_a_router_that_stops_serves_all_who_find_it_and_ends_their_connections(
    leaving: tuple[Router, ScriptedReplica],
) -> None:
    router, _ = leaving
    with httpx.Client(base_url=router.url, timeout=30) as kept:
        assert "connection" not in kept.post("/v1/completions", json=BODY).headers
        router.process.send_signal(signal.SIGTERM)
        wait_for(lambda: accepting(router)[0] == 503, "it wants no more")
        for client in (kept, router.http):
            answer = client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        answer = httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30)  # over a new connection
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    assert router.process.wait(timeout=20) == 0


@pytest.mark.long
def test_a_connection_that_was_open_before_the_drain_gets_one_more_answer_and_a_new_one_is_too_late(
    leaving: tuple[Router, ScriptedReplica], bundle: Bundle
) -> None:
    router, replica = leaving
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    answers: list[httpx.Response] = []
    held = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30))
    )
    held.start()
    replica.wait(lambda: len(replica.submits) == 1)
    for_ever = httpx.Limits(keepalive_expiry=None)
    with httpx.Client(base_url=router.url, timeout=30, limits=for_ever) as kept:
        assert kept.get("/health").status_code == 200
        router.process.send_signal(signal.SIGTERM)

        def is_refused() -> bool:
            if router.process.poll() is not None:
                pytest.fail("it ended while a request was open")
            return httpx.get(f"{router.url}/v1/models").status_code == 200 and late() == 503

        replica.script = Script(tokens=say(bundle, "Hi"))

        def late() -> int:
            answer = httpx.post(f"{router.url}/v1/completions", json=BODY)
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
            return answer.status_code

        wait_for(is_refused, "it never drains")
        answer = kept.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
    replica.order("send", Emit(replica.submits[0].id, say(bundle, "!"), "length"))
    held.join()
    assert answers[0].json()["choices"][0]["text"] == "Hello!"
    assert router.process.wait(timeout=20) == 0


def test_the_last_answer_of_a_drain_is_followed_by_the_next_request_of_its_client(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    """The answer was begun before the stop, so it has not told its client that the connection ends."""
    router = start_router(tmp_path, drain_seconds=30)
    replica = ScriptedReplica(router, bundle_files)
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    router.wait_ready()
    answers: list[httpx.Response] = []

    def ask_twice() -> None:
        with httpx.Client(base_url=router.url, timeout=30) as kept:
            answers.append(kept.post("/v1/completions", json=BODY))
            time.sleep(0.2)  # longer than the router takes to notice that no request is open
            answers.append(kept.post("/v1/completions", json=BODY))

    client = threading.Thread(target=ask_twice)
    client.start()
    replica.wait(lambda: len(replica.submits) == 1)
    router.process.send_signal(signal.SIGTERM)
    replica.script = Script(tokens=say(bundle, "Hi"))
    url = f"{router.url}/v1/completions"
    wait_for(lambda: httpx.post(url, json=BODY, timeout=30).status_code == 503, "it never drains")
    replica.order("send", Emit(replica.submits[0].id, say(bundle, "!"), "length"))
    client.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert ["connection" in answer.headers for answer in answers] == [False, True]
    assert router.process.wait(timeout=20) == 0
    replica.stop()
    stop_router(router)


def test_a_router_told_to_end_at_once_does_not_wait(tmp_path: Path) -> None:
    router = start_router(tmp_path, leave_seconds=600)
    router.process.send_signal(signal.SIGTERM)
    wait_for(lambda: accepting(router)[0] == 503, "it leaves")
    router.process.send_signal(signal.SIGUSR1)
    assert router.process.wait(timeout=20) == 0
    stop_router(router)
