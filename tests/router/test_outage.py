"""Clients get errors, and metrics count them, while no replica serves or none in time: the situations of the alerts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import zmq

from medha.api.declared import DeclaredModel, to_text
from medha_links.key_files import KeyPair, read_public_key
from medha_links.sockets import connect
from medha_router.tokenizer_bundle import Bundle
from situations.recording import record

from .conftest import MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router, wait_for

CLASSES = ("interactive", "batch")
BODY = {"model": MODEL, "prompt": "x"}


def declare(folder: Path, **replicas: int) -> Path:
    """Write what the operator writes for models with so many replicas each."""
    folder.mkdir(exist_ok=True)
    models = (
        DeclaredModel(name=name, service_classes=CLASSES, replicas=count, aliases=(f"{name}/latest",))
        for name, count in replicas.items()
    )
    (folder / "installation.json").write_text(to_text(models), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return declare(tmp_path_factory.mktemp("declared") / "models", tiny=1)


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Router]:
    """A router that has just begun and knows from manifests that there is a model."""
    router = start_router(
        tmp_path_factory.mktemp("router"),
        models_directory=str(models),
        silence_seconds=1,
        unserved_seconds=0.2,
        max_waiting=1,
    )
    yield router
    stop_router(router)


@pytest.fixture
def replica(router: Router, bundle_files: dict[str, bytes]) -> Iterator[ScriptedReplica]:
    running = ScriptedReplica(router, bundle_files)
    router.wait_ready()
    yield running
    running.stop()
    wait_for(lambda: router.http.get("/ready").status_code == 503, "the replica is still heard")


def test_a_model_is_served_under_its_alias_too_and_answers_with_its_own_name(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hi"))
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    alias = f"{MODEL}/latest"
    assert client.completions.create(model=alias, prompt="x").model == MODEL
    assert router.post("/tokenize", {"model": alias, "prompt": "x"}).json()["count"] > 0
    listed = {model.id: model.model_dump()["root"] for model in client.models.list()}
    assert listed == {MODEL: MODEL, alias: MODEL}
    assert client.models.retrieve(alias).model_dump()["root"] == MODEL
    with pytest.raises(openai.NotFoundError, match=f"`{MODEL}/older` does not exist"):
        client.models.retrieve(f"{MODEL}/older")


def test_an_alias_of_a_model_without_a_replica_is_an_outage(router: Router) -> None:
    assert router.http.get(f"/v1/models/{MODEL}/latest").status_code == 503
    assert router.post("/v1/completions", {"model": f"{MODEL}/latest", "prompt": "x"}).status_code == 503


def scraped(router: Router) -> str:
    return router.metrics_http.get("/metrics").text


def missed(router: Router, service_class: str) -> float:
    labels = f'met="false",model="{MODEL}",prompt_tokens="unknown",service_class="{service_class}"'
    return router.metric(f"medha_request_ttft_attainment_total{{{labels}}}")


def test_a_model_that_manifests_name_is_an_outage_and_no_wrong_name_when_nobody_was_ever_heard(
    router: Router,
) -> None:
    """As after a restart of the router while all replicas are down."""
    before = scraped(router)
    assert f'medha_router_replicas{{model="{MODEL}",state="ready"}} 0.0' in before
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert MODEL in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="wrong", messages=[{"role": "user", "content": "x"}])
    assert [one.id for one in client.models.list()] == []
    assert router.http.get(f"/v1/models/{MODEL}").status_code == 503
    for _ in range(9):
        assert router.post("/v1/completions", BODY).status_code == 503
    record("unserved", before, scraped(router))


def test_refusals_count_as_first_tokens_that_never_came_in_the_class_that_was_asked_for(
    router: Router,
) -> None:
    before = {name: missed(router, name) for name in CLASSES}
    for tier in (None, "default", "batch", "no such class"):
        assert router.post("/v1/completions", {**BODY, "service_tier": tier}).status_code == 503
    assert {name: missed(router, name) - before[name] for name in CLASSES} == {"interactive": 3, "batch": 1}
    for faulty in ({**BODY, "n": 0}, {**BODY, "model": "wrong"}, {"model": MODEL}):
        assert router.post("/v1/completions", faulty).status_code in (400, 404)
    assert sum(missed(router, name) for name in CLASSES) == sum(before.values()) + 4


def test_names_that_nobody_knows_share_one_value_of_the_label(router: Router) -> None:
    before = scraped(router)
    for number in range(10):
        assert router.post("/v1/completions", {**BODY, "model": f"wrong-{number}"}).status_code == 404
    after = scraped(router)
    assert "wrong-" not in after
    assert 'medha_requests_total{endpoint="completions",model="(unknown)",outcome="model_not_found"}' in after
    record("wrong-names", before, after)


def test_requests_that_are_served_in_time_and_late(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello"))
    assert router.post("/v1/completions", BODY).status_code == 200
    before = scraped(router)
    for _ in range(10):
        assert router.post("/v1/completions", BODY).status_code == 200
    served = scraped(router)
    record("served", before, served)
    replica.script = Script(tokens=say(bundle, "Hello"), delay_seconds=0.06)  # the class has a target of 0.05
    late = {"x-slo-ttft-ms": "0.001"}
    assert router.post("/v1/completions", BODY, headers=late).status_code == 200
    before = scraped(router)
    for _ in range(10):
        assert router.post("/v1/completions", BODY, headers=late).status_code == 200
    record("late", before, scraped(router))


def test_a_replica_that_is_lost_leaves_its_model_and_refusals_count(
    router: Router, bundle_files: dict[str, bytes]
) -> None:
    replica = ScriptedReplica(router, bundle_files)
    router.wait_ready()
    replica.stop()
    wait_for(lambda: router.http.get("/ready").status_code == 503, "the replica is still heard")
    before = scraped(router)
    for _ in range(10):
        assert router.post("/v1/completions", BODY).status_code == 503
    record("lost", before, scraped(router))


def test_requests_that_find_the_queue_full_count_as_missed(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello"))
    replica.order("announce", {"waiting_limit": 1, "waiting": 1})
    wait_for(lambda: router.metric("medha_replica_sequences_waiting") == 1, "the replica is not full")
    waiting = threading.Thread(
        target=lambda: httpx.post(f"{router.url}/v1/completions", json=BODY, timeout=30)
    )
    waiting.start()
    wait_for(lambda: router.metric("medha_router_sequences_waiting") == 1, "nobody waits")
    assert router.post("/v1/completions", BODY).status_code == 429
    before = scraped(router)
    for _ in range(10):
        assert router.post("/v1/completions", BODY).status_code == 429
    record("overloaded", before, scraped(router))
    replica.order("announce", {"waiting_limit": 10, "waiting": 0})
    waiting.join()


def test_an_answer_that_fails_after_its_first_token_misses_its_tpot_target(
    router: Router, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    replica = ScriptedReplica(router, bundle_files, script=Script(tokens=say(bundle, "Hello"), hold=True))
    router.wait_ready()
    counted = 'medha_request_tpot_attainment_total{met="false",'
    before = router.metric(counted)
    with router.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        replica.stop()
        error, done = list(lines)[-2:]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert done == "data: [DONE]"
    # The answer is counted once it is closed, which is after its last line.
    wait_for(lambda: router.metric(counted) == before + 1, "it is not counted")


def test_strangers_at_the_link_are_counted(router: Router) -> None:
    before = scraped(router)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = read_public_key(router.keys.router_public)
    strangers = [
        connect(context, router.control, f"stranger/{number}".encode(), KeyPair.new(), server)
        for number in range(5)
    ]
    counted = 'medha_router_refused_connections_total{link="control"}'
    wait_for(lambda: router.metric(counted) >= 5, "they are not counted")
    record("strangers", before, scraped(router))
    for stranger in strangers:
        stranger.close(0)
    context.term()


def test_models_that_come_and_go_in_manifests_are_known_and_forgotten(router: Router, models: Path) -> None:
    def status(model: str) -> int:
        return router.post("/v1/completions", {**BODY, "model": model}).status_code

    wanted = f'medha_router_replicas_desired{{model="{MODEL}"}}'
    declare(models, tiny=0, other=2)
    try:
        wait_for(lambda: status("other") == 503, "it is not known")
        assert router.metric(wanted) == 0
        record("suspended", scraped(router), of=lambda labels: labels.get("model") == MODEL)
        declare(models, other=2)
        wait_for(lambda: status(MODEL) == 404, "it is still known")
        assert f'model="{MODEL}",state="ready"' not in scraped(router)
    finally:
        declare(models, tiny=1)
        wait_for(lambda: status(MODEL) == 503, "it is not known again")
    assert status("other") == 404
