"""Metrics of ranks and devices: counted from the reports' growth, shown while an epoch lasts, and refused if impossible."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from medha.errors import WireInvalid
from medha.observing.metric_catalogue import RANK_METRICS, STEP_PARTS
from medha.topology import Topology
from medha.wire.frames import decode, encode
from medha.wire.messages import Failed, GpuFigures, RankReport, RankXid
from medha_process.part_settings import ControllerSettings
from medha_worker.controller.rank_metrics import RankMetrics
from medha_worker.controller.trace_writer import read_trace
from situations.recording import record

from .test_controller import Stage

GPU = GpuFigures(
    clock_hertz=(("sm", 1755e6), ("memory", 2619e6)),
    throttled=(),
    temperature_celsius=64.0,
    power_watts=512.3,
    power_limit_watts=700.0,
    utilisation=(("compute", 0.87), ("memory", 0.41)),
)
REPORT = RankReport(
    rank=3,
    incarnation="first",
    steps=10,
    part_seconds=(("forward", 2.0), ("sample", 0.5)),
    ahead_seconds=0.25,
    flops=1e15,
    read_bytes=1e12,
    pod="r-l1-0",
    device="NVIDIA H100 80GB HBM3",
    uuid="GPU-1",
    peak_flops_per_second=989e12,
    peak_bytes_per_second=3.35e12,
    memory_bytes=(("total", 80), ("used", 60), ("free", 15)),
    gpu=GPU,
)
LATER = replace(
    REPORT, steps=14, part_seconds=(("forward", 3.0), ("sample", 0.5), ("all_reduce", 0.125)), ahead_seconds=0.5,
    flops=3e15, read_bytes=4e12,
)  # fmt: skip


class Exported:
    """Metrics of four ranks, and what is read of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RankMetrics(Topology(2, 1, 2), self.registry)

    def report(self, report: RankReport, *, is_serving: bool = True) -> None:
        self.metrics.report(report, is_serving=is_serving)

    def __getitem__(self, name: str) -> float | None:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"medha_rank_{name}", {"rank": "3", **labels})

    def page(self) -> str:
        return generate_latest(self.registry).decode()


@pytest.fixture
def exported() -> Exported:
    return Exported()


def test_a_report_crosses_the_wire() -> None:
    for message in (REPORT, RankXid(1, 79), replace(REPORT, gpu=None, memory_bytes=())):
        assert decode(encode(message))[0] == message


def test_totals_are_counted_by_their_growth(exported: Exported) -> None:
    exported.report(REPORT)
    assert exported["steps_total"] == 0, "a predecessor of this controller may have counted them"
    exported.report(LATER)
    assert exported["steps_total"] == 4
    assert exported["ahead_seconds_total"] == 0.25
    assert exported["estimated_flops_total"] == 2e15
    assert exported["estimated_read_bytes_total"] == 3e12
    seconds = {part: exported.of("step_seconds_total", part=part) for part in STEP_PARTS}
    assert {part: found for part, found in seconds.items() if found is not None} == {
        "forward": 1.0, "sample": 0.0, "all_reduce": 0.125
    }  # fmt: skip
    exported.report(replace(LATER, incarnation="second", steps=1))
    exported.report(replace(LATER, incarnation="second", steps=3))
    assert exported["steps_total"] == 6, "the count survives the process"


def test_states_are_shown_with_the_ranks_place_and_device(exported: Exported) -> None:
    exported.report(REPORT)
    place = {"lane": "1", "stage": "0", "tensor": "1"}
    device = {"rank_pod": "r-l1-0", "device": "NVIDIA H100 80GB HBM3", "UUID": "GPU-1"}
    assert exported.of("info", **place, **device) == 1
    assert (exported["peak_flops_per_second"], exported["peak_bytes_per_second"]) == (989e12, 3.35e12)
    assert [exported.of("memory_bytes", state=one) for one in ("total", "used", "free")] == [80, 60, 15]
    assert exported.of("clock_hertz", clock="sm") == 1755e6
    assert (exported["temperature_celsius"], exported["power_watts"], exported["power_limit_watts"]) == (
        64.0, 512.3, 700.0
    )  # fmt: skip
    assert exported.of("utilisation_ratio", unit="memory") == 0.41
    assert exported.of("throttled", reason="hardware_thermal") == 0
    exported.report(replace(REPORT, gpu=replace(GPU, throttled=("hardware_thermal",))))
    assert exported.of("throttled", reason="hardware_thermal") == 1
    assert exported.of("throttled", reason="power_cap") == 0


def test_a_state_that_is_no_longer_reported_is_no_longer_shown(exported: Exported) -> None:
    exported.report(REPORT)
    exported.report(replace(REPORT, uuid="GPU-2", gpu=replace(GPU, temperature_celsius=None)))
    assert exported["temperature_celsius"] is None
    assert exported["power_watts"] == 512.3
    assert exported.page().count("medha_rank_info{") == 1
    exported.report(LATER)
    exported.metrics.xid(RankXid(3, 79))
    exported.metrics.forget_states()
    assert exported["power_watts"] is None
    assert exported["estimated_flops_total"] == 2e15
    assert exported.of("last_xid", cause="device") == 79, "the reason for a loss outlives it"


def test_a_report_that_arrives_after_the_loss_is_counted_and_not_shown(exported: Exported) -> None:
    exported.report(REPORT)
    exported.metrics.forget_states()
    exported.report(LATER, is_serving=False)
    assert exported["steps_total"] == 4
    assert exported["power_watts"] is None
    assert "medha_rank_info{" not in exported.page()
    exported.report(LATER)
    assert exported["power_watts"] is not None, "the next epoch shows them"


def test_a_rank_without_a_gpu_has_no_series_of_one(exported: Exported) -> None:
    exported.report(replace(REPORT, gpu=None, uuid="", peak_flops_per_second=0.0, peak_bytes_per_second=0.0))
    shown = {line.partition("{")[0] for line in exported.page().splitlines() if line.startswith("medha_rank")}
    assert {name for name in shown if not name.endswith("_created")} == {
        "medha_rank_info", "medha_rank_steps_total", "medha_rank_step_seconds_total", "medha_rank_ahead_seconds_total",
        "medha_rank_estimated_flops_total", "medha_rank_estimated_read_bytes_total", "medha_rank_memory_bytes",
    }  # fmt: skip


def test_all_metrics_of_ranks_are_exported(exported: Exported) -> None:
    exported.report(REPORT)
    exported.metrics.xid(RankXid(3, 31))
    names = {metric.name + ("_total" if metric.kind == "counter" else "") for metric in RANK_METRICS}
    assert [name for name in names if f"\n{name}{{" not in exported.page()] == []


def test_errors_are_counted_by_their_cause_from_0_on(exported: Exported) -> None:
    exported.report(REPORT)
    causes = ("device", "program", "notice")
    assert [exported.of("xid_errors_total", cause=one) for one in causes] == [0, 0, 0]
    for xid in (79, 48, 45, 63):  # the device's second error, and what follows from it
        exported.metrics.xid(RankXid(3, xid))
    assert [exported.of("xid_errors_total", cause=one) for one in causes] == [2, 1, 1]
    assert [exported.of("last_xid", cause=one) for one in causes] == [48, 45, 63]


@pytest.mark.parametrize(
    "wrong",
    [
        replace(LATER, flops=math.nan), replace(LATER, read_bytes=-1.0), replace(LATER, ahead_seconds=math.inf),
        replace(LATER, part_seconds=(("forward", 1e31),)), replace(LATER, steps=-1),
        replace(LATER, memory_bytes=(("used", -5),)), replace(LATER, gpu=replace(GPU, power_watts=math.nan)),
    ],
)  # fmt: skip
def test_an_impossible_number_drops_the_whole_report(exported: Exported, wrong: RankReport) -> None:
    exported.report(REPORT)
    before = exported.page()
    with pytest.raises(WireInvalid, match="rank 3 reports medha_rank_"):
        exported.report(wrong)
    assert exported.page() == before


def test_names_of_another_release_are_ignored(exported: Exported) -> None:
    unknown = replace(GPU, clock_hertz=(("video", 1.0),), utilisation=(("tensor", 1.0),), throttled=("moon",))
    report = replace(REPORT, part_seconds=(("thinking", 1.0),), memory_bytes=(("lent", 1),), gpu=unknown)
    exported.report(report)
    page = exported.page()
    assert not any(f'"{name}"' in page for name in ("video", "tensor", "moon", "thinking", "lent"))


# --- what alerts are about ------------------------------------------------------------------------------------


def test_gpus_in_the_situations_that_alerts_are_about(exported: Exported) -> None:
    exported.report(REPORT)
    well = exported.page()
    record("gpu-well", well, well)
    exported.report(replace(REPORT, gpu=replace(GPU, throttled=("hardware_thermal", "power_cap"))))
    record("gpu-throttled", exported.page())
    exported.report(replace(REPORT, gpu=replace(GPU, throttled=("power_cap",))))
    record("gpu-at-its-power-limit", exported.page())
    exported.report(REPORT)
    exported.metrics.xid(RankXid(3, 31))
    exported.metrics.xid(RankXid(3, 63))
    record("gpu-program-error", well, exported.page())
    fails = exported.page()
    exported.metrics.xid(RankXid(3, 79))
    record("gpu-device-error", fails, exported.page())


# --- a controller process -------------------------------------------------------------------------------------


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Stage]:
    """A controller that writes a trace."""
    stage = Stage(tmp_path, start=False)
    settings = ControllerSettings.read(stage.settings)
    settings.model_copy(update={"trace_file": tmp_path / "trace.json"}).write(stage.settings)
    stage.start()
    yield stage
    stage.close()


def test_the_loss_of_a_rank_names_the_error_of_its_gpu_in_log_and_trace(
    traced: Stage, tmp_path: Path
) -> None:
    traced.ready()
    traced.submit("a")
    traced.send_tokens()
    traced.step()
    traced.rank.send(RankReport(0, "first", uuid="GPU-1", gpu=GPU))
    traced.rank.send(RankXid(0, 79))
    traced.lose_rank()
    assert isinstance(traced.from_controller(Failed), Failed)
    traced.wait_for_ready_file()
    for _ in range(100):  # the router hears of the loss before the metrics do
        page = httpx.get(traced.metrics_url()).text
        if "medha_rank_power_watts{" not in page:
            break
        time.sleep(0.1)
    assert "medha_rank_power_watts{" not in page, "nobody knows it any more"
    assert 'medha_rank_xid_errors_total{cause="device",rank="0"} 1.0' in page
    assert 'medha_rank_last_xid{cause="device",rank="0"} 79.0' in page
    traced.process.terminate()
    log = traced.process.communicate(timeout=20)[1]
    traced.log = log
    assert "the GPU of rank 0 reports Xid 79 (the GPU is no longer on the bus)" in log
    (lost,) = [line for line in log.splitlines() if "epoch 0 has ended" in line]
    assert "rank 0 is gone" in lost
    assert "the GPU of rank 0 reported Xid 79 (the GPU is no longer on the bus) 0." in lost
    notes = [one["name"] for one in read_trace((tmp_path / "trace.json").read_bytes()) if one["ph"] == "i"]
    (note,) = [name for name in notes if name.startswith("the epoch has ended")]
    assert "Xid 79" in note


def test_a_report_with_an_impossible_number_is_dropped_and_counted(traced: Stage) -> None:
    traced.ready()
    traced.rank.send(RankReport(0, "first", flops=-1.0))
    traced.rank.send(RankReport(0, "first", pod="after"))
    traced.wait_for_ready_file()
    for _ in range(100):
        page = httpx.get(traced.metrics_url()).text
        if 'rank_pod="after"' in page:
            break
        traced.send_hello()
    assert 'medha_dropped_messages_total{link="rank_control",reason=' in page
