"""Requests that wait, by the beginning of their prompts: whom to tell that a prefix has become shareable."""

from __future__ import annotations

from itertools import islice

from medha.prefix import hash_at
from medha.request import Request

WORTH_TELLING_TOKENS = 256
"""Less than this that is cached in addition changes nobody's plans."""
MOST_ASKED = 128
"""Requests that one prefill looks at, the longest waiting first; the others find out when they are admitted."""


class Alike:
    """Waiting requests with a hashed prompt, grouped by its first block."""

    def __init__(self, block_size_tokens: int) -> None:
        self._size = block_size_tokens
        self._worth_blocks = -(-WORTH_TELLING_TOKENS // block_size_tokens)
        self._groups: dict[str, dict[str, Request]] = {}

    def add(self, request: Request) -> None:
        if request.submit.block_hashes:
            self._groups.setdefault(_first(request), {})[request.id] = request

    def remove(self, request: Request) -> None:
        """It waits no more; nothing happens to a request that is not here."""
        group = self._groups.get(_first(request), {})
        group.pop(request.id, None)
        if not group:
            self._groups.pop(_first(request), None)

    def told_by(self, computed: Request) -> list[Request]:
        """Who should look again at what is cached, now that a whole prompt is.

        They share more of it than they expect to find: a hash covers everything before it, so one block tells.
        """
        hashes = computed.submit.block_hashes
        group = self._groups.get(_first(computed), {})
        told = []
        for request in islice(group.values(), MOST_ASKED):
            block = request.cached_tokens // self._size + self._worth_blocks - 1
            found = hash_at(hashes, block)
            if found and found == hash_at(request.submit.block_hashes, block):
                told.append(request)
        return told


def _first(request: Request) -> str:
    return hash_at(request.submit.block_hashes, 0)
