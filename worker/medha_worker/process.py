"""Helpers of all processes: logging, the end with the parent, garbage collection, free ports, usable CPUs."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import MappingProxyType

# OpenMP threads spin while they wait for each other. Router and controller share the cores with them, and a
# thread that spins while it waits for a preempted one makes a step take ten times as long. Threads that sleep
# at once (OMP_WAIT_POLICY=PASSIVE) cost prefill a third of its rate. Spinning for a few microseconds avoids
# both (measured).
RANK_ENVIRONMENT = MappingProxyType({"GOMP_SPINCOUNT": "3000"})

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


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free now."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may use: its affinity, limited by the container's quota.

    The quota is rounded up.
    """
    allowed = len(os.sched_getaffinity(0))
    group = root / "sys/fs/cgroup"
    try:
        if (group / "cpu.max").exists():  # version 2
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu/cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return allowed
    if not quota.isdigit():  # "max", or -1
        return allowed
    return max(1, min(allowed, -(-int(quota) // int(period))))
