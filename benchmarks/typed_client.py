"""Measure the operator's client of the API server beside the typed API of the package `kubernetes`, on the same answers.

    python benchmarks/typed_client.py --quick
    python benchmarks/typed_client.py --json benchmarks/results/typed_client.json

* pod: one pod's text, in memory. The package makes a `V1Pod` of it; the operator reads it as JSON, and keeps its facts.
* list: a page of 500 pods over loopback HTTP, by `CoreV1Api.list_namespaced_pod` and by `Cluster.pages`, with their facts.
* apply: a server-side apply of a StatefulSet over loopback HTTP, by `AppsV1Api.patch_namespaced_stateful_set`, which gets
  the manifest as a dictionary, and by `Cluster.apply`.

The StatefulSet is the operator's own, and its pods have the status and the managed fields of pods that run. Both clients
send over the package's `ApiClient`. Times are CPU times of the client's thread. The server is another thread, which returns
the same bytes to both. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import orjson
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table
from kubernetes.aio.client import ApiClient, AppsV1Api, Configuration, CoreV1Api

from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import MANAGER, POD
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Apply
from medha_operator.replica.observed import Observed, pod_of
from medha_operator.replica.plan import plan
from medha_operator.status_fields import ReplicaStatus

Document = dict[str, Any]

PODS = 500  # of a page, as the operator lists them
SELECTOR = "medha.dev/replica"
CREATED = "2026-01-02T03:04:05Z"
TIMES = {
    "pod": (2000, 200),
    "list": (4, 1),
    "apply": (200, 20),
}  # each is measured so often, in a quick run less often
MOST_OF_TYPED = {"pod": 0.2, "list": 0.3, "apply": 0.8}
"""The most that the operator's client may take, as a share of the typed API's time."""


def stateful_set() -> Document:
    """Return the first StatefulSet that the operator applies for a new replica, with what the API server adds."""
    spec = {
        "model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}},
        "parallelism": {"tensor": 1, "stream": 4, "kv": 2},
    }
    new = Observed("r0", "default", "a-uid", 1, "1", spec, ReplicaStatus())
    actions = plan(new, datetime.now(UTC).timestamp(), OperatorSettings()).actions
    manifests = [action.manifest for action in actions if isinstance(action, Apply)]
    (first, *_) = [one for one in manifests if one["kind"] == "StatefulSet"]
    return {**first, "metadata": {**first["metadata"], **added(first["spec"])}}


def added(spec: Document) -> Document:
    """Return the metadata that the API server adds to an object of this spec."""
    managed = {"manager": MANAGER, "operation": "Apply", "apiVersion": "v1", "time": CREATED}
    managed |= {"fieldsType": "FieldsV1", "fieldsV1": {"f:spec": owned(spec)}}
    return {
        "uid": "3c9b1f2e-7a55-4a4e-9d0e-000000000000", "resourceVersion": "123456", "generation": 1,
        "creationTimestamp": CREATED, "managedFields": [managed],
    }  # fmt: skip


def owned(value: object) -> Document:
    """Return the names of the fields of a value as `managedFields` have them."""
    return {f"f:{key}": owned(inner) for key, inner in value.items()} if isinstance(value, dict) else {}


def pods(owner: Document, count: int) -> list[Document]:
    """Return pods of a StatefulSet that run and are Ready."""
    template = owner["spec"]["template"]
    started = {"startedAt": CREATED}
    statuses = [
        {
            "name": one["name"], "image": one["image"], "imageID": f"registry.example/medha@sha256:{'0' * 64}",
            "containerID": f"containerd://{'1' * 64}", "ready": True, "started": True, "restartCount": 0,
            "lastState": {}, "state": {"running": started},
        }
        for one in template["spec"]["containers"]
    ]  # fmt: skip
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": CREATED} for kind in kinds]
    status = {
        "phase": "Running", "conditions": conditions, "containerStatuses": statuses, "hostIP": "10.0.0.1",
        "podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}], "qosClass": "Burstable", "startTime": CREATED,
    }  # fmt: skip
    spec = {**template["spec"], "nodeName": "node-1"}
    return [
        {
            "metadata": {
                **template["metadata"], "name": f"{owner['metadata']['name']}-{ordinal}", "namespace": "default",
                **added(spec),
            },
            "spec": spec,
            "status": status,
        }
        for ordinal in range(count)
    ]  # fmt: skip


@contextmanager
def api_server(answers: dict[str, bytes]) -> Iterator[str]:
    """Provide the URL of a server that answers each method with the same bytes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = answers[self.command]
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_PATCH(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ApiClient]:
    client = ApiClient(Configuration(host=url, client_session_kwargs={"trust_env": False}))
    try:
        yield client
    finally:
        await client.close()  # type: ignore[no-untyped-call]


def over_http(url: str, times: int, call: Callable[[ApiClient], Awaitable[int]], expected: int) -> float:
    """Return the CPU seconds of a call that returns `expected`, once its connection is there."""

    async def run() -> float:
        async with connected(url) as client:
            assert await call(client) == expected
            began = time.thread_time()
            for _ in range(times):
                await call(client)
            return (time.thread_time() - began) / times

    return asyncio.run(run())


def cluster(client: ApiClient) -> Cluster:
    return Cluster(client, lambda _: True, lambda _: None, 30.0)


async def list_typed(client: ApiClient) -> int:
    found = await CoreV1Api(client).list_namespaced_pod("default", label_selector=SELECTOR, limit=PODS)
    return len(found.items)


async def list_ours(client: ApiClient) -> int:
    pages = cluster(client).pages(POD, "default", SELECTOR)
    return len([pod_of(document) async for page, _ in pages for document in page])


async def apply_typed(client: ApiClient, manifest: Document) -> int:
    metadata = manifest["metadata"]
    applied = await AppsV1Api(client).patch_namespaced_stateful_set(
        metadata["name"],
        metadata["namespace"],
        manifest,
        field_manager=MANAGER,
        force=True,
        _content_type="application/apply-patch+yaml",
    )
    replicas: int = applied.spec.replicas
    return replicas


async def apply_ours(client: ApiClient, manifest: Document) -> int:
    applied = await cluster(client).apply(manifest, manifest["metadata"]["resourceVersion"])
    replicas: int = applied["spec"]["replicas"]
    return replicas


def in_memory(times: int, read: Callable[[], object]) -> float:
    """Return the CPU seconds of reading a text."""
    began = time.thread_time()
    for _ in range(times):
        read()
    return (time.thread_time() - began) / times


def main() -> int:
    arguments = parser(__doc__, quick="seconds instead of a minute", rounds=9).parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    times = {name: few if arguments.quick else many for name, (many, few) in TIMES.items()}
    owner = stateful_set()
    replicas = owner["spec"]["replicas"]
    running = pods(owner, PODS)
    text = json.dumps({"apiVersion": "v1", "kind": "Pod", **running[0]})
    page = {
        "apiVersion": "v1",
        "kind": "PodList",
        "metadata": {"resourceVersion": "123456"},
        "items": running,
    }
    answers = {"GET": json.dumps(page).encode(), "PATCH": json.dumps(owner).encode()}
    deserialize = partial(ApiClient(Configuration()).deserialize, text, "V1Pod", "application/json")
    assert deserialize().metadata.name == pod_of(orjson.loads(text)).name
    with api_server(answers) as url:
        listed = partial(over_http, url, times["list"], expected=PODS)
        applied = partial(over_http, url, times["apply"], expected=replicas)
        found = in_turn(
            rounds,
            {
                "pod, typed": partial(in_memory, times["pod"], deserialize),
                "pod, ours": partial(in_memory, times["pod"], lambda: pod_of(orjson.loads(text))),
                "list, typed": partial(listed, list_typed),
                "list, ours": partial(listed, list_ours),
                "apply, typed": partial(applied, partial(apply_typed, manifest=owner)),
                "apply, ours": partial(applied, partial(apply_ours, manifest=owner)),
            },
        )
    microseconds = {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in found.items()}
    table(("", "us of CPU"), microseconds.items())
    claims: list[Row] = [
        claim(
            f"{what}, by the operator's client over the typed API",
            ratio(found[f"{name}, ours"], found[f"{name}, typed"]),
            "ratio",
            MOST_OF_TYPED[name],
            peer=f"kubernetes.aio in the same rounds: {microseconds[f'{name}, typed']:.0f} us",
        )
        for name, what in (
            ("pod", "one pod's text"),
            ("list", f"a list of {PODS} pods"),
            ("apply", "an apply of a StatefulSet"),
        )
    ]
    figures = {"microseconds": microseconds, "pod_bytes": len(text), "rounds": rounds}
    return report(claims, arguments.json, figures, strict=True)


if __name__ == "__main__":
    exit_with(main)
