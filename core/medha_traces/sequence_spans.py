"""Folds what happens to a sequence at a replica into spans: one for its time there, and one for each segment of its bar.

The bars are those of `medha.observing.timeline`, which the page `/ui` draws, so that page and traces show the same. A bar merges the
closest segments when it has too many, and the spans are bounded with it. Everything is pure: times come in, and nothing
imports OpenTelemetry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from medha.observing.timeline import (
    Bar,
    Began,
    Finished,
    Happening,
    Placed,
    Sampled,
    Segment,
    SegmentKind,
    Timeline,
)
from medha.wire.messages import Step
from medha_traces import attribute_names as names

MOST_SEQUENCES = 4096
"""Sequences of one replica that are traced at the same time; the oldest make room."""
MOST_PREEMPTIONS = 32
"""Preemptions of one sequence that are events of their own; further ones are only counted."""

LONGEST_TRACE = 1024
"""Longest text of a trace context that a `Submit` may have, in characters; a longer one is not followed."""

Value = str | bool | int | float | Sequence[str]

_NAMES: Final[Mapping[SegmentKind, str]] = {
    "waiting": names.QUEUE,
    "sent": names.WAIT,
    "unreported": names.CHUNK,
    "chunk": names.CHUNK,
    "decode": names.DECODE,
    "aside": names.ASIDE,
    "moved": names.QUEUE,
}
_GOOD_OUTCOMES = ("stop", "length", "cancelled", "moved")


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event of a span; times are seconds of the clock of the fold."""

    name: str
    at: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanFacts:
    """A span that has ended, with its children in order of time."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None
    children: tuple[SpanFacts, ...] = ()


@dataclass(slots=True)
class _Traced:
    """A sequence that is traced."""

    trace: str  # of its `Submit`
    timeline: Timeline
    placed_at: float = 0.0
    output_tokens: int = 0
    in_prefill: bool = False  # a step has a chunk of it, and no token was sampled since
    lane: int = 0
    passed_by: int = 0  # steps of its lane since then that had others and not it
    passed_since: float = 0.0
    preemptions: int = 0
    preempted_seconds: float = 0.0
    events: list[SpanEvent] = field(default_factory=list)


class SequenceSpans:
    """The sequences of a replica that are traced, from their `Submit` until their end."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._announced: OrderedDict[str, str] = OrderedDict()  # trace by id, of those that have not begun
        self._open: OrderedDict[str, _Traced] = OrderedDict()
        self._ended: list[tuple[str, SpanFacts]] = []

    def __len__(self) -> int:
        return len(self._announced) + len(self._open)

    def announce(self, id_: str, trace: str) -> None:
        """Trace the sequence of this id, once it has begun."""
        if len(trace) > LONGEST_TRACE:
            return
        self._announced[id_] = trace
        if len(self._announced) > MOST_SEQUENCES:
            self._announced.popitem(last=False)

    def take(self, happening: Happening, at: float) -> None:
        """Add what happened to a sequence; it is ignored unless the sequence is traced."""
        if isinstance(happening, Began):
            self._begin(happening, at)
            return
        traced = self._open.get(happening.id)
        if traced is None:
            return
        traced.timeline.take(happening, at)
        match happening:
            case Placed():
                traced.placed_at = at
            case Sampled(tokens=tokens):
                traced.output_tokens += tokens
                traced.in_prefill = traced.in_prefill and not tokens
            case Finished():
                del self._open[happening.id]
                self._ended.append((traced.trace, self._facts(traced)))

    def launched(self, step: Step, at: float) -> None:
        """Note which prefills a step passes by: others run in it, and they do not."""
        entries = {entry.id: entry for entry in step.entries}
        if not entries:
            return
        for id_, traced in self._open.items():
            entry = entries.get(id_)
            if entry is not None:
                if traced.passed_by:
                    self._preempted(traced, at)
                traced.lane = entry.lane
                traced.in_prefill = traced.in_prefill or not traced.output_tokens
            elif traced.in_prefill and traced.lane in step.lanes:
                traced.passed_since = at if not traced.passed_by else traced.passed_since
                traced.passed_by += 1

    def end_all(self, outcome: str, at: float) -> None:
        """End every sequence: the replica has lost them."""
        for id_ in list(self._open):
            self.take(Finished(id_, outcome), at)
        self._announced.clear()

    def ended(self) -> list[tuple[str, SpanFacts]]:
        """Return the spans of the sequences that have ended since the last call, each with the trace of its `Submit`."""
        found, self._ended = self._ended, []
        return found

    def _begin(self, began: Began, at: float) -> None:
        trace = self._announced.pop(began.id, None)
        if trace is None:
            return
        timeline = Timeline(0.0, most_bars=1)
        timeline.take(began, at)
        self._open[began.id] = _Traced(trace, timeline, at)
        if len(self._open) > MOST_SEQUENCES:
            self._open.popitem(last=False)

    @staticmethod
    def _preempted(traced: _Traced, at: float) -> None:
        seconds = at - traced.passed_since
        traced.preemptions += 1
        traced.preempted_seconds += seconds
        if traced.preemptions <= MOST_PREEMPTIONS:
            attributes = {
                names.PREEMPTED_SECONDS: round(seconds, 6),
                names.PREEMPTING_STEPS: traced.passed_by,
            }
            traced.events.append(SpanEvent(names.PREEMPTED, traced.passed_since, attributes))
        traced.passed_by = 0

    def _facts(self, traced: _Traced) -> SpanFacts:
        (bar,) = traced.timeline
        assert bar.ended_at is not None
        assert bar.outcome is not None
        attributes: dict[str, Value] = {
            names.SEQUENCE_ID: bar.began.id,
            names.REPLICA: self._replica,
            names.SERVICE_CLASS: bar.began.service_class,
            names.INPUT_TOKENS: bar.began.prompt_tokens,
            names.CACHED_TOKENS: bar.cached_tokens,
            names.OUTPUT_TOKENS: traced.output_tokens,
            names.OUTCOME: bar.outcome,
        }
        if traced.preemptions:
            attributes[names.PREEMPTIONS] = traced.preemptions
            attributes[names.PREEMPTED_SECONDS] = round(traced.preempted_seconds, 6)
        events = list(traced.events)
        if bar.first_token_at is not None:
            events.append(SpanEvent(names.FIRST_SAMPLED, bar.first_token_at))
        return SpanFacts(
            names.AT_REPLICA,
            traced.placed_at,
            bar.ended_at,
            attributes,
            tuple(sorted(events, key=lambda event: event.at)),
            None if bar.outcome in _GOOD_OUTCOMES else bar.outcome,
            tuple(_segments(bar, traced.placed_at)),
        )


def _segments(bar: Bar, since: float) -> Sequence[SpanFacts]:
    """Return a span for each segment of a bar but those before the replica had it."""
    return [
        SpanFacts(_NAMES[one.kind], max(one.start, since), one.end, _attributes(one))
        for one in bar.segments
        if one.kind != "waiting" and one.end is not None
    ]


def _attributes(segment: Segment) -> dict[str, Value]:
    attributes: dict[str, Value] = {}
    if segment.kind in ("chunk", "decode"):
        attributes[names.TOKENS] = segment.tokens
    if segment.kind == "chunk":
        attributes[names.CHUNKS] = segment.parts
        if segment.lane is not None:
            attributes[names.LANE] = segment.lane
    return attributes
