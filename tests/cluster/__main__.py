"""A developer's own cluster: `make cluster`, or `python -m cluster --shape two-nodes` with tests/ on PYTHONPATH.

It is there until Ctrl-C; then nothing of it is.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType

from cluster import images
from cluster.binaries import CannotBuild
from cluster.control_plane import ControlPlane, NotStarted, control_plane
from cluster.kwok import with_kwok
from cluster.namespaces import CannotRun
from cluster.nodes import Cluster, one_node, two_nodes
from cluster.volumes import offer_volume

SHAPES: dict[str, Callable[[Path, list[Path]], AbstractContextManager[ControlPlane | Cluster]]] = {
    "control-plane": lambda folder, _: control_plane(folder),
    "one-node": one_node,
    "two-nodes": two_nodes,
}
MODELS = "/var/lib/medha/models"
MEDHA = "medha"
"""Value of `--image` that stands for the three images of this checkout."""


def main(arguments: Sequence[str]) -> int:
    """Start a cluster, print how to use it, and wait."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="one-node")
    parser.add_argument("--kwok", type=int, default=0, metavar="N", help="add N pretended nodes of 64 GPUs")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        help=f"an OCI archive for the nodes, or `{MEDHA}`: operator, router and worker of this checkout, built if needed",
    )
    parser.add_argument(
        "--models", type=Path, metavar="FOLDER", help=f"show this folder on every node as {MODELS}"
    )
    parser.add_argument(
        "--settings", type=Path, metavar="FILE", help="also write the lines to be sourced there"
    )
    wanted = parser.parse_args(arguments)
    nodes = wanted.shape != "control-plane"
    if wanted.models:
        if not nodes:
            parser.error(f"--models {wanted.models}: there is no node")
        try:
            wanted.models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--models {wanted.models}: {error.strerror}")

    asked_to_end = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        asked_to_end.set()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-cluster-")))
        try:
            archives = _archives(wanted.image)
            _record_event(f"starting {wanted.shape} ...")
            running = stack.enter_context(SHAPES[wanted.shape](folder, archives))
            plane = running.plane if isinstance(running, Cluster) else running
            if isinstance(running, Cluster):
                offer_volume(running)
                for node in running.nodes if wanted.models else []:
                    node.mount(wanted.models, MODELS)
            if wanted.kwok:
                stack.enter_context(with_kwok(plane, wanted.kwok))
        except (CannotBuild, CannotRun, NotStarted, images.CannotBuild) as error:
            _record_event(str(error))
            return 1
        except KeyboardInterrupt:
            return 130
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        folders = {str(plane.programs[name].parent) for name in ("kubectl", "helm") if name in plane.programs}
        lines = f"export KUBECONFIG={plane.kubeconfig}\nexport PATH={':'.join(sorted(folders))}:$PATH\n"
        if wanted.settings:
            wanted.settings.parent.mkdir(parents=True, exist_ok=True)
            wanted.settings.write_text(lines, encoding="utf-8")
            stack.callback(wanted.settings.unlink, missing_ok=True)
        print(lines + "# Ctrl-C here ends everything.", flush=True)
        asked_to_end.wait()
    return 0


def _archives(wanted: Sequence[str]) -> list[Path]:
    """Return the archives that `--image` names.

    Raises:
        images.CannotBuild: those of this checkout cannot be built.
    """
    archives = []
    for each in wanted:
        archives += images.build(torch="cpu").values() if each == MEDHA else [Path(each)]
    return archives


def _record_event(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
