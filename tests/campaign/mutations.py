"""Mutations for every field of our resources, generated from the schemas in `crds/` (after Acto's mutations).

`mutations(kind)` yields, for each field, at least two valid values and at least one that the API server must
refuse. `_SAMPLES` and `_BESIDE` hold what a schema does not express, such as the name of a label, or a field
that is only read beside another one. A field that is in neither and that no rule covers is an error, so that
no new field is forgotten.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from cluster.definitions import CRDS
from medha_operator.crds import APPLIED

Schema = dict[str, Any]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """A field, the spec that it is changed in, and its values."""

    kind: str
    path: str
    applied: str
    """Key of `APPLIED`, such as `live`, for how a change takes effect; empty if unspecified."""
    base: Fields
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]
    is_fixed: bool = False
    """True if the field is immutable after creation."""


_REPLICA: Fields = {
    "model": {"name": "m", "source": {"path": "checkpoint"}},
    "resources": {"accelerator": "none"},
}
_DEPLOYMENT: Fields = {"replicas": 1, "template": {"spec": _REPLICA}}


def _drafts(**source: Any) -> Fields:
    """Return the fields of a draft model with this source."""
    return {"scheduling": {"speculation": {"method": "draftModel", "draftModel": source}}}


def _store(**fields: Any) -> Fields:
    """Return the fields of a store beside a host tier."""
    return {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "store": fields}}}


def _guesses_by_a_head(**source: Any) -> Fields:
    """Return the fields of an EAGLE-3 head with this source."""
    head = {"kind": "eagle3", "source": source}
    return {"scheduling": {"speculation": {"method": "predictionHead", "predictionHead": head}}}


_SAMPLES: dict[str, tuple[list[Any], list[Any]]] = {
    # field -> (valid values, invalid values)
    "model.aliases": ([["chat"], ["chat", "org/chat"]], ["chat", [""], ["a", "a"], ["m"]]),
    "model.ropeScaling": ([{"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}], ["yarn"]),
    "model.source.huggingFace.repository": (["a/b", "gpt2"], ["a b", "a/b/c"]),
    "model.source.huggingFace.cache.hostPath": (["/cache/a", "/cache/b"], ["cache", ""]),
    "model.source.hostPath.path": (["/models/a", "/models/b"], ["models"]),
    "parallelism.tensor": ([2, 8], [0, "two"]),
    "parallelism.stream": ([2, 3], [0]),
    "parallelism.kv": ([2, 3], [0]),
    "kvCache.size": (["1Gi", "512Mi"], ["1GB", "-1", "0"]),
    "kvCache.tiers.host.size": (["1Gi", "512Mi"], ["1GB", "-1", "0"]),
    "kvCache.streaming.size": (["1Gi", "2Gi"], ["1GB", "0"]),
    "kvCache.tiers.disk.size": (["8Gi", "9Gi"], ["1GB", "0"]),
    "kvCache.tiers.peers.bandwidth": (["2Gi", "512Mi"], ["1GB", "0"]),
    "kvCache.tiers.peers.plane": (["nixl", "sockets"], ["NIXL", "", 1]),
    "kvCache.tiers.disk.hostPath": (["/kv/a", "/kv/b"], ["kv", ""]),
    "kvCache.tiers.store.url": (
        ["s3://bucket/a", "s3://bucket", "file:///mnt/kv"],
        ["bucket", "s3://", "file://kv", "https://bucket", "s3://key:secret@bucket", ""],
    ),
    "kvCache.tiers.store.endpoint": (
        ["http://minio:9000", "https://s3.example"],
        ["minio:9000", "https://key:secret@s3.example", "https://s3.example/path?x"],
    ),
    "kvCache.tiers.store.secretName": (["s3", "s3-kv"], ["S3", ""]),
    "kvCache.tiers.store.region": (["eu-central-1", "us-east-1"], ["", "EU central"]),
    "kvCache.tiers.store.bandwidth": (["2Gi", "512Mi"], ["1GB", "0"]),
    "router.maxBodyBytes": (["1Mi", "8M"], ["1MB", "0"]),
    "router.allowedHosts": ([["chat.example", "::1"], ["a"]], ["chat.example", ["a b"], ["https://x"]]),
    "router.allowedOrigins": (
        [["https://chat.example:8443"], ["*"]],
        ["*", ["chat.example"], ["https://x/path"]],
    ),
    "scheduling.minChunkTokens": ([1, 64], [0, 8193]),
    "scheduling.maxChunkTokens": ([64, 4096], [0]),
    "scheduling.maxSwaps": ([0, 3], [-1, 4]),
    "scheduling.speculation.method": (["promptLookup", "none"], ["guess", "draftModel", "predictionHead"]),
    "scheduling.speculation.predictionHead.kind": (["mtp"], ["eagle", "eagle3"]),
    "resources.accelerator": (["nvidia.com/gpu", "amd.com/gpu"], ["gpu", "NVIDIA/gpu!"]),
    "resources.devices": (
        [{"rdma/hca": 1}, {"rdma/hca": 2, "example.com/nic": 1}],
        [{"hca": 1}, {"rdma/hca": 0}],
    ),
    "resources.runtimeClassName": (["nvidia", "kata"], ["NVIDIA", ""]),
    "resources.sharedMemory": (["1Gi", "512Mi"], ["0Gi", "8", "8GB"]),
    "resources.nccl": (
        [{"NCCL_DEBUG": "INFO"}, {"NCCL_IB_HCA": "mlx5"}],
        [{"LD_PRELOAD": "x"}, {"NCCL_DEBUG": ""}],
    ),
    "resources.requests": ([{"cpu": "500m"}, {"cpu": 1, "memory": "1Gi"}], [{"cpu": "much"}, {"cpu": []}]),
    "resources.limits": ([{"cpu": "2"}, {"cpu": 2, "memory": "2Gi"}], [{"memory": "2GB"}]),
    "placement": (
        [{"gang": "kueue", "queue": "q"}, {"gang": "none"}],
        [{"gang": "slurm"}, {"gang": "kueue"}],
    ),
    "placement.queue": (["q1", "q2"], ["", "a b"]),
    "placement.laneTopology.key": (["rack", "topology.kubernetes.io/zone"], [""]),
    "template.spec": (
        [{"nodeSelector": {"a": "b"}}, {"tolerations": [{"key": "gpu", "operator": "Exists"}]}],
        ["x", []],
    ),
    "serviceClasses[].tpotFloorSeconds": ([0.02, 0.05], [0, 61, "many"]),
    "lifecycle.restart.backoffSeconds": ([1.0, 60], [0, 86401]),
    "lifecycle.restart.backoffLimitSeconds": ([60, 3600], [0, 29]),
    "lifecycle.readySeconds": ([60, 1200], [0]),
    "traces.endpoint": (
        ["http://collector:4318", "https://otel.example/tenant"],
        ["collector:4318", "http://user:password@collector", "ftp://collector"],
    ),
    "rollout.maxSurge": ([2, "50%"], ["half", "1000%", -1, 10_001]),
    "rollout.maxUnavailable": ([1, "25%"], ["-1%", True, -1]),
    "replicas": ([2, 3, 0], [-1, 10_001]),
    "revisionHistoryLimit": ([0, 1], [-1]),
    "serviceClasses": (
        [[{"name": "chat"}], [{"name": "default"}, {"name": "batch", "ttftFactor": 10}]],
        [[{"name": "a"}, {"name": "a"}], "chat"],
    ),
    "imagePullSecrets": ([[{"name": "a"}], [{"name": "a"}, {"name": "b"}]], [[{"nam": "a"}]]),
}
_BESIDE: dict[str, Fields] = {
    # field -> other fields that it requires
    "model.source.huggingFace": {"model": {"source": {"huggingFace": {"repository": "a/b"}}}},
    "model.source.huggingFace.tokenSecret": {
        "model": {"source": {"huggingFace": {"repository": "a/b", "tokenSecret": {"name": "hf"}}}}
    },
    "model.source.huggingFace.cache": {
        "model": {
            "source": {
                "huggingFace": {"repository": "a/b", "revision": "0" * 40, "cache": {"claimName": "c"}}
            }
        }
    },
    "model.source.huggingFace.cache.hostPath": {
        "model": {
            "source": {
                "huggingFace": {"repository": "a/b", "revision": "0" * 40, "cache": {"hostPath": "/cache"}}
            }
        }
    },
    "model.source.pvc": {"model": {"source": {"pvc": {"claimName": "c"}}}},
    "model.source.hostPath": {"model": {"source": {"hostPath": {"path": "/m"}}}},
    "model.source.image": {"model": {"source": {"image": {"reference": "r/m:1"}}}},
    "kvCache.tiers.disk": {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "disk": {"size": "8Gi"}}}},
    "kvCache.tiers.peers": {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {"bandwidth": "2Gi"}}}},
    "kvCache.tiers.store": _store(url="s3://bucket/kv"),
    "kvCache.tiers.store.claimName": _store(url="file:///mnt/kv"),
    "scheduling.speculation.predictionHead": {
        "scheduling": {"speculation": {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}}
    },
    "scheduling.speculation.predictionHead.source": _guesses_by_a_head(path="h"),
    "scheduling.speculation.predictionHead.source.pvc": _guesses_by_a_head(pvc={"claimName": "c"}),
    "scheduling.speculation.predictionHead.source.image": _guesses_by_a_head(image={"reference": "r/m:1"}),
    "scheduling.speculation.draftModel": _drafts(path="d"),
    "scheduling.speculation.draftModel.pvc": _drafts(pvc={"claimName": "c"}),
    "scheduling.speculation.draftModel.image": _drafts(image={"reference": "r/m:1"}),
    "role": {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {"bandwidth": "2Gi"}}}},
    "model.architecture": {"model": {"architecture": {"layers": 8, "queryHeads": 8}}},
    "resources.nccl": {"resources": {"accelerator": "nvidia.com/gpu"}},
    "placement.queue": {"placement": {"gang": "kueue", "queue": "q"}},
    "placement.laneTopology": {"placement": {"laneTopology": {"key": "rack"}}},
    "routerRef": {"routerRef": {"name": "router"}},
    "traces.headersSecret": {"traces": {"endpoint": "http://collector:4318", "headersSecret": {"name": "s"}}},
}
_WHOLE = {"placement.gang": "placement"}
"""Fields that are only meaningful with others -> the field to change instead."""
_FIXED = {"placement"}


def mutations(kind: str) -> Iterator[Mutation]:
    """Yield mutations of `MedhaReplica`, or of `MedhaDeployment` outside the spec of its replicas."""
    plural = f"{kind.lower()}s"
    crd = yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    if kind == "MedhaDeployment":
        schema = copy.deepcopy(schema)
        del schema["properties"]["template"]["properties"]["spec"]
    base = _REPLICA if kind == "MedhaReplica" else _DEPLOYMENT
    for leaf, applied, node in _leaves(schema):
        path = _WHOLE.get(leaf, leaf)
        valid, invalid = _values(path, node)
        yield Mutation(kind, path, applied, _with(base, path), tuple(valid), tuple(invalid), path in _FIXED)


def changed(spec: Fields, path: str, value: Any) -> Fields:
    """Return `spec` with another value at `path`; `[]` means the first entry of a list."""
    result = copy.deepcopy(spec)
    at: Any = result
    *way, last = path.replace("[]", ".0").split(".")
    for step, following in zip(way, [*way[1:], last], strict=False):
        if isinstance(at, list):
            at = at[int(step)]
        else:
            at = at.setdefault(step, [{"name": "first"}] if following == "0" else {})
    at[int(last) if isinstance(at, list) else last] = value
    return result


def _leaves(schema: Schema, prefix: str = "", above: str = "") -> Iterator[tuple[str, str, Schema]]:
    """Yield path of each field, how a change of it takes effect, and its schema."""
    for name, node in schema.get("properties", {}).items():
        path, applied = prefix + name, _applied(node) or above
        if node.get("type") == "object" and "properties" in node:
            yield from _leaves(node, f"{path}.", applied)
            continue
        yield path, applied, node
        items = node.get("items", {})
        if items.get("type") == "object":
            yield from _leaves(items, f"{path}[].", applied)


def _applied(node: Schema) -> str:
    words = node.get("description", "")
    return next((mark for mark, said in APPLIED.items() if words.endswith(said)), "")


def _with(base: Fields, path: str) -> Fields:
    """Return the spec to change the field in: `base` and the other fields that this one requires."""
    beside = max((key for key in _BESIDE if f"{path}.".startswith(f"{key}.")), key=len, default=None)
    if beside is None:
        return copy.deepcopy(base)
    merged = copy.deepcopy(base)
    for name, value in _BESIDE[beside].items():
        merged[name] = {**merged.get(name, {}), **copy.deepcopy(value)}
    return merged


def _values(path: str, node: Schema) -> tuple[list[Any], list[Any]]:
    if path in _SAMPLES:
        return _SAMPLES[path]
    kind, last = node.get("type"), path.rpartition(".")[2]
    if "enum" in node:
        others = [value for value in node["enum"] if value != node.get("default")]
        return list(dict.fromkeys([*others, node["default"]]))[:3], ["no-such-value"]
    if kind == "boolean":
        return [not node.get("default", False), node.get("default", False)], ["maybe"]
    if kind in ("integer", "number"):
        return _numbers(node)
    if kind == "object" and node.get("additionalProperties", {}).get("type") == "string":
        return [{"example.com/a": "1"}, {"example.com/a": "2", "b": "3"}], [{"a": 1}, "a"]
    if kind == "string" and (last in ("name", "secret", "namespace", "claimName") or "pattern" not in node):
        too_long = "x" * (node["maxLength"] + 1) if "maxLength" in node else 5
        return ["first", "second"], [too_long, *([""] if node.get("minLength") else [])]
    raise AssertionError(f"no values are known for {path}; add them to _SAMPLES: {node}")


def _numbers(node: Schema) -> tuple[list[Any], list[Any]]:
    """Return valid values at the edges of the range, and values beyond them."""
    low, high = node.get("minimum", _ruled(node, ">", 0)), node.get("maximum", _ruled(node, "<", 2**31 - 1))
    is_open = node.get("exclusiveMinimum", False)
    least = low + (1 if node["type"] == "integer" else 0.125) if is_open else low
    near = least + 1 if least + 1 <= high else (least + high) / 2
    valid = [value for value in (least, near, high) if value != node.get("default")]
    return valid, [low if is_open else low - 1, "many", *([high + 1] if high < 2**31 - 1 else [])]


def _ruled(node: Schema, sign: str, otherwise: float) -> float:
    """Return the bound of a validation rule; crds.py writes bounds that are not whole numbers as rules."""
    for one in node.get("x-kubernetes-validations", ()):
        found = re.fullmatch(rf"self {sign}=? ([0-9.]+)", one["rule"])
        if found is not None:
            return float(found[1])
    return otherwise
