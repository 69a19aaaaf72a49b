"""Status and traces of a running controller process, for its HTTP pages.

`Inspection` receives the facts of the core's history, as the metrics' `Observer` does. The controller's own loop
calls it to answer the threads that serve HTTP (`medha_worker.controller.telemetry_server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medha.api.replica_role import ReplicaRole
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Facts, History
from medha.scheduler.replica_config import ReplicaConfig
from medha.wire.messages import Trace, TracePart
from medha_worker.controller.live_status import LiveStatus
from medha_worker.controller.telemetry_server import Questions, StatusQuery, TraceQuery
from medha_worker.controller.trace_writer import EpochLost, Tracing
from medha_worker.rank.step_recorder import SEND_SECONDS, machine

LAST_PARTS_SECONDS = 2 * SEND_SECONDS  # time for ranks to send their last parts after the end of a trace
FOREVER_SECONDS = 1e9


class Inspection:
    """Keeps the status of one controller process, and takes at most one trace at a time."""

    def __init__(self, replica: str, model: str, trace_file: Path | None, role: ReplicaRole = "both") -> None:
        """If `trace_file` is given, a trace is written to it from the first epoch on."""
        self.questions = Questions()
        self._status = LiveStatus(replica, model, role)
        self._trace_file = trace_file
        self._tracing: Tracing | None = None
        self._config: ReplicaConfig | None = None  # of the latest epoch
        self._ranks_trace = False  # whether the ranks of the current epoch were asked to trace

    def close(self) -> None:
        """End the trace, and wait until its file is complete."""
        self.questions.close()
        if self._tracing is not None:
            self._tracing.close()
            self._tracing.join()

    def begin_epoch(self, core: ReplicaController, history: History, now: float) -> None:
        """Begin an epoch with a fresh core and its history; start the trace of `trace_file` in the first one."""
        if self._config is None and self._trace_file is not None:
            path = self._trace_file
            if core.epoch > 0:  # an earlier process has written the first file
                path = path.with_name(f"{path.stem}.epoch{core.epoch}{path.suffix}")
            self._tracing = Tracing(core.config.topology, machine(), now, now + FOREVER_SECONDS)
            self._tracing.write_to(path)
        self._config = core.config
        self._status.begin_epoch(history, now)
        self._ranks_trace = False

    def observe(self, facts: Facts, core: ReplicaController) -> None:
        """Record the facts of one event; `core` is the state after it."""
        self._status.observe(facts, core)
        if self._tracing is not None:
            self._tracing.observe(facts, core)

    def lost(self, reason: str, now: float) -> None:
        """Note in the trace that the epoch was lost, and why."""
        if self._tracing is not None:
            self._tracing.put(now, EpochLost(reason))

    def add_part(self, part: TracePart, now: float) -> None:
        """Add a rank's times of its steps to the trace."""
        if self._tracing is not None:
            self._tracing.put(now, part)

    def answer(self, core: ReplicaController | None, missing_ranks: Sequence[int], now: float) -> None:
        """Answer all questions; `core` is None while the ranks gather."""
        for question in self.questions.take():
            match question:
                case StatusQuery(order, most_requests, answer):
                    status = self._status.status(
                        core, now, missing_ranks=missing_ranks, order=order, most_requests=most_requests
                    )
                    answer.set_result(status.model_dump_json().encode())
                case TraceQuery(seconds, answer) if self._tracing is None and self._config is not None:
                    self._tracing = Tracing(self._config.topology, machine(), now, now + seconds)
                    answer.set_result(self._tracing.pieces())
                case TraceQuery(_, answer):
                    answer.set_result(None)

    def rank_trace_requests(self, now: float) -> Trace | None:
        """Return the message for the ranks if they must begin or end tracing now, else None."""
        tracing = self._tracing
        if tracing is not None and now > tracing.until + LAST_PARTS_SECONDS:
            tracing.close()
        if tracing is not None and tracing.closed:  # its time is over, or its reader has gone
            self._tracing = tracing = None
        wanted = tracing is not None
        if wanted == self._ranks_trace:
            return None
        self._ranks_trace = wanted
        return Trace(max(0.0, tracing.until - now) if tracing is not None else 0.0)
