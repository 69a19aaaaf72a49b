"""A thread that reads the figures of a rank's device, and one that waits for its errors: steps wait for neither."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from time import monotonic

from medha.wire.messages import GpuFigures
from medha_worker.host_memory import MemoryFigures
from medha_worker.nvml import GpuProbe, LatestXid, xid_text

UNSENT_SECONDS = 1.0
"""Longest time for the main thread to send an error of the device, before another thread does."""
CLOSE_SECONDS = 3.0
"""Longest wait for the threads to end: a device that is gone may never answer."""

_log = logging.getLogger("medha.device")


class DeviceWatch:
    """The latest figures of one device, and its latest error."""

    def __init__(
        self,
        memory: Callable[[], MemoryFigures],
        probe: GpuProbe | None,
        on_xid: Callable[[int], object],
        on_unsent: Callable[[], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Read the first figures.

        `memory` and `probe` are read on a thread of this object. On another one, `on_xid` is called with the number of
        each error, and `on_unsent` UNSENT_SECONDS later, in case the main thread is stuck. `clock` returns seconds.
        """
        self._read_memory, self._probe, self._clock = memory, probe, clock
        self._on_xid, self._on_unsent = on_xid, on_unsent
        self._latest_xid = LatestXid(clock)
        self._wanted, self._ended = Event(), Event()
        self.memory: MemoryFigures | None = None
        """The latest figures of the memory."""
        self.gpu: GpuFigures | None = None
        """The latest figures of the device's management; None without one."""
        self._read()
        self._threads = [Thread(target=self._read_on_request, daemon=True, name="device figures")]
        if probe is not None and probe.reports_xids:
            self._threads.append(Thread(target=self._wait_for_xids, daemon=True, name="device errors"))
        for thread in self._threads:
            thread.start()

    def refresh(self) -> None:
        """Let the figures be read again, for the next report; return at once."""
        self._wanted.set()

    def recent_xid(self) -> str:
        """Return the device's latest error (`LatestXid`) as the end of a sentence; empty if none is recent."""
        heard = self._latest_xid.recent()
        return "" if heard is None else f"; its GPU reported {xid_text(heard[0])} {heard[1]:.1f} s before"

    def close(self) -> None:
        """End both threads."""
        self._ended.set()
        self._wanted.set()
        until = self._clock() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - self._clock()))
        if self._probe is not None and not any(thread.is_alive() for thread in self._threads):
            self._probe.close()

    def _read(self) -> None:
        try:
            self.memory = self._read_memory()
        except (
            OSError,
            RuntimeError,
        ) as error:  # the device may be gone, which its rank learns from its steps
            _log.debug("the memory's figures cannot be read: %s", error)
            self.memory = None
        self.gpu = self._probe.figures() if self._probe is not None else None

    def _read_on_request(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._ended.is_set():
                return
            self._read()

    def _wait_for_xids(self) -> None:
        assert self._probe is not None
        while self._probe.reports_xids and not self._ended.is_set():
            xid = self._probe.wait_for_xid()
            if xid is not None:
                _log.error("the GPU of this rank reports %s", xid_text(xid))
                self._on_xid(xid)
                self._latest_xid.hear(xid)
                self._ended.wait(UNSENT_SECONDS)
                self._on_unsent()
