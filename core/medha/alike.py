"""Requests that wait, by the beginning of their prompts: whom to tell that a prefix has become shareable."""

from __future__ import annotations

from itertools import islice

from medha.prefix import hash_at
from medha.request import Request

WORTH_TELLING_TOKENS = 256
"""A prompt that added less than this to the cache changes nobody's plans."""
MOST_TOLD = 32
"""Requests that one prefill informs, the longest waiting first; the others find out when they are admitted."""


class Alike:
    """Waiting requests with a hashed prompt, grouped by its first block."""

    def __init__(self) -> None:
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
        """Who should look again at what is cached, now that a whole prompt is."""
        if (
            not computed.submit.block_hashes
            or computed.prompt.tokens - computed.cached_tokens < WORTH_TELLING_TOKENS
        ):
            return []
        return list(islice(self._groups.get(_first(computed), {}).values(), MOST_TOLD))


def _first(request: Request) -> str:
    return hash_at(request.submit.block_hashes, 0)
