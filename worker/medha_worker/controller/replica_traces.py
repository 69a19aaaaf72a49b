"""The traces of a controller: it feeds `medha_traces.sequence_spans`, and exports the sequences that have ended.

A sequence is traced if its router asks for that in its `Submit`. The loop of the controller only appends to a queue.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.request_progress import happenings
from medha.wire.messages import ControllerCommand, ControllerEvent, Step, Submit
from medha_process.part_settings import ControllerSettings
from medha_traces.sequence_spans import SequenceSpans
from medha_traces.switch import start

if TYPE_CHECKING:
    from medha_traces.exporting import CountLost, SpanSource


class ReplicaTraces:
    """The sequences of a replica that are traced."""

    def __init__(self, replica: str, source: SpanSource) -> None:
        self._replica = replica
        self._source = source
        self._spans = SequenceSpans(replica)

    def announce(self, submit: Submit) -> None:
        """Trace a sequence whose `Submit` has arrived, once the core has it."""
        self._spans.announce(submit.id, submit.trace)

    def take(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        history: History,
        now: float,
    ) -> None:
        """Follow an event and its commands; `history` has not taken the event yet."""
        if not len(self._spans):
            return
        for happening, at in happenings(event, commands, core, history, self._replica, now):
            self._spans.take(happening, at)
        for command in commands:
            if isinstance(command, Step):
                self._spans.launched(command, now)
        self._export()

    def end_all(self, outcome: str, now: float) -> None:
        """End the spans of all sequences, because the replica has lost them."""
        self._spans.end_all(outcome, now)
        self._export()

    def close(self) -> None:
        """Export what has ended, for a short time at most."""
        self._source.close()

    def _export(self) -> None:
        for trace, facts in self._spans.ended():
            self._source.add(trace, facts)


def replica_traces(settings: ControllerSettings, count_lost: CountLost) -> ReplicaTraces | None:
    """Return the traces of a controller with these settings; None if traces are off. `count_lost` counts lost spans.

    Raises:
        ConfigInvalid: traces are on, and their endpoint or libraries cannot be used.
    """
    source = start(settings.spec.traces.endpoint, None, "medha-replica", os.environ, count_lost)
    return None if source is None else ReplicaTraces(settings.replica, source)
