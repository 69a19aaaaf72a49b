"""A double of the module `pynvml`: the functions that we call, for one device, as NVML's reference documents them."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

UUID = "GPU-6f1b3c9e-0000-4a6b-9d1c-0123456789ab"
HANDLE = "handle"


class NVMLError(Exception):
    """What every failed call raises."""


class NVMLError_NotSupported(NVMLError):  # noqa: N801 - the name is pynvml's
    """The device has no such figure."""


class NVMLError_Timeout(NVMLError):  # noqa: N801 - the name is pynvml's
    """No event has come."""


class Nvml:
    """NVML with one device; `missing` are functions that this device does not support."""

    NVMLError = NVMLError
    NVMLError_Timeout = NVMLError_Timeout
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - the name is pynvml's

    def __init__(self, *, missing: tuple[str, ...] = (), reasons: int = 0) -> None:
        self.missing, self.reasons = missing, reasons
        self.events: deque[tuple[int, int] | NVMLError] = deque()  # type and data of each event, or a failure
        self.opened = 0
        self.event_sets = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvmlDevice") and name in object.__getattribute__(self, "missing"):

            def fails(*_: Any) -> None:
                raise NVMLError_NotSupported("Not Supported")

            return fails
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.missing:
            raise NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return HANDLE

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        assert handle == HANDLE
        return {self.NVML_CLOCK_SM: 1755, self.NVML_CLOCK_MEM: 2619}[clock]  # MHz

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=87, memory=41)  # per cent

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 64

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 512_300  # mW

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlEventSetCreate(self) -> str:
        self.event_sets += 1
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        assert (handle, types, events) == (HANDLE, self.nvmlEventTypeXidCriticalError, "events")

    def nvmlEventSetFree(self, events: str) -> None:
        self.event_sets -= 1

    def nvmlEventSetWait_v2(self, events: str, timeout_milliseconds: int) -> Any:
        if not self.events:
            time.sleep(0.001)  # as if it waited
            raise NVMLError_Timeout("Timeout")
        event = self.events.popleft()
        if isinstance(event, NVMLError):
            raise event
        return SimpleNamespace(eventType=event[0], eventData=event[1])
