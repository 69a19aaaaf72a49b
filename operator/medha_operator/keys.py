"""The Secrets that the operator makes, once each: wire keys of replicas, keys of routers, and what enrols at those.

A Secret is created and never written again, so that nobody who replays an old decision can change a key under running
pods. Those of replicas are never read either.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping

from medha_links.cluster_keys import enrolment_secret, replica_secret, router_secret
from medha_operator.cluster import ApiError, Cluster
from medha_operator.kinds import ROUTER, SECRET, Key
from medha_operator.render import MANAGER, Manifest, Owner, labels
from medha_operator.settings import RouterSite

ROUTER_NOT_FOUND = "RouterNotFound"
"""Reason of a replica whose router has no keys yet, or is none of this installation's."""
_COME_SECONDS = 2.0
"""Between looks for a router that is not there yet."""


def replica_keys(owner: Owner, name: str) -> Manifest:
    """The Secret of a replica's links, with fresh keys."""
    made = _secret(owner.namespace, name, replica_secret(), labels(owner), owner.reference)
    return made | {"immutable": True}


async def copy_enrolment(cluster: Cluster, owner: Owner, name: str, source: Key) -> None:
    """Give a replica what enrols at a router of another namespace.

    Raises:
        ApiError: `source` is not there yet (404), or is none that this operator may read (403).
    """
    found = await cluster.get(SECRET, source.namespace, source.name)
    if found is None:
        raise ApiError(
            404, ROUTER_NOT_FOUND, f"the router's Secret {source.namespace}/{source.name} is not there yet"
        )
    data = {entry: b64decode(content) for entry, content in found["data"].items()}
    await cluster.create(
        _secret(owner.namespace, name, data, labels(owner), owner.reference) | {"immutable": True}
    )


async def make_router_keys(cluster: Cluster, router: RouterSite, again_seconds: float) -> float:
    """Make what is missing of a router's two Secrets, once there is a router; seconds until the next look.

    Nobody owns them: a router that is removed and installed anew finds the keys that its replicas know. What replicas
    get is derived from what the router has, so that it makes no difference where an earlier attempt ended.
    """
    if await cluster.get(ROUTER, router.namespace, router.name) is None:
        return _COME_SECONDS
    own, shared = f"{router.name}-keys", f"{router.name}-enrolment"
    kept = await cluster.get(SECRET, router.namespace, own)
    if kept is None:
        kept = await cluster.create(_router_secret(router, own, router_secret()))
    if kept is None:
        return _COME_SECONDS  # somebody was faster
    if await cluster.get(SECRET, router.namespace, shared) is None:
        data = {name: b64decode(content) for name, content in kept["data"].items()}
        await cluster.create(_router_secret(router, shared, enrolment_secret(data)))
    return again_seconds


def _router_secret(router: RouterSite, name: str, data: Mapping[str, bytes]) -> Manifest:
    labelled = {
        "app.kubernetes.io/name": "medha",
        "app.kubernetes.io/instance": router.name,
        "app.kubernetes.io/component": "router",
        "app.kubernetes.io/part-of": "medha",
        "app.kubernetes.io/managed-by": MANAGER,
    }
    return _secret(router.namespace, name, data, labelled)


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
