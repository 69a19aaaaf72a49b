"""KV that a replica reads from another one of its model instead of computing it, and KV that others read from it.

The router names a peer that probably has a prompt's KV (`Submit.peer`). If reading it is predicted to be faster than
computing it, the request asks for it (`KvAsk`) and waits, as it would for files. The peer copies what it has to its host
tier, keeps it there for a while, and answers with a ticket. Ranks show the ticket to the peer's ranks and read the blocks
into their own host tier, from where they are fetched as usual. Failures cost only time: the request computes its prompt
once it has waited too long, or once a rank reports that it could not read.

`PeerKv` makes the decisions of both sides. A peer that failed is not asked for a while. One that had nothing of a prompt
is not asked for a shorter while, and only for prompts with the same first block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, takewhile

from medha.kv.pools import Awaited, KvPools
from medha.kv.prefix_cache import hash_at, hash_count
from medha.kv.rank_loads import Loaded
from medha.scheduler.load_waits import LoadWaits
from medha.scheduler.request import Request
from medha.wire.messages import KvAsk, KvDone, KvTicket

SHARE_SECONDS = 30.0
"""Shortest time for which a ticket is valid, unless its holder reports before that it has read all."""
_SHARE_PATIENCE = 8.0
"""Time for which a ticket is valid beyond that, as a multiple of the predicted time of reading."""
_REST_SECONDS = 30.0
"""Time for which a peer is not asked after a load from it has failed, or after it did not answer in time."""
NOTHING_SECONDS = 5.0
"""Time for which a peer that had nothing of a prompt is not asked for its first block again: short, as it may compute it."""
_MOST_HASH_CHARACTERS = 2**22
"""Longest hashes of a prompt that are sent in one message: of some 130,000 blocks."""
_NOWHERE = -1  # lane of the answers that are awaited
_NOTHING = "nothing here continues the prompt"


@dataclass(slots=True)
class _Ask:
    source: str
    tokens: int
    hashes: str
    number: int
    requests: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class _Taken:
    source: str
    left: set[tuple[int, int]]  # extents that are being read, each with its lane


class PeerKv:
    """The hand-overs of one replica, in both directions."""

    def __init__(self, pools: KvPools, waits: LoadWaits) -> None:
        self._pools, self._waits = pools, waits
        self._asks: dict[str, _Ask] = {}  # by prompt
        self._asks_by_id: dict[str, str] = {}  # request that asked -> prompt
        self._taken: dict[str, _Taken] = {}  # by ticket
        self._ticket_of: dict[tuple[int, int], str] = {}  # by extent that is being read, with its lane
        self._rests_until: dict[str, float] = {}  # by peer
        # (peer, hash of a prompt's first block) -> time until which it is not asked; in the order of these times.
        self._lacks_until: dict[tuple[str, str], float] = {}
        self._shares: dict[str, tuple[str, float]] = {}  # ticket -> its holder, and the time when it ends
        # Requests that continue elsewhere -> the hashes of their prompts, and their tokens with the output.
        self._moved: dict[str, tuple[str, int]] = {}
        self._numbers = count()

    @property
    def next_due(self) -> float | None:
        """Time at which the next ticket becomes void; None if there is none."""
        return min((until for _, until in self._shares.values()), default=None)

    # --- the replica that takes -----------------------------------------------------------------------

    def ask(self, request: Request, now: float) -> list[KvAsk]:
        """Let a new request wait for a peer's KV if that is worth it; return what to ask."""
        submit = request.submit
        if not submit.peer or request.awaits_load or len(submit.block_hashes) > _MOST_HASH_CHARACTERS:
            return []
        is_long = request.may_spread
        seconds = self._pools.wait_for_peer_seconds(
            submit.tokens, submit.block_hashes, submit.peer_tokens, is_long=is_long
        )
        if seconds is None or self._rests_until.get(submit.peer, now) > now:
            return []
        if self._lacks_until.get((submit.peer, hash_at(submit.block_hashes, 0)), now) > now:
            return []
        ask, asks = self._asks.get(submit.prompt), []
        if ask is None:
            ask = _Ask(submit.peer, submit.tokens, submit.block_hashes, next(self._numbers))
            self._asks[submit.prompt] = ask
            self._asks_by_id[submit.id] = submit.prompt
            asks = [KvAsk(submit.id, submit.peer, "", submit.tokens, submit.block_hashes, is_long)]
        ask.requests.append(request)
        self._waits.begin(request, Awaited(frozenset({(_NOWHERE, ask.number)}), seconds), now)
        return asks

    def answered(self, answer: KvTicket, now: float, go_on: Callable[[Request], None]) -> list[KvDone]:
        """Begin to read what a peer offers; requests that then wait for nothing go on."""
        ask = self._asks.get(self._asks_by_id.get(answer.id, ""))
        if ask is None or ask.source != answer.source:
            return [KvDone(answer.ticket, answer.source)] if answer.ticket else []
        self._forget(answer.id)
        waiting = [one for one in ask.requests if one.awaits_load and one.waits and not one.ended]
        awaited: frozenset[tuple[int, int]] = frozenset()
        read = awaited
        refuses = not answer.ticket and answer.reason != _NOTHING
        if not (answer.ticket or refuses):
            self._lacks(ask.source, hash_at(ask.hashes, 0), now)
        if refuses or not self._is_sound(answer, ask.hashes):
            self._rest(ask.source, now)
        elif waiting and answer.ticket and answer.ticket not in self._taken:
            awaited, read = self._pools.begin_peer_loads(answer.ticket, answer.parts)
        if read:
            self._taken[answer.ticket] = _Taken(ask.source, set(read))
            self._ticket_of.update((extent, answer.ticket) for extent in read)
        if awaited:
            for request in waiting:
                self._waits.follow(request, awaited)
        else:
            for request in self._waits.loaded(_NOWHERE, [ask.number]):
                go_on(request)
        return [KvDone(answer.ticket, answer.source)] if answer.ticket and not read else []

    def _is_sound(self, answer: KvTicket, hashes: str) -> bool:
        """Return whether an answer offers only blocks that were asked for, on lanes that exist."""
        asked = {hash_at(hashes, block) for block in range(hash_count(hashes))}
        return all(
            0 <= part.lane < self._pools.lanes
            and all(hash_at(part.hashes, block) in asked for block in range(hash_count(part.hashes)))
            for part in answer.parts
        )

    def loaded(self, lane: int, ended: Iterable[Loaded], now: float) -> list[KvDone]:
        """Record that loads of a lane have ended; return the tickets of which nothing more is needed."""
        done: list[KvDone] = []
        for one in ended:
            ticket = self._ticket_of.pop((lane, one.extent), "")
            if not ticket:
                continue
            taken = self._taken[ticket]
            taken.left.discard((lane, one.extent))
            if not one.is_there:
                self._rest(taken.source, now)
            if not taken.left:
                del self._taken[ticket]
                done.append(KvDone(ticket, taken.source))
        return done

    def reads(self, ticket: str) -> frozenset[tuple[int, int]]:
        """Return the extents into which blocks of a ticket are being read, each with its lane."""
        taken = self._taken.get(ticket)
        return frozenset() if taken is None else frozenset(taken.left)

    def late(self, requests: Iterable[Request], now: float) -> None:
        """Record which requests no longer wait; a peer that has not answered them is not asked for a while."""
        for request in requests:
            ask = self._asks.get(request.submit.prompt)
            if ask is not None and request in ask.requests:
                self._rest(ask.source, now)
                self.leave(request)

    def leave(self, request: Request) -> None:
        """Forget a request that has left, or no longer waits for an answer."""
        ask = self._asks.get(request.submit.prompt)
        if ask is None or request not in ask.requests:
            return
        ask.requests.remove(request)
        if not ask.requests:
            for name, prompt in list(self._asks_by_id.items()):
                if prompt == request.submit.prompt:
                    self._forget(name)

    def _forget(self, request_id: str) -> None:
        del self._asks[self._asks_by_id.pop(request_id)]

    def _rest(self, peer: str, now: float) -> None:
        self._rests_until[peer] = now + _REST_SECONDS

    def _lacks(self, peer: str, first_block: str, now: float) -> None:
        """Note that a peer has nothing of prompts that begin with a block."""
        for key in list(takewhile(lambda key: self._lacks_until[key] <= now, self._lacks_until)):
            del self._lacks_until[key]
        self._lacks_until.pop((peer, first_block), None)
        self._lacks_until[peer, first_block] = now + NOTHING_SECONDS

    # --- the replica that gives -----------------------------------------------------------------------

    @property
    def gives(self) -> bool:
        """True if other replicas may still read what tickets offer, or ask for the KV of requests that have moved."""
        return bool(self._shares or self._moved)

    def moves(self, request: Request) -> None:
        """Note that a request which ends here goes on at another replica; its KV can be found at once."""
        if not request.waits:
            self._pools.insert_output(request.id, request.computed)
        self._moved[request.id] = request.submit.block_hashes, request.length

    def moved(self, request_id: str) -> None:
        """Note that nobody will ask for the KV of a request any more; does nothing if it has not moved."""
        self._moved.pop(request_id, None)

    def give(self, ask: KvAsk, seconds: Callable[[int], float], now: float) -> KvTicket:
        """Offer what is here of a prompt; `seconds` predicts the time to read so many blocks."""
        has_moved = any(
            hashes and ask.tokens <= tokens and ask.hashes.startswith(hashes)
            for hashes, tokens in self._moved.values()
        )
        parts = self._pools.share(
            ask.ticket, ask.tokens, ask.hashes, is_long=ask.is_long, has_moved=has_moved
        )
        if not parts:
            return KvTicket(ask.id, ask.asker, reason=_NOTHING)
        blocks = max(hash_count(part.hashes) for part in parts)
        self._shares[ask.ticket] = ask.asker, now + SHARE_SECONDS + _SHARE_PATIENCE * seconds(blocks)
        return KvTicket(ask.id, ask.asker, ask.ticket, parts)

    def end(self, done: KvDone) -> None:
        """Release what a ticket offers, if the message is from its holder."""
        if self._shares.get(done.ticket, ("", 0.0))[0] == done.asker:
            self._void(done.ticket)

    def expire(self, now: float) -> None:
        """Release what tickets offer whose time is over."""
        for ticket in [one for one, (_, until) in self._shares.items() if until <= now]:
            self._void(ticket)

    def _void(self, ticket: str) -> None:
        del self._shares[ticket]
        self._pools.unshare(ticket)
