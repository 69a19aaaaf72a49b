"""The observed state of the cluster, by the resource of ours that it concerns.

`Index.observe` turns it into facts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from medha_operator.definitions import without_newer_defaults
from medha_operator.deployment.observed_deployment import (
    DEPLOYMENT_LABEL,
    MAY_DRAIN,
    ObservedDeployment,
    StoredTemplate,
    child_index,
    child_of,
)
from medha_operator.kube.kinds import CHILDREN, DEPLOYMENT, GANGS, MANAGER, NODE, POD, REPLICA, Key, Kind
from medha_operator.kube.store import Document, Entry, Store
from medha_operator.replica.manifests import OPEN_SINCE, Owner, keys_name
from medha_operator.replica.observed import Node, Observed, Pod, any_report_since, node_of, pod_of
from medha_operator.replica.revision import Revision
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus

Status = TypeVar("Status", ReplicaStatus, DeploymentStatus)

REPLICA_LABEL = "medha.dev/replica"
_MADE_BY_US = f"app.kubernetes.io/managed-by={MANAGER}"
WATCHED: Mapping[Kind, str] = {
    DEPLOYMENT: "",
    REPLICA: "",
    POD: REPLICA_LABEL,
    **dict.fromkeys(CHILDREN, _MADE_BY_US),
    NODE: "",
}
"""Kinds that every index watches, each with its label selector."""


class Index:
    """A store for each kind. `changed` is called with every resource of ours that must be reconciled.

    `gang_apis` are the gang schedulers whose objects are watched, too.
    """

    def __init__(self, changed: Callable[[Key], None], gang_apis: Iterable[str] = ()) -> None:
        self._changed = changed
        self._children = (*CHILDREN, *(GANGS[api] for api in gang_apis))
        self.watched: Mapping[Kind, str] = {**WATCHED, **dict.fromkeys(self._children, _MADE_BY_US)}
        self.stores: dict[str, Store] = {
            kind.name: Store(_reader(kind), self._node_changed if kind is NODE else self._on_change)
            for kind in self.watched
        }
        self.secrets: dict[str, set[str]] = {}
        """UID of a replica -> names of the Secrets created for it, as far as this process knows."""
        self.waiting_for_capacity: set[Key] = set()
        """Replicas to reconcile when any node changes: it may be the one that they move to."""

    def offer(self, document: Document, quiet: Key | None = None) -> None:
        """Take in an object received elsewhere: in the API server's answer, or from kopf.

        `quiet` is not notified.
        """
        store = self.stores.get(document["kind"])
        if store is not None:
            store.offer(document, quiet)

    def resource(self, key: Key) -> Document | None:
        """Return the document of a resource of ours; None if there is none."""
        for entry in self.stores[key.kind].of(key):
            if entry.document["metadata"]["name"] == key.name and entry.document["kind"] == key.kind:
                found: Document = entry.document
                return found
        return None

    def resources(self, kind: Kind) -> Iterator[tuple[Key, Document]]:
        """Yield key and document of every resource of one of our kinds."""
        for key in self.stores[kind.name].groups():
            if key.kind == kind.name and (document := self.resource(key)) is not None:
                yield key, document

    def observe(self, key: Key) -> Observed | None:
        """Return the observed state of a replica; None if there is none."""
        resource = self.resource(key)
        if resource is None:
            return None
        metadata = resource["metadata"]
        uid = metadata["uid"]
        children = [entry for kind in self._children for entry in self.stores[kind.name].of(key)]
        mine = [entry for entry in children if entry.owner in (uid, None)]
        lanes = {entry.uid for entry in mine if entry.document["kind"] == "StatefulSet"}
        labelled = self.stores[POD.name].of(key)
        name_of_a_pod = re.compile(rf"{re.escape(metadata['name'])}-l\d+-\d+")
        pods = tuple(
            entry.document
            for entry in labelled
            # Pods that a deleted StatefulSet has left behind have no owner. Neither have copies that somebody makes of a
            # pod, such as `kubectl debug --copy-to`, but those have names of their own.
            if entry.owner in lanes or (entry.owner is None and name_of_a_pod.fullmatch(entry.document.name))
        )
        earlier = tuple(entry.document for entry in labelled if entry.owner not in (None, *lanes))
        objects = {_kind_and_name(entry.document): entry.document for entry in mine}
        objects |= {("Secret", name): {} for name in self.secrets.get(uid, ())}
        # A pod that has started had its keys. A pod left behind by an earlier replica of the name mounts
        # other ones.
        keys = keys_name(Owner(metadata["name"], metadata["namespace"], uid))
        if any(pod.is_started and keys in pod.secrets for pod in pods):
            objects["Secret", keys] = {}
        owner = _controller(metadata)
        nodes = self._nodes((*pods, *earlier))
        is_any_silent = any(node.unreachable_since is not None for node in nodes.values())
        return Observed(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=uid,
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            spec=resource["spec"],
            status=read_status(resource, ReplicaStatus),
            is_deleting="deletionTimestamp" in metadata,
            deployment=owner["name"] if owner is not None and owner["kind"] == DEPLOYMENT.name else None,
            may_drain=metadata.get("annotations", {}).get(MAY_DRAIN),
            objects=objects,
            revisions=tuple(_revisions(mine, metadata["name"])),
            pods=pods,
            earlier_pods=earlier,
            nodes=nodes,
            any_report_since=any_report_since(self.nodes().values()) if is_any_silent else None,
        )

    def observe_deployment(self, key: Key) -> ObservedDeployment | None:
        """Return the observed state of a deployment; None if there is none."""
        resource = self.resource(key)
        if resource is None:
            return None
        metadata = resource["metadata"]
        uid = metadata["uid"]
        kept = [entry for entry in self.stores["ControllerRevision"].of(key) if entry.owner in (uid, None)]
        replicas = [entry.document for entry in self.stores[REPLICA.name].of(key)]
        return ObservedDeployment(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=uid,
            generation=metadata["generation"],
            resource_version=metadata["resourceVersion"],
            spec=resource["spec"],
            status=read_status(resource, DeploymentStatus),
            is_deleting="deletionTimestamp" in metadata,
            children=tuple(
                child_of(document, index, uid, self._revisions_of(document))
                for document in replicas
                if (index := child_index(metadata["name"], document["metadata"]["name"])) is not None
            ),
            templates=tuple(_templates(kept, metadata["name"])),
        )

    def _revisions_of(self, replica: Document) -> Iterator[Revision]:
        """Return the kept revisions of a replica."""
        metadata = replica["metadata"]
        key = Key(REPLICA.name, metadata["namespace"], metadata["name"])
        kept = self.stores["ControllerRevision"].of(key)
        return _revisions(
            (entry for entry in kept if entry.owner in (metadata["uid"], None)), metadata["name"]
        )

    def leftovers(self, key: Key, uid: str) -> list[str]:
        """Return the objects of an earlier resource of this name that are not garbage-collected yet."""
        return [
            "/".join(_kind_and_name(entry.document))
            for kind in self._children
            for entry in self.stores[kind.name].of(key)
            if entry.owner is not None and entry.owner != uid and _is_ours(entry.document)
        ]

    def forget_secrets(self) -> None:
        """Forget the Secrets of replicas whose pods have a node and do not start: one may be missing.

        For other replicas nobody would notice a missing Secret, and creating it again would cost a write for
        each of them.
        """
        kept = {}
        for key, resource in self.resources(REPLICA):
            uid = resource["metadata"]["uid"]
            pods = [entry.document for entry in self.stores[POD.name].of(key)]
            if uid in self.secrets and not any(pod.is_scheduled and not pod.is_started for pod in pods):
                kept[uid] = self.secrets[uid]
        self.secrets = kept

    def _nodes(self, pods: Iterable[Pod]) -> Mapping[str, Node]:
        names = {pod.node for pod in pods if pod.node}
        return {
            name: entry.document
            for name in names
            for entry in self.stores[NODE.name].of(Key(NODE.name, "", name))
        }

    def nodes(self) -> Mapping[str, Node]:
        """Return every node of the cluster by its name, as far as the operator may see them."""
        store = self.stores[NODE.name]
        return {node.name: entry.document for node in store.groups() for entry in store.of(node)}

    def pod_uids(self) -> Set[str]:
        """Return the UIDs of the pods of all replicas."""
        store = self.stores[POD.name]
        return {entry.uid for key in store.groups() for entry in store.of(key)}

    def to_be_placed(self, key: Key, leaving: Set[Key]) -> Iterator[Document]:
        """Yield the templates of pods that are yet to find a node, of replicas other than `key`.

        They come in the order of the replicas' names. For a replica that leaves its node (it is one of `leaving`, or
        its budget is open), all pods are included.
        """
        for other, _ in sorted(self.resources(REPLICA)):
            if other == key:
                continue
            sets, budgets = (
                [entry.document for entry in self.stores[kind].of(other)]
                for kind in ("StatefulSet", "PodDisruptionBudget")
            )
            is_open = any(OPEN_SINCE in one["metadata"].get("annotations", {}) for one in budgets)
            pods = (
                []
                if is_open or other in leaving
                else [entry.document for entry in self.stores[POD.name].of(other)]
            )
            staying = {pod.name for pod in pods if pod.node is not None and not pod.is_deleting}
            for one in sets:
                for ordinal in range(one["spec"]["replicas"]):
                    if f"{one['metadata']['name']}-{ordinal}" not in staying:
                        yield one["spec"]["template"]

    def _on_change(self, key: Key) -> None:
        if key.kind != NODE.name:  # a pod is filed under its node only to be found by it
            self._changed(key)

    def _node_changed(self, node: Key) -> None:
        for key in tuple(self.waiting_for_capacity):
            self._on_change(key)
        for entry in self.stores[POD.name].of(node):
            for key in entry.concerns:
                self._on_change(key)


def read_status(resource: Document, model: type[Status]) -> Status:
    """Return the status as written, without fields of other releases; an empty one if it is invalid."""
    names = {field.alias for field in model.model_fields.values()}
    found = {name: value for name, value in resource.get("status", {}).items() if name in names}
    try:
        return model.model_validate(found)
    except ValidationError:
        return model()


def _revisions(entries: Iterable[Entry], replica: str) -> Iterator[Revision]:
    for entry in entries:
        document = entry.document
        if document["kind"] == "ControllerRevision" and "fields" in document.get("data", {}):
            data = document["data"]
            name = document["metadata"]["name"].removeprefix(f"{replica}-")
            yield Revision(name, document["revision"], data["fields"], tuple(data["templates"]))


def _templates(entries: Iterable[Entry], deployment: str) -> Iterator[StoredTemplate]:
    for entry in entries:
        document = entry.document
        if "template" in document.get("data", {}):
            metadata = document["metadata"]
            yield StoredTemplate(
                name=metadata["name"].removeprefix(f"{deployment}-"),
                number=document["revision"],
                template=document["data"]["template"],
                uid=metadata["uid"],
                resource_version=metadata["resourceVersion"],
                is_deleting="deletionTimestamp" in metadata,
            )


# --- entries of each kind -------------------------------------------------------------------------------


def _reader(kind: Kind) -> Callable[[Document], Entry]:
    if kind is POD:
        return _pod
    if kind is NODE:
        return _node
    return _resource if kind in (REPLICA, DEPLOYMENT) else _child


def _resource(document: Document) -> Entry:
    metadata = document["metadata"]
    concerns = [Key(document["kind"], metadata["namespace"], metadata["name"])]
    stem = metadata["name"].rpartition("-")[0]
    if document["kind"] == REPLICA.name and child_index(stem, metadata["name"]) is not None:
        # It has a name of that deployment's, whoever owns it.
        concerns.append(Key(DEPLOYMENT.name, metadata["namespace"], stem))
    known = without_newer_defaults(document)
    return _entry(metadata, concerns, facts=metadata["resourceVersion"], document=_stored(known))


def _child(document: Document) -> Entry:
    """Return the entry of a StatefulSet or the like, without its status, which pods report better.

    The observed generation of a changed StatefulSet is kept: it shows whether its controller has seen the change.
    """
    metadata = document["metadata"]
    kept = {name: value for name, value in _stored(document).items() if name != "status"}
    if document["kind"] == "StatefulSet" and metadata.get("generation", 1) > 1:
        kept["status"] = {"observedGeneration": document.get("status", {}).get("observedGeneration", 0)}
    facts = kept | {"metadata": {**kept["metadata"], "resourceVersion": ""}}
    concerns = _labelled(metadata, REPLICA_LABEL, REPLICA) or _labelled(
        metadata, DEPLOYMENT_LABEL, DEPLOYMENT
    )
    return _entry(metadata, concerns, facts=facts, document=kept)


def _pod(document: Document) -> Entry:
    metadata = document["metadata"]
    pod = pod_of(document)
    concerns = _labelled(metadata, REPLICA_LABEL, REPLICA)
    if pod.node is not None:
        concerns.append(Key(NODE.name, "", pod.node))
    return _entry(metadata, concerns, facts=replace(pod, resource_version=""), document=pod)


def _node(document: Document) -> Entry:
    metadata, node = document["metadata"], node_of(document)
    return _entry(metadata, [Key(NODE.name, "", metadata["name"])], facts=node, document=node)


def _entry(metadata: Document, concerns: list[Key], *, facts: Any, document: Any) -> Entry:
    owner = _controller(metadata)
    return Entry(
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
        concerns=tuple(concerns),
        owner=owner["uid"] if owner is not None else None,
        facts=facts,
        document=document,
    )


def _labelled(metadata: Document, label: str, kind: Kind) -> list[Key]:
    name = metadata.get("labels", {}).get(label)
    return [Key(kind.name, metadata["namespace"], name)] if name else []


def _stored(document: Document) -> dict[str, Any]:
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    return {**document, "metadata": metadata}


def _controller(metadata: Document) -> Document | None:
    owners: Iterable[Document] = metadata.get("ownerReferences", ())
    return next((owner for owner in owners if owner.get("controller")), None)


def _is_ours(document: Document) -> bool:
    owner = _controller(document["metadata"])
    return owner is not None and owner["kind"] == REPLICA.name


def _kind_and_name(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]
