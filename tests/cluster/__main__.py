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

from cluster.binaries import CannotBuild
from cluster.control_plane import ControlPlane, NotStarted, control_plane
from cluster.kwok import with_kwok
from cluster.namespaces import CannotRun
from cluster.nodes import Cluster, one_node, two_nodes

SHAPES: dict[str, Callable[[Path, list[Path]], AbstractContextManager[ControlPlane | Cluster]]] = {
    "control-plane": lambda folder, _: control_plane(folder),
    "one-node": one_node,
    "two-nodes": two_nodes,
}


def main(arguments: Sequence[str]) -> int:
    """Start a cluster, say how to use it, and wait."""
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="one-node")
    parser.add_argument("--kwok", type=int, default=0, metavar="N", help="add N pretended nodes of 64 GPUs")
    parser.add_argument(
        "--image", type=Path, action="append", default=[], help="an OCI archive for the nodes"
    )
    wanted = parser.parse_args(arguments)

    asked_to_end = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        asked_to_end.set()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-cluster-")))
        print(f"cluster: starting {wanted.shape} ...", file=sys.stderr)
        try:
            running = stack.enter_context(SHAPES[wanted.shape](folder, wanted.image))
            plane = running.plane if isinstance(running, Cluster) else running
            if wanted.kwok:
                stack.enter_context(with_kwok(plane, wanted.kwok))
        except (CannotBuild, CannotRun, NotStarted) as error:
            print(f"cluster: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        print(f"export KUBECONFIG={plane.kubeconfig}")
        folders = {str(plane.programs[name].parent) for name in ("kubectl", "helm") if name in plane.programs}
        print(f"export PATH={':'.join(sorted(folders))}:$PATH")
        print("# Ctrl-C here ends everything.", flush=True)
        asked_to_end.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
