"""The replicas that keep KV of sequences which have left them, until it has been read or is needed no longer."""

from __future__ import annotations

from medha.routing.open_sequences import KvSource, OpenSequence
from medha.routing.router_events import RouterCommand, Send
from medha.wire.messages import Cancel


class KvSources:
    """The sequences that have a `kv_source`."""

    def __init__(self) -> None:
        self._sequences: dict[str, OpenSequence] = {}  # by their names at the source
        self._freed: list[RouterCommand] = []  # for sources that are needed no longer

    def __contains__(self, wire_id: str) -> bool:
        return wire_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def leave(self, sequence: OpenSequence, replica: str) -> None:
        """Note that a sequence leaves a replica, which keeps its KV.

        If it has no token from there, the replica that it left before still has its KV, and this one has nothing to keep.
        """
        if sequence.kv_source is not None and not sequence.has_progress:
            self._freed.append(Send(replica, Cancel(sequence.wire_id)))
            return
        self.free(sequence)
        tokens = sequence.tokens - sequence.has_progress
        sequence.kv_source = KvSource(replica, sequence.wire_id, tokens, sequence.has_progress)
        self._sequences[sequence.wire_id] = sequence

    def free(self, sequence: OpenSequence) -> None:
        """Release the KV that a replica keeps of a sequence which has left it: the replica may end without it."""
        source, sequence.kv_source = sequence.kv_source, None
        if source is not None:
            del self._sequences[source.wire_id]
            self._freed.append(Send(source.replica, Cancel(source.wire_id)))

    def lose(self, replica: str) -> None:
        """Note that a replica has no KV any more of sequences that have left it."""
        for source in self.at(replica):
            self._sequences.pop(source.wire_id).kv_source = None

    def at(self, replica: str) -> list[KvSource]:
        """Return what a replica keeps of sequences that have left it."""
        sources = (one.kv_source for one in self._sequences.values())
        return [one for one in sources if one is not None and one.replica == replica]

    def take_freed(self) -> list[RouterCommand]:
        """Return, once, what sources that are needed no longer must be sent."""
        freed, self._freed = self._freed, []
        return freed
