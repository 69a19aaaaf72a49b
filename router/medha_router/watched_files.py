"""Files that are read again when they change; a new content that cannot be used leaves the former one in force."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from medha.errors import ConfigInvalid
from medha_process.shared_files import FileState, file_state

log = logging.getLogger("medha.router")

_Content = TypeVar("_Content")


class WatchedFiles(Generic[_Content]):
    """Files that together have one content, such as a certificate and its key."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _Content]) -> None:
        """Read the files for the first time; `what` names their content in the log.

        Raises:
            ConfigInvalid: they cannot be used; `read` raises this, or an OSError.
        """
        self.what = what
        self.is_valid = True
        """False while the files have changed to something that cannot be used."""
        self._paths = tuple(paths)
        self._read = read
        self._seen = self._state()
        try:
            self.content = read()
        except OSError as error:
            raise ConfigInvalid(self._unreadable(error)) from error

    def poll(self) -> bool:
        """Read the files if they have changed; return whether there is a new content."""
        found = self._state()
        if found == self._seen:
            return False
        self._seen = found
        try:
            content = self._read()
        except (ConfigInvalid, OSError) as error:
            text = str(error) if isinstance(error, ConfigInvalid) else self._unreadable(error)
            log.error("%s: the new content cannot be used, so the former stays in force: %s", self.what, text)  # noqa: TRY400
            self.is_valid = False
            return False
        log.info("%s: the new content of %s is in force", self.what, self._paths[0])
        self.content = content
        self.is_valid = True
        return True

    async def watch(self, report: Callable[[], None], poll_seconds: float) -> None:
        """Report each new content, for ever."""
        while True:
            await asyncio.sleep(poll_seconds)
            if await asyncio.to_thread(self.poll):  # reading 1,000 keys takes a second
                report()

    def _state(self) -> tuple[FileState | None, ...]:
        return tuple(file_state(path) for path in self._paths)

    def _unreadable(self, error: OSError) -> str:
        names = ", ".join(str(path) for path in self._paths)
        return f"{error.filename or names}: {error.strerror or error}; mount or create the file"
