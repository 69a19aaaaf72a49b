"""Medha behind Envoy, as docs/gateways.md configures it: what the client of OpenAI sees, and what routers and replicas do."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from gateways.conftest import KEY, LIMITED_KEY, SAID, Site
from gateways.envoy import manager_of, running_envoy
from medha.wire.messages import Emit
from medha_router.tokenizer_bundle import Bundle
from router.conftest import MODEL, Script, say, wait_for

MI = 2**20


def ask_often(client: openai.OpenAI, times: int) -> list[str]:
    return [client.completions.create(model=MODEL, prompt="x").choices[0].text for _ in range(times)]


def test_it_answers_over_tls_on_both_sides(site: Site) -> None:
    assert all(router.url.startswith("https://") for router in site.routers.values())
    with site.client() as client:
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text == SAID
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == SAID
        assert [model.id for model in client.models.list()] == [MODEL]


def test_a_first_token_arrives_while_the_last_is_not_yet_sampled(
    site: Site, script: Script, bundle: Bundle
) -> None:
    site.say(replace(script, tokens=say(bundle, "one"), hold=True))
    with site.client() as client:
        stream = iter(client.completions.create(model=MODEL, prompt="x", stream=True))
        text = ""
        while text != "one":
            text += next(stream).choices[0].text
        server, submit = site.the_submit()
        server.order("send", Emit(submit.id, say(bundle, " two"), "length"))
        assert text + "".join(chunk.choices[0].text for chunk in stream) == "one two"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_cancels_its_request(site: Site, script: Script, stream: bool) -> None:
    site.say(replace(script, hold=True))
    body = {"model": MODEL, "prompt": "x", "stream": stream}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=site.url, verify=site.trust, headers=headers) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=1)
    server, submit = site.the_submit()
    server.wait(lambda: submit.id in server.cancels)


def test_a_body_of_27_mb_passes(site: Site) -> None:
    with site.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="x", extra_body={"metadata": {"text": "a" * 27 * MI}}
        )
    assert answer.choices[0].text == SAID


def test_an_error_passes_with_its_retry_after_and_its_headers(site: Site) -> None:
    # Each router counts for itself, because no replica tells one of the other.
    with site.client(LIMITED_KEY) as client, pytest.raises(openai.RateLimitError) as refused:
        ask_often(client, 1 + len(site.routers))
    headers = refused.value.response.headers
    assert int(headers["retry-after"]) >= 1
    assert headers["x-medha-limit"] == "requestsPerMinute"
    assert refused.value.code == "rate_limit_exceeded"


def test_the_id_of_a_request_is_the_clients_all_the_way(site: Site) -> None:
    with site.client() as client:
        answer = client.completions.with_raw_response.create(
            model=MODEL, prompt="x", extra_headers={"x-request-id": "my-trace-7"}
        )
        assert answer.headers["x-request-id"] == "my-trace-7"
        assert "my-trace-7" in answer.parse().id
        made = client.completions.with_raw_response.create(model=MODEL, prompt="x")
        assert made.headers["x-request-id"] in made.parse().id


def test_the_log_names_the_client_and_not_the_gateway_whatever_the_client_claims(site: Site) -> None:
    transport = httpx.HTTPTransport(local_address="127.0.0.9", verify=site.trust)
    claimed = {"X-Forwarded-For": "198.51.100.7", "X-Request-Id": "whose", "Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=site.url, transport=transport) as client:
        assert (
            client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=claimed).status_code
            == 200
        )

    def lines() -> list[str]:
        logs = [router.log.read_text(encoding="utf-8") for router in site.routers.values()]
        return [line for log in logs for line in log.splitlines() if " id=whose " in line]

    wait_for(lambda: bool(lines()), "nothing was logged")
    (line,) = lines()
    assert line.endswith("client=127.0.0.9:0")
    assert "key=app" in line


def test_the_client_of_openai_waits_out_the_rate_limit_of_the_gateway(site: Site, tmp_path: Path) -> None:
    config = copy.deepcopy(site.config)
    limit = manager_of(config)["http_filters"][0]["typed_config"]
    limit["token_bucket"] = {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "3s"}
    received: list[httpx.Response] = []
    hooks = {"response": [received.append]}
    with running_envoy(tmp_path / "limited", config) as envoy:
        behind = replace(site, envoy=envoy)
        envoy.wait(lambda: envoy.healthy() == set(site.routers), "not all routers are healthy")
        http = openai.DefaultHttpxClient(verify=site.trust, event_hooks=hooks)
        with behind.client(max_retries=60, http_client=http) as client:
            answers = ask_often(client, 3)
    assert answers == [SAID] * 3
    refused = [answer for answer in received if answer.status_code != 200]
    assert refused, "three requests came at once"
    assert {(answer.status_code, answer.headers["retry-after"]) for answer in refused} == {(429, "1")}
    assert len(site.submitted()) == 3, "a refused request reached a router"
