"""The models that manifests ask for, read from a folder and read again when its files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from medha.api.declared import DeclaredModel, from_text, merged, usable_aliases
from medha.errors import ConfigInvalid
from medha_process.shared_files import FileState, file_state

log = logging.getLogger("medha.router")


class DeclaredFiles:
    """The files of one folder. An unreadable file counts with its last readable content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, FileState] = {}
        self._models: dict[str, tuple[DeclaredModel, ...]] = {}

    def changed(self) -> tuple[DeclaredModel, ...] | None:
        """Return all models that the files name, if a file was added, changed or removed since the last call.

        Otherwise return None.
        """
        found = {path.name: state for path in self._paths() if (state := file_state(path)) is not None}
        if found == self._seen:
            return None
        for name in self._models.keys() - found.keys():
            del self._models[name]
        for name, state in found.items():
            if self._seen.get(name) != state:
                self._read(name)
        self._seen = found
        models = merged(model for name in sorted(self._models) for model in self._models[name])
        for problem in usable_aliases(models)[1]:
            log.error("an alias is not served: %s; change one of the manifests", problem)
        return models

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

    async def watch(self, report: Callable[[tuple[DeclaredModel, ...]], None], poll_seconds: float) -> None:
        """Report each change, for ever."""
        while True:
            await asyncio.sleep(poll_seconds)
            models = self.changed()
            if models is not None:
                report(models)
