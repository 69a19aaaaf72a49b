"""A CPU that makes copies beside its work as late as it may: only once somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from medha_worker.device import InOrder, Mark


class Late:
    """The end of copies that are made by the first one who waits for it."""

    def __init__(self, copies: Callable[[], None]) -> None:
        self._copies: Callable[[], None] | None = copies

    def wait(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            copies()

    def is_done(self) -> bool:
        return self._copies is None


def make_copies_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all CPU devices do that, so that whoever reads without waiting reads what was there before."""

    def beside(_: InOrder, copies: Callable[[], None]) -> Mark:
        return Late(copies)

    monkeypatch.setattr(InOrder, "beside", beside)
