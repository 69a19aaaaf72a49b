"""What a replica may ask of its pods: the chart's policies on a real API server, beside its own Pod Security standards."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from chart.conftest import OURS, installing
from chart.helm import CHART, NAMESPACE, Helm
from chart.operating import PATIENCE_SECONDS, operator_of
from cluster.api import Api, Document, condition, eventually
from cluster.control_plane import ControlPlane
from cluster.definitions import wait_until_established
from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import CHILDREN, DEPLOYMENT, POD, REPLICA
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, lane, pod_templates

pytestmark = pytest.mark.timeout(300)  # whoever comes first starts an API server and fetches definitions

STATEFUL_SET, REVISION = CHILDREN[:2]
OPERATOR = f"system:serviceaccount:{NAMESPACE}:medha-operator"
JUDGED, EXEMPT, STANDARD = "judged", "exempted", "standard"
"""Namespaces: of replicas; of replicas that are not judged; the last with `-baseline` and `-restricted`, of bare pods."""
MODELS = "/var/lib/medha/models"
CACHE = "/var/cache/medha-models"
VALUES: dict[str, Any] = {
    "operator": {"namespaces": [JUDGED, EXEMPT], "leaseSeconds": 3},
    "admission": {
        "hostPaths": [MODELS, "/srv/"],
        "writableHostPaths": [CACHE, "/srv/cache/"],
        "serviceAccounts": ["model-reader"],
    },
}
SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def kept_on_nodes(path: str) -> Document:
    """A model of the Hub that is kept in a directory of the nodes."""
    return {"huggingFace": {"repository": "a/b", "revision": "0" * 40, "cache": {"hostPath": path}}}


HOST_VOLUME = {"name": "v", "hostPath": {"path": f"{MODELS}/m"}}


@dataclass(frozen=True)
class Case:
    """One thing that a template may ask for."""

    pod: Document = field(default_factory=dict)
    """`template.spec` of the replica."""
    said: str = ""
    """Of the refusal."""
    level: str | None = None
    """Of the Pod Security standards, that refuses it too; None: none does, it is ours alone."""
    annotations: dict[str, str] = field(default_factory=dict)
    source: Document = field(default_factory=lambda: {"path": "models/m"})
    said_of_pods: str = ""
    """Of the refusal of the whole pods; empty: the same."""


def worker(**entries: Any) -> Document:
    return {"containers": [{"name": "worker", **entries}]}


def secured(**entries: Any) -> Document:
    return worker(securityContext=entries)


def beside(**security: Any) -> Document:
    """A container more, safe but for `security`."""
    return {"containers": [{"name": "more", "image": "i", "securityContext": SAFE | security}]}


PROBE = {"httpGet": {"path": "/", "port": 1, "host": "10.0.0.1"}}
FORBIDDEN = {
    "privileged": Case(secured(privileged=True, allowPrivilegeEscalation=True), "securityContext.privileged", "baseline"),
    "privileged init": Case(
        {"initContainers": [{"name": "x", "image": "i", "securityContext": SAFE | {"privileged": True, "allowPrivilegeEscalation": True}}]},
        "containers x: securityContext.privileged",
        "baseline",
    ),
    "host network": Case({"hostNetwork": True}, "hostNetwork, hostPID, hostIPC must not", "baseline"),
    "host processes": Case({"hostPID": True}, "hostNetwork, hostPID, hostIPC must not", "baseline"),
    "host memory": Case({"hostIPC": True}, "hostNetwork, hostPID, hostIPC must not", "baseline"),
    "host port": Case(worker(ports=[{"name": "metrics", "hostPort": 9400}]), "containers worker: ports", "baseline"),
    "host of a probe": Case(worker(readinessProbe=PROBE), "probes and lifecycle", "baseline"),
    "host of a hook": Case(worker(lifecycle={"preStop": PROBE}), "probes and lifecycle", "baseline"),
    "a capability": Case(secured(capabilities={"add": ["SYS_ADMIN"]}), "securityContext.capabilities.add", "baseline"),
    "IPC_LOCK": Case(secured(capabilities={"add": ["IPC_LOCK"]}), "securityContext.capabilities.add", "baseline"),
    "procMount": Case({"hostUsers": False, **secured(procMount="Unmasked")}, "securityContext.procMount"),
    "SELinux type": Case({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "seLinuxOptions", "baseline"),
    "SELinux user": Case(secured(seLinuxOptions={"user": "u"}), "seLinuxOptions", "baseline"),
    "no seccomp in the pod": Case(
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "securityContext.seccompProfile", "baseline"
    ),
    "no seccomp in a container": Case(secured(seccompProfile={"type": "Unconfined"}), "seccompProfile", "baseline"),
    "no AppArmor in the pod": Case(
        {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}, "appArmorProfile", "baseline"
    ),
    "no AppArmor in a container": Case(secured(appArmorProfile={"type": "Unconfined"}), "appArmorProfile", "baseline"),
    "no AppArmor by annotation": Case(
        annotations={"container.apparmor.security.beta.kubernetes.io/worker": "unconfined"},
        said="annotations container.apparmor",
        level="baseline",
    ),
    "sysctls": Case({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, "sysctls", "baseline"),
    "host process of Windows": Case(
        {"securityContext": {"windowsOptions": {"hostProcess": True}}, "hostNetwork": True},
        "securityContext.windowsOptions.hostProcess",
        "baseline",
    ),
    "root in the pod": Case({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser", "restricted"),
    "root in a container": Case(secured(runAsUser=0), "worker: securityContext.runAsUser", "restricted"),
    "perhaps root in the pod": Case({"securityContext": {"runAsNonRoot": False}}, "runAsNonRoot", "restricted"),
    "perhaps root, by null": Case({"securityContext": {"runAsNonRoot": None}}, "runAsNonRoot", "restricted"),
    "perhaps root in a container": Case(secured(runAsNonRoot=False), "runAsNonRoot", "restricted"),
    "escalation": Case(secured(allowPrivilegeEscalation=True), "allowPrivilegeEscalation", "restricted"),
    "escalation, by null": Case(secured(allowPrivilegeEscalation=None), "allowPrivilegeEscalation", "restricted"),
    "kept capabilities": Case(secured(capabilities={"drop": []}), "securityContext.capabilities", "restricted"),
    "a usual capability": Case(secured(capabilities={"add": ["CHOWN"]}), "securityContext.capabilities", "restricted"),
    "a container that says nothing": Case(
        {"containers": [{"name": "more", "image": "i"}]}, "more: securityContext.allowPrivilegeEscalation", "restricted"
    ),
    "a container that keeps capabilities": Case(beside(capabilities={}), "more: securityContext.capabilities", "restricted"),
    "a volume of another kind": Case(
        {"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}, "volumes v: type must be", "restricted"
    ),
    "the node's root": Case({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volumes v: hostPath", "baseline"),
    "a neighbour of the models": Case(
        {"volumes": [{"name": "v", "hostPath": {"path": f"{MODELS}-secret"}}]}, "volumes v: hostPath", "baseline"
    ),
    "hostPath in place of the model": Case(
        {"volumes": [{"name": "model", "hostPath": {"path": "/etc"}}]}, "volumes model: hostPath", "baseline"
    ),
    "a writable volume of the node": Case(
        {"volumes": [HOST_VOLUME], **worker(volumeMounts=[{"name": "v", "mountPath": "/v"}])}, "`readOnly` set"
    ),
    "a writable model of the node": Case(
        worker(volumeMounts=[{"name": "model", "readOnly": False}]),
        "`readOnly` set",
        source={"hostPath": {"path": f"{MODELS}/m"}},
    ),
    "another account": Case({"serviceAccountName": "admin"}, "serviceAccountName must be"),
    "another account, in its old name": Case({"serviceAccount": "admin"}, "serviceAccountName must be"),
    "a token": Case({"automountServiceAccountToken": True}, "automountServiceAccountToken must be false"),
    "a token, by null": Case({"automountServiceAccountToken": None}, "automountServiceAccountToken must be false"),
    "a projected token": Case(
        {"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]},
        "volumes v: projected must hold no token",
    ),
    "a cache in what pods may only read": Case(
        said="model.source.huggingFace.cache.hostPath must be one of",
        said_of_pods="containers fetch-model: volumeMounts must mount",
        source=kept_on_nodes(f"{MODELS}/cache"),
    ),
    "a cache outside": Case(
        said="model.source.huggingFace.cache.hostPath must be one of",
        said_of_pods="containers fetch-model: volumeMounts must mount",
        source=kept_on_nodes(f"{CACHE}2"),
    ),
    # Below what pods may write, one of them may have left a link to any directory of the node.
    "a cache that may be a link": Case(
        said="model.source.huggingFace.cache.hostPath must be one of",
        said_of_pods="containers fetch-model: volumeMounts must mount",
        source=kept_on_nodes(f"{CACHE}/link"),
    ),
    "a volume that may be a link": Case(
        {"volumes": [{"name": "v", "hostPath": {"path": "/srv/cache/link"}}]},
        "volumes v: hostPath must not lie below one of admission.writableHostPaths",
    ),
    "a volume that may be a link, in other words": Case(
        {"volumes": [{"name": "v", "hostPath": {"path": "/srv//cache/link"}}]},
        "volumes v: hostPath must lie below one of admission.hostPaths",
    ),
    "a source that may be a link": Case(
        said="model.source.hostPath.path must not lie below one of admission.writableHostPaths",
        source={"hostPath": {"path": "/srv/cache/link"}},
    ),
    "a source that may be a link, in other words": Case(
        said="model.source.hostPath.path must lie below",
        source={"hostPath": {"path": "/srv/./cache/link"}},
    ),
    "a source outside": Case(said="model.source.hostPath.path must lie below", source={"hostPath": {"path": "/etc"}}),
    "a source beside": Case(
        said="model.source.hostPath.path must lie below", source={"hostPath": {"path": f"{MODELS}2/m"}}
    ),
}  # fmt: skip

MERGED = {
    "no security context of the worker": Case(worker(securityContext=None), "securityContext", "restricted"),
    "no security context of the pod": Case({"securityContext": None}, "securityContext", "restricted"),
    "no profile": Case({"securityContext": {"seccompProfile": None}}, "seccompProfile", "restricted"),
    "no capabilities dropped": Case(secured(capabilities=None), "securityContext.capabilities", "restricted"),
    "what has the name of a container of ours": Case(
        {"containers": [{"name": "fetch-model", "image": "i"}]}, "securityContext", "restricted"
    ),
}
"""What is only wrong in the whole pod: the judgement of the template passes over it."""

UNTYPED = {
    "host process of Windows in a container": Case(
        secured(windowsOptions={"hostProcess": True}), "worker: securityContext.windowsOptions.hostProcess"
    ),
    "a container that is added while it runs": Case(
        {"ephemeralContainers": [{"name": "x", "securityContext": {"privileged": True}}]},
        "containers x: securityContext",
    ),
    "a cache that climbs": Case(
        said="model.source.huggingFace.cache.hostPath must be one of", source=kept_on_nodes(f"{CACHE}/../x")
    ),
    "a source that climbs": Case(
        said="model.source.hostPath.path must lie below", source={"hostPath": {"path": f"{MODELS}/../../.."}}
    ),
    "a volume that climbs": Case(
        {"volumes": [{"name": "v", "hostPath": {"path": "/srv/../etc"}}]},
        "volumes v: hostPath must lie below",
    ),
}
"""What no StatefulSet can hold: the API server finds it wrong by itself, with other words."""

ADMITTED = {
    "nothing": Case(),
    "placement": Case(
        {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": None,
            "priorityClassName": "system-node-critical",
            "terminationGracePeriodSeconds": 5,
        }
    ),
    "environment and mounts": Case(
        {
            "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "persistentVolumeClaim": {"claimName": "c"}}],
            **worker(
                env=[{"name": "A", "value": "b"}],
                resources={"limits": {"cpu": "4"}},
                volumeMounts=[{"name": "v", "mountPath": "/v"}],
            ),
        }
    ),
    "another container": Case(beside()),
    "another user": Case({"securityContext": {"runAsUser": 1000, "fsGroup": None}}),
    "no user, as OpenShift wants it": Case({"securityContext": {"runAsUser": None, "runAsGroup": None}}),
    "a named account": Case({"serviceAccountName": "model-reader"}),
    "a low port": Case(secured(capabilities={"add": ["NET_BIND_SERVICE"]})),
    "models of the node": Case(
        {
            "volumes": [HOST_VOLUME],
            **worker(volumeMounts=[{"name": "v", "mountPath": "/v", "readOnly": True}]),
        },
        source={"hostPath": {"path": MODELS}},
    ),
    "a cache of the node": Case(source=kept_on_nodes(CACHE)),
    "a cache that was written with a slash": Case(source=kept_on_nodes(f"{CACHE}/")),
    "a directory that pods may write, to be read": Case(source={"hostPath": {"path": "/srv/cache"}}),
    "a root that was written with a slash": Case(source={"hostPath": {"path": "/srv/m"}}),
}  # fmt: skip


def replica(case: Case, name: str = "r") -> Document:
    template = {"spec": case.pod, "metadata": {"annotations": case.annotations}}
    spec = {"model": {"name": "m", "source": case.source}, "template": template}
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "metadata": {"name": name},
        "spec": spec,
    }


def deployment(case: Case) -> Document:
    inner = replica(case)["spec"]
    head = {"apiVersion": "medha.dev/v1alpha1", "kind": "MedhaDeployment", "metadata": {"name": "d"}}
    return {**head, "spec": {"replicas": 1, "template": {"spec": inner}}}


def stateful_set(case: Case) -> Document:
    """What the operator makes of the replica."""
    owner = Owner("r", JUDGED, "00000000-0000-0000-0000-000000000000")
    spec = MedhaReplicaSpec.model_validate(replica(case)["spec"])
    (template,) = pod_templates(owner, spec, "0123456789", OperatorSettings())
    return lane(owner, 0, 1, 1, template)


def refused(api: Api, method: str, path: str, body: Document) -> str | None:
    """What is said against a call that is only tried; None: nothing."""
    try:
        api.call(method, path, body, dryRun="All")
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 403:
            raise
        return str(error.response.json()["message"])
    return None


@pytest.fixture(scope="module")
def judging(helm: Helm, accepting: ControlPlane) -> Iterator[Helm]:
    """Helm with a release whose policies are in force, in namespaces of their own."""
    accepting.kubectl("create", "namespace", JUDGED)
    accepting.kubectl("create", "namespace", EXEMPT)
    accepting.kubectl("label", "namespace", EXEMPT, "medha.dev/admission=exempt")
    for level in ("baseline", "restricted"):
        name = f"{STANDARD}-{level}"
        accepting.kubectl("create", "namespace", name)
        accepting.kubectl("create", "serviceaccount", "default", "-n", name)
        accepting.kubectl("label", "namespace", name, f"pod-security.kubernetes.io/enforce={level}")
    with installing(helm, accepting) as there, Api(accepting) as api:
        there("install", "medha", str(CHART), "-n", NAMESPACE, values=VALUES)
        wait_until_established(accepting, *OURS)
        bad = FORBIDDEN["host network"]
        eventually(lambda: refused(api, "POST", REPLICA.path(JUDGED), replica(bad)))
        with Api(accepting, OPERATOR) as operator:
            eventually(lambda: refused(operator, "POST", STATEFUL_SET.path(JUDGED), stateful_set(bad)))
        yield there


@pytest.fixture
def user(judging: Helm, accepting: ControlPlane) -> Iterator[Api]:
    with Api(accepting) as api:
        yield api


@pytest.fixture
def operator(judging: Helm, accepting: ControlPlane) -> Iterator[Api]:
    with Api(accepting, OPERATOR) as api:
        yield api


def standard_says(api: Api, case: Case, level: str) -> str | None:
    """What the API server's own Pod Security admission says against the pod that the operator makes."""
    template = stateful_set(case)["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
    pod["metadata"]["name"] = "p"
    return refused(api, "POST", POD.path(f"{STANDARD}-{level}"), pod)


@pytest.mark.parametrize("name", [*FORBIDDEN, *UNTYPED])
def test_what_a_pod_may_not_be_is_refused_to_users(user: Api, name: str) -> None:
    case = (FORBIDDEN | UNTYPED)[name]
    for kind, body in ((REPLICA, replica(case)), (DEPLOYMENT, deployment(case))):
        said = refused(user, "POST", kind.path(JUDGED), body)
        assert said is not None
        assert case.said in said
        assert "admission." in said, "it names the value that would admit it"
        assert refused(user, "POST", kind.path(EXEMPT), body) is None


@pytest.mark.parametrize("name", [*FORBIDDEN, *MERGED])
def test_what_a_pod_may_not_be_is_refused_to_the_operator(operator: Api, name: str) -> None:
    case = (FORBIDDEN | MERGED)[name]
    said = refused(operator, "POST", STATEFUL_SET.path(JUDGED), stateful_set(case))
    assert said is not None
    wanted = case.said_of_pods or case.said.removeprefix("model.source.hostPath.path ").removeprefix(
        "volumes v: "
    )
    assert wanted in said


def test_the_operator_may_not_write_what_stateful_sets_make_pods_of(user: Api, operator: Api) -> None:
    """A StatefulSet takes its current pods from a ControllerRevision, by its name: no policy on StatefulSets sees those."""
    path = REVISION.path(JUDGED)
    template = stateful_set(FORBIDDEN["host network"])["spec"]["template"]

    def revision(name: str, **data: Any) -> Document:
        return {"metadata": {"name": name}, "revision": 1, "data": data}

    eventually(
        lambda: refused(operator, "POST", path, revision("theirs", spec={"template": template})),
        lambda said: said is not None and "data.spec must not be set" in said,
    )
    operator.call("POST", path, revision("ours", fields={}, templates=[template]))
    assert refused(user, "POST", path, revision("of-others", spec={"template": template})) is None


@pytest.mark.parametrize("name", [name for name, case in (FORBIDDEN | MERGED).items() if case.level])
def test_the_standards_refuse_the_same(user: Api, name: str) -> None:
    case = (FORBIDDEN | MERGED)[name]
    assert standard_says(user, case, str(case.level)) is not None
    if case.level == "restricted":
        assert standard_says(user, case, "baseline") is None


@pytest.mark.parametrize("name", ADMITTED)
def test_the_rest_is_admitted(user: Api, operator: Api, name: str) -> None:
    case = ADMITTED[name]
    assert refused(user, "POST", REPLICA.path(JUDGED), replica(case)) is None
    assert refused(user, "POST", DEPLOYMENT.path(JUDGED), deployment(case)) is None
    assert refused(operator, "POST", STATEFUL_SET.path(JUDGED), stateful_set(case)) is None
    if (
        "hostPath" not in json.dumps(case.source) and "serviceAccountName" not in case.pod
    ):  # accounts must be there
        assert standard_says(user, case, "restricted") is None


def test_what_was_there_before_stays_and_does_not_get_worse(user: Api, operator: Api) -> None:
    bad = replica(FORBIDDEN["host network"], "old")
    bad["metadata"]["finalizers"] = ["medha.test/held"]
    path, sets = REPLICA.path(EXEMPT, "old"), STATEFUL_SET.path(EXEMPT)
    user.call("POST", REPLICA.path(EXEMPT), bad)
    made = stateful_set(FORBIDDEN["host network"])
    made["metadata"]["namespace"] = EXEMPT
    operator.call("POST", sets, made)
    label = "/api/v1/namespaces/" + EXEMPT
    user.call("PATCH", label, {"metadata": {"labels": {"medha.dev/admission": None}}})
    worse = {"spec": {"template": {"spec": {"hostNetwork": True, "hostPID": True}}}}
    eventually(lambda: refused(user, "PATCH", path, worse))
    assert refused(user, "PATCH", path, {"spec": {"model": {"source": {"path": "other"}}}}) is not None
    assert refused(user, "PATCH", path, {"spec": {"suspend": True}}) is None
    assert refused(user, "PATCH", path, {"spec": {"template": {"spec": {"hostNetwork": None}}}}) is None
    worse = {"spec": {"template": {"spec": {"hostPID": True}}}}
    one = STATEFUL_SET.path(EXEMPT, made["metadata"]["name"])
    eventually(lambda: refused(operator, "PATCH", one, worse))
    assert refused(operator, "PATCH", one, {"spec": {"replicas": 0}}) is None
    user.call("DELETE", path)  # whoever takes a finalizer away changes a resource, too
    user.call("PATCH", path, {"metadata": {"finalizers": []}})
    assert user.get(REPLICA, "old", EXEMPT) is None
    user.call("PATCH", label, {"metadata": {"labels": {"medha.dev/admission": "exempt"}}})


def test_a_pod_that_only_the_merge_makes_unsafe_is_not_made_and_the_replica_reports_why(
    helm: Helm, user: Api, accepting: ControlPlane, tmp_path: Path
) -> None:
    user.call("POST", REPLICA.path(JUDGED), replica(MERGED["no security context of the worker"], "merged"))
    with operator_of(helm.render(**VALUES), accepting, tmp_path):
        found = eventually(
            lambda: user.get(REPLICA, "merged", JUDGED),
            lambda seen: condition(seen, "Stalled") == ("True", "AdmissionRefused"),
            PATIENCE_SECONDS,
        )
    assert found is not None
    told = {entry["type"]: entry for entry in found["status"]["conditions"]}
    assert told["Accepted"]["status"] == "False"
    assert (
        "containers worker: securityContext.allowPrivilegeEscalation must be false"
        in told["Ready"]["message"]
    )
    assert user.list(STATEFUL_SET, JUDGED) == []
    user.delete(REPLICA, "merged", JUDGED)


def test_a_replica_that_no_operator_manages_is_admitted_with_a_warning(
    user: Api, accepting: ControlPlane
) -> None:
    text = json.dumps(replica(FORBIDDEN["host network"]))
    said = accepting.kubectl("create", "--dry-run=server", "-n", "team-a", "-f", "-", stdin=text)
    assert "Warning" in said
    assert "does not manage this namespace" in said
    assert "operator.namespaces" in said
    assert refused(user, "POST", REPLICA.path(JUDGED), replica(Case())) is None


@pytest.mark.long
def test_a_looser_level_and_none_at_all(judging: Helm, user: Api) -> None:
    def admits(name: str) -> bool:
        return refused(user, "POST", REPLICA.path(JUDGED), replica(FORBIDDEN[name])) is None

    def upgrade(**values: Any) -> None:
        judging("upgrade", "medha", str(CHART), "-n", NAMESPACE, values=VALUES | {"admission": values})

    upgrade(level="baseline", hostPaths=["/"])
    eventually(lambda: admits("root in a container") and admits("the node's root"))
    assert not any(admits(name) for name in ("privileged", "host network", "another account"))
    upgrade(enabled=False)
    eventually(lambda: all(admits(name) for name in FORBIDDEN))
    upgrade(**VALUES["admission"])
    eventually(lambda: not admits("host network"))
