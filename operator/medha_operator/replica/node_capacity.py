"""Capacity for a replica on nodes that are not being emptied: checks whether all of its pods would find a node there.

The scheduler decides in the end. This module checks what the scheduler checks first: node labels that the pods
ask for, taints, requests beside those of existing pods, and where the pods' volumes can be mounted. If a pod
asks for anything else of its node, that counts as too little capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from medha_operator.replica.observed import Node, Object, amount

Amounts = dict[str, Decimal]
"""Name of a resource -> how much of it; `pods` counts pods."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_KEEPS_OUT = ("NoSchedule", "NoExecute")
_OUR_LANE = {"medha.dev/replica", "medha.dev/lane"}


@dataclass(frozen=True)
class Needs:
    """The demands of a pod on its node."""

    amounts: Amounts
    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the node must have."""
    terms: tuple[Object, ...] | None = None
    """Node selector terms, one of which must match; None if it has none."""
    tolerations: tuple[Object, ...] = ()
    claims: tuple[str, ...] = ()
    """Names of the PersistentVolumeClaims that it mounts."""
    volumes: tuple[tuple[Object, ...], ...] = ()
    """Node selector terms of each volume to which those claims are bound; for each volume, one term must match."""
    together: tuple[str, str] | None = None
    """Node label and group: the pods of a group run where that label has one value."""
    unjudged: str = ""
    """Field of its spec that is not checked here; empty if there is none."""


def needs_of(pod: Object) -> Needs:
    """Return the demands on its node of a pod, or of a pod template."""
    spec = pod["spec"]
    affinity = spec.get("affinity") or {}
    node_terms = (affinity.get("nodeAffinity") or {}).get(_REQUIRED)
    together, unjudged = _together(affinity)
    return Needs(
        amounts=requests(spec),
        selector=spec.get("nodeSelector") or {},
        terms=None if node_terms is None else tuple(node_terms.get("nodeSelectorTerms") or ()),
        tolerations=tuple(spec.get("tolerations") or ()),
        claims=tuple(
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes") or ()
            if volume.get("persistentVolumeClaim")
        ),
        together=together,
        unjudged=unjudged or _unjudged(spec, affinity),
    )


def nodes_of_volume(volume: Object) -> tuple[Object, ...] | None:
    """Return the node selector terms of a PersistentVolume, one of which must match; None for any node."""
    required = (volume["spec"].get("nodeAffinity") or {}).get("required")
    return None if required is None else tuple(required.get("nodeSelectorTerms") or ())


def requests(spec: Object) -> Amounts:
    """Return the requests of a pod's spec as the scheduler counts them: the most needed at a time."""
    running: Amounts = {}
    most: Amounts = {}
    for container in spec.get("initContainers") or ():
        needed = _container_requests(container)
        if container.get("restartPolicy") == "Always":
            running = _sum(running, needed)
            needed = {}
        most = _most(most, _sum(running, needed))
    for container in spec.get("containers") or ():
        running = _sum(running, _container_requests(container))
    most = _most(most, running) | _container_requests(spec)  # pod-level requests replace those of containers
    overhead = {name: amount(value) for name, value in (spec.get("overhead") or {}).items()}
    return _sum(most, overhead) | {"pods": Decimal(1)}


def may_host(node: Node, name: str, needs: Needs) -> bool:
    """Return whether the scheduler would consider the node at all if it were empty."""
    return (
        node.is_ready
        and not node.cordoned
        and all(node.labels.get(label) == value for label, value in needs.selector.items())
        and (needs.terms is None or any(_matches_term(term, node, name) for term in needs.terms))
        and all(any(_matches_term(term, node, name) for term in terms) for terms in needs.volumes)
        and all(_is_tolerated(taint, needs.tolerations) for taint in node.taints)
        and _has(node.allocatable, needs.amounts)
    )


def without_capacity(
    pods: Sequence[Needs], before: Iterable[Needs], nodes: Mapping[str, Node], free: Mapping[str, Amounts]
) -> int:
    """Return how many of `pods` find no node, once those of `before` that find one have been placed.

    `free` has what is left of each node that may be considered.
    """
    left = {name: dict(amounts) for name, amounts in free.items()}
    for needs in before:
        _place([needs], nodes, left)
    missing = 0
    for together in _groups(pods):
        missing += len(together) - _place_together(together, nodes, left)
    return missing


def left_free(node: Node, taken: Iterable[Amounts]) -> Amounts:
    """Return what is left of a node's resources beside the requests of its pods."""
    free = dict(node.allocatable)
    for amounts in taken:
        for what, much in amounts.items():
            free[what] = free.get(what, Decimal(0)) - much
    return free


def _groups(pods: Sequence[Needs]) -> Iterator[list[Needs]]:
    grouped: dict[tuple[str, str], list[Needs]] = {}
    for needs in pods:
        if needs.together is None:
            yield [needs]
        else:
            grouped.setdefault(needs.together, []).append(needs)
    yield from grouped.values()


def _place_together(pods: list[Needs], nodes: Mapping[str, Node], left: dict[str, Amounts]) -> int:
    """Place pods, all within one value of the label that they name; return how many have found a node."""
    if pods[0].together is None:
        return _place(pods, nodes, left)
    key, most = pods[0].together[0], 0
    for value in sorted({nodes[name].labels[key] for name in left if key in nodes[name].labels}):
        tried = {name: dict(left[name]) for name in left if nodes[name].labels.get(key) == value}
        placed = _place(pods, nodes, tried)
        if placed == len(pods):
            left.update(tried)
            return placed
        most = max(most, placed)
    return most


def _place(pods: Iterable[Needs], nodes: Mapping[str, Node], left: dict[str, Amounts]) -> int:
    """Place each of `pods` on the first node with enough left; return how many have found one.

    Their requests are subtracted from `left`.
    """
    placed = 0
    for needs in pods:
        for name, amounts in left.items():
            if may_host(nodes[name], name, needs) and _has(amounts, needs.amounts):
                for what, much in needs.amounts.items():
                    amounts[what] = amounts.get(what, Decimal(0)) - much
                placed += 1
                break
    return placed


def _has(amounts: Mapping[str, Decimal], desired: Amounts) -> bool:
    return all(amounts.get(what, Decimal(0)) >= much for what, much in desired.items() if much)


def _container_requests(container: Object) -> Amounts:
    """Return the requests of a container, or of a pod as a whole. A limit without a request counts as one."""
    resources = container.get("resources") or {}
    desired = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(value) for name, value in desired.items()}


def _sum(one: Amounts, other: Amounts) -> Amounts:
    return {name: one.get(name, Decimal(0)) + other.get(name, Decimal(0)) for name in {**one, **other}}


def _most(one: Amounts, other: Amounts) -> Amounts:
    return {name: max(one.get(name, Decimal(0)), other.get(name, Decimal(0))) for name in {**one, **other}}


# --- what a pod asks of its node's labels and taints ------------------------------------------------------


def _matches_term(term: Object, node: Node, name: str) -> bool:
    """Return whether a node selector term matches the node. A term without any expression matches none."""
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    return bool(expressions or fields) and all(
        (
            *(_matches(one, node.labels.get(one["key"])) for one in expressions),
            *(_matches(one, name if one["key"] == "metadata.name" else None) for one in fields),
        )
    )


def _matches(expression: Object, value: str | None) -> bool:
    values: Sequence[str] = expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                here, bound = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return here > bound if operator == "Gt" else here < bound
    return False


def _is_tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    if taint.get("effect") not in _KEEPS_OUT:
        return True
    return any(_tolerates(one, taint) for one in tolerations)


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if operator == "Exists":
        return key in ("", taint["key"])
    return (
        operator == "Equal"
        and key == taint["key"]
        and (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _together(affinity: Object) -> tuple[tuple[str, str] | None, str]:
    """Return the group that the pod must run beside, or the field that asks for an unsupported one.

    The supported group is the one that `placement.laneTopology` asks for.
    """
    field_name = "affinity.podAffinity"
    terms: list[Object] = list((affinity.get("podAffinity") or {}).get(_REQUIRED) or ())
    if not terms:
        return None, ""
    first, others = terms[0], terms[1:]
    selector = first.get("labelSelector") or {}
    labels = selector.get("matchLabels") or {}
    is_ours = set(labels) == _OUR_LANE and set(first) <= {"labelSelector", "topologyKey"}
    if others or not is_ours or selector.get("matchExpressions"):
        return None, field_name
    return (first["topologyKey"], labels["medha.dev/lane"]), ""


def _unjudged(spec: Mapping[str, Any], affinity: Object) -> str:
    """Return the first field of a pod's spec whose demand on nodes is not checked here; else an empty text."""
    if (affinity.get("podAntiAffinity") or {}).get(_REQUIRED):
        return "affinity.podAntiAffinity"
    spread = spec.get("topologySpreadConstraints") or ()
    if any(one.get("whenUnsatisfiable", "DoNotSchedule") == "DoNotSchedule" for one in spread):
        return "topologySpreadConstraints"
    if spec.get("resourceClaims"):
        return "resourceClaims"
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    ports = (port for container in containers for port in container.get("ports") or ())
    return "containers.ports.hostPort" if any(port.get("hostPort") for port in ports) else ""
