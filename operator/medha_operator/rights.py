"""Everything that the operator may do, as rules of RBAC. The chart's roles say the same; a test compares the two.

What is watched can be read, and events, which tell why pods are not made or do not start; Secrets can be made and, those of replicas, never read. Nothing of a user's resource can
be written but its status.
"""

from __future__ import annotations

from medha_operator.declared import models_key
from medha_operator.kube.kinds import (
    CHILDREN,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    GANGS,
    LEASE,
    NODE,
    POD,
    REPLICA,
    ROUTER,
    SECRET,
    VOLUME,
    Kind,
)
from medha_operator.settings import OperatorSettings, RouterSite

Rule = dict[str, list[str]]

_SEE = ["list", "watch"]
_WATCH = ["get", *_SEE]
_DELETED = frozenset({"StatefulSet", "ControllerRevision", "ConfigMap"})
"""Kinds of which a plan may delete one while its replica lives: lanes, and what belongs to old revisions. The rest
goes with the replica, by the garbage collector."""


def namespaced_rules() -> list[Rule]:
    """In every namespace that is served: a Role in each, or one ClusterRole for all."""
    made = [
        _rule(kind, [*_WATCH, "create", "patch", *(["delete"] if kind.name in _DELETED else [])])
        for kind in CHILDREN
    ]
    return [
        _rule(DEPLOYMENT, _WATCH),
        _rule(DEPLOYMENT, ["update"], "status"),
        # A deployment's replicas are the operator's own, those of users get no verb from it but through them.
        _rule(REPLICA, [*_WATCH, "create", "patch", "delete"]),
        _rule(REPLICA, ["update"], "status"),
        _rule(POD, [*_WATCH, "delete"]),
        *made,
        _rule(SECRET, ["create"]),
        _rule(CLAIM, ["get"]),  # to see which volume a pod is tied to
        _rule(EVENT, ["create", "get", "list", "patch"]),
        # An owner reference that blocks deletion needs the right to set its owner's finalizers, where that is checked.
        _rule(REPLICA, ["update"], "finalizers"),
        _rule(DEPLOYMENT, ["update"], "finalizers"),
    ]


def cluster_rules() -> list[Rule]:
    """Of nodes, of volumes that may be tied to some of them, and of pods of all namespaces, which take room there.

    Without them the operator goes on, but sees no node that is lost or emptied.
    """
    return [_rule(NODE, _SEE), _rule(POD, ["list"]), _rule(VOLUME, ["get"])]


def gang_rules(settings: OperatorSettings) -> list[Rule]:
    """Beside the namespaced ones, where gang schedulers read objects of ours."""
    return [_rule(GANGS[api], [*_WATCH, "create", "patch", "delete"]) for api in settings.gang_apis]


def lease_rules(settings: OperatorSettings) -> list[Rule]:
    """In the namespace of the Lease."""
    return [
        _rule(LEASE, ["create"]),
        _rule(LEASE, ["get", "update"]) | {"resourceNames": [settings.lease_name]},
    ]


def router_rules(router: RouterSite) -> list[Rule]:
    """In the namespace of a router: its keys are made there, what enrols at it is read to be handed on, and the models
    that manifests name are told to it."""
    return [
        _rule(SECRET, ["create"]),
        _rule(SECRET, ["get"]) | {"resourceNames": [f"{router.name}-keys", f"{router.name}-enrolment"]},
        _rule(ROUTER, ["get"]) | {"resourceNames": [router.name]},
        _rule(CONFIG_MAP, ["create"]),
        _rule(CONFIG_MAP, ["get", "patch"]) | {"resourceNames": [models_key(router).name]},
        _rule(EVENT, ["create", "get", "patch"]),
    ]


def _rule(kind: Kind, verbs: list[str], subresource: str = "") -> Rule:
    resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
    return {"apiGroups": [kind.group], "resources": [resource], "verbs": list(verbs)}
