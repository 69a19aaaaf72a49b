"""Figures and errors of a GPU's management library: read where it is there, left out where it is not."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from medha.observing.metric_catalogue import THROTTLE_MEANINGS
from medha.wire.messages import GpuFigures
from medha_worker.host_memory import HostMemory, MemoryFigures
from medha_worker.nvml import (
    NOTICE_XIDS,
    PROGRAM_XIDS,
    RECENT_SECONDS,
    THROTTLE_REASONS,
    XID_MEANINGS,
    LatestXid,
    NvmlProbe,
    nvml_uuid,
    open_probe,
    xid_cause,
    xid_text,
)
from medha_worker.rank.device_watch import DeviceWatch

from .nvml_double import UUID, Nvml, NVMLError

ROOT = Path(__file__).parents[2]
EVERYTHING = GpuFigures(
    clock_hertz=(("sm", 1755e6), ("memory", 2619e6)),
    throttled=("power_cap", "hardware_thermal"),
    temperature_celsius=64.0,
    power_watts=512.3,
    power_limit_watts=700.0,
    utilisation=(("compute", 0.87), ("memory", 0.41)),
)


def opened(library: Nvml) -> NvmlProbe:
    probe = open_probe(UUID, lambda: library)
    assert isinstance(probe, NvmlProbe)
    return probe


def test_every_figure_has_its_unit() -> None:
    assert opened(Nvml(reasons=0x04 | 0x40)).figures() == EVERYTHING


def test_idle_clocks_and_settings_are_no_throttling() -> None:
    assert opened(Nvml(reasons=0x1 | 0x2 | 0x10 | 0x100)).figures().throttled == ()


def test_an_older_driver_names_the_reasons_by_the_older_call() -> None:
    library = Nvml(missing=("nvmlDeviceGetCurrentClocksEventReasons",), reasons=0x20)
    assert opened(library).figures().throttled == ("software_thermal",)


def test_a_figure_that_a_device_does_not_have_is_left_out_and_the_others_stay() -> None:
    every = [name for name in vars(Nvml) if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    assert opened(Nvml(missing=tuple(every))).figures() == GpuFigures()
    library = Nvml(missing=("nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage"), reasons=0x04 | 0x40)
    figures = opened(library).figures()
    assert (figures.clock_hertz, figures.power_watts) == ((), None)
    assert (figures.temperature_celsius, figures.power_limit_watts) == (64.0, 700.0)


def not_installed() -> Any:
    raise ImportError("No module named 'pynvml'")


@pytest.mark.parametrize(
    ("uuid", "load", "reason"),
    [
        (UUID, not_installed, "nvidia-ml-py is not installed"),
        (UUID, lambda: Nvml(missing=("nvmlInit",)), "Driver Not Loaded"),
        ("GPU-another", Nvml, "Not Found"),
    ],
)
def test_one_line_says_why_there_are_no_figures(
    caplog: pytest.LogCaptureFixture, uuid: str, load: Callable[[], Any], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        assert open_probe(uuid, load) is None
    (record,) = caplog.records
    assert uuid in record.getMessage()
    assert reason in record.getMessage()


def test_a_slice_of_a_gpu_is_known_by_its_own_uuid() -> None:
    assert nvml_uuid("NVIDIA H100 80GB HBM3", "6f1b3c9e") == "GPU-6f1b3c9e"
    assert nvml_uuid("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "6f1b3c9e") == "MIG-6f1b3c9e"


def test_a_critical_error_is_found_and_other_events_are_not_one() -> None:
    library = Nvml()
    probe = opened(library)
    library.events += [(1, 5), (8, 79)]
    assert [probe.wait_for_xid() for _ in range(3)] == [None, 79, None]
    library.events.append(NVMLError("GPU is lost"))
    assert probe.wait_for_xid() is None
    assert not probe.reports_xids
    probe.close()


def test_a_device_that_reports_no_errors_still_has_figures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        probe = opened(Nvml(missing=("nvmlDeviceRegisterEvents",)))
    assert "errors of the GPU are not reported" in caplog.text
    assert not probe.reports_xids
    assert probe.figures().temperature_celsius == 64.0


def test_closing_gives_back_what_was_opened() -> None:
    library = Nvml()
    opened(library).close()
    assert (library.opened, library.event_sets) == (0, 0)


def test_errors_are_named_and_those_of_programs_are_no_defect_of_the_device() -> None:
    assert xid_text(79) == "Xid 79 (the GPU is no longer on the bus)"
    assert xid_text(99999) == "Xid 99999"
    assert [xid_cause(xid) for xid in (13, 31, 48, 79, 109, 99999)] == [*["program"] * 2, *["device"] * 4]
    assert [xid_cause(xid) for xid in (63, 154)] == ["notice"] * 2
    assert XID_MEANINGS.keys() >= PROGRAM_XIDS | NOTICE_XIDS
    assert not PROGRAM_XIDS & NOTICE_XIDS
    assert set(THROTTLE_REASONS.values()) == set(THROTTLE_MEANINGS)


def test_what_a_failing_device_reports_next_does_not_hide_the_error() -> None:
    now = 100.0
    latest = LatestXid(lambda: now)
    assert latest.recent() is None
    latest.hear(45)
    assert latest.recent() == (45, 0.0), "it is all that there is"
    for xid in (48, 45, 63, 154):
        latest.hear(xid)
        now += 1.0
    assert latest.recent() == (48, 4.0)
    latest.hear(95)
    assert latest.recent() == (95, 0.0), "the latest of the device"
    now += RECENT_SECONDS + 1.0
    assert latest.recent() is None
    latest.hear(31)
    assert latest.recent() == (31, 0.0)


# --- the threads that read it -------------------------------------------------------------------------------


class Heard:
    """What a watch has reported, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.xids: list[int] = []
        self.unsent = threading.Event()

    def watch(self, library: Nvml | None, memory: Callable[[], MemoryFigures] | None = None) -> DeviceWatch:
        return DeviceWatch(
            memory or HostMemory().figures,
            None if library is None else opened(library),
            self.xids.append,
            self.unsent.set,
            lambda: self.now,
        )


def test_an_error_is_reported_at_once_and_named_as_the_reason_of_a_loss_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library, heard = Nvml(), Heard()
    library.events.append((8, 48))
    watch = heard.watch(library)
    assert heard.unsent.wait(10), "for the case that the main thread is stuck"
    assert heard.xids == [48]
    heard.now += 1.5
    assert watch.recent_xid() == "; its GPU reported Xid 48 (an uncorrectable memory error) 1.5 s before"
    heard.now += RECENT_SECONDS
    assert watch.recent_xid() == ""
    watch.close()
    assert "the GPU of this rank reports Xid 48" in caplog.text
    assert library.opened == 0


def test_figures_are_read_again_on_request_and_never_by_the_one_who_asks() -> None:
    readers: list[int] = []
    done = threading.Semaphore(0)

    def memory() -> MemoryFigures:
        readers.append(threading.get_ident())
        done.release()
        return MemoryFigures(100, len(readers), 50)

    watch = Heard().watch(None, memory)
    assert done.acquire(timeout=10)
    assert watch.memory == MemoryFigures(100, 1, 50)
    watch.refresh()
    assert done.acquire(timeout=10)
    watch.close()
    assert watch.memory == MemoryFigures(100, 2, 50)
    assert watch.gpu is None
    assert readers[1] != threading.get_ident()


def test_a_device_that_is_gone_has_no_figures_and_ends_nothing() -> None:
    def gone() -> MemoryFigures:
        raise RuntimeError("CUDA error: the GPU has fallen off the bus")

    watch = Heard().watch(Nvml(missing=("nvmlDeviceGetTemperature",)), gone)
    assert watch.memory is None
    assert watch.gpu is not None
    watch.close()


def test_a_hosts_memory_is_in_proportion() -> None:
    figures = HostMemory().figures()
    assert 0 < figures.used < figures.total
    assert 0 < figures.free < figures.total


# --- the real binding on a library of ours ------------------------------------------------------------------

LIBRARY = """
#include <string.h>
typedef struct { unsigned int gpu, memory; } Rates;
typedef struct { void *device; unsigned long long type, data; unsigned int gi, ci; } Event;
static char device, events;
static int waits;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "an error of the double"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) { *found = &device; return strcmp(uuid, "UUID_HERE") ? 6 : 0; }
int nvmlDeviceGetClockInfo(void *d, int clock, unsigned int *mhz)
{ *mhz = clock == 1 ? 1755 : clock == 2 ? 2619 : 0; return d == &device ? 0 : 2; }
int nvmlDeviceGetUtilizationRates(void *d, Rates *rates) { rates->gpu = 87; rates->memory = 41; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *reasons) { *reasons = 0x44; return 0; }
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned int *celsius) { *celsius = sensor ? 0 : 64; return 0; }
int nvmlDeviceGetPowerUsage(void *d, unsigned int *mw) { *mw = 512300; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned int *mw) { *mw = 700000; return 0; }
int nvmlEventSetCreate(void **set) { *set = &events; return 0; }
int nvmlDeviceRegisterEvents(void *d, unsigned long long types, void *set) { return types == 8 && set == &events ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, Event *event, unsigned int ms)
{ if (waits++) return 10; event->device = &device; event->type = 8; event->data = 79; return 0; }
int nvmlEventSetFree(void *set) { return set == &events ? 0 : 2; }
"""


def test_the_real_binding_calls_a_library_with_nvmls_functions(tmp_path: Path) -> None:
    """nvidia-ml-py loads `libnvidia-ml.so.1` by name, so it loads ours in a process of its own."""
    if shutil.which("cc") is None or find_spec("pynvml") is None:
        assert not os.environ.get("CI"), "no cc or no nvidia-ml-py"
        pytest.skip("no cc or no nvidia-ml-py")
    source = tmp_path / "nvml.c"
    source.write_text(LIBRARY.replace("UUID_HERE", UUID), encoding="utf-8")
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(source)], check=True)
    code = (
        "from medha_worker.nvml import open_probe\n"
        f"probe = open_probe({UUID!r})\n"
        "print(probe.figures())\n"
        "print(probe.wait_for_xid(), probe.wait_for_xid(), probe.reports_xids)\n"
        "probe.close()\n"
        "print(open_probe('GPU-another'))\n"
    )
    paths = [
        str(ROOT / "core"),
        str(ROOT / "worker"),
        sysconfig.get_path("purelib"),
        os.environ.get("PYTHONPATH", ""),
    ]
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(EVERYTHING), "79 None True", "None"]
