"""Large bodies over real connections: they wait in order, for bounded memory, and no longer than their clients."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from medha_router.api_error import ApiError
from medha_router.body_queue import LONG_BYTES
from medha_router.prepare import MOST_MESSAGES, Catalog, prepare
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, Router, Script, ScriptedReplica, running_router, say, wait_for
from .test_connections import dial, head, read_answer

MI = 2**20


def whole(size: int) -> bytes:
    """A request whose body is a bit over `size` bytes; without a replica it gets 503, but only after its body was read."""
    return posted({"model": MODEL, "prompt": "x", "user": "x" * size})


def posted(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return head("/v1/completions", len(body)) + body


def children_of(router: Router) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children()


def tokenizers(router: Router) -> list[psutil.Process]:
    return [child for child in children_of(router) if "medha_router.tokenizing" in child.cmdline()]


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Router]:
    """A router with two tokenising processes, one of which runs already."""
    with running_router(tmp_path, tokenize_processes=2, large_body_bytes=100_000) as router:
        with dial(router) as first:
            first.sendall(whole(100_000))
            assert read_answer(first)[0] == 503
        yield router


def test_a_short_body_is_served_beside_long_ones_however_long_these_take(roomy: Router) -> None:
    (busy,) = tokenizers(roomy)
    busy.send_signal(signal.SIGSTOP)
    try:
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(dial(roomy)).sendall(whole(LONG_BYTES))
            wait_for(lambda: roomy.metric("medha_router_large_bodies_waiting") == 2, "one is at work")
            with dial(roomy) as short:
                short.sendall(whole(300_000))
                assert read_answer(short)[0] == 503
            assert roomy.metric("medha_router_large_bodies_waiting") == 2
    finally:
        if busy.is_running():
            busy.send_signal(signal.SIGCONT)
    wait_for(lambda: roomy.metric("medha_router_body_bytes") == 0, "kept to the end")


def test_work_on_a_long_body_ends_when_its_client_goes_and_the_next_one_is_served(roomy: Router) -> None:
    (busy,) = tokenizers(roomy)
    busy.send_signal(signal.SIGSTOP)
    with dial(roomy) as gone, dial(roomy) as next_one:
        gone.sendall(whole(LONG_BYTES))
        wait_for(lambda: roomy.metric("medha_router_body_bytes") > LONG_BYTES, "not received")
        next_one.sendall(whole(LONG_BYTES))
        wait_for(lambda: roomy.metric("medha_router_large_bodies_waiting") == 1, "not waiting")
        gone.close()
        assert read_answer(next_one)[0] == 503
    assert not busy.is_running()
    assert roomy.metric("medha_router_body_bytes") == 0
    assert b"was lost" not in roomy.log.read_bytes()


def test_a_short_body_at_work_is_left_to_its_process_when_its_client_goes(roomy: Router) -> None:
    """A new process costs more than the rest of the work, and clients must not be able to make the router start many."""
    (busy,) = tokenizers(roomy)
    busy.send_signal(signal.SIGSTOP)
    try:
        with dial(roomy) as gone:
            gone.sendall(whole(300_000))
            wait_for(lambda: roomy.metric("medha_router_body_bytes") > 300_000, "not received")
        wait_for(lambda: roomy.metric("medha_requests_total") == 2, "not noticed")
    finally:
        busy.send_signal(signal.SIGCONT)
    wait_for(lambda: roomy.metric("medha_router_body_bytes") == 0, "kept to the end")
    with dial(roomy) as after:
        after.sendall(whole(300_000))
        assert read_answer(after)[0] == 503
    assert tokenizers(roomy) == [busy]


def test_one_address_leaves_room_for_bodies_of_others(tmp_path: Path) -> None:
    """An eighth of 8 MiB is for small bodies, and a quarter of the rest for others."""
    settings = {"max_body_bytes": 2 * MI, "max_bodies_bytes": 8 * MI, "large_body_bytes": 100_000}
    with running_router(tmp_path, **settings) as router, ExitStack() as stack:
        part = head("/v1/completions", 2 * MI) + b" " * (3 * MI // 2)
        for count in range(1, 4):
            stack.enter_context(dial(router)).sendall(part)
            wait_for(lambda want=count: router.metric("medha_router_body_bytes") == want * 3 * MI // 2, "")
        fourth = stack.enter_context(dial(router))
        forged = head("/v1/completions", 2 * MI, "X-Forwarded-For: 10.1.2.3", "Forwarded: for=10.1.2.3")
        fourth.sendall(forged + b" " * (3 * MI // 2))
        status, headers, body = read_answer(fourth)
        assert (status, headers["retry-after"]) == (429, "5")
        assert "your own requests" in json.loads(body)["error"]["message"]
        other = stack.enter_context(dial(router, "127.0.0.2"))
        other.sendall(whole(MI))
        assert read_answer(other)[0] == 503


def test_a_grammar_of_a_large_body_waits_in_the_queue_of_all_and_holds_no_process(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    settings = {"tokenize_processes": 1, "large_body_bytes": 100_000}
    with running_router(tmp_path, **settings) as router, ExitStack() as stack:
        replica = ScriptedReplica(router, bundle_files)
        stack.callback(replica.stop)
        replica.script = Script(tokens=say(bundle, "x"))
        router.wait_ready()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert router.post("/v1/completions", {**body, "guided_regex": "a"}).status_code == 200
        (check,) = [one for one in children_of(router) if "medha_router.grammar_check" in one.cmdline()]
        large = {**body, "user": "x" * 200_000}
        guided, left = ({**large, "guided_regex": regex} for regex in ("b", "c"))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        check.send_signal(signal.SIGSTOP)
        try:
            waits = pool.submit(router.post, "/v1/completions", guided)
            with dial(router) as gone:
                gone.sendall(posted(left))
                wait_for(lambda: router.metric("medha_router_body_bytes") > 400_000, "not received")
                assert router.post("/v1/completions", large).status_code == 200
            wait_for(lambda: router.metric("medha_router_body_bytes") < 400_000, "kept for nobody")
            assert [submit.sampling.grammar != "" for submit in replica.submits] == [True, False]
        finally:
            check.send_signal(signal.SIGCONT)
        assert waits.result().status_code == 200
        assert "b" in replica.submits[-1].sampling.grammar
        assert router.post("/v1/completions", {**large, "guided_regex": "("}).status_code == 400
        (process,) = tokenizers(router)
        assert process.children() == [], "no checks are made there"
        assert router.metric("medha_router_body_bytes") == 0


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * (MOST_MESSAGES + 1),
        [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MOST_MESSAGES // 2)}] * 2,
        [0] * (MOST_MESSAGES + 1),
    ],
    ids=["messages", "parts", "wrong ones"],
)
@pytest.mark.parametrize("endpoint", ["chat", "tokenize"])
def test_too_many_messages_are_refused_before_they_cost_anything(endpoint: Any, messages: list[Any]) -> None:
    def no_bundle(_: str) -> Bundle:
        raise AssertionError("it was rendered")

    body = json.dumps({"model": MODEL, "messages": messages}).encode()
    with pytest.raises(ApiError) as refused:
        prepare(endpoint, body, Catalog({}), no_bundle, 128)
    assert (refused.value.status, refused.value.code) == (400, "too_many_messages")
    assert f"up to {MOST_MESSAGES}" in refused.value.message


def test_the_log_shows_the_address_of_the_connection_whatever_its_headers_say(tmp_path: Path) -> None:
    with running_router(tmp_path, log_level="info") as router, dial(router, "127.0.0.9") as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Forwarded-For: 10.1.2.3\r\n\r\n")
        assert read_answer(client)[0] == 200
    assert "client=127.0.0.9:" in router.log.read_text()


def test_a_prompt_may_be_longer_than_a_frame_of_tokens(
    tmp_path: Path, bundle_files: dict[str, bytes]
) -> None:
    """A frame holds 1,048,576 ids; of this text, each character is a token."""
    text = "Z!" * 600_000
    with running_router(tmp_path) as router:
        longest = {"max_model_len": 2**21, "longest_request_tokens": 2**21, "kv_tokens_total": 2**21}
        fields = {**longest, "kv_tokens_free": 2**21}
        replica = ScriptedReplica(router, bundle_files, script=Script(tokens=(7,)), fields=fields)
        router.wait_ready()
        answer = router.post("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 1})
        replica.stop()
    assert answer.status_code == 200, answer.text
    (ids,) = replica.prompts.values()
    special = 1
    assert len(ids) == len(text) + special
    assert len({*ids[special::2]}) == len({*ids[special + 1 :: 2]}) == 1
