"""A file that keeps an epoch for a later process."""

from __future__ import annotations

from pathlib import Path

from medha_process.shared_files import write_whole


def read_epoch(path: Path | None) -> int | None:
    """Return the epoch in the file; None if there is none."""
    try:
        return int(path.read_text(encoding="utf-8")) if path is not None else None
    except (FileNotFoundError, ValueError):
        return None


def following_epoch(path: Path | None) -> int:
    """Return the epoch after the one in the file; 0 if there is none."""
    last = read_epoch(path)
    return 0 if last is None else last + 1


def write_epoch(path: Path | None, epoch: int) -> None:
    """Replace the file by one with this epoch."""
    if path is not None:
        write_whole(path, str(epoch))
