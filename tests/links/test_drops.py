"""A process counts what it drops, and its controller counts the growth of the totals that it reports."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from medha.errors import DROP_REASONS, WireInvalid
from medha.wire.frames import encode
from medha.wire.messages import RankHello
from medha_links.drops import MOST_MESSAGES, Drops, RankDrops

LINKS = ("control", "tokens")


def test_a_process_reports_totals_by_link_and_reason() -> None:
    drops = Drops(logging.getLogger("test"))
    assert drops.totals() == ()
    for link, reason in (("control", "type"), ("tokens", "type"), ("control", "type"), ("control", "size")):
        drops.drop(link, WireInvalid("nonsense", reason=reason))
    assert sorted(drops.totals()) == [("control", "size", 1), ("control", "type", 2), ("tokens", "type", 1)]


def test_totals_weigh_little_however_much_was_dropped() -> None:
    totals = tuple((link, reason, MOST_MESSAGES) for link in LINKS for reason in DROP_REASONS)
    assert len(encode(RankHello(0, "a", dropped=totals))[0]) < 1024


def test_totals_grow_once_and_begin_anew_with_another_process() -> None:
    ranks = RankDrops(LINKS)
    assert ranks.growth(0, "a", ()) == Counter()
    assert ranks.growth(0, "a", (("control", "type", 2),)) == {("control", "type"): 2}
    assert ranks.growth(0, "a", (("control", "type", 2),)) == Counter()
    assert ranks.growth(0, "a", (("control", "type", 5), ("tokens", "size", 1))) == {
        ("control", "type"): 3,
        ("tokens", "size"): 1,
    }
    assert ranks.growth(1, "a", (("control", "type", 4),)) == {("control", "type"): 4}
    assert ranks.growth(0, "b", ()) == Counter()
    assert ranks.growth(0, "b", (("control", "type", 1),)) == {("control", "type"): 1}


def test_totals_that_come_late_take_nothing_back_and_are_not_counted_twice() -> None:
    ranks = RankDrops(LINKS)
    assert ranks.growth(0, "a", (("control", "type", 5),)) == {("control", "type"): 5}
    assert ranks.growth(0, "a", (("control", "type", 3),)) == Counter()
    assert ranks.growth(0, "a", (("control", "type", 6),)) == {("control", "type"): 1}


def test_links_and_reasons_that_are_not_known_make_no_new_labels() -> None:
    totals = (("elsewhere", "type", 1), ("control", "of a later release", 1), ("control", "type", 1))
    assert RankDrops(LINKS).growth(0, "a", totals) == {("control", "type"): 1}


@pytest.mark.parametrize("messages", [-1, MOST_MESSAGES + 1, 10**400])
def test_what_is_no_number_of_messages_is_refused_as_a_whole(messages: int) -> None:
    ranks = RankDrops(LINKS)
    with pytest.raises(WireInvalid, match=r"rank 0 has dropped .* messages on tokens \(size\)"):
        ranks.growth(0, "a", (("control", "type", 1), ("tokens", "size", messages)))
    assert ranks.growth(0, "a", (("control", "type", 1),)) == {("control", "type"): 1}
