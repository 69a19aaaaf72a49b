"""The file in which a container leaves the reason of its end, which the kubelet puts into the pod's status."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
"""Path of the file in a container, unless its spec names another."""
_MOST_BYTES = 4096  # the kubelet reads no more


def leave_reason(path: Path, reason: str) -> None:
    """Write the reason, if the kubelet has made the file; a machine without a kubelet has none."""
    with suppress(OSError):
        if path.exists():
            path.write_bytes(reason.encode()[:_MOST_BYTES])
