"""An upgrade from the version before, by its own chart and operator: replicas keep their pods, and nothing is lost.

Chart, definitions and operator are those of the commit that release/before.txt names. Each operator runs with the
settings, the account and the rights that its chart gives it; KWOK's nodes hold the pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from chart.conftest import OURS
from chart.helm import CHART, ROOT, Helm
from cluster.api import Api, Document, condition, eventually
from cluster.binaries import build
from cluster.conftest import skipping_what_cannot_run
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import wait_until_established
from cluster.kwok import with_kwok
from cluster.operator_process import Operator, operator
from medha_operator.kube.kinds import CHILDREN, CONFIG_MAP, DEPLOYMENT, POD, REPLICA, SECRET

pytestmark = pytest.mark.timeout(900)

_SECONDS = 150.0
NEW_FIELD = "reasoningFormat"
"""A field of `spec.model` that the version before lacks, and that takes effect without a restart."""
SYSTEM = "medha-system"
SPEC: Document = {
    "model": {"name": "m", "source": {"hostPath": {"path": "/var/lib/medha/models/m"}}},
    "parallelism": {"tensor": 2, "stream": 2},
    "template": {"spec": {"nodeSelector": {"type": "kwok"}}},
}


@dataclass(frozen=True)
class Installation:
    """A cluster that releases of Medha are installed on."""

    plane: ControlPlane
    api: Api
    helm: Helm
    folder: Path

    def install(self, chart: Path) -> None:
        arguments = ("upgrade", "--install", "medha", str(chart), "--namespace", SYSTEM, "--create-namespace")
        values = {"operator": {"namespaces": ["default"]}}
        self.helm(*arguments, "--reset-then-reuse-values", values=values)
        wait_until_established(self.plane, *OURS)

    @contextmanager
    def operator(self, name: str, checkout: Path | None = None) -> Iterator[Operator]:
        """The operator as the installed chart runs it, which ends as its pod does: it releases the lease."""
        found = self.api.get(CONFIG_MAP, "medha-operator", SYSTEM)
        assert found is not None
        (text,) = found["data"].values()
        settings = json.loads(text) | {
            "lease_seconds": 60.0
        }  # nobody restarts it if a busy machine costs it the lease
        settings.pop("metrics_port", None)
        config = json.loads(self.plane.kubeconfig.read_text(encoding="utf-8"))
        token = self.plane.kubectl("create", "token", "medha-operator", "-n", SYSTEM, "--duration=1h").strip()
        config["users"] = [{"name": "u", "user": {"token": token}}]
        kubeconfig = self.folder / f"{name}.kubeconfig"
        kubeconfig.write_text(json.dumps(config), encoding="utf-8")
        watched = settings["namespaces"]
        with operator(
            self.folder, kubeconfig, name, checkout=checkout, watched=watched, **settings
        ) as process:
            yield process
            process.process.terminate()
            process.process.wait(_SECONDS)

    def identities(self) -> dict[str, str]:
        """UID of each resource of ours and of each object that an operator has made of it, but for revisions."""
        kinds = [
            kind
            for kind in (REPLICA, DEPLOYMENT, POD, SECRET, *CHILDREN)
            if kind.name != "ControllerRevision"
        ]
        return {
            f"{kind.name} {one['metadata']['name']}": one["metadata"]["uid"]
            for kind in kinds
            for one in self.api.list(kind, "default")
        }

    def apply(self, name: str, **changes: Any) -> None:
        self.api.apply(resource("MedhaReplica", name, SPEC | changes))

    def ready(self, name: str) -> Document:
        """The replica, once it is ready at the spec as it is now."""
        found = eventually(
            lambda: self.api.get(REPLICA, name),
            lambda seen: (
                condition(seen) == ("True", "Serving")
                and seen is not None
                and seen["status"]["observedGeneration"] == seen["metadata"]["generation"]
            ),
            _SECONDS,
        )
        assert found is not None
        return found

    def accepted(self, names: Sequence[str]) -> dict[str, tuple[str, str]]:
        return {name: condition(self.api.get(REPLICA, name), "Accepted") for name in names}


def resource(kind: str, name: str, spec: Document) -> Document:
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "medha.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A cluster that has never had Medha."""
    folder = tmp_path_factory.mktemp("upgrade")
    with skipping_what_cannot_run():
        helm = Helm(build(["helm"])["helm"], folder / "helm")
        with control_plane(folder / "plane") as plane, with_kwok(plane, nodes=2, gpus=16), Api(plane) as api:
            yield Installation(plane, api, replace(helm, kubeconfig=plane.kubeconfig), folder)


@pytest.fixture
def installation(cluster: Installation) -> Iterator[Installation]:
    """The shared cluster; the test's release and all objects of its definitions are removed again."""
    yield cluster
    cluster.helm("uninstall", "medha", "--namespace", SYSTEM)
    cluster.plane.kubectl("delete", "crd", *OURS)
    # The garbage collector no longer knows who owned the rest, or does not know it yet.
    kinds = ",".join(kind.plural for kind in (*CHILDREN, SECRET))
    cluster.plane.kubectl(
        "delete", kinds, "-n", "default", "-l", "app.kubernetes.io/managed-by=medha-operator"
    )
    eventually(lambda: cluster.api.list(POD, "default"), lambda left: not left, _SECONDS)


def leads(process: Operator) -> bool:
    """Return whether an operator reconciles, as its metrics say; one that waits has none."""
    try:
        text = httpx.get(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=5).text
    except httpx.TransportError:
        return False
    return "medha_operator_leading 1.0" in text


@pytest.mark.long
def test_replicas_keep_their_pods_through_an_upgrade_and_back(
    installation: Installation, before: Path
) -> None:
    there, replicas = installation, ("solo", "chat-0", "chat-1")
    there.install(before / "charts" / "medha")
    with there.operator("before", before):
        there.apply("solo")
        there.api.apply(resource("MedhaDeployment", "chat", {"replicas": 2, "template": {"spec": SPEC}}))
        for name in replicas:
            there.ready(name)
        made = there.identities()

        # Helm replaces the definitions first: the operator before has newer ones for a while.
        there.install(CHART)
        eventually(lambda: NEW_FIELD in there.plane.kubectl("explain", "mr.spec.model"), seconds=_SECONDS)
        there.apply("early")
        eventually(lambda: condition(there.api.get(REPLICA, "early"), "Accepted")[1], seconds=_SECONDS)
        assert there.identities().items() >= made.items()
    with there.operator("now") as now:
        eventually(lambda: leads(now), seconds=_SECONDS)
        for name in ("early", *replicas):
            there.ready(name)
        assert there.accepted(replicas) == dict.fromkeys(replicas, ("True", "Valid"))
        assert there.identities().items() >= made.items()

        # A field that is new takes effect without a restart, as its description says.
        there.apply("solo", model=SPEC["model"] | {NEW_FIELD: "none"})
        there.ready("solo")
        assert there.identities().items() >= made.items()

    # And back, as docs/install.md says.
    there.helm("rollback", "medha", "1", "--namespace", SYSTEM)
    eventually(lambda: NEW_FIELD not in there.plane.kubectl("explain", "mr.spec.model"), seconds=_SECONDS)
    with there.operator("again", before) as again:
        eventually(lambda: leads(again), seconds=_SECONDS)
        there.apply("latest")
        there.ready("latest")
        for name in replicas:
            there.ready(name)
        assert there.identities().items() >= made.items()


def test_an_operator_waits_for_its_definitions(installation: Installation, before: Path) -> None:
    there = installation
    there.install(before / "charts" / "medha")
    with there.operator("waiting") as now:
        eventually(lambda: "definitions are older than this operator" in now.said(), seconds=_SECONDS)
        assert f"MedhaReplica.spec.model.{NEW_FIELD}" in now.said()
        assert not leads(now)
        there.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
        eventually(lambda: leads(now), seconds=_SECONDS)
        there.apply("late")
        there.ready("late")


def with_further_fields(folder: Path) -> Path:
    """The definitions of a next version, which has a field with a default, and one without."""
    for file in (ROOT / "crds").iterdir():
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        spec = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        if file.stem == "medhadeployments":
            spec = spec["properties"]["template"]["properties"]["spec"]
        spec["properties"]["scheduling"]["properties"]["lookahead"] = {"type": "integer", "default": 2}
        spec["properties"]["speculation"] = {"type": "string"}
        (folder / file.name).write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder


@pytest.mark.long
def test_an_operator_with_newer_definitions_refuses_only_fields_that_somebody_has_set(
    installation: Installation, tmp_path: Path
) -> None:
    there = installation
    there.install(CHART)
    with there.operator("older") as process:
        eventually(lambda: leads(process), seconds=_SECONDS)
        there.api.apply(resource("MedhaDeployment", "chat", {"replicas": 1, "template": {"spec": SPEC}}))
        there.ready("chat-0")
        made = there.identities()
        newer = str(with_further_fields(tmp_path))
        there.plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", newer)
        there.apply("later")
        assert there.ready("later")["spec"]["scheduling"]["lookahead"] == 2
        there.api.apply(resource("MedhaDeployment", "chat", {"replicas": 2, "template": {"spec": SPEC}}))
        there.ready("chat-1")
        eventually(
            lambda: there.api.get(DEPLOYMENT, "chat"),
            lambda seen: condition(seen) == ("True", "Complete"),
            _SECONDS,
        )
        there.apply("set", speculation="ngram")
        refused = eventually(
            lambda: there.api.get(REPLICA, "set"),
            lambda seen: condition(seen, "Accepted") == ("False", "Invalid"),
            _SECONDS,
        )
        assert refused is not None
        assert "speculation" in json.dumps(refused["status"])
        assert there.identities().items() >= made.items()
