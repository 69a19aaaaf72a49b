"""Writes the events of a controller to files, one for each epoch: for `medha replay`, and with bars for the page `/ui`.

Its lines are JSON: first the spec and what the ranks have reported, then each event with its time and a digest of its
commands. Some lines also hold the bars that have changed, and the replica's last announcement.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TextIO

from pydantic_core import to_json

from medha.api.replica import MedhaReplicaSpec
from medha.cost.cost_profile import Profile
from medha.observing.replica_figures import replica_figures
from medha.observing.timeline import Timeline
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.request_progress import happenings
from medha.wire.frames import digest, encode
from medha.wire.messages import Announce, ControllerCommand, ControllerEvent, Drain, RankReady, Tick

BARS_SECONDS = 0.25
"""Shortest interval between the bars in a record, while requests are open."""

_log = logging.getLogger("medha.controller")


class EventRecord:
    """Writes the record. Once a write fails, the recording ends for good; the file keeps what was written before."""

    def __init__(self, path: Path | None, replica: str) -> None:
        """Without a `path`, nothing is recorded."""
        self._path = path
        self._replica = replica
        self._file: TextIO | None = None
        self._timeline = Timeline(0.0)  # of the current epoch
        self._bars_written = 0  # number of the timeline's last change that was written
        self._bars_written_at = -inf
        self._card_written: Announce | None = None

    def begin_epoch(
        self, spec: MedhaReplicaSpec, profile: Profile | None, ready: RankReady, now: float
    ) -> None:
        """Begin the file of an epoch, since each begins with a fresh state."""
        path = self._path
        if path is None:
            return
        if ready.epoch > 0:
            path = path.with_name(f"{path.name}.epoch{ready.epoch}")
        self._timeline, self._bars_written = Timeline(now), 0
        # The times of bars count from the origin.
        header = {"spec": spec.model_dump(mode="json", by_alias=True), "origin": self._timeline.origin}
        if profile is not None:  # its file may be gone when the record is replayed
            header["profile"] = json.loads(profile.to_json())
        try:
            if self._file is not None:
                self._file.close()
            self._file = path.open("w", encoding="utf-8", buffering=1)
            self._file.write(json.dumps(header) + "\n" + encode(ready)[0].decode() + "\n")  # type: ignore[union-attr]
        except OSError as error:
            self._stop(error)

    def add(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        history: History,
        card: Announce | None,
        now: float,
    ) -> None:
        """Add an event and its commands; `history` has not taken the event yet, `card` is the last announcement."""
        if self._file is None:
            return
        shown = self._shown(event, commands, core, history, card, now)
        line = f'{{"now": {now!r}, "event": {_text(event)}, "commands": "{digest(commands)}"{shown}}}\n'
        try:
            self._file.write(line)
        except OSError as error:
            self._stop(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _shown(
        self,
        event: ControllerEvent,
        commands: Sequence[ControllerCommand],
        core: ReplicaController,
        history: History,
        card: Announce | None,
        now: float,
    ) -> str:
        """Return the fields of a line for the page: bars that changed, and the last announcement.

        They are empty in most lines: bars hold their own times, so it does not matter when they are written.
        """
        timeline = self._timeline
        for happening, at in happenings(event, commands, core, history, self._replica, now):
            timeline.take(happening, at)
        if timeline.open and now - self._bars_written_at < BARS_SECONDS:
            return ""
        self._bars_written_at = now
        bars = timeline.changes(self._bars_written)
        self._bars_written = timeline.change
        fields = f', "bars": {to_json(bars).decode()}' if bars else ""
        if card is not None and card is not self._card_written:
            self._card_written = card
            fields += f', "replica": {to_json(replica_figures(card)).decode()}'
        return fields

    def _stop(self, error: OSError) -> None:
        """End the recording, and let the replica continue to serve."""
        _log.error("the recording ends here: %s", error)
        if self._file is not None:
            with suppress(OSError):  # closing tries once more to write the buffer
                self._file.close()
        self._file = self._path = None


def _text(event: ControllerEvent) -> str:
    """Return an event as JSON."""
    if isinstance(event, Drain | Tick):  # these two are not messages
        return f'{{"type":"{type(event).__name__}"}}'
    return bytes(encode(event)[0]).decode()
