"""What each router is told of the models that manifests name: a ConfigMap that its pods mount, so that it needs no rights.

An installation writes one entry of it, under its own name, and touches no other: several may serve one router. The
ConfigMap belongs to the router's Deployment and goes with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from medha.api.replica import LifecycleSpec, MedhaReplicaSpec
from medha.declared import DeclaredModel, merged, to_text
from medha_operator.index import Index
from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, MANAGER, REPLICA, ROUTER, Key, Manifest
from medha_operator.kube.store import Document
from medha_operator.replica.observed import seconds
from medha_operator.replica.plan import Tell
from medha_operator.settings import OperatorSettings, RouterSite

NAME_TAKEN = "NameTaken"
"""Reason of the event at a router whose ConfigMap would have the name of somebody else's."""
_COME_SECONDS = 2.0
"""Between looks for a router that is not there yet, or for the end of an earlier one's ConfigMap."""
_DEFAULT_CLASSES = tuple(one.name for one in MedhaReplicaSpec.model_fields["service_classes"].default)


# --- what a resource declares ---------------------------------------------------------------------------


class _Part(BaseModel):
    """The part of a spec that matters here: also of a spec that is refused for something else."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


class _Named(_Part):
    name: str = Field(min_length=1)


class _Router(_Named):
    namespace: str | None = None


class _Lifecycle(_Part):
    ready_seconds: float = LifecycleSpec().ready_seconds


class _Spec(_Part):
    model: _Named
    router_ref: _Router | None = None
    service_classes: tuple[_Named, ...] = ()
    suspend: bool = False
    lifecycle: _Lifecycle = _Lifecycle()


@dataclass(frozen=True)
class Declaration:
    """What one resource says of a model to a router."""

    router: RouterSite
    model: str
    service_classes: tuple[str, ...]
    replicas: int
    counts_from: float
    """When its replicas should serve at the latest, Unix time in seconds: a first start may take `readySeconds`."""


def declaration(document: Document) -> Declaration | None:
    """What a MedhaReplica or a MedhaDeployment declares; None where it names no router, or is being deleted.

    A replica of a deployment names its model, and counts with the deployment.
    """
    metadata, spec = document["metadata"], document["spec"]
    is_deployment = document["kind"] == DEPLOYMENT.name
    try:
        read = _Spec.model_validate(spec["template"]["spec"] if is_deployment else spec)
    except (ValidationError, KeyError, TypeError):
        return None  # it cannot be served either, and its status says so
    if read.router_ref is None or "deletionTimestamp" in metadata:
        return None
    is_owned = any(one["kind"] == DEPLOYMENT.name for one in metadata.get("ownerReferences", ()))
    replicas = spec.get("replicas", 1) if is_deployment else int(not is_owned)
    namespace = read.router_ref.namespace or metadata["namespace"]
    return Declaration(
        router=RouterSite(name=read.router_ref.name, namespace=namespace),
        model=read.model.name,
        service_classes=tuple(one.name for one in read.service_classes) or _DEFAULT_CLASSES,
        replicas=0 if read.suspend else replicas,
        counts_from=seconds(metadata["creationTimestamp"]) + read.lifecycle.ready_seconds,
    )


def models_of(
    router: RouterSite, declarations: Iterable[Declaration], now: float
) -> tuple[tuple[DeclaredModel, ...], float | None]:
    """The models that `router` is to know, and in how many seconds that changes by itself. `now` is Unix time, seconds."""
    mine = [one for one in declarations if one.router == router]
    models = merged(
        DeclaredModel(
            name=one.model,
            service_classes=one.service_classes,
            replicas=one.replicas if one.counts_from <= now else 0,
        )
        for one in mine
    )
    waits = [one.counts_from - now for one in mine if one.replicas and one.counts_from > now]
    return models, min(waits, default=None)


# --- the ConfigMap --------------------------------------------------------------------------------------


def models_key(router: RouterSite) -> Key:
    """The ConfigMap of a router; the queue holds it as what is to be looked at."""
    return Key(CONFIG_MAP.name, router.namespace, f"{router.name}-models")


def entry_name(settings: OperatorSettings) -> str:
    """The entry that this installation writes: no two have the same Lease."""
    return f"{settings.lease_namespace}.{settings.lease_name}.json"


async def publish_models(
    cluster: Cluster,
    index: Index,
    router: RouterSite,
    settings: OperatorSettings,
    now: float,
    tell: Callable[[Document, Tell], Awaitable[None]],
) -> tuple[bool, float]:
    """Bring the entry of this installation to what resources declare; whether that took a write, and seconds until the next look.

    An object of that name that is not the operator's is left as it is: `tell` hears of it, with the router's Deployment.
    """
    deployment = await cluster.get(ROUTER, router.namespace, router.name)
    if deployment is None:
        return False, _COME_SECONDS
    resources = (document for kind in (REPLICA, DEPLOYMENT) for _, document in index.resources(kind))
    declared = (one for one in map(declaration, resources) if one is not None)
    models, changes_in = models_of(router, declared, now)
    again = min(settings.resync_seconds, changes_in if changes_in is not None else settings.resync_seconds)
    entry, text = entry_name(settings), to_text(models) if models else None
    key = models_key(router)
    found = await cluster.get(CONFIG_MAP, key.namespace, key.name)
    if found is None:
        if text is None:
            return False, again
        is_made = await cluster.create(_manifest(router, deployment, {entry: text})) is not None
        return is_made, again if is_made else _COME_SECONDS  # somebody was faster
    metadata = found["metadata"]
    if metadata.get("labels", {}).get("app.kubernetes.io/managed-by") != MANAGER:
        text = f"{key} is somebody else's, so the router does not know which models manifests name: rename or delete it"
        await tell(deployment, Tell(NAME_TAKEN, text, is_warning=True))
        return False, again
    owners = {one["uid"] for one in metadata.get("ownerReferences", ())}
    if owners and deployment["metadata"]["uid"] not in owners:
        return False, _COME_SECONDS  # of an earlier Deployment of this name, with which it goes
    if found.get("data", {}).get(entry) == text:
        return False, again
    await cluster.merge(key, {"data": {entry: text}})
    return True, again


def _manifest(router: RouterSite, deployment: Document, data: dict[str, str]) -> Manifest:
    key = models_key(router)
    owner = {
        "apiVersion": ROUTER.api_version,
        "kind": ROUTER.name,
        "name": router.name,
        "uid": deployment["metadata"]["uid"],
    }
    labelled = {
        "app.kubernetes.io/name": "medha",
        "app.kubernetes.io/instance": router.name,
        "app.kubernetes.io/component": "router",
        "app.kubernetes.io/part-of": "medha",
        "app.kubernetes.io/managed-by": MANAGER,
    }
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": {
            "name": key.name,
            "namespace": key.namespace,
            "labels": labelled,
            "ownerReferences": [owner],
        },
        "data": data,
    }


class Declarations:
    """Says which ConfigMaps must be looked at when a resource has changed: those of routers that it speaks to, or spoke to."""

    def __init__(self, index: Index, settings: OperatorSettings) -> None:
        self._index = index
        self._routers = frozenset(settings.routers)
        self._known: dict[Key, Declaration] = {}

    def changed(self, key: Key) -> list[Key]:
        """The ConfigMaps that no longer say what the resource `key` says; none if it is no resource of ours."""
        if key.kind not in (REPLICA.name, DEPLOYMENT.name):
            return []
        document = self._index.resource(key)
        before = self._known.pop(key, None)
        after = declaration(document) if document is not None else None
        if after is not None and after.router in self._routers:
            self._known[key] = after
        if before == after:
            return []
        concerned = {one.router for one in (before, after) if one is not None} & self._routers
        return [models_key(router) for router in sorted(concerned, key=lambda one: (one.namespace, one.name))]
