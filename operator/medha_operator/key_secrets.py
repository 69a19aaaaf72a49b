"""The Secrets that the operator creates, once each.

They are wire keys of replicas, keys of routers, and enrolment Secrets. A Secret is created and never written
again, so that no replay of an old decision can change a key under running pods. Secrets of replicas are never
read either.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping

from medha.errors import ConfigInvalid
from medha_links.cluster_keys import (
    ROUTER_PUBLIC,
    TOKEN,
    TOKENS,
    enrolment_secret,
    replica_secret,
    router_secret,
)
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import ROUTER, SECRET, Key, Manifest
from medha_operator.kube.store import Document
from medha_operator.operator_settings import RouterSite
from medha_operator.replica.actions import RecordEvent
from medha_operator.replica.manifests import Owner, labels, router_labels

ROUTER_NOT_FOUND = "RouterNotFound"
"""Reason of a replica whose router has no keys yet, or does not belong to this installation."""
KEYS_UNUSABLE = "KeysUnusable"
"""Reason of the event at a router that no replica can join, because its two Secrets do not match, or one is invalid."""
_RETRY_SECONDS = 2.0
"""Seconds between checks for a router that does not exist yet."""


def replica_keys(owner: Owner, name: str) -> Manifest:
    """Return the Secret of a replica's links, with fresh keys."""
    made = _secret(owner.namespace, name, replica_secret(), labels(owner), owner.reference)
    return made | {"immutable": True}


async def copy_enrolment(cluster: Cluster, owner: Owner, name: str, source: Key) -> None:
    """Copy the enrolment Secret of a router of another namespace for a replica.

    Raises:
        ApiError: `source` does not exist yet, or this operator may not read it (`ROUTER_NOT_FOUND`).
    """
    try:
        found = await cluster.get(SECRET, source.namespace, source.name)
    except ApiError as error:
        if error.status != 403:
            raise
        router = f"{source.namespace}/{source.name.removesuffix('-enrolment')}"
        text = f"{router} is not a router of this installation: correct spec.routerRef, or list it in operator.routers"
        raise ApiError(403, ROUTER_NOT_FOUND, text) from error
    if found is None:
        raise ApiError(
            404, ROUTER_NOT_FOUND, f"the router's Secret {source.namespace}/{source.name} does not exist yet"
        )
    secret = _secret(owner.namespace, name, _content(found), labels(owner), owner.reference)
    await cluster.create(secret | {"immutable": True})


async def make_router_keys(
    cluster: Cluster,
    router: RouterSite,
    requeue_seconds: float,
    record_event: Callable[[Document, RecordEvent], Awaitable[None]],
) -> float:
    """Create what is missing of a router's two Secrets once the router exists.

    Return seconds until the next check. The Secrets have no owner: a router that is removed and installed
    again finds the keys that its replicas know. The enrolment Secret is derived from the router's own one, so
    that it does not matter where an earlier attempt stopped. An existing Secret is never changed, since
    somebody may have put it there: if the two do not match, `record_event` is called with the router's Deployment.
    """
    deployment = await cluster.get(ROUTER, router.namespace, router.name)
    if deployment is None:
        return _RETRY_SECONDS
    own, shared = f"{router.name}-keys", f"{router.name}-enrolment"
    kept = await cluster.get(SECRET, router.namespace, own)
    if kept is None:
        kept = await cluster.create(_router_secret(router, own, router_secret()))
    if kept is None:
        return _RETRY_SECONDS  # somebody was faster
    keys = _content(kept)
    try:
        derived = enrolment_secret(keys)
    except ConfigInvalid as error:
        await record_event(deployment, RecordEvent(KEYS_UNUSABLE, f"Secret {own}: {error}", is_warning=True))
        return requeue_seconds
    enrolment = await cluster.get(SECRET, router.namespace, shared)
    if enrolment is None:
        await cluster.create(_router_secret(router, shared, derived))
    elif not _admits(keys, derived[ROUTER_PUBLIC], _content(enrolment)):
        text = (
            f"the Secret {shared} does not match {own}, so nobody can join the router with it: delete {shared}, which is "
            f"made again within {requeue_seconds:g} s, and restart the router and the replicas that have joined with it"
        )
        await record_event(deployment, RecordEvent(KEYS_UNUSABLE, text, is_warning=True))
    return requeue_seconds


def _admits(router: Mapping[str, bytes], public: bytes, enrolment: Mapping[str, bytes]) -> bool:
    """Return whether a router with the keys `router`, and so with `public`, admits a holder of
    `enrolment`."""
    tokens = [line.strip() for line in router[TOKENS].splitlines()]
    is_known = enrolment.get(TOKEN, b"").strip() in tokens
    return is_known and enrolment.get(ROUTER_PUBLIC, b"").strip() == public.strip()


def _content(secret: Document) -> dict[str, bytes]:
    return {entry: b64decode(content) for entry, content in secret.get("data", {}).items()}


def _router_secret(router: RouterSite, name: str, data: Mapping[str, bytes]) -> Manifest:
    return _secret(router.namespace, name, data, router_labels(router.name))


def _secret(
    namespace: str,
    name: str,
    data: Mapping[str, bytes],
    labelled: Mapping[str, str],
    owner: Manifest | None = None,
) -> Manifest:
    owned = {} if owner is None else {"ownerReferences": [owner]}
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.name,
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labelled)} | owned,
        "type": "Opaque",
        "data": {entry: b64encode(content).decode() for entry, content in data.items()},
    }
