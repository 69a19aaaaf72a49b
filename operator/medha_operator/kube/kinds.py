"""The kinds of objects that the operator reads or writes, and their API paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from medha_operator import gang

MANAGER = "medha-operator"
"""Name under which the operator writes: field manager, label and source of events."""

Manifest = dict[str, Any]
"""An object as JSON."""


OUR_LABELS = {
    "app.kubernetes.io/name": "medha",
    "app.kubernetes.io/part-of": "medha",
    "app.kubernetes.io/managed-by": MANAGER,
}
"""Labels of every object that the operator creates."""


class Key(NamedTuple):
    """Identifier of an object. For our own resources, it is also what the work queue holds."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects."""

    name: str
    api_version: str
    plural: str
    is_namespaced: bool = True

    @property
    def group(self) -> str:
        """API group as RBAC spells it; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object, or without a name that of the collection; no namespace means
        all."""
        parts = ["apis" if self.group else "api", self.api_version]
        if namespace is not None and self.is_namespaced:
            parts += ["namespaces", namespace]
        return "/" + "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])

    def reference(self, name: str, uid: str) -> Manifest:
        """Return the reference by which an object names its owner: the garbage collector deletes it with that one."""
        return {"apiVersion": self.api_version, "kind": self.name, "name": name, "uid": uid}

    def controller(self, name: str, uid: str) -> Manifest:
        """Return an object's reference to its controller, whose foreground deletion waits for that of the object."""
        return self.reference(name, uid) | {"controller": True, "blockOwnerDeletion": True}


REPLICA = Kind("MedhaReplica", "medha.dev/v1alpha1", "medhareplicas")
DEPLOYMENT = Kind("MedhaDeployment", "medha.dev/v1alpha1", "medhadeployments")
POD = Kind("Pod", "v1", "pods")
NODE = Kind("Node", "v1", "nodes", is_namespaced=False)
SECRET = Kind("Secret", "v1", "secrets")
CLAIM = Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims")
VOLUME = Kind("PersistentVolume", "v1", "persistentvolumes", is_namespaced=False)
EVENT = Kind("Event", "v1", "events")
LEASE = Kind("Lease", "coordination.k8s.io/v1", "leases")
CONFIG_MAP = Kind("ConfigMap", "v1", "configmaps")
CHILDREN = (
    Kind("StatefulSet", "apps/v1", "statefulsets"),
    Kind("ControllerRevision", "apps/v1", "controllerrevisions"),
    Kind("Service", "v1", "services"),
    CONFIG_MAP,
    Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
)
"""Kinds that a replica is rendered to, without its Secrets, which the operator may create but not read."""
GANGS = {api: Kind(kind, version, plural) for api, (version, kind, plural) in gang.KINDS.items()}
"""Kind that a gang scheduler reads, by its name in `settings.gang_apis`."""
ROUTER = Kind("Deployment", "apps/v1", "deployments")

KINDS = {
    kind.name: kind
    for kind in (REPLICA, DEPLOYMENT, POD, NODE, SECRET, EVENT, LEASE, *CHILDREN, *GANGS.values(), ROUTER)
}
