"""What the worker's processes have in common: logs on stderr, and no life without their parent."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
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
