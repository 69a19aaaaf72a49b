"""Requests whose prompts begin alike: which ones wait for whose prefill, and which must check the cache again.

When several questions about one document arrive together and the document is not cached, each could start at
once, but then each would compute the document. Instead, a request *follows* a running prefill (its leader)
that is about to compute the shared part and is due no later than itself. It waits until the shared part is
computed, the leader has ended, or the leader is demoted and due only after the follower's own deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from medha.kv.prefix_cache import hash_at, hash_count
from medha.scheduler.request import Request
from medha.scheduler.request_table import RequestTable

WORTH_WAITING_TOKENS = 256
"""Fewest additional cached tokens for which a request waits or looks up the cache again."""
MOST_EXAMINED = 32
"""Most requests that one event examines, oldest first; the others find cached prefixes when they are admitted."""


class PrefixFollowers:
    """Waiting requests and running prefills with a hashed prompt, grouped by its first block."""

    def __init__(self, block_size_tokens: int, table: RequestTable) -> None:
        self._table = table
        self._size = block_size_tokens
        self._worth_blocks = -(-WORTH_WAITING_TOKENS // block_size_tokens)
        self._waiting: dict[str, dict[str, Request]] = {}
        self._prefilling: dict[str, dict[str, Request]] = {}
        self._followers: dict[str, dict[str, tuple[Request, int]]] = {}  # leader -> (request, tokens shared)

    def wait(self, request: Request) -> None:
        """Add a waiting request, and let it follow a prefill if there is one to follow."""
        if request.submit.block_hashes:
            self._waiting.setdefault(_first(request), {})[request.id] = request
            self._find_leader(request, self._prefilling.get(_first(request), {}).values())

    def enter(self, request: Request) -> list[Request]:
        """Record that a request is admitted and starts its prefill; return those that now follow it."""
        if not request.submit.block_hashes:
            return []
        self.remove(request)
        if request.dispatched >= request.prompt.tokens - 1:
            return []
        self._prefilling.setdefault(_first(request), {})[request.id] = request
        examined = islice(self._waiting.get(_first(request), {}).values(), MOST_EXAMINED)
        return [other for other in examined if other.leader is None and self._find_leader(other, [request])]

    def computed(self, request: Request) -> list[Request]:
        """Record a computed chunk; detach and return the followers whose shared part is now computed."""
        followers = self._followers.get(request.id)
        if not followers:
            return []
        ready = [other for other, shared in followers.values() if request.computed >= shared]
        for other in ready:
            self._unfollow(other)
        return ready

    def ended(self, request: Request) -> list[Request]:
        """Record that a prefill has ended; return the requests that must recheck what is cached for them.

        These are its followers, and waiting requests that share enough beyond what they counted as cached.
        """
        group = self._prefilling.get(_first(request), {})
        if group.pop(request.id, None) is None:
            return []
        if not group:
            del self._prefilling[_first(request)]
        affected = {other.id: other for other, _ in self._followers.get(request.id, {}).values()}
        for other in affected.values():
            self._unfollow(other)
            self._find_leader(other, group.values())
        hashes = request.submit.block_hashes
        for other in islice(self._waiting.get(_first(request), {}).values(), MOST_EXAMINED):
            block = other.cached_tokens // self._size + self._worth_blocks - 1
            found = hash_at(hashes, block)
            if found and found == hash_at(other.submit.block_hashes, block):
                affected[other.id] = other
        return list(affected.values())

    def leave_demoted(self) -> list[Request]:
        """Detach and return the followers of leaders that are now due after the follower's deadline."""
        late = [
            other
            for followers in self._followers.values()
            for other, _ in followers.values()
            if other.leader is not None and self._table.prefill_due(other.leader) > other.deadline
        ]
        for other in late:
            self._unfollow(other)
            self._find_leader(other, self._prefilling.get(_first(other), {}).values())
        return late

    def awaited_tokens(self, request: Request) -> int:
        """Return the number of prompt tokens that a request waits for its leader to compute; 0 without a leader."""
        if request.leader is None:
            return 0
        return self._followers[request.leader.id][request.id][1]

    def remove(self, request: Request) -> None:
        """Remove a request that no longer waits; a request that does not wait is ignored."""
        self._unfollow(request)
        group = self._waiting.get(_first(request), {})
        if group.pop(request.id, None) is not None and not group:
            del self._waiting[_first(request)]

    def _find_leader(self, request: Request, candidates: Iterable[Request]) -> bool:
        for leader in islice(candidates, MOST_EXAMINED):
            if leader.deadline > request.deadline or self._table.prefill_due(leader) > request.deadline:
                continue  # due after the request, by its deadline or by a revised one
            known = max(leader.computed, request.cached_tokens) // self._size
            shared = self._shared_blocks(leader, request, known)
            if shared - known >= self._worth_blocks:
                request.leader = leader
                followers = self._followers.setdefault(leader.id, {})
                followers[request.id] = (request, shared * self._size)
                return True
        return False

    def _unfollow(self, request: Request) -> None:
        leader, request.leader = request.leader, None
        if leader is not None:
            followers = self._followers[leader.id]
            del followers[request.id]
            if not followers:
                del self._followers[leader.id]

    def _shared_blocks(self, one: Request, other: Request, known: int) -> int:
        """Return how many blocks two prompts share; 0 if too few beyond `known` to be worth waiting for.

        A hash covers everything before it, so bisection finds where the prompts diverge.
        """
        first, second = one.submit.block_hashes, other.submit.block_hashes
        low = known + self._worth_blocks  # shared up to here
        most = min(hash_count(first), hash_count(second))
        if low > most or hash_at(first, low - 1) != hash_at(second, low - 1):
            return 0
        high = most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if hash_at(first, middle - 1) == hash_at(second, middle - 1):
                low = middle
            else:
                high = middle
        return low


def _first(request: Request) -> str:
    return hash_at(request.submit.block_hashes, 0)
