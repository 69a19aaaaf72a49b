"""Resources of this machine that a process may use: open files, CPUs, GPUs, TCP ports."""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import suppress
from pathlib import Path


def raise_file_limit() -> int:
    """Raise the soft limit on this process's open files to the hard one; children started later inherit it.

    Returns:
        The soft limit in force afterwards (files); `sys.maxsize` where there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the system refuses it: keep the present limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def has_nvidia_gpu(devices: Path = Path("/dev")) -> bool:
    """Return True if NVIDIA's driver offers this machine a GPU, whether or not torch can use it."""
    return (devices / "nvidiactl").exists() and any(devices.glob("nvidia[0-9]*"))


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
