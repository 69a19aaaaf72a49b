"""Register our resource definitions with an API server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Protocol

from cluster.api import condition

CRDS = Path(__file__).resolve().parents[2] / "crds"
_LIMIT_SECONDS = 30.0


class HasKubectl(Protocol):
    def kubectl(self, *arguments: str) -> str: ...


def wait_until_established(cluster: HasKubectl, *names: str) -> None:
    """Wait until all definitions in the API server, and those of `names`, are established.

    `kubectl wait` is not used: it fails, instead of waiting, if no condition is written yet.
    """
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        listed = json.loads(cluster.kubectl("get", "crd", "-o", "json"))["items"]
        established = {
            definition["metadata"]["name"]: condition(definition, "Established")[0] == "True"
            for definition in listed
        }
        if all(established.values()) and set(names) <= set(established):
            return
        assert time.monotonic() < deadline, f"after {_LIMIT_SECONDS:g} s: {established}, of {names or 'all'}"
        time.sleep(0.1)


def define(cluster: HasKubectl) -> None:
    """Apply the definitions, and wait until API discovery lists the resources a little later."""
    cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
    wait_until_established(cluster)
    deadline = time.monotonic() + _LIMIT_SECONDS
    wanted = {f"{path.stem}.medha.dev" for path in CRDS.iterdir()}
    while not wanted <= set(cluster.kubectl("api-resources", "--api-group=medha.dev", "-o", "name").split()):
        assert time.monotonic() < deadline, "the API server does not tell of our resources"
        time.sleep(0.1)
