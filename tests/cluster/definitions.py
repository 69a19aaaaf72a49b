"""Our resources, made known to an API server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

CRDS = Path(__file__).resolve().parents[2] / "crds"
_LIMIT_SECONDS = 30.0


class HasKubectl(Protocol):
    def kubectl(self, *arguments: str) -> str: ...


def define(cluster: HasKubectl) -> None:
    """Apply the definitions, and wait until `kubectl` finds what they define: the API server tells of it a little later."""
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    cluster.kubectl("wait", "--for=condition=Established", f"--timeout={_LIMIT_SECONDS:g}s", "crd", "--all")
    deadline = time.monotonic() + _LIMIT_SECONDS
    wanted = {f"{path.stem}.medha.dev" for path in CRDS.iterdir()}
    while not wanted <= set(cluster.kubectl("api-resources", "--api-group=medha.dev", "-o", "name").split()):
        assert time.monotonic() < deadline, "the API server does not tell of our resources"
        time.sleep(0.1)
