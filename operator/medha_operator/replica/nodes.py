"""Effects of nodes on a replica: its pods must leave a cordoned node, and are gone with a lost one."""

from __future__ import annotations

from collections.abc import Iterable

from medha_operator.replica.manifests import OPEN_SINCE
from medha_operator.replica.observed import Capacity, Node, Observed, Pod, seconds

CUT_OFF_SECONDS = 10.0
"""Seconds until the next reconcile while no node at all reports: nodes without pods of the replica do not
cause one."""
MOVING = "Moving"
"""Reason of the condition `Draining` while evictors may take the pods of a cordoned node."""
EVICTION_BLOCKED = "NodeCordoned"
"""Reason of that condition while the replica stays on a cordoned node, because other nodes lack capacity."""
SETTLES = "NodesSettling"
"""Reason of that condition until capacity is checked: more nodes may be about to be cordoned."""
CAPACITY_SECONDS = 30.0
"""Seconds until capacity is checked again for such a replica: other pods that end do not cause a reconcile."""
SETTLE_SECONDS = 5.0
"""Seconds after a node was cordoned before capacity is checked: nodes are often cordoned one after the other."""

# --- nodes that are emptied -----------------------------------------------------------------------------


def on_cordoned_node(observed: Observed) -> Pod | None:
    """Return a pod that has to leave its node and is not being deleted yet; None if there is none."""
    for pod in observed.pods:
        node = observed.nodes.get(pod.node or "")
        if node is not None and node.is_emptied_of(pod) and not pod.is_deleting:
            return pod
    return None


def may_drain(observed: Observed) -> bool:
    """Return whether the replica may leave a cordoned node now.

    A deployment starts another replica first. A replica without one needs capacity for all of its pods
    elsewhere.
    """
    if observed.deployment is None:
        return observed.capacity is not None and observed.capacity.is_enough
    gang = observed.status.newest_member
    return gang is None or observed.may_drain == gang


def requires_capacity(observed: Observed) -> bool:
    """Return whether the decision depends on the capacity of other nodes for the pods of the replica.

    It does for a replica without a deployment, and while the spec is refused: then no deployment can start
    another one.
    """
    is_alone = observed.deployment is None or any(
        one.type == "Accepted" and one.status == "False" for one in observed.status.conditions
    )
    return is_alone and not observed.is_deleting and on_cordoned_node(observed) is not None


def unsettled(nodes: Iterable[Node], now: float) -> Capacity | None:
    """Return that capacity is not known yet, if some node was cordoned less than `SETTLE_SECONDS` ago; else None."""
    newest = max((node.cordoned_since for node in nodes if node.cordoned_since is not None), default=None)
    if newest is None or newest + SETTLE_SECONDS <= now:
        return None
    left = newest + SETTLE_SECONDS - now
    return Capacity(False, requeue_seconds=min(left, SETTLE_SECONDS))


def waits_for_capacity(observed: Observed) -> bool:
    """Return whether the replica stays on a cordoned node until other nodes have capacity."""
    return observed.deployment is None and on_cordoned_node(observed) is not None and not may_drain(observed)


def eviction_blocker(observed: Observed) -> tuple[str, str]:
    """Return reason and message of `Draining` while such a replica waits."""
    if observed.capacity is not None and observed.capacity.requeue_seconds is not None:
        return (
            SETTLES,
            f"the operator checks other nodes for room {SETTLE_SECONDS:g} s after the last node was cordoned",
        )
    lacks = (
        "other nodes have not been checked for room yet"
        if observed.capacity is None
        else observed.capacity.lacks
    )
    return (
        EVICTION_BLOCKED,
        f"the replica stays: {lacks}. It moves once all of its pods find room; spec.suspend removes its pods",
    )


def open_since(observed: Observed, now: float) -> float | None:
    """Return the Unix time in seconds since which the budget lets the replica leave a cordoned node.

    It is `now` if the budget is yet to be opened, and None while there is no such node or the replica must
    stay.
    """
    if on_cordoned_node(observed) is None or not may_drain(observed):
        return None
    try:
        return min(seconds(_opened(observed)), now)
    except ValueError:  # not open yet, or changed by somebody else
        return now


def has_left_node(observed: Observed) -> bool:
    """Return whether the recorded gang was permitted to leave a cordoned node, and evictors took its pods.

    The pods may be gone before the next reconcile. In that case the open budget, or the condition that was written
    last, shows that the move was permitted.
    """
    if observed.deployment is not None and not may_drain(observed):
        return False
    cordoned = {name for name, node in observed.nodes.items() if node.cordoned}
    return (
        observed.deployment is not None
        or _opened(observed) != ""
        or any(one.type == "Draining" and one.reason == MOVING for one in observed.status.conditions)
        or any(pod.is_deleting and pod.node in cordoned for pod in observed.pods)
    )


def _opened(observed: Observed) -> str:
    """Return the time since which the budget has been open, as it is annotated; empty while it is closed."""
    budget = observed.objects.get(("PodDisruptionBudget", observed.name), {})
    return str(budget.get("metadata", {}).get("annotations", {}).get(OPEN_SINCE, ""))


# --- nodes that are lost --------------------------------------------------------------------------------


def on_lost_nodes(observed: Observed, node_lost_seconds: float, now: float) -> tuple[list[Pod], float | None]:
    """Return pods whose node has been silent for too long, and seconds until the next reconcile.

    Nobody else would ever remove these pods. Pods of earlier StatefulSets are among them once they are being
    deleted, e.g. by the garbage collector.

    Silence counts only while some other node reports. If no node reports, the control plane is cut off, and the pods
    may still serve. Kubernetes' node controller waits in that case, too, and starts to count again when nodes report.
    """
    lost: list[Pod] = []
    waits: list[float] = []
    for pod in (*observed.pods, *(pod for pod in observed.earlier_pods if pod.is_deleting)):
        node = observed.nodes.get(pod.node or "")
        if node is None or node.unreachable_since is None or pod.has_finalizer:
            continue
        if observed.any_report_since is None:
            waits.append(CUT_OFF_SECONDS)
            continue
        left = max(node.unreachable_since, observed.any_report_since) + node_lost_seconds - now
        if left > 0:
            waits.append(left)
        else:
            lost.append(pod)
    return lost, min(waits, default=None)
