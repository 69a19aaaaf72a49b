"""A replica made of pods on this machine: each pod and the router is a process with an address of its own (127.x.y.z).

Keys are those of a cluster's Secrets, mounted as files. What the kubelet would do, tests do: kill, start again, ask.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from medha_links.cluster_keys import enrolment_secret, replica_secret, router_secret

MODEL = "tiny"
START_SECONDS = 60.0
WAIT_SECONDS = 30.0
ROUTER_PORT = 8000


def eventually(what: str, holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Wait until it holds; the test fails if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"within {seconds:g} s not so: {what}"
        time.sleep(0.05)


def mount(folder: Path, data: dict[str, bytes]) -> Path:
    """A Secret's volume."""
    folder.mkdir()
    for name, content in data.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o440)
    return folder


def environment() -> dict[str, str]:
    """Of a container: nothing of the test's own that the operator does not give."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MEDHA_")}


@dataclass
class Pod:
    """One `python -m medha_worker.pod`; its folder is the pod's, and outlives its container."""

    argv: list[str]
    address: str
    folder: Path
    variables: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the container, once or again."""
        self.folder.mkdir(exist_ok=True)
        self.termination_log.write_bytes(b"")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.argv, "--termination-log", str(self.termination_log)],
                env=environment() | self.variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def termination_log(self) -> Path:
        return self.folder / "termination-log"

    @property
    def message(self) -> str:
        return self.termination_log.read_text()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def running(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def rank(self) -> psutil.Process:
        """Its only rank's process."""
        (found,) = [one for one in self.running.children() if "medha_worker.rank" in one.cmdline()]
        return found

    def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        """What a probe gets; status 0 while nobody answers."""
        try:
            answer = httpx.get(f"http://{self.address}:9401{path}", timeout=5)
        except httpx.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def is_ready(self) -> bool:
        return self.ask("/ready")[0] == 200

    def kill(self) -> None:
        """As a node that is lost, or the kernel's OOM killer: supervisor and all below it at once."""
        if self.process is not None and self.process.poll() is None:
            for one in [*self.running.children(recursive=True), self.running]:
                one.kill()
            self.process.wait()

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        assert self.process is not None
        return self.process.wait(seconds)


@dataclass
class Replica:
    """A router, and a replica of one pod a (lane, stage)."""

    folder: Path
    checkpoint: Path
    stages: int
    lanes: int
    spec: dict[str, Any] = field(default_factory=dict)
    pods: dict[tuple[int, int], Pod] = field(default_factory=dict)
    router: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        # Addresses of this run's own: other tests of this machine may run at the same time.
        self.network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self.router_address = f"{self.network}.200"
        router = router_secret()
        self.router_keys = mount(self.folder / "router-keys", router)
        self.enrolment = mount(self.folder / "enrolment", enrolment_secret(router))
        self.keys = mount(self.folder / "keys", replica_secret())
        self.document = self.folder / "replica.json"
        self.write()
        for lane in range(self.lanes):
            for stage in range(self.stages):
                self.pods[lane, stage] = self._pod(lane, stage)

    @property
    def leader(self) -> Pod:
        return self.pods[0, 0]

    @property
    def epoch(self) -> int:
        """The one that serves; -1 between two."""
        controller = self.leader.ask("/ready")[1].get("parts", {}).get("controller", {})
        return controller["epoch"] if controller.get("phase") == "serving" else -1

    @property
    def url(self) -> str:
        return f"http://{self.router_address}:{ROUTER_PORT}"

    def write(self, **spec: Any) -> None:
        """The ConfigMap, as the operator writes it."""
        document = {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": "grid", "namespace": "tests"},
            "spec": {
                "model": {"name": MODEL, "source": {"hostPath": {"path": "/nowhere"}}, "maxModelLen": 8192},
                "parallelism": {"tensor": 1, "stream": self.stages, "kv": self.lanes},
                "scheduling": {"maxChunkTokens": 128, "longThresholdTokens": 400},
                "kvCache": {"size": "16Mi", "tokensPerLane": 400},
                "resources": {"accelerator": "none"},
                "routerRef": {"name": "router"},
                "threads": 1,
                **self.spec,
                **spec,
            },
        }
        partial = self.folder / "replica.partial"
        partial.write_text(json.dumps(document))
        partial.rename(self.document)

    def _pod(self, lane: int, stage: int) -> Pod:
        address = f"{self.network}.{1 + lane * self.stages + stage}"
        folder = self.folder / f"l{lane}-{stage}"
        argv = [
            *(sys.executable, "-m", "medha_worker.pod"),
            *("--replica", str(self.document), "--keys", str(self.keys), "--enrolment", str(self.enrolment)),
            *("--model", str(self.checkpoint)),  # where a container has it mounted at /model
        ]
        variables = {
            "MEDHA_LANE": str(lane),
            "MEDHA_STAGE": str(stage),
            "MEDHA_LEADER": f"{self.network}.1",
            "MEDHA_POD_IP": address,
            "MEDHA_RUN_DIRECTORY": str(folder / "run"),
            "MEDHA_ROUTER": self.router_address,
        }
        return Pod(argv, address, folder, variables)

    def start_router(self) -> None:
        settings = self.folder / "router.json"
        settings.write_text(
            json.dumps(
                {
                    "host": self.router_address,
                    "port": ROUTER_PORT,
                    "control_endpoint": f"tcp://{self.router_address}:5700",
                    "tokens_endpoint": f"tcp://{self.router_address}:5701",
                    "key_file": str(self.router_keys / "router.key"),
                    "enrolment_file": str(self.router_keys / "tokens"),
                    "exit_with_parent": False,
                    "tokenize_processes": 1,
                }
            )
        )
        with (self.folder / "router.log").open("ab") as log:
            argv = [sys.executable, "-m", "medha_router", "--settings", str(settings)]
            self.router = subprocess.Popen(argv, env=environment(), stdout=log, stderr=log)

    def kill_router(self) -> None:
        if self.router is not None and self.router.poll() is None:
            self.router.kill()
            self.router.wait()

    def start(self) -> None:
        self.start_router()
        for pod in self.pods.values():
            pod.start()

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Until every pod is ready, and the router has a replica to send requests to."""
        for place, pod in self.pods.items():
            eventually(f"pod {place} is ready", pod.is_ready, seconds)
        eventually("the router serves", lambda: self._asked("/ready") == 200)

    def _asked(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5).status_code
        except httpx.TransportError:
            return 0

    def complete(self, prompt: str, tokens: int = 24) -> str:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stop(self) -> None:
        for pod in self.pods.values():
            pod.kill()
        self.kill_router()
