"""Folds what happens to sequences into bars of a timeline: one bar per sequence, with a segment for each thing that it did.

A router feeds it from its own events and from what replicas report, and a controller from its own when it records.
So the page `/ui` draws both in the same way. A bar holds ids, lengths and times; neither token ids nor text.

The timeline is bounded: it keeps the last bars, open ones before ended ones, and merges the closest segments of a bar
that has too many. It has no clock. Every change gets a number, so that a reader can ask for what changed since.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any, Literal

MOST_BARS = 2000
"""Bars that a timeline keeps."""
MOST_DROPPED = 10_000
"""Dropped bars that it still reports as dropped; readers ask often enough to miss none."""
MOST_SEGMENTS = 96
"""Segments of one bar."""
STALL_TARGETS = 4.0
"""Time between two tokens, as a multiple of the TPOT target, that divides a decode into two segments."""
LEAST_STALL_SECONDS = 0.25

SegmentKind = Literal["waiting", "sent", "unreported", "chunk", "decode", "aside", "moved"]
"""Kinds of segments.

`waiting`: in the router, before its first replica. `sent`: at a replica, before its first chunk; without reports of
chunks, until its first token. `unreported`: the same, but some of its prompt was computed in that time. `chunk`: a chunk
of its prompt, or of what it has to compute again. `decode`: from one token to a later one. `aside`: it gave its KV back,
and waits. `moved`: its replica refused or lost it, and it waits in the router.
"""

# --- what happens ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Began:
    """A sequence has arrived. `due_seconds` and `tpot_target_seconds` are its targets; None if they are unknown."""

    id: str
    prompt_tokens: int
    service_class: str
    model: str = ""
    key: str = ""  # name of the client's API key
    due_seconds: float | None = None  # from its arrival to when its first token is due
    tpot_target_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A replica has the sequence from now on."""

    id: str
    replica: str


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk has been computed. `is_first`: before it, only cached KV was there."""

    id: str
    began: float
    tokens: int
    lane: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class Sampled:
    """Output tokens have arrived."""

    id: str
    tokens: int
    cached_tokens: int = 0  # of the prompt, with the first token


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The sequence has left its place in a replica, and waits."""

    id: str
    kind: Literal["aside", "moved"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence has ended. `outcome` is a finish reason, the kind of a failure, `cancelled`, or `moved` to another replica."""

    id: str
    outcome: str


Happening = Began | Placed | Computed | Sampled | Interrupted | Finished


# --- bars --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Segment:
    """A part of a bar. Times are seconds of the timeline's clock; `end` is None while it goes on."""

    kind: SegmentKind
    start: float
    end: float | None
    change: int  # number of its last change
    tokens: int = 0  # computed or sampled in it
    parts: int = 1  # chunks, if it is several that were merged
    lane: int | None = None

    def as_row(self, origin: float) -> list[Any]:
        """Return it as JSON: kind, start, end, tokens; of a chunk also its parts and its lane. Times count from `origin`."""
        row = [self.kind, _from(self.start, origin), _from(self.end, origin), self.tokens]
        return row if self.lane is None else [*row, self.parts, self.lane]


@dataclass(slots=True)
class Bar:
    """A sequence: its facts, and its segments in order of time."""

    began: Began
    number: int  # counts the bars of the timeline
    arrived_at: float
    change: int  # number of its last change
    first_change: int
    facts_change: int  # number of the last change beside its segments
    segments: list[Segment] = field(default_factory=list)
    replica: str = ""
    cached_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None

    @property
    def last(self) -> Segment:
        return self.segments[-1]

    def changes(self, since: int, origin: float) -> dict[str, Any]:
        """Return as JSON what has changed since change number `since`; 0: all of it.

        `segments` replaces those from index `from` on.
        """
        first = len(self.segments)
        while first and self.segments[first - 1].change > since:
            first -= 1
        found: dict[str, Any] = {
            "id": self.began.id,
            "from": first,
            "segments": [segment.as_row(origin) for segment in self.segments[first:]],
        }
        if self.facts_change > since:
            found |= {
                "cached": self.cached_tokens,
                "first": _from(self.first_token_at, origin),
                "ended": _from(self.ended_at, origin),
                "outcome": self.outcome,
                "replica": self.replica,
            }
        if self.first_change > since:
            due = self.began.due_seconds
            found |= {
                "number": self.number,
                "model": self.began.model,
                "class": self.began.service_class,
                "key": self.began.key,
                "prompt": self.began.prompt_tokens,
                "arrived": _from(self.arrived_at, origin),
                "due": None if due is None else _from(self.arrived_at + due, origin),
                "tpot": self.began.tpot_target_seconds,
            }
        return found


class Timeline:
    """The bars of the last sequences."""

    def __init__(self, origin: float, most_bars: int = MOST_BARS) -> None:
        """Times in JSON count from `origin`, a time of the clock of `take`."""
        self.origin = origin
        self.change = 0
        """Number of the last change."""
        self._most_bars = most_bars
        self._open: dict[str, Bar] = {}
        self._ended: dict[int, Bar] = {}  # by number: an id may come again
        self._by_change: dict[int, Bar] = {}  # by number, the last changed one last
        self._bars = 0
        self._dropped: deque[tuple[int, str, int]] = deque(maxlen=MOST_DROPPED)  # change, id, number

    def __len__(self) -> int:
        return len(self._by_change)

    def __iter__(self) -> Iterator[Bar]:
        """Yield all bars in order of arrival."""
        yield from sorted(self._by_change.values(), key=lambda bar: bar.number)

    @property
    def open(self) -> int:
        """Number of bars of sequences that have not ended."""
        return len(self._open)

    def changes(self, since: int = 0) -> list[dict[str, Any]]:
        """Return as JSON the bars that have changed since change number `since`, in order of arrival.

        Before them come those that were dropped since then: no further change of them is returned, not even their ends.
        """
        dropped = takewhile(lambda one: one[0] > since, reversed(self._dropped) if since else ())
        gone = [{"id": id_, "number": number, "dropped": True} for _, id_, number in dropped]
        changed = takewhile(lambda bar: bar.change > since, reversed(self._by_change.values()))
        return gone + [bar.changes(since, self.origin) for bar in sorted(changed, key=lambda bar: bar.number)]

    def take(self, happening: Happening, at: float) -> None:
        """Add what happened at `at`. What concerns a sequence without an open bar is ignored."""
        if isinstance(happening, Began):
            self._begin(happening, at)
            return
        bar = self._open.get(happening.id)
        if bar is None:
            return
        self._changed(bar)
        match happening:
            case Placed(replica=replica):
                bar.replica, bar.facts_change = replica, self.change
                self._append(bar, "sent", at, None)
            case Computed():
                self._compute(bar, happening, at)
            case Sampled():
                self._sample(bar, happening, at)
            case Interrupted(kind=kind):
                self._append(bar, kind, at, None)
            case Finished(outcome=outcome):
                self._close(bar, at)
                bar.ended_at, bar.outcome, bar.facts_change = at, outcome, self.change
                del self._open[happening.id]
                self._ended[bar.number] = bar

    def _begin(self, began: Began, at: float) -> None:
        if began.id in self._open:
            return
        self._bars += 1
        number = self.change + 1
        bar = Bar(began, self._bars, at, number, number, number)
        self._changed(bar)
        self._append(bar, "waiting", at, None)
        self._open[began.id] = bar
        if len(self) > self._most_bars:
            bars: dict[Any, Bar] = self._ended or self._open
            oldest = bars.pop(next(iter(bars)))
            self._dropped.append((self.change, oldest.began.id, oldest.number))
            del self._by_change[oldest.number]

    def _changed(self, bar: Bar) -> None:
        self.change += 1
        bar.change = self.change
        self._by_change.pop(bar.number, None)
        self._by_change[bar.number] = bar

    def _compute(self, bar: Bar, chunk: Computed, at: float) -> None:
        last = bar.last
        if last.kind == "sent" and not chunk.is_first:
            last.kind, last.change = "unreported", self.change
        # Stages of a pipeline work on several chunks of one prompt at a time: each is shown from the end of the last.
        began = chunk.began
        if last.end is not None:
            began = max(began, last.end)
        began = min(max(began, last.start), at)
        self._append(bar, "chunk", began, at)
        bar.last.tokens, bar.last.lane = chunk.tokens, chunk.lane

    def _sample(self, bar: Bar, sampled: Sampled, at: float) -> None:
        if not sampled.tokens:
            return
        if bar.last.kind == "sent":  # no chunk was reported, and one was computed
            bar.last.kind, bar.last.change = "unreported", self.change
        if bar.first_token_at is None:
            bar.first_token_at, bar.cached_tokens, bar.facts_change = at, sampled.cached_tokens, self.change
        if bar.last.kind == "decode" and bar.last_token_at is not None:
            target = bar.began.tpot_target_seconds or 0.0
            if at - bar.last_token_at <= max(LEAST_STALL_SECONDS, STALL_TARGETS * target * sampled.tokens):
                bar.last.end, bar.last.change = at, self.change
                bar.last.tokens += sampled.tokens
                bar.last_token_at = at
                return
        bar.last_token_at = at
        self._append(bar, "decode", at, at)
        bar.last.tokens = sampled.tokens

    def _append(self, bar: Bar, kind: SegmentKind, start: float, end: float | None) -> None:
        """Begin a segment, and end the one before it."""
        if bar.segments:
            self._close(bar, start)
            if bar.last.end == bar.last.start and bar.last.kind in ("waiting", "sent", "moved"):
                bar.segments.pop()  # it left at once
        bar.segments.append(Segment(kind, start, end, self.change))
        if len(bar.segments) > MOST_SEGMENTS:
            self._merge(bar)

    def _close(self, bar: Bar, at: float) -> None:
        if bar.last.end is None:
            bar.last.end, bar.last.change = at, self.change

    def _merge(self, bar: Bar) -> None:
        """Merge the segments of one kind that are closest to each other, until half of them are left, if so many can be."""
        segments = bar.segments
        gaps = sorted(
            (after.start - before.end, index)
            for index, (before, after) in enumerate(pairwise(segments[:-1]), start=1)
            if before.end is not None and (before.kind, before.lane) == (after.kind, after.lane)
        )
        joined = {index for _, index in gaps[: len(segments) // 2]}
        kept: list[Segment] = []
        for index, segment in enumerate(segments):
            if index in joined:
                before = kept[-1]
                before.end = segment.end
                before.tokens += segment.tokens
                before.parts += segment.parts
            else:
                kept.append(segment)
        if not joined:  # they alternate: the oldest is the least missed
            kept = segments[1:]
        for segment in kept:
            segment.change = self.change
        bar.segments = kept


def _from(at: float | None, origin: float) -> float | None:
    return None if at is None else round(at - origin, 4)
