"""The init container that fetches a model: as the operator renders it, run as a process with folders for its mounts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medha.api.replica import MedhaReplicaSpec
from medha_operator.kube.kinds import Manifest
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.manifests import Owner, config_map, pod_templates

from .hub import REPOSITORY, TOKEN, Hub

OWNER = Owner("m", "tests", "uid")


@dataclass(frozen=True)
class Rendered:
    """What the operator makes of a replica whose model is on the Hub."""

    replica_json: str
    pod: Manifest
    """Spec of the pods in the first lane."""

    @property
    def fetching(self) -> Manifest:
        return self.pod["initContainers"][0]  # type: ignore[no-any-return]

    @property
    def model_volume(self) -> Manifest:
        (found,) = (one for one in self.pod["volumes"] if one["name"] == "model")
        return dict(found)

    @property
    def model_mount(self) -> Manifest:
        """Where the worker sees the model."""
        (found,) = (one for one in self.pod["containers"][0]["volumeMounts"] if one["name"] == "model")
        return dict(found)


def rendered(
    revision: str, stages: int = 1, spec: dict[str, Any] | None = None, **source: object
) -> Rendered:
    """Render a replica of one lane; `spec` is laid over its fields, `source` over `huggingFace`."""
    hub = {
        "repository": REPOSITORY,
        "revision": revision,
        "tokenSecret": {"name": "hub", "key": "token"},
        **source,
    }
    document = {
        "model": {"name": "m", "source": {"huggingFace": hub}},
        "parallelism": {"stream": stages},
        **(spec or {}),
    }
    parsed = MedhaReplicaSpec.model_validate(document)
    (template,) = pod_templates(OWNER, parsed, "r", OperatorSettings())
    return Rendered(config_map(OWNER, parsed, "r")["data"]["replica.json"], dict(template["spec"]))


def command(replica: Rendered, hub: Hub, folder: Path, stage: int) -> tuple[list[str], dict[str, str]]:
    """The container's command and environment, its mounts below `folder`, and nothing else of this user's."""
    container = replica.fetching
    mounts = {mount["mountPath"]: folder / mount["name"] for mount in container["volumeMounts"]}
    for path in mounts.values():
        path.mkdir(parents=True, exist_ok=True)
    (folder / "config" / "replica.json").write_text(replica.replica_json)

    def placed(word: str) -> str:
        for mounted, path in mounts.items():
            if word == mounted or word.startswith(mounted + "/"):
                return str(path) + word.removeprefix(mounted)
        return word

    environment = {entry["name"]: placed(entry["value"]) for entry in container["env"] if "value" in entry}
    if "HF_TOKEN_PATH" in environment:
        Path(environment["HF_TOKEN_PATH"]).write_text(TOKEN + "\n")
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin",
        "HOME": "/nonexistent",
        "HF_ENDPOINT": hub.url,
        "MEDHA_STAGE": str(stage),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    return [placed(word) for word in (*container["command"], *container["args"])], own | environment


def run(
    replica: Rendered,
    hub: Hub,
    folder: Path,
    stage: int = 0,
    *,
    options: Sequence[str] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the container until it ends."""
    argv, own = command(replica, hub, folder, stage)
    return subprocess.run(
        [*argv, *options], env=own | environment, capture_output=True, text=True, timeout=100, check=False
    )
