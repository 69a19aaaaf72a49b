"""The actions of a plan: what each writes, and the state on which it relies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medha_operator.kube.kinds import Manifest
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus


@dataclass(frozen=True)
class CreateKeys:
    """Create the Secret of wire keys unless it exists: it is created once and never rendered again."""

    name: str


@dataclass(frozen=True)
class CopyEnrolment:
    """Create the Secret with which a replica enrols at a router of another namespace, also only once."""

    name: str
    router: str
    router_namespace: str


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object."""

    manifest: Manifest


@dataclass(frozen=True)
class Prune:
    """Remove harmful additions by others from an object, if it is still the one observed."""

    kind: str
    name: str
    uid: str
    resource_version: str
    patch: Mapping[str, Any]
    """A merge patch."""
    paths: tuple[str, ...]
    """Paths that the patch removes."""


@dataclass(frozen=True)
class Delete:
    """Delete an object if it is still the one observed."""

    kind: str
    name: str
    uid: str
    resource_version: str
    reason: str
    is_forced: bool = False
    """True to delete it without a grace period: its node cannot confirm its end."""


@dataclass(frozen=True)
class SetStatus:
    """Write the status if the resource is still the one observed."""

    status: ReplicaStatus | DeploymentStatus


@dataclass(frozen=True)
class Confirm:
    """Read the resource again, and end the reconcile if it has changed since it was observed.

    The garbage collector deletes the children of a deleted resource, and the resource's own deletion may be reported
    late or never. Missing children must not be created again for a resource that is gone.
    """


@dataclass(frozen=True)
class RecordEvent:
    """An event for `kubectl describe`."""

    reason: str
    message: str
    is_warning: bool = False


Action = CreateKeys | CopyEnrolment | Apply | Prune | Delete | SetStatus | Confirm | RecordEvent


@dataclass(frozen=True)
class Plan:
    actions: tuple[Action, ...]
    requeue_seconds: float | None = None
    """Seconds until the next reconcile, even if no event asks for one; None if none is needed."""


def status_change(
    before: ReplicaStatus | DeploymentStatus, after: ReplicaStatus | DeploymentStatus
) -> tuple[Action, ...]:
    """Return the action that writes a status; none if it is the same."""
    return () if after == before else (SetStatus(after),)


def soonest(*waits: float | None) -> float | None:
    """Return the shortest of some waits in seconds; None if there is none."""
    return min((wait for wait in waits if wait is not None), default=None)
