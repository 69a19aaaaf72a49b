"""An API server in memory, as far as a reconcile needs it: resourceVersions, conflicts, and planned refusals."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from medha_operator.index import Index
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import Key, Kind
from medha_operator.kube.workqueue import WorkQueue
from medha_operator.operator_metrics import Telemetry
from medha_operator.operator_settings import OperatorSettings
from medha_operator.program import least_pause
from medha_operator.reconciler import Reconciler

Document = dict[str, Any]
GRID = {"model": {"name": "m", "source": {"path": "x"}}, "resources": {"accelerator": "none"}}


class FakeCluster:
    """A `Cluster` whose objects are in a dictionary. `refuse` gets verb and kind of each write, and may raise."""

    def __init__(self, refuse: Callable[[str, str], None] = lambda verb, kind: None) -> None:
        self.refuse = refuse
        self.objects: dict[tuple[str, str, str], Document] = {}
        self.calls: list[tuple[str, str]] = []
        """Verb and kind of every call, refused ones too."""
        self.notice: list[str] = []
        """Reasons of events."""
        self._version = 100

    def calls_of(self, verb: str, kind: str = "") -> int:
        return sum(call[0] == verb and kind in ("", call[1]) for call in self.calls)

    def put(self, document: Mapping[str, Any]) -> Document:
        """Store an object, as a write by somebody else does."""
        self._version += 1
        kept = copy.deepcopy(dict(document))
        metadata = kept["metadata"]
        before = self.objects.get(_name(kept))
        metadata |= {
            "resourceVersion": str(self._version),
            "uid": before["metadata"]["uid"] if before else metadata.get("uid", f"u{self._version}"),
            "creationTimestamp": "2030-01-01T00:00:00Z",
        }
        if "spec" in kept and "generation" not in metadata:
            metadata["generation"] = 1
        self.objects[_name(kept)] = kept
        return copy.deepcopy(kept)

    def _begin(self, verb: str, kind: str) -> None:
        self.calls.append((verb, kind))
        if verb != "get":
            self.refuse(verb, kind)

    async def get(self, kind: Kind, namespace: str, name: str) -> Document | None:
        self._begin("get", kind.name)
        return copy.deepcopy(self.objects.get((kind.name, namespace, name)))

    async def list(
        self, kind: Kind, namespace: str | None, selector: str, fields: str = ""
    ) -> list[Document]:
        self._begin("list", kind.name)
        return [
            copy.deepcopy(one)
            for (of, home, _), one in self.objects.items()
            if of == kind.name
            and namespace in (None, home)
            and all(_has(one["metadata"].get("labels", {}), term) for term in selector.split(",") if term)
            and all(_has(_fields(one), term) for term in fields.split(",") if term)
        ]

    async def pages(self, *asked: Any) -> AsyncIterator[tuple[list[Document], str]]:
        yield await self.list(*asked), str(self._version)

    async def apply(self, manifest: Document, version: str | None = None) -> Document:
        self._begin("apply", manifest["kind"])
        found = self.objects.get(_name(manifest), {"metadata": {}})["metadata"]
        if version is None and found.get("labels", {}) != manifest["metadata"].get("labels", {}) and found:
            raise ApiError(409, "Conflict", "conflict with another manager")
        if version is not None and version != found.get("resourceVersion"):
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.put(manifest)

    async def patch(self, key: Key, patch: Mapping[str, Any], uid: str, version: str) -> Document:
        self._begin("patch", key.kind)
        found = self.objects[key]
        if (found["metadata"]["uid"], found["metadata"]["resourceVersion"]) != (uid, version):
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.put(merged(found, patch))

    async def create(self, manifest: Document) -> Document | None:
        self._begin("create", manifest["kind"])
        return None if _name(manifest) in self.objects else self.put(manifest)

    async def merge(self, key: Key, patch: Document) -> Document:
        self._begin("merge", key.kind)
        found = self.objects[key]
        data = {**found.get("data", {}), **patch["data"]}
        return self.put(found | {"data": {name: text for name, text in data.items() if text is not None}})

    async def delete(self, key: Key, uid: str, version: str, *, is_forced: bool = False) -> bool:
        self._begin("delete", key.kind)
        return self.objects.pop((key.kind, key.namespace, key.name), None) is not None

    async def write_status(self, key: Key, metadata: Document, status: Document) -> Document:
        self._begin("status", key.kind)
        found = self.objects.get((key.kind, key.namespace, key.name))
        if found is None:
            raise ApiError(404, "NotFound", "there is none")
        if found["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.put(found | {"status": status})

    async def record_event(self, about: Document, reason: str, message: str, **_: Any) -> None:
        self._begin("record", "Event")
        self.notice.append(reason)


class Stage:
    """A reconciler with a fake cluster, and a queue that only `work` takes keys from."""

    def __init__(self, cluster: FakeCluster, settings: OperatorSettings | None = None) -> None:
        self.queue = WorkQueue(lambda: 0.0)  # no reconcile takes time, so no key rests
        self.settings = settings or OperatorSettings()
        self.index = Index(self.queue.add, self.settings.gang_apis)
        self.cluster = cluster
        self.now = 1893456000.0
        """Unix time, seconds."""
        self.restart()

    def restart(self) -> None:
        """Continue with a new reconciler, which remembers nothing."""
        self.reconciler = Reconciler(
            cast(Cluster, self.cluster),
            self.index,
            self.settings,
            Telemetry(self.index, self.queue),
            holder="test",
            now=lambda: self.now,
        )

    def see(self, document: Document) -> Key:
        """Store a resource and report it to the index."""
        self.index.offer(stored := self.cluster.put(document))
        return Key(stored["kind"], stored["metadata"]["namespace"], stored["metadata"]["name"])

    def lose(self, *kinds: str) -> None:
        """Delete every object of these kinds and report that to the index."""
        for key in [key for key in self.cluster.objects if key[0] in kinds]:
            gone = self.cluster.put(self.cluster.objects[key])  # a deletion has a version of its own
            del self.cluster.objects[key]
            self.index.stores[key[0]].see("DELETED", gone)

    async def work(self, most_reconciles: int = 20) -> list[float]:
        """Reconcile until nothing is due now; return the back-offs of the reconciles that failed."""
        pauses: list[float] = []
        for _ in range(most_reconciles):
            if not len(self.queue):
                break
            key, _ = await self.queue.take()
            try:
                result = await self.reconciler.reconcile(key)
            except ApiError as error:
                pauses.append(self.queue.failed(key, least_pause(error)))
            except ValueError:  # a mistake that a test has planted
                pauses.append(self.queue.failed(key))
            else:
                self.queue.done(key, makes_progress=result.makes_progress)
                if result.writes:
                    self.queue.add(key)
        return pauses

    def condition(self, key: Key, kind: str = "Ready") -> tuple[str, str, str]:
        """Return status, reason and message of a condition of the stored resource."""
        status = self.cluster.objects[key].get("status", {})
        for one in status.get("conditions", ()):
            if one["type"] == kind:
                return one["status"], one["reason"], one["message"]
        return "", "", ""


def resource(kind: str, spec: Mapping[str, Any] = GRID, name: str = "r") -> Document:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "medha.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": dict(spec)}


def _name(document: Mapping[str, Any]) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata["namespace"], metadata["name"]


def merged(found: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """Return `found` with a merge patch applied (RFC 7386)."""
    result = dict(found)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            here = result.get(name)
            result[name] = merged(here if isinstance(here, Mapping) else {}, value)
        else:
            result[name] = value
    return result


def _has(values: Mapping[str, Any], term: str) -> bool:
    name, _, wanted = term.partition("=")
    if name.endswith("!"):
        return bool(values.get(name[:-1]) != wanted)
    return bool((values.get(name) or "") == wanted)


def _fields(document: Document) -> Document:
    """Return the fields that a field selector can name, by their dotted names."""
    flat: Document = {}

    def flatten(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{name}.")
            elif isinstance(value, str):
                flat[prefix + name] = value

    flatten(document, "")
    return flat
