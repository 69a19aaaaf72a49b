"""The expected objects of a spec, computed from the spec alone, and how a namespace differs from them."""

from __future__ import annotations

from typing import Any

from cluster.api import OWNED, Api, condition
from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import DEPLOYMENT, POD, REPLICA
from medha_operator.kube.manifest_overlay import holds
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.drift import additions
from medha_operator.replica.manifests import (
    Owner,
    config_map,
    config_name,
    disruption_budget,
    keys_name,
    lane,
    network_policy,
    peer_ports,
    pod_templates,
    service,
)
from medha_operator.replica.revision import begin

Document = dict[str, Any]


def wrong(api: Api, namespace: str, applied: Document | None) -> list[str]:
    """Return how the namespace differs from the resource applied last; for None, nothing may be left."""
    if applied is None:
        return [
            f"{kind.name} {name} is left"
            for kind in (REPLICA, DEPLOYMENT)
            for name in _names(api, kind, namespace)
        ] + [f"{kind} {name} is left" for kind, name in _present(api, namespace)]
    if applied["kind"] == REPLICA.name:
        expected = {"r": applied["spec"]}
        found = []
    else:
        template = applied["spec"]["template"]["spec"]
        expected = {f"r-{index}": template for index in range(applied["spec"]["replicas"])}
        found = _not_settled(api.get(DEPLOYMENT, "r", namespace))
    replicas = {item["metadata"]["name"]: item for item in api.list(REPLICA, namespace)}
    if replicas.keys() != expected.keys():
        return [*found, f"replicas {sorted(replicas)} instead of {sorted(expected)}"]
    present = _present(api, namespace)
    for name, spec in expected.items():
        if not holds(replicas[name]["spec"], spec):
            found.append(f"replica {name} has another spec")
        found += _not_settled(replicas[name])
        found += _wrong_children(replicas[name], present)
    for key, item in list(present.items()):
        if key[0] == "ControllerRevision" and "medha.dev/replica" not in item["metadata"]["labels"]:
            del present[key]  # the deployment's revision history
    found += [f"{kind} {name} is too much" for kind, name in present]
    return found


def _wrong_children(replica: Document, present: dict[tuple[str, str], Document]) -> list[str]:
    """Return differences of the replica's objects, and remove these from `present`."""
    metadata, found = replica["metadata"], []
    owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
    spec = MedhaReplicaSpec.model_validate(replica["spec"])
    revision = begin(spec, []).name
    stages = spec.parallelism.stream
    wanted = [
        service(owner),
        disruption_budget(owner),
        network_policy(owner, peers_at=peer_ports(spec)),
        config_map(owner, spec, revision),
        *(
            lane(owner, index, stages, 0 if spec.suspend else stages, template)
            for index, template in enumerate(pod_templates(owner, spec, revision, OperatorSettings()))
        ),
    ]
    for manifest in wanted:
        key = manifest["kind"], manifest["metadata"]["name"]
        there = present.pop(key, None)
        if there is None or not holds(there, manifest):
            found.append(f"{' '.join(key)} {'is missing' if there is None else 'is another'}")
        elif additions(there, manifest)[1]:
            found.append(f"{' '.join(key)} has more than it should")
    if present.pop(("Secret", keys_name(owner)), None) is None:
        found.append("the Secret is missing")
    if ("ControllerRevision", config_name(owner, revision)) not in present:
        found.append(f"the ControllerRevision of {revision} is missing")
    for key in [
        key for key in present if key[0] == "ControllerRevision" and key[1].startswith(f"{owner.name}-")
    ]:
        del present[key]  # revision history, of any length
    members = 0 if spec.suspend else stages
    for index in range(spec.parallelism.kv):
        for stage in range(members):
            pod = present.pop(("Pod", f"{owner.name}-l{index}-{stage}"), None)
            if pod is None or pod["metadata"]["labels"]["medha.dev/revision"] != revision:
                found.append(f"pod {index}-{stage} is {'missing' if pod is None else 'of another revision'}")
    return found


def _not_settled(resource: Document | None) -> list[str]:
    if resource is None:
        return ["the resource is missing"]
    name, status = resource["metadata"]["name"], resource.get("status", {})
    if status.get("observedGeneration") != resource["metadata"]["generation"]:
        return [f"{name}: the status speaks of an earlier generation"]
    ready = condition(resource)
    is_suspended = resource["spec"].get("suspend", False)
    if ready[0] != "True" and not (is_suspended and ready[1] == "Suspended"):
        return [f"{name} is not ready: {ready[1]}"]
    return []


def _present(api: Api, namespace: str) -> dict[tuple[str, str], Document]:
    """Return the operator's objects by kind and name; of those that StatefulSets create, only pods."""
    found = {}
    for kind in OWNED:
        for item in api.list(kind, namespace, "app.kubernetes.io/managed-by=medha-operator"):
            owners = item["metadata"].get("ownerReferences", [])
            if kind is POD or all(owner["kind"] != "StatefulSet" for owner in owners):
                found[kind.name, item["metadata"]["name"]] = item
    return found


def _names(api: Api, kind: Any, namespace: str) -> list[str]:
    return [item["metadata"]["name"] for item in api.list(kind, namespace)]
