"""Metrics that endpoint pickers read from a router: they take the first series of a name, unless labels are configured."""

from __future__ import annotations

from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateways.conftest import KEY, Site
from gateways.envoy import block
from router.conftest import MODEL, Router, Script, wait_for


def first(router: Router, name: str) -> tuple[dict[str, str], float]:
    """Return labels and value of the first series of a metric."""
    text = router.metrics_http.get("/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return samples[0].labels, samples[0].value


def test_the_first_series_of_what_waits_is_the_routers_own(site: Site) -> None:
    for router in site.routers.values():
        labels, value = first(router, "vllm:num_requests_waiting")
        assert labels == {"model_name": MODEL, "engine": "router"}
        assert value == 0, "at its replica two wait"


def test_the_metrics_of_the_pages_picker_are_there_and_follow_the_load(site: Site, script: Script) -> None:
    (extractor,) = [
        each for each in block("picker.yaml")["plugins"] if each["type"] == "core-metrics-extractor"
    ]
    (engine,) = extractor["parameters"]["engineConfigs"]
    assert engine["queuedRequestsSpec"] == 'vllm:num_requests_waiting{engine="router"}'
    (address, router), *_ = site.routers.items()
    name = engine["runningRequestsSpec"]
    before = first(router, name)[1]
    assert first(router, name)[0] == {}
    site.say(replace(script, hold=True))
    body = {"model": MODEL, "prompt": "x", "stream": True}
    key = {"Authorization": f"Bearer {KEY}"}
    with (
        # Its certificate has another name than this address.
        httpx.Client(base_url=router.url, verify=False) as client,  # noqa: S501
        client.stream("POST", "/v1/completions", json=body, headers=key),
    ):
        site.replicas[address].wait(lambda: len(site.replicas[address].submits) == 1)
        assert first(router, name)[1] == before + 1
    wait_for(lambda: first(router, name)[1] == before, "it is still counted")
