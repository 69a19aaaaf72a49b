"""A real grid under load, watched with `medha top` and recorded with `medha trace` as a user does it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

SECRET = "xyzzyplugh"
LONG_PROMPT = f"{SECRET} " + "word and other things " * 4000  # about 48,000 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the grid runs, and writes its trace."""
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def grid(checkpoint: Path, folder: Path) -> Iterator[Served]:
    """Two lanes of two stages; a long prompt takes hundreds of small chunks, and passes to the second lane."""
    port = free_port()
    manifest = write_manifest(
        folder / "grid.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 65_536},
        parallelism={"stream": 2, "kv": 2},
        scheduling={"maxChunkTokens": 128, "minChunkTokens": 64},
        kvCache={"size": "32Mi", "tokensPerLane": 16_384, "prefixCaching": False},
        serviceClasses=[{"name": "default"}, {"name": "batch"}],
    )
    running = start(
        manifest, port, checkpoint, "--run-dir", str(folder / "run"), "--trace", str(folder / "trace.json")
    )
    yield running
    stop(running)


class Load(threading.Thread):
    """A long prompt and a chat at the same time, each sent again when it ends, until the test has seen enough."""

    def __init__(self, grid: Served) -> None:
        super().__init__()
        self.url = grid.url
        self.failed = ""
        self.enough = threading.Event()

    def run(self) -> None:
        asyncio.run(self._ask_all())

    async def _ask_all(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=100) as http:
            asked = [
                asyncio.create_task(self._ask(http, SECRET, 2000, "batch")),
                asyncio.create_task(self._ask(http, LONG_PROMPT, 4, "default")),
            ]
            while not (self.enough.is_set() or all(task.done() for task in asked)):  # noqa: ASYNC110 - set by a thread
                await asyncio.sleep(0.02)
            for task in asked:
                task.cancel()  # the client goes away
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask(self, http: httpx.AsyncClient, prompt: str, tokens: int, service_class: str) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "service_tier": service_class}
        while not self.failed:
            answer = await http.post("/v1/completions", json={"model": MODEL, **body})
            if answer.status_code != 200:
                self.failed = answer.text


@pytest.fixture
def load(grid: Served) -> Iterator[Load]:
    load = Load(grid)
    load.start()
    yield load
    load.enough.set()
    load.join()
    assert load.failed == ""


def medha(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    return subprocess.run(
        [sys.executable, "-m", "medha_cli.main", *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def snapshot(folder: Path, *options: str) -> dict[str, Any]:
    done = medha("top", "--once", "--json", "--run-dir", str(folder / "run"), *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def prefill(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in found["status"]["core"]["requests"] if one["phase"] == "prefill"), None)


@pytest.mark.long
def test_a_long_prefill_is_seen_to_progress_while_a_chat_decodes_beside_it(load: Load, folder: Path) -> None:
    seen: list[dict[str, Any]] = []
    ids: set[str] = set()
    while load.is_alive() and len(seen) < 2:
        found = snapshot(folder)
        if (request := prefill(found)) is not None and request["computed_tokens"] > 0:
            if request["id"] not in ids:  # the one before has ended
                seen, ids = [], {request["id"]}
            seen.append(found)
    progress = [prefill(found)["computed_tokens"] for found in seen]  # type: ignore[index]
    assert len(seen) == 2
    assert progress == sorted(set(progress))
    for found in seen:
        request, core = prefill(found), found["status"]["core"]
        assert request is not None
        assert request["computed_tokens"] <= request["dispatched_tokens"] <= request["prompt_tokens"]
        chunks = [chunk for step in core["steps"] for chunk in step["chunks"]]
        assert all(chunk["request"] == request["id"] for chunk in chunks)
        assert all(chunk["start"] >= request["computed_tokens"] for chunk in chunks)
        assert len(core["steps"]) <= 4  # two lanes of two stages
        assert found["router"]["requests_open"] >= 1
    assert any(step["chunks"] for found in seen for step in found["status"]["core"]["steps"])
    assert any(found["status"]["prefill_tokens_per_second"] > 0 for found in seen)


def test_a_snapshot_is_readable_text_and_never_the_users(load: Load, folder: Path) -> None:
    text = ""
    while load.is_alive() and " prefill " not in text:
        done = medha("top", "--once", "--run-dir", str(folder / "run"))
        assert done.returncode == 0, done.stderr
        text = done.stdout
    assert re.search(r"^served \(tiny\)  serving for .* TP1 x SPP2 x KVP2 ", text)
    assert re.search(r"^cmpl-\S+ +default +prefill .* of \d\d,\d{3} ", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 160
    for output in (text, json.dumps(snapshot(folder))):
        assert SECRET not in output


@pytest.mark.long
def test_orders_and_sizes_reach_the_controller(load: Load, folder: Path) -> None:
    while load.is_alive():
        core = snapshot(folder, "--sort", "prompt", "--requests", "1")["status"]["core"]
        if core["running"] == 2:
            assert len(core["requests"]) == 1
            assert core["requests"][0]["prompt_tokens"] > 1000
            return
    pytest.fail("the two were never seen together")


class Terminal:
    """`medha top` in a terminal of its own."""

    def __init__(self, folder: Path, *options: str, rows: int = 30, columns: int = 110) -> None:
        self.output = b""
        master, slave = pty.openpty()
        self.master = master
        self.resize(rows, columns)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medha_cli.main", "top", "--run-dir", str(folder / "run"), *options],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
        )  # fmt: skip
        self.slave = slave

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def read_until(self, pattern: bytes, timeout_seconds: float = 30.0) -> bytes:
        """What is shown from now on, until the pattern is in it."""
        shown, end = b"", time.monotonic() + timeout_seconds
        while not re.search(pattern, shown):
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} was not shown: {self.output[-3000:]!r}"
            if select.select([self.master], [], [], left)[0]:
                shown += os.read(self.master, 65_536)
        self.output += shown
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(grid: Served, folder: Path) -> Iterator[Terminal]:
    terminal = Terminal(folder, "--interval", "0.2")
    yield terminal
    terminal.close()


@pytest.mark.parametrize("way", ["q", "Ctrl-C", "SIGTERM"])
def test_it_draws_itself_and_leaves_the_terminal_as_it_was(terminal: Terminal, way: str) -> None:
    terminal.read_until(rb"\x1b\[\?1049h")  # the second screen
    terminal.read_until(rb"served.*serving")
    if way == "q":
        terminal.press(b"q")
    else:
        os.kill(terminal.process.pid, signal.SIGINT if way == "Ctrl-C" else signal.SIGTERM)
    terminal.read_until(rb"\x1b\[\?1049l")
    assert terminal.process.wait(timeout=20) == (143 if way == "SIGTERM" else 0)
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert b"Traceback" not in terminal.output


def test_keys_and_a_new_size_are_taken_at_once(terminal: Terminal) -> None:
    terminal.read_until(rb"by urgency")
    terminal.press(b"s")
    terminal.read_until(rb"by age")
    terminal.press(b"p")
    terminal.read_until(rb"paused")
    terminal.resize(20, 60)
    os.kill(terminal.process.pid, signal.SIGWINCH)  # as the kernel does for the processes of a terminal
    terminal.press(b"p")
    terminal.read_until(rb"q quit[^\n]*\n")
    frames = terminal.read_until(rb"(?s)(\x1b\[H.*){3}").split(b"\x1b[H")  # each is drawn from the corner on
    rows = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", frames[-2]).decode().splitlines()
    assert 5 < len(rows) <= 20
    assert max(map(len, rows)) <= 60
    terminal.press(b"q")
    assert terminal.process.wait(timeout=20) == 0


def test_in_a_pipe_it_prints_one_snapshot_after_another(grid: Served, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "medha_cli.main", "top", "--json", "--interval", "0.1", "--run-dir", str(folder / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for _ in range(3):
            assert json.loads(process.stdout.readline())["status"]["state"] == "serving"
        process.stdout.close()  # as `| head -3` does
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_only_one_trace_is_taken_at_a_time(grid: Served, folder: Path, tmp_path: Path) -> None:
    done = medha(
        "trace", "--run-dir", str(folder / "run"), "-o", str(tmp_path / "no.json")
    )  # --trace takes one
    assert done.returncode == 1
    assert "another trace is being taken" in done.stderr
    assert not (tmp_path / "no.json").exists()


# --- the trace of everything above: the last test of this file, for it ends the grid ------------------


def poll_until_coupled(folder: Path) -> None:
    """Until the long prompt has passed to the second lane."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        core = snapshot(folder)["status"]["core"]
        if any(lane["coupled_with"] == [0, 1] for lane in core["lanes"]):
            return
    pytest.fail("the lanes were never coupled")


def spans(events: list[dict[str, Any]], stage: int, lane: int = 0) -> dict[int, tuple[float, float]]:
    """When the forward pass of each step ran on one stage, by step."""
    rank = 2 * lane + stage
    return {
        event["args"]["step"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["name"] == "forward" and event["tid"] == rank + 1
    }


def steps_with_chunks(events: list[dict[str, Any]], lane: int) -> list[int]:
    """Steps whose first stage on a lane computed a chunk of a prompt, in order."""
    found = [event for event in events if event["ph"] == "X" and event["tid"] == 2 * lane + 1]
    return [event["args"]["step"] for event in found if event["args"].get("chunks")]


def overlapping(events: list[dict[str, Any]], lane: int, steps: list[int]) -> list[bool]:
    """Of those half of the steps that take longest in stage 1: whether the next one was in stage 0 meanwhile.

    The others may be over before the controller has had a turn: the machine has fewer cores than there are ranks.
    """
    first, second = spans(events, 0, lane), spans(events, 1, lane)
    both = [(second[one], first[after]) for one, after in pairwise(steps) if one in second and after in first]
    both.sort(key=lambda pair: pair[0][1] - pair[0][0])
    return [max(one[0], after[0]) < min(one[1], after[1]) for one, after in both[len(both) // 2 :]]


def prepared_ahead(events: list[dict[str, Any]]) -> int:
    """Steps that a rank planned while it ran another one."""
    ranks, count = 4, 0
    running: dict[int, list[tuple[float, float, int]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "forward":
            until = event["ts"] + event["dur"]
            running.setdefault(event["tid"], []).append((event["ts"], until, event["args"]["step"]))
    for event in events:
        if event["ph"] == "X" and event["name"] == "prepare":
            at, number = event["ts"], event["args"]["step"]
            own = running.get(event["tid"] - ranks, [])
            count += any(since < at < until and step < number for since, until, step in own)
    return count


@pytest.mark.long
def test_the_trace_shows_chunks_of_one_prompt_in_both_stages_at_once(
    load: Load, grid: Served, folder: Path
) -> None:
    poll_until_coupled(folder)
    load.enough.set()
    load.join()
    grid.wait_idle()
    assert grid.interrupt() == 0
    events = json.loads((folder / "trace.json").read_bytes())
    chunks = {lane: steps_with_chunks(events, lane) for lane in (0, 1)}
    owner = max(chunks, key=lambda lane: len(chunks[lane]))
    assert len(chunks[owner]) > 20
    overlaps = overlapping(events, owner, chunks[owner])
    assert len(overlaps) > 10
    assert sum(overlaps) >= len(overlaps) / 3, "chunk i was rarely in stage 1 while chunk i+1 was in stage 0"
    assert prepared_ahead(events) >= 3, "no step was prepared while the one before it ran"
    arrows = {kind: {event["id"]: event["ts"] for event in events if event["ph"] == kind} for kind in "sf"}
    both = arrows["s"].keys() & arrows["f"].keys()
    assert len(both) > len(chunks[owner])
    assert all(arrows["s"][id_] <= arrows["f"][id_] for id_ in both)
    assert SECRET not in (folder / "trace.json").read_text()


@pytest.mark.long
def test_a_running_replica_is_recorded_for_a_while_and_again(served: Served, tmp_path: Path) -> None:
    address = re.search(r"(http://\S+:\d+)/metrics\s+\(scheduling\)", "".join(served.lines))
    assert address
    for name in ("first.json", "second.json"):
        command = [
            sys.executable, "-m", "medha_cli.main", "trace", "--url", address[1], "--seconds", "1.5", "-o", name,
        ]  # fmt: skip
        recording = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert recording.stderr is not None
        assert "recording" in recording.stderr.readline()
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        asked = {"x-request-id": f"asked-for-{name}"}
        httpx.post(served.url + "/v1/completions", json=body, headers=asked, timeout=60).raise_for_status()
        assert recording.wait(timeout=30) == 0
        assert "ui.perfetto.dev" in recording.stderr.read()
        recording.stderr.close()
        events = json.loads((tmp_path / name).read_bytes())
        assert any(f"asked-for-{name}" in event.get("args", {}).get("request", "") for event in events)
        slices = [event["name"] for event in events if event["ph"] == "X"]
        assert slices.count("decode 1") == 4
        assert slices.count("sample") >= 5


def test_recording_an_idle_replica_prints_that_no_step_ran(served: Served, tmp_path: Path) -> None:
    served.wait_idle()
    address = re.search(r"(http://\S+:\d+)/metrics\s+\(scheduling\)", "".join(served.lines))
    assert address
    command = [sys.executable, "-m", "medha_cli.main", "trace", "--url", address[1], "--seconds", "0.5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "began or ended in this time, so trace.json shows no rank at work" in done.stderr
    assert "ui.perfetto.dev" not in done.stderr
    assert json.loads((tmp_path / "trace.json").read_bytes())
