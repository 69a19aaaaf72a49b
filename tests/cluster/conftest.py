"""One control plane for all tests that need a real API server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.binaries import CannotBuild
from cluster.control_plane import ControlPlane, control_plane

CRDS = Path(__file__).resolve().parents[2] / "crds"


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without controllers that knows our resources.

    Without Go and without `KUBEBUILDER_ASSETS` its tests are skipped, but in CI they fail.
    """
    try:
        with control_plane(tmp_path_factory.mktemp("plane"), controllers=False, scheduler=False) as running:
            running.kubectl("apply", "--server-side", "-f", str(CRDS))
            running.kubectl("wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")
            yield running
    except CannotBuild as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no Kubernetes API server: {error}")
