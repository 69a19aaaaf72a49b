"""Room for a replica's pods on other nodes: labels, taints, requests, and others that need the room."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from cluster.api import running
from medha_operator.kube.client import ApiError
from medha_operator.kube.kinds import Key
from medha_operator.replica.node_capacity import left_free, may_host, needs_of, requests, without_capacity
from medha_operator.replica.nodes import SETTLE_SECONDS
from medha_operator.replica.observed import Node, node_of
from reconcile.fake_cluster import GRID, Stage, resource
from reconcile.test_reconciler import on_stage

Document = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def node(
    name: str, *, labels: dict[str, str] | None = None, cordoned: bool = False, **amounts: Any
) -> Document:
    """Return a ready node, with resources such as `cpu="4"`; `gpu="8"` stands for GPUs."""
    allocatable = {"cpu": "8", "memory": "64Gi", "pods": "10"} | amounts
    if "gpu" in allocatable:
        allocatable["nvidia.com/gpu"] = allocatable.pop("gpu")
    spec: Document = {"unschedulable": True} if cordoned else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "namespace": "", "labels": labels or {}},
        "spec": spec,
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def pod(spec: Document | None = None, **wanted: Any) -> Document:
    if "gpu" in wanted:
        wanted["nvidia.com/gpu"] = wanted.pop("gpu")
    container = {"name": "worker", "resources": {"requests": wanted}}
    return {"spec": {"containers": [container]} | (spec or {})}


def test_requests_are_counted_as_the_scheduler_does() -> None:
    spec = {
        "initContainers": [
            {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "500m"}}},
            {"name": "fetch", "resources": {"requests": {"cpu": "4", "memory": "1Gi"}}},
        ],
        "containers": [
            {"name": "worker", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "9", "x/y": "2"}}},
            {"name": "other", "resources": {"requests": {"memory": "512Mi"}}},
        ],
        "overhead": {"cpu": "250m"},
    }
    found = requests(spec)
    assert found == {"cpu": Decimal("4.75"), "memory": Decimal(2**30), "x/y": 2, "pods": 1}
    whole = spec | {"resources": {"requests": {"cpu": "10"}}}
    assert requests(whole)["cpu"] == Decimal("10.25")


def expression(key: str, operator: str, *values: str) -> Document:
    return {"key": key, "operator": operator, "values": list(values)}


def node_affinity(*expressions: Document, fields: bool = False) -> Document:
    term = {"matchFields" if fields else "matchExpressions": list(expressions)}
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}, term]}}}}


MATCHING: list[Document] = [
    {},
    {"nodeSelector": {"zone": "a"}},
    node_affinity(expression("zone", "In", "a", "b"), expression("rank", "Gt", "3")),
    node_affinity(expression("zone", "NotIn", "b"), expression("other", "DoesNotExist")),
    node_affinity(expression("zone", "Exists"), expression("rank", "Lt", "5")),
    node_affinity(expression("metadata.name", "In", "n"), fields=True),
]
OTHER: list[Document] = [
    {"nodeSelector": {"zone": "b"}},
    {"nodeSelector": {"type": "gpu"}},
    node_affinity(expression("zone", "In", "b")),
    node_affinity(expression("zone", "NotIn", "a")),
    node_affinity(expression("rank", "Gt", "4")),
    node_affinity(expression("zone", "Gt", "4")),
    node_affinity(expression("zone", "DoesNotExist")),
    node_affinity(expression("metadata.name", "In", "m"), fields=True),
    node_affinity(),
]


@pytest.mark.parametrize("spec", MATCHING + OTHER)
def test_a_node_takes_pods_that_its_labels_are_right_for(spec: Document) -> None:
    here = node_of(node("n", labels={"zone": "a", "rank": "4"}))
    assert may_host(here, "n", needs_of(pod(spec))) is (spec in MATCHING)


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
TOLERATIONS: list[tuple[Document, bool]] = [
    ({"operator": "Exists"}, True),
    ({"key": "gpu", "operator": "Exists"}, True),
    ({"key": "gpu", "value": "yes"}, True),
    ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
    ({"key": "gpu", "value": "no"}, False),
    ({"key": "gpu", "value": "yes", "effect": "NoExecute"}, False),
    ({"key": "other", "operator": "Exists"}, False),
]


@pytest.mark.parametrize(("toleration", "is_enough"), TOLERATIONS)
def test_a_tainted_node_takes_who_tolerates_it(toleration: Document, is_enough: bool) -> None:
    tainted = node("n")
    tainted["spec"]["taints"] = [TAINT]
    assert may_host(node_of(tainted), "n", needs_of(pod({"tolerations": [toleration]}))) is is_enough
    assert not may_host(node_of(tainted), "n", needs_of(pod()))
    tainted["spec"]["taints"] = [TAINT | {"effect": "PreferNoSchedule"}]
    assert may_host(node_of(tainted), "n", needs_of(pod()))


@pytest.mark.parametrize("cordon", [{"unschedulable": True}, {"taints": [{"key": "karpenter.sh/disrupted"}]}])
def test_no_node_takes_pods_that_is_emptied_itself_or_not_ready(cordon: Document) -> None:
    anything = needs_of(pod({"tolerations": [{"operator": "Exists"}]}))
    assert not may_host(node_of(node("n") | {"spec": cordon}), "n", anything)
    silent = node("n")
    silent["status"]["conditions"][0]["status"] = "Unknown"
    assert not may_host(node_of(silent), "n", anything)


def test_pods_fit_where_requests_of_all_pods_together_do() -> None:
    nodes = {name: node_of(node(name, gpu="8", pods="3")) for name in ("a", "b")}
    needs = needs_of(pod(gpu="4", cpu="1"))
    whole = {name: left_free(one, []) for name, one in nodes.items()}
    assert without_capacity([needs] * 4, [], nodes, whole) == 0
    assert without_capacity([needs] * 5, [], nodes, whole) == 1
    assert without_capacity([needs] * 4, [needs], nodes, whole) == 1
    beside = left_free(nodes["a"], [requests(pod(cpu="6")["spec"])] * 2)  # more than there is of them
    assert without_capacity([needs] * 4, [], nodes, whole | {"a": beside}) == 2
    small = needs_of(pod(cpu="100m"))
    assert without_capacity([small] * 7, [], nodes, whole) == 1, "three pods a node"


def test_a_pod_of_others_that_finds_no_node_anyway_takes_no_room() -> None:
    nodes = {"a": node_of(node("a", gpu="8"))}
    needs, huge = needs_of(pod(gpu="8")), needs_of(pod(gpu="64"))
    assert without_capacity([needs], [huge], nodes, {"a": left_free(nodes["a"], [])}) == 0


def lane_pod(lane: str) -> Document:
    mates = {"matchLabels": {"medha.dev/replica": "r", "medha.dev/lane": lane}}
    term = {"labelSelector": mates, "topologyKey": "rack"}
    return pod({"affinity": {"podAffinity": {REQUIRED: [term]}}}, gpu="4")


def test_a_lane_that_must_stay_together_needs_room_within_one_rack() -> None:
    def racks(*names: str) -> dict[str, Node]:
        return {
            f"n{i}": node_of(node(f"n{i}", gpu="4", labels={"rack": rack})) for i, rack in enumerate(names)
        }

    lanes = [needs_of(lane_pod(lane)) for lane in "0011"]
    for names, missing in ((("a", "a", "b", "b"), 0), (("a", "b", "c", "d"), 2), (("a", "a", "b", "c"), 1)):
        nodes = racks(*names)
        assert (
            without_capacity(lanes, [], nodes, {name: left_free(one, []) for name, one in nodes.items()})
            == missing
        )


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"affinity": {"podAntiAffinity": {REQUIRED: [{"topologyKey": "x"}]}}}, "affinity.podAntiAffinity"),
        ({"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": "x"}]}}}, "affinity.podAffinity"),
        ({"topologySpreadConstraints": [{"topologyKey": "x"}]}, "topologySpreadConstraints"),
        ({"topologySpreadConstraints": [{"topologyKey": "x", "whenUnsatisfiable": "ScheduleAnyway"}]}, ""),
        ({"resourceClaims": [{"name": "gpu"}]}, "resourceClaims"),
        ({"containers": [{"name": "c", "ports": [{"hostPort": 80}]}]}, "containers.ports.hostPort"),
        ({"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{}]}}}, ""),
    ],
)
def test_what_is_not_judged_is_named(spec: Document, named: str) -> None:
    assert needs_of(pod(spec)).unjudged == named


# --- as the operator asks ---------------------------------------------------------------------------------


def stored(stage: Stage, document: Document) -> None:
    stage.index.offer(stage.cluster.put(document))


def make_pods(stage: Stage, replica: str, where: str | None) -> None:
    """Return the pods that a replica's StatefulSets would create, on a node or on none yet."""
    for (kind, _, name), found in list(stage.cluster.objects.items()):
        if kind != "StatefulSet" or found["metadata"]["labels"]["medha.dev/replica"] != replica:
            continue
        template = found["spec"]["template"]
        made: Document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-0",
                "namespace": "default",
                "labels": template["metadata"]["labels"],
                "ownerReferences": [{"kind": "StatefulSet", "name": name, "uid": found["metadata"]["uid"], "controller": True}],
            },
            "spec": dict(template["spec"]),
        }  # fmt: skip
        if where is not None:
            made |= {"spec": template["spec"] | {"nodeName": where}, "status": running(template)}
        stored(stage, made)


def other_pod(name: str, where: str, **wanted: Any) -> Document:
    metadata = {"name": name, "namespace": "elsewhere"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata} | pod(
        {"nodeName": where} if where else {}, **wanted
    )


async def serving_on(stage: Stage, *names: str, cpu: str = "6") -> list[Key]:
    """Replicas of one pod each that serve on the node `old`."""
    stored(stage, node("old", cpu="64"))
    spec = GRID | {"resources": {"accelerator": "none", "requests": {"cpu": cpu}}}
    keys = [stage.see(resource("MedhaReplica", spec, name)) for name in names]
    assert await stage.work() == []
    for name in names:
        make_pods(stage, name, "old")
    assert await stage.work() == []
    assert {stage.condition(key)[:2] for key in keys} == {("True", "Serving")}
    return keys


def budget(stage: Stage, name: str) -> Any:
    return stage.cluster.objects["PodDisruptionBudget", "default", name]["spec"]["maxUnavailable"]


def test_a_replica_waits_for_room_that_others_take_and_goes_when_a_node_comes() -> None:
    async def test(stage: Stage) -> None:
        (key,) = await serving_on(stage, "r")
        assert stage.cluster.calls_of("list") == 0, "who leaves no node asks for no room"
        stored(stage, node("tight"))
        stage.cluster.put(other_pod("guest", "tight", cpu="3"))
        stored(stage, node("old", cpu="64", cordoned=True))
        assert await stage.work() == []
        assert stage.condition(key, "Draining")[:2] == ("True", "NodeCordoned")
        assert (
            "1 of its 1 pods find no room beside the pods of the 1 other nodes"
            in stage.condition(key, "Draining")[2]
        )
        assert stage.condition(key)[:2] == ("True", "Serving")
        assert budget(stage, "r") == 0
        assert stage.cluster.notice.count("NodeCordoned") == 1
        writes = stage.cluster.calls_of("apply") + stage.cluster.calls_of("status")
        stage.queue.add(key)
        await stage.work()
        assert stage.cluster.calls_of("apply") + stage.cluster.calls_of("status") == writes
        stored(stage, node("new"))  # of which the replica hears, though it has no pod there
        assert await stage.work() == []
        assert stage.condition(key, "Draining")[:2] == ("True", "Moving")
        assert budget(stage, "r") == "100%"

    on_stage(test)


def test_room_is_checked_only_once_no_node_was_cordoned_for_a_while() -> None:
    async def test(stage: Stage) -> None:
        (key,) = await serving_on(stage, "r")
        stored(stage, node("new"))
        old = node("old", cpu="64", cordoned=True)
        old["spec"]["taints"] = [
            {"key": "node.kubernetes.io/unschedulable", "timeAdded": "2030-01-01T00:00:00Z"}
        ]
        stored(stage, old)
        assert await stage.work() == []
        assert stage.condition(key, "Draining")[:2] == ("True", "NodesSettling")
        assert (budget(stage, "r"), stage.cluster.calls_of("list")) == (0, 0)
        stage.now += SETTLE_SECONDS
        stage.queue.add(key)
        await stage.work()
        assert budget(stage, "r") == "100%"

    on_stage(test)


def test_two_replicas_do_not_both_leave_for_the_room_of_one() -> None:
    async def test(stage: Stage) -> None:
        keys = await serving_on(stage, "r", "s")
        stored(stage, node("new"))
        stored(stage, node("old", cpu="64", cordoned=True))
        assert await stage.work() == []
        assert sorted(stage.condition(key, "Draining")[1] for key in keys) == ["Moving", "NodeCordoned"]
        (first,) = (key for key in keys if stage.condition(key, "Draining")[1] == "Moving")
        # Its pods have ended, and the new ones have no node yet: the room is still its own.
        make_pods(stage, first.name, None)
        (second,) = (key for key in keys if key != first)
        stage.queue.add(second)
        await stage.work()
        assert budget(stage, second.name) == 0
        stored(stage, node("newer"))
        await stage.work()
        assert budget(stage, second.name) == "100%"

    on_stage(test)


def mount(stage: Stage, **volume_spec: Any) -> None:
    """The pod of `r` mounts a claim that is bound to a volume of this spec."""
    claim: Document = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": "default"},
    }
    stage.cluster.put(claim | {"apiVersion": "v1", "spec": {"volumeName": "pv"}})
    volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv", "namespace": ""}}
    stage.cluster.put(volume | {"spec": volume_spec})
    made = stage.cluster.objects["Pod", "default", "r-l0-0"]
    models = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    stored(stage, made | {"spec": made["spec"] | {"volumes": [*made["spec"]["volumes"], models]}})


HERE_ALONE = {"nodeSelectorTerms": [{"matchExpressions": [expression("host", "In", "old")]}]}


@pytest.mark.parametrize(
    ("volume", "labels", "moves"),
    [
        ({"nodeAffinity": {"required": HERE_ALONE}}, {"host": "new"}, False),
        ({"nodeAffinity": {"required": HERE_ALONE}}, {"host": "old"}, True),
        ({"nfs": {"server": "nas"}}, {"host": "new"}, True),
    ],
)
def test_a_replica_whose_volume_is_tied_to_its_node_has_no_room_elsewhere(
    volume: Document, labels: dict[str, str], moves: bool
) -> None:
    """Its pods would wait for ever on any other node, as with a local volume."""

    async def test(stage: Stage) -> None:
        (key,) = await serving_on(stage, "r")
        mount(stage, **volume)
        stored(stage, node("new", labels=labels))
        stored(stage, node("old", cpu="64", cordoned=True))
        assert await stage.work() == []
        assert budget(stage, "r") == ("100%" if moves else 0)
        if not moves:
            assert "where its volumes are" in stage.condition(key, "Draining")[2]

    on_stage(test)


def test_a_pod_of_others_that_waits_for_a_node_comes_first() -> None:
    async def test(stage: Stage) -> None:
        await serving_on(stage, "r")
        stored(stage, node("new"))
        stage.cluster.put(other_pod("waiting", "", cpu="4"))
        stored(stage, node("old", cpu="64", cordoned=True))
        await stage.work()
        assert budget(stage, "r") == 0

    on_stage(test)


@pytest.mark.parametrize(
    ("status", "words"),
    [(403, "not allowed to list the pods of all namespaces"), (500, "could not be checked for room")],
)
def test_a_replica_whose_room_cannot_be_checked_stays_where_it_is(status: int, words: str) -> None:
    def refuse(verb: str, kind: str) -> None:
        if verb == "list":
            raise ApiError(status, "No", "not for you")

    async def test(stage: Stage) -> None:
        (key,) = await serving_on(stage, "r")
        stored(stage, node("new"))
        stored(stage, node("old", cpu="64", cordoned=True))
        assert await stage.work() == []
        assert budget(stage, "r") == 0
        assert words in stage.condition(key, "Draining")[2]
        assert stage.condition(key)[:2] == ("True", "Serving")

    on_stage(test, refuse)


def test_a_demand_that_is_not_judged_is_reported_and_nothing_moves() -> None:
    async def test(stage: Stage) -> None:
        stored(stage, node("old", cpu="64"))
        apart = {"podAntiAffinity": {REQUIRED: [{"topologyKey": "kubernetes.io/hostname"}]}}
        key = stage.see(resource("MedhaReplica", GRID | {"template": {"spec": {"affinity": apart}}}))
        await stage.work()
        make_pods(stage, "r", "old")
        await stage.work()
        stored(stage, node("new"))
        stored(stage, node("old", cpu="64", cordoned=True))
        await stage.work()
        assert budget(stage, "r") == 0
        assert "spec.template.spec.affinity.podAntiAffinity" in stage.condition(key, "Draining")[2]

    on_stage(test)


def test_the_own_pods_of_a_replica_make_room_for_it_on_nodes_where_it_may_stay() -> None:
    async def test(stage: Stage) -> None:
        stored(stage, node("old"))
        stored(stage, node("kept"))
        stored(stage, node("new"))
        spec = GRID | {
            "parallelism": {"kv": 2},
            "resources": {"accelerator": "none", "requests": {"cpu": "6"}},
        }
        stage.see(resource("MedhaReplica", spec))
        await stage.work()
        make_pods(stage, "r", "kept")
        moved = stage.cluster.objects["Pod", "default", "r-l0-0"]
        stored(stage, moved | {"spec": moved["spec"] | {"nodeName": "old"}})
        await stage.work()
        stored(stage, node("old", cordoned=True))
        await stage.work()
        assert budget(stage, "r") == "100%"

    on_stage(test)
