"""Why pods are not made or do not start, in the words of whoever refuses them: as a reason, with what mends it.

The status of a StatefulSet or a pod does not tell; the events of the StatefulSet's controller and of the kubelet do. They are read
only where a replica has been at a loss for some seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from medha_operator.replica.observed import Object, Observed, Pod, seconds

PATIENCE_SECONDS = 5.0
"""How old a StatefulSet or a pod is before its events are read: most are made, and start, in less."""
AGAIN_SECONDS = 30.0
"""How often they are read again while nothing else changes."""
RECENT_SECONDS = 10.0
"""How long what was read last is good for."""

POD_SECURITY, QUOTA, ADMISSION = "PodSecurityRefused", "QuotaExceeded", "AdmissionRefused"
REFUSED = frozenset({"Refused", POD_SECURITY, QUOTA, ADMISSION})
"""Reasons of what the API server has refused."""
_SAME_TIME_SECONDS = 60.0
_UNKNOWN_FIELD = re.compile(r"(?:^|[\s:])\.(spec\.template\.spec\.\S+): field not declared in schema")
_NOT_FOUND = re.compile(r'volume "([^"]+)" : (secret|configmap) "([^"]+)" not found')
_NO_ENTRY = re.compile(r'volume "([^"]+)" : references non-existent (?:secret|config) key: (\S+)')
_WAITS = "StartingContainers"


@dataclass(frozen=True)
class Doubt:
    """What does not get on without saying why."""

    uid: str
    """Of the StatefulSet, or of the pod."""
    since: float
    """When it was made, Unix time in seconds."""
    pod: str | None = None
    """Name of the pod; None: a StatefulSet makes none."""


def refusal_of(words: str) -> tuple[str, str] | None:
    """The reason of a refusal by admission, and what mends it; None: `words` tell of none."""
    if "violates PodSecurity" in words:
        if "hostPath" in words:
            fix = (
                "give the model by model.source.pvc, huggingFace or image, for the namespace's level of Pod Security allows "
                "no hostPath; or label the namespace pod-security.kubernetes.io/enforce=privileged"
            )
        else:
            fix = "mend spec.template, or lower the namespace's label pod-security.kubernetes.io/enforce"
        return POD_SECURITY, fix
    if "exceeded quota" in words:
        return QUOTA, "raise that ResourceQuota of the namespace, or make room in it"
    if "failed quota" in words:
        return QUOTA, "name in spec.resources what that ResourceQuota counts"
    if re.search(r"denied (the )?request|is forbidden: (?!User )", words):
        return ADMISSION, "ask who looks after that policy, or mend spec.template or spec.resources"
    return None


def schema_problem(words: str) -> str | None:
    """What is wrong with `spec.template.spec`, from the API server's words about a StatefulSet that it cannot read."""
    if "failed to create typed patch object" not in words:
        return None
    unknown = _UNKNOWN_FIELD.findall(words)
    if unknown:
        fields = ", ".join(dict.fromkeys(unknown))
        return f"{fields} is no field of a pod: correct its spelling or remove it"
    told = words.partition("Kind=StatefulSet): ")[2] or words
    return f"spec.template.spec has a value that a pod cannot have: {told}"


def in_doubt(observed: Observed) -> Doubt | None:
    """Whose events may tell why the replica does not get on; None: nothing is unclear."""
    if any(pod.is_deleting for pod in (*observed.pods, *observed.earlier_pods)):
        return None  # whose names are still in use
    names = {pod.name for pod in observed.pods}
    for (kind, name), found in sorted(observed.objects.items()):
        if kind == "StatefulSet" and "deletionTimestamp" not in found["metadata"]:
            metadata = found["metadata"]
            wanted = {f"{name}-{ordinal}" for ordinal in range(found["spec"]["replicas"])}
            if not wanted <= names and "creationTimestamp" in metadata:
                return Doubt(metadata["uid"], seconds(metadata["creationTimestamp"]))
    for pod in observed.pods:
        if pod.trouble is not None and pod.trouble[0] == _WAITS:
            return Doubt(pod.uid, pod.created, pod.name)
    return None


def latest_words(events: Iterable[Object]) -> str:
    """What the newest warnings say; of those of one time always the same one. Empty: there is none."""
    told = [(_last_seen(one), one.get("message", "")) for one in events if one.get("type") == "Warning"]
    newest = max((at for at, _ in told), default=0.0)
    return min((words for at, words in told if at >= newest - _SAME_TIME_SECONDS), default="")


def explained(observed: Observed, doubt: Doubt, words: str) -> Observed:
    """`observed` with what `words` tell of the doubt."""
    if not words:
        return observed
    if doubt.pod is None:
        told = words.rpartition("failed error: ")[2]
        reason, fix = refusal_of(told) or ("CreatingPods", "see the events of the StatefulSets")
        return replace(observed, unmade=(reason, f"{told}: {fix}"))
    pods = (
        replace(pod, trouble=_trouble(observed, pod, words)) if pod.uid == doubt.uid else pod
        for pod in observed.pods
    )
    return replace(observed, pods=tuple(pods))


def _trouble(observed: Observed, pod: Pod, words: str) -> tuple[str, str]:
    """Reason and message of a pod whose containers are not created, and of which its kubelet says `words`."""
    missing, entry = _NOT_FOUND.search(words), _NO_ENTRY.search(words)
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
    if "MountVolume" in words or "AttachVolume" in words or "Unable to attach or mount" in words:
        if "hostPath type check failed" in words:
            words = f"{words}: spec.model.source.hostPath.path must be a directory of node {pod.node}"
        return "VolumeUnavailable", words
    return _WAITS, words


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
