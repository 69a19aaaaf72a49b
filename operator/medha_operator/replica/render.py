"""The objects that a replica consists of, as plain manifests. Pure: the same replica renders the same bytes.

Per replica one StatefulSet a lane (ordinal = stage), one headless Service over all lanes, one ConfigMap a revision, a
PodDisruptionBudget and a NetworkPolicy. Names are what the spec determines, so that whoever creates them twice meets
what is there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from medha.api.replica import MedhaReplicaSpec, ModelSource
from medha_operator.gang import gang_of
from medha_operator.kube.kinds import MANAGER, Manifest
from medha_operator.overlay import overlaid
from medha_operator.replica.revision import Revision
from medha_operator.settings import OperatorSettings

OPEN_SINCE = "medha.dev/open-since"
"""Annotation of a PodDisruptionBudget: since when it lets evictors take the replica from a cordoned node."""
CONTROL_PORT = 5600
TOKENS_PORT = 5601
METRICS_PORT = 9400
HEALTH_PORT = 9401
MODEL_DIRECTORY = "/model"
_ENROLMENT = "/etc/medha/enrolment"
_HUB_DIRECTORY = "/etc/medha/hub"
_PROBE_SECONDS = 5
_USER = 65532
_SPARE_SECONDS = 30
"""Between the end of a drain and the kill, and between a pod's own limit to its start and the kubelet's."""
_UNREAD = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
"""Weights in formats that ranks do not read, which many repositories hold beside safetensors."""


@dataclass(frozen=True)
class Owner:
    """The replica that the objects belong to, and go with."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> Manifest:
        return {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def lane_name(replica: str, lane: int) -> str:
    """Name of the StatefulSet of a lane."""
    return f"{replica}-l{lane}"


def leader_address(owner: Owner) -> str:
    """Where the replica's controller listens: lane 0, stage 0."""
    return f"{lane_name(owner.name, 0)}-0.{owner.name}.{owner.namespace}.svc"


def labels(owner: Owner) -> dict[str, str]:
    """Of every object of a replica; `medha.dev/replica` is what selects them."""
    return {
        "app.kubernetes.io/name": "medha",
        "app.kubernetes.io/instance": owner.name,
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "medha",
        "app.kubernetes.io/managed-by": MANAGER,
        "medha.dev/replica": owner.name,
    }


def pod_labels(owner: Owner, lane: int, revision: str) -> dict[str, str]:
    """Of the pods of a lane. The stage is `apps.kubernetes.io/pod-index`, which the StatefulSet writes."""
    return labels(owner) | {
        "medha.dev/lane": str(lane),
        "medha.dev/role": "lead" if lane == 0 else "kv",
        "medha.dev/revision": revision,
    }


# --- objects that follow the spec as it is now ----------------------------------------------------------


def service(owner: Owner) -> Manifest:
    """Gives every pod its name in DNS, from before it is ready: ranks meet while nobody is."""
    return _object(owner, "v1", "Service", owner.name) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"medha.dev/replica": owner.name},
            "ports": [
                _port("control", CONTROL_PORT),
                _port("tokens", TOKENS_PORT),
                _port("metrics", METRICS_PORT),
            ],
        }
    }


def disruption_budget(owner: Owner, open_since: str | None = None) -> Manifest:
    """Allows no eviction: losing one pod stops the whole replica, so the operator drains it first.

    `open_since` is a time as Kubernetes writes it, from which on the replica may leave its node: every pod may go.
    """
    manifest = _object(owner, "policy/v1", "PodDisruptionBudget", owner.name)
    if open_since is not None:
        manifest["metadata"]["annotations"] = {OPEN_SINCE: open_since}
    return manifest | {
        "spec": {
            "maxUnavailable": 0 if open_since is None else "100%",
            "selector": {"matchLabels": {"medha.dev/replica": owner.name}},
        }
    }


def network_policy(owner: Owner, metrics_from: Sequence[Manifest] = ()) -> Manifest:
    """Pods of a replica reach each other on all ports (gloo chooses its own); others reach the metrics alone.

    `metrics_from` are the peers of a NetworkPolicy's rule that may; none means everybody.
    """
    scrapers: Manifest = {"from": list(metrics_from)} if metrics_from else {}
    mine = {"matchLabels": {"medha.dev/replica": owner.name}}
    return _object(owner, "networking.k8s.io/v1", "NetworkPolicy", owner.name) | {
        "spec": {
            "podSelector": mine,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": mine}]},
                {"ports": [{"protocol": "TCP", "port": METRICS_PORT}]} | scrapers,
            ],
        }
    }


def config_name(owner: Owner, revision: str) -> str:
    """Name of a revision's ConfigMap and of its ControllerRevision."""
    return f"{owner.name}-{revision}"


def keys_name(owner: Owner) -> str:
    """Name of the Secret with the keys of the replica's links. A replica that is made anew never meets an old one."""
    return f"{owner.name}-keys-{owner.uid[:8]}"


def enrolment_name(owner: Owner, spec: MedhaReplicaSpec) -> str | None:
    """Name of the Secret by which the replica enrols at its router; None where it names no router."""
    router = spec.router_ref
    if router is None:
        return None
    if is_enrolment_copied(owner, spec):
        made_for = f"{owner.uid} {router.namespace}/{router.name}"
        return f"{owner.name}-enrolment-{hashlib.sha256(made_for.encode()).hexdigest()[:8]}"
    return router.secret or f"{router.name}-enrolment"


def is_enrolment_copied(owner: Owner, spec: MedhaReplicaSpec) -> bool:
    """Whether that Secret is a copy of the replica's own: pods mount none of another namespace."""
    router = spec.router_ref
    return (
        router is not None
        and router.secret is None
        and router.namespace is not None
        and router.namespace != owner.namespace
    )


def router_address(owner: Owner, spec: MedhaReplicaSpec) -> str:
    """Where the replica's router listens; empty where it names none."""
    router = spec.router_ref
    return "" if router is None else f"{router.name}.{router.namespace or owner.namespace}.svc"


def controller_revision(owner: Owner, revision: Revision) -> Manifest:
    """What pods of this revision were made of; such an object can never be changed."""
    return _object(owner, "apps/v1", "ControllerRevision", config_name(owner, revision.name)) | {
        "revision": revision.number,
        "data": {"fields": revision.fields, "templates": list(revision.templates)},
    }


def config_map(owner: Owner, spec: MedhaReplicaSpec, revision: str) -> Manifest:
    """The settings of one revision's pods: fields that restart as they were, live ones as they are now."""
    document = {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": owner.name, "namespace": owner.namespace},
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    return _object(owner, "v1", "ConfigMap", config_name(owner, revision)) | {
        "data": {"replica.json": json.dumps(document, indent=1, sort_keys=True)}
    }


def lane(owner: Owner, index: int, stages: int, replicas: int, template: Manifest) -> Manifest:
    """The StatefulSet of a lane. Pods are replaced by the operator alone: all of a replica, never some."""
    selector = {"medha.dev/replica": owner.name, "medha.dev/lane": str(index)}
    assert replicas in (0, stages)
    manifest = _object(owner, "apps/v1", "StatefulSet", lane_name(owner.name, index))
    manifest["metadata"]["labels"]["medha.dev/lane"] = str(index)
    return manifest | {
        "spec": {
            "replicas": replicas,
            "serviceName": owner.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": selector},
            "template": template,
        }
    }


def gang_object(owner: Owner, spec: MedhaReplicaSpec, revision: str) -> Manifest | None:
    """What the gang's provider reads, one for all lanes; none where it needs none."""
    name = config_name(owner, revision)
    gang = gang_of(spec, owner.name, name)
    return _object(owner, gang.api_version, gang.kind, name) | {"spec": gang.spec} if gang.kind else None


# --- templates of pods, rendered once for a revision ----------------------------------------------------


def pod_templates(
    owner: Owner, spec: MedhaReplicaSpec, revision: str, settings: OperatorSettings
) -> tuple[Manifest, ...]:
    """The template of each lane's pods, the user's overrides laid over it, but not over the labels that find pods."""
    gang = gang_of(spec, owner.name, config_name(owner, revision))
    theirs = {
        "metadata": spec.template.metadata.model_dump(mode="json", exclude_none=True),
        "spec": spec.template.spec,
    }
    templates = []
    for index in range(spec.parallelism.kv):
        ours = overlaid(_pod_template(owner, spec, index, revision, settings), gang.pod)
        kept = {"metadata": {"labels": pod_labels(owner, index, revision)}}
        templates.append(overlaid(overlaid(ours, theirs), kept))
    return tuple(templates)


def _pod_template(
    owner: Owner, spec: MedhaReplicaSpec, lane_index: int, revision: str, settings: OperatorSettings
) -> Manifest:
    image = spec.image or settings.worker_image
    model_volume, fetch = _model(spec, image, settings)
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(spec.lifecycle.drain_seconds) + _SPARE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_worker(owner, spec, lane_index, revision, image, settings)],
        "volumes": [
            {"name": "config", "configMap": {"name": config_name(owner, revision)}},
            {"name": "keys", "secret": {"secretName": keys_name(owner), "defaultMode": 0o440}},
            {"name": "run", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *_enrolment_volume(owner, spec),
            *([model_volume] if model_volume else []),
            *_hub_token_volume(spec.model.source),
        ],
    }
    if fetch:
        pod["initContainers"] = [fetch]
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image_pull_secrets]
    if spec.placement.lane_topology is not None:
        pod["affinity"] = _lane_affinity(owner, spec, lane_index)
    return {"metadata": {"labels": pod_labels(owner, lane_index, revision)}, "spec": pod}


def _worker(
    owner: Owner,
    spec: MedhaReplicaSpec,
    lane_index: int,
    revision: str,
    image: str,
    settings: OperatorSettings,
) -> Manifest:
    index = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    patience = math.ceil((spec.lifecycle.ready_seconds + _SPARE_SECONDS) / _PROBE_SECONDS)
    enrolment = ["--enrolment", _ENROLMENT] if spec.router_ref is not None else []
    return {
        "name": "worker",
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "medha_worker.pod"],
        "args": ["--replica", "/etc/medha/config/replica.json", "--keys", "/etc/medha/keys", *enrolment],
        "env": [
            {"name": "MEDHA_LANE", "value": str(lane_index)},
            {"name": "MEDHA_STAGE", "valueFrom": index},
            {"name": "MEDHA_LEADER", "value": leader_address(owner)},
            {"name": "MEDHA_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MEDHA_RUN_DIRECTORY", "value": "/run/medha"},
            {"name": "MEDHA_REVISION", "value": revision},
            # The API server drops an empty value, which would then differ from what is rendered for ever.
            *([{"name": "MEDHA_ROUTER", "value": router_address(owner, spec)}] if spec.router_ref else []),
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - a directory of the container's own
        ],
        "ports": [
            _container_port("control", CONTROL_PORT),
            _container_port("tokens", TOKENS_PORT),
            _container_port("metrics", METRICS_PORT),
            _container_port("health", HEALTH_PORT),
        ],
        "resources": _resources(spec),
        "startupProbe": _probe("/started", patience),
        "readinessProbe": _probe("/ready", 2),
        "livenessProbe": _probe("/live", 6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _locked_down(),
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/medha/config", "readOnly": True},
            {"name": "keys", "mountPath": "/etc/medha/keys", "readOnly": True},
            {"name": "run", "mountPath": "/run/medha"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a directory of the container's own
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a directory of the container's own
            *([{"name": "enrolment", "mountPath": _ENROLMENT, "readOnly": True}] if enrolment else []),
            *_model_mounts(spec.model.source, read_only=True),
        ],
    }


def _model(
    spec: MedhaReplicaSpec, image: str, settings: OperatorSettings
) -> tuple[Manifest | None, Manifest | None]:
    """The volume of the checkpoint, and the init container that fills it; either may be none."""
    source = spec.model.source
    if source.host_path is not None:
        return {"name": "model", "hostPath": {"path": source.host_path.path, "type": "Directory"}}, None
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return {"name": "model", "persistentVolumeClaim": claim}, None
    if source.image is not None:
        reference = {"reference": source.image.reference, "pullPolicy": source.image.pull_policy}
        return {"name": "model", "image": reference}, None
    if source.hugging_face is None:
        return None, None  # a directory of the image
    wanted = source.hugging_face
    environment = [{"name": "HF_HOME", "value": "/tmp/hf"}]  # noqa: S108 - the container's own
    token_mounts: list[Manifest] = []
    if wanted.token_secret is not None:
        environment.append({"name": "HF_TOKEN_PATH", "value": f"{_HUB_DIRECTORY}/token"})
        token_mounts.append({"name": "hub-token", "mountPath": _HUB_DIRECTORY, "readOnly": True})
    fetch = {
        "name": "fetch-model",
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["hf", "download", wanted.repository],
        "args": [
            *("--revision", wanted.revision, "--local-dir", MODEL_DIRECTORY),
            *(word for pattern in _UNREAD for word in ("--exclude", pattern)),
        ],
        "env": environment,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(spec, with_devices=False),
        "securityContext": _locked_down(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a directory of the container's own
            *_model_mounts(source, read_only=False),
            *token_mounts,
        ],
    }
    return {"name": "model", "emptyDir": {}}, fetch


def _enrolment_volume(owner: Owner, spec: MedhaReplicaSpec) -> list[Manifest]:
    name = enrolment_name(owner, spec)
    return (
        [] if name is None else [{"name": "enrolment", "secret": {"secretName": name, "defaultMode": 0o440}}]
    )


def _model_mounts(source: ModelSource, *, read_only: bool) -> list[Manifest]:
    if source.path is not None:
        return []
    mount: Manifest = {"name": "model", "mountPath": MODEL_DIRECTORY}
    below = source.pvc.path if source.pvc else source.image.path if source.image else ""
    if below:
        mount["subPath"] = below.lstrip("/")
    return [mount | ({"readOnly": True} if read_only else {})]


def _hub_token_volume(source: ModelSource) -> list[Manifest]:
    """The token for Hugging Face as a file: who lists a container's environment does not see it."""
    if source.hugging_face is None or source.hugging_face.token_secret is None:
        return []
    token = source.hugging_face.token_secret
    items = [{"key": token.key, "path": "token"}]
    secret = {"secretName": token.name, "items": items, "defaultMode": 0o440}
    return [{"name": "hub-token", "secret": secret}]


def _resources(spec: MedhaReplicaSpec, *, with_devices: bool = True) -> Manifest:
    wanted = spec.resources
    has_devices = with_devices and wanted.accelerator != "none"
    device = {wanted.accelerator: str(spec.parallelism.tensor)} if has_devices else {}
    limits, requests = dict(wanted.limits) | device, dict(wanted.requests) | device
    return {name: entry for name, entry in (("limits", limits), ("requests", requests)) if entry}


def _lane_affinity(owner: Owner, spec: MedhaReplicaSpec, lane_index: int) -> Manifest:
    topology = spec.placement.lane_topology
    assert topology is not None
    mates = {"matchLabels": {"medha.dev/replica": owner.name, "medha.dev/lane": str(lane_index)}}
    term = {"labelSelector": mates, "topologyKey": topology.key}
    if topology.mode == "required":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}}


def _object(owner: Owner, api_version: str, kind: str, name: str) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels(owner),
            "ownerReferences": [owner.reference],
        },
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "protocol": "TCP", "targetPort": name}


def _container_port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "health"},
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _locked_down() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
