"""Helm as tests call it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "medha"
RELEASE, NAMESPACE = "medha", "medha-system"

Manifest = dict[str, Any]


class HelmFailed(Exception):
    """What Helm said."""


@dataclass(frozen=True)
class Helm:
    """The program, with a home of its own, and a cluster where it has one."""

    program: Path
    home: Path
    kubeconfig: Path | None = None
    rendered: dict[str, list[Manifest]] = field(default_factory=dict)
    """What `render` has made of values: Helm takes half a second each time."""

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Its output.

        Raises:
            HelmFailed: with both streams.
        """
        home = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        more = ["-f", "-"] if values is not None else []
        kubeconfig = str(self.kubeconfig or self.home / "no-cluster")
        done = subprocess.run(
            [str(self.program), *arguments, *more],
            input=yaml.safe_dump(dict(values or {})),
            env=os.environ | home | {"KUBECONFIG": kubeconfig},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise HelmFailed(done.stdout + done.stderr)
        return done.stdout

    def render(self, **values: Any) -> list[Manifest]:
        """Every object of the chart."""
        key = json.dumps(values, sort_keys=True)
        if key not in self.rendered:
            text = self("template", RELEASE, str(CHART), "--namespace", NAMESPACE, values=values)
            documents = yaml.load_all(text, Loader=yaml.CSafeLoader)
            self.rendered[key] = [document for document in documents if document]
        return copy.deepcopy(self.rendered[key])


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one object of that kind and name."""
    (found,) = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Name of an object -> the pod, labels and all, that it makes or is."""
    return {
        each["metadata"]["name"]: each if each["kind"] == "Pod" else each["spec"]["template"]
        for each in manifests
        if each["kind"] in ("Deployment", "StatefulSet", "Pod")
    }


def rules(helm: Helm, **values: Any) -> dict[str, Any]:
    """The spec of the chart's PrometheusRule."""
    monitoring = {"monitoring": {"rules": {"enabled": True} | values}}
    return dict(find(helm.render(**monitoring), "PrometheusRule", "medha")["spec"])


def alert_names(helm: Helm) -> set[str]:
    """Names of all alerts of the chart."""
    return {rule["alert"] for group in rules(helm)["groups"] for rule in group["rules"] if "alert" in rule}
