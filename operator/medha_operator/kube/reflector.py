"""Keep a store in sync with the API server: list, watch from there on, and list again on failure or when due.

A list in regular intervals repairs whatever a watch has missed; it asks for the present state, never for one
that the API server may have cached.
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
"""Seconds after which a watch counts as established. A watch that ends before is not restarted in a tight
loop."""


class Reflector:
    """A reflector of one kind in one namespace, or in all.

    An optional kind may be unknown or forbidden, and then counts as empty.
    """

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
        self._failures = 0  # since a watch has delivered an event, or lasted
        self.is_synced = asyncio.Event()
        """Event that is set once the store holds a list, even an old one."""

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
                        _log.warning("%s cannot be watched, and are left out: %s", self._kind.plural, error)
                    self.is_synced.set()
                    await asyncio.sleep(_ABSENT_SECONDS)
                    continue
                if error.status == 410 and not self._failures:  # a version that is too old: list at once
                    pause = 0.0
                else:  # a successful list does not reset it: lists are costly, and a watch is needed
                    pause = _BACKOFF_SECONDS[min(self._failures, len(_BACKOFF_SECONDS) - 1)]
                    _log.warning(
                        "%s cannot be watched: %s; listing them in %g s", self._kind.plural, error, pause
                    )
                self._failures += 1
                await asyncio.sleep(pause)

    async def refresh(self) -> str:
        """List now, whatever the state of the watch; return the version of the list.

        Raises:
            ApiError: the list was refused or not answered.
            WentBack: the list is older than what was reported before it was requested.
        """
        with self._store.listing(self._namespace) as listing:
            async for page, version in self._cluster.pages(self._kind, self._namespace, self._selector):
                self._store.read_page(listing, page, version)
        return str(listing.version)

    async def catch_up(self) -> None:
        """List until that succeeds, to see everything that has happened until now.

        An optional kind may stay unknown.
        """
        while True:
            try:
                await self.refresh()
            except ApiError as error:
                if self._is_optional and error.status in (403, 404):
                    return
                _log.warning("%s cannot be listed: %s", self._kind.plural, error)
                await asyncio.sleep(_BACKOFF_SECONDS[0])
            else:
                return

    async def _follow(self, version: str) -> None:
        """Watch until the next list is due; a watch that ends before is resumed where it ended."""
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
            if not has_lasted:  # no tight loop on a server that ends the watch at once, or is gone
                await asyncio.sleep(_LASTING_SECONDS)
