"""What clients see when a part of `medha up` is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import httpx
import psutil
import pytest

from medha_cli.runs import Run
from situations.recording import record

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

PROMPT = {"model": MODEL, "prompt": "go on", "temperature": 1, "seed": 5, "stream": True}
BODY = PROMPT | {"ignore_eos": True}
ROWS = {"type": "array", "items": {"enum": ["red", "green", {"n": 1}]}, "minItems": 1000}
GUIDED = PROMPT | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": ROWS}}
}
"""No stream here is long enough to complete its schema."""


GRIDS = (
    pytest.param((1, 1, 1), id="one rank"),
    pytest.param((1, 2, 2), id="four ranks", marks=pytest.mark.long),  # CI has the grids of test_recovery
)


@pytest.fixture(scope="module", params=GRIDS)
def replica(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    tensor, stream, kv = request.param
    port = free_port()
    manifest = write_manifest(
        tmp_path_factory.mktemp("failures") / "tiny.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 4096},
        parallelism={"tensor": tensor, "stream": stream, "kv": kv},
        kvCache={"size": "16Mi"},
    )
    running = start(manifest, port, checkpoint)
    yield running
    stop(running)


def processes(served: Served, module: str) -> list[psutil.Process]:
    """The replica's processes that run a module, in the order of their start."""
    found = []
    for part in served.parts():
        with suppress(psutil.NoSuchProcess):  # it has just died
            if module in part.cmdline():
                found.append(part)
    return sorted(found, key=lambda part: part.create_time())


def text_pieces(served: Served, tokens: int, body: dict[str, object]) -> Iterator[str]:
    """Yield the text of each event of one stream as it comes."""
    with httpx.stream(
        "POST", served.url + "/v1/completions", json=body | {"max_tokens": tokens}, timeout=60
    ) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["text"]


def streamed(
    served: Served, tokens: int, body: dict[str, object], kill: psutil.Process | None = None, after: int = 0
) -> str:
    """The text of one stream; `kill` dies once `after` pieces have come."""
    pieces = []
    for piece in text_pieces(served, tokens, body):
        pieces.append(piece)
        if kill is not None and len(pieces) == after:
            os.kill(kill.pid, signal.SIGKILL)
    return "".join(pieces)


@pytest.mark.parametrize(
    ("module", "which"),
    [("medha_worker.rank", -1), pytest.param("medha_worker.controller", 0, marks=pytest.mark.long)],
)
def test_streams_go_on_with_the_same_texts_when_a_part_dies(replica: Served, module: str, which: int) -> None:
    """The router resubmits it to the next epoch with its seed and the sampled tokens; sampling is keyed by position."""
    undisturbed = [streamed(replica, 400, body) for body in (BODY, GUIDED)]
    victim = processes(replica, module)[which]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(streamed, replica, 400, BODY)
        guided = streamed(replica, 400, GUIDED, kill=victim, after=40)
    assert [beside.result(), guided] == undisturbed
    assert not victim.is_running()
    replica.wait_idle()
    assert (
        "medha_steps_total" in replica.controller_page()
    )  # where `medha up` has printed it, also after a restart


ROWS = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "integer"}, "minItems": 40}},
    "required": ["rows"],
}
CALL = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "go on"}],
    "tools": [{"type": "function", "function": {"name": "store", "parameters": ROWS, "strict": True}}],
    "tool_choice": "required",
    "max_tokens": 300,
    "seed": 5,
    "stream": True,
}


def call_deltas(served: Served, kill: psutil.Process | None = None) -> list[tuple[str | None, str]]:
    """The name and the arguments of one streamed call; `kill` dies in the middle of it."""
    deltas: list[tuple[str | None, str]] = []
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=CALL, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for call in event["choices"][0]["delta"].get("tool_calls", ()):
                    assert call["index"] == 0
                    deltas.append((call["function"].get("name"), call["function"]["arguments"]))
                if kill is not None and len(deltas) == 30:
                    os.kill(kill.pid, signal.SIGKILL)
    return deltas


@pytest.mark.long
def test_a_call_goes_on_with_the_same_arguments_when_a_rank_dies_in_the_middle_of_it(replica: Served) -> None:
    undisturbed = call_deltas(replica)
    assert [name for name, _ in undisturbed if name] == ["store"]
    assert "".join(text for _, text in undisturbed).startswith("{")
    victim = processes(replica, "medha_worker.rank")[-1]
    moved = call_deltas(replica, kill=victim)
    assert "".join(text for _, text in moved) == "".join(text for _, text in undisturbed)
    assert [name for name, _ in moved if name] == ["store"]
    assert not victim.is_running()
    replica.wait_idle()


def test_a_router_that_dies_breaks_its_connections_and_frees_what_they_held(replica: Served) -> None:
    guided = streamed(replica, 40, GUIDED)
    (router,) = processes(replica, "medha_router")
    with pytest.raises(httpx.HTTPError):
        streamed(replica, 3000, GUIDED, kill=router, after=3)
    replica.wait_served()
    assert streamed(replica, 40, GUIDED) == guided
    replica.wait_idle()


@pytest.mark.long
@pytest.mark.parametrize("replica", GRIDS[:1], indirect=True)
def test_steps_that_take_longer_than_predicted_are_seen_as_such(replica: Served) -> None:
    (controller,) = processes(replica, "medha_worker.controller")
    run = Run(Path(controller.cmdline()[-1]).parent, "tiny", replica.process.pid)

    def metrics() -> str:
        replica.wait_idle()
        while (url := run.telemetry_url()) is None:
            time.sleep(0.1)  # the file is written a moment after the replica serves
        return httpx.get(f"{url}/metrics").text

    def prefill(number: int) -> None:
        """A prompt that no other begins like, in few steps that take long enough to be predicted on a busy machine."""
        prompt = [number, *(token % 200 for token in range(1000))]
        body = BODY | {"prompt": prompt, "max_tokens": 1, "stream": False}
        httpx.post(replica.url + "/v1/completions", json=body, timeout=60).raise_for_status()

    for number in range(10):  # from which the predictor learns how fast this machine is now
        prefill(number)
    before = metrics()
    for number in range(10, 20):
        prefill(number)
    record("steps-as-predicted", before, metrics())
    (rank,) = processes(replica, "medha_worker.rank")
    before = metrics()
    with mostly_stopped(rank):
        for number in range(20, 26):
            prefill(number)
    record("steps-too-slow", before, metrics())


@contextmanager
def mostly_stopped(process: psutil.Process) -> Iterator[None]:
    """Give a process a tenth of the time, as if the machine did much else, and so often that it is not taken to hang."""
    ended = Event()

    def stop_and_go() -> None:
        while not ended.is_set():
            process.suspend()
            ended.wait(0.09)
            process.resume()
            ended.wait(0.01)

    stopping = Thread(target=stop_and_go)
    stopping.start()
    try:
        yield
    finally:
        ended.set()
        stopping.join()


@pytest.mark.long
def test_a_part_that_keeps_dying_ends_the_whole_with_an_error(checkpoint: Path, tmp_path: Path) -> None:
    port = free_port()
    model = {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 4096}
    manifest = write_manifest(tmp_path / "tiny.yaml", checkpoint, port, model=model, kvCache={"size": "16Mi"})
    served = start(manifest, port, checkpoint)
    try:
        parts: set[psutil.Process] = set()
        with httpx.stream(
            "POST", served.url + "/v1/completions", json=BODY | {"max_tokens": 4000}, timeout=60
        ) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            for _ in range(3):
                parts.update(served.parts())
                (victim,) = processes(served, "medha_worker.rank")
                os.kill(victim.pid, signal.SIGKILL)
                while victim.is_running() and served.process.poll() is None:
                    time.sleep(0.05)
                while served.process.poll() is None and not processes(served, "medha_worker.rank"):
                    time.sleep(0.05)
            rest = list(lines)
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "service_unavailable"
        assert rest[-1] == "data: [DONE]"
        assert served.process.wait(timeout=30) == 1
        assert not [part for part in parts if part.is_running()]
    finally:
        stop(served)
