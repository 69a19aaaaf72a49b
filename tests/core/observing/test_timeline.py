"""The fold of what happens into bars: what a bar shows, what a reader gets who asks for changes, and its bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.observing.timeline import (
    MOST_SEGMENTS,
    Bar,
    Began,
    Computed,
    Finished,
    Happening,
    Interrupted,
    Placed,
    Sampled,
    Timeline,
)


def begun(*names: str, at: float = 0.0, **fields: Any) -> Timeline:
    timeline = Timeline(0.0, **fields)
    for name in names:
        timeline.take(Began(name, 100, "default", due_seconds=2.0, tpot_target_seconds=0.1), at)
    return timeline


def chunk(timeline: Timeline, name: str, began: float, ended: float, *, is_first: bool = False) -> None:
    timeline.take(Computed(name, began, 10, 0, is_first), ended)


def shown(timeline: Timeline, name: str) -> list[tuple[str, float, float | None]]:
    bar = next(bar for bar in timeline if bar.began.id == name)
    return [(segment.kind, segment.start, segment.end) for segment in bar.segments]


def test_a_bar_shows_where_a_request_waited_and_what_it_computed() -> None:
    timeline = begun("a")
    timeline.take(Placed("a", "r0"), 1.0)
    chunk(timeline, "a", 1.5, 2.0, is_first=True)
    chunk(timeline, "a", 3.0, 4.0)  # others had a step in between
    timeline.take(Sampled("a", 1, 64), 4.0)
    timeline.take(Sampled("a", 1), 4.1)
    timeline.take(Finished("a", "stop"), 4.1)
    assert shown(timeline, "a") == [
        ("waiting", 0.0, 1.0),
        ("sent", 1.0, 1.5),
        ("chunk", 1.5, 2.0),
        ("chunk", 3.0, 4.0),
        ("decode", 4.0, 4.1),
    ]
    (found,) = timeline.changes()
    assert (found["first"], found["ended"], found["outcome"], found["due"]) == (4.0, 4.1, "stop", 2.0)
    assert (found["cached"], found["replica"], found["prompt"]) == (64, "r0", 100)


def test_chunks_that_stages_compute_at_the_same_time_follow_each_other() -> None:
    timeline = begun("a")
    timeline.take(Placed("a", "r0"), 0.5)
    chunk(timeline, "a", 1.0, 2.0, is_first=True)
    chunk(timeline, "a", 1.4, 2.3)
    assert shown(timeline, "a")[2:] == [("chunk", 1.0, 2.0), ("chunk", 2.0, 2.3)]


def test_tokens_that_are_long_in_coming_divide_a_decode() -> None:
    timeline = begun("a")
    for at in (1.0, 1.3, 1.7, 2.2, 2.3):  # four times the target is 0.4 s
        timeline.take(Sampled("a", 1), at)
    assert shown(timeline, "a")[1:] == [("decode", 1.0, 1.7), ("decode", 2.2, 2.3)]


@pytest.mark.parametrize("kind", ["aside", "moved"])
def test_a_request_that_left_its_place_waits_until_it_computes_again(kind: Any) -> None:
    timeline = begun("a")
    timeline.take(Placed("a", "r0"), 0.0)
    chunk(timeline, "a", 0.1, 0.2, is_first=True)
    timeline.take(Sampled("a", 1), 0.2)
    timeline.take(Interrupted("a", kind), 0.3)
    chunk(timeline, "a", 0.8, 0.9)
    assert shown(timeline, "a")[2:] == [("decode", 0.2, 0.2), (kind, 0.3, 0.8), ("chunk", 0.8, 0.9)]


def test_time_at_a_replica_is_unreported_unless_its_first_chunk_was_reported() -> None:
    timeline = begun("from its first chunk", "in the midst of its prefill", "never")
    for name in ("from its first chunk", "in the midst of its prefill", "never"):
        timeline.take(Placed(name, "r0"), 0.1)
    chunk(timeline, "from its first chunk", 0.5, 0.6, is_first=True)
    chunk(timeline, "in the midst of its prefill", 0.5, 0.6)
    timeline.take(Sampled("never", 1), 0.7)
    kinds = {bar.began.id: bar.segments[1].kind for bar in timeline}
    assert list(kinds.values()) == ["sent", "unreported", "unreported"]


def test_a_segment_without_length_is_left_out() -> None:
    timeline = begun("a")
    timeline.take(Placed("a", "r0"), 0.0)
    assert shown(timeline, "a") == [("sent", 0.0, None)]


def test_what_concerns_a_sequence_that_has_no_open_bar_is_ignored() -> None:
    timeline = begun("a")
    timeline.take(Finished("a", "stop"), 1.0)
    before = timeline.changes()
    for happening in (Placed("a", "r0"), Sampled("b", 1), Finished("a", "length")):
        timeline.take(happening, 2.0)
    assert timeline.changes() == before


def test_the_oldest_bars_go_first_and_open_ones_last() -> None:
    timeline = begun("open", "ended", "b", most_bars=3)
    timeline.take(Finished("ended", "stop"), 1.0)
    timeline.take(Began("c", 1, "default"), 2.0)
    assert [bar.began.id for bar in timeline] == ["open", "b", "c"]
    timeline.take(Began("d", 1, "default"), 3.0)  # none has ended
    assert [bar.began.id for bar in timeline] == ["b", "c", "d"]


def test_a_reader_gets_each_dropped_bar_once() -> None:
    timeline = begun("a", "b", most_bars=2)
    since = timeline.change
    timeline.take(Began("c", 1, "default"), 2.0)
    gone, new = timeline.changes(since)
    assert gone == {"id": "a", "number": 1, "dropped": True}
    assert new["id"] == "c"
    assert timeline.changes(timeline.change) == []
    assert [bar["id"] for bar in timeline.changes()] == ["b", "c"]


def test_a_bar_with_too_many_segments_keeps_the_longest_interruptions_and_every_token() -> None:
    timeline = begun("a")
    at, long_pauses = 1.0, []
    for index in range(10 * MOST_SEGMENTS):
        if index % 100 == 50:
            long_pauses.append((at, at + 5.0))
            at += 5.0
        chunk(timeline, "a", at, at + 0.01)
        at += 0.012
    (bar,) = timeline
    chunks = [segment for segment in bar.segments if segment.kind == "chunk"]
    assert len(bar.segments) <= MOST_SEGMENTS
    assert sum(segment.tokens for segment in chunks) == 10 * 10 * MOST_SEGMENTS
    assert sum(segment.parts for segment in chunks) == 10 * MOST_SEGMENTS
    pauses = [
        (before.end, after.start)
        for before, after in pairwise(chunks)
        if before.end is not None and after.start - before.end > 1.0
    ]
    assert [(round(since, 3), round(until, 3)) for since, until in pauses] == [
        (round(since - 0.002, 3), round(until, 3)) for since, until in long_pauses
    ]


NAMES = st.sampled_from(["a", "b", "c", "d"])
HAPPENINGS = st.one_of(
    NAMES.map(lambda name: Began(name, 50, "default", tpot_target_seconds=0.1)),
    NAMES.map(lambda name: Placed(name, "r0")),
    st.builds(Computed, NAMES, st.floats(0.0, 40.0), st.integers(1, 9), st.integers(0, 1), st.booleans()),
    st.builds(Sampled, NAMES, st.integers(0, 3)),
    st.builds(Interrupted, NAMES, st.sampled_from(["aside", "moved"])),
    st.builds(Finished, NAMES, st.sampled_from(["stop", "internal"])),
)


def read(bars: dict[int, dict[str, Any]], numbers: dict[str, int], changes: list[dict[str, Any]]) -> None:
    """Apply changes as the page does."""
    for change in changes:
        if change.get("dropped"):
            if bars.get(change["number"], {}).get("ended", 0.0) is None:
                del bars[change["number"]]
            continue
        number = numbers[change["id"]] = change.get("number", numbers.get(change["id"]))
        bar = bars.setdefault(number, {"segments": []})
        segments = [*bar["segments"][: change["from"]], *change["segments"]]
        bar.update({name: value for name, value in change.items() if name not in ("from", "segments")})
        bar["segments"] = segments


@given(
    events=st.lists(st.tuples(st.floats(0.0, 1.0), HAPPENINGS, st.booleans()), max_size=80),
    most=st.integers(1, 5),
)
def test_a_reader_of_changes_sees_the_same_bars_as_one_who_reads_everything(
    events: list[tuple[float, Happening, bool]], most: int
) -> None:
    timeline, now, since = Timeline(0.0, most_bars=most), 0.0, 0
    bars: dict[int, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    for pause, happening, reads in events:
        now += pause
        timeline.take(happening, now)
        if reads:
            read(bars, numbers, timeline.changes(since))
            since = timeline.change
    read(bars, numbers, timeline.changes(since))
    for whole in timeline.changes():
        seen = bars[whole["number"]]
        assert seen == {name: value for name, value in whole.items() if name != "from"}
    still_open = {number for number, bar in bars.items() if bar["ended"] is None}
    assert still_open <= {bar.number for bar in timeline}
    for bar in timeline:
        assert_in_order(bar, now)
    assert len(timeline) <= most


def assert_in_order(bar: Bar, now: float) -> None:
    """Segments follow each other, and only the last one may be open."""
    for before, after in pairwise(bar.segments):
        assert before.end is not None
        assert before.start <= before.end <= after.start
    assert bar.last.start <= now
    assert bar.ended_at is None or bar.last.end is not None
