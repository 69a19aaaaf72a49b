"""The planes on which the bytes of KV blocks go from a rank of one replica to a rank of another: their protocol, by name.

Questions and answers always go over encrypted sockets: who may read what, and the checksums (`peer_server`, `peer_reader`).
A plane carries the bytes of an answer. Both ends name themselves there, so a rank whose plane the other one lacks gets the
bytes with the answer, as from every rank of an earlier version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from medha.api.kv_cache_spec import PeerPlane
from medha_worker.model.kv_files import Rows


class PlaneFailed(Exception):
    """A plane does not carry the bytes of an answer, or cannot be opened here."""


class GivingEnd(Protocol):
    """The end of the rank that gives. One thread uses it."""

    def offer(self, rows: Rows, /) -> tuple[dict[str, Any], memoryview] | None:
        """Make the bytes of some blocks reachable; return what the answer says of them, and the last frame of the answer.

        Return None if there is no place for them now. Then the bytes themselves go with the answer.
        """

    def close(self) -> None:
        """Let nobody reach any bytes."""


class TakingEnd(Protocol):
    """The end of the rank that takes. One thread uses it."""

    @property
    def name(self) -> str:
        """Return the name of the plane on which it takes bytes now; empty if they are to come with the answers."""

    def take(self, offered: Mapping[str, Any], size_bytes: int, /) -> memoryview:
        """Return the bytes that an answer has offered, until the next call.

        Raises:
            PlaneFailed: they do not come.
        """

    def close(self) -> None:
        """Take nothing more."""


class WithAnswers:
    """Both ends of the plane `sockets`: the bytes are the last frame of an answer."""

    name = ""

    def offer(self, _rows: Rows, /) -> tuple[dict[str, Any], memoryview] | None:
        """Return None: the bytes go with the answer."""
        return None

    def take(self, _offered: Mapping[str, Any], _size_bytes: int, /) -> memoryview:
        """Refuse: nothing was asked for that could be offered.

        Raises:
            PlaneFailed: always.
        """
        raise PlaneFailed("it offers its bytes in a way that was not asked for")

    def close(self) -> None:
        """Do nothing."""


class Plane(NamedTuple):
    """The calls that open both ends of a plane for pieces of at most so many bytes; each raises `PlaneFailed`."""

    giving: Callable[[int], GivingEnd]
    taking: Callable[[int], TakingEnd]


def plane(name: PeerPlane) -> Plane:
    """Return the plane of this name. Its library is imported when an end is opened."""
    planes: dict[PeerPlane, Plane] = {
        "sockets": Plane(lambda _: WithAnswers(), lambda _: WithAnswers()),
        "nixl": Plane(_nixl_giving, _nixl_taking),
    }
    return planes[name]


def _nixl_giving(piece_bytes: int) -> GivingEnd:
    from medha_worker.rank.nixl_plane import NixlGiving

    return NixlGiving(piece_bytes)


def _nixl_taking(piece_bytes: int) -> TakingEnd:
    from medha_worker.rank.nixl_plane import NixlTaking

    return NixlTaking(piece_bytes)
