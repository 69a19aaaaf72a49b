"""What every part does as a process: it logs to stderr, ends with its parent, and collects garbage rarely."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys

PARENT = "MEDHA_PARENT_PID"
"""Environment variable that the supervisor sets for its parts: its process id."""
_PR_SET_PDEATHSIG = 1  # prctl(2)


def configure_logging(level: str) -> None:
    """Log to stderr, one line per event.

    A part logs no time, because its supervisor adds the time and the part's name.
    """
    is_part = PARENT in os.environ
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"{'' if is_part else '%(asctime)s '}%(levelname)s %(name)s: %(message)s",
    )


def end_with_parent() -> None:
    """Have this process killed when its parent dies in any way, so that no orphan keeps a GPU or a port.

    If the parent died while this process was importing, it now has another parent. `MEDHA_PARENT_PID` reveals
    that; a parent with id 1 alone does not, because in a container the real parent may have that id.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def collect_garbage_rarely() -> None:
    """Collect cyclic garbage once in a million allocated objects instead of every few hundred.

    With 10,000 requests queued, a collection takes 30 ms and would run every few dozen steps in vain: the
    objects of a step are freed by reference counts.
    """
    gc.freeze()
    gc.set_threshold(1_000_000, 10, 10)
