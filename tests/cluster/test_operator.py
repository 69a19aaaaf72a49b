"""The operator against a real API server: what it makes, keeps, leaves alone, and may."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from cluster.api import Api, Document, PlayedKubelets, condition, eventually
from cluster.api import running as played_pod
from cluster.control_plane import ControlPlane
from cluster.operator_process import Operator, limited_kubeconfig, operator
from medha.api.declared import from_text
from medha_cli.main import main
from medha_operator.kube import manifest_overlay
from medha_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, EVENT, KINDS, POD, REPLICA, ROUTER, SECRET
from medha_operator.operator_settings import OperatorSettings
from situations.recording import record

pytestmark = pytest.mark.timeout(240)  # the garbage collector looks for new kinds every 30 s

GRID: Document = {
    "model": {"name": "m", "source": {"path": "checkpoint"}},
    "parallelism": {"tensor": 1, "stream": 2, "kv": 2},
    "resources": {"accelerator": "none"},
}


def replica(name: str, namespace: str, **spec: Any) -> Document:
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": name, "namespace": namespace},
        "spec": GRID | spec,
    }


@pytest.fixture(scope="module")
def api(controlled: ControlPlane) -> Iterator[Api]:
    with Api(controlled) as client:
        yield client


@pytest.fixture(scope="module")
def kubelets(api: Api) -> Iterator[PlayedKubelets]:
    with PlayedKubelets(api) as played:
        yield played


@pytest.fixture(scope="module")
def running(
    controlled: ControlPlane, kubelets: PlayedKubelets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    """An operator with exactly the rights that it asks for, and kubelets that are played."""
    folder = tmp_path_factory.mktemp("operator")
    settings: dict[str, Any] = {"routers": [{"name": "front", "namespace": "default"}]}
    kubeconfig = limited_kubeconfig(controlled, OperatorSettings(lease_namespace="default", **settings))
    with operator(folder, kubeconfig, **settings) as process:
        yield process


@pytest.fixture
def home(api: Api, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    return api.namespace(f"t{abs(hash(request.node.name)) % 10**9}")


def is_ready(resource: Document | None) -> bool:
    return condition(resource) == ("True", "Serving")


def ready(api: Api, name: str, namespace: str) -> Document:
    """The replica, once it is ready for its present spec."""
    found = eventually(
        lambda: api.get(REPLICA, name, namespace),
        lambda seen: (
            is_ready(seen)
            and seen is not None
            and seen["status"]["observedGeneration"] == seen["metadata"]["generation"]
        ),
    )
    assert found is not None
    return found


def pod_uids(api: Api, name: str, namespace: str) -> set[str]:
    pods = api.list(POD, namespace, f"medha.dev/replica={name}")
    return {pod["metadata"]["uid"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}


def test_a_replica_becomes_exactly_what_medha_render_prints(
    running: Operator, api: Api, home: str, tmp_path: Path
) -> None:
    api.apply(replica("r", home))
    uid = ready(api, "r", home)["metadata"]["uid"]
    file = tmp_path / "r.json"
    file.write_text(json.dumps(replica("r", home)))
    printed = CliRunner().invoke(main, ["render", str(file), "--uid", uid, "--format", "json"])
    assert printed.exit_code == 0, printed.output
    owned = api.owned("r", home)
    for manifest in json.loads(printed.output)["items"]:
        there = owned.pop((manifest["kind"], manifest["metadata"]["name"]))
        assert manifest_overlay.holds(
            there | {"kind": manifest["kind"], "apiVersion": manifest["apiVersion"]}, manifest
        )
    assert sorted(kind for kind, _ in owned) == ["Pod", "Pod", "Pod", "Pod", "Secret"]


def test_kopf_writes_nothing_and_the_operator_only_the_status(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home))
    found = ready(api, "r", home)
    fields = {
        (entry["manager"], entry.get("subresource", "")) for entry in found["metadata"]["managedFields"]
    }
    assert fields == {("user", ""), ("medha-operator", "status")}
    assert "finalizers" not in found["metadata"]
    assert "annotations" not in found["metadata"]
    api.apply(replica("r", home, kvCache={"size": "1Gi"}))  # another revision, which is an event
    ready(api, "r", home)
    events = api.list(EVENT, home)
    assert {
        event["reportingComponent"] for event in events if event["involvedObject"]["kind"] == "MedhaReplica"
    } == {"medha-operator"}


def test_at_rest_only_the_lease_is_written(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home))
    ready(api, "r", home)
    settled = eventually(lambda: _unchanged(api), lambda seen: seen is not None)
    assert settled is not None
    lease = "Lease default/medha-operator"
    later = eventually(api.versions, lambda seen: seen[lease] != settled[lease])  # it lives
    later = eventually(api.versions, lambda seen: seen[lease] not in (settled[lease], later[lease]))
    changed = {name for name in later if later[name] != settled.get(name)}
    assert {name for name in changed if not name.startswith("Lease kube-system/")} == {lease}


def _unchanged(api: Api) -> dict[str, str] | None:
    """Versions of everything, if nothing but leases has changed for a while."""
    first = api.versions()
    time.sleep(0.5)
    second = api.versions()
    is_same = {name for name in second if second[name] != first.get(name)} <= {
        name for name in second if name.startswith("Lease")
    }
    return second if is_same else None


def test_a_live_field_touches_no_pod_and_a_restarting_one_replaces_all(
    running: Operator, api: Api, home: str
) -> None:
    api.apply(replica("r", home))
    before = ready(api, "r", home)
    pods = pod_uids(api, "r", home)
    api.apply(replica("r", home, scheduling={"policy": "edf"}))
    after = ready(api, "r", home)
    assert after["status"]["revision"] == before["status"]["revision"]
    settings = api.owned("r", home)["ConfigMap", f"r-{after['status']['revision']}"]["data"]["replica.json"]
    assert json.loads(settings)["spec"]["scheduling"]["policy"] == "edf"
    assert pod_uids(api, "r", home) == pods
    api.apply(replica("r", home, kvCache={"size": "1Gi"}))
    eventually(lambda: pod_uids(api, "r", home), lambda seen: len(seen) == 4 and not seen & pods)
    assert ready(api, "r", home)["status"]["revision"] != before["status"]["revision"]


def test_suspend_ends_the_pods_and_brings_them_back(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home))
    ready(api, "r", home)
    api.apply(replica("r", home, suspend=True))
    eventually(lambda: api.get(REPLICA, "r", home), lambda seen: condition(seen) == ("False", "Suspended"))
    eventually(lambda: pod_uids(api, "r", home), lambda seen: not seen)
    api.apply(replica("r", home, suspend=False))
    ready(api, "r", home)


def test_a_lost_pod_restarts_its_gang_once(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home))
    eventually(lambda: (ready(api, "r", home)["status"]).get("newestMember"))
    pods = pod_uids(api, "r", home)
    time.sleep(1.1)  # creation times have whole seconds: pods of one second are one gang
    api.delete(POD, "r-l1-0", home)
    eventually(lambda: pod_uids(api, "r", home), lambda seen: len(seen) == 4 and not seen & pods)
    assert ready(api, "r", home)["status"]["restarts"] == 1


def test_a_replica_that_is_created_again_at_once_takes_nothing_from_the_one_before(
    running: Operator, api: Api, home: str
) -> None:
    api.apply(replica("r", home))
    before = ready(api, "r", home)["metadata"]["uid"]
    pods = pod_uids(api, "r", home)
    api.delete(REPLICA, "r", home)
    api.apply(replica("r", home))
    eventually(lambda: pod_uids(api, "r", home), lambda seen: len(seen) == 4 and not seen & pods, seconds=90)
    assert ready(api, "r", home)["metadata"]["uid"] != before
    owners = {item["metadata"]["ownerReferences"][0]["uid"] for item in api.owned("r", home).values()}
    assert before not in owners


def test_what_the_api_server_refuses_is_reported_to_the_user(running: Operator, api: Api, home: str) -> None:
    wrong = {"spec": {"tolerations": [{"key": "a", "operator": "Maybe"}]}}
    api.apply(replica("r", home, template=wrong))
    notice = eventually(lambda: [event for event in api.list(EVENT, home) if event["reason"] == "Refused"])
    assert "Maybe" in notice[0]["message"]
    refused = eventually(
        lambda: api.get(REPLICA, "r", home), lambda seen: condition(seen) == ("False", "Refused")
    )
    assert condition(refused, "Stalled") == ("True", "Refused")
    api.apply(replica("r", home))
    ready(api, "r", home)


def derived(api: Api, namespace: str, kind: str = "Ready") -> tuple[str, str, str]:
    """Status, reason and message of a condition of `r`."""
    found = api.get(REPLICA, "r", namespace)
    for one in (found or {}).get("status", {}).get("conditions", ()):
        if one["type"] == kind:
            return one["status"], one["reason"], one["message"]
    return "Unknown", "", ""


HOST_PATH = {"model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}}}


@pytest.mark.parametrize(
    ("level", "spec", "fix"),
    [
        pytest.param("baseline", HOST_PATH, "model.source.pvc", marks=pytest.mark.long),
        ("restricted", HOST_PATH, "model.source.pvc"),
        ("restricted", {}, ""),
    ],
)
def test_a_namespace_whose_pod_security_refuses_the_pods_is_named_as_the_cause(
    running: Operator, api: Api, home: str, level: str, spec: Document, fix: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    api.call("PATCH", f"/api/v1/namespaces/{home}", {"metadata": {"labels": labels}})
    api.apply(replica("r", home, **spec))
    if not fix:  # what is rendered by itself passes every level
        ready(api, "r", home)
        return
    status, _, message = eventually(lambda: derived(api, home), lambda seen: seen[1] == "PodSecurityRefused")
    assert status == "False"
    assert fix in message
    assert f'violates PodSecurity "{level}' in message
    assert derived(api, home, "Stalled")[:2] == ("True", "PodSecurityRefused")


def test_a_quota_that_refuses_the_pods_is_named_as_the_cause_and_raising_it_is_enough(
    running: Operator, api: Api, home: str
) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    made = api.call("POST", f"/api/v1/namespaces/{home}/resourcequotas", quota)
    eventually(
        lambda: api.call("GET", f"/api/v1/namespaces/{home}/resourcequotas/few").get("status", {}).get("hard")
    )
    api.apply(replica("r", home))
    status, _, message = eventually(lambda: derived(api, home), lambda seen: seen[1] == "QuotaExceeded")
    assert status == "False"
    assert "exceeded quota: few" in message
    assert "raise that ResourceQuota" in message
    assert derived(api, home, "Stalled")[0] == "False"
    path = f"/api/v1/namespaces/{home}/resourcequotas/{made['metadata']['name']}"
    api.call("PATCH", path, {"spec": {"hard": {"pods": "9"}}})
    ready(api, "r", home)


def test_a_quota_on_the_objects_themselves_is_told_apart_from_a_wrong_object(
    running: Operator, api: Api, home: str
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"count/statefulsets.apps": "0"}}}
    api.call("POST", f"/api/v1/namespaces/{home}/resourcequotas", quota)
    eventually(
        lambda: (
            api.call("GET", f"/api/v1/namespaces/{home}/resourcequotas/none").get("status", {}).get("hard")
        )
    )
    api.apply(replica("r", home))
    eventually(lambda: derived(api, home), lambda seen: seen[1] == "QuotaExceeded")


def test_a_misspelt_field_of_the_pods_is_named_with_its_path(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home, template={"spec": {"nodeSelektor": {"a": "b"}}}))
    status, _, message = eventually(lambda: derived(api, home), lambda seen: seen[1] == "Refused")
    assert status == "False"
    assert "a pod has no field spec.template.spec.nodeSelektor: correct its spelling or remove it" in message
    assert derived(api, home, "Stalled")[:2] == ("True", "Refused")


DRIFT: dict[str, tuple[str, Document]] = {
    "Service": ("r", {"selector": {"release": "blue"}}),
    "NetworkPolicy": ("r", {"podSelector": {"matchLabels": {"release": "blue"}}}),
    "peer": ("r", {"ingress": [{"from": [{"podSelector": {}, "namespaceSelector": {}}]}, {}]}),
    "PodDisruptionBudget": ("r", {"selector": {"matchLabels": {"release": "blue"}}}),
    "StatefulSet": ("r-l0", {"template": {"spec": {"nodeSelector": {"release": "blue"}}}}),
}


@pytest.mark.parametrize("case", DRIFT)
def test_what_somebody_adds_where_it_does_harm_is_taken_away_and_labels_stay(
    running: Operator, api: Api, home: str, case: str
) -> None:
    name, spec = DRIFT[case]
    kind = KINDS["NetworkPolicy" if case == "peer" else case]
    api.apply(replica("r", home))
    ready(api, "r", home)
    before = api.get(kind, name, home)
    assert before is not None
    pods = pod_uids(api, "r", home)
    own = {"labels": {"team": "search"}, "annotations": {"example.com/note": "a"}}
    added = api.call("PATCH", kind.path(home, name), {"metadata": own, "spec": spec}, fieldManager="other")
    assert added["spec"] != before["spec"]
    after = eventually(
        lambda: api.get(kind, name, home), lambda seen: seen is not None and seen["spec"] == before["spec"]
    )
    assert after is not None
    assert own["labels"].items() <= after["metadata"]["labels"].items()
    assert own["annotations"].items() <= after["metadata"]["annotations"].items()
    notice = eventually(
        lambda: [event for event in api.list(EVENT, home) if event["reason"] == "DriftRepaired"]
    )
    assert f"{kind.name} {name}" in notice[0]["message"]
    assert pod_uids(api, "r", home) == pods
    ready(api, "r", home)


@pytest.mark.parametrize(
    "kind",
    [
        "StatefulSet",
        pytest.param("Service", marks=pytest.mark.long),
        pytest.param("NetworkPolicy", marks=pytest.mark.long),
    ],
)
def test_what_belongs_to_somebody_else_is_never_overwritten(
    running: Operator, api: Api, home: str, kind: str
) -> None:
    """Also where ours could be laid over it without a conflict, and would go with the replica."""
    labels = {"app": "theirs"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    name, spec = {
        "Service": ("r", {"clusterIP": "None", "ports": [{"name": "x", "port": 1}]}),
        "NetworkPolicy": ("r", {"podSelector": {}, "policyTypes": ["Egress"]}),
        "StatefulSet": ("r-l0", {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}),
    }[kind]
    theirs = api.call("POST", KINDS[kind].path(home), {"metadata": {"name": name}, "spec": spec})
    api.apply(replica("r", home))
    eventually(lambda: api.get(REPLICA, "r", home), lambda seen: condition(seen) == ("False", "NameConflict"))
    found = api.get(KINDS[kind], name, home)
    assert found is not None
    assert (found["metadata"], found["spec"]) == (
        {**theirs["metadata"], "managedFields": found["metadata"]["managedFields"]}
        | {"resourceVersion": found["metadata"]["resourceVersion"]},
        theirs["spec"],
    )
    assert "medha-operator" not in json.dumps(found["metadata"]["managedFields"])
    assert condition(api.get(REPLICA, "r", home), "Stalled") == ("True", "NameConflict")
    api.delete(KINDS[kind], name, home)
    ready(api, "r", home)


def test_a_deployment_makes_replicas_and_rolls_them(running: Operator, api: Api, home: str) -> None:
    document = replica("d", home) | {
        "kind": "MedhaDeployment",
        "spec": {"replicas": 2, "template": {"spec": GRID | {"parallelism": {"kv": 1}}}},
    }
    api.apply(document)
    eventually(lambda: api.get(DEPLOYMENT, "d", home), lambda seen: condition(seen)[0] == "True", 60)
    assert {item["metadata"]["name"] for item in api.list(REPLICA, home)} == {"d-0", "d-1"}
    pods = pod_uids(api, "d-0", home) | pod_uids(api, "d-1", home)
    document["spec"]["template"]["spec"]["kvCache"] = {"size": "1Gi"}
    api.apply(document)
    eventually(
        lambda: pod_uids(api, "d-0", home) | pod_uids(api, "d-1", home),
        lambda seen: len(seen) == 2 and not seen & pods,
        60,
    )
    eventually(
        lambda: {item["metadata"]["name"] for item in api.list(REPLICA, home)},
        lambda seen: len(seen) == 2,
        60,
    )
    eventually(lambda: api.get(DEPLOYMENT, "d", home), lambda seen: condition(seen)[0] == "True", 60)
    api.delete(DEPLOYMENT, "d", home)
    eventually(lambda: api.list(REPLICA, home), lambda seen: not seen, 60)


def test_a_router_gets_its_keys_once_it_is_there_and_replicas_elsewhere_what_enrols_at_it(
    running: Operator, api: Api, home: str
) -> None:
    assert api.get(SECRET, "front-keys") is None
    labels = {"app": "front"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
    api.call("POST", ROUTER.path("default"), {"metadata": {"name": "front"}, "spec": spec})
    enrolment = eventually(lambda: api.get(SECRET, "front-enrolment"))
    keys = api.get(SECRET, "front-keys")
    assert enrolment is not None
    assert keys is not None
    assert (sorted(keys["data"]), sorted(enrolment["data"])) == (
        ["router.key", "tokens"],
        ["router.pub", "token"],
    )
    assert enrolment["data"]["token"] in keys["data"]["tokens"]
    assert api.get(CONFIG_MAP, "front-models") is None
    classes = [{"name": "chat"}, {"name": "batch"}]
    tiers = {"kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {}}}}
    router = {"name": "front", "namespace": "default"}
    api.apply(replica("r", home, routerRef=router, serviceClasses=classes, **tiers))
    models = eventually(lambda: api.get(CONFIG_MAP, "front-models"))
    assert models is not None
    (text,) = models["data"].values()
    assert [(one.name, one.service_classes) for one in from_text(text, "")] == [("m", ("chat", "batch"))]
    assert models["metadata"]["ownerReferences"][0]["kind"] == ROUTER.name
    ready(api, "r", home)
    owned = api.owned("r", home)
    # Its ranks give KV at two ports each, for questions and for bytes; both are open to other replicas.
    (container,) = owned["StatefulSet", "r-l0"]["spec"]["template"]["spec"]["containers"]
    listed = [one["containerPort"] for one in container["ports"] if one["name"].startswith("peer-")]
    (opened,) = owned["NetworkPolicy", "r"]["spec"]["ingress"][2]["ports"]
    assert listed == [opened["port"], opened["endPort"]]
    (copy,) = [one for (kind, name), one in owned.items() if kind == "Secret" and "enrolment" in name]
    assert copy["data"] == enrolment["data"]
    assert copy["metadata"]["name"] in json.dumps(owned["StatefulSet", "r-l0"]["spec"]["template"])
    # The way that docs/operator.md shows to a copy of newer keys.
    eventually(lambda: (ready(api, "r", home)["status"]).get("newestMember"))
    api.delete(SECRET, copy["metadata"]["name"], home)
    time.sleep(1.1)  # creation times have whole seconds: pods of one second are one gang
    api.delete(POD, "r-l0-0", home)
    newer = eventually(lambda: api.get(SECRET, copy["metadata"]["name"], home))
    assert newer is not None
    assert newer["metadata"]["uid"] != copy["metadata"]["uid"]
    # What a router was told goes with the last replica that names it.
    api.delete(REPLICA, "r", home)
    eventually(lambda: (api.get(CONFIG_MAP, "front-models") or {}).get("data"), lambda seen: not seen)
    # `helm uninstall` removes the router and leaves what its replicas know it by.
    api.delete(ROUTER, "front")
    eventually(lambda: api.get(ROUTER, "front"), lambda seen: seen is None)
    eventually(lambda: api.get(CONFIG_MAP, "front-models"), lambda seen: seen is None, seconds=90)
    kept = api.get(SECRET, "front-keys")
    assert kept is not None
    assert "ownerReferences" not in kept["metadata"]  # so that nobody collects it
    for name in ("front-keys", "front-enrolment"):
        api.delete(SECRET, name)


def scraped(process: Operator) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics") as answer:
        return str(answer.read(), "utf-8")


def metrics_showing(process: Operator, *lines: str) -> str:
    """The operator's metrics, once they have these lines."""
    return eventually(lambda: scraped(process), lambda seen: all(f"{line}\n" in seen for line in lines))


def holds(kind: str, namespace: str, name: str, value: int) -> str:
    """The line that says whether a condition of a replica holds."""
    labels = f'condition="{kind}",kind="MedhaReplica",resource="{name}",resource_namespace="{namespace}"'
    return f"medha_operator_condition{{{labels}}} {value}.0"


def test_metrics_show_reconciles_resources_and_readiness(running: Operator, api: Api, home: str) -> None:
    api.apply(replica("r", home))
    ready(api, "r", home)
    text = metrics_showing(running, holds("Ready", home, "r", 1), holds("Stalled", home, "r", 0))
    eventually(
        lambda: scraped(running),
        lambda seen: 'medha_operator_ready_seconds_count{kind="MedhaReplica"}' in seen,
    )
    assert 'medha_operator_reconcile_seconds_count{kind="MedhaReplica",outcome="changed"}' in text
    assert "medha_operator_leading 1.0" in text
    assert not any("medha_operator_reason{" in line and home in line for line in text.splitlines())
    api.delete(REPLICA, "r", home)
    eventually(lambda: scraped(running), lambda seen: f'resource_namespace="{home}"' not in seen)


@contextmanager
def frozen_config_maps(api: Api, namespace: str) -> Iterator[None]:
    """A policy of the cluster's administrators refuses changes of ConfigMaps in a namespace."""
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    changes = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["UPDATE"],
        "resources": ["configmaps"],
    }
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    name: Document = {"metadata": {"name": "frozen"}}
    spec = {"matchConstraints": {"resourceRules": [changes]}, "validations": [{"expression": "false"}]}
    api.call("POST", path, name | {"spec": spec})
    bound = {"policyName": "frozen", "validationActions": ["Deny"], "matchResources": there}
    api.call("POST", f"{path.removesuffix('ies')}ybindings", name | {"spec": bound})
    probe = api.call("POST", CONFIG_MAP.path(namespace), {"metadata": {"name": "probe"}})["metadata"]["name"]

    def is_refused() -> bool:
        try:
            api.call("PATCH", CONFIG_MAP.path(namespace, probe), {"data": {"a": str(time.monotonic())}})
        except httpx.HTTPStatusError as error:
            return error.response.status_code == 422
        return False

    eventually(is_refused)
    try:
        yield
    finally:
        api.call("DELETE", f"{path}/frozen")
        api.call("DELETE", f"{path.removesuffix('ies')}ybindings/frozen")


@pytest.mark.long
def test_what_alerts_go_by_while_a_write_is_refused_or_pods_are_suspended(
    running: Operator, api: Api
) -> None:
    home = api.namespace("alerts")

    def mine(labels: Mapping[str, str]) -> bool:
        return labels.get("resource_namespace", home) == home and labels.get("reason") != "Conflict"

    api.apply(replica("r", home))
    ready(api, "r", home)
    before = metrics_showing(running, holds("Ready", home, "r", 1), holds("Reconciling", home, "r", 0))
    record("operator-serving", before, of=lambda labels: mine(labels) and "reason" not in labels)
    with frozen_config_maps(api, home):
        api.apply(replica("r", home, scheduling={"policy": "edf"}))
        metrics_showing(running, holds("Ready", home, "r", 1), holds("Reconciling", home, "r", 1))
        failed = 'medha_operator_reconcile_errors_total{kind="MedhaReplica",reason="Invalid"}'
        first = eventually(lambda: scraped(running), lambda seen: f"{failed} " in seen)
        count = [line for line in first.splitlines() if line.startswith(failed)]
        later = eventually(lambda: scraped(running), lambda seen: count[0] not in seen)
        record("operator-refused", first, later, mine)
    api.apply(replica("r", home, suspend=True))
    of_ready = 'condition="Ready",kind="MedhaReplica",reason="Suspended",resource="r"'
    reason = f'medha_operator_reason{{{of_ready},resource_namespace="{home}"}} 1.0'
    record("operator-suspended", metrics_showing(running, reason, holds("Stalled", home, "r", 0)), of=mine)
    api.delete(REPLICA, "r", home)


def test_a_crash_loop_is_one_resource_to_alerts_and_one_event_that_counts(
    running: Operator, api: Api, kubelets: PlayedKubelets
) -> None:
    home = api.namespace("crashes")
    kubelets.held.add(home)
    api.apply(replica("r", home, parallelism={"kv": 1}))
    pod = eventually(lambda: api.get(POD, "r-l0-0", home))
    assert pod is not None

    def play(state: Document) -> None:
        status = played_pod(pod)
        status["containerStatuses"][0] |= {"ready": False, "started": False, "restartCount": 3} | state
        status["conditions"] = [one for one in status["conditions"] if one["type"] == "PodScheduled"]
        api.call("PATCH", POD.path(home, "r-l0-0", "status"), {"status": status})

    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such model"}}
    waits = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    runs = {"state": {"running": {"startedAt": "2030-01-01T00:00:00Z"}}, "lastState": ended}

    def notice() -> list[int]:
        mine = [one for one in api.list(EVENT, home) if one["reason"] == "CrashLooping"]
        return [one["count"] for one in mine if one["involvedObject"]["kind"] == "MedhaReplica"]

    def of_resource(labels: Mapping[str, str]) -> bool:
        return labels.get("resource_namespace") == home

    for crashes in (1, 2):
        play(waits)
        waiting = metrics_showing(running, holds("Ready", home, "r", 0), holds("Stalled", home, "r", 1))
        eventually(notice, lambda seen, crashes=crashes: seen == [crashes])
        play(runs)
        trying = metrics_showing(running, holds("Ready", home, "r", 0), holds("Stalled", home, "r", 0))
    record("operator-crash-waits", waiting, of=of_resource)
    record("operator-crash-runs", trying, of=of_resource)
    found = api.get(REPLICA, "r", home)
    assert condition(found) == ("False", "Loading")
    kubelets.held.discard(home)
    api.delete(REPLICA, "r", home)


def test_probes_leave_no_lines_in_the_log(running: Operator) -> None:
    url = f"http://127.0.0.1:{running.health_port}/healthz"
    for _ in range(3):
        with urllib.request.urlopen(url) as answer:
            assert answer.status == 200
    assert "/healthz" not in "\n".join(line for line in running.said().splitlines() if "GET" in line)


def test_what_a_replica_was_deleted_without_goes_with_the_next_one_of_its_name(
    running: Operator, api: Api, home: str
) -> None:
    api.apply(replica("r", home))
    ready(api, "r", home)
    api.apply(replica("r", home, kvCache={"size": "1Gi"}))
    ready(api, "r", home)
    orphan = {"propagationPolicy": "Orphan"}
    api.call("DELETE", REPLICA.path(home, "r"), orphan)
    eventually(lambda: api.get(REPLICA, "r", home), lambda seen: seen is None)
    api.apply(replica("r", home))
    uid = ready(api, "r", home)["metadata"]["uid"]

    def owners() -> set[str]:
        kept = api.list(KINDS["ControllerRevision"], home, "medha.dev/replica=r")
        mine = [one for one in kept if one["metadata"]["name"].count("-") == 1]
        assert len(mine) == 2
        return {
            owner["uid"] for one in mine for owner in one["metadata"].get("ownerReferences", [{"uid": ""}])
        }

    eventually(owners, lambda seen: seen == {uid})
    # What docs/operator.md says of the Secrets, which the operator may not list.
    before = {one["metadata"]["name"] for one in api.list(SECRET, home, "medha.dev/replica=r")}
    assert len(before) == 2
    assert len([name for name in before if uid[:8] in name]) == 1


def test_a_status_leaves_labels_and_annotations_to_those_who_own_them(
    api: Api, running: Operator, home: str
) -> None:
    document = replica("r", home)
    labelled = {"labels": {"team": "search"}, "annotations": {"example.com/note": "a"}}
    api.apply(document | {"metadata": document["metadata"] | labelled})
    found = ready(api, "r", home)
    assert found["metadata"]["labels"] == {"team": "search"}
    api.apply(document)
    found = ready(api, "r", home)
    assert not found["metadata"].get("labels")
    assert not found["metadata"].get("annotations")
