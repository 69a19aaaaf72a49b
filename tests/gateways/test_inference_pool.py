"""Routers as the endpoints of an InferencePool: a published picker chooses among them, behind a real Envoy.

The API server and its definitions are real, and the pool is the chart's. Pods are objects without a kubelet: their addresses
are those of routers on this machine's loopback, on the ports of the chart.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest

from chart.conftest import helm as helm
from chart.helm import NAMESPACE, Helm, Manifest, find, pods
from chart.others import definitions
from cluster.binaries import build
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import wait_until_established
from gateways.conftest import SAID
from gateways.envoy import Envoy, block, documents, running_envoy
from medha_process.host_resources import free_port
from medha_router.tokenizer_bundle import Bundle
from router.conftest import MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # building a picker takes minutes

POOL, PICKER = "medha-router", "medha-picker"
ADDRESSES = ("127.77.0.2", "127.77.0.3")
CONFIGURATIONS = ("page", "defaults")
"""The picker's configuration: the page's file, or none."""


@dataclass
class Pool:
    configuration: str
    envoy: Envoy
    routers: dict[str, Router]
    replicas: dict[str, ScriptedReplica]
    plane: ControlPlane

    def client(self) -> openai.OpenAI:
        url = f"http://localhost:{self.envoy.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30)

    def set_ready(self, address: str, ready: bool) -> None:
        """Be the kubelet: report a pod's address and whether it is ready."""
        conditions = [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
        patch = (
            "patch",
            "pod",
            name_of(address),
            "-n",
            NAMESPACE,
            "--subresource=status",
            "--type=merge",
            "-p",
        )
        self.plane.kubectl(*patch, json.dumps({"status": status}))

    def counts(self) -> dict[str, int]:
        return {address: len(replica.submits) for address, replica in self.replicas.items()}

    def forget(self) -> None:
        for replica in self.replicas.values():
            replica.submits.clear()


def name_of(address: str) -> str:
    return f"router-{address.rpartition('.')[2]}"


def pod_of(manifests: list[Manifest], address: str) -> Manifest:
    """Return a pod as the router's Deployment makes it."""
    template = pods(manifests)[POOL]
    spec = template["spec"] | {"serviceAccountName": "default", "nodeName": "node"}
    metadata = {"name": name_of(address), "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, helm: Helm) -> Iterator[ControlPlane]:
    """An API server with the pool that the chart renders, and a pod for each router."""
    folder = tmp_path_factory.mktemp("pool-plane")
    manifests = helm.render(**block("inference-pool"))
    objects = [find(manifests, "InferencePool", POOL), *(pod_of(manifests, address) for address in ADDRESSES)]
    with control_plane(folder, controllers=False, scheduler=False) as running:
        for file in definitions():
            running.kubectl("apply", "--server-side", "-f", str(file))
        wait_until_established(running)
        running.kubectl("create", "namespace", NAMESPACE)
        running.kubectl("create", "serviceaccount", "default", "-n", NAMESPACE)
        objects += documents("picker-deployment.yaml")
        running.kubectl(
            "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )
        yield running


@pytest.fixture(scope="module")
def routers(
    tmp_path_factory: pytest.TempPathFactory, bundle_files: dict[str, bytes], bundle: Bundle
) -> Iterator[tuple[dict[str, Router], dict[str, ScriptedReplica]]]:
    routers, replicas = {}, {}
    script = Script(tokens=say(bundle, SAID))
    with ExitStack() as stack:
        for address in ADDRESSES:
            places = {"host": address, "port": 8000, "metrics_host": address, "metrics_port": 9403}
            routers[address] = router = start_router(tmp_path_factory.mktemp(address), **places)
            stack.callback(stop_router, router)
            replicas[address] = ScriptedReplica(router, bundle_files, name=f"r-{address}", script=script)
            stack.callback(replicas[address].stop)
            router.wait_ready()
        yield routers, replicas


@contextmanager
def running_picker(configuration: str, folder: Path, plane: ControlPlane) -> Iterator[int]:
    """Be the kubelet of the picker's pod: run its command under its account; yield its port."""
    ports = {name: free_port("127.0.0.1") for name in ("grpc", "grpc-health", "metrics")}
    (container,) = pods(documents("picker-deployment.yaml"))[PICKER]["spec"]["containers"]
    *given, last = container["args"]
    assert last == "--config-file=/etc/picker/picker.yaml"
    if configuration == "page":
        (folder / "picker.json").write_text(json.dumps(block("picker.yaml")), encoding="utf-8")
        given.append(f"--config-file={folder / 'picker.json'}")
    given += [f"--{name}-port={port}" for name, port in ports.items()]
    command = [str(build(["epp"])["epp"]), *given]
    config = json.loads(plane.kubeconfig.read_text(encoding="utf-8"))
    token = plane.kubectl("create", "token", PICKER, "-n", NAMESPACE, "--duration=1h").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    (folder / "kubeconfig").write_text(json.dumps(config), encoding="utf-8")
    log = folder / "picker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            env=os.environ | {"KUBECONFIG": str(folder / "kubeconfig")},
            stdout=output,
            stderr=output,
        )
    try:
        yield ports["grpc"]
    except BaseException:
        print(log.read_text(encoding="utf-8")[-6000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def pool(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    plane: ControlPlane,
    routers: tuple[dict[str, Router], dict[str, ScriptedReplica]],
) -> Iterator[Pool]:
    """Envoy with the page's configuration, and a picker beside it."""
    folder = tmp_path_factory.mktemp("pool")
    config = block("envoy-pool.yaml")
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = 0
    (picked, picker) = config["static_resources"]["clusters"]
    assert (picked["name"], picker["name"]) == ("picked", "picker")
    (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
    with running_picker(request.param, folder, plane) as port:
        endpoint["endpoint"]["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        with running_envoy(folder / "envoy", config) as envoy:
            pool = Pool(request.param, envoy, *routers, plane)
            for address in ADDRESSES:
                pool.set_ready(address, True)
            envoy.wait(lambda: answers(pool) == SAID, "the picker picks nothing")
            yield pool


def answers(pool: Pool) -> str | None:
    with pool.client() as client:
        try:
            return client.completions.create(model=MODEL, prompt="x").choices[0].text
        except openai.APIError:
            return None


def test_requests_reach_all_routers_and_streams_pass(pool: Pool) -> None:
    pool.forget()
    with pool.client() as client:
        for number in range(40):
            stream = client.completions.create(model=MODEL, prompt=f"{number}: x", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == SAID
    assert all(pool.counts().values()), pool.counts()
    assert sum(pool.counts().values()) == 40


def test_a_router_that_is_not_ready_gets_nothing(pool: Pool) -> None:
    gone, other = ADDRESSES
    pool.set_ready(gone, False)
    try:
        wait_for(lambda: went_to(pool) == {other}, "it still gets requests")
        pool.forget()
        with pool.client() as client:
            for number in range(10):
                assert client.completions.create(model=MODEL, prompt=f"{number}: y").choices[0].text == SAID
        assert pool.counts() == {gone: 0, other: 10}
    finally:
        pool.set_ready(gone, True)
        wait_for(lambda: went_to(pool, 8) == set(ADDRESSES), "it never gets any again")


def went_to(pool: Pool, requests: int = 4) -> set[str]:
    pool.forget()
    with pool.client() as client:
        for number in range(requests):
            client.completions.create(model=MODEL, prompt=f"{number}: " + os.urandom(100).hex())
    return {address for address, count in pool.counts().items() if count}


def test_a_router_that_is_busy_gets_fewer(pool: Pool) -> None:
    if pool.configuration == "defaults":
        pytest.skip(
            "the picker's defaults read nothing that differs between routers, while none of them has a queue"
        )
    busy, idle = ADDRESSES
    script = pool.replicas[busy].script
    pool.replicas[busy].script = replace(script, hold=True)
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=pool.routers[busy].url, timeout=30))
        for _ in range(5):
            body = {"model": MODEL, "prompt": "x", "stream": True}
            answer = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            assert answer.status_code == 200
        pool.replicas[busy].script = script
        wait_for(lambda: went_to(pool, 10) == {idle}, "it gets as many as the idle one")
    wait_for(lambda: went_to(pool, 10) == set(ADDRESSES), "it gets none when it is idle again")


def test_a_conversation_stays_with_one_router(pool: Pool) -> None:
    text = os.urandom(400).hex()  # of many blocks, as the picker hashes prompts
    chosen = set()
    with pool.client() as client:
        for _ in range(8):
            pool.forget()
            client.completions.create(model=MODEL, prompt=text)
            text += " and then"
            chosen |= {address for address, count in pool.counts().items() if count}
    assert len(chosen) == 1


def test_a_body_of_27_mb_passes_the_picker(pool: Pool) -> None:
    body = {"metadata": {"text": "a" * 27 * 2**20}}
    with pool.client() as client:
        patient = client.with_options(timeout=300)  # the picker parses it, too
        answer = patient.completions.create(model=MODEL, prompt="x", extra_body=body)
    assert answer.choices[0].text == SAID
