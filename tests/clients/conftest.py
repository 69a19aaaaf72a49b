"""A server as its users start it, and a report of what each client asked of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmark import benchmark
from medha_process.host_resources import free_port

from .packages import clean_environment, installed, requirement, version
from .report import entry
from .traffic import Recorder, recorded

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "tiny"
REPORTS = "MEDHA_CLIENT_REPORTS"
"""Environment variable with the folder of reports; without it, none are written."""


@dataclass(frozen=True)
class Server:
    """A running `medha up`."""

    url: str
    metrics_url: str
    checkpoint: Path


@dataclass
class Client:
    """A client that is installed, in front of a server whose traffic with it is recorded."""

    name: str
    folder: Path
    url: str
    server: Server
    exercised: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    """The client's own report, as it printed it."""

    @property
    def checkpoint(self) -> Path:
        return self.server.checkpoint

    def run(self, *argv: object, timeout_seconds: float = 1200, **more: str) -> str:
        """Run a command in the client's environment; return what it printed."""
        asked = {
            "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "none", "MEDHA_MODEL": MODEL, **more,
        }  # fmt: skip
        asked["CLIENT_FOLDER"] = str(self.folder)
        asked["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            list(map(str, argv)), env=clean_environment(**asked), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            printed, errors = process.communicate(timeout=timeout_seconds)
        finally:
            with suppress(ProcessLookupError):  # nothing of it is left
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{argv} ended with {process.returncode}:\n{printed}\n{errors}"
        return printed

    def run_program(self, name: str, **more: str) -> None:
        """Run a program of checks, all of which must hold."""
        interpreter = "node" if name.endswith(".mjs") else "python"
        printed = self.run(interpreter, PROGRAMS / name, **more)
        checks = [json.loads(line) for line in printed.splitlines() if line.startswith('{"check"')]
        assert checks, printed
        failed = [one for one in checks if one["error"] is not None]
        assert not failed, "\n".join(f"{one['check']}:\n{one['error']}" for one in failed)
        self.exercised += [one["check"] for one in checks]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`medha up` of a tiny checkpoint."""
    checkpoint = tmp_path_factory.mktemp("checkpoint") / MODEL
    medha = [sys.executable, "-m", "medha_cli.main"]
    subprocess.run([*medha, "model", "init", checkpoint, "--preset", "tiny", "--seed", "0"], check=True)
    port, metrics_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    manifest = {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "clients"},
        "spec": {
            "model": {"name": MODEL, "source": {"path": str(checkpoint)}},
            "router": {"port": port, "metricsPort": metrics_port},
        },
    }
    path = checkpoint.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(manifest))
    server = Server(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", checkpoint)
    with benchmark("served").served([*medha, "up", str(path)], server.url):
        yield server


@pytest.fixture
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Client]]:
    """Returns a client by name; if the test passes, its report is written."""
    with recorded(server.url) as recorder:
        made: list[Client] = []

        def install(name: str) -> Client:
            made.append(Client(name, installed(name), recorder.url, server))
            return made[-1]

        failed_before = request.session.testsfailed
        yield install
        if REPORTS in os.environ and request.session.testsfailed == failed_before:
            for one in made[:1]:  # others are behind it
                _write(Path(os.environ[REPORTS]), one, recorder)


def _write(reports: Path, client: Client, recorder: Recorder) -> None:
    found = entry(recorder.exchanges())
    head = {
        "client": client.name, "install": requirement(client.name), "version": version(client.name),
        "exercised": client.exercised,
    }  # fmt: skip
    reports.mkdir(parents=True, exist_ok=True)
    path = reports / f"{client.name}.json"
    path.write_text(json.dumps({**head, **found, "report": client.report}, indent=1) + "\n")
