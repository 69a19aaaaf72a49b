"""What processes have in common: logs on stderr, no life without their parent, no long pauses, free ports, and CPUs."""

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

# OpenMP's threads spin while they wait for each other. Router and controller take turns on the same cores, and a
# thread that spins beside one that was put aside makes a step take ten times as long; threads that sleep at once
# (OMP_WAIT_POLICY=PASSIVE) cost prefill a third of its rate. A few microseconds of spinning lose neither (measured).
RANK_ENVIRONMENT = MappingProxyType({"GOMP_SPINCOUNT": "3000"})

PARENT = "MEDHA_PARENT_PID"
"""Set by the supervisor for its parts: its process id."""
_PR_SET_PDEATHSIG = 1  # prctl(2)


def configure_logging(level: str) -> None:
    """One line an event on stderr; with the time where no supervisor adds it, with the part's name."""
    is_part = PARENT in os.environ
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"{'' if is_part else '%(asctime)s '}%(levelname)s %(name)s: %(message)s",
    )


def end_with_parent() -> None:
    """Be killed when the parent process dies, however it dies, so that no orphan keeps a GPU or a port.

    A parent that died while we were still importing has left us to another one. Who sets `MEDHA_PARENT_PID` lets
    us notice; the id 1 alone says nothing, because in a container it may well be the parent.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))
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


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: those that it may run on, within its container's quota (rounded up)."""
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
