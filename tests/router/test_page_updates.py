"""An update serves all open pages, and each page has all changes, in order, whenever it opened and however slowly it reads."""

from __future__ import annotations

import heapq
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_router.page_updates import UPDATE_SECONDS, PageUpdates, Seen


class Changes:
    """Changes by number, of which an update lists those that are new; it records when updates were made."""

    def __init__(self) -> None:
        self.last = 0
        self.made: list[int | None] = []

    def make(self, since: int | None) -> bytes:
        self.made.append(since)
        return json.dumps([since is None, list(range((since or 0) + 1, self.last + 1))]).encode()


class Page:
    """An open page, which applies what it gets."""

    def __init__(self, updates: PageUpdates, now: float) -> None:
        self._updates = updates
        self.known = 0
        content, self.seen = updates.first(now)
        self._apply(content, is_first=True)

    def ask(self, now: float) -> None:
        content, self.seen = self._updates.next(self.seen, now)
        self._apply(content, is_first=False)

    def _apply(self, content: bytes, *, is_first: bool) -> None:
        is_whole, numbers = json.loads(content)
        assert is_whole == is_first
        if numbers:
            assert numbers[0] <= self.known + 1, "a change is missing"
            assert numbers[-1] >= self.known, "it is older than what the page has"
            self.known = numbers[-1]


def test_however_many_pages_are_open_an_update_is_made_once() -> None:
    changes = Changes()
    updates = PageUpdates(changes.make, lambda: changes.last)
    pages = [Page(updates, 0.01 * number) for number in range(8)]
    changes.made.clear()
    for turn in range(1, 5):
        changes.last += 3
        for number, page in enumerate(pages):
            page.ask(UPDATE_SECONDS * turn + 0.001 * number)
    assert changes.made == [0, 3, 6, 9]
    assert {page.known for page in pages} == {12}


def test_the_first_page_of_some_time_begins_anew() -> None:
    changes = Changes()
    updates = PageUpdates(changes.make, lambda: changes.last)
    Page(updates, 0.0).ask(UPDATE_SECONDS)
    changes.last = 1000
    page = Page(updates, 100.0)
    assert updates.seconds_left(100.0) == UPDATE_SECONDS
    changes.last = 1001
    page.ask(100.5)
    assert changes.made[-1] == 1000, "not all that was while no page was open"
    assert page.known == 1001


@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 0.0, 0.001, 0.3, 2.0]), min_size=1, max_size=20),
)
def test_each_page_has_all_changes_and_no_more_updates_are_made_than_intervals_pass(
    opened_at: list[float], delays: list[float]
) -> None:
    """`delays` are those with which pages ask, because their clients read slowly."""
    changes = Changes()
    updates = PageUpdates(changes.make, lambda: changes.last)
    pages: list[Page] = []
    turns = [
        (at, order, -1) for order, at in enumerate(opened_at)
    ]  # time, order, page or -1 for one that opens
    heapq.heapify(turns)
    shared: list[float] = []
    for order in range(100, 180):
        now, _, index = heapq.heappop(turns)
        changes.last += 1
        if index < 0:
            pages.append(Page(updates, now))
            index = len(pages) - 1
        else:
            number = pages[index].seen.number
            pages[index].ask(now)
            if pages[index].seen == Seen(number + 1, changes.last):
                shared.append(now)
        heapq.heappush(turns, (now + updates.seconds_left(now) + delays[order % len(delays)], order, index))
    apart = [later - earlier for earlier, later in pairwise(shared)]
    assert all(seconds == pytest.approx(UPDATE_SECONDS) or seconds > UPDATE_SECONDS for seconds in apart)
    for page in pages:
        page.ask(1000.0)
        page.ask(1001.0)
        assert page.known == changes.last
