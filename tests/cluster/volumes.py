"""Volumes for claims: unlike most clusters, these have no provisioner."""

from __future__ import annotations

import json
from typing import Literal

from cluster.nodes import Cluster

FOLDER = "/var/lib/medha/volume"


def offer_volume(cluster: Cluster, folder: str = FOLDER, kind: Literal["local", "hostPath"] = "local") -> str:
    """Create a volume in a folder of the first node, and return its name.

    The first claim without a storage class gets it. If there is no such folder, it is made, and belongs to root.
    """
    node = cluster.nodes[0]
    node.run(["mkdir", "-p", folder])
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    name = f"{kind.lower()}-{folder.rpartition('/')[2]}-of-{node.name}"
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            kind: {"path": folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(volume))
    return name


def claim(cluster: Cluster, name: str, volume: str) -> None:
    """Create a claim in the namespace `default` for this volume."""
    document = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "volumeName": volume,
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
