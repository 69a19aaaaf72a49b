"""`medha up` with the real parts: it serves, and however it ends, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from medha_cli.main import main

MANIFEST = """\
apiVersion: medha.dev/v1alpha1
kind: MedhaReplica
metadata: {name: real}
spec:
  model: {name: tiny, source: {path: tiny}, maxModelLen: 2048}
  kvCache: {size: 8Mi}
  router: {port: 0}
  threads: 1
"""


class Up:
    """A running `medha up`, read until it is ready."""

    def __init__(self, manifest: Path, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medha_cli.main", "up", str(manifest), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self.output = ""
        assert self.process.stdout is not None
        while "Ctrl-C drains" not in self.output:
            line = self.process.stdout.readline()
            assert line, self.output
            self.output += line
        self.parts = psutil.Process(self.process.pid).children(recursive=True)

    def url(self) -> str:
        found = re.search(r"http://127\.0\.0\.1:\d+", self.output[self.output.index("is ready") :])
        assert found
        return found[0]

    def end(self) -> int:
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait(timeout=30)

    def left(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.parts, timeout=10)[1]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("up")
    with pytest.raises(SystemExit, match="0"):
        main(["model", "init", str(folder / "tiny")])
    (folder / "real.yaml").write_text(MANIFEST)
    return folder / "real.yaml"


@pytest.fixture
def up(manifest: Path, tmp_path: Path) -> Iterator[Up]:
    running = Up(manifest, tmp_path, "--record", str(tmp_path / "events.jsonl"))
    yield running
    for process in running.parts:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    running.process.kill()
    running.process.wait(timeout=10)
    assert running.process.stdout is not None
    running.process.stdout.close()


def test_it_shows_a_url_that_answers_and_stops_on_ctrl_c_without_a_trace(up: Up, tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    headers = {"x-request-id": "my-trace-7"}
    response = httpx.post(up.url() + "/v1/chat/completions", json=body, headers=headers, timeout=60)
    answer = response.raise_for_status().json()
    assert answer["usage"]["completion_tokens"] <= 3
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert up.left() == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "events.jsonl") == []
    record = (tmp_path / "events.jsonl").read_text()
    assert '"type":"Submit"' in record
    assert f'"id":"{answer["id"]}-0"' in record
    assert answer["id"].startswith("chatcmpl-my-trace-7-")
    assert "POST /v1/chat/completions 200 id=my-trace-7 model=tiny outcome=" in up.output


def test_what_it_has_recorded_replays_and_is_simulated_under_other_policies(up: Up, tmp_path: Path) -> None:
    url = up.url() + "/v1/completions"

    def complete(prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12}
        httpx.post(url, json=body, timeout=60).raise_for_status()

    prompts = ["a b c " * 40, "a b c " * 40, "a b c " * 200, "x", "y" * 900]
    with ThreadPoolExecutor() as pool:
        list(pool.map(complete, prompts))
    leaving = {"model": "tiny", "prompt": "z", "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", url, json=leaving, timeout=60) as stream:
        next(stream.iter_lines())  # and its client goes away
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    record, page = tmp_path / "events.jsonl", tmp_path / "replay.html"
    replayed = CliRunner().invoke(main, ["replay", str(record), "-p", "fcfs", "-o", str(page)])
    assert replayed.exit_code == 0, replayed.output
    assert "the same commands" in replayed.output
    found = json.loads(page.with_suffix(".json").read_text())
    told = {run["system"]: run["result"]["all"] for run in found["runs"]}
    assert [run["seed"] for run in found["runs"] if run["system"] == "fcfs"] == [0, 1, 2, 3, 4]
    in_time = next(one for one in found["differences"] if one["figure"] == "short: TTFT in time")
    assert (in_time["system"], in_time["less"], in_time["seeds"]) == ("fcfs", "guarded, as live", 5)
    assert "fcfs - guarded, as live" in replayed.output
    assert [one["arrived"] for one in told.values()] == 3 * [len(prompts) + 1]
    assert told["recorded"]["finished"] == len(prompts) + 1
    another = tmp_path / "another.jsonl"
    another.write_text(record.read_text().replace('"max_tokens":12', '"max_tokens":5'))
    assert another.read_text() != record.read_text()
    differs = CliRunner().invoke(main, ["replay", str(another)])
    assert isinstance(differs.exception, SystemExit)
    assert "which is not what was commanded live" in differs.output


def test_a_rank_that_is_killed_is_started_again_and_all_ends_well(up: Up) -> None:
    killed = next(part for part in up.parts if "medha_worker.rank" in part.cmdline())
    killed.kill()
    assert up.process.stdout is not None
    while "epoch 1 begins" not in up.output:
        line = up.process.stdout.readline()
        assert line, up.output
        up.output += line
    up.parts = psutil.Process(up.process.pid).children(recursive=True)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert "rank 0 was killed by SIGKILL" in up.output
    assert up.left() == []


def test_no_part_outlives_a_supervisor_that_is_killed(up: Up) -> None:
    assert len(up.parts) == 3
    up.process.kill()
    assert up.left() == []
