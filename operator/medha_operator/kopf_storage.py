"""Storages for kopf that store no part of the resources that it observes.

Otherwise kopf would copy each document, to find out what has changed since a handler last saw it, and record
that on the resource. No handler here asks for a change, and the copies took a tenth of the operator's CPU.
"""

from __future__ import annotations

from typing import Any

import kopf


class NoDifferences(kopf.DiffBaseStorage):
    """Does not store the last handled state."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Writes nothing."""


class NoProgress(kopf.ProgressStorage):
    """Keeps nothing of handlers that have to be retried."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Writes nothing."""

    def purge(self, **_: Any) -> None:
        """Writes nothing."""

    def touch(self, **_: Any) -> None:
        """Writes nothing."""

    def clear(self, *, essence: Any) -> Any:
        return essence
