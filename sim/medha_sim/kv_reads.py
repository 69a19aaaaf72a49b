"""KV that simulated replicas read from each other (`medha.scheduler.peer_kv`): their messages, and how long reads take.

A read begins once the reader's ranks have the step that asks for it, and the giver's ranks the one that offers it. Each replica
reads one ticket at a time, and gives one at a time, as one thread of each rank does. Nothing fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count

from medha.scheduler.controller import ReplicaController
from medha.wire.messages import ControllerEvent, DiskReport, KvAsk, KvDone, KvTicket, Step

ACCESS_SECONDS = 0.005
"""Time of a read beside that of its blocks: connecting, and noticing its end."""

Deliver = Callable[[str, ControllerEvent, float], None]
"""Callback that brings an event to a replica of that name at a time."""


@dataclass(slots=True)
class _Read:
    reader: str
    core: ReplicaController
    blocks: int
    asked_at: float


@dataclass(slots=True)
class KvReads:
    """The hand-overs of a simulation."""

    deliver: Deliver
    _numbers: count[int] = field(default_factory=count)
    _givers: dict[str, str] = field(default_factory=dict)  # by ticket
    _offered_at: dict[str, float] = field(default_factory=dict)  # by ticket, once ranks know it
    _waiting: dict[str, _Read] = field(default_factory=dict)  # by ticket, until then
    _reads_until: dict[str, float] = field(default_factory=dict)
    _gives_until: dict[str, float] = field(default_factory=dict)

    def send(self, sender: str, message: KvAsk | KvTicket | KvDone, at: float) -> None:
        """Bring a replica's message to another one at `at`, by way of their router."""
        match message:
            case KvAsk(source=source):
                ticket = f"ticket-{next(self._numbers)}"
                self._givers[ticket] = source
                self.deliver(source, replace(message, asker=sender, ticket=ticket), at)
            case KvTicket(asker=asker):
                self.deliver(asker, replace(message, source=sender), at)
            case KvDone(source=source):
                self.deliver(source, replace(message, asker=sender), at)

    def launched(self, name: str, core: ReplicaController, step: Step, at: float) -> None:
        """Note what the ranks of a replica begin to give and to read with a step that they carry out at `at`."""
        for serve in step.serves:
            self._offered_at[serve.ticket] = at
            if serve.ticket in self._waiting:
                self._read(serve.ticket, self._waiting.pop(serve.ticket))
        for ticket in dict.fromkeys(load.ticket for load in step.loads if load.ticket):
            blocks = sum(load.count for load in step.loads if load.ticket == ticket)
            read = _Read(name, core, blocks, at)
            if ticket in self._offered_at:
                self._read(ticket, read)
            else:
                self._waiting[ticket] = read

    def _read(self, ticket: str, read: _Read) -> None:
        giver, reader, config = self._givers[ticket], read.reader, read.core.config
        begin = max(
            read.asked_at,
            self._offered_at.pop(ticket),
            self._reads_until.get(reader, 0.0),
            self._gives_until.get(giver, 0.0),
        )
        seconds = ACCESS_SECONDS + read.blocks * (config.peer_block_seconds or 0.0)
        self._reads_until[reader] = self._gives_until[giver] = begin + seconds
        for report in _reports(read.core, ticket, seconds):
            self.deliver(reader, report, begin + seconds)


def _reports(core: ReplicaController, ticket: str, seconds: float) -> Iterable[DiskReport]:
    for lane, extent in sorted(core.reads_of(ticket)):
        for rank in core.config.topology.ranks_of_lane(lane):
            yield DiskReport(rank, lane, core.epoch, loaded=((extent, seconds),))
