"""Leader election: which of several operators acts, as the holder of one Lease, and until when it may write.

A Lease does not fence by itself: a holder that was suspended goes on with what it had decided. So a write is
sent only if it ends, by its timeout, before the lease does. Others wait until they have seen no sign of the
holder for the length of a lease. They measure it with their own clocks, from a later time than the holder does,
so no clock is compared with another one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from medha.errors import MedhaError
from medha_operator.kube.client import ApiError, Cluster
from medha_operator.kube.kinds import LEASE
from medha_operator.operator_settings import OperatorSettings

_log = logging.getLogger(__name__)

_RENEWALS = 3
"""Renewals per lease duration."""
_LONGEST_WRITE_SECONDS = 4.0
_CHECKS_PER_LEASE = 8
"""Polls of somebody else's lease per lease duration."""


def write_seconds(lease_seconds: float) -> float:
    """Return the limit of one write.

    The limit is short enough that a write may be sent at any time, as long as the lease is renewed in time.
    """
    return min(_LONGEST_WRITE_SECONDS, lease_seconds / _RENEWALS)


def uptime_seconds() -> float:
    """Return the time of a clock that goes on while the machine sleeps, unlike Python's monotonic one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class Tenure:
    """The time until which this process may write; never, at first."""

    clock: Callable[[], float] = uptime_seconds
    ends: float = field(default=float("-inf"))

    def covers(self, seconds: float) -> bool:
        """Return whether something that may take `seconds` ends in time."""
        return self.clock() + seconds < self.ends

    def end(self) -> None:
        self.ends = float("-inf")


class LeaseLost(MedhaError):
    """The lease is lost, and somebody else may act now.

    The process recovers by a restart with a fresh view.
    """


class Lease:
    """The Lease of this installation, as seen by `holder`."""

    def __init__(self, cluster: Cluster, tenure: Tenure, holder: str, settings: OperatorSettings) -> None:
        self._cluster = cluster
        self._tenure = tenure
        self._holder = holder
        self._name, self._namespace = settings.lease_name, settings.lease_namespace
        self._seconds = settings.lease_seconds
        self._seen: tuple[str, float] | None = None  # version of another's record, and when it was first seen
        self._mine: dict[str, Any] = {}  # the record as we have written it

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        while not await self._try_to_take():  # noqa: ASYNC110 - it is the API server that is asked
            await asyncio.sleep(self._seconds / _CHECKS_PER_LEASE)
        _log.info("holds the lease %s/%s as %s", self._namespace, self._name, self._holder)

    async def keep(self) -> None:
        """Renew the lease as long as possible.

        Raises:
            LeaseLost: the tenure has ended.
        """
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS)
            while not await self._renewed():
                if not self._tenure.covers(0):
                    self._tenure.end()
                    raise LeaseLost(f"the lease {self._namespace}/{self._name} is lost")
                await asyncio.sleep(self._seconds / _RENEWALS / 5)

    async def release(self) -> None:
        """Release the lease when the writes in flight have ended; no further write is sent.

        The next holder can then begin at once.
        """
        if not self._tenure.covers(0):
            return
        self._tenure.end()
        await self._cluster.settle()
        try:
            await self._write(self._mine, holder="")
        except ApiError as error:
            _log.warning("could not give the lease back: %s", error)

    async def _try_to_take(self) -> bool:
        try:
            found = await self._cluster.get(LEASE, self._namespace, self._name)
            if found is not None and not self._is_free(found):
                return False
            began = self._tenure.clock()
            self._mine = await self._write(found, holder=self._holder)
        except ApiError as error:
            if error.status != 409:  # somebody was faster
                _log.warning("cannot take the lease: %s", error)
            return False
        self._tenure.ends = began + self._seconds
        return True

    async def _renewed(self) -> bool:
        began = self._tenure.clock()
        try:
            self._mine = await self._write(self._mine, holder=self._holder)
        except ApiError as error:
            _log.warning("cannot renew the lease: %s", error)
            if error.status in (404, 409):  # it is somebody else's, or may be: check
                return await self._is_still_mine()
            return False
        self._tenure.ends = began + self._seconds
        return True

    async def _is_still_mine(self) -> bool:
        """Adopt the record after a conflict if it still names us, otherwise stop writing at once.

        Return False in either case, as nothing was renewed.
        """
        try:
            found = await self._cluster.get(LEASE, self._namespace, self._name)
        except ApiError:
            return False
        if found is None or found["spec"].get("holderIdentity") != self._holder:
            self._tenure.end()
        else:
            self._mine = found
        return False

    def _is_free(self, found: dict[str, Any]) -> bool:
        spec, version = found.get("spec", {}), found["metadata"]["resourceVersion"]
        # It is also ours if the container was restarted in its pod.
        if spec.get("holderIdentity") in (None, "", self._holder):
            return True
        now = self._tenure.clock()
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        return now - self._seen[1] >= float(spec.get("leaseDurationSeconds", self._seconds))

    async def _write(self, found: dict[str, Any] | None, holder: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (found or {}).get("spec", {})
        is_same = before.get("holderIdentity") == holder
        spec = {
            "holderIdentity": holder,
            # Kubernetes requires a whole number: it is never less than the duration that we count on
            # ourselves.
            "leaseDurationSeconds": math.ceil(self._seconds) if holder else 1,
            "acquireTime": before.get("acquireTime", now) if is_same else now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions", 0)) + (not is_same and bool(holder)),
        }
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if found is not None:  # usually created by the chart, whose labels stay
            kept = ("resourceVersion", "labels", "annotations", "ownerReferences")
            metadata |= {field: found["metadata"][field] for field in kept if field in found["metadata"]}
        document = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": metadata, "spec": spec}
        return await self._cluster.write_lease(document, is_new=found is None)
