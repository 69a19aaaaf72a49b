"""Count repairs of objects that others change, to repair ever more slowly if another controller changes them back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import orjson

from medha_operator.kube.kinds import Key, Manifest

AT_ONCE = 3
"""Consecutive repairs of an object without a wait."""
FIRST_SECONDS = 10.0
LONGEST_SECONDS = 600.0
FORGET_SECONDS = 1800.0
"""Seconds without a repair after which an object is repaired at once again."""


class Repairs:
    """Past repairs by object. Times are Unix times in seconds."""

    def __init__(self) -> None:
        self._written: dict[Key, bytes] = {}
        self._counts: dict[Key, tuple[int, float]] = {}
        self._waiting: set[Key] = set()

    def written(self, key: Key, manifest: Manifest) -> None:
        """Record that the object was written as `manifest`."""
        self._written[key] = _digest(manifest)

    def is_written(self, key: Key, manifest: Manifest) -> bool:
        """Return whether the object was last written as `manifest`.

        If the object differs from that manifest now, somebody else has changed it.
        """
        return self._written.get(key) == _digest(manifest)

    def wait_seconds(self, key: Key, now: float) -> float:
        """Return the seconds until the object may be repaired; 0 or less if it may be repaired now."""
        count, last = self._counts.get(key, (0, now))
        if count < AT_ONCE or not last <= now < last + FORGET_SECONDS:
            return 0.0
        return last + min(FIRST_SECONDS * 2.0 ** min(count - AT_ONCE, 32), LONGEST_SECONDS) - now

    def begins_to_wait(self, key: Key) -> bool:
        """Return whether the object's repair begins to wait with this call."""
        begins = key not in self._waiting
        self._waiting.add(key)
        return begins

    def done(self, key: Key, now: float) -> None:
        """Record that the object was repaired at `now`."""
        count, last = self._counts.get(key, (0, now))
        is_old = not last <= now < last + FORGET_SECONDS
        self._counts[key] = (1 if is_old else count + 1, now)

    def forget(self, is_there: Callable[[Key], bool], now: float) -> None:
        """Forget objects that are gone, and repairs of long ago."""
        self._written = {key: digest for key, digest in self._written.items() if is_there(key)}
        self._counts = {
            key: one for key, one in self._counts.items() if one[1] <= now < one[1] + FORGET_SECONDS
        }
        self._waiting &= self._counts.keys()


def _digest(manifest: Manifest) -> bytes:
    return hashlib.sha256(orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)).digest()
