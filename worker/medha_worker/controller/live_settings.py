"""Reads settings that may change while a replica runs, from a file that is polled once a second."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from medha.errors import ConfigInvalid
from medha_process.shared_files import file_state

POLL_SECONDS = 1.0

_Settings = TypeVar("_Settings")


class LiveFile(Generic[_Settings]):
    """A file that is only ever replaced as a whole, as the kubelet does with the files of a ConfigMap."""

    def __init__(self, path: Path, read: Callable[[Path], _Settings], log: logging.Logger) -> None:
        """`read` raises ConfigInvalid or ValidationError for content that it cannot use.

        The error is logged, and the earlier settings stay.
        """
        self._path, self._read, self._log = path, read, log
        self._polled_at = float("-inf")
        self._seen = file_state(path)

    def changed(self, now: float) -> _Settings | None:
        """Return the new content once after each change, else None."""
        if now - self._polled_at < POLL_SECONDS:
            return None
        self._polled_at = now
        state = file_state(self._path)
        if state in (None, self._seen):
            return None
        self._seen = state
        try:
            return self._read(self._path)
        except (ConfigInvalid, ValidationError) as error:
            self._log.error("the new settings cannot be read; the previous ones stay in force: %s", error)
            return None
