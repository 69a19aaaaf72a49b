"""Memory of this process and its host: what is free, what is taken, and what is kept between steps."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Parameters of glibc's mallopt(3); the largest mmap threshold that it accepts on 64 bits.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_MAX_BYTES = 32 * 1024 * 1024

_log = logging.getLogger("medha.memory")


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Memory of a device, in bytes: all of it, what this process has taken of it, and what nobody has."""

    total: int
    used: int
    free: int


class HostMemory:
    """`DeviceMemory` of a CPU: tensors lie in the memory of the process."""

    def figures(self) -> MemoryFigures:
        return MemoryFigures(host_total_bytes(), self.used_bytes(), host_free_bytes(1))

    def free_bytes(self, ranks: int) -> int:
        return host_free_bytes(ranks)

    def used_bytes(self) -> int:
        return _status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        return _status_bytes("VmHWM")

    def forget_peak(self) -> None:
        """Reset the peak to what is resident now (proc(5)), or loading the weights would hide the activations."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:
            _log.warning("activations may be overestimated, the peak before them cannot be reset: %s", error)


def keep_freed_memory() -> bool:
    """Set the C library to keep freed activations in the process; return False if it has no such setting.

    A step frees and allocates the same tensors in every layer. By default, glibc returns large ones and gets
    them again as fresh pages, which the kernel must zero: 28,000 page faults in a chunk of 512 tokens of the
    `small` preset, 300 with this setting. It applies to the whole process, so a rank calls this once, before
    the first step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX_BYTES))


def host_free_bytes(ranks_on_host: int, root: Path = Path("/")) -> int:
    """Return the memory that one rank of this host may still take.

    That is the machine's free memory within all cgroup limits that apply, divided by the ranks. A cgroup's
    usage counts file pages that the kernel drops when memory is wanted, among them the checkpoint that was
    just read, so those count as free.
    """
    import psutil  # here, so that models and kernels run on a machine without it

    free = psutil.virtual_memory().available
    for directory, names in _cgroup_directories(root):
        limit = _read_bytes(directory / names.limit)
        usage = _read_bytes(directory / names.usage)
        if limit is not None and usage is not None:
            droppable = _read_statistic(directory / "memory.stat", names.inactive_file)
            free = min(free, max(limit - usage + min(droppable, usage), 0))
    return free // ranks_on_host


def host_total_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory, or the tightest cgroup limit that applies if that is less."""
    import psutil  # here, as above

    limits = [_read_bytes(directory / names.limit) for directory, names in _cgroup_directories(root)]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


@dataclass(frozen=True, slots=True)
class _CgroupNames:
    mount: str
    limit: str
    usage: str
    inactive_file: str  # name in memory.stat; includes the child cgroups


_VERSION_2 = _CgroupNames("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_VERSION_1 = _CgroupNames(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def _cgroup_directories(root: Path) -> Iterator[tuple[Path, _CgroupNames]]:
    """Yield this process's memory cgroup and all its ancestors: the tightest of their limits counts.

    In a container, the path may be the host's and not visible; the mount itself is then the container's
    cgroup.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            names = _VERSION_2
        elif "memory" in controllers.split(","):
            names = _VERSION_1
        else:
            continue
        mount = root / names.mount
        inner = mount / path.lstrip("/")
        while inner != mount:
            yield inner, names
            inner = inner.parent
        yield mount, names


def _read_bytes(path: Path) -> int | None:
    """Return the number in a cgroup file; None if there is no such file, or no limit (`max`)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_statistic(path: Path, name: str) -> int:
    """Return one line of a cgroup's `memory.stat`, in bytes; 0 if it is missing."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
