"""An upgrade from the version before, on a node with both versions' images: clients notice nothing, and pods stay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import images, medha
from cluster.api import eventually
from cluster.conftest import skipping_what_cannot_run
from cluster.images import TARGETS, VERSION
from cluster.medha import SYSTEM
from cluster.nodes import Cluster, one_node
from cluster.tiny_image import write_changed

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]  # it builds the images of two versions

BEFORE_TAG = "before"
READY_SECONDS = 300
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "seed": 1, "ignore_eos": True}


def images_of(checkout: Path) -> dict[str, Path]:
    """Build the images of another checkout by its own program."""
    done = subprocess.run(
        [sys.executable, "tests/cluster/images.py", "--torch", "none", *TARGETS],
        cwd=checkout,
        env=os.environ | {"CI": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise images.CannotBuild(f"the images of {checkout} cannot be built")
    found = dict(zip(TARGETS, map(Path, done.stdout.split()), strict=True))
    for archive in found.values():
        archive.touch()  # else a build of this version may remove one that was built long ago
    return found


@pytest.fixture(scope="module")
def cluster(before: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with the images of both versions, those before by the tag `before`; nothing is installed."""
    folder = tmp_path_factory.mktemp("upgraded")
    with skipping_what_cannot_run():
        old, new = images_of(before), images.build()
        with one_node(folder, list(old.values())) as running:
            for target, archive in old.items():
                name = f"docker.io/library/medha-{target}:{BEFORE_TAG}"
                running.nodes[0].import_image(write_changed(folder / f"{target}.tar", archive, name, {}))
            for archive in new.values():
                running.nodes[0].import_image(archive)
            medha.bring_torch(running)
            medha.bring_checkpoint(running, folder)
            yield running


def tags(tag: str) -> list[str]:
    """Options of Helm that select the images."""
    return [word for part in TARGETS for word in ("--set", f"{part}.image.tag={tag}")]


def ask(cluster: Cluster) -> str:
    """Ask through the router's Service, over a connection of its own, and return the text."""
    service = cluster.kubectl(
        "-n", SYSTEM, "get", "service", "medha-router", "-o", "jsonpath={.spec.clusterIP}"
    )
    with cluster.forward(service, 8000) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=120)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


@dataclass
class Client:
    """A client that asks one question after the other."""

    cluster: Cluster
    texts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(0.2):
            try:
                self.texts.append(ask(self.cluster))
            except (httpx.HTTPError, AssertionError) as error:
                self.errors.append(repr(error))


@contextmanager
def asking(cluster: Cluster) -> Iterator[Client]:
    client = Client(cluster)
    thread = threading.Thread(target=client.run, daemon=True)
    thread.start()
    try:
        yield client
    finally:
        client.ended.set()
        thread.join()


def wait_ready(cluster: Cluster) -> None:
    cluster.kubectl("wait", "medhareplica/tiny", "--for=condition=Ready", f"--timeout={READY_SECONDS}s")


def image_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"]["containers"][0]["image"])


def test_clients_are_served_through_an_upgrade_and_pods_stay(cluster: Cluster, before: Path) -> None:
    medha.install(cluster, before / "charts" / "medha", *tags(BEFORE_TAG))
    medha.apply(cluster, medha.tiny())
    wait_ready(cluster)
    expected = ask(cluster)
    uids = medha.pod_uids(cluster)

    with asking(cluster) as client:
        eventually(lambda: len(client.texts) >= 3, seconds=120)
        medha.install(cluster, medha.CHART, *tags(""))
        served = len(client.texts)
        eventually(lambda: len(client.texts) >= served + 3, seconds=120)
    assert client.errors == []
    assert set(client.texts) == {expected}
    routers = medha.get(cluster, "pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=router")["items"]
    alive = [pod for pod in routers if "deletionTimestamp" not in pod["metadata"]]
    assert {image_of(pod) for pod in alive} == {f"medha-router:{VERSION}"}
    assert medha.pod_uids(cluster) == uids
    wait_ready(cluster)

    # A pod that is lost comes back as it was, beside the others of its replica.
    cluster.kubectl("delete", "pod", "tiny-l0-0")
    eventually(
        lambda: medha.pod_uids(cluster).get("tiny-l0-0", uids["tiny-l0-0"]) != uids["tiny-l0-0"], seconds=120
    )
    wait_ready(cluster)
    pods = medha.get(cluster, "pods", "-l", "medha.dev/replica=tiny")["items"]
    assert {image_of(pod) for pod in pods} == {f"medha-worker:{BEFORE_TAG}"}
    assert ask(cluster) == expected

    # A change that replaces the pods brings the new worker.
    medha.apply(cluster, medha.tiny(kvCache={"size": "24Mi", "tokensPerLane": 1024}))
    eventually(
        lambda: {
            image_of(pod) for pod in medha.get(cluster, "pods", "-l", "medha.dev/replica=tiny")["items"]
        },
        lambda found: found == {f"medha-worker:{VERSION}"},
        READY_SECONDS,
    )
    wait_ready(cluster)
    assert ask(cluster) == expected
