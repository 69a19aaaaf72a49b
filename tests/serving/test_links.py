"""Strangers at the links of a running `medha up`: they get nowhere, and nobody's text changes."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest
import zmq

from medha.wire.frames import encode
from medha.wire.messages import RankFault, RankHello
from medha_links.key_files import KeyFiles, KeyPair, read_public_key
from medha_links.sockets import Opened, connect

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import BODY, processes, streamed

LINKS = ("router-control", "router-tokens", "rank-control", "rank-tokens")


class Watched(Served):
    """A served replica whose run directory is known."""

    run: Path

    @property
    def keys(self) -> KeyFiles:
        return KeyFiles(self.run / "keys")

    def controllers(self, name: str) -> float:
        """The sum of all samples of one name on the controller's /metrics."""
        url = json.loads((self.run / "ranks-ready.json").read_text())["metrics_url"]
        text = httpx.get(url, timeout=30).text
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def replica(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    port, folder = free_port(), tmp_path_factory.mktemp("links")
    manifest = write_manifest(
        folder / "tiny.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 16384},
        scheduling={"maxRunning": 2},
        kvCache={"size": "64Mi"},
    )
    run = folder / "run"
    served = start(manifest, port, checkpoint, "--run-dir", str(run), "--log-level", "debug")
    served.__class__ = Watched
    served.run = run  # type: ignore[attr-defined]
    yield served  # type: ignore[misc]
    stop(served)


def wait_for_metric(read: Callable[[], float], least: float, what: str) -> None:
    end = time.monotonic() + 60
    while read() < least:
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_strangers_get_nowhere_are_counted_and_change_nobodys_text(replica: Watched) -> None:
    undisturbed = streamed(replica, 200, BODY)
    routers = replica.metric("medha_router_refused_connections_total")
    controllers = replica.controllers("medha_refused_connections_total")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fault = [bytes(frame) for frame in encode(RankFault(0, "all is lost", lost_epoch=0))]
    sockets: list[zmq.Socket[bytes]] = []
    opened: list[Opened[zmq.Socket[bytes]]] = []
    for name in LINKS:
        endpoint = f"ipc://{replica.run / name}"
        server = replica.keys.router_public if name.startswith("router") else replica.keys.controller_public
        plain = context.socket(zmq.DEALER)
        plain.setsockopt(zmq.IDENTITY, b"rank-0")
        plain.connect(endpoint)
        sockets.append(plain)
        # The public keys are no secret; who knows them is still nobody.
        opened.append(connect(context, endpoint, b"rank-0", KeyPair.new(), read_public_key(server)))
        opened.append(connect(context, endpoint, b"rank-0", KeyPair.new(), KeyPair.new().public))
    for socket in (*sockets, *(one.socket for one in opened)):
        for _ in range(100):
            with suppress(
                zmq.Again
            ):  # refused already: ZeroMQ does not try again, and nothing more can be sent
                socket.send_multipart(fault, flags=zmq.NOBLOCK)
    try:
        assert streamed(replica, 200, BODY) == undisturbed
        wait_for_metric(
            lambda: replica.metric("medha_router_refused_connections_total"), routers + 6, "router"
        )
        wait_for_metric(
            lambda: replica.controllers("medha_refused_connections_total"), controllers + 6, "controller"
        )
        assert replica.controllers("medha_epoch") == 0
    finally:
        for plain in sockets:
            plain.close(0)
        for one in opened:
            one.close(0)
        context.term()
    replica.wait_idle()


def test_who_holds_a_ranks_key_and_talks_nonsense_is_counted_and_changes_nobodys_text(
    replica: Watched,
) -> None:
    undisturbed = streamed(replica, 200, BODY)
    before = replica.controllers("medha_dropped_messages_total")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys, server = KeyPair.read(replica.keys.ranks), read_public_key(replica.keys.controller_public)
    # Not under the identity of rank 0: that would take its place.
    opened = connect(context, f"ipc://{replica.run / 'rank-control'}", b"rank-9", keys, server)
    for frames in ([b"\x80\x04\x95"], [b"{}", b"x"], encode(RankHello(0, "me")), [b'{"v":7}']):
        opened.socket.send_multipart(frames)
    try:
        assert streamed(replica, 200, BODY) == undisturbed
        wait_for_metric(
            lambda: replica.controllers("medha_dropped_messages_total"), before + 4, "not counted"
        )
    finally:
        opened.close(0)
        context.term()


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_kv_is_free_within_ten_seconds_of_the_routers_end_whatever_waited(
    replica: Watched, how: signal.Signals
) -> None:
    """Two requests run, and long prompts wait behind them, for which nothing is computed any more."""
    (router,) = processes(replica, "medha_router")
    body = BODY | {"max_tokens": 8000}

    def ask(index: int) -> None:
        with suppress(httpx.HTTPError):
            prompt = [7 + index] * 8000
            httpx.post(replica.url + "/v1/completions", json=body | {"prompt": prompt}, timeout=60)

    asking = [Thread(target=ask, args=(index,)) for index in range(6)]
    for thread in asking:
        thread.start()
    wait_for_metric(lambda: replica.controllers("medha_sequences_waiting"), 4, "none waits")
    os.kill(router.pid, how)
    died = time.monotonic()
    wait_for_metric(lambda: -replica.controllers("medha_kv_used_ratio"), 0, "KV is still held")
    assert replica.controllers("medha_sequences_waiting") == 0
    assert time.monotonic() - died < 10
    while router.is_running() and router.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - died < 60, "a router that was stopped is not started again"
        time.sleep(0.1)
    replica.wait_served()
    for thread in asking:
        thread.join()
    assert len(streamed(replica, 20, BODY)) > 0
    replica.wait_idle()


def test_keys_are_the_owners_alone_outlive_a_part_and_never_leave_their_files(replica: Watched) -> None:
    files = sorted(replica.keys.directory.iterdir())
    assert stat.S_IMODE(replica.keys.directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    contents = {path: path.read_text().strip() for path in files}
    (controller,) = processes(replica, "medha_worker.controller")
    os.kill(controller.pid, signal.SIGKILL)
    controller.wait(timeout=20)
    wait_for_metric(lambda: len(streamed(replica, 20, BODY)), 1, "nothing is served by the next controller")
    assert {path: path.read_text().strip() for path in files} == contents
    settings = "".join(path.read_text() for path in replica.run.glob("*.json"))
    said = [*replica.lines, settings]
    for part in (psutil.Process(replica.process.pid), *replica.parts()):
        said += [*part.cmdline(), *part.environ().values()]
    everything = "\n".join(said)
    assert str(replica.keys.controller) in everything
    secrets = {path.name: content for path, content in contents.items() if path.suffix != ".public"}
    assert len(secrets) == 4
    assert [name for name, content in secrets.items() if content in everything] == []


def test_keys_are_removed_with_the_run_that_they_were_made_for(replica: Watched) -> None:
    assert replica.interrupt() == 0
    assert replica.run.is_dir()
    assert not replica.keys.directory.exists()
