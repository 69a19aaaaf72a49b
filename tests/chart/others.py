"""Definitions of others' resources, as their own modules hold them: Prometheus' operator, KEDA, and the Gateway API
with its Inference Extension."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from cluster.binaries import CannotBuild

_MODULES = Path(__file__).resolve().parents[1] / "cluster" / "go" / "definitions"
_FILES = {
    "github.com/prometheus-operator/prometheus-operator": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    "github.com/kedacore/keda/v2": ("config/crd/bases/keda.sh_scaledobjects.yaml",),
    "sigs.k8s.io/gateway-api": (
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
        "config/crd/standard/gateway.networking.k8s.io_backendtlspolicies.yaml",
    ),
    "sigs.k8s.io/gateway-api-inference-extension": (
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
}


def definitions() -> list[Path]:
    """Files of the definitions, fetched by Go where they are not kept yet.

    Raises:
        CannotBuild: no Go, or it cannot fetch them.
    """
    go = shutil.which("go")
    if go is None:
        raise CannotBuild("definitions of others' resources come from Go modules, and Go is not installed")
    done = subprocess.run(
        [go, "mod", "download", "-json", *_FILES], cwd=_MODULES, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise CannotBuild(f"cannot fetch definitions of others' resources:\n{done.stdout}{done.stderr}")
    decoder, found, text = json.JSONDecoder(), [], done.stdout.strip()
    while text:
        module, end = decoder.raw_decode(text)
        text = text[end:].strip()
        found += [Path(module["Dir"]) / name for name in _FILES[module["Path"]]]
    return found
