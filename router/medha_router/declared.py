"""The models that manifests ask for, read from a folder and read again when its files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from medha.declared import DeclaredModel, from_text, merged
from medha.errors import ConfigInvalid

log = logging.getLogger("medha.router")

_POLL_SECONDS = 2.0
_Signature = tuple[int, int, int]
"""Inode, modification time and size; a ConfigMap's volume gives a changed file a new inode."""


class DeclaredFiles:
    """The files of one folder. An unreadable file counts with its last readable content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, _Signature] = {}
        self._models: dict[str, tuple[DeclaredModel, ...]] = {}

    def changed(self) -> tuple[DeclaredModel, ...] | None:
        """Return all models that the files name, if a file was added, changed or removed since the last call.

        Otherwise return None.
        """
        found = {
            path.name: signature for path in self._paths() if (signature := _signature(path)) is not None
        }
        if found == self._seen:
            return None
        for name in self._models.keys() - found.keys():
            del self._models[name]
        for name, signature in found.items():
            if self._seen.get(name) != signature:
                self._read(name)
        self._seen = found
        return merged(model for name in sorted(self._models) for model in self._models[name])

    def _paths(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if path.suffix == ".json"]
        except OSError:  # it does not exist (yet)
            return []

    def _read(self, name: str) -> None:
        path = self._folder / name
        try:
            self._models[name] = from_text(path.read_bytes(), str(path))
        except (ConfigInvalid, OSError) as error:
            kept = (
                "its last readable content stays in force"
                if name in self._models
                else "its models are unknown"
            )
            log.error("the models of a manifest cannot be read, so %s: %s", kept, error)  # noqa: TRY400
            return
        names = ", ".join(model.name for model in self._models[name]) or "none"
        log.info("models of manifests in %s: %s", path, names)

    async def watch(self, report: Callable[[tuple[DeclaredModel, ...]], None]) -> None:
        """Report each change, for ever."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            models = self.changed()
            if models is not None:
                report(models)


def _signature(path: Path) -> _Signature | None:
    try:
        status = path.stat()
    except OSError:  # it was just removed
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
