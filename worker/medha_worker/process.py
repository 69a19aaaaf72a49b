"""What processes have in common: logs on stderr, no life without their parent, no long pauses, ports that are free."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def configure_logging(level: str) -> None:
    """One line an event on stderr; the supervisor adds the part's name and the time of day."""
    logging.basicConfig(
        stream=sys.stderr, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def end_with_parent() -> None:
    """Be killed when the parent process dies, however it dies, so that no orphan keeps a GPU or a port.

    A parent that died while we were still importing has left us to another one. Who sets `MEDHA_PARENT_PID` lets
    us notice; the id 1 alone says nothing, because in a container it may well be the parent.
    """
    parent = int(os.environ.get("MEDHA_PARENT_PID", os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def collect_garbage_rarely() -> None:
    """Let a search for unreachable cycles come once in a million objects instead of every few hundred.

    With 10,000 requests queued it takes 30 ms and would come every few dozen steps, for nothing: what a step leaves
    behind is freed by reference counts.
    """
    gc.freeze()
    gc.set_threshold(1_000_000, 10, 10)


def free_port(host: str) -> int:
    """A TCP port of an address that nobody listens on now."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
