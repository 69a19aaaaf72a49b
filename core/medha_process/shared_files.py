"""Files that one process writes and another reads: they are replaced as a whole, and polled for changes."""

from __future__ import annotations

from pathlib import Path

FileState = tuple[int, int, int]
"""Inode, modification time and size; the volume of a Secret or ConfigMap gives a changed file a new inode."""


def file_state(path: Path) -> FileState | None:
    """Return what changes when a file does, symbolic links followed; None if it cannot be found."""
    try:
        status = path.stat()
    except OSError:  # it was just removed
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds all of it, or what was there before."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.rename(path)
