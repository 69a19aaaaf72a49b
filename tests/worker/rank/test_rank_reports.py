"""Reports of a rank: when they are sent, and what they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from medha.cost.hardware import LLAMA3_8B
from medha.cost.step_estimates import StepCosts, StepWork
from medha.wire.messages import Message, RankReport, RankXid
from medha_worker.device import Device, InOrder
from medha_worker.host_memory import HostMemory, MemoryFigures
from medha_worker.rank.rank_reports import REPORT_SECONDS, RankReports
from medha_worker.rank.step_recorder import StepRecorder

from ..nvml_double import UUID, Nvml
from ..test_nvml import EVERYTHING, opened

H200 = "NVIDIA H200"


class Memory(HostMemory):
    """A memory that fills up by a byte with each question."""

    used = 0

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)

    def figures(self) -> MemoryFigures:
        self.used += 1
        self.asked.release()
        return MemoryFigures(100, self.used, 100 - self.used)


class Late:
    """A mark that the device passes one second later than the one before."""

    passed_at = 0.0

    def seconds_until(self, later: Late) -> float:
        return later.passed_at - self.passed_at


class Launching(InOrder):
    """A device that takes a second for what the host launches at once."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks = 0.0

    def timed_mark(self) -> Late:  # type: ignore[override]
        mark = Late()
        mark.passed_at = self.marks
        self.marks += 1.0
        return mark


class Sending:
    """A rank's reports, with a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent: list[Message] = []
        self.library = Nvml(reasons=0x04 | 0x40)
        self.memory = Memory()
        self.recorder = StepRecorder(3, lambda: self.now)
        self.reports = RankReports(3, "first", self.recorder, self.sent.append, lambda: self.now)

    def begin(self, device_name: str = H200, element_bytes: int = 2) -> None:
        device = Device(torch.device("cpu"), torch.bfloat16, self.memory, Launching(), device_name, UUID)
        self.reports.begin(device, replace(LLAMA3_8B, dtype_bytes=element_bytes), opened(self.library))

    def take(self) -> list[Message]:
        """Return what was sent since the last call."""
        taken, self.sent[:] = list(self.sent), []
        return taken

    def report(self) -> RankReport:
        self.reports.send_due(is_serving=True, at_once=True)
        (report,) = self.take()
        assert isinstance(report, RankReport)
        return report


@pytest.fixture
def sending() -> Iterator[Sending]:
    sending = Sending()
    yield sending
    sending.reports.close()


def test_reports_are_sent_at_an_interval_at_once_when_asked_and_only_in_an_epoch(sending: Sending) -> None:
    sending.reports.send_due(is_serving=True, at_once=True)
    assert sending.take() == [], "the weights are not loaded"
    sending.begin()
    sending.reports.send_due(is_serving=False)
    assert sending.take() == []
    counts = []
    for at_once in (False, False, True, False):
        sending.reports.send_due(is_serving=True, at_once=at_once)
        counts.append(len(sending.take()))
    sending.now += REPORT_SECONDS
    sending.reports.send_due(is_serving=True)
    assert (counts, len(sending.take())) == ([1, 0, 1, 0], 1)


def test_a_report_has_the_steps_the_estimates_and_the_device(sending: Sending) -> None:
    sending.begin()
    work = StepWork(64, 64, 10_000, 9_000)
    for _ in range(2):
        sending.recorder.begin(1)
        sending.recorder.prepared(99.0, 99.25)
        sending.recorder.planned()
        sending.recorder.forward_done()
        sending.now += 4.0
        sending.recorder.end(ran=True)
        sending.reports.add(work)
    report = sending.report()
    assert (report.rank, report.incarnation, report.steps, report.ahead_seconds) == (3, "first", 2, 0.5)
    assert dict(report.part_seconds) == {"prepare": 0.0, "forward": 2.0, "sample": 6.0}, (
        "by the device's marks"
    )
    assert report.flops == 2 * StepCosts.of(LLAMA3_8B).flops(work)
    assert report.read_bytes == 2 * StepCosts.of(LLAMA3_8B).read_bytes(work)
    assert (report.device, report.uuid, report.gpu) == (H200, UUID, EVERYTHING)
    assert (report.peak_flops_per_second, report.peak_bytes_per_second) == (989e12, 4.8e12)
    assert report.memory_bytes == (("total", 100), ("used", 1), ("free", 99))
    assert report.pod


@pytest.mark.parametrize(("name", "element_bytes"), [(H200, 4), ("NVIDIA X1", 2)])
def test_an_unknown_peak_is_not_reported(sending: Sending, name: str, element_bytes: int) -> None:
    sending.begin(name, element_bytes)
    report = sending.report()
    assert (report.peak_flops_per_second, report.peak_bytes_per_second) == (0.0, 0.0)


def test_figures_are_read_again_after_each_report(sending: Sending) -> None:
    sending.begin()
    assert dict(sending.report().memory_bytes)["used"] == 1
    for _ in range(2):
        assert sending.memory.asked.acquire(timeout=10)
    sending.reports.close()  # until the thread that reads them has stored them
    assert dict(sending.report().memory_bytes)["used"] == 2


def test_the_main_thread_sends_an_error_of_the_device_at_its_next_turn_and_once(sending: Sending) -> None:
    sending.begin()
    sending.library.events.append((8, 79))
    until = time.monotonic() + 10
    while not sending.reports.recent_xid() and time.monotonic() < until:
        time.sleep(0.001)
    sending.reports.send_due(is_serving=False)
    sending.reports.send_due(is_serving=False)
    assert sending.take() == [RankXid(3, 79)]
    assert (
        sending.reports.recent_xid()
        == "; its GPU reported Xid 79 (the GPU is no longer on the bus) 0.0 s before"
    )
