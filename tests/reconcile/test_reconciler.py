"""Reconciles that fail: what the user is told, how often it is written, and how long the next one waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from medha_operator.deployment.observed_deployment import MAY_DRAIN
from medha_operator.kube.client import ApiError
from medha_operator.kube.kinds import Key, Kind
from medha_operator.kube.store import Document
from medha_operator.operator_settings import OperatorSettings
from medha_operator.program import least_pause
from medha_operator.reconciler import REPORTED_FAILURES
from reconcile.fake_cluster import GRID, FakeCluster, Stage, resource

DEPLOYMENT = {"replicas": 2, "template": {"spec": GRID}}


def on_stage(
    test: Callable[[Stage], Awaitable[None]],
    refuse: Callable[[str, str], None] = lambda verb, kind: None,
    settings: OperatorSettings | None = None,
) -> None:
    async def run() -> None:
        stage = Stage(FakeCluster(refuse), settings)
        await test(stage)
        stage.queue.close()

    asyncio.run(run())


def refusing(verb: str, kind: str, status: int, reason: str) -> Callable[[str, str], None]:
    """Refuse every such write, with another message each time, as a quota or a webhook may."""
    count = 0

    def refuse(a_verb: str, a_kind: str) -> None:
        nonlocal count
        if (a_verb, a_kind) == (verb, kind):
            count += 1
            raise ApiError(status, reason, f"refusal {count}")

    return refuse


async def fail_again(stage: Stage, key: Key, reconciles: int) -> None:
    """Reconcile that many times more, as if each back-off were over."""
    for _ in range(reconciles):
        stage.queue.add(key)
        assert await stage.work()


@pytest.mark.parametrize(
    ("kind", "spec", "child"),
    [("MedhaDeployment", DEPLOYMENT, "MedhaReplica"), ("MedhaReplica", GRID, "StatefulSet")],
)
def test_a_child_that_is_always_refused_is_reported_once_and_waited_for(
    kind: str, spec: dict[str, object], child: str
) -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource(kind, spec))
        pauses = await stage.work()
        assert len(pauses) == 1, "the operator's own writes must not ask for another reconcile"
        assert pauses[0] == least_pause(ApiError(403, "", ""))
        assert stage.cluster.calls_of("status") <= 2
        status, reason, message = stage.condition(key)
        assert (status, reason) == ("False", "Refused")
        assert "refusal 1" in message
        assert stage.condition(key, "Stalled")[:2] == ("True", "Refused")
        assert stage.cluster.notice.count("Refused") == 1

    on_stage(test, refusing("apply", child, 403, "Forbidden"))


def test_a_refusal_in_the_same_words_is_not_written_again_whatever_else_is_planned() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaDeployment", DEPLOYMENT))
        await stage.work()
        before = stage.cluster.calls_of("status")
        await fail_again(stage, key, 3)
        assert stage.cluster.calls_of("status") == before
        assert stage.condition(key, "Progressing")[:2] == ("False", "QuotaExceeded")
        stage.cluster.refuse = lambda verb, kind: None
        stage.queue.add(key)
        await stage.work()
        assert stage.condition(key)[1] != "QuotaExceeded"
        assert stage.condition(key, "Accepted")[1] != "QuotaExceeded"
        assert stage.condition(key, "Progressing")[0] == "True"

    def refuse(verb: str, kind: str) -> None:
        if (verb, kind) == ("apply", "MedhaReplica"):
            raise ApiError(403, "Forbidden", "exceeded quota")

    on_stage(test, refuse)


@pytest.mark.parametrize("status", [500, 0, 409])
def test_an_error_that_stays_is_reported_after_some_reconciles_until_one_succeeds(
    status: int,
) -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work(1)
        for _ in range(REPORTED_FAILURES - 2):
            stage.queue.add(key)
            await stage.work(1)
        assert stage.cluster.calls_of("status") == 0
        stage.queue.add(key)
        await stage.work(1)
        ready = stage.condition(key)
        assert ready[:2] == ("False", "ApiServerFails")
        assert "refusal" in ready[2]
        assert stage.condition(key, "Reconciling")[:2] == ("True", "ApiServerFails")
        assert stage.condition(key, "Stalled")[0] == "False"
        stage.cluster.refuse = lambda verb, kind: None
        stage.queue.add(key)
        await stage.work()
        assert stage.condition(key)[1] == "CreatingPods"

    on_stage(test, refusing("apply", "Service", status, "InternalError"))


def test_a_mistake_of_the_operators_own_is_reported_too() -> None:
    def break_down(verb: str, kind: str) -> None:
        if (verb, kind) == ("apply", "Service"):
            raise ValueError("no such thing")

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        await fail_again(stage, key, REPORTED_FAILURES)
        assert stage.condition(key)[1] == "OperatorFails"
        assert "no such thing" in stage.condition(key)[2]

    on_stage(test, break_down)


def test_a_replica_that_waits_for_the_end_of_an_earlier_one_reports_it_once() -> None:
    async def test(stage: Stage) -> None:
        left = {
            "name": "r-l0",
            "namespace": "default",
            "labels": {"medha.dev/replica": "r"},
            "ownerReferences": [{"kind": "MedhaReplica", "name": "r", "uid": "before", "controller": True}],
        }
        stage.see({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": left})
        key = stage.see(resource("MedhaReplica"))
        assert await stage.work() == []
        assert stage.condition(key)[:2] == ("False", "WaitingForCleanup")
        assert stage.condition(key)[2].endswith(": StatefulSet/r-l0")
        assert stage.condition(key, "Reconciling")[0] == "True"
        assert (stage.cluster.calls_of("status"), stage.cluster.calls_of("apply")) == (1, 0)

    on_stage(test)


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "PodDisruptionBudget"])
def test_an_object_of_somebody_else_keeps_its_name_and_the_conflict_is_reported(kind: str) -> None:
    async def test(stage: Stage) -> None:
        theirs = stage.cluster.put({"kind": kind, "metadata": {"name": "r", "namespace": "default"}})
        key = stage.see(resource("MedhaReplica"))
        assert await stage.work() == [least_pause(ApiError(403, "", ""))]
        assert stage.cluster.objects[kind, "default", "r"] == theirs
        assert stage.condition(key)[:2] == ("False", "NameConflict")
        assert f"{kind} default/r" in stage.condition(key)[2]
        del stage.cluster.objects[kind, "default", "r"]
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.condition(key)[1] == "CreatingPods"
        assert stage.cluster.objects[kind, "default", "r"] != theirs

    on_stage(test)


def gone(stage: Stage, key: Key) -> None:
    del stage.cluster.objects[key]


def leaving(stage: Stage, key: Key) -> None:
    found = stage.cluster.objects[key]
    found["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    stage.cluster.put(found)


def replaced(stage: Stage, key: Key) -> None:
    del stage.cluster.objects[key]
    stage.cluster.put(resource(key.kind, GRID if key.kind == "MedhaReplica" else DEPLOYMENT))


@pytest.mark.parametrize("end", [gone, leaving, replaced])
@pytest.mark.parametrize(
    ("kind", "spec", "lost"),
    [
        ("MedhaReplica", GRID, ("ControllerRevision", "StatefulSet", "Service")),
        ("MedhaReplica", GRID, ("StatefulSet",)),
        ("MedhaReplica", GRID, ("NetworkPolicy",)),
        ("MedhaReplica", GRID, ("PodDisruptionBudget",)),
        ("MedhaDeployment", DEPLOYMENT, ("MedhaReplica",)),
    ],
)
def test_nothing_is_created_again_for_a_resource_whose_end_was_not_reported(
    end: Callable[[Stage, Key], None], kind: str, spec: dict[str, object], lost: tuple[str, ...]
) -> None:
    """The garbage collector deletes the children, and the watch has reported nothing else."""

    async def test(stage: Stage) -> None:
        key = stage.see(resource(kind, spec))
        assert await stage.work() == []
        end(stage, key)
        stage.lose(*lost)
        stage.cluster.calls.clear()
        await stage.work(len(stage.queue))
        assert {verb for verb, _ in stage.cluster.calls} == {"get"}

    on_stage(test)


@pytest.mark.parametrize("end", [gone, leaving, replaced])
def test_no_pods_are_made_for_a_new_replica_that_has_gone_before_the_first_reconcile(
    end: Callable[[Stage, Key], None],
) -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        end(stage, key)
        await stage.work(1)
        assert stage.cluster.calls_of("apply", "StatefulSet") == 0

    on_stage(test)


def test_a_new_replica_costs_a_call_for_each_child_and_two_more_with_reads() -> None:
    async def test(stage: Stage) -> None:
        stage.see(resource("MedhaReplica", GRID | {"parallelism": {"kv": 3}}))
        assert await stage.work() == []
        children = len(stage.cluster.objects) - 1
        assert children == 9
        assert len(stage.cluster.calls) <= children + 2

    on_stage(test)


@pytest.mark.parametrize("child", ["Service", "StatefulSet"])
def test_a_refusal_is_written_once_however_often_the_operator_starts(child: str) -> None:
    """The status that is written before pods are created does not change in between."""

    def refuse(verb: str, kind: str) -> None:
        if (verb, kind) == ("apply", child):
            raise ApiError(403, "Forbidden", "exceeded quota")

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        before = stage.cluster.calls_of("status")
        for _ in range(3):
            stage.restart()
            await fail_again(stage, key, 2)
        assert stage.cluster.calls_of("status") == before
        assert stage.condition(key)[1] == "QuotaExceeded"
        stage.cluster.refuse = lambda verb, kind: None
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.condition(key)[1] == "CreatingPods"

    on_stage(test, refuse)


def test_an_object_of_ours_that_the_watch_has_not_reported_is_taken_back_from_whoever_changed_it() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        uid = stage.cluster.objects[key]["metadata"]["uid"]
        metadata = {
            "name": "r",
            "namespace": "default",
            "labels": {"changed": "by a user"},
            "ownerReferences": [{"kind": "MedhaReplica", "name": "r", "uid": uid, "controller": True}],
        }
        stage.cluster.put({"kind": "NetworkPolicy", "metadata": metadata})
        assert await stage.work() == []
        assert stage.cluster.objects["NetworkPolicy", "default", "r"]["spec"]["policyTypes"] == ["Ingress"]

    on_stage(test)


def pod(stage: Stage, uid: str, *, is_started: bool) -> dict[str, Any]:
    """Return the only member of `r`; it has a node."""
    template = stage.cluster.objects["StatefulSet", "default", "r-l0"]["spec"]["template"]
    container = {"name": "worker", "started": is_started, "ready": is_started, "state": {"running": {}}}
    placed = {"type": "PodScheduled", "status": "True"}
    ready = {"type": "Ready", "status": str(is_started)}
    labels = template["metadata"]["labels"]
    metadata = {"name": "r-l0-0", "namespace": "default", "uid": uid, "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": "n", "volumes": template["spec"]["volumes"]},
        "status": {"conditions": [placed, ready], "containerStatuses": [container]},
    }


@pytest.mark.parametrize("conflicts", [1, 2])
def test_a_conflict_amid_the_deletions_of_a_move_leaves_no_member_of_the_gang(conflicts: int) -> None:
    """Evictors have taken the first pod, as the deployment permitted; the others are still to be deleted."""
    deletions = 0

    def refuse(verb: str, kind: str) -> None:
        nonlocal deletions
        deletions += (verb, kind) == ("delete", "Pod")
        if (verb, kind) == ("delete", "Pod") and 2 <= deletions < 2 + conflicts:
            raise ApiError(409, "Conflict", "the object has been modified")

    async def test(stage: Stage) -> None:
        replica = resource("MedhaReplica", GRID | {"parallelism": {"stream": 4}})
        owner = {"kind": "MedhaDeployment", "name": "d", "uid": "owner", "controller": True}
        replica["metadata"]["ownerReferences"] = [owner]
        key = stage.see(replica)
        await stage.work()
        for ordinal in range(4):
            member = pod(stage, f"member-{ordinal}", is_started=True)
            stage.see(member | {"metadata": {**member["metadata"], "name": f"r-l0-{ordinal}"}})
        await stage.work()
        stored = stage.cluster.objects[key]
        gang = stored["status"]["newestMember"]
        stage.see(stored | {"metadata": {**stored["metadata"], "annotations": {MAY_DRAIN: gang}}})
        await stage.work()
        leaves = stage.cluster.objects.pop(("Pod", "default", "r-l0-0"))
        stage.index.stores["Pod"].see("DELETED", stage.cluster.put(leaves))
        del stage.cluster.objects["Pod", "default", "r-l0-0"]
        assert len(await stage.work()) == 1
        for _ in range(conflicts):  # as if each back-off were over
            stage.queue.add(key)
            await stage.work()
        assert [name for kind, _, name in stage.cluster.objects if kind == "Pod"] == []
        assert stage.cluster.objects[key]["status"]["restarts"] == 0
        assert stage.cluster.notice.count("Moving") == 1

    on_stage(test, refuse)


def test_secrets_are_made_sure_of_in_a_resync_only_where_pods_do_not_start() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        for uid, is_started, further in (("", False, 0), ("a", False, 1), ("b", True, 1)):
            if uid:
                stage.see(pod(stage, uid, is_started=is_started))
            await stage.work()
            stage.reconciler.forget()
            stage.queue.add(key)
            await stage.work()
            assert stage.cluster.calls_of("create", "Secret") == 1 + further

    on_stage(test)


def test_pods_that_an_earlier_replica_left_behind_do_not_vouch_for_the_new_keys() -> None:
    """They have started with the old keys; a pod that replaces one of them needs the new ones."""

    async def test(stage: Stage) -> None:
        stage.see(resource("MedhaReplica"))
        await stage.work()
        left_behind = pod(stage, "a", is_started=True)
        left_behind["spec"] = {"volumes": [{"name": "keys", "secret": {"secretName": "r-keys-00000000"}}]}
        stage.see(left_behind)
        stage.index.secrets.clear()  # as in an operator that has just started
        await stage.work()
        assert stage.cluster.calls_of("create", "Secret") == 2

    on_stage(test)


def test_a_gang_that_begins_again_has_its_secrets_made_sure_of() -> None:
    """A Secret that a user has deleted is created before the operator waits for the pods that mount it."""

    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        stage.see(resource("MedhaReplica") | {"status": {"newestMember": "2029-12-31T00:00:00Z"}})
        await stage.work()
        assert "newestMember" not in stage.cluster.objects[key]["status"]
        assert stage.cluster.calls_of("create", "Secret") == 2

    on_stage(test)


async def serving(stage: Stage, spec: dict[str, object] = GRID) -> Key:
    """A replica whose one pod is ready."""
    key = stage.see(resource("MedhaReplica", spec))
    await stage.work()
    stage.see(pod(stage, "a", is_started=True))
    await stage.work()
    assert stage.condition(key)[:2] == ("True", "Serving")
    return key


def refuse_kind(kind: str, status: int = 403) -> Callable[[str, str], None]:
    """Refuse every write of that kind, with the same message."""

    def refuse(_: str, a_kind: str) -> None:
        if a_kind == kind:
            raise ApiError(status, "Refusal", "by policy")

    return refuse


def test_a_refused_write_is_reported_for_a_replica_that_serves_and_leaves_it_ready() -> None:
    """If it were not ready, the next template would take it down together with others."""

    async def test(stage: Stage) -> None:
        key = await serving(stage)
        since = stage.cluster.objects[key]["status"]["conditions"]
        stage.cluster.refuse = refuse_kind("PodDisruptionBudget")
        stage.lose("PodDisruptionBudget")
        assert await stage.work() == [least_pause(ApiError(403, "", ""))]
        assert stage.condition(key)[:2] == ("True", "Serving")
        assert stage.condition(key, "Accepted")[0] == "True"
        assert stage.condition(key, "Stalled")[0] == "False"
        assert stage.condition(key, "Reconciling")[:2] == ("True", "Refused")
        assert "by policy" in stage.condition(key, "Reconciling")[2]
        assert stage.cluster.notice == ["Refused"]
        stage.cluster.refuse = lambda verb, kind: None
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.cluster.objects[key]["status"]["conditions"] == since

    on_stage(test)


def test_a_name_that_somebody_takes_from_a_replica_that_serves_leaves_it_ready() -> None:
    async def test(stage: Stage) -> None:
        key = await serving(stage)
        stage.lose("PodDisruptionBudget")
        stage.cluster.put({"kind": "PodDisruptionBudget", "metadata": {"name": "r", "namespace": "default"}})
        await stage.work()
        assert stage.condition(key)[:2] == ("True", "Serving")
        assert stage.condition(key, "Reconciling")[:2] == ("True", "NameConflict")

    on_stage(test)


def test_a_new_revision_that_is_refused_is_not_ready_whatever_serves() -> None:
    async def test(stage: Stage) -> None:
        key = await serving(stage)
        stage.cluster.refuse = refuse_kind("StatefulSet")
        changed = stage.cluster.objects[key]
        changed["spec"] = GRID | {"image": "another"}
        changed["metadata"]["generation"] += 1
        stage.see(changed)
        await stage.work()
        assert stage.condition(key)[:2] == ("False", "Refused")
        assert stage.condition(key, "Stalled")[:2] == ("True", "Refused")

    on_stage(test)


def test_a_router_whose_keys_may_not_be_read_is_none_of_this_installations() -> None:
    """The chart lets the operator read the Secrets of the routers that it names, and no others."""

    async def forbidden(kind: Kind, namespace: str, name: str) -> Document | None:
        raise ApiError(403, "Forbidden", f"{kind.plural} {namespace}/{name} is forbidden")

    async def test(stage: Stage) -> None:
        vars(stage.cluster)["get"] = forbidden
        key = stage.see(
            resource("MedhaReplica", GRID | {"routerRef": {"name": "typo", "namespace": "there"}})
        )
        assert await stage.work() == [least_pause(ApiError(403, "", ""))]
        status, reason, message = stage.condition(key)
        assert (status, reason) == ("False", "RouterNotFound")
        assert "there/typo is not a router of this installation: correct spec.routerRef" in message
        assert stage.condition(key, "Stalled")[0] == "False"

    on_stage(test)


def test_the_report_of_a_refusal_depends_on_whether_the_replica_serves() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica"))
        await stage.work()
        stage.cluster.refuse = refuse_kind("PodDisruptionBudget")
        stage.lose("PodDisruptionBudget")
        await stage.work()
        assert stage.condition(key)[:2] == ("False", "Refused")
        stage.see(pod(stage, "a", is_started=True))
        await stage.work()
        assert stage.condition(key)[:2] == ("True", "Serving")
        stage.lose("Pod")
        await stage.work()
        assert stage.condition(key)[:2] == ("False", "Refused")

    on_stage(test)


VOLCANO = GRID | {"placement": {"gang": "volcano"}}
WITH_VOLCANO = OperatorSettings(gang_apis=("volcano",))


def test_a_missing_gang_scheduler_is_reported_at_the_replicas_that_ask_for_it_until_it_comes() -> None:
    async def test(stage: Stage) -> None:
        key = stage.see(resource("MedhaReplica", VOLCANO))
        other = stage.see(resource("MedhaReplica", name="other"))
        assert await stage.work() == [least_pause(ApiError(403, "", ""))]
        assert stage.condition(other)[1] == "CreatingPods"
        assert stage.condition(key)[:2] == ("False", "GangUnavailable")
        assert "no PodGroup of scheduling.volcano.sh/v1beta1" in stage.condition(key)[2]
        assert stage.condition(key, "Stalled")[:2] == ("True", "GangUnavailable")
        assert stage.cluster.notice == ["GangUnavailable"]
        stage.cluster.refuse = lambda verb, kind: None
        stage.queue.add(key)
        assert await stage.work() == []
        assert stage.condition(key)[1] == "CreatingPods"

    on_stage(test, refuse_kind("PodGroup", 404), WITH_VOLCANO)


def test_a_gang_scheduler_that_goes_leaves_ready_what_serves() -> None:
    async def test(stage: Stage) -> None:
        key = await serving(stage, VOLCANO)
        stage.cluster.refuse = refuse_kind("PodGroup", 404)
        stage.lose("PodGroup")
        await stage.work()
        assert stage.condition(key)[:2] == ("True", "Serving")
        assert stage.condition(key, "Reconciling")[:2] == ("True", "GangUnavailable")

    on_stage(test, settings=WITH_VOLCANO)
