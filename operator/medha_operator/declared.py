"""Publish to each router the models that manifests name, in a ConfigMap.

The router's pods mount the ConfigMap, so that they need no API rights. An installation writes one entry of
it, under its own name, and touches no other: several installations may serve one router. The ConfigMap is
owned by the router's Deployment and deleted with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from medha.api.declared import AUTO, DeclaredModel, merged, to_text, usable_aliases
from medha.api.replica import LifecycleSpec, MedhaReplicaSpec
from medha_operator.index import Index
from medha_operator.kube.client import Cluster
from medha_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, MANAGER, REPLICA, ROUTER, Key, Manifest
from medha_operator.kube.store import Document
from medha_operator.operator_settings import OperatorSettings, RouterSite
from medha_operator.replica.actions import RecordEvent
from medha_operator.replica.manifests import router_labels
from medha_operator.replica.observed import seconds

NAME_CONFLICT = "NameConflict"
"""Reason of a resource or a router that needs an object of a name that somebody else's object has."""
ALIAS_CONFLICT = "AliasConflict"
"""Reason of the event at a router for which two models claim one name."""
_RETRY_SECONDS = 2.0
"""Seconds between checks for a router that does not exist yet, or for the end of an earlier one's
ConfigMap."""
_DEFAULT_CLASSES = tuple(one.name for one in MedhaReplicaSpec.model_fields["service_classes"].default)


# --- what a resource declares ---------------------------------------------------------------------------


class _Part(BaseModel):
    """A part of a spec that matters here; it is also read from a spec that is refused for something else."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


class _Named(_Part):
    name: str = Field(min_length=1)


class _Router(_Named):
    namespace: str | None = None


class _Lifecycle(_Part):
    ready_seconds: float = LifecycleSpec().ready_seconds


class _Model(_Named):
    aliases: tuple[str, ...] = ()
    tool_call_format: str = AUTO
    reasoning_format: str = AUTO


class _Spec(_Part):
    model: _Model
    router_ref: _Router | None = None
    service_classes: tuple[_Named, ...] = ()
    suspend: bool = False
    lifecycle: _Lifecycle = _Lifecycle()


@dataclass(frozen=True)
class Declaration:
    """The declaration of a model to a router by one resource."""

    router: RouterSite
    model: str
    aliases: tuple[str, ...]
    tool_call_format: str
    reasoning_format: str
    service_classes: tuple[str, ...]
    replicas: int
    counts_from: float
    """Unix time in seconds by which its replicas should serve at the latest: a first start may take
    `readySeconds`."""


def declaration(document: Document) -> Declaration | None:
    """Return what a MedhaReplica or a MedhaDeployment declares.

    None if it names no router, is invalid or is being deleted. A replica of a deployment declares its model,
    but is counted with the deployment.
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
        aliases=read.model.aliases,
        tool_call_format=read.model.tool_call_format,
        reasoning_format=read.model.reasoning_format,
        service_classes=tuple(one.name for one in read.service_classes) or _DEFAULT_CLASSES,
        replicas=0 if read.suspend else replicas,
        counts_from=seconds(metadata["creationTimestamp"]) + read.lifecycle.ready_seconds,
    )


def models_of(
    router: RouterSite, declarations: Iterable[Declaration], now: float
) -> tuple[tuple[DeclaredModel, ...], float | None]:
    """Return the models that `router` should know, and seconds until that changes by itself.

    `now` is Unix time in seconds.
    """
    mine = [one for one in declarations if one.router == router]
    models = merged(
        DeclaredModel(
            name=one.model,
            aliases=one.aliases,
            tool_call_format=one.tool_call_format,
            reasoning_format=one.reasoning_format,
            service_classes=one.service_classes,
            replicas=one.replicas if one.counts_from <= now else 0,
        )
        for one in mine
    )
    waits = [one.counts_from - now for one in mine if one.replicas and one.counts_from > now]
    return models, min(waits, default=None)


# --- the ConfigMap --------------------------------------------------------------------------------------


def models_key(router: RouterSite) -> Key:
    """Return the key of a router's ConfigMap, as the work queue holds it."""
    return Key(CONFIG_MAP.name, router.namespace, f"{router.name}-models")


def entry_name(settings: OperatorSettings) -> str:
    """Return the name of the entry that this installation writes.

    It is made from the Lease, which no two installations share.
    """
    return f"{settings.lease_namespace}.{settings.lease_name}.json"


async def publish_models(
    cluster: Cluster,
    index: Index,
    router: RouterSite,
    settings: OperatorSettings,
    now: float,
    record_event: Callable[[Document, RecordEvent], Awaitable[None]],
) -> tuple[bool, float]:
    """Update this installation's entry of a router's ConfigMap to what resources declare.

    Return whether that took a write, and seconds until the next check. An object of that name that is not the
    operator's is left as it is: `record_event` is called with the router's Deployment.
    """
    deployment = await cluster.get(ROUTER, router.namespace, router.name)
    if deployment is None:
        return False, _RETRY_SECONDS
    resources = (document for kind in (REPLICA, DEPLOYMENT) for _, document in index.resources(kind))
    declared = (one for one in map(declaration, resources) if one is not None)
    models, changes_in = models_of(router, declared, now)
    again = min(settings.resync_seconds, changes_in if changes_in is not None else settings.resync_seconds)
    problems = usable_aliases(models)[1]
    if problems:
        message = f"{'; '.join(problems)}: no such alias is served, so change one of the resources"
        await record_event(deployment, RecordEvent(ALIAS_CONFLICT, message, is_warning=True))
    entry, text = entry_name(settings), to_text(models) if models else None
    key = models_key(router)
    found = await cluster.get(CONFIG_MAP, key.namespace, key.name)
    if found is None:
        if text is None:
            return False, again
        is_made = await cluster.create(_manifest(router, deployment, {entry: text})) is not None
        return is_made, again if is_made else _RETRY_SECONDS  # somebody was faster
    metadata = found["metadata"]
    if metadata.get("labels", {}).get("app.kubernetes.io/managed-by") != MANAGER:
        text = f"{key} belongs to another owner, so the router does not know the models of manifests: rename or delete it"
        await record_event(deployment, RecordEvent(NAME_CONFLICT, text, is_warning=True))
        return False, again
    owners = {one["uid"] for one in metadata.get("ownerReferences", ())}
    if owners and deployment["metadata"]["uid"] not in owners:
        return False, _RETRY_SECONDS  # owned by an earlier Deployment of this name, and deleted with it
    if found.get("data", {}).get(entry) == text:
        return False, again
    await cluster.merge(key, {"data": {entry: text}})
    return True, again


def _manifest(router: RouterSite, deployment: Document, data: dict[str, str]) -> Manifest:
    key = models_key(router)
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": {
            "name": key.name,
            "namespace": key.namespace,
            "labels": router_labels(router.name),
            "ownerReferences": [ROUTER.reference(router.name, deployment["metadata"]["uid"])],
        },
        "data": data,
    }


class Declarations:
    """Finds the ConfigMaps to update when a resource changes.

    These are those of the routers to which it declares, or declared, a model.
    """

    def __init__(self, index: Index, settings: OperatorSettings) -> None:
        self._index = index
        self._routers = frozenset(settings.routers)
        self._known: dict[Key, Declaration] = {}

    def changed(self, key: Key) -> list[Key]:
        """Return the ConfigMaps that no longer match the resource `key`; none if it is not one of ours."""
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
