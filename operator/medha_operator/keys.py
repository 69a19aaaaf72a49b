"""The Secrets that the operator makes, once each: wire keys of replicas, keys of routers, and what enrols at those.

A Secret is created and never written again, so that nobody who replays an old decision can change a key under running
pods. Those of replicas are never read either.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping

from medha_links.cluster_keys import replica_secret
from medha_operator.render import Manifest, Owner, labels


def replica_keys(owner: Owner, name: str) -> Manifest:
    """The Secret of a replica's links, with fresh keys."""
    return _secret(owner.namespace, name, replica_secret(), labels(owner), owner.reference)


def _secret(
    namespace: str, name: str, data: Mapping[str, bytes], labelled: Mapping[str, str], owner: Manifest
) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": dict(labelled),
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "immutable": True,
        "data": {entry: b64encode(content).decode() for entry, content in data.items()},
    }
