"""The manifest: what it accepts, and what it says of a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from medha.api.deployment import MedhaDeployment
from medha.api.fields import quantity_bytes
from medha.api.replica import MOST_PODS, MOST_RANKS, MedhaReplica, SchedulingSpec, parse_replica
from medha.errors import ConfigInvalid
from medha.scheduler.replica_config import derive
from medha.topology import Topology
from medha.wire.messages import RankReady, StepProfile


def manifest(**spec: Any) -> dict[str, Any]:
    model = {"name": "m", "source": {"path": "checkpoint"}}
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": "m"},
        "spec": {"model": model, **spec},
    }


def ready(**fields: Any) -> RankReady:
    facts: dict[str, Any] = {
        "rank": 0,
        "block_size_tokens": 16,
        "kv_blocks": 100,
        "weights_bytes": 1,
        "activation_bytes": 1,
        "kv_bytes": 1,
        "profile": StepProfile(1, 1, 1, 1),
        "device": "cpu",
        "max_model_len": 512,
        "vocab_size": 10,
        "linear_flops_per_token": 3000.0,
        "attention_flops_per_pair": 2.0,
    }
    return RankReady(**(facts | fields))


def test_a_minimal_manifest_has_the_documented_defaults() -> None:
    spec = parse_replica(manifest()).spec
    assert (spec.parallelism.tensor, spec.parallelism.stream, spec.parallelism.kv) == (1, 1, 1)
    assert spec.scheduling.policy == "guarded"
    assert spec.scheduling.lars_denominator == "work"
    assert [service_class.name for service_class in spec.service_classes] == ["default"]
    assert spec.service_classes[0].default_output_tokens == 4096


def test_fields_are_camel_case_in_and_out() -> None:
    document = manifest(
        kvCache={"size": "2Gi", "blockSizeTokens": 32},
        scheduling={"maxChunkTokens": 512, "shortHeadroom": 0.1},
        serviceClasses=[{"name": "chat", "ttftFloorSeconds": 1.5}],
    )
    replica = parse_replica(document)
    assert replica.spec.kv_cache.block_size_tokens == 32
    assert replica.spec.scheduling.max_chunk_tokens == 512
    assert replica.spec.service_classes[0].ttft_floor_seconds == 1.5
    written = replica.model_dump(mode="json", by_alias=True)
    assert written["spec"]["kvCache"]["blockSizeTokens"] == 32
    assert parse_replica(written) == replica


def test_a_manifest_cannot_be_changed_once_it_is_read() -> None:
    replica = parse_replica(manifest())
    with pytest.raises(ValueError, match="frozen"):
        replica.spec.parallelism.tensor = 2  # type: ignore[misc]


def test_metadata_of_kubernetes_is_ignored_where_it_means_nothing_here() -> None:
    document = manifest()
    document["metadata"] |= {"labels": {"a": "b"}, "resourceVersion": "12"}
    assert parse_replica(document).metadata.name == "m"


_MODEL: dict[str, Any] = {"name": "m", "source": {"path": "checkpoint"}}


def _behind_a_host_tier(**tiers: Any) -> dict[str, Any]:
    """Return the fields of these tiers beside a host tier."""
    return {"kvCache": {"tiers": {"host": {"size": "1Gi"}, **tiers}}}


BAD = [
    # the spec's fields, and everything that the message must name: field, value or limit, fix
    ({"parallelism": {"tensor": 0}}, ["spec.parallelism.tensor", "greater than or equal to 1", "found 0"]),
    (
        {"parallelism": {"stream": 32, "kv": 32}},
        ["spec.parallelism", f"stream x kv is more than {MOST_PODS} pods", "serve several replicas"],
    ),
    (
        {"parallelism": {"tensor": 64, "stream": 8, "kv": 8}},
        ["spec.parallelism", f"tensor x stream x kv is more than {MOST_RANKS} ranks"],
    ),
    ({"parallelism": {"tensor": 2.5}}, ["spec.parallelism.tensor", "valid integer", "found 2.5"]),
    ({"parallelism": {"tesnor": 2}}, ["spec.parallelism.tesnor", "remove it or correct its spelling"]),
    ({"paralellism": {}}, ["spec.paralellism", "remove it or correct its spelling"]),
    ({"parallelism": []}, ["spec.parallelism", "valid dictionary", "found []"]),
    (
        {"kvCache": {"size": "2GB"}},
        ["spec.kvCache.size", "write a number with Ki, Mi, Gi or Ti, such as 16Gi", "found '2GB'"],
    ),
    ({"kvCache": {"size": "-1Gi"}}, ["spec.kvCache.size", "such as 16Gi", "found '-1Gi'"]),
    ({"kvCache": {"size": "9" * 400}}, ["spec.kvCache.size", "at most 24 characters", "99999"]),
    ({"kvCache": {"size": "0Gi"}}, ["spec.kvCache.size", "above 0", "found '0Gi'"]),
    ({"router": {"maxBodyBytes": "0"}}, ["spec.router.maxBodyBytes", "above 0", "found '0'"]),
    (
        {"kvCache": {"size": 2147483648}},
        ["spec.kvCache.size", "a plain number of bytes in quotes", "found 2147483648"],
    ),
    ({"kvCache": {"tiers": {"host": {}}}}, ["spec.kvCache.tiers.host.size: is missing; add it"]),
    ({"kvCache": {"tiers": {"host": {"size": "16GB"}}}}, ["spec.kvCache.tiers.host.size", "found '16GB'"]),
    (
        {"kvCache": {"tiers": {"host": {"size": "0"}}}},
        ["spec.kvCache.tiers.host.size", "found '0'", "leave out what it is for"],
    ),
    (
        {"kvCache": {"tiers": {"disk": {"size": "1Ti"}}}},
        ["spec.kvCache.tiers", "add kvCache.tiers.host, or leave disk out"],
    ),
    (
        {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "disk": {"size": "0"}}}},
        ["spec.kvCache.tiers.disk.size", "found '0'", "leave out what it is for"],
    ),
    (
        {
            "kvCache": {
                "tiers": {
                    "host": {"size": "1Gi"},
                    "disk": {"size": "8Gi", "claimName": "a", "hostPath": "/b"},
                }
            }
        },
        ["spec.kvCache.tiers.disk", "at most one of claimName and hostPath", "found both"],
    ),
    ({"kvCache": {"tiers": {"tape": {"size": "1Ti"}}}}, ["spec.kvCache.tiers.tape", "remove it"]),
    (
        {"kvCache": {"prefixCaching": False, "tiers": {"host": {"size": "1Gi"}}}},
        ["spec.kvCache", "prefixCaching is false; set it to true, or leave tiers out"],
    ),
    ({"kvCache": {"memoryFraction": 0}}, ["spec.kvCache.memoryFraction", "greater than 0", "found 0"]),
    ({"kvCache": {"memoryFraction": 1.5}}, ["spec.kvCache.memoryFraction", "0.98", "found 1.5"]),
    ({"scheduling": {"policy": "lifo"}}, ["spec.scheduling.policy", "'lars'", "found 'lifo'"]),
    ({"scheduling": {"maxStepSeconds": float("nan")}}, ["spec.scheduling.maxStepSeconds", "found nan"]),
    ({"scheduling": {"minChunkTokens": 0}}, ["spec.scheduling.minChunkTokens", "found 0"]),
    (
        {"scheduling": {"minChunkTokens": 4096}},
        ["scheduling.maxChunkTokens 2048 is below minChunkTokens 4096", "lower the other"],
    ),
    (
        {"scheduling": {"speculation": {"method": "draftModel"}}},
        ["spec.scheduling.speculation", "draftModel is given if, and only if", "method draftModel without"],
    ),
    (
        {"scheduling": {"speculation": {"method": "promptLookup", "draftModel": {"path": "d"}}}},
        ["spec.scheduling.speculation", "method promptLookup with draftModel", "choose another method"],
    ),
    (
        {"scheduling": {"speculation": {"method": "draftModel", "draftModel": {}}}},
        ["spec.scheduling.speculation.draftModel", "exactly one of path, pvc, image", "found none"],
    ),
    ({"serviceClasses": []}, ["spec.serviceClasses", "at least 1 item"]),
    (
        {"serviceClasses": [{"name": "a"}, {"name": "a"}]},
        ["serviceClasses names ['a'] twice", "give each class its own name"],
    ),
    ({"serviceClasses": [{"name": "a"}, {"name": "default"}]}, ["`default` after the first", "move it up"]),
    (
        {"serviceClasses": [{"name": "A b"}]},
        ["spec.serviceClasses.0.name", "lower-case letters, digits", "found 'A b'"],
    ),
    (
        {"serviceClasses": [{"name": "a", "tpotTargetSeconds": 0.005}]},
        ["spec.serviceClasses.0", "tpotTargetSeconds 0.005", "tpotFloorSeconds 0.01", "lower the other"],
    ),
    (
        {"model": {"name": "m", "source": {"path": "x"}, "aliases": ["a", "m"]}},
        ["spec.model", "aliases has 'm'", "own name"],
    ),
    (
        {"model": {"name": "m", "source": {"path": "x"}, "aliases": ["a", "a"]}},
        ["spec.model", "aliases names ['a'] twice", "keep one"],
    ),
    ({"router": {"port": 70000}}, ["spec.router.port", "65535", "found 70000"]),
    ({"lifecycle": {"drainSeconds": -1}}, ["spec.lifecycle.drainSeconds", "found -1"]),
    ({"model": None}, ["spec.model", "valid dictionary", "found None"]),
    ({"model": {"name": "m"}}, ["spec.model.source: is missing; add it"]),
    ({"model": {"name": "m", "source": {}}}, ["spec.model.source", "names no source; set `path`"]),
    ({"model": {"name": "m", "source": {"path": ""}}}, ["spec.model.source.path", "at least 1 character"]),
    (
        {"model": {"name": "m", "source": {"path": "x"}, "maxModelLen": 4}},
        ["spec.model.maxModelLen", "greater than or equal to 16", "found 4"],
    ),
    (
        {"model": {"name": "m", "source": {"path": "x"}, "dtype": "int8"}},
        ["spec.model.dtype", "'bfloat16'", "found 'int8'"],
    ),
    ({"threads": 0}, ["spec.threads", "greater than or equal to 1", "found 0"]),
    (
        {"model": {"name": "m", "source": {"path": "x", "hostPath": {"path": "/y"}}}},
        ["spec.model.source", "names path and hostPath; keep one of them"],
    ),
    (
        {"model": _MODEL | {"architecture": {"layers": 32, "queryHeads": 32}}, "parallelism": {"tensor": 3}},
        ["parallelism.tensor 3 must divide model.architecture.queryHeads 32"],
    ),
    (
        {"model": _MODEL | {"architecture": {"layers": 2, "queryHeads": 32}}, "parallelism": {"stream": 4}},
        ["parallelism.stream 4 is more stages than model.architecture.layers 2"],
    ),
    ({"placement": {"gang": "kueue"}}, ["spec.placement", "gang kueue needs placement.queue"]),
    ({"placement": {"queue": "q"}}, ["spec.placement", "read by gang kueue and volcano only"]),
    (
        {
            "model": {
                "name": "m",
                "source": {"huggingFace": {"repository": "a/b", "cache": {"claimName": "c"}}},
            }
        },
        ["spec.model.source.huggingFace", "set huggingFace.revision to a commit", "found 'main'"],
    ),
    (
        {"model": {"name": "m", "source": {"huggingFace": {"repository": "../.."}}}},
        ["spec.model.source.huggingFace.repository", "found '../..'"],
    ),
    (
        {"model": {"name": "m", "source": {"huggingFace": {"repository": "a/.."}}}},
        ["spec.model.source.huggingFace.repository", "found 'a/..'"],
    ),
    (
        {
            "model": {
                "name": "m",
                "source": {
                    "huggingFace": {
                        "repository": "a/b",
                        "revision": "0" * 40,
                        "cache": {"claimName": "c", "hostPath": "/c"},
                    }
                },
            }
        },
        ["spec.model.source.huggingFace.cache", "exactly one of claimName and hostPath", "found both"],
    ),
    (
        {
            "model": {
                "name": "m",
                "source": {"huggingFace": {"repository": "a/b", "revision": "0" * 40, "cache": {}}},
            }
        },
        ["spec.model.source.huggingFace.cache", "exactly one of claimName and hostPath", "found neither"],
    ),
    (
        {"resources": {"accelerator": "gpu"}},
        ["spec.resources.accelerator", "such as nvidia.com/gpu", "found 'gpu'"],
    ),
    (
        {"resources": {"devices": {"hca": 1}}},
        ["spec.resources", "no device resource", "e.g. rdma/hca", "found 'hca'"],
    ),
    (
        {"resources": {"devices": {"rdma/hca": 0}}},
        ["spec.resources.devices.rdma/hca", "or equal to 1", "found 0"],
    ),
    (
        {"resources": {"devices": {"nvidia.com/gpu": 1}}},
        ["spec.resources", "names the accelerator; remove it there", "found 'nvidia.com/gpu'"],
    ),
    (
        {"resources": {"nccl": {"LD_PRELOAD": "x.so"}}},
        ["spec.resources", "begin with NCCL_ only", "found 'LD_PRELOAD'"],
    ),
    ({"resources": {"nccl": {"NCCL_DEBUG": ""}}}, ["spec.resources.nccl.NCCL_DEBUG", "at least 1 character"]),
    (
        {"resources": {"accelerator": "none", "nccl": {"NCCL_DEBUG": "INFO"}}},
        ["spec.resources", "read with an accelerator only; remove it", "found 'NCCL_DEBUG'"],
    ),
    ({"resources": {"sharedMemory": "0Gi"}}, ["spec.resources.sharedMemory", "such as 8Gi", "found '0Gi'"]),
    ({"resources": {"runtimeClassName": "NVIDIA"}}, ["spec.resources.runtimeClassName", "found 'NVIDIA'"]),
    (
        {"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}, "parallelism": {"tensor": 2}},
        [
            "NCCL cannot join the slices of a GPU; set parallelism.tensor, stream and kv to 1",
            "2 x 1 x 1 ranks",
        ],
    ),
    (
        {"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}, "parallelism": {"stream": 3}},
        ["NCCL cannot join the slices of a GPU", "with 1 x 3 x 1 ranks"],
    ),
    (
        {"resources": {"accelerator": "nvidia.com/mig-1g.10gb"}, "parallelism": {"kv": 2}},
        ["NCCL cannot join the slices of a GPU", "with 1 x 1 x 2 ranks"],
    ),
    (
        {"determinism": "batchInvariant", "parallelism": {"kv": 2}},
        ["determinism batchInvariant needs parallelism.kv 1", "set parallelism.kv to 1", "found 2"],
    ),
    (
        {"role": "prefill"},
        [
            "role prefill or decode needs kvCache.tiers.peers",
            "set role to both",
            "found prefill without peers",
        ],
    ),
    (
        {"role": "decode", "kvCache": {"tiers": {"host": {"size": "1Gi"}}}},
        ["add kvCache.tiers.host and peers", "found decode without peers"],
    ),
    ({"role": "draft"}, ["spec.role", "'both', 'prefill' or 'decode'", "found 'draft'"]),
    ({"determinism": "exact"}, ["spec.determinism", "'bestEffort' or 'batchInvariant'", "found 'exact'"]),
    (
        {"resources": {"limits": {"cpu": "two"}}},
        ["spec.resources.limits.cpu", "such as 2, 500m or 32Gi", "found 'two'"],
    ),
    (
        {"lifecycle": {"restart": {"backoffSeconds": 60, "backoffLimitSeconds": 30}}},
        ["spec.lifecycle.restart", "backoffLimitSeconds is below backoffSeconds"],
    ),
    ({"routerRef": {}}, ["spec.routerRef.name: is missing; add it"]),
    ({"kvCache": {"tiers": {"host": {"size": 0}}}}, ["tiers.host.size", "such as 16Gi", "found 0"]),
    (
        {"kvCache": {"tiers": {}}},
        ["spec.kvCache.tiers", "names no tier", "add kvCache.tiers.host, or leave tiers out"],
    ),
    (
        _behind_a_host_tier(disk={"size": "1Gi", "hostPath": "kv"}),
        ["disk.hostPath", "begin it with /", "found 'kv'"],
    ),
    (_behind_a_host_tier(disk={"size": "1Gi", "hostPath": ""}), ["disk.hostPath", "begin it with /"]),
    (
        _behind_a_host_tier(disk={"size": "1Gi", "claimName": "A_b"}),
        ["disk.claimName", "must be the name of a Kubernetes object", "found 'A_b'"],
    ),
    (
        _behind_a_host_tier(store={"url": "/srv/x"}),
        ["store.url", "file:// with an absolute path", "found '/srv/x'"],
    ),
    (_behind_a_host_tier(store={"url": "file://x/y"}), ["store.url", "file:// with an absolute path"]),
    (
        _behind_a_host_tier(store={"url": "s3://bucket", "endpoint": "minio:9000", "region": "EU"}),
        ["store.endpoint", "such as https://minio.example:9000", "store.region", "such as eu-central-1"],
    ),
    (
        {"traces": {"endpoint": "collector"}},
        ["spec.traces.endpoint", "such as http://collector.monitoring:4318"],
    ),
    ({"router": {"allowedHosts": ["a b"]}}, ["spec.router.allowedHosts.0", "such as chat.example"]),
    (
        {"router": {"allowedOrigins": ["a"]}},
        ["spec.router.allowedOrigins.0", "such as https://chat.example:8443"],
    ),
    ({"model": {"name": 7, "source": {"path": "c"}}}, ["spec.model.name", "write it in quotes", "found 7"]),
]


@pytest.mark.parametrize(("spec", "told"), BAD, ids=[f"{index}" for index in range(len(BAD))])
def test_a_wrong_field_is_refused_with_its_name_its_value_and_the_fix(
    spec: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ConfigInvalid) as error:
        parse_replica(manifest(**spec))
    for part in told:
        assert part in str(error.value)
    for bare in ("should match pattern", "valid string", "(found {"):
        assert bare not in str(error.value)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        (None, ["expected one MedhaReplica mapping, found NoneType"]),
        ([manifest()], ["expected one MedhaReplica mapping, found list"]),
        ({}, [f"{name}: is missing; add it" for name in ("apiVersion", "kind", "metadata", "spec")]),
        (manifest() | {"kind": "Pod"}, ["kind: Input should be 'MedhaReplica' (found 'Pod')"]),
        (
            manifest() | {"apiVersion": "v1"},
            ["apiVersion: Input should be 'medha.dev/v1alpha1' (found 'v1')"],
        ),
        (manifest() | {"metadata": {"name": "Under_score"}}, ["metadata.name", "found 'Under_score'"]),
    ],
)
def test_a_document_of_another_kind_is_refused(document: object, told: list[str]) -> None:
    with pytest.raises(ConfigInvalid) as error:
        parse_replica(document)
    for part in told:
        assert part in str(error.value)


def test_all_wrong_fields_are_reported_at_once() -> None:
    with pytest.raises(ConfigInvalid) as error:
        parse_replica(manifest(parallelism={"tensor": 0, "kv": 0}, router={"port": -1}))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [
        ("0", 0),
        ("1024", 1024),
        ("1k", 1000),
        ("1Ki", 1024),
        ("512Mi", 512 * 2**20),
        ("1.5Gi", 3 * 2**29),
        ("2G", 2 * 10**9),
        ("3T", 3 * 10**12),
        ("1Ti", 2**40),
        ("0.5M", 500_000),
        ("9" * 24, 10**24),
        ("2Pi", 2**51),
        ("1500m", 1),
    ],
)
def test_quantities_are_kubernetes_own(quantity: str, expected: int) -> None:
    assert quantity_bytes(quantity) == pytest.approx(expected)


def _without_apply(schema: dict[str, Any], node: dict[str, Any], path: str) -> list[str]:
    """Fields that say of themselves, and inherit from no field above, how a change is applied."""
    if "x-apply" in node:
        return []
    for choice in [node, *node.get("anyOf", []), node.get("items", {})]:
        if "$ref" in choice:
            node = schema["$defs"][choice["$ref"].rpartition("/")[2]]
    if "properties" not in node:
        return [path]
    return [
        found
        for name, field in node["properties"].items()
        for found in _without_apply(schema, field, f"{path}.{name}")
    ]


def test_every_setting_says_whether_a_change_needs_a_restart() -> None:
    schema = MedhaReplica.model_json_schema()
    assert _without_apply(schema, schema["properties"]["spec"], "spec") == []


def test_numbers_of_resources_may_be_written_bare() -> None:
    spec = parse_replica(manifest(resources={"requests": {"cpu": 8, "memory": "32Gi"}})).spec
    assert spec.resources.requests == {"cpu": "8", "memory": "32Gi"}


# --- deployments ----------------------------------------------------------------------------------------


def deployment(**spec: Any) -> MedhaDeployment:
    document = manifest()
    template = {"spec": document["spec"]}
    return MedhaDeployment.model_validate(
        document | {"kind": "MedhaDeployment", "spec": {"template": template, **spec}}
    )


def test_a_deployment_replaces_one_replica_at_a_time_beyond_those_that_serve() -> None:
    rollout = deployment(replicas=3).spec.rollout
    assert (rollout.max_surge, rollout.max_unavailable, rollout.partition) == (1, 0, 0)


@pytest.mark.parametrize("surge", [0, "0%", "00%", "000%"])
def test_a_rollout_that_could_never_move_is_refused(surge: object) -> None:
    with pytest.raises(ValueError, match="both 0, so that no replica could ever be replaced"):
        deployment(rollout={"maxSurge": surge, "maxUnavailable": 0})
    assert deployment(rollout={"maxSurge": surge, "maxUnavailable": "25%"}).spec.rollout.max_surge == surge


# --- settings of a running replica ----------------------------------------------------------------------


def test_a_replicas_settings_come_from_its_manifest_and_its_ranks() -> None:
    spec = parse_replica(
        manifest(
            parallelism={"tensor": 2, "stream": 3},
            serviceClasses=[{"name": "chat"}, {"name": "batch"}],
        )
    ).spec
    config = derive(spec, ready())
    assert config.topology == Topology(tensor=2, stream=3, kv=1)
    assert config.kv_tokens == 1600
    assert config.max_model_len == 512
    assert config.default_class == "chat"
    assert sorted(config.service_classes) == ["batch", "chat"]


@pytest.mark.parametrize(
    ("configured", "attention_flops", "expected"), [(None, 2.0, 1500), (77, 2.0, 77), (None, 1e9, 1)]
)
def test_a_request_is_long_where_attention_passes_linear_work_unless_configured(
    configured: int | None, attention_flops: float, expected: int
) -> None:
    spec = parse_replica(manifest(scheduling={"longThresholdTokens": configured})).spec
    assert derive(spec, ready(attention_flops_per_pair=attention_flops)).long_threshold_tokens == expected


def test_a_request_is_long_later_where_layers_have_windows() -> None:
    profile = StepProfile(1, 1, 1, 1, window_tokens=500, window_share=0.5)
    assert derive(parse_replica(manifest()).spec, ready(profile=profile)).long_threshold_tokens == 2500


def test_a_largest_chunk_below_the_smallest_is_refused() -> None:
    """Also where the manifest was taken and its scheduling is another one, as in a replay."""
    scheduling = SchedulingSpec(max_chunk_tokens=16, min_chunk_tokens=32)
    spec = parse_replica(manifest()).spec.model_copy(update={"scheduling": scheduling})
    with pytest.raises(
        ConfigInvalid, match=r"maxChunkTokens is 16, below minChunkTokens \(32\); raise the one"
    ):
        derive(spec, ready())
