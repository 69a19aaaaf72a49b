"""The program as a whole, before an API server that answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from medha_operator.cluster import Cluster
from medha_operator.program import Program
from medha_operator.settings import OperatorSettings

Document = dict[str, Any]
LEASE_SECONDS = 1.5


class SlowLists:
    """An empty cluster. Once the lease is taken, every list waits until it was renewed so often."""

    def __init__(self, renewals: int) -> None:
        self.writes: list[str] = []
        """Holders of the Lease as written."""
        self._renewals = renewals
        self._has_renewed = asyncio.Event()
        self.caught_up = asyncio.Event()

    async def list(self, *_: object) -> tuple[list[Document], str]:
        if self.writes:
            await asyncio.wait_for(self._has_renewed.wait(), 20 * LEASE_SECONDS)
            self.caught_up.set()
        return [], "1"

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, Document]]:
        await asyncio.Event().wait()
        yield "", {}

    async def get(self, *_: object) -> None:
        return None

    async def write_lease(self, document: Document, *, is_new: bool) -> Document:
        self.writes.append(document["spec"]["holderIdentity"])
        if len(self.writes) > self._renewals:
            self._has_renewed.set()
        return document | {"metadata": document["metadata"] | {"resourceVersion": str(len(self.writes))}}

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass


def test_the_lease_is_renewed_while_a_large_cluster_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two operators would take it from each other for ever."""

    async def run() -> None:
        cluster = SlowLists(renewals=4)  # more than fit into the lease as it was taken

        async def connect(*_: object) -> SlowLists:
            return cluster

        monkeypatch.setattr(Cluster, "connect", connect)
        program = Program(OperatorSettings(lease_seconds=LEASE_SECONDS, metrics_port=0), "me")
        running = asyncio.create_task(program.run())
        caught_up = asyncio.create_task(cluster.caught_up.wait())
        await asyncio.wait((running, caught_up), return_when=asyncio.FIRST_COMPLETED)
        assert caught_up.done(), running.exception()
        running.cancel()
        await asyncio.wait((running,))
        assert cluster.writes == ["me"] * (len(cluster.writes) - 1) + [""]

    asyncio.run(run())
