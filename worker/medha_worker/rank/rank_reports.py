"""The reports of a rank on its steps and its device, which its controller exports as metrics.

They are sent between two steps, at a low rate. A step itself costs a few additions.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from medha.cost.hardware import ExpertShape, ModelShape
from medha.cost.step_estimates import StepCosts, StepWork, peak_of
from medha.model.kv_dtype import kv_element_bytes
from medha.wire.messages import Message, RankReport, RankXid
from medha_worker.device import Device
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard
from medha_worker.nvml import GpuProbe
from medha_worker.rank.device_watch import DeviceWatch
from medha_worker.rank.step_recorder import StepRecorder

REPORT_SECONDS = 2.0
"""Interval between two reports."""


class RankReports:
    """Counts the work of one rank, and reports on it."""

    def __init__(
        self,
        rank: int,
        incarnation: str,
        recorder: StepRecorder,
        send: Callable[[Message], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`send` may be called by any thread; `clock` returns seconds."""
        self._about = RankReport(rank, incarnation, pod=socket.gethostname())
        self._recorder, self._send, self._clock = recorder, send, clock
        self._costs: StepCosts | None = None
        self._watch: DeviceWatch | None = None
        self._flops = self._read_bytes = 0.0
        self._sent_at = float("-inf")
        self._xids: deque[int] = deque()  # that the controller does not know yet

    def begin(self, device: Device, shape: ModelShape, probe: GpuProbe | None) -> None:
        """Begin to watch the rank's device; `shape` has the sizes of the rank's part of the model."""
        peak = peak_of(device.name, shape.dtype_bytes)
        self._costs = StepCosts.of(shape)
        self._about = replace(self._about, device=device.name, uuid=device.uuid)
        if peak is not None:
            rates = peak.flops_per_second, peak.memory_bytes_per_second
            self._about = replace(self._about, peak_flops_per_second=rates[0], peak_bytes_per_second=rates[1])
        self._recorder.measure_on(device.runtime.timed_mark)
        self._watch = DeviceWatch(
            device.memory.figures, probe, self._xids.append, self._send_xids, self._clock
        )

    def add(self, work: StepWork) -> None:
        """Count the work of a step that ran."""
        assert self._costs is not None
        self._flops += self._costs.flops(work)
        self._read_bytes += self._costs.read_bytes(work)

    def send_due(self, *, is_serving: bool, at_once: bool = False) -> None:
        """Send what is due: errors of the device, and in an epoch (`is_serving`) a report every REPORT_SECONDS.

        The main thread calls this between two steps; `at_once` makes a report due.
        """
        self._send_xids()
        now = self._clock()
        if self._watch is None or not is_serving or (now - self._sent_at < REPORT_SECONDS and not at_once):
            return
        self._sent_at = now
        self._send(self._now(self._watch))
        self._watch.refresh()

    def _send_xids(self) -> None:
        with suppress(IndexError):  # another thread has sent them
            while self._xids:
                self._send(RankXid(self._about.rank, self._xids.popleft()))

    def _now(self, watch: DeviceWatch) -> RankReport:
        memory, recorder = watch.memory, self._recorder
        return replace(
            self._about,
            steps=recorder.steps,
            part_seconds=tuple(recorder.part_seconds.items()),
            ahead_seconds=recorder.ahead_seconds,
            flops=self._flops,
            read_bytes=self._read_bytes,
            memory_bytes=()
            if memory is None
            else (("total", memory.total), ("used", memory.used), ("free", memory.free)),
            gpu=watch.gpu,
        )

    def recent_xid(self) -> str:
        """Return the GPU's latest error as the end of a sentence; empty if there was none lately."""
        return "" if self._watch is None else self._watch.recent_xid()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def shape_of(shard: Shard, config: ModelConfig, element_bytes: int) -> ModelShape:
    """Return the sizes of a rank's part of a model, for estimates of its work; without the head it has no vocabulary."""
    rows = shard.vocabulary(config)[shard.tensor_rank]
    experts = None
    if config.experts is not None:
        experts = ExpertShape(
            layers=sum(config.is_sparse(layer) for layer in range(shard.first_layer, shard.last_layer)),
            count=config.experts.count,
            per_token=config.experts.per_token,
            intermediate=config.experts.intermediate_size // shard.tensor_size,
            shared_intermediate=config.experts.shared_size // shard.tensor_size,
        )
    return ModelShape(
        name=config.architecture,
        layers=shard.last_layer - shard.first_layer,
        hidden=config.hidden_size,
        query_heads=shard.query_heads(config),
        kv_heads=shard.kv_heads(config),
        head_dim=config.head_dim,
        intermediate=config.intermediate_size // shard.tensor_size,
        vocab=rows.stop - rows.start if shard.is_last_stage else 0,
        dtype_bytes=element_bytes,
        kv_dtype_bytes=kv_element_bytes(config.kv_dtype, element_bytes),
        experts=experts,
        latent=config.latent,
        expert_weight_bytes=config.expert_weight_bytes(element_bytes),
        layer_weight_bytes=config.shared_weight_bytes(element_bytes),
    )
