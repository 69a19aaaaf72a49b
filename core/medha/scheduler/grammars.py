"""Grammars of requests: which ones have been compiled by the ranks that sample, and which requests wait for one.

A grammar is compiled while its request waits for KV and while its prompt is computed. Until every lane has reported
that it is compiled, its requests are kept out of the step that would sample for them (`Request.awaits_grammar`). So no
other request waits for a grammar that takes long. A request whose grammar is not compiled in time ends.

Ranks keep a compiled grammar until a message drops it. They keep the grammars of all open requests, and the
`KEPT_GRAMMARS` others that were used last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from medha.scheduler.request import Request
from medha.wire.messages import CompileGrammar, DropGrammar, GrammarReady

KEPT_GRAMMARS = 32
"""Grammars that stay compiled although no open request has them, because all turns of an agent use the same one."""
COMPILE_SECONDS = 6.0
"""Longest time for which a request waits for its grammar, from its arrival or from when it has stepped aside."""


@dataclass(slots=True)
class _Grammar:
    lanes_left: set[int]  # that have not reported it compiled
    users: set[str] = field(default_factory=set)  # ids of open requests


class Grammars:
    """The grammars that ranks compile or keep, in one epoch."""

    def __init__(self, lanes: int, epoch: int) -> None:
        self._lanes = lanes
        self._epoch = epoch
        self._known: dict[str, _Grammar] = {}  # by name
        self._unused: dict[str, None] = {}  # compiled ones without open requests, the last used last
        self._awaiting: dict[
            str, tuple[Request, float]
        ] = {}  # by id, with the time when it ends; in that order
        self._drops: dict[str, _Grammar] = {}  # by name, those that ranks have yet to drop

    @property
    def next_due(self) -> float | None:
        """Time at which the next request ends unless its grammar is compiled; None if none waits for that."""
        return next((due for _, due in self._awaiting.values()), None)

    def arrive(self, request: Request, now: float) -> list[CompileGrammar]:
        """Add a request; return what must be sent to ranks before a step with it."""
        text = request.submit.sampling.grammar
        if not text:
            return []
        name = request.grammar = grammar_name(text)
        asked = []
        # If it is in `_drops`, no message has been sent yet: ranks still have it, or go on to compile it.
        known = self._known.get(name) or self._drops.pop(name, None)
        if known is None:
            known = _Grammar(set(range(self._lanes)))
            asked.append(CompileGrammar(name, text, self._epoch))
        self._known[name] = known
        self._unused.pop(name, None)
        known.users.add(request.id)
        if known.lanes_left:
            request.awaits_grammar = True
            self._awaiting[request.id] = request, now + COMPILE_SECONDS
        return asked

    def ready(self, event: GrammarReady) -> list[Request]:
        """Record the report of a lane; return the requests that must end because their grammar cannot be compiled."""
        known = self._known.get(event.name)
        if known is None or event.lane not in known.lanes_left:
            return []  # dropped meanwhile
        requests = [request for request, _ in self._awaiting.values() if request.grammar == event.name]
        if event.fault:
            self._drop(event.name)
            return self._ending(requests)
        known.lanes_left.discard(event.lane)
        if not known.lanes_left:
            for request in requests:
                self._go_on(request)
        return []

    def late(self, now: float) -> list[Request]:
        """Return the requests that have waited too long and must end."""
        if not self._awaiting:
            return []
        due = self.next_due
        if due is None or now < due:
            return []
        return self._ending([request for request, due in self._awaiting.values() if due <= now])

    def stalled(self) -> tuple[int, set[str]]:
        """Return the number of requests with KV, and the ids of those without, that no step can take before a report."""
        each = (request for request, _ in self._awaiting.values() if not (request.ended or request.fetches))
        stalled = [request for request in each if request.stalls]
        waiting = {request.id for request in stalled if request.waits}
        return len(stalled) - len(waiting), waiting

    def leave(self, request: Request) -> None:
        """Forget a request that has left."""
        self._awaiting.pop(request.id, None)
        known = self._known.get(request.grammar)
        if known is None:
            return
        known.users.discard(request.id)
        if known.users:
            return
        if known.lanes_left:  # not compiled yet, and nobody needs it
            self._drop(request.grammar)
            return
        self._unused[request.grammar] = None
        if len(self._unused) > KEPT_GRAMMARS:
            self._drop(next(iter(self._unused)))

    def take_drops(self) -> list[DropGrammar]:
        """Return the grammars that ranks must drop since the last call."""
        if not self._drops:
            return []
        drops, self._drops = self._drops, {}
        return [DropGrammar(name, self._epoch) for name in drops]

    def _ending(self, requests: Iterable[Request]) -> list[Request]:
        """Let requests wait no longer; return those that have not ended by themselves."""
        ending = []
        for request in requests:
            self._go_on(request)
            if request.steps_aside or not request.ended:
                ending.append(request)
        return ending

    def _go_on(self, request: Request) -> None:
        request.awaits_grammar = False
        del self._awaiting[request.id]

    def _drop(self, name: str) -> None:
        self._drops[name] = self._known.pop(name)
        self._unused.pop(name, None)


def grammar_name(text: str) -> str:
    """Return the name of a grammar in messages."""
    return blake2b(text.encode(), digest_size=16).hexdigest()
