"""Every panel of the dashboards has data after a real run, as a real Prometheus answers its queries, or is on a list with the reason.

With MEDHA_RECORD=1 in the environment, the pictures in docs/dashboards are drawn from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dashboard_plot import plot
from situations.recording import Series, is_counter, recorded

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import processes

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
]  # a rank is killed and started again, on a machine that may be busy

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 15
"""Seconds of use before the rank is killed, and again once the replica has recovered."""
LONG_TOKENS = 9000
KEYS = {"alice": "sk-alice", "bob": "sk-bob"}

_NVML = "only a GPU has this"
_NO_OPERATOR = "no operator runs here, and recordings hold only what alerts ask for"
_WELL = "nothing went wrong in this way"
EMPTY = {
    ("slo", "Messages dropped"): _WELL,
    ("replica", "Refused"): _WELL,
    ("replica", "Stepped aside"): _WELL,
    ("replica", "Messages dropped"): _WELL,
    ("replica", "Blocks of windows"): "no layer of this model frees KV before a window",
    ("devices", "Waiting for others"): "a single rank waits for no other",
    ("devices", "MFU"): "the peak of this device is unknown",
    ("devices", "MBU"): "the peak of this device is unknown",
    ("devices", "SM clock"): _NVML,
    ("devices", "Temperature"): _NVML,
    ("devices", "Power"): _NVML,
    ("devices", "Utilisation"): _NVML,
    ("devices", "Last error"): "only a GPU has this, and recordings hold only what alerts ask for",
    ("operator", "From change to ready"): _NO_OPERATOR,
    ("operator", "Reconciles"): _NO_OPERATOR,
    ("operator", "Duration of a reconcile"): _NO_OPERATOR,
    ("operator", "Queue"): _NO_OPERATOR,
    ("operator", "Time in the queue"): _NO_OPERATOR,
    ("operator", "Writes"): _NO_OPERATOR,
}
"""Dashboard and title of panels without data -> the reason."""


@contextmanager
def playing(situation: str) -> Iterator[str]:
    """A process that exports a recorded situation, which goes on with each scrape; its address."""
    before, after = recorded(situation)
    scrapes = iter(range(10**9))

    def line(series: Series, scrape: int) -> str:
        name, labels = series
        value = after[series]
        if is_counter(series):
            start = before.get(series, 0.0)
            value = start + (value - start) * scrape
        inner = ",".join(f'{label}="{text}"' for label, text in labels)
        return f"{name}{{{inner}}} {value:g}\n"

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scrape = next(scrapes)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            with suppress(BrokenPipeError):  # on a busy machine a scrape ends before its answer
                self.wfile.write("".join(line(series, scrape) for series in after).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def prometheus(folder: Path, targets: dict[str, tuple[str, str]]) -> Iterator[str]:
    """A Prometheus that scrapes each target, an address with the namespace of its pod, every two seconds; its own address."""
    program = shutil.which("prometheus")
    if program is None:
        assert not os.environ.get("CI"), "no prometheus: install the package prometheus"
        pytest.skip("no prometheus: install the package prometheus")
    jobs = [
        {
            "job_name": pod,
            "honor_labels": True,
            "static_configs": [{"targets": [address], "labels": {"namespace": namespace, "pod": pod}}],
        }
        for pod, (address, namespace) in targets.items()
    ]
    settings = {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < until, "prometheus is not ready"
            try:
                if httpx.get(f"{url}/-/ready", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(
    served: Served,
    key: str,
    tokens: int,
    output: int,
    first: int,
    begun: threading.Event | None = None,
    **fields: Any,
) -> None:
    """Send a request, and set `begun` at its first token; requests with different `first` share no prompt."""
    begun = threading.Event() if begun is None else begun
    prompt = [first % 200, first // 200 % 200, *(token % 200 for token in range(tokens - 2))]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": output, "stream": True, **fields}
    headers = {"Authorization": f"Bearer {KEYS[key]}"}
    with httpx.stream(
        "POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=120
    ) as response:
        for _ in response.iter_lines():
            begun.set()


def use(served: Served) -> None:
    """Short requests of two keys, streams, long prompts; and in the midst of them the rank is killed."""
    ended = threading.Event()

    def again_and_again(request: partial[None], pause_seconds: float, number: int) -> None:
        while not ended.wait(pause_seconds):
            request(first=number)
            number += 10

    kinds = [
        (partial(ask, served, "alice", 60, 8), 0.5),
        (partial(ask, served, "bob", 60, 8, service_tier="batch", n=2), 0.7),
        (partial(ask, served, "alice", 100, 400, ignore_eos=True), 0.5),
        (partial(ask, served, "bob", LONG_TOKENS, 4), 1.0),
    ]
    threads = [
        threading.Thread(target=again_and_again, args=(request, pause_seconds, number))
        for number, (request, pause_seconds) in enumerate(kinds, start=1)
    ]
    for thread in threads:
        thread.start()
    time.sleep(SECONDS)
    begun = threading.Event()
    killed = partial(ask, served, "alice", 100, 2000, 5, begun, ignore_eos=True)
    threads.append(threading.Thread(target=killed))
    threads[-1].start()
    assert begun.wait(60), "the stream that is to lose its rank does not begin"
    (rank,) = processes(served, "medha_worker.rank")
    rank.kill()
    until = time.monotonic() + 200
    while served.metric('medha_router_resubmissions_total{model="tiny",reason="rank_lost"}') == 0:
        assert time.monotonic() < until, "the replica does not recover"
        time.sleep(0.5)
    time.sleep(SECONDS)
    ended.set()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def found(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """Dashboard -> title of panel -> lines, after a run."""
    folder = tmp_path_factory.mktemp("dashboards")
    port = free_port()
    model = {"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 2**15}
    classes = [{"name": "interactive"}, {"name": "batch", "ttftFactor": 20, "tpotTargetSeconds": 0.5}]
    tiers = {
        "host": {"size": "256Mi"},
        "disk": {"size": "256Mi"},
        "store": {"url": f"file://{folder / 'store'}"},
    }
    manifest = write_manifest(
        folder / "tiny.yaml",
        checkpoint,
        port,
        model=model,
        kvCache={"size": "256Mi", "tiers": tiers},
        serviceClasses=classes,
    )
    entries = [
        {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest()} for name, secret in KEYS.items()
    ]
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    served = start(manifest, port, checkpoint, "--api-keys", str(folder / "keys.yaml"))
    try:
        with (
            playing("operator-refused") as operator,
            playing("operator-crash-waits") as crashing,
            playing("gpu-throttled") as throttled,
            playing("gpu-device-error") as failing,
            prometheus(
                folder,
                {
                    "medha-router-a": (served.address("requests"), "medha-system"),
                    "tiny-l0-0": (served.address("scheduling"), "team-a"),
                    "medha-operator-a": (operator, "medha-system"),
                    "medha-operator-b": (crashing, "recorded"),
                    "hot-l0-0": (throttled, "recorded"),
                    "broken-l0-0": (failing, "recorded"),
                },
            ) as url,
        ):
            begun = datetime.now(UTC).timestamp()
            use(served)
            time.sleep(3)  # the ranks report every two seconds
            now = datetime.now(UTC).timestamp()
            span = plot.Span(begun, now, 2.0, 8.0)
            documents = plot.documents()
            lines = {
                name: plot.answers(document, plot.prometheus(url), span)
                for name, document in documents.items()
            }
    finally:
        stop(served)
    if os.environ.get("MEDHA_RECORD"):
        pictures = ROOT / "docs" / "dashboards"
        pictures.mkdir(exist_ok=True)
        for name, document in documents.items():
            absent = {title: why for (board, title), why in EMPTY.items() if board == name}
            picture = plot.drawing(document, lines[name], absent, span)
            (pictures / f"{name}.svg").write_text(picture, encoding="utf-8")
    return lines


def test_every_panel_has_data_after_a_run_or_a_reason_to_have_none(
    found: dict[str, dict[str, list[Any]]],
) -> None:
    empty = {(name, title) for name, panels in found.items() for title, lines in panels.items() if not lines}
    assert empty - EMPTY.keys() == set(), "they have no data"
    assert EMPTY.keys() - empty == set(), "they have data, and need no reason"


def test_the_panels_of_tiers_show_those_that_the_replica_has(found: dict[str, dict[str, list[Any]]]) -> None:
    replica, pod = found["replica"], "tiny-l0-0"
    for title in ("Reads, per GiB", "Latency of reads"):
        assert {line.legend for line in replica[title]} == {
            f"{pod} {tier}" for tier in ("host", "disk", "store")
        }
    assert {line.legend for line in replica["Hits"]} == {
        f"{pod} {name}" for name in ("host", "disk", "peers", "store", "store lookups")
    }


def test_the_panels_of_what_targets_depend_on_show_the_run(found: dict[str, dict[str, list[Any]]]) -> None:
    slo = found["slo"]
    assert {line.legend for line in slo["Waiting in the router, by API key"]} >= {
        f"{key} {name}" for key in KEYS for name in ("interactive", "batch")
    }
    assert {line.legend for line in slo["First tokens in time, by API key"]} == set(KEYS)
    assert {line.legend for line in slo["Short prompts beside long ones"]} == {
        f"{share} {beside}" for share in ("p50", "p99") for beside in ("true", "false")
    }
    assert "rank_lost" in {line.legend for line in slo["Submitted again"]}
    assert "rank_lost same" in {line.legend for line in slo["Streams that continued"]}
