"""Keeps a store like the API server: list, watch from there on, and list again when that fails or is due.

A list in regular intervals repairs whatever a watch has kept from us; it asks for the present, never for what a cache
of the API server may hold.
"""

from __future__ import annotations

import asyncio
import logging

from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import Kind
from medha_operator.kube.store import Store

_log = logging.getLogger(__name__)

_BACKOFF_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ABSENT_SECONDS = 60.0
_LASTING_SECONDS = 1.0
"""A watch that has lasted so long has begun well. What ends before is not asked for again in a loop."""


class Reflector:
    """Of one kind in one namespace, or in all. An optional kind may be unknown or forbidden, and counts as empty then."""

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind,
        store: Store,
        *,
        namespace: str | None,
        selector: str,
        relist_seconds: float,
        is_optional: bool = False,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._store = store
        self._namespace = namespace
        self._selector = selector
        self._relist_seconds = relist_seconds
        self._is_optional = is_optional
        self._failures = 0  # since a watch has told something, or lasted
        self.is_synced = asyncio.Event()
        """Whether the store holds a list, be it an old one."""

    async def run(self) -> None:
        """Reflect until cancelled."""
        while True:
            try:
                version = await self.refresh()
                self.is_synced.set()
                await self._follow(version)
            except ApiError as error:
                if self._is_optional and error.status in (403, 404):
                    if not self.is_synced.is_set():
                        _log.warning("%s cannot be watched, goes on without: %s", self._kind.plural, error)
                    self.is_synced.set()
                    await asyncio.sleep(_ABSENT_SECONDS)
                    continue
                if error.status == 410 and not self._failures:  # a version that is too old: list at once
                    pause = 0.0
                else:  # lists that succeed do not count: of many objects one costs much, and a watch is needed
                    pause = _BACKOFF_SECONDS[min(self._failures, len(_BACKOFF_SECONDS) - 1)]
                    _log.warning("%s: %s; listed again in %g s", self._kind.plural, error, pause)
                self._failures += 1
                await asyncio.sleep(pause)

    async def refresh(self) -> str:
        """List now, whatever the watch is at; returns the version of the list.

        Raises:
            ApiError: the list was refused or not answered.
            WentBack: the list is older than what was told before it was asked for.
        """
        known = self._store.told_until(self._namespace)
        documents, version = await self._cluster.list(self._kind, self._namespace, self._selector)
        self._store.replace(documents, version, self._namespace, known)
        return version

    async def catch_up(self) -> None:
        """See everything that has happened until now; an optional kind may stay unknown."""
        while True:
            try:
                await self.refresh()
            except ApiError as error:
                if self._is_optional and error.status in (403, 404):
                    return
                _log.warning("%s: %s", self._kind.plural, error)
                await asyncio.sleep(_BACKOFF_SECONDS[0])
            else:
                return

    async def _follow(self, version: str) -> None:
        """Watch until the next list is due; a watch that ends before goes on where it ended."""
        clock = asyncio.get_running_loop().time
        due = clock() + self._relist_seconds
        while (left := due - clock()) > 0:
            began = clock()
            try:
                async for event, document in self._cluster.watch(
                    self._kind, self._namespace, self._selector, version, left
                ):
                    version = document["metadata"]["resourceVersion"]
                    self._store.see(event, document, self._namespace)
                    self._failures = 0
            except ApiError as error:
                if error.status != 0:
                    raise
            finally:
                has_lasted = clock() - began >= _LASTING_SECONDS
                if has_lasted:
                    self._failures = 0
            if not has_lasted:  # neither a server that ends at once nor one that is gone is asked in a loop
                await asyncio.sleep(_LASTING_SECONDS)
