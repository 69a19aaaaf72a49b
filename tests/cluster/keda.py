"""KEDA in a cluster of real nodes, by the manifests and the sources of its module."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from cluster.binaries import CannotBuild, build
from cluster.external_metrics import SECONDS, apply
from cluster.nodes import Cluster
from cluster.tiny_image import write_image

_MODULE = Path(__file__).parent / "go" / "keda"
_PROGRAMS = {"operator": "keda", "adapter": "keda-adapter"}
"""Program -> its name in its image, which is `medha.test/<name>:1`."""
_DEPLOYMENTS = {"keda-operator": "operator", "keda-metrics-apiserver": "adapter"}
"""Deployment -> the program of its container."""


def keda_images(folder: Path) -> list[Path]:
    """Write archives of the images of KEDA's operator and of its adapter.

    Raises:
        CannotBuild: they cannot be built.
    """
    programs = build(_PROGRAMS)
    return [
        write_image(
            folder / f"{name}.tar", f"medha.test/{name}:1", {f"/{name}": programs[program]}, [f"/{name}"]
        )
        for program, name in _PROGRAMS.items()
    ]


def install_keda(cluster: Cluster) -> None:
    """Install KEDA as its manifests say, without the webhook that checks ScaledObjects, and wait until it serves."""
    documents = [
        document
        for document in _manifests(cluster)
        if not document["metadata"]["name"].startswith("keda-admission")
    ]
    apply(cluster, documents)
    for name in _DEPLOYMENTS:
        cluster.kubectl("-n", "keda", "rollout", "status", f"deployment/{name}", f"--timeout={SECONDS}s")


def _manifests(cluster: Cluster) -> list[dict[str, Any]]:
    folder = _sources() / "config" / "default"
    documents = list(yaml.load_all(cluster.kubectl("kustomize", str(folder)), Loader=yaml.CSafeLoader))
    for document in documents:
        if document["kind"] == "Deployment" and document["metadata"]["name"] in _DEPLOYMENTS:
            program = _DEPLOYMENTS[document["metadata"]["name"]]
            (container,) = document["spec"]["template"]["spec"]["containers"]
            container |= {"image": f"medha.test/{_PROGRAMS[program]}:1", "imagePullPolicy": "Never"}
            if program == "operator":
                container["args"].append("--enable-webhook-patching=false")
    return documents


def _sources() -> Path:
    """Return the folder of KEDA's module, fetched by Go where it is not kept yet."""
    go = shutil.which("go")
    if go is None:
        raise CannotBuild("KEDA's manifests come from its Go module, and Go is not installed")
    done = subprocess.run(
        [go, "mod", "download", "-json", "github.com/kedacore/keda/v2"],
        cwd=_MODULE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CannotBuild(f"cannot fetch KEDA's sources:\n{done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])
