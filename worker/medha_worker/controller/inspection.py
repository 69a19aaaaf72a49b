"""What others may see of a controller's process while it runs: its status, and a trace of what its ranks do.

It stands beside the core like the metrics' observer, looks at the same events and commands, and answers the threads that
serve HTTP (`medha_worker.controller.telemetry`) from the controller's own loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from medha.scheduler.config import ReplicaConfig
from medha.scheduler.controller import ReplicaController
from medha.wire.messages import ControllerCommand, ControllerEvent, Trace, TracePart
from medha_worker.controller.telemetry import AskStatus, AskTrace, Questions
from medha_worker.controller.trace import Tracing
from medha_worker.controller.watch import Watch
from medha_worker.rank.recorder import SEND_SECONDS, machine

LAST_PARTS_SECONDS = 2 * SEND_SECONDS  # in which ranks send what they recorded at the end of a trace
FOREVER_SECONDS = 1e9


class Inspection:
    """Status and trace of one controller's process."""

    def __init__(self, replica: str, model: str, trace_file: Path | None) -> None:
        """`trace_file` is written from the first epoch on, if it is given."""
        self.questions = Questions()
        self._watch = Watch(replica, model)
        self._trace_file = trace_file
        self._tracing: Tracing | None = None
        self._config: ReplicaConfig | None = None  # of the latest epoch
        self._ranks_trace = False  # they were told to, in the epoch that runs

    def close(self) -> None:
        """End a trace, and wait until its file is whole."""
        self.questions.close()
        if self._tracing is not None:
            self._tracing.close()
            self._tracing.join()

    def begin_epoch(self, core: ReplicaController, now: float) -> None:
        """All ranks are ready, and know no request."""
        if self._config is None and self._trace_file is not None:
            path = self._trace_file
            if core.epoch > 0:  # another process has written the first part
                path = path.with_name(f"{path.stem}.epoch{core.epoch}{path.suffix}")
            self._tracing = Tracing(core.config.topology, machine(), now, now + FOREVER_SECONDS)
            self._tracing.write_to(path)
        self._config = core.config
        self._watch.begin_epoch(now)
        self._ranks_trace = False

    def observe(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        now: float,
    ) -> None:
        """Look at one event, and at the commands that it led to."""
        self._watch.observe(event, commands, core, now)
        if self._tracing is not None:
            self._tracing.observe(event, commands, core, now)

    def part(self, part: TracePart, now: float) -> None:
        """A rank says what its steps took."""
        if self._tracing is not None:
            self._tracing.put(now, part)

    def answer(self, core: ReplicaController | None, missing_ranks: Sequence[int], now: float) -> None:
        """Answer all questions; `core` is None while the ranks gather."""
        for question in self.questions.take():
            match question:
                case AskStatus(order, most_requests, answer):
                    status = self._watch.status(
                        core, now, missing_ranks=missing_ranks, order=order, most_requests=most_requests
                    )
                    answer.set_result(status.model_dump_json().encode())
                case AskTrace(seconds, answer) if self._tracing is None and self._config is not None:
                    self._tracing = Tracing(self._config.topology, machine(), now, now + seconds)
                    answer.set_result(self._tracing.pieces())
                case AskTrace(_, answer):
                    answer.set_result(None)

    def asks_of_ranks(self, now: float) -> Trace | None:
        """What ranks are to be told, if they are to trace from now on, or no longer."""
        tracing = self._tracing
        if tracing is not None and now > tracing.until + LAST_PARTS_SECONDS:
            tracing.close()
        if tracing is not None and tracing.closed:  # by its time, or because nobody reads on
            self._tracing = tracing = None
        wanted = tracing is not None
        if wanted == self._ranks_trace:
            return None
        self._ranks_trace = wanted
        return Trace(max(0.0, tracing.until - now) if tracing is not None else 0.0)
