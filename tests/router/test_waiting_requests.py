"""A router with a waiting room: requests wait for the first replica of a declared model, and clients get clear ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from medha.api.declared import DeclaredModel, to_text
from medha.routing.replica_demand import OPEN_SHARE
from medha.routing.waiting_room import WaitingRoom
from medha_process.router_settings import RouterSettings
from medha_router.api_error import ApiError
from medha_router.tokenizer_bundle import Bundle
from medha_router.waiting_requests import WaitingRequests

from .conftest import MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router, wait_for

BODY = {"model": MODEL, "prompt": "x"}
WAITING = f'medha_router_waiting_room_requests{{model="{MODEL}"}}'
DESIRED = f'medha_deployment_desired_replicas{{{{model="{MODEL}",reason="{{}}"}}}}'
REFUSED = 'medha_router_waiting_room_refusals_total{{reason="{}"}}'


def start(folder: Path, **settings: object) -> Router:
    models = folder / "models"
    models.mkdir()
    declared = [DeclaredModel(name=MODEL, service_classes=("interactive",), replicas=1)]
    (models / "one.json").write_text(to_text(declared), encoding="utf-8")
    return start_router(folder, models_directory=str(models), drain_seconds=5, **settings)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    running = start(tmp_path, waiting_room_seconds=60, waiting_room_bytes=2000)
    yield running
    assert stop_router(running) == 0


def post(router: Router, body: object = None) -> httpx.Response:
    return httpx.post(f"{router.url}/v1/completions", json=body or BODY, timeout=40)


def test_requests_wait_for_the_first_replica_and_are_served(
    router: Router, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    assert f"\n{DESIRED.format('open')} 0.0\n" in router.metrics_http.get("/metrics").text, (
        "an autoscaler reads 0"
    )
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(post, router) for _ in range(3)]
        wait_for(lambda: router.metric(WAITING) == 3, "they do not wait")
        assert router.metric(DESIRED.format("open")) == OPEN_SHARE, "so that the first replica is started"
        assert router.metric("medha_router_waiting_room_bytes") > 0
        assert post(router, {**BODY, "model": "wrong"}).status_code == 404
        times = {"prefill_points": ((100, 0.1), (1000, 1.0))}
        replica = ScriptedReplica(router, bundle_files, "r0", Script(tokens=say(bundle, "Hello")), times)
        try:
            texts = [answer.result().json()["choices"][0]["text"] for answer in answers]
            assert texts == ["Hello"] * 3
        finally:
            replica.stop()
    assert router.metric(WAITING) == router.metric("medha_router_waiting_room_bytes") == 0
    assert router.metric(DESIRED.format("arrivals")) > 0, "what arrived lately counts when it has ended"
    assert router.metric(f'medha_deployment_pending_prefill_seconds{{model="{MODEL}"}}') == 0
    assert router.metric("medha_router_body_bytes") == 0


def test_requests_wait_for_a_model_that_was_served_although_its_name_has_not_arrived_yet(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    router = start_router(
        tmp_path, models_directory=str(tmp_path), waiting_room_seconds=60, drain_seconds=5
    )  # no manifest names a model
    script = Script(tokens=say(bundle, "Hello"))
    first = ScriptedReplica(router, bundle_files, "r0", script)
    wait_for(lambda: post(router).status_code == 200, "it is not served")
    first.stop()
    wait_for(lambda: httpx.get(f"{router.url}/ready").status_code == 503, "it is still served")
    with ThreadPoolExecutor() as clients:
        waiting = clients.submit(post, router)
        wait_for(lambda: router.metric(WAITING) == 1, "it does not wait")
        assert router.metric(DESIRED.format("open")) == OPEN_SHARE
        second = ScriptedReplica(router, bundle_files, "r1", script)
        assert waiting.result().json()["choices"][0]["text"] == "Hello"
    second.stop()
    assert stop_router(router) == 0


def test_a_large_request_waits_too_and_a_process_learns_its_model(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    """To parse a large body in the router's own process would hold up all of its streams."""
    router = start(tmp_path, waiting_room_seconds=60, large_body_bytes=200, tokenize_processes=1)
    large = {**BODY, "prompt": "y" * 400, "service_tier": "interactive"}
    with ThreadPoolExecutor() as clients:
        answers = [clients.submit(post, router, large) for _ in range(2)]
        wait_for(lambda: router.metric(WAITING) == 2, "they do not wait")
        assert post(router, {**large, "model": "wrong"}).status_code == 404
        assert router.metric('medha_router_tokenize_seconds_count{place="process"}') == 3
        replica = ScriptedReplica(router, bundle_files, "r0", Script(tokens=say(bundle, "Hello")))
        try:
            assert [one.result().json()["choices"][0]["text"] for one in answers] == ["Hello"] * 2
        finally:
            replica.stop()
    wait_for(lambda: router.metric("medha_router_body_bytes") == 0, "bodies are kept")
    assert stop_router(router) == 0


def test_a_request_that_no_replica_would_take_is_refused_before_it_waits(router: Router) -> None:
    refused = post(router, {**BODY, "temperature": "hot"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert router.metric(WAITING) == router.metric("medha_router_body_bytes") == 0


def test_a_full_room_and_a_router_that_stops_answer_at_once(tmp_path: Path) -> None:
    router = start(tmp_path, waiting_room_seconds=60, waiting_room_bytes=2000)
    with ThreadPoolExecutor() as clients:
        waiting = clients.submit(post, router, {**BODY, "prompt": "y" * 1200})
        wait_for(lambda: router.metric(WAITING) == 1, "it does not wait")
        refused = post(router, {**BODY, "prompt": "y" * 1200})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert 1 < int(refused.headers["retry-after"]) <= 60
        assert "as many requests as the router can hold" in refused.json()["error"]["message"]
        assert router.metric(REFUSED.format("full")) == 1
        assert router.metric(REFUSED.format("late")) == 0

        small = {**BODY, "prompt": "y" * 400}
        of_who_has_most = post(router, small)
        assert of_who_has_most.status_code == 503
        assert "as many of your own requests as may wait" in of_who_has_most.json()["error"]["message"]
        assert router.metric(REFUSED.format("share")) == 1
        elsewhere = httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2"), timeout=40)
        clients.submit(elsewhere.post, f"{router.url}/v1/completions", json=small)
        wait_for(lambda: router.metric(WAITING) == 2, "there is no room for another address")
        assert stop_router(router) == 0
        elsewhere.close()
        ended = waiting.result()
    assert (ended.status_code, ended.json()["error"]["message"]) == (503, "this router is stopping")


def test_who_waits_in_vain_is_answered_in_time(tmp_path: Path) -> None:
    router = start(tmp_path, waiting_room_seconds=0.3)
    late = post(router)
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    assert f"no replica of the model '{MODEL}' came in 0 s" in late.json()["error"]["message"]
    assert router.metric(REFUSED.format("late")) == 1
    assert router.metric("medha_router_body_bytes") == 0
    assert stop_router(router) == 0


def test_a_client_that_goes_away_leaves_the_room(router: Router) -> None:
    with socket.create_connection(router.address) as client:
        body = b'{"model": "tiny", "prompt": "x"}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: router.metric(WAITING) == 1, "it does not wait")
    wait_for(lambda: router.metric(WAITING) == 0, "it waits on")
    assert router.metric("medha_router_body_bytes") == 0


def test_a_room_that_would_keep_out_other_bodies_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="waiting_room_bytes 5 is more than half of the 9 bytes"):
        RouterSettings(
            key_file=tmp_path,
            enrolment_file=tmp_path,
            max_body_bytes=1,
            max_bodies_bytes=9,
            waiting_room_bytes=5,
        )


@pytest.mark.parametrize("end", ["served", "late", "stopping"])
def test_a_client_that_goes_in_the_very_turn_in_which_its_wait_ends_keeps_no_other_waiting(end: str) -> None:
    async def run() -> str:
        served: list[str] = []
        room = WaitingRoom(100, 75, 0.05 if end == "late" else 60.0)
        requests = WaitingRequests(room, lambda model: model not in served, lambda _: None)
        first, second = (asyncio.ensure_future(requests.wait(name, "m", "me", 1)) for name in "ab")
        await asyncio.sleep(0.06)
        # As while_connected does; the request leaves the room in the next turn only.
        first.cancel()
        if end == "stopping":
            requests.end_all("stopping")
        else:
            served.extend(["m"] if end == "served" else [])
            with patch.object(asyncio, "sleep", side_effect=[None]):
                await requests._watch()
        try:
            await asyncio.wait_for(second, 5)
        except ApiError as error:
            return error.message
        return "goes on"

    assert {"served": "goes on", "late": "no replica of", "stopping": "stopping"}[end] in asyncio.run(run())


def test_a_request_whose_model_is_read_while_the_router_begins_to_stop_does_not_begin_to_wait() -> None:
    async def run() -> None:
        requests = WaitingRequests(WaitingRoom(100, 75, 60.0), lambda _: True, lambda _: None)
        requests.end_all("this router is stopping")
        await asyncio.wait_for(requests.wait("a", "m", "me", 1), 5)

    with pytest.raises(ApiError, match="stopping"):
        asyncio.run(run())
