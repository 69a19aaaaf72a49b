"""`make demo`: run README.md's commands, from no cluster to a chat answer of a replica in a cluster.

Ctrl-C ends everything and leaves nothing behind.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from cluster.guide import README, shown
from cluster.images import ROOT

HEADING = "In a cluster"
SETTINGS = ROOT / ".medha" / "cluster.env"
PORT = 8000
"""Port of this machine to which README.md forwards the router's port."""
_POLL_SECONDS = 0.2


def main() -> int:
    """Run the cluster and, once it is up, the steps; wait until a signal arrives."""
    asked_to_end = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        asked_to_end.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return _record_event(
                f"port {PORT} of this machine is in use; end what listens there, such as `make run`"
            )
    if SETTINGS.exists():
        return _record_event(
            f"{SETTINGS} exists: end the `make cluster` that runs, or remove the file where none does"
        )
    _, (serve,), steps = shown(README, HEADING)
    with ExitStack() as stack:
        print(f"$ {serve}", flush=True)
        cluster = stack.enter_context(_ended([*shlex.split(serve, comments=True)]))
        while not SETTINGS.exists():
            if cluster.poll() is not None:
                return _record_event(f"`{serve}` ended with {cluster.returncode}: see above")
            if asked_to_end.wait(_POLL_SECONDS):
                return 130
        walk = stack.enter_context(_ended(["bash", "-c", _script(steps)]))
        while walk.poll() is None:
            if asked_to_end.wait(_POLL_SECONDS):
                return 0
            if cluster.poll() is not None:
                return _record_event(f"`{serve}` ended with {cluster.returncode}: see above")
        return _record_event(f"the last command above failed (exit status {walk.returncode})")


def _script(steps: Sequence[str]) -> str:
    """Return a shell script of the steps that prints each before running it and ends at the first failure."""
    lines = ["set -euo pipefail", "trap 'kubectl get medhareplicas,jobs,pods --all-namespaces' ERR"]
    for step in steps:
        lines += [f"printf '\\n$ %s\\n' {shlex.quote(step)}", step]
    lines += [
        f"printf '\\n\\nThe answer is random, as the model is. All of it goes on until Ctrl-C. In another terminal:\\n  . {SETTINGS}\\n"
        "  kubectl get medhareplicas,pods\\n'",
        "wait",  # for the port that is forwarded
    ]
    return "\n".join(lines)


@contextmanager
def _ended(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own session; it is terminated afterwards, even if this process is killed."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", "--", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _record_event(text: str) -> int:
    print(f"demo: {text}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
