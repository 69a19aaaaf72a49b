"""A whole Medha on one machine: `medha up` in a process group of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from medha_worker.checkpoints.presets import init_checkpoint

START_SECONDS = 90
MODEL = "tiny"


def free_port() -> int:
    """Return a free port below the ephemeral ports, so that no connection takes it before the server binds it."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Served:
    """A running `medha up`; `lines` is everything that it has printed."""

    process: subprocess.Popen[str]
    url: str
    checkpoint: Path
    lines: list[str] = field(default_factory=list)

    def get(self, path: str) -> tuple[int, str]:
        response = httpx.get(self.url + path, timeout=30)
        return response.status_code, response.text

    def address(self, what: str) -> str:
        """Host and port of the metrics of `requests` (the router) or `scheduling` (the controller), as printed."""
        (address,) = re.findall(rf"http://(\S+)/metrics\s+\({what}\)", "".join(self.lines))
        return str(address)

    def router_metrics(self) -> str:
        return httpx.get(f"http://{self.address('requests')}/metrics", timeout=30).text

    def metric(self, name: str) -> float:
        """The sum of all samples of one name on the router's /metrics."""
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.router_metrics(), re.MULTILINE)
        assert found, f"no sample of {name}"
        return sum(map(float, found))

    def controller_page(self) -> str:
        """The controller's own /metrics."""
        return httpx.get(f"http://{self.address('scheduling')}/metrics").text

    def rank_samples(self, *, is_idle: bool = False) -> dict[tuple[str, str, str], float]:
        """Samples of ranks, by metric, rank and value of the other label.

        If it `is_idle`, they are those once rank 0 has reported all steps that the controller has counted.
        """
        end = time.monotonic() + 30
        while time.monotonic() < end:
            families = {one.name: one for one in text_string_to_metric_families(self.controller_page())}
            found = {}
            for name in (name for name in families if name.startswith("medha_rank_")):
                for one in families[name].samples:
                    other = "".join(text for label, text in one.labels.items() if label != "rank")
                    if not one.name.endswith("_created"):
                        found[name, one.labels["rank"], other] = one.value
            (counted,) = [one.value for one in families["medha_steps"].samples if one.name.endswith("_total")]
            if found.get(("medha_rank_steps", "0", ""), -1.0) >= (counted if is_idle else 0.0):
                return found
            time.sleep(0.1)
        pytest.fail("the ranks do not report:\n" + self.controller_page())

    def blocks_by_lane(self) -> list[int]:
        """Blocks of KV that every lane keeps of what was computed, as the controller's own /metrics say."""
        samples = re.findall(
            r'^medha_kv_blocks{lane="(\d+)",state="(?:used|cached)"} (\S+)$',
            self.controller_page(),
            re.MULTILINE,
        )
        lanes = dict.fromkeys(sorted({lane for lane, _ in samples}), 0)
        for lane, blocks in samples:
            lanes[lane] += int(float(blocks))
        return list(lanes.values())

    def parts(self) -> list[psutil.Process]:
        """The processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def resident_bytes(self) -> int:
        return sum(part.memory_info().rss for part in self.parts())

    def wait_served(self, timeout_seconds: float = 60) -> None:
        """Wait until a router that was started again is ready; fail the test if it does not become so."""
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            try:
                if self.get("/ready")[0] == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.1)
        pytest.fail("the router is not ready again:\n" + "".join(self.lines))

    def wait_idle(self, timeout_seconds: float = 30) -> None:
        """Until no request is known and no KV is held; fails the test if that does not come."""
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            held = (
                "medha_replica_sequences_running",
                "medha_replica_sequences_waiting",
                "medha_replica_kv_used_ratio",
                "medha_router_sequences_open",
            )
            if not any(map(self.metric, held)):
                return
            time.sleep(0.1)
        pytest.fail("requests or KV blocks are still held:\n" + self.router_metrics())

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


def write_manifest(path: Path, checkpoint: Path, port: int, **spec: object) -> Path:
    document = {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "served"},
        "spec": {
            "model": {"name": MODEL, "source": {"path": str(checkpoint)}},
            "router": {"port": port},
            "threads": 1,
            **spec,
        },
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def start(manifest: Path, port: int, checkpoint: Path, *options: str) -> Served:
    """Start `medha up` and wait until it serves, and has printed its addresses."""
    process = subprocess.Popen(
        [sys.executable, "-m", "medha_cli.main", "up", str(manifest), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    served = Served(process, f"http://127.0.0.1:{port}", checkpoint)

    def collect() -> None:
        assert process.stdout is not None
        served.lines.extend(process.stdout)

    threading.Thread(target=collect, daemon=True).start()
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            if served.get("/ready")[0] == 200 and "Ctrl-C drains" in "".join(served.lines):
                return served
        except httpx.TransportError:
            pass  # the router does not listen yet
        time.sleep(0.1)
    stop(served)
    pytest.fail("medha up did not become ready:\n" + "".join(served.lines))


def stop(served: Served) -> None:
    """End a `medha up` that a test may have left running, and all below it."""
    if served.process.poll() is None:
        parts = served.parts()
        served.process.kill()
        for part in parts:
            part.wait(timeout=10)
    served.process.wait(timeout=10)
    if served.process.stdout is not None:
        served.process.stdout.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that may be served up to one million tokens."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    config = json.loads((directory / "config.json").read_text())
    config["max_position_embeddings"] = 2**20
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    port = free_port()
    manifest = write_manifest(
        tmp_path_factory.mktemp("served") / "tiny.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 2**20},
        kvCache={"size": "1200Mi"},
    )
    running = start(manifest, port, checkpoint)
    yield running
    stop(running)
