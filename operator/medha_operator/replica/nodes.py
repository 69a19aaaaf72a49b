"""What nodes ask of a replica: pods on one that is to be emptied must leave it, those on a lost one are gone."""

from __future__ import annotations

from collections.abc import Iterable

from medha_operator.replica.observed import Node, Observed, Pod, Room, seconds
from medha_operator.replica.render import OPEN_SINCE

CUT_OFF_SECONDS = 10.0
"""How long until the next look while no node at all is heard of: of nodes without its pods a replica is not told."""
LET_GO = "Moving"
"""Reason of the condition `Draining` while evictors may take the pods of a cordoned node."""
STAYS = "NodeCordoned"
"""Reason of that condition while the replica stays on a cordoned node, for its pods would find no other."""
SETTLES = "NodesSettling"
"""Reason of that condition until it is asked for room: more nodes may be cordoned in this moment."""
ROOM_SECONDS = 30.0
"""How often such a replica asks for room again: of pods that end elsewhere the operator is not told."""
SETTLE_SECONDS = 5.0
"""How long nobody leaves a node after any node was cordoned: who cordons all old ones does so one after the other."""

# --- nodes that are emptied -----------------------------------------------------------------------------


def on_cordoned_node(observed: Observed) -> Pod | None:
    """A pod that has to leave its node and has not been told to end yet."""
    for pod in observed.pods:
        node = observed.nodes.get(pod.node or "")
        if node is not None and node.is_emptied_of(pod) and not pod.is_deleting:
            return pod
    return None


def may_drain(observed: Observed) -> bool:
    """Whether the replica may leave a cordoned node now.

    A deployment brings up another one first. One that stands alone needs room for all of its pods elsewhere.
    """
    if observed.deployment is None:
        return observed.room is not None and observed.room.is_enough
    gang = observed.status.newest_member
    return gang is None or observed.may_drain == gang


def asks_for_room(observed: Observed) -> bool:
    """Whether it matters if there is room elsewhere for the pods of the replica.

    While its spec is refused, no deployment can bring up another one.
    """
    is_alone = observed.deployment is None or any(
        said.type == "Accepted" and said.status == "False" for said in observed.status.conditions
    )
    return is_alone and not observed.is_deleting and on_cordoned_node(observed) is not None


def unsettled(nodes: Iterable[Node], now: float) -> Room | None:
    """What is said of room while some node was cordoned less than `SETTLE_SECONDS` ago; None: all have been for longer."""
    newest = max((node.cordoned_since for node in nodes if node.cordoned_since is not None), default=None)
    if newest is None or newest + SETTLE_SECONDS <= now:
        return None
    left = newest + SETTLE_SECONDS - now
    return Room(False, again_seconds=min(left, SETTLE_SECONDS))


def waits_for_room(observed: Observed) -> bool:
    """Whether the replica stays on a cordoned node until there is room elsewhere."""
    return observed.deployment is None and on_cordoned_node(observed) is not None and not may_drain(observed)


def why_it_stays(observed: Observed) -> tuple[str, str]:
    """The reason of `Draining` while such a replica waits, and for what it does."""
    if observed.room is not None and observed.room.again_seconds is not None:
        return SETTLES, f"room is looked for {SETTLE_SECONDS:g} s after the last node was cordoned"
    lacks = "room elsewhere has yet to be looked for" if observed.room is None else observed.room.lacks
    return STAYS, f"the replica stays: {lacks}. It moves once all of its pods find room; spec.suspend ends it"


def open_since(observed: Observed, now: float) -> float | None:
    """Since when the budget lets the replica leave a cordoned node, seconds of Unix time, `now` if it is yet to do so.

    None while there is no such node, or the replica must stay.
    """
    if on_cordoned_node(observed) is None or not may_drain(observed):
        return None
    try:
        return min(seconds(_opened(observed)), now)
    except ValueError:  # not open yet, or somebody has spoilt it
        return now


def has_left_node(observed: Observed) -> bool:
    """Whether the recorded gang was let go from a cordoned node, and evictors have taken its pods there.

    They may be gone before anybody looks: then the budget, or what the last look has said, tells that it was let go.
    """
    if observed.deployment is not None and not may_drain(observed):
        return False
    cordoned = {name for name, node in observed.nodes.items() if node.cordoned}
    return (
        observed.deployment is not None
        or _opened(observed) != ""
        or any(said.type == "Draining" and said.reason == LET_GO for said in observed.status.conditions)
        or any(pod.is_deleting and pod.node in cordoned for pod in observed.pods)
    )


def _opened(observed: Observed) -> str:
    """What the budget says of since when it has been open; nothing, while it is closed."""
    budget = observed.objects.get(("PodDisruptionBudget", observed.name), {})
    return str(budget.get("metadata", {}).get("annotations", {}).get(OPEN_SINCE, ""))


# --- nodes that are lost --------------------------------------------------------------------------------


def on_lost_nodes(observed: Observed, node_lost_seconds: float, now: float) -> tuple[list[Pod], float | None]:
    """Pods whose node has been silent for too long, which nobody else would ever remove; when to look again, seconds.

    Those of earlier StatefulSets are among them once they were told to end, as the garbage collector does.

    A silence counts only while some other node is heard of: where none is, the control plane is cut off, and pods may well
    serve. So the node controller of Kubernetes holds back, too, and begins to count anew when it hears of nodes again.
    """
    lost: list[Pod] = []
    waits: list[float] = []
    for pod in (*observed.pods, *(pod for pod in observed.earlier_pods if pod.is_deleting)):
        node = observed.nodes.get(pod.node or "")
        if node is None or node.unreachable_since is None or pod.is_held:
            continue
        if observed.any_heard_since is None:
            waits.append(CUT_OFF_SECONDS)
            continue
        left = max(node.unreachable_since, observed.any_heard_since) + node_lost_seconds - now
        if left > 0:
            waits.append(left)
        else:
            lost.append(pod)
    return lost, min(waits, default=None)
