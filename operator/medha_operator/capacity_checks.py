"""Ask the API server whether the pods of a replica would find room elsewhere.

The same capacity is granted to one replica only. The operator does not watch the pods of other workloads: when a
replica has to leave its node, it lists the pods of the nodes that may take the replica. The answer "no" may rest on
lists that are some seconds old, which all replicas share; "yes" rests on new lists alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from medha_operator.index import Index
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import CLAIM, POD, VOLUME, Key
from medha_operator.replica.node_capacity import (
    Amounts,
    Needs,
    left_free,
    may_host,
    needs_of,
    nodes_of_volume,
    requests,
    without_capacity,
)
from medha_operator.replica.observed import Capacity, Object, Observed

RECENT_SECONDS = 10.0
"""Largest age in seconds of a list of pods on which a "no" may rest."""
_BATCH = 16
"""Nodes whose pods are listed before each attempt to place the replica on them."""
_ALIVE = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True)
class _Listed:
    """The pods of a node, or those without one."""

    at_seconds: float
    pods: tuple[tuple[str, Any], ...]
    """UID of each pod, and what it requests."""


class CapacityChecks:
    """The room in one cluster. `clock` returns monotonic seconds."""

    def __init__(self, cluster: Cluster, index: Index, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._index = index
        self._clock = clock
        self._lock = asyncio.Lock()
        self._listed: dict[str, _Listed] = {}
        self._unplaced = _Listed(float("-inf"), ())
        self._granted: set[Key] = set()

    async def check(self, key: Key, observed: Observed) -> Capacity:
        """Return whether all pods of a replica find room.

        Until `settle`, other replicas are answered as if it had moved there.
        """
        async with self._lock:
            began = self._clock()
            try:
                capacity = await self._checked(key, observed, began - RECENT_SECONDS)
                if capacity.is_enough:
                    capacity = await self._checked(key, observed, began)
            except ApiError as error:
                return Capacity(False, _unknown(error))
            if capacity.is_enough:
                self._granted.add(key)
            return capacity

    def settle(self, key: Key) -> None:
        """Forget what was granted to a replica once its reconcile has ended, because the index now shows whether it moves."""
        self._granted.discard(key)
        if not self._index.waiting_for_capacity:
            self._listed.clear()

    async def _checked(self, key: Key, observed: Observed, since: float) -> Capacity:
        """Return the capacity, according to lists of pods that are not older than `since`."""
        pods = await self._pods_of(observed)
        unjudged = next((needs.unjudged for needs in pods if needs.unjudged), None)
        if unjudged is not None:
            return Capacity(
                False, f"the operator cannot determine which nodes spec.template.spec.{unjudged} allows"
            )
        tied = await self._bound_nodes(
            observed.namespace, {claim for needs in pods for claim in needs.claims}
        )
        pods = [
            replace(needs, volumes=tuple(tied[claim] for claim in needs.claims if claim in tied))
            for needs in pods
        ]
        nodes = {
            name: node
            for name, node in sorted(self._index.nodes().items())
            if any(may_host(node, name, needs) for needs in pods)
        }
        # Read this before the pods are listed: a pod that is placed in between then counts twice, instead of not at all.
        leaving = [needs_of(template) for template in self._index.to_be_placed(key, self._granted)]
        before = [*leaving, *(await self._without_node(since) if nodes else ())]
        mine = {pod.uid for pod in observed.pods}
        free: dict[str, Amounts] = {}
        missing, names = len(pods), list(nodes)
        for first in range(0, len(names), _BATCH):
            batch = names[first : first + _BATCH]
            taken = await asyncio.gather(*(self._taken(name, since) for name in batch))
            for name, there in zip(batch, taken, strict=True):
                free[name] = left_free(nodes[name], (amounts for uid, amounts in there if uid not in mine))
            missing = without_capacity(pods, before, nodes, free)
            if not missing:
                return Capacity(True)
        return Capacity(False, _lacks(missing, pods, len(nodes)))

    async def _pods_of(self, observed: Observed) -> Sequence[Needs]:
        """Return what each pod of the replica asks for.

        It is taken from the pod, with what admission added, or from the template of a missing one.
        """
        found = await self._cluster.list(POD, observed.namespace, f"medha.dev/replica={observed.name}")
        mine = {pod.uid for pod in observed.pods}
        made = {one["metadata"]["name"]: one for one in found if one["metadata"]["uid"] in mine}
        return [
            needs_of(made.get(name, template))
            for (kind, _), one in observed.objects.items()
            if kind == "StatefulSet"
            for ordinal in range(one["spec"]["replicas"])
            for name, template in ((f"{one['metadata']['name']}-{ordinal}", one["spec"]["template"]),)
        ]

    async def _bound_nodes(self, namespace: str, claims: Iterable[str]) -> dict[str, tuple[Object, ...]]:
        """Return claim -> node selector terms, for each claim whose volume only some nodes can mount.

        A claim that is not bound yet, or gone, ties a pod to no node.
        """
        tied = {}
        for name in sorted(claims):
            claim = await self._cluster.get(CLAIM, namespace, name)
            bound_to = (claim or {}).get("spec", {}).get("volumeName")
            volume = await self._cluster.get(VOLUME, "", bound_to) if bound_to else None
            terms = None if volume is None else nodes_of_volume(volume)
            if terms is not None:
                tied[name] = terms
        return tied

    async def _taken(self, node: str, since: float) -> Iterable[tuple[str, Amounts]]:
        known = self._listed.get(node)
        if known is None or known.at_seconds < since:
            at = self._clock()
            pods = await self._cluster.list(POD, None, "", f"spec.nodeName={node},{_ALIVE}")
            known = _Listed(at, tuple((pod["metadata"]["uid"], requests(pod["spec"])) for pod in pods))
            self._listed[node] = known
        return known.pods

    async def _without_node(self, since: float) -> list[Needs]:
        """Return what pods without a node ask for, except replicas' pods, which the index knows better."""
        if self._unplaced.at_seconds < since:
            at = self._clock()
            pages = self._cluster.pages(POD, None, "", f"spec.nodeName=,{_ALIVE}")
            pods = [(pod["metadata"]["uid"], needs_of(pod)) async for page, _ in pages for pod in page]
            self._unplaced = _Listed(at, tuple(pods))
        ours = self._index.pod_uids()
        return [needs for uid, needs in self._unplaced.pods if uid not in ours]


def _lacks(missing: int, pods: Sequence[Needs], nodes: int) -> str:
    if not nodes:
        return f"no other node may take its {len(pods)} pods (labels, taints, size, where its volumes are)"
    return f"{missing} of its {len(pods)} pods find no room beside the pods of the {nodes} other nodes that may take them"


def _unknown(error: ApiError) -> str:
    if error.status == 403:
        return (
            "the operator is not allowed to list the pods of all namespaces or to read the volumes that the replica mounts, "
            "so it cannot determine whether other nodes have room"
        )
    return f"other nodes could not be checked for room: {error}"
