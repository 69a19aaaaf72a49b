"""Medha on a real node, as users meet it: the chart, the images, a replica's life, and what is left of it: nothing.

The tests share one cluster and go on where the one before has ended, top to bottom.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster import images, medha, tiers, volumes
from cluster.api import condition, eventually
from cluster.conftest import skipping_what_cannot_run
from cluster.images import VERSION
from cluster.medha import SYSTEM, Document
from cluster.nodes import ADDRESS, Cluster, one_node
from cluster.tiny_image import write_changed
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, object_store

pytestmark = pytest.mark.timeout(400)  # whoever comes first builds images and starts everything

READY_SECONDS = 120.0


@pytest.fixture(scope="module")
def archives() -> dict[str, Path]:
    with skipping_what_cannot_run():
        return images.build()


@pytest.fixture(scope="module")
def cluster(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with the images, torch and a checkpoint; and the chart is installed for replicas in `default`."""
    folder = tmp_path_factory.mktemp("one-node")
    with skipping_what_cannot_run(), one_node(folder, list(archives.values())) as running:
        medha.bring_torch(running)
        medha.bring_checkpoint(running, folder)
        medha.install(running)
        yield running


@pytest.fixture(scope="module")
def at_first(cluster: Cluster) -> set[str]:
    """Names of all objects of the namespace before anything of ours is in it."""
    return everything(cluster)


def everything(cluster: Cluster) -> set[str]:
    """Every object of the namespace but events, and Endpoints, which EndpointSlices say again."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    kinds = [kind for kind in kinds if not kind.startswith(("events", "endpoints"))] + ["endpointslices"]
    return set(cluster.kubectl("get", ",".join(kinds), "-o", "name", "--ignore-not-found").split())


def replica(cluster: Cluster, name: str = "tiny") -> Document:
    return medha.get(cluster, "medhareplica", name)


def wait_ready(cluster: Cluster) -> None:
    cluster.kubectl("wait", "medhareplica/tiny", "--for=condition=Ready", f"--timeout={READY_SECONDS:.0f}s")


def address(cluster: Cluster, service: str) -> str:
    return cluster.kubectl("-n", SYSTEM, "get", "service", service, "-o", "jsonpath={.spec.clusterIP}")


def metric(cluster: Cluster, pod_address: str, name: str) -> float:
    """Return the value of a pod's metric that has no labels."""
    with (
        cluster.forward(pod_address, 9400) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def epoch(cluster: Cluster) -> float:
    """Return how often the ranks have met anew, as the replica's first pod says."""
    return metric(cluster, medha.get(cluster, "pod", "tiny-l0-0")["status"]["podIP"], "medha_epoch")


def completion(cluster: Cluster) -> httpx.Response:
    """What the router says to a request for a few tokens."""
    with cluster.forward(address(cluster, "medha-router"), 8000) as port:
        return httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "tiny", "prompt": "again", "max_tokens": 4},
            timeout=60,
        )


@pytest.fixture
def serving(cluster: Cluster) -> None:
    """The example serves, also where a test runs alone."""
    if "medhareplica.medha.dev/tiny" not in cluster.kubectl("get", "medhareplicas", "-o", "name").split():
        medha.apply(cluster, medha.tiny())
    wait_ready(cluster)
    eventually(lambda: completion(cluster).status_code, lambda code: code == 200, READY_SECONDS)


def operator_log(cluster: Cluster) -> list[str]:
    return cluster.kubectl(
        "-n", SYSTEM, "logs", "-l", "app.kubernetes.io/component=operator", "--tail=-1"
    ).splitlines()


def complaints(log: list[str]) -> list[str]:
    """Lines of an operator's log that are not mere information.

    For a second after a definition was made or changed, the API server answers 429, and kopf asks again. That a replica
    has to stay on a cordoned node is a warning, and true of these tests.
    """
    allowed = ("[INFO", "[DEBUG", "storage is (re)initializing", "default/tiny: NodeCordoned")
    return [line for line in log if not any(word in line for word in allowed)]


# --- a replica's life ---------------------------------------------------------------------------------------


def test_the_example_becomes_ready_and_answers_openais_client_through_the_routers_service(
    cluster: Cluster, at_first: set[str]
) -> None:
    medha.apply(cluster, medha.tiny())
    wait_ready(cluster)
    found = replica(cluster)
    assert found["status"]["shape"] == "TP1 x SPP2 x KVP2"
    assert found["status"]["readyPods"] == 4
    pods = medha.get(cluster, "pods", "-l", "medha.dev/replica=tiny")["items"]
    roles = {pod["metadata"]["name"]: pod["metadata"]["labels"]["medha.dev/role"] for pod in pods}
    assert roles == {"tiny-l0-0": "lead", "tiny-l0-1": "lead", "tiny-l1-0": "kv", "tiny-l1-1": "kv"}
    with cluster.forward(address(cluster, "medha-router"), 8000) as port:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        # A replica is ready when its pods are; its word of itself reaches the router by a way of its own.
        eventually(
            lambda: [model.id for model in client.models.list()],
            lambda names: names == ["tiny"],
            READY_SECONDS,
        )
        answer = client.completions.create(model="tiny", prompt="word " * 1200, max_tokens=8, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 1024  # more than one lane takes
        assert answer.usage.completion_tokens == 8
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
        )
        assert [chunk for chunk in stream if chunk.choices][-1].choices[0].finish_reason == "length"


def test_the_charts_own_test_passes(cluster: Cluster) -> None:
    said = cluster.helm("test", "medha", "-n", SYSTEM, "--timeout", "2m")
    assert "Phase:          Succeeded" in said


def test_nobody_but_its_user_the_operator_and_kubernetes_has_written_to_any_object(
    cluster: Cluster, at_first: set[str]
) -> None:
    for name in everything(cluster) - at_first:
        found = json.loads(cluster.kubectl("get", name, "-o", "json", "--show-managed-fields"))
        metadata = found["metadata"]
        managers = {entry["manager"] for entry in metadata["managedFields"]}
        if found["kind"] == "MedhaReplica":
            assert managers == {"kubectl-client-side-apply", "medha-operator"}
        assert managers <= {
            *("kubectl-client-side-apply", "medha-operator"),
            *("kube-controller-manager", "kubelet", "kube-scheduler"),
        }
        assert "kopf" not in json.dumps(metadata.get("annotations", {}))
        assert not metadata.get("finalizers")


def test_a_rank_that_is_killed_is_started_once_again_in_its_pod(cluster: Cluster) -> None:
    uids, ranks, before = medha.pod_uids(cluster), medha.rank_processes(cluster), epoch(cluster)
    assert sorted(ranks) == sorted(uids)
    ranks["tiny-l1-0"].kill()
    # Only what lasts is waited for: the rank may be back before a probe has found its pod unready.
    eventually(lambda: epoch(cluster), lambda seen: seen > before, READY_SECONDS)
    eventually(lambda: completion(cluster), lambda answer: answer.status_code == 200, READY_SECONDS)
    wait_ready(cluster)
    after = medha.rank_processes(cluster)
    assert sorted(after) == sorted(ranks)
    assert {name for name in ranks if after[name].pid != ranks[name].pid} == {"tiny-l1-0"}
    assert epoch(cluster) == before + 1
    assert medha.pod_uids(cluster) == uids
    pods = medha.get(cluster, "pods")["items"]
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods] == [0] * 4
    assert replica(cluster)["status"]["restarts"] == 0


# --- the operator's -----------------------------------------------------------------------------------------


def edited(path: Path, before: str, after: str) -> str:
    """The text of a file with one change."""
    source = path.read_text(encoding="utf-8")
    assert source.count(before) == 1
    return source.replace(before, after)


@pytest.mark.long
@pytest.mark.usefixtures("serving")
def test_a_rollout_of_the_routers_under_open_streams_refuses_no_request_and_cuts_none(
    cluster: Cluster,
) -> None:
    """Streams that last for a good part of the drain run throughout, and short requests over kept connections."""

    def uids() -> set[str]:
        pods = medha.get(cluster, "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=router")["items"]
        return {pod["metadata"]["uid"] for pod in pods}

    before, ended = uids(), threading.Event()
    assert len(before) == 2
    texts: dict[int, set[str]] = {}
    sent, errors = Counter[int](), list[str]()

    def ask(url: str, tokens: int) -> None:
        body = {"model": "tiny", "prompt": f"{tokens} tokens", "max_tokens": tokens, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=120) as client:
            while not ended.is_set():
                sent[tokens] += 1
                text = ""
                try:
                    with client.stream(
                        "POST", "/v1/completions", json=body | {"stream": True, "temperature": 0}
                    ) as answer:
                        lines = list(answer.raise_for_status().iter_lines())
                    text = "".join(
                        json.loads(line[6:])["choices"][0]["text"]
                        for line in lines
                        if line.startswith("data: {")
                    )
                    if "data: [DONE]" not in lines:
                        errors.append(f"{tokens}: the stream was cut")
                except (httpx.HTTPError, LookupError) as error:
                    errors.append(f"{tokens}: {error!r}")
                texts.setdefault(tokens, set()).add(text)

    with cluster.forward(address(cluster, "medha-router"), 8000) as port:
        threads = [
            threading.Thread(target=ask, args=(f"http://127.0.0.1:{port}", tokens))
            for tokens in (4, 5, 400, 500)
        ]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: len(texts), lambda found: found == len(threads), READY_SECONDS)
            cluster.kubectl("-n", SYSTEM, "rollout", "restart", "deployment/medha-router")
            cluster.kubectl("-n", SYSTEM, "rollout", "status", "deployment/medha-router", "--timeout=180s")
            eventually(uids, lambda now: len(now) == 2 and not now & before, READY_SECONDS)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert errors == []
    assert all(sent[tokens] > 1 for tokens in texts)
    assert {tokens: len(found) for tokens, found in texts.items()} == dict.fromkeys(texts, 1)


@pytest.mark.long
@pytest.mark.usefixtures("serving")
def test_a_chart_that_is_uninstalled_and_installed_again_finds_the_replica_and_its_router_serves_it(
    cluster: Cluster,
) -> None:
    uids = medha.pod_uids(cluster)
    cluster.helm("uninstall", "medha", "--namespace", SYSTEM, "--wait")
    assert replica(cluster)["status"]["readyPods"] == 4
    medha.install(cluster)
    eventually(lambda: completion(cluster).status_code, lambda code: code == 200, READY_SECONDS)
    wait_ready(cluster)
    assert medha.pod_uids(cluster) == uids


def test_an_upgrade_of_definitions_and_operator_leaves_pods_alone_though_it_renders_them_otherwise(
    cluster: Cluster, archives: dict[str, Path], tmp_path: Path
) -> None:
    """The next release renders other probes, and has one more field with a default, which older pods do not know."""
    uids, log = medha.pod_uids(cluster), operator_log(cluster)
    render = edited(
        medha.ROOT / "operator" / "medha_operator" / "replica" / "manifests.py",
        "_PROBE_SECONDS = 5\n",
        "_PROBE_SECONDS = 7\n",
    )
    field = "    threads: int | None ="
    added = "    lookahead: int = Field(default=2, json_schema_extra=live())\n"
    api = edited(medha.ROOT / "core" / "medha" / "api" / "replica.py", field, added + field)
    package = "opt/medha/lib/python3.11/site-packages"
    changed = {
        f"{package}/medha_operator/replica/manifests.py": render.encode(),
        f"{package}/medha_operator/replica/__pycache__/manifests.cpython-311.pyc": b"",  # as good as none
        f"{package}/medha/api/replica.py": api.encode(),
        f"{package}/medha/api/__pycache__/replica.cpython-311.pyc": b"",
    }
    name = f"docker.io/library/medha-operator:{VERSION}-next"
    cluster.nodes[0].import_image(write_changed(tmp_path / "next.tar", archives["operator"], name, changed))
    chart = Path(shutil.copytree(medha.CHART, tmp_path / "medha"))
    definitions = chart / "templates" / "crds"
    column = "    - name: Revision\n      type: string\n      jsonPath: .status.revision\n"
    marker = "    additionalPrinterColumns:\n"
    for definition, depth in (("medhareplicas.yaml", 14), ("medhadeployments.yaml", 22)):
        path, indent = definitions / definition, " " * depth
        property_ = f"{indent}threads:\n"
        added = f"{indent}lookahead:\n{indent}  type: integer\n{indent}  default: 2\n"
        path.write_text(edited(path, property_, added + property_))
    replicas = definitions / "medhareplicas.yaml"
    replicas.write_text(edited(replicas, marker, marker + column))

    medha.install(cluster, chart, "--set", f"operator.image.tag={VERSION}-next")
    assert "REVISION" in cluster.kubectl("get", "medhareplicas").splitlines()[0]
    medha.apply(cluster, medha.tiny("later", suspend=True))
    fresh = eventually(
        lambda: cluster.kubectl("get", "statefulset", "later-l0", "-o", "json", check=False),
        lambda seen: seen.startswith("{"),
        60,
    )
    assert '"periodSeconds": 7' in fresh  # so the new operator has looked at everything
    kept = cluster.kubectl("get", "statefulset", "tiny-l0", "-o", "json")
    assert '"periodSeconds": 5' in kept
    assert medha.pod_uids(cluster) == uids
    wait_ready(cluster)
    cluster.kubectl("delete", "medhareplica", "later")
    assert complaints(log + operator_log(cluster)) == []


def test_a_container_that_is_started_again_reads_what_the_newer_operator_has_rendered(
    cluster: Cluster,
) -> None:
    uids = medha.pod_uids(cluster)
    eventually(
        lambda: cluster.kubectl("get", "configmaps", "-l", "medha.dev/replica=tiny", "-o", "yaml"),
        lambda text: '"lookahead": 2' in text,
        60,
    )
    cluster.kubectl("annotate", "pod", "tiny-l1-0", "medha.test/looked-at=1")  # has the kubelet sync it now
    notice = "this release does not know these fields and ignores them: spec.lookahead"
    eventually(lambda: cluster.kubectl("logs", "tiny-l1-0"), lambda text: notice in text, READY_SECONDS)
    supervisor = medha.rank_processes(cluster)["tiny-l1-0"].parent()
    assert supervisor is not None
    supervisor.kill()
    eventually(
        lambda: medha.get(cluster, "pod", "tiny-l1-0")["status"]["containerStatuses"][0],
        lambda seen: seen["restartCount"] == 1 and seen["ready"],
        READY_SECONDS,
    )
    wait_ready(cluster)
    assert medha.pod_uids(cluster) == uids
    assert notice in cluster.kubectl("logs", "tiny-l1-0")  # of the container that was started last
    assert replica(cluster)["status"]["restarts"] == 0


@pytest.mark.long
@pytest.mark.usefixtures("serving")
def test_the_only_node_keeps_its_replica_until_that_is_suspended(cluster: Cluster) -> None:
    uids = medha.pod_uids(cluster)
    drain = ("drain", "node-1", "--pod-selector=medha.dev/replica", "--delete-emptydir-data")
    waited = cluster.kubectl(*drain, "--timeout=12s", check=False)  # it asks every 5 s
    assert "violate the pod's disruption budget" in waited
    assert medha.pod_uids(cluster) == uids
    assert condition(replica(cluster))[0] == "True"
    assert condition(replica(cluster), "Draining") == ("True", "NodeCordoned")
    cluster.kubectl("patch", "medhareplica", "tiny", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert "node/node-1 drained" in cluster.kubectl(*drain, "--timeout=90s")
    cluster.kubectl("uncordon", "node-1")
    cluster.kubectl("patch", "medhareplica", "tiny", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    wait_ready(cluster)
    assert not set(medha.pod_uids(cluster).values()) & set(uids.values())
    assert replica(cluster)["status"]["restarts"] == 0


def test_a_replica_that_is_deleted_leaves_nothing(cluster: Cluster, at_first: set[str]) -> None:
    cluster.kubectl("delete", "medhareplica", "tiny", "--timeout=10s")
    eventually(lambda: everything(cluster) - at_first, lambda left: not left, 90)
    assert complaints(operator_log(cluster)) == []


NEIGHBOURS = ("left", "right")
DOCUMENT_TOKENS, QUESTION_TOKENS, QUESTIONS, ROUNDS = 6000, 1000, 5, 12
KV_OF_NEIGHBOURS: dict[str, Any] = {
    "parallelism": {},
    "kvCache": {"size": "96Mi", "tiers": {"host": {"size": "128Mi"}, "peers": {"bandwidth": "1Gi"}}},
    "resources": {"accelerator": "none", "requests": {"cpu": "100m", "memory": "1Gi"}},
}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_replicas_read_kv_of_each_other_through_the_ports_that_the_operator_opens(
    cluster: Cluster, at_first: set[str]
) -> None:
    """Many questions about one document come at once, so that the replica which has not computed it takes some of them."""
    for name in NEIGHBOURS:
        medha.apply(cluster, medha.tiny(name, **KV_OF_NEIGHBOURS))
    cluster.kubectl(
        "wait", "--for=condition=Ready", f"--timeout={READY_SECONDS:.0f}s",
        *(f"medhareplica/{name}" for name in NEIGHBOURS),
    )  # fmt: skip

    def total(what: str) -> float:
        pods = [medha.get(cluster, "pod", f"{name}-l0-0") for name in NEIGHBOURS]
        return sum(metric(cluster, pod["status"]["podIP"], f"medha_peer_kv_{what}_total") for pod in pods)

    with (
        cluster.forward(address(cluster, "medha-router"), 8000) as port,
        ThreadPoolExecutor(QUESTIONS) as clients,
    ):

        def ask(prompt: list[int], salt: str) -> str:
            body: dict[str, Any] = {
                "model": "tiny", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "seed": 1,
                "temperature": 0.9, "cache_salt": salt,
            }  # fmt: skip
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=300)
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        eventually(lambda: completion(cluster).status_code, lambda code: code == 200, READY_SECONDS)
        for number in range(ROUNDS):
            dice = random.Random(number)
            document = [dice.randrange(5, 96) for _ in range(DOCUMENT_TOKENS)]
            questions = [
                document + [dice.randrange(5, 96) for _ in range(QUESTION_TOKENS)] for _ in range(QUESTIONS)
            ]
            ask(document, "shared")
            handed = list(clients.map(ask, questions, ["shared"] * QUESTIONS))
            alone = [ask(one, f"{number} {at}") for at, one in enumerate(questions)]
            assert handed == alone
            if total("loaded_bytes") > 0:
                break
    assert total("loaded_bytes") > 0
    assert total("failures") == 0
    logs = [cluster.kubectl("logs", f"{name}-l0-0") for name in NEIGHBOURS]
    assert any("KV of other replicas comes encrypted by AES-GCM" in log for log in logs)
    assert not any("over CURVE, more slowly" in log for log in logs)
    cluster.kubectl("delete", "medhareplica", *NEIGHBOURS, "--timeout=10s")
    eventually(lambda: everything(cluster) - at_first, lambda left: not left, 90)


def kept_by_the_kubelet(cluster: Cluster, name: str) -> str:
    """Return the folder of the node in which the kubelet keeps the ephemeral volume of a pod's disk tier."""
    (uid,) = medha.pod_uids(cluster, name).values()
    return f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/kv-files"


def end_container(cluster: Cluster, name: str) -> None:
    """Kill the container of a replica's only pod, and wait until it was started again."""
    (container,) = medha.get(cluster, "pod", f"{name}-l0-0")["status"]["containerStatuses"]
    cluster.nodes[0].kill_container(container["containerID"].removeprefix("containerd://"))
    eventually(
        lambda: medha.get(cluster, "pod", f"{name}-l0-0")["status"]["containerStatuses"][0],
        lambda seen: seen["restartCount"] == 1 and seen["ready"],
        READY_SECONDS,
    )


def replace_pod(cluster: Cluster, name: str) -> None:
    """Delete a replica's only pod, and wait for another one."""
    before = medha.pod_uids(cluster, name)
    cluster.kubectl("delete", "pod", *before)
    eventually(
        lambda: medha.pod_uids(cluster, name),
        lambda now: bool(now) and not set(now.values()) & set(before.values()),
        READY_SECONDS,
    )


def wait_answering(cluster: Cluster, port: int, *names: str) -> None:
    """Wait until replicas are Ready, and their router knows them."""
    replicas = (f"medhareplica/{name}" for name in names)
    cluster.kubectl("wait", "--for=condition=Ready", f"--timeout={READY_SECONDS:.0f}s", *replicas)
    for name in names:
        body = {"model": name, "prompt": "hello", "max_tokens": 1}
        eventually(
            lambda body=body: httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).status_code,
            lambda code: code == 200,
            READY_SECONDS,
        )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("volume", ["ephemeral", "directory", "claim"])
def test_a_disk_tier_finds_its_files_after_its_container_or_pod_was_replaced(
    cluster: Cluster, at_first: set[str], volume: str
) -> None:
    """A container that ends leaves an ephemeral volume, and a pod that ends leaves any other."""
    name, field = f"on-{volume}", dict[str, str]()
    if volume == "directory":
        tiers.make_directory(cluster, tiers.KEPT)
        tiers.allow_directory(cluster)
        field = {"hostPath": tiers.KEPT}
    if volume == "claim":
        # Its folder belongs to root, and the kubelet gives it to the pods' group.
        volumes.claim(cluster, "kv", volumes.offer_volume(cluster))
        field = {"claimName": "kv"}
    medha.apply(cluster, tiers.tiered(name, disk={"size": "64Mi"} | field))

    def disk() -> dict[str, Any]:
        lanes = tiers.status(cluster, name).get("lanes", [{}])
        found: dict[str, Any] = lanes[0].get("disk_tier", {})
        return found

    with cluster.forward(address(cluster, "medha-router"), 8000) as port:
        wait_answering(cluster, port, name)
        computed = [tiers.ask(port, name, number) for number in tiers.DOCUMENTS]
        written = eventually(disk, lambda seen: seen["written"] and not seen["writing"] + seen["waiting"], 60)
        assert (written["fault"], written["failures"]) == ("", 0)
        folder = {
            "ephemeral": kept_by_the_kubelet(cluster, name),
            "directory": tiers.KEPT,
            "claim": volumes.FOLDER,
        }[volume]
        kept = tiers.files(cluster, f"{folder}/default.{name}/rank-0")
        assert {tuple(line.split()[:2]) for line in kept} == {("65532:65532", "600")}
        (end_container if volume == "ephemeral" else replace_pod)(cluster, name)
        wait_answering(cluster, port, name)
        found = [tiers.ask(port, name, number) for number in tiers.DOCUMENTS]
    assert [text for text, _ in found] == [text for text, _ in computed]
    assert [cached for _, cached in computed] == [0] * len(computed)
    assert max(cached for _, cached in found) > tiers.DOCUMENT_TOKENS / 2
    seen = disk()
    assert seen["hits"] > 0
    assert seen["loaded"] > 0
    assert (seen["fault"], seen["failures"]) == ("", 0)
    cluster.kubectl("delete", "medhareplica", name, "--timeout=10s")
    eventually(lambda: everything(cluster) - at_first, lambda left: left <= {"persistentvolumeclaim/kv"}, 90)
    left = tiers.files(cluster, f"{folder}/default.{name}")
    assert (left == []) == (volume == "ephemeral"), (
        "only files of an ephemeral volume are deleted with the pod"
    )
    cluster.kubectl("delete", "pvc,pv", "--all")


@pytest.mark.long
@pytest.mark.parametrize("place", ["claim", "S3"])
def test_a_second_replica_reads_from_the_store_what_the_first_has_computed(
    cluster: Cluster, at_first: set[str], tmp_path: Path, place: str
) -> None:
    """The first one has no pod by then, so nobody else can have the KV."""
    names = [f"{one}-{place.lower()}" for one in ("first", "second")]
    with ExitStack() as stack:
        if place == "claim":
            folder = "/var/lib/medha/store"
            tiers.make_directory(
                cluster, folder
            )  # the kubelet leaves volumes of the kind hostPath as they are
            volumes.claim(cluster, "shared", volumes.offer_volume(cluster, folder, "hostPath"))
            store = {"url": "file:///mnt/kv", "claimName": "shared"}
        else:
            keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
            literals = (f"--from-literal={name}={value}" for name, value in keys.items())
            cluster.kubectl("create", "secret", "generic", "kv-store", *literals)
            inside = cluster.sandbox.inside("net")
            service = stack.enter_context(object_store(tmp_path / "s3", tmp_path / "s3.log", ADDRESS, inside))
            store = {"url": f"s3://{BUCKET}/kv", "endpoint": service.endpoint, "secretName": "kv-store"}
        for name in names:
            medha.apply(cluster, tiers.tiered(name, store={"bandwidth": "4Gi"} | store))

        def stored(name: str) -> dict[str, Any]:
            found: dict[str, Any] = tiers.status(cluster, name).get("store", {})
            return found

        port = stack.enter_context(cluster.forward(address(cluster, "medha-router"), 8000))
        wait_answering(cluster, port, *names)
        first, second = names
        computed = [tiers.ask(port, first, number) for number in tiers.DOCUMENTS]
        seen = eventually(
            lambda: stored(first), lambda seen: seen["written"] and not seen["busy"] + seen["waiting"], 60
        )
        assert (seen["fault"], seen["failures"]) == ("", 0)
        cluster.kubectl("delete", "medhareplica", first, "--timeout=10s")
        eventually(lambda: medha.pod_uids(cluster, first), lambda pods: not pods, READY_SECONDS)
        found = [tiers.ask(port, second, number) for number in tiers.DOCUMENTS]
        assert [text for text, _ in found] == [text for text, _ in computed]
        assert max(cached for _, cached in found) > tiers.DOCUMENT_TOKENS / 2
        seen = stored(second)
        assert seen["hits"] > 0
        assert seen["loaded"] > 0
        assert (seen["fault"], seen["failures"]) == ("", 0)
        cluster.kubectl("delete", "medhareplica", second, "--timeout=10s")
        cluster.kubectl("delete", "secret", "kv-store", "--ignore-not-found")
        kept = {"persistentvolumeclaim/shared"}
        eventually(lambda: everything(cluster) - at_first, lambda left: left <= kept, 90)
        if place == "claim":
            owners = {line.split()[0] for line in tiers.files(cluster, folder)}
            assert owners == {"65532:65532"}, "nothing deletes what replicas have stored"
            cluster.kubectl("delete", "pvc,pv", "--all")
        else:
            assert service.objects, "nothing deletes what replicas have stored"


TROUBLES: dict[str, tuple[str, dict[str, Any]]] = {
    "no-image": ("ImagePullFailed", {"image": "docker.io/library/medha-worker:none"}),
    "no-room": ("InsufficientCapacity", {"resources": {"accelerator": "none", "requests": {"cpu": "1000"}}}),
    "no-volume": ("VolumeUnavailable", {"source": {"pvc": {"claimName": "missing"}}}),
    "no-folder": ("VolumeUnavailable", {"source": {"hostPath": {"path": f"{medha.MODELS}/missing"}}}),
    "no-weights": ("CrashLooping", {"source": {"hostPath": {"path": medha.TORCH}}}),
    "no-right": ("CrashLooping", {"source": {"hostPath": {"path": f"{medha.MODELS}/private"}}}),
    "no-disk": (
        "CrashLooping",
        {"kvCache": {"tiers": {"host": {"size": "16Mi"}, "disk": {"size": "16Mi", "hostPath": tiers.KEPT}}}},
    ),
    "no-gpu": (
        "NoAccelerator",
        {
            "image": images.name("worker"),
            "resources": {"accelerator": "nvidia.com/gpu", "requests": {"cpu": "10m"}},
        },
    ),
    "no-hub": ("ModelFetchFailed", {"source": {"huggingFace": {"repository": "nobody/nothing"}}}),
}
"""Name of a replica, the reason that it is not ready, and what is wrong with it."""


@pytest.mark.long
def test_what_keeps_pods_from_starting_is_told_apart(cluster: Cluster, at_first: set[str]) -> None:
    """In the words of a real scheduler, a real kubelet and a real worker."""
    private = f"{medha.MODELS}/private"
    cluster.run(["sh", "-ec", f"cp -r {medha.MODELS}/tiny {private} && chmod 700 {private}"])
    cluster.run(["install", "-d", "-m", "755", "-o", "0", "-g", "0", tiers.KEPT])
    tiers.allow_directory(cluster)
    capacity = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "1"}]
    # As a device plugin does; but the container gets no device.
    cluster.kubectl(
        *("patch", "node", "node-1", "--subresource=status", "--type=json", "-p", json.dumps(capacity))
    )
    small = {
        "parallelism": {},
        "resources": {"accelerator": "none", "requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    for name, (_, wrong) in TROUBLES.items():
        document = medha.tiny(name, **small)
        spec = document["spec"]
        spec["model"] |= {"name": name} | ({"source": wrong["source"]} if "source" in wrong else {})
        spec |= {key: value for key, value in wrong.items() if key != "source"}
        medha.apply(cluster, document)
    messages: dict[str, str] = {}

    def poll() -> dict[str, tuple[str, str]]:
        """Note the message of each replica that gives its reason now.

        A container that ends again and again also runs in between, at a time of its own.
        """
        present = {name: replica(cluster, name) for name in TROUBLES}
        for name, (reason, _) in TROUBLES.items():
            for each in present[name].get("status", {}).get("conditions", ()):
                if (each["type"], each["status"], each["reason"]) == ("Ready", "False", reason):
                    messages.setdefault(name, each["message"])
        return {name: condition(each) for name, each in present.items()}

    eventually(poll, lambda _: messages.keys() == TROUBLES.keys(), READY_SECONDS)
    text = "cannot be read by uid 65532: /model has mode 0700 and belongs to uid 0"
    assert text in messages["no-right"]
    text = f"spec.kvCache.tiers.disk.hostPath is {tiers.KEPT}, and uid 65532 cannot write there: /kv-files has mode 0755"
    assert text in messages["no-disk"]
    assert messages["no-disk"].endswith(f"; on the node, run: chown -R 65532:65532 {tiers.KEPT}")
    text = "rank 0 exited with status 69 because: spec.resources.accelerator is nvidia.com/gpu, but "
    assert text in messages["no-gpu"]
    assert messages["no-gpu"].endswith("or set accelerator none to compute on the CPU"), (
        "the fix is shown whole"
    )
    # Others come back to this reason after each try; this one stays while the kubelet tries again.
    assert condition(replica(cluster, "no-gpu")) == ("False", "NoAccelerator")
    assert condition(replica(cluster, "no-gpu"), "Stalled") == ("True", "NoAccelerator")
    assert "NoAccelerator" in cluster.kubectl("get", "mr", "no-gpu", "--no-headers").split()
    # A container that was just restarted has not come to it yet.
    eventually(lambda: cluster.kubectl("logs", "no-gpu-l0-0"), lambda log: text in log, READY_SECONDS)
    cluster.kubectl("delete", "medhareplicas", "--all", "--timeout=10s")
    eventually(lambda: everything(cluster) - at_first, lambda left: not left, 90)


@pytest.mark.long
def test_a_replica_that_is_deleted_while_no_operator_runs_leaves_nothing(
    cluster: Cluster, at_first: set[str]
) -> None:
    medha.apply(cluster, medha.tiny())
    eventually(lambda: medha.rank_processes(cluster), lambda seen: len(seen) == 4, 60)
    cluster.kubectl("-n", SYSTEM, "scale", "deployment/medha-operator", "--replicas=0")
    operators = ("pod", "-l", "app.kubernetes.io/component=operator")
    cluster.kubectl("-n", SYSTEM, "wait", *operators, "--for=delete", "--timeout=60s")
    assert len(medha.pod_uids(cluster)) == 4
    cluster.kubectl("delete", "medhareplica", "tiny", "--timeout=10s")
    eventually(lambda: everything(cluster) - at_first, lambda left: not left, 90)
    cluster.kubectl("-n", SYSTEM, "scale", "deployment/medha-operator", "--replicas=1")


def test_what_is_uninstalled_leaves_the_definitions_and_what_replicas_know_the_router_by(
    cluster: Cluster,
) -> None:
    cluster.helm("uninstall", "medha", "--namespace", SYSTEM, "--wait")
    kinds = "deployments,pods,services,serviceaccounts,configmaps,secrets,roles,rolebindings,leases"
    kept = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    kept |= {"secret/medha-router-keys", "secret/medha-router-enrolment"}
    eventually(
        lambda: set(cluster.kubectl("-n", SYSTEM, "get", kinds, "-o", "name").split()),
        lambda left: left == kept,
        90,
    )
    assert cluster.kubectl("get", "crd", "-o", "name").split() == [
        "customresourcedefinition.apiextensions.k8s.io/medhadeployments.medha.dev",
        "customresourcedefinition.apiextensions.k8s.io/medhareplicas.medha.dev",
    ]
