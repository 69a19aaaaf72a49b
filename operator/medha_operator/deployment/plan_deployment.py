"""Plan the actions for one deployment: `plan_deployment(observed, now, settings)`, pure and level-triggered.

A deployment of N replicas owns the MedhaReplicas `<name>-0` to `<name>-<N-1>`. A new template reaches them in
place, by whole replicas, from the highest index down to `rollout.partition`: a replica that gets it ends all
of its pods and starts new ones, so that no replica ever has two revisions. Meanwhile up to `maxSurge` further
replicas, from index N on, stand in for those that are away. A change that restarts no pods is applied to all
replicas at once.

Every plan for a valid spec keeps two bounds. No replica is created beyond N + maxSurge, and no available
replica is taken down unless N - maxUnavailable others are available. A replica that is not available may
always be changed, since nobody waits for it. If it is not known whether a replica serves, it does not
count as available, but is taken down as carefully as one that serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from pydantic import ValidationError

from medha.api.deployment import MedhaDeploymentSpec, RolloutSpec
from medha.api.replica import MedhaReplicaSpec
from medha_operator.deployment.deployment_conditions import (
    Rollout,
    begins_to_move,
    derive_refused_rollout_conditions,
    derive_rollout_conditions,
)
from medha_operator.deployment.observed_deployment import (
    DEPLOYMENT_LABEL,
    MAY_DRAIN,
    TEMPLATE_LABEL,
    Child,
    ObservedDeployment,
    StoredTemplate,
    begin_template,
    child_name,
    find_template,
    has_pods_for,
    next_number,
)
from medha_operator.kube.kinds import DEPLOYMENT, OUR_LABELS, REPLICA, Manifest
from medha_operator.kube.manifest_overlay import holds, overlaid
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import (
    Action,
    Apply,
    Confirm,
    Delete,
    Plan,
    RecordEvent,
    soonest,
    status_change,
)
from medha_operator.replica.conditions import deleting, problems_in, stamped
from medha_operator.replica.event_reasons import REFUSED
from medha_operator.replica.observed import seconds, timestamp
from medha_operator.replica.revision import restart_fields
from medha_operator.status_fields import DeploymentStatus


def plan_deployment(observed: ObservedDeployment, now: float, settings: OperatorSettings) -> Plan:
    """Return the actions that bring `observed` nearer to its spec; none if it is there.

    `now` is Unix time in seconds.
    """
    if observed.is_deleting:  # the garbage collector deletes the replicas
        status = deleting(
            observed.status, observed.generation, now, "it was deleted; its replicas finish open requests"
        )
        return Plan(status_change(observed.status, status))
    try:
        spec = MedhaDeploymentSpec.model_validate(observed.spec)
    except ValidationError as error:
        return _plan_refused(observed, problems_in(error), now, settings)
    desired, kept = _desired(observed, spec)
    scene = _scene(observed, desired, now, settings)
    created = list(_create(scene))
    # Creations come last: a refused action ends the reconcile, and the API server may refuse further
    # replicas. Existing ones must not wait for them.
    steps = [*_change(scene), *_remove(scene), *created]
    status, again = _described(scene, now)
    confirmed = [Confirm()] if created else []
    changed = status_change(observed.status, status)
    return Plan((*confirmed, *kept, *steps, *changed, *_history(scene)), again)


def _plan_refused(
    observed: ObservedDeployment, problems: str, now: float, settings: OperatorSettings
) -> Plan:
    """Return the plan for a spec that the schema accepts and the models do not.

    The replicas stay as they are. A cordoned node is emptied all the same, one replica after the other, as
    the spec does not say how many may be missing.
    """
    replicas = 1 + max((child.index for child in observed.children if child.is_ours), default=-1)
    rollout = RolloutSpec(max_surge=0, max_unavailable=1)
    spec = MedhaDeploymentSpec.model_construct(replicas=replicas, rollout=rollout, paused=True)
    before = observed.status
    update, current = (
        StoredTemplate(name or "", 0, {}) for name in (before.update_revision, before.current_revision)
    )
    desired = _Desired(spec, *_bounds(spec), update, current, kept={})
    scene = _scene(observed, desired, now, settings)
    status, again = _described(scene, now, problems)
    return Plan((*_change(scene), *status_change(observed.status, status)), again)


# --- what is wanted -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Desired:
    """The spec in numbers, and the template of each index."""

    spec: MedhaDeploymentSpec
    surge: int
    unavailable: int
    update: StoredTemplate
    """Template that the spec asks for."""
    current: StoredTemplate
    """Template that all replicas had last: that of replicas which the rollout does not reach."""
    kept: Mapping[str, StoredTemplate]

    def template(self, index: int, child: Child | None) -> StoredTemplate:
        """Return the template for the replica with this index."""
        if not self.spec.paused and index >= self.spec.rollout.partition:
            stands_in = index >= self.spec.replicas
            return self.current if stands_in and _suspends(self.update) else self.update
        if child is None:
            return self.current
        # If its template is no longer kept, the replica stays as it is.
        return self.kept.get(child.revision) or _template_in(child)


def _suspends(template: StoredTemplate) -> bool:
    return template.template["spec"].get("suspend") is True


def _desired(observed: ObservedDeployment, spec: MedhaDeploymentSpec) -> tuple[_Desired, list[Action]]:
    """Return what is wanted, and the actions that keep its template before anything is made from it."""
    template = dict(observed.spec["template"])
    known = find_template(template, observed.templates)
    update = known or begin_template(template, observed.templates)
    actions: list[Action] = []
    if known is not None and any(one.number > known.number for one in observed.templates):
        update = replace(known, number=next_number(observed.templates))  # asked for again: now the newest
    kept = {one.name: one for one in (*observed.templates, update)}
    present = sorted((child for child in observed.children if child.is_ours), key=lambda child: child.index)
    older = [child.revision for child in present if child.revision in kept and child.revision != update.name]
    names = (observed.status.current_revision, *older, update.name)
    current = next(kept[name] for name in names if name in kept)
    if update != known and (not spec.paused or current.name == update.name):
        actions.append(Apply(_template_manifest(observed, update)))
        if known is None and not spec.paused:
            actions.append(RecordEvent("RolloutStarted", f"template {update.name} is rolled out"))
    surge, unavailable = _bounds(spec)
    return _Desired(spec, surge, unavailable, update, current, kept), actions


def _template_in(child: Child) -> StoredTemplate:
    """Return the template of a replica as it is now."""
    metadata = child.document["metadata"]
    annotations = {name: text for name, text in metadata.get("annotations", {}).items() if name != MAY_DRAIN}
    own = {"labels": metadata.get("labels", {}), "annotations": annotations}
    return StoredTemplate(child.revision, 0, {"metadata": own, "spec": child.document["spec"]})


def _bounds(spec: MedhaDeploymentSpec) -> tuple[int, int]:
    """Return `maxSurge` and `maxUnavailable` in replicas; never both 0, or nothing could ever move."""
    surge = _share(spec.rollout.max_surge, spec.replicas, ceil)
    unavailable = _share(spec.rollout.max_unavailable, spec.replicas, floor)
    return surge, unavailable if surge or unavailable else 1


def _share(bound: int | str, replicas: int, rounded: Any) -> int:
    if isinstance(bound, int):
        return bound
    return int(rounded(int(bound.rstrip("%")) * replicas / 100))


def _template_manifest(observed: ObservedDeployment, kept: StoredTemplate) -> Manifest:
    """Return the ControllerRevision that keeps a template."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": _metadata(observed, f"{observed.name}-{kept.name}"),
        "revision": kept.number,
        "data": {"template": dict(kept.template)},
    }


def _replica_manifest(
    observed: ObservedDeployment, index: int, kept: StoredTemplate, may_drain: str | None = None
) -> Manifest:
    """Return the manifest of a replica.

    Its pods carry the deployment's label, by which `status.selector` finds each replica's leader, so that HPA
    and KEDA count one pod per replica.
    """
    template = kept.template
    own = template.get("metadata", {})
    metadata = _metadata(observed, child_name(observed.name, index))
    metadata["labels"] = {**own.get("labels", {}), **metadata["labels"], TEMPLATE_LABEL: kept.name}
    annotations = {**own.get("annotations", {}), **({MAY_DRAIN: may_drain} if may_drain else {})}
    if annotations:
        metadata["annotations"] = annotations
    marked = {"template": {"metadata": {"labels": {DEPLOYMENT_LABEL: observed.name}}}}
    return {
        "apiVersion": REPLICA.api_version,
        "kind": REPLICA.name,
        "metadata": metadata,
        "spec": overlaid(template["spec"], marked),
    }


def _metadata(observed: ObservedDeployment, name: str) -> Manifest:
    return {
        "name": name,
        "namespace": observed.namespace,
        "labels": OUR_LABELS | {DEPLOYMENT_LABEL: observed.name},
        "ownerReferences": [DEPLOYMENT.controller(observed.name, observed.uid)],
    }


# --- what is there --------------------------------------------------------------------------------------


@dataclass
class _Scene:
    """The existing replicas, what is wanted, and how many replicas this plan may still take down."""

    observed: ObservedDeployment
    desired: _Desired
    now: float
    present: dict[int, Child]
    """The deployment's own replicas that are not being deleted, by index."""
    away: frozenset[int]
    """Indices whose name belongs to a replica that is being deleted, or to somebody else's."""
    available: int
    """Replicas available now, less those that this plan takes down."""
    unsure: int
    """Replicas that may serve although nothing reports it, less those that this plan takes down."""
    outdated: dict[int, Child]
    """Replicas whose change would end pods, by index."""
    leaving: dict[int, Child]
    """Replicas that must leave their node and are not permitted to yet, by index."""
    surge: int
    """Replicas wanted beyond the number of the spec."""
    is_starved: bool
    """True if no further replica may be possible: one finds no room, or the API server has refused a
    write."""
    has_no_capacity: bool = False
    """True if a replica has found no room for `surge_wait_seconds`."""
    suspending: int = 0
    """Replicas that should have no pods, so that nobody waits for them."""
    again: float | None = None

    @property
    def replicas(self) -> int:
        return self.desired.spec.replicas

    def manifest(self, index: int, child: Child | None = None) -> Manifest:
        """Return the manifest of the replica, with the permission to leave that it already has."""
        gang = child.document["status"]["newestMember"] if child is not None and child.may_drain else None
        return _replica_manifest(self.observed, index, self.desired.template(index, child), gang)

    def is_suspending(self, index: int, child: Child) -> bool:
        """Return whether the replica should have no pods: it needs no stand-in, and nobody waits for it."""
        return _suspends(self.desired.template(index, child))

    def is_available(self, child: Child) -> bool:
        return is_available(child, self.desired.spec.min_ready_seconds, self.now)

    def requeue(self, wait_seconds: float) -> None:
        self.again = soonest(self.again, wait_seconds)


def _scene(observed: ObservedDeployment, desired: _Desired, now: float, settings: OperatorSettings) -> _Scene:
    ours = [child for child in observed.children if child.is_ours]
    present = {child.index: child for child in ours if not child.is_deleting}
    away = frozenset(child.index for child in observed.children if child.is_deleting or not child.is_ours)
    scene = _Scene(observed, desired, now, present, away, 0, 0, {}, {}, 0, is_starved=_is_refused(observed))
    noted = _unplaced_since(observed, now)
    for index, child in present.items():
        scene.suspending += index < scene.replicas and scene.is_suspending(index, child)
        scene.available += scene.is_available(child)
        scene.unsure += child.may_serve
        if child.serving_since is not None:
            left = child.serving_since + desired.spec.min_ready_seconds - now
            if left > 0:
                scene.requeue(left)
        if _ends_pods(child, scene.manifest(index, child)):
            scene.outdated[index] = child
        elif child.waits_to_drain:
            scene.leaving[index] = child
        if child.unplaced_since is not None:
            # `Scheduled` may have become False before for another reason, e.g. a suspension, so that its time
            # is too early.
            left = max(child.unplaced_since, noted) + settings.surge_wait_seconds - now
            scene.has_no_capacity |= left <= 0
            if left > 0:
                scene.requeue(left)
    scene.is_starved |= scene.has_no_capacity
    # A replica that changes needs a stand-in only if it is available or may serve. A replica that moves needs one
    # whenever it serves, because a move can wait.
    changing = [
        index
        for index, child in scene.outdated.items()
        if (scene.is_available(child) or child.may_serve) and not scene.is_suspending(index, child)
    ]
    moving = [index for index, child in scene.leaving.items() if child.serving_since is not None]
    serving = [index for index in (*changing, *moving) if index < scene.replicas]
    scene.surge = min(desired.surge, len(serving))
    return scene


def _unplaced_since(observed: ObservedDeployment, now: float) -> float:
    """Return the Unix time since which the status reports a lack of room; `now` if it does not yet."""
    for one in observed.status.conditions:
        if one.type == "Scheduled" and one.status == "False":
            return min(seconds(one.last_transition_time), now)
    return now


def _is_refused(observed: ObservedDeployment) -> bool:
    """Return whether the API server has refused a write of the deployment itself, according to its status."""
    return any(
        one.type == "Accepted" and one.status == "False" and one.reason in REFUSED
        for one in observed.status.conditions
    )


def is_available(child: Child, min_ready_seconds: float, now: float) -> bool:
    """Return whether the replica has been ready for long enough, and is not about to leave its node."""
    return (
        child.serving_since is not None
        and not child.may_drain
        and now - child.serving_since >= min_ready_seconds
    )


def _ends_pods(child: Child, manifest: Manifest) -> bool:
    """Return whether applying `manifest` to the replica ends its pods."""
    if holds(child.document, manifest) or _runs(child, manifest):
        return False
    try:
        here = MedhaReplicaSpec.model_validate(child.document["spec"])
        there = MedhaReplicaSpec.model_validate(manifest["spec"])
    except ValidationError:
        return True
    return restart_fields(here) != restart_fields(there)


def _runs(child: Child, manifest: Manifest) -> bool:
    """Return whether `manifest` asks for the very pods that serve while the replica's own spec is refused."""
    return child.may_serve and has_pods_for(manifest["spec"], child.running)


# --- steps ----------------------------------------------------------------------------------------------


def _create(scene: _Scene) -> Iterable[Action]:
    """Yield the creation of missing replicas; beyond the spec's number, only as many as the bound allows."""
    capacity = scene.replicas + scene.desired.surge - len(scene.present)
    for index in range(scene.replicas + scene.surge):
        if index in scene.present or index in scene.away:
            continue
        if index >= scene.replicas:
            if capacity <= 0:
                return
            text = f"replica {child_name(scene.observed.name, index)} is added during the change"
            yield RecordEvent("SurgeCreated", text)
        yield Apply(scene.manifest(index))
        capacity -= 1


def _change(scene: _Scene) -> Iterable[Action]:
    """Yield the changes of replicas that differ from what they should be.

    Replicas that do not serve come first; within each group, the highest index does.
    """
    kept = scene.replicas + scene.surge
    for index, child in sorted(
        scene.present.items(), key=lambda item: (item[1].serving_since is not None, -item[0])
    ):
        if index >= kept:
            continue
        manifest = scene.manifest(index, child)
        if index in scene.outdated:
            suspends = scene.is_suspending(index, child)
            if _take_down(scene, child, scene.replicas if suspends else scene.desired.unavailable):
                template = manifest["metadata"]["labels"][TEMPLATE_LABEL]
                yield RecordEvent("ReplicaChanging", f"replica {child.name} gets template {template}")
                yield from _replaced(child, manifest)
        elif index in scene.leaving:
            if child.serving_since is not None and not scene.is_available(child):
                continue  # it serves but is not available yet: it moves once it is
            # A stand-in comes first, unless there may be none, or it finds no room.
            has_no_other = scene.desired.surge == 0 or scene.is_starved
            if _take_down(scene, child, scene.desired.unavailable if has_no_other else 0):
                yield RecordEvent("ReplicaMoving", f"replica {child.name} leaves its cordoned node")
                gang = child.document["status"]["newestMember"]
                yield Apply(
                    _replica_manifest(
                        scene.observed, index, scene.desired.template(index, child), may_drain=gang
                    )
                )
        elif not holds(child.document, manifest) or _has_leave_left_over(child, manifest):
            yield Apply(manifest)


def _take_down(scene: _Scene, child: Child, unavailable: int) -> bool:
    """Return whether the replica may be taken down now; if so, count it.

    A replica that does not serve may always be taken down. If it is unknown whether this replica serves, the others of
    which that is unknown count as available: otherwise none of them could ever be fixed.
    """
    least = scene.replicas - scene.suspending - unavailable
    if scene.is_available(child):
        if scene.available - 1 < least:
            return False
        scene.available -= 1
    elif child.may_serve:
        if scene.available + scene.unsure - 1 < least:
            return False
        scene.unsure -= 1
    return True


def _replaced(child: Child, manifest: Manifest) -> Iterable[Action]:
    """Yield the change itself.

    A change of the immutable field `placement.gang` needs a new object of the same name.
    """
    here, there = (one["spec"].get("placement", {}).get("gang", "none") for one in (child.document, manifest))
    if here == there:
        yield Apply(manifest)
    else:
        yield _delete(REPLICA.name, child.name, child, f"its gang changes from {here} to {there}")


def _has_leave_left_over(child: Child, manifest: Manifest) -> bool:
    granted = child.document["metadata"].get("annotations", {})
    return MAY_DRAIN in granted and MAY_DRAIN not in manifest["metadata"].get("annotations", {})


def _remove(scene: _Scene) -> Iterable[Action]:
    """Yield the deletion of surplus replicas: those that do not serve first, then the newest.

    A ready one stays while it stands in for another. If a replica finds no room, a surplus one may have taken
    it. Then surplus ones end although up to `maxUnavailable` replicas are missing.
    """
    kept = scene.replicas + scene.surge
    surplus = [child for index, child in scene.present.items() if index >= kept]
    for child in sorted(surplus, key=lambda one: (one.serving_since is not None, -one.index)):
        if _take_down(scene, child, scene.desired.unavailable if scene.is_starved else 0):
            yield _delete(REPLICA.name, child.name, child, f"{scene.replicas} replicas are wanted")


def _history(scene: _Scene) -> Iterable[Action]:
    """Yield the deletion of kept templates that are too old to go back to."""
    in_use = {scene.desired.update.name, scene.desired.current.name}
    in_use |= {child.revision for child in scene.observed.children}
    old = sorted(
        (one for one in scene.observed.templates if one.name not in in_use), key=lambda one: -one.number
    )
    for one in old[scene.desired.spec.revision_history_limit :]:
        name = f"{scene.observed.name}-{one.name}"
        if not one.is_deleting:  # otherwise somebody else's finalizer holds it
            yield _delete("ControllerRevision", name, one, "older than revisionHistoryLimit")


def _delete(kind: str, name: str, found: Child | StoredTemplate, reason: str) -> Delete:
    return Delete(kind, name, found.uid, found.resource_version, reason)


# --- status ---------------------------------------------------------------------------------------------


def _described(scene: _Scene, now: float, problems: str = "") -> tuple[DeploymentStatus, float | None]:
    """Return the status of what exists (not of what this plan does), and seconds until the next reconcile.

    `problems` are those of the spec.
    """
    before, counts, rollout = scene.observed.status, _counts(scene, problems), _rollout(scene)
    has_moved = (
        before.last_progress_time is None
        or seconds(before.last_progress_time) > now  # it was tampered with
        or begins_to_move(rollout, before.conditions)
        or any(getattr(before, name) != value for name, value in counts.items())
    )
    last_progress = timestamp(now) if has_moved else before.last_progress_time
    assert last_progress is not None
    left = seconds(last_progress) + scene.desired.spec.progress_deadline_seconds - now
    if problems:
        derived = derive_refused_rollout_conditions(rollout, problems)
    else:
        derived = derive_rollout_conditions(replace(rollout, is_late=left <= 0))
    conditions = stamped(derived, before.conditions, scene.observed.generation, now)
    if left > 0 and not rollout.is_complete:
        scene.requeue(left)
    return before.model_copy(
        update=counts | {"last_progress_time": last_progress, "conditions": conditions}
    ), scene.again


def _counts(scene: _Scene, problems: str) -> dict[str, Any]:
    """Return the status fields that count replicas and name their templates."""
    observed, desired, children = scene.observed, scene.desired, scene.present.values()
    own = [child for index, child in scene.present.items() if index < scene.replicas]
    is_updated = all(child.revision == desired.update.name for child in own)
    # Without any replica, `current_revision` stays: replicas that come again below a partition or during a
    # pause are made from the template that the last ones had.
    is_everywhere = 0 < len(own) == scene.replicas and is_updated
    return {
        "observed_generation": observed.generation,
        "replicas": len(scene.present),
        "updated_replicas": sum(child.revision == desired.update.name for child in children),
        "ready_replicas": sum(child.serving_since is not None for child in children),
        "available_replicas": sum(map(scene.is_available, children)),
        "selector": f"{DEPLOYMENT_LABEL}={observed.name},medha.dev/lane=0,apps.kubernetes.io/pod-index=0",
        "current_revision": (desired.update if is_everywhere and not problems else desired.current).name,
        "update_revision": desired.update.name,
    }


def _rollout(scene: _Scene) -> Rollout:
    """Return the facts from which conditions are derived; it is not late yet."""
    observed, desired, children = scene.observed, scene.desired, scene.present.values()
    differing = {
        index
        for index, child in scene.present.items()
        if index < scene.replicas and not holds(child.document, scene.manifest(index, child))
    }
    permitted = {index for index, child in scene.present.items() if child.may_drain}
    return Rollout(
        replicas=scene.replicas,
        least_available=max(0, scene.replicas - desired.unavailable),
        available=sum(map(scene.is_available, children)),
        children=tuple(sorted(children, key=lambda child: child.index)),
        differing=frozenset(differing),
        moving=frozenset(scene.leaving) | permitted,
        taken=tuple(
            child.name
            for child in observed.children
            if child.index < scene.replicas + scene.surge and not (child.is_ours or child.is_left_over)
        ),
        template=desired.update.name,
        has_change_waiting=desired.spec.paused
        and any(child.revision != desired.update.name for child in children),
        is_blocked=scene.has_no_capacity and desired.unavailable == 0,
        is_late=False,
        min_ready_seconds=desired.spec.min_ready_seconds,
        now=scene.now,
    )
