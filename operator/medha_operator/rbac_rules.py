"""Everything that the operator may do, as RBAC rules.

The chart's roles say the same; a test compares the two. The operator can read what it watches, and events,
which say why pods are not created or do not start. It can create Secrets, and never read those of replicas.
It can write only the status and finalizers of a MedhaDeployment. RBAC cannot distinguish the replicas of
deployments, which the operator manages, from those of users.
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
from medha_operator.operator_settings import OperatorSettings, RouterSite

Rule = dict[str, list[str]]

_SEE = ["list", "watch"]
_WATCH = ["get", *_SEE]
_DELETED = frozenset({"StatefulSet", "ControllerRevision", "ConfigMap"})
"""Kinds of which a plan may delete an object while its replica lives: lanes, and what belongs to old
revisions. The garbage collector deletes the rest with the replica."""


def namespaced_rules() -> list[Rule]:
    """Return the rules for every namespace that is served: a Role in each, or one ClusterRole for all."""
    made = [
        _rule(kind, [*_WATCH, "create", "patch", *(["delete"] if kind.name in _DELETED else [])])
        for kind in CHILDREN
    ]
    return [
        _rule(DEPLOYMENT, _WATCH),
        _rule(DEPLOYMENT, ["update"], "status"),
        # The operator creates, changes and deletes the replicas of deployments; of users' own replicas it
        # writes only the status.
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
    """Return the cluster-wide rules.

    They cover nodes, volumes that may be tied to some of them, and pods of all namespaces, which take room
    there. Without them the operator goes on, but sees no node that is lost or emptied.
    """
    return [_rule(NODE, _SEE), _rule(POD, ["list"]), _rule(VOLUME, ["get"])]


def gang_rules(settings: OperatorSettings) -> list[Rule]:
    """Return the rules, beside the namespaced ones, for objects of ours that gang schedulers read."""
    return [_rule(GANGS[api], [*_WATCH, "create", "patch", "delete"]) for api in settings.gang_apis]


def lease_rules(settings: OperatorSettings) -> list[Rule]:
    """Return the rules for the namespace of the Lease."""
    return [
        _rule(LEASE, ["create"]),
        _rule(LEASE, ["get", "update"]) | {"resourceNames": [settings.lease_name]},
    ]


def router_rules(router: RouterSite) -> list[Rule]:
    """Return the rules for a router's namespace.

    The router's keys are created there, its enrolment Secret is read to be copied, and the models that
    manifests name are published to it.
    """
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
