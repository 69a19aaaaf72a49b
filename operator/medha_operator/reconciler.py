"""Reconcile a resource: observe, plan, carry out. The next reconcile plans again what was left undone.

Actions are carried out in order, and the first failure ends the reconcile: a later action may rely on an
earlier one having been written, as the deletion of pods relies on the record of a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from medha_operator.capacity_checks import CapacityChecks
from medha_operator.declared import NAME_CONFLICT, models_key, publish_models
from medha_operator.deployment.plan_deployment import plan_deployment
from medha_operator.index import Index, read_status
from medha_operator.key_secrets import ROUTER_NOT_FOUND, copy_enrolment, make_router_keys, replica_keys
from medha_operator.kube.client import ApiError, Cluster, Fenced
from medha_operator.kube.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    GANGS,
    KINDS,
    REPLICA,
    ROUTER,
    SECRET,
    Key,
    Manifest,
)
from medha_operator.kube.store import Document
from medha_operator.operator_metrics import Telemetry
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import (
    Action,
    Apply,
    Confirm,
    CopyEnrolment,
    CreateKeys,
    Delete,
    Plan,
    Prune,
    RecordEvent,
    SetStatus,
    soonest,
    status_change,
)
from medha_operator.replica.conditions import (
    DerivedCondition,
    derive_waiting,
    refuse,
    stamped,
    with_conditions,
)
from medha_operator.replica.drift_repairs import Repairs
from medha_operator.replica.event_reasons import (
    PATIENCE_SECONDS,
    RECENT_SECONDS,
    REREAD_SECONDS,
    explained,
    latest_event_message,
    refusal_of,
    schema_problem,
    unexplained_wait,
)
from medha_operator.replica.manifests import Owner
from medha_operator.replica.nodes import requires_capacity, unsettled
from medha_operator.replica.observed import Observed
from medha_operator.replica.plan import plan
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus

_log = logging.getLogger(__name__)

Versions = dict[tuple[str, str], str]
"""(kind, name) -> resourceVersion."""

REFUSALS = frozenset({400, 403, 422})
"""HTTP statuses of answers that do not change by themselves, so that a user must be informed. A 500 for an
unknown pod field counts likewise."""
GANG_UNAVAILABLE = "GangUnavailable"
"""Reason of a replica whose gang scheduler's kind is unknown to the API server."""
REPORTED_REASONS = frozenset({ROUTER_NOT_FOUND, NAME_CONFLICT, GANG_UNAVAILABLE})
"""Reasons of the operator's own errors that users are informed of, beside the refusals."""
_MERGED = frozenset({"Service"})
"""Kinds whose objects could overwrite somebody else's object of the same name without a conflict. Objects of other
kinds cannot: their names contain a hash, or the API server refuses a field that differs or is immutable."""
REPORTED_FAILURES = 5
"""Consecutive reconciles that fail with any other error before a user is informed."""


@dataclass(frozen=True)
class Failure:
    """The reason why reconciles of a resource fail."""

    reason: str
    message: str
    is_refusal: bool
    """True if a user must act; otherwise it may pass by itself."""

    def over(self, status: ReplicaStatus | DeploymentStatus) -> tuple[DerivedCondition, ...]:
        """Return the conditions to lay over `status`. A resource that is ready stays ready, because it still serves."""
        is_ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions)
        if self.is_refusal and not is_ready:
            refused = refuse(self.reason, self.message)
            if isinstance(status, ReplicaStatus):
                return refused
            return (*refused, DerivedCondition("Progressing", False, self.reason, self.message))
        return (
            DerivedCondition("Reconciling", True, self.reason, self.message),
            DerivedCondition("Stalled", False, self.reason),
            *(() if is_ready else (DerivedCondition("Ready", False, self.reason, self.message),)),
        )


@dataclass(frozen=True)
class ReconcileResult:
    """The result of a reconcile."""

    writes: int = 0
    makes_progress: bool = False
    """True if it changed objects, not only the status, so that more may follow."""
    requeue_seconds: float | None = None
    """Seconds until the next reconcile, even if no event asks for one."""


class Reconciler:
    """Brings resources nearer to their specs. `now` returns Unix time in seconds."""

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
        self._capacity_checks = CapacityChecks(cluster, index, lambda: asyncio.get_running_loop().time())
        self._applied: dict[Key, tuple[Manifest, Any]] = {}  # applies without effect, and the facts then
        self._pruned: dict[Key, tuple[Any, Any]] = {}  # patches without effect, and the facts then
        self._again: dict[Key, float] = {}  # seconds until a held-back repair is due
        self._answers: dict[Key, str] = {}  # resourceVersions that applies returned
        self._failures: dict[Key, int] = {}  # consecutive failed reconciles
        self._failures_by_key: dict[Key, Failure] = {}  # what is reported until a reconcile succeeds
        self._repairs = Repairs()
        # UID whose events were read, when, message.
        self._event_messages: dict[Key, tuple[str, float, str]] = {}

    async def reconcile(self, key: Key) -> ReconcileResult:
        """Reconcile `key` once.

        Until a reconcile succeeds, the conditions of the failure replace those of the planned status. Otherwise the
        status would alternate between the two.

        Raises:
            ApiError: an action was refused or not answered; the rest was not carried out.
            Fenced: this process may not write any more.
        """
        if key.kind == ROUTER.name:
            router = next(one for one in self._settings.routers if (one.namespace, one.name) == key[1:])
            again = await make_router_keys(
                self._cluster,
                router,
                self._settings.resync_seconds,
                lambda deployment, notice: self._record_event(key, deployment, notice),
            )
            return ReconcileResult(requeue_seconds=again)
        if key.kind == CONFIG_MAP.name:
            return await self._publish_to_router(key)
        resource = self._index.resource(key)
        if resource is None:
            self._failures.pop(key, None)
            self._failures_by_key.pop(key, None)
            self._index.waiting_for_capacity.discard(key)
            self._event_messages.pop(key, None)
            self._again.pop(key, None)
            return ReconcileResult()
        planned = Plan(())
        try:
            planned, versions = await self._plan(key, resource)
            writes, makes_progress = await self._carry_out(key, resource, planned.actions, versions)
        except Fenced:
            raise
        except Exception as error:
            await self._failed(key, resource, planned, error)
            raise
        finally:
            self._capacity_checks.settle(key)
        self._failures.pop(key, None)
        if self._failures_by_key.pop(key, None) is not None:
            writes += 1  # the status without the trouble is yet to be written
        return ReconcileResult(
            writes, makes_progress, soonest(planned.requeue_seconds, self._again.pop(key, None))
        )

    async def _is_backing_off(self, key: Key, resource: Document, target: Key) -> bool:
        """Return whether a repair is held back for now, as others keep changing the object.

        An event reports when that begins.
        """
        wait = self._repairs.wait_seconds(target, self._now())
        if wait <= 0:
            return False
        self._again[key] = soonest(self._again.get(key), wait) or wait
        if self._repairs.begins_to_wait(target):
            notice = (
                f"{target.kind} {target.name} is changed by somebody else again and again, and is put back more and more "
                "seldom: find out who, by `kubectl get --show-managed-fields -o yaml`"
            )
            await self._record_event(key, resource, RecordEvent("Contended", notice, is_warning=True))
        return True

    async def _prune(self, key: Key, resource: Document, action: Prune) -> bool:
        """Remove harmful additions, unless that was tried in vain; return whether anything changed."""
        target = Key(action.kind, key.namespace, action.name)
        there = self._facts(target)
        if there is not None and self._pruned.get(target) == (action.patch, there):
            return False
        if await self._is_backing_off(key, resource, target):
            return False
        written = await self._cluster.patch(target, action.patch, action.uid, action.resource_version)
        self._index.offer(written)
        self._pruned.pop(target, None)
        if written["metadata"]["resourceVersion"] == action.resource_version:
            self._pruned[target] = (action.patch, self._facts(target))
            return False
        self._repairs.done(target, self._now())
        text = f"{action.kind} {action.name}: {', '.join(action.paths)} was added by somebody else, and is taken away"
        await self._record_event(key, resource, RecordEvent("DriftRepaired", text, is_warning=True))
        return True

    async def _publish_to_router(self, key: Key) -> ReconcileResult:
        """Update a router's ConfigMap to what resources declare."""
        router = next(one for one in self._settings.routers if models_key(one) == key)
        is_changed, again = await publish_models(
            self._cluster,
            self._index,
            router,
            self._settings,
            self._now(),
            lambda deployment, notice: self._record_event(key, deployment, notice),
        )
        return ReconcileResult(writes=int(is_changed), requeue_seconds=again)

    def forget(self) -> None:
        """Forget cached results that no longer match the observed objects.

        The next reconcile checks these objects again.
        """
        self._applied = {key: done for key, done in self._applied.items() if self._facts(key) == done[1]}
        self._pruned = {key: done for key, done in self._pruned.items() if self._facts(key) == done[1]}
        self._repairs.forget(lambda key: self._facts(key) is not None, self._now())
        self._answers = {key: answer for key, answer in self._answers.items() if self._facts(key) is not None}
        self._index.forget_secrets()

    async def _plan(self, key: Key, resource: Document) -> tuple[Plan, Versions]:
        """Return the plan, and the resourceVersion of each object that it is based on."""
        now = self._now()
        if key.kind == DEPLOYMENT.name:
            deployment = self._index.observe_deployment(key)
            assert deployment is not None
            versions = {(REPLICA.name, child.name): child.resource_version for child in deployment.children}
            for kept in deployment.templates:
                versions["ControllerRevision", f"{key.name}-{kept.name}"] = kept.resource_version
            return plan_deployment(deployment, now, self._settings), versions
        leftovers = self._index.leftovers(key, resource["metadata"]["uid"])
        if leftovers:  # of an earlier resource of this name; each one's deletion asks for another reconcile
            _log.info("%s waits until these are deleted: %s", key, ", ".join(leftovers))
            return _waiting(resource, leftovers, self._now()), {}
        observed = self._index.observe(key)
        assert observed is not None
        if requires_capacity(observed):
            self._index.waiting_for_capacity.add(key)
            capacity = unsettled(self._index.nodes().values(), now) or await self._capacity_checks.check(
                key, observed
            )
            latest = self._index.observe(key)  # observe again, since the answer took a while
            if latest is None or latest.uid != observed.uid:
                return Plan(()), {}
            observed = replace(latest, capacity=capacity)
        else:
            self._index.waiting_for_capacity.discard(key)
        observed, again = await self._explained(key, observed, now)
        found = {of: one["metadata"]["resourceVersion"] for of, one in observed.objects.items() if one}
        planned = plan(observed, self._now(), self._settings)  # the time again, since asking took a while
        return replace(planned, requeue_seconds=soonest(planned.requeue_seconds, again)), found

    async def _explained(self, key: Key, observed: Observed, now: float) -> tuple[Observed, float | None]:
        """Return `observed` with what events report of pods that are not created or do not start.

        Return also the seconds until events are read again.
        """
        unexplained = unexplained_wait(observed)
        if unexplained is None:
            self._event_messages.pop(key, None)
            return observed, None
        left = unexplained.since + PATIENCE_SECONDS - now
        if left > 0:
            return observed, left
        uid, at, message = self._event_messages.get(key, ("", 0.0, ""))
        if uid != unexplained.uid or not at <= now < at + RECENT_SECONDS:
            try:
                events = await self._cluster.list(
                    EVENT, observed.namespace, "", f"involvedObject.uid={unexplained.uid},type=Warning"
                )
            except ApiError as error:
                _log.info("%s: events cannot be read: %s", key, error)
                return observed, REREAD_SECONDS
            message = latest_event_message(events)
            self._event_messages[key] = (unexplained.uid, now, message)
        return explained(observed, unexplained, message), REREAD_SECONDS

    async def _carry_out(
        self,
        key: Key,
        resource: Document,
        actions: Iterable[Action],
        versions: Versions,
    ) -> tuple[int, bool]:
        """Carry out `actions`.

        Return how many of them changed something, and whether that was more than the status.
        """
        writes, makes_progress = 0, False
        for action in actions:
            try:
                is_changed = await self._do(key, resource, action, versions)
                writes += is_changed
                makes_progress |= is_changed and not isinstance(action, SetStatus)
            except ApiError as error:
                target = _target(key, action)
                if error.status in (404, 409) and error.reason != NAME_CONFLICT:  # the watch lags: read it
                    await self._correct(target)
                is_new = (target.kind, target.name) not in versions
                if is_new and error.status == 404 and KINDS[target.kind] in GANGS.values():
                    raise _no_gang(target) from error
                raise
        return writes, makes_progress

    async def _do(self, key: Key, resource: Document, action: Action, versions: Versions) -> bool:
        """Carry out one action; return whether it changed something."""
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
                return await self._apply(key, resource, manifest, versions)
            case Prune():
                return await self._prune(key, resource, action)
            case Delete(kind, name, uid, version):
                _log.info("%s: deletes %s %s: %s", key, kind, name, action.reason)
                target = Key(kind, key.namespace, name)
                if not await self._cluster.delete(target, uid, version, is_forced=action.is_forced):
                    await self._correct(target)
                    return False
            case SetStatus(status):
                return await self._describe(key, resource, status)
            case Confirm():
                await self._confirm(key, metadata)
                return False
            case RecordEvent():
                await self._record_event(key, resource, action)
                return False
        return True

    async def _confirm(self, key: Key, metadata: Document) -> None:
        """Check that the resource is still as its `metadata` says, deletion included.

        Raises:
            ApiError: it is gone (404) or has changed (409), as for a write to it.
        """
        found = await self._cluster.get(KINDS[key.kind], key.namespace, key.name)
        if found is None:
            raise ApiError(404, "NotFound", f"{key} is gone, so nothing is created for it")
        if found["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            raise ApiError(409, "Conflict", f"{key} has changed since it was observed")

    async def _correct(self, target: Key) -> None:
        """Update the store with the object that the API server has now."""
        store = self._index.stores.get(target.kind)
        if store is not None:
            seen = store.entry(target.namespace, target.name)
            found = await self._cluster.get(KINDS[target.kind], target.namespace, target.name)
            store.correct(target.namespace, target.name, seen, found)

    async def _apply(self, of: Key, resource: Document, manifest: Manifest, versions: Versions) -> bool:
        """Apply `manifest`; return whether it changed anything.

        It is not applied if that changed nothing before and nothing has changed since. The API server
        normalizes some values (`1000m` becomes `1`): such an object never equals its manifest.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        key = Key(kind, metadata["namespace"], metadata["name"])
        there = self._facts(key)
        if there is not None and self._applied.get(key) == (manifest, there):
            return False
        version = versions.get((kind, key.name))
        is_repair = version is not None and self._repairs.is_written(key, manifest)
        if is_repair and await self._is_backing_off(of, resource, key):
            return False
        written = await (
            self._make(key, manifest) if version is None else self._cluster.apply(manifest, version)
        )
        self._index.offer(written)
        answer = written["metadata"]["resourceVersion"]
        is_changed = answer not in (version, self._answers.get(key))
        self._repairs.written(key, manifest)
        if is_repair and is_changed:
            self._repairs.done(key, self._now())
            text = f"{kind} {key.name} was changed by somebody else, and is put back"
            await self._record_event(of, resource, RecordEvent("DriftRepaired", text, is_warning=True))
        self._answers[key] = answer
        self._applied.pop(key, None)
        if not is_changed:
            self._applied[key] = (manifest, self._facts(key))
        return is_changed

    def _facts(self, key: Key) -> Any:
        """Return the facts of an object as last observed; None if it is not known."""
        store = self._index.stores.get(key.kind)
        return None if store is None else store.facts(key.namespace, key.name)

    async def _make(self, key: Key, manifest: Manifest) -> Document:
        """Apply an object that is not known to exist.

        If it exists nevertheless, it belongs to somebody else, or the watch has not reported it yet.
        """
        if key.kind in _MERGED:
            await self._version_of_ours(key, manifest)
        try:
            return await self._cluster.apply(manifest)
        except ApiError as error:
            if error.status not in (409, 422):
                raise
            version = await self._version_of_ours(key, manifest)
            if version is None or error.status != 409:
                raise
        return await self._cluster.apply(manifest, version)

    async def _version_of_ours(self, key: Key, manifest: Manifest) -> str | None:
        """Return the resourceVersion of the object that `manifest` describes; None if there is none.

        Raises:
            ApiError: the object of that name has another owner, or none (`NAME_CONFLICT`).
        """
        found = await self._cluster.get(KINDS[key.kind], key.namespace, key.name)
        if found is None:
            return None
        owners = {one["uid"] for one in found["metadata"].get("ownerReferences", ())}
        if owners.isdisjoint(one["uid"] for one in manifest["metadata"].get("ownerReferences", ())):
            raise ApiError(
                409, NAME_CONFLICT, f"{key} exists and belongs to another owner; rename or delete it"
            )
        return str(found["metadata"]["resourceVersion"])

    async def _describe(self, key: Key, resource: Document, status: ReplicaStatus | DeploymentStatus) -> bool:
        """Write the status of `resource`, with the conditions of the present failure if there is one; return whether it wrote."""
        if key in self._failures_by_key:
            before = _read_status(key, resource)
            problem = self._failures_by_key[key].over(status)
            notice = stamped(problem, before.conditions, status.observed_generation, self._now())
            status = with_conditions(status, notice)
            if status == before:
                return False
        written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        answer = await self._cluster.write_status(key, resource["metadata"], written)
        self._index.offer(answer, quiet=key)  # a reconcile need not be notified of its own write
        self._telemetry.described(resource, written, self._now())
        if "newestMember" in resource.get("status", {}) and "newestMember" not in written:
            # The next gang will mount its Secrets: forget them, so that a missing one is created.
            self._index.secrets.pop(resource["metadata"]["uid"], None)
        return True

    async def _failed(self, key: Key, resource: Document, planned: Plan, error: Exception) -> None:
        """Count a failed reconcile, and report in the status what was refused, what is missing, or what fails repeatedly."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        latest = self._index.resource(key)  # with what this reconcile has written
        if latest is None or latest["metadata"]["uid"] != resource["metadata"]["uid"]:
            return
        statuses = [action.status for action in planned.actions if isinstance(action, SetStatus)]
        generation = {"observed_generation": resource["metadata"]["generation"]}
        status = (statuses[0] if statuses else _read_status(key, latest)).model_copy(update=generation)
        problem = _failure_of(error, count)
        if problem is None:
            return
        self._failures_by_key[key] = problem
        notice = RecordEvent(problem.reason, problem.message, is_warning=True)
        try:
            if await self._describe(key, latest, status):
                await self._record_event(key, latest, notice)
        except ApiError as failure:
            _log.warning("%s: the failure could not be reported in the status: %s", key, failure)

    async def _record_event(self, key: Key, resource: Document, notice: RecordEvent) -> None:
        """Emit an event. A failure to write it is only logged."""
        _log.log(
            logging.WARNING if notice.is_warning else logging.INFO,
            "%s: %s: %s",
            key,
            notice.reason,
            notice.message,
        )
        try:
            await self._cluster.record_event(
                resource, notice.reason, notice.message, is_warning=notice.is_warning, holder=self._holder
            )
        except ApiError as error:
            _log.warning("%s: the event %s was not written: %s", key, notice.reason, error)


def _target(key: Key, action: Action) -> Key:
    """Return the object that an action writes."""
    match action:
        case Apply(manifest):
            return Key(manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        case Delete(kind, name) | Prune(kind, name):
            return Key(kind, key.namespace, name)
        case _:
            return key


def _read_status(key: Key, resource: Document) -> ReplicaStatus | DeploymentStatus:
    if key.kind == DEPLOYMENT.name:
        return read_status(resource, DeploymentStatus)
    return read_status(resource, ReplicaStatus)


def _waiting(resource: Document, leftovers: Iterable[str], now: float) -> Plan:
    """Return the plan that reports which objects of an earlier resource of this name are not deleted yet."""
    generation = resource["metadata"]["generation"]
    message = f"objects of an earlier {resource['kind']} of this name are not deleted yet: {', '.join(sorted(leftovers))}"
    before = read_status(resource, ReplicaStatus)
    notice = before.model_copy(update={"observed_generation": generation})
    conditions = stamped(derive_waiting("WaitingForCleanup", message), before.conditions, generation, now)
    status = with_conditions(notice, conditions)
    return Plan(status_change(before, status))


def _failure_of(error: Exception, failures: int) -> Failure | None:
    """Return the failure to report after `failures` consecutive failed reconciles, of which the last raised `error`.

    None if there is nothing to report yet.
    """
    if isinstance(error, ApiError) and error.reason in REPORTED_REASONS:
        return Failure(error.reason, str(error), is_refusal=True)
    if isinstance(error, ApiError) and (problem := schema_problem(str(error))) is not None:
        return Failure("Refused", problem, is_refusal=True)
    if isinstance(error, ApiError) and error.status in REFUSALS:
        reason, fix = refusal_of(str(error)) or ("Refused", "")
        text = f"the API server refused: {error}"
        return Failure(reason, f"{text}: {fix}" if fix else text, is_refusal=True)
    if failures < REPORTED_FAILURES:
        return None
    if isinstance(error, ApiError):
        text = f"the API server did not do what was asked: {error}"
        return Failure("ApiServerFails", text, is_refusal=False)
    text = f"a mistake of the operator: {type(error).__name__}: {error}"
    return Failure("OperatorFails", text, is_refusal=False)


def is_refusal(error: ApiError) -> bool:
    """Return whether the answer will not change by itself."""
    return error.status in REFUSALS or schema_problem(str(error)) is not None


def _no_gang(target: Key) -> ApiError:
    """Return the error for an unknown kind of a gang scheduler, which is missing or of another release."""
    return ApiError(
        404,
        GANG_UNAVAILABLE,
        f"the API server knows no {target.kind} of {KINDS[target.kind].api_version}, which placement.gang needs: "
        "install that gang scheduler, or ask for another one",
    )
