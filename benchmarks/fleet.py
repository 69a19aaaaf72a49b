"""Routers and replicas as processes of their own, for benchmarks and tests that lose, stop, cut off or slow down some of them.

All replicas serve one checkpoint, each below a supervisor of its own, which is called as a pod's is. They reach every
router by TCP connections that this process forwards, so that packets can be held back or slowed down.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Event, Thread

import httpx
import psutil
import yaml
from harness import Row
from rich.console import Console

from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.manifest import model_directory, read_manifest
from medha_cli.terminal_display import TerminalDisplay
from medha_links.key_files import KeyFiles
from medha_process.launch import CONTROLLER, settings_file
from medha_process.part_settings import ControllerSettings
from medha_process.router_settings import RouterSettings
from medha_process.supervision.supervisor import StopRequests, supervise

GRIDS = ((1, 1, 1), (2, 1, 2))  # tensor, stream, kv
START_SECONDS = 600.0  # on a machine that does much else
LINKS = ("control", "tokens")
WINDOW_BYTES = 1 << 16
"""Bytes that a slow link holds in each direction before it reads no more, as a thin cable's router does."""


@dataclass
class _Way:
    """A direction of a connection: what was read and not yet written, and when each part of it is due."""

    source: socket.socket
    target: socket.socket
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    free_at: float = 0.0  # when the link has passed on all that waits
    is_read: bool = True

    @property
    def waiting_bytes(self) -> int:
        return sum(len(data) for _, data in self.waiting)


class Wire:
    """A TCP connection's way from a replica to the router, on which packets can be held back or delayed without an error."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._held = Event()
        self._ended = Event()
        self._latency_seconds, self._bytes_per_second = 0.0, 0.0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Forward nothing, and accept no connection, until `release`."""
        self._held.set()

    def slow(self, latency_seconds: float, bytes_per_second: float) -> None:
        """Forward each packet so much later, and in each direction no more than so many bytes a second, until `release`."""
        self._latency_seconds, self._bytes_per_second = latency_seconds, bytes_per_second

    def release(self) -> None:
        """Forward again what was held back, and all that follows, at once."""
        self._latency_seconds, self._bytes_per_second = 0.0, 0.0
        self._held.clear()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        ways: dict[socket.socket, _Way] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                if self._held.is_set():
                    time.sleep(0.01)
                    continue
                readable = selector.select(self._wait_seconds(ways))
                if self._held.is_set():
                    continue
                for key, _ in readable:
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._listener:
                        self._accept(ways, selector)
                    elif source in ways:
                        self._read(ways[source], selector)
                for way in list(ways.values()):
                    if way.source in ways:
                        self._write(way, ways, selector)
        for one in (self._listener, *ways):
            one.close()

    def _wait_seconds(self, ways: Mapping[socket.socket, _Way]) -> float:
        due = min((way.waiting[0][0] for way in ways.values() if way.waiting), default=inf)
        return min(max(due - time.monotonic(), 0.0), 0.05)

    def _accept(self, ways: dict[socket.socket, _Way], selector: selectors.BaseSelector) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        for one, other in ((client, server), (server, client)):
            ways[one] = _Way(one, other)
            selector.register(one, selectors.EVENT_READ)

    def _read(self, way: _Way, selector: selectors.BaseSelector) -> None:
        data = b""
        with suppress(OSError):
            data = way.source.recv(WINDOW_BYTES)
        now = time.monotonic()
        if self._bytes_per_second:
            way.free_at = max(way.free_at, now) + len(data) / self._bytes_per_second
        else:
            way.free_at = now
        way.waiting.append((way.free_at + self._latency_seconds, data))
        if not data or way.waiting_bytes >= WINDOW_BYTES:
            selector.unregister(way.source)
            way.is_read = False

    def _write(self, way: _Way, ways: dict[socket.socket, _Way], selector: selectors.BaseSelector) -> None:
        at_once = not self._bytes_per_second
        while way.waiting and (at_once or way.waiting[0][0] <= time.monotonic()):
            _, data = way.waiting.popleft()
            try:
                way.target.sendall(data)
                is_open = bool(data)
            except OSError:
                is_open = False
            if not is_open:
                for one in (way.source, way.target):
                    if ways.pop(one).is_read:
                        selector.unregister(one)
                    one.close()
                return
        if not way.is_read and way.waiting_bytes < WINDOW_BYTES:
            selector.register(way.source, selectors.EVENT_READ)
            way.is_read = True


class Replica:
    """A replica below a supervisor of its own, which is called as a pod's is."""

    def __init__(
        self,
        folder: Path,
        grid: tuple[int, int, int],
        checkpoint: Path,
        routers: Sequence[Router],
        environment: Mapping[str, str] | None = None,
        spec: Row | None = None,
    ) -> None:
        """`environment` is added to that of its processes, `spec` to its manifest's. `folder` may exist."""
        self.folder, self.name = folder, folder.name
        self.log = folder / "log"
        self._environment = dict(environment or {})
        folder.mkdir(exist_ok=True)
        tensor, stream, kv = grid
        self._manifest: Row = {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": self.name},
            "spec": {
                "model": {"name": "m", "source": {"path": str(checkpoint)}, "maxModelLen": 8192},
                "threads": 1,
                "parallelism": {"tensor": tensor, "stream": stream, "kv": kv},
                "kvCache": {"size": "64Mi"},
            }
            | (spec or {}),
        }
        self._ways: dict[Router, list[Wire]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self.join(routers)

    @property
    def wires(self) -> list[Wire]:
        return [wire for wires in self._ways.values() for wire in wires]

    def wires_to(self, router: Router) -> list[Wire]:
        return self._ways[router]

    def join(self, routers: Sequence[Router]) -> None:
        """Have these routers, which have the same keys, and no others; also while the replica runs."""
        for router in set(self._ways) - set(routers):
            for wire in self._ways.pop(router):
                wire.close()
        for router in routers:
            if router not in self._ways:
                self._ways[router] = [Wire(address) for address in router.addresses]
        joins = {
            "routers": [
                {link: wire.endpoint for link, wire in zip(LINKS, wires, strict=True)}
                for wires in self._ways.values()
            ],
            "router_key_file": str(routers[0].keys.router_public),
            "enrolment_file": str(routers[0].keys.enrolment),
        }
        (self.folder / "router.json").write_text(json.dumps(joins))
        path = settings_file(CONTROLLER, self.folder / "run")
        if path.exists():
            _with_routers(path, self.folder)

    def start(self, drain_seconds: float = 0.0) -> None:
        self._manifest["spec"]["lifecycle"] = {"drainSeconds": drain_seconds}
        (self.folder / "manifest.yaml").write_text(yaml.safe_dump(self._manifest))
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder)],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self._environment,
            )

    def metric(self, name: str) -> float:
        """Return the sum of the samples of one of its controller's metrics."""
        ready = json.loads((self.folder / "run" / "ranks-ready.json").read_text())
        text = httpx.get(ready["metrics_url"], timeout=30).raise_for_status().text
        return sum(float(one) for one in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))

    @property
    def is_alive(self) -> bool:
        """False if its supervisor has ended."""
        return self._process is not None and self._process.poll() is None

    def processes(self, file: str = "") -> list[psutil.Process]:
        """Return the supervisor and all processes below it, or the one whose settings are in `file`."""
        assert self._process is not None
        found = []
        with suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self._process.pid)
            for process in (supervisor, *supervisor.children(recursive=True)):
                with suppress(psutil.Error, IndexError):
                    if not file or process.cmdline()[-1].endswith(f"/{file}"):
                        found.append(process)
        return found

    def signal(self, number: signal.Signals, file: str = "") -> None:
        """Send a signal to all processes, the supervisor first so that it restarts nothing; or to one part."""
        for process in self.processes(file):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def drain(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Kill whatever is left of it."""
        if self._process is None:
            return
        left = self.processes()
        self.signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=10)
        self._process.wait(timeout=10)
        self._process = None

    def close(self) -> None:
        self.stop()
        for wire in self.wires:
            wire.close()


class Router:
    """A router that replicas reach over TCP."""

    def __init__(
        self,
        folder: Path,
        keys: KeyFiles | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """`keys` are those of another router that the same replicas join; by default it has its own. `folder` may exist."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.name = folder.name
        self.keys = KeyFiles.create(folder / "keys") if keys is None else keys
        ready = folder / "ready.json"
        path = folder / "router.json"
        RouterSettings(
            port=0,
            key_file=self.keys.router,
            enrolment_file=self.keys.enrolment,
            ready_file=str(ready),
            scratch_directory=str(folder),
            **settings,  # type: ignore[arg-type]
        ).write(path)
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "medha_router", "--settings", str(path)],
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
            )
        wait_for(ready.exists, "the router", self.log)
        found = json.loads(ready.read_text())
        self.url: str = found["url"]
        self.metrics_url: str = found.get("metrics_url", f"{self.url}/metrics")  # before, one port had both
        self.probes_url = self.metrics_url.removesuffix("/metrics")
        self.addresses: list[tuple[str, int]] = []
        for link in LINKS:
            host, _, port = found[link].removeprefix("tcp://").rpartition(":")
            self.addresses.append((host, int(port)))

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels."""
        text = httpx.get(self.metrics_url, timeout=30).raise_for_status().text
        samples = re.findall(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(float(value) for found, value in samples if all(one in found for one in wanted))

    def is_accepting(self, get: Callable[[str], httpx.Response] = httpx.get) -> bool:
        """Return True once its replicas have joined, as its readiness probe says."""
        with suppress(httpx.HTTPError):
            return get(f"{self.probes_url}/accepting").status_code == 200
        return False

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


class Fleet:
    """A router and replicas of one checkpoint, of different grids."""

    def __init__(
        self,
        folder: Path,
        grids: Sequence[tuple[int, int, int]] = GRIDS,
        spec: Row | None = None,
        roles: Sequence[str] = (),
        preset: str = "tiny",
        environment: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """`settings` are those of the router; `spec`, and `roles` if given, are added to the manifests of the replicas.

        These serve a `preset`. `environment` is added to that of their processes.
        """
        from medha_worker.checkpoints.presets import (
            init_checkpoint,
        )  # supervisors run this file too, without torch

        checkpoint = folder / "checkpoint"
        init_checkpoint(checkpoint, preset=preset, seed=0)
        self.router = Router(folder / "router", **settings)
        self.replicas = [
            Replica(
                folder / f"r{number}",
                grid,
                checkpoint,
                [self.router],
                environment,
                (spec or {}) | {"role": role},
            )
            for number, (grid, role) in enumerate(zip(grids, roles or ["both"] * len(grids), strict=True))
        ]

    def start(self, drain_seconds: float = 0.0) -> None:
        for replica in self.replicas:
            replica.start(drain_seconds)
        self.wait_ready()

    def restart(self, replica: Replica, drain_seconds: float = 0.0) -> None:
        replica.stop()
        self.wait_ready(len(self.replicas) - 1)  # the router has noticed
        replica.start(drain_seconds)
        self.wait_ready()

    def wait_ready(self, replicas: int | None = None) -> None:
        count = len(self.replicas) if replicas is None else replicas
        logs = [one.log for one in (*self.replicas, self.router)]
        wait_for(
            lambda: self.router.metric("medha_router_replicas", state="ready") == count, "replicas", *logs
        )

    def moved(self) -> int:
        """Return how often a sequence was submitted again."""
        return round(self.router.metric("medha_router_resubmissions_total"))

    def running(self, replica: Replica) -> float:
        """Return how many sequences a replica runs, as it has announced."""
        return self.router.metric("medha_replica_sequences_running", replica=replica.name)

    def wait_idle(self) -> None:
        """Wait until no replica computes anything."""
        names = ("medha_replica_sequences_running", "medha_router_sequences_open")
        wait_for(lambda: not any(map(self.router.metric, names)), "idle replicas", self.router.log)

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        self.router.close()


def wait_for(done: Callable[[], bool], what: str, *logs: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.TransportError):
            if done():
                return
        time.sleep(0.05)
    raise RuntimeError(f"no {what} in time:\n" + "\n".join(log.read_text()[-4000:] for log in logs))


def _with_routers(path: Path, folder: Path) -> None:
    """Write the routers that `router.json` names into a controller's settings."""
    own = ControllerSettings.read(path).model_dump(mode="json", by_alias=True)
    ControllerSettings.model_validate(own | json.loads((folder / "router.json").read_text())).write(path)


def serve(folder: Path) -> int:
    """Run the controller and the ranks of a replica, which join the routers that `router.json` names."""
    replica = read_manifest(folder / "manifest.yaml")
    files = RunFiles(folder / "run")
    files.directory.mkdir(exist_ok=True)
    _, *groups = write_parts(replica, model_directory(replica), files, record=None, log_level="info")
    _with_routers(settings_file(CONTROLLER, files.directory), folder)
    lifecycle = replica.spec.lifecycle
    with StopRequests() as requests:
        state = supervise(
            tuple(groups),
            run_directory=files.directory,
            is_ready=files.ranks_ready.exists,
            display=TerminalDisplay(Console(width=200), folder.name, lambda _: []),
            ready_seconds=lifecycle.ready_seconds,
            drain_seconds=lifecycle.drain_seconds,
            requests=requests,
        )
    print(state.failure)
    return state.exit_status


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1])))
