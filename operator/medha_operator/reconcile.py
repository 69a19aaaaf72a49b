"""One look at one resource: observe, plan, carry out. What is left undone is planned anew by the next look.

Actions are carried out in their order, and the first one that fails ends the look: a later one may rely on an earlier
one having been written, such as the end of pods on the record of a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from medha_operator.cluster import ApiError, Cluster
from medha_operator.deployment import plan_deployment
from medha_operator.index import Index
from medha_operator.keys import replica_keys
from medha_operator.kinds import DEPLOYMENT, REPLICA, Key
from medha_operator.plan import Action, Apply, CreateKeys, Delete, Plan, SetStatus, Tell, plan
from medha_operator.render import Owner
from medha_operator.settings import OperatorSettings
from medha_operator.store import Document

_log = logging.getLogger(__name__)

Versions = dict[tuple[str, str], str]
"""(kind, name) -> resourceVersion."""

_REFUSALS = frozenset({400, 403, 422})
"""Answers that do not change by themselves: a user must hear of them."""


@dataclass(frozen=True)
class Look:
    """What came of a look."""

    writes: int = 0
    again_seconds: float | None = None
    """When to look again though nothing may have happened."""


class Reconciler:
    """Brings resources nearer to their specs. `now` gives Unix time, seconds."""

    def __init__(
        self,
        cluster: Cluster,
        index: Index,
        settings: OperatorSettings,
        *,
        holder: str,
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._settings = settings
        self._holder = holder
        self._now = now

    async def look(self, key: Key) -> Look:
        """Look at `key` once.

        Raises:
            ApiError: an action was refused or not answered; the rest was not done.
            Fenced: this process may not write any more.
        """
        resource = self._index.resource(key)
        if resource is None:
            return Look()
        planned, versions = self._plan(key, resource)
        try:
            await self._carry_out(key, resource, planned.actions, versions)
        except ApiError as error:
            if error.status in _REFUSALS:
                await self._tell(key, resource, Tell("Refused", f"the API server refused: {error}", True))
            raise
        return Look(len(planned.actions), planned.again_seconds)

    def _plan(self, key: Key, resource: Document) -> tuple[Plan, Versions]:
        """What to do, and the resourceVersion of each object that it is based on."""
        now = self._now()
        if key.kind == DEPLOYMENT.name:
            deployment = self._index.observe_deployment(key)
            assert deployment is not None
            versions = {(REPLICA.name, child.name): child.resource_version for child in deployment.children}
            for kept in deployment.templates:
                versions["ControllerRevision", f"{key.name}-{kept.name}"] = kept.resource_version
            return plan_deployment(deployment, now, self._settings), versions
        leftovers = self._index.leftovers(key, resource["metadata"]["uid"])
        if leftovers:  # of an earlier one of this name; each that goes asks for another look
            _log.info("%s waits for the end of %s", key, ", ".join(leftovers))
            return Plan(()), {}
        observed = self._index.observe(key)
        assert observed is not None
        found = {of: one["metadata"]["resourceVersion"] for of, one in observed.objects.items() if one}
        return plan(observed, now, self._settings), found

    async def _carry_out(
        self,
        key: Key,
        resource: Document,
        actions: Iterable[Action],
        versions: Versions,
    ) -> None:
        metadata = resource["metadata"]
        for action in actions:
            match action:
                case CreateKeys(name):
                    owner = Owner(key.name, key.namespace, metadata["uid"])
                    await self._cluster.create(replica_keys(owner, name))
                    self._index.with_keys.add(metadata["uid"])
                case Apply(manifest):
                    version = versions.get((manifest["kind"], manifest["metadata"]["name"]))
                    self._index.offer(await self._cluster.apply(manifest, version))
                case Delete(kind, name, uid, version):
                    _log.info("%s: deletes %s %s: %s", key, kind, name, action.reason)
                    target = Key(kind, key.namespace, name)
                    await self._cluster.delete(target, uid, version, is_forced=action.is_forced)
                case SetStatus(status):
                    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
                    version = metadata["resourceVersion"]
                    self._index.offer(await self._cluster.write_status(key, version, written))
                case Tell():
                    await self._tell(key, resource, action)

    async def _tell(self, key: Key, resource: Document, told: Tell) -> None:
        """An event is a courtesy: none of what follows waits for it to succeed."""
        _log.log(
            logging.WARNING if told.is_warning else logging.INFO, "%s: %s: %s", key, told.reason, told.message
        )
        try:
            await self._cluster.tell(
                resource, told.reason, told.message, is_warning=told.is_warning, holder=self._holder
            )
        except ApiError as error:
            _log.warning("%s: the event %s was not written: %s", key, told.reason, error)
