"""Events show why pods are not created or do not start; each reason comes with its remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from medha_operator.kube.client import ApiError
from medha_operator.program import least_pause
from medha_operator.replica.event_reasons import (
    PATIENCE_SECONDS,
    explained,
    latest_event_message,
    refusal_of,
    schema_problem,
    unexplained_wait,
)
from reconcile.fake_cluster import Stage, resource
from reconcile.test_reconciler import on_stage
from reconcile.world import GRID, World, condition

MADE = "create Pod r-l0-0 in StatefulSet r-l0 failed error: "
SECURITY = MADE + (
    'pods "r-l0-0" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes (volume "model")'
)
QUOTA = (
    MADE + 'pods "r-l0-0" is forbidden: exceeded quota: q, requested: pods=1, used: pods=0, limited: pods=0'
)
UNSIZED = MADE + 'pods "r-l0-0" is forbidden: failed quota: q: must specify cpu for: worker'
NO_RUNTIME = MADE + 'pods "r-l0-0" is forbidden: pod rejected: RuntimeClass "nvidia" not found'
RANGE = MADE + 'pods "r-l0-0" is forbidden: maximum cpu usage per Container is 1, but request is 2'
WEBHOOK = MADE + 'admission webhook "no.example.com" denied the request: not today'
POLICY = MADE + "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"
DOWN = MADE + 'Internal error occurred: failed calling webhook "x": connection refused'


@pytest.mark.parametrize(
    ("words", "reason", "fix", "is_stalled"),
    [
        (SECURITY, "PodSecurityRefused", "model.source.pvc", True),
        (SECURITY.replace("hostPath", "hostPort"), "PodSecurityRefused", "correct spec.template", True),
        (QUOTA, "QuotaExceeded", "raise that ResourceQuota", False),
        (UNSIZED, "QuotaExceeded", "spec.resources", False),
        (NO_RUNTIME, "RuntimeClassNotFound", "create it, or correct spec.resources.runtimeClassName", False),
        (RANGE, "AdmissionRefused", "spec.resources", True),
        (WEBHOOK, "AdmissionRefused", "policy", True),
        (POLICY, "AdmissionRefused", "policy", True),
        (DOWN, "CreatingPods", "connection refused", False),
        ("", "CreatingPods", "events of the StatefulSets", False),
    ],
)
def test_a_refusal_of_pods_is_reported_with_its_fix(
    words: str, reason: str, fix: str, is_stalled: bool
) -> None:
    world = World(**GRID)
    world.do(world.plan().actions)
    observed = world.observe()
    (one,) = (found for (_, name), found in observed.objects.items() if name == "r-l0")
    one["metadata"]["creationTimestamp"] = "2030-01-01T00:00:00Z"
    unexplained = unexplained_wait(observed)
    assert unexplained is not None
    assert (unexplained.uid, unexplained.pod) == (one["metadata"]["uid"], None)
    world.unmade = explained(observed, unexplained, words).unmade
    world.do(world.plan().actions)
    assert condition(world, "Ready") == ("False", reason)
    assert condition(world, "Stalled")[0] == str(is_stalled)
    assert fix in next(said.message for said in world.status.conditions if said.type == "Scheduled")


def test_the_operators_own_lack_of_rights_is_no_admission() -> None:
    assert (
        refusal_of('statefulsets is forbidden: User "system:x" cannot patch resource "statefulsets"') is None
    )


HUB = {
    "model": {"name": "m", "source": {"huggingFace": {"repository": "a/b", "tokenSecret": {"name": "hf"}}}}
}
MOUNT = 'MountVolume.SetUp failed for volume "{}" : {}'


@pytest.mark.parametrize(
    ("words", "reason", "notice"),
    [
        (
            MOUNT.format("enrolment", 'secret "frnt-enrolment" not found'),
            "RouterNotFound",
            "Secret frnt-enrolment is not in namespace default: no router frnt has its keys here; correct spec.routerRef.name",
        ),
        (
            MOUNT.format("hub-token", 'secret "hf" not found'),
            "SecretNotFound",
            "correct spec.model.source.huggingFace.tokenSecret.name",
        ),
        (
            MOUNT.format("hub-token", "references non-existent secret key: token"),
            "SecretNotFound",
            "correct spec.model.source.huggingFace.tokenSecret.key",
        ),
        (MOUNT.format("mine", 'secret "s" not found'), "SecretNotFound", "volume mine"),
        (MOUNT.format("mine", 'configmap "c" not found'), "VolumeUnavailable", "ConfigMap c"),
        (
            MOUNT.format("model", "hostPath type check failed: /missing is not a directory"),
            "VolumeUnavailable",
            "spec.model.source.hostPath.path must be a directory of node n",
        ),
        ("AttachVolume.Attach failed for volume: in use", "VolumeUnavailable", "in use"),
        ("Failed to create pod sandbox: no addresses", "StartingContainers", "no addresses"),
        ("", "StartingContainers", "check the pod's events"),
    ],
)
def test_what_a_pod_waits_for_is_reported_with_the_field_that_names_it(
    words: str, reason: str, notice: str
) -> None:
    said = reported(World(**HUB, routerRef={"name": "frnt"}), words)
    assert said[0] == reason
    assert notice in said[1]


def reported(world: World, words: str) -> tuple[str, str]:
    """Reason and message of `Ready` while a pod waits, and its kubelet reports `words`."""
    world.do(world.plan().actions)
    world.controllers()
    waits = (
        "StartingContainers",
        "its volumes or its network are not set up yet; if this persists, check the pod's events",
    )
    (pod,) = world.pods.values()
    world.pods = {pod.name: replace(pod, is_scheduled=True, node="n", problem=waits)}
    unexplained = unexplained_wait(world.observe())
    assert unexplained is not None
    assert (unexplained.uid, unexplained.pod) == (pod.uid, pod.name)
    world.pods = {one.name: one for one in explained(world.observe(), unexplained, words).pods}
    world.do(world.plan().actions)
    status, reason = condition(world, "Ready")
    assert status == "False"
    return reason, next(said.message for said in world.status.conditions if said.type == "Ready")


def test_a_directory_that_a_cache_needs_and_a_node_lacks_is_reported_with_its_field() -> None:
    hub = {"repository": "a/b", "revision": "0" * 40, "cache": {"hostPath": "/missing"}}
    words = MOUNT.format("model", "hostPath type check failed: /missing is not a directory")
    said = reported(World(model={"name": "m", "source": {"huggingFace": hub}}), words)
    assert "spec.model.source.huggingFace.cache.hostPath must be a directory of node n" in said[1]


def event(
    uid: str, message: str, time: str = "2030-01-01T00:00:01Z", kind: str = "Warning"
) -> dict[str, Any]:
    metadata = {"name": f"e{abs(hash((message, time)))}", "namespace": "default"}
    involved = {"uid": uid}
    document = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": involved}
    return document | {"type": kind, "message": message, "lastTimestamp": time}


def test_the_newest_warning_counts_and_of_several_always_the_same() -> None:
    old = event("u", "a: old", "2029-12-31T23:00:00Z")
    new = [event("u", words) for words in ("b: pod 1", "b: pod 0")]
    assert latest_event_message([old, *new]) == latest_event_message([*reversed(new), old]) == "b: pod 0"
    assert latest_event_message([event("u", "scaled up", kind="Normal")]) == ""
    assert latest_event_message([]) == ""


def test_events_are_read_only_of_a_replica_that_has_been_at_a_loss_for_some_seconds() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        assert await stage.work() == []
        assert stage.cluster.calls_of("list") == 0
        uid = stage.cluster.objects["StatefulSet", "default", "r-l0"]["metadata"]["uid"]
        stage.cluster.put(event(uid, SECURITY))
        stage.now += PATIENCE_SECONDS
        for _ in range(3):
            stage.queue.add(key)
            assert await stage.work() == []
        assert stage.condition(key)[:2] == ("False", "PodSecurityRefused")
        assert stage.cluster.calls_of("list") == 1, "what was read is good for a while"
        writes = stage.cluster.calls_of("status")
        stage.now += 60
        stage.queue.add(key)
        await stage.work()
        assert (stage.cluster.calls_of("list"), stage.cluster.calls_of("status")) == (2, writes)

    on_stage(test)


def test_events_that_may_not_be_read_stop_nothing() -> None:
    def refuse(verb: str, kind: str) -> None:
        if verb == "list":
            raise ApiError(403, "Forbidden", "no")

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        stage.now += PATIENCE_SECONDS
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.condition(key)[1] == "CreatingPods"

    on_stage(test, refuse)


TYPED = "failed to create typed patch object (default/r-l0; apps/v1, Kind=StatefulSet): "


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (
            TYPED + ".spec.template.spec.nodeSelektor: field not declared in schema",
            "a pod has no field spec.template.spec.nodeSelektor: correct its spelling or remove it",
        ),
        (
            TYPED
            + 'errors:\n  .spec.template.spec.containers[name="worker"].imag: field not declared in schema',
            'a pod has no field spec.template.spec.containers[name="worker"].imag',
        ),
        (
            TYPED + ".spec.template.spec.tolerations: expected list, got &{map[]}",
            "spec.template.spec has a value that a pod cannot have: .spec.template.spec.tolerations: expected list",
        ),
    ],
)
def test_a_wrong_field_of_a_pod_is_the_users_to_fix_though_the_api_server_calls_it_its_own_error(
    words: str, notice: str
) -> None:
    error = ApiError(500, "InternalError", words)
    problem = schema_problem(str(error))
    assert problem is not None
    assert notice in problem
    assert least_pause(error) == least_pause(ApiError(422, "Invalid", "")) > 0
    assert schema_problem(str(ApiError(500, "InternalError", "etcd is gone"))) is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ('statefulsets.apps "r-l0" is forbidden: exceeded quota: q, requested: count=1', "QuotaExceeded"),
        ('admission webhook "w" denied the request: no', "AdmissionRefused"),
        (TYPED + ".spec.template.spec.nodeSelektor: field not declared in schema", "Refused"),
    ],
)
def test_refusals_of_the_objects_themselves_are_told_apart_too(words: str, reason: str) -> None:
    status = 500 if words.startswith(TYPED) else 403

    def refuse(verb: str, kind: str) -> None:
        if (verb, kind) == ("apply", "StatefulSet"):
            raise ApiError(status, "Refusal", words)

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        (pause,) = await stage.work()
        assert pause >= 5
        assert stage.condition(key)[:2] == ("False", reason)
        assert stage.cluster.notice.count(reason) == 1

    on_stage(test, refuse)
