"""Replicas from 0 to 3 and back, set by Kubernetes' own autoscaler and by KEDA as `docs/autoscaling.md` says, while clients ask and none is let down."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster import images, medha
from cluster.api import eventually
from cluster.conftest import skipping_what_cannot_run
from cluster.external_metrics import BY_HPA, BY_KEDA, PAGE, adapter_image, install_adapter, prometheus
from cluster.guide import blocks, shown
from cluster.keda import install_keda, keda_images
from cluster.medha import SYSTEM
from cluster.nodes import Cluster, one_node

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

SECONDS = 600.0
"""Limit of each wait; a busy machine starts pods for minutes."""
MODEL = "chat"
TOKENS = 900
CLIENTS = 24
"""Streams at a time. A replica has KV for two of them, however fast this machine is."""
POOL = "2Mi"
"""KV of a replica: 2,048 tokens of the tiny model."""
DOWN_SECONDS = 15


@dataclass(frozen=True)
class Autoscaler:
    """A way of the page, as it is set up."""

    heading: str
    """Heading of the page that shows it."""
    options: dict[str, Any]
    """Options of the control plane."""
    images: Callable[[Path], list[Path]]
    install: Callable[[Cluster], None]
    values: dict[str, Any] = field(default_factory=dict)
    """Settings of the chart's `scaling` that make the test shorter."""


AUTOSCALERS = {
    "hpa": Autoscaler(
        BY_HPA,
        {
            "gates": ["HPAScaleToZero=true"],
            "controller_flags": ["--horizontal-pod-autoscaler-sync-period=2s"],
        },
        lambda folder: [adapter_image(folder)],
        install_adapter,
    ),
    "keda": Autoscaler(
        BY_KEDA,
        {"controller_flags": ["--horizontal-pod-autoscaler-sync-period=2s"]},
        keda_images,
        install_keda,
        {"pollingSeconds": 2},
    ),
}


@pytest.fixture(scope="module", params=AUTOSCALERS)
def autoscaler(request: pytest.FixtureRequest) -> Autoscaler:
    return AUTOSCALERS[request.param]


@pytest.fixture(scope="module")
def cluster(autoscaler: Autoscaler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with the chart as the page has it, an autoscaler, and a deployment of a model, whose manifest names no number."""
    folder = tmp_path_factory.mktemp("autoscaling")
    with skipping_what_cannot_run():
        archives = [*images.build().values(), *autoscaler.images(folder)]
        with one_node(folder, archives, **autoscaler.options) as running, prometheus(running, folder):
            medha.bring_torch(running)
            medha.bring_checkpoint(running, folder)
            autoscaler.install(running)
            values = yaml.safe_load(blocks(PAGE, autoscaler.heading, "yaml")[-1])
            values["scaling"] |= autoscaler.values | {"downSeconds": DOWN_SECONDS}
            for one in values["scaling"]["deployments"]:
                one["maxReplicas"] = 3
                running.kubectl("create", "namespace", one["namespace"], check=False)
            file = folder / "values.yaml"
            file.write_text(yaml.safe_dump(values))
            medha.install(running, medha.CHART, "-f", str(file))
            medha.apply(running, deployment())
            yield running


def deployment() -> medha.Document:
    replica = medha.tiny(parallelism={}, kvCache={"size": POOL})
    replica["spec"]["model"] |= {"name": MODEL, "maxModelLen": 1024}
    return {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaDeployment",
        "metadata": {"name": MODEL},
        "spec": {"template": {"spec": replica["spec"]}},
    }


def wanted(cluster: Cluster) -> int:
    """The number that the autoscaler has set."""
    return int(medha.get(cluster, "medhadeployment", MODEL)["spec"]["replicas"])


def ready(cluster: Cluster) -> int:
    replicas = medha.get(cluster, "medhareplicas")["items"]
    conditions = [one.get("status", {}).get("conditions") or () for one in replicas]
    return sum(
        any((entry["type"], entry["status"]) == ("Ready", "True") for entry in one) for one in conditions
    )


def knowing(cluster: Cluster) -> int:
    """The number of routers that have read the model's name."""
    routers = ("-n", SYSTEM, "-l", "app.kubernetes.io/component=router")
    said = [
        cluster.kubectl("-n", SYSTEM, "logs", name)
        for name in cluster.kubectl("get", "pods", *routers, "-o", "name").split()
    ]
    return sum(
        any("models of manifests" in line and line.endswith(f": {MODEL}") for line in one.splitlines())
        for one in said
    )


class Clients:
    """Clients that ask one request after the other, and the ends of all requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.texts: dict[int, set[str]] = {}
        self.wrong: list[str] = []
        self.ended = threading.Event()
        """Set it, and no further request is sent."""

    def ask(self, number: int) -> None:
        """Send the request of a number, and note its end."""
        body = {"model": MODEL, "prompt": f"{number}: tell me", "max_tokens": TOKENS, "ignore_eos": True}
        try:
            answer = httpx.post(
                f"{self._url}/v1/completions", json=body | {"temperature": 0}, timeout=SECONDS
            )
            found = answer.raise_for_status().json()
        except httpx.HTTPError as error:
            self.wrong.append(f"{number}: {error!r}")
            return
        (choice,) = found["choices"]
        if (found["usage"]["completion_tokens"], choice["finish_reason"]) != (TOKENS, "length"):
            self.wrong.append(f"{number}: {found['usage']}, {choice['finish_reason']}")
        self.texts.setdefault(number, set()).add(choice["text"])

    def ask_on(self, number: int) -> None:
        while not self.ended.is_set():
            self.ask(number)


def test_without_requests_the_replica_of_a_new_deployment_is_removed(cluster: Cluster) -> None:
    eventually(lambda: wanted(cluster), lambda number: number == 0, SECONDS)
    eventually(lambda: medha.get(cluster, "medhareplicas")["items"], lambda left: not left, SECONDS)
    # Nobody removes the replica of a new deployment so early but this test: kubelets bring its name to the routers later.
    eventually(lambda: knowing(cluster), lambda number: number == 2, SECONDS)


def test_the_commands_of_the_page_print_what_it_says(cluster: Cluster, autoscaler: Autoscaler) -> None:
    ((*metric, active),) = shown(PAGE, autoscaler.heading)

    def said(command: str) -> str:
        program, *arguments = shlex.split(command)
        assert program == "kubectl"
        return cluster.kubectl(*arguments, check=False)

    for command in metric:
        (item,) = json.loads(said(command))["items"]
        assert item["value"] == "0"
    eventually(lambda: said(active), lambda text: text == "True", SECONDS)


def test_from_zero_to_three_and_back_every_request_is_answered_as_if_nothing_happened(
    cluster: Cluster,
) -> None:
    address = cluster.kubectl(
        "-n", SYSTEM, "get", "service", "medha-router", "-o", "jsonpath={.spec.clusterIP}"
    )
    with cluster.forward(address, 8000) as port, ThreadPoolExecutor(CLIENTS + 1) as pool:
        url = f"http://127.0.0.1:{port}"
        clients, last = Clients(url), Clients(url)
        try:
            first = pool.submit(clients.ask, 0)
            eventually(lambda: wanted(cluster), lambda number: number > 0 or first.done(), SECONDS)
            first.result(SECONDS)
            assert clients.wrong == []
            assert len(clients.texts[0]) == 1, "it waited for the first replica"

            many = [pool.submit(clients.ask_on, number) for number in range(CLIENTS)]
            served = eventually(
                lambda: (wanted(cluster), ready(cluster)),
                lambda seen: seen == (3, 3) or clients.wrong,
                SECONDS,
            )
            assert served == (3, 3), clients.wrong
            few = pool.submit(last.ask_on, 0)
            clients.ended.set()
            for one in many:
                one.result(SECONDS)
            eventually(
                lambda: (wanted(cluster), ready(cluster)), lambda seen: seen == (1, 1) or last.wrong, SECONDS
            )
            last.ended.set()
            few.result(SECONDS)
        finally:
            clients.ended.set()
            last.ended.set()
    eventually(lambda: wanted(cluster), lambda number: number == 0, SECONDS)
    eventually(lambda: medha.get(cluster, "pods")["items"], lambda left: not left, SECONDS)
    assert clients.wrong + last.wrong == []
    assert sorted(clients.texts) == list(range(CLIENTS))
    texts = {number: found | last.texts.get(number, set()) for number, found in clients.texts.items()}
    assert {number: len(found) for number, found in texts.items()} == dict.fromkeys(range(CLIENTS), 1)
