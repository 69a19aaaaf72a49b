"""The router process: start, readiness, limits, drain, and its end with its parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from medha.wire.messages import Emit
from medha_links.key_files import KeyFiles
from medha_process.router_settings import RouterSettings
from medha_router.tokenizer_bundle import Bundle

from .conftest import MAX_MODEL_LEN, MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router

BODY = {"model": MODEL, "prompt": "x"}


@pytest.fixture
def lone_router(tmp_path: Path) -> Iterator[Router]:
    router = start_router(tmp_path, max_waiting=1, drain_seconds=20)
    yield router
    stop_router(router)


def test_without_a_replica_it_lives_is_not_ready_and_answers_503(lone_router: Router) -> None:
    assert lone_router.http.get("/health").status_code == 200
    assert lone_router.http.get("/ready").status_code == 503
    answer = lone_router.post("/v1/completions", BODY)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert lone_router.http.get("/v1/models").json()["data"] == []


def test_metrics_have_a_port_of_their_own_and_it_serves_no_client(lone_router: Router) -> None:
    assert lone_router.http.get("/metrics").status_code == 404
    for path in ("/metrics", "/health"):
        assert lone_router.metrics_http.get(path).status_code == 200
    assert lone_router.metrics_http.get("/ready").status_code == 503
    for path in ("/v1/models", "/v1/completions", "/tokenize"):
        assert lone_router.metrics_http.post(path, json=BODY).status_code == 404


def test_it_follows_its_replica_refuses_when_full_and_drains(
    lone_router: Router, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    replica = ScriptedReplica(lone_router, bundle_files)
    lone_router.wait_ready()

    # A replica without room: one request may wait here, the next is refused and may come back.
    replica.order("announce", {"waiting_limit": 1, "waiting": 1})
    while lone_router.metric("medha_replica_sequences_waiting") != 1:
        time.sleep(0.02)
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{lone_router.url}/v1/completions", json=BODY, timeout=30))
    )
    waiting.start()
    while lone_router.metric("medha_router_sequences_waiting") != 1:
        time.sleep(0.02)
    refused = lone_router.post("/v1/completions", BODY)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1

    # Room again: the one that waits is forwarded. Then a stop: it is finished, new ones are refused.
    replica.order("announce", {"waiting_limit": 10, "waiting": 0})
    replica.wait(lambda: len(replica.submits) == 1)
    lone_router.process.send_signal(signal.SIGINT)  # a supervisor's business
    lone_router.process.terminate()
    while lone_router.http.get("/ready").status_code != 503:
        time.sleep(0.02)
    assert lone_router.http.get("/health").status_code == 200
    assert lone_router.post("/v1/completions", BODY).status_code == 503
    assert lone_router.process.poll() is None
    replica.order("send", Emit(replica.submits[0].id, say(bundle, "!"), "length"))
    assert lone_router.process.wait(timeout=20) == 0
    waiting.join()
    assert answers[0].json()["choices"][0]["text"] == "Hello!"
    replica.stop()


def test_what_is_open_after_the_drain_limit_ends_with_an_error_and_is_cancelled(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    router = start_router(tmp_path, is_forked=False, drain_seconds=0.1)
    replica = ScriptedReplica(router, bundle_files)
    router.wait_ready()
    replica.script = Script(tokens=say(bundle, "Hello"), hold=True)
    with router.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        router.process.terminate()
        rest = [line for line in lines if line]
    error, done = rest[-2:]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert done == "data: [DONE]"
    assert router.process.wait(timeout=20) == 0
    replica.wait(lambda: replica.cancels == [replica.submits[0].id])
    replica.stop()
    router.http.close()


def test_what_it_writes_lies_in_its_scratch_directory_until_it_ends(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    router = start_router(tmp_path, scratch_directory=str(scratch))
    kept = list(scratch.iterdir())
    assert stop_router(router) == 0
    assert len(kept) == 1
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("moment", ["while it imports", "when it is ready"])
def test_it_ends_with_its_parent(tmp_path: Path, moment: str) -> None:
    ready, settings_file, scratch = (tmp_path / name for name in ("ready.json", "settings.json", "scratch"))
    scratch.mkdir()
    keys = KeyFiles.create(tmp_path / "keys")
    RouterSettings(
        port=0,
        key_file=keys.router,
        enrolment_file=keys.enrolment,
        ready_file=str(ready),
        scratch_directory=str(scratch),
    ).write(settings_file)
    program = (
        "import os, subprocess, sys, time\n"
        "os.environ['MEDHA_PARENT_PID'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'medha_router', '--settings', {str(settings_file)!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
    while moment == "when it is ready" and not ready.exists():
        time.sleep(0.02)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    child.wait(timeout=20)
    assert list(scratch.iterdir()) == [], "it ends in order"


def test_a_tokenising_process_ends_where_its_router_died_before_it_began(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "medha_router.tokenizing", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    with subprocess.Popen([*command, str(gone.pid)], stdin=subprocess.PIPE) as process:
        assert process.wait(timeout=30) == -signal.SIGKILL
    with subprocess.Popen([*command, str(os.getpid())], stdin=subprocess.PIPE) as process:
        process.communicate(timeout=30)
        assert process.returncode == 0, "the pipe was closed"


@pytest.mark.parametrize(
    ("text", "named"),
    [('{"port": -1}', "port"), ('{"prot": 1}', "prot"), ("no JSON", "JSON"), (None, "settings")],
)
def test_wrong_settings_are_named_and_end_the_start(tmp_path: Path, text: str | None, named: str) -> None:
    settings_file = tmp_path / "settings.json"
    if text is not None:
        settings_file.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "medha_router", "--settings", str(settings_file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode != 0
    assert named in ended.stderr


def test_a_prompt_goes_where_its_beginning_went(
    lone_router: Router, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    """Of two replicas with equal loads: there its KV may be cached."""
    replicas = [ScriptedReplica(lone_router, bundle_files, name=name) for name in ("r0", "r1")]
    try:
        end = time.monotonic() + 20
        while lone_router.metric('medha_router_replicas{model="tiny",state="ready"}') < 2:
            assert time.monotonic() < end, "both replicas should be heard"
            time.sleep(0.02)
        for replica in replicas:
            replica.script = Script(tokens=say(bundle, "Hi"))
        went: dict[int, list[str]] = {}
        for topic in (0, 1, 2, 3, 4, 5, 3, 1, 5, 0, 4, 2):
            before = [len(replica.submits) for replica in replicas]
            prompt = [7 + topic] * 80 + [9] * len(went.get(topic, []))
            answer = lone_router.post("/v1/completions", {"model": MODEL, "prompt": prompt})
            assert answer.status_code == 200
            after = [len(replica.submits) for replica in replicas]
            went.setdefault(topic, []).append("r0" if after[0] > before[0] else "r1")
        assert all(first == second for first, second in went.values()), went
    finally:
        for replica in replicas:
            replica.stop()


@pytest.mark.parametrize("short", ["r0", "r1"])
def test_a_shorter_replica_of_a_model_takes_what_it_can_and_shrinks_it_for_nobody(
    lone_router: Router, bundle_files: dict[str, bytes], bundle: Bundle, short: str
) -> None:
    """As one of another namespace may be, with a smaller `maxModelLen`."""
    lengths = {name: MAX_MODEL_LEN // 2 if name == short else MAX_MODEL_LEN for name in ("r0", "r1")}
    replicas = {
        name: ScriptedReplica(
            lone_router,
            bundle_files,
            name=name,
            script=Script(tokens=say(bundle, "Hi")),
            fields={"max_model_len": length, "longest_request_tokens": length},
        )
        for name, length in lengths.items()
    }
    try:
        end = time.monotonic() + 20
        while lone_router.metric('medha_router_replicas{model="tiny",state="ready"}') < 2:
            assert time.monotonic() < end, "both replicas should be heard"
            time.sleep(0.02)
        asked = {"model": MODEL, "prompt": "a"}
        assert lone_router.post("/tokenize", asked).json()["max_model_len"] == MAX_MODEL_LEN
        for _ in range(4):
            whole = {"model": MODEL, "prompt": [5] * 8, "max_tokens": MAX_MODEL_LEN - 8}
            answer = lone_router.post("/v1/completions", whole)
            assert answer.status_code == 200, answer.text
        assert len(replicas[short].submits) == 0
        assert lone_router.post("/v1/completions", {**whole, "max_tokens": MAX_MODEL_LEN}).status_code == 400
    finally:
        for replica in replicas.values():
            replica.stop()
