"""`medha up` with the real parts: it serves, and however it ends, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

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
    found = re.search(r"http://127\.0\.0\.1:\d+", up.output[up.output.index("is ready") :])
    assert found
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = httpx.post(found[0] + "/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] <= 3
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0
    assert up.left() == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "events.jsonl") == []
    assert '"type":"Submit"' in (tmp_path / "events.jsonl").read_text()


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
