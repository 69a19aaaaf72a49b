"""Wait until standard input ends, then remove a cluster's leftover processes, cgroups and folders.

This is a separate program, so that the host is cleaned up even if the process that started the cluster was
killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.02
_LIMIT_SECONDS = 30.0


def clear(cgroups: list[Path], folders: list[Path]) -> bool:
    """Thaw, kill and remove; return whether everything is gone within the time limit."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        members = [member for root in cgroups for member in _members(root)]
        if not members:
            break
        if time.monotonic() > deadline:
            return False
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for root in cgroups:  # frozen processes do not die
            for state in root.rglob("freezer.state"):
                state.write_text("THAWED")
        time.sleep(_POLL_SECONDS)
    gone = all(_removed(root, deadline) for root in cgroups)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _members(root: Path) -> list[int]:
    found = []
    for tasks in root.rglob("cgroup.procs"):
        try:
            found += [int(line) for line in tasks.read_text().split()]
        except OSError:  # the group was removed meanwhile
            continue
    return [pid for pid in found if pid > 0]


def _removed(root: Path, deadline: float) -> bool:
    for folder, _, _ in os.walk(root, topdown=False):
        while Path(folder).exists():
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                break
            except OSError:  # EBUSY: its last process is still exiting
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_SECONDS)
    return True


def main(arguments: list[str]) -> int:
    """Run `janitor.py CGROUP... -- FOLDER...`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    split = arguments.index("--")
    sys.stdin.read()
    gone = clear([Path(name) for name in arguments[:split]], [Path(name) for name in arguments[split + 1 :]])
    return 0 if gone else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
