"""Which connections NetworkPolicies let through: what an agent of a cluster would enforce, worked out from the objects.

It follows the reference of `networking.k8s.io/v1` NetworkPolicy: policies only add what is allowed; a pod that none
selects for a direction is open in it; both ends must allow a connection; answers always pass. Traffic of a pod with
itself and from its own node (the kubelet's probes) is never stopped, and is not asked about here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One end in the cluster."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of the ports of its containers."""
    address: str = "10.0.0.1"
    namespace_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outside:
    """An end that is no pod."""

    address: str


End = Pod | Outside


def is_open(policies: Iterable[Manifest], source: End, target: End, port: int, protocol: str = "TCP") -> bool:
    """Whether `source` can open a connection to `port` of `target`."""
    policies = list(policies)
    leaves = _allows(policies, "Egress", source, target, target, port, protocol)
    return leaves and _allows(policies, "Ingress", target, source, target, port, protocol)


def _allows(
    policies: list[Manifest],
    direction: Literal["Ingress", "Egress"],
    isolated: End,
    peer: End,
    target: End,
    port: int,
    protocol: str,
) -> bool:
    """Whether the policies of one end allow it; `target` is the end whose names of ports count."""
    if not isinstance(isolated, Pod):
        return True
    mine = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == isolated.namespace
        and selects(policy["spec"].get("podSelector", {}), isolated.labels)
        and direction in _types(policy["spec"])
    ]
    peers = "from" if direction == "Ingress" else "to"
    return not mine or any(
        _any_peer(rule.get(peers), policy["metadata"]["namespace"], peer)
        and _any_port(rule.get("ports"), target, port, protocol)
        for policy in mine
        for rule in policy["spec"].get(direction.lower()) or []
    )


def _types(spec: Manifest) -> list[str]:
    default = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    return list(spec.get("policyTypes") or default)


def _any_peer(peers: list[Manifest] | None, namespace: str, end: End) -> bool:
    return not peers or any(_is_peer(peer, namespace, end) for peer in peers)


def _is_peer(peer: Manifest, namespace: str, end: End) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(end.address)
        block = peer["ipBlock"]
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(left_out) for left_out in block.get("except", [])
        )
    if not isinstance(end, Pod):
        return False
    if "namespaceSelector" in peer:
        is_there = selects(peer["namespaceSelector"], end.namespace_labels)
    else:
        is_there = end.namespace == namespace
    return is_there and selects(peer.get("podSelector", {}), end.labels)


def _any_port(ports: list[Manifest] | None, target: End, port: int, protocol: str) -> bool:
    return not ports or any(_is_port(entry, target, port, protocol) for entry in ports)


def _is_port(entry: Manifest, target: End, port: int, protocol: str) -> bool:
    if entry.get("protocol", "TCP") != protocol:
        return False
    first = entry.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return isinstance(target, Pod) and target.ports.get(first) == port
    return bool(first <= port <= entry.get("endPort", first))


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def _holds(expression: Manifest, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"{expression['operator']!r} is no operator of a label selector")
