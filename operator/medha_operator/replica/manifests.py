"""Render the objects of a replica as plain manifests. Pure: the same replica renders the same bytes.

A replica has one StatefulSet per lane (ordinal = stage), one headless Service over all lanes, one ConfigMap and one
ControllerRevision per revision, a PodDisruptionBudget and a NetworkPolicy. Some gang schedulers read one more object
per revision. All names are deterministic, so that creating an object twice finds the existing one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from medha.api.cluster import NO_ACCELERATOR, HuggingFaceSource, ResourcesSpec
from medha.api.fields import quantity_bytes
from medha.api.model_spec import DraftSource, ModelSource
from medha.api.replica import MedhaReplicaSpec, TracesSpec
from medha_operator.gang import gang_of
from medha_operator.kube.kinds import OUR_LABELS, REPLICA, Manifest
from medha_operator.kube.manifest_overlay import overlaid
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.revision import Revision
from medha_process.pod_contract import (
    CONTROL_PORT,
    DRAFT_DIRECTORY,
    HEALTH_PORT,
    KV_FILES_DIRECTORY,
    KV_STORE_DIRECTORY,
    METRICS_PORT,
    MODEL_DIRECTORY,
    PEERS_PORT,
    TOKENS_PORT,
)

OPEN_SINCE = "medha.dev/open-since"
"""Annotation of a PodDisruptionBudget: time since which it lets evictors take the replica from a cordoned
node."""
_STORE_CREDENTIALS = {"AWS_ACCESS_KEY_ID": False, "AWS_SECRET_ACCESS_KEY": False, "AWS_SESSION_TOKEN": True}
"""Keys of a store's Secret, which are variables of the same names, and whether each may be missing."""
_CONFIG = "/etc/medha/config"
_REPLICA_OPTIONS = ("--replica", f"{_CONFIG}/replica.json")
_CONFIG_MOUNT = {"name": "config", "mountPath": _CONFIG, "readOnly": True}
_ENROLMENT = "/etc/medha/enrolment"
_HUB_DIRECTORY = "/etc/medha/hub"
_NCCL_DEFAULTS = {"NCCL_DEBUG": "WARN"}
"""Values that differ from NCCL's own: it logs why it fails, and nothing else."""
_PROBE_SECONDS = 5
_USER = 65532
_SPARE_SECONDS = 30
"""Seconds between the end of a drain and the kill, and between a pod's own limit for its start and the
kubelet's."""
_SPARE_DISK_BYTES = 64 * 2**20
"""Bytes that a volume of KV files needs beside the tier itself: for the disk measurement, keys, and files that are being
deleted."""
_STAGE = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
"""Source of a pod's stage: its place in the StatefulSet of its lane."""


@dataclass(frozen=True)
class Owner:
    """The replica that owns the objects; they are deleted with it."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> Manifest:
        return REPLICA.controller(self.name, self.uid)


def lane_name(replica: str, lane: int) -> str:
    """Return the name of a lane's StatefulSet."""
    return f"{replica}-l{lane}"


def leader_address(owner: Owner) -> str:
    """Return the address of the replica's controller: lane 0, stage 0."""
    return f"{lane_name(owner.name, 0)}-0.{owner.name}.{owner.namespace}.svc"


def labels(owner: Owner) -> dict[str, str]:
    """Return the labels of every object of a replica; selectors use `medha.dev/replica`."""
    return _labels(owner.name, "worker") | {"medha.dev/replica": owner.name}


def router_labels(router: str) -> dict[str, str]:
    """Return the labels of objects that the operator makes for a router of this name."""
    return _labels(router, "router")


def _labels(instance: str, component: str) -> dict[str, str]:
    return OUR_LABELS | {
        "app.kubernetes.io/instance": instance,
        "app.kubernetes.io/component": component,
    }


def pod_labels(owner: Owner, lane: int, revision: str) -> dict[str, str]:
    """Return the labels of a lane's pods.

    The StatefulSet controller adds the stage as `apps.kubernetes.io/pod-index`.
    """
    return labels(owner) | {
        "medha.dev/lane": str(lane),
        "medha.dev/role": "lead" if lane == 0 else "kv",
        "medha.dev/revision": revision,
    }


# --- objects that follow the spec as it is now ----------------------------------------------------------


def service(owner: Owner) -> Manifest:
    """Return the headless Service.

    It gives every pod a DNS name before it is ready, because ranks rendezvous before any pod is ready.
    """
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
    """Return the disruption budget.

    It allows no eviction: losing one pod stops the whole replica, so the operator drains it first. If
    `open_since` is set, every pod may be evicted: it is the time, as Kubernetes writes it, since which the
    replica may leave its node.
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


def peer_ports(spec: MedhaReplicaSpec) -> range:
    """Return the ports at which other replicas read KV from a pod's ranks, two for each rank; empty if they hand none over."""
    if spec.kv_cache.peers is None or spec.router_ref is None:
        return range(0)
    return range(PEERS_PORT, PEERS_PORT + 2 * spec.parallelism.tensor)


def network_policy(
    owner: Owner, metrics_from: Sequence[Manifest] = (), peers_at: range = range(0)
) -> Manifest:
    """Return the NetworkPolicy.

    Pods of a replica reach each other on all ports, because gloo chooses its ports itself. Other pods reach only the
    metrics. `metrics_from` lists the peers that may read the metrics, in the form of a NetworkPolicy's rule; if it is
    empty, everybody may. Pods of other replicas in the namespace also reach the ports `peers_at`, to read KV.
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
                *([_other_replicas(peers_at)] if peers_at else []),
            ],
        }
    }


def _other_replicas(ports: range) -> Manifest:
    """Return the rule that lets pods of other replicas reach these ports."""
    last = {"endPort": ports[-1]} if len(ports) > 1 else {}
    every = {"matchExpressions": [{"key": "medha.dev/replica", "operator": "Exists"}]}
    return {
        "from": [{"podSelector": every}],
        "ports": [{"protocol": "TCP", "port": ports[0]} | last],
    }


def config_name(owner: Owner, revision: str) -> str:
    """Return the name of a revision's ConfigMap and of its ControllerRevision."""
    return f"{owner.name}-{revision}"


def keys_name(owner: Owner) -> str:
    """Return the name of the Secret with the keys of the replica's links.

    It includes the UID, so that a recreated replica never finds an old Secret.
    """
    return f"{owner.name}-keys-{owner.uid[:8]}"


def enrolment_name(owner: Owner, spec: MedhaReplicaSpec) -> str | None:
    """Return the name of the Secret with which the replica enrols at its router; None without a router."""
    router = spec.router_ref
    if router is None:
        return None
    if is_enrolment_copied(owner, spec):
        made_for = f"{owner.uid} {router.namespace}/{router.name}"
        return f"{owner.name}-enrolment-{hashlib.sha256(made_for.encode()).hexdigest()[:8]}"
    return router.secret or f"{router.name}-enrolment"


def is_enrolment_copied(owner: Owner, spec: MedhaReplicaSpec) -> bool:
    """Return whether that Secret is a copy of the replica's own.

    Pods cannot mount Secrets of another namespace.
    """
    router = spec.router_ref
    return (
        router is not None
        and router.secret is None
        and router.namespace is not None
        and router.namespace != owner.namespace
    )


def router_address(owner: Owner, spec: MedhaReplicaSpec) -> str:
    """Return the name that has the addresses of all pods of the replica's router; empty if it names none.

    It is the name of a headless Service beside the router's own one, which has only ready pods: replicas join a router
    before it is ready, so that it gets no requests without replicas.
    """
    router = spec.router_ref
    return "" if router is None else f"{router.name}-links.{router.namespace or owner.namespace}.svc"


def controller_revision(owner: Owner, revision: Revision) -> Manifest:
    """Return the ControllerRevision, an immutable object, with the fields and templates of this revision's pods."""
    return _object(owner, "apps/v1", "ControllerRevision", config_name(owner, revision.name)) | {
        "revision": revision.number,
        "data": {"fields": revision.fields, "templates": list(revision.templates)},
    }


def config_map(owner: Owner, spec: MedhaReplicaSpec, revision: str) -> Manifest:
    """Return the ConfigMap with the settings of one revision's pods: its restart fields, and the present live fields."""
    document = {
        "apiVersion": REPLICA.api_version,
        "kind": REPLICA.name,
        "metadata": {"name": owner.name, "namespace": owner.namespace},
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    return _object(owner, "v1", "ConfigMap", config_name(owner, revision)) | {
        "data": {"replica.json": json.dumps(document, indent=1, sort_keys=True)}
    }


def lane(owner: Owner, index: int, stages: int, replicas: int, template: Manifest) -> Manifest:
    """Return the StatefulSet of a lane. Only the operator replaces pods: all of a replica, never some."""
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
    """Return the object that the gang's provider reads, one for all lanes; None if it needs none."""
    name = config_name(owner, revision)
    gang = gang_of(spec, owner.name, name)
    return _object(owner, gang.api_version, gang.kind, name) | {"spec": gang.spec} if gang.kind else None


# --- templates of pods, rendered once for a revision ----------------------------------------------------


def pod_templates(
    owner: Owner, spec: MedhaReplicaSpec, revision: str, settings: OperatorSettings
) -> tuple[Manifest, ...]:
    """Return the pod template of each lane.

    The user's overrides are laid over it, but not over the labels that selectors use.
    """
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
    image = spec.image or _default_image(spec.resources, settings)
    model_volume, fetch = _model(spec, image, settings)
    draft = spec.scheduling.speculation.source
    draft_volume = None if draft is None else _volume_of("draft-model", draft)
    pod: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(spec.lifecycle.drain_seconds) + _SPARE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # Otherwise the kubelet visits every file of a claim at each start, and lets the group read and write it.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_worker(owner, spec, lane_index, revision, image, settings)],
        "volumes": [
            {"name": "config", "configMap": {"name": config_name(owner, revision)}},
            {"name": "keys", "secret": {"secretName": keys_name(owner), "defaultMode": 0o440}},
            {"name": "run", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shared_memory}},
            *_enrolment_volume(owner, spec),
            *([model_volume] if model_volume else []),
            *([draft_volume] if draft_volume else []),
            *_kv_files_volume(spec),
            *_kv_store_volume(spec),
            *_hub_token_volume(spec.model.source),
        ],
    }
    if fetch:
        pod["initContainers"] = [fetch]
    if spec.resources.runtime_class_name is not None:
        pod["runtimeClassName"] = spec.resources.runtime_class_name
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
    patience = math.ceil((spec.lifecycle.ready_seconds + _SPARE_SECONDS) / _PROBE_SECONDS)
    enrolment = ["--enrolment", _ENROLMENT] if spec.router_ref is not None else []
    return {
        "name": "worker",
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "medha_worker.pod"],
        "args": [*_REPLICA_OPTIONS, "--keys", "/etc/medha/keys", *enrolment],
        "env": [
            {"name": "MEDHA_LANE", "value": str(lane_index)},
            {"name": "MEDHA_STAGE", "valueFrom": _STAGE},
            {"name": "MEDHA_LEADER", "value": leader_address(owner)},
            {"name": "MEDHA_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MEDHA_RUN_DIRECTORY", "value": "/run/medha"},
            {"name": "MEDHA_REVISION", "value": revision},
            # The API server drops empty values, so the object would always differ from the rendered one.
            *([{"name": "MEDHA_ROUTER", "value": router_address(owner, spec)}] if spec.router_ref else []),
            {"name": "HOME", "value": "/tmp"},  # noqa: S108 - a directory of the container's own
            *_traces(spec.traces, settings),
            *_nccl(spec.resources),
            *_store_credentials(spec),
        ],
        "ports": [
            _container_port("control", CONTROL_PORT),
            _container_port("tokens", TOKENS_PORT),
            _container_port("metrics", METRICS_PORT),
            _container_port("health", HEALTH_PORT),
            *(_container_port(f"peer-{at}", port) for at, port in enumerate(peer_ports(spec))),
        ],
        "resources": _resources(spec),
        "startupProbe": _probe("/started", patience),
        "readinessProbe": _probe("/ready", 2),
        "livenessProbe": _probe("/live", 6),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _locked_down(),
        "volumeMounts": [
            _CONFIG_MOUNT,
            {"name": "keys", "mountPath": "/etc/medha/keys", "readOnly": True},
            {"name": "run", "mountPath": "/run/medha"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a directory of the container's own
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - a directory of the container's own
            *([{"name": "enrolment", "mountPath": _ENROLMENT, "readOnly": True}] if enrolment else []),
            *_model_mounts(spec.model.source),
            *_draft_mounts(spec.scheduling.speculation.source),
            *([{"name": "kv-files", "mountPath": KV_FILES_DIRECTORY}] if spec.kv_cache.disk else []),
            *({"name": one["name"], "mountPath": KV_STORE_DIRECTORY} for one in _kv_store_volume(spec)),
        ],
    }


def _model(
    spec: MedhaReplicaSpec, image: str, settings: OperatorSettings
) -> tuple[Manifest | None, Manifest | None]:
    """Return the volume of the checkpoint, and the init container that fills it; either may be None."""
    source = spec.model.source
    if source.host_path is not None:
        return {"name": "model"} | _claim_or_directory(None, source.host_path.path), None
    if source.hugging_face is None:
        return _volume_of("model", source), None
    wanted = source.hugging_face
    target = MODEL_DIRECTORY if wanted.cache is None else f"{MODEL_DIRECTORY}/{_in_cache(wanted)}"
    environment = [
        {"name": "HF_HOME", "value": "/tmp/hf"},  # noqa: S108 - the container's own
        {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "1"},
    ]
    token_mounts: list[Manifest] = []
    if wanted.token_secret is not None:
        environment.append({"name": "HF_TOKEN_PATH", "value": f"{_HUB_DIRECTORY}/token"})
        token_mounts.append({"name": "hub-token", "mountPath": _HUB_DIRECTORY, "readOnly": True})
    fetch = {
        "name": "fetch-model",
        "image": image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "medha_worker.pod.fetch_model"],
        "args": [*_REPLICA_OPTIONS, "--to", target],
        "env": [{"name": "MEDHA_STAGE", "valueFrom": _STAGE}, *environment],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(spec, with_devices=False),
        "securityContext": _locked_down(),
        "volumeMounts": [
            _CONFIG_MOUNT,
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a directory of the container's own
            # The whole volume: its folders belong to this user only if the container makes them itself.
            {"name": "model", "mountPath": MODEL_DIRECTORY},
            *token_mounts,
        ],
    }
    if wanted.cache is None:
        return {"name": "model", "emptyDir": {}}, fetch
    return {"name": "model"} | _claim_or_directory(wanted.cache.claim_name, wanted.cache.host_path), fetch


def _volume_of(name: str, source: ModelSource | DraftSource) -> Manifest | None:
    """Return the volume of a checkpoint that lies in a claim or an image; None for a directory of the pods' image."""
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return {"name": name, "persistentVolumeClaim": claim}
    if source.image is not None:
        reference = {"reference": source.image.reference, "pullPolicy": source.image.pull_policy}
        return {"name": name, "image": reference}
    return None


def _claim_or_directory(claim: str | None, directory: str | None) -> Manifest:
    """Return the source of a volume: a claim, or else a directory of the node."""
    if claim is not None:
        return {"persistentVolumeClaim": {"claimName": claim}}
    # It must exist: a directory that the kubelet creates belongs to root, so pods could not write to it.
    return {"hostPath": {"path": directory, "type": "Directory"}}


def _kv_files_volume(spec: MedhaReplicaSpec) -> list[Manifest]:
    """Return the volume of the disk tiers of a pod's ranks, if they have any."""
    disk = spec.kv_cache.disk
    if disk is None:
        return []
    if disk.claim_name is not None or disk.host_path is not None:
        return [{"name": "kv-files"} | _claim_or_directory(disk.claim_name, disk.host_path)]
    # The kubelet evicts a pod that exceeds the limit. Ranks exceed their sizes at most by the spare bytes.
    return [{"name": "kv-files", "emptyDir": {"sizeLimit": str(_ephemeral_bytes(spec))}}]


def _kv_store_volume(spec: MedhaReplicaSpec) -> list[Manifest]:
    """Return the volume of the store that replicas share, if it has files."""
    store = spec.kv_cache.store
    if store is None or not store.is_files:
        return []
    return [{"name": "kv-store"} | _claim_or_directory(store.claim_name, store.directory)]


def _store_credentials(spec: MedhaReplicaSpec) -> list[Manifest]:
    """Return the variables with the credentials of the store, if a Secret has them."""
    store = spec.kv_cache.store
    if store is None or store.secret_name is None:
        return []
    variables: list[Manifest] = []
    for name, may_miss in _STORE_CREDENTIALS.items():
        key = {"name": store.secret_name, "key": name} | ({"optional": True} if may_miss else {})
        variables.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return variables


def _ephemeral_bytes(spec: MedhaReplicaSpec) -> int:
    """Return the ephemeral storage for the disk tiers of a pod's ranks, in bytes; 0 if they have a volume of their own."""
    disk = spec.kv_cache.disk
    if disk is None or disk.claim_name is not None or disk.host_path is not None:
        return 0
    return spec.parallelism.tensor * (spec.kv_cache.disk_bytes + _SPARE_DISK_BYTES)


def _in_cache(source: HuggingFaceSource) -> str:
    """Return the folder of a model on a volume that keeps several."""
    return f"medha/{source.repository}/{source.revision}"


def _enrolment_volume(owner: Owner, spec: MedhaReplicaSpec) -> list[Manifest]:
    name = enrolment_name(owner, spec)
    return (
        [] if name is None else [{"name": "enrolment", "secret": {"secretName": name, "defaultMode": 0o440}}]
    )


def _model_mounts(source: ModelSource) -> list[Manifest]:
    if source.path is not None:
        return []
    below = _folder_in(source)
    if source.hugging_face is not None and source.hugging_face.cache is not None:
        below = _in_cache(source.hugging_face)
    return [_read_only("model", MODEL_DIRECTORY, below)]


def _draft_mounts(source: DraftSource | None) -> list[Manifest]:
    if source is None or source.path is not None:
        return []
    return [_read_only("draft-model", DRAFT_DIRECTORY, _folder_in(source))]


def _folder_in(source: ModelSource | DraftSource) -> str:
    """Return the folder of a checkpoint in its claim or image; empty: the whole volume."""
    return source.pvc.path if source.pvc else source.image.path if source.image else ""


def _read_only(volume: str, path: str, below: str) -> Manifest:
    mount: Manifest = {"name": volume, "mountPath": path, "readOnly": True}
    if below:
        mount["subPath"] = below.lstrip("/")
    return mount


def _hub_token_volume(source: ModelSource) -> list[Manifest]:
    """Return the volume with the Hugging Face token as a file, which keeps it out of the container's environment."""
    if source.hugging_face is None or source.hugging_face.token_secret is None:
        return []
    token = source.hugging_face.token_secret
    items = [{"key": token.key, "path": "token"}]
    secret = {"secretName": token.name, "items": items, "defaultMode": 0o440}
    return [{"name": "hub-token", "secret": secret}]


def _default_image(resources: ResourcesSpec, settings: OperatorSettings) -> str:
    """Return the image of pods whose replica names none."""
    return settings.worker_image if resources.accelerator == NO_ACCELERATOR else settings.gpu_worker_image


def _resources(spec: MedhaReplicaSpec, *, with_devices: bool = True) -> Manifest:
    wanted = spec.resources
    devices = {name: str(count) for name, count in wanted.devices.items()} if with_devices else {}
    if with_devices and wanted.accelerator != NO_ACCELERATOR:
        devices[wanted.accelerator] = str(spec.parallelism.tensor)
    limits, requests = dict(wanted.limits) | devices, dict(wanted.requests) | devices
    tiers = {
        "memory": spec.parallelism.tensor * (spec.kv_cache.host_bytes + spec.kv_cache.streaming_bytes),
        "ephemeral-storage": _ephemeral_bytes(spec),
    }
    for name, tier_bytes in tiers.items() if with_devices else ():
        if tier_bytes:
            requests[name] = str(quantity_bytes(requests.get(name, limits.get(name, "0"))) + tier_bytes)
            if name in limits:
                limits[name] = str(quantity_bytes(limits[name]) + tier_bytes)
    return {name: entry for name, entry in (("limits", limits), ("requests", requests)) if entry}


def _traces(traces: TracesSpec, settings: OperatorSettings) -> list[Manifest]:
    """Return OpenTelemetry's variables for the controller of a replica; none if it has no collector."""
    endpoint = traces.endpoint or settings.traces_endpoint
    if endpoint is None:
        return []
    base = endpoint.rstrip("/").removesuffix("/v1/traces")  # OpenTelemetry adds this path to the variable
    found: list[Manifest] = [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": base}]
    if traces.headers_secret is not None:
        key = {"name": traces.headers_secret.name, "key": traces.headers_secret.key}
        found.append({"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": key}})
    return found


def _nccl(resources: ResourcesSpec) -> list[Manifest]:
    """Return the environment variables of NCCL, sorted by name; none without an accelerator."""
    if resources.accelerator == NO_ACCELERATOR:
        return []
    return [
        {"name": name, "value": value} for name, value in sorted((_NCCL_DEFAULTS | resources.nccl).items())
    ]


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
