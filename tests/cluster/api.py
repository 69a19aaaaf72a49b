"""A client of the API server for tests: plain calls, faster than running kubectl for each."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from cluster.control_plane import ControlPlane
from cluster.keys import ADMIN
from medha_operator.kube.kinds import CHILDREN, DEPLOYMENT, EVENT, LEASE, POD, REPLICA, SECRET, Kind

Document = dict[str, Any]
T = TypeVar("T")

OWNED = (*CHILDREN, SECRET, POD)
"""Kinds of the objects that belong to a replica."""


class Api:
    """Calls as a user with all rights, or as the user that it impersonates."""

    def __init__(self, plane: ControlPlane, user: str | None = None) -> None:
        context = ssl.create_default_context(cafile=str(plane.keys.authority))
        context.load_cert_chain(*plane.keys.client(*ADMIN))
        headers = {} if user is None else {"Impersonate-User": user}
        self._client = httpx.Client(base_url=plane.url, verify=context, timeout=20, headers=headers)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def call(self, method: str, path: str, body: object = None, **query: str) -> Document:
        """Make a call; an error status raises `httpx.HTTPStatusError`."""
        kind = {"PATCH": "application/merge-patch+json"}.get(method, "application/json")
        if query.get("fieldManager") == "user":
            kind = "application/apply-patch+yaml"
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind}
        try:
            answer = self._client.request(method, path, content=content, params=query, headers=headers)
        except httpx.RemoteProtocolError:  # the server has just closed the idle connection
            if method != "GET":
                raise
            answer = self._client.request(method, path, content=content, params=query, headers=headers)
        if answer.status_code == 429 and method == "GET":  # storage of a new definition is being initialised
            time.sleep(1.0)
            return self.call(method, path, body, **query)
        if answer.status_code >= 400:
            message = f"{method} {path}: {answer.status_code} {answer.text}"
            raise httpx.HTTPStatusError(message, request=answer.request, response=answer)
        found: Document = answer.json()
        return found

    def text(self, path: str) -> str:
        """Return the text at a path of the API server, such as its metrics."""
        return self._client.get(path).raise_for_status().text

    def apply(self, document: Document) -> Document:
        """Apply a document server-side, as the field manager `user`."""
        kind = REPLICA if document["kind"] == REPLICA.name else DEPLOYMENT
        metadata = document["metadata"]
        path = kind.path(metadata.get("namespace", "default"), metadata["name"])
        return self.call("PATCH", path, document, fieldManager="user", force="true")

    def get(self, kind: Kind, name: str, namespace: str = "default") -> Document | None:
        try:
            return self.call("GET", kind.path(namespace, name))
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404:
                return None
            raise

    def list(self, kind: Kind, namespace: str | None = "default", selector: str = "") -> list[Document]:
        items = self.call("GET", kind.path(namespace), labelSelector=selector)["items"] or []
        return [{"kind": kind.name, "apiVersion": kind.api_version} | item for item in items]

    def version(self, kind: Kind, namespace: str | None = "default") -> str:
        """Return a resourceVersion from which a watch misses no event after this call."""
        found: str = self.call("GET", kind.path(namespace), limit="1")["metadata"]["resourceVersion"]
        return found

    def events(
        self, kind: Kind, namespace: str | None, version: str, idle_seconds: float
    ) -> Iterator[Document]:
        """Yield events after `version`, until none has come for `idle_seconds`."""
        query = {"watch": "true", "resourceVersion": version}
        waits = httpx.Timeout(20, read=idle_seconds)
        while True:
            with suppress(httpx.ReadTimeout):  # the server is slow to answer: try again
                with self._client.stream("GET", kind.path(namespace), params=query, timeout=waits) as answer:
                    try:
                        for line in answer.raise_for_status().iter_lines():
                            yield json.loads(line)
                    except httpx.ReadTimeout:
                        pass
                return

    def delete(self, kind: Kind, name: str, namespace: str = "default") -> None:
        self.call("DELETE", kind.path(namespace, name))

    def namespace(self, name: str) -> str:
        """Create a namespace and return its name."""
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def owned(self, replica: str, namespace: str) -> dict[tuple[str, str], Document]:
        """Return objects with the replica's label by kind and name; of StatefulSets' objects, only pods."""
        found = {}
        for kind in OWNED:
            for item in self.list(kind, namespace, f"medha.dev/replica={replica}"):
                owners = item["metadata"].get("ownerReferences", [])
                if kind is POD or all(owner["kind"] != "StatefulSet" for owner in owners):
                    found[kind.name, item["metadata"]["name"]] = item
        return found

    def versions(self) -> dict[str, str]:
        """Return the resourceVersion of every object that an operator could write."""
        kinds = (*OWNED, REPLICA, DEPLOYMENT, EVENT, LEASE)
        return {
            f"{kind.name} {item['metadata']['namespace']}/{item['metadata']['name']}": item["metadata"][
                "resourceVersion"
            ]
            for kind in kinds
            for item in self.list(kind, None)
        }


def eventually(look: Callable[[], T], holds: Callable[[T], object] = bool, seconds: float = 30.0) -> T:
    """Poll `reconcile` until its result `holds`, and return it; an AssertionError shows the last result."""
    deadline = time.monotonic() + seconds
    while not holds(seen := look()):
        assert time.monotonic() < deadline, f"after {seconds:g} s still: {seen!r:.3000}"
        time.sleep(0.05)
    return seen


def condition(resource: Document | None, kind: str = "Ready") -> tuple[str, str]:
    """Return status and reason of a condition."""
    conditions = (resource or {}).get("status", {}).get("conditions")
    for entry in conditions or ():  # null in a new definition
        if entry["type"] == kind:
            return entry["status"], entry["reason"]
    return "Unknown", ""


class PlayedKubelets:
    """Simulated kubelets: they report every pod of ours as running and ready, without node or container."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self.held: set[str] = set()
        """Namespaces whose pods are left as they are."""

    def __enter__(self) -> PlayedKubelets:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._ended.wait(0.1):
            for pod in self._api.list(POD, None, "medha.dev/replica"):
                if (
                    "containerStatuses" not in pod.get("status", {})
                    and "deletionTimestamp" not in pod["metadata"]
                    and pod["metadata"]["namespace"] not in self.held
                ):
                    self._start(pod)

    def _start(self, pod: Document) -> None:
        metadata = pod["metadata"]
        path = POD.path(metadata["namespace"], metadata["name"], "status")
        with suppress(httpx.HTTPStatusError):  # it may have been deleted meanwhile
            self._api.call("PATCH", path, {"metadata": {"uid": metadata["uid"]}, "status": running(pod)})


def running(pod: Document) -> Document:
    """Return the status of a pod whose containers are all started and ready."""
    containers = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": "2030-01-01T00:00:00Z"}},
        }
        for container in pod["spec"]["containers"]
    ]
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": None} for kind in kinds]
    return {"phase": "Running", "conditions": conditions, "containerStatuses": containers}
