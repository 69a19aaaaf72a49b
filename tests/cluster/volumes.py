"""A volume for claims: unlike most clusters, these have no provisioner."""

from __future__ import annotations

import json

from cluster.nodes import Cluster

_FOLDER = "/var/lib/medha/volume"


def offer_volume(cluster: Cluster) -> None:
    """Create a volume in a folder of the first node; the first claim without a storage class gets it."""
    node = cluster.nodes[0]
    node.run(["mkdir", "-p", _FOLDER])
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node.name]}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-of-{node.name}"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": _FOLDER},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(volume))
