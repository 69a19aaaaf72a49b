"""Reasons why pods are not created or do not start, read from events, each with a fix.

Only the events of the StatefulSet controller and of the kubelet have them, not the status of a StatefulSet or pod.
Events are read only if a replica has made no progress for some seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from medha_operator.replica.observed import Object, Observed, Pod, seconds

PATIENCE_SECONDS = 5.0
"""Age in seconds of a StatefulSet or pod before its events are read: most are created, and start, in less."""
REREAD_SECONDS = 30.0
"""Seconds until events are read again while nothing else changes."""
RECENT_SECONDS = 10.0
"""Seconds for which the events read last are reused."""

POD_SECURITY, QUOTA, ADMISSION = "PodSecurityRefused", "QuotaExceeded", "AdmissionRefused"
REFUSED = frozenset({"Refused", POD_SECURITY, QUOTA, ADMISSION})
"""Reasons of writes that the API server has refused."""
_SAME_TIME_SECONDS = 60.0
_UNKNOWN_FIELD = re.compile(r"(?:^|[\s:])\.(spec\.template\.spec\.\S+): field not declared in schema")
_NOT_FOUND = re.compile(r'volume "([^"]+)" : (secret|configmap) "([^"]+)" not found')
_NO_RUNTIME_CLASS = re.compile(r'RuntimeClass "[^"]+" not found')
_NO_ENTRY = re.compile(r'volume "([^"]+)" : references non-existent (?:secret|config) key: (\S+)')
_WAITS = "StartingContainers"


@dataclass(frozen=True)
class UnexplainedWait:
    """An object that makes no progress and does not report why."""

    uid: str
    """UID of the StatefulSet or of the pod."""
    since: float
    """Unix time of its creation, seconds."""
    pod: str | None = None
    """Name of the pod; None if a StatefulSet creates none."""


def refusal_of(message: str) -> tuple[str, str] | None:
    """Return the reason of a refusal by admission, and the fix; None if `message` reports no refusal."""
    if "violates PodSecurity" in message:
        if "hostPath" in message:
            fix = (
                "use model.source.pvc, image or huggingFace (there without cache.hostPath), because the namespace's Pod "
                "Security level allows no hostPath; or label the namespace pod-security.kubernetes.io/enforce=privileged"
            )
        else:
            fix = "correct spec.template, or lower the namespace's label pod-security.kubernetes.io/enforce"
        return POD_SECURITY, fix
    if "exceeded quota" in message:
        return QUOTA, "raise that ResourceQuota of the namespace, or free some of it"
    if "failed quota" in message:
        return QUOTA, "set in spec.resources the resources that this ResourceQuota counts"
    if _NO_RUNTIME_CLASS.search(message) is not None:
        return "RuntimeClassNotFound", "create it, or correct spec.resources.runtimeClassName"
    if re.search(r"denied (the )?request|is forbidden: (?!User )", message):
        return ADMISSION, "correct spec.template or spec.resources, or ask the owner of that policy"
    return None


def schema_problem(message: str) -> str | None:
    """Return what is wrong with `spec.template.spec`, from the API server's message.

    None if the message is not about a StatefulSet that it cannot read.
    """
    if "failed to create typed patch object" not in message:
        return None
    unknown = _UNKNOWN_FIELD.findall(message)
    if unknown:
        fields = ", ".join(dict.fromkeys(unknown))
        return f"a pod has no field {fields}: correct its spelling or remove it"
    notice = message.partition("Kind=StatefulSet): ")[2] or message
    return f"spec.template.spec has a value that a pod cannot have: {notice}"


def unexplained_wait(observed: Observed) -> UnexplainedWait | None:
    """Return the object whose events may explain why the replica makes no progress; None if no explanation is needed."""
    if any(pod.is_deleting for pod in (*observed.pods, *observed.earlier_pods)):
        return None  # their names are still in use
    names = {pod.name for pod in observed.pods}
    for (kind, name), found in sorted(observed.objects.items()):
        if kind == "StatefulSet" and "deletionTimestamp" not in found["metadata"]:
            metadata = found["metadata"]
            wanted = {f"{name}-{ordinal}" for ordinal in range(found["spec"]["replicas"])}
            if not wanted <= names and "creationTimestamp" in metadata:
                return UnexplainedWait(metadata["uid"], seconds(metadata["creationTimestamp"]))
    for pod in observed.pods:
        if pod.problem is not None and pod.problem[0] == _WAITS:
            return UnexplainedWait(pod.uid, pod.created, pod.name)
    return None


def latest_event_message(events: Iterable[Object]) -> str:
    """Return the message of the newest warning; of several within a minute, the alphabetically first; empty if none."""
    notice = [(_last_seen(one), one.get("message", "")) for one in events if one.get("type") == "Warning"]
    newest = max((at for at, _ in notice), default=0.0)
    return min((message for at, message in notice if at >= newest - _SAME_TIME_SECONDS), default="")


def explained(observed: Observed, unexplained: UnexplainedWait, message: str) -> Observed:
    """Return `observed` with what `message` reports about the wait."""
    if not message:
        return observed
    if unexplained.pod is None:
        notice = message.rpartition("failed error: ")[2]
        reason, fix = refusal_of(notice) or ("CreatingPods", "check the events of the StatefulSets")
        return replace(observed, unmade=(reason, f"{notice}: {fix}"))
    pods = (
        replace(pod, problem=_problem(observed, pod, message)) if pod.uid == unexplained.uid else pod
        for pod in observed.pods
    )
    return replace(observed, pods=tuple(pods))


def _problem(observed: Observed, pod: Pod, message: str) -> tuple[str, str]:
    """Return reason and message for a pod whose containers are not created, and whose kubelet reports `message`."""
    missing, entry = _NOT_FOUND.search(message), _NO_ENTRY.search(message)
    if missing is not None:
        volume, kind, name = missing.groups()
        absent = (
            f"{'Secret' if kind == 'secret' else 'ConfigMap'} {name} is not in namespace {observed.namespace}"
        )
        if volume == "enrolment":
            return "RouterNotFound", f"{absent}: {_router_fix(observed)}"
        if volume == "hub-token":
            fix = "create it, or correct spec.model.source.huggingFace.tokenSecret.name"
            return "SecretNotFound", f"{absent}: {fix}"
        reason = "SecretNotFound" if kind == "secret" else "VolumeUnavailable"
        return reason, f"{absent}, which the pod's volume {volume} needs"
    if entry is not None:
        volume, key = entry.groups()
        field = (
            "spec.model.source.huggingFace.tokenSecret.key" if volume == "hub-token" else f"volume {volume}"
        )
        return "SecretNotFound", f"the Secret has no entry {key}: add it, or correct {field}"
    if "MountVolume" in message or "AttachVolume" in message or "Unable to attach or mount" in message:
        if "hostPath type check failed" in message:
            hub = observed.spec.get("model", {}).get("source", {}).get("huggingFace") or {}
            field = "huggingFace.cache.hostPath" if hub.get("cache", {}).get("hostPath") else "hostPath.path"
            message = f"{message}: spec.model.source.{field} must be a directory of node {pod.node}"
        return "VolumeUnavailable", message
    return _WAITS, message


def _router_fix(observed: Observed) -> str:
    router = observed.spec.get("routerRef", {})
    if router.get("secret"):
        return "create it, or correct spec.routerRef.secret"
    return (
        f"no router {router.get('name', '')} has its keys here; correct spec.routerRef.name, or name the router's "
        "namespace in spec.routerRef.namespace"
    )


def _last_seen(event: Object) -> float:
    series = event.get("series") or {}
    time = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds(time) if time else 0.0
