"""The spans of a sequence at a replica: from the same happenings as its bar, in order, within bounds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from medha.observing.timeline import (
    MOST_SEGMENTS,
    Began,
    Computed,
    Finished,
    Happening,
    Interrupted,
    Placed,
    Sampled,
    Timeline,
)
from medha.wire.messages import Extent, Step, StepEntry
from medha_traces import attribute_names as names
from medha_traces.sequence_spans import (
    LONGEST_TRACE,
    MOST_PREEMPTIONS,
    MOST_SEQUENCES,
    SequenceSpans,
    SpanFacts,
)


def spans() -> SequenceSpans:
    found = SequenceSpans("r0")
    found.announce("a", "the trace")
    found.take(Began("a", 100, "default"), 1.0)
    found.take(Placed("a", "r0"), 2.0)
    return found


def step(number: int, *ids: str, lane: int = 0) -> Step:
    entries = tuple(StepEntry(one, lane, (Extent(0, 8),), False) for one in ids)
    return Step(number, 0, entries, lanes=(lane,))


def chunk(at: float, *, is_first: bool = False) -> Computed:
    return Computed("a", at, 10, 0, is_first)


def only(found: SequenceSpans) -> SpanFacts:
    ((trace, facts),) = found.ended()
    assert trace == "the trace"
    return facts


def test_a_sequence_has_a_span_for_each_thing_that_it_did() -> None:
    found = spans()
    for happening, at in (
        (chunk(3.0, is_first=True), 4.0),
        (chunk(5.0), 6.0),
        (Sampled("a", 1, 16), 6.0),
        (Sampled("a", 1), 6.1),
        (Interrupted("a", "aside"), 7.0),
        (chunk(9.0), 10.0),
        (Sampled("a", 1), 10.0),
        (Finished("a", "stop"), 11.0),
    ):
        found.take(happening, at)
    facts = only(found)
    assert (facts.name, facts.start, facts.end, facts.error) == (names.AT_REPLICA, 2.0, 11.0, None)
    assert [(part.name, part.start, part.end) for part in facts.children] == [
        (names.WAIT, 2.0, 3.0),
        (names.CHUNK, 3.0, 4.0),
        (names.CHUNK, 5.0, 6.0),
        (names.DECODE, 6.0, 6.1),
        (names.ASIDE, 7.0, 9.0),
        (names.CHUNK, 9.0, 10.0),
        (names.DECODE, 10.0, 10.0),
    ]
    assert facts.attributes[names.OUTPUT_TOKENS] == 3
    assert facts.attributes[names.CACHED_TOKENS] == 16
    assert [(event.name, event.at) for event in facts.events] == [(names.FIRST_SAMPLED, 6.0)]
    assert len(found) == 0


def test_a_prefill_that_steps_of_others_pass_by_is_preempted() -> None:
    found = spans()
    found.launched(step(1, "b"), 2.5)  # it waits, and was not begun
    found.launched(step(2, "a"), 3.0)
    found.launched(step(3, "b"), 4.0)
    found.launched(step(4, "b", "c"), 5.0)
    found.launched(step(5, "b", lane=1), 5.5)  # of another lane
    found.launched(step(6), 5.6)  # only releases
    found.launched(step(7, "a", "b"), 6.0)
    found.take(Sampled("a", 1), 7.0)
    found.launched(step(8, "b"), 8.0)  # a decode that waits is not preempted
    found.launched(step(9, "a"), 9.0)
    found.take(Finished("a", "length"), 10.0)
    facts = only(found)
    (event, _) = facts.events
    assert (event.name, event.at) == (names.PREEMPTED, 4.0)
    assert event.attributes == {names.PREEMPTED_SECONDS: 2.0, names.PREEMPTING_STEPS: 2}
    assert facts.attributes[names.PREEMPTIONS] == 1


def test_events_and_spans_are_bounded_and_the_rest_is_counted() -> None:
    found = spans()
    times = 3 * MOST_PREEMPTIONS
    for number in range(times + 1):
        at = 3.0 + number
        found.launched(step(2 * number, "a"), at)
        found.take(chunk(at, is_first=number == 0), at + 0.2)
        found.launched(step(2 * number + 1, "b"), at + 0.2)
    found.take(Sampled("a", 1), 1000.0)
    found.take(Finished("a", "stop"), 1001.0)
    facts = only(found)
    assert facts.attributes[names.PREEMPTIONS] == times
    assert len([event for event in facts.events if event.name == names.PREEMPTED]) == MOST_PREEMPTIONS
    chunks = [part.attributes for part in facts.children if part.name == names.CHUNK]
    assert len(chunks) < MOST_SEGMENTS
    assert sum(int(str(one[names.CHUNKS])) for one in chunks) == times + 1
    assert sum(int(str(one[names.TOKENS])) for one in chunks) == 10 * (times + 1)


def test_what_is_not_announced_or_has_gone_is_not_traced_and_nothing_piles_up() -> None:
    found = SequenceSpans("r0")
    found.take(Began("b", 10, "default"), 1.0)
    found.take(Finished("b", "stop"), 2.0)
    assert found.ended() == []
    found.announce("long", "x" * (LONGEST_TRACE + 1))
    assert len(found) == 0
    for number in range(3 * MOST_SEQUENCES):  # they never begin: their tokens do not arrive
        found.announce(str(number), "t")
    assert len(found) == MOST_SEQUENCES


def test_a_lost_epoch_ends_all_spans_with_an_error() -> None:
    found = spans()
    found.take(chunk(3.0, is_first=True), 4.0)
    found.end_all("rank_lost", 5.0)
    facts = only(found)
    assert (facts.end, facts.error, facts.attributes[names.OUTCOME]) == (5.0, "rank_lost", "rank_lost")


HAPPENINGS = st.sampled_from(
    [chunk(0.0), chunk(0.0, is_first=True), Sampled("a", 2), Sampled("a", 0), Interrupted("a", "aside")]
)


@given(st.lists(st.tuples(HAPPENINGS, st.floats(0.001, 3.0)), max_size=250))
def test_the_spans_of_any_history_are_the_segments_of_its_bar(history: list[tuple[Happening, float]]) -> None:
    found, timeline, now = spans(), Timeline(0.0), 2.0
    timeline.take(Began("a", 100, "default"), 1.0)
    timeline.take(Placed("a", "r0"), 2.0)
    for happening, seconds in history:
        now += seconds
        if isinstance(happening, Computed):
            happening = Computed("a", now - seconds / 2, 10, 0, happening.is_first)
        found.take(happening, now)
        timeline.take(happening, now)
    found.take(Finished("a", "stop"), now + 1)
    timeline.take(Finished("a", "stop"), now + 1)
    facts = only(found)
    (bar,) = timeline
    drawn = [segment for segment in bar.segments if segment.kind != "waiting"]
    assert [(part.start, part.end) for part in facts.children] == [(one.start, one.end) for one in drawn]
    for before, after in pairwise(facts.children):
        assert before.end <= after.start
    assert all(facts.start <= part.start <= part.end <= facts.end for part in facts.children)
