"""A real router exports pauses of streams that move, TTFT of short requests beside long ones, and expected TTFT."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from medha.observing.metric_catalogue import LONG_PROMPT_TOKENS
from medha.wire.messages import Emit
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, Router, Script, ScriptedReplica, running_router, say, wait_for

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 16}
LARGE = {
    "max_model_len": 50_000,
    "waiting": 0,
    "pending_prefill_seconds": 0.0,
    "prefill_points": ((100, 0.1), (1000, 1.0)),
}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with running_router(tmp_path_factory.mktemp("router")) as running:
        yield running


@contextmanager
def serving(router: Router, files: dict[str, bytes], name: str, script: Script) -> Iterator[ScriptedReplica]:
    """A replica that is there, and no longer known at the end."""
    here = f'medha_replica_sequences_running{{model="{MODEL}",replica="{name}"}}'
    replica = ScriptedReplica(router, files, name, script, LARGE)
    wait_for(lambda: router.metric(here) == 1, "the replica is not heard")
    try:
        yield replica
    finally:
        replica.stop()
        wait_for(lambda: router.metric(here) == 0, "the replica is still heard")


@pytest.fixture
def replica(router: Router, bundle_files: dict[str, bytes], bundle: Bundle) -> Iterator[ScriptedReplica]:
    with serving(router, bundle_files, "r0", Script(tokens=say(bundle, "Hello"))) as running:
        yield running


def test_a_stream_that_goes_on_at_another_replica_counts_with_its_reason_and_its_pause(
    router: Router, replica: ScriptedReplica, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    labels = f'{{model="{MODEL}",reason="replica_lost",resumed="elsewhere"}}'
    again = f'medha_router_resubmissions_total{{model="{MODEL}",reason="replica_lost"}}'
    page = router.metrics_http.get("/metrics").text
    for count in (f"medha_stream_pause_seconds_count{labels}", again):
        assert f"\n{count} 0.0\n" in page, "the first is an increase, too"
    replica.script.hold = True
    script = Script(tokens=say(bundle, "Hello there"))
    with router.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        with serving(router, bundle_files, "r1", script):
            replica.stop()
            assert list(lines)[-1] == "data: [DONE]"
    assert router.metric(f"medha_stream_pause_seconds_count{labels}") == 1
    assert router.metric(f"medha_stream_pause_seconds_sum{labels}") > 0
    assert router.metric(again) == 1


def test_a_short_request_beside_a_long_prefill_is_told_from_one_that_is_alone(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    def answered(beside: str) -> float:
        labels = f'{{beside_long="{beside}",model="{MODEL}"}}'
        return router.metric(f"medha_short_prompt_ttft_seconds_count{labels}")

    alone = answered("false")
    assert router.post("/v1/completions", BODY).status_code == 200
    assert (answered("false"), answered("true")) == (alone + 1, 0)
    replica.script = Script(hold=True)
    body = {**BODY, "prompt": [5] * LONG_PROMPT_TOKENS}
    long = threading.Thread(target=lambda: httpx.post(f"{router.url}/v1/completions", json=body, timeout=30))
    long.start()
    replica.wait(lambda: any(one.tokens == LONG_PROMPT_TOKENS for one in replica.submits))
    replica.script = Script(tokens=say(bundle, "Hello"))
    assert router.post("/v1/completions", BODY).status_code == 200
    assert (answered("false"), answered("true")) == (alone + 1, 1)
    name = next(one.id for one in replica.submits if one.tokens == LONG_PROMPT_TOKENS)
    replica.order("send", Emit(name, say(bundle, "Hello"), "length"))
    long.join()
    assert router.post("/v1/completions", BODY).status_code == 200
    assert (answered("false"), answered("true")) == (alone + 2, 1), (
        "a long prompt is no short one, and has ended"
    )


def test_the_first_token_is_compared_with_what_the_replica_announced(
    router: Router, replica: ScriptedReplica
) -> None:
    names = [f"medha_forwarded_ttft_{what}" for what in ("predicted_seconds", "observed_seconds")]
    ratio = f'medha_forwarded_ttft_prediction_error_ratio_count{{model="{MODEL}",prompt_tokens="le_1024"}}'
    before = [router.metric(f"{name}_sum") for name in names]
    assert router.metric(ratio) == 0
    assert router.post("/v1/completions", {**BODY, "prompt": [5] * 1000}).status_code == 200
    predicted, observed = (
        router.metric(f"{name}_sum") - was for name, was in zip(names, before, strict=True)
    )
    assert predicted == pytest.approx(1.0)
    assert 0 < observed < 30
    assert router.metric(ratio) == 1


def test_sequences_that_wait_are_counted_in_their_class(router: Router, replica: ScriptedReplica) -> None:
    def waiting(service_class: str) -> float:
        labels = f'{{model="{MODEL}",service_class="{service_class}"}}'
        return router.metric(f"medha_router_sequences_waiting{labels}")

    replica.order("announce", {"waiting_limit": 1, "waiting": 1})
    wait_for(lambda: router.metric("medha_replica_sequences_waiting") == 1, "the replica is not full")
    assert (waiting("interactive"), waiting("batch")) == (0, 0)
    body = {**BODY, "service_tier": "batch", "n": 3}
    waits = threading.Thread(target=lambda: httpx.post(f"{router.url}/v1/completions", json=body, timeout=30))
    waits.start()
    wait_for(lambda: waiting("batch") == 3, "they do not wait")
    assert waiting("interactive") == 0
    assert router.metric(f'vllm:num_requests_waiting{{engine="router",model_name="{MODEL}"}}') == 3
    replica.order("announce", {"waiting_limit": 10, "waiting": 0})
    waits.join()
    assert (waiting("interactive"), waiting("batch")) == (0, 0)
