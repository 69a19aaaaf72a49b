"""Campaign (f): change every field of our resources, set it to invalid values and restore it.

It runs on a real API server. After each change the cluster must be a pure function of the spec: exactly the
objects that `plan` renders in an empty namespace, pods of one revision and no more, and no pod touched by a
field that is `live`. An invalid value must be refused with a message that names the field, and change
nothing. Once the value is restored, the same children must be there as before.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import httpx

from campaign.mutations import Mutation, changed, mutations
from cluster.api import Api, Document, condition, eventually
from medha_operator.deployment.observed_deployment import ObservedDeployment
from medha_operator.deployment.plan_deployment import plan_deployment
from medha_operator.kube.kinds import DEPLOYMENT, POD, REPLICA, SECRET, Kind
from medha_operator.kube.manifest_overlay import holds
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Action, Apply
from medha_operator.replica.observed import Observed
from medha_operator.replica.plan import plan
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus

NAMESPACE = Kind("Namespace", "v1", "namespaces", is_namespaced=False)
RUNTIME_CLASS = Kind("RuntimeClass", "node.k8s.io/v1", "runtimeclasses", is_namespaced=False)
_SECONDS = 30.0
_VARYING = ("resourceVersion", "managedFields", "creationTimestamp", "generation", "uid")
_LASTING = ("Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet")
"""Kinds whose objects a replica keeps through a change and its revert: same UID, not only same name."""


class Violation(AssertionError):
    """A promise that a mutation broke."""


class SchemaCampaign:
    """Tries mutations in one namespace, each on a resource of its own."""

    def __init__(self, api: Api, namespace: str, settings: OperatorSettings) -> None:
        self._api = api
        self._namespace = namespace
        self._settings = settings
        self.changes = 0
        """Specs that were applied and converged."""
        self.refusals = 0
        """Specs that the API server refused, as it should."""

    def run(self, chosen: Iterable[Mutation], *, threads: int = 2) -> Iterator[tuple[Mutation, str]]:
        """Yield each mutation with its violation as text (empty if none), as they end, `threads` at a time.

        The next one is taken from `chosen` only when it can start, so `chosen` may end by the clock.
        """
        numbered = enumerate(chosen)
        with ThreadPoolExecutor(threads) as pool:
            trying = {pool.submit(self._tried, one) for one in islice(numbered, threads)}
            while trying:
                done, trying = wait(trying, return_when=FIRST_COMPLETED)
                trying |= {pool.submit(self._tried, one) for one in islice(numbered, len(done))}
                for tried in done:
                    yield tried.result()

    def _tried(self, numbered: tuple[int, Mutation]) -> tuple[Mutation, str]:
        number, mutation = numbered
        try:
            self.try_out(mutation, f"f{number}")
        except (AssertionError, httpx.HTTPError) as error:
            return mutation, str(error)
        return mutation, ""

    def try_out(self, mutation: Mutation, name: str) -> None:
        """Change the field to each of its values and back; invalid ones must be refused.

        Raises:
            Violation, AssertionError: a promise was broken.
        """
        first = self._apply(mutation, name, mutation.base)
        before = self._children(name)
        for value in mutation.invalid:
            self._must_be_refused(mutation, name, value, first["metadata"]["generation"])
        for value in mutation.valid:
            spec = changed(mutation.base, mutation.path, value)
            if mutation.is_fixed and value["gang"] != "none":
                self._must_be_refused(mutation, name, value, first["metadata"]["generation"])
                self._apply(mutation, f"{name}-new", spec)
                self._remove(mutation, f"{name}-new")
                continue
            pods = self._pod_uids(name)
            self._apply(mutation, name, spec)
            if _is_live(mutation) and pods != self._pod_uids(name):
                raise Violation(f"{value!r} ended pods, and the field is live")
            self._apply(mutation, name, mutation.base)
            after = self._children(name)
            if after != before:
                raise Violation(f"after {value!r} was put back: {_difference(before, after)}")
        self._remove(mutation, name)

    # --- steps ------------------------------------------------------------------------------------------

    def _apply(self, mutation: Mutation, name: str, spec: Document) -> Document:
        """Apply, and wait until the cluster matches the spec."""
        kind = REPLICA if mutation.kind == REPLICA.name else DEPLOYMENT
        self._api.apply(
            {
                "apiVersion": kind.api_version,
                "kind": kind.name,
                "metadata": {"name": name, "namespace": self._namespace},
                "spec": spec,
            }
        )
        self.changes += 1
        try:
            eventually(lambda: self._misses(kind, name), lambda misses: not misses, _SECONDS)
        except AssertionError as error:
            raise Violation(f"{spec!r:.600}: {error}") from error
        found = self._api.get(kind, name, self._namespace)
        assert found is not None
        return found

    def _must_be_refused(self, mutation: Mutation, name: str, value: Any, generation: int) -> None:
        kind = REPLICA if mutation.kind == REPLICA.name else DEPLOYMENT
        document = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": name, "namespace": self._namespace},
            "spec": changed(mutation.base, mutation.path, value),
        }
        try:
            self._api.apply(document)
        except httpx.HTTPStatusError as error:
            words = str(error)
            if ".spec" not in words and "spec." not in words:
                raise Violation(f"{value!r} was refused in words that name no field: {words}") from error
        else:
            raise Violation(f"{value!r} was accepted")
        found = self._api.get(kind, name, self._namespace)
        if found is None or found["metadata"]["generation"] != generation:
            raise Violation(f"{value!r} was refused and yet changed the resource")
        self.refusals += 1

    def _remove(self, mutation: Mutation, name: str) -> None:
        kind = REPLICA if mutation.kind == REPLICA.name else DEPLOYMENT
        self._api.delete(kind, name, self._namespace)
        # The garbage collector discovers new kinds only twice a minute.
        eventually(lambda: self._everything(name), lambda left: not left, 3 * _SECONDS)

    # --- observed state ---------------------------------------------------------------------------------

    def _misses(self, kind: Kind, name: str) -> str:
        """Describe how the cluster differs from the plan; empty when it has converged."""
        resource = self._api.get(kind, name, self._namespace)
        assert resource is not None
        if kind is REPLICA:
            return self._replica_misses(resource)
        wanted = [one for one in self._planned_deployment(resource) if one["kind"] == REPLICA.name]
        present = {one["metadata"]["name"]: one for one in self._replicas(name)}
        if {one["metadata"]["name"] for one in wanted} != present.keys():
            return f"replicas {sorted(present)} of {[one['metadata']['name'] for one in wanted]}"
        for one in wanted:
            here = present[one["metadata"]["name"]]
            if not holds(here, one):
                return f"replica {here['metadata']['name']} differs"
            if misses := self._replica_misses(here):
                return misses
        return _status_misses(resource, ("Complete", "Paused", "WaitingForMinReady"))

    def _replica_misses(self, resource: Document) -> str:
        name, spec = resource["metadata"]["name"], resource["spec"]
        wanted = {
            (one["kind"], one["metadata"]["name"]): one
            for one in self._planned_replica(resource)
            if one["kind"] != "ControllerRevision"
        }
        present = {
            key: one
            for key, one in self._api.owned(name, self._namespace).items()
            if key[0] not in ("ControllerRevision", "Secret", "Pod")
        }
        if wanted.keys() != present.keys():
            return f"objects {sorted(wanted.keys() ^ present.keys())} are missing or too much"
        differing = [key for key, one in wanted.items() if not holds(present[key], one)]
        if differing:
            return f"{differing} differ"
        shape = spec["parallelism"]
        expected = 0 if spec["suspend"] else shape["stream"] * shape["kv"]
        pods = self._pods(name)
        revisions = {pod["metadata"]["labels"]["medha.dev/revision"] for pod in pods}
        if len(pods) != expected or len(revisions) > 1:
            return f"{len(pods)} of {expected} pods, of revisions {revisions}"
        return _status_misses(resource, ("Serving", "Suspended"))

    def _planned_replica(self, resource: Document) -> Iterator[Document]:
        observed = Observed(
            **_identity(resource), spec=resource["spec"], status=ReplicaStatus(), deployment=None
        )
        return _applied(plan(observed, 0.0, self._settings).actions)

    def _planned_deployment(self, resource: Document) -> Iterator[Document]:
        observed = ObservedDeployment(**_identity(resource), spec=resource["spec"], status=DeploymentStatus())
        return _applied(plan_deployment(observed, 0.0, self._settings).actions)

    def _children(self, name: str) -> dict[str, Document]:
        """Return the resource's objects, without the fields in which two equal objects may differ."""
        found = {}
        for (kind, own_name), document in self._everything(name).items():
            if kind in ("Pod", "ControllerRevision", "Secret"):
                continue
            metadata = {key: value for key, value in document["metadata"].items() if key not in _VARYING}
            if kind in _LASTING and document["metadata"]["labels"]["medha.dev/replica"] == name:
                metadata["uid"] = document["metadata"]["uid"]
            kept = {key: value for key, value in document.items() if key not in ("status", "metadata")}
            found[f"{kind} {own_name}"] = {**kept, "metadata": metadata}
        text = json.dumps(found, sort_keys=True)
        for one in self._replicas(name):  # a deployment may have recreated them
            uid = one["metadata"]["uid"]
            text = text.replace(uid, "UID").replace(f"keys-{uid[:8]}", "keys-UID")
        same: dict[str, Document] = json.loads(text)
        return same

    def _everything(self, name: str) -> dict[tuple[str, str], Document]:
        found = self._api.owned(name, self._namespace)
        for one in self._replicas(name):
            own_name = one["metadata"]["name"]
            found[REPLICA.name, own_name] = one
            found |= self._api.owned(own_name, self._namespace)
        return found

    def _replicas(self, deployment: str) -> list[Document]:
        return self._api.list(REPLICA, self._namespace, f"medha.dev/deployment={deployment}")

    def _pods(self, replica: str) -> list[Document]:
        return self._api.list(POD, self._namespace, f"medha.dev/replica={replica}")

    def _pod_uids(self, name: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self._pods(name)}


def make_ground(api: Api, namespace: str) -> None:
    """Create a campaign's namespace, and what its values name: RuntimeClasses, and routers' Secrets elsewhere."""
    api.namespace(namespace)
    for runtime in ("nvidia", "kata"):
        if api.get(RUNTIME_CLASS, runtime) is None:
            body = {"metadata": {"name": runtime}, "handler": runtime}
            api.call("POST", RUNTIME_CLASS.path(None), body)
    for router in ("first", "second"):
        if api.get(NAMESPACE, router) is None:
            api.namespace(router)
        body = {"metadata": {"name": "router-enrolment"}, "data": {"token": "dA==", "router.pub": "cA=="}}
        if api.get(SECRET, "router-enrolment", router) is None:
            api.call("POST", SECRET.path(router), body)


def trials(seed: int | None = None) -> list[Mutation]:
    """Return all mutations; with a seed, in random order."""
    found = [one for kind in (REPLICA, DEPLOYMENT) for one in mutations(kind.name)]
    if seed is not None:
        random.Random(seed).shuffle(found)
    return found


def until(deadline: float, found: Iterable[Mutation]) -> Iterator[Mutation]:
    """Yield from `found` until `deadline` of the monotonic clock."""
    for mutation in found:
        if time.monotonic() >= deadline:
            return
        yield mutation


def _status_misses(resource: Document, reasons: tuple[str, ...]) -> str:
    generation, status = resource["metadata"]["generation"], resource.get("status", {})
    reason = condition(resource)[1]
    if status.get("observedGeneration") != generation or reason not in reasons:
        return f"its status is {reason!r} for generation {status.get('observedGeneration')} of {generation}"
    return ""


def _identity(resource: Document) -> dict[str, Any]:
    metadata = resource["metadata"]
    return {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "uid": metadata["uid"],
        "generation": metadata["generation"],
        "resource_version": metadata["resourceVersion"],
    }


def _applied(actions: Iterable[Action]) -> Iterator[Document]:
    return (action.manifest for action in actions if isinstance(action, Apply))


def _is_live(mutation: Mutation) -> bool:
    return mutation.applied in ("live", "epoch") and mutation.path != "suspend"


def _difference(before: dict[str, Document], after: dict[str, Document]) -> str:
    if before.keys() != after.keys():
        return f"{sorted(before.keys() ^ after.keys())} are missing or too much"
    return "; ".join(
        f"{name} was {before[name]!r:.400} and is {after[name]!r:.400}"
        for name in before
        if before[name] != after[name]
    )
