"""The chart as Helm renders it, and an API server that it is installed on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from chart.helm import Helm
from cluster.binaries import CannotBuild, build
from cluster.control_plane import ControlPlane, control_plane


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
