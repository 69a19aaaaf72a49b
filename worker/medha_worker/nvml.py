"""NVIDIA's management library (NVML): clocks, temperature, power and errors of one GPU, where the library is there.

`nvidia-ml-py` is an optional dependency, of the extra `gpu`. Without it, without a driver or without the device there are no
figures, and one line in the log says why. A figure that a device does not have is left out. Nothing here needs torch.

docs/gpu.md has what a driver has answered. No Xid error was seen: that they arrive is unproven.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from medha.wire.messages import GpuFigures

EVENT_WAIT_MILLISECONDS = 1000
"""Longest wait for an event; a wait cannot be interrupted, so it bounds how long closing takes."""

RECENT_SECONDS = 30.0
"""Age up to which an error of a GPU is named as a possible reason why its rank is lost."""

THROTTLE_REASONS = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
"""Bits of NVML's reasons for lower clocks, and their names in metrics; idle clocks and settings are no throttling."""

XID_MEANINGS = {
    13: "an exception in a kernel",
    31: "a kernel read or wrote memory that is not its own",
    43: "the GPU stopped this process's work",
    45: "this process's work was removed after an earlier error",
    48: "an uncorrectable memory error",
    62: "a halt of the GPU's microcontroller",
    63: "memory was retired or remapped",
    64: "memory could not be retired or remapped",
    68: "an exception in the video decoder",
    69: "an error in the class of a kernel's commands",
    74: "an NVLink error",
    79: "the GPU is no longer on the bus",
    92: "many correctable memory errors",
    94: "an uncorrectable memory error, contained in one process",
    95: "an uncorrectable memory error that was not contained",
    109: "a time-out of a change of context",
    119: "the GPU's system processor does not answer",
    120: "an error in the GPU's system processor",
    137: "an access over NVLink that is not allowed",
    140: "an unrecovered memory error",
    143: "the GPU could not be initialised",
    154: "what the GPU needs for its recovery has changed",
} | dict.fromkeys(range(144, 151), "an NVLink error")
"""Meanings of NVIDIA's error numbers, in short; its page "Xid Errors" has all of them."""
PROGRAM_XIDS = frozenset({13, 31, 43, 45, 68, 69, 137})
"""Errors for which NVIDIA's catalogue resets no GPU: as a rule a program causes them, and it is started again."""
NOTICE_XIDS = frozenset({63, 154})
"""Errors for which the catalogue asks for no action: memory that was remapped, and a summary of other errors."""

_Figure = TypeVar("_Figure")
_log = logging.getLogger("medha.device")


def xid_text(xid: int) -> str:
    """Return an error number with its meaning, if it is known."""
    meaning = XID_MEANINGS.get(xid)
    return f"Xid {xid} ({meaning})" if meaning else f"Xid {xid}"


def xid_cause(xid: int) -> str:
    """Return the value of the label `cause`: `program`, `notice` or `device`."""
    return "program" if xid in PROGRAM_XIDS else "notice" if xid in NOTICE_XIDS else "device"


class LatestXid:
    """The error of a GPU that explains most of what happens now: the latest one of the device, or else the latest one.

    Where a device fails, it reports soon after that it has ended a process (45), remapped memory (63), and so on.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` returns seconds."""
        self._now = now
        self._heard: tuple[int, float] | None = None

    def hear(self, xid: int) -> None:
        """Note an error that has just been reported."""
        known = self.recent()
        if known is None or xid_cause(known[0]) != "device" or xid_cause(xid) == "device":
            self._heard = xid, self._now()

    def recent(self) -> tuple[int, float] | None:
        """Return the error and its age in seconds, unless it is older than RECENT_SECONDS."""
        if self._heard is None or self._now() - self._heard[1] > RECENT_SECONDS:
            return None
        return self._heard[0], self._now() - self._heard[1]


def is_slice(device_name: str) -> bool:
    """Return whether a device is a slice of a GPU (MIG), by the name that CUDA gives it."""
    return " MIG " in device_name


def nvml_uuid(device_name: str, uuid: str) -> str:
    """Return the UUID that CUDA gives a device as NVML writes it: a slice of a GPU (MIG) has one of its own."""
    return f"{'MIG' if is_slice(device_name) else 'GPU'}-{uuid}"


class GpuProbe(Protocol):
    """The management side of one GPU. Its calls take milliseconds, and may be made by any thread."""

    def figures(self) -> GpuFigures:
        """Return what the device reports now."""
        ...

    @property
    def reports_xids(self) -> bool:
        """True while the device's errors are reported."""
        ...

    def wait_for_xid(self) -> int | None:
        """Wait for a critical error, no longer than EVENT_WAIT_MILLISECONDS; return its number."""
        ...

    def close(self) -> None: ...


def open_probe(uuid: str, load: Callable[[], Any] | None = None) -> GpuProbe | None:
    """Return the management side of the GPU with this UUID, or None: the log says why.

    `load` returns the module `pynvml`, or raises ImportError.
    """
    try:
        library = (load or _pynvml)()
    except ImportError:
        _log.info("no metrics of %s: nvidia-ml-py is not installed (the extra `gpu` has it)", uuid)
        return None
    try:
        library.nvmlInit()
        return NvmlProbe(library, library.nvmlDeviceGetHandleByUUID(uuid))
    except library.NVMLError as error:
        _log.warning("no metrics of %s: NVML says: %s", uuid, error)
        return None


def _pynvml() -> Any:
    import pynvml

    return pynvml


class NvmlProbe:
    """`GpuProbe` of a device that NVML knows."""

    def __init__(self, library: Any, handle: Any) -> None:
        """`library` is the module `pynvml`, initialised; `handle` is one of its devices."""
        self._nvml, self._handle = library, handle
        self._events = self._registered_events()

    def _registered_events(self) -> Any | None:
        """Return an event set for critical errors; None if the device reports none."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            _log.info("errors of the GPU are not reported: NVML says: %s", error)
            return None
        return events

    def figures(self) -> GpuFigures:
        nvml, handle = self._nvml, self._handle
        clocks = (
            ("sm", self._get(lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            ("memory", self._get(lambda: 1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
        )
        rates = self._get(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        reasons = self._get(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        if reasons is None:  # drivers before 535 know the older name alone
            reasons = self._get(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
        return GpuFigures(
            clock_hertz=tuple((name, hertz) for name, hertz in clocks if hertz is not None),
            throttled=None
            if reasons is None
            else tuple(name for bit, name in THROTTLE_REASONS.items() if reasons & bit),
            temperature_celsius=self._get(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            power_watts=self._get(lambda: 1e-3 * nvml.nvmlDeviceGetPowerUsage(handle)),
            power_limit_watts=self._get(lambda: 1e-3 * nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),
            utilisation=()
            if rates is None
            else (("compute", rates.gpu / 100), ("memory", rates.memory / 100)),
        )

    def _get(self, read: Callable[[], _Figure]) -> _Figure | None:
        """Return a figure, or None from a device or driver that does not have it."""
        try:
            return read()
        except self._nvml.NVMLError:
            return None

    def wait_for_xid(self) -> int | None:
        nvml = self._nvml
        if self._events is None:
            return None
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, EVENT_WAIT_MILLISECONDS)
        except nvml.NVMLError_Timeout:
            return None
        except nvml.NVMLError as error:
            _log.warning("errors of the GPU are no longer reported: NVML says: %s", error)
            self._events = None
            return None
        is_xid = event.eventType & nvml.nvmlEventTypeXidCriticalError
        return int(event.eventData) if is_xid else None

    @property
    def reports_xids(self) -> bool:
        """True while the device's errors are reported."""
        return self._events is not None

    def close(self) -> None:
        if self._events is not None:
            self._nvml.nvmlEventSetFree(self._events)
            self._events = None
        self._nvml.nvmlShutdown()
