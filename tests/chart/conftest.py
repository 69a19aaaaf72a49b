"""The chart as Helm renders it, and an API server that it is installed on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from chart.helm import NAMESPACE, Helm
from chart.others import definitions
from cluster.binaries import CannotBuild, build
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import wait_until_established

OURS = ("medhareplicas.medha.dev", "medhadeployments.medha.dev")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, without a cluster. Where it cannot be had its tests are skipped, but in CI they fail."""
    try:
        return Helm(build(["helm"])["helm"], tmp_path_factory.mktemp("helm"))
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Helm: {error}")


@pytest.fixture(scope="session")
def bare_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server that does not know our resources: a chart brings them."""
    try:
        with control_plane(
            tmp_path_factory.mktemp("bare-plane"), controllers=False, scheduler=False
        ) as running:
            yield running
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kubernetes API server: {error}")


@pytest.fixture(scope="session")
def accepting(bare_plane: ControlPlane) -> ControlPlane:
    """The API server, knowing Prometheus' and the Gateway API's resources, with the namespaces of the table."""
    for file in definitions():
        bare_plane.kubectl("apply", "--server-side", "-f", str(file))
    wait_until_established(bare_plane)
    for name in ("team-a", "team-b", "elsewhere", NAMESPACE):
        bare_plane.kubectl("create", "namespace", name)
    bare_plane.kubectl("create", "serviceaccount", "default", "-n", NAMESPACE)  # no controller makes it
    for mode in ("enforce", "warn"):
        bare_plane.kubectl("label", "namespace", NAMESPACE, f"pod-security.kubernetes.io/{mode}=restricted")
    return bare_plane


@pytest.fixture
def installer(helm: Helm, accepting: ControlPlane) -> Iterator[Helm]:
    """Helm at that API server, which leaves no release and no definition of ours."""
    with installing(helm, accepting) as there:
        yield there


@contextmanager
def installing(helm: Helm, accepting: ControlPlane) -> Iterator[Helm]:
    """The fixture `installer`, for fixtures that live longer."""
    there = replace(helm, kubeconfig=accepting.kubeconfig)
    yield there
    for line in json.loads(there("list", "--all-namespaces", "--output", "json")):
        there("uninstall", line["name"], "--namespace", line["namespace"])
    accepting.kubectl("delete", "crd", "--ignore-not-found", *OURS)


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus' own checker. Where there is none its tests are skipped, but in CI they fail."""
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("CI"), "no promtool: install the package prometheus"
        pytest.skip("no promtool: install the package prometheus")
    return found
