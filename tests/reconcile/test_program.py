"""The whole program, with an API server that answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import GANGS, Kind
from medha_operator.operator_settings import OperatorSettings
from medha_operator.program import Program
from reconcile.test_definitions import described

Document = dict[str, Any]
LEASE_SECONDS = 1.5


class SlowLists:
    """An empty cluster. Once the lease is taken, every list waits until it was renewed so often."""

    def __init__(self, renewals: int, unknown: Collection[Kind] = ()) -> None:
        self.writes: list[str] = []
        """Holders of the Lease as written."""
        self._unknown = unknown
        self._renewals = renewals
        self._has_renewed = asyncio.Event()
        self.caught_up = asyncio.Event()

    async def pages(self, kind: Kind, *_: object) -> AsyncIterator[tuple[list[Document], str]]:
        if kind in self._unknown:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if self.writes:
            await asyncio.wait_for(self._has_renewed.wait(), 20 * LEASE_SECONDS)
            self.caught_up.set()
        yield [], "1"

    async def watch(self, *_: object) -> AsyncIterator[tuple[str, Document]]:
        await asyncio.Event().wait()
        yield "", {}

    async def get(self, *_: object) -> None:
        return None

    async def describe(self, _: str) -> Document:
        return described()

    async def write_lease(self, document: Document, *, is_new: bool) -> Document:
        self.writes.append(document["spec"]["holderIdentity"])
        if len(self.writes) > self._renewals:
            self._has_renewed.set()
        return document | {"metadata": document["metadata"] | {"resourceVersion": str(len(self.writes))}}

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def lead(cluster: SlowLists, settings: OperatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program until it has listed everything as the leader."""

    async def connect(*_: object) -> SlowLists:
        return cluster

    monkeypatch.setattr(Cluster, "connect", connect)
    running = asyncio.create_task(Program(settings, "me").run())
    caught_up = asyncio.create_task(cluster.caught_up.wait())
    await asyncio.wait((running, caught_up), return_when=asyncio.FIRST_COMPLETED, timeout=20 * LEASE_SECONDS)
    assert caught_up.done(), running.exception() if running.done() else "it does not lead"
    running.cancel()
    await asyncio.wait((running,))


def test_the_lease_is_renewed_while_a_large_cluster_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two operators would take it from each other for ever."""

    async def run() -> None:
        cluster = SlowLists(renewals=4)  # more than fit into the lease as it was taken
        settings = OperatorSettings(lease_seconds=LEASE_SECONDS, metrics_port=0)
        await lead(cluster, settings, monkeypatch)
        assert cluster.writes == ["me"] * (len(cluster.writes) - 1) + [""]

    asyncio.run(run())


def test_a_gang_scheduler_that_is_not_installed_keeps_nobody_from_leading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        settings = OperatorSettings(
            gang_apis=("core", "volcano"), lease_seconds=LEASE_SECONDS, metrics_port=0
        )
        await lead(SlowLists(0, unknown=tuple(GANGS.values())), settings, monkeypatch)

    asyncio.run(run())
