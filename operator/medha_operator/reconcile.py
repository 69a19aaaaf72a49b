"""One look at one resource: observe, plan, carry out. What is left undone is planned anew by the next look.

Actions are carried out in their order, and the first one that fails ends the look: a later one may rely on an earlier
one having been written, such as the end of pods on the record of a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from medha_operator.cluster import ApiError, Cluster
from medha_operator.conditions import refuse, stamped
from medha_operator.deployment import plan_deployment
from medha_operator.index import Index, read_status
from medha_operator.keys import ROUTER_NOT_FOUND, copy_enrolment, make_router_keys, replica_keys
from medha_operator.kinds import DEPLOYMENT, KINDS, REPLICA, ROUTER, SECRET, Key
from medha_operator.plan import Action, Apply, CopyEnrolment, CreateKeys, Delete, Plan, SetStatus, Tell, plan
from medha_operator.render import Manifest, Owner
from medha_operator.settings import OperatorSettings
from medha_operator.status import DeploymentStatus, ReplicaStatus
from medha_operator.store import Document
from medha_operator.telemetry import Telemetry

_log = logging.getLogger(__name__)

Versions = dict[tuple[str, str], str]
"""(kind, name) -> resourceVersion."""

REFUSALS = frozenset({400, 403, 422})
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
        telemetry: Telemetry,
        *,
        holder: str,
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._index = index
        self._settings = settings
        self._telemetry = telemetry
        self._holder = holder
        self._now = now
        self._applied: dict[Key, tuple[Manifest, Any]] = {}  # applied in vain, and what was there then
        self._answers: dict[Key, str] = {}  # resourceVersions that came of applying

    async def look(self, key: Key) -> Look:
        """Look at `key` once.

        Raises:
            ApiError: an action was refused or not answered; the rest was not done.
            Fenced: this process may not write any more.
        """
        if key.kind == ROUTER.name:
            router = next(one for one in self._settings.routers if (one.namespace, one.name) == key[1:])
            again = await make_router_keys(self._cluster, router, self._settings.resync_seconds)
            return Look(again_seconds=again)
        resource = self._index.resource(key)
        if resource is None:
            return Look()
        planned, versions = self._plan(key, resource)
        try:
            writes = await self._carry_out(key, resource, planned.actions, versions)
        except ApiError as error:
            if error.status in REFUSALS:
                await self._refused(key, resource, "Refused", f"the API server refused: {error}")
            elif error.reason == ROUTER_NOT_FOUND:
                await self._refused(key, resource, ROUTER_NOT_FOUND, str(error))
            raise
        return Look(writes, planned.again_seconds)

    def forget(self) -> None:
        """Take nothing for done any more because it was done once."""
        self._applied.clear()
        self._answers.clear()
        self._index.secrets.clear()

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
    ) -> int:
        """Carry out `actions`; how many of them changed something."""
        writes = 0
        for action in actions:
            try:
                writes += await self._do(key, resource, action, versions)
            except ApiError as error:
                if error.status in (404, 409):  # our view is old: the watch tells late, so ask
                    await self._correct(_target(key, action))
                raise
        return writes

    async def _do(self, key: Key, resource: Document, action: Action, versions: Versions) -> bool:
        """Carry out one action; whether it changed something."""
        metadata = resource["metadata"]
        match action:
            case CreateKeys(name):
                owner = Owner(key.name, key.namespace, metadata["uid"])
                await self._cluster.create(replica_keys(owner, name))
                self._index.secrets.setdefault(metadata["uid"], set()).add(name)
            case CopyEnrolment(name, router, namespace):
                owner = Owner(key.name, key.namespace, metadata["uid"])
                await copy_enrolment(
                    self._cluster, owner, name, Key(SECRET.name, namespace, f"{router}-enrolment")
                )
                self._index.secrets.setdefault(metadata["uid"], set()).add(name)
            case Apply(manifest):
                return await self._apply(manifest, versions)
            case Delete(kind, name, uid, version):
                _log.info("%s: deletes %s %s: %s", key, kind, name, action.reason)
                target = Key(kind, key.namespace, name)
                if not await self._cluster.delete(target, uid, version, is_forced=action.is_forced):
                    await self._correct(target)
                    return False
            case SetStatus(status):
                written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
                self._index.offer(await self._cluster.write_status(key, metadata, written))
                self._telemetry.described(key.kind, resource.get("status", {}), written, self._now())
            case Tell():
                await self._tell(key, resource, action)
                return False
        return True

    async def _correct(self, target: Key) -> None:
        """Take into the store what the API server has of an object now."""
        store = self._index.stores.get(target.kind)
        if store is not None:
            seen = store.entry(target.namespace, target.name)
            found = await self._cluster.get(KINDS[target.kind], target.namespace, target.name)
            store.correct(target.namespace, target.name, seen, found)

    async def _apply(self, manifest: Manifest, versions: Versions) -> bool:
        """Apply, unless that was done before and nothing has changed since; whether it changed anything.

        The API server writes some values in its own words (`1000m` is `1`): such an object never equals its manifest.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        key, store = Key(kind, metadata["namespace"], metadata["name"]), self._index.stores.get(kind)
        there = None if store is None else store.facts(key.namespace, key.name)
        if there is not None and self._applied.get(key) == (manifest, there):
            return False
        version = versions.get((kind, key.name))
        written = await self._cluster.apply(manifest, version)
        self._index.offer(written)
        answer = written["metadata"]["resourceVersion"]
        is_changed = answer not in (version, self._answers.get(key))
        self._answers[key] = answer
        self._applied.pop(key, None)
        if store is not None and not is_changed:
            self._applied[key] = (manifest, store.facts(key.namespace, key.name))
        return is_changed

    async def _refused(self, key: Key, resource: Document, reason: str, message: str) -> None:
        """What the API server refuses, or what is missing, stands in the status until it does not: the look ends before its own status."""
        before: ReplicaStatus | DeploymentStatus
        if key.kind == DEPLOYMENT.name:
            before = read_status(resource, DeploymentStatus)
        else:
            before = read_status(resource, ReplicaStatus)
        generation = resource["metadata"]["generation"]
        refusal = refuse(reason, message)
        conditions = stamped(refusal, before.conditions, generation, self._now())
        status = before.model_copy(update={"observed_generation": generation, "conditions": conditions})
        if status != before:
            told = Tell(reason, refusal[0].message, is_warning=True)
            try:
                await self._carry_out(key, resource, [SetStatus(status), told], {})
            except ApiError as error:
                _log.warning("%s: the refusal could not be told: %s", key, error)

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


def _target(key: Key, action: Action) -> Key:
    """The object that an action writes."""
    match action:
        case Apply(manifest):
            return Key(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        case Delete(kind, name):
            return Key(kind, key.namespace, name)
        case _:
            return key
