"""Medha on a real node: torch and a checkpoint are mounted there, and the chart is installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml
from packaging.requirements import Requirement

from cluster.images import ROOT
from cluster.nodes import Cluster

Document = dict[str, Any]

CHART = ROOT / "charts" / "medha"
EXAMPLE = ROOT / "examples" / "tiny-replica.yaml"
MODELS = "/var/lib/medha/models"
TORCH = "/var/lib/medha/torch"
SYSTEM = "medha-system"


# --- files on the node ------------------------------------------------------------------------------------


def bring_checkpoint(cluster: Cluster, folder: Path) -> None:
    """Create the checkpoint that `tiny` refers to, and mount it on the first node."""
    checkpoint = folder / "tiny"
    subprocess.run(
        [sys.executable, "-m", "medha_cli.main", "model", "init", str(checkpoint), "--seed", "0"],
        check=True,
        capture_output=True,
    )
    cluster.nodes[0].mount(checkpoint, f"{MODELS}/tiny")


def bring_torch(cluster: Cluster) -> None:
    """Mount this environment's torch and its dependencies on the first node: the image for tests has none."""
    commands = [f"mkdir -p {TORCH}"]
    for source in sorted(_torch_files()):
        target = f"{TORCH}/{source.name}"
        commands += [
            f"mkdir {target}" if source.is_dir() else f"touch {target}",
            f"mount --bind {source} {target}",
        ]
    cluster.run(["sh", "-ec", "\n".join(commands)])


def _torch_files() -> set[Path]:
    """Return the folders and files in site-packages of torch and all its requirements."""
    found: set[Path] = set()
    seen: set[str] = set()
    open_names = ["torch"]
    while open_names:
        name = open_names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        site = Path(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        found |= {site / top for top in tops if (site / top).exists()}
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_names.append(requirement.name)
    return found


# --- manifests and the chart ------------------------------------------------------------------------------


def tiny(name: str = "tiny", **spec: Any) -> Document:
    """Return examples/tiny-replica.yaml with its model and torch mounted from the node in its pods."""
    document: Document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["metadata"]["name"] = name
    document["spec"]["model"]["source"] = {"hostPath": {"path": f"{MODELS}/tiny"}}
    document["spec"] |= spec
    worker = {
        "name": "worker",
        "env": [{"name": "PYTHONPATH", "value": "/opt/torch"}],
        "volumeMounts": [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}],
    }
    volume = {"name": "torch", "hostPath": {"path": TORCH, "type": "Directory"}}
    document["spec"]["template"] = {"spec": {"containers": [worker], "volumes": [volume]}}
    return document


def apply(cluster: Cluster, document: Document) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))


def install(cluster: Cluster, chart: Path = CHART, *arguments: str) -> str:
    """Run `helm upgrade --install` for replicas in `default`; wait until operator and router are ready.

    Raises:
        AssertionError: it failed; the message shows the pods, their events and their logs.
    """
    try:
        return cluster.helm(
            *("upgrade", "--install", "medha", str(chart), "--namespace", SYSTEM, "--create-namespace"),
            *("--set", "operator.namespaces={default}", "--set", f"admission.hostPaths={{{MODELS},{TORCH}}}"),
            *("--set", "image.pullPolicy=Never", "--wait", "--timeout", "150s", *arguments),
        )
    except AssertionError as error:
        logs = ("logs", "--selector=app.kubernetes.io/name=medha", "--prefix", "--tail=20")
        looks = (("get", "pods", "-o", "wide"), ("get", "events"), logs)
        seen = [cluster.kubectl("--namespace", SYSTEM, *look, check=False) for look in looks]
        raise AssertionError("\n".join([str(error), *seen])) from None


# --- observed state ---------------------------------------------------------------------------------------


def get(cluster: Cluster, *arguments: str) -> Document:
    """Return the output of `kubectl get ... -o json`."""
    found: Document = json.loads(cluster.kubectl("get", *arguments, "-o", "json"))
    return found


def pod_uids(cluster: Cluster, replica: str = "tiny") -> dict[str, str]:
    """Return the UID of each pod of a replica, by name."""
    pods = get(cluster, "pods", "-l", f"medha.dev/replica={replica}")["items"]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in pods}


def rank_processes(cluster: Cluster) -> dict[str, psutil.Process]:
    """Return the rank's process, as this machine sees it, of each pod of the replica `tiny`, by pod."""
    uids = {uid: name for name, uid in pod_uids(cluster).items()}
    found = {}
    for process in psutil.process_iter():
        try:
            if "medha_worker.rank" in process.cmdline():
                cgroup = Path(f"/proc/{process.pid}/cgroup").read_text()
                found |= {name: process for uid, name in uids.items() if uid in cgroup}
        except (psutil.Error, OSError):  # it ended meanwhile
            continue
    return found
