"""The operator as the chart starts it, outside of a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chart.helm import NAMESPACE, Manifest, find, pods
from cluster.control_plane import ControlPlane, free_port

NAME = "medha-operator"
PATIENCE_SECONDS = 90.0


@contextmanager
def operator_of(manifests: list[Manifest], plane: ControlPlane, folder: Path) -> Iterator[Path]:
    """Be the kubelet of the operator's pod: run its container's command under its account; its log."""
    (container,) = pods(manifests)[NAME]["spec"]["containers"]
    settings = json.loads(find(manifests, "ConfigMap", NAME)["data"]["settings.json"])
    settings |= {"metrics_port": free_port("127.0.0.1")}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    config = json.loads(plane.kubeconfig.read_text(encoding="utf-8"))
    token = plane.kubectl("create", "token", NAME, "-n", NAMESPACE, "--duration=1h").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    (folder / "kubeconfig").write_text(json.dumps(config), encoding="utf-8")
    command = [*container["command"], *container["args"]]
    command = [part.replace("0.0.0.0:8080", f"127.0.0.1:{free_port('127.0.0.1')}") for part in command]
    environment = {
        "KUBECONFIG": str(folder / "kubeconfig"),
        "MEDHA_OPERATOR_SETTINGS": str(folder / "settings.json"),
        "MEDHA_POD_NAME": "operator-0",
        "MEDHA_POD_NAMESPACE": NAMESPACE,
    }
    assert environment.keys() == {variable["name"] for variable in container["env"]} | {"KUBECONFIG"}
    log = folder / "operator.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", *command],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait(20)
